//! Everything the store asks of the outside: answers and pushes.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::types::{Bytes, End, Fence, RequestId, Revision, SessionId, Span, Token};

/// Something to tell a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The answer to a request.
    Reply {
        /// Who asked.
        session: SessionId,
        /// What is answered.
        request: RequestId,
        /// The answer.
        outcome: Outcome,
    },
    /// Something a session subscribed to, or must know.
    Push {
        /// Who is told.
        session: SessionId,
        /// What.
        push: Push,
        /// Set if this is the delivery to a queue group: [`Store::group_members`](crate::Store::group_members)
        /// names the members who can take it instead.
        group: Option<Group>,
    },
    /// A detached session waited long enough and is gone.
    SessionEnded {
        /// Which.
        session: SessionId,
    },
}

/// A queue group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// The pattern its members listen to.
    pub pattern: Bytes,
    /// Its name.
    pub name: Bytes,
}

/// A granted hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its credential, fence included.
    pub token: Token,
    /// How long it lasts from now.
    pub lease: Span,
}

/// The answer to a command or query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Done, nothing to say.
    Done,
    /// The caller holds the lock.
    Granted(Grant),
    /// An enqueue was granted at once.
    Acquired(Grant),
    /// An enqueue took its place.
    Queued,
    /// The lease was restarted.
    Renewed {
        /// Of the hold.
        fence: Fence,
        /// The lease.
        lease: Span,
    },
    /// The wait ended without success.
    Timeout,
    /// No such value, or nothing to pop.
    Empty,
    /// A compare-and-set found something else.
    Conflict,
    /// A counter, a length or a number of deliveries.
    Number(i64),
    /// A value.
    Value(Bytes),
    /// An entry written by a KV command, with the revision it got.
    Written(Revision),
    /// A popped item.
    Popped {
        /// The list.
        key: Bytes,
        /// The end it came from.
        end: End,
        /// The item.
        value: Bytes,
    },
    /// Items of a list.
    Items(Vec<Bytes>),
    /// The events asked for are gone; the oldest kept one is after this revision.
    Compacted(Revision),
    /// A definite no: nothing has changed.
    Refused(Refusal),
    /// A KV entry.
    Entry {
        /// What it holds.
        value: Bytes,
        /// Of its last change.
        revision: Revision,
    },
    /// The first of the items of a list that were asked for, because all of them are too much for one answer
    /// ([`RANGE_BYTES_MAX`](crate::RANGE_BYTES_MAX)). At least one.
    Part(Vec<Bytes>),
}

impl Outcome {
    /// Whether it gives something away that is taken back if the answer can not be told.
    #[must_use]
    pub fn gives(&self) -> bool {
        match self {
            Self::Granted(_) | Self::Acquired(_) | Self::Popped { .. } => true,
            Self::Done
            | Self::Queued
            | Self::Renewed { .. }
            | Self::Timeout
            | Self::Empty
            | Self::Conflict
            | Self::Number(_)
            | Self::Value(_)
            | Self::Written(_)
            | Self::Items(_)
            | Self::Part(_)
            | Self::Compacted(_)
            | Self::Entry { .. }
            | Self::Refused(_) => false,
        }
    }
}

/// Makes [`Refusal`] and [`REFUSALS`] from rows of a name in the program, a name in figures, and a text for people. The
/// order of the rows is their number in snapshots.
macro_rules! refusals {
    ($($(#[$doc:meta])* $refusal:ident $name:literal $text:literal,)*) => {
        /// Why a command was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Refusal {
            $($(#[$doc])* $refusal,)*
        }

        /// Every reason to refuse with its name in figures, in the order of
        /// [`Tally::refusals`](crate::Tally::refusals).
        pub const REFUSALS: &[(Refusal, &str)] = &[$((Refusal::$refusal, $name),)*];

        impl Refusal {
            /// What people are told.
            #[must_use]
            pub fn text(self) -> &'static str {
                match self {
                    $(Self::$refusal => $text,)*
                }
            }
        }
    };
}

refusals! {
    /// `Limits::locks_max`.
    MaxLocks "max_locks" "the limit of locks is reached",
    /// `Limits::waiters_max`.
    MaxWaiters "max_waiters" "the limit of waiters for this key is reached",
    /// `Limits::keys_max`.
    MaxKeys "max_keys" "the limit of keys is reached",
    /// `Limits::list_length_max`.
    ListFull "list_full" "the list is full",
    /// `Limits::value_bytes_max`.
    ValueTooLarge "value_too_large" "the value is too large",
    /// `Limits::subscriptions_max`.
    MaxSubscriptions "max_subscriptions" "the limit of subscriptions is reached",
    /// The semaphore exists with another limit.
    LimitMismatch "limit_mismatch" "the semaphore has another limit",
    /// The key is a read-write lock, or is not.
    TypeMismatch "type_mismatch" "the key is a lock of another kind",
    /// The barrier exists with another count.
    CountMismatch "barrier_count_mismatch" "the barrier has another count",
    /// The session has enqueued for this key already.
    AlreadyEnqueued "already_enqueued" "the session has a place in the queue already",
    /// The session has not enqueued for this key.
    NotEnqueued "not_enqueued" "the session has no place in the queue",
    /// The session waits for this already.
    AlreadyWaiting "already_waiting" "the session waits for it already",
    /// The lease of the hold ran out.
    LeaseExpired "lease_expired" "the lease has ended",
    /// No such hold.
    NotHeld "not_held" "not held",
    /// The counter would leave 64 bits.
    Overflow "overflow" "the counter would overflow",
    /// Malformed pattern, or a wildcard where none may be.
    BadPattern "bad_pattern" "malformed pattern or channel, or a pattern of more than 16 tokens",
    /// No fence can be had now.
    NoFence "no_fence" "no fencing token can be given out now; nothing was done",
    /// The request was answered so long ago that the answer is no longer kept. It is not executed again, and what
    /// came of it the first time is not known.
    Forgotten "forgotten" "the request may have had its effect",
    /// Nobody could decide it in time, and nothing will come of it.
    Unavailable "unavailable" "no member could decide; nothing was done",
    /// `Limits::holds_per_session_max`.
    MaxHolds "max_holds" "the limit of holds per session is reached",
    /// `Limits::waits_per_session_max`.
    MaxWaits "max_waits" "the limit of waits per session is reached",
    /// `Limits::sessions_max`.
    MaxSessions "max_sessions" "the limit of sessions is reached",
}

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
