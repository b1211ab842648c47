//! From one version of the program to the next (GUARANTEES 42): members of both work together at the older one, every
//! member can go back until an operator has finalised it, and an older program stops then.
//!
//! There is one program only. With [`OLDER`] it reads no more than the version before, and says so; what it writes is
//! what that version has.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use dflockd_testkit::cluster::NAMES;
use dflockd_testkit::dir::files;
use dflockd_testkit::{Cluster, Node, Turn, eventually};
use serde_json::{Value, json};

use super::kill::Keepers;
use super::load::Load;
use super::operate::{ADMIN, answer, as_member, offline_with, operate, promote, refuses};

/// What makes a process speak for the older version.
const OLDER: (&str, &str) = ("DFLOCKD_CLUSTER_VERSION_MAX", "1");
/// The version that the newer program reads.
const NEWEST: u64 = 4;
const FLAGS: [&str; 4] = [ADMIN[0], ADMIN[1], "--election-timeout-ms", "500"];

/// A cluster of which these nodes run the newer program.
fn start(turn: Turn, next: &[usize]) -> Cluster {
    let mut cluster = Cluster::prepare(turn, 3, &FLAGS);
    for (at, node) in cluster.nodes.iter_mut().enumerate() {
        node.variable = (!next.contains(&at)).then_some(OLDER);
        node.start();
    }
    cluster.wait_until_ready();
    cluster
}

/// A cluster that began with the older program and runs the newer one on all nodes, but still uses the older version.
fn upgraded(turn: Turn) -> Cluster {
    let mut cluster = start(turn, &[]);
    wait_for_versions(&cluster, 1, [1, 1, 1]);
    for at in 0..3 {
        cluster.nodes[at].terminate();
        cluster.nodes[at].variable = None;
        cluster.nodes[at].start();
        cluster.wait_until_ready();
    }
    wait_for_versions(&cluster, 1, [NEWEST, NEWEST, NEWEST]);
    cluster
}

/// A setting of the policy, as a node knows it.
fn setting(cluster: &Cluster, at: usize, name: &str) -> Value {
    operate(&mut cluster.connect(at), "policy", json!({}))["policy"][name].clone()
}

/// The version in use and the version that each member reads, as a node knows them.
fn versions(cluster: &Cluster, at: usize) -> (u64, BTreeMap<String, u64>) {
    let status = operate(&mut cluster.connect(at), "status", json!({}));
    let reads = status["versions"].as_array().unwrap().iter();
    let reads = reads.map(|it| (it["node_id"].as_str().unwrap().to_owned(), it["value"].as_u64()));
    let reads = reads.map(|(node, version)| (node, version.unwrap())).collect();
    (status["cluster_version"].as_u64().unwrap(), reads)
}

#[track_caller]
fn wait_for_versions(cluster: &Cluster, used: u64, reads: [u64; 3]) {
    let reads: BTreeMap<_, _> = NAMES.iter().map(ToString::to_string).zip(reads).collect();
    for at in 0..3 {
        eventually("the members know what each reads", || {
            versions(cluster, at) == (used, reads.clone())
        });
    }
}

#[track_caller]
fn let_lead(cluster: &Cluster, at: usize) {
    eventually("the leader that is wanted", || {
        let mut client = cluster.connect(cluster.leader());
        answer(&mut client, "transfer", &json!({ "node": NAMES[at], "reason": "a test" }));
        cluster.leader() == at
    });
}

/// What a data directory has, as the older or the newer program reads it.
fn inspect(dir: &Path, variable: Option<(&str, &str)>) -> (bool, Value) {
    let dir = dir.to_str().unwrap();
    let args = ["inspect-data", dir, "--json", "--entries", "--last", "1000000"];
    let output = offline_with(&args, variable);
    (output.code == 0, output.json())
}

/// The versions of all entries, in order; those without are the first of a term.
fn entry_versions(shown: &Value) -> Vec<u64> {
    shown["entries"].as_array().unwrap().iter().filter_map(|it| it["version"].as_u64()).collect()
}

/// The log and the snapshots, byte by byte.
fn kept(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let name = |path: &Path| path.file_name().unwrap().to_str().unwrap().to_owned();
    let kept = files(dir).into_iter().map(|path| (name(&path), fs::read(&path).unwrap()));
    kept.filter(|(name, _)| name.starts_with("log-") || name.starts_with("snapshot-")).collect()
}

/// Starts the older program where the newer one was: it says why not, and what to do, and has touched nothing.
#[track_caller]
fn is_too_old(node: &mut Node, why: &str) {
    let before = kept(&node.dir);
    node.variable = Some(OLDER);
    let said = node.start_in_vain();
    for part in [why, "newer server", "start the newer one"] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(kept(&node.dir) == before, "the data directory was changed");
    node.variable = None;
}

/// Whoever leads: nothing is written that the older program can not read, and nobody can finalise. A member that ran
/// the newer program goes back to the older.
#[test]
fn a_mixed_cluster_stays_at_what_all_read() {
    let mut cluster = start(Turn::shared(), &[1, 2]);
    wait_for_versions(&cluster, 1, [1, NEWEST, NEWEST]);
    for leader in [1, 0] {
        let_lead(&cluster, leader);
        for at in 0..3 {
            let mut client = cluster.connect(at);
            client.check("kset", &format!("key-{leader}-{at}"), "value", "ok");
            refuses(&mut client, "finalize", json!({}), "node-a (up to 1)");
        }
        let mut holder = cluster.connect(leader);
        holder.lock_and_release("lock", "0 60");
        operate(&mut cluster.connect(2), "snapshot", json!({}));
        cluster.connect(1).check("incr", "count", "1", &format!("ok {}", 2 - leader));
    }
    wait_for_versions(&cluster, 1, [1, NEWEST, NEWEST]);

    for at in 0..3 {
        assert_eq!(setting(&cluster, at, "max-lease-ttl"), 0, "version 1 has no such limit");
    }
    let wanted = json!({ "set": { "max-lease-ttl": 60 } });
    refuses(&mut cluster.connect(1), "policy", wanted, "the cluster has version 1");

    cluster.nodes[2].terminate();
    cluster.nodes[2].variable = Some(OLDER);
    cluster.nodes[2].start();
    cluster.wait_until_ready();
    wait_for_versions(&cluster, 1, [1, NEWEST, 1]);
    refuses(&mut cluster.connect(0), "finalize", json!({}), "node-a (up to 1), node-c (up to 1)");
    cluster.connect(2).check("kget", "key-1-0", "", "ok value");
    cluster.wait_until_equal();
    for node in &mut cluster.nodes {
        node.terminate();
        let (whole, shown) = inspect(&node.dir, Some(OLDER));
        assert!(whole && shown["cluster_version"] == 1, "{shown}");
        let versions = entry_versions(&shown);
        assert!(!versions.is_empty() && versions.iter().all(|version| *version == 1), "{shown}");
    }
}

/// A cluster that no older program was ever a member of uses the newest version by itself, with its limits.
#[test]
fn a_new_cluster_uses_the_newest_version() {
    let cluster = start(Turn::shared(), &[0, 1, 2]);
    wait_for_versions(&cluster, NEWEST, [NEWEST, NEWEST, NEWEST]);
    for at in 0..3 {
        eventually("the limits of version 2", || setting(&cluster, at, "max-lease-ttl") == 86_400);
    }
    // The requests of operators carry them, through any member.
    for at in 0..3 {
        let wanted = json!({ "set": { "max-lease-ttl": 1_000 + at } });
        operate(&mut cluster.connect(at), "policy", wanted);
        eventually("the change of a limit", || setting(&cluster, 0, "max-lease-ttl") == 1_000 + at);
    }
    let wanted = json!({ "set": { "max-lease-ttl": 5 } });
    refuses(&mut cluster.connect(0), "policy", wanted, "default-lease-ttl (33) is above");
}

/// When all run the newer program it is finalised, at one place of the log; from there on the older one stops, in
/// front of a log, of a snapshot, and as a new member.
#[test]
fn a_finalised_cluster_has_no_way_back() {
    let mut cluster = upgraded(Turn::shared());
    let mut client = cluster.connect(0);
    client.check("kset", "before", "1", "ok");
    assert_eq!(setting(&cluster, 0, "max-sessions"), 0);
    operate(&mut client, "finalize", json!({}));
    wait_for_versions(&cluster, NEWEST, [NEWEST, NEWEST, NEWEST]);
    for at in 0..3 {
        eventually("the limits of version 2", || setting(&cluster, at, "max-sessions") == 262_144);
    }
    operate(&mut client, "finalize", json!({}));
    client.check("kset", "after", "2", "ok");
    cluster.wait_until_equal();
    // One member has a snapshot of the new version, the others have entries.
    operate(&mut client, "snapshot", json!({}));
    drop(client);

    for (at, why) in [(1, "written in form 4"), (0, "written in form 5")] {
        cluster.nodes[at].terminate();
        is_too_old(&mut cluster.nodes[at], why);
        let dir = cluster.nodes[at].dir.to_str().unwrap().to_owned();
        let output = offline_with(&["force-new", "--raft-dir", &dir, "--yes"], Some(OLDER));
        let said = &output.err;
        assert!(output.code != 0 && said.contains("newer server"), "{output:?}");
        // It is not damaged, and nobody says so.
        let text = offline_with(&["inspect-data", &dir, "--entries"], Some(OLDER)).out;
        assert!(text.contains("newer server") && !text.contains("DAMAGE"), "{text}");
        if at == 1 {
            let (whole, shown) = inspect(&cluster.nodes[at].dir, None);
            let versions = entry_versions(&shown);
            assert!(whole && versions.is_sorted(), "{shown}");
            assert!(versions.contains(&1) && versions.contains(&NEWEST), "{shown}");
        }
        // The others went on meanwhile, and it is one of them again.
        cluster.connect(2).check("kset", &format!("without-{at}"), "1", "ok");
        cluster.nodes[at].start();
        cluster.wait_until_ready();
        cluster.connect(at).check("kget", "before", "", "ok 1");
        cluster.connect(at).check("kget", "after", "", "ok 2");
        cluster.connect(at).check("kget", &format!("without-{at}"), "", "ok 1");
    }
    cluster.wait_until_equal();

    let dir = cluster.dir.path("node-d");
    let mut new = Node::anywhere("node-d", dir, &["--election-timeout-ms", "500"]);
    new.variable = Some(OLDER);
    new.start();
    let mut client = cluster.connect(1);
    operate(&mut client, "add", as_member(&new));
    let ended = new.process().wait_for_end();
    assert!(!ended.success() && new.output().contains("start the newer one"), "{}", new.output());
    new.kill();
    new.variable = None;
    new.start();
    promote(&mut client, &new);
    new.connect().check("kget", "after", "", "ok 2");
}

/// It had said that it reads the newer version, was away when that was finalised, and comes back with the older
/// program.
#[test]
fn a_member_that_was_away_is_too_old_when_it_comes_back() {
    let mut cluster = upgraded(Turn::shared());
    let away = cluster.follower();
    cluster.nodes[away].kill();
    let mut client = cluster.connect(cluster.leader());
    operate(&mut client, "finalize", json!({}));
    client.check("kset", "key", "value", "ok");
    cluster.nodes[away].variable = Some(OLDER);
    let said = cluster.nodes[away].start_in_vain();
    assert!(said.contains("the cluster has version 4, this server knows up to 1"), "{said}");
    assert!(said.contains("start a newer one"), "{said}");
    cluster.nodes[away].variable = None;
    cluster.nodes[away].start();
    cluster.wait_until_ready();
    cluster.connect(away).check("kget", "key", "", "ok value");
    cluster.wait_until_equal();
}

/// A witness has no state, but reads the log: it counts as the others do.
#[test]
fn a_witness_has_its_say() {
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &FLAGS);
    for (at, node) in cluster.nodes.iter_mut().enumerate() {
        node.variable = (at == 2).then_some(OLDER);
        node.flags.extend((at == 2).then(|| "--witness".to_owned()));
        node.start();
    }
    let full = [0, 1];
    let mut client = cluster.connect(cluster.leader_among(&full));
    let reads = |it: &Value| it["node_id"] == "node-c" && it["value"] == 1;
    eventually("the witness has said what it reads", || {
        let status = operate(&mut client, "status", json!({}));
        status["versions"].as_array()?.iter().any(reads).then_some(())
    });
    refuses(&mut client, "finalize", json!({}), "node-c (up to 1)");
    cluster.nodes[2].kill();
    cluster.nodes[2].variable = None;
    cluster.nodes[2].start();
    eventually("it is finalised", || {
        let mut client = cluster.connect(cluster.leader_among(&full));
        let wanted = json!({ "reason": "a test" });
        answer(&mut client, "finalize", &wanted)["done"] == true
    });
    eventually("the witness has seen it", || {
        let status = operate(&mut cluster.connect(2), "status", json!({}));
        status["cluster_version"] == NEWEST
    });
    cluster.nodes[2].kill();
    cluster.nodes[2].variable = Some(OLDER);
    let said = cluster.nodes[2].start_in_vain();
    assert!(said.contains("start a newer one") || said.contains("start the newer one"), "{said}");
}

/// GUARANTEES 17, 35, 42: one node after the other gets the newer program, and then it is finalised, while clients
/// write and hold. Everything that was acknowledged is there, no session and no hold is lost.
#[test]
fn a_rolling_upgrade_under_load_loses_nothing() {
    let mut cluster = start(Turn::alone(), &[]);
    let servers = cluster.clients();
    let keepers = Keepers::start(&servers);
    let load = Load::start("upgrade", 4, &servers);
    for _ in 0..3 {
        load.wait_for_more(50);
        let mut client = cluster.connect(0);
        let old = |cluster: &Cluster, at: &usize| cluster.nodes[*at].variable.is_some();
        // The leader last, as it is drained when it is its turn.
        let leader = cluster.leader();
        let at = cluster.others(leader).into_iter().find(|at| old(&cluster, at)).unwrap_or(leader);
        operate(&mut cluster.connect(at), "drain", json!({}));
        let reads: Vec<_> = versions(&cluster, 0).1.into_values().collect();
        if reads.iter().any(|reads| *reads > 1) {
            refuses(&mut client, "finalize", json!({}), "let them run the newer server first");
        }
        drop(client);
        cluster.nodes[at].terminate();
        load.wait_for_more(50);
        cluster.nodes[at].variable = None;
        cluster.nodes[at].start();
        cluster.wait_until_ready();
    }
    wait_for_versions(&cluster, 1, [NEWEST, NEWEST, NEWEST]);
    load.wait_for_more(50);
    operate(&mut cluster.connect(0), "finalize", json!({}));
    wait_for_versions(&cluster, NEWEST, [NEWEST, NEWEST, NEWEST]);
    load.wait_for_more(50);
    let ledger = load.stop();
    keepers.finish(&mut cluster.connect(0));
    for at in 0..3 {
        ledger.check(&mut cluster.connect(at));
    }
    let refused = ledger.refused();
    // A draining node says so; nothing else may be refused.
    assert!(refused.iter().all(|answer| answer.contains("error_draining")), "{refused:?}");
    cluster.wait_until_equal();
}

/// GUARANTEES 42: a reference keeps what it kept before until the version is raised, whichever program a client's node
/// runs; from there on its client gets it back.
#[test]
fn references_begin_with_their_version() {
    let flags = ["--orphan-ttl", "30", "--follower-mode", "forward"];
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &[&FLAGS[..], &flags].concat());
    cluster.nodes[2].variable = Some((OLDER.0, "3"));
    cluster.nodes.iter_mut().for_each(Node::start);
    cluster.wait_until_ready();
    wait_for_versions(&cluster, 3, [NEWEST, NEWEST, 3]);
    let come = |cluster: &Cluster, at: usize| {
        let mut client = cluster.connect(at);
        client.check("stable-ref", "me", "", "ok");
        client
    };
    for at in [0, 2] {
        let key = format!("before-{at}");
        drop({
            let mut client = come(&cluster, at);
            client.lock(&key, "0 60");
            client
        });
        come(&cluster, 1).check("l", &key, "1", "timeout");
    }
    cluster.nodes[2].terminate();
    cluster.nodes[2].variable = None;
    cluster.nodes[2].start();
    cluster.wait_until_ready();
    wait_for_versions(&cluster, 3, [NEWEST; 3]);
    operate(&mut cluster.connect(0), "finalize", json!({}));
    wait_for_versions(&cluster, NEWEST, [NEWEST; 3]);
    let mut client = come(&cluster, 2);
    let token = client.lock("after", "0 60");
    drop(client);
    assert_eq!(come(&cluster, 1).ask("l", "after", "5 50"), format!("ok {token} 50"));
    cluster.wait_until_equal();
}
