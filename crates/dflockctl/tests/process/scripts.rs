//! Locks that outlive the process that took them.

use dflockd_testkit::eventually;

use crate::command::Server;

#[test]
fn acquired_here_released_there() {
    let server = Server::start(&[]);
    for kind in [&[][..], &["--kind", "read"], &["--kind", "write"], &["--kind", "sem"]] {
        let key = format!("k{}", kind.concat());
        let semaphore = kind.last() == Some(&"sem");
        let limit: &[&str] = if semaphore { &["--limit", "1"] } else { &[] };
        let acquire = [&["acquire", &key, "--lease", "60s"], kind, limit].concat();
        let ran = server.ctl(&acquire).run().expect(0);
        let (token, fence) = ran.out.trim().split_once(' ').unwrap();
        let shown = server.shown(&key);
        assert_eq!(shown["holders"][0]["fence"], fence);
        assert!(shown["holders"][0]["expires_in_s"].as_f64().unwrap() > 10.0);

        let renew = [&["renew", &key, token, "--lease", "200s"], kind].concat();
        assert_eq!(server.ctl(&renew).run().expect(0).out, "3m20s\n");
        let renewed = server.json(&[&renew[..], &["--json"]].concat());
        assert_eq!(renewed["valid_for_ms"], 200_000);

        let wrong = "0".repeat(32);
        let release =
            |token: &str| server.ctl(&[&["release", &key, token][..], kind].concat()).run();
        release(&wrong).refused(1, "refused");
        release(token).expect(0);
        assert_eq!(server.shown(&key)["holders_total"], 0);
        release(token).refused(1, "refused");
        server.ctl(&renew).run().refused(1, "refused");
    }
}

#[test]
fn what_acquire_tells() {
    let server = Server::start(&[]);
    let taken = server.json(&["acquire", "k", "--json", "--lease", "60s"]);
    assert_eq!(taken["key"], "k");
    assert_eq!(taken["session"].as_str().unwrap().len(), 32);
    let left = taken["valid_for_ms"].as_u64().unwrap();
    assert!((20_000..=60_000).contains(&left), "{left}");
    server.ctl(&["acquire", "k", "--try"]).run().refused(75, "not free");
    server.ctl(&["acquire", "k", "--wait", "50ms"]).run().refused(75, "not free");
    let token = taken["token"].as_str().unwrap();
    let ran = server.ctl(&["release", "k", "--json"]).env("DFLOCKD_TOKEN", token).run().expect(0);
    assert_eq!(ran.out, "{\"key\":\"k\",\"released\":true}\n");
    server.ctl(&["release", "k"]).run().refused(64, "DFLOCKD_TOKEN");
}

#[test]
fn a_lease_that_nobody_renews_ends() {
    let server = Server::start(&[]);
    let ran = server.ctl(&["acquire", "k", "--lease", "300ms"]).run().expect(0);
    server.wait_for_holders("k", 0);
    let token = ran.out.split(' ').next().unwrap();
    server.ctl(&["renew", "k", token]).run().expect(1);
}

#[test]
fn queued_here_waited_for_there() {
    let server = Server::start(&[]);
    let ran = server.ctl(&["acquire", "k", "--lease", "60s"]).run().expect(0);
    let (token, _) = ran.out.split_once(' ').unwrap();
    let session = server.ctl(&["enqueue", "k"]).run().expect(0).out;
    server.wait_for_waiters("k", 1);
    let waiting = server.ctl(&["wait", "k", "--session", session.trim(), "--json"]).spawn();
    server.ctl(&["release", "k", token]).run().expect(0);
    let taken = waiting.end().expect(0).json();
    assert_eq!(taken["session"], session.trim());
    let second = taken["token"].as_str().unwrap();
    assert_eq!(server.shown("k")["holders"][0]["fence"], taken["fence"]);
    server.ctl(&["release", "k", second]).run().expect(0);

    let queued = server.json(&["enqueue", "k", "--json"]);
    assert_eq!(queued["state"], "acquired");
    let session = queued["session"].as_str().unwrap();
    let wait = server.ctl(&["wait", "k"]).env("DFLOCKD_SESSION", session);
    let ran = wait.run().expect(0);
    let (third, fence) = ran.out.trim().split_once(' ').unwrap();
    assert_eq!(server.shown("k")["holders"][0]["fence"], fence);

    let session = server.ctl(&["enqueue", "k"]).run().expect(0).out;
    let wait = ["wait", "k", "--wait", "50ms", "--session", session.trim()];
    server.ctl(&wait).run().refused(75, "not free");
    assert_eq!(server.shown("k")["waiters"], 0);
    server.ctl(&["release", "k", third]).run().expect(0);
}

#[test]
fn sessions_that_do_not_exist() {
    let server = Server::start(&[]);
    server.ctl(&["wait", "k"]).run().refused(64, "--session");
    let nobody = "0".repeat(32);
    server.ctl(&["wait", "k", "--session", &nobody]).run().refused(64, "no such session");
    server.ctl(&["acquire", "k", "--kind", "semaphore"]).run().refused(64, "--limit");
    server.ctl(&["acquire", "k", "--limit", "2"]).run().refused(64, "--kind semaphore");
}

#[test]
fn an_interrupted_wait_leaves_nothing_behind() {
    let server = Server::start(&[]);
    let ran = server.ctl(&["acquire", "k", "--lease", "60s"]).run().expect(0);
    let token = ran.out.split(' ').next().unwrap();
    let waiting = server.ctl(&["acquire", "k"]).spawn();
    server.wait_for_waiters("k", 1);
    waiting.signal("INT");
    waiting.end().refused(128 + 2, "interrupted");
    assert_eq!(server.shown("k")["waiters"], 0);

    let session = server.ctl(&["enqueue", "k"]).run().expect(0).out;
    let waiting = server.ctl(&["wait", "k", "--session", session.trim()]).spawn();
    server.wait_for_waiters("k", 1);
    // The place was there before; it waits when the session has moved to it.
    let pid = waiting.pid().to_string();
    eventually("it waits", || {
        let client = server.shown("k")["queue"][0]["client"].clone();
        client.as_str().is_some_and(|client| client.ends_with(&pid))
    });
    waiting.signal("TERM");
    waiting.end().refused(128 + 15, "interrupted");
    assert_eq!(server.shown("k")["waiters"], 0);
    server.ctl(&["release", "k", token]).run().expect(0);
    assert_eq!(server.shown("k")["holders_total"], 0);
}
