//! What is read, what is refused in which words, and what the operator is warned about.

use std::collections::BTreeMap;
use std::path::Path;

use dflockd_replica::policy::{POLICY_SETTINGS, PolicyValue};
use dflockd_testkit::Dir;
use dflockd_wire::SECONDS_MAX;

use super::secrets::{is_readable_by_others, mode_and_owner};
use super::*;

type Env<'a> = &'a [(&'a str, &'a str)];

fn parse(args: &[&str], env: Env<'_>) -> Result<Parsed, ConfigError> {
    let env: BTreeMap<_, _> = env.iter().copied().collect();
    let args = args.iter().map(|arg| (*arg).to_owned());
    Config::from_args(args, &|name| env.get(name).map(|value| (*value).to_owned()))
}

fn config(args: &[&str], env: Env<'_>) -> Config {
    match parse(args, env) {
        Ok(Parsed::Run(config)) => *config,
        other => panic!("{args:?} {env:?} gave {other:?}"),
    }
}

/// How to find a field, and what it should be.
type Field<T> = (fn(&Config) -> T, T);

/// Compares one field, or the message of the refusal.
#[track_caller]
fn check<T: fmt::Debug + PartialEq>(args: &[&str], env: Env<'_>, expected: Result<Field<T>, &str>) {
    match (parse(args, env), expected) {
        (Ok(Parsed::Run(config)), Ok((field, value))) => {
            assert_eq!(field(&config), value, "{args:?} {env:?}");
        }
        (Err(error), Err(message)) => {
            assert_eq!(error.to_string(), message, "{args:?} {env:?}");
        }
        (got, _) => panic!("{args:?} {env:?} gave {got:?}"),
    }
}

#[track_caller]
fn refused(args: &[&str], env: Env<'_>, message: &str) {
    check::<()>(args, env, Err(message));
}

/// Checks lines of `words => message`. A word `DFLOCKD_…=…` is a variable, all others are arguments.
#[track_caller]
fn refuses(env: Env<'_>, table: &str) {
    for line in table.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let (words, message) = line.split_once(" => ").unwrap();
        let words = words.split_whitespace();
        let (given, args): (Vec<_>, Vec<_>) = words.partition(|word| word.starts_with("DFLOCKD_"));
        let given = given.iter().map(|word| word.split_once('=').unwrap());
        refused(&args, &env.iter().copied().chain(given).collect::<Vec<_>>(), message);
    }
}

fn max_locks(config: &Config) -> u64 {
    config.max_locks
}

fn debug(config: &Config) -> bool {
    config.debug
}

/// Long enough between nodes.
const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The least that a node which joins needs.
const NODE: Env<'_> = &[
    ("DFLOCKD_RAFT_DIR", "/d"),
    ("DFLOCKD_NODE_ID", "n1"),
    ("DFLOCKD_RAFT_ADDR", "127.0.0.1:7001"),
    ("DFLOCKD_RAFT_AUTH_TOKEN", SECRET),
    ("DFLOCKD_RAFT_NO_TLS", "true"),
];

/// A node with `args` beside what stands in [`NODE`].
#[track_caller]
fn node(args: &[&str]) -> Config {
    config(args, NODE)
}

fn host_port(text: &str) -> HostPort {
    HostPort::parse(text).unwrap()
}

/// A file with a token in it, in a directory of its own.
struct TokenFile {
    path: String,
    _dir: Dir,
}

impl TokenFile {
    fn new(content: impl AsRef<[u8]>) -> Self {
        let dir = Dir::new();
        Self { path: dir.write("token", content), _dir: dir }
    }

    fn path(&self) -> &str {
        &self.path
    }
}

/// The values stand in the list and in its table; here is what follows from them.
#[test]
fn defaults() {
    let c = config(&[], &[]);
    assert_eq!((c.host.as_str(), c.port), ("127.0.0.1", 6388));
    assert_eq!((c.disconnect_policy(), c.auto_release_on_disconnect), (AutoRelease::Any, true));
    assert!(c.replicated().is_none() && c.auth_token.is_none() && c.admin_token.is_none());
    assert_eq!((c.http_address(), c.grpc_address()), (None, None));
    assert_eq!((c.sse_ping(), c.read_timeout), (Duration::from_secs(15), Duration::from_secs(23)));
    assert_eq!(c.startup_grant_delay, GrantDelay::Seconds(0));
    assert!(c.warnings().is_empty());
    assert_eq!(format!("{:?}", Config::default()), format!("{c:?}"));
}

#[test]
fn every_spelling_of_a_flag() {
    for args in [
        &["-max-locks", "7"][..],
        &["-max-locks=7"],
        &["--max-locks", "7"],
        &["--max-locks=7"],
        &["--max-locks=+7"],
        &["--max-locks", "5", "-max-locks=7"],
        &["--max-locks", "7", "--"],
    ] {
        check(args, &[], Ok((max_locks, 7)));
    }
    check(&["--host=a=b"], &[], Ok((|c| c.host.clone(), "a=b".to_owned())));
    check(&["--host", "--debug"], &[], Ok((|c| c.host.clone(), "--debug".to_owned())));
    check(&["--host", "--"], &[], Ok((|c| c.host.clone(), "--".to_owned())));
    check(&["--host", "x", "--debug"], &[], Ok((debug, true)));
}

#[test]
fn every_spelling_of_a_boolean() {
    for yes in ["1", "t", "T", "TRUE", "true", "True"] {
        check(&[&format!("--debug={yes}")], &[], Ok((debug, true)));
    }
    for no in ["0", "f", "F", "FALSE", "false", "False"] {
        check(&["-debug", &format!("-debug={no}")], &[], Ok((debug, false)));
    }
    check(&["-debug"], &[], Ok((debug, true)));
    check(&["--debug", "--no-debug"], &[], Ok((debug, false)));
    check(&["-no-debug", "--debug"], &[], Ok((debug, true)));
    check(&["--no-auto-release-on-disconnect"], &[], Ok((|c| c.auto_release_on_disconnect, false)));
    refuses(
        &[],
        r#"
        --debug=yes         => --debug must be a boolean (got "yes")
        --debug=            => --debug must be a boolean (got "")
        --debug false       => unexpected argument "false"
        DFLOCKD_DEBUG=maybe => DFLOCKD_DEBUG must be a boolean (got "maybe")
        "#,
    );
    for setting in settings().iter().filter(|setting| setting.boolean) {
        config(&[&format!("--no-{}", setting.flag)], &[]);
    }
    for yes in ["1", "yes", "true", "YES", "True"] {
        check(&[], &[("DFLOCKD_DEBUG", yes)], Ok((debug, true)));
    }
    for no in ["0", "no", "false", "No", "FALSE"] {
        let env = [("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", no)];
        check(&[], &env, Ok((|c| c.auto_release_on_disconnect, false)));
    }
}

#[test]
fn what_is_no_flag() {
    refuses(
        &[],
        r#"
        serve                      => unexpected argument "serve"
        -                          => unexpected argument "-"
        -- x                       => unexpected argument "x"
        -- --debug                 => unknown flag --debug
        --webhook 80               => unknown flag --webhook
        --htp-port 80              => unknown flag --htp-port (did you mean --http-port?)
        --replication-role primary => unknown flag --replication-role
        --no-host                  => unknown flag --no-host (did you mean --grpc-host?)
        --no-debug=true            => unknown flag --no-debug (did you mean --debug?)
        -p6388                     => unknown flag --p6388
        --auth-tokem=hunter2       => unknown flag --auth-tokem (did you mean --auth-token?)
        --max-locks                => --max-locks needs a value
        "#,
    );
    for odd in ["---debug", "--=1", "-=1", ""] {
        assert!(parse(&[odd], &[]).is_err(), "{odd:?}");
    }
}

#[test]
fn flag_then_variable_then_default() {
    let env = [("DFLOCKD_MAX_LOCKS", "5")];
    check(&["--max-locks", "7"], &env, Ok((max_locks, 7)));
    check(&[], &env, Ok((max_locks, 5)));
    check(&[], &[("DFLOCKD_MAX_LOCKS", "")], Ok((max_locks, 1024)));
    check(&["--max-locks=7"], &[("DFLOCKD_MAX_LOCKS", "abc")], Ok((max_locks, 7)));
    refuses(
        &[],
        r#"
        DFLOCKD_MAX_LOCKS=abc => DFLOCKD_MAX_LOCKS must be an integer (got "abc")
        DFLOCKD_MAX_LOCKS=0   => DFLOCKD_MAX_LOCKS: --max-locks must be > 0 (got 0)
        "#,
    );
}

#[test]
fn every_setting_reads_its_flag_and_its_variable() {
    const REPLICATED: Env<'_> = &[
        ("DFLOCKD_RAFT_DIR", "/y"),
        ("DFLOCKD_NODE_ID", "n"),
        ("DFLOCKD_RAFT_ADDR", "localhost:0"),
        ("DFLOCKD_RAFT_AUTH_TOKEN", SECRET),
        ("DFLOCKD_RAFT_TLS_CERT", "/y"),
        ("DFLOCKD_RAFT_TLS_KEY", "/y"),
        ("DFLOCKD_RAFT_TLS_CA", "/y"),
    ];
    let token = TokenFile::new(SECRET);
    let entry = "[[identity]]\nname = 'a'\nrole = 'use'";
    let (identities, empty) = (TokenFile::new(entry), TokenFile::new(""));
    for setting in settings() {
        let value = match setting.flag {
            "host" | "http-host" | "grpc-host" => "localhost",
            "http-cors-allowed-origins" => "https://a.example",
            "http-allowed-hosts" => "a.example",
            "otlp-endpoint" => "http://a.example:4317",
            "log-format" => "json",
            "auto-release" => "lease",
            "follower-mode" => "forward",
            "tls-cert" | "tls-key" | "tls-client-ca" | "fence-state-file" => "/x",
            "identities-file" => identities.path(),
            "raft-dir" | "raft-tls-cert" | "raft-tls-key" | "raft-tls-ca" => "/x",
            "raft-addr" | "advertise-addr" => "127.0.0.1:9",
            "http-advertise-addr" | "grpc-advertise-addr" => "127.0.0.1:9",
            "node-id" => "m",
            "cluster-peers" => "n=a:1@a:2,m=b:1@b:2",
            "auth-token" | "admin-token" => "t",
            "raft-auth-token" => SECRET,
            "auth-token-file" | "admin-token-file" | "raft-auth-token-file" => token.path(),
            "election-timeout-ms" => "2000",
            "heartbeat-interval-ms" => "99",
            "max-pending-bytes" | "max-lease-ttl" => "999999",
            // The only boolean that needs company.
            "require-auth" => "false",
            _ if setting.boolean => "1",
            _ => "9",
        };
        let flag = format!("--{}={value}", setting.flag);
        // Some stand only together with others.
        let company: Env<'_> = match setting.flag {
            "tls-cert" | "tls-key" => &[("DFLOCKD_TLS_KEY", "/y"), ("DFLOCKD_TLS_CERT", "/y")],
            "tls-client-ca" => &[
                ("DFLOCKD_TLS_KEY", "/y"),
                ("DFLOCKD_TLS_CERT", "/y"),
                ("DFLOCKD_IDENTITIES_FILE", empty.path()),
            ],
            "otlp-sample-percent" => &[("DFLOCKD_OTLP_ENDPOINT", "http://b.example")],
            "raft-dir" => REPLICATED,
            _ if setting.needs == "raft-dir" => REPLICATED,
            _ => &[],
        };
        let mut others = company.to_vec();
        others.retain(|(name, _)| *name != setting.env);
        // The value of a token would win over its file.
        others.retain(|(name, _)| !setting.env.starts_with(&format!("{name}_FILE")));
        let shown = |mut config: Config| {
            config.given.clear();
            format!("{config:?}")
        };
        let by_flag = shown(config(&[&flag], &others));
        let by_env = shown(config(&[], &[&others[..], &[(setting.env, value)]].concat()));
        assert_eq!(
            by_flag.replace(&format!("--{}", setting.flag), setting.env),
            by_env,
            "{setting:?}"
        );
        let same = ["auto-release-on-disconnect", "require-auth"].contains(&setting.flag);
        assert_eq!(by_flag == shown(config(&[], company)), same, "{setting:?}");
    }
}

#[test]
fn ranges() {
    refuses(
        &[],
        r#"
        --max-locks -1  => --max-locks must be > 0 (got -1)
        --max-locks=0   => --max-locks must be > 0 (got 0)
        --max-keys -1   => --max-keys must be >= 0 (got -1)
        --max-locks=    => --max-locks must be an integer (got "")
        --max-locks=1.5 => --max-locks must be an integer (got "1.5")
        --max-keys=9223372036854775808 => --max-keys must be <= 9223372036854775807 (got 9223372036854775808)
        --max-value-bytes=0            => --max-value-bytes must be between 1 and 1048576 (got 0)
        --max-value-bytes=1048577      => --max-value-bytes must be between 1 and 1048576 (got 1048577)
        --port=65536              => --port must be between 0 and 65535 (got 65536)
        --port -1                 => --port must be between 0 and 65535 (got -1)
        --default-lease-ttl=0     => --default-lease-ttl must be > 0 (got 0)
        --lease-sweep-interval=0  => --lease-sweep-interval must be > 0 (got 0)
        --gc-interval=0           => --gc-interval must be > 0 (got 0)
        --read-timeout=0          => --read-timeout must be > 0 (got 0)
        --read-timeout=9223372037 => --read-timeout must be <= 9223372036 (got 9223372037)
        --gc-max-idle=-5          => --gc-max-idle must be >= 0 (got -5)
        --write-timeout=-5        => --write-timeout must be >= 0 (got -5)
        --shutdown-timeout=-5     => --shutdown-timeout must be >= 0 (got -5)
        --idle-timeout=-5         => --idle-timeout must be >= 0 (got -5)
        --host=                   => --host must not be empty (got "")
        --log-format=xml          => --log-format must be text or json (got "xml")
        --auto-release=never      => --auto-release must be any, clean or lease (got "never")
        "#,
    );
    refused(&["--max-locks= 7"], &[], r#"--max-locks must be an integer (got " 7")"#);
    check(&["--port=0"], &[], Ok((|c| c.port, 0)));
    check(&["--port=65535"], &[], Ok((|c| c.port, 65_535)));
    for flag in ["gc-max-idle", "write-timeout", "shutdown-timeout", "idle-timeout"] {
        config(&[&format!("--{flag}=0")], &[]);
    }
    let longest = Duration::from_secs(SECONDS_MAX);
    check(&["--read-timeout=9223372036"], &[], Ok((|c| c.read_timeout, longest)));
    check(&["--log-format=json"], &[], Ok((|c| c.log_format, LogFormat::Json)));
}

#[test]
fn value_bytes() {
    for (bytes, warns) in [("1", false), ("65533", false), ("65534", true), ("1048576", true)] {
        let warnings = config(&["--max-value-bytes", bytes], &[]).warnings();
        assert_eq!(warnings.len(), usize::from(warns), "{warnings:?}");
    }
}

#[test]
fn older_names_of_the_gc_variables() {
    let gc = |c: &Config| (c.gc_interval.as_secs(), c.warnings());
    let (old, new) = (("DFLOCKD_GC_LOOP_SLEEP", "7"), ("DFLOCKD_GC_INTERVAL_S", "8"));
    let warning = "DFLOCKD_GC_LOOP_SLEEP is deprecated, use DFLOCKD_GC_INTERVAL_S".to_owned();
    assert_eq!(gc(&config(&[], &[old])), (7, vec![warning]));
    assert_eq!(gc(&config(&[], &[old, new])), (8, vec![]));
    assert_eq!(gc(&config(&["--gc-interval=9"], &[old, new])), (9, vec![]));
    assert_eq!(gc(&config(&["--gc-interval=9"], &[("DFLOCKD_GC_LOOP_SLEEP", "x")])).0, 9);
    let message = r#"DFLOCKD_GC_MAX_UNUSED_TIME must be an integer (got "x")"#;
    refused(&[], &[("DFLOCKD_GC_MAX_UNUSED_TIME", "x")], message);
    let idle = config(&[], &[("DFLOCKD_GC_MAX_UNUSED_TIME", "0")]).gc_max_idle;
    assert_eq!(idle, Duration::ZERO);
}

#[test]
fn settings_that_need_each_other() {
    refuses(
        &[],
        r#"
        --tls-cert=c               => --tls-cert needs --tls-key
        DFLOCKD_TLS_KEY=k          => --tls-key needs --tls-cert
        --startup-grant-delay auto => --startup-grant-delay auto needs --fence-state-file
        --startup-grant-delay=soon => --startup-grant-delay must be an integer or auto (got "soon")
        --startup-grant-delay=-1   => --startup-grant-delay must be >= 0 (got -1)
        --require-auth             => --require-auth needs --auth-token, --auth-token-file or --identities-file
        --tls-client-ca=c          => --tls-client-ca needs --identities-file
        --max-lease-ttl=9          => --default-lease-ttl (33 s) is above --max-lease-ttl (9 s)
        "#,
    );
    let pair = config(&["--tls-cert=c"], &[("DFLOCKD_TLS_KEY", "k")]);
    assert_eq!((pair.tls_cert, pair.tls_key), (Some("c".into()), Some("k".into())));
    let auto = ["--startup-grant-delay=auto", "--fence-state-file=/f"];
    check(&auto, &[], Ok((|c| c.startup_grant_delay, GrantDelay::Auto)));
    let env = [("DFLOCKD_STARTUP_GRANT_DELAY_S", "12")];
    check(&[], &env, Ok((|c| c.startup_grant_delay, GrantDelay::Seconds(12))));
    config(&["--require-auth"], &[("DFLOCKD_AUTH_TOKEN", "0123456789abcdef")]);
    let identities = TokenFile::new("[[identity]]\nname = 'a'\nrole = 'use'");
    let file = format!("--identities-file={}", identities.path());
    let named = config(&["--require-auth", &file], &[]);
    assert_eq!(named.identities.unwrap().identities()[0].name(), "a");
    refused(&[&file, "--tls-client-ca=c"], &[], "--tls-client-ca needs --tls-cert");
}

#[test]
fn replicated_mode() {
    let config = node(&[]);
    let c = config.replicated().unwrap();
    assert_eq!((c.dir, c.node), (Path::new("/d"), "n1"));
    assert_eq!(c.raft_addr, &HostPort { host: "127.0.0.1".to_owned(), port: 7001 });
    assert_eq!((c.dial_addr, c.advertise_addr), (c.raft_addr, None));
    assert_eq!((c.formation, config.witness), (Formation::Join, false));
    assert!(c.secret.unwrap().matches(SECRET.as_bytes()) && c.tls.is_none());
    assert!(config.warnings().is_empty());
    let config = node(&["--advertise-addr=Public.example:6388"]);
    let advertised = config.replicated().unwrap().advertise_addr;
    assert_eq!(advertised, Some(&host_port("public.example:6388")));
}

#[test]
fn ranges_of_replicated_mode() {
    refuses(
        NODE,
        r#"
        --raft-dir=                 => --raft-dir must not be empty (got "")
        --orphan-ttl=-1             => --orphan-ttl must be >= 0 (got -1)
        --failover-grace=61         => --failover-grace must be between 0 and 60 (got 61)
        --snapshot-entries=0        => --snapshot-entries must be > 0 (got 0)
        --election-timeout-ms=99    => --election-timeout-ms must be between 100 and 60000 (got 99)
        --election-timeout-ms=60001 => --election-timeout-ms must be between 100 and 60000 (got 60001)
        --heartbeat-interval-ms=9   => --heartbeat-interval-ms must be between 10 and 20000 (got 9)
        --heartbeat-interval-ms=1s  => --heartbeat-interval-ms must be an integer (got "1s")
        --follower-mode=proxy       => --follower-mode must be redirect, forward or auto (got "proxy")
        --cluster-bootstrap=2       => --cluster-bootstrap must be a boolean (got "2")
        "#,
    );
    let longest = "n".repeat(64);
    for id in ["a", "A-1_b.c", &longest] {
        assert_eq!(node(&["--node-id", id]).replicated().unwrap().node, id);
    }
    for id in ["", "a b", "a/b", "ä", &"n".repeat(65)] {
        let message = format!("--node-id must be 1-64 of A-Z a-z 0-9 . _ - (got {id:?})");
        refused(&["--node-id", id], NODE, &message);
    }
}

#[test]
fn heartbeats_and_elections() {
    let times = |args: &[&str]| {
        let c = node(args);
        (c.election_timeout.as_millis(), c.heartbeat_interval.as_millis())
    };
    assert_eq!(times(&["--election-timeout-ms=60000"]), (60_000, 150));
    assert_eq!(times(&["--election-timeout-ms=450"]), (450, 150));
    assert_eq!(times(&["--election-timeout-ms=449"]), (449, 149));
    assert_eq!(times(&["--election-timeout-ms=100"]), (100, 33));
    let both = ["--election-timeout-ms=300", "--heartbeat-interval-ms=100"];
    assert_eq!(times(&both), (300, 100));
    let third = "--heartbeat-interval-ms must be at most a third of --election-timeout-ms,";
    let both = ["--election-timeout-ms=449", "--heartbeat-interval-ms=150"];
    refused(&both, NODE, &format!("{third} 149 (got 150)"));
    refused(&["--heartbeat-interval-ms=334"], NODE, &format!("{third} 333 (got 334)"));
}

#[test]
fn addresses() {
    for (text, shown) in [
        ("a:1", "a:1"),
        ("My_Host-1.example.:65535", "my_host-1.example.:65535"),
        ("127.0.0.1:07", "127.0.0.1:7"),
        ("[::1]:7", "[::1]:7"),
        ("[2001:DB8:0::1]:7", "[2001:db8::1]:7"),
        ("0.0.0.0:0", "0.0.0.0:0"),
        ("[::]:7", "[::]:7"),
    ] {
        assert_eq!(node(&["--raft-addr", text]).raft_addr.unwrap().to_string(), shown);
    }
    for text in ["", "a", "a:", ":1", "a:65536", "a:+1", "a:-1", "a b:1", "::1:7", "[a]:1", "a@b:1"]
    {
        for flag in ["--raft-addr", "--advertise-addr"] {
            let message = format!("{flag} must be host:port (got {text:?})");
            refused(&[flag, text], NODE, &message);
        }
    }
    for text in ["a:0", "0.0.0.0:1", "[::]:1", "[::ffff:0.0.0.0]:1"] {
        let message =
            format!("--advertise-addr must be a host:port that others can dial (got {text:?})");
        refused(&["--advertise-addr", text], NODE, &message);
    }
}

/// A setting of the policy has a flag of the same name, range and default.
#[test]
fn flags_of_the_policy() {
    assert_eq!(Config::default().policy(), Policy::default());
    for setting in POLICY_SETTINGS {
        let flag = find(setting.name).expect(setting.name);
        if !matches!(setting.get(&Policy::default()), PolicyValue::Number(_)) {
            continue;
        }
        for number in [0, 1, 60, 61, 1_048_576, 1_048_577] {
            let as_setting = setting.set(&mut Policy::default(), PolicyValue::Number(number));
            let as_flag = parse(&[&format!("--{}={number}", flag.flag)], NODE);
            let why = as_flag.as_ref().err().map(ToString::to_string).unwrap_or_default();
            assert_eq!(as_setting.is_ok(), !why.contains(" must be "), "{number}: {why}");
        }
    }
}

#[test]
fn peer_list() {
    let list = "n2=B:7001@b:6388, n1=a:7001@a:6388,n3=[::1]:7001@10.0.0.3:6388";
    let config = node(&["--cluster-peers", list]);
    let peers = config.cluster_peers.iter();
    let peers: Vec<_> =
        peers.map(|p| format!("{} {} {}", p.node, p.raft_addr, p.client_addr)).collect();
    assert_eq!(peers, ["n1 a:7001 a:6388", "n2 b:7001 b:6388", "n3 [::1]:7001 10.0.0.3:6388"]);
    let c = config.replicated().unwrap();
    assert_eq!(c.formation, Formation::Static);
    // The entry of this node is what others dial, --raft-addr is where it binds.
    assert_eq!((c.dial_addr, c.raft_addr), (&host_port("a:7001"), &host_port("127.0.0.1:7001")));
    assert_eq!(c.advertise_addr, Some(&host_port("a:6388")));
    let config = node(&["--cluster-peers", list, "--advertise-addr=public:1"]);
    assert_eq!(config.replicated().unwrap().advertise_addr, Some(&host_port("public:1")));

    for (list, rule) in [
        ("", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n1=a:1@a:2,", "entry 2 must be id=raftHost:port@clientHost:port"),
        ("n1=a:1", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n1@a:1=a:2", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n1=a:1@a:2;n2=b:1@b:2", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n 1=a:1@a:2", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n1=a:1@a", "entry 1 must be id=raftHost:port@clientHost:port"),
        ("n1=a:1@a:2,n2=b:1@b:2,n1=c:1@c:2", "must name n1 only once"),
        ("n1=a:1@a:2,n2=A:1@b:2", "must have a:1 only once"),
        ("n1=a:1@a:2,n2=b:1@a:2", "must have a:2 only once"),
        ("n1=a:1@a:2,n2=b:1@a:1", "must have a:1 only once"),
        ("n1=[::1]:1@a:2,n2=[0::1]:1@b:1", "must have [::1]:1 only once"),
        ("n1=a:0@a:2", "must not have a:0, which others cannot dial"),
        ("n1=a:1@0.0.0.0:2", "must not have 0.0.0.0:2, which others cannot dial"),
    ] {
        let message = format!("--cluster-peers {rule} (got {list:?})");
        refused(&["--cluster-peers", list], NODE, &message);
    }
    let message = "--cluster-peers must contain this node (--node-id n1 is not in it)";
    refused(&["--cluster-peers=n2=b:1@b:2"], NODE, message);
}

#[test]
fn ways_to_begin() {
    let formation = |args: &[&str]| node(args).replicated().unwrap().formation;
    let list = "--cluster-peers=n1=a:1@a:2,n2=b:1@b:2,n3=c:1@c:2";
    let own = "--cluster-peers=n1=a:1@a:2";
    assert_eq!(formation(&["--cluster-bootstrap"]), Formation::Bootstrap);
    assert_eq!(formation(&["--cluster-bootstrap", own]), Formation::Bootstrap);
    assert_eq!(formation(&[own]), Formation::Static);
    assert_eq!(formation(&[own, "--no-cluster-bootstrap"]), Formation::Static);
    refuses(
        NODE,
        "
        --cluster-bootstrap --cluster-peers=n1=a:1@a:2,n2=b:1@b:2,n3=c:1@c:2 => \
            --cluster-bootstrap contradicts other nodes in --cluster-peers (n2, n3)
        --cluster-bootstrap --cluster-peers=n2=b:1@b:2 => \
            --cluster-peers must contain this node (--node-id n1 is not in it)
        --witness --cluster-bootstrap            => --witness needs other nodes: it serves no clients itself
        --witness --cluster-peers=n1=a:1@a:2     => --witness needs other nodes: it serves no clients itself
        ",
    );

    // What stands in the membership must lead the nodes that are added to this one.
    for address in ["0.0.0.0:7001", "[::]:7001", "10.0.0.1:0"] {
        let bind = format!("--raft-addr={address}");
        let message = format!(
            "--cluster-bootstrap needs a --raft-addr that others can dial, or this node in \
             --cluster-peers (got {address})"
        );
        refused(&["--cluster-bootstrap", &bind], NODE, &message);
        node(&["--cluster-bootstrap", own, &bind]);
        node(&[&bind]);
    }
    node(&["--cluster-bootstrap", "--raft-addr=127.0.0.1:0"]);

    assert!(node(&["--witness", list]).witness && node(&["--witness"]).witness);
}

#[test]
fn what_replicated_mode_needs() {
    refuses(
        &[("DFLOCKD_RAFT_DIR", "/d")],
        "
        --no-debug     => --raft-dir needs --node-id
        --node-id=n1   => --raft-dir needs --raft-addr
        --node-id=n1 --raft-addr=127.0.0.1:7001 => --raft-dir needs --raft-auth-token or --raft-auth-token-file, \
            or --raft-tls-cert, --raft-tls-key and --raft-tls-ca
        ",
    );
}

#[test]
fn what_only_replicated_mode_has() {
    for (flag, value) in [
        ("node-id", "n1"),
        ("raft-addr", "a:1"),
        ("advertise-addr", "a:1"),
        ("http-advertise-addr", "a:1"),
        ("grpc-advertise-addr", "a:1"),
        ("cluster-peers", "n1=a:1@a:2"),
        ("cluster-bootstrap", "true"),
        ("witness", "true"),
        ("raft-auth-token", SECRET),
        ("raft-tls-cert", "/c"),
        ("raft-tls-key", "/c"),
        ("raft-tls-ca", "/c"),
        // Even if the value is the default: whoever gives it believes in a cluster.
        ("orphan-ttl", "0"),
        ("follower-mode", "auto"),
        ("failover-grace", "3"),
        ("snapshot-entries", "100000"),
        ("election-timeout-ms", "1000"),
        ("heartbeat-interval-ms", "150"),
    ] {
        let message = format!("--{flag} needs --raft-dir");
        refused(&[&format!("--{flag}={value}")], &[], &message);
        refused(&[], &[(find(flag).unwrap().env, value)], &message);
        refused(&[], &[(find(flag).unwrap().env, value), ("DFLOCKD_RAFT_DIR", "")], &message);
    }
    let file = TokenFile::new(SECRET);
    let message = "--raft-auth-token-file needs --raft-dir";
    refused(&["--raft-auth-token-file", file.path()], &[], message);
    refused(&[], &[("DFLOCKD_RAFT_AUTH_TOKEN_FILE", file.path())], message);
    assert_eq!(settings().iter().filter(|s| s.needs == "raft-dir").count(), 20);
    config(&["--cluster-bootstrap=false", "--no-witness"], &[("DFLOCKD_WITNESS", "no")]);
}

#[test]
fn what_replicated_mode_has_not() {
    let message = "--fence-state-file cannot be used with --raft-dir";
    refused(&["--fence-state-file=/f"], NODE, message);
    refused(&["--fence-state-file=/f", "--startup-grant-delay=auto"], NODE, message);
    let message = "--startup-grant-delay cannot be used with --raft-dir";
    for delay in ["0", "5", "auto"] {
        refused(&["--startup-grant-delay", delay], NODE, message);
    }
    let env = [NODE, &[("DFLOCKD_STARTUP_GRANT_DELAY_S", "5")]].concat();
    refused(&[], &env, message);
}

#[test]
fn a_durable_node_alone() {
    let args = ["--raft-dir=D", "--node-id=n1", "--cluster-bootstrap"];
    let warning = "there is no --raft-auth-token: no other node can be added until this one is \
                   started with one";
    for address in ["127.0.0.1:7001", "[::1]:7001", "localhost:7001", "127.0.0.1:0"] {
        let bind = ["--raft-addr", address];
        let alone = config(&[&args[..], &bind].concat(), &[]);
        assert_eq!(alone.warnings(), [warning]);
        let secret = alone.replicated().unwrap().secret.unwrap();
        assert_eq!(secret.bytes().len(), 32);
        // Drawn once, and not the same for everybody.
        assert!(alone.reload_raft_secret().unwrap().unwrap().matches(secret.bytes()));
        let another = config(&[&args[..], &bind].concat(), &[]);
        assert!(!another.replicated().unwrap().secret.unwrap().matches(secret.bytes()));
    }
    let needed = "--raft-dir needs --raft-auth-token or --raft-auth-token-file, \
                  or --raft-tls-cert, --raft-tls-key and --raft-tls-ca";
    for address in ["10.0.0.1:7001", "example.org:7001"] {
        refused(&[&args[..], &["--raft-addr", address]].concat(), &[], needed);
    }
    refused(&[&args[..2], &["--raft-addr=127.0.0.1:7001"]].concat(), &[], needed);
    let open = [&args[..], &["--raft-addr=127.0.0.1:7001", "--host=0.0.0.0"]].concat();
    let warnings = config(&open, &[]).warnings();
    assert!(!warnings.iter().any(|warning| warning.contains("--advertise-addr")));
}

#[test]
fn warnings_for_an_address_that_clients_cannot_dial() {
    let warned = |args: &[&str]| {
        let all = [&["--raft-addr=10.0.0.1:7001", "--auth-token=t"], args].concat();
        let warnings = config(&all, NODE).warnings();
        warnings.iter().any(|warning| warning.contains("--advertise-addr"))
    };
    assert!(warned(&[]) && warned(&["--host=0.0.0.0"]) && warned(&["--host=[::]"]));
    assert!(!warned(&["--host=10.0.0.1"]) && !warned(&["--host=example.org"]));
    assert!(!warned(&["--advertise-addr=10.0.0.1:6388"]));
    assert!(!warned(&["--cluster-peers=n1=10.0.0.1:7001@10.0.0.1:6388"]));
}

#[test]
fn release_on_disconnect() {
    let [on, off] = ["--auto-release-on-disconnect", "--no-auto-release-on-disconnect"];
    let [any, clean, lease] =
        ["--auto-release=any", "--auto-release=clean", "--auto-release=lease"];
    for (args, in_memory, replicated) in [
        (&[][..], AutoRelease::Any, AutoRelease::Clean),
        (&[on], AutoRelease::Any, AutoRelease::Clean),
        (&[off], AutoRelease::Lease, AutoRelease::Lease),
        (&[any], AutoRelease::Any, AutoRelease::Any),
        (&[clean], AutoRelease::Clean, AutoRelease::Clean),
        (&[lease], AutoRelease::Lease, AutoRelease::Lease),
        (&[on, any], AutoRelease::Any, AutoRelease::Any),
        (&[on, clean], AutoRelease::Clean, AutoRelease::Clean),
        (&[off, lease], AutoRelease::Lease, AutoRelease::Lease),
    ] {
        let memory = config(args, &[]);
        assert_eq!(memory.disconnect_policy(), in_memory, "{args:?}");
        assert_eq!(memory.auto_release_on_disconnect, in_memory != AutoRelease::Lease);
        let node = config(args, NODE);
        assert_eq!(node.disconnect_policy(), replicated, "{args:?}");
    }
    for (args, policy, other) in
        [([on, lease], "lease", true), ([off, any], "any", false), ([off, clean], "clean", false)]
    {
        let message =
            format!("--auto-release {policy} contradicts --auto-release-on-disconnect={other}");
        refused(&args, &[], &message);
        refused(&args, NODE, &message);
    }
    let contradiction = "--auto-release lease contradicts --auto-release-on-disconnect=true";
    let yes = ("DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "yes");
    refused(&[], &[("DFLOCKD_AUTO_RELEASE", "lease"), yes], contradiction);
    refused(&[lease], &[yes], contradiction);
    let by_env = config(&[], &[("DFLOCKD_AUTO_RELEASE", "clean")]);
    assert_eq!(by_env.disconnect_policy(), AutoRelease::Clean);
}

/// GUARANTEES 48: a shared secret alone protects peers beyond loopback only if somebody says so.
#[test]
fn peers_beyond_loopback_need_tls_or_a_word() {
    let without = &NODE[..4];
    let files = ["--raft-tls-cert=/c", "--raft-tls-key=/k", "--raft-tls-ca=/a"];
    let message = |beyond: &str| {
        format!(
            "peers beyond loopback ({beyond}) need --raft-tls-cert, --raft-tls-key and \
             --raft-tls-ca, which `dflockctl cluster init` and `dflockctl cluster cert` make, \
             or --raft-no-tls to rely on the shared secret alone"
        )
    };
    let near = "n1=127.0.0.1:1@127.0.0.1:2,n2=localhost:1@example.org:2,n3=[::1]:1@a:2";
    config(&["--cluster-peers", near], without);
    let far = "n1=127.0.0.1:1@a:2,n2=10.0.0.2:1@a:3";
    for (args, beyond) in [
        (["--raft-addr=10.0.0.1:7001"].as_slice(), "10.0.0.1:7001"),
        (&["--raft-addr=0.0.0.0:7001"], "0.0.0.0:7001"),
        (&["--raft-addr=[::]:7001"], "[::]:7001"),
        (&["--raft-addr=example.org:7001"], "example.org:7001"),
        (&["--cluster-peers", far], "10.0.0.2:1"),
    ] {
        refused(args, without, &message(beyond));
        config(&[args, &["--raft-no-tls"]].concat(), without);
        config(&[args, &files].concat(), without);
    }
}

#[test]
fn tls_between_nodes() {
    let files = ["--raft-tls-cert=/c", "--raft-tls-key=/k", "--raft-tls-ca=/a"];
    let [cert, key, ca] = ["/c", "/k", "/a"].map(Path::new);
    let expected = RaftTls { cert, key, ca };
    let both = node(&files);
    let both = both.replicated().unwrap();
    assert_eq!((both.tls, both.secret.is_some()), (Some(expected), true));
    // Certificates prove who is there as well as a secret does.
    let tls_only = config(&files, &NODE[..3]);
    let cluster = tls_only.replicated().unwrap();
    assert_eq!((cluster.tls, cluster.secret.is_none()), (Some(expected), true));
    assert!(tls_only.reload_raft_secret().unwrap().is_none());
    let alone = config(&[&files[..], &["--cluster-bootstrap"]].concat(), &NODE[..3]);
    assert!(alone.replicated().unwrap().secret.is_none() && alone.warnings().is_empty());

    refuses(
        NODE,
        "
        --raft-tls-cert=/c                     => --raft-tls-cert needs --raft-tls-key
        --raft-tls-key=/k                      => --raft-tls-key needs --raft-tls-cert
        --raft-tls-ca=/a                       => --raft-tls-ca needs --raft-tls-cert
        --raft-tls-cert=/c --raft-tls-key=/k   => --raft-tls-cert needs --raft-tls-ca
        --raft-tls-cert=/c --raft-tls-ca=/a    => --raft-tls-cert needs --raft-tls-key
        --raft-tls-key=/k --raft-tls-ca=/a     => --raft-tls-key needs --raft-tls-cert
        ",
    );
    let env = [
        NODE,
        &[("DFLOCKD_RAFT_TLS_CERT", "/c"), ("DFLOCKD_RAFT_TLS_KEY", "/k")],
        &[("DFLOCKD_RAFT_TLS_CA", "/a")],
    ];
    assert_eq!(config(&[], &env.concat()).replicated().unwrap().tls, Some(expected));
}

#[test]
fn secret_between_nodes() {
    let [by_flag, by_file, by_env, by_env_file] = ["a", "b", "c", "d"].map(|s| s.repeat(32));
    let file = TokenFile::new(format!("\n {by_file}\n"));
    let env_file = TokenFile::new(&by_env_file);
    let all = [
        &NODE[..3],
        &[("DFLOCKD_RAFT_AUTH_TOKEN_FILE", env_file.path())],
        &[("DFLOCKD_RAFT_AUTH_TOKEN", by_env.as_str())],
    ]
    .concat();
    let flag = ["--raft-auth-token", &by_flag];
    let file_flag = ["--raft-auth-token-file", file.path()];
    for (args, env, secret) in [
        (&[file_flag, flag].concat()[..], &all[..], &by_flag),
        (&file_flag, &all, &by_file),
        (&[], &all, &by_env),
        (&[], &all[..4], &by_env_file),
    ] {
        let node = config(args, env);
        let chosen = node.replicated().unwrap().secret.unwrap();
        assert_eq!(chosen.bytes(), secret.as_bytes());
        assert!(node.raft_auth_token.as_ref().unwrap().matches(secret.as_bytes()));
        assert!(node.auth_token.is_none() && node.admin_token.is_none());
        assert!(!format!("{node:?}").contains(secret.as_str()));
    }

    let short = "x".repeat(31);
    let rule = "the token must have at least 32 bytes";
    refused(&["--raft-auth-token", &short], NODE, &format!("--raft-auth-token: {rule}"));
    let env = [&NODE[..3], &[("DFLOCKD_RAFT_AUTH_TOKEN", &*short)]].concat();
    refused(&[], &env, &format!("DFLOCKD_RAFT_AUTH_TOKEN: {rule}"));
    refused(&["--raft-auth-token="], NODE, "--raft-auth-token must not be empty");

    let node = config(&file_flag, &NODE[..3]);
    // White space around it does not count.
    std::fs::write(file.path(), format!("{short}\n")).unwrap();
    let error = node.reload_raft_secret().unwrap_err();
    assert_eq!(error.to_string(), format!("--raft-auth-token-file: {rule}"));
    std::fs::write(file.path(), &by_env).unwrap();
    assert!(node.reload_raft_secret().unwrap().unwrap().matches(by_env.as_bytes()));
    let fixed = config(&[], NODE).reload_raft_secret().unwrap().unwrap();
    assert!(fixed.matches(SECRET.as_bytes()));
    assert!(Config::default().reload_raft_secret().unwrap().is_none());
}

#[test]
fn token_chain() {
    let file = TokenFile::new(b" \t from-file \r\n");
    let env_file = TokenFile::new(b"from-env-file");
    let all = [("DFLOCKD_AUTH_TOKEN", "from-env"), ("DFLOCKD_AUTH_TOKEN_FILE", env_file.path())];
    let [flag, file_flag] = ["--auth-token=from-flag", "--auth-token-file"];
    for (args, env, token) in [
        (&[file_flag, file.path(), flag][..], &all[..], "from-flag"),
        (&[file_flag, file.path()], &all, "from-file"),
        (&[], &all, "from-env"),
        (&[], &all[1..], "from-env-file"),
    ] {
        let config = config(args, env);
        assert!(config.auth_token.unwrap().matches(token.as_bytes()), "{token}");
        assert!(config.admin_token.is_none());
    }
    let admin = config(&[], &[("DFLOCKD_ADMIN_TOKEN_FILE", file.path())]);
    assert!(admin.admin_token.as_ref().unwrap().matches(b"from-file"));
    assert!(admin.reload_admin_token().unwrap().unwrap().matches(b"from-file"));
    assert!(admin.auth_token.is_none());
    // A selected source is never passed over, even if the next one would do.
    refused(&["--auth-token="], &all, "--auth-token must not be empty");
    for name in ["DFLOCKD_AUTH_TOKEN", "DFLOCKD_AUTH_TOKEN_FILE", "DFLOCKD_ADMIN_TOKEN"] {
        let message = "is set but empty: unset it for no token, or give it a value";
        refused(&[], &[(name, "")], &format!("{name} {message}"));
    }
    config(&[flag], &[("DFLOCKD_AUTH_TOKEN", "")]);
    refused(&["--auth-token-file="], &all, r#"--auth-token-file must not be empty (got "")"#);
}

#[test]
fn tokens_that_no_client_could_send() {
    for (content, message) in [
        (&b" \n\t"[..], "PATH is empty"),
        (b"a\nb\nc", "PATH has more than two lines: a token, and the one before it"),
        (&[b'x'; 65_537], "the token must not be longer than 65536 bytes"),
    ] {
        let file = TokenFile::new(content);
        let message = format!("--admin-token-file: {}", message.replace("PATH", file.path()));
        refused(&["--admin-token-file", file.path()], &[], &message);
    }
    let file = TokenFile::new([b'x'; 65_536]);
    config(&["--admin-token-file", file.path()], &[]);
    refused(&["--auth-token=a\rb"], &[], "--auth-token: the token must not contain a line break");
    let message = "DFLOCKD_AUTH_TOKEN: the token must not begin or end with white space";
    refused(&[], &[("DFLOCKD_AUTH_TOKEN", " a")], message);
    refused(&["--admin-token=a b"], &[], "--admin-token: the token must not contain white space");
    config(&["--auth-token=a b"], &[]);
    let missing = parse(&["--auth-token-file=/nonexistent/token"], &[]).unwrap_err();
    let expected = "--auth-token-file: cannot read /nonexistent/token: ";
    assert!(missing.to_string().starts_with(expected), "{missing}");
    assert!(parse(&["--auth-token-file=/"], &[]).is_err());
}

#[test]
fn token_is_read_again() {
    let file = TokenFile::new(b"old");
    let from_file = config(&["--auth-token-file", file.path()], &[]);
    std::fs::write(file.path(), "new\n").unwrap();
    let secret = from_file.reload_auth_token().unwrap().unwrap();
    assert!(secret.matches(b"new") && !secret.matches(b"old"));
    std::fs::write(file.path(), "newer\n\n new \r\n").unwrap();
    let both = from_file.reload_auth_token().unwrap().unwrap();
    assert!(both.newest().matches(b"newer") && both.matches(b"new") && !both.matches(b"old"));
    std::fs::write(file.path(), "\n").unwrap();
    assert!(from_file.reload_auth_token().is_err());
    assert!(Config::default().reload_auth_token().unwrap().is_none());
    let fixed = config(&["--auth-token=t"], &[]);
    assert!(fixed.reload_auth_token().unwrap().unwrap().matches(b"t"));
}

#[test]
fn weak_tokens() {
    let long = "0123456789abcdef";
    let raft = "r".repeat(32);
    let short = |name: &str| {
        format!(
            "{name}: a token has fewer than 16 bytes and can be guessed; make one with openssl \
             rand -hex 32"
        )
    };
    let equal = |one: &str, other: &str| {
        format!("{one} and {other} have the same token: whoever has one right has the other")
    };
    let file = TokenFile::new(format!("{long}\nold\n"));
    let node = [NODE, &[("DFLOCKD_RAFT_AUTH_TOKEN", &*raft)]].concat();
    for (args, env, expected) in [
        (&["--auth-token", long][..], &[][..], vec![]),
        (&["--auth-token", &long[1..]], &[], vec![short("--auth-token")]),
        (&["--auth-token-file", file.path()], &[], vec![short("--auth-token-file")]),
        (&[], &[("DFLOCKD_ADMIN_TOKEN", "x")], vec![short("DFLOCKD_ADMIN_TOKEN")]),
        (
            &["--auth-token", long, "--admin-token", long],
            &[],
            vec![equal("--auth-token", "--admin-token")],
        ),
        (
            &["--auth-token", "0", "--admin-token-file", file.path()],
            &[],
            vec![short("--auth-token"), short("--admin-token-file")],
        ),
        (&["--admin-token", &raft], &node, vec![equal("--admin-token", "DFLOCKD_RAFT_AUTH_TOKEN")]),
    ] {
        let warned = config(args, env);
        assert_eq!(warned.weak_tokens(), expected, "{args:?}");
        assert!(expected.iter().all(|text| warned.warnings().contains(text)), "{args:?}");
        if let (Some(first), true) = (expected.first(), warned.auth_token.is_some()) {
            let args = [args, &["--require-auth"]].concat();
            refused(&args, env, &format!("--require-auth: {first}"));
        }
    }
    // What the server would not start with it does not take at a reload either.
    let file = TokenFile::new(long);
    let args = ["--auth-token-file", file.path(), "--admin-token=fedcba9876543210"];
    let started = config(&[&args[..], &["--require-auth"]].concat(), &[]);
    for weak in ["short", "fedcba9876543210"] {
        std::fs::write(file.path(), weak).unwrap();
        assert!(started.reload_auth_token().is_err(), "{weak}");
        assert!(config(&args, &[]).reload_auth_token().is_ok(), "{weak}");
    }
}

#[test]
fn files_that_others_can_read() {
    use std::os::unix::fs::PermissionsExt;
    let dir = Dir::new();
    let (file, name) = (dir.write("token", b"0123456789abcdef"), dir.name("data"));
    let data = Path::new(&name);
    std::fs::create_dir(data).unwrap();
    let mode = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    let node = [&NODE[1..], &[("DFLOCKD_RAFT_DIR", &*name)]].concat();
    let both = config(&["--auth-token-file", &file], &node);
    mode(Path::new(&file), 0o600);
    mode(data, 0o755);
    assert_eq!(both.warnings_of_files(), [""; 0]);
    mode(Path::new(&file), 0o604);
    mode(data, 0o777);
    let (shown, path) = (data.display(), &file);
    assert_eq!(
        both.warnings_of_files(),
        [
            format!("--auth-token-file: {path} can be read by other users; chmod 600 it"),
            format!("--raft-dir: {shown} can be changed by other users; chmod 700 it"),
        ]
    );
    // How service managers hand a secret of root to the group of the server.
    mode(Path::new(&file), 0o440);
    let owner = mode_and_owner(Path::new(&file)).unwrap().1;
    assert_eq!(is_readable_by_others(Path::new(&file)), owner != 0);
}

#[test]
fn secrets_compare_and_stay_secret() {
    for len in [1, 2, 3, 4, 31, 32, 33, 1000] {
        let token: Vec<u8> = (1..=255).cycle().take(len).collect();
        let secret = Secret::new(&token);
        assert!(secret.matches(&token));
        assert!(!secret.matches(&token[..len - 1]));
        assert!(!secret.matches(&[&token[..], &[0]].concat()));
        assert!(!secret.matches(&token.repeat(2)));
        for at in 0..len {
            let mut wrong = token.clone();
            wrong[at] ^= 0x80;
            assert!(!secret.matches(&wrong));
        }
    }
    let args = ["--auth-token=hunter2", "--admin-token", "hunter2"];
    assert!(!format!("{:?}", config(&args, &[])).contains("hunter2"));
}

#[test]
fn help_and_version_win_over_validation() {
    for args in
        [&["--version"][..], &["-version", "--max-locks=0"], &["--tls-key=x", "--version=1"]]
    {
        assert!(matches!(parse(args, &[("DFLOCKD_PORT", "x")]),
            Ok(Parsed::Version(version)) if version == env!("CARGO_PKG_VERSION")));
    }
    for args in [&["--help"][..], &["-h"], &["-help", "--port=x", "--version"]] {
        let Ok(Parsed::Help(help)) = parse(args, &[]) else { panic!("{args:?}") };
        // Where the lines break is up to the terminal.
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        for setting in settings() {
            assert!(help.contains(&format!("--{}", setting.flag)), "{help}");
            assert!(help.contains(setting.env) && help.contains(setting.meaning), "{help}");
        }
        assert!(help.contains("--version") && !help.contains('`'), "{help}");
    }
    check(&["--help=false", "--debug"], &[], Ok((debug, true)));
    refused(&["--help=x"], &[], r#"--help must be a boolean (got "x")"#);
}

#[test]
fn warnings_for_an_open_address() {
    for host in ["127.0.0.1", "127.8.8.8", "::1", "[::1]", "localhost", "::ffff:127.0.0.1"] {
        assert!(config(&["--host", host], &[]).warnings().is_empty(), "{host}");
    }
    for host in ["0.0.0.0", "::", "10.0.0.1", "example.org"] {
        assert_eq!(config(&["--host", host], &[]).warnings().len(), 2, "{host}");
    }
    let some = ["--host=0.0.0.0", "--max-connections=9", "--auth-token=0123456789abcdef"];
    assert_eq!(
        config(&some, &[]).warnings(),
        [
            "--host 0.0.0.0 is not a loopback address and these limits are unlimited: \
             --max-connections-per-ip, --max-waiters",
            "tokens go over the network in plain text: --host 0.0.0.0 without --tls-cert",
        ]
    );
    let all = ["--max-connections-per-ip=1", "--max-waiters=1"];
    let tls = ["--tls-cert=/c", "--tls-key=/k"];
    assert!(config(&[&some[..], &all, &tls].concat(), &[]).warnings().is_empty());
    let three = ["--http-port=1", "--grpc-port=2", "--http-host=::", "--grpc-host=10.0.0.1"];
    let warnings = config(&[&three[..], &some[2..]].concat(), &[]).warnings();
    let plain = "tokens go over the network in plain text: --http-host ::, --grpc-host 10.0.0.1 \
                 without --tls-cert";
    assert!(warnings.iter().any(|warning| warning == plain), "{warnings:?}");
}

#[test]
fn the_http_interface() {
    let both = ["--http-port=8080", "--host=10.0.0.1", "--auth-token=0123456789abcdef"];
    let both = config(&both, &[]);
    assert_eq!(both.http_address(), Some(("10.0.0.1", 8080)));
    assert_eq!(
        both.warnings()[..1],
        ["--host 10.0.0.1 is not a loopback address and these limits are unlimited: \
          --max-connections-per-ip, --max-waiters, --http-max-sessions, \
          --http-max-sessions-per-ip, --http-max-connections-per-ip, --http-rate-limit-per-ip"]
    );
    let http = config(&["--http-port=8080", "--http-host=::", "--max-waiters=1"], &[]);
    assert_eq!(http.http_address(), Some(("::", 8080)));
    let warnings = http.warnings();
    assert_eq!(warnings.len(), 2);
    assert_eq!(
        warnings[0],
        "--http-host :: is not a loopback address and these limits are unlimited: \
         --http-max-sessions, --http-max-sessions-per-ip, --http-max-connections-per-ip, \
         --http-rate-limit-per-ip"
    );
    assert!(config(&["--http-host=::"], &[]).warnings().is_empty());
    refused(&["--http-port=6388"], &[], "--http-port must differ from --port (got 6388)");
    config(&["--http-port=0", "--port=0"], &[]);
    let short = config(&["--http-session-idle-timeout=5"], &[]);
    assert_eq!(short.sse_ping(), Duration::from_millis(2500));
    let both = ["--http-session-idle-timeout=5", "--http-sse-ping-interval=5"];
    let message = "--http-sse-ping-interval must be below --http-session-idle-timeout, 5 (got 5)";
    refused(&both, &[], message);
    let none = ["--http-session-idle-timeout=5", "--http-sse-ping-interval=0"];
    assert_eq!(config(&none, &[]).sse_ping(), Duration::ZERO);
    let idle = ["--http-session-idle-timeout=0", "--http-sse-ping-interval=60"];
    assert_eq!(config(&idle, &[]).sse_ping(), Duration::from_secs(60));
}

#[test]
fn the_grpc_interface() {
    let both = config(&["--grpc-port=8081", "--host=10.0.0.1", "--auth-token=t"], &[]);
    assert_eq!(both.grpc_address(), Some(("10.0.0.1", 8081)));
    let here = config(&["--grpc-port=8081", "--grpc-host=::1"], &[]);
    assert_eq!(here.grpc_address(), Some(("::1", 8081)));
    let open = ["--grpc-port=8081", "--grpc-host=::", "--auth-token=0123456789abcdef"];
    let open = config(&open, &[]);
    assert_eq!(
        open.warnings()[..1],
        ["--grpc-host :: is not a loopback address and these limits are unlimited: \
          --max-waiters, --http-max-sessions, --http-max-sessions-per-ip, \
          --http-max-connections-per-ip, --http-rate-limit-per-ip"]
    );
    refused(&["--grpc-port=6388"], &[], "--grpc-port must differ from --port (got 6388)");
    let both = ["--grpc-port=81", "--http-port=81"];
    refused(&both, &[], "--grpc-port must differ from --http-port (got 81)");
}

/// That one entry of a list is refused by its rule.
#[track_caller]
fn refused_entry(flag: &str, list: &str, number: usize, rule: &str) {
    refused(&[flag, list], &[], &format!("{flag} entry {number} {rule} (got {list:?})"));
}

#[test]
fn hosts() {
    let given = ["--http-allowed-hosts", "A.example, .b.example,[::1],10.0.0.1,fe80::1,*"];
    let hosts = config(&given, &[]).http_allowed_hosts;
    assert_eq!(hosts, ["a.example", ".b.example", "::1", "10.0.0.1", "fe80::1", "*"]);
    for (wrong, number) in
        [("a:80", 1), ("a,", 2), ("http://a", 1), ("..a", 1), (".", 1), ("*.a", 1), ("a b", 1)]
    {
        let rule = "must be a host without a port, .domain or *";
        refused_entry("--http-allowed-hosts", wrong, number, rule);
    }
}

#[test]
fn warnings_for_all_web_pages() {
    let count = |flag: &str, more: &[&str]| {
        config(&[&[flag, "*", "--http-port=1"], more].concat(), &[]).warnings().len()
    };
    for flag in ["--http-cors-allowed-origins", "--http-allowed-hosts"] {
        assert_eq!(count(flag, &[]), 1, "{flag}");
        assert_eq!(count(flag, &["--auth-token=a-token-that-is-long-enough"]), 0, "{flag}");
        assert_eq!(config(&[flag, "*"], &[]).warnings().len(), 0, "{flag} without HTTP");
    }
    let some = ["--http-cors-allowed-origins=http://a", "--http-port=1"];
    assert!(config(&some, &[]).warnings().is_empty());
}

#[test]
fn origins() {
    let given = ["--http-cors-allowed-origins", "https://A.example, http://b:81"];
    let origins = config(&given, &[]).http_cors_allowed_origins;
    assert_eq!(origins, ["https://a.example", "http://b:81"]);
    for (wrong, number) in [("a.example", 1), ("*,", 2), ("http://a/", 1), ("http://", 1)] {
        let rule = "must be scheme://host:port or *";
        refused_entry("--http-cors-allowed-origins", wrong, number, rule);
    }
}

#[test]
fn the_table_has_every_setting_once() {
    let table = markdown_table();
    let settings = settings();
    assert_eq!(settings.len(), 87);
    assert_eq!(table.lines().count(), settings.len() + 4);
    for (index, setting) in settings.iter().enumerate() {
        assert_eq!(table.matches(&format!("| `--{}` |", setting.flag)).count(), 1);
        assert!(setting.env.starts_with("DFLOCKD_") && setting.meaning.ends_with('.'));
        let stem = match setting.flag {
            // Two that upstream shortened.
            "http-session-idle-timeout" => "HTTP_SESSION_IDLE".to_owned(),
            "http-sse-ping-interval" => "HTTP_SSE_PING".to_owned(),
            flag => flag.to_uppercase().replace('-', "_"),
        };
        let unit = if setting.valid.starts_with("seconds") { "_S" } else { "" };
        assert_eq!(setting.env, format!("DFLOCKD_{stem}{unit}"));
        assert!(settings[..index].iter().all(|other| other.env != setting.env));
    }
    for line in table.lines() {
        assert_eq!(line.matches('|').count(), 6, "{line}");
    }
    assert!(table.contains(
        "| `--gc-interval` | `DFLOCKD_GC_INTERVAL_S`, older `DFLOCKD_GC_LOOP_SLEEP` | `5` \
         | seconds, > 0 | Period of the sweep for idle resources. |\n"
    ));
}
