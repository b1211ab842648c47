//! Real sockets on loopback, real TLS. Waiting is for conditions; the times are only limits.
//!
//! The runtime has one thread, which is also the thread of the test: so each test sees its own log.

use std::fmt::{Debug, Write as _};
use std::path::PathBuf;
use std::sync::atomic::AtomicU32;

use bytes::BytesMut;
use dflockd_testkit::Dir;
use dflockd_testkit::eventually::tasks::eventually;
use proptest::prelude::*;
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, timeout};
use tracing::field::{Field, Visit};

use super::dial::connect;
use super::establish::{Fresh, NoConnection};
use super::handshake::{Acceptor, Challenge, Dialer, Hello, Keys, Message, Mode, Welcome, parse};
use super::outbox::{Batch, COALESCE_BYTES};
use super::seal::{BadFrame, Framing, KeyShare, TAG_BYTES};
use super::*;
use crate::address::AddressKey;

mod path;

/// Longer than anything takes, even on a busy machine.
const PATIENCE: Duration = Duration::from_secs(30);

const CLUSTER: [u8; 16] = *b"0123456789abcdef";

/// Waits until `condition` holds.
async fn until(what: &str, mut condition: impl FnMut() -> bool) {
    eventually(what, async || condition()).await;
}

fn identity(node: &str) -> Identity {
    let raft_id = raft_id(node);
    Identity {
        cluster: Some(CLUSTER),
        node: node.to_owned(),
        raft_id,
        disk: raft_id + 100,
        witness: false,
        version: 7,
    }
}

/// a is 1, b is 2.
fn raft_id(node: &str) -> u64 {
    u64::from(node.as_bytes()[0] - b'a') + 1
}

fn secret(byte: u8) -> Secret {
    Secret::new(vec![byte; SECRET_BYTES_MIN]).unwrap()
}

/// As usual, at any port.
fn config(credentials: Credentials) -> TransportConfig {
    let (listen, limits) = ("127.0.0.1:0".to_owned(), Limits::default());
    TransportConfig { listen, credentials, version_max: Version::Sealed, limits }
}

fn secrets(bytes: &[u8]) -> Credentials {
    Credentials { secrets: bytes.iter().copied().map(secret).collect(), tls: None }
}

/// Writes down all that a transport says.
struct Recorder {
    identity: Mutex<Identity>,
    /// The name that its cluster began with, and the data directories that are known.
    formed_as: Mutex<Option<[u8; 16]>>,
    disks: Mutex<Vec<u64>>,
    /// The peers to refuse.
    unwelcome: Mutex<Vec<String>>,
    seen: Mutex<Seen>,
}

#[derive(Default)]
struct Seen {
    admitted: Vec<Identity>,
    main: Vec<(u64, Bytes)>,
    bulk: Vec<(u64, Bytes)>,
    reachable: u32,
    unreachable: u32,
    refused: u32,
    lost: u32,
    bad: u32,
}

impl Recorder {
    fn new(identity: Identity) -> Self {
        let identity = Mutex::new(identity);
        Self {
            identity,
            formed_as: Mutex::default(),
            disks: Mutex::default(),
            unwelcome: Mutex::default(),
            seen: Mutex::default(),
        }
    }
}

impl Handler for Recorder {
    fn identity(&self) -> Identity {
        self.identity.lock().clone()
    }

    fn former_identity(&self, peer: &Identity) -> Option<Result<Identity, String>> {
        let cluster = *self.formed_as.lock();
        if cluster.is_none() || peer.cluster != cluster {
            return None;
        }
        let is_known = self.disks.lock().contains(&peer.disk);
        let former = Identity { cluster, ..self.identity() };
        Some(is_known.then_some(former).ok_or_else(|| format!("{} is not known", peer.node)))
    }

    fn refused_by(&self, _: &Identity) {}

    fn admit(&self, peer: &Identity) -> Result<(), String> {
        if self.unwelcome.lock().contains(&peer.node) {
            return Err(format!("{} is not welcome\n", peer.node));
        }
        self.seen.lock().admitted.push(peer.clone());
        Ok(())
    }

    fn received(&self, from: u64, lane: Lane, frame: Bytes) {
        let mut seen = self.seen.lock();
        match lane {
            Lane::Main => seen.main.push((from, frame)),
            Lane::Bulk => seen.bulk.push((from, frame)),
        }
    }

    fn reachable(&self, _: u64, _: Lane) {
        self.seen.lock().reachable += 1;
    }

    fn unreachable(&self, _: u64, _: Lane, refused: bool) {
        let mut seen = self.seen.lock();
        seen.unreachable += 1;
        seen.refused += u32::from(refused);
    }

    fn bad_frame(&self, _: u64, _: Lane) {
        self.seen.lock().bad += 1;
    }

    fn stream_lost(&self, _: u64, _: Lane) {
        self.seen.lock().lost += 1;
    }
}

struct Node {
    name: String,
    recorder: Arc<Recorder>,
    transport: Arc<Transport>,
}

impl Node {
    async fn new(name: &str, credentials: Credentials) -> Self {
        Self::with(name, credentials, |_| ()).await
    }

    async fn with(
        name: &str,
        credentials: Credentials,
        change: impl FnOnce(&mut (TransportConfig, Identity)),
    ) -> Self {
        let mut parts = (config(credentials), identity(name));
        change(&mut parts);
        let (config, identity) = parts;
        let recorder = Arc::new(Recorder::new(identity));
        let handler = Arc::clone(&recorder) as Arc<dyn Handler>;
        let transport = Transport::start(config, handler).await.unwrap();
        Self { name: name.to_owned(), recorder, transport }
    }

    fn id(&self) -> u64 {
        raft_id(&self.name)
    }

    fn address(&self) -> String {
        self.transport.local_addr().to_string()
    }

    fn peer(&self) -> PeerAddress {
        peer(&self.name, &self.address())
    }

    fn dial(&self, others: &[&Self]) {
        self.transport.set_peers(others.iter().map(|other| other.peer()).collect());
    }

    fn send(&self, to: &Self, frame: &[u8]) -> bool {
        self.transport.send(to.id(), Lane::Main, Bytes::copy_from_slice(frame))
    }

    fn get<T>(&self, read: impl FnOnce(&Seen) -> T) -> T {
        read(&self.recorder.seen.lock())
    }

    async fn until(&self, what: &str, mut condition: impl FnMut(&Seen) -> bool) {
        until(what, || self.get(&mut condition)).await;
    }

    async fn until_received(&self, frame: &[u8]) {
        let what = format!("{} at {}", frame.escape_ascii(), self.name);
        self.until(&what, |seen| seen.main.iter().any(|(_, got)| got == frame)).await;
    }

    async fn until_refused_often(&self) {
        self.until("attempts", |seen| seen.unreachable >= 4).await;
        self.get(|seen| assert_eq!(seen.reachable, 0));
    }

    fn assert_nothing_received(&self) {
        self.get(|seen| assert!(seen.main.is_empty() && seen.bulk.is_empty()));
    }
}

fn peer(node: &str, address: &str) -> PeerAddress {
    PeerAddress { raft_id: raft_id(node), node: node.to_owned(), address: address.to_owned() }
}

/// The lines of the log of this thread.
struct Log {
    lines: Arc<Mutex<Vec<String>>>,
    _guard: tracing::subscriber::DefaultGuard,
}

impl Log {
    fn new() -> Self {
        let lines = Arc::default();
        let guard = tracing::subscriber::set_default(Lines(Arc::clone(&lines)));
        Self { lines, _guard: guard }
    }

    async fn until(&self, parts: &[&str]) {
        let has_all = |line: &String| parts.iter().all(|part| line.contains(part));
        until(&format!("{parts:?} in the log"), || self.lines.lock().iter().any(has_all)).await;
    }
}

struct Lines(Arc<Mutex<Vec<String>>>);

impl tracing::Subscriber for Lines {
    fn enabled(&self, metadata: &tracing::Metadata<'_>) -> bool {
        metadata.target().contains("transport") && *metadata.level() <= tracing::Level::INFO
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, event: &tracing::Event<'_>) {
        struct Line(String);
        impl Visit for Line {
            fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
                write!(self.0, "{field}={value:?} ").unwrap();
            }
        }
        let mut line = Line(String::new());
        event.record(&mut line);
        self.0.lock().push(line.0);
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// An authority, and a directory for its files.
struct Authority {
    dir: Dir,
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let mut params = named(&[&format!("authority {number}")]);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { dir: Dir::new(), pem, issuer: Issuer::new(params, key) }
    }

    fn file(&self, name: &str, content: &str) -> PathBuf {
        self.dir.write(name, content).into()
    }

    /// Certificate and key.
    fn issue(&self, names: &[&str]) -> (String, String) {
        let key = KeyPair::generate().unwrap();
        (named(names).signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }

    /// For a node that accepts certificates of `others` too.
    fn tls(&self, node: &str, others: &[&Self]) -> PeerTls {
        let (cert, key) = self.issue(&[node]);
        let all = others.iter().map(|other| &*other.pem).chain([&*self.pem]).collect::<String>();
        let (cert, key) = (self.file("cert.pem", &cert), self.file("key.pem", &key));
        PeerTls::load(&cert, &key, &self.file("ca.pem", &all)).unwrap()
    }

    fn credentials(&self, node: &str) -> Credentials {
        Credentials { secrets: Vec::new(), tls: Some(self.tls(node, &[])) }
    }
}

fn named(names: &[&str]) -> CertificateParams {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.distinguished_name = DistinguishedName::new();
    for (index, name) in names.iter().enumerate() {
        // rcgen keeps one value per kind; the raw identifier makes a second kind of it.
        let kind = match index {
            0 => DnType::CommonName,
            _ => DnType::CustomDnType(vec![2, 5, 4, 3]),
        };
        params.distinguished_name.push(kind, *name);
    }
    params
}

/// What a side without TLS speaks, unless it is told otherwise.
fn usual(credentials: &Credentials) -> Version {
    if credentials.tls.is_some() { Version::Plain } else { Version::Sealed }
}

fn share(version: Version) -> KeyShare {
    KeyShare::draw(version, &SystemRandom::new()).unwrap()
}

/// A dialer made by hand: the handshake up to the verdict.
async fn raw_dial(
    to: &Node,
    credentials: &Credentials,
    ours: &Identity,
    lane: Lane,
) -> Result<Raw, NoConnection> {
    raw_dial_with(usual(credentials), to, credentials, ours, lane).await
}

async fn raw_dial_with(
    version: Version,
    to: &Node,
    credentials: &Credentials,
    ours: &Identity,
    lane: Lane,
) -> Result<Raw, NoConnection> {
    let tcp = TcpStream::connect(to.transport.local_addr()).await?;
    let mut fresh = match &credentials.tls {
        None => Fresh::plain(tcp),
        Some(tls) => Fresh::dial_tls(tcp, tls).await?,
    };
    let keys = Keys { secrets: &credentials.secrets, binding: fresh.binding };
    let share = share(version);
    let mut dialer = Dialer::new(keys, ours, &to.name, lane, version, share.nonce);
    fresh.write(dialer.hello()).await?;
    let proof = dialer.prove(&fresh.read().await?)?;
    fresh.write(&proof).await?;
    let welcome = fresh.read().await?;
    dialer.conclude(&welcome)?;
    let framing = dialer.frames(share, &welcome)?;
    Ok(Raw { fresh, framing })
}

/// A connection made by hand, with the handshake done.
struct Raw {
    fresh: Fresh,
    framing: Framing,
}

impl Raw {
    async fn send(&mut self, frame: &[u8]) {
        self.fresh.write_framed(frame, &mut self.framing).await.unwrap();
    }

    async fn get(&mut self) -> Vec<u8> {
        self.fresh.input_left = 4000;
        let mut message = get(&mut self.fresh).await;
        self.framing.open(&mut message).unwrap();
        message
    }
}

async fn raw_member(to: &Node, credentials: &Credentials, ours: &Identity, lane: Lane) -> Raw {
    raw_member_with(usual(credentials), to, credentials, ours, lane).await
}

async fn raw_member_with(
    version: Version,
    to: &Node,
    credentials: &Credentials,
    ours: &Identity,
    lane: Lane,
) -> Raw {
    let raw = raw_dial_with(version, to, credentials, ours, lane).await;
    let mut raw = raw.unwrap_or_else(|fault| panic!("{}", fault.reason));
    raw.send(&handshake::verdict(None)).await;
    raw
}

/// An acceptor made by hand, which then does nothing.
async fn raw_accept(listener: &TcpListener, credentials: &Credentials, ours: &Identity) -> Raw {
    let (mut raw, verdict) = raw_judged(listener, credentials, ours).await;
    handshake::check_verdict(verdict, &mut raw.framing).unwrap();
    raw
}

/// The same up to the verdict.
async fn raw_judged(
    listener: &TcpListener,
    credentials: &Credentials,
    ours: &Identity,
) -> (Raw, Vec<u8>) {
    let (tcp, _) = listener.accept().await.unwrap();
    let mut fresh = Fresh::plain(tcp);
    let keys = Keys { secrets: &credentials.secrets, binding: None };
    let share = share(Version::Sealed);
    let challenge = handshake::challenge(Version::Sealed, keys.mode(), share.nonce);
    let hello = get(&mut fresh).await;
    let acceptor = Acceptor::new(keys, Version::Sealed, &hello, &challenge).unwrap();
    fresh.write(&challenge).await.unwrap();
    let secret = acceptor.check(&get(&mut fresh).await).unwrap();
    let welcome = acceptor.welcome(ours, None, secret);
    fresh.write(&welcome).await.unwrap();
    let framing = acceptor.frames(share, &welcome, secret).unwrap();
    let verdict = get(&mut fresh).await;
    (Raw { fresh, framing }, verdict)
}

async fn get(fresh: &mut Fresh) -> Vec<u8> {
    fresh.read().await.unwrap_or_else(|fault| panic!("{}", fault.reason))
}

async fn until_closed(stream: &mut (impl AsyncRead + Unpin)) {
    let rest = timeout(PATIENCE, stream.read(&mut [0])).await.expect("still open");
    assert!(!matches!(rest, Ok(1..)), "an answer to a stranger");
}

async fn listen() -> (TcpListener, String) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    (listener, address)
}

// Frames.

#[tokio::test]
async fn frames_arrive_in_order_on_both_lanes() {
    let authority = Authority::new();
    let both = |node| Credentials { secrets: vec![secret(1)], ..authority.credentials(node) };
    for (of_a, of_b) in [
        (secrets(&[1]), secrets(&[1])),
        (authority.credentials("a"), authority.credentials("b")),
        (both("a"), both("b")),
    ] {
        let (a, b) = (Node::new("a", of_a).await, Node::new("b", of_b).await);
        a.dial(&[&a, &b]);
        b.dial(&[&a, &b]);
        a.until("connections", |seen| seen.reachable == 2).await;
        let lengths = (0..300).map(|step: usize| step * step).chain([5 << 20, 0, 1, 200_000, 4]);
        let frames: Vec<_> = lengths
            .map(|length| (0..length).map(|at| (at * 31).to_le_bytes()[0]).collect::<Bytes>())
            .collect();
        for frame in &frames {
            for lane in Lane::ALL {
                until("room", || a.transport.send(2, lane, frame.clone())).await;
            }
        }
        b.until("all", |seen| seen.main.len() == frames.len() && seen.bulk.len() == frames.len())
            .await;
        b.get(|seen| {
            for got in [&seen.main, &seen.bulk] {
                assert!(got.iter().all(|(from, _)| *from == 1));
                assert!(got.iter().map(|(_, frame)| frame).eq(&frames));
            }
        });
        assert!(b.send(&a, b"and back"));
        a.until_received(b"and back").await;
        assert!(!a.transport.send(3, Lane::Main, Bytes::new()), "nobody");
        assert!(!a.transport.send(1, Lane::Main, Bytes::new()), "ourselves");
        assert!(b.get(|seen| seen.admitted.iter().all(|peer| *peer == identity("a"))));
    }
}

#[tokio::test]
async fn bulk_does_not_delay_main() {
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    let (listener, address) = listen().await;
    tokio::spawn(slow_bulk(listener, b.transport.local_addr()));
    a.transport.set_peers(vec![peer("b", &address)]);
    a.until("connections", |seen| seen.reachable == 2).await;
    assert!(a.transport.send(2, Lane::Bulk, Bytes::from(vec![7; 32 << 20])));
    for number in 0..50_u8 {
        assert!(a.send(&b, &[number]));
        let sent = Instant::now();
        b.until_received(&[number]).await;
        let took = sent.elapsed();
        assert!(took < Duration::from_secs(1), "{took:?}");
        sleep(Duration::from_millis(10)).await;
    }
    assert!(b.get(|seen| seen.bulk.is_empty()), "the proxy is too fast for this test");
    b.until("the rest", |seen| seen.bulk.iter().any(|(_, frame)| frame.len() == 32 << 20)).await;
}

/// Forwards, the bulk lane not faster than about 10 MB/s.
async fn slow_bulk(listener: TcpListener, to: SocketAddr) {
    loop {
        let (mut near, _) = listener.accept().await.unwrap();
        tokio::spawn(async move {
            let mut far = TcpStream::connect(to).await.unwrap();
            let mut beginning = [0; 17];
            near.read_exact(&mut beginning).await.unwrap();
            far.write_all(&beginning).await.unwrap();
            if beginning[16] == 0 {
                return drop(tokio::io::copy_bidirectional(&mut near, &mut far).await);
            }
            let (mut near_in, mut near_out) = near.split();
            let (mut far_in, mut far_out) = far.split();
            let back = tokio::io::copy(&mut far_in, &mut near_out);
            let forth = async {
                let mut buffer = vec![0; 20_000];
                while let Ok(length @ 1..) = near_in.read(&mut buffer).await {
                    far_out.write_all(&buffer[..length]).await.unwrap();
                    sleep(Duration::from_millis(1)).await;
                }
            };
            let _ = tokio::join!(back, forth);
        });
    }
}

#[tokio::test]
async fn queues_are_bounded_and_drop_the_newest() {
    let (listener, address) = listen().await;
    let credentials = secrets(&[1]);
    let a = Node::with("a", credentials.clone(), |(config, _)| {
        config.limits.main.queue_frames_max = 4;
        config.limits.bulk.queue_bytes_max = 1000;
    })
    .await;
    a.transport.set_peers(vec![peer("b", &address)]);
    let send = |lane, frame: &[u8]| a.transport.send(2, lane, Bytes::copy_from_slice(frame));
    // The peer takes the connections, but does not answer yet.
    assert!([b"0", b"1", b"2", b"3"].iter().all(|frame| send(Lane::Main, *frame)));
    assert!(!send(Lane::Main, b"4"));
    assert!(send(Lane::Bulk, &[0; 2000]), "alone it may be longer");
    assert!(!send(Lane::Bulk, b"x"));
    assert!(!a.transport.send(2, Lane::Bulk, Bytes::from(vec![0; FRAME_BYTES_MAX + 1])));

    let (mut got, mut open) = (Vec::new(), Vec::new());
    for _ in Lane::ALL {
        let mut raw = raw_accept(&listener, &credentials, &identity("b")).await;
        got.push(raw.get().await);
        if got.last().unwrap() == b"0" {
            for expected in [b"1", b"2", b"3"] {
                assert_eq!(raw.get().await, expected);
            }
        }
        open.push(raw);
    }
    got.sort();
    assert_eq!(got, [vec![0; 2000], b"0".to_vec()]);
}

#[tokio::test]
async fn who_does_not_read_is_given_up() {
    let (listener, address) = listen().await;
    let credentials = secrets(&[1]);
    let a = Node::with("a", credentials.clone(), |(config, _)| {
        config.limits.main.stall = Duration::from_millis(200);
    })
    .await;
    a.transport.set_peers(vec![peer("b", &address)]);
    let mut open = Vec::new();
    for _ in Lane::ALL {
        open.push(raw_accept(&listener, &credentials, &identity("b")).await);
    }
    a.until("connections", |seen| seen.reachable == 2).await;
    a.transport.send(2, Lane::Main, Bytes::from(vec![0; 32 << 20]));
    a.until("a stall", |seen| seen.unreachable == 1).await;
    assert_eq!(a.get(|seen| seen.refused), 0);
}

/// Both ends of a connection, plain or sealed.
fn framings(version: Version) -> (Framing, Framing) {
    let (dialer, acceptor) = (share(version), share(version));
    let (of_dialer, of_acceptor) = (dialer.nonce, acceptor.nonce);
    let agree =
        |share: KeyShare, theirs| share.agree(&theirs, &[1; 32], b"all that was said").unwrap();
    (agree(dialer, of_acceptor), agree(acceptor, of_dialer))
}

#[test]
fn frames_are_split_at_any_place() {
    let frames = [0, 1, 70_000, 3].map(|length| vec![7; length]);
    for (version, overhead) in [(Version::Plain, 0), (Version::Sealed, TAG_BYTES)] {
        for step in [1, 2, 7, 1000, 100_000] {
            let (mut sender, mut receiver) = framings(version);
            let mut bytes = BytesMut::new();
            frames.iter().for_each(|frame| sender.put(frame, &mut bytes));
            let sum: usize = frames.iter().map(|frame| 4 + frame.len() + overhead).sum();
            assert_eq!(bytes.len(), sum);
            let (mut buffer, mut got) = (BytesMut::new(), Vec::new());
            for part in bytes.chunks(step) {
                buffer.extend_from_slice(part);
                while let Some(frame) = receiver.take(&mut buffer).unwrap() {
                    got.push(frame);
                }
            }
            assert!(got == frames && buffer.is_empty());
        }
        let longest = u32::try_from(FRAME_BYTES_MAX + overhead).unwrap();
        let (_, mut receiver) = framings(version);
        let mut buffer = BytesMut::from(&longest.to_le_bytes()[..]);
        assert_eq!(receiver.take(&mut buffer), Ok(None));
        assert_eq!(receiver.missing(&buffer), Ok(FRAME_BYTES_MAX + overhead));
        let mut buffer = BytesMut::from(&(longest + 1).to_le_bytes()[..]);
        assert_eq!(receiver.take(&mut buffer), Err(BadFrame::TooLong(longest + 1)));
    }
}

/// GUARANTEES 48: a sealed frame opens once, in its place, as it was sent, with the key of its connection.
#[test]
fn a_sealed_frame_opens_in_its_place_only() {
    let sealed = |sender: &mut Framing, frame: &[u8]| {
        let mut bytes = BytesMut::new();
        sender.put(frame, &mut bytes);
        bytes
    };
    let forged = Err(BadFrame::Forged);
    let (mut sender, mut receiver) = framings(Version::Sealed);
    let (mut one, two) = (sealed(&mut sender, b"one"), sealed(&mut sender, b"two"));
    let again = one.clone();
    assert!(!one.windows(3).any(|part| part == b"one"), "it can be read");
    assert_eq!(receiver.take(&mut one), Ok(Some(Bytes::from_static(b"one"))));
    assert_eq!(receiver.take(&mut again.clone()), forged, "repeated");

    let (mut other, mut receiver) = framings(Version::Sealed);
    assert_eq!(receiver.take(&mut again.clone()), forged, "of another connection");
    let (_, mut receiver) = framings(Version::Sealed);
    assert_eq!(receiver.take(&mut BytesMut::from(&b"\x03\0\0\0one"[..])), forged, "injected");

    for bit in 32..again.len() * 8 {
        let (mut sender, mut receiver) = framings(Version::Sealed);
        let mut bytes = sealed(&mut sender, b"one");
        bytes[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(receiver.take(&mut bytes), forged, "bit {bit} flipped");
    }
    let (mut sender, mut receiver) = framings(Version::Sealed);
    sealed(&mut sender, b"lost");
    assert_eq!(receiver.take(&mut sealed(&mut sender, b"next")), forged, "the first is missing");
    let (mut sender, mut receiver) = framings(Version::Sealed);
    let (mut first, mut second) = (sealed(&mut sender, b"1"), sealed(&mut sender, b"2"));
    assert_eq!(receiver.take(&mut second), forged, "the second before the first");
    assert_eq!(receiver.take(&mut first), forged, "it is over then");
    drop((two, sealed(&mut other, b"")));
}

/// GUARANTEES 48: the key of the frames depends on both drawn keys, the shared secret and every word of the handshake.
#[test]
fn the_key_of_frames_is_of_one_handshake() {
    let opens = |secrets: [&[u8]; 2], said: [&[u8]; 2], is_swapped: bool| {
        let (dialer, acceptor) = (share(Version::Sealed), share(Version::Sealed));
        let of_acceptor = if is_swapped { share(Version::Sealed).nonce } else { acceptor.nonce };
        let of_dialer = dialer.nonce;
        let mut sender = dialer.agree(&of_acceptor, secrets[0], said[0]).unwrap();
        let mut receiver = acceptor.agree(&of_dialer, secrets[1], said[1]).unwrap();
        let mut bytes = BytesMut::new();
        sender.put(b"frame", &mut bytes);
        receiver.take(&mut bytes).is_ok()
    };
    assert!(opens([b"s", b"s"], [b"t", b"t"], false));
    assert!(!opens([b"s", b"x"], [b"t", b"t"], false), "another secret");
    assert!(!opens([b"s", b"s"], [b"t", b"x"], false), "something else was said");
    assert!(!opens([b"s", b"s"], [b"t", b"t"], true), "the drawn key of somebody else");
    let worthless = share(Version::Sealed).agree(&[0; 32], b"s", b"t");
    assert!(worthless.is_err(), "a key that everybody knows the agreement with");
}

#[test]
fn batches_are_taken_up_where_they_were_left() {
    let frames: Vec<_> =
        [3, COALESCE_BYTES + 1, 0, 5, 40_000].map(|length| Bytes::from(vec![9; length])).into();
    let whole = |batch: &Batch| batch.chunks.iter().flatten().copied().collect::<Vec<_>>();
    for version in [Version::Plain, Version::Sealed] {
        let (mut sender, mut receiver) = framings(version);
        let batch = Batch::new(None, frames.clone(), &mut sender);
        let expected = whole(&batch);
        let mut bytes = BytesMut::from(&expected[..]);
        for frame in &frames {
            assert_eq!(receiver.take(&mut bytes).unwrap().as_ref(), Some(frame));
        }
        assert!(bytes.is_empty());
    }
    let expected = whole(&Batch::new(None, frames.clone(), &mut Framing::Plain));
    for step in [997, 20_000, expected.len()] {
        let mut batch = Batch::new(None, frames.clone(), &mut Framing::Plain);
        let mut left = expected.len();
        while left > 0 {
            batch.advance(step.min(left));
            left -= step.min(left);
            assert_eq!(whole(&batch), expected[expected.len() - left..]);
        }
        assert!(batch.is_done());
    }
    assert!(Batch::new(None, Vec::new(), &mut Framing::Plain).is_done());
}

// Refusals: nothing is delivered, and both logs have the reason.

/// `a` dials `b` and both refuse, with these reasons in their logs.
async fn check_refused(a: &Node, b: &Node, log: &Log, dialer: &[&str], acceptor: &[&str]) {
    a.dial(&[b]);
    a.send(b, b"must not arrive");
    log.until(&[&["cannot connect to peer"], dialer].concat()).await;
    if !acceptor.is_empty() {
        log.until(&[&["refused a peer"], acceptor].concat()).await;
    }
    a.until_refused_often().await;
    b.assert_nothing_received();
}

#[tokio::test]
async fn another_secret_is_refused() {
    let log = Log::new();
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[2])).await);
    let dialer = "most likely its shared secret is another one";
    check_refused(&a, &b, &log, &[dialer], &["a has another shared secret"]).await;
    assert!(b.get(|seen| seen.admitted.is_empty()), "asked about a stranger");
}

#[tokio::test]
async fn another_cluster_is_refused() {
    let log = Log::new();
    let a = Node::new("a", secrets(&[1])).await;
    let b =
        Node::with("b", secrets(&[1]), |(_, identity)| identity.cluster = Some([0xee; 16])).await;
    let reason = "a belongs to cluster 30313233343536373839616263646566, \
                  b to cluster eeeeeeeeeeeeeeeeeeeeeeeeeeeeeeee";
    check_refused(&a, &b, &log, &["refused by the other side", reason], &[reason]).await;
    assert!(b.get(|seen| seen.admitted.is_empty()));
}

/// GUARANTEES 41: who presents the name that the cluster began with is a member that has not heard of the name it has
/// now, or a stranger whose cluster began with the same one. The data directory tells.
#[tokio::test]
async fn the_name_before_is_for_known_members_only() {
    let named =
        |(_, identity): &mut (TransportConfig, Identity)| identity.cluster = Some([0xee; 16]);
    for knows in [true, false] {
        let a = Node::with("a", secrets(&[1]), named).await;
        let b = Node::new("b", secrets(&[1])).await;
        *a.recorder.formed_as.lock() = Some(CLUSTER);
        *a.recorder.disks.lock() = vec![if knows { identity("b").disk } else { 7 }];
        let log = Log::new();
        a.transport.set_peers(vec![peer("b", &b.address())]);
        b.transport.set_peers(vec![peer("a", &a.address())]);
        if knows {
            for node in [&a, &b] {
                eventually("both lanes", async || node.get(|seen| seen.reachable == 2)).await;
            }
        } else {
            log.until(&["cannot connect", "b to cluster 3031"]).await;
            log.until(&["cannot connect", "refused by the other side: b is not known"]).await;
            assert!(a.get(|seen| seen.reachable == 0 && seen.admitted.is_empty()));
            assert!(b.get(|seen| seen.reachable == 0));
        }
    }
}

/// GUARANTEES 41: when the cluster gets its name, connections between its members stay, and those of strangers end.
#[tokio::test]
async fn a_name_ends_the_connections_of_strangers() {
    for knows in [true, false] {
        let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
        let peers = vec![peer("b", &b.address())];
        a.transport.set_peers(peers.clone());
        b.transport.set_peers(vec![peer("a", &a.address())]);
        for node in [&a, &b] {
            eventually("both lanes", async || node.get(|seen| seen.reachable == 2)).await;
        }
        a.recorder.identity.lock().cluster = Some([0xee; 16]);
        *a.recorder.formed_as.lock() = Some(CLUSTER);
        *a.recorder.disks.lock() = vec![if knows { identity("b").disk } else { 7 }];
        a.transport.set_peers(peers);
        if knows {
            assert!(b.transport.send(1, Lane::Main, Bytes::from_static(b"still here")));
            eventually("a frame", async || a.get(|seen| seen.main.len() == 1)).await;
            assert!(a.get(|seen| seen.unreachable == 0) && b.get(|seen| seen.unreachable == 0));
        } else {
            for node in [&a, &b] {
                eventually("the end", async || node.get(|seen| seen.unreachable > 2)).await;
                assert!(node.get(|seen| seen.reachable == 2), "none came back");
            }
        }
    }
}

#[tokio::test]
async fn another_node_is_refused() {
    let log = Log::new();
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    a.transport.set_peers(vec![peer("c", &b.address())]);
    log.until(&["cannot connect", "refused by the other side: a wants c, this is b"]).await;
    log.until(&["refused a peer", "a: a wants c, this is b"]).await;
    // Somebody else with our name.
    let (a, twin) = (Node::new("a", secrets(&[1])).await, Node::new("a", secrets(&[1])).await);
    let dialed = raw_dial(&a, &secrets(&[1]), &twin.recorder.identity(), Lane::Main).await;
    let reason = dialed.err().unwrap().reason;
    assert_eq!(reason, "refused by the other side: there are two nodes a");
}

#[tokio::test]
async fn an_impostor_is_found_by_the_dialer() {
    // It knows the secret and says yes, but it is another node or of another cluster.
    let log = Log::new();
    let credentials = secrets(&[1]);
    let other = Identity { cluster: Some([0xee; 16]), ..identity("b") };
    for (said, reason) in [(identity("c"), "it is c, not b"), (other, "b belongs to cluster eeee")]
    {
        let (listener, address) = listen().await;
        let a = Node::new("a", credentials.clone()).await;
        a.transport.set_peers(vec![peer("b", &address)]);
        let (mut raw, verdict) = raw_judged(&listener, &credentials, &said).await;
        let fault = handshake::check_verdict(verdict, &mut raw.framing).unwrap_err();
        assert!(fault.to_string().contains(reason), "{fault}");
        log.until(&["cannot connect", reason]).await;
        assert!(a.get(|seen| seen.reachable == 0 && seen.admitted.is_empty()));
    }
}

#[tokio::test]
async fn the_handler_has_the_last_word() {
    let log = Log::new();
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    b.recorder.unwelcome.lock().push("a".to_owned());
    let told = "refused by the other side: a is not welcome ";
    check_refused(&a, &b, &log, &[told], &["a: a is not welcome"]).await;

    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    a.recorder.unwelcome.lock().push("b".to_owned());
    let told = "a: refused by the other side: b is not welcome ";
    check_refused(&a, &b, &log, &["b is not welcome"], &[told]).await;
    assert_eq!(b.get(|seen| seen.lost), 0);
}

#[tokio::test]
async fn another_authority_is_refused() {
    let log = Log::new();
    let (one, other) = (Authority::new(), Authority::new());
    let a = Node::new("a", one.credentials("a")).await;
    let b = Node::new("b", other.credentials("b")).await;
    check_refused(&a, &b, &log, &["TLS: invalid peer certificate"], &["TLS: "]).await;

    // The dialer accepts, the acceptor does not.
    let of_a = Credentials { secrets: Vec::new(), tls: Some(one.tls("a", &[&other])) };
    let a = Node::new("a", of_a).await;
    check_refused(&a, &b, &log, &["received fatal alert"], &["TLS: invalid peer certificate"])
        .await;
}

#[tokio::test]
async fn the_certificate_of_another_node_is_refused() {
    let log = Log::new();
    let authority = Authority::new();
    // What it dials shows the certificate of c: not even a hello is sent.
    let a = Node::new("a", authority.credentials("a")).await;
    let c = Node::new("c", authority.credentials("c")).await;
    a.transport.set_peers(vec![peer("b", &c.address())]);
    log.until(&["cannot connect", "it shows the certificate of c and says it is b"]).await;
    assert!(c.get(|seen| seen.admitted.is_empty()));

    // A dialer with the certificate of c, and perhaps with the secret too, says it is a.
    for known in [vec![], vec![secret(1)]] {
        let of = |node| Credentials { secrets: known.clone(), ..authority.credentials(node) };
        let b = Node::new("b", of("b")).await;
        let dialed = raw_dial(&b, &of("c"), &identity("a"), Lane::Main).await;
        assert_eq!(dialed.err().unwrap().reason, "closed by the other side during the handshake");
        log.until(&["refused a peer", "it shows the certificate of c and says it is a"]).await;
        assert!(b.get(|seen| seen.admitted.is_empty()));
    }
}

#[tokio::test]
async fn members_must_be_set_up_alike() {
    let log = Log::new();
    let authority = Authority::new();
    let tls = |node| authority.credentials(node);
    let both = |node| Credentials { secrets: vec![secret(1)], ..tls(node) };
    let plain = secrets(&[1]);

    let (a, b) = (Node::new("a", tls("a")).await, Node::new("b", both("b")).await);
    let dialer =
        "it is set up for TLS and a shared secret, this node for TLS without a shared secret";
    let acceptor =
        "it is set up for TLS without a shared secret, this node for TLS and a shared secret";
    check_refused(&a, &b, &log, &[dialer], &[acceptor]).await;

    let (a, b) = (Node::new("a", plain.clone()).await, Node::new("b", tls("b")).await);
    check_refused(&a, &b, &log, &["it speaks TLS, and this node is not"], &["TLS: "]).await;

    let (a, b) = (Node::new("a", both("a")).await, Node::new("b", plain.clone()).await);
    check_refused(&a, &b, &log, &["TLS: "], &["it speaks TLS, and this node is not"]).await;
}

#[tokio::test]
async fn another_version_is_refused() {
    let log = Log::new();
    let credentials = secrets(&[1]);
    let b = Node::new("b", credentials.clone()).await;
    let mut fresh = Fresh::plain(TcpStream::connect(b.transport.local_addr()).await.unwrap());
    // Whatever a later version may say after its number.
    fresh.write(b"\x01dflkpeer\x09\x00 and so on").await.unwrap();
    let Ok(Message::Challenge(_)) = parse(&get(&mut fresh).await) else { panic!() };
    until_closed(&mut fresh.stream).await;
    let reason = "it speaks version 9 of the peer protocol, this node versions 1 and 2";
    log.until(&["refused a peer", reason]).await;

    let (listener, address) = listen().await;
    let a = Node::new("a", credentials).await;
    a.transport.set_peers(vec![peer("b", &address)]);
    let mut fresh = Fresh::plain(listener.accept().await.unwrap().0);
    get(&mut fresh).await;
    fresh.write(b"\x02dflkpeer\x09\x00 and so on").await.unwrap();
    log.until(&["cannot connect", "it speaks version 9 of the peer protocol"]).await;
}

#[tokio::test]
async fn a_replay_is_refused() {
    let log = Log::new();
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    let (listener, address) = listen().await;
    let recorded: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let tape = Arc::clone(&recorded);
    let to = b.transport.local_addr();
    let recording = tokio::spawn(async move {
        while let Ok((near, _)) = listener.accept().await {
            let far = TcpStream::connect(to).await.unwrap();
            let number = {
                let mut tape = tape.lock();
                tape.push(Vec::new());
                tape.len() - 1
            };
            let tape = Arc::clone(&tape);
            tokio::spawn(async move {
                let (mut near_in, mut near_out) = near.into_split();
                let (mut far_in, mut far_out) = far.into_split();
                let forth = async {
                    let mut buffer = [0; 4096];
                    while let Ok(length @ 1..) = near_in.read(&mut buffer).await {
                        tape.lock()[number].extend_from_slice(&buffer[..length]);
                        far_out.write_all(&buffer[..length]).await.unwrap();
                    }
                };
                let back = tokio::io::copy(&mut far_in, &mut near_out);
                let _ = tokio::join!(back, forth);
            });
        }
    });
    a.transport.set_peers(vec![peer("b", &address)]);
    a.send(&b, b"once");
    b.until_received(b"once").await;
    a.transport.stop();
    a.transport.stopped().await;
    recording.abort();

    let tapes = recorded.lock().clone();
    assert!(!tapes.iter().any(|tape| tape.ends_with(b"once")), "it can be read on the path");
    for tape in tapes {
        let mut tcp = TcpStream::connect(to).await.unwrap();
        tcp.write_all(&tape).await.unwrap();
        let mut answer = Vec::new();
        // A reset is as good as an end: there was more input than the node wanted to read.
        let _ = tcp.read_to_end(&mut answer).await;
        assert!(answer.len() <= 4 + 44, "more than a challenge");
    }
    log.until(&["refused a peer", "a has another shared secret"]).await;
    b.get(|seen| assert_eq!(seen.main.len(), 1));
}

#[tokio::test]
async fn a_reflection_is_refused() {
    let log = Log::new();
    // The attacker sits at the address of b and lets a answer its own questions.
    let (listener, address) = listen().await;
    // A machine that stands still for a while must not end the attack early.
    let a = Node::with("a", secrets(&[1]), |(config, _)| config.limits.handshake = PATIENCE).await;
    a.transport.set_peers(vec![peer("b", &address)]);
    let mut dialer = Fresh::plain(listener.accept().await.unwrap().0);
    let hello = get(&mut dialer).await;
    let mut acceptor = Fresh::plain(TcpStream::connect(a.transport.local_addr()).await.unwrap());
    acceptor.write(&hello).await.unwrap();
    dialer.write(&get(&mut acceptor).await).await.unwrap();
    acceptor.write(&get(&mut dialer).await).await.unwrap();
    // The proof is good, so a says why it refuses; and does not believe it when it comes back.
    let welcome = get(&mut acceptor).await;
    until_closed(&mut acceptor.stream).await;
    dialer.write(&welcome).await.unwrap();
    until_closed(&mut dialer.stream).await;
    log.until(&["refused a peer", "a: a wants b, this is a"]).await;
    log.until(&["cannot connect", "a wants b, this is a"]).await;

    // Or it sends a's proof back as its own welcome, or a's hello back as a challenge.
    for answer in 0..2 {
        let mut dialer = Fresh::plain(listener.accept().await.unwrap().0);
        let hello = get(&mut dialer).await;
        if answer == 0 {
            dialer.write(&hello).await.unwrap();
        } else {
            let nonce = share(Version::Sealed).nonce;
            dialer.write(&handshake::challenge(Version::Sealed, PLAIN, nonce)).await.unwrap();
            let Ok(Message::Proof { mac }) = parse(&get(&mut dialer).await) else { panic!() };
            let welcome = Welcome { identity: identity("b"), refusal: None, mac };
            dialer.write(&Message::Welcome(welcome).print()).await.unwrap();
        }
        until_closed(&mut dialer.stream).await;
    }
    log.until(&["cannot connect", "b has another shared secret"]).await;
    a.get(|seen| assert!(seen.reachable == 0 && seen.admitted.is_empty()));
}

#[tokio::test]
async fn unusable_set_ups_do_not_start() {
    let authority = Authority::new();
    let no_secret = Credentials { secrets: Vec::new(), tls: None };
    for (node, credentials, reason) in [
        ("a", no_secret.clone(), "peers need a shared secret or TLS, neither is given"),
        ("no node", secrets(&[1]), "no node id: \"no node\""),
        (
            "a",
            authority.credentials("b"),
            "the common name of the peer certificate is b, the node id is a: they must be equal",
        ),
    ] {
        let handler = Arc::new(Recorder::new(identity(node)));
        let error = Transport::start(config(credentials), handler).await.err().unwrap();
        assert_eq!(error.to_string(), reason);
    }
    let a = Node::new("a", secrets(&[1])).await;
    assert!(a.transport.reload(no_secret).is_err());
    assert!(a.transport.reload(authority.credentials("b")).is_err());
    assert!(Secret::new(vec![1; SECRET_BYTES_MIN - 1]).is_err());
}

// Strangers.

#[tokio::test]
async fn silent_strangers_are_closed() {
    let b = Node::with("b", secrets(&[1]), |(config, _)| {
        config.limits.handshake = Duration::from_millis(200);
    })
    .await;
    let mut strangers = Vec::new();
    for number in 0..20 {
        let mut tcp = TcpStream::connect(b.transport.local_addr()).await.unwrap();
        // Silent at once, or in the middle of a word.
        tcp.write_all(&b"\x40\0\0\0\x01dflk"[..number % 10]).await.unwrap();
        strangers.push(tcp);
    }
    for mut stranger in strangers {
        until_closed(&mut stranger).await;
    }
    assert!(b.transport.shared.strangers.lock().places.is_empty());
}

#[tokio::test]
async fn strangers_do_not_keep_a_member_out() {
    let patient = |(config, _): &mut (TransportConfig, Identity)| {
        config.limits.handshake = PATIENCE * 10;
    };
    let authority = Authority::new();
    for (of_a, of_b) in
        [(secrets(&[1]), secrets(&[1])), (authority.credentials("a"), authority.credentials("b"))]
    {
        let (a, b) = (Node::new("a", of_a).await, Node::with("b", of_b, patient).await);
        let mut strangers = Vec::new();
        for _ in 0..300 {
            strangers.push(TcpStream::connect(b.transport.local_addr()).await.unwrap());
        }
        a.dial(&[&b]);
        a.send(&b, b"let me in");
        b.until_received(b"let me in").await;
        assert!(b.transport.shared.strangers.lock().places.len() <= 256);
        // The first have made room for the last.
        for stranger in &mut strangers[..40] {
            until_closed(stranger).await;
        }
        b.transport.stop();
        b.transport.stopped().await;
    }
}

/// GUARANTEES 48: whoever comes often pushes out himself, not those who come from elsewhere.
#[test]
fn one_address_does_not_push_out_the_others() {
    let mut strangers = Strangers::default();
    let address = |last: u8| AddressKey::from(std::net::Ipv4Addr::new(10, 0, 0, last));
    let mut member = strangers.enter(0, address(1), 16);
    let mut flood = Vec::new();
    for number in 1..=10_000 {
        flood.push(strangers.enter(number, address(2), 16));
    }
    assert!(!is_closed(&mut member), "the member's place is its own");
    assert_eq!(strangers.places.len(), 16);
    assert_eq!(flood.iter_mut().filter_map(|place| (!is_closed(place)).then_some(())).count(), 15);
    // Among addresses with one place each the oldest goes.
    for number in 0..16 {
        flood.push(strangers.enter(20_000 + u64::from(number), address(100 + number), 16));
    }
    assert!(is_closed(&mut member));
}

fn is_closed(place: &mut oneshot::Receiver<()>) -> bool {
    matches!(place.try_recv(), Err(oneshot::error::TryRecvError::Closed))
}

#[tokio::test]
async fn strangers_must_be_brief() {
    let log = Log::new();
    // They are closed for what they say, not for the time they take.
    let b =
        Node::with("b", secrets(&[1]), |(config, _)| config.limits.handshake = PATIENCE * 10).await;
    let hello = |length: u32| [&length.to_le_bytes()[..], &[1; 20]].concat();
    for bytes in [hello(1021), hello(u32::MAX), b"GET / HTTP/1.1\r\n\r\n".to_vec()] {
        let mut tcp = TcpStream::connect(b.transport.local_addr()).await.unwrap();
        tcp.write_all(&bytes).await.unwrap();
        until_closed(&mut tcp).await;
    }
    log.until(&["refused a peer", "too much before authentication"]).await;

    // Also in several words: a good hello, then as much as would have been allowed at first.
    let mut fresh = Fresh::plain(TcpStream::connect(b.transport.local_addr()).await.unwrap());
    let credentials = secrets(&[1]);
    let keys = Keys { secrets: &credentials.secrets, binding: None };
    let ours = identity("a");
    let nonce = share(Version::Sealed).nonce;
    let dialer = Dialer::new(keys, &ours, "b", Lane::Main, Version::Sealed, nonce);
    fresh.write(dialer.hello()).await.unwrap();
    get(&mut fresh).await;
    fresh.stream.write_all(&hello(1000)).await.unwrap();
    until_closed(&mut fresh.stream).await;
    b.assert_nothing_received();
}

#[tokio::test]
async fn the_log_is_not_flooded() {
    let log = Log::new();
    let b = Node::new("b", secrets(&[1])).await;
    for _ in 0..100 {
        let mut tcp = TcpStream::connect(b.transport.local_addr()).await.unwrap();
        tcp.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        until_closed(&mut tcp).await;
    }
    // Some more, if the machine is so slow that the budget has grown meanwhile.
    let lines = log.lines.lock().len();
    assert!((10..=20).contains(&lines), "{lines} lines");
}

#[tokio::test]
async fn a_frame_that_is_too_long_ends_the_stream() {
    let log = Log::new();
    let credentials = secrets(&[1]);
    let b = Node::new("b", credentials.clone()).await;
    let mut raw = raw_member(&b, &credentials, &identity("a"), Lane::Bulk).await;
    raw.send(b"good").await;
    let length = u32::try_from(FRAME_BYTES_MAX + TAG_BYTES + 1).unwrap();
    raw.fresh.stream.write_all(&[&length.to_le_bytes()[..], b"bad"].concat()).await.unwrap();
    until_closed(&mut raw.fresh.stream).await;
    log.until(&["lost a stream of a peer", "a frame of 67108881 bytes"]).await;
    b.until("the end", |seen| seen.lost == 1).await;
    b.get(|seen| assert_eq!(seen.bulk, [(1, Bytes::from_static(b"good"))]));
}

// Ends and new beginnings.

#[tokio::test]
async fn reconnects_when_the_peer_is_back() {
    let authority = Authority::new();
    for (of_a, of_b) in
        [(secrets(&[1]), secrets(&[1])), (authority.credentials("a"), authority.credentials("b"))]
    {
        let (a, b) = (Node::new("a", of_a).await, Node::new("b", of_b.clone()).await);
        a.dial(&[&b]);
        b.dial(&[&a]);
        a.send(&b, b"one");
        b.until_received(b"one").await;
        a.until("streams of b", |seen| seen.admitted.len() == 4).await;

        let address = b.address();
        b.transport.stop();
        b.transport.stopped().await;
        a.until("the loss", |seen| seen.lost == 2 && seen.refused >= 2).await;
        assert!(a.get(|seen| seen.unreachable > seen.refused), "a loss is not a refusal");

        let b = Node::with("b", of_b, |(config, _)| config.listen = address).await;
        a.until("connections", |seen| seen.reachable == 4).await;
        a.send(&b, b"two");
        b.until_received(b"two").await;
        b.get(|seen| assert_eq!(seen.main.len(), 1));
    }
}

#[tokio::test]
async fn a_peer_that_dials_is_dialed_at_once() {
    let never = |(config, _): &mut (TransportConfig, Identity)| {
        config.limits.redial_min = PATIENCE * 10;
        config.limits.redial_max = PATIENCE * 10;
    };
    let (listener, address) = listen().await;
    drop(listener);
    let a = Node::with("a", secrets(&[1]), never).await;
    a.transport.set_peers(vec![peer("b", &address)]);
    a.until("refusals", |seen| seen.refused == 2).await;
    let b = Node::with("b", secrets(&[1]), |(config, _)| config.listen = address).await;
    b.dial(&[&a]);
    a.until("connections", |seen| seen.reachable == 2).await;
}

#[tokio::test]
async fn nothing_old_comes_after_a_loss() {
    let (listener, address) = listen().await;
    drop(listener);
    let a = Node::new("a", secrets(&[1])).await;
    a.transport.set_peers(vec![peer("b", &address)]);
    assert!(a.transport.send(2, Lane::Main, Bytes::from_static(b"old")));
    a.until("refusals", |seen| seen.refused >= 4).await;
    let b = Node::with("b", secrets(&[1]), |(config, _)| config.listen = address).await;
    a.until("connections", |seen| seen.reachable == 2).await;
    a.send(&b, b"new");
    b.until_received(b"new").await;
    b.get(|seen| assert_eq!(seen.main.len(), 1));
}

#[tokio::test]
async fn removed_peers_are_cut() {
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    let c = Node::new("c", secrets(&[1])).await;
    for node in [&a, &b, &c] {
        node.dial(&[&a, &b, &c]);
    }
    for node in [&a, &b, &c] {
        node.until("connections", |seen| seen.reachable == 4).await;
    }
    // b is removed, and told so with the last frame.
    b.recorder.unwelcome.lock().push("c".to_owned());
    a.recorder.unwelcome.lock().push("b".to_owned());
    a.send(&b, b"go");
    a.dial(&[&c]);
    assert!(!a.send(&b, b"x"));
    b.until_received(b"go").await;
    b.until("its streams are gone", |seen| seen.lost == 2 && seen.unreachable >= 4).await;
    let lost = a.get(|seen| (seen.lost, seen.unreachable));
    assert_eq!(lost, (0, 0), "it was us");
    // The others have noticed nothing.
    a.send(&c, b"still here");
    c.until_received(b"still here").await;
    c.send(&a, b"here too");
    a.until_received(b"here too").await;
    c.get(|seen| assert_eq!((seen.lost, seen.unreachable, seen.reachable), (0, 0, 4)));

    // A new address is a new connection.
    a.recorder.unwelcome.lock().clear();
    let moved = Node::new("b", secrets(&[1])).await;
    a.dial(&[&moved, &c]);
    a.send(&moved, b"welcome back");
    moved.until_received(b"welcome back").await;
    c.get(|seen| assert_eq!((seen.lost, seen.unreachable, seen.reachable), (0, 0, 4)));
}

#[tokio::test]
async fn a_newer_stream_takes_over() {
    let credentials = secrets(&[1]);
    let b = Node::new("b", credentials.clone()).await;
    let mut older = raw_member(&b, &credentials, &identity("a"), Lane::Main).await;
    let mut bulk = raw_member(&b, &credentials, &identity("a"), Lane::Bulk).await;
    older.send(b"1").await;
    b.until_received(b"1").await;
    let mut newer = raw_member(&b, &credentials, &identity("a"), Lane::Main).await;
    until_closed(&mut older.fresh.stream).await;
    newer.send(b"2").await;
    bulk.send(b"3").await;
    b.until_received(b"2").await;
    b.until("bulk", |seen| seen.bulk.len() == 1).await;
    assert_eq!(b.get(|seen| seen.lost), 0);
    drop(newer);
    b.until("the end", |seen| seen.lost == 1).await;
    let left: Vec<_> = b.transport.shared.streams.lock().keys().cloned().collect();
    assert_eq!(left, [("a".to_owned(), Lane::Bulk)]);
}

#[tokio::test]
async fn who_talks_where_it_should_listen_is_cut() {
    let (listener, address) = listen().await;
    let credentials = secrets(&[1]);
    let a = Node::new("a", credentials.clone()).await;
    a.transport.set_peers(vec![peer("b", &address)]);
    let mut raw = raw_accept(&listener, &credentials, &identity("b")).await;
    a.until("a connection", |seen| seen.reachable == 1).await;
    raw.send(b"hm").await;
    a.until("the cut", |seen| seen.unreachable >= 1).await;
}

#[tokio::test]
async fn a_node_without_a_cluster_can_be_met() {
    let leader = Node::new("a", secrets(&[1])).await;
    let joiner = Node::with("b", secrets(&[1]), |(_, identity)| {
        identity.cluster = None;
        identity.raft_id = 0;
    })
    .await;
    leader.dial(&[&joiner]);
    leader.send(&joiner, b"you are 2");
    joiner.until_received(b"you are 2").await;
    let met = joiner.get(|seen| seen.admitted[0].clone());
    assert_eq!((met.cluster, met.raft_id), (Some(CLUSTER), 1));
    assert_eq!(leader.get(|seen| seen.admitted[0].cluster), None);

    // It answers before it knows its number, and then under its number.
    joiner.dial(&[&leader]);
    joiner.send(&leader, b"who?");
    leader.until_received(b"who?").await;
    assert_eq!(leader.get(|seen| seen.main[0].0), 0);
    *joiner.recorder.identity.lock() = identity("b");
    joiner.dial(&[&leader]);
    joiner.until("new connections", |seen| seen.reachable == 4).await;
    joiner.send(&leader, b"me");
    leader.until_received(b"me").await;
    assert_eq!(leader.get(|seen| seen.main[1].0), 2);
}

#[tokio::test]
async fn the_last_words_are_sent() {
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    a.dial(&[&b]);
    a.until("connections", |seen| seen.reachable == 2).await;
    for number in 0..100 {
        a.send(&b, &[number]);
    }
    a.transport.stop();
    assert!(!a.send(&b, b"too late"));
    a.dial(&[&b]);
    assert!(!a.send(&b, b"too late"));
    a.transport.stopped().await;
    b.until("all", |seen| seen.main.len() == 100).await;
    assert_eq!(connect(&a.address()).await.err().map(|fault| fault.refused), Some(true));
    // Dropping is stopping.
    let address = b.address();
    drop(b);
    eventually("the port is closed", async || connect(&address).await.is_err()).await;
}

// Rotation.

/// What was made with credentials that are gone is made again, both ways.
async fn until_connected_anew(a: &Node, b: &Node) {
    for (node, other) in [(a, b), (b, a)] {
        node.until("new connections", |seen| seen.reachable >= 4).await;
        until("a frame", || {
            node.send(other, b"new");
            other.get(|seen| seen.main.iter().any(|(_, frame)| frame == "new"))
        })
        .await;
    }
}

#[tokio::test]
async fn secrets_are_rotated_without_a_gap() {
    let (a, b) = (Node::new("a", secrets(&[1])).await, Node::new("b", secrets(&[1])).await);
    a.dial(&[&b]);
    b.dial(&[&a]);
    let connections = |node: &Node| node.get(|seen| (seen.reachable, seen.unreachable, seen.lost));
    a.until("connections", |seen| seen.reachable == 2).await;
    b.until("connections", |seen| seen.reachable == 2).await;
    for step in [&[1, 2], &[2, 1]] {
        for node in [&a, &b] {
            node.transport.reload(secrets(step)).unwrap();
            // Whoever comes now uses its own first secret, the others know it.
            let credentials = secrets(&step[..1]);
            let guest = raw_member(node, &credentials, &identity("c"), Lane::Main).await;
            drop(guest);
            node.until("the guest", |seen| seen.lost == 1).await;
            node.recorder.seen.lock().lost = 0;
        }
        assert_eq!((connections(&a), connections(&b)), ((2, 0, 0), (2, 0, 0)));
    }
    // The old one goes: what was made with it is made again.
    a.transport.reload(secrets(&[2])).unwrap();
    b.transport.reload(secrets(&[2])).unwrap();
    until_connected_anew(&a, &b).await;
    let old = raw_dial(&a, &secrets(&[1]), &identity("c"), Lane::Main).await;
    assert_eq!(old.err().unwrap().reason, "closed by the other side during the handshake");
}

#[tokio::test]
async fn authorities_are_rotated_without_a_gap() {
    let (old, new) = (Authority::new(), Authority::new());
    let with = |tls| Credentials { secrets: Vec::new(), tls: Some(tls) };
    let a = Node::new("a", with(old.tls("a", &[]))).await;
    let b = Node::new("b", with(old.tls("b", &[]))).await;
    let nodes = [&a, &b];
    a.dial(&[&b]);
    b.dial(&[&a]);
    for node in nodes {
        node.until("connections", |seen| seen.reachable == 2).await;
    }
    // Both are accepted; then the certificates are new; nobody is cut.
    for node in nodes {
        node.transport.reload(with(old.tls(&node.name, &[&new]))).unwrap();
    }
    for node in nodes {
        node.transport.reload(with(new.tls(&node.name, &[&old]))).unwrap();
        let guest =
            raw_member(node, &with(old.tls("c", &[&new])), &identity("c"), Lane::Main).await;
        drop(guest);
        node.until("the guest", |seen| seen.lost == 1).await;
        node.get(|seen| assert_eq!((seen.reachable, seen.unreachable), (2, 0)));
    }
    // The old authority goes: its certificates are no longer good, not even on open connections.
    for node in nodes {
        node.transport.reload(with(new.tls(&node.name, &[]))).unwrap();
    }
    until_connected_anew(&a, &b).await;
    let guest = raw_dial(&a, &with(old.tls("c", &[&new])), &identity("c"), Lane::Main).await;
    let reason = guest.err().unwrap().reason;
    assert!(reason.contains("received fatal alert") || reason.contains("closed"), "{reason}");
}

#[test]
fn unusable_certificates_are_named() {
    let authority = Authority::new();
    let check = |cert: &str, key: &str, ca: &str, reason: &str| {
        let (cert, key) = (authority.file("cert", cert), authority.file("key", key));
        let error = PeerTls::load(&cert, &key, &authority.file("ca", ca)).err().unwrap();
        let error = error.to_string().replace(authority.dir.name("").trim_end_matches('/'), "DIR");
        assert!(error.starts_with(reason), "{error}");
    };
    let (cert, key) = authority.issue(&["a"]);
    let ca = authority.pem.clone();
    let none = "no certificate in PEM form found";
    check("", &key, &ca, &format!("cannot use the peer certificate DIR/cert: {none}"));
    check(&cert, &key, "", &format!("cannot use the peer authority DIR/ca: {none}"));
    check(&cert, &cert, &ca, "cannot use the peer key DIR/key: no private key in PEM form found");
    let (_, foreign) = authority.issue(&["a"]);
    let reason = "cannot use the peer certificate DIR/cert: not usable with key DIR/key";
    check(&cert, &foreign, &ca, reason);
    for names in [&[][..], &["a", "b"]] {
        let (cert, key) = authority.issue(names);
        let reason = "cannot use the peer certificate DIR/cert: the certificate has no common name, or \
                      more than one";
        check(&cert, &key, &ca, reason);
    }
    let hollow = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    let reason = "cannot use the peer certificate DIR/cert: the certificate cannot be read";
    check(hollow, &key, &ca, reason);
    check(&cert, &key, hollow, "cannot use the peer authority DIR/ca");

    let missing = authority.dir.path("missing");
    let error = PeerTls::load(&missing, &missing, &missing).err().unwrap().to_string();
    assert!(error.contains("missing: ") && error.contains("os error 2"), "{error}");
}

// The handshake without sockets.

const PLAIN: Mode = Mode { tls: false, secret: true };

fn messages() -> [Message; 7] {
    let hello = Hello {
        version: Version::Sealed,
        mode: PLAIN,
        lane: Lane::Bulk,
        nonce: [0xab; 32],
        identity: identity("a"),
        target: "node-2".to_owned(),
    };
    let waiting = Identity { cluster: None, raft_id: 0, witness: true, ..identity("b") };
    let mac = [0xcd; 32];
    let reason = Some("näh".to_owned());
    [
        Message::Hello(hello),
        Message::Challenge(Challenge {
            version: Version::Plain,
            mode: Mode { tls: true, secret: false },
            nonce: [0xef; 32],
        }),
        Message::Proof { mac },
        Message::Welcome(Welcome { identity: waiting.clone(), refusal: None, mac }),
        Message::Welcome(Welcome { identity: waiting, refusal: reason.clone(), mac }),
        Message::Verdict { refusal: None },
        Message::Verdict { refusal: reason },
    ]
}

#[test]
fn the_bytes_of_the_handshake() {
    let nonce = |byte: u8| vec![byte; 32];
    let a =
        [b"\x01".as_slice(), &CLUSTER, b"\x01\0\0\0\0\0\0\0\x65\0\0\0\0\0\0\0\0\x07\0\0\0\x01a"];
    let b = [[0; 17].as_slice(), b"\0\0\0\0\0\0\0\0\x66\0\0\0\0\0\0\0\x01\x07\0\0\0\x01b"];
    let expected: [&[&[u8]]; 7] = [
        &[b"\x01dflkpeer\x02\0\x02\x01", &nonce(0xab), &a.concat(), b"\x06node-2"],
        &[b"\x02dflkpeer\x01\0\x01", &nonce(0xef)],
        &[b"\x03", &nonce(0xcd)],
        &[b"\x04", &b.concat(), b"\0\0", &nonce(0xcd)],
        &[b"\x04", &b.concat(), b"\x04\0n\xc3\xa4h", &nonce(0xcd)],
        &[b"\x05\0\0"],
        &[b"\x05\x04\0n\xc3\xa4h"],
    ];
    for (message, expected) in messages().into_iter().zip(expected) {
        let bytes = message.print();
        assert_eq!(bytes.escape_ascii().to_string(), expected.concat().escape_ascii().to_string());
        assert_eq!(parse(&bytes), Ok(message));
        for end in 0..bytes.len() {
            assert!(parse(&bytes[..end]).is_err());
        }
        assert!(parse(&[&bytes[..], b"x"].concat()).is_err());
    }
}

#[test]
fn the_bytes_of_the_proofs() {
    // HMAC-SHA-256 over: label, 1 if TLS, 32 bytes of the TLS session, then each message with its
    // length before it (u64).
    let known = [secret(1)];
    let (ours, theirs) = (identity("a"), identity("b"));
    let (plain, sealed) = (Version::Plain, Version::Sealed);
    for (binding, version) in [(None, plain), (None, sealed), (Some([9; 32]), plain)] {
        let keys = Keys { secrets: &known, binding };
        let mut dialer = Dialer::new(keys, &ours, "b", Lane::Main, version, [5; 32]);
        let challenge = handshake::challenge(version, keys.mode(), [6; 32]);
        let proof = dialer.prove(&challenge).unwrap();
        let part = |part: &[u8]| [&(part.len() as u64).to_le_bytes()[..], part].concat();
        let said = [part(dialer.hello()), part(&challenge)].concat();
        let session = [&[u8::from(binding.is_some())][..], &binding.unwrap_or_default()].concat();
        let key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &[1; 32]);
        let text = [b"dflockd peer 1 dialer\0", &session[..], &said].concat();
        ring::hmac::verify(&key, &text, &proof[1..]).unwrap();

        let acceptor = Acceptor::new(keys, version, dialer.hello(), &challenge).unwrap();
        assert_eq!(acceptor.check(&proof), Ok(0));
        let welcome = acceptor.welcome(&theirs, None, 0);
        let (body, mac) = welcome.split_at(welcome.len() - 32);
        let text = [b"dflockd peer 1 acceptor\0", &session[..], &said, &part(body)].concat();
        ring::hmac::verify(&key, &text, mac).unwrap();
        assert_eq!(dialer.conclude(&welcome), Ok(theirs.clone()));
    }
}

#[test]
fn the_secret_that_was_used_is_the_one_that_counts() {
    let (one, two) = (secret(1), secret(2));
    let (dialers, acceptors) = ([one.clone(), two.clone()], [two, one]);
    let dialers = Keys { secrets: &dialers, binding: None };
    let acceptors = Keys { secrets: &acceptors, binding: None };
    let (ours, theirs) = (identity("a"), identity("b"));
    let mut dialer = Dialer::new(dialers, &ours, "b", Lane::Main, Version::Sealed, [5; 32]);
    let challenge = handshake::challenge(Version::Sealed, PLAIN, [6; 32]);
    let proof = dialer.prove(&challenge).unwrap();
    let acceptor = Acceptor::new(acceptors, Version::Sealed, dialer.hello(), &challenge).unwrap();
    assert_eq!(acceptor.check(&proof), Ok(1));
    assert_eq!(dialer.conclude(&acceptor.welcome(&theirs, None, 1)), Ok(theirs.clone()));
    assert!(dialer.conclude(&acceptor.welcome(&theirs, None, 0)).is_err());
}

#[test]
fn every_word_is_covered() {
    let known = [secret(1)];
    let (ours, theirs) = (identity("a"), identity("b"));
    for secrets in [&known[..], &[]] {
        let keys = Keys { secrets, binding: Some([9; 32]) };
        let other_session = Keys { binding: Some([8; 32]), ..keys };
        let mut dialer = Dialer::new(keys, &ours, "b", Lane::Main, Version::Plain, [5; 32]);
        let hello = dialer.hello().to_vec();
        let challenge = handshake::challenge(Version::Plain, keys.mode(), [6; 32]);
        let proof = dialer.prove(&challenge).unwrap();
        let accepts = |keys, hello: &[u8], challenge: &[u8], proof: &[u8]| {
            Acceptor::new(keys, Version::Plain, hello, challenge)
                .is_ok_and(|it| it.check(proof).is_ok())
        };
        assert!(accepts(keys, &hello, &challenge, &proof));
        assert!(!accepts(other_session, &hello, &challenge, &proof));
        for bad in flips(&hello) {
            assert!(!accepts(keys, &bad, &challenge, &proof), "{bad:?}");
        }
        for bad in flips(&challenge) {
            assert!(!accepts(keys, &hello, &bad, &proof), "{bad:?}");
        }
        for bad in flips(&proof) {
            assert!(!accepts(keys, &hello, &challenge, &bad), "{bad:?}");
        }
        let acceptor = Acceptor::new(keys, Version::Plain, &hello, &challenge).unwrap();
        let welcome = acceptor.welcome(&theirs, None, 0);
        assert_eq!(dialer.conclude(&welcome), Ok(theirs.clone()));
        for bad in flips(&welcome) {
            assert!(dialer.conclude(&bad).is_err(), "{bad:?}");
        }
    }
}

/// The same bytes with each of their bits flipped, one at a time.
fn flips(bytes: &[u8]) -> impl Iterator<Item = Vec<u8>> {
    (0..bytes.len() * 8).map(|bit| flipped(bytes, bit))
}

fn flipped(bytes: &[u8], bit: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[bit / 8] ^= 1 << (bit % 8);
    bytes
}

#[test]
fn all_that_one_side_says_is_brief() {
    let longest = Identity { node: "n".repeat(64), ..identity("a") };
    let hello = Hello {
        version: Version::Sealed,
        mode: PLAIN,
        lane: Lane::Main,
        nonce: [0; 32],
        identity: longest.clone(),
        target: "t".repeat(64),
    };
    let refusal = Some("r".repeat(handshake::REASON_BYTES_MAX));
    let bytes = |messages: &[Message]| messages.iter().map(|m| 4 + m.print().len()).sum::<usize>();
    let mac = [0; 32];
    let dialer = [
        Message::Hello(hello),
        Message::Proof { mac },
        Message::Verdict { refusal: refusal.clone() },
    ];
    let acceptor = [
        Message::Challenge(Challenge { version: Version::Sealed, mode: PLAIN, nonce: [0; 32] }),
        Message::Welcome(Welcome { identity: longest, refusal, mac }),
    ];
    assert!(bytes(&dialer) + TAG_BYTES <= handshake::BYTES_MAX);
    assert!(bytes(&acceptor) <= handshake::BYTES_MAX);
}

#[test]
fn reasons_are_made_presentable() {
    for (reason, shown) in [("", "no reason given"), ("a\nb\u{1b}[c", "a b [c")] {
        let bytes = handshake::verdict(Some(reason));
        assert_eq!(parse(&bytes), Ok(Message::Verdict { refusal: Some(shown.to_owned()) }));
    }
    let bytes = handshake::verdict(Some(&"ä".repeat(1000)));
    assert_eq!(parse(&bytes), Ok(Message::Verdict { refusal: Some("ä".repeat(200)) }));
    for bad in [&b"\x05\x01\0\n"[..], b"\x05\x01\0\xff"] {
        assert!(parse(bad).is_err());
    }
}

proptest! {
    #[test]
    fn whatever_is_parsed_prints_as_it_was(
        which in 0..7_usize,
        changes in proptest::collection::vec((any::<proptest::sample::Index>(), any::<u8>()), 0..4),
        tail in proptest::collection::vec(any::<u8>(), 0..3),
    ) {
        let mut bytes = messages()[which].print();
        bytes.extend(tail);
        for (index, byte) in changes {
            *index.get_mut(&mut bytes) = byte;
        }
        if let Ok(message) = parse(&bytes) {
            prop_assert_eq!(message.print(), bytes);
        }
    }

    #[test]
    fn any_bytes_can_be_parsed(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        if let Ok(message) = parse(&bytes) {
            prop_assert_eq!(message.print(), bytes);
        }
    }
}
