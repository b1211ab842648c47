//! Patterns of channels and keys: the matcher agrees with an obvious one, and whoever is subscribed is told what its
//! pattern matches and nothing else, however the subscriptions came and went.
//!
//! Input: lines. The first byte of each says what becomes of the rest: a pattern to subscribe to, one to leave, or a
//! channel and key to which something happens.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dflockd_core::{
    Caller, Command, Effect, Limits, Outcome, Push, RequestId, Separators, SessionId, Shared,
    Store, Subscription, Timestamp, command, is_literal, pattern_is_valid, pattern_matches,
};

/// More than any seed has, so that a large input does not become slow.
const LINES_MAX: usize = 48;
/// As on the wire.
const PATTERN_BYTES_MAX: usize = 256;
const SESSIONS: u64 = 4;
/// Who causes what is told.
const PUBLISHER: u64 = 100;

/// Does what the lines say, comparing all the way.
pub fn run(data: &[u8]) {
    let lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').take(LINES_MAX).collect();
    let mut game = Game::new();
    for line in &lines {
        let Some((first, rest)) = line.split_first() else { continue };
        let rest = &rest[..rest.len().min(PATTERN_BYTES_MAX)];
        let session = u64::from(first >> 2) % SESSIONS;
        match first & 3 {
            0 | 1 => game.subscribe(session, rest, true),
            2 => game.subscribe(session, rest, false),
            _ => game.publish(rest),
        }
    }
    for subject in &lines {
        game.publish(&subject[..subject.len().min(PATTERN_BYTES_MAX)]);
    }
    game.leave();
}

/// Panics if the matcher says something else than what it should.
pub fn check_match(pattern: &[u8], subject: &[u8], matched: bool) {
    let slashes = pattern.contains(&b'/');
    let ends = |byte: &u8| *byte == b'.' || slashes && *byte == b'/';
    // Every token with what ends it; the last one ends with the text.
    let split = |text: &[u8]| -> Vec<(Vec<u8>, Option<u8>)> {
        let mut tokens = vec![(Vec::new(), None)];
        for byte in text {
            let last = tokens.last_mut().expect("there always is one");
            if ends(byte) {
                last.1 = Some(*byte);
                tokens.push((Vec::new(), None));
            } else {
                last.0.push(*byte);
            }
        }
        tokens
    };
    let expected = obviously(&split(pattern), &split(subject));
    assert_eq!(matched, expected, "{pattern:?} and {subject:?}");
}

/// The rules as one would tell them.
fn obviously(pattern: &[(Vec<u8>, Option<u8>)], subject: &[(Vec<u8>, Option<u8>)]) -> bool {
    match (pattern, subject) {
        ([], []) => true,
        ([(last, _)], [_, ..]) if last == b">" => true,
        ([(token, end), pattern @ ..], [(word, word_end), subject @ ..]) => {
            (token == b"*" || token == word) && end == word_end && obviously(pattern, subject)
        }
        _ => false,
    }
}

/// A store whose sessions are subscribed to patterns, twice each: to signals and to changes.
struct Game {
    store: Store,
    requests: u64,
    patterns: BTreeMap<u64, BTreeSet<Vec<u8>>>,
}

impl Game {
    fn new() -> Self {
        let shared = Arc::new(Shared::new());
        let store = Store::new(Limits::default(), 42, shared, Timestamp(0));
        Self { store, requests: 0, patterns: BTreeMap::new() }
    }

    fn apply(&mut self, session: u64, command: Command<'_>) -> (Outcome, Vec<(u64, Push)>) {
        self.requests += 1;
        let request = RequestId(self.requests);
        let caller = Caller { session: SessionId(session), request, keep: false };
        let mut effects = Vec::new();
        self.store.apply(caller, command, Timestamp(1), &mut effects);
        self.store.check_invariants();
        let (mut outcome, mut told) = (None, Vec::new());
        for effect in effects {
            match effect {
                Effect::Reply { outcome: answer, .. } => outcome = Some(answer),
                Effect::Push { session, push, .. } => told.push((session.0, push)),
                Effect::SessionEnded { .. } => panic!("a session has ended by itself"),
            }
        }
        (outcome.expect("none of this waits"), told)
    }

    fn subscribe(&mut self, session: u64, pattern: &[u8], join: bool) {
        // What no API lets in does not reach the store.
        if !pattern_is_valid(pattern, Separators::NEWEST) {
            return;
        }
        let mut taken = Vec::new();
        for subscription in [
            Subscription::Signals { pattern, group: b"" },
            Subscription::Changes { pattern, from: None },
        ] {
            let command = match join {
                true => Command::Subscribe(command::Subscribe { to: subscription }),
                false => Command::Unsubscribe(command::Unsubscribe { from: subscription }),
            };
            taken.push(!matches!(self.apply(session, command).0, Outcome::Refused(_)));
        }
        // A pattern that is refused has to be refused for both, and is never told anything.
        assert_eq!(taken[0], taken[1], "{pattern:?} is taken once and refused once");
        let patterns = self.patterns.entry(session).or_default();
        match (join, taken[0]) {
            (true, true) => drop(patterns.insert(pattern.to_vec())),
            (false, _) => drop(patterns.remove(pattern)),
            (true, false) => {}
        }
    }

    /// Signals on the subject, and changes it as a key: those are told whose patterns match, once each.
    fn publish(&mut self, subject: &[u8]) {
        if subject.is_empty() {
            return;
        }
        let mut expected = BTreeSet::new();
        for (session, patterns) in &self.patterns {
            for pattern in patterns {
                let matched = pattern_matches(pattern, subject, Separators::NEWEST);
                check_match(pattern, subject, matched);
                if is_literal(pattern) {
                    assert_eq!(matched, pattern == subject, "{pattern:?} is more than itself");
                }
                if matched {
                    expected.insert(*session);
                }
            }
        }
        let expected: Vec<u64> = expected.into_iter().collect();
        let signal = Command::Signal(command::Signal { channel: subject, payload: b"x" });
        let (outcome, told) = self.apply(PUBLISHER, signal);
        if is_literal(subject) {
            assert_eq!(listeners(&told, subject), expected, "of a signal on {subject:?}");
            let count = i64::try_from(expected.len()).expect("there are four sessions");
            assert_eq!(outcome, Outcome::Number(count), "signals are miscounted");
        } else {
            // A signal goes to one channel; a key may be called like a pattern.
            assert!(matches!(outcome, Outcome::Refused(_)), "a signal to many: {outcome:?}");
            assert!(told.is_empty(), "a refused signal was told");
        }
        let set = Command::KvSet(command::KvSet { key: subject, value: b"x", ttl: None });
        let (_, told) = self.apply(PUBLISHER, set);
        assert_eq!(listeners(&told, subject), expected, "of a change of {subject:?}");
    }

    /// When all have gone, nobody is told anything.
    fn leave(&mut self) {
        for session in 0..SESSIONS {
            let caller = Caller { session: SessionId(session), request: RequestId(0), keep: false };
            let end = Command::EndSession { release: true, forced: false };
            self.store.apply(caller, end, Timestamp(1), &mut Vec::new());
            self.store.check_invariants();
        }
        let gone: BTreeSet<Vec<u8>> =
            std::mem::take(&mut self.patterns).into_values().flatten().collect();
        for pattern in gone {
            self.publish(&pattern);
        }
    }
}

/// Who was told, in order.
fn listeners(told: &[(u64, Push)], subject: &[u8]) -> Vec<u64> {
    let mut sessions: Vec<u64> = told
        .iter()
        .map(|(session, push)| {
            let about = match push {
                Push::Signal { channel, .. } => channel,
                Push::Change(change) => &change.key,
                Push::Leader { .. } | Push::Lost { .. } => panic!("nobody asked for {push:?}"),
            };
            assert!(**about == *subject, "{session} is told of {about:?}");
            *session
        })
        .collect();
    sessions.sort_unstable();
    sessions
}
