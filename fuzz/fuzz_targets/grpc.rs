#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dflockd_fuzz::grpc::run(data));
