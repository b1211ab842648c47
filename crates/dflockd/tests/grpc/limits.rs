//! What nobody may have too much of.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use dflockd_wire::grpc::{
    OpenRequest, RangeRequest, Reason, SetRequest, SubscribeRequest, Subscription,
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
    let mut hog = TcpStream::connect(site.grpc).unwrap();
    hog.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = [PREFACE, &SETTINGS[..]].concat();
    let head = head("/dflockd.v1.Kv/Set");
    for call in 0..CALLS {
        bytes.extend(frame(1, 4, 2 * call + 1, &head));
        bytes.extend(frame(0, 0, 2 * call + 1, &[0, 0, 0x20, 0, 0, 1, 2, 3]));
    }
    hog.write_all(&bytes).unwrap();
    let ended = tokio::task::spawn_blocking(move || {
        // Heads of frames: each call ends with one that has the flag for that.
        let mut ended = 0;
        while ended < CALLS {
            let mut head = [0; 9];
            hog.read_exact(&mut head).expect("all calls end");
            let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
            let mut payload = vec![0; usize::try_from(length).unwrap()];
            hog.read_exact(&mut payload).unwrap();
            ended += u32::from(head[3] == 1 && head[4] & 1 != 0);
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
    let mut hog = TcpStream::connect(site.grpc).unwrap();
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
