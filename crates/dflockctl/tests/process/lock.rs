//! `lock` and its like: what the program sees, and what its end looks like.

use std::time::{Duration, Instant};

use dflockd_testkit::{Dir, eventually};

use crate::command::{Server, ctl};
use crate::wire::Wire;

#[test]
fn the_status_of_the_program_is_passed_on() {
    let server = Server::start(&[]);
    let check = |script: &str, code: i32| {
        let ran = server.ctl(&["lock", "k", "--", "sh", "-c", script]).run().expect(code);
        assert_eq!(ran.err, "");
        assert_eq!(server.shown("k")["holders_total"], 0, "released");
    };
    check("exit 0", 0);
    check("exit 7", 7);
    check("exit 255", 255);
    check("kill -TERM $$", 128 + 15);
    check("kill -KILL $$", 128 + 9);
}

#[test]
fn the_program_knows_its_lock() {
    let server = Server::start(&[]);
    let script = "echo $DFLOCKD_KEY; echo $DFLOCKD_FENCE; echo $DFLOCKD_TOKEN; cat";
    for verb in ["lock", "rlock", "wlock", "elect"] {
        let key = format!("{verb}/k");
        let mut running = server.ctl(&[verb, &key, "--", "sh", "-c", script]).spawn();
        running.wait_for_out("\n");
        let shown = server.shown(&key);
        let holder = &shown["holders"][0];
        running.write(b"input\n");
        let ran = running.finish().expect(0);
        let lines: Vec<&str> = ran.out.lines().collect();
        assert_eq!(lines[0], key);
        assert_eq!(lines[1], holder["fence"].as_str().unwrap());
        assert_eq!(lines[2].len(), 32);
        assert_eq!(u64::from_str_radix(&lines[2][..16], 16).unwrap().to_string(), lines[1]);
        assert_eq!(lines[3], "input");
    }
}

/// The program gets the credential of its hold, not those of the server.
#[test]
fn the_program_does_not_get_the_tokens_of_the_server() {
    let server = Server::start(&["--auth-token", "the-token-of-clients"]);
    let script = "echo \"[$DFLOCKD_AUTH_TOKEN][$DFLOCKD_ADMIN_TOKEN][$DFLOCKD_AUTH_TOKEN_FILE]\"";
    let ran = server
        .ctl(&["lock", "k", "--", "sh", "-c", script])
        .env("DFLOCKD_AUTH_TOKEN", "the-token-of-clients")
        .env("DFLOCKD_ADMIN_TOKEN", "the-token-of-operators")
        .run()
        .expect(0);
    assert_eq!(ran.out, "[][][]\n");
}

#[test]
fn programs_that_can_not_be_run() {
    let server = Server::start(&[]);
    server.ctl(&["lock", "k", "--", "/nonexistent/program"]).run().refused(127, "/nonexistent");
    server.ctl(&["lock", "k", "--", "/etc/passwd"]).run().refused(126, "/etc/passwd");
    assert_eq!(server.shown("k")["holders_total"], 0, "released");
}

#[test]
fn not_acquired() {
    let server = Server::start(&[]);
    let holder = server.ctl(&["lock", "k", "--name", "first", "--", "cat"]).spawn();
    server.wait_for_holders("k", 1);
    server.ctl(&["lock", "k", "--try", "--", "true"]).run().refused(75, "held by first");
    let begun = Instant::now();
    server.ctl(&["lock", "k", "--wait", "300ms", "--", "true"]).run().refused(75, "within 300ms");
    assert!(begun.elapsed() >= Duration::from_millis(300));
    server.ctl(&["elect", "k", "--try", "--", "true"]).run().refused(75, "k is not free");
    server.ctl(&["rlock", "k", "--try", "--", "true"]).run().refused(1, "another kind");
    holder.finish().expect(0);
    server.ctl(&["lock", "k", "--try", "--", "true"]).run().expect(0);
}

#[test]
fn semaphores_and_readers_share() {
    let server = Server::start(&[]);
    let sem = |more: &[&str]| server.ctl(&[&["sem", "s", "--limit", "2"][..], more].concat());
    let (first, second) = (sem(&["--", "cat"]).spawn(), sem(&["--", "cat"]).spawn());
    server.wait_for_holders("s", 2);
    sem(&["--try", "--", "true"]).run().refused(75, "and 1 more");
    server.ctl(&["sem", "s", "--limit", "3", "--", "true"]).run().refused(1, "--limit");
    first.finish().expect(0);
    sem(&["--try", "--", "true"]).run().expect(0);
    second.finish().expect(0);

    let reader = server.ctl(&["rlock", "r", "--", "cat"]).spawn();
    server.wait_for_holders("r", 1);
    server.ctl(&["rlock", "r", "--try", "--", "true"]).run().expect(0);
    server.ctl(&["wlock", "r", "--try", "--", "true"]).run().refused(75, "r is not free");
    reader.finish().expect(0);
    server.ctl(&["wlock", "r", "--try", "--", "true"]).run().expect(0);
}

#[test]
fn nobody_there() {
    let begun = Instant::now();
    let nowhere = ctl(&["lock", "k", "--servers", "127.0.0.1:1", "--", "true"]);
    nowhere.run().refused(69, "--servers");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn signals_are_passed_on() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let ignored = std::fs::read_to_string("/proc/self/status").unwrap();
    let ignored = ignored.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    let ignored = u64::from_str_radix(ignored.trim(), 16).unwrap();
    let signals = [("INT", 2), ("TERM", 15), ("HUP", 1), ("QUIT", 3), ("USR1", 10), ("USR2", 12)];
    let traps: String = signals
        .iter()
        .map(|(name, _)| format!("trap 'echo {name} >> {}' {name}; ", dir.name("got")))
        .collect();
    let (ready, stop) = (dir.name("ready"), dir.name("stop"));
    let script =
        format!("{traps} echo ready > {ready}; while [ ! -e {stop} ]; do sleep 0.02; done; exit 5");
    let running = server.ctl(&["lock", "k", "--", "sh", "-c", &script]).spawn();
    dir.wait_for("ready", "ready");
    for (name, number) in signals {
        // What the tests were told to ignore, a shell can not trap either.
        if ignored & (1 << (number - 1)) == 0 {
            running.signal(name);
            dir.wait_for("got", name);
        }
    }
    dir.write("stop", "");
    running.end().expect(5);
}

#[test]
fn a_program_that_a_signal_ends() {
    let server = Server::start(&[]);
    let running = server.ctl(&["lock", "k", "--", "sleep", "1000"]).spawn();
    server.wait_for_holders("k", 1);
    // The lock is held a moment before the program runs, and a signal would then find nobody.
    eventually("the program runs", || {
        let children = format!("/proc/{0}/task/{0}/children", running.pid());
        let child = std::fs::read_to_string(children).ok().filter(|ids| !ids.is_empty())?;
        let name = std::fs::read_to_string(format!("/proc/{}/comm", child.trim())).ok()?;
        (name.trim() == "sleep").then_some(())
    });
    running.signal("TERM");
    running.end().expect(128 + 15);
    assert_eq!(server.shown("k")["holders_total"], 0, "released");
}

#[test]
fn a_signal_while_waiting_leaves_the_queue() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let holder = server.ctl(&["lock", "k", "--", "cat"]).spawn();
    server.wait_for_holders("k", 1);
    for (name, number) in [("TERM", 15), ("INT", 2)] {
        let ran = dir.name("ran");
        let waiter = server.ctl(&["lock", "k", "--", "touch", &ran]).spawn();
        server.wait_for_waiters("k", 1);
        waiter.signal(name);
        waiter.end().expect(128 + number);
        assert_eq!(server.shown("k")["waiters"], 0, "left the queue");
        assert!(!std::path::Path::new(&ran).exists());
    }
    holder.finish().expect(0);
}

#[test]
fn a_broken_connection_does_not_end_the_lock() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let wire = Wire::to(server.address);
    let script = format!("echo > {}; cat; exit 3", dir.name("ready"));
    let running = ctl(&["lock", "k", "--lease", "10s", "--", "sh", "-c", &script])
        .env("DFLOCKD_SERVERS", &wire.address.to_string())
        .spawn();
    dir.wait_for("ready", "\n");
    for _ in 0..3 {
        assert_eq!(wire.cut(), 1);
        eventually("it connects again", || wire.connections() == 1);
        assert_eq!(server.shown("k")["holders_total"], 1);
    }
    let ran = running.finish().expect(3);
    assert_eq!(ran.err, "");
    assert_eq!(server.shown("k")["holders_total"], 0, "released");
}

#[test]
fn a_server_that_is_restarted_while_we_wait() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    server.ctl(&["acquire", "k", "--lease", "10m"]).run().expect(0);
    let waiter = server.ctl(&["lock", "k", "--", "touch", &dir.name("ran")]).spawn();
    server.wait_for_waiters("k", 1);
    let port = server.kill();
    let _server = Server::start_at(port, &[]);
    let ran = waiter.end().expect(0);
    assert!(ran.err.contains("asking again"), "{ran:?}");
    assert!(std::path::Path::new(&dir.name("ran")).exists());
}

#[test]
fn a_failed_release_is_a_warning() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let script = format!("echo > {}; cat; exit 4", dir.name("ready"));
    let running = server.ctl(&["lock", "k", "--lease", "20s", "--", "sh", "-c", &script]).spawn();
    dir.wait_for("ready", "\n");
    server.kill();
    let ran = running.finish().expect(4);
    assert!(ran.err.contains("warning: k was not released"), "{ran:?}");
}
