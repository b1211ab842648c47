//! What is scraped after real traffic.

use std::collections::BTreeSet;

use dflockd::metrics::{METRICS, Where};
use dflockd_testkit::http::Ask;
use dflockd_testkit::{Client, eventually, fence, granted};
use serde_json::json;

use super::text::Scrape;
use crate::site::{Members, Place, Site};

const ADMIN: &str = "the-token-of-the-operator";
/// What is in every key, channel and client name of these tests, and must not be in a page.
const HIDDEN: &str = "hush";

/// A page, checked.
#[track_caller]
fn scrape(place: &Place) -> Scrape {
    let reply = place.get("/metrics");
    assert_eq!(reply.status, 200, "{}", reply.text());
    let kind = reply.header("content-type");
    assert_eq!(kind, Some("text/plain; version=0.0.4; charset=utf-8"));
    let text = reply.text();
    assert!(!text.contains(HIDDEN), "a name of a client is shown");
    Scrape::parse(&text)
}

/// Asks until a page is as it should be in the end.
#[track_caller]
fn scrape_until(place: &Place, what: &str, is_so: impl Fn(&Scrape) -> bool) -> Scrape {
    eventually(what, || Some(scrape(place)).filter(&is_so))
}

fn key(name: &str) -> String {
    format!("{HIDDEN}-{name}")
}

fn in_millis(place: &Place) -> Client {
    let mut client = place.line();
    client.check("hello", &key("client"), "ms", "ok ms");
    client
}

#[test]
fn holds_are_counted_by_kind_and_by_end() {
    let site = Site::start(&["--admin-token", ADMIN]);
    let mut a = in_millis(&site);
    let mut b = in_millis(&site);

    // One is given back to a waiter, one expires, one is ended by an operator, one goes with its connection.
    let (first, gone, forced) = (key("first"), key("gone"), key("forced"));
    let token = a.lock(&first, "0 60000");
    b.begin("l", &first, "60000 60000");
    let page = scrape_until(&site, "a waiter", |page| page.sum("dflockd_waiters") == 1.0);
    assert_eq!(page.get("dflockd_lock_waiters", &[]), 1.0);
    assert_eq!(page.get("dflockd_queue_longest", &[]), 1.0);
    a.check("r", &first, &token, "ok");
    granted(&b.line());
    a.lock(&gone, "0 50");
    scrape_until(&site, "an expiry", |page| page.sum("dflockd_expiries_total") == 1.0);
    let token = a.lock(&forced, "0 60000");
    let reason = format!("{ADMIN} lock {} {HIDDEN}", fence(&token));
    a.check("force-release", &forced, &reason, "ok");
    drop(b);
    let mutex = [("primitive", "mutex")];
    let page = scrape_until(&site, "the end of a session", |page| {
        page.get("dflockd_session_end_releases_total", &mutex) == 1.0
    });

    assert_eq!(page.get("dflockd_grants_total", &mutex), 4.0);
    assert_eq!(page.get("dflockd_releases_total", &mutex), 1.0);
    assert_eq!(page.get("dflockd_expiries_total", &mutex), 1.0);
    assert_eq!(page.get("dflockd_forced_releases_total", &mutex), 1.0);
    assert_eq!(page.get("dflockd_wait_seconds_count", &mutex), 1.0);
    assert_eq!(page.get("dflockd_hold_seconds_count", &mutex), 4.0);
    assert!(page.get("dflockd_hold_seconds_sum", &mutex) >= 0.05, "a lease of 50 ms has run out");
    assert_eq!(page.sum("dflockd_holds"), 0.0);
    assert_eq!(page.sum("dflockd_waiters"), 0.0);
    assert_eq!(page.get("dflockd_queue_longest", &[]), 0.0);
    assert_eq!(page.get("dflockd_lock_keys", &[]), 3.0);
}

#[test]
fn every_kind_of_thing_is_counted() {
    let site = Site::start(&["--max-locks", "6"]);
    let mut a = in_millis(&site);
    let mut b = in_millis(&site);
    granted(&a.ask("sl", &key("s"), "0 2 60000"));
    granted(&a.ask("rl", &key("rw"), "0 60000"));
    granted(&b.ask("rl", &key("rw"), "0 60000"));
    granted(&a.ask("wl", &key("w"), "0 60000"));
    granted(&a.ask("elect", &key("e"), "0 60000"));
    a.check("incr", &key("c"), "5", "ok 5");
    a.check("kset", &key("kv"), HIDDEN, "ok");
    a.check("rpush", &key("list"), HIDDEN, "ok 1");
    b.begin("bwait", &key("barrier"), "2 60000");
    a.check("listen", &key("channel"), "", "ok");
    a.check("watch", &key("watched"), "", "ok");
    let mut c = in_millis(&site);
    c.check("observe", &key("e"), "", "ok");
    // Refused and timed out.
    assert_ne!(a.ask("sl", &key("s"), "0 3 60000"), "ok");
    a.check("l", &key("e"), "0 60000", "timeout");
    // The same through the other API.
    let session = site.session();
    session.lock(&key("http"));
    session.lock(&key("http2"));
    let body = json!({ "lease_ttl_s": 60 });
    session.post(&format!("/v1/locks/{}", key("one-too-many")), &body).refused(503, "max_locks");
    site.get("/v1/nowhere");
    site.ask(Ask::new("BREW", "/v1/stats"));
    let follows = site.events("/v1/watch?pattern=%3E");

    let page = scrape_until(&site, "a follower", |page| {
        page.get("dflockd_event_followers", &[]) == 1.0 && page.sum("dflockd_values") == 4.0
    });
    let primitive = |name: &str, primitive| page.get(name, &[("primitive", primitive)]);
    for (kind, held) in
        [("mutex", 2.0), ("election", 1.0), ("semaphore", 1.0), ("read", 2.0), ("write", 1.0)]
    {
        assert_eq!(primitive("dflockd_holds", kind), held, "{kind}");
        assert_eq!(primitive("dflockd_grants_total", kind), held, "{kind}");
    }
    assert_eq!(page.get("dflockd_locks_held", &[]), 6.0);
    assert_eq!(page.get("dflockd_semaphore_holders", &[]), 1.0);
    assert_eq!(primitive("dflockd_timeouts_total", "mutex"), 1.0);
    for kind in ["counter", "kv", "list", "barrier"] {
        assert_eq!(page.get("dflockd_values", &[("kind", kind)]), 1.0, "{kind}");
    }
    for kind in ["signals", "changes", "leaders"] {
        assert_eq!(page.get("dflockd_subscriptions", &[("kind", kind)]), 1.0, "{kind}");
    }
    assert_eq!(page.get("dflockd_signal_listeners", &[]), 1.0);
    assert_eq!(page.get("dflockd_refusals_total", &[("reason", "limit_mismatch")]), 1.0);
    assert_eq!(page.get("dflockd_refusals_total", &[("reason", "max_locks")]), 1.0);
    assert_eq!(page.sum("dflockd_refusals_total"), 2.0);
    assert_eq!(page.get("dflockd_commands_total", &[("command", "kv_set")]), 1.0);
    assert_eq!(page.get("dflockd_commands_total", &[("command", "subscribe")]), 3.0);
    assert_eq!(page.get("dflockd_line_requests_total", &[("command", "rl")]), 2.0);
    assert_eq!(page.get("dflockd_line_requests_total", &[("command", "hello")]), 3.0);

    assert_eq!(page.get("dflockd_connections", &[]), 3.0);
    assert_eq!(page.get("dflockd_open_connections", &[("api", "line")]), 3.0);
    assert!(page.get("dflockd_open_connections", &[("api", "http")]) >= 1.0);
    assert_eq!(page.get("dflockd_open_sessions", &[("api", "line")]), 3.0);
    assert_eq!(page.get("dflockd_http_sessions", &[]), 2.0, "a session and a stream");

    let answers = |method, path, status| {
        let labels = [("method", method), ("path", path), ("status", status)];
        let sum = page.get("dflockd_http_request_duration_seconds_sum", &labels);
        assert!(sum > 0.0, "{labels:?}");
        let count = page.get("dflockd_http_request_duration_seconds_count", &labels);
        assert_eq!(count, page.get("dflockd_http_requests_total", &labels), "{labels:?}");
        count
    };
    assert_eq!(answers("POST", "/v1/locks/{key}", "200"), 2.0);
    assert_eq!(answers("POST", "/v1/locks/{key}", "503"), 1.0);
    assert_eq!(answers("GET", "unmatched", "404"), 1.0);
    assert_eq!(answers("OTHER", "/v1/stats", "405"), 1.0);
    drop(follows);
    scrape_until(&site, "the follower leaves", |page| {
        page.get("dflockd_event_followers", &[]) == 0.0
            && page.get("dflockd_http_sessions", &[]) == 1.0
    });
}

#[test]
fn clients_that_are_sent_away_are_counted() {
    let site = Site::guarded("the-token-of-clients", &["--max-connections", "1"]);
    let mut first = site.line();
    assert_eq!(first.ask("auth", "_", "wrong"), "error_auth");
    first.expect_end();
    let page =
        scrape_until(&site, "a free seat", |page| page.get("dflockd_connections", &[]) == 0.0);
    let failures = |page: &Scrape, api, token| {
        page.get("dflockd_auth_failures_total", &[("api", api), ("token", token)])
    };
    assert_eq!(failures(&page, "line", "client"), 1.0);
    let mut first = site.line();
    first.check("auth", "_", "the-token-of-clients", "ok");
    site.line().expect_end();
    site.wire().ask(&Ask::get("/metrics")).refused(401, "unauthorized");
    let page = scrape(&site);
    assert_eq!(page.get("dflockd_connections_refused_total", &[("api", "line")]), 1.0);
    assert_eq!(failures(&page, "http", "client"), 1.0);
    assert_eq!(failures(&page, "http", "admin"), 0.0);
}

/// Every metric that is declared is there, and no other.
#[track_caller]
fn check_all(page: &Scrape, wanted: &[Where]) {
    let wanted = METRICS.iter().filter(|metric| wanted.contains(&metric.found));
    let wanted: BTreeSet<_> = wanted.map(|metric| metric.name.to_owned()).collect();
    let missing: Vec<_> = wanted.difference(&page.families).collect();
    let others: Vec<_> = page.families.difference(&wanted).collect();
    assert!(missing.is_empty() && others.is_empty(), "missing {missing:?}, others {others:?}");
}

#[test]
fn a_server_in_memory_has_all_its_metrics() {
    let site = Site::start(&[]);
    let page = scrape(&site);
    check_all(&page, &[Where::Always, Where::State]);
    assert_eq!(page.get("dflockd_ready", &[]), 1.0);
    assert_eq!(page.get("dflockd_primary", &[]), 1.0);
    let version = [("version", env!("CARGO_PKG_VERSION")), ("mode", "memory")];
    assert_eq!(page.get("dflockd_build_info", &version), 1.0);
    assert!(page.get("process_resident_memory_bytes", &[]) > 1e6);
    assert!(page.get("process_open_fds", &[]) >= 5.0);
    assert!(page.get("process_threads", &[]) >= 2.0);
    // Within some years of this test's own clock, which may be another one.
    assert!(page.get("process_start_time_seconds", &[]) > 1.6e9);
}

#[test]
fn members_of_a_cluster_have_all_their_metrics() {
    let members = Members::start(3, &[]);
    let session = members.follower().session();
    for round in 0..10 {
        let key = key(&format!("k{round}"));
        session.lock_and_unlock(&key);
    }
    let mutex = [("primitive", "mutex")];
    let mut leaders = 0.0;
    let mut primaries = 0.0;
    for place in &members.places {
        let page = scrape_until(place, "all is applied and confirmed", |page| {
            let lags = page.labels("dflockd_raft_follower_lag_entries", "node").len();
            // The leader looks at its followers now and then.
            let is_led = page.get("dflockd_raft_is_leader", &[]) == 1.0;
            page.get("dflockd_releases_total", &mutex) == 10.0
                && lags == if is_led { 2 } else { 0 }
                && page.sum("dflockd_raft_follower_lag_entries") == 0.0
                && page.get("dflockd_raft_peers_connected", &[]) == 2.0
        });
        check_all(&page, &[Where::Always, Where::State, Where::Cluster]);
        let leads = page.get("dflockd_raft_is_leader", &[]);
        leaders += leads;
        primaries += page.get("dflockd_primary", &[]);
        assert_eq!(page.sum("dflockd_raft_state"), 1.0);
        let state = if leads == 1.0 { "leader" } else { "follower" };
        assert_eq!(page.get("dflockd_raft_state", &[("state", state)]), 1.0);
        assert_eq!(page.get("dflockd_raft_has_leader", &[]), 1.0);
        assert_eq!(page.get("dflockd_raft_voters", &[]), 3.0);
        assert!(page.get("dflockd_raft_term", &[]) >= 1.0);
        let applied = page.get("dflockd_raft_applied_index", &[]);
        assert!(applied <= page.get("dflockd_raft_commit_index", &[]));
        assert!(page.get("dflockd_raft_apply_total", &[]) > 0.0);
        assert!(page.get("dflockd_raft_apply_duration_seconds_count", &[]) > 0.0);
        assert!(page.get("dflockd_raft_apply_nanos_total", &[]) > 0.0);
        assert!(page.get("dflockd_raft_fsync_seconds_count", &[]) > 0.0);
        assert!(page.get("dflockd_raft_log_bytes", &[]) > 0.0);
        assert!(page.get("dflockd_raft_leader_changes_total", &[]) >= 1.0);
        assert_eq!(page.get("dflockd_raft_apply_failed_total", &[]), 0.0);
        let lags = page.labels("dflockd_raft_follower_lag_entries", "node");
        assert_eq!(lags.len(), if leads == 1.0 { 2 } else { 0 }, "{lags:?}");
        assert_eq!(page.get("dflockd_raft_proposals_total", &[]) > 0.0, leads == 1.0);
        assert_eq!(page.get("dflockd_grants_total", &mutex), 10.0);
    }
    assert_eq!((leaders, primaries), (1.0, 1.0));
}
