//! Starting, and refusing to.

use std::net::TcpListener;

use dflockd_testkit::{Dir, Server, command, run};

/// That the server does not start and says why, in one line of the agreed form.
#[track_caller]
fn refused(args: &[&str], env: &[(&str, &str)], parts: &[&str]) {
    let mut start = command(args);
    start.envs(env.iter().copied());
    let output = run(start).expect(1).complains(parts);
    assert!(output.err.starts_with("configuration error: "), "{output:?}");
    assert_eq!(output.err.lines().count(), 1, "{output:?}");
    assert!(output.out.is_empty(), "{output:?}");
}

#[test]
fn bad_values_of_flags() {
    for (flag, value) in [
        ("--port", "65536"),
        ("--port", "-1"),
        ("--port", "x"),
        ("--default-lease-ttl", "0"),
        ("--lease-sweep-interval", "0"),
        ("--gc-interval", "0"),
        ("--gc-max-idle", "-1"),
        ("--max-locks", "0"),
        ("--max-locks", "1.5"),
        ("--max-keys", "-1"),
        ("--max-list-length", "many"),
        ("--max-value-bytes", "0"),
        ("--max-value-bytes", "1048577"),
        ("--max-connections", "-1"),
        ("--max-connections-per-ip", "-1"),
        ("--max-waiters", "-7"),
        ("--max-subscriptions", "-1"),
        ("--read-timeout", "0"),
        ("--read-timeout", "9223372037"),
        ("--write-timeout", "-1"),
        ("--idle-timeout", "5s"),
        ("--shutdown-timeout", "-1"),
        ("--startup-grant-delay", "soon"),
        ("--log-format", "xml"),
    ] {
        let got = [format!("(got {value})"), format!("(got \"{value}\")")];
        let text = run(command(&[flag, value])).expect(1).err;
        assert!(text.starts_with(&format!("configuration error: {flag} must be ")), "{text}");
        assert!(got.iter().any(|got| text.contains(got)), "{text}");
    }
    for flag in ["--debug=maybe", "--wire-fence=yes", "--require-auth=on"] {
        let (name, value) = flag.split_once('=').unwrap();
        refused(&[flag], &[], &[name, value]);
    }
}

#[test]
fn bad_values_of_variables() {
    for (name, value) in [
        ("DFLOCKD_PORT", "x"),
        ("DFLOCKD_MAX_LOCKS", "0"),
        ("DFLOCKD_MAX_LOCKS", "many"),
        ("DFLOCKD_READ_TIMEOUT_S", "1.5"),
        ("DFLOCKD_GC_LOOP_SLEEP", "x"),
        ("DFLOCKD_DEBUG", "maybe"),
        ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "2"),
        ("DFLOCKD_STARTUP_GRANT_DELAY_S", "-1"),
        ("DFLOCKD_LOG_FORMAT", "xml"),
    ] {
        refused(&[], &[(name, value)], &[name, value]);
    }
}

#[test]
fn unknown_flags_and_words() {
    for args in [
        &["--nonsense"][..],
        &["serve"],
        &["--debug", "false"],
        &["--max-locks"],
        &["--http-port", "6388"],
        &["--http-cors-allowed-origins=example.org"],
        &["--raft-dir", "/tmp"],
        &["--node-id=a"],
        &["--raft-addr", "127.0.0.1:1"],
        &["--cluster-peers", "a=b"],
        &["--cluster-bootstrap"],
        &["--raft-auth-token", "x"],
        &["--follower-mode", "auto"],
        &["--orphan-ttl", "1"],
        &["--replication-role", "primary"],
    ] {
        let word = args.iter().find(|arg| **arg != "--debug").unwrap();
        let name = word.split('=').next().unwrap();
        refused(args, &[], &[name]);
    }
}

#[test]
fn settings_that_need_each_other() {
    let dir = Dir::new();
    let missing = dir.name("missing");
    let empty = dir.write("empty", " \n");
    refused(&["--require-auth"], &[], &["--require-auth", "--auth-token"]);
    refused(&[], &[("DFLOCKD_REQUIRE_AUTH", "yes")], &["--auth-token"]);
    refused(&["--auth-token="], &[("DFLOCKD_AUTH_TOKEN", "t")], &["--auth-token"]);
    refused(&["--auth-token-file", &missing], &[], &["--auth-token-file", &missing]);
    refused(&["--admin-token-file", &empty], &[], &["--admin-token-file", &empty]);
    refused(&[], &[("DFLOCKD_AUTH_TOKEN_FILE", &missing)], &["DFLOCKD_AUTH_TOKEN_FILE", &missing]);
    refused(&["--startup-grant-delay=auto"], &[], &["--fence-state-file"]);
    let server = Server::start(&["--require-auth", "--auth-token", "0123456789abcdef"]);
    server.connect().check("auth", "_", "0123456789abcdef", "ok");
}

#[test]
fn a_flag_wins_over_its_variable() {
    let mut start = command(&["--max-locks=1"]);
    start
        .env("DFLOCKD_MAX_LOCKS", "nonsense")
        .env("DFLOCKD_MAX_KEYS", "1")
        .env("DFLOCKD_DEBUG", "");
    let server = Server::launch(start);
    let mut client = server.connect();
    client.lock("a", "0");
    client.check("l", "b", "0", "error_max_locks");
    client.check("cset", "a", "1", "ok");
    client.check("cset", "b", "1", "error_max_keys");
    assert!(!server.output().contains("level=DEBUG"), "{}", server.output());
}

#[test]
fn help_and_version() {
    for (args, text) in [
        (&["--help"][..], "--max-locks"),
        (&["-h", "--max-locks=0"], "DFLOCKD_MAX_LOCKS"),
        (&["--version"], env!("CARGO_PKG_VERSION")),
        (&["-version", "--port=x"], env!("CARGO_PKG_VERSION")),
    ] {
        let output = run(command(args)).expect(0);
        let stdout = output.out;
        assert!(stdout.contains(text), "{stdout}");
        assert!(output.err.is_empty(), "{args:?}");
        if text == env!("CARGO_PKG_VERSION") {
            assert_eq!(stdout, format!("{text}\n"));
        }
    }
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let port = taken.local_addr().unwrap().port().to_string();
    run(command(&["--port", &port])).expect(1).complains(&[&address]);
}

#[test]
fn an_open_address_is_warned_about() {
    let server = Server::start(&["--host", "0.0.0.0"]);
    let output = server.output();
    let warnings: Vec<_> = output.lines().filter(|line| line.contains("level=WARN")).collect();
    let limits = ["--max-connections-per-ip", "--max-waiters"];
    let names_all = |line: &&str| limits.iter().all(|limit| line.contains(limit));
    assert!(warnings.iter().any(names_all), "{output}");
    assert!(warnings.iter().any(|line| line.contains("auth token")), "{output}");

    let server = Server::start(&[
        "--host=0.0.0.0",
        "--auth-token=0123456789abcdef",
        "--max-connections=9",
        "--max-connections-per-ip=9",
        "--max-waiters=9",
    ]);
    // Without TLS the token can be read on its way.
    let output = server.output();
    let mut warnings = output.lines().filter(|line| line.contains("level=WARN"));
    assert!(warnings.all(|line| line.contains("plain text")), "{output}");
    let server = Server::start::<&str>(&[]);
    assert!(!server.output().contains("level=WARN"), "{}", server.output());
}

/// GUARANTEES 49: the first request on a durable node that has just been started waits until the node takes part, and
/// its connection stays.
#[test]
fn the_first_request_of_a_durable_node_is_served() {
    let dir = Dir::new();
    for round in 1..=8 {
        let node =
            ["--raft-dir", &dir.name("data"), "--node-id", "a", "--raft-addr", "127.0.0.1:0"];
        let server = Server::start(&[&node[..], &["--cluster-bootstrap"]].concat());
        let mut client = server.connect();
        client.check("incr", "starts", "1", &format!("ok {round}"));
        client.check("get", "starts", "", &format!("ok {round}"));
        server.kill();
    }
}
