//! A network that is cut between the members (GUARANTEES 1, 22, 45), and strangers at the peer port.

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::cluster::{Addresses, CALM_MS};
use dflockd_testkit::eventually::within;
use dflockd_testkit::line::ANSWER;
use dflockd_testkit::peers::Proxy;
use dflockd_testkit::{
    Cluster, Heard, Node, Turn, eventually, fence, free_addresses, host, millis,
};
use serde_json::json;

use super::load::{Load, Told};
use super::operate::{ADMIN, operate};

fn cut_able(election_ms: &str, flags: &[&str]) -> (Cluster, Proxy) {
    let mut all = vec!["--election-timeout-ms", election_ms];
    all.extend_from_slice(flags);
    let mut addresses = Addresses::free(3);
    let proxy = Proxy::between(&mut addresses);
    let mut cluster = Cluster::prepare_at(Turn::shared(), &addresses, &all);
    cluster.start_all();
    (cluster, proxy)
}

fn term(node: &Node) -> u64 {
    node.status().map_or(0, |status| status["term"].as_u64().unwrap())
}

#[test]
fn an_isolated_leader_serves_nobody_and_the_others_go_on() {
    let (cluster, proxy) = cut_able("500", &["--failover-grace", "1"]);
    let (leader, others) = cluster.leader_and_others();
    let mut old = cluster.connect(leader);
    old.check("kset", "value", "before", "ok");
    let token = old.lock("lock", "0 2");
    let mut reader = cluster.connect(leader);
    let mut waiter = cluster.connect(leader);
    let mut inspector = cluster.connect(leader);
    proxy.isolate(leader, &others);
    let cut = Instant::now();
    // Asked at once, while it still believes to lead, and again when it does not.
    old.begin("kset", "value", "alone");
    reader.begin("kget", "value", "");
    waiter.begin("l", "lock", "4 60");
    inspector.begin("inspect", "value", "");

    let new = cluster.leader_among(&others);
    println!("a new leader after {:?}", cut.elapsed());
    let mut client = cluster.connect(new);
    client.check("kset", "value", "after", "ok");
    // The lease of the one who is cut off ends, and somebody else is let in.
    let taken = client.lock("lock", "6 60");
    assert!(fence(&taken) > fence(&token));

    let heard = reader.hear(ANSWER);
    // It can not know any more what the value is.
    assert!(heard.line().is_some_and(|line| line.starts_with("error")), "stale: {heard:?}");
    assert!(cut.elapsed() <= Duration::from_secs(12), "no answer in time: {:?}", cut.elapsed());
    let heard = old.hear(ANSWER);
    assert_eq!(Told::of(&heard), Told::Unknown, "{heard:?}");
    assert_ne!(heard, Heard::Nothing);
    let heard = waiter.hear(ANSWER);
    assert!(heard.line().is_some_and(|line| !line.starts_with("ok")), "{heard:?}");
    let heard = inspector.hear(ANSWER);
    assert!(heard.line().is_none_or(|line| !line.contains("before")), "{heard:?}");
    // What it is asked now is not answered with certainty either.
    let mut late = cluster.connect(leader);
    let heard = late.try_ask("kget", "value", "", ANSWER);
    assert!(heard.line().is_some_and(|line| line.starts_with("error")), "{heard:?}");
    let status = cluster.nodes[leader].status().unwrap();
    assert_ne!(status["role"], "leader");
    assert_eq!(status["ready"], false);

    proxy.heal();
    cluster.wait_until_ready();
    cluster.wait_until_equal();
    for at in 0..3 {
        let mut client = cluster.connect(at);
        let value = client.ask("kget", "value", "");
        // Nobody knows whether the write of the cut off leader came late.
        assert!(["ok after", "ok alone"].contains(&value.as_str()), "{value}");
        client.check("l", "lock", "0 60", "timeout");
    }
    cluster.connect(leader).check("r", "lock", &taken, "ok");
}

#[test]
fn a_follower_that_is_cut_off_disturbs_nobody_when_it_comes_back() {
    let (cluster, proxy) = cut_able(CALM_MS, &[]);
    let (leader, others) = cluster.leader_and_others();
    let before = term(&cluster.nodes[leader]);
    let servers = [cluster.nodes[leader].client, cluster.nodes[others[1]].client];
    let load = Load::start("cut", 3, &servers);
    load.wait_for_more(30);
    proxy.isolate(others[0], &cluster.others(others[0]));
    eventually("it is not ready", || !cluster.nodes[others[0]].is_ready());
    let begun = Instant::now();
    // Longer than it waits for a leader.
    while begun.elapsed() < Duration::from_secs(5) {
        load.wait_for_more(10);
        thread::sleep(millis(20));
    }
    proxy.heal();
    cluster.wait_until_ready();
    load.wait_for_more(30);
    let ledger = load.stop_unrefused();
    assert_eq!(term(&cluster.nodes[leader]), before, "an election that nobody needed");
    assert_eq!(cluster.leader(), leader);
    ledger.check_all(&cluster);
}

#[test]
fn one_way_cuts_leave_a_leader_that_serves() {
    let (cluster, proxy) = cut_able("500", &[]);
    let load_on = |cluster: &Cluster, some: &[usize]| -> Vec<_> {
        some.iter().map(|&at| cluster.nodes[at].client).collect()
    };
    // The leader is heard by one of the others only.
    let (leader, others) = cluster.leader_and_others();
    proxy.cut(leader, others[0]);
    let load = Load::start("one-way-1", 2, &load_on(&cluster, &[leader, others[1]]));
    within(Duration::from_secs(10), "writes in spite of a one-way cut", || load.done() > 50);
    let terms = term(&cluster.nodes[leader]);
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(3) {
        load.wait_for_more(1);
        thread::sleep(millis(50));
    }
    let grown = term(&cluster.nodes[leader]) - terms;
    assert!(grown <= 2, "the term grew by {grown} in three seconds");
    proxy.heal();
    cluster.wait_until_ready();
    let ledger = load.stop();
    ledger.check(&mut cluster.connect(others[0]));

    // The leader hears nobody but is heard by all: it must not lead for ever.
    let (leader, others) = cluster.leader_and_others();
    proxy.cut(others[0], leader);
    proxy.cut(others[1], leader);
    let load = Load::start("one-way-2", 2, &load_on(&cluster, &others));
    within(Duration::from_secs(10), "writes with a deaf leader gone", || load.done() > 50);
    let ledger = load.stop();
    proxy.heal();
    cluster.wait_until_ready();
    ledger.check_all(&cluster);
}

#[test]
fn strangers_and_wiped_members_are_refused_and_disturb_nobody() {
    let mut cluster = Cluster::calm(3);
    let (leader, others) = cluster.leader_and_others();
    let load =
        Load::start("s", 2, &[cluster.nodes[leader].client, cluster.nodes[others[1]].client]);
    load.wait_for_more(20);
    let before = term(&cluster.nodes[leader]);
    let wanted = others[0];

    // Another secret.
    cluster.nodes[wanted].kill();
    let right = cluster.nodes[wanted].flags.clone();
    *cluster.nodes[wanted].flag("--raft-auth-token") = "f".repeat(32);
    cluster.nodes[wanted].start();
    load.wait_for_more(50);
    eventually("the refusal is logged", || cluster.nodes[wanted].output().contains("refused"));
    assert!(!cluster.nodes[wanted].is_ready());
    cluster.nodes[wanted].kill();
    cluster.nodes[wanted].flags = right;

    // Its own data, but another name.
    let mut named = Node::anywhere("node-x", cluster.nodes[wanted].dir.clone(), &[]);
    let said = named.start_in_vain();
    assert!(said.contains("node-x") && said.contains(&cluster.nodes[wanted].name), "{said}");

    // An empty data directory under the old name.
    let aside = cluster.dir.path("aside");
    fs::rename(&cluster.nodes[wanted].dir, &aside).unwrap();
    cluster.nodes[wanted].start();
    load.wait_for_more(50);
    let wiped = &cluster.nodes[wanted];
    eventually("the wiped node is told", || wiped.output().contains("data directory"));
    assert!(!cluster.nodes[wanted].is_ready());
    let heard = cluster.connect(wanted).try_ask("incr", "wiped", "1", ANSWER);
    assert_ne!(Told::of(&heard), Told::Done, "{heard:?}");
    cluster.nodes[wanted].process = None;
    fs::remove_dir_all(&cluster.nodes[wanted].dir).unwrap();

    // Its own again.
    fs::rename(&aside, &cluster.nodes[wanted].dir).unwrap();
    cluster.nodes[wanted].start_ready();
    assert_eq!(term(&cluster.nodes[leader]), before, "somebody had to be elected");
    let ledger = load.stop_unrefused();
    ledger.check_all(&cluster);
}

/// The name of its cluster, as a node knows it, once the cluster has drawn it.
fn drawn_name(cluster: &Cluster) -> String {
    cluster.wait_until_ready();
    let leader = cluster.leader();
    let output = || cluster.nodes.iter().map(Node::output).collect::<String>();
    eventually("a name of its own", || output().contains("the cluster gets a name of its own"));
    let name_at = |at: usize| {
        let status = operate(&mut cluster.connect(at), "status", json!({}));
        status["cluster_id"].as_str().unwrap().to_owned()
    };
    // An entry behind the one with the name.
    cluster.connect(leader).check("incr", "count", "1", "ok 1");
    let name = name_at(leader);
    for other in cluster.others(leader) {
        eventually("all know it", || name_at(other) == name);
    }
    name
}

/// GUARANTEES 41: two clusters of the same names, addresses and secret are two clusters.
#[test]
fn clusters_that_began_alike_refuse_each_other() {
    let addresses = Addresses::free(3);
    let flags = ["--election-timeout-ms", CALM_MS, ADMIN[0], ADMIN[1]];
    let mut first = Cluster::prepare_at(Turn::shared(), &addresses, &flags);
    first.start_all();
    let name = drawn_name(&first);
    first.nodes.iter_mut().for_each(Node::terminate);
    let mut second = Cluster::prepare_at(Turn::free(), &addresses, &flags);
    second.start_all();
    assert_ne!(drawn_name(&second), name);

    // A member of the first takes the place of one of the second.
    let (leader, others) = second.leader_and_others();
    let before = term(&second.nodes[leader]);
    let [at, other] = others[..] else { panic!("two") };
    second.nodes[at].terminate();
    first.nodes[at].start();
    eventually("it is told", || first.nodes[at].output().contains("belongs to cluster"));
    for node in [leader, other] {
        eventually("it is refused", || {
            second.nodes[node].output().contains(&format!("to cluster {name}"))
        });
    }
    assert!(!first.nodes[at].is_ready());
    second.connect(leader).check("incr", "count", "1", "ok 2");
    assert_eq!(term(&second.nodes[leader]), before);
    // Its own cluster takes it again: they have all kept the name.
    for node in [leader, other] {
        second.nodes[node].terminate();
        first.nodes[node].start();
    }
    first.wait_until_ready();
    first.connect(at).check("incr", "count", "1", "ok 2");
}

#[test]
fn a_node_of_another_cluster_is_refused() {
    let mut cluster = Cluster::calm(3);
    let leader = cluster.leader();
    let before = term(&cluster.nodes[leader]);
    // It names the members of this cluster, but in a list that makes another one of it.
    let own = free_addresses(host(), 2);
    let list = cluster.nodes[0].flag("--cluster-peers");
    let first = list.split(',').next().unwrap();
    let formation = ["--cluster-peers".to_owned(), format!("{first},node-z={}@{}", own[1], own[0])];
    let mut node = Node::new("node-z", own[0], own[1], cluster.dir.path("z"), &formation);
    node.start();
    eventually("it is refused", || node.output().contains("refused"));
    assert!(!node.is_ready());
    cluster.connect(0).check("incr", "count", "1", "ok 1");
    assert_eq!(term(&cluster.nodes[leader]), before);
    assert_eq!(cluster.nodes[leader].status().unwrap()["voters"].as_array().unwrap().len(), 3);
}
