//! `identity`: entries that a server takes, and what a file says.

use std::os::unix::fs::PermissionsExt;

use dflockd_testkit::certificates::Authority;
use dflockd_testkit::{Dir, Pair, identities};

use super::command::{Server, ctl};

/// What is printed for somebody new is taken by a server, with the token that was made for it.
#[test]
fn entries_are_made_and_used() {
    let dir = Dir::new();
    let token = dir.name("billing.token");
    let new = [
        "identity",
        "new",
        "billing",
        "--prefix",
        "billing/",
        "--prefix",
        "a:b:read,signal",
        "--token-file",
        &token,
    ];
    let made = ctl(&new).run().expect(0);
    assert!(made.out.contains(r#"{ prefix = "a:b", verbs = ["read", "signal"] }"#), "{made:?}");
    let mode = std::fs::metadata(&token).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    assert!(!made.out.contains(dir.read("billing.token").trim()), "the token is in its file only");
    // Never over a token that may be in use.
    ctl(&new).run().expect(1);
    let hash = ctl(&["identity", "hash", "--token-file", &token]).run().expect(0);
    assert!(made.out.contains(hash.out.trim()), "{made:?} {hash:?}");

    let admin = ctl(&["identity", "new", "ops", "--role", "admin"]).run().expect(0);
    let admin_token = admin.err.trim().strip_prefix("token: ").unwrap().to_owned();
    let admin_token = dir.write("admin.token", admin_token);
    let file = dir.write("identities.toml", format!("{}\n{}", made.out, admin.out));
    let server = Server::start(&["--identities-file", &file]);
    let address = server.address.to_string();
    let run = |token: &str, args: &[&str]| {
        ctl(&[&["--servers", &address, "--auth-token-file", token], args].concat()).run()
    };
    run(&token, &["kv", "set", "billing/colour", "blue"]).expect(0);
    let denied = run(&token, &["kv", "set", "other/colour", "blue"]).expect(77);
    denied.complains(&["no right to do that with this key"]);
    run(&token, &["kv", "get", "a:b/x"]).expect(1);
    run(&token, &["lock", "a:b/x", "--try", "--", "true"]).expect(77);
    let listed = run(&admin_token, &["ls"]).expect(0);
    assert!(listed.out.contains("billing/colour"), "{listed:?}");
    run(&token, &["lock", "billing/x", "--", "true"]).expect(0);
}

#[test]
fn tokens_that_are_no_good() {
    for bad in ["", "short", "a token with spaces in it"] {
        let dir = Dir::new();
        let file = dir.write("token", bad);
        ctl(&["identity", "hash", "--token-file", &file]).run().expect(64);
    }
    for bad in [
        &["a b"][..],
        &["admin-token"],
        &["x", "--role", "king"],
        &["x", "--role", "admin", "--prefix", "a"],
    ] {
        ctl(&[&["identity", "new"], bad].concat()).run().expect(64);
    }
}

#[test]
fn a_file_is_explained() {
    let dir = Dir::new();
    let file = identities::write(&dir);
    let check = |args: &[&str]| ctl(&[&["identity", "check", &file], args].concat()).run();
    let all = check(&[]).expect(0).out;
    for line in [
        "billing: role use, tokens: 1 valid",
        "  billing/…: read, lock, write, signal",
        "  shared/…: read, signal",
        "  all keys: read",
        "  reads the metrics and nothing else",
        "  everything, and what operators do",
    ] {
        assert!(all.lines().any(|found| found == line), "{line}: {all}");
    }
    let of_key = check(&["--key", "shared/x"]).expect(0).out;
    let lines: Vec<_> = of_key.lines().filter(|line| line.starts_with(' ')).collect();
    assert_eq!(
        lines,
        ["  read, signal", "  read", "  nothing with this key", "  read, lock, write, signal"]
    );
    let one = check(&["--name", "billing", "--key", "other", "--json"]).expect(0).json();
    assert_eq!((&one["name"], &one["may"]), (&"billing".into(), &serde_json::json!([])));
    check(&["--name", "nobody"]).expect(1).complains(&["nobody is not in the file"]);
    let bad = dir.write("bad.toml", "[[identity]]\nname = 'a'\nrole = 'use'\nkey = []");
    ctl(&["identity", "check", &bad])
        .run()
        .expect(1)
        .complains(&["unknown field `key`", "bad.toml"]);
}

/// A certificate is as good as a token.
#[test]
fn a_certificate_is_shown() {
    let (dir, pair, authority) = (Dir::new(), Pair::new(), Authority::new());
    let text = "[[identity]]\nname = 'a'\nrole = 'use'\nkeys = [{ prefix = 'a/' }]\ncertificates = ['dns:a.example']";
    let (file, ca) = (dir.write("i.toml", text), dir.write("clients.pem", &authority.cert));
    let checked = ctl(&["identity", "check", &file]).run().expect(0).out;
    assert!(checked.contains("certificates: dns:a.example"), "{checked}");
    let [cert, key] = pair.flags(&dir);
    let server = Server::start(&["--identities-file", &file, "--tls-client-ca", &ca, &cert, &key]);
    let own = authority.sign("a.example");
    let (own_cert, own_key) = (dir.write("own.pem", &own.cert), dir.write("own.key", &own.key));
    let address = format!("localhost:{}", server.address.port());
    let trust = dir.write("trust.pem", &pair.cert);
    let shown = ["--tls-client-cert", &own_cert, "--tls-client-key", &own_key];
    let run = |tls: &[&str], args: &[&str]| {
        ctl(&[&["--servers", &address, "--tls-ca", &trust], tls, args].concat()).run()
    };
    run(&shown, &["kv", "set", "a/k", "v"]).expect(0);
    run(&shown, &["kv", "set", "b/k", "v"]).expect(77);
    run(&[], &["kv", "get", "a/k"]).expect(77);
    run(&shown[..2], &["kv", "get", "a/k"]).expect(64).complains(&["--tls-client-key"]);
    ctl(&[&["--servers", &address], &shown[..], &["ping"]].concat())
        .run()
        .expect(64)
        .complains(&["over TLS only"]);
}
