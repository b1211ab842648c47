//! One leader per term, who has everything that was committed.

use std::collections::BTreeMap;

use dflockd_replica::types::RaftId;

use super::Broken;
use crate::oracle::Oracle;

/// Who led when.
#[derive(Default)]
pub struct Leaders {
    by_term: BTreeMap<u64, RaftId>,
}

impl Leaders {
    /// Whether it is known that a node leads a term.
    #[must_use]
    pub fn is_known(&self, id: RaftId, term: u64) -> bool {
        self.by_term.get(&term) == Some(&id)
    }

    /// A node leads a term. `log` has the terms of its entries.
    pub fn leads(
        &mut self,
        id: RaftId,
        term: u64,
        log: &BTreeMap<u64, u64>,
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
            let own = log.get(&index).copied();
            let committed = oracle.term(index);
            // What was committed in a later term, this leader of an earlier one need not have: it may have been elected
            // long ago and hear of it only now.
            let is_earlier = oracle.committed_by(index).is_some_and(|by| by < term);
            if own != committed && is_earlier {
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
