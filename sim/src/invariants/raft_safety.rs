//! One leader per term, who has everything that was committed.

use std::collections::BTreeMap;

use dflockd_replica::types::RaftId;
use raft::eraftpb::Entry;

use super::Broken;
use crate::oracle::Oracle;

/// Who led when.
#[derive(Default)]
pub struct Leaders {
    by_term: BTreeMap<u64, RaftId>,
}

impl Leaders {
    /// A node leads a term.
    pub fn leads(
        &mut self,
        id: RaftId,
        term: u64,
        log: &BTreeMap<u64, Entry>,
        snapshot: u64,
        oracle: &Oracle,
    ) -> Result<(), Broken> {
        match self.by_term.insert(term, id) {
            Some(other) if other != id => {
                let what = format!("{other} and {id} both lead term {term}");
                return Err(Broken::new("one-leader", what));
            }
            Some(_) => return Ok(()),
            None => {}
        }
        for index in (snapshot + 1).max(2)..=oracle.last() {
            let own = log.get(&index).map(|entry| entry.term);
            let committed = oracle.term(index);
            // What was committed in a later term, this leader of an earlier one need not have.
            if own != committed && committed.is_some_and(|committed| committed < term) {
                let what = format!(
                    "{id} leads term {term} with {own:?} at {index}, committed was {committed:?}"
                );
                return Err(Broken::new("leader-completeness", what));
            }
        }
        Ok(())
    }

    /// How many terms had a leader.
    #[must_use]
    pub fn count(&self) -> usize {
        self.by_term.len()
    }
}
