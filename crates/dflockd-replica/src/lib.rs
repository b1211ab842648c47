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

pub mod admin;
pub mod codec;
mod consensus;
pub mod disk;
pub mod log;
pub mod machine;
pub mod policy;
mod replica;
mod transfer;
pub mod types;
pub mod version;

use std::collections::BTreeMap;

use bytes::Bytes;
use dflockd_core::{Query, Span, Timestamp, Urgency};
use raft::eraftpb::{Entry, SnapshotMetadata};
use ring::digest;

use self::admin::{AdminRequest, AdminResult};
pub use self::consensus::{Gone, RaftConfig, change_of};
use self::log::LogBatch;
use self::machine::{Event, Machine};
pub use self::replica::Replica;
use self::types::{Action, Member, Policy, RaftId, Run, Start};

/// One tick of Raft's clock.
pub const TICK: Span = Span::from_millis(10);

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
