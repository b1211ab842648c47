//! Who may come in: bearer tokens, the admin token, CORS, TLS; and that no secret is told.

use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Got, Wire};
use dflockd_testkit::{Dir, LIMIT, Pair, Server, eventually};
use serde_json::json;

use super::site::{Place, Site, granted};

const TOKEN: &str = "t0ken-of-the-tests";

#[test]
fn a_token_is_needed() {
    let mut site = Site::guarded(TOKEN, &["--admin-token", "adm1n"]);
    site.session();
    let with = |value: &str| {
        let wire = site.place.http;
        let ask = Ask::get("/v1/stats").header("Authorization", value);
        Wire::connect(wire, None).unwrap().ask(&ask)
    };
    for right in [format!("Bearer {TOKEN}"), format!("bearer {TOKEN}"), format!("BEARER {TOKEN}")] {
        with(&right).ok();
    }
    for wrong in [
        format!("Bearer {TOKEN}x"),
        format!("Bearer {}", &TOKEN[1..]),
        format!("Basic {TOKEN}"),
        TOKEN.to_owned(),
        "Bearer ".to_owned(),
        "Bearer".to_owned(),
        String::new(),
    ] {
        let begun = Instant::now();
        with(&wrong).refused(401, "unauthorized");
        assert!(begun.elapsed() >= Duration::from_millis(100), "no pause");
    }
    site.place.bearer = None;
    for (method, path) in [
        ("GET", "/v1/stats"),
        ("GET", "/metrics"),
        ("POST", "/v1/sessions"),
        ("POST", "/v1/locks/k"),
        ("GET", "/v1/locks"),
        ("GET", "/v1/watch?pattern=a"),
        ("GET", "/v1/signals?pattern=a"),
        ("POST", "/v1/admin/voters"),
        // Before routing: nobody learns which paths there are.
        ("GET", "/nothing"),
        ("BREW", "/health2"),
    ] {
        site.ask(Ask::new(method, path)).refused(401, "unauthorized");
    }
    for path in ["/health", "/ready", "/v1/openapi.json"] {
        assert_eq!(site.get(path).status, 200, "{path}");
    }
    // The page itself is open.
    assert_ne!(site.get("/ui/").status, 401);
    // The admin token does not replace it.
    let ask = Ask::post("/v1/admin/sessions/1/end", &json!({ "reason": "x" })).admin("adm1n");
    site.ask(ask).refused(401, "unauthorized");
}

#[test]
fn a_wrong_admin_token_costs_a_pause() {
    let site = Site::guarded(TOKEN, &["--admin-token", "adm1n"]);
    let begun = Instant::now();
    let ask = Ask::post("/v1/admin/sessions/999999/end", &json!({ "reason": "x" }));
    site.ask(ask.clone().admin("wrong")).refused(401, "admin_unauthorized");
    assert!(begun.elapsed() >= Duration::from_millis(100), "no pause");
    site.ask(ask.clone()).refused(401, "admin_unauthorized");
    site.ask(ask.admin("adm1n")).refused(404, "not_found");
}

/// While wrong tokens pause, right ones do not wait.
#[test]
fn guessing_disturbs_nobody() {
    // All come from one address.
    let site = Site::guarded(TOKEN, &["--auth-failure-rate-per-ip", "0"]);
    let mut guesses: Vec<Wire> = (0..200)
        .map(|number| {
            let mut wire = site.wire();
            let guess = format!("Bearer guess-{number}");
            wire.begin(&Ask::get("/v1/stats").header("Authorization", &guess));
            wire
        })
        .collect();
    let a = site.session();
    a.lock_and_unlock("k");
    for wire in &mut guesses {
        wire.reply().refused(401, "unauthorized");
    }
}

/// GUARANTEES 51: two tokens are good, and what came with one that is dropped ends at once.
#[test]
fn a_dropped_token_ends_what_came_with_it() {
    let (first, second) = ("the-first-token-of-all", "the-second-token-of-all");
    for durable in [false, true] {
        let dir = Dir::new();
        let file = dir.write("token", format!("{first}\n"));
        let flags = ["--auth-token-file", &file];
        let mut site = if durable { Site::durable(&flags) } else { Site::start(&flags) };
        site.place.bearer = Some(first.to_owned());
        let renewed = Place { bearer: Some(second.to_owned()), ..site.place.clone() };
        let holder = site.session();
        holder.lock("k");
        let mut waiting = site.session().queue("k", 1);
        let popping = site.session();
        let mut popping = popping.begin("/v1/lists/l/pop", &json!({ "timeout_s": 600 }));
        let mut streams =
            ["/v1/signals?pattern=a", "/v1/watch?pattern=a", "/v1/elections/e/events"]
                .map(|path| site.events(path));
        // A session whose client comes with the new token meanwhile.
        let moved = site.session();
        let kept = moved.lock("moved");

        let both = format!("{second}\n{first}\n");
        dir.write("token", &both);
        site.server.signal("HUP");
        eventually("the new token is known", || renewed.get("/v1/stats").status == 200);
        assert_eq!(site.get("/v1/stats").status, 200, "both are good");
        let moved = super::site::Session { place: renewed.clone(), id: moved.id };
        moved.ping().empty();

        dir.write("token", second);
        site.server.signal("HUP");
        waiting.reply().refused(401, "unauthorized");
        popping.reply().refused(401, "unauthorized");
        for stream in &mut streams {
            stream.expect("unauthorized", &json!({ "error": "unauthorized" }));
            stream.expect_end();
        }
        site.get("/v1/stats").refused(401, "unauthorized");
        let other = renewed.session();
        other.take("/v1/locks/k", &json!({ "acquire_timeout_s": 20, "lease_ttl_s": 600 }));
        let gone = super::site::Session { place: renewed.clone(), id: holder.id };
        gone.ping().refused(410, "session_gone");
        moved.unlock("moved", &kept);
        let count = renewed.get("/metrics").metric("dflockd_revoked_total{api=\"http\"}");
        assert!(count >= 5.0, "{count}");
    }
}

/// GUARANTEES 48: wrong tokens are limited; who is in goes on.
#[test]
fn guessing_is_limited() {
    let site = Site::guarded(TOKEN, &["--admin-token", "adm1n-of-the-tests"]);
    let mut known = site.wire();
    let right = site.admitted(Ask::get("/v1/stats"));
    known.ask(&right).ok();
    let wrong = Ask::get("/v1/stats").header("Authorization", "Bearer wrong");
    let mut wires: Vec<Wire> = (0..100).map(|_| site.wire()).collect();
    for wire in &mut wires {
        wire.begin(&wrong);
    }
    let replies: Vec<_> = wires.iter_mut().map(Wire::reply).collect();
    let looked_at = replies.iter().filter(|reply| reply.status == 401).count();
    assert!((10..20).contains(&looked_at), "{looked_at}");
    let throttled = replies.iter().find(|reply| reply.status == 429).unwrap();
    throttled.refused(429, "rate_limited");
    assert_eq!(throttled.header("retry-after"), Some("1"));
    site.wire().ask(&right).refused(429, "rate_limited");
    known.ask(&right).ok();
    // What is no guess is told so, and costs nothing.
    site.wire().ask(&Ask::get("/v1/stats")).refused(401, "unauthorized");
    // The admin token is none of a connection that has shown the other one.
    let end = Ask::post("/v1/admin/sessions/1/end", &json!({ "reason": "x" }));
    known.ask(&site.admitted(end.admin("wrong"))).refused(429, "rate_limited");
    eventually("the right token is good again", || site.wire().ask(&right).status == 200);
}

/// GUARANTEES 48: what is guessed is seen, whoever's token it is.
#[test]
fn wrong_tokens_are_counted_by_their_kind() {
    let site = Site::guarded(TOKEN, &["--admin-token", "adm1n-of-the-tests"]);
    let end = Ask::post("/v1/admin/sessions/1/end", &json!({ "reason": "x" }));
    for _ in 0..3 {
        site.ask(end.clone().admin("wrong")).refused(401, "admin_unauthorized");
    }
    site.wire().ask(&Ask::get("/v1/stats")).refused(401, "unauthorized");
    let mut line = site.line();
    line.check("auth", "_", TOKEN, "ok");
    line.check("end-session", "1", "wrong x", "error_auth");
    let page = site.get("/metrics").text();
    for (labels, count) in [
        ("api=\"http\",token=\"admin\"", 3),
        ("api=\"http\",token=\"client\"", 1),
        ("api=\"line\",token=\"admin\"", 1),
        ("api=\"line\",token=\"client\"", 0),
    ] {
        let line = format!("dflockd_auth_failures_total{{{labels}}} {count}");
        assert!(page.contains(&line), "{line} is not in:\n{page}");
    }
}

const ORIGIN: &str = "https://page.example";

#[test]
fn cors() {
    let flag = format!("{ORIGIN},https://other.example");
    let site = Site::guarded(TOKEN, &["--http-cors-allowed-origins", &flag]);
    let preflight = |origin: &str| {
        let ask = Ask::new("OPTIONS", "/v1/locks/k").header("Origin", origin);
        site.wire().ask(&ask.header("Access-Control-Request-Method", "POST"))
    };
    for origin in [ORIGIN, "https://other.example"] {
        // Without a token: browsers send none.
        let reply = preflight(origin);
        reply.empty();
        assert_eq!(reply.header("access-control-allow-origin"), Some(origin));
        let methods = reply.header("access-control-allow-methods").unwrap();
        for method in ["GET", "POST", "DELETE", "OPTIONS"] {
            assert!(methods.contains(method), "{methods}");
        }
        let headers = reply.header("access-control-allow-headers").unwrap();
        for header in ["Authorization", "Content-Type", "X-Dflockd-Session"] {
            assert!(headers.contains(header), "{headers}");
        }
        assert_eq!(reply.header("access-control-max-age"), Some("300"));
        assert!(reply.header("vary").is_some_and(|vary| vary.contains("Origin")));
    }
    // What follows, also if it fails.
    let get = |path: &str, origin: &str| site.ask(Ask::get(path).header("Origin", origin));
    for path in ["/v1/stats", "/health", "/nothing"] {
        let reply = get(path, ORIGIN);
        assert_eq!(reply.header("access-control-allow-origin"), Some(ORIGIN), "{path}");
        assert!(reply.header("vary").is_some_and(|vary| vary.contains("Origin")), "{path}");
    }
    let refused = site.wire().ask(&Ask::get("/v1/stats").header("Origin", ORIGIN));
    refused.refused(401, "unauthorized");
    assert_eq!(refused.header("access-control-allow-origin"), Some(ORIGIN));
    for origin in ["https://evil.example", "null", "https://page.example.evil.example"] {
        let reply = get("/v1/stats", origin);
        assert_eq!(reply.status, 200, "the browser keeps it from the page, not the server");
        assert_eq!(reply.header("access-control-allow-origin"), None, "{origin}");
        assert_eq!(preflight(origin).header("access-control-allow-origin"), None, "{origin}");
    }
}

#[test]
fn cors_for_everybody_and_nobody() {
    let site = Site::start(&["--http-cors-allowed-origins", "*"]);
    let reply = site.ask(Ask::get("/health").header("Origin", ORIGIN));
    assert_eq!(reply.header("access-control-allow-origin"), Some("*"));
    let site = Site::start(&[]);
    let reply = site.ask(Ask::get("/health").header("Origin", ORIGIN));
    assert_eq!(reply.header("access-control-allow-origin"), None);
    let ask = Ask::new("OPTIONS", "/v1/locks/k").header("Origin", ORIGIN);
    let reply = site.ask(ask.header("Access-Control-Request-Method", "POST"));
    reply.refused(403, "origin_not_allowed");
    assert_eq!(reply.header("access-control-allow-origin"), None);
}

#[test]
fn tls_and_nothing_else() {
    let site = Site::with_tls(&[]);
    assert_eq!(site.get("/health").ok(), json!({ "status": "ok" }));
    let mut plain = Wire::connect(site.http, None).unwrap();
    plain.send(Ask::get("/health").bytes());
    plain.expect_end();
    assert!(!plain.taken().starts_with(b"HTTP/1.1 200"));
    // Somebody who says nothing holds up nobody.
    let silent: Vec<_> =
        (0..100).map(|_| std::net::TcpStream::connect(site.http).unwrap()).collect();
    let a = site.session();
    a.lock("k");
    drop(silent);
}

#[test]
fn a_new_certificate_is_taken_up() {
    let (dir, old, new) = (Dir::new(), Pair::new(), Pair::new());
    let [cert, key] = old.flags(&dir);
    let mut site = Site::start_trusting(&old, &[&cert, &key]);
    assert_eq!(site.get("/health").status, 200);
    let holder = site.session();
    let held = holder.lock("k");
    let waiter = site.session();
    let mut waiting = waiter.queue("k", 1);
    new.flags(&dir);
    site.server.signal("HUP");
    let trusting = new.client();
    eventually("the new certificate is shown", || {
        Wire::connect(site.place.http, Some(&trusting)).ok()
    });
    assert!(Wire::connect(site.place.http, Some(&old.client())).is_err());
    site.place.tls = Some(trusting);
    // Who was connected stays so, and sessions do not care.
    site.ask(Ask::post("/v1/locks/k/release", &held.proof()).session(&holder.id)).empty();
    granted(&mut waiting);
}

/// Neither tokens nor values nor payloads are in the log, however much is logged.
#[test]
fn secrets_are_not_logged() {
    let site = Site::guarded(TOKEN, &["--admin-token", "adm1n-secret", "--debug"]);
    let a = site.session();
    let held = a.lock("k");
    site.put("/v1/kv/v", &json!({ "value": "secret-value" })).ok();
    site.post("/v1/lists/l/push", &json!({ "value": "secret-item", "end": "left" })).ok();
    site.post("/v1/signals/c", &json!({ "payload": "secret-payload" })).ok();
    let wrong =
        Ask::post("/v1/admin/sessions/1/end", &json!({ "reason": "x" })).admin("secret-try");
    site.ask(wrong).refused(401, "admin_unauthorized");
    let wrong = Ask::get("/v1/stats").header("Authorization", "Bearer secret-guess");
    site.wire().ask(&wrong).refused(401, "unauthorized");
    site.ask(Ask::new("POST", "/v1/locks/k").session(&a.id).body("secret-body")).bad();
    a.unlock("k", &held);
    let text = site.server.output();
    for secret in [TOKEN, "adm1n-secret", "secret-", &held.token, &a.id] {
        assert!(!text.contains(secret), "{secret} is in the log");
    }
}

#[test]
fn unlimited_caps_are_warned_about() {
    let port = dflockd_testkit::free_address().port().to_string();
    let server = Server::start(&["--host", "0.0.0.0", "--http-port", &port]);
    for cap in ["http-max-sessions", "http-max-connections-per-ip", "http-rate-limit-per-ip"] {
        server.wait_for_output(cap);
    }
}

#[test]
fn a_tls_client_that_leaves_in_the_handshake() {
    let site = Site::with_tls(&[]);
    for bytes in [&b""[..], b"\x16", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"] {
        let mut wire = Wire::connect(site.http, None).unwrap();
        wire.send(bytes);
        wire.half_close();
        assert_ne!(wire.hear(LIMIT), Got::Nothing);
    }
    assert_eq!(site.get("/health").status, 200);
}
