//! Clusters, looked after with nothing but the command line.

use std::fs;
use std::path::Path;

use dflockd_testkit::process::{dflockd, signal};
use dflockd_testkit::{Dir, Process, Ran, command, eventually, free_address};
use serde_json::Value;

use super::command::{Ctl, Server, ctl};

/// A cluster that runs as long as this is there.
pub(super) struct Dev {
    pub(super) running: Process,
    told: Value,
}

impl Dev {
    pub(super) fn start(dir: &Dir, flags: &[&str]) -> Self {
        let (program, place) = (dflockd().to_str().unwrap(), dir.name("dev"));
        let args = ["dev-cluster", "--json", "--dir", &place, "--dflockd", program, "--"];
        let running = ctl(&[&args[..], &["--election-timeout-ms", "500"], flags].concat()).spawn();
        running.wait_for_out("\n");
        let told = serde_json::from_str(&running.output()).expect("it prints JSON");
        Self { running, told }
    }

    pub(super) fn address(&self, at: usize) -> String {
        self.told["nodes"][at]["client_addr"].as_str().unwrap().to_owned()
    }

    pub(super) fn ctl(&self, args: &[&str]) -> Ctl {
        let servers: Vec<String> = (0..3).map(|at| self.address(at)).collect();
        let token = self.told["admin_token_file"].as_str().unwrap();
        let ctl = ctl(args).env("DFLOCKD_SERVERS", &servers.join(","));
        ctl.env("DFLOCKD_ADMIN_TOKEN_FILE", token)
    }

    #[track_caller]
    pub(super) fn run(&self, args: &[&str]) -> Ran {
        self.ctl(args).run().expect(0)
    }

    #[track_caller]
    pub(super) fn json(&self, args: &[&str]) -> Value {
        self.run(&[args, &["--json"]].concat()).json()
    }

    /// Ends one of its nodes as a crash would.
    #[track_caller]
    pub(super) fn kill(&self, dir: &Dir, node: &str) {
        Self::signal(dir, node, "KILL");
        self.running.wait_for_err(&format!("{node} has ended"));
    }

    #[track_caller]
    pub(super) fn signal(dir: &Dir, node: &str, name: &str) {
        let data = dir.name(&format!("dev/{node}"));
        let pid = fs::read_dir("/proc").unwrap().filter_map(Result::ok).find(|entry| {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            line.split(|byte| *byte == 0).any(|word| word == data.as_bytes())
        });
        let pid = pid.unwrap().file_name().into_string().unwrap();
        signal(pid.parse().unwrap(), name);
    }

    /// Ends it as Ctrl-C would.
    pub(super) fn end(self) {
        self.running.signal("INT");
        self.running.end().expect(0);
    }
}

#[test]
fn a_cluster_is_looked_after() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    let status = dev.json(&["cluster", "status"]);
    assert_eq!(status["members"].as_array().map(Vec::len), Some(3), "{status}");
    let text = dev.run(&["cluster", "status"]).out;
    assert!(text.contains("n1") && text.contains("leader") && text.contains("follower"), "{text}");
    let members = dev.json(&["cluster", "members"]);
    let mut roles = members.as_array().unwrap().iter().map(|member| &member["role"]);
    assert!(roles.all(|role| role == "voter"), "{members}");

    dev.run(&["cluster", "policy", "max-locks=9", "auto-release=any"]);
    let policy = dev.json(&["cluster", "policy"]);
    assert!(policy["max-locks"] == 9 && policy["auto-release"] == "any", "{policy}");
    dev.ctl(&["cluster", "policy", "max-locks=none"]).run().refused(1, "max-locks is a number");
    dev.ctl(&["cluster", "policy", "max-locks"]).run().refused(64, "NAME=VALUE");

    for to in ["n1", "n2"] {
        assert_eq!(dev.json(&["cluster", "transfer", to])["leader"], to);
    }
    dev.run(&["drain", "n2"]);
    let leader = dev.json(&["cluster", "status"])["leader_id"].clone();
    assert_ne!(leader, "n2");
    dev.run(&["drain", "n2", "--undo"]);
    dev.run(&["cluster", "snapshot"]);
    assert!(dev.json(&["cluster", "snapshot", "n3"])["index"].as_u64() > Some(1));
    assert_eq!(dev.json(&["cluster", "finalize"])["cluster_version"], 4);
    dev.ctl(&["cluster", "remove", "n9"]).run().refused(1, "no member");
    let remove_with = |token: &str| {
        dev.ctl(&["cluster", "remove", "n3"]).env("DFLOCKD_ADMIN_TOKEN_FILE", token).run()
    };
    remove_with("").refused(77, "admin token");
    remove_with(&dir.write("wrong", "not-the-token")).refused(77, "refused the token");
    dev.end();
}

/// Starts a node that waits to be added.
fn joiner(dir: &Dir, dev: &Dev, node: &str, port: u16) -> Server {
    joiner_with(dir, dev, node, port, None)
}

/// The same with a variable in its environment.
pub(super) fn joiner_with(
    dir: &Dir,
    dev: &Dev,
    node: &str,
    port: u16,
    variable: Option<(&str, &str)>,
) -> Server {
    let secret = Path::new(dev.told["dir"].as_str().unwrap()).join("raft-token");
    let (data, peer) = (dir.name(node), format!("127.0.0.1:{port}"));
    let (place, name) = (["--raft-dir", &data], ["--node-id", node]);
    let (peer, secret) =
        (["--raft-addr", &peer], ["--raft-auth-token-file", secret.to_str().unwrap()]);
    let mut command = command(&[place, name, peer, secret].concat());
    command.envs(variable);
    Server::launch(command)
}

#[test]
fn a_dead_node_is_replaced() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    dev.run(&["kv", "set", "key", "value"]);
    let port = free_address().port();
    let new = joiner(&dir, &dev, "n4", port);
    let (peer, clients) = (format!("127.0.0.1:{port}"), new.address.to_string());
    let added = dev.json(&["cluster", "add", "n4", &peer, &clients, "--promote"]);
    assert_eq!(added["voter"], true);
    dev.run(&["cluster", "remove", "n3", "--reason", "its disk is gone"]);
    let members = dev.json(&["cluster", "members"]);
    let names: Vec<_> =
        members.as_array().unwrap().iter().map(|it| it["node_id"].clone()).collect();
    assert_eq!(names, ["n1", "n2", "n4"]);
    dev.ctl(&["cluster", "add", "n3", &peer, &clients]).run().refused(1, "never used again");
    let value = ctl(&["kv", "get", "key"]).env("DFLOCKD_SERVERS", &clients).run().expect(0);
    assert_eq!(value.out, "value\n");
    // The one that was removed has ended by itself, and this does not end the others.
    dev.running.wait_for_err("n3 has ended");
    dev.end();
}

/// GUARANTEES 20: asked of nobody but the leader, which is gone after it.
#[test]
fn a_leader_is_removed_and_says_so() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    for left in [2, 1] {
        let status = eventually("a leader", || {
            let status = dev.json(&["cluster", "status"]);
            (status["leader_id"] != "").then_some(status)
        });
        let leader = status["leader_id"].as_str().unwrap();
        let mut members = status["members"].as_array().unwrap().iter();
        let address = members.find(|member| member["node_id"] == leader).unwrap()["client_addr"]
            .as_str()
            .unwrap();
        let ran = dev.ctl(&["cluster", "remove", leader, "--servers", address]).run().expect(0);
        assert_eq!(ran.out, format!("{leader} is no member any more\n"), "{left} are to be left");
        dev.running.wait_for_err(&format!("{leader} has ended"));
    }
    dev.end();
}

#[test]
fn a_doctor_finds_what_is_wrong() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    let findings = |dev: &Dev| -> (i32, Value) {
        let ran = dev.ctl(&["doctor", "--json"]).run();
        (ran.code, ran.json())
    };
    let checks = |report: &Value, check: &str| {
        let findings = report["findings"].as_array().unwrap().iter();
        findings.filter(|it| it["check"] == check && it["severity"] != "ok").count()
    };
    eventually("all is well, but for the machine", || {
        let (_, report) = findings(&dev);
        let sick = ["quorum", "leader", "ready", "peers", "clock", "versions", "drained"];
        sick.iter().map(|check| checks(&report, check)).sum::<usize>() == 0
    });
    dev.run(&["drain", "n1"]);
    let (code, report) = findings(&dev);
    assert!(code >= 1 && checks(&report, "drained") == 1, "{report}");
    // A member that does not answer.
    dev.kill(&dir, "n2");
    let (code, report) = findings(&dev);
    assert_eq!((code, checks(&report, "reach"), checks(&report, "quorum")), (2, 1, 1), "{report}");
    let down = dev.ctl(&["cluster", "status"]).run();
    assert!(down.code == 69 && down.out.contains("down"), "{down:?}");
    let text = dev.ctl(&["doctor"]).run().out;
    assert!(text.contains("dflockctl drain n1 --undo"), "{text}");
    dev.end();
}

#[test]
fn a_backup_is_restored() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &["--default-lease-ttl", "1", "--failover-grace", "0"]);
    dev.run(&["kv", "set", "key", "value"]);
    let file = dir.name("backup");
    // Somebody else was here before, and has left a link under a name that can be guessed.
    let elsewhere = dir.write("elsewhere", "untouched");
    std::os::unix::fs::symlink(&elsewhere, format!("{file}.part")).unwrap();
    dev.run(&["backup", &file]);
    assert_eq!(dir.read("elsewhere"), "untouched");
    let mode = std::os::unix::fs::PermissionsExt::mode(&fs::metadata(&file).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600, "it holds secrets");
    assert!(dev.json(&["backup", &file])["bytes"].as_u64() > Some(100));
    dev.ctl(&["backup", "/nonexistent/file"]).run().refused(1, "can not write");
    dev.end();
    let (data, program) = (dir.name("restored"), dflockd().to_str().unwrap().to_owned());
    let peer = format!("127.0.0.1:{}", free_address().port());
    let args = ["restore", &file, "--raft-dir", &data, "--node-id", "r1", "--raft-addr", &peer];
    let args = [&args[..], &["--dflockd", &program]].concat();
    let said = ctl(&args).run().expect(0).out;
    assert!(said.contains("new cluster") && said.contains("lost:"), "{said}");
    let again = ctl(&args).run();
    assert!(again.code == 1 && again.err.contains("not empty"), "{again:?}");
    let secret = dir.write("secret", "5".repeat(40));
    let node = ["--raft-dir", &data, "--node-id", "r1", "--raft-addr", &peer];
    let server = Server::start(&[&node[..], &["--raft-auth-token-file", &secret]].concat());
    eventually("it serves", || {
        let ran = server.ctl(&["kv", "get", "key"]).run();
        ran.code == 0 && ran.out == "value\n"
    });
    let force = ["cluster", "force-new", "--yes", "--raft-dir", &data, "--dflockd", &program];
    let refused = ctl(&force).run();
    assert!(refused.code == 1 && refused.err.contains("in use"), "{refused:?}");
    server.kill();
    let said = ctl(&force).run().expect(0).out;
    assert!(said.contains("the only one of a new cluster"), "{said}");
}

#[test]
fn a_new_cluster_is_prepared() {
    let dir = Dir::new();
    let out = dir.name("out");
    let ports: Vec<u16> = (0..6).map(|_| free_address().port()).collect();
    let node =
        |at: usize| format!("m{at}=127.0.0.1:{}@127.0.0.1:{}", ports[2 * at], ports[2 * at + 1]);
    let (nodes, config) = ([node(0), node(1), node(2)], format!("{out}/{{node}}"));
    let data = dir.name("data-{node}");
    let mut args = vec!["cluster", "init", "--dir", &out, "--config-dir", &config];
    args.extend(["--data-dir", &data, "--http-port", "0"]);
    args.extend(nodes.iter().map(String::as_str));
    let said = ctl(&args).run().expect(0).out;
    assert!(said.contains("cluster status"), "{said}");
    ctl(&args).run().refused(1, "File exists");
    ctl(&["cluster", "init", "--dir", &out, "m1"]).run().refused(64, "ID=HOST");
    let secret = dir.read("out/m0/raft-token");
    assert!(secret.trim().len() == 64 && secret == dir.read("out/m2/raft-token"));
    for name in ["raft-ca-key.pem", "m0/raft-key.pem", "m0/raft-token"] {
        let permissions = fs::metadata(dir.name(&format!("out/{name}"))).unwrap().permissions();
        let mode = std::os::unix::fs::PermissionsExt::mode(&permissions);
        assert_eq!(mode & 0o777, 0o600, "{name}");
    }
    assert_ne!(dir.read("out/m0/raft-key.pem"), dir.read("out/m1/raft-key.pem"));
    assert_eq!(dir.read("out/m0/raft-ca.pem"), dir.read("out/raft-ca.pem"));
    assert!(!dir.read("out/m0/dflockd.env").contains("RAFT_NO_TLS"));

    let mut servers = Vec::new();
    for at in 0..3 {
        let mut command = std::process::Command::new(dflockd());
        for line in dir.read(&format!("out/m{at}/dflockd.env")).lines() {
            let (name, value) = line.split_once('=').unwrap();
            command.env(name, value);
        }
        servers.push(Process::spawn(command));
    }
    let address = format!("127.0.0.1:{}", ports[1]);
    let status = || {
        let token = dir.name("out/m0/auth-token");
        let ctl = ctl(&["cluster", "status", "--json"]).env("DFLOCKD_SERVERS", &address);
        let ran = ctl.env("DFLOCKD_AUTH_TOKEN_FILE", &token).run();
        serde_json::from_str::<Value>(&ran.out).ok().filter(|_| ran.code == 0)
    };
    eventually("they serve", || {
        let status = status()?;
        let ready = |member: &&Value| member["status"]["ready"] == true;
        let count = status["members"].as_array()?.iter().filter(ready).count();
        (count == 3).then_some(())
    });

    // A fourth node, with a certificate of the same authority.
    ctl(&["cluster", "cert", "m3", "--dir", &out]).run().expect(0);
    ctl(&["cluster", "cert", "m3", "--dir", &out]).run().refused(1, "--renew");
    let before = dir.read("out/m3/raft-cert.pem");
    ctl(&["cluster", "cert", "m3", "--dir", &out, "--renew"]).run().expect(0);
    assert_ne!(dir.read("out/m3/raft-cert.pem"), before);
    let (peer, file) = (free_address().port(), |name: &str| dir.name(&format!("out/{name}")));
    let flags = [
        ("--raft-dir", dir.name("data-m3")),
        ("--node-id", "m3".to_owned()),
        ("--raft-addr", format!("127.0.0.1:{peer}")),
        ("--raft-auth-token-file", file("m0/raft-token")),
        ("--auth-token-file", file("m0/auth-token")),
        ("--admin-token-file", file("m0/admin-token")),
        ("--raft-tls-cert", file("m3/raft-cert.pem")),
        ("--raft-tls-key", file("m3/raft-key.pem")),
        ("--raft-tls-ca", file("m3/raft-ca.pem")),
    ];
    let flags: Vec<&str> = flags.iter().flat_map(|(flag, value)| [*flag, value]).collect();
    let fourth = Server::start(&flags);
    let (peer, clients) = (format!("127.0.0.1:{peer}"), fourth.address.to_string());
    let add = ["cluster", "add", "m3", &peer, &clients, "--promote", "--reason", "a test"];
    let added = ctl(&add)
        .env("DFLOCKD_SERVERS", &address)
        .env("DFLOCKD_AUTH_TOKEN_FILE", &file("m0/auth-token"))
        .env("DFLOCKD_ADMIN_TOKEN_FILE", &file("m0/admin-token"));
    added.run().expect(0);
}

#[test]
fn a_new_cluster_without_certificates() {
    let dir = Dir::new();
    let out = dir.name("out");
    ctl(&["cluster", "init", "--dir", &out, "--no-tls", "a=10.0.0.1", "b=10.0.0.2"])
        .run()
        .expect(0);
    assert!(dir.read("out/a/dflockd.env").contains("DFLOCKD_RAFT_NO_TLS=true\n"));
    assert!(!fs::exists(dir.name("out/raft-ca.pem")).unwrap());
    ctl(&["cluster", "cert", "a", "--dir", &out]).run().refused(1, "no authority");
    ctl(&["cluster", "cert", "../a", "--dir", &out]).run().refused(64, "node id");
    ctl(&["cluster", "cert", "a", "b", "--dir", &out, "--new-authority"]).run().expect(0);
    ctl(&["cluster", "cert", "a", "--dir", &out, "--new-authority"])
        .run()
        .refused(1, "File exists");
    assert_eq!(dir.read("out/a/raft-ca.pem"), dir.read("out/b/raft-ca.pem"));
}

#[test]
fn a_server_in_memory_is_no_cluster() {
    let server = Server::start(&["--admin-token", "token"]);
    server.ctl(&["cluster", "status"]).run().refused(1, "in memory");
    server.ctl(&["doctor"]).run().refused(1, "in memory");
    let backup =
        server.ctl(&["backup", "/nonexistent/file"]).env("DFLOCKD_ADMIN_TOKEN", "token").run();
    backup.refused(1, "in memory");
    let nobody = ctl(&["cluster", "status", "--servers", "127.0.0.1:1"]).run();
    nobody.refused(69, "127.0.0.1:1");
}
