//! The end of a server.

use dflockd_wire::grpc::{AcquireRequest, ObserveRequest, Reason, WatchRequest};
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::site::{Members, Site, eventually, refused, soon};

/// Who waits is told, streams end with a reason, and the process ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_tells_everybody() {
    let mut site = Site::start(&[]);
    let link = site.link().await;
    let (holder, waiter) = (link.open(0).await, link.open(0).await);
    holder.lock("k").await;
    let call = {
        let waiter = waiter.clone();
        tokio::spawn(async move { waiter.try_acquire(waiter.request("k", 60_000)).await })
    };
    let request = WatchRequest { patterns: vec![">".into()], ..WatchRequest::default() };
    let mut watch = link.watch().watch(request).await.unwrap().into_inner();
    let request = ObserveRequest { key: "e".into() };
    let mut observe = link.elections().observe(request).await.unwrap().into_inner();
    link.wait_for_waiters("k", 1).await;
    let mut health = HealthClient::new(link.channel.clone());
    let watching = health.watch(HealthCheckRequest::default()).await;
    let mut watching = watching.unwrap().into_inner();
    assert_eq!(soon("health", watching.message()).await.unwrap().unwrap().status, 1);
    site.server.signal("TERM");
    let told = soon("its end", call).await.unwrap();
    refused(told, Code::Unavailable, Reason::Draining);
    let ended = loop {
        match soon("its end", watch.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ends with a reason"),
            Err(status) => break status,
        }
    };
    refused(Err::<(), _>(ended), Code::Unavailable, Reason::Draining);
    let ended = loop {
        match soon("its end", observe.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ends with a reason"),
            Err(status) => break status,
        }
    };
    refused(Err::<(), _>(ended), Code::Unavailable, Reason::Draining);
    assert_eq!(soon("health", watching.message()).await.unwrap().unwrap().status, 2);
    assert_eq!(soon("its end", watching.message()).await.unwrap(), None);
    assert!(site.server.wait_for_end().success());
}

/// A member that goes keeps nobody from going on elsewhere, in its place in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_goes_hands_its_sessions_on() {
    let mut members = Members::start(3, &[]);
    let (going, staying) = (0, 1);
    let (here, there) = (members.link(going).await, members.link(staying).await);
    let (holder, waiter) = (there.open(20_000).await, here.open(20_000).await);
    let held = holder.lock("k").await;
    let mine = waiter.lock("mine").await;
    let request = AcquireRequest { request_id: 1, ..waiter.request("k", 60_000) };
    let call = {
        let (waiter, request) = (waiter.clone(), request.clone());
        tokio::spawn(async move { waiter.try_acquire(request).await })
    };
    there.wait_for_waiters("k", 1).await;
    let behind = {
        let other = there.open(20_000).await;
        tokio::spawn(async move { other.lock("k").await })
    };
    there.wait_for_waiters("k", 2).await;
    let node = &mut members.cluster.nodes[going];
    tokio::task::block_in_place(|| node.terminate());
    assert!(soon("its end", call).await.unwrap().is_err());
    let moved = waiter.through(&there);
    let again = {
        let moved = moved.clone();
        tokio::spawn(async move { moved.try_acquire(request).await })
    };
    let kept = eventually("it is there", async || moved.keep_alive().await.ok()).await;
    assert_eq!(kept.renewed, 1, "promise 17");
    holder.unlock("k", &held).await.unwrap();
    let first = soon("its turn", again).await.unwrap().unwrap().expect("granted");
    moved.unlock("k", &first).await.unwrap();
    let second = soon("the next", behind).await.unwrap();
    assert!(first.fence < second.fence, "promise 5: its place was kept");
    moved.unlock("mine", &mine).await.unwrap();
}
