#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::container_path::run(data));
