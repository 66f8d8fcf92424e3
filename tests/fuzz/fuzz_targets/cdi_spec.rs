#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::cdi_spec::run(data));
