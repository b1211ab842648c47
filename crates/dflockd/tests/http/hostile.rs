//! Bad and slow clients, while others go on working.
//!
//! Whether the others become slower is measured by `bench/run` (workload `crowd`), never judged here.

use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Got, Wire};
use dflockd_testkit::{Client, LIMIT, Noise, eventually, millis};
use serde_json::json;

use super::site::{Place, Session, Site};

/// Clients of both APIs that must not notice anything.
struct Witness {
    line: Client,
    token: String,
    web: Wire,
    session: Session,
}

impl Witness {
    fn new(site: &Site) -> Self {
        let mut line = site.line();
        let token = line.lock("witness", "0 600");
        Self { line, token, web: site.wire(), session: site.session() }
    }

    /// That its lock is its own, and that it is answered on connections it has and on new ones.
    #[track_caller]
    fn check(&mut self) {
        self.line.check("n", "witness", &format!("{} 600", self.token), "ok 600");
        let id = &self.session.id;
        let grant = self.web.ask(&Ask::post("/v1/locks/free", &json!({})).session(id)).ok();
        let release = json!({ "token": grant["token"] });
        self.web.ask(&Ask::post("/v1/locks/free/release", &release).session(id)).empty();
        let busy = self.session.post("/v1/locks/witness", &json!({})).ok();
        assert_eq!(busy, json!({ "status": "timeout" }));
    }
}

/// An answer of 4xx, or the end of the connection; never a success and never a failure of the server.
#[track_caller]
fn refused(wire: &mut Wire) -> u16 {
    match wire.try_reply(LIMIT) {
        Ok(reply) => {
            assert!((400..500).contains(&reply.status), "{} {}", reply.status, reply.text());
            reply.status
        }
        Err(got) => {
            assert_eq!(got, Got::End);
            0
        }
    }
}

#[test]
fn bodies_without_end() {
    let site = Site::start(&["--read-timeout", "3"]);
    let mut witness = Witness::new(&site);
    let before = site.server.resident_kib();
    let id = site.session().id;
    let ask = Ask::new("POST", "/v1/locks/k").session(&id);
    // Announced: refused before it comes.
    for length in ["1048577", "10000000000", "18446744073709551615", "99999999999999999999"] {
        let mut wire = site.wire();
        let head = String::from_utf8(ask.head(Some(7))).unwrap();
        wire.send(head.replace("Content-Length: 7", &format!("Content-Length: {length}")));
        refused(&mut wire);
        witness.check();
    }
    // Not announced: refused when it is too much.
    let head = String::from_utf8(ask.head(None)).unwrap();
    let head = head.replace("Content-Length: 0", "Transfer-Encoding: chunked");
    let chunk = format!("10000\r\n{}\r\n", " ".repeat(0x10000));
    for _ in 0..5 {
        let mut wire = site.wire();
        wire.send(&head);
        for _ in 0..64 {
            if wire.try_send(&chunk).is_err() {
                break;
            }
        }
        refused(&mut wire);
        witness.check();
    }
    site.server.check_growth(before, 64 * 1024);
}

#[test]
fn deep_json() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let id = site.session().id;
    for opening in ["[", "{\"a\":", "[[{\"a\":[", "{\"token\":["] {
        let body = opening.repeat((1 << 20) / opening.len());
        site.ask(Ask::new("POST", "/v1/locks/k").session(&id).body(body)).bad();
        witness.check();
    }
    // Numbers and strings that take their time.
    let digits = format!("{{\"lease_ttl_s\":{}}}", "9".repeat(1 << 19));
    site.ask(Ask::new("POST", "/v1/locks/k").session(&id).body(digits)).bad();
    let digits = format!("{{\"lease_ttl_s\":1e{}}}", "9".repeat(1 << 19));
    site.ask(Ask::new("POST", "/v1/locks/k").session(&id).body(digits)).bad();
    witness.check();
}

#[test]
fn header_floods() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let before = site.server.resident_kib();
    let many: String = (0..50_000).map(|number| format!("X-{number}: y\r\n")).collect();
    let long = format!("X-Long: {}\r\n", "y".repeat(4 << 20));
    let url = "x".repeat(4 << 20);
    for request in [
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{many}\r\n"),
        format!("GET /health HTTP/1.1\r\nHost: localhost\r\n{long}\r\n"),
        format!("GET /{url} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        format!("GET /health?{url} HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        format!("{url} /health HTTP/1.1\r\nHost: localhost\r\n\r\n"),
        "\r\n".repeat(1 << 20),
    ] {
        let mut wire = site.wire();
        // It may be refused before all is sent.
        let _ = wire.try_send(&request);
        refused(&mut wire);
        witness.check();
    }
    site.server.check_growth(before, 64 * 1024);
}

#[test]
fn requests_that_can_be_read_in_two_ways() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let inner = "GET /v1/locks HTTP/1.1\r\nHost: localhost\r\n\r\n";
    for headers in [
        "Content-Length: 5\r\nContent-Length: 6".to_owned(),
        "Content-Length: -1".to_owned(),
        "Content-Length: +5".to_owned(),
        "Content-Length: 5, 5x".to_owned(),
        "Transfer-Encoding: xchunked".to_owned(),
        "Transfer-Encoding: chunked, identity".to_owned(),
        "Content-Length : 5".to_owned(),
        " Content-Length: 5".to_owned(),
        "Bad Header: x".to_owned(),
        "X: a\0b".to_owned(),
    ] {
        let mut wire = site.wire();
        wire.send(format!(
            "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\n{headers}\r\n\r\n{inner}"
        ));
        refused(&mut wire);
    }
    // Both lengths: the one who answers must not answer what is inside the body.
    let mut wire = site.wire();
    let length = inner.len() + 5;
    wire.send(format!(
        "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\
         Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}"
    ));
    let _ = wire.try_reply(LIMIT);
    if let Ok(second) = wire.try_reply(Duration::from_secs(1)) {
        // Allowed by the standard: the chunks count, and what follows is a request of its own.
        assert_ne!(second.status, 500);
    }
    for chunk in ["x\r\n", "-1\r\n", "10000000000000000\r\n", "5;x\r\nhello", "1\nx"] {
        let mut wire = site.wire();
        wire.send(
            "POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n",
        );
        wire.send(chunk);
        wire.half_close();
        refused(&mut wire);
    }
    witness.check();
}

#[test]
fn garbage() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let mut noise = Noise::new(9);
    let valid = Ask::post("/v1/counters/c/add", &json!({ "delta": 1 })).bytes();
    let mut good = 0;
    for number in 0..600 {
        let count = noise.below(800);
        let mut bytes = noise.bytes(count);
        match number % 5 {
            0 => {}
            1 => bytes = [b"GET /", &bytes[..], b" HTTP/1.1\r\n\r\n"].concat(),
            2 => bytes = [b"POST /v1/sessions HTTP/1.1\r\n", &bytes[..], b"\r\n\r\n"].concat(),
            // A good one first: it is answered, whatever follows.
            3 => {
                bytes = [&valid[..], &bytes[..]].concat();
                good += 1;
            }
            // A good one with some bytes turned.
            _ => {
                bytes.clone_from(&valid);
                for _ in 0..=noise.below(4) {
                    let at = noise.below(bytes.len());
                    bytes[at] = noise.next().to_le_bytes()[0];
                }
            }
        }
        let mut wire = site.wire();
        let _ = wire.try_send(&bytes);
        let _ = wire.socket.shutdown(std::net::Shutdown::Write);
        wire.expect_end();
        let answer = wire.taken();
        assert!(answer.is_empty() || answer.starts_with(b"HTTP/1."), "{number}: {answer:?}");
        assert!(!answer.windows(4).any(|four| four == b" 500"), "{number}");
        if number % 100 == 0 {
            witness.check();
        }
    }
    let value = site.get("/v1/counters/c").ok()["value"].as_i64().unwrap();
    assert!(value >= good, "{value} of {good} good requests were executed");
}

/// What a slow client does.
#[derive(Clone, Copy)]
enum Slow {
    Silent,
    Head,
    Body,
    Stream,
}

/// Opens `count` connections that get stuck somewhere.
fn crowd(site: &Place, count: usize, id: &str) -> Vec<(Slow, TcpStream)> {
    let head = b"POST /v1/locks/slow HTTP/1.1\r\nHost: localhost\r\nX-Slow: ".to_vec();
    let body = [&Ask::new("POST", "/v1/locks/slow").session(id).head(Some(100))[..], b"{"].concat();
    let stream = Ask::get("/v1/signals?pattern=crowd").bytes();
    let kinds = [Slow::Silent, Slow::Head, Slow::Body, Slow::Stream];
    (0..count)
        .map(|number| {
            let kind = kinds[number % kinds.len()];
            let mut socket = TcpStream::connect(site.http).expect("the server listens");
            let bytes = match kind {
                Slow::Silent => &b""[..],
                Slow::Head => &head,
                Slow::Body => &body,
                Slow::Stream => &stream,
            };
            socket.write_all(bytes).unwrap();
            (kind, socket)
        })
        .collect()
}

#[test]
fn five_thousand_slow_clients() {
    let files = rlimit::increase_nofile_limit(u64::MAX).unwrap();
    // Other tests in this process need some too.
    let count = 5_000.min(usize::try_from(files).unwrap_or(usize::MAX).saturating_sub(4000));
    assert!(count >= 1000, "the hard limit of files is too low: {files}");
    if count < 5_000 {
        println!("only {count} clients: the hard limit of files is {files}");
    }
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let id = site.session().id;
    let before = site.server.resident_kib();
    let mut sockets = Vec::new();
    while sockets.len() < count {
        sockets.extend(crowd(&site, 100, &id));
        witness.check();
    }
    // All streams stand, and nobody else is held up while the slow ones dribble.
    let streams = u64::try_from(count / 4).unwrap();
    eventually("the streams stand", || {
        let answer = site.post("/v1/signals/crowd", &json!({ "payload": "x" })).ok();
        answer["delivered"] == streams
    });
    let stop = Arc::new(AtomicBool::new(false));
    let dribbling = {
        let stop = Arc::clone(&stop);
        thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                for (kind, socket) in &mut sockets {
                    if matches!(kind, Slow::Head | Slow::Body) {
                        // Those who took too long are gone already.
                        let _ = socket.write_all(b" ");
                    }
                }
                thread::sleep(millis(200));
            }
        })
    };
    let (begun, mut checks, mut worst) = (Instant::now(), 0, Duration::ZERO);
    while begun.elapsed() < Duration::from_secs(3) || checks < 100 {
        let one = Instant::now();
        witness.check();
        worst = worst.max(one.elapsed());
        checks += 1;
    }
    let growth = site.server.resident_kib().saturating_sub(before);
    println!("{checks} checks beside {count} slow clients, the slowest {worst:?}; {growth} KiB");
    stop.store(true, Ordering::Relaxed);
    dribbling.join().unwrap();
    // All of them have left; so have their sessions.
    eventually("they are gone", || {
        let answer = site.post("/v1/signals/crowd", &json!({ "payload": "x" })).ok();
        answer["delivered"] == 0
    });
    witness.check();
    assert_eq!(site.crowd("slow"), (0, 0));
}

/// The head of a request has ten seconds.
#[test]
fn a_head_that_does_not_end() {
    let site = Site::start(&[]);
    let mut wires: Vec<_> = (0..50).map(|_| site.wire()).collect();
    let begun = Instant::now();
    for wire in &mut wires {
        wire.send("GET /health HTTP/1.1\r\nX-Slow: ");
    }
    let mut open = wires.len();
    while open > 0 {
        assert!(begun.elapsed() < LIMIT, "{open} are still open");
        open = 0;
        for wire in &mut wires {
            // Each byte comes in time; the head as a whole does not.
            let _ = wire.try_send("x");
            open += usize::from(wire.hear(millis(1)) == Got::Nothing);
        }
        thread::sleep(millis(100));
    }
    assert!(begun.elapsed() >= Duration::from_secs(9), "earlier than was said");
    assert_eq!(site.get("/health").status, 200);
}

/// A listener that does not read its stream is cut off; those who read get everything meanwhile.
#[test]
fn readers_that_do_not_read() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let sleepers: Vec<_> =
        (0..10).map(|_| site.begin(Ask::get("/v1/signals?pattern=loud"))).collect();
    let mut reader = site.events("/v1/signals?pattern=loud");
    eventually("all listen", || {
        let answer = site.post("/v1/signals/loud", &json!({ "payload": "begin" })).ok();
        answer["delivered"] == 11
    });
    let before = site.server.resident_kib();
    let mut line = site.line();
    let payload = "x".repeat(60_000);
    while reader.next().data["payload"] != "begin" {}
    for number in 0..1000 {
        let answer = line.ask("signal", "loud", &format!("{number}-{payload}"));
        assert!(answer.starts_with("ok "), "{answer}");
        loop {
            let event = reader.next();
            let text = event.data["payload"].as_str().unwrap();
            if text == "begin" {
                continue;
            }
            assert!(text.starts_with(&format!("{number}-")), "{number}: {}", &text[..10]);
            break;
        }
        if number % 100 == 0 {
            witness.check();
        }
    }
    site.server.check_growth(before, 600 * 1024);
    drop(sleepers);
    witness.check();
}

/// Answers that are not read are not made without end either.
#[test]
fn a_flood_of_requests_whose_answers_are_not_read() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    let before = site.server.resident_kib();
    let mut wire = site.wire();
    wire.socket.set_write_timeout(Some(Duration::from_secs(2))).unwrap();
    let request = Ask::get("/v1/openapi.json").bytes().repeat(100);
    for _ in 0..1000 {
        if wire.try_send(&request).is_err() {
            break;
        }
    }
    site.server.check_growth(before, 64 * 1024);
    witness.check();
}

#[test]
fn a_storm_of_connections() {
    let site = Site::start(&[]);
    let mut witness = Witness::new(&site);
    for round in 0..20 {
        let sockets: Vec<_> = (0..100)
            .map(|number| {
                let mut socket = TcpStream::connect(site.http).unwrap();
                if number % 2 == 0 {
                    let _ = socket.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n");
                }
                socket
            })
            .collect();
        drop(sockets);
        if round % 5 == 0 {
            witness.check();
        }
    }
    witness.check();
}

/// Sessions by the thousand end by themselves.
#[test]
fn sessions_that_nobody_wants() {
    let site = Site::start(&["--http-session-idle-timeout", "4", "--max-locks", "10000"]);
    let mut witness = Witness::new(&site);
    let mut wire = site.wire();
    for number in 0..1500 {
        let id = wire.ask(&Ask::new("POST", "/v1/sessions")).ok()["session_id"].clone();
        let body = json!({ "lease_ttl_s": 600 });
        let path = format!("/v1/locks/lost-{number}");
        wire.ask(&Ask::post(&path, &body).session(id.as_str().unwrap())).ok();
        // Often enough for its own session to stay.
        if number % 10 == 0 {
            witness.check();
        }
    }
    eventually("only the witness is left", || {
        witness.check();
        let held = site.get("/v1/overview").ok()["held"].clone();
        held == 1
    });
}
