//! The state machine of dflockd: every lock, value and subscription, and every rule about them.
//!
//! State, command and time in; new state and effects out. There is no clock, no randomness, no IO, no
//! thread and no hash order in here, so the same commands with the same stamps give the same effects on
//! every machine: in memory, behind a log, and in a simulator.
//!
//! Start reading at [`Store::apply`]. `lock.rs` has the grant rules, `session.rs` what happens when a
//! client goes, `subscription.rs` who is told what.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

mod barrier;
pub mod bugs;
mod chain;
mod client;
mod counter;
mod deadline;
mod effect;
mod election;
mod invariants;
mod kv;
mod limits;
mod list;
mod lock;
mod new_cluster;
mod pattern;
mod session;
mod shared;
mod snapshot;
mod store;
mod subscription;
mod tally;
mod view;
mod watch;

#[cfg(test)]
mod tests;

pub use client::CLIENT_BYTES_MAX;
pub use dflockd_api::*;
pub use effect::{Effect, Group};
pub use limits::{KEPT_FOR, Limits, LimitsV2};
pub use list::RANGE_BYTES_MAX;
pub use pattern::{
    Separators, is_literal, is_valid as pattern_is_valid, matches as pattern_matches,
    tokens as pattern_tokens,
};
pub use session::{Progress, Usage};
pub use shared::Shared;
pub use snapshot::SnapshotError;
pub use store::{Idle, Store, Usages};
pub use tally::{BUCKETS, Counts, Histogram, Primitive, Tally};
pub use view::{
    BarrierView, ChannelView, Contended, Contention, CounterView, HolderView, KeyKind, KeyView,
    KvView, ListView, Listed, LockKind, LockPage, LockView, Only, SessionView, Survey, WaiterView,
};
pub use watch::{SharedWatches, WatchIndex};
