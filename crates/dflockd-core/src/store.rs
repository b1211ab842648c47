//! The store: all state, and `apply`, the only way to change it.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::ops::{Index, IndexMut};

use dflockd_api::{
    Bytes, Caller, Change, Command, Event, LostReason, Outcome, Push, Query, RequestId, Revision,
    SessionId, Timestamp, command,
};
use foldhash::fast::FixedState;
use hashbrown::HashMap;

use crate::barrier::Barrier;
use crate::bugs::{Bug, bug};
use crate::client::{Client, Referenced};
use crate::counter::Counter;
use crate::deadline::{Deadlines, Due, Timer};
use crate::effect::Effect;
use crate::election::Observers;
use crate::kv::KvEntry;
use crate::limits::Limits;
use crate::list::List;
use crate::lock::{EndOfHold, Locks};
use crate::pattern::{self, Separators};
use crate::session::{EndOfSession, Session, Usage};
use crate::shared::Shared;
use crate::subscription::Subscriptions;
use crate::tally::{QueueLengths, Tally};

/// All state of a server, or of one shard of it.
pub struct Store {
    pub(crate) limits: Limits,
    pub(crate) shared: Arc<Shared>,
    /// Seeds the hash maps, so that nobody can choose keys that collide.
    pub(crate) seed: u64,
    pub(crate) now: Timestamp,
    /// Until then nothing is granted.
    pub(crate) grants_open: bool,
    pub(crate) locks: Locks,
    pub(crate) counters: BTreeMap<Bytes, Counter>,
    pub(crate) kv: BTreeMap<Bytes, KvEntry>,
    pub(crate) lists: BTreeMap<Bytes, List>,
    pub(crate) barriers: BTreeMap<Bytes, Barrier>,
    /// Zero counters, and with `kv_idle_gc` the KV entries without TTL, by their last change.
    pub(crate) idle_values: IdleValues,
    /// Where a new session finds what it has in the other stores of the server, if there are some.
    pub(crate) usages: Option<Usages>,
    /// Each in a box of its own: a table with room to grow should not hold them by value.
    pub(crate) sessions: HashMap<SessionId, Box<Session>, FixedState>,
    /// The keys of `sessions`, for those who ask for a range of them: the end of one node of a cluster must not look at
    /// the sessions of the others.
    pub(crate) session_order: BTreeSet<SessionId>,
    /// Who is behind the sessions that have said it, and behind orphans.
    pub(crate) clients: HashMap<SessionId, Client, FixedState>,
    pub(crate) referenced: Referenced,
    pub(crate) subscriptions: Subscriptions,
    pub(crate) observers: Observers,
    pub(crate) deadlines: Deadlines,
    /// The most recent changes, oldest first.
    pub(crate) changes: VecDeque<Change>,
    /// Changes up to this one may be missing there.
    pub(crate) forgotten: Revision,
    /// Only counts.
    pub(crate) tally: Tally,
    pub(crate) queue_lengths: QueueLengths,
}

/// Finds what a session has in all stores of a server.
pub type Usages = Arc<dyn Fn(SessionId) -> Option<Arc<Usage>> + Send + Sync>;

/// What makes room for others when it is idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Idle {
    /// Locks that nobody holds or waits for.
    Locks,
    /// Counters at zero.
    Counters,
}

/// A kind of value that is dropped when idle.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleValue {
    Counter,
    Kv,
}

/// By kind, those that are idle for longest first.
#[derive(Default)]
pub(crate) struct IdleValues([BTreeSet<(Timestamp, Bytes)>; 2]);

impl Index<IdleValue> for IdleValues {
    type Output = BTreeSet<(Timestamp, Bytes)>;

    fn index(&self, kind: IdleValue) -> &Self::Output {
        &self.0[kind as usize]
    }
}

impl IndexMut<IdleValue> for IdleValues {
    fn index_mut(&mut self, kind: IdleValue) -> &mut Self::Output {
        &mut self.0[kind as usize]
    }
}

impl Store {
    /// An empty store. Nothing is granted before `grants_from`.
    #[must_use]
    pub fn new(limits: Limits, seed: u64, shared: Arc<Shared>, grants_from: Timestamp) -> Self {
        let mut deadlines = Deadlines::new(limits.failover_grace);
        let forgotten = shared.revision();
        if grants_from > Timestamp(0) {
            deadlines.add_timer(grants_from, Timer::GrantsOpen);
        }
        Self {
            shared,
            seed,
            now: Timestamp(0),
            grants_open: grants_from == Timestamp(0),
            locks: Locks::new(seed),
            counters: BTreeMap::new(),
            kv: BTreeMap::new(),
            lists: BTreeMap::new(),
            barriers: BTreeMap::new(),
            idle_values: IdleValues::default(),
            usages: None,
            sessions: HashMap::with_hasher(FixedState::with_seed(seed)),
            session_order: BTreeSet::new(),
            clients: HashMap::with_hasher(FixedState::with_seed(seed)),
            referenced: Referenced::default(),
            subscriptions: Subscriptions::new(),
            observers: Observers::new(),
            deadlines,
            changes: VecDeque::new(),
            forgotten,
            tally: Tally::default(),
            queue_lengths: QueueLengths::default(),
            limits,
        }
    }

    /// Moves time to `now`, then executes `command`.
    ///
    /// # Panics
    ///
    /// If `now` is before an earlier stamp, or if an invariant of the state is broken: a lock service that
    /// stops is better than one with two holders.
    pub fn apply(
        &mut self,
        caller: Caller,
        command: Command<'_>,
        now: Timestamp,
        effects: &mut Vec<Effect>,
    ) {
        assert!(self.now <= now, "stamp {now:?} is before {:?}", self.now);
        self.now = now;

        // Expiry goes first, so that no command ever sees a lease that has already ended.
        self.expire_due(effects);
        self.drop_idle();
        self.promote_stalled(effects);

        if caller.keep && self.is_retry(caller, &command, effects) {
            return;
        }
        self.tally.command(&command);
        let begun = effects.len();
        let outcome = self.execute(caller, command, effects);
        if let Some((outcome, keep)) = outcome {
            self.tally.outcome(&outcome);
            if keep && caller.keep {
                self.keep_result(caller.session, caller.request, &outcome);
            }
            let Caller { session, request, .. } = caller;
            // A client hears the answer first, and then the pushes that its command caused.
            let is_push = |effect: &Effect| matches!(effect, Effect::Push { session: to, .. } if *to == session);
            let push = effects[begun..].iter().position(is_push);
            let at = push.map_or(effects.len(), |push| begun + push);
            effects.insert(at, Effect::Reply { session, request, outcome });
        }
    }

    /// Answers a read as of `now`.
    #[must_use]
    pub fn read(&self, query: Query<'_>, now: Timestamp) -> Outcome {
        match query {
            Query::Counter { key } => {
                Outcome::Number(self.counters.get(key).map_or(0, |counter| counter.value))
            }
            Query::Kv { key } => match self.kv_alive(key, now) {
                Some(entry) => Outcome::Value(entry.value.clone()),
                None => Outcome::Empty,
            },
            Query::Entry { key } => match self.kv_alive(key, now) {
                Some(KvEntry { value, revision, .. }) => {
                    Outcome::Entry { value: value.clone(), revision: *revision }
                }
                None => Outcome::Empty,
            },
            Query::Length { key } => Outcome::Number(self.list_length(key)),
            Query::Range { key, start, stop } => self.list_range(key, start, stop),
        }
    }

    /// When to send [`Command::Tick`] if nothing else comes first.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        earlier(self.deadlines.next(), self.next_idle_drop())
    }

    /// The revision of the last change.
    #[must_use]
    pub fn revision(&self) -> Revision {
        self.shared.revision()
    }

    /// The kept changes of keys that match, of the revisions after `after` up to `upto`, at most `max` of them.
    ///
    /// # Errors
    ///
    /// If some of them are no longer kept: the last revision that is gone.
    pub fn changes(
        &self,
        pattern: &[u8],
        separators: Separators,
        after: Revision,
        upto: Revision,
        max: usize,
    ) -> Result<Vec<Change>, Revision> {
        if after < self.forgotten {
            return Err(self.forgotten);
        }
        let first = self.changes.partition_point(|change| change.revision <= after);
        let changes = self.changes.range(first..).take_while(|change| change.revision <= upto);
        let matching = changes.filter(|change| pattern::matches(pattern, &change.key, separators));
        Ok(matching.take(max).cloned().collect())
    }

    /// Changes up to this revision may not be kept any more.
    #[must_use]
    pub fn forgotten(&self) -> Revision {
        self.forgotten
    }

    /// Several stores are one server: sessions have their bounds in all of them together.
    pub fn share_usages(&mut self, usages: Usages) {
        self.usages = Some(usages);
    }

    /// The limits the store decides by.
    #[must_use]
    pub fn limits(&self) -> &Limits {
        &self.limits
    }

    /// Decides by other limits from now on. What they already exceed stays; the namespaces stay what they are.
    pub fn set_limits(&mut self, limits: Limits) {
        let shared_namespace = self.limits.shared_namespace;
        let followed = self.limits.follows(2);
        self.deadlines.grace = limits.failover_grace;
        self.limits = Limits { shared_namespace, ..limits };
        if followed != self.limits.follows(2) {
            self.review_detached();
        }
    }

    /// The rules about sessions without a connection have changed: see [`Store::listens`].
    fn review_detached(&mut self) {
        for id in self.session_ids(SessionId(0)..=SessionId(u64::MAX)) {
            if self.session(id).detached.is_none() {
                continue;
            }
            self.unlist_all(id);
            if self.listens(id) {
                self.list_all(id);
            }
        }
    }

    /// Executes the command itself. The answer comes with whether a retry should get it again; no answer means
    /// that it comes later or never.
    fn execute(
        &mut self,
        caller: Caller,
        command: Command<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<(Outcome, bool)> {
        let outcome = match command {
            Command::Tick => return None,
            Command::NewTerm => {
                let grace_until = self.now + self.deadlines.grace;
                if !bug(Bug::NoGrace) {
                    self.deadlines.grace_until = self.deadlines.grace_until.max(grace_until);
                }
                return None;
            }
            Command::Acquire(command) => self.acquire(caller, command, effects)?,
            Command::Enqueue(command) => self.enqueue(caller.session, command, effects),
            Command::Wait(command) => self.wait(caller, command, effects)?,
            Command::Release(command) => self.release(command, effects),
            Command::Renew(command) => self.renew(command),
            Command::RenewSession(command::RenewSession { lease }) => {
                return Some((self.renew_session(caller.session, lease), false));
            }
            Command::ForceRelease(command) => self.force_release(command, effects),
            Command::Add(command) => self.counter_add(command, effects),
            Command::CounterSet(command) => self.counter_set(command, effects),
            Command::KvSet(command) => self.kv_set(command, effects),
            Command::KvDelete(command) => self.kv_delete(command, effects),
            Command::KvCompareAndSet(command) => self.kv_compare_and_set(command, effects),
            Command::Push(command) => self.list_push(command, effects),
            Command::Pop(command) => self.list_pop(caller, command, effects)?,
            Command::BarrierWait(command) => self.barrier_wait(caller, command, effects)?,
            Command::Signal(command::Signal { channel, payload }) => {
                self.signal(channel, payload, effects)
            }
            Command::Subscribe(command::Subscribe { to }) => {
                self.subscribe(caller.session, to, effects)
            }
            Command::Unsubscribe(command::Unsubscribe { from }) => {
                self.unsubscribe(caller.session, from)
            }
            Command::Cancel(command::Cancel { request }) => {
                self.cancel(caller.session, request, effects);
                return Some((Outcome::Done, false));
            }
            Command::Acknowledge(command::Acknowledge { up_to }) => {
                self.acknowledge(caller.session, up_to);
                return Some((Outcome::Done, false));
            }
            Command::Undo(outcome) => {
                self.undo(outcome, effects);
                return None;
            }
            Command::Detach { until } => {
                self.detach(caller.session, until);
                return None;
            }
            Command::Attach => {
                self.attach(caller.session);
                return None;
            }
            Command::Identify { name, reference } => {
                self.identify(caller.session, name, reference);
                return None;
            }
            Command::Orphan { ttl, cut } => {
                let until = self.now + ttl;
                if cut {
                    self.shorten_leases(caller.session, until);
                }
                self.end_session(caller.session, EndOfSession::Orphaned { until }, effects);
                return None;
            }
            Command::EndSession { release, forced } => {
                let reason = forced.then_some(LostReason::Session);
                let end = if release { EndOfSession::Released(reason) } else { EndOfSession::Left };
                self.end_session(caller.session, end, effects);
                return None;
            }
        };
        Some((outcome, true))
    }

    /// Ends every lease and wait that is over, in the order of time.
    fn expire_due(&mut self, effects: &mut Vec<Effect>) {
        while let Some(due) = self.deadlines.pop_due(self.now) {
            match due {
                Due::Lease(claim) => self.end_hold(claim, EndOfHold::Expired, effects),
                Due::Timer(at, timer) => self.timer_due(at, timer, effects),
            }
        }
    }

    fn timer_due(&mut self, at: Timestamp, timer: Timer, effects: &mut Vec<Effect>) {
        match timer {
            Timer::GrantsOpen => {
                self.grants_open = true;
                self.promote_stalled(effects);
            }
            Timer::Claim(claim) => self.wait_over(claim, effects),
            Timer::Pop { session, request } => {
                self.pop_over(session, request, Outcome::Empty, effects);
            }
            Timer::Barrier { session, request } => self.barrier_over(session, request, effects),
            Timer::Kv(key) => self.kv_expire(&key),
            Timer::Session(session) => self.detached_due(session, at, effects),
        }
    }

    /// When an idle resource last used at `since` is dropped.
    pub(crate) fn idle_end(&self, since: Timestamp) -> Timestamp {
        let end = (since + self.limits.idle_max).0;
        let interval = self.limits.gc_interval.0.max(1);
        Timestamp(end.div_ceil(interval).saturating_mul(interval))
    }

    fn next_idle_drop(&self) -> Option<Timestamp> {
        let lock = self.locks.longest_idle();
        let counter = self.longest_idle(IdleValue::Counter);
        let kv = self.longest_idle(IdleValue::Kv);
        let since = earlier(lock, earlier(counter, kv))?;
        Some(self.idle_end(since))
    }

    /// Since when the value of a kind is idle that is so for longest.
    fn longest_idle(&self, kind: IdleValue) -> Option<Timestamp> {
        self.idle_values[kind].first().map(|(since, _)| *since)
    }

    fn drop_longest_idle(&mut self, kind: IdleValue) {
        let Some((_, key)) = self.idle_values[kind].pop_first() else { return };
        match kind {
            IdleValue::Counter => drop(self.counters.remove(&key)),
            IdleValue::Kv => drop(self.kv.remove(&key)),
        }
        self.shared.remove_key();
    }

    /// Counts one more value, if there is room or idle ones can make some: counters at zero, which say no more than if
    /// they were not there.
    pub(crate) fn add_key(&mut self) -> bool {
        while !self.shared.add_key(self.limits.keys_max) {
            if !self.limits.follows(2) || self.longest_idle(IdleValue::Counter).is_none() {
                return false;
            }
            self.drop_longest_idle(IdleValue::Counter);
        }
        true
    }

    /// What would have to make room for a command, because it makes a new key and there are as many as may be.
    #[must_use]
    pub fn lacks_room(&self, command: &Command<'_>) -> Option<Idle> {
        let Limits { locks_max, keys_max, .. } = self.limits;
        let is_new = match *command {
            Command::Acquire(command::Acquire { key, mode, .. })
            | Command::Enqueue(command::Enqueue { key, mode, .. }) => {
                let is_full = self.shared.locks() >= locks_max;
                return (is_full && !self.has_lock(mode.space(), key)).then_some(Idle::Locks);
            }
            _ if keys_max == 0 || self.shared.keys() < keys_max => false,
            Command::Add(command::Add { key, .. })
            | Command::CounterSet(command::CounterSet { key, .. }) => {
                !self.counters.contains_key(key)
            }
            Command::KvSet(command::KvSet { key, .. })
            | Command::KvCompareAndSet(command::KvCompareAndSet { key, .. }) => {
                !self.kv.contains_key(key)
            }
            Command::Push(command::Push { key, .. })
            | Command::Pop(command::Pop { key, wait: Some(_), .. }) => {
                !self.lists.contains_key(key)
            }
            Command::BarrierWait(command::BarrierWait { key, .. }) => {
                !self.barriers.contains_key(key)
            }
            Command::Tick
            | Command::NewTerm
            | Command::Wait(_)
            | Command::Release(_)
            | Command::Renew(_)
            | Command::RenewSession(_)
            | Command::ForceRelease(_)
            | Command::KvDelete(_)
            | Command::Pop(command::Pop { wait: None, .. })
            | Command::Signal(_)
            | Command::Subscribe(_)
            | Command::Unsubscribe(_)
            | Command::Cancel(_)
            | Command::Acknowledge(_)
            | Command::Undo(_)
            | Command::Detach { .. }
            | Command::Attach
            | Command::Identify { .. }
            | Command::Orphan { .. }
            | Command::EndSession { .. } => false,
        };
        is_new.then_some(Idle::Counters)
    }

    /// Since when the locks, or the counters, are idle that would be dropped first to make room for others.
    #[must_use]
    pub fn idlest(&self, what: Idle) -> Option<Timestamp> {
        match what {
            Idle::Locks => self.locks.longest_idle(),
            Idle::Counters => self.longest_idle(IdleValue::Counter),
        }
    }

    /// Drops what [`Store::idlest`] tells of. A store makes room for itself; this is for another store of the same
    /// server, which counts with it. Nobody can tell it from what time does.
    pub fn drop_idlest(&mut self, what: Idle) {
        match what {
            Idle::Locks => {
                self.drop_idlest_locks();
            }
            Idle::Counters => self.drop_longest_idle(IdleValue::Counter),
        }
    }

    fn drop_idle(&mut self) {
        while let Some(since) = self.locks.longest_idle()
            && self.idle_end(since) <= self.now
        {
            self.locks.drop_longest_idle();
            self.shared.remove_lock();
        }
        for kind in [IdleValue::Counter, IdleValue::Kv] {
            while let Some(since) = self.longest_idle(kind)
                && self.idle_end(since) <= self.now
            {
                self.drop_longest_idle(kind);
            }
        }
    }

    /// Records a change of `key` and tells its watchers.
    pub(crate) fn change(
        &mut self,
        event: Event,
        key: &Bytes,
        effects: &mut Vec<Effect>,
    ) -> Revision {
        let revision = self.shared.next_revision();
        if self.limits.events_max == 0 {
            self.forgotten = revision;
            if self.subscriptions.nobody_watches(&self.shared) {
                return revision;
            }
        }
        let change = Change { revision, event, key: key.clone() };
        for session in self.subscriptions.watchers(key, self.limits.separators(), &self.shared) {
            if bug(Bug::WatchGap) && revision.0.is_multiple_of(8) {
                continue;
            }
            let push = Push::Change(change.clone());
            effects.push(Effect::Push { session, push, group: None });
        }
        if self.limits.events_max > 0 {
            if self.changes.len() as u64 == self.limits.events_max
                && let Some(oldest) = self.changes.pop_front()
                && !bug(Bug::WindowForgotten)
            {
                self.forgotten = oldest.revision;
            }
            self.changes.push_back(change);
        }
        revision
    }

    /// Answers a request that was blocked.
    pub(crate) fn answer(
        &mut self,
        session: SessionId,
        request: RequestId,
        outcome: Outcome,
        effects: &mut Vec<Effect>,
    ) {
        self.keep_result(session, request, &outcome);
        effects.push(Effect::Reply { session, request, outcome });
    }

    pub(crate) fn session(&mut self, id: SessionId) -> &mut Session {
        let (usages, order) = (&self.usages, &mut self.session_order);
        self.sessions.entry(id).or_insert_with(|| {
            order.insert(id);
            let usage = usages.as_ref().and_then(|usages| usages(id));
            Box::new(Session::new(usage))
        })
    }
}

/// The earlier of two instants, where there may be none.
fn earlier(a: Option<Timestamp>, b: Option<Timestamp>) -> Option<Timestamp> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
