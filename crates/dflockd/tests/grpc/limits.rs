//! What nobody may have too much of.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use dflockd_testkit::eventually::tasks::eventually;
use dflockd_testkit::http::Ask;
use dflockd_testkit::{LIMIT, millis};
use dflockd_wire::grpc::*;
use prost::Message;
use tonic::Code;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;

use super::site::{Link, Site, ask_http, refused};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];
const PING: [u8; 17] = [0, 0, 8, 6, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

fn subscribe(patterns: &[&str]) -> SubscribeRequest {
    let pattern = |pattern: &&str| Subscription {
        pattern: (*pattern).to_owned().into(),
        ..Default::default()
    };
    SubscribeRequest { add: patterns.iter().map(pattern).collect(), remove: Vec::new() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_and_streams_are_counted() {
    let site = Site::start(&["--http-max-sessions", "3"]);
    let link = site.link().await;
    let first = link.open(0).await;
    link.open(0).await;
    let request = subscribe(&["a"]);
    let stream = link.signals().subscribe(tokio_stream::iter([request])).await.unwrap();
    let full = link.sessions().open(OpenRequest::default()).await;
    refused(full, Code::ResourceExhausted, Reason::MaxSessions);
    drop(stream);
    eventually("room", async || {
        let mut sessions = link.sessions();
        sessions.open(OpenRequest::default()).await.ok().map(|_| ())
    })
    .await;
    first.close().await.unwrap();
    link.open(0).await;
}

/// GUARANTEES 48: calls of one address are limited as requests over HTTP are, and counted apart from them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_have_a_rate() {
    let flags = ["--http-rate-limit-per-ip", "5", "--http-rate-limit-burst", "10"];
    let (site, http) = Site::start_with_http(&flags);
    let link = site.link().await;
    let begun = Instant::now();
    let mut passed = 0;
    for _ in 0..100 {
        match link.kv().get(GetRequest { key: "k".into() }).await {
            Err(status) if status.code() == Code::ResourceExhausted => {
                refused(Err::<(), _>(status), Code::ResourceExhausted, Reason::RateLimited);
            }
            Ok(_) | Err(_) => passed += 1,
        }
    }
    let most = 11 + 5 * (begun.elapsed().as_secs() + 1);
    assert!((10..=most).contains(&passed), "{passed} in {:?}", begun.elapsed());
    // The bucket of HTTP is its own, and probes are not counted.
    assert_eq!(ask_http(http, &Ask::get("/v1/stats")).status, 200);
    let mut health = HealthClient::new(link.channel.clone());
    for _ in 0..20 {
        health.check(HealthCheckRequest::default()).await.unwrap();
    }
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
        link.signals().subscribe(tokio_stream::iter([subscribe(patterns)])).await
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
        ..Default::default()
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
    let mut third = site.socket();
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
    let mut socket = site.socket();
    let flood = tokio::task::spawn_blocking(move || {
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
    site.server.wait_for_output("a flood of HTTP/2 frames");
    link.open(0).await;
}

/// What is no HTTP/2, or nothing at all, is not waited for without end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_are_sent_away() {
    let site = Site::start(&[]);
    let mut rude = site.socket();
    rude.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
    assert!(matches!(rude.read(&mut [0]), Ok(0) | Err(_)));
    let mut slow = site.socket();
    slow.write_all(&PREFACE[..10]).unwrap();
    let begun = Instant::now();
    assert!(matches!(slow.read(&mut [0]), Ok(0) | Err(_)));
    assert!(begun.elapsed() > Duration::from_secs(5), "it had its time");
    site.link().await.open(0).await;
}

/// The next frame of HTTP/2: type, flags and payload.
fn next_frame(socket: &mut TcpStream) -> std::io::Result<(u8, u8, Vec<u8>)> {
    let mut head = [0; 9];
    socket.read_exact(&mut head)?;
    let [a, b, c, kind, flags, ..] = head;
    let mut payload = vec![0; usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c)];
    socket.read_exact(&mut payload)?;
    Ok((kind, flags, payload))
}

/// Each call ends with a head that has the flag for that.
fn ends_a_call((kind, flags, _): &(u8, u8, Vec<u8>)) -> bool {
    *kind == 1 && flags & 1 == 1
}

/// Speaks HTTP/2 as far as pings go: answers the server's until it ends the connection. Gives how long that took.
async fn only_pings(site: &Site) -> Duration {
    let (mut socket, begun) = (site.socket(), Instant::now());
    let kinds = tokio::task::spawn_blocking(move || {
        socket.write_all(&[PREFACE, &SETTINGS].concat()).unwrap();
        let mut kinds = Vec::new();
        while let Ok((kind, flags, payload)) = next_frame(&mut socket) {
            kinds.push(kind);
            if kind == 6 && flags == 0 {
                let _ = socket.write_all(&frame(6, 1, 0, &payload));
            }
        }
        kinds
    });
    let kinds = kinds.await.unwrap();
    assert!(kinds.contains(&GOAWAY), "{kinds:?}");
    begun.elapsed()
}

const GOAWAY: u8 = 7;

/// GUARANTEES 48: a connection without a call ends, and soon if it has never authenticated; answering pings does not
/// keep it. One with an open call stays.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn unused_connections_end() {
    let site = Site::start(&["--grpc-idle-timeout", "2"]);
    let busy = site.link().await;
    let requests = endless(subscribe(&["a"]));
    let mut stream = busy.signals().subscribe(requests).await.unwrap().into_inner();
    let idle = site.link().await;
    let session = idle.open(0).await;

    let took = only_pings(&site).await;
    assert!(took >= millis(2000), "{took:?}");
    // A client that comes back does not notice.
    tokio::time::sleep(millis(2500)).await;
    session.close().await.unwrap();
    let still = tokio::time::timeout(millis(200), stream.message()).await;
    assert!(still.is_err() || still.is_ok_and(|next| next.is_ok_and(|next| next.is_some())));
}

/// A stream of requests that has one and does not end.
fn endless<T: Send + 'static>(first: T) -> impl tokio_stream::Stream<Item = T> + Send + 'static {
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    tokio::spawn(async move {
        let _ = sender.send(first).await;
        sender.closed().await;
    });
    tokio_stream::wrappers::ReceiverStream::new(receiver)
}

/// GUARANTEES 48: whoever has not authenticated does not stay, whatever else it asks.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn strangers_do_not_stay() {
    let site = Site::start(&["--auth-token", "the-token-of-clients", "--read-timeout", "1"]);
    let took = only_pings(&site).await;
    assert!(took >= millis(1000) && took < Duration::from_secs(20));
}

/// A call as a page can make a browser send it over TLS: a body that the page chooses, as text.
///
/// GUARANTEES 48: a web page is no client of a server without a token.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_says_that_it_is_one() {
    let site = Site::start(&[]);
    let link = site.link().await;
    let add = AddCounterRequest { key: "c".into(), delta: 1, ..AddCounterRequest::default() };
    let message = add.encode_to_vec();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let body = [&[0][..], &length, &message].concat();
    let mut sum = 0;
    for (kind, is_call) in [
        ("text/plain", false),
        ("", false),
        ("application/json", false),
        ("application/grpc", true),
    ] {
        // `POST` and `http` from the static table, then literals: path, authority, content type.
        let mut head = vec![0x83, 0x86];
        let names: [&[u8]; 3] = [&[4], &[1], &[0x0f, 0x10]];
        for (name, value) in names.iter().zip(["/dflockd.v1.Counters/Add", "localhost", kind]) {
            head.extend(*name);
            head.push(u8::try_from(value.len()).unwrap());
            head.extend(value.as_bytes());
        }
        let (headers, data) = (frame(1, 4, 1, &head), frame(0, 1, 1, &body));
        let bytes = [PREFACE, &SETTINGS, &headers, &data].concat();
        let mut socket = site.socket();
        let answered = tokio::task::spawn_blocking(move || {
            socket.write_all(&bytes).unwrap();
            // The answer is there when its stream has ended; there is only this one.
            while !ends_a_call(&next_frame(&mut socket).expect("an answer")) {}
        });
        answered.await.unwrap();
        sum += i64::from(is_call);
        let get = GetCounterRequest { key: "c".into() };
        let value = link.counters().get(get).await.unwrap().into_inner().value;
        assert_eq!(value, sum, "{kind}");
    }
}

/// A frame of HTTP/2.
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// The head of a call, in literals without indexing.
fn head(path: &str) -> Vec<u8> {
    // `:method: POST` and `:scheme: http` of the static table; `:path` is its entry 4.
    let mut head = vec![0x83, 0x86, 4, u8::try_from(path.len()).unwrap()];
    head.extend(path.as_bytes());
    for (name, value) in [("content-type", "application/grpc"), ("te", "trailers")] {
        head.extend([0, u8::try_from(name.len()).unwrap()]);
        head.extend(name.as_bytes());
        head.push(u8::try_from(value.len()).unwrap());
        head.extend(value.as_bytes());
    }
    head
}

/// GUARANTEES 48: a thousand calls that announce 2 MiB each and send eight bytes cost what has arrived, for as long as
/// a message may take, and others are answered meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn half_messages_take_little_memory_and_end() {
    const CALLS: u32 = 1000;
    let site = Site::start(&["--read-timeout", "4"]);
    let link = site.link().await;
    link.open(0).await;
    let before = site.server.resident_kib();
    let mut hog = site.socket();
    let mut bytes = [PREFACE, &SETTINGS[..]].concat();
    let head = head("/dflockd.v1.Kv/Set");
    for call in 0..CALLS {
        bytes.extend(frame(1, 4, 2 * call + 1, &head));
        bytes.extend(frame(0, 0, 2 * call + 1, &[0, 0, 0x20, 0, 0, 1, 2, 3]));
    }
    hog.write_all(&bytes).unwrap();
    let ended = tokio::task::spawn_blocking(move || {
        let mut ended = 0;
        while ended < CALLS {
            let frame = next_frame(&mut hog).expect("all calls end");
            ended += u32::from(ends_a_call(&frame));
        }
    });
    let mut line = site.server.connect();
    while !ended.is_finished() {
        let asked = Instant::now();
        assert_eq!(line.ask("ping", "_", ""), "ok");
        link.open(0).await;
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        let more = site.server.resident_kib().saturating_sub(before) / 1024;
        assert!(more < 100, "{more} MiB");
        tokio::time::sleep(millis(50)).await;
    }
    ended.await.unwrap();
}

/// GUARANTEES 48: a client that asks for a long list again and again and takes in nothing costs what may wait for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_that_nobody_takes_in() {
    const CALLS: u32 = 500;
    let site = Site::start(&[]);
    let mut line = site.server.connect();
    let item = "x".repeat(65_000);
    for count in 1..=300 {
        line.check("rpush", "big", &item, &format!("ok {count}"));
    }
    let before = site.server.resident_kib();
    let mut hog = site.socket();
    // As much as it likes: SETTINGS_INITIAL_WINDOW_SIZE, and the window of the connection.
    let all = 0x7fff_ffff_u32.to_be_bytes();
    let mut bytes = PREFACE.to_vec();
    bytes.extend(frame(4, 0, 0, &[&[0, 4][..], &all].concat()));
    bytes.extend(frame(8, 0, 0, &0x7fff_0000_u32.to_be_bytes()));
    let head = head("/dflockd.v1.Lists/Range");
    // Field 1 is the key, field 3 the last index: -1.
    let message = [&[0x0a, 3][..], b"big", &[0x18], &[0xff; 9], &[1]].concat();
    let length = u32::try_from(message.len()).unwrap().to_be_bytes();
    let message = [&[0][..], &length, &message].concat();
    for call in 0..CALLS {
        bytes.extend(frame(1, 4, 2 * call + 1, &head));
        bytes.extend(frame(0, 1, 2 * call + 1, &message));
    }
    hog.write_all(&bytes).unwrap();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        assert_eq!(line.ask("ping", "_", ""), "ok");
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        let more = site.server.resident_kib().saturating_sub(before) / 1024;
        assert!(more < 64, "{more} MiB");
        tokio::time::sleep(millis(20)).await;
    }
}

/// A long list comes in pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_in_pages() {
    let site = Site::start(&[]);
    let mut line = site.server.connect();
    let item = "x".repeat(65_000);
    for count in 1..=40 {
        line.check("rpush", "q", &item, &format!("ok {count}"));
    }
    let link = site.link().await;
    for (start, count) in [(0, 40), (-25, 25), (-1000, 40)] {
        let mut seen = 0;
        let mut next = Some(start);
        while let Some(start) = next {
            let request = RangeRequest { key: "q".into(), start, stop: -1 };
            let page = link.lists().range(request).await.unwrap().into_inner();
            assert!(page.items.len() <= 16 && !page.items.is_empty());
            seen += page.items.len();
            next = page.next;
        }
        assert_eq!(seen, count);
    }
}
