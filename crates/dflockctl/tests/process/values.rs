//! Values, lists, barriers, signals and changes.

use dflockd_testkit::eventually;

use crate::command::Server;

#[test]
fn key_values() {
    let server = Server::start(&[]);
    let run = |args: &[&str]| server.ctl(&[&["kv"][..], args].concat()).run();
    assert_eq!(run(&["get", "k"]).expect(1).err, "");
    run(&["set", "k", "a value"]).expect(0);
    assert_eq!(run(&["get", "k"]).expect(0).out, "a value\n");
    assert_eq!(run(&["get", "k", "--json"]).out, "{\"key\":\"k\",\"value\":\"a value\"}\n");
    run(&["cas", "k", "wrong", "new"]).refused(1, "another value");
    run(&["cas", "k", "a value", "new"]).expect(0);
    assert!(run(&["cas", "k", "", "x", "--json"]).expect(1).out.contains("false"));
    assert!(run(&["del", "k", "--json"]).expect(0).out.contains("true"));
    run(&["cas", "k", "", "first"]).expect(0);
    run(&["set", "short", "x", "--ttl", "200ms"]).expect(0);
    eventually("it is gone", || run(&["get", "short"]).code == 1);
    run(&["set", "k", "a\tb"]).refused(64, "TAB");
    run(&["set", "bad key", "v"]).refused(64, "white space");
    let none = run(&["get", "none", "--json"]).expect(1).out;
    assert_eq!(none, "{\"key\":\"none\",\"value\":null}\n");
}

#[test]
fn counters() {
    let server = Server::start(&[]);
    let run = |args: &[&str]| server.ctl(&[&["counter"][..], args].concat()).run();
    assert_eq!(run(&["get", "c"]).expect(0).out, "0\n");
    assert_eq!(run(&["add", "c"]).expect(0).out, "1\n");
    assert_eq!(run(&["add", "c", "-5"]).expect(0).out, "-4\n");
    run(&["set", "c", "-40"]).expect(0);
    assert_eq!(run(&["get", "c", "--json"]).out, "{\"key\":\"c\",\"value\":-40}\n");
    run(&["add", "c", "x"]).refused(64, "invalid value");
}

#[test]
fn lists() {
    let server = Server::start(&[]);
    let run = |args: &[&str]| server.ctl(&[&["list"][..], args].concat()).run();
    assert_eq!(run(&["push", "l", "b", "c"]).expect(0).out, "2\n");
    assert!(run(&["push", "l", "a", "--left", "--json"]).expect(0).out.contains("\"length\":3"));
    assert_eq!(run(&["range", "l"]).out, "a\nb\nc\n");
    assert_eq!(run(&["range", "l", "-2", "-1", "--json"]).out, "[\"b\",\"c\"]\n");
    assert_eq!(run(&["len", "l"]).out, "3\n");
    assert_eq!(run(&["pop", "l"]).expect(0).out, "a\n");
    assert_eq!(run(&["pop", "l", "--right"]).expect(0).out, "c\n");
    assert_eq!(run(&["pop", "l", "--left", "--json"]).out, "{\"key\":\"l\",\"value\":\"b\"}\n");
    assert_eq!(run(&["pop", "l"]).expect(1).out, "");
    run(&["pop", "l", "--wait", "50ms"]).expect(75);
    let waiting = server.ctl(&["list", "pop", "l", "--wait", "60s"]).spawn();
    eventually("it waits", || server.shown("l")["pop_waiters"] == 1);
    run(&["push", "l", "late"]).expect(0);
    assert_eq!(waiting.end().expect(0).out, "late\n");
    run(&["push", "l", "--left", "--right", "x"]).refused(64, "--left");
}

#[test]
fn barriers() {
    let server = Server::start(&[]);
    let barrier =
        |more: &[&str]| server.ctl(&[&["barrier", "b", "--count", "2"][..], more].concat());
    barrier(&["--wait", "50ms"]).run().refused(75, "not all 2");
    let first = barrier(&["--json"]).spawn();
    eventually("it waits", || server.shown("b")["participants"] == 1);
    barrier(&[]).run().expect(0);
    assert!(first.end().expect(0).out.contains("true"));
}

#[test]
fn signals_and_listeners() {
    let server = Server::start(&[]);
    let mut plain = server.ctl(&["listen", "news.>"]).spawn();
    let mut group = server.ctl(&["listen", "news.*", "--group", "g", "--json"]).spawn();
    let send = |payload: &str| server.ctl(&["signal", "news.local", payload]).run();
    eventually("both listen", || send("hello there").expect(0).out == "2\n");
    plain.wait_for_out("news.local hello there\n");
    group.wait_for_out("{\"channel\":\"news.local\",\"payload\":\"hello there\"}\n");
    let sent = server.json(&["signal", "news.local", "again", "--json"]);
    assert_eq!(sent["deliveries"], 2);
    for listener in [&mut plain, &mut group] {
        listener.wait_for_out("again");
        listener.signal("INT");
        listener.wait_for_end();
    }
    let counted = server.ctl(&["listen", "news.local", "--count", "1"]).spawn();
    eventually("it has heard one", || {
        send("last").expect(0);
        counted.is_silent()
    });
    assert_eq!(counted.end().expect(0).out, "news.local last\n");
    server.ctl(&["signal", "news.*", "x"]).run().expect(1);
    server.ctl(&["listen", "a.>.b"]).run().refused(64, "pattern");
}

#[test]
fn changes() {
    let server = Server::start(&[]);
    let mut watch = server.ctl(&["watch", "w.*"]).spawn();
    let json = server.ctl(&["watch", "w.k", "--count", "1", "--json"]).spawn();
    let connections = || server.json(&["status", "--json"])[0]["connections"].as_u64();
    eventually("both watch", || connections() >= Some(5));
    // A watch stands a moment after its connection.
    eventually("a change is seen", || {
        server.ctl(&["kv", "set", "w.k", "1"]).run().expect(0);
        watch.output().contains("kset     w.k")
    });
    server.ctl(&["lock", "w.l", "--", "true"]).run().expect(0);
    watch.wait_for_out("acquire  w.l");
    watch.wait_for_out("release  w.l");
    eventually("the other has seen one too", || {
        server.ctl(&["kv", "set", "w.k", "1"]).run().expect(0);
        json.is_silent()
    });
    assert!(json.end().expect(0).out.contains("{\"event\":\"kset\",\"key\":\"w.k\"}"));
    watch.signal("INT");
    watch.wait_for_end();
}
