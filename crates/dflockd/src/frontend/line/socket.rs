//! One connection: its socket, TLS, and the conversation on it.
//!
//! Its worker reads, but any thread may print to it and write to its socket: the thread that releases a lock
//! writes the next holder's grant, and no other thread has to be woken for that. Whoever leaves something in
//! an inbox tries the connection's mutex afterwards; if it is taken, its owner looks into the inbox again
//! before it leaves, so nothing is left lying. Whoever changes what the worker should do next calls it.

use std::cell::{Cell, RefCell};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use dflockd_core::Timestamp;
use dflockd_engine::PendingFlushes;
use mio::net::TcpStream;
use parking_lot::Mutex;
use rustls::{ServerConfig, ServerConnection};
use socket2::{SockRef, TcpKeepalive};

use super::worker::{Order, Worker};
use crate::frontend::line::connection::{Connection, Inbox};

/// Output buffers larger than this are not kept for reuse.
const SPARE_BYTES_MAX: usize = 256 * 1024;
/// Output buffers that a thread keeps for reuse: one for each connection that it may serve within others. More of them
/// come back when slow readers have taken in what waited for them.
const SPARES_MAX: usize = DEPTH_MAX as usize + 1;
const KEEPALIVE: Duration = Duration::from_secs(30);
/// How many connections may be served within each other, because requests that waited in one concern the
/// next. Those further down the line are left to their workers, or a long line would exhaust the stack.
const DEPTH_MAX: u32 = 8;

thread_local! {
    /// Connections that have nothing to write have no buffers: they share the thread's. There are several
    /// because one may be served while another is.
    static OUTPUTS: RefCell<Vec<Vec<u8>>> = const { RefCell::new(Vec::new()) };
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// One connection.
pub(super) struct ClientSocket {
    worker: Arc<Worker>,
    /// Its place at the worker.
    slot: usize,
    socket: TcpStream,
    inbox: Arc<Inbox>,
    /// None once it is over.
    talk: Mutex<Option<Talk>>,
}

struct Talk {
    connection: Connection,
    tls: Option<Box<Tls>>,
    /// When the worker will look at the time.
    looks_at: Timestamp,
    unread: Unread,
    /// The worker was called and has not come yet.
    called: bool,
    /// The socket can not be used any more.
    broken: bool,
}

/// What the socket may have to read. It says so only once for what arrives.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unread {
    Nothing,
    Something,
    /// And nothing will come after it, so it will not say so again.
    TheLast,
}

struct Tls {
    session: ServerConnection,
    /// Output that is in TLS but not in the socket yet, and so not written.
    sealed: usize,
    /// The handshake must be done by then.
    handshake_until: Option<Timestamp>,
}

/// What the worker does next for a connection.
pub(super) enum Next {
    /// It waits for the socket, until this instant.
    Wait(Timestamp),
    /// There is something to read, but it is the turn of others first.
    Again(Timestamp),
    /// It ends the connection.
    End,
}

/// Why a worker turns to a connection.
#[derive(Clone, Copy)]
pub(super) enum Cause {
    /// The socket has something to read, perhaps the last thing, or room for output.
    Socket { readable: bool, last: bool },
    /// It was called, or comes again.
    Called,
    /// A deadline may have come.
    Time,
    /// The server is shutting down.
    Drain,
    /// A token is no longer valid.
    Revoke,
}

impl ClientSocket {
    /// Begins the conversation.
    pub(super) fn open(
        worker: &Arc<Worker>,
        slot: usize,
        socket: TcpStream,
        address: SocketAddr,
        tls: Option<Arc<ServerConfig>>,
    ) -> io::Result<Arc<Self>> {
        let service = worker.service();
        socket.set_nodelay(true)?;
        let keepalive = TcpKeepalive::new().with_time(KEEPALIVE).with_interval(KEEPALIVE / 3);
        SockRef::from(&socket).set_tcp_keepalive(&keepalive)?;
        let tls = match tls {
            Some(config) => Some(Box::new(Tls {
                session: ServerConnection::new(config).map_err(io::Error::other)?,
                sealed: 0,
                handshake_until: Some(service.engine.clock().now() + service.read_timeout),
            })),
            None => None,
        };
        let client = Arc::new(Self {
            worker: Arc::clone(worker),
            slot,
            socket,
            inbox: Arc::default(),
            talk: Mutex::new(None),
        });
        let label: Arc<str> = address.to_string().into();
        let served = Arc::clone(&client);
        let mailbox = client.inbox.mailbox(move |patience| served.flush_within(patience));
        let me = service.engine.open(mailbox, Arc::clone(&label));
        tracing::debug!(peer = %address, conn = me.id().0, "connected");
        let connection = Connection::new(Arc::clone(service), Arc::clone(&client.inbox), me, label)
            .coming_from(address.ip());
        *client.talk.lock() = Some(Talk {
            connection,
            tls,
            looks_at: Timestamp::NEVER,
            unread: Unread::Nothing,
            called: false,
            broken: false,
        });
        Ok(client)
    }

    /// Does what there is to do. Called by the worker only.
    pub(super) fn handle(&self, cause: Cause, buffer: &mut [u8]) -> Next {
        let mut flushes = PendingFlushes::new();
        let next = {
            let mut talk = self.talk.lock();
            let Some(talk) = talk.as_mut() else { return Next::End };
            talk.called = false;
            self.with_output(talk, |talk| {
                self.act(talk, cause, buffer, &mut flushes);
                // Before the own answer is written: who gets the lock has waited longer than who gave it back.
                flushes.run();
                if !self.inbox.is_empty() {
                    talk.connection.handle_messages(&mut flushes);
                }
            });
            talk.next()
        };
        self.serve(&mut flushes, Duration::ZERO);
        flushes.run();
        next
    }

    fn act(&self, talk: &mut Talk, cause: Cause, buffer: &mut [u8], flushes: &mut PendingFlushes) {
        match cause {
            Cause::Socket { readable: false, .. } | Cause::Called => {}
            Cause::Socket { last: true, .. } => talk.unread = Unread::TheLast,
            Cause::Socket { .. } if talk.unread == Unread::Nothing => {
                talk.unread = Unread::Something;
            }
            Cause::Socket { .. } => {}
            Cause::Time => {
                talk.looks_at = Timestamp::NEVER;
                talk.handle_time(self.worker.service().engine.clock().now(), flushes);
            }
            Cause::Drain => talk.connection.handle_drain(flushes),
            Cause::Revoke => talk.connection.handle_revoke(),
        }
        if talk.unread != Unread::Nothing && !talk.broken && talk.connection.wants_input() {
            self.read(talk, buffer, flushes);
        }
    }

    /// Reads once: what comes after a read that did not fill the buffer is announced.
    fn read(&self, talk: &mut Talk, buffer: &mut [u8], flushes: &mut PendingFlushes) {
        match (&self.socket).read(buffer) {
            Ok(0) => {
                talk.unread = Unread::Nothing;
                talk.connection.handle_end_of_input();
            }
            Ok(count) => {
                if count < buffer.len() && talk.unread == Unread::Something {
                    talk.unread = Unread::Nothing;
                }
                self.handle_input(talk, &buffer[..count], flushes);
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => talk.unread = Unread::Nothing,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => talk.broken = true,
        }
    }

    fn handle_input(&self, talk: &mut Talk, bytes: &[u8], flushes: &mut PendingFlushes) {
        if talk.tls.is_none() {
            talk.connection.handle_input(bytes, flushes);
        } else if let Err(error) = talk.decrypt(bytes, flushes) {
            tracing::debug!(conn = talk.connection.id().0, %error, "TLS failed");
            // The alert, if the socket takes it.
            let _ = self.write(talk);
            talk.broken = true;
        }
    }

    /// Handles what others left in the inbox, and then what comes of that for others.
    fn flush_within(&self, patience: Duration) {
        let Some(_deeper) = Deeper::go() else { return self.worker.order(Order::Look(self.slot)) };
        let mut flushes = PendingFlushes::new();
        self.serve(&mut flushes, patience);
        flushes.run();
    }

    /// Handles what others left in the inbox, unless somebody is at it for longer than `patience`, who will:
    /// everybody who had the mutex looks into the inbox once more after giving it back.
    fn serve(&self, flushes: &mut PendingFlushes, patience: Duration) {
        while !self.inbox.is_empty() {
            let Some(mut talk) = self.talk.try_lock_for(patience) else { return };
            let Some(talk) = talk.as_mut() else { return };
            if talk.is_over() {
                return;
            }
            self.with_output(talk, |talk| talk.connection.handle_messages(flushes));
            if talk.needs_its_worker() && !talk.called {
                talk.called = true;
                self.worker.order(Order::Look(self.slot));
            }
        }
    }

    /// Lends one of the thread's buffers to the connection, and writes.
    fn with_output(&self, talk: &mut Talk, act: impl FnOnce(&mut Talk)) {
        let mut buffer = OUTPUTS.with_borrow_mut(Vec::pop).unwrap_or_default();
        talk.connection.lend_output(&mut buffer);
        // It may still have one of its own, which is taken back from it in the end.
        keep_spare(std::mem::take(&mut buffer));
        act(talk);
        self.write_output(talk);
        talk.connection.return_output(&mut buffer);
        keep_spare(buffer);
    }

    /// Writes as much as the socket takes. Requests that waited only for that are executed.
    fn write_output(&self, talk: &mut Talk) {
        let mut flushes = PendingFlushes::new();
        while !talk.broken {
            match self.write(talk) {
                Ok(()) if talk.connection.has_more() => talk.connection.handle_more(&mut flushes),
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => {
                    tracing::debug!(conn = talk.connection.id().0, %error, "write failed");
                    talk.broken = true;
                }
            }
        }
        flushes.run();
    }

    fn write(&self, talk: &mut Talk) -> io::Result<()> {
        let Talk { connection, tls, .. } = talk;
        let Some(tls) = tls else {
            while !connection.output().is_empty() {
                let count = self.write_some(connection.output())?;
                connection.handle_written(count);
            }
            return Ok(());
        };
        loop {
            while tls.session.wants_write() {
                tls.session.write_tls(&mut Socket(self))?;
            }
            if tls.sealed > 0 {
                connection.handle_written(std::mem::take(&mut tls.sealed));
            }
            if connection.output().is_empty() || tls.session.is_handshaking() {
                return Ok(());
            }
            tls.sealed = tls.session.writer().write(connection.output())?;
        }
    }

    fn write_some(&self, bytes: &[u8]) -> io::Result<usize> {
        loop {
            match (&self.socket).write(bytes) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                written => return written,
            }
        }
    }

    /// Ends the session; true if the client should see an orderly end.
    pub(super) fn end(&self) -> bool {
        let mut flushes = PendingFlushes::new();
        let Some(mut talk) = self.talk.lock().take() else { return false };
        let orderly = talk.connection.ends_orderly() && !talk.broken;
        if let Some(tls) = &mut talk.tls
            && orderly
        {
            tls.session.send_close_notify();
            let _ = tls.session.write_tls(&mut Socket(self));
        }
        talk.connection.end(&mut flushes);
        flushes.run();
        if orderly {
            let _ = self.socket.shutdown(Shutdown::Write);
        }
        tracing::debug!(conn = talk.connection.id().0, "closed");
        orderly
    }

    /// Drops what the client still sends, until it has seen the end.
    pub(super) fn drop_input(&self, buffer: &mut [u8]) -> Next {
        match (&self.socket).read(buffer) {
            Ok(1..) => Next::Again(Timestamp::NEVER),
            Err(error) if error.kind() == ErrorKind::Interrupted => Next::Again(Timestamp::NEVER),
            Err(error) if error.kind() == ErrorKind::WouldBlock => Next::Wait(Timestamp::NEVER),
            Ok(0) | Err(_) => Next::End,
        }
    }
}

impl Talk {
    fn is_over(&self) -> bool {
        self.broken || self.connection.is_over()
    }

    fn can_read(&self) -> bool {
        self.unread != Unread::Nothing && self.connection.wants_input()
    }

    fn deadline(&self) -> Timestamp {
        let tls = self.tls.as_ref().and_then(|tls| tls.handshake_until);
        let deadlines = [self.connection.next_deadline(), tls];
        deadlines.into_iter().flatten().min().unwrap_or(Timestamp::NEVER)
    }

    /// Whether somebody else than the worker has changed what the worker must do.
    fn needs_its_worker(&self) -> bool {
        self.is_over() || self.can_read() || self.deadline() < self.looks_at
    }

    fn next(&mut self) -> Next {
        if self.is_over() {
            return Next::End;
        }
        // If the deadline has moved away the worker looks in vain, which is cheaper than to move its timer each time.
        self.looks_at = self.looks_at.min(self.deadline());
        if self.can_read() { Next::Again(self.looks_at) } else { Next::Wait(self.looks_at) }
    }

    fn handle_time(&mut self, now: Timestamp, flushes: &mut PendingFlushes) {
        if let Some(tls) = &self.tls
            && tls.handshake_until.is_some_and(|until| until <= now)
        {
            self.broken = true;
        }
        if self.connection.next_deadline().is_some_and(|at| at <= now) {
            self.connection.handle_time(flushes);
        }
    }

    /// Passes encrypted input through TLS to the connection.
    fn decrypt(&mut self, mut bytes: &[u8], flushes: &mut PendingFlushes) -> io::Result<()> {
        while !bytes.is_empty() {
            let Self { connection, tls, .. } = self;
            let Some(tls) = tls else { return Ok(()) };
            if tls.session.read_tls(&mut bytes)? == 0 {
                return Ok(());
            }
            let state = tls.session.process_new_packets().map_err(io::Error::other)?;
            if !tls.session.is_handshaking() && tls.handshake_until.take().is_some() {
                connection.set_certificates(tls.session.peer_certificates());
            }
            let mut plain = vec![0; state.plaintext_bytes_to_read()];
            tls.session.reader().read_exact(&mut plain)?;
            if !plain.is_empty() {
                connection.handle_input(&plain, flushes);
            }
            if state.peer_has_closed() {
                connection.handle_end_of_input();
            }
        }
        Ok(())
    }
}

/// Keeps an output buffer for the next connection that this thread serves, if it has not enough of them.
fn keep_spare(buffer: Vec<u8>) {
    if (1..=SPARE_BYTES_MAX).contains(&buffer.capacity()) {
        OUTPUTS.with_borrow_mut(|spares| {
            if spares.len() < SPARES_MAX {
                spares.push(buffer);
            }
        });
    }
}

/// One more connection is being served within another.
struct Deeper;

impl Deeper {
    fn go() -> Option<Self> {
        let depth = DEPTH.get();
        (depth < DEPTH_MAX).then(|| {
            DEPTH.set(depth + 1);
            Self
        })
    }
}

impl Drop for Deeper {
    fn drop(&mut self) {
        DEPTH.set(DEPTH.get() - 1);
    }
}

/// The socket as TLS sees it.
struct Socket<'a>(&'a ClientSocket);

impl Write for Socket<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write_some(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// GUARANTEES 48: what a thread keeps for reuse is bounded in number and in bytes.
    #[test]
    fn spare_buffers_are_few_and_small() {
        for _ in 0..10_000 {
            keep_spare(Vec::with_capacity(SPARE_BYTES_MAX));
        }
        keep_spare(Vec::with_capacity(SPARE_BYTES_MAX + 1));
        keep_spare(Vec::new());
        let spares = OUTPUTS.take();
        assert_eq!(spares.len(), SPARES_MAX);
        let bytes: usize = spares.iter().map(Vec::capacity).sum();
        assert!(bytes <= SPARES_MAX * SPARE_BYTES_MAX, "{bytes} bytes");
    }
}
