//! Every bound and every switch of the store.

use dflockd_api::Span;
use serde::{Deserialize, Serialize};

use crate::pattern::Separators;

/// How long a kept session waits for a new connection at least.
pub const KEPT_FOR: Span = Span::from_secs(10);

/// Every bound and every switch that [`Store::apply`](crate::Store::apply) looks at. 0 means unlimited
/// where a field says so.
///
/// Serialised are only the fields of version 1: their bytes stand in logs and snapshots. [`LimitsV2`] has the others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    /// Unique keys of mutexes, semaphores, elections and read-write locks together.
    pub locks_max: u64,
    /// Unique keys of counters, KV entries, lists and barriers together; 0 = unlimited.
    pub keys_max: u64,
    /// Items per list; 0 = unlimited.
    pub list_length_max: u64,
    /// Waiters per lock; 0 = unlimited.
    pub waiters_max: u64,
    /// `listen` + `watch` + `observe` per session; 0 = unlimited.
    pub subscriptions_max: u64,
    /// Bytes of a KV value or list item.
    pub value_bytes_max: u64,
    /// The lease of a request that names none.
    pub default_lease: Span,
    /// A lock or zero counter untouched for this long is dropped.
    pub idle_max: Span,
    /// Idle resources are dropped at multiples of this.
    pub gc_interval: Span,
    /// Semaphores share the namespace of mutexes.
    pub shared_namespace: bool,
    /// KV entries without TTL are dropped when idle, too.
    pub kv_idle_gc: bool,
    /// How much longer leases may last after a change of leader.
    pub failover_grace: Span,
    /// How many past events are kept for watches that resume.
    pub events_max: u64,
    /// How many results a session may have kept for retries; the oldest go first.
    pub results_max: u64,
    /// How many bytes these results may have.
    pub results_bytes_max: u64,
    /// How many "lease ran out before it was claimed" notes a session may have; the oldest go first.
    pub expired_notes_max: u64,
    /// The version of the rules that a store decides by, up to [`Limits::RULES`]; 0 stands for 1. Members of a cluster
    /// must decide alike, so a new rule is followed only from the version on that introduced it.
    #[serde(skip)]
    pub rules: u32,
    /// A longer lease is granted with this one; 0 = unlimited.
    #[serde(skip)]
    pub lease_max: Span,
    /// Holds per session; 0 = unlimited.
    #[serde(skip)]
    pub holds_per_session_max: u64,
    /// Blocked requests and enqueued places per session; 0 = unlimited.
    #[serde(skip)]
    pub waits_per_session_max: u64,
    /// Sessions that outlive their connection; 0 = unlimited.
    #[serde(skip)]
    pub sessions_max: u64,
    /// Bytes of the patterns, keys and group names of one session's subscriptions; 0 = unlimited.
    #[serde(skip)]
    pub subscription_bytes_max: u64,
    /// Subscriptions of all sessions; 0 = unlimited.
    #[serde(skip)]
    pub subscriptions_total_max: u64,
    /// Bytes of the patterns, keys and group names of all subscriptions; 0 = unlimited.
    #[serde(skip)]
    pub subscription_bytes_total_max: u64,
    /// Tokens of a pattern; 0 = unlimited.
    #[serde(skip)]
    pub pattern_tokens_max: u64,
}

/// The fields that [`Limits`] got with version 2, as they stand in logs and snapshots of that version behind the bytes
/// of version 1.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitsV2 {
    rules: u32,
    lease_max: Span,
    holds_per_session_max: u64,
    waits_per_session_max: u64,
    sessions_max: u64,
    subscription_bytes_max: u64,
    subscriptions_total_max: u64,
    subscription_bytes_total_max: u64,
    pattern_tokens_max: u64,
}

impl Limits {
    /// The newest rules that this program knows.
    pub const RULES: u32 = 2;

    /// The lease that a request gets which asks for this one.
    #[must_use]
    pub fn lease(&self, asked: Option<Span>) -> Span {
        let lease = asked.unwrap_or(self.default_lease);
        if self.lease_max == Span::ZERO { lease } else { lease.min(self.lease_max) }
    }

    /// Whether the rules of `version` are followed.
    #[must_use]
    pub fn follows(&self, version: u32) -> bool {
        self.rules.max(1) >= version
    }

    /// What ends a token of a pattern.
    #[must_use]
    pub fn separators(&self) -> Separators {
        if self.follows(2) { Separators::DotsAndSlashes } else { Separators::Dots }
    }

    /// What version 1 does not write.
    #[must_use]
    pub fn v2(&self) -> LimitsV2 {
        LimitsV2 {
            rules: self.rules,
            lease_max: self.lease_max,
            holds_per_session_max: self.holds_per_session_max,
            waits_per_session_max: self.waits_per_session_max,
            sessions_max: self.sessions_max,
            subscription_bytes_max: self.subscription_bytes_max,
            subscriptions_total_max: self.subscriptions_total_max,
            subscription_bytes_total_max: self.subscription_bytes_total_max,
            pattern_tokens_max: self.pattern_tokens_max,
        }
    }

    /// These limits, with those that only version 2 writes exchanged for `v2`.
    #[must_use]
    pub fn with_v2(self, v2: LimitsV2) -> Self {
        Self {
            rules: v2.rules,
            lease_max: v2.lease_max,
            holds_per_session_max: v2.holds_per_session_max,
            waits_per_session_max: v2.waits_per_session_max,
            sessions_max: v2.sessions_max,
            subscription_bytes_max: v2.subscription_bytes_max,
            subscriptions_total_max: v2.subscriptions_total_max,
            subscription_bytes_total_max: v2.subscription_bytes_total_max,
            pattern_tokens_max: v2.pattern_tokens_max,
            ..self
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            locks_max: 1024,
            keys_max: 0,
            list_length_max: 0,
            waiters_max: 0,
            subscriptions_max: 1024,
            value_bytes_max: 65_533,
            default_lease: Span::from_secs(33),
            idle_max: Span::from_secs(60),
            gc_interval: Span::from_secs(5),
            shared_namespace: false,
            kv_idle_gc: false,
            failover_grace: Span::from_secs(3),
            events_max: 0,
            results_max: 1024,
            results_bytes_max: 1 << 20,
            expired_notes_max: 1024,
            rules: Self::RULES,
            lease_max: Span::from_secs(86_400),
            holds_per_session_max: 65_536,
            waits_per_session_max: 65_536,
            sessions_max: 262_144,
            subscription_bytes_max: 256 << 10,
            subscriptions_total_max: 262_144,
            subscription_bytes_total_max: 64 << 20,
            pattern_tokens_max: 16,
        }
    }
}
