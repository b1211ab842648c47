//! What an operator meets when something is wrong: a majority that is gone, a member that is not there, clocks,
//! certificates and disks, damaged files. Each is said in words that help.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dflockd_testkit::process::dflockd;
use dflockd_testkit::{Dir, Ran, eventually, free_address};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use serde_json::Value;

use super::cluster::{Dev, joiner_with};
use super::command::{Server, ctl};

/// The findings of one check that are no good news: node, severity, what was found and what to do.
fn found(ran: &Ran, check: &str) -> Vec<[String; 4]> {
    let report = ran.json();
    let findings = report["findings"].as_array().unwrap().iter();
    let sick = findings.filter(|it| it["check"] == check && it["severity"] != "ok");
    let fields = ["node", "severity", "what", "advice"];
    sick.map(|it| fields.map(|field| it[field].as_str().unwrap().to_owned())).collect()
}

#[test]
fn without_a_majority_every_verb_says_so() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    dev.run(&["kv", "set", "key", "value", "--servers", &dev.address(0)]);
    // One that stands still keeps nobody waiting for long.
    Dev::signal(&dir, "n1", "STOP");
    let ran = dev.ctl(&["cluster", "status"]).run().expect(69);
    let silent = "no answer in time (5 s)";
    assert!(ran.out.contains(silent) && !ran.out.contains("may still happen"), "{ran:?}");
    let ran = dev.ctl(&["doctor", "--json"]).run().expect(2);
    assert!(found(&ran, "reach")[0][2].contains(silent), "{ran:?}");
    dev.kill(&dir, "n1");
    // One that is down, while there is still a majority.
    for verb in [&["drain", "n1"][..], &["cluster", "snapshot", "n1"]] {
        dev.ctl(verb).run().refused(69, "n1 does not answer");
    }
    let ran = dev.ctl(&["doctor", "--json"]).run().expect(2);
    assert!(found(&ran, "reach")[0][3].contains("dflockctl cluster remove n1"), "{ran:?}");

    // GUARANTEES 50
    let ran = dev.ctl(&["cluster", "remove", "n2"]).run();
    ran.refused(1, "not reachable: n1; bring them back first, or force the change (`--force`");

    dev.kill(&dir, "n2");
    eventually("the last one has noticed", || {
        let ran = dev.ctl(&["cluster", "status"]).run().expect(69);
        ran.out.contains("led by nobody")
    });
    for verb in [
        &["cluster", "remove", "n1"][..],
        &["cluster", "add", "n4", "127.0.0.1:1", "127.0.0.1:2"],
        &["cluster", "promote", "n1"],
        &["cluster", "transfer"],
        &["cluster", "address", "n1", "127.0.0.1:1"],
        &["cluster", "policy", "max-locks=5"],
        &["cluster", "finalize"],
    ] {
        let ran = dev.ctl(&[verb, &["--timeout", "100ms"]].concat()).run();
        ran.refused(69, "no leader, so nothing can be changed; `dflockctl doctor`");
    }
    dev.ctl(&["backup", &dir.name("backup")]).run().refused(1, "no leader");
    assert!(!fs::exists(dir.name("backup")).unwrap());
    dev.run(&["cluster", "members"]);
    dev.run(&["cluster", "policy"]);

    let ran = dev.ctl(&["doctor", "--json"]).run().expect(2);
    assert_eq!(found(&ran, "quorum")[0][1], "error", "{ran:?}");
    assert_eq!(found(&ran, "leader")[0][1], "error", "{ran:?}");
    let reach = found(&ran, "reach");
    assert!(reach.iter().all(|it| it[3].contains("neither removed nor replaced")), "{reach:?}");
    let ran = dev.ctl(&["doctor"]).run().expect(2);
    assert!(ran.out.contains("reach of n1, n2: start it"), "advice is given once: {ran:?}");
    let ran = dev.ctl(&["status"]).run().expect(69);
    assert!(ran.out.contains("not ready") && ran.out.contains("down"), "{ran:?}");
    assert_eq!(ran.err.lines().count(), 3, "each server has its reason: {ran:?}");
    dev.end();
}

#[test]
fn a_member_that_is_not_there_and_one_of_another_version() {
    let dir = Dir::new();
    let dev = Dev::start(&dir, &[]);
    let (port, client) = (free_address().port(), free_address().port());
    let (peer, address) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{client}"));
    let added = dev.run(&["cluster", "add", "n4", &peer, &address]);
    assert!(added.out.contains("n4 is a learner"), "{added:?}");
    assert!(added.err.contains("n4 does not answer yet"), "{added:?}");
    let promoted = dev.ctl(&["cluster", "promote", "n4", "--timeout", "1s"]).run();
    promoted.refused(69, "n4 has not caught up yet; `dflockctl cluster status`");
    dev.ctl(&["cluster", "finalize", "--timeout", "1s"]).run().refused(1, "n4 has not said yet");
    dev.run(&["cluster", "remove", "n4"]);

    // A program that reads more than the others do: see the variable in the server's sources.
    let newer = ("DFLOCKD_CLUSTER_VERSION_MAX", "5");
    let port = free_address().port();
    let new = joiner_with(&dir, &dev, "n5", port, Some(newer));
    let (peer, address) = (format!("127.0.0.1:{port}"), new.address.to_string());
    dev.run(&["cluster", "add", "n5", &peer, &address, "--promote"]);
    let ran = dev.ctl(&["doctor", "--json"]).run();
    let versions = found(&ran, "versions");
    assert!(versions[0][2].contains("not all members read version 5: n1 n2 n3"), "{ran:?}");
    let finalized = dev.ctl(&["cluster", "finalize"]).run();
    finalized.refused(1, "n1 (up to 4), n2 (up to 4), n3 (up to 4); let them run the newer server");
    let members = dev.json(&["cluster", "members"]);
    let reads = members.as_array().unwrap().iter().map(|member| member["version"].clone());
    assert_eq!(reads.collect::<Vec<_>>(), [4, 4, 4, 5]);
    dev.end();
}

/// A small file system of its own, if the machine allows it.
struct Mount(PathBuf);

impl Mount {
    fn new(path: PathBuf) -> Option<Self> {
        fs::create_dir_all(&path).unwrap();
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", "size=120m,mode=0700", "tmpfs"]).arg(&path);
        let status = command.stderr(std::process::Stdio::null()).status();
        status.is_ok_and(|status| status.success()).then(|| Self(path))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A way to a server on which its clock goes wrong by five minutes.
fn bent(listener: TcpListener, server: SocketAddr) {
    thread::spawn(move || {
        for near in listener.incoming() {
            let (Ok(near), Ok(far)) = (near, TcpStream::connect(server)) else { return };
            let (mut asked, mut asks) = (near.try_clone().unwrap(), far.try_clone().unwrap());
            thread::spawn(move || std::io::copy(&mut asked, &mut asks));
            thread::spawn(move || {
                let mut near = near;
                for line in BufReader::new(far).lines() {
                    let Ok(line) = line else { return };
                    let line = match line.strip_prefix("ok {") {
                        Some(rest) => {
                            let mut told: Value =
                                serde_json::from_str(&format!("{{{rest}")).unwrap();
                            if let Some(clock) = told["unix_ms"].as_i64() {
                                told["unix_ms"] = (clock - 300_000).into();
                            }
                            format!("ok {told}")
                        }
                        None => line,
                    };
                    if writeln!(near, "{line}").is_err() {
                        return;
                    }
                }
            });
        }
    });
}

/// Writes a certificate for a node that ends in so many days.
fn certify(dir: &Dir, authority: &Issuer<'_, KeyPair>, days: i64) {
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "a");
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
    let ends = now.checked_add_signed(days * 86_400 + 3600).unwrap();
    params.not_before = rcgen::date_time_ymd(2020, 1, 1);
    params.not_after = rcgen::date_time_ymd(1970, 1, 1) + Duration::from_secs(ends);
    dir.write("node.pem", params.signed_by(&key, authority).unwrap().pem());
    dir.write("node.key", key.serialize_pem());
}

/// What a node tells of its clock, its disk and its certificates is what they are.
#[test]
fn a_doctor_sees_clock_disk_and_certificates() {
    let dir = Dir::new();
    let mount = Mount::new(dir.name("small").into());
    let key = KeyPair::generate().unwrap();
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, "peers");
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    dir.write("ca.pem", params.self_signed(&key).unwrap().pem());
    let authority = Issuer::new(params, key);
    certify(&dir, &authority, 100);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let way = listener.local_addr().unwrap().to_string();
    let peer = format!("127.0.0.1:{}", free_address().port());
    let file = |name: &str| dir.name(name);
    let (data, cert, key, ca) =
        (file("small/data"), file("node.pem"), file("node.key"), file("ca.pem"));
    let node = ["--raft-dir", &data, "--node-id", "a", "--raft-addr", &peer, "--cluster-bootstrap"];
    let files = ["--raft-tls-cert", &cert, "--raft-tls-key", &key, "--raft-tls-ca", &ca];
    let server = Server::start(&[&node[..], &files, &["--advertise-addr", &way]].concat());
    bent(listener, server.address);
    let doctor = || server.ctl(&["doctor", "--json"]).run();
    eventually("it serves", || found(&doctor(), "ready").is_empty());

    let ran = doctor().expect(2);
    let clock = found(&ran, "clock");
    assert!(clock[0][1] == "error" && clock[0][2].starts_with("-"), "{clock:?}");
    assert!(clock[0][3].contains("NTP"), "{clock:?}");
    assert_eq!(found(&ran, "quorum")[0][1], "warning", "one voter survives nothing: {ran:?}");
    if mount.is_some() {
        let disk = found(&ran, "disk");
        assert!(disk[0][1] == "error" && disk[0][3].contains("make room"), "{disk:?}");
    } else {
        println!("the disk is not looked at: this machine does not allow mounting a tmpfs");
    }
    assert_eq!(found(&ran, "certificate"), Vec::<[String; 4]>::new());
    for (days, severity, what) in [
        (20, "warning", "ends in 20 days"),
        (3, "error", "ends in 3 days"),
        (-2, "error", "has ended"),
    ] {
        certify(&dir, &authority, days);
        let findings = found(&doctor(), "certificate");
        let is_told = |it: &[String; 4]| it[1] == severity && it[2].contains(what);
        assert!(findings.iter().any(is_told), "{findings:?}");
        assert!(findings.iter().all(|it| it[3].contains("SIGHUP")), "{findings:?}");
    }
    dir.write("node.pem", "nonsense");
    let findings = found(&doctor(), "certificate");
    assert!(findings.iter().any(|it| it[1] == "error"), "{findings:?}");
    server.kill();
}

/// The offline verbs on what is no data directory, on one in use, and on damaged ones.
#[test]
fn data_directories_are_looked_into_with_care() {
    let dir = Dir::new();
    let program = dflockd().to_str().unwrap();
    let (data, foreign) = (dir.name("data"), dir.name("foreign"));
    dir.write("foreign/notes.txt", "not ours");
    let inspect = |at: &str| ctl(&["inspect-data", at, "--dflockd", program]).run();
    let force = |at: &str, how: &str| {
        ctl(&["cluster", "force-new", "--raft-dir", at, how, "--dflockd", program]).run()
    };
    let peer = format!("127.0.0.1:{}", free_address().port());
    let args = ["--raft-dir", &data, "--node-id", "a", "--raft-addr", &peer, "--cluster-bootstrap"];
    let server = Server::start(&[&args[..], &["--admin-token", "token"]].concat());
    eventually("it serves", || server.ctl(&["kv", "set", "k", "v"]).run().code == 0);
    let snapshot = server.ctl(&["cluster", "snapshot"]).env("DFLOCKD_ADMIN_TOKEN", "token").run();
    snapshot.expect(0);

    // What is wrong comes first, and alone: no warning of what will not be done.
    for (ran, why) in [
        (inspect(&foreign), "is no data directory of a node"),
        (inspect(&dir.name("nothing")), "No such file"),
        (inspect(&data), "a node runs in it"),
        (force(&data, "--yes"), "in use by another process"),
        (force(&foreign, "--yes"), "holds no member of a cluster"),
        (force(&dir.name("nothing"), "--yes"), "is no directory"),
    ] {
        assert!(ran.code == 1 && ran.err.contains(why), "{why}: {ran:?}");
        assert_eq!(ran.err.lines().count(), 1, "{ran:?}");
    }
    let left: Vec<_> = fs::read_dir(&foreign).unwrap().map(|it| it.unwrap().file_name()).collect();
    assert_eq!(left, ["notes.txt"], "nothing was made there");
    server.kill();

    let whole = inspect(&data).expect(0);
    assert!(whole.out.contains("digest ok") && whole.out.contains("version     4"), "{whole:?}");
    let dry = force(&data, "--dry-run").expect(0);
    assert!(dry.out.contains("cluster id: a new one"), "{dry:?}");
    let files = || fs::read_dir(&data).unwrap().map(|it| it.unwrap().path());
    let newest =
        files().filter(|it| it.display().to_string().contains("/snapshot-")).max().unwrap();
    let bytes = fs::read(&newest).unwrap();
    let mut damaged = bytes.clone();
    damaged[bytes.len() / 2] ^= 1;
    for content in [&damaged[..], &bytes[..bytes.len() / 2], &[]] {
        fs::write(&newest, content).unwrap();
        let shown = inspect(&data).expect(1);
        assert!(shown.out.contains("DAMAGE      snapshot-"), "{shown:?}");
        let forced = force(&data, "--yes");
        assert!(forced.code == 1 && forced.err.contains("is damaged"), "{forced:?}");
    }
    fs::write(&newest, &bytes).unwrap();
    let json =
        ctl(&["inspect-data", &data, "--json", "--entries", "--last", "3", "--dflockd", program]);
    let shown = json.run().expect(0).json();
    assert_eq!(shown["node"]["node_id"], "a");
    assert!(shown["entries"].as_array().is_some_and(|entries| entries.len() <= 3), "{shown}");
}

#[test]
fn a_dev_cluster_says_why_it_ends() {
    let dir = Dir::new();
    let program = dflockd().to_str().unwrap();
    ctl(&["dev-cluster", "--dflockd", "/nonexistent/dflockd"]).run().refused(127, "--dflockd");
    let place = dir.name("dev");
    let args = ["dev-cluster", "--nodes", "1", "--dir", &place, "--dflockd", program, "--"];
    let ran = ctl(&[&args[..], &["--max-locks", "none"]].concat()).run();
    ran.refused(1, "max-locks");
    // The same directory for three.
    let args = ["dev-cluster", "--dir", &place, "--dflockd", program];
    ctl(&args).run().refused(64, "give --nodes 1");
}
