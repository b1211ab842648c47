//! What spans several stores that together are one server: counters that all of them draw from. `watch.rs` has the
//! watches that span them.

use core::sync::atomic::{AtomicU64, Ordering::Relaxed};

use dflockd_api::{Fence, Revision};

use crate::bugs::{Bug, bug};

/// Counters shared by the stores of one server. A store behind a log has one of its own.
///
/// Each counter stands for itself, so relaxed ordering is enough: what orders the stores' data are the
/// mutexes around them.
#[derive(Debug)]
pub struct Shared {
    fence_next: AtomicU64,
    fence_ceiling: AtomicU64,
    revision: AtomicU64,
    locks: AtomicU64,
    keys: AtomicU64,
    wild_watches: AtomicU64,
}

impl Default for Shared {
    fn default() -> Self {
        Self::new()
    }
}

impl Shared {
    /// Fences from 1 without end, nothing counted.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            fence_next: AtomicU64::new(1),
            fence_ceiling: AtomicU64::new(u64::MAX),
            revision: AtomicU64::new(0),
            locks: AtomicU64::new(0),
            keys: AtomicU64::new(0),
            wild_watches: AtomicU64::new(0),
        }
    }

    /// The next grant gets `next`; grants stop before `ceiling`.
    pub fn set_fences(&self, next: u64, ceiling: u64) {
        self.fence_next.store(next, Relaxed);
        self.fence_ceiling.store(ceiling, Relaxed);
    }

    /// Allows fences below `ceiling`.
    pub fn raise_fence_ceiling(&self, ceiling: u64) {
        self.fence_ceiling.fetch_max(ceiling, Relaxed);
    }

    /// No fence below `next` is given out any more.
    pub(crate) fn raise_fence(&self, next: u64) {
        self.fence_next.fetch_max(next, Relaxed);
    }

    /// The fence the next grant will get.
    pub fn fence_next(&self) -> u64 {
        self.fence_next.load(Relaxed)
    }

    /// How many fences are left below the ceiling.
    pub fn fences_left(&self) -> u64 {
        self.fence_ceiling.load(Relaxed).saturating_sub(self.fence_next.load(Relaxed))
    }

    /// How many lock keys exist.
    pub fn locks(&self) -> u64 {
        self.locks.load(Relaxed)
    }

    /// How many counters, KV entries, lists and barriers exist.
    pub fn keys(&self) -> u64 {
        self.keys.load(Relaxed)
    }

    /// How many watches there are in [`SharedWatches`](crate::SharedWatches). Relaxed is enough here as well: whoever
    /// was told that a watch has begun, by whatever means, comes after the count of it.
    pub(crate) fn wild_watches(&self) -> u64 {
        self.wild_watches.load(Relaxed)
    }

    pub(crate) fn add_wild_watch(&self) {
        self.wild_watches.fetch_add(1, Relaxed);
    }

    pub(crate) fn remove_wild_watch(&self) {
        self.wild_watches.fetch_sub(1, Relaxed);
    }

    pub(crate) fn take_fence(&self) -> Option<Fence> {
        self.fence_next
            .fetch_update(Relaxed, Relaxed, |next| {
                let step = u64::from(!(bug(Bug::FenceReused) && next.is_multiple_of(16)));
                (next < self.fence_ceiling.load(Relaxed)).then(|| next + step)
            })
            .ok()
            .map(Fence)
    }

    /// The revision of the last change.
    pub fn revision(&self) -> Revision {
        Revision(self.revision.load(Relaxed))
    }

    /// The next change gets a revision above this one.
    pub fn set_revision(&self, revision: Revision) {
        self.revision.fetch_max(revision.0, Relaxed);
    }

    pub(crate) fn next_revision(&self) -> Revision {
        Revision(self.revision.fetch_add(1, Relaxed) + 1)
    }

    pub(crate) fn add_lock(&self, max: u64) -> bool {
        add(&self.locks, max)
    }

    pub(crate) fn remove_lock(&self) {
        self.locks.fetch_sub(1, Relaxed);
    }

    /// `max` 0 = unlimited.
    pub(crate) fn add_key(&self, max: u64) -> bool {
        add(&self.keys, if max == 0 { u64::MAX } else { max })
    }

    pub(crate) fn remove_key(&self) {
        self.keys.fetch_sub(1, Relaxed);
    }
}

fn add(count: &AtomicU64, max: u64) -> bool {
    count.fetch_update(Relaxed, Relaxed, |count| (count < max).then(|| count + 1)).is_ok()
}
