//! Tokens and other secrets: where they come from, how they are compared, and what is weak about them.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use dflockd_identity::Identities;
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::{Config, ConfigError, refuse};

/// The longest token: the line of `auth` that carries it is bounded by the protocol.
const TOKEN_BYTES_MAX: usize = 65_536;

/// The shortest secret between nodes: whoever guesses it can write into the log.
pub(super) const RAFT_TOKEN_BYTES_MIN: usize = 32;

/// Tokens of clients and operators below this are warned about: 16 random bytes can not be guessed.
const TOKEN_BYTES_ADVISED: usize = 16;

/// The largest file of identities: ten thousand of them fit.
const IDENTITIES_BYTES_MAX: usize = 8 << 20;

/// Valid tokens of a kind: a new one and the one before it.
const TOKENS_MAX: usize = 2;

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
pub(super) enum TokenSource {
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

    pub(super) fn read(&self) -> Result<Tokens, ConfigError> {
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

pub(super) fn valid_token(flag: &str) -> String {
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
pub(super) fn is_readable_by_others(path: &Path) -> bool {
    mode_and_owner(path)
        .is_some_and(|(mode, owner)| mode & 0o007 != 0 || mode & 0o070 != 0 && owner != 0)
}

pub(super) fn mode_and_owner(path: &Path) -> Option<(u32, u32)> {
    let metadata = std::fs::metadata(path).ok()?;
    Some((metadata.mode(), metadata.uid()))
}

impl Config {
    /// What is wrong with the tokens although they can be used.
    pub(super) fn weak_tokens(&self) -> Vec<String> {
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
        if let Some(path) = &self.identities_file
            && mode_and_owner(path).is_some_and(|(mode, _)| mode & 0o022 != 0)
        {
            let path = path.display();
            warnings.push(format!(
                "--identities-file: {path} can be changed by other users; chmod 640 it"
            ));
        }
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

    /// The identities as their file has them now, like [`Config::reload_auth_token`].
    pub fn read_identities(&self) -> Result<Option<Identities>, ConfigError> {
        let Some(path) = &self.identities_file else { return Ok(None) };
        let refuse =
            |why: String| ConfigError(format!("--identities-file: {}: {why}", path.display()));
        let content =
            read_file(path, IDENTITIES_BYTES_MAX + 1).map_err(|e| refuse(e.to_string()))?;
        if content.len() > IDENTITIES_BYTES_MAX {
            return Err(refuse(format!("more than {IDENTITIES_BYTES_MAX} bytes")));
        }
        let text = std::str::from_utf8(&content).map_err(|e| refuse(e.to_string()))?;
        Identities::parse(text).map(Some).map_err(|error| refuse(error.to_string()))
    }

    /// The secret between nodes as its source has it now, like [`Config::reload_auth_token`]. One
    /// that was drawn at random stays.
    pub fn reload_raft_secret(&self) -> Result<Option<Secret>, ConfigError> {
        match &self.raft_source {
            Some(source) => source.read().map(|tokens| Some(tokens.newest().clone())),
            None => Ok(self.drawn_secret.clone()),
        }
    }
}
