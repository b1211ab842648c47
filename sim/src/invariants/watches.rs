//! Watches: every change has a revision of its own, and a session that watches a key is told of each of its changes,
//! once and in order. A watch that begins at a revision is told of all kept changes from there on, or that they are not
//! kept any more, which is true only of those outside the window.
//!
//! Whether a session is connected is only followed as far as it is certain. Where it is not, what it is told must be
//! changes that there were, and nothing may be missed again from its next attachment on.

use std::collections::{BTreeMap, BTreeSet};

use dflockd_core::{
    Bytes, Change, RequestId, Revision, Separators, SessionId, Store, pattern_matches,
};

use super::Broken;

/// What an entry did that concerns watches.
#[derive(Debug, Default)]
pub struct Seen {
    /// Changes that sessions were told of.
    pub told: Vec<(SessionId, Change)>,
    /// Watches that began.
    pub began: Vec<(SessionId, RequestId)>,
    /// Watches that could not begin, because changes up to this revision are gone.
    pub compacted: Vec<(SessionId, RequestId, Revision)>,
    /// Sessions that lost or may have lost their connection.
    pub left: BTreeSet<SessionId>,
    /// Sessions that somebody attached to.
    pub attached: BTreeSet<SessionId>,
}

#[derive(Default)]
struct Watcher {
    patterns: BTreeSet<Vec<u8>>,
    connected: bool,
}

/// Who watches what.
#[derive(Default)]
pub struct Watches {
    /// Keys by the revision of their change.
    changes: BTreeMap<Revision, Bytes>,
    last: Revision,
    asked: BTreeMap<(SessionId, RequestId), (Vec<u8>, Option<Revision>)>,
    watchers: BTreeMap<SessionId, Watcher>,
    /// Sessions of which it is not known what they watch.
    unsure: BTreeSet<SessionId>,
}

impl Watches {
    /// Of a state that another cluster begins with: nobody watches anything.
    #[must_use]
    pub fn resume(store: &Store) -> Self {
        let (separators, last) = (store.limits().separators(), store.revision());
        let kept = store.changes(b">", separators, store.forgotten(), last, usize::MAX);
        let kept = kept.unwrap_or_default().into_iter();
        let changes = kept.map(|change| (change.revision, change.key)).collect();
        Self { changes, last, ..Self::default() }
    }

    /// A session asks for a watch.
    pub fn ask(
        &mut self,
        session: SessionId,
        request: RequestId,
        pattern: &[u8],
        from: Option<Revision>,
    ) {
        self.asked.insert((session, request), (pattern.to_vec(), from));
    }

    /// After each entry. `is_there` says whether a session has a connection, as far as the state knows.
    pub fn check(
        &mut self,
        index: u64,
        seen: &Seen,
        store: &Store,
        is_there: impl Fn(SessionId) -> bool,
    ) -> Result<(), Broken> {
        let broken = |what: String| Err(Broken::new("watches", format!("entry {index}: {what}")));
        let (before, now) = (self.last, store.revision());
        let separators = store.limits().separators();
        self.last = now;
        let Ok(new) = store.changes(b">", separators, before, now, usize::MAX) else {
            // More than are kept, in one entry: what these sessions watch is not known from now on.
            self.unsure.extend(std::mem::take(&mut self.watchers).into_keys());
            self.unsure.extend(seen.began.iter().map(|began| began.0));
            return Ok(());
        };
        if !new.iter().map(|change| change.revision.0).eq(before.0 + 1..=now.0) {
            return broken(format!("changes from {before:?} to {now:?} are {new:?}"));
        }
        self.changes.extend(new.into_iter().map(|change| (change.revision, change.key)));
        for &(session, request, gone) in &seen.compacted {
            let from = self.asked.get(&(session, request)).and_then(|asked| asked.1);
            let kept = store.limits().events_max;
            if from.is_none_or(|from| from > gone) || gone.0 + kept > now.0 {
                return broken(format!("{from:?} is gone with {gone:?} at {now:?}"));
            }
        }
        let mut told: BTreeMap<SessionId, Vec<Revision>> = BTreeMap::new();
        for (session, change) in &seen.told {
            if self.changes.get(&change.revision) != Some(&change.key) {
                return broken(format!("{session:?} is told of {change:?}, which never was"));
            }
            told.entry(*session).or_default().push(change.revision);
        }
        for (session, expected) in self.expected(before, seen, separators, &is_there) {
            let told = told.get(&session).map_or(&[][..], |told| told);
            if told != expected {
                let patterns = self.watchers.get(&session).map(|watcher| &watcher.patterns);
                return broken(format!(
                    "{session:?} is told of {told:?} instead of {expected:?} between {before:?} and {now:?}, it \
                     watches {patterns:?}, {seen:?}"
                ));
            }
        }
        self.follow(seen, is_there);
        Ok(())
    }

    /// What sessions must be told, of those of whom it is certain.
    fn expected(
        &self,
        before: Revision,
        seen: &Seen,
        separators: Separators,
        is_there: impl Fn(SessionId) -> bool,
    ) -> Vec<(SessionId, Vec<Revision>)> {
        let is_new = |session: SessionId| {
            seen.left.contains(&session)
                || seen.attached.contains(&session)
                || seen.began.iter().any(|began| began.0 == session)
        };
        let after = |from: Revision, patterns: &BTreeSet<Vec<u8>>| {
            let changes = self.changes.range(from..);
            let matching = changes.filter(|(_, key)| {
                patterns.iter().any(|pattern| pattern_matches(pattern, key, separators))
            });
            matching.map(|(&revision, _)| revision).collect()
        };
        let mut expected = Vec::new();
        for (&session, watcher) in &self.watchers {
            if watcher.connected && !is_new(session) && is_there(session) {
                expected.push((session, after(Revision(before.0 + 1), &watcher.patterns)));
            }
        }
        for &(session, request) in &seen.began {
            let only = seen.began.iter().filter(|began| began.0 == session).count() == 1
                && !self.watchers.contains_key(&session)
                && !self.unsure.contains(&session)
                && !seen.left.contains(&session);
            if let Some((pattern, Some(from))) = self.asked.get(&(session, request))
                && only
            {
                expected.push((session, after(*from, &BTreeSet::from([pattern.clone()]))));
            }
        }
        expected
    }

    fn follow(&mut self, seen: &Seen, is_there: impl Fn(SessionId) -> bool) {
        for key in &seen.began {
            if let Some((pattern, _)) = self.asked.get(key)
                && !self.unsure.contains(&key.0)
            {
                let watcher = self.watchers.entry(key.0).or_default();
                watcher.patterns.insert(pattern.clone());
                watcher.connected = true;
            }
        }
        for (session, watcher) in &mut self.watchers {
            watcher.connected |= seen.attached.contains(session);
            watcher.connected &= !seen.left.contains(session) && is_there(*session);
        }
    }
}
