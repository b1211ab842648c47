//! Three members: sessions that work through each of them, redirects, membership, and no majority.

use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Reply, Wire};
use dflockd_testkit::{Cluster, Node, Turn, eventually};
use serde_json::json;

use super::inspection::force_release;
use super::site::{Grant, Members, Place, Session, granted};

const ADMIN: &str = "adm1n-token-of-the-tests";

/// The same session at another API.
fn at(session: &Session, place: &Place) -> Session {
    Session { place: place.clone(), id: session.id.clone() }
}

/// Decision 52.
#[test]
fn a_session_works_through_every_member() {
    let members = Members::start(3, &[]);
    let [a, b, c] = [0, 1, 2].map(|number| &members.places[number]);
    let session = a.session();
    let held = session.lock("k");
    let there = at(&session, b);
    there.ping().empty();
    let renewed = there.post("/v1/locks/k/renew", &held.proof()).ok();
    assert_eq!(renewed["fence"], held.body["fence"], "GUARANTEES 17");
    // It queues here and waits there.
    let other = c.session();
    let first = other.lock("two");
    let enqueued = there.post("/v1/locks/two/enqueue", &json!({})).ok();
    assert_eq!(enqueued, json!({ "status": "queued" }));
    let back = at(&session, a);
    let mut waiting = back.begin("/v1/locks/two/wait", &json!({ "timeout_s": 60 }));
    super::site::still_waits(&mut waiting);
    other.unlock("two", &first);
    assert!(granted(&mut waiting).fence > first.fence);
    // Its end is the end everywhere, and it is told after it is done.
    at(&session, c).end().empty();
    for place in [a, b, c] {
        at(&session, place).ping().refused(410, "session_gone");
        let reply = at(&session, place).post("/v1/locks/k", &json!({}));
        reply.refused(410, "session_gone");
    }
    let next = other.lock("k");
    assert!(next.fence > held.fence);
    for place in [a, b, c] {
        let unknown = Session { place: place.clone(), id: "0".repeat(32) };
        unknown.ping().refused(410, "session_gone");
    }
}

/// GUARANTEES 17: the member is lost, its sessions are not.
#[test]
fn a_session_outlives_its_member() {
    let mut members = Members::start(3, &[]);
    let leader = members.cluster.leader();
    let follower = members.cluster.others(leader)[0];
    for lost in [follower, leader] {
        let session = members.places[lost].session();
        let held = session.lock(&format!("k{lost}"));
        members.cluster.nodes[lost].kill();
        let other = &members.places[members.cluster.others(lost)[0]];
        let there = at(&session, other);
        let path = format!("/v1/locks/k{lost}/renew");
        let renewed = eventually("it is renewed elsewhere", || {
            let reply = there.post(&path, &held.proof());
            // While there is no leader nothing can be said.
            (reply.status != 503).then_some(reply)
        });
        assert_eq!(renewed.ok()["fence"], held.body["fence"]);
        there.unlock(&format!("k{lost}"), &held);
        there.end().empty();
        members.cluster.nodes[lost].start_ready();
    }
}

#[test]
fn followers_redirect_if_told_to() {
    let members = Members::start(3, &["--follower-mode", "redirect", "--admin-token", ADMIN]);
    let leader = members.cluster.leader();
    let (there, here) = (&members.places[leader], members.follower());
    let id = there.session().id;
    let mut asks = vec![Ask::new("POST", "/v1/sessions")];
    for (path, body) in [
        ("/v1/locks/k", json!({})),
        ("/v1/locks/k/release", json!({ "token": "0".repeat(32) })),
        ("/v1/semaphores/k", json!({ "limit": 1 })),
        ("/v1/counters/k/add", json!({ "delta": 1 })),
        ("/v1/lists/k/push", json!({ "value": "x", "end": "left" })),
        ("/v1/signals/k", json!({ "payload": "x" })),
    ] {
        asks.push(Ask::post(path, &body).session(&id));
    }
    asks.push(Ask::new("PUT", "/v1/kv/k").body(json!({ "value": "x" }).to_string()));
    for ask in asks {
        let reply = here.ask(ask.clone());
        assert_eq!(reply.status, 503, "{ask:?}: {}", reply.text());
        reply.refused(503, "not_leader");
        let line = members.cluster.nodes[leader].client.to_string();
        assert_eq!(reply.header("x-dflockd-leader"), Some(line.as_str()), "{ask:?}");
    }
    // The leader itself serves, and looking is allowed everywhere.
    there.put("/v1/kv/k", &json!({ "value": "x" })).ok();
    for path in ["/health", "/v1/stats", "/v1/overview", "/v1/openapi.json"] {
        assert_eq!(here.get(path).status, 200, "{path}");
    }
    eventually("a follower is ready", || here.get("/ready").status == 200);
    assert_eq!(there.get("/v1/readindex").ok(), json!({ "status": "ok" }));
    here.get("/v1/readindex").refused(503, "not_leader");
}

#[test]
fn redirects_name_the_http_api_of_the_leader() {
    let redirected = |members: &Members| {
        let here = members.follower();
        eventually("the leader's HTTP address is known", || {
            let reply = here.put("/v1/kv/k", &json!({ "value": "x" }));
            reply.refused(503, "not_leader");
            reply.header("x-dflockd-leader-http").map(str::to_owned)
        })
    };
    let members = Members::start(3, &["--follower-mode", "redirect"]);
    assert_eq!(redirected(&members), members.leader().http.to_string());
    drop(members);
    let address = "locks.example:8443";
    let flags = ["--follower-mode", "redirect", "--http-advertise-addr", address];
    assert_eq!(redirected(&Members::start(3, &flags)), address);
}

/// GUARANTEES 41 as an operator sees it.
#[test]
fn a_voter_is_added_and_removed() {
    let mut members = Members::start(3, &["--admin-token", ADMIN]);
    let [client, peer] = members.cluster.more_addresses(2)[..] else { panic!("two") };
    let mut new = Node::new("node-d", client, peer, members.cluster.dir.path("node-d"), &[]);
    new.start();
    let voter = json!({
        "node_id": "node-d", "raft_addr": peer.to_string(), "client_addr": client.to_string(),
    });
    let done = json!({ "status": "ok", "node_id": "node-d" });
    let leader = members.leader().clone();
    let added = leader.ask(Ask::post("/v1/admin/voters", &voter).admin(ADMIN));
    assert_eq!(added.ok(), done, "{}", new.output());
    let voters = |count: usize| {
        let stats = leader.get("/v1/stats").ok();
        (stats["cluster"]["voters"].as_array()?.len() == count).then_some(())
    };
    eventually("it votes", || voters(4));
    new.wait_until_ready();
    // It serves like the others.
    let mut line = new.connect();
    line.check("incr", "c", "1", "ok 1");
    let delete = Ask::new("DELETE", "/v1/admin/voters/node-d").admin(ADMIN);
    assert_eq!(leader.ask(delete.clone()).ok(), done);
    eventually("it is out", || voters(3));
    // Again is no harm.
    assert_eq!(leader.ask(delete).ok(), done);
    // A name is never used again.
    leader.ask(Ask::post("/v1/admin/voters", &voter).admin(ADMIN)).refused(400, "add_voter_failed");
    members.cluster.nodes.push(new);
}

#[test]
fn membership() {
    let members = Members::start(3, &["--admin-token", ADMIN]);
    let leader = members.leader();
    assert_eq!(leader.get("/v1/readindex").ok(), json!({ "status": "ok" }));
    let list = leader.get("/v1/cluster/members").ok();
    let text = list.to_string();
    for name in ["node-a", "node-b", "node-c"] {
        assert!(text.contains(name), "{list}");
    }
    let overview = leader.get("/v1/overview").ok();
    assert_eq!(overview["mode"], "replicated");
    assert_eq!(overview["cluster"]["voters"], json!(["node-a", "node-b", "node-c"]), "{overview}");
    for wrong in [
        json!({}),
        json!({ "node_id": "n 4", "raft_addr": "127.0.0.1:1", "client_addr": "127.0.0.1:2" }),
        json!({ "node_id": "", "raft_addr": "127.0.0.1:1", "client_addr": "127.0.0.1:2" }),
        json!({ "node_id": "n4", "raft_addr": "nonsense", "client_addr": "127.0.0.1:2" }),
    ] {
        leader.ask(Ask::post("/v1/admin/voters", &wrong).admin(ADMIN)).bad();
    }
    let delete = |name: &str| {
        leader.ask(Ask::new("DELETE", &format!("/v1/admin/voters/{name}")).admin(ADMIN))
    };
    delete("node-x").refused(400, "remove_voter_failed");
    // A name that is taken, with another address.
    let thief =
        json!({ "node_id": "node-a", "raft_addr": "127.0.0.1:1", "client_addr": "127.0.0.1:2" });
    leader.ask(Ask::post("/v1/admin/voters", &thief).admin(ADMIN)).refused(400, "add_voter_failed");
    let gone = members.cluster.follower();
    let name = &members.cluster.nodes[gone].name;
    assert_eq!(delete(name).ok(), json!({ "status": "ok", "node_id": name }));
    eventually("it is out", || {
        let stats = leader.get("/v1/stats").ok();
        (stats["cluster"]["voters"].as_array()?.len() == 2).then_some(())
    });
}

/// GUARANTEES 20: a leader that is asked for its own removal hands over, goes and says so before its process ends.
#[test]
fn a_leader_that_is_removed_says_so() {
    let mut members = Members::start(6, &["--admin-token", ADMIN]);
    for left in (1..=5).rev() {
        let at = members.cluster.leader();
        let name = members.cluster.nodes[at].name.clone();
        let delete = Ask::new("DELETE", &format!("/v1/admin/voters/{name}")).admin(ADMIN);
        let reply = members.places[at].ask(delete);
        assert_eq!(reply.ok(), json!({ "status": "ok", "node_id": name }), "{left} are to be left");
        let mut node = members.cluster.nodes.remove(at);
        let place = members.places.remove(at);
        node.process().wait_for_end();
        assert!(node.output().contains("was removed from the cluster"), "{}", node.output());
        assert!(std::net::TcpStream::connect(place.http).is_err(), "it is gone");
        eventually("the others know", || {
            let stats = members.places[0].get("/v1/stats").ok();
            (stats["cluster"]["voters"].as_array()?.len() == left).then_some(())
        });
    }
}

/// GUARANTEES 50 as an operator sees it.
#[test]
fn a_needed_voter_is_removed_by_force_only() {
    let mut members = Members::start(3, &["--admin-token", ADMIN]);
    let at = members.cluster.leader();
    let [down, other] = members.cluster.others(at)[..] else { panic!("two") };
    members.cluster.nodes[down].kill();
    let killed = Instant::now();
    // Until an election timeout has passed it counts as reachable.
    eventually("it is missed", || killed.elapsed() > Duration::from_secs(2));
    let leader = &members.places[at];
    let delete = |query: &str| {
        let path = format!("/v1/admin/voters/{}{query}", members.cluster.nodes[other].name);
        leader.ask(Ask::new("DELETE", &path).admin(ADMIN))
    };
    for query in ["", "?force=false"] {
        let refused = delete(query);
        refused.refused(400, "remove_voter_failed");
        let missing = format!("not reachable: {};", members.cluster.nodes[down].name);
        assert!(refused.text().contains(&missing), "{}", refused.text());
    }
    assert_eq!(delete("?force=true").ok()["status"], "ok");
}

#[test]
fn administration_through_a_follower() {
    let members = Members::start(3, &["--admin-token", ADMIN]);
    let follower = members.cluster.follower();
    force_release(&members.places[follower], || {
        members.cluster.nodes.iter().map(Node::output).collect::<String>()
    });
}

/// GUARANTEES 20: without a majority everything is refused or unknown, in time, and nothing is granted.
#[test]
fn without_a_majority() {
    let mut members = Members::start(3, &[]);
    let last = members.cluster.leader();
    let place = members.places[last].clone();
    let session = place.session();
    for other in members.cluster.others(last) {
        members.cluster.nodes[other].kill();
    }
    let refusal = |reply: &Reply| {
        assert_eq!(reply.status, 503, "{}", reply.text());
        let error = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(["unavailable", "unknown", "not_leader"].contains(&error.as_str()), "{error}");
    };
    refusal(&place.post("/v1/counters/c/add", &json!({ "delta": 1 })));
    refusal(&session.post("/v1/locks/k", &json!({})));
    eventually("it is not ready", || place.get("/ready").status == 503);
    assert_eq!(place.get("/ready").json()["status"], "not_ready");
    assert_eq!(place.get("/health").ok(), json!({ "status": "ok" }));
    for other in members.cluster.others(last) {
        members.cluster.nodes[other].start();
    }
    members.cluster.wait_until_ready();
    let reply = eventually("it can be read", || {
        let reply = place.get("/v1/counters/c");
        (reply.status != 503).then_some(reply)
    });
    let value = reply.ok()["value"].clone();
    assert!(value == 0 || value == 1, "{value}");
}

#[test]
fn a_witness_serves_nobody() {
    let flags = ["--election-timeout-ms", "500"];
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &flags);
    let http = cluster.more_addresses(1)[0];
    let address = ["--witness".to_owned(), "--http-port".to_owned(), http.port().to_string()];
    cluster.nodes[2].flags.extend(address);
    for node in &mut cluster.nodes {
        node.start();
    }
    for node in &cluster.nodes[..2] {
        node.wait_until_ready();
    }
    let place = Place { http, line: cluster.nodes[2].client, tls: None, bearer: None };
    for path in ["/health", "/v1/stats", "/metrics", "/v1/openapi.json"] {
        assert_eq!(place.get(path).status, 200, "{path}");
    }
    let ready = place.get("/ready");
    assert!(ready.text().contains("witness"), "{}", ready.text());
    let refused = |ask: Ask| {
        eventually("the witness refuses", || {
            let reply = place.ask(ask.clone());
            (reply.status == 503).then(|| reply.refused(503, "not_leader"))
        })
    };
    refused(Ask::new("POST", "/v1/sessions"));
    refused(Ask::post("/v1/counters/c/add", &json!({ "delta": 1 })));
    refused(Ask::get("/v1/kv/k"));
    refused(Ask::get("/v1/locks"));
    refused(Ask::get("/v1/watch?pattern=a"));
}

/// Decision 43: a node says what it is as long as it is no voter.
#[test]
fn a_learner_says_what_it_is() {
    let members = Members::start(1, &["--admin-token", ADMIN]);
    let [client, peer, http] = members.cluster.more_addresses(3)[..] else { panic!("three") };
    let api = ["--http-port".to_owned(), http.port().to_string()];
    let mut new = Node::new("new", client, peer, members.cluster.dir.path("new"), &api);
    new.start();
    let place = Place { http, line: client, tls: None, bearer: None };
    let role = || place.get("/ready").json()["role"].clone();
    eventually("it waits to be added", || role() == "joining");
    let mut operator = members.cluster.connect(0);
    let wanted = json!({
        "node": new.name,
        "peer_addr": peer.to_string(),
        "client_addr": client.to_string(),
        "reason": "a test",
    });
    let added = operator.ask("cluster", "add", &format!("{ADMIN} {wanted}"));
    assert!(added.contains(r#""done":true"#), "{added}");
    eventually("it has caught up", || place.get("/ready").status == 200);
    assert_eq!(role(), "learner");
    assert_eq!(members.places[0].get("/ready").ok(), json!({ "status": "ok" }), "a voter");
}

/// GUARANTEES 5 and 17: a waiter at a follower is granted after the leader changed.
#[test]
fn a_long_poll_outlives_the_leader() {
    let mut members = Members::start(3, &["--failover-grace", "1"]);
    let leader = members.cluster.leader();
    let [here, there] = members.cluster.others(leader)[..] else { panic!("three members") };
    let (holder, waiter) = (members.places[here].session(), members.places[there].session());
    let held = holder.lock("k");
    let mut waiting: Wire = waiter.queue("k", 1);
    members.cluster.nodes[leader].kill();
    eventually("the lock is released by the new leader", || {
        let reply = holder.post("/v1/locks/k/release", &held.proof());
        match reply.status {
            204 => Some(()),
            // Released by an attempt whose answer was not known.
            404 => Some(()),
            _ => {
                assert_eq!(reply.status, 503, "{}", reply.text());
                None
            }
        }
    });
    let reply = waiting.try_reply(Duration::from_secs(60)).expect("an answer");
    assert!(Grant::of(reply.ok()).fence > held.fence);
}

/// A client behind a balancer: its long poll is at one member, its next request comes to another. GUARANTEES 18: gone
/// is gone for ever, and a session that is used elsewhere is not; nothing is left that nobody was told of.
#[test]
fn a_long_poll_here_and_a_ping_there() {
    let members = Members::start(3, &[]);
    let [here, there, other] = [0, 1, 2].map(|number| &members.places[number]);
    let (holder, session) = (other.session(), here.session());
    let held = holder.lock("k");
    let mut waiting = session.queue("k", 1);
    let moved = at(&session, there);
    moved.ping().empty();
    moved.lock_and_unlock("free");
    holder.unlock("k", &held);
    let told = waiting.reply();
    if told.status == 200 {
        moved.unlock("k", &Grant::of(told.json()));
    } else {
        told.refused(503, "unavailable");
    }
    holder.take("/v1/locks/k", &json!({ "acquire_timeout_s": 10 }));
    moved.end().empty();
}
