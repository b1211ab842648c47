//! Every unary method, what it does and how it refuses, in memory mode, on a durable node and through a follower.

use dflockd_testkit::eventually::tasks::soon;
use dflockd_wire::grpc::compare_and_set_request::Expect;
use dflockd_wire::grpc::*;
use tonic::Code;

use super::site::{Link, Members, Session, Site, refused};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory() {
    let site = Site::start(&["--max-locks", "60", "--max-list-length", "3"]);
    tour(&site.link().await).await;
    let members = site.link().await.cluster().members(MembersRequest {}).await;
    refused(members, Code::FailedPrecondition, Reason::NoCluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn durable() {
    let members = Members::start(1, &["--max-locks", "60", "--max-list-length", "3"]);
    tour(&members.link(0).await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn follower() {
    let members = Members::start(3, &["--max-locks", "60", "--max-list-length", "3"]);
    let follower = members.cluster.follower();
    tour(&members.link(follower).await).await;
}

async fn tour(link: &Link) {
    sessions(link).await;
    locks(link).await;
    two_steps(link).await;
    look(link).await;
    elections(link).await;
    values(link).await;
    lists(link).await;
    barriers(link).await;
    malformed(link).await;
    kinds(link).await;
}

async fn sessions(link: &Link) {
    let opened = link.sessions().open(OpenRequest::default()).await.unwrap().into_inner();
    assert_eq!(opened.ttl_ms, 33_000);
    assert!(opened.session.len() == 40 && opened.number != 0);
    let session = link.open(5000).await;
    let attach = AttachRequest {
        session: session.id.clone(),
        client_name: "me".into(),
        ..Default::default()
    };
    let attached = link.sessions().attach(attach).await.unwrap().into_inner();
    assert_eq!((attached.number, attached.ttl_ms), (session.number, 5000));
    let held = session.lock("s.k").await;
    assert_eq!(held.valid_for_ms, 5000);
    let kept = session.keep_alive().await.unwrap();
    assert_eq!((kept.valid_for_ms, kept.renewed, kept.lost.len()), (5000, 1, 0));
    let close = || CloseRequest { session: session.id.clone() };
    link.sessions().close(close()).await.unwrap();
    refused(link.sessions().close(close()).await, Code::NotFound, Reason::SessionGone);
    refused(session.keep_alive().await, Code::NotFound, Reason::SessionGone);
    let acquired = session.try_acquire(session.request("s.k", 0)).await;
    refused(acquired, Code::NotFound, Reason::SessionGone);
    // What it held is free.
    let next = link.open(0).await.lock("s.k").await;
    assert!(next.fence > held.fence, "promise 3");
}

async fn locks(link: &Link) {
    let (a, b) = (link.open(0).await, link.open(0).await);
    let held = a.lock("l.k").await;
    assert_eq!(u64::from_str_radix(&held.token[..16], 16).unwrap(), held.fence);
    assert_eq!(held.valid_for_ms, 33_000);
    assert_eq!(b.try_acquire(b.request("l.k", 0)).await.unwrap(), None);
    assert_eq!(b.try_acquire(b.request("l.k", 50)).await.unwrap(), None);
    let try_it =
        TryAcquireRequest { session: b.id.clone(), key: "l.k".into(), ..Default::default() };
    let tried = link.locks().try_acquire(try_it.clone()).await.unwrap().into_inner();
    assert_eq!(tried.grant, None);
    let renew = |token: &str, lease_ms| RenewRequest {
        session: a.id.clone(),
        key: "l.k".into(),
        token: token.to_owned(),
        lease_ms,
        ..Default::default()
    };
    let renewed = link.locks().renew(renew(&held.token, 7000)).await.unwrap().into_inner();
    assert_eq!((renewed.fence, renewed.valid_for_ms), (held.fence, 7000));
    let renewed = link.locks().renew(renew(&held.token, 0)).await.unwrap().into_inner();
    assert_eq!(renewed.valid_for_ms, 33_000);
    let wrong = "0".repeat(32);
    refused(link.locks().renew(renew(&wrong, 0)).await, Code::NotFound, Reason::NotHeld);
    // Whoever knows the token can release, without a session.
    let release =
        ReleaseRequest { key: "l.k".into(), token: held.token.clone(), ..Default::default() };
    link.locks().release(release.clone()).await.unwrap();
    refused(link.locks().release(release).await, Code::NotFound, Reason::NotHeld);
    let tried = link.locks().try_acquire(try_it).await.unwrap().into_inner();
    let next = tried.grant.expect("it is free");
    assert!(next.fence > held.fence);
    b.unlock("l.k", &next).await.unwrap();
    // A lease of its own ends by itself.
    let own = AcquireRequest { lease_ms: 200, ..a.request("l.own", 0) };
    let own = a.try_acquire(own).await.unwrap().expect("it is free");
    assert_eq!(own.valid_for_ms, 200);
    let passed_on = b.lock("l.own").await;
    let renew = RenewRequest { key: "l.own".into(), ..renew(&own.token, 0) };
    refused(link.locks().renew(renew).await, Code::NotFound, Reason::LeaseExpired);
    b.unlock("l.own", &passed_on).await.unwrap();
    let lost = a.keep_alive().await.unwrap().lost;
    assert_eq!(lost.len(), 1, "it is told what it lost");
    assert_eq!((&lost[0].key[..], lost[0].fence), (&b"l.own"[..], own.fence));
}

async fn kinds(link: &Link) {
    let (a, b) = (link.open(0).await, link.open(0).await);
    let with = |session: &Session, key: &str, mode: LockMode, limit| AcquireRequest {
        mode: mode.into(),
        limit,
        ..session.request(key, 0)
    };
    for session in [&a, &b] {
        let slot = with(session, "k.sem", LockMode::Semaphore, 2);
        assert!(session.try_acquire(slot).await.unwrap().is_some());
        let reader = with(session, "k.rw", LockMode::Read, 0);
        assert!(session.try_acquire(reader).await.unwrap().is_some());
    }
    let third = with(&a, "k.sem", LockMode::Semaphore, 2);
    assert_eq!(a.try_acquire(third).await.unwrap(), None, "promise 1");
    let other = a.try_acquire(with(&a, "k.sem", LockMode::Semaphore, 3)).await;
    refused(other, Code::FailedPrecondition, Reason::LimitMismatch);
    let writer = with(&a, "k.rw", LockMode::Write, 0);
    assert_eq!(a.try_acquire(writer).await.unwrap(), None, "promise 1");
    let mutex = a.try_acquire(with(&a, "k.rw", LockMode::Mutex, 0)).await;
    refused(mutex, Code::FailedPrecondition, Reason::TypeMismatch);
    // Some are held, so there is no room for as many others as there may be locks.
    let mut refusal = None;
    for number in 0..60 {
        if let Err(status) = a.try_acquire(a.request(&format!("k.many{number}"), 0)).await {
            refusal = Some(status);
            break;
        }
    }
    let full: Result<(), _> = Err(refusal.expect("--max-locks"));
    assert!(super::site::info(full.as_ref().unwrap_err()).retry_after_ms > 0);
    refused(full, Code::ResourceExhausted, Reason::MaxLocks);
    for session in [a, b] {
        session.close().await.unwrap();
    }
}

async fn two_steps(link: &Link) {
    let (a, b) = (link.open(0).await, link.open(0).await);
    let enqueue = |session: &Session| EnqueueRequest {
        session: session.id.clone(),
        key: "two".into(),
        ..Default::default()
    };
    let wait = |session: &Session, wait_ms| WaitRequest {
        session: session.id.clone(),
        key: "two".into(),
        wait_ms,
        ..Default::default()
    };
    let not_enqueued = link.locks().wait(wait(&a, 0)).await;
    refused(not_enqueued, Code::FailedPrecondition, Reason::NotEnqueued);
    let first = link.locks().enqueue(enqueue(&a)).await.unwrap().into_inner();
    let first = first.grant.expect("granted at once");
    let again = link.locks().enqueue(enqueue(&a)).await;
    refused(again, Code::FailedPrecondition, Reason::AlreadyEnqueued);
    let queued = link.locks().enqueue(enqueue(&b)).await.unwrap().into_inner();
    assert_eq!(queued.grant, None);
    let mut waiting = {
        let (link, request) = (link.clone(), wait(&b, 20_000));
        tokio::spawn(async move { link.locks().wait(request).await })
    };
    super::site::not_yet(&mut waiting).await;
    a.unlock("two", &first).await.unwrap();
    let second = soon("the grant", waiting).await.unwrap().unwrap().into_inner();
    let second = second.grant.expect("it was its turn");
    assert!(second.fence > first.fence, "promises 3 and 8");
    b.unlock("two", &second).await.unwrap();
}

async fn look(link: &Link) {
    let a = link.open(0).await;
    let name = "a client with a name";
    let attach =
        AttachRequest { session: a.id.clone(), client_name: name.into(), ..Default::default() };
    link.sessions().attach(attach).await.unwrap();
    for number in 0..5 {
        a.lock(&format!("look.{number}")).await;
    }
    let mut after = bytes::Bytes::new();
    let mut keys = Vec::new();
    loop {
        let request = ListRequest { prefix: "look.".into(), after, limit: 2 };
        let page = link.locks().list(request).await.unwrap().into_inner();
        assert!(page.locks.len() <= 2);
        for lock in page.locks {
            assert_eq!((lock.kind(), lock.limit, lock.holders_total), (LockMode::Mutex, 1, 1));
            assert_eq!((lock.holders[0].session, &*lock.holders[0].client), (a.number, name));
            keys.push(lock.key);
        }
        if page.next.is_empty() {
            break;
        }
        after = page.next;
    }
    assert_eq!(keys, ["look.0", "look.1", "look.2", "look.3", "look.4"]);
    let request = DescribeRequest { key: "look.nothing".into() };
    refused(link.locks().describe(request).await, Code::NotFound, Reason::NotFound);
    a.close().await.unwrap();
}

async fn elections(link: &Link) {
    let (a, b) = (link.open(0).await, link.open(0).await);
    let campaign = |session: &Session| CampaignRequest {
        session: session.id.clone(),
        key: "e".into(),
        ..Default::default()
    };
    let led = link.elections().campaign(campaign(&a)).await.unwrap().into_inner();
    let led = led.grant.expect("nobody else leads");
    let other = link.elections().campaign(campaign(&b)).await.unwrap().into_inner();
    assert_eq!(other.grant, None);
    let proclaim = |session: &Session, token: &str, value: &str| ProclaimRequest {
        session: session.id.clone(),
        key: "e".into(),
        token: token.to_owned(),
        value: value.to_owned().into(),
        lease_ms: 0,
    };
    let request = proclaim(&a, &led.token, "first");
    let told = link.elections().proclaim(request).await.unwrap().into_inner();
    assert_eq!((told.fence, told.valid_for_ms), (led.fence, 33_000));
    let wrong = proclaim(&b, &"0".repeat(32), "other");
    refused(link.elections().proclaim(wrong).await, Code::NotFound, Reason::NotHeld);
    let resign = ResignRequest {
        session: a.id.clone(),
        key: "e".into(),
        token: led.token.clone(),
        ..Default::default()
    };
    link.elections().resign(resign.clone()).await.unwrap();
    refused(link.elections().resign(resign).await, Code::NotFound, Reason::NotHeld);
    let late = proclaim(&a, &led.token, "late");
    refused(link.elections().proclaim(late).await, Code::NotFound, Reason::NotHeld);
    let next = link.elections().campaign(campaign(&b)).await.unwrap().into_inner();
    assert!(next.grant.expect("nobody leads").fence > led.fence, "promise 3");
}

async fn values(link: &Link) {
    let mut counters = link.counters();
    let get = GetCounterRequest { key: "c".into() };
    assert_eq!(counters.get(get.clone()).await.unwrap().into_inner().value, 0);
    let add = |delta| AddCounterRequest { key: "c".into(), delta, ..Default::default() };
    assert_eq!(counters.add(add(5)).await.unwrap().into_inner().value, 5);
    assert_eq!(counters.add(add(-7)).await.unwrap().into_inner().value, -2);
    let set = SetCounterRequest { key: "c".into(), value: i64::MAX, ..Default::default() };
    assert_eq!(counters.set(set).await.unwrap().into_inner().value, i64::MAX);
    refused(counters.add(add(1)).await, Code::OutOfRange, Reason::Overflow);
    assert_eq!(counters.get(get).await.unwrap().into_inner().value, i64::MAX, "promise 23");

    let mut kv = link.kv();
    let get = GetRequest { key: "v".into() };
    assert_eq!(kv.get(get.clone()).await.unwrap().into_inner().entry, None);
    let set = SetRequest { key: "v".into(), value: "one".into(), ..Default::default() };
    let first = kv.set(set).await.unwrap().into_inner().revision;
    let entry = kv.get(get.clone()).await.unwrap().into_inner().entry.expect("just set");
    assert_eq!((&entry.value[..], entry.revision), (&b"one"[..], first));
    let cas = |expect, new_value: &str| CompareAndSetRequest {
        key: "v".into(),
        expect: Some(expect),
        new_value: new_value.to_owned().into(),
        ..Default::default()
    };
    for (expect, written) in [
        (Expect::Absent(true), false),
        (Expect::Value("two".into()), false),
        (Expect::Revision(first + 1000), false),
        (Expect::Revision(first), true),
        (Expect::Revision(first), false),
        (Expect::Value("new".into()), true),
    ] {
        let done = kv.compare_and_set(cas(expect.clone(), "new")).await.unwrap().into_inner();
        assert_eq!(done.written, written, "promise 24: {expect:?}");
        assert_eq!(done.revision > first, written);
    }
    let nothing = CompareAndSetRequest { expect: None, ..cas(Expect::Absent(true), "x") };
    refused(kv.compare_and_set(nothing).await, Code::InvalidArgument, Reason::BadRequest);
    let delete = DeleteRequest { key: "v".into(), ..Default::default() };
    kv.delete(delete.clone()).await.unwrap();
    kv.delete(delete).await.unwrap();
    assert_eq!(kv.get(get.clone()).await.unwrap().into_inner().entry, None);
    let short =
        SetRequest { key: "v".into(), value: "x".into(), ttl_ms: 100, ..Default::default() };
    kv.set(short).await.unwrap();
    dflockd_testkit::eventually::tasks::eventually("its end", async || {
        let entry = link.kv().get(get.clone()).await.unwrap().into_inner().entry;
        entry.is_none()
    })
    .await;
    let publish =
        PublishRequest { channel: "ch".into(), payload: "x".into(), ..Default::default() };
    assert_eq!(link.signals().publish(publish).await.unwrap().into_inner().receivers, 0);
}

async fn lists(link: &Link) {
    let mut lists = link.lists();
    let push = |end: ListEnd, item: &str| PushRequest {
        key: "q".into(),
        end: end.into(),
        item: item.to_owned().into(),
        ..Default::default()
    };
    for (end, item, length) in
        [(ListEnd::Right, "b", 1), (ListEnd::Left, "a", 2), (ListEnd::Right, "c", 3)]
    {
        assert_eq!(lists.push(push(end, item)).await.unwrap().into_inner().length, length);
    }
    let full = lists.push(push(ListEnd::Left, "d")).await;
    refused(full, Code::ResourceExhausted, Reason::ListFull);
    let range = RangeRequest { key: "q".into(), start: 0, stop: -1 };
    let items = lists.range(range).await.unwrap().into_inner().items;
    assert_eq!(items, ["a", "b", "c"]);
    let length = LengthRequest { key: "q".into() };
    assert_eq!(lists.length(length).await.unwrap().into_inner().length, 3);
    let pop = |end: ListEnd, wait_ms| PopRequest {
        key: "q".into(),
        end: end.into(),
        wait_ms,
        ..Default::default()
    };
    for (end, item) in [(ListEnd::Left, "a"), (ListEnd::Right, "c"), (ListEnd::Left, "b")] {
        let popped = lists.pop(pop(end, None)).await.unwrap().into_inner().item;
        assert_eq!(popped.as_deref(), Some(item.as_bytes()), "promise 25");
    }
    for wait_ms in [None, Some(0), Some(20)] {
        assert_eq!(lists.pop(pop(ListEnd::Left, wait_ms)).await.unwrap().into_inner().item, None);
    }
    let mut waiting = {
        let (mut lists, request) = (link.lists(), pop(ListEnd::Left, Some(20_000)));
        tokio::spawn(async move { lists.pop(request).await })
    };
    super::site::not_yet(&mut waiting).await;
    assert_eq!(lists.push(push(ListEnd::Left, "late")).await.unwrap().into_inner().length, 0);
    let popped = soon("the item", waiting).await.unwrap().unwrap().into_inner().item;
    assert_eq!(popped.as_deref(), Some(&b"late"[..]), "promise 26");
}

async fn barriers(link: &Link) {
    let arrive = |session: &Session, count, wait_ms| BarrierWaitRequest {
        session: session.id.clone(),
        key: "b".into(),
        count,
        wait_ms,
        ..Default::default()
    };
    let (a, b) = (link.open(0).await, link.open(0).await);
    let alone = link.barriers().wait(arrive(&a, 2, 20)).await.unwrap().into_inner();
    assert!(!alone.passed);
    let mut waiting = {
        let (mut barriers, request) = (link.barriers(), arrive(&a, 2, 20_000));
        tokio::spawn(async move { barriers.wait(request).await })
    };
    super::site::not_yet(&mut waiting).await;
    let other = link.barriers().wait(arrive(&b, 3, 0)).await;
    refused(other, Code::FailedPrecondition, Reason::BarrierCountMismatch);
    let passed = link.barriers().wait(arrive(&b, 2, 0)).await.unwrap().into_inner();
    assert!(passed.passed, "promise 28");
    assert!(soon("the other", waiting).await.unwrap().unwrap().into_inner().passed);
}

/// What is wrong is said, and nothing is done.
async fn malformed(link: &Link) {
    let bad = |result: Result<_, _>| refused(result, Code::InvalidArgument, Reason::BadRequest);
    let a = link.open(0).await;
    for key in ["", "a b", "a\n", &"k".repeat(257)] {
        bad(a.try_acquire(a.request(key, 0)).await.map(|_| ()));
    }
    let session = |text: &str| AcquireRequest { session: text.to_owned(), ..a.request("k", 0) };
    for text in ["", "x", &"g".repeat(40), &a.id[..39]] {
        bad(a.try_acquire(session(text)).await.map(|_| ()));
    }
    let gone = a.try_acquire(session(&"0".repeat(40))).await;
    refused(gone, Code::NotFound, Reason::SessionGone);
    bad(a.try_acquire(a.request("k", u64::MAX)).await.map(|_| ()));
    let mode = AcquireRequest { mode: 99, ..a.request("k", 0) };
    bad(a.try_acquire(mode).await.map(|_| ()));
    let request_id = AcquireRequest { request_id: 1 << 63, ..a.request("k", 0) };
    bad(a.try_acquire(request_id).await.map(|_| ()));
    for ttl_ms in [999, 3_600_001] {
        let open = OpenRequest { ttl_ms, ..OpenRequest::default() };
        bad(link.sessions().open(open).await.map(|_| ()));
    }
    let name = OpenRequest { client_name: "x".repeat(65), ..OpenRequest::default() };
    bad(link.sessions().open(name).await.map(|_| ()));
    for value in ["", "a\nb"] {
        let set =
            SetRequest { key: "v".into(), value: value.to_owned().into(), ..Default::default() };
        bad(link.kv().set(set).await.map(|_| ()));
    }
    let large =
        SetRequest { key: "v".into(), value: vec![b'x'; 65_534].into(), ..Default::default() };
    bad(link.kv().set(large).await.map(|_| ()));
    // A number of a request needs somebody whose it is.
    let add = AddCounterRequest { key: "c".into(), delta: 1, request_id: 1, ..Default::default() };
    bad(link.counters().add(add).await.map(|_| ()));
}
