//! Changes of the membership that are committed, until they can not be forgotten any more.
//!
//! The commit index is not synced by itself: a member that restarts learns it from a majority of the voters that it
//! knows. Members that forget the commit of a removal therefore need a majority of the voters *before* it, and one that
//! was removed does not vote any more. Of two voters of which one was removed, the other would never lead again; of
//! four, the three that are left could not spare one of them.
//!
//! So a leader syncs the commit of a change like an entry, and until that is done nothing follows from it: it neither
//! applies the change nor tells others that it is committed ([`Changes::told_max`]). What it tells them from then on
//! comes with the commit, and a follower writes both at once. So when a later entry of that leader is committed, a
//! majority of the voters remembers the change, and whoever of them has forgotten it is told so by the first candidate
//! or voter that has not. Two things wait for such an entry:
//!
//! - An operator who asked for a removal is told that it is done ([`Admins::applied`](super::admin::Admins::applied)).
//! - A leader that finds its own removal committed, which an earlier leader has proposed, applies it and ends
//!   ([`Changes::leaves`]). Others may not even know that it is committed before.

use std::collections::VecDeque;

use raft::eraftpb::Entry;

use super::consensus::change_of;
use super::types::{MemberChange, RaftId};

/// Changes whose commit is not durable here, and the committed entries that wait for them.
#[derive(Default)]
pub(super) struct Changes {
    /// The index of each such change and the number of the write that makes its commit durable, both ascending.
    unsynced: VecDeque<(u64, u64)>,
    /// Committed entries, from the first of these changes on.
    held: VecDeque<Entry>,
    /// The entry that this node has proposed as a leader behind its own removal, which is committed.
    last_entry: Option<u64>,
    /// That entry is committed, too.
    left: bool,
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

    /// The next entry that may be applied; not the removal of this node before it `may_leave`.
    pub(super) fn next(&mut self, own: RaftId, may_leave: bool) -> Option<Entry> {
        let may_apply = self.told_max();
        self.held
            .pop_front_if(|entry| entry.index <= may_apply && (may_leave || !removes(entry, own)))
    }

    /// Whether a leader is the one that is removed next, and has to propose an entry behind that.
    pub(super) fn must_say_goodbye(&self, own: RaftId) -> bool {
        self.last_entry.is_none()
            && self.unsynced.is_empty()
            && self.held.front().is_some_and(|entry| removes(entry, own))
    }

    /// This node has proposed an entry behind its own removal.
    pub(super) fn said_goodbye(&mut self, index: u64) {
        self.last_entry = Some(index);
    }

    /// This node leads no more: what it has proposed may not be committed.
    pub(super) fn lead_no_more(&mut self) {
        self.last_entry = None;
    }

    /// True for a leader that was removed when what it has proposed behind its removal is committed: it steps down.
    pub(super) fn leaves(&mut self, commit: u64) -> bool {
        self.left |= self.last_entry.is_some_and(|index| index <= commit);
        self.left
    }

    /// Whether this node has led until others knew that it is removed.
    pub(super) fn has_left(&self) -> bool {
        self.left
    }

    /// A snapshot up to this index took the place of the log.
    pub(super) fn skip_to(&mut self, index: u64) {
        self.unsynced.retain(|&(change, _)| change > index);
        self.held.retain(|entry| entry.index > index);
    }
}

/// Whether an entry removes this node.
fn removes(entry: &Entry, own: RaftId) -> bool {
    change_of(entry) == Some(MemberChange::Remove { raft_id: own })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec;
    use raft::eraftpb::EntryType;

    fn entries(indexes: std::ops::RangeInclusive<u64>) -> Vec<Entry> {
        indexes.map(|index| Entry { index, ..Entry::default() }).collect()
    }

    fn applied(changes: &mut Changes) -> Vec<u64> {
        std::iter::from_fn(|| changes.next(1, false)).map(|entry| entry.index).collect()
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

    #[test]
    fn a_leader_leaves_when_others_know_that_it_is_removed() {
        let mut changes = Changes::default();
        let context = codec::encode_member_change(&MemberChange::Remove { raft_id: 1 }).to_vec();
        let mut removal = Entry { index: 3, context: context.into(), ..Entry::default() };
        removal.set_entry_type(EntryType::EntryConfChange);
        changes.commit(3, 7);
        changes.hold(entries(1..=2));
        changes.hold(vec![removal]);
        changes.hold(entries(4..=5));
        assert_eq!(applied(&mut changes), [1, 2]);
        assert!(!changes.must_say_goodbye(1), "its commit is not durable");
        changes.written(7);
        assert!(changes.must_say_goodbye(1) && !changes.must_say_goodbye(2));
        assert_eq!(applied(&mut changes), [0; 0]);
        changes.said_goodbye(6);
        assert!(!changes.must_say_goodbye(1), "once");
        changes.lead_no_more();
        assert!(!changes.leaves(6) && changes.must_say_goodbye(1), "another leader may cut it");
        changes.said_goodbye(7);
        assert!(!changes.leaves(6) && !changes.has_left());
        assert!(changes.leaves(7) && changes.has_left());
        let left = std::iter::from_fn(|| changes.next(1, true)).map(|entry| entry.index);
        assert_eq!(left.collect::<Vec<_>>(), [3, 4, 5]);
    }
}
