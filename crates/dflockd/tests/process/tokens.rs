//! Tokens that change, end and are guessed.

use std::net::SocketAddr;
use std::time::Instant;

use dflockd_testkit::ports::connect_from;
use dflockd_testkit::{
    Client, Dir, Heard, LIMIT, Server, command, eventually, granted, millis, run,
};

use super::both::TlsServer;

const OLD: &str = "the-token-that-was-before";
const NEW: &str = "the-token-that-comes-now";

/// A server whose token is in a file, and ways to come in.
struct Guarded {
    server: Server,
    dir: Dir,
}

impl Guarded {
    fn start(flags: &[&str]) -> Self {
        let dir = Dir::new();
        let file = dir.write("token", format!("{OLD}\n"));
        let server = Server::start(&[&["--auth-token-file", &file], flags].concat());
        Self { server, dir }
    }

    /// One node with a log on disk.
    fn durable(flags: &[&str]) -> Self {
        let dir = Dir::new();
        let (file, log) = (dir.write("token", OLD), dir.name("log"));
        let node = ["--raft-dir", &log, "--node-id", "n1", "--raft-addr", "127.0.0.1:0"];
        let all = [&node[..], &["--cluster-bootstrap", "--auth-token-file", &file], flags].concat();
        Self { server: Server::start(&all), dir }
    }

    fn login(&self, token: &str) -> Client {
        self.server.login(token)
    }

    /// Replaces the tokens, and waits until the server has read them.
    fn reload(&self, tokens: &str) {
        let reloads = || self.server.output().matches("msg=\"reloaded\"").count();
        let before = reloads();
        self.dir.write("token", tokens);
        self.server.signal("HUP");
        eventually("the reload", || reloads() > before);
    }
}

/// That a connection is told why it ends, and ends.
#[track_caller]
fn ended(mut client: Client, last: &str) {
    client.expect_last(last);
}

/// GUARANTEES 51: two tokens are good, and what came with one that is dropped ends at once.
#[test]
fn a_dropped_token_ends_what_came_with_it() {
    let guarded = Guarded::start(&[]);
    let mut holder = guarded.login(OLD);
    holder.lock("k", "0 600");
    let mut waiter = guarded.login(OLD);
    waiter.begin("l", "k", "600 600");
    let mut kept = guarded.login(OLD);
    let hello = kept.ask("hello", "me", "keep mux lost");
    let secret = hello.split("keep=").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    kept.send("1 l\nkept\n0 600\n");
    assert!(kept.line().starts_with("1 ok "));
    kept.send("2 l\nk\n600 600\n");
    // It has not said who it is.
    let mut late = guarded.server.connect();

    guarded.reload(&format!("{NEW}\n{OLD}\n"));
    let mut other = guarded.login(NEW);
    other.wait_for_waiters("k", 2);
    // The old one is still good, for those who are there and for those who come.
    holder.check("ping", "_", "_", "ok");
    let another = guarded.login(OLD);

    guarded.reload(NEW);
    ended(holder, "error_auth");
    ended(waiter, "error_auth");
    ended(kept, "0 error_auth");
    ended(another, "error_auth");
    late.check("auth", "_", OLD, "error_auth");
    other.check("ping", "_", "_", "ok");
    granted(&other.ask("l", "k", "20 600"));
    granted(&other.ask("l", "kept", "20 600"));
    // Nobody can come back for the session, not even with the new token.
    let mut thief = guarded.login(NEW);
    thief.check("hello", "me", &format!("attach={secret}"), "error");
    guarded.server.wait_for_output("its token was dropped");
}

/// GUARANTEES 51: the same on a node with a log, where kept sessions outlive the process.
#[test]
fn a_dropped_token_ends_what_came_with_it_on_a_durable_node() {
    let guarded = Guarded::durable(&["--auto-release", "any"]);
    let mut holder = guarded.login(OLD);
    holder.lock("k", "0 600");
    let mut kept = guarded.login(OLD);
    let hello = kept.ask("hello", "me", "keep mux");
    let secret = hello.split("keep=").nth(1).unwrap().split(' ').next().unwrap().to_owned();
    kept.send("1 l\nkept\n0 600\n");
    assert!(kept.line().starts_with("1 ok "));
    guarded.reload(NEW);
    ended(holder, "error_auth");
    ended(kept, "0 error_auth");
    let mut other = guarded.login(NEW);
    granted(&other.ask("l", "k", "20 600"));
    granted(&other.ask("l", "kept", "20 600"));
    let mut thief = guarded.login(NEW);
    thief.check("hello", "me", &format!("attach={secret}"), "error");
}

/// GUARANTEES 51: a kept session that nobody is attached to goes with the token it came with as well.
#[test]
fn a_dropped_token_ends_detached_sessions() {
    for guarded in [Guarded::start(&[]), Guarded::durable(&[])] {
        let keep = |token: &str, key: &str| {
            let mut kept = guarded.login(token);
            let hello = kept.ask("hello", "me", "keep");
            kept.lock(key, "0 600");
            hello.split("keep=").nth(1).unwrap().split(' ').next().unwrap().to_owned()
        };
        let (left, moved) = (keep(OLD, "left"), keep(OLD, "moved"));
        guarded.reload(&format!("{NEW}\n{OLD}\n"));
        let stays = keep(NEW, "stays");
        // This one is attached again, with the new token, and left again.
        let attach = |secret: &str| {
            let mut client = guarded.login(NEW);
            let answer = client.ask("hello", "me", &format!("attach={secret}"));
            (client, answer)
        };
        let (client, answer) = attach(&moved);
        assert!(answer.starts_with("ok attach="), "{answer}");
        drop(client);
        guarded.reload(NEW);
        let mut other = guarded.login(NEW);
        granted(&other.ask("l", "left", "20 600"));
        assert_eq!(attach(&left).1, "error");
        for secret in [&moved, &stays] {
            let (_, answer) = attach(secret);
            assert!(answer.starts_with("ok attach="), "{answer}");
        }
    }
}

/// A client that does not read why it is sent away can not keep what it has by that.
#[test]
fn a_client_that_does_not_read_ends_as_well() {
    let guarded = Guarded::start(&["--write-timeout", "0"]);
    let mut deaf = Client::over(guarded.server.narrow_socket());
    deaf.check("auth", "_", OLD, "ok");
    deaf.lock("k", "0 600");
    deaf.check("kset", "v", &"x".repeat(60_000), "ok");
    // More than the socket takes.
    deaf.send("kget\nv\n\n".repeat(200));
    guarded.reload(NEW);
    granted(&guarded.login(NEW).ask("l", "k", "20 600"));
}

#[test]
fn over_tls_too() {
    let dir = Dir::new();
    let file = dir.write("token", OLD);
    let tls = TlsServer::start(&["--auth-token-file", &file]);
    let mut before = tls.connect();
    before.check("auth", "_", OLD, "ok");
    dir.write("token", NEW);
    tls.server.signal("HUP");
    ended(before, "error_auth");
}

/// A client at another address of the loopback interface.
fn from(last: u8, to: SocketAddr) -> Client {
    Client::over(connect_from(last, to))
}

/// GUARANTEES 48: wrong tokens are limited per address; the right one waits too, others and those who are in do not.
#[test]
fn guessing_is_limited() {
    let guarded = Guarded::start(&[]);
    let server = &guarded.server;
    let mut before = guarded.login(OLD);
    let begun = Instant::now();
    // At once, from many connections, as one who guesses would.
    let mut guesses: Vec<Client> = (0..300).map(|_| server.connect()).collect();
    for guess in &mut guesses {
        guess.begin("auth", "_", "wrong");
    }
    for mut guess in guesses {
        guess.expect_last("error_auth");
    }
    server.connect().check("auth", "_", OLD, "error_auth");
    let compared = server.output().matches("msg=\"authentication failed\"").count();
    let most = 11 + usize::try_from(begun.elapsed().as_secs()).unwrap();
    assert!((10..=most).contains(&compared), "{compared} of 300 were looked at");
    before.check("ping", "_", "_", "ok");
    from(2, server.address).check("auth", "_", OLD, "ok");
    // Not for ever.
    eventually("the right token is good again", || server.connect().ask("auth", "_", OLD) == "ok");
}

/// GUARANTEES 48: the same for the admin token, whoever has the one of clients.
#[test]
fn guessing_the_admin_token_is_limited() {
    let server = Server::start(&["--admin-token", NEW]);
    for _ in 0..12 {
        server.connect().check("end-session", "1", "wrong because", "error_auth");
    }
    server.connect().check("end-session", "1", &format!("{NEW} because"), "error_auth");
    let compared = server.output().matches("msg=\"authentication failed\"").count();
    assert!(compared < 12, "{compared}");
    eventually("the right token is good again", || {
        let answer = server.connect().ask("end-session", "1", &format!("{NEW} because"));
        answer != "error_auth"
    });
}

#[test]
fn the_limit_can_be_switched_off() {
    let guarded = Guarded::start(&["--auth-failure-rate-per-ip", "0"]);
    for _ in 0..20 {
        guarded.server.connect().check("auth", "_", "wrong", "error_auth");
    }
    guarded.login(OLD);
}

/// GUARANTEES 48: a stranger gets no more room than a token needs.
#[test]
fn a_stranger_gets_little_room() {
    let server = Server::start(&["--auth-token", OLD]);
    let mut stranger = server.connect();
    let begun = Instant::now();
    stranger.send(format!("auth\n_\n{}", "x".repeat(5000)));
    stranger.expect_last("error_auth");
    // The read timeout is 23 s.
    assert!(begun.elapsed() < millis(10_000), "{:?}", begun.elapsed());
    // The longest token that there can be is still good.
    let long = "t".repeat(65_536);
    let dir = Dir::new();
    let file = dir.write("token", &long);
    let server = Server::start(&["--auth-token-file", &file]);
    server.connect().check("auth", "_", &long, "ok");
}

/// GUARANTEES 48: sessions are not guessed without end; in a cluster each attempt is an entry of the log.
#[test]
fn attaching_to_nothing_ends_the_connection() {
    let server = Server::start::<&str>(&[]);
    let mut client = server.connect();
    for _ in 0..10 {
        client.check("hello", "me", &format!("attach={}", "0".repeat(32)), "error");
    }
    assert_eq!(client.hear(LIMIT), Heard::End);
}

/// GUARANTEES 48: what can be guessed is warned about, and refused where authentication is required.
#[test]
fn weak_tokens_are_warned_about() {
    let server = Server::start(&["--auth-token", "x", "--admin-token", "x"]);
    server.wait_for_output("--auth-token: a token has fewer than 16 bytes");
    server.wait_for_output("--auth-token and --admin-token have the same token");
    let server = Server::start(&["--host", "0.0.0.0", "--auth-token", OLD]);
    server.wait_for_output("tokens go over the network in plain text: --host 0.0.0.0");
    let dir = Dir::new();
    let file = dir.write("token", OLD);
    let server = Server::start(&["--auth-token-file", &file]);
    // Written with the usual mode, 0644.
    server.wait_for_output("can be read by other users");

    let same = command(&["--require-auth", "--auth-token", OLD, "--admin-token", OLD]);
    let mut empty = command(&["--port", "0"]);
    empty.env("DFLOCKD_AUTH_TOKEN", "");
    for (refused, why) in [
        (command(&["--require-auth", "--auth-token", "x"]), "fewer than 16 bytes"),
        (same, "have the same token"),
        (empty, "DFLOCKD_AUTH_TOKEN is set but empty: unset it"),
    ] {
        run(refused).expect(1).complains(&[why]);
    }
}
