//! What one client can cost the others has a bound (GUARANTEES 48).

use std::collections::BTreeSet;

use dflockd_engine::FenceFile;
use dflockd_testkit::{Dir, Server, command, eventually, granted, run};

/// The longest time that a request can name, 292 years.
const FOR_EVER: u64 = 9_223_372_036;

/// GUARANTEES 48: a longer lease is granted and renewed with the longest one, and the answer tells it.
#[test]
fn a_longer_lease_is_shortened_to_the_longest() {
    let server = Server::start(&["--max-lease-ttl", "50", "--default-lease-ttl", "20"]);
    let mut client = server.connect();
    let answer = client.ask("l", "k", &format!("0 {FOR_EVER}"));
    let token = granted(&answer);
    assert!(answer.ends_with(" 50"), "{answer}");
    client.check("n", "k", &format!("{token} {FOR_EVER}"), "ok 50");
    client.check("n", "k", &format!("{token} 30"), "ok 30");
    client.check("n", "k", &token, "ok 20");
    for (op, arg) in [("e", "51"), ("se", "2 51"), ("re", "51"), ("we", "51")] {
        let answer = client.ask(op, op, arg);
        assert!(answer.starts_with("acquired ") && answer.contains(" 50"), "{op}: {answer}");
    }
    let server = Server::start(&["--max-lease-ttl", "0"]);
    let answer = server.connect().ask("l", "k", &format!("0 {FOR_EVER}"));
    assert!(answer.ends_with(&format!(" {FOR_EVER}")), "{answer}");
}

#[test]
fn a_default_lease_above_the_longest_is_refused() {
    let flags = ["--port", "0", "--default-lease-ttl", "100", "--max-lease-ttl", "50"];
    let reason = "--default-lease-ttl (100 s) is above --max-lease-ttl (50 s)";
    run(command(&flags)).expect(1).complains(&[reason]);
}

/// GUARANTEES 48: only a lease that was granted delays the next start, not one that was asked for.
#[test]
fn a_refused_lease_does_not_delay_the_next_start() {
    let dir = Dir::new();
    let file = dir.name("fences");
    let flags = ["--fence-state-file", &file, "--startup-grant-delay", "auto"];
    let flags = [&flags[..], &["--max-lease-ttl", "0"]].concat();
    let server = Server::start(&flags);
    let mut client = server.connect();
    client.lock("k", "0 1");
    let before = std::fs::read(&file).unwrap();
    client.check("n", "nosuch", &format!("{} {FOR_EVER}", "0".repeat(32)), "error");
    client.check("n", "k", &format!("{} {FOR_EVER}", "0".repeat(32)), "error");
    client.check("l", "k", &format!("0 {FOR_EVER}"), "timeout");
    client.check("rl", "k", &format!("9 {FOR_EVER}"), "error_type_mismatch");
    assert!(std::fs::read(&file).unwrap() == before, "the record of the longest lease has changed");
    server.kill();
    let server = Server::start(&flags);
    server.connect().lock("k", "20 1");
    // Who queues may be granted at any time: that lease is on record before.
    server.connect().begin("l", "k", "20 600");
    eventually("the record has changed", || std::fs::read(&file).unwrap() != before);
}

/// GUARANTEES 48: whatever an older server has granted, grants begin after the longest lease of this one.
#[test]
fn an_old_record_delays_no_longer_than_the_longest_lease() {
    let dir = Dir::new();
    let file = dir.name("fences");
    FenceFile::open(&file).unwrap().reserve(1, FOR_EVER * 1_000_000_000).unwrap();
    let flags = ["--max-lease-ttl", "2", "--default-lease-ttl", "1"];
    let file_flags = ["--fence-state-file", &file, "--startup-grant-delay", "auto"];
    let server = Server::start(&[&flags[..], &file_flags].concat());
    server.wait_for_output("a longer lease than --max-lease-ttl was granted before");
    let mut client = server.connect();
    assert_eq!(client.ask("l", "k", "0"), "timeout");
    client.lock("k", "20");
    assert!(server.begun_at.elapsed() >= std::time::Duration::from_secs(2));
}

fn idle_locks(server: &Server) -> BTreeSet<String> {
    let stats = server.connect().stats();
    let locks = stats["idle_locks"].as_array().unwrap().iter();
    locks.map(|lock| lock["key"].as_str().unwrap().to_owned()).collect()
}

/// GUARANTEES 48: keys that nobody uses keep nobody from using others, in whatever shard they are; they go in the order
/// in which they became idle. Only live ones fill the server.
#[test]
fn idle_locks_make_room_for_others() {
    const MAX: usize = 100;
    let max = MAX.to_string();
    let server = Server::start(&["--max-locks", &max]);
    let mut hog = server.connect();
    for number in 0..MAX {
        let key = format!("k{number}");
        hog.lock_and_release(&key, "0 600");
    }
    let mut client = server.connect();
    for number in 0..MAX / 2 {
        client.lock(&format!("new{number}"), "0 600");
    }
    let left: BTreeSet<_> = (MAX / 2..MAX).map(|number| format!("k{number}")).collect();
    assert_eq!(idle_locks(&server), left, "those that were idle for longest have gone");
    for number in MAX / 2..MAX {
        client.lock(&format!("new{number}"), "0 600");
    }
    hog.check("l", "one-more", "0", "error_max_locks");
    // As soon as they are not held any more, they make room again.
    drop(client);
    eventually("room", || hog.ask("l", "one-more", "0") != "error_max_locks");
    for number in 1..MAX {
        hog.lock(&format!("again{number}"), "0 600");
    }
    hog.check("l", "too-many", "0", "error_max_locks");
}

/// GUARANTEES 48: the same for counters at zero; what has a value stays.
#[test]
fn counters_at_zero_make_room_for_others() {
    let server = Server::start(&["--max-keys", "40"]);
    let mut client = server.connect();
    for number in 0..40 {
        client.check("cset", &format!("c{number}"), "0", "ok");
    }
    for number in 0..40 {
        client.check("kset", &format!("v{number}"), "x", "ok");
    }
    client.check("kset", "one-more", "x", "error_max_keys");
    client.check("incr", "one-more", "1", "error_max_keys");
    client.check("rpush", "one-more", "x", "error_max_keys");
    client.check("kset", "v7", "y", "ok");
}

/// GUARANTEES 48: a connection holds and waits for so much in all, wherever the keys are; what it has it can renew and
/// release.
#[test]
fn holds_and_waits_of_a_connection() {
    let server = Server::start(&["--max-holds-per-session", "40", "--max-waits-per-session", "30"]);
    let [mut hog, mut other] = std::array::from_fn(|_| server.connect());
    let tokens: Vec<_> = (0..40).map(|number| hog.lock(&format!("k{number}"), "0 600")).collect();
    for number in 40..80 {
        hog.check("l", &format!("k{number}"), "0", "error_max_locks");
        hog.check("e", &format!("k{number}"), "600", "error_max_locks");
    }
    other.lock("k40", "0 600");
    for number in 0..30 {
        other.check("e", &format!("k{number}"), "600", "queued");
    }
    other.check("e", "k30", "600", "error_max_waiters");
    other.check("l", "k30", "5", "error_max_waiters");
    other.check("blpop", "list", "5", "error_max_waiters");
    other.check("bwait", "barrier", "2 5", "error_max_waiters");
    other.check("l", "k30", "0", "timeout");
    hog.check("n", "k0", &format!("{} 600", tokens[0]), "ok 600");
    hog.check("r", "k0", &tokens[0], "ok");
    hog.lock("k79", "0 600");
    other.check("w", "k29", "0", "timeout");
    other.check("e", "k30", "600", "queued");
    // The limits are those of one connection.
    server.connect().lock("k78", "0 600");
}

/// GUARANTEES 48: so many sessions outlive their connections; others work without.
#[test]
fn kept_sessions_in_all() {
    let server = Server::start(&["--max-sessions", "3"]);
    let kept: Vec<_> = (0..3)
        .map(|number| {
            let mut client = server.connect();
            (client.keep(&format!("client-{number}")), client)
        })
        .collect();
    let mut late = server.connect();
    late.check("hello", "late", "keep", "error");
    assert!(late.ask("hello", "late", "").starts_with("ok"));
    late.lock("k", "0");
    // Who has one comes back to it, which makes no new one.
    let secrets: Vec<_> = kept.into_iter().map(|(secret, _)| secret).collect();
    let mut back = server.connect();
    let attach = format!("attach={}", secrets[1]);
    assert!(back.ask("hello", "back", &attach).starts_with("ok "));
    server.connect().check("hello", "late", "keep", "error");
}
