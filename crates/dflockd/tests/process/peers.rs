//! Clients that go without a word.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dflockd_testkit::process::Reaper;
use dflockd_testkit::{Client, Server, eventually, granted};

use super::both::Either;

/// How soon the next one must be served.
const PROMPTLY: Duration = Duration::from_secs(1);

fn leave(client: Client, by_reset: bool) {
    if by_reset {
        client.reset();
    } else {
        drop(client);
    }
}

/// GUARANTEES 5 and 6: the queue goes on without the one that left.
#[test]
fn a_waiter_that_leaves_holds_nobody_up() {
    for server in Either::both(&[]) {
        for by_reset in [false, true] {
            for noticed_first in [false, true] {
                let [mut holder, mut dead, mut next, mut last] =
                    std::array::from_fn(|_| server.connect());
                let token = holder.lock("k", "0 600");
                for (place, waiter) in (1..).zip([&mut dead, &mut next, &mut last]) {
                    waiter.begin("l", "k", "60 600");
                    holder.wait_for_waiters("k", place);
                }
                leave(dead, by_reset);
                if noticed_first {
                    let begun = Instant::now();
                    holder.wait_for_waiters("k", 2);
                    assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
                }
                let begun = Instant::now();
                holder.check("r", "k", &token, "ok");
                let token = granted(&next.line());
                assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
                next.check("r", "k", &token, "ok");
                let token = granted(&last.line());
                last.check("r", "k", &token, "ok");
            }
        }
    }
}

#[test]
fn readers_behind_a_writer_that_leaves_go_on() {
    let server = Server::start::<&str>(&[]);
    let [mut holder, mut writer, mut reader, mut witness] =
        std::array::from_fn(|_| server.connect());
    granted(&holder.ask("rl", "k", "0 600"));
    let waiters = |witness: &mut Client| witness.stats()["rw_locks"][0]["waiters"].as_u64();
    writer.begin("wl", "k", "60");
    eventually("the writer waits", || (waiters(&mut witness) == Some(1)).then_some(()));
    reader.begin("rl", "k", "60");
    eventually("the reader waits", || (waiters(&mut witness) == Some(2)).then_some(()));
    let begun = Instant::now();
    writer.reset();
    granted(&reader.line());
    assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
}

/// What was enqueued goes with the connection, claimed or not.
#[test]
fn an_enqueued_place_goes_with_its_connection() {
    let server = Server::start::<&str>(&[]);
    let [mut holder, mut dead, mut next] = std::array::from_fn(|_| server.connect());
    let token = holder.lock("k", "0 600");
    dead.check("e", "k", "600", "queued");
    next.check("e", "k", "600", "queued");
    holder.check("r", "k", &token, "ok");
    // Now the dead one holds it without having asked.
    next.check("w", "k", "0", "timeout");
    next.check("e", "k", "600", "queued");
    let begun = Instant::now();
    drop(dead);
    granted(&next.ask("w", "k", "60"));
    assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
}

/// GUARANTEES 26.
#[test]
fn a_dead_popper_takes_nothing() {
    for by_reset in [false, true] {
        let server = Server::start::<&str>(&[]);
        let [mut dead, mut next, mut witness] = std::array::from_fn(|_| server.connect());
        let poppers = |witness: &mut Client| witness.stats()["lists"][0]["pop_waiters"].as_u64();
        dead.begin("blpop", "q", "60");
        eventually("one pops", || (poppers(&mut witness) == Some(1)).then_some(()));
        next.begin("brpop", "q", "60");
        eventually("two pop", || (poppers(&mut witness) == Some(2)).then_some(()));
        let begun = Instant::now();
        leave(dead, by_reset);
        eventually("the death is noticed", || (poppers(&mut witness) == Some(1)).then_some(()));
        assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
        witness.check("rpush", "q", "item", "ok 0");
        assert_eq!(next.line(), "ok item");
        witness.check("llen", "q", "", "ok 0");
        witness.check("rpush", "q", "more", "ok 1");
        next.check("lpop", "q", "", "ok more");
    }
}

#[test]
fn a_barrier_breaks_when_one_leaves() {
    let server = Server::start::<&str>(&[]);
    let [mut dead, mut other, mut witness] = std::array::from_fn(|_| server.connect());
    dead.begin("bwait", "b", "3 60");
    other.begin("bwait", "b", "3 60");
    eventually("two wait", || witness.stats()["barriers"][0]["participants"] == 2);
    let begun = Instant::now();
    dead.reset();
    assert_eq!(other.line(), "timeout");
    assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
    assert_eq!(witness.stats()["barriers"].as_array().unwrap().len(), 0);
}

/// GUARANTEES 44.
#[test]
fn the_lock_of_a_killed_process_passes_on() {
    let server = Server::start::<&str>(&[]);
    let script = format!(
        "exec 3<>/dev/tcp/127.0.0.1/{} && printf 'l\\nk\\n0 600\\n' >&3 && read -r line <&3 \
         && echo \"$line\" && exec sleep 600",
        server.address.port()
    );
    let holder = Command::new("bash").args(["-c", &script]).stdout(Stdio::piped()).spawn().unwrap();
    let mut holder = Reaper(holder);
    let mut line = String::new();
    BufReader::new(holder.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
    granted(line.trim());
    let [mut waiter, mut witness] = std::array::from_fn(|_| server.connect());
    waiter.begin("l", "k", "60");
    witness.wait_for_waiters("k", 1);
    let begun = Instant::now();
    drop(holder);
    granted(&waiter.line());
    assert!(begun.elapsed() < PROMPTLY, "{:?}", begun.elapsed());
}

/// A half-close counts as the end for those who wait, but not for those who were answered.
#[test]
fn half_close() {
    let server = Server::start::<&str>(&[]);
    let [mut holder, mut waiter] = std::array::from_fn(|_| server.connect());
    holder.lock("k", "0 600");
    waiter.begin("l", "k", "60");
    holder.wait_for_waiters("k", 1);
    waiter.send_last("");
    waiter.expect_end();
    holder.wait_for_waiters("k", 0);
}

#[test]
fn without_auto_release_only_the_waiters_go() {
    let server = Server::start(&["--auto-release-on-disconnect=false"]);
    let [mut holder, mut waiter, mut witness] = std::array::from_fn(|_| server.connect());
    let token = holder.lock("k", "0 600");
    waiter.begin("l", "k", "60");
    witness.wait_for_waiters("k", 1);
    drop(holder);
    drop(waiter);
    witness.wait_for_waiters("k", 0);
    eventually("both are gone", || witness.stats()["connections"] == 1);
    witness.check("l", "k", "0", "timeout");
    witness.check("r", "k", &token, "ok");
    witness.lock("k", "0");
}
