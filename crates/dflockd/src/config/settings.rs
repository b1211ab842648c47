//! The list of all settings: name, variable, default, range and meaning of each, and how they are read.

use std::path::PathBuf;
use std::sync::LazyLock;
use std::time::Duration;

use dflockd_identity::Identities;
use dflockd_replica::types::AutoRelease;
use zeroize::Zeroizing;

use super::cluster::{FollowerMode, HostPort, PeerSpec};
use super::rules::{
    AUTO_RELEASE, Address, Delay, ENDPOINT, FILE_PATH, FOLLOWER_MODE, HOSTS, LOG_FORMAT, NODE_NAME,
    ORIGINS, Optional, PEERS, Rule, Switch, TEXT, connections, count, limit, millis, seconds,
    tcp_port,
};
use super::secrets::{Secret, TokenSource, Tokens, valid_token};
use super::{ConfigError, GrantDelay, LogFormat, refuse};

/// Makes [`Config`], the table behind [`settings`] and the resolver from the list below.
///
/// An ordinary setting is `field: type = rule, flag, variable [or older variable], default [needs
/// other flag];`. A token takes two entries, its value and its file, because the four sources of
/// both form one chain.
macro_rules! settings {
    (
        $(
            $(#[doc = $meaning:literal])+
            $field:ident: $type:ty = $rule:expr,
            $flag:literal, $env:literal $(or $env_old:literal)?, $default:literal
            $(needs $needs:literal)?;
        )+
        tokens:
        $(
            $(#[doc = $token_meaning:literal])+
            $token:ident, $token_flag:literal, $token_env:literal $(needs $token_needs:literal)?;
            $(#[doc = $file_meaning:literal])+
            $source:ident, $file_flag:literal, $file_env:literal $(needs $file_needs:literal)?;
        )+
    ) => {
        /// Everything the operator may choose, checked.
        #[derive(Debug, Clone)]
        pub struct Config {
            $( $(#[doc = $meaning])+ pub $field: $type, )+
            $(
                $(#[doc = $token_meaning])+
                pub $token: Option<Tokens>,
                /// Where the token came from, so that it can be read again.
                pub(super) $source: Option<TokenSource>,
            )+
            /// Warnings that only the parser can know: which variables it met.
            pub(super) notes: Vec<String>,
            /// The flags that did not stay at their default, whatever their source. A boolean that
            /// was switched off is not among them.
            pub(super) given: Vec<&'static str>,
            /// The secret between nodes if none is given and none is needed.
            pub(super) drawn_secret: Option<Secret>,
            /// What --identities-file has.
            pub identities: Option<Identities>,
        }

        static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![
            $( Setting {
                flag: $flag,
                env: $env,
                env_old: [$($env_old,)? ""][0],
                default: $default,
                valid: $rule.valid(),
                meaning: concat!($($meaning),+).trim(),
                needs: [$($needs,)? ""][0],
                boolean: $rule.is_boolean(),
            }, )+
            $( Setting {
                flag: $token_flag,
                env: $token_env,
                env_old: "",
                default: "",
                valid: valid_token($token_flag),
                meaning: concat!($($token_meaning),+).trim(),
                needs: [$($token_needs,)? ""][0],
                boolean: false,
            },
            Setting {
                flag: $file_flag,
                env: $file_env,
                env_old: "",
                default: "",
                valid: FILE_PATH.valid(),
                meaning: concat!($($file_meaning),+).trim(),
                needs: [$($file_needs,)? ""][0],
                boolean: false,
            }, )+
        ]);

        impl Config {
            /// Reads every setting from its sources, in the order of the list.
            pub(super) fn resolve(mut given: Given<'_>) -> Result<Self, ConfigError> {
                $( let $field = given.read(&$rule, $flag)?; )+
                $(
                    let $source = given.token_source($token_flag, $file_flag)?;
                    let $token = $source.as_ref().map(TokenSource::read).transpose()?;
                )+
                let Given { notes, given, .. } = given;
                Ok(Self { $($field,)+ $($token, $source,)+ notes, given, drawn_secret: None, identities: None })
            }
        }
    };
}

settings! {
    /// TCP bind address.
    host: String = TEXT, "host", "DFLOCKD_HOST", "127.0.0.1";
    /// TCP port.
    port: u16 = tcp_port().zero("chosen by the system"), "port", "DFLOCKD_PORT", "6388";
    /// Lease of a lock whose client asks for none.
    default_lease_ttl: Duration = seconds(1..), "default-lease-ttl", "DFLOCKD_DEFAULT_LEASE_TTL_S", "33";
    /// Longest lease that is granted; a longer one is shortened to it, and the answer tells.
    max_lease_ttl: Duration = seconds(0..).zero("none"), "max-lease-ttl", "DFLOCKD_MAX_LEASE_TTL_S", "86400";
    /// Longest pause between two looks for ended leases; they end at their deadline all the same.
    lease_sweep_interval: Duration = seconds(1..), "lease-sweep-interval", "DFLOCKD_LEASE_SWEEP_INTERVAL_S", "1";
    /// Period of the sweep for idle resources.
    gc_interval: Duration = seconds(1..), "gc-interval", "DFLOCKD_GC_INTERVAL_S" or "DFLOCKD_GC_LOOP_SLEEP", "5";
    /// Idle age at which a resource is dropped.
    gc_max_idle: Duration = seconds(0..).zero("at the next sweep"),
        "gc-max-idle", "DFLOCKD_GC_MAX_IDLE_S" or "DFLOCKD_GC_MAX_UNUSED_TIME", "60";
    /// Most lock, semaphore, read-write and election keys.
    max_locks: u64 = count(1..), "max-locks", "DFLOCKD_MAX_LOCKS", "1024";
    /// Most counters, values, lists and barriers together.
    max_keys: u64 = limit(), "max-keys", "DFLOCKD_MAX_KEYS", "0";
    /// Most items in one list.
    max_list_length: u64 = limit(), "max-list-length", "DFLOCKD_MAX_LIST_LENGTH", "0";
    /// Largest value and list item in bytes.
    max_value_bytes: u64 = count(1..=1_048_576), "max-value-bytes", "DFLOCKD_MAX_VALUE_BYTES", "65533";
    /// Most TCP connections.
    max_connections: u64 = connections(), "max-connections", "DFLOCKD_MAX_CONNECTIONS", "0";
    /// Most TCP connections of one source address.
    max_connections_per_ip: u64 = limit(), "max-connections-per-ip", "DFLOCKD_MAX_CONNECTIONS_PER_IP", "0";
    /// Longest queue of one key.
    max_waiters: u64 = limit(), "max-waiters", "DFLOCKD_MAX_WAITERS", "0";
    /// Most subscriptions (listen, watch and observe) of one connection.
    max_subscriptions: u64 = limit(), "max-subscriptions", "DFLOCKD_MAX_SUBSCRIPTIONS", "1024";
    /// Most bytes of patterns, keys and group names in the subscriptions of one connection.
    max_subscription_bytes: u64 = limit(), "max-subscription-bytes", "DFLOCKD_MAX_SUBSCRIPTION_BYTES", "262144";
    /// Most subscriptions of all connections together.
    max_subscriptions_total: u64 = limit(), "max-subscriptions-total", "DFLOCKD_MAX_SUBSCRIPTIONS_TOTAL", "262144";
    /// Most bytes of patterns, keys and group names in all subscriptions together.
    max_subscription_bytes_total: u64 = limit(),
        "max-subscription-bytes-total", "DFLOCKD_MAX_SUBSCRIPTION_BYTES_TOTAL", "67108864";
    /// Most locks that one connection or session holds.
    max_holds_per_session: u64 = limit(), "max-holds-per-session", "DFLOCKD_MAX_HOLDS_PER_SESSION", "65536";
    /// Most requests of one connection or session that wait, with its places in queues.
    max_waits_per_session: u64 = limit(), "max-waits-per-session", "DFLOCKD_MAX_WAITS_PER_SESSION", "65536";
    /// Most sessions that outlive their connection.
    max_sessions: u64 = limit(), "max-sessions", "DFLOCKD_MAX_SESSIONS", "262144";
    /// Most bytes of answers and pushes that wait for one client; while they wait its requests are not
    /// read, and what would go past this closes the connection.
    max_pending_bytes: u64 = count(131_072..=1_073_741_824),
        "max-pending-bytes", "DFLOCKD_MAX_PENDING_BYTES", "4194304";
    /// Threads that serve connections of the line protocol, and as many again for HTTP and gRPC. By itself half of the
    /// cores for lines, because most of that work is the kernel's, and as many as there are cores for the others.
    worker_threads: u64 = count(0..=1024).zero("by the cores"), "worker-threads", "DFLOCKD_WORKER_THREADS", "0";
    /// Time a client has for each line of a request it has begun, and for the TLS handshake.
    read_timeout: Duration = seconds(1..), "read-timeout", "DFLOCKD_READ_TIMEOUT_S", "23";
    /// Time a client has to take in a response line.
    write_timeout: Duration = seconds(0..).zero("none"), "write-timeout", "DFLOCKD_WRITE_TIMEOUT_S", "5";
    /// Silence between requests after which a connection is closed.
    idle_timeout: Duration = seconds(0..).zero("off"), "idle-timeout", "DFLOCKD_IDLE_TIMEOUT_S", "0";
    /// Time to drain after SIGINT or SIGTERM.
    shutdown_timeout: Duration = seconds(0..).zero("wait for ever"),
        "shutdown-timeout", "DFLOCKD_SHUTDOWN_TIMEOUT_S", "30";
    /// Release what a closed connection held; false is the same as --auto-release lease.
    auto_release_on_disconnect: bool = Switch,
        "auto-release-on-disconnect", "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "true";
    /// When to release what a connection held: at any end of it, only at an orderly (clean) close
    /// by the client, or never before the end of the lease.
    auto_release: Option<AutoRelease> = Optional(AUTO_RELEASE),
        "auto-release", "DFLOCKD_AUTO_RELEASE", "any, with --raft-dir clean";
    /// Let mutex and semaphore keys share one name space, as in v1.10 to v1.13.
    shared_key_namespace: bool = Switch, "shared-key-namespace", "DFLOCKD_SHARED_KEY_NAMESPACE", "false";
    /// Also drop values without a time to live that were idle longer than --gc-max-idle.
    kv_idle_gc: bool = Switch, "kv-idle-gc", "DFLOCKD_KV_IDLE_GC", "false";
    /// Add the fence to grant and renew lines, and tell renewals of an ended lease apart.
    wire_fence: bool = Switch, "wire-fence", "DFLOCKD_WIRE_FENCE", "false";
    /// File that keeps fences growing over restarts even if the clock is set back.
    fence_state_file: Option<PathBuf> = Optional(FILE_PATH), "fence-state-file", "DFLOCKD_FENCE_STATE_FILE", "";
    /// Time after a start during which acquires queue and nothing is granted; auto waits as long as
    /// the longest lease granted before (needs --fence-state-file).
    startup_grant_delay: GrantDelay = Delay, "startup-grant-delay", "DFLOCKD_STARTUP_GRANT_DELAY_S", "0";
    /// PEM file with the certificate chain; TLS replaces plain text on the port (needs --tls-key).
    tls_cert: Option<PathBuf> = Optional(FILE_PATH), "tls-cert", "DFLOCKD_TLS_CERT", "";
    /// PEM file with the private key (needs --tls-cert).
    tls_key: Option<PathBuf> = Optional(FILE_PATH), "tls-key", "DFLOCKD_TLS_KEY", "";
    /// PEM file with the authorities of client certificates, whose names --identities-file gives to identities; clients
    /// may come without one.
    tls_client_ca: Option<PathBuf> = Optional(FILE_PATH), "tls-client-ca", "DFLOCKD_TLS_CLIENT_CA", ""
        needs "identities-file";
    /// HTTP port; must differ from --port.
    http_port: u16 = tcp_port().zero("off"), "http-port", "DFLOCKD_HTTP_PORT", "0";
    /// HTTP bind address.
    http_host: Option<String> = Optional(TEXT), "http-host", "DFLOCKD_HTTP_HOST", "value of --host";
    /// Idle unit of an HTTP session, told to clients: it ends when it was unused for more than twice
    /// this.
    http_session_idle_timeout: Duration = seconds(0..).zero("never"),
        "http-session-idle-timeout", "DFLOCKD_HTTP_SESSION_IDLE_S", "20";
    /// Most open HTTP sessions; an event stream counts as one.
    http_max_sessions: u64 = limit(), "http-max-sessions", "DFLOCKD_HTTP_MAX_SESSIONS", "0";
    /// Most open HTTP sessions of one source address.
    http_max_sessions_per_ip: u64 = limit(), "http-max-sessions-per-ip", "DFLOCKD_HTTP_MAX_SESSIONS_PER_IP", "0";
    /// Most HTTP connections.
    http_max_connections: u64 = connections(), "http-max-connections", "DFLOCKD_HTTP_MAX_CONNECTIONS", "0";
    /// Most HTTP connections of one source address.
    http_max_connections_per_ip: u64 = limit(),
        "http-max-connections-per-ip", "DFLOCKD_HTTP_MAX_CONNECTIONS_PER_IP", "0";
    /// HTTP requests per second of one source address, and as many gRPC calls, counted apart.
    http_rate_limit_per_ip: u64 = count(0..).zero("off"),
        "http-rate-limit-per-ip", "DFLOCKD_HTTP_RATE_LIMIT_PER_IP", "0";
    /// HTTP requests, or gRPC calls, of one source address that may come at once.
    http_rate_limit_burst: u64 = count(0..).zero("same as the rate"),
        "http-rate-limit-burst", "DFLOCKD_HTTP_RATE_LIMIT_BURST", "0";
    /// Origins whose pages may use the HTTP interface, separated by commas, or * for all.
    http_cors_allowed_origins: Vec<String> = ORIGINS,
        "http-cors-allowed-origins", "DFLOCKD_HTTP_CORS_ALLOWED_ORIGINS", "";
    /// Hosts that requests without a token may be sent to, besides loopback addresses, the bind address and
    /// --http-advertise-addr: names or addresses separated by commas, with a dot in front for all names below a
    /// domain, or * for all.
    http_allowed_hosts: Vec<String> = HOSTS, "http-allowed-hosts", "DFLOCKD_HTTP_ALLOWED_HOSTS", "";
    /// Speak HTTP/2 without TLS on the HTTP port, to clients that know that it does.
    http_h2c: bool = Switch, "http-h2c", "DFLOCKD_HTTP_H2C", "false";
    /// How often a comment is written to event streams, so that proxies keep them open; must be below
    /// --http-session-idle-timeout. Left at its default it adapts to a shorter idle timeout.
    http_sse_ping_interval: Duration = seconds(0..).zero("none"),
        "http-sse-ping-interval", "DFLOCKD_HTTP_SSE_PING_S", "15";
    /// gRPC port; must differ from --port and --http-port. Its caps are those of HTTP, counted apart.
    grpc_port: u16 = tcp_port().zero("off"), "grpc-port", "DFLOCKD_GRPC_PORT", "0";
    /// gRPC bind address.
    grpc_host: Option<String> = Optional(TEXT), "grpc-host", "DFLOCKD_GRPC_HOST", "value of --host";
    /// Most gRPC connections.
    grpc_max_connections: u64 = connections(), "grpc-max-connections", "DFLOCKD_GRPC_MAX_CONNECTIONS", "0";
    /// Time after which a gRPC connection without an open call is closed, whether it answers pings or not; before its
    /// first authenticated call it is --read-timeout if that is shorter.
    grpc_idle_timeout: Duration = seconds(0..).zero("off"), "grpc-idle-timeout", "DFLOCKD_GRPC_IDLE_TIMEOUT_S", "300";
    /// Wrong tokens per second of one source address, after ten at once; what comes beyond is
    /// refused without looking at the token.
    auth_failure_rate_per_ip: u64 = count(0..).zero("off"),
        "auth-failure-rate-per-ip", "DFLOCKD_AUTH_FAILURE_RATE_PER_IP", "1";
    /// Wrong tokens per second of all source addresses together.
    auth_failure_rate: u64 = count(0..).zero("off"), "auth-failure-rate", "DFLOCKD_AUTH_FAILURE_RATE", "1000";
    /// Refuse to start without an auth token, or with tokens that are short or equal.
    require_auth: bool = Switch, "require-auth", "DFLOCKD_REQUIRE_AUTH", "false";
    /// Form of the log lines on stderr.
    log_format: LogFormat = LOG_FORMAT, "log-format", "DFLOCKD_LOG_FORMAT", "text";
    /// Log at level DEBUG.
    debug: bool = Switch, "debug", "DFLOCKD_DEBUG", "false";
    /// Where traces are sent: a collector that takes OTLP over gRPC.
    otlp_endpoint: Option<String> = Optional(ENDPOINT), "otlp-endpoint", "DFLOCKD_OTLP_ENDPOINT", "";
    /// Share of the traces that begin here and are sent, in percent. Clients whose requests belong to
    /// a trace decide about that themselves.
    otlp_sample_percent: u64 = count(0..=100).zero("only those of clients"),
        "otlp-sample-percent", "DFLOCKD_OTLP_SAMPLE_PERCENT", "10" needs "otlp-endpoint";
    /// Directory of the log and the snapshots, for this node alone; switches replicated mode on.
    raft_dir: Option<PathBuf> = Optional(FILE_PATH), "raft-dir", "DFLOCKD_RAFT_DIR", "";
    /// Name of this node, never used again after its removal; required in replicated mode.
    node_id: Option<String> = Optional(NODE_NAME), "node-id", "DFLOCKD_NODE_ID", "" needs "raft-dir";
    /// Bind address of the peer port; required in replicated mode. Others dial this node's entry in
    /// --cluster-peers or the address given when it was added.
    raft_addr: Option<HostPort> = Optional(Address { dialled: false }),
        "raft-addr", "DFLOCKD_RAFT_ADDR", "" needs "raft-dir";
    /// Client address told to others in redirects; without it that of this node's entry in
    /// --cluster-peers.
    advertise_addr: Option<HostPort> = Optional(Address { dialled: true }),
        "advertise-addr", "DFLOCKD_ADVERTISE_ADDR", "host:port" needs "raft-dir";
    /// HTTP address told to others.
    http_advertise_addr: Option<HostPort> = Optional(Address { dialled: true }),
        "http-advertise-addr", "DFLOCKD_HTTP_ADVERTISE_ADDR", "http-host:http-port" needs "raft-dir";
    /// gRPC address told to others.
    grpc_advertise_addr: Option<HostPort> = Optional(Address { dialled: true }),
        "grpc-advertise-addr", "DFLOCKD_GRPC_ADVERTISE_ADDR", "grpc-host:grpc-port" needs "raft-dir";
    /// All nodes of a new cluster, the same list on each, this node among them. The cluster is formed
    /// when all of them have met. A node with state on disk takes the list as a hint only.
    cluster_peers: Vec<PeerSpec> = PEERS, "cluster-peers", "DFLOCKD_CLUSTER_PEERS", "" needs "raft-dir";
    /// Start a cluster of this node alone, to be grown later; --cluster-peers may then name this
    /// node only. Without it and without --cluster-peers a new node waits to be added.
    cluster_bootstrap: bool = Switch, "cluster-bootstrap", "DFLOCKD_CLUSTER_BOOTSTRAP", "false" needs "raft-dir";
    /// This node votes and keeps the log, but keeps no state and serves no clients.
    witness: bool = Switch, "witness", "DFLOCKD_WITNESS", "false" needs "raft-dir";
    /// PEM file with the certificate chain for the peer port, its common name the node id; the three
    /// --raft-tls files belong together and make peers speak mutual TLS 1.3.
    raft_tls_cert: Option<PathBuf> = Optional(FILE_PATH),
        "raft-tls-cert", "DFLOCKD_RAFT_TLS_CERT", "" needs "raft-dir";
    /// PEM file with the private key of that certificate.
    raft_tls_key: Option<PathBuf> = Optional(FILE_PATH), "raft-tls-key", "DFLOCKD_RAFT_TLS_KEY", "" needs "raft-dir";
    /// PEM file with the authorities that sign the certificates of the nodes.
    raft_tls_ca: Option<PathBuf> = Optional(FILE_PATH), "raft-tls-ca", "DFLOCKD_RAFT_TLS_CA", "" needs "raft-dir";
    /// Speak with peers beyond loopback without the --raft-tls files: the shared secret alone then
    /// protects the connections, and whoever has it can be any node.
    raft_no_tls: bool = Switch, "raft-no-tls", "DFLOCKD_RAFT_NO_TLS", "false" needs "raft-dir";
    /// What a node that does not lead does with a request: send the client to the leader, pass the
    /// request on, or choose by what the client understands.
    follower_mode: FollowerMode = FOLLOWER_MODE, "follower-mode", "DFLOCKD_FOLLOWER_MODE", "auto" needs "raft-dir";
    /// How long the places in queues of a connection with a stable reference, and its locks if it was
    /// cleanly closed, wait for its return.
    orphan_ttl: Duration = seconds(0..).zero("not at all"),
        "orphan-ttl", "DFLOCKD_ORPHAN_TTL_S", "0" needs "raft-dir";
    /// Time after a change of leader during which no lease ends, so that its holder can renew it.
    failover_grace: Duration = seconds(0..=60).zero("none"),
        "failover-grace", "DFLOCKD_FAILOVER_GRACE_S", "3" needs "raft-dir";
    /// Entries of the log after which a snapshot replaces them.
    snapshot_entries: u64 = count(1..), "snapshot-entries", "DFLOCKD_SNAPSHOT_ENTRIES", "100000" needs "raft-dir";
    /// Silence of the leader after which a node stands for election: a random time from this to
    /// twice this.
    election_timeout: Duration = millis(100..=60_000),
        "election-timeout-ms", "DFLOCKD_ELECTION_TIMEOUT_MS", "1000" needs "raft-dir";
    /// Pause between two signs of life of the leader, at most a third of --election-timeout-ms; left
    /// at its default it adapts to a shorter election timeout.
    heartbeat_interval: Duration = millis(10..=20_000),
        "heartbeat-interval-ms", "DFLOCKD_HEARTBEAT_INTERVAL_MS", "150" needs "raft-dir";
    /// TOML file with named identities, their tokens as digests and their rights; read again on SIGHUP.
    identities_file: Option<PathBuf> = Optional(FILE_PATH), "identities-file", "DFLOCKD_IDENTITIES_FILE", "";
    tokens:
    /// Token that a client must send first.
    auth_token, "auth-token", "DFLOCKD_AUTH_TOKEN";
    /// File with that token, and on a second line the one before it, which stays valid; read again on SIGHUP.
    auth_source, "auth-token-file", "DFLOCKD_AUTH_TOKEN_FILE";
    /// Token for administration: force-release and ending sessions.
    admin_token, "admin-token", "DFLOCKD_ADMIN_TOKEN";
    /// File with that token, and on a second line the one before it, which stays valid; read again on SIGHUP.
    admin_source, "admin-token-file", "DFLOCKD_ADMIN_TOKEN_FILE";
    /// Secret that the nodes share. Required in replicated mode unless the --raft-tls files are
    /// given, or --cluster-bootstrap with a loopback --raft-addr: then a random one is used and the
    /// cluster can not grow until it is started with one.
    raft_auth_token, "raft-auth-token", "DFLOCKD_RAFT_AUTH_TOKEN" needs "raft-dir";
    /// File with that secret, read again on SIGHUP; white space around it is ignored.
    raft_source, "raft-auth-token-file", "DFLOCKD_RAFT_AUTH_TOKEN_FILE" needs "raft-dir";
}

/// One setting as the operator sees it.
#[derive(Debug)]
pub struct Setting {
    /// Name of the flag without dashes.
    pub flag: &'static str,
    /// Name of the environment variable.
    pub env: &'static str,
    /// Older name of the variable, read only if the new one is not set; empty if there is none.
    pub env_old: &'static str,
    /// What holds if neither flag nor variable is given; empty means none.
    pub default: &'static str,
    /// The valid values in words.
    pub valid: String,
    /// What it does, in a sentence or two.
    pub meaning: &'static str,
    /// The flag without which it is refused; empty if there is none.
    pub needs: &'static str,
    /// Whether the flag may stand without a value.
    pub(super) boolean: bool,
}

impl Setting {
    /// What it does and which other flag that takes.
    pub(super) fn description(&self) -> String {
        match self.needs {
            "" => self.meaning.to_owned(),
            other => format!("{} Needs --{other}.", self.meaning),
        }
    }
}

/// Every setting, in the order of `--help`.
pub fn settings() -> &'static [Setting] {
    &SETTINGS
}

/// The table of all settings for `docs/operating.md`.
pub fn markdown_table() -> String {
    let mut table = String::from(
        "| Flag | Environment | Default | Valid | Meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for setting in settings() {
        let Setting { flag, env, env_old, default, valid, .. } = setting;
        let meaning = setting.description();
        let older = match *env_old {
            "" => String::new(),
            name => format!(", older `{name}`"),
        };
        let default = match *default {
            "" => "none".to_owned(),
            value => format!("`{value}`"),
        };
        let row = format!("| `--{flag}` | `{env}`{older} | {default} | {valid} | {meaning} |\n");
        table.push_str(&row);
    }
    for (flag, meaning) in ACTIONS {
        table.push_str(&format!("| `--{flag}` | | | | {meaning} |\n"));
    }
    table
}

/// Flags that end the program instead of configuring it.
pub(super) const ACTIONS: [(&str, &str); 2] =
    [("help", "Print this help and exit."), ("version", "Print the version and exit.")];

pub(super) fn find(flag: &str) -> Option<&'static Setting> {
    settings().iter().find(|setting| setting.flag == flag)
}

/// The sources of one start: flags and variables.
pub(super) struct Given<'a> {
    flag: &'a dyn Fn(&str) -> Option<&'a str>,
    env: &'a dyn Fn(&str) -> Option<String>,
    notes: Vec<String>,
    given: Vec<&'static str>,
}

impl<'a> Given<'a> {
    pub(super) fn new(
        flag: &'a dyn Fn(&str) -> Option<&'a str>,
        env: &'a dyn Fn(&str) -> Option<String>,
    ) -> Self {
        Self { flag, env, notes: Vec::new(), given: Vec::new() }
    }

    /// The value of one setting: flag, else variable, else default.
    fn read<R: Rule>(&mut self, rule: &R, name: &'static str) -> Result<R::Value, ConfigError> {
        let setting = find(name).expect("every name given here comes from the list");
        let flag = format!("--{name}");
        let value = if let Some(text) = (self.flag)(name) {
            rule.parse_flag(text).map_err(|problem| problem.in_flag(&flag, text))?
        } else if let Some(text) = self.variable(setting.env) {
            rule.parse_env(&text).map_err(|p| p.in_env(setting.env, &flag, &text))?
        } else if let Some(text) = self.variable(setting.env_old) {
            let (old, new) = (setting.env_old, setting.env);
            self.notes.push(format!("{old} is deprecated, use {new}"));
            rule.parse_env(&text).map_err(|problem| problem.in_env(old, &flag, &text))?
        } else {
            let value = rule.parse_default(setting.default);
            return Ok(value.expect("every default passes its own rule"));
        };
        if !rule.is_off(&value) {
            self.given.push(name);
        }
        Ok(value)
    }

    /// The source of a token, if one is given.
    fn token_source(
        &mut self,
        value: &'static str,
        file: &'static str,
    ) -> Result<Option<TokenSource>, ConfigError> {
        let source = self.select_source(value, file)?;
        match source {
            Some(TokenSource::Value { .. }) => self.given.push(value),
            Some(TokenSource::File { .. }) => self.given.push(file),
            None => (),
        }
        Ok(source)
    }

    /// Both flags stand before both variables: what the operator typed for this start wins over
    /// what the environment happened to hold.
    fn select_source(&self, value: &str, file: &str) -> Result<Option<TokenSource>, ConfigError> {
        let secret = |name: String, text: &str| TokenSource::Value {
            name,
            secret: Secret::new(text.as_bytes()),
        };
        if let Some(text) = (self.flag)(value) {
            return Ok(Some(secret(format!("--{value}"), text)));
        }
        if let Some(text) = (self.flag)(file) {
            let name = format!("--{file}");
            let path = FILE_PATH.parse_flag(text).map_err(|p| p.in_flag(&name, text))?;
            return Ok(Some(TokenSource::File { name, path }));
        }
        let env_of = |flag| find(flag).map_or("", |setting: &Setting| setting.env);
        // Elsewhere an empty variable is as good as none. Here that would open a server whose token got lost.
        for name in [env_of(value), env_of(file)] {
            if (self.env)(name).is_some_and(|text| text.is_empty()) {
                return refuse(format!(
                    "{name} is set but empty: unset it for no token, or give it a value"
                ));
            }
        }
        if let Some(text) = self.variable(env_of(value)) {
            return Ok(Some(secret(env_of(value).to_owned(), &Zeroizing::new(text))));
        }
        Ok(self.variable(env_of(file)).map(|text| TokenSource::File {
            name: env_of(file).to_owned(),
            path: PathBuf::from(text),
        }))
    }

    /// A variable that is set and not empty.
    fn variable(&self, name: &str) -> Option<String> {
        if name.is_empty() {
            return None;
        }
        (self.env)(name).filter(|text| !text.is_empty())
    }
}
