//! A member of a cluster, sans-IO: consensus, the replicated state, and the accepting side of clients' commands.
//!
//! A [`Replica`] is a function with memory. It has no thread, no clock, no disk and no network; the node around it
//! brings inputs and carries out [`Outputs`]. Any thread may drive it, one at a time. In the server that is
//! `replicated.rs` of the engine, in tests the simulator.
//!
//! ```no_run
//! # use dflockd_core::Timestamp;
//! # use dflockd_replica::{LogWrite, NodeEvent, Outgoing, Outputs, Replica};
//! # trait Node {
//! #     fn now(&self) -> Timestamp;
//! #     fn sleep_until(&mut self, at: Timestamp);
//! #     fn received(&mut self) -> Vec<(u64, bytes::Bytes)>;
//! #     fn synced(&mut self) -> Option<u64>;
//! #     fn send(&mut self, frame: Outgoing);
//! #     fn append(&mut self, write: LogWrite);
//! #     fn deliver(&mut self, event: NodeEvent);
//! # }
//! # fn drive(replica: &mut Replica, node: &mut impl Node) -> Result<(), String> {
//! let mut outputs = Outputs::default();
//! loop {
//!     replica.handle_time(node.now()); // before the other inputs, which have no time of their own
//!     for (from, bytes) in node.received() {
//!         replica.handle_frame(from, bytes);
//!     }
//!     if let Some(number) = node.synced() {
//!         replica.handle_written(number); // of an earlier round
//!     }
//!     replica.poll(&mut outputs);
//!     outputs.frames.drain(..).for_each(|frame| node.send(frame));
//!     outputs.writes.drain(..).for_each(|write| node.append(write));
//!     outputs.events.drain(..).for_each(|event| node.deliver(event));
//!     if let Some(why) = outputs.fatal.take() {
//!         return Err(why);
//!     }
//!     node.sleep_until(replica.next_deadline()); // or until an input comes
//! }
//! # }
//! ```
//!
//! | Input | What has happened |
//! | --- | --- |
//! | [`Replica::handle_time`] | local monotonic time has passed; the only input that takes a time |
//! | [`Replica::handle_frame`] | a frame came from another member, whose identity was proven |
//! | [`Replica::handle_written`] | the log writes up to a number are done |
//! | [`Replica::handle_snapshot`] | a [`SnapshotJob`] was done and its result is stored |
//! | [`Replica::handle_room`] | the disk is nearly full, or is so no more |
//! | [`Replica::handle_unreachable`] | a connection to another member broke |
//! | [`Replica::submit`], [`Replica::submit_encoded`] | a client of this node wants something done |
//! | [`Replica::read`], [`Replica::read_job`] | a client of this node wants to see the state |
//! | [`Replica::admin`] | an operator wants the cluster changed |
//!
//! # What must be durable before what
//!
//! The contract stands on the fields of [`Outputs`] and [`LogWrite`]. In short: frames and events may leave at once,
//! because whatever depends on a write (a vote, an acknowledgement, the first word of a new incarnation) stays inside
//! of the replica until [`Replica::handle_written`]. Writes are done in their order, and reported when they are
//! durable. A write that fails ends the node: nobody can know what of it is on the disk.
//!
//! # A request
//!
//! What a client asks becomes a [`Proposal`](types::Proposal), numbered per incarnation of the node, and goes to the
//! leader in batches, from the leader itself as well. Every member applies every entry, and the node that accepted a
//! request answers it when it applies it. Items that were not applied are sent again, to the member that leads then;
//! the machine takes each number once and in order, so a retry has no second effect.

mod accepting;
mod acknowledging;
pub mod admin;
mod candidacy;
mod changes;
pub mod codec;
mod consensus;
pub mod disk;
mod leading;
pub mod log;
pub mod machine;
pub mod policy;
mod reads;
mod replica;
mod requests;
mod snapshots;
#[cfg(test)]
mod tests;
mod transfer;
pub mod types;
pub mod version;
mod writing;

use bytes::Bytes;
use dflockd_core::{Outcome, Query, RequestId, SessionId, Span, Timestamp, Urgency};
use raft::eraftpb::{Entry, SnapshotMetadata};
use ring::digest;

use self::admin::{AdminRequest, AdminResult};
pub use self::consensus::{Gone, RaftConfig, change_of};
use self::log::LogBatch;
use self::machine::{Event, Machine};
pub use self::replica::Replica;
use self::types::{Bits128, Incarnation, Policy, ProposalBody, RaftId, Start};

/// One tick of Raft's clock.
pub const TICK: Span = Span::from_millis(10);

/// Why a node has no incarnation left: the numbers that a member has are used up.
pub const TOO_MANY_STARTS: &str =
    "this node was started too often; remove it and let a new one take its place";

/// Why a node that is no member any more ends.
const REMOVED: &str = "this node was removed from the cluster";

/// Keys of what a node notes beside its log.
pub mod note {
    /// Who the node is: a [`NodeIdentity`](crate::types::NodeIdentity).
    pub const IDENTITY: &[u8] = b"who";
    /// How often the node was started.
    pub const START: &[u8] = b"start";
    /// The log's end was cut at a start: the node does not vote until it has what the leader has.
    pub const NON_VOTING: &[u8] = b"wary";
}

/// How to run a replica.
pub struct ReplicaConfig {
    /// The settings of the consensus, among them who this member is.
    pub raft: RaftConfig,
    /// Whether this member keeps the log, but no state.
    pub witness: bool,
    /// The policy that this node proposes if it is the first leader of the cluster.
    pub policy: Policy,
    /// The first fence of the cluster, if this node is its first leader.
    pub fence: u64,
    /// The seed of the store's hash maps, if this node is the first leader of the cluster.
    pub seed: u64,
    /// The name of the cluster, if this node leads when it gets one of its own.
    pub cluster: Bits128,
    /// The incarnation of this node. It must be noted durably under [`note::START`] before the replica is made.
    pub run: Incarnation,
    /// What the first item of the incarnation tells the others about this node.
    pub start: Start,
    /// A snapshot is made each time the index is a multiple of this.
    pub snapshot_entries: u64,
    /// A snapshot is made when the log since the last one has this many bytes.
    pub snapshot_bytes: u64,
}

/// One write to the log. The node does all of them in the order of their numbers, and reports the last one that is done
/// by [`Replica::handle_written`].
///
/// Several may be done together and made durable by one sync. A crash may lose any number of unreported writes from the
/// end; of those that were reported with `sync` nothing may be lost, or the node breaks what it promised to others.
pub struct LogWrite {
    /// The place of this write in the order: one more than that of the write before.
    pub number: u64,
    /// Whether this write and all before it must be durable before this number or a higher one is reported. False if
    /// only the commit index has changed: a crash may lose that, since the leader tells it again.
    pub sync: bool,
    /// What to append: entries, the vote and term, notes. It is written as a whole or not at all.
    pub batch: LogBatch,
    /// A snapshot of another member. It must be durable before anything of `batch` is written: with `install` the log
    /// goes on behind it, and entries without the snapshot they follow would be a log with a gap.
    pub snapshot: Option<ReceivedSnapshot>,
}

/// A snapshot from another member.
pub struct ReceivedSnapshot {
    /// The place of the snapshot in the log: index and term, and the members as of there.
    pub metadata: SnapshotMetadata,
    /// The state, as [`Machine::snapshot`] has it.
    pub data: Bytes,
    /// Whether the log is replaced by the snapshot and goes on behind it. Otherwise a witness stores it beside its log,
    /// for others; if there is no room, the older one stays and the write counts as done.
    pub install: bool,
}

/// A snapshot to be made and stored by another thread than the one that drives the replica, because both take long.
///
/// It needs nothing of the replica any more: it has the snapshot before and the entries since. The result is reported
/// by [`Replica::handle_snapshot`] when it is durable.
pub struct SnapshotJob {
    base: Bytes,
    entries: Vec<Entry>,
    metadata: SnapshotMetadata,
}

/// A snapshot that was made.
pub struct MadeSnapshot {
    /// The place of the snapshot in the log: index and term, and the members as of there.
    pub metadata: SnapshotMetadata,
    /// The state, as [`Machine::snapshot`] has it.
    pub data: Bytes,
    /// SHA-256 of `data`. All members compare theirs.
    pub digest: [u8; 32],
}

impl SnapshotJob {
    /// Makes the snapshot: the state of the one before, with the entries since applied to it.
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

/// What [`Replica::poll`] and [`Replica::handle_snapshot`] want done.
///
/// Both only add to what is there, so the node may take the fields out one by one. Between two fields there is no order
/// but the one that their descriptions ask for.
#[derive(Default)]
pub struct Outputs {
    /// Frames for other members, to be sent in order at once: none of them waits for a write in `writes`.
    ///
    /// What other members may rely on only when it is durable here (votes, acknowledgements of entries, batches of a
    /// new incarnation, anything said in a new term) is no output before [`Replica::handle_written`] has reported its
    /// write. A leader's entries are outputs before its own write is done: followers write them at the same time, and
    /// it counts itself only afterwards. It tells that a change of the membership is committed when that is durable
    /// here. A frame may get lost or come late; what matters is sent again.
    pub frames: Vec<Outgoing>,
    /// Writes to the log, to be done in order. See [`LogWrite`] for what must be durable when.
    pub writes: Vec<LogWrite>,
    /// What the clients of this node are to be told, in order and at once.
    ///
    /// Events follow from entries that are committed and durable here as well, or from the snapshot of another member,
    /// which a majority has. So no write in `writes` has to be waited for: a crash between an answer and a write loses
    /// nothing of what was answered. A leader applies a change of the membership only when its commit is durable, too.
    /// That entries are applied is not written down; after a restart they are applied again, and nobody hears of it
    /// twice, because the connections are gone. What the node notes in its log because of an event goes behind
    /// `writes`, which have the commit index that the event follows from.
    pub events: Vec<NodeEvent>,
    /// A snapshot to be made by another thread. A crash may lose it: the log still has everything.
    pub snapshot_job: Option<SnapshotJob>,
    /// The log before this index is no longer needed, because the snapshot reported by [`Replica::handle_snapshot`]
    /// covers it.
    ///
    /// The log is cut only when that snapshot is durable and the log knows of it. A crash before the cut loses nothing
    /// but room on the disk.
    pub truncate_before: Option<u64>,
    /// Memory that the cut has made free. To be dropped where nobody waits: that may take long.
    pub gone: Option<Gone>,
    /// Copies of the newest snapshot, by the number of the [`AdminRequest::Copy`] that asked for it. To be handed out
    /// before `events`, in which the request is answered.
    pub copies: Vec<(u64, StateCopy)>,
    /// Why the node can not go on. It carries out the other outputs or not, as it likes, and must not drive the replica
    /// again.
    pub fatal: Option<String>,
}

/// The whole replicated state at one place of the log.
#[derive(Clone)]
pub struct StateCopy {
    /// The index of the last entry in it.
    pub index: u64,
    /// The term of the last entry in it.
    pub term: u64,
    /// The state, as [`Machine::snapshot`] has it.
    pub data: Bytes,
}

/// A frame for another member.
pub struct Outgoing {
    /// The member that gets the frame.
    pub to: RaftId,
    /// Whether the frame is part of something large, which must not delay other frames: it may be overtaken by them.
    pub bulk: bool,
    /// The encoded [`Frame`](codec::Frame).
    pub bytes: Bytes,
}

/// What this node's clients are to be told, or what became of the node itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NodeEvent {
    /// An event of the replicated state that is no answer.
    Machine(Event),
    /// The answer to a request.
    Reply {
        /// For which session.
        session: SessionId,
        /// To which request.
        request: RequestId,
        /// The answer.
        outcome: Outcome,
        /// What it gives is to be taken back if nobody is there to be told: this node has accepted the request, and no
        /// client can ask for the answer again.
        undo: bool,
    },
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
    /// The others gave this node up: all its connections are void, and it begins this incarnation.
    NewIncarnation(Incarnation),
    /// A received snapshot jumped over entries: pushes in them were never seen here.
    Skipped,
    /// A member was introduced that this node's own state does not know: there is somebody else to talk to, see
    /// [`Replica::peers`].
    Peers,
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

/// What a member is in Raft.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It decides.
    Leader,
    /// It follows a leader, or waits for one.
    Follower,
    /// It asks for votes.
    Candidate,
    /// It asks whether it would get votes.
    PreCandidate,
}

impl Role {
    /// All roles.
    pub const ALL: [Self; 4] = [Self::Leader, Self::Follower, Self::Candidate, Self::PreCandidate];

    /// The word for it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Leader => "leader",
            Self::Follower => "follower",
            Self::Candidate => "candidate",
            Self::PreCandidate => "pre-candidate",
        }
    }

    /// The word for what a member is that may not know it yet: one that belongs to no cluster is joining.
    #[must_use]
    pub fn name_of(role: Option<Self>) -> &'static str {
        role.map_or("joining", Self::name)
    }
}

/// What a node is at the moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Status {
    /// The node's role in Raft.
    pub role: Role,
    /// The term that Raft is in.
    pub term: u64,
    /// The member that leads, as far as this node knows.
    pub leader: Option<RaftId>,
    /// The index of the last entry known to be committed.
    pub commit: u64,
    /// The index of the last entry that is applied.
    pub applied: u64,
    /// The index of the last entry of the log.
    pub last: u64,
    /// The index of the last entry in the newest snapshot.
    pub snapshot: u64,
    /// Whether the node serves clients: the others know its incarnation, and what was committed when it last heard of
    /// the leader is applied.
    pub ready: bool,
    /// Whether an operator wants the node not to lead.
    pub drained: bool,
}

impl Status {
    /// Whether the node leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.role == Role::Leader
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
            return Err("malformed change of the membership".into());
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
pub fn urgency(body: &ProposalBody<'_>) -> Urgency {
    match body {
        ProposalBody::Command(command) => command.urgency(),
        ProposalBody::Keep { .. } | ProposalBody::Identify { .. } => Urgency::Grows,
        ProposalBody::Kick { .. } | ProposalBody::End { .. } => Urgency::Keeps,
        ProposalBody::Attach { .. } | ProposalBody::Barrier => Urgency::Plain,
        ProposalBody::Start(_)
        | ProposalBody::Undo(_)
        | ProposalBody::Close { .. }
        | ProposalBody::Addresses(_) => Urgency::Follows,
    }
}
