//! One leader per term, who has everything that was committed, and whose time passes no faster than real time.

use std::collections::BTreeMap;

use dflockd_replica::types::RaftId;

use super::Broken;
use crate::oracle::Oracle;

/// Who led when.
#[derive(Default)]
pub struct Leaders {
    by_term: BTreeMap<u64, RaftId>,
    /// How far the cluster time of each term was behind real time, at least.
    behind: BTreeMap<u64, u64>,
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

    /// A leader that accepts requests counts cluster time, which is `behind` real time. GUARANTEES R2: time without a
    /// leader does not pass, so a later leader is further behind, but for the rates of clocks. If it were not, leases
    /// would end early by the difference.
    pub fn counts(&mut self, term: u64, behind: u64, tolerance: u64) -> Result<(), Broken> {
        let known = self.behind.entry(term).or_insert(u64::MAX);
        if behind >= *known {
            return Ok(());
        }
        *known = behind;
        match self.behind.range(..term).max_by_key(|(_, behind)| **behind) {
            Some((earlier, before)) if *before > behind + tolerance => {
                let what = format!(
                    "time jumped: {before} ns behind in term {earlier}, {behind} ns in term {term}"
                );
                Err(Broken::new("cluster-time", what))
            }
            _ => Ok(()),
        }
    }

    /// How many terms had a leader.
    #[must_use]
    pub fn count(&self) -> usize {
        self.by_term.len()
    }
}
