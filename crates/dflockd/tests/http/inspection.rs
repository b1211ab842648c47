//! Who holds what, and why nothing moves: the routes for people and pages, and administration.

use dflockd_testkit::eventually;
use dflockd_testkit::http::Ask;
use serde_json::{Value, json};

use super::site::{Place, Session, Site, granted};

const ADMIN: &str = "adm1n-token-of-the-tests";

pub(super) fn tour(place: &Place) {
    let (a, b) = (
        place.session_with(&json!({ "client": "holder" })),
        place.session_with(&json!({ "client": "waiter" })),
    );
    assert_eq!(place.look("look.a"), None);
    let held = a.lock("look.a");
    let _waiting = b.queue("look.a", 1);
    let view = place.look("look.a").expect("a view");
    assert_eq!(view["key"], "look.a");
    check_lock(&view["locks"][0], "look.a", "mutex", &held.body["fence"]);
    let waiter = &view["locks"][0]["queue"][0];
    assert_eq!(waiter["client"], "waiter", "{waiter}");
    assert!(waiter["waiting_ms"].is_u64(), "{waiter}");
    assert!(!waiter["writer"].as_bool().unwrap_or(false), "{waiter}");

    let sem = a.take("/v1/semaphores/look.b", &json!({ "limit": 3, "lease_ttl_s": 60 }));
    let write = a.take("/v1/rwlocks/look.c/write", &json!({ "lease_ttl_s": 60 }));
    let lead = a.take("/v1/elections/look.d", &json!({ "lease_ttl_s": 60 }));
    let list = place.get("/v1/locks?prefix=look.").ok();
    let locks = list["locks"].as_array().expect("a list");
    let keys: Vec<_> = locks.iter().map(|lock| lock["key"].as_str().unwrap()).collect();
    assert_eq!(keys, ["look.a", "look.b", "look.c", "look.d"]);
    assert_eq!(list["next"], Value::Null);
    check_lock(&locks[0], "look.a", "mutex", &held.body["fence"]);
    check_lock(&locks[1], "look.b", "semaphore", &sem.body["fence"]);
    assert_eq!(locks[1]["limit"], 3);
    check_lock(&locks[2], "look.c", "rwlock", &write.body["fence"]);
    assert_eq!(locks[2]["holders"][0]["writer"], true);
    check_lock(&locks[3], "look.d", "mutex", &lead.body["fence"]);
    assert_eq!(locks[3]["holders"][0]["leader"], true);

    // Page by page.
    let mut after = String::new();
    let mut paged = Vec::new();
    loop {
        let page = place.get(&format!("/v1/locks?prefix=look.&limit=3{after}")).ok();
        let locks = page["locks"].as_array().unwrap();
        paged.extend(locks.iter().map(|lock| lock["key"].as_str().unwrap().to_owned()));
        let Some(next) = page["next"].as_str() else { break };
        assert_eq!(locks.len(), 3, "{page}");
        after = format!("&after={next}");
    }
    assert_eq!(paged, keys);
    let only = |what: &str| place.get(&format!("/v1/locks?prefix=look.&only={what}")).ok();
    assert_eq!(only("held")["locks"].as_array().unwrap().len(), 4);
    let waiting = only("waiting");
    assert_eq!(waiting["locks"].as_array().unwrap().len(), 1, "{waiting}");
    assert_eq!(waiting["locks"][0]["key"], "look.a");

    let contention = place.get("/v1/contention").ok();
    let top = &contention["keys"][0];
    assert_eq!((&top["key"], &top["waiters"]), (&json!("look.a"), &json!(1)), "{contention}");
    assert_eq!((&top["kind"], &top["holders"]), (&json!("mutex"), &json!(1)), "{contention}");
    assert!(top["longest_wait_ms"].is_u64(), "{contention}");

    let mut line = place.line();
    line.check("hello", "liner", "ms", "ok ms");
    let sessions = place.get("/v1/sessions?limit=1000").ok();
    let of = |name: &str| {
        let list = sessions["sessions"].as_array().expect("a list");
        list.iter()
            .find(|one| one["client"] == name)
            .unwrap_or_else(|| panic!("{sessions}"))
            .clone()
    };
    let (holder, waiter, liner) = (of("holder"), of("waiter"), of("liner"));
    assert_eq!((&holder["holds"], &holder["waits"]), (&json!(4), &json!(0)), "{holder}");
    assert_eq!((&waiter["holds"], &waiter["waits"]), (&json!(0), &json!(1)), "{waiter}");
    assert_eq!((&holder["api"], &liner["api"]), (&json!("http"), &json!("line")));
    assert_eq!(view["locks"][0]["holders"][0]["session"], holder["id"]);
    assert_eq!(view["locks"][0]["queue"][0]["session"], waiter["id"]);

    // Everything else that a key can be.
    place.post("/v1/counters/look.x/add", &json!({ "delta": 7 })).ok();
    place.put("/v1/kv/look.x", &json!({ "value": "secret-value" })).ok();
    place.post("/v1/lists/look.x/push", &json!({ "value": "secret-item", "end": "left" })).ok();
    let view = place.look("look.x").expect("a view");
    assert_eq!(view["locks"], json!([]));
    for part in ["counter", "kv", "list"] {
        assert!(!view[part].is_null(), "no {part}: {view}");
    }
    assert!(view.get("barrier").is_none_or(Value::is_null), "{view}");

    let overview = place.get("/v1/overview").ok();
    assert!(overview["version"].is_string() && overview["uptime_ms"].is_u64(), "{overview}");
    for (count, least) in [("held", 4), ("waiting", 1), ("lock_keys", 4), ("value_keys", 3)] {
        assert!(overview[count].as_u64().unwrap() >= least, "{count}: {overview}");
    }
    for count in ["connections", "http_sessions"] {
        assert!(overview[count].as_u64().unwrap() >= 1, "{count}: {overview}");
    }
    for total in ["grants", "releases", "expiries", "forced_releases", "timeouts", "requests"] {
        assert!(overview["totals"][total].is_u64(), "{total}: {overview}");
    }
    assert!(overview["totals"]["grants"].as_u64().unwrap() >= 4, "{overview}");
    a.end().empty();
    b.end().empty();
}

#[track_caller]
fn check_lock(lock: &Value, key: &str, kind: &str, fence: &Value) {
    assert_eq!((&lock["key"], &lock["kind"]), (&json!(key), &json!(kind)), "{lock}");
    assert_eq!(lock["holders_total"], 1, "{lock}");
    let holder = &lock["holders"][0];
    assert_eq!((&holder["fence"], &holder["client"]), (fence, &json!("holder")), "{lock}");
    assert!(holder["session"].is_string(), "{lock}");
    for time in ["lease_left_ms", "held_ms"] {
        assert!(holder[time].is_u64(), "{time}: {lock}");
    }
    assert!(lock["revision"].is_string(), "{lock}");
}

#[test]
fn lists_have_limits() {
    let site = Site::start(&["--max-locks", "2000"]);
    let a = site.session();
    for number in 0..150 {
        a.lock(&format!("k{number:04}"));
    }
    let count = |query: &str| {
        let list = site.get(&format!("/v1/locks{query}")).ok();
        (list["locks"].as_array().unwrap().len(), list["next"].clone())
    };
    assert_eq!(count(""), (100, json!("k0099")));
    assert_eq!(count("?limit=1000"), (150, Value::Null));
    assert_eq!(count("?limit=150"), (150, Value::Null));
    assert_eq!(count("?prefix=k00&limit=1000").0, 100);
    assert_eq!(count("?after=k0140&limit=1000").0, 9);
    assert_eq!(count("?prefix=none"), (0, Value::Null));
    for wrong in ["?limit=0", "?limit=1001", "?limit=x", "?limit=-1", "?only=both", "?limit="] {
        site.get(&format!("/v1/locks{wrong}")).bad_for(wrong);
    }
    for wrong in ["?limit=0", "?limit=x"] {
        site.get(&format!("/v1/sessions{wrong}")).bad();
        site.get(&format!("/v1/contention{wrong}")).bad();
    }
}

#[test]
fn long_queues_are_counted_and_cut() {
    let site = Site::start(&[]);
    let holder = site.session();
    holder.lock("k");
    let mut lines: Vec<_> = (0..50).map(|_| site.line()).collect();
    for client in &mut lines {
        client.begin("l", "k", "600 600");
    }
    site.wait_for_crowd("k", 1, 50);
    let list = site.get("/v1/locks").ok();
    assert_eq!(list["locks"][0]["waiters_total"], 50);
    assert_eq!(list["locks"][0]["queue"].as_array().unwrap().len(), 32);
    let view = site.look("k").unwrap();
    assert_eq!(view["locks"][0]["queue"].as_array().unwrap().len(), 50);
    let contention = site.get("/v1/contention?limit=1").ok();
    assert_eq!(contention["keys"][0]["waiters"], 50);
}

fn admin(site: &Place, path: &str, token: &str, body: &Value) -> dflockd_testkit::http::Reply {
    site.ask(Ask::post(path, body).admin(token))
}

/// GUARANTEES 10: one hold, authorised, audited, and the next fence is higher.
pub(super) fn force_release(place: &Place, output: impl Fn() -> String) {
    let (a, b) = (place.session(), place.session());
    let held = a.lock("forced");
    let mut waiting = b.queue("forced", 1);
    let path = "/v1/admin/locks/forced/force-release";
    let body =
        |fence: u64| json!({ "space": "lock", "fence": fence.to_string(), "reason": "stuck job" });
    admin(place, path, ADMIN, &body(held.fence - 1)).refused(404, "not_held");
    admin(place, path, "wrong", &body(held.fence)).refused(401, "admin_unauthorized");
    place.post(path, &body(held.fence)).refused(401, "admin_unauthorized");
    assert_eq!(place.crowd("forced"), (1, 1));
    admin(place, path, ADMIN, &body(held.fence)).empty();
    let next = granted(&mut waiting);
    assert!(next.fence > held.fence);
    admin(place, path, ADMIN, &body(held.fence)).refused(404, "not_held");
    a.post("/v1/locks/forced/renew", &held.proof()).refused(404, "not_held");
    let sem = a.take("/v1/semaphores/forced", &json!({ "limit": 1 }));
    let body = json!({ "space": "sem", "fence": sem.fence.to_string(), "reason": "stuck too" });
    admin(place, path, ADMIN, &body).empty();
    for wrong in [
        json!({}),
        json!({ "space": "lock", "fence": "1" }),
        json!({ "space": "lock", "fence": 1, "reason": "x" }),
        json!({ "space": "lock", "fence": "x", "reason": "x" }),
        json!({ "space": "all", "fence": "1", "reason": "x" }),
        json!({ "space": "lock", "fence": "1", "reason": "" }),
    ] {
        admin(place, path, ADMIN, &wrong).bad();
    }
    eventually("it is in the log", || {
        let text = output();
        let line = text.lines().find(|line| line.contains("stuck job"))?;
        (line.contains("audit") && line.contains("forced")).then_some(())
    });
    for secret in [ADMIN, &held.token, &next.token] {
        assert!(!output().contains(secret), "a secret in the log");
    }
    a.end().empty();
    b.end().empty();
}

/// The number of a session as others see it.
pub(super) fn number_of(place: &Place, client: &str) -> String {
    let sessions = place.get("/v1/sessions?limit=1000").ok();
    let list = sessions["sessions"].as_array().unwrap();
    let one = list.iter().find(|one| one["client"] == client).expect("it is in the list");
    one["id"].as_str().expect("a string").to_owned()
}

fn end_session(place: &Place, output: impl Fn() -> String) {
    let victim: Session = place.session_with(&json!({ "client": "victim" }));
    let other = place.session();
    let held = victim.lock("ended");
    let mut waiting = other.queue("ended", 1);
    let id = number_of(place, "victim");
    let path = format!("/v1/admin/sessions/{id}/end");
    let body = json!({ "reason": "left for good" });
    admin(place, &path, "wrong", &body).refused(401, "admin_unauthorized");
    admin(place, &path, ADMIN, &json!({})).bad();
    admin(place, &path, ADMIN, &body).empty();
    // What an administrator ends releases at once, whatever the policy says of connections.
    assert!(granted(&mut waiting).fence > held.fence);
    eventually("the session is gone", || victim.ping().status == 410);
    victim.ping().refused(410, "session_gone");
    admin(place, &path, ADMIN, &body).refused(404, "not_found");
    eventually("it is in the log", || output().contains("left for good"));
    other.end().empty();
}

#[test]
fn administration() {
    let site = Site::start(&["--admin-token", ADMIN]);
    force_release(&site, || site.server.output());
    end_session(&site, || site.server.output());
    assert_eq!(site.get("/v1/overview").ok()["admin"], true);
    for id in ["999999", "x", "-1"] {
        let path = format!("/v1/admin/sessions/{id}/end");
        let reply = admin(&site, &path, ADMIN, &json!({ "reason": "x" }));
        assert!(matches!(reply.status, 400 | 404), "{id}: {}", reply.text());
    }
}

#[test]
fn administration_of_a_durable_node() {
    let site = Site::durable(&["--admin-token", ADMIN]);
    force_release(&site, || site.server.output());
    end_session(&site, || site.server.output());
}

#[test]
fn administration_is_off_without_a_token() {
    let site = Site::start(&[]);
    for (method, path) in [
        ("POST", "/v1/admin/locks/k/force-release"),
        ("POST", "/v1/admin/sessions/1/end"),
        ("POST", "/v1/admin/voters"),
        ("DELETE", "/v1/admin/voters/n1"),
    ] {
        // Checked before anything else, also before the body.
        let reply = site.ask(Ask::new(method, path).admin("x").body("nonsense"));
        reply.refused(503, "admin_disabled");
    }
    assert_eq!(site.get("/v1/overview").ok()["admin"], false);
    assert_eq!(site.get("/v1/overview").ok()["mode"], "memory");
    assert_eq!(site.get("/v1/overview").ok()["cluster"], Value::Null);
}

#[test]
fn there_is_no_cluster_in_memory_mode() {
    let site = Site::start(&["--admin-token", ADMIN]);
    site.get("/v1/readindex").refused(404, "cluster_disabled");
    site.get("/v1/cluster/members").refused(404, "cluster_disabled");
    let voter =
        json!({ "node_id": "n2", "raft_addr": "127.0.0.1:1", "client_addr": "127.0.0.1:2" });
    admin(&site, "/v1/admin/voters", ADMIN, &voter).refused(404, "cluster_disabled");
    let delete = Ask::new("DELETE", "/v1/admin/voters/n2").admin(ADMIN);
    site.ask(delete).refused(404, "cluster_disabled");
}
