//! The member that a client talks to dies, stops, is cut off or is restarted (promises 17, 19, 21).

use std::time::Duration;

use dflockd_client::{Client, Guard, Instant};
use dflockd_testkit::cluster::Addresses;
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::peers::Proxy;
use tokio::task::JoinHandle;

use super::super::proxy::Proxy as Wire;
use super::super::server::crowded;
use super::nodes::{LEASE, Nodes, held, moved_from, node_of};

/// A wait that blocks, once it is known to be in the queue.
async fn waiting(client: &Client, key: &str, looker: &Client) -> JoinHandle<Guard> {
    let lock = client.lock(key);
    let wait = tokio::spawn(async move { lock.acquire().await.unwrap() });
    crowded(looker, key, (1, 1)).await;
    wait
}

/// Held by one client, waited for by a second one.
struct Pair {
    holder: Client,
    waiter: Client,
    guard: Guard,
    wait: JoinHandle<Guard>,
}

impl Pair {
    async fn new(nodes: &Nodes, key: &str) -> Self {
        let (holder, waiter) = (nodes.client("holder").await, nodes.client("waiter").await);
        Self::of(holder, waiter, key).await
    }

    async fn of(holder: Client, waiter: Client, key: &str) -> Self {
        let guard = held(&holder, key).await;
        let wait = waiting(&waiter, key, &holder).await;
        Self { holder, waiter, guard, wait }
    }

    /// The guard is what it was, and the waiter is next.
    async fn check(self) {
        let Self { guard, wait, .. } = self;
        soon("a renewal", guard.renew()).await.unwrap();
        assert!(guard.is_valid() && !wait.is_finished());
        let fence = guard.fence();
        soon("the release", guard.release()).await.unwrap();
        let next = soon("the waiter's turn", wait).await.unwrap();
        assert!(next.is_valid() && next.fence() > fence);
        soon("the release", next.release()).await.unwrap();
    }
}

/// Kills the member of the holder, that of the waiter, and the leader.
async fn members_are_killed(nodes: &mut Nodes, connect: impl AsyncFn(&Nodes) -> Client) {
    for round in 0..3 {
        let (holder, waiter) = (connect(nodes).await, connect(nodes).await);
        let pair = Pair::of(holder, waiter, &format!("k-{round}")).await;
        let (session, fence) = (pair.holder.session(), pair.guard.fence());
        let at = match round {
            0 => node_of(&pair.holder).await,
            1 => node_of(&pair.waiter).await,
            _ => nodes.leader(),
        };
        nodes.kill(at);
        moved_from(&pair.holder, at).await;
        moved_from(&pair.waiter, at).await;
        assert_eq!((pair.holder.session(), pair.guard.fence()), (session, fence));
        pair.check().await;
        nodes.restart(at);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_member_of_a_client_is_killed() {
    let mut nodes = Nodes::start(&[]);
    members_are_killed(&mut nodes, async |nodes| nodes.client("lines").await).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_member_of_a_client_by_grpc_is_killed() {
    let mut nodes = Nodes::start(&[]);
    let connect = async |nodes: &Nodes| nodes.grpc_builder().connect().await.unwrap();
    members_are_killed(&mut nodes, connect).await;
}

/// A stopped process accepts connections and says nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_member_of_a_client_is_stopped() {
    let mut nodes = Nodes::start(&[]);
    // One of them is at the leader, whose silence is the worst.
    let holder = nodes.builder().prefer_leader(true).connect().await.unwrap();
    let pair = Pair::of(holder, nodes.client("waiter").await, "k").await;
    let leader = nodes.leader();
    moved_from(&pair.holder, (leader + 1) % 3).await;
    nodes.signal(leader, "STOP");
    moved_from(&pair.holder, leader).await;
    moved_from(&pair.waiter, leader).await;
    soon("a renewal", pair.guard.renew()).await.unwrap();
    nodes.signal(leader, "CONT");
    nodes.wait_until_ready();
    pair.check().await;
}

/// A member that has lost the others answers, but can not do anything. One of the clients only waits, and sends
/// nothing by itself.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_member_of_a_client_is_cut_off_from_the_others() {
    let mut addresses = Addresses::free(3);
    let network = Proxy::between(&mut addresses);
    let nodes = Nodes::start_at(addresses, &[]);
    let pair = Pair::new(&nodes, "k").await;
    let others = |at: usize| [(at + 1) % 3, (at + 2) % 3];
    let at = node_of(&pair.waiter).await;
    network.isolate(at, &others(at));
    moved_from(&pair.waiter, at).await;
    moved_from(&pair.holder, at).await;
    soon("a renewal", pair.guard.renew()).await.unwrap();
    network.heal();
    nodes.wait_until_ready();
    // Whatever the member had not passed on does no harm now.
    let at = node_of(&pair.holder).await;
    network.isolate(at, &others(at));
    moved_from(&pair.holder, at).await;
    network.heal();
    nodes.wait_until_ready();
    pair.check().await;
}

/// Something between each member and its clients.
async fn wires_before(addresses: &mut Addresses) -> Vec<Wire> {
    let mut wires = Vec::new();
    for (client, advertised) in addresses.clients.iter().zip(&mut addresses.advertised) {
        let wire = Wire::to(*client).await;
        *advertised = wire.address;
        wires.push(wire);
    }
    wires
}

/// An attempt to attach at a member that is cut off is executed when that member is back, and takes the session away
/// from where it is by then. That is no loss.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_attempt_to_attach_comes_late() {
    let mut addresses = Addresses::free(3);
    let network = Proxy::between(&mut addresses);
    let wires = wires_before(&mut addresses).await;
    let nodes = Nodes::start_at(addresses, &[]);
    let pair = Pair::new(&nodes, "k").await;
    let session = pair.holder.session();
    let away = nodes.leader();
    let others = [(away + 1) % 3, (away + 2) % 3];
    network.isolate(away, &others);
    // The only member that can be reached is the one that is cut off.
    for at in others {
        wires[at].refuse(true);
    }
    let before = wires[away].connections();
    wires.iter().for_each(Wire::cut);
    let tried = async || wires[away].connections() > before + 1;
    eventually("both clients have tried", tried).await;
    // Longer than a greeting may take: the attempts are given up, but not forgotten.
    tokio::time::sleep(Duration::from_millis(3_500)).await;
    for at in others {
        wires[at].refuse(false);
    }
    moved_from(&pair.holder, away).await;
    moved_from(&pair.waiter, away).await;
    soon("a renewal", pair.guard.renew()).await.unwrap();
    let connections = || wires.iter().map(Wire::connections).sum::<usize>();
    let before = connections();
    network.heal();
    nodes.wait_until_ready();
    // It comes unless the others have given the member up meanwhile.
    let begun = Instant::now();
    while connections() == before && begun.elapsed() < Duration::from_secs(3) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    println!("{} connections more", connections() - before);
    soon("a renewal", pair.guard.renew()).await.unwrap();
    assert_eq!(pair.holder.session(), session);
    pair.check().await;
}

/// The network between the client and its member breaks, in silence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_is_cut_off_from_its_member() {
    let mut addresses = Addresses::free(3);
    let wires = wires_before(&mut addresses).await;
    let nodes = Nodes::start_at(addresses, &[]);
    let pair = Pair::new(&nodes, "k").await;
    for _ in 0..2 {
        let at = node_of(&pair.holder).await;
        wires[at].hang();
        moved_from(&pair.holder, at).await;
        soon("a renewal", pair.guard.renew()).await.unwrap();
    }
    pair.check().await;
}

/// SIGTERM, one after the other: the leader hands over, and no session notices more than a pause.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rolling_restart_loses_no_guard() {
    let mut nodes = Nodes::start(&[]);
    let client = nodes.client("holder").await;
    let mut guards = Vec::new();
    for number in 0..30 {
        guards.push(held(&client, &format!("mine-{number}")).await);
    }
    let pair = Pair::new(&nodes, "k").await;
    let limited = {
        let lock = pair.waiter.lock("k");
        tokio::spawn(async move { lock.acquire_timeout(Duration::from_secs(60)).await.unwrap() })
    };
    crowded(&pair.holder, "k", (1, 2)).await;
    for at in 0..3 {
        nodes.terminate(at);
        for guard in &guards {
            assert!(guard.is_valid(), "{:?}", soon("why", guard.lost()).await);
        }
        nodes.restart(at);
    }
    assert!(!limited.is_finished(), "a wait ended before its time");
    for guard in guards {
        soon("a renewal", guard.renew()).await.unwrap();
        soon("the release", guard.release()).await.unwrap();
    }
    let Pair { guard, wait, .. } = pair;
    soon("a renewal", guard.renew()).await.unwrap();
    guard.release().await.unwrap();
    // The two are served in their order.
    let next = soon("the first waiter's turn", wait).await.unwrap();
    assert!(!limited.is_finished());
    soon("the release", next.release()).await.unwrap();
    let last = soon("the second waiter's turn", limited).await.unwrap().unwrap();
    soon("the release", last.release()).await.unwrap();
}

/// Where members do not pass requests on, clients go to the leader, and follow it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_follows_the_leader() {
    let nodes = Nodes::start(&["--follower-mode", "redirect"]);
    let pair = Pair::new(&nodes, "k").await;
    follow_the_leader(nodes, pair).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_by_grpc_follows_the_leader() {
    let nodes = Nodes::start(&["--follower-mode", "redirect"]);
    let connect = async || nodes.grpc_builder().connect().await.unwrap();
    let pair = Pair::of(connect().await, connect().await, "k").await;
    follow_the_leader(nodes, pair).await;
}

async fn follow_the_leader(mut nodes: Nodes, pair: Pair) {
    let mut signals = pair.holder.listen("news.*", None).await.unwrap();
    for _ in 0..2 {
        let leader = nodes.leader();
        assert_eq!(node_of(&pair.holder).await, leader);
        nodes.kill(leader);
        moved_from(&pair.holder, leader).await;
        nodes.restart(leader);
    }
    let before = pair.guard.valid_until();
    soon("a renewal", pair.guard.renew()).await.unwrap();
    assert!(pair.guard.valid_until() > before && pair.guard.lease() == LEASE);
    // Subscriptions follow as well; what was sent meanwhile is lost.
    let (sender, mut heard) = (pair.waiter.clone(), false);
    while !heard {
        soon("a signal", sender.signal("news.today", b"hello")).await.unwrap();
        let next = tokio::time::timeout(Duration::from_millis(200), signals.next());
        heard = next.await.is_ok_and(|signal| signal.is_some());
    }
    assert!(signals.interruptions() > 0);
    pair.check().await;
}
