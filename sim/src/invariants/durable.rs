//! What was reported as written is there after a crash.

use dflockd_replica::log::Recovered;
use raft::eraftpb::HardState;

use super::Broken;

/// What a node's disk was asked to remember.
#[derive(Clone, Debug, Default)]
pub struct Durable {
    /// Term and vote.
    pub hard_state: HardState,
    /// Index and term of the last entry.
    pub last: (u64, u64),
}

impl Durable {
    /// After a start.
    pub fn check(&self, recovered: &Recovered) -> Result<(), Broken> {
        let found = &recovered.hard_state;
        let broken = |what: String| Err(Broken::new("durable", what));
        let (term, vote) = (self.hard_state.term, self.hard_state.vote);
        if found.term < term || found.term == term && vote != 0 && found.vote != vote {
            return broken(format!("term {term} vote {vote} became {} {}", found.term, found.vote));
        }
        let snapshot = recovered.snapshot.as_ref().map_or(0, |snapshot| snapshot.metadata.index);
        let (index, term) = self.last;
        if index <= snapshot {
            return Ok(());
        }
        let entry = recovered.entries.iter().find(|entry| entry.index == index);
        let last = recovered.entries.last();
        match entry {
            Some(entry) if entry.term >= term => Ok(()),
            // The leader of a later term had another log, and what was on its way to the disk has got there.
            None if last.is_some_and(|last| last.term > term) => Ok(()),
            _ => {
                let last = last.map(|entry| (entry.index, entry.term));
                broken(format!("entry {index} of term {term} is gone: {entry:?}, last {last:?}"))
            }
        }
    }
}
