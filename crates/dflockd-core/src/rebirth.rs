//! The state of a cluster that begins again: from a backup, or from the one member that is left.

use alloc::vec::Vec;

use crate::command::{Caller, Command};
use crate::deadline::Timer;
use crate::lock::EndOfHold;
use crate::store::Store;
use crate::types::{Fence, RequestId, SessionId, Span};

impl Store {
    /// The longest lease that is held or was asked for by somebody who waits.
    #[must_use]
    pub fn longest_lease(&self) -> Span {
        let claims = self.locks.claims.iter();
        let lease = |(_, claim): (_, &crate::lock::Claim)| {
            // A renewal may have made it longer than what was asked for at first.
            let left = claim.hold.map_or(Span::ZERO, |hold| hold.base.since(self.now));
            left.max(claim.lease)
        };
        claims.map(lease).max().unwrap_or(Span::ZERO)
    }

    /// Ends all sessions and holds, gives out no fence below `fence`, and grants nothing for `delay`. Values stay.
    ///
    /// Nobody is told: whoever might listen talks to what was before.
    pub fn begin_anew(&mut self, fence: u64, delay: Span) {
        let mut effects = Vec::new();
        self.shared.raise_fence(fence);
        let earlier = self
            .deadlines
            .timers()
            .iter()
            .find_map(|(&key, timer)| matches!(timer, Timer::GrantsOpen).then_some(key));
        let mut grants_from = self.now + delay;
        if let Some(key) = earlier {
            grants_from = grants_from.max(key.0);
            self.deadlines.remove_timer(key);
        }
        // First, or the end of one session would be another's grant.
        self.grants_open = false;
        self.deadlines.add_timer(grants_from, Timer::GrantsOpen);
        for session in self.session_ids(SessionId(0)..=SessionId(u64::MAX)) {
            let caller = Caller { session, request: RequestId(0), keep: false };
            let command = Command::EndSession { release: true, forced: true };
            self.apply(caller, command, self.now, &mut effects);
            effects.clear();
        }
        // Holds whose session had ended before them.
        let mut fences: Vec<Fence> = self.locks.by_fence.keys().copied().collect();
        fences.sort_unstable();
        for fence in fences {
            if let Some(&slot) = self.locks.by_fence.get(&fence) {
                self.end_hold(slot, EndOfHold::Forced, &mut effects);
                effects.clear();
            }
        }
    }
}
