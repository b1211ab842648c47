//! What nobody may have too much of.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use dflockd_wire::grpc::{
    OpenRequest, Reason, SetRequest, SubscribeRequest, Subscription, WatchRequest,
};
use tonic::Code;

use super::site::{Link, Site, eventually, refused};
use super::support::{LIMIT, millis};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_and_streams_are_counted() {
    let site = Site::start(&["--http-max-sessions", "3"]);
    let link = site.link().await;
    let first = link.open(0).await;
    link.open(0).await;
    let subscription = Subscription { pattern: "a".into(), group: Default::default() };
    let request = SubscribeRequest { add: vec![subscription], remove: Vec::new() };
    let stream = link.signals().subscribe(tokio_stream::iter([request])).await.unwrap();
    let full = link.sessions().open(OpenRequest::default()).await;
    refused(full, Code::ResourceExhausted, Reason::MaxSessions);
    drop(stream);
    eventually("room", async || {
        let mut sessions = link.sessions();
        sessions.open(OpenRequest::default()).await.ok().map(|_| ())
    })
    .await;
    let close = dflockd_wire::grpc::CloseRequest { session: first.id.clone() };
    link.sessions().close(close).await.unwrap();
    link.open(0).await;
}

/// GUARANTEES 48: sessions of all APIs that outlive their connections are counted together.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kept_sessions_are_counted() {
    let site = Site::start(&["--max-sessions", "2"]);
    let link = site.link().await;
    link.open(0).await;
    link.open(0).await;
    let full = link.sessions().open(OpenRequest::default()).await;
    refused(full, Code::ResourceExhausted, Reason::MaxSessions);
}

/// GUARANTEES 48: subscriptions are counted per stream and in all, patterns of watches in all, and a pattern has at
/// most 16 tokens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn subscriptions_have_limits() {
    let site = Site::start(&["--max-subscriptions", "2", "--max-subscriptions-total", "3"]);
    let link = site.link().await;
    let subscribe = async |patterns: &[&str]| {
        let add = patterns.iter().map(|pattern| Subscription {
            pattern: (*pattern).to_owned().into(),
            group: Default::default(),
        });
        let request = SubscribeRequest { add: add.collect(), remove: Vec::new() };
        link.signals().subscribe(tokio_stream::iter([request])).await
    };
    let watch = async |patterns: usize| {
        let patterns = vec!["k".into(); patterns];
        link.watch().watch(WatchRequest { patterns, ..WatchRequest::default() }).await
    };
    let full = (Code::ResourceExhausted, Reason::MaxSubscriptions);
    refused(subscribe(&["a", "b", "c"]).await, full.0, full.1);
    let two = subscribe(&["a", "b"]).await.unwrap();
    let one = subscribe(&["c"]).await.unwrap();
    refused(subscribe(&["d"]).await, full.0, full.1);
    drop((two, one));
    eventually("room", async || subscribe(&["d"]).await.ok().map(|_| ())).await;

    refused(watch(4).await, full.0, full.1);
    let stream = watch(3).await.unwrap();
    refused(watch(1).await, full.0, full.1);
    drop(stream);
    eventually("room", async || watch(1).await.ok().map(|_| ())).await;

    let long = ["*"; 17].join(".");
    refused(subscribe(&[&long]).await, Code::InvalidArgument, Reason::BadRequest);
    let patterns = vec![long.into()];
    let long = link.watch().watch(WatchRequest { patterns, ..WatchRequest::default() }).await;
    refused(long, Code::InvalidArgument, Reason::BadRequest);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_have_a_limit() {
    let site = Site::start(&["--max-value-bytes", "1048576"]);
    let link = site.link().await;
    let set = |bytes| SetRequest {
        key: "v".into(),
        value: vec![b'x'; bytes].into(),
        ..SetRequest::default()
    };
    link.kv().set(set(1_048_576)).await.unwrap();
    let large = link.kv().set(set(3 << 20)).await.unwrap_err();
    assert_eq!(large.code(), Code::OutOfRange, "{large:?}");
    // The connection goes on.
    link.kv().set(set(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_have_a_limit() {
    let site = Site::start(&["--http-max-connections-per-ip", "2"]);
    let (one, _two) = (site.link().await, site.link().await);
    one.open(0).await;
    let mut third = TcpStream::connect(site.grpc).unwrap();
    third.set_read_timeout(Some(LIMIT)).unwrap();
    assert!(matches!(third.read(&mut [0]), Ok(0) | Err(_)), "closed at once");
    drop(_two);
    let mut room = None;
    eventually("room", async || {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", site.grpc));
        let channel = endpoint.unwrap().connect().await.ok()?;
        let link = Link { channel };
        let opened = link.sessions().open(OpenRequest::default()).await.ok();
        room = opened.map(|_| link);
        room.as_ref().map(|_| ())
    })
    .await;
}

/// Whoever makes the server answer for nothing is cut off; others do not notice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_flood_of_pings_is_cut_off() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let address = site.grpc;
    let flood = tokio::task::spawn_blocking(move || {
        let mut socket = TcpStream::connect(address).unwrap();
        socket.write_all(PREFACE).unwrap();
        socket.write_all(&SETTINGS).unwrap();
        let mut reader = socket.try_clone().unwrap();
        std::thread::spawn(move || {
            let mut bytes = [0; 65536];
            while matches!(reader.read(&mut bytes), Ok(1..)) {}
        });
        let pings = PING.repeat(1000);
        let begun = Instant::now();
        while socket.write_all(&pings).is_ok() {
            assert!(begun.elapsed() < LIMIT, "nobody stops it");
        }
    });
    while !flood.is_finished() {
        link.open(0).await;
        tokio::time::sleep(millis(20)).await;
    }
    flood.await.unwrap();
    site.server.wait_for_output("a flood of pings");
    link.open(0).await;
}

/// What is no HTTP/2, or nothing at all, is not waited for without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_sent_away() {
    let site = Site::start(&[]);
    let mut rude = TcpStream::connect(site.grpc).unwrap();
    rude.set_read_timeout(Some(LIMIT)).unwrap();
    rude.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(matches!(rude.read(&mut [0]), Ok(0) | Err(_)));
    let mut slow = TcpStream::connect(site.grpc).unwrap();
    slow.set_read_timeout(Some(LIMIT)).unwrap();
    slow.write_all(&PREFACE[..10]).unwrap();
    let begun = Instant::now();
    assert!(matches!(slow.read(&mut [0]), Ok(0) | Err(_)));
    assert!(begun.elapsed() > Duration::from_secs(5), "it had its time");
    site.link().await.open(0).await;
}
