//! Every primitive, with the server in the process and with the built binary.

use std::time::Duration;

use dflockd_client::{Change, Error, ErrorCode, Guard, Instant, LeaderEvent, Lost, Signal};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{LIMIT, millis};

use super::server::{Either, LONG, Process, acquiring, crowd, crowded};

fn refused<T: std::fmt::Debug>(outcome: Result<T, Error>) -> ErrorCode {
    match outcome {
        Err(Error::Refused(code)) => code,
        other => panic!("not refused: {other:?}"),
    }
}

/// The fence of a guard that must be there.
fn held(outcome: Result<Option<Guard>, Error>) -> Guard {
    outcome.unwrap().expect("the lock is free")
}

#[tokio::test]
async fn locks() {
    for server in Either::all() {
        let (a, b) = (server.named("a").await, server.named("b").await);
        let first = held(a.lock("k").try_acquire().await);
        assert_eq!((first.key(), first.token().len()), (&b"k"[..], 32));
        assert_eq!(u64::from_str_radix(&first.token()[..16], 16), Ok(first.fence()));
        assert_eq!(first.lease(), Duration::from_secs(10));
        assert!(first.is_valid());
        assert!(b.lock("k").try_acquire().await.unwrap().is_none());

        let begun = Instant::now();
        assert!(b.lock("k").acquire_timeout(millis(50)).await.unwrap().is_none());
        assert!(begun.elapsed() >= millis(50), "{:?}", begun.elapsed());
        assert_eq!(crowd(&a, "k").await, (1, 0));

        let waiting = acquiring(b.lock("k"));
        crowded(&a, "k", (1, 1)).await;
        let fence = first.fence();
        first.release().await.unwrap();
        let second = soon("the lock passes on", waiting).await.unwrap().unwrap();
        assert!(second.fence() > fence);

        // Dropping releases as well.
        drop(second);
        let third = soon("the lock is free", a.lock("k").acquire()).await.unwrap();
        third.renew().await.unwrap();

        let token = third.forget();
        assert_eq!(crowd(&a, "k").await, (1, 0));
        b.release_token(b"k", false, &token).await.unwrap();
        assert_eq!(crowd(&a, "k").await, (0, 0));
    }
}

#[tokio::test]
async fn a_lock_waits_with_a_limit_and_gets_it() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let first = held(a.lock("k").try_acquire().await);
        let lock = b.lock("k");
        let waiting = tokio::spawn(async move { lock.acquire_timeout(LIMIT).await });
        crowded(&a, "k", (1, 1)).await;
        drop(first);
        assert!(held(soon("the lock", waiting).await.unwrap()).is_valid());
    }
}

#[tokio::test]
async fn semaphores() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let one = held(a.semaphore("s", 2).try_acquire().await);
        let _two = held(b.semaphore("s", 2).try_acquire().await);
        assert!(a.semaphore("s", 2).try_acquire().await.unwrap().is_none());
        let mismatch = b.semaphore("s", 3).try_acquire().await.map(|_| ());
        assert_eq!(refused(mismatch), ErrorCode::LimitMismatch);
        // A lock of the same name is something else.
        let _lock = held(a.lock("s").try_acquire().await);

        drop(one);
        let three = soon("a slot", b.semaphore("s", 2).acquire()).await.unwrap();
        three.renew().await.unwrap();
        three.release().await.unwrap();
    }
}

#[tokio::test]
async fn read_write_locks() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let (rw, other) = (a.rw_lock("rw"), b.rw_lock("rw"));
        let one = held(rw.read().try_acquire().await);
        let two = held(other.read().try_acquire().await);
        assert!(other.write().try_acquire().await.unwrap().is_none());
        let mismatch = a.lock("rw").try_acquire().await.map(|_| ());
        assert_eq!(refused(mismatch), ErrorCode::TypeMismatch);

        let write = other.write();
        let writer = tokio::spawn(async move { write.acquire().await });
        crowded(&a, "rw", (2, 1)).await;
        // Not past a waiting writer.
        assert!(rw.read().try_acquire().await.unwrap().is_none());
        one.release().await.unwrap();
        two.release().await.unwrap();
        let writer = soon("the writer's turn", writer).await.unwrap().unwrap();
        assert!(rw.read().try_acquire().await.unwrap().is_none());
        writer.renew().await.unwrap();
        writer.release().await.unwrap();
        let _again = held(rw.read().lease(LONG).try_acquire().await);
    }
}

#[tokio::test]
async fn elections() {
    for server in Either::all() {
        let (a, b, c) = (server.client().await, server.client().await, server.client().await);
        let mut leaders = c.election("e").observe().await.unwrap();
        let first = held(a.election("e").try_acquire().await);
        assert_eq!(soon("a leader", leaders.next()).await, Some(LeaderEvent::Elected));
        let election = b.election("e");
        let waiting = tokio::spawn(async move { election.acquire().await });
        crowded(&c, "e", (1, 1)).await;
        first.renew().await.unwrap();
        first.release().await.unwrap();
        let second = soon("the second leader", waiting).await.unwrap().unwrap();
        assert_eq!(soon("an end", leaders.next()).await, Some(LeaderEvent::Resigned));
        assert_eq!(soon("a promotion", leaders.next()).await, Some(LeaderEvent::Failover));
        assert_eq!(soon("a leader", leaders.next()).await, Some(LeaderEvent::Elected));
        drop(second);
        assert_eq!(soon("an end", leaders.next()).await, Some(LeaderEvent::Resigned));
        assert_eq!((leaders.dropped(), leaders.interruptions()), (0, 0));
    }
}

#[tokio::test]
async fn barriers() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let barrier = a.barrier("b", 2);
        let first = tokio::spawn(async move { barrier.wait(LIMIT).await });
        let stats = async || {
            let about = b.inspect(b"b").await.unwrap();
            about.filter(|about| about["participants"] == 1).map(drop)
        };
        eventually("one arrives", stats).await;
        let mismatch = b.barrier("b", 3).wait(Duration::ZERO).await;
        assert_eq!(refused(mismatch), ErrorCode::BarrierCountMismatch);
        assert!(b.barrier("b", 2).wait(LIMIT).await.unwrap());
        assert!(soon("the barrier", first).await.unwrap().unwrap());
        // Alone nobody passes.
        assert!(!a.barrier("b", 2).wait(millis(30)).await.unwrap());
    }
}

#[tokio::test]
async fn counters() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        assert_eq!(a.counter("c").get().await, Ok(0));
        assert_eq!(a.counter("c").add(5).await, Ok(5));
        assert_eq!(b.counter("c").add(-7).await, Ok(-2));
        assert_eq!(a.counter("c").get().await, Ok(-2));
        a.counter("c").set(i64::MAX).await.unwrap();
        assert_eq!(refused(b.counter("c").add(1).await), ErrorCode::Error);
        assert_eq!(b.counter("c").get().await, Ok(i64::MAX));
    }
}

#[tokio::test]
async fn values() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let (kv, other) = (a.kv("v"), b.kv("v"));
        assert_eq!(kv.get().await, Ok(None));
        kv.set(b"two words", None).await.unwrap();
        assert_eq!(other.get().await, Ok(Some(b"two words".to_vec())));
        assert_eq!(other.compare_and_set(Some(b"one"), b"three", None).await, Ok(false));
        assert_eq!(other.compare_and_set(None, b"three", None).await, Ok(false));
        assert_eq!(other.compare_and_set(Some(b"two words"), b"three", None).await, Ok(true));
        assert_eq!(kv.get().await, Ok(Some(b"three".to_vec())));
        kv.delete().await.unwrap();
        assert_eq!(other.get().await, Ok(None));
        assert_eq!(other.compare_and_set(None, b"new", None).await, Ok(true));

        let begun = Instant::now();
        kv.set(b"brief", Some(millis(300))).await.unwrap();
        let gone = async || other.get().await.unwrap().is_none();
        eventually("the value's end", gone).await;
        assert!(begun.elapsed() >= millis(300), "{:?}", begun.elapsed());

        for bad in [&b""[..], b"a\nb", b"a\tb", b"a\rb"] {
            assert!(matches!(kv.set(bad, None).await, Err(Error::Invalid(_))), "{bad:?}");
        }
        assert!(matches!(a.kv("a b").get().await, Err(Error::Invalid(_))));
        assert!(matches!(a.kv("").get().await, Err(Error::Invalid(_))));
        assert!(matches!(a.kv("k".repeat(257)).get().await, Err(Error::Invalid(_))));
        assert_eq!(a.kv("k".repeat(256)).get().await, Ok(None));
    }
}

#[tokio::test]
async fn lists() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let (list, other) = (a.list("l"), b.list("l"));
        assert_eq!(list.push_right(b"b").await, Ok(1));
        assert_eq!(list.push_right(b"c d").await, Ok(2));
        assert_eq!(list.push_left(b"a").await, Ok(3));
        assert_eq!(other.range(0, -1).await.unwrap(), ["a", "b", "c d"]);
        assert_eq!(other.len().await, Ok(3));
        assert_eq!(other.pop_left().await, Ok(Some(b"a".to_vec())));
        assert_eq!(other.pop_right().await, Ok(Some(b"c d".to_vec())));
        assert_eq!(other.pop_left_wait(LIMIT).await, Ok(Some(b"b".to_vec())));
        assert_eq!(other.pop_left().await, Ok(None));
        assert_eq!(other.pop_right_wait(millis(30)).await, Ok(None));

        for left in [true, false] {
            let popper = other.clone();
            let popped = tokio::spawn(async move {
                if left {
                    popper.pop_left_wait(LIMIT).await
                } else {
                    popper.pop_right_wait(LIMIT).await
                }
            });
            let waits = async || {
                let about = a.inspect(b"l").await.unwrap();
                about.filter(|about| about["pop_waiters"] == 1).map(drop)
            };
            eventually("somebody waits for an item", waits).await;
            assert_eq!(list.push_left(b"x").await, Ok(0));
            assert_eq!(soon("the item", popped).await.unwrap(), Ok(Some(b"x".to_vec())));
        }
    }
}

/// What a server does not tell in one answer is asked for in several.
#[tokio::test]
async fn more_than_one_answer_takes() {
    for server in Either::all() {
        let client = server.client().await;
        let list = client.list("l");
        for n in 0..40 {
            let item = format!("{n:02}{}", "x".repeat(64_000));
            list.push_right(item.as_bytes()).await.unwrap();
        }
        for (start, stop, first, last) in [(0, -1, 0, 39), (-30, -2, 10, 38), (-99, 99, 0, 39)] {
            let items = list.range(start, stop).await.unwrap();
            let seen: Vec<_> = items.iter().map(|item| &item[..2]).collect();
            let all: Vec<_> = (first..=last).map(|n| format!("{n:02}")).collect();
            assert_eq!(seen, all);
        }
        if matches!(server, Either::Grpc { .. }) {
            // There is no `ls` over gRPC.
            continue;
        }
        let name = "\u{1}".repeat(200);
        for n in 0..2000 {
            client.kv(format!("k{name}{n:04}")).set(b"v", None).await.unwrap();
        }
        assert_eq!(client.keys(b"k", 20_000, None).await.unwrap().len(), 2000);
        assert_eq!(client.keys(b"k", 1500, None).await.unwrap().len(), 1500);
    }
}

#[tokio::test]
async fn signals() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let mut exact = a.listen("jobs.done", None).await.unwrap();
        let mut pattern = a.listen("jobs.*", None).await.unwrap();
        let mut rest = b.listen("jobs.>", None).await.unwrap();
        let mut one = a.listen("jobs.done", Some("workers")).await.unwrap();
        let mut two = b.listen("jobs.done", Some("workers")).await.unwrap();
        let sent = |channel: &str, payload: &str| {
            let (channel, payload) = (channel.to_owned(), payload.as_bytes().to_vec());
            Some(Signal { channel, payload })
        };

        assert_eq!(b.signal("nobody", b"x").await, Ok(0));
        assert_eq!(b.signal("jobs.done", b"first one").await, Ok(4));
        assert_eq!(b.signal("jobs.done", b"second").await, Ok(4));
        assert_eq!(b.signal("jobs.a.b", b"third").await, Ok(1));
        for stream in [&mut exact, &mut pattern, &mut rest] {
            assert_eq!(soon("a signal", stream.next()).await, sent("jobs.done", "first one"));
            assert_eq!(soon("a signal", stream.next()).await, sent("jobs.done", "second"));
        }
        assert_eq!(soon("a signal", rest.next()).await, sent("jobs.a.b", "third"));
        // One each: the group takes turns.
        let got = [soon("one", one.next()).await, soon("two", two.next()).await];
        let expected = [sent("jobs.done", "first one"), sent("jobs.done", "second")];
        assert!(got == expected || got == [expected[1].clone(), expected[0].clone()], "{got:?}");

        drop(exact);
        let fewer = async || b.signal("jobs.done", b"x").await == Ok(3);
        eventually("a stream that was dropped does not listen", fewer).await;
        assert!(matches!(a.signal("jobs.*", b"x").await, Err(Error::Refused(_))));
        assert!(matches!(a.listen("a.>.b", None).await.map(|_| ()), Err(Error::Invalid(_))));
    }
}

#[tokio::test]
async fn watches() {
    for server in Either::all() {
        let (a, b) = (server.client().await, server.client().await);
        let mut watch = a.watch("w.*").await.unwrap();
        let guard = held(b.lock("w.lock").try_acquire().await);
        b.kv("other").set(b"x", None).await.unwrap();
        b.kv("w.kv").set(b"x", None).await.unwrap();
        b.counter("w.c").add(1).await.unwrap();
        b.list("w.l").push_left(b"x").await.unwrap();
        guard.release().await.unwrap();
        let expected = [
            ("acquire", "w.lock"),
            ("kset", "w.kv"),
            ("incr", "w.c"),
            ("lpush", "w.l"),
            ("release", "w.lock"),
        ];
        for (event, key) in expected {
            let change = Change { event: event.to_owned(), key: key.into() };
            assert_eq!(soon("a change", watch.next()).await, Some(change));
        }
    }
}

#[tokio::test]
async fn tickets() {
    for server in Either::all() {
        let (a, b, c) = (server.client().await, server.client().await, server.client().await);
        // Granted at once, and again after it was released.
        for _ in 0..2 {
            let ticket = a.lock("k").enqueue().await.unwrap();
            assert!(ticket.is_granted());
            held(ticket.wait(Duration::ZERO).await).release().await.unwrap();
        }

        let first = held(a.lock("k").try_acquire().await);
        let (second, third) =
            (b.lock("k").enqueue().await.unwrap(), c.lock("k").enqueue().await.unwrap());
        assert!(!second.is_granted() && !third.is_granted());
        assert_eq!(crowd(&a, "k").await, (1, 2));
        // A dropped ticket leaves the queue, and the next one moves up.
        drop(second);
        crowded(&a, "k", (1, 1)).await;
        first.release().await.unwrap();
        let third = held(third.wait(LIMIT).await);
        assert!(third.is_valid());

        // The place is gone with the time, but one can queue again.
        let late = b.lock("k").enqueue().await.unwrap();
        assert!(late.wait(millis(20)).await.unwrap().is_none());
        assert_eq!(crowd(&a, "k").await, (1, 0));
        let again = b.lock("k").enqueue().await.unwrap();
        // A dropped wait leaves the queue as well.
        let wait = again.wait(LIMIT);
        assert!(tokio::time::timeout(millis(20), wait).await.is_err());
        crowded(&a, "k", (1, 0)).await;

        // Granted while nobody waited, then dropped: given back.
        let unclaimed = b.lock("k").enqueue().await.unwrap();
        third.release().await.unwrap();
        crowded(&a, "k", (1, 0)).await;
        drop(unclaimed);
        crowded(&a, "k", (0, 0)).await;

        // A granted one that is dropped.
        drop(a.lock("k").enqueue().await.unwrap());
        crowded(&a, "k", (0, 0)).await;

        for ticket in [
            a.semaphore("s", 1).enqueue().await.unwrap(),
            a.rw_lock("rw").read().enqueue().await.unwrap(),
            a.rw_lock("rw2").write().enqueue().await.unwrap(),
        ] {
            held(ticket.wait(Duration::ZERO).await).release().await.unwrap();
        }
    }
}

#[tokio::test]
async fn a_session_is_handed_over() {
    for server in Either::all() {
        let (a, holder) = (server.client().await, server.client().await);
        let first = held(holder.lock("queued").try_acquire().await);
        let token = held(a.lock("held").lease(LONG).try_acquire().await).forget();
        a.lock("queued").lease(LONG).enqueue().await.unwrap().forget();
        let session = a.session().expect("it is kept");
        drop(a);
        crowded(&holder, "queued", (1, 1)).await;

        let builder = dflockd_client::Client::builder();
        let b = server.client_with(builder.attach(session)).await.unwrap();
        assert_eq!(crowd(&b, "held").await, (1, 0));
        first.release().await.unwrap();
        let guard = held(b.lock("queued").ticket().unwrap().wait(LIMIT).await);
        assert!(guard.is_valid());
        assert!(b.renew_token(b"held", false, &token, LONG).await.unwrap() > LONG / 2);
        b.release_token(b"held", false, &token).await.unwrap();

        let nobody = dflockd_client::Client::builder().attach("0".repeat(32));
        assert!(server.client_with(nobody).await.is_err());
    }
}

/// GUARANTEES 19: whoever takes a session over goes on with numbers that its requests have not had. No clock is asked
/// for that: those of the earlier client are ahead of every one, as if this one's had been set back.
#[tokio::test]
async fn numbers_of_requests_go_on_where_they_were() {
    let dir = dflockd_testkit::Dir::new();
    let durable = dflockd_testkit::cluster::single(&dir);
    for (flags, is_cluster) in [(Vec::new(), false), (durable.clone(), false), (durable, true)] {
        let server = Process::start(&flags);
        let mut first = dflockd_testkit::Client::connect(server.address).unwrap();
        let greeting = first.ask("hello", "first", "mux keep");
        let secret = greeting.strip_prefix("ok keep=").unwrap()[..32].to_owned();
        let number = 1u64 << 62;
        let answer = first.ask(&format!("{number} incr"), "c", "1");
        let count: i64 = answer.rsplit(' ').next().unwrap().parse().unwrap();
        first.ask(&format!("{} ack", number + 1), "_", &number.to_string());
        first.reset();

        let address = server.address.to_string();
        let builder = dflockd_client::Client::builder().attach(secret);
        let builder = if is_cluster { builder.cluster([address]) } else { builder.server(address) };
        let heir = builder.connect().await.unwrap();
        assert_eq!(heir.counter("c").add(1).await, Ok(count + 1), "{flags:?}");
        held(heir.lock("k").try_acquire().await).release().await.unwrap();
    }
}

#[tokio::test]
async fn what_can_be_asked() {
    for server in Either::both() {
        let (a, b) = (server.named("alice").await, server.named("bob").await);
        assert_eq!(a.inspect(b"k").await, Ok(None));
        let guard = held(a.lock("k").try_acquire().await);
        let waiting = acquiring(b.lock("k"));
        crowded(&a, "k", (1, 1)).await;
        let about = b.inspect(b"k").await.unwrap().unwrap();
        assert_eq!(about["kind"], "mutex");
        assert_eq!(about["holders"][0]["client"], "alice");
        assert_eq!(about["holders"][0]["fence"], guard.fence().to_string());
        assert_eq!(about["queue"][0]["client"], "bob");

        a.counter("k2").add(1).await.unwrap();
        a.kv("other").set(b"x", None).await.unwrap();
        let names = |keys: Vec<serde_json::Value>| -> Vec<String> {
            keys.iter().map(|key| key["key"].as_str().unwrap().to_owned()).collect()
        };
        assert_eq!(names(a.keys(b"", 100, None).await.unwrap()), ["k", "k2", "other"]);
        assert_eq!(names(a.keys(b"k", 100, None).await.unwrap()), ["k", "k2"]);
        assert_eq!(names(a.keys(b"k", 1, None).await.unwrap()), ["k"]);
        assert_eq!(names(a.keys(b"", 1, Some(b"k")).await.unwrap()), ["k2"]);
        let stats = a.stats().await.unwrap();
        assert_eq!(stats[0]["locks"][0]["key"], "k");
        a.ping().await.unwrap();

        // Whoever has the token may renew and release.
        let token = guard.token().to_owned();
        assert!(b.renew_token(b"k", false, &token, LONG).await.unwrap() > LONG / 2);
        b.release_token(b"k", false, &token).await.unwrap();
        assert_eq!(refused(b.release_token(b"k", false, &token).await), ErrorCode::Error);
        let _guard = soon("the lock", waiting).await.unwrap().unwrap();
    }
}

#[tokio::test]
async fn administration() {
    let server = Process::start(&["--admin-token", "adm1n"]);
    let (a, b) = (server.client().await, server.client().await);
    let (lock, slot) = (a.lock("k").lease(LONG), a.semaphore("s", 1).lease(LONG));
    let (lock, slot) = (held(lock.try_acquire().await), held(slot.try_acquire().await));
    assert!(b.force_release(b"k", false, lock.fence(), "wrong", "because").await.is_err());
    assert!(b.force_release(b"k", false, lock.fence() + 1, "adm1n", "because").await.is_err());
    assert!(lock.is_valid());
    b.force_release(b"k", false, lock.fence(), "adm1n", "it is stuck").await.unwrap();
    assert_eq!(soon("the loss", lock.lost()).await, Lost::Forced);
    assert!(!lock.is_valid() && slot.is_valid());
    let next = held(b.lock("k").try_acquire().await);
    assert!(next.fence() > lock.fence());
    b.force_release(b"s", true, slot.fence(), "adm1n", "it is stuck").await.unwrap();
    assert_eq!(soon("the loss", slot.lost()).await, Lost::Forced);

    let guard = held(a.lock("other").lease(LONG).try_acquire().await);
    let about = b.inspect(b"other").await.unwrap().unwrap();
    let session = about["holders"][0]["conn"].as_u64().unwrap();
    assert!(b.end_session(session, "wrong", "because").await.is_err());
    b.end_session(session, "adm1n", "it misbehaves").await.unwrap();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Session);
    assert!(!guard.is_valid());
    // The client goes on with a new session. What it sends before it hears of the end may be lost with the old one.
    let again = async {
        loop {
            match a.lock("other").acquire().await {
                Ok(guard) => return guard,
                Err(error) => assert!(error.may_retry(), "{error}"),
            }
        }
    };
    let again = soon("a new session", again).await;
    assert!(again.fence() > guard.fence());
}
