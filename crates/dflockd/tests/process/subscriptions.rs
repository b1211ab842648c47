//! What subscriptions cost: memory, time of others, and the start of a durable node.

use std::process::Command;
use std::thread;

use dflockd_core::{RequestId, Subscription, command};
use dflockd_replica::codec;
use dflockd_replica::disk::RealDisk;
use dflockd_replica::log::{LogBatch, LogOptions, LogStore};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Proposal, ProposalBody};
use dflockd_testkit::process::limited;
use dflockd_testkit::{Client, Dir, Server, eventually};

/// More than anything here may take: what is measured includes buffers of the server's own.
const ROOM_KIB: u64 = 16 << 10;

/// A pattern of as many tokens as may be, unlike all others.
fn pattern(number: usize) -> String {
    format!("{number:x}{}", ".*".repeat(15))
}

/// One of more tokens than may be.
fn long_pattern(number: usize) -> String {
    format!("{number:x}{}", ".*".repeat(126))
}

/// Sends many requests at once; gives the answers.
fn ask_all(client: &mut Client, requests: impl Iterator<Item = String>) -> Vec<String> {
    let requests: Vec<String> = requests.collect();
    let mut answers = Vec::new();
    for some in requests.chunks(100) {
        client.send(some.concat());
        answers.extend(some.iter().map(|_| client.line()));
    }
    answers
}

/// GUARANTEES 48: what a watch costs is what was sent for it, however many tokens it has; and it costs that once, not
/// once for each part of the server.
#[test]
fn watches_cost_their_bytes() {
    let server = Server::start(&[] as &[&str]);
    let mut client = server.connect();
    client.check("ping", "_", "_", "ok");
    let before = server.resident_kib();
    let long = (0..100).map(|number| format!("watch\n{}\n\n", long_pattern(number)));
    assert!(ask_all(&mut client, long).iter().all(|answer| answer == "error"));
    let many = (0..1000).map(|number| format!("watch\n{}\n\n", pattern(number)));
    assert!(ask_all(&mut client, many).iter().all(|answer| answer == "ok"));
    let after = server.resident_kib();
    assert!(after < before + ROOM_KIB, "{before} KiB before, {after} KiB after");
    // They are there, and end.
    let key = |number: usize| pattern(number).replace('*', "x");
    server.connect().check("incr", &key(77), "1", "ok 1");
    assert_eq!(client.line(), format!("watch incr {}", key(77)));
    client.check("unwatch", &pattern(77), "", "ok");
    client.check("unwatch", &long_pattern(77), "", "ok");
    server.connect().check("incr", &key(77), "1", "ok 2");
    client.check("ping", "_", "_", "ok");
}

/// GUARANTEES 48: the same for listeners of signals.
#[test]
fn listeners_cost_their_bytes() {
    let server = Server::start(&[] as &[&str]);
    let mut clients = [server.connect(), server.connect()];
    for client in &mut clients {
        client.check("ping", "_", "_", "ok");
    }
    let before = server.resident_kib();
    for client in &mut clients {
        let long = (0..100).map(|number| format!("listen\n{}\n\n", long_pattern(number)));
        assert!(ask_all(client, long).iter().all(|answer| answer == "error"));
        let many = (0..1000).map(|number| format!("listen\n{}\n\n", pattern(number)));
        assert!(ask_all(client, many).iter().all(|answer| answer == "ok"));
    }
    let after = server.resident_kib();
    assert!(after < before + ROOM_KIB, "{before} KiB before, {after} KiB after");
    let channel = pattern(77).replace('*', "x");
    server.connect().check("signal", &channel, "hi", "ok 2");
}

/// GUARANTEES 48: one connection has a share, all of them together have one, and both are counted in bytes too.
/// Whatever is full, a subscription can be ended.
#[test]
fn subscriptions_have_limits() {
    let server = Server::start(&["--max-subscriptions-total", "1500"]);
    let mut first = server.connect();
    let all = (0..1025).map(|number| format!("watch\nk{number}\n\n"));
    let answers = ask_all(&mut first, all);
    assert!(answers[..1024].iter().all(|answer| answer == "ok"), "1,024 by default");
    assert_eq!(answers[1024], "error");
    first.check("watch", "k7", "", "ok");
    let mut second = server.connect();
    let all = (0..477).map(|number| format!("listen\nc{number}\ng\n"));
    let answers = ask_all(&mut second, all);
    assert!(answers[..476].iter().all(|answer| answer == "ok"));
    assert_eq!(answers[476], "error", "1,500 in all");
    first.check("unwatch", "k7", "", "ok");
    second.check("observe", "leader", "", "ok");
    second.check("observe", "other", "", "error");
    drop(first);
    // Whoever leaves makes room.
    eventually("there is room", || second.ask("observe", "other", "") == "ok");

    // A name of a group is stored like a pattern.
    let server = Server::start(&["--max-subscription-bytes", "1000"]);
    let mut client = server.connect();
    let group = "g".repeat(200);
    for number in 0..4 {
        client.check("listen", &format!("{number:03}{}", "x".repeat(30)), &group, "ok");
    }
    client.check("listen", "one-more", &group, "error");
    client.check("listen", "one-more", "", "ok");
    server.connect().check("listen", "one-more", &group, "ok");
}

/// GUARANTEES 48: a session without a connection is told nothing, and costs others nothing. It listens again when
/// somebody attaches to it.
#[test]
fn a_detached_session_does_not_listen() {
    let limits = ["--max-subscriptions", "0", "--max-subscriptions-total", "0"];
    detach_and_attach(&Server::start(&limits), 10_000);
    let dir = Dir::new();
    let mut durable = durable(&dir);
    durable.args(limits);
    let server = Server::launch(durable);
    eventually("it leads", || server.connect().ask("incr", "c", "1") != "error");
    detach_and_attach(&server, 500);
}

fn detach_and_attach(server: &Server, groups: usize) {
    let mut gone = server.connect();
    let secret = gone.keep("gone");
    gone.lock("k", "0 600");
    let listens = (0..groups).map(|number| format!("listen\n>\ng{number}\n"));
    assert!(ask_all(&mut gone, listens).iter().all(|answer| answer == "ok"));
    gone.check("listen", "jobs.*", "workers", "ok");
    gone.check("listen", "jobs.*", "", "ok");
    gone.check("watch", "jobs.>", "", "ok");
    let mut worker = server.connect();
    worker.check("listen", "jobs.*", "workers", "ok");
    gone.reset();

    let mut other = server.connect();
    // The end of a connection is noticed a little later.
    eventually("nobody listens", || other.ask("signal", "x", "hi") == "ok 0");
    for number in 0..10 {
        other.check("signal", "jobs.x", &format!("{number}"), "ok 1");
        assert_eq!(worker.line(), format!("sig jobs.x {number}"), "nobody else has turns");
    }
    let stats = other.stats();
    let listed: Vec<_> = stats["signal_channels"].as_array().unwrap().iter().collect();
    assert_eq!(listed.len(), 1, "{listed:?}");

    let mut back = server.connect();
    back.check("hello", "back", &format!("attach={secret}"), &format!("ok attach={secret}"));
    // What comes for that many groups would be too much for one connection.
    let unlistens = (0..groups).map(|number| format!("unlisten\n>\ng{number}\n"));
    assert!(ask_all(&mut back, unlistens).iter().all(|answer| answer == "ok"));
    other.check("signal", "jobs.x", "again", "ok 2");
    assert_eq!(back.line(), "sig jobs.x again");
    other.check("incr", "jobs.count", "1", "ok 1");
    assert_eq!(back.line(), "watch incr jobs.count");
}

/// A durable node in a directory, with 2.3 GB of address space.
fn durable(dir: &Dir) -> Command {
    let raft_dir = dir.name("data");
    // Nobody dials it, so any free port will do.
    let node = ["--raft-dir", &raft_dir, "--node-id", "a", "--raft-addr", "127.0.0.1:0"];
    limited("-v 2300000", &[&node[..], &["--cluster-bootstrap"]].concat())
}

/// Adds what a server wrote that took patterns of any length: one session of its last run with many of them.
fn add_long_watches(dir: &Dir, count: u16) {
    let disk = RealDisk::open(&dir.path("data")).unwrap();
    let (mut log, recovered) = LogStore::open(disk, LogOptions::default()).unwrap();
    let snapshot = recovered.snapshot.expect("a cluster begins with one");
    let mut machine = Machine::restore(&snapshot.data, false).unwrap();
    let known = recovered.entries.iter().filter(|entry| entry.index > snapshot.metadata.index);
    for entry in known.filter(|entry| !entry.data.is_empty()) {
        machine.apply(&entry.data, &mut Vec::new()).unwrap();
    }
    assert_eq!(machine.version(), 1, "later ones refuse what this adds");
    let run = machine.newest_run(1).expect("it was started");
    let first_seq = machine.applied_seq(run).expect("it is its last") + 1;
    let mut items = Vec::new();
    for number in 0..count {
        let pattern = long_pattern(number.into());
        let to = Subscription::Changes { pattern: pattern.as_bytes(), from: None };
        let body =
            ProposalBody::Command(dflockd_core::Command::Subscribe(command::Subscribe { to }));
        let (session, request) = (run.session(7), RequestId(number.into()));
        let item = Proposal { session, epoch: 0, request, keep: false, body };
        codec::put_item(&mut items, &item);
    }
    let mut payload = Vec::new();
    codec::begin_payload(&mut payload, 1, machine.now());
    codec::put_batch(&mut payload, run, first_seq, count, &items);
    machine.apply(&payload, &mut Vec::new()).unwrap();
    let store = machine.store().expect("it has begun");
    assert_eq!(store.view_session(run.session(7)).subscriptions, usize::from(count));
    let mut entry = recovered.entries.last().expect("it has run").clone();
    entry.index += 1;
    entry.data = payload.into();
    log.write(&LogBatch { entries: vec![entry], ..LogBatch::default() }).unwrap();
    log.sync().unwrap();
}

/// GUARANTEES 48: no request that was ever accepted keeps a member from starting again.
#[test]
fn a_log_of_long_patterns_can_be_started_with() {
    let dir = Dir::new();
    let mut older = durable(&dir);
    older.env("DFLOCKD_CLUSTER_VERSION_MAX", "1");
    // The default was another one.
    older.args(["--max-subscriptions", "0"]);
    let server = Server::launch(older);
    eventually("it leads", || server.connect().ask("kset", "k", "v") == "ok");
    server.kill();
    add_long_watches(&dir, 24_000);

    let mut sizes = Vec::new();
    for _ in 0..2 {
        let server = Server::launch(durable(&dir));
        let mut client = server.connect();
        eventually("it leads", || client.ask("kget", "k", "") == "ok v");
        client.check("watch", &long_pattern(0), "", "error");
        client.check("watch", &pattern(0), "", "ok");
        sizes.push(server.resident_kib());
        server.kill();
    }
    assert!(sizes.iter().all(|size| *size < 256 << 10), "{sizes:?} KiB");
}

/// GUARANTEES 31: what changes after a watch was answered is told, in whatever part of the server the key is, while
/// others watch, change keys and leave.
#[test]
fn no_change_is_missed_once_a_watch_is_answered() {
    let server = Server::start(&[] as &[&str]);
    thread::scope(|scope| {
        for number in 0..4 {
            let server = &server;
            scope.spawn(move || {
                let (mut watcher, mut writer) = (server.connect(), server.connect());
                for round in 0..200 {
                    let (pattern, key) =
                        (format!("{number}.{round}.>"), |key| format!("{number}.{round}.{key}"));
                    watcher.check("watch", &pattern, "", "ok");
                    for at in 0..3 {
                        writer.check("incr", &key(at), "1", "ok 1");
                    }
                    for at in 0..3 {
                        assert_eq!(watcher.line(), format!("watch incr {}", key(at)));
                    }
                    watcher.check("unwatch", &pattern, "", "ok");
                    writer.check("incr", &key(0), "1", "ok 2");
                    if round % 50 == 49 {
                        watcher = server.connect();
                    }
                }
                watcher.check("ping", "_", "_", "ok");
            });
        }
    });
    assert_eq!(server.connect().stats()["watch_channels"].as_array().unwrap().len(), 0);
}
