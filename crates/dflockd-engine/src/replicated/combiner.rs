//! Flat combining: many threads have work for one value, and one of them at a time does the work of all.
//!
//! Work goes into a queue. A thread that wants it done try-locks the driven value and lets it take the whole queue. If
//! the try-lock fails, the thread leaves at once: whoever has the lock looks at the queue again after it has released
//! the lock, so nothing is left behind. Nobody waits for the lock but the timer thread.
//!
//! Two threads have duties:
//!
//! | Thread | Drives |
//! | --- | --- |
//! | designated | before it sleeps, if there is work that does not take long; other threads wake it for theirs |
//! | timer | at the time that the driven value has asked for, and for work that takes long |
//!
//! Under load the designated thread reads what many clients sent and then drives once for all of it: to wake a thread
//! for each request costs more than the request. Without a designated thread the timer thread does everything.
//!
//! A thread that is about to drive anyway can say so ([`Combiner::expect_driver`]): meanwhile work is left to it and
//! nobody is woken, so that its pass takes the work of all. The log thread does while it syncs. If it takes longer than
//! expected, the timer thread comes by.
//!
//! # Why no wake-up is lost
//!
//! A thread with work puts it into the queue and then wakes the designated thread, if that sleeps. The designated
//! thread says that it sleeps and then looks at the queue. Each does its two steps in this order with a fence between,
//! so at least one sees the other. The designated thread does not stay awake for work while another thread drives; that
//! thread looks at the queue after its release, and wakes it then: the same argument with the lock in the place of the
//! queue. The timer thread looks at queue and due time under the queue's mutex, and is notified under it. An expected
//! driver takes its word back before it drives: work that was left to it is in the queue by then.
//!
//! `tests/combiner.rs` runs this file under a scheduler that tries thousands of interleavings, and shows that each of
//! these steps is needed.

use std::sync::OnceLock;
use std::time::Duration;

use crate::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence,
};

/// Items at a time up to which the load is light: then a thread with work drives at once.
const LIGHT_MAX: usize = 4;

/// Work for the driven value.
pub(crate) trait Queue: Default {
    /// How many requests of clients there are, which tells how high the load is.
    fn requests(&self) -> usize;

    /// Whether there is no work at all.
    fn is_empty(&self) -> bool;

    /// Whether some of the work takes long: then all of it is left to the timer thread.
    fn is_heavy(&self) -> bool;
}

/// What is driven by one thread at a time.
pub(crate) trait Drive {
    /// Its work.
    type Queue: Queue;

    /// Where the work is put that [`Drive::drive`] is to do. Empty between two calls; its buffers are used again.
    fn queue(&mut self) -> &mut Self::Queue;

    /// Does the work. Returns when it wants to be driven again at the latest, in nanoseconds of its clock.
    fn drive(&mut self) -> u64;
}

/// A queue, the value that takes what is in it, and the threads that see to that.
pub(crate) struct Combiner<D: Drive> {
    queue: Mutex<D::Queue>,
    /// Goes with `queue`: something for the timer thread has come.
    timer: Condvar,
    /// None before [`Combiner::run`] and after its end.
    driven: Mutex<Option<Box<D>>>,
    has_begun: AtomicBool,
    is_over: AtomicBool,
    /// A thread is about to drive, and all work is left to it.
    is_driver_expected: AtomicBool,
    /// When the driven value wants to be driven at the latest. Written under its lock.
    due: AtomicU64,
    /// The due time for which the timer thread waits.
    armed: AtomicU64,
    /// About how many requests are taken at a time.
    load: AtomicUsize,
    designated: OnceLock<Designated>,
    /// What the thread that has driven does after it has released the lock, and whether it may wait for others then:
    /// the timer thread may not.
    after_pass: Box<dyn Fn(bool) + Send + Sync>,
}

struct Designated {
    wake: Box<dyn Fn() + Send + Sync>,
    is_asleep: AtomicBool,
}

impl<D: Drive> Combiner<D> {
    pub(crate) fn new(after_pass: impl Fn(bool) + Send + Sync + 'static) -> Self {
        Self {
            queue: Mutex::new(D::Queue::default()),
            timer: Condvar::new(),
            driven: Mutex::new(None),
            has_begun: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
            is_driver_expected: AtomicBool::new(false),
            due: AtomicU64::new(0),
            armed: AtomicU64::new(0),
            load: AtomicUsize::new(0),
            designated: OnceLock::new(),
            after_pass: Box::new(after_pass),
        }
    }

    // ---- For all threads ----

    /// Leaves work to others. `put` says whether there was room for it; if not, nothing happens.
    pub(crate) fn enqueue(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> bool {
        let Some(is_heavy) = self.put(put) else { return false };
        if is_heavy || !self.has_begun.load(Ordering::SeqCst) {
            self.wake_timer();
        } else if !self.is_driver_expected.load(Ordering::SeqCst) {
            self.wake_designated();
        }
        true
    }

    /// Drives at once with some work, unless another thread drives, which sees it, or some of it takes long.
    pub(crate) fn enqueue_and_drive(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> bool {
        let Some(is_heavy) = self.put(put) else { return false };
        if is_heavy || !self.has_begun.load(Ordering::SeqCst) {
            self.wake_timer();
        } else {
            self.try_drive();
        }
        true
    }

    /// Whether the calling thread is about to drive by [`Combiner::enqueue_and_drive`], so that nobody is to be woken.
    pub(crate) fn expect_driver(&self, is_expected: bool) {
        self.is_driver_expected.store(is_expected, Ordering::SeqCst);
    }

    /// Whether so little is taken at a time that a thread with work should drive at once.
    pub(crate) fn is_light(&self) -> bool {
        self.load.load(Ordering::Relaxed) <= LIGHT_MAX
    }

    /// Whether work was taken, and then whether the queue has some that takes long.
    fn put(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> Option<bool> {
        let mut queue = self.queue.lock();
        put(&mut queue).then(|| queue.is_heavy())
    }

    /// Nothing is driven any more, and [`Combiner::run`] ends.
    pub(crate) fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
        self.wake_timer();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    // ---- For the designated thread ----

    /// Makes the calling thread the designated one, unless there is one; `wake` wakes it.
    pub(crate) fn designate(&self, wake: impl Fn() + Send + Sync + 'static) {
        let is_asleep = AtomicBool::new(false);
        let _ = self.designated.set(Designated { wake: Box::new(wake), is_asleep });
    }

    /// Drives if there is work. False: there is work again, and the thread may not sleep.
    pub(crate) fn before_sleep(&self) -> bool {
        let Some(designated) = self.designated.get() else { return true };
        if self.has_work() {
            self.try_drive();
        }
        designated.is_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.has_work() {
            designated.is_asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// The designated thread does not sleep any more.
    pub(crate) fn after_sleep(&self) {
        if let Some(designated) = self.designated.get() {
            designated.is_asleep.store(false, Ordering::SeqCst);
        }
    }

    /// Whether there is work for the designated thread: work that does not take long, while nobody drives or is about
    /// to.
    pub(crate) fn has_work(&self) -> bool {
        let is_left_to_others =
            || self.driven.is_locked() || self.is_driver_expected.load(Ordering::SeqCst);
        if !self.has_begun.load(Ordering::SeqCst) || self.is_over() || is_left_to_others() {
            return false;
        }
        let queue = self.queue.lock();
        !queue.is_empty() && !queue.is_heavy()
    }

    fn wake_designated(&self) {
        let Some(designated) = self.designated.get() else { return self.wake_timer() };
        fence(Ordering::SeqCst);
        if designated.is_asleep.swap(false, Ordering::SeqCst) {
            (designated.wake)();
        }
    }

    // ---- For the timer thread ----

    /// Waits until there is work, before there is something to drive: `wait` at most. Returns all of it, or nothing if
    /// it is over.
    pub(crate) fn wait_for_work(&self, wait: Duration) -> Option<D::Queue> {
        let mut queue = self.queue.lock();
        if queue.is_empty() && !self.is_over() {
            self.timer.wait_for(&mut queue, wait);
        }
        (!self.is_over()).then(|| std::mem::take(&mut *queue))
    }

    /// Lets the value be driven, and is the timer thread, until it is over. `until` says how long it is until a time of
    /// the driven value's clock.
    pub(crate) fn run(&self, driven: Box<D>, until: impl Fn(u64) -> Duration) {
        *self.driven.lock() = Some(driven);
        self.has_begun.store(true, Ordering::SeqCst);
        while !self.is_over() {
            self.pass(self.driven.lock(), false);
            self.wait(&until);
        }
        *self.driven.lock() = None;
    }

    fn wait(&self, until: impl Fn(u64) -> Duration) {
        let mut queue = self.queue.lock();
        loop {
            let due = self.due.load(Ordering::SeqCst);
            self.armed.store(due, Ordering::SeqCst);
            let has_work =
                if self.designated.get().is_some() { queue.is_heavy() } else { !queue.is_empty() };
            let wait = until(due);
            if has_work || wait.is_zero() || self.is_over() {
                return;
            }
            // A due time that was set before the thread was armed for it does not notify.
            if due == self.due.load(Ordering::SeqCst) {
                self.timer.wait_for(&mut queue, wait);
            }
        }
    }

    fn wake_timer(&self) {
        // Not between its look at the queue and its sleep.
        drop(self.queue.lock());
        self.timer.notify_all();
    }

    // ---- Driving ----

    /// Drives, unless another thread does, which sees what there is.
    fn try_drive(&self) {
        let Some(driven) = self.driven.try_lock() else { return };
        // Whoever brought what takes long has woken the timer thread.
        if !self.queue.lock().is_heavy() {
            self.pass(driven, true);
        }
    }

    fn pass(&self, mut guard: MutexGuard<'_, Option<Box<D>>>, may_wait: bool) {
        if self.is_over() {
            return;
        }
        let Some(driven) = guard.as_mut() else { return };
        std::mem::swap(&mut *self.queue.lock(), driven.queue());
        let (now, before) = (driven.queue().requests(), self.load.load(Ordering::Relaxed));
        self.load.store(now.max(before - before.div_ceil(8)), Ordering::Relaxed);
        let due = driven.drive();
        // Under the lock: a thread that drives later must not be overruled by this one.
        self.due.store(due, Ordering::SeqCst);
        drop(guard);
        if due < self.armed.load(Ordering::SeqCst) {
            self.wake_timer();
        }
        // Those who came meanwhile have left it to this thread. The designated one looks at its clients first.
        if self.has_work() {
            self.wake_designated();
        }
        (self.after_pass)(may_wait);
    }

    // ---- For tests ----

    /// Nothing is driven until the result is dropped.
    #[cfg(test)]
    pub(crate) fn stall(&self) -> impl Drop + '_ {
        self.driven.lock()
    }

    /// Looks at the queue.
    #[cfg(test)]
    pub(crate) fn with_queue<R>(&self, look: impl FnOnce(&D::Queue) -> R) -> R {
        look(&self.queue.lock())
    }
}
