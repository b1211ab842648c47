//! The committed log, applied once more by nobody's node: what every node must come to, and what every client may be
//! told. Each entry is checked against the promises as it is applied.

use std::collections::BTreeMap;

use bytes::Bytes;
use dflockd_core::{
    Command, Effect, Fence, Given, Outcome, Push, RequestId, SessionId, Span, Subscription,
    Timestamp, command,
};
use dflockd_replica::codec::{self, Section};
use dflockd_replica::machine::{Event, Machine};
use dflockd_replica::types::{LeaderCommand, ProposalBody};
use raft::eraftpb::{Entry, EntryType};

use crate::invariants::watches::Seen;
use crate::invariants::{self, Broken};

/// A lock at some entry.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct LockNow {
    pub slots: Option<u32>,
    pub holders: Vec<(SessionId, Fence, bool)>,
    /// Session, since when, writer.
    pub queue: Vec<(SessionId, u64, bool)>,
}

/// Locks by namespace and key.
pub type LocksNow = BTreeMap<(u8, Vec<u8>), LockNow>;

/// What an entry asked for, as far as holds can end by it.
#[derive(Default)]
pub struct Touched {
    /// Holds that were released, forced or taken back.
    pub fences: Vec<Fence>,
    /// Sessions that were closed, kicked or left for others.
    pub sessions: Vec<SessionId>,
    /// Sessions that asked to restart all their leases of this length.
    pub renewals: Vec<(SessionId, RequestId, Span)>,
    /// Time was looked at.
    pub ticked: bool,
    /// A leader began.
    pub new_term: bool,
    /// Answers that were taken back.
    pub undone: Vec<Outcome>,
    /// Answers, in order.
    pub replies: Vec<(SessionId, RequestId, Outcome)>,
}

/// One entry, before and after.
pub struct Step<'a> {
    /// Of the entry.
    pub index: u64,
    /// Cluster time.
    pub now: u64,
    /// What it asked for.
    pub touched: &'a Touched,
    /// Locks before.
    pub before: &'a LocksNow,
    /// Locks after.
    pub after: &'a LocksNow,
}

/// A committed entry.
struct Committed {
    term: u64,
    /// It was committed in this term or before: the lowest one of a node that had applied it.
    committed_by: u64,
    data: Bytes,
    context: Bytes,
}

/// The kept session and its epoch, if there was one, and how many pushes it had had.
pub type Attached = (Option<(SessionId, u32)>, usize);

/// The log, and what comes of it.
pub struct Oracle {
    machine: Machine,
    /// The index of the state that the cluster began with.
    base: u64,
    /// The entries behind that.
    entries: Vec<Committed>,
    /// First and last answer to each request, with the entries that brought them.
    pub replies: BTreeMap<(SessionId, RequestId), Vec<(u64, Outcome)>>,
    /// What sessions were pushed, with the entry.
    pub pushes: BTreeMap<SessionId, Vec<(u64, Push)>>,
    /// By the session and request that attached: where, and how many pushes the session had had.
    pub attached: BTreeMap<(SessionId, RequestId), Attached>,
    /// Digests of the state at some indices.
    pub digests: BTreeMap<u64, u32>,
    /// Values of hot keys by index: only when they change.
    pub values: BTreeMap<Vec<u8>, Vec<(u64, Outcome)>>,
    /// Which barrier a request waits at.
    pub barriers: BTreeMap<(SessionId, RequestId), (Vec<u8>, u32)>,
    /// Items that were popped and put back.
    pub undone: Vec<Vec<u8>>,
    /// The last entry before the cluster followed the rules of version 2.
    pub first_rules_until: u64,
    keys: Vec<Vec<u8>>,
    lease_min: u64,
    grace: u64,
    /// Nothing is granted before the first, because leases of another cluster may not have ended. From the second on,
    /// whoever waits is granted what is free.
    grants_from: (u64, u64),
    locks: LocksNow,
    kept_answers: invariants::kept_answers::KeptAnswers,
    leases: invariants::leases::Leases,
    fences: invariants::fence_order::Fences,
    ends: invariants::session_end::Ends,
    watches: invariants::watches::Watches,
    signals: invariants::pushes::Signals,
}

/// Whether the state is compared at this index.
#[must_use]
pub fn is_sampled(index: u64) -> bool {
    index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 61 == 0
}

impl Oracle {
    /// Before the first entry.
    #[must_use]
    pub fn new(initial: &[u8], keys: Vec<Vec<u8>>, lease_min: u64, grace: u64) -> Self {
        Self {
            machine: Machine::restore(initial, false).expect("the initial state"),
            base: 1,
            entries: Vec::new(),
            replies: BTreeMap::new(),
            pushes: BTreeMap::new(),
            attached: BTreeMap::new(),
            digests: BTreeMap::new(),
            values: BTreeMap::new(),
            barriers: BTreeMap::new(),
            undone: Vec::new(),
            first_rules_until: 0,
            keys,
            lease_min,
            grace,
            grants_from: (0, 0),
            locks: LocksNow::new(),
            kept_answers: invariants::kept_answers::KeptAnswers::default(),
            leases: invariants::leases::Leases::new(lease_min, grace),
            fences: invariants::fence_order::Fences::default(),
            ends: invariants::session_end::Ends::default(),
            watches: invariants::watches::Watches::default(),
            signals: invariants::pushes::Signals::default(),
        }
    }

    /// The cluster is formed, with this state.
    pub fn begin(&mut self, state: &[u8]) {
        self.machine = Machine::restore(state, false).expect("the initial state");
    }

    /// Another cluster has begun with this state at this index, and grants nothing for a while: the first at least, the
    /// second at most. What a key was granted with before stays known.
    pub fn begin_anew(&mut self, state: &[u8], index: u64, (least, most): (Span, Span)) {
        let (keys, fences) = (std::mem::take(&mut self.keys), std::mem::take(&mut self.fences));
        let new = Self::new(state, keys, self.lease_min, self.grace);
        // A delay that had not ended goes on.
        let now = new.machine.now().0;
        let (first, last) = self.grants_from;
        let grants_from = (first.max(now + least.0), last.max(now + most.0));
        *self = Self { base: index, fences, grants_from, ..new };
        let Some(store) = self.machine.store() else { return };
        self.watches = invariants::watches::Watches::resume(store);
        for key in &self.keys {
            let value = read(store, key, self.machine.now());
            self.values.insert(key.clone(), vec![(index, value)]);
        }
    }

    /// The highest fence of a grant.
    #[must_use]
    pub fn highest_fence(&self) -> Fence {
        self.fences.highest()
    }

    /// The highest fences of locks, by their keys.
    #[must_use]
    pub fn fences_by_key(&self) -> BTreeMap<Vec<u8>, u64> {
        self.fences.by_key()
    }

    /// The value that a hot key had at an index.
    #[must_use]
    pub fn value_at(&self, key: &[u8], index: u64) -> Option<&Outcome> {
        let versions = self.values.get(key)?;
        let after = versions.partition_point(|(at, _)| *at <= index);
        Some(&versions[after.checked_sub(1)?].1)
    }

    /// The hot keys.
    #[must_use]
    pub fn keys(&self) -> &[Vec<u8>] {
        &self.keys
    }

    /// The last index.
    #[must_use]
    pub fn last(&self) -> u64 {
        self.base + self.entries.len() as u64
    }

    /// The term of an entry.
    #[must_use]
    pub fn term(&self, index: u64) -> Option<u64> {
        self.entry(index).map(|entry| entry.term)
    }

    /// The term in which an entry was committed, or a later one.
    #[must_use]
    pub fn committed_by(&self, index: u64) -> Option<u64> {
        self.entry(index).map(|entry| entry.committed_by)
    }

    fn entry(&self, index: u64) -> Option<&Committed> {
        let at = usize::try_from(index.checked_sub(self.base + 1)?).ok()?;
        self.entries.get(at)
    }

    /// The state after the last entry.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// An entry was applied by a node that was in this term.
    pub fn observe(&mut self, entry: &Entry, term: u64) -> Result<(), Broken> {
        let index = entry.index;
        if index <= self.last() {
            let Some(at) = index.checked_sub(self.base + 1) else { return Ok(()) };
            let known = &mut self.entries[usize::try_from(at).expect("small")];
            let same = (entry.term, &entry.data, &entry.context);
            if (known.term, &known.data, &known.context) != same {
                let what = format!(
                    "entry {index} was committed in term {} and again differently in term {}",
                    known.term, entry.term
                );
                return Err(Broken::new("raft", what));
            }
            known.committed_by = known.committed_by.min(term);
            return Ok(());
        }
        if index != self.last() + 1 {
            return Err(Broken::new(
                "raft",
                format!("entry {index} was applied before {}", self.last() + 1),
            ));
        }
        self.entries.push(Committed {
            term: entry.term,
            committed_by: term,
            data: entry.data.clone(),
            context: entry.context.clone(),
        });
        self.apply(entry)
    }

    fn apply(&mut self, entry: &Entry) -> Result<(), Broken> {
        let index = entry.index;
        let mut touched = Touched::default();
        let mut events = Vec::new();
        let mut watched = Seen::default();
        if self.machine.store().is_none_or(|store| !store.limits().follows(2)) {
            self.first_rules_until = index;
        }
        match entry.entry_type {
            EntryType::EntryNormal if entry.data.is_empty() => return Ok(()),
            EntryType::EntryNormal => {
                self.note(&entry.data, &mut touched);
                let applied = self.machine.apply(&entry.data, &mut events);
                applied
                    .map_err(|error| Broken::new("replicas", format!("entry {index}: {error}")))?;
            }
            EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => {
                let change = codec::decode_member_change(&entry.context);
                let change = change
                    .map_err(|error| Broken::new("replicas", format!("entry {index}: {error}")))?;
                self.machine.apply_change(change, &mut events);
            }
        }
        for event in events {
            match event {
                Event::Effect(Effect::Reply { session, request, outcome }) => {
                    self.ends.answer(index, session)?;
                    let answers = self.replies.entry((session, request)).or_default();
                    if answers.is_empty() {
                        // An answer that is repeated says nothing new.
                        if self.machine.is_kept(session) {
                            self.kept_answers.answer(session, request, &outcome);
                        }
                        touched.replies.push((session, request, outcome.clone()));
                        if outcome == Outcome::Done {
                            watched.began.push((session, request));
                        } else if let Outcome::Compacted(gone) = outcome {
                            watched.compacted.push((session, request, gone));
                        }
                    }
                    answers.push((index, outcome));
                }
                Event::Effect(Effect::Push { session, push, group }) => {
                    let group = group.as_ref().map(|group| (&*group.pattern, &*group.name));
                    self.signals.check(session, &push, group)?;
                    if let Push::Change(change) = &push {
                        watched.told.push((session, change.clone()));
                    }
                    self.pushes.entry(session).or_default().push((index, push));
                }
                Event::Attached { by, request, to } => {
                    let pushed =
                        to.and_then(|(session, _)| self.pushes.get(&session)).map_or(0, Vec::len);
                    self.attached.insert((by, request), (to, pushed));
                    touched.sessions.push(by);
                    watched.attached.extend(to.map(|(session, _)| session));
                }
                Event::Kicked { session } => {
                    touched.sessions.push(session);
                    self.kept_answers.end(session);
                    self.ends.session(session);
                }
                Event::Effect(Effect::SessionEnded { session }) => {
                    self.kept_answers.end(session);
                    watched.left.insert(session);
                    self.ends.session(session);
                }
                Event::IncarnationEnded(run) => self.ends.run(run),
                Event::Gone { .. }
                | Event::IncarnationStarted(_)
                | Event::Members
                | Event::PolicyChanged
                | Event::Digest { .. } => {}
            }
        }
        let Some(store) = self.machine.store() else { return Ok(()) };
        let now = self.machine.now();
        watched.left.extend(&touched.sessions);
        let is_there = |session| {
            self.machine
                .home(session)
                .is_some_and(|run| self.machine.run_of(run.raft_id()) == Some(run))
        };
        self.watches.check(index, &watched, store, is_there)?;
        if index.is_multiple_of(8) {
            store.check_invariants();
        }
        let mut after = LocksNow::new();
        for lock in store.survey(now, 256, usize::MAX).locks {
            let slots = match lock.kind {
                dflockd_core::LockKind::Slots(limit) => Some(limit),
                dflockd_core::LockKind::ReadWrite => None,
            };
            let holders = lock.holders.iter().map(|h| (h.session, h.fence, h.writer)).collect();
            let queue =
                lock.queue.iter().map(|w| (w.session, now.0 - w.waiting.0, w.writer)).collect();
            let space = lock.space as u8;
            after.insert((space, lock.key.to_vec()), LockNow { slots, holders, queue });
        }
        if now.0 < self.grants_from.0
            && let Some((name, _)) = after.iter().find(|(_, lock)| !lock.holders.is_empty())
        {
            let what = format!(
                "entry {index} grants {} {} ns before leases of the former cluster have ended",
                name.1.escape_ascii(),
                self.grants_from.0 - now.0
            );
            return Err(Broken::new("new-cluster", what));
        }
        let step =
            Step { index, now: now.0, touched: &touched, before: &self.locks, after: &after };
        invariants::state_exclusion::check(&step)?;
        if now.0 >= self.grants_from.1 {
            invariants::no_lost_wakeup::check(&step)?;
        }
        invariants::fifo::check(&step)?;
        invariants::barrier::check(&step, &self.barriers)?;
        self.ends.check(&step, |session| self.machine.is_kept(session))?;
        self.kept_answers.check(&step)?;
        self.fences.check(&step)?;
        self.leases.check(&step)?;
        self.locks = after;
        for key in &self.keys {
            let value = read(store, key, now);
            match self.values.get_mut(key) {
                Some(versions) if versions.last().is_some_and(|(_, known)| *known == value) => {}
                Some(versions) => versions.push((index, value)),
                None => {
                    self.values.insert(key.clone(), vec![(index, value)]);
                }
            }
        }
        if is_sampled(index) {
            self.digests.insert(index, crc32fast::hash(&self.machine.snapshot()));
        }
        Ok(())
    }

    /// Takes down what an entry asks for.
    fn note(&mut self, payload: &[u8], touched: &mut Touched) {
        for section in codec::sections(payload) {
            match section {
                Ok(Section::Batch { items, .. }) => {
                    for item in items.flatten() {
                        self.note_item(item.session, item.request, &item.body, touched);
                    }
                }
                Ok(Section::LeaderCommand(LeaderCommand::Tick)) => touched.ticked = true,
                Ok(Section::LeaderCommand(LeaderCommand::NewTerm)) => {
                    (touched.ticked, touched.new_term) = (true, true);
                }
                Ok(Section::LeaderCommand(_)) | Err(_) => {}
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "only some end holds")]
    fn note_item(
        &mut self,
        session: SessionId,
        request: RequestId,
        body: &ProposalBody<'_>,
        touched: &mut Touched,
    ) {
        match body {
            ProposalBody::Command(Command::Release(command::Release { token, .. })) => {
                touched.fences.push(token.fence)
            }
            ProposalBody::Command(Command::ForceRelease(command::ForceRelease {
                fence, ..
            })) => touched.fences.push(*fence),
            ProposalBody::Command(Command::RenewSession(command::RenewSession { lease })) => {
                touched.renewals.push((session, request, *lease));
            }
            ProposalBody::Command(Command::Subscribe(command::Subscribe {
                to: Subscription::Changes { pattern, from },
            })) => self.watches.ask(session, request, pattern, *from),
            ProposalBody::Command(Command::BarrierWait(command::BarrierWait {
                key,
                count,
                ..
            })) => {
                self.barriers.insert((session, request), (key.to_vec(), *count));
            }
            ProposalBody::Undo(outcome) => {
                match outcome.given() {
                    Some(Given::Granted(grant) | Given::Acquired(grant)) => {
                        touched.fences.push(grant.token.fence);
                    }
                    Some(Given::Popped { value, .. }) => self.undone.push(value.to_vec()),
                    None => {}
                }
                touched.undone.push(outcome.clone());
            }
            ProposalBody::Close { .. } => touched.sessions.push(session),
            ProposalBody::Keep { .. } => self.ends.keep(session),
            _ => {}
        }
    }
}

/// What a hot key's value is: the first byte of the key says what it is.
#[must_use]
pub fn read(store: &dflockd_core::Store, key: &[u8], now: Timestamp) -> Outcome {
    store.read(query(key), now)
}

/// How to read a key.
#[must_use]
pub fn query(key: &[u8]) -> dflockd_core::Query<'_> {
    match key.first() {
        Some(b'c' | b'd') => dflockd_core::Query::Counter { key },
        Some(b'q' | b'r') => dflockd_core::Query::Length { key },
        _ => dflockd_core::Query::Kv { key },
    }
}
