//! What is true of every store between two commands. Tests check it after each one, and a snapshot must
//! pass before it is used.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;

use dflockd_api::{Bytes, Fence, SessionId, Space};

use crate::client::CLIENT_BYTES_MAX;
use crate::deadline::Timer;
use crate::lock::Lock;
use crate::pattern;
use crate::session::{Blocked, Enqueued, Session};
use crate::store::{IdleValue, Store};
use crate::subscription::{Owned, Volume};
use crate::view::LockKind;

/// Where counting must end.
const COUNT_MAX: u64 = 1 << 62;

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(format!($($message)+));
        }
    };
}

impl Store {
    /// Panics if the state is broken.
    ///
    /// # Panics
    ///
    /// See above.
    pub fn check_invariants(&self) {
        if let Err(broken) = self.verify() {
            panic!("invariant broken: {broken}");
        }
    }

    pub(crate) fn verify(&self) -> Result<(), String> {
        let mut totals = Totals::default();
        for (slot, lock) in self.locks.arena.iter() {
            ensure!(self.locks.find(lock.space, &lock.key) == Some(slot), "{:?} is lost", lock.key);
            self.verify_lock(slot, lock, &mut totals)?;
        }
        ensure!(totals.claims == self.locks.claims.len(), "claims without a lock");
        ensure!(totals.holds == self.locks.by_fence.len(), "fences without a hold");
        ensure!(totals.holds == self.deadlines.leases().len(), "leases without a hold");
        for (fence, lease) in &self.locks.renewed {
            let slot = self.locks.by_fence.get(fence);
            let asked = slot.map(|&slot| self.locks.claims[slot].lease);
            ensure!(asked.is_some_and(|asked| asked < *lease), "{fence:?} was not renewed");
        }
        ensure!(totals.idle == self.locks.idle.len() as usize, "idle chain is wrong");
        let chained = self.locks.idle.iter(&self.locks.arena).count();
        ensure!(chained == totals.idle, "idle chain is broken");
        ensure!(self.shared.locks() >= self.locks.arena.len() as u64, "locks are miscounted");
        let in_order = |(a, b): (&Lock, &Lock)| a.idle_since <= b.idle_since;
        let idle = || self.locks.idle.iter(&self.locks.arena).map(|(_, lock)| lock);
        ensure!(idle().zip(idle().skip(1)).all(in_order), "idle chain is out of order");

        for (&id, session) in &self.sessions {
            self.verify_session(id, session, &mut totals)?;
            ensure!(self.session_order.contains(&id), "{id:?} is not in order");
        }
        ensure!(self.session_order.len() == self.sessions.len(), "sessions that are gone");
        ensure!(totals.owned_holds == totals.session_holds, "holds of no session");
        self.verify_clients()?;
        ensure!(totals.enqueued == totals.session_enqueued, "enqueued claims without a record");
        self.verify_values(&mut totals)?;
        ensure!(totals.blocked == totals.session_blocked, "blocked requests of no session");
        totals.timers += self
            .deadlines
            .timers()
            .values()
            .filter(|timer| matches!(timer, Timer::GrantsOpen))
            .count();
        ensure!(totals.timers == self.deadlines.timers().len(), "timers of nobody");
        let last_serial = self.deadlines.last_used_serial();
        ensure!(last_serial <= self.deadlines.serial(), "timer numbers would repeat");
        // What counts up must not run out: nothing here gets this far by counting.
        ensure!(self.deadlines.serial() < COUNT_MAX, "timer numbers run out");
        ensure!(self.revision().0 < COUNT_MAX, "revisions run out");
        self.verify_subscriptions()?;
        self.verify_tally()?;
        let kept = self.changes.len() as u64;
        ensure!(kept <= self.limits.events_max, "too many changes kept");
        let ordered = self.changes.iter().zip(self.changes.iter().skip(1));
        ensure!(ordered.clone().all(|(a, b)| a.revision < b.revision), "changes out of order");
        let first = self.changes.front().map(|change| change.revision.0);
        ensure!(first != Some(0), "a change without a revision");
        let last = self.changes.back().map(|change| change.revision);
        ensure!(last <= Some(self.revision()), "a change from the future");
        Ok(())
    }

    fn verify_lock(&self, slot: u32, lock: &Lock, totals: &mut Totals) -> Result<(), String> {
        let key = &lock.key;
        let holders = || lock.holders.iter(&self.locks.claims);
        let queue = || lock.queue.iter(&self.locks.claims);
        ensure!(holders().count() == lock.holders.len() as usize, "holders of {key:?}");
        ensure!(queue().count() == lock.queue.len() as usize, "queue of {key:?}");

        // Promise 1, state exclusion.
        let writers = holders().filter(|(_, claim)| claim.exclusive).count();
        match lock.kind {
            LockKind::Slots(limit) => {
                ensure!(limit > 0, "{key:?} has no slots");
                ensure!(lock.holders.len() <= limit, "{key:?} has too many holders");
                ensure!(!lock.writer, "{key:?} has a writer");
            }
            LockKind::ReadWrite => {
                ensure!(lock.space == Space::Locks, "{key:?} is in the wrong namespace");
                ensure!(writers == 0 || lock.holders.len() == 1, "{key:?} has a writer and more");
                ensure!(lock.writer == (writers == 1), "{key:?} has a wrong writer mark");
            }
        }
        // Promise 6, no lost wakeup.
        if let Some((_, head)) = queue().next() {
            let room = match lock.kind {
                LockKind::Slots(limit) => lock.holders.len() < limit,
                LockKind::ReadWrite if head.exclusive => lock.holders.is_empty(),
                LockKind::ReadWrite => writers == 0,
            };
            let stalled = self.locks.stalled.contains(&(lock.space, key.clone()));
            ensure!(!room || stalled, "{key:?} has room, but its first waiter waits");
        }
        // Promise 3, fence order.
        let mut last = Fence(0);
        for (claim_slot, claim) in holders() {
            let hold = claim.hold.ok_or_else(|| format!("{key:?} has a holder without hold"))?;
            ensure!(claim.lock == slot, "{key:?} has somebody else's holder");
            ensure!(last < hold.fence, "{key:?} has fences out of order");
            last = hold.fence;
            ensure!(self.locks.by_fence.get(&hold.fence) == Some(&claim_slot), "{last:?} is lost");
            let lease = self.deadlines.leases().get(&(hold.base, hold.fence));
            ensure!(lease == Some(&claim_slot), "{last:?} has no lease");
            // Promise 7: nothing outlives its lease.
            let end = self.deadlines.lease_end(hold.base);
            ensure!(end >= self.now, "{last:?} has outlived its lease");
            ensure!(claim.request.is_none() && claim.timer.is_none(), "{last:?} still waits");
            ensure!(!claim.orphaned || !claim.enqueued, "{last:?} is an enqueued orphan");
            totals.owned_holds += usize::from(!claim.orphaned);
            totals.enqueued += usize::from(claim.enqueued);
            totals.holds += 1;
        }
        ensure!(last <= lock.last_fence, "{key:?} forgot its last fence");
        ensure!(lock.last_fence.0 < self.shared.fence_next(), "{key:?} is ahead of all fences");
        for (_, claim) in queue() {
            ensure!(claim.lock == slot, "{key:?} has somebody else's waiter");
            ensure!(claim.hold.is_none(), "{key:?} has a waiter that holds");
            let owned = claim.request.is_some() || claim.enqueued;
            ensure!(owned != claim.orphaned, "{key:?} has a waiter of nobody");
            let timed = claim.request.is_some() || claim.orphaned;
            ensure!(timed == claim.timer.is_some(), "{key:?} waits without end");
            totals.timers += usize::from(claim.timer.is_some());
            totals.enqueued += usize::from(claim.enqueued);
            totals.blocked += usize::from(claim.request.is_some());
        }
        let idle = lock.holders.is_empty() && lock.queue.is_empty();
        ensure!(idle == lock.idle_since.is_some(), "{key:?} has a wrong idle mark");
        let right = lock.space == self.space(lock.space);
        ensure!(right, "{key:?} is in a namespace that is not used");
        ensure!(lock.idle_since <= Some(self.now), "{key:?} is idle from the future");
        totals.idle += usize::from(idle);
        totals.claims += (lock.holders.len() + lock.queue.len()) as usize;
        Ok(())
    }

    fn verify_session(
        &self,
        id: SessionId,
        session: &Session,
        totals: &mut Totals,
    ) -> Result<(), String> {
        let mut last = Fence(0);
        let mut holds = 0;
        for (_, claim) in session.holds.iter(&self.locks.claims) {
            let fence = claim.hold.map_or(Fence(0), |hold| hold.fence);
            ensure!(claim.session == id && !claim.orphaned, "{id:?} has somebody else's hold");
            ensure!(last < fence, "{id:?} has holds out of order");
            last = fence;
            holds += 1;
        }
        ensure!(holds == session.holds.len() as usize, "{id:?} has a broken chain of holds");
        totals.session_holds += holds;
        for (&request, blocked) in session.blocked.iter() {
            let right = match blocked {
                Blocked::Claim(slot) => {
                    let claim = &self.locks.claims[*slot];
                    claim.session == id && claim.request == Some(request)
                }
                Blocked::Pop { key, place } => {
                    let popper = self.lists.get(key).and_then(|list| list.poppers.get(place));
                    popper.is_some_and(|it| it.session == id && it.request == request)
                }
                Blocked::Barrier { key } => {
                    let barrier = self.barriers.get(key);
                    let arrival = barrier.and_then(|barrier| barrier.arrivals.get(&id));
                    arrival.is_some_and(|arrival| arrival.0 == request)
                }
            };
            ensure!(right, "{id:?} is blocked by nothing");
            totals.session_blocked += 1;
        }
        for ((space, key), enqueued) in session.enqueued.iter() {
            match enqueued {
                Enqueued::Claim(slot) => {
                    let claim = &self.locks.claims[*slot];
                    let lock = &self.locks.arena[claim.lock];
                    let right = claim.session == id && claim.enqueued;
                    ensure!(right, "{id:?} has a wrong enqueue record");
                    ensure!(lock.space == *space && lock.key == *key, "{id:?} enqueued elsewhere");
                    totals.session_enqueued += 1;
                }
                Enqueued::Expired(number) => {
                    let note = session.notes.get(number);
                    ensure!(note == Some(&(*space, key.clone())), "{id:?} has a wrong note");
                }
            }
        }
        let notes = session.enqueued.values();
        let notes = notes.filter(|state| matches!(state, Enqueued::Expired(_))).count();
        ensure!(notes == session.notes.len(), "{id:?} has lost notes");
        let last_note = session.notes.last_key_value().map_or(0, |(number, _)| *number);
        ensure!(last_note < COUNT_MAX, "{id:?} runs out of notes");
        if let Some(results) = &session.results {
            ensure!(results.kept.len() == results.order.len(), "{id:?} has lost results");
            let ordered: BTreeSet<_> = results.order.iter().collect();
            ensure!(results.kept.keys().eq(ordered), "{id:?} has unknown results");
            ensure!(results.bytes == results.bytes_kept(), "{id:?} has miscounted results");
        }
        totals.timers += usize::from(session.detached.is_some());
        let timer = session.detached.map(|(_, key)| self.deadlines.timers().get(&key));
        let right =
            timer.is_none_or(|timer| matches!(timer, Some(Timer::Session(it)) if *it == id));
        ensure!(right, "{id:?} is detached for ever");
        Ok(())
    }

    fn verify_clients(&self) -> Result<(), String> {
        let mut orphans = BTreeMap::<SessionId, u32>::new();
        let (mut referred, mut places) = (0, 0);
        for (slot, claim) in self.locks.claims.iter() {
            ensure!(self.is_referred_right(slot), "a claim of {:?} is not found", claim.session);
            referred += usize::from(self.is_referred(slot));
            if claim.orphaned {
                let kept = self.is_kept_for_client(slot);
                ensure!(kept || claim.hold.is_some(), "a place is kept for nobody");
                places += u64::from(kept && claim.hold.is_none());
                *orphans.entry(claim.session).or_default() += 1;
            }
        }
        ensure!(referred == self.referenced.len(), "claims of clients that are gone");
        ensure!(places == self.referenced.places, "places of orphans are miscounted");
        for (id, client) in &self.clients {
            let left = orphans.get(id).copied().unwrap_or(0);
            ensure!(client.orphans == left, "orphans of {id:?} are miscounted");
            let lives = self.sessions.contains_key(id) && client.name.is_some();
            ensure!(left > 0 || lives, "{id:?} is known for nothing");
            ensure!(client.reference.is_none() || client.name.is_some(), "{id:?} has no name");
            let length = |it: &Option<Bytes>| it.as_ref().map_or(1, |it| it.len());
            let lengths = [length(&client.name), length(&client.reference)];
            let fit = lengths.iter().all(|&bytes| bytes <= CLIENT_BYTES_MAX) && lengths[1] > 0;
            ensure!(fit, "{id:?} has a name that is too long");
        }
        Ok(())
    }

    fn verify_values(&self, totals: &mut Totals) -> Result<(), String> {
        let mut idle = 0;
        for (key, counter) in self.counters.iter().filter(|(_, counter)| counter.value == 0) {
            let idle_since = (counter.changed_at, key.clone());
            let known = self.idle_values[IdleValue::Counter].contains(&idle_since);
            ensure!(known, "zero counter {key:?} stays for ever");
            idle += 1;
        }
        for (key, kv) in &self.kv {
            if kv.timer.is_some() {
                totals.timers += 1;
            } else if self.limits.kv_idle_gc {
                let idle_since = (kv.changed_at, key.clone());
                let known = self.idle_values[IdleValue::Kv].contains(&idle_since);
                ensure!(known, "entry {key:?} stays for ever");
                idle += 1;
            }
        }
        let known = [IdleValue::Counter, IdleValue::Kv].map(|kind| self.idle_values[kind].len());
        ensure!(idle == known.iter().sum::<usize>(), "idle values that do not exist");
        for (key, list) in &self.lists {
            ensure!(list.items.is_empty() != list.poppers.is_empty(), "list {key:?} is wrong");
            let in_order = list.poppers.iter().all(|(&place, popper)| place == popper.timer.1);
            ensure!(in_order, "list {key:?} has poppers out of order");
            totals.timers += list.poppers.len();
            totals.blocked += list.poppers.len();
        }
        for (key, barrier) in &self.barriers {
            let arrived = barrier.arrivals.len();
            let waiting = arrived > 0 && arrived < barrier.count as usize;
            ensure!(waiting, "barrier {key:?} is open or empty");
            totals.timers += arrived;
            totals.blocked += arrived;
        }
        let keys = self.counters.len() + self.kv.len() + self.lists.len() + self.barriers.len();
        ensure!(self.shared.keys() >= keys as u64, "keys are miscounted");
        Ok(())
    }

    fn verify_subscriptions(&self) -> Result<(), String> {
        let mut wanted = 0;
        let mut listed = 0;
        let mut all = Volume::default();
        for (&id, session) in &self.sessions {
            let mut own = Volume::default();
            for subscription in &session.subscriptions {
                own.add(subscription);
                all.add(subscription);
                // Whoever does not listen is nowhere: what is counted below would be too much otherwise.
                if !self.listens(id) {
                    continue;
                }
                let present = match subscription {
                    Owned::Signals { pattern, group } => {
                        let listeners = self.subscriptions.signals.get(pattern);
                        listeners.is_some_and(|listeners| {
                            if group.is_empty() {
                                return listeners.alone.contains(&id);
                            }
                            let members = listeners.groups.get(group);
                            members.is_some_and(|members| members.sessions.contains(&id))
                        })
                    }
                    Owned::Changes { pattern } => match self.subscriptions.shared_for(pattern) {
                        Some(watches) => {
                            let mut present = false;
                            watches.read(&mut |index| present = index.contains(pattern, id));
                            listed += 1;
                            present
                        }
                        None => self.subscriptions.watches.contains(pattern, id),
                    },
                    Owned::Leaders { key } => {
                        let sessions = self.observers.0.get(key);
                        let reason = sessions.and_then(|sessions| sessions.get(&id));
                        reason.is_some_and(|reason| reason.explicit)
                    }
                };
                ensure!(present, "{id:?} is not listed for {subscription:?}");
                wanted += 1;
            }
            ensure!(own == session.subscribed, "subscriptions of {id:?} are miscounted");
        }
        ensure!(all == self.subscriptions.volume, "subscriptions are miscounted");
        let separators = self.limits.separators();
        for (pattern, listeners) in self.subscriptions.signals.iter() {
            ensure!(pattern::is_valid(pattern, separators), "{pattern:?} is no pattern");
            listed += listeners.alone.len();
            for members in listeners.groups.values() {
                ensure!(members.turn < members.sessions.len(), "{pattern:?} has a lost turn");
                listed += members.sessions.len();
            }
        }
        for (pattern, sessions) in self.subscriptions.watches.iter() {
            ensure!(pattern::is_valid(pattern, separators), "{pattern:?} is no pattern");
            listed += sessions.len();
        }
        for (key, sessions) in &self.observers.0 {
            for (id, reason) in sessions {
                ensure!(self.sessions.contains_key(id), "{key:?} has an observer that is gone");
                ensure!(reason.explicit || reason.leads, "{key:?} has an observer for nothing");
                listed += usize::from(reason.explicit);
            }
        }
        ensure!(wanted == listed, "subscriptions of nobody");
        Ok(())
    }
}

#[derive(Default)]
struct Totals {
    claims: usize,
    holds: usize,
    owned_holds: usize,
    session_holds: usize,
    enqueued: usize,
    session_enqueued: usize,
    idle: usize,
    timers: usize,
    blocked: usize,
    session_blocked: usize,
}
