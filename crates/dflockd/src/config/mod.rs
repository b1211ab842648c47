//! The configuration of the server: every setting once.
//!
//! The list in `settings!` below is the only place that names a flag, its variable, its default,
//! its valid range and its meaning. The fields of `Config`, the parser, `--help` and the table in
//! `docs/operating.md` are made from it. Rules that tie two settings together stand in
//! `Config::validate`, those of replicated mode in `Config::cluster_config`.
//!
//! This module reads token and certificate files but never sockets, and it must never print a
//! token: errors name the source of a token, not its value.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::{IpAddr, Ipv6Addr};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, ArgAction, Command};
pub use dflockd_engine::replica::types::AutoRelease;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The most seconds a duration may have: what fits into 63 bits of nanoseconds.
pub const SECONDS_MAX: u64 = 9_223_372_036;

/// The largest value that every published client can read back in one `ok <value>` line.
pub const PORTABLE_VALUE_BYTES_MAX: u64 = 65_533;

/// The longest token: the line of `auth` that carries it is bounded by the protocol.
const TOKEN_BYTES_MAX: usize = 65_536;

/// The shortest secret between nodes: whoever guesses it can write into the log.
const RAFT_TOKEN_BYTES_MIN: usize = 32;

/// Tokens of clients and operators below this are warned about: 16 random bytes can not be guessed.
const TOKEN_BYTES_ADVISED: usize = 16;

/// Valid tokens of a kind: a new one and the one before it.
const TOKENS_MAX: usize = 2;

/// Counts are 63 bits wide, so that sums of two of them cannot overflow.
const COUNT_MAX: u64 = i64::MAX as u64;

const UNLIMITED: Count = Count { min: 0, max: COUNT_MAX, zero: "unlimited" };

/// Of connections: what the limit of open files leaves for them.
const BY_DESCRIPTORS: Count = Count { min: 0, max: COUNT_MAX, zero: "by the limit of open files" };

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
                $source: Option<TokenSource>,
            )+
            /// Warnings that only the parser can know: which variables it met.
            notes: Vec<String>,
            /// The flags that did not stay at their default, whatever their source. A boolean that
            /// was switched off is not among them.
            given: Vec<&'static str>,
            /// What replicated mode needs, made of the settings above.
            cluster: Option<Box<ClusterConfig>>,
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
                valid: FilePath.valid(),
                meaning: concat!($($file_meaning),+).trim(),
                needs: [$($file_needs,)? ""][0],
                boolean: false,
            }, )+
        ]);

        impl Config {
            /// Reads every setting from its sources, in the order of the list.
            fn resolve(mut given: Given<'_>) -> Result<Self, ConfigError> {
                $( let $field = given.read(&$rule, $flag)?; )+
                $(
                    let $source = given.token_source($token_flag, $file_flag)?;
                    let $token = $source.as_ref().map(TokenSource::read).transpose()?;
                )+
                let Given { notes, given, .. } = given;
                Ok(Self { $($field,)+ $($token, $source,)+ notes, given, cluster: None })
            }
        }
    };
}

settings! {
    /// TCP bind address.
    host: String = Text, "host", "DFLOCKD_HOST", "127.0.0.1";
    /// TCP port.
    port: u16 = Port { zero: "chosen by the system" }, "port", "DFLOCKD_PORT", "6388";
    /// Lease of a lock whose client asks for none.
    default_lease_ttl: Duration = Seconds { min: 1, zero: "" },
        "default-lease-ttl", "DFLOCKD_DEFAULT_LEASE_TTL_S", "33";
    /// Longest lease that is granted; a longer one is shortened to it, and the answer tells.
    max_lease_ttl: Duration = Seconds { min: 0, zero: "none" },
        "max-lease-ttl", "DFLOCKD_MAX_LEASE_TTL_S", "86400";
    /// Longest pause between two looks for ended leases; they end at their deadline all the same.
    lease_sweep_interval: Duration = Seconds { min: 1, zero: "" },
        "lease-sweep-interval", "DFLOCKD_LEASE_SWEEP_INTERVAL_S", "1";
    /// Period of the sweep for idle resources.
    gc_interval: Duration = Seconds { min: 1, zero: "" },
        "gc-interval", "DFLOCKD_GC_INTERVAL_S" or "DFLOCKD_GC_LOOP_SLEEP", "5";
    /// Idle age at which a resource is dropped.
    gc_max_idle: Duration = Seconds { min: 0, zero: "at the next sweep" },
        "gc-max-idle", "DFLOCKD_GC_MAX_IDLE_S" or "DFLOCKD_GC_MAX_UNUSED_TIME", "60";
    /// Most lock, semaphore, read-write and election keys.
    max_locks: u64 = Count { min: 1, max: COUNT_MAX, zero: "" },
        "max-locks", "DFLOCKD_MAX_LOCKS", "1024";
    /// Most counters, values, lists and barriers together.
    max_keys: u64 = UNLIMITED, "max-keys", "DFLOCKD_MAX_KEYS", "0";
    /// Most items in one list.
    max_list_length: u64 = UNLIMITED, "max-list-length", "DFLOCKD_MAX_LIST_LENGTH", "0";
    /// Largest value and list item in bytes.
    max_value_bytes: u64 = Count { min: 1, max: 1_048_576, zero: "" },
        "max-value-bytes", "DFLOCKD_MAX_VALUE_BYTES", "65533";
    /// Most TCP connections.
    max_connections: u64 = BY_DESCRIPTORS, "max-connections", "DFLOCKD_MAX_CONNECTIONS", "0";
    /// Most TCP connections of one source address.
    max_connections_per_ip: u64 = UNLIMITED,
        "max-connections-per-ip", "DFLOCKD_MAX_CONNECTIONS_PER_IP", "0";
    /// Longest queue of one key.
    max_waiters: u64 = UNLIMITED, "max-waiters", "DFLOCKD_MAX_WAITERS", "0";
    /// Most subscriptions (listen, watch and observe) of one connection.
    max_subscriptions: u64 = UNLIMITED, "max-subscriptions", "DFLOCKD_MAX_SUBSCRIPTIONS", "1024";
    /// Most bytes of patterns, keys and group names in the subscriptions of one connection.
    max_subscription_bytes: u64 = UNLIMITED,
        "max-subscription-bytes", "DFLOCKD_MAX_SUBSCRIPTION_BYTES", "262144";
    /// Most subscriptions of all connections together.
    max_subscriptions_total: u64 = UNLIMITED,
        "max-subscriptions-total", "DFLOCKD_MAX_SUBSCRIPTIONS_TOTAL", "262144";
    /// Most bytes of patterns, keys and group names in all subscriptions together.
    max_subscription_bytes_total: u64 = UNLIMITED,
        "max-subscription-bytes-total", "DFLOCKD_MAX_SUBSCRIPTION_BYTES_TOTAL", "67108864";
    /// Most locks that one connection or session holds.
    max_holds_per_session: u64 = UNLIMITED,
        "max-holds-per-session", "DFLOCKD_MAX_HOLDS_PER_SESSION", "65536";
    /// Most requests of one connection or session that wait, with its places in queues.
    max_waits_per_session: u64 = UNLIMITED,
        "max-waits-per-session", "DFLOCKD_MAX_WAITS_PER_SESSION", "65536";
    /// Most sessions that outlive their connection.
    max_sessions: u64 = UNLIMITED, "max-sessions", "DFLOCKD_MAX_SESSIONS", "262144";
    /// Most bytes of answers and pushes that wait for one client; while they wait its requests are not
    /// read, and what would go past this closes the connection.
    max_pending_bytes: u64 = Count { min: 131_072, max: 1_073_741_824, zero: "" },
        "max-pending-bytes", "DFLOCKD_MAX_PENDING_BYTES", "4194304";
    /// Threads that serve connections of the line protocol, and as many again for HTTP and gRPC. By itself half of the
    /// cores for lines, because most of that work is the kernel's, and as many as there are cores for the others.
    worker_threads: u64 = Count { min: 0, max: 1024, zero: "by the cores" },
        "worker-threads", "DFLOCKD_WORKER_THREADS", "0";
    /// Time a client has for each line of a request it has begun, and for the TLS handshake.
    read_timeout: Duration = Seconds { min: 1, zero: "" },
        "read-timeout", "DFLOCKD_READ_TIMEOUT_S", "23";
    /// Time a client has to take in a response line.
    write_timeout: Duration = Seconds { min: 0, zero: "none" },
        "write-timeout", "DFLOCKD_WRITE_TIMEOUT_S", "5";
    /// Silence between requests after which a connection is closed.
    idle_timeout: Duration = Seconds { min: 0, zero: "off" },
        "idle-timeout", "DFLOCKD_IDLE_TIMEOUT_S", "0";
    /// Time to drain after SIGINT or SIGTERM.
    shutdown_timeout: Duration = Seconds { min: 0, zero: "wait for ever" },
        "shutdown-timeout", "DFLOCKD_SHUTDOWN_TIMEOUT_S", "30";
    /// Release what a closed connection held; false is the same as --auto-release lease.
    auto_release_on_disconnect: bool = Switch,
        "auto-release-on-disconnect", "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "true";
    /// When to release what a connection held: at any end of it, only at an orderly (clean) close
    /// by the client, or never before the end of the lease.
    auto_release: Option<AutoRelease> = Optional(AUTO_RELEASE),
        "auto-release", "DFLOCKD_AUTO_RELEASE", "any, with --raft-dir clean";
    /// Let mutex and semaphore keys share one name space, as in v1.10 to v1.13.
    shared_key_namespace: bool = Switch,
        "shared-key-namespace", "DFLOCKD_SHARED_KEY_NAMESPACE", "false";
    /// Also drop values without a time to live that were idle longer than --gc-max-idle.
    kv_idle_gc: bool = Switch, "kv-idle-gc", "DFLOCKD_KV_IDLE_GC", "false";
    /// Add the fence to grant and renew lines, and tell renewals of an ended lease apart.
    wire_fence: bool = Switch, "wire-fence", "DFLOCKD_WIRE_FENCE", "false";
    /// File that keeps fences growing over restarts even if the clock is set back.
    fence_state_file: Option<PathBuf> = FilePath,
        "fence-state-file", "DFLOCKD_FENCE_STATE_FILE", "";
    /// Time after a start during which acquires queue and nothing is granted; auto waits as long as
    /// the longest lease granted before (needs --fence-state-file).
    startup_grant_delay: GrantDelay = Delay,
        "startup-grant-delay", "DFLOCKD_STARTUP_GRANT_DELAY_S", "0";
    /// PEM file with the certificate chain; TLS replaces plain text on the port (needs --tls-key).
    tls_cert: Option<PathBuf> = FilePath, "tls-cert", "DFLOCKD_TLS_CERT", "";
    /// PEM file with the private key (needs --tls-cert).
    tls_key: Option<PathBuf> = FilePath, "tls-key", "DFLOCKD_TLS_KEY", "";
    /// HTTP port; must differ from --port.
    http_port: u16 = Port { zero: "off" }, "http-port", "DFLOCKD_HTTP_PORT", "0";
    /// HTTP bind address.
    http_host: Option<String> = Optional(Text),
        "http-host", "DFLOCKD_HTTP_HOST", "value of --host";
    /// Idle unit of an HTTP session, told to clients: it ends when it was unused for more than twice
    /// this.
    http_session_idle_timeout: Duration = Seconds { min: 0, zero: "never" },
        "http-session-idle-timeout", "DFLOCKD_HTTP_SESSION_IDLE_S", "20";
    /// Most open HTTP sessions; an event stream counts as one.
    http_max_sessions: u64 = UNLIMITED, "http-max-sessions", "DFLOCKD_HTTP_MAX_SESSIONS", "0";
    /// Most open HTTP sessions of one source address.
    http_max_sessions_per_ip: u64 = UNLIMITED,
        "http-max-sessions-per-ip", "DFLOCKD_HTTP_MAX_SESSIONS_PER_IP", "0";
    /// Most HTTP connections.
    http_max_connections: u64 = BY_DESCRIPTORS,
        "http-max-connections", "DFLOCKD_HTTP_MAX_CONNECTIONS", "0";
    /// Most HTTP connections of one source address.
    http_max_connections_per_ip: u64 = UNLIMITED,
        "http-max-connections-per-ip", "DFLOCKD_HTTP_MAX_CONNECTIONS_PER_IP", "0";
    /// HTTP requests per second of one source address, and as many gRPC calls, counted apart.
    http_rate_limit_per_ip: u64 = Count { min: 0, max: COUNT_MAX, zero: "off" },
        "http-rate-limit-per-ip", "DFLOCKD_HTTP_RATE_LIMIT_PER_IP", "0";
    /// HTTP requests, or gRPC calls, of one source address that may come at once.
    http_rate_limit_burst: u64 = Count { min: 0, max: COUNT_MAX, zero: "same as the rate" },
        "http-rate-limit-burst", "DFLOCKD_HTTP_RATE_LIMIT_BURST", "0";
    /// Origins whose pages may use the HTTP interface, separated by commas, or * for all.
    http_cors_allowed_origins: Vec<String> = Origins,
        "http-cors-allowed-origins", "DFLOCKD_HTTP_CORS_ALLOWED_ORIGINS", "";
    /// Hosts that requests without a token may be sent to, besides loopback addresses, the bind address and
    /// --http-advertise-addr: names or addresses separated by commas, with a dot in front for all names below a
    /// domain, or * for all.
    http_allowed_hosts: Vec<String> = Hosts,
        "http-allowed-hosts", "DFLOCKD_HTTP_ALLOWED_HOSTS", "";
    /// Speak HTTP/2 without TLS on the HTTP port, to clients that know that it does.
    http_h2c: bool = Switch, "http-h2c", "DFLOCKD_HTTP_H2C", "false";
    /// How often a comment is written to event streams, so that proxies keep them open; must be below
    /// --http-session-idle-timeout. Left at its default it adapts to a shorter idle timeout.
    http_sse_ping_interval: Duration = Seconds { min: 0, zero: "none" },
        "http-sse-ping-interval", "DFLOCKD_HTTP_SSE_PING_S", "15";
    /// gRPC port; must differ from --port and --http-port. Its caps are those of HTTP, counted apart.
    grpc_port: u16 = Port { zero: "off" }, "grpc-port", "DFLOCKD_GRPC_PORT", "0";
    /// gRPC bind address.
    grpc_host: Option<String> = Optional(Text),
        "grpc-host", "DFLOCKD_GRPC_HOST", "value of --host";
    /// Most gRPC connections.
    grpc_max_connections: u64 = BY_DESCRIPTORS,
        "grpc-max-connections", "DFLOCKD_GRPC_MAX_CONNECTIONS", "0";
    /// Time after which a gRPC connection without an open call is closed, whether it answers pings or not; before its
    /// first authenticated call it is --read-timeout if that is shorter.
    grpc_idle_timeout: Duration = Seconds { min: 0, zero: "off" },
        "grpc-idle-timeout", "DFLOCKD_GRPC_IDLE_TIMEOUT_S", "300";
    /// Wrong tokens per second of one source address, after ten at once; what comes beyond is
    /// refused without looking at the token.
    auth_failure_rate_per_ip: u64 = Count { min: 0, max: COUNT_MAX, zero: "off" },
        "auth-failure-rate-per-ip", "DFLOCKD_AUTH_FAILURE_RATE_PER_IP", "1";
    /// Wrong tokens per second of all source addresses together.
    auth_failure_rate: u64 = Count { min: 0, max: COUNT_MAX, zero: "off" },
        "auth-failure-rate", "DFLOCKD_AUTH_FAILURE_RATE", "1000";
    /// Refuse to start without an auth token, or with tokens that are short or equal.
    require_auth: bool = Switch, "require-auth", "DFLOCKD_REQUIRE_AUTH", "false";
    /// Form of the log lines on stderr.
    log_format: LogFormat = LOG_FORMAT, "log-format", "DFLOCKD_LOG_FORMAT", "text";
    /// Log at level DEBUG.
    debug: bool = Switch, "debug", "DFLOCKD_DEBUG", "false";
    /// Where traces are sent: a collector that takes OTLP over gRPC.
    otlp_endpoint: Option<String> = Optional(Endpoint),
        "otlp-endpoint", "DFLOCKD_OTLP_ENDPOINT", "";
    /// Share of the traces that begin here and are sent, in percent. Clients whose requests belong to
    /// a trace decide about that themselves.
    otlp_sample_percent: u64 = Count { min: 0, max: 100, zero: "only those of clients" },
        "otlp-sample-percent", "DFLOCKD_OTLP_SAMPLE_PERCENT", "10" needs "otlp-endpoint";
    /// Directory of the log and the snapshots, for this node alone; switches replicated mode on.
    raft_dir: Option<PathBuf> = FilePath, "raft-dir", "DFLOCKD_RAFT_DIR", "";
    /// Name of this node, never used again after its removal; required in replicated mode.
    node_id: Option<String> = Optional(NodeName),
        "node-id", "DFLOCKD_NODE_ID", "" needs "raft-dir";
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
    /// All nodes of a new cluster, the same list on each, this node among them. A node with state on
    /// disk takes the list as a hint only.
    cluster_peers: Vec<PeerSpec> = Peers,
        "cluster-peers", "DFLOCKD_CLUSTER_PEERS", "" needs "raft-dir";
    /// Start a cluster of this node alone, to be grown later; --cluster-peers may then name this
    /// node only. Without it and without --cluster-peers a new node waits to be added.
    cluster_bootstrap: bool = Switch,
        "cluster-bootstrap", "DFLOCKD_CLUSTER_BOOTSTRAP", "false" needs "raft-dir";
    /// This node votes and keeps the log, but keeps no state and serves no clients.
    witness: bool = Switch, "witness", "DFLOCKD_WITNESS", "false" needs "raft-dir";
    /// PEM file with the certificate chain for the peer port, its common name the node id; the three
    /// --raft-tls files belong together and make peers speak mutual TLS 1.3.
    raft_tls_cert: Option<PathBuf> = FilePath,
        "raft-tls-cert", "DFLOCKD_RAFT_TLS_CERT", "" needs "raft-dir";
    /// PEM file with the private key of that certificate.
    raft_tls_key: Option<PathBuf> = FilePath,
        "raft-tls-key", "DFLOCKD_RAFT_TLS_KEY", "" needs "raft-dir";
    /// PEM file with the authorities that sign the certificates of the nodes.
    raft_tls_ca: Option<PathBuf> = FilePath,
        "raft-tls-ca", "DFLOCKD_RAFT_TLS_CA", "" needs "raft-dir";
    /// Speak with peers beyond loopback without the --raft-tls files: the shared secret alone then
    /// protects the connections, and whoever has it can be any node.
    raft_no_tls: bool = Switch, "raft-no-tls", "DFLOCKD_RAFT_NO_TLS", "false" needs "raft-dir";
    /// What a node that does not lead does with a request: send the client to the leader, pass the
    /// request on, or choose by what the client understands.
    follower_mode: FollowerMode = FOLLOWER_MODE,
        "follower-mode", "DFLOCKD_FOLLOWER_MODE", "auto" needs "raft-dir";
    /// How long locks of a cleanly closed connection with a stable reference wait for its return.
    orphan_ttl: Duration = Seconds { min: 0, zero: "not at all" },
        "orphan-ttl", "DFLOCKD_ORPHAN_TTL_S", "0" needs "raft-dir";
    /// Time after a change of leader during which no lease ends, so that its holder can renew it.
    failover_grace: Duration = SecondsUpTo { max: 60, zero: "none" },
        "failover-grace", "DFLOCKD_FAILOVER_GRACE_S", "3" needs "raft-dir";
    /// Entries of the log after which a snapshot replaces them.
    snapshot_entries: u64 = Count { min: 1, max: COUNT_MAX, zero: "" },
        "snapshot-entries", "DFLOCKD_SNAPSHOT_ENTRIES", "100000" needs "raft-dir";
    /// Silence of the leader after which a node stands for election: a random time from this to
    /// twice this.
    election_timeout: Duration = Millis { min: 100, max: 60_000 },
        "election-timeout-ms", "DFLOCKD_ELECTION_TIMEOUT_MS", "1000" needs "raft-dir";
    /// Pause between two signs of life of the leader, at most a third of --election-timeout-ms; left
    /// at its default it adapts to a shorter election timeout.
    heartbeat_interval: Duration = Millis { min: 10, max: 20_000 },
        "heartbeat-interval-ms", "DFLOCKD_HEARTBEAT_INTERVAL_MS", "150" needs "raft-dir";
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
    boolean: bool,
}

impl Setting {
    /// What it does and which other flag that takes.
    fn description(&self) -> String {
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
const ACTIONS: [(&str, &str); 2] =
    [("help", "Print this help and exit."), ("version", "Print the version and exit.")];

/// What the command line asks for.
#[derive(Debug)]
pub enum Parsed {
    /// Start the server.
    Run(Box<Config>),
    /// Print this help text on stdout and exit with status 0.
    Help(String),
    /// Print this version on stdout and exit with status 0.
    Version(String),
}

/// Why the server does not start with this configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfigError(String);

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ConfigError {}

/// The form of the log lines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// `time=… level=… msg=… key=value`.
    Text,
    /// One JSON object per line.
    Json,
}

/// How long nothing is granted after a start.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GrantDelay {
    /// A fixed time; zero grants at once.
    Seconds(u64),
    /// As long as the largest lease ever granted, which the fence state file remembers.
    Auto,
}

/// What a node that does not lead does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowerMode {
    /// Tells the client where the leader is.
    Redirect,
    /// Passes it on to the leader.
    Forward,
    /// Redirects clients that know of clusters (`hello` with `redirect`, or `stable-ref`) and passes
    /// on the requests of all others.
    Auto,
}

/// A host and a port.
///
/// Two that are written differently but mean the same text (case, forms of an IPv6 address) are
/// equal; nothing is looked up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// A name or an IP address, the latter without brackets.
    pub host: String,
    /// 0 only where one binds.
    pub port: u16,
}

impl HostPort {
    fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.bytes().all(|b| b.is_ascii_digit()).then(|| port.parse().ok())??;
        if let Some(rest) = host.strip_prefix('[') {
            let address: Ipv6Addr = rest.strip_suffix(']')?.parse().ok()?;
            return Some(Self { host: address.to_string(), port });
        }
        let is_name_byte = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
        let is_name = (1..=253).contains(&host.len()) && host.bytes().all(is_name_byte);
        is_name.then(|| Self { host: host.to_ascii_lowercase(), port })
    }

    /// Whether another machine could connect to it: not a wildcard, not a port yet to be chosen.
    fn can_be_dialled(&self) -> bool {
        self.port != 0 && !is_wildcard(&self.host)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// One node in `--cluster-peers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSpec {
    /// Its node id.
    pub node: String,
    /// Where the other nodes dial it.
    pub raft_addr: HostPort,
    /// Where clients find it.
    pub client_addr: HostPort,
}

/// How a node without state on disk comes to be part of a cluster. With state it does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Formation {
    /// It makes a cluster of itself alone (`--cluster-bootstrap`).
    Bootstrap,
    /// It starts together with all the others in `--cluster-peers`.
    Static,
    /// It waits until a leader adds it.
    Join,
}

/// Everything replicated mode needs, checked.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// Where log and snapshots are.
    pub dir: PathBuf,
    /// The name of this node.
    pub node: String,
    /// Where the peer port binds; the port may be 0, the host a wildcard.
    pub raft_addr: HostPort,
    /// Where clients find this node, by `--advertise-addr` or its entry in the list. `None` stands
    /// for `--host` and the port that was bound.
    pub advertise_addr: Option<HostPort>,
    /// What to do if the directory is empty.
    pub formation: Formation,
    /// The list, sorted by node id, so that all nodes number it alike; empty if none was given.
    pub peers: Vec<PeerSpec>,
    /// This node keeps the log, but no state.
    pub witness: bool,
    /// What peers must prove to know. There is a secret, or TLS, or both.
    pub secret: Option<Secret>,
    /// The files of mutual TLS between peers.
    pub tls: Option<RaftTls>,
    /// What a node that does not lead does with a request.
    pub follower_mode: FollowerMode,
    /// What happens to the holds of a connection that ends.
    pub auto_release: AutoRelease,
    /// How long locks of a cleanly closed connection with a stable reference wait for its return.
    pub orphan_ttl: Duration,
    /// Time after a change of leader during which no lease ends.
    pub failover_grace: Duration,
    /// Entries of the log after which a snapshot replaces them.
    pub snapshot_entries: u64,
    /// The lower end of the random election timeout; the upper end is twice this.
    pub election_timeout: Duration,
    /// Pause between two signs of life of the leader, at most a third of `election_timeout`.
    pub heartbeat_interval: Duration,
}

impl ClusterConfig {
    /// The entry of this node in the list.
    pub fn own_entry(&self) -> Option<&PeerSpec> {
        self.peers.iter().find(|peer| peer.node == self.node)
    }

    /// Where other nodes should dial this one, as far as it can say: a node that joins is dialled at
    /// the address it was added with.
    pub fn dial_addr(&self) -> &HostPort {
        self.own_entry().map_or(&self.raft_addr, |own| &own.raft_addr)
    }
}

/// The files of mutual TLS between peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaftTls {
    /// The chain, this node's own certificate first.
    pub cert: PathBuf,
    /// The private key of this node.
    pub key: PathBuf,
    /// The authorities that sign the certificates of the nodes.
    pub ca: PathBuf,
}

impl Config {
    /// Reads the command line (without the name of the program) and the environment.
    ///
    /// An explicit flag wins over its variable, which is then not even looked at.
    pub fn from_args(
        args: impl IntoIterator<Item = String>,
        env: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Parsed, ConfigError> {
        let mut command = command();
        let matches = command.try_get_matches_from_mut(normalise(args)).map_err(|e| explain(&e))?;
        let flag = |name: &str| matches.get_one::<String>(name).map(String::as_str);

        // Before anything is checked: whoever asks for help may have come because of an error.
        for (action, _) in ACTIONS {
            let wanted = match flag(action) {
                Some(text) => {
                    parse_go_bool(text).map_err(|p| p.in_flag(&format!("--{action}"), text))?
                }
                None => false,
            };
            match action {
                "help" if wanted => return Ok(Parsed::Help(command.render_help().to_string())),
                _ if wanted => return Ok(Parsed::Version(env!("CARGO_PKG_VERSION").to_owned())),
                _ => (),
            }
        }

        let mut config = Self::resolve(Given::new(&flag, env))?;
        config.validate()?;
        config.cluster = config.cluster_config()?.map(Box::new);
        // Whoever only asks whether to release at all gets the right answer for either flag.
        config.auto_release_on_disconnect = config.disconnect_policy() != AutoRelease::Lease;
        Ok(Parsed::Run(Box::new(config)))
    }

    /// The rules that tie two settings together.
    fn validate(&self) -> Result<(), ConfigError> {
        for setting in settings().iter().filter(|setting| !setting.needs.is_empty()) {
            if self.is_given(setting.flag) && !self.is_given(setting.needs) {
                return refuse(format!("--{} needs --{}", setting.flag, setting.needs));
            }
        }
        // The replicated state keeps fences and leases over restarts.
        for flag in ["fence-state-file", "startup-grant-delay"] {
            if self.is_given(flag) && self.raft_dir.is_some() {
                return refuse(format!("--{flag} cannot be used with --raft-dir"));
            }
        }
        if let Some(policy) = self.auto_release {
            let (release, on_disconnect) =
                (policy != AutoRelease::Lease, self.auto_release_on_disconnect);
            let explicit = self.is_given("auto-release-on-disconnect") || !on_disconnect;
            if explicit && release != on_disconnect {
                return refuse(format!(
                    "--auto-release {} contradicts --auto-release-on-disconnect={on_disconnect}",
                    AUTO_RELEASE.word(policy)
                ));
            }
        }
        if !self.max_lease_ttl.is_zero() && self.default_lease_ttl > self.max_lease_ttl {
            return refuse(format!(
                "--default-lease-ttl ({} s) is above --max-lease-ttl ({} s)",
                self.default_lease_ttl.as_secs(),
                self.max_lease_ttl.as_secs()
            ));
        }
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => return refuse("--tls-cert needs --tls-key"),
            (None, Some(_)) => return refuse("--tls-key needs --tls-cert"),
            (Some(_), Some(_)) | (None, None) => (),
        }
        if self.http_port != 0 && self.http_port == self.port {
            return refuse(format!("--http-port must differ from --port (got {})", self.port));
        }
        let others = [("--port", self.port), ("--http-port", self.http_port)];
        for (flag, port) in others.into_iter().filter(|_| self.grpc_port != 0) {
            if port == self.grpc_port {
                return refuse(format!("--grpc-port must differ from {flag} (got {port})"));
            }
        }
        let (ping, idle) = (self.http_sse_ping_interval, self.http_session_idle_timeout);
        if self.is_given("http-sse-ping-interval") && !idle.is_zero() && ping >= idle {
            return refuse(format!(
                "--http-sse-ping-interval must be below --http-session-idle-timeout, {} (got {})",
                idle.as_secs(),
                ping.as_secs()
            ));
        }
        if self.require_auth && self.auth_token.is_none() {
            return refuse("--require-auth needs --auth-token or --auth-token-file");
        }
        if self.require_auth
            && let Some(weakness) = self.weak_tokens().first()
        {
            return refuse(format!("--require-auth: {weakness}"));
        }
        if self.startup_grant_delay == GrantDelay::Auto && self.fence_state_file.is_none() {
            // Only that file remembers the largest lease, so there is nothing to wait for without
            // it.
            return refuse("--startup-grant-delay auto needs --fence-state-file");
        }
        Ok(())
    }

    /// The settings of replicated mode, if `--raft-dir` switches it on.
    fn cluster_config(&self) -> Result<Option<ClusterConfig>, ConfigError> {
        let Some(dir) = &self.raft_dir else { return Ok(None) };
        let Some(node) = &self.node_id else { return refuse("--raft-dir needs --node-id") };
        let Some(raft_addr) = &self.raft_addr else {
            return refuse("--raft-dir needs --raft-addr");
        };
        let formation = self.formation(node, raft_addr)?;
        let tls = self.raft_tls()?;
        let secret = match &self.raft_auth_token {
            Some(secret) => Some(secret.newest().clone()),
            None if tls.is_some() => None,
            // Nobody else could be there to share it with.
            None if formation == Formation::Bootstrap && is_loopback(&raft_addr.host) => {
                Some(Secret::new(&*Zeroizing::new(rand::random::<[u8; RAFT_TOKEN_BYTES_MIN]>())))
            }
            None => {
                return refuse(
                    "--raft-dir needs --raft-auth-token or --raft-auth-token-file, \
                     or --raft-tls-cert, --raft-tls-key and --raft-tls-ca",
                );
            }
        };
        if tls.is_none() && !self.raft_no_tls {
            let peers = self.cluster_peers.iter().map(|peer| &peer.raft_addr);
            let mut all = [raft_addr].into_iter().chain(peers);
            if let Some(beyond) = all.find(|addr| !is_loopback(&addr.host)) {
                return refuse(format!(
                    "peers beyond loopback ({beyond}) need --raft-tls-cert, --raft-tls-key and \
                     --raft-tls-ca, which `dflockctl cluster init` and `dflockctl cluster cert` \
                     make, or --raft-no-tls to rely on the shared secret alone"
                ));
            }
        }
        let own = self.cluster_peers.iter().find(|peer| peer.node == *node);
        let advertised = self.advertise_addr.as_ref().or(own.map(|own| &own.client_addr));
        Ok(Some(ClusterConfig {
            dir: dir.clone(),
            node: node.clone(),
            raft_addr: raft_addr.clone(),
            advertise_addr: advertised.cloned(),
            formation,
            peers: self.cluster_peers.clone(),
            witness: self.witness,
            secret,
            tls,
            follower_mode: self.follower_mode,
            auto_release: self.disconnect_policy(),
            orphan_ttl: self.orphan_ttl,
            failover_grace: self.failover_grace,
            snapshot_entries: self.snapshot_entries,
            election_timeout: self.election_timeout,
            heartbeat_interval: self.heartbeat()?,
        }))
    }

    fn formation(&self, node: &str, raft_addr: &HostPort) -> Result<Formation, ConfigError> {
        let mut others: Vec<_> = self.cluster_peers.iter().map(|peer| peer.node.as_str()).collect();
        others.retain(|other| *other != node);
        let listed = !self.cluster_peers.is_empty();
        if listed && others.len() == self.cluster_peers.len() {
            return refuse(format!(
                "--cluster-peers must contain this node (--node-id {node} is not in it)"
            ));
        }
        if self.cluster_bootstrap {
            if !others.is_empty() {
                return refuse(format!(
                    "--cluster-bootstrap contradicts other nodes in --cluster-peers ({})",
                    others.join(", ")
                ));
            }
            // Its address goes into the membership, where the nodes that are added find it.
            if !listed && !raft_addr.can_be_dialled() && !is_loopback(&raft_addr.host) {
                return refuse(format!(
                    "--cluster-bootstrap needs a --raft-addr that others can dial, or this node \
                     in --cluster-peers (got {raft_addr})"
                ));
            }
        }
        if self.witness && others.is_empty() && (listed || self.cluster_bootstrap) {
            return refuse("--witness needs other nodes: it serves no clients itself");
        }
        Ok(match (self.cluster_bootstrap, listed) {
            (true, _) => Formation::Bootstrap,
            (false, true) => Formation::Static,
            (false, false) => Formation::Join,
        })
    }

    fn raft_tls(&self) -> Result<Option<RaftTls>, ConfigError> {
        let files = [
            ("--raft-tls-cert", &self.raft_tls_cert),
            ("--raft-tls-key", &self.raft_tls_key),
            ("--raft-tls-ca", &self.raft_tls_ca),
        ];
        let given = files.iter().find(|(_, file)| file.is_some());
        let missing = files.iter().find(|(_, file)| file.is_none());
        if let (Some((given, _)), Some((missing, _))) = (given, missing) {
            return refuse(format!("{given} needs {missing}"));
        }
        let [cert, key, ca] = files.map(|(_, file)| file.clone());
        Ok(cert.zip(key).zip(ca).map(|((cert, key), ca)| RaftTls { cert, key, ca }))
    }

    fn heartbeat(&self) -> Result<Duration, ConfigError> {
        let (heartbeat, election) = (self.heartbeat_interval, self.election_timeout);
        if heartbeat * 3 <= election {
            return Ok(heartbeat);
        }
        let third = election.as_millis() / 3;
        if self.is_given("heartbeat-interval-ms") {
            return refuse(format!(
                "--heartbeat-interval-ms must be at most a third of --election-timeout-ms, {third} \
                 (got {})",
                heartbeat.as_millis()
            ));
        }
        Ok(Duration::from_millis(u64::try_from(third).expect("the range ends far below")))
    }

    /// Whether a flag or its variable was given; a boolean that was switched off counts as not.
    fn is_given(&self, flag: &str) -> bool {
        self.given.contains(&flag)
    }

    /// What replicated mode needs, or `None` in memory mode.
    pub fn replicated(&self) -> Option<&ClusterConfig> {
        self.cluster.as_deref()
    }

    /// What happens to the holds of a connection that ends, by `--auto-release`,
    /// `--auto-release-on-disconnect` or the default of the mode.
    pub fn disconnect_policy(&self) -> AutoRelease {
        match self.auto_release {
            Some(policy) => policy,
            None if !self.auto_release_on_disconnect => AutoRelease::Lease,
            None if self.raft_dir.is_some() => AutoRelease::Clean,
            None => AutoRelease::Any,
        }
    }

    /// Where the HTTP interface binds, if it is on.
    pub fn http_address(&self) -> Option<(&str, u16)> {
        let host = self.http_host.as_ref().unwrap_or(&self.host);
        (self.http_port != 0).then_some((host.as_str(), self.http_port))
    }

    /// Whether the HTTP interface listens on all addresses of the machine.
    pub fn http_listens_everywhere(&self) -> bool {
        self.http_address().is_some_and(|(host, _)| is_wildcard(host))
    }

    /// Where the gRPC interface binds, if it is on.
    pub fn grpc_address(&self) -> Option<(&str, u16)> {
        let host = self.grpc_host.as_ref().unwrap_or(&self.host);
        (self.grpc_port != 0).then_some((host.as_str(), self.grpc_port))
    }

    /// How often a comment is written to event streams; zero is never.
    pub fn sse_ping(&self) -> Duration {
        let (ping, idle) = (self.http_sse_ping_interval, self.http_session_idle_timeout);
        if !idle.is_zero() && ping >= idle { idle / 2 } else { ping }
    }

    /// What the operator should know although the server starts.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.notes.clone();
        if self.max_value_bytes > PORTABLE_VALUE_BYTES_MAX {
            warnings.push(format!(
                "--max-value-bytes is {}: Go clients cannot read values above \
                 {PORTABLE_VALUE_BYTES_MAX} bytes",
                self.max_value_bytes
            ));
        }
        warnings.extend(self.warnings_of_open_addresses());
        warnings.extend(self.weak_tokens());
        warnings.extend(self.warnings_of_web_pages());
        if let Some(cluster) = &self.cluster {
            if cluster.secret.is_some() && self.raft_auth_token.is_none() {
                warnings.push(
                    "there is no --raft-auth-token: no other node can be added until this one is \
                     started with one"
                        .to_owned(),
                );
            }
            let reachable = !is_loopback(&self.host) && !is_wildcard(&self.host);
            if cluster.advertise_addr.is_none()
                && !reachable
                && !is_loopback(&cluster.raft_addr.host)
            {
                warnings.push(format!(
                    "--host {} is no address that clients elsewhere can dial: other nodes cannot \
                     send them here without --advertise-addr",
                    self.host
                ));
            }
        }
        warnings
    }

    /// What lets web pages use a server that has no token to keep them out.
    fn warnings_of_web_pages(&self) -> Vec<String> {
        if self.auth_token.is_some() || self.http_address().is_none() {
            return Vec::new();
        }
        let has_all = |entries: &[String]| entries.iter().any(|entry| entry == "*");
        let open = [
            (
                &self.http_cors_allowed_origins,
                "--http-cors-allowed-origins * and there is no auth token: every web page that \
                 somebody visits who can reach the server can take and release locks",
            ),
            (
                &self.http_allowed_hosts,
                "--http-allowed-hosts * and there is no auth token: every web page whose name \
                 resolves to this server's address can take and release locks",
            ),
        ];
        let open = open.into_iter().filter(|(entries, _)| has_all(entries));
        open.map(|(_, warning)| warning.to_owned()).collect()
    }

    /// What is not protected although others than this machine can reach it.
    fn warnings_of_open_addresses(&self) -> Vec<String> {
        let line = Some(("--host", self.host.as_str())).filter(|(_, host)| !is_loopback(host));
        let http = self.http_address().map(|(host, _)| ("--http-host", host));
        let http = http.filter(|(_, host)| !is_loopback(host));
        let grpc = self.grpc_address().map(|(host, _)| ("--grpc-host", host));
        let grpc = grpc.filter(|(_, host)| !is_loopback(host));
        let web = http.or(grpc);
        let Some((flag, host)) = line.or(web) else { return Vec::new() };
        let limits = [
            (line.is_some(), "--max-connections-per-ip", self.max_connections_per_ip),
            (true, "--max-waiters", self.max_waiters),
            (web.is_some(), "--http-max-sessions", self.http_max_sessions),
            (web.is_some(), "--http-max-sessions-per-ip", self.http_max_sessions_per_ip),
            (web.is_some(), "--http-max-connections-per-ip", self.http_max_connections_per_ip),
            (web.is_some(), "--http-rate-limit-per-ip", self.http_rate_limit_per_ip),
        ];
        let open = limits.iter().filter(|(reachable, _, max)| *reachable && *max == 0);
        let open: Vec<_> = open.map(|limit| limit.1).collect();
        let mut warnings = Vec::new();
        if !open.is_empty() {
            warnings.push(format!(
                "{flag} {host} is not a loopback address and these limits are unlimited: {}",
                open.join(", ")
            ));
        }
        if self.auth_token.is_none() {
            warnings.push(format!(
                "{flag} {host} is not a loopback address and there is no auth token: \
                 anyone who can reach the port can take and release locks"
            ));
        }
        let has_token = self.auth_token.is_some() || self.admin_token.is_some();
        if has_token && self.tls_cert.is_none() {
            let open: Vec<_> = [line, http, grpc].into_iter().flatten().collect();
            let open: Vec<_> = open.iter().map(|(flag, host)| format!("{flag} {host}")).collect();
            warnings.push(format!(
                "tokens go over the network in plain text: {} without --tls-cert",
                open.join(", ")
            ));
        }
        warnings
    }

    /// What is wrong with the tokens although they can be used.
    fn weak_tokens(&self) -> Vec<String> {
        Self::weaknesses([
            (&self.auth_source, self.auth_token.as_ref()),
            (&self.admin_source, self.admin_token.as_ref()),
            (&self.raft_source, self.raft_auth_token.as_ref()),
        ])
    }

    /// Which of these tokens are short, and which of different kinds are equal.
    fn weaknesses(kinds: [(&Option<TokenSource>, Option<&Tokens>); 3]) -> Vec<String> {
        let kinds = kinds.map(|(source, tokens)| source.as_ref().zip(tokens));
        let kinds: Vec<_> = kinds.into_iter().flatten().collect();
        let mut weak = Vec::new();
        for (source, tokens) in &kinds {
            if tokens.iter().any(|token| token.bytes().len() < TOKEN_BYTES_ADVISED) {
                weak.push(format!(
                    "{}: a token has fewer than {TOKEN_BYTES_ADVISED} bytes and can be guessed; \
                     make one with openssl rand -hex 32",
                    source.name()
                ));
            }
        }
        for (index, (source, tokens)) in kinds.iter().enumerate() {
            for (other, others) in &kinds[index + 1..] {
                if tokens.iter().any(|token| others.matches(token.bytes())) {
                    weak.push(format!(
                        "{} and {} have the same token: whoever has one right has the other",
                        source.name(),
                        other.name()
                    ));
                }
            }
        }
        weak
    }

    /// Files and directories that others than the server could read or change.
    pub fn warnings_of_files(&self) -> Vec<String> {
        let sources = [&self.auth_source, &self.admin_source, &self.raft_source];
        let sources = sources.into_iter().flatten().filter_map(|source| match source {
            TokenSource::File { name, path } => Some((name.as_str(), path)),
            TokenSource::Value { .. } => None,
        });
        let keys = [("--tls-key", &self.tls_key), ("--raft-tls-key", &self.raft_tls_key)];
        let keys = keys.into_iter().filter_map(|(name, path)| Some((name, path.as_ref()?)));
        let mut warnings: Vec<String> = sources
            .chain(keys)
            .filter(|(_, path)| is_readable_by_others(path))
            .map(|(name, path)| {
                format!("{name}: {} can be read by other users; chmod 600 it", path.display())
            })
            .collect();
        if let Some(dir) = &self.raft_dir
            && mode_and_owner(dir).is_some_and(|(mode, _)| mode & 0o022 != 0)
        {
            let dir = dir.display();
            warnings.push(format!("--raft-dir: {dir} can be changed by other users; chmod 700 it"));
        }
        warnings
    }

    /// The auth tokens as their source has them now: a file is read again, anything else cannot
    /// have changed.
    ///
    /// On an error the old tokens should stay in force: a half-written file must not open the
    /// server. With `--require-auth` that includes tokens that the server would not start with.
    pub fn reload_auth_token(&self) -> Result<Option<Tokens>, ConfigError> {
        self.reload(&self.auth_source, (&self.admin_source, self.admin_token.as_ref()))
    }

    /// The admin tokens as their source has them now, like [`Config::reload_auth_token`].
    pub fn reload_admin_token(&self) -> Result<Option<Tokens>, ConfigError> {
        self.reload(&self.admin_source, (&self.auth_source, self.auth_token.as_ref()))
    }

    fn reload(
        &self,
        source: &Option<TokenSource>,
        other: (&Option<TokenSource>, Option<&Tokens>),
    ) -> Result<Option<Tokens>, ConfigError> {
        let tokens = source.as_ref().map(TokenSource::read).transpose()?;
        // Both files may change at once, so the other token is what its own source has now.
        let others = other.0.as_ref().and_then(|other| other.read().ok());
        let kinds = [
            (source, tokens.as_ref()),
            (other.0, others.as_ref().or(other.1)),
            (&self.raft_source, self.raft_auth_token.as_ref()),
        ];
        for weakness in Self::weaknesses(kinds) {
            if self.require_auth {
                return refuse(format!("--require-auth: {weakness}"));
            }
            tracing::warn!("{weakness}");
        }
        Ok(tokens)
    }

    /// The secret between nodes as its source has it now, like [`Config::reload_auth_token`]. One
    /// that was drawn at random stays.
    pub fn reload_raft_secret(&self) -> Result<Option<Secret>, ConfigError> {
        match &self.raft_source {
            Some(source) => source.read().map(|tokens| Some(tokens.newest().clone())),
            None => Ok(self.cluster.as_ref().and_then(|cluster| cluster.secret.clone())),
        }
    }
}

impl Default for Config {
    /// The configuration without any flag or variable.
    fn default() -> Self {
        Self::resolve(Given::new(&|_| None, &|_| None)).expect("every default passes its own rule")
    }
}

/// A variable of this process, for [`Config::from_args`].
///
/// Bytes that are no UTF-8 are replaced rather than taken as "not set": a broken token variable
/// must never mean "no authentication".
pub fn process_env(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into_owned())
}

/// A token: never printed, wiped when dropped, compared in constant time.
#[derive(Clone)]
pub struct Secret {
    /// The token, then zeros up to a power of two, so that a mask keeps an index inside.
    padded: Zeroizing<Vec<u8>>,
    len: usize,
}

impl Secret {
    /// Keeps a copy of `token`.
    pub fn new(token: &[u8]) -> Self {
        // The final capacity at once: a vector that grows leaves copies of the token behind.
        let mut padded = Zeroizing::new(vec![0; token.len().next_power_of_two()]);
        padded[..token.len()].copy_from_slice(token);
        Self { padded, len: token.len() }
    }

    /// The token itself, for what must be computed from it. Never to be printed or stored.
    pub fn bytes(&self) -> &[u8] {
        &self.padded[..self.len]
    }

    /// Whether `presented` is the token, in a time that depends on the length of `presented` alone.
    pub fn matches(&self, presented: &[u8]) -> bool {
        let mask = self.padded.len() - 1;
        let mut equal = presented.len().ct_eq(&self.len);
        for (index, byte) in presented.iter().enumerate() {
            equal &= byte.ct_eq(&self.padded[index & mask]);
        }
        equal.into()
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// The valid tokens of a kind: one, or a new one and the one before it.
#[derive(Clone, Debug)]
pub struct Tokens(Vec<Secret>);

impl Tokens {
    /// These tokens, the newest first.
    ///
    /// # Panics
    ///
    /// If there are none.
    #[must_use]
    pub fn new(tokens: Vec<Secret>) -> Self {
        assert!(!tokens.is_empty(), "somebody must be able to come in");
        Self(tokens)
    }

    /// The one that everybody should have.
    #[must_use]
    pub fn newest(&self) -> &Secret {
        &self.0[0]
    }

    /// All of them, the newest first.
    pub fn iter(&self) -> impl Iterator<Item = &Secret> {
        self.0.iter()
    }

    /// Whether `presented` is one of them.
    #[must_use]
    pub fn matches(&self, presented: &[u8]) -> bool {
        // All are compared, so that the time tells nothing about which.
        self.0.iter().fold(false, |found, token| found | token.matches(presented))
    }
}

/// The source that was selected for a token; `name` is its flag or variable.
#[derive(Debug, Clone)]
enum TokenSource {
    Value { name: String, secret: Secret },
    File { name: String, path: PathBuf },
}

impl TokenSource {
    /// Its flag or variable.
    fn name(&self) -> &str {
        match self {
            Self::Value { name, .. } | Self::File { name, .. } => name,
        }
    }

    fn read(&self) -> Result<Tokens, ConfigError> {
        let (name, path) = match self {
            Self::Value { name, secret } => {
                if secret.bytes().is_empty() {
                    return refuse(format!("{name} must not be empty"));
                }
                check_token(name, secret.bytes())?;
                return Ok(Tokens::new(vec![secret.clone()]));
            }
            Self::File { name, path } => (name, path),
        };
        let limit = TOKENS_MAX * (TOKEN_BYTES_MAX + 1024);
        let content = read_file(path, limit).map_err(|error| {
            ConfigError(format!("{name}: cannot read {}: {error}", path.display()))
        })?;
        let lines = content.split(|byte| *byte == b'\n').map(<[u8]>::trim_ascii);
        let lines: Vec<&[u8]> = lines.filter(|line| !line.is_empty()).collect();
        let lines_max = if is_raft_token(name) { 1 } else { TOKENS_MAX };
        if lines.is_empty() {
            return refuse(format!("{name}: {} is empty", path.display()));
        }
        if lines.len() > lines_max {
            return refuse(match lines_max {
                1 => format!("{name}: the token must not contain a line break"),
                _ => format!(
                    "{name}: {} has more than two lines: a token, and the one before it",
                    path.display()
                ),
            });
        }
        for line in &lines {
            check_token(name, line)?;
        }
        Ok(Tokens::new(lines.into_iter().map(Secret::new).collect()))
    }
}

/// Refuses what no client could send, or nobody could ever log in.
fn check_token(name: &str, token: &[u8]) -> Result<(), ConfigError> {
    if token.contains(&b'\n') || token.contains(&b'\r') {
        return refuse(format!("{name}: the token must not contain a line break"));
    }
    if token.trim_ascii().len() != token.len() {
        return refuse(format!("{name}: the token must not begin or end with white space"));
    }
    // An admin token is one field among others on the wire.
    let is_admin = name.to_ascii_lowercase().contains("admin");
    if is_admin && token.iter().any(u8::is_ascii_whitespace) {
        return refuse(format!("{name}: the token must not contain white space"));
    }
    if is_raft_token(name) && token.len() < RAFT_TOKEN_BYTES_MIN {
        return refuse(format!(
            "{name}: the token must have at least {RAFT_TOKEN_BYTES_MIN} bytes"
        ));
    }
    if token.len() > TOKEN_BYTES_MAX {
        return refuse(format!(
            "{name}: the token must not be longer than {TOKEN_BYTES_MAX} bytes"
        ));
    }
    Ok(())
}

/// Whether a flag or variable gives the secret between nodes.
fn is_raft_token(name: &str) -> bool {
    name.to_ascii_lowercase().contains("raft")
}

fn valid_token(flag: &str) -> String {
    if is_raft_token(flag) {
        format!("at least {RAFT_TOKEN_BYTES_MIN} bytes, one line")
    } else {
        "not empty, one line".to_owned()
    }
}

/// Reads at most `limit` bytes, so that a wrong path cannot fill the memory.
fn read_file(path: &Path, limit: usize) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let mut content = Zeroizing::new(Vec::with_capacity(limit));
    File::open(path)?.take(limit as u64).read_to_end(&mut content)?;
    Ok(content)
}

/// Whether a file with a secret can be read by others than those it is meant for. A file of root that a group can read
/// is meant for that group: so service managers hand secrets to a server that is not root.
fn is_readable_by_others(path: &Path) -> bool {
    mode_and_owner(path)
        .is_some_and(|(mode, owner)| mode & 0o007 != 0 || mode & 0o070 != 0 && owner != 0)
}

fn mode_and_owner(path: &Path) -> Option<(u32, u32)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.mode(), metadata.uid()))
}

/// The sources of one start: flags and variables.
struct Given<'a> {
    flag: &'a dyn Fn(&str) -> Option<&'a str>,
    env: &'a dyn Fn(&str) -> Option<String>,
    notes: Vec<String>,
    given: Vec<&'static str>,
}

impl<'a> Given<'a> {
    fn new(
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
            return match FilePath.parse_flag(text).map_err(|p| p.in_flag(&name, text))? {
                Some(path) => Ok(Some(TokenSource::File { name, path })),
                None => Ok(None),
            };
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

/// How the text of a setting becomes a value.
trait Rule {
    type Value;

    /// The valid values in words.
    fn valid(&self) -> String;

    fn parse_flag(&self, text: &str) -> Result<Self::Value, Problem>;

    /// Variables differ from flags only in the words for true and false.
    fn parse_env(&self, text: &str) -> Result<Self::Value, Problem> {
        self.parse_flag(text)
    }

    fn parse_default(&self, text: &str) -> Result<Self::Value, Problem> {
        self.parse_flag(text)
    }

    fn is_boolean(&self) -> bool {
        false
    }

    /// Whether the value says no more than that the setting is not wanted.
    fn is_off(&self, _: &Self::Value) -> bool {
        false
    }
}

/// What is wrong with a text.
#[derive(Debug)]
enum Problem {
    /// It is of the wrong kind; the text is quoted in the message.
    Malformed(String),
    /// It is a number outside its range; the message shows it as it was given.
    OutOfRange(String),
}

impl Problem {
    fn in_flag(&self, flag: &str, text: &str) -> ConfigError {
        ConfigError(match self {
            Self::Malformed(rule) => format!("{flag} {rule} (got {text:?})"),
            Self::OutOfRange(rule) => format!("{flag} {rule} (got {text})"),
        })
    }

    fn in_env(&self, env: &str, flag: &str, text: &str) -> ConfigError {
        ConfigError(match self {
            Self::Malformed(rule) => format!("{env} {rule} (got {text:?})"),
            // The range is that of the setting, however it was given.
            Self::OutOfRange(rule) => format!("{env}: {flag} {rule} (got {text})"),
        })
    }
}

/// A number; `zero` says what 0 means if it is no ordinary value.
struct Count {
    min: u64,
    max: u64,
    zero: &'static str,
}

impl Rule for Count {
    type Value = u64;

    fn valid(&self) -> String {
        let range = match (self.min, self.max) {
            (1, COUNT_MAX) => "> 0".to_owned(),
            (min, COUNT_MAX) => format!(">= {min}"),
            (min, max) => format!("{min}-{max}"),
        };
        match self.zero {
            "" => range,
            zero => format!("{range}, 0 = {zero}"),
        }
    }

    fn parse_flag(&self, text: &str) -> Result<u64, Problem> {
        let number = text
            .parse::<i128>()
            .map_err(|_| Problem::Malformed("must be an integer".to_owned()))?;
        let in_range = u64::try_from(number).ok().filter(|n| (self.min..=self.max).contains(n));
        in_range.ok_or_else(|| {
            Problem::OutOfRange(if self.max < COUNT_MAX && self.max != SECONDS_MAX {
                format!("must be between {} and {}", self.min, self.max)
            } else if number > 0 {
                format!("must be <= {}", self.max)
            } else if self.min == 1 {
                "must be > 0".to_owned()
            } else {
                format!("must be >= {}", self.min)
            })
        })
    }
}

/// A TCP port; `zero` as in [`Count`].
struct Port {
    zero: &'static str,
}

impl Port {
    fn range(&self) -> Count {
        Count { min: 0, max: u16::MAX.into(), zero: self.zero }
    }
}

impl Rule for Port {
    type Value = u16;

    fn valid(&self) -> String {
        self.range().valid()
    }

    fn parse_flag(&self, text: &str) -> Result<u16, Problem> {
        let port = self.range().parse_flag(text)?;
        Ok(u16::try_from(port).expect("the range ends at the largest port"))
    }
}

/// A duration in whole seconds; `zero` as in [`Count`].
struct Seconds {
    min: u64,
    zero: &'static str,
}

impl Rule for Seconds {
    type Value = Duration;

    fn valid(&self) -> String {
        let range = Count { min: self.min, max: COUNT_MAX, zero: self.zero }.valid();
        format!("seconds, {range}")
    }

    fn parse_flag(&self, text: &str) -> Result<Duration, Problem> {
        let count = Count { min: self.min, max: SECONDS_MAX, zero: self.zero };
        count.parse_flag(text).map(Duration::from_secs)
    }
}

/// A duration in whole seconds with a low upper end; `zero` as in [`Count`].
struct SecondsUpTo {
    max: u64,
    zero: &'static str,
}

impl Rule for SecondsUpTo {
    type Value = Duration;

    fn valid(&self) -> String {
        format!("seconds, {}", Count { min: 0, max: self.max, zero: self.zero }.valid())
    }

    fn parse_flag(&self, text: &str) -> Result<Duration, Problem> {
        let count = Count { min: 0, max: self.max, zero: self.zero };
        count.parse_flag(text).map(Duration::from_secs)
    }
}

/// A duration in whole milliseconds.
struct Millis {
    min: u64,
    max: u64,
}

impl Rule for Millis {
    type Value = Duration;

    fn valid(&self) -> String {
        format!("milliseconds, {}-{}", self.min, self.max)
    }

    fn parse_flag(&self, text: &str) -> Result<Duration, Problem> {
        let count = Count { min: self.min, max: self.max, zero: "" };
        count.parse_flag(text).map(Duration::from_millis)
    }
}

/// True or false.
struct Switch;

impl Rule for Switch {
    type Value = bool;

    fn valid(&self) -> String {
        "`true` or `false`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<bool, Problem> {
        parse_go_bool(text)
    }

    fn parse_env(&self, text: &str) -> Result<bool, Problem> {
        match text.to_ascii_lowercase().as_str() {
            "1" | "yes" | "true" => Ok(true),
            "0" | "no" | "false" => Ok(false),
            _ => Err(not_a_boolean()),
        }
    }

    fn is_boolean(&self) -> bool {
        true
    }

    fn is_off(&self, value: &bool) -> bool {
        !value
    }
}

/// The words that the flag package of Go takes, which scripts for upstream servers use.
fn parse_go_bool(text: &str) -> Result<bool, Problem> {
    match text {
        "1" | "t" | "T" | "true" | "TRUE" | "True" => Ok(true),
        "0" | "f" | "F" | "false" | "FALSE" | "False" => Ok(false),
        _ => Err(not_a_boolean()),
    }
}

fn not_a_boolean() -> Problem {
    Problem::Malformed("must be a boolean".to_owned())
}

/// Any text but the empty one: an empty flag is nearly always a shell variable that was not set.
struct Text;

impl Rule for Text {
    type Value = String;

    fn valid(&self) -> String {
        "not empty".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<String, Problem> {
        match text {
            "" => Err(Problem::Malformed("must not be empty".to_owned())),
            text => Ok(text.to_owned()),
        }
    }
}

/// A path, or none by default.
struct FilePath;

impl Rule for FilePath {
    type Value = Option<PathBuf>;

    fn valid(&self) -> String {
        "path".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<Option<PathBuf>, Problem> {
        Text.parse_flag(text).map(|path| Some(PathBuf::from(path)))
    }

    fn parse_default(&self, _: &str) -> Result<Option<PathBuf>, Problem> {
        Ok(None)
    }
}

/// Seconds or `auto`.
struct Delay;

impl Rule for Delay {
    type Value = GrantDelay;

    fn valid(&self) -> String {
        "seconds, >= 0, or `auto`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<GrantDelay, Problem> {
        if text == "auto" {
            return Ok(GrantDelay::Auto);
        }
        match (Count { min: 0, max: SECONDS_MAX, zero: "" }).parse_flag(text) {
            Ok(seconds) => Ok(GrantDelay::Seconds(seconds)),
            Err(Problem::Malformed(rule)) => Err(Problem::Malformed(format!("{rule} or auto"))),
            Err(Problem::OutOfRange(rule)) => Err(Problem::OutOfRange(rule)),
        }
    }
}

/// One of a few words.
struct OneOf<T: 'static>(&'static [(&'static str, T)]);

const LOG_FORMAT: OneOf<LogFormat> = OneOf(&[("text", LogFormat::Text), ("json", LogFormat::Json)]);

const AUTO_RELEASE: OneOf<AutoRelease> = OneOf(&[
    ("any", AutoRelease::Any),
    ("clean", AutoRelease::Clean),
    ("lease", AutoRelease::Lease),
]);

const FOLLOWER_MODE: OneOf<FollowerMode> = OneOf(&[
    ("redirect", FollowerMode::Redirect),
    ("forward", FollowerMode::Forward),
    ("auto", FollowerMode::Auto),
]);

impl<T: Copy + PartialEq> OneOf<T> {
    fn word(&self, value: T) -> &'static str {
        self.0.iter().find(|(_, other)| *other == value).map_or("", |(word, _)| word)
    }
}

impl<T: Copy> Rule for OneOf<T> {
    type Value = T;

    fn valid(&self) -> String {
        let words: Vec<_> = self.0.iter().map(|(word, _)| format!("`{word}`")).collect();
        let (last, others) = words.split_last().expect("there is a word to choose");
        format!("{} or {last}", others.join(", "))
    }

    fn parse_flag(&self, text: &str) -> Result<T, Problem> {
        let found = self.0.iter().find(|(word, _)| *word == text);
        let no_such = || Problem::Malformed(format!("must be {}", self.valid().replace('`', "")));
        found.map(|(_, value)| *value).ok_or_else(no_such)
    }
}

/// A setting without a default; what the list says in its place is for people only.
struct Optional<R>(R);

impl<R: Rule> Rule for Optional<R> {
    type Value = Option<R::Value>;

    fn valid(&self) -> String {
        self.0.valid()
    }

    fn parse_flag(&self, text: &str) -> Result<Self::Value, Problem> {
        self.0.parse_flag(text).map(Some)
    }

    fn parse_env(&self, text: &str) -> Result<Self::Value, Problem> {
        self.0.parse_env(text).map(Some)
    }

    fn parse_default(&self, _: &str) -> Result<Self::Value, Problem> {
        Ok(None)
    }
}

/// The id of a node.
struct NodeName;

impl NodeName {
    fn accepts(text: &str) -> bool {
        let is_name_byte = |b: u8| b.is_ascii_alphanumeric() || b"._-".contains(&b);
        (1..=64).contains(&text.len()) && text.bytes().all(is_name_byte)
    }
}

impl Rule for NodeName {
    type Value = String;

    fn valid(&self) -> String {
        "1-64 of `A-Z a-z 0-9 . _ -`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<String, Problem> {
        if Self::accepts(text) {
            return Ok(text.to_owned());
        }
        Err(Problem::Malformed("must be 1-64 of A-Z a-z 0-9 . _ -".to_owned()))
    }
}

/// `host:port`, to bind or to be dialled by others.
struct Address {
    dialled: bool,
}

impl Rule for Address {
    type Value = HostPort;

    fn valid(&self) -> String {
        "`host:port`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<HostPort, Problem> {
        match HostPort::parse(text) {
            None => Err(Problem::Malformed("must be host:port".to_owned())),
            Some(address) if self.dialled && !address.can_be_dialled() => {
                Err(Problem::Malformed("must be a host:port that others can dial".to_owned()))
            }
            Some(address) => Ok(address),
        }
    }
}

/// The nodes of a cluster; the value is sorted by node id.
struct Peers;

impl Peers {
    fn parse_entry(text: &str) -> Option<PeerSpec> {
        let (node, addresses) = text.split_once('=')?;
        let (raft_addr, client_addr) = addresses.split_once('@')?;
        Some(PeerSpec {
            node: NodeName::accepts(node).then(|| node.to_owned())?,
            raft_addr: HostPort::parse(raft_addr)?,
            client_addr: HostPort::parse(client_addr)?,
        })
    }
}

impl Rule for Peers {
    type Value = Vec<PeerSpec>;

    fn valid(&self) -> String {
        "`id=raftHost:port@clientHost:port,…`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<Vec<PeerSpec>, Problem> {
        let malformed = |rule: String| Err(Problem::Malformed(rule));
        let mut peers: Vec<PeerSpec> = Vec::new();
        for (index, entry) in text.split(',').enumerate() {
            let Some(peer) = Self::parse_entry(entry.trim_ascii()) else {
                let number = index + 1;
                return malformed(format!(
                    "entry {number} must be id=raftHost:port@clientHost:port"
                ));
            };
            peers.push(peer);
        }
        peers.sort_by(|a, b| a.node.cmp(&b.node));
        if let Some(pair) = peers.windows(2).find(|pair| pair[0].node == pair[1].node) {
            return malformed(format!("must name {} only once", pair[0].node));
        }
        // Also across the two kinds: no port can speak both protocols.
        let mut addresses: Vec<_> =
            peers.iter().flat_map(|peer| [&peer.raft_addr, &peer.client_addr]).collect();
        addresses.sort();
        if let Some(address) = addresses.iter().find(|address| !address.can_be_dialled()) {
            return malformed(format!("must not have {address}, which others cannot dial"));
        }
        if let Some(pair) = addresses.windows(2).find(|pair| pair[0] == pair[1]) {
            return malformed(format!("must have {} only once", pair[0]));
        }
        Ok(peers)
    }

    fn parse_default(&self, _: &str) -> Result<Vec<PeerSpec>, Problem> {
        Ok(Vec::new())
    }
}

/// Where pages come from, as browsers write it: `scheme://host[:port]`, or `*`.
struct Origins;

impl Rule for Origins {
    type Value = Vec<String>;

    fn valid(&self) -> String {
        "`scheme://host:port,…` or `*`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<Vec<String>, Problem> {
        let mut origins = Vec::new();
        for (index, entry) in text.split(',').enumerate() {
            let origin = entry.trim_ascii();
            let host = origin.split_once("://").map(|(_, host)| host);
            // A path or a slash at the end would never match: browsers send neither.
            let is_origin = host.is_some_and(|host| !host.is_empty() && !host.contains('/'));
            if !(origin == "*" || is_origin && origin.bytes().all(|b| b.is_ascii_graphic())) {
                let number = index + 1;
                let rule = format!("entry {number} must be scheme://host:port or *");
                return Err(Problem::Malformed(rule));
            }
            origins.push(origin.to_ascii_lowercase());
        }
        Ok(origins)
    }

    fn parse_default(&self, _: &str) -> Result<Vec<String>, Problem> {
        Ok(Vec::new())
    }
}

/// What a server is called, as it stands in `Host` but without a port.
struct Hosts;

impl Rule for Hosts {
    type Value = Vec<String>;

    fn valid(&self) -> String {
        "`host,.domain,…` or `*`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<Vec<String>, Problem> {
        let mut hosts = Vec::new();
        for (index, entry) in text.split(',').enumerate() {
            let host = bare(entry.trim_ascii()).to_ascii_lowercase();
            let name = host.strip_prefix('.').unwrap_or(&host);
            let is_name = !name.is_empty()
                && !name.starts_with('.')
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b));
            if !(host == "*" || is_name || host.parse::<IpAddr>().is_ok()) {
                let number = index + 1;
                let rule = format!("entry {number} must be a host without a port, .domain or *");
                return Err(Problem::Malformed(rule));
            }
            hosts.push(host);
        }
        Ok(hosts)
    }

    fn parse_default(&self, _: &str) -> Result<Vec<String>, Problem> {
        Ok(Vec::new())
    }
}

/// Where a collector is.
struct Endpoint;

impl Rule for Endpoint {
    type Value = String;

    fn valid(&self) -> String {
        "`http://host:port` or `https://host:port`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<String, Problem> {
        let uri = text.parse::<axum::http::Uri>().ok();
        let is_endpoint = uri.is_some_and(|uri| {
            let known = matches!(uri.scheme_str(), Some("http" | "https"));
            // A password in it would be shown wherever settings are.
            let named = uri.authority().is_some_and(|at| !at.as_str().contains('@'));
            known && named && uri.host().is_some_and(|host| !host.is_empty())
        });
        if !is_endpoint {
            return Err(Problem::Malformed(
                "must be http://host:port or https://host:port".to_owned(),
            ));
        }
        Ok(text.to_owned())
    }
}

fn find(flag: &str) -> Option<&'static Setting> {
    settings().iter().find(|setting| setting.flag == flag)
}

fn refuse<T>(message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError(message.into()))
}

/// Whether only this machine can reach the address. A name other than `localhost` counts as
/// reachable: what it resolves to may change after the warning was due.
fn is_loopback(host: &str) -> bool {
    let bare = bare(host);
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

/// Whether a socket bound to the address listens on all of them, which nobody can dial.
fn is_wildcard(host: &str) -> bool {
    bare(host).parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_unspecified())
}

/// An address without the brackets that IPv6 may have around it.
fn bare(host: &str) -> &str {
    host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host)
}

/// The parser, which takes only the spellings that [`normalise`] leaves over.
fn command() -> Command {
    let mut command = Command::new("dflockd")
        .about("A lock server with FIFO locks, semaphores, elections, values and signals.")
        .override_usage("dflockd [flags]")
        .after_help(
            "A flag wins over its variable, an empty variable counts as not set. One dash is as\n\
             good as two, and --no-<flag> switches a boolean off.\n\n\
             For the data directory of a node that does not run: dflockd inspect-data,\n\
             dflockd restore and dflockd force-new, each with a --help of its own.",
        )
        .no_binary_name(true)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .args_override_self(true)
        .next_line_help(true);
    for setting in settings() {
        let Setting { flag, env, env_old, default, valid, boolean, .. } = setting;
        let meaning = setting.description();
        let older = match *env_old {
            "" => String::new(),
            name => format!(" (older: {name})"),
        };
        let default = if default.is_empty() { "none" } else { default };
        let valid = valid.replace('`', "");
        let help = format!("{meaning}\n[{env}{older}; {valid}; default {default}]");
        let value = if *boolean { "BOOL" } else { "VALUE" };
        command = command.arg(value_arg(flag, *boolean).value_name(value).help(help));
    }
    for (action, meaning) in ACTIONS {
        command = command.arg(value_arg(action, true).value_name("BOOL").help(meaning));
    }
    command
}

fn value_arg(name: &'static str, boolean: bool) -> Arg {
    let arg = Arg::new(name).long(name).action(ArgAction::Set);
    if boolean { arg.num_args(0..=1).require_equals(true) } else { arg }
}

/// Turns every accepted spelling into `--name=value`.
///
/// Joining flag and value here lets a value begin with a dash: `--max-locks -1` must fail for its
/// value, not for an unknown flag `-1`.
fn normalise(args: impl IntoIterator<Item = String>) -> Vec<String> {
    let is_boolean = |name: &str| match find(name) {
        Some(setting) => setting.boolean,
        None => ACTIONS.iter().any(|(action, _)| *action == name),
    };
    let mut words = Vec::new();
    let mut args = args.into_iter();
    while let Some(word) = args.next() {
        if word == "--" {
            words.push(word);
            break;
        }
        let body = word.strip_prefix("--").or_else(|| word.strip_prefix('-')).unwrap_or_default();
        if body.is_empty() || body.starts_with(['-', '=']) {
            words.push(word);
            continue;
        }
        // The short form that the flag package of Go knows.
        let body = if body == "h" { "help" } else { body };
        words.push(match body.split_once('=') {
            Some((name, value)) => format!("--{name}={value}"),
            None if is_boolean(body) => format!("--{body}=true"),
            None if find(body).is_some() => match args.next() {
                Some(value) => format!("--{body}={value}"),
                None => format!("--{body}"),
            },
            None => match body.strip_prefix("no-").and_then(find) {
                Some(setting) if setting.boolean => format!("--{}=false", setting.flag),
                Some(_) | None => format!("--{body}"),
            },
        });
    }
    words.extend(args);
    words
}

/// One line for what the parser of the command line refused.
fn explain(error: &clap::Error) -> ConfigError {
    let context = |kind| error.get(kind).map(ToString::to_string);
    let argument = context(ContextKind::InvalidArg).unwrap_or_default();
    if error.kind() == ErrorKind::UnknownArgument {
        // Cut at the value: it could be a token behind a misspelt flag.
        let name = argument.split('=').next().unwrap_or_default();
        if !name.starts_with('-') || name == "-" {
            return ConfigError(format!("unexpected argument {argument:?}"));
        }
        return ConfigError(match context(ContextKind::SuggestedArg) {
            Some(known) => format!("unknown flag {name} (did you mean {known}?)"),
            None => format!("unknown flag {name}"),
        });
    }
    let flag = argument.split(['=', ' ', '[']).next().unwrap_or_default();
    if flag.starts_with("--") {
        return ConfigError(format!("{flag} needs a value"));
    }
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default();
    ConfigError(line.strip_prefix("error: ").unwrap_or(line).to_owned())
}

#[cfg(test)]
mod tests;
