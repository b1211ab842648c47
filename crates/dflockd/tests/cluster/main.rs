//! The built binary as a cluster: three and five real processes on the loopback interface, and what is left of their
//! promises when they are killed, paused, cut off from each other, damaged and replaced.
//!
//! Nothing here sleeps for a fixed time to let something happen: every test waits for what must come, at most
//! [`harness::LIMIT`]. At most two clusters run at a time. `harness.rs` has the cluster and its clients, `proxy.rs` the
//! network between the members, `load.rs` clients that remember what they were told.

#[cfg(test)]
mod commands;
#[cfg(test)]
mod harness;
#[cfg(test)]
mod kill;
#[cfg(test)]
mod load;
#[cfg(test)]
mod membership;
#[cfg(test)]
mod metrics;
#[cfg(test)]
mod operate;
#[cfg(test)]
mod partition;
#[cfg(test)]
mod peers;
#[cfg(test)]
mod policy;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod rebirth;
#[cfg(test)]
mod rotation;
#[cfg(test)]
mod slow_disk;
#[cfg(test)]
mod storage;
#[cfg(test)]
mod upgrade;
