//! No two guards of one key are ever valid at once, whatever happens to the connections.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use dflockd_client::{Client, Guard, Instant, OnDisconnect};
use dflockd_testkit::eventually::tasks::soon;
use dflockd_testkit::millis;
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::proxy::Proxy;
use super::server::Process;

const LEASE: Duration = Duration::from_millis(400);
const WORK: Duration = Duration::from_secs(12);

/// All guards that have been handed out and not given back.
#[derive(Default)]
struct Guards {
    now: Mutex<Vec<Arc<Guard>>>,
    /// The highest fence of a guard that was valid when it came.
    highest: AtomicU64,
    grants: AtomicU64,
    losses: AtomicU64,
}

impl Guards {
    /// Nobody can come or go while it looks, so two that answer yes are valid at the instant of the first answer.
    fn check(&self) {
        let now = self.now.lock();
        let valid: Vec<u64> =
            now.iter().filter(|guard| guard.is_valid()).map(|guard| guard.fence()).collect();
        assert!(valid.len() <= 1, "valid at once: {valid:?}");
    }

    fn add(&self, guard: Guard) -> Arc<Guard> {
        let guard = Arc::new(guard);
        let mut now = self.now.lock();
        now.push(Arc::clone(&guard));
        if guard.is_valid() {
            let before = self.highest.fetch_max(guard.fence(), Ordering::SeqCst);
            assert!(before < guard.fence(), "{before} came before {}", guard.fence());
        }
        drop(now);
        self.grants.fetch_add(1, Ordering::SeqCst);
        self.check();
        guard
    }

    fn remove(&self, guard: Arc<Guard>) -> Guard {
        self.now.lock().retain(|it| !Arc::ptr_eq(it, &guard));
        Arc::into_inner(guard).expect("the list had the only other one")
    }
}

async fn work(client: Client, guards: Arc<Guards>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let begun = Instant::now();
    while begun.elapsed() < WORK {
        let lock = client.lock("k").lease(LEASE);
        let wait = millis(random.random_range(0..600));
        let acquired = match random.random_range(0..4) {
            0 => lock.try_acquire().await,
            1 => match lock.enqueue().await {
                Ok(ticket) => ticket.wait(wait).await,
                Err(error) => Err(error),
            },
            2 => {
                tokio::time::timeout(wait, lock.acquire()).await.map_or(Ok(None), |it| it.map(Some))
            }
            _ => lock.acquire_timeout(wait).await,
        };
        let Ok(Some(guard)) = acquired else {
            tokio::time::sleep(millis(random.random_range(0..20))).await;
            continue;
        };
        let guard = guards.add(guard);
        let hold = millis(random.random_range(0..300));
        let held_at = Instant::now();
        while held_at.elapsed() < hold && guard.is_valid() {
            guards.check();
            tokio::time::sleep(millis(1)).await;
        }
        if !guard.is_valid() {
            guards.losses.fetch_add(1, Ordering::SeqCst);
        }
        let guard = guards.remove(guard);
        match random.random_range(0..3) {
            0 => drop(guard),
            // Dropped half way.
            1 => drop(tokio::time::timeout(millis(1), guard.release()).await),
            _ => drop(guard.release().await),
        }
    }
}

/// Breaks one connection in many ways.
async fn break_things(proxy: Arc<Proxy>, over: Arc<AtomicBool>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    while !over.load(Ordering::SeqCst) {
        tokio::time::sleep(millis(random.random_range(20..500))).await;
        let pause = millis(random.random_range(1..700));
        match random.random_range(0..5) {
            0 | 1 => proxy.cut(),
            2 => {
                let (to, from) = (random.random(), random.random());
                proxy.pass(to, from);
                tokio::time::sleep(pause).await;
                if random.random() {
                    proxy.cut();
                }
            }
            3 => {
                proxy.refuse(true);
                proxy.cut();
                tokio::time::sleep(pause).await;
            }
            _ => {
                proxy.hang();
                tokio::time::sleep(pause).await;
                proxy.cut();
            }
        }
        proxy.pass(true, true);
        proxy.refuse(false);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn never_two_at_once() {
    let seed = std::env::var("DFLOCKD_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed: u64 = seed.unwrap_or(20);
    println!("DFLOCKD_TEST_SEED={seed}");
    let server = Process::start::<&str>(&[]);
    let guards = Arc::<Guards>::default();
    let over = Arc::new(AtomicBool::new(false));
    let (mut workers, mut breakers) = (Vec::new(), Vec::new());
    for number in 0..4 {
        let proxy = Arc::new(Proxy::to(server.address).await);
        let builder = proxy.builder().on_disconnect(OnDisconnect::Keep);
        let client = builder.request_timeout(millis(800)).connect().await.unwrap();
        for task in 0..2 {
            let seed = seed * 100 + number * 10 + task;
            workers.push(tokio::spawn(work(client.clone(), Arc::clone(&guards), seed)));
        }
        let breaker = break_things(proxy, Arc::clone(&over), seed * 1000 + number);
        breakers.push(tokio::spawn(breaker));
    }
    let watcher = {
        let (guards, over) = (Arc::clone(&guards), Arc::clone(&over));
        tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                guards.check();
                tokio::time::sleep(Duration::from_micros(300)).await;
            }
        })
    };
    // The server stands still now and then, once for longer than a lease.
    for pause in [100, 700, 50, 200] {
        tokio::time::sleep(WORK / 6).await;
        server.signal("STOP");
        tokio::time::sleep(millis(pause)).await;
        server.signal("CONT");
    }
    for worker in workers {
        soon("a worker", worker).await.unwrap();
    }
    over.store(true, Ordering::SeqCst);
    for breaker in breakers {
        soon("a breaker", breaker).await.unwrap();
    }
    soon("the watcher", watcher).await.unwrap();
    let (grants, losses) =
        (guards.grants.load(Ordering::SeqCst), guards.losses.load(Ordering::SeqCst));
    println!("{grants} grants, {losses} of them lost");
    assert!(grants > 20, "only {grants}");
}
