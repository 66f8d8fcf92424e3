#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::plugin::nri_session::run(data));
