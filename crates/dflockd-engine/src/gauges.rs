//! What a member of a cluster counts for whoever looks after it. Written by the member's threads, read by anybody;
//! nothing decides by it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use dflockd_core::{Span, Timestamp};
use parking_lot::Mutex;

use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::types::RaftId;
use dflockd_replica::{Replica, Role, Status};

/// How often lags are looked at.
const LAGS_EVERY: Span = Span::from_millis(100);

/// Upper bounds of the buckets of [`Times`], in seconds.
pub const TIMES_BUCKETS: [f64; 16] = [
    0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5,
    1.0, 2.5, 5.0,
];

/// How often which length of time was seen.
#[derive(Debug, Default)]
pub struct Times {
    counts: [AtomicU64; TIMES_BUCKETS.len() + 1],
    nanos: AtomicU64,
}

impl Times {
    /// Counts a length of time.
    pub fn observe(&self, took: Span) {
        let seconds = Duration::from_nanos(took.0).as_secs_f64();
        let bucket = TIMES_BUCKETS.partition_point(|&bound| bound < seconds);
        self.counts[bucket].fetch_add(1, Relaxed);
        self.nanos.fetch_add(took.0, Relaxed);
    }

    /// How many there were in each bucket; the last is for what took longer than all bounds.
    #[must_use]
    pub fn counts(&self) -> [u64; TIMES_BUCKETS.len() + 1] {
        std::array::from_fn(|bucket| self.counts[bucket].load(Relaxed))
    }

    /// All of it together, in nanoseconds.
    #[must_use]
    pub fn nanos(&self) -> u64 {
        self.nanos.load(Relaxed)
    }
}

/// What a member counts.
#[derive(Debug, Default)]
pub struct Gauges {
    /// Turns that applied entries.
    pub apply: Times,
    /// Writes to the log with their sync.
    pub fsync: Times,
    /// Entries that were applied.
    pub applied: AtomicU64,
    /// Entries that were proposed here.
    pub proposals: AtomicU64,
    /// Requests for which there was no room, or no decision in time.
    pub proposals_failed: AtomicU64,
    /// Looks at the state: all that is not a command or a read of one key.
    pub looks: AtomicU64,
    /// How often another leader was seen than before.
    pub leader_changes: AtomicU64,
    /// How often this member stood for election.
    pub elections: AtomicU64,
    /// Voters and learners that were added, and that could not be.
    pub added: [AtomicU64; 2],
    /// Members that were removed, and that could not be.
    pub removed: [AtomicU64; 2],
    /// Bytes of the log on disk.
    pub log_bytes: AtomicU64,
    /// Bytes of the latest snapshot.
    pub snapshot_bytes: AtomicU64,
    /// On the leader, how many entries each other member has not confirmed.
    pub lags: Mutex<Vec<(RaftId, u64)>>,
    /// Frames on the peer port that the peer has not sent so.
    pub bad_frames: AtomicU64,
    /// Members this one can send to.
    pub connected: Mutex<BTreeSet<RaftId>>,
    seen: Mutex<Seen>,
}

#[derive(Debug, Default)]
struct Seen {
    status: Option<Status>,
    /// When the lags were looked at.
    lags_at: Timestamp,
    /// The newest cluster time, and when it was heard.
    time: (Timestamp, Timestamp),
}

impl Gauges {
    /// The replica had a turn.
    pub(crate) fn turned(&self, replica: &Replica, began: Timestamp, now: Timestamp) {
        let status = replica.status();
        let mut seen = self.seen.lock();
        let unseen = Status { leader: None, term: 0, ..status };
        let before = seen.status.replace(status).unwrap_or(unseen);
        // A snapshot that was installed skips entries.
        if status.applied > before.applied && status.snapshot <= before.applied {
            self.applied.fetch_add(status.applied - before.applied, Relaxed);
            self.apply.observe(now.since(began));
        }
        if before.is_leader() && status.is_leader() {
            self.proposals.fetch_add(status.last.saturating_sub(before.last), Relaxed);
        }
        if status.leader.is_some() && status.leader != before.leader {
            self.leader_changes.fetch_add(1, Relaxed);
        }
        // Whoever leads a term has stood for it, also if nobody looked in between.
        if status.term > before.term && (status.is_leader() || status.role == Role::Candidate) {
            self.elections.fetch_add(1, Relaxed);
        }
        // A leader makes the time. That of a new one may be behind what was seen before.
        if status.is_leader() || replica.time_seen() != seen.time.0 {
            seen.time = (replica.time_seen(), now);
        }
        if now.since(seen.lags_at) >= LAGS_EVERY {
            seen.lags_at = now;
            *self.lags.lock() = if status.is_leader() { replica.lags() } else { Vec::new() };
        }
    }

    /// How long ago this member was last told the time by a leader; a leader tells it to itself. None before the first
    /// time.
    #[must_use]
    pub fn time_lag(&self, now: Timestamp) -> Option<Span> {
        let seen = self.seen.lock();
        let leads = seen.status.is_some_and(|status| status.is_leader());
        let heard = (seen.time.0 > Timestamp(0)).then_some(seen.time.1)?;
        Some(if leads { Span::ZERO } else { now.since(heard) })
    }

    /// Somebody has asked for a change of the cluster.
    pub(crate) fn asked(&self, request: &AdminRequest, result: &AdminResult) {
        let counts = match request {
            AdminRequest::Add { .. } => &self.added,
            AdminRequest::Remove { .. } | AdminRequest::ForceRemove { .. } => &self.removed,
            AdminRequest::Promote { .. }
            | AdminRequest::ForcePromote { .. }
            | AdminRequest::Transfer { .. }
            | AdminRequest::SetPolicy(_)
            | AdminRequest::ChangePolicy { .. }
            | AdminRequest::ChangeWholePolicy { .. }
            | AdminRequest::Address { .. }
            | AdminRequest::Finalize
            | AdminRequest::Snapshot
            | AdminRequest::Copy
            | AdminRequest::Drain { .. } => return,
        };
        counts[usize::from(result.is_err())].fetch_add(1, Relaxed);
    }

    /// The log was synced.
    pub(crate) fn synced(&self, took: Span, (log_bytes, snapshot_bytes): (u64, u64)) {
        self.fsync.observe(took);
        self.log_bytes.store(log_bytes, Relaxed);
        self.snapshot_bytes.store(snapshot_bytes, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_counted_by_their_length() {
        let times = Times::default();
        for micros in [0, 50, 51, 5_000_000, 5_000_001] {
            times.observe(Span(micros * 1000));
        }
        let counts = times.counts();
        assert_eq!((counts[0], counts[1], counts[15], counts[16]), (2, 1, 1, 1));
        assert_eq!(times.nanos(), (50 + 51 + 5_000_000 + 5_000_001) * 1000);
    }
}
