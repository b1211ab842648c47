//! Who watches which keys. A store has its watches itself; several stores that are one server have those with wildcards
//! in common, because each of them may change a key that matches.

use alloc::collections::BTreeSet;
use alloc::vec::Vec;

use dflockd_api::{Bytes, SessionId};

use crate::pattern::{PatternIndex, Separators};
use crate::view::ChannelView;

/// The watches with wildcards that several stores have in common: see
/// [`Store::share_watches`](crate::Store::share_watches). The lock around them is the engine's, since the core knows no
/// threads. It is taken while a store is locked, and nothing else is taken under it.
pub trait SharedWatches: Send + Sync {
    /// Lets `look` see the watches.
    fn read(&self, look: &mut dyn FnMut(&WatchIndex));
    /// Lets `change` change the watches.
    fn write(&self, change: &mut dyn FnMut(&mut WatchIndex));
}

/// Sessions by the pattern that they watch.
pub struct WatchIndex(PatternIndex<BTreeSet<SessionId>>);

impl Default for WatchIndex {
    fn default() -> Self {
        Self::new()
    }
}

impl WatchIndex {
    /// Nobody watches anything.
    #[must_use]
    pub const fn new() -> Self {
        Self(PatternIndex::new())
    }

    /// What is watched, by pattern.
    #[must_use]
    pub fn channels(&self) -> Vec<ChannelView> {
        self.iter().map(|(pattern, sessions)| ChannelView::watch(pattern, sessions.len())).collect()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&Bytes, &BTreeSet<SessionId>)> {
        self.0.iter()
    }

    pub(crate) fn contains(&self, pattern: &[u8], session: SessionId) -> bool {
        self.0.get(pattern).is_some_and(|sessions| sessions.contains(&session))
    }

    /// Adds the sessions that watch a key.
    pub(crate) fn find(
        &self,
        key: &[u8],
        separators: Separators,
        watchers: &mut BTreeSet<SessionId>,
    ) {
        let patterns = self.0.find(key, separators);
        watchers.extend(patterns.iter().filter_map(|pattern| self.0.get(pattern)).flatten());
    }

    /// False if the session watched the pattern before.
    pub(crate) fn insert(&mut self, pattern: &Bytes, session: SessionId) -> bool {
        self.0.entry(pattern).insert(session)
    }

    /// False if the session did not watch the pattern.
    pub(crate) fn remove(&mut self, pattern: &[u8], session: SessionId) -> bool {
        let Some(sessions) = self.0.get_mut(pattern) else { return false };
        let was_there = sessions.remove(&session);
        if sessions.is_empty() {
            self.0.remove(pattern);
        }
        was_there
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;
    use alloc::vec::Vec;
    use std::sync::RwLock;

    use super::*;
    use crate::{
        Caller, Command, Effect, Limits, RequestId, Shared, Store, Subscription, Timestamp, command,
    };

    #[derive(Default)]
    struct Locked(RwLock<WatchIndex>);

    impl SharedWatches for Locked {
        fn read(&self, look: &mut dyn FnMut(&WatchIndex)) {
            look(&self.0.read().unwrap());
        }

        fn write(&self, change: &mut dyn FnMut(&mut WatchIndex)) {
            change(&mut self.0.write().unwrap());
        }
    }

    fn send(store: &mut Store, session: u64, command: Command<'_>) -> Vec<SessionId> {
        let caller = Caller { session: SessionId(session), request: RequestId(0), keep: false };
        let mut effects = Vec::new();
        store.apply(caller, command, Timestamp(1), &mut effects);
        store.check_invariants();
        let pushed = effects.iter().filter_map(|effect| match effect {
            Effect::Push { session, .. } => Some(*session),
            Effect::Reply { .. } | Effect::SessionEnded { .. } => None,
        });
        pushed.collect()
    }

    /// A watch with wildcards that one store was asked for is told of what the other changes, once; it goes with the
    /// subscription, the connection or the session.
    #[test]
    fn stores_share_watches() {
        let (watches, shared) = (Arc::<Locked>::default(), Arc::new(Shared::new()));
        let store = || {
            let mut store = Store::new(Limits::default(), 1, Arc::clone(&shared), Timestamp(0));
            store.share_watches(Arc::<Locked>::clone(&watches));
            store
        };
        let (mut common, mut keys) = (store(), store());
        let watch = |pattern| Subscription::Changes { pattern, from: None };
        let change = Command::KvDelete(command::KvDelete { key: b"a.b" });
        let [one, two] = [SessionId(1), SessionId(2)];

        send(&mut common, 2, Command::Subscribe(command::Subscribe { to: watch(b"a.*") }));
        send(&mut common, 1, Command::Subscribe(command::Subscribe { to: watch(b"a.*") }));
        send(&mut common, 1, Command::Subscribe(command::Subscribe { to: watch(b">") }));
        send(&mut common, 1, Command::Subscribe(command::Subscribe { to: watch(b">") }));
        assert_eq!(shared.wild_watches(), 3);
        assert_eq!(send(&mut keys, 9, change), [one, two]);
        // The watch of a key is its store's; it is the same push.
        send(&mut keys, 1, Command::Subscribe(command::Subscribe { to: watch(b"a.b") }));
        assert_eq!(send(&mut keys, 9, change), [one, two]);
        assert_eq!(watches.0.read().unwrap().channels().len(), 2);

        send(&mut common, 1, Command::Detach { until: Timestamp(5) });
        send(&mut keys, 1, Command::Detach { until: Timestamp(5) });
        assert_eq!(send(&mut keys, 9, change), [two]);
        send(&mut common, 1, Command::Attach);
        assert_eq!(send(&mut keys, 9, change), [one, two]);
        send(&mut common, 2, Command::Unsubscribe(command::Unsubscribe { from: watch(b"a.*") }));
        send(&mut common, 2, Command::Unsubscribe(command::Unsubscribe { from: watch(b"a.*") }));
        assert_eq!(send(&mut keys, 9, change), [one]);
        send(&mut common, 1, Command::EndSession { release: true, forced: false });
        assert_eq!(send(&mut keys, 9, change), []);
        assert_eq!(shared.wild_watches(), 0);
        assert!(watches.0.read().unwrap().is_empty());
    }
}
