//! The index of leases and of everything else that is due at an instant.
//!
//! Two orders: leases are kept by the end they were given (`base`); what a failover adds is a monotone
//! function of it, so the order holds and a failover costs nothing. Timers are exact.
//!
//! A [`Timestamp`] is nanoseconds of a monotonic clock: since the start of the process in memory mode, of the cluster
//! behind a log. Stamps never run back within a store, which asserts it. After a change of leader (`NewTerm`) a lease
//! ends at `max(base, min(base + grace, grace_until))`, a monotone function of `base`; in memory mode there is no
//! `NewTerm`. A lease that ends at the same instant as a wait goes first, so the waiter is granted.
//!
//! With `--startup-grant-delay` a store in memory queues every request until its timer `GrantsOpen`.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use dflockd_api::{Bytes, Fence, RequestId, SessionId, Span, Timestamp};

use crate::bugs::{Bug, bug};
use crate::chain::Slot;

/// Identifies a timer: when it is due and a number that makes it unique and keeps equal times in order.
pub(crate) type TimerKey = (Timestamp, u64);

/// What happens when a timer is due.
#[derive(Clone, Debug)]
pub(crate) enum Timer {
    /// Grants begin.
    GrantsOpen,
    /// The wait of a claim ends.
    Claim(Slot),
    /// The wait of a blocking pop ends.
    Pop { session: SessionId, request: RequestId },
    /// The wait at a barrier ends.
    Barrier { session: SessionId, request: RequestId },
    /// A KV entry ends.
    Kv(Bytes),
    /// A detached session may end.
    Session(SessionId),
}

pub(crate) struct Deadlines {
    /// One entry per hold, no others, by the base of its lease.
    leases: BTreeMap<(Timestamp, Fence), Slot>,
    timers: BTreeMap<TimerKey, Timer>,
    /// Leases that the grace lets end together, being ended one by one; the next is the last.
    ending: Vec<(Fence, Slot)>,
    serial: u64,
    pub(crate) grace: Span,
    pub(crate) grace_until: Timestamp,
}

/// Something that is due.
pub(crate) enum Due {
    Lease(Slot),
    Timer(Timestamp, Timer),
}

/// Added to the number of a timer that comes after all others of its instant.
const LAST: u64 = 1 << 63;

impl Deadlines {
    pub(crate) fn new(grace: Span) -> Self {
        Self {
            leases: BTreeMap::new(),
            timers: BTreeMap::new(),
            ending: Vec::new(),
            serial: 0,
            grace,
            grace_until: Timestamp(0),
        }
    }

    /// When a lease with this base really ends: never early, and at most the grace later in all.
    pub(crate) fn lease_end(&self, base: Timestamp) -> Timestamp {
        if bug(Bug::LeaseResetPerElection) {
            return base.max(self.grace_until);
        }
        base.max((base + self.grace).min(self.grace_until))
    }

    pub(crate) fn add_lease(&mut self, base: Timestamp, fence: Fence, claim: Slot) {
        self.leases.insert((base, fence), claim);
    }

    pub(crate) fn remove_lease(&mut self, base: Timestamp, fence: Fence) {
        let known = self.leases.remove(&(base, fence)).is_some();
        assert!(known, "hold {fence:?} has no lease");
    }

    pub(crate) fn add_timer(&mut self, at: Timestamp, timer: Timer) -> TimerKey {
        self.serial += 1;
        // A session ends after what is due to it at the same instant has been answered.
        let last = if matches!(timer, Timer::Session(_)) { LAST } else { 0 };
        let key = (at, self.serial | last);
        self.timers.insert(key, timer);
        key
    }

    pub(crate) fn remove_timer(&mut self, key: TimerKey) {
        self.timers.remove(&key);
    }

    /// The first instant at which something is due.
    pub(crate) fn next(&self) -> Option<Timestamp> {
        let lease = self.leases.keys().next().map(|&(base, _)| self.lease_end(base));
        let timer = self.timers.keys().next().map(|&(at, _)| at);
        match (lease, timer) {
            (Some(lease), Some(timer)) => Some(lease.min(timer)),
            (lease, timer) => lease.or(timer),
        }
    }

    /// Takes out the earliest that is due at `now`. A lease comes before a timer of the same instant, so that
    /// a grant wins over the time limit it meets; it stays indexed until the hold ends.
    pub(crate) fn pop_due(&mut self, now: Timestamp) -> Option<Due> {
        let now = if bug(Bug::EarlyExpiry) { now + Span::from_millis(200) } else { now };
        if let Some((_, slot)) = self.ending.pop() {
            return Some(Due::Lease(slot));
        }
        let timer_at = self.timers.first_key_value().map_or(Timestamp::NEVER, |(&(at, _), _)| at);
        if let Some((&(base, _), &slot)) = self.leases.first_key_value() {
            let end = self.lease_end(base);
            if end <= now && end <= timer_at {
                if end == base {
                    return Some(Due::Lease(slot));
                }
                self.gather(end);
                return self.ending.pop().map(|(_, slot)| Due::Lease(slot));
            }
        }
        if timer_at <= now {
            return self.timers.pop_first().map(|((at, _), timer)| Due::Timer(at, timer));
        }
        None
    }

    /// Collects the leases that all end at `end`. Their bases differ, but they go in the order of their fences.
    fn gather(&mut self, end: Timestamp) {
        let together = self.leases.iter().take_while(|((base, _), _)| self.lease_end(*base) == end);
        let mut ending: Vec<_> = together.map(|(&(_, fence), &slot)| (fence, slot)).collect();
        ending.sort_unstable_by(|a, b| b.cmp(a));
        self.ending = ending;
    }

    pub(crate) fn leases(&self) -> &BTreeMap<(Timestamp, Fence), Slot> {
        &self.leases
    }

    pub(crate) fn timers(&self) -> &BTreeMap<TimerKey, Timer> {
        &self.timers
    }

    pub(crate) fn serial(&self) -> u64 {
        self.serial
    }

    /// The highest number of a timer.
    pub(crate) fn last_used_serial(&self) -> u64 {
        self.timers.keys().map(|&(_, serial)| serial & !LAST).max().unwrap_or(0)
    }

    /// Puts a timer back under the key it had.
    pub(crate) fn restore_timer(&mut self, key: TimerKey, timer: Timer) {
        self.timers.insert(key, timer);
    }

    /// All leases at once; sorted they cost far less than one by one.
    pub(crate) fn restore_leases(&mut self, mut leases: Vec<((Timestamp, Fence), Slot)>) {
        leases.sort_unstable();
        self.leases = leases.into_iter().collect();
    }

    pub(crate) fn restore_serial(&mut self, serial: u64) {
        self.serial = serial;
    }
}
