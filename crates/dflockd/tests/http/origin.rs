//! Where requests may come from without a token: `Host`, `Origin`, `Sec-Fetch-Site` and the type of bodies.

use dflockd_testkit::Server;
use dflockd_testkit::http::{Ask, Wire};
use serde_json::json;

use super::site::Site;

/// What a page can send without asking, each of which would change something.
const SIMPLE: [(&str, &str); 5] = [
    ("/v1/counters/c/add", r#"{"delta":1}"#),
    ("/v1/lists/l/push", r#"{"value":"x"}"#),
    ("/v1/lists/l/pop", "{}"),
    ("/v1/signals/s", r#"{"payload":"x"}"#),
    ("/v1/sessions", "{}"),
];

fn add() -> Ask {
    Ask::post("/v1/counters/c/add", &json!({ "delta": 1 }))
}

#[track_caller]
fn untouched(site: &Site) {
    assert_eq!(site.get("/v1/counters/c").ok()["value"], 0);
    assert_eq!(site.get("/v1/lists/l/length").ok()["length"], 1, "the item that was there");
    assert_eq!(site.sessions(), 0);
}

/// GUARANTEES 48: without a token a page of another origin is no client, whatever it can make a browser send.
#[test]
fn pages_of_others_are_refused() {
    let site = Site::start(&[]);
    site.post("/v1/lists/l/push", &json!({ "value": "mine" })).ok();
    let own = format!("http://{}", site.http);
    for (path, body) in SIMPLE {
        let ask = Ask::new("POST", path).body(body);
        for origin in ["http://evil.example", "null", "http://localhost:3000", "file://"] {
            for kind in ["text/plain", "application/x-www-form-urlencoded", "application/json"] {
                let ask = ask.clone().header("Origin", origin).header("Content-Type", kind);
                site.ask(ask).refused(403, "origin_not_allowed");
            }
            site.ask(ask.clone().header("Origin", origin)).refused(403, "origin_not_allowed");
        }
        let image = ask.clone().header("Sec-Fetch-Dest", "image");
        let image = image.header("Sec-Fetch-Site", "same-site");
        site.ask(image).refused(403, "origin_not_allowed");
        let cross = ask.clone().header("Sec-Fetch-Site", "cross-site");
        site.ask(cross).refused(403, "origin_not_allowed");
        for kind in
            ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"]
        {
            let ask = ask.clone().header("Content-Type", kind);
            site.ask(ask).refused(415, "unsupported_media_type");
        }
        let ask = ask.clone().header("Host", &site.http.to_string()).header("Origin", &own);
        site.ask(ask).refused(415, "unsupported_media_type");
        // Names that resolve to the loopback address because somebody wants them to.
        for host in ["evil.example", "evil.example:6389", "localhost.evil.example", "10.0.0.1"] {
            let ask = Ask::new("POST", path).body(body).header("Host", host);
            let ask = ask.header("Content-Type", "application/json");
            site.ask(ask.clone()).refused(421, "host_not_allowed");
            let same = ask.header("Origin", &format!("http://{host}"));
            site.ask(same.header("Sec-Fetch-Site", "same-origin")).refused(421, "host_not_allowed");
        }
    }
    for path in ["/v1/stats", "/v1/locks", "/v1/kv/k", "/v1/watch?pattern=a", "/nothing"] {
        let ask = Ask::get(path).header("Host", "evil.example");
        site.ask(ask).refused(421, "host_not_allowed");
    }
    let put = Ask::new("PUT", "/v1/kv/k").body(r#"{"value":"x"}"#).header("Host", "evil.example");
    site.ask(put).refused(421, "host_not_allowed");
    untouched(&site);
}

#[test]
fn own_pages_and_programs_are_served() {
    let site = Site::start(&["--http-cors-allowed-origins", "https://page.example"]);
    let (name, address) = (format!("localhost:{}", site.http.port()), site.http.to_string());
    let mut sum = 0;
    let mut check = |ask: Ask| {
        sum += 1;
        assert_eq!(site.ask(ask).ok()["value"], sum);
    };
    for host in [name.as_str(), &address, "localhost", "127.1.2.3:80", "[::1]:6389", "LOCALHOST"] {
        check(add().header("Host", host));
        let json = add().header("Host", host).header("Content-Type", "application/json");
        check(json.clone());
        for fetch in ["same-origin", "same-site", "none"] {
            check(json.clone().header("Sec-Fetch-Site", fetch));
        }
        let own = json.header("Origin", &format!("http://{}", host.to_lowercase()));
        check(own.clone());
        check(own.header("Sec-Fetch-Site", "same-origin"));
    }
    let page = add().header("Content-Type", "application/json");
    let page = page.header("Origin", "https://page.example").header("Sec-Fetch-Site", "cross-site");
    check(page);
}

#[test]
fn more_hosts_can_be_allowed() {
    let hosts = "locks.example, .svc.cluster.local,[fe80::1]";
    let site = Site::start(&["--http-allowed-hosts", hosts]);
    for host in ["locks.example:6389", "a.b.svc.cluster.local", "[fe80::1]:1", "localhost"] {
        site.ask(add().header("Host", host)).ok();
    }
    for host in ["evil.example", "x.locks.example", "svc.cluster.local"] {
        site.ask(add().header("Host", host)).refused(421, "host_not_allowed");
    }
    let site = Site::start(&["--http-allowed-hosts", "*"]);
    site.ask(add().header("Host", "evil.example")).ok();
    site.server.wait_for_output("--http-allowed-hosts * and there is no auth token");
    let site = Site::start(&["--http-cors-allowed-origins", "*"]);
    site.server.wait_for_output("--http-cors-allowed-origins * and there is no auth token");
    let json = add().header("Content-Type", "application/json");
    site.ask(json.header("Origin", "https://any.example")).ok();
    let text = add().header("Content-Type", "text/plain");
    site.ask(text.header("Origin", "https://any.example")).refused(415, "unsupported_media_type");
}

/// A server that listens on all addresses answers to the one that a client used.
#[test]
fn the_address_that_was_dialled() {
    let port = dflockd_testkit::free_address().port();
    let args = ["--http-host", "0.0.0.0", "--http-port", &port.to_string()];
    let server = Server::start(&args);
    server.wait_for_output("listening for HTTP");
    let ask = |host: &str| {
        let mut wire = Wire::connect(([127, 0, 0, 1], port).into(), None).unwrap();
        wire.ask(&add().header("Host", host))
    };
    ask(&format!("127.0.0.1:{port}")).ok();
    ask("0.0.0.0").refused(421, "host_not_allowed");
    ask("192.0.2.1").refused(421, "host_not_allowed");
}

/// What watches the server, and what is for everybody, is answered by whatever name.
#[test]
fn probes_and_scrapes_come_by_any_name() {
    let site = Site::start(&[]);
    for path in ["/health", "/ready", "/metrics", "/v1/openapi.json", "/ui/", "/ui/app.js"] {
        let reply = site.ask(Ask::get(path).header("Host", "dflockd-0.dflockd.default.svc:6389"));
        assert_eq!(reply.status, 200, "{path}");
    }
    for path in ["/health", "/ready", "/metrics"] {
        let mut old = site.wire();
        old.send(format!("GET {path} HTTP/1.0\r\n\r\n"));
        old.expect_end();
        let text = String::from_utf8_lossy(&old.taken()).into_owned();
        assert!(text.starts_with("HTTP/1.0 200 "), "{path}: {text:.80}");
    }
}

#[test]
fn one_host_and_only_one() {
    let open = Site::start(&[]);
    let guarded = Site::guarded("t0ken-of-the-tests", &[]);
    for site in [&open, &guarded] {
        for path in ["/health", "/metrics", "/v1/stats", "/ui/"] {
            let ask = Ask::get(path).header("Host", "localhost").header("Host", "localhost");
            site.ask(ask).bad();
        }
    }
    // None is as good as a wrong one.
    let mut wire = open.wire();
    wire.send("GET /v1/stats HTTP/1.1\r\n\r\n");
    wire.reply().bad();
    let mut wire = open.wire();
    wire.send("GET http://evil.example/v1/stats HTTP/1.1\r\nHost: localhost\r\n\r\n");
    wire.reply().refused(421, "host_not_allowed");
}

/// Where a token is wanted, no page can do without it, and nothing else changes.
#[test]
fn with_a_token_everything_is_as_before() {
    let site = Site::guarded("t0ken-of-the-tests", &[]);
    for (path, body) in SIMPLE {
        let ask = Ask::new("POST", path).body(body).header("Host", "any.example");
        let ask = ask.header("Content-Type", "text/plain").header("Origin", "http://evil.example");
        let ask = ask.header("Sec-Fetch-Site", "cross-site");
        site.wire().ask(&ask).refused(401, "unauthorized");
        site.ask(ask).ok();
    }
}

#[test]
fn answers_are_not_kept_by_caches() {
    let site = Site::start(&[]);
    let no_store = |ask: Ask| {
        assert_eq!(site.ask(ask.clone()).header("cache-control"), Some("no-store"), "{ask:?}");
    };
    no_store(Ask::new("POST", "/v1/sessions"));
    no_store(Ask::get("/v1/kv/k"));
    no_store(Ask::get("/v1/stats"));
    no_store(Ask::get("/nothing"));
    no_store(Ask::get("/health"));
    no_store(Ask::get("/v1/stats").header("Host", "evil.example"));
}
