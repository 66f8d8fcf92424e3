#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::device_rules::run(data));
