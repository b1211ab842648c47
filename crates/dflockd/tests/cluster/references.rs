//! Clients with a `stable-ref` that come back, through another node and under another leader.

use std::net::SocketAddr;
use std::time::Duration;

use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{Client, Cluster, Turn, eventually, granted};
use serde_json::{Value, json};

use super::operate::{ADMIN, operate};

/// Longer than it takes the others to give a node up.
const ORPHAN_TTL: &str = "60";

fn start() -> Cluster {
    start_with_http(&[]).0
}

/// A cluster that has reached the version in which references are replicated, and its HTTP ports.
fn start_with_http(more: &[&str]) -> (Cluster, Vec<SocketAddr>) {
    let flags = ["--orphan-ttl", ORPHAN_TTL, "--follower-mode", "forward"];
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &[&flags[..], &ADMIN, more].concat());
    let http = cluster.add_api("--http-port");
    cluster.start_all();
    for at in 0..3 {
        eventually("the version that has references", || {
            operate(&mut cluster.connect(at), "status", json!({}))["cluster_version"] == 4
        });
    }
    (cluster, http)
}

/// A connection of the client that is known as `me`.
fn come(cluster: &Cluster, at: usize) -> Client {
    let mut client = cluster.connect(at);
    client.check("stable-ref", "me", "", "ok");
    client
}

#[track_caller]
fn hear_grant(client: &mut Client) -> String {
    let heard = client.hear(Duration::from_secs(30));
    granted(heard.line().unwrap_or_else(|| panic!("no grant: {heard:?}")))
}

/// What a client has that is about to lose its connection: a hold, a place in a queue, and a place that it took in two
/// steps. Somebody else is behind it in both queues, and a third one in front.
struct Left {
    token: String,
    front: Client,
    tokens_in_front: [String; 2],
    behind: Client,
}

fn leave_something(client: &mut Client, cluster: &Cluster, at: usize) -> Left {
    let token = client.lock("held", "0 120");
    let mut front = cluster.connect(at);
    let tokens_in_front = ["wanted", "enqueued"].map(|key| front.lock(key, "0 120"));
    client.check("e", "enqueued", "120", "queued");
    client.begin("l", "wanted", "100 120");
    cluster.connect(at).wait_for_waiters("wanted", 1);
    let mut behind = cluster.connect(at);
    behind.check("e", "enqueued", "120", "queued");
    behind.begin("l", "wanted", "100 120");
    cluster.connect(at).wait_for_waiters("wanted", 2);
    Left { token, front, tokens_in_front, behind }
}

/// The client is there again, on another node: it has its token, and both places before those behind it.
fn comes_back(cluster: &Cluster, at: usize, mut left: Left) {
    let mut client = come(cluster, at);
    client.begin("l", "held", "60 90");
    let heard = client.hear(Duration::from_secs(30));
    assert_eq!(heard.line(), Some(&*format!("ok {} 90", left.token)));
    client.check("e", "enqueued", "90", "queued");
    client.begin("l", "wanted", "60 90");
    cluster.connect(at).wait_for_waiters("wanted", 2);
    for (key, token) in ["wanted", "enqueued"].iter().zip(&left.tokens_in_front) {
        left.front.check("r", key, token, "ok");
    }
    let wanted = hear_grant(&mut client);
    let enqueued = granted(&client.ask("w", "enqueued", "30"));
    left.behind.expect_silence(Duration::from_millis(300));
    client.check("r", "wanted", &wanted, "ok");
    hear_grant(&mut left.behind);
    client.check("r", "enqueued", &enqueued, "ok");
    client.check("r", "held", &left.token, "ok");
    cluster.wait_until_equal();
}

/// GUARANTEES 5, 17, decision 81: an orderly end, a broken connection, another leader in between.
#[test]
fn a_client_comes_back_after_a_change_of_leader() {
    for orderly in [true, false] {
        let mut cluster = start();
        let (leader, others) = cluster.leader_and_others();
        let mut client = come(&cluster, others[0]);
        let left = leave_something(&mut client, &cluster, others[1]);
        if orderly {
            drop(client);
        } else {
            client.reset();
        }
        eventually("the end of the connection is known", || {
            come(&cluster, others[1]).ask("l", "held", "0 120") == format!("ok {} 120", left.token)
        });
        cluster.nodes[leader].kill();
        cluster.leader_among(&others);
        // The last one has left it behind again.
        comes_back(&cluster, others[1], left);
        cluster.nodes[leader].start();
        cluster.wait_until_ready();
    }
}

/// GUARANTEES 5, 17, 44, decision 81: the node of the client dies, and with it the leader. The client is there again
/// before the others have given the node up, and waits until they do.
#[test]
fn a_client_comes_back_when_its_node_has_died() {
    let mut cluster = start();
    let (leader, others) = cluster.leader_and_others();
    let mut client = come(&cluster, leader);
    let left = leave_something(&mut client, &cluster, others[0]);
    cluster.nodes[leader].kill();
    cluster.leader_among(&others);
    comes_back(&cluster, others[1], left);
}

/// Decision 81: several live connections may share a reference.
#[test]
fn live_connections_share_a_reference() {
    let cluster = start();
    let mut clients: Vec<Client> = (0..3).map(|at| come(&cluster, at)).collect();
    let token = clients[0].lock("k", "0 60");
    clients[1].check("l", "k", "0", "timeout");
    clients[2].begin("l", "k", "30 60");
    cluster.connect(0).wait_for_waiters("k", 1);
    // Control requests may come on another connection than the acquire.
    clients[1].check("n", "k", &format!("{token} 60"), "ok 60");
    clients[1].check("r", "k", &token, "ok");
    assert_ne!(hear_grant(&mut clients[2]), token);
    cluster.wait_until_equal();
}

/// What a member answers to a request over HTTP, as part of a session if one is named.
fn post(http: SocketAddr, session: Option<&str>, path: &str, body: &Value) -> Value {
    let mut ask = Ask::post(path, body);
    if let Some(session) = session {
        ask = ask.session(session);
    }
    let text = Wire::open(http, None).ask(&ask).text();
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{path}: {text}"))
}

fn open_session(http: SocketAddr) -> String {
    let opened = post(http, None, "/v1/sessions", &json!({ "stable_ref": "me" }));
    opened["session_id"].as_str().unwrap_or_else(|| panic!("{opened}")).to_owned()
}

/// Decision 81: what an HTTP session has that is silent for too long waits for another one with the same reference,
/// through another member; and for a connection of the line protocol, too.
#[test]
fn a_silent_http_session_leaves_its_holds_to_its_reference() {
    let (cluster, http) = start_with_http(&["--http-session-idle-timeout", "1"]);
    let first = open_session(http[0]);
    let body = json!({ "lease_ttl_s": 120 });
    let held = post(http[0], Some(&first), "/v1/locks/held", &body);
    let other = post(http[0], Some(&first), "/v1/locks/other", &body);
    let mut tokens = [held, other].into_iter().map(|it| it["token"].as_str().unwrap().to_owned());
    let (held, other) = (tokens.next().unwrap(), tokens.next().unwrap());
    eventually("the session is given up", || {
        let second = open_session(http[1]);
        let back = post(http[1], Some(&second), "/v1/locks/held", &body);
        back["token"].as_str() == Some(&held)
    });
    assert_eq!(post(http[2], Some(&first), "/v1/locks/x", &body)["error"], "session_gone");
    assert_eq!(come(&cluster, 2).ask("l", "other", "5 60"), format!("ok {other} 60"));
}
