//! The sockets of the gRPC interface: accept, TLS, and their end. tonic serves what comes through here.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use dflockd_engine::Door;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::transport::server::Connected;

use super::gate::Gate;
use super::{App, Peer, routes};
use crate::frames::{Frames, PREFACE};

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
/// Connections that wait to be served.
const ACCEPTED_MAX: usize = 64;

/// All connections, and who may join them.
pub(crate) struct Listener {
    app: Arc<App>,
    /// Swapped when the certificate is loaded again.
    tls: ArcSwapOption<ServerConfig>,
    per_address_max: u64,
    seats: Mutex<HashMap<IpAddr, u64>>,
    phase: watch::Sender<Phase>,
    served: watch::Sender<bool>,
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
        per_address_max: u64,
    ) -> anyhow::Result<Arc<Self>> {
        let listener = Arc::new(Self {
            app: Arc::clone(app),
            tls: ArcSwapOption::new(tls.map(|tls| with_http2(tls))),
            per_address_max,
            seats: Mutex::default(),
            phase: watch::Sender::new(Phase::Serving),
            served: watch::Sender::new(false),
        });
        let (sender, accepted) = mpsc::channel(ACCEPTED_MAX);
        let routes = routes(app)?;
        let serving = Server::builder()
            .layer(Gate(Arc::clone(app)))
            .max_concurrent_streams(STREAMS_MAX)
            .http2_keepalive_interval(Some(PING))
            .http2_keepalive_timeout(Some(PONG))
            .http2_max_pending_accept_reset_streams(Some(RESETS_MAX))
            .http2_max_header_list_size(HEAD_BYTES_MAX)
            .add_routes(routes);
        let mut phase = listener.phase.subscribe();
        let finishing = async move {
            let _ = phase.wait_for(|phase| *phase == Phase::Finishing).await;
        };
        let serving =
            serving.serve_with_incoming_shutdown(ReceiverStream::new(accepted), finishing);
        let served = Arc::clone(&listener);
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                tracing::error!(%error, "gRPC ended");
            }
            served.served.send_replace(true);
        });
        tokio::spawn(Arc::clone(&listener).accept(socket, sender));
        Ok(listener)
    }

    /// Connections from now on get this certificate.
    pub(crate) fn reload(&self, tls: Option<&Arc<ServerConfig>>) {
        self.tls.store(tls.map(|tls| with_http2(tls)));
    }

    /// Accepts nobody any more and lets everybody finish. Done when all are gone.
    pub(crate) async fn finish(&self) {
        self.phase.send_replace(Phase::Finishing);
        let _ = self.served.subscribe().wait_for(|served| *served).await;
    }

    pub(crate) fn count(&self) -> u64 {
        self.seats.lock().values().sum()
    }

    async fn accept(self: Arc<Self>, socket: TcpListener, accepted: mpsc::Sender<Accepted>) {
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
                    self.admit(stream, address, accepted.clone());
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(ACCEPT_PAUSE_MAX);
                }
            }
        }
    }

    fn admit(
        self: &Arc<Self>,
        stream: TcpStream,
        address: SocketAddr,
        accepted: mpsc::Sender<Accepted>,
    ) {
        let Some(seat) = self.take_seat(address) else {
            self.app.service.metrics.connection_refused(Door::Grpc);
            tracing::warn!(peer = %address, "gRPC connection cap reached");
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
            match tokio::time::timeout(HANDSHAKE, greeted).await {
                Ok(Ok(socket)) => {
                    let connection = Connection {
                        socket,
                        greeting: PREFACE,
                        frames: Frames::after_the_preface(),
                        seat,
                    };
                    let _ = accepted.send(Ok(connection)).await;
                }
                Ok(Err(error)) => tracing::debug!(peer = %address, %error, "no gRPC"),
                Err(_) => tracing::debug!(peer = %address, "slow handshake"),
            }
        });
    }

    fn take_seat(self: &Arc<Self>, address: SocketAddr) -> Option<Seat> {
        let address = address.ip().to_canonical();
        let mut seats = self.seats.lock();
        let here = seats.entry(address).or_default();
        if self.per_address_max > 0 && *here >= self.per_address_max {
            return None;
        }
        *here += 1;
        self.app.service.metrics.connected(Door::Grpc);
        Some(Seat { listener: Arc::clone(self), address })
    }
}

type Accepted = io::Result<Connection>;

/// The place of one connection.
struct Seat {
    listener: Arc<Listener>,
    address: IpAddr,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut seats = self.listener.seats.lock();
        if let Some(here) = seats.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                seats.remove(&self.address);
            }
        }
        self.listener.app.service.metrics.disconnected(Door::Grpc);
    }
}

/// A connection over HTTP/2.
struct Connection {
    socket: Socket,
    /// What was read before and is to be read again.
    greeting: &'static [u8],
    frames: Frames,
    seat: Seat,
}

enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer(self.seat.address)
    }
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
            tracing::warn!(peer = %self.seat.address, "closed: a flood of HTTP/2 frames");
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
