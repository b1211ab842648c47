//! Slow disks and disks that hang (promises 35, 43): a node goes on with everything that does not need its own.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dflockd_testkit::brake::Brake;
use dflockd_testkit::cluster::CALM_MS;
use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{Cluster, Turn, eventually, millis};

/// A disk that hangs.
const HUNG: Duration = Duration::from_secs(20);
/// In this time everything is answered that needs no disk. On a busy machine, most of it is waiting for a core.
const PROMPT: Duration = Duration::from_secs(2);

/// A cluster with a brake at each node.
fn start(size: usize) -> (Cluster, Vec<Brake>) {
    let (cluster, brakes, _) = start_with_http(size);
    (cluster, brakes)
}

/// A cluster with a brake at each node, and its HTTP ports.
fn start_with_http(size: usize) -> (Cluster, Vec<Brake>, Vec<SocketAddr>) {
    let calm = ["--election-timeout-ms", CALM_MS];
    let mut cluster = Cluster::prepare(Turn::alone(), size, &calm);
    let http = cluster.add_api("--http-port");
    let dir = &cluster.dir;
    let brakes = cluster.nodes.iter_mut().map(|node| Brake::fit(node, dir)).collect();
    cluster.start_all();
    (cluster, brakes, http)
}

#[test]
fn a_leader_whose_disk_hangs_goes_on_with_those_of_the_others_and_leaves() {
    let (cluster, brakes) = start(3);
    let (leader, others) = cluster.leader_and_others();
    let mut client = cluster.connect(others[0]);
    client.check("incr", "count", "1", "ok 1");

    brakes[leader].set(HUNG);
    let begun = Instant::now();
    client.check("incr", "count", "1", "ok 2");
    let first = begun.elapsed();
    let next = cluster.leader_among(&others);
    let left = begun.elapsed();
    for count in 3..=30 {
        client.check("incr", "count", "1", &format!("ok {count}"));
    }
    client.lock_and_release("held", "5 30");
    println!("answered after {first:?}, {next} leads after {left:?}");
    assert!(begun.elapsed() < millis(10_000), "they waited for the disk that hangs");
    brakes[leader].release();
}

/// Nothing that serves clients waits for a disk: while the disk of a node hangs, its own clients are answered if they
/// ask for nothing that must be durable.
fn serves_while_its_disk_hangs(cluster: &Cluster, at: usize, brake: &Brake, http: SocketAddr) {
    let (mut writer, mut other) = (cluster.connect(at), cluster.connect(at));
    other.check("ping", "_", "", "ok");
    brake.set(HUNG);
    let begun = Instant::now();
    writer.begin("incr", "hung", "1");
    let mut longest = Duration::ZERO;
    let mut prompt = |what: &str, ask: &mut dyn FnMut()| {
        let begun = Instant::now();
        ask();
        let took = begun.elapsed();
        longest = longest.max(took);
        assert!(took < PROMPT, "{what} waited for the disk: {took:?}");
    };
    for _ in 0..20 {
        prompt("ping", &mut || other.check("ping", "_", "", "ok"));
        // What a node tells of its own copy of the state, which may be a little behind.
        prompt("stats", &mut || assert!(other.ask("stats", "_", "").starts_with("ok {")));
        for path in ["/v1/stats", "/health", "/metrics"] {
            prompt(path, &mut || {
                assert_eq!(Wire::open(http, None).ask(&Ask::get(path)).status, 200)
            });
        }
        // Newcomers as well, and requests that find the sync under way.
        prompt("a newcomer", &mut || cluster.connect(at).check("ping", "_", "", "ok"));
        cluster.connect(at).begin("incr", "hung", "1");
        // On a busy machine the disk may go on before the last round, and then this would show nothing.
        if begun.elapsed() > HUNG / 2 {
            break;
        }
    }
    println!("{at} answered for {:?} while its disk hung, {longest:?} at most", begun.elapsed());
}

#[test]
fn a_single_node_whose_disk_hangs_serves_its_clients() {
    let (cluster, brakes, http) = start_with_http(1);
    serves_while_its_disk_hangs(&cluster, 0, &brakes[0], http[0]);
}

#[test]
fn members_whose_disks_hang_serve_their_clients() {
    for of_leader in [true, false] {
        let (cluster, brakes, http) = start_with_http(3);
        let (leader, others) = cluster.leader_and_others();
        let (hung, healthy) = if of_leader { (leader, others[0]) } else { (others[0], leader) };
        serves_while_its_disk_hangs(&cluster, hung, &brakes[hung], http[hung]);
        let begun = Instant::now();
        cluster.connect(healthy).check("incr", "count", "1", "ok 1");
        assert!(begun.elapsed() < millis(5000), "others waited for the disk that hangs");
    }
}

#[test]
fn slow_disks_lose_nothing_and_keep_their_leader() {
    let (mut cluster, brakes) = start(3);
    let leader = cluster.leader();
    let term = cluster.nodes[leader].status().unwrap()["term"].clone();
    for brake in &brakes {
        brake.set(millis(60));
    }
    let mut clients: Vec<_> = (0..6).map(|at| cluster.connect(at % 3)).collect();
    for round in 1..=5 {
        for (at, client) in clients.iter_mut().enumerate() {
            client.begin("incr", &format!("count-{at}"), "1");
        }
        for client in &mut clients {
            client.expect(&format!("ok {round}"));
        }
    }
    let status = cluster.nodes[leader].status().unwrap();
    assert_eq!((&status["term"], &status["role"]), (&term, &"leader".into()));

    // All that was told is on the disks, however slow.
    cluster.kill_all();
    for (node, brake) in cluster.nodes.iter_mut().zip(&brakes) {
        brake.release();
        node.start();
    }
    cluster.wait_until_ready();
    for at in 0..6 {
        let key = format!("count-{at}");
        let count = eventually("the count", || {
            let answer = cluster.connect(at % 3).ask("get", &key, "");
            answer.starts_with("ok").then_some(answer)
        });
        assert_eq!(count, "ok 5", "{key}");
    }
}
