//! The sockets of the gRPC interface: accept, TLS, and their end. tonic serves what comes through here.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

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
use super::{App, ConnectedPeer, Peer, routes};
use crate::budget::Budget;

const ACCEPT_PAUSE_MIN: Duration = Duration::from_millis(5);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
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
/// Connections that wait to be served.
const ACCEPTED_MAX: usize = 64;
/// What every connection over HTTP/2 begins with.
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

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
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
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
                    let bytes_max = seat.listener.app.service.pending_bytes_max;
                    let connection = Connection {
                        socket,
                        greeting: PREFACE,
                        frames: Frames::default(),
                        budget: Budget::new(bytes_max),
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
    budget: Arc<Budget>,
    seat: Seat,
}

enum Socket {
    Plain(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
}

impl Connected for Connection {
    type ConnectInfo = ConnectedPeer;

    fn connect_info(&self) -> ConnectedPeer {
        ConnectedPeer { peer: Peer(self.seat.address), budget: Arc::clone(&self.budget) }
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
            tracing::warn!(peer = %self.seat.address, "closed: a flood of pings");
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
