//! The promises, one file each, and how a broken one is told.

pub mod answers;
pub mod barrier;
pub mod client_exclusion;
pub mod durable;
pub mod fence_order;
pub mod fifo;
pub mod forms;
pub mod idle;
pub mod kept_answers;
pub mod leases;
pub mod linearizable;
pub mod new_cluster;
pub mod no_lost_wakeup;
pub mod pushes;
pub mod quorum;
pub mod raft_safety;
pub mod session_end;
pub mod state_exclusion;
pub mod totals;
pub mod watches;

/// A promise that was not kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// Which.
    pub property: &'static str,
    /// How.
    pub what: String,
}

impl Broken {
    /// Of a property.
    pub fn new(property: &'static str, what: impl Into<String>) -> Self {
        Self { property, what: what.into() }
    }
}
