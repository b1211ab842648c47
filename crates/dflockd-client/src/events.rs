//! Streams of signals, changes and leaders. Each has connections of its own, one per server, because a push
//! does not say which subscription it belongs to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dflockd_wire::{ErrorCode, Query, Request, Subscription, Unit, check, command};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use crate::client::Client;
use crate::clock::Instant;
use crate::cluster::Route;
use crate::error::Error;
use crate::reply::{Event, Incoming, Reply};
use crate::stream::{Connection, Greeting, Message, Session};

/// Events that may wait for the application.
const BUFFERED_MAX: usize = 4096;
/// A silent connection is asked whether it still stands.
const HEARTBEAT: Duration = Duration::from_secs(15);
/// A silent connection to a member of a cluster is asked after so long, and it is also asked whether it is in touch
/// with the leader: one that is not hears of nothing and says nothing.
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

/// A stream of events from one or more servers.
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

impl Stream {
    async fn open(routes: Vec<Route>, request: &Request<'_>) -> Result<Self, Error> {
        let (sender, events) = mpsc::channel(BUFFERED_MAX);
        let counts = Arc::<Counts>::default();
        let mut stream = Self { events, counts, tasks: Vec::new() };
        for route in routes {
            let message = Message::new(request, route.transport(), Unit::Seconds);
            let (command, sender) = (request.op().name(), sender.clone());
            let counts = Arc::clone(&stream.counts);
            let feed = Feed { route, command, message, sender, counts };
            let connection = feed.subscribe_first().await?;
            stream.tasks.push(tokio::spawn(feed.forward(connection)));
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

/// The part of a stream that comes from one server.
struct Feed {
    route: Route,
    command: &'static str,
    /// The subscription.
    message: Message,
    sender: mpsc::Sender<Event>,
    counts: Arc<Counts>,
}

impl Feed {
    /// Passes an event on if there is room, or counts it.
    fn pass_on(&self, incoming: Incoming) {
        if let Incoming::Event(event) = incoming
            && matches!(self.sender.try_send(event), Err(mpsc::error::TrySendError::Full(_)))
        {
            self.counts.dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Subscribes for the first time: in a cluster at another member if one can not.
    async fn subscribe_first(&self) -> Result<Connection, Error> {
        let begun = Instant::now();
        let mut backoff = BACKOFF_MIN;
        loop {
            match self.subscribe().await {
                Err(error) if self.route.cluster().is_some() && error.may_retry() => {
                    if begun.elapsed() > self.route.patience() {
                        return Err(error);
                    }
                }
                settled => return settled,
            }
            tokio::time::sleep(backoff.mul_f64(rand::random())).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Subscribes on a new connection. An event may come before the answer.
    async fn subscribe(&self) -> Result<Connection, Error> {
        let route = &self.route;
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
            Ok(Greeting::Accepted { .. } | Greeting::Unsuited | Greeting::Refused(_)) => {}
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                return Err(Error::Auth);
            }
            // The first generations hang up on what they do not know.
            Err(_) => connection = route.connect().await?,
        }
        let hear = |incoming| self.pass_on(incoming);
        let reply = connection.ask_hearing(None, &self.message, timeout, hear).await;
        let reply = reply.map_err(|error| route.unreachable(error))?;
        if let (Some(cluster), Reply::NotLeader(leader)) = (route.cluster(), &reply) {
            cluster.handle_redirect(leader.as_deref());
        }
        reply.done(self.command)?;
        Ok(connection)
    }

    /// Passes events on, and subscribes again when the connection breaks.
    async fn forward(self, connection: Connection) {
        let mut connection = Some(connection);
        let mut backoff = BACKOFF_MIN;
        loop {
            if let Some(connection) = connection.take() {
                backoff = BACKOFF_MIN;
                self.pump(connection).await;
                self.counts.interruptions.fetch_add(1, Ordering::Relaxed);
            }
            if self.sender.is_closed() {
                return;
            }
            tokio::time::sleep(backoff.mul_f64(rand::random())).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
            connection = self.subscribe().await.ok();
        }
    }

    async fn pump(&self, mut connection: Connection) {
        let (question, heartbeat) = match self.route {
            Route::One(_) => (Request::Ping, HEARTBEAT),
            Route::Cluster(_) => {
                (Request::Query(Query::Counter { key: b"_" }), HEARTBEAT_IN_CLUSTER)
            }
        };
        let question = Message::new(&question, self.route.transport(), Unit::Seconds);
        let mut answered = true;
        loop {
            match tokio::time::timeout(heartbeat, connection.next()).await {
                // Out of touch, going, or no longer the leader.
                Ok(Ok(Incoming::Reply(_, reply)))
                    if self.route.cluster().is_some() && reply.is_refusal() =>
                {
                    return;
                }
                Ok(Ok(incoming)) => {
                    answered = true;
                    self.pass_on(incoming);
                }
                Ok(Err(_)) => return,
                Err(_) if !answered => return,
                Err(_) => {
                    answered = false;
                    connection.queue(None, &question);
                    let hear = |incoming| self.pass_on(incoming);
                    if connection.flush(heartbeat, hear).await.is_err() {
                        return;
                    }
                }
            }
        }
    }
}

/// What all streams can be asked.
macro_rules! stream {
    ($name:ident, $event:ident: $item:ident) => {
        impl $name {
            /// The next one; waits for it.
            pub async fn next(&mut self) -> Option<$item> {
                loop {
                    if let Event::$event(item) = self.stream.next().await? {
                        return Some(item);
                    }
                }
            }

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
        let (pattern, group) = (pattern.as_bytes(), group.as_bytes());
        let request = subscribe(Subscription::Signals { pattern, group });
        Ok(Self { stream: Stream::open(all(client), &request).await? })
    }
}

stream!(Signals, Signal: Signal);

/// Changes of watched keys as they come.
pub struct Watch {
    stream: Stream,
}

impl Watch {
    pub(crate) async fn new(client: &Client, pattern: &str) -> Result<Self, Error> {
        check_pattern(pattern)?;
        let pattern = pattern.as_bytes();
        let request = subscribe(Subscription::Changes { pattern, from: None });
        Ok(Self { stream: Stream::open(all(client), &request).await? })
    }
}

stream!(Watch, Change: Change);

/// What happens to the leaders of an election, as it comes. `Elected` may be repeated.
pub struct Leaders {
    stream: Stream,
}

impl Leaders {
    pub(crate) async fn new(client: &Client, key: &[u8]) -> Result<Self, Error> {
        let route = client.server(key).route.clone();
        let request = subscribe(Subscription::Leaders { key });
        Ok(Self { stream: Stream::open(vec![route], &request).await? })
    }
}

stream!(Leaders, Leader: LeaderEvent);

fn all(client: &Client) -> Vec<Route> {
    client.servers().iter().map(|server| server.route.clone()).collect()
}

fn check_pattern(pattern: &str) -> Result<(), Error> {
    check::pattern(pattern.as_bytes())?;
    Ok(())
}

fn subscribe(to: Subscription<'_>) -> Request<'_> {
    Request::command(command::Subscribe { to })
}
