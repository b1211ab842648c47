//! A change of the membership that nobody has forced leaves a majority of voters that the leader can reach
//! (GUARANTEES 50).
//!
//! The leader may count on who has answered it within an election timeout. That is old news: who is down by now, or cut
//! off, may have answered just before, and its answer may have been on its way for long. So what counts here is which
//! frames of whom the leader has taken lately, whatever they say.

use std::collections::BTreeMap;

use dflockd_replica::types::{MemberChange, RaftId};

use super::Broken;

/// When a node has last taken a frame of whom.
#[derive(Default)]
pub struct Heard {
    at: BTreeMap<RaftId, u64>,
}

impl Heard {
    /// The node takes a frame.
    pub fn frame(&mut self, from: RaftId, now: u64) {
        self.at.insert(from, now);
    }

    /// The node leads, and begins a change of what are the voters. `election` is its election timeout.
    pub fn check(
        &self,
        id: RaftId,
        change: &MemberChange,
        mut voters: Vec<RaftId>,
        now: u64,
        election: u64,
    ) -> Result<(), Broken> {
        match change {
            MemberChange::Promote { raft_id } if !voters.contains(raft_id) => voters.push(*raft_id),
            MemberChange::Remove { raft_id } if voters.contains(raft_id) => {
                voters.retain(|voter| voter != raft_id);
            }
            // The voters stay the same.
            MemberChange::Add { .. }
            | MemberChange::Promote { .. }
            | MemberChange::Remove { .. } => {
                return Ok(());
            }
        }
        // By a clock that is as slow as any.
        let lately = election / 100 * 106;
        let is_here =
            |voter: RaftId| voter == id || self.at.get(&voter).is_some_and(|&at| now - at < lately);
        let here = voters.iter().filter(|&&voter| is_here(voter)).count();
        if here * 2 > voters.len() {
            return Ok(());
        }
        let what = format!("n{id} begins {change:?} and has heard {here} of then {voters:?}");
        Err(Broken::new("quorum", what))
    }
}
