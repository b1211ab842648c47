//! The end of the server: what waits is told, what watches still sees it.

use dflockd_testkit::http::{Ask, Got};
use dflockd_testkit::{LIMIT, eventually};
use serde_json::json;

use super::site::Site;

fn drained(mut site: Site) {
    let (holder, waiter) = (site.session(), site.session());
    let held = holder.lock("k");
    let mut waiting = waiter.queue("k", 1);
    let mut popping = holder.begin("/v1/lists/l/pop", &json!({ "end": "left", "timeout_s": 600 }));
    let mut signals = site.events("/v1/signals?pattern=a");
    let mut watch = site.events("/v1/watch?pattern=a");
    let mut kept = site.wire();
    kept.ask(&site.admitted(Ask::get("/v1/stats"))).ok();
    // A silent line connection is waited for: it keeps the drain going while this test looks at it.
    let mut line = site.line();
    line.check("ping", "_", "", "ok");
    site.server.signal("TERM");
    waiting.reply().refused(503, "draining");
    popping.reply().refused(503, "draining");
    signals.expect_end();
    watch.expect_end();
    let ready = site.get("/ready");
    assert_eq!((ready.status, ready.json()), (503, json!({ "status": "draining" })));
    assert_eq!(site.get("/health").ok(), json!({ "status": "ok" }));
    site.post("/v1/sessions", &json!({})).refused(503, "draining");
    waiter.post("/v1/locks/other", &json!({})).refused(503, "draining");
    let long = json!({ "acquire_timeout_s": 600 });
    holder.post("/v1/locks/k", &long).refused(503, "draining");
    site.get("/v1/signals?pattern=a").refused(503, "draining");
    // Nothing was granted on the way out.
    assert_ne!(held.token, "");
    assert!(site.server.is_running());
    drop(line);
    let status = site.server.wait_for_end();
    assert_eq!(status.code(), Some(0), "{}", site.server.output());
}

#[test]
fn long_polls_are_told() {
    drained(Site::start(&[]));
}

#[test]
fn long_polls_are_told_over_tls() {
    drained(Site::with_tls(&[]));
}

#[test]
fn long_polls_are_told_by_a_durable_node() {
    drained(Site::durable(&[]));
}

/// Only HTTP clients: sessions, streams and kept connections do not hold up the end.
#[test]
fn idle_clients_are_not_waited_for() {
    let mut site = Site::start(&[]);
    let sessions: Vec<_> = (0..10).map(|_| site.session()).collect();
    sessions[0].lock("k");
    let _streams: Vec<_> = (0..10).map(|_| site.events("/v1/watch?pattern=a")).collect();
    let mut kept: Vec<_> = (0..10).map(|_| site.wire()).collect();
    for wire in &mut kept {
        wire.ask(&Ask::get("/health")).ok();
    }
    site.server.terminate();
    for wire in &mut kept {
        assert_eq!(wire.hear(LIMIT), Got::End);
    }
}

/// A client that does not finish its request is waited for no longer than was said.
#[test]
fn the_drain_is_bounded() {
    let mut site = Site::start(&["--shutdown-timeout", "1"]);
    let a = site.session();
    let mut slow = site.wire();
    slow.send(Ask::new("POST", "/v1/locks/k").session(&a.id).head(Some(100)));
    slow.send("{");
    let mut unread = site.begin(Ask::get("/v1/watch?pattern=%3E"));
    site.server.signal("TERM");
    eventually("it ends", || !site.server.is_running());
    assert_ne!(slow.hear(LIMIT), Got::Nothing);
    assert_ne!(unread.hear(LIMIT), Got::Nothing);
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let mut site = Site::start(&["--shutdown-timeout", "600"]);
    let mut line = site.line();
    line.check("ping", "_", "", "ok");
    site.server.signal("TERM");
    eventually("it drains", || site.get("/ready").status == 503);
    assert!(site.server.is_running());
    site.server.signal("TERM");
    site.server.wait_for_end();
}
