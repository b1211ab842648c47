//! Sessions: whose they are, when they end, and that nothing keeps them from it.

use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Got};
use dflockd_testkit::{A_WHILE, LIMIT, eventually, millis};
use serde_json::json;

use super::site::{Place, Site, granted, is_id, still_waits};

/// What holds in each mode.
pub(super) fn tour(place: &Place) {
    let a = place.session();
    a.ping().empty();
    let held = a.lock("session-1");
    // What it holds is free before the answer to DELETE, and whoever waits has it.
    let b = place.session();
    let mut waiting = b.queue("session-1", 1);
    a.end().empty();
    assert!(granted(&mut waiting).fence > held.fence);
    // The id is dead for ever (GUARANTEES 18).
    a.ping().refused(410, "session_gone");
    a.end().refused(410, "session_gone");
    a.post("/v1/locks/session-1", &json!({})).refused(410, "session_gone");
    b.end().empty();
    assert_eq!(place.crowd("session-1"), (0, 0));

    // DELETE ends a long poll, which says so, and the place in the queue is gone.
    let (a, b) = (place.session(), place.session());
    let held = a.lock("session-2");
    let mut waiting = b.queue("session-2", 1);
    b.end().empty();
    waiting.reply().refused(410, "session_gone");
    assert_eq!(place.crowd("session-2"), (1, 0));
    a.unlock("session-2", &held);
    a.lock_and_unlock("session-2");
    a.end().empty();
}

#[test]
fn opening() {
    let site = Site::start(&[]);
    let bare = site.ask(Ask::new("POST", "/v1/sessions")).ok();
    assert!(is_id(bare["session_id"].as_str().unwrap()), "{bare}");
    assert_eq!(bare["idle_timeout_s"], 20);
    let other = site.post("/v1/sessions", &json!({})).ok();
    assert_ne!(bare["session_id"], other["session_id"]);
    for good in ["x", "worker-7", &"x".repeat(64)] {
        site.session_with(&json!({ "stable_ref": good }));
        site.session_with(&json!({ "client": good }));
    }
    for wrong in ["", &"x".repeat(65), "a\nb", "ü", "a\u{7f}"] {
        site.post("/v1/sessions", &json!({ "stable_ref": wrong })).bad();
        site.post("/v1/sessions", &json!({ "client": wrong })).bad();
    }
    site.post("/v1/sessions", &json!({ "name": "x" })).bad();
    site.post("/v1/sessions", &json!([])).bad();
}

#[test]
fn ids_have_a_form() {
    let site = Site::start(&[]);
    let long = "0".repeat(33);
    for wrong in ["x", &"0".repeat(31), &long, &"g".repeat(32), &"A".repeat(32)] {
        let ping = site.ask(Ask::new("POST", &format!("/v1/sessions/{wrong}/ping")));
        assert!(ping.bad().contains("session id"), "{}", ping.text());
        site.delete(&format!("/v1/sessions/{wrong}")).bad();
        site.ask(Ask::post("/v1/locks/k", &json!({})).session(wrong)).bad();
    }
    let unknown = "0".repeat(32);
    let ping = site.ask(Ask::new("POST", &format!("/v1/sessions/{unknown}/ping")));
    ping.refused(410, "session_gone");
    site.delete(&format!("/v1/sessions/{unknown}")).refused(410, "session_gone");
    let ask = Ask::post("/v1/locks/k", &json!({}));
    site.ask(ask.clone().session(&unknown)).refused(410, "session_gone");
    let detail = site.ask(ask).bad();
    assert!(detail.contains("X-Dflockd-Session"), "{detail}");
}

/// Key, then session, then body.
#[test]
fn checks_have_an_order() {
    let site = Site::start(&[]);
    let (key, unknown) = ("x".repeat(257), "0".repeat(32));
    let ask = |key: &str, session: &str, body: &str| {
        let path = format!("/v1/locks/{key}");
        site.ask(Ask::new("POST", &path).session(session).body(body))
    };
    assert!(ask(&key, &unknown, "nonsense").bad().contains("key"));
    ask("k", &unknown, "nonsense").refused(410, "session_gone");
    ask("k", "short", "nonsense").bad();
    ask("k", &site.session().id, "nonsense").bad();
}

#[test]
fn idle_sessions_are_reaped_and_busy_ones_are_not() {
    let site = Site::start(&["--http-session-idle-timeout", "2"]);
    let (idle, pinged, holder, waiter) =
        (site.session(), site.session(), site.session(), site.session());
    let answer = site.post("/v1/sessions", &json!({})).ok();
    assert_eq!(answer["idle_timeout_s"], 2);
    let idle_lock = idle.lock("idle");
    let held = holder.lock("k");
    let mut waiting = waiter.queue("k", 1);
    // Another way to be in flight: a pop.
    let popper = site.session();
    let mut popping = popper.begin("/v1/lists/l/pop", &json!({ "end": "left", "timeout_s": 600 }));
    let begun = Instant::now();
    eventually("the idle one is reaped and its lock is free", || {
        pinged.ping().empty();
        holder.post("/v1/locks/k/renew", &json!({ "token": held.token, "lease_ttl_s": 600 })).ok();
        site.crowd("idle").0 == 0
    });
    assert!(begun.elapsed() >= Duration::from_secs(4), "earlier than twice the timeout");
    idle.ping().refused(410, "session_gone");
    let reply = holder.post("/v1/locks/idle/renew", &idle_lock.proof());
    assert_eq!(reply.status, 404, "{}", reply.text());
    // Long polls were silent all the time. A few more turns of the sweep, to be sure.
    let again = Instant::now();
    while again.elapsed() < Duration::from_secs(7) {
        holder.ping().empty();
        assert_eq!(waiting.hear(millis(200)), Got::Nothing, "a long poll was answered");
    }
    holder.unlock("k", &held);
    let grant = granted(&mut waiting);
    waiter.unlock("k", &grant);
    site.post("/v1/lists/l/push", &json!({ "value": "x", "end": "left" })).ok();
    assert_eq!(popping.reply().ok(), json!({ "status": "ok", "value": "x" }));
    // Once it has been answered it is idle like any other.
    eventually("all are reaped", || site.sessions() == 0);
}

/// In replicated mode the client may have gone to another member: the session ends some time after it was seen last,
/// its places in queues with it, its holds with their leases.
#[test]
fn idle_sessions_of_a_durable_node_end_too() {
    let site = Site::durable(&["--http-session-idle-timeout", "2"]);
    let (holder, idle) = (site.session(), site.session());
    holder.lock("k");
    let enqueued = idle.post("/v1/locks/k/enqueue", &json!({})).ok();
    assert_eq!(enqueued, json!({ "status": "queued" }));
    assert_eq!(site.crowd("k"), (1, 1));
    eventually("the place of the idle one is gone", || {
        holder.ping().empty();
        site.crowd("k") == (1, 0)
    });
    idle.ping().refused(410, "session_gone");
    holder.ping().empty();
}

#[test]
fn zero_means_never_reaped() {
    let site = Site::start(&["--http-session-idle-timeout", "0"]);
    let answer = site.post("/v1/sessions", &json!({})).ok();
    assert_eq!(answer["idle_timeout_s"], 0);
    let a = site.session();
    std::thread::sleep(A_WHILE);
    a.ping().empty();
}

/// Bodies are read before the session is claimed.
#[test]
fn a_slow_body_holds_up_nothing() {
    let site = Site::start(&["--http-session-idle-timeout", "2", "--read-timeout", "25"]);
    let a = site.session();
    let ask = Ask::new("POST", "/v1/locks/slow").session(&a.id);
    let mut slow = site.wire();
    slow.send(ask.head(Some(2)));
    slow.send("{");
    // Another request of the session is served meanwhile.
    a.lock_and_unlock("quick");
    a.lock("kept");
    a.ping().empty();
    assert_eq!(slow.hear(millis(10)), Got::Nothing);
    // And it does not keep the session.
    eventually("the session is reaped", || site.crowd("kept") == (0, 0));
    slow.send("}");
    slow.reply().refused(410, "session_gone");
    assert_eq!(site.crowd("slow"), (0, 0));
}

#[test]
fn a_body_that_does_not_come_is_a_bad_request() {
    let site = Site::start(&["--read-timeout", "1"]);
    let a = site.session();
    let ask = Ask::new("POST", "/v1/locks/slow").session(&a.id);
    let mut slow = site.wire();
    slow.send(ask.head(Some(2)));
    slow.send("{");
    let reply = slow.try_reply(LIMIT);
    match reply {
        Ok(reply) => assert!(matches!(reply.status, 400 | 408), "{reply:?}"),
        Err(got) => assert_eq!(got, Got::End),
    }
    a.ping().empty();
    assert_eq!(site.look("slow"), None);
}

#[test]
fn operations_of_one_session_are_serialised_but_not_ping_and_delete() {
    let site = Site::start(&[]);
    let (a, holder) = (site.session(), site.session());
    let held = holder.lock("k");
    let mut waiting = a.queue("k", 1);
    // A second operation of the session waits for the first.
    let mut second = a.begin("/v1/locks/free", &json!({}));
    still_waits(&mut second);
    a.ping().empty();
    holder.unlock("k", &held);
    granted(&mut waiting);
    granted(&mut second);
    // DELETE ends both.
    let held = site.session();
    let other = held.lock("j");
    let mut waiting = a.queue("j", 1);
    let mut second = a.begin("/v1/locks/free2", &json!({}));
    still_waits(&mut second);
    a.end().empty();
    waiting.reply().refused(410, "session_gone");
    second.reply().refused(410, "session_gone");
    assert_eq!(site.crowd("k"), (0, 0));
    assert_eq!(site.crowd("free"), (0, 0));
    assert_eq!(site.crowd("free2"), (0, 0));
    held.unlock("j", &other);
}

#[test]
fn without_auto_release_holds_stay_and_places_go() {
    let site = Site::start(&["--auto-release-on-disconnect=false"]);
    let (a, b) = (site.session(), site.session());
    let held = a.lock("k");
    let mut waiting = b.queue("k", 1);
    b.end().empty();
    waiting.reply().refused(410, "session_gone");
    a.end().empty();
    assert_eq!(site.crowd("k"), (1, 0));
    let c = site.session();
    c.unlock("k", &held);
    c.lock("k");
}

/// Every request of a session counts as a sign of life, also one that is refused by the lock.
#[test]
fn every_request_refreshes() {
    let site = Site::start(&["--http-session-idle-timeout", "2"]);
    let a = site.session();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(7) {
        a.post("/v1/locks/k/release", &json!({ "token": "x" })).refused(404, "not_held");
        std::thread::sleep(millis(100));
    }
    a.ping().empty();
}

#[test]
fn names_of_sessions_are_shown() {
    let site = Site::start(&[]);
    let a = site.session_with(&json!({ "client": "billing-7" }));
    let b = site.session_with(&json!({ "stable_ref": "billing-8" }));
    a.lock("k");
    let _waiting = b.queue("k", 1);
    let view = site.look("k").unwrap();
    assert_eq!(view["locks"][0]["holders"][0]["client"], "billing-7", "{view}");
    assert_eq!(view["locks"][0]["queue"][0]["client"], "billing-8", "{view}");
    // The number in the view is not the id, which is a secret.
    assert!(!view.to_string().contains(&a.id), "{view}");
    let list = site.get("/v1/sessions").ok();
    assert!(!list.to_string().contains(&a.id), "{list}");
    assert!(!site.server.output().contains(&a.id), "a session id in the log");
}

/// The secret of a session need not be in a path, which proxies write to their logs.
#[test]
fn a_session_by_its_header() {
    let site = Site::start(&["--http-session-idle-timeout", "600"]);
    let a = site.session();
    let held = a.lock("k");
    a.post("/v1/sessions/self/ping", &json!({})).empty();
    site.ask(Ask::new("POST", "/v1/sessions/self/ping")).bad();
    site.ask(Ask::new("DELETE", "/v1/sessions/self")).bad();
    site.ask(Ask::new("DELETE", "/v1/sessions/self").session("nonsense")).bad();
    assert_eq!(site.crowd("k"), (1, 0), "{held:?}");
    site.ask(Ask::new("DELETE", "/v1/sessions/self").session(&a.id)).empty();
    assert_eq!(site.crowd("k"), (0, 0));
    let gone = Ask::new("POST", "/v1/sessions/self/ping").session(&a.id);
    site.ask(gone).refused(410, "session_gone");
    site.ask(Ask::new("DELETE", "/v1/sessions/self").session(&a.id)).refused(410, "session_gone");
    // The old paths go on working.
    let b = site.session();
    b.ping().empty();
    b.end().empty();
}
