//! Flat combining under a scheduler that decides which thread goes on at each step: thousands of interleavings of the
//! files of the engine themselves, with the scheduler's primitives in the place of the real ones. Their waits never
//! time out, so a wake-up that is lost is a deadlock, which the scheduler reports with the interleaving that led to it.
//!
//! `DFLOCKD_SCHEDULES=1000000` tries more of them.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]
#![expect(dead_code, reason = "the engine uses more of these files than the tests do")]

#[path = "../src/replicated/combiner.rs"]
mod combiner;
#[path = "../src/replicated/delivery.rs"]
mod delivery;

/// In the place of `src/sync.rs`.
mod sync {
    use std::ops::{Deref, DerefMut};
    use std::time::Duration;

    pub(crate) use shuttle::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

    /// The scheduler comes in between at each of its primitives.
    pub(crate) const fn point() {}

    pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

    /// Empty only while a condition is waited for.
    pub(crate) struct MutexGuard<'a, T>(Option<shuttle::sync::MutexGuard<'a, T>>);

    impl<T> Mutex<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(shuttle::sync::Mutex::new(value))
        }

        pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
            MutexGuard(Some(self.0.lock().unwrap()))
        }

        pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
            self.0.try_lock().ok().map(|guard| MutexGuard(Some(guard)))
        }

        pub(crate) fn is_locked(&self) -> bool {
            self.try_lock().is_none()
        }
    }

    impl<T> Drop for MutexGuard<'_, T> {
        fn drop(&mut self) {}
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            self.0.as_ref().unwrap()
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            self.0.as_mut().unwrap()
        }
    }

    pub(crate) struct Condvar(shuttle::sync::Condvar);

    impl Condvar {
        pub(crate) fn new() -> Self {
            Self(shuttle::sync::Condvar::new())
        }

        /// Never times out.
        pub(crate) fn wait_for<T>(&self, guard: &mut MutexGuard<'_, T>, _: Duration) {
            let inner = guard.0.take().unwrap();
            guard.0 = Some(self.0.wait(inner).unwrap());
        }

        pub(crate) fn notify_all(&self) {
            self.0.notify_all();
        }
    }
}

use std::time::Duration;

use shuttle::sync::Arc;
use shuttle::thread;

use combiner::{Combiner, Drive, Queue};
use delivery::Delivery;
use sync::{AtomicBool, AtomicU64, Condvar, Mutex, Ordering};

const NEVER: u64 = u64::MAX;

/// Mistakes are switched on for the whole process: meanwhile nothing else is checked.
static MISTAKES: std::sync::RwLock<()> = std::sync::RwLock::new(());

fn check(test: impl Fn() + Send + Sync + 'static) {
    let _without_mistakes = MISTAKES.read().unwrap();
    explore(test);
}

fn explore(test: impl Fn() + Send + Sync + 'static) {
    let schedules = std::env::var("DFLOCKD_SCHEDULES").ok().and_then(|text| text.parse().ok());
    let schedules = schedules.unwrap_or(10_000);
    let test = Arc::new(test);
    let again = Arc::clone(&test);
    shuttle::check_random(move || test(), schedules / 2);
    // Few switches of threads at chosen places find other mistakes than many at random ones.
    shuttle::check_pct(move || again(), schedules / 2, 3);
}

/// Numbers as work; those from 100 on take long.
#[derive(Default)]
struct Work(Vec<u64>);

impl Queue for Work {
    fn requests(&self) -> usize {
        self.0.len()
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn needs_timer_thread(&self) -> bool {
        self.0.iter().any(|&number| number >= 100)
    }
}

/// Work after which the value wants to be driven again at once.
const AGAIN: u64 = 9;

/// Notes what is driven.
struct Noting {
    work: Work,
    /// Now, which is 0, or never.
    due: u64,
    site: Arc<Site>,
}

struct Site {
    done: Mutex<Vec<u64>>,
    came: Condvar,
    /// How often the value was driven again because it wanted to.
    again: AtomicU64,
    /// Delivered in order.
    delivery: Delivery<u64>,
    delivered: Mutex<Vec<u64>>,
    came_to_clients: Condvar,
}

impl Drive for Noting {
    type Queue = Work;

    fn queue(&mut self) -> &mut Work {
        &mut self.work
    }

    fn drive(&mut self) -> u64 {
        if self.work.0.contains(&AGAIN) {
            self.due = 0;
        } else if self.due == 0 {
            self.site.again.fetch_add(1, Ordering::SeqCst);
            self.due = NEVER;
        }
        self.site.delivery.enqueue(&mut self.work.0.clone());
        self.site.done.lock().append(&mut self.work.0);
        self.site.came.notify_all();
        self.due
    }
}

impl Site {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            done: Mutex::new(Vec::new()),
            came: Condvar::new(),
            again: AtomicU64::new(0),
            delivery: Delivery::new(),
            delivered: Mutex::new(Vec::new()),
            came_to_clients: Condvar::new(),
        })
    }

    fn combiner(self: &Arc<Self>) -> Arc<Combiner<Noting>> {
        let site = Arc::clone(self);
        Arc::new(Combiner::new(move |may_wait| {
            site.delivery.run(may_wait, |notices| {
                site.delivered.lock().extend(notices);
                site.came_to_clients.notify_all();
            });
        }))
    }

    /// Waits until so much is done and delivered.
    fn wait_for(&self, count: usize) {
        let mut done = self.done.lock();
        while done.len() < count {
            self.came.wait_for(&mut done, Duration::MAX);
        }
    }
}

/// A thread that sleeps until it is woken, as a worker does.
#[derive(Default)]
struct Bed(shuttle::sync::Mutex<bool>, shuttle::sync::Condvar);

impl Bed {
    fn sleep(&self) {
        let mut is_woken = self.0.lock().unwrap();
        while !*is_woken {
            is_woken = self.1.wait(is_woken).unwrap();
        }
        *is_woken = false;
    }

    fn wake(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_one();
    }
}

fn start_timer(combiner: &Arc<Combiner<Noting>>, site: &Arc<Site>) -> thread::JoinHandle<()> {
    let (combiner, site) = (Arc::clone(combiner), Arc::clone(site));
    thread::spawn(move || {
        let driven = Noting { work: Work::default(), due: NEVER, site };
        combiner.run(Box::new(driven), |due| if due == 0 { Duration::ZERO } else { Duration::MAX });
    })
}

fn start_designated(
    combiner: &Arc<Combiner<Noting>>,
    bed: &Arc<Bed>,
    over: &Arc<AtomicBool>,
) -> thread::JoinHandle<()> {
    let (combiner, bed, over) = (Arc::clone(combiner), Arc::clone(bed), Arc::clone(over));
    thread::spawn(move || {
        let woken = Arc::clone(&bed);
        combiner.designate(move || woken.wake());
        while !over.load(Ordering::SeqCst) {
            if combiner.before_sleep() {
                bed.sleep();
            }
            combiner.after_sleep();
        }
    })
}

/// All threads of a node: timer, designated, and others that have work of each kind.
fn all_is_driven_once_and_delivered_in_order(numbers: &'static [u64], drive: bool) {
    let (site, bed) = (Site::new(), Arc::new(Bed::default()));
    let over = Arc::new(AtomicBool::new(false));
    let combiner = site.combiner();
    let mut threads = vec![start_timer(&combiner, &site), start_designated(&combiner, &bed, &over)];
    let others: Vec<_> = numbers
        .chunks(2)
        .map(|own| {
            let combiner = Arc::clone(&combiner);
            thread::spawn(move || {
                for &number in own {
                    let put = |work: &mut Work| {
                        work.0.push(number);
                        true
                    };
                    assert!(if drive {
                        combiner.enqueue_and_drive(put)
                    } else {
                        combiner.enqueue(put)
                    });
                }
            })
        })
        .collect();
    for other in others {
        other.join().unwrap();
    }
    site.wait_for(numbers.len());
    combiner.end();
    over.store(true, Ordering::SeqCst);
    bed.wake();
    threads.drain(..).for_each(|thread| thread.join().unwrap());
    let done = site.done.lock().clone();
    let mut sorted = done.clone();
    sorted.sort_unstable();
    let mut all = numbers.to_vec();
    all.sort_unstable();
    assert_eq!(sorted, all, "each is driven once");
    for own in numbers.chunks(2).filter(|own| own.len() == 2) {
        let place = |number| done.iter().position(|&other| other == number);
        assert!(place(own[0]) < place(own[1]), "the work of a thread keeps its order: {done:?}");
    }
    assert_eq!(*site.delivered.lock(), done, "what is driven first is delivered first");
}

/// While a thread is about to drive, as the log thread is during a sync, work is left to it.
fn an_expected_driver_drives() {
    let (site, bed) = (Site::new(), Arc::new(Bed::default()));
    let over = Arc::new(AtomicBool::new(false));
    let combiner = site.combiner();
    let threads = [start_timer(&combiner, &site), start_designated(&combiner, &bed, &over)];
    let put = |number| {
        move |work: &mut Work| {
            work.0.push(number);
            true
        }
    };
    let (expected, other) = (Arc::clone(&combiner), Arc::clone(&combiner));
    let others = [
        thread::spawn(move || {
            for number in [1, 2] {
                expected.expect_driver(true);
                thread::yield_now();
                expected.expect_driver(false);
                expected.enqueue_and_drive(put(number));
            }
        }),
        thread::spawn(move || {
            other.enqueue(put(3));
            other.enqueue_and_drive(put(4));
            other.enqueue(put(5));
        }),
    ];
    others.into_iter().for_each(|thread| thread.join().unwrap());
    site.wait_for(5);
    combiner.end();
    over.store(true, Ordering::SeqCst);
    bed.wake();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(*site.delivered.lock(), *site.done.lock());
}

#[test]
fn work_that_is_left_to_an_expected_driver_is_done() {
    check(an_expected_driver_drives);
}

/// A thread that drives may leave what follows to the designated one, as the log thread does under load: it is done,
/// also if nothing else comes.
#[test]
fn what_follows_a_pass_can_be_left_to_the_designated_thread() {
    check(|| {
        let (site, bed) = (Site::new(), Arc::new(Bed::default()));
        let over = Arc::new(AtomicBool::new(false));
        let combiner = site.combiner();
        let threads = [start_timer(&combiner, &site), start_designated(&combiner, &bed, &over)];
        let others = [[1, 2], [3, 4]].map(|numbers| {
            let combiner = Arc::clone(&combiner);
            thread::spawn(move || {
                for number in numbers {
                    combiner.enqueue_and_drive_only(|work| {
                        work.0.push(number);
                        true
                    });
                }
            })
        });
        others.into_iter().for_each(|thread| thread.join().unwrap());
        let mut delivered = site.delivered.lock();
        while delivered.len() < 4 {
            site.came_to_clients.wait_for(&mut delivered, Duration::MAX);
        }
        drop(delivered);
        combiner.end();
        over.store(true, Ordering::SeqCst);
        bed.wake();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(*site.delivered.lock(), *site.done.lock());
    });
}

#[test]
fn work_that_is_left_to_others_is_done() {
    check(|| all_is_driven_once_and_delivered_in_order(&[1, 2, 3, 4], false));
}

#[test]
fn work_of_threads_that_drive_is_done() {
    check(|| all_is_driven_once_and_delivered_in_order(&[1, 2, 3, 4], true));
}

#[test]
fn work_that_takes_long_is_done_by_the_timer_thread() {
    for drive in [true, false] {
        check(move || all_is_driven_once_and_delivered_in_order(&[1, 100, 2, 101], drive));
    }
}

/// Without a designated thread, and for work that came before there was something to drive.
#[test]
fn the_timer_thread_does_everything_alone() {
    check(|| {
        let site = Site::new();
        let combiner = site.combiner();
        let put = |number| {
            move |work: &mut Work| {
                work.0.push(number);
                true
            }
        };
        let early = Arc::clone(&combiner);
        let other = thread::spawn(move || early.enqueue(put(1)));
        let timer = start_timer(&combiner, &site);
        assert!(combiner.enqueue_and_drive(put(2)));
        site.wait_for(2);
        combiner.end();
        assert!(other.join().unwrap());
        timer.join().unwrap();
    });
}

/// A pass of any thread may bring the due time forward: the timer thread notices, whatever it waits for, and no pass
/// that ended before overrules it.
#[test]
fn the_timer_thread_is_punctual() {
    check(|| {
        let (site, bed) = (Site::new(), Arc::new(Bed::default()));
        let over = Arc::new(AtomicBool::new(false));
        let combiner = site.combiner();
        let threads = [start_timer(&combiner, &site), start_designated(&combiner, &bed, &over)];
        let others = [1, AGAIN].map(|number| {
            let combiner = Arc::clone(&combiner);
            thread::spawn(move || {
                combiner.enqueue_and_drive(|work| {
                    work.0.push(number);
                    true
                })
            })
        });
        assert!(others.into_iter().all(|other| other.join().unwrap()));
        let mut done = site.done.lock();
        while site.again.load(Ordering::SeqCst) == 0 {
            site.came.wait_for(&mut done, Duration::MAX);
        }
        drop(done);
        combiner.end();
        over.store(true, Ordering::SeqCst);
        bed.wake();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// The checks above can fail: each of these mistakes is a wake-up that is lost, or a notice that is late or lost.
#[cfg(feature = "bugs")]
#[test]
fn every_mistake_is_found() {
    use dflockd_core::bugs::{Bug, set};

    let left_to_others =
        |numbers| move || all_is_driven_once_and_delivered_in_order(numbers, false);
    let found = |bug, test: Box<dyn Fn() + Send + Sync>| {
        set(Some(bug));
        let explored = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| explore(test)));
        set(None);
        assert!(explored.is_err(), "{bug:?} was not noticed");
    };
    let _alone = MISTAKES.write().unwrap();
    found(Bug::SleepBlind, Box::new(left_to_others(&[1, 2, 3, 4])));
    found(Bug::LookForgotten, Box::new(left_to_others(&[1, 2, 3, 4])));
    found(Bug::TimerUnnoticed, Box::new(left_to_others(&[1, 100, 2, 101])));
    found(Bug::DriverExpected, Box::new(an_expected_driver_drives));
    found(Bug::DeliveryForgotten, Box::new(left_to_others(&[1, 2, 3, 4])));
    found(Bug::DeliveryReversed, Box::new(left_to_others(&[1, 2, 3, 4])));
}
