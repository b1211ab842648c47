//! Changes of the membership that are committed, until the leader can not forget that they are.
//!
//! The commit index is not synced by itself: a member that restarts learns it from a majority of the voters that it
//! knows. A member that forgets the commit of a change therefore needs a majority of the voters *before* the change,
//! and one that was removed does not vote any more. Of two voters of which one was removed, the other would never lead
//! again.
//!
//! So a leader syncs the commit of a change like an entry, and until that is done nothing follows from it: it neither
//! applies the change nor tells others that it is committed ([`Changes::told_max`]). Followers need not: whoever is
//! removed is none of the last two but with the leader, and of three voters before a change two are left to vote.

use std::collections::VecDeque;

use raft::eraftpb::Entry;

/// Changes whose commit is not durable here, and the committed entries that wait for them.
#[derive(Default)]
pub(super) struct Changes {
    /// The index of each such change and the number of the write that makes its commit durable, both ascending.
    unsynced: VecDeque<(u64, u64)>,
    /// Committed entries, from the first of these changes on.
    held: VecDeque<Entry>,
}

impl Changes {
    /// The change at `index` is committed, which the write `number` makes durable.
    pub(super) fn commit(&mut self, index: u64, number: u64) {
        self.unsynced.push_back((index, number));
    }

    /// Writes up to this number are done. True if the commit of a change is durable now.
    pub(super) fn written(&mut self, number: u64) -> bool {
        let before = self.unsynced.len();
        while self.unsynced.pop_front_if(|(_, write)| *write <= number).is_some() {}
        self.unsynced.len() < before
    }

    /// The highest index of which others may be told that it is committed.
    pub(super) fn told_max(&self) -> u64 {
        self.unsynced.front().map_or(u64::MAX, |(index, _)| index - 1)
    }

    /// Takes committed entries in the order of the log.
    pub(super) fn hold(&mut self, entries: Vec<Entry>) {
        self.held.extend(entries);
    }

    /// The next entry that may be applied.
    pub(super) fn next(&mut self) -> Option<Entry> {
        let may_apply = self.told_max();
        self.held.pop_front_if(|entry| entry.index <= may_apply)
    }

    /// A snapshot up to this index took the place of the log.
    pub(super) fn skip_to(&mut self, index: u64) {
        self.unsynced.retain(|&(change, _)| change > index);
        self.held.retain(|entry| entry.index > index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(indexes: std::ops::RangeInclusive<u64>) -> Vec<Entry> {
        indexes.map(|index| Entry { index, ..Entry::default() }).collect()
    }

    fn applied(changes: &mut Changes) -> Vec<u64> {
        std::iter::from_fn(|| changes.next()).map(|entry| entry.index).collect()
    }

    #[test]
    fn without_a_change_nothing_waits() {
        let mut changes = Changes::default();
        changes.hold(entries(1..=3));
        assert_eq!(changes.told_max(), u64::MAX);
        assert_eq!(applied(&mut changes), [1, 2, 3]);
        assert!(!changes.written(9));
    }

    #[test]
    fn a_change_and_what_follows_wait_for_its_write() {
        let mut changes = Changes::default();
        changes.commit(2, 7);
        changes.commit(4, 8);
        changes.hold(entries(1..=5));
        assert_eq!((applied(&mut changes), changes.told_max()), (vec![1], 1));
        assert!(!changes.written(6));
        assert_eq!(applied(&mut changes), [0; 0]);
        assert!(changes.written(7));
        assert_eq!((applied(&mut changes), changes.told_max()), (vec![2, 3], 3));
        assert!(changes.written(9));
        assert_eq!((applied(&mut changes), changes.told_max()), (vec![4, 5], u64::MAX));
    }

    #[test]
    fn a_snapshot_takes_the_place_of_what_waits() {
        let mut changes = Changes::default();
        changes.commit(2, 7);
        changes.commit(5, 8);
        changes.hold(entries(2..=5));
        changes.skip_to(4);
        assert_eq!((applied(&mut changes), changes.told_max()), (vec![], 4));
        changes.skip_to(9);
        assert_eq!((applied(&mut changes), changes.told_max()), (vec![], u64::MAX));
    }
}
