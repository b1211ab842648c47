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
//! sockets) and `credentials.rs` (what is proven, and how it is exchanged at run time). Behind it a
//! frame is a length (u32, little-endian) and as many bytes.
//!
//! A frame may get lost with its connection or when a queue is full, but what arrives over one
//! connection arrives in order and without gaps.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::future::Future;
use std::io::{self, ErrorKind, IoSlice};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use parking_lot::{Mutex, RwLock};
use ring::rand::{SecureRandom, SystemRandom};
use rustls::ConnectionCommon;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, lookup_host};
use tokio::runtime::Handle;
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use self::credentials::{Chain, Proven, Role, any_server_name, common_name};
use self::handshake::{Acceptor, Binding, Dialer, Fault, Keys, Malformed, Nonce, is_node_id};

pub use self::credentials::{CredentialError, Credentials, PeerTls, SECRET_BYTES_MIN, Secret};
pub use self::handshake::{Identity, Lane};

mod credentials;
pub mod handshake;
#[cfg(test)]
mod tests;

/// The longest frame.
pub const FRAME_BYTES_MAX: usize = 64 << 20;

/// What is asked of a socket at once.
const READ_BYTES: usize = 64 << 10;

/// What is taken from a queue at once, unless a single frame is longer.
const BATCH_BYTES: usize = 1 << 20;

/// Up to here a frame is copied into one buffer with its neighbours.
const COALESCE_BYTES: usize = 16 << 10;

/// More slices than this are not worth a longer system call.
const SLICES: usize = 64;

/// How long a connection must have lived for its end to be a surprise, answered by dialing at once.
const STEADY: Duration = Duration::from_secs(1);

/// How long a connection that is no longer wanted may take to write what is queued.
const LINGER: Duration = Duration::from_millis(500);

/// Refused strangers in the log: so many lines per [`LOG_WINDOW`].
const LOG_LINES: u32 = 20;
const LOG_WINDOW: Duration = Duration::from_secs(10);

/// How a [`Transport`] is set up.
#[derive(Clone)]
pub struct TransportConfig {
    /// Where to listen, `host:port`.
    pub listen: String,
    /// What to prove ourselves with.
    pub credentials: Credentials,
    /// Times and sizes.
    pub limits: Limits,
}

/// Times and sizes; the defaults are what a server uses.
#[derive(Clone, Debug)]
pub struct Limits {
    /// How long a peer may take until it is authenticated, from the first byte.
    pub handshake: Duration,
    /// Connections that are not authenticated yet. One more pushes out the oldest of them: whoever
    /// belongs to us needs milliseconds, whoever does not must not keep him out.
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
    /// Its Raft id.
    pub raft_id: u64,
    /// Its node id.
    pub node: String,
    /// Where it is dialed, `host:port`.
    pub address: String,
}

/// Who uses the transport. Called on threads of the runtime: must not block.
pub trait Handler: Send + Sync {
    /// Who we are. Asked at every handshake; the node id must not change.
    fn identity(&self) -> Identity;

    /// Whether `peer` may talk to us, or we to it. Asked for dialed and accepted connections, when
    /// `peer` has proven its identity and its cluster is ours, or one of us has none yet. The reason
    /// of a refusal goes to the logs of both sides.
    fn admit(&self, peer: &Identity) -> Result<(), String>;

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
        let TransportConfig { listen, credentials, limits } = config;
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
            stopping: false,
        });
        let shared = Arc::new(Shared {
            node,
            handler,
            limits,
            random: SystemRandom::new(),
            strangers: Mutex::default(),
            streams: Mutex::default(),
            hints: Mutex::default(),
            numbers: AtomicU64::new(0),
            log: Mutex::new(LogBudget { since: Instant::now(), lines: 0 }),
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
    stopping: bool,
}

/// What all tasks need.
struct Shared {
    node: String,
    handler: Arc<dyn Handler>,
    limits: Limits,
    random: SystemRandom,
    /// Accepted and not authenticated yet, oldest first. Dropping the sender ends the connection.
    strangers: Mutex<BTreeMap<u64, oneshot::Sender<()>>>,
    /// Accepted and authenticated, by node: one per lane.
    streams: Mutex<HashMap<(String, Lane), Stream>>,
    /// By node: whom to wake when it has shown that it is up.
    hints: Mutex<BTreeMap<String, [Arc<Outbox>; 2]>>,
    numbers: AtomicU64,
    log: Mutex<LogBudget>,
}

/// A peer of [`Transport::set_peers`]. The tasks that dial it end with `_alive`.
struct Link {
    peer: PeerAddress,
    lanes: [Arc<Outbox>; 2],
    _alive: watch::Sender<()>,
}

/// An accepted stream.
struct Stream {
    number: u64,
    /// Dropped when a newer stream takes over.
    _newest: oneshot::Sender<()>,
    /// Held by whoever delivers frames: the next one must not overtake the last one.
    floor: Arc<tokio::sync::Mutex<()>>,
}

struct LogBudget {
    since: Instant,
    lines: u32,
}

impl Shared {
    fn nonce(&self) -> io::Result<Nonce> {
        let mut nonce = Nonce::default();
        let filled = self.random.fill(&mut nonce);
        filled.map_err(|_| io::Error::other("the operating system gives no random numbers"))?;
        Ok(nonce)
    }

    fn number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// Whether one more line about strangers may go to the log.
    fn may_log(&self) -> bool {
        let mut log = self.log.lock();
        if log.since.elapsed() > LOG_WINDOW {
            *log = LogBudget { since: Instant::now(), lines: 0 };
        }
        log.lines += 1;
        if log.lines == LOG_LINES {
            tracing::warn!("many refused peers, not all of them are logged");
        }
        log.lines < LOG_LINES
    }
}

/// Frames that wait for a connection.
#[derive(Default)]
struct Outbox {
    queue: Mutex<Queue>,
    filled: Notify,
    /// Tells the dialing task not to wait any longer.
    hint: Notify,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Bytes>,
    /// The sum of their lengths.
    bytes: usize,
    /// The socket, while all that was taken from here is written: then a small frame goes there without the detour over
    /// another thread.
    direct: Option<Arc<std::net::TcpStream>>,
    /// What the socket did not take of such a frame.
    rest: Option<Bytes>,
}

impl Outbox {
    /// If it is too much, the newest frame goes: a stream with a hole in it would be of no use.
    fn push(&self, frame: Bytes, limits: &LaneLimits) -> bool {
        let mut queue = self.queue.lock();
        if queue.write(&frame) {
            if queue.rest.is_some() {
                drop(queue);
                self.filled.notify_one();
            }
            return true;
        }
        let Queue { frames, bytes, .. } = &mut *queue;
        let full = frames.len() >= limits.queue_frames_max
            || !frames.is_empty() && *bytes + frame.len() > limits.queue_bytes_max;
        if full {
            return false;
        }
        *bytes += frame.len();
        frames.push_back(frame);
        drop(queue);
        self.filled.notify_one();
        true
    }

    /// What is to be written next. If that is nothing, frames may go to `idle`, the socket.
    fn take(&self, idle: Option<&Arc<std::net::TcpStream>>) -> Batch {
        let mut queue = self.queue.lock();
        queue.direct = None;
        let Queue { frames, bytes, rest, direct } = &mut *queue;
        if frames.is_empty() && rest.is_none() {
            *direct = idle.cloned();
        }
        let rest = rest.take();
        let (mut count, mut sum) = (0, 0);
        while let Some(frame) = frames.get(count)
            && (count == 0 || sum + frame.len() <= BATCH_BYTES)
        {
            count += 1;
            sum += frame.len();
        }
        *bytes -= sum;
        let taken = frames.drain(..count).collect::<Vec<_>>();
        drop(queue);
        Batch::new(rest, taken)
    }

    fn clear(&self) {
        *self.queue.lock() = Queue::default();
    }

    async fn filled(&self) {
        while self.is_empty() {
            self.filled.notified().await;
        }
    }

    fn is_empty(&self) -> bool {
        let queue = self.queue.lock();
        queue.frames.is_empty() && queue.rest.is_none()
    }

    /// The connection is gone.
    fn disconnect(&self) {
        let mut queue = self.queue.lock();
        (queue.direct, queue.rest) = (None, None);
    }
}

impl Queue {
    /// True: the frame is in the socket, or the socket's next task.
    fn write(&mut self, frame: &Bytes) -> bool {
        let Some(socket) = &self.direct else { return false };
        if frame.len() > COALESCE_BYTES || self.rest.is_some() || !self.frames.is_empty() {
            return false;
        }
        let mut bytes = BytesMut::with_capacity(4 + frame.len());
        bytes.put_u32_le(frame.len().try_into().expect("small"));
        bytes.extend_from_slice(frame);
        // If the socket is broken, the task behind it finds out.
        let written = io::Write::write(&mut &**socket, &bytes).unwrap_or(0);
        bytes.advance(written);
        if !bytes.is_empty() {
            self.rest = Some(bytes.freeze());
            self.direct = None;
        }
        true
    }
}

/// Frames on their way into a socket. Can be left and taken up again at any time.
#[derive(Default)]
struct Batch {
    chunks: VecDeque<Bytes>,
    /// Written, but perhaps still in a buffer of TLS.
    unflushed: bool,
}

impl Batch {
    /// The rest of a frame that is under way, then frames.
    fn new(rest: Option<Bytes>, frames: Vec<Bytes>) -> Self {
        let mut chunks = VecDeque::from_iter(rest);
        let mut small = BytesMut::new();
        for frame in frames {
            small.put_u32_le(frame.len().try_into().expect("frames have at most 64 MiB"));
            if frame.len() <= COALESCE_BYTES {
                small.extend_from_slice(&frame);
            } else {
                chunks.push_back(small.split().freeze());
                chunks.push_back(frame);
            }
        }
        if !small.is_empty() {
            chunks.push_back(small.freeze());
        }
        Self { chunks, unflushed: false }
    }

    fn is_done(&self) -> bool {
        self.chunks.is_empty() && !self.unflushed
    }

    /// Writes all of it; fails if there is no progress for as long as `stall`.
    async fn write(
        &mut self,
        writer: &mut (impl AsyncWrite + Unpin),
        stall: Duration,
    ) -> io::Result<()> {
        while !self.chunks.is_empty() {
            let slices: Vec<_> =
                self.chunks.iter().take(SLICES).map(|chunk| IoSlice::new(chunk)).collect();
            let written = in_time(stall, writer.write_vectored(&slices)).await?;
            if written == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            self.advance(written);
            self.unflushed = true;
        }
        in_time(stall, writer.flush()).await?;
        self.unflushed = false;
        Ok(())
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(chunk) = self.chunks.front_mut() {
            let step = written.min(chunk.len());
            chunk.advance(step);
            written -= step;
            if !chunk.is_empty() {
                return;
            }
            self.chunks.pop_front();
        }
    }
}

/// Takes the next frame from what was read, if it is complete.
pub fn split_frame(buffer: &mut BytesMut) -> Result<Option<Bytes>, FrameTooLong> {
    let Some(length) = frame_length(buffer)? else { return Ok(None) };
    if buffer.len() < 4 + length {
        return Ok(None);
    }
    buffer.advance(4);
    // A short frame that is kept for long must not keep a whole buffer.
    if length <= READ_BYTES {
        let frame = Bytes::copy_from_slice(&buffer[..length]);
        buffer.advance(length);
        Ok(Some(frame))
    } else {
        Ok(Some(buffer.split_to(length).freeze()))
    }
}

/// A length prefix of more than [`FRAME_BYTES_MAX`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a frame of {0} bytes")]
pub struct FrameTooLong(pub u32);

/// The length of the frame at the beginning of `buffer`, once that is known.
fn frame_length(buffer: &[u8]) -> Result<Option<usize>, FrameTooLong> {
    let Some(prefix) = buffer.first_chunk() else { return Ok(None) };
    let length = u32::from_le_bytes(*prefix);
    match usize::try_from(length) {
        Ok(bytes) if bytes <= FRAME_BYTES_MAX => Ok(Some(bytes)),
        _ => Err(FrameTooLong(length)),
    }
}

/// A TCP connection, or TLS over one.
trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection with TLS done, if there is any, and the handshake ahead.
struct Fresh {
    stream: Box<dyn Duplex>,
    certificates: Option<Chain>,
    binding: Option<Binding>,
    /// What the other side may still say before it is authenticated.
    input_left: usize,
}

impl Fresh {
    fn plain(tcp: TcpStream) -> Self {
        Self::new(Box::new(tcp), None, None)
    }

    async fn dial_tls(tcp: TcpStream, tls: &PeerTls) -> Result<Self, NoConnection> {
        let connector = TlsConnector::from(tls.client());
        let stream = connector.connect(any_server_name(), tcp).await.map_err(tls_fault)?;
        let (certificates, binding) = session(stream.get_ref().1)?;
        Ok(Self::new(Box::new(stream), Some(certificates), Some(binding)))
    }

    async fn accept_tls(tcp: TcpStream, tls: &PeerTls) -> Result<Self, NoConnection> {
        let acceptor = TlsAcceptor::from(tls.server());
        let stream = acceptor.accept(tcp).await.map_err(tls_fault)?;
        let (certificates, binding) = session(stream.get_ref().1)?;
        Ok(Self::new(Box::new(stream), Some(certificates), Some(binding)))
    }

    fn new(stream: Box<dyn Duplex>, certificates: Option<Chain>, binding: Option<Binding>) -> Self {
        Self { stream, certificates, binding, input_left: handshake::BYTES_MAX }
    }

    /// With TLS the certificate says who is there; it must be `node`.
    fn check_name(&self, node: &str) -> Result<(), NoConnection> {
        let Some(chain) = &self.certificates else { return Ok(()) };
        let name = chain.first().map_or_else(|| Err("no certificate".to_owned()), common_name)?;
        if name != node {
            let name = name.escape_debug();
            return Err(format!("it shows the certificate of {name} and says it is {node}").into());
        }
        Ok(())
    }

    async fn read(&mut self) -> Result<Vec<u8>, NoConnection> {
        let mut prefix = [0; 4];
        self.stream.read_exact(&mut prefix).await?;
        let length = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
        if length.saturating_add(4) > self.input_left {
            let tls = matches!(prefix, [0x15 | 0x16, 3, ..]);
            let reason = Malformed::Field("too much before authentication");
            return Err(Fault::from(if tls { Malformed::Tls } else { reason }).into());
        }
        self.input_left -= 4 + length;
        let mut message = vec![0; length];
        self.stream.read_exact(&mut message).await?;
        Ok(message)
    }

    async fn write(&mut self, message: &[u8]) -> io::Result<()> {
        let length: u32 = message.len().try_into().expect("messages of the handshake are short");
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend_from_slice(message);
        self.stream.write_all(&bytes).await?;
        self.stream.flush().await
    }
}

/// Who is at the other end of a TLS session, and what both ends of it know.
fn session<Side>(session: &ConnectionCommon<Side>) -> Result<(Chain, Binding), NoConnection> {
    let certificates = session.peer_certificates().map(<[_]>::to_vec).unwrap_or_default();
    let binding = session.export_keying_material([0; 32], b"EXPORTER-dflockd-peer", None);
    Ok((certificates, binding.map_err(|error| error.to_string())?))
}

/// Why there is no connection.
struct NoConnection {
    reason: String,
    /// Nobody listens there.
    refused: bool,
    /// Not worth a warning: somebody came and went without a word.
    dull: bool,
}

impl From<String> for NoConnection {
    fn from(reason: String) -> Self {
        Self { reason, refused: false, dull: false }
    }
}

impl From<Fault> for NoConnection {
    fn from(fault: Fault) -> Self {
        fault.to_string().into()
    }
}

impl From<io::Error> for NoConnection {
    fn from(error: io::Error) -> Self {
        let closed = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
        if closed.contains(&error.kind()) {
            let reason = "closed by the other side during the handshake".to_owned();
            return Self { reason, refused: false, dull: true };
        }
        error.to_string().into()
    }
}

/// Why a connection for sending is over.
enum End {
    /// Neither the peer nor we are wanted any longer.
    Unwanted,
    /// A new one would be better.
    Renew(&'static str),
    Lost(io::Error),
}

/// The task behind one lane to one peer: dials, sends, dials again.
struct Sender {
    shared: Arc<Shared>,
    peer: PeerAddress,
    lane: Lane,
    outbox: Arc<Outbox>,
    state: watch::Receiver<State>,
    /// Ends when its sender is dropped.
    wanted: watch::Receiver<()>,
}

/// A connection that we dialed, ready for frames.
struct Dialed {
    stream: Box<dyn Duplex>,
    /// The same socket, if there is nothing around it.
    direct: Option<Arc<std::net::TcpStream>>,
    proven: Proven,
    /// Who we said we are.
    told: Identity,
}

impl Sender {
    async fn run(mut self) {
        let mut pause = Backoff::new(&self.shared.limits);
        let mut last_reason = String::new();
        loop {
            let credentials = Arc::clone(&self.state.borrow_and_update().credentials);
            let dialed = tokio::select! {
                biased;
                () = self.unwanted() => return,
                dialed = self.dial(&credentials) => dialed,
            };
            let mut steady = false;
            let refused = match dialed {
                Ok(dialed) => {
                    let since = Instant::now();
                    last_reason.clear();
                    self.report("connected to peer", None);
                    self.shared.handler.reachable(self.peer.raft_id, self.lane);
                    match self.pump(dialed).await {
                        End::Unwanted => return,
                        End::Renew(reason) => self.report("reconnecting to peer", Some(reason)),
                        End::Lost(error) => {
                            self.report("lost connection to peer", Some(&error.to_string()));
                        }
                    }
                    steady = since.elapsed() >= STEADY;
                    false
                }
                Err(NoConnection { reason, refused, .. }) => {
                    let Self { peer: PeerAddress { node, address, .. }, lane, .. } = &self;
                    // Said once, not at every attempt.
                    if reason != last_reason {
                        tracing::warn!(node, address, ?lane, reason, "cannot connect to peer");
                        last_reason = reason;
                    } else {
                        tracing::debug!(node, address, ?lane, reason, "cannot connect to peer");
                    }
                    refused
                }
            };
            self.outbox.clear();
            self.shared.handler.unreachable(self.peer.raft_id, self.lane, refused);
            if steady {
                // At once: whether it is refused now tells a dead process from a broken connection.
                pause = Backoff::new(&self.shared.limits);
            } else if self.wait(pause.next()).await.is_err() {
                return;
            }
        }
    }

    fn report(&self, message: &str, reason: Option<&str>) {
        let Self { peer: PeerAddress { node, address, .. }, lane, .. } = self;
        tracing::info!(node, address, ?lane, reason, "{message}");
    }

    /// Waits before the next attempt; an error if there is to be none.
    async fn wait(&mut self, pause: Duration) -> Result<(), ()> {
        let Self { outbox, state, wanted, .. } = self;
        tokio::select! {
            biased;
            // Also new credentials are a reason to try at once.
            changed = state.changed() => changed.map_err(drop)?,
            _ = wanted.changed() => return Err(()),
            () = outbox.hint.notified() => (),
            () = sleep(pause) => (),
        }
        if self.state.borrow().stopping { Err(()) } else { Ok(()) }
    }

    /// Ends when the connection is not wanted any more.
    async fn unwanted(&self) {
        let (mut state, mut wanted) = (self.state.clone(), self.wanted.clone());
        tokio::select! {
            biased;
            _ = state.wait_for(|state| state.stopping) => (),
            _ = wanted.changed() => (),
        }
    }

    async fn dial(&self, credentials: &Credentials) -> Result<Dialed, NoConnection> {
        let Limits { connect: connect_max, handshake: handshake_max, .. } = self.shared.limits;
        let tcp = timeout(connect_max, connect(&self.peer.address))
            .await
            .map_err(|_| "no answer to dialing in time".to_owned())??;
        prepare(&tcp, self.shared.limits.of(self.lane).stall);
        timeout(handshake_max, self.shake(tcp, credentials))
            .await
            .map_err(|_| "no answer to the handshake in time".to_owned())?
    }

    async fn shake(
        &self,
        tcp: TcpStream,
        credentials: &Credentials,
    ) -> Result<Dialed, NoConnection> {
        let Shared { handler, .. } = &*self.shared;
        let target = &self.peer.node;
        let mut direct = None;
        let mut fresh = match &credentials.tls {
            None => {
                let socket = tcp.into_std()?;
                direct = Some(Arc::new(socket.try_clone()?));
                Fresh::plain(TcpStream::from_std(socket)?)
            }
            Some(tls) => Fresh::dial_tls(tcp, tls).await?,
        };
        fresh.check_name(target)?;

        let told = handler.identity();
        let keys = Keys { secrets: &credentials.secrets, binding: fresh.binding };
        let mut dialer = Dialer::new(keys, &told, target, self.lane, self.shared.nonce()?);
        fresh.write(dialer.hello()).await?;
        let proof = dialer.prove(&fresh.read().await?)?;
        fresh.write(&proof).await?;
        let welcome = fresh.read().await.map_err(|fault| {
            let hint = ": most likely its shared secret is another one, its log tells more";
            if fault.dull { format!("{}{hint}", fault.reason).into() } else { fault }
        })?;
        let judged = dialer
            .conclude(&welcome)
            .and_then(|theirs| handler.admit(&theirs).map_err(Fault::Refused));
        match &judged {
            Ok(()) => fresh.write(&handshake::verdict(None)).await?,
            Err(Fault::Refused(reason)) => {
                fresh.write(&handshake::verdict(Some(reason))).await?;
                // Lets the verdict out before the close; TLS has no other way to say that it ends.
                let _ = fresh.stream.shutdown().await;
            }
            Err(_) => (),
        }
        judged?;
        let proven = Proven {
            role: Role::Acceptor,
            secret: credentials.secrets.first().cloned(),
            certificates: fresh.certificates,
        };
        Ok(Dialed { stream: fresh.stream, direct, proven, told })
    }

    /// Sends what is queued until something ends it.
    async fn pump(&mut self, dialed: Dialed) -> End {
        let end = self.write_on(dialed).await;
        self.outbox.disconnect();
        end
    }

    async fn write_on(&mut self, dialed: Dialed) -> End {
        let Dialed { stream, direct, proven, told } = dialed;
        let (mut reader, mut writer) = tokio::io::split(stream);
        let stall = self.shared.limits.of(self.lane).stall;
        let Self { shared, outbox, state, wanted, .. } = self;
        let mut batch = Batch::default();
        let mut unexpected = [0];
        loop {
            if batch.is_done() {
                batch = outbox.take(direct.as_ref());
            }
            let lost = tokio::select! {
                biased;
                end = examine(shared, state, &proven, &told) => match end {
                    End::Unwanted => break,
                    End::Renew(_) | End::Lost(_) => return end,
                },
                _ = wanted.changed() => break,
                // The other side never speaks here, but this is how we learn that it is gone.
                read = reader.read(&mut unexpected) => Some(match read {
                    Ok(0) => io::Error::new(ErrorKind::UnexpectedEof, "closed by the other side"),
                    Ok(_) => io::Error::new(ErrorKind::InvalidData, "it talks where it should listen"),
                    Err(error) => error,
                }),
                written = batch.write(&mut writer, stall), if !batch.is_done() => written.err(),
                () = outbox.filled(), if batch.is_done() => None,
            };
            if let Some(error) = lost {
                return End::Lost(error);
            }
        }
        let farewell = async {
            batch.write(&mut writer, stall).await?;
            while !outbox.is_empty() {
                outbox.take(None).write(&mut writer, stall).await?;
            }
            writer.shutdown().await
        };
        // Whether it went out or not, this is the end.
        let _ = timeout(LINGER, farewell).await;
        End::Unwanted
    }
}

/// Ends when a change of `state` is the end of a connection that we dialed.
async fn examine(
    shared: &Shared,
    state: &mut watch::Receiver<State>,
    proven: &Proven,
    told: &Identity,
) -> End {
    loop {
        if state.changed().await.is_err() {
            return End::Unwanted;
        }
        let State { credentials, stopping, .. } = state.borrow_and_update().clone();
        if stopping {
            return End::Unwanted;
        }
        if !credentials.still_accept(proven) {
            return End::Renew("the credentials have changed");
        }
        // A node that has just learnt its cluster and its number should be known by them.
        if shared.handler.identity() != *told {
            return End::Renew("this node has a new identity");
        }
    }
}

/// Pauses between attempts. Random, so that nodes that lost each other do not meet in step.
struct Backoff {
    next: Duration,
    max: Duration,
}

impl Backoff {
    fn new(limits: &Limits) -> Self {
        Self { next: limits.redial_min, max: limits.redial_max }
    }

    fn next(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.max);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }
}

async fn connect(address: &str) -> Result<TcpStream, NoConnection> {
    let addresses: Vec<_> = lookup_host(address)
        .await
        .map_err(|error| format!("cannot look up its address: {error}"))?
        .collect();
    let mut failure = NoConnection::from("its address has no meaning".to_owned());
    let mut all_refused = true;
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(tcp) => return Ok(tcp),
            Err(error) => {
                all_refused &= error.kind() == ErrorKind::ConnectionRefused;
                failure = NoConnection::from(error.to_string());
                failure.refused = all_refused;
            }
        }
    }
    Err(failure)
}

/// Small frames go at once, and a host that has vanished is noticed.
fn prepare(tcp: &TcpStream, stall: Duration) {
    let socket = SockRef::from(tcp);
    let probe = (stall / 5).max(Duration::from_secs(1));
    let keepalive = TcpKeepalive::new().with_time(probe * 2).with_interval(probe).with_retries(3);
    let result = socket.set_tcp_nodelay(true).and_then(|()| socket.set_tcp_keepalive(&keepalive));
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let result = result.and_then(|()| socket.set_tcp_user_timeout(Some(stall)));
    if let Err(error) = result {
        // It only means that a lost host is noticed later.
        tracing::debug!(%error, "a peer socket does not take its options");
    }
}

fn tls_fault(error: io::Error) -> NoConnection {
    let fault = NoConnection::from(error);
    NoConnection { reason: format!("TLS: {}", fault.reason), ..fault }
}

async fn in_time<T>(limit: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let stalled = |_| io::Error::new(ErrorKind::TimedOut, "the other side does not read");
    timeout(limit, io).await.map_err(stalled)?
}

/// The task behind the listener.
async fn accept(shared: Arc<Shared>, listener: TcpListener, mut state: watch::Receiver<State>) {
    loop {
        let accepted = tokio::select! {
            biased;
            changed = state.changed() => {
                if changed.is_err() || state.borrow().stopping {
                    return;
                }
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((tcp, from)) => {
                let (stranger, pushed_out) = Stranger::new(&shared);
                let peers = Arc::clone(&state.borrow_and_update().peers);
                let (shared, state) = (Arc::clone(&shared), state.clone());
                let receiver = Receiver { shared, state, peers, from };
                tokio::spawn(receiver.run(tcp, stranger, pushed_out));
            }
            Err(error) => {
                // Most likely there are no file descriptors left; others will be closed.
                if shared.may_log() {
                    tracing::warn!(%error, "cannot accept a peer");
                }
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

/// A place among the connections that are not authenticated yet.
struct Stranger {
    shared: Arc<Shared>,
    number: u64,
}

impl Stranger {
    fn new(shared: &Arc<Shared>) -> (Self, oneshot::Receiver<()>) {
        let (place, pushed_out) = oneshot::channel();
        let number = shared.number();
        let mut strangers = shared.strangers.lock();
        if strangers.len() >= shared.limits.strangers_max {
            strangers.pop_first();
        }
        strangers.insert(number, place);
        drop(strangers);
        (Self { shared: Arc::clone(shared), number }, pushed_out)
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        self.shared.strangers.lock().remove(&self.number);
    }
}

/// The task behind an accepted connection.
struct Receiver {
    shared: Arc<Shared>,
    /// What was not seen of it when the connection came is looked at when frames are read.
    state: watch::Receiver<State>,
    /// The list that was in force when the connection was last compared with it.
    peers: Arc<Vec<PeerAddress>>,
    from: SocketAddr,
}

/// A connection that a peer dialed, ready for frames.
struct Accepted {
    stream: Box<dyn Duplex>,
    proven: Proven,
    peer: Identity,
    lane: Lane,
}

impl Receiver {
    async fn run(self, tcp: TcpStream, stranger: Stranger, pushed_out: oneshot::Receiver<()>) {
        let credentials = Arc::clone(&self.state.borrow().credentials);
        let mut state = self.state.clone();
        let too_slow = |reason: &str| NoConnection { dull: true, ..reason.to_owned().into() };
        let accepted = tokio::select! {
            biased;
            _ = state.wait_for(|state| state.stopping) => return,
            _ = pushed_out => Err(too_slow("too many others came after it")),
            accepted = timeout(self.shared.limits.handshake, self.shake(tcp, &credentials)) => {
                accepted.unwrap_or_else(|_| Err(too_slow("not authenticated in time")))
            }
        };
        drop(stranger);
        let from = self.from;
        match accepted {
            Ok(accepted) => self.listen(accepted).await,
            Err(NoConnection { reason, dull, .. }) if dull || !self.shared.may_log() => {
                tracing::debug!(%from, reason, "refused a peer");
            }
            Err(NoConnection { reason, .. }) => tracing::warn!(%from, reason, "refused a peer"),
        }
    }

    async fn shake(
        &self,
        tcp: TcpStream,
        credentials: &Credentials,
    ) -> Result<Accepted, NoConnection> {
        let Shared { handler, limits, .. } = &*self.shared;
        prepare(&tcp, limits.main.stall);
        let mut fresh = match &credentials.tls {
            None => Fresh::plain(tcp),
            Some(tls) => Fresh::accept_tls(tcp, tls).await?,
        };
        let keys = Keys { secrets: &credentials.secrets, binding: fresh.binding };
        let challenge = handshake::challenge(keys.mode(), self.shared.nonce()?);
        let acceptor = Acceptor::new(keys, &fresh.read().await?, &challenge);
        if acceptor.as_ref().err().is_none_or(Fault::is_difference_of_setup) {
            fresh.write(&challenge).await?;
        }
        let acceptor = acceptor?;
        let peer = acceptor.hello().identity.clone();
        fresh.check_name(&peer.node)?;
        let secret = acceptor.check(&fresh.read().await?)?;

        // From here on it is no stranger: it is told why.
        let ours = handler.identity();
        let judged =
            acceptor.judge(&ours).and_then(|()| handler.admit(&peer).map_err(Fault::Refused));
        let refusal = judged.as_ref().err().map(ToString::to_string);
        fresh.write(&acceptor.welcome(&ours, refusal.as_deref(), secret)).await?;
        if judged.is_err() {
            let _ = fresh.stream.shutdown().await;
        }
        judged.map_err(|fault| format!("{}: {fault}", peer.node))?;
        let verdict = fresh.read().await?;
        handshake::check_verdict(&verdict).map_err(|fault| format!("{}: {fault}", peer.node))?;

        let proven = Proven {
            role: Role::Dialer,
            secret: credentials.secrets.get(secret).cloned(),
            certificates: fresh.certificates,
        };
        Ok(Accepted { stream: fresh.stream, proven, peer, lane: acceptor.hello().lane })
    }

    /// Takes the place of an older stream of the same peer, and delivers frames to the end.
    async fn listen(mut self, accepted: Accepted) {
        let shared = Arc::clone(&self.shared);
        let (node, lane) = (accepted.peer.node.clone(), accepted.lane);
        let (from, raft_id) = (self.from, accepted.peer.raft_id);
        let number = shared.number();
        let (newest, mut replaced) = oneshot::channel();
        let floor = {
            let mut streams = shared.streams.lock();
            let floor = streams.get(&(node.clone(), lane)).map(|older| Arc::clone(&older.floor));
            let floor = floor.unwrap_or_default();
            let stream = Stream { number, _newest: newest, floor: Arc::clone(&floor) };
            streams.insert((node.clone(), lane), stream);
            floor
        };
        // It is up: no need to wait any longer before we dial it.
        if let Some(lanes) = shared.hints.lock().get(&node) {
            lanes.iter().for_each(|outbox| outbox.hint.notify_one());
        }
        tracing::info!(node, %from, ?lane, "accepted a peer");

        let ended = tokio::select! {
            biased;
            _ = &mut replaced => None,
            ended = async {
                let _floor = floor.lock().await;
                self.deliver(accepted).await
            } => ended,
        };
        let mut streams = shared.streams.lock();
        if streams.get(&(node.clone(), lane)).is_some_and(|stream| stream.number == number) {
            streams.remove(&(node.clone(), lane));
        }
        drop(streams);
        if let Some(error) = ended {
            tracing::info!(node, %from, ?lane, reason = %error, "lost a stream of a peer");
            shared.handler.stream_lost(raft_id, lane);
        } else {
            tracing::info!(node, %from, ?lane, "closed a stream of a peer");
        }
    }

    /// Gives why the stream was lost; nothing if it was us who ended it.
    async fn deliver(&mut self, accepted: Accepted) -> Option<io::Error> {
        let Accepted { mut stream, proven, peer, lane } = accepted;
        let mut buffer = BytesMut::new();
        loop {
            let wanted = match frame_length(&buffer) {
                Ok(length) => length.map_or(4, |length| 4 + length).saturating_sub(buffer.len()),
                Err(error) => return Some(io::Error::new(ErrorKind::InvalidData, error)),
            };
            buffer.reserve(wanted.max(READ_BYTES));
            let read = tokio::select! {
                biased;
                changed = self.state.changed() => {
                    let state = self.state.borrow_and_update();
                    let listed = |known: &PeerAddress| {
                        known.node == peer.node && [0, known.raft_id].contains(&peer.raft_id)
                    };
                    let removed =
                        !Arc::ptr_eq(&self.peers, &state.peers) && !state.peers.iter().any(listed);
                    let keep = changed.is_ok()
                        && !state.stopping
                        && !removed
                        && state.credentials.still_accept(&proven);
                    if !keep {
                        return None;
                    }
                    self.peers = Arc::clone(&state.peers);
                    continue;
                }
                read = stream.read_buf(&mut buffer) => read,
            };
            match read {
                Ok(0) => {
                    let error = "closed by the other side";
                    return Some(io::Error::new(ErrorKind::UnexpectedEof, error));
                }
                Ok(_) => (),
                Err(error) => return Some(error),
            }
            while let Some(frame) = split_frame(&mut buffer).transpose() {
                match frame {
                    Ok(frame) => self.shared.handler.received(peer.raft_id, lane, frame),
                    Err(error) => return Some(io::Error::new(ErrorKind::InvalidData, error)),
                }
            }
        }
    }
}
