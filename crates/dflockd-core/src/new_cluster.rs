//! The state of a cluster that begins again: from a backup, or from the one member that is left.

use alloc::vec::Vec;

use dflockd_api::{Caller, Command, Fence, RequestId, SessionId, Span};

use crate::bugs::{Bug, bug};
use crate::chain::Slot;
use crate::deadline::Timer;
use crate::lock::EndOfHold;
use crate::store::Store;

impl Store {
    /// The longest lease that is held or was asked for by somebody who waits.
    ///
    /// Not what is left of it: its holder may have renewed it where this store has not seen it.
    #[must_use]
    pub fn longest_lease(&self) -> Span {
        let asked = self.locks.claims.iter().map(|(_, claim)| claim.lease);
        asked.chain(self.locks.renewed.values().copied()).max().unwrap_or(Span::ZERO)
    }

    /// Ends all sessions and holds, gives out no fence below `fence`, and grants nothing for `delay`: the first
    /// at least, and no longer than the second, even if an earlier delay has not ended. Values stay.
    ///
    /// Nobody is told: whoever might listen talks to what was before.
    pub fn begin_anew(&mut self, fence: u64, (delay, delay_max): (Span, Option<Span>)) {
        let mut effects = Vec::new();
        if !bug(Bug::FenceKept) {
            self.shared.raise_fence(fence);
        }
        let earlier = self
            .deadlines
            .timers()
            .iter()
            .find_map(|(&key, timer)| matches!(timer, Timer::GrantsOpen).then_some(key));
        let delay = if bug(Bug::GrantsAtOnce) { Span::ZERO } else { delay };
        let mut grants_from = self.now + delay;
        if let Some(key) = earlier {
            grants_from = grants_from.max(key.0);
            self.deadlines.remove_timer(key);
        }
        if let Some(max) = delay_max {
            grants_from = grants_from.min(self.now + max);
        }
        // First, or the end of one session would be another's grant.
        self.grants_open = false;
        self.deadlines.add_timer(grants_from, Timer::GrantsOpen);
        for session in self.session_ids(SessionId(0)..=SessionId(u64::MAX)) {
            if bug(Bug::HoldsKept) {
                return;
            }
            let caller = Caller { session, request: RequestId(0), keep: false };
            let command = Command::EndSession { release: true, forced: true };
            self.apply(caller, command, self.now, &mut effects);
            effects.clear();
        }
        // Holds whose session had ended before them.
        let orphans = self.locks.claims.iter().filter(|(_, claim)| claim.hold.is_none());
        let places: Vec<Slot> = orphans.map(|(slot, _)| slot).collect();
        for slot in places {
            self.place_over(slot, &mut effects);
        }
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

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec;

    use super::*;
    use dflockd_api::{Mode, Outcome, Space, Timestamp, command};

    use crate::effect::Effect;
    use crate::limits::{Limits, LimitsV2};
    use crate::shared::Shared;

    fn at_secs(seconds: u64) -> Timestamp {
        Timestamp(0) + Span::from_secs(seconds)
    }

    fn acquire(store: &mut Store, session: u64, at: u64, wait: u64, lease: u64) -> Vec<Effect> {
        let caller = Caller { session: SessionId(session), request: RequestId(1), keep: false };
        let (wait, lease) = (Span::from_secs(wait), Some(Span::from_secs(lease)));
        let command = Command::Acquire(command::Acquire {
            key: b"k",
            mode: Mode::Mutex,
            wait,
            lease,
            salt: 7,
        });
        let mut effects = Vec::new();
        store.apply(caller, command, at_secs(at), &mut effects);
        effects
    }

    fn fence(effects: &[Effect]) -> Option<u64> {
        effects.iter().find_map(|effect| {
            let Effect::Reply { outcome: Outcome::Granted(grant), .. } = effect else {
                return None;
            };
            Some(grant.token.fence.0)
        })
    }

    /// GUARANTEES 2: whoever renewed for longer than he asked for at first may have done so again, unseen.
    #[test]
    fn a_longer_renewal_counts_in_full() {
        let shared = Arc::new(Shared::new());
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        let taken = acquire(&mut store, 1, 1, 0, 5);
        let token = taken.iter().find_map(|effect| {
            let Effect::Reply { outcome: Outcome::Granted(grant), .. } = effect else {
                return None;
            };
            Some(grant.token)
        });
        let token = token.expect("it is free");
        let caller = Caller { session: SessionId(1), request: RequestId(2), keep: false };
        for (at, lease) in [(2, 60), (3, 40)] {
            let lease = Some(Span::from_secs(lease));
            let renew =
                Command::Renew(command::Renew { key: b"k", space: Space::Locks, token, lease });
            store.apply(caller, renew, at_secs(at), &mut Vec::new());
        }
        store.apply(caller, Command::Tick, at_secs(40), &mut Vec::new());
        let bytes = store.snapshot();
        let mut store = Store::restore(&bytes, Arc::new(Shared::new())).expect("it is whole");
        assert_eq!(store.longest_lease(), Span::from_secs(60));
        assert_eq!(store.snapshot(), bytes);

        let (key, space) = (b"k", Space::Locks);
        let release = Command::Release(command::Release { key, space, token, resign: false });
        store.apply(caller, release, at_secs(41), &mut Vec::new());
        store.check_invariants();
        assert_eq!(store.longest_lease(), Span::ZERO);
        assert_eq!(store.snapshot()[0], 3, "the form of the rules that it follows");
        store.set_limits(Limits::default().with_v2(LimitsV2::default()));
        assert_eq!(store.snapshot()[0], 1, "what all versions read");
    }

    /// GUARANTEES R5: fences grow over a restore; nobody has a lock that somebody from before may still believe in.
    #[test]
    fn a_store_begins_anew() {
        let shared = Arc::new(Shared::new());
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        let first = fence(&acquire(&mut store, 1, 1, 0, 30)).expect("it is free");
        assert_eq!(fence(&acquire(&mut store, 2, 2, 60, 40)), None);
        // A hold whose session has ended, by its lease.
        let end = Command::EndSession { release: false, forced: false };
        let caller = Caller { session: SessionId(1), request: RequestId(0), keep: false };
        store.apply(caller, end, at_secs(3), &mut Vec::new());
        assert_eq!(store.longest_lease(), Span::from_secs(40));

        store.begin_anew(first + 1000, (Span::from_secs(50), None));
        store.check_invariants();
        let bytes = store.snapshot();
        let mut store = Store::restore(&bytes, Arc::new(Shared::new())).expect("it is whole");
        assert_eq!(store.session_ids(SessionId(0)..=SessionId(u64::MAX)), vec![]);
        assert_eq!(store.longest_lease(), Span::ZERO);
        // It was at 3 s.
        assert_eq!(fence(&acquire(&mut store, 3, 52, 10, 5)), None, "the delay lasts until 53 s");
        let mut effects = Vec::new();
        let nobody = Caller { session: SessionId(0), request: RequestId(0), keep: false };
        store.apply(nobody, Command::Tick, at_secs(53), &mut effects);
        assert!(fence(&effects).expect("it waited") >= first + 1000);
        // Once more, with an end to the delay before the first one's.
        store.begin_anew(first + 2000, (Span::from_secs(500), None));
        store.begin_anew(first + 2000, (Span::from_secs(7), Some(Span::from_secs(7))));
        let effects = acquire(&mut store, 4, 60, 0, 5);
        assert!(fence(&effects).expect("seven seconds are over") >= first + 2000);
    }
}
