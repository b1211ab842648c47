//! What the end of a connection means (GUARANTEES R8), and what is replicated of the flags.

use std::ops::Range;
use std::time::{Duration, Instant};

use dflockd_testkit::{Cluster, eventually, fence, millis};

/// A client on one node takes a lock and goes; how long until somebody on another node has it.
fn time_until_free(
    cluster: &Cluster,
    key: &str,
    lease: u64,
    orderly: bool,
    reference: bool,
) -> Duration {
    let (leader, others) = cluster.leader_and_others();
    let mut holder = cluster.connect(others[0]);
    if reference {
        holder.check("stable-ref", "me", "", "ok");
    }
    let token = holder.lock(key, &format!("0 {lease}"));
    let mut next = cluster.connect(others[1]);
    next.begin("l", key, "20 5");
    cluster.connect(leader).wait_for_waiters(key, 1);
    let begun = Instant::now();
    if orderly {
        drop(holder);
    } else {
        holder.reset();
    }
    let answer = next.hear(Duration::from_secs(25));
    let time = begun.elapsed();
    let granted = dflockd_testkit::granted(answer.line().unwrap());
    assert!(fence(&granted) > fence(&token));
    time
}

/// GUARANTEES 48: in a cluster, too, a lease, a session and all sessions together have bounds, and idle keys make room.
#[test]
fn what_clients_have_is_bounded() {
    let flags = ["--max-lease-ttl", "50", "--max-locks", "3", "--max-holds-per-session", "2"];
    let others = ["--max-waits-per-session", "1", "--max-sessions", "1"];
    let cluster = Cluster::start(3, &[&flags[..], &others].concat());
    let (leader, others) = cluster.leader_and_others();
    let at = others[0];
    let mut client = cluster.connect(at);
    // The first leader has put the limits of version 2 into the log.
    eventually("the longest lease", || {
        let answer = client.ask("l", "k", "5 9000");
        client.check("r", "k", &dflockd_testkit::granted(&answer), "ok");
        answer.ends_with(" 50")
    });
    for key in ["a", "b"] {
        client.lock_and_release(key, "0 40");
    }
    client.lock("c", "0 40");
    client.lock("d", "0 40");
    client.check("l", "e", "0", "error_max_locks");
    let mut other = cluster.connect(leader);
    other.lock("e", "0 40");
    other.check("l", "f", "0", "error_max_locks");
    other.check("e", "c", "40", "queued");
    other.check("e", "d", "40", "error_max_waiters");
    other.check("blpop", "list", "5", "error_max_waiters");
    let mut first = cluster.connect(leader);
    let kept = first.ask("hello", "first", "keep");
    let mut second = cluster.connect(at);
    let refused = second.ask("hello", "second", "keep");
    assert!(kept.starts_with("ok keep=") && refused == "error", "{kept}, {refused}");
    assert!(second.ask("hello", "second", "").starts_with("ok"));
    cluster.wait_until_equal();
}

const SOON: Range<Duration> = Duration::ZERO..millis(900);
const LEASE: u64 = 2;
const AT_LEASE: Range<Duration> = millis(1500)..millis(4000);

#[track_caller]
fn check_time(expected: Range<Duration>, time: Duration) {
    assert!(expected.contains(&time), "{time:?}");
}

#[test]
fn any_end_of_a_connection_releases() {
    let cluster = Cluster::start(3, &["--auto-release", "any"]);
    check_time(SOON, time_until_free(&cluster, "fin", 60, true, false));
    check_time(SOON, time_until_free(&cluster, "reset", 60, false, false));
}

#[test]
fn only_an_orderly_end_releases_by_default() {
    let cluster = Cluster::start(3, &[]);
    check_time(SOON, time_until_free(&cluster, "fin", 60, true, false));
    check_time(AT_LEASE, time_until_free(&cluster, "reset", LEASE, false, false));
}

#[test]
fn no_end_of_a_connection_releases() {
    let cluster = Cluster::start(3, &["--auto-release", "lease"]);
    check_time(AT_LEASE, time_until_free(&cluster, "fin", LEASE, true, false));
    check_time(AT_LEASE, time_until_free(&cluster, "reset", LEASE, false, false));
}

#[test]
fn a_server_that_shuts_down_or_dies_releases_nothing() {
    let mut cluster = Cluster::start(3, &["--shutdown-timeout", "1"]);
    let (leader, others) = cluster.leader_and_others();
    let mut client = cluster.connect(others[0]);
    let first = client.lock("first", "0 60");
    cluster.nodes[others[0]].terminate();
    let mut client = cluster.connect(others[1]);
    let second = client.lock("second", "0 60");
    cluster.nodes[others[0]].start();
    cluster.wait_until_ready();
    cluster.nodes[others[1]].kill();
    cluster.nodes[others[1]].start();
    cluster.wait_until_ready();
    let mut client = cluster.connect(leader);
    for (key, token) in [("first", &first), ("second", &second)] {
        client.check("l", key, "0", "timeout");
        client.check("r", key, token, "ok");
    }
}

#[test]
fn an_orphan_waits_for_its_owner() {
    let cluster = Cluster::start(3, &["--orphan-ttl", "2", "--follower-mode", "forward"]);
    // Without a reference as ever.
    check_time(SOON, time_until_free(&cluster, "plain", 60, true, false));
    check_time(AT_LEASE, time_until_free(&cluster, "orphan", 60, true, true));
    // The owner comes back in time, elsewhere.
    let mut client = cluster.connect(0);
    client.check("stable-ref", "me", "", "ok");
    let token = client.lock("mine", "0 60");
    drop(client);
    let mut client = cluster.connect(1);
    client.check("stable-ref", "me", "", "ok");
    client.check("n", "mine", &format!("{token} 60"), "ok 60");
    client.check("r", "mine", &token, "ok");
}

#[test]
fn the_first_leader_decides_for_all() {
    let mut cluster = Cluster::start(3, &["--max-locks", "2", "--default-lease-ttl", "7"]);
    for node in &mut cluster.nodes {
        node.terminate();
    }
    for node in &mut cluster.nodes {
        *node.flag("--max-locks") = "50".into();
        node.start();
    }
    cluster.wait_until_ready();
    let mut client = cluster.connect(1);
    assert!(client.ask("l", "a", "0").ends_with(" 7"));
    client.lock("b", "0");
    client.check("l", "c", "0", "error_max_locks");
    eventually("a warning that the flag does not count", || {
        let warned = |output: &str| {
            output.lines().any(|line| line.contains("WARN") && line.contains("max-locks"))
        };
        cluster.nodes.iter().all(|node| warned(&node.output()))
    });
}
