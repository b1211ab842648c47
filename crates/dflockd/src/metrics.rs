//! What is counted, and `/metrics`: all of it as text.
//!
//! The state counts for itself (`Tally` of the core), so do members of a cluster; what belongs to a protocol is counted
//! here. A scrape copies totals. It never looks at the locks one by one, and no key is ever shown.

mod grpc;
mod names;
mod page;
mod process;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use arc_swap::ArcSwap;
use axum::http::{Method, StatusCode};
use dflockd_core::{
    BUCKETS, CommandKind, Counts, Histogram, KeyKind, Primitive, REFUSALS, Span, Tally, Timestamp,
};
use dflockd_engine::{Api, Replicated, TIMES_BUCKETS, Times};
use dflockd_replica::Role;
use dflockd_wire::{OPS, Op};
use parking_lot::Mutex;
use tonic::Code;

pub(crate) use self::grpc::{Method as GrpcMethod, Streams};
pub use self::names::{Kind, METRICS, Metric, Where, table};
pub(crate) use self::page::CONTENT_TYPE;

use self::names as n;
use self::page::{Buckets, Page};
use self::process::Process;
use crate::frontend::auth::{Denied, TokenKind};
use crate::frontend::line::foreign::{Foreign, ForeignCounts};
use crate::logging;
use crate::service::{Service, seconds};

/// The route of requests that match none.
const UNMATCHED: &str = "unmatched";
/// Combinations of method, route and status that are told apart. There are fewer, unless a route is not a template.
const ROWS_MAX: usize = 2048;

/// What is counted besides the state.
#[derive(Default)]
pub struct Metrics {
    started: Timestamp,
    line_requests: LineRequests,
    apis: [ApiCounts; 3],
    /// By route. Replaced as a whole when a row is added, which soon does not happen any more.
    http: ArcSwap<HashMap<Box<str>, Vec<Arc<Row>>>>,
    adding: Mutex<()>,
    grpc: grpc::Calls,
    http_sessions: AtomicU64,
    /// Who does not speak the line protocol on its port.
    pub(crate) foreign: ForeignCounts,
}

struct LineRequests([AtomicU64; OPS.len()]);

impl Default for LineRequests {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

/// What happens at one API.
#[derive(Default)]
struct ApiCounts {
    connections: AtomicU64,
    connections_max: AtomicU64,
    refused: AtomicU64,
    /// By the kind of token.
    auth_failures: [AtomicU64; 2],
    auth_throttled: [AtomicU64; 2],
    revoked: AtomicU64,
    forbidden: AtomicU64,
    slow_readers: AtomicU64,
}

/// Answers with the same method, route and status.
struct Row {
    method: &'static str,
    status: StatusCode,
    count: AtomicU64,
    nanos: AtomicU64,
}

impl Metrics {
    pub(crate) fn new(started: Timestamp) -> Self {
        Self { started, ..Self::default() }
    }

    /// A request of the line protocol is executed.
    pub(crate) fn line_request(&self, op: Op) {
        self.line_requests.0[op as usize].fetch_add(1, Relaxed);
    }

    /// An HTTP request is answered. `path` is the template of its route, if it has one.
    pub(crate) fn http_request(
        &self,
        method: &Method,
        path: Option<&str>,
        status: StatusCode,
        took: Duration,
    ) {
        let (method, path) = (known_method(method), path.unwrap_or(UNMATCHED));
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        let rows = self.http.load();
        let row = rows.get(path).and_then(|rows| find(rows, method, status));
        match row {
            Some(row) => row.add(nanos),
            None => self.row(method, path, status).add(nanos),
        }
    }

    /// The row of a combination that is new.
    fn row(&self, method: &'static str, path: &str, status: StatusCode) -> Arc<Row> {
        let _alone = self.adding.lock();
        let known = self.http.load();
        let full = known.values().map(Vec::len).sum::<usize>() >= ROWS_MAX;
        let path = if full { UNMATCHED } else { path };
        if let Some(row) = known.get(path).and_then(|rows| find(rows, method, status)) {
            return Arc::clone(row);
        }
        let (count, nanos) = (AtomicU64::new(0), AtomicU64::new(0));
        let row = Arc::new(Row { method, status, count, nanos });
        let mut rows = HashMap::clone(&known);
        rows.entry(path.into()).or_default().push(Arc::clone(&row));
        self.http.store(Arc::new(rows));
        row
    }

    /// A call over gRPC has ended.
    pub(crate) fn grpc_call(&self, method: &GrpcMethod, code: Code, took: Duration) {
        self.grpc.add(method, code, took);
    }

    /// How many requests there were, over all protocols.
    pub(crate) fn requests(&self) -> u64 {
        let line: u64 = self.line_requests.0.iter().map(|count| count.load(Relaxed)).sum();
        let rows = self.http.load();
        let http: u64 = rows.values().flatten().map(|row| row.count.load(Relaxed)).sum();
        line + http + self.grpc.total()
    }

    /// There are so many connections now. Those of the line protocol are counted by the service.
    pub(crate) fn set_connections(&self, api: Api, count: u64) {
        self.apis[api as usize].connections.store(count, Relaxed);
    }

    /// So many connections each protocol can have.
    pub(crate) fn set_connections_max(&self, max: impl Fn(Api) -> u64) {
        for api in Api::ALL {
            self.apis[api as usize].connections_max.store(max(api), Relaxed);
        }
    }

    /// There was no room for a connection.
    pub(crate) fn connection_refused(&self, api: Api) {
        self.apis[api as usize].refused.fetch_add(1, Relaxed);
    }

    /// Somebody had a wrong token, or none, or may not try any more.
    pub(crate) fn auth_failed(&self, api: Api, kind: TokenKind, denied: Denied) {
        let counts = &self.apis[api as usize];
        counts.auth_failures[kind as usize].fetch_add(1, Relaxed);
        if denied == Denied::TooMany {
            counts.auth_throttled[kind as usize].fetch_add(1, Relaxed);
        }
    }

    /// Something ended because it came with a token that is no longer valid.
    pub(crate) fn revoked(&self, api: Api) {
        self.apis[api as usize].revoked.fetch_add(1, Relaxed);
    }

    /// An identity asked for what it may not do.
    pub(crate) fn forbidden(&self, api: Api) {
        self.apis[api as usize].forbidden.fetch_add(1, Relaxed);
    }

    /// Somebody was cut off who did not take in what waited for it.
    pub(crate) fn slow_reader(&self, api: Api) {
        self.apis[api as usize].slow_readers.fetch_add(1, Relaxed);
    }

    /// How many HTTP sessions there are.
    pub(crate) fn http_sessions(&self) -> u64 {
        self.http_sessions.load(Relaxed)
    }

    /// There are so many HTTP sessions now.
    pub(crate) fn set_http_sessions(&self, count: u64) {
        self.http_sessions.store(count, Relaxed);
    }

    /// Everything as text. May take a while where the state belongs to a cluster, so not for a thread that others
    /// wait for.
    pub(crate) fn encode(&self, service: &Service) -> String {
        let mut page = Page::default();
        self.add_service(&mut page, service);
        self.add_apis(&mut page, service);
        self.add_requests(&mut page);
        if let Some(tally) = service.engine.tally() {
            add_tally(&mut page, &tally);
        }
        if let Some(member) = service.engine.replicated() {
            add_cluster(&mut page, member);
        }
        add_process(&mut page, &Process::read());
        page.print()
    }

    fn add_service(&self, page: &mut Page, service: &Service) {
        let member = service.engine.replicated();
        let ready = !service.is_draining() && member.is_none_or(|member| member.is_ready());
        page.value(&n::READY, ready);
        let primary = member.is_none_or(|member| member.view().is_leader());
        page.value(&n::PRIMARY, primary);
        let now = service.engine.clock().now();
        page.value(&n::UPTIME, seconds(now.since(self.started)));
        let mode = if member.is_some() { "replicated" } else { "memory" };
        let labels = [env!("CARGO_PKG_VERSION").to_owned(), mode.to_owned()];
        page.values(&n::BUILD_INFO, [(labels, 1u64)]);
        page.value(&n::EVENT_FOLLOWERS, service.feed.followers());
        page.value(&n::LOG_SUPPRESSED, service.log_budget.suppressed());
        page.value(&n::LOG_LOST, logging::lines_lost());
    }

    fn add_apis(&self, page: &mut Page, service: &Service) {
        let line = service.connections.load(Relaxed) as u64;
        page.value(&n::CONNECTIONS, line);
        let each = |count: &dyn Fn(Api) -> u64| Api::ALL.map(|api| (api.name(), count(api)));
        page.by(
            &n::OPEN_CONNECTIONS,
            each(&|api| match api {
                Api::Line => line,
                Api::Http | Api::Grpc => self.apis[api as usize].connections.load(Relaxed),
            }),
        );
        let counts = |api: Api| &self.apis[api as usize];
        page.by(&n::CONNECTIONS_MAX, each(&|api| counts(api).connections_max.load(Relaxed)));
        page.by(&n::CONNECTIONS_REFUSED, each(&|api| counts(api).refused.load(Relaxed)));
        let tokens = |count: fn(&ApiCounts) -> &[AtomicU64; 2]| {
            let rows = Api::ALL.into_iter().flat_map(|api| TokenKind::ALL.map(|kind| (api, kind)));
            rows.map(move |(api, kind)| {
                let labels = [api.name().to_owned(), kind.name().to_owned()];
                (labels, count(counts(api))[kind as usize].load(Relaxed))
            })
        };
        page.values(&n::AUTH_FAILURES, tokens(|counts| &counts.auth_failures));
        page.values(&n::AUTH_THROTTLED, tokens(|counts| &counts.auth_throttled));
        page.by(&n::REVOKED, each(&|api| counts(api).revoked.load(Relaxed)));
        page.by(&n::FORBIDDEN, each(&|api| counts(api).forbidden.load(Relaxed)));
        let foreign = Foreign::ALL.map(|other| (other.name(), self.foreign.count(other)));
        page.by(&n::FOREIGN_PROTOCOLS, foreign);
        page.by(&n::SLOW_READERS, each(&|api| counts(api).slow_readers.load(Relaxed)));
        page.by(&n::OPEN_SESSIONS, each(&|api| service.engine.session_count(api)));
        page.value(&n::HTTP_SESSIONS, self.http_sessions.load(Relaxed));
    }

    fn add_requests(&self, page: &mut Page) {
        let line = OPS.iter().zip(&self.line_requests.0);
        let line = line.map(|(spec, count)| (spec.name, count.load(Relaxed)));
        page.by(&n::LINE_REQUESTS, line.filter(|(_, count)| *count > 0));

        let rows = self.http.load();
        let mut rows: Vec<_> = rows
            .iter()
            .flat_map(|(path, rows)| rows.iter().map(move |row| (row.labels(path), row)))
            .collect();
        rows.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let each = |value: fn(&Row) -> page::Value| {
            rows.iter().map(move |(labels, row)| (labels.clone(), value(row)))
        };
        page.values(&n::HTTP_REQUESTS, each(|row| row.count.load(Relaxed).into()));
        page.values(
            &n::HTTP_SECONDS_SUM,
            each(|row| seconds(Span(row.nanos.load(Relaxed))).into()),
        );
        page.values(&n::HTTP_SECONDS_COUNT, each(|row| row.count.load(Relaxed).into()));

        let rows = self.grpc.rows();
        let counts = || rows.iter().map(|(labels, count, _)| (labels.clone(), *count));
        let times = rows.iter().map(|(labels, _, nanos)| (labels.clone(), seconds(Span(*nanos))));
        page.values(&n::GRPC_REQUESTS, counts());
        page.values(&n::GRPC_SECONDS_SUM, times);
        page.values(&n::GRPC_SECONDS_COUNT, counts());
    }
}

impl Row {
    fn add(&self, nanos: u64) {
        self.count.fetch_add(1, Relaxed);
        self.nanos.fetch_add(nanos, Relaxed);
    }

    fn labels(&self, path: &str) -> [String; 3] {
        [self.method.to_owned(), path.to_owned(), self.status.as_str().to_owned()]
    }
}

fn find<'a>(rows: &'a [Arc<Row>], method: &str, status: StatusCode) -> Option<&'a Arc<Row>> {
    rows.iter().find(|row| row.status == status && row.method == method)
}

/// A method by its name; clients can invent others.
pub(crate) fn known_method(method: &Method) -> &'static str {
    const KNOWN: [&str; 9] =
        ["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "CONNECT", "TRACE"];
    let known = KNOWN.iter().find(|known| **known == method.as_str());
    known.copied().unwrap_or("OTHER")
}

fn add_tally(page: &mut Page, tally: &Tally) {
    let of = |count: fn(&Counts) -> u64| {
        Primitive::ALL.map(|primitive| (primitive.name(), count(tally.of(primitive))))
    };
    let total = |count: fn(&Counts) -> u64| {
        let semaphores = count(tally.of(Primitive::Semaphore));
        (tally.primitives.iter().map(count).sum::<u64>() - semaphores, semaphores)
    };
    let (locks, semaphores) = total(|counts| counts.held);
    page.value(&n::LOCKS_HELD, locks);
    page.value(&n::SEMAPHORE_HOLDERS, semaphores);
    let (locks, semaphores) = total(|counts| counts.waiting);
    page.value(&n::LOCK_WAITERS, locks);
    page.value(&n::SEMAPHORE_WAITERS, semaphores);
    page.by(&n::HOLDS, of(|counts| counts.held));
    page.by(&n::WAITERS, of(|counts| counts.waiting));
    page.value(&n::QUEUE_LONGEST, tally.longest_queue);
    page.value(&n::LOCK_KEYS, tally.lock_keys);
    let values = [
        (KeyKind::Counter, tally.counters),
        (KeyKind::Kv, tally.kv),
        (KeyKind::List, tally.lists),
        (KeyKind::Barrier, tally.barriers),
    ];
    page.by(&n::VALUES, values.map(|(kind, count)| (kind.name(), count)));
    page.value(&n::SIGNAL_LISTENERS, tally.listeners);
    let subscriptions =
        [("signals", tally.listeners), ("changes", tally.watches), ("leaders", tally.observers)];
    page.by(&n::SUBSCRIPTIONS, subscriptions);
    page.value(&n::KEPT_RESULTS, tally.results);
    page.value(&n::KEPT_RESULTS_BYTES, tally.results_bytes);

    page.by(&n::GRANTS, of(|counts| counts.grants));
    page.by(&n::RELEASES, of(|counts| counts.releases));
    page.by(&n::EXPIRIES, of(|counts| counts.expiries));
    page.by(&n::FORCED_RELEASES, of(|counts| counts.forced));
    page.by(&n::SESSION_ENDS, of(|counts| counts.ended));
    page.by(&n::TIMEOUTS, of(|counts| counts.timeouts));
    let histograms = |of: fn(&Counts) -> &Histogram| {
        Primitive::ALL.map(|primitive| (Some(primitive.name()), buckets(of(tally.of(primitive)))))
    };
    page.histograms(&n::WAIT_SECONDS, histograms(|counts| &counts.wait));
    page.histograms(&n::HOLD_SECONDS, histograms(|counts| &counts.hold));
    page.value(&n::UNDONE, tally.undone);
    let commands = CommandKind::ALL.iter().zip(tally.commands);
    page.by(&n::COMMANDS, commands.map(|((_, name), count)| (*name, count)));
    let refusals = REFUSALS.iter().zip(tally.refusals);
    page.by(&n::REFUSALS, refusals.map(|((_, spec), count)| (spec.name, count)));
}

fn buckets(histogram: &Histogram) -> Buckets {
    let bounds = BUCKETS.iter().map(|&bound| seconds(bound)).chain([f64::INFINITY]);
    #[expect(clippy::cast_precision_loss, reason = "a sum of measured times")]
    let sum = histogram.sum as f64 / 1e9;
    Buckets { counts: bounds.zip(histogram.counts).collect(), sum }
}

fn add_cluster(page: &mut Page, member: &Replicated) {
    let view = member.view();
    let status = view.status;
    let role = status.map(|status| status.role);
    let roles = Role::ALL.into_iter().map(Some).chain([None]);
    page.by(&n::RAFT_STATE, roles.map(|it| (Role::name_of(it), it == role)));
    page.value(&n::RAFT_IS_LEADER, view.is_leader());
    page.value(&n::RAFT_HAS_LEADER, status.is_some_and(|status| status.leader.is_some()));
    page.known(&n::RAFT_TERM, status.map(|status| status.term));
    page.known(&n::RAFT_COMMIT_INDEX, status.map(|status| status.commit));
    page.known(&n::RAFT_APPLIED_INDEX, status.map(|status| status.applied));
    page.known(&n::RAFT_LAST_LOG_INDEX, status.map(|status| status.last));
    page.known(&n::RAFT_SNAPSHOT_INDEX, status.map(|status| status.snapshot));
    page.value(&n::RAFT_VOTERS, view.voters.len());
    page.value(&n::RAFT_LEARNERS, view.learners.len());

    let gauges = member.gauges();
    let connected = gauges.connected.lock().clone();
    let peers = view.members.keys().filter(|&&id| id != view.raft_id && connected.contains(&id));
    page.value(&n::RAFT_PEERS_CONNECTED, peers.count());
    let lags = gauges.lags.lock().clone();
    let named = |id| view.members.get(&id).map(|member| member.node.clone());
    page.by(
        &n::RAFT_FOLLOWER_LAG,
        lags.into_iter().filter_map(|(id, lag)| Some((named(id)?, lag))),
    );
    page.value(&n::RAFT_PROPOSALS, gauges.proposals.load(Relaxed));
    page.value(&n::RAFT_PROPOSALS_FAILED, gauges.proposals_failed.load(Relaxed));
    page.value(&n::RAFT_LOOKS, gauges.looks.load(Relaxed));
    page.value(&n::RAFT_APPLY, gauges.applied.load(Relaxed));
    // The member stops at the first, so nobody could ever see another number.
    page.value(&n::RAFT_APPLY_FAILED, 0u64);
    page.value(&n::RAFT_APPLY_NANOS, gauges.apply.nanos());
    page.histograms(&n::RAFT_APPLY_SECONDS, [(None, times(&gauges.apply))]);
    page.value(&n::RAFT_LEADER_CHANGES, gauges.leader_changes.load(Relaxed));
    page.value(&n::RAFT_ELECTIONS, gauges.elections.load(Relaxed));
    page.value(&n::RAFT_BAD_FRAMES, gauges.bad_frames.load(Relaxed));
    page.known(&n::RAFT_TIME_LAG, gauges.time_lag(member.clock().now()).map(seconds));
    let changes = [
        ("add_voter", &gauges.added[0]),
        ("add_voter_failed", &gauges.added[1]),
        ("remove_server", &gauges.removed[0]),
        ("remove_server_failed", &gauges.removed[1]),
    ];
    page.by(&n::RAFT_ADMIN_CHANGES, changes.map(|(op, count)| (op, count.load(Relaxed))));
    page.histograms(&n::RAFT_FSYNC_SECONDS, [(None, times(&gauges.fsync))]);
    page.value(&n::RAFT_LOG_BYTES, gauges.log_bytes.load(Relaxed));
    page.value(&n::RAFT_SNAPSHOT_BYTES, gauges.snapshot_bytes.load(Relaxed));
    page.value(&n::PUSHES_DROPPED, member.pushes_dropped());
}

fn times(times: &Times) -> Buckets {
    let bounds = TIMES_BUCKETS.iter().copied().chain([f64::INFINITY]);
    let sum = seconds(Span(times.nanos()));
    Buckets { counts: bounds.zip(times.counts()).collect(), sum }
}

fn add_process(page: &mut Page, process: &Process) {
    page.known(&n::PROCESS_CPU, process.cpu_seconds);
    page.known(&n::PROCESS_RESIDENT, process.resident_bytes);
    page.known(&n::PROCESS_VIRTUAL, process.virtual_bytes);
    page.known(&n::PROCESS_FDS, process.fds);
    page.known(&n::PROCESS_FDS_MAX, process.fds_max);
    page.known(&n::PROCESS_THREADS, process.threads);
    page.known(&n::PROCESS_START, process.start_seconds);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(metrics: &Metrics) -> Vec<([String; 3], u64)> {
        let rows = metrics.http.load();
        let rows = rows.iter().flat_map(|(path, rows)| rows.iter().map(move |row| (path, row)));
        let mut counts: Vec<_> =
            rows.map(|(path, row)| (row.labels(path), row.count.load(Relaxed))).collect();
        counts.sort();
        counts
    }

    #[test]
    fn clients_can_not_make_labels() {
        let metrics = Metrics::default();
        let brew = Method::from_bytes(b"BREW").unwrap();
        for method in [&Method::GET, &Method::GET, &brew] {
            metrics.http_request(method, Some("/v1/x"), StatusCode::OK, Duration::from_secs(2));
        }
        metrics.http_request(&brew, None, StatusCode::NOT_FOUND, Duration::ZERO);
        let labels = |labels: [&str; 3]| labels.map(str::to_owned);
        let wanted = [
            (labels(["GET", "/v1/x", "200"]), 2),
            (labels(["OTHER", "/v1/x", "200"]), 1),
            (labels(["OTHER", UNMATCHED, "404"]), 1),
        ];
        assert_eq!(counts(&metrics), wanted);
        metrics.line_request(Op::Ping);
        assert_eq!(metrics.requests(), 5);
    }

    #[test]
    fn there_is_a_bound_even_for_paths_that_are_no_templates() {
        let metrics = Metrics::default();
        for number in 0..2 * ROWS_MAX {
            let path = format!("/{number}");
            metrics.http_request(&Method::GET, Some(&path), StatusCode::OK, Duration::ZERO);
        }
        let counts = counts(&metrics);
        assert!(counts.len() <= ROWS_MAX + 1, "{}", counts.len());
        assert_eq!(metrics.requests(), 2 * ROWS_MAX as u64, "none is lost");
    }

    #[test]
    fn rows_are_found_while_others_are_added() {
        let metrics = Metrics::default();
        let statuses = [StatusCode::OK, StatusCode::CONFLICT, StatusCode::GONE];
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for round in 0..3000 {
                        let (path, status) = (format!("/{}", round % 7), statuses[round % 3]);
                        metrics.http_request(&Method::GET, Some(&path), status, Duration::ZERO);
                    }
                });
            }
        });
        assert_eq!(metrics.requests(), 12_000);
        assert_eq!(counts(&metrics).len(), 21);
    }
}
