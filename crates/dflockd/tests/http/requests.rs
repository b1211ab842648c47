//! What every route has in common: bodies, keys, methods, unknown paths.

use dflockd_testkit::http::{Ask, Reply, escape};
use dflockd_testkit::{Noise, eventually};
use serde_json::{Value, json};

use super::openapi;
use super::site::Site;

const MIB: usize = 1 << 20;

/// A path with something in place of its parameters.
fn concrete(template: &str) -> String {
    let mut path = template.to_owned();
    while let Some((before, rest)) = path.split_once('{') {
        let (name, after) = rest.split_once('}').expect("a closed brace");
        let value = if template.starts_with("/v1/sessions/") {
            "0".repeat(32)
        } else if name == "id" {
            "1".to_owned()
        } else {
            "k".to_owned()
        };
        path = format!("{before}{value}{after}");
    }
    path
}

#[test]
fn bodies_are_one_closed_json_value() {
    let site = Site::start(&["--admin-token", "adm1n", "--max-locks", "100000"]);
    let a = site.session();
    let mut count = 0;
    for (method, template, operation) in openapi::operations(&site) {
        if operation["requestBody"].is_null() {
            continue;
        }
        count += 1;
        let path = concrete(&template);
        let send = |body: &[u8]| {
            let ask = Ask::new(&method, &path).session(&a.id).admin("adm1n").body(body);
            site.ask(ask)
        };
        let deep = [b"{\"x\":".repeat(1000), b"1".to_vec(), b"}".repeat(1000)].concat();
        let wide = format!("{{\"x\":\"{}\"}}", "y".repeat(MIB - 7));
        assert_eq!(wide.len(), MIB + 1);
        let wrong: [&[u8]; 19] = [
            b"{\"no_such_member\":1}",
            b"{} {}",
            b"{}x",
            b"{",
            b"[]",
            // Members in their order are no object either.
            b"[null]",
            b"[null,null]",
            b"[null,null,null]",
            b"[null,null,null,null]",
            b"[1]",
            b"null",
            b"1",
            b"\"x\"",
            b"{\"x\":\"\xff\"}",
            b"\xef\xbb\xbf{}",
            b"{'x':1}",
            &b"[".repeat(100_000),
            &deep,
            wide.as_bytes(),
        ];
        for body in wrong {
            // Where there may be no body, there may be none in so many words.
            if body == b"null" && operation["requestBody"]["required"] != true {
                continue;
            }
            let reply = send(body);
            let shown = String::from_utf8_lossy(&body[..body.len().min(40)]).into_owned();
            // On every route of the cluster too: a body is wrong before there is no cluster.
            if reply.status != 404 || reply.json()["error"] != "cluster_disabled" {
                reply.bad_for(&format!("{path} {shown}"));
            }
        }
    }
    assert!(count >= 20, "only {count} routes with a body");
    // And nothing has happened.
    assert_eq!(site.look("k"), None);
}

#[test]
fn bodies_in_every_form_that_is_legal() {
    let site = Site::start(&[]);
    let a = site.session();
    let ask = Ask::new("POST", "/v1/locks/k").session(&a.id);
    let mut taken = 0;
    let mut check = |reply: Reply| {
        let token = reply.ok()["token"].as_str().expect("a grant").to_owned();
        a.post("/v1/locks/k/release", &json!({ "token": token })).empty();
        taken += 1;
    };
    for body in ["{}", " \n{ }\r\n\t", "{\"lease_ttl_s\" : 1}", r#"{"lease_ttl\u005fs":1}"#] {
        check(site.ask(ask.clone().body(body)));
        for kind in ["application/json", "Application/JSON; charset=utf-8"] {
            check(site.ask(ask.clone().header("Content-Type", kind).body(body)));
        }
    }
    // Chunked, in single bytes.
    let mut wire = site.wire();
    let head = String::from_utf8(ask.head(None)).unwrap();
    wire.send(head.replace("Content-Length: 0", "Transfer-Encoding: chunked"));
    for byte in ["{", "}"] {
        wire.send(format!("1\r\n{byte}\r\n"));
    }
    wire.send("0\r\n\r\n");
    check(wire.reply());
    // 1 MiB is legal, if it is one value.
    let body = format!("{{}}{}", " ".repeat(MIB - 2));
    check(site.ask(ask.clone().body(body)));
    // Expect: 100-continue is what curl sends before large bodies.
    let mut wire = site.wire();
    wire.send(ask.header("Expect", "100-continue").head(Some(2)));
    assert_eq!(wire.reply().status, 100);
    wire.send("{}");
    check(wire.reply());
    assert_eq!(taken, 15);
}

#[test]
fn a_member_twice_is_refused() {
    let site = Site::start(&[]);
    let a = site.session();
    let body = r#"{"lease_ttl_s":1,"lease_ttl_s":600}"#;
    site.ask(Ask::new("POST", "/v1/locks/k").session(&a.id).body(body)).bad();
}

#[test]
fn keys_have_limits() {
    let site = Site::start(&["--max-locks", "100000"]);
    let a = site.session();
    for key in [
        "k",
        "a/b",
        "ü",
        "%",
        "?",
        "#",
        "..",
        ".",
        "a+b",
        "a&b=c",
        "\"quoted\"\\",
        "\u{0}\u{1}\u{7f}",
        &"x".repeat(256),
        &"ü".repeat(128),
    ] {
        let grant = a.lock(key);
        let view = site.look(key).unwrap_or_else(|| panic!("no view of {key:?}"));
        assert_eq!(view["key"], key, "{view}");
        a.unlock(key, &grant);
    }
    let mut line = site.line();
    // The plus is a plus, and the bytes are those of the line protocol.
    line.lock("a+b", "0 600");
    let busy = a.post("/v1/locks/a+b", &json!({})).ok();
    assert_eq!(busy, json!({ "status": "timeout" }));
    line.send(b"l\n\xff\xfe\n0 600\n");
    dflockd_testkit::granted(&line.line());
    let busy = a.post("/v1/locks/%FF%FE", &json!({})).ok();
    assert_eq!(busy, json!({ "status": "timeout" }));

    for key in ["a b", "a\tb", "a\rb", "a\nb", " ", &"x".repeat(257), &"ü".repeat(129)] {
        let key = escape(key);
        for (method, path) in [
            ("POST", format!("/v1/locks/{key}")),
            ("POST", format!("/v1/locks/{key}/release")),
            ("POST", format!("/v1/semaphores/{key}/enqueue")),
            ("POST", format!("/v1/rwlocks/{key}/read")),
            ("POST", format!("/v1/elections/{key}")),
            ("GET", format!("/v1/counters/{key}")),
            ("GET", format!("/v1/kv/{key}")),
            ("POST", format!("/v1/lists/{key}/pop")),
            ("POST", format!("/v1/barriers/{key}/wait")),
            ("GET", format!("/v1/locks/{key}")),
        ] {
            let ask = Ask::new(method, &path).session(&a.id);
            let reply = site.ask(if method == "POST" { ask.body("{}") } else { ask });
            reply.bad_for(&format!("{method} {path}"));
        }
    }
    for path in ["/v1/locks/%", "/v1/locks/%zz", "/v1/locks/%2"] {
        let reply = site.ask(Ask::post(path, &json!({})).session(&a.id));
        assert!(matches!(reply.status, 200 | 400), "{path}: {}", reply.text());
    }
}

#[test]
fn unknown_paths() {
    let site = Site::start(&[]);
    for path in [
        "/nothing",
        "/v1",
        "/v1/",
        "/v2/locks",
        "/v1/locks/k/steal",
        "/v1/locks/k/",
        "/v1/locks/a/b/c/d",
        "/health/",
        "//health",
        "/HEALTH",
        "/v1/openapi.yaml",
        "/v1/rwlocks/k/append",
        "/v1/admin/nothing",
    ] {
        for method in ["GET", "POST", "DELETE", "PUT", "PATCH"] {
            site.ask(Ask::new(method, path)).refused(404, "not_found");
        }
    }
    site.ask(Ask::post("/v1/locks/", &json!({}))).refused(404, "not_found");
}

#[test]
fn wrong_methods() {
    let site = Site::start(&["--admin-token", "adm1n"]);
    let mut by_path: std::collections::BTreeMap<String, Vec<String>> = Default::default();
    for (method, template, _) in openapi::operations(&site) {
        by_path.entry(template).or_default().push(method);
    }
    for (template, methods) in by_path {
        let path = concrete(&template);
        for method in ["GET", "POST", "PUT", "DELETE", "PATCH", "BREW"] {
            if methods.iter().any(|known| known == method) {
                continue;
            }
            let reply = site.ask(Ask::new(method, &path).admin("adm1n"));
            assert_eq!(reply.status, 405, "{method} {path}: {}", reply.text());
            reply.refused(405, "method_not_allowed");
            let allow = reply.header("allow").unwrap_or_else(|| panic!("{path}: no Allow"));
            let mut allowed: Vec<_> = allow.split(',').map(str::trim).collect();
            allowed.retain(|method| *method != "HEAD" && *method != "OPTIONS");
            allowed.sort_unstable();
            let mut known: Vec<_> = methods.iter().map(String::as_str).collect();
            known.sort_unstable();
            assert_eq!(allowed, known, "{path}");
        }
    }
}

#[test]
fn head_is_get_without_a_body() {
    let site = Site::start(&[]);
    site.put("/v1/kv/k", &json!({ "value": "x" })).ok();
    let paths =
        ["/health", "/ready", "/v1/openapi.json", "/v1/kv/k", "/v1/locks", "/v1/locks/none"];
    for path in paths {
        let get = site.get(path);
        let mut wire = site.wire();
        let head = wire.ask(&Ask::new("HEAD", path));
        assert_eq!(head.status, get.status, "{path}");
        assert_eq!(head.header("content-type"), get.header("content-type"), "{path}");
        assert_eq!(head.header("content-length"), get.header("content-length"), "{path}");
        // The connection is still in step.
        assert_eq!(wire.ask(&Ask::get("/health")).ok(), json!({ "status": "ok" }));
    }
}

#[test]
fn connections_are_kept_and_pipelined() {
    let site = Site::start(&[]);
    let a = site.session();
    let mut wire = site.wire();
    for number in 0..200 {
        let reply = wire.ask(&Ask::post("/v1/locks/k", &json!({})).session(&a.id));
        let token = reply.ok()["token"].clone();
        let ask = Ask::post("/v1/locks/k/release", &json!({ "token": token })).session(&a.id);
        wire.ask(&ask).empty();
        assert_eq!(reply.header("connection"), None, "request {number}");
    }
    // All at once; the answers come in order.
    let mut bytes = Vec::new();
    for delta in 1..=100 {
        bytes.extend(Ask::post("/v1/counters/c/add", &json!({ "delta": delta })).bytes());
    }
    wire.send(bytes);
    let mut sum = 0;
    for delta in 1..=100 {
        sum += delta;
        assert_eq!(wire.reply().ok()["value"], sum);
    }
    // HTTP/1.0 and `Connection: close` end it.
    wire.send(Ask::get("/health").header("Connection", "close").bytes());
    wire.reply().ok();
    wire.expect_end();
    let mut old = site.wire();
    old.send("GET /health HTTP/1.0\r\n\r\n");
    old.expect_end();
    let text = String::from_utf8_lossy(&old.taken()).into_owned();
    assert!(text.contains(" 200 ") && text.ends_with("{\"status\":\"ok\"}\n"), "{text}");
}

#[test]
fn a_request_in_pieces() {
    let site = Site::start(&[]);
    let a = site.session();
    let bytes = Ask::post("/v1/locks/k", &json!({ "lease_ttl_s": 600 })).session(&a.id).bytes();
    let mut noise = Noise::new(3);
    for _ in 0..20 {
        let mut wire = site.wire();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let (now, later) = rest.split_at(1 + noise.below(rest.len().min(40)));
            wire.send(now);
            rest = later;
        }
        let token = wire.reply().ok()["token"].clone();
        a.post("/v1/locks/k/release", &json!({ "token": token })).empty();
    }
}

/// A client that leaves anywhere within a request has done nothing, or all of it.
#[test]
fn a_disconnect_at_every_byte() {
    let site = Site::start(&[]);
    let a = site.session();
    let holder = site.session();
    let held = holder.lock("k");
    let body = json!({ "acquire_timeout_s": 600 });
    let bytes = Ask::post("/v1/locks/k", &body).session(&a.id).bytes();
    for end in 0..=bytes.len() {
        let mut wire = site.wire();
        wire.send(&bytes[..end]);
        if end % 2 == 0 {
            wire.reset();
        }
    }
    site.wait_for_crowd("k", 1, 0);
    holder.unlock("k", &held);
    a.lock_and_unlock("k");
}

#[test]
fn service_routes() {
    let site = Site::start(&[]);
    assert_eq!(site.get("/health").ok(), json!({ "status": "ok" }));
    assert_eq!(site.get("/ready").ok()["status"], "ok");
    let document = site.get("/v1/openapi.json");
    assert_eq!(document.header("cache-control"), Some("public, max-age=60"));
    document.ok();
    let stats: Value = site.get("/v1/stats").ok();
    for list in ["locks", "semaphores", "idle_locks", "rw_locks", "counters", "kv_entries"] {
        assert!(stats[list].is_array(), "{list}: {stats}");
    }
    assert!(stats.get("cluster").is_none(), "{stats}");
    let metrics = site.get("/metrics");
    assert_eq!(metrics.status, 200);
    let kind = metrics.header("content-type").unwrap();
    let known = ["text/plain", "application/openmetrics"];
    assert!(known.iter().any(|known| kind.starts_with(known)), "{kind}");
    site.get("/v1/locks/none").refused(404, "not_found");
    site.get("/nothing");
    eventually("requests are counted by route", || {
        let text = site.get("/metrics").text();
        let counted = |path: &str, status: &str| {
            text.lines().any(|line| {
                line.starts_with("dflockd_http_requests_total{")
                    && line.contains(&format!("path=\"{path}\""))
                    && line.contains(&format!("status=\"{status}\""))
            })
        };
        let all = counted("/v1/locks/{key}", "404")
            && counted("unmatched", "404")
            && counted("/health", "200");
        assert!(!text.contains("/v1/locks/none"), "a key as a label");
        all
    });
}

/// Without the flag there is no HTTP at all.
#[test]
fn off_unless_asked_for() {
    let server = dflockd_testkit::Server::start::<&str>(&[]);
    let mut wire = dflockd_testkit::http::Wire::connect(server.address, None).unwrap();
    let reply = wire.ask(&Ask::get("/health"));
    assert_eq!(reply.status, 400);
    assert!(reply.text().contains("--http-port"), "{}", reply.text());
    wire.expect_end();
}

#[test]
fn one_port_cannot_be_both() {
    let port = dflockd_testkit::free_address().port().to_string();
    let args = ["--port", &port, "--http-port", &port];
    dflockd_testkit::run(dflockd_testkit::command(&args)).expect(1).complains(&["http-port"]);
}
