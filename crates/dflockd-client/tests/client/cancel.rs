//! Futures that are dropped half way leave nothing behind.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use dflockd_client::{Client, Error, Guard, Instant, OnDisconnect};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{LIMIT, millis};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::task::JoinHandle;

use super::proxy::Proxy;
use super::server::{Either, LONG, Process, acquiring, crowd, crowded};

/// Polls a future so often, then drops it. None if it was not ready by then.
async fn drop_after<F: Future>(mut polls: usize, future: F) -> Option<F::Output> {
    let mut future = Box::pin(future);
    poll_fn(|context| {
        if polls == 0 {
            return Poll::Ready(None);
        }
        polls -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if polls == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}

/// Drops what came of it, and waits until nothing of it is left; whether there was an outcome.
async fn dropped<T>(outcome: Option<T>, other: &Client, key: &str) -> bool {
    let complete = outcome.is_some();
    drop(outcome);
    crowded(other, key, (0, 0)).await;
    complete
}

/// Gives up something that waits for a key that is held: it leaves the queue.
async fn abort_waiting<T>(waiting: JoinHandle<T>, other: &Client, key: &str) {
    crowded(other, key, (1, 1)).await;
    waiting.abort();
    crowded(other, key, (1, 0)).await;
}

type Asking = Pin<Box<dyn Future<Output = Result<Option<Guard>, Error>> + Send>>;

/// Every way to ask for a lock, on a key of its own.
fn every_way(client: &Client) -> Vec<(&'static str, Asking)> {
    let (lock, semaphore) = (client.lock("lock").lease(LONG), client.semaphore("sem", 1));
    let (read, write) = (client.rw_lock("read").read(), client.rw_lock("write").write());
    let (election, semaphore) = (client.election("election"), semaphore.lease(LONG));
    let (read, write, election) = (read.lease(LONG), write.lease(LONG), election.lease(LONG));
    let (limited, tried) = (lock.clone(), lock.clone());
    let queued = client.lock("queued").lease(LONG);
    vec![
        ("lock", Box::pin(async move { lock.acquire().await.map(Some) })),
        ("lock", Box::pin(async move { limited.acquire_timeout(LIMIT).await })),
        ("lock", Box::pin(async move { tried.try_acquire().await })),
        ("sem", Box::pin(async move { semaphore.acquire().await.map(Some) })),
        ("read", Box::pin(async move { read.acquire().await.map(Some) })),
        ("write", Box::pin(async move { write.acquire().await.map(Some) })),
        ("election", Box::pin(async move { election.acquire().await.map(Some) })),
        ("queued", Box::pin(async move { queued.enqueue().await?.wait(LIMIT).await })),
    ]
}

/// What holds all keys of `every_way`.
async fn holders(client: &Client) -> Vec<Guard> {
    let mut guards = vec![
        client.semaphore("sem", 1).lease(LONG).acquire().await.unwrap(),
        client.rw_lock("read").write().lease(LONG).acquire().await.unwrap(),
        client.rw_lock("write").write().lease(LONG).acquire().await.unwrap(),
    ];
    for key in ["lock", "election", "queued"] {
        guards.push(client.lock(key).lease(LONG).acquire().await.unwrap());
    }
    guards
}

/// On a free key: the grant is on its way at every point.
#[tokio::test]
async fn dropped_at_every_point_while_it_is_free() {
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        for way in 0..every_way(&client).len() {
            let mut polls = 0;
            loop {
                let (key, asking) = every_way(&client).swap_remove(way);
                let outcome = soon("the end", drop_after(polls, asking)).await;
                if dropped(outcome, &other, key).await {
                    break;
                }
                polls += 1;
            }
            assert!(polls > 1, "way {way} has points to be dropped at");
        }
        let _all = soon("all keys", holders(&other)).await;
    }
}

/// On a key that is held: it waits, is dropped after so many polls, or the lock comes.
#[tokio::test]
async fn dropped_at_every_point_while_it_waits() {
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        for way in (0..every_way(&client).len()).filter(|way| *way != 2) {
            for polls in 0.. {
                let held = holders(&other).await;
                let (key, asking) = every_way(&client).swap_remove(way);
                let waiting = tokio::spawn(drop_after(polls, asking));
                // At some of the points it has left before it was seen.
                let seen = async || waiting.is_finished() || crowd(&other, key).await == (1, 1);
                eventually("it waits", seen).await;
                drop(held);
                let outcome = soon("the end", waiting).await.unwrap();
                if dropped(outcome, &other, key).await {
                    break;
                }
                assert!(polls < 50, "it never completes");
            }
        }
    }
}

/// Everybody who waits and gives up leaves the queue, while the lock is still held.
#[tokio::test]
async fn dropped_while_it_waits() {
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        let _held = holders(&other).await;
        // The third one does not wait.
        for way in (0..every_way(&client).len()).filter(|way| *way != 2) {
            let (key, asking) = every_way(&client).swap_remove(way);
            abort_waiting(tokio::spawn(asking), &other, key).await;
        }
    }
}

/// The lock has been granted after waiting and is being renewed before it is handed out.
#[tokio::test]
async fn dropped_while_the_grant_is_renewed() {
    // Longer than a hundredth of the lease: then it is renewed first.
    let (lease, wait) = (Duration::from_secs(15), millis(200));
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        for ticket in [false, true] {
            for polls in 0.. {
                let held = other.lock("k").lease(LONG).acquire().await.unwrap();
                let lock = client.lock("k").lease(lease);
                let asking = async move {
                    if ticket {
                        lock.enqueue().await?.wait(LIMIT).await
                    } else {
                        lock.acquire_timeout(LIMIT).await
                    }
                };
                let waiting = tokio::spawn(drop_after(polls, asking));
                tokio::time::sleep(wait).await;
                held.release().await.unwrap();
                let outcome = soon("the end", waiting).await.unwrap();
                let dropped_at = Instant::now();
                let complete = dropped(outcome, &other, "k").await;
                assert!(dropped_at.elapsed() < lease / 2, "it waited for the lease to end");
                if complete {
                    assert!(polls > 2, "there was a renewal to wait for");
                    break;
                }
            }
        }
    }
}

/// Three clients drop hundreds of requests at random moments while others take turns; with cuts as well.
async fn storm(server: &Either, clients: Vec<Client>, between: impl AsyncFn()) {
    let over = Arc::new(AtomicBool::new(false));
    let turns = {
        let (lock, over) = (server.client().await.lock("lock").lease(LONG), Arc::clone(&over));
        tokio::spawn(async move {
            let mut turns = 0;
            while !over.load(Ordering::SeqCst) {
                let guard = lock.acquire().await.unwrap();
                tokio::time::sleep(millis(turns % 3)).await;
                guard.release().await.unwrap();
                turns += 1;
            }
            turns
        })
    };
    let droppers = clients.iter().enumerate().map(|(number, client)| {
        let client = client.clone();
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(u64::try_from(number).unwrap());
            let begun = Instant::now();
            let mut mine = 0;
            while mine < 110 {
                assert!(begun.elapsed() < LIMIT * 2, "too slow");
                let (_, asking) = every_way(&client).swap_remove(random.random_range(0..2));
                let outcome = if random.random() {
                    let time = Duration::from_micros(random.random_range(0..4000));
                    tokio::time::timeout(time, asking).await.ok()
                } else {
                    drop_after(random.random_range(0..6), asking).await
                };
                mine += usize::from(outcome.is_none());
            }
        })
    });
    let droppers: Vec<_> = droppers.collect();
    while !droppers.iter().all(JoinHandle::is_finished) {
        between().await;
        tokio::time::sleep(millis(10)).await;
    }
    for dropper in droppers {
        dropper.await.unwrap();
    }
    over.store(true, Ordering::SeqCst);
    assert!(soon("a last turn", turns).await.unwrap() > 10);

    let other = server.client().await;
    crowded(&other, "lock", (0, 0)).await;
    assert!(other.lock("lock").try_acquire().await.unwrap().is_some());
    // Their sessions are as good as before.
    for client in &clients {
        assert!(soon("a lock", client.lock("lock").acquire()).await.unwrap().is_valid());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_under_contention() {
    for server in Either::both() {
        let clients = [server.client().await, server.client().await, server.client().await];
        storm(&server, clients.to_vec(), async || {}).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropped_under_contention_and_cuts() {
    let server = Process::start::<&str>(&[]);
    let proxy = Proxy::to(server.address).await;
    let mut clients = Vec::new();
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Keep, OnDisconnect::Release] {
        clients.push(proxy.builder().on_disconnect(on_disconnect).connect().await.unwrap());
    }
    let server = Either::Process(server);
    storm(&server, clients, async || {
        proxy.cut();
        tokio::time::sleep(millis(25)).await;
    })
    .await;
}

/// The whole client goes with the future, as at the end of a program.
#[tokio::test]
async fn dropped_together_with_the_client() {
    for server in Either::both() {
        let other = server.client().await;
        for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
            // All that is left of a client.
            let lock = async || {
                let builder = Client::builder().on_disconnect(on_disconnect);
                server.client_with(builder).await.unwrap().lock("lock").lease(LONG)
            };
            for polls in 0..4 {
                let lock = lock().await;
                let outcome = drop_after(polls, async move { lock.acquire().await }).await;
                dropped(outcome, &other, "lock").await;
            }
            // While it waits.
            let guard = other.lock("lock").lease(LONG).acquire().await.unwrap();
            abort_waiting(acquiring(lock().await), &other, "lock").await;
            guard.release().await.unwrap();
        }
    }
}

/// The same while the answer that grants it is still under way.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_together_with_the_client_before_the_answer() {
    let server = Process::start::<&str>(&[]);
    let other = server.client().await;
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
        let proxy = Proxy::to(server.address).await;
        let client = proxy.builder().on_disconnect(on_disconnect).connect().await.unwrap();
        proxy.pass(true, false);
        let lock = client.lock("k").lease(LONG);
        drop(client);
        let acquiring = acquiring(lock);
        crowded(&other, "k", (1, 0)).await;
        acquiring.abort();
        assert!(acquiring.await.is_err());
        proxy.pass(true, true);
        crowded(&other, "k", (0, 0)).await;
    }
}

/// A guard that is dropped last of all is released.
#[tokio::test]
async fn a_guard_outlives_its_client() {
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        let guard = client.lock("k").lease(LONG).acquire().await.unwrap();
        drop(client);
        guard.renew().await.unwrap();
        assert!(guard.is_valid());
        drop(guard);
        crowded(&other, "k", (0, 0)).await;
    }
}

/// Over gRPC as well: what was said last is heard, long before the session ends by itself.
#[tokio::test]
async fn a_guard_outlives_its_client_over_grpc() {
    let [.., server] = Either::all();
    let (client, other) = (server.client().await, server.client().await);
    let guard = client.lock("k").lease(LONG).acquire().await.unwrap();
    drop(client);
    let begun = std::time::Instant::now();
    drop(guard);
    crowded(&other, "k", (0, 0)).await;
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

/// An item that was on its way to a pop that was dropped is not lost.
#[tokio::test]
async fn a_dropped_pop_loses_nothing() {
    for server in Either::both() {
        let (client, other) = (server.client().await, server.client().await);
        let list = client.list("l");
        for polls in 0..4 {
            other.list("l").push_right(b"x").await.unwrap();
            let popped = drop_after(polls, list.pop_left_wait(LIMIT)).await;
            let left = u64::from(popped.is_none());
            let back = async || other.list("l").len().await == Ok(left);
            eventually("the item is back or was taken", back).await;
            other.list("l").pop_left().await.unwrap();
        }
        let waiting = tokio::spawn(async move { list.pop_left_wait(LIMIT).await });
        let waits = async |count: u64| {
            let stats = other.stats().await.unwrap();
            let waiters = stats[0]["lists"][0]["pop_waiters"].as_u64().unwrap_or_default();
            waiters == count
        };
        eventually("it waits", async || waits(1).await).await;
        waiting.abort();
        eventually("it does not", async || waits(0).await).await;
    }
}

/// A participant that gives up breaks the barrier for the others.
#[tokio::test]
async fn a_dropped_barrier_lets_nobody_pass() {
    for server in Either::both() {
        let (a, b) = (server.client().await, server.client().await);
        let (one, two) = (a.barrier("b", 3), b.barrier("b", 3));
        let one = tokio::spawn(async move { one.wait(LIMIT).await });
        let two = tokio::spawn(async move { two.wait(LIMIT).await });
        let arrived = async || a.stats().await.unwrap()[0]["barriers"][0]["participants"] == 2;
        eventually("both arrive", arrived).await;
        one.abort();
        assert_eq!(soon("the end", two).await.unwrap(), Ok(false));
    }
}

/// Over gRPC a call withdraws another one. Without that these would wait for longer than this test.
#[tokio::test]
async fn dropped_while_it_waits_over_grpc() {
    const WAIT: Duration = Duration::from_secs(600);
    let [.., server] = Either::all();
    let (client, other) = (server.client().await, server.client().await);
    let _held = holders(&other).await;
    let (lock, queued) = (client.lock("lock").lease(LONG), client.lock("queued").lease(LONG));
    let (semaphore, write) = (client.semaphore("sem", 1), client.rw_lock("write").write());
    let election = client.election("election");
    let all: Vec<(&str, Asking)> = vec![
        ("lock", Box::pin(async move { lock.acquire_timeout(WAIT).await })),
        ("sem", Box::pin(async move { semaphore.acquire_timeout(WAIT).await })),
        ("write", Box::pin(async move { write.acquire_timeout(WAIT).await })),
        ("election", Box::pin(async move { election.acquire_timeout(WAIT).await })),
        ("queued", Box::pin(async move { queued.enqueue().await?.wait(WAIT).await })),
    ];
    for (key, asking) in all {
        abort_waiting(tokio::spawn(asking), &other, key).await;
    }
    // More than can wait at a time: those that have not been sent go, too.
    let many: Vec<_> = (0..1000)
        .map(|_| {
            let lock = client.lock("lock").lease(LONG);
            tokio::spawn(async move { lock.acquire_timeout(WAIT).await })
        })
        .collect();
    eventually("a crowd", async || crowd(&other, "lock").await.1 >= 500).await;
    many.iter().for_each(JoinHandle::abort);
    crowded(&other, "lock", (1, 0)).await;
    let list = client.list("l");
    let popping = tokio::spawn(async move { list.pop_left_wait(WAIT).await });
    let waits = async |count: u64| {
        let about = other.inspect(b"l").await.unwrap();
        let waiters = about.map_or(0, |about| about["pop_waiters"].as_u64().unwrap_or_default());
        waiters == count
    };
    eventually("it waits", async || waits(1).await).await;
    popping.abort();
    eventually("it does not", async || waits(0).await).await;
}
