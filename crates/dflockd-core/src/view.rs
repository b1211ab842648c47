//! What the store looks like from outside: plain data for people, collected while the store stands still
//! and turned into text later.

use alloc::collections::{BTreeSet, BinaryHeap};
use alloc::vec::Vec;
use core::ops::{Bound, Range};

use dflockd_api::{Bytes, Fence, Revision, SessionId, Space, Span, Timestamp};
use serde::{Deserialize, Serialize};

use crate::chain::Slot;
use crate::lock::Lock;
use crate::session::{Enqueued, Session};
use crate::store::Store;

/// What kind of lock a key is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum LockKind {
    /// So many holders at a time; 1 for mutexes and elections.
    Slots(u32),
    /// Readers or one writer.
    ReadWrite,
}

/// A lock of any kind.
#[derive(Clone, Debug)]
pub struct LockView {
    /// Its key.
    pub key: Bytes,
    /// Its namespace.
    pub space: Space,
    /// Its kind.
    pub kind: LockKind,
    /// How many hold it.
    pub holders_total: u32,
    /// The first of them, in the order of their grants.
    pub holders: Vec<HolderView>,
    /// How many wait for it.
    pub waiters_total: u32,
    /// The first of them, in order.
    pub queue: Vec<WaiterView>,
    /// For how long nobody has held or wanted it.
    pub idle: Option<Span>,
    /// The revision of its last change.
    pub revision: Revision,
}

/// A hold.
#[derive(Clone, Debug)]
pub struct HolderView {
    /// Whose it is.
    pub session: SessionId,
    /// The name of the client, if the session has said it.
    pub client: Option<Bytes>,
    /// Its fence.
    pub fence: Fence,
    /// What is left of its lease.
    pub expires_in: Span,
    /// Since when it is held.
    pub held_for: Span,
    /// It is a write lock.
    pub writer: bool,
    /// It was granted by an election.
    pub leader: bool,
}

/// A place in a queue.
#[derive(Clone, Debug)]
pub struct WaiterView {
    /// Whose it is.
    pub session: SessionId,
    /// The name of the client, if the session has said it.
    pub client: Option<Bytes>,
    /// For how long it has been there.
    pub waiting: Span,
    /// It wants a write lock.
    pub writer: bool,
}

/// A counter.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct CounterView {
    pub key: Bytes,
    pub value: i64,
    pub idle: Span,
    pub revision: Revision,
}

/// A KV entry, without its value.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct KvView {
    pub key: Bytes,
    pub value_bytes: usize,
    pub ttl: Option<Span>,
    pub idle: Span,
    pub revision: Revision,
}

/// A list, without its items.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct ListView {
    pub key: Bytes,
    pub length: usize,
    pub pop_waiters: usize,
    pub idle: Span,
    pub revision: Revision,
}

/// A barrier somebody waits at.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub struct BarrierView {
    pub key: Bytes,
    pub count: u32,
    pub participants: usize,
    pub idle: Span,
}

/// A pattern somebody listens to or watches.
#[derive(Clone, Debug)]
pub struct ChannelView {
    /// The pattern.
    pub pattern: Bytes,
    /// The queue group; empty = none.
    pub group: Bytes,
    /// How many sessions.
    pub sessions: usize,
}

impl ChannelView {
    /// A pattern that is watched.
    pub(crate) fn watch(pattern: &Bytes, sessions: usize) -> Self {
        Self { pattern: pattern.clone(), group: Bytes::from(&[][..]), sessions }
    }
}

/// Everything, in no particular order.
#[derive(Clone, Debug, Default)]
#[expect(missing_docs, reason = "the names say it")]
pub struct Survey {
    pub locks_total: usize,
    pub values_total: usize,
    pub locks: Vec<LockView>,
    pub counters: Vec<CounterView>,
    pub kv: Vec<KvView>,
    pub lists: Vec<ListView>,
    pub barriers: Vec<BarrierView>,
    pub signal_channels: Vec<ChannelView>,
    pub watch_channels: Vec<ChannelView>,
}

/// One of the things a key can be; the same key can be several.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names say it")]
pub enum KeyView {
    Lock(LockView),
    Counter(CounterView),
    Kv(KvView),
    List(ListView),
    Barrier(BarrierView),
}

impl KeyView {
    /// What the key is here.
    #[must_use]
    pub fn kind(&self) -> KeyKind {
        match self {
            Self::Lock(lock) => KeyKind::of_lock(lock.space, lock.kind),
            Self::Counter(_) => KeyKind::Counter,
            Self::Kv(_) => KeyKind::Kv,
            Self::List(_) => KeyKind::List,
            Self::Barrier(_) => KeyKind::Barrier,
        }
    }
}

/// The kind of a listed key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names say it")]
pub enum KeyKind {
    Mutex,
    ReadWrite,
    Semaphore,
    Counter,
    Kv,
    List,
    Barrier,
}

impl KeyKind {
    /// What users call it, the same on every API.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mutex => "mutex",
            Self::ReadWrite => "rwlock",
            Self::Semaphore => "semaphore",
            Self::Counter => "counter",
            Self::Kv => "kv",
            Self::List => "list",
            Self::Barrier => "barrier",
        }
    }

    /// The kind of a lock.
    #[must_use]
    pub fn of_lock(space: Space, kind: LockKind) -> Self {
        match (space, kind) {
            (_, LockKind::ReadWrite) => Self::ReadWrite,
            (Space::Locks, LockKind::Slots(1)) => Self::Mutex,
            (Space::Locks | Space::Semaphores, LockKind::Slots(_)) => Self::Semaphore,
        }
    }
}

/// A key in a listing. Ordered by key.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Listed {
    /// The key.
    pub key: Bytes,
    /// What it is.
    pub kind: KeyKind,
    /// How many hold it.
    pub holders: usize,
    /// How many wait for it.
    pub waiters: usize,
}

/// Which locks are listed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Only {
    /// All, also those that nobody holds or wants.
    #[default]
    All,
    /// Those that somebody holds.
    Held,
    /// Those that somebody waits for.
    Waiting,
}

impl Only {
    fn admits(self, lock: &Lock) -> bool {
        match self {
            Self::All => true,
            Self::Held => !lock.holders.is_empty(),
            Self::Waiting => !lock.queue.is_empty(),
        }
    }
}

/// The first keys of locks in order, collected part by part.
#[derive(Clone, Debug)]
pub struct LockPage {
    within: Vec<Vec<u8>>,
    after: Option<Vec<u8>>,
    limit: usize,
    only: Only,
    keys: BTreeSet<Bytes>,
    more: bool,
}

impl LockPage {
    /// A page that begins after a key and has `limit` keys at most, all of which begin with one of these prefixes.
    #[must_use]
    pub fn new(within: Vec<Vec<u8>>, after: Option<&[u8]>, limit: usize, only: Only) -> Self {
        let after = after.map(<[u8]>::to_vec);
        Self { within, after, limit, only, keys: BTreeSet::new(), more: false }
    }

    /// Which locks are on it.
    #[must_use]
    pub fn only(&self) -> Only {
        self.only
    }

    /// The keys, in order.
    pub fn keys(&self) -> impl Iterator<Item = &Bytes> {
        self.keys.iter()
    }

    /// The last key, if others follow.
    #[must_use]
    pub fn next(&self) -> Option<&Bytes> {
        self.keys.last().filter(|_| self.more)
    }

    fn add(&mut self, lock: &Lock) {
        let key = &lock.key;
        let wanted = is_within(key, &self.within)
            && self.after.as_ref().is_none_or(|after| **key > **after)
            && self.only.admits(lock);
        let full = self.keys.len() >= self.limit;
        if !wanted {
            return;
        }
        if full && self.keys.last().is_none_or(|last| key > last) {
            self.more = true;
        } else if self.keys.insert(key.clone()) && full {
            self.keys.pop_last();
            self.more = true;
        }
    }
}

/// Whether a key begins with one of these prefixes.
fn is_within(key: &[u8], within: &[Vec<u8>]) -> bool {
    within.iter().any(|prefix| key.starts_with(prefix))
}

/// A lock that somebody waits for. Ordered by how many do, then by how long the first one does.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Contended {
    /// How many wait for it.
    pub waiters: u32,
    /// For how long the first of them has been there.
    pub longest_wait: Span,
    /// How many hold it.
    pub holders: u32,
    /// What it is.
    pub kind: KeyKind,
    /// The lock.
    pub key: Bytes,
}

/// The locks with the longest queues, collected part by part.
#[derive(Clone, Debug)]
pub struct Contention {
    within: Vec<Vec<u8>>,
    limit: usize,
    locks: BTreeSet<Contended>,
}

impl Contention {
    /// So many of them at most, all of whose keys begin with one of these prefixes.
    #[must_use]
    pub fn new(within: Vec<Vec<u8>>, limit: usize) -> Self {
        Self { within, limit, locks: BTreeSet::new() }
    }

    /// The longest queue first.
    pub fn into_locks(self) -> impl Iterator<Item = Contended> {
        self.locks.into_iter().rev()
    }
}

/// What a session has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionView {
    /// Locks it holds.
    pub holds: usize,
    /// Requests that are not answered yet, and places in queues that nobody waits at.
    pub waits: usize,
    /// What it listens to.
    pub subscriptions: usize,
}

impl Store {
    /// Every place of a lock is below this.
    #[must_use]
    pub fn lock_slots(&self) -> usize {
        self.locks.arena.end()
    }

    /// Adds the locks at some places to a page.
    pub fn page_locks(&self, slots: Range<usize>, page: &mut LockPage) {
        for lock in slots.filter_map(|slot| self.locks.arena.get(slot)) {
            page.add(lock);
        }
    }

    /// The locks with this key that are wanted, with at most `each_max` holders and waiters.
    #[must_use]
    pub fn view_locks(
        &self,
        key: &[u8],
        only: Only,
        now: Timestamp,
        each_max: usize,
    ) -> Vec<LockView> {
        let slots = [Space::Locks, Space::Semaphores].map(|space| self.locks.find(space, key));
        let wanted = |slot: &Slot| only.admits(&self.locks.arena[*slot]);
        let wanted = slots.into_iter().flatten().filter(wanted);
        wanted.map(|slot| self.view_lock(slot, now, each_max)).collect()
    }

    /// Adds the locks at some places that somebody waits for.
    pub fn page_contention(&self, slots: Range<usize>, now: Timestamp, page: &mut Contention) {
        for lock in slots.filter_map(|slot| self.locks.arena.get(slot)) {
            let waiters = lock.queue.len();
            let least = page.locks.first().map_or(0, |least| least.waiters);
            let full = page.locks.len() >= page.limit;
            if waiters == 0 || full && waiters < least || !is_within(&lock.key, &page.within) {
                continue;
            }
            let first = lock.queue.iter(&self.locks.claims).next();
            page.locks.insert(Contended {
                waiters,
                longest_wait: first.map_or(Span::ZERO, |(_, claim)| now.since(claim.since)),
                holders: lock.holders.len(),
                kind: KeyKind::of_lock(lock.space, lock.kind),
                key: lock.key.clone(),
            });
            if page.locks.len() > page.limit {
                page.locks.pop_first();
            }
        }
    }

    /// The first sessions after `after`, in order, `limit` at most.
    #[must_use]
    pub fn sessions(&self, after: SessionId, limit: usize) -> Vec<SessionId> {
        let behind = (Bound::Excluded(after), Bound::Unbounded);
        self.session_order.range(behind).take(limit).copied().collect()
    }

    /// What a session has here.
    #[must_use]
    pub fn view_session(&self, id: SessionId) -> SessionView {
        self.sessions.get(&id).map_or_else(SessionView::default, |owner| self.count(owner))
    }

    fn count(&self, owner: &Session) -> SessionView {
        let waits_alone = |record: &&Enqueued| match **record {
            Enqueued::Claim(slot) => {
                let claim = &self.locks.claims[slot];
                claim.hold.is_none() && claim.request.is_none()
            }
            Enqueued::Expired(_) => false,
        };
        SessionView {
            holds: owner.holds.len() as usize,
            waits: owner.blocked.len() + owner.enqueued.values().filter(waits_alone).count(),
            subscriptions: owner.subscriptions.len(),
        }
    }

    /// Everything there is, with at most `each_max` holders and waiters per lock, and at most `names_max`
    /// keys of each kind.
    #[must_use]
    pub fn survey(&self, now: Timestamp, each_max: usize, names_max: usize) -> Survey {
        let locks = self.locks.arena.iter().take(names_max);
        let values = [self.counters.len(), self.kv.len(), self.lists.len(), self.barriers.len()];
        let signals = self.subscriptions.signals.iter().flat_map(|(pattern, listeners)| {
            let alone = (!listeners.alone.is_empty()).then(|| ChannelView {
                pattern: pattern.clone(),
                group: Bytes::from(&[][..]),
                sessions: listeners.alone.len(),
            });
            let groups = listeners.groups.iter().map(|(name, members)| ChannelView {
                pattern: pattern.clone(),
                group: name.clone(),
                sessions: members.sessions.len(),
            });
            alone.into_iter().chain(groups)
        });
        Survey {
            locks_total: self.locks.arena.len(),
            values_total: values.iter().sum(),
            locks: locks.map(|(slot, _)| self.view_lock(slot, now, each_max)).collect(),
            counters: self
                .counters
                .keys()
                .take(names_max)
                .filter_map(|key| self.view_counter(key, now))
                .collect(),
            kv: self.kv.keys().take(names_max).filter_map(|key| self.view_kv(key, now)).collect(),
            lists: self
                .lists
                .keys()
                .take(names_max)
                .filter_map(|key| self.view_list(key, now))
                .collect(),
            barriers: self
                .barriers
                .keys()
                .take(names_max)
                .filter_map(|key| self.view_barrier(key, now))
                .collect(),
            signal_channels: signals.collect(),
            watch_channels: self.subscriptions.watches.channels(),
        }
    }

    /// Everything `key` is, locks first, with at most `each_max` holders and waiters.
    #[must_use]
    pub fn inspect(&self, key: &[u8], now: Timestamp, each_max: usize) -> Vec<KeyView> {
        let locks = [Space::Locks, Space::Semaphores].into_iter().filter_map(|space| {
            let slot = self.locks.find(space, key)?;
            Some(KeyView::Lock(self.view_lock(slot, now, each_max)))
        });
        locks
            .chain(self.view_counter(key, now).map(KeyView::Counter))
            .chain(self.view_kv(key, now).map(KeyView::Kv))
            .chain(self.view_list(key, now).map(KeyView::List))
            .chain(self.view_barrier(key, now).map(KeyView::Barrier))
            .collect()
    }

    /// The first keys after `after` that begin with one of these prefixes: at least `limit` of them if there are so
    /// many, in order.
    #[must_use]
    pub fn ls(
        &self,
        within: &[Vec<u8>],
        after: Option<&[u8]>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Listed> {
        let wanted = |key: &[u8]| is_within(key, within) && after.is_none_or(|after| key > after);
        let mut page = Page { limit, listed: BinaryHeap::new() };
        for (_, lock) in self.locks.arena.iter().filter(|(_, lock)| wanted(&lock.key)) {
            page.add(&lock.key, || listed_lock(lock));
        }
        for key in self.counters.keys().filter(|key| wanted(key)) {
            page.add(key, || listed(key, KeyKind::Counter, 0));
        }
        for (key, entry) in self.kv.iter().filter(|(key, _)| wanted(key)) {
            if entry.timer.is_none_or(|(end, _)| end > now) {
                page.add(key, || listed(key, KeyKind::Kv, 0));
            }
        }
        for (key, list) in self.lists.iter().filter(|(key, _)| wanted(key)) {
            page.add(key, || listed(key, KeyKind::List, list.poppers.len()));
        }
        for (key, barrier) in self.barriers.iter().filter(|(key, _)| wanted(key)) {
            page.add(key, || listed(key, KeyKind::Barrier, barrier.arrivals.len()));
        }
        page.listed.into_sorted_vec()
    }

    fn view_lock(&self, slot: Slot, now: Timestamp, each_max: usize) -> LockView {
        let lock = &self.locks.arena[slot];
        let holders = lock.holders.iter(&self.locks.claims).take(each_max);
        let queue = lock.queue.iter(&self.locks.claims).take(each_max);
        LockView {
            key: lock.key.clone(),
            space: lock.space,
            kind: lock.kind,
            holders_total: lock.holders.len(),
            holders: holders
                .filter_map(|(_, claim)| {
                    let hold = claim.hold?;
                    Some(HolderView {
                        session: claim.session,
                        client: self.client_name(claim.session).cloned(),
                        fence: hold.fence,
                        expires_in: self.deadlines.lease_end(hold.base).since(now),
                        held_for: now.since(claim.since),
                        writer: claim.exclusive,
                        leader: claim.election,
                    })
                })
                .collect(),
            waiters_total: lock.queue.len(),
            queue: queue
                .map(|(_, claim)| WaiterView {
                    session: claim.session,
                    client: self.client_name(claim.session).cloned(),
                    waiting: now.since(claim.since),
                    writer: claim.exclusive,
                })
                .collect(),
            idle: lock.idle_since.map(|since| now.since(since)),
            revision: lock.revision,
        }
    }

    fn view_counter(&self, key: &[u8], now: Timestamp) -> Option<CounterView> {
        let (key, counter) = self.counters.get_key_value(key)?;
        Some(CounterView {
            key: key.clone(),
            value: counter.value,
            idle: now.since(counter.changed_at),
            revision: counter.revision,
        })
    }

    fn view_kv(&self, key: &[u8], now: Timestamp) -> Option<KvView> {
        let (key, entry) = self.kv.get_key_value(key)?;
        if entry.timer.is_some_and(|(end, _)| end <= now) {
            return None;
        }
        Some(KvView {
            key: key.clone(),
            value_bytes: entry.value.len(),
            ttl: entry.timer.map(|(end, _)| end.since(now)),
            idle: now.since(entry.changed_at),
            revision: entry.revision,
        })
    }

    fn view_list(&self, key: &[u8], now: Timestamp) -> Option<ListView> {
        let (key, list) = self.lists.get_key_value(key)?;
        Some(ListView {
            key: key.clone(),
            length: list.items.len(),
            pop_waiters: list.poppers.len(),
            idle: now.since(list.changed_at),
            revision: list.revision,
        })
    }

    fn view_barrier(&self, key: &[u8], now: Timestamp) -> Option<BarrierView> {
        let (key, barrier) = self.barriers.get_key_value(key)?;
        Some(BarrierView {
            key: key.clone(),
            count: barrier.count,
            participants: barrier.arrivals.len(),
            idle: now.since(barrier.changed_at),
        })
    }
}

/// The smallest keys seen so far. Everything a key is stays together, so a page can be a little longer.
struct Page {
    limit: usize,
    listed: BinaryHeap<Listed>,
}

impl Page {
    fn add(&mut self, key: &[u8], listed: impl FnOnce() -> Listed) {
        let full = self.listed.len() >= self.limit;
        if full && self.listed.peek().is_some_and(|last| *key > *last.key) {
            return;
        }
        self.listed.push(listed());
        // A key leaves only as a whole, and only if enough others remain.
        while let Some(last) = self.listed.peek()
            && self.listed.len() > self.limit
        {
            let last = last.key.clone();
            let same = self.listed.iter().filter(|listed| listed.key == last).count();
            if self.listed.len() - same < self.limit {
                break;
            }
            for _ in 0..same {
                self.listed.pop();
            }
        }
    }
}

fn listed_lock(lock: &Lock) -> Listed {
    Listed {
        key: lock.key.clone(),
        kind: KeyKind::of_lock(lock.space, lock.kind),
        holders: lock.holders.len() as usize,
        waiters: lock.queue.len() as usize,
    }
}

fn listed(key: &Bytes, kind: KeyKind, waiters: usize) -> Listed {
    Listed { key: key.clone(), kind, holders: 0, waiters }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::String;
    use alloc::sync::Arc;
    use alloc::vec;

    use super::*;
    use dflockd_api::{Caller, Command, Mode, RequestId, command};

    use crate::limits::Limits;
    use crate::shared::Shared;

    /// `k00` to `k29` are mutexes, every third has a waiter, `k10` has three and is a semaphore, too.
    fn store() -> Store {
        let shared = Arc::new(Shared::new());
        shared.set_fences(1, u64::MAX);
        let mut store = Store::new(Limits::default(), 1, shared, Timestamp(0));
        let mut request = 0;
        let mut ask = |session, key: &str, mode, now| {
            request += 1;
            let (session, request) = (SessionId(session), RequestId(request));
            let caller = Caller { session, request, keep: false };
            let (key, wait, lease) = (key.as_bytes(), Span::from_secs(60), None);
            let command =
                Command::Acquire(command::Acquire { key, mode, wait, lease, salt: request.0 });
            store.apply(caller, command, Timestamp(now), &mut Vec::new());
        };
        // Not in the order of the keys.
        for number in (0..30).map(|step| step * 7 % 30) {
            let key = format!("k{number:02}");
            ask(1, &key, Mode::Mutex, 10);
        }
        for number in (0..30).step_by(3) {
            ask(2, &format!("k{number:02}"), Mode::Mutex, 20);
        }
        ask(3, "k10", Mode::Semaphore { limit: 2 }, 30);
        for session in 4..7 {
            ask(session, "k10", Mode::Mutex, 30);
        }
        store
    }

    /// The page, looked at in parts of so many places, and where the next one begins.
    fn page(prefix: &str, after: Option<&str>, limit: usize, only: Only) -> (String, bool) {
        let store = store();
        let mut page = LockPage::new(vec![prefix.into()], after.map(str::as_bytes), limit, only);
        for part in (0..store.lock_slots()).step_by(4) {
            store.page_locks(part..part + 4, &mut page);
        }
        let keys = page.keys().map(|key| String::from_utf8_lossy(key).into_owned() + " ");
        (keys.collect(), page.next().is_some())
    }

    #[test]
    fn pages_of_locks() {
        assert_eq!(page("k", None, 3, Only::All), ("k00 k01 k02 ".into(), true));
        assert_eq!(page("k", Some("k02"), 3, Only::All), ("k03 k04 k05 ".into(), true));
        assert_eq!(page("k2", Some("k27"), 3, Only::All), ("k28 k29 ".into(), false));
        assert_eq!(page("k2", Some("k26"), 3, Only::All), ("k27 k28 k29 ".into(), false));
        assert_eq!(page("k1", None, 4, Only::Waiting), ("k10 k12 k15 k18 ".into(), false));
        assert_eq!(page("k1", None, 2, Only::Waiting), ("k10 k12 ".into(), true));
        assert_eq!(page("x", None, 2, Only::Held), (String::new(), false));
        let (all, more) = page("", None, 1000, Only::Held);
        assert_eq!((all.split_whitespace().count(), more), (30, false));
    }

    #[test]
    fn a_key_in_both_namespaces() {
        let store = store();
        let view = |only| store.view_locks(b"k10", only, Timestamp(40), 2);
        let all = view(Only::All);
        assert_eq!(all.len(), 2);
        assert_eq!((all[0].waiters_total, all[0].queue.len()), (3, 2));
        assert_eq!(view(Only::Waiting).len(), 1);
        assert!(store.view_locks(b"k99", Only::All, Timestamp(40), 2).is_empty());
    }

    #[test]
    fn the_longest_queues() {
        let store = store();
        let mut contention = Contention::new(vec![Vec::new()], 2);
        for part in (0..store.lock_slots()).step_by(4) {
            store.page_contention(part..part + 4, Timestamp(50), &mut contention);
        }
        let locks: Vec<_> = contention.into_locks().collect();
        assert_eq!(locks.len(), 2);
        assert_eq!((&*locks[0].key, locks[0].waiters, locks[0].holders), (&b"k10"[..], 3, 1));
        assert_eq!((locks[0].longest_wait, locks[1].longest_wait), (Span(20), Span(30)));
        assert_eq!(locks[1].waiters, 1);
    }

    #[test]
    fn sessions_in_pages() {
        let store = store();
        assert_eq!(store.sessions(SessionId(0), 2), [SessionId(1), SessionId(2)]);
        assert_eq!(store.sessions(SessionId(4), 9), [SessionId(5), SessionId(6)]);
        let view = |id| store.view_session(SessionId(id));
        assert_eq!(view(1), SessionView { holds: 30, waits: 0, subscriptions: 0 });
        assert_eq!(view(2), SessionView { holds: 0, waits: 10, subscriptions: 0 });
        assert_eq!(view(99), SessionView::default());
    }

    /// Of queues that are equally long the ones that have waited longest are told, wherever they are.
    #[test]
    fn of_equal_queues_the_oldest() {
        let mut store = store();
        let mut ask = |session, now| {
            let caller =
                Caller { session: SessionId(session), request: RequestId(900), keep: false };
            let (key, mode, wait) = (b"late", Mode::Mutex, Span::from_secs(60));
            let command = command::Acquire { key, mode, wait, lease: None, salt: 1 };
            store.apply(caller, Command::Acquire(command), Timestamp(now), &mut Vec::new());
        };
        ask(7, 30);
        ask(8, 40);
        let of_first = |slots: [usize; 2]| {
            let mut contention = Contention::new(vec![Vec::new()], 1);
            for slot in slots {
                store.page_contention(slot..slot + 1, Timestamp(50), &mut contention);
            }
            contention.into_locks().next().map(|lock| lock.key)
        };
        let slot_of =
            |key: &[u8]| store.locks.find(Space::Locks, key).expect("it is held") as usize;
        let [old, late] = [slot_of(b"k00"), slot_of(b"late")];
        assert_eq!(of_first([late, old]).as_deref(), Some(&b"k00"[..]));
        assert_eq!(of_first([old, late]).as_deref(), Some(&b"k00"[..]));
    }

    /// A store with everything that has a name: `a` is all kinds of value, `b` and `c` are entries, `c` for a while.
    fn values() -> Store {
        let mut store = Store::new(Limits::default(), 1, Arc::new(Shared::new()), Timestamp(0));
        let mut request = 0;
        let mut send = |session, command: Command<'_>| {
            request += 1;
            let (session, request) = (SessionId(session), RequestId(request));
            let caller = Caller { session, request, keep: false };
            store.apply(caller, command, Timestamp(10), &mut Vec::new());
        };
        let set = |key, ttl| command::KvSet { key, value: b"value", ttl };
        let push = command::Push { key: b"a", end: dflockd_api::End::Left, value: b"item" };
        send(1, Command::CounterSet(command::CounterSet { key: b"a", value: 5 }));
        send(1, Command::KvSet(set(b"c", Some(Span(10)))));
        send(1, Command::KvSet(set(b"b", None)));
        send(1, Command::KvSet(set(b"a", None)));
        send(1, Command::Push(push));
        let wait = Span::from_secs(60);
        send(1, Command::BarrierWait(command::BarrierWait { key: b"a", count: 3, wait }));
        let to = |group| dflockd_api::Subscription::Signals { pattern: b"jobs", group };
        send(1, Command::Subscribe(command::Subscribe { to: to(b"") }));
        send(2, Command::Subscribe(command::Subscribe { to: to(b"") }));
        send(2, Command::Subscribe(command::Subscribe { to: to(b"g") }));
        let to = dflockd_api::Subscription::Signals { pattern: b"grouped", group: b"g" };
        send(2, Command::Subscribe(command::Subscribe { to }));
        store
    }

    /// A page ends where a key ends; what a key is stays together, and what is over is not there.
    #[test]
    fn keys_in_pages() {
        let store = values();
        let ls = |after: Option<&str>, limit, now| {
            let listed = store.ls(&[Vec::new()], after.map(str::as_bytes), limit, Timestamp(now));
            let one =
                |it: &Listed| format!("{}:{} ", String::from_utf8_lossy(&it.key), it.kind.name());
            listed.iter().map(one).collect::<String>()
        };
        let a = "a:counter a:kv a:list a:barrier ";
        assert_eq!(ls(None, 1, 10), a);
        assert_eq!(ls(None, 4, 10), a);
        assert_eq!(ls(None, 5, 10), format!("{a}b:kv "));
        assert_eq!(ls(None, 9, 19), format!("{a}b:kv c:kv "));
        assert_eq!(ls(None, 9, 20), format!("{a}b:kv "), "its time is over");
        assert_eq!(ls(Some("a"), 1, 10), "b:kv ");
        assert_eq!(ls(Some("b"), 9, 10), "c:kv ");
    }

    #[test]
    fn everything_at_once() {
        let store = values();
        let survey = store.survey(Timestamp(12), 9, 9);
        assert_eq!((survey.locks_total, survey.values_total), (0, 6));
        let lengths = (survey.counters.len(), survey.kv.len(), survey.lists.len());
        assert_eq!((lengths, survey.barriers.len()), ((1, 3, 1), 1));
        let list = &survey.lists[0];
        assert_eq!((list.length, list.pop_waiters, list.idle), (1, 0, Span(2)));
        assert_eq!((survey.barriers[0].count, survey.barriers[0].participants), (3, 1));
        let mut channels: Vec<_> = (survey.signal_channels.iter())
            .map(|it| (&*it.pattern, &*it.group, it.sessions))
            .collect();
        channels.sort_unstable();
        let jobs = &b"jobs"[..];
        let grouped = (&b"grouped"[..], &b"g"[..], 1);
        assert_eq!(channels, [grouped, (jobs, b"", 2), (jobs, b"g", 1)]);
        let kinds: Vec<_> =
            store.inspect(b"a", Timestamp(12), 9).iter().map(|view| view.kind().name()).collect();
        assert_eq!(kinds, ["counter", "kv", "list", "barrier"]);
        assert_eq!(store.survey(Timestamp(12), 9, 2).kv.len(), 2, "so many names of each kind");
    }

    #[test]
    fn a_page_knows_what_it_is_of() {
        for only in [Only::All, Only::Held, Only::Waiting] {
            assert_eq!(LockPage::new(Vec::new(), None, 1, only).only(), only);
        }
        let kinds = [KeyKind::Mutex, KeyKind::ReadWrite, KeyKind::Semaphore];
        assert_eq!(kinds.map(KeyKind::name), ["mutex", "rwlock", "semaphore"]);
    }
}
