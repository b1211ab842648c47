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
//! What follows a pass, such as bringing answers to clients, is done by the thread that has driven, after it has
//! released the lock. A thread that has better things to do leaves it to the designated one
//! ([`Combiner::enqueue_and_drive_only`]): the log thread begins its next sync meanwhile.
//!
//! # Why no wake-up is lost
//!
//! A thread with work puts it into the queue and then wakes the designated thread, if that sleeps. The designated
//! thread says that it sleeps and then looks at the queue. Each does its two steps in this order with a fence between,
//! so at least one sees the other. The designated thread does not stay awake for work while another thread drives; that
//! thread looks at the queue after its release, and wakes it then: the same argument with the lock in the place of the
//! queue. What follows a pass is left by a flag in the place of the queue. The timer thread looks at queue and due time
//! under the queue's mutex, and is notified under it. An expected driver takes its word back before it drives: work
//! that was left to it is in the queue by then.
//!
//! `tests/combiner.rs` runs this file under a scheduler that tries thousands of interleavings, and shows that each of
//! these steps is needed.

use std::sync::OnceLock;
use std::time::Duration;

use dflockd_core::bugs::{Bug, bug};

use crate::sync::{
    AtomicBool, AtomicU64, AtomicUsize, Condvar, Mutex, MutexGuard, Ordering, fence, point,
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
    fn needs_timer_thread(&self) -> bool;
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
    /// What follows a pass is left to the designated thread.
    is_after_pass_left: AtomicBool,
    /// When the driven value wants to be driven at the latest. Written under its lock.
    due: AtomicU64,
    /// The due time for which the timer thread waits.
    armed: AtomicU64,
    /// About how many requests are taken at a time.
    load: AtomicUsize,
    #[cfg(feature = "sim")]
    timer_notices: AtomicUsize,
    designated: OnceLock<Designated>,
    /// What the thread that has driven does after it has released the lock, and whether it may wait for others then:
    /// the timer thread may not.
    after_pass: Box<dyn Fn(bool) + Send + Sync>,
}

/// What a thread that has driven does about that which follows a pass.
#[derive(Clone, Copy)]
enum AfterPass {
    /// It does it, and may wait for other threads.
    Wait,
    /// It does it without waiting for anybody.
    NoWait,
    /// It leaves it to the designated thread.
    Leave,
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
            is_after_pass_left: AtomicBool::new(false),
            due: AtomicU64::new(0),
            armed: AtomicU64::new(0),
            load: AtomicUsize::new(0),
            #[cfg(feature = "sim")]
            timer_notices: AtomicUsize::new(0),
            designated: OnceLock::new(),
            after_pass: Box::new(after_pass),
        }
    }

    // ---- For all threads ----

    /// Leaves work to others. `put` says whether there was room for it; if not, nothing happens.
    pub(crate) fn enqueue(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> bool {
        let Some(needs_timer_thread) = self.put(put) else { return false };
        point();
        if needs_timer_thread || !self.has_begun.load(Ordering::SeqCst) {
            if !bug(Bug::TimerUnnoticed) {
                self.wake_timer();
            }
        } else if !self.is_driver_expected.load(Ordering::SeqCst) {
            self.wake_designated();
        }
        true
    }

    /// Drives at once with some work, unless another thread drives, which sees it, or some of it takes long.
    pub(crate) fn enqueue_and_drive(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> bool {
        self.enqueue_and_pass(put, AfterPass::Wait)
    }

    /// As [`Combiner::enqueue_and_drive`], but what follows the pass is left to the designated thread.
    pub(crate) fn enqueue_and_drive_only(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> bool {
        self.enqueue_and_pass(put, AfterPass::Leave)
    }

    fn enqueue_and_pass(
        &self,
        put: impl FnOnce(&mut D::Queue) -> bool,
        after_pass: AfterPass,
    ) -> bool {
        let Some(needs_timer_thread) = self.put(put) else { return false };
        point();
        if needs_timer_thread || !self.has_begun.load(Ordering::SeqCst) {
            self.wake_timer();
        } else {
            self.try_drive(after_pass);
        }
        true
    }

    /// Whether the calling thread is about to drive by [`Combiner::enqueue_and_drive`], so that nobody is to be woken.
    pub(crate) fn expect_driver(&self, is_expected: bool) {
        let is_expected = is_expected || bug(Bug::DriverExpected);
        self.is_driver_expected.store(is_expected, Ordering::SeqCst);
    }

    /// Whether a thread is about to drive.
    pub(crate) fn is_driver_expected(&self) -> bool {
        self.is_driver_expected.load(Ordering::SeqCst)
    }

    /// Whether so little is taken at a time that a thread with work should drive at once.
    pub(crate) fn is_light(&self) -> bool {
        self.load.load(Ordering::Relaxed) <= LIGHT_MAX
    }

    /// Whether work was taken, and then whether the queue has some that takes long.
    fn put(&self, put: impl FnOnce(&mut D::Queue) -> bool) -> Option<bool> {
        let mut queue = self.queue.lock();
        put(&mut queue).then(|| queue.needs_timer_thread())
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

    /// Does what others have left to it, and drives if there is work. False: there is something again, and the thread
    /// may not sleep.
    pub(crate) fn before_sleep(&self) -> bool {
        let Some(designated) = self.designated.get() else { return true };
        if self.is_after_pass_left.swap(false, Ordering::SeqCst) {
            (self.after_pass)(true);
        }
        if self.has_queued() {
            self.try_drive(AfterPass::Wait);
        }
        point();
        designated.is_asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        point();
        if self.has_work() && !bug(Bug::SleepBlind) {
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

    /// Whether there is something to do for the designated thread.
    pub(crate) fn has_work(&self) -> bool {
        self.is_after_pass_left.load(Ordering::SeqCst) || self.has_queued()
    }

    /// Whether work is in the queue that does not take long, while nobody drives or is about to.
    fn has_queued(&self) -> bool {
        let is_left_to_others =
            || self.driven.is_locked() || self.is_driver_expected.load(Ordering::SeqCst);
        if !self.has_begun.load(Ordering::SeqCst) || self.is_over() || is_left_to_others() {
            return false;
        }
        let queue = self.queue.lock();
        !queue.is_empty() && !queue.needs_timer_thread()
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
        self.begin(driven);
        while !self.is_over() {
            self.drive_as_timer();
            self.wait(&until);
        }
        *self.driven.lock() = None;
    }

    /// Lets the value be driven.
    pub(crate) fn begin(&self, driven: Box<D>) {
        *self.driven.lock() = Some(driven);
        self.has_begun.store(true, Ordering::SeqCst);
    }

    /// Drives, and waits for a thread that drives already.
    pub(crate) fn drive_as_timer(&self) {
        self.pass(self.driven.lock(), AfterPass::NoWait);
    }

    /// What the timer thread sees before it sleeps, under the queue's mutex: until when it sleeps at most; none if
    /// there is something for it to do.
    fn arm(&self, queue: &D::Queue) -> Option<u64> {
        let due = self.due.load(Ordering::SeqCst);
        self.armed.store(due, Ordering::SeqCst);
        let has_work = if self.designated.get().is_some() {
            queue.needs_timer_thread()
        } else {
            !queue.is_empty()
        };
        (!has_work && !self.is_over()).then_some(due)
    }

    fn wait(&self, until: impl Fn(u64) -> Duration) {
        let mut queue = self.queue.lock();
        loop {
            let Some(due) = self.arm(&queue) else { return };
            let wait = until(due);
            if wait.is_zero() {
                return;
            }
            // A due time that was set before the thread was armed for it does not notify.
            if due == self.due.load(Ordering::SeqCst) {
                self.timer.wait_for(&mut queue, wait);
            }
        }
    }

    /// Ends a wait of the timer thread, also of [`Combiner::wait_for_work`] and also without work.
    pub(crate) fn wake_timer(&self) {
        // Not between its look at the queue and its sleep.
        drop(self.queue.lock());
        self.timer.notify_all();
        #[cfg(feature = "sim")]
        self.timer_notices.fetch_add(1, Ordering::SeqCst);
    }

    /// How often the timer thread was woken.
    #[cfg(feature = "sim")]
    pub(crate) fn timer_notices(&self) -> usize {
        self.timer_notices.load(Ordering::SeqCst)
    }

    // ---- Driving ----

    /// Drives, unless another thread does, which sees what there is.
    fn try_drive(&self, after_pass: AfterPass) {
        let Some(driven) = self.driven.try_lock() else { return };
        point();
        // Whoever brought what takes long has woken the timer thread.
        if !self.queue.lock().needs_timer_thread() {
            self.pass(driven, after_pass);
        }
    }

    fn pass(&self, mut guard: MutexGuard<'_, Option<Box<D>>>, after_pass: AfterPass) {
        if self.is_over() {
            return;
        }
        let Some(driven) = guard.as_mut() else { return };
        std::mem::swap(&mut *self.queue.lock(), driven.queue());
        let (now, before) = (driven.queue().requests(), self.load.load(Ordering::Relaxed));
        self.load.store(now.max(before - before.div_ceil(8)), Ordering::Relaxed);
        point();
        let due = driven.drive();
        point();
        // Under the lock: a thread that drives later must not be overruled by this one.
        self.due.store(due, Ordering::SeqCst);
        drop(guard);
        point();
        if due < self.armed.load(Ordering::SeqCst) {
            self.wake_timer();
        }
        // Those who came meanwhile have left it to this thread. The designated one looks at its clients first.
        if self.has_queued() && !bug(Bug::LookForgotten) {
            self.wake_designated();
        }
        point();
        match after_pass {
            AfterPass::Wait => (self.after_pass)(true),
            AfterPass::NoWait => (self.after_pass)(false),
            AfterPass::Leave if self.designated.get().is_none() => (self.after_pass)(true),
            AfterPass::Leave => {
                self.is_after_pass_left.store(true, Ordering::SeqCst);
                if !bug(Bug::AnswersLeft) {
                    self.wake_designated();
                }
            }
        }
    }

    // ---- For the simulator, whose threads are steps ----

    /// [`Combiner::wait`] without waiting: until when the timer thread sleeps unless it is woken, none if it does not.
    #[cfg(feature = "sim")]
    pub(crate) fn arm_timer(&self) -> Option<u64> {
        let queue = self.queue.lock();
        self.arm(&queue)
    }

    /// Drops the driven value, which may know the combiner.
    #[cfg(feature = "sim")]
    pub(crate) fn clear(&self) {
        let driven = self.driven.try_lock().and_then(|mut driven| driven.take());
        drop(driven);
    }

    /// Whether another thread drives.
    #[cfg(feature = "sim")]
    pub(crate) fn is_driven(&self) -> bool {
        self.driven.is_locked()
    }

    /// Looks at the driven value, if there is one and nobody drives it.
    #[cfg(feature = "sim")]
    pub(crate) fn with_driven<R>(&self, look: impl FnOnce(&D) -> R) -> Option<R> {
        self.driven.try_lock()?.as_deref().map(look)
    }

    /// Looks at the queue.
    #[cfg(any(test, feature = "sim"))]
    pub(crate) fn with_queue<R>(&self, look: impl FnOnce(&D::Queue) -> R) -> R {
        look(&self.queue.lock())
    }

    // ---- For tests ----

    /// Nothing is driven until the result is dropped.
    #[cfg(test)]
    pub(crate) fn stall(&self) -> impl Drop + '_ {
        self.driven.lock()
    }
}
