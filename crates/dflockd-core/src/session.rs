//! What a client owns, and what happens when it goes. Results kept for retries.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::chain::{Chain, Slot};
use crate::command::{Caller, Command};
use crate::deadline::{Timer, TimerKey};
use crate::effect::{Effect, LostReason, Outcome, Refusal};
use crate::lock::{EndOfHold, IN_SESSION};
use crate::store::Store;
use crate::subscription::Owned;
use crate::types::{Bytes, Limits, RequestId, SessionId, Space, Timestamp};

pub(crate) struct Session {
    /// By fence, because they are added when granted.
    pub(crate) holds: Chain<IN_SESSION>,
    /// Places taken by `Enqueue` and not yet claimed by `Wait`.
    pub(crate) enqueued: BTreeMap<(Space, Bytes), Enqueued>,
    /// Requests that are not answered yet.
    pub(crate) blocked: BTreeMap<RequestId, Blocked>,
    pub(crate) subscriptions: BTreeSet<Owned>,
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
            let Some(oldest) = self.order.pop_front() else { break };
            if let Some(outcome) = self.kept.remove(&oldest) {
                self.bytes -= size(&outcome);
            }
            self.forgotten = self.forgotten.max(Some(oldest));
        }
    }

    fn acknowledge(&mut self, up_to: RequestId) {
        let later = self.kept.split_off(&RequestId(up_to.0.saturating_add(1)));
        let gone = core::mem::replace(&mut self.kept, later);
        // Acknowledged or not, what was answered once is never executed again.
        self.forgotten = self.forgotten.max(gone.last_key_value().map(|(&request, _)| request));
        self.bytes -= gone.values().map(size).sum::<u64>();
        self.order.retain(|request| !gone.contains_key(request));
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
    pub(crate) fn new() -> Self {
        Self {
            holds: Chain::new(),
            enqueued: BTreeMap::new(),
            blocked: BTreeMap::new(),
            subscriptions: BTreeSet::new(),
            results: None,
            detached: None,
            notes: BTreeMap::new(),
        }
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
        match command {
            Command::Tick
            | Command::NewTerm
            | Command::RenewSession { .. }
            | Command::Cancel { .. }
            | Command::Acknowledge { .. }
            | Command::Undo(_)
            | Command::Detach { .. }
            | Command::Attach
            | Command::Orphan { .. }
            | Command::EndSession { .. } => return false,
            Command::Acquire { .. }
            | Command::Enqueue { .. }
            | Command::Wait { .. }
            | Command::Release { .. }
            | Command::Renew { .. }
            | Command::ForceRelease { .. }
            | Command::Add { .. }
            | Command::CounterSet { .. }
            | Command::KvSet { .. }
            | Command::KvDelete { .. }
            | Command::KvCompareAndSet { .. }
            | Command::Push { .. }
            | Command::Pop { .. }
            | Command::BarrierWait { .. }
            | Command::Signal { .. }
            | Command::Subscribe(_)
            | Command::Unsubscribe(_) => {}
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
            results.keep(request, outcome, &self.limits);
            self.tally.results_changed(before, (results.kept.len() as u64, results.bytes));
        }
    }

    pub(crate) fn acknowledge(&mut self, session: SessionId, up_to: RequestId) {
        if let Some(owner) = self.sessions.get_mut(&session)
            && let Some(results) = &mut owner.results
        {
            let before = (results.kept.len() as u64, results.bytes);
            results.acknowledge(up_to);
            self.tally.results_changed(before, (results.kept.len() as u64, results.bytes));
        }
    }

    /// Withdraws a blocked request and answers it.
    pub(crate) fn cancel(
        &mut self,
        session: SessionId,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) {
        if self.withdraw(session, request, effects) {
            self.answer(session, request, Outcome::Timeout, effects);
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
        match outcome {
            Outcome::Granted(grant) | Outcome::Acquired(grant) => {
                self.undo_grant(grant.token, effects);
            }
            Outcome::Popped { key, end, value } => {
                self.undo_pop(key, *end, value.clone(), effects);
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

    pub(crate) fn detach(&mut self, id: SessionId, until: Timestamp) {
        self.attach(id);
        let at = until.max(self.now).max(self.lease_end(id).unwrap_or_default());
        let timer = self.deadlines.add_timer(at, Timer::Session(id));
        self.session(id).detached = Some((until, timer));
    }

    /// A lease of the session was shortened, prolonged or ended: a detached session may end at another time.
    pub(crate) fn lease_changed(&mut self, id: SessionId) {
        if let Some(owner) = self.sessions.get(&id)
            && let Some((until, _)) = owner.detached
        {
            self.detach(id, until);
        }
    }

    pub(crate) fn attach(&mut self, id: SessionId) {
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
        self.end_session(id, true, None, effects);
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

    /// The sessions with ids in a range, in order.
    #[must_use]
    pub fn session_ids(&self, range: core::ops::RangeInclusive<SessionId>) -> Vec<SessionId> {
        let mut ids: Vec<_> =
            self.sessions.keys().copied().filter(|id| range.contains(id)).collect();
        ids.sort_unstable();
        ids
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

    /// Ends a session: subscriptions, enqueue records, waits, and, if `release`, holds.
    pub(crate) fn end_session(
        &mut self,
        id: SessionId,
        release: bool,
        lost: Option<LostReason>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(owner) = self.sessions.get_mut(&id) else { return };
        if let Some((_, timer)) = owner.detached.take() {
            self.deadlines.remove_timer(timer);
        }
        let results = owner.results_kept();
        for subscription in core::mem::take(&mut owner.subscriptions) {
            *self.tally.subscriptions(&subscription) -= 1;
            self.unlist(id, &subscription);
        }
        // All its places go before anybody moves up, or it could be granted something on its way out.
        let mut left = Vec::new();
        let owner = self.session(id);
        owner.notes.clear();
        for enqueued in core::mem::take(&mut owner.enqueued).into_values() {
            if let Enqueued::Claim(slot) = enqueued {
                let claim = &mut self.locks.claims[slot];
                claim.enqueued = false;
                if claim.hold.is_none() {
                    left.push(self.forget_waiter(slot));
                }
            }
        }
        while let Some((&request, blocked)) = self.session(id).blocked.first_key_value() {
            if let &Blocked::Claim(slot) = blocked {
                left.push(self.forget_waiter(slot));
            } else {
                self.withdraw(id, request, effects);
            }
        }
        for lock in left {
            self.promote(lock, effects);
        }
        while let Some(slot) = self.session(id).holds.first() {
            if release {
                self.end_hold(slot, EndOfHold::Session(lost), effects);
                continue;
            }
            let claim = &mut self.locks.claims[slot];
            claim.orphaned = true;
            if claim.election {
                let lock = &self.locks.arena[claim.lock];
                self.observers.forget_leader(&lock.key, id);
            }
            let owner = self.sessions.get_mut(&id).expect("it is just ending");
            owner.holds.remove(&mut self.locks.claims, slot);
        }
        self.sessions.remove(&id);
        self.tally.results_changed(results, (0, 0));
    }
}
