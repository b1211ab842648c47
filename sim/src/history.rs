//! What clients asked and what they were told.

use std::collections::BTreeMap;

use dflockd_core::{Outcome, RequestId, SessionId};
use dflockd_replica::types::RaftId;

use crate::op::Op;

/// One request of a client, with all its repetitions.
#[derive(Clone, Debug)]
pub struct Asked {
    /// Who.
    pub client: usize,
    /// What.
    pub op: Op,
    /// When it was first sent.
    pub sent: u64,
    /// The session it was sent in, once it reached a node.
    pub session: Option<SessionId>,
    /// Its number there.
    pub request: RequestId,
    /// It was sent more than once: a refusal speaks of the last time only.
    pub repeated: bool,
    /// The node it went to last.
    pub node: RaftId,
    /// Everything that clients had been told before it was sent came from entries up to this.
    pub floor: u64,
    /// Sent after the faults had ended and the cluster was well.
    pub calm: bool,
    /// What came of it.
    pub end: End,
}

/// What came of a request, for its client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum End {
    /// Nothing yet.
    Open,
    /// An answer.
    Told(u64, Outcome),
    /// It was never accepted.
    Refused,
    /// Nobody knows.
    Unknown,
}

/// What there was before the first request: nothing, or what a cluster has begun again with.
#[derive(Clone, Debug, Default)]
pub struct Before {
    /// Values of counters.
    pub counters: BTreeMap<Vec<u8>, i64>,
    /// Values and revisions of entries.
    pub entries: BTreeMap<Vec<u8>, (Vec<u8>, u64)>,
    /// Items of lists.
    pub lists: BTreeMap<Vec<u8>, Vec<Vec<u8>>>,
    /// The highest fences of locks.
    pub fences: BTreeMap<Vec<u8>, u64>,
}

/// All requests to one cluster.
#[derive(Default)]
pub struct History {
    /// What was there before.
    pub before: Before,
    /// In the order they were sent.
    pub asked: Vec<Asked>,
    /// The highest entry that any answer came from.
    pub floor: u64,
    /// When which client gave up all it held, by closing its connection or because somebody ended its session.
    pub given_up: Vec<(usize, u64)>,
}
