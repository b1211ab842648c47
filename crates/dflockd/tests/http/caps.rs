//! Limits on sessions, connections and requests, and what the server cannot give.

use std::net::SocketAddr;

use dflockd_engine::FenceFile;
use dflockd_testkit::http::{Ask, Got, Reply, Wire};
use dflockd_testkit::ports::connect_from;
use dflockd_testkit::{Dir, LIMIT, eventually};
use serde_json::json;

use super::site::{Site, granted};

/// A connection from another address of the loopback interface.
fn from(last: u8, to: SocketAddr) -> Wire {
    Wire::over(connect_from(last, to), None).unwrap()
}

#[test]
fn sessions_in_all() {
    let site = Site::start(&["--http-max-sessions", "3"]);
    let sessions: Vec<_> = (0..3).map(|_| site.session()).collect();
    site.post("/v1/sessions", &json!({})).refused(503, "max_sessions");
    from(2, site.http).ask(&Ask::new("POST", "/v1/sessions")).refused(503, "max_sessions");
    // Those that are there are served, and an end makes room at once.
    sessions[0].lock("k");
    sessions[1].end().empty();
    site.session();
    site.post("/v1/sessions", &json!({})).refused(503, "max_sessions");
    let overview = site.get("/v1/overview").ok();
    assert_eq!(overview["http_sessions"], 3, "{overview}");
}

/// GUARANTEES 48: without a limit of HTTP itself, that of all sessions counts; what a session holds and waits for has
/// one.
#[test]
fn sessions_and_what_they_have() {
    let flags = ["--max-sessions", "2", "--max-holds-per-session", "2", "--max-lease-ttl", "60"];
    let site = Site::start(&flags);
    let sessions: Vec<_> = (0..2).map(|_| site.session()).collect();
    site.post("/v1/sessions", &json!({})).refused(503, "max_sessions");
    sessions[0].lock("a");
    sessions[0].lock("b");
    let wanted = json!({ "lease_ttl_s": 9_000_000 });
    sessions[0].post("/v1/locks/c", &wanted).refused(503, "max_holds");
    let granted = sessions[1].post("/v1/locks/c", &wanted).ok();
    assert_eq!(granted["lease_ttl_s"], 60, "{granted}");
}

#[test]
fn reaped_sessions_make_room() {
    let site = Site::start(&["--http-max-sessions", "1", "--http-session-idle-timeout", "1"]);
    site.session();
    eventually("there is room", || site.post("/v1/sessions", &json!({})).status == 200);
}

#[test]
fn sessions_of_one_address() {
    let site = Site::start(&["--http-max-sessions-per-ip", "2"]);
    let first = site.session();
    let _stream = site.events("/v1/signals?pattern=a");
    site.post("/v1/sessions", &json!({})).refused(503, "max_sessions_per_ip");
    site.get("/v1/watch?pattern=a").refused(503, "max_sessions_per_ip");
    from(2, site.http).ask(&Ask::new("POST", "/v1/sessions")).ok();
    first.end().empty();
    site.session();
}

/// Many at once do not get past a cap together.
#[test]
fn caps_are_exact() {
    let site = Site::start(&["--http-max-sessions", "5"]);
    let mut wires: Vec<_> = (0..50).map(|_| site.wire()).collect();
    for wire in &mut wires {
        wire.begin(&Ask::new("POST", "/v1/sessions"));
    }
    let replies: Vec<Reply> = wires.iter_mut().map(Wire::reply).collect();
    let opened = replies.iter().filter(|reply| reply.status == 200).count();
    assert_eq!(opened, 5);
    for reply in replies.iter().filter(|reply| reply.status != 200) {
        reply.refused(503, "max_sessions");
    }
}

#[test]
fn connections_of_one_address() {
    let site = Site::start(&["--http-max-connections-per-ip", "3"]);
    // The one that looked whether the server listens may take a moment to go.
    let mut kept: Vec<Wire> = Vec::new();
    eventually("three connections", || {
        let mut wire = Wire::connect(site.http, None).ok()?;
        wire.try_send(Ask::get("/health").bytes()).ok()?;
        kept.push(wire.try_reply(LIMIT).ok().map(|_| wire)?);
        (kept.len() == 3).then_some(())
    });
    for _ in 0..20 {
        // Closed without a word.
        let mut wire = Wire::connect(site.http, None).unwrap();
        let _ = wire.try_send(Ask::get("/health").bytes());
        assert_eq!(wire.hear(LIMIT), Got::End);
    }
    from(2, site.http).ask(&Ask::get("/health")).ok();
    for wire in &mut kept {
        wire.ask(&Ask::get("/health")).ok();
    }
    // The line protocol has its own cap.
    assert_eq!(site.line().ask("ping", "_", ""), "ok");
    drop(kept);
    eventually("there is room", || {
        let mut wire = Wire::connect(site.http, None).ok()?;
        wire.try_send(Ask::get("/health").bytes()).ok()?;
        wire.try_reply(LIMIT).ok()
    });
}

#[test]
fn requests_of_one_address() {
    let args = ["--http-rate-limit-per-ip", "1", "--http-rate-limit-burst", "5"];
    let site = Site::start(&args);
    let mut wire = site.wire();
    let (mut served, mut refused) = (0, 0);
    for _ in 0..100 {
        let reply = wire.ask(&Ask::get("/v1/stats"));
        if reply.status == 429 {
            reply.refused(429, "rate_limited");
            refused += 1;
        } else {
            reply.ok();
            served += 1;
        }
    }
    assert!(served >= 5 && refused > 0, "{served} served, {refused} refused");
    // Whoever only looks whether it lives is let through.
    for _ in 0..50 {
        wire.ask(&Ask::get("/health")).ok();
        assert_eq!(wire.ask(&Ask::get("/ready")).status, 200);
    }
    // Nobody gets another bucket by saying that it is somebody else.
    let statuses: Vec<u16> = (0..20)
        .map(|number| {
            let claim = format!("10.0.0.{number}");
            let ask = Ask::get("/v1/stats").header("X-Forwarded-For", &claim);
            wire.ask(&ask.header("Forwarded", &format!("for={claim}"))).status
        })
        .collect();
    assert!(statuses.contains(&429), "{statuses:?}");
    // A bucket for each address, and it fills again.
    from(2, site.http).ask(&Ask::get("/v1/stats")).ok();
    eventually("the bucket fills", || wire.ask(&Ask::get("/v1/stats")).status == 200);
}

/// The limit is looked at before the token.
#[test]
fn guesses_are_limited_too() {
    let args = ["--http-rate-limit-per-ip", "1", "--http-rate-limit-burst", "3"];
    let site = Site::guarded("t0ken", &args);
    let mut statuses = Vec::new();
    for _ in 0..20 {
        statuses.push(site.wire().ask(&Ask::get("/v1/stats")).status);
    }
    assert!(statuses.contains(&401) && statuses.contains(&429), "{statuses:?}");
}

/// GUARANTEES 3: rather no grant than a fence that was given before.
#[test]
fn no_fence_no_grant() {
    let dir = Dir::new();
    let file = dir.name("fences");
    FenceFile::open(&file).unwrap().reserve(u64::MAX - 2, 0).unwrap();
    let site = Site::start(&["--fence-state-file", &file]);
    let a = site.session();
    for _ in 0..10 {
        let reply = a.post("/v1/locks/k", &json!({}));
        if reply.status != 200 {
            reply.refused(503, "fence_persistence");
            a.ping().empty();
            return;
        }
        let token = reply.ok()["token"].clone();
        a.post("/v1/locks/k/release", &json!({ "token": token })).empty();
    }
    panic!("ten fences out of two");
}

/// While the server waits for the leases of its predecessor, acquires queue.
#[test]
fn grants_can_be_delayed() {
    let site = Site::start(&["--startup-grant-delay", "3"]);
    let a = site.session();
    assert_eq!(a.post("/v1/locks/k", &json!({})).ok(), json!({ "status": "timeout" }));
    let mut waiting = a.begin("/v1/locks/k", &json!({ "acquire_timeout_s": 60 }));
    granted(&mut waiting);
    assert!(site.server.begun_at.elapsed().as_secs() >= 3);
}
