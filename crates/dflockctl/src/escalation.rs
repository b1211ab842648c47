//! When a program that runs under a lock is told to end, and when it is killed.
//!
//! Pure decisions: the time comes from outside.

use std::time::Duration;

/// What to do with the program when its lock is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum OnLost {
    /// Say so and let it run.
    Warn,
    /// SIGTERM, then SIGKILL before the validity of the lock ends.
    Term,
    /// SIGKILL.
    Kill,
}

/// Time a program has to end after the server has said that the lock is gone.
const END_AFTER_LOSS_MAX: Duration = Duration::from_secs(2);
/// How long before the end of the validity a program is killed at the latest: a kill takes a moment to arrive.
const KILL_MARGIN: Duration = Duration::from_millis(100);

/// A step against a program whose lock is lost or about to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Warn,
    Term,
    Kill,
}

/// The steps taken so far against one program.
#[derive(Debug)]
pub(crate) struct Escalation {
    on_lost: OnLost,
    lease: Duration,
    last: Option<Step>,
}

impl Escalation {
    pub(crate) fn new(on_lost: OnLost, lease: Duration) -> Self {
        Self { on_lost, lease, last: None }
    }

    /// The last step taken.
    pub(crate) fn last(&self) -> Option<Step> {
        self.last
    }

    /// The next step, if it is time for one. `left` is the validity that is left, `lost` how long ago the
    /// lock was found to be lost.
    ///
    /// Without a word from the server the program is told to end when a quarter of the lease is left: then
    /// two renewals have failed, and there is still time to clean up under the lock.
    pub(crate) fn next(&mut self, left: Duration, lost: Option<Duration>) -> Option<Step> {
        let over = left <= self.kill_margin();
        let step = match self.on_lost {
            OnLost::Warn if lost.is_some() || left.is_zero() => Step::Warn,
            OnLost::Kill if lost.is_some() || over => Step::Kill,
            OnLost::Term if over => Step::Kill,
            OnLost::Term if lost.is_some_and(|since| since >= END_AFTER_LOSS_MAX) => Step::Kill,
            OnLost::Term if lost.is_some() || left < self.lease / 4 => Step::Term,
            OnLost::Warn | OnLost::Kill | OnLost::Term => return None,
        };
        // A lock that was renewed at the last moment does not take back what was done.
        if self.last == Some(step) || self.last == Some(Step::Kill) {
            return None;
        }
        self.last = Some(step);
        Some(step)
    }

    /// How long to sleep at most before asking again.
    pub(crate) fn pause(&self) -> Duration {
        (self.kill_margin() / 4).clamp(Duration::from_millis(5), Duration::from_millis(500))
    }

    fn kill_margin(&self) -> Duration {
        // With very short leases 100 ms would be most of the time.
        (self.lease / 20).max(KILL_MARGIN.min(self.lease / 8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    /// Walks through moments: validity left and time since the loss, in milliseconds.
    fn check(on_lost: OnLost, moments: &[(u64, Option<u64>, Option<Step>)]) {
        let mut escalation = Escalation::new(on_lost, LEASE);
        for &(left, lost, expected) in moments {
            let lost = lost.map(Duration::from_millis);
            let got = escalation.next(Duration::from_millis(left), lost);
            assert_eq!(got, expected, "{on_lost:?}: {left} ms left, lost {lost:?}");
        }
    }

    #[test]
    fn a_silent_server() {
        let moments = [
            (9900, None, None),
            (2600, None, None),
            (2400, None, Some(Step::Term)),
            (600, None, None),
            (500, None, Some(Step::Kill)),
            (0, Some(0), None),
        ];
        check(OnLost::Term, &moments);
        check(OnLost::Kill, &[(501, None, None), (500, None, Some(Step::Kill))]);
        check(OnLost::Warn, &[(1, None, None), (0, None, Some(Step::Warn)), (0, None, None)]);
    }

    #[test]
    fn the_server_says_it_is_lost() {
        let moments = [
            (9000, Some(0), Some(Step::Term)),
            (8000, Some(1000), None),
            (7000, Some(2000), Some(Step::Kill)),
        ];
        check(OnLost::Term, &moments);
        check(
            OnLost::Term,
            &[(2000, Some(0), Some(Step::Term)), (400, Some(1600), Some(Step::Kill))],
        );
        check(OnLost::Kill, &[(9000, Some(0), Some(Step::Kill))]);
        check(OnLost::Warn, &[(9000, Some(0), Some(Step::Warn)), (0, Some(9000), None)]);
    }

    #[test]
    fn woken_up_too_late() {
        check(OnLost::Term, &[(0, Some(0), Some(Step::Kill)), (0, Some(10), None)]);
    }

    #[test]
    fn renewed_after_the_warning_shot() {
        let moments = [(2400, None, Some(Step::Term)), (9900, None, None), (2400, None, None)];
        check(OnLost::Term, &moments);
    }

    #[test]
    fn short_leases_leave_time_to_end() {
        for millis in [20, 100, 500, 1000, 10_000] {
            let escalation = Escalation::new(OnLost::Term, Duration::from_millis(millis));
            assert!(escalation.kill_margin() < escalation.lease / 4, "{millis}");
        }
    }
}
