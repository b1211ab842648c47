//! Dot-separated patterns with `*` (one token) and `>` (the rest, last), and an index of them that is
//! searched in the time of what it matches.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::types::Bytes;

/// Whether `*` and `>` stand only where they may: alone in a token, and `>` in the last.
#[must_use]
pub fn is_valid(pattern: &[u8]) -> bool {
    let mut tokens = pattern.split(|&byte| byte == b'.').peekable();
    while let Some(token) = tokens.next() {
        match token {
            b"*" => {}
            b">" => {
                if tokens.peek().is_some() {
                    return false;
                }
            }
            _ => {
                if !is_literal(token) {
                    return false;
                }
            }
        }
    }
    !pattern.is_empty()
}

/// Whether there is no wildcard in it.
#[must_use]
pub fn is_literal(pattern: &[u8]) -> bool {
    !pattern.iter().any(|&byte| byte == b'*' || byte == b'>')
}

/// Whether a valid pattern matches a subject.
#[must_use]
pub fn matches(pattern: &[u8], subject: &[u8]) -> bool {
    let mut subject = subject.split(|&byte| byte == b'.');
    for token in pattern.split(|&byte| byte == b'.') {
        let found = subject.next();
        match token {
            b">" => return found.is_some(),
            b"*" => {
                if found.is_none() {
                    return false;
                }
            }
            _ => {
                if found != Some(token) {
                    return false;
                }
            }
        }
    }
    subject.next().is_none()
}

/// Values by pattern.
pub(crate) struct PatternIndex<T> {
    values: BTreeMap<Bytes, T>,
    /// The patterns with wildcards among them.
    wild: Node,
}

#[derive(Default)]
struct Node {
    /// By token; `*` is a token like any other here, no literal can be it.
    children: BTreeMap<Box<[u8]>, Self>,
    /// A pattern ends here.
    ends: Option<Bytes>,
    /// A pattern goes on with `>`.
    rest: Option<Bytes>,
}

impl Node {
    fn is_empty(&self) -> bool {
        self.children.is_empty() && self.ends.is_none() && self.rest.is_none()
    }

    fn insert(&mut self, tokens: &mut dyn Iterator<Item = &[u8]>, pattern: &Bytes) {
        match tokens.next() {
            None => self.ends = Some(pattern.clone()),
            Some(b">") => self.rest = Some(pattern.clone()),
            Some(token) => {
                self.children.entry(token.into()).or_default().insert(tokens, pattern);
            }
        }
    }

    fn remove(&mut self, tokens: &mut dyn Iterator<Item = &[u8]>) {
        match tokens.next() {
            None => self.ends = None,
            Some(b">") => self.rest = None,
            Some(token) => {
                if let Some(child) = self.children.get_mut(token) {
                    child.remove(tokens);
                    if child.is_empty() {
                        self.children.remove(token);
                    }
                }
            }
        }
    }

    fn find(&self, tokens: &[&[u8]], found: &mut Vec<Bytes>) {
        let Some((first, others)) = tokens.split_first() else {
            found.extend(self.ends.clone());
            return;
        };
        found.extend(self.rest.clone());
        if let Some(child) = self.children.get(*first) {
            child.find(others, found);
        }
        // A key may have `*` as a token; its child was just visited then.
        if *first != b"*"
            && let Some(child) = self.children.get(b"*".as_slice())
        {
            child.find(others, found);
        }
    }
}

impl<T> PatternIndex<T> {
    pub(crate) const fn new() -> Self {
        Self {
            values: BTreeMap::new(),
            wild: Node { children: BTreeMap::new(), ends: None, rest: None },
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    pub(crate) fn get(&self, pattern: &[u8]) -> Option<&T> {
        self.values.get(pattern)
    }

    pub(crate) fn get_mut(&mut self, pattern: &[u8]) -> Option<&mut T> {
        self.values.get_mut(pattern)
    }

    pub(crate) fn entry(&mut self, pattern: &Bytes) -> &mut T
    where
        T: Default,
    {
        if !is_literal(pattern) {
            self.wild.insert(&mut pattern.split(|&byte| byte == b'.'), pattern);
        }
        self.values.entry(pattern.clone()).or_default()
    }

    pub(crate) fn remove(&mut self, pattern: &[u8]) {
        if self.values.remove(pattern).is_some() && !is_literal(pattern) {
            self.wild.remove(&mut pattern.split(|&byte| byte == b'.'));
        }
    }

    /// The patterns that match a literal subject: the subject itself first, then those with wildcards.
    pub(crate) fn find(&self, subject: &[u8]) -> Vec<Bytes> {
        let mut found = Vec::new();
        if let Some((exact, _)) = self.values.get_key_value(subject)
            && is_literal(exact)
        {
            found.push(exact.clone());
        }
        if !self.wild.is_empty() {
            let tokens: Vec<&[u8]> = subject.split(|&byte| byte == b'.').collect();
            self.wild.find(&tokens, &mut found);
        }
        found
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Bytes, &T)> {
        self.values.iter()
    }
}
