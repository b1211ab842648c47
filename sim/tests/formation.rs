//! Two clusters of one list are formed while their nodes reach each other.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use dflockd_core::{Limits, Span};
use dflockd_engine::stepped::Stepped;
use dflockd_engine::{Chance, Clock, FirstMember, Formation, MemberOptions};
use dflockd_replica::log::LogOptions;
use dflockd_replica::types::{AutoRelease, Policy};
use dflockd_replica::version;
use dflockd_sim::disk::SimDisk;
use dflockd_sim::process::Surroundings;
use dflockd_sim::rng::Rng;

const NAMES: [&str; 3] = ["a", "b", "c"];

fn list() -> Vec<FirstMember> {
    NAMES.map(|name| (name.to_owned(), format!("{name}:1"), format!("{name}:2"))).to_vec()
}

fn start(name: &str, disk: &SimDisk, seed: u64) -> Stepped<SimDisk> {
    start_as(Formation::Static(list()), name, disk, seed)
}

fn start_as(formation: Formation, name: &str, disk: &SimDisk, seed: u64) -> Stepped<SimDisk> {
    let options = MemberOptions {
        node: name.to_owned(),
        peer_addr: format!("{name}:1"),
        client_addr: format!("{name}:2"),
        formation,
        witness: false,
        policy: Policy {
            limits: Limits::default(),
            auto_release: AutoRelease::Clean,
            orphan_ttl: Span::ZERO,
        },
        election_timeout: Duration::from_secs(1),
        heartbeat_interval: Duration::from_millis(100),
        snapshot_entries: 1000,
        version: version::NEWEST,
    };
    let (log, chance) = (LogOptions { segment_bytes: 8 << 10 }, Chance::seeded(seed));
    let host = |_: &_| Surroundings::new().host();
    Stepped::start(options, disk.clone(), log, Clock::manual(), chance, 1, host, |_| ())
        .expect("an empty directory, or one that was written before")
}

/// The data directories of the members of a cluster, in the order of their numbers.
type Disks = Vec<Option<u64>>;

/// The id of the cluster that a node takes part in, and the data directories there.
fn cluster_of(node: &Stepped<SimDisk>) -> Option<([u8; 16], Disks)> {
    node.with_replica(|replica| {
        let machine = replica.machine();
        (machine.cluster(), machine.members().values().map(|member| member.disk).collect())
    })
}

/// GUARANTEES 41: whatever the order in which the nodes of two clusters meet, and whoever is started again meanwhile or
/// with an empty directory, there is one node for each name in a cluster, and no two clusters talk to each other.
#[test]
fn clusters_that_are_formed_at_once_stay_apart() {
    let (mut formed_twice, mut formed_mixed) = (0, 0);
    for seed in 0..300 {
        let rng = &mut Rng::new(seed, 1);
        let mut disks: Vec<SimDisk> = (0..6).map(|_| SimDisk::default()).collect();
        let mut seeds = seed * 1000;
        let mut nodes: Vec<_> = disks
            .iter()
            .enumerate()
            .map(|(at, disk)| start(NAMES[at % 3], disk, seed * 1000 + 500 + at as u64))
            .collect();
        for _ in 0..rng.between(5, 60) {
            let (one, other) = (rng.index(6), rng.index(6));
            // Nodes of a cluster meet each other more often than those of the other one.
            if one % 3 != other % 3 && (one / 3 == other / 3 || rng.chance(seed % 4 * 250)) {
                let _ = nodes[one].meets(&nodes[other]);
            }
            nodes[rng.index(6)].form();
            if rng.chance(30) {
                let at = rng.index(6);
                seeds += 1;
                if nodes[at].is_forming() && rng.chance(500) {
                    disks[at] = SimDisk::default();
                } else {
                    disks[at].commit(disks[at].position());
                }
                nodes[at] = start(NAMES[at % 3], &disks[at], seeds);
            }
        }
        let mut clusters: BTreeMap<[u8; 16], (BTreeSet<usize>, Disks)> = BTreeMap::new();
        for (at, node) in nodes.iter().enumerate() {
            let Some((id, disks)) = cluster_of(node) else { continue };
            assert!(disks.iter().all(Option::is_some), "seed {seed}: all are known");
            let (members, known) = clusters.entry(id).or_insert((BTreeSet::new(), disks.clone()));
            assert_eq!(*known, disks, "seed {seed}: one id, one idea of who is who");
            let is_first = members.iter().all(|other| other % 3 != at % 3);
            assert!(is_first && members.insert(at), "seed {seed}: two are {}", NAMES[at % 3]);
        }
        for one in 0..6 {
            for other in (0..6).filter(|&other| other != one) {
                let (ours, theirs) = (cluster_of(&nodes[one]), cluster_of(&nodes[other]));
                let talks = nodes[one].meets(&nodes[other]).is_ok();
                let is_same = ours.is_some() && ours == theirs && one % 3 != other % 3;
                assert_eq!(talks, is_same, "seed {seed}: {one} and {other}");
            }
        }
        formed_twice += u32::from(clusters.len() > 1);
        let is_mixed = |members: &BTreeSet<usize>| {
            members.iter().any(|at| at / 3 == 0) && members.iter().any(|at| at / 3 == 1)
        };
        formed_mixed += u32::from(clusters.values().any(|(members, _)| is_mixed(members)));
    }
    assert!(formed_twice > 50 && formed_mixed > 10, "{formed_twice} twice, {formed_mixed} mixed");
}

/// GUARANTEES 41: a node that waits to be added is of no cluster, so any may take it in: but one only.
#[test]
fn a_node_that_waits_is_taken_in_by_one_cluster() {
    let formed = |seed: u64| {
        let nodes: Vec<_> = (0..)
            .zip(NAMES)
            .map(|(at, name)| start(name, &SimDisk::default(), seed + at))
            .collect();
        for one in 0..3 {
            for other in (0..3).filter(|&other| other != one) {
                let _ = nodes[one].meets(&nodes[other]);
            }
        }
        nodes.iter().for_each(Stepped::form);
        assert!(nodes.iter().all(|node| node.has_cluster() && cluster_of(node).is_some()));
        nodes
    };
    let (ours, theirs) = (formed(1), formed(11));
    let waits = start_as(Formation::Join, "d", &SimDisk::default(), 21);
    assert!(!waits.has_cluster() && !waits.takes_part());
    assert_eq!(ours[0].meets(&waits), Ok(()));
    assert!(waits.has_cluster() && !waits.takes_part(), "it does not know its number yet");
    assert_eq!((ours[1].meets(&waits), waits.meets(&ours[2])), (Ok(()), Ok(())));
    for other in &theirs {
        other.meets(&waits).unwrap_err();
        waits.meets(other).unwrap_err();
    }
}
