//! Leases end on time.

use std::time::{Duration, Instant};

use dflockd_testkit::{Client, Server, eventually, granted, millis};

fn in_millis(server: &Server) -> Client {
    let mut client = server.connect();
    client.check("hello", "test", "ms", "ok ms");
    client
}

/// GUARANTEES 11 and 12.
#[test]
fn a_lease_ends_at_its_deadline() {
    let server = Server::start::<&str>(&[]);
    let (mut holder, mut waiter) = (in_millis(&server), in_millis(&server));
    let lease = millis(150);
    let mut late = Duration::ZERO;
    let rounds = 12;
    for round in 0..rounds {
        let key = format!("k{round}");
        let asked_at = Instant::now();
        let token = holder.lock(&key, "0 150");
        let granted_at = Instant::now();
        let next = granted(&waiter.ask("l", &key, "20000 1000"));
        let passed_at = Instant::now();
        assert!(passed_at - asked_at >= lease, "early: {:?}", passed_at - asked_at);
        late += (passed_at - granted_at).saturating_sub(lease);
        holder.check("n", &key, &token, "error");
        holder.check("r", &key, &token, "error");
        waiter.check("r", &key, &next, "ok");
    }
    println!("leases end {:?} after their deadline on average", late / rounds);
    assert!(late / rounds <= millis(300), "late by {:?} on average", late / rounds);
}

#[test]
fn a_renewal_counts_from_the_renewal() {
    let server = Server::start::<&str>(&[]);
    let (mut holder, mut waiter) = (in_millis(&server), in_millis(&server));
    let token = holder.lock("k", "0 5000");
    waiter.begin("l", "k", "20000");
    let mut renewed_at = Instant::now();
    for _ in 0..5 {
        renewed_at = Instant::now();
        holder.check("n", "k", &format!("{token} 2000"), "ok 2000");
        waiter.expect_silence(millis(100));
    }
    // Also a renewal that shortens it.
    let shortened_at = Instant::now();
    holder.check("n", "k", &format!("{token} 200"), "ok 200");
    granted(&waiter.line());
    assert!(shortened_at.elapsed() >= millis(200));
    assert!(renewed_at.elapsed() < millis(2000), "the shorter lease does not count");
}

#[test]
fn many_leases_end_at_once() {
    let server = Server::start(&["--max-locks", "5000"]);
    let (mut holder, mut witness) = (in_millis(&server), in_millis(&server));
    let requests: String = (0..4000).map(|n| format!("l\nk{n}\n0 1000\n")).collect();
    holder.send(requests);
    for _ in 0..4000 {
        granted(&holder.line());
    }
    let granted_at = Instant::now();
    granted(&witness.ask("l", "k3999", "20000 60000"));
    // Others may end in the same instant, a moment later.
    eventually("only one is left", || witness.stats()["locks"].as_array().unwrap().len() == 1);
    let late = granted_at.elapsed().saturating_sub(millis(1000));
    assert!(late <= millis(2000), "{late:?}");
    witness.check("ping", "_", "_", "ok");
}

#[test]
fn whole_seconds_without_the_handshake() {
    let server = Server::start(&["--default-lease-ttl", "1"]);
    let [mut holder, mut waiter] = std::array::from_fn(|_| server.connect());
    let begun = Instant::now();
    let answer = holder.ask("l", "k", "0");
    assert!(answer.ends_with(" 1"), "{answer}");
    granted(&waiter.ask("l", "k", "20"));
    assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
    assert!(begun.elapsed() < millis(10_000), "{:?}", begun.elapsed());
}
