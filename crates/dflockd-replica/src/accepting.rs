//! What this node has accepted from its own clients and the cluster has not applied: numbers, batches, and how far the
//! leader has been sent them.
//!
//! # Exactly once
//!
//! The accepting node numbers all items of an incarnation, 1, 2, 3 and so on, and sends them in batches to the leader,
//! itself included. The machine takes a number only if it is the next of its incarnation: what comes twice is skipped,
//! what lacks its predecessor is not applied, and the leader answers with [`Frame::Expect`]. What is not applied after
//! 500 ms, or when the leader changes, is sent again. So a retry has no second effect and the order of a connection is
//! kept, without a table of request ids. (Numbered requests of kept sessions have kept results in the store, as in
//! memory mode.)
//!
//! [`Accepting`] knows neither consensus nor state: who leads and how far the state is are arguments.
//!
//! [`Frame::Expect`]: super::codec::Frame::Expect

use std::collections::VecDeque;

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Span, Timestamp, Urgency};

use super::codec::Batch;
use super::types::{Incarnation, RaftId};

/// How many items a batch may have, and an entry.
pub(super) const BATCH_ITEMS_MAX: u16 = 256;
/// Bytes of items at which a batch is closed, and an entry.
pub(super) const BATCH_BYTES_MAX: usize = 64 * 1024;
/// Items that were sent and not applied are sent again after this.
const RESEND: Span = Span::from_millis(500);
/// Bytes of items not applied yet at which new ones are refused.
const BACKLOG_BYTES_MAX: usize = 64 << 20;

/// Items of this node's incarnation on their way into the state.
pub(super) struct Accepting {
    run: Incarnation,
    /// The number of the log write that must be durable before other members hear of the incarnation.
    noted_by: Option<u64>,
    /// The number that the next item gets.
    next_seq: u64,
    /// The items that are not in a batch yet: how many, and their bytes.
    open: (u16, Vec<u8>),
    /// Batches that are not applied yet, in order; the first may be applied in part.
    unapplied: VecDeque<Batch>,
    /// The bytes of `open` and `unapplied`.
    backlog_bytes: usize,
    /// The leader that batches were sent to, and its term.
    sent_to: Option<(RaftId, u64)>,
    /// The number of the first item that `sent_to` has not been sent.
    next_send: u64,
    /// The last number that `sent_to` has asked for since everything was last sent again.
    asked_for: Option<u64>,
    /// When an item was last applied or sent again.
    progress_at: Timestamp,
}

impl Accepting {
    pub(super) fn new(run: Incarnation, now: Timestamp) -> Self {
        Self {
            run,
            noted_by: None,
            next_seq: 1,
            open: (0, Vec::new()),
            unapplied: VecDeque::new(),
            backlog_bytes: 0,
            sent_to: None,
            next_send: 1,
            asked_for: None,
            progress_at: now,
        }
    }

    /// Forgets everything and begins another incarnation, which other members hear of when the log write `noted_by` is
    /// durable.
    pub(super) fn begin_again(&mut self, run: Incarnation, noted_by: u64) {
        let (sent_to, progress_at) = (self.sent_to, self.progress_at);
        let noted_by = Some(noted_by);
        *self = Self { noted_by, sent_to, ..Self::new(run, progress_at) };
    }

    pub(super) fn run(&self) -> Incarnation {
        self.run
    }

    /// The number of the last item.
    pub(super) fn last_seq(&self) -> u64 {
        self.next_seq - 1
    }

    /// Whether an item of this urgency is taken beside what is not applied yet.
    pub(super) fn has_room(&self, urgency: Urgency) -> bool {
        urgency.fits(self.backlog_bytes, BACKLOG_BYTES_MAX)
    }

    /// Takes an item in the form of the log.
    pub(super) fn push(&mut self, item: &[u8], now: Timestamp) {
        let (count, bytes) = &mut self.open;
        bytes.extend_from_slice(item);
        *count += 1;
        self.backlog_bytes += item.len();
        self.next_seq += 1;
        if *count >= BATCH_ITEMS_MAX || bytes.len() >= BATCH_BYTES_MAX {
            self.close_batch(now);
        }
    }

    /// Makes a batch of the items that are in none.
    pub(super) fn close_batch(&mut self, now: Timestamp) {
        let (count, bytes) = std::mem::take(&mut self.open);
        if count == 0 {
            return;
        }
        if self.unapplied.is_empty() {
            self.progress_at = now;
        }
        let first_seq = self.next_seq - u64::from(count);
        let bytes = Bytes::from(bytes);
        self.unapplied.push_back(Batch { run: self.run, first_seq, count, bytes });
    }

    /// All items up to `applied` are in the state.
    pub(super) fn forget_applied(&mut self, applied: u64, now: Timestamp) {
        while let Some(batch) = self.unapplied.front()
            && end_of(batch) <= applied + 1
        {
            self.backlog_bytes -= batch.bytes.len();
            self.unapplied.pop_front();
            self.progress_at = now;
        }
        self.next_send = self.next_send.max(applied + 1);
    }

    /// Says which leader of which term batches go to from now on. A new one is sent everything that is not applied, and
    /// after a while without progress the same one is sent it again.
    pub(super) fn send_to(&mut self, to: (RaftId, u64), applied: u64, now: Timestamp) {
        let is_new = self.sent_to != Some(to);
        let is_due = !self.unapplied.is_empty()
            && now.since(self.progress_at) >= RESEND
            && !bug(Bug::NoResend);
        if is_new || is_due {
            self.sent_to = Some(to);
            self.next_send = applied + 1;
            self.asked_for = None;
            self.progress_at = now;
        }
    }

    /// The next batch that the leader was not sent. The caller reports it to [`Accepting::sent`] when it has left.
    ///
    /// Finds it without a walk: what was sent stays here until it is applied, and what can not be sent may be much.
    pub(super) fn next_unsent(&self) -> Option<&Batch> {
        if self.noted_by.is_some() {
            return None;
        }
        let at = self.unapplied.partition_point(|batch| end_of(batch) <= self.next_send);
        self.unapplied.get(at)
    }

    /// A batch has gone to the leader.
    pub(super) fn sent(&mut self, end: u64) {
        self.next_send = end;
    }

    /// A leader says which number it takes next of an incarnation.
    ///
    /// It says so for each batch that came behind a missing one. Only the first time sends them again: the numbers that
    /// one leader asks for grow, and if the missing batch is lost once more the next try is that of a silent leader.
    pub(super) fn expect(
        &mut self,
        from: (RaftId, u64),
        run: Incarnation,
        seq: u64,
        now: Timestamp,
    ) {
        let is_known = self.asked_for.is_some_and(|asked_for| seq <= asked_for);
        if run == self.run && self.sent_to == Some(from) && !is_known {
            self.next_send = seq;
            self.asked_for = Some(seq);
            self.progress_at = now;
        }
    }

    /// Log writes up to this number are durable.
    pub(super) fn written(&mut self, number: u64) {
        if self.noted_by.is_some_and(|noted_by| noted_by <= number) {
            self.noted_by = None;
        }
    }
}

/// The number of the item behind a batch.
pub(super) fn end_of(batch: &Batch) -> u64 {
    batch.first_seq + u64::from(batch.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: (RaftId, u64) = (2, 7);

    fn accepting() -> Accepting {
        Accepting::new(Incarnation::new(1, 1), Timestamp(0))
    }

    /// The first and last numbers of what is sent.
    fn send(
        accepting: &mut Accepting,
        to: (RaftId, u64),
        applied: u64,
        ms: u64,
    ) -> Vec<(u64, u64)> {
        let now = Timestamp(0) + Span::from_millis(ms);
        accepting.close_batch(now);
        accepting.send_to(to, applied, now);
        let mut sent = Vec::new();
        while let Some(batch) = accepting.next_unsent() {
            let (first, end) = (batch.first_seq, end_of(batch));
            sent.push((first, end - 1));
            accepting.sent(end);
        }
        sent
    }

    fn push(accepting: &mut Accepting, items: u64, ms: u64) {
        for _ in 0..items {
            accepting.push(b"item", Timestamp(0) + Span::from_millis(ms));
        }
    }

    #[test]
    fn items_are_numbered_and_sent_once() {
        let mut accepting = accepting();
        assert_eq!(accepting.last_seq(), 0);
        push(&mut accepting, 3, 0);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(1, 3)]);
        push(&mut accepting, 2, 1);
        assert_eq!(accepting.last_seq(), 5);
        assert_eq!(send(&mut accepting, LEADER, 0, 1), [(4, 5)]);
        assert_eq!(send(&mut accepting, LEADER, 0, 2), [], "nothing new");
    }

    #[test]
    fn a_batch_has_a_bound_in_items_and_in_bytes() {
        let mut accepting = accepting();
        push(&mut accepting, u64::from(BATCH_ITEMS_MAX) + 1, 0);
        let items = u64::from(BATCH_ITEMS_MAX);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(1, items), (items + 1, items + 1)]);
        accepting.push(&vec![0; BATCH_BYTES_MAX], Timestamp(0));
        accepting.push(b"next", Timestamp(0));
        let (large, next) = (items + 2, items + 3);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(large, large), (next, next)]);
    }

    #[test]
    fn a_new_leader_and_a_silent_one_are_sent_all_that_is_not_applied() {
        let mut accepting = accepting();
        push(&mut accepting, 2, 0);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(1, 2)]);
        push(&mut accepting, 1, 0);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(3, 3)]);
        assert_eq!(send(&mut accepting, (3, 8), 0, 10), [(1, 2), (3, 3)]);
        accepting.forget_applied(2, Timestamp(0) + Span::from_millis(100));
        assert_eq!(send(&mut accepting, (3, 8), 2, 599), [], "applying is progress");
        assert_eq!(send(&mut accepting, (3, 8), 2, 600), [(3, 3)]);
        assert_eq!(send(&mut accepting, (3, 8), 2, 1099), [], "so is sending again");
        assert_eq!(send(&mut accepting, (3, 8), 2, 1100), [(3, 3)]);
    }

    #[test]
    fn the_leader_may_ask_for_another_number() {
        let mut accepting = accepting();
        push(&mut accepting, 2, 0);
        send(&mut accepting, LEADER, 0, 0);
        push(&mut accepting, 2, 0);
        send(&mut accepting, LEADER, 0, 0);
        let run = accepting.run();
        accepting.expect((2, 6), run, 1, Timestamp(0));
        accepting.expect(LEADER, Incarnation::new(1, 2), 1, Timestamp(0));
        assert_eq!(send(&mut accepting, LEADER, 0, 1), [], "an older term, another run");
        accepting.expect(LEADER, run, 3, Timestamp(0));
        assert_eq!(send(&mut accepting, LEADER, 0, 1), [(3, 4)]);
    }

    /// What goes out for a batch that was lost is the batches behind it, once: not once for each of them.
    #[test]
    fn a_lost_batch_is_asked_for_often_and_sent_again_once() {
        const BATCHES: u64 = 200;
        let mut accepting = accepting();
        for ms in 0..BATCHES {
            push(&mut accepting, 1, ms);
            assert_eq!(send(&mut accepting, LEADER, 0, ms).len(), 1);
        }
        let run = accepting.run();
        let mut sent = 0;
        for _ in 1..BATCHES {
            accepting.expect(LEADER, run, 1, Timestamp(0) + Span::from_millis(BATCHES));
            sent += send(&mut accepting, LEADER, 0, BATCHES).len();
        }
        assert_eq!(sent as u64, BATCHES);
        // One that was overtaken asks for what the leader has by now.
        accepting.expect(LEADER, run, 150, Timestamp(0));
        assert_eq!(send(&mut accepting, LEADER, 0, BATCHES).len(), 51);
        accepting.expect(LEADER, run, 100, Timestamp(0));
        assert_eq!(send(&mut accepting, LEADER, 0, BATCHES), []);
        // Another leader, and one that was sent everything again, may ask for the same number.
        for (leader, ms) in [((3, 8), BATCHES), ((3, 8), 2000)] {
            assert_eq!(send(&mut accepting, leader, 0, ms).len() as u64, BATCHES);
            accepting.expect(leader, run, 150, Timestamp(0) + Span::from_millis(ms));
            assert_eq!(send(&mut accepting, leader, 0, ms).len(), 51);
        }
    }

    #[test]
    fn too_much_that_is_not_applied_is_refused_by_urgency() {
        let mut accepting = accepting();
        assert!(accepting.has_room(Urgency::Grows));
        accepting.push(&vec![0; BACKLOG_BYTES_MAX + 1], Timestamp(0));
        assert!(!accepting.has_room(Urgency::Grows) && !accepting.has_room(Urgency::Plain));
        assert!(accepting.has_room(Urgency::Follows), "what ends something is always taken");
        accepting.close_batch(Timestamp(0));
        accepting.forget_applied(0, Timestamp(0));
        assert!(!accepting.has_room(Urgency::Grows), "nothing was applied");
        accepting.forget_applied(1, Timestamp(0));
        assert!(accepting.has_room(Urgency::Grows));
    }

    #[test]
    fn another_run_begins_when_it_is_noted() {
        let mut accepting = accepting();
        push(&mut accepting, 3, 0);
        send(&mut accepting, LEADER, 0, 0);
        accepting.begin_again(Incarnation::new(1, 2), 5);
        assert_eq!((accepting.run(), accepting.last_seq()), (Incarnation::new(1, 2), 0));
        push(&mut accepting, 1, 0);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), []);
        accepting.written(4);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), []);
        accepting.written(5);
        assert_eq!(send(&mut accepting, LEADER, 0, 0), [(1, 1)]);
    }
}
