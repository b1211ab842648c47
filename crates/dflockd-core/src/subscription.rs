//! Who listens to what: signals, queue groups, watches. Observers of elections are in `election.rs`.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::sync::Arc;
use alloc::vec::Vec;

use dflockd_api::{
    Bytes, LeaderEvent, Outcome, Push, Refusal, Revision, SessionId, Space, Subscription,
};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::effect::{Effect, Group};
use crate::limits::Limits;
use crate::pattern::{self, PatternIndex, Separators};
use crate::shared::Shared;
use crate::store::Store;
use crate::watch::{SharedWatches, WatchIndex};

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

impl Owned {
    /// The bytes of its names: what one subscription may cost depends on them alone.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::Signals { pattern, group } => pattern.len() + group.len(),
            Self::Changes { pattern } => pattern.len(),
            Self::Leaders { key } => key.len(),
        };
        bytes as u64
    }
}

/// How much is subscribed to, by a session or by all of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Volume {
    pub(crate) count: u64,
    /// See [`Owned::bytes`].
    pub(crate) bytes: u64,
}

impl Volume {
    pub(crate) fn add(&mut self, subscription: &Owned) {
        self.count += 1;
        self.bytes += subscription.bytes();
    }

    fn remove(&mut self, subscription: &Owned) {
        self.count -= 1;
        self.bytes -= subscription.bytes();
    }

    /// Whether one more stays within both limits; 0 = unlimited.
    fn has_room_for(self, subscription: &Owned, count_max: u64, bytes_max: u64) -> bool {
        let (count, bytes) = (self.count + 1, self.bytes + subscription.bytes());
        (count_max == 0 || count <= count_max) && (bytes_max == 0 || bytes <= bytes_max)
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

/// Who is to be told what. A session that does not listen ([`Store::listens`]) is not in here.
pub(crate) struct Subscriptions {
    pub(crate) signals: PatternIndex<Listeners>,
    pub(crate) watches: WatchIndex,
    /// Where watches with wildcards are instead, if several stores have them in common.
    pub(crate) shared_watches: Option<Arc<dyn SharedWatches>>,
    /// Of all sessions, whether they listen or not.
    pub(crate) volume: Volume,
}

impl Subscriptions {
    pub(crate) const fn new() -> Self {
        Self {
            signals: PatternIndex::new(),
            watches: WatchIndex::new(),
            shared_watches: None,
            volume: Volume { count: 0, bytes: 0 },
        }
    }

    pub(crate) fn nobody_watches(&self, shared: &Shared) -> bool {
        self.watches.is_empty() && shared.wild_watches() == 0
    }

    /// The sessions that watch a key, each once.
    pub(crate) fn watchers(
        &self,
        key: &[u8],
        separators: Separators,
        shared: &Shared,
    ) -> BTreeSet<SessionId> {
        let mut watchers = BTreeSet::new();
        if !self.watches.is_empty() {
            self.watches.find(key, separators, &mut watchers);
        }
        if shared.wild_watches() > 0
            && let Some(watches) = &self.shared_watches
        {
            watches.read(&mut |index| index.find(key, separators, &mut watchers));
        }
        watchers
    }

    /// Where a watch with this pattern is, if not in the store itself.
    pub(crate) fn shared_for(&self, pattern: &[u8]) -> Option<&dyn SharedWatches> {
        self.shared_watches.as_deref().filter(|_| !pattern::is_literal(pattern))
    }
}

fn is_valid(subscription: Subscription<'_>, limits: &Limits) -> bool {
    match subscription {
        Subscription::Signals { pattern, .. } | Subscription::Changes { pattern, .. } => {
            pattern::is_valid(pattern, limits.separators())
        }
        Subscription::Leaders { .. } => true,
    }
}

/// Whether no pattern has more tokens than it may. Older ones are kept and can be ended, so only a new one is refused.
fn is_short(subscription: Subscription<'_>, limits: &Limits) -> bool {
    match subscription {
        Subscription::Signals { pattern, .. } | Subscription::Changes { pattern, .. } => {
            let tokens_max = limits.pattern_tokens_max;
            tokens_max == 0 || pattern::tokens(pattern, limits.separators()) <= tokens_max
        }
        Subscription::Leaders { .. } => true,
    }
}

impl Store {
    /// Has watches with wildcards in common with other stores from now on; there must be none yet.
    pub fn share_watches(&mut self, watches: Arc<dyn SharedWatches>) {
        self.subscriptions.shared_watches = Some(watches);
    }

    pub(crate) fn subscribe(
        &mut self,
        session: SessionId,
        subscription: Subscription<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        if !is_valid(subscription, &self.limits) || !is_short(subscription, &self.limits) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let owned = Owned::from(subscription);
        let new = !self.session(session).subscriptions.contains(&owned);
        if new && !self.has_room_for(session, &owned) {
            return Outcome::Refused(Refusal::MaxSubscriptions);
        }
        if let Subscription::Changes { pattern, from: Some(from) } = subscription
            && let Err(compacted) = self.replay(session, pattern, from, effects)
        {
            return Outcome::Compacted(compacted);
        }
        if new && self.listens(session) {
            self.list(session, &owned);
        }
        if let Owned::Leaders { key } = &owned {
            self.tell_who_leads(session, key, effects);
        }
        if new {
            *self.tally.subscriptions(&owned) += 1;
            self.subscriptions.volume.add(&owned);
            let owner = self.session(session);
            owner.subscribed.add(&owned);
            owner.subscriptions.insert(owned);
        }
        Outcome::Done
    }

    pub(crate) fn unsubscribe(
        &mut self,
        session: SessionId,
        subscription: Subscription<'_>,
    ) -> Outcome {
        if !is_valid(subscription, &self.limits) {
            return Outcome::Refused(Refusal::BadPattern);
        }
        let owned = Owned::from(subscription);
        self.unlist(session, &owned);
        let owner = self.session(session);
        if owner.subscriptions.remove(&owned) {
            owner.subscribed.remove(&owned);
            self.forget_subscription(&owned);
        }
        Outcome::Done
    }

    fn has_room_for(&mut self, session: SessionId, owned: &Owned) -> bool {
        let limits = &self.limits;
        let (count_max, bytes_max) = (limits.subscriptions_max, limits.subscription_bytes_max);
        let in_all = (limits.subscriptions_total_max, limits.subscription_bytes_total_max);
        let all = self.subscriptions.volume;
        self.session(session).subscribed.has_room_for(owned, count_max, bytes_max)
            && all.has_room_for(owned, in_all.0, in_all.1)
    }

    /// A subscription of some session has ended.
    pub(crate) fn forget_subscription(&mut self, owned: &Owned) {
        *self.tally.subscriptions(owned) -= 1;
        self.subscriptions.volume.remove(owned);
    }

    /// Whether a session is told anything. One without a connection is not: nobody would hear it, and a member of its
    /// queue group that can be told must not miss its turn. Its subscriptions wait until somebody attaches.
    pub(crate) fn listens(&self, session: SessionId) -> bool {
        let is_detached =
            || self.sessions.get(&session).is_some_and(|owner| owner.detached.is_some());
        !self.limits.follows(2) || !is_detached()
    }

    /// Enters all that a session subscribed to where it is looked for.
    pub(crate) fn list_all(&mut self, session: SessionId) {
        let subscriptions = core::mem::take(&mut self.session(session).subscriptions);
        for subscription in &subscriptions {
            self.list(session, subscription);
        }
        self.session(session).subscriptions = subscriptions;
    }

    /// Takes all that a session subscribed to from where it is looked for. The session still owns it.
    pub(crate) fn unlist_all(&mut self, session: SessionId) {
        let subscriptions = core::mem::take(&mut self.session(session).subscriptions);
        for subscription in &subscriptions {
            match subscription {
                // Whoever leads stays an observer of its own election.
                Owned::Leaders { key } => self.observers.ignore(key, session),
                Owned::Signals { .. } | Owned::Changes { .. } => self.unlist(session, subscription),
            }
        }
        self.session(session).subscriptions = subscriptions;
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
        let patterns = self.subscriptions.signals.find(channel, self.limits.separators());
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
                    if bug(Bug::LocalDecides)
                        && self.tally.commands[dflockd_api::CommandKind::Signal as usize] % 2 == 1
                    {
                        members.pick();
                    }
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
            Owned::Changes { pattern } => match self.subscriptions.shared_for(pattern) {
                Some(watches) => watches.write(&mut |index| {
                    if index.insert(pattern, session) {
                        self.shared.add_wild_watch();
                    }
                }),
                None => {
                    self.subscriptions.watches.insert(pattern, session);
                }
            },
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
            Owned::Changes { pattern } => match self.subscriptions.shared_for(pattern) {
                Some(watches) => watches.write(&mut |index| {
                    if index.remove(pattern, session) {
                        self.shared.remove_wild_watch();
                    }
                }),
                None => {
                    self.subscriptions.watches.remove(pattern, session);
                }
            },
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
        let after = Revision(from.0.saturating_sub(u64::from(!bug(Bug::ReplayShort))));
        let separators = self.limits.separators();
        for change in self.changes(pattern, separators, after, self.revision(), usize::MAX)? {
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
