//! Who is behind a session, and what waits for a client that comes back.
//!
//! A session can say the name that people see and a *reference*: sessions with the same reference are the same client.
//! They are independent of each other while they live. What a session with a reference leaves behind
//! ([`Command::Orphan`](dflockd_api::Command::Orphan)) are *orphans*: its holds, and for some time its places in
//! queues. A session that asks for the same lock in the same mode with the same reference is the client that comes
//! back, and goes on where the other session was: with the hold and its token, or at the place in the queue.
//!
//! An orphaned place moves up like any other, so that nobody overtakes it and nobody behind it waits in vain. At the
//! head it becomes an orphaned hold, which ends when the place would have ended: those behind it wait no longer for a
//! client that is gone than the time for which its place is kept.
//!
//! A client that comes back before the store knows that its other session has ended waits like anybody else, and gets
//! what that session leaves behind at that moment ([`Store::reunite_orphan`]).

use alloc::collections::BTreeMap;
use alloc::vec::Vec;
use core::ops::Bound;

use dflockd_api::{
    Bytes, Caller, Fence, Grant, Mode, Outcome, SessionId, Span, Timestamp, command,
};

use crate::chain::Slot;
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::lock::{Claim, kind_of};
use crate::session::{Blocked, Enqueued};
use crate::store::Store;

/// Bytes of a name, and of a reference; what is longer is cut.
pub const CLIENT_BYTES_MAX: usize = 64;

/// Who is, or was, behind a session.
#[derive(Clone, Default)]
pub(crate) struct Client {
    /// What people see; none if the session has not said it.
    pub(crate) name: Option<Bytes>,
    /// None also if what the session left behind is not given back.
    pub(crate) reference: Option<Bytes>,
    /// How many claims the session has left behind: a session that has ended is remembered as long as there are some.
    pub(crate) orphans: u32,
}

/// The claims of clients with a reference that can be given back, or could take such a one. Follows from the claims.
#[derive(Default)]
pub(crate) struct Referenced {
    claims: BTreeMap<(Wanted, Rank), Slot>,
    /// How many of them are places that somebody left behind.
    pub(crate) places: u64,
}

/// Who wants which lock, and how.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Wanted {
    reference: Bytes,
    lock: Slot,
    exclusive: bool,
    election: bool,
}

/// In this order: what is given back first, and last who waits.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Hold(Fence),
    /// By its end.
    Place(TimerKey),
    /// Of a session that lives, by the end of the wait.
    Waiting(TimerKey),
}

impl Rank {
    const FIRST_WAITING: Self = Self::Waiting((Timestamp(0), 0));

    fn of(claim: &Claim) -> Option<Self> {
        match (claim.orphaned, claim.hold, claim.timer) {
            (true, Some(hold), _) => Some(Self::Hold(hold.fence)),
            (true, None, Some(timer)) => Some(Self::Place(timer)),
            (false, None, Some(timer)) => Some(Self::Waiting(timer)),
            (true, None, None) | (false, ..) => None,
        }
    }
}

impl Referenced {
    pub(crate) fn len(&self) -> usize {
        self.claims.len()
    }

    /// The first claim among those that are wanted like this, from one rank on and before another.
    fn first(&self, wanted: Wanted, from: Rank, before: Option<Rank>) -> Option<Slot> {
        let end = match before {
            Some(rank) => Bound::Excluded((wanted.clone(), rank)),
            None => Bound::Included((wanted.clone(), Rank::Waiting((Timestamp::NEVER, u64::MAX)))),
        };
        self.claims.range((Bound::Included((wanted, from)), end)).next().map(|(_, slot)| *slot)
    }
}

impl Store {
    /// What people see of the client of a session, also while only its orphans are left.
    #[must_use]
    pub fn client_name(&self, session: SessionId) -> Option<&Bytes> {
        self.clients.get(&session).and_then(|client| client.name.as_ref())
    }

    /// Whether a session has a reference.
    #[must_use]
    pub fn has_reference(&self, session: SessionId) -> bool {
        self.clients.get(&session).is_some_and(|client| client.reference.is_some())
    }

    pub(crate) fn identify(&mut self, session: SessionId, name: &[u8], reference: &[u8]) {
        let cut = |bytes: &[u8]| Bytes::from(&bytes[..bytes.len().min(CLIENT_BYTES_MAX)]);
        self.session(session);
        let client = self.clients.entry(session).or_default();
        client.name = Some(cut(name));
        // Orphans of an earlier session with this id were left behind without one.
        if client.reference.is_some() || reference.is_empty() || client.orphans > 0 {
            return;
        }
        client.reference = Some(cut(reference));
        // Those that wait already are known by it, too.
        let waiting = self.session(session).blocked.values();
        let waiting: Vec<Slot> = waiting
            .filter_map(|blocked| match blocked {
                Blocked::Claim(slot) => Some(*slot),
                Blocked::Pop { .. } | Blocked::Barrier { .. } => None,
            })
            .collect();
        waiting.into_iter().for_each(|slot| self.refer(slot));
    }

    /// Makes a claim known by the reference of its session, if it has one and the claim is of that sort.
    pub(crate) fn refer(&mut self, slot: Slot) {
        if let Some(key) = self.referred_as(slot) {
            self.referenced.places += u64::from(matches!(key.1, Rank::Place(_)));
            self.referenced.claims.insert(key, slot);
        }
    }

    /// The reverse of [`Store::refer`]: to be called before anything of the claim changes.
    pub(crate) fn unrefer(&mut self, slot: Slot) {
        if let Some(key) = self.referred_as(slot)
            && self.referenced.claims.remove(&key).is_some()
        {
            self.referenced.places -= u64::from(matches!(key.1, Rank::Place(_)));
        }
    }

    fn referred_as(&self, slot: Slot) -> Option<(Wanted, Rank)> {
        let claim = &self.locks.claims[slot];
        let &Claim { lock, exclusive, election, .. } = claim;
        let rank = Rank::of(claim)?;
        let reference = self.clients.get(&claim.session)?.reference.clone()?;
        Some((Wanted { reference, lock, exclusive, election }, rank))
    }

    /// Whether the client of this claim may get it back.
    pub(crate) fn is_kept_for_client(&self, slot: Slot) -> bool {
        self.locks.claims[slot].orphaned && self.referred_as(slot).is_some()
    }

    /// Whether a claim must be known by a reference.
    pub(crate) fn is_referred(&self, slot: Slot) -> bool {
        self.referred_as(slot).is_some()
    }

    /// Whether a claim is known by a reference if it must be.
    pub(crate) fn is_referred_right(&self, slot: Slot) -> bool {
        let key = self.referred_as(slot);
        key.is_none_or(|key| self.referenced.claims.get(&key) == Some(&slot))
    }

    /// What a client has left behind that a session of the same client asks for: the oldest hold, or else the place
    /// that would end first.
    pub(crate) fn left_behind(&self, session: SessionId, key: &[u8], mode: Mode) -> Option<Slot> {
        if self.referenced.claims.is_empty() {
            return None;
        }
        let reference = self.clients.get(&session)?.reference.clone()?;
        let space = self.space(mode.space());
        let lock = self.locks.find(space, key)?;
        if self.locks.arena[lock].kind != kind_of(mode) {
            return None;
        }
        let record = (space, self.locks.arena[lock].key.clone());
        // A session that has a place here of its own is not one that comes back.
        let owner = self.sessions.get(&session)?;
        if matches!(owner.enqueued.get(&record), Some(Enqueued::Claim(_))) {
            return None;
        }
        let (exclusive, election) = (mode == Mode::Write, mode == Mode::Election);
        let wanted = Wanted { reference, lock, exclusive, election };
        self.referenced.first(wanted, Rank::Hold(Fence(0)), Some(Rank::FIRST_WAITING))
    }

    /// Gives an orphan to a session that asks for the lock again, as if the session had enqueued itself there.
    pub(crate) fn take_back(
        &mut self,
        slot: Slot,
        session: SessionId,
        lease: Option<Span>,
        salt: u64,
    ) {
        self.adopt(slot, session, self.limits.lease(lease));
        let claim = &mut self.locks.claims[slot];
        if claim.hold.is_none() {
            claim.salt = salt;
        }
        claim.enqueued = true;
        let lock = &self.locks.arena[claim.lock];
        let record = (lock.space, lock.key.clone());
        let owner = self.session(session);
        owner.forget_note(&record);
        owner.enqueued.insert(record, Enqueued::Claim(slot));
    }

    /// Acquires what the client has left behind: see [`Store::left_behind`].
    pub(crate) fn acquire_again(
        &mut self,
        slot: Slot,
        caller: Caller,
        command: command::Acquire<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Outcome> {
        let command::Acquire { mode, wait, lease, salt, key } = command;
        self.take_back(slot, caller.session, lease, salt);
        self.wait(caller, command::Wait { space: mode.space(), wait, key }, effects)
    }

    /// Makes an orphan the claim of a session, with a lease that counts from now.
    fn adopt(&mut self, slot: Slot, session: SessionId, lease: Span) {
        self.unrefer(slot);
        self.forget_orphan(slot);
        self.session(session);
        let claim = &mut self.locks.claims[slot];
        claim.orphaned = false;
        claim.session = session;
        let before = core::mem::replace(&mut claim.lease, lease);
        let Some(hold) = &mut claim.hold else {
            if let Some(timer) = claim.timer.take() {
                self.deadlines.remove_timer(timer);
            }
            return;
        };
        self.deadlines.remove_lease(hold.base, hold.fence);
        hold.base = self.now + lease;
        self.deadlines.add_lease(hold.base, hold.fence, slot);
        let fence = hold.fence;
        // The longest lease that anybody was ever given with this token is remembered.
        let longest =
            self.locks.renewed.remove(&fence).map_or(before, |longest| longest.max(before));
        if longest > lease {
            self.locks.renewed.insert(fence, longest);
        }
        if claim.election {
            let lock = &self.locks.arena[claim.lock];
            self.observers.add_leader(&lock.key, session);
        }
        let owner = self.sessions.get_mut(&session).expect("just made sure of");
        owner.holds.insert_by(&mut self.locks.claims, slot, |before| {
            before.hold.is_some_and(|hold| hold.fence < fence)
        });
        owner.count_hold(true);
        self.lease_changed(session);
    }

    /// One claim less that the session of this one has left behind.
    pub(crate) fn forget_orphan(&mut self, slot: Slot) {
        let claim = &self.locks.claims[slot];
        if claim.orphaned
            && let Some(client) = self.clients.get_mut(&claim.session)
        {
            client.orphans -= 1;
            let lives = client.name.is_some() && self.sessions.contains_key(&claim.session);
            if client.orphans == 0 && !lives {
                self.clients.remove(&claim.session);
            }
        }
    }

    /// Leaves a place in a queue behind, for the client of its session to come back to until an instant. False if too
    /// many have been left already: then nothing has changed.
    pub(crate) fn orphan_place(&mut self, slot: Slot, until: Timestamp) -> bool {
        let max = self.limits.waits_per_session_max;
        if max > 0 && self.referenced.places >= max {
            return false;
        }
        self.unrefer(slot);
        let claim = &mut self.locks.claims[slot];
        let (session, request) = (claim.session, claim.request.take());
        if let Some(timer) = claim.timer.take() {
            self.deadlines.remove_timer(timer);
        }
        claim.enqueued = false;
        claim.timer = Some(self.deadlines.add_timer(until, Timer::Claim(slot)));
        if let Some(request) = request {
            self.session(session).blocked.remove(&request);
        }
        self.orphan(slot);
        true
    }

    /// The claim belongs to nobody who is there any more.
    pub(crate) fn orphan(&mut self, slot: Slot) {
        let claim = &mut self.locks.claims[slot];
        claim.orphaned = true;
        self.clients.entry(claim.session).or_default().orphans += 1;
        self.refer(slot);
    }

    /// The time of an orphaned place is over.
    pub(crate) fn place_over(&mut self, slot: Slot, effects: &mut Vec<Effect>) {
        let lock = self.forget_waiter(slot);
        self.promote(lock, effects);
    }

    /// Gives an orphan to a session of the same client that waits for the lock, if there is one.
    pub(crate) fn reunite_orphan(&mut self, orphan: Slot, effects: &mut Vec<Effect>) {
        if let Some((wanted, Rank::Hold(_) | Rank::Place(_))) = self.referred_as(orphan)
            && let Some(waiting) = self.referenced.first(wanted, Rank::FIRST_WAITING, None)
        {
            self.reunite(orphan, waiting, effects);
        }
    }

    /// Gives a claim that waits what its client has left behind, if there is something.
    pub(crate) fn reunite_waiting(&mut self, waiting: Slot, effects: &mut Vec<Effect>) {
        if let Some((wanted, Rank::Waiting(_))) = self.referred_as(waiting)
            && let Some(orphan) =
                self.referenced.first(wanted, Rank::Hold(Fence(0)), Some(Rank::FIRST_WAITING))
        {
            self.reunite(orphan, waiting, effects);
        }
    }

    /// Gives an orphan to a claim that waits, in place of its own place in the queue.
    fn reunite(&mut self, orphan: Slot, waiting: Slot, effects: &mut Vec<Effect>) {
        let Claim { session, lease, salt, since, enqueued, .. } = self.locks.claims[waiting];
        let is_hold = self.locks.claims[orphan].hold.is_some();
        if !is_hold && self.locks.claims[orphan].since >= since {
            return;
        }
        let (request, timer) =
            (self.locks.claims[waiting].request, self.locks.claims[waiting].timer);
        let (request, timer) = request.zip(timer).expect("what waits is blocked");
        let lock = self.forget_waiter(waiting);
        self.adopt(orphan, session, self.limits.lease(Some(lease)));
        let claim = &mut self.locks.claims[orphan];
        if let Some(hold) = claim.hold {
            let grant = Grant { token: claim.token(hold.fence), lease: claim.lease };
            self.answer(session, request, Outcome::Granted(grant), effects);
        } else {
            (claim.salt, claim.request, claim.enqueued) = (salt, Some(request), enqueued);
            claim.timer = Some(self.deadlines.add_timer(timer.0, Timer::Claim(orphan)));
            let arena = &self.locks.arena[lock];
            let record = (arena.space, arena.key.clone());
            let owner = self.session(session);
            owner.blocked.insert(request, Blocked::Claim(orphan));
            if enqueued {
                owner.enqueued.insert(record, Enqueued::Claim(orphan));
            }
            self.refer(orphan);
        }
        // A writer that has left the queue may have been all that kept others waiting.
        self.promote(lock, effects);
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec;

    use super::*;
    use dflockd_api::{Command, RequestId};

    use crate::limits::Limits;
    use crate::shared::Shared;
    use crate::view::Only;

    fn send(store: &mut Store, session: u64, now: u64, command: Command<'_>) {
        let caller = Caller { session: SessionId(session), request: RequestId(now), keep: false };
        store.apply(caller, command, Timestamp(now), &mut Vec::new());
        store.check_invariants();
    }

    fn acquire(wait: u64) -> Command<'static> {
        let (mode, wait, lease) = (Mode::Mutex, Span(wait), Some(Span(100)));
        Command::Acquire(command::Acquire { key: b"k", mode, wait, lease, salt: 7 })
    }

    /// The names of holders and waiters.
    fn names(store: &Store) -> Vec<Option<Vec<u8>>> {
        let locks = store.view_locks(b"k", Only::All, store.now, 9);
        let holders = locks[0].holders.iter().map(|holder| &holder.client);
        let waiters = locks[0].queue.iter().map(|waiter| &waiter.client);
        holders.chain(waiters).map(|name| name.as_ref().map(|name| name.to_vec())).collect()
    }

    /// GUARANTEES 48: a name is known as long as there is something to be named, in snapshots too, and has a bound.
    #[test]
    fn names_last_as_long_as_what_is_named() {
        let shared = Arc::new(Shared::new());
        shared.set_fences(1, u64::MAX);
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        send(&mut store, 1, 1, Command::Identify { name: &[b'x'; 100], reference: b"" });
        send(&mut store, 1, 2, acquire(0));
        send(&mut store, 2, 3, Command::Identify { name: b"first", reference: b"" });
        send(&mut store, 2, 4, acquire(1000));
        send(&mut store, 2, 5, Command::Identify { name: b"two", reference: b"" });
        send(&mut store, 3, 6, acquire(1000));
        let (long, two) = (vec![b'x'; CLIENT_BYTES_MAX], b"two".to_vec());
        assert_eq!(names(&store), [Some(long.clone()), Some(two.clone()), None]);
        // The hold of a session that has ended is still that client's.
        send(&mut store, 1, 7, Command::EndSession { release: false, forced: false });
        assert_eq!(names(&store), [Some(long.clone()), Some(two.clone()), None]);
        let bytes = store.snapshot();
        let mut store = Store::restore(&bytes, Arc::new(Shared::new())).expect("it is whole");
        assert!(store.snapshot() == bytes);
        assert_eq!(names(&store), [Some(long), Some(two.clone()), None]);
        send(&mut store, 9, 102, Command::Tick);
        assert_eq!(names(&store), [Some(two), None]);
        assert_eq!(store.clients.len(), 1, "the first one is forgotten");
        send(&mut store, 2, 103, Command::EndSession { release: true, forced: false });
        assert!(store.clients.is_empty() && names(&store) == [None]);
        assert_eq!(store.snapshot()[0], 3, "what has no clients has the form without them");
    }

    /// A store that begins again has nobody's places.
    #[test]
    fn a_new_cluster_has_no_orphans() {
        let shared = Arc::new(Shared::new());
        shared.set_fences(1, u64::MAX);
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        for session in [1, 2] {
            let reference = b"me";
            send(&mut store, session, 1, Command::Identify { name: b"n", reference });
            send(&mut store, session, 1, acquire(1000));
        }
        for session in [2, 1] {
            send(&mut store, session, 2, Command::Orphan { ttl: Span(50), cut: false });
        }
        assert_eq!(names(&store).len(), 2);
        store.begin_anew(1000, (Span(10), None));
        store.check_invariants();
        assert!(names(&store).is_empty() && store.clients.is_empty());
        assert_eq!(store.referenced.len(), 0);
    }

    /// GUARANTEES 36: what is found by references is the same in a store and in one that was made of its snapshot, also
    /// if a request comes so late that its session begins once more, with orphans of its own.
    #[test]
    fn ids_that_come_again_confuse_nothing() {
        let shared = Arc::new(Shared::new());
        shared.set_fences(1, u64::MAX);
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        let mut other: Option<Store> = None;
        let mut state = 42_u64;
        for step in 1..20_000 {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let roll = state >> 33;
            let key: &[u8] = if roll & 1 == 0 { b"k" } else { b"q" };
            let (mode, lease) = (Mode::Semaphore { limit: 2 }, Some(Span(40)));
            let acquire = command::Acquire { key, mode, wait: Span(roll & 31), lease, salt: 7 };
            let space = mode.space();
            let command = match roll >> 8 & 15 {
                0..=5 => Command::Acquire(acquire),
                6..=7 => Command::Enqueue(command::Enqueue { key, mode, lease, salt: 7 }),
                8..=9 => Command::Wait(command::Wait { key, space, wait: Span(roll & 31) }),
                10..=11 => {
                    let reference: &[u8] = if roll & 2 == 0 { b"me" } else { b"" };
                    Command::Identify { name: b"n", reference }
                }
                12..=13 => Command::Orphan { ttl: Span(roll & 31), cut: roll & 4 == 0 },
                14 => Command::EndSession { release: roll & 4 == 0, forced: false },
                _ => Command::Tick,
            };
            for store in [Some(&mut store), other.as_mut()].into_iter().flatten() {
                send(store, 1 + (roll >> 16) % 4, step, command);
            }
            if step % 20 == 0 {
                let bytes = store.snapshot();
                assert!(other.is_none_or(|other| other.snapshot() == bytes), "at step {step}");
                let again = Store::restore(&bytes, Arc::new(Shared::new()));
                other = Some(again.expect("it is whole"));
            }
        }
    }
}
