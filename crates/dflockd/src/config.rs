//! The configuration of the server: every setting once.
//!
//! The list in `settings!` below is the only place that names a flag, its variable, its default,
//! its valid range and its meaning. The fields of `Config`, the parser, `--help` and the table in
//! `docs/operating.md` are made from it. Rules that tie two settings together stand in
//! `Config::validate`.
//!
//! This module reads token files but never sockets, and it must never print a token: errors name
//! the source of a token, not its value.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use std::time::Duration;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, ArgAction, Command};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

/// The most seconds a duration may have: what fits into 63 bits of nanoseconds.
pub const SECONDS_MAX: u64 = 9_223_372_036;

/// The largest value that every published client can read back in one `ok <value>` line.
pub const PORTABLE_VALUE_BYTES_MAX: u64 = 65_533;

/// The longest token: the line of `auth` that carries it is bounded by the protocol.
const TOKEN_BYTES_MAX: usize = 65_536;

/// Counts are 63 bits wide, so that sums of two of them cannot overflow.
const COUNT_MAX: u64 = i64::MAX as u64;

const UNLIMITED: Count = Count { min: 0, max: COUNT_MAX, zero: "unlimited" };

/// Makes [`Config`], the table behind [`settings`] and the resolver from the list below.
///
/// An ordinary setting is `field: type = rule, flag, variable [or older variable], default;`. A
/// token takes two entries, its value and its file, because the four sources of both form one
/// chain.
macro_rules! settings {
    (
        $(
            $(#[doc = $meaning:literal])+
            $field:ident: $type:ty = $rule:expr,
            $flag:literal, $env:literal $(or $env_old:literal)?, $default:literal;
        )+
        tokens:
        $(
            $(#[doc = $token_meaning:literal])+
            $token:ident, $token_flag:literal, $token_env:literal;
            $(#[doc = $file_meaning:literal])+
            $source:ident, $file_flag:literal, $file_env:literal;
        )+
    ) => {
        /// Everything the operator may choose, checked.
        #[derive(Debug, Clone)]
        pub struct Config {
            $( $(#[doc = $meaning])+ pub $field: $type, )+
            $(
                $(#[doc = $token_meaning])+
                pub $token: Option<Secret>,
                /// Where the token came from, so that it can be read again.
                $source: Option<TokenSource>,
            )+
            /// Warnings that only the parser can know: which variables it met.
            notes: Vec<String>,
        }

        static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| vec![
            $( Setting {
                flag: $flag,
                env: $env,
                env_old: [$($env_old,)? ""][0],
                default: $default,
                valid: $rule.valid(),
                meaning: concat!($($meaning),+).trim(),
                boolean: $rule.is_boolean(),
            }, )+
            $( Setting {
                flag: $token_flag,
                env: $token_env,
                env_old: "",
                default: "",
                valid: "not empty, one line".to_owned(),
                meaning: concat!($($token_meaning),+).trim(),
                boolean: false,
            },
            Setting {
                flag: $file_flag,
                env: $file_env,
                env_old: "",
                default: "",
                valid: FilePath.valid(),
                meaning: concat!($($file_meaning),+).trim(),
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
                Ok(Self { $($field,)+ $($token, $source,)+ notes: given.notes })
            }
        }
    };
}

settings! {
    /// TCP bind address.
    host: String = Text, "host", "DFLOCKD_HOST", "127.0.0.1";
    /// TCP port.
    port: u16 = Port, "port", "DFLOCKD_PORT", "6388";
    /// Lease of a lock whose client asks for none.
    default_lease_ttl: Duration = Seconds { min: 1, zero: "" },
        "default-lease-ttl", "DFLOCKD_DEFAULT_LEASE_TTL_S", "33";
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
    max_connections: u64 = UNLIMITED, "max-connections", "DFLOCKD_MAX_CONNECTIONS", "0";
    /// Most TCP connections of one source address.
    max_connections_per_ip: u64 = UNLIMITED,
        "max-connections-per-ip", "DFLOCKD_MAX_CONNECTIONS_PER_IP", "0";
    /// Longest queue of one key.
    max_waiters: u64 = UNLIMITED, "max-waiters", "DFLOCKD_MAX_WAITERS", "0";
    /// Most subscriptions (listen, watch and observe) of one connection.
    max_subscriptions: u64 = UNLIMITED, "max-subscriptions", "DFLOCKD_MAX_SUBSCRIPTIONS", "0";
    /// Threads that serve connections. Most of the work is the kernel's, which needs the other cores.
    worker_threads: u64 = Count { min: 0, max: 1024, zero: "half of the cores" },
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
    /// Release what a closed connection held.
    auto_release_on_disconnect: bool = Switch,
        "auto-release-on-disconnect", "DFLOCKD_AUTO_RELEASE_ON_DISCONNECT", "true";
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
    /// Refuse to start without an auth token.
    require_auth: bool = Switch, "require-auth", "DFLOCKD_REQUIRE_AUTH", "false";
    /// Form of the log lines on stderr.
    log_format: LogFormat = Format, "log-format", "DFLOCKD_LOG_FORMAT", "text";
    /// Log at level DEBUG.
    debug: bool = Switch, "debug", "DFLOCKD_DEBUG", "false";
    tokens:
    /// Token that a client must send first.
    auth_token, "auth-token", "DFLOCKD_AUTH_TOKEN";
    /// File with that token, read again on SIGHUP; white space around it is ignored.
    auth_source, "auth-token-file", "DFLOCKD_AUTH_TOKEN_FILE";
    /// Token for administration: force-release and ending sessions.
    admin_token, "admin-token", "DFLOCKD_ADMIN_TOKEN";
    /// File with that token, read again on SIGHUP; white space around it is ignored.
    admin_source, "admin-token-file", "DFLOCKD_ADMIN_TOKEN_FILE";
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
    /// What it does, in one sentence.
    pub meaning: &'static str,
    /// Whether the flag may stand without a value.
    boolean: bool,
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
        let Setting { flag, env, env_old, default, valid, meaning, boolean: _ } = setting;
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

        let config = Self::resolve(Given { flag: &flag, env, notes: Vec::new() })?;
        config.validate()?;
        Ok(Parsed::Run(Box::new(config)))
    }

    /// The rules that tie two settings together.
    fn validate(&self) -> Result<(), ConfigError> {
        match (&self.tls_cert, &self.tls_key) {
            (Some(_), None) => return refuse("--tls-cert needs --tls-key"),
            (None, Some(_)) => return refuse("--tls-key needs --tls-cert"),
            (Some(_), Some(_)) | (None, None) => (),
        }
        if self.require_auth && self.auth_token.is_none() {
            return refuse("--require-auth needs --auth-token or --auth-token-file");
        }
        if self.startup_grant_delay == GrantDelay::Auto && self.fence_state_file.is_none() {
            // Only that file remembers the largest lease, so there is nothing to wait for without
            // it.
            return refuse("--startup-grant-delay auto needs --fence-state-file");
        }
        Ok(())
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
        if !is_loopback(&self.host) {
            let limits = [
                ("--max-connections", self.max_connections),
                ("--max-connections-per-ip", self.max_connections_per_ip),
                ("--max-waiters", self.max_waiters),
            ];
            let open: Vec<_> = limits.iter().filter(|(_, max)| *max == 0).map(|l| l.0).collect();
            if !open.is_empty() {
                warnings.push(format!(
                    "--host {} is not a loopback address and these limits are unlimited: {}",
                    self.host,
                    open.join(", ")
                ));
            }
            if self.auth_token.is_none() {
                warnings.push(format!(
                    "--host {} is not a loopback address and there is no auth token: \
                     anyone who can reach the port can take and release locks",
                    self.host
                ));
            }
        }
        warnings
    }

    /// The auth token as its source has it now: a file is read again, anything else cannot have
    /// changed.
    ///
    /// On an error the old token should stay in force: a half-written file must not open the
    /// server.
    pub fn reload_auth_token(&self) -> Result<Option<Secret>, ConfigError> {
        self.auth_source.as_ref().map(TokenSource::read).transpose()
    }

    /// The admin token as its source has it now, like [`Config::reload_auth_token`].
    pub fn reload_admin_token(&self) -> Result<Option<Secret>, ConfigError> {
        self.admin_source.as_ref().map(TokenSource::read).transpose()
    }
}

impl Default for Config {
    /// The configuration without any flag or variable.
    fn default() -> Self {
        Self::resolve(Given { flag: &|_| None, env: &|_| None, notes: Vec::new() })
            .expect("every default passes its own rule")
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

/// The source that was selected for a token; `name` is its flag or variable.
#[derive(Debug, Clone)]
enum TokenSource {
    Value { name: String, secret: Secret },
    File { name: String, path: PathBuf },
}

impl TokenSource {
    fn read(&self) -> Result<Secret, ConfigError> {
        let (name, secret) = match self {
            Self::Value { name, secret } => (name, secret.clone()),
            Self::File { name, path } => {
                let content = read_token_file(path).map_err(|error| {
                    ConfigError(format!("{name}: cannot read {}: {error}", path.display()))
                })?;
                (name, Secret::new(content.trim_ascii()))
            }
        };
        // What no client could send is refused here, or nobody could ever log in.
        let token = &secret.padded[..secret.len];
        if token.is_empty() {
            return refuse(match self {
                Self::Value { .. } => format!("{name} must not be empty"),
                Self::File { path, .. } => format!("{name}: {} is empty", path.display()),
            });
        }
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
        if token.len() > TOKEN_BYTES_MAX {
            return refuse(format!(
                "{name}: the token must not be longer than {TOKEN_BYTES_MAX} bytes"
            ));
        }
        Ok(secret)
    }
}

/// Reads at most a little more than the longest token, so that a wrong path cannot fill the memory.
fn read_token_file(path: &Path) -> std::io::Result<Zeroizing<Vec<u8>>> {
    let limit = TOKEN_BYTES_MAX + 1024;
    let mut content = Zeroizing::new(Vec::with_capacity(limit));
    File::open(path)?.take(limit as u64).read_to_end(&mut content)?;
    Ok(content)
}

/// The sources of one start: flags and variables.
struct Given<'a> {
    flag: &'a dyn Fn(&str) -> Option<&'a str>,
    env: &'a dyn Fn(&str) -> Option<String>,
    notes: Vec<String>,
}

impl Given<'_> {
    /// The value of one setting: flag, else variable, else default.
    fn read<R: Rule>(&mut self, rule: &R, name: &str) -> Result<R::Value, ConfigError> {
        let setting = find(name).expect("every name given here comes from the list");
        let flag = format!("--{name}");
        if let Some(text) = (self.flag)(name) {
            return rule.parse_flag(text).map_err(|problem| problem.in_flag(&flag, text));
        }
        if let Some(text) = self.variable(setting.env) {
            return rule.parse_env(&text).map_err(|p| p.in_env(setting.env, &flag, &text));
        }
        if let Some(text) = self.variable(setting.env_old) {
            let (old, new) = (setting.env_old, setting.env);
            self.notes.push(format!("{old} is deprecated, use {new}"));
            return rule.parse_env(&text).map_err(|problem| problem.in_env(old, &flag, &text));
        }
        Ok(rule.parse_default(setting.default).expect("every default passes its own rule"))
    }

    /// The source of a token. Both flags stand before both variables: what the operator typed for
    /// this start wins over what the environment happened to hold.
    fn token_source(&self, value: &str, file: &str) -> Result<Option<TokenSource>, ConfigError> {
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

/// A TCP port; 0 lets the system choose.
struct Port;

impl Port {
    const RANGE: Count = Count { min: 0, max: u16::MAX as u64, zero: "chosen by the system" };
}

impl Rule for Port {
    type Value = u16;

    fn valid(&self) -> String {
        Self::RANGE.valid()
    }

    fn parse_flag(&self, text: &str) -> Result<u16, Problem> {
        let port = Self::RANGE.parse_flag(text)?;
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

/// The name of a log format.
struct Format;

impl Rule for Format {
    type Value = LogFormat;

    fn valid(&self) -> String {
        "`text` or `json`".to_owned()
    }

    fn parse_flag(&self, text: &str) -> Result<LogFormat, Problem> {
        match text {
            "text" => Ok(LogFormat::Text),
            "json" => Ok(LogFormat::Json),
            _ => Err(Problem::Malformed("must be text or json".to_owned())),
        }
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
    let bare = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
    match bare.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => bare.eq_ignore_ascii_case("localhost"),
    }
}

/// The parser, which takes only the spellings that [`normalise`] leaves over.
fn command() -> Command {
    let mut command = Command::new("dflockd")
        .about("A lock server with FIFO locks, semaphores, elections, values and signals.")
        .override_usage("dflockd [flags]")
        .after_help(
            "A flag wins over its variable, an empty variable counts as not set. One dash is as\n\
             good as two, and --no-<flag> switches a boolean off.",
        )
        .no_binary_name(true)
        .disable_help_flag(true)
        .disable_version_flag(true)
        .args_override_self(true)
        .next_line_help(true);
    for setting in settings() {
        let Setting { flag, env, env_old, default, valid, meaning, boolean } = setting;
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
mod tests {
    use std::collections::BTreeMap;

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
    fn check<T: fmt::Debug + PartialEq>(
        args: &[&str],
        env: Env<'_>,
        expected: Result<Field<T>, &str>,
    ) {
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

    fn max_locks(config: &Config) -> u64 {
        config.max_locks
    }

    fn debug(config: &Config) -> bool {
        config.debug
    }

    /// A file with `content`, removed at the end.
    struct TokenFile(PathBuf);

    impl TokenFile {
        fn new(name: &str, content: &[u8]) -> Self {
            let name = format!("dflockd-config-{}-{name}", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, content).unwrap();
            Self(path)
        }

        fn path(&self) -> &str {
            self.0.to_str().unwrap()
        }
    }

    impl Drop for TokenFile {
        fn drop(&mut self) {
            std::fs::remove_file(&self.0).unwrap();
        }
    }

    #[test]
    fn defaults() {
        let c = config(&[], &[]);
        assert_eq!((c.host.as_str(), c.port), ("127.0.0.1", 6388));
        assert_eq!(c.default_lease_ttl, Duration::from_secs(33));
        assert_eq!(c.lease_sweep_interval, Duration::from_secs(1));
        assert_eq!(c.gc_interval, Duration::from_secs(5));
        assert_eq!(c.gc_max_idle, Duration::from_secs(60));
        assert_eq!((c.max_locks, c.max_keys, c.max_list_length), (1024, 0, 0));
        assert_eq!((c.max_connections, c.max_connections_per_ip), (0, 0));
        assert_eq!((c.max_waiters, c.max_subscriptions), (0, 0));
        assert_eq!(c.worker_threads, 0);
        assert_eq!(c.max_value_bytes, 65_533);
        assert_eq!(c.read_timeout, Duration::from_secs(23));
        assert_eq!(c.write_timeout, Duration::from_secs(5));
        assert_eq!(c.shutdown_timeout, Duration::from_secs(30));
        assert_eq!(c.idle_timeout, Duration::ZERO);
        assert!(c.auto_release_on_disconnect);
        assert!(!c.debug && !c.wire_fence && !c.shared_key_namespace && !c.kv_idle_gc);
        assert!(!c.require_auth);
        assert_eq!(c.log_format, LogFormat::Text);
        assert_eq!((c.tls_cert.as_ref(), c.tls_key.as_ref()), (None, None));
        assert!(c.auth_token.is_none() && c.admin_token.is_none());
        assert_eq!(c.fence_state_file, None);
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
        check(
            &["--no-auto-release-on-disconnect"],
            &[],
            Ok((|c| c.auto_release_on_disconnect, false)),
        );
        refused(&["--debug=yes"], &[], r#"--debug must be a boolean (got "yes")"#);
        refused(&["--debug="], &[], r#"--debug must be a boolean (got "")"#);
        refused(&["--debug", "false"], &[], r#"unexpected argument "false""#);

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
        refused(
            &[],
            &[("DFLOCKD_DEBUG", "maybe")],
            r#"DFLOCKD_DEBUG must be a boolean (got "maybe")"#,
        );
    }

    #[test]
    fn what_is_no_flag() {
        refused(&["serve"], &[], r#"unexpected argument "serve""#);
        refused(&["-"], &[], r#"unexpected argument "-""#);
        refused(&["--", "x"], &[], r#"unexpected argument "x""#);
        refused(&["--", "--debug"], &[], "unknown flag --debug");
        refused(&["--http-port", "80"], &[], "unknown flag --http-port");
        refused(&["-raft-dir=/x"], &[], "unknown flag --raft-dir");
        refused(
            &["--auto-release", "any"],
            &[],
            "unknown flag --auto-release (did you mean --auto-release-on-disconnect?)",
        );
        refused(&["--follower-mode", "auto"], &[], "unknown flag --follower-mode");
        refused(&["--no-host"], &[], "unknown flag --no-host");
        refused(&["--no-debug=true"], &[], "unknown flag --no-debug (did you mean --debug?)");
        refused(&["-p6388"], &[], "unknown flag --p6388");
        refused(
            &["--auth-tokem=hunter2"],
            &[],
            "unknown flag --auth-tokem (did you mean --auth-token?)",
        );
        refused(&["--max-locks"], &[], "--max-locks needs a value");
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
        refused(
            &[],
            &[("DFLOCKD_MAX_LOCKS", "abc")],
            r#"DFLOCKD_MAX_LOCKS must be an integer (got "abc")"#,
        );
        refused(
            &[],
            &[("DFLOCKD_MAX_LOCKS", "0")],
            "DFLOCKD_MAX_LOCKS: --max-locks must be > 0 (got 0)",
        );
    }

    #[test]
    fn every_setting_reads_its_flag_and_its_variable() {
        let token = TokenFile::new("every", b"t");
        for setting in settings() {
            let value = match setting.flag {
                "host" => "localhost",
                "log-format" => "json",
                "tls-cert" | "tls-key" | "fence-state-file" => "/x",
                "auth-token" | "admin-token" => "t",
                "auth-token-file" | "admin-token-file" => token.path(),
                // The only boolean that needs company.
                "require-auth" => "false",
                _ if setting.boolean => "1",
                _ => "9",
            };
            let flag = format!("--{}={value}", setting.flag);
            // A pair may stand alone only together with its other half.
            let other: Env<'_> = match setting.flag {
                "tls-cert" => &[("DFLOCKD_TLS_KEY", "/x")],
                "tls-key" => &[("DFLOCKD_TLS_CERT", "/x")],
                _ => &[],
            };
            let by_flag = format!("{:?}", config(&[&flag], other));
            let mut env = other.to_vec();
            env.push((setting.env, value));
            let by_env = format!("{:?}", config(&[], &env));
            let default = format!("{:?}", Config::default());
            assert_eq!(
                by_flag.replace(&format!("--{}", setting.flag), setting.env),
                by_env,
                "{setting:?}"
            );
            let same = ["auto-release-on-disconnect", "require-auth"].contains(&setting.flag);
            assert_eq!(by_flag == default, same, "{setting:?}");
        }
    }

    #[test]
    fn ranges() {
        refused(&["--max-locks", "-1"], &[], "--max-locks must be > 0 (got -1)");
        refused(&["--max-locks=0"], &[], "--max-locks must be > 0 (got 0)");
        refused(&["--max-keys", "-1"], &[], "--max-keys must be >= 0 (got -1)");
        refused(&["--max-locks="], &[], r#"--max-locks must be an integer (got "")"#);
        refused(&["--max-locks= 7"], &[], r#"--max-locks must be an integer (got " 7")"#);
        refused(&["--max-locks=1.5"], &[], r#"--max-locks must be an integer (got "1.5")"#);
        refused(
            &["--max-keys=9223372036854775808"],
            &[],
            "--max-keys must be <= 9223372036854775807 (got 9223372036854775808)",
        );
        refused(&["--port=65536"], &[], "--port must be between 0 and 65535 (got 65536)");
        refused(&["--port", "-1"], &[], "--port must be between 0 and 65535 (got -1)");
        check(&["--port=0"], &[], Ok((|c| c.port, 0)));
        check(&["--port=65535"], &[], Ok((|c| c.port, 65_535)));
        for flag in ["default-lease-ttl", "lease-sweep-interval", "gc-interval", "read-timeout"] {
            refused(&[&format!("--{flag}=0")], &[], &format!("--{flag} must be > 0 (got 0)"));
        }
        for flag in ["gc-max-idle", "write-timeout", "shutdown-timeout", "idle-timeout"] {
            config(&[&format!("--{flag}=0")], &[]);
            refused(&[&format!("--{flag}=-5")], &[], &format!("--{flag} must be >= 0 (got -5)"));
        }
        let longest = Duration::from_secs(SECONDS_MAX);
        check(&["--read-timeout=9223372036"], &[], Ok((|c| c.read_timeout, longest)));
        refused(
            &["--read-timeout=9223372037"],
            &[],
            "--read-timeout must be <= 9223372036 (got 9223372037)",
        );
        refused(&["--host="], &[], r#"--host must not be empty (got "")"#);
        refused(&["--log-format=xml"], &[], r#"--log-format must be text or json (got "xml")"#);
        check(&["--log-format=json"], &[], Ok((|c| c.log_format, LogFormat::Json)));
    }

    #[test]
    fn value_bytes() {
        for (bytes, warns) in [("1", false), ("65533", false), ("65534", true), ("1048576", true)] {
            let warnings = config(&["--max-value-bytes", bytes], &[]).warnings();
            assert_eq!(warnings.len(), usize::from(warns), "{warnings:?}");
        }
        for bytes in ["0", "1048577"] {
            refused(
                &["--max-value-bytes", bytes],
                &[],
                &format!("--max-value-bytes must be between 1 and 1048576 (got {bytes})"),
            );
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
        refused(
            &[],
            &[("DFLOCKD_GC_MAX_UNUSED_TIME", "x")],
            r#"DFLOCKD_GC_MAX_UNUSED_TIME must be an integer (got "x")"#,
        );
        let idle = config(&[], &[("DFLOCKD_GC_MAX_UNUSED_TIME", "0")]).gc_max_idle;
        assert_eq!(idle, Duration::ZERO);
    }

    #[test]
    fn settings_that_need_each_other() {
        refused(&["--tls-cert=c"], &[], "--tls-cert needs --tls-key");
        refused(&[], &[("DFLOCKD_TLS_KEY", "k")], "--tls-key needs --tls-cert");
        let pair = config(&["--tls-cert=c"], &[("DFLOCKD_TLS_KEY", "k")]);
        assert_eq!((pair.tls_cert, pair.tls_key), (Some("c".into()), Some("k".into())));
        refused(
            &["--startup-grant-delay", "auto"],
            &[],
            "--startup-grant-delay auto needs --fence-state-file",
        );
        let auto = ["--startup-grant-delay=auto", "--fence-state-file=/f"];
        check(&auto, &[], Ok((|c| c.startup_grant_delay, GrantDelay::Auto)));
        let env = [("DFLOCKD_STARTUP_GRANT_DELAY_S", "12")];
        check(&[], &env, Ok((|c| c.startup_grant_delay, GrantDelay::Seconds(12))));
        refused(
            &["--startup-grant-delay=soon"],
            &[],
            r#"--startup-grant-delay must be an integer or auto (got "soon")"#,
        );
        refused(&["--require-auth"], &[], "--require-auth needs --auth-token or --auth-token-file");
        config(&["--require-auth"], &[("DFLOCKD_AUTH_TOKEN", "t")]);
    }

    #[test]
    fn token_chain() {
        let file = TokenFile::new("chain", b" \t from-file \r\n");
        let env_file = TokenFile::new("chain-env", b"from-env-file");
        let all =
            [("DFLOCKD_AUTH_TOKEN", "from-env"), ("DFLOCKD_AUTH_TOKEN_FILE", env_file.path())];
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
        check(&[], &[("DFLOCKD_AUTH_TOKEN", "")], Ok((|c| c.auth_token.is_none(), true)));
        refused(&["--auth-token-file="], &all, r#"--auth-token-file must not be empty (got "")"#);
    }

    #[test]
    fn tokens_that_no_client_could_send() {
        let refused_file = |name: &str, content: &[u8], message: &str| {
            let file = TokenFile::new(name, content);
            refused(
                &["--admin-token-file", file.path()],
                &[],
                &message.replace("PATH", file.path()),
            );
        };
        refused_file("blank", b" \n\t", "--admin-token-file: PATH is empty");
        refused_file(
            "two-lines",
            b"a\nb",
            "--admin-token-file: the token must not contain a line break",
        );
        refused_file(
            "long",
            &[b'x'; 65_537],
            "--admin-token-file: the token must not be longer than 65536 bytes",
        );
        let file = TokenFile::new("longest", &[b'x'; 65_536]);
        config(&["--admin-token-file", file.path()], &[]);
        refused(
            &["--auth-token=a\rb"],
            &[],
            "--auth-token: the token must not contain a line break",
        );
        refused(
            &[],
            &[("DFLOCKD_AUTH_TOKEN", " a")],
            "DFLOCKD_AUTH_TOKEN: the token must not begin or end with white space",
        );
        refused(
            &["--admin-token=a b"],
            &[],
            "--admin-token: the token must not contain white space",
        );
        config(&["--auth-token=a b"], &[]);
        let missing = parse(&["--auth-token-file=/nonexistent/token"], &[]).unwrap_err();
        let expected = "--auth-token-file: cannot read /nonexistent/token: ";
        assert!(missing.to_string().starts_with(expected), "{missing}");
        assert!(parse(&["--auth-token-file=/"], &[]).is_err());
    }

    #[test]
    fn token_is_read_again() {
        let file = TokenFile::new("reload", b"old");
        let from_file = config(&["--auth-token-file", file.path()], &[]);
        std::fs::write(&file.0, "new\n").unwrap();
        let secret = from_file.reload_auth_token().unwrap().unwrap();
        assert!(secret.matches(b"new") && !secret.matches(b"old"));
        std::fs::write(&file.0, "\n").unwrap();
        assert!(from_file.reload_auth_token().is_err());
        assert!(Config::default().reload_auth_token().unwrap().is_none());
        let fixed = config(&["--auth-token=t"], &[]);
        assert!(fixed.reload_auth_token().unwrap().unwrap().matches(b"t"));
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
            assert!(help.contains("--version") && !help.contains("http"), "{help}");
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
        let some = ["--host=0.0.0.0", "--max-connections=9", "--auth-token=t"];
        assert_eq!(
            config(&some, &[]).warnings(),
            ["--host 0.0.0.0 is not a loopback address and these limits are unlimited: \
              --max-connections-per-ip, --max-waiters"]
        );
        let all = ["--max-connections-per-ip=1", "--max-waiters=1"];
        assert!(config(&[&some[..], &all].concat(), &[]).warnings().is_empty());
    }

    #[test]
    fn the_table_has_every_setting_once() {
        let table = markdown_table();
        let settings = settings();
        assert_eq!(settings.len(), 34);
        assert_eq!(table.lines().count(), settings.len() + 4);
        for (index, setting) in settings.iter().enumerate() {
            assert_eq!(table.matches(&format!("| `--{}` |", setting.flag)).count(), 1);
            assert!(setting.env.starts_with("DFLOCKD_") && setting.meaning.ends_with('.'));
            let stem = setting.flag.to_uppercase().replace('-', "_");
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
}
