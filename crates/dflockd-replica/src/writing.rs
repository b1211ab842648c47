//! What was handed to the log and is not written yet, and the messages that wait for it.
//!
//! Raft may send most messages at once, but votes and acknowledgements only when what they speak of is durable. Those
//! wait here, in the order of the writes: [`Writing::written`] releases them. So does everything that a member says in
//! a term that is not durable: a single voter leads at once, and could lead again in the same term after a crash.
//!
//! The commit index alone is no reason to write: a member that starts again learns it from the others. It goes with
//! the next write, or with one of its own if none comes soon ([`Writing::flush_commit`]), so that the file is not far
//! behind.
//! But what a node notes because of its state, such as the name of its cluster, comes behind the commit index of that
//! state ([`Writing::need_commit`]): a node that knows the name and has forgotten where it is from talks to nobody who
//! does not know it.

use std::collections::VecDeque;

use dflockd_core::{Span, Timestamp};
use raft::eraftpb::Message;

use super::log::LogBatch;
use super::{LogWrite, ReceivedSnapshot};

/// A leader whose own log write takes longer than this hands over.
const STALL: Span = Span::from_secs(1);

/// The log writes of a node.
#[derive(Default)]
pub(super) struct Writing {
    /// The number of the last write.
    last: u64,
    unwritten: VecDeque<Unwritten>,
    /// Messages whose writes are done.
    released: Vec<Message>,
    /// Notes for the next write.
    notes: Vec<(Vec<u8>, Vec<u8>)>,
    /// The number of the write with a received snapshot. Until it is done the library believes in a log that is gone,
    /// so this node does not want to lead.
    installing: Option<u64>,
    /// The number of the write with the newest term and vote, until it is done.
    term: Option<u64>,
    /// Since when the disk has only its reserve left.
    room_low_since: Option<Timestamp>,
    commit: CommitIndex,
}

/// Where the commit index is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum CommitIndex {
    /// In a write.
    #[default]
    Handed,
    /// To go with the next write.
    Deferred,
    /// To be written now, by itself if need be.
    Due,
}

struct Unwritten {
    number: u64,
    /// The number of the library's Ready; 0 if there is none.
    ready: u64,
    since: Timestamp,
    /// What leaves when the write is done.
    messages: Vec<Message>,
}

impl Writing {
    /// Keeps a value beside the log, with the next write.
    pub(super) fn note(&mut self, key: &[u8], value: Vec<u8>) {
        self.notes.push((key.to_vec(), value));
    }

    pub(super) fn has_notes(&self) -> bool {
        !self.notes.is_empty()
    }

    /// The commit index has changed, and nothing else that Raft keeps on disk: it goes with the next write.
    pub(super) fn defer_commit(&mut self) {
        if self.commit == CommitIndex::Handed {
            self.commit = CommitIndex::Deferred;
        }
    }

    /// No write has taken the commit index for a while.
    pub(super) fn flush_commit(&mut self) {
        if self.commit == CommitIndex::Deferred {
            self.commit = CommitIndex::Due;
        }
    }

    /// The commit index is written at once: something that is noted follows from it.
    pub(super) fn need_commit(&mut self) {
        self.commit = CommitIndex::Due;
    }

    /// Whether the commit index is to be written by itself.
    pub(super) fn is_commit_due(&self) -> bool {
        self.commit == CommitIndex::Due
    }

    /// Whether the commit index goes with the write that is made now.
    pub(super) fn take_commit(&mut self) -> bool {
        std::mem::take(&mut self.commit) != CommitIndex::Handed
    }

    /// The number that the next write will have.
    pub(super) fn next(&self) -> u64 {
        self.last + 1
    }

    /// Whether all writes are done.
    pub(super) fn is_done(&self) -> bool {
        self.unwritten.is_empty()
    }

    /// The next write has a new term or vote.
    pub(super) fn begin_term(&mut self) {
        self.term = Some(self.next());
    }

    /// Whether the newest term and vote are durable.
    pub(super) fn is_term_written(&self) -> bool {
        self.term.is_none()
    }

    /// A write of `batch` and of all notes. `messages` are released when it is done, and then the library is told that
    /// its Ready number `ready` is durable.
    pub(super) fn write(
        &mut self,
        mut batch: LogBatch,
        snapshot: Option<ReceivedSnapshot>,
        sync: bool,
        ready: u64,
        messages: Vec<Message>,
        now: Timestamp,
    ) -> LogWrite {
        self.last += 1;
        let number = self.last;
        if snapshot.as_ref().is_some_and(|snapshot| snapshot.install) {
            self.installing = Some(number);
        }
        batch.notes = std::mem::take(&mut self.notes);
        let sync = sync || !batch.notes.is_empty();
        self.unwritten.push_back(Unwritten { number, ready, since: now, messages });
        LogWrite { number, sync, batch, snapshot }
    }

    /// Writes up to this number are done. Gives the number of the library's last Ready among them, if there is one.
    pub(super) fn written(&mut self, number: u64) -> Option<u64> {
        let mut ready = 0;
        while let Some(write) = self.unwritten.pop_front_if(|write| write.number <= number) {
            ready = ready.max(write.ready);
            self.released.extend(write.messages);
        }
        self.installing.take_if(|installing| *installing <= number);
        self.term.take_if(|term| *term <= number);
        (ready > 0).then_some(ready)
    }

    /// The messages whose writes are done.
    pub(super) fn take_released(&mut self) -> Vec<Message> {
        std::mem::take(&mut self.released)
    }

    /// Whether a received snapshot is not stored yet.
    pub(super) fn is_installing(&self) -> bool {
        self.installing.is_some()
    }

    /// Whether a write takes so long that somebody else should lead.
    pub(super) fn is_stalled(&self, now: Timestamp) -> bool {
        self.unwritten.front().is_some_and(|write| now.since(write.since) >= STALL)
    }

    /// Whether the disk has only its reserve left.
    pub(super) fn is_room_low(&self) -> bool {
        self.room_low_since.is_some()
    }

    /// For how long the disk has had only its reserve left.
    pub(super) fn room_low_for(&self, now: Timestamp) -> Option<Span> {
        self.room_low_since.map(|since| now.since(since))
    }

    /// True if that is new.
    pub(super) fn set_room_low(&mut self, low: bool, now: Timestamp) -> bool {
        let is_new = low != self.is_room_low();
        if is_new {
            self.room_low_since = low.then_some(now);
        }
        is_new
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: [u64; 0] = [];

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn message(to: u64) -> Vec<Message> {
        vec![Message { to, ..Message::default() }]
    }

    fn released(writing: &mut Writing) -> Vec<u64> {
        writing.take_released().into_iter().map(|message| message.to).collect()
    }

    #[test]
    fn messages_wait_for_their_write() {
        let mut writing = Writing::default();
        assert!(writing.is_done());
        assert_eq!(writing.next(), 1);
        for ready in [4, 0, 5] {
            let number = writing.next();
            let batch = LogBatch::default();
            let write = writing.write(batch, None, true, ready, message(number), at(0));
            assert_eq!(write.number, number);
        }
        assert_eq!(released(&mut writing), NONE);
        assert_eq!(writing.written(2), Some(4));
        assert_eq!(released(&mut writing), [1, 2]);
        assert_eq!(released(&mut writing), NONE, "each leaves once");
        assert!(!writing.is_done());
        assert_eq!(writing.written(2), None);
        assert_eq!(writing.written(9), Some(5));
        assert_eq!(released(&mut writing), [3]);
        assert!(writing.is_done());
    }

    #[test]
    fn notes_are_synced_with_the_next_write() {
        let mut writing = Writing::default();
        writing.note(b"key", vec![1]);
        assert!(writing.has_notes());
        let write = writing.write(LogBatch::default(), None, false, 1, vec![], at(0));
        assert!(write.sync && !writing.has_notes());
        assert_eq!(write.batch.notes, [(b"key".to_vec(), vec![1])]);
        let write = writing.write(LogBatch::default(), None, false, 2, vec![], at(0));
        assert!(!write.sync && write.batch.notes.is_empty());
    }

    #[test]
    fn a_received_snapshot_is_installed_when_it_is_written() {
        let mut writing = Writing::default();
        let snapshot = |install| {
            let (metadata, data) = Default::default();
            Some(ReceivedSnapshot { metadata, data, install })
        };
        writing.write(LogBatch::default(), snapshot(false), true, 1, vec![], at(0));
        assert!(!writing.is_installing(), "it is only kept for others");
        writing.write(LogBatch::default(), snapshot(true), true, 2, vec![], at(0));
        writing.written(1);
        assert!(writing.is_installing());
        writing.written(2);
        assert!(!writing.is_installing());
    }

    #[test]
    fn a_term_is_written_with_the_next_write() {
        let mut writing = Writing::default();
        assert!(writing.is_term_written());
        for number in 1..=2 {
            writing.begin_term();
            writing.write(LogBatch::default(), None, true, number, vec![], at(0));
        }
        writing.written(1);
        assert!(!writing.is_term_written());
        writing.written(2);
        assert!(writing.is_term_written());
    }

    #[test]
    fn the_commit_index_goes_with_the_next_write() {
        let mut writing = Writing::default();
        writing.flush_commit();
        assert!(!writing.is_commit_due() && !writing.take_commit(), "it has not changed");
        writing.defer_commit();
        assert!(!writing.is_commit_due(), "nothing is written because of it");
        assert!(writing.take_commit() && !writing.take_commit(), "once");
        writing.defer_commit();
        writing.flush_commit();
        writing.defer_commit();
        assert!(writing.is_commit_due(), "no write has come");
        assert!(writing.take_commit() && !writing.is_commit_due());
        writing.need_commit();
        writing.defer_commit();
        assert!(writing.is_commit_due() && writing.take_commit());
    }

    #[test]
    fn a_write_stalls_after_a_second() {
        let mut writing = Writing::default();
        assert!(!writing.is_stalled(at(9000)), "there is none");
        writing.write(LogBatch::default(), None, true, 1, vec![], at(0));
        writing.write(LogBatch::default(), None, true, 2, vec![], at(500));
        assert!(!writing.is_stalled(at(999)) && writing.is_stalled(at(1000)));
        writing.written(1);
        assert!(!writing.is_stalled(at(1499)) && writing.is_stalled(at(1500)));
    }

    #[test]
    fn low_room_is_news_once() {
        let mut writing = Writing::default();
        assert!(!writing.is_room_low() && !writing.set_room_low(false, at(1)));
        assert!(writing.set_room_low(true, at(2)) && writing.is_room_low());
        assert!(!writing.set_room_low(true, at(3)));
        assert_eq!(writing.room_low_for(at(5)), Some(Span::from_millis(3)));
        assert!(writing.set_room_low(false, at(6)) && writing.room_low_for(at(7)).is_none());
    }
}
