//! What clients are told without having asked at that moment: signals, changes, leaders, lost holds.

use serde::{Deserialize, Serialize};

use crate::types::{Bytes, Fence, Revision};

/// A line for a subscriber.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Push {
    /// A signal.
    Signal {
        /// Where it was sent.
        channel: Bytes,
        /// What was sent.
        payload: Bytes,
    },
    /// A change of a watched key.
    Change(Change),
    /// News of an election.
    Leader {
        /// What happened.
        event: LeaderEvent,
        /// Which election.
        key: Bytes,
    },
    /// A hold of this session ended other than by its release.
    Lost {
        /// The lock.
        key: Bytes,
        /// The hold.
        fence: Fence,
        /// Why.
        reason: LostReason,
    },
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    /// The revision it made.
    pub revision: Revision,
    /// What happened.
    pub event: Event,
    /// To which key.
    pub key: Bytes,
}

/// What can happen to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[expect(missing_docs, reason = "the names of the wire protocol")]
pub enum Event {
    Acquire,
    Release,
    Elect,
    Resign,
    Incr,
    Decr,
    Cset,
    Kset,
    Kdel,
    Kcas,
    Lpush,
    Rpush,
    Lpop,
    Rpop,
    Blpop,
    Brpop,
}

/// What can happen to a leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaderEvent {
    /// Somebody leads.
    Elected,
    /// The leader gave up.
    Resigned,
    /// A queued one takes over.
    Failover,
}

/// Why a hold ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LostReason {
    /// Its lease ran out.
    Expired,
    /// An operator ended it.
    Forced,
    /// Its session ended.
    Session,
}
