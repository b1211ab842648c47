//! What a broken connection does, and a server that comes back empty.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dflockd_client::{Error, Instant, LeaderEvent, Lost, OnDisconnect};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{LIMIT, millis};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::proxy::Proxy;
use super::server::{LONG, Process, SLACK, acquiring, crowd, crowded, held, in_process, proxied};

#[tokio::test]
async fn kept_over_a_cut_in_the_process() {
    let (server, a, b) = in_process().await;
    let guard = held(&a, "k", Duration::from_secs(3)).await;
    let (token, fence) = (guard.token().to_owned(), guard.fence());
    for _ in 0..5 {
        server.cut_connections();
        guard.renew().await.unwrap();
        assert!(guard.is_valid());
        assert!(b.lock("k").try_acquire().await.unwrap().is_none());
    }
    assert_eq!((guard.token(), guard.fence()), (token.as_str(), fence));
    let about = b.inspect(b"k").await.unwrap().unwrap();
    assert_eq!(about["holders"][0]["fence"], fence.to_string());
    // Over whole leases as well.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(4) {
        server.cut_connections();
        assert!(guard.is_valid());
        tokio::time::sleep(millis(100)).await;
    }
    guard.release().await.unwrap();
    assert_eq!(crowd(&b, "k").await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn kept_over_a_cut_of_the_wire() {
    let (server, proxy, client) = proxied(OnDisconnect::Keep).await;
    let other = server.client().await;
    let session = client.session().unwrap();
    let guard = held(&client, "k", Duration::from_secs(6)).await;
    for round in 2..5 {
        proxy.cut();
        eventually("a new connection", async || proxy.connections() >= round).await;
        guard.renew().await.unwrap();
        assert!(guard.is_valid());
        assert!(other.lock("k").try_acquire().await.unwrap().is_none());
    }
    assert_eq!(client.session(), Some(session));
    // The client comes back by itself after a time without a way.
    proxy.refuse(true);
    proxy.cut();
    tokio::time::sleep(millis(300)).await;
    assert!(guard.is_valid());
    proxy.refuse(false);
    guard.renew().await.unwrap();
    let fence = guard.fence();
    guard.release().await.unwrap();
    assert!(held(&other, "k", LONG).await.fence() > fence);
}

/// Every increment that was answered was done once; nothing else was done.
#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_are_done_once() {
    let server = Process::start::<&str>(&[]);
    let proxy = Arc::new(Proxy::to(server.address).await);
    let client = proxy.builder().connect().await.unwrap();
    let (done, unknown) = (Arc::new(AtomicI64::new(0)), Arc::new(AtomicI64::new(0)));
    let over = Arc::new(AtomicBool::new(false));
    let cutter = {
        let (proxy, over) = (Arc::clone(&proxy), Arc::clone(&over));
        tokio::spawn(async move {
            let mut random = StdRng::seed_from_u64(1);
            while !over.load(Ordering::SeqCst) {
                match random.random_range(0..4) {
                    // First executed, but the answers are lost; then neither.
                    way @ 0..2 => {
                        proxy.pass(way == 0, way == 1);
                        tokio::time::sleep(millis(random.random_range(1..20))).await;
                        proxy.cut();
                        proxy.pass(true, true);
                    }
                    _ => proxy.cut(),
                }
                tokio::time::sleep(millis(random.random_range(1..60))).await;
            }
        })
    };
    let workers = (0..8).map(|_| {
        let (counter, done, unknown) =
            (client.counter("c"), Arc::clone(&done), Arc::clone(&unknown));
        tokio::spawn(async move {
            let begun = Instant::now();
            while begun.elapsed() < Duration::from_secs(3) {
                match counter.add(1).await {
                    Ok(_) => done.fetch_add(1, Ordering::SeqCst),
                    Err(error) if error.may_have_applied() => {
                        unknown.fetch_add(1, Ordering::SeqCst)
                    }
                    Err(_) => 0,
                };
            }
        })
    });
    for worker in workers.collect::<Vec<_>>() {
        soon("the increments", worker).await.unwrap();
    }
    over.store(true, Ordering::SeqCst);
    cutter.await.unwrap();
    let value = server.client().await.counter("c").get().await.unwrap();
    let (done, unknown) = (done.load(Ordering::SeqCst), unknown.load(Ordering::SeqCst));
    assert!((done..=done + unknown).contains(&value), "{value}, {done} done, {unknown} unknown");
    // The session never ended, so every answer was found again.
    assert_eq!(unknown, 0);
    assert!(done > 50 && proxy.connections() > 10, "{done} over {}", proxy.connections());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_place_in_the_queue_is_kept() {
    let server = Process::start::<&str>(&[]);
    let proxy = Proxy::to(server.address).await;
    let (first, third) = (server.client().await, server.client().await);
    let second = proxy.builder().connect().await.unwrap();
    let holder = server.client().await;
    let guard = held(&holder, "k", LONG).await;
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for (place, client) in [&first, &second, &third].into_iter().enumerate() {
        let (lock, order) = (client.lock("k").lease(LONG), Arc::clone(&order));
        waiting.push(tokio::spawn(async move {
            let guard = lock.acquire().await.unwrap();
            order.lock().unwrap().push(place);
            guard.release().await.unwrap();
        }));
        crowded(&holder, "k", (1, place + 1)).await;
    }
    proxy.cut();
    eventually("a new connection", async || proxy.connections() >= 2).await;
    second.ping().await.unwrap();
    assert_eq!(crowd(&holder, "k").await, (1, 3));
    guard.release().await.unwrap();
    for waiting in waiting {
        soon("a turn", waiting).await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2]);
}

/// A wait that stays open hinders acknowledgements; thousands of later requests and some cuts cost neither it nor
/// them anything.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_wait_beside_many_requests() {
    let (server, proxy, client) = proxied(OnDisconnect::Keep).await;
    let holder = server.client().await;
    let guard = held(&holder, "k", LONG).await;
    let waiting = acquiring(client.lock("k").lease(LONG));
    crowded(&holder, "k", (1, 1)).await;
    for round in 1..=3 {
        for _ in 0..500 {
            let (one, two) = (client.counter("c"), client.counter("c"));
            let (one, two) = tokio::join!(one.add(1), two.add(1));
            assert!(one.is_ok() && two.is_ok(), "{one:?} {two:?}");
        }
        proxy.cut();
        assert_eq!(client.counter("c").get().await, Ok(round * 1000));
        assert_eq!(crowd(&holder, "k").await, (1, 1));
    }
    guard.release().await.unwrap();
    assert!(soon("the lock", waiting).await.unwrap().unwrap().is_valid());
}

/// Streams subscribe again, and tell that something may have been missed.
#[tokio::test(flavor = "multi_thread")]
async fn streams_come_back() {
    let (server, proxy, client) = proxied(OnDisconnect::Keep).await;
    let other = server.client().await;
    let mut signals = client.listen("s.>", None).await.unwrap();
    let mut watch = client.watch("k").await.unwrap();
    let mut leaders = client.election("e").observe().await.unwrap();
    proxy.cut();
    // Sent again and again: the first may go to the connection that the server does not know to be gone.
    let heard = async || {
        other.signal("s.x", b"hi").await.unwrap();
        tokio::time::timeout(millis(100), signals.next()).await.ok()
    };
    assert_eq!(eventually("it listens again", heard).await.unwrap().payload, b"hi");
    assert_eq!(signals.interruptions(), 1);
    let changed = async || {
        other.counter("k").add(1).await.unwrap();
        tokio::time::timeout(millis(100), watch.next()).await.ok()
    };
    assert_eq!(eventually("it watches again", changed).await.unwrap().event, "incr");
    assert_eq!(watch.interruptions(), 1);
    let guard = other.election("e").acquire().await.unwrap();
    assert_eq!(soon("a leader", leaders.next()).await, Some(LeaderEvent::Elected));
    assert_eq!(leaders.interruptions(), 1);
    guard.release().await.unwrap();
}

/// Granted while there was no connection: the answer comes with the next one.
#[tokio::test(flavor = "multi_thread")]
async fn a_grant_without_a_connection_arrives_later() {
    let (server, proxy, client) = proxied(OnDisconnect::Keep).await;
    let holder = server.client().await;
    let guard = held(&holder, "k", LONG).await;
    let waiting = acquiring(client.lock("k").lease(LONG));
    crowded(&holder, "k", (1, 1)).await;
    proxy.refuse(true);
    proxy.cut();
    let fence = guard.fence();
    guard.release().await.unwrap();
    crowded(&holder, "k", (1, 0)).await;
    proxy.refuse(false);
    let guard = soon("the grant", waiting).await.unwrap().unwrap();
    assert!(guard.is_valid() && guard.fence() > fence);
}

#[tokio::test(flavor = "multi_thread")]
async fn released_by_a_cut() {
    let (server, proxy, client) = proxied(OnDisconnect::Release).await;
    assert_eq!(client.session(), None);
    let other = server.client().await;
    let guard = held(&client, "k", LONG).await;
    let waiting = acquiring(other.lock("k"));
    crowded(&other, "k", (1, 1)).await;
    proxy.cut();
    let cut_at = Instant::now();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Disconnected);
    assert!(cut_at.elapsed() < SLACK, "{:?}", cut_at.elapsed());
    assert!(!guard.is_valid());
    let next = soon("the lock", waiting).await.unwrap().unwrap();
    assert!(next.fence() > guard.fence());
    // Releasing what is lost does no harm to the next holder.
    drop(guard);
    // One that is sent before the client has seen the cut may be lost with it.
    eventually("a new connection", async || client.ping().await.ok()).await;
    next.renew().await.unwrap();
    next.release().await.unwrap();
    assert!(soon("a lock", client.lock("k").acquire()).await.unwrap().is_valid());
}

/// A wait that the cut ended says so: nobody knows what became of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_wait_ends_with_a_cut() {
    let (server, proxy, client) = proxied(OnDisconnect::Release).await;
    let other = server.client().await;
    let _guard = held(&other, "k", LONG).await;
    let waiting = acquiring(client.lock("k"));
    crowded(&other, "k", (1, 1)).await;
    proxy.cut();
    let error = soon("the end", waiting).await.unwrap().map(|_| ()).unwrap_err();
    assert!(matches!(error, Error::Unknown { .. }), "{error}");
    assert!(error.may_have_applied());
    crowded(&other, "k", (1, 0)).await;
}

/// The grant has arrived, but the caller has not looked yet when the connection breaks: what it gets must not
/// look like a lock that is held.
#[tokio::test]
async fn a_grant_of_a_connection_that_is_gone_is_lost() {
    let (server, proxy, client) = proxied(OnDisconnect::Release).await;
    let other = server.client().await;
    let lock = client.lock("k").lease(Duration::from_secs(2000));
    let mut acquiring = Box::pin(lock.try_acquire());
    polled_once(acquiring.as_mut()).await;
    crowded(&other, "k", (1, 0)).await;
    // Answers come in order: behind this one, that of the lock has arrived as well.
    client.ping().await.unwrap();
    proxy.cut();
    crowded(&other, "k", (0, 0)).await;
    // One that is sent before the client has seen the cut may be lost with it.
    eventually("a new connection", async || client.ping().await.ok()).await;
    let _next = held(&other, "k", LONG).await;
    if let Ok(Some(guard)) = acquiring.await {
        let lost = tokio::time::timeout(SLACK, guard.lost()).await;
        assert!(lost.is_ok(), "it believes to hold what somebody else has");
    }
}

/// The same with a session that has ended, and with an operator.
#[tokio::test]
async fn a_grant_that_was_ended_before_it_was_seen_is_lost() {
    let server = Process::start(&["--admin-token", "adm1n"]);
    for forced in [true, false] {
        let (client, other) = (server.client().await, server.client().await);
        let lock = client.lock("k").lease(Duration::from_secs(2000));
        let mut acquiring = Box::pin(lock.try_acquire());
        polled_once(acquiring.as_mut()).await;
        crowded(&other, "k", (1, 0)).await;
        let about = other.inspect(b"k").await.unwrap().unwrap();
        client.ping().await.unwrap();
        let holder = &about["holders"][0];
        if forced {
            let fence = holder["fence"].as_str().unwrap().parse().unwrap();
            other.force_release(b"k", false, fence, "adm1n", "because").await.unwrap();
        } else {
            let session = holder["conn"].as_u64().unwrap();
            other.end_session(session, "adm1n", "because").await.unwrap();
        }
        soon("the push before it, or a new session", client.ping()).await.ok();
        eventually("a session", async || client.ping().await.ok()).await;
        let next = held(&other, "k", LONG).await;
        if let Ok(Some(guard)) = acquiring.await {
            let lost = tokio::time::timeout(SLACK, guard.lost()).await;
            assert!(lost.is_ok(), "it believes to hold what somebody else has");
        }
        next.release().await.unwrap();
    }
}

/// Begins something and does not look again. On a runtime of one thread: another could answer meanwhile.
async fn polled_once<F: Future>(mut future: std::pin::Pin<&mut F>) {
    std::future::poll_fn(|context| {
        assert!(future.as_mut().poll(context).is_pending());
        std::task::Poll::Ready(())
    })
    .await;
}

/// A session that another client has attached to is no longer ours: the first one does not take it back.
#[tokio::test(flavor = "multi_thread")]
async fn a_session_that_was_taken_over_is_not_taken_back() {
    let server = Process::start::<&str>(&[]);
    let proxy = Proxy::to(server.address).await;
    let first = server.client().await;
    let session = first.session().unwrap();
    let second = proxy.builder().attach(session).connect().await.unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(1) {
        second.ping().await.unwrap();
        tokio::time::sleep(millis(20)).await;
    }
    assert_eq!(proxy.connections(), 1, "it was cut off by the client it took over from");
    drop(first);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_crashes_and_comes_back() {
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
        let server = Process::start::<&str>(&[]);
        let client = server.builder().on_disconnect(on_disconnect).connect().await.unwrap();
        let guard = held(&client, "k", LONG).await;
        let fence = guard.fence();
        let server = server.crash_and_restart();
        let expected = match on_disconnect {
            OnDisconnect::Keep => Lost::Session,
            OnDisconnect::Release => Lost::Disconnected,
        };
        assert_eq!(soon("the loss", guard.lost()).await, expected);
        assert!(!guard.is_valid());
        drop(guard);
        let again = soon("a lock of the new server", client.lock("k").acquire()).await.unwrap();
        assert!(again.is_valid() && again.fence() > fence);
        again.renew().await.unwrap();
        drop(server);
    }
}

/// Many clients of a server that comes back: all find it, and what they count afterwards is right.
#[tokio::test(flavor = "multi_thread")]
async fn waiting_over_a_restart_ends_with_an_answer() {
    let server = Process::start::<&str>(&[]);
    let (a, b) = (server.client().await, server.client().await);
    let _guard = held(&a, "k", LONG).await;
    let lock = b.lock("k");
    let waiting = tokio::spawn(async move { lock.acquire_timeout(LIMIT).await });
    crowded(&a, "k", (1, 1)).await;
    let server = server.crash_and_restart();
    let error = soon("an answer", waiting).await.unwrap().map(|_| ()).unwrap_err();
    assert!(error.may_have_applied() && error.may_retry(), "{error}");
    let other = server.client().await;
    crowded(&other, "k", (0, 0)).await;
}
