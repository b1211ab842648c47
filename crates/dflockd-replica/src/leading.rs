//! What a node keeps while it leads: the time of the cluster, and what it is about to propose.
//!
//! # Cluster time
//!
//! In replicated mode a [`Timestamp`] is *cluster time*, and only a leader makes it. A [`Leadership`] is a term, the
//! cluster time at which it began, and the local monotonic time at that instant; a stamp is the first plus what has
//! passed since the second. A leadership begins at the time of the last leader before it, as far as the new leader
//! knows it: the latest of the stamps in its log, the time of its state, and what the leader of the newest term that it
//! has heard of told, whose frames carry its time. So time never runs back in the log and never runs ahead of real
//! time, but for the rate of a clock. Time without a leader does not pass.
//!
//! What a leader of an older term told does not count, however late it is. While nothing is due its time is in no log,
//! so a majority that has restarted elects one that counts from less. If a later leader went on from the first time
//! again, the leases of the second would end early by the difference, which can be hours.
//!
//! - The first entry of a leadership is `NewTerm`; batches of clients wait until it is applied. It sets `grace_until =
//!   max(grace_until, stamp + grace)`: a lease is extended by one grace at most since its last renewal, however many
//!   elections there are (`deadline.rs` of the core).
//! - [`LeaderCommand::Tick`] is proposed when the store's next deadline has come, and every 5 s while there is any
//!   deadline, so that a restart of all members sets time back by no more than that. While there is none, a restart
//!   sets time back to the last entry, and nobody has a lease that would notice.
//! - A leader that hears of no majority for an election timeout steps down (CheckQuorum). One whose loop stood still
//!   for longer than that steps down before it stamps anything. One whose disk write takes over a second, or whose disk
//!   has become full, hands leadership over. One whose disk was full before it led goes on for 30 s first (`lead.rs`):
//!   the member that it would hand over to may have no room either.
//! - The wall clock decides one thing: the first fence of a new cluster.
//!
//! [`Leading`] knows neither consensus nor state: terms, indexes and what is applied are arguments.

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Span, Timestamp};

use super::accepting::{BATCH_BYTES_MAX, BATCH_ITEMS_MAX, end_of};
use super::codec::{self, Batch};
use super::types::{Incarnation, LeaderCommand, RaftId};

/// Bytes waiting to be proposed at which a leader takes no more.
const PENDING_BYTES_MAX: usize = 32 << 20;
/// While something is due some day, time is written down this often, so that a full restart sets it back by no more.
const TIME_ENTRY: Span = Span::from_secs(5);
/// A member that was silent this long is given up: its connections are.
const SILENCE: Span = Span::from_secs(10);

/// The leader's side of a node; empty while another node leads.
#[derive(Default)]
pub(super) struct Leading {
    leadership: Option<Leadership>,
    /// The number that is next of each incarnation, for those that were heard of in this term.
    expected: BTreeMap<Incarnation, u64>,
    /// Batches for the next entries.
    proposals: VecDeque<Batch>,
    proposal_bytes: usize,
    /// Batches that came before the leadership was open, and who sent them.
    early: Vec<(RaftId, Batch)>,
    early_bytes: usize,
    /// Orders for the next entry.
    orders: Vec<LeaderCommand>,
    /// The entry with the last [`LeaderCommand::Tick`].
    tick_index: u64,
    /// The entry with the last version or name of the cluster that this node proposed by itself.
    version_index: u64,
    /// The entry with the last [`LeaderCommand::NodeLost`].
    lost_index: u64,
    /// Raft has not taken the last entries, because too many are not committed: what is due waits for the next look.
    is_refused: bool,
    /// The stamp of the last entry that this node proposed.
    stamped_at: Timestamp,
    /// When each member was last heard of, in local time.
    heard: BTreeMap<RaftId, Timestamp>,
    /// When each member last answered this leader, which shows that frames pass in both directions.
    answered: BTreeMap<RaftId, Timestamp>,
}

/// The time as the leader of a term counts it.
struct Leadership {
    term: u64,
    /// Cluster time when it began.
    base: Timestamp,
    /// Local time when it began.
    since: Timestamp,
    /// The entry that opens it, once proposed. Clients' batches wait until it is applied.
    opening: Option<u64>,
}

/// What a leader makes of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    /// The batch will be proposed.
    Yes,
    /// All of it was taken before. There is nothing to say to who sends again: what is taken will be applied, and an
    /// answer would let it send once more what is on its way.
    Before,
    /// Not now, or never.
    Not,
    /// Another number is next of the incarnation of the batch.
    Expects(u64),
}

impl Leading {
    /// Begins the leadership of a term at the cluster time `base`.
    pub(super) fn begin(
        &mut self,
        term: u64,
        base: Timestamp,
        now: Timestamp,
        members: impl Iterator<Item = RaftId>,
    ) {
        self.end();
        self.leadership = Some(Leadership { term, base, since: now, opening: None });
        self.stamped_at = base;
        // Nobody is silent who was never listened to.
        self.heard = members.map(|id| (id, now)).collect();
    }

    /// Forgets all that only a leader needs. True if this node was one.
    pub(super) fn end(&mut self) -> bool {
        let ended = std::mem::take(self);
        // Every frame tells that its sender is there, whoever leads.
        self.heard = ended.heard;
        self.stamped_at = ended.stamped_at;
        ended.leadership.is_some()
    }

    /// A member has answered this leader.
    pub(super) fn answered(&mut self, by: RaftId, now: Timestamp) {
        self.answered.insert(by, now);
    }

    /// The process of a member is known to be gone.
    pub(super) fn lose(&mut self, member: RaftId) {
        self.answered.remove(&member);
    }

    /// Whether a member has answered this leader within a time.
    pub(super) fn has_answered(&self, member: RaftId, within: Span, now: Timestamp) -> bool {
        self.answered.get(&member).is_some_and(|&at| now.since(at) < within)
    }

    /// How long this node has led.
    pub(super) fn leads_for(&self, now: Timestamp) -> Option<Span> {
        self.leadership.as_ref().map(|leadership| now.since(leadership.since))
    }

    /// Cluster time, if the leadership is that of `term`.
    pub(super) fn time(&self, term: u64, now: Timestamp) -> Option<Timestamp> {
        let leadership = self.leadership.as_ref().filter(|leadership| leadership.term == term)?;
        Some(leadership.base + now.since(leadership.since))
    }

    /// Whether the entry that opens the leadership was not proposed yet.
    pub(super) fn must_open(&self) -> bool {
        self.leadership.as_ref().is_some_and(|leadership| leadership.opening.is_none())
    }

    /// Whether the entry that opens the leadership is applied.
    pub(super) fn is_open(&self, applied: u64) -> bool {
        let opening = self.leadership.as_ref().and_then(|leadership| leadership.opening);
        opening.is_some_and(|index| index <= applied)
    }

    /// When the store's next deadline comes in local time, unless a tick for it is on its way or was not taken.
    pub(super) fn wakes_at(&self, deadline: Option<Timestamp>, applied: u64) -> Option<Timestamp> {
        let can_tick = self.tick_index <= applied && !self.is_refused;
        let leadership = self.leadership.as_ref().filter(|_| can_tick)?;
        Some(leadership.since + deadline?.since(leadership.base))
    }

    /// Whether an entry is due although only time has passed.
    pub(super) fn is_tick_due(
        &self,
        deadline: Option<Timestamp>,
        stamp: Timestamp,
        applied: u64,
    ) -> bool {
        let due = deadline.is_some_and(|at| at <= stamp)
            || deadline.is_some() && stamp.since(self.stamped_at) >= TIME_ENTRY;
        due && self.tick_index <= applied
    }

    /// Whether a version that this node proposed by itself is not applied yet.
    pub(super) fn is_version_under_way(&self, applied: u64) -> bool {
        self.version_index > applied
    }

    pub(super) fn hear(&mut self, from: RaftId, now: Timestamp) {
        self.heard.insert(from, now);
    }

    /// Members that were silent for long, unless one is being given up just now.
    pub(super) fn silent(&self, now: Timestamp, applied: u64) -> impl Iterator<Item = RaftId> {
        let may_ask = self.lost_index <= applied;
        let heard = self.heard.iter().filter(move |_| may_ask);
        heard.filter(move |(_, heard)| now.since(**heard) >= SILENCE).map(|(&id, _)| id)
    }

    /// Keeps a batch until the leadership is open, if there is room.
    pub(super) fn keep_early(&mut self, from: RaftId, batch: Batch) {
        self.early_bytes += batch.bytes.len();
        if self.early_bytes <= PENDING_BYTES_MAX {
            self.early.push((from, batch));
        }
    }

    /// The batches that came before the leadership was open.
    pub(super) fn take_early(&mut self) -> Vec<(RaftId, Batch)> {
        self.early_bytes = 0;
        std::mem::take(&mut self.early)
    }

    /// Takes a batch for the next entry if its incarnation goes on with it. Of the incarnation the items up to
    /// `applied_seq` are in the state; none: nothing of it counts any more.
    pub(super) fn accept(&mut self, mut batch: Batch, applied_seq: Option<u64>) -> Accepted {
        if self.proposal_bytes > PENDING_BYTES_MAX {
            return Accepted::Not;
        }
        let Some(applied_seq) = applied_seq else { return Accepted::Not };
        let expected = self.expected.entry(batch.run).or_insert(applied_seq + 1);
        if bug(Bug::BatchTwice) {
            *expected = batch.first_seq.min(*expected);
        }
        if batch.first_seq > *expected {
            return Accepted::Expects(*expected);
        }
        let known = *expected - batch.first_seq;
        if known >= u64::from(batch.count) {
            return Accepted::Before;
        }
        if known > 0 && batch.skip(known).is_err() {
            return Accepted::Not;
        }
        *expected = end_of(&batch);
        self.proposal_bytes += batch.bytes.len();
        self.proposals.push_back(batch);
        Accepted::Yes
    }

    /// Puts an order into the next entry.
    pub(super) fn order(&mut self, order: LeaderCommand) {
        self.orders.push(order);
    }

    pub(super) fn take_orders(&mut self) -> Vec<LeaderCommand> {
        std::mem::take(&mut self.orders)
    }

    pub(super) fn has_proposals(&self) -> bool {
        !self.proposals.is_empty()
    }

    /// The orders and all batches that wait, as entries with one stamp in the form of a version.
    pub(super) fn payloads(
        &self,
        version: u32,
        stamp: Timestamp,
        orders: &[LeaderCommand],
    ) -> Vec<Bytes> {
        let mut payloads = Vec::new();
        let mut payload = Vec::new();
        codec::begin_payload(&mut payload, version, stamp);
        for order in orders {
            codec::put_leader_command(&mut payload, version, order);
        }
        let mut items = 0;
        for batch in &self.proposals {
            if items > 0
                && (items + u32::from(batch.count) > u32::from(BATCH_ITEMS_MAX)
                    || payload.len() + batch.bytes.len() > BATCH_BYTES_MAX)
            {
                payloads.push(Bytes::from(std::mem::take(&mut payload)));
                codec::begin_payload(&mut payload, version, stamp);
                items = 0;
            }
            items += u32::from(batch.count);
            batch.put(&mut payload);
        }
        payloads.push(Bytes::from(payload));
        payloads
    }

    /// Raft has not taken what was to be proposed.
    pub(super) fn refused(&mut self) {
        self.is_refused = true;
    }

    /// Raft has taken the orders and all batches that waited; `last` is the index of their last entry.
    pub(super) fn proposed(&mut self, orders: &[LeaderCommand], stamp: Timestamp, last: u64) {
        self.proposals.clear();
        self.proposal_bytes = 0;
        self.is_refused = false;
        self.stamped_at = stamp;
        if let Some(leadership) = &mut self.leadership {
            leadership.opening.get_or_insert(last);
        }
        for order in orders {
            match order {
                LeaderCommand::Tick => self.tick_index = last,
                LeaderCommand::NodeLost { .. } => self.lost_index = last,
                LeaderCommand::Version { .. } | LeaderCommand::ClusterId { .. } => {
                    self.version_index = last
                }
                LeaderCommand::Init { .. }
                | LeaderCommand::NewTerm
                | LeaderCommand::Policy(_)
                | LeaderCommand::Digest { .. }
                | LeaderCommand::Address { .. } => {}
            }
        }
    }

    /// Raft has taken an entry with nothing but an order that an operator asked for.
    pub(super) fn proposed_alone(&mut self, stamp: Timestamp) {
        self.stamped_at = stamp;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::codec::Section;
    use crate::types::{Proposal, ProposalBody};
    use dflockd_core::{RequestId, SessionId};

    const NOBODY: [RaftId; 0] = [];

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    /// A leadership of term 3 that began at the cluster time of 50 s and the local time of 1 s, opened by entry 10.
    fn leading() -> Leading {
        let mut leading = Leading::default();
        leading.begin(3, at(50_000), at(1000), [1, 2].into_iter());
        leading.proposed(&[LeaderCommand::NewTerm], at(50_000), 10);
        leading
    }

    fn batch(first_seq: u64, count: u16) -> Batch {
        let body = ProposalBody::Barrier;
        let (session, request) = (SessionId(0), RequestId(0));
        let item = Proposal { session, epoch: 0, request, keep: false, body };
        let mut bytes = Vec::new();
        for _ in 0..count {
            codec::put_item(&mut bytes, &item);
        }
        Batch { run: Incarnation::new(2, 1), first_seq, count, bytes: bytes.into() }
    }

    /// The first number and the count of each batch in each entry.
    fn proposed(leading: &Leading) -> Vec<Vec<(u64, usize)>> {
        let batch = |section| match section {
            Ok(Section::Batch { first_seq, items, .. }) => Some((first_seq, items.count())),
            Ok(Section::LeaderCommand(_)) => None,
            Err(error) => panic!("{error}"),
        };
        let payloads = leading.payloads(1, at(50_000), &[LeaderCommand::Tick]);
        payloads.iter().map(|data| codec::sections(data).filter_map(batch).collect()).collect()
    }

    #[test]
    fn time_goes_on_from_where_the_leadership_began() {
        let mut leading = leading();
        assert_eq!(leading.time(3, at(1000)), Some(at(50_000)));
        assert_eq!(leading.time(3, at(1250)), Some(at(50_250)));
        assert_eq!(leading.time(4, at(1250)), None, "another term");
        assert!(leading.end());
        assert_eq!(leading.time(3, at(1250)), None);
        assert!(!leading.end(), "it has ended already");
    }

    #[test]
    fn a_leadership_is_open_when_its_first_entry_is_applied() {
        let mut leading = Leading::default();
        assert!(!leading.must_open() && !leading.is_open(99), "it does not lead");
        leading.begin(3, at(0), at(0), [].into_iter());
        assert!(leading.must_open() && !leading.is_open(99));
        leading.proposed(&[LeaderCommand::NewTerm], at(0), 10);
        assert!(!leading.must_open() && !leading.is_open(9) && leading.is_open(10));
        leading.proposed(&[LeaderCommand::Tick], at(0), 12);
        assert!(leading.is_open(10), "later entries do not open it again");
    }

    #[test]
    fn a_tick_is_due_at_a_deadline_and_every_five_seconds() {
        let mut leading = leading();
        let deadline = Some(at(60_000));
        assert!(!leading.is_tick_due(None, at(90_000), 10), "nothing is due some day");
        assert!(!leading.is_tick_due(deadline, at(54_999), 10));
        assert!(leading.is_tick_due(deadline, at(55_000), 10), "time is written down");
        assert!(leading.is_tick_due(Some(at(50_001)), at(50_001), 10));
        assert_eq!(leading.wakes_at(deadline, 10), Some(at(11_000)));
        assert_eq!(leading.wakes_at(None, 10), None);
        leading.proposed(&[LeaderCommand::Tick], at(60_000), 11);
        assert!(!leading.is_tick_due(deadline, at(60_000), 10), "one is on its way");
        assert_eq!(leading.wakes_at(deadline, 10), None, "one is on its way");
        assert_eq!(leading.wakes_at(deadline, 11), Some(at(11_000)));
        leading.refused();
        assert_eq!(leading.wakes_at(deadline, 11), None, "the next tick tries again");
        leading.proposed(&[], at(60_000), 12);
        assert_eq!(leading.wakes_at(deadline, 12), Some(at(11_000)));
        assert!(leading.is_tick_due(deadline, at(60_000), 11));
    }

    #[test]
    fn a_run_goes_on_without_gaps_and_repeats() {
        let mut leading = leading();
        assert_eq!(leading.accept(batch(4, 2), None), Accepted::Not, "nothing of the run counts");
        assert_eq!(leading.accept(batch(4, 2), Some(2)), Accepted::Expects(3));
        assert_eq!(leading.accept(batch(3, 2), Some(2)), Accepted::Yes);
        assert_eq!(leading.accept(batch(3, 2), Some(2)), Accepted::Before, "a repeat");
        assert_eq!(leading.accept(batch(4, 3), Some(2)), Accepted::Yes, "a repeat in part");
        assert_eq!(proposed(&leading), [[(3, 2), (5, 2)]]);
        leading.end();
        assert!(!leading.has_proposals());
        leading.begin(4, at(0), at(0), [].into_iter());
        assert_eq!(leading.accept(batch(7, 1), Some(4)), Accepted::Expects(5), "known anew");
    }

    #[test]
    fn what_waits_to_be_proposed_has_a_bound() {
        let mut leading = leading();
        let large = |first_seq| {
            let bytes = vec![0; PENDING_BYTES_MAX + 1].into();
            Batch { run: Incarnation::new(2, 1), first_seq, count: 1, bytes }
        };
        assert_eq!(leading.accept(large(1), Some(0)), Accepted::Yes);
        assert_eq!(leading.accept(batch(2, 1), Some(0)), Accepted::Not);
        leading.proposed(&[], at(0), 11);
        assert_eq!(leading.accept(batch(2, 1), Some(0)), Accepted::Yes);

        leading.keep_early(2, batch(1, 1));
        leading.keep_early(2, large(2));
        assert_eq!(leading.take_early().len(), 1);
        leading.keep_early(2, batch(1, 1));
        assert_eq!(leading.take_early().len(), 1, "there is room again");
    }

    #[test]
    fn an_entry_has_a_bound_in_items() {
        let mut leading = leading();
        assert_eq!(proposed(&leading), [[]], "an order alone");
        for (first, count) in [(1, 200), (201, 56), (257, 1), (258, BATCH_ITEMS_MAX)] {
            assert_eq!(leading.accept(batch(first, count), Some(0)), Accepted::Yes);
        }
        let entries: Vec<Vec<(u64, usize)>> =
            vec![vec![(1, 200), (201, 56)], vec![(257, 1)], vec![(258, 256)]];
        assert_eq!(proposed(&leading), entries);
    }

    #[test]
    fn a_member_is_silent_after_ten_seconds() {
        let mut leading = leading();
        let silent = |leading: &Leading, ms, applied| -> Vec<RaftId> {
            leading.silent(at(ms), applied).collect()
        };
        leading.hear(2, at(1500));
        assert_eq!(silent(&leading, 10_999, 10), NOBODY);
        assert_eq!(silent(&leading, 11_000, 10), [1]);
        assert_eq!(silent(&leading, 11_500, 10), [1, 2]);
        leading.proposed(
            &[LeaderCommand::NodeLost { run: Incarnation::new(1, 1) }],
            at(60_000),
            11,
        );
        assert_eq!(silent(&leading, 11_500, 10), NOBODY, "one at a time");
        assert_eq!(silent(&leading, 11_500, 11), [1, 2]);
    }

    #[test]
    fn a_version_is_under_way_until_it_is_applied() {
        let mut leading = leading();
        assert!(!leading.is_version_under_way(10));
        leading.proposed(&[LeaderCommand::Version { version: 2 }], at(0), 12);
        assert!(leading.is_version_under_way(11) && !leading.is_version_under_way(12));
    }

    #[test]
    fn a_member_has_answered_within_a_time() {
        let mut leading = leading();
        let second = Span::from_secs(1);
        assert!(!leading.has_answered(2, second, at(1000)), "it has not");
        leading.answered(2, at(1000));
        assert!(leading.has_answered(2, second, at(1999)));
        assert!(
            !leading.has_answered(2, second, at(2000))
                && !leading.has_answered(1, second, at(1000))
        );
        leading.lose(2);
        assert!(!leading.has_answered(2, second, at(1000)), "its process is gone");
        assert_eq!(leading.leads_for(at(1250)), Some(Span::from_millis(250)));
    }

    #[test]
    fn an_entry_has_a_bound_in_bytes() {
        let mut leading = leading();
        let head = {
            let mut head = Vec::new();
            codec::begin_payload(&mut head, 1, at(50_000));
            head.len()
        };
        let bytes_of = |leading: &Leading| -> Vec<usize> {
            leading.payloads(1, at(50_000), &[]).iter().map(|data| data.len() - head).collect()
        };
        let large = |first_seq, bytes| {
            let bytes = vec![0; bytes].into();
            Batch { run: Incarnation::new(2, 1), first_seq, count: 1, bytes }
        };
        let third = BATCH_BYTES_MAX / 3;
        for first_seq in 1..=4 {
            assert_eq!(leading.accept(large(first_seq, third), Some(0)), Accepted::Yes);
        }
        let sizes = bytes_of(&leading);
        assert_eq!(sizes.len(), 2, "{sizes:?}");
        assert!(sizes.iter().all(|bytes| (2 * third..3 * third).contains(bytes)), "{sizes:?}");
        assert_eq!(leading.accept(large(5, BATCH_BYTES_MAX), Some(0)), Accepted::Yes);
        assert_eq!(bytes_of(&leading).len(), 3, "one that fills an entry alone");
    }
}
