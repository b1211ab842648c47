//! Mutexes, semaphores, read-write locks and elections.

use dflockd_testkit::eventually;
use dflockd_testkit::http::Ask;
use serde_json::{Value, json};

use super::site::{Grant, Place, Session, Site, granted, still_waits};

/// Longest time in seconds that a request may name.
const SECONDS_MAX: u64 = 9_223_372_036;

/// What the routes do when all is well. `GUARANTEES` 1, 3, 4, 5 and 8 as one client sees them.
pub(super) fn tour(place: &Place) {
    let (a, b) = (place.session(), place.session());
    mutex(&a, &b);
    for (family, body) in
        [("locks", json!({})), ("semaphores", json!({ "limit": 1 })), ("rwlocks", json!({}))]
    {
        two_phases(&a, &b, family, &body);
    }
    semaphore(&a, &b);
    readers_and_writers(&a, &b);
    election(place, &a, &b);
    a.end().empty();
    b.end().empty();
}

fn mutex(a: &Session, b: &Session) {
    let grant = a.take("/v1/locks/m", &json!({ "acquire_timeout_s": 0 }));
    assert_eq!(grant.body["status"], "ok");
    assert_eq!(grant.body["lease_ttl_s"], 33, "the default lease");
    assert_eq!(b.post("/v1/locks/m", &json!({})).ok(), json!({ "status": "timeout" }));
    assert_eq!(
        b.post("/v1/locks/m", &json!({ "acquire_timeout_ms": 30 })).ok(),
        json!({ "status": "timeout" })
    );
    let body = json!({ "token": grant.token, "lease_ttl_s": 100 });
    let renewed = a.post("/v1/locks/m/renew", &body).ok();
    let left = renewed["remaining_ms"].as_u64().unwrap();
    assert!((90_000..=100_000).contains(&left), "{renewed}");
    assert_eq!(renewed["remaining_s"], left / 1000);
    assert_eq!(renewed["fence"], grant.body["fence"]);
    // Without a lease it is the default, not that of the acquire.
    let renewed = a.post("/v1/locks/m/renew", &grant.proof()).ok();
    assert!(renewed["remaining_ms"].as_u64().unwrap() <= 33_000, "{renewed}");

    // One that waits gets it when it is given back; tokens are bearer credentials (GUARANTEES 4).
    let mut waiting = a.queue("m", 1);
    still_waits(&mut waiting);
    b.post("/v1/locks/m/release", &grant.proof()).empty();
    let next = granted(&mut waiting);
    assert!(next.fence > grant.fence, "GUARANTEES 3");
    for verb in ["release", "renew"] {
        let reply = a.post(&format!("/v1/locks/m/{verb}"), &grant.proof());
        reply.refused(404, "not_held");
    }
    a.unlock("m", &next);

    let body = json!({ "lease_ttl_ms": 1500, "acquire_timeout_ms": 0 });
    let short = a.take("/v1/locks/m", &body);
    assert_eq!(short.body["lease_ttl_ms"], 1500);
    assert_eq!(short.body["lease_ttl_s"], 1);
    // It ends by itself, and the next in line has it then.
    let next = b.take("/v1/locks/m", &json!({ "acquire_timeout_s": 60 }));
    assert!(next.fence > short.fence);
    let reply = a.post("/v1/locks/m/release", &short.proof());
    assert_eq!(reply.status, 404, "the token of an ended lease: {}", reply.text());
    b.unlock("m", &next);
}

/// GUARANTEES 8: enqueue and wait are one acquire in two steps.
fn two_phases(a: &Session, b: &Session, family: &str, body: &Value) {
    let key = format!("two-{family}");
    let base = format!("/v1/{family}/{key}");
    let enqueue = match family {
        "rwlocks" => format!("{base}/write/enqueue"),
        _ => format!("{base}/enqueue"),
    };
    let (wait, release) = (format!("{base}/wait"), format!("{base}/release"));
    let first = a.take(&enqueue, body);
    assert_eq!(first.body["status"], "acquired");
    a.post(&enqueue, body).refused(409, "already_enqueued");
    assert_eq!(b.post(&enqueue, body).ok(), json!({ "status": "queued" }));
    b.post(&enqueue, body).refused(409, "already_enqueued");
    // The holder claims its grant: the same token.
    let claimed = a.take(&wait, &json!({ "timeout_s": 5 }));
    assert_eq!((&claimed.token, &claimed.body["status"]), (&first.token, &json!("ok")));
    let mut waiting = b.begin(&wait, &json!({ "timeout_s": 60 }));
    still_waits(&mut waiting);
    a.post(&release, &first.proof()).empty();
    let second = granted(&mut waiting);
    assert!(second.fence > first.fence);
    // A wait that ends without a grant gives the place up.
    assert_eq!(a.post(&enqueue, body).ok(), json!({ "status": "queued" }));
    assert_eq!(a.post(&wait, &json!({ "timeout_ms": 20 })).ok(), json!({ "status": "timeout" }));
    a.post(&wait, &json!({ "timeout_s": 1 })).refused(409, "not_enqueued");
    assert_eq!(a.place.crowd(&key).1, 0, "{family}");
    b.post(&release, &second.proof()).empty();

    // A grant that nobody claims ends with its lease, and the wait says so (GUARANTEES 7).
    let mut brief = body.clone();
    brief["lease_ttl_ms"] = json!(100);
    assert_eq!(a.take(&enqueue, &brief).body["lease_ttl_ms"], 100);
    eventually("the lease ends", || a.place.crowd(&key).0 == 0);
    a.post(&wait, &json!({ "timeout_s": 1 })).refused(409, "lease_expired");
    a.post(&wait, &json!({ "timeout_s": 1 })).refused(409, "not_enqueued");
    let again = a.take(&enqueue, body);
    a.post(&release, &again.proof()).empty();
}

fn semaphore(a: &Session, b: &Session) {
    let two = json!({ "limit": 2, "lease_ttl_s": 60 });
    let (first, second) = (a.take("/v1/semaphores/s", &two), b.take("/v1/semaphores/s", &two));
    assert!(second.fence > first.fence);
    assert_eq!(b.post("/v1/semaphores/s", &two).ok(), json!({ "status": "timeout" }));
    let body = json!({ "limit": 3 });
    b.post("/v1/semaphores/s", &body).refused(409, "limit_mismatch");
    b.post("/v1/semaphores/s/enqueue", &body).refused(409, "limit_mismatch");
    let body = json!({ "limit": 2, "acquire_timeout_s": 60 });
    let mut waiting = b.begin("/v1/semaphores/s", &body);
    b.place.wait_for_crowd("s", 2, 1);
    let renewed = a.post("/v1/semaphores/s/renew", &first.proof()).ok();
    assert_eq!(renewed["fence"], first.body["fence"]);
    a.post("/v1/semaphores/s/release", &second.proof()).empty();
    let third = granted(&mut waiting);
    for grant in [&first, &third] {
        b.post("/v1/semaphores/s/release", &grant.proof()).empty();
        b.post("/v1/semaphores/s/release", &grant.proof()).refused(404, "not_held");
        b.post("/v1/semaphores/s/renew", &grant.proof()).refused(404, "not_held");
    }
    // The largest there may be.
    let most = a.take("/v1/semaphores/most", &json!({ "limit": 1_048_576 }));
    a.post("/v1/semaphores/most/release", &most.proof()).empty();
}

fn readers_and_writers(a: &Session, b: &Session) {
    let lease = json!({ "lease_ttl_s": 60 });
    let one = a.take("/v1/rwlocks/rw/read", &lease);
    let two = b.take("/v1/rwlocks/rw/read", &lease);
    assert_eq!(a.post("/v1/rwlocks/rw/write", &lease).ok(), json!({ "status": "timeout" }));
    let body = json!({ "acquire_timeout_s": 60, "lease_ttl_s": 60 });
    let mut writer = a.begin("/v1/rwlocks/rw/write", &body);
    a.place.wait_for_crowd("rw", 2, 1);
    // No overtaking: a reader behind a waiting writer waits (GUARANTEES 5).
    assert_eq!(b.post("/v1/rwlocks/rw/read", &lease).ok(), json!({ "status": "timeout" }));
    let renewed = b.post("/v1/rwlocks/rw/renew", &one.proof()).ok();
    assert_eq!(renewed["fence"], one.body["fence"]);
    for grant in [&one, &two] {
        b.post("/v1/rwlocks/rw/release", &grant.proof()).empty();
    }
    let writer = granted(&mut writer);
    assert!(writer.fence > two.fence);
    // Two phases of a reader.
    let place = b.post("/v1/rwlocks/rw/read/enqueue", &json!({})).ok();
    assert_eq!(place, json!({ "status": "queued" }));
    let mut reader = b.begin("/v1/rwlocks/rw/wait", &json!({ "timeout_s": 60 }));
    still_waits(&mut reader);
    a.post("/v1/rwlocks/rw/release", &writer.proof()).empty();
    let reader = granted(&mut reader);
    // A key is of one kind.
    a.post("/v1/locks/rw", &json!({})).refused(409, "type_mismatch");
    a.post("/v1/elections/rw", &json!({})).refused(409, "type_mismatch");
    let plain = a.lock("plain");
    b.post("/v1/rwlocks/plain/read", &json!({})).refused(409, "type_mismatch");
    b.post("/v1/rwlocks/plain/write/enqueue", &json!({})).refused(409, "type_mismatch");
    a.unlock("plain", &plain);
    b.post("/v1/rwlocks/rw/release", &reader.proof()).empty();
    for verb in ["release", "renew"] {
        b.post(&format!("/v1/rwlocks/rw/{verb}"), &reader.proof()).refused(404, "not_held");
    }
}

fn election(place: &Place, a: &Session, b: &Session) {
    let mut events = place.events("/v1/elections/e/events");
    let first = a.take("/v1/elections/e", &json!({ "lease_ttl_s": 60 }));
    events.expect("leader", &json!({ "event": "elected", "key": "e" }));
    assert_eq!(b.post("/v1/elections/e", &json!({})).ok(), json!({ "status": "timeout" }));
    let renewed = a.post("/v1/elections/e/renew", &first.proof()).ok();
    assert_eq!(renewed["fence"], first.body["fence"]);
    let body = json!({ "acquire_timeout_s": 60, "lease_ttl_s": 60 });
    let mut next = b.begin("/v1/elections/e", &body);
    place.wait_for_crowd("e", 1, 1);
    a.post("/v1/elections/e/resign", &first.proof()).empty();
    let next = granted(&mut next);
    assert!(next.fence > first.fence, "GUARANTEES 29");
    events.expect("leader", &json!({ "event": "resigned", "key": "e" }));
    events.expect("leader", &json!({ "event": "failover", "key": "e" }));
    // Without repeats on HTTP, says GUARANTEES 29; the new leader is told once, as failover, elected, or both.
    b.post("/v1/elections/e/resign", &next.proof()).empty();
    let event = events.next();
    if event.data["event"] == "elected" {
        events.expect("leader", &json!({ "event": "resigned", "key": "e" }));
    } else {
        assert_eq!(event.data, json!({ "event": "resigned", "key": "e" }));
    }
    for verb in ["resign", "renew"] {
        let reply = b.post(&format!("/v1/elections/e/{verb}"), &next.proof());
        reply.refused(404, "not_held");
    }
}

/// Routes that take a grant, and what they need in their bodies.
pub(super) const ACQUIRES: [(&str, Option<&str>); 5] = [
    ("/v1/locks/k", None),
    ("/v1/semaphores/k2", Some("limit")),
    ("/v1/rwlocks/k3/read", None),
    ("/v1/rwlocks/k4/write", None),
    ("/v1/elections/k5", None),
];

fn body_of(needs: Option<&str>) -> Value {
    needs.map_or_else(|| json!({}), |name| json!({ name: 1 }))
}

#[test]
fn numbers_have_limits() {
    let site = Site::start(&[]);
    let a = site.session();
    let mut fields: Vec<(String, Value, &str)> = Vec::new();
    for (path, needs) in ACQUIRES {
        for field in ["acquire_timeout_s", "acquire_timeout_ms", "lease_ttl_s", "lease_ttl_ms"] {
            fields.push((path.to_owned(), body_of(needs), field));
        }
    }
    for (family, needs) in [("locks", None), ("semaphores", Some("limit"))] {
        for field in ["lease_ttl_s", "lease_ttl_ms"] {
            fields.push((format!("/v1/{family}/k/enqueue"), body_of(needs), field));
        }
        for field in ["timeout_s", "timeout_ms"] {
            fields.push((format!("/v1/{family}/k/wait"), json!({}), field));
        }
        let token = json!({ "token": "0".repeat(32) });
        fields.push((format!("/v1/{family}/k/renew"), token.clone(), "lease_ttl_s"));
        fields.push((format!("/v1/{family}/k/renew"), token, "lease_ttl_ms"));
    }
    for (path, body, field) in &fields {
        let send = |value: Value| {
            let mut body = body.clone();
            body[*field] = value;
            a.post(path, &body)
        };
        for wrong in [json!(-1), json!(1.5), json!("1"), json!(true), json!([1]), json!({})] {
            send(wrong.clone()).bad_for(&format!("{path} {field} {wrong}"));
        }
        for wrong in [json!(u64::MAX), json!(i64::MIN), json!(1e300)] {
            send(wrong).bad();
        }
        if field.ends_with("_s") {
            send(json!(SECONDS_MAX + 1)).bad();
            // The largest time is legal; waits for a lock of one's own are no test of that.
            if *field == "lease_ttl_s" && !path.ends_with("renew") && !path.ends_with("enqueue") {
                let grant = Grant::of(send(json!(SECONDS_MAX)).ok());
                assert_eq!(grant.body["lease_ttl_s"], 86_400, "the longest lease");
                let token = grant.proof();
                let base = path.trim_end_matches("/read").trim_end_matches("/write");
                let verb = if base.contains("elections") { "resign" } else { "release" };
                a.post(&format!("{base}/{verb}"), &token).empty();
            }
        }
    }
    // Both forms of one time contradict each other.
    for (path, needs) in ACQUIRES {
        for name in ["acquire_timeout", "lease_ttl"] {
            let mut body = body_of(needs);
            body[format!("{name}_s")] = json!(1);
            body[format!("{name}_ms")] = json!(1000);
            a.post(path, &body).bad();
        }
        // 0 and nothing are the default.
        let mut body = body_of(needs);
        body["lease_ttl_s"] = json!(0);
        assert_eq!(a.take(path, &body).body["lease_ttl_s"], 33);
    }
    a.post("/v1/locks/k/wait", &json!({ "timeout_s": 1, "timeout_ms": 1 })).bad();
    for limit in [json!(0), json!(-1), json!(1_048_577), json!("1"), json!(null)] {
        for path in ["/v1/semaphores/k6", "/v1/semaphores/k6/enqueue"] {
            a.post(path, &json!({ "limit": limit })).bad();
        }
    }
    assert!(a.post("/v1/semaphores/k6", &json!({ "limit": 0 })).bad().contains("limit"));
    assert_eq!(site.look("k6"), None);
}

#[test]
fn bodies_that_are_needed_and_not() {
    let site = Site::start(&[]);
    let a = site.session();
    let bare = |path: &str| site.ask(Ask::new("POST", path).session(&a.id));
    for path in [
        "/v1/locks/k",
        "/v1/locks/k/release",
        "/v1/locks/k/renew",
        "/v1/locks/k/wait",
        "/v1/semaphores/k",
        "/v1/semaphores/k/enqueue",
        "/v1/semaphores/k/release",
        "/v1/rwlocks/k/release",
        "/v1/elections/k/resign",
        "/v1/barriers/k/wait",
    ] {
        bare(path).bad_for(path);
    }
    assert_eq!(site.look("k"), None);
    assert_eq!(bare("/v1/locks/k/enqueue").ok()["status"], "acquired");
    let more = a.post("/v1/semaphores/k/enqueue", &json!({}));
    assert!(more.bad().contains("limit"));
}

#[test]
fn tokens_have_a_form() {
    let site = Site::start(&[]);
    let a = site.session();
    let held = a.lock("k");
    for family in ["locks", "semaphores", "rwlocks", "elections"] {
        let release = if family == "elections" { "resign" } else { "release" };
        for verb in [release, "renew"] {
            let path = format!("/v1/{family}/k/{verb}");
            for wrong in [json!(""), json!("a b"), json!("a\tb"), json!("x".repeat(257)), json!(1)]
            {
                a.post(&path, &json!({ "token": wrong })).bad();
            }
            a.post(&path, &json!({})).bad();
            // A well-formed one that is nobody's.
            a.post(&path, &json!({ "token": "0".repeat(32) })).refused(404, "not_held");
            a.post(&path, &json!({ "token": "x".repeat(256) })).refused(404, "not_held");
        }
    }
    assert!(a.post("/v1/locks/k/release", &json!({ "token": "" })).bad().contains("token"));
    // A right token for another key is a wrong one.
    a.post("/v1/locks/other/release", &held.proof()).refused(404, "not_held");
    a.unlock("k", &held);
}

#[test]
fn sessions_are_served_in_order() {
    let site = Site::start(&[]);
    let holder = site.session();
    let mut held = holder.lock("k");
    let sessions: Vec<_> = (0..10).map(|_| site.session()).collect();
    let mut waiting: Vec<_> =
        sessions.iter().zip(1..).map(|(session, place)| session.queue("k", place)).collect();
    for wire in &mut waiting {
        holder.unlock("k", &held);
        let next = granted(wire);
        assert!(next.fence > held.fence, "GUARANTEES 3 and 5");
        held = next;
    }
}

#[test]
fn full() {
    let site = Site::start(&["--max-locks", "2", "--max-waiters", "1", "--gc-max-idle", "600"]);
    let (a, b) = (site.session(), site.session());
    let held = a.lock("k1");
    a.lock("k2");
    for (path, needs) in ACQUIRES {
        let path = path.replace("/k", "/x");
        a.post(&path, &body_of(needs)).refused(503, "max_locks");
    }
    a.post("/v1/locks/x/enqueue", &json!({})).refused(503, "max_locks");
    let waiting = a.queue("k1", 1);
    let long = json!({ "acquire_timeout_s": 60 });
    b.post("/v1/locks/k1", &long).refused(503, "max_waiters");
    b.post("/v1/locks/k1/enqueue", &json!({})).refused(503, "max_waiters");
    b.unlock("k1", &held);
    let mut waiting = waiting;
    granted(&mut waiting);
}
