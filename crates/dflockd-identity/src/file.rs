//! The file that lists identities, in TOML:
//!
//! ```toml
//! [[identity]]
//! name = "billing"
//! role = "use"                                    # metrics, read, use or admin
//! keys = [                                        # without this line: all keys
//!   { prefix = "billing/" },                      # all that the role may
//!   { prefix = "shared/", verbs = ["read"] },     # read, lock, write, signal
//! ]
//! tokens = [
//!   { hash = "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08" },
//!   { hash = "sha256:60303ae22b998861bce3b28f33eec1be758a213c86c93c076dbe9f558c11c752", until = 2027-01-31 },
//! ]
//! certificates = ["dns:billing.example.org", "uri:spiffe://example.org/billing"]    # cn:, dns:, email:, uri:
//! ```
//!
//! Several tokens of one identity are valid at the same time, so that clients can change over one by one. `from` and
//! `until` say when a token is valid: a date alone stands for its first moment in UTC.

use std::collections::BTreeMap;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use serde::Deserialize;
use time::{Date, Month, PrimitiveDateTime, Time, UtcOffset};
use toml::value::Datetime;

use crate::{Identity, KeyRule, NAME_KINDS, Rights, Role, TokenHash};

/// The identities that a server has without a file: those of `--auth-token`, of `--admin-token`, and of everybody where
/// there is no token.
pub const RESERVED: [&str; 3] = ["auth-token", "admin-token", "anyone"];

/// Identities in a file.
const IDENTITIES_MAX: usize = 10_000;
/// Rules and tokens of an identity.
const EACH_MAX: usize = 256;
/// Bytes of a prefix: those of a key.
const PREFIX_BYTES_MAX: usize = dflockd_api::check::KEY_BYTES_MAX;
/// Bytes of a name.
const NAME_BYTES_MAX: usize = 64;

/// Why a file can not be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// It is no TOML, or has what nobody knows.
    #[error("{0}")]
    Syntax(#[from] toml::de::Error),
    /// An identity makes no sense.
    #[error("identity {name:?}: {why}")]
    Identity {
        /// Its name.
        name: String,
        /// What is wrong with it.
        why: String,
    },
    /// There are too many.
    #[error("there are {0} identities; at most {IDENTITIES_MAX} can be")]
    TooMany(usize),
}

/// What shows who somebody is.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Proof {
    /// A token with this digest.
    Token(TokenHash),
    /// A certificate with this name: see [`certificate_names`](crate::certificate_names).
    Certificate(String),
}

/// What proves an identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credential {
    /// Whose it is.
    pub identity: Arc<Identity>,
    /// What shows that it is.
    pub proof: Proof,
    /// Valid from then on.
    pub from: Option<SystemTime>,
    /// No longer valid from then on.
    pub until: Option<SystemTime>,
}

/// All identities of a file, with what proves them.
#[derive(Clone, Debug, Default)]
pub struct Identities {
    identities: Vec<Arc<Identity>>,
    credentials: Vec<Credential>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    identity: Vec<Entry>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    name: String,
    role: Role,
    keys: Option<Vec<Keys>>,
    #[serde(default)]
    tokens: Vec<Token>,
    #[serde(default)]
    certificates: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    prefix: String,
    verbs: Option<Vec<Verb>>,
}

/// What a rule can name: see [`Rights::VERBS`].
#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Verb {
    Read,
    Lock,
    Write,
    Signal,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Token {
    hash: String,
    from: Option<Datetime>,
    until: Option<Datetime>,
}

impl Identities {
    /// Reads a file.
    ///
    /// # Errors
    ///
    /// If it can not be used. The error shows no digest but where the file is no TOML.
    pub fn parse(text: &str) -> Result<Self, FileError> {
        let file: File = toml::from_str(text)?;
        if file.identity.len() > IDENTITIES_MAX {
            return Err(FileError::TooMany(file.identity.len()));
        }
        let mut all = Self::default();
        let mut names = BTreeSet::new();
        let mut owners: BTreeMap<Proof, String> = BTreeMap::new();
        for entry in file.identity {
            let name = entry.name.clone();
            let refuse = |why: String| FileError::Identity { name: name.clone(), why };
            if !names.insert(entry.name.clone()) {
                return Err(refuse("there are two of this name".into()));
            }
            let identity = Arc::new(entry.identity().map_err(refuse)?);
            if entry.tokens.len() + entry.certificates.len() > EACH_MAX {
                return Err(refuse(format!("more than {EACH_MAX} tokens and certificates")));
            }
            let tokens = entry.tokens.iter().map(|token| token.credential(&identity));
            let named = entry.certificates.iter().map(|of| certificate(of, &identity));
            for credential in tokens.chain(named) {
                let credential = credential.map_err(refuse)?;
                if let Some(other) = owners.insert(credential.proof.clone(), name.clone()) {
                    let other = Named(&other, &name);
                    return Err(refuse(format!("{other} has the same token or certificate")));
                }
                all.credentials.push(credential);
            }
            all.identities.push(identity);
        }
        Ok(all)
    }

    /// All of them, in the order of the file.
    #[must_use]
    pub fn identities(&self) -> &[Arc<Identity>] {
        &self.identities
    }

    /// What proves them, in the order of the file.
    #[must_use]
    pub fn credentials(&self) -> &[Credential] {
        &self.credentials
    }

    /// When the next credential becomes valid or stops being so, after `now`.
    #[must_use]
    pub fn next_change(&self, now: SystemTime) -> Option<SystemTime> {
        let dates = self.credentials.iter().flat_map(|it| [it.from, it.until]);
        dates.flatten().filter(|at| *at > now).min()
    }
}

impl Credential {
    /// Whether it proves its identity at that time.
    #[must_use]
    pub fn is_valid_at(&self, now: SystemTime) -> bool {
        self.from.is_none_or(|from| from <= now) && self.until.is_none_or(|until| now < until)
    }
}

impl Entry {
    fn identity(&self) -> Result<Identity, String> {
        let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-@/".contains(&byte);
        let is_short = (1..=NAME_BYTES_MAX).contains(&self.name.len());
        if !is_short || !self.name.bytes().all(is_plain) {
            return Err(format!(
                "a name has 1 to {NAME_BYTES_MAX} letters, digits and characters of ._-@/"
            ));
        }
        if RESERVED.contains(&self.name.as_str()) {
            return Err("this name stands for those who come without an entry here".into());
        }
        let Some(keys) = &self.keys else { return Ok(Identity::new(&self.name, self.role)) };
        if matches!(self.role, Role::Metrics | Role::Admin) {
            return Err(format!("keys do not bound the role {}: leave them out", self.role));
        }
        if keys.len() > EACH_MAX {
            return Err(format!("more than {EACH_MAX} prefixes"));
        }
        let rules = keys.iter().map(|keys| keys.rule(self.role)).collect::<Result<_, _>>()?;
        Ok(Identity::with_rules(&self.name, self.role, rules))
    }
}

impl Keys {
    fn rule(&self, role: Role) -> Result<KeyRule, String> {
        let Self { prefix, verbs } = self;
        let is_space = |byte: u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        if prefix.len() > PREFIX_BYTES_MAX || prefix.bytes().any(is_space) {
            return Err(format!("prefix {prefix:?}: no key begins like that"));
        }
        let rights = match verbs {
            None => role.rights(),
            Some(verbs) => {
                let asked =
                    verbs.iter().fold(Rights::NONE, |rights, verb| rights.with(verb.right()));
                if asked.and(role.rights()) != asked {
                    return Err(format!("prefix {prefix:?}: the role {role} may not do all that"));
                }
                asked
            }
        };
        Ok(KeyRule { prefix: prefix.clone().into_bytes(), rights })
    }
}

impl Verb {
    const fn right(self) -> dflockd_api::Right {
        match self {
            Self::Read => dflockd_api::Right::Read,
            Self::Lock => dflockd_api::Right::Lock,
            Self::Write => dflockd_api::Right::Write,
            Self::Signal => dflockd_api::Right::Signal,
        }
    }
}

impl Token {
    fn credential(&self, identity: &Arc<Identity>) -> Result<Credential, String> {
        let hash = self.hash.parse().map_err(str::to_owned)?;
        let from = self.from.as_ref().map(instant).transpose()?;
        let until = self.until.as_ref().map(instant).transpose()?;
        if let (Some(from), Some(until)) = (from, until)
            && from >= until
        {
            return Err("a token is valid from a time that is not before its end".into());
        }
        Ok(Credential { identity: Arc::clone(identity), proof: Proof::Token(hash), from, until })
    }
}

/// The name of a certificate as a credential.
fn certificate(name: &str, identity: &Arc<Identity>) -> Result<Credential, String> {
    let is_of = |kind: &&str| name.len() > kind.len() && name.starts_with(*kind);
    if !NAME_KINDS.iter().any(is_of) {
        let kinds = NAME_KINDS.join(", ");
        return Err(format!("certificate {name:?}: a name begins with one of {kinds}"));
    }
    let proof = Proof::Certificate(name.to_owned());
    Ok(Credential { identity: Arc::clone(identity), proof, from: None, until: None })
}

/// The moment that a date stands for.
fn instant(at: &Datetime) -> Result<SystemTime, String> {
    let refuse = || format!("{at} is no time: write 2027-01-31 or 2027-01-31T12:00:00Z");
    let date = at.date.ok_or_else(refuse)?;
    let month = Month::try_from(date.month).map_err(|_| refuse())?;
    let date = Date::from_calendar_date(i32::from(date.year), month, date.day);
    let date = date.map_err(|_| refuse())?;
    let offset = match (&at.time, at.offset) {
        (None, None) | (Some(_), Some(toml::value::Offset::Z)) => UtcOffset::UTC,
        (Some(_), Some(toml::value::Offset::Custom { minutes })) => {
            UtcOffset::from_whole_seconds(i32::from(minutes) * 60).map_err(|_| refuse())?
        }
        (Some(_), None) | (None, Some(_)) => return Err(format!("{at} names no time zone: add Z")),
    };
    let time = match &at.time {
        None => Time::MIDNIGHT,
        Some(time) => {
            let second = time.second.unwrap_or_default().min(59);
            Time::from_hms(time.hour, time.minute, second).map_err(|_| refuse())?
        }
    };
    let unix = PrimitiveDateTime::new(date, time).assume_offset(offset).unix_timestamp();
    let unix = u64::try_from(unix).map_err(|_| refuse())?;
    Ok(SystemTime::UNIX_EPOCH + Duration::from_secs(unix))
}

/// The name of another identity, or of the same one.
struct Named<'a>(&'a str, &'a str);

impl std::fmt::Display for Named<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.0 == self.1 { f.write_str("it") } else { write!(f, "{:?}", self.0) }
    }
}
