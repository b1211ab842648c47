//! Sockets and TLS around `connection.rs`.
//!
//! A connection has a task that reads, but any thread may print to it and write to its socket: the thread
//! that releases a lock writes the next holder's grant, and no task has to be woken for that. Whoever
//! leaves something in an inbox tries the connection's mutex afterwards; if it is taken, its owner looks
//! into the inbox again before it leaves, so nothing is left lying.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use dflockd_core::{Outcome, Push, RequestId, Timestamp};
use dflockd_engine::{Pokes, Pushed, Sink};
use parking_lot::Mutex;
use rustls::{ServerConfig, ServerConnection};
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Notify;

use crate::connection::{Connection, Inbox, Message};
use crate::service::Service;

/// What a connection may bring at a time: more than a thousand requests, a millisecond or so of work.
const READ_BYTES: usize = 16 * 1024;
/// Output buffers larger than this are not kept for reuse.
const SPARE_BYTES_MAX: usize = 256 * 1024;
const KEEPALIVE: Duration = Duration::from_secs(30);
/// How long the rest of the client's input is read after the last answer, so that a reset does not eat it.
const LINGER: Duration = Duration::from_millis(250);
/// How long a full reader is waited for while another thread serves it.
const PATIENCE: Duration = Duration::from_millis(5);
const ACCEPT_PAUSE_MIN: Duration = Duration::from_millis(5);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);

thread_local! {
    /// Connections that have nothing to read or write have no buffers: they share the thread's.
    static INPUT: RefCell<Box<[u8]>> = RefCell::new(vec![0; READ_BYTES].into());
    static OUTPUT: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// All connections, and who may join them.
pub(crate) struct Peers {
    service: Arc<Service>,
    /// Swapped when the certificate is loaded again.
    pub(crate) tls: ArcSwapOption<ServerConfig>,
    max: u64,
    per_address_max: u64,
    members: Mutex<Members>,
    /// Notified when the last one leaves.
    empty: Notify,
}

#[derive(Default)]
struct Members {
    by_address: HashMap<IpAddr, u64>,
    total: u64,
    last: u64,
    peers: HashMap<u64, Arc<Peer>>,
}

impl Peers {
    pub(crate) fn new(
        service: Arc<Service>,
        tls: Option<Arc<ServerConfig>>,
        max: u64,
        per_address_max: u64,
    ) -> Self {
        Self {
            service,
            tls: ArcSwapOption::new(tls),
            max,
            per_address_max,
            members: Mutex::default(),
            empty: Notify::new(),
        }
    }

    /// Accepts connections until `stop`.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener, stop: Arc<Notify>) {
        let mut pause = ACCEPT_PAUSE_MIN;
        let stopped = stop.notified();
        tokio::pin!(stopped);
        loop {
            let accepted = tokio::select! {
                () = &mut stopped => return,
                accepted = listener.accept() => accepted,
            };
            match accepted {
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
        let Some(seat) = self.seat(address) else {
            tracing::warn!(peer = %address, "connection cap reached");
            return;
        };
        match Peer::open(self, stream, address) {
            Ok((peer, reader)) => {
                self.members.lock().peers.insert(seat.number, Arc::clone(&peer));
                tokio::spawn(run(peer, reader, seat));
            }
            Err(error) => tracing::debug!(peer = %address, %error, "connection failed"),
        }
    }

    /// A seat, unless all are taken.
    fn seat(self: &Arc<Self>, address: SocketAddr) -> Option<Seat> {
        let address = address.ip().to_canonical();
        let mut members = self.members.lock();
        if self.max > 0 && members.total >= self.max {
            return None;
        }
        let here = members.by_address.entry(address).or_default();
        if self.per_address_max > 0 && *here >= self.per_address_max {
            return None;
        }
        *here += 1;
        members.total += 1;
        members.last += 1;
        let number = members.last;
        self.service.connections.fetch_add(1, Ordering::Relaxed);
        Some(Seat { peers: Arc::clone(self), address, number })
    }

    /// Ends the waits of all connections.
    pub(crate) fn drain(&self) {
        for peer in self.all() {
            peer.drain();
        }
    }

    /// Closes all connections.
    pub(crate) fn close(&self) {
        for peer in self.all() {
            peer.abort();
        }
    }

    /// Waits until the last connection has left.
    pub(crate) async fn gone(&self) {
        loop {
            let empty = self.empty.notified();
            if self.members.lock().total == 0 {
                return;
            }
            empty.await;
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.members.lock().total
    }

    fn all(&self) -> Vec<Arc<Peer>> {
        self.members.lock().peers.values().cloned().collect()
    }
}

/// A connection counted against the caps.
struct Seat {
    peers: Arc<Peers>,
    address: IpAddr,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        let mut members = self.peers.members.lock();
        members.peers.remove(&self.number);
        members.total -= 1;
        if let Some(here) = members.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                members.by_address.remove(&self.address);
            }
        }
        self.peers.service.connections.fetch_sub(1, Ordering::Relaxed);
        if members.total == 0 {
            self.peers.empty.notify_waiters();
        }
    }
}

/// One connection.
struct Peer {
    service: Arc<Service>,
    writer: OwnedWriteHalf,
    inbox: Arc<Inbox>,
    /// None once it is over.
    talk: Mutex<Option<Talk>>,
    /// What the task waits for has changed.
    attention: Notify,
    /// Close now, whatever is unwritten.
    aborted: AtomicBool,
}

struct Talk {
    connection: Connection,
    tls: Option<Box<ServerConnection>>,
    /// Output that is in TLS but not in the socket yet, and so not written.
    sealed: usize,
    /// The TLS handshake must be done by then.
    handshake_until: Option<Timestamp>,
    /// The socket can not be written to any more.
    broken: bool,
}

/// What a connection's task waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Plan {
    read: bool,
    write: bool,
    deadline: Option<Timestamp>,
    over: bool,
}

impl Plan {
    const OVER: Self = Self { read: false, write: false, deadline: None, over: true };
}

impl Sink for Peer {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        self.inbox.put(Message::Reply(request, outcome))
    }

    fn push(&self, push: Push) -> Pushed {
        self.inbox.put(Message::Push(push))
    }

    fn overflow(&self) {
        self.inbox.overflow();
    }

    fn close(&self) {
        self.inbox.close();
    }

    fn poke(&self) {
        let mut pokes = Pokes::new();
        self.serve(&mut pokes, Duration::ZERO);
        pokes.run();
    }

    fn poke_patiently(&self) {
        let mut pokes = Pokes::new();
        // Not for ever: it may be waiting for us.
        self.serve(&mut pokes, PATIENCE);
        pokes.run();
    }
}

impl Peer {
    fn open(
        peers: &Peers,
        stream: TcpStream,
        address: SocketAddr,
    ) -> io::Result<(Arc<Self>, OwnedReadHalf)> {
        let service = Arc::clone(&peers.service);
        stream.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
        SockRef::from(&stream).set_tcp_keepalive(&keepalive)?;
        let tls = match &*peers.tls.load() {
            Some(config) => Some(
                ServerConnection::new(Arc::clone(config))
                    .map(Box::new)
                    .map_err(io::Error::other)?,
            ),
            None => None,
        };
        let handshake_until =
            tls.is_some().then(|| service.engine.clock().now() + service.read_timeout);
        let (reader, writer) = stream.into_split();
        let peer = Arc::new(Self {
            service,
            writer,
            inbox: Arc::default(),
            talk: Mutex::new(None),
            attention: Notify::new(),
            aborted: AtomicBool::new(false),
        });
        let label: Arc<str> = address.to_string().into();
        let sink: Arc<dyn Sink> = Arc::<Self>::clone(&peer);
        let me = peer.service.engine.open(sink, Arc::clone(&label));
        tracing::debug!(peer = %address, conn = me.id().0, "connected");
        let connection =
            Connection::new(Arc::clone(&peer.service), Arc::clone(&peer.inbox), me, label);
        *peer.talk.lock() =
            Some(Talk { connection, tls, sealed: 0, handshake_until, broken: false });
        Ok((peer, reader))
    }

    /// Handles what others left in the inbox, unless somebody is at it for longer than `patience`, who will: everybody
    /// who had the mutex looks into the inbox once more after giving it back.
    fn serve(&self, pokes: &mut Pokes, patience: Duration) {
        while !self.inbox.is_empty() {
            let Some(mut talk) = self.talk.try_lock_for(patience) else { return };
            let Some(talk) = talk.as_mut() else { return };
            let before = self.plan_of(talk);
            if before.over {
                return;
            }
            self.with_output(talk, |talk| talk.connection.handle_messages(pokes));
            if self.plan_of(talk) != before {
                self.attention.notify_one();
            }
        }
    }

    /// Does something with the connection and writes what comes of it.
    fn with_talk(&self, pokes: &mut Pokes, act: impl FnOnce(&mut Talk, &mut Pokes)) {
        {
            let mut talk = self.talk.lock();
            let Some(talk) = talk.as_mut() else { return };
            self.with_output(talk, |talk| {
                act(talk, pokes);
                if !self.inbox.is_empty() {
                    talk.connection.handle_messages(pokes);
                }
            });
        }
        self.serve(pokes, Duration::ZERO);
        pokes.run();
    }

    /// Lends the thread's buffer to the connection, and writes.
    fn with_output(&self, talk: &mut Talk, act: impl FnOnce(&mut Talk)) {
        OUTPUT.with_borrow_mut(|spare| talk.connection.lend_output(spare));
        act(talk);
        self.flush(talk);
        OUTPUT.with_borrow_mut(|spare| {
            talk.connection.return_output(spare);
            if spare.capacity() > SPARE_BYTES_MAX {
                *spare = Vec::new();
            }
        });
    }

    /// Writes as much as the socket takes. Requests that waited only for that are executed.
    fn flush(&self, talk: &mut Talk) {
        let mut pokes = Pokes::new();
        while !talk.broken {
            match self.write(talk) {
                Ok(()) if talk.connection.has_more() => talk.connection.handle_more(&mut pokes),
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::debug!(conn = talk.connection.id().0, %error, "write failed");
                    talk.broken = true;
                }
            }
        }
        pokes.run();
    }

    fn write(&self, talk: &mut Talk) -> io::Result<()> {
        let Talk { connection, tls, sealed, .. } = talk;
        let Some(tls) = tls else {
            while !connection.output().is_empty() {
                let count = self.writer.try_write(connection.output())?;
                connection.handle_written(count);
            }
            return Ok(());
        };
        loop {
            while tls.wants_write() {
                tls.write_tls(&mut Socket(&self.writer))?;
            }
            if *sealed > 0 {
                connection.handle_written(std::mem::take(sealed));
            }
            if connection.output().is_empty() || tls.is_handshaking() {
                return Ok(());
            }
            *sealed = tls.writer().write(connection.output())?;
        }
    }

    fn plan(&self) -> Plan {
        loop {
            let plan = match self.talk.lock().as_mut() {
                Some(talk) if !self.aborted.load(Ordering::SeqCst) => self.plan_of(talk),
                Some(_) | None => Plan::OVER,
            };
            if plan.over || self.inbox.is_empty() {
                return plan;
            }
            self.poke();
        }
    }

    fn plan_of(&self, talk: &Talk) -> Plan {
        if talk.broken || talk.connection.is_over() {
            return Plan::OVER;
        }
        let tls_writes = talk.tls.as_ref().is_some_and(|tls| tls.wants_write());
        let deadlines = [talk.connection.next_deadline(), talk.handshake_until];
        Plan {
            read: talk.connection.wants_input(),
            write: tls_writes || !talk.connection.output().is_empty(),
            deadline: deadlines.into_iter().flatten().min(),
            over: false,
        }
    }

    fn handle_input(&self, bytes: &[u8], pokes: &mut Pokes) {
        self.with_talk(pokes, |talk, pokes| {
            if talk.tls.is_none() {
                talk.connection.handle_input(bytes, pokes);
            } else if let Err(error) = decrypt(talk, bytes, pokes) {
                tracing::debug!(conn = talk.connection.id().0, %error, "TLS failed");
                // The alert, if the socket takes it.
                let _ = self.write(talk);
                talk.broken = true;
            }
        });
    }

    fn handle_time(&self, pokes: &mut Pokes) {
        self.with_talk(pokes, |talk, _| {
            let now = self.service.engine.clock().now();
            if talk.handshake_until.is_some_and(|until| until <= now) {
                talk.broken = true;
            }
            talk.connection.handle_time();
        });
    }

    fn drain(&self) {
        let mut pokes = Pokes::new();
        self.with_talk(&mut pokes, |talk, pokes| talk.connection.handle_drain(pokes));
        self.attention.notify_one();
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.attention.notify_one();
    }

    /// Ends the session; true if the client should see an orderly end.
    fn end(&self) -> bool {
        let mut pokes = Pokes::new();
        let Some(mut talk) = self.talk.lock().take() else { return false };
        let orderly = talk.connection.ends_orderly() && !talk.broken;
        if let Some(tls) = &mut talk.tls
            && orderly
        {
            tls.send_close_notify();
            let _ = tls.write_tls(&mut Socket(&self.writer));
        }
        talk.connection.end(&mut pokes);
        pokes.run();
        tracing::debug!(conn = talk.connection.id().0, "closed");
        orderly
    }
}

/// Ends the session of a connection even if its task panics.
struct Ending<'a>(&'a Peer);

impl Drop for Ending<'_> {
    fn drop(&mut self) {
        self.0.end();
    }
}

/// The life of a connection.
async fn run(peer: Arc<Peer>, mut reader: OwnedReadHalf, seat: Seat) {
    let ending = Ending(&peer);
    // Kept over the turns: most turns are a request, and listening anew each time would cost as much as parsing it.
    let attention = peer.attention.notified();
    tokio::pin!(attention);
    loop {
        let plan = peer.plan();
        if plan.over {
            break;
        }
        let mut pokes = Pokes::new();
        tokio::select! {
            biased;
            () = &mut attention => attention.set(peer.attention.notified()),
            more = read(&peer, &mut reader, &mut pokes), if plan.read => {
                if more {
                    // Others have waited while this one was served.
                    tokio::task::yield_now().await;
                }
            }
            writable = busy(&peer, plan) => {
                if writable {
                    peer.with_talk(&mut pokes, |_, _| ());
                } else {
                    peer.handle_time(&mut pokes);
                }
            }
        }
    }
    let orderly = peer.end();
    drop(ending);
    if orderly {
        // On the heap, so that the tasks of idle connections do not have room for it.
        Box::pin(linger(&peer, reader)).await;
    }
    drop(seat);
}

/// Reads once and handles what was read; true if there may be more.
async fn read(peer: &Peer, reader: &mut OwnedReadHalf, pokes: &mut Pokes) -> bool {
    std::future::poll_fn(|cx| {
        INPUT.with_borrow_mut(|buffer| {
            let read = ready!(poll_read(cx, reader, buffer));
            match read {
                Ok(0) => {
                    peer.with_talk(pokes, |talk, _| talk.connection.handle_end_of_input());
                }
                Ok(count) => peer.handle_input(&buffer[..count], pokes),
                Err(_) => peer.abort(),
            }
            Poll::Ready(read.is_ok_and(|count| count == buffer.len()))
        })
    })
    .await
}

fn poll_read(
    cx: &mut Context<'_>,
    reader: &mut OwnedReadHalf,
    buffer: &mut [u8],
) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(buffer);
    ready!(Pin::new(reader).poll_read(cx, &mut buffer))?;
    Poll::Ready(Ok(buffer.filled().len()))
}

/// Lets the client see the end before the socket goes, and drops what it still sends.
async fn linger(peer: &Peer, mut reader: OwnedReadHalf) {
    let _ = SockRef::from(peer.writer.as_ref()).shutdown(std::net::Shutdown::Write);
    let drop_input = std::future::poll_fn(|cx| {
        INPUT.with_borrow_mut(|buffer| {
            while let Ok(1..) = ready!(poll_read(cx, &mut reader, buffer)) {}
            Poll::Ready(())
        })
    });
    let _ = tokio::time::timeout(LINGER, drop_input).await;
}

/// Waits until the socket can be written to (true) or a deadline has come (false), if there is either. Idle
/// connections have neither, so this lies on the heap.
async fn busy(peer: &Peer, plan: Plan) -> bool {
    if !plan.write && plan.deadline.is_none() {
        return std::future::pending().await;
    }
    let wait = async {
        let deadline = async {
            match plan.deadline {
                Some(at) => tokio::time::sleep(peer.service.engine.clock().until(at)).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            _ = peer.writer.writable(), if plan.write => true,
            () = deadline => false,
        }
    };
    Box::pin(wait).await
}

/// Passes encrypted input through TLS to the connection.
fn decrypt(talk: &mut Talk, mut bytes: &[u8], pokes: &mut Pokes) -> io::Result<()> {
    while !bytes.is_empty() {
        let Talk { connection, tls, handshake_until, .. } = talk;
        let Some(tls) = tls else { return Ok(()) };
        if tls.read_tls(&mut bytes)? == 0 {
            return Ok(());
        }
        let state = tls.process_new_packets().map_err(io::Error::other)?;
        if !tls.is_handshaking() {
            *handshake_until = None;
        }
        let mut plain = vec![0; state.plaintext_bytes_to_read()];
        tls.reader().read_exact(&mut plain)?;
        if !plain.is_empty() {
            connection.handle_input(&plain, pokes);
        }
        if state.peer_has_closed() {
            connection.handle_end_of_input();
        }
    }
    Ok(())
}

/// The socket as TLS sees it.
struct Socket<'a>(&'a OwnedWriteHalf);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.try_write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
