//! The sockets between members.
//!
//! Moves opaque frames from node to node and knows nothing of Raft. Each node dials each peer twice,
//! once per [`Lane`], and only sends on what it dialed; it receives on what it accepted. So a stream
//! has one direction, one writer and one order.
//!
//! ```text
//! send -> queue of (peer, lane) -> dialed connection => accepted connection -> Handler::received
//! ```
//!
//! Before the first frame both sides prove who they are: `handshake.rs` (the conversation, without
//! sockets) and `credentials.rs` (what is proven, and how it is exchanged at run time). Behind it come frames, inside
//! TLS or sealed: `seal.rs`.
//!
//! A frame may get lost with its connection or when a queue is full, but what arrives over one
//! connection arrives in order and without gaps.
//!
//! Here is what a node sees of it. The queues are in `outbox.rs`, the tasks that dial and send in `dial.rs`, the
//! listener and what receives in `accept.rs`, what both sides do before the first frame in `establish.rs`.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use ring::rand::SystemRandom;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::watch;

use self::accept::{Strangers, Stream, accept};
use self::dial::Sender;
use self::handshake::is_node_id;
use self::outbox::Outbox;
use crate::log_budget::LogBudget;

pub use self::credentials::{CredentialError, Credentials, PeerTls, SECRET_BYTES_MIN, Secret};
pub use self::handshake::{Identity, Lane, Version};

mod accept;
pub mod certificate_dates;
mod credentials;
mod dial;
mod establish;
pub mod handshake;
mod outbox;
mod seal;
#[cfg(test)]
mod tests;

/// The longest frame.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// How a [`Transport`] is set up.
#[derive(Clone)]
pub struct TransportConfig {
    /// Where to listen, `host:port`.
    pub listen: String,
    /// What to prove ourselves with.
    pub credentials: Credentials,
    /// The newest version to speak without TLS. All but [`Version::Sealed`] stands for the program before, in tests of
    /// upgrades.
    pub version_max: Version,
    /// Times and sizes.
    pub limits: Limits,
}

/// Times and sizes; the defaults are what a server uses.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How long a peer may take until it is authenticated, from the first byte.
    pub handshake: Duration,
    /// Connections that are not authenticated yet. One more pushes out the oldest one of the address that has the most
    /// of them: whoever belongs to us needs milliseconds, whoever does not must not keep him out.
    pub strangers_max: usize,
    /// How long dialing may take, name lookup included.
    pub connect: Duration,
    /// The first pause between attempts to connect; it doubles from one to the next.
    pub redial_min: Duration,
    /// The longest pause between attempts to connect.
    pub redial_max: Duration,
    /// For [`Lane::Main`].
    pub main: LaneLimits,
    /// For [`Lane::Bulk`].
    pub bulk: LaneLimits,
}

/// Limits of one connection.
#[derive(Clone, Debug)]
pub struct LaneLimits {
    /// How many frames may wait.
    pub queue_frames_max: usize,
    /// How many bytes may wait; a frame alone may be longer.
    pub queue_bytes_max: usize,
    /// How long a write may make no progress, or the other side be silent below TCP, before the
    /// connection is given up.
    pub stall: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            handshake: Duration::from_secs(5),
            strangers_max: 256,
            connect: Duration::from_secs(2),
            redial_min: Duration::from_millis(50),
            redial_max: Duration::from_secs(1),
            main: LaneLimits {
                queue_frames_max: 8192,
                queue_bytes_max: 32 << 20,
                stall: Duration::from_secs(5),
            },
            // Whoever installs a snapshot may not read for a while.
            bulk: LaneLimits {
                queue_frames_max: 1024,
                queue_bytes_max: 64 << 20,
                stall: Duration::from_secs(30),
            },
        }
    }
}

impl Limits {
    fn of(&self, lane: Lane) -> &LaneLimits {
        match lane {
            Lane::Main => &self.main,
            Lane::Bulk => &self.bulk,
        }
    }
}

/// A member to talk to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerAddress {
    /// The Raft id of the member.
    pub raft_id: u64,
    /// The node id of the member.
    pub node: String,
    /// Where the member is dialed, `host:port`.
    pub address: String,
}

/// Who uses the transport. Called on threads of the runtime: must not block.
pub trait Handler: Send + Sync {
    /// Who this node is. Asked at every handshake; the node id must not change.
    fn identity(&self) -> Identity;

    /// Who we were before our cluster had its id, if `peer` presents the id before it: a member that has not heard of
    /// the new one is spoken to as that. An error says why `peer` is none.
    fn former_identity(&self, peer: &Identity) -> Option<Result<Identity, String>>;

    /// Whether `peer` may talk to us, or we to it. Asked for dialed and accepted connections, when
    /// `peer` has proven its identity and its cluster is ours, or one of us has none yet. The reason
    /// of a refusal goes to the logs of both sides.
    fn admit(&self, peer: &Identity) -> Result<(), String>;

    /// A node that we have dialed has proven who it is, and has refused us.
    fn refused_by(&self, peer: &Identity);

    /// A frame has come from the node with this Raft id (0 if it did not know it when it dialed).
    /// Whoever keeps it keeps little more memory than its length.
    fn received(&self, from: u64, lane: Lane, frame: Bytes);

    /// The connection for sending is up.
    fn reachable(&self, peer: u64, lane: Lane);

    /// The connection for sending was lost, or could not be made. What was sent before may be lost,
    /// and what of it was still queued is: nothing of it comes after what is sent from now on.
    ///
    /// `refused` says that the operating system there answers and nobody listens: the process is gone.
    fn unreachable(&self, peer: u64, lane: Lane, refused: bool);

    /// A frame on a stream of this peer was refused, because the peer has not sent it so: somebody on the path has, or
    /// a machine is broken. The stream ends.
    fn bad_frame(&self, peer: u64, lane: Lane);

    /// A stream from this peer has ended, and not because we, or a newer stream of the peer, ended it.
    fn stream_lost(&self, peer: u64, lane: Lane);
}

/// The peer port of a node, and its connections to the others. Stopped when dropped.
pub struct Transport {
    shared: Arc<Shared>,
    state: watch::Sender<State>,
    runtime: Handle,
    local_addr: SocketAddr,
    links: RwLock<BTreeMap<u64, Link>>,
}

impl Transport {
    /// Binds the peer port and begins to accept on the current runtime.
    pub async fn start(
        config: TransportConfig,
        handler: Arc<dyn Handler>,
    ) -> io::Result<Arc<Self>> {
        let TransportConfig { listen, credentials, version_max, limits } = config;
        let node = handler.identity().node;
        if !is_node_id(&node) {
            return Err(io::Error::new(ErrorKind::InvalidInput, format!("no node id: {node:?}")));
        }
        credentials.check(&node).map_err(|error| io::Error::new(ErrorKind::InvalidInput, error))?;

        let listener = TcpListener::bind(&listen).await.map_err(|error| {
            io::Error::new(error.kind(), format!("cannot listen for peers on {listen}: {error}"))
        })?;
        let local_addr = listener.local_addr()?;
        let (state, watcher) = watch::channel(State {
            credentials: Arc::new(credentials),
            peers: Arc::new(Vec::new()),
            sealed_only: false,
            stopping: false,
        });
        let shared = Arc::new(Shared {
            node,
            handler,
            version_max,
            limits,
            random: SystemRandom::new(),
            strangers: Mutex::default(),
            streams: Mutex::default(),
            hints: Mutex::default(),
            numbers: AtomicU64::new(0),
            log: LogBudget::default(),
        });
        let runtime = Handle::current();
        runtime.spawn(accept(Arc::clone(&shared), listener, watcher));
        Ok(Arc::new(Self { shared, state, runtime, local_addr, links: RwLock::default() }))
    }

    /// Where we listen.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// The members to talk to. Connections to others are closed, also those that others dialed;
    /// whether one of them may come back, [`Handler::admit`] says. We are ignored among them.
    pub fn set_peers(&self, peers: Vec<PeerAddress>) {
        let mut links = self.links.write();
        if self.state.borrow().stopping {
            return;
        }
        let mut old = std::mem::take(&mut *links);
        for peer in &peers {
            if peer.node == self.shared.node {
                continue;
            }
            if !is_node_id(&peer.node) {
                tracing::error!(node = peer.node, "not a node id, this peer is left out");
                continue;
            }
            let link = match old.remove(&peer.raft_id) {
                Some(link) if link.peer == *peer => link,
                Some(_) | None => self.link(peer),
            };
            links.insert(peer.raft_id, link);
        }
        let hints = links.values().map(|link| (link.peer.node.clone(), link.lanes.clone()));
        *self.shared.hints.lock() = hints.collect();
        // The end of a link ends its connections.
        drop(old);
        self.state.send_modify(|state| state.peers = Arc::new(peers));
    }

    /// Queues a frame. Never waits: if it is too much, the frame is dropped and the answer is false.
    /// Also true does not mean that the frame arrives.
    pub fn send(&self, peer: u64, lane: Lane, frame: Bytes) -> bool {
        if frame.len() > FRAME_BYTES_MAX {
            tracing::error!(peer, bytes = frame.len(), "a frame for a peer is too long, dropped");
            return false;
        }
        match self.links.read().get(&peer) {
            Some(link) => link.lanes[lane.index()].push(frame, self.shared.limits.of(lane)),
            None => false,
        }
    }

    /// Exchanges the credentials. Connections that they would not allow today are closed, all others
    /// stay.
    pub fn reload(&self, credentials: Credentials) -> Result<(), CredentialError> {
        credentials.check(&self.shared.node)?;
        self.state.send_modify(|state| state.credentials = Arc::new(credentials));
        Ok(())
    }

    /// From now on no frame goes over a connection without TLS unless it is sealed, and none is taken. What there is of
    /// older connections is made again. To be called before [`Self::set_peers`] if it is known by then: members of an
    /// older program are spoken to as they can until this is called.
    pub fn seal(&self) {
        self.state.send_if_modified(|state| !std::mem::replace(&mut state.sealed_only, true));
    }

    /// Stops listening and ends all connections; what is queued is still written if it goes quickly.
    pub fn stop(&self) {
        let mut links = self.links.write();
        self.state.send_modify(|state| state.stopping = true);
        links.clear();
    }

    /// Waits until nothing of a stopped transport runs any more.
    pub async fn stopped(&self) {
        self.state.closed().await;
    }

    fn link(&self, peer: &PeerAddress) -> Link {
        let (alive, wanted) = watch::channel(());
        let lanes = Lane::ALL.map(|_| Arc::new(Outbox::default()));
        for lane in Lane::ALL {
            let task = Sender {
                shared: Arc::clone(&self.shared),
                peer: peer.clone(),
                lane,
                outbox: Arc::clone(&lanes[lane.index()]),
                state: self.state.subscribe(),
                wanted: wanted.clone(),
            };
            self.runtime.spawn(task.run());
        }
        Link { peer: peer.clone(), lanes, _alive: alive }
    }
}

impl Drop for Transport {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What connections look at again when it changes.
#[derive(Clone)]
struct State {
    credentials: Arc<Credentials>,
    peers: Arc<Vec<PeerAddress>>,
    /// There is no member left that can do no better.
    sealed_only: bool,
    stopping: bool,
}

/// What all tasks need.
struct Shared {
    node: String,
    handler: Arc<dyn Handler>,
    version_max: Version,
    limits: Limits,
    random: SystemRandom,
    /// Accepted and not authenticated yet.
    strangers: Mutex<Strangers>,
    /// Accepted and authenticated, by node: one per lane.
    streams: Mutex<HashMap<(String, Lane), Stream>>,
    /// By node: whom to wake when it has shown that it is up.
    hints: Mutex<BTreeMap<String, [Arc<Outbox>; 2]>>,
    numbers: AtomicU64,
    log: LogBudget,
}

/// A peer of [`Transport::set_peers`]. The tasks that dial it end with `_alive`.
struct Link {
    peer: PeerAddress,
    lanes: [Arc<Outbox>; 2],
    _alive: watch::Sender<()>,
}

impl Shared {
    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }
}
