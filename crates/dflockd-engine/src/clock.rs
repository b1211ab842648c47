//! The only reader of the operating system's clocks, and its manual twin for tests.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use dflockd_core::{Span, Timestamp};

/// Where stamps come from.
#[derive(Debug)]
pub enum Clock {
    /// Nanoseconds since the process began, by the monotonic clock.
    System(Instant),
    /// Stands still until told to move.
    Manual(AtomicU64),
}

impl Clock {
    /// The real one.
    #[must_use]
    pub fn system() -> Self {
        Self::System(Instant::now())
    }

    /// One for tests.
    #[must_use]
    pub fn manual() -> Self {
        Self::Manual(AtomicU64::new(0))
    }

    /// This instant.
    pub fn now(&self) -> Timestamp {
        match self {
            Self::System(start) => Timestamp(nanos(start.elapsed())),
            Self::Manual(now) => Timestamp(now.load(Ordering::SeqCst)),
        }
    }

    /// Moves a manual clock.
    ///
    /// # Panics
    ///
    /// On a real one.
    pub fn advance(&self, by: Span) {
        match self {
            Self::System(_) => panic!("real time can not be moved"),
            Self::Manual(now) => {
                now.fetch_add(by.0, Ordering::SeqCst);
            }
        }
    }

    /// How long until `at`.
    pub fn until(&self, at: Timestamp) -> Duration {
        Duration::from_nanos(at.since(self.now()).0)
    }
}

/// Nanoseconds since 1970, the floor of fences after a cold start.
pub(crate) fn unix_nanos() -> u64 {
    nanos(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default())
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}
