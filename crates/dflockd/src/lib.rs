//! The dflockd server as a library: the binary parses its configuration and calls [`run`]; tests do the
//! same on port 0.
//!
//! The path of a request: `frontend::line` reads bytes, its [`connection`](frontend::line::connection) finds the
//! requests in them, which `dflockd-wire` makes commands of, the engine applies them, and `translate` makes answers of
//! what came of it.
//!
//! Workers (`frontend::line::worker`) are threads outside of tokio but in its context; `--worker-threads` says how
//! many. HTTP and gRPC run on tokio. A call over gRPC: `listen` accepts, does TLS and looks at the preface, hyper reads
//! HTTP/2, the gate checks token, drain and deadline, tonic decodes, the service checks fields and finds the session,
//! and `caller` waits for the engine. A call without a request id is withdrawn when its future is dropped. Over HTTP
//! and gRPC what an answer gives away is given back if nobody takes the body. The time to live of a gRPC session is
//! part of its id, so every member knows it; the member that has the session notices that a client is silent, the
//! leases are the core's.
//!
//! # Locks
//!
//! Locks are taken in one order: connection, shard, session state, inbox; the lock of the shared watches after a shard,
//! and nothing under it. A thread may hold its own connection while it takes a shard or serves others, but another
//! connection it only tries to lock, a full one for 5 ms at most, and at most eight are served within each other, so no
//! two threads wait for each other for ever. A thread that had a connection's mutex looks into its inbox once more
//! after giving it back, so what a failed try left there is not forgotten. No thread asks for a connection while it
//! holds a shard.
//!
//! # Bounds
//!
//! A line connection: 64 pushes and 64 KiB of output before requests and messages wait, `--max-pending-bytes` of
//! answers and pushes in all, 4,096 bytes behind a blocking command, 65,536 open requests, 64 texts that wait for the
//! one being made. No answer has more than 1 MiB but a single value. A connection over HTTP or gRPC
//! (`frontend/budget.rs`): as many bytes for answers to reads that are not taken in, for pushes of all its streams, and
//! for messages that have begun to arrive, which have `--read-timeout` to be complete. The server: four inspections,
//! four actions of operators, two scrapes and four reads of the history at a time (`frontend/pool.rs`), 16,384 log
//! lines; for a thread, nine spare buffers of 256 KiB. An idle line connection has no buffers, no task and no timer: it
//! borrows the buffers of the thread that serves it.

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
