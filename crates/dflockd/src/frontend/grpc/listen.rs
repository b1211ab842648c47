//! The sockets of the gRPC interface: accept, TLS, hyper, and their end. What comes through here goes to the gate.

use std::collections::HashMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

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
use crate::config::Config;
use crate::frontend::accept::accept;
use crate::frontend::auth::Origin;
use crate::frontend::budget::Budget;
use crate::frontend::descriptors::Connections;
use crate::frontend::frames::{Frames, PREFACE};

/// For TLS and the first bytes of HTTP/2.
const HANDSHAKE: Duration = Duration::from_secs(10);
/// Calls in flight on one connection.
const STREAMS_MAX: u32 = 1024;
/// What a client may send before it is looked at, per call and in all.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// Of the metadata of a call.
const HEAD_BYTES_MAX: u32 = 32 * 1024;
/// Calls that a client gave up before they began.
const RESETS_MAX: usize = 64;
/// How often the peer of a connection must show that it lives.
const PING: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(20);

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
        let mut phase = self.phase.subscribe();
        let stopped = phase.wait_for(|phase| *phase != Phase::Serving);
        accept(socket, stopped, |stream, address| self.admit(stream, address)).await;
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
        let budget = Budget::new(listener.app.service.pending_bytes_max);
        let stream = Connection {
            socket,
            greeting: PREFACE,
            frames: Frames::after_the_preface(),
            address: self.origin.address,
            app: Arc::clone(&listener.app),
            budget: Arc::clone(&budget),
        };
        let entry = Entry {
            gated: listener.gated.clone(),
            origin: self.origin.clone(),
            usage: usage.clone(),
            budget,
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
    budget: Arc<Budget>,
}

impl hyper::service::Service<Request<Incoming>> for Entry {
    type Response = hyper::Response<GivingBody>;
    type Error = Infallible;
    type Future = Passing;

    fn call(&self, mut request: Request<Incoming>) -> Passing {
        let extensions = request.extensions_mut();
        extensions.insert(self.origin.clone());
        extensions.insert(self.usage.clone());
        extensions.insert(Arc::clone(&self.budget));
        self.gated.clone().call(request.map(Body::new))
    }
}

fn protocol() -> http2::Builder<TokioExecutor> {
    let mut protocol = http2::Builder::new(TokioExecutor::new());
    protocol
        .timer(TokioTimer::new())
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
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
    budget: Arc<Budget>,
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
            let kind = "closed: a flood of HTTP/2 frames";
            if let Some(suppressed) = self.app.service.log_budget.admit(self.address, kind) {
                tracing::warn!(peer = %self.address, suppressed, "{kind}");
            }
            return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
        }
        Poll::Ready(Ok(()))
    }
}

impl Connection {
    /// Notes what was written: there is room for so much more.
    fn note(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if let Poll::Ready(Ok(count)) = &written {
            self.budget.unsent.written(*count);
        }
        written
    }
}

impl AsyncWrite for Connection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, bytes);
        self.note(written)
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
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, slices);
        self.note(written)
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
