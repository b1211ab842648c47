//! Secrets and certificates between members are exchanged while they work, by SIGHUP, and nobody notices.

use std::fs;
use std::path::PathBuf;

use dflockd_testkit::cluster::NAMES;
use dflockd_testkit::{Cluster, Turn, eventually};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair, KeyUsagePurpose};

use super::load::Load;

/// Signs the certificates of nodes.
struct Authority {
    pem: String,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    fn new(name: &str) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Self { pem, issuer: Issuer::new(params, key) }
    }

    /// Certificate and key of a node.
    fn issue(&self, node: &str) -> (String, String) {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        params.distinguished_name.push(DnType::CommonName, node);
        let key = KeyPair::generate().unwrap();
        (params.signed_by(&key, &self.issuer).unwrap().pem(), key.serialize_pem())
    }
}

struct Rotation {
    cluster: Cluster,
}

impl Rotation {
    fn path(&self, at: usize, name: &str) -> PathBuf {
        self.cluster.dir.path(&format!("{}-{name}", NAMES[at]))
    }

    fn write(&self, at: usize, name: &str, content: &str) {
        // As an operator would: whoever reads finds the old file or the new one.
        let aside = self.path(at, "aside");
        fs::write(&aside, content).unwrap();
        fs::rename(aside, self.path(at, name)).unwrap();
    }

    /// Lets each node in turn read its files again, with `load` going on in between.
    fn reload(&mut self, load: &Load, change: impl Fn(&Self, usize)) {
        for at in 0..self.cluster.nodes.len() {
            let reloads = |output: String| output.matches("msg=\"reloaded\"").count();
            let before = reloads(self.cluster.nodes[at].output());
            change(self, at);
            self.cluster.nodes[at].process().signal("HUP");
            eventually("it has read its files", || {
                reloads(self.cluster.nodes[at].output()) > before
            });
            // Half done is no reason for any of them to stand aside.
            for other in 0..self.cluster.nodes.len() {
                self.cluster.connect(other).check("kset", "half", "done", "ok");
            }
            load.wait_for_more(20);
        }
    }
}

#[test]
fn secrets_and_authorities_are_exchanged_under_load() {
    let old = Authority::new("old authority");
    let new = Authority::new("new authority");
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &[]);
    for (at, node) in NAMES.into_iter().enumerate().take(3) {
        let file = |name: &str| cluster.dir.path(&format!("{node}-{name}"));
        let (cert, key) = old.issue(node);
        for (name, content) in
            [("cert", &cert), ("key", &key), ("ca", &old.pem), ("secret", &"1".repeat(40))]
        {
            fs::write(file(name), content).unwrap();
        }
        let flags = &mut cluster.nodes[at].flags;
        let secret = flags.iter().position(|flag| flag == "--raft-auth-token").unwrap();
        flags.drain(secret..secret + 2);
        for (flag, name) in [
            ("--raft-auth-token-file", "secret"),
            ("--raft-tls-cert", "cert"),
            ("--raft-tls-key", "key"),
            ("--raft-tls-ca", "ca"),
        ] {
            flags.extend([flag.to_owned(), file(name).to_str().unwrap().to_owned()]);
        }
        cluster.nodes[at].start();
    }
    cluster.wait_until_ready();
    let leader = cluster.leader();
    let load = Load::start("rotation", 3, &cluster.clients());
    load.wait_for_more(20);
    let mut rotation = Rotation { cluster };

    // The secret: twice the same step; after the first the old one is still accepted.
    let secret = "2".repeat(40);
    for _ in 0..2 {
        rotation.reload(&load, |rotation, at| rotation.write(at, "secret", &secret));
    }
    // The authority: trust both, new certificates, trust the new one.
    let both = format!("{}{}", old.pem, new.pem);
    rotation.reload(&load, |rotation, at| rotation.write(at, "ca", &both));
    rotation.reload(&load, |rotation, at| {
        let (cert, key) = new.issue(NAMES[at]);
        rotation.write(at, "cert", &cert);
        rotation.write(at, "key", &key);
    });
    rotation.reload(&load, |rotation, at| rotation.write(at, "ca", &new.pem));

    let ledger = load.stop();
    assert_eq!(ledger.refused(), Vec::<String>::new());
    assert_eq!(ledger.unknown(), 0);
    let cluster = &mut rotation.cluster;
    ledger.check(&mut cluster.connect(0));
    for node in &cluster.nodes {
        assert!(!node.output().contains("not reloaded"), "{}", node.output());
    }
    // Operators can see when the certificates end.
    let status = cluster.connect(0).ask("cluster", "status", "_");
    for what in ["\"what\":\"peers\"", "\"what\":\"authority of the peers\""] {
        assert!(status.contains(what) && !status.contains("\"ends_at\":null"), "{status}");
    }
    // What they have now is what they need: one that starts anew is let in.
    let other = (leader + 1) % 3;
    cluster.nodes[other].terminate();
    cluster.nodes[other].start_ready();
}
