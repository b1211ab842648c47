//! What a client owns, and what happens when it goes. Results kept for retries.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::Deref;
use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use dflockd_api::{
    Bytes, Caller, Command, Given, LostReason, Outcome, Refusal, RequestId, SessionId, Space,
    Timestamp,
};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::chain::{Chain, Slot};
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::limits::Limits;
use crate::lock::{EndOfHold, IN_SESSION};
use crate::store::Store;
use crate::subscription::{Owned, Volume};

pub(crate) struct Session {
    /// By fence, because they are added when granted.
    pub(crate) holds: Chain<IN_SESSION>,
    /// Places taken by `Enqueue` and not yet claimed by `Wait`.
    pub(crate) enqueued: Waits<(Space, Bytes), Enqueued>,
    /// Requests that are not answered yet.
    pub(crate) blocked: Waits<RequestId, Blocked>,
    /// What it has in all stores of the server; none if there is only this one.
    usage: Option<Arc<Usage>>,
    pub(crate) subscriptions: BTreeSet<Owned>,
    /// How much that is.
    pub(crate) subscribed: Volume,
    /// Set for a session whose requests can be repeated.
    pub(crate) results: Option<Box<Results>>,
    /// Set while the session has no connection: it may end then, and the timer that looks.
    pub(crate) detached: Option<(Timestamp, TimerKey)>,
    /// The expired ones among `enqueued`, by age.
    pub(crate) notes: BTreeMap<u64, (Space, Bytes)>,
}

/// What the store knows of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is blocked.
    Waiting,
    /// It was answered like this.
    Answered(Outcome),
    /// Never seen, or answered and forgotten.
    Unknown,
}

/// What a session has in all stores of one server together. Each store counts what it does; one that decides by it may
/// be a request of the same session late.
#[derive(Debug, Default)]
pub struct Usage {
    holds: AtomicU64,
    waits: AtomicU64,
    results: AtomicU64,
    result_bytes: AtomicU64,
    /// Numbers results in the order they were made.
    results_made: AtomicU64,
}

impl Usage {
    /// How many results are kept for retries, and about how many bytes they have.
    #[must_use]
    pub fn results(&self) -> (u64, u64) {
        (self.results.load(Relaxed), self.result_bytes.load(Relaxed))
    }

    fn results_changed(&self, before: (u64, u64), after: (u64, u64)) {
        // Wraps around where it became less.
        self.results.fetch_add(after.0.wrapping_sub(before.0), Relaxed);
        self.result_bytes.fetch_add(after.1.wrapping_sub(before.1), Relaxed);
    }
}

/// What a session waits for, counted where several stores are one server.
pub(crate) struct Waits<K, V> {
    map: BTreeMap<K, V>,
    usage: Option<Arc<Usage>>,
}

impl<K: Ord, V: IsWait> Waits<K, V> {
    fn new(usage: Option<Arc<Usage>>) -> Self {
        Self { map: BTreeMap::new(), usage }
    }

    pub(crate) fn insert(&mut self, key: K, value: V) {
        self.count(value.is_wait(), true);
        if let Some(before) = self.map.insert(key, value) {
            self.count(before.is_wait(), false);
        }
    }

    pub(crate) fn remove(&mut self, key: &K) -> Option<V> {
        let value = self.map.remove(key)?;
        self.count(value.is_wait(), false);
        Some(value)
    }

    fn take(&mut self) -> Vec<V> {
        let all: Vec<V> = core::mem::take(&mut self.map).into_values().collect();
        all.iter().for_each(|value| self.count(value.is_wait(), false));
        all
    }

    fn count(&self, is_wait: bool, more: bool) {
        if let Some(usage) = self.usage.as_ref().filter(|_| is_wait) {
            usage.waits.fetch_add(if more { 1 } else { u64::MAX }, Relaxed);
        }
    }
}

impl<K, V> Deref for Waits<K, V> {
    type Target = BTreeMap<K, V>;

    fn deref(&self) -> &BTreeMap<K, V> {
        &self.map
    }
}

/// Notes about the past are no waits.
pub(crate) trait IsWait {
    fn is_wait(&self) -> bool;
}

impl IsWait for Enqueued {
    fn is_wait(&self) -> bool {
        matches!(self, Self::Claim(_))
    }
}

impl IsWait for Blocked {
    fn is_wait(&self) -> bool {
        true
    }
}

/// How a session can end.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndOfSession {
    /// With its holds; the reason is told if somebody else ended it.
    Released(Option<LostReason>),
    /// Its holds go on until their leases end.
    Left,
    /// So do its holds. If it has a reference, its places stay until then, and its client gets both back who returns.
    Orphaned { until: Timestamp },
}

/// A two-phase record.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Enqueued {
    Claim(Slot),
    /// It was granted and its lease ran out before it was claimed; numbered by age.
    Expired(u64),
}

/// What a request waits for.
#[derive(Clone)]
pub(crate) enum Blocked {
    Claim(Slot),
    Pop { key: Bytes, place: u64 },
    Barrier { key: Bytes },
}

/// Results kept for retries.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) kept: BTreeMap<RequestId, Outcome>,
    /// In the order they were made.
    pub(crate) order: VecDeque<RequestId>,
    pub(crate) bytes: u64,
    /// The highest request whose result is gone.
    pub(crate) forgotten: Option<RequestId>,
    /// Where several stores are one server: when each was made, among all results of the session. Such a store has no
    /// snapshots.
    #[serde(skip)]
    made: BTreeMap<RequestId, u64>,
}

impl Results {
    /// What `bytes` must be.
    pub(crate) fn bytes_kept(&self) -> u64 {
        self.kept.values().map(size).sum()
    }

    fn keep(&mut self, request: RequestId, outcome: &Outcome, limits: &Limits) {
        self.bytes += size(outcome);
        self.kept.insert(request, outcome.clone());
        self.order.push_back(request);
        while self.order.len() as u64 > limits.results_max || self.bytes > limits.results_bytes_max
        {
            if !self.forget_oldest() {
                break;
            }
        }
    }

    fn forget_oldest(&mut self) -> bool {
        let Some(oldest) = self.order.pop_front() else { return false };
        if let Some(outcome) = self.kept.remove(&oldest) {
            self.bytes -= size(&outcome);
        }
        self.made.remove(&oldest);
        self.forgotten = self.forgotten.max(Some(oldest));
        true
    }

    fn acknowledge(&mut self, up_to: RequestId) {
        let later = self.kept.split_off(&RequestId(up_to.0.saturating_add(1)));
        let gone = core::mem::replace(&mut self.kept, later);
        // Acknowledged or not, what was answered once is never executed again.
        self.forgotten = self.forgotten.max(gone.last_key_value().map(|(&request, _)| request));
        self.bytes -= gone.values().map(size).sum::<u64>();
        self.order.retain(|request| !gone.contains_key(request));
        self.made.retain(|request, _| !gone.contains_key(request));
    }
}

/// About what a kept result costs.
fn size(outcome: &Outcome) -> u64 {
    let content = match outcome {
        Outcome::Value(value) | Outcome::Entry { value, .. } => value.len(),
        Outcome::Popped { key, value, .. } => key.len() + value.len(),
        Outcome::Items(items) | Outcome::Part(items) => items.iter().map(|item| item.len()).sum(),
        Outcome::Done
        | Outcome::Granted(_)
        | Outcome::Acquired(_)
        | Outcome::Queued
        | Outcome::Renewed { .. }
        | Outcome::Timeout
        | Outcome::Empty
        | Outcome::Conflict
        | Outcome::Number(_)
        | Outcome::Written(_)
        | Outcome::Compacted(_)
        | Outcome::Refused(_) => 0,
    };
    64 + content as u64
}

impl Session {
    pub(crate) fn new(usage: Option<Arc<Usage>>) -> Self {
        Self {
            holds: Chain::new(),
            enqueued: Waits::new(usage.clone()),
            blocked: Waits::new(usage.clone()),
            usage,
            subscriptions: BTreeSet::new(),
            subscribed: Volume::default(),
            results: None,
            detached: None,
            notes: BTreeMap::new(),
        }
    }

    pub(crate) fn count_hold(&self, more: bool) {
        if let Some(usage) = &self.usage {
            usage.holds.fetch_add(if more { 1 } else { u64::MAX }, Relaxed);
        }
    }

    fn holds_counted(&self) -> u64 {
        let here = || self.holds.len().into();
        self.usage.as_ref().map_or_else(here, |usage| usage.holds.load(Relaxed))
    }

    fn waits_counted(&self) -> u64 {
        let here = || (self.blocked.len() + self.enqueued.len() - self.notes.len()) as u64;
        self.usage.as_ref().map_or_else(here, |usage| usage.waits.load(Relaxed))
    }

    /// How many results are kept, and about how many bytes they have.
    pub(crate) fn results_kept(&self) -> (u64, u64) {
        let kept = |results: &Results| (results.kept.len() as u64, results.bytes);
        self.results.as_deref().map_or((0, 0), kept)
    }

    /// Remembers that a granted place ran out unclaimed, and forgets the oldest such note if there are too many.
    pub(crate) fn note_expired(&mut self, record: (Space, Bytes), notes_max: u64) {
        let number = self.notes.last_key_value().map_or(0, |(last, _)| last + 1);
        self.notes.insert(number, record.clone());
        self.enqueued.insert(record, Enqueued::Expired(number));
        if self.notes.len() as u64 > notes_max
            && let Some((_, oldest)) = self.notes.pop_first()
        {
            self.enqueued.remove(&oldest);
        }
    }

    /// Removes the note about a record, if that is all there is.
    pub(crate) fn forget_note(&mut self, record: &(Space, Bytes)) -> bool {
        let Some(&Enqueued::Expired(number)) = self.enqueued.get(record) else { return false };
        self.notes.remove(&number);
        self.enqueued.remove(record);
        true
    }
}

impl Store {
    /// Whether the request was seen before; if it was answered it is answered again.
    pub(crate) fn is_retry(
        &mut self,
        caller: Caller,
        command: &Command<'_>,
        effects: &mut Vec<Effect>,
    ) -> bool {
        if !command.is_kept() {
            return false;
        }
        let Caller { session, request, .. } = caller;
        let owner = self.session(session);
        if owner.blocked.contains_key(&request) {
            return true;
        }
        let results = owner.results.get_or_insert_default();
        let outcome = match results.kept.get(&request) {
            Some(outcome) => outcome.clone(),
            None if results.forgotten.is_some_and(|forgotten| request <= forgotten) => {
                Outcome::Refused(Refusal::Forgotten)
            }
            None => return false,
        };
        effects.push(Effect::Reply { session, request, outcome });
        true
    }

    pub(crate) fn keep_result(
        &mut self,
        session: SessionId,
        request: RequestId,
        outcome: &Outcome,
    ) {
        if request.is_repeatable()
            && let Some(owner) = self.sessions.get_mut(&session)
            && let Some(results) = &mut owner.results
        {
            let before = (results.kept.len() as u64, results.bytes);
            if let Some(usage) = &owner.usage {
                results.made.insert(request, usage.results_made.fetch_add(1, Relaxed));
            }
            results.keep(request, outcome, &self.limits);
            self.results_changed(session, before);
        }
    }

    /// Keeps count of the results of a session, which were `before`.
    fn results_changed(&mut self, session: SessionId, before: (u64, u64)) {
        let Some(owner) = self.sessions.get(&session) else { return };
        let after = owner.results_kept();
        if let Some(usage) = &owner.usage {
            usage.results_changed(before, after);
        }
        self.tally.results_changed(before, after);
    }

    /// The highest number that a repeatable request of a session had, answered or not; 0 if there was none. What is
    /// asked under a higher one is new.
    #[must_use]
    pub fn last_request(&self, session: SessionId) -> RequestId {
        let Some(owner) = self.sessions.get(&session) else { return RequestId(0) };
        let unrepeatable = RequestId(RequestId::UNREPEATABLE);
        let blocked = owner.blocked.range(..unrepeatable).next_back().map(|(&request, _)| request);
        let results = owner.results.as_deref();
        let kept = results.and_then(|it| it.kept.last_key_value()).map(|(&request, _)| request);
        let forgotten = results.and_then(|it| it.forgotten);
        blocked.max(kept).max(forgotten).unwrap_or(RequestId(0))
    }

    /// The kept results of a session: when each was made, among all that its stores keep, and about its bytes.
    #[must_use]
    pub fn results_made(&self, session: SessionId) -> Vec<(u64, u64)> {
        let results = self.sessions.get(&session).and_then(|owner| owner.results.as_deref());
        let Some(results) = results else { return Vec::new() };
        let made = results.made.iter();
        made.filter_map(|(request, &made)| Some((made, size(results.kept.get(request)?)))).collect()
    }

    /// Forgets the results of a session that were made up to `made`: those of all its stores together were too many.
    pub fn forget_results(&mut self, session: SessionId, made: u64) {
        let Some(owner) = self.sessions.get_mut(&session) else { return };
        let before = owner.results_kept();
        let Some(results) = &mut owner.results else { return };
        while let Some(oldest) = results.order.front()
            && results.made.get(oldest).is_none_or(|at| *at <= made)
        {
            results.forget_oldest();
        }
        self.results_changed(session, before);
    }

    /// Whether a session holds as much as it may.
    pub(crate) fn has_all_holds(&self, session: SessionId) -> bool {
        let max = self.limits.holds_per_session_max;
        max > 0 && self.counted(session, Session::holds_counted, &|usage| &usage.holds) >= max
    }

    /// Whether a session waits for as much as it may.
    pub(crate) fn has_all_waits(&self, session: SessionId) -> bool {
        let max = self.limits.waits_per_session_max;
        max > 0 && self.counted(session, Session::waits_counted, &|usage| &usage.waits) >= max
    }

    /// What a session has, also if all of it is in other stores.
    fn counted(
        &self,
        session: SessionId,
        here: fn(&Session) -> u64,
        elsewhere: &dyn Fn(&Usage) -> &AtomicU64,
    ) -> u64 {
        match (self.sessions.get(&session), &self.usages) {
            (Some(owner), _) => here(owner),
            (None, Some(usages)) => {
                usages(session).map_or(0, |usage| elsewhere(&usage).load(Relaxed))
            }
            (None, None) => 0,
        }
    }

    pub(crate) fn acknowledge(&mut self, session: SessionId, up_to: RequestId) {
        if let Some(owner) = self.sessions.get_mut(&session)
            && let Some(results) = &mut owner.results
        {
            let before = (results.kept.len() as u64, results.bytes);
            results.acknowledge(up_to);
            self.results_changed(session, before);
        }
    }

    /// Withdraws a blocked request and answers it.
    pub(crate) fn cancel(
        &mut self,
        session: SessionId,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) {
        let outcome =
            match self.sessions.get(&session).and_then(|owner| owner.blocked.get(&request)) {
                // As if its time were over: there was nothing to pop.
                Some(Blocked::Pop { .. }) if self.limits.follows(2) && !bug(Bug::WrongForm) => {
                    Outcome::Empty
                }
                Some(_) => Outcome::Timeout,
                None => {
                    let granted = self.sessions.get(&session).and_then(|owner| owner.holds.first());
                    if let Some(slot) = granted.filter(|_| bug(Bug::CancelFrees)) {
                        self.end_hold(slot, EndOfHold::Released, effects);
                    }
                    return;
                }
            };
        if self.withdraw(session, request, effects) {
            self.answer(session, request, outcome, effects);
        }
    }

    /// Withdraws a blocked request without a word to it.
    fn withdraw(
        &mut self,
        session: SessionId,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let Some(owner) = self.sessions.get(&session) else { return false };
        match owner.blocked.get(&request) {
            None => false,
            Some(&Blocked::Claim(claim)) => {
                self.leave_queue(claim, effects);
                true
            }
            Some(Blocked::Pop { .. }) => self.leave_list(session, request),
            Some(Blocked::Barrier { .. }) => self.leave_barrier(session, request, effects),
        }
    }

    /// Takes back what could not be delivered.
    pub(crate) fn undo(&mut self, outcome: &Outcome, effects: &mut Vec<Effect>) {
        match outcome.given() {
            Some(Given::Granted(grant) | Given::Acquired(grant)) => {
                self.undo_grant(grant.token, effects);
            }
            Some(Given::Popped { key, end, value }) => {
                self.undo_pop(key, end, value.clone(), effects);
            }
            None => {}
        }
    }

    pub(crate) fn detach(&mut self, id: SessionId, until: Timestamp) {
        let listened = self.session(id).detached.is_none();
        self.set_detached(id, until);
        if listened && !self.listens(id) {
            self.unlist_all(id);
        }
    }

    fn set_detached(&mut self, id: SessionId, until: Timestamp) {
        self.stop_detached_timer(id);
        let at = until.max(self.now).max(self.lease_end(id).unwrap_or_default());
        let timer = self.deadlines.add_timer(at, Timer::Session(id));
        self.session(id).detached = Some((until, timer));
    }

    /// A lease of the session was shortened, prolonged or ended: a detached session may end at another time.
    pub(crate) fn lease_changed(&mut self, id: SessionId) {
        if let Some(owner) = self.sessions.get(&id)
            && let Some((until, _)) = owner.detached
        {
            self.set_detached(id, until);
        }
    }

    pub(crate) fn attach(&mut self, id: SessionId) {
        let listened = self.listens(id);
        self.stop_detached_timer(id);
        if !listened {
            self.list_all(id);
        }
    }

    fn stop_detached_timer(&mut self, id: SessionId) {
        if let Some((_, timer)) = self.session(id).detached.take() {
            self.deadlines.remove_timer(timer);
        }
    }

    /// A detached session has waited long enough, unless it still has a lease.
    pub(crate) fn detached_due(&mut self, id: SessionId, at: Timestamp, effects: &mut Vec<Effect>) {
        let detached = self.session(id).detached.take();
        if let Some((until, _)) = detached
            && let Some(end) = self.lease_end(id)
            && end > at
        {
            let timer = self.deadlines.add_timer(end, Timer::Session(id));
            self.session(id).detached = Some((until, timer));
            return;
        }
        self.end_session(id, EndOfSession::Released(None), effects);
        effects.push(Effect::SessionEnded { session: id });
    }

    /// When the last lease of a session ends.
    #[must_use]
    pub fn lease_end(&self, id: SessionId) -> Option<Timestamp> {
        let owner = self.sessions.get(&id)?;
        let holds = owner.holds.iter(&self.locks.claims);
        let bases = holds.filter_map(|(_, claim)| claim.hold.map(|hold| hold.base));
        bases.max().map(|base| self.deadlines.lease_end(base))
    }

    /// Lets no hold of a session last longer than until `end`.
    pub(crate) fn shorten_leases(&mut self, id: SessionId, end: Timestamp) {
        let Some(owner) = self.sessions.get(&id) else { return };
        let slots: Vec<Slot> = owner.holds.iter(&self.locks.claims).map(|(slot, _)| slot).collect();
        for slot in slots {
            if let Some(hold) = &mut self.locks.claims[slot].hold
                && hold.base > end
            {
                self.deadlines.remove_lease(hold.base, hold.fence);
                hold.base = end;
                self.deadlines.add_lease(end, hold.fence, slot);
            }
        }
    }

    /// Whether there is a session with this id. Takes no longer the more there are.
    #[must_use]
    pub fn has_session(&self, id: SessionId) -> bool {
        self.sessions.contains_key(&id)
    }

    /// The sessions with ids in a range, in order. Looks at no others.
    #[must_use]
    pub fn session_ids(&self, range: core::ops::RangeInclusive<SessionId>) -> Vec<SessionId> {
        self.session_order.range(range).copied().collect()
    }

    /// The sessions that hold or wait for something, in no order.
    pub fn busy_sessions(&self) -> impl Iterator<Item = SessionId> + '_ {
        let is_busy = |owner: &Session| {
            !owner.holds.is_empty()
                || !owner.blocked.is_empty()
                || owner.enqueued.len() > owner.notes.len()
        };
        self.sessions.iter().filter(move |(_, owner)| is_busy(owner)).map(|(&id, _)| id)
    }

    /// Whether a session listens to anything.
    #[must_use]
    pub fn subscribes(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|owner| !owner.subscriptions.is_empty())
    }

    /// What became of a request, as far as the store still knows.
    #[must_use]
    pub fn progress(&self, session: SessionId, request: RequestId) -> Progress {
        let Some(owner) = self.sessions.get(&session) else { return Progress::Unknown };
        if owner.blocked.contains_key(&request) {
            return Progress::Waiting;
        }
        let kept = owner.results.as_ref().and_then(|results| results.kept.get(&request));
        kept.map_or(Progress::Unknown, |outcome| Progress::Answered(outcome.clone()))
    }

    /// Ends a session: subscriptions, enqueue records, waits, and holds if they are released.
    pub(crate) fn end_session(
        &mut self,
        id: SessionId,
        end: EndOfSession,
        effects: &mut Vec<Effect>,
    ) {
        let Some(owner) = self.sessions.get_mut(&id) else { return };
        if let Some((_, timer)) = owner.detached.take() {
            self.deadlines.remove_timer(timer);
        }
        let results = owner.results_kept();
        for subscription in core::mem::take(&mut owner.subscriptions) {
            self.forget_subscription(&subscription);
            self.unlist(id, &subscription);
        }
        let places_until = match end {
            EndOfSession::Orphaned { until } if self.has_reference(id) => Some(until),
            EndOfSession::Orphaned { .. } | EndOfSession::Left | EndOfSession::Released(_) => None,
        };
        let mut orphans = Vec::new();
        // All its places go before anybody moves up, or it could be granted something on its way out.
        let mut left = Vec::new();
        let mut leave = |store: &mut Self, slot| match places_until {
            Some(until) if store.orphan_place(slot, until) => orphans.push(slot),
            Some(_) | None => left.push(store.forget_waiter(slot)),
        };
        let owner = self.session(id);
        owner.notes.clear();
        for enqueued in owner.enqueued.take() {
            if let Enqueued::Claim(slot) = enqueued {
                let claim = &mut self.locks.claims[slot];
                claim.enqueued = false;
                if claim.hold.is_none() {
                    leave(self, slot);
                }
            }
        }
        while let Some((&request, blocked)) = self.session(id).blocked.first_key_value() {
            if let &Blocked::Claim(slot) = blocked {
                leave(self, slot);
            } else if bug(Bug::DeadPopper) && matches!(blocked, Blocked::Pop { .. }) {
                self.session(id).blocked.remove(&request);
            } else {
                self.withdraw(id, request, effects);
            }
        }
        for lock in left {
            self.promote(lock, effects);
        }
        if let Some(client) = self.clients.get_mut(&id)
            && places_until.is_none()
            && client.orphans == 0
        {
            client.reference = None;
        }
        while let Some(slot) = self.session(id).holds.first() {
            if let EndOfSession::Released(lost) = end {
                self.end_hold(slot, EndOfHold::Session(lost), effects);
                continue;
            }
            let claim = &self.locks.claims[slot];
            if claim.election {
                let lock = &self.locks.arena[claim.lock];
                self.observers.forget_leader(&lock.key, id);
            }
            let owner = self.sessions.get_mut(&id).expect("it is just ending");
            owner.holds.remove(&mut self.locks.claims, slot);
            owner.count_hold(false);
            self.orphan(slot);
            orphans.push(slot);
        }
        self.sessions.remove(&id);
        self.session_order.remove(&id);
        if self.clients.get(&id).is_some_and(|client| client.orphans == 0) {
            self.clients.remove(&id);
        }
        self.tally.results_changed(results, (0, 0));
        for slot in orphans {
            self.reunite_orphan(slot, effects);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflockd_api::{Mode, Span, Subscription, command};

    /// Who holds or waits for something is busy. Who only listens, or has not claimed a place in time, is not.
    #[test]
    fn sessions_are_known_and_some_are_busy() {
        let shared = Arc::new(crate::Shared::new());
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        let mut send = |session, now, command| {
            let caller = Caller { session: SessionId(session), request: RequestId(1), keep: false };
            store.apply(caller, command, Timestamp(now), &mut Vec::new());
            store.check_invariants();
        };
        let (mode, lease, salt) = (Mode::Mutex, Some(Span(1000)), 7);
        let acquire = |wait| command::Acquire { key: b"k", mode, wait: Span(wait), lease, salt };
        let enqueue = |key, lease| command::Enqueue { key, mode, lease, salt };
        send(1, 0, Command::Acquire(acquire(0)));
        send(2, 0, Command::Acquire(acquire(1000)));
        send(3, 0, Command::Enqueue(enqueue(b"k", lease)));
        send(4, 0, Command::Enqueue(enqueue(b"noted", Some(Span(5)))));
        let to = Subscription::Signals { pattern: b">", group: b"" };
        send(5, 0, Command::Subscribe(command::Subscribe { to }));
        send(5, 5, Command::Tick);
        let mut busy: Vec<u64> = store.busy_sessions().map(|id| id.0).collect();
        busy.sort_unstable();
        assert_eq!(busy, [1, 2, 3]);
        let known = |id: &u64| store.has_session(SessionId(*id));
        assert_eq!((0..9).filter(known).collect::<Vec<u64>>(), [1, 2, 3, 4, 5]);
    }
}
