//! The sockets of the gRPC interface: accept, TLS, hyper, and their end. What comes through here goes to the gate.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;
use dflockd_engine::{AddressKey, Door};
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::body::Body;
use tower::Service as _;

use super::gate::{Gated, GivingBody, Passing};
use super::usage::{Patience, Usage};
use super::{App, routes};
use crate::auth::Origin;
use crate::config::Config;
use crate::descriptors::Connections;

const ACCEPT_PAUSE_MIN: Duration = Duration::from_millis(5);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// For TLS and the first bytes of HTTP/2.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Calls in flight on one connection.
const STREAMS_MAX: u32 = 1024;
/// Of the metadata of a call.
const HEAD_BYTES_MAX: u32 = 32 * 1024;
/// Calls that a client gave up before they began.
const RESETS_MAX: usize = 64;
/// How often the peer of a connection must show that it lives.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);
/// What every connection over HTTP/2 begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// How long an unused connection may take to close, once it was told to.
const LAST_MOMENT: Duration = Duration::from_secs(10);

/// How many connections there may be, and for how long.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    per_address: u64,
    patience: Patience,
}

impl Limits {
    pub(crate) fn of(config: &Config) -> Self {
        let idle = Some(config.grpc_idle_timeout).filter(|idle| !idle.is_zero());
        Self {
            per_address: config.http_max_connections_per_ip,
            patience: Patience { idle, stranger: config.read_timeout },
        }
    }
}

/// All connections, and who may join them.
pub(crate) struct Listener {
    app: Arc<App>,
    gated: Gated,
    protocol: http2::Builder<TokioExecutor>,
    /// Swapped when the certificate is loaded again.
    tls: ArcSwapOption<ServerConfig>,
    connections: Arc<Connections>,
    limits: Limits,
    seats: Mutex<Seats>,
    /// Notified when the last one leaves.
    empty: Notify,
    phase: watch::Sender<Phase>,
}

#[derive(Default)]
struct Seats {
    by_address: HashMap<AddressKey, u64>,
    total: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Serving,
    /// Nobody new; who is there finishes what it began.
    Finishing,
}

impl Listener {
    /// Serves on the socket. To be called inside a tokio runtime.
    ///
    /// # Errors
    ///
    /// If the descriptions of the services can not be read.
    pub(crate) fn start(
        app: &Arc<App>,
        socket: TcpListener,
        tls: Option<&Arc<ServerConfig>>,
        connections: Arc<Connections>,
        limits: Limits,
    ) -> anyhow::Result<Arc<Self>> {
        let listener = Arc::new(Self {
            app: Arc::clone(app),
            gated: Gated::new(app, routes(app)?.prepare()),
            protocol: protocol(),
            tls: ArcSwapOption::new(tls.map(|tls| with_http2(tls))),
            connections,
            limits,
            seats: Mutex::default(),
            empty: Notify::new(),
            phase: watch::Sender::new(Phase::Serving),
        });
        tokio::spawn(Arc::clone(&listener).accept(socket));
        Ok(listener)
    }

    /// Connections from now on get this certificate.
    pub(crate) fn reload(&self, tls: Option<&Arc<ServerConfig>>) {
        self.tls.store(tls.map(|tls| with_http2(tls)));
    }

    /// Accepts nobody any more and lets everybody finish. Done when all are gone.
    pub(crate) async fn finish(&self) {
        self.phase.send_replace(Phase::Finishing);
        loop {
            let empty = self.empty.notified();
            if self.count() == 0 {
                return;
            }
            empty.await;
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.seats.lock().total
    }

    async fn accept(self: Arc<Self>, socket: TcpListener) {
        let mut pause = ACCEPT_PAUSE_MIN;
        let mut phase = self.phase.subscribe();
        let stopped = phase.wait_for(|phase| *phase != Phase::Serving);
        let mut stopped = pin!(stopped);
        loop {
            let next = tokio::select! {
                _ = &mut stopped => return,
                next = socket.accept() => next,
            };
            match next {
                Ok((stream, address)) => {
                    pause = ACCEPT_PAUSE_MIN;
                    self.admit(stream, address);
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(ACCEPT_PAUSE_MAX);
                }
            }
        }
    }

    fn admit(self: &Arc<Self>, stream: TcpStream, address: SocketAddr) {
        let Some(seat) = self.take_seat(address) else {
            self.app.service.metrics.connection_refused(Door::Grpc);
            let kind = "gRPC connection cap reached";
            if let Some(suppressed) = self.app.service.log_budget.admit(address.ip(), kind) {
                tracing::warn!(peer = %address, suppressed, "{kind}");
            }
            return;
        };
        // Answers are small and must not wait for more.
        if stream.set_nodelay(true).is_err() {
            return;
        }
        let tls = self.tls.load_full();
        tokio::spawn(async move {
            let greeted = async {
                let mut socket = match tls {
                    None => Socket::Plain(stream),
                    Some(tls) => {
                        Socket::Tls(Box::new(TlsAcceptor::from(tls).accept(stream).await?))
                    }
                };
                let mut preface = [0; PREFACE.len()];
                socket.read_exact(&mut preface).await?;
                let speaks_http2 = preface == *PREFACE;
                speaks_http2.then_some(socket).ok_or(io::Error::from(io::ErrorKind::InvalidData))
            };
            let mut phase = seat.listener.phase.subscribe();
            let greeted = tokio::select! {
                greeted = tokio::time::timeout(HANDSHAKE, greeted) => greeted,
                _ = phase.wait_for(|phase| *phase != Phase::Serving) => return,
            };
            match greeted {
                Ok(Ok(socket)) => seat.serve(socket).await,
                Ok(Err(error)) => tracing::debug!(peer = %address, %error, "no gRPC"),
                Err(_) => tracing::debug!(peer = %address, "slow handshake"),
            }
        });
    }

    fn take_seat(self: &Arc<Self>, address: SocketAddr) -> Option<Seat> {
        let address = address.ip().to_canonical();
        let mut seats = self.seats.lock();
        let here = seats.by_address.get(&address.into()).copied().unwrap_or(0);
        if self.limits.per_address > 0 && here >= self.limits.per_address {
            return None;
        }
        if !self.connections.enter(Door::Grpc) {
            return None;
        }
        *seats.by_address.entry(address.into()).or_default() += 1;
        seats.total += 1;
        self.app.service.metrics.connected(Door::Grpc);
        Some(Seat { listener: Arc::clone(self), origin: Origin::new(address) })
    }
}

/// The place of one connection.
struct Seat {
    listener: Arc<Listener>,
    origin: Origin,
}

impl Seat {
    /// Serves a connection until it ends, has been unused for too long or is told to stop.
    async fn serve(self, socket: Socket) {
        let listener = &*self.listener;
        let usage = Usage::new(listener.limits.patience);
        let stream = Connection {
            socket,
            greeting: PREFACE,
            frames: Frames::default(),
            address: self.origin.address,
            app: Arc::clone(&listener.app),
        };
        let entry = Entry {
            gated: listener.gated.clone(),
            origin: self.origin.clone(),
            usage: usage.clone(),
        };
        let mut phase = listener.phase.subscribe();
        let connection = listener.protocol.serve_connection(TokioIo::new(stream), entry);
        let mut connection = pin!(connection);
        let is_told = tokio::select! {
            biased;
            _ = connection.as_mut() => return,
            _ = phase.wait_for(|phase| *phase != Phase::Serving) => true,
            () = usage.expired() => false,
        };
        // Tells the client to come again if it wants something; what it has begun meanwhile is finished.
        connection.as_mut().graceful_shutdown();
        if is_told {
            let _ = connection.await;
            return;
        }
        while tokio::time::timeout(LAST_MOMENT, connection.as_mut()).await.is_err() {
            if usage.is_disposable() {
                return;
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let listener = &self.listener;
        let address = AddressKey::from(self.origin.address);
        let mut seats = listener.seats.lock();
        listener.connections.leave(Door::Grpc);
        seats.total -= 1;
        if let Some(here) = seats.by_address.get_mut(&address) {
            *here -= 1;
            if *here == 0 {
                seats.by_address.remove(&address);
            }
        }
        listener.app.service.metrics.disconnected(Door::Grpc);
        if seats.total == 0 {
            listener.empty.notify_waiters();
        }
    }
}

/// Where the calls of one connection go.
struct Entry {
    gated: Gated,
    origin: Origin,
    usage: Usage,
}

impl hyper::service::Service<Request<Incoming>> for Entry {
    type Response = hyper::Response<GivingBody>;
    type Error = Infallible;
    type Future = Passing;

    fn call(&self, mut request: Request<Incoming>) -> Passing {
        let extensions = request.extensions_mut();
        extensions.insert(self.origin.clone());
        extensions.insert(self.usage.clone());
        self.gated.clone().call(request.map(Body::new))
    }
}

fn protocol() -> http2::Builder<TokioExecutor> {
    let mut protocol = http2::Builder::new(TokioExecutor::new());
    protocol
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .keep_alive_interval(PING)
        .keep_alive_timeout(PONG)
        .max_pending_accept_reset_streams(RESETS_MAX)
        .max_header_list_size(HEAD_BYTES_MAX);
    protocol
}

/// A connection over HTTP/2.
struct Connection {
    socket: Socket,
    /// What was read before and is to be read again.
    greeting: &'static [u8],
    frames: Frames,
    address: IpAddr,
    app: Arc<App>,
}

enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl AsyncRead for Connection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if !self.greeting.is_empty() {
            let (now, later) = self.greeting.split_at(self.greeting.len().min(buffer.remaining()));
            buffer.put_slice(now);
            self.greeting = later;
            return Poll::Ready(Ok(()));
        }
        let before = buffer.filled().len();
        std::task::ready!(Pin::new(&mut self.socket).poll_read(cx, buffer))?;
        if self.frames.is_flood(&buffer.filled()[before..]) {
            let kind = "closed: a flood of pings";
            if let Some(suppressed) = self.app.service.log_budget.admit(self.address, kind) {
                tracing::warn!(peer = %self.address, suppressed, "{kind}");
            }
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

macro_rules! either {
    ($socket:expr, $stream:ident => $do:expr) => {
        match &mut *$socket {
            Socket::Plain($stream) => $do,
            Socket::Tls($stream) => $do,
        }
    };
}

impl AsyncRead for Socket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(cx, buffer))
    }
}

impl AsyncWrite for Socket {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(cx, bytes))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(cx, slices))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

/// The same certificate, with the protocol that is spoken here.
fn with_http2(tls: &ServerConfig) -> Arc<ServerConfig> {
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![b"h2".to_vec()];
    Arc::new(tls)
}

/// Counts the frames that a peer can make the server answer for nothing. HTTP/2 itself sets no limit to them.
#[derive(Default)]
struct Frames {
    head: [u8; HEAD],
    /// Bytes of the head that are there.
    known: usize,
    /// Bytes of the payload that are to come.
    left: usize,
    answered: u32,
    since: Option<Instant>,
}

const HEAD: usize = 9;
const SETTINGS_FRAME: u8 = 4;
const PING_FRAME: u8 = 6;
/// Pings and settings in a second: more than any client needs to measure a connection, too few to keep a core busy.
const ANSWERED_MAX: u32 = 10_000;
const ANSWERED_IN: Duration = Duration::from_secs(1);

impl Frames {
    /// Whether these bytes are too much.
    fn is_flood(&mut self, mut bytes: &[u8]) -> bool {
        while !bytes.is_empty() {
            let skipped = self.left.min(bytes.len());
            self.left -= skipped;
            bytes = &bytes[skipped..];
            let taken = (HEAD - self.known).min(bytes.len());
            self.head[self.known..self.known + taken].copy_from_slice(&bytes[..taken]);
            self.known += taken;
            bytes = &bytes[taken..];
            if self.known < HEAD {
                return false;
            }
            self.known = 0;
            let [a, b, c, kind, ..] = self.head;
            self.left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            if matches!(kind, PING_FRAME | SETTINGS_FRAME) && self.count() {
                return true;
            }
        }
        false
    }

    fn count(&mut self) -> bool {
        self.answered += 1;
        if self.answered <= ANSWERED_MAX {
            return false;
        }
        let now = Instant::now();
        let is_flood = self.since.is_some_and(|since| now.duration_since(since) < ANSWERED_IN);
        self.since = Some(now);
        self.answered = 0;
        is_flood
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pings_are_counted_however_they_arrive() {
        let ping = [0, 0, 8, PING_FRAME, 0, 0, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        // Looks like pings, but is the payload of another frame.
        let data = [&[0, 0, 34, 0, 0, 0, 0, 0, 1][..], &ping, &ping].concat();
        for piece in [1, 7, 17, 4096] {
            let mut frames = Frames::default();
            let many = data.repeat(2 * ANSWERED_MAX as usize);
            assert!(!many.chunks(piece).any(|bytes| frames.is_flood(bytes)), "{piece}");
            assert_eq!(frames.answered, 0);
            let flood = ping.repeat(3 * ANSWERED_MAX as usize);
            assert!(flood.chunks(piece).any(|bytes| frames.is_flood(bytes)), "{piece}");
        }
    }
}
