//! The naive twin of [`Store`](crate::Store): the same answers, found the slow and obvious way.
//!
//! Written from the specification, never from the store: what the two have in common is what was
//! asked for. Every list is a `Vec` that is searched from its beginning, every index is missing,
//! and nothing is remembered that can be counted again.

use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use crate::{
    Bytes, Caller, Change, Command, Effect, End, Event, Expect, Fence, Grant, Group, LeaderEvent,
    Limits, LostReason, Mode, Outcome, Push, Query, Refusal, RequestId, Revision, SessionId, Space,
    Span, Subscription, Timestamp, Token, command,
};

/// Where a lock lives, and its key.
pub(super) type LockId = (Space, Bytes);

pub(super) struct Model {
    limits: Limits,
    now: Timestamp,
    /// How far time has come within `apply`: the moment of what expires, then `now`.
    instant: Timestamp,
    grants_from: Timestamp,
    grace_until: Timestamp,
    fence_next: u64,
    fence_ceiling: u64,
    revision: Revision,
    /// The last events, oldest first.
    ring: Vec<Change>,
    locks: BTreeMap<LockId, Lock>,
    counters: BTreeMap<Bytes, Counter>,
    entries: BTreeMap<Bytes, Entry>,
    lists: BTreeMap<Bytes, List>,
    barriers: BTreeMap<Bytes, Barrier>,
    sessions: BTreeMap<SessionId, Session>,
    /// Of the sessions that have said one.
    references: BTreeMap<SessionId, Bytes>,
    blocked: Vec<Blocked>,
    /// In the order in which they were made.
    subscribers: Vec<Subscriber>,
    /// Which member of a queue group comes next.
    turns: BTreeMap<Group, usize>,
    timers_made: u64,
    /// Every grant ever made, so that a test can present old tokens.
    pub(super) granted: Vec<(LockId, Token)>,
    effects: Vec<Effect>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Slots(u32),
    ReadWrite,
}

struct Lock {
    kind: Kind,
    holds: Vec<Hold>,
    queue: Vec<Waiter>,
    idle_since: Option<Timestamp>,
    last_expired: Option<Token>,
}

struct Hold {
    token: Token,
    /// None once its session ended without releasing it.
    owner: Option<SessionId>,
    /// The reference of the client that left it behind and may come back for it.
    left_by: Option<Bytes>,
    mode: Mode,
    /// When the lease ends if no leader changes.
    base: Timestamp,
    /// The lease it was asked for with.
    lease: Span,
}

#[derive(Clone)]
struct Waiter {
    session: SessionId,
    since: Timestamp,
    mode: Mode,
    lease: Span,
    salt: u64,
    place: Place,
}

/// What a place in a queue belongs to.
#[derive(Clone, PartialEq, Eq)]
enum Place {
    Acquire(RequestId),
    Enqueue,
    /// A client that may come back has left it behind; by its end.
    Left {
        reference: Bytes,
        until: Timestamp,
        timer: u64,
    },
}

/// What a client has left behind.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Orphan {
    Hold(Fence),
    Place { until: Timestamp, timer: u64 },
}

struct Counter {
    value: i64,
    touched_at: Timestamp,
}

struct Entry {
    value: Bytes,
    revision: Revision,
    expires_at: Option<Timestamp>,
    touched_at: Timestamp,
}

#[derive(Default)]
struct List {
    items: VecDeque<Bytes>,
    poppers: Vec<(SessionId, RequestId, End)>,
}

struct Barrier {
    count: u32,
    arrived: Vec<(SessionId, RequestId)>,
}

#[derive(Default)]
struct Session {
    /// In the order in which they were answered.
    results: Vec<(RequestId, Outcome)>,
    /// The highest request whose result had to make room for others.
    forgotten: Option<RequestId>,
    records: Vec<Record>,
    /// Enqueues whose lease ran out before they were claimed, oldest first.
    notes: Vec<LockId>,
    detached: Option<Detached>,
}

struct Record {
    lock: LockId,
    lease: Span,
    hold: Option<Token>,
}

#[derive(Clone, Copy)]
struct Detached {
    until: Timestamp,
    timer: u64,
}

#[derive(Clone)]
struct Blocked {
    session: SessionId,
    request: RequestId,
    keep: bool,
    until: Timestamp,
    timer: u64,
    on: On,
}

#[derive(Clone, PartialEq, Eq)]
enum On {
    Acquire(LockId),
    Wait(LockId),
    Pop(Bytes),
    Barrier(Bytes),
}

struct Subscriber {
    session: SessionId,
    topic: Topic,
    /// False while the session has no connection.
    listens: bool,
}

#[derive(Clone, PartialEq, Eq)]
enum Topic {
    Signals { pattern: Bytes, group: Bytes },
    Changes { pattern: Bytes },
    Leaders { key: Bytes },
}

/// What time brings about.
enum Due {
    Open,
    Lease(LockId, Token),
    Limit(SessionId, RequestId),
    /// Of a place that was left behind.
    Place(LockId, u64),
    Ttl(Bytes),
    Detached(SessionId),
}

/// How a hold ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    Released { resign: bool },
    Expired,
    Forced,
    SessionForced,
    SessionEnded,
    Undone,
}

impl Model {
    pub(super) fn new(limits: Limits, grants_from: Timestamp) -> Self {
        Self {
            limits,
            now: Timestamp(0),
            instant: Timestamp(0),
            grants_from,
            grace_until: Timestamp(0),
            fence_next: 0,
            fence_ceiling: 0,
            revision: Revision(0),
            ring: Vec::new(),
            locks: BTreeMap::new(),
            counters: BTreeMap::new(),
            entries: BTreeMap::new(),
            lists: BTreeMap::new(),
            barriers: BTreeMap::new(),
            sessions: BTreeMap::new(),
            references: BTreeMap::new(),
            blocked: Vec::new(),
            subscribers: Vec::new(),
            turns: BTreeMap::new(),
            timers_made: 0,
            granted: Vec::new(),
            effects: Vec::new(),
        }
    }

    pub(super) fn set_fences(&mut self, next: u64, ceiling: u64) {
        self.fence_next = next;
        self.fence_ceiling = ceiling;
    }

    pub(super) fn fences(&self) -> (u64, u64) {
        (self.fence_next, self.fence_ceiling)
    }

    pub(super) fn revision(&self) -> Revision {
        self.revision
    }

    /// Holds that have not ended, in order of key and fence.
    pub(super) fn holds(&self) -> Vec<(LockId, Token)> {
        self.locks
            .iter()
            .flat_map(|(id, lock)| lock.holds.iter().map(|hold| (id.clone(), hold.token)))
            .collect()
    }

    pub(super) fn group_members(&self, group: &Group) -> Vec<SessionId> {
        let topic = Topic::Signals { pattern: group.pattern.clone(), group: group.name.clone() };
        let listening = self.subscribers.iter().filter(|s| s.listens);
        listening.filter(|s| s.topic == topic).map(|s| s.session).collect()
    }

    /// The next instant at which time alone changes something that can be seen.
    pub(super) fn next_due_at(&self) -> Option<Timestamp> {
        self.next_due().map(|(at, _)| at)
    }

    pub(super) fn apply(
        &mut self,
        caller: Caller,
        command: Command<'_>,
        now: Timestamp,
    ) -> Vec<Effect> {
        self.pass_time(now);
        self.drop_idle();
        self.promote_all();
        if !self.answer_retry(caller, &command) {
            self.run(caller, command);
        }
        core::mem::take(&mut self.effects)
    }

    pub(super) fn read(&self, query: Query<'_>, now: Timestamp) -> Outcome {
        match query {
            Query::Counter { key } => {
                Outcome::Number(self.counters.get(key).map_or(0, |counter| counter.value))
            }
            Query::Kv { key } => match self.entries.get(key) {
                Some(entry) if entry.expires_at.is_none_or(|at| now < at) => {
                    Outcome::Value(entry.value.clone())
                }
                Some(_) | None => Outcome::Empty,
            },
            Query::Entry { key } => match self.entries.get(key) {
                Some(entry) if entry.expires_at.is_none_or(|at| now < at) => {
                    Outcome::Entry { value: entry.value.clone(), revision: entry.revision }
                }
                Some(_) | None => Outcome::Empty,
            },
            Query::Length { key } => Outcome::Number(self.list_length(key)),
            Query::Range { key, start, stop } => {
                let length = self.list_length(key);
                let from_end = |index: i64| if index < 0 { index + length } else { index };
                let (start, stop) = (from_end(start), from_end(stop));
                let items = self.lists.get(key).map(|list| &list.items);
                Outcome::Items(
                    (0..)
                        .zip(items.into_iter().flatten())
                        .filter(|(index, _)| start <= *index && *index <= stop)
                        .map(|(_, item)| item.clone())
                        .collect(),
                )
            }
        }
    }

    fn list_length(&self, key: &[u8]) -> i64 {
        self.lists.get(key).map_or(0, |list| count(list.items.len()))
    }

    // Time.

    fn pass_time(&mut self, now: Timestamp) {
        assert!(self.now <= now, "time runs back");
        self.instant = self.now;
        self.now = now;
        while let Some((at, due)) = self.next_due()
            && at <= now
        {
            self.instant = at;
            match due {
                Due::Open => self.promote_all(),
                Due::Lease(id, token) => self.end_hold(&id, token, Ending::Expired),
                Due::Limit(session, request) => self.reach_limit(session, request),
                Due::Place(id, timer) => {
                    let lock = self.locks.get_mut(&id).expect("a waiter keeps the lock");
                    lock.queue.retain(|waiter| waiter.left_as().is_none_or(|it| it.1 != timer));
                    self.promote(&id);
                }
                Due::Ttl(key) => {
                    self.entries.remove(&key);
                }
                Due::Detached(session) => {
                    self.effects.push(Effect::SessionEnded { session });
                    self.end_session(session, Some(Ending::SessionEnded));
                }
            }
        }
        self.instant = now;
    }

    /// The earliest of all that is to come. Of the same instant, leases go first, so that a grant
    /// beats a time limit, and sessions last, so that their requests are still answered.
    fn next_due(&self) -> Option<(Timestamp, Due)> {
        let mut first: Option<((Timestamp, u8, u64), Due)> = None;
        let mut consider = |order: (Timestamp, u8, u64), due: &dyn Fn() -> Due| {
            if first.as_ref().is_none_or(|(best, _)| order < *best) {
                first = Some((order, due()));
            }
        };
        let waiting = self.locks.values().any(|lock| !lock.queue.is_empty());
        if waiting && self.instant < self.grants_from {
            consider((self.grants_from, 0, 0), &|| Due::Open);
        }
        for (id, lock) in &self.locks {
            for Hold { token, base, .. } in &lock.holds {
                consider((self.lease_end(*base), 1, token.fence.0), &|| {
                    Due::Lease(id.clone(), *token)
                });
            }
        }
        for (id, lock) in &self.locks {
            for (until, timer) in lock.queue.iter().filter_map(Waiter::left_as) {
                consider((until, 2, timer), &|| Due::Place(id.clone(), timer));
            }
        }
        for blocked in &self.blocked {
            consider((blocked.until, 2, blocked.timer), &|| {
                Due::Limit(blocked.session, blocked.request)
            });
        }
        for (key, entry) in &self.entries {
            if let Some(at) = entry.expires_at {
                consider((at, 2, u64::MAX), &|| Due::Ttl(key.clone()));
            }
        }
        for (session, state) in &self.sessions {
            if let Some(Detached { until, timer }) = state.detached {
                let at = self
                    .locks
                    .values()
                    .flat_map(|lock| &lock.holds)
                    .filter(|hold| hold.owner == Some(*session))
                    .map(|hold| self.lease_end(hold.base))
                    .fold(until.max(self.instant), Timestamp::max);
                consider((at, 3, timer), &|| Due::Detached(*session));
            }
        }
        first.map(|((at, ..), due)| (at, due))
    }

    fn lease_end(&self, base: Timestamp) -> Timestamp {
        base.max(self.grace_until.min(base + self.limits.failover_grace))
    }

    fn drop_idle(&mut self) {
        let now = self.now;
        let Limits { idle_max, gc_interval, kv_idle_gc, .. } = self.limits;
        let stale = |since: Timestamp| {
            now.0 >= (since + idle_max).0.div_ceil(gc_interval.0).saturating_mul(gc_interval.0)
        };
        self.locks.retain(|_, lock| !lock.idle_since.is_some_and(stale));
        self.counters.retain(|_, counter| counter.value != 0 || !stale(counter.touched_at));
        self.entries.retain(|_, entry| {
            !kv_idle_gc || entry.expires_at.is_some() || !stale(entry.touched_at)
        });
    }

    // Answers.

    /// Whether `caller` has sent this request before.
    fn answer_retry(&mut self, caller: Caller, command: &Command<'_>) -> bool {
        let Caller { session, request, keep } = caller;
        // These keep no result: they say the same thing however often they are heard.
        let repeatable = matches!(
            command,
            Command::Cancel(_) | Command::Acknowledge(_) | Command::RenewSession(_)
        );
        if !keep || !is_answered(command) || repeatable {
            return false;
        }
        if self.blocked.iter().any(|b| b.session == session && b.request == request) {
            return true;
        }
        let Some(state) = self.sessions.get(&session) else { return false };
        if let Some((_, outcome)) = state.results.iter().find(|(kept, _)| *kept == request) {
            self.effects.push(Effect::Reply { session, request, outcome: outcome.clone() });
            return true;
        }
        if state.forgotten.is_some_and(|highest| request <= highest) {
            let outcome = Outcome::Refused(Refusal::Forgotten);
            self.effects.push(Effect::Reply { session, request, outcome });
            return true;
        }
        false
    }

    fn answer(&mut self, caller: Caller, outcome: Outcome) {
        let Caller { session, request, keep } = caller;
        if keep {
            let results_max = self.limits.results_max;
            let state = self.sessions.entry(session).or_default();
            state.results.push((request, outcome.clone()));
            if count(state.results.len()).unsigned_abs() > results_max {
                let (oldest, _) = state.results.remove(0);
                state.forgotten = state.forgotten.max(Some(oldest));
            }
        }
        self.effects.push(Effect::Reply { session, request, outcome });
    }

    fn push(&mut self, session: SessionId, push: Push) {
        self.effects.push(Effect::Push { session, push, group: None });
    }

    fn run(&mut self, caller: Caller, command: Command<'_>) {
        let session = caller.session;
        let mut keep = caller.keep;
        let outcome = match command {
            Command::Tick => None,
            Command::NewTerm => {
                self.grace_until = self.grace_until.max(self.now + self.limits.failover_grace);
                None
            }
            Command::Acquire(command::Acquire { key, mode, wait, lease, salt }) => {
                self.acquire(caller, key, mode, wait, lease, salt)
            }
            Command::Enqueue(command::Enqueue { key, mode, lease, salt }) => {
                Some(self.enqueue(session, key, mode, lease, salt))
            }
            Command::Wait(command::Wait { key, space, wait }) => {
                self.wait(caller, self.lock_id(space, key), wait)
            }
            Command::Release(command::Release { key, space, token, resign }) => {
                let id = self.lock_id(space, key);
                Some(match self.hold(&id, token) {
                    Some(_) => {
                        self.end_hold(&id, token, Ending::Released { resign });
                        Outcome::Done
                    }
                    None => Outcome::Refused(Refusal::NotHeld),
                })
            }
            Command::Renew(command::Renew { key, space, token, lease }) => {
                Some(self.renew(&self.lock_id(space, key), token, lease))
            }
            Command::RenewSession(command::RenewSession { lease }) => {
                keep = false;
                Some(self.renew_session(session, lease))
            }
            Command::ForceRelease(command::ForceRelease { key, space, fence }) => {
                let id = self.lock_id(space, key);
                let hold = self.locks.get(&id).and_then(|lock| {
                    lock.holds.iter().map(|hold| hold.token).find(|token| token.fence == fence)
                });
                Some(match hold {
                    Some(token) => {
                        self.end_hold(&id, token, Ending::Forced);
                        Outcome::Done
                    }
                    None => Outcome::Refused(Refusal::NotHeld),
                })
            }
            Command::Add(command::Add { key, delta, decrement }) => {
                Some(self.add(key, delta, decrement))
            }
            Command::CounterSet(command::CounterSet { key, value }) => {
                Some(self.counter_set(key, value))
            }
            Command::KvSet(command::KvSet { key, value, ttl }) => {
                Some(self.kv_set(key, None, value, ttl, Event::Kset))
            }
            Command::KvDelete(command::KvDelete { key }) => {
                self.entries.remove(key);
                self.emit(Event::Kdel, key);
                Some(Outcome::Done)
            }
            Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl }) => {
                Some(self.kv_set(key, Some(expect), value, ttl, Event::Kcas))
            }
            Command::Push(command::Push { key, end, value }) => {
                Some(self.list_push(key, end, value))
            }
            Command::Pop(command::Pop { key, end, wait }) => self.list_pop(caller, key, end, wait),
            Command::BarrierWait(command::BarrierWait { key, count, wait }) => {
                self.arrive(caller, key, count, wait)
            }
            Command::Signal(command::Signal { channel, payload }) => {
                Some(self.signal(channel, payload))
            }
            Command::Subscribe(command::Subscribe { to: subscription }) => {
                Some(self.subscribe(session, subscription))
            }
            Command::Unsubscribe(command::Unsubscribe { from: subscription }) => {
                let topic = topic_of(subscription);
                Some(if topic.is_well_formed(self.limits.rules >= 2) {
                    self.unsubscribe(session, &topic);
                    Outcome::Done
                } else {
                    Outcome::Refused(Refusal::BadPattern)
                })
            }
            Command::Cancel(command::Cancel { request }) => {
                keep = false;
                let mut of_it = self.blocked.iter();
                let is_pop = of_it.any(|blocked| {
                    (blocked.session, blocked.request) == (session, request)
                        && matches!(blocked.on, On::Pop(_))
                });
                let outcome = match is_pop && self.limits.rules >= 2 {
                    true => Outcome::Empty,
                    false => Outcome::Timeout,
                };
                self.withdraw(session, request, Some(outcome));
                Some(Outcome::Done)
            }
            Command::Acknowledge(command::Acknowledge { up_to }) => {
                keep = false;
                if let Some(state) = self.sessions.get_mut(&session) {
                    state.results.retain(|(request, _)| *request > up_to);
                }
                Some(Outcome::Done)
            }
            Command::Undo(outcome) => {
                self.undo(outcome);
                None
            }
            Command::Detach { until } => {
                let timer = self.new_timer();
                self.sessions.entry(session).or_default().detached =
                    Some(Detached { until, timer });
                if self.limits.rules >= 2 {
                    for topic in self.topics_of(session) {
                        self.unsubscribe(session, &topic);
                        self.subscribers.push(Subscriber { session, topic, listens: false });
                    }
                }
                None
            }
            Command::Attach => {
                if let Some(state) = self.sessions.get_mut(&session)
                    && state.detached.take().is_some()
                    && self.limits.rules >= 2
                {
                    for topic in self.topics_of(session) {
                        self.unsubscribe(session, &topic);
                        self.subscribers.push(Subscriber { session, topic, listens: true });
                    }
                }
                None
            }
            Command::Identify { name: _, reference } => {
                self.sessions.entry(session).or_default();
                if !reference.is_empty() {
                    self.references.entry(session).or_insert_with(|| reference.into());
                }
                None
            }
            Command::Orphan { ttl, cut } => {
                let end = self.now + ttl;
                for hold in self.locks.values_mut().flat_map(|lock| &mut lock.holds) {
                    if hold.owner == Some(session) && cut {
                        hold.base = hold.base.min(end);
                    }
                }
                self.leave(session, end);
                None
            }
            Command::EndSession { release, forced } => {
                self.end_session(
                    session,
                    match (release, forced) {
                        (false, _) => None,
                        (true, false) => Some(Ending::SessionEnded),
                        (true, true) => Some(Ending::SessionForced),
                    },
                );
                None
            }
        };
        if let Some(outcome) = outcome {
            self.answer(Caller { keep, ..caller }, outcome);
        }
    }

    fn undo(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Granted(grant) | Outcome::Acquired(grant) => {
                let holds = self.holds();
                let found = holds.into_iter().find(|(_, t)| *t == grant.token);
                // A client that may come back for it gets it then.
                if let Some((id, token)) = found
                    && self.hold(&id, token).is_some_and(|hold| hold.left_by.is_none())
                {
                    self.end_hold(&id, token, Ending::Undone);
                }
            }
            Outcome::Popped { key, end, value } => {
                if !self.hand_to_popper(key, value) {
                    let list = self.lists.entry(key.clone()).or_default();
                    match end {
                        End::Left => list.items.push_front(value.clone()),
                        End::Right => list.items.push_back(value.clone()),
                    }
                    self.emit(push_event(*end), key);
                }
            }
            Outcome::Done
            | Outcome::Queued
            | Outcome::Renewed { .. }
            | Outcome::Timeout
            | Outcome::Empty
            | Outcome::Conflict
            | Outcome::Number(_)
            | Outcome::Value(_)
            | Outcome::Written(_)
            | Outcome::Items(_)
            | Outcome::Part(_)
            | Outcome::Compacted(_)
            | Outcome::Entry { .. }
            | Outcome::Refused(_) => {}
        }
    }

    // Waiting.

    fn new_timer(&mut self) -> u64 {
        self.timers_made += 1;
        self.timers_made
    }

    fn block(&mut self, caller: Caller, wait: Span, on: On) {
        let Caller { session, request, keep } = caller;
        let timer = self.new_timer();
        self.blocked.push(Blocked { session, request, keep, until: self.now + wait, timer, on });
    }

    /// Takes a request off the list of those that wait for an answer.
    fn unblock(&mut self, session: SessionId, request: RequestId) -> Option<Blocked> {
        let index =
            self.blocked.iter().position(|b| b.session == session && b.request == request)?;
        Some(self.blocked.remove(index))
    }

    fn reach_limit(&mut self, session: SessionId, request: RequestId) {
        let blocked = self.blocked.iter().find(|b| b.session == session && b.request == request);
        let outcome = match blocked.expect("only blocked requests have a limit").on {
            On::Acquire(_) | On::Wait(_) | On::Barrier(_) => Outcome::Timeout,
            On::Pop(_) => Outcome::Empty,
        };
        self.withdraw(session, request, Some(outcome));
    }

    /// Ends the wait of a request, if it does wait, and the places it had; answers it with `outcome`.
    fn withdraw(&mut self, session: SessionId, request: RequestId, outcome: Option<Outcome>) {
        let Some(blocked) = self.unblock(session, request) else { return };
        match blocked.on {
            On::Acquire(id) => {
                self.leave_queue(&id, session, Place::Acquire(request));
                self.promote(&id);
            }
            On::Wait(id) => {
                self.remove_record(session, &id);
                self.leave_queue(&id, session, Place::Enqueue);
                self.promote(&id);
            }
            On::Pop(key) => {
                let list = self.lists.get_mut(&key).expect("a popper keeps the list");
                list.poppers.retain(|(s, r, _)| (*s, *r) != (session, request));
                self.drop_list_if_empty(&key);
            }
            On::Barrier(key) => {
                let barrier = self.barriers.remove(&key).expect("its members keep the barrier");
                for other in barrier.arrived {
                    if other != (session, request) {
                        self.finish(other, Outcome::Timeout);
                    }
                }
            }
        }
        if let Some(outcome) = outcome {
            self.answer(Caller { session, request, keep: blocked.keep }, outcome);
        }
    }

    /// Answers a blocked request whose places are gone already.
    fn finish(&mut self, (session, request): (SessionId, RequestId), outcome: Outcome) {
        let blocked = self.unblock(session, request).expect("it is blocked");
        self.answer(Caller { session, request, keep: blocked.keep }, outcome);
    }

    // Locks.

    /// With a shared namespace there is only one.
    fn lock_id(&self, space: Space, key: &[u8]) -> LockId {
        let space = if self.limits.shared_namespace { Space::Locks } else { space };
        (space, key.into())
    }

    fn hold(&mut self, id: &LockId, token: Token) -> Option<&mut Hold> {
        self.locks.get_mut(id)?.holds.iter_mut().find(|hold| hold.token == token)
    }

    fn acquire(
        &mut self,
        caller: Caller,
        key: &[u8],
        mode: Mode,
        wait: Span,
        lease: Option<Span>,
        salt: u64,
    ) -> Option<Outcome> {
        let id = self.lock_id(mode.space(), key);
        let lease = self.shortened(lease.unwrap_or(self.limits.default_lease));
        if self.holds_all_it_may(caller.session) {
            return Some(Outcome::Refused(Refusal::MaxHolds));
        }
        if let Some(orphan) = self.left_behind(caller.session, &id, mode) {
            let waits = matches!(orphan, Orphan::Place { .. }) && wait > Span::ZERO;
            if waits && self.waits_for_all_it_may(caller.session) {
                return Some(Outcome::Refused(Refusal::MaxWaits));
            }
            self.take_back(caller.session, &id, orphan, lease, salt);
            return self.wait(caller, id, wait);
        }
        let (place, since) = (Place::Acquire(caller.request), self.now);
        let waiter = Waiter { session: caller.session, since, mode, lease, salt, place };
        match self.ask(&id, &waiter) {
            Err(refusal) => Some(Outcome::Refused(refusal)),
            Ok(Some(grant)) => Some(Outcome::Granted(grant)),
            Ok(None) if wait == Span::ZERO => Some(Outcome::Timeout),
            Ok(None) if self.waits_for_all_it_may(caller.session) => {
                Some(Outcome::Refused(Refusal::MaxWaits))
            }
            Ok(None) => {
                self.join_queue(&id, waiter);
                self.block(caller, wait, On::Acquire(id));
                None
            }
        }
    }

    fn enqueue(
        &mut self,
        session: SessionId,
        key: &[u8],
        mode: Mode,
        lease: Option<Span>,
        salt: u64,
    ) -> Outcome {
        let id = self.lock_id(mode.space(), key);
        let lease = self.shortened(lease.unwrap_or(self.limits.default_lease));
        if self.record(session, &id).is_some() {
            return Outcome::Refused(Refusal::AlreadyEnqueued);
        }
        if self.holds_all_it_may(session) {
            return Outcome::Refused(Refusal::MaxHolds);
        }
        if self.waits_for_all_it_may(session) {
            return Outcome::Refused(Refusal::MaxWaits);
        }
        if let Some(orphan) = self.left_behind(session, &id, mode) {
            let token = self.take_back(session, &id, orphan, lease, salt);
            return token
                .map_or(Outcome::Queued, |token| Outcome::Acquired(Grant { token, lease }));
        }
        let since = self.now;
        let waiter = Waiter { session, since, mode, lease, salt, place: Place::Enqueue };
        let grant = match self.ask(&id, &waiter) {
            Err(refusal) => return Outcome::Refused(refusal),
            Ok(grant) => grant,
        };
        if grant.is_none() {
            self.join_queue(&id, waiter);
        }
        let state = self.sessions.entry(session).or_default();
        state.notes.retain(|note| *note != id);
        state.records.push(Record { lock: id, lease, hold: grant.map(|grant| grant.token) });
        grant.map_or(Outcome::Queued, Outcome::Acquired)
    }

    fn holds_all_it_may(&self, session: SessionId) -> bool {
        let holds = self.locks.values().flat_map(|lock| &lock.holds);
        let own = count(holds.filter(|hold| hold.owner == Some(session)).count()).unsigned_abs();
        self.limits.holds_per_session_max > 0 && own >= self.limits.holds_per_session_max
    }

    fn waits_for_all_it_may(&self, session: SessionId) -> bool {
        let blocked = self.blocked.iter().filter(|blocked| blocked.session == session).count();
        let places = self.sessions.get(&session).map_or(0, |state| state.records.len());
        let own = count(blocked + places).unsigned_abs();
        self.limits.waits_per_session_max > 0 && own >= self.limits.waits_per_session_max
    }

    /// A grant if there is room and nobody waits, `None` if the request has to queue.
    fn ask(&mut self, id: &LockId, waiter: &Waiter) -> Result<Option<Grant>, Refusal> {
        let kind = kind_of(waiter.mode);
        if !self.locks.contains_key(id) {
            while count(self.locks.len()).unsigned_abs() >= self.limits.locks_max {
                // Those that are idle for longest make room, if there are idle ones.
                let oldest = self.locks.values().filter_map(|lock| lock.idle_since).min();
                if oldest.is_none() || self.limits.rules < 2 {
                    return Err(Refusal::MaxLocks);
                }
                self.locks.retain(|_, lock| lock.idle_since != oldest);
            }
            let lock = Lock {
                kind,
                holds: Vec::new(),
                queue: Vec::new(),
                idle_since: Some(self.now),
                last_expired: None,
            };
            self.locks.insert(id.clone(), lock);
        }
        let lock = &self.locks[id];
        match (lock.kind, kind) {
            (Kind::Slots(existing), Kind::Slots(wanted)) if existing != wanted => {
                return Err(Refusal::LimitMismatch);
            }
            (Kind::Slots(_), Kind::Slots(_)) | (Kind::ReadWrite, Kind::ReadWrite) => {}
            (Kind::Slots(_), Kind::ReadWrite) | (Kind::ReadWrite, Kind::Slots(_)) => {
                return Err(Refusal::TypeMismatch);
            }
        }
        if lock.queue.is_empty() && lock.has_room_for(waiter.mode) && self.may_grant() {
            if !self.has_fence() {
                return Err(Refusal::NoFence);
            }
            return Ok(Some(self.grant(id, waiter, false)));
        }
        let waiters = count(lock.queue.len()).unsigned_abs();
        if self.limits.waiters_max > 0 && waiters >= self.limits.waiters_max {
            return Err(Refusal::MaxWaiters);
        }
        Ok(None)
    }

    fn may_grant(&self) -> bool {
        self.instant >= self.grants_from
    }

    fn has_fence(&self) -> bool {
        self.fence_next < self.fence_ceiling
    }

    fn grant(&mut self, id: &LockId, waiter: &Waiter, promoted: bool) -> Grant {
        let token = Token { fence: Fence(self.fence_next), salt: waiter.salt };
        self.fence_next += 1;
        self.granted.push((id.clone(), token));
        let mut base = self.now + waiter.lease;
        let lock = self.locks.get_mut(id).expect("the lock exists");
        lock.idle_since = None;
        let (mut owner, mut left_by) = (Some(waiter.session), None);
        if let Place::Left { reference, until, .. } = &waiter.place {
            (owner, left_by) = (None, Some(reference.clone()));
            base = base.min(*until);
        }
        let &Waiter { mode, lease, .. } = waiter;
        lock.holds.push(Hold { token, owner, left_by, mode, base, lease });
        let elects = waiter.mode == Mode::Election;

        if promoted && self.is_mutex(id) {
            self.tell_observers(LeaderEvent::Failover, &id.1, None);
        }
        self.emit(if elects { Event::Elect } else { Event::Acquire }, &id.1);
        if elects {
            self.tell_observers(LeaderEvent::Elected, &id.1, Some(waiter.session));
        }
        Grant { token, lease: waiter.lease }
    }

    /// Whether the lock is one that can be led.
    pub(super) fn is_mutex(&self, id: &LockId) -> bool {
        id.0 == Space::Locks && self.locks.get(id).is_some_and(|lock| lock.kind == Kind::Slots(1))
    }

    /// A leader's own subscription need not be kept: it ends with the hold, and while one session
    /// leads there is nothing to tell it.
    fn tell_observers(&mut self, event: LeaderEvent, key: &Bytes, except: Option<SessionId>) {
        let topic = Topic::Leaders { key: key.clone() };
        let observers = self.sessions_with(|subscriber| *subscriber == topic);
        for session in observers {
            if Some(session) != except {
                self.push(session, Push::Leader { event, key: key.clone() });
            }
        }
    }

    fn join_queue(&mut self, id: &LockId, waiter: Waiter) {
        let lock = self.locks.get_mut(id).expect("the lock exists");
        lock.idle_since = None;
        lock.queue.push(waiter);
    }

    fn leave_queue(&mut self, id: &LockId, session: SessionId, place: Place) {
        let lock = self.locks.get_mut(id).expect("a waiter keeps the lock");
        lock.queue.retain(|waiter| waiter.session != session || waiter.place != place);
    }

    fn promote_all(&mut self) {
        let ids: Vec<LockId> = self.locks.keys().cloned().collect();
        for id in ids {
            self.promote(&id);
        }
    }

    fn promote(&mut self, id: &LockId) {
        loop {
            let (may_grant, has_fence) = (self.may_grant(), self.has_fence());
            let lock = self.locks.get_mut(id).expect("the lock exists");
            let Some(first) = lock.queue.first() else { break };
            if !lock.has_room_for(first.mode) || !may_grant || !has_fence {
                break;
            }
            let waiter = lock.queue.remove(0);
            let grant = self.grant(id, &waiter, true);
            match waiter.place {
                Place::Acquire(request) => {
                    self.finish((waiter.session, request), Outcome::Granted(grant));
                }
                Place::Enqueue => self.grant_record(id, waiter.session, grant),
                Place::Left { .. } => {}
            }
        }
        let now = self.now;
        let lock = self.locks.get_mut(id).expect("the lock exists");
        if lock.holds.is_empty() && lock.queue.is_empty() {
            lock.idle_since.get_or_insert(now);
        }
    }

    fn grant_record(&mut self, id: &LockId, session: SessionId, grant: Grant) {
        let on = On::Wait(id.clone());
        let waits = self.blocked.iter().find(|b| b.session == session && b.on == on);
        match waits.map(|b| b.request) {
            Some(request) => {
                self.remove_record(session, id);
                self.finish((session, request), Outcome::Granted(grant));
            }
            None => {
                let record = self.record(session, id).expect("a place belongs to a record");
                record.hold = Some(grant.token);
            }
        }
    }

    fn wait(&mut self, caller: Caller, id: LockId, wait: Span) -> Option<Outcome> {
        let Caller { session, .. } = caller;
        if let Some(state) = self.sessions.get_mut(&session)
            && state.notes.contains(&id)
        {
            state.notes.retain(|note| *note != id);
            return Some(Outcome::Refused(Refusal::LeaseExpired));
        }
        let Some(&mut Record { lease, hold, .. }) = self.record(session, &id) else {
            return Some(Outcome::Refused(Refusal::NotEnqueued));
        };
        if let Some(token) = hold {
            self.remove_record(session, &id);
            let base = self.now + lease;
            self.hold(&id, token).expect("the record ends with the hold").base = base;
            return Some(Outcome::Granted(Grant { token, lease }));
        }
        let on = On::Wait(id.clone());
        if self.blocked.iter().any(|b| b.session == session && b.on == on) {
            return Some(Outcome::Refused(Refusal::AlreadyWaiting));
        }
        if wait == Span::ZERO {
            self.remove_record(session, &id);
            self.leave_queue(&id, session, Place::Enqueue);
            self.promote(&id);
            return Some(Outcome::Timeout);
        }
        self.block(caller, wait, on);
        let reference = self.references.get(&session).cloned();
        let mode = self.locks[&id]
            .queue
            .iter()
            .find(|waiter| waiter.session == session && waiter.place == Place::Enqueue);
        let mode = mode.expect("a record without a hold has a place").mode;
        let orphan = reference.and_then(|reference| self.orphan(&reference, &id, mode));
        if let Some(orphan) = orphan {
            self.reunite(&id, orphan, (session, caller.request));
        }
        None
    }

    // Clients that come back.

    /// What a client has left behind: the oldest hold, or the place that ends first.
    fn orphan(&self, reference: &Bytes, id: &LockId, mode: Mode) -> Option<Orphan> {
        let lock = self.locks.get(id)?;
        let holds = lock.holds.iter();
        let holds = holds.filter(|hold| hold.left_by.as_ref() == Some(reference));
        let holds = holds.filter(|hold| wants_alike(hold.mode, mode));
        let hold = holds.map(|hold| Orphan::Hold(hold.token.fence)).min();
        let places = lock.queue.iter().filter(|waiter| wants_alike(waiter.mode, mode));
        let places = places.filter_map(|waiter| match &waiter.place {
            Place::Left { reference: by, until, timer } if by == reference => {
                Some(Orphan::Place { until: *until, timer: *timer })
            }
            Place::Left { .. } | Place::Acquire(_) | Place::Enqueue => None,
        });
        hold.or(places.min())
    }

    fn left_behind(&mut self, session: SessionId, id: &LockId, mode: Mode) -> Option<Orphan> {
        let reference = self.references.get(&session)?.clone();
        if self.record(session, id).is_some() || self.locks.get(id)?.kind != kind_of(mode) {
            return None;
        }
        self.orphan(&reference, id, mode)
    }

    /// The session gets it, as if it had enqueued itself there; the token if it is a hold.
    fn take_back(
        &mut self,
        session: SessionId,
        id: &LockId,
        orphan: Orphan,
        lease: Span,
        salt: u64,
    ) -> Option<Token> {
        let now = self.now;
        let lock = self.locks.get_mut(id).expect("an orphan keeps the lock");
        let mut token = None;
        match orphan {
            Orphan::Hold(fence) => {
                let hold = lock.holds.iter_mut().find(|hold| hold.token.fence == fence);
                let hold = hold.expect("it was just found");
                (hold.owner, hold.left_by) = (Some(session), None);
                (hold.base, hold.lease) = (now + lease, lease);
                token = Some(hold.token);
            }
            Orphan::Place { timer, .. } => {
                let same = |waiter: &&mut Waiter| waiter.left_as().is_some_and(|it| it.1 == timer);
                let waiter = lock.queue.iter_mut().find(same).expect("it was just found");
                (waiter.session, waiter.place) = (session, Place::Enqueue);
                (waiter.lease, waiter.salt) = (lease, salt);
            }
        }
        let state = self.sessions.entry(session).or_default();
        state.notes.retain(|note| note != id);
        state.records.push(Record { lock: id.clone(), lease, hold: token });
        token
    }

    /// Ends a session whose client may come back until `until`, if it has said who it is.
    fn leave(&mut self, session: SessionId, until: Timestamp) {
        let Some(reference) = self.references.get(&session).cloned() else {
            return self.end_session(session, None);
        };
        let mut state = self.sessions.remove(&session).unwrap_or_default();
        state.records.sort_by(|a, b| a.lock.cmp(&b.lock));
        let mut places: Vec<(LockId, Place)> = Vec::new();
        for record in state.records.iter().filter(|record| record.hold.is_none()) {
            places.push((record.lock.clone(), Place::Enqueue));
        }
        let mut blocked: Vec<Blocked> =
            self.blocked.iter().filter(|b| b.session == session).cloned().collect();
        blocked.sort_by_key(|blocked| blocked.request);
        for Blocked { request, on, .. } in blocked {
            match on {
                On::Acquire(id) => places.push((id, Place::Acquire(request))),
                On::Wait(_) => {}
                // These do not wait for anybody.
                On::Pop(_) | On::Barrier(_) => continue,
            }
            self.unblock(session, request);
        }
        let mut orphans = Vec::new();
        let mut left = Vec::new();
        for (id, place) in places {
            let locks = self.locks.values().flat_map(|lock| &lock.queue);
            let kept = count(locks.filter_map(Waiter::left_as).count()).unsigned_abs();
            let max = self.limits.waits_per_session_max;
            if max > 0 && kept >= max {
                self.leave_queue(&id, session, place);
                left.push(id);
                continue;
            }
            let timer = self.new_timer();
            let lock = self.locks.get_mut(&id).expect("a waiter keeps the lock");
            let is_it = |it: &&mut Waiter| it.session == session && it.place == place;
            let waiter = lock.queue.iter_mut().find(is_it).expect("it waits");
            waiter.place = Place::Left { reference: reference.clone(), until, timer };
            orphans.push((id, Orphan::Place { until, timer }));
        }
        let mut holds = Vec::new();
        for (id, lock) in &mut self.locks {
            for hold in lock.holds.iter_mut().filter(|hold| hold.owner == Some(session)) {
                hold.left_by = Some(reference.clone());
                holds.push((id.clone(), Orphan::Hold(hold.token.fence)));
            }
        }
        holds.sort_by_key(|(_, orphan)| *orphan);
        self.end_session(session, None);
        for id in left {
            self.promote(&id);
        }
        orphans.extend(holds);
        for (id, orphan) in orphans {
            self.find_owner(&id, orphan, &reference);
        }
    }

    /// Gives an orphan to the first session of its client that waits for the lock.
    fn find_owner(&mut self, id: &LockId, orphan: Orphan, reference: &Bytes) {
        let lock = &self.locks[id];
        let mode = match orphan {
            Orphan::Hold(fence) => {
                lock.holds.iter().find(|hold| hold.token.fence == fence).map(|hold| hold.mode)
            }
            Orphan::Place { timer, .. } => {
                let same = |it: &&Waiter| it.left_as().is_some_and(|it| it.1 == timer);
                lock.queue.iter().find(same).map(|waiter| waiter.mode)
            }
        };
        // A place may have become a hold meanwhile.
        let Some(mode) = mode else { return };
        let waits = |blocked: &&Blocked| {
            let place = match &blocked.on {
                On::Acquire(on) if on == id => Place::Acquire(blocked.request),
                On::Wait(on) if on == id => Place::Enqueue,
                On::Acquire(_) | On::Wait(_) | On::Pop(_) | On::Barrier(_) => return false,
            };
            let mut queue = lock.queue.iter();
            let waiter = queue.find(|it| it.session == blocked.session && it.place == place);
            waiter.is_some_and(|waiter| wants_alike(waiter.mode, mode))
                && self.references.get(&blocked.session) == Some(reference)
        };
        let waiting = self.blocked.iter().filter(waits).min_by_key(|b| (b.until, b.timer));
        if let Some(&Blocked { session, request, .. }) = waiting {
            self.reunite(id, orphan, (session, request));
        }
    }

    /// A request that waits gets an orphan in place of its own place.
    fn reunite(&mut self, id: &LockId, orphan: Orphan, (session, request): (SessionId, RequestId)) {
        let blocked = self.blocked.iter().find(|b| b.session == session && b.request == request);
        let blocked = blocked.expect("it waits").clone();
        let place = match blocked.on {
            On::Wait(_) => Place::Enqueue,
            On::Acquire(_) | On::Pop(_) | On::Barrier(_) => Place::Acquire(request),
        };
        let lock = self.locks.get_mut(id).expect("a waiter keeps the lock");
        let is_it = |it: &Waiter| it.session == session && it.place == place;
        let own = lock.queue.iter().position(is_it).expect("it waits");
        match orphan {
            Orphan::Hold(fence) => {
                let waiter = lock.queue.remove(own);
                let base = self.now + waiter.lease;
                let hold = lock.holds.iter_mut().find(|hold| hold.token.fence == fence);
                let hold = hold.expect("it was just found");
                (hold.owner, hold.left_by) = (Some(session), None);
                (hold.base, hold.lease) = (base, waiter.lease);
                let grant = Grant { token: hold.token, lease: waiter.lease };
                if place == Place::Enqueue {
                    self.remove_record(session, id);
                }
                self.finish((session, request), Outcome::Granted(grant));
            }
            Orphan::Place { timer, .. } => {
                let same = |it: &Waiter| it.left_as().is_some_and(|it| it.1 == timer);
                let ahead = lock.queue.iter().position(same).expect("it was just found");
                if lock.queue[ahead].since >= lock.queue[own].since {
                    return;
                }
                let since = lock.queue[ahead].since;
                let waiter = lock.queue.remove(own);
                lock.queue[ahead] = Waiter { since, ..waiter };
                let timer = self.new_timer();
                let blocked = self.blocked.iter_mut();
                for blocked in blocked.filter(|b| b.session == session && b.request == request) {
                    blocked.timer = timer;
                }
            }
        }
        self.promote(id);
    }

    fn record(&mut self, session: SessionId, id: &LockId) -> Option<&mut Record> {
        self.sessions.get_mut(&session)?.records.iter_mut().find(|record| record.lock == *id)
    }

    fn remove_record(&mut self, session: SessionId, id: &LockId) {
        if let Some(state) = self.sessions.get_mut(&session) {
            state.records.retain(|record| record.lock != *id);
        }
    }

    fn renew(&mut self, id: &LockId, token: Token, lease: Option<Span>) -> Outcome {
        let lease = self.shortened(lease.unwrap_or(self.limits.default_lease));
        let base = self.now + lease;
        if let Some(hold) = self.hold(id, token) {
            hold.base = base;
            return Outcome::Renewed { fence: token.fence, lease };
        }
        let expired = self.locks.get(id).and_then(|lock| lock.last_expired) == Some(token);
        Outcome::Refused(if expired { Refusal::LeaseExpired } else { Refusal::NotHeld })
    }

    /// No lease is longer than the longest, if there is one.
    fn shortened(&self, lease: Span) -> Span {
        match self.limits.lease_max {
            Span(0) => lease,
            longest => lease.min(longest),
        }
    }

    fn renew_session(&mut self, session: SessionId, lease: Span) -> Outcome {
        let lease = self.shortened(lease);
        let base = self.now + lease;
        let mut renewed = 0;
        for hold in self.locks.values_mut().flat_map(|lock| &mut lock.holds) {
            if hold.owner == Some(session) && hold.lease == lease {
                hold.base = hold.base.max(base);
                renewed += 1;
            }
        }
        Outcome::Number(renewed)
    }

    fn end_hold(&mut self, id: &LockId, token: Token, ending: Ending) {
        let lock = self.locks.get_mut(id).expect("a hold keeps the lock");
        let index = lock.holds.iter().position(|hold| hold.token == token).expect("it is held");
        let hold = lock.holds.remove(index);
        if ending == Ending::Expired {
            lock.last_expired = Some(token);
        }
        let owner = hold.owner;
        if let Some(owner) = owner
            && self.record(owner, id).is_some_and(|record| record.hold == Some(token))
        {
            self.remove_record(owner, id);
            if ending == Ending::Expired {
                self.note_expired(owner, id);
            }
        }
        let (event, reason) = match ending {
            Ending::Released { resign: true } => (Event::Resign, None),
            Ending::Released { resign: false } | Ending::SessionEnded | Ending::Undone => {
                (Event::Release, None)
            }
            Ending::Expired => (Event::Release, Some(LostReason::Expired)),
            Ending::Forced => (Event::Release, Some(LostReason::Forced)),
            Ending::SessionForced => (Event::Release, Some(LostReason::Session)),
        };
        self.emit(event, &id.1);
        if event == Event::Resign && self.is_mutex(id) {
            self.tell_observers(LeaderEvent::Resigned, &id.1, None);
        }
        if let (Some(owner), Some(reason)) = (owner, reason) {
            self.push(owner, Push::Lost { key: id.1.clone(), fence: token.fence, reason });
        }
        self.promote(id);
    }

    fn note_expired(&mut self, session: SessionId, id: &LockId) {
        let notes_max = self.limits.expired_notes_max;
        let notes = &mut self.sessions.entry(session).or_default().notes;
        notes.push(id.clone());
        if count(notes.len()).unsigned_abs() > notes_max {
            notes.remove(0);
        }
    }

    // Sessions.

    /// Holds end with `ending`, or go on without an owner if there is none.
    fn end_session(&mut self, session: SessionId, ending: Option<Ending>) {
        self.references.remove(&session);
        let topics: Vec<Topic> = self.topics_of(session);
        for topic in &topics {
            self.unsubscribe(session, topic);
        }

        // A session that ends is granted nothing any more: all its places go before anyone moves up.
        let mut left: Vec<LockId> = Vec::new();
        let mut state = self.sessions.remove(&session).unwrap_or_default();
        // By key, because they have no other order that a snapshot keeps.
        state.records.sort_by(|a, b| a.lock.cmp(&b.lock));
        for record in state.records {
            if record.hold.is_none() {
                self.leave_queue(&record.lock, session, Place::Enqueue);
                left.push(record.lock);
            }
        }
        let mut requests: Vec<(RequestId, On)> = self
            .blocked
            .iter()
            .filter(|b| b.session == session)
            .map(|b| (b.request, b.on.clone()))
            .collect();
        requests.sort_by_key(|(request, _)| *request);
        for (request, on) in requests {
            match on {
                On::Acquire(id) => {
                    self.unblock(session, request);
                    self.leave_queue(&id, session, Place::Acquire(request));
                    left.push(id);
                }
                On::Wait(_) => {
                    self.unblock(session, request);
                }
                On::Pop(_) | On::Barrier(_) => self.withdraw(session, request, None),
            }
        }
        for id in left {
            self.promote(&id);
        }

        let mut holds: Vec<(Token, LockId)> = Vec::new();
        for (id, lock) in &mut self.locks {
            for hold in lock.holds.iter_mut().filter(|hold| hold.owner == Some(session)) {
                match ending {
                    Some(_) => holds.push((hold.token, id.clone())),
                    None => hold.owner = None,
                }
            }
        }
        holds.sort_by_key(|(token, _)| token.fence);
        for (token, id) in holds {
            self.end_hold(&id, token, ending.expect("holds are collected to be ended"));
        }
    }

    // Counters.

    /// Whether one more key is allowed, if need be in place of the counter that is zero for longest.
    fn has_room_for_key(&mut self) -> bool {
        loop {
            let keys =
                self.counters.len() + self.entries.len() + self.lists.len() + self.barriers.len();
            if self.limits.keys_max == 0 || count(keys).unsigned_abs() < self.limits.keys_max {
                return true;
            }
            let zero = self.counters.iter().filter(|(_, counter)| counter.value == 0);
            let oldest = zero.map(|(key, counter)| (counter.touched_at, key.clone())).min();
            match oldest.filter(|_| self.limits.rules >= 2) {
                Some((_, key)) => self.counters.remove(&key),
                None => return false,
            };
        }
    }

    fn add(&mut self, key: &[u8], delta: i64, decrement: bool) -> Outcome {
        let old = self.counters.get(key).map_or(0, |counter| counter.value);
        // Subtracting is adding the negative, which the smallest number does not have.
        let delta = if decrement { delta.checked_neg() } else { Some(delta) };
        let Some(value) = delta.and_then(|delta| old.checked_add(delta)) else {
            return Outcome::Refused(Refusal::Overflow);
        };
        if !self.counters.contains_key(key) && !self.has_room_for_key() {
            return Outcome::Refused(Refusal::MaxKeys);
        }
        self.counters.insert(key.into(), Counter { value, touched_at: self.now });
        self.emit(if decrement { Event::Decr } else { Event::Incr }, key);
        Outcome::Number(value)
    }

    fn counter_set(&mut self, key: &[u8], value: i64) -> Outcome {
        if !self.counters.contains_key(key) && !self.has_room_for_key() {
            return Outcome::Refused(Refusal::MaxKeys);
        }
        self.counters.insert(key.into(), Counter { value, touched_at: self.now });
        self.emit(Event::Cset, key);
        Outcome::Done
    }

    // Values.

    fn kv_set(
        &mut self,
        key: &[u8],
        expect: Option<Expect<'_>>,
        value: &[u8],
        ttl: Option<Span>,
        event: Event,
    ) -> Outcome {
        if self.is_too_large(value) {
            return Outcome::Refused(Refusal::ValueTooLarge);
        }
        let entry = self.entries.get(key);
        let as_expected = match expect {
            None => true,
            Some(Expect::Absent) => entry.is_none(),
            Some(Expect::Value(value)) => entry.is_some_and(|entry| *entry.value == *value),
            Some(Expect::Revision(revision)) => entry.is_some_and(|e| e.revision == revision),
        };
        if !as_expected {
            return Outcome::Conflict;
        }
        if entry.is_none() && !self.has_room_for_key() {
            return Outcome::Refused(Refusal::MaxKeys);
        }
        self.emit(event, key);
        let entry = Entry {
            value: value.into(),
            revision: self.revision,
            expires_at: ttl.map(|ttl| self.now + ttl),
            touched_at: self.now,
        };
        self.entries.insert(key.into(), entry);
        Outcome::Written(self.revision)
    }

    fn is_too_large(&self, value: &[u8]) -> bool {
        count(value.len()).unsigned_abs() > self.limits.value_bytes_max
    }

    // Lists.

    fn list_push(&mut self, key: &[u8], end: End, value: &[u8]) -> Outcome {
        if self.is_too_large(value) {
            return Outcome::Refused(Refusal::ValueTooLarge);
        }
        let event = push_event(end);
        if self.lists.get(key).is_some_and(|list| !list.poppers.is_empty()) {
            self.emit(event, key);
            self.hand_to_popper(key, value);
            return Outcome::Number(0);
        }
        let length = self.list_length(key).unsigned_abs();
        if self.limits.list_length_max > 0 && length >= self.limits.list_length_max {
            return Outcome::Refused(Refusal::ListFull);
        }
        if length == 0 && !self.has_room_for_key() {
            return Outcome::Refused(Refusal::MaxKeys);
        }
        let items = &mut self.lists.entry(key.into()).or_default().items;
        match end {
            End::Left => items.push_front(value.into()),
            End::Right => items.push_back(value.into()),
        }
        self.emit(event, key);
        Outcome::Number(self.list_length(key))
    }

    /// Gives `value` to whoever has waited longest for one; false if nobody has.
    fn hand_to_popper(&mut self, key: &[u8], value: &[u8]) -> bool {
        let Some(list) = self.lists.get_mut(key) else { return false };
        if list.poppers.is_empty() {
            return false;
        }
        let (session, request, end) = list.poppers.remove(0);
        self.drop_list_if_empty(key);
        self.emit(blocking_pop_event(end), key);
        let popped = Outcome::Popped { key: key.into(), end, value: value.into() };
        self.finish((session, request), popped);
        true
    }

    fn list_pop(
        &mut self,
        caller: Caller,
        key: &[u8],
        end: End,
        wait: Option<Span>,
    ) -> Option<Outcome> {
        let item = self.lists.get_mut(key).and_then(|list| match end {
            End::Left => list.items.pop_front(),
            End::Right => list.items.pop_back(),
        });
        if let Some(value) = item {
            self.drop_list_if_empty(key);
            let event = match (wait, end) {
                (Some(_), _) => blocking_pop_event(end),
                (None, End::Left) => Event::Lpop,
                (None, End::Right) => Event::Rpop,
            };
            self.emit(event, key);
            return Some(Outcome::Popped { key: key.into(), end, value });
        }
        let wait = wait.unwrap_or(Span::ZERO);
        if wait == Span::ZERO {
            return Some(Outcome::Empty);
        }
        if self.waits_for_all_it_may(caller.session) {
            return Some(Outcome::Refused(Refusal::MaxWaits));
        }
        if !self.lists.contains_key(key) && !self.has_room_for_key() {
            return Some(Outcome::Refused(Refusal::MaxKeys));
        }
        let list = self.lists.entry(key.into()).or_default();
        list.poppers.push((caller.session, caller.request, end));
        self.block(caller, wait, On::Pop(key.into()));
        None
    }

    fn drop_list_if_empty(&mut self, key: &[u8]) {
        self.lists
            .retain(|k, list| **k != *key || !list.items.is_empty() || !list.poppers.is_empty());
    }

    // Barriers.

    fn arrive(&mut self, caller: Caller, key: &[u8], wanted: u32, wait: Span) -> Option<Outcome> {
        let arrived = match self.barriers.get(key) {
            Some(barrier) if barrier.count != wanted => {
                return Some(Outcome::Refused(Refusal::CountMismatch));
            }
            Some(barrier) if barrier.arrived.iter().any(|(s, _)| *s == caller.session) => {
                return Some(Outcome::Refused(Refusal::AlreadyWaiting));
            }
            Some(barrier) => barrier.arrived.len(),
            None => 0,
        };
        if count(arrived) + 1 == i64::from(wanted) {
            for other in self.barriers.remove(key).map_or(Vec::new(), |barrier| barrier.arrived) {
                self.finish(other, Outcome::Done);
            }
            return Some(Outcome::Done);
        }
        if wait == Span::ZERO {
            return Some(Outcome::Timeout);
        }
        if self.waits_for_all_it_may(caller.session) {
            return Some(Outcome::Refused(Refusal::MaxWaits));
        }
        if arrived == 0 && !self.has_room_for_key() {
            return Some(Outcome::Refused(Refusal::MaxKeys));
        }
        let barrier = self
            .barriers
            .entry(key.into())
            .or_insert_with(|| Barrier { count: wanted, arrived: Vec::new() });
        barrier.arrived.push((caller.session, caller.request));
        self.block(caller, wait, On::Barrier(key.into()));
        None
    }

    // Subscriptions.

    fn topics_of(&self, session: SessionId) -> Vec<Topic> {
        self.subscribers
            .iter()
            .filter(|subscriber| subscriber.session == session)
            .map(|subscriber| subscriber.topic.clone())
            .collect()
    }

    /// Each session once that has a subscription of which `wanted` is true.
    fn sessions_with(&self, wanted: impl Fn(&Topic) -> bool) -> BTreeSet<SessionId> {
        let listening = self.subscribers.iter().filter(|s| s.listens);
        listening.filter(|s| wanted(&s.topic)).map(|s| s.session).collect()
    }

    fn subscribe(&mut self, session: SessionId, subscription: Subscription<'_>) -> Outcome {
        let (topic, slashes) = (topic_of(subscription), self.limits.rules >= 2);
        let tokens_max = or_unlimited(self.limits.pattern_tokens_max);
        if !topic.is_well_formed(slashes) || topic.tokens(slashes) > tokens_max {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let topics = self.topics_of(session);
        let is_new = !topics.contains(&topic);
        let all: Vec<Topic> = self.subscribers.iter().map(|s| s.topic.clone()).collect();
        let full = |topics: &[Topic], count_max, bytes_max| {
            let bytes: u64 = topics.iter().map(Topic::bytes).sum();
            count(topics.len()).unsigned_abs() >= or_unlimited(count_max)
                || bytes + topic.bytes() > or_unlimited(bytes_max)
        };
        let limits = &self.limits;
        let mine_full = full(&topics, limits.subscriptions_max, limits.subscription_bytes_max);
        let (count_max, bytes_max) =
            (limits.subscriptions_total_max, limits.subscription_bytes_total_max);
        if is_new && (mine_full || full(&all, count_max, bytes_max)) {
            return Outcome::Refused(Refusal::MaxSubscriptions);
        }
        if let Subscription::Changes { pattern, from: Some(from) } = subscription {
            let kept = count(self.ring.len()).unsigned_abs();
            let compacted = Revision(self.revision.0 - kept);
            if from <= compacted {
                return Outcome::Compacted(compacted);
            }
            for change in self.ring.clone() {
                if change.revision >= from && matches(pattern, &change.key, slashes) {
                    self.push(session, Push::Change(change));
                }
            }
        }
        if let Subscription::Leaders { key } = subscription {
            let id = (Space::Locks, key.into());
            if self.is_mutex(&id) && !self.locks[&id].holds.is_empty() {
                self.push(session, Push::Leader { event: LeaderEvent::Elected, key: id.1 });
            }
        }
        if is_new {
            let state = self.sessions.get(&session);
            let detached = state.is_some_and(|state| state.detached.is_some());
            let listens = self.limits.rules < 2 || !detached;
            self.subscribers.push(Subscriber { session, topic, listens });
        }
        Outcome::Done
    }

    fn unsubscribe(&mut self, session: SessionId, topic: &Topic) {
        if let Topic::Signals { pattern, group: name } = topic
            && !name.is_empty()
        {
            let group = Group { pattern: pattern.clone(), name: name.clone() };
            let members = self.group_members(&group);
            if let Some(index) = members.iter().position(|member| *member == session) {
                let turn = self.turns.get(&group).copied().unwrap_or(0);
                let turn = if index < turn { turn - 1 } else { turn };
                // Past the last of those who are left, the first comes next.
                let turn = if turn == members.len() - 1 { 0 } else { turn };
                self.turns.insert(group, turn);
            }
        }
        self.subscribers.retain(|s| s.session != session || s.topic != *topic);
    }

    fn signal(&mut self, channel: &[u8], payload: &[u8]) -> Outcome {
        if channel.iter().any(|byte| is_wildcard(*byte)) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let push = Push::Signal { channel: channel.into(), payload: payload.into() };
        let mut copies = 0;
        let mut served: BTreeSet<SessionId> = BTreeSet::new();
        let slashes = self.limits.rules >= 2;
        for exact in [true, false] {
            let listened = |pattern: &Bytes| {
                exact == (**pattern == *channel) && matches(pattern, channel, slashes)
            };
            let alone = self.sessions_with(|topic| match topic {
                Topic::Signals { pattern, group } => group.is_empty() && listened(pattern),
                Topic::Changes { .. } | Topic::Leaders { .. } => false,
            });
            for session in alone {
                if served.insert(session) {
                    self.push(session, push.clone());
                    copies += 1;
                }
            }
            let groups: BTreeSet<Group> = self
                .subscribers
                .iter()
                .filter(|subscriber| subscriber.listens)
                .filter_map(|subscriber| match &subscriber.topic {
                    Topic::Signals { pattern, group } if !group.is_empty() && listened(pattern) => {
                        Some(Group { pattern: pattern.clone(), name: group.clone() })
                    }
                    Topic::Signals { .. } | Topic::Changes { .. } | Topic::Leaders { .. } => None,
                })
                .collect();
            for group in groups {
                let members = self.group_members(&group);
                let turn = self.turns.get(&group).copied().unwrap_or(0);
                self.turns.insert(group.clone(), (turn + 1) % members.len());
                let session = members[turn];
                self.effects.push(Effect::Push { session, push: push.clone(), group: Some(group) });
                copies += 1;
            }
        }
        Outcome::Number(copies)
    }

    fn emit(&mut self, event: Event, key: &[u8]) {
        self.revision.0 += 1;
        let change = Change { revision: self.revision, event, key: key.into() };
        self.ring.push(change.clone());
        if count(self.ring.len()).unsigned_abs() > self.limits.events_max {
            self.ring.remove(0);
        }
        let slashes = self.limits.rules >= 2;
        let watchers = self.sessions_with(|topic| match topic {
            Topic::Changes { pattern } => matches(pattern, key, slashes),
            Topic::Signals { .. } | Topic::Leaders { .. } => false,
        });
        for session in watchers {
            self.push(session, Push::Change(change.clone()));
        }
    }
}

impl Lock {
    fn has_room_for(&self, mode: Mode) -> bool {
        match (self.kind, mode) {
            (Kind::Slots(limit), _) => count(self.holds.len()) < i64::from(limit),
            (Kind::ReadWrite, Mode::Read) => {
                !self.holds.iter().any(|hold| hold.mode == Mode::Write)
            }
            (
                Kind::ReadWrite,
                Mode::Write | Mode::Mutex | Mode::Election | Mode::Semaphore { .. },
            ) => self.holds.is_empty(),
        }
    }
}

impl Topic {
    fn tokens(&self, slashes: bool) -> u64 {
        match self {
            Self::Signals { pattern, .. } | Self::Changes { pattern } => {
                count(words(pattern, slashes && pattern.contains(&b'/')).len()).unsigned_abs()
            }
            Self::Leaders { .. } => 1,
        }
    }

    fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Signals { pattern, group } => pattern.len() + group.len(),
            Self::Changes { pattern: name } | Self::Leaders { key: name } => name.len(),
        };
        count(bytes).unsigned_abs()
    }

    fn is_well_formed(&self, slashes: bool) -> bool {
        match self {
            Self::Signals { pattern, .. } | Self::Changes { pattern } => {
                is_well_formed(pattern, slashes)
            }
            Self::Leaders { .. } => true,
        }
    }
}

impl Waiter {
    /// When the place ends and the number of its timer, if its client has left.
    fn left_as(&self) -> Option<(Timestamp, u64)> {
        match self.place {
            Place::Left { until, timer, .. } => Some((until, timer)),
            Place::Acquire(_) | Place::Enqueue => None,
        }
    }
}

/// Whether two requests for one lock are the same request.
fn wants_alike(a: Mode, b: Mode) -> bool {
    let wants = |mode| (mode == Mode::Write, mode == Mode::Election);
    wants(a) == wants(b)
}

fn topic_of(subscription: Subscription<'_>) -> Topic {
    match subscription {
        Subscription::Signals { pattern, group } => {
            Topic::Signals { pattern: pattern.into(), group: group.into() }
        }
        Subscription::Changes { pattern, from: _ } => Topic::Changes { pattern: pattern.into() },
        Subscription::Leaders { key } => Topic::Leaders { key: key.into() },
    }
}

/// 0 means that there is no limit.
fn or_unlimited(limit: u64) -> u64 {
    if limit == 0 { u64::MAX } else { limit }
}

fn kind_of(mode: Mode) -> Kind {
    match mode {
        Mode::Mutex | Mode::Election => Kind::Slots(1),
        Mode::Semaphore { limit } => Kind::Slots(limit),
        Mode::Read | Mode::Write => Kind::ReadWrite,
    }
}

pub(super) fn is_answered(command: &Command<'_>) -> bool {
    match command {
        Command::Tick
        | Command::NewTerm
        | Command::Undo(_)
        | Command::Detach { .. }
        | Command::Attach
        | Command::Identify { .. }
        | Command::Orphan { .. }
        | Command::EndSession { .. } => false,
        Command::Acquire(_)
        | Command::Enqueue(_)
        | Command::Wait(_)
        | Command::Release(_)
        | Command::Renew(_)
        | Command::RenewSession(_)
        | Command::ForceRelease(_)
        | Command::Add(_)
        | Command::CounterSet(_)
        | Command::KvSet(_)
        | Command::KvDelete(_)
        | Command::KvCompareAndSet(_)
        | Command::Push(_)
        | Command::Pop(_)
        | Command::BarrierWait(_)
        | Command::Signal(_)
        | Command::Subscribe(_)
        | Command::Unsubscribe(_)
        | Command::Cancel(_)
        | Command::Acknowledge(_) => true,
    }
}

fn push_event(end: End) -> Event {
    match end {
        End::Left => Event::Lpush,
        End::Right => Event::Rpush,
    }
}

fn blocking_pop_event(end: End) -> Event {
    match end {
        End::Left => Event::Blpop,
        End::Right => Event::Brpop,
    }
}

fn is_wildcard(byte: u8) -> bool {
    byte == b'*' || byte == b'>'
}

/// The tokens of a text, each with what ends it. Slashes end a token if they are to.
fn words(text: &[u8], slashes: bool) -> Vec<(&[u8], Option<u8>)> {
    let ends = |byte: &u8| *byte == b'.' || slashes && *byte == b'/';
    let tokens = text.split_inclusive(ends).map(|token| match token.split_last() {
        Some((end, token)) if ends(end) => (token, Some(*end)),
        _ => (token, None),
    });
    let mut tokens: Vec<_> = tokens.collect();
    if tokens.last().is_none_or(|(_, end)| end.is_some()) {
        tokens.push((b"", None));
    }
    tokens
}

/// Whether slashes end tokens is asked for; they do so in a pattern that has one.
fn is_well_formed(pattern: &[u8], slashes: bool) -> bool {
    let tokens = words(pattern, slashes && pattern.contains(&b'/'));
    tokens.iter().enumerate().all(|(index, (token, _))| match *token {
        b"*" => true,
        b">" => index + 1 == tokens.len(),
        _ => !token.iter().any(|byte| is_wildcard(*byte)),
    })
}

fn matches(pattern: &[u8], key: &[u8], slashes: bool) -> bool {
    let slashes = slashes && pattern.contains(&b'/');
    let (wanted, found) = (words(pattern, slashes), words(key, slashes));
    let fit = |wanted: &[(&[u8], Option<u8>)]| {
        let pairs = wanted.iter().zip(&found);
        pairs
            .into_iter()
            .all(|(wanted, found)| (wanted.0 == b"*" || wanted.0 == found.0) && wanted.1 == found.1)
    };
    match wanted.as_slice() {
        [before @ .., (b">", None)] => before.len() < found.len() && fit(before),
        all => all.len() == found.len() && fit(all),
    }
}

fn count(length: usize) -> i64 {
    i64::try_from(length).expect("what fits in memory can be counted")
}
