//! Who may do what: named identities, the tokens and certificates that prove them, and the one function that decides.
//!
//! An [`Identity`] has a role and, if it is not to use all keys, prefixes of keys with what it may do there.
//! [`Identity::may`] decides from an [`Access`], which is made from a command or a query of the table of commands
//! (`dflockd-api`). Every API asks it before the engine sees the request, so an identity can do over one of them what
//! it can do over the others.
//!
//! [`Identities`] is what a file has: see `file.rs` for its form. A token is random, so what stands in the file is its
//! SHA-256 digest ([`TokenHash`]): nobody finds the token of a digest, and a digest is looked up instead of compared,
//! so ten thousand identities cost as much as one.
//!
//! Nothing here knows a connection or a clock, and nothing here keeps a token.

mod certificate;
mod file;
mod token;

use std::fmt;

use dflockd_api::{Command, Query};
use serde::Deserialize;

pub use certificate::{NAME_KINDS, certificate_names};
pub use dflockd_api::{Right, Subject};
pub use file::{Credential, FileError, Identities, Proof, RESERVED};
pub use token::{TOKEN_BYTES_MAX, TOKEN_BYTES_MIN, TokenHash};

/// How much an identity may do at most. Each role may do what those before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// To read the metrics.
    Metrics,
    /// To see keys and their changes.
    Read,
    /// To use keys.
    Use,
    /// To act on what belongs to others, as operators do.
    Admin,
}

impl Role {
    /// All of them, the weakest first.
    pub const ALL: [Self; 4] = [Self::Metrics, Self::Read, Self::Use, Self::Admin];

    /// Its name in files and for people.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Metrics => "metrics",
            Self::Read => "read",
            Self::Use => "use",
            Self::Admin => "admin",
        }
    }

    /// What it may do with keys, and besides.
    #[must_use]
    pub const fn rights(self) -> Rights {
        match self {
            Self::Metrics => Rights::NONE,
            Self::Read => Rights::NONE.with(Right::Read).with(Right::Own),
            Self::Use => Rights::USE,
            Self::Admin => Rights::USE.with(Right::Administer),
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rights(u8);

impl Rights {
    /// None at all.
    pub const NONE: Self = Self(0);
    /// What whoever uses keys needs.
    const USE: Self = Self::NONE
        .with(Right::Read)
        .with(Right::Lock)
        .with(Right::Write)
        .with(Right::Signal)
        .with(Right::Own);

    /// The rights that a rule can name, with their names.
    pub const VERBS: [(Right, &'static str); 4] = [
        (Right::Read, "read"),
        (Right::Lock, "lock"),
        (Right::Write, "write"),
        (Right::Signal, "signal"),
    ];

    const fn bit(right: Right) -> u8 {
        match right {
            Right::Read => 1,
            Right::Lock => 2,
            Right::Write => 4,
            Right::Signal => 8,
            Right::Own => 16,
            Right::Administer => 32,
        }
    }

    /// With one more.
    #[must_use]
    pub const fn with(self, right: Right) -> Self {
        Self(self.0 | Self::bit(right))
    }

    /// What is in both.
    #[must_use]
    pub const fn and(self, other: Self) -> Self {
        Self(self.0 & other.0)
    }

    /// Whether it is one of them.
    #[must_use]
    pub const fn has(self, right: Right) -> bool {
        self.0 & Self::bit(right) != 0
    }
}

/// What an identity may do with the keys and channels that begin like this.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeyRule {
    /// How they begin; all do with nothing.
    pub prefix: Vec<u8>,
    /// No more than its role may.
    pub rights: Rights,
}

/// Somebody who may use the server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    name: String,
    role: Role,
    rules: Vec<KeyRule>,
}

/// What somebody wants to do, as far as rights go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access<'a> {
    /// To send a command or to ask for what a key is.
    To(Right, Subject<'a>),
    /// To see what tells of all keys at once, such as the list of sessions.
    SeeAll,
    /// To read the metrics.
    Metrics,
}

impl<'a> Access<'a> {
    /// What operators do.
    pub const OPERATE: Self = Self::To(Right::Administer, Subject::Session);
    /// What concerns nothing but the own session.
    pub const OWN: Self = Self::To(Right::Own, Subject::Session);

    /// To send a command.
    #[must_use]
    pub fn command(command: &Command<'a>) -> Self {
        Self::To(command.right(), command.subject())
    }

    /// To ask for a value.
    #[must_use]
    pub fn query(query: &Query<'a>) -> Self {
        Self::read(query.key())
    }

    /// To see what a key is.
    #[must_use]
    pub const fn read(key: &'a [u8]) -> Self {
        Self::To(Right::Read, Subject::Name(key))
    }

    /// To be told of what matches.
    #[must_use]
    pub const fn follow(pattern: &'a [u8]) -> Self {
        Self::To(Right::Read, Subject::Pattern(pattern))
    }
}

impl Identity {
    /// Whoever this is may do with all keys what the role may.
    #[must_use]
    pub fn new(name: impl Into<String>, role: Role) -> Self {
        let everything = KeyRule { prefix: Vec::new(), rights: role.rights() };
        Self { name: name.into(), role, rules: vec![everything] }
    }

    /// Whoever this is may do no more than these rules say.
    #[must_use]
    pub fn with_rules(name: impl Into<String>, role: Role, rules: Vec<KeyRule>) -> Self {
        let bounded = |rule: KeyRule| KeyRule { rights: rule.rights.and(role.rights()), ..rule };
        Self { name: name.into(), role, rules: rules.into_iter().map(bounded).collect() }
    }

    /// Somebody who may do nothing.
    #[must_use]
    pub fn nobody() -> Self {
        Self { name: String::new(), role: Role::Metrics, rules: Vec::new() }
    }

    /// What people see.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// How much it may do at most.
    #[must_use]
    pub const fn role(&self) -> Role {
        self.role
    }

    /// What it may do with which keys.
    #[must_use]
    pub fn rules(&self) -> &[KeyRule] {
        &self.rules
    }

    /// Whether it may do that: the one place where this is decided.
    ///
    /// What one rule allows no other takes away. A pattern is allowed if all that can match it is, which is told from
    /// how it begins: up to its first wildcard it stands for itself.
    #[must_use]
    pub fn may(&self, access: Access<'_>) -> bool {
        let (right, subject) = match access {
            // Totals tell nobody a key.
            Access::Metrics => return !self.name.is_empty(),
            Access::SeeAll => (Right::Read, Subject::Pattern(b"")),
            Access::To(right, subject) => (right, subject),
        };
        let begin = match subject {
            // What is its own already is so whatever its key: it may end a subscription, for instance.
            _ if right == Right::Own => return self.role.rights().has(right),
            Subject::Session => return self.role.rights().has(right),
            Subject::Name(name) => name,
            Subject::Pattern(pattern) => literal_head(pattern),
        };
        self.rules.iter().any(|rule| rule.rights.has(right) && begin.starts_with(&rule.prefix))
    }

    /// Whether it sees all keys.
    #[must_use]
    pub fn sees_all(&self) -> bool {
        self.may(Access::SeeAll)
    }

    /// The prefixes of all keys that begin with `prefix` and that it may read, in order, none within another.
    #[must_use]
    pub fn readable(&self, prefix: &[u8]) -> Vec<Vec<u8>> {
        let readable = self.rules.iter().filter(|rule| rule.rights.has(Right::Read));
        let mut found: Vec<Vec<u8>> = readable
            .filter_map(|rule| {
                let longer = if rule.prefix.len() > prefix.len() { &rule.prefix } else { prefix };
                let shorter = rule.prefix.len().min(prefix.len());
                (rule.prefix[..shorter] == prefix[..shorter]).then(|| longer.to_vec())
            })
            .collect();
        // A prefix comes right before what is within it.
        found.sort();
        found.dedup_by(|next, before| next.starts_with(before));
        found
    }
}

/// What all that matches a pattern begins with.
fn literal_head(pattern: &[u8]) -> &[u8] {
    let end = pattern.iter().position(|byte| matches!(byte, b'*' | b'>'));
    &pattern[..end.unwrap_or(pattern.len())]
}

#[cfg(test)]
mod tests;
