//! Sessions: their leases, what is done once however often it is asked, and what happens when clients go.

use std::net::SocketAddr;

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::http::Ask;
use dflockd_testkit::{free_addresses, millis};
use dflockd_wire::grpc::*;
use serde_json::json;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

use super::site::{Either, Members, Session, Site, ask_http, end, info, not_yet, refused};

/// R4, R6: one keep-alive renews all locks that follow the session and no others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_keep_alive_renews_what_follows_the_session() {
    for server in Either::both() {
        let link = server.link().await;
        let session = link.open(2000).await;
        let follow: Vec<String> = (0..20).map(|number| format!("follow{number}")).collect();
        for key in &follow {
            session.lock(key).await;
        }
        let own = AcquireRequest { lease_ms: 1500, ..session.request("own", 0) };
        session.try_acquire(own).await.unwrap().expect("it is free");
        let begun = std::time::Instant::now();
        let mut lost = Vec::new();
        while begun.elapsed() < millis(5000) {
            let kept = session.keep_alive().await.unwrap();
            assert_eq!(kept.renewed, 20);
            lost.extend(kept.lost);
            tokio::time::sleep(millis(300)).await;
        }
        assert_eq!(lost.len(), 1, "promise 11");
        assert_eq!(&lost[0].key[..], b"own", "promise 12");
        for key in &follow {
            assert_eq!(link.describe(key).await.expect("it is held").holders_total, 1);
        }
        // Silence, and all of it goes.
        link.wait_for_holders("follow0", 0).await;
        link.wait_for_holders("follow19", 0).await;
    }
}

/// A stream tells of lost locks as they are lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_keeps_alive_and_tells_of_losses() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let session = link.open(3000).await;
    let (sender, requests) = mpsc::channel(4);
    let beat = || KeepAliveRequest { session: session.id.clone(), ack_through: 0 };
    sender.send(beat()).await.unwrap();
    let stream = link.sessions().keep_alive_stream(ReceiverStream::new(requests)).await;
    let mut stream = stream.unwrap().into_inner();
    let first = soon("the first answer", stream.message()).await.unwrap().unwrap();
    assert_eq!((first.valid_for_ms, first.renewed), (3000, 0));
    let own = AcquireRequest { lease_ms: 200, ..session.request("own", 0) };
    let own = session.try_acquire(own).await.unwrap().expect("it is free");
    session.lock("k").await;
    let told = soon("the loss", stream.message()).await.unwrap().unwrap();
    assert_eq!((told.valid_for_ms, told.lost.len(), told.lost[0].fence), (0, 1, own.fence));
    sender.send(KeepAliveRequest::default()).await.unwrap();
    let second = soon("the second answer", stream.message()).await.unwrap().unwrap();
    assert_eq!((second.valid_for_ms, second.renewed), (3000, 1));
    session.close().await.unwrap();
    refused(Err::<(), _>(end(&mut stream).await), Code::NotFound, Reason::SessionGone);
}

/// Promise 19: the same number is the same request, whatever connection it comes through.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_id_makes_once() {
    let site = Site::start(&[]);
    let (link, other) = (site.link().await, site.link().await);
    let session = link.open(0).await;
    let add = |request_id, ack_through| AddCounterRequest {
        session: session.id.clone(),
        request_id,
        ack_through,
        key: "c".into(),
        delta: 1,
    };
    for _ in 0..3 {
        assert_eq!(link.counters().add(add(1, 0)).await.unwrap().into_inner().value, 1);
        assert_eq!(other.counters().add(add(1, 0)).await.unwrap().into_inner().value, 1);
    }
    assert_eq!(other.counters().add(add(2, 0)).await.unwrap().into_inner().value, 2);
    // Once acknowledged, what came of it is not known any more, and it is not done again.
    assert_eq!(link.counters().add(add(3, 2)).await.unwrap().into_inner().value, 3);
    let late = link.counters().add(add(1, 0)).await.unwrap_err();
    assert!(info(&late).may_have_applied);
    refused(Err::<(), _>(late), Code::Unavailable, Reason::UnknownOutcome);
    assert_eq!(link.counters().add(add(3, 0)).await.unwrap().into_inner().value, 3);

    let request = AcquireRequest { request_id: 10, ..session.request("k", 0) };
    let first = session.try_acquire(request.clone()).await.unwrap().expect("it is free");
    let again = session.through(&other).try_acquire(request).await.unwrap();
    assert_eq!(again, Some(first), "the same grant, not a second one");
    let push = PushRequest {
        session: session.id.clone(),
        request_id: 11,
        key: "q".into(),
        item: "x".into(),
        ..Default::default()
    };
    assert_eq!(link.lists().push(push.clone()).await.unwrap().into_inner().length, 1);
    assert_eq!(other.lists().push(push).await.unwrap().into_inner().length, 1);
    let pop = PopRequest {
        session: session.id.clone(),
        request_id: 12,
        key: "q".into(),
        ..Default::default()
    };
    for link in [&link, &other] {
        let item = link.lists().pop(pop.clone()).await.unwrap().into_inner().item;
        assert_eq!(item.as_deref(), Some(&b"x"[..]), "promise 26");
    }
    // Whoever goes on with the session is told where its numbers stand, if it asks.
    for (tell_last_request_id, told) in [(true, Some(12)), (false, None)] {
        let session = session.id.clone();
        let attach = AttachRequest { session, tell_last_request_id, ..Default::default() };
        let attached = other.sessions().attach(attach).await.unwrap().into_inner();
        assert_eq!(attached.last_request_id, told);
    }
}

/// A client that waits with a number comes back to its place in the queue; both calls get the grant.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_place_in_the_queue_outlives_its_connection() {
    let site = Site::start(&[]);
    let (link, other) = (site.link().await, site.link().await);
    let (holder, first, second) = (link.open(0).await, link.open(0).await, link.open(0).await);
    let held = holder.lock("k").await;
    let request = AcquireRequest { request_id: 1, ..first.request("k", 60_000) };
    let call = first.begin(request.clone());
    link.wait_for_waiters("k", 1).await;
    call.abort();
    let behind = second.begin_lock("k");
    link.wait_for_waiters("k", 2).await;
    // Asked twice more, through another connection, at the same time.
    let first_there = first.through(&other);
    let (mut one, two) = (first_there.begin(request.clone()), first_there.begin(request));
    not_yet(&mut one).await;
    assert_eq!(link.describe("k").await.unwrap().waiters_total, 2, "no place was added or lost");
    holder.unlock("k", &held).await.unwrap();
    let one = soon("its turn", one).await.unwrap().unwrap().expect("granted");
    let two = soon("the same", two).await.unwrap().unwrap().expect("granted");
    assert_eq!(one, two);
    first.unlock("k", &one).await.unwrap();
    let last = soon("the next one", behind).await.unwrap();
    assert!(held.fence < one.fence && one.fence < last.fence, "promises 3 and 5");
}

/// Promise 7: a call without a number that is given up leaves no place behind, and what it got is given back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_given_up_leaves_nothing() {
    for server in Either::both() {
        let link = server.link().await;
        let (holder, waiter) = (link.open(0).await, link.open(0).await);
        let held = holder.lock("k").await;
        // Cancelled.
        let call = waiter.begin_lock("k");
        link.wait_for_waiters("k", 1).await;
        call.abort();
        link.wait_for_waiters("k", 0).await;
        // A deadline.
        let mut request = tonic::Request::new(waiter.request("k", 60_000));
        request.set_timeout(millis(200));
        let late = link.locks().acquire(request).await.unwrap_err();
        assert!(matches!(late.code(), Code::DeadlineExceeded | Code::Cancelled), "{late:?}");
        link.wait_for_waiters("k", 0).await;
        holder.unlock("k", &held).await.unwrap();
        eventually("it is free", async || {
            let lock = link.describe("k").await;
            lock.is_none_or(|it| it.holders_total == 0 && it.waiters_total == 0)
        })
        .await;
    }
}

/// A client that is silent loses its place; one that comes back in time does not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_ends_a_session() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let (silent, back) = (link.open(1000).await, link.open(1000).await);
    let (one, two) = (silent.lock("silent").await, back.lock("back").await);
    assert_eq!((one.valid_for_ms, two.valid_for_ms), (1000, 1000));
    for key in ["silent", "back"] {
        link.wait_for_holders(key, 0).await;
    }
    // Given up here, but not forgotten: it waits at least ten seconds for its client.
    let kept = back.keep_alive().await.unwrap();
    assert_eq!((kept.renewed, kept.valid_for_ms), (0, 1000));
    let again = back.lock("back").await;
    assert!(again.fence > two.fence);
    eventually("it is dead", async || {
        let holds = link.describe("back").await.map_or(0, |lock| lock.holders_total);
        // This one stays alive meanwhile.
        let kept = back.keep_alive().await.unwrap();
        assert_eq!((holds, kept.renewed), (1, 1));
        tokio::time::sleep(millis(200)).await;
        let request =
            AddCounterRequest { session: silent.id.clone(), key: "c".into(), ..Default::default() };
        // Looking would be a sign of life, so not before its time has come.
        if site.server.begun_at.elapsed() < std::time::Duration::from_secs(14) {
            return None;
        }
        let status = link.counters().add(request).await.expect_err("it is over");
        refused(Err::<(), _>(status), Code::NotFound, Reason::SessionGone);
        Some(())
    })
    .await;
}

async fn cancel(session: &Session, request_id: u64) -> Result<CancelResponse, Status> {
    let request = CancelRequest { session: session.id.clone(), request_id };
    Ok(session.link.sessions().cancel(request).await?.into_inner())
}

/// Promises 6 and 19: a request with a number leaves the queue when its client says so, and is answered once for all.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_a_number_is_withdrawn() {
    for durable in [false, true] {
        let (site, members);
        let (link, http) = if durable {
            members = Members::start(1, &[]);
            (members.link(0).await, None)
        } else {
            let (started, http) = Site::start_with_http(&[]);
            site = started;
            (site.link().await, Some(http))
        };
        let (holder, session) = (link.open(30_000).await, link.open(30_000).await);
        let held = holder.lock("k").await;
        let acquire =
            |number| AcquireRequest { request_id: number, ..session.request("k", 600_000) };
        let begin = |number| session.begin(acquire(number));
        let waiting = begin(1);
        link.wait_for_waiters("k", 1).await;
        assert!(cancel(&session, 1).await.unwrap().waited);
        assert_eq!(soon("its end", waiting).await.unwrap().unwrap(), None);
        link.wait_for_waiters("k", 0).await;
        let again = soon("the first answer", session.try_acquire(acquire(1))).await;
        assert_eq!(again.unwrap(), None, "promise 19");
        // Whoever went away without a word can be withdrawn later.
        let left = begin(2);
        link.wait_for_waiters("k", 1).await;
        left.abort();
        assert!(left.await.is_err());
        if let Some(http) = http {
            eventually("the server has seen it go", async || {
                let page = ask_http(http, &Ask::get("/metrics")).text();
                let gone = r#"method="Acquire",code="CANCELLED"} 1"#;
                page.contains(gone)
            })
            .await;
        }
        assert!(cancel(&session, 2).await.unwrap().waited);
        link.wait_for_waiters("k", 0).await;
        let pop = PopRequest {
            session: session.id.clone(),
            request_id: 3,
            key: "l".into(),
            wait_ms: Some(600_000),
            ..Default::default()
        };
        let mut lists = link.lists();
        let popping = tokio::spawn(async move { lists.pop(pop).await });
        eventually("it waits", async || cancel(&session, 3).await.unwrap().waited).await;
        let popped = soon("its end", popping).await.unwrap().unwrap().into_inner();
        assert_eq!(popped.item, None);
        // What was granted stays so; what was never asked is nothing.
        holder.unlock("k", &held).await.unwrap();
        let granted = session.try_acquire(acquire(4)).await.unwrap().expect("it is free");
        for number in [4, 77] {
            assert!(!cancel(&session, number).await.unwrap().waited, "{number}");
        }
        assert_eq!(link.describe("k").await.unwrap().holders[0].fence, granted.fence);
        refused(cancel(&session, 0).await, Code::InvalidArgument, Reason::BadRequest);
        session.unlock("k", &granted).await.unwrap();
    }
}

/// Promise 17: through another member as well, which takes the session over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_is_withdrawn_through_another_member() {
    let members = Members::start(3, &[]);
    let (here, there) = (members.link(0).await, members.link(1).await);
    let (holder, session) = (there.open(30_000).await, here.open(30_000).await);
    holder.lock("k").await;
    let request = AcquireRequest { request_id: 1, ..session.request("k", 600_000) };
    let call = session.begin(request.clone());
    there.wait_for_waiters("k", 1).await;
    let moved = session.through(&there);
    cancel(&moved, 1).await.unwrap();
    refused(soon("its end", call).await.unwrap(), Code::NotFound, Reason::SessionGone);
    there.wait_for_waiters("k", 0).await;
    let again = soon("its answer", moved.try_acquire(request)).await;
    assert_eq!(again.unwrap(), None, "promise 19");
}

/// R8: whoever closes a session by gRPC has not lost a connection. Its locks and places go before it is answered,
/// although locks of lost connections stay. DELETE of HTTP is a disconnect: its places go, its locks stay.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_that_is_closed_releases_all() {
    let host = dflockd_testkit::host();
    let http: SocketAddr = free_addresses(host, 1)[0];
    let port = http.port().to_string();
    let flags = ["--auto-release", "lease", "--http-host", &host.to_string(), "--http-port", &port];
    let members = Members::start(1, &flags);
    let link = members.link(0).await;
    let other = link.open(60_000).await;
    other.lock("theirs").await;

    let session = link.open(60_000).await;
    session.lock("mine").await;
    let waiting = session.begin(session.request("theirs", 600_000));
    link.wait_for_waiters("theirs", 1).await;
    session.close().await.unwrap();
    assert_eq!(link.describe("mine").await.map_or(0, |lock| lock.holders_total), 0);
    assert_eq!(link.describe("theirs").await.map_or(9, |lock| lock.waiters_total), 0);
    refused(soon("its end", waiting).await.unwrap(), Code::NotFound, Reason::SessionGone);

    let opened = ask_http(http, &Ask::post("/v1/sessions", &json!({}))).ok();
    let id = opened["session_id"].as_str().unwrap();
    let lock = |key: &str, wait: u64| {
        let body = json!({ "acquire_timeout_s": wait, "lease_ttl_s": 600 });
        Ask::post(&format!("/v1/locks/{key}"), &body).session(id)
    };
    assert_eq!(ask_http(http, &lock("web", 0)).ok()["status"], "ok");
    let queued = Ask::post("/v1/locks/theirs/enqueue", &json!({})).session(id);
    assert_eq!(ask_http(http, &queued).ok()["status"], "queued");
    link.wait_for_waiters("theirs", 1).await;
    let delete = Ask::new("DELETE", &format!("/v1/sessions/{id}"));
    ask_http(http, &delete).empty();
    assert_eq!(link.describe("web").await.map_or(0, |lock| lock.holders_total), 1);
    assert_eq!(link.describe("theirs").await.map_or(9, |lock| lock.waiters_total), 0);
    ask_http(http, &lock("web", 0)).refused(410, "session_gone");
    ask_http(http, &delete).refused(410, "session_gone");

    // A connection that ends says nothing of the kind.
    let mut line = members.cluster.connect(0);
    line.lock("line", "0 600");
    drop(line);
    let after = members.cluster.connect(0).ask("stats", "_", "");
    assert!(after.starts_with("ok "), "{after}");
    assert_eq!(link.describe("line").await.expect("it is held").holders_total, 1);
}
