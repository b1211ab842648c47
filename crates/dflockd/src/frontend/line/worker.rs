//! The threads that serve connections: each has its own, waits for all of them at once and turns to one after
//! the other.
//!
//! A connection has no task, no timer and no buffers of its own while it is idle. Sockets announce what
//! arrives once (edge-triggered), so nothing is registered again; what was not read is remembered in the
//! connection. A worker reads once per announcement and turns to its other connections before it reads more.
//!
//! Deadlines are in one ordered set per worker, an entry per connection at most; one that moves away is noticed when
//! the worker looks in vain. A thread that serves a connection of another worker and changes what that worker must do
//! next gives it an order. While sleeps are short, a worker stays awake for 20 µs before the next one and yields the
//! core meanwhile: to be woken costs more than a request.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use dflockd_core::{Span, Timestamp};
use mio::net::TcpStream;
use mio::{Events, Interest, Poll, Token, Waker};
use parking_lot::Mutex;
use slab::Slab;

use super::LineConnections;
use super::socket::{Cause, ClientSocket, Next};
use crate::frontend::caps::Permit;
use crate::service::Service;
use crate::telemetry::ConnectionTrace;

/// What a connection may bring at a time: more than a thousand requests, a millisecond or so of work.
const READ_BYTES: usize = 16 * 1024;
/// How many sockets may be ready at a time.
const EVENTS_MAX: usize = 256;
/// How long the rest of the client's input is read after the last answer, so that a reset does not eat it.
const LINGER: Span = Span::from_millis(250);
/// The longest sleep that counts as short: it was not worth it.
const SLEEP_SHORT_MAX: Span = Span(50_000);
/// After so many short sleeps in a row a worker spins before it sleeps.
const SHORT_SLEEPS_BEFORE_SPIN: u32 = 8;
/// How long a worker spins for input; if none comes, it sleeps and counts short sleeps anew.
const SPIN_MAX: Span = Span(20_000);
const WAKER: Token = Token(usize::MAX);

thread_local! {
    /// Which worker this thread is: its address, which no other has, or zero.
    static HERE: Cell<usize> = const { Cell::new(0) };
}

/// A worker as others see it.
pub(super) struct Worker {
    service: Arc<Service>,
    orders: Mutex<Vec<Order>>,
    waker: Waker,
    connections: AtomicUsize,
}

/// What a worker is told to do.
pub(super) enum Order {
    /// Serve this connection.
    Join(TcpStream, SocketAddr, Permit),
    /// Somebody else did something with the connection in this place, which may be another by now.
    Look(usize),
    /// End all waits.
    Drain,
    /// End the connections whose token is no longer valid.
    Revoke,
    /// Close all connections.
    Close,
    /// Close all connections and end the thread.
    Stop,
}

impl Worker {
    pub(super) fn new(service: Arc<Service>) -> io::Result<(Self, Poll)> {
        let poll = Poll::new()?;
        let waker = Waker::new(poll.registry(), WAKER)?;
        let (orders, connections) = (Mutex::default(), AtomicUsize::new(0));
        Ok((Self { service, orders, waker, connections }, poll))
    }

    pub(super) fn service(&self) -> &Arc<Service> {
        &self.service
    }

    /// How many connections it has or will have.
    pub(super) fn load(&self) -> usize {
        self.connections.load(Ordering::Relaxed)
    }

    pub(super) fn order(&self, order: Order) {
        if let Order::Join(..) = order {
            self.connections.fetch_add(1, Ordering::Relaxed);
        }
        let is_first = {
            let mut orders = self.orders.lock();
            orders.push(order);
            orders.len() == 1
        };
        // The worker itself looks here before it sleeps, and who was before us has woken it.
        if is_first && HERE.get() != self.address() {
            self.wake();
        }
    }

    fn wake(&self) {
        if let Err(error) = self.waker.wake() {
            tracing::error!(%error, "worker not woken");
        }
    }

    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }
}

/// Starts the thread of a worker. To be called inside a tokio runtime, which runs what takes a while.
pub(super) fn start(
    line: Arc<LineConnections>,
    worker: Arc<Worker>,
    poll: Poll,
    is_designated: bool,
) -> io::Result<()> {
    let event_loop = EventLoop {
        line,
        worker,
        poll,
        clients: Slab::new(),
        timers: BTreeSet::new(),
        again: Vec::new(),
        buffer: vec![0; READ_BYTES].into(),
        short_sleeps: 0,
        is_designated,
    };
    let runtime = tokio::runtime::Handle::current();
    std::thread::Builder::new().name("connections".into()).spawn(move || {
        let _context = runtime.enter();
        event_loop.run();
    })?;
    Ok(())
}

/// The worker's thread.
struct EventLoop {
    line: Arc<LineConnections>,
    worker: Arc<Worker>,
    poll: Poll,
    clients: Slab<Client>,
    /// Mirrors `Client::looks_at`, where that is not never.
    timers: BTreeSet<(Timestamp, usize)>,
    /// Connections that have more to read.
    again: Vec<usize>,
    buffer: Box<[u8]>,
    /// How many sleeps in a row were short.
    short_sleeps: u32,
    /// Drives the replica, if there is one, before it sleeps.
    is_designated: bool,
}

struct Client {
    socket: Arc<ClientSocket>,
    /// When the worker looks at the time for it.
    looks_at: Timestamp,
    /// It has ended, and waits for the client to see that.
    lingers: bool,
    /// It is among those that have more to read.
    comes_again: bool,
    /// Ends with it.
    trace: Option<Box<ConnectionTrace>>,
    /// Given back after the socket is closed: the next connection needs its descriptor.
    _permit: Permit,
}

impl EventLoop {
    fn run(mut self) {
        HERE.set(self.worker.address());
        if self.is_designated {
            let worker = Arc::clone(&self.worker);
            self.worker.service.engine.designate(move || worker.wake());
        }
        let mut events = Events::with_capacity(EVENTS_MAX);
        loop {
            match self.wait(&mut events) {
                Ok(()) => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => {
                    tracing::error!(%error, "sockets can not be waited for");
                    std::thread::sleep(Duration::from_millis(10));
                }
            }
            for event in events.iter().filter(|event| event.token() != WAKER) {
                let last = event.is_read_closed() || event.is_error();
                let readable = event.is_readable() || last;
                self.handle(event.token().0, Cause::Socket { readable, last });
            }
            for slot in std::mem::take(&mut self.again) {
                if let Some(client) = self.clients.get_mut(slot) {
                    client.comes_again = false;
                    self.handle(slot, Cause::Called);
                }
            }
            self.look_at_time();
            if !self.follow_orders() {
                return;
            }
        }
    }

    /// Waits for sockets. While traffic is brisk it looks at them for a moment before it sleeps: to be woken costs
    /// more than a request does, and whoever wakes us pays half of it.
    fn wait(&mut self, events: &mut Events) -> io::Result<()> {
        let service = Arc::clone(&self.worker.service);
        let (engine, is_designated) = (&service.engine, self.is_designated);
        let awake = || {
            if is_designated {
                engine.after_sleep();
            }
        };
        let can_sleep = !is_designated || engine.before_sleep();
        let patience = self.patience().filter(|_| can_sleep);
        if !can_sleep || patience == Some(Duration::ZERO) {
            let found = self.poll.poll(events, Some(Duration::ZERO));
            awake();
            return found;
        }
        let clock = engine.clock();
        let mut since = clock.now();
        if self.short_sleeps >= SHORT_SLEEPS_BEFORE_SPIN {
            let until = since + SPIN_MAX;
            while since < until {
                self.poll.poll(events, Some(Duration::ZERO))?;
                if !events.is_empty() || is_designated && engine.has_work() {
                    awake();
                    return Ok(());
                }
                // Whoever wants this core gets it; it may be the client that we wait for.
                std::thread::yield_now();
                since = clock.now();
            }
            self.short_sleeps = 0;
        }
        let found = self.poll.poll(events, patience);
        awake();
        found?;
        let was_short = clock.now().since(since) < SLEEP_SHORT_MAX;
        self.short_sleeps = if was_short { self.short_sleeps + 1 } else { 0 };
        Ok(())
    }

    /// How long to wait for sockets.
    fn patience(&self) -> Option<Duration> {
        if !self.again.is_empty() || !self.worker.orders.lock().is_empty() {
            return Some(Duration::ZERO);
        }
        let &(at, _) = self.timers.first()?;
        Some(self.worker.service.engine.clock().until(at))
    }

    /// Turns to one connection. If that panics, it is the end of this connection only.
    fn handle(&mut self, slot: usize, cause: Cause) {
        let Some(Client { socket, lingers, .. }) = self.clients.get(slot) else { return };
        let lingers = *lingers;
        let turn = AssertUnwindSafe(|| {
            if lingers {
                socket.drop_input(&mut self.buffer)
            } else {
                socket.handle(cause, &mut self.buffer)
            }
        });
        match catch_unwind(turn).unwrap_or(Next::End) {
            Next::Wait(until) => self.set_timer(slot, until),
            Next::Again(until) => {
                self.set_timer(slot, until);
                let client = &mut self.clients[slot];
                if !std::mem::replace(&mut client.comes_again, true) {
                    self.again.push(slot);
                }
            }
            Next::End if lingers => self.remove(slot),
            Next::End => self.end(slot),
        }
    }

    /// Looks at the time for a connection at `at`, or earlier if that was so before.
    fn set_timer(&mut self, slot: usize, at: Timestamp) {
        let looks_at = &mut self.clients[slot].looks_at;
        if at < *looks_at {
            self.timers.remove(&(*looks_at, slot));
            self.timers.insert((at, slot));
            *looks_at = at;
        }
    }

    fn look_at_time(&mut self) {
        let Some(&(first, _)) = self.timers.first() else { return };
        let now = self.worker.service.engine.clock().now();
        if first > now {
            return;
        }
        let later = self.timers.split_off(&(now, usize::MAX));
        for (_, slot) in std::mem::replace(&mut self.timers, later) {
            let Some(client) = self.clients.get_mut(slot) else { continue };
            client.looks_at = Timestamp::NEVER;
            if client.lingers {
                self.remove(slot);
            } else {
                self.handle(slot, Cause::Time);
            }
        }
    }

    /// False if the worker is to end.
    fn follow_orders(&mut self) -> bool {
        let mut orders = std::mem::take(&mut *self.worker.orders.lock());
        for order in orders.drain(..) {
            match order {
                Order::Join(stream, address, permit) => self.join(stream, address, permit),
                Order::Look(slot) => self.handle(slot, Cause::Called),
                Order::Drain => {
                    for slot in self.slots() {
                        self.handle(slot, Cause::Drain);
                    }
                }
                Order::Revoke => {
                    for slot in self.slots() {
                        self.handle(slot, Cause::Revoke);
                    }
                }
                Order::Close => self.close_all(),
                Order::Stop => {
                    self.close_all();
                    return false;
                }
            }
        }
        true
    }

    fn join(&mut self, stream: TcpStream, address: SocketAddr, permit: Permit) {
        let opened = catch_unwind(AssertUnwindSafe(|| self.open(permit, stream, address)));
        if let Err(error) = opened.unwrap_or_else(|_| Err(io::Error::other("panic"))) {
            tracing::debug!(peer = %address, %error, "connection failed");
            self.worker.connections.fetch_sub(1, Ordering::Relaxed);
        }
    }

    fn open(
        &mut self,
        permit: Permit,
        mut stream: TcpStream,
        address: SocketAddr,
    ) -> io::Result<()> {
        if self.clients.len() == self.clients.capacity() {
            // A quarter at a time: doubling would leave up to half of the memory unused.
            self.clients.reserve_exact((self.clients.len() / 4).max(16));
        }
        let slot = self.clients.vacant_key();
        // Once for all: what is announced is what has changed, so an idle socket with room for output costs nothing.
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut stream, Token(slot), interest)?;
        let tls = self.line.tls.load_full();
        let socket = ClientSocket::open(&self.worker, slot, stream, address, tls)?;
        let telemetry = self.worker.service.telemetry.as_ref();
        self.clients.insert(Client {
            socket,
            looks_at: Timestamp::NEVER,
            lingers: false,
            comes_again: false,
            trace: telemetry.map(|telemetry| Box::new(telemetry.connection(address))),
            _permit: permit,
        });
        self.handle(slot, Cause::Called);
        Ok(())
    }

    /// Ends a session; the socket goes as well, unless the client should see an orderly end first.
    fn end(&mut self, slot: usize) {
        if !self.end_session(slot) {
            return self.remove(slot);
        }
        let until = self.worker.service.engine.clock().now() + LINGER;
        let client = &mut self.clients[slot];
        client.lingers = true;
        // What the conversation had to wait for does not count any more.
        self.timers.remove(&(client.looks_at, slot));
        client.looks_at = Timestamp::NEVER;
        self.set_timer(slot, until);
        self.handle(slot, Cause::Called);
    }

    /// True if the client should see an orderly end.
    fn end_session(&self, slot: usize) -> bool {
        let socket = &self.clients[slot].socket;
        catch_unwind(AssertUnwindSafe(|| socket.end())).unwrap_or(false)
    }

    fn remove(&mut self, slot: usize) {
        let mut client = self.clients.remove(slot);
        client.trace = None;
        self.timers.remove(&(client.looks_at, slot));
        self.worker.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn close_all(&mut self) {
        for slot in self.slots() {
            self.end_session(slot);
            self.remove(slot);
        }
    }

    fn slots(&self) -> Vec<usize> {
        self.clients.iter().map(|(slot, _)| slot).collect()
    }
}
