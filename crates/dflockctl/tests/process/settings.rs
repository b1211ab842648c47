//! Where the servers are: flags, variables, profiles; tokens and TLS.

use dflockd_testkit::{Dir, Pair};

use crate::command::{Ctl, Server, ctl};

fn with_profiles(dir: &Dir, args: &[&str]) -> Ctl {
    ctl(args).env("XDG_CONFIG_HOME", &dir.name(""))
}

#[test]
fn flags_before_variables_before_profiles() {
    let (dir, servers) = (Dir::new(), [(); 3].map(|()| Server::start(&[])));
    for (position, server) in servers.iter().enumerate() {
        server.ctl(&["kv", "set", "who", &position.to_string()]).run().expect(0);
    }
    let [flag, variable, profile] = servers.each_ref().map(|server| server.address.to_string());
    let content = format!(
        "[profile.test]\nservers = \"{profile}\"\n[profile.nowhere]\nservers = [\"127.0.0.1:1\"]\n"
    );
    dir.write("dflockd/profiles.toml", &content);
    let who = |args: &[&str], variables: &[(&str, &str)]| {
        let command = with_profiles(&dir, &[args, &["kv", "get", "who"]].concat());
        let command = variables.iter().fold(command, |it, (name, value)| it.env(name, value));
        command.run().expect(0).out.trim().to_owned()
    };
    let by_variable = ("DFLOCKD_SERVERS", variable.as_str());
    assert_eq!(who(&["--servers", &flag, "--profile", "test"], &[by_variable]), "0");
    assert_eq!(who(&["--profile", "test"], &[by_variable]), "1");
    assert_eq!(who(&["--profile", "test"], &[]), "2");
    assert_eq!(who(&[], &[("DFLOCKD_PROFILE", "test")]), "2");
    assert_eq!(who(&["--profile", "test"], &[("DFLOCKD_PROFILE", "nowhere")]), "2");
    // On both sides of the verb; the nearer one counts.
    let both = ["--servers", "127.0.0.1:1", "kv", "get", "who", "--servers", &flag];
    assert_eq!(ctl(&both).run().expect(0).out, "0\n");
    let home = ctl(&["kv", "get", "who", "--profile", "test"]);
    home.env("HOME", &dir.name("none")).run().refused(64, "profiles.toml");
    dir.write("home/.config/dflockd/profiles.toml", &content);
    let home = ctl(&["kv", "get", "who", "--profile", "test"]).env("HOME", &dir.name("home"));
    assert_eq!(home.run().expect(0).out, "2\n");
}

#[test]
fn profiles_are_checked() {
    let dir = Dir::new();
    let check = |content: &str, texts: &[&str]| {
        dir.write("dflockd/profiles.toml", content);
        for text in texts {
            with_profiles(&dir, &["ping", "--profile", "test"]).run().refused(64, text);
        }
    };
    check(
        "[profile.test]\nservers = \"a:1\"\nserver = \"b:1\"\n",
        &["profiles.toml, line 3", "server"],
    );
    check("[profiles.test]\n", &["line 1", "profiles"]);
    check("[profile.test\n", &["line 1"]);
    check("[profile.other]\n[profile.more]\n", &["no profile \"test\"", "more, other"]);
    check("[profile.test]\ntls = 3\n", &["line 2"]);
    check("[profile.test]\nservers = \"a\"\n", &["write host:port"]);
}

#[test]
fn tokens() {
    let (dir, server) = (Dir::new(), Server::start(&["--auth-token", "secret"]));
    let (right, wrong) = (dir.write("right", "secret\n"), dir.write("wrong", "guess"));
    let guess = server.ctl(&["kv", "get", "k", "--auth-token-file", &wrong]);
    guess.run().refused(77, "authentication");
    server.ctl(&["lock", "k", "--auth-token-file", &wrong, "--", "true"]).run().expect(77);
    server.ctl(&["lock", "k", "--auth-token-file", &right, "--", "true"]).run().expect(0);
    server.ctl(&["ping"]).env("DFLOCKD_AUTH_TOKEN", "secret").run().expect(0);
    server.ctl(&["ping"]).env("DFLOCKD_AUTH_TOKEN_FILE", &right).run().expect(0);
    // The file of the server, while its token changes.
    let both = dir.write("both", "\n secret \nolder\n");
    server.ctl(&["ping", "--auth-token-file", &both]).run().expect(0);
    let empty = dir.write("empty", "\n");
    server.ctl(&["ping", "--auth-token-file", &empty]).run().refused(64, "is empty");
    let profile = format!(
        "[profile.p]\nservers = \"{}\"\nauth_token_file = \"{right}\"\nname = \"prof\"\n",
        server.address
    );
    dir.write("dflockd/profiles.toml", &profile);
    with_profiles(&dir, &["acquire", "k", "--profile", "p"]).run().expect(0);
    let shown = with_profiles(&dir, &["show", "k", "--profile", "p"]).run().expect(0);
    assert!(shown.out.contains("prof"), "{shown:?}");
}

#[test]
fn a_missing_token() {
    let server = Server::start(&["--auth-token", "secret"]);
    server.ctl(&["ping"]).run().refused(77, "--auth-token-file");
    server.ctl(&["kv", "get", "k"]).run().refused(77, "--auth-token-file");
    server.ctl(&["lock", "k", "--", "true"]).run().refused(77, "--auth-token-file");
}

#[test]
fn tls() {
    let dir = Dir::new();
    let [cert, key] = Pair::new().flags(&dir);
    let server = Server::start(&[&cert, &key]);
    let (cert, key) = (dir.name("cert.pem"), dir.name("key.pem"));
    let at = format!("localhost:{}", server.address.port());
    let run = |args: &[&str], variables: &[(&str, &str)]| {
        let command = with_profiles(&dir, &[&["ping"], args].concat());
        let command = command.env("DFLOCKD_SERVERS", &at);
        variables.iter().fold(command, |it, (name, value)| it.env(name, value)).run()
    };
    run(&["--tls-ca", &cert], &[]).expect(0);
    run(&[], &[("DFLOCKD_TLS_CA", &cert)]).expect(0);
    run(&["--tls"], &[("DFLOCKD_TLS_CA", &cert)]).expect(0);
    dir.write("dflockd/profiles.toml", format!("[profile.p]\ntls_ca = \"{cert}\"\n"));
    run(&["--profile", "p"], &[]).expect(0);
    // Another certificate, none, and no certificates at all.
    let other = dir.write("other.pem", Pair::new().cert);
    assert!(run(&["--tls-ca", &other], &[]).expect(69).err.contains("certificate"));
    run(&["--connect-timeout", "1s"], &[("DFLOCKD_TLS_CA", &cert), ("DFLOCKD_TLS", "off")])
        .expect(69);
    run(&["--tls-ca", &key], &[]).refused(64, "certificates");
}

#[test]
fn usage() {
    ctl(&["lok"]).run().refused(64, "'lock'");
    ctl::<&str>(&[]).run().expect(64);
    ctl(&["lock"]).run().refused(64, "<KEY>");
    ctl(&["lock", "k"]).run().refused(64, "PROGRAM");
    ctl(&["sem", "k", "--", "true"]).run().refused(64, "--limit");
    ctl(&["sem", "k", "--limit", "0", "--", "true"]).run().refused(64, "dflockctl sem --help");
    ctl(&["lock", "k", "--try", "--wait", "1s", "--", "true"]).run().refused(64, "--wait");
    ctl(&["lock", "k", "--wait", "soon", "--", "true"]).run().refused(64, "500ms");
    ctl(&["lock", "k", "--lease", "0", "--", "true"]).run().refused(64, "1ms");
    ctl(&["lock", "k", "--on-lost", "cry", "--", "true"]).run().refused(64, "warn");
    ctl(&["ping", "--servers", "somewhere"]).run().refused(64, "host:port");
    ctl(&["--servers", "a:1", "bench"]).run().refused(64, "bench --help");
    ctl(&["ls", "_"]).run().refused(64, "prefix");
    ctl(&["ping", "--name", "two words"]).run().expect(64);
}
