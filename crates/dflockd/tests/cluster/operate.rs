//! What operators do: the command `cluster`, backups, and a data directory without its node.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fmt::Debug;
use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::cluster::NAMES;
use dflockd_testkit::dir::files;
use dflockd_testkit::{
    Client, Cluster, Dir, LIMIT, Node, Ran, Server, Turn, command, eventually, fence,
    free_addresses, granted, host, millis, run,
};
use serde_json::{Value, json};

use super::load::Load;

pub(super) const TOKEN: &str = "an-admin-token";
pub(super) const ADMIN: [&str; 2] = ["--admin-token", TOKEN];

/// The server program for its offline work.
pub(super) fn offline<S: AsRef<OsStr>>(args: &[S]) -> Ran {
    offline_with(args, None)
}

/// The same with a variable in its environment.
pub(super) fn offline_with<S: AsRef<OsStr>>(args: &[S], variable: Option<(&str, &str)>) -> Ran {
    let mut command = command(args);
    command.envs(variable);
    run(command)
}

#[track_caller]
pub(super) fn refused<S: AsRef<OsStr> + Debug>(args: &[S], why: &str) {
    let output = offline(args);
    let text = &output.err;
    assert!(output.code != 0 && text.contains(why), "{args:?}: {output:?}");
}

#[track_caller]
pub(super) fn done<S: AsRef<OsStr> + Debug>(args: &[S]) -> String {
    let output = offline(args);
    assert!(output.code == 0, "{args:?}: {output:?}");
    output.out
}

/// The answer of an operator's request, done or not.
#[track_caller]
pub(super) fn answer(client: &mut Client, verb: &str, wanted: &Value) -> Value {
    client.begin("cluster", verb, &format!("{TOKEN} {wanted}"));
    let heard = client.hear(LIMIT);
    let line = heard.line().unwrap_or_else(|| panic!("{verb}: {heard:?}"));
    let json = line.strip_prefix("ok ").unwrap_or_else(|| panic!("{verb}: {line}"));
    serde_json::from_str(json).unwrap()
}

#[track_caller]
pub(super) fn operate(client: &mut Client, verb: &str, wanted: Value) -> Value {
    let mut wanted = wanted;
    if verb != "policy" || !wanted["set"].is_null() {
        wanted["reason"] = "a test".into();
    }
    let answer = answer(client, verb, &wanted);
    assert_eq!(answer["done"], true, "{verb} {wanted}: {answer}");
    answer
}

#[track_caller]
pub(super) fn refuses(client: &mut Client, verb: &str, mut wanted: Value, why: &str) {
    wanted["reason"] = "a test".into();
    let answer = answer(client, verb, &wanted);
    let text = answer["why"].as_str().unwrap_or_default();
    assert!(answer["done"] == false && text.contains(why), "{verb} {wanted}: {answer}");
}

/// A whole backup, as the command line fetches it.
#[track_caller]
pub(super) fn backup(client: &mut Client) -> Vec<u8> {
    let begun = operate(client, "backup", json!({}));
    let total = usize::try_from(begun["bytes"].as_u64().unwrap()).unwrap();
    let mut bytes = Vec::new();
    while bytes.len() < total {
        let piece = answer(client, "backup", &json!({ "offset": bytes.len() }));
        let digits = piece["data"].as_str().unwrap_or_else(|| panic!("{piece}")).as_bytes();
        assert!(!digits.is_empty(), "an empty piece");
        let byte =
            |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
        bytes.extend(digits.chunks(2).map(byte));
    }
    assert_eq!(bytes.len(), total);
    bytes
}

#[test]
fn operators_are_known_and_audited() {
    let cluster = Cluster::start(3, &ADMIN);
    let mut client = cluster.connect(0);
    let status = client.ask("cluster", "status", "_");
    assert!(status.starts_with("ok {"), "{status}");
    for (key, arg) in [("policy", "wrong {}"), ("add", "_ {}"), ("status-", "wrong")] {
        let mut stranger = cluster.connect(0);
        stranger.check("cluster", key, arg, "error_auth");
        stranger.expect_end();
    }
    let answer = answer(&mut client, "transfer", &json!({}));
    assert!(answer["why"].as_str().unwrap().contains("reason"), "{answer}");
    refuses(&mut client, "nonsense", json!({}), "no verb");
    refuses(&mut client, "promote", json!({ "node": "a b" }), "node id");
    refuses(&mut client, "promote", json!({ "node": "nobody" }), "no member");
    refuses(&mut client, "promote", json!({ "wrong": 1 }), "JSON");
    let nowhere = json!({ "node": "node-a", "peer_addr": "nowhere" });
    refuses(&mut client, "address", nowhere, "host:port");
    operate(&mut client, "snapshot", json!({}));
    let output = cluster.nodes[0].output();
    assert!(output.contains("audit=true") && output.contains("verb=promote"), "{output}");
    assert!(!output.contains(TOKEN), "{output}");
}

/// Decision 47: what all decide by is changed by an operator, on all members at once.
#[test]
fn single_settings_of_the_policy_change_everywhere() {
    let cluster = Cluster::start(3, &[&ADMIN[..], &["--max-locks", "3"]].concat());
    let leader = cluster.leader();
    let mut client = cluster.connect(cluster.others(leader)[0]);
    let policy = operate(&mut client, "policy", json!({}));
    assert_eq!(policy["policy"]["max-locks"], 3);
    refuses(&mut client, "policy", json!({ "set": { "max-locks": 0 } }), "max-locks");
    refuses(&mut client, "policy", json!({ "set": { "max-dreams": 1 } }), "no setting");
    operate(&mut client, "policy", json!({ "set": { "max-locks": 1, "default-lease-ttl": 7 } }));
    for at in 0..3 {
        let mut other = cluster.connect(at);
        eventually("the new policy", || {
            let policy = operate(&mut other, "policy", json!({}))["policy"].take();
            policy["max-locks"] == 1 && policy["default-lease-ttl"] == 7
        });
    }
    client.lock("one", "0");
    client.check("l", "two", "0", "error_max_locks");
}

#[test]
fn a_drained_node_does_not_lead() {
    let mut cluster = Cluster::start(3, &ADMIN);
    let (leader, others) = cluster.leader_and_others();
    let mut client = cluster.connect(leader);
    operate(&mut client, "drain", json!({}));
    let next = cluster.leader_among(&others);
    assert_eq!(operate(&mut client, "status", json!({}))["drained"], true);
    // Now the only one left beside it is killed: whoever leads then, it is not the drained one.
    let last = others.into_iter().find(|&at| at != next).unwrap();
    cluster.nodes[next].kill();
    assert_eq!(cluster.leader_among(&[leader, last]), last);
    operate(&mut client, "drain", json!({ "undo": true }));
    operate(&mut client, "transfer", json!({ "node": NAMES[leader] }));
    assert_eq!(cluster.leader_among(&[leader]), leader);
}

#[test]
fn a_single_node_can_not_be_drained() {
    let cluster = Cluster::start(1, &ADMIN);
    refuses(&mut cluster.connect(0), "drain", json!({}), "no other voter");
}

/// GUARANTEES 41: the address of a member changes, and the cluster goes on with it there.
#[test]
fn a_member_moves_to_another_address() {
    let mut cluster = Cluster::start(3, &ADMIN);
    let leader = cluster.leader();
    let moved = cluster.others(leader)[0];
    let mut client = cluster.connect(leader);
    let mut free = free_addresses(host(), 1);
    let (node, address) = (NAMES[moved], free.remove(0).to_string());
    let taken = operate(&mut client, "status", json!({}))["members"][leader]["peer_addr"].clone();
    refuses(&mut client, "address", json!({ "node": node, "peer_addr": taken }), "another member");
    operate(&mut client, "address", json!({ "node": node, "peer_addr": address }));
    cluster.nodes[moved].terminate();
    client.check("kset", "while", "away", "ok");
    cluster.nodes[moved].flag("--raft-addr").clone_from(&address);
    cluster.nodes[moved].start_ready();
    // It takes part, not only listens: without the other it is half of the majority.
    let third = (0..3).find(|at| *at != leader && *at != moved).unwrap();
    cluster.nodes[third].kill();
    client.check("kset", "after", "all", "ok");
    cluster.connect(moved).check("kget", "while", "", "ok away");
}

/// R5, GUARANTEES 3: fences grow over a restore, nothing is granted while an old lease may last, and the old members
/// are strangers.
#[test]
fn a_backup_becomes_a_new_cluster() {
    const DELAY: Duration = Duration::from_secs(8);
    let mut cluster = Cluster::start(3, &ADMIN);
    let mut client = cluster.connect(0);
    for number in 0..200 {
        client.check("kset", &format!("key-{number}"), &"x".repeat(2000), "ok");
    }
    client.check("incr", "counter", "42", "ok 42");
    let mut holder = cluster.connect(1);
    holder.lock("held", "0 5");
    let bytes = backup(&mut client);
    let mut later = cluster.connect(2);
    later.check("kset", "late", "lost", "ok");
    let last = fence(&later.lock("free", "0 2"));

    let file = cluster.dir.path("backup");
    fs::write(&file, &bytes).unwrap();
    let file = file.to_str().unwrap().to_owned();
    let before = operate(&mut client, "status", json!({}))["cluster_id"].clone();
    cluster.kill_all();
    let old = cluster.nodes[0].dir.to_str().unwrap().to_owned();
    let peer = cluster.nodes[0].peer.to_string();
    let dir = cluster.dir.path("restored");
    let new = dir.to_str().unwrap().to_owned();
    let restore = |dir: &str, file: &str| -> Vec<String> {
        let delay = DELAY.as_secs().to_string();
        let args = ["restore", "--raft-dir", dir, "--from", file, "--node-id", "node-a"];
        let more = ["--raft-addr", &peer, "--grant-delay", &delay];
        args.iter().chain(&more).map(ToString::to_string).collect()
    };
    refused(&restore(&old, &file), "not empty");
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    let bad = cluster.dir.path("damaged");
    fs::write(&bad, &damaged).unwrap();
    refused(&restore(&new, bad.to_str().unwrap()), "digest");
    assert!(!dir.exists(), "a refused restore leaves nothing behind");
    let said = done(&restore(&new, &file));
    assert!(said.contains("lost:") && said.contains("sessions ended"), "{said}");

    let begun = Instant::now();
    let node = &mut cluster.nodes[0];
    node.flag("--raft-dir").clone_from(&new);
    node.start_ready();
    let mut client = cluster.connect(0);
    client.check("get", "counter", "", "ok 42");
    client.check("kget", "key-7", "", &format!("ok {}", "x".repeat(2000)));
    client.check("kget", "late", "", "nil");
    let stats = client.stats();
    assert_eq!(stats["locks"], json!([]), "all holds have ended");
    client.begin("l", "held", "60 5");
    let heard = client.hear(Duration::from_secs(90));
    // One that is not granted yet waits; nothing was granted in the time that was asked for.
    assert!(begun.elapsed() >= DELAY, "{heard:?} after {:?}", begun.elapsed());
    assert!(fence(&granted(heard.line().unwrap())) > last + (1 << 39));

    let status = operate(&mut client, "status", json!({}));
    assert_ne!(status["cluster_id"], before);
    assert_eq!(status["voters"], json!(["node-a"]));
    cluster.nodes[1].start();
    eventually("the old member is refused", || {
        cluster.nodes[1].output().contains("belongs to cluster")
    });
    assert_eq!(operate(&mut client, "status", json!({}))["voters"], json!(["node-a"]));
}

/// The command that makes the first member of a new cluster from a backup; that one is started in its directory next.
pub(super) fn restore(cluster: &mut Cluster, file: &Path) -> Vec<String> {
    let dir = cluster.dir.path("restored").to_str().unwrap().to_owned();
    cluster.nodes[0].flag("--raft-dir").clone_from(&dir);
    let (file, peer) = (file.to_str().unwrap(), cluster.nodes[0].peer.to_string());
    let args = ["restore", "--raft-dir", &dir, "--from", file, "--node-id", "node-a"];
    args.iter().chain(&["--raft-addr", &peer]).map(ToString::to_string).collect()
}

/// What an operator says of a new member.
pub(super) fn as_member(node: &Node) -> Value {
    let (peer, client) = (node.peer.to_string(), node.client.to_string());
    json!({ "node": node.name, "peer_addr": peer, "client_addr": client })
}

/// Lets a new member vote, as soon as it has caught up.
#[track_caller]
pub(super) fn promote(client: &mut Client, node: &Node) {
    let wanted = json!({ "node": node.name, "reason": "a test" });
    eventually("the new member votes", || answer(client, "promote", &wanted)["done"] == true);
    node.wait_until_ready();
}

/// A backup under load is the state at one place of the log: what was acknowledged before is in it.
#[test]
fn a_backup_under_load_is_consistent() {
    let mut cluster = Cluster::start(3, &ADMIN);
    let load = Load::start("load", 3, &cluster.clients());
    load.wait_for_more(50);
    let mut client = cluster.connect(1);
    client.check("kset", "before", "1", "ok");
    let bytes = backup(&mut client);
    load.wait_for_more(50);
    let ledger = load.stop();
    ledger.check(&mut client);
    let file = cluster.dir.path("backup");
    fs::write(&file, bytes).unwrap();
    cluster.kill_all();
    done(&restore(&mut cluster, &file));
    cluster.nodes[0].start_ready();
    let mut client = cluster.connect(0);
    client.check("kget", "before", "", "ok 1");
    client.check("kset", "after", "1", "ok");
}

/// The majority is lost for good, and one member goes on alone.
#[test]
fn the_last_member_becomes_a_cluster() {
    let mut cluster = Cluster::start(3, &[&ADMIN[..], &["--default-lease-ttl", "2"]].concat());
    let mut client = cluster.connect(2);
    client.check("kset", "key", "value", "ok");
    let token = client.lock("held", "0 3");
    let before = operate(&mut client, "status", json!({}))["cluster_id"].clone();
    cluster.nodes[0].kill();
    cluster.nodes[1].kill();
    let dir = cluster.nodes[2].dir.to_str().unwrap().to_owned();
    refused(&["force-new", "--raft-dir", &dir, "--yes"], "in use by another process");
    cluster.nodes[2].kill();
    refused(&["force-new", "--raft-dir", &dir], "give --yes");
    done(&["force-new", "--raft-dir", &dir, "--dry-run"]);
    refused(&["force-new", "--raft-dir", &format!("{dir}-not"), "--yes"], "no directory");
    let output = offline(&["force-new", "--raft-dir", &dir, "--yes"]);
    let (said, warned) = (&output.out, &output.err);
    assert!(output.code == 0, "{output:?}");
    assert!(said.contains("nothing is granted for 6 s"), "{said}");
    assert!(warned.contains("is lost"), "{warned}");

    let begun = Instant::now();
    cluster.nodes[2].start_ready();
    let mut client = cluster.connect(2);
    client.check("kget", "key", "", "ok value");
    client.begin("l", "held", "60 3");
    let heard = client.hear(Duration::from_secs(90));
    assert!(begun.elapsed() >= Duration::from_secs(6), "{heard:?} after {:?}", begun.elapsed());
    assert!(fence(&granted(heard.line().unwrap())) > fence(&token) + (1 << 39));
    let status = operate(&mut client, "status", json!({}));
    assert_ne!(status["cluster_id"], before);
    assert_eq!(status["voters"], json!(["node-c"]));

    // The old ones are strangers; a new one is welcome, also under an old name with an empty directory.
    cluster.nodes[0].start();
    eventually("the old member is refused", || {
        cluster.nodes[0].output().contains("belongs to cluster")
    });
    cluster.nodes[0].kill();
    fs::remove_dir_all(&cluster.nodes[0].dir).unwrap();
    let dir = cluster.dir.path("node-a2");
    let mut new = Node::anywhere("node-a", dir, &["--election-timeout-ms", "500"]);
    new.start();
    operate(&mut client, "add", as_member(&new));
    promote(&mut client, &new);
    new.connect().check("kget", "key", "", "ok value");
}

/// Every file with its content.
fn content(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let read = |path: &std::path::PathBuf| (path.display().to_string(), fs::read(path).unwrap());
    files(dir).iter().map(read).collect()
}

#[test]
fn a_directory_is_inspected_and_not_changed() {
    let mut cluster = Cluster::start(3, &ADMIN);
    let mut client = cluster.connect(0);
    client.check("kset", "secret-key", "secret-value", "ok");
    operate(&mut client, "snapshot", json!({}));
    client.check("kset", "other-key", "secret-value", "ok");
    let dir = cluster.nodes[0].dir.to_str().unwrap().to_owned();
    refused(&["inspect-data", &dir], "a node runs in it");
    cluster.nodes[0].kill();
    let before = content(&cluster.nodes[0].dir);
    let text = done(&["inspect-data", &dir, "--entries"]);
    for part in ["node-a", "node-b", "digest ok", "kv_set", "hard state"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let shown = done(&["inspect-data", &dir, "--entries", "--json"]);
    assert!(!shown.contains("secret") && !text.contains("secret"), "{shown}");
    let shown: Value = serde_json::from_str(&shown).unwrap();
    assert_eq!(shown["node"]["node_id"], "node-a");
    assert_eq!(shown["damage"], json!([]));
    let snapshot = &shown["snapshots"][0];
    assert!(snapshot["digest_ok"] == true && snapshot["index"].as_u64() > Some(1));
    assert_eq!(content(&cluster.nodes[0].dir), before);

    // A byte of an entry that is durable.
    let segment = files(&cluster.nodes[0].dir)
        .into_iter()
        .find(|path| path.file_name().unwrap().to_str().unwrap().starts_with("log-"));
    let segment = segment.unwrap();
    let mut bytes = fs::read(&segment).unwrap();
    bytes[1600] ^= 1;
    fs::write(&segment, bytes).unwrap();
    let output = offline(&["inspect-data", &dir, "--json"]);
    assert!(output.code != 0, "{output:?}");
    let shown = output.json();
    let damage = &shown["damage"][0];
    assert!(damage["file"].as_str().unwrap().starts_with("log-"), "{shown}");
    assert!(damage["offset"].as_u64().is_some_and(|offset| offset <= 1600), "{shown}");
}

#[test]
fn a_server_in_memory_says_that_it_is_no_member() {
    let server = Server::start(&ADMIN);
    let mut client = server.connect();
    refuses(&mut client, "transfer", json!({}), "in memory");
    client.check("ping", "_", "", "ok");
}

/// A node that waits to be added waits, also after somebody has asked it how it is.
#[test]
fn who_waits_to_be_added_is_idle() {
    let _turn = Turn::shared();
    let dir = Dir::new();
    let mut node = Node::anywhere("waits", dir.path("waits"), &[]);
    node.start();
    let mut client = node.connect();
    for _ in 0..3 {
        assert!(client.ask("stats", "_", "").contains("joining"));
    }
    let before = node.process().cpu_time();
    // What is looked for here is something that does not stop.
    thread::sleep(Duration::from_secs(2));
    let used = node.process().cpu_time() - before;
    assert!(used < millis(500), "{used:?} of two seconds");
}
