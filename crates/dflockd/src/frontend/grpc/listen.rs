//! The sockets of the gRPC interface: accept, TLS, hyper, and their end. What comes through here goes to the gate.

use std::convert::Infallible;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_rustls::TlsAcceptor;
use tonic::body::Body;
use tower::Service as _;

use super::gate::{CallService, GivingBody, Passing};
use super::usage::{Patience, Usage};
use super::{App, routes};
use crate::config::Config;
use crate::frontend::accept::{Accepted, ApiConnections, Listener, Stage};
use crate::frontend::auth::Origin;
use crate::frontend::budget::Budget;
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

/// What serves connections.
struct Server {
    app: Arc<App>,
    gated: CallService,
    protocol: http2::Builder<TokioExecutor>,
    patience: Patience,
}

/// Serves on the socket. To be called inside a tokio runtime.
///
/// # Errors
///
/// If the descriptions of the services can not be read.
pub(crate) fn listen(
    app: &Arc<App>,
    socket: TcpListener,
    connections: ApiConnections,
    tls: Option<&Arc<ServerConfig>>,
    config: &Config,
) -> anyhow::Result<Arc<Listener>> {
    let idle = Some(config.grpc_idle_timeout).filter(|idle| !idle.is_zero());
    let server = Arc::new(Server {
        app: Arc::clone(app),
        gated: CallService::new(app, routes(app)?.prepare()),
        protocol: protocol(),
        patience: Patience { idle, stranger: config.read_timeout },
    });
    let serve = move |accepted| Arc::clone(&server).greet(accepted);
    Ok(Listener::start(socket, connections, tls, &[b"h2"], serve))
}

impl Server {
    /// Serves a connection after its handshakes.
    async fn greet(self: Arc<Self>, accepted: Accepted) {
        let Accepted { stream, address, tls, mut stage } = accepted;
        let greeted = async {
            let mut origin = Origin::new(address.ip().to_canonical());
            let mut socket: Socket = match tls {
                None => Box::new(stream),
                Some(tls) => {
                    let stream = TlsAcceptor::from(tls).accept(stream).await?;
                    origin = origin.with_certificates(stream.get_ref().1.peer_certificates());
                    Box::new(stream)
                }
            };
            let mut preface = [0; PREFACE.len()];
            socket.read_exact(&mut preface).await?;
            let speaks_http2 = preface == *PREFACE;
            speaks_http2
                .then_some((socket, origin))
                .ok_or(io::Error::from(io::ErrorKind::InvalidData))
        };
        let greeted = tokio::select! {
            greeted = tokio::time::timeout(HANDSHAKE, greeted) => greeted,
            _ = stage.wait_for(|stage| *stage != Stage::Serving) => return,
        };
        match greeted {
            Ok(Ok((socket, origin))) => self.serve(socket, origin, stage).await,
            Ok(Err(error)) => tracing::debug!(peer = %address, %error, "no gRPC"),
            Err(_) => tracing::debug!(peer = %address, "slow handshake"),
        }
    }

    /// Serves a connection until it ends, has been unused for too long or is told to stop.
    async fn serve(&self, socket: Socket, origin: Origin, mut stage: watch::Receiver<Stage>) {
        let usage = Usage::new(self.patience);
        let budget = Budget::new(self.app.service.pending_bytes_max);
        let stream = Connection {
            socket,
            greeting: PREFACE,
            frames: Frames::after_the_preface(),
            address: origin.address,
            app: Arc::clone(&self.app),
            budget: Arc::clone(&budget),
        };
        let entry = Entry { gated: self.gated.clone(), origin, usage: usage.clone(), budget };
        let connection = self.protocol.serve_connection(TokioIo::new(stream), entry);
        let mut connection = pin!(connection);
        let is_told = tokio::select! {
            biased;
            _ = connection.as_mut() => return,
            _ = stage.wait_for(|stage| *stage != Stage::Serving) => true,
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

/// Where the calls of one connection go.
struct Entry {
    gated: CallService,
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

/// A socket, with or without TLS.
trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

type Socket = Box<dyn Stream>;

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
