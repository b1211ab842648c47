//! The connections between members: somebody on the path, members of the program before, and what the leader writes
//! down of what others are asked.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use dflockd_engine::transport::handshake::{Hello, Identity, Lane, Message, Mode, Version, parse};
use dflockd_replica::admin::AdminRequest;
use dflockd_replica::codec::{Frame, pack};
use dflockd_testkit::cluster::{Addresses, NAMES};
use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::line::ANSWER;
use dflockd_testkit::peers::Proxy;
use dflockd_testkit::{Cluster, Turn, eventually};
use serde_json::json;

use super::operate::{ADMIN, operate};

/// What makes a process one of the program before, and what one of a program that may leave it behind.
const BEFORE: (&str, &str) = ("DFLOCKD_CLUSTER_VERSION_MAX", "1-unsealed");
const NEXT: (&str, &str) = ("DFLOCKD_CLUSTER_VERSION_MAX", "2");

fn bad_frames(http: SocketAddr) -> f64 {
    Wire::open(http, None).ask(&Ask::get("/metrics")).metric("dflockd_raft_bad_frames_total")
}

/// GUARANTEES 48: who can write into a connection between members, and knows no secret, removes nobody from the
/// cluster: the connection ends, the leader counts it, and all goes on.
#[test]
fn an_injected_request_changes_nothing() {
    let flags = [&ADMIN[..], &["--election-timeout-ms", "1000"]].concat();
    let mut addresses = Addresses::free(3);
    let proxy = Proxy::between(&mut addresses);
    let mut cluster = Cluster::prepare_at(Turn::shared(), &addresses, &flags);
    let http = cluster.add_api("--http-port");
    cluster.start_all();
    let leader = cluster.leader();
    let [through, victim] = cluster.others(leader)[..] else { panic!("three members") };
    assert_eq!(http.iter().map(|http| bad_frames(*http)).sum::<f64>(), 0.0);
    let request = pack(&AdminRequest::Remove { node: NAMES[victim].to_owned() }).into();
    proxy.inject(through, leader, &Frame::Admin { id: 77, request }.encode());
    eventually("it is sent", || proxy.has_injected());
    eventually("it is counted", || bad_frames(http[leader]) == 1.0);
    let output = cluster.nodes[leader].output();
    assert!(output.contains("refused a frame") && output.contains(NAMES[through]), "{output}");
    // Everybody is still there, and agrees with everybody else.
    for at in 0..3 {
        cluster.nodes[at].wait_until_ready();
        let mut client = cluster.connect(at);
        client.check("kset", &format!("key-{at}"), "value", "ok");
        let status = cluster.nodes[at].status().unwrap();
        assert_eq!(status["voters"].as_array().map(Vec::len), Some(3), "{status}");
    }
}

/// GUARANTEES 48: a change of the membership that was asked of a follower is written down at the leader, too.
#[test]
fn what_a_follower_is_asked_is_audited_at_the_leader() {
    let cluster = Cluster::start(3, &ADMIN);
    let leader = cluster.leader();
    let [asked, victim] = cluster.others(leader)[..] else { panic!("three members") };
    let mut client = cluster.connect(asked);
    operate(&mut client, "remove", json!({ "node": NAMES[victim] }));
    let line = eventually("a line at the leader", || {
        let output = cluster.nodes[leader].output();
        let mut lines = output.lines().filter(|line| line.contains("audit=true"));
        lines.find(|line| line.contains("as another member was asked to")).map(str::to_owned)
    });
    for part in [format!("member {}", NAMES[asked]), NAMES[victim].to_owned()] {
        assert!(line.contains(&part), "{line}");
    }
    assert!(line.contains("remove") && line.contains("done=true"), "{line}");
    // Who asked, and why, stands where it was asked.
    eventually("a line where it was asked", || {
        let output = cluster.nodes[asked].output();
        output.contains("cluster changed by an operator")
    });
}

/// The version of the peer protocol that a member speaks with one that asks for version 1.
fn answered_version(peer: &str) -> Version {
    let hello = Message::Hello(Hello {
        version: Version::Plain,
        mode: Mode { tls: false, secret: true },
        lane: Lane::Main,
        nonce: [1; 32],
        identity: Identity {
            cluster: None,
            node: "somebody".to_owned(),
            raft_id: 0,
            disk: 1,
            witness: false,
            version: 1,
        },
        target: NAMES[1].to_owned(),
    })
    .print();
    let mut socket = TcpStream::connect(peer).unwrap();
    socket.set_read_timeout(Some(ANSWER)).unwrap();
    socket.write_all(&u32::try_from(hello.len()).unwrap().to_le_bytes()).unwrap();
    socket.write_all(&hello).unwrap();
    let mut length = [0; 4];
    socket.read_exact(&mut length).unwrap();
    let mut answer = vec![0; usize::try_from(u32::from_le_bytes(length)).unwrap()];
    socket.read_exact(&mut answer).unwrap();
    let Ok(Message::Challenge(challenge)) = parse(&answer) else { panic!("{answer:?}") };
    challenge.version
}

/// GUARANTEES 42, 48: a member of the program before, which seals nothing, and members of this one are a cluster; when
/// that program is left behind for good, nobody speaks its peer protocol any more.
#[test]
fn the_program_before_is_spoken_with_until_it_is_left_behind() {
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &ADMIN);
    for (node, variable) in cluster.nodes.iter_mut().zip([BEFORE, NEXT, NEXT]) {
        node.variable = Some(variable);
        node.start();
    }
    cluster.wait_until_ready();
    for at in 0..3 {
        cluster.connect(at).check("kset", &format!("key-{at}"), "value", "ok");
    }
    let at = cluster.nodes[1].flags.iter().position(|flag| flag == "--raft-addr").unwrap();
    let peer = cluster.nodes[1].flags[at + 1].clone();
    assert_eq!(answered_version(&peer), Version::Plain);

    cluster.nodes[0].terminate();
    cluster.nodes[0].variable = Some(NEXT);
    cluster.nodes[0].start();
    cluster.wait_until_ready();
    eventually("all of them read the next version, and use it", || {
        let mut client = cluster.connect(cluster.leader());
        let wanted = json!({ "reason": "a test" });
        let answer = super::operate::answer(&mut client, "finalize", &wanted);
        answer["done"] == true
    });
    eventually("version 1 of the peer protocol is gone", || {
        answered_version(&peer) == Version::Sealed
    });
    cluster.wait_until_ready();
    for at in 0..3 {
        cluster.connect(at).check("kget", &format!("key-{at}"), "", "ok value");
    }
}
