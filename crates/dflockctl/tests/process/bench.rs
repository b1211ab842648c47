//! `bench` measures dflockd and knows no other servers.

use crate::command::{Server, ctl};

#[test]
fn two_servers_are_compared() {
    let (new, old) = (Server::start(&[]), Server::start(&[]));
    let (servers, other) = (new.address.to_string(), format!("dflockd={},name=old", old.address));
    let ran = ctl(&[
        ["bench", "--servers", &servers, "--compare", &other].as_slice(),
        &["--workload", "w2", "--connections", "4", "--seconds", "0.2", "--warmup", "0", "--json"],
    ]
    .concat())
    .run()
    .expect(0);
    let races = ran.json();
    for (side, name) in ["dflockd", "old"].into_iter().enumerate() {
        let side = &races[0]["sides"][side];
        assert_eq!(side["name"], name);
        assert!(side["rounds"][0]["ops"].as_u64().unwrap() > 0, "{side}");
    }
}

#[test]
fn other_servers_are_refused() {
    ctl(&["bench", "--target", "redis"]).run().refused(64, "grpc");
    ctl(&["bench", "--compare", "etcd=127.0.0.1:1"]).run().refused(64, "etcd");
    ctl(&["bench", "echo"]).run().refused(64, "bench --help");
}

#[test]
fn a_server_that_is_not_there_is_told() {
    let ran = ctl(&["bench", "--servers", "127.0.0.1:1"]).run().expect(69);
    assert!(ran.err.starts_with("dflockctl bench: 127.0.0.1:1"), "{ran:?}");
}
