//! The line protocol and HTTP are two APIs of one server.

use dflockd_testkit::fence;
use serde_json::json;

use super::site::{Place, Site, granted};

/// GUARANTEES 3 and 5: one queue per key, whichever way the waiters came.
pub(super) fn tour(place: &Place) {
    alternating_waiters(place, 6);
    let mut line = place.line();
    let a = place.session();
    // What one API gives the other can take back, and the other way round.
    let token = line.lock("apis", "0 600");
    a.post("/v1/locks/apis/release", &json!({ "token": token })).empty();
    let grant = a.lock("apis");
    assert!(grant.fence > fence(&token));
    line.check("n", "apis", &format!("{} 600", grant.token), "ok 600");
    line.check("r", "apis", &grant.token, "ok");
    // Values are the same values.
    line.check("incr", "apis", "5", "ok 5");
    assert_eq!(place.get("/v1/counters/apis").ok()["value"], 5);
    place.put("/v1/kv/apis", &json!({ "value": "from http" })).ok();
    line.check("kget", "apis", "", "ok from http");
    line.check("kset", "apis", "from a line", "ok");
    assert_eq!(place.get("/v1/kv/apis").ok()["value"], "from a line");
    place.post("/v1/lists/apis/push", &json!({ "value": "x", "end": "right" })).ok();
    line.check("lpop", "apis", "", "ok x");
    // A barrier of both.
    let mut waiting = a.begin("/v1/barriers/apis/wait", &json!({ "count": 2, "timeout_s": 60 }));
    line.check("bwait", "apis", "2 60", "ok");
    assert_eq!(waiting.reply().ok(), json!({ "status": "ok" }));
    // An election of both.
    line.check("observe", "leader", "", "ok");
    let leader = a.take("/v1/elections/leader", &json!({ "lease_ttl_s": 60 }));
    assert_eq!(line.line(), "leader elected leader");
    a.post("/v1/elections/leader/resign", &leader.proof()).empty();
    assert_eq!(line.line(), "leader resigned leader");
    a.end().empty();
}

fn alternating_waiters(place: &Place, count: u64) {
    let holder = place.session();
    let held = holder.lock("fifo");
    let mut lines = Vec::new();
    let mut webs = Vec::new();
    for position in 1..=count {
        if position % 2 == 0 {
            let session = place.session();
            let wire = session.queue("fifo", position);
            webs.push((session, wire));
        } else {
            let mut client = place.line();
            client.begin("l", "fifo", "600 600");
            place.wait_for_crowd("fifo", 1, position);
            lines.push(client);
        }
    }
    let mut last = held.fence;
    holder.unlock("fifo", &held);
    let (mut lines, mut webs) = (lines.into_iter(), webs.into_iter());
    for position in 1..=count {
        // Only the one whose turn it is has an answer; reading it from any other would wait in vain.
        let fence = if position % 2 == 0 {
            let (session, mut wire) = webs.next().unwrap();
            let grant = granted(&mut wire);
            session.unlock("fifo", &grant);
            grant.fence
        } else {
            let mut client = lines.next().unwrap();
            let token = dflockd_testkit::granted(&client.line());
            client.check("r", "fifo", &token, "ok");
            fence(&token)
        };
        assert!(fence > last, "waiter {position}: {fence} after {last}");
        last = fence;
    }
    assert_eq!(place.crowd("fifo"), (0, 0));
    holder.end().empty();
}

#[test]
fn twenty_waiters_in_turn() {
    alternating_waiters(&Site::start(&[]), 20);
}

#[test]
fn connections_of_both_are_counted() {
    let site = Site::start(&[]);
    let (mut line, a) = (site.line(), site.session());
    line.check("ping", "_", "", "ok");
    let stats = site.get("/v1/stats").ok();
    assert_eq!(stats["connections"], 2, "{stats}");
    a.lock("k");
    let same = line.stats();
    let stats = site.get("/v1/stats").ok();
    for list in ["locks", "semaphores", "rw_locks", "counters", "kv_entries", "lists", "barriers"] {
        let count = |stats: &serde_json::Value| stats[list].as_array().map(Vec::len);
        assert_eq!(count(&stats), count(&same), "{list}");
    }
    assert!(stats["locks"][0]["fence"].is_string(), "{stats}");
}
