//! What the fuzz targets check. Each module has a `run` that panics if its promise is broken by the given
//! bytes. None knows libFuzzer: the server's tests include these files and replay the corpus.

pub mod apply;
pub mod entry;
pub mod grpc;
pub mod http;
pub mod line;
pub mod pattern;
pub mod peer;
pub mod reply;
pub mod request;
pub mod seeds;
pub mod snapshot;
