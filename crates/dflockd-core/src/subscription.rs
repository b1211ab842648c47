//! Who listens to what: signals, queue groups, watches. Observers of elections are in `election.rs`.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::command::Subscription;
use crate::effect::{Effect, Group, LeaderEvent, Outcome, Push, Refusal};
use crate::pattern::{self, PatternIndex};
use crate::store::Store;
use crate::types::{Bytes, Revision, SessionId, Space};

/// A subscription as its session remembers it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(crate) enum Owned {
    Signals { pattern: Bytes, group: Bytes },
    Changes { pattern: Bytes },
    Leaders { key: Bytes },
}

impl From<Subscription<'_>> for Owned {
    fn from(subscription: Subscription<'_>) -> Self {
        match subscription {
            Subscription::Signals { pattern, group } => {
                Self::Signals { pattern: pattern.into(), group: group.into() }
            }
            Subscription::Changes { pattern, from: _ } => Self::Changes { pattern: pattern.into() },
            Subscription::Leaders { key } => Self::Leaders { key: key.into() },
        }
    }
}

/// Everybody who listens to one pattern.
#[derive(Default)]
pub(crate) struct Listeners {
    pub(crate) alone: BTreeSet<SessionId>,
    pub(crate) groups: BTreeMap<Bytes, Members>,
}

/// The members of a queue group, in the order they joined.
#[derive(Clone, Default, Serialize, Deserialize)]
pub(crate) struct Members {
    pub(crate) sessions: Vec<SessionId>,
    /// Whose turn it is.
    pub(crate) turn: usize,
}

impl Members {
    fn pick(&mut self) -> SessionId {
        let session = self.sessions[self.turn];
        self.turn = (self.turn + 1) % self.sessions.len();
        session
    }

    fn remove(&mut self, session: SessionId) {
        let Some(index) = self.sessions.iter().position(|&member| member == session) else {
            return;
        };
        self.sessions.remove(index);
        if index < self.turn {
            self.turn -= 1;
        }
        if self.turn >= self.sessions.len() {
            self.turn = 0;
        }
    }
}

pub(crate) struct Subscriptions {
    pub(crate) signals: PatternIndex<Listeners>,
    pub(crate) watches: PatternIndex<BTreeSet<SessionId>>,
}

impl Subscriptions {
    pub(crate) const fn new() -> Self {
        Self { signals: PatternIndex::new(), watches: PatternIndex::new() }
    }

    pub(crate) fn nobody_watches(&self) -> bool {
        self.watches.is_empty()
    }

    /// The sessions that watch a key, each once.
    pub(crate) fn watchers(&self, key: &[u8]) -> BTreeSet<SessionId> {
        let patterns = self.watches.find(key);
        patterns.iter().filter_map(|pattern| self.watches.get(pattern)).flatten().copied().collect()
    }
}

fn is_valid(subscription: Subscription<'_>) -> bool {
    match subscription {
        Subscription::Signals { pattern, .. } | Subscription::Changes { pattern, .. } => {
            pattern::is_valid(pattern)
        }
        Subscription::Leaders { .. } => true,
    }
}

impl Store {
    pub(crate) fn subscribe(
        &mut self,
        session: SessionId,
        subscription: Subscription<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        if !is_valid(subscription) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let owned = Owned::from(subscription);
        let subscriptions_max = self.limits.subscriptions_max;
        let mine = &self.session(session).subscriptions;
        let new = !mine.contains(&owned);
        if new && subscriptions_max > 0 && mine.len() as u64 >= subscriptions_max {
            return Outcome::Refused(Refusal::MaxSubscriptions);
        }
        if let Subscription::Changes { pattern, from: Some(from) } = subscription
            && let Err(compacted) = self.replay(session, pattern, from, effects)
        {
            return Outcome::Compacted(compacted);
        }
        if new {
            *self.tally.subscriptions(&owned) += 1;
            self.list(session, &owned);
        }
        if let Owned::Leaders { key } = &owned {
            self.tell_who_leads(session, key, effects);
        }
        self.session(session).subscriptions.insert(owned);
        Outcome::Done
    }

    pub(crate) fn unsubscribe(
        &mut self,
        session: SessionId,
        subscription: Subscription<'_>,
    ) -> Outcome {
        if !is_valid(subscription) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let owned = Owned::from(subscription);
        self.unlist(session, &owned);
        if self.session(session).subscriptions.remove(&owned) {
            *self.tally.subscriptions(&owned) -= 1;
        }
        Outcome::Done
    }

    pub(crate) fn signal(
        &mut self,
        channel: &[u8],
        payload: &[u8],
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        if !pattern::is_literal(channel) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        if self.subscriptions.signals.is_empty() {
            return Outcome::Number(0);
        }
        let patterns = self.subscriptions.signals.find(channel);
        let (channel, payload) = (Bytes::from(channel), Bytes::from(payload));
        let push = || Push::Signal { channel: channel.clone(), payload: payload.clone() };
        let mut copies = 0;
        let mut told = BTreeSet::new();
        // The exact pattern comes first, and of each pattern the lone listeners.
        let (exact, wild) = patterns.split_at(usize::from(
            patterns.first().is_some_and(|first| pattern::is_literal(first)),
        ));
        for patterns in [exact, wild] {
            for pattern in patterns {
                let listeners = self.subscriptions.signals.get(pattern).expect("just found");
                for &session in &listeners.alone {
                    if told.insert(session) {
                        effects.push(Effect::Push { session, push: push(), group: None });
                        copies += 1;
                    }
                }
            }
            for pattern in patterns {
                let listeners = self.subscriptions.signals.get_mut(pattern).expect("just found");
                for (name, members) in &mut listeners.groups {
                    let group = Group { pattern: pattern.clone(), name: name.clone() };
                    let session = members.pick();
                    if bug(Bug::GroupTwice) {
                        let (session, group) = (members.pick(), Some(group.clone()));
                        effects.push(Effect::Push { session, push: push(), group });
                    }
                    effects.push(Effect::Push { session, push: push(), group: Some(group) });
                    copies += 1;
                }
            }
        }
        Outcome::Number(copies)
    }

    /// The members of a queue group, beginning with the one whose turn is next.
    pub fn group_members(&self, group: &Group) -> impl Iterator<Item = SessionId> {
        let listeners = self.subscriptions.signals.get(&group.pattern);
        let members = listeners.and_then(|listeners| listeners.groups.get(&group.name));
        members.into_iter().flat_map(|members| {
            let (before, after) = members.sessions.split_at(members.turn);
            after.iter().chain(before).copied()
        })
    }

    /// Enters a new subscription where it is looked for.
    pub(crate) fn list(&mut self, session: SessionId, subscription: &Owned) {
        match subscription {
            Owned::Signals { pattern, group } => {
                let listeners = self.subscriptions.signals.entry(pattern);
                if group.is_empty() {
                    listeners.alone.insert(session);
                } else {
                    let members = listeners.groups.entry(group.clone()).or_default();
                    members.sessions.push(session);
                }
            }
            Owned::Changes { pattern } => {
                self.subscriptions.watches.entry(pattern).insert(session);
            }
            Owned::Leaders { key } => self.observers.observe(key, session),
        }
    }

    pub(crate) fn unlist(&mut self, session: SessionId, subscription: &Owned) {
        match subscription {
            Owned::Signals { pattern, group } => {
                let Some(listeners) = self.subscriptions.signals.get_mut(pattern) else { return };
                if group.is_empty() {
                    listeners.alone.remove(&session);
                } else if let Some(members) = listeners.groups.get_mut(group) {
                    members.remove(session);
                    if members.sessions.is_empty() {
                        listeners.groups.remove(group);
                    }
                }
                if listeners.alone.is_empty() && listeners.groups.is_empty() {
                    self.subscriptions.signals.remove(pattern);
                }
            }
            Owned::Changes { pattern } => {
                let Some(sessions) = self.subscriptions.watches.get_mut(pattern) else { return };
                sessions.remove(&session);
                if sessions.is_empty() {
                    self.subscriptions.watches.remove(pattern);
                }
            }
            Owned::Leaders { key } => self.observers.forget(key, session),
        }
    }

    /// Sends the kept changes from a revision on.
    fn replay(
        &self,
        session: SessionId,
        pattern: &[u8],
        from: Revision,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Revision> {
        let after = Revision(from.0.saturating_sub(1));
        for change in self.changes(pattern, after, self.revision(), usize::MAX)? {
            let push = Push::Change(change);
            effects.push(Effect::Push { session, push, group: None });
        }
        Ok(())
    }

    fn tell_who_leads(&self, session: SessionId, key: &Bytes, effects: &mut Vec<Effect>) {
        let lock = self.locks.find(Space::Locks, key).map(|slot| &self.locks.arena[slot]);
        if lock.is_some_and(|lock| lock.is_mutex() && !lock.holders.is_empty()) {
            let push = Push::Leader { event: LeaderEvent::Elected, key: key.clone() };
            effects.push(Effect::Push { session, push, group: None });
        }
    }
}
