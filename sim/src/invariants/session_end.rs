//! A session ends at one entry, with everything it has, and for ever.

use std::collections::BTreeSet;

use dflockd_core::SessionId;
use dflockd_replica::types::Incarnation;

use super::Broken;
use crate::oracle::Step;

/// Who is gone.
#[derive(Default)]
pub struct Ends {
    sessions: BTreeSet<SessionId>,
    runs: BTreeSet<Incarnation>,
    /// Sessions that outlive the run they began in.
    kept: BTreeSet<SessionId>,
}

impl Ends {
    /// A session was ended, by an operator or because nobody came back to it.
    pub fn session(&mut self, session: SessionId) {
        self.sessions.insert(session);
    }

    /// A session asks to be kept.
    pub fn keep(&mut self, session: SessionId) {
        self.kept.insert(session);
    }

    /// A request is answered: not by what comes of a run that has ended.
    pub fn answer(&self, index: u64, session: SessionId) -> Result<(), Broken> {
        if self.runs.contains(&Incarnation::of(session)) && !self.kept.contains(&session) {
            let what =
                format!("entry {index}: a request of {} counts, whose run is over", session.0);
            return Err(Broken::new("session-end", what));
        }
        Ok(())
    }

    /// A life of a node has ended, and with it the waits of its connections; their holds follow their leases.
    pub fn run(&mut self, run: Incarnation) {
        self.runs.insert(run);
    }

    /// After each entry, the one that ended them included.
    pub fn check(
        &self,
        step: &Step<'_>,
        is_kept: impl Fn(SessionId) -> bool,
    ) -> Result<(), Broken> {
        for ((_, key), lock) in step.after {
            let holder = lock.holders.iter().map(|holder| holder.0);
            let waiter = lock.queue.iter().map(|waiter| waiter.0);
            let dead = holder.chain(waiter.clone()).find(|id| self.sessions.contains(id));
            let mut waiter = waiter;
            let orphan =
                waiter.find(|&id| self.runs.contains(&Incarnation::of(id)) && !is_kept(id));
            if let Some(id) = dead.or(orphan) {
                let key = key.escape_ascii();
                let what = format!("entry {}: {} has ended and has {key}", step.index, id.0);
                return Err(Broken::new("session-end", what));
            }
        }
        Ok(())
    }
}
