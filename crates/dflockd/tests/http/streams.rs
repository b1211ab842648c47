//! Signals as server-sent events, and from and to the line protocol.

use dflockd_testkit::http::{Ask, Got, escape};
use dflockd_testkit::{A_WHILE, eventually};
use serde_json::{Value, json};

use super::site::{Place, Site};

fn sig(channel: &str, payload: &str) -> Value {
    json!({ "channel": channel, "payload": payload })
}

fn publish(place: &Place, channel: &str, payload: &str) -> u64 {
    let path = format!("/v1/signals/{}", escape(channel));
    let answer = place.post(&path, &json!({ "payload": payload })).ok();
    answer["delivered"].as_u64().unwrap_or_else(|| panic!("{answer}"))
}

/// GUARANTEES 33 and 34 over both APIs.
pub(super) fn tour(place: &Place) {
    let mut line = place.line();
    let mut exact = place.events("/v1/signals?pattern=tour.a");
    let mut wide = place.events("/v1/signals?pattern=tour.%3E");
    line.check("listen", "tour.*", "", "ok");
    assert_eq!(publish(place, "tour.a", "one"), 3);
    exact.expect("sig", &sig("tour.a", "one"));
    wide.expect("sig", &sig("tour.a", "one"));
    assert_eq!(line.line(), "sig tour.a one");
    // In order per publisher, and real JSON whatever the payload is.
    let odd = "\"ü\" \\ \u{1f512} {}\u{1}";
    let mut other = place.line();
    other.check("signal", "tour.a", odd, "ok 3");
    other.check("signal", "tour.b.c", "deep", "ok 1");
    exact.expect("sig", &sig("tour.a", odd));
    wide.expect("sig", &sig("tour.a", odd));
    wide.expect("sig", &sig("tour.b.c", "deep"));
    assert_eq!(line.line(), format!("sig tour.a {odd}"));
    assert_eq!(publish(place, "tour.a", odd), 3);
    exact.expect("sig", &sig("tour.a", odd));
    assert_eq!(line.line(), format!("sig tour.a {odd}"));
    // Whoever closes its stream hears no more.
    exact.reset();
    drop(wide);
    eventually("only the line is left", || publish(place, "tour.a", "x") == 1);
    assert_eq!(publish(place, "nobody", "x"), 0);
}

#[test]
fn a_group_has_members_at_both_apis() {
    let site = Site::start(&[]);
    let mut line = site.line();
    line.check("listen", "jobs", "workers", "ok");
    let mut web = site.events("/v1/signals?pattern=jobs&group=workers");
    let mut alone = site.events("/v1/signals?pattern=jobs");
    const COUNT: usize = 20;
    for number in 0..COUNT {
        // One of the group, and the one without.
        assert_eq!(publish(&site, "jobs", &number.to_string()), 2);
    }
    let mut seen: Vec<String> = Vec::new();
    for number in 0..COUNT {
        alone.expect("sig", &sig("jobs", &number.to_string()));
    }
    // Members take turns.
    for _ in 0..COUNT / 2 {
        seen.push(web.next().data["payload"].as_str().unwrap().to_owned());
        seen.push(line.line().rsplit(' ').next().unwrap().to_owned());
    }
    line.expect_silence(A_WHILE);
    assert_eq!(web.hear(A_WHILE), Err(Got::Nothing));
    seen.sort_by_key(|text| text.parse::<usize>().unwrap());
    assert_eq!(seen, (0..COUNT).map(|number| number.to_string()).collect::<Vec<_>>());
}

#[test]
fn what_cannot_be_listened_to() {
    let site = Site::start(&[]);
    for wrong in [
        "",
        "?pattern=",
        "?group=g",
        "?pattern=a.%3E.b",
        "?pattern=a%20b",
        "?pattern=a%0Ab",
        "?pattern=x*",
    ] {
        site.get(&format!("/v1/signals{wrong}")).bad_for(wrong);
    }
    let long = "x".repeat(257);
    site.get(&format!("/v1/signals?pattern={long}")).bad();
    site.get(&format!("/v1/signals?pattern=a&group={long}")).bad();
    let group = "x".repeat(256);
    site.events(&format!("/v1/signals?pattern=a&group={group}"));
}

#[test]
fn what_cannot_be_sent() {
    let site = Site::start(&[]);
    for channel in ["a.*", "a.%3E", "%3E", "*", "a%20b"] {
        site.post(&format!("/v1/signals/{channel}"), &json!({ "payload": "x" })).bad();
    }
    let send = |body: Value| site.post("/v1/signals/c", &body);
    for wrong in ["", " ", "\t ", "a\nb", "a\rb"] {
        send(json!({ "payload": wrong })).bad();
    }
    send(json!({})).bad();
    send(json!({ "payload": 1 })).bad();
    // The longest push line is 64 KiB: `sig c <payload>`.
    let most = 65_536 - 5 - 1;
    let mut listener = site.events("/v1/signals?pattern=c");
    assert_eq!(publish(&site, "c", &"x".repeat(most)), 1);
    assert_eq!(listener.next().data["payload"].as_str().unwrap().len(), most);
    send(json!({ "payload": "x".repeat(most + 1) })).bad();
}

#[test]
fn streams_are_pinged() {
    let site = Site::start(&["--http-sse-ping-interval", "1"]);
    let mut signals = site.events("/v1/signals?pattern=a");
    let mut watch = site.events("/v1/watch?pattern=a");
    let mut election = site.events("/v1/elections/a/events");
    for (name, stream) in
        [("signals", &mut signals), ("watch", &mut watch), ("election", &mut election)]
    {
        eventually(&format!("two pings of {name}"), || {
            assert_eq!(stream.hear(dflockd_testkit::millis(100)), Err(Got::Nothing));
            stream.pings >= 2
        });
    }
}

/// The hidden session of a stream is kept alive by the server, with and without pings.
#[test]
fn streams_outlive_the_idle_timeout() {
    for ping in ["0", "15"] {
        // Left at its default it adapts; 0 is given explicitly.
        let mut args = vec!["--http-session-idle-timeout", "1"];
        if ping == "0" {
            args.extend(["--http-sse-ping-interval", "0"]);
        }
        let site = Site::start(&args);
        let mut events = site.events("/v1/signals?pattern=a");
        let begun = std::time::Instant::now();
        while begun.elapsed().as_secs() < 4 {
            assert_eq!(events.hear(dflockd_testkit::millis(500)), Err(Got::Nothing));
        }
        assert_eq!(publish(&site, "a", "still here"), 1);
        events.expect("sig", &sig("a", "still here"));
    }
}

#[test]
fn a_ping_interval_above_the_idle_timeout_is_refused() {
    let port = dflockd_testkit::free_address().port().to_string();
    let flags = ["--http-port", &port, "--port", "0"];
    let times = ["--http-session-idle-timeout", "5", "--http-sse-ping-interval", "5"];
    let output = dflockd_testkit::run(dflockd_testkit::command(&[flags, times].concat()));
    output.expect(1).complains(&["http-sse-ping-interval"]);
}

#[test]
fn streams_count_as_sessions() {
    let site = Site::start(&["--http-max-sessions", "2"]);
    let _signals = site.events("/v1/signals?pattern=a");
    let watch = site.events("/v1/watch?pattern=a");
    site.post("/v1/sessions", &json!({})).refused(503, "max_sessions");
    site.get("/v1/signals?pattern=b").refused(503, "max_sessions");
    site.get("/v1/elections/e/events").refused(503, "max_sessions");
    drop(watch);
    eventually("there is room", || site.post("/v1/sessions", &json!({})).status == 200);
}

#[test]
fn subscriptions_are_limited() {
    // One each: the streams do not share a session.
    let site = Site::start(&["--max-subscriptions", "1"]);
    let _first = site.events("/v1/signals?pattern=a");
    let _second = site.events("/v1/signals?pattern=b");
    assert_eq!(site.ask(Ask::get("/health")).status, 200);
}

/// GUARANTEES 48: all streams together have a limit, those of signals and those of changes, and patterns have one.
#[test]
fn streams_and_patterns_are_limited() {
    let site = Site::start(&["--max-subscriptions-total", "2"]);
    let signals = ["a", "b"].map(|name| site.events(&format!("/v1/signals?pattern={name}")));
    site.get("/v1/signals?pattern=c").refused(503, "max_subscriptions");
    site.get("/v1/elections/e/events").refused(503, "max_subscriptions");
    let watches = ["a", "b"].map(|name| site.events(&format!("/v1/watch?pattern={name}")));
    site.get("/v1/watch?pattern=c").refused(503, "max_subscriptions");
    drop((signals, watches));
    for route in ["signals", "watch", "events"] {
        let detail = site.get(&format!("/v1/{route}?pattern={}", ["*"; 17].join("."))).bad();
        assert!(detail.contains("16 tokens"), "{detail}");
    }
}
