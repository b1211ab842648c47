//! How a client finds the members.

use std::time::Duration;

use dflockd_client::{Client, Error};
use dflockd_testkit::cluster::NAMES;
use dflockd_testkit::eventually::tasks::soon;

use super::super::server::Process;
use super::nodes::{Nodes, held, moved_from, node_of};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_seed_is_enough() {
    let mut nodes = Nodes::start(&[]);
    let client = Client::cluster([nodes.address(0)]).await.unwrap();
    let membership = client.membership().unwrap();
    let mut names: Vec<_> = membership.members.iter().map(|it| it.node_id.as_str()).collect();
    names.sort_unstable();
    assert_eq!(names, NAMES[..3]);
    assert_eq!(membership.leader.as_deref(), Some(NAMES[nodes.leader()]));
    let guard = held(&client, "k").await;
    // The seed itself goes.
    assert_eq!(node_of(&client).await, 0);
    nodes.kill(0);
    moved_from(&client, 0).await;
    soon("a renewal", guard.renew()).await.unwrap();
    guard.release().await.unwrap();
}

/// GUARANTEES 48: to know the members costs them no look at their state, however many clients want to.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_are_learned_without_a_look_at_the_state() {
    let nodes = Nodes::start(&[]);
    let before = nodes.looks();
    for builder in [nodes.builder(), nodes.grpc_builder()] {
        for _ in 0..10 {
            let client = builder.clone().connect().await.unwrap();
            assert_eq!(client.membership().unwrap().members.len(), 3);
            held(&client, "k").await.release().await.unwrap();
        }
    }
    // One for each of the three pages that were read before.
    assert_eq!(nodes.looks() - before, 3);
    nodes.client("curious").await.stats().await.unwrap();
    assert_eq!(nodes.looks() - before, 7);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_seeds_among_good_ones() {
    let nodes = Nodes::start(&[]);
    let single = Process::start::<&str>(&[]);
    let closed = {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.local_addr().unwrap().to_string()
    };
    // Nothing answers there: no route on the loopback interface, or a packet nobody takes.
    let seeds =
        [closed.clone(), "127.0.0.1:1".to_owned(), single.address.to_string(), nodes.address(1)];
    for _ in 0..5 {
        let client = Client::cluster(seeds.clone()).await.unwrap();
        assert_eq!(client.membership().unwrap().members.len(), 3);
        held(&client, "k").await.release().await.unwrap();
    }
    // Clients spread over the members, wherever they begin.
    let mut at = std::collections::BTreeSet::new();
    for _ in 0..30 {
        at.insert(node_of(&nodes.client("spread").await).await);
    }
    assert_eq!(at.len(), 3, "{at:?}");
    for _ in 0..3 {
        let client = nodes.builder().prefer_leader(true).connect().await.unwrap();
        let leader = nodes.leader();
        moved_from(&client, (leader + 1) % 3).await;
        moved_from(&client, (leader + 2) % 3).await;
    }
    let builder = || Client::builder().connect_timeout(Duration::from_secs(1));
    let none = builder().cluster([closed]).connect().await;
    assert!(matches!(none, Err(Error::Unreachable { .. })), "{:?}", none.err());
    let single = builder().cluster([single.address.to_string()]).connect().await;
    assert!(matches!(single, Err(Error::Invalid(_))), "{:?}", single.err());
    let empty = builder().cluster(Vec::<String>::new()).connect().await;
    assert!(matches!(empty, Err(Error::Invalid(_))), "{:?}", empty.err());
}
