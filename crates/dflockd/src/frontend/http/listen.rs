//! The sockets of the HTTP interface: accept, TLS, hyper, and their end.
//!
//! A connection is one task, in which its requests are handled as well (over HTTP/2 each has one of its own).

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{IpAddr, SocketAddr};
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use axum::Router;
use dflockd_engine::{AddressKey, Door};
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, watch};
use tokio_rustls::TlsAcceptor;
use tower::Service as _;

use super::origin::Arrived;
use super::pace::{Answering, HangUp, Pace, PaceLimits, Paced, PacedBody};
use super::streams::Cut;
use super::{Shared, router};
use crate::frontend::accept::accept;
use crate::frontend::auth::Origin;
use crate::frontend::budget::{Budget, PIECE_BYTES};
use crate::frontend::descriptors::Connections;

const HANDSHAKE: Duration = Duration::from_secs(10);
const PACE: PaceLimits = PaceLimits {
    head: Duration::from_secs(10),
    idle: Duration::from_secs(120),
    stall: Duration::from_secs(30),
};
/// Of a head over HTTP/1.1 and of a header list over HTTP/2.
const HEAD_BYTES_MAX: u16 = 32 * 1024;
/// Requests in flight on one connection over HTTP/2.
const STREAMS_MAX: u32 = 128;
/// What is kept for a slow reader over HTTP/2, per stream, besides the piece of a body that is next.
const SEND_BYTES_MAX: usize = PIECE_BYTES;
/// What a client may send over HTTP/2 before it is looked at, per stream and in all.
const STREAM_WINDOW: u32 = 64 * 1024;
const CONNECTION_WINDOW: u32 = 512 * 1024;
/// How often the peer of a connection over HTTP/2 must show that it lives.
const H2_PING: Duration = Duration::from_secs(30);
const H2_PONG: Duration = Duration::from_secs(20);

/// All connections, and who may join them.
pub(crate) struct Listener {
    app: Shared,
    router: Router,
    protocol: auto::Builder<TokioExecutor>,
    /// For connections that may not speak HTTP/2.
    http1: auto::Builder<TokioExecutor>,
    /// Swapped when the certificate is loaded again.
    tls: ArcSwapOption<ServerConfig>,
    connections: Arc<Connections>,
    per_address_max: u64,
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
    Closed,
}

impl Listener {
    /// Serves on the socket. To be called inside a tokio runtime.
    pub(crate) fn start(
        app: Shared,
        socket: TcpListener,
        tls: Option<&Arc<ServerConfig>>,
        connections: Arc<Connections>,
        per_address_max: u64,
    ) -> Arc<Self> {
        let listener = Arc::new(Self {
            router: router(Arc::clone(&app)),
            app,
            protocol: protocol(),
            http1: protocol().http1_only(),
            tls: ArcSwapOption::new(tls.map(|tls| with_http(tls))),
            connections,
            per_address_max,
            seats: Mutex::default(),
            empty: Notify::new(),
            phase: watch::Sender::new(Phase::Serving),
        });
        tokio::spawn(Arc::clone(&listener).accept(socket));
        listener
    }

    /// Connections from now on get this certificate.
    pub(crate) fn reload(&self, tls: Option<&Arc<ServerConfig>>) {
        self.tls.store(tls.map(|tls| with_http(tls)));
    }

    /// Accepts nobody any more and lets everybody finish. Done when all are gone.
    pub(crate) async fn finish(&self) {
        self.enter(Phase::Finishing);
        loop {
            let empty = self.empty.notified();
            if self.count() == 0 {
                return;
            }
            empty.await;
        }
    }

    /// Closes all connections.
    pub(crate) fn close(&self) {
        self.enter(Phase::Closed);
    }

    pub(crate) fn count(&self) -> u64 {
        self.seats.lock().total
    }

    fn enter(&self, phase: Phase) {
        self.phase.send_if_modified(|current| {
            let later = *current != Phase::Closed && *current != phase;
            if later {
                *current = phase;
            }
            later
        });
    }

    async fn accept(self: Arc<Self>, socket: TcpListener) {
        let mut phase = self.phase.subscribe();
        let stopped = phase.wait_for(|phase| *phase != Phase::Serving);
        accept(socket, stopped, |stream, address| self.admit(stream, address)).await;
    }

    fn admit(self: &Arc<Self>, stream: TcpStream, address: SocketAddr) {
        let Some(seat) = self.take_seat(address) else {
            self.app.service.metrics.connection_refused(Door::Http);
            let kind = "HTTP connection cap reached";
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
        let arrived = if self.app.is_everywhere { stream.local_addr().ok() } else { None };
        let arrived = arrived.map(|address| Arrived(address.ip()));
        let listener = Arc::clone(self);
        tokio::spawn(async move {
            match tls {
                None => {
                    let h2c = listener.app.h2c;
                    let protocol = if h2c { &listener.protocol } else { &listener.http1 };
                    seat.serve(stream, protocol, arrived).await;
                }
                Some(tls) => {
                    let handshake = TlsAcceptor::from(tls).accept(stream);
                    match tokio::time::timeout(HANDSHAKE, handshake).await {
                        Ok(Ok(stream)) => seat.serve(stream, &listener.protocol, arrived).await,
                        Ok(Err(error)) => tracing::debug!(peer = %address, %error, "no TLS"),
                        Err(_) => tracing::debug!(peer = %address, "slow TLS handshake"),
                    }
                }
            }
        });
    }

    fn take_seat(self: &Arc<Self>, address: SocketAddr) -> Option<Seat> {
        let address = address.ip().to_canonical();
        let mut seats = self.seats.lock();
        let here = seats.by_address.get(&address.into()).copied().unwrap_or(0);
        if self.per_address_max > 0 && here >= self.per_address_max {
            return None;
        }
        if !self.connections.enter(Door::Http) {
            return None;
        }
        let here = seats.by_address.entry(address.into()).or_default();
        *here += 1;
        seats.total += 1;
        self.app.service.metrics.connected(Door::Http);
        Some(Seat { listener: Arc::clone(self), address })
    }
}

/// The place of one connection.
struct Seat {
    listener: Arc<Listener>,
    address: IpAddr,
}

impl Seat {
    /// Serves a connection until it ends, takes too long for something or is told to stop.
    async fn serve(
        self,
        stream: impl AsyncRead + AsyncWrite + HangUp + Unpin + Send + 'static,
        protocol: &auto::Builder<TokioExecutor>,
        arrived: Option<Arrived>,
    ) {
        let Self { ref listener, address } = self;
        let pace = Arc::new(Pace::new(PACE));
        let cut = Cut::default();
        let entry = Entry {
            router: listener.router.clone(),
            origin: Origin::new(address),
            arrived,
            pace: Arc::clone(&pace),
            cut: cut.clone(),
            budget: Budget::new(listener.app.service.pending_bytes_max),
        };
        let io = TokioIo::new(Paced::new(stream, Arc::clone(&pace), address));
        let mut phase = listener.phase.subscribe();
        let connection = protocol.serve_connection(io, entry);
        let mut connection = pin!(connection);
        let told = phase.wait_for(|phase| *phase != Phase::Serving);
        let until_told = async {
            tokio::select! {
                biased;
                _ = connection.as_mut() => true,
                _ = told => false,
                () = cut.made() => true,
            }
        };
        match pace.run(until_told).await {
            Some(false) => {}
            Some(true) => return,
            None => {
                if pace.is_stalled() {
                    tracing::warn!(peer = %address, "closed: it takes in nothing of its answers");
                    listener.app.service.metrics.slow_reader(Door::Http);
                }
                return;
            }
        }
        connection.as_mut().graceful_shutdown();
        let closed = phase.wait_for(|phase| *phase == Phase::Closed);
        tokio::select! {
            biased;
            _ = pace.run(connection) => {}
            _ = closed => {}
            () = cut.made() => {}
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        let listener = &self.listener;
        let mut seats = listener.seats.lock();
        listener.connections.leave(Door::Http);
        seats.total -= 1;
        if let Some(here) = seats.by_address.get_mut(&self.address.into()) {
            *here -= 1;
            if *here == 0 {
                seats.by_address.remove(&self.address.into());
            }
        }
        listener.app.service.metrics.disconnected(Door::Http);
        if seats.total == 0 {
            listener.empty.notify_waiters();
        }
    }
}

/// Where the requests of one connection go.
struct Entry {
    router: Router,
    origin: Origin,
    arrived: Option<Arrived>,
    pace: Arc<Pace>,
    cut: Cut,
    budget: Arc<Budget>,
}

impl hyper::service::Service<Request<Incoming>> for Entry {
    type Response = hyper::Response<PacedBody>;
    type Error = Infallible;
    type Future = Answering;

    fn call(&self, mut request: Request<Incoming>) -> Answering {
        let in_flight = self.pace.request();
        let extensions = request.extensions_mut();
        extensions.insert(self.origin.clone());
        extensions.insert(self.cut.clone());
        if let Some(arrived) = self.arrived {
            extensions.insert(arrived);
        }
        extensions.insert(Arc::clone(&self.budget));
        Answering::new(self.router.clone().call(request), in_flight)
    }
}

fn protocol() -> auto::Builder<TokioExecutor> {
    let mut protocol = auto::Builder::new(TokioExecutor::new());
    // Heads and pauses are timed by `Pace`. Small answers are cheaper in one piece.
    protocol
        .http1()
        .header_read_timeout(None)
        .max_buf_size(HEAD_BYTES_MAX.into())
        .writev(false)
        .http2()
        .timer(TokioTimer::new())
        .keep_alive_interval(H2_PING)
        .keep_alive_timeout(H2_PONG)
        .max_concurrent_streams(STREAMS_MAX)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_header_list_size(HEAD_BYTES_MAX.into())
        .max_send_buf_size(SEND_BYTES_MAX);
    protocol
}

/// The same certificate, with the protocols that can be spoken here.
fn with_http(tls: &ServerConfig) -> Arc<ServerConfig> {
    let mut tls = tls.clone();
    tls.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Arc::new(tls)
}
