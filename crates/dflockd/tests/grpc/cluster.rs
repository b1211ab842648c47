//! Three members: sessions that work through each of them, the loss of one, membership.

use dflockd_testkit::Node;
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_wire::grpc::*;
use tonic::{Code, Request};

use super::site::{self, Link, Members, refused};

const ADMIN: &str = "adm1n-of-the-tests";

/// Promises 17, 19 and 21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_works_through_every_member() {
    let members = Members::start(3, &[]);
    let links = [members.link(0).await, members.link(1).await, members.link(2).await];
    let session = links[0].open(10_000).await;
    let held = session.lock("k").await;
    let add = |request_id| AddCounterRequest {
        session: session.id.clone(),
        request_id,
        key: "c".into(),
        delta: 1,
        ..Default::default()
    };
    for link in &links {
        let there = session.through(link);
        assert_eq!(there.keep_alive().await.unwrap().renewed, 1);
        let value = link.counters().add(add(1)).await.unwrap().into_inner().value;
        assert_eq!(value, 1, "promise 19");
    }
    // It waits here with a number, moves, and gets its turn there.
    let other = links[2].open(10_000).await;
    let theirs = other.lock("two").await;
    let request = AcquireRequest { request_id: 2, ..session.request("two", 60_000) };
    let here = session.begin(request.clone());
    links[0].wait_for_waiters("two", 1).await;
    let attach = AttachRequest {
        session: session.id.clone(),
        client_name: "moved".into(),
        tell_last_request_id: true,
    };
    let attached = links[1].sessions().attach(attach).await.unwrap().into_inner();
    assert_eq!((attached.number, attached.ttl_ms), (session.number, 10_000));
    assert_eq!(attached.last_request_id, Some(2), "the one that waits");
    // The call that is left behind does nothing any more.
    let left = soon("the end of the old call", here).await.unwrap();
    refused(left, Code::NotFound, Reason::SessionGone);
    let there = session.through(&links[1]).begin(request);
    assert_eq!(links[1].describe("two").await.unwrap().waiters_total, 1, "its place is kept");
    other.unlock("two", &theirs).await.unwrap();
    let granted = soon("its turn", there).await.unwrap().unwrap().expect("granted");
    assert!(granted.fence > theirs.fence);
    session.through(&links[2]).close().await.unwrap();
    for link in &links {
        let gone = session.through(link).keep_alive().await;
        refused(gone, Code::NotFound, Reason::SessionGone);
    }
    let next = other.lock("k").await;
    assert!(next.fence > held.fence, "promise 18");
}

/// A call without a number whose session moves on is withdrawn: no lock is left with nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_left_behind_is_withdrawn() {
    let members = Members::start(3, &[]);
    let (here, there) = (members.link(0).await, members.link(1).await);
    let (session, other) = (here.open(10_000).await, there.open(10_000).await);
    let held = other.lock("k").await;
    let call = session.begin(session.request("k", 60_000));
    there.wait_for_waiters("k", 1).await;
    session.through(&there).keep_alive().await.unwrap();
    refused(soon("its end", call).await.unwrap(), Code::NotFound, Reason::SessionGone);
    there.wait_for_waiters("k", 0).await;
    other.unlock("k", &held).await.unwrap();
    session.through(&there).lock("k").await;
}

/// Promise 17: the leader is killed; locks, places and answers are not lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_outlives_its_member() {
    let mut members = Members::start(3, &[]);
    let leader = members.cluster.leader();
    let survivor = members.cluster.others(leader)[0];
    let (lost, there) = (members.link(leader).await, members.link(survivor).await);
    let session = lost.open(15_000).await;
    let held = session.lock("k").await;
    members.cluster.nodes[leader].kill();
    let there = session.through(&there);
    let kept = eventually("a new leader", async || there.keep_alive().await.ok()).await;
    assert_eq!(kept.renewed, 1, "promise 13");
    there.unlock("k", &held).await.unwrap();
    assert!(there.lock("k").await.fence > held.fence, "promise 3");
}

fn admin<T>(message: T) -> Request<T> {
    site::admin(ADMIN, message)
}

async fn roles(link: &Link) -> Vec<(String, MemberRole)> {
    let members = link.cluster().members(MembersRequest {}).await.unwrap().into_inner().members;
    assert_eq!(members.iter().filter(|member| member.self_).count(), 1);
    members.iter().map(|member| (member.node.clone(), member.role())).collect()
}

/// Promise 41.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_come_and_go() {
    let mut members = Members::start(3, &["--admin-token", ADMIN]);
    let link = members.link(0).await;
    let reason = || "the tests".to_owned();
    let transfer = |node: &str| TransferRequest { node: node.to_owned(), reason: reason() };
    let without = link.cluster().transfer(transfer("node-b")).await;
    refused(without, Code::PermissionDenied, Reason::NotAdmin);
    let mut health = link.cluster().health(HealthRequest {}).await.unwrap().into_inner();
    for to in ["node-b", "node-c"] {
        link.cluster().transfer(admin(transfer(to))).await.unwrap();
        loop {
            let now = soon("health", health.message()).await.unwrap().unwrap();
            if now.leader == to && now.ready {
                break;
            }
        }
    }
    let unknown = link.cluster().transfer(admin(transfer("node-x"))).await;
    refused(unknown, Code::FailedPrecondition, Reason::ClusterRefused);
    let bad = link.cluster().transfer(admin(transfer("node x"))).await;
    refused(bad, Code::InvalidArgument, Reason::BadRequest);

    let [client, peer] = members.cluster.more_addresses(2)[..] else { unreachable!() };
    let dir = members.cluster.dir.path("node-d");
    let mut node = Node::new("node-d", client, peer, dir, &[]);
    node.start();
    let add = AddRequest {
        node: "node-d".into(),
        peer_addr: peer.to_string(),
        client_addr: client.to_string(),
        witness: false,
        reason: reason(),
    };
    link.cluster().add(admin(add)).await.unwrap();
    let found = roles(&link).await.into_iter().find(|(node, _)| node == "node-d");
    assert_eq!(found, Some(("node-d".to_owned(), MemberRole::Learner)));
    let promote = || PromoteRequest { node: "node-d".into(), reason: reason(), force: false };
    eventually("it has caught up", async || {
        link.cluster().promote(admin(promote())).await.ok().map(|_| ())
    })
    .await;
    let found = eventually("it votes", async || {
        let role = roles(&link).await.into_iter().find(|(node, _)| node == "node-d");
        role.filter(|(_, role)| *role == MemberRole::Voter)
    });
    found.await;
    members.cluster.nodes.push(node);
    let remove = RemoveRequest { node: "node-d".into(), reason: reason(), force: false };
    link.cluster().remove(admin(remove)).await.unwrap();
    assert_eq!(roles(&link).await.len(), 3);
    eventually("all of it is audited", async || {
        let output = members.cluster.nodes[0].output();
        let audited = output.lines().filter(|line| line.contains("cluster changed by an operator"));
        let done = audited.filter(|line| line.contains("done=true") && line.contains("the tests"));
        done.count() >= 5
    })
    .await;
}

/// Who does not forward says who leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn followers_redirect_if_told_to() {
    let members = Members::start(3, &["--follower-mode", "redirect"]);
    let leader = members.cluster.leader();
    let follower = members.link(members.cluster.others(leader)[0]).await;
    let open = OpenRequest::default;
    // Where its other APIs are is announced a moment after it is ready.
    let status = eventually("the leader's address", async || {
        let status = follower.sessions().open(open()).await.unwrap_err();
        (!site::info(&status).leader_grpc.is_empty()).then_some(status)
    })
    .await;
    let address = members.cluster.nodes[leader].client.to_string();
    assert_eq!(site::info(&status).leader, address);
    assert_eq!(site::info(&status).leader_grpc, members.grpc[leader].to_string());
    refused(Err::<(), _>(status), Code::Unavailable, Reason::NotLeader);
    members.link(leader).await.open(0).await;
    let known: Vec<_> = members.grpc.iter().map(ToString::to_string).collect();
    eventually("all addresses", async || {
        let told = follower.cluster().members(MembersRequest {}).await.unwrap().into_inner();
        let told: Vec<_> = told.members.into_iter().map(|member| member.grpc_addr).collect();
        told == known
    })
    .await;
}
