//! Locks: who holds, who waits, and who is next.
//!
//! One rule for mutexes, semaphores, elections and read-write locks: the queue is strictly first in, first
//! out, and its head is granted as soon as there is room for it. A *claim* is one request for a lock: it
//! waits in the lock's queue, then it is a hold.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::hash::BuildHasher;

use dflockd_api::{
    Bytes, Caller, Command, Event, Fence, Grant, LeaderEvent, LostReason, Mode, Outcome, Push,
    Refusal, RequestId, Revision, SessionId, Space, Span, Timestamp, Token, command,
};
use foldhash::fast::FixedState;
use hashbrown::{HashMap, HashTable};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::chain::{Arena, Chain, Linked, Links, Slot};
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::session::{Blocked, Enqueued};
use crate::store::Store;
use crate::tally::Primitive;
use crate::view::LockKind;

/// Chain of a lock: its queue or its holders.
pub(crate) const IN_LOCK: usize = 0;
/// Chain of a session: its holds, in the order they were granted.
pub(crate) const IN_SESSION: usize = 1;
/// Chain of the locks that nobody holds or waits for, longest idle first.
pub(crate) const IDLE: usize = 2;

pub(crate) struct Lock {
    pub(crate) key: Bytes,
    pub(crate) space: Space,
    pub(crate) kind: LockKind,
    pub(crate) holders: Chain<IN_LOCK>,
    pub(crate) queue: Chain<IN_LOCK>,
    /// The one holder excludes all others (a writer).
    pub(crate) writer: bool,
    /// The fence of the last grant, below every later one.
    pub(crate) last_fence: Fence,
    /// The hold that ran out most recently, so that its owner can be told why a renewal fails.
    pub(crate) expired: Option<Token>,
    pub(crate) revision: Revision,
    /// Set exactly while the lock is in the idle chain.
    pub(crate) idle_since: Option<Timestamp>,
    pub(crate) idle_links: Links,
}

impl Lock {
    fn has_room_for(&self, exclusive: bool) -> bool {
        match self.kind {
            LockKind::Slots(limit) => self.holders.len() < limit,
            LockKind::ReadWrite if exclusive && bug(Bug::WriterShares) => !self.writer,
            LockKind::ReadWrite if exclusive => self.holders.is_empty(),
            LockKind::ReadWrite => !self.writer,
        }
    }

    /// Whether this is an exclusive lock in the namespace of locks; elections are such locks.
    pub(crate) fn is_mutex(&self) -> bool {
        self.space == Space::Locks && self.kind == LockKind::Slots(1)
    }
}

impl Linked<IDLE> for Lock {
    fn links(&self) -> &Links {
        &self.idle_links
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.idle_links
    }
}

pub(crate) struct Claim {
    pub(crate) lock: Slot,
    pub(crate) session: SessionId,
    /// A writer.
    pub(crate) exclusive: bool,
    pub(crate) election: bool,
    pub(crate) salt: u64,
    pub(crate) lease: Span,
    /// When it was queued, then when it was granted.
    pub(crate) since: Timestamp,
    /// The blocked request that is answered by the grant.
    pub(crate) request: Option<RequestId>,
    /// The session has an enqueue record of it.
    pub(crate) enqueued: bool,
    pub(crate) timer: Option<TimerKey>,
    /// Set once granted.
    pub(crate) hold: Option<Hold>,
    /// The session ended without releasing: the hold belongs to nobody and lasts as long as its lease, or the place
    /// as long as its timer, unless its client comes back (`client.rs`).
    pub(crate) orphaned: bool,
    pub(crate) lock_links: Links,
    pub(crate) session_links: Links,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Hold {
    pub(crate) fence: Fence,
    /// Where the lease ends, failover grace apart.
    pub(crate) base: Timestamp,
}

impl Claim {
    pub(crate) fn token(&self, fence: Fence) -> Token {
        Token { fence, salt: self.salt }
    }
}

impl Linked<IN_LOCK> for Claim {
    fn links(&self) -> &Links {
        &self.lock_links
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.lock_links
    }
}

impl Linked<IN_SESSION> for Claim {
    fn links(&self) -> &Links {
        &self.session_links
    }
    fn links_mut(&mut self) -> &mut Links {
        &mut self.session_links
    }
}

pub(crate) struct Locks {
    pub(crate) arena: Arena<Lock>,
    pub(crate) claims: Arena<Claim>,
    by_key: HashTable<Slot>,
    hasher: FixedState,
    /// Every hold.
    pub(crate) by_fence: HashMap<Fence, Slot, FixedState>,
    /// The longest lease of holds that were renewed for longer than they were taken for; there are few.
    pub(crate) renewed: BTreeMap<Fence, Span>,
    pub(crate) idle: Chain<IDLE>,
    /// Locks whose head could be granted if there were a fence, or if grants had begun.
    pub(crate) stalled: BTreeSet<(Space, Bytes)>,
}

impl Locks {
    pub(crate) fn new(seed: u64) -> Self {
        let hasher = FixedState::with_seed(seed);
        Self {
            arena: Arena::new(),
            claims: Arena::new(),
            by_key: HashTable::new(),
            by_fence: HashMap::with_hasher(hasher.clone()),
            renewed: BTreeMap::new(),
            hasher,
            idle: Chain::new(),
            stalled: BTreeSet::new(),
        }
    }

    pub(crate) fn find(&self, space: Space, key: &[u8]) -> Option<Slot> {
        let same = |&slot: &Slot| {
            let lock = &self.arena[slot];
            lock.space == space && *lock.key == *key
        };
        self.by_key.find(self.hasher.hash_one(key), same).copied()
    }

    /// Makes room for `count` locks with a hold each.
    pub(crate) fn reserve(&mut self, count: usize) {
        self.arena.reserve(count);
        self.claims.reserve(count);
        self.by_fence.reserve(count);
        let Self { arena, hasher, by_key, .. } = self;
        by_key.reserve(count, |&slot| hasher.hash_one(&*arena[slot].key));
    }

    pub(crate) fn insert(&mut self, lock: Lock) -> Slot {
        let hash = self.hasher.hash_one(&*lock.key);
        let slot = self.arena.insert(lock);
        let Self { arena, hasher, by_key, .. } = self;
        by_key.insert_unique(hash, slot, |&slot| hasher.hash_one(&*arena[slot].key));
        slot
    }

    pub(crate) fn longest_idle(&self) -> Option<Timestamp> {
        let slot = self.idle.first()?;
        self.arena[slot].idle_since
    }

    pub(crate) fn drop_longest_idle(&mut self) {
        let slot = self.idle.first().expect("asked for only when there is one");
        self.idle.remove(&mut self.arena, slot);
        let hash = self.hasher.hash_one(&*self.arena[slot].key);
        let entry = self.by_key.find_entry(hash, |&other| other == slot);
        entry.expect("every lock is in the table").remove();
        self.arena.remove(slot);
    }

    /// Keeps the idle chain true after a change of the lock.
    fn settle(&mut self, slot: Slot, now: Timestamp) {
        let lock = &mut self.arena[slot];
        let idle = lock.holders.is_empty() && lock.queue.is_empty();
        match (idle, lock.idle_since.is_some()) {
            (true, false) => {
                lock.idle_since = Some(now);
                self.idle.push_back(&mut self.arena, slot);
            }
            (false, true) => {
                lock.idle_since = None;
                self.idle.remove(&mut self.arena, slot);
            }
            (true, true) | (false, false) => {}
        }
    }

    /// The hold that a token names, if key, namespace and token are right.
    fn held(&self, space: Space, key: &[u8], token: Token) -> Option<Slot> {
        let slot = *self.by_fence.get(&token.fence)?;
        let claim = &self.claims[slot];
        let lock = &self.arena[claim.lock];
        // The salt is compared without a branch per byte; the fence is no secret.
        let right = lock.space == space && *lock.key == *key && claim.salt == token.salt;
        right.then_some(slot)
    }
}

/// What a lock is that is asked for in this mode.
pub(crate) fn kind_of(mode: Mode) -> LockKind {
    match mode {
        Mode::Mutex | Mode::Election => LockKind::Slots(1),
        Mode::Semaphore { limit } => LockKind::Slots(limit),
        Mode::Read | Mode::Write => LockKind::ReadWrite,
    }
}

/// How a new claim begins.
enum Entry {
    Grant(Fence),
    Queue,
}

/// How a hold can end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndOfHold {
    Released,
    Resigned,
    Expired,
    Forced,
    /// With its session; the reason is told if somebody else ended it.
    Session(Option<LostReason>),
}

impl Store {
    pub(crate) fn acquire(
        &mut self,
        caller: Caller,
        command: command::Acquire<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Outcome> {
        let command::Acquire { mode, wait, lease, salt, key } = command;
        if self.has_all_holds(caller.session) {
            return Some(Outcome::Refused(Refusal::MaxHolds));
        }
        if let Some(slot) = self.left_behind(caller.session, key, mode) {
            let waits = self.locks.claims[slot].hold.is_none() && wait > Span::ZERO;
            if waits && self.has_all_waits(caller.session) {
                return Some(Outcome::Refused(Refusal::MaxWaits));
            }
            return self.acquire_again(slot, caller, command, effects);
        }
        let lock = match self.lock_for(key, mode) {
            Ok(lock) => lock,
            Err(refusal) => return Some(Outcome::Refused(refusal)),
        };
        match self.enter(lock, mode) {
            Err(refusal) => Some(Outcome::Refused(refusal)),
            Ok(Entry::Grant(fence)) => {
                let claim = self.claim(lock, caller.session, mode, lease, salt);
                Some(Outcome::Granted(self.grant_at_once(claim, fence, effects)))
            }
            Ok(Entry::Queue) if wait == Span::ZERO => {
                let primitive = Primitive::asked(&self.locks.arena[lock], mode);
                self.tally.counts(primitive).timeouts += 1;
                Some(Outcome::Timeout)
            }
            Ok(Entry::Queue) if self.has_all_waits(caller.session) => {
                Some(Outcome::Refused(Refusal::MaxWaits))
            }
            Ok(Entry::Queue) => {
                let claim = self.claim(lock, caller.session, mode, lease, salt);
                self.block(claim, caller, wait);
                self.queue_up(claim);
                None
            }
        }
    }

    pub(crate) fn enqueue(
        &mut self,
        session: SessionId,
        command: command::Enqueue<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::Enqueue { mode, lease, salt, key } = command;
        let space = self.space(mode.space());
        let record = (space, Bytes::from(key));
        if let Some(Enqueued::Claim(_)) = self.session(session).enqueued.get(&record) {
            return Outcome::Refused(Refusal::AlreadyEnqueued);
        }
        if self.has_all_holds(session) {
            return Outcome::Refused(Refusal::MaxHolds);
        }
        if self.has_all_waits(session) {
            return Outcome::Refused(Refusal::MaxWaits);
        }
        if let Some(slot) = self.left_behind(session, key, mode) {
            self.take_back(slot, session, lease, salt);
            let claim = &self.locks.claims[slot];
            let grant = |hold: Hold| Grant { token: claim.token(hold.fence), lease: claim.lease };
            return claim.hold.map_or(Outcome::Queued, |hold| Outcome::Acquired(grant(hold)));
        }
        let lock = match self.lock_for(key, mode) {
            Ok(lock) => lock,
            Err(refusal) => return Outcome::Refused(refusal),
        };
        let entry = match self.enter(lock, mode) {
            Ok(entry) => entry,
            Err(refusal) => return Outcome::Refused(refusal),
        };
        let claim = self.claim(lock, session, mode, lease, salt);
        self.locks.claims[claim].enqueued = true;
        let owner = self.session(session);
        owner.forget_note(&record);
        owner.enqueued.insert(record, Enqueued::Claim(claim));
        match entry {
            Entry::Grant(fence) => Outcome::Acquired(self.grant_at_once(claim, fence, effects)),
            Entry::Queue => {
                self.queue_up(claim);
                Outcome::Queued
            }
        }
    }

    /// Whether a command might be granted or renew a lease, at once or later; false if it is certain to be refused.
    #[must_use]
    pub fn may_lease(&self, command: &Command<'_>) -> bool {
        if let Command::Renew(command::Renew { key, space, token, .. }) = *command {
            return self.locks.held(self.space(space), key, token).is_some();
        }
        let (key, mode, waits) = if let Command::Acquire(acquire) = *command {
            (acquire.key, acquire.mode, acquire.wait > Span::ZERO)
        } else if let Command::Enqueue(enqueue) = *command {
            (enqueue.key, enqueue.mode, true)
        } else {
            return command.lease().is_some();
        };
        let Some(slot) = self.locks.find(self.space(mode.space()), key) else { return true };
        let lock = &self.locks.arena[slot];
        let has_room = lock.queue.is_empty() && lock.has_room_for(mode == Mode::Write);
        let waiters_max = self.limits.waiters_max;
        let can_queue = waiters_max == 0 || u64::from(lock.queue.len()) < waiters_max;
        lock.kind == kind_of(mode) && (has_room || waits && can_queue)
    }

    pub(crate) fn wait(
        &mut self,
        caller: Caller,
        command: command::Wait<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Outcome> {
        let command::Wait { space, wait, key } = command;
        let record = (self.space(space), Bytes::from(key));
        let owner = self.session(caller.session);
        if owner.forget_note(&record) {
            return Some(Outcome::Refused(Refusal::LeaseExpired));
        }
        let Some(&Enqueued::Claim(slot)) = owner.enqueued.get(&record) else {
            return Some(Outcome::Refused(Refusal::NotEnqueued));
        };
        let claim = &mut self.locks.claims[slot];
        if let Some(hold) = &mut claim.hold {
            self.deadlines.remove_lease(hold.base, hold.fence);
            hold.base = self.now + claim.lease;
            self.deadlines.add_lease(hold.base, hold.fence, slot);
            let grant =
                Grant { token: Token { fence: hold.fence, salt: claim.salt }, lease: claim.lease };
            claim.enqueued = false;
            self.session(caller.session).enqueued.remove(&record);
            self.lease_changed(caller.session);
            return Some(Outcome::Granted(grant));
        }
        if claim.request.is_some() {
            return Some(Outcome::Refused(Refusal::AlreadyWaiting));
        }
        if wait == Span::ZERO {
            self.leave_queue(slot, effects);
            return Some(Outcome::Timeout);
        }
        self.block(slot, caller, wait);
        self.reunite_waiting(slot, effects);
        None
    }

    pub(crate) fn release(
        &mut self,
        command: command::Release<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::Release { space, token, resign, key } = command;
        let end = if resign { EndOfHold::Resigned } else { EndOfHold::Released };
        self.end_hold_of(space, key, token, end, effects)
    }

    /// Ends the hold of a token, if it is one of this lock.
    fn end_hold_of(
        &mut self,
        space: Space,
        key: &[u8],
        token: Token,
        end: EndOfHold,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let mut held = self.locks.held(self.space(space), key, token);
        if held.is_none() && bug(Bug::AnyToken) {
            let lock = self.locks.find(self.space(space), key);
            held = lock.and_then(|lock| self.locks.arena[lock].holders.first());
        }
        let Some(slot) = held else {
            return Outcome::Refused(Refusal::NotHeld);
        };
        self.end_hold(slot, end, effects);
        Outcome::Done
    }

    pub(crate) fn renew(&mut self, command: command::Renew<'_>) -> Outcome {
        let command::Renew { space, token, lease, key } = command;
        let space = self.space(space);
        let Some(slot) = self.locks.held(space, key, token) else {
            let lock = self.locks.find(space, key).map(|lock| &self.locks.arena[lock]);
            let expired = lock.is_some_and(|lock| lock.expired == Some(token));
            if expired && bug(Bug::RenewExpired) {
                return Outcome::Renewed { fence: token.fence, lease: self.limits.lease(lease) };
            }
            return Outcome::Refused(if expired {
                Refusal::LeaseExpired
            } else {
                Refusal::NotHeld
            });
        };
        let lease = self.limits.lease(lease);
        let claim = &mut self.locks.claims[slot];
        let hold = claim.hold.as_mut().expect("found by its fence");
        self.deadlines.remove_lease(hold.base, hold.fence);
        hold.base = self.now + lease;
        self.deadlines.add_lease(hold.base, hold.fence, slot);
        let fence = hold.fence;
        let session = claim.session;
        if lease > claim.lease {
            let longest = self.locks.renewed.entry(fence).or_insert(lease);
            *longest = lease.max(*longest);
        }
        self.lease_changed(session);
        Outcome::Renewed { fence, lease }
    }

    /// Restarts the leases of the holds that follow the session.
    pub(crate) fn renew_session(&mut self, session: SessionId, lease: Span) -> Outcome {
        let Some(owner) = self.sessions.get(&session) else { return Outcome::Number(0) };
        let lease = self.limits.lease(Some(lease));
        let holds = owner.holds.iter(&self.locks.claims);
        let follow = holds.filter(|(_, claim)| claim.lease == lease);
        let slots: Vec<Slot> = follow.map(|(slot, _)| slot).collect();
        for &slot in &slots {
            let hold = self.locks.claims[slot].hold.as_mut().expect("it is among the holds");
            // One of them may have been renewed for longer.
            let base = hold.base.max(self.now + lease);
            self.deadlines.remove_lease(hold.base, hold.fence);
            hold.base = base;
            self.deadlines.add_lease(base, hold.fence, slot);
        }
        self.lease_changed(session);
        Outcome::Number(i64::try_from(slots.len()).expect("they fit into memory"))
    }

    pub(crate) fn force_release(
        &mut self,
        command: command::ForceRelease<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::ForceRelease { space, fence, key } = command;
        let salt = self.locks.by_fence.get(&fence).map(|&slot| self.locks.claims[slot].salt);
        let token = Token { fence, salt: salt.unwrap_or_default() };
        self.end_hold_of(space, key, token, EndOfHold::Forced, effects)
    }

    /// Ends the hold of a grant that could not be delivered, unless its client may come back for it.
    pub(crate) fn undo_grant(&mut self, token: Token, effects: &mut Vec<Effect>) {
        if let Some(&slot) = self.locks.by_fence.get(&token.fence)
            && self.locks.claims[slot].salt == token.salt
            && !self.is_kept_for_client(slot)
        {
            self.tally.undone += 1;
            self.end_hold(slot, EndOfHold::Released, effects);
        }
    }

    /// The time limit of a wait has come.
    pub(crate) fn wait_over(&mut self, slot: Slot, effects: &mut Vec<Effect>) {
        self.unrefer(slot);
        if self.locks.claims[slot].orphaned {
            return self.place_over(slot, effects);
        }
        let claim = &mut self.locks.claims[slot];
        claim.timer = None;
        let (session, request) = (claim.session, claim.request.expect("timed claims are blocked"));
        self.leave_queue(slot, effects);
        self.answer(session, request, Outcome::Timeout, effects);
    }

    /// Takes a waiting claim out of its queue, and lets those behind it move up.
    pub(crate) fn leave_queue(&mut self, slot: Slot, effects: &mut Vec<Effect>) {
        let primitive = self.primitive(slot);
        self.tally.counts(primitive).timeouts += 1;
        let lock = self.forget_waiter(slot);
        // A writer that leaves may have been all that kept the readers behind it waiting.
        if !bug(Bug::LostWakeup) {
            self.promote(lock, effects);
        }
    }

    /// Takes a waiting claim out of its queue and out of the records of its session. The lock is to be promoted.
    pub(crate) fn forget_waiter(&mut self, slot: Slot) -> Slot {
        self.unrefer(slot);
        self.forget_orphan(slot);
        let lock_slot = self.unqueue(slot);
        let claim = self.locks.claims.remove(slot);
        if let Some(timer) = claim.timer {
            self.deadlines.remove_timer(timer);
        }
        let lock = &self.locks.arena[lock_slot];
        if let Some(owner) = self.sessions.get_mut(&claim.session) {
            if let Some(request) = claim.request {
                owner.blocked.remove(&request);
            }
            if claim.enqueued {
                owner.enqueued.remove(&(lock.space, lock.key.clone()));
            }
        }
        lock_slot
    }

    /// Ends a hold and passes the lock on.
    pub(crate) fn end_hold(&mut self, slot: Slot, end: EndOfHold, effects: &mut Vec<Effect>) {
        self.unrefer(slot);
        self.forget_orphan(slot);
        let lock_slot = self.locks.claims[slot].lock;
        self.locks.arena[lock_slot].holders.remove(&mut self.locks.claims, slot);
        if !self.locks.claims[slot].orphaned
            && let Some(owner) = self.sessions.get_mut(&self.locks.claims[slot].session)
        {
            owner.holds.remove(&mut self.locks.claims, slot);
            owner.count_hold(false);
        }
        let primitive = self.primitive(slot);
        let claim = self.locks.claims.remove(slot);
        self.tally.ended(primitive, end, self.now.since(claim.since));
        let hold = claim.hold.expect("only a hold can end");
        self.locks.by_fence.remove(&hold.fence);
        self.locks.renewed.remove(&hold.fence);
        self.deadlines.remove_lease(hold.base, hold.fence);

        let lock = &mut self.locks.arena[lock_slot];
        lock.writer = false;
        if end == EndOfHold::Expired {
            lock.expired = Some(claim.token(hold.fence));
        }
        let key = lock.key.clone();
        if claim.enqueued
            && let Some(owner) = self.sessions.get_mut(&claim.session)
        {
            let record = (lock.space, key.clone());
            owner.enqueued.remove(&record);
            if end == EndOfHold::Expired {
                owner.note_expired(record, self.limits.expired_notes_max);
            }
        }
        let event = if end == EndOfHold::Resigned { Event::Resign } else { Event::Release };
        let revision = self.change(event, &key, effects);
        self.locks.arena[lock_slot].revision = revision;
        if claim.election {
            self.observers.forget_leader(&key, claim.session);
        }
        if end == EndOfHold::Resigned && self.locks.arena[lock_slot].is_mutex() {
            self.observers.tell(LeaderEvent::Resigned, &key, None, effects);
        }
        let lost = match end {
            EndOfHold::Released | EndOfHold::Resigned => None,
            EndOfHold::Expired => Some(LostReason::Expired),
            EndOfHold::Forced => Some(LostReason::Forced),
            EndOfHold::Session(reason) => reason,
        };
        if let Some(reason) = lost
            && !claim.orphaned
        {
            let push = Push::Lost { key, fence: hold.fence, reason };
            effects.push(Effect::Push { session: claim.session, push, group: None });
        }
        self.promote(lock_slot, effects);
        if end != EndOfHold::Expired && !claim.orphaned {
            self.lease_changed(claim.session);
        }
    }

    /// Grants to the head of the queue as long as there is room for it.
    pub(crate) fn promote(&mut self, lock_slot: Slot, effects: &mut Vec<Effect>) {
        loop {
            let lock = &self.locks.arena[lock_slot];
            let Some(head) = lock.queue.first() else { break };
            if !lock.has_room_for(self.locks.claims[head].exclusive) {
                break;
            }
            let Some(fence) = self.fence() else {
                self.locks.stalled.insert((lock.space, lock.key.clone()));
                break;
            };
            self.grant_to_head(lock_slot, head, fence, effects);
        }
        self.locks.settle(lock_slot, self.now);
    }

    /// Promotes where a grant was due but no fence could be had, or grants had not begun.
    pub(crate) fn promote_stalled(&mut self, effects: &mut Vec<Effect>) {
        if self.locks.stalled.is_empty() || !self.can_grant() {
            return;
        }
        for (space, key) in core::mem::take(&mut self.locks.stalled) {
            if let Some(lock) = self.locks.find(space, &key) {
                self.promote(lock, effects);
            }
        }
    }

    fn grant_to_head(
        &mut self,
        lock_slot: Slot,
        head: Slot,
        fence: Fence,
        effects: &mut Vec<Effect>,
    ) {
        self.unqueue(head);
        self.unrefer(head);
        let waited = self.now.since(self.locks.claims[head].since);
        self.tally.granted(self.primitive(head), Some(waited));
        let lock = &self.locks.arena[lock_slot];
        if lock.is_mutex() {
            self.observers.tell(LeaderEvent::Failover, &lock.key, None, effects);
        }
        let grant = self.grant(head, fence, effects);

        let claim = &mut self.locks.claims[head];
        let Some(request) = claim.request.take() else { return };
        let session = claim.session;
        if let Some(timer) = claim.timer.take() {
            self.deadlines.remove_timer(timer);
        }
        let was_enqueued = core::mem::take(&mut claim.enqueued);
        let lock = &self.locks.arena[lock_slot];
        let owner = self.sessions.get_mut(&session).expect("waiters have a session");
        owner.blocked.remove(&request);
        if was_enqueued {
            owner.enqueued.remove(&(lock.space, lock.key.clone()));
        }
        self.answer(session, request, Outcome::Granted(grant), effects);
    }

    fn grant_at_once(&mut self, slot: Slot, fence: Fence, effects: &mut Vec<Effect>) -> Grant {
        self.tally.granted(self.primitive(slot), None);
        let grant = self.grant(slot, fence, effects);
        self.locks.settle(self.locks.claims[slot].lock, self.now);
        grant
    }

    /// Makes a claim a hold.
    fn grant(&mut self, slot: Slot, fence: Fence, effects: &mut Vec<Effect>) -> Grant {
        let claim = &mut self.locks.claims[slot];
        // The longest lease may have become shorter while it waited.
        claim.lease = self.limits.lease(Some(claim.lease));
        let mut base = self.now + claim.lease;
        let is_orphan = claim.orphaned;
        if is_orphan && let Some(timer) = claim.timer.take() {
            base = base.min(timer.0);
            self.deadlines.remove_timer(timer);
        }
        claim.hold = Some(Hold { fence, base });
        claim.since = self.now;
        let grant = Grant { token: claim.token(fence), lease: claim.lease };
        let (lock_slot, session) = (claim.lock, claim.session);
        let (exclusive, election) = (claim.exclusive, claim.election);

        let lock = &mut self.locks.arena[lock_slot];
        assert!(lock.has_room_for(exclusive), "no room for hold {fence:?} of {:?}", lock.key);
        assert!(lock.last_fence < fence, "fence {fence:?} is not above {:?}", lock.last_fence);
        lock.last_fence = fence;
        lock.writer = lock.kind == LockKind::ReadWrite && exclusive;
        lock.holders.push_back(&mut self.locks.claims, slot);
        let key = lock.key.clone();

        self.locks.by_fence.insert(fence, slot);
        self.deadlines.add_lease(base, fence, slot);
        if is_orphan {
            self.refer(slot);
        } else {
            let owner = self.sessions.get_mut(&session).expect("claims are made for a session");
            owner.holds.push_back(&mut self.locks.claims, slot);
            owner.count_hold(true);
        }

        let event = if election { Event::Elect } else { Event::Acquire };
        let revision = self.change(event, &key, effects);
        self.locks.arena[lock_slot].revision = revision;
        if election {
            self.observers.tell(LeaderEvent::Elected, &key, Some(session), effects);
            if !is_orphan {
                self.observers.add_leader(&key, session);
            }
        }
        grant
    }

    fn lock_for(&mut self, key: &[u8], mode: Mode) -> Result<Slot, Refusal> {
        let kind = kind_of(mode);
        let space = self.space(mode.space());
        if let Some(slot) = self.locks.find(space, key) {
            return match (self.locks.arena[slot].kind, kind) {
                (LockKind::ReadWrite, LockKind::ReadWrite) => Ok(slot),
                (LockKind::Slots(have), LockKind::Slots(want)) if have == want => Ok(slot),
                (LockKind::Slots(_), LockKind::Slots(_)) => Err(Refusal::LimitMismatch),
                (LockKind::ReadWrite, LockKind::Slots(_))
                | (LockKind::Slots(_), LockKind::ReadWrite) => Err(Refusal::TypeMismatch),
            };
        }
        if !self.add_lock() {
            return Err(Refusal::MaxLocks);
        }
        let slot = self.locks.insert(Lock {
            key: Bytes::from(key),
            space,
            kind,
            holders: Chain::new(),
            queue: Chain::new(),
            writer: false,
            last_fence: Fence(0),
            expired: None,
            revision: Revision(0),
            idle_since: None,
            idle_links: Links::NONE,
        });
        self.locks.settle(slot, self.now);
        Ok(slot)
    }

    /// Counts one more lock, if there is room or idle ones can make some.
    fn add_lock(&mut self) -> bool {
        while !self.shared.add_lock(self.limits.locks_max) {
            if !self.limits.follows(2) || !self.drop_idlest_locks() {
                return false;
            }
        }
        true
    }

    /// Drops the locks that are idle for longest: all of that instant, because their order is not part of the state.
    pub(crate) fn drop_idlest_locks(&mut self) -> bool {
        let since = self.locks.longest_idle();
        while since.is_some() && self.locks.longest_idle() == since {
            self.locks.drop_longest_idle();
            self.shared.remove_lock();
        }
        since.is_some()
    }

    /// Whether there is such a lock.
    #[must_use]
    pub fn has_lock(&self, space: Space, key: &[u8]) -> bool {
        self.locks.find(self.space(space), key).is_some()
    }

    /// Whether a new claim is granted at once or must queue; an error if it can not even do that.
    fn enter(&self, slot: Slot, mode: Mode) -> Result<Entry, Refusal> {
        let lock = &self.locks.arena[slot];
        let first = lock.queue.is_empty() || bug(Bug::Overtaking);
        if self.grants_open && first && lock.has_room_for(mode == Mode::Write) {
            // Drawn here: another store may take the last one between a look and the grant.
            return self.shared.take_fence().map(Entry::Grant).ok_or(Refusal::NoFence);
        }
        let waiters_max = self.limits.waiters_max;
        if waiters_max > 0 && u64::from(lock.queue.len()) >= waiters_max {
            return Err(Refusal::MaxWaiters);
        }
        Ok(Entry::Queue)
    }

    fn claim(
        &mut self,
        lock: Slot,
        session: SessionId,
        mode: Mode,
        lease: Option<Span>,
        salt: u64,
    ) -> Slot {
        self.session(session);
        self.locks.claims.insert(Claim {
            lock,
            session,
            exclusive: mode == Mode::Write,
            election: mode == Mode::Election,
            salt,
            lease: self.limits.lease(lease),
            since: self.now,
            request: None,
            enqueued: false,
            timer: None,
            hold: None,
            orphaned: false,
            lock_links: Links::NONE,
            session_links: Links::NONE,
        })
    }

    fn queue_up(&mut self, slot: Slot) {
        let lock_slot = self.locks.claims[slot].lock;
        let lock = &mut self.locks.arena[lock_slot];
        lock.queue.push_back(&mut self.locks.claims, slot);
        self.queue_lengths.grew(lock.queue.len());
        self.tally.counts(Primitive::of(lock, &self.locks.claims[slot])).waiting += 1;
        if !self.grants_open {
            self.locks.stalled.insert((lock.space, lock.key.clone()));
        }
        self.locks.settle(lock_slot, self.now);
    }

    /// Takes a claim out of the queue of its lock.
    fn unqueue(&mut self, slot: Slot) -> Slot {
        let primitive = self.primitive(slot);
        self.tally.counts(primitive).waiting -= 1;
        let lock_slot = self.locks.claims[slot].lock;
        let queue = &mut self.locks.arena[lock_slot].queue;
        queue.remove(&mut self.locks.claims, slot);
        self.queue_lengths.shrank(queue.len());
        lock_slot
    }

    pub(crate) fn primitive(&self, slot: Slot) -> Primitive {
        let claim = &self.locks.claims[slot];
        Primitive::of(&self.locks.arena[claim.lock], claim)
    }

    /// Lets a request wait for the grant of a claim.
    fn block(&mut self, slot: Slot, caller: Caller, wait: Span) {
        let timer = self.deadlines.add_timer(self.now + wait, Timer::Claim(slot));
        let claim = &mut self.locks.claims[slot];
        claim.request = Some(caller.request);
        claim.timer = Some(timer);
        self.session(caller.session).blocked.insert(caller.request, Blocked::Claim(slot));
        self.refer(slot);
    }

    fn can_grant(&self) -> bool {
        self.grants_open && self.shared.fences_left() > 0
    }

    fn fence(&self) -> Option<Fence> {
        if self.grants_open { self.shared.take_fence() } else { None }
    }

    pub(crate) fn space(&self, space: Space) -> Space {
        if self.limits.shared_namespace { Space::Locks } else { space }
    }
}
