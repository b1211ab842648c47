//! Counters, key-value entries, lists and barriers.

use dflockd_testkit::eventually;
use dflockd_testkit::http::Ask;
use dflockd_testkit::line::entry;
use serde_json::{Value, json};

use super::site::{Place, Session, Site, still_waits};

/// What the routes do when all is well. GUARANTEES 23 to 28 as one client sees them.
pub(super) fn tour(place: &Place) {
    counters(place);
    entries(place);
    lists(place);
    let (a, b) = (place.session(), place.session());
    blocking_pop(place, &a, &b);
    barrier(place, &a, &b);
    a.end().empty();
    b.end().empty();
}

fn counter(value: i64) -> Value {
    json!({ "value": value, "value_s": value.to_string() })
}

fn counters(place: &Place) {
    assert_eq!(place.get("/v1/counters/c").ok(), counter(0));
    assert_eq!(place.post("/v1/counters/c/add", &json!({ "delta": 5 })).ok(), counter(5));
    assert_eq!(place.post("/v1/counters/c/add", &json!({ "delta": -7 })).ok(), counter(-2));
    let reply = place.put("/v1/counters/c", &json!({ "value": i64::MAX }));
    assert!(matches!(reply.status, 200 | 204), "{}", reply.text());
    assert_eq!(place.get("/v1/counters/c").ok(), counter(i64::MAX));
    place.post("/v1/counters/c/add", &json!({ "delta": 1 })).refused(409, "overflow");
    let least = json!({ "delta": i64::MIN });
    assert_eq!(place.post("/v1/counters/c/add", &least).ok(), counter(-1));
    place.post("/v1/counters/c/add", &least).refused(409, "overflow");
    assert_eq!(place.get("/v1/counters/c").ok(), counter(-1));
    for wrong in [json!({}), json!({ "delta": 1.5 }), json!({ "delta": "1" })] {
        place.post("/v1/counters/c/add", &wrong).bad();
    }
    let huge = r#"{"delta":9223372036854775808}"#;
    place.ask(Ask::new("POST", "/v1/counters/c/add").body(huge)).bad();
    place.put("/v1/counters/c", &json!({})).bad();
}

fn entries(place: &Place) {
    let path = "/v1/kv/v";
    assert_eq!(place.get(path).ok(), json!({ "status": "empty" }));
    let written = place.put(path, &json!({ "value": "one" })).ok();
    assert_eq!(written["status"], "ok");
    let first = revision(&written);
    let read = place.get(path).ok();
    let expected = json!({ "status": "ok", "value": "one", "revision": first.to_string() });
    assert_eq!(read, expected);

    // GUARANTEES 24: by revision.
    let cas = |body: Value| place.put(path, &body).ok();
    let conflict = json!({ "status": "cas_conflict" });
    let stale = (first - 1).to_string();
    assert_eq!(cas(json!({ "value": "x", "if_revision": stale })), conflict);
    let second = cas(json!({ "value": "two", "if_revision": first.to_string() }));
    let second = revision(&second);
    assert!(second > first, "{second} after {first}");
    assert_eq!(cas(json!({ "value": "x", "if_revision": first.to_string() })), conflict);
    // By value, and by absence.
    assert_eq!(cas(json!({ "value": "x", "if_value": "one" })), conflict);
    assert_eq!(cas(json!({ "value": "three", "if_value": "two" }))["status"], "ok");
    assert_eq!(cas(json!({ "value": "x", "if_absent": true })), conflict);
    assert_eq!(place.get(path).ok()["value"], "three");
    let reply = place.delete(path);
    assert!(matches!(reply.status, 200 | 204), "{}", reply.text());
    assert_eq!(cas(json!({ "value": "four", "if_absent": true }))["status"], "ok");
    // Two conditions, or one that is no number.
    let both = json!({ "value": "x", "if_value": "four", "if_absent": true });
    place.put(path, &both).bad();
    place.put(path, &json!({ "value": "x", "if_revision": "y" })).bad();
    place.put(path, &json!({ "value": "x", "ttl_s": 1, "ttl_ms": 1 })).bad();
    place.put(path, &json!({ "value": "x", "ttl_s": -1 })).bad();
    place.put(path, &json!({})).bad();
    place.put(path, &json!({ "value": 1 })).bad();
    // What the line protocol could not carry is no value here either.
    for wrong in ["", "a\nb", "a\rb"] {
        place.put(path, &json!({ "value": wrong })).bad();
    }
    assert_eq!(place.get(path).ok()["value"], "four");

    assert_eq!(place.put(path, &json!({ "value": "brief", "ttl_ms": 50 })).ok()["status"], "ok");
    eventually("the entry ends", || place.get(path).ok()["status"] == "empty");

    // Text is text, whatever it is made of.
    let text = "ü \u{1f512} \"quoted\" \\ \u{1} end";
    place.put("/v1/kv/text", &json!({ "value": text })).ok();
    assert_eq!(place.get("/v1/kv/text").ok()["value"], text);
    let mut line = place.line();
    assert_eq!(line.ask("kget", "text", ""), format!("ok {text}"));
    // What is no text is shown as well as can be.
    line.send(b"kset\nbytes\n\xff\xfe!\n");
    assert_eq!(line.line(), "ok");
    assert_eq!(place.get("/v1/kv/bytes").ok()["value"], "\u{fffd}\u{fffd}!");
}

#[track_caller]
fn revision(body: &Value) -> u64 {
    let text = body["revision"].as_str().unwrap_or_else(|| panic!("no revision: {body}"));
    text.parse().expect("decimal")
}

fn push(place: &Place, value: &str, end: &str) -> Value {
    place.post("/v1/lists/l/push", &json!({ "value": value, "end": end })).ok()
}

fn pop(place: &Place, end: &str) -> Value {
    place.post("/v1/lists/l/pop", &json!({ "end": end })).ok()
}

fn lists(place: &Place) {
    assert_eq!(pop(place, "left"), json!({ "status": "empty" }));
    assert_eq!(push(place, "b", "right"), json!({ "length": 1 }));
    assert_eq!(push(place, "c", "right"), json!({ "length": 2 }));
    assert_eq!(push(place, "a", "left"), json!({ "length": 3 }));
    let range = |query: &str| place.get(&format!("/v1/lists/l{query}")).ok();
    assert_eq!(range(""), json!({ "items": ["a", "b", "c"] }));
    assert_eq!(range("?start=0&stop=-1"), json!({ "items": ["a", "b", "c"] }));
    assert_eq!(range("?start=-2&stop=-1"), json!({ "items": ["b", "c"] }));
    assert_eq!(range("?start=1&stop=1"), json!({ "items": ["b"] }));
    assert_eq!(range("?start=5&stop=9"), json!({ "items": [] }));
    for wrong in ["?start=x", "?stop=1.5", "?start=99999999999999999999"] {
        place.get(&format!("/v1/lists/l{wrong}")).bad();
    }
    assert_eq!(place.get("/v1/lists/l/length").ok(), json!({ "length": 3 }));
    assert_eq!(place.get("/v1/lists/none/length").ok(), json!({ "length": 0 }));
    assert_eq!(place.get("/v1/lists/none").ok(), json!({ "items": [] }));
    assert_eq!(pop(place, "right"), json!({ "status": "ok", "value": "c" }));
    assert_eq!(pop(place, "left"), json!({ "status": "ok", "value": "a" }));
    assert_eq!(pop(place, "left"), json!({ "status": "ok", "value": "b" }));
    assert_eq!(pop(place, "right"), json!({ "status": "empty" }));
    let wrong = [json!({ "value": "x", "end": "top" }), json!({ "end": "left" }), json!({})];
    for body in wrong {
        place.post("/v1/lists/l/push", &body).bad();
    }
    place.post("/v1/lists/l/push", &json!({ "value": "", "end": "left" })).bad();
    place.post("/v1/lists/l/pop", &json!({ "end": "top" })).bad();
    place.post("/v1/lists/l/pop", &json!({ "end": "left", "timeout_s": -1 })).bad();
    // To wait, one has to be somebody.
    place.post("/v1/lists/l/pop", &json!({ "end": "left", "timeout_s": 1 })).bad();
}

fn blocking_pop(place: &Place, a: &Session, b: &Session) {
    let long = json!({ "end": "left", "timeout_s": 60 });
    assert_eq!(push(place, "here", "right"), json!({ "length": 1 }));
    let at_once = a.post("/v1/lists/l/pop", &long).ok();
    assert_eq!(at_once, json!({ "status": "ok", "value": "here" }));
    let brief = json!({ "end": "right", "timeout_ms": 20 });
    assert_eq!(a.post("/v1/lists/l/pop", &brief).ok(), json!({ "status": "empty" }));
    // GUARANTEES 27: in the order of arrival.
    let mut line = place.line();
    let mut first = a.begin("/v1/lists/l/pop", &long);
    wait_for_poppers(place, 1);
    let mut second = b.begin("/v1/lists/l/pop", &long);
    wait_for_poppers(place, 2);
    still_waits(&mut first);
    line.check("rpush", "l", "one", "ok 0");
    assert_eq!(first.reply().ok(), json!({ "status": "ok", "value": "one" }));
    assert_eq!(push(place, "two", "left"), json!({ "length": 0 }));
    assert_eq!(second.reply().ok(), json!({ "status": "ok", "value": "two" }));
}

/// Waits until so many wait for an item of the list `l`.
pub(super) fn wait_for_poppers(place: &Place, count: u64) {
    eventually(&format!("{count} poppers"), || {
        let stats = place.get("/v1/stats").ok();
        let waiting = entry(&stats, "lists", "l").and_then(|list| list["pop_waiters"].as_u64());
        waiting.unwrap_or(0) == count
    });
}

fn barrier(place: &Place, a: &Session, b: &Session) {
    let path = "/v1/barriers/b/wait";
    let two = json!({ "count": 2, "timeout_s": 60 });
    let timeout = json!({ "status": "timeout" });
    assert_eq!(a.post(path, &json!({ "count": 2, "timeout_ms": 20 })).ok(), timeout);
    let mut first = a.begin(path, &two);
    let barriers = || place.get("/v1/stats").ok()["barriers"].as_array().unwrap().clone();
    eventually("one has arrived", || barriers().len() == 1);
    b.post(path, &json!({ "count": 3, "timeout_s": 1 })).refused(409, "barrier_count_mismatch");
    assert_eq!(b.post(path, &two).ok(), json!({ "status": "ok" }));
    assert_eq!(first.reply().ok(), json!({ "status": "ok" }));
    // GUARANTEES 28: who leaves breaks it for all.
    let three = json!({ "count": 3, "timeout_s": 60 });
    let mut first = a.begin(path, &three);
    eventually("one has arrived", || barriers().len() == 1);
    let second = b.begin(path, &three);
    eventually("two have arrived", || barriers()[0]["participants"] == 2);
    still_waits(&mut first);
    drop(second);
    assert_eq!(first.reply().ok(), timeout);
    eventually("it is gone", || barriers().is_empty());
    for count in [json!(0), json!(-1), json!(1_048_577), json!("2"), json!(null)] {
        a.post(path, &json!({ "count": count, "timeout_s": 0 })).bad();
    }
    place.post(path, &two).bad();
}

#[test]
fn nothing_of_this_needs_a_session() {
    // A wrong one does not hurt either: it is not looked at.
    let site = Site::start(&[]);
    let stale = "0".repeat(32);
    let ask = Ask::post("/v1/counters/c/add", &json!({ "delta": 1 })).session(&stale);
    assert_eq!(site.ask(ask).ok(), counter(1));
    let stats = site.get("/v1/stats").ok();
    assert_eq!(stats["connections"], 0, "{stats}");
}

#[test]
fn full() {
    let site = Site::start(&["--max-keys", "3", "--max-list-length", "2", "--gc-max-idle", "600"]);
    let pushed =
        |value: &str| site.post("/v1/lists/l/push", &json!({ "value": value, "end": "right" }));
    pushed("a").ok();
    pushed("b").ok();
    pushed("c").refused(409, "list_full");
    site.put("/v1/kv/v", &json!({ "value": "x" })).ok();
    site.post("/v1/counters/c/add", &json!({ "delta": 1 })).ok();
    let one = json!({ "value": "x", "end": "left" });
    site.post("/v1/lists/other/push", &one).refused(503, "max_keys");
    site.put("/v1/kv/other", &json!({ "value": "x" })).refused(503, "max_keys");
    site.put("/v1/counters/other", &json!({ "value": 1 })).refused(503, "max_keys");
    let add = json!({ "delta": 1 });
    site.post("/v1/counters/other/add", &add).refused(503, "max_keys");
    let a = site.session();
    let body = json!({ "count": 2, "timeout_s": 5 });
    a.post("/v1/barriers/other/wait", &body).refused(503, "max_keys");
    // What is there can still be used.
    site.post("/v1/counters/c/add", &add).ok();
    site.put("/v1/kv/v", &json!({ "value": "y" })).ok();
}

#[test]
fn values_have_a_largest_size() {
    let site = Site::start(&["--max-value-bytes", "100"]);
    let value = |count: usize| json!({ "value": "x".repeat(count), "end": "left" });
    site.put("/v1/kv/v", &json!({ "value": "x".repeat(100) })).ok();
    let detail = site.put("/v1/kv/v", &json!({ "value": "x".repeat(101) })).bad();
    assert!(detail.contains("large") || detail.contains("long"), "{detail}");
    site.post("/v1/lists/l/push", &value(100)).ok();
    site.post("/v1/lists/l/push", &value(101)).bad();
    // Bytes, not characters.
    site.put("/v1/kv/v", &json!({ "value": "ü".repeat(51) })).bad();
}

/// GUARANTEES 48: a long list comes in pages, by number and by bytes, from either end.
#[test]
fn a_list_in_pages() {
    let site = Site::start(&[]);
    let mut line = site.line();
    for n in 1..=40 {
        let item = format!("{n:02}{}", "\u{1}".repeat(30_000));
        line.check("rpush", "q", &item, &format!("ok {n}"));
    }
    for (start, first) in [("0", 1), ("-25", 16), ("-1000", 1)] {
        let mut seen = Vec::new();
        let mut start = start.to_owned();
        loop {
            let reply = site.get(&format!("/v1/lists/q?start={start}"));
            assert!(reply.body.len() <= (1 << 20) + 100, "{}", reply.body.len());
            let page = reply.ok();
            let items = page["items"].as_array().unwrap();
            assert!(!items.is_empty());
            seen.extend(items.iter().map(|item| item.as_str().unwrap()[..2].to_owned()));
            if page["next"].is_null() {
                break;
            }
            start = page["next"].to_string();
        }
        let all: Vec<_> = (first..=40).map(|n| format!("{n:02}")).collect();
        assert_eq!(seen, all);
    }
    let page = site.get("/v1/lists/q?start=3&stop=-2&limit=2").ok();
    assert_eq!((page["items"].as_array().unwrap().len(), &page["next"]), (2, &json!(5)));
    let page = site.get("/v1/lists/q?start=38&limit=2").ok();
    assert_eq!(page["next"], json!(null));
    assert_eq!(site.get("/v1/lists/q?limit=0").status, 400);
    assert_eq!(site.get("/v1/lists/q?limit=10001").status, 400);
}
