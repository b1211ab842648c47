//! Who may speak, and that nothing secret is printed.

use std::time::Instant;

use dflockd_testkit::{A_WHILE, Client, Server, command, fence, millis, run};

use super::both::Either;

const TOKEN: &str = "correct-horse-battery-staple";

/// That the connection is refused with a pause before the close.
#[track_caller]
fn refused(mut client: Client, request: &[u8]) {
    let begun = Instant::now();
    client.send(request);
    client.expect_last("error_auth");
    assert!(begun.elapsed() >= millis(90), "no pause: {:?}", begun.elapsed());
}

#[test]
fn the_token_opens_the_connection() {
    for server in Either::both(&["--auth-token", TOKEN]) {
        let mut client = server.connect();
        client.check("auth", "anything", &format!("  {TOKEN}\t"), "ok");
        client.lock("k", "0");
        client.check("auth", "_", TOKEN, "error");
        client.check("ping", "_", "_", "ok");
    }
}

#[test]
fn everything_else_is_refused() {
    let server = Server::start(&["--auth-token", TOKEN]);
    let almost = &TOKEN[..TOKEN.len() - 1];
    let long = "x".repeat(70_000);
    for request in [
        "auth\n_\nwrong\n".to_owned(),
        "auth\n_\n\n".to_owned(),
        format!("auth\n_\n{almost}\n"),
        format!("auth\n_\n{TOKEN}x\n"),
        format!("AUTH\n_\n{TOKEN}\n"),
        "ping\n_\n_\n".to_owned(),
        "l\nk\n0\n".to_owned(),
        "hello\nme\nms\n".to_owned(),
        "nonsense\n_\n_\n".to_owned(),
        "l\na b\n-1\n".to_owned(),
        format!("{long}\n_\n_\n"),
        format!("auth\n{}\n{TOKEN}\n", "k".repeat(257)),
        format!("auth\n_\n{long}\n"),
        // What follows is not looked at.
        format!("ping\n_\n_\nauth\n_\n{TOKEN}\n"),
    ] {
        refused(server.connect(), request.as_bytes());
    }
    // Nothing was done for strangers.
    let mut client = server.login(TOKEN);
    client.check("inspect", "k", "", "nil");
    client.lock("k", "0 600");
}

#[test]
fn silence_is_refused_after_the_read_timeout() {
    let server = Server::start(&["--auth-token", TOKEN, "--read-timeout", "1"]);
    let starts = ["", "a", "auth\n", "auth\n_\n", "auth\n_\ncorrect-horse"].map(|start| {
        let begun = Instant::now();
        let mut client = server.connect();
        client.send(start);
        (start, begun, client)
    });
    for (start, begun, mut client) in starts {
        assert_eq!(client.line(), "error_auth", "{start:?}");
        client.expect_end();
        assert!(begun.elapsed() >= millis(1090), "{start:?} {:?}", begun.elapsed());
    }
    // The limit ends with the authentication.
    let mut client = server.login(TOKEN);
    client.expect_silence(millis(1300));
    client.check("ping", "_", "_", "ok");
}

#[test]
fn a_pause_holds_nobody_else_up() {
    // All come from one address.
    let server = Server::start(&["--auth-token", TOKEN, "--auth-failure-rate-per-ip", "0"]);
    let mut strangers: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for stranger in &mut strangers {
        stranger.begin("auth", "_", "wrong");
    }
    let mut client = server.login(TOKEN);
    client.lock("k", "0");
    for stranger in &mut strangers {
        stranger.expect_last("error_auth");
    }
}

#[test]
fn without_a_token_auth_is_an_error() {
    let server = Server::start::<&str>(&[]);
    let mut client = server.connect();
    client.check("auth", "_", "x", "error");
    client.check("ping", "_", "_", "ok");
    client.expect_silence(A_WHILE);
}

#[test]
fn an_admin_command_needs_the_admin_token() {
    let server = Server::start(&["--admin-token", TOKEN]);
    let mut holder = server.connect();
    let token = holder.lock("k", "0 600");
    let arg = |secret: &str| format!("{secret} lock {} because", fence(&token));
    refused(server.connect(), format!("force-release\nk\n{}\n", arg("wrong")).as_bytes());
    refused(server.connect(), b"end-session\n1\nwrong because\n");
    holder.check("n", "k", &token, "ok 33");
    server.connect().check("force-release", "k", &arg(TOKEN), "ok");
    holder.check("n", "k", &token, "error");
    // Without a configured token nobody is the administrator.
    let server = Server::start::<&str>(&[]);
    refused(server.connect(), format!("force-release\nk\n{}\n", arg(TOKEN)).as_bytes());
}

#[test]
fn no_secret_is_ever_printed() {
    // The log as JSON can not be read by these tests, so it is the text that is searched.
    for flags in [&[][..], &["--wire-fence"]] {
        let mut canaries: Vec<String> = ["auth", "admin", "value", "item", "payload", "odd"]
            .map(|what| format!("canary-{what}-5ec2e7"))
            .to_vec();
        let (auth, admin) = (canaries[0].clone(), canaries[1].clone());
        let (value, item) = (canaries[2].clone(), canaries[3].clone());
        let (payload, odd) = (canaries[4].clone(), canaries[5].clone());
        let args = ["--debug", "--auth-token", &auth, "--admin-token", &admin];
        let mut server = Server::start(&[&args[..], flags].concat());
        for wrong in [format!("x{auth}"), auth[1..].to_owned()] {
            server.connect().check("auth", "_", &wrong, "error_auth");
        }
        let mut client = server.login(&auth);
        client.check("auth", "_", &auth, "error");
        let kept = client.ask("stable-ref", "me", "");
        assert_eq!(kept, "ok");
        let token = client.lock("canary-key", "0 600");
        client.check("kset", "v", &value, "ok");
        client.check("kset", "v", &format!("{value}\t{value}\t{value}"), "error");
        client.check("kcas", "v", &format!("{value}\t{value}2\t0"), "ok");
        client.check("kcas", "v", &format!("{odd}\t{value}"), "error");
        client.check("kget", "v", "", &format!("ok {value}2"));
        client.check("rpush", "q", &item, "ok 1");
        client.check("lpop", "q", "", &format!("ok {item}"));
        client.check("listen", "ch", "", "ok");
        client.begin("signal", "ch", &payload);
        let mut lines = [client.line(), client.line()];
        lines.sort();
        assert_eq!(lines, ["ok 1".to_owned(), format!("sig ch {payload}")]);
        client.check("signal", "ch.*", &payload, "error");
        client.check("l", "k", &odd, "error");
        client.check("nonsense", "k", &odd, "error");
        client.check("r", "other", &token, "error");
        client.check("n", "canary-key", &format!("{token} 0"), "error");
        client.check("r", "canary-key", &token, "ok");
        let held = client.lock("canary-key", "0 600");
        let arg = |admin: &str| format!("{admin} lock {} reason", fence(&held));
        client.check("force-release", "canary-key", &arg(&admin), "ok");
        client.check("force-release", "canary-key", &arg(&format!("x{admin}")), "error_auth");
        client.expect_end();

        let mut keeper = server.login(&auth);
        let answer = keeper.ask("hello", "me", "keep lost");
        let secret = answer.split("keep=").nth(1).unwrap().split(' ').next().unwrap();
        assert_eq!(secret.len(), 32, "{answer}");
        keeper.check("hello", "me", &format!("attach={secret}"), "error");
        let mut attached = server.login(&auth);
        let answer = attached.ask("hello", "me", &format!("attach={secret}"));
        assert!(answer.starts_with("ok attach="), "{answer}");
        let mut long = server.login(&auth);
        long.check("kset", "v", &odd.repeat(10_000), "error");
        long.expect_end();
        drop((keeper, attached));

        // The random part: the fence in front of it may be shown.
        canaries.extend([token[16..].to_owned(), held[16..].to_owned(), secret.to_owned()]);
        server.terminate();
        server.wait_for_output("shutting down");
        let output = server.output();
        // The search would find something: keys are logged, and the audit is.
        assert!(output.contains("canary-key"), "{output}");
        assert!(output.contains("hold ended by an operator"), "{output}");
        for canary in canaries {
            assert!(!output.contains(&canary), "{canary} in:\n{output}");
        }
    }
}

#[test]
fn a_misspelt_flag_does_not_print_the_token_behind_it() {
    let mut with_env = command(&["--max-locks", "0"]);
    with_env.env("DFLOCKD_AUTH_TOKEN", "canary-5ec2e7");
    for command in [
        command(&["--auth-tokem=canary-5ec2e7"]),
        command(&["--auth-token=canary-5ec2e7\r"]),
        command(&["--auth-token", "canary-5ec2e7", "--max-locks=0"]),
        with_env,
    ] {
        let output = run(command);
        assert_eq!(output.code, 1);
        let text = output.out + &output.err;
        assert!(text.contains("configuration error: "), "{text}");
        assert!(!text.contains("canary-5ec2e7"), "{text}");
    }
}
