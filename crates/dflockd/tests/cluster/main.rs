//! The built binary as a cluster: three and five real processes on the loopback interface, and what is left of their
//! promises when they are killed, paused, cut off from each other, damaged and replaced.
//!
//! Nothing here sleeps for a fixed time to let something happen: every test waits for what must come, at most
//! `dflockd_testkit::LIMIT`. At most two clusters run at a time. `load.rs` has clients that remember what they were
//! told.

#![cfg(test)]

mod commands;
mod forms;
mod kill;
mod load;
mod membership;
mod metrics;
mod names;
mod new_cluster;
mod operate;
mod partition;
mod peers;
mod policy;
mod references;
mod rotation;
mod slow_disk;
mod storage;
mod upgrade;
