//! Watches: ordered, unique, resumable, and honest about what is lost. GUARANTEES 31 and 32.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use dflockd_testkit::http::{Ask, Event, Events, Got, Wire};
use dflockd_testkit::ports::connect_narrow;
use dflockd_testkit::{A_WHILE, LIMIT, Noise, eventually, millis};
use serde_json::{Value, json};

use super::site::{Place, Site, granted};

/// An event of a watch: revision, event, key.
type Change = (u64, String, String);

#[track_caller]
fn change(event: &Event) -> Change {
    assert_eq!(event.name, "change", "{event:?}");
    let text = |name: &str| event.data[name].as_str().expect(name).to_owned();
    assert_eq!(event.id, Some(text("revision")), "{event:?}");
    (text("revision").parse().unwrap(), text("event"), text("key"))
}

#[track_caller]
fn next(events: &mut Events) -> Change {
    change(&events.next())
}

#[track_caller]
fn expect(events: &mut Events, wanted: &[(&str, &str)]) -> u64 {
    let mut last = 0;
    for (event, key) in wanted {
        let (revision, seen, of) = next(events);
        assert_eq!((seen.as_str(), of.as_str()), (*event, *key));
        assert!(revision >= last, "{revision} after {last}");
        last = revision;
    }
    last
}

/// A watch that goes on behind a revision.
fn resumed(place: &Place, pattern: &str, after: u64) -> Events {
    let ask = Ask::get(&format!("/v1/watch?pattern={pattern}"));
    place.begin(ask.header("Last-Event-ID", &after.to_string())).into_events()
}

pub(super) fn tour(place: &Place) {
    let mut events = place.events("/v1/watch?pattern=watch.*");
    let mut line = place.line();
    let (a, b) = (place.session(), place.session());
    let held = a.lock("watch.k");
    let first = expect(&mut events, &[("acquire", "watch.k")]);
    let mut waiting = b.queue("watch.k", 1);
    a.unlock("watch.k", &held);
    let next = granted(&mut waiting);
    expect(&mut events, &[("release", "watch.k"), ("acquire", "watch.k")]);
    b.unlock("watch.k", &next);
    line.check("incr", "watch.c", "1", "ok 1");
    place.put("/v1/kv/watch.v", &json!({ "value": "x" })).ok();
    line.check("rpush", "watch.l", "x", "ok 1");
    line.check("incr", "other", "1", "ok 1");
    place.post("/v1/lists/watch.l/pop", &json!({ "end": "right" })).ok();
    let rest = [
        ("release", "watch.k"),
        ("incr", "watch.c"),
        ("kset", "watch.v"),
        ("rpush", "watch.l"),
        ("rpop", "watch.l"),
    ];
    expect(&mut events, &rest);
    // Refused and read-only requests are no changes, and nothing comes twice.
    place.get("/v1/kv/watch.v").ok();
    a.post("/v1/locks/watch.k/release", &held.proof()).refused(404, "not_held");
    assert_eq!(events.hear(A_WHILE), Err(Got::Nothing));
    // From where one was, by header and by parameter.
    let mut again = resumed(place, "watch.*", first);
    expect(&mut again, &[("release", "watch.k"), ("acquire", "watch.k")]);
    expect(&mut again, &rest);
    let mut again = place.events(&format!("/v1/watch?pattern=watch.c&after={first}"));
    expect(&mut again, &[("incr", "watch.c")]);
    a.end().empty();
    b.end().empty();
}

#[test]
fn what_cannot_be_watched() {
    let site = Site::start(&[]);
    for wrong in [
        "",
        "?pattern=",
        "?pattern=a.%3E.b",
        "?pattern=a%20b",
        "?pattern=a&after=x",
        "?pattern=a&after=-1",
        "?pattern=a&after=99999999999999999999",
    ] {
        site.get(&format!("/v1/watch{wrong}")).bad_for(wrong);
    }
    site.ask(Ask::get("/v1/watch?pattern=a").header("Last-Event-ID", "x")).bad();
}

/// How far the changes may be ahead of a reader that comes back: less than the history that is kept.
const AHEAD: u64 = 500;

/// Makes changes until told to stop, but never more than allowed: several per command, on several keys.
fn churn(place: &Place, stop: &AtomicBool, allowed: &AtomicU64) -> u64 {
    let (mut a, mut b) = (place.line(), place.line());
    let mut made = 0;
    while !stop.load(Ordering::Relaxed) {
        if made >= allowed.load(Ordering::Relaxed) {
            thread::sleep(millis(1));
            continue;
        }
        let key = format!("load.{}", made % 7);
        let token = a.lock(&key, "0 600");
        // A release that grants to the next in line is two events of one change.
        b.begin("l", &key, "60 600");
        a.check("r", &key, &token, "ok");
        let token = dflockd_testkit::granted(&b.line());
        b.check("r", &key, &token, "ok");
        made += 4;
    }
    made
}

fn no_gap_and_no_repeat(place: &Place) {
    let stop = Arc::new(AtomicBool::new(false));
    let allowed = Arc::new(AtomicU64::new(AHEAD));
    let mut whole = place.events("/v1/watch?pattern=load.*");
    let load = {
        let (place, stop, allowed) = (place.clone(), Arc::clone(&stop), Arc::clone(&allowed));
        thread::spawn(move || churn(&place, &stop, &allowed))
    };
    let mut seen = vec![next(&mut whole)];
    let mut pieces = seen.clone();
    let mut noise = Noise::new(5);
    for _ in 0..60 {
        let mut piece = resumed(place, "load.*", pieces.last().unwrap().0);
        for _ in 0..=noise.below(30) {
            pieces.push(next(&mut piece));
        }
        piece.reset();
        allowed.store(pieces.len() as u64 + AHEAD, Ordering::Relaxed);
    }
    stop.store(true, Ordering::Relaxed);
    let made = load.join().unwrap();
    for _ in 1..made {
        seen.push(next(&mut whole));
    }
    assert_eq!(whole.hear(A_WHILE), Err(Got::Nothing), "more events than changes");
    assert!(seen.windows(2).all(|two| two[0].0 <= two[1].0), "out of order");
    assert_eq!(pieces, seen[..pieces.len()], "cut and resumed is the same as never cut");
}

#[test]
fn resuming_under_load() {
    no_gap_and_no_repeat(&Site::start(&[]));
}

#[test]
fn resuming_under_load_on_a_durable_node() {
    no_gap_and_no_repeat(&Site::durable(&[]));
}

#[test]
fn history_that_is_gone_is_said_to_be_gone() {
    let site = Site::start(&[]);
    let mut events = site.events("/v1/watch?pattern=old.%3E");
    let mut line = site.line();
    line.check("incr", "old.c", "1", "ok 1");
    let first = expect(&mut events, &[("incr", "old.c")]);
    drop(events);
    // More than any history keeps.
    const COUNT: usize = 20_000;
    let requests = "incr\nold.c\n1\n".repeat(100);
    for round in 0..COUNT / 100 {
        line.send(&requests);
        for number in 0..100 {
            assert_eq!(line.line(), format!("ok {}", 2 + round * 100 + number));
        }
    }
    let mut events = resumed(&site, "old.%3E", first);
    let event = events.next();
    assert_eq!(event.name, "compacted", "{event:?}");
    let compacted: u64 = event.data["revision"].as_str().unwrap().parse().unwrap();
    assert!(compacted > first, "{compacted} after {first}");
    // It goes on with what is kept, in order and without a gap, and then with what is new.
    let mut last = next(&mut events).0;
    assert!(last >= compacted, "{last} before {compacted}");
    let recent = site.get("/v1/events?pattern=old.c&limit=1").ok();
    let newest: u64 = recent["events"][0]["revision"].as_str().unwrap().parse().unwrap();
    let mut kept = 1;
    while last < newest {
        let (revision, ..) = next(&mut events);
        assert!(revision > last, "{revision} after {last}");
        last = revision;
        kept += 1;
    }
    assert!(kept < COUNT, "nothing was compacted");
    line.check("incr", "old.c", "1", &format!("ok {}", COUNT + 2));
    let (revision, ..) = next(&mut events);
    assert!(revision > last);
    // A client that comes back with what it was told now is not behind any more.
    let mut events = resumed(&site, "old.%3E", revision);
    line.check("cset", "old.c", "1", "ok");
    expect(&mut events, &[("cset", "old.c")]);
}

#[test]
fn recent_events_can_be_asked_for() {
    let site = Site::start(&[]);
    let mut line = site.line();
    for number in 1..=5 {
        line.check("incr", "recent.c", "1", &format!("ok {number}"));
    }
    line.check("kset", "recent.v", "x", "ok");
    let ask = |query: &str| -> Vec<Value> {
        let answer = site.get(&format!("/v1/events{query}")).ok();
        answer["events"].as_array().expect("a list").clone()
    };
    let all = eventually("they are all there", || {
        let all = ask("?pattern=recent.*");
        (all.len() == 6).then_some(all)
    });
    assert_eq!(all[5]["event"], "kset", "newest last: {all:?}");
    assert_eq!(all[5]["key"], "recent.v");
    let revisions: Vec<u64> =
        all.iter().map(|event| event["revision"].as_str().unwrap().parse().unwrap()).collect();
    assert!(revisions.windows(2).all(|two| two[0] <= two[1]), "{revisions:?}");
    let two = ask("?pattern=recent.*&limit=2");
    assert_eq!(two, all[4..]);
    assert_eq!(ask("?pattern=recent.v").len(), 1);
    assert!(ask("?pattern=nothing").is_empty());
    for wrong in ["?limit=0", "?limit=x", "?limit=-1", "?pattern=a.%3E.b"] {
        site.get(&format!("/v1/events{wrong}")).bad();
    }
}

/// A reader that reads nothing is cut off, not waited for, and the server keeps no more for it than it must.
#[test]
fn a_slow_watcher_is_cut_off() {
    let site = Site::start(&[]);
    let ask = site.admitted(Ask::get("/v1/watch?pattern=slow.%3E"));
    let mut slow = Wire::over(connect_narrow(site.http), None).unwrap();
    slow.send(ask.bytes());
    let mut line = site.line();
    let before = site.server.resident_kib();
    let requests = "incr\nslow.c\n1\n".repeat(500);
    for _ in 0..200 {
        line.send(&requests);
        for _ in 0..500 {
            assert!(line.line().starts_with("ok "));
        }
    }
    site.server.check_growth(before, 64 * 1024);
    // What it can still read ends, or says what was lost.
    let mut events = slow.into_events();
    let mut last = 0;
    let end = loop {
        match events.hear(LIMIT) {
            Ok(event) if event.name == "change" => {
                let (revision, ..) = change(&event);
                assert!(revision > last);
                last = revision;
            }
            Ok(event) => break event.name,
            Err(got) => break format!("{got:?}"),
        }
    };
    assert!(matches!(end.as_str(), "End" | "compacted" | "lagged"), "{end}");
}
