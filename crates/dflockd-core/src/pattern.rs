//! Patterns of tokens with `*` (one token) and `>` (the rest, last), and an index of them.
//!
//! A dot ends a token, and in a pattern that contains a slash a slash does too: `jobs.*` matches `jobs.a/b`, `jobs/*`
//! matches `jobs/a` and neither `jobs/a/b` nor `jobs.a`. Separators stand for themselves.
//!
//! Anybody may send patterns, so the index holds no more memory than their bytes and a few words for each, however
//! many tokens they have, and a search visits only what begins like the subject.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::ops::Bound;

use dflockd_api::Bytes;

/// What ends a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Separators {
    /// Dots alone, whatever the pattern: version 1 of the rules.
    Dots,
    /// Dots, and slashes in a pattern that contains one.
    DotsAndSlashes,
}

impl Separators {
    /// Of the newest rules that this program knows.
    pub const NEWEST: Self = Self::DotsAndSlashes;

    /// What ends a token of this pattern, and of a subject that is compared with it.
    fn of(self, pattern: &[u8]) -> Self {
        if has_slash(pattern) { self } else { Self::Dots }
    }

    fn split(self, text: &[u8]) -> impl Iterator<Item = &[u8]> {
        text.split(move |&byte| self.contains(byte))
    }

    fn contains(self, byte: u8) -> bool {
        match self {
            Self::Dots => byte == b'.',
            Self::DotsAndSlashes => byte == b'.' || byte == b'/',
        }
    }

    /// The first token of a text, and what is behind it with the separator between them.
    fn first(self, text: &[u8]) -> (&[u8], Option<(u8, &[u8])>) {
        match text.iter().position(|&byte| self.contains(byte)) {
            Some(end) => (&text[..end], Some((text[end], &text[end + 1..]))),
            None => (text, None),
        }
    }
}

fn has_slash(text: &[u8]) -> bool {
    text.contains(&b'/')
}

/// Whether `*` and `>` stand only where they may: alone in a token, and `>` in the last.
#[must_use]
pub fn is_valid(pattern: &[u8], separators: Separators) -> bool {
    let mut tokens = separators.of(pattern).split(pattern).peekable();
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
pub fn tokens(pattern: &[u8], separators: Separators) -> u64 {
    separators.of(pattern).split(pattern).count() as u64
}

/// Whether there is no wildcard in it.
#[must_use]
pub fn is_literal(pattern: &[u8]) -> bool {
    !pattern.iter().any(|&byte| byte == b'*' || byte == b'>')
}

/// Whether a valid pattern matches a subject.
#[must_use]
pub fn matches(pattern: &[u8], subject: &[u8], separators: Separators) -> bool {
    let separators = separators.of(pattern);
    let (mut pattern, mut subject) = (Some((b'.', pattern)), Some((b'.', subject)));
    loop {
        let ((separator, wanted), (found_separator, found)) = match (pattern, subject) {
            (None, None) => return true,
            (None, Some(_)) | (Some(_), None) => return false,
            (Some(pattern), Some(subject)) => (pattern, subject),
        };
        let (token, more) = separators.first(wanted);
        let (word, rest) = separators.first(found);
        if separator != found_separator || token != b"*" && token != b">" && token != word {
            return false;
        }
        if token == b">" {
            return true;
        }
        (pattern, subject) = (more, rest);
    }
}

/// Values by pattern.
pub(crate) struct PatternIndex<T> {
    values: BTreeMap<Bytes, T>,
    /// The patterns with wildcards among them. In order, so patterns that begin alike stand together: a search goes
    /// from prefix to prefix as in a trie, but no token has a node.
    wild: BTreeSet<Bytes>,
    /// How many of those contain a slash.
    slashed: usize,
}

impl<T> PatternIndex<T> {
    pub(crate) const fn new() -> Self {
        Self { values: BTreeMap::new(), wild: BTreeSet::new(), slashed: 0 }
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
            self.slashed += usize::from(has_slash(pattern));
        }
        self.values.entry(pattern.clone()).or_default()
    }

    pub(crate) fn remove(&mut self, pattern: &[u8]) {
        self.values.remove(pattern);
        if self.wild.remove(pattern) {
            self.slashed -= usize::from(has_slash(pattern));
        }
    }

    /// The patterns that match a literal subject: the subject itself first, then those with wildcards, first those
    /// whose tokens end with dots alone. Of these, where two differ first, `>` goes before a literal token and that
    /// before `*`.
    pub(crate) fn find(&self, subject: &[u8], separators: Separators) -> Vec<Bytes> {
        let mut found = Vec::new();
        if let Some((exact, _)) = self.values.get_key_value(subject)
            && is_literal(exact)
        {
            found.push(exact.clone());
        }
        let mut search = Search::new(&self.wild, subject, separators, found);
        search.below(subject);
        // A slash of a pattern stands for itself, so it takes one in the subject.
        if separators == Separators::DotsAndSlashes && self.slashed > 0 && has_slash(subject) {
            search.slashed = true;
            search.below(subject);
        }
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
    separators: Separators,
    /// Whether patterns are wanted in which slashes end tokens; otherwise the others are.
    slashed: bool,
    /// How the patterns that are looked at begin: empty, or whole tokens with a separator behind each.
    prefix: Vec<u8>,
    found: Vec<Bytes>,
    /// How many prefixes were looked at.
    #[cfg(test)]
    visited: usize,
}

impl<'a> Search<'a> {
    fn new(
        wild: &'a BTreeSet<Bytes>,
        subject: &'a [u8],
        separators: Separators,
        found: Vec<Bytes>,
    ) -> Self {
        Self {
            wild,
            subject,
            separators,
            slashed: false,
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
            if self.wants(first) && matches(first, self.subject, self.separators) {
                self.found.push(first.clone());
            }
            return;
        }
        let ending = if self.slashed { Separators::DotsAndSlashes } else { Separators::Dots };
        let (token, rest) = ending.first(rest);
        self.step(b">", None);
        // A key may have a wildcard as a token; that means itself there, and no pattern has it as a literal.
        if token != b">" && token != b"*" {
            self.step(token, rest);
        }
        self.step(b"*", rest);
    }

    /// Goes on behind a token of the pattern; without a rest of the subject the pattern must end there.
    fn step(&mut self, token: &[u8], rest: Option<(u8, &[u8])>) {
        let length = self.prefix.len();
        self.prefix.extend_from_slice(token);
        match rest {
            None => {
                let pattern = self.wild.get(self.prefix.as_slice());
                self.found.extend(pattern.filter(|pattern| self.wants(pattern)).cloned());
            }
            Some((separator, rest)) => {
                self.prefix.push(separator);
                self.below(rest);
            }
        }
        self.prefix.truncate(length);
    }

    fn wants(&self, pattern: &[u8]) -> bool {
        let slashed = self.separators == Separators::DotsAndSlashes && has_slash(pattern);
        slashed == self.slashed
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
        let all = texts(3).into_iter();
        all.filter(|pattern| is_valid(pattern, Separators::DotsAndSlashes)).collect()
    }

    /// Up to so many tokens, joined with dots, with slashes and with both in turn.
    fn texts(length: usize) -> BTreeSet<Bytes> {
        let mut texts = BTreeSet::new();
        for tokens in sequences(&["a", "b", "ab", "", "*", ">"], length) {
            for separators in [["."; 4], ["/"; 4], [".", "/", ".", "/"], ["/", ".", "/", "."]] {
                let pairs = tokens.iter().zip(separators);
                let text = pairs.fold(alloc::string::String::new(), |text, (token, separator)| {
                    text + separator + token
                });
                texts.insert(Bytes::from(&text.as_bytes()[1..]));
            }
        }
        texts
    }

    /// What was always promised about the order: members of a cluster that run different programs must serve the same
    /// signal in the same order.
    fn rank(pattern: &Bytes, separators: Separators) -> (bool, bool, Vec<u8>) {
        let separators = separators.of(pattern);
        let rank = |token: &[u8]| match token {
            b">" => 0,
            b"*" => 2,
            _ => 1,
        };
        let is_last = separators == Separators::DotsAndSlashes;
        (!is_literal(pattern), is_last, separators.split(pattern).map(rank).collect())
    }

    fn check(index: &PatternIndex<u8>, held: &[&Bytes], subject: &Bytes, separators: Separators) {
        let found = index.find(subject, separators);
        let mut expected: Vec<Bytes> = Vec::new();
        for &pattern in held {
            let is_exact = is_literal(pattern) && pattern == subject;
            if is_exact || !is_literal(pattern) && matches(pattern, subject, separators) {
                expected.push(pattern.clone());
            }
        }
        expected.sort_by_key(|pattern| rank(pattern, separators));
        assert_eq!(found, expected, "for {subject:?} of {held:?}");
    }

    /// The index finds what comparing every pattern finds, in the order of a walk through a trie.
    #[test]
    fn the_index_finds_what_matches() {
        let (patterns, subjects) = (patterns(), Vec::from_iter(texts(4)));
        let mut random: u64 = 1;
        let mut below = |end: u64| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (random >> 33) % end
        };
        for round in 0..200 {
            let mut index = PatternIndex::<u8>::new();
            let share = 1 + round % 20;
            let separators =
                [Separators::Dots, Separators::DotsAndSlashes][usize::from(round % 3 > 0)];
            let valid = patterns.iter().filter(|pattern| is_valid(pattern, separators));
            let mut held: Vec<&Bytes> = valid.filter(|_| below(20) < share).collect();
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
                check(&index, &held, &subjects[at], separators);
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
        let mut search = Search::new(&index.wild, &subject, Separators::DotsAndSlashes, Vec::new());
        search.below(&subject);
        assert!(search.found.iter().eq([&subject]), "{:?}", search.found);
        assert!(search.visited < 8, "{}", search.visited);
        assert_eq!(index.find(b"77.x", Separators::DotsAndSlashes), []);
        for number in 0..10_000 {
            index.remove(&pattern(number, 126));
        }
        assert!(index.is_empty() && index.wild.is_empty());
    }

    #[test]
    fn tokens_are_counted() {
        for (pattern, of_dots, count) in [
            ("a", 1, 1),
            ("a.*", 2, 2),
            (".", 2, 2),
            ("a.*.>", 3, 3),
            ("a/*", 1, 2),
            ("/", 1, 2),
            ("a/b.*", 2, 3),
        ] {
            assert_eq!(tokens(pattern.as_bytes(), Separators::Dots), of_dots, "{pattern}");
            assert_eq!(tokens(pattern.as_bytes(), Separators::DotsAndSlashes), count, "{pattern}");
        }
    }

    /// Which subjects a pattern matches, of those in the table.
    #[test]
    fn slashes_end_tokens_where_the_pattern_has_one() {
        let subjects = ["jobs/a", "jobs/a/b", "jobs.a", "jobs.a/b", "jobs/a.b", "jobs/", "jobs"];
        for (pattern, matched) in [
            ("jobs/*", &["jobs/a", "jobs/"][..]),
            ("jobs/>", &["jobs/a", "jobs/a/b", "jobs/a.b", "jobs/"]),
            ("jobs/*.*", &["jobs/a.b"]),
            ("*/*", &["jobs/a", "jobs/"]),
            ("*/a/*", &["jobs/a/b"]),
            ("jobs/a", &["jobs/a"]),
            // Without a slash a pattern means what it always meant.
            ("jobs.*", &["jobs.a", "jobs.a/b"]),
            ("*", &["jobs/a", "jobs/a/b", "jobs/", "jobs"]),
            ("*.b", &["jobs/a.b"]),
            (">", &subjects),
        ] {
            let found = subjects.into_iter().filter(|subject| {
                matches(pattern.as_bytes(), subject.as_bytes(), Separators::DotsAndSlashes)
            });
            assert_eq!(Vec::from_iter(found), matched, "{pattern}");
        }
        let in_version_1 = |pattern: &str, subject: &str| {
            matches(pattern.as_bytes(), subject.as_bytes(), Separators::Dots)
        };
        assert!(!is_valid(b"jobs/*", Separators::Dots));
        assert!(in_version_1("a/b.*", "a/b.c/d") && !in_version_1("a/b.*", "a/b"));
    }
}
