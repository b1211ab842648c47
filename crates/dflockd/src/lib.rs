//! The dflockd server as a library: the binary parses its configuration and calls [`run`]; tests do the
//! same on port 0.
//!
//! The path of a request: `frontend::line` reads bytes, its [`connection`](frontend::line::connection) finds the
//! requests in them, `translate` makes commands of those, the engine applies them, and the answers go back the same
//! way.

pub mod config;
pub mod frontend;
pub mod logging;
pub mod metrics;
pub mod tls;
#[doc(hidden)]
pub mod untrusted;

mod audit;
mod cluster;
mod offline;
mod operate;
mod process;
mod report;
mod server;
mod service;
mod telemetry;

pub use frontend::line::local::LocalServer;
pub use process::{run_process, watch_signals};
pub use server::{Running, Signal, run};
pub use service::Service;
