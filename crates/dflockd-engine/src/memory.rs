//! The engine that keeps everything in memory: key -> shard, each a store under its own mutex.
//!
//! The caller's thread applies: there is no queue and no wake-up between a request and its answer. Shard 64
//! is the one for what belongs to no single key: signals, and the record of each session's subscriptions. A
//! watch of one key lives in that key's shard as well; a watch with wildcards is beside the shards, once for all.
//!
//! # Shards, and what spans them
//!
//! A key's shard is a hash of the key modulo 64, seeded anew by each process, so that nobody can choose keys that meet.
//! A thread never holds two shards. What spans them:
//!
//! - `Shared` of the core: atomics for fences, revisions, and the counts of locks and keys. The caps are exact because
//!   a place is taken before the key is made.
//! - The common shard has signals because the turns of a queue group, and one copy per connection over several
//!   patterns, can be exact only in one place; it has the record of subscriptions so that their cap is exact.
//! - A watch with wildcards concerns the keys of all shards and exists once (`SharedWatches`, under a read-write lock):
//!   the common shard enters and removes it, and a shard that changes a key looks there, both under their own lock. A
//!   counter in `Shared` says whether there are any, so a change costs nothing while there are none. A client that was
//!   told that its watch has begun comes after that count, so no later change is missed; `unwatch` goes through all
//!   shards before it is answered, so no change comes late.
//! - `stats` and `ls` go through the shards one by one; they are no snapshot of one instant.
//!
//! Each shard has a task that sleeps until the store's `next_deadline`, and `--lease-sweep-interval` at most, then
//! sends a `Tick`. Nothing scans all locks.
//!
//! # Sessions
//!
//! Each connection opens a session; its id is the connection's number. A plain session ends with its connection. A
//! *kept* one has a secret of 128 bits: when its connection ends it is *detached*, and the store ends it when its time
//! and its last lease are over, unless somebody attaches first. Attaching raises the session's *epoch*. The epoch is
//! checked under the shard's lock, and attaching visits every shard after raising it: from then on no request of the
//! older connection can take effect. A session remembers which shards know it, one bit each; ending it visits only
//! those, one at a time.

use std::collections::{HashSet, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use dflockd_core::{
    Bytes, Caller, Change, Command, Contention, Effect, Idle, KEPT_FOR, KeyView, Limits, Listed,
    LockPage, LockView, Outcome, Push, Query, Refusal, RequestId, Revision, Separators, SessionId,
    SessionView, Shared, SharedWatches, Span, Store, Subscription, Survey, Tally, Timestamp,
    Usages, WatchIndex, command, is_literal,
};
use foldhash::fast::FixedState;
use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::sync::{Notify, watch};

use crate::clock::{Clock, unix_nanos};
use crate::engine::{Engine, NAMES_MAX, SessionInfo, tell_growth};
use crate::fences::Fences;
use crate::router::{
    Api, Attachment, Mailbox, PendingFlushes, Pushed, Router, Session, SessionSecret,
};
use dflockd_replica::types::AutoRelease;

const KEY_SHARDS: usize = 64;
/// The shard of signals and of subscription records.
const COMMON: usize = KEY_SHARDS;

/// How to run an engine.
pub struct Options {
    /// What the stores decide by.
    pub limits: Limits,
    /// When what a session holds is released because its connection ended.
    pub auto_release: AutoRelease,
    /// Nothing is granted for this long.
    pub grant_delay: Span,
    /// Deadlines are looked at no later than this, whatever the timers say.
    pub sweep_interval: Duration,
    /// The counters that all shards draw from; [`Fences`] has set where they start.
    pub shared: Arc<Shared>,
    /// Where fences come from.
    pub fences: Fences,
    /// Where time comes from.
    pub clock: Clock,
}

/// What became of a command.
#[derive(Debug, PartialEq, Eq)]
pub enum Submitted {
    /// The command is answered.
    Done(Outcome),
    /// The answer comes through the session's mailbox.
    Later(Place),
    /// The session was attached elsewhere or has ended: nothing was done.
    Gone,
}

/// Where a blocked request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(usize);

impl Place {
    /// Where there is only one.
    pub(crate) const ANY: Self = Self(0);
    /// For [`Memory::undo`]: nobody knows for which key it was asked.
    pub const UNKNOWN: Self = Self(usize::MAX);
}

/// State in memory, spread over shards.
pub struct Memory {
    shards: Vec<Shard>,
    watches: Arc<WildWatches>,
    router: Arc<Router>,
    clock: Clock,
    fences: Fences,
    shared: Arc<Shared>,
    /// The limits of all shards together.
    limits: Limits,
    auto_release: AutoRelease,
    sweep_interval: Duration,
    /// The last change, for those who follow.
    growth: watch::Sender<Revision>,
}

/// The watches with wildcards of all shards. The common shard adds and removes them, and every shard that changes a key
/// looks here, each under its own lock; nothing is locked while this is.
#[derive(Default)]
struct WildWatches(RwLock<WatchIndex>);

impl SharedWatches for WildWatches {
    fn read(&self, look: &mut dyn FnMut(&WatchIndex)) {
        look(&self.0.read());
    }

    fn write(&self, change: &mut dyn FnMut(&mut WatchIndex)) {
        change(&mut self.0.write());
    }
}

struct Shard {
    state: Mutex<ShardState>,
    /// Notified when the next deadline of the store has come closer.
    earlier: Notify,
}

struct ShardState {
    store: Store,
    /// When the timer will look next.
    armed: Timestamp,
    /// The effects of a command; empty in between, kept for its memory.
    effects: Vec<Effect>,
}

/// What a command has caused besides effects for others, to be done when its shard is unlocked.
#[derive(Default)]
struct Aftermath {
    outcome: Option<Outcome>,
    undo: Vec<Outcome>,
    ended: Vec<SessionId>,
    /// Sessions with more results than may be kept for them.
    laden: Vec<Arc<Session>>,
}

impl Memory {
    /// An engine without anything in it.
    #[must_use]
    pub fn new(options: Options) -> Self {
        let Options { limits, shared, clock, .. } = options;
        if limits.events_max > 0 {
            // So that a place in the history of an earlier process is behind this one's, and never looks like one of
            // its own. Microseconds still are exact numbers in JavaScript.
            shared.set_revision(Revision(unix_nanos() / 1000));
        }
        let start = clock.now();
        let grants_from = if options.grant_delay == Span::ZERO {
            Timestamp(0)
        } else {
            start + options.grant_delay
        };
        let router = Arc::new(Router::new());
        let usages: Usages = {
            let router = Arc::clone(&router);
            Arc::new(move |id| router.get(id).map(|session| Arc::clone(&session.usage)))
        };
        let watches = Arc::<WildWatches>::default();
        let shard = |index| {
            let mut limits = limits.clone();
            if index != COMMON {
                // Counted once, in the common shard.
                limits.subscriptions_max = 0;
                limits.subscription_bytes_max = 0;
                limits.subscriptions_total_max = 0;
                limits.subscription_bytes_total_max = 0;
            }
            let mut store = Store::new(limits, rand::random(), Arc::clone(&shared), grants_from);
            store.share_usages(Arc::clone(&usages));
            store.share_watches(Arc::<WildWatches>::clone(&watches));
            let state = ShardState { store, armed: Timestamp::NEVER, effects: Vec::new() };
            Shard { state: Mutex::new(state), earlier: Notify::new() }
        };
        Self {
            shards: (0..=COMMON).map(shard).collect(),
            watches,
            router,
            clock,
            fences: options.fences,
            limits,
            shared,
            auto_release: options.auto_release,
            sweep_interval: options.sweep_interval,
            growth: watch::Sender::new(Revision(0)),
        }
    }

    /// Where the engine takes its time from.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// Executes a command for a session. Mailboxes of others that have something to do are added to `flushes`.
    pub fn submit(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        command: Command<'_>,
        flushes: &mut PendingFlushes,
    ) -> Submitted {
        let caller = Caller { session: by.id(), request, keep };
        let place = match (command.key(), command) {
            (Some(key), _) => shard_of(key),
            (None, Command::Signal(_)) => COMMON,
            (
                None,
                Command::Subscribe(command::Subscribe { to: subscription })
                | Command::Unsubscribe(command::Unsubscribe { from: subscription }),
            ) => return self.subscribe(by, caller, &command, subscription, flushes),
            (None, Command::RenewSession(_)) => {
                // Only holds that were granted with this very lease follow the session: it is on record.
                let mut renewed = 0;
                for shard in by.session.shards() {
                    match self.apply(shard, Some(by), caller, command, flushes) {
                        None => return Submitted::Gone,
                        Some(Some(Outcome::Number(number))) => renewed += number,
                        Some(_) => {}
                    }
                }
                return Submitted::Done(Outcome::Number(renewed));
            }
            (None, Command::Acknowledge(_)) => {
                for shard in by.session.shards() {
                    self.apply(shard, Some(by), caller, command, flushes);
                }
                return Submitted::Done(Outcome::Done);
            }
            (None, _) => unreachable!("the engine sends {command:?} itself"),
        };
        match self.apply(place, Some(by), caller, command, flushes) {
            None => Submitted::Gone,
            Some(Some(outcome)) => Submitted::Done(outcome),
            Some(None) => Submitted::Later(Place(place)),
        }
    }

    /// Withdraws a blocked request. Its answer comes through the mailbox, unless it was answered before. A connection
    /// may do this for its own requests even after the session was attached elsewhere.
    pub fn cancel(
        &self,
        by: &Attachment,
        request: RequestId,
        place: Place,
        flushes: &mut PendingFlushes,
    ) {
        // A number no request has: the cancelled one must be answered through the mailbox.
        let caller = Caller { session: by.id(), request: RequestId(0), keep: false };
        self.apply(place.0, None, caller, Command::Cancel(command::Cancel { request }), flushes);
    }

    /// Gives back what could not be told to the one who asked for it.
    pub fn undo(&self, place: Place, outcome: &Outcome, flushes: &mut PendingFlushes) {
        let shards = if place == Place::UNKNOWN { 0..KEY_SHARDS } else { place.0..place.0 + 1 };
        for shard in shards {
            self.apply(shard, None, NOBODY, Command::Undo(outcome), flushes);
        }
    }

    /// Where requests for a key are executed.
    #[must_use]
    pub fn place(&self, key: &[u8]) -> Place {
        Place(shard_of(key))
    }

    /// Answers a read.
    pub fn query(&self, query: Query<'_>) -> Outcome {
        let (Query::Counter { key }
        | Query::Kv { key }
        | Query::Entry { key }
        | Query::Length { key }
        | Query::Range { key, .. }) = query;
        let state = self.shards[shard_of(key)].state.lock();
        state.store.read(query, self.clock.now())
    }

    /// The revision of the last change.
    pub fn revision(&self) -> Revision {
        self.shared.revision()
    }

    /// See [`Engine::follow`].
    pub(crate) fn follow(&self) -> watch::Receiver<Revision> {
        let growth = self.growth.subscribe();
        // A command that is applied in a shard from now on finds somebody who follows. What was applied before can be
        // seen by whoever looks at the revision after this.
        for shard in &self.shards {
            drop(shard.state.lock());
        }
        growth
    }

    /// The kept changes of keys that match, after a revision, in order, and the revision up to which there are no
    /// others.
    ///
    /// # Errors
    ///
    /// If some of them are no longer kept: the last revision that is gone.
    pub fn changes(
        &self,
        pattern: &[u8],
        after: Revision,
        max: usize,
    ) -> Result<(Vec<Change>, Revision), Revision> {
        // A revision is drawn under the lock of the shard that keeps the change. So whoever takes the lock after
        // seeing a revision finds its change there.
        let upto = self.revision();
        if after > upto {
            return Err(upto);
        }
        let shards = if is_literal(pattern) {
            let shard = shard_of(pattern);
            shard..shard + 1
        } else {
            0..KEY_SHARDS
        };
        let mut changes = Vec::new();
        let mut gone = after;
        for shard in shards {
            let state = self.shards[shard].state.lock();
            match state.store.changes(pattern, Separators::NEWEST, after, upto, max) {
                Ok(kept) => changes.extend(kept),
                Err(forgotten) => gone = gone.max(forgotten),
            }
        }
        if gone > after {
            return Err(gone);
        }
        changes.sort_unstable_by_key(|change| change.revision);
        changes.truncate(max);
        let upto = if changes.len() < max { upto } else { changes[max - 1].revision };
        Ok((changes, upto))
    }

    /// The sessions that hold or wait for something.
    pub fn busy_sessions(&self) -> HashSet<SessionId> {
        let mut busy = HashSet::new();
        for shard in &self.shards {
            busy.extend(shard.state.lock().store.busy_sessions());
        }
        busy
    }

    /// What has happened and how much there is; no shard is locked for longer than it takes to copy some numbers.
    pub fn tally(&self) -> Tally {
        let mut all = Tally::default();
        for (index, shard) in self.shards.iter().enumerate() {
            let mut part = shard.state.lock().store.tally();
            if index != COMMON {
                // The common shard knows of all of them.
                part.forget_subscriptions();
            }
            all.add(&part);
        }
        all
    }

    /// How many sessions there are that were opened through an API.
    pub fn session_count(&self, api: Api) -> u64 {
        self.router.count(api)
    }

    /// The last `max` changes of keys that match, of those that all shards still have, oldest first.
    pub fn recent_changes(&self, pattern: &[u8], max: usize) -> Vec<Change> {
        let upto = self.revision();
        let mut changes = Vec::new();
        let mut gone = Revision(0);
        for shard in &self.shards[..KEY_SHARDS] {
            let state = shard.state.lock();
            let forgotten = state.store.forgotten();
            gone = gone.max(forgotten);
            changes.extend(
                state
                    .store
                    .changes(pattern, Separators::NEWEST, forgotten, upto, usize::MAX)
                    .unwrap_or_default(),
            );
        }
        changes.retain(|change| change.revision > gone);
        changes.sort_unstable_by_key(|change| change.revision);
        changes.drain(..changes.len().saturating_sub(max));
        changes
    }

    /// Everything there is, shard by shard; no shard is locked for longer than its own part takes.
    pub fn survey(&self, each_max: usize) -> Survey {
        let mut all = Survey::default();
        for (index, shard) in self.shards.iter().enumerate() {
            let state = shard.state.lock();
            let part = state.store.survey(self.clock.now(), each_max, NAMES_MAX);
            drop(state);
            all.locks_total += part.locks_total;
            all.values_total += part.values_total;
            all.locks.extend(part.locks);
            all.counters.extend(part.counters);
            all.kv.extend(part.kv);
            all.lists.extend(part.lists);
            all.barriers.extend(part.barriers);
            all.locks.truncate(NAMES_MAX);
            all.counters.truncate(NAMES_MAX);
            all.kv.truncate(NAMES_MAX);
            all.lists.truncate(NAMES_MAX);
            all.barriers.truncate(NAMES_MAX);
            if index == COMMON {
                all.signal_channels = part.signal_channels;
                all.watch_channels = part.watch_channels;
            }
        }
        all.watch_channels.extend(self.watches.0.read().channels());
        all.watch_channels.sort_unstable_by(|a, b| a.pattern.cmp(&b.pattern));
        all
    }

    /// Everything a key is.
    pub fn inspect(&self, key: &[u8], each_max: usize) -> Vec<KeyView> {
        let state = self.shards[shard_of(key)].state.lock();
        state.store.inspect(key, self.clock.now(), each_max)
    }

    /// A page of keys in order that begin with one of these prefixes. A key that is several things is not split, so it
    /// can be a little longer.
    pub fn ls(&self, within: &[Vec<u8>], after: Option<&[u8]>, limit: usize) -> Vec<Listed> {
        let mut listed = Vec::new();
        for shard in &self.shards[..KEY_SHARDS] {
            let state = shard.state.lock();
            listed.extend(state.store.ls(within, after, limit, self.clock.now()));
            drop(state);
            // After each shard, or there would be a page of each at once.
            listed.sort_unstable();
            if let Some(last) = listed.get(limit.saturating_sub(1)).map(|last| last.key.clone()) {
                listed.retain(|listed| listed.key <= last);
            }
        }
        listed
    }

    /// A page of locks in order, and the key after which the next one begins.
    pub fn locks(&self, mut page: LockPage, each_max: usize) -> (Vec<LockView>, Option<Bytes>) {
        for shard in &self.shards[..KEY_SHARDS] {
            let state = shard.state.lock();
            state.store.page_locks(0..state.store.lock_slots(), &mut page);
        }
        let views = page.keys().flat_map(|key| {
            let state = self.shards[shard_of(key)].state.lock();
            state.store.view_locks(key, page.only(), self.clock.now(), each_max)
        });
        (views.collect(), page.next().cloned())
    }

    /// The locks with the longest queues.
    pub fn contention(&self, mut page: Contention) -> Contention {
        for shard in &self.shards[..KEY_SHARDS] {
            let state = shard.state.lock();
            let now = self.clock.now();
            state.store.page_contention(0..state.store.lock_slots(), now, &mut page);
        }
        page
    }

    /// The first sessions after `after`, in order, `limit` at most.
    pub fn sessions(&self, after: SessionId, limit: usize) -> Vec<SessionInfo> {
        let ids = self.router.ids(after, limit);
        let sessions: Vec<_> = ids.into_iter().filter_map(|id| self.router.get(id)).collect();
        let mut views = vec![SessionView::default(); sessions.len()];
        for (index, shard) in self.shards.iter().enumerate() {
            let touches = |session: &Session| session.shards().any(|shard| shard == index);
            let mut here = sessions.iter().zip(&mut views).filter(|(session, _)| touches(session));
            let Some(first) = here.next() else { continue };
            let state = shard.state.lock();
            for (session, view) in std::iter::once(first).chain(here) {
                let part = state.store.view_session(session.id());
                view.holds += part.holds;
                view.waits += part.waits;
                // The others only repeat what the common shard knows.
                if index == COMMON {
                    view.subscriptions = part.subscriptions;
                }
            }
        }
        let infos = sessions.iter().zip(views).map(|(session, view)| {
            let state = session.state.lock();
            let api = state.mailbox.as_ref().map(|mailbox| mailbox.api());
            SessionInfo { id: session.id(), label: Some(Arc::clone(&state.label)), api, view }
        });
        infos.collect()
    }

    /// Checks every shard.
    ///
    /// # Panics
    ///
    /// If one is broken.
    pub fn check_invariants(&self) {
        for shard in &self.shards {
            shard.state.lock().store.check_invariants();
        }
    }

    /// The name of a session for people, if it still exists.
    pub fn label(&self, id: SessionId) -> Option<Arc<str>> {
        self.router.label(id)
    }

    /// A new session whose answers go to `mailbox`.
    pub fn open(&self, mailbox: Arc<dyn Mailbox>, label: Arc<str>) -> Attachment {
        self.router.open(mailbox, label)
    }

    /// Lets the session outlive its connection; whoever knows the secret can attach to it. None if as many sessions as
    /// may be are kept.
    pub fn keep(&self, by: &Attachment) -> Option<SessionSecret> {
        let secret = SessionSecret(rand::random());
        self.router.keep(&by.session, secret, self.limits.sessions_max).then_some(secret)
    }

    /// Takes a kept session over, in place of `by`, which is a fresh one. The connection that had it is closed.
    pub fn attach(
        &self,
        by: &Attachment,
        secret: SessionSecret,
        flushes: &mut PendingFlushes,
    ) -> Option<Attachment> {
        let session = self.router.find_kept(secret)?;
        let (mailbox, label) = {
            let state = by.session.state.lock();
            (state.mailbox.clone()?, Arc::clone(&state.label))
        };
        let epoch = {
            let mut state = session.state.lock();
            // It may just have ended.
            state.secret?;
            let epoch = session.epoch.fetch_add(1, Ordering::SeqCst) + 1;
            state.label = label;
            if let Some(old) = state.mailbox.replace(mailbox) {
                old.hand_over();
                flushes.add(&old);
            }
            epoch
        };
        let mut attachment = Attachment { session, epoch, last_request: RequestId(0) };
        // Visiting every shard makes sure that no request of the older connection is under way in one.
        let caller = Caller { session: attachment.id(), request: RequestId(0), keep: false };
        let known: Vec<usize> = attachment.session.shards().collect();
        for shard in 0..=COMMON {
            let command = if known.contains(&shard) { Command::Attach } else { Command::Tick };
            self.apply(shard, Some(&attachment), caller, command, flushes);
        }
        attachment.last_request = self.last_request(&attachment.session);
        self.router.remove(&by.session);
        Some(attachment)
    }

    /// The highest number that a repeatable request of a session had; none if there is no such session.
    pub fn last_request_of(&self, id: SessionId) -> Option<RequestId> {
        self.router.get(id).map(|session| self.last_request(&session))
    }

    fn last_request(&self, session: &Session) -> RequestId {
        let last = |shard: usize| self.shards[shard].state.lock().store.last_request(session.id());
        session.shards().map(last).max().unwrap_or(RequestId(0))
    }

    /// The connection of a session has ended.
    pub fn close(&self, by: &Attachment, orderly: bool, flushes: &mut PendingFlushes) {
        let session = &by.session;
        let kept = {
            let mut state = session.state.lock();
            if !by.is_current() {
                return;
            }
            state.mailbox = None;
            state.secret.is_some()
        };
        if kept {
            self.detach(by, flushes);
        } else {
            let release = match self.auto_release {
                AutoRelease::Any => true,
                AutoRelease::Clean => orderly,
                AutoRelease::Lease => false,
            };
            self.end(session, release, false, flushes);
        }
    }

    /// Ends a session whose client may no longer use it, kept or not.
    pub fn end_revoked(&self, by: &Attachment, flushes: &mut PendingFlushes) {
        let secret = {
            let mut state = by.session.state.lock();
            if !by.is_current() {
                return;
            }
            state.secret.take()
        };
        if let Some(secret) = secret {
            self.router.forget_secret(secret);
        }
        self.close(by, secret.is_some(), flushes);
    }

    /// Ends a session for an operator, who may have to end one whose client is gone.
    pub fn kick(&self, id: SessionId, flushes: &mut PendingFlushes) -> Outcome {
        let Some(session) = self.router.get(id) else {
            return Outcome::Refused(Refusal::NotHeld);
        };
        let mailbox = {
            let state = session.state.lock();
            session.epoch.fetch_add(1, Ordering::SeqCst);
            state.mailbox.clone()
        };
        self.end(&session, true, true, flushes);
        if let Some(mailbox) = mailbox {
            session.state.lock().mailbox = None;
            mailbox.close();
            flushes.add(&mailbox);
        }
        Outcome::Done
    }

    /// Lets every shard look at the time.
    pub fn tick(&self, flushes: &mut PendingFlushes) {
        for shard in 0..=COMMON {
            self.apply(shard, None, NOBODY, Command::Tick, flushes);
        }
    }

    /// Runs the timers until the runtime ends, and the thread that reserves fences until the engine is stopped.
    ///
    /// # Errors
    ///
    /// If the thread can not be started.
    pub(crate) fn start(engine: &Arc<Engine>) -> std::io::Result<()> {
        for shard in 0..=COMMON {
            let engine = Arc::clone(engine);
            tokio::spawn(async move { memory(&engine).run_timer(shard).await });
        }
        let engine = Arc::clone(engine);
        std::thread::Builder::new().name("fences".into()).spawn(move || {
            let memory = memory(&engine);
            memory.fences.run(|| {
                let mut flushes = PendingFlushes::new();
                memory.tick(&mut flushes);
                flushes.run();
            });
        })?;
        Ok(())
    }

    /// Ends what the start began.
    pub fn stop(&self) {
        self.fences.stop();
    }

    async fn run_timer(&self, shard: usize) {
        let mut flushes = PendingFlushes::new();
        loop {
            let next = {
                let mut state = self.shards[shard].state.lock();
                state.armed = state.store.next_deadline().unwrap_or(Timestamp::NEVER);
                state.armed
            };
            let earlier = self.shards[shard].earlier.notified();
            if next == Timestamp::NEVER {
                earlier.await;
                continue;
            }
            let wait = self.clock.until(next).min(self.sweep_interval);
            if tokio::time::timeout(wait, earlier).await.is_ok() && self.clock.now() < next {
                continue;
            }
            self.apply(shard, None, NOBODY, Command::Tick, &mut flushes);
            flushes.run();
        }
    }

    fn subscribe(
        &self,
        by: &Attachment,
        caller: Caller,
        command: &Command<'_>,
        subscription: Subscription<'_>,
        flushes: &mut PendingFlushes,
    ) -> Submitted {
        let applied = self.apply(COMMON, Some(by), caller, *command, flushes);
        let Some(Some(outcome)) = applied else { return Submitted::Gone };
        if outcome != Outcome::Done {
            return Submitted::Done(outcome);
        }
        let key = match subscription {
            Subscription::Signals { .. } => None,
            Subscription::Changes { pattern, .. } => is_literal(pattern).then_some(pattern),
            Subscription::Leaders { key } => Some(key),
        };
        if let Some(key) = key {
            let unkept = Caller { keep: false, ..caller };
            self.apply(shard_of(key), Some(by), unkept, *command, flushes);
        } else if matches!(
            command,
            Command::Unsubscribe(command::Unsubscribe { from: Subscription::Changes { .. } })
        ) {
            // A shard may just have found the watch and not have told of the change yet. Who has been in every shard
            // can say that nothing more comes.
            for shard in &self.shards[..KEY_SHARDS] {
                drop(shard.state.lock());
            }
        }
        Submitted::Done(outcome)
    }

    fn detach(&self, by: &Attachment, flushes: &mut PendingFlushes) {
        // At least one shard must know of it, or nobody would ever end it.
        by.session.touch(COMMON);
        let leases = by
            .session
            .shards()
            .filter_map(|shard| self.shards[shard].state.lock().store.lease_end(by.id()));
        let until = leases.fold(self.clock.now() + KEPT_FOR, Ord::max);
        let caller = Caller { session: by.id(), request: RequestId(0), keep: false };
        for shard in by.session.shards() {
            self.apply(shard, Some(by), caller, Command::Detach { until }, flushes);
        }
    }

    fn end(
        &self,
        session: &Arc<Session>,
        release: bool,
        forced: bool,
        flushes: &mut PendingFlushes,
    ) {
        let caller = Caller { session: session.id(), request: RequestId(0), keep: false };
        for shard in session.shards() {
            let command = Command::EndSession { release, forced };
            self.apply(shard, None, caller, command, flushes);
        }
        self.router.remove(session);
    }

    /// Applies a command to a shard and brings its effects on their way. None if the session is no longer the
    /// caller's; Some(None) if the answer comes later or never.
    ///
    /// What could not be delivered is given back, which may grant it to the next waiter, who may be gone as well. That
    /// is a loop: thousands of waiters of a session that has ended would exhaust the stack.
    fn apply(
        &self,
        shard: usize,
        by: Option<&Attachment>,
        caller: Caller,
        command: Command<'_>,
        flushes: &mut PendingFlushes,
    ) -> Option<Option<Outcome>> {
        let mut undeliverable = Vec::new();
        let outcome = self.apply_one(shard, by, caller, command, &mut undeliverable, flushes)?;
        if !undeliverable.is_empty() {
            self.give_back(shard, undeliverable, flushes);
        }
        Some(outcome)
    }

    #[cold]
    fn give_back(&self, shard: usize, undeliverable: Vec<Outcome>, flushes: &mut PendingFlushes) {
        let mut undeliverable = VecDeque::from(undeliverable);
        while let Some(given) = undeliverable.pop_front() {
            let mut more = Vec::new();
            self.apply_one(shard, None, NOBODY, Command::Undo(&given), &mut more, flushes);
            undeliverable.extend(more);
        }
    }

    /// Applies a command to a shard. What it gave to those who can not be told is added to `undeliverable`.
    fn apply_one(
        &self,
        shard: usize,
        by: Option<&Attachment>,
        caller: Caller,
        command: Command<'_>,
        undeliverable: &mut Vec<Outcome>,
        flushes: &mut PendingFlushes,
    ) -> Option<Option<Outcome>> {
        let mut aftermath = Aftermath::default();
        {
            let mut state = match self.lock_for(shard, &command) {
                Ok(state) => state,
                Err(refusal) => return Some(Some(Outcome::Refused(refusal))),
            };
            if let Some(by) = by {
                // Under the shard's lock: an attach visits each shard after it raised the epoch.
                if !by.is_current() {
                    return None;
                }
                by.session.touch(shard);
            }
            let now = self.clock.now();
            let ShardState { store, effects, armed } = &mut *state;
            {
                let _abort = AbortOnPanic { unwinding: std::thread::panicking() };
                store.apply(caller, command, now, effects);
            }
            // In the order of the store, and before anybody else can change it.
            for effect in effects.drain(..) {
                self.route(effect, caller, store, &mut aftermath, flushes);
            }
            if let Some(next) = store.next_deadline()
                && next < *armed
            {
                *armed = next;
                self.shards[shard].earlier.notify_one();
            }
        }
        tell_growth(&self.growth, || self.revision());
        self.fences.look_after();
        if caller.keep
            && let Some(by) = by
            && self.is_laden(&by.session)
        {
            self.trim_results(&by.session);
        }
        for session in aftermath.laden {
            self.trim_results(&session);
        }
        undeliverable.append(&mut aftermath.undo);
        for id in aftermath.ended {
            if let Some(session) = self.router.get(id)
                && session.untouch(shard)
            {
                self.router.remove(&session);
            }
        }
        Some(aftermath.outcome)
    }

    /// Locks a shard for a command, after what the command needs of others was done: its lease is on record before
    /// anybody can be told of it, and idle keys of any shard have made room for its key.
    fn lock_for(
        &self,
        shard: usize,
        command: &Command<'_>,
    ) -> Result<MutexGuard<'_, ShardState>, Refusal> {
        /// Others may take the room before this thread comes back for it.
        const TRIES: usize = 8;
        let mut state = self.shards[shard].state.lock();
        // Only the lease of what may be granted counts: who guesses tokens must not delay the next start.
        if let Some(lease) = self.unrecorded_lease(command)
            && state.store.may_lease(command)
        {
            drop(state);
            if !self.fences.record_lease(lease) {
                return Err(Refusal::NoFence);
            }
            state = self.shards[shard].state.lock();
        }
        for _ in 0..TRIES {
            let Some(what) = state.store.lacks_room(command) else { break };
            drop(state);
            let has_room = self.make_room(what);
            state = self.shards[shard].state.lock();
            if !has_room {
                break;
            }
        }
        Ok(state)
    }

    /// The lease that a command would be granted with, if it is longer than those that the next start would know of.
    fn unrecorded_lease(&self, command: &Command<'_>) -> Option<Span> {
        let lease = self.limits.lease(command.lease()?);
        self.fences.lacks(lease).then_some(lease)
    }

    /// Drops what is idle for longest, in whatever shard it is. False if nothing is.
    fn make_room(&self, what: Idle) -> bool {
        let idlest = (0..KEY_SHARDS)
            .filter_map(|shard| Some((self.shards[shard].state.lock().store.idlest(what)?, shard)))
            .min();
        let Some((since, shard)) = idlest else { return false };
        let mut state = self.shards[shard].state.lock();
        // Unless it is in use by now.
        if state.store.idlest(what) == Some(since) {
            state.store.drop_idlest(what);
        }
        true
    }

    fn is_laden(&self, session: &Session) -> bool {
        let (results, bytes) = session.usage.results();
        results > self.limits.results_max || bytes > self.limits.results_bytes_max
    }

    /// Forgets the oldest results of a session, in whatever shards they are. An eighth more than must be, so that it is
    /// not for each request.
    fn trim_results(&self, session: &Session) {
        let shards: Vec<usize> = session.shards().collect();
        let mut made = Vec::new();
        for &shard in &shards {
            made.extend(self.shards[shard].state.lock().store.results_made(session.id()));
        }
        made.sort_unstable();
        let Limits { results_max, results_bytes_max, .. } = self.limits;
        let mut results = made.len() as u64;
        let mut bytes = made.iter().map(|(_, bytes)| bytes).sum::<u64>();
        let mut up_to = None;
        for (made, size) in made {
            if results <= results_max - results_max / 8
                && bytes <= results_bytes_max - results_bytes_max / 8
            {
                break;
            }
            (results, bytes, up_to) = (results - 1, bytes - size, Some(made));
        }
        let Some(up_to) = up_to else { return };
        for shard in shards {
            self.shards[shard].state.lock().store.forget_results(session.id(), up_to);
        }
    }

    fn route(
        &self,
        effect: Effect,
        caller: Caller,
        store: &Store,
        aftermath: &mut Aftermath,
        flushes: &mut PendingFlushes,
    ) {
        match effect {
            Effect::Reply { session, request, outcome }
                if session == caller.session && request == caller.request =>
            {
                aftermath.outcome = Some(outcome);
            }
            Effect::Reply { session, request, outcome } => {
                let Some(session) = self.router.get(session) else {
                    aftermath.undo.push(outcome);
                    return;
                };
                if self.is_laden(&session) {
                    aftermath.laden.push(Arc::clone(&session));
                }
                let state = session.state.lock();
                let told = state.deliver(request, &outcome, flushes);
                // A kept session gets its answer when it repeats the request.
                let can_ask_again = state.secret.is_some() && request.is_repeatable();
                if !told && !can_ask_again {
                    aftermath.undo.push(outcome);
                }
            }
            Effect::Push { session, push, group } => {
                let pushed = self.push(session, &push, flushes);
                match pushed {
                    Pushed::First | Pushed::Behind | Pushed::Urgent => return,
                    Pushed::Full | Pushed::Gone => {}
                }
                let others = group.iter().flat_map(|group| store.group_members(group));
                for other in others.filter(|&other| other != session) {
                    match self.push(other, &push, flushes) {
                        Pushed::Full | Pushed::Gone => {}
                        Pushed::First | Pushed::Behind | Pushed::Urgent => return,
                    }
                }
                if pushed == Pushed::Full
                    && let Some(session) = self.router.get(session)
                    && let Some(mailbox) = &session.state.lock().mailbox
                {
                    mailbox.overflow();
                    flushes.add(mailbox);
                }
            }
            Effect::SessionEnded { session } => aftermath.ended.push(session),
        }
    }

    fn push(&self, session: SessionId, push: &Push, flushes: &mut PendingFlushes) -> Pushed {
        let Some(session) = self.router.get(session) else { return Pushed::Gone };
        let state = session.state.lock();
        let Some(mailbox) = &state.mailbox else { return Pushed::Gone };
        let pushed = mailbox.push(push.clone());
        match pushed {
            Pushed::First => flushes.add(mailbox),
            Pushed::Urgent => flushes.add_urgent(mailbox),
            Pushed::Behind | Pushed::Full | Pushed::Gone => {}
        }
        pushed
    }
}

/// The caller of commands that nobody sent.
const NOBODY: Caller = Caller { session: SessionId(0), request: RequestId(0), keep: false };

fn memory(engine: &Engine) -> &Memory {
    match engine {
        Engine::Memory(memory) => memory,
        Engine::Replicated(_) => unreachable!("started as a memory engine"),
    }
}

/// The shard of a key: by a hash with a seed of this process, or somebody could choose keys that all meet in one shard.
fn shard_of(key: &[u8]) -> usize {
    static SEED: LazyLock<FixedState> = LazyLock::new(|| FixedState::with_seed(rand::random()));
    let mut hasher = SEED.build_hasher();
    hasher.write(key);
    // The upper bits are the better mixed ones.
    (hasher.finish() >> 32) as usize % KEY_SHARDS
}

/// State that a panic left half changed must not be used by anybody.
struct AbortOnPanic {
    /// The thread was cleaning up after a panic elsewhere when it came here.
    unwinding: bool,
}

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() && !self.unwinding {
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use dflockd_core::End;

    use super::*;

    struct Nobody;

    impl Mailbox for Nobody {
        fn reply(&self, _: RequestId, _: Outcome) -> Pushed {
            Pushed::Behind
        }
        fn push(&self, _: Push) -> Pushed {
            Pushed::Behind
        }
        fn overflow(&self) {}
        fn close(&self) {}
        fn flush(&self) {}
    }

    fn engine(limits: Limits) -> Memory {
        let shared = Arc::new(Shared::new());
        let fences = Fences::new(Arc::clone(&shared), None).expect("there is no file to fail");
        Memory::new(Options {
            limits,
            auto_release: AutoRelease::Any,
            grant_delay: Span::ZERO,
            sweep_interval: Duration::from_secs(1),
            shared,
            fences,
            clock: Clock::manual(),
        })
    }

    fn ask(engine: &Memory, by: &Attachment, request: u64, command: Command<'_>) -> Submitted {
        engine.submit(by, RequestId(request), true, command, &mut PendingFlushes::new())
    }

    /// GUARANTEES 48: the results that are kept for one session have a bound in all shards together, also those of
    /// requests that somebody else's request answers. The oldest go first.
    #[test]
    fn the_results_of_a_session_are_bounded_in_all_shards_together() {
        let engine = engine(Limits::default());
        let [hog, other] = [(); 2].map(|()| engine.open(Arc::new(Nobody), "".into()));
        engine.keep(&hog).expect("there is room");
        let value = vec![b'v'; 8_000];
        let bounded = |what: &str| {
            let (results, bytes) = hog.session.usage.results();
            assert!(results <= 1024 && bytes <= 1 << 20, "{what}: {results}, {bytes} bytes");
        };
        let pop = |number: u64| {
            let key = format!("list-{number}");
            let (end, wait) = (End::Left, Some(Span::from_secs(60)));
            ask(
                &engine,
                &hog,
                number,
                Command::Pop(command::Pop { key: key.as_bytes(), end, wait }),
            )
        };
        let push = |number: u64| {
            let key = format!("list-{number}");
            let (key, end) = (key.as_bytes(), End::Left);
            ask(&engine, &other, number, Command::Push(command::Push { key, end, value: &value }));
        };
        for number in 1..=1_000 {
            push(number);
            assert!(matches!(pop(number), Submitted::Done(Outcome::Popped { .. })));
            bounded("popped");
        }
        for number in 900..=1_000 {
            assert!(matches!(pop(number), Submitted::Done(Outcome::Popped { .. })), "{number}");
        }
        assert_eq!(pop(1), Submitted::Done(Outcome::Refused(Refusal::Forgotten)));
        for number in 1_001..=2_000 {
            assert!(matches!(pop(number), Submitted::Later(_)));
        }
        for number in 1_001..=2_000 {
            push(number);
            bounded("handed over");
        }
        // Small ones are bounded in number.
        for number in 2_001..=5_000 {
            let key = format!("counter-{number}");
            let add =
                Command::Add(command::Add { key: key.as_bytes(), delta: 1, decrement: false });
            assert_eq!(ask(&engine, &hog, number, add), Submitted::Done(Outcome::Number(1)));
            bounded("counted");
        }
        engine.check_invariants();
    }

    /// GUARANTEES 48: the key that is idle for longest makes room, although another shard asks.
    #[test]
    fn idle_locks_of_all_shards_make_room() {
        let engine = engine(Limits { locks_max: 10, ..Limits::default() });
        let client = engine.open(Arc::new(Nobody), "".into());
        let mut request = 0;
        let mut lock = |key: &str| {
            request += 1;
            let (mode, wait) = (dflockd_core::Mode::Mutex, Span::ZERO);
            let acquire = Command::Acquire(command::Acquire {
                key: key.as_bytes(),
                mode,
                wait,
                lease: None,
                salt: 7,
            });
            ask(&engine, &client, request, acquire)
        };
        for number in 0..10 {
            let key = format!("k{number}");
            let Submitted::Done(Outcome::Granted(grant)) = lock(&key) else {
                panic!("there is room for {key}")
            };
            if let Clock::Manual(now) = engine.clock() {
                now.fetch_add(1, Ordering::SeqCst);
            }
            let space = dflockd_core::Space::Locks;
            let (key, token) = (key.as_bytes(), grant.token);
            let release = Command::Release(command::Release { key, space, token, resign: false });
            engine.submit(&client, RequestId(1 << 63), false, release, &mut PendingFlushes::new());
        }
        for number in 0..10 {
            let known = engine.ls(&[b"k".to_vec()], None, 100);
            assert_eq!(known.len(), 10 - number, "the oldest have gone");
            let first = format!("k{number}");
            assert!(known.iter().any(|listed| *listed.key == *first.as_bytes()), "{known:?}");
            assert!(matches!(lock(&format!("new{number}")), Submitted::Done(Outcome::Granted(_))));
        }
        assert_eq!(lock("one-more"), Submitted::Done(Outcome::Refused(Refusal::MaxLocks)));
    }

    /// GUARANTEES 4: no API says what the random part of a token is, and it is never the same.
    #[test]
    fn the_engine_draws_salts() {
        let engine = Engine::Memory(engine(Limits::default()));
        let client = engine.open(Arc::new(Nobody), "".into());
        let mut salts = std::collections::BTreeSet::new();
        for number in 0..8 {
            let (mode, key) = (dflockd_core::Mode::Read, &b"k"[..]);
            let acquire = command::Acquire { mode, wait: Span::ZERO, lease: None, salt: 0, key };
            let enqueue = command::Enqueue { mode, lease: None, salt: 0, key: b"e" };
            let command = if number < 7 { acquire.into() } else { enqueue.into() };
            let mut flushes = PendingFlushes::new();
            let id = RequestId(number + 1);
            let Submitted::Done(Outcome::Granted(grant) | Outcome::Acquired(grant)) =
                engine.submit(&client, id, false, command, &mut flushes)
            else {
                panic!("the lock is free for readers")
            };
            salts.insert(grant.token.salt);
        }
        assert!(salts.len() == 8 && !salts.contains(&0), "{salts:?}");
    }
}
