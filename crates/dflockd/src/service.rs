//! What all connections share: the engine, the settings they look at, the tokens, the drain.

use std::collections::HashSet;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dflockd_core::{SessionId, Shared, Span};
use dflockd_engine::{Clock, Engine, FenceFile, Fences, LogBudget, Memory, Options};
use dflockd_identity::{Identity, Role};
use dflockd_replica::types::{AutoRelease, Policy};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::audit::Audit;
use crate::config::{Config, FollowerMode, GrantDelay};
use crate::frontend::auth::Auth;
use crate::frontend::detached::Detached;
use crate::frontend::feed::Feed;
use crate::frontend::pool::{Background, Pool};
use crate::metrics::Metrics;
use crate::report;
use crate::telemetry::{self, Telemetry};

/// Past changes that each shard keeps for event streams over HTTP and gRPC, which can resume.
const EVENTS_MAX: u64 = 1024;

/// The longest answer that is made in one piece. What is longer comes in pages, or is refused.
pub(crate) const ANSWER_BYTES_MAX: usize = 1 << 20;
/// Looks at the state (`ls`, `inspect`, `stats`, lists) that are made at a time.
const LOOKS_MAX: usize = 4;
/// Deeds of operators that are done at a time.
const OPERATIONS_MAX: usize = 4;
/// Pages of figures that are made at a time.
const FIGURES_MAX: usize = 2;
/// How long a server that shuts down looks for idle sessions. Without a majority nobody can say which are.
const BUSY_TIMEOUT: Duration = Duration::from_secs(1);

/// What all connections share.
pub struct Service {
    /// The state.
    pub engine: Arc<Engine>,
    /// How many line-protocol connections there are.
    pub connections: AtomicUsize,
    /// Who may use the server.
    pub(crate) auth: Auth,
    /// Kept sessions whose clients are away.
    pub(crate) detached: Detached,
    pub(crate) draining: AtomicBool,
    /// Notified when requests that wait have to end.
    waits_end: Notify,
    /// The sessions that held or waited for something when the server began to shut down, if anybody could say.
    pub(crate) busy: OnceLock<HashSet<SessionId>>,
    pub(crate) read_timeout: Span,
    pub(crate) write_timeout: Option<Span>,
    pub(crate) idle_timeout: Option<Span>,
    pub(crate) wire_fence: bool,
    pub(crate) auto_release: AutoRelease,
    pub(crate) follower_mode: FollowerMode,
    pub(crate) value_bytes_max: usize,
    /// Bytes of answers and pushes that may wait for one client.
    pub(crate) pending_bytes_max: usize,
    /// Where the state is looked at.
    pub(crate) looks: Arc<Pool>,
    /// Where operators' actions are done.
    pub(crate) operations: Arc<Pool>,
    /// Where `/metrics` is made, which must not wait for the others.
    pub(crate) figures: Arc<Pool>,
    /// Changes of keys, for event streams.
    pub(crate) feed: Feed,
    pub(crate) metrics: Metrics,
    /// What operators did.
    pub(crate) audit: Audit,
    /// How many log lines clients can cause.
    pub(crate) log_budget: LogBudget,
    /// What they are for, and their files.
    pub(crate) certificates: Vec<(&'static str, PathBuf)>,
    /// Where traces are made, if they are wanted.
    pub(crate) telemetry: Option<Telemetry>,
    stats: Mutex<Option<Stats>>,
}

/// A finished `stats` text and when it was begun.
struct Stats {
    begun: u64,
    text: Arc<[u8]>,
}

impl Service {
    /// Builds the state for a configuration.
    ///
    /// # Errors
    ///
    /// If the fence state file can not be used.
    pub fn new(
        config: &Config,
        clock: Clock,
        background: impl Fn(Box<dyn FnOnce() + Send>) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let file = config.fence_state_file.as_ref().map(FenceFile::open).transpose()?;
        let shared = Arc::new(Shared::new());
        let fences = Fences::new(Arc::clone(&shared), file)?;
        let grant_delay = match config.startup_grant_delay {
            GrantDelay::Seconds(seconds) => Span::from_secs(seconds),
            GrantDelay::Auto => bounded(fences.lease_max(), span(config.max_lease_ttl)),
        };
        if grant_delay > Span::ZERO {
            let seconds = seconds(grant_delay);
            tracing::info!(seconds, "grants begin after the start-up delay");
        }
        let Policy { mut limits, auto_release, .. } = config.policy();
        if config.http_address().is_some() || config.grpc_address().is_some() {
            limits.events_max = EVENTS_MAX;
        }
        let engine = Engine::Memory(Memory::new(Options {
            limits,
            auto_release,
            grant_delay,
            sweep_interval: config.lease_sweep_interval,
            shared,
            fences,
            clock,
        }));
        Self::around(config, engine, background)
    }

    /// What connections share, around an engine that is there.
    ///
    /// # Errors
    ///
    /// If the configuration names a file that can not be used.
    pub fn around(
        config: &Config,
        engine: Engine,
        background: impl Fn(Box<dyn FnOnce() + Send>) + Send + Sync + 'static,
    ) -> anyhow::Result<Self> {
        let engine = Arc::new(engine);
        let background: Background = Arc::new(background);
        let certificates = [
            ("clients", config.tls_cert.clone()),
            ("peers", config.raft_tls_cert.clone()),
            ("authority of the peers", config.raft_tls_ca.clone()),
        ];
        let certificates = certificates.into_iter().filter_map(|(what, file)| Some((what, file?)));
        Ok(Self {
            certificates: certificates.collect(),
            feed: Feed::new(Arc::clone(&engine), &background, config.max_subscriptions_total),
            metrics: Metrics::new(engine.clock().now()),
            audit: Audit::new(),
            log_budget: LogBudget::default(),
            telemetry: telemetry::start(config)?,
            engine,
            connections: AtomicUsize::new(0),
            auth: Auth::new(config),
            detached: Detached::default(),
            draining: AtomicBool::new(false),
            waits_end: Notify::new(),
            busy: OnceLock::new(),
            read_timeout: span(config.read_timeout),
            write_timeout: some(config.write_timeout),
            idle_timeout: some(config.idle_timeout),
            wire_fence: config.wire_fence,
            auto_release: config.disconnect_policy(),
            follower_mode: config.follower_mode,
            value_bytes_max: usize::try_from(config.max_value_bytes)?,
            pending_bytes_max: usize::try_from(config.max_pending_bytes)?,
            looks: Pool::new(LOOKS_MAX, &background),
            operations: Pool::new(OPERATIONS_MAX, &background),
            figures: Pool::new(FIGURES_MAX, &background),
            stats: Mutex::new(None),
        })
    }

    /// Refuses all further requests, looks who must be waited for, and ends the waits over HTTP and gRPC.
    pub(crate) async fn begin_drain(&self) {
        self.refuse_requests();
        let engine = Arc::clone(&self.engine);
        let busy = tokio::task::spawn_blocking(move || engine.busy_sessions());
        let busy = tokio::time::timeout(BUSY_TIMEOUT, busy).await;
        self.end_waits(busy.ok().and_then(Result::ok).flatten());
    }

    /// Refuses all further requests.
    pub fn refuse_requests(&self) {
        self.draining.store(true, Ordering::SeqCst);
    }

    /// Ends the waits over HTTP and gRPC. `busy` are the sessions that hold or wait for something, if anybody could
    /// say.
    pub fn end_waits(&self, busy: Option<HashSet<SessionId>>) {
        if let Some(busy) = busy {
            let _ = self.busy.set(busy);
        }
        self.waits_end.notify_waiters();
    }

    /// Waits until the server shuts down.
    pub(crate) async fn drained(&self) {
        loop {
            let waits_end = self.waits_end.notified();
            if self.is_draining() {
                return;
            }
            waits_end.await;
        }
    }

    /// Whether a session neither holds nor waits for anything while the server shuts down.
    pub(crate) fn is_idle(&self, session: SessionId) -> bool {
        self.busy.get().is_some_and(|busy| !busy.contains(&session))
    }

    /// Whether the server is shutting down.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// The text of `stats`, as of now or later. One is built at a time; whoever asked before it was begun shares it.
    pub(crate) fn stats(&self, asked: u64) -> Arc<[u8]> {
        let mut latest = self.stats.lock();
        if let Some(stats) = &*latest
            && stats.begun > asked
        {
            return Arc::clone(&stats.text);
        }
        let begun = self.engine.clock().now().0;
        let text: Arc<[u8]> = report::stats(self, &Identity::new("server", Role::Read)).into();
        *latest = Some(Stats { begun, text: Arc::clone(&text) });
        text
    }

    /// The text of `stats` as far as somebody may see it, like [`Service::stats`].
    pub(crate) fn stats_for(&self, who: &Identity, asked: u64) -> Arc<[u8]> {
        if who.sees_all() { self.stats(asked) } else { report::stats(self, who).into() }
    }

    /// Forgets the last `stats` text if nobody asked for a while, so that it does not stay in memory for ever.
    pub(crate) fn forget_stats(&self) {
        if let Some(mut latest) = self.stats.try_lock() {
            *latest = None;
        }
    }
}

/// The start-up delay for the longest lease on record. Those that were granted before there was a longest lease, or a
/// shorter one, do not count in full: a single client could have kept the server from granting for years.
fn bounded(lease: Span, lease_max: Span) -> Span {
    if lease_max == Span::ZERO || lease <= lease_max {
        return lease;
    }
    let (recorded, max) = (seconds(lease), seconds(lease_max));
    tracing::warn!(
        recorded_s = recorded,
        max_lease_ttl_s = max,
        "a longer lease than --max-lease-ttl was granted before; the start-up delay is only \
         --max-lease-ttl, and a lock whose holder still has such a lease may be granted again"
    );
    lease_max
}

pub(crate) fn span(duration: Duration) -> Span {
    duration.into()
}

pub(crate) fn seconds(span: Span) -> f64 {
    Duration::from_nanos(span.0).as_secs_f64()
}

fn some(duration: Duration) -> Option<Span> {
    (!duration.is_zero()).then(|| span(duration))
}
