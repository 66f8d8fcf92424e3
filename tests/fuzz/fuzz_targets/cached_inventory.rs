#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| targets::cached_inventory::run(data));
