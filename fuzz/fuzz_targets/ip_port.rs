//! libFuzzer's entry; the body is in `barewire-fuzz`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| barewire_fuzz::ip_port(data));
