//! Dot-separated patterns with `*` (one token) and `>` (the rest, last), and an index of them.
//!
//! Anybody may send patterns, so the index holds no more memory than their bytes and a few words for each, however
//! many tokens they have, and a search visits only what begins like the subject.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Bound;

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

/// How many tokens a pattern has.
#[must_use]
pub fn tokens(pattern: &[u8]) -> u64 {
    pattern.iter().filter(|&&byte| byte == b'.').count() as u64 + 1
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
    /// The patterns with wildcards among them. In order, so patterns that begin alike stand together: a search goes
    /// from prefix to prefix as in a trie, but no token has a node.
    wild: BTreeSet<Bytes>,
}

impl<T> PatternIndex<T> {
    pub(crate) const fn new() -> Self {
        Self { values: BTreeMap::new(), wild: BTreeSet::new() }
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
        if !is_literal(pattern) && !self.wild.contains(pattern) {
            self.wild.insert(pattern.clone());
        }
        self.values.entry(pattern.clone()).or_default()
    }

    pub(crate) fn remove(&mut self, pattern: &[u8]) {
        self.values.remove(pattern);
        self.wild.remove(pattern);
    }

    /// The patterns that match a literal subject: the subject itself first, then those with wildcards. Of these, where
    /// two differ first, `>` goes before a literal token and that before `*`.
    pub(crate) fn find(&self, subject: &[u8]) -> Vec<Bytes> {
        let mut found = Vec::new();
        if let Some((exact, _)) = self.values.get_key_value(subject)
            && is_literal(exact)
        {
            found.push(exact.clone());
        }
        let mut search = Search::new(&self.wild, subject, found);
        search.below(subject);
        search.found
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Bytes, &T)> {
        self.values.iter()
    }
}

/// A search for the patterns with wildcards that match a subject.
struct Search<'a> {
    wild: &'a BTreeSet<Bytes>,
    subject: &'a [u8],
    /// How the patterns that are looked at begin: empty, or whole tokens with a dot behind each.
    prefix: Vec<u8>,
    found: Vec<Bytes>,
    /// How many prefixes were looked at.
    #[cfg(test)]
    visited: usize,
}

impl<'a> Search<'a> {
    fn new(wild: &'a BTreeSet<Bytes>, subject: &'a [u8], found: Vec<Bytes>) -> Self {
        Self {
            wild,
            subject,
            prefix: Vec::new(),
            found,
            #[cfg(test)]
            visited: 0,
        }
    }

    /// Finds the patterns that begin with the prefix, which matches what comes before `rest` of the subject.
    ///
    /// Goes only where patterns are, so a search visits at most as many prefixes as the patterns have tokens, and as
    /// deep as they are long.
    fn below(&mut self, rest: &[u8]) {
        #[cfg(test)]
        {
            self.visited += 1;
        }
        let prefix = self.prefix.as_slice();
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let range = self.wild.range::<[u8], _>(from);
        let mut alike = range.take_while(|pattern| pattern.starts_with(prefix));
        let Some(first) = alike.next() else { return };
        if alike.next().is_none() {
            // Nothing branches off any more.
            if matches(first, self.subject) {
                self.found.push(first.clone());
            }
            return;
        }
        let dot = rest.iter().position(|&byte| byte == b'.');
        let (token, rest) = match dot {
            Some(dot) => (&rest[..dot], Some(&rest[dot + 1..])),
            None => (rest, None),
        };
        self.step(b">", None);
        // A key may have a wildcard as a token; that means itself there, and no pattern has it as a literal.
        if token != b">" && token != b"*" {
            self.step(token, rest);
        }
        self.step(b"*", rest);
    }

    /// Goes on behind a token of the pattern; without a rest of the subject the pattern must end there.
    fn step(&mut self, token: &[u8], rest: Option<&[u8]>) {
        let length = self.prefix.len();
        self.prefix.extend_from_slice(token);
        match rest {
            None => self.found.extend(self.wild.get(self.prefix.as_slice()).cloned()),
            Some(rest) => {
                self.prefix.push(b'.');
                self.below(rest);
            }
        }
        self.prefix.truncate(length);
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    /// Every sequence of up to `length` of these tokens.
    fn sequences(tokens: &[&'static str], length: usize) -> Vec<Vec<&'static str>> {
        let mut all = vec![vec![]];
        let mut last = all.clone();
        for _ in 0..length {
            let longer = |sequence: &Vec<&'static str>| {
                let sequence = sequence.clone();
                tokens.iter().map(move |token| [&sequence[..], &[*token]].concat())
            };
            last = last.iter().flat_map(longer).collect();
            all.extend(last.clone());
        }
        all.retain(|sequence| !sequence.is_empty());
        all
    }

    fn patterns() -> Vec<Bytes> {
        let joined = sequences(&["a", "b", "ab", "", "*", ">"], 3).into_iter();
        let joined = joined.map(|tokens| Bytes::from(tokens.join(".").as_bytes()));
        joined.filter(|pattern| is_valid(pattern)).collect()
    }

    fn subjects() -> Vec<Bytes> {
        let joined = sequences(&["a", "b", "ab", "", "*", ">"], 4).into_iter();
        joined.map(|tokens| Bytes::from(tokens.join(".").as_bytes())).collect()
    }

    /// What was always promised about the order: members of a cluster that run different programs must serve the same
    /// signal in the same order.
    fn rank(pattern: &Bytes) -> (bool, Vec<u8>) {
        let tokens = pattern.split(|&byte| byte == b'.');
        let rank = |token: &[u8]| match token {
            b">" => 0,
            b"*" => 2,
            _ => 1,
        };
        (!is_literal(pattern), tokens.map(rank).collect())
    }

    fn check(index: &PatternIndex<u8>, held: &[&Bytes], subject: &Bytes) {
        let found = index.find(subject);
        let mut expected: Vec<Bytes> = Vec::new();
        for &pattern in held {
            let is_exact = is_literal(pattern) && pattern == subject;
            if is_exact || !is_literal(pattern) && matches(pattern, subject) {
                expected.push(pattern.clone());
            }
        }
        expected.sort_by_key(rank);
        assert_eq!(found, expected, "for {subject:?} of {held:?}");
    }

    /// The index finds what comparing every pattern finds, in the order of a walk through a trie.
    #[test]
    fn the_index_finds_what_matches() {
        let (patterns, subjects) = (patterns(), subjects());
        let mut random: u64 = 1;
        let mut below = |end: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % end
        };
        for round in 0..200 {
            let mut index = PatternIndex::<u8>::new();
            let share = 1 + round % 20;
            let mut held: Vec<&Bytes> = patterns.iter().filter(|_| below(20) < share).collect();
            for pattern in &held {
                *index.entry(pattern) += 1;
            }
            // Some go again.
            held.retain(|pattern| {
                let stays = below(4) > 0;
                if !stays {
                    index.remove(pattern);
                }
                stays
            });
            for _ in 0..200 {
                let at = usize::try_from(below(subjects.len() as u64)).unwrap();
                check(&index, &held, &subjects[at]);
            }
        }
    }

    /// GUARANTEES 48: a search does not look at patterns that begin differently, and no pattern costs more than its
    /// bytes.
    #[test]
    fn many_patterns_cost_their_bytes() {
        let mut index = PatternIndex::<u8>::new();
        let pattern = |number: u32, tokens: usize| {
            Bytes::from([alloc::format!("{number:x}").as_bytes(), &b".*".repeat(tokens)].concat())
        };
        for number in 0..10_000 {
            index.entry(&pattern(number, 126));
        }
        assert_eq!((index.values.len(), index.wild.len()), (10_000, 10_000));
        let subject = pattern(77, 126);
        let mut search = Search::new(&index.wild, &subject, Vec::new());
        search.below(&subject);
        assert!(search.found.iter().eq([&subject]), "{:?}", search.found);
        assert!(search.visited < 8, "{}", search.visited);
        assert_eq!(index.find(b"77.x"), []);
        for number in 0..10_000 {
            index.remove(&pattern(number, 126));
        }
        assert!(index.is_empty() && index.wild.is_empty());
    }

    #[test]
    fn tokens_are_counted() {
        for (pattern, count) in [("a", 1), ("a.*", 2), (".", 2), ("a.*.>", 3)] {
            assert_eq!(tokens(pattern.as_bytes()), count, "{pattern}");
        }
    }
}
