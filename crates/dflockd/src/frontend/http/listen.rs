//! The sockets of the HTTP interface: accept, TLS, hyper, and their end.
//!
//! A connection is one task, in which its requests are handled as well (over HTTP/2 each has one of its own).

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use dflockd_engine::Api;
use hyper::Request;
use hyper::body::Incoming;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tower::Service as _;

use super::origin::Arrived;
use super::pace::{Answering, HangUp, Pace, PaceLimits, Paced, PacedBody};
use super::streams::Cut;
use super::{Shared, router};
use crate::frontend::accept::{Accepted, ApiConnections, Listener, Stage};
use crate::frontend::auth::Origin;
use crate::frontend::budget::{Budget, PIECE_BYTES};

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

/// What serves connections.
struct Server {
    app: Shared,
    router: Router,
    protocol: auto::Builder<TokioExecutor>,
    /// For connections that may not speak HTTP/2.
    http1: auto::Builder<TokioExecutor>,
}

/// Serves on the socket. To be called inside a tokio runtime.
pub(crate) fn listen(
    app: &Shared,
    socket: TcpListener,
    connections: ApiConnections,
    tls: Option<&Arc<ServerConfig>>,
) -> Arc<Listener> {
    let server = Arc::new(Server {
        app: Arc::clone(app),
        router: router(Arc::clone(app)),
        protocol: protocol(),
        http1: protocol().http1_only(),
    });
    let serve = move |accepted| Arc::clone(&server).greet(accepted);
    Listener::start(socket, connections, tls, &[b"h2", b"http/1.1"], serve)
}

impl Server {
    /// Serves a connection after its TLS handshake, if it has one.
    async fn greet(self: Arc<Self>, accepted: Accepted) {
        let Accepted { stream, address, tls, stage } = accepted;
        let arrived = if self.app.is_everywhere { stream.local_addr().ok() } else { None };
        let arrived = arrived.map(|address| Arrived(address.ip()));
        let origin = Origin::new(address.ip().to_canonical());
        match tls {
            None => {
                let protocol = if self.app.h2c { &self.protocol } else { &self.http1 };
                self.serve(stream, protocol, (origin, arrived), stage).await;
            }
            Some(tls) => {
                let handshake = TlsAcceptor::from(tls).accept(stream);
                match tokio::time::timeout(HANDSHAKE, handshake).await {
                    Ok(Ok(stream)) => {
                        let origin =
                            origin.with_certificates(stream.get_ref().1.peer_certificates());
                        self.serve(stream, &self.protocol, (origin, arrived), stage).await;
                    }
                    Ok(Err(error)) => tracing::debug!(peer = %address, %error, "no TLS"),
                    Err(_) => tracing::debug!(peer = %address, "slow TLS handshake"),
                }
            }
        }
    }

    /// Serves a connection until it ends, takes too long for something or is told to stop.
    async fn serve(
        &self,
        stream: impl AsyncRead + AsyncWrite + HangUp + Unpin + Send + 'static,
        protocol: &auto::Builder<TokioExecutor>,
        (origin, arrived): (Origin, Option<Arrived>),
        mut stage: watch::Receiver<Stage>,
    ) {
        let (pace, address) = (Arc::new(Pace::new(PACE)), origin.address);
        let cut = Cut::default();
        let entry = Entry {
            router: self.router.clone(),
            origin,
            arrived,
            pace: Arc::clone(&pace),
            cut: cut.clone(),
            budget: Budget::new(self.app.service.pending_bytes_max),
        };
        let io = TokioIo::new(Paced::new(stream, Arc::clone(&pace), address));
        let connection = protocol.serve_connection(io, entry);
        let mut connection = pin!(connection);
        let told = stage.wait_for(|stage| *stage != Stage::Serving);
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
                    self.app.service.metrics.slow_reader(Api::Http);
                }
                return;
            }
        }
        connection.as_mut().graceful_shutdown();
        let closed = stage.wait_for(|stage| *stage == Stage::Closed);
        tokio::select! {
            biased;
            _ = pace.run(connection) => {}
            _ = closed => {}
            () = cut.made() => {}
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
