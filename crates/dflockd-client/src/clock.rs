//! Time that also passes while the machine is suspended.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// An instant of the boot-time clock. Unlike [`std::time::Instant`] it goes on while the machine sleeps, so a
/// laptop that wakes up knows that its lock is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(Duration);

impl Instant {
    /// Now.
    #[must_use]
    pub fn now() -> Self {
        let time = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(time.tv_sec).unwrap_or_default();
        let nanos = u32::try_from(time.tv_nsec).unwrap_or_default();
        Self(Duration::new(seconds, nanos))
    }

    /// How long until this instant; zero if it has passed.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self.0.saturating_sub(Self::now().0)
    }

    /// How long ago this instant was; zero if it is to come.
    #[must_use]
    pub fn elapsed(self) -> Duration {
        Self::now().0.saturating_sub(self.0)
    }
}

impl std::ops::Add<Duration> for Instant {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(duration))
    }
}
