//! HTTP/2, spoken with a few frames by hand: over TLS, and without it where that is wanted.

use std::sync::Arc;
use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Got, Wire};
use dflockd_testkit::millis;
use rustls::ClientConfig;
use serde_json::{Value, json};

use super::site::{Site, is_id};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const PRIORITY: u8 = 2;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;

const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;

/// A frame: kind, flags, stream, payload.
struct Frame {
    kind: u8,
    flags: u8,
    stream: u32,
    payload: Vec<u8>,
}

impl Frame {
    fn bytes(&self) -> Vec<u8> {
        let length = u32::try_from(self.payload.len()).unwrap().to_be_bytes();
        let mut bytes = length[1..].to_vec();
        bytes.extend([self.kind, self.flags]);
        bytes.extend(self.stream.to_be_bytes());
        bytes.extend(&self.payload);
        bytes
    }
}

/// A client of one connection.
struct Second {
    wire: Wire,
    streams: u32,
}

impl Second {
    fn connect(site: &Site, alpn: &[&[u8]]) -> std::io::Result<Self> {
        let config = site.tls.as_ref().map(|config| offering(config, alpn));
        let mut wire = Wire::connect(site.http, config.as_ref())?;
        wire.send(PREFACE);
        let mut client = Self { wire, streams: 0 };
        client.send(SETTINGS, 0, 0, Vec::new()).expect("the server listens");
        Ok(client)
    }

    fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: Vec<u8>) -> std::io::Result<()> {
        self.wire.try_send(Frame { kind, flags, stream, payload }.bytes())
    }

    fn read(&mut self) -> Result<Frame, Got> {
        let head = self.wire.exactly(9)?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let stream = u32::from_be_bytes([head[5], head[6], head[7], head[8]]);
        let payload = self.wire.exactly(usize::try_from(length).unwrap())?;
        Ok(Frame { kind: head[3], flags: head[4], stream, payload })
    }

    /// Begins a request on a new stream and gives its number.
    fn begin(&mut self, method: &str, path: &str, session: Option<&str>, body: &str) -> u32 {
        let stream = 2 * self.streams + 1;
        self.streams += 1;
        // Literals without indexing: `:method` is entry 2 of the static table, `:path` 4, `:authority` 1.
        let mut head = Vec::new();
        let mut literal = |name: u8, value: &str| {
            head.push(name);
            head.push(u8::try_from(value.len()).expect("short"));
            head.extend(value.as_bytes());
        };
        literal(2, method);
        literal(4, path);
        literal(1, "localhost");
        // Entry 7 is `:scheme: https`.
        head.push(0x87);
        if let Some(id) = session {
            let name = "x-dflockd-session";
            head.extend([0, u8::try_from(name.len()).unwrap()]);
            head.extend(name.as_bytes());
            head.push(u8::try_from(id.len()).unwrap());
            head.extend(id.as_bytes());
        }
        let end = if body.is_empty() { END_STREAM } else { 0 };
        self.send(HEADERS, END_HEADERS | end, stream, head).expect("the server listens");
        if !body.is_empty() {
            self.send(DATA, END_STREAM, stream, body.into()).expect("the server listens");
        }
        stream
    }

    /// The status (as its entry of the static table) and the body of the next stream that ends.
    fn answer(&mut self) -> (u32, u8, String) {
        let mut status = std::collections::BTreeMap::new();
        let mut bodies = std::collections::BTreeMap::<u32, Vec<u8>>::new();
        loop {
            let frame = self.read().expect("a frame");
            match frame.kind {
                HEADERS => {
                    status.insert(frame.stream, frame.payload[0]);
                }
                DATA => bodies.entry(frame.stream).or_default().extend(&frame.payload),
                SETTINGS if frame.flags & ACK == 0 => {
                    self.send(SETTINGS, ACK, 0, Vec::new()).expect("the server listens");
                }
                PING if frame.flags & ACK == 0 => {
                    self.send(PING, ACK, 0, frame.payload).expect("the server listens");
                    continue;
                }
                GOAWAY | RST_STREAM => panic!("refused: {} {:?}", frame.kind, frame.payload),
                _ => continue,
            }
            if frame.kind <= HEADERS && frame.flags & END_STREAM != 0 {
                let body = bodies.remove(&frame.stream).unwrap_or_default();
                let body = String::from_utf8(body).expect("text");
                return (frame.stream, status[&frame.stream], body);
            }
        }
    }

    fn ask(&mut self, method: &str, path: &str, session: Option<&str>, body: &str) -> (u8, String) {
        let stream = self.begin(method, path, session, body);
        let (of, status, body) = self.answer();
        assert_eq!(of, stream);
        (status, body)
    }
}

/// The same client with something to say about protocols.
fn offering(config: &Arc<ClientConfig>, alpn: &[&[u8]]) -> Arc<ClientConfig> {
    let mut config = ClientConfig::clone(config);
    config.alpn_protocols = alpn.iter().map(|name| name.to_vec()).collect();
    Arc::new(config)
}

/// `:status: 200` and `:status: 204` in the static table.
const OK: u8 = 0x88;
const NO_CONTENT: u8 = 0x89;

#[test]
fn many_streams_on_one_connection() {
    let site = Site::with_tls(&[]);
    let mut client = Second::connect(&site, &[b"h2"]).unwrap();
    let (status, body) = client.ask("GET", "/health", None, "");
    assert_eq!((status, body.as_str()), (OK, "{\"status\":\"ok\"}\n"));
    let mut open = || {
        let (status, body) = client.ask("POST", "/v1/sessions", None, "{}");
        assert_eq!(status, OK);
        let body: Value = serde_json::from_str(&body).unwrap();
        body["session_id"].as_str().filter(|id| is_id(id)).expect("an id").to_owned()
    };
    let (a, b) = (open(), open());
    let (_, body) = client.ask("POST", "/v1/locks/k", Some(&a), r#"{"lease_ttl_s":600}"#);
    let first: Value = serde_json::from_str(&body).unwrap();
    // A long poll on one stream blocks none of the others.
    let long = client.begin("POST", "/v1/locks/k", Some(&b), r#"{"acquire_timeout_s":600}"#);
    site.wait_for_crowd("k", 1, 1);
    let (status, _) = client.ask("GET", "/health", None, "");
    assert_eq!(status, OK);
    let token = json!({ "token": first["token"] }).to_string();
    let release = client.begin("POST", "/v1/locks/k/release", Some(&a), &token);
    let mut answers = [client.answer(), client.answer()];
    answers.sort_by_key(|answer| answer.0 == release);
    assert_eq!((answers[1].0, answers[1].1), (release, NO_CONTENT));
    let second: Value = serde_json::from_str(&answers[0].2).unwrap();
    assert_eq!((answers[0].0, &second["status"]), (long, &json!("ok")));

    // A stream that is reset is a client that went away.
    let long = client.begin("POST", "/v1/locks/k", Some(&a), r#"{"acquire_timeout_s":600}"#);
    site.wait_for_crowd("k", 1, 1);
    client.send(RST_STREAM, 0, long, 8_u32.to_be_bytes().to_vec()).unwrap();
    site.wait_for_crowd("k", 1, 0);
}

#[test]
fn the_older_version_for_those_who_want_it() {
    let site = Site::with_tls(&[]);
    let offers: [&[&[u8]]; 3] = [&[], &[b"http/1.1"], &[b"http/1.1", b"http/1.0"]];
    for alpn in offers {
        let config = offering(site.tls.as_ref().unwrap(), alpn);
        let mut wire = Wire::connect(site.http, Some(&config)).unwrap();
        wire.ask(&Ask::get("/health")).ok();
    }
}

/// Sends until the server closes, which it must do long before all is sent. What it answers is read and dropped: a
/// client that does not read slows itself down.
#[track_caller]
fn flood(client: &mut Second, mut next: impl FnMut(&mut Second) -> Vec<u8>) {
    for _ in 0..400 {
        let frames = next(client);
        if client.wire.try_send(frames).is_err() || client.wire.hear(millis(1)) == Got::End {
            return;
        }
        client.wire.taken();
    }
    panic!("nobody stops it");
}

/// Requests that are taken back as soon as they are made, by the thousand.
///
/// GUARANTEES 48: what a stranger makes the server do for nothing has a bound.
#[test]
fn a_flood_of_resets() {
    let site = Site::with_tls(&[]);
    let mut client = Second::connect(&site, &[b"h2"]).unwrap();
    let session = site.session();
    flood(&mut client, |client| {
        let mut frames = Vec::new();
        for _ in 0..500 {
            let stream = 2 * client.streams + 1;
            client.streams += 1;
            // `GET / https`, from the static table.
            let payload = vec![0x82, 0x84, 0x87];
            let flags = END_HEADERS | END_STREAM;
            frames.extend(Frame { kind: HEADERS, flags, stream, payload }.bytes());
            let payload = 8_u32.to_be_bytes().to_vec();
            frames.extend(Frame { kind: RST_STREAM, flags: 0, stream, payload }.bytes());
        }
        frames
    });
    session.lock_and_unlock("k");
    drop(client);
    // The line protocol of a TLS server is TLS, too.
    assert_eq!(site.line().ask("ping", "_", ""), "ok");
}

/// Frames that belong to no request, and never end.
///
/// GUARANTEES 48: what a stranger makes the server do for nothing has a bound.
#[test]
fn floods_of_frames_are_cut_off() {
    let site = Site::with_tls(&[]);
    let session = site.session();
    for (kind, payload) in [
        (PING, vec![1; 8]),
        (SETTINGS, Vec::new()),
        (PRIORITY, vec![0, 0, 0, 0, 16]),
        (WINDOW_UPDATE, vec![0, 0, 0, 1]),
        (99, Vec::new()),
    ] {
        let mut client = Second::connect(&site, &[b"h2"]).unwrap();
        let stream = if kind == PRIORITY { 1 } else { 0 };
        let frames = Frame { kind, flags: 0, stream, payload }.bytes().repeat(1000);
        flood(&mut client, |_| frames.clone());
        session.lock_and_unlock("k");
    }
    site.server.wait_for_output("a flood of HTTP/2 frames");
}

/// HTTP/2 without TLS is spoken only where that is asked for.
#[test]
fn plain_text_has_to_be_asked_for() {
    let site = Site::start(&[]);
    let mut client = Second::connect(&site, &[]).unwrap();
    assert!(matches!(client.read(), Err(Got::End)), "HTTP/2 was spoken");
    let upgrade = Ask::get("/health").header("Connection", "Upgrade, HTTP2-Settings");
    let upgrade = upgrade.header("Upgrade", "h2c").header("HTTP2-Settings", "AAMAAABk");
    assert_eq!(site.ask(upgrade.clone()).status, 200, "no 101");

    let site = Site::start(&["--http-h2c"]);
    let mut client = Second::connect(&site, &[]).unwrap();
    let (status, body) = client.ask("GET", "/health", None, "");
    assert_eq!((status, body.as_str()), (OK, "{\"status\":\"ok\"}\n"));
    assert_eq!(client.ask("POST", "/v1/sessions", None, "{}").0, OK);
    assert_eq!(site.ask(upgrade).status, 200);
    let pings = Frame { kind: PING, flags: 0, stream: 0, payload: vec![1; 8] }.bytes().repeat(1000);
    flood(&mut client, |_| pings.clone());
    site.server.wait_for_output("a flood of HTTP/2 frames");
}

#[test]
fn nonsense_after_the_preface() {
    let site = Site::with_tls(&[]);
    for kind in [DATA, HEADERS, SETTINGS, 99] {
        let mut client = Second::connect(&site, &[b"h2"]).unwrap();
        let _ = client.send(kind, 0xff, 0, vec![0xff; 100]);
        let _ = client.send(HEADERS, 0xff, 2, vec![0xff; 100]);
        let _ = client.send(99, 0, 0, Vec::new());
        while client.read().is_ok_and(|frame| frame.kind != GOAWAY) {}
    }
    assert_eq!(site.get("/health").status, 200);
}

/// GUARANTEES 48: one connection that asks for a long list thirty times and takes in nothing costs what may wait for a
/// client, and others are answered meanwhile.
#[test]
fn lists_that_nobody_reads() {
    let site = Site::with_tls(&[]);
    let item = "x".repeat(65_000);
    let mut line = site.line();
    for count in 1..=300 {
        line.check("rpush", "big", &item, &format!("ok {count}"));
    }
    let before = site.server.resident_kib();
    let mut hog = Second::connect(&site, &[b"h2"]).unwrap();
    // As much as it likes: SETTINGS_INITIAL_WINDOW_SIZE, and the window of the connection.
    let all = 0x7fff_ffff_u32.to_be_bytes();
    hog.send(SETTINGS, 0, 0, [&[0, 4][..], &all].concat()).unwrap();
    hog.send(WINDOW_UPDATE, 0, 0, 0x7fff_0000_u32.to_be_bytes().to_vec()).unwrap();
    for _ in 0..30 {
        hog.begin("GET", "/v1/lists/big", None, "");
    }
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        let asked = Instant::now();
        assert_eq!(line.ask("ping", "_", ""), "ok");
        assert_eq!(site.get("/health").status, 200);
        assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
        let more = site.server.resident_kib().saturating_sub(before) / 1024;
        assert!(more < 64, "{more} MiB");
        std::thread::sleep(millis(20));
    }
    // Each is answered when it is taken in, with one page.
    let mut bodies = std::collections::BTreeMap::<u32, Vec<u8>>::new();
    let mut ended = 0;
    while ended < 30 {
        let frame = hog.read().expect("a frame");
        if frame.kind == DATA {
            bodies.entry(frame.stream).or_default().extend(&frame.payload);
            ended += u32::from(frame.flags & END_STREAM != 0);
        }
    }
    assert_eq!(bodies.len(), 30);
    for body in bodies.values() {
        assert!(body.len() <= (1 << 20) + 100, "{}", body.len());
        let body: Value = serde_json::from_slice(body).unwrap();
        assert_eq!(body["next"], 16);
    }
}
