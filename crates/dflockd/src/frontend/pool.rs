//! Jobs that take a while: few at a time, on threads that may be busy; the others wait in the order they came.
//!
//! Each pool is for one purpose, so that figures for a scrape never wait for somebody who looks at a million keys. How
//! many jobs wait is bounded by whoever asks: a connection has one look at a time.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

/// How often it is looked whether all jobs are done.
const IDLE_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// Something to be done.
pub(crate) type Job = Box<dyn FnOnce() + Send>;
/// Runs a job on a thread that may be busy.
pub(crate) type Background = Arc<dyn Fn(Job) + Send + Sync>;

/// Runs jobs, few at a time.
pub(crate) struct Pool {
    at_once: usize,
    background: Background,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    running: usize,
    waiting: VecDeque<Job>,
}

impl Pool {
    /// One that runs so many jobs at once.
    pub(crate) fn new(at_once: usize, background: &Background) -> Arc<Self> {
        let background = Arc::clone(background);
        Arc::new(Self { at_once, background, state: Mutex::default() })
    }

    /// Does a job, now or when it is its turn.
    pub(crate) fn run(self: &Arc<Self>, job: Job) {
        {
            let mut state = self.state.lock();
            if state.running >= self.at_once {
                state.waiting.push_back(job);
                return;
            }
            state.running += 1;
        }
        let pool = Arc::clone(self);
        (self.background)(Box::new(move || pool.work(job)));
    }

    /// Waits for what a job comes to. None if it panicked. It is not done if nobody waits any more when it is its turn.
    pub(crate) async fn wait<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = oneshot::channel();
        self.run(Box::new(move || {
            if !sender.is_closed() {
                let _ = sender.send(work());
            }
        }));
        receiver.await.ok()
    }

    /// Waits until no job runs.
    pub(crate) async fn idle(&self) {
        while self.state.lock().running > 0 {
            tokio::time::sleep(IDLE_POLL_INTERVAL).await;
        }
    }

    fn work(&self, mut job: Job) {
        loop {
            // The panic is reported; its place must not be lost with it.
            let _ = catch_unwind(AssertUnwindSafe(job));
            let mut state = self.state.lock();
            match state.waiting.pop_front() {
                Some(next) => job = next,
                None => {
                    state.running -= 1;
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::mpsc;

    use super::*;

    fn threads() -> Background {
        Arc::new(|job| {
            std::thread::spawn(job);
        })
    }

    /// GUARANTEES 48: however many jobs there are, few run at a time, and all are done.
    #[test]
    fn few_at_a_time() {
        let pool = Pool::new(3, &threads());
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (sender, done) = mpsc::channel();
        for number in 0..200 {
            let (now, most, sender) = (Arc::clone(&now), Arc::clone(&most), sender.clone());
            pool.run(Box::new(move || {
                most.fetch_max(now.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
                std::thread::yield_now();
                now.fetch_sub(1, Ordering::SeqCst);
                sender.send(number).unwrap();
                assert_ne!(number % 50, 7, "this job fails");
            }));
        }
        drop(sender);
        assert_eq!(done.iter().count(), 200);
        assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
    }

    #[tokio::test]
    async fn what_nobody_waits_for_is_not_done() {
        let pool = Pool::new(1, &threads());
        let (release, held) = mpsc::channel::<()>();
        pool.run(Box::new(move || held.recv().unwrap()));
        let ran = Arc::new(AtomicUsize::new(0));
        let job = |ran: &Arc<AtomicUsize>| {
            let ran = Arc::clone(ran);
            move || ran.fetch_add(1, Ordering::SeqCst)
        };
        let given_up = tokio::time::timeout(Duration::ZERO, pool.wait(job(&ran)));
        assert!(given_up.await.is_err());
        release.send(()).unwrap();
        assert_eq!(pool.wait(job(&ran)).await, Some(0));
    }
}
