//! What the service `Cluster` does for operators.

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_wire::grpc::*;
use tonic::{Code, Request, Response, Status};

use super::site::{self, Link, Members, refused};

const ADMIN: &str = "adm1n-of-the-tests";

fn admin<T>(message: T) -> Request<T> {
    site::admin(ADMIN, message)
}

fn reason() -> String {
    "the tests".to_owned()
}

async fn policy(link: &Link) -> Policy {
    let told = link.cluster().policy(admin(PolicyRequest {})).await.unwrap().into_inner();
    told.policy.expect("there is one")
}

async fn set(link: &Link, set: Policy) -> Result<Response<ClusterResponse>, Status> {
    let request = SetPolicyRequest { set: Some(set), reason: reason() };
    link.cluster().set_policy(admin(request)).await
}

/// Decision 47: operators who change different settings at the same time, through different members, lose none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn settings_changed_at_once_are_all_changed() {
    let members = Members::start(3, &["--admin-token", ADMIN, "--max-locks", "70"]);
    let links = [members.link(0).await, members.link(1).await, members.link(2).await];
    let first = policy(&links[0]).await;
    assert_eq!(first.max_locks, Some(70));
    assert_eq!(first.auto_release, Some(AutoRelease::Clean.into()));
    refused(set(&links[0], Policy::default()).await, Code::InvalidArgument, Reason::BadRequest);
    for wrong in [
        Policy { max_locks: Some(0), ..Policy::default() },
        Policy { shared_key_namespace: Some(true), ..Policy::default() },
        Policy { failover_grace_s: Some(61), ..Policy::default() },
    ] {
        refused(set(&links[0], wrong).await, Code::InvalidArgument, Reason::BadRequest);
    }
    let without = SetPolicyRequest { set: Some(first), reason: reason() };
    let without = links[0].cluster().set_policy(without).await;
    refused(without, Code::PermissionDenied, Reason::NotAdmin);

    let mut expected = first;
    for round in 1..=4 {
        let number = Some(1000 + round);
        expected.max_locks = number;
        expected.max_keys = number;
        expected.max_waiters = number;
        expected.max_list_length = number;
        expected.default_lease_ttl_s = number;
        expected.orphan_ttl_s = number;
        let changes = [
            Policy { max_locks: number, ..Policy::default() },
            Policy { max_keys: number, ..Policy::default() },
            Policy { max_waiters: number, ..Policy::default() },
            Policy { max_list_length: number, ..Policy::default() },
            Policy { default_lease_ttl_s: number, ..Policy::default() },
            Policy { orphan_ttl_s: number, ..Policy::default() },
        ];
        let asked = changes.into_iter().enumerate().map(|(number, change)| {
            let link = links[number % links.len()].clone();
            tokio::spawn(async move { set(&link, change).await })
        });
        let asked: Vec<_> = asked.collect();
        for asked in asked {
            soon("a change", asked).await.unwrap().unwrap();
        }
        for link in &links {
            eventually("all changes are seen", async || policy(link).await == expected).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_makes_a_snapshot() {
    let members = Members::start(3, &["--admin-token", ADMIN]);
    let without = members.link(0).await.cluster().snapshot(SnapshotRequest::default()).await;
    refused(without, Code::PermissionDenied, Reason::NotAdmin);
    for at in 0..3 {
        let link = members.link(at).await;
        let session = link.open(0).await;
        let mut last = 0;
        for round in 0..3 {
            let held = session.lock("k").await;
            let request =
                SnapshotRequest { reason: if round == 0 { String::new() } else { reason() } };
            let made = link.cluster().snapshot(admin(request)).await.unwrap().into_inner();
            assert!(made.index > last, "{} after {last}", made.index);
            last = made.index;
            session.unlock("k", &held).await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_dialed_elsewhere() {
    let members = Members::start(3, &["--admin-token", ADMIN]);
    let link = members.link(0).await;
    let told = link.cluster().members(MembersRequest {}).await.unwrap().into_inner().members;
    let address = |node: &str, peer_addr: &str| {
        let (node, peer_addr) = (node.to_owned(), peer_addr.to_owned());
        admin(AddressRequest { node, peer_addr, reason: reason() })
    };
    let mut cluster = link.cluster();
    let taken = cluster.address(address("node-b", &told[2].peer_addr)).await;
    refused(taken, Code::FailedPrecondition, Reason::ClusterRefused);
    let nobody = cluster.address(address("node-x", "127.0.0.1:1")).await;
    refused(nobody, Code::FailedPrecondition, Reason::ClusterRefused);
    let nowhere = cluster.address(address("node-b", "nowhere")).await;
    refused(nowhere, Code::InvalidArgument, Reason::BadRequest);
    // Where it already is; then somewhere else, where nobody answers, and back.
    cluster.address(address("node-b", &told[1].peer_addr)).await.unwrap();
    let moved = "127.0.0.1:1";
    cluster.address(address("node-b", moved)).await.unwrap();
    eventually("all know", async || {
        let told = link.cluster().members(MembersRequest {}).await.unwrap().into_inner().members;
        told[1].peer_addr == moved
    })
    .await;
    cluster.address(address("node-b", &told[1].peer_addr)).await.unwrap();
    let finalize = |reason: String| admin(FinalizeRequest { reason });
    cluster.finalize(finalize(reason())).await.unwrap();
    let unfounded = cluster.finalize(finalize(String::new())).await;
    refused(unfounded, Code::InvalidArgument, Reason::BadRequest);
}

/// Promise 41: a member that is drained does not lead, until that is taken back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_is_drained() {
    let members = Members::start(3, &["--admin-token", ADMIN]);
    let drain = |undo| admin(DrainRequest { undo, reason: reason() });
    let leader = members.cluster.leader();
    let link = members.link(leader).await;
    let mut health = link.cluster().health(HealthRequest {}).await.unwrap().into_inner();
    link.cluster().drain(drain(false)).await.unwrap();
    let drained = &members.cluster.nodes[leader].name;
    loop {
        let now = soon("another leader", health.message()).await.unwrap().unwrap();
        if now.ready && !now.leader.is_empty() && now.leader != *drained {
            break;
        }
    }
    link.cluster().drain(drain(true)).await.unwrap();
    let alone = Members::start(1, &["--admin-token", ADMIN]);
    let refusal = alone.link(0).await.cluster().drain(drain(false)).await;
    refused(refusal, Code::FailedPrecondition, Reason::ClusterRefused);
}
