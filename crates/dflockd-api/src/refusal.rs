//! Every reason to refuse a command, once, and how each API says it.
//!
//! A row of `refusals!` becomes a variant of [`Refusal`] and its [`RefusalSpec`]:
//!
//! ```text
//! /// `Limits::locks_max`.
//! MaxLocks "max_locks" line(MaxLocks) http(503 "max_locks") grpc(ResourceExhausted "REASON_MAX_LOCKS") Retry
//!     "the limit of locks is reached",
//! ```
//!
//! The order of the rows is their number in snapshots: a new one comes last.

use serde::{Deserialize, Serialize};

use crate::error_code::{Advice, ErrorCode};

/// What there is to say about one refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RefusalSpec {
    /// Its name in metrics.
    pub name: &'static str,
    /// The status word on lines. A connection that knows no word for it is told [`ErrorCode::Error`].
    pub line: ErrorCode,
    /// The status over HTTP.
    pub http_status: u16,
    /// The member `error` of the body over HTTP.
    pub http_error: &'static str,
    /// The code over gRPC.
    pub grpc_code: GrpcCode,
    /// The name of the `Reason` in the details over gRPC.
    pub grpc_reason: &'static str,
    /// What a client may do then.
    pub advice: Advice,
    /// What people are told.
    pub text: &'static str,
}

/// The canonical codes of gRPC that refusals have, with their numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names are those of gRPC")]
pub enum GrpcCode {
    InvalidArgument = 3,
    NotFound = 5,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    FailedPrecondition = 9,
    OutOfRange = 11,
    Unavailable = 14,
}

/// When a request that may be sent again should be, in milliseconds.
pub const RETRY_AFTER_MS: u64 = 200;

/// See the head of this file.
macro_rules! refusals {
    ($(
        $(#[$doc:meta])* $refusal:ident $name:literal line($line:ident) http($status:literal $error:literal)
            grpc($code:ident $reason:literal) $advice:ident $text:literal,
    )*) => {
        /// Why a command was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
        pub enum Refusal {
            $($(#[$doc])* $refusal,)*
        }

        /// Every reason to refuse with what there is to say about it, in the order of the counters of the store.
        pub const REFUSALS: &[(Refusal, RefusalSpec)] = &[$((
            Refusal::$refusal,
            RefusalSpec {
                name: $name,
                line: ErrorCode::$line,
                http_status: $status,
                http_error: $error,
                grpc_code: GrpcCode::$code,
                grpc_reason: $reason,
                advice: Advice::$advice,
                text: $text,
            },
        ),)*];
    };
}

refusals! {
    /// `Limits::locks_max`.
    MaxLocks "max_locks" line(MaxLocks) http(503 "max_locks") grpc(ResourceExhausted "REASON_MAX_LOCKS") Retry
        "the limit of locks is reached",
    /// `Limits::waiters_max`.
    MaxWaiters "max_waiters" line(MaxWaiters) http(503 "max_waiters")
        grpc(ResourceExhausted "REASON_MAX_WAITERS") Retry
        "the limit of waiters for this key is reached",
    /// `Limits::keys_max`.
    MaxKeys "max_keys" line(MaxKeys) http(503 "max_keys") grpc(ResourceExhausted "REASON_MAX_KEYS") Retry
        "the limit of keys is reached",
    /// `Limits::list_length_max`.
    ListFull "list_full" line(ListFull) http(409 "list_full") grpc(ResourceExhausted "REASON_LIST_FULL") Retry
        "the list is full",
    /// `Limits::value_bytes_max`.
    ValueTooLarge "value_too_large" line(Error) http(400 "bad_request")
        grpc(InvalidArgument "REASON_BAD_REQUEST") Final
        "the value is too large",
    /// `Limits::subscriptions_max`.
    MaxSubscriptions "max_subscriptions" line(Error) http(503 "max_subscriptions")
        grpc(ResourceExhausted "REASON_MAX_SUBSCRIPTIONS") Retry
        "the limit of subscriptions is reached",
    /// The semaphore exists with another limit.
    LimitMismatch "limit_mismatch" line(LimitMismatch) http(409 "limit_mismatch")
        grpc(FailedPrecondition "REASON_LIMIT_MISMATCH") Final
        "the semaphore has another limit",
    /// The key is a read-write lock, or is not.
    TypeMismatch "type_mismatch" line(TypeMismatch) http(409 "type_mismatch")
        grpc(FailedPrecondition "REASON_TYPE_MISMATCH") Final
        "the key is a lock of another kind",
    /// The barrier exists with another count.
    CountMismatch "barrier_count_mismatch" line(BarrierCountMismatch) http(409 "barrier_count_mismatch")
        grpc(FailedPrecondition "REASON_BARRIER_COUNT_MISMATCH") Final
        "the barrier has another count",
    /// The session has enqueued for this key already.
    AlreadyEnqueued "already_enqueued" line(AlreadyEnqueued) http(409 "already_enqueued")
        grpc(FailedPrecondition "REASON_ALREADY_ENQUEUED") Final
        "the session has a place in the queue already",
    /// The session has not enqueued for this key.
    NotEnqueued "not_enqueued" line(NotEnqueued) http(409 "not_enqueued")
        grpc(FailedPrecondition "REASON_NOT_ENQUEUED") Final
        "the session has no place in the queue",
    /// The session waits for this already.
    AlreadyWaiting "already_waiting" line(Error) http(409 "already_waiting")
        grpc(FailedPrecondition "REASON_ALREADY_WAITING") Final
        "the session waits for it already",
    /// The lease of the hold ran out.
    LeaseExpired "lease_expired" line(LeaseExpired) http(409 "lease_expired")
        grpc(NotFound "REASON_LEASE_EXPIRED") Final
        "the lease has ended",
    /// No such hold.
    NotHeld "not_held" line(Error) http(404 "not_held") grpc(NotFound "REASON_NOT_HELD") Final
        "not held",
    /// The counter would leave 64 bits.
    Overflow "overflow" line(Error) http(409 "overflow") grpc(OutOfRange "REASON_OVERFLOW") Final
        "the counter would overflow",
    /// Malformed pattern, or a wildcard where none may be.
    BadPattern "bad_pattern" line(Error) http(400 "bad_request")
        grpc(InvalidArgument "REASON_BAD_REQUEST") Final
        "malformed pattern or channel, or a pattern of more than 16 tokens",
    /// No fence can be had now.
    NoFence "no_fence" line(Unavailable) http(503 "fence_persistence") grpc(Unavailable "REASON_NO_FENCE") Retry
        "no fencing token can be given out now; nothing was done",
    /// The request was answered so long ago that the answer is no longer kept. It is not executed again, and what
    /// came of it the first time is not known.
    Forgotten "forgotten" line(Unknown) http(503 "unknown") grpc(Unavailable "REASON_UNKNOWN_OUTCOME") Unknown
        "the request may have had its effect",
    /// Nobody could decide it in time, and nothing will come of it.
    Unavailable "unavailable" line(Unavailable) http(503 "unavailable")
        grpc(Unavailable "REASON_UNAVAILABLE") Retry
        "no member could decide; nothing was done",
    /// `Limits::holds_per_session_max`. On lines the word for locks: published clients know it.
    MaxHolds "max_holds" line(MaxLocks) http(503 "max_holds") grpc(ResourceExhausted "REASON_MAX_HOLDS") Retry
        "the limit of holds per session is reached",
    /// `Limits::waits_per_session_max`. On lines the word for waiters.
    MaxWaits "max_waits" line(MaxWaiters) http(503 "max_waits") grpc(ResourceExhausted "REASON_MAX_WAITS") Retry
        "the limit of waits per session is reached",
    /// `Limits::sessions_max`.
    MaxSessions "max_sessions" line(Error) http(503 "max_sessions")
        grpc(ResourceExhausted "REASON_MAX_SESSIONS") Retry
        "the limit of sessions is reached",
    /// The identity of the client has no right to it. Decided before the store, which never says so.
    Forbidden "forbidden" line(Forbidden) http(403 "forbidden") grpc(PermissionDenied "REASON_FORBIDDEN") Final
        "this identity may not do that",
}

impl Refusal {
    /// Its row in [`REFUSALS`].
    #[must_use]
    pub const fn spec(self) -> &'static RefusalSpec {
        // Enum and list are made from the same rows, so positions are the same.
        &REFUSALS[self as usize].1
    }

    /// Whether it says nothing about what was asked for: nobody could decide, or nobody remembers what was decided. A
    /// request of any kind can be refused like this; with any other refusal only those that
    /// [allow it](crate::Command::allows).
    #[must_use]
    pub const fn meets_any_request(self) -> bool {
        matches!(self, Self::Unavailable | Self::Forgotten)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_is_at_its_place() {
        for (refusal, spec) in REFUSALS {
            assert_eq!(refusal.spec(), spec);
        }
    }

    #[test]
    fn a_word_of_its_own_advises_as_the_refusal_does() {
        for (refusal, RefusalSpec { line, advice, .. }) in REFUSALS {
            assert!(*line == ErrorCode::Error || line.spec().advice == *advice, "{refusal:?}");
            assert_eq!(advice.may_have_applied(), *refusal == Refusal::Forgotten);
        }
    }
}
