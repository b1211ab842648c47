//! Fences that never go back: where they start, and the ranges reserved on disk before they are used. Memory mode only;
//! in replicated mode the counter is part of the state, and the first leader starts it at its wall clock in
//! nanoseconds.
//!
//! One counter for the process starts at the wall clock in nanoseconds, or above what the fence state file has
//! reserved, whichever is higher. With a file, ranges of 2^20 are reserved before they are used, by a thread of their
//! own, when half of the old range is left. The longest lease is kept in the file as well. Without a fence nothing is
//! granted: new requests are refused, and waiters stay where they are and go on when there are fences again.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dflockd_core::{Shared, Span};
use parking_lot::{Condvar, Mutex};

use crate::clock::unix_nanos;
use crate::fence_file::FenceFile;

/// How many fences are reserved at a time.
const RANGE: u64 = 1 << 20;
/// A new range is reserved when fewer than this are left.
const LOW: u64 = RANGE / 2;
/// How long to wait after a range could not be reserved.
const RETRY: Duration = Duration::from_secs(1);

/// Hands out ranges of fences.
pub struct Fences {
    shared: Arc<Shared>,
    file: Option<Mutex<FenceFile>>,
    /// The largest lease that is on disk, in nanoseconds.
    lease_max: AtomicU64,
    wanted: Mutex<Wanted>,
    wake: Condvar,
}

#[derive(Default)]
struct Wanted {
    range: bool,
    stop: bool,
}

impl Fences {
    /// Seeds the counter from the wall clock, or from the file if it says more, and reserves the first range.
    ///
    /// # Errors
    ///
    /// If the file can not be written.
    pub fn new(shared: Arc<Shared>, file: Option<FenceFile>) -> std::io::Result<Self> {
        let clock = unix_nanos();
        let mut lease_max = 0;
        let file = match file {
            None => {
                shared.set_fences(clock, u64::MAX);
                None
            }
            Some(mut file) => {
                let start = file.ceiling().max(clock);
                lease_max = file.lease_max_ns();
                file.reserve(start.saturating_add(RANGE), lease_max)?;
                shared.set_fences(start, file.ceiling());
                Some(Mutex::new(file))
            }
        };
        Ok(Self {
            shared,
            file,
            lease_max: AtomicU64::new(lease_max),
            wanted: Mutex::default(),
            wake: Condvar::new(),
        })
    }

    /// The largest lease that was ever granted, as far as the file knows.
    pub fn lease_max(&self) -> Span {
        Span(self.lease_max.load(Ordering::Relaxed))
    }

    /// Whether a restart would not know of leases as long as this one.
    pub(crate) fn lacks(&self, lease: Span) -> bool {
        self.file.is_some() && lease.0 > self.lease_max.load(Ordering::Relaxed)
    }

    /// Makes sure that a restart will know of leases as long as this one. False if it can not be written.
    pub(crate) fn record_lease(&self, lease: Span) -> bool {
        let Some(file) = &self.file else { return true };
        let known = self.lease_max.load(Ordering::Relaxed);
        if lease.0 <= known {
            return true;
        }
        let mut file = file.lock();
        // A little more than asked, so that slowly growing leases are not written one by one.
        let lease_max = lease.0.max(known.saturating_add(known / 8));
        let ceiling = file.ceiling();
        match file.reserve(ceiling, lease_max) {
            Ok(()) => {
                self.lease_max.fetch_max(lease_max, Ordering::Relaxed);
                true
            }
            Err(error) => {
                tracing::error!(%error, "fence state file can not be written, grants are refused");
                false
            }
        }
    }

    /// Whether it is time for a new range; called after every grant, so it costs next to nothing.
    pub(crate) fn look_after(&self) {
        if self.file.is_some() && self.shared.fences_left() < LOW {
            let mut wanted = self.wanted.lock();
            if !wanted.range {
                wanted.range = true;
                self.wake.notify_one();
            }
        }
    }

    /// Reserves ranges as they are wanted until told to stop; calls `refilled` after each. Runs in its own thread,
    /// because it waits for the disk.
    pub(crate) fn run(&self, refilled: impl Fn()) {
        let Some(file) = &self.file else { return };
        loop {
            let mut wanted = self.wanted.lock();
            while !wanted.range && !wanted.stop {
                self.wake.wait(&mut wanted);
            }
            if wanted.stop {
                return;
            }
            drop(wanted);
            let mut file = file.lock();
            let ceiling = file.ceiling().saturating_add(RANGE);
            let lease_max = file.lease_max_ns();
            match file.reserve(ceiling, lease_max) {
                Ok(()) => {
                    self.shared.raise_fence_ceiling(ceiling);
                    drop(file);
                    self.wanted.lock().range = false;
                    refilled();
                }
                Err(error) => {
                    drop(file);
                    tracing::error!(%error, "fence state file can not be written");
                    let mut wanted = self.wanted.lock();
                    if !wanted.stop {
                        self.wake.wait_for(&mut wanted, RETRY);
                    }
                }
            }
        }
    }

    /// Ends [`Fences::run`].
    pub(crate) fn stop(&self) {
        self.wanted.lock().stop = true;
        self.wake.notify_all();
    }
}
