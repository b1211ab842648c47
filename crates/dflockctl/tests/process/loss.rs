//! Locks that are lost while their program runs.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dflockd_testkit::process::is_alive;
use dflockd_testkit::{Dir, Process, eventually};

use crate::command::Server;

fn now_ns() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos()
}

/// A program that writes the time as long as it lives, here and in a process it started.
fn clock(dir: &Dir, trap: &str) -> String {
    let (log, child) = (dir.name("log"), dir.name("child"));
    format!(
        "{trap}; sh -c '{trap}; while :; do date +%s%N >> {log}; sleep 0.02; done' & \
         echo $! > {child}; while :; do date +%s%N >> {log}; sleep 0.02; done"
    )
}

fn start(server: &Server, dir: &Dir, args: &[&str], trap: &str) -> Process {
    let script = clock(dir, trap);
    let args = [&["lock", "k"][..], args, &["--", "sh", "-c", &script]].concat();
    let running = server.ctl(&args).spawn();
    dir.wait_for("child", "\n");
    dir.wait_for("log", "\n");
    running
}

/// The last sign of life of the program.
fn last_ns(dir: &Dir) -> u128 {
    let log = dir.read("log");
    log.lines().filter_map(|line| line.parse().ok()).max().unwrap()
}

#[track_caller]
fn check_gone(dir: &Dir) {
    let child = dir.read("child");
    eventually("the child of the program ends", || !is_alive(&child));
}

#[test]
fn the_server_dies_and_the_program_ends_in_time() {
    // The second ignores SIGTERM and has to be killed.
    for (lease, trap) in [(4, "trap - TERM"), (6, "trap '' TERM")] {
        let (server, dir) = (Server::start(&[]), Dir::new());
        let running = start(&server, &dir, &["--lease", &format!("{lease}s")], trap);
        let killed_at = now_ns();
        server.kill();
        let ran = running.end().expect(76);
        assert!(ran.err.contains("lost k") && ran.err.contains("terminated"), "{ran:?}");
        check_gone(&dir);
        // The last renewal was sent before the server died, so the lock may be granted to others a
        // lease after that at the earliest.
        let survived = Duration::from_nanos(u64::try_from(last_ns(&dir) - killed_at).unwrap());
        assert!(survived < Duration::from_secs(lease), "{survived:?}");
    }
}

#[test]
fn a_program_may_clean_up_after_sigterm() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let trap = format!("trap 'echo cleaned >> {}; exit 0' TERM", dir.name("cleaned"));
    // The trap stands in quotes of the inner shell too.
    let script = format!("{trap}; echo > {}; while :; do sleep 0.02; done", dir.name("ready"));
    let running = server.ctl(&["lock", "k", "--lease", "2s", "--", "sh", "-c", &script]).spawn();
    dir.wait_for("ready", "\n");
    server.kill();
    let ran = running.end().expect(76);
    assert!(ran.err.contains("was told to end"), "{ran:?}");
    assert_eq!(dir.read("cleaned"), "cleaned\n");
}

#[test]
fn an_operator_ends_it() {
    let server = Server::start(&["--admin-token", "admin"]);
    let dir = Dir::new();
    let token = dir.write("token", "admin\n");
    let running = start(&server, &dir, &["--lease", "60s"], "trap - TERM");
    let fence = server.shown("k")["holders"][0]["fence"].as_str().unwrap().to_owned();
    let force = ["force-release", "k", &fence, "--reason", "test", "--admin-token-file", &token];
    server.ctl(&force).run().expect(0);
    let ran = running.end().expect(76);
    assert!(ran.err.contains("an operator ended it"), "{ran:?}");
    check_gone(&dir);

    let dir = Dir::new();
    let running = start(&server, &dir, &["--lease", "60s", "--on-lost", "kill"], "trap '' TERM");
    let conn = server.shown("k")["holders"][0]["conn"].to_string();
    let end = ["end-session", &conn, "--reason", "test", "--json"];
    let ran = server.ctl(&end).env("DFLOCKD_ADMIN_TOKEN_FILE", &token).run().expect(0);
    assert!(ran.out.contains("true"));
    running.end().expect(76);
    check_gone(&dir);
}

#[test]
fn a_restarted_server_knows_nothing_of_the_lock() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let running = start(&server, &dir, &["--lease", "60s"], "trap - TERM");
    let port = server.kill();
    let _server = Server::start_at(port, &[]);
    let ran = running.end().expect(76);
    assert!(ran.err.contains("session ended"), "{ran:?}");
    check_gone(&dir);
}

#[test]
fn paused_longer_than_the_lease() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let running = start(&server, &dir, &["--lease", "1s"], "trap '' TERM");
    running.signal("STOP");
    server.wait_for_holders("k", 0);
    running.signal("CONT");
    let ran = running.end().expect(76);
    assert!(ran.err.contains("lost k"), "{ran:?}");
    check_gone(&dir);
}

#[test]
fn warned_only() {
    let server = Server::start(&["--admin-token", "admin"]);
    let dir = Dir::new();
    let script = format!("echo > {}; cat; echo finished", dir.name("ready"));
    let args = ["lock", "k", "--on-lost=warn", "--lease", "60s", "--", "sh", "-c", &script];
    let running = server.ctl(&args).spawn();
    dir.wait_for("ready", "\n");
    let fence = server.shown("k")["holders"][0]["fence"].as_str().unwrap().to_owned();
    let force = ["force-release", "k", &fence, "--reason", "test"];
    server.ctl(&force).env("DFLOCKD_ADMIN_TOKEN", "admin").run().expect(0);
    running.wait_for_err("the program goes on");
    let ran = running.finish().expect(76);
    assert_eq!(ran.out, "finished\n");
}

#[test]
fn administrators_have_tokens() {
    let server = Server::start(&["--admin-token", "admin"]);
    server.ctl(&["acquire", "k"]).run().expect(0);
    let force = ["force-release", "k", "1", "--reason", "test"];
    server.ctl(&force).run().refused(77, "--admin-token-file");
    server.ctl(&force).env("DFLOCKD_ADMIN_TOKEN", "wrong").run().refused(77, "token");
    server.ctl(&force).env("DFLOCKD_ADMIN_TOKEN", "admin").run().refused(1, "refused");
    let end = ["end-session", "999999", "--reason", "test"];
    server.ctl(&end).env("DFLOCKD_ADMIN_TOKEN", "admin").run().refused(1, "refused");
    let semaphore = ["acquire", "s", "--kind", "sem", "--limit", "1", "--json"];
    let taken = server.json(&semaphore);
    let fence = taken["fence"].as_str().unwrap();
    let force = ["force-release", "s", fence, "--sem", "--reason", "test", "--json"];
    let ran = server.ctl(&force).env("DFLOCKD_ADMIN_TOKEN", "admin").run().expect(0);
    assert!(ran.out.contains("\"released\":true"), "{ran:?}");
    assert_eq!(server.shown("s")["holders_total"], 0);
}
