//! Whole clusters in one thread: servers without sockets, files, clocks and threads, on simulated disks, networks and
//! clocks.
//!
//! Everything comes from one seed, so a failure happens again. Start reading at [`world::World`]; `plan.rs` says what a
//! seed decides, `oracle.rs` what the right answers are, and `invariants/` has the promises, one file each.

pub mod disk;
pub mod history;
pub mod invariants;
pub mod line_client;
pub mod models;
pub mod net;
pub mod op;
pub mod oracle;
pub mod plan;
pub mod process;
pub mod rng;
pub mod runner;
pub mod search;
pub mod workload;
pub mod world;
