//! What a cluster speaks of: members, incarnations of nodes, the policy all of them share, and what can stand in the
//! log.

use dflockd_core::{Command, Limits, LimitsV2, Outcome, RequestId, SessionId, Span};
use serde::{Deserialize, Serialize};

/// The number of a member in the Raft group. Never used again after a removal.
pub type RaftId = u64;

/// 128 random bits: the name of a cluster, or the secret of a kept session.
pub type Bits128 = [u8; 16];

/// Who a node is, kept with its data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct NodeIdentity {
    /// The name of the cluster that the node belongs to, once it has one.
    pub cluster: Option<Bits128>,
    /// The name of the node.
    pub node: String,
    /// The number of the node in the cluster, 0 while it has none.
    pub raft_id: RaftId,
    /// The random number of the data directory: another directory is another node.
    pub disk: u64,
}

/// One start of a member's process and what follows from it: the member's number and how often it was started. Its
/// sessions are numbered behind it, so an id of a session is never given out twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Incarnation(pub u32);

impl Incarnation {
    const START_BITS: u32 = 20;
    /// The highest member number that fits.
    pub const RAFT_ID_MAX: RaftId = (1 << (32 - Self::START_BITS)) - 1;
    /// The highest number of starts that fits.
    pub const START_MAX: u32 = (1 << Self::START_BITS) - 1;

    /// The `start`-th incarnation of a member.
    ///
    /// # Panics
    ///
    /// If a number is too large.
    #[must_use]
    pub fn new(raft_id: RaftId, start: u32) -> Self {
        assert!(
            raft_id <= Self::RAFT_ID_MAX && start <= Self::START_MAX,
            "out of numbers for incarnations"
        );
        let raft_id = u32::try_from(raft_id).expect("just checked");
        Self(raft_id << Self::START_BITS | start)
    }

    /// The member's number.
    #[must_use]
    pub fn raft_id(self) -> RaftId {
        u64::from(self.0 >> Self::START_BITS)
    }

    /// The `n`-th session of the incarnation.
    #[must_use]
    pub fn session(self, n: u32) -> SessionId {
        SessionId(u64::from(self.0) << 32 | u64::from(n))
    }

    /// The incarnation that gave out a session's id.
    #[must_use]
    pub fn of(session: SessionId) -> Self {
        Self(u32::try_from(session.0 >> 32).expect("32 bits"))
    }
}

/// Something a client of some node wants, as it stands in the log. The node numbers what it sends, per incarnation:
/// `seq`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proposal<'a> {
    /// The session that the proposal belongs to.
    pub session: SessionId,
    /// How often the session was attached when this was sent; what an older attachment sent does nothing.
    pub epoch: u32,
    /// The request that the outcome answers.
    pub request: RequestId,
    /// Whether the outcome is kept for retries.
    pub keep: bool,
    /// What is to be done.
    pub body: ProposalBody<'a>,
}

/// What a [`Proposal`] asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ProposalBody<'a> {
    /// The first item of each incarnation: the node is there. Ends what its earlier incarnations left behind.
    Start(Start),
    /// A command for the store.
    Command(Command<'a>),
    /// A grant or a popped item could not be delivered. Stands for [`Command::Undo`], which borrows its outcome and so
    /// can not be read from bytes.
    Undo(Outcome),
    /// The session outlives its connection from now on; whoever knows the secret can attach to it.
    Keep {
        /// The secret of the session, drawn by the accepting node.
        secret: Bits128,
    },
    /// The connection of this session wants to be the one of a kept session.
    Attach {
        /// The secret of the kept session.
        secret: Bits128,
    },
    /// Who is behind the session; sent ahead of the first item that makes others ask. Since version 4.
    Identify {
        /// The name of the client that people see.
        name: &'a [u8],
        /// The stable reference; empty = none.
        reference: &'a [u8],
    },
    /// The connection has ended.
    Close {
        /// Whether the client closed the connection, with a FIN.
        orderly: bool,
        /// Whether the client had given a stable reference and is expected to come back with another session.
        referenced: bool,
    },
    /// An operator ends a session.
    Kick {
        /// The session that ends.
        session: SessionId,
    },
    /// The client of a kept session ends it: a disconnect after which nobody comes back.
    End {
        /// The session that ends.
        session: SessionId,
    },
    /// Nothing; answered when everything before it is applied.
    Barrier,
    /// Where else clients find the node.
    Addresses(Addresses),
}

/// What a node tells about itself when it starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Start {
    /// The random number of the data directory; another one under the same name is refused.
    pub disk: u64,
    /// Where clients find the node.
    pub client_addr: String,
    /// The newest version of the log that the node reads.
    pub version: u32,
    /// Whether the node is a witness: it keeps the log, but no state.
    pub witness: bool,
}

/// Where a node can be reached besides its ports for peers and for the line protocol; empty where it can not.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Addresses {
    /// The address of the HTTP API.
    pub http: String,
    /// The address of the gRPC API.
    pub grpc: String,
}

/// A member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Member {
    /// The name of the member, chosen by people.
    pub node: String,
    /// Where peers dial the member.
    pub peer_addr: String,
    /// Where clients find the member.
    pub client_addr: String,
    /// Whether the member is a witness: it keeps the log, but no state.
    pub witness: bool,
    /// The random number of the member's data directory, once it is known.
    pub disk: Option<u64>,
}

/// When a connection's locks are released (GUARANTEES R8).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AutoRelease {
    /// Locks are released when the connection ends, however.
    #[default]
    Any,
    /// Locks are released when the client closes the connection in an orderly way.
    Clean,
    /// Locks are not released by the end of a connection; they end with their leases.
    Lease,
}

/// Everything `apply` decides by. The same on all members, whatever their flags say.
///
/// Its bytes are those of version 1; [`WholePolicy`] has all of it. What operators see and change of it stands in
/// [`POLICY_SETTINGS`](super::policy::POLICY_SETTINGS).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Policy {
    /// The limits of the store.
    pub limits: Limits,
    /// What the end of a connection means.
    pub auto_release: AutoRelease,
    /// How long a client with a stable reference is waited for: its place in a queue, and after an orderly close its
    /// locks, stay for that long.
    pub orphan_ttl: Span,
}

impl Policy {
    /// The same policy with these limits of version 2.
    #[must_use]
    pub fn with_v2(self, v2: LimitsV2) -> Self {
        Self { limits: self.limits.with_v2(v2), ..self }
    }
}

/// A policy with the bytes of version 2.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "(Policy, LimitsV2)", into = "(Policy, LimitsV2)")]
pub struct WholePolicy(pub Policy);

impl From<(Policy, LimitsV2)> for WholePolicy {
    fn from((policy, v2): (Policy, LimitsV2)) -> Self {
        Self(policy.with_v2(v2))
    }
}

impl From<WholePolicy> for (Policy, LimitsV2) {
    fn from(WholePolicy(policy): WholePolicy) -> Self {
        let v2 = policy.limits.v2();
        (policy, v2)
    }
}

/// What the leader itself puts into the log.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum LeaderCommand {
    /// The very first: what the cluster decides by. Later ones do nothing.
    Init {
        /// The policy, as the first leader has it.
        policy: Box<Policy>,
        /// The seed of the hash maps.
        seed: u64,
        /// The first fence.
        fence: u64,
    },
    /// Only time passes.
    Tick,
    /// A new leader begins.
    NewTerm,
    /// A node has been silent for long.
    NodeLost {
        /// The incarnation that was lost.
        run: Incarnation,
    },
    /// What all decide by from now on.
    Policy(Box<Policy>),
    /// The digest of the snapshot at an index: who has another one has gone wrong.
    Digest {
        /// The index of the snapshot.
        index: u64,
        /// SHA-256 of the snapshot.
        digest: [u8; 32],
    },
    /// A member is dialed elsewhere from now on.
    Address {
        /// The number of the member.
        raft_id: RaftId,
        /// Where peers dial the member.
        peer_addr: String,
    },
    /// All members read this version, and from here on they may be given what only it has.
    Version {
        /// The version, never lower than before.
        version: u32,
    },
    /// The name of the cluster from now on, in place of the one that its first members began with. Since version 3;
    /// later ones do nothing.
    ClusterId {
        /// The name, drawn by the leader.
        id: Bits128,
    },
}

/// A change of the membership, in the context of a conf change entry.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemberChange {
    /// A node becomes a member, as a learner first.
    Add {
        /// The number of the member.
        raft_id: RaftId,
        /// The member.
        member: Member,
    },
    /// A learner becomes a voter.
    Promote {
        /// The number of the member.
        raft_id: RaftId,
    },
    /// A member goes for ever.
    Remove {
        /// The number of the member.
        raft_id: RaftId,
    },
}
