//! The configuration of the server: every setting once.
//!
//! The list in `settings.rs` is the only place that names a flag, its variable, its default, its
//! valid range and its meaning. The fields of `Config`, the parser, `--help` and the table in
//! `docs/operating.md` are made from it. `rules.rs` says how a text becomes a value. Rules that tie
//! two settings together stand in `Config::validate`, those of replicated mode in `cluster.rs`.
//!
//! This module reads token and certificate files but never sockets, and it must never print a
//! token: errors name the source of a token, not its value.

use std::fmt;
use std::time::Duration;

use clap::error::{ContextKind, ErrorKind};
use clap::{Arg, ArgAction, Command};
use dflockd_core::Limits;
use dflockd_replica::policy_settings;
pub use dflockd_replica::types::AutoRelease;
use dflockd_replica::types::Policy;
use dflockd_wire::PATTERN_TOKENS_MAX;

mod cluster;
mod rules;
mod secrets;
mod settings;

pub use cluster::{ClusterConfig, FollowerMode, Formation, HostPort, PeerSpec, RaftTls};
pub use secrets::{Secret, Tokens};
pub use settings::{Config, Setting, markdown_table, settings};

use rules::{is_loopback, is_wildcard, parse_go_bool};
use settings::{ACTIONS, Given, find};

/// The largest value that every published client can read back in one `ok <value>` line.
pub const PORTABLE_VALUE_BYTES_MAX: u64 = 65_533;

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

        let mut config = Self::resolve(Given::new(&flag, env))?;
        config.identities = config.read_identities()?;
        config.validate()?;
        config.complete_cluster()?;
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
                    policy.word()
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
        if self.tls_client_ca.is_some() && self.tls_cert.is_none() {
            return refuse("--tls-client-ca needs --tls-cert");
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
        if self.require_auth && !self.needs_tokens() {
            return refuse(
                "--require-auth needs --auth-token, --auth-token-file or --identities-file",
            );
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

    /// Whether clients need a token.
    fn needs_tokens(&self) -> bool {
        self.auth_token.is_some() || self.identities_file.is_some()
    }

    /// Whether a flag or its variable was given; a boolean that was switched off counts as not.
    fn is_given(&self, flag: &str) -> bool {
        self.given.contains(&flag)
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

    /// What a store, or a cluster that begins, decides by.
    pub fn policy(&self) -> Policy {
        let config = self;
        macro_rules! of_flags {
            (
                limits { $($limit:ident = $limit_name:literal, $limit_version:literal,
                    $limit_valid:expr, ($($limit_flag:tt)+), $limit_field:ident;)+ }
                own { $($own:ident = $name:literal, $version:literal,
                    $valid:expr, ($($flag:tt)+), $field:ident;)+ }
            ) => {
                Policy {
                    limits: Limits {
                        $($limit: config.$($limit_flag)+.into(),)+
                        pattern_tokens_max: PATTERN_TOKENS_MAX as u64,
                        ..Limits::default()
                    },
                    $($own: config.$($flag)+.into(),)+
                }
            };
        }
        policy_settings!(of_flags)
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
        if let Some(cluster) = self.replicated() {
            if self.drawn_secret.is_some() {
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
        if self.needs_tokens() || self.http_address().is_none() {
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
        if !self.needs_tokens() {
            warnings.push(format!(
                "{flag} {host} is not a loopback address and there is no auth token: \
                 anyone who can reach the port can take and release locks"
            ));
        }
        let has_token = self.needs_tokens() || self.admin_token.is_some();
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

fn refuse<T>(message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError(message.into()))
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
