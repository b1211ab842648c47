//! Every reason to refuse a command, once.

use serde::{Deserialize, Serialize};

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
        /// the counters of the store.
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
