//! What the store looks like from outside: plain data for people, collected while the store stands still
//! and turned into text later.

use alloc::collections::BinaryHeap;
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::chain::Slot;
use crate::lock::Lock;
use crate::store::Store;
use crate::types::{Bytes, Fence, Revision, SessionId, Space, Span, Timestamp};

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
    /// Of its last change.
    pub revision: Revision,
}

/// A hold.
#[derive(Clone, Debug)]
pub struct HolderView {
    /// Whose it is.
    pub session: SessionId,
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

impl Store {
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
        let watches = self.subscriptions.watches.iter().map(|(pattern, sessions)| ChannelView {
            pattern: pattern.clone(),
            group: Bytes::from(&[][..]),
            sessions: sessions.len(),
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
            watch_channels: watches.collect(),
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

    /// The first keys after `after` that begin with `prefix`: at least `limit` of them if there are so many,
    /// in order.
    #[must_use]
    pub fn ls(
        &self,
        prefix: &[u8],
        after: Option<&[u8]>,
        limit: usize,
        now: Timestamp,
    ) -> Vec<Listed> {
        let wanted = |key: &[u8]| key.starts_with(prefix) && after.is_none_or(|after| key > after);
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
