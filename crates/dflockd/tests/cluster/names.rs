//! Who holds and who waits has a name on every node.

use std::net::SocketAddr;

use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{Client, Cluster, Turn, eventually};
use serde_json::{Value, json};

use super::operate::{ADMIN, operate};

/// A cluster that has reached the version in which names are replicated, and its HTTP ports.
fn start() -> (Cluster, Vec<SocketAddr>) {
    let flags = [&ADMIN[..], &["--follower-mode", "forward"]].concat();
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &flags);
    let http = cluster.add_api("--http-port");
    cluster.start_all();
    for at in 0..3 {
        eventually("the version that has names", || {
            operate(&mut cluster.connect(at), "status", json!({}))["cluster_version"] == 4
        });
    }
    (cluster, http)
}

fn json_of(answer: &str) -> Value {
    serde_json::from_str(answer.strip_prefix("ok ").expect(answer)).expect(answer)
}

/// The names of the holders and of those who wait, as `inspect`, `stats` and the list of HTTP have them on a node.
fn names(cluster: &Cluster, http: SocketAddr, at: usize, key: &str) -> [Vec<String>; 3] {
    let mut client = cluster.connect(at);
    let of = |lists: [&Value; 2]| -> Vec<String> {
        let entries = lists.into_iter().flat_map(|list| list.as_array().into_iter().flatten());
        entries.map(|entry| entry["client"].as_str().unwrap().to_owned()).collect()
    };
    let inspected = json_of(&client.ask("inspect", key, ""));
    let stats = client.stats();
    let entry = dflockd_testkit::line::entry(&stats, "locks", key).cloned().unwrap_or_default();
    let listed = Wire::open(http, None).ask(&Ask::get(&format!("/v1/locks?prefix={key}"))).text();
    let listed: Value = serde_json::from_str(&listed).expect(&listed);
    let listed = &listed["locks"][0];
    [
        of([&inspected["holders"], &inspected["queue"]]),
        of([&entry["holders"], &entry["queue"]]),
        of([&listed["holders"], &listed["queue"]]),
    ]
}

#[track_caller]
fn wait_for_names(cluster: &Cluster, http: &[SocketAddr], at: usize, key: &str, wanted: &[&str]) {
    eventually(&format!("the names {wanted:?} of {key} on node {at}"), || {
        names(cluster, http[at], at, key).iter().all(|names| names == wanted)
    });
}

/// Decision 20: the client of a node that was killed is named by the others, at once and when they have given the node
/// up; so is one that waits, and one that has only an address.
#[test]
fn the_client_of_a_dead_node_is_named_by_the_others() {
    let (mut cluster, http) = start();
    let (leader, others) = cluster.leader_and_others();
    let mut holder = cluster.connect(leader);
    assert!(holder.ask("hello", "billing-7", "lost").starts_with("ok"));
    holder.lock("k", "0 120");
    let mut waiter = cluster.connect(leader);
    waiter.begin("l", "k", "100 120");
    cluster.connect(others[0]).wait_for_waiters("k", 1);
    let mut named = cluster.connect(others[0]);
    assert!(named.ask("hello", "reports", "").starts_with("ok"));
    named.begin("l", "k", "100 120");
    cluster.connect(others[0]).wait_for_waiters("k", 2);
    let address = waiter.local_addr().to_string();
    for at in 0..3 {
        wait_for_names(&cluster, &http, at, "k", &["billing-7", &address, "reports"]);
    }
    cluster.nodes[leader].kill();
    cluster.leader_among(&others);
    for &at in &others {
        wait_for_names(&cluster, &http, at, "k", &["billing-7", &address, "reports"]);
    }
    // When the node is given up, nobody waits for its client any more, but the hold has its lease.
    let mut client = cluster.connect(others[1]);
    eventually("the node is given up", || client.waiters("k") == 1);
    for &at in &others {
        wait_for_names(&cluster, &http, at, "k", &["billing-7", "reports"]);
    }
    cluster.nodes[leader].start();
    cluster.wait_until_ready();
    wait_for_names(&cluster, &http, leader, "k", &["billing-7", "reports"]);
    cluster.wait_until_equal();
}

/// Decision 20: a kept session has its name wherever it is attached, and whatever that connection is called.
#[test]
fn a_kept_session_keeps_its_name() {
    let (mut cluster, http) = start();
    let (leader, others) = cluster.leader_and_others();
    let mut first = cluster.connect(others[0]);
    let secret = first.keep("keeper");
    first.lock("k", "0 120");
    cluster.nodes[others[0]].kill();
    let mut second: Client = cluster.connect(others[1]);
    let answer = second.ask("hello", "somebody", &format!("attach={secret}"));
    assert!(answer.starts_with("ok attach="), "{answer}");
    second.lock("k2", "0 120");
    for at in [leader, others[1]] {
        for key in ["k", "k2"] {
            let name = names(&cluster, http[at], at, key)[0].clone();
            assert_eq!(name, ["keeper"], "{key} on {at}");
        }
    }
}
