//! What identities may do over HTTP: every route of the document against the table.

use std::time::Instant;

use dflockd_testkit::certificates::{Authority, showing};
use dflockd_testkit::http::{Ask, Wire, escape};
use dflockd_testkit::identities::{
    self, ALL, BILLING, KEYS, Known, Needs, OPERATOR, SCRAPER, VIEWER,
};
use dflockd_testkit::{Dir, LIMIT, Pair};
use serde_json::{Value, json};

use super::openapi::operations;
use super::site::{Members, Place, Site};

/// What a route needs, and a body for it; none for what operators do.
fn row(method: &str, path: &str) -> (Option<Needs>, Value) {
    let hold = json!({ "token": "00000000000000010000000000000002" });
    let lease = json!({ "lease_ttl_s": 5 });
    let slot = json!({ "limit": 2, "lease_ttl_s": 5 });
    let route = format!("{method} {path}");
    let (needs, body) = match route.as_str() {
        "GET /health" | "GET /ready" | "GET /v1/openapi.json" => (Needs::Nothing, Value::Null),
        "GET /metrics" => (Needs::Nothing, Value::Null),
        "POST /v1/sessions" => (Needs::Session, json!({})),
        // What they list is what may be read.
        "GET /v1/stats"
        | "GET /v1/overview"
        | "GET /v1/readindex"
        | "GET /v1/contention"
        | "GET /v1/locks"
        | "GET /v1/cluster/members" => (Needs::Session, Value::Null),
        _ if path.starts_with("/v1/sessions/") => (Needs::Session, Value::Null),
        "GET /v1/sessions" => (Needs::All, Value::Null),
        "GET /v1/locks/{key}"
        | "GET /v1/counters/{key}"
        | "GET /v1/kv/{key}"
        | "GET /v1/lists/{key}"
        | "GET /v1/lists/{key}/length"
        | "GET /v1/elections/{key}/events"
        | "GET /v1/watch"
        | "GET /v1/events"
        | "GET /v1/signals" => (Needs::Read, Value::Null),
        "POST /v1/signals/{channel}" => (Needs::Signal, json!({ "payload": "p" })),
        "PUT /v1/counters/{key}" => (Needs::Write, json!({ "value": 1 })),
        "POST /v1/counters/{key}/add" => (Needs::Write, json!({ "delta": 1 })),
        "PUT /v1/kv/{key}" => (Needs::Write, json!({ "value": "v" })),
        "DELETE /v1/kv/{key}" => (Needs::Write, Value::Null),
        "POST /v1/lists/{key}/push" => (Needs::Write, json!({ "value": "v" })),
        "POST /v1/lists/{key}/pop" => (Needs::Write, json!({})),
        "POST /v1/barriers/{key}/wait" => (Needs::Lock, json!({ "count": 2 })),
        _ if path.starts_with("/v1/admin/") => {
            let body = match route.as_str() {
                "POST /v1/admin/locks/{key}/force-release" => {
                    json!({ "fence": "1", "reason": "r" })
                }
                "POST /v1/admin/sessions/{id}/end" => json!({ "reason": "r" }),
                "POST /v1/admin/voters" => {
                    json!({ "node_id": "x", "raft_addr": "127.0.0.1:1", "client_addr": "127.0.0.1:2" })
                }
                "GET /v1/admin/audit" | "DELETE /v1/admin/voters/{id}" => Value::Null,
                _ => panic!("{route} has no row"),
            };
            return (None, body);
        }
        _ if ["/v1/locks/", "/v1/semaphores/", "/v1/rwlocks/", "/v1/elections/"]
            .iter()
            .any(|kind| path.starts_with(kind))
            && method == "POST" =>
        {
            let is_slot = path.starts_with("/v1/semaphores/");
            let body = match path.rsplit('/').next() {
                Some("release" | "renew" | "resign") => hold,
                Some("wait") => json!({}),
                Some(_) if is_slot => slot,
                Some(_) | None => lease,
            };
            (Needs::Lock, body)
        }
        _ => panic!("{route} has no row"),
    };
    (Some(needs), body)
}

/// The status of the answer, which may go on for ever.
fn status(place: &Place, ask: Ask, known: Known) -> (u16, Wire) {
    let mut wire = place.wire();
    wire.begin(&ask.header("Authorization", &format!("Bearer {}", known.token)));
    let head = wire.head(Instant::now() + LIMIT).expect("an answer");
    (head.status, wire)
}

fn play(place: &Place, is_cluster: bool) {
    for (method, path, _) in operations(place) {
        let (needs, body) = row(&method, &path);
        for known in ALL {
            // A member would be added.
            if is_cluster && known == OPERATOR && path.starts_with("/v1/admin/voters") {
                continue;
            }
            for key in KEYS {
                let session = (known != SCRAPER).then(|| {
                    let ask = Ask::post("/v1/sessions", &json!({}))
                        .header("Authorization", &format!("Bearer {}", known.token));
                    place.wire().ask(&ask).ok()["session_id"].as_str().unwrap().to_owned()
                });
                let path = path
                    .replace("{key}", &escape(key))
                    .replace("{channel}", &escape(key))
                    .replace("{id}", session.as_deref().filter(|_| needs.is_some()).unwrap_or("1"));
                let path = match path.as_str() {
                    "/v1/watch" | "/v1/events" | "/v1/signals" => {
                        format!("{path}?pattern={}", escape(format!("{key}/*")))
                    }
                    _ => path,
                };
                let mut ask = Ask::new(&method, &path);
                if let Some(session) = &session {
                    ask = ask.session(session);
                }
                if !body.is_null() {
                    ask = ask.body(body.to_string());
                }
                let (status, _) = status(place, ask, known);
                let what = format!("{method} {path} of {}: {status}", known.name);
                match needs {
                    Some(needs) => {
                        assert_eq!(status != 403, known.may(needs, key), "{what}");
                        assert_ne!(status, 401, "{what}");
                    }
                    None if known == OPERATOR => assert!(![401, 403].contains(&status), "{what}"),
                    None => assert!([401, 403].contains(&status), "{what}"),
                }
            }
        }
    }
}

/// GUARANTEES 55: no route does more for an identity than its entry says.
#[test]
fn every_route_against_the_table() {
    let dir = Dir::new();
    let site = Site::start(&["--identities-file", &identities::write(&dir)]);
    play(&site, false);
    let refused = |known: Known, ask: Ask| {
        let ask = ask.header("Authorization", &format!("Bearer {}", known.token));
        site.wire().ask(&ask).refused(403, "forbidden");
    };
    refused(BILLING, Ask::get("/v1/kv/other"));
    refused(SCRAPER, Ask::get("/v1/stats"));
    refused(VIEWER, Ask::new("DELETE", "/v1/kv/other"));
    refused(BILLING, Ask::get("/v1/events?pattern=%3E"));
    let metrics =
        Ask::get("/metrics").header("Authorization", &format!("Bearer {}", SCRAPER.token));
    let metrics = site.wire().ask(&metrics);
    assert!(metrics.metric("dflockd_forbidden_total{api=\"http\"}") > 4.0, "{}", metrics.text());
    site.get("/v1/stats").refused(401, "unauthorized");
}

/// GUARANTEES 55: the same through a follower of a cluster.
#[test]
fn every_route_through_a_follower() {
    let dir = Dir::new();
    let file = identities::write(&dir);
    let flags = ["--identities-file", &file, "--auth-token", "the-token-of-the-test-kit"];
    let members = Members::start(3, &flags);
    play(members.follower(), true);
}

/// GUARANTEES 55: lists have the keys that may be read, in whole pages; operators are known by name.
#[test]
fn lists_show_what_may_be_read() {
    let dir = Dir::new();
    let site = Site::start(&["--identities-file", &identities::write(&dir)]);
    let mut line = site.line();
    line.check("auth", "_", OPERATOR.token, "ok");
    for key in ["a", "billing/1", "billing/2", "other/1", "shared/1", "z"] {
        line.lock(key, "0 600");
    }
    let mut waiters: Vec<_> = ["billing/1", "other/1"]
        .map(|key| {
            let mut waiter = site.line();
            waiter.check("auth", "_", OPERATOR.token, "ok");
            waiter.begin("l", key, "600 600");
            line.wait_for_waiters(key, 1);
            waiter
        })
        .into();
    let ask = |known: Known, path: &str| {
        let ask = Ask::get(path).header("Authorization", &format!("Bearer {}", known.token));
        site.wire().ask(&ask).ok()
    };
    let keys = |page: &Value, list: &str| {
        let key = |entry: &Value| entry["key"].as_str().unwrap().to_owned();
        page[list].as_array().unwrap().iter().map(key).collect::<Vec<_>>()
    };
    let all = ask(BILLING, "/v1/locks");
    assert_eq!(keys(&all, "locks"), ["billing/1", "billing/2", "shared/1"]);
    assert_eq!(all["next"], Value::Null);
    let first = ask(BILLING, "/v1/locks?limit=2");
    assert_eq!(keys(&first, "locks"), ["billing/1", "billing/2"]);
    assert_eq!(first["next"], "billing/2");
    let rest = ask(BILLING, "/v1/locks?limit=2&after=billing%2F2");
    assert_eq!((keys(&rest, "locks"), &rest["next"]), (vec!["shared/1".to_owned()], &Value::Null));
    assert_eq!(keys(&ask(BILLING, "/v1/locks?prefix=o"), "locks"), [""; 0]);
    assert_eq!(keys(&ask(VIEWER, "/v1/locks"), "locks").len(), 6);
    assert_eq!(keys(&ask(BILLING, "/v1/contention"), "keys"), ["billing/1"]);
    assert_eq!(keys(&ask(VIEWER, "/v1/contention"), "keys").len(), 2);
    // Without a pattern all changes that may be seen.
    let seen = |known: Known| keys(&ask(known, "/v1/events"), "events");
    assert_eq!(seen(BILLING), ["billing/1", "billing/2", "shared/1"]);
    assert_eq!(seen(VIEWER), ["a", "billing/1", "billing/2", "other/1", "shared/1", "z"]);
    let stats = ask(BILLING, "/v1/stats").to_string();
    assert!(stats.contains("shared/1") && !stats.contains("other/"), "{stats}");

    let end = Ask::post("/v1/admin/sessions/999999/end", &json!({ "reason": "because" }));
    let end = end.header("Authorization", &format!("Bearer {}", OPERATOR.token));
    site.wire().ask(&end).refused(404, "not_found");
    let audit = ask(OPERATOR, "/v1/admin/audit");
    assert_eq!(audit["records"][0]["identity"], "ops", "{audit}");
    waiters.clear();
}

/// GUARANTEES 55: a certificate is enough, but not for a page of somebody else in a browser that has one.
#[test]
fn certificates_are_identities() {
    let (dir, pair, authority) = (Dir::new(), Pair::new(), Authority::new());
    let named = |name: &str| format!("name = \"{name}\"");
    let file = identities::FILE.replace(
        &named("billing"),
        &format!("{}\ncertificates = [\"dns:billing.example\"]", named("billing")),
    );
    let file = file
        .replace(&named("ops"), &format!("{}\ncertificates = [\"dns:ops.example\"]", named("ops")));
    let (file, ca) =
        (dir.write("identities.toml", file), dir.write("clients.pem", &authority.cert));
    let [cert, key] = pair.flags(&dir);
    let flags = ["--identities-file", &file, "--tls-client-ca", &ca, &cert, &key];
    let site = Site::start_trusting(&pair, &flags);
    let ask = |name: &str, ask: Ask| {
        let config = showing(&pair.cert, &authority.sign(name));
        Wire::open(site.http, Some(&config)).ask(&ask)
    };
    ask("billing.example", Ask::get("/v1/kv/billing%2Fk")).ok();
    ask("billing.example", Ask::get("/v1/kv/other")).refused(403, "forbidden");
    ask("stranger.example", Ask::get("/v1/kv/other")).refused(401, "unauthorized");
    // The token that is shown counts.
    let viewer =
        Ask::get("/v1/kv/other").header("Authorization", &format!("Bearer {}", VIEWER.token));
    ask("billing.example", viewer.clone()).ok();
    let wrong =
        Ask::get("/v1/kv/billing%2Fk").header("Authorization", "Bearer none-of-these-tokens");
    ask("billing.example", wrong).refused(401, "unauthorized");
    // A browser would send the certificate with what any page asks for.
    let foreign = |ask: Ask| ask.header("Origin", "https://evil.example");
    ask("billing.example", foreign(Ask::get("/v1/kv/billing%2Fk")))
        .refused(403, "origin_not_allowed");
    ask("billing.example", foreign(viewer)).ok();
    let end = Ask::post("/v1/admin/sessions/999999/end", &json!({ "reason": "because" }))
        .header("Content-Type", "application/json");
    ask("ops.example", end.clone()).refused(404, "not_found");
    ask("ops.example", foreign(end.clone())).refused(403, "origin_not_allowed");
    ask("billing.example", end).refused(401, "admin_unauthorized");
}
