//! Every metric, once: its name, what it is, its labels and what it means. `docs/metrics.md` is made from this list,
//! and what the dashboard and the alerts ask for must be in it.

/// What a metric is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Only grows, until the process ends.
    Counter,
    /// Goes up and down.
    Gauge,
    /// Counts of lengths of time, and their sum.
    Histogram,
}

impl Kind {
    /// Its name in the text format.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Counter => "counter",
            Self::Gauge => "gauge",
            Self::Histogram => "histogram",
        }
    }
}

/// Where a metric is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Where {
    /// On every server.
    Always,
    /// On servers that keep state, which is all but a witness.
    State,
    /// On members of a cluster.
    Cluster,
}

/// What there is to say about one metric.
#[derive(Clone, Copy, Debug)]
pub struct Metric {
    /// As it is scraped; a histogram's lines have suffixes.
    pub name: &'static str,
    /// What it is.
    pub kind: Kind,
    /// What its values are told apart by. Never a key.
    pub labels: &'static [&'static str],
    /// Where it is found.
    pub found: Where,
    /// What it means, in a sentence without a full stop.
    pub help: &'static str,
}

macro_rules! metrics {
    ($($id:ident $kind:ident $found:ident $name:literal [$($label:literal)*] $help:literal)*) => {
        $(pub(super) const $id: Metric = Metric {
            name: $name,
            kind: Kind::$kind,
            labels: &[$($label),*],
            found: Where::$found,
            help: $help,
        };)*

        /// Every metric, once.
        pub const METRICS: &[Metric] = &[$($id),*];
    };
}

metrics! {
    READY Gauge Always "dflockd_ready" []
        "1 if clients should come here, as /ready says"
    PRIMARY Gauge Always "dflockd_primary" []
        "1 in memory mode and on the leader of a cluster, whose members all count the same state: sum over these only"
    UPTIME Gauge Always "dflockd_uptime_seconds" []
        "Time since the start"
    BUILD_INFO Gauge Always "dflockd_build_info" ["version" "mode"]
        "Always 1; which program this is and how it keeps its state"

    CONNECTIONS Gauge Always "dflockd_connections" []
        "Connections of the line protocol"
    OPEN_CONNECTIONS Gauge Always "dflockd_open_connections" ["api"]
        "Connections by the protocol they speak"
    CONNECTIONS_MAX Gauge Always "dflockd_connections_max" ["api"]
        "Connections that a protocol can have at most: its cap, or what the limit of open files leaves for it"
    CONNECTIONS_REFUSED Counter Always "dflockd_connections_refused_total" ["api"]
        "Connections that were closed at once because of a cap"
    AUTH_FAILURES Counter Always "dflockd_auth_failures_total" ["api" "token"]
        "Requests and connections refused for a wrong or missing token, of clients or of operators (admin)"
    AUTH_THROTTLED Counter Always "dflockd_auth_throttled_total" ["api" "token"]
        "Those of them whose token was not looked at, because too many were wrong before"
    REVOKED Counter Always "dflockd_revoked_total" ["api"]
        "Connections, sessions, streams and waiting requests that ended because their token was dropped"
    FORBIDDEN Counter Always "dflockd_forbidden_total" ["api"]
        "Requests refused because the identity of their client may not do that"
    FOREIGN_PROTOCOLS Counter Always "dflockd_foreign_protocol_total" ["protocol"]
        "Connections that spoke HTTP or TLS to the port of the line protocol and were closed"
    SLOW_READERS Counter Always "dflockd_slow_readers_closed_total" ["api"]
        "Connections and streams that were closed because their client did not take in what waited for it"
    OPEN_SESSIONS Gauge Always "dflockd_open_sessions" ["api"]
        "Sessions of this server by the protocol they were opened with, kept ones without a connection included"
    HTTP_SESSIONS Gauge Always "dflockd_http_sessions" []
        "HTTP sessions, those of event streams included"
    EVENT_FOLLOWERS Gauge Always "dflockd_event_followers" []
        "Event streams that follow changes of keys"

    LOG_SUPPRESSED Counter Always "dflockd_log_lines_suppressed_total" []
        "Log lines about clients that were left out because their address had caused too many of the kind"
    LOG_LOST Counter Always "dflockd_log_lines_lost_total" []
        "Log lines that were lost because stderr was too slow; never those about operators"

    LINE_REQUESTS Counter Always "dflockd_line_requests_total" ["command"]
        "Requests of the line protocol that were understood, by command"
    HTTP_REQUESTS Counter Always "dflockd_http_requests_total" ["method" "path" "status"]
        "HTTP requests that were answered, by method, route and status"
    HTTP_SECONDS_SUM Counter Always "dflockd_http_request_duration_seconds_sum" ["method" "path" "status"]
        "Time it took to answer them, long polls included"
    HTTP_SECONDS_COUNT Counter Always "dflockd_http_request_duration_seconds_count" ["method" "path" "status"]
        "How many requests are in that sum"
    GRPC_REQUESTS Counter Always "dflockd_grpc_requests_total" ["service" "method" "code"]
        "Calls over gRPC that have ended, by service, method and code; `other` is what there is no method for"
    GRPC_SECONDS_SUM Counter Always "dflockd_grpc_request_duration_seconds_sum" ["service" "method" "code"]
        "How long they took, waits and streams included"
    GRPC_SECONDS_COUNT Counter Always "dflockd_grpc_request_duration_seconds_count" ["service" "method" "code"]
        "How many calls are in that sum"

    LOCKS_HELD Gauge State "dflockd_locks_held" []
        "Holds of mutexes, elections and read-write locks"
    LOCK_WAITERS Gauge State "dflockd_lock_waiters" []
        "Places in the queues of mutexes, elections and read-write locks"
    SEMAPHORE_HOLDERS Gauge State "dflockd_semaphore_holders" []
        "Holds of semaphores"
    SEMAPHORE_WAITERS Gauge State "dflockd_semaphore_waiters" []
        "Places in the queues of semaphores"
    HOLDS Gauge State "dflockd_holds" ["primitive"]
        "Holds by kind"
    WAITERS Gauge State "dflockd_waiters" ["primitive"]
        "Places in queues by kind"
    QUEUE_LONGEST Gauge State "dflockd_queue_longest" []
        "Waiters in the longest queue of a single lock"
    LOCK_KEYS Gauge State "dflockd_lock_keys" []
        "Keys of locks, idle ones included; --max-locks is their limit"
    VALUES Gauge State "dflockd_values" ["kind"]
        "Counters, KV entries, lists and barriers; --max-keys is the limit of all together"
    SIGNAL_LISTENERS Gauge State "dflockd_signal_listeners" []
        "Subscriptions to signals"
    SUBSCRIPTIONS Gauge State "dflockd_subscriptions" ["kind"]
        "Subscriptions to signals, to changes of keys and to leaders"
    KEPT_RESULTS Gauge State "dflockd_kept_results" []
        "Results kept for requests that may be repeated"
    KEPT_RESULTS_BYTES Gauge State "dflockd_kept_results_bytes" []
        "About how many bytes they have"

    GRANTS Counter State "dflockd_grants_total" ["primitive"]
        "Holds that began"
    RELEASES Counter State "dflockd_releases_total" ["primitive"]
        "Holds that were given back"
    EXPIRIES Counter State "dflockd_expiries_total" ["primitive"]
        "Holds whose lease ran out"
    FORCED_RELEASES Counter State "dflockd_forced_releases_total" ["primitive"]
        "Holds that an operator ended"
    SESSION_ENDS Counter State "dflockd_session_end_releases_total" ["primitive"]
        "Holds that ended with their session"
    TIMEOUTS Counter State "dflockd_timeouts_total" ["primitive"]
        "Requests for a lock that ended without a grant: too late, withdrawn, or only tried"
    WAIT_SECONDS Histogram State "dflockd_wait_seconds" ["primitive"]
        "From the queue to the grant, of those who had to queue and were granted"
    HOLD_SECONDS Histogram State "dflockd_hold_seconds" ["primitive"]
        "From the grant to the end of the hold"
    UNDONE Counter State "dflockd_undone_total" []
        "Grants that were taken back because whoever asked was gone"
    COMMANDS Counter State "dflockd_commands_total" ["command"]
        "Commands the state has executed, whatever protocol they came by"
    REFUSALS Counter State "dflockd_refusals_total" ["reason"]
        "Commands that were refused"

    RAFT_STATE Gauge Cluster "dflockd_raft_state" ["state"]
        "1 for what this member is"
    RAFT_IS_LEADER Gauge Cluster "dflockd_raft_is_leader" []
        "1 on the leader"
    RAFT_HAS_LEADER Gauge Cluster "dflockd_raft_has_leader" []
        "1 if this member knows a leader"
    RAFT_TERM Gauge Cluster "dflockd_raft_term" []
        "The term"
    RAFT_COMMIT_INDEX Gauge Cluster "dflockd_raft_commit_index" []
        "The last entry known to be on a majority"
    RAFT_APPLIED_INDEX Gauge Cluster "dflockd_raft_applied_index" []
        "The last entry whose effect can be seen here"
    RAFT_LAST_LOG_INDEX Gauge Cluster "dflockd_raft_last_log_index" []
        "The last entry of the log"
    RAFT_SNAPSHOT_INDEX Gauge Cluster "dflockd_raft_snapshot_index" []
        "The entry up to which there is a snapshot"
    RAFT_VOTERS Gauge Cluster "dflockd_raft_voters" []
        "Members that vote"
    RAFT_LEARNERS Gauge Cluster "dflockd_raft_learners" []
        "Members that only listen"
    RAFT_PEERS_CONNECTED Gauge Cluster "dflockd_raft_peers_connected" []
        "Other members this one can send to"
    RAFT_FOLLOWER_LAG Gauge Cluster "dflockd_raft_follower_lag_entries" ["node"]
        "On the leader: entries a member has not confirmed yet"
    RAFT_PROPOSALS Counter Cluster "dflockd_raft_proposals_total" []
        "Entries this member proposed as leader"
    RAFT_PROPOSALS_FAILED Counter Cluster "dflockd_raft_proposals_failed_total" []
        "Requests this member could not bring to a decision in time"
    RAFT_LOOKS Counter Cluster "dflockd_raft_looks_total" []
        "Looks at the whole state, which all requests of the member wait for: stats, lists, event streams, /metrics"
    RAFT_APPLY Counter Cluster "dflockd_raft_apply_total" []
        "Entries that were applied"
    RAFT_APPLY_FAILED Counter Cluster "dflockd_raft_apply_failed_total" []
        "Entries that could not be applied; the member stops at the first"
    RAFT_APPLY_NANOS Counter Cluster "dflockd_raft_apply_nanos_total" []
        "Nanoseconds spent in turns that applied entries"
    RAFT_APPLY_SECONDS Histogram Cluster "dflockd_raft_apply_duration_seconds" []
        "Time of each turn that applied entries"
    RAFT_LEADER_CHANGES Counter Cluster "dflockd_raft_leader_changes_total" []
        "How often this member saw another leader than before"
    RAFT_ELECTIONS Counter Cluster "dflockd_raft_elections_total" []
        "Elections in which this member stood"
    RAFT_BAD_FRAMES Counter Cluster "dflockd_raft_bad_frames_total" []
        "Frames on the peer port that the peer did not send so; each ended its connection"
    RAFT_TIME_LAG Gauge Cluster "dflockd_raft_time_lag_seconds" []
        "How long ago this member was told the cluster's time by a leader; 0 on the leader"
    RAFT_ADMIN_CHANGES Counter Cluster "dflockd_raft_admin_changes_total" ["op"]
        "Changes of the membership that were asked for here"
    RAFT_FSYNC_SECONDS Histogram Cluster "dflockd_raft_fsync_seconds" []
        "Time of each sync of the log"
    RAFT_LOG_BYTES Gauge Cluster "dflockd_raft_log_bytes" []
        "Bytes of the log on disk, its reserve included"
    RAFT_SNAPSHOT_BYTES Gauge Cluster "dflockd_raft_snapshot_bytes" []
        "Bytes of the latest snapshot"
    PUSHES_DROPPED Counter Cluster "dflockd_pushes_dropped_total" []
        "Pushes to clients that were too slow for them, which were then cut off"

    PROCESS_CPU Counter Always "process_cpu_seconds_total" []
        "Processor time used"
    PROCESS_RESIDENT Gauge Always "process_resident_memory_bytes" []
        "Memory in use"
    PROCESS_VIRTUAL Gauge Always "process_virtual_memory_bytes" []
        "Address space in use"
    PROCESS_FDS Gauge Always "process_open_fds" []
        "Open file descriptors"
    PROCESS_FDS_MAX Gauge Always "process_max_fds" []
        "How many there may be"
    PROCESS_THREADS Gauge Always "process_threads" []
        "Threads"
    PROCESS_START Gauge Always "process_start_time_seconds" []
        "When the process began, in seconds since 1970"
}

/// The list as a table for people.
#[must_use]
pub fn table() -> String {
    let mut table = String::from(
        "| Name | Type | Labels | Where | Meaning |\n| --- | --- | --- | --- | --- |\n",
    );
    for Metric { name, kind, labels, found, help } in METRICS {
        let labels: Vec<_> = labels.iter().map(|label| format!("`{label}`")).collect();
        let found = match found {
            Where::Always => "",
            Where::State => "state",
            Where::Cluster => "cluster",
        };
        let (kind, labels) = (kind.name(), labels.join(", "));
        table += &format!("| `{name}` | {kind} | {labels} | {found} | {help} |\n");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_they_are() {
        let mut seen = std::collections::BTreeSet::new();
        for metric in METRICS {
            assert!(seen.insert(metric.name), "{} comes twice", metric.name);
            let ours = ["dflockd_", "process_"].iter().any(|it| metric.name.starts_with(it));
            assert!(ours, "{} has no prefix", metric.name);
            // Two names of the protocol's document, and two like them, are counters that look like a part of a summary.
            let summary = [HTTP_SECONDS_SUM, GRPC_SECONDS_SUM]
                .iter()
                .any(|sum| metric.name.starts_with(sum.name.trim_end_matches("sum")));
            let counts = metric.name.ends_with("_total") || summary;
            assert_eq!(counts, metric.kind == Kind::Counter, "{}", metric.name);
            assert!(!metric.help.ends_with('.'), "{}", metric.name);
            assert!(!metric.labels.contains(&"key"), "{} would show a key", metric.name);
        }
    }
}
