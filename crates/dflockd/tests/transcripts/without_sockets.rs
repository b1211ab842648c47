//! The server without sockets, threads and time: only the script moves the clock.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dflockd::Service;
use dflockd::config::{Config, Parsed};
use dflockd::frontend::line::connection::{Connection, Inbox};
use dflockd_core::Span;
use dflockd_engine::{Clock, PendingFlushes};
use parking_lot::Mutex;

use dflockd_testkit::script::{Received, Server};

/// Time moves in steps of this, or of a thousandth of a long wait. Deadlines of different shards that are
/// closer than that are handled in any order.
const STEP: Duration = Duration::from_millis(10);
/// How often a connection may ask for more before it counts as one that never comes to rest.
const TURNS_MAX: usize = 10_000;
/// How much a socket gives at once.
const READ_BYTES: usize = 64 * 1024;

pub(super) struct InProcess {
    service: Arc<Service>,
    peers: BTreeMap<String, Arc<Peer>>,
}

impl InProcess {
    pub(super) fn start(flags: &[String]) -> Result<Self, String> {
        let parsed = Config::from_args(flags.iter().cloned(), &|_| None);
        let Parsed::Run(config) = parsed.map_err(|error| error.to_string())? else {
            return Err("the flags do not start a server".into());
        };
        let service = Service::new(&config, Clock::manual(), |job| job());
        let service = Arc::new(service.map_err(|error| error.to_string())?);
        Ok(Self { service, peers: BTreeMap::new() })
    }

    fn peer(&self, conn: &str) -> Arc<Peer> {
        Arc::clone(&self.peers[conn])
    }

    fn act(&mut self, conn: &str, act: impl FnOnce(&mut Connection, &mut PendingFlushes)) {
        self.peer(conn).act(act);
        self.end_what_is_over();
    }

    fn end_what_is_over(&self) {
        // The end of one connection can be that of another.
        while self.peers.values().any(|peer| peer.end_if_over(&self.service)) {}
    }
}

impl Server for InProcess {
    fn open(&mut self, conn: &str) {
        let peer = Arc::new(Peer::default());
        let served = Arc::clone(&peer);
        let me = self.service.engine.open(peer.inbox.mailbox(move |_| served.flush()), conn.into());
        let (service, inbox) = (Arc::clone(&self.service), Arc::clone(&peer.inbox));
        *peer.talk.lock() = Some(Connection::new(service, inbox, me, conn.into()));
        self.service.connections.fetch_add(1, Ordering::Relaxed);
        self.peers.insert(conn.to_owned(), peer);
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        for chunk in bytes.chunks(READ_BYTES) {
            self.act(conn, |connection, flushes| connection.handle_input(chunk, flushes));
        }
    }

    fn half_close(&mut self, conn: &str) {
        self.act(conn, |connection, _| connection.handle_end_of_input());
    }

    fn close(&mut self, conn: &str) {
        self.half_close(conn);
    }

    fn reset(&mut self, conn: &str) {
        self.peer(conn).end(&self.service);
        self.end_what_is_over();
    }

    fn stall(&mut self, conn: &str) {
        self.peer(conn).stalled.store(true, Ordering::Relaxed);
    }

    fn receive(&mut self, conn: &str) -> Received {
        self.receive_now(conn)
    }

    fn receive_now(&mut self, conn: &str) -> Received {
        let peer = self.peer(conn);
        let mut received = peer.received.lock();
        if let Some(end) = received.iter().position(|byte| *byte == b'\n') {
            let line = received.drain(..=end).take(end).collect();
            return Received::Line(line);
        }
        if peer.talk.lock().is_none() { Received::End } else { Received::Nothing }
    }

    fn pass(&mut self, time: Duration) {
        let mut left = time;
        while !left.is_zero() {
            let step = left.min(STEP.max(time / 1000));
            left -= step;
            let engine = &self.service.engine;
            engine.clock().advance(Span(u64::try_from(step.as_nanos()).expect("short")));
            let mut flushes = PendingFlushes::new();
            engine.tick(&mut flushes);
            flushes.run();
            for peer in self.peers.values() {
                peer.look_at_the_time(&self.service);
            }
            self.end_what_is_over();
        }
    }

    fn is_late(&self) -> bool {
        false
    }

    fn terminate(&mut self) {
        panic!("only a process can be asked to shut down: mark the section `only: tcp`");
    }

    fn check(&mut self) {
        self.service.engine.check_invariants();
    }

    fn log(&self) -> Vec<String> {
        Vec::new()
    }
}

/// A connection and its client.
#[derive(Default)]
struct Peer {
    inbox: Arc<Inbox>,
    /// None once it is over.
    talk: Mutex<Option<Connection>>,
    /// What the client has not looked at.
    received: Mutex<Vec<u8>>,
    stalled: AtomicBool,
}

impl Peer {
    fn act(&self, act: impl FnOnce(&mut Connection, &mut PendingFlushes)) {
        let mut flushes = PendingFlushes::new();
        if let Some(connection) = self.talk.lock().as_mut() {
            act(connection, &mut flushes);
            if !self.inbox.is_empty() {
                connection.handle_messages(&mut flushes);
            }
            self.write(connection, &mut flushes);
        }
        self.flush();
        flushes.run();
    }

    fn write(&self, connection: &mut Connection, flushes: &mut PendingFlushes) {
        for _ in 0..TURNS_MAX {
            if self.stalled.load(Ordering::Relaxed) {
                return;
            }
            let output = connection.output().to_vec();
            self.received.lock().extend_from_slice(&output);
            connection.handle_written(output.len());
            if !connection.has_more() {
                return;
            }
            connection.handle_more(flushes);
        }
        panic!("the connection always has more");
    }

    fn look_at_the_time(&self, service: &Service) {
        let deadline = self.talk.lock().as_ref().and_then(Connection::next_deadline);
        if deadline.is_some_and(|at| at <= service.engine.clock().now()) {
            self.act(Connection::handle_time);
        }
    }

    fn end_if_over(&self, service: &Service) -> bool {
        let over = self.talk.lock().as_ref().is_some_and(Connection::is_over);
        if over {
            self.end(service);
        }
        over
    }

    fn end(&self, service: &Service) {
        let Some(mut connection) = self.talk.lock().take() else { return };
        let mut flushes = PendingFlushes::new();
        connection.end(&mut flushes);
        flushes.run();
        service.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn flush(&self) {
        let mut flushes = PendingFlushes::new();
        for turn in 0.. {
            assert!(turn < TURNS_MAX, "the inbox never gets empty");
            if self.inbox.is_empty() {
                break;
            }
            // Whoever has it looks into the inbox afterwards.
            let Some(mut talk) = self.talk.try_lock() else { break };
            let Some(connection) = talk.as_mut() else { break };
            connection.handle_messages(&mut flushes);
            self.write(connection, &mut flushes);
        }
        flushes.run();
    }
}
