//! A member of a cluster, sans-IO: consensus, the replicated state, and the accepting side of clients' commands.
//!
//! Inputs are the `handle_*` methods, [`Replica::submit`], [`Replica::read`] and [`Replica::admin`]; each takes the
//! local time. [`Replica::poll`] then says what is to be done: frames to send, things to write to the log, events for
//! this node's clients. One thread owns a replica; `driver.rs` does disk and network, the simulator plays both.
//!
//! What a client asks becomes an [`Item`], numbered per life of the node (`seq`), and goes to the leader in
//! batches, from the leader itself as well. Every member applies every entry, and the node that accepted a request
//! answers it when it applies it. Items that were not applied are sent again, to whoever leads then; the
//! machine takes each
//! number once and in order, so a retry has no second effect.

mod accept;
pub mod admin;
pub mod codec;
mod consensus;
pub mod disk;
mod lead;
pub mod log;
pub mod machine;
pub mod policy;
#[cfg(test)]
mod tests;
mod transfer;
pub mod types;
pub mod version;

use std::collections::{BTreeMap, VecDeque};

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{
    Effect, Outcome, Progress, Query, Refusal, RequestId, SessionId, Span, Timestamp, Urgency,
};
use raft::eraftpb::{ConfState, Entry, Message, MessageType, SnapshotMetadata};
use ring::digest;

use self::admin::{AdminRequest, AdminResult, Admins};
use self::codec::{Batch, Frame};
use self::consensus::{Consensus, Tail};
pub use self::consensus::{Gone, RaftConfig, change_of};
use self::log::{LogBatch, Recovered};
use self::machine::{Event, Machine};
use self::transfer::{Complete, Transfers};
use self::types::{Action, Bits128, Item, Member, Order, Policy, RaftId, Run, Start};

/// One tick of Raft's clock.
pub const TICK: Span = Span::from_millis(10);
/// How long after its own time a request is given up, with an answer that says so.
const GIVE_UP: Span = Span::from_secs(5);
/// How long after a wait should have ended its accepting node asks for the end.
const CANCEL: Span = Span::from_millis(500);
/// Items that were sent and not applied are sent again after this.
const RESEND: Span = Span::from_millis(500);
/// A read whose index did not come is asked for again after this.
/// It takes four ways between members, which may be far apart.
const READ_RETRY: Span = Span::from_millis(500);
/// A member that was silent this long is given up: its connections are.
const SILENCE: Span = Span::from_secs(10);
/// While something is due some day, time is written down this often, so that a full restart sets it back by no more.
const TIME_ENTRY: Span = Span::from_secs(5);
/// A leader whose own log write takes longer than this hands over.
const WRITE_STALL: Span = Span::from_secs(1);
/// How often pending requests are looked through.
const LOOK: Span = Span::from_millis(100);

/// How long a member whose log was cut waits for a leader to be level with.
const WARY_TICKS_MAX: u32 = 500;

const BATCH_ITEMS_MAX: u16 = 256;
const BATCH_BYTES_MAX: usize = 64 * 1024;
/// Bytes of items not applied yet at which new ones are refused.
const BACKLOG_BYTES_MAX: usize = 64 << 20;
/// Bytes waiting to be proposed at which a leader takes no more.
const PENDING_BYTES_MAX: usize = 32 << 20;

/// Why a node that is no member any more ends.
const REMOVED: &str = "this node was removed from the cluster";

/// Keys of what a node notes beside its log.
pub mod note {
    /// Who the node is: a [`NodeIdentity`](crate::types::NodeIdentity).
    pub const IDENTITY: &[u8] = b"who";
    /// How often the node was started.
    pub const START: &[u8] = b"start";
    /// The log's end was cut at a start: the node does not vote until it has what the leader has.
    pub const WARY: &[u8] = b"wary";
}

/// How to run a replica.
pub struct ReplicaConfig {
    /// For the consensus.
    pub raft: RaftConfig,
    /// Keeps the log, but no state.
    pub witness: bool,
    /// Of the cluster, if this node is its first leader.
    pub policy: Policy,
    /// The first fence, likewise.
    pub fence: u64,
    /// Of the hash maps, likewise.
    pub seed: u64,
    /// The name of the cluster, if this node leads when it gets one of its own.
    pub cluster: Bits128,
    /// This life.
    pub run: Run,
    /// What is told about it.
    pub start: Start,
    /// A snapshot is made each time the index is a multiple of this.
    pub snapshot_entries: u64,
    /// Or when the log since the last one has this many bytes.
    pub snapshot_bytes: u64,
}

/// Something for the log, in order. To be reported by [`Replica::handle_written`].
pub struct LogWrite {
    /// Counts up.
    pub number: u64,
    /// Must be durable before it is reported.
    pub sync: bool,
    /// What to append.
    pub batch: LogBatch,
    /// A snapshot that was received, to be stored before the batch.
    pub snapshot: Option<ReceivedSnapshot>,
}

/// A snapshot from another member.
pub struct ReceivedSnapshot {
    /// Index, term and members.
    pub metadata: SnapshotMetadata,
    /// The state.
    pub data: Bytes,
    /// The log continues behind it; otherwise it is only kept for others (by a witness).
    pub install: bool,
}

/// A snapshot to be made and stored aside, by somebody who has the time. To be reported by
/// [`Replica::handle_snapshot`].
pub struct SnapshotJob {
    base: Bytes,
    entries: Vec<Entry>,
    metadata: SnapshotMetadata,
}

/// A snapshot that was made.
pub struct MadeSnapshot {
    /// Index, term and members.
    pub metadata: SnapshotMetadata,
    /// The state.
    pub data: Bytes,
    /// SHA-256 of the state.
    pub digest: [u8; 32],
}

impl SnapshotJob {
    /// Makes it: the snapshot before, and the log since.
    ///
    /// # Errors
    ///
    /// If the state can not be made again from what is there, which must not be.
    pub fn run(self) -> Result<MadeSnapshot, String> {
        let mut machine = Machine::restore(&self.base, false)?;
        drop(self.base);
        let mut events = Vec::new();
        for entry in self.entries {
            apply_entry(&mut machine, &entry, &mut events)?;
            events.clear();
        }
        let data = Bytes::from(machine.snapshot());
        let digest = digest_of(&data);
        Ok(MadeSnapshot { metadata: self.metadata, data, digest })
    }
}

/// What a [`Replica::poll`] wants done.
#[derive(Default)]
pub struct Outputs {
    /// For other members.
    pub frames: Vec<Outgoing>,
    /// For the log, in order.
    pub writes: Vec<LogWrite>,
    /// For this node's clients, in order.
    pub events: Vec<NodeEvent>,
    /// To be made aside.
    pub snapshot_job: Option<SnapshotJob>,
    /// The log before this index is no longer needed.
    pub cut_before: Option<u64>,
    /// To be dropped by somebody who has the time.
    pub gone: Option<Gone>,
    /// The whole state for those who asked for a copy: by the number of the request.
    pub copies: Vec<(u64, StateCopy)>,
    /// The node can not go on.
    pub fatal: Option<String>,
}

/// The whole replicated state at one place of the log.
#[derive(Clone)]
pub struct StateCopy {
    /// Of the last entry in it.
    pub index: u64,
    /// Of that entry.
    pub term: u64,
    /// As [`Machine::snapshot`] has it.
    pub data: Bytes,
}

/// A frame for another member.
pub struct Outgoing {
    /// For whom.
    pub to: RaftId,
    /// It is part of something large, and must not delay others.
    pub bulk: bool,
    /// The frame.
    pub bytes: Bytes,
}

/// What this node's clients are to be told, or what became of the node itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// Of the replicated state.
    Machine(Event),
    /// A job asked for by [`Replica::read_job`] may look at the state now; `false`: it never will.
    Job(u64, bool),
    /// What an admin asked for is done or refused.
    Admin(u64, AdminResult),
    /// This node leads, and has decided what an admin asked of another member.
    Decided {
        /// The member that passed it on.
        origin: RaftId,
        /// What was asked for.
        request: AdminRequest,
        /// Whether it was done.
        done: bool,
    },
    /// The others gave this node up: all its connections are void, and it begins a new life.
    NewRun(Run),
    /// A received snapshot jumped over entries: pushes in them were never seen here.
    Skipped,
    /// Whom there is to talk to, as long as this node's own state does not say.
    Peers(BTreeMap<RaftId, Member>),
}

/// A request that was accepted here and is not answered.
struct Pending {
    seq: u64,
    /// When its wait should be over.
    cancel_at: Option<Timestamp>,
    give_up_at: Timestamp,
    /// Its client was told that nobody knows.
    given_up: bool,
    /// The client can repeat it and gets the same answer then.
    keep: bool,
}

struct Read {
    what: ReadWhat,
    /// Items of this node that must be applied before.
    after_seq: u64,
    give_up_at: Timestamp,
}

enum ReadWhat {
    Query { session: SessionId, request: RequestId, query: OwnedQuery },
    Job(u64),
}

/// A [`Query`] that can wait.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OwnedQuery {
    /// The value of a counter.
    Counter(Vec<u8>),
    /// The value of a KV entry.
    Kv(Vec<u8>),
    /// A KV entry with its revision.
    Entry(Vec<u8>),
    /// The length of a list.
    Length(Vec<u8>),
    /// Items of a list.
    Range(Vec<u8>, i64, i64),
}

impl From<Query<'_>> for OwnedQuery {
    fn from(query: Query<'_>) -> Self {
        match query {
            Query::Counter { key } => Self::Counter(key.to_vec()),
            Query::Kv { key } => Self::Kv(key.to_vec()),
            Query::Entry { key } => Self::Entry(key.to_vec()),
            Query::Length { key } => Self::Length(key.to_vec()),
            Query::Range { key, start, stop } => Self::Range(key.to_vec(), start, stop),
        }
    }
}

impl OwnedQuery {
    fn borrow(&self) -> Query<'_> {
        match self {
            Self::Counter(key) => Query::Counter { key },
            Self::Kv(key) => Query::Kv { key },
            Self::Entry(key) => Query::Entry { key },
            Self::Length(key) => Query::Length { key },
            Self::Range(key, start, stop) => Query::Range { key, start: *start, stop: *stop },
        }
    }
}

/// The time as a leader counts it.
struct Reign {
    term: u64,
    /// Cluster time when it began.
    base: Timestamp,
    /// Local time when it began.
    since: Timestamp,
    /// The entry that opens it, once proposed. Clients' batches wait until it is applied.
    opening: Option<u64>,
}

/// What a node is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// leader, follower, candidate or pre-candidate.
    pub role: &'static str,
    /// Raft's.
    pub term: u64,
    /// Who leads.
    pub leader: Option<RaftId>,
    /// The last entry known to be committed.
    pub commit: u64,
    /// The last entry that is applied.
    pub applied: u64,
    /// The last entry.
    pub last: u64,
    /// The entry up to which there is a snapshot.
    pub snapshot: u64,
    /// This life has begun for all, and what was committed when last heard of the leader is applied.
    pub ready: bool,
    /// An operator wants it not to lead.
    pub drained: bool,
}

/// A member of a cluster.
pub struct Replica {
    config: ReplicaConfig,
    consensus: Consensus,
    machine: Machine,
    applied: u64,
    now: Timestamp,
    /// The time of the last entry that was applied, and when that was seen here.
    stamped: (Timestamp, Timestamp),
    next_tick: Timestamp,
    /// The highest cluster time in the log or told by a leader of this term.
    time_seen: Timestamp,
    reign: Option<Reign>,

    // The accepting side.
    run: Run,
    /// The number of the write after which the run may be told to others.
    run_noted: Option<u64>,
    next_seq: u64,
    open_batch: (u16, Vec<u8>),
    /// Not applied yet, in order; the first may be in part.
    unapplied: VecDeque<Batch>,
    backlog_bytes: usize,
    /// To whom what was sent: leader and term.
    sent_to: Option<(RaftId, u64)>,
    next_send: u64,
    /// When something was last applied or sent again.
    progress_at: Timestamp,
    pending: BTreeMap<(SessionId, RequestId), Pending>,
    looked_at: Timestamp,
    reads: Vec<Read>,
    reads_asked: BTreeMap<u64, (Timestamp, Vec<Read>)>,
    /// Leader and term.
    reads_asked_of: Option<(RaftId, u64)>,
    reads_confirmed: BTreeMap<u64, Vec<Read>>,
    last_read: u32,

    // The leader's side.
    expected: BTreeMap<Run, u64>,
    proposals: VecDeque<Batch>,
    proposal_bytes: usize,
    /// Came before the reign was open.
    early: Vec<(RaftId, Batch)>,
    early_bytes: usize,
    orders: Vec<Order>,
    tick_index: u64,
    /// Of the last version that this node proposed by itself.
    version_index: u64,
    stamped_at: Timestamp,
    heard: BTreeMap<RaftId, Timestamp>,
    /// When a member last answered this leader, which shows that frames pass in both directions.
    answered: BTreeMap<RaftId, Timestamp>,
    lost_proposed: Option<(Run, u64)>,

    // Writing.
    last_number: u64,
    unwritten: VecDeque<Unwritten>,
    notes: Vec<(Vec<u8>, Vec<u8>)>,
    room_low: bool,

    // Snapshots.
    making_snapshot: bool,
    bytes_since_snapshot: u64,
    digests: BTreeMap<u64, [u8; 32]>,
    told_digests: BTreeMap<u64, [u8; 32]>,
    transfers: Transfers,

    admins: Admins,
    /// An operator wants this node not to lead.
    drained: bool,
    /// How long nobody has led meanwhile.
    drained_ticks: u32,
    /// The leader whose process is known to be gone.
    lost_leader: Option<RaftId>,
    /// The log's end was cut at the start: no vote until this node has what a leader has committed.
    wary: bool,
    wary_ticks: u32,
    /// The number of the write with a received snapshot. Until it is done the library believes in a log that
    /// is gone, so this
    /// node does not want to lead.
    installing: Option<u64>,
    /// What a leader was last heard to have committed.
    leader_commit: u64,
    events: Vec<Event>,
    queue: Vec<NodeEvent>,
    fatal: Option<String>,
}

struct Unwritten {
    /// Of the write.
    number: u64,
    /// Of the library's Ready; 0 if there is none.
    ready: u64,
    since: Timestamp,
    messages: Vec<Message>,
}

impl Replica {
    /// A member that goes on from what its log has.
    ///
    /// # Errors
    ///
    /// If that is not consistent.
    pub fn new(
        config: ReplicaConfig,
        recovered: Recovered,
        now: Timestamp,
    ) -> Result<Self, String> {
        let (metadata, data) = match recovered.snapshot {
            Some(snapshot) => (snapshot.metadata, snapshot.data),
            None => (SnapshotMetadata::default(), Bytes::new()),
        };
        let machine = if data.is_empty() {
            Machine::new([0; 16], BTreeMap::new())
        } else {
            Machine::restore(&data, config.witness)?
        };
        let applied = metadata.index;
        let stamps = recovered.entries.iter().filter_map(stamp_of).max();
        let time_seen = stamps.max(Some(machine.now())).unwrap_or_default();
        let wary = recovered.cut || recovered.notes.contains_key(note::WARY);
        let tail = Tail::new(recovered.hard_state, metadata, data, recovered.entries)?;
        let consensus =
            Consensus::new(&config.raft, tail).map_err(|error| format!("raft: {error}"))?;
        let alone = is_alone(&consensus, config.raft.id);
        let mut replica = Self {
            run: config.run,
            consensus,
            machine,
            applied,
            now,
            stamped: (Timestamp(0), now),
            next_tick: now + TICK,
            time_seen,
            reign: None,
            run_noted: None,
            next_seq: 1,
            open_batch: (0, Vec::new()),
            unapplied: VecDeque::new(),
            backlog_bytes: 0,
            sent_to: None,
            next_send: 1,
            progress_at: now,
            pending: BTreeMap::new(),
            looked_at: now,
            reads: Vec::new(),
            reads_asked: BTreeMap::new(),
            reads_asked_of: None,
            reads_confirmed: BTreeMap::new(),
            last_read: 0,
            expected: BTreeMap::new(),
            proposals: VecDeque::new(),
            proposal_bytes: 0,
            early: Vec::new(),
            early_bytes: 0,
            orders: Vec::new(),
            tick_index: 0,
            version_index: 0,
            stamped_at: Timestamp(0),
            heard: BTreeMap::new(),
            answered: BTreeMap::new(),
            lost_proposed: None,
            last_number: 0,
            unwritten: VecDeque::new(),
            notes: Vec::new(),
            room_low: false,
            making_snapshot: false,
            bytes_since_snapshot: 0,
            digests: BTreeMap::new(),
            told_digests: BTreeMap::new(),
            transfers: Transfers::default(),
            admins: Admins::default(),
            drained: false,
            drained_ticks: 0,
            lost_leader: None,
            // Nobody else could tell a single voter what it has lost.
            wary: wary && !alone,
            wary_ticks: 0,
            installing: None,
            leader_commit: 0,
            events: Vec::new(),
            queue: Vec::new(),
            fatal: None,
            config,
        };
        if recovered.cut && replica.wary {
            replica.notes.push((note::WARY.to_vec(), vec![1]));
        }
        if alone {
            // Nobody to wait for.
            replica.consensus.hurry(0);
        }
        replica.begin_run();
        Ok(replica)
    }

    /// Time has passed. To be called before any other input of that instant, and at [`Replica::next_deadline`].
    pub fn handle_time(&mut self, now: Timestamp) {
        let stood_still = now.since(self.now);
        self.now = now;
        if self.stamped.0 != self.machine.now() {
            self.stamped = (self.machine.now(), now);
        }
        self.machine.show(self.stamped.0 + now.since(self.stamped.1));
        if stood_still > self.election_timeout() {
            // Others may have elected somebody meanwhile: nothing may be stamped on the strength of the old leadership,
            // and time that was not lived through is no reason to suspect anybody.
            if self.consensus.is_leader() && !is_alone(&self.consensus, self.id()) {
                tracing::warn!(ms = stood_still.0 / 1_000_000, "stood still; leadership given up");
                self.consensus.step_down();
            }
            self.next_tick = now + TICK;
            self.tick();
        }
        while self.next_tick <= now {
            self.next_tick = self.next_tick + TICK;
            self.tick();
        }
        if now.since(self.looked_at) >= LOOK {
            self.looked_at = now;
            self.look_after_requests();
            self.look_after_reads();
            self.look_after_leadership();
            let lost = self.transfers.look(now);
            for to in lost {
                self.consensus.report_snapshot(to, false);
            }
            let outcomes = self.admins.look(now);
            self.queue
                .extend(outcomes.into_iter().map(|(id, result)| NodeEvent::Admin(id, result)));
        }
    }

    fn tick(&mut self) {
        if self.wary || self.installing.is_some() {
            self.consensus.calm();
        }
        if self.drained {
            self.stand_back();
        }
        self.consensus.tick();
        if !self.wary {
            return;
        }
        self.wary_ticks += 1;
        if self.wary_ticks > WARY_TICKS_MAX {
            // What was cut had not been synced, so nobody was told of it unless the disk lied. If all members
            // lost power together, all are wary, and somebody must begin.
            tracing::warn!("no leader to be level with; this node votes with what it has");
            self.trust_log();
        }
    }

    /// Leaves leading to others. If none of them does for long, it is better than nobody.
    fn stand_back(&mut self) {
        let silent = self.consensus.misses_leader();
        self.drained_ticks = if silent { self.drained_ticks + 1 } else { 0 };
        if self.drained_ticks <= WARY_TICKS_MAX {
            self.consensus.hold_back();
        }
    }

    /// A frame of another member, whose identity is certain.
    pub fn handle_frame(&mut self, from: RaftId, bytes: Bytes) {
        let frame = match Frame::decode(bytes) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(from, %error, "a frame that makes no sense");
                return;
            }
        };
        // Its connection is about to be closed. A number that is not known is of a member that was added by entries
        // which this node has not seen, and which may lead by now.
        let was_removed = self.machine.was_removed(from) && !self.machine.members().is_empty();
        if was_removed && from != 0 && !matches!(frame, Frame::Raft { .. }) {
            return;
        }
        self.heard.insert(from, self.now);
        match frame {
            Frame::Raft { time, message } => self.handle_message(from, time, message),
            Frame::Forward(batch) => {
                if self.machine.members().contains_key(&from) && batch.run.raft_id() == from {
                    self.handle_forward(from, batch);
                }
            }
            Frame::Expect { term, run, seq } => {
                if run == self.run && self.sent_to == Some((from, term)) {
                    self.next_send = seq;
                    self.progress_at = self.now;
                }
            }
            Frame::Chunk { transfer, offset, total, digest, keep_only, header, data } => {
                let complete = self
                    .transfers
                    .receive(from, transfer, offset, total, digest, keep_only, header, &data);
                if let Some(complete) = complete {
                    self.handle_transferred(from, complete);
                }
            }
            Frame::ChunkAck { transfer, received } => {
                if self.transfers.acknowledged(from, transfer, received, self.now) {
                    self.consensus.report_snapshot(from, true);
                }
            }
            Frame::Admin { id, request } => {
                if self.machine.members().contains_key(&from)
                    && let Ok(request) = codec::unpack::<AdminRequest>(&request)
                {
                    self.admins.forwarded(from, id, request);
                }
            }
            Frame::Members { members } => {
                if self.machine.members().is_empty()
                    && let Ok(members) = codec::unpack::<BTreeMap<RaftId, Member>>(&members)
                {
                    self.queue.push(NodeEvent::Peers(members));
                }
            }
            Frame::AdminReply { id, reply } => {
                let Ok(reply) = codec::unpack::<AdminResult>(&reply) else { return };
                let own = self.machine.members().get(&self.id()).map(|member| &*member.node);
                if reply.is_ok() && own.is_some_and(|node| self.admins.asks_to_remove(id, node)) {
                    // Nobody sends the entry that says so any more.
                    self.fatal = Some(REMOVED.into());
                }
                if let Some(result) = self.admins.answered(id, reply) {
                    self.queue.push(NodeEvent::Admin(id, result));
                }
            }
        }
    }

    /// Log writes up to this number are done, durable where that was asked.
    pub fn handle_written(&mut self, number: u64) {
        let mut ready = 0;
        while let Some(write) = self.unwritten.front()
            && write.number <= number
        {
            let write = self.unwritten.pop_front().expect("just seen");
            ready = ready.max(write.ready);
            self.transfers.messages.extend(write.messages);
        }
        if ready > 0 {
            self.consensus.persisted(ready);
            self.consensus.applied(self.applied);
        }
        if self.installing.is_some_and(|installing| installing <= number) {
            self.installing = None;
        }
        if self.run_noted.is_some_and(|noted| noted <= number) {
            self.run_noted = None;
        }
    }

    /// A snapshot was made and stored; none: there was no room for it.
    pub fn handle_snapshot(&mut self, made: Option<MadeSnapshot>, outputs: &mut Outputs) {
        self.making_snapshot = false;
        if made.is_none() {
            let full = || Err("there is no room for a snapshot on the disk".to_owned());
            let waiting = self.admins.forget_snapshots();
            self.queue.extend(waiting.map(|id| NodeEvent::Admin(id, full())));
        }
        let Some(MadeSnapshot { metadata, data, digest }) = made else { return };
        let index = metadata.index;
        if index <= self.consensus.tail().snapshot.index {
            return;
        }
        // Some entries stay for members that are a little behind.
        let cut = index.saturating_sub(self.config.snapshot_entries / 4).max(1);
        let cut = cut.max(self.consensus.tail().first() - 1).min(index);
        let since = self.consensus.tail().slice(index + 1, self.applied + 1);
        self.bytes_since_snapshot = since.map(|entry| entry.data.len() as u64).sum();
        outputs.gone = Some(self.consensus.tail_mut().compact(metadata, data, cut));
        outputs.cut_before = Some(cut + 1);
        self.digests.insert(index, digest);
        while self.digests.len() > 8 {
            self.digests.pop_first();
        }
        self.compare_digests(index);
        if self.consensus.is_leader() {
            self.orders.push(Order::Digest { index, digest });
            self.copy_to_witnesses();
        }
    }

    /// The disk has only its reserve left, or has room again.
    pub fn handle_room(&mut self, low: bool) {
        if low != self.room_low {
            tracing::warn!(low, "room for the log");
        }
        self.room_low = low;
    }

    /// The connection to a member broke; `refused`: its process is gone.
    pub fn handle_unreachable(&mut self, peer: RaftId, refused: bool) {
        self.consensus.report_unreachable(peer);
        if !refused {
            return;
        }
        self.answered.remove(&peer);
        match self.consensus.leader() {
            Some(leader) if leader == peer => self.lost_leader = Some(peer),
            Some(_) => return,
            None if self.lost_leader == Some(peer) => {}
            None => return,
        }
        let voters = self.consensus.conf_state().voters;
        let mut others: Vec<RaftId> = voters.into_iter().filter(|&id| id != peer).collect();
        others.sort_unstable();
        // The followers must not fire together. A witness goes last.
        if let Some(rank) = others.iter().position(|&id| id == self.id())
            && !self.config.witness
            && !self.wary
            && !self.drained
            && self.installing.is_none()
        {
            self.consensus.hurry(rank * 10);
        }
    }

    /// Accepts what a client asks for. `wait` is how long the request may block, none if it is not answered at all.
    /// False: it is refused, nothing will come of it.
    pub fn submit(&mut self, item: &Item<'_>, wait: Option<Span>) -> bool {
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, item);
        let Item { session, request, keep, ref action, .. } = *item;
        self.submit_encoded(&bytes, session, request, keep, wait, urgency(action))
    }

    /// The same for an item that has the form of the log already.
    pub fn submit_encoded(
        &mut self,
        item: &[u8],
        session: SessionId,
        request: RequestId,
        keep: bool,
        wait: Option<Span>,
        urgency: Urgency,
    ) -> bool {
        let refused = self.config.witness
            || !urgency.fits(self.backlog_bytes, BACKLOG_BYTES_MAX)
            || self.room_low && urgency == Urgency::Grows;
        if refused {
            return false;
        }
        self.push_encoded(item);
        if let Some(wait) = wait {
            let end = self.now + wait;
            let pending = Pending {
                seq: self.next_seq - 1,
                cancel_at: (wait > Span::ZERO).then(|| end + CANCEL),
                give_up_at: end + GIVE_UP,
                given_up: false,
                keep,
            };
            self.pending.insert((session, request), pending);
        }
        true
    }

    /// Answers a read when it is certain to see everything that was done before.
    pub fn read(&mut self, session: SessionId, request: RequestId, query: OwnedQuery) {
        self.add_read(ReadWhat::Query { session, request, query });
    }

    /// Says by [`NodeEvent::Job`] when the state may be looked at, likewise.
    pub fn read_job(&mut self, id: u64) {
        self.add_read(ReadWhat::Job(id));
    }

    /// Asks for a change of the cluster, which the leader decides. Answered by [`NodeEvent::Admin`].
    /// What concerns this node alone it does itself.
    pub fn admin(&mut self, id: u64, request: AdminRequest) {
        if let Some(request) = self.admin_here(id, request) {
            self.admins.ask(id, request, self.now);
        }
    }

    /// When to call [`Replica::handle_time`] at the latest.
    #[must_use]
    pub fn next_deadline(&self) -> Timestamp {
        let due = self.reign.as_ref().and_then(|reign| {
            let at = self.machine.next_deadline()?;
            Some(reign.since + at.since(reign.base))
        });
        let in_flight = self.tick_index > self.applied;
        due.filter(|_| !in_flight).map_or(self.next_tick, |due| due.min(self.next_tick))
    }

    /// The replicated state.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// This member.
    #[must_use]
    pub fn id(&self) -> RaftId {
        self.config.raft.id
    }

    /// The life this node is in.
    #[must_use]
    pub fn run(&self) -> Run {
        self.run
    }

    /// Voters and learners, as of the last applied entry.
    #[must_use]
    pub fn conf_state(&self) -> ConfState {
        self.consensus.conf_state()
    }

    /// The newest snapshot.
    #[must_use]
    pub fn snapshot_metadata(&self) -> &SnapshotMetadata {
        &self.consensus.tail().snapshot
    }

    /// How things stand.
    #[must_use]
    pub fn status(&self) -> Status {
        let leader = self.consensus.leader();
        let begun =
            self.config.witness || self.machine.applied_seq(self.run).is_some_and(|seq| seq > 0);
        Status {
            role: self.consensus.role(),
            term: self.consensus.term(),
            leader,
            commit: self.consensus.commit(),
            applied: self.applied,
            last: self.consensus.tail().last(),
            snapshot: self.consensus.tail().snapshot.index,
            ready: leader.is_some()
                && begun
                && self.applied >= self.leader_commit
                && !self.machine.is_settling(),
            drained: self.drained,
        }
    }

    /// On the leader, how many entries each other member has not confirmed.
    pub fn lags(&self) -> Vec<(RaftId, u64)> {
        let last = self.consensus.tail().last();
        let others = self.machine.members().keys().filter(|&&id| id != self.id());
        let lag = |&id| Some((id, last.saturating_sub(self.consensus.progress(id)?.0)));
        others.filter_map(lag).collect()
    }

    /// The newest cluster time that was seen here.
    pub fn time_seen(&self) -> Timestamp {
        self.time_seen
    }

    /// The index and term of each entry in memory, for those who check that logs agree.
    pub fn log_terms(&self) -> impl Iterator<Item = (u64, u64)> {
        let tail = self.consensus.tail();
        (tail.first()..=tail.last()).filter_map(|index| Some((index, tail.term_at(index)?)))
    }

    /// What is to be done now.
    pub fn poll(&mut self, outputs: &mut Outputs) {
        // Applying an entry can make new work (a next tick, an answer to take back), so until there is none.
        loop {
            self.lead();
            self.forward(outputs);
            self.ask_reads();
            self.serve_admins(outputs);
            let mut any = false;
            while self.consensus.has_ready() && self.fatal.is_none() {
                any = true;
                self.process_ready(outputs);
            }
            self.answer_reads();
            if !any {
                break;
            }
        }
        if self.consensus.tail().is_wanted() {
            self.make_snapshot(outputs);
        }
        self.serve_snapshots(outputs);
        let to_keep = self.transfers.to_keep.take();
        if !self.notes.is_empty() || to_keep.is_some() {
            self.write(LogBatch::default(), to_keep, true, 0, Vec::new(), outputs);
        }
        let messages = std::mem::take(&mut self.transfers.messages);
        self.send(messages, outputs);
        self.transfers.send(outputs);
        outputs.events.append(&mut self.queue);
        outputs.fatal = self.fatal.take().or(outputs.fatal.take());
    }

    fn election_timeout(&self) -> Span {
        Span(TICK.0 * self.config.raft.election_ticks as u64)
    }

    // ---- Raft ----

    fn handle_message(&mut self, from: RaftId, time: Timestamp, mut message: Message) {
        if message.msg_type == MessageType::MsgHeartbeat {
            // Of a leader that does not know yet that the end of this log was cut.
            message.commit = message.commit.min(self.consensus.last_index());
        }
        if message.from != from || message.to != self.id() || !self.may_speak(from, &message) {
            return;
        }
        let from_leader = matches!(
            message.msg_type,
            MessageType::MsgAppend | MessageType::MsgHeartbeat | MessageType::MsgSnapshot
        );
        let (term, commit) = (message.term, message.commit);
        let is_append = message.msg_type == MessageType::MsgAppend;
        let is_answer = matches!(
            message.msg_type,
            MessageType::MsgAppendResponse | MessageType::MsgHeartbeatResponse
        );
        if is_answer && self.consensus.is_leader() && self.consensus.term() == term {
            self.answered.insert(from, self.now);
        }
        self.consensus.step(message);
        if from_leader && self.consensus.term() == term {
            self.lost_leader = None;
            self.wary_ticks = 0;
            self.time_seen = self.time_seen.max(time);
            if is_append {
                self.leader_commit = self.leader_commit.max(commit);
            }
        }
    }

    /// Whether a message may have any influence, before it can change a term or a vote.
    fn may_speak(&self, from: RaftId, message: &Message) -> bool {
        if self.machine.was_removed(from) && !self.machine.members().is_empty() {
            return false;
        }
        let may_lead = self.installing.is_none() && !self.drained;
        if message.msg_type == MessageType::MsgTimeoutNow && !may_lead {
            return false;
        }
        let is_vote = matches!(
            message.msg_type,
            MessageType::MsgRequestVote | MessageType::MsgRequestPreVote
        );
        if !is_vote {
            return true;
        }
        !self.wary && self.consensus.is_voter(from)
    }

    fn process_ready(&mut self, outputs: &mut Outputs) {
        let mut ready = self.consensus.ready();
        let number = ready.number();
        for read in ready.take_read_states() {
            if let Ok(context) = read.request_ctx.as_slice().try_into() {
                self.confirm_read(u64::from_le_bytes(context), read.index);
            }
        }
        self.send(ready.take_messages(), outputs);
        let mut received = None;
        if ready.snapshot().get_metadata().index > 0 {
            let snapshot = ready.snapshot().clone();
            let metadata = snapshot.get_metadata().clone();
            self.install(metadata.clone(), snapshot.data.clone());
            received = Some(ReceivedSnapshot { metadata, data: snapshot.data, install: true });
        }
        for entry in ready.take_committed_entries() {
            self.apply(&entry, outputs);
        }
        if self.fatal.is_some() {
            return;
        }
        let entries = ready.take_entries();
        for stamp in entries.iter().filter_map(stamp_of) {
            self.time_seen = self.time_seen.max(stamp);
        }
        let sync = ready.must_sync();
        let hard_state = ready.hs().cloned();
        let tail = self.consensus.tail_mut();
        tail.append(&entries);
        if let Some(hard_state) = &hard_state {
            tail.hard_state = hard_state.clone();
        }
        let messages = ready.take_persisted_messages();
        self.consensus.advance(ready);
        self.consensus.applied(self.applied);
        let hard_state = hard_state.filter(|_| !bug(Bug::VoteNotKept));
        if bug(Bug::CountedBeforeSync) {
            self.consensus.persisted(number);
        }
        let batch = LogBatch { entries, hard_state, ..LogBatch::default() };
        let nothing = batch.entries.is_empty()
            && batch.hard_state.is_none()
            && received.is_none()
            && self.notes.is_empty();
        if nothing && self.unwritten.is_empty() {
            self.consensus.persisted(number);
            self.send(messages, outputs);
        } else {
            self.write(batch, received, sync, number, messages, outputs);
        }
    }

    /// Hands something to the log. `messages` leave when it is there.
    fn write(
        &mut self,
        mut batch: LogBatch,
        snapshot: Option<ReceivedSnapshot>,
        sync: bool,
        ready: u64,
        messages: Vec<Message>,
        outputs: &mut Outputs,
    ) {
        self.last_number += 1;
        let number = self.last_number;
        if snapshot.as_ref().is_some_and(|snapshot| snapshot.install) {
            self.installing = Some(number);
        }
        let mut messages = messages;
        if bug(Bug::AckBeforeSync) {
            self.send(std::mem::take(&mut messages), outputs);
        }
        batch.notes = std::mem::take(&mut self.notes);
        let sync = sync || !batch.notes.is_empty();
        self.unwritten.push_back(Unwritten { number, ready, since: self.now, messages });
        outputs.writes.push(LogWrite { number, sync, batch, snapshot });
    }

    fn send(&mut self, messages: Vec<Message>, outputs: &mut Outputs) {
        let time = self.cluster_time().unwrap_or_default();
        for mut message in messages {
            let to = message.to;
            if message.msg_type == MessageType::MsgSnapshot {
                let data = message.mut_snapshot().take_data();
                let header = codec::encode_message(&message);
                self.transfers.begin(to, header, data, false, self.now);
                continue;
            }
            let bytes = Frame::Raft { time, message }.encode();
            outputs.frames.push(Outgoing { to, bulk: false, bytes });
        }
    }

    // ---- Applying ----

    fn apply(&mut self, entry: &Entry, outputs: &mut Outputs) {
        if self.fatal.is_some() {
            return;
        }
        let change = change_of(entry);
        if let Some(change) = &change
            && let Err(error) = self.consensus.apply_change(change)
        {
            self.fatal = Some(format!("entry {}: {error}", entry.index));
            return;
        }
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = apply_entry(&mut self.machine, entry, &mut events) {
            self.fatal = Some(format!("entry {}: {error}", entry.index));
            return;
        }
        self.applied = entry.index;
        self.bytes_since_snapshot += entry.data.len() as u64;
        for event in events.drain(..) {
            self.handle_event(event);
        }
        self.events = events;
        for decided in self.admins.applied(entry, change.is_some(), &self.machine) {
            self.answer_admin(decided, outputs);
        }
        self.forget_applied();
        if self.wary && self.leader_commit > 0 && self.applied >= self.leader_commit {
            tracing::info!("level with the leader again; this node votes");
            self.trust_log();
        }
        let due = entry.index.is_multiple_of(self.config.snapshot_entries)
            || self.bytes_since_snapshot >= self.config.snapshot_bytes;
        if due {
            self.make_snapshot(outputs);
        }
    }

    fn trust_log(&mut self) {
        self.wary = false;
        self.notes.push((note::WARY.to_vec(), Vec::new()));
    }

    fn handle_event(&mut self, event: Event) {
        match &event {
            Event::Effect(Effect::Reply { session, request, outcome }) => {
                if let Some(pending) = self.pending.remove(&(*session, *request))
                    && pending.given_up
                {
                    if !pending.keep || bug(Bug::UndoKept) {
                        self.take_back(*session, outcome.clone());
                    }
                    return;
                }
            }
            Event::Attached { by, request, .. } => {
                self.pending.remove(&(*by, *request));
            }
            Event::Gone { session, request, .. } => {
                self.pending.remove(&(*session, *request));
            }
            // A node that was removed ends with its run, and has something to tell its clients before.
            Event::RunEnded(run)
                if *run == self.run
                    && !bug(Bug::RunKept)
                    && !self.machine.was_removed(self.id()) =>
            {
                self.lose_run();
            }
            Event::RunStarted(run) if run.raft_id() == self.id() && *run > self.run => {
                self.fatal = Some(
                    "the cluster knows a later start of this node: its data directory is an old copy; \
                     remove the node and let it join under a new id"
                        .into(),
                );
            }
            Event::Members => {
                let removed = self.machine.was_removed(self.id());
                if removed && !self.machine.members().is_empty() {
                    let done = self.admins.removed(|node| self.machine.is_retired(node));
                    self.queue.extend(done.into_iter().map(|id| NodeEvent::Admin(id, Ok(()))));
                    self.fatal = Some(REMOVED.into());
                }
            }
            Event::Digest { index, digest } => {
                self.told_digests.insert(*index, *digest);
                while self.told_digests.len() > 8 {
                    self.told_digests.pop_first();
                }
                self.compare_digests(*index);
            }
            Event::PolicyChanged => {
                let (version, known) = (self.machine.version(), self.config.start.version);
                if version > known {
                    self.fatal = Some(format!(
                        "the cluster has version {version}, this server knows up to {known}; start a newer one"
                    ));
                }
            }
            Event::Effect(_) | Event::Kicked { .. } | Event::RunStarted(_) | Event::RunEnded(_) => {
            }
        }
        self.queue.push(NodeEvent::Machine(event));
    }

    fn compare_digests(&mut self, index: u64) {
        if let (Some(own), Some(told)) = (self.digests.get(&index), self.told_digests.get(&index))
            && own != told
        {
            self.fatal = Some(format!(
                "the state at entry {index} differs from the leader's; remove this node and let it join anew"
            ));
        }
    }

    /// A snapshot of somebody else replaces the state: what it skipped was never seen here.
    fn install(&mut self, metadata: SnapshotMetadata, data: Bytes) {
        match Machine::restore(&data, self.config.witness) {
            Ok(mut machine) => {
                machine.continue_tally(&self.machine);
                self.machine = machine;
            }
            Err(error) => {
                self.fatal = Some(format!("a received snapshot can not be used: {error}"));
                return;
            }
        }
        self.applied = metadata.index;
        self.bytes_since_snapshot = 0;
        self.time_seen = self.time_seen.max(self.machine.now());
        self.consensus.tail_mut().install(metadata, data);
        self.queue.push(NodeEvent::Machine(Event::Members));
        self.queue.push(NodeEvent::Skipped);
        match self.machine.newest_run(self.id()) {
            Some(run) if run > self.run => {
                self.handle_event(Event::RunStarted(run));
                return;
            }
            Some(run) if run == self.run && self.machine.run_of(self.id()).is_none() => {
                self.lose_run();
                return;
            }
            _ => {}
        }
        self.forget_applied();
        let applied = self.machine.applied_seq(self.run).unwrap_or(0);
        let seen: Vec<_> = self
            .pending
            .iter()
            .filter(|(_, pending)| pending.seq <= applied)
            .map(|(&key, _)| key)
            .collect();
        for (session, request) in seen {
            let progress = self.machine.store().map(|store| store.progress(session, request));
            let outcome = match progress {
                Some(Progress::Waiting) => continue,
                Some(Progress::Answered(outcome)) => outcome,
                Some(Progress::Unknown) | None => Outcome::Refused(Refusal::Forgotten),
            };
            let effect = Effect::Reply { session, request, outcome };
            self.handle_event(Event::Effect(effect));
        }
    }

    fn make_snapshot(&mut self, outputs: &mut Outputs) {
        let tail = self.consensus.tail();
        if self.making_snapshot || self.config.witness || self.applied <= tail.snapshot.index {
            return;
        }
        let mut metadata = SnapshotMetadata { index: self.applied, ..Default::default() };
        metadata.term = tail.term_at(self.applied).expect("just applied");
        metadata.set_conf_state(self.consensus.conf_state());
        if bug(Bug::StaleMembers) {
            metadata.set_conf_state(tail.snapshot.get_conf_state().clone());
        }
        let entries = tail.slice(tail.snapshot.index + 1, self.applied + 1).cloned().collect();
        let base = tail.snapshot_data.clone();
        outputs.snapshot_job = Some(SnapshotJob { base, entries, metadata });
        self.making_snapshot = true;
        self.bytes_since_snapshot = 0;
    }

    /// A whole snapshot has come from another member.
    fn handle_transferred(&mut self, from: RaftId, complete: Complete) {
        let Complete { header, data, keep_only } = complete;
        let Ok(mut message) = codec::decode_message(&header) else { return };
        if !keep_only {
            message.mut_snapshot().data = data;
            self.handle_message(from, Timestamp(0), message);
            return;
        }
        let metadata = message.get_snapshot().get_metadata().clone();
        let tail = self.consensus.tail();
        let known = metadata.index <= tail.last()
            && metadata.index <= self.applied
            && metadata.index > tail.snapshot.index;
        if self.config.witness && known {
            let index = metadata.index;
            self.transfers.to_keep = Some(ReceivedSnapshot {
                metadata: metadata.clone(),
                data: data.clone(),
                install: false,
            });
            drop(self.consensus.tail_mut().compact(metadata, data, index));
        }
    }

    fn copy_to_witnesses(&mut self) {
        let witnesses: Vec<RaftId> = self
            .machine
            .members()
            .iter()
            .filter(|(_, member)| member.witness)
            .map(|(&id, _)| id)
            .collect();
        for to in witnesses {
            let tail = self.consensus.tail();
            let mut message = Message { msg_type: MessageType::MsgSnapshot, ..Message::default() };
            message.to = to;
            message.from = self.id();
            message.term = self.consensus.term();
            message.mut_snapshot().set_metadata(tail.snapshot.clone());
            let data = tail.snapshot_data.clone();
            self.transfers.begin(to, codec::encode_message(&message), data, true, self.now);
        }
    }
}

/// Applies a committed entry of any kind.
///
/// # Errors
///
/// If it can not be read, which must not be.
pub fn apply_entry(
    machine: &mut Machine,
    entry: &Entry,
    events: &mut Vec<Event>,
) -> Result<(), String> {
    match change_of(entry) {
        Some(change) => machine.apply_change(change, events),
        None if entry.entry_type != raft::eraftpb::EntryType::EntryNormal => {
            return Err("a change of the membership that makes no sense".into());
        }
        None if entry.data.is_empty() => {}
        None => machine.apply(&entry.data, events).map_err(|error| error.to_string())?,
    }
    Ok(())
}

fn stamp_of(entry: &Entry) -> Option<Timestamp> {
    codec::stamp_of(&entry.data).ok()
}

fn digest_of(data: &[u8]) -> [u8; 32] {
    let digest = digest::digest(&digest::SHA256, data);
    digest.as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn is_alone(consensus: &Consensus, id: RaftId) -> bool {
    consensus.conf_state().voters == [id]
}

/// When an item is refused because there is too much to do.
pub fn urgency(action: &Action<'_>) -> Urgency {
    match action {
        Action::Command(command) => command.urgency(),
        Action::Keep { .. } => Urgency::Grows,
        Action::Kick { .. } | Action::End { .. } => Urgency::Keeps,
        Action::Attach { .. } | Action::Barrier => Urgency::Plain,
        Action::Start(_) | Action::Undo(_) | Action::Close { .. } | Action::Addresses(_) => {
            Urgency::Follows
        }
    }
}
