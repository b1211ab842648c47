//! The Raft library, and the only place that knows it as more than message types: `RawNode` with its log tail in
//! memory, election timeouts that are a pure function of a seed, and its log lines.
//!
//! # When a member wants to lead
//!
//! A follower that has not heard of its leader for the election timeout E suspects it; before that it neither wants to
//! lead nor votes for another one (CheckQuorum), and a candidate asks first whether it would be elected (PreVote).
//! When it wants to lead itself depends on its [`Place`] among the voters that could: the time from E to 2E is cut into
//! as many slots as there are such voters, and each draws a moment of the first half of its own slot. With three voters
//! and E = 1 s the first of the two followers goes after 1 to 1.25 s, the second, if that comes to nothing, after 1.5
//! to 1.75 s. So a leader that falls silent is replaced soon after E, and the halves between the slots leave time for
//! an election: followers that drew from the whole second would wait longer for the first of them, and would often
//! enough want to lead together, split the votes and lose another second. Nobody suspects a leader before E has passed.
//!
//! The places hold for the first attempt only. Whoever was not elected, or has no place, draws from all of E to 2E:
//! chance ends whatever an order of members could keep on for ever.
//!
//! If the leader's process is known to be gone, nobody waits for E: [`Consensus::campaign_in`].

use std::cell::Cell;
use std::collections::VecDeque;

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use raft::eraftpb::{
    ConfChange, ConfChangeType, ConfState, Entry, EntryType, HardState, Message, MessageType,
    Snapshot, SnapshotMetadata,
};
use raft::{
    GetEntriesContext, RaftState, RawNode, ReadOnlyOption, SnapshotStatus, StateRole, Storage,
    StorageError,
};

use super::Role;
use super::codec;
use super::types::{MemberChange, RaftId};

pub(crate) use raft::Ready;

/// How Raft is to run.
#[derive(Clone, Debug)]
pub struct RaftConfig {
    /// The number of this member.
    pub id: RaftId,
    /// Ticks without a leader after which a member wants to be one; at random up to twice this.
    pub election_ticks: usize,
    /// Ticks between heartbeats.
    pub heartbeat_ticks: usize,
    /// Where election timeouts come from.
    pub seed: u64,
}

/// The place of a member among those that could lead instead of the one that does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// How many come before it.
    pub(crate) rank: usize,
    /// How many there are, itself included.
    pub(crate) of: usize,
}

const MESSAGE_BYTES_MAX: u64 = 1 << 20;
const UNCOMMITTED_BYTES_MAX: u64 = 64 << 20;
const IN_FLIGHT_MAX: usize = 256;

/// One member's part in the consensus.
pub(crate) struct Consensus {
    node: RawNode<MemoryLog>,
    seed: u64,
    election_ticks: usize,
    /// How often it wanted to lead, so that each attempt has another timeout.
    campaigns: u64,
    /// When it is its turn while it follows; none if it is nobody's turn.
    place: Option<Place>,
    last: (u64, StateRole),
}

impl Consensus {
    pub(crate) fn new(config: &RaftConfig, tail: MemoryLog) -> raft::Result<Self> {
        let raft_config = raft::Config {
            id: config.id,
            election_tick: config.election_ticks,
            heartbeat_tick: config.heartbeat_ticks,
            min_election_tick: config.election_ticks,
            max_election_tick: config.election_ticks * 2,
            applied: tail.snapshot.index,
            max_size_per_msg: MESSAGE_BYTES_MAX,
            max_inflight_msgs: IN_FLIGHT_MAX,
            max_uncommitted_size: UNCOMMITTED_BYTES_MAX,
            check_quorum: true,
            pre_vote: true,
            read_only_option: ReadOnlyOption::Safe,
            ..raft::Config::default()
        };
        let logger = slog::Logger::root(TracingDrain, slog::o!());
        let node = RawNode::new(&raft_config, tail, &logger)?;
        let last = (node.raft.term, node.raft.state);
        let (seed, election_ticks) = (config.seed, config.election_ticks);
        let mut consensus = Self { node, seed, election_ticks, campaigns: 0, place: None, last };
        consensus.set_election_timeout();
        Ok(consensus)
    }

    /// Sets the election timeout by a function of what everybody can see, after each call into the library: its own
    /// random draws must not matter.
    fn set_election_timeout(&mut self) {
        let raft = &mut self.node.raft;
        let seen = (raft.term, raft.state);
        if seen != self.last {
            if matches!(raft.state, StateRole::Candidate | StateRole::PreCandidate) {
                self.campaigns += 1;
            }
            self.last = seen;
        }
        let mut hash = self.seed ^ raft.id.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for value in [raft.term, raft.state as u64, self.campaigns] {
            hash = (hash ^ value).wrapping_mul(0xff51_afd7_ed55_8ccd);
            hash ^= hash >> 32;
        }
        let place = self.place.filter(|_| raft.state == StateRole::Follower);
        let (begin, spread) = match place {
            Some(Place { rank, of }) => {
                (self.election_ticks * rank / of, (self.election_ticks / of / 2).max(1))
            }
            None => (0, self.election_ticks),
        };
        let extra = usize::try_from(hash % spread as u64).expect("smaller than a usize");
        raft.set_randomized_election_timeout(self.election_ticks + begin + extra);
    }

    /// Says when it is this member's turn to lead, if its leader should fall silent.
    pub(crate) fn set_place(&mut self, place: Option<Place>) {
        if place != self.place {
            self.place = place;
            self.set_election_timeout();
        }
    }

    pub(crate) fn tick(&mut self) {
        self.node.tick();
        self.set_election_timeout();
    }

    /// With which of the next ticks something happens, if nothing else does before: 1 is the next one.
    pub(crate) fn ticks_to_event(&self) -> usize {
        let raft = &self.node.raft;
        let ticks = if self.is_leader() {
            let heartbeat = raft.heartbeat_timeout().saturating_sub(raft.heartbeat_elapsed());
            let quorum = raft.election_timeout().saturating_sub(raft.election_elapsed);
            heartbeat.min(quorum)
        } else {
            raft.randomized_election_timeout().saturating_sub(raft.election_elapsed)
        };
        ticks.max(1)
    }

    pub(crate) fn step(&mut self, mut message: Message) {
        if bug(Bug::VoteAssumed) && message.msg_type == MessageType::MsgRequestVoteResponse {
            message.reject = false;
        }
        // What does not fit (an unknown sender, a dropped proposal) is not an error between members.
        if let Err(error) = self.node.step(message) {
            tracing::debug!(%error, "a message was not used");
        }
        self.set_election_timeout();
    }

    /// Proposes entries all at once. False if they were not taken.
    pub(crate) fn propose(&mut self, payloads: Vec<Bytes>) -> bool {
        let mut message = Message { msg_type: MessageType::MsgPropose, ..Message::default() };
        message.from = self.node.raft.id;
        let entries = payloads.into_iter().map(|data| Entry { data, ..Entry::default() });
        message.entries = entries.collect::<Vec<_>>().into();
        let taken = self.node.step(message).is_ok();
        self.set_election_timeout();
        taken
    }

    /// Proposes a change of the membership. False if it was not taken.
    pub(crate) fn propose_change(&mut self, change: &MemberChange) -> bool {
        let context = codec::encode_member_change(change).to_vec();
        let taken = self.node.propose_conf_change(context, conf_change(change)).is_ok();
        self.set_election_timeout();
        taken
    }

    /// The membership has changed as an entry says.
    pub(crate) fn apply_change(&mut self, change: &MemberChange) -> raft::Result<ConfState> {
        let state = self.node.apply_conf_change(&conf_change(change));
        self.set_election_timeout();
        state
    }

    pub(crate) fn has_ready(&self) -> bool {
        self.node.has_ready()
    }

    pub(crate) fn ready(&mut self) -> Ready {
        self.node.ready()
    }

    /// What was ready can be read from the tail now.
    pub(crate) fn advance(&mut self, ready: Ready) {
        self.node.advance_append_async(ready);
        self.set_election_timeout();
    }

    pub(crate) fn persisted(&mut self, number: u64) {
        self.node.on_persist_ready(number);
        self.set_election_timeout();
    }

    /// What is applied. A snapshot is at once, but for Raft only when it is written.
    pub(crate) fn applied(&mut self, index: u64) {
        let index = index.min(self.node.raft.raft_log.persisted);
        if index > self.node.raft.raft_log.applied {
            self.node.advance_apply_to(index);
        }
        self.set_election_timeout();
    }

    pub(crate) fn read_index(&mut self, context: u64) {
        self.node.read_index(context.to_le_bytes().to_vec());
        self.set_election_timeout();
    }

    /// Tells the followers at once what is committed, if this member leads. Not by a heartbeat: that speaks only of
    /// what a follower has acknowledged, and the entry may still be on its way to one.
    pub(crate) fn tell_commit(&mut self) {
        if self.is_leader() {
            self.node.raft.bcast_append();
        }
        self.set_election_timeout();
    }

    pub(crate) fn transfer(&mut self, to: RaftId) {
        self.node.transfer_leader(to);
        self.set_election_timeout();
    }

    pub(crate) fn is_transferring(&self) -> bool {
        self.node.raft.lead_transferee.is_some()
    }

    /// Gives leadership up without a successor.
    pub(crate) fn step_down(&mut self) {
        let term = self.node.raft.term;
        self.node.raft.become_follower(term, raft::INVALID_ID);
        self.set_election_timeout();
    }

    pub(crate) fn report_unreachable(&mut self, id: RaftId) {
        self.node.report_unreachable(id);
        self.set_election_timeout();
    }

    /// A member has started again: what it had acknowledged may be gone with a write that its disk did not keep, so the
    /// leader finds out anew how far its log reaches. What is committed stays so.
    pub(crate) fn probe_again(&mut self, id: RaftId) {
        if id != self.node.raft.id
            && let Some(progress) = self.node.raft.mut_prs().get_mut(id)
        {
            let next = progress.next_idx;
            progress.become_probe();
            progress.matched = 0;
            progress.next_idx = next;
        }
    }

    pub(crate) fn report_snapshot(&mut self, id: RaftId, arrived: bool) {
        let status = if arrived { SnapshotStatus::Finish } else { SnapshotStatus::Failure };
        self.node.report_snapshot(id, status);
        self.set_election_timeout();
    }

    /// The leader's process is gone: this member wants to lead after `ticks`, but no sooner than it may vote
    /// for others.
    pub(crate) fn campaign_in(&mut self, ticks: usize) {
        let raft = &mut self.node.raft;
        let timeout = raft.randomized_election_timeout();
        let elapsed = timeout.saturating_sub(ticks).max(raft.election_timeout());
        raft.election_elapsed = raft.election_elapsed.max(elapsed.min(timeout));
    }

    /// Whether it is time to vote for somebody else.
    pub(crate) fn misses_leader(&self) -> bool {
        let raft = &self.node.raft;
        raft.state != StateRole::Leader && raft.election_elapsed >= raft.election_timeout()
    }

    /// The election timer stops short of its end: this member votes for others, but wants no votes.
    pub(crate) fn suppress_campaign(&mut self) {
        if self.is_leader() {
            return;
        }
        // There must be a time between both ends.
        while self.node.raft.randomized_election_timeout() < self.election_ticks + 2 {
            self.campaigns += 1;
            self.set_election_timeout();
        }
        let raft = &mut self.node.raft;
        raft.election_elapsed = raft.election_elapsed.min(raft.randomized_election_timeout() - 2);
    }

    /// The election timer starts anew.
    pub(crate) fn reset_election_timer(&mut self) {
        self.node.raft.election_elapsed = 0;
    }

    pub(crate) fn is_leader(&self) -> bool {
        self.node.raft.state == StateRole::Leader
    }

    pub(crate) fn role(&self) -> Role {
        match self.node.raft.state {
            StateRole::Leader => Role::Leader,
            StateRole::Follower => Role::Follower,
            StateRole::Candidate => Role::Candidate,
            StateRole::PreCandidate => Role::PreCandidate,
        }
    }

    pub(crate) fn leader(&self) -> Option<RaftId> {
        Some(self.node.raft.leader_id).filter(|&id| id != raft::INVALID_ID)
    }

    pub(crate) fn term(&self) -> u64 {
        self.node.raft.term
    }

    pub(crate) fn last_index(&self) -> u64 {
        self.node.raft.raft_log.last_index()
    }

    pub(crate) fn commit(&self) -> u64 {
        self.node.raft.raft_log.committed
    }

    pub(crate) fn has_pending_change(&self) -> bool {
        self.node.raft.has_pending_conf()
    }

    pub(crate) fn conf_state(&self) -> ConfState {
        self.node.raft.prs().conf().to_conf_state()
    }

    pub(crate) fn is_voter(&self, id: RaftId) -> bool {
        self.node.raft.prs().conf().voters().contains(id)
    }

    /// How far the leader knows a member's log to reach, and whether it has been heard of lately.
    pub(crate) fn progress(&self, id: RaftId) -> Option<(u64, bool)> {
        self.node.raft.prs().get(id).map(|progress| (progress.matched, progress.recent_active))
    }

    pub(crate) fn tail(&self) -> &MemoryLog {
        self.node.store()
    }

    pub(crate) fn tail_mut(&mut self) -> &mut MemoryLog {
        self.node.mut_store()
    }
}

fn conf_change(change: &MemberChange) -> ConfChange {
    let (change_type, node_id) = match change {
        MemberChange::Add { raft_id, .. } => (ConfChangeType::AddLearnerNode, *raft_id),
        MemberChange::Promote { raft_id } => (ConfChangeType::AddNode, *raft_id),
        MemberChange::Remove { raft_id } => (ConfChangeType::RemoveNode, *raft_id),
    };
    ConfChange { change_type, node_id, ..ConfChange::default() }
}

/// The change in an entry, if it is one.
pub fn change_of(entry: &Entry) -> Option<MemberChange> {
    match entry.entry_type {
        EntryType::EntryNormal => None,
        EntryType::EntryConfChange | EntryType::EntryConfChangeV2 => {
            codec::decode_member_change(&entry.context).ok()
        }
    }
}

/// What a snapshot made needless.
#[derive(Default)]
pub struct Gone {
    _entries: VecDeque<Entry>,
    _data: Bytes,
}

/// The log since the last cut, and the newest snapshot, in memory: Raft reads from here, the disk only at the start.
pub(crate) struct MemoryLog {
    pub(crate) hard_state: HardState,
    /// The newest snapshot; the entries behind it are all there.
    pub(crate) snapshot: SnapshotMetadata,
    pub(crate) snapshot_data: Bytes,
    /// Index and term of the last entry that was cut away, at most the snapshot's.
    cut: (u64, u64),
    /// From `cut.0 + 1` on, without gaps.
    entries: VecDeque<Entry>,
    /// A member needs a newer snapshot than there is.
    wanted: Cell<bool>,
}

impl MemoryLog {
    /// # Errors
    ///
    /// If the entries do not continue the snapshot.
    pub(crate) fn new(
        mut hard_state: HardState,
        snapshot: SnapshotMetadata,
        snapshot_data: Bytes,
        entries: Vec<Entry>,
    ) -> Result<Self, String> {
        // The commit index is not synced by itself, and a snapshot holds only what was committed.
        hard_state.commit = hard_state.commit.max(snapshot.index);
        let after: VecDeque<Entry> =
            entries.into_iter().filter(|entry| entry.index > snapshot.index).collect();
        let contiguous =
            (snapshot.index + 1..).zip(&after).all(|(index, entry)| entry.index == index);
        if !contiguous {
            return Err("the log does not continue its snapshot".into());
        }
        let cut = (snapshot.index, snapshot.term);
        let last = cut.0 + after.len() as u64;
        if hard_state.commit > last {
            return Err(format!(
                "entries up to {} were committed, the log ends at {last}",
                hard_state.commit
            ));
        }
        let wanted = Cell::new(false);
        Ok(Self { hard_state, snapshot, snapshot_data, cut, entries: after, wanted })
    }

    /// The indexes of the changes of the membership among the entries after `from`, up to `to`.
    pub(crate) fn changes(&self, from: u64, to: u64) -> impl Iterator<Item = u64> {
        let first = position(from.saturating_sub(self.cut.0));
        let entries = self.entries.iter().skip(first).take_while(move |entry| entry.index <= to);
        entries.filter(|entry| change_of(entry).is_some()).map(|entry| entry.index)
    }

    pub(crate) fn append(&mut self, entries: &[Entry]) {
        let Some(first) = entries.first() else { return };
        assert!(first.index > self.cut.0, "an entry that was cut away comes again");
        let keep = first.index - self.cut.0 - 1;
        assert!(keep <= self.entries.len() as u64, "the log would have a gap");
        self.entries.truncate(position(keep));
        self.entries.extend(entries.iter().cloned());
    }

    /// A received snapshot replaces everything.
    pub(crate) fn install(&mut self, metadata: SnapshotMetadata, data: Bytes) {
        self.hard_state.commit = self.hard_state.commit.max(metadata.index);
        self.cut = (metadata.index, metadata.term);
        if !bug(Bug::LogKept) {
            self.entries.clear();
        }
        self.snapshot = metadata;
        self.snapshot_data = data;
    }

    /// A snapshot of what is in the log was made; entries up to `cut` go.
    /// Gives what went: to free it takes a moment that others may have to wait for.
    pub(crate) fn compact(&mut self, metadata: SnapshotMetadata, data: Bytes, cut: u64) -> Gone {
        assert!(metadata.index > self.snapshot.index && cut <= metadata.index, "snapshots grow");
        let mut entries = VecDeque::new();
        if cut > self.cut.0
            && let Some(term) = self.term_at(cut)
        {
            let stay = self.entries.split_off(position(cut - self.cut.0));
            entries = std::mem::replace(&mut self.entries, stay);
            self.cut = (cut, term);
        }
        self.snapshot = metadata;
        let data = std::mem::replace(&mut self.snapshot_data, data);
        Gone { _entries: entries, _data: data }
    }

    /// Whether a newer snapshot was asked for since the last call.
    pub(crate) fn is_wanted(&self) -> bool {
        self.wanted.take()
    }

    /// The first entry that is still there.
    pub(crate) fn first(&self) -> u64 {
        self.cut.0 + 1
    }

    pub(crate) fn last(&self) -> u64 {
        self.cut.0 + self.entries.len() as u64
    }

    pub(crate) fn term_at(&self, index: u64) -> Option<u64> {
        if index == self.cut.0 {
            return Some(self.cut.1);
        }
        let position = position(index.checked_sub(self.cut.0 + 1)?);
        self.entries.get(position).map(|entry| entry.term)
    }

    /// Entries from `low` up to and without `high`.
    pub(crate) fn slice(&self, low: u64, high: u64) -> impl Iterator<Item = &Entry> {
        let (from, to) = (low - self.cut.0 - 1, high - self.cut.0 - 1);
        self.entries.range(position(from)..position(to))
    }
}

fn position(distance: u64) -> usize {
    usize::try_from(distance).expect("entries in memory are fewer than a usize can count")
}

impl Storage for MemoryLog {
    fn initial_state(&self) -> raft::Result<RaftState> {
        let conf_state = self.snapshot.conf_state.clone().unwrap_or_default();
        Ok(RaftState::new(self.hard_state.clone(), conf_state))
    }

    fn entries(
        &self,
        low: u64,
        high: u64,
        max_size: impl Into<Option<u64>>,
        _context: GetEntriesContext,
    ) -> raft::Result<Vec<Entry>> {
        if low <= self.cut.0 {
            return Err(StorageError::Compacted.into());
        }
        if high > self.last() + 1 {
            return Err(StorageError::Unavailable.into());
        }
        let bytes_max = max_size.into().unwrap_or(u64::MAX);
        let mut bytes = 0;
        let mut taken = Vec::new();
        for entry in self.slice(low, high) {
            bytes += entry.data.len() as u64 + 16;
            if bytes > bytes_max && !taken.is_empty() {
                break;
            }
            taken.push(entry.clone());
        }
        Ok(taken)
    }

    fn term(&self, index: u64) -> raft::Result<u64> {
        if index == self.snapshot.index {
            return Ok(self.snapshot.term);
        }
        if index < self.cut.0 {
            return Err(StorageError::Compacted.into());
        }
        self.term_at(index).ok_or_else(|| StorageError::Unavailable.into())
    }

    fn first_index(&self) -> raft::Result<u64> {
        Ok(self.first())
    }

    fn last_index(&self) -> raft::Result<u64> {
        Ok(self.last())
    }

    fn snapshot(&self, request_index: u64, to: u64) -> raft::Result<Snapshot> {
        // A member does not take a snapshot of a cluster that it was not in yet.
        let conf_state = self.snapshot.get_conf_state();
        let knows = conf_state.voters.contains(&to) || conf_state.learners.contains(&to);
        if self.snapshot.index < request_index || self.snapshot.index == 0 || !knows {
            self.wanted.set(true);
            return Err(StorageError::SnapshotTemporarilyUnavailable.into());
        }
        let mut snapshot = Snapshot { data: self.snapshot_data.clone(), ..Snapshot::default() };
        snapshot.set_metadata(self.snapshot.clone());
        Ok(snapshot)
    }
}

/// Raft's own log lines, for those who debug.
struct TracingDrain;

impl slog::Drain for TracingDrain {
    type Ok = ();
    type Err = slog::Never;

    fn log(
        &self,
        record: &slog::Record<'_>,
        _values: &slog::OwnedKVList,
    ) -> Result<(), slog::Never> {
        match record.level() {
            slog::Level::Critical | slog::Level::Error => tracing::error!("raft: {}", record.msg()),
            slog::Level::Warning => tracing::warn!("raft: {}", record.msg()),
            slog::Level::Info | slog::Level::Debug | slog::Level::Trace => {
                tracing::debug!("raft: {}", record.msg());
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries(indexes: std::ops::RangeInclusive<u64>, term: u64) -> Vec<Entry> {
        indexes.map(|index| Entry { index, term, ..Entry::default() }).collect()
    }

    fn metadata(index: u64, term: u64) -> SnapshotMetadata {
        let mut metadata = SnapshotMetadata { index, term, ..SnapshotMetadata::default() };
        metadata.set_conf_state(ConfState { voters: vec![1, 2], ..ConfState::default() });
        metadata
    }

    /// A snapshot at 10 and the entries from 11 to 20, those from 16 on of another term.
    fn tail() -> MemoryLog {
        let entries = [entries(11..=15, 3), entries(16..=20, 4)].concat();
        MemoryLog::new(HardState::default(), metadata(10, 2), Bytes::new(), entries).unwrap()
    }

    fn terms(tail: &MemoryLog) -> Vec<(u64, Option<u64>)> {
        (tail.first() - 1..=tail.last()).map(|index| (index, tail.term_at(index))).collect()
    }

    #[test]
    fn a_log_continues_its_snapshot() {
        let tail = tail();
        assert_eq!((tail.first(), tail.last(), tail.hard_state.commit), (11, 20, 10));
        let open = |snapshot, commit, entries| {
            let hard_state = HardState { commit, ..HardState::default() };
            MemoryLog::new(hard_state, metadata(snapshot, 2), Bytes::new(), entries)
        };
        assert!(open(10, 20, entries(8..=20, 2)).is_ok_and(|tail| tail.first() == 11));
        assert!(open(10, 20, entries(12..=20, 2)).is_err(), "a gap");
        assert!(open(10, 21, entries(11..=20, 2)).is_err(), "what was committed is missing");
        assert!(open(10, 0, vec![]).is_ok_and(|tail| (tail.first(), tail.last()) == (11, 10)));
    }

    #[test]
    fn a_snapshot_cuts_what_it_may() {
        let mut tail = tail();
        // Entries before the snapshot stay for members that are a little behind.
        let gone = tail.compact(metadata(18, 4), Bytes::from_static(b"18"), 15);
        assert_eq!(gone._entries.len(), 5);
        assert_eq!((tail.first(), tail.last(), tail.snapshot.index), (16, 20, 18));
        assert_eq!(tail.snapshot_data, &b"18"[..]);
        let known = [(15, 3), (16, 4), (17, 4), (18, 4), (19, 4), (20, 4)];
        assert_eq!(terms(&tail), known.map(|(index, term)| (index, Some(term))));
        // Nothing to cut: only the snapshot is another one.
        let gone = tail.compact(metadata(19, 4), Bytes::new(), 15);
        assert_eq!(gone._entries.len(), 0);
        assert_eq!(gone._data, &b"18"[..]);
        assert_eq!((tail.first(), tail.last(), tail.snapshot.index), (16, 20, 19));
        let gone = tail.compact(metadata(20, 4), Bytes::new(), 20);
        assert_eq!(gone._entries.len(), 5);
        assert_eq!((tail.first(), tail.last()), (21, 20));
        assert_eq!((tail.term_at(20), tail.term_at(21), tail.term_at(19)), (Some(4), None, None));
    }

    #[test]
    fn entries_replace_those_that_were_there() {
        let mut tail = tail();
        tail.append(&[]);
        assert_eq!(tail.last(), 20);
        tail.append(&entries(18..=19, 5));
        assert_eq!((tail.last(), tail.term_at(17), tail.term_at(18)), (19, Some(4), Some(5)));
        tail.append(&entries(20..=21, 5));
        assert_eq!((tail.last(), tail.term_at(20)), (21, Some(5)));
        tail.append(&entries(11..=11, 6));
        assert_eq!((tail.first(), tail.last()), (11, 11));
    }

    #[test]
    fn raft_reads_what_is_there() {
        let mut tail = tail();
        let context = || GetEntriesContext::empty(false);
        let indexes = |tail: &MemoryLog, low, high, bytes: u64| {
            let read = tail.entries(low, high, bytes, context());
            read.map(|entries| entries.iter().map(|entry| entry.index).collect::<Vec<_>>())
        };
        assert_eq!(indexes(&tail, 11, 14, u64::MAX).unwrap(), [11, 12, 13]);
        assert_eq!(indexes(&tail, 11, 14, 0).unwrap(), [11], "one at least");
        assert_eq!(indexes(&tail, 11, 14, 32).unwrap(), [11, 12], "each counts 16 bytes");
        assert_eq!(indexes(&tail, 20, 21, 0).unwrap(), [20]);
        let compacted = raft::Error::Store(StorageError::Compacted);
        let unavailable = raft::Error::Store(StorageError::Unavailable);
        assert_eq!(indexes(&tail, 10, 14, 0).unwrap_err(), compacted);
        assert_eq!(indexes(&tail, 20, 22, 0).unwrap_err(), unavailable);
        tail.compact(metadata(18, 4), Bytes::new(), 15);
        assert_eq!((tail.term(15).unwrap(), tail.term(18).unwrap()), (3, 4));
        assert_eq!(tail.term(14).unwrap_err(), compacted);
        assert_eq!(tail.term(21).unwrap_err(), unavailable);
    }

    #[test]
    fn a_member_gets_a_snapshot_that_knows_it() {
        let tail = tail();
        assert_eq!(tail.snapshot(10, 2).unwrap().get_metadata().index, 10);
        assert!(!tail.is_wanted());
        assert!(tail.snapshot(10, 3).is_err(), "3 was not a member then");
        assert!(tail.is_wanted() && !tail.is_wanted(), "asked for once");
        assert!(tail.snapshot(11, 2).is_err() && tail.is_wanted(), "a newer one is needed");
    }

    /// Members must not want to lead at the same time: every bit of what their timeouts are made from counts.
    #[test]
    fn election_timeouts_are_spread() {
        let ticks = 128;
        let timeout = |seed, id| {
            let config = RaftConfig { id, election_ticks: ticks, heartbeat_ticks: 10, seed };
            let hard_state = HardState::default();
            let tail = MemoryLog::new(hard_state, metadata(1, 1), Bytes::new(), vec![]).unwrap();
            let consensus = Consensus::new(&config, tail).unwrap();
            consensus.node.raft.randomized_election_timeout()
        };
        let spread = |timeouts: Vec<usize>| {
            assert!(timeouts.iter().all(|timeout| (ticks..ticks * 2).contains(timeout)));
            timeouts.into_iter().collect::<std::collections::BTreeSet<_>>().len()
        };
        assert!(spread((0..64).map(|seed| timeout(seed, 1)).collect()) > 32);
        assert!(spread((0..64).map(|seed| timeout(seed << 48, 1)).collect()) > 32);
        assert!(spread((1..=2).map(|id| timeout(7, id)).collect()) == 2);
    }

    /// Followers of a silent leader do not want to lead at the same time, whatever they draw: there is time for an
    /// election between their turns. Whoever was not elected draws from the whole range.
    #[test]
    fn followers_have_turns() {
        let timeouts = |ticks: usize, place: Option<Place>, campaigns: bool| {
            let timeout = |seed| {
                let config = RaftConfig { id: 1, election_ticks: ticks, heartbeat_ticks: 3, seed };
                let hard_state = HardState::default();
                let tail =
                    MemoryLog::new(hard_state, metadata(1, 1), Bytes::new(), vec![]).unwrap();
                let mut consensus = Consensus::new(&config, tail).unwrap();
                consensus.set_place(place);
                if campaigns {
                    consensus.campaign_in(0);
                    consensus.tick();
                    assert_eq!(consensus.role(), Role::PreCandidate);
                }
                consensus.node.raft.randomized_election_timeout()
            };
            let all: Vec<usize> = (0..64).map(timeout).collect();
            (*all.iter().min().unwrap(), *all.iter().max().unwrap())
        };
        // The shortest timeout that can be set, and the default.
        for ticks in [10, 100] {
            for of in 1..=6 {
                let mut before = None;
                for rank in 0..of {
                    let (first, last) = timeouts(ticks, Some(Place { rank, of }), false);
                    assert!(first >= ticks && last < 2 * ticks, "{first} {last}");
                    let gap = before.is_none_or(|before| first >= before + (ticks / of / 2).max(1));
                    assert!(gap, "{rank} of {of}: {before:?} {first}");
                    before = Some(last);
                }
            }
            let (first, last) = timeouts(ticks, Some(Place { rank: 0, of: 2 }), false);
            assert!(first == ticks && last < ticks + ticks / 4 + 1, "{first} {last}");
            for (place, campaigns) in [(None, false), (Some(Place { rank: 0, of: 2 }), true)] {
                let (first, last) = timeouts(ticks, place, campaigns);
                assert!(first < ticks + ticks / 4 && last >= 2 * ticks - ticks / 4);
            }
        }
    }

    fn consensus(seed: u64, election_ticks: usize) -> Consensus {
        let config = RaftConfig { id: 1, election_ticks, heartbeat_ticks: 1, seed };
        let tail =
            MemoryLog::new(HardState::default(), metadata(1, 1), Bytes::new(), vec![]).unwrap();
        Consensus::new(&config, tail).unwrap()
    }

    /// Each attempt to lead has a timeout of its own, which stays the same as long as the attempt lasts.
    #[test]
    fn an_attempt_to_lead_has_one_timeout() {
        let mut consensus = consensus(1, 50);
        while consensus.role() != Role::PreCandidate {
            assert_eq!(consensus.campaigns, 0);
            consensus.tick();
        }
        let timeout = |consensus: &Consensus| consensus.node.raft.randomized_election_timeout();
        let first = timeout(&consensus);
        for _ in 0..20 {
            consensus.tick();
            assert_eq!((consensus.campaigns, timeout(&consensus)), (1, first));
        }
    }

    /// Who is held back misses a leader, so it votes for others, but wants no votes, whatever its timeouts are.
    #[test]
    fn a_member_that_is_held_back_votes_and_does_not_stand() {
        for seed in 0..32 {
            let mut consensus = consensus(seed, 4);
            for _ in 0..40 {
                consensus.suppress_campaign();
                consensus.tick();
                assert_eq!(consensus.role(), Role::Follower, "seed {seed}");
            }
            assert!(consensus.misses_leader(), "seed {seed}");
        }
    }
}
