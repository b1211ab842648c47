//! The dflockd server as a library: the binary parses its configuration and calls [`run`]; tests do the
//! same on port 0.
//!
//! The path of a request: `tcp` reads bytes, [`connection`] finds the requests in them, `translate` makes
//! commands of those, the engine applies them, and the answers go back the same way.

pub mod config;
pub mod connection;
pub mod logging;
pub mod metrics;
pub mod tls;
#[doc(hidden)]
pub mod untrusted;

mod audit;
mod auth;
mod budget;
mod caller;
mod cluster;
mod descriptors;
mod detached;
mod feed;
mod foreign;
mod frames;
mod grpc;
mod http;
mod local;
mod offline;
mod operate;
mod pool;
mod process;
mod rate;
mod report;
mod server;
mod service;
mod tcp;
mod telemetry;
mod translate;

pub use local::LocalServer;
pub use process::{run_process, watch_signals};
pub use server::{Running, Signal, run};
pub use service::Service;
