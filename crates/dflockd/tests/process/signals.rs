//! SIGTERM, SIGINT and SIGHUP.

use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflockd_testkit::{A_WHILE, Client, Dir, Heard, Pair, Server, eventually, granted, millis};

use super::both::TlsServer;

/// Waits until nobody can connect any more.
fn wait_for_closed_listener(server: &Server) {
    eventually("the listener is closed", || TcpStream::connect(server.address).err());
}

fn drains(signal: &str) {
    let mut server = Server::start(&["--shutdown-timeout", "60"]);
    let [mut holder, mut other, mut idle, mut waiter, mut popper, mut claimer] =
        std::array::from_fn(|_| server.connect());
    let token = holder.lock("k", "0 600");
    other.lock("other", "0 600");
    idle.check("listen", "jobs/*", "", "ok");
    waiter.begin("l", "k", "60");
    idle.wait_for_waiters("k", 1);
    claimer.check("e", "k", "", "queued");
    claimer.begin("w", "k", "60");
    popper.begin("blpop", "q", "60");
    idle.wait_for_waiters("k", 2);
    eventually("somebody pops", || idle.stats()["lists"][0]["pop_waiters"] == 1);

    server.signal(signal);
    for blocked in [&mut waiter, &mut popper, &mut claimer] {
        blocked.expect_last("error_draining");
    }
    wait_for_closed_listener(&server);
    server.wait_for_output("msg=\"shutting down\"");

    // Who neither holds nor waits for anything goes at once. Holders stay until they go, or ask for something.
    idle.expect_end();
    holder.expect_silence(A_WHILE);
    other.expect_silence(millis(1));
    assert_eq!(other.ask("ping", "_", "_"), "error_draining");
    other.expect_end();
    holder.expect_silence(millis(1));
    assert!(server.is_running());
    assert_eq!(holder.ask("r", "k", &token), "error_draining");
    holder.expect_end();
    assert_eq!(server.wait_for_end().code(), Some(0));
}

#[test]
fn sigterm_drains() {
    drains("TERM");
}

#[test]
fn sigint_drains() {
    drains("INT");
}

#[test]
fn the_last_connection_that_leaves_ends_the_drain() {
    let mut server = Server::start(&["--shutdown-timeout", "0"]);
    let mut clients: Vec<_> = (0..3).map(|_| server.connect()).collect();
    for (key, client) in ["a", "b", "c"].iter().zip(&mut clients) {
        client.lock(key, "0 600");
    }
    server.signal("TERM");
    wait_for_closed_listener(&server);
    while let Some(mut client) = clients.pop() {
        client.expect_silence(millis(50));
        assert!(server.is_running());
    }
    assert_eq!(server.wait_for_end().code(), Some(0));
}

#[test]
fn without_connections_the_end_is_immediate() {
    let mut server = Server::start(&["--shutdown-timeout", "60"]);
    let begun = Instant::now();
    server.terminate();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
}

#[test]
fn the_shutdown_timeout_ends_the_drain() {
    let mut server = Server::start(&["--shutdown-timeout", "1"]);
    let mut idle = server.connect();
    idle.lock("k", "0 600");
    let begun = Instant::now();
    server.signal("TERM");
    idle.expect_end();
    assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
    assert_eq!(server.wait_for_end().code(), Some(0));
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert!(server.output().contains("level=WARN msg=\"forced close\""), "{}", server.output());
}

#[test]
fn a_second_signal_ends_the_drain() {
    for second in ["TERM", "INT"] {
        let mut server = Server::start(&["--shutdown-timeout", "600"]);
        let mut idle = server.connect();
        idle.lock("k", "0 600");
        server.signal("TERM");
        wait_for_closed_listener(&server);
        idle.expect_silence(A_WHILE);
        assert!(server.is_running());
        server.signal(second);
        idle.expect_end();
        assert_eq!(server.wait_for_end().code(), Some(0));
    }
}

#[test]
fn a_reload_during_the_drain_does_not_end_it() {
    let mut server = Server::start(&["--shutdown-timeout", "600"]);
    let mut idle = server.connect();
    idle.lock("k", "0 600");
    server.signal("TERM");
    wait_for_closed_listener(&server);
    server.signal("HUP");
    idle.expect_silence(A_WHILE);
    assert!(server.is_running());
    drop(idle);
    assert_eq!(server.wait_for_end().code(), Some(0));
}

#[test]
fn a_reload_without_files_changes_nothing() {
    let mut server = Server::start(&["--auth-token", "t"]);
    let mut client = server.login("t");
    server.signal("HUP");
    server.signal("HUP");
    client.check("ping", "_", "_", "ok");
    server.login("t");
    assert!(server.is_running());
}

#[test]
fn the_certificate_is_reloaded() {
    let TlsServer { server, dir, config, pair: old, .. } = TlsServer::start(&[]);
    let connect = |config| Client::over_tls(server.socket(), Arc::clone(config));
    let (mut before, facts) = connect(&config).unwrap();
    let token = before.lock("k", "0 600");

    let new = Pair::new();
    new.flags(&dir);
    let new_config = new.client();
    server.signal("HUP");
    let (mut after, new_facts) = eventually("the new certificate", || connect(&new_config).ok());
    assert_ne!(facts.chain, new_facts.chain);
    assert!(connect(&config).is_err(), "the old certificate is still in use");
    after.check("ping", "_", "_", "ok");
    before.check("r", "k", &token, "ok");

    // A pair that does not fit is not taken.
    dir.write("key.pem", &old.key);
    server.signal("HUP");
    server.wait_for_output("certificate not reloaded");
    connect(&new_config).unwrap();
    before.check("ping", "_", "_", "ok");
}

#[test]
fn the_auth_token_file_is_reloaded() {
    let dir = Dir::new();
    let file = dir.write("token", " first \n");
    let server = Server::start(&["--auth-token-file", &file, "--auth-failure-rate-per-ip", "0"]);
    let mut before = server.login("first");
    before.lock("k", "0 600");
    let login = |token: &str| {
        let mut client = server.connect();
        (client.ask("auth", "_", token) == "ok").then_some(client)
    };
    dir.write("token", "second");
    server.signal("HUP");
    let mut after = eventually("the new token", || login("second"));
    assert!(login("first").is_none(), "the old token is still good");
    // What came with it went with it.
    before.expect_last("error_auth");
    let token = granted(&after.ask("l", "k", "20 600"));

    for unusable in ["missing", "empty", "three lines"] {
        match unusable {
            "missing" => std::fs::remove_file(&file).unwrap(),
            "empty" => drop(dir.write("token", " \n")),
            _ => drop(dir.write("token", "a\nb\nc")),
        }
        let count = server.output().matches("auth token not reloaded").count();
        server.signal("HUP");
        eventually(unusable, || server.output().matches("auth token not reloaded").count() > count);
        assert!(login("second").is_some(), "{unusable}");
        assert!(login("").is_none(), "{unusable}");
        let mut unknown = server.connect();
        unknown.check("ping", "_", "_", "error_auth");
    }
    after.check("r", "k", &token, "ok");
}

#[test]
fn the_admin_token_file_is_reloaded() {
    let dir = Dir::new();
    let file = dir.write("token", "first");
    let server = Server::start(&["--admin-token-file", &file, "--auth-failure-rate-per-ip", "0"]);
    let mut holder = server.connect();
    let token = holder.lock("k", "0 600");
    let fence = dflockd_testkit::fence(&token);
    dir.write("token", "second");
    server.signal("HUP");
    let arg = |token| format!("{token} lock {fence} because");
    eventually("the new token", || {
        server.connect().ask("force-release", "k", &arg("second")) == "ok"
    });
    let mut old = server.connect();
    old.check("force-release", "k", &arg("first"), "error_auth");
    assert_eq!(old.hear(dflockd_testkit::LIMIT), Heard::End);
    granted(&holder.ask("l", "k", "0"));
}
