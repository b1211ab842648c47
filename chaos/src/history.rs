//! What clients asked and were told in one act, and what all of its threads share.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dflockd_testkit::Noise;
use parking_lot::Mutex;

use crate::request::Request;

/// How long an answer may take beyond the request's own wait if nothing is broken: five seconds, and more for a machine
/// that does other things as well.
const ANSWER: Duration = Duration::from_secs(5 + 15);
/// How long a client hopes for an answer while things break: a process may stand still for ten seconds, twice.
const PATIENCE: Duration = Duration::from_secs(5 + 20 + 20);

/// Nanoseconds since the beginning of the run.
pub type Moment = u64;

/// One request and what came of it.
#[derive(Clone, Debug)]
pub struct Event {
    /// Who asked. A connection that goes on where another one ended is the same client.
    pub client: usize,
    /// What.
    pub request: Request,
    /// When it was sent first.
    pub begin: Moment,
    /// When the answer came and which; none: nobody knows.
    pub end: Option<(Moment, String)>,
    /// Its connection has words for everything.
    pub greeted: bool,
}

/// A time in which a client was entitled to act (R4).
#[derive(Clone, Debug)]
pub struct Stay {
    /// What it held alone.
    pub key: String,
    /// Who.
    pub client: usize,
    /// By which fence.
    pub fence: u64,
    /// From when, as the client knew.
    pub from: Moment,
    /// Until when, as the client knew.
    pub until: Moment,
}

/// All of an act.
#[derive(Debug, Default)]
pub struct History {
    /// Requests of keys.
    pub events: Vec<Event>,
    /// Who ended a connection by itself, and when.
    pub given_up: Vec<(usize, Moment)>,
    /// Who held what alone.
    pub stays: Vec<Stay>,
}

/// What the threads of an act share.
pub struct Act {
    /// Its number: all its keys begin with it.
    pub number: u64,
    /// When the run began.
    pub begun: Instant,
    /// Where members speak the line protocol.
    pub servers: Mutex<Vec<SocketAddr>>,
    /// What happened.
    pub history: Mutex<History>,
    /// Promises that were broken.
    pub broken: Mutex<Vec<String>>,
    /// How often each answer came, by its first word, and whatever else is worth counting.
    pub counts: Mutex<BTreeMap<String, u64>>,
    is_over: AtomicBool,
    calm_since: AtomicU64,
}

impl Act {
    /// The beginning of an act.
    pub fn new(number: u64, begun: Instant, servers: Vec<SocketAddr>) -> Self {
        Self {
            number,
            begun,
            servers: Mutex::new(servers),
            history: Mutex::default(),
            broken: Mutex::default(),
            counts: Mutex::default(),
            is_over: AtomicBool::new(false),
            calm_since: AtomicU64::new(Moment::MAX),
        }
    }

    /// Now.
    pub fn now(&self) -> Moment {
        moment(self.begun.elapsed())
    }

    /// A name in this act.
    pub fn key(&self, name: impl std::fmt::Display) -> String {
        format!("{}.{name}", self.number)
    }

    /// One of the members.
    pub fn server(&self, noise: &mut Noise) -> SocketAddr {
        let servers = self.servers.lock();
        servers[noise.below(servers.len())]
    }

    /// Nothing is broken any more.
    pub fn calm(&self) {
        self.calm_since.store(self.now(), Ordering::SeqCst);
    }

    /// No new requests.
    pub fn end(&self) {
        self.is_over.store(true, Ordering::SeqCst);
    }

    /// Whether there is nothing more to do.
    pub fn is_over(&self) -> bool {
        self.is_over.load(Ordering::SeqCst)
    }

    /// A promise was broken.
    pub fn broken(&self, what: String) {
        self.broken.lock().push(what);
    }

    /// Something happened.
    pub fn count(&self, what: &str) {
        *self.counts.lock().entry(what.to_owned()).or_default() += 1;
    }

    /// How long to hope for an answer.
    pub fn patience(wait: Duration) -> Duration {
        wait + PATIENCE
    }

    /// A request that was sent `begin` has waited until now, as it may for `wait`: whether that was too long.
    pub fn check_time(&self, what: &dyn std::fmt::Debug, begin: Moment, wait: Duration) {
        let (now, calm) = (self.now(), self.calm_since.load(Ordering::SeqCst));
        let waited = now.saturating_sub(begin);
        let is_late = waited > moment(Self::patience(wait));
        let is_late_in_calm = now.saturating_sub(begin.max(calm)) > moment(wait + ANSWER);
        if is_late || is_late_in_calm {
            let (waited, calm) = (waited / 1_000_000, now.saturating_sub(calm) / 1_000_000);
            let what = format!("43: no answer for {waited} ms ({calm} ms of calm): {what:?}");
            self.broken(what);
        }
    }

    /// Takes down what came of a request. The first word of each answer is counted.
    pub fn took(&self, event: Event) {
        let word = match &event.end {
            Some((_, answer)) => answer.split(' ').next().unwrap_or_default().to_owned(),
            None => "(lost)".to_owned(),
        };
        let command = event.request.lines(crate::request::Unit::Seconds).0;
        self.count(&format!("{command} {word}"));
        self.history.lock().events.push(event);
    }

    /// A client is about to end a connection.
    pub fn give_up(&self, client: usize) {
        let now = self.now();
        self.history.lock().given_up.push((client, now));
    }
}

/// As a moment, or a span between two.
pub fn moment(time: Duration) -> Moment {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
