//! Whether a node votes and wants to lead, apart from what Raft says.
//!
//! A node whose log lost its end at the start does not vote until it has what a leader has committed: it may have
//! acknowledged what is gone. A node that an operator has drained leaves leading to others. Neither may leave a cluster
//! without a leader for ever, so both are given up after a while in which nobody leads.

use super::types::RaftId;

/// How many ticks a node waits for others to lead.
const PATIENCE_TICKS: u32 = 500;

/// The reasons of a node not to vote or not to lead.
pub(super) struct Candidacy {
    /// The log's end was cut at the start: no vote until this node has what a leader has committed.
    is_behind: bool,
    /// For how many ticks no leader was heard of by a node that is behind.
    behind_ticks: u32,
    /// An operator wants this node not to lead.
    drained: bool,
    /// For how many ticks nobody has led meanwhile.
    drained_ticks: u32,
    /// The leader whose process is known to be gone.
    lost_leader: Option<RaftId>,
    /// What a leader was last heard to have committed.
    leader_commit: u64,
}

impl Candidacy {
    pub(super) fn new(is_behind: bool) -> Self {
        Self {
            is_behind,
            behind_ticks: 0,
            drained: false,
            drained_ticks: 0,
            lost_leader: None,
            leader_commit: 0,
        }
    }

    /// Whether votes are withheld because the log may lack what this node acknowledged.
    pub(super) fn is_behind(&self) -> bool {
        self.is_behind
    }

    pub(super) fn is_drained(&self) -> bool {
        self.drained
    }

    pub(super) fn drain(&mut self, on: bool) {
        self.drained = on;
    }

    /// A tick of a node that is behind. True if it has waited long enough: what was cut had not been synced, so nobody
    /// was told of it unless the disk lied. If all members lost power together, all are behind, and one must begin.
    pub(super) fn tick_behind(&mut self) -> bool {
        if self.is_behind {
            self.behind_ticks += 1;
            self.is_behind = self.behind_ticks <= PATIENCE_TICKS;
            return !self.is_behind;
        }
        false
    }

    /// A tick of a drained node. True if it leaves leading to others; if none of them leads for long, it is better than
    /// nobody.
    pub(super) fn tick_drained(&mut self, misses_leader: bool) -> bool {
        self.drained_ticks = if misses_leader { self.drained_ticks + 1 } else { 0 };
        self.drained_ticks <= PATIENCE_TICKS
    }

    /// A leader of the current term has spoken. `commit`: what it has committed, if it said so.
    pub(super) fn hear_leader(&mut self, commit: Option<u64>) {
        self.lost_leader = None;
        self.behind_ticks = 0;
        self.leader_commit = self.leader_commit.max(commit.unwrap_or(0));
    }

    /// Whether all that the leader was last heard to have committed is applied.
    pub(super) fn is_level(&self, applied: u64) -> bool {
        applied >= self.leader_commit
    }

    /// An entry was applied. True if this node has caught up by it, and votes again.
    pub(super) fn catch_up(&mut self, applied: u64) -> bool {
        let caught_up = self.is_behind && self.leader_commit > 0 && self.is_level(applied);
        self.is_behind &= !caught_up;
        caught_up
    }

    /// A member's process is gone. True if it was the leader, as far as is known.
    pub(super) fn lose(&mut self, peer: RaftId, leader: Option<RaftId>) -> bool {
        match leader {
            Some(leader) if leader == peer => {
                self.lost_leader = Some(peer);
                true
            }
            Some(_) => false,
            None => self.lost_leader == Some(peer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_that_is_behind_catches_up_with_a_leader() {
        let mut candidacy = Candidacy::new(true);
        assert!(!candidacy.catch_up(9), "nobody has said what is committed");
        candidacy.hear_leader(None);
        assert!(!candidacy.catch_up(9), "nobody has said what is committed");
        candidacy.hear_leader(Some(10));
        candidacy.hear_leader(Some(3));
        assert!(!candidacy.catch_up(9) && candidacy.is_behind());
        assert!(candidacy.catch_up(10) && !candidacy.is_behind());
        assert!(!candidacy.catch_up(11), "that is news once");
        assert!(!Candidacy::new(false).catch_up(11), "it was never behind");
    }

    #[test]
    fn a_node_that_is_behind_waits_for_a_leader_for_so_long() {
        let mut candidacy = Candidacy::new(true);
        for _ in 0..PATIENCE_TICKS {
            assert!(!candidacy.tick_behind());
        }
        candidacy.hear_leader(None);
        for _ in 0..PATIENCE_TICKS {
            assert!(!candidacy.tick_behind());
        }
        assert!(candidacy.tick_behind() && !candidacy.is_behind());
        assert!(!candidacy.tick_behind(), "that is news once");
    }

    #[test]
    fn a_drained_node_leaves_leading_to_others_for_so_long() {
        let mut candidacy = Candidacy::new(false);
        candidacy.drain(true);
        assert!(candidacy.is_drained());
        for _ in 0..PATIENCE_TICKS {
            assert!(candidacy.tick_drained(true));
        }
        assert!(!candidacy.tick_drained(true));
        assert!(candidacy.tick_drained(false), "somebody leads");
        assert!(candidacy.tick_drained(true), "and is missed from there on");
        candidacy.drain(false);
        assert!(!candidacy.is_drained());
    }

    #[test]
    fn the_leader_is_lost_until_another_one_speaks() {
        let mut candidacy = Candidacy::new(false);
        assert!(!candidacy.lose(2, None) && !candidacy.lose(2, Some(3)));
        assert!(candidacy.lose(3, Some(3)));
        assert!(candidacy.lose(3, None), "still, although nobody leads now");
        assert!(!candidacy.lose(2, None));
        candidacy.hear_leader(None);
        assert!(!candidacy.lose(3, None));
    }
}
