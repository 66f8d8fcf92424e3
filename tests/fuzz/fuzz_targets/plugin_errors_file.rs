#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::plugin::errors_file::run(data));
