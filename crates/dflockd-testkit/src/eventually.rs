//! Waiting for what must come, and how long anything may take.

use std::thread;
use std::time::{Duration, Instant};

/// How long anything may take that is bound to happen. Generous, because the machine may be busy; below the usual
/// lease, so that no lease that ended passes for what a test waits for.
pub const LIMIT: Duration = Duration::from_secs(30);

/// Long enough to see that something does not happen.
pub const A_WHILE: Duration = Duration::from_millis(300);

/// How often to ask.
const PAUSE: Duration = Duration::from_millis(5);

/// So many milliseconds.
pub const fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// What can be waited for: that something is so, or a value that is not there yet.
pub trait Awaited {
    /// What there is in the end.
    type Answer;

    /// Whether there is an answer.
    fn answer(self) -> Option<Self::Answer>;
}

impl Awaited for bool {
    type Answer = ();

    fn answer(self) -> Option<()> {
        self.then_some(())
    }
}

impl<T> Awaited for Option<T> {
    type Answer = T;

    fn answer(self) -> Self {
        self
    }
}

/// Asks again and again until there is an answer.
#[track_caller]
pub fn eventually<A: Awaited>(what: &str, ask: impl FnMut() -> A) -> A::Answer {
    within(LIMIT, what, ask)
}

/// Asks again and again until there is an answer, but no longer than this.
#[track_caller]
pub fn within<A: Awaited>(limit: Duration, what: &str, mut ask: impl FnMut() -> A) -> A::Answer {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask().answer() {
            return answer;
        }
        assert!(begun.elapsed() < limit, "waited in vain for: {what}");
        thread::sleep(PAUSE);
    }
}

/// Waiting in tasks of tokio, without holding their thread.
pub mod tasks {
    use std::time::Instant;

    use super::{Awaited, LIMIT, PAUSE};

    /// Asks again and again until there is an answer.
    pub async fn eventually<A: Awaited>(what: &str, mut ask: impl AsyncFnMut() -> A) -> A::Answer {
        let begun = Instant::now();
        loop {
            if let Some(answer) = ask().await.answer() {
                return answer;
            }
            assert!(begun.elapsed() < LIMIT, "waited in vain for: {what}");
            tokio::time::sleep(PAUSE).await;
        }
    }

    /// The outcome of something that is bound to happen.
    pub async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
        let done = tokio::time::timeout(LIMIT, future).await;
        done.unwrap_or_else(|_| panic!("waited in vain for: {what}"))
    }
}
