//! The end of a server.

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_wire::grpc::*;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::{v1, v1alpha};

use super::site::{Members, Site, admin, end, refused};

/// Who waits is told, streams end with a reason, and the process ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_goes_tells_everybody() {
    let mut site = Site::start(&[]);
    let link = site.link().await;
    let (holder, waiter) = (link.open(0).await, link.open(0).await);
    holder.lock("k").await;
    let call = waiter.begin(waiter.request("k", 60_000));
    let request = WatchRequest { patterns: vec![">".into()], ..WatchRequest::default() };
    let mut watch = link.watch().watch(request).await.unwrap().into_inner();
    let request = ObserveRequest { key: "e".into() };
    let mut observe = link.elections().observe(request).await.unwrap().into_inner();
    link.wait_for_waiters("k", 1).await;
    let mut health = HealthClient::new(link.channel.clone());
    let watching = health.watch(HealthCheckRequest::default()).await;
    let mut watching = watching.unwrap().into_inner();
    assert_eq!(soon("health", watching.message()).await.unwrap().unwrap().status, 1);
    // A line connection that holds something is waited for: it keeps the drain going while this test looks at it.
    let mut line = site.server.connect();
    assert!(line.ask("l", "busy", "0").starts_with("ok "));
    site.server.signal("TERM");
    let told = soon("its end", call).await.unwrap();
    refused(told, Code::Unavailable, Reason::Draining);
    let told = holder.try_acquire(holder.request("another", 0)).await;
    refused(told, Code::Unavailable, Reason::Draining);
    drop(line);
    refused(Err::<(), _>(end(&mut watch).await), Code::Unavailable, Reason::Draining);
    refused(Err::<(), _>(end(&mut observe).await), Code::Unavailable, Reason::Draining);
    assert_eq!(soon("health", watching.message()).await.unwrap().unwrap().status, 2);
    refused(Err::<(), _>(end(&mut watching).await), Code::Unavailable, Reason::Draining);
    assert!(site.server.wait_for_end().success());
}

/// No stream keeps the server, also one whose client has not said anything yet, or says nothing more. The time for the
/// drain is longer than this test waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_streams_do_not_keep_the_server() {
    const ADMIN: &str = "adm1n-of-the-tests";
    let mut site = Site::start(&["--shutdown-timeout", "600", "--admin-token", ADMIN]);
    let link = site.link().await;
    let session = link.open(600_000).await;

    let mut reflection =
        v1::server_reflection_client::ServerReflectionClient::new(link.channel.clone());
    let (ask, questions) = mpsc::channel(4);
    ask.send(v1::ServerReflectionRequest {
        host: String::new(),
        message_request: Some(v1::server_reflection_request::MessageRequest::ListServices(
            String::new(),
        )),
    })
    .await
    .unwrap();
    let answers = reflection.server_reflection_info(ReceiverStream::new(questions)).await;
    let mut answers = answers.unwrap().into_inner();
    soon("an answer", answers.message()).await.unwrap().unwrap();
    let mut older =
        v1alpha::server_reflection_client::ServerReflectionClient::new(link.channel.clone());
    let (ask_older, questions) = mpsc::channel::<v1alpha::ServerReflectionRequest>(4);
    let older = older.server_reflection_info(ReceiverStream::new(questions)).await;
    let mut older = older.unwrap().into_inner();

    let (beat, beats) = mpsc::channel(4);
    let first = KeepAliveRequest { session: session.id.clone(), ack_through: 0 };
    beat.send(first).await.unwrap();
    let alive = link.sessions().keep_alive_stream(ReceiverStream::new(beats)).await;
    let mut alive = alive.unwrap().into_inner();
    soon("a keep-alive", alive.message()).await.unwrap().unwrap();
    let health = link.cluster().health(HealthRequest {}).await;
    let mut health = health.unwrap().into_inner();
    assert!(soon("health", health.message()).await.unwrap().unwrap().ready);
    let follow = AuditRequest { follow: true, ..AuditRequest::default() };
    let mut audit = link.admin().audit(admin(ADMIN, follow)).await.unwrap().into_inner();
    // These say nothing, so their calls are not answered.
    let (mute, silence) = mpsc::channel::<KeepAliveRequest>(1);
    let mut sessions = link.sessions();
    let silent = tokio::spawn(async move {
        sessions.keep_alive_stream(ReceiverStream::new(silence)).await.map(|_| ())
    });
    let (deaf, silence) = mpsc::channel::<SubscribeRequest>(1);
    let mut signals = link.signals();
    let listens =
        tokio::spawn(
            async move { signals.subscribe(ReceiverStream::new(silence)).await.map(|_| ()) },
        );
    // Asked after these on the same connection.
    session.keep_alive().await.unwrap();

    site.server.signal("TERM");
    let draining = |status| refused(Err::<(), _>(status), Code::Unavailable, Reason::Draining);
    draining(end(&mut answers).await);
    draining(end(&mut older).await);
    draining(end(&mut alive).await);
    draining(end(&mut audit).await);
    draining(end(&mut health).await);
    for silent in [silent, listens] {
        draining(soon("its end", silent).await.unwrap().unwrap_err());
    }
    let ended = tokio::task::block_in_place(|| site.server.wait_for_end());
    assert!(ended.success());
    assert!(!site.server.output().contains("forced close"), "{}", site.server.output());
    drop((ask, ask_older, beat, mute, deaf));
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
    let call = waiter.begin(request.clone());
    there.wait_for_waiters("k", 1).await;
    let behind = there.open(20_000).await.begin_lock("k");
    there.wait_for_waiters("k", 2).await;
    let node = &mut members.cluster.nodes[going];
    tokio::task::block_in_place(|| node.terminate());
    assert!(soon("its end", call).await.unwrap().is_err());
    let moved = waiter.through(&there);
    let again = moved.begin(request);
    let kept = eventually("it is there", async || moved.keep_alive().await.ok()).await;
    assert_eq!(kept.renewed, 1, "promise 17");
    holder.unlock("k", &held).await.unwrap();
    let first = soon("its turn", again).await.unwrap().unwrap().expect("granted");
    moved.unlock("k", &first).await.unwrap();
    let second = soon("the next", behind).await.unwrap();
    assert!(first.fence < second.fence, "promise 5: its place was kept");
    moved.unlock("mine", &mine).await.unwrap();
}
