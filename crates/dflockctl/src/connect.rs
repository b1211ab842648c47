//! Where the servers are and how to talk to them: flag, variable, profile, default, in this order.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dflockd_client::{Client, ClientBuilder};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde::Deserialize;

use crate::failure::Failure;
use crate::output::Output;
use crate::time;

const DEFAULT_SERVER: &str = "127.0.0.1:6388";
/// What the protocol allows.
const NAME_BYTES_MAX: usize = 64;

/// How to reach the servers, as given on the command line.
#[derive(Clone, Debug, Default, clap::Args)]
#[command(next_help_heading = "Connection")]
pub(crate) struct Settings {
    /// The servers, `host:port`, separated by commas; all clients must name them in the same order
    /// [variable: DFLOCKD_SERVERS; default: 127.0.0.1:6388].
    #[arg(long, value_name = "SERVERS")]
    servers: Option<String>,
    /// File with the token of the servers [variables: DFLOCKD_AUTH_TOKEN_FILE, DFLOCKD_AUTH_TOKEN].
    #[arg(long, value_name = "FILE")]
    auth_token_file: Option<PathBuf>,
    /// Talk TLS, trusting the certificates of the system [variable: DFLOCKD_TLS=true].
    #[arg(long)]
    tls: bool,
    /// Talk TLS, trusting the certificates of this PEM file [variable: DFLOCKD_TLS_CA].
    #[arg(long, value_name = "FILE")]
    tls_ca: Option<PathBuf>,
    /// A PEM file with the certificate that says who this is [variable: DFLOCKD_TLS_CLIENT_CERT].
    #[arg(long, value_name = "FILE")]
    tls_client_cert: Option<PathBuf>,
    /// A PEM file with the key of that certificate [variable: DFLOCKD_TLS_CLIENT_KEY].
    #[arg(long, value_name = "FILE")]
    tls_client_key: Option<PathBuf>,
    /// The name others see for this client; `user@host:pid` if not given [variable: DFLOCKD_NAME].
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// How long connecting may take; 5s if not given [variable: DFLOCKD_CONNECT_TIMEOUT].
    #[arg(long, value_name = "TIME", value_parser = time::parse_some)]
    connect_timeout: Option<Duration>,
    /// A profile of the file `dflockd/profiles.toml` in the configuration directory
    /// [variable: DFLOCKD_PROFILE].
    #[arg(long, value_name = "NAME")]
    profile: Option<String>,
}

/// The file of profiles.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profiles {
    #[serde(default)]
    profile: std::collections::BTreeMap<String, Profile>,
}

/// One profile.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Profile {
    servers: Option<Servers>,
    auth_token_file: Option<PathBuf>,
    tls: Option<bool>,
    tls_ca: Option<PathBuf>,
    tls_client_cert: Option<PathBuf>,
    tls_client_key: Option<PathBuf>,
    name: Option<String>,
}

/// Servers in a profile: text as in the variable, or a list.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum Servers {
    Text(String),
    List(Vec<String>),
}

/// Everything that is needed to connect.
pub(crate) struct Connection {
    pub(crate) servers: Vec<String>,
    pub(crate) name: String,
    pub(crate) auth: Option<Arc<str>>,
    pub(crate) tls: Option<Arc<rustls::ClientConfig>>,
    pub(crate) connect_timeout: Option<Duration>,
}

/// What nearly all verbs take: how to print, and which servers to ask.
#[derive(Debug, clap::Args)]
pub(crate) struct Common {
    #[command(flatten)]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) settings: Settings,
}

impl Common {
    /// A connection to the server of a key, and whether to print JSON.
    pub(crate) async fn connect(
        self,
        key: &str,
        outer: &Settings,
    ) -> Result<(Client, bool), Failure> {
        let client = self.settings.or(outer).resolve()?.connect_for(key).await?;
        Ok((client, self.output.json))
    }
}

impl Settings {
    /// These settings where they are given, `outer` elsewhere: options may stand on both sides of the verb.
    pub(crate) fn or(self, outer: &Self) -> Self {
        let outer = outer.clone();
        Self {
            servers: self.servers.or(outer.servers),
            auth_token_file: self.auth_token_file.or(outer.auth_token_file),
            tls: self.tls || outer.tls,
            tls_ca: self.tls_ca.or(outer.tls_ca),
            tls_client_cert: self.tls_client_cert.or(outer.tls_client_cert),
            tls_client_key: self.tls_client_key.or(outer.tls_client_key),
            name: self.name.or(outer.name),
            connect_timeout: self.connect_timeout.or(outer.connect_timeout),
            profile: self.profile.or(outer.profile),
        }
    }

    /// Whether anything was given.
    pub(crate) fn is_given(&self) -> bool {
        self.servers.is_some()
            || self.auth_token_file.is_some()
            || self.tls
            || self.tls_ca.is_some()
            || self.tls_client_cert.is_some()
            || self.tls_client_key.is_some()
            || self.name.is_some()
            || self.connect_timeout.is_some()
            || self.profile.is_some()
    }

    /// Reads variables, profile and files.
    pub(crate) fn resolve(self) -> Result<Connection, Failure> {
        self.resolve_with(&|name| std::env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn resolve_with(self, env: &dyn Fn(&str) -> Option<String>) -> Result<Connection, Failure> {
        let profile = match self.profile.or_else(|| env("DFLOCKD_PROFILE")) {
            Some(name) => profile(&name, env)?,
            None => Profile::default(),
        };
        let servers = match self.servers.or_else(|| env("DFLOCKD_SERVERS")) {
            Some(text) => split(&text),
            None => match profile.servers {
                Some(Servers::Text(text)) => split(&text),
                Some(Servers::List(list)) => list,
                None => vec![DEFAULT_SERVER.to_owned()],
            },
        };
        check_servers(&servers)?;
        let auth = match self.auth_token_file {
            Some(path) => Some(read_token(&path)?),
            None => match (env("DFLOCKD_AUTH_TOKEN_FILE"), env("DFLOCKD_AUTH_TOKEN")) {
                (Some(path), _) => Some(read_token(Path::new(&path))?),
                (None, Some(token)) => Some(token),
                (None, None) => profile.auth_token_file.as_deref().map(read_token).transpose()?,
            },
        };
        let file = |given: Option<PathBuf>, name| given.or_else(|| env(name).map(PathBuf::from));
        let cert = file(self.tls_client_cert, "DFLOCKD_TLS_CLIENT_CERT");
        let key = file(self.tls_client_key, "DFLOCKD_TLS_CLIENT_KEY");
        let own = match (cert.or(profile.tls_client_cert), key.or(profile.tls_client_key)) {
            (Some(cert), Some(key)) => Some((cert, key)),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                let why = "a certificate needs its key: --tls-client-cert and --tls-client-key";
                return Err(Failure::usage(why));
            }
        };
        let tls_flag = self.tls || self.tls_ca.is_some();
        let ca = self.tls_ca.or_else(|| env("DFLOCKD_TLS_CA").map(PathBuf::from));
        let ca_from_profile = ca.is_none();
        let ca = ca.or(profile.tls_ca);
        let wanted = match env("DFLOCKD_TLS").as_deref() {
            _ if tls_flag => true,
            Some("1" | "true" | "yes" | "on") => true,
            Some("0" | "false" | "no" | "off") => false,
            Some(other) => {
                return Err(Failure::usage(format!(
                    "DFLOCKD_TLS is {other:?}; write true or false"
                )));
            }
            // A profile with a file of certificates wants them used, unless it says otherwise.
            None if ca_from_profile => profile.tls.unwrap_or(ca.is_some()),
            None => true,
        };
        if own.is_some() && !wanted {
            let why = "a certificate is shown over TLS only: give --tls-ca or --tls";
            return Err(Failure::usage(why));
        }
        let tls = if wanted { Some(tls(ca.as_deref(), own)?) } else { None };
        let connect_timeout = match (self.connect_timeout, env("DFLOCKD_CONNECT_TIMEOUT")) {
            (Some(timeout), _) => Some(timeout),
            (None, Some(text)) => Some(
                time::parse_some(&text)
                    .map_err(|error| Failure::usage(format!("DFLOCKD_CONNECT_TIMEOUT: {error}")))?,
            ),
            (None, None) => None,
        };
        let name = self.name.or_else(|| env("DFLOCKD_NAME")).or(profile.name);
        let name = name.unwrap_or_else(|| own_name(env));
        Ok(Connection { servers, name, auth: auth.map(Into::into), tls, connect_timeout })
    }
}

impl Connection {
    /// To servers on this machine that ask for no token.
    pub(crate) fn local(servers: Vec<String>) -> Self {
        let name = own_name(&|_| None);
        Self { servers, name, auth: None, tls: None, connect_timeout: None }
    }

    pub(crate) fn builder(&self) -> ClientBuilder {
        let mut builder = Client::builder().servers(self.servers.clone()).name(&self.name);
        if let Some(auth) = &self.auth {
            builder = builder.auth_token(Arc::clone(auth));
        }
        if let Some(tls) = &self.tls {
            builder = builder.tls(Arc::clone(tls));
        }
        if let Some(timeout) = self.connect_timeout {
            builder = builder.connect_timeout(timeout);
        }
        builder
    }

    /// The one server a key belongs to; the others need not run.
    pub(crate) fn server_of(&self, key: &str) -> &str {
        &self.servers[dflockd_client::shard(key.as_bytes(), self.servers.len())]
    }

    /// Connects to the server of a key.
    pub(crate) async fn connect_for(&self, key: &str) -> Result<Client, Failure> {
        Ok(self.builder().server(self.server_of(key)).connect().await?)
    }

    /// Connects to all servers.
    pub(crate) async fn connect(&self) -> Result<Client, Failure> {
        Ok(self.builder().connect().await?)
    }
}

/// A token from a file, without the white space around it.
pub(crate) fn read_token(path: &Path) -> Result<String, Failure> {
    let text = fs::read_to_string(path).map_err(|error| {
        Failure::usage(format!("can not read the token file {}: {error}", path.display()))
    })?;
    // The file of a server may have a second line with an older token, which is about to go.
    let token = text.trim().lines().next().unwrap_or_default().trim();
    if token.is_empty() {
        return Err(Failure::usage(format!("the token file {} is empty", path.display())));
    }
    Ok(token.to_owned())
}

fn split(text: &str) -> Vec<String> {
    text.split(',').map(|server| server.trim().to_owned()).collect()
}

fn check_servers(servers: &[String]) -> Result<(), Failure> {
    if servers.is_empty() {
        return Err(Failure::usage("no server given; write host:port"));
    }
    for server in servers {
        let port = server.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        if port.and_then(|(_, port)| port.parse::<u16>().ok()).is_none() {
            return Err(Failure::usage(format!("not a server: {server:?}; write host:port")));
        }
    }
    Ok(())
}

fn profile(name: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Profile, Failure> {
    let path = profiles_path(env)
        .ok_or_else(|| Failure::usage("no configuration directory: set HOME or XDG_CONFIG_HOME"))?;
    let shown = path.display();
    let text = fs::read_to_string(&path)
        .map_err(|error| Failure::usage(format!("can not read profiles from {shown}: {error}")))?;
    let profiles: Profiles = toml::from_str(&text).map_err(|error| {
        let start = error.span().map_or(0, |span| span.start).min(text.len());
        let line = text.as_bytes()[..start].iter().filter(|&&byte| byte == b'\n').count() + 1;
        Failure::usage(format!("{shown}, line {line}: {}", error.message()))
    })?;
    let known: Vec<&str> = profiles.profile.keys().map(String::as_str).collect();
    let known = known.join(", ");
    let found = profiles.profile.get(name).cloned();
    found.ok_or_else(|| Failure::usage(format!("{shown} has no profile {name:?}, only: {known}")))
}

fn profiles_path(env: &dyn Fn(&str) -> Option<String>) -> Option<PathBuf> {
    let directory = match env("XDG_CONFIG_HOME") {
        Some(directory) => PathBuf::from(directory),
        None => PathBuf::from(env("HOME")?).join(".config"),
    };
    Some(directory.join("dflockd").join("profiles.toml"))
}

fn tls(
    ca: Option<&Path>,
    own: Option<(PathBuf, PathBuf)>,
) -> Result<Arc<rustls::ClientConfig>, Failure> {
    let mut roots = rustls::RootCertStore::empty();
    match ca {
        Some(path) => {
            let explain = |error: &dyn std::fmt::Display| {
                let shown = path.display();
                Failure::usage(format!("can not read certificates from {shown}: {error}"))
            };
            let certificates =
                CertificateDer::pem_file_iter(path).map_err(|error| explain(&error))?;
            for certificate in certificates {
                let certificate = certificate.map_err(|error| explain(&error))?;
                roots.add(certificate).map_err(|error| explain(&error))?;
            }
            if roots.is_empty() {
                return Err(explain(&"there are none in it"));
            }
        }
        None => {
            let found = rustls_native_certs::load_native_certs();
            let (added, _ignored) = roots.add_parsable_certificates(found.certs);
            if added == 0 {
                return Err(Failure::usage(
                    "the system has no root certificates; name a file with --tls-ca",
                ));
            }
        }
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the provider has cipher suites for them")
        .with_root_certificates(roots);
    let Some((cert, key)) = own else { return Ok(Arc::new(config.with_no_client_auth())) };
    let explain = |error: &dyn std::fmt::Display| {
        let (cert, key) = (cert.display(), key.display());
        Failure::usage(format!("can not use the certificate {cert} with the key {key}: {error}"))
    };
    let chain = CertificateDer::pem_file_iter(&cert).and_then(Iterator::collect);
    let chain: Vec<CertificateDer<'static>> = chain.map_err(|error| explain(&error))?;
    let key = PrivateKeyDer::from_pem_file(&key).map_err(|error| explain(&error))?;
    let config = config.with_client_auth_cert(chain, key).map_err(|error| explain(&error))?;
    Ok(Arc::new(config))
}

/// Who this is, for the people who look at a server.
fn own_name(env: &dyn Fn(&str) -> Option<String>) -> String {
    let user = env("USER").or_else(|| env("LOGNAME")).unwrap_or_else(|| "dflockctl".to_owned());
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let pid = std::process::id().to_string();
    let printable = |text: &str| -> String {
        text.chars().filter(char::is_ascii_graphic).take(NAME_BYTES_MAX / 2 - pid.len()).collect()
    };
    format!("{}@{}:{pid}", printable(&user), printable(&host))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(settings: Settings, variables: &[(&str, &str)]) -> Result<Connection, String> {
        let env = |name: &str| {
            let found = variables.iter().find(|(variable, _)| *variable == name);
            found.map(|(_, value)| (*value).to_owned())
        };
        settings.resolve_with(&env).map_err(|failure| failure.to_string())
    }

    #[test]
    fn flags_before_variables_before_defaults() {
        let check = |flag: Option<&str>, variables: &[(&str, &str)], expected: &[&str]| {
            let settings = Settings { servers: flag.map(str::to_owned), ..Settings::default() };
            assert_eq!(resolve(settings, variables).unwrap().servers, expected);
        };
        let variable = ("DFLOCKD_SERVERS", "b:2, c:3");
        check(None, &[], &[DEFAULT_SERVER]);
        check(None, &[variable], &["b:2", "c:3"]);
        check(Some("a:1"), &[variable], &["a:1"]);
    }

    #[test]
    fn wrong_settings_are_explained() {
        let check = |variables: &[(&str, &str)], expected: &str| {
            let error = resolve(Settings::default(), variables).err().expect("refused");
            assert!(error.contains(expected), "{error}");
        };
        check(&[("DFLOCKD_SERVERS", "a")], "write host:port");
        check(&[("DFLOCKD_SERVERS", "a:1,,b:2")], "write host:port");
        check(&[("DFLOCKD_TLS", "maybe")], "write true or false");
        check(&[("DFLOCKD_AUTH_TOKEN_FILE", "/nonexistent")], "/nonexistent");
        check(&[("DFLOCKD_TLS_CA", "/nonexistent")], "/nonexistent");
        check(&[("DFLOCKD_PROFILE", "p"), ("HOME", "/nonexistent")], "profiles.toml");
    }

    #[test]
    fn the_name_fits_the_protocol() {
        let name = own_name(&|_| Some("x y".repeat(100)));
        assert!(name.len() <= NAME_BYTES_MAX && name.bytes().all(|byte| byte.is_ascii_graphic()));
    }
}
