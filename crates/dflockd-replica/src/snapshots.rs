//! When a snapshot is made, and whether all members make the same one.

use std::collections::BTreeMap;

use super::ReceivedSnapshot;

/// How many digests are remembered of each side.
const DIGESTS_MAX: usize = 8;

/// The snapshots of a node.
pub(super) struct Snapshots {
    /// A snapshot is made each time the index is a multiple of this.
    entries: u64,
    /// A snapshot is made when the log since the last one has this many bytes.
    bytes: u64,
    /// One is being made aside.
    making: bool,
    /// Bytes of the entries that were applied since the last one.
    bytes_since: u64,
    /// The digests of snapshots by index, as this node made them.
    own: BTreeMap<u64, [u8; 32]>,
    /// The digests of snapshots by index, as leaders made them.
    told: BTreeMap<u64, [u8; 32]>,
    /// A snapshot of another member that a witness is to store with the next write.
    to_keep: Option<ReceivedSnapshot>,
}

/// The state at an index is not what the leader has there.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Differs;

impl Snapshots {
    pub(super) fn new(entries: u64, bytes: u64) -> Self {
        Self {
            entries,
            bytes,
            making: false,
            bytes_since: 0,
            own: BTreeMap::new(),
            told: BTreeMap::new(),
            to_keep: None,
        }
    }

    /// An entry was applied. True if a snapshot is due.
    pub(super) fn applied(&mut self, index: u64, bytes: u64) -> bool {
        self.bytes_since += bytes;
        index.is_multiple_of(self.entries) || self.bytes_since >= self.bytes
    }

    pub(super) fn is_making(&self) -> bool {
        self.making
    }

    /// A snapshot of all that is applied is being made from now on.
    pub(super) fn begin(&mut self) {
        self.making = true;
        self.bytes_since = 0;
    }

    /// The one that was being made is there, or will never be.
    pub(super) fn end(&mut self) {
        self.making = false;
    }

    /// The newest snapshot was followed by entries of so many bytes.
    pub(super) fn set_bytes_since(&mut self, bytes: u64) {
        self.bytes_since = bytes;
    }

    /// The entries before which the log may be cut when there is a snapshot at `index`; `first` is the first that is
    /// there. Some stay for members that are a little behind.
    pub(super) fn cut(&self, index: u64, first: u64) -> u64 {
        index.saturating_sub(self.entries / 4).max(1).max(first - 1).min(index)
    }

    /// This node has made a snapshot.
    pub(super) fn made(&mut self, index: u64, digest: [u8; 32]) -> Result<(), Differs> {
        remember(&mut self.own, index, digest);
        self.compare(index)
    }

    /// A leader has told what it made.
    pub(super) fn told(&mut self, index: u64, digest: [u8; 32]) -> Result<(), Differs> {
        remember(&mut self.told, index, digest);
        self.compare(index)
    }

    fn compare(&self, index: u64) -> Result<(), Differs> {
        match (self.own.get(&index), self.told.get(&index)) {
            (Some(own), Some(told)) if own != told => Err(Differs),
            _ => Ok(()),
        }
    }

    /// Keeps a snapshot for others, with the next write.
    pub(super) fn keep(&mut self, received: ReceivedSnapshot) {
        self.to_keep = Some(received);
    }

    pub(super) fn take_to_keep(&mut self) -> Option<ReceivedSnapshot> {
        self.to_keep.take()
    }
}

fn remember(digests: &mut BTreeMap<u64, [u8; 32]>, index: u64, digest: [u8; 32]) {
    digests.insert(index, digest);
    while digests.len() > DIGESTS_MAX {
        digests.pop_first();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_is_due_by_entries_or_bytes() {
        let mut snapshots = Snapshots::new(100, 1000);
        assert!(!snapshots.applied(99, 10));
        assert!(snapshots.applied(100, 10));
        snapshots.begin();
        assert!(snapshots.is_making());
        assert!(!snapshots.applied(101, 999));
        assert!(snapshots.applied(102, 1));
        snapshots.end();
        assert!(!snapshots.is_making());
        snapshots.set_bytes_since(500);
        assert!(!snapshots.applied(103, 499));
        assert!(snapshots.applied(104, 1));
    }

    #[test]
    fn a_quarter_of_the_entries_stays() {
        let snapshots = Snapshots::new(100, 1000);
        assert_eq!(snapshots.cut(200, 1), 175);
        assert_eq!(snapshots.cut(200, 190), 189, "what is gone is gone");
        assert_eq!(snapshots.cut(20, 1), 1, "the first entry is the first snapshot");
        assert_eq!(snapshots.cut(200, 201), 200);
    }

    #[test]
    fn digests_are_compared_whichever_comes_first() {
        let mut snapshots = Snapshots::new(100, 1000);
        assert_eq!(snapshots.made(100, [1; 32]), Ok(()));
        assert_eq!(snapshots.told(100, [1; 32]), Ok(()));
        assert_eq!(snapshots.told(200, [2; 32]), Ok(()));
        assert_eq!(snapshots.made(200, [3; 32]), Err(Differs));
        assert_eq!(snapshots.made(300, [3; 32]), Ok(()));
        assert_eq!(snapshots.told(300, [2; 32]), Err(Differs));
    }

    #[test]
    fn few_digests_are_remembered() {
        let mut snapshots = Snapshots::new(100, 1000);
        for index in 1..=9 {
            assert_eq!(snapshots.made(index, [1; 32]), Ok(()));
        }
        assert_eq!(snapshots.told(1, [2; 32]), Ok(()), "it is forgotten");
        assert_eq!(snapshots.told(2, [2; 32]), Err(Differs));
    }
}
