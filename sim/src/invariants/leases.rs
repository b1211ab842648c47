//! A hold lasts as long as its lease, as long as the grace after a change of leaders promises, and not longer.

use std::collections::BTreeMap;

use dflockd_core::{Fence, Outcome, SessionId};

use super::Broken;
use crate::oracle::Step;

/// When holds were last granted or renewed.
pub struct Leases {
    lease_min: u64,
    grace: u64,
    /// Until when leases that run out are extended, each by the grace at most.
    grace_until: u64,
    /// The earliest end of each hold, and the latest as far as it is known.
    ends: BTreeMap<Fence, (u64, Option<u64>)>,
    /// The leases that holds were asked for with, as far as they are known.
    asked: BTreeMap<Fence, u64>,
}

impl Leases {
    /// No holds yet.
    #[must_use]
    pub fn new(lease_min: u64, grace: u64) -> Self {
        Self { lease_min, grace, grace_until: 0, ends: BTreeMap::new(), asked: BTreeMap::new() }
    }

    /// After each entry.
    pub fn check(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        let broken =
            |what: String| Err(Broken::new("leases", format!("entry {}: {what}", step.index)));
        for (name, before) in step.before {
            let after = step.after.get(name);
            for &(session, fence, _) in &before.holders {
                let stays =
                    after.is_some_and(|after| after.holders.iter().any(|known| known.1 == fence));
                if stays || ended(step, session, fence) {
                    continue;
                }
                let end = self.ends.get(&fence).map_or(0, |ends| ends.0);
                let end = end.max(self.grace_until.min(end + self.grace));
                if step.now < end {
                    return broken(format!("{fence:?} ended {} ns early", end - step.now));
                }
            }
        }
        if step.touched.new_term {
            self.grace_until = self.grace_until.max(step.now + self.grace);
        }
        self.renew_sessions(step);
        for (_, _, outcome) in &step.touched.replies {
            let (fence, lease) = match outcome {
                Outcome::Granted(grant) | Outcome::Acquired(grant) => {
                    self.asked.insert(grant.token.fence, grant.lease.0);
                    (grant.token.fence, grant.lease)
                }
                Outcome::Renewed { fence, lease } => (*fence, *lease),
                Outcome::Done
                | Outcome::Queued
                | Outcome::Timeout
                | Outcome::Empty
                | Outcome::Conflict
                | Outcome::Number(_)
                | Outcome::Value(_)
                | Outcome::Written(_)
                | Outcome::Popped { .. }
                | Outcome::Items(_)
                | Outcome::Part(_)
                | Outcome::Compacted(_)
                | Outcome::Entry { .. }
                | Outcome::Refused(_) => continue,
            };
            let end = step.now + lease.0;
            let known = self.ends.entry(fence).or_insert((end, Some(end)));
            // A renewal may shorten it, and claiming a place restarts it.
            *known = (end, Some(end));
        }
        for after in step.after.values() {
            for &(_, fence, _) in &after.holders {
                // Granted in the queue of a two-phase request: nobody was told of the lease.
                let least = step.now + self.lease_min;
                let (_, latest) = *self.ends.entry(fence).or_insert((least, None));
                if step.touched.ticked
                    && latest.is_some_and(|latest| step.now >= latest + self.grace)
                {
                    let late = step.now - latest.unwrap_or(0) - self.grace;
                    return broken(format!("{fence:?} is still held {late} ns late: {after:?}"));
                }
            }
        }
        Ok(())
    }

    /// Holds that follow their session go on with it.
    fn renew_sessions(&mut self, step: &Step<'_>) {
        for &(session, request, lease) in &step.touched.renewals {
            let answer = step.touched.replies.iter().find(|it| (it.0, it.1) == (session, request));
            if !matches!(answer, Some((_, _, Outcome::Number(_)))) {
                continue;
            }
            let end = step.now + lease.0;
            for lock in step.before.values() {
                for &(_, fence, _) in lock.holders.iter().filter(|holder| holder.0 == session) {
                    // Whether one that nobody was told of follows is not known: it may end early or late.
                    let follows = self.asked.get(&fence).map(|&asked| asked == lease.0);
                    if let Some((least, latest)) = self.ends.get_mut(&fence) {
                        match follows {
                            Some(true) => *least = end.max(*least),
                            Some(false) => continue,
                            None => {}
                        }
                        *latest = latest.map(|latest| end.max(latest));
                    }
                }
            }
        }
    }
}

/// Whether the entry gives a reason for the end of a hold.
fn ended(step: &Step<'_>, session: SessionId, fence: Fence) -> bool {
    let touched = step.touched;
    touched.fences.contains(&fence) || touched.sessions.contains(&session)
}
