//! What identities may do over lines: every command against the table, and what a reload changes for those who are
//! there.

use std::collections::BTreeSet;

use dflockd_testkit::certificates::{Authority, showing, showing_by};
use dflockd_testkit::identities::{
    self, ALL, BILLING, KEYS, Known, Needs, OPERATOR, SCRAPER, VIEWER,
};
use dflockd_testkit::{Client, Cluster, Dir, Pair, Server, eventually, granted};
use dflockd_wire::OPS;
use rustls::version::TLS12;
use serde_json::Value;

/// A token of a hold that nobody has.
const NO_HOLD: &str = "00000000000000010000000000000002";

/// Every command: what it needs, its key (`{}` for the key of the table) and its argument.
const COMMANDS: &[(&str, Needs, &str, &str)] = &[
    ("auth", Needs::Nothing, "_", "x"),
    ("ping", Needs::Nothing, "_", ""),
    ("stats", Needs::Session, "_", ""),
    ("barrier", Needs::Session, "_", ""),
    ("stable-ref", Needs::Session, "me", ""),
    ("hello", Needs::Session, "me", ""),
    ("l", Needs::Lock, "{}", "0 5"),
    ("r", Needs::Lock, "{}", NO_HOLD),
    ("n", Needs::Lock, "{}", NO_HOLD),
    ("e", Needs::Lock, "{}", ""),
    ("w", Needs::Lock, "{}", "0"),
    ("sl", Needs::Lock, "{}", "0 2 5"),
    ("sr", Needs::Lock, "{}", NO_HOLD),
    ("sn", Needs::Lock, "{}", NO_HOLD),
    ("se", Needs::Lock, "{}", "2"),
    ("sw", Needs::Lock, "{}", "0"),
    ("rl", Needs::Lock, "{}", "0 5"),
    ("wl", Needs::Lock, "{}", "0 5"),
    ("rr", Needs::Lock, "{}", NO_HOLD),
    ("wr", Needs::Lock, "{}", NO_HOLD),
    ("rn", Needs::Lock, "{}", NO_HOLD),
    ("wn", Needs::Lock, "{}", NO_HOLD),
    ("re", Needs::Lock, "{}", ""),
    ("we", Needs::Lock, "{}", ""),
    ("rw", Needs::Lock, "{}", "0"),
    ("ww", Needs::Lock, "{}", "0"),
    ("elect", Needs::Lock, "{}", "0 5"),
    ("resign", Needs::Lock, "{}", NO_HOLD),
    ("observe", Needs::Read, "{}", ""),
    ("unobserve", Needs::Session, "{}", ""),
    ("incr", Needs::Write, "{}", "1"),
    ("decr", Needs::Write, "{}", "1"),
    ("get", Needs::Read, "{}", ""),
    ("cset", Needs::Write, "{}", "1"),
    ("kset", Needs::Write, "{}", "v"),
    ("kget", Needs::Read, "{}", ""),
    ("kdel", Needs::Write, "{}", ""),
    ("kcas", Needs::Write, "{}", "a\tb\t0"),
    ("lpush", Needs::Write, "{}", "v"),
    ("rpush", Needs::Write, "{}", "v"),
    ("lpop", Needs::Write, "{}", ""),
    ("rpop", Needs::Write, "{}", ""),
    ("llen", Needs::Read, "{}", ""),
    ("lrange", Needs::Read, "{}", "0 -1"),
    ("blpop", Needs::Write, "{}", "0"),
    ("brpop", Needs::Write, "{}", "0"),
    ("bwait", Needs::Lock, "{}", "2 0"),
    ("listen", Needs::Read, "{}/*", ""),
    ("unlisten", Needs::Session, "{}", ""),
    ("signal", Needs::Signal, "{}", "payload"),
    ("watch", Needs::Read, "{}/>", ""),
    ("unwatch", Needs::Session, "{}", ""),
    ("cancel", Needs::Session, "_", "1"),
    ("ack", Needs::Session, "_", "1"),
    ("inspect", Needs::Read, "{}", ""),
    ("ls", Needs::Session, "_", "10"),
    // Who they are for is proven by the token in them.
    ("force-release", Needs::Session, "{}", "operator-token-of-the-tests lock 1 because"),
    ("end-session", Needs::Session, "999999", "operator-token-of-the-tests because"),
    ("cluster", Needs::Session, "status", "operator-token-of-the-tests"),
];

const FORBIDDEN: &str = "error_forbidden";

/// That each identity can do with each command what the table says, and nothing else.
fn play(connect: &dyn Fn(Known) -> Client) {
    for (command, needs, key, arg) in COMMANDS {
        for known in ALL {
            for place in KEYS {
                let answer = connect(known).ask(command, &key.replace("{}", place), arg);
                let may = known.may(*needs, place);
                assert_eq!(
                    answer != FORBIDDEN,
                    may,
                    "{command} of {} with {place}: {answer}",
                    known.name
                );
                assert_ne!(answer, "error_auth", "{command} of {}", known.name);
            }
        }
    }
}

/// GUARANTEES 55: no command does more for an identity than its entry says.
#[test]
fn every_command_against_the_table() {
    let named: BTreeSet<&str> = COMMANDS.iter().map(|(command, ..)| *command).collect();
    assert_eq!(named, OPS.iter().map(|spec| spec.name).collect(), "a command without a row");
    let dir = Dir::new();
    let server = Server::start(&["--identities-file", &identities::write(&dir)]);
    play(&|known| server.login(known.token));
    server.connect().check("auth", "_", "none-of-these-tokens", "error_auth");
}

/// GUARANTEES 55: the same through a follower of a cluster.
#[test]
fn every_command_through_a_follower() {
    let dir = Dir::new();
    let file = identities::write(&dir);
    let flags = ["--identities-file", &file, "--auth-token", "the-token-of-the-test-kit"];
    let cluster = Cluster::start(3, &flags);
    let follower = cluster.follower();
    play(&|known| {
        let mut client = cluster.connect(follower);
        client.check("auth", "_", known.token, "ok");
        client
    });
}

fn server(dir: &Dir, flags: &[&str]) -> Server {
    Server::start(&[&["--identities-file", &identities::write(dir)], flags].concat())
}

fn keys(text: &str) -> Vec<String> {
    let listed: Value = serde_json::from_str(text.strip_prefix("ok ").unwrap()).unwrap();
    let key = |entry: &Value| entry["key"].as_str().unwrap().to_owned();
    listed.as_array().unwrap().iter().map(key).collect()
}

/// GUARANTEES 55: lists and statistics show the keys that an identity may read.
#[test]
fn lists_show_what_may_be_read() {
    let dir = Dir::new();
    let server = server(&dir, &[]);
    let mut operator = server.login(OPERATOR.token);
    for key in ["a", "billing/1", "billing/2", "other/1", "shared/1", "z"] {
        operator.check("kset", key, "v", "ok");
        operator.lock(key, "0 60");
    }
    operator.check("listen", "other/secret/*", "", "ok");
    let mut billing = server.login(BILLING.token);
    let both = |keys: &[&str]| {
        keys.iter().flat_map(|key| [key.to_string(), key.to_string()]).collect::<Vec<_>>()
    };
    assert_eq!(keys(&billing.ask("ls", "_", "100")), both(&["billing/1", "billing/2", "shared/1"]));
    assert_eq!(keys(&billing.ask("ls", "s", "100")), both(&["shared/1"]));
    assert_eq!(keys(&billing.ask("ls", "o", "100")), [""; 0]);
    // A page has as many as were asked for, and the next one begins behind it.
    assert_eq!(keys(&billing.ask("ls", "_", "1")), both(&["billing/1"]));
    assert_eq!(keys(&billing.ask("ls", "_", "1 billing/2")), both(&["shared/1"]));
    let stats = billing.ask("stats", "_", "");
    for shown in ["billing/1", "shared/1"] {
        assert!(stats.contains(shown), "{stats}");
    }
    for hidden in ["other/", "\"a\"", "\"z\""] {
        assert!(!stats.contains(hidden), "{hidden}: {stats}");
    }
    let stats = server.login(VIEWER.token).ask("stats", "_", "");
    assert!(stats.contains("other/secret/*") && stats.contains("\"z\""), "{stats}");
}

/// That a connection is told why it ends, perhaps after what it watches, and ends.
#[track_caller]
fn ended(mut client: Client) {
    while client.line() != "error_auth" {}
    client.expect_end();
}

/// Gives the file other content, and waits until the server has read it.
fn reload(server: &Server, dir: &Dir, text: &str) {
    let reloads = || server.output().matches("msg=\"reloaded\"").count();
    let before = reloads();
    dir.write("identities.toml", text);
    server.signal("HUP");
    eventually("the reload", || reloads() > before);
}

/// GUARANTEES 55: a holder, a waiter, a watcher and a kept session end with the token or the rights they came with, and
/// nobody else notices.
#[test]
fn a_reload_ends_what_is_no_longer_allowed() {
    for durable in [false, true] {
        let dir = Dir::new();
        let mut flags = if durable { dflockd_testkit::cluster::single(&dir) } else { Vec::new() };
        flags.extend(
            durable.then(|| ["--auto-release", "any"].map(str::to_owned)).into_iter().flatten(),
        );
        let server = server(&dir, &flags.iter().map(String::as_str).collect::<Vec<_>>());
        let mut bystander = server.login(OPERATOR.token);
        bystander.lock("other/mine", "0 600");
        let others = || {
            let mut holder = server.login(BILLING.token);
            holder.lock("billing/k", "0 600");
            let mut waiter = server.login(BILLING.token);
            waiter.begin("l", "billing/k", "600 600");
            let mut watcher = server.login(BILLING.token);
            watcher.check("watch", "billing/>", "", "ok");
            let mut kept = server.login(BILLING.token);
            kept.keep("me");
            kept.lock("billing/kept", "0 600");
            drop(kept);
            [holder, waiter, watcher]
        };
        let before = others();
        bystander.wait_for_waiters("billing/k", 1);
        // Other rights: what came with the former ones ends, also where it would still be allowed.
        let narrower = identities::FILE.replace("\"read\", \"signal\"", "\"read\"");
        reload(&server, &dir, &narrower);
        before.into_iter().for_each(ended);
        // What they had is free.
        bystander.lock_and_release("billing/k", "20 600");
        bystander.lock_and_release("billing/kept", "20 600");
        server.login(BILLING.token).check("signal", "shared/k", "p", FORBIDDEN);

        // A second token, then without the first.
        let before = others();
        let hash = |token: &str| dflockd_identity::TokenHash::of(token.as_bytes()).to_string();
        let (old, new) = (hash(BILLING.token), hash("the-new-token-of-billing"));
        reload(&server, &dir, &narrower.replace(&old, &format!("{old}\" }}, {{ hash = \"{new}")));
        let [mut holder, waiter, watcher] = before;
        holder.check("ping", "_", "_", "ok");
        server.login("the-new-token-of-billing").check("ping", "_", "_", "ok");
        reload(&server, &dir, &narrower.replace(&old, &new));
        [holder, waiter, watcher].into_iter().for_each(ended);
        server.connect().check("auth", "_", BILLING.token, "error_auth");
        bystander.lock_and_release("billing/k", "20 600");

        // A file that can not be used changes nothing.
        reload(&server, &dir, "[[identity]]\nname = 'x'\nrole = 'king'");
        assert!(server.output().contains("identities not reloaded"));
        server.login("the-new-token-of-billing").check("ping", "_", "_", "ok");
        bystander.check("ping", "_", "_", "ok");
        assert!(!server.output().contains("token-of-the-tests"), "no token in the log");
    }
}

/// GUARANTEES 55: a token ends at its date, without a reload.
#[test]
fn a_token_ends_at_its_date() {
    let dir = Dir::new();
    let hash = |token: &str| dflockd_identity::TokenHash::of(token.as_bytes());
    let at = std::time::SystemTime::now() + std::time::Duration::from_secs(4);
    let at = at.duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    let date = std::process::Command::new("date");
    let date = { date }.args(["-u", &format!("-d@{at}"), "+%Y-%m-%dT%H:%M:%SZ"]).output().unwrap();
    let at = String::from_utf8(date.stdout).unwrap();
    let at = at.trim();
    let text = format!(
        "[[identity]]\nname = 'a'\nrole = 'use'\ntokens = [{{ hash = '{}', until = {at} }}, {{ hash = '{}', from = {at} }}]",
        hash("the-token-that-ends-soon"),
        hash("the-token-that-begins-then")
    );
    let file = dir.write("identities.toml", text);
    let server = Server::start(&["--identities-file", &file]);
    let mut early = server.login("the-token-that-ends-soon");
    early.lock("k", "0 600");
    server.connect().check("auth", "_", "the-token-that-begins-then", "error_auth");
    early.expect_last("error_auth");
    let mut late = server.login("the-token-that-begins-then");
    granted(&late.ask("l", "k", "20 600"));
}

/// The tokens of the flags are two identities more, and no identity has their names.
#[test]
fn the_tokens_of_the_flags_stay() {
    let dir = Dir::new();
    let flags = [
        "--auth-token",
        "the-one-token-for-all-clients",
        "--admin-token",
        "the-admin-token-of-the-flags",
    ];
    let server = server(&dir, &flags);
    let mut client = server.login("the-one-token-for-all-clients");
    let token = client.lock("other/k", "0 60");
    let fence = dflockd_testkit::fence(&token);
    for admin in ["the-admin-token-of-the-flags", OPERATOR.token] {
        client.check("force-release", "other/free", &format!("{admin} lock 1 because"), "error");
    }
    let force = format!("{} lock {fence} because", OPERATOR.token);
    client.check("force-release", "other/k", &force, "ok");
    server.wait_for_output("identity=ops");
    // Neither is that of an identity without the role.
    let mut other = server.login(BILLING.token);
    other.check("force-release", "k", &format!("{} lock 1 because", BILLING.token), "error_auth");
    assert!(server.output().contains("token=admin"), "it was counted as a guess");
    let mut scraper = server.login(SCRAPER.token);
    scraper.check("l", "k", "0 5", FORBIDDEN);
    scraper.check("ping", "_", "", "ok");
}

/// What is wrong with a file is said before the server starts.
#[test]
fn a_file_that_can_not_be_used() {
    let dir = Dir::new();
    let refused = |text: &str, why: &str| {
        let file = dir.write("bad.toml", text);
        let flags = ["--identities-file", &file];
        dflockd_testkit::run(dflockd_testkit::command(&flags))
            .expect(1)
            .complains(&["--identities-file", why]);
    };
    refused("[[identity]]\nname = 'a'", "missing field `role`");
    refused("[[identity]]\nname = 'a'\nrole = 'use'\ntokens = [{ hash = 'x' }]", "a hash is");
    let none = dir.name("none.toml");
    let flags = ["--identities-file", &none];
    dflockd_testkit::run(dflockd_testkit::command(&flags))
        .expect(1)
        .complains(&["--identities-file"]);
}

/// A server with certificates of clients: those of `billing.example` are billing's, of `ops.example` the operator's.
struct Certified {
    server: Server,
    dir: Dir,
    pair: Pair,
    authority: Authority,
}

impl Certified {
    fn start() -> Self {
        let (dir, pair, authority) = (Dir::new(), Pair::new(), Authority::new());
        let file = dir.write("identities.toml", Self::file("billing.example"));
        let ca = dir.write("clients.pem", &authority.cert);
        let [cert, key] = pair.flags(&dir);
        let flags = ["--identities-file", &file, "--tls-client-ca", &ca, &cert, &key];
        Self { server: Server::start(&flags), dir, pair, authority }
    }

    /// The file of the table, with certificates besides.
    fn file(billing: &str) -> String {
        let file = identities::FILE;
        let named = |file: &str, name: &str, certificate: &str| {
            let line = format!("name = \"{name}\"");
            file.replace(&line, &format!("{line}\ncertificates = [\"dns:{certificate}\"]"))
        };
        named(&named(file, "billing", billing), "ops", "ops.example")
    }

    fn connect(&self, name: &str) -> Client {
        let config = showing(&self.pair.cert, &self.authority.sign(name));
        Client::over_tls(self.server.socket(), config).unwrap().0
    }
}

/// GUARANTEES 55: a certificate is as good as a token for the identity that has its name, and for no other one.
#[test]
fn certificates_are_identities() {
    let certified = Certified::start();
    let mut billing = certified.connect("billing.example");
    let token = billing.lock("billing/k", "0 600");
    billing.check("kget", "other/k", "", FORBIDDEN);
    let mut operator = certified.connect("ops.example");
    operator.lock_and_release("other/k", "0 5");
    // A token says more than a certificate.
    let mut viewer = certified.connect("billing.example");
    viewer.check("auth", "_", VIEWER.token, "ok");
    viewer.check("kget", "other/k", "", "nil");
    viewer.check("r", "billing/k", &token, FORBIDDEN);
    // A name that is in no entry, and no certificate at all.
    certified.connect("stranger.example").check("ping", "_", "_", "error_auth");
    let plain = Client::over_tls(certified.server.socket(), certified.pair.client()).unwrap().0;
    let mut plain = plain;
    plain.check("auth", "_", BILLING.token, "ok");
    plain.check("kget", "shared/k", "", "nil");
    // Another authority with the same name.
    let other = Authority::new().sign("billing.example");
    let fake = showing_by(&certified.pair.cert, &other, &[&TLS12]);
    assert!(Client::over_tls(certified.server.socket(), fake).is_err());
    // The name goes to somebody else: whoever came with it ends.
    reload(&certified.server, &certified.dir, &Certified::file("elsewhere.example"));
    ended(billing);
    operator.check("ping", "_", "_", "ok");
    plain.check("ping", "_", "_", "ok");
    certified.connect("billing.example").check("ping", "_", "_", "error_auth");
    certified.connect("elsewhere.example").check("kget", "billing/k", "", "nil");
}
