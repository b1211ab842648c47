//! `ls`, `show`, `status`, `ping`.

use crate::command::{Server, ctl};

#[test]
fn keys_and_their_holders() {
    let server = Server::start(&[]);
    let hold = ["acquire", "jobs/a", "--lease", "60s", "--name", "first"];
    server.ctl(&hold).run().expect(0);
    server.ctl(&["kv", "set", "jobs/b", "value"]).run().expect(0);
    server.ctl(&["counter", "add", "other", "3"]).run().expect(0);
    let mut waiter = server.ctl(&["lock", "jobs/a", "--name", "second", "--", "true"]).spawn();
    server.wait_for_waiters("jobs/a", 1);

    let ran = server.ctl(&["ls"]).run().expect(0);
    let words: Vec<Vec<&str>> = ran.out.lines().map(|it| it.split_whitespace().collect()).collect();
    assert_eq!(words[0], ["KEY", "KIND", "HOLDERS", "WAITERS"]);
    assert_eq!(words[1], ["jobs/a", "mutex", "1", "1"]);
    assert_eq!(words[2][..2], ["jobs/b", "kv"]);
    assert_eq!(words[3][..2], ["other", "counter"]);
    assert!(!ran.out.contains('\u{1b}'), "no colours in a pipe");
    let names = |args: &[&str]| {
        let listed = server.json(&[&["ls", "--json"][..], args].concat());
        let keys = listed.as_array().unwrap().iter().map(|it| it["key"].as_str().unwrap());
        keys.map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(names(&["jobs/"]), ["jobs/a", "jobs/b"]);
    assert_eq!(names(&["--limit", "1"]), ["jobs/a"]);
    assert_eq!(names(&["--after", "jobs/a"]), ["jobs/b", "other"]);
    let ran = server.ctl(&["ls", "--limit", "1"]).run().expect(0);
    assert!(ran.err.contains("--after 'jobs/a'"));

    let ran = server.ctl(&["show", "jobs/a"]).run().expect(0);
    assert!(ran.out.contains("first") && ran.out.contains("second"), "{ran:?}");
    assert_eq!(server.shown("jobs/a")["queue"][0]["client"], "second");
    let ran = server.ctl(&["show", "jobs/b"]).run().expect(0);
    assert!(ran.out.contains("jobs/b (kv)") && ran.out.contains("bytes 5"), "{ran:?}");
    server.ctl(&["show", "nothing"]).run().refused(1, "nothing is known");

    let ran = server.ctl(&["status"]).run().expect(0);
    assert!(ran.out.contains("LONGEST QUEUES") && ran.out.contains("jobs/a"), "{ran:?}");
    let status = server.json(&["status", "--json"]);
    assert_eq!((&status[0]["held"], &status[0]["waiting"]), (&1.into(), &1.into()));
    assert_eq!(status[0]["keys"], 3);
    assert_eq!(status[0]["longest_queues"][0]["key"], "jobs/a");

    let ran = server.ctl(&["top", "--once"]).run().expect(0);
    for text in ["held 1", "waiting 1", "jobs/a", "first", "longest queues", "oldest holders", "█"]
    {
        assert!(ran.out.contains(text), "{text}: {}", ran.out);
    }
    let ran = server.ctl(&["top", "--once", "--filter", "nobody"]).run().expect(0);
    assert!(ran.out.contains("0-0 of 0"), "{}", ran.out);
    server.ctl(&["top"]).run().refused(64, "--once");
    waiter.signal("TERM");
    waiter.wait_for_end();
}

#[test]
fn servers_that_are_down_are_shown_as_such() {
    let server = Server::start(&[]);
    let both = format!("{},127.0.0.1:1", server.address);
    let run = |args: &[&str]| ctl(args).env("DFLOCKD_SERVERS", &both).run();
    let ran = run(&["status"]).expect(69);
    assert!(ran.out.contains("up") && ran.out.contains("down"), "{ran:?}");
    let status = run(&["status", "--json"]).expect(69).json();
    assert_eq!((&status[0]["up"], &status[1]["up"]), (&true.into(), &false.into()));
    let ran = run(&["ping"]).expect(69);
    assert!(ran.out.contains(" ms") && ran.out.contains("can not be reached"), "{ran:?}");
    let ran = run(&["top", "--once"]).expect(0);
    assert!(ran.out.contains("servers up 1/2"), "{ran:?}");
    let none = ctl(&["top", "--once"]).env("DFLOCKD_SERVERS", "127.0.0.1:1").run();
    none.refused(69, "can not be reached");
}

#[test]
fn pings() {
    let server = Server::start(&[]);
    let ran = server.ctl(&["ping", "--count", "3", "--interval", "1ms"]).run().expect(0);
    assert_eq!(ran.out.lines().count(), 4, "{ran:?}");
    assert!(ran.out.contains("3 of 3 answered"), "{ran:?}");
    let ran = server.ctl(&["ping", "--count", "2", "--interval", "0", "--json"]).run().expect(0);
    for line in ran.out.lines() {
        let asked: serde_json::Value = serde_json::from_str(line).unwrap();
        assert!(asked["ms"].as_f64().unwrap() > 0.0);
    }
}

#[test]
fn keys_of_several_servers() {
    let servers = [Server::start(&[]), Server::start(&[])];
    let both = format!("{},{}", servers[0].address, servers[1].address);
    let run = |args: &[&str]| ctl(args).env("DFLOCKD_SERVERS", &both).run().expect(0);
    for number in 0..8 {
        run(&["counter", "set", &format!("c{number}"), "1"]);
        run(&["acquire", &format!("k{number}")]);
    }
    assert_eq!(run(&["ls"]).out.lines().count(), 17);
    let counts = servers.each_ref().map(|server| server.ctl(&["ls"]).run().out.lines().count() - 1);
    assert_eq!(counts[0] + counts[1], 16);
    assert!(counts[0] > 0 && counts[1] > 0, "{counts:?}");
    assert!(run(&["status"]).out.lines().count() == 3);
}
