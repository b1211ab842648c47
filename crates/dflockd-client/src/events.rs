//! Streams of signals, changes and leaders. Each has connections of its own, one per server, because a push
//! does not say which subscription it belongs to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dflockd_wire::{ErrorCode, Request, pattern_is_valid};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::client::{Client, check_key};
use crate::clock::Instant;
use crate::cluster::Route;
use crate::error::Error;
use crate::reply::{Event, Incoming, Reply};
use crate::stream::{Connection, Greeting, Session};

/// Events that may wait for the application.
const BUFFERED_MAX: usize = 4096;
/// A silent connection is asked whether it still stands.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// The same in a cluster, where it is also asked whether it is in touch with the leader: one that is not hears of
/// nothing and says nothing.
const HEARTBEAT_IN_CLUSTER: Duration = Duration::from_secs(5);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(5);

/// A signal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Where it was sent.
    pub channel: String,
    /// What was sent.
    pub payload: Vec<u8>,
}

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// What happened: `acquire`, `release`, `kset` …
    pub event: String,
    /// To which key.
    pub key: Vec<u8>,
}

/// What happened to the leader of an election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaderEvent {
    /// Somebody leads.
    Elected,
    /// The leader gave up.
    Resigned,
    /// A queued candidate takes over.
    Failover,
}

/// What a stream subscribes to.
#[derive(Clone)]
enum Subscription {
    Signals { pattern: String, group: String },
    Changes { pattern: String },
    Leaders { key: Vec<u8> },
}

impl Subscription {
    fn request(&self) -> Request<'_> {
        match self {
            Self::Signals { pattern, group } => {
                Request::Listen { pattern: pattern.as_bytes(), group: group.as_bytes() }
            }
            Self::Changes { pattern } => Request::Watch { pattern: pattern.as_bytes() },
            Self::Leaders { key } => Request::Observe { key },
        }
    }
}

/// A stream of pushes from one or more servers.
struct Stream {
    events: mpsc::Receiver<Event>,
    counts: Arc<Counts>,
    tasks: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Counts {
    dropped: AtomicU64,
    interruptions: AtomicU64,
}

impl Counts {
    /// Passes an event on if there is room, or counts it.
    fn pass_on(&self, sender: &mpsc::Sender<Event>, event: Event) {
        if matches!(sender.try_send(event), Err(mpsc::error::TrySendError::Full(_))) {
            self.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Stream {
    async fn open(routes: Vec<Route>, subscription: Subscription) -> Result<Self, Error> {
        let (sender, events) = mpsc::channel(BUFFERED_MAX);
        let counts = Arc::<Counts>::default();
        let mut stream = Self { events, counts, tasks: Vec::new() };
        for route in routes {
            let (connection, early) = subscribe_first(&route, &subscription).await?;
            early.into_iter().for_each(|event| stream.counts.pass_on(&sender, event));
            let (sender, counts) = (sender.clone(), Arc::clone(&stream.counts));
            let subscription = subscription.clone();
            stream.tasks.push(tokio::spawn(async move {
                forward(route, subscription, connection, &sender, &counts).await;
            }));
        }
        Ok(stream)
    }

    async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// Subscribes for the first time: in a cluster at another member if one can not.
async fn subscribe_first(
    route: &Route,
    subscription: &Subscription,
) -> Result<(Connection, Vec<Event>), Error> {
    let begun = Instant::now();
    let mut backoff = BACKOFF_MIN;
    loop {
        match subscribe(route, subscription).await {
            Err(error) if route.cluster().is_some() && error.may_retry() => {
                if begun.elapsed() > route.patience() {
                    return Err(error);
                }
            }
            settled => return settled,
        }
        tokio::time::sleep(backoff.mul_f64(rand::random())).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
}

/// Subscribes on a new connection. An event may come before the answer; it is returned, too.
async fn subscribe(
    route: &Route,
    subscription: &Subscription,
) -> Result<(Connection, Vec<Event>), Error> {
    let mut connection = route.connect().await?;
    let timeout = route.patience();
    // For the name in `stats`; a server that does not know it answers `error` and goes on.
    match connection.greet(&route.client_name(), Session::None, timeout).await {
        Ok(Greeting::NotLeader(leader)) => {
            if let Some(cluster) = route.cluster() {
                cluster.handle_redirect(leader.as_deref());
            }
            return Err(Error::Refused(ErrorCode::NotLeader));
        }
        Ok(Greeting::Accepted(_) | Greeting::Unsuited | Greeting::Refused(_)) => {}
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
            return Err(Error::Auth);
        }
        // The first generations hang up on what they do not know.
        Err(_) => connection = route.connect().await?,
    }
    let request = subscription.request();
    let mut early = Vec::new();
    let hear = |incoming| {
        if let Incoming::Event(event) = incoming {
            early.push(event);
        }
    };
    let reply = connection.ask_hearing(None, &request, timeout, hear).await;
    let reply = reply.map_err(|error| route.unreachable(error))?;
    if let (Some(cluster), Reply::NotLeader(leader)) = (route.cluster(), &reply) {
        cluster.handle_redirect(leader.as_deref());
    }
    reply.done(request.op().name())?;
    Ok((connection, early))
}

/// Passes events on, and subscribes again when the connection breaks.
async fn forward(
    route: Route,
    subscription: Subscription,
    connection: Connection,
    sender: &mpsc::Sender<Event>,
    counts: &Counts,
) {
    let mut connection = Some(connection);
    let mut backoff = BACKOFF_MIN;
    loop {
        if let Some(connection) = connection.take() {
            backoff = BACKOFF_MIN;
            pump(&route, connection, sender, counts).await;
            counts.interruptions.fetch_add(1, Ordering::Relaxed);
        }
        if sender.is_closed() {
            return;
        }
        tokio::time::sleep(backoff.mul_f64(rand::random())).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
        if let Ok((again, early)) = subscribe(&route, &subscription).await {
            early.into_iter().for_each(|event| counts.pass_on(sender, event));
            connection = Some(again);
        }
    }
}

async fn pump(
    route: &Route,
    mut connection: Connection,
    sender: &mpsc::Sender<Event>,
    counts: &Counts,
) {
    let (question, heartbeat) = match route {
        Route::One(_) => (Request::Ping, HEARTBEAT),
        Route::Cluster(_) => (Request::CounterGet { key: b"_" }, HEARTBEAT_IN_CLUSTER),
    };
    let question = connection.message(&question);
    let pass_on = |incoming| {
        if let Incoming::Event(event) = incoming {
            counts.pass_on(sender, event);
        }
    };
    let mut answered = true;
    loop {
        match tokio::time::timeout(heartbeat, connection.next()).await {
            // Out of touch, going, or no longer the leader.
            Ok(Ok(Incoming::Reply(_, reply)))
                if route.cluster().is_some() && reply.is_refusal() =>
            {
                return;
            }
            Ok(Ok(incoming)) => {
                answered = true;
                pass_on(incoming);
            }
            Ok(Err(_)) => return,
            Err(_) if !answered => return,
            Err(_) => {
                answered = false;
                connection.queue(None, &question);
                if connection.flush(heartbeat, pass_on).await.is_err() {
                    return;
                }
            }
        }
    }
}

/// What all streams can be asked.
macro_rules! stream {
    ($name:ident) => {
        impl $name {
            /// How many events were dropped because the application did not take them.
            #[must_use]
            pub fn dropped(&self) -> u64 {
                self.stream.counts.dropped.load(Ordering::Relaxed)
            }

            /// How often a connection broke. What happened until it stood again was not seen.
            #[must_use]
            pub fn interruptions(&self) -> u64 {
                self.stream.counts.interruptions.load(Ordering::Relaxed)
            }
        }
    };
}

/// Signals as they come.
pub struct Signals {
    stream: Stream,
}

impl Signals {
    pub(crate) async fn new(client: &Client, pattern: &str, group: &str) -> Result<Self, Error> {
        check_pattern(pattern)?;
        if group.contains(['\n', '\r']) {
            return Err(Error::Invalid("a group has no line break".to_owned()));
        }
        let subscription =
            Subscription::Signals { pattern: pattern.to_owned(), group: group.to_owned() };
        Ok(Self { stream: Stream::open(all(client), subscription).await? })
    }

    /// The next one; waits for it.
    pub async fn next(&mut self) -> Option<Signal> {
        loop {
            if let Event::Signal(signal) = self.stream.next().await? {
                return Some(signal);
            }
        }
    }
}

stream!(Signals);

/// Changes of watched keys as they come.
pub struct Watch {
    stream: Stream,
}

impl Watch {
    pub(crate) async fn new(client: &Client, pattern: &str) -> Result<Self, Error> {
        check_pattern(pattern)?;
        let subscription = Subscription::Changes { pattern: pattern.to_owned() };
        Ok(Self { stream: Stream::open(all(client), subscription).await? })
    }

    /// The next one; waits for it.
    pub async fn next(&mut self) -> Option<Change> {
        loop {
            if let Event::Change(change) = self.stream.next().await? {
                return Some(change);
            }
        }
    }
}

stream!(Watch);

/// What happens to the leaders of an election, as it comes. `Elected` may be repeated.
pub struct Leaders {
    stream: Stream,
}

impl Leaders {
    pub(crate) async fn new(client: &Client, key: &[u8]) -> Result<Self, Error> {
        let route = client.server(key).route.clone();
        let subscription = Subscription::Leaders { key: key.to_vec() };
        Ok(Self { stream: Stream::open(vec![route], subscription).await? })
    }

    /// The next event; waits for it.
    pub async fn next(&mut self) -> Option<LeaderEvent> {
        loop {
            if let Event::Leader(event) = self.stream.next().await? {
                return Some(event);
            }
        }
    }
}

stream!(Leaders);

fn all(client: &Client) -> Vec<Route> {
    client.servers().iter().map(|server| server.route.clone()).collect()
}

fn check_pattern(pattern: &str) -> Result<(), Error> {
    check_key(pattern.as_bytes())?;
    if pattern_is_valid(pattern.as_bytes()) {
        return Ok(());
    }
    Err(Error::Invalid(format!("not a pattern of at most 16 tokens: {pattern}")))
}
