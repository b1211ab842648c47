//! Clients that go away in the middle of a long poll: no place in a queue, no grant and no item is left behind.

use std::time::Instant;

use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{LIMIT, Noise, eventually};
use serde_json::{Value, json};

use super::site::{Grant, Place, Site, granted};

/// What holds in each mode.
pub(super) fn tour(place: &Place) {
    let (a, b, c) = (place.session(), place.session(), place.session());
    let held = a.lock("vanish");
    let gone = b.queue("vanish", 1);
    let mut waiting = c.queue("vanish", 2);
    drop(gone);
    place.wait_for_crowd("vanish", 1, 1);
    a.unlock("vanish", &held);
    let next = granted(&mut waiting);
    assert!(next.fence > held.fence);
    // The session itself lives on, and can queue again.
    let again = b.queue("vanish", 1);
    again.reset();
    place.wait_for_crowd("vanish", 1, 0);
    c.unlock("vanish", &next);
    b.lock_and_unlock("vanish");
    race_for_lock(place, 10);
    race_for_item(place, 10);
}

/// Waits for a random moment around the one at which the grant comes.
fn jitter(noise: &mut Noise, micros: usize) {
    let begun = Instant::now();
    let until = u128::try_from(noise.below(micros)).unwrap();
    while begun.elapsed().as_micros() < until {
        std::hint::spin_loop();
    }
}

/// Goes away. What was on its way already can still be read by one that only stops sending.
fn leave(mut wire: Wire, by_reset: bool) -> Option<Value> {
    if by_reset {
        wire.reset();
        return None;
    }
    wire.half_close();
    let reply = wire.try_reply(LIMIT).ok()?;
    assert_eq!(reply.status, 200, "{}", reply.text());
    Some(reply.json())
}

/// A waiter goes away at about the moment of its grant: either it was told of it, or the lock is free.
fn race_for_lock(place: &Place, rounds: usize) {
    let (holder, next) = (place.session(), place.session());
    let mut noise = Noise::new(11);
    let mut told = 0;
    for round in 0..rounds {
        let goner = place.session();
        let held = holder.lock("race");
        let gone = goner.queue("race", 1);
        let mut release = place.wire();
        let ask = Ask::post("/v1/locks/race/release", &held.proof()).session(&holder.id);
        release.begin(&place.admitted(ask));
        jitter(&mut noise, 400);
        let by_reset = round % 2 == 0;
        let heard = leave(gone, by_reset);
        release.reply().empty();
        if let Some(heard) = heard {
            // It has it like anybody else.
            told += 1;
            let grant = Grant::of(heard);
            assert_eq!(place.crowd("race"), (1, 0), "round {round}");
            next.unlock("race", &grant);
        } else if by_reset {
            // What the kernel took over before the reset nobody will read; the session still answers for it.
            goner.end().empty();
        }
        let body = json!({ "acquire_timeout_s": 20, "lease_ttl_s": 600 });
        let grant = next.take("/v1/locks/race", &body);
        assert!(grant.fence > held.fence, "round {round}");
        assert_eq!(place.crowd("race"), (1, 0), "round {round}");
        next.unlock("race", &grant);
    }
    println!("{told} of {rounds} were told");
    for session in [holder, next] {
        session.end().empty();
    }
}

/// GUARANTEES 26: a popper goes away at about the moment of its item, which it was told of or which is in the list.
fn race_for_item(place: &Place, rounds: usize) {
    let goner = place.session();
    let mut noise = Noise::new(12);
    let mut told = 0;
    for round in 0..rounds {
        let long = json!({ "end": "left", "timeout_s": 60 });
        let gone = goner.begin("/v1/lists/l/pop", &long);
        super::values::wait_for_poppers(place, 1);
        let item = format!("item-{round}");
        let mut push = place.wire();
        let ask = Ask::post("/v1/lists/l/push", &json!({ "value": item, "end": "right" }));
        push.begin(&place.admitted(ask));
        jitter(&mut noise, 400);
        let heard = leave(gone, false);
        push.reply().ok();
        let expected = json!({ "status": "ok", "value": item });
        if let Some(heard) = heard {
            told += 1;
            assert_eq!(heard, expected, "round {round}");
        } else {
            let found = eventually("the item is in the list again", || {
                let popped = place.post("/v1/lists/l/pop", &json!({ "end": "left" })).ok();
                (popped["status"] == "ok").then_some(popped)
            });
            assert_eq!(found, expected, "round {round}");
        }
        assert_eq!(place.get("/v1/lists/l/length").ok(), json!({ "length": 0 }));
    }
    println!("{told} of {rounds} were told");
    goner.end().empty();
}

#[test]
fn many_races_for_a_lock() {
    race_for_lock(&Site::start(&[]), 300);
}

#[test]
fn many_races_for_an_item() {
    race_for_item(&Site::start(&[]), 300);
}

#[test]
fn many_races_over_tls() {
    let site = Site::with_tls(&[]);
    race_for_lock(&site, 60);
    race_for_item(&site, 60);
}

/// The same for every route that can wait.
#[test]
fn every_long_poll_notices() {
    let site = Site::start(&[]);
    let (holder, goner) = (site.session(), site.session());
    let long = |mut body: Value| {
        body["acquire_timeout_s"] = json!(600);
        body
    };
    for (base, take, key) in [
        ("/v1/locks/k1", "", "k1"),
        ("/v1/semaphores/k2", "", "k2"),
        ("/v1/rwlocks/k3", "/read", "k3"),
        ("/v1/rwlocks/k4", "/write", "k4"),
        ("/v1/elections/k5", "", "k5"),
    ] {
        let one = if base.contains("semaphores") { json!({ "limit": 1 }) } else { json!({}) };
        let first = if take == "/read" { "/write" } else { take };
        let held = holder.take(&format!("{base}{first}"), &one);
        let gone = goner.begin(&format!("{base}{take}"), &long(one.clone()));
        site.wait_for_crowd(key, 1, 1);
        gone.reset();
        site.wait_for_crowd(key, 1, 0);
        if base.contains("elections") {
            holder.post(&format!("{base}/resign"), &held.proof()).empty();
            continue;
        }
        // In two phases: the place stays as long as nobody waits for it, as it does in the line protocol, and
        // is given up by a wait whose client goes away.
        let enqueued = goner.post(&format!("{base}{take}/enqueue"), &one).ok();
        assert_eq!(enqueued, json!({ "status": "queued" }), "{base}");
        // A reset can overtake the request itself; then it is sent again.
        eventually("the place is given up", || {
            let gone = goner.begin(&format!("{base}/wait"), &json!({ "timeout_s": 600 }));
            std::thread::sleep(dflockd_testkit::millis(20));
            gone.reset();
            site.crowd(key) == (1, 0)
        });
        holder.post(&format!("{base}/release"), &held.proof()).empty();
        assert_eq!(site.crowd(key), (0, 0), "{base}");
    }
    let gone = goner.begin("/v1/barriers/b/wait", &json!({ "count": 2, "timeout_s": 600 }));
    let arrivals = || site.get("/v1/stats").ok()["barriers"].as_array().unwrap().len();
    eventually("it has arrived", || arrivals() == 1);
    gone.reset();
    eventually("it has left", || arrivals() == 0);
}

/// A grant that the kernel took but the client never read is not seen by anybody: the lease ends it.
#[test]
fn a_request_behind_a_long_poll_does_not_save_it() {
    let site = Site::start(&[]);
    let (a, b) = (site.session(), site.session());
    let held = a.lock("k");
    // Pipelined: more bytes are no sign that the client left.
    let mut waiting = b.queue("k", 1);
    waiting.send(site.admitted(Ask::get("/health")).bytes());
    super::site::still_waits(&mut waiting);
    site.wait_for_crowd("k", 1, 1);
    a.unlock("k", &held);
    granted(&mut waiting);
    assert_eq!(waiting.reply().ok(), json!({ "status": "ok" }));
    // The same, and then it goes away.
    let mut waiting = a.queue("k", 1);
    waiting.send(site.admitted(Ask::get("/health")).bytes());
    waiting.reset();
    site.wait_for_crowd("k", 1, 0);
}
