//! One process of the cluster: everything of a server but sockets, files, clocks and threads.
//!
//! A process is line connections and sessions of other APIs, the engine's face, the combiner, the log thread, the
//! replica and its log, all of it the code of the server. Its threads are steps that happen one after the other. At the
//! points of the combiner another thread may come in between, if the seed wants so: it then runs from its beginning to
//! its end, as if the first had been preempted there. A process can also stall at such a point, which is what `SIGSTOP`
//! does to it: nothing comes in meanwhile, and what the step does afterwards is late.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashSet, VecDeque};
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use bytes::Bytes;
use dflockd::Service;
use dflockd::config::Config;
use dflockd::frontend::line::connection::{Connection, Inbox};
use dflockd_core::{Outcome, Push, Query, RequestId, SessionId, Span, Timestamp};
use dflockd_engine::stepped::Stepped;
use dflockd_engine::transport::{Lane, PeerAddress};
use dflockd_engine::{
    Attaching, Attachment, Engine, Host, Mailbox, PendingFlushes, Pushed, SessionSecret, Submitted,
    with_points,
};
use dflockd_replica::types::{Bits128, RaftId};
use dflockd_replica::{Gone, MadeSnapshot, OwnedQuery, SnapshotJob};
use dflockd_wire::Push as PushLine;
use parking_lot::Mutex;

use crate::disk::SimDisk;
use crate::invariants::Broken;
use crate::op::Op;
use crate::rng::Rng;

/// What may wait for a client that does not read: as much as makes a connection execute nothing more, and one answer.
const UNWRITTEN_MAX: usize = (64 << 10) + (4 << 10);

/// How deep threads come in between each other.
const DEPTH_MAX: u8 = 3;

/// Something comes to a process.
pub enum Arrival {
    /// A frame of a peer.
    Frame(RaftId, Lane, Bytes),
    /// A peer can not be reached, or its port refuses.
    Unreachable(RaftId, bool),
    /// The sync that the log thread waits for is done.
    Synced,
    /// A snapshot is made and stored, or there was no room for it.
    Made(Option<MadeSnapshot>),
    /// Obsolete files are gone.
    Swept,
    /// A client connects.
    Open(u64, Api),
    /// Bytes of a client of the line protocol.
    Bytes(u64, Vec<u8>),
    /// A request of a client of another API.
    Ask(u64, Op, RequestId, bool),
    /// A client closes, or is lost and that is seen.
    Close(u64, Api, bool),
    /// A client reads its lines, or stops reading them.
    Reads(u64, bool),
}

/// How a client speaks to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// The line protocol, in bytes.
    Line,
    /// As the handlers of HTTP and gRPC do: commands, not bytes.
    Calls,
}

/// Something for a client.
#[derive(Debug)]
pub enum Told {
    /// Bytes of the line protocol.
    Bytes(Vec<u8>),
    /// The session that a connection has from now on.
    Session(SessionId),
    /// The session and number by which the engine knows the n-th request of a connection without numbers.
    Known(usize, SessionId, RequestId),
    /// An answer.
    Answer(RequestId, Outcome),
    /// The secret of a session that is to be kept.
    Secret(RequestId, Bits128),
    /// The kept session is this connection's, or there is none.
    Attached(RequestId, bool),
    /// A push.
    Push(Push),
    /// The connection has ended.
    Closed,
}

/// What a process wants of the world, and how long it had stalled before it wanted it.
pub enum Output {
    /// Sends a frame.
    Frame(RaftId, Lane, Bytes),
    /// Makes a snapshot.
    Snapshot(SnapshotJob),
    /// Removes files.
    Sweep(VecDeque<String>),
    /// Tells a client.
    Tell(u64, Told),
}

/// The threads of a process, as bits.
mod thread {
    pub(super) const WORKER: u8 = 1;
    pub(super) const RUNTIME: u8 = 2;
    pub(super) const OTHER_RUNTIME: u8 = 4;
    pub(super) const LOG: u8 = 8;
    pub(super) const SNAPSHOT: u8 = 16;
    pub(super) const TIMER: u8 = 32;
}

impl Arrival {
    /// The thread that takes it.
    fn thread(&self) -> u8 {
        match self {
            Self::Open(_, Api::Line)
            | Self::Bytes(..)
            | Self::Close(_, Api::Line, _)
            | Self::Reads(..) => thread::WORKER,
            Self::Frame(from, ..) if from % 2 == 0 => thread::OTHER_RUNTIME,
            Self::Frame(..)
            | Self::Unreachable(..)
            | Self::Open(..)
            | Self::Ask(..)
            | Self::Close(..) => thread::RUNTIME,
            Self::Synced => thread::LOG,
            Self::Made(_) | Self::Swept => thread::SNAPSHOT,
        }
    }
}

/// Everything that leaves the process.
#[derive(Default)]
struct Outbox {
    outputs: Mutex<Vec<(u64, Output)>>,
    /// Whom the process knows how to reach.
    peers: Mutex<BTreeSet<RaftId>>,
    /// How long the process has stalled in the current step.
    stalled: AtomicU64,
}

impl Outbox {
    fn put(&self, output: Output) {
        self.outputs.lock().push((self.stalled.load(Ordering::Relaxed), output));
    }
}

struct SimHost(Arc<Outbox>);

impl Host for SimHost {
    fn send(&self, to: RaftId, lane: Lane, frame: Bytes) {
        if self.0.peers.lock().contains(&to) {
            self.0.put(Output::Frame(to, lane, frame));
        }
    }

    fn set_peers(&self, peers: Vec<PeerAddress>) {
        *self.0.peers.lock() = peers.into_iter().map(|peer| peer.raft_id).collect();
    }

    /// Frames are not read on their way.
    fn seal(&self) {}

    fn make_snapshot(&self, job: SnapshotJob) -> Result<(), String> {
        self.0.put(Output::Snapshot(job));
        Ok(())
    }

    fn sweep(&self, files: VecDeque<String>, _: Option<Gone>) -> io::Result<()> {
        self.0.put(Output::Sweep(files));
        Ok(())
    }
}

/// The host of a process, to be made before its member.
pub struct Surroundings(Arc<Outbox>);

impl Surroundings {
    /// Nothing has left the process yet.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "there is one for each process")]
    pub fn new() -> Self {
        Self(Arc::default())
    }

    /// What the member is given.
    #[must_use]
    pub fn host(&self) -> Arc<dyn Host> {
        Arc::new(SimHost(Arc::clone(&self.0)))
    }
}

/// A process that runs.
pub struct Process {
    /// What happens at the points of its threads.
    hook: Rc<dyn Fn()>,
    /// Its member of the cluster.
    pub member: Stepped<SimDisk>,
    service: Arc<Service>,
    outbox: Arc<Outbox>,
    conns: RefCell<BTreeMap<u64, Conn>>,
    arrivals: RefCell<VecDeque<Arrival>>,
    rng: RefCell<Rng>,
    /// How often another thread comes in between, per mille of the points.
    between: u64,
    busy: Cell<u8>,
    depth: Cell<u8>,
    is_worker_woken: Arc<AtomicBool>,
    timer: Cell<Timer>,
    /// How long to stall at one of the next points.
    stall: Cell<u64>,
    log_error: RefCell<Option<io::Error>>,
    drain: RefCell<Drain>,
}

/// The timer thread: until when it sleeps, and how often it had been woken when it fell asleep.
#[derive(Clone, Copy, Default)]
struct Timer {
    armed: Option<u64>,
    notices: usize,
}

/// How far the server has come with its end.
enum Drain {
    Serving,
    /// It looks for those who hold or wait for something, until then at most.
    Looking(std::sync::mpsc::Receiver<Option<Option<HashSet<SessionId>>>>, Timestamp),
    Drained,
}

#[derive(Clone)]
enum Conn {
    Line(Arc<LineConn>),
    Calls(Arc<CallsConn>),
}

impl Process {
    /// A process around a member that has just begun.
    ///
    /// # Panics
    ///
    /// If the default configuration can not be used.
    #[must_use]
    pub fn new(
        member: Stepped<SimDisk>,
        surroundings: &Surroundings,
        rng: Rng,
        between: u64,
    ) -> Rc<Self> {
        let engine = Engine::Replicated(Arc::clone(member.front()));
        let background = |job: Box<dyn FnOnce() + Send>| job();
        let service = Service::around(&Config::default(), engine, background);
        let is_worker_woken = Arc::new(AtomicBool::new(true));
        let woken = Arc::clone(&is_worker_woken);
        member.front().designate(move || woken.store(true, Ordering::SeqCst));
        Rc::new_cyclic(|me: &Weak<Self>| Self {
            hook: at_points(me.clone()),
            member,
            service: Arc::new(service.expect("the default configuration")),
            outbox: Arc::clone(&surroundings.0),
            conns: RefCell::default(),
            arrivals: RefCell::default(),
            rng: RefCell::new(rng),
            between,
            busy: Cell::new(0),
            depth: Cell::new(0),
            is_worker_woken,
            timer: Cell::default(),
            stall: Cell::new(0),
            log_error: RefCell::default(),
            drain: RefCell::new(Drain::Serving),
        })
    }

    // ---- For the world ----

    /// Something has come; it is taken when the process runs.
    pub fn arrive(&self, arrival: Arrival) {
        self.arrivals.borrow_mut().push_back(arrival);
    }

    /// Whether something has come that was not taken.
    #[must_use]
    pub fn has_arrivals(&self) -> bool {
        !self.arrivals.borrow().is_empty()
    }

    /// The process stops for a while at one of the next points.
    pub fn stall(&self, span: u64) {
        self.stall.set(span);
    }

    /// Sets the local clock.
    pub fn set_time(&self, now: Timestamp) {
        let clock = self.member.front().clock();
        clock.advance(now.since(clock.now()));
    }

    /// Lets all threads do what there is to do. What leaves the process, and how long it stalled before that.
    pub fn run(&self) -> Vec<(u64, Output)> {
        self.outbox.stalled.store(0, Ordering::Relaxed);
        while let Some(arrival) = self.take_next() {
            self.perform(arrival);
        }
        self.go_on_draining();
        if self.is_worker_woken.load(Ordering::SeqCst) || self.is_line_due() {
            self.work();
        }
        self.run_timer();
        std::mem::take(&mut *self.outbox.outputs.lock())
    }

    /// How long the process stalled in its last run.
    #[must_use]
    pub fn stalled(&self) -> u64 {
        self.outbox.stalled.load(Ordering::Relaxed)
    }

    /// Why the log could not be written, if so.
    pub fn take_log_error(&self) -> Option<io::Error> {
        self.log_error.borrow_mut().take()
    }

    /// When something is to be done if nothing comes before: the timer, a time limit of a connection, or at once.
    #[must_use]
    pub fn next_deadline(&self) -> Timestamp {
        let now = self.member.front().clock().now();
        if self.is_worker_woken.load(Ordering::SeqCst) || self.is_timer_due() {
            return now;
        }
        // A node that waits to be added looks now and then.
        let armed = self.timer.get().armed.filter(|_| self.member.takes_part());
        let timer = armed.map_or(now + Span::from_secs(1), Timestamp);
        self.next_line_deadline().map_or(timer, |line| line.min(timer))
    }

    fn next_line_deadline(&self) -> Option<Timestamp> {
        let conns = self.conns.borrow();
        let lines = conns.values().filter_map(|conn| match conn {
            Conn::Line(line) => line.talk.lock().next_deadline(),
            Conn::Calls(_) => None,
        });
        lines.min()
    }

    fn is_line_due(&self) -> bool {
        let now = self.member.front().clock().now();
        self.next_line_deadline().is_some_and(|at| at <= now)
    }

    /// No connection has panicked, and what waits for its client or for the replica is bounded.
    pub fn check_connections(&self) -> Result<(), Broken> {
        for (number, conn) in &*self.conns.borrow() {
            let Conn::Line(line) = conn else { continue };
            if line.has_panicked.load(Ordering::Relaxed) {
                return Err(Broken::new("panic", format!("connection {number}")));
            }
            let unwritten = line.talk.lock().output().len();
            if unwritten > UNWRITTEN_MAX {
                let what = format!("{unwritten} bytes wait for the client of connection {number}");
                return Err(Broken::new("bounds", what));
            }
        }
        self.member.check_bounds().map_err(|what| Broken::new("bounds", what))
    }

    /// Nothing is left behind: work that waits for the replica has a thread that will do it.
    pub fn check_wakeups(&self) -> Result<(), Broken> {
        if !self.member.takes_part() {
            return Ok(());
        }
        let lost = |what: &str| Err(Broken::new("lost-wakeup", what));
        let (is_there, needs_timer_thread) = self.member.queued();
        if needs_timer_thread && !self.is_timer_due() {
            return lost(
                "something that takes long waits for the replica, and the timer thread sleeps",
            );
        }
        // While the log thread is at work, all is left to it.
        let is_worker_coming = self.is_worker_woken.load(Ordering::SeqCst);
        if is_there && !is_worker_coming && !self.is_timer_due() && !self.member.is_log_busy() {
            return lost("work waits for the replica, and the designated thread sleeps");
        }
        if self.member.undelivered() > 0 && !is_worker_coming {
            return lost("notices wait to be delivered, and nobody delivers");
        }
        Ok(())
    }

    /// The server is told to end, in an orderly way.
    pub fn begin_drain(&self) {
        if !matches!(&*self.drain.borrow(), Drain::Serving) {
            return;
        }
        self.service.refuse_requests();
        let front = self.member.front();
        let give_up_at = front.clock().now() + Span::from_secs(1);
        *self.drain.borrow_mut() = Drain::Looking(front.look_for_busy(), give_up_at);
    }

    /// Whether all that a drain waits for is done.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        matches!(&*self.drain.borrow(), Drain::Drained) && self.conns.borrow().is_empty()
    }

    /// The session of a connection.
    #[must_use]
    pub fn session_of(&self, conn: u64) -> Option<SessionId> {
        match self.conns.borrow().get(&conn)? {
            Conn::Line(line) => Some(line.talk.lock().id()),
            Conn::Calls(calls) => Some(calls.me.lock().id()),
        }
    }

    /// All connections.
    #[must_use]
    pub fn connections(&self) -> Vec<u64> {
        self.conns.borrow().keys().copied().collect()
    }

    // ---- Threads ----

    fn take_next(&self) -> Option<Arrival> {
        self.arrivals.borrow_mut().pop_front()
    }

    /// A thread does something from its beginning to its end, and others may come in between.
    fn perform(&self, arrival: Arrival) {
        let thread = arrival.thread();
        if thread == thread::WORKER {
            // It looks at the replica before it sleeps again.
            self.is_worker_woken.store(true, Ordering::SeqCst);
            self.member.front().after_sleep();
        }
        self.as_thread(thread, || match arrival {
            Arrival::Frame(from, lane, bytes) => self.member.received(from, lane, bytes),
            Arrival::Unreachable(peer, refused) => self.member.unreachable(peer, refused),
            Arrival::Synced => {
                if let Err(error) = self.member.finish_log() {
                    *self.log_error.borrow_mut() = Some(error);
                }
            }
            Arrival::Made(made) => self.member.front().snapshot_made(made),
            Arrival::Swept => self.member.front().swept(),
            Arrival::Open(conn, api) => self.open(conn, api),
            Arrival::Bytes(conn, bytes) => {
                if let Some(Conn::Line(line)) = self.conn(conn) {
                    line.serve(|talk, flushes| talk.handle_input(&bytes, flushes));
                }
            }
            Arrival::Ask(conn, op, request, keep) => {
                if let Some(Conn::Calls(calls)) = self.conn(conn) {
                    calls.ask(&self.service.engine, &op, request, keep);
                }
            }
            Arrival::Close(conn, _, orderly) => self.close(conn, orderly),
            Arrival::Reads(conn, reads) => {
                if let Some(Conn::Line(line)) = self.conn(conn) {
                    line.is_read.store(reads, Ordering::Relaxed);
                    line.serve(|_, _| ());
                }
            }
        });
    }

    fn as_thread(&self, thread: u8, step: impl FnOnce()) {
        self.busy.set(self.busy.get() | thread);
        with_points(Rc::clone(&self.hook), step);
        self.busy.set(self.busy.get() & !thread);
        self.collect();
    }

    /// Another thread may come in between here, and the process may stall.
    fn point(&self) {
        if self.stall.get() > 0 && self.rng.borrow_mut().chance(300) {
            let span = self.stall.replace(0);
            self.outbox.stalled.fetch_add(span, Ordering::Relaxed);
            self.member.front().clock().advance(Span(span));
        }
        if self.depth.get() >= DEPTH_MAX || !self.rng.borrow_mut().chance(self.between) {
            return;
        }
        self.depth.set(self.depth.get() + 1);
        let is_free = |thread: u8| self.busy.get() & thread == 0;
        let can = |arrival: &Arrival| is_free(arrival.thread()) && !self.is_busy(arrival);
        let next = self.arrivals.borrow().iter().position(can);
        let worker_may = is_free(thread::WORKER) && self.is_worker_woken.load(Ordering::SeqCst);
        let timer_may = is_free(thread::TIMER) && !self.member.is_driven();
        // In the order of their connections: the first of those that their threads can take.
        if let Some(arrival) = next.and_then(|at| self.arrivals.borrow_mut().remove(at)) {
            self.perform(arrival);
        } else if worker_may {
            self.work();
        } else if timer_may && self.is_timer_due() {
            self.run_timer_once();
        }
        self.depth.set(self.depth.get() - 1);
    }

    /// Whether the connection that something is for is in the hands of another thread: its worker would wait.
    fn is_busy(&self, arrival: &Arrival) -> bool {
        let (Arrival::Bytes(conn, _) | Arrival::Close(conn, ..) | Arrival::Reads(conn, _)) =
            arrival
        else {
            return false;
        };
        matches!(self.conn(*conn), Some(Conn::Line(line)) if line.talk.is_locked())
    }

    /// The worker looks at its connections, and drives the replica before it sleeps.
    fn work(&self) {
        self.as_thread(thread::WORKER, || {
            let front = self.member.front();
            loop {
                self.is_worker_woken.store(false, Ordering::SeqCst);
                front.after_sleep();
                let conns: Vec<Conn> = self.conns.borrow().values().cloned().collect();
                for conn in conns {
                    if let Conn::Line(line) = conn {
                        line.look_at_time(front.clock().now());
                    }
                }
                if front.before_sleep() {
                    break;
                }
            }
        });
    }

    fn is_timer_due(&self) -> bool {
        if !self.member.takes_part() {
            return false;
        }
        let Timer { armed, notices } = self.timer.get();
        let now = self.member.front().clock().now();
        armed.is_none_or(|at| at <= now.0) || notices != self.member.timer_notices()
    }

    fn run_timer(&self) {
        // What makes it run again at once is rare, and the world looks again soon.
        for _ in 0..8 {
            if !self.is_timer_due() {
                return;
            }
            self.run_timer_once();
        }
    }

    fn run_timer_once(&self) {
        let notices = self.member.timer_notices();
        self.as_thread(thread::TIMER, || self.member.run_timer());
        let armed = self.member.timer_sleeps_until();
        self.timer.set(Timer { armed, notices });
    }

    fn go_on_draining(&self) {
        let now = self.member.front().clock().now();
        let busy = match &*self.drain.borrow() {
            Drain::Serving | Drain::Drained => return,
            Drain::Looking(receiver, give_up_at) => match receiver.try_recv() {
                Ok(busy) => busy.flatten(),
                Err(_) if *give_up_at <= now => None,
                Err(_) => return,
            },
        };
        *self.drain.borrow_mut() = Drain::Drained;
        self.service.end_waits(busy);
        let conns: Vec<(u64, Conn)> =
            self.conns.borrow().iter().map(|(&conn, known)| (conn, known.clone())).collect();
        self.as_thread(thread::WORKER, || {
            for (_, conn) in conns {
                match conn {
                    Conn::Line(line) => {
                        line.serve(|talk, flushes| talk.handle_drain(flushes));
                    }
                    Conn::Calls(calls) => calls.told.lock().push(Told::Closed),
                }
            }
        });
    }

    // ---- Connections ----

    fn conn(&self, conn: u64) -> Option<Conn> {
        self.conns.borrow().get(&conn).cloned()
    }

    fn open(&self, conn: u64, api: Api) {
        let label: Arc<str> = format!("client {conn}").into();
        let opened = match api {
            Api::Line => Conn::Line(LineConn::open(&self.service, label)),
            Api::Calls => Conn::Calls(CallsConn::open(&self.service.engine, label)),
        };
        self.conns.borrow_mut().insert(conn, opened);
    }

    fn close(&self, conn: u64, orderly: bool) {
        match self.conn(conn) {
            None => {}
            Some(Conn::Line(line)) if orderly => line.serve(|talk, _| talk.handle_end_of_input()),
            Some(Conn::Line(line)) => line.lose(),
            Some(Conn::Calls(calls)) => {
                self.conns.borrow_mut().remove(&conn);
                let mut flushes = PendingFlushes::new();
                let me = calls.me.lock().clone();
                self.service.engine.close(&me, orderly, false, &mut flushes);
                calls.is_gone.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Takes what connections have for their clients.
    fn collect(&self) {
        if self.conns.borrow().is_empty() {
            return;
        }
        let conns: Vec<(u64, Conn)> =
            self.conns.borrow().iter().map(|(&conn, known)| (conn, known.clone())).collect();
        for (number, conn) in conns {
            if self.collect_of(number, &conn) {
                self.conns.borrow_mut().remove(&number);
            }
        }
    }

    fn tell_session(&self, number: u64, calls: &CallsConn) {
        let session = calls.me.lock().id();
        if calls.session.lock().replace(session) != Some(session) {
            self.outbox.put(Output::Tell(number, Told::Session(session)));
        }
    }

    /// True: the connection is over.
    fn collect_of(&self, number: u64, conn: &Conn) -> bool {
        match conn {
            Conn::Line(line) => {
                let mut session = line.session.lock();
                if !std::mem::replace(&mut session.1, true) {
                    self.outbox.put(Output::Tell(number, Told::Session(session.0)));
                }
                drop(session);
                for (at, session, request) in std::mem::take(&mut *line.known.lock()) {
                    self.outbox.put(Output::Tell(number, Told::Known(at, session, request)));
                }
                let bytes = std::mem::take(&mut *line.output.lock());
                if !bytes.is_empty() {
                    self.outbox.put(Output::Tell(number, Told::Bytes(bytes)));
                }
                let is_over = line.is_over.load(Ordering::Relaxed);
                if is_over {
                    self.outbox.put(Output::Tell(number, Told::Closed));
                }
                is_over
            }
            Conn::Calls(calls) => {
                self.tell_session(number, calls);
                let told = std::mem::take(&mut *calls.told.lock());
                let mut is_over = false;
                for told in told {
                    let told = calls.translate(&self.service.engine, told);
                    self.tell_session(number, calls);
                    if let Told::Closed = told {
                        is_over = true;
                        let me = calls.me.lock().clone();
                        let mut flushes = PendingFlushes::new();
                        self.service.engine.close(&me, false, false, &mut flushes);
                        calls.is_gone.store(true, Ordering::Relaxed);
                    }
                    self.outbox.put(Output::Tell(number, told));
                }
                is_over
            }
        }
    }
}

fn at_points(process: Weak<Process>) -> Rc<dyn Fn()> {
    Rc::new(move || {
        if let Some(process) = process.upgrade() {
            process.point();
        }
    })
}

/// A connection of the line protocol.
struct LineConn {
    talk: Mutex<Connection>,
    inbox: Arc<Inbox>,
    output: Mutex<Vec<u8>>,
    /// Its session, and whether the world knows.
    session: Mutex<(SessionId, bool)>,
    /// How many answers were printed, and up to where they are counted in what is not written.
    answers: AtomicUsize,
    counted: AtomicUsize,
    /// What the engine knows the request by that is executed after so many answers.
    known: Mutex<Vec<(usize, SessionId, RequestId)>>,
    /// The client takes in what is written.
    is_read: AtomicBool,
    is_over: AtomicBool,
    has_panicked: AtomicBool,
}

/// Notes a panic: a server would end the connection and go on.
struct Fuse<'a>(&'a AtomicBool);

impl Drop for Fuse<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.store(true, Ordering::Relaxed);
        }
    }
}

impl LineConn {
    fn open(service: &Arc<Service>, label: Arc<str>) -> Arc<Self> {
        Arc::new_cyclic(|conn: &std::sync::Weak<Self>| {
            let (inbox, conn) = (Arc::<Inbox>::default(), conn.clone());
            let mailbox = inbox.mailbox(move |_| {
                if let Some(conn) = conn.upgrade() {
                    conn.flush();
                }
            });
            let me = service.engine.open(mailbox, Arc::clone(&label));
            let session = Mutex::new((me.id(), false));
            let talk = Connection::new(Arc::clone(service), Arc::clone(&inbox), me, label);
            Self {
                talk: Mutex::new(talk),
                inbox,
                output: Mutex::default(),
                session,
                answers: AtomicUsize::new(0),
                counted: AtomicUsize::new(0),
                known: Mutex::default(),
                is_read: AtomicBool::new(true),
                is_over: AtomicBool::new(false),
                has_panicked: AtomicBool::new(false),
            }
        })
    }

    /// The thread that has the connection does something with it. Afterwards it looks into the inbox once more, because
    /// others leave things there while it is busy.
    fn serve(&self, step: impl FnOnce(&mut Connection, &mut PendingFlushes)) {
        let _fuse = Fuse(&self.has_panicked);
        let mut flushes = PendingFlushes::new();
        {
            let mut talk = self.talk.lock();
            step(&mut talk, &mut flushes);
            self.write(&mut talk, &mut flushes);
        }
        flushes.run();
        while !self.inbox.is_empty() && !self.is_over.load(Ordering::Relaxed) {
            let Some(mut talk) = self.talk.try_lock() else { return };
            talk.handle_messages(&mut flushes);
            self.write(&mut talk, &mut flushes);
            drop(talk);
            flushes.run();
        }
    }

    /// Another thread has left something; unless the connection is busy, it is told to the client at once.
    fn flush(&self) {
        if self.talk.is_locked() || self.is_over.load(Ordering::Relaxed) {
            return;
        }
        self.serve(|talk, flushes| talk.handle_messages(flushes));
    }

    fn look_at_time(&self, now: Timestamp) {
        // A connection in the hands of another thread is looked at later.
        let deadline = self.talk.try_lock().and_then(|talk| talk.next_deadline());
        if deadline.is_some_and(|at| at <= now) {
            self.serve(|talk, flushes| talk.handle_time(flushes));
        }
    }

    /// The client is gone without a word.
    fn lose(&self) {
        self.serve(|talk, flushes| talk.end(flushes));
        self.is_over.store(true, Ordering::Relaxed);
    }

    /// Takes down which session the connection has, and by what the engine knows the request that it executes now.
    fn take_down(&self, talk: &Connection) {
        let printed = &talk.output()[self.counted.load(Ordering::Relaxed)..];
        let lines = printed.split_inclusive(|&byte| byte == b'\n');
        let answers = lines.filter(|line| PushLine::parse(line).is_none()).count();
        let answers = self.answers.fetch_add(answers, Ordering::Relaxed) + answers;
        self.counted.store(talk.output().len(), Ordering::Relaxed);
        let mut session = self.session.lock();
        if session.0 != talk.id() {
            *session = (talk.id(), false);
        }
        if let Some(request) = talk.blocked_on() {
            self.known.lock().push((answers, talk.id(), request));
        }
    }

    fn write(&self, talk: &mut Connection, flushes: &mut PendingFlushes) {
        if self.is_over.load(Ordering::Relaxed) {
            return;
        }
        self.take_down(talk);
        while self.is_read.load(Ordering::Relaxed) {
            let bytes = talk.output().to_vec();
            self.output.lock().extend_from_slice(&bytes);
            self.counted.store(0, Ordering::Relaxed);
            talk.handle_written(bytes.len());
            if !talk.has_more() {
                break;
            }
            talk.handle_more(flushes);
            self.take_down(talk);
        }
        if talk.is_over() {
            talk.end(flushes);
            self.is_over.store(true, Ordering::Relaxed);
        }
    }
}

/// A session of HTTP or gRPC.
struct CallsConn {
    me: Mutex<Attachment>,
    /// Its session, as the world knows.
    session: Mutex<Option<SessionId>>,
    told: Mutex<Vec<Told>>,
    is_gone: AtomicBool,
    attaching: Mutex<Option<RequestId>>,
}

struct IntoCalls(std::sync::Weak<CallsConn>);

impl IntoCalls {
    fn put(&self, told: Told) -> Pushed {
        let conn = self.0.upgrade().filter(|conn| !conn.is_gone.load(Ordering::Relaxed));
        let Some(conn) = conn else { return Pushed::Gone };
        conn.told.lock().push(told);
        Pushed::Behind
    }
}

impl Mailbox for IntoCalls {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        self.put(Told::Answer(request, outcome))
    }

    fn push(&self, push: Push) -> Pushed {
        self.put(Told::Push(push))
    }

    fn overflow(&self) {
        self.close();
    }

    fn close(&self) {
        self.put(Told::Closed);
    }

    fn api(&self) -> dflockd_engine::Api {
        dflockd_engine::Api::Grpc
    }

    fn flush(&self) {}
}

impl CallsConn {
    fn open(engine: &Engine, label: Arc<str>) -> Arc<Self> {
        Arc::new_cyclic(|conn: &std::sync::Weak<Self>| {
            let me = engine.open(Arc::new(IntoCalls(conn.clone())), label);
            Self {
                me: Mutex::new(me),
                session: Mutex::default(),
                told: Mutex::default(),
                is_gone: AtomicBool::new(false),
                attaching: Mutex::default(),
            }
        })
    }

    fn ask(&self, engine: &Engine, op: &Op, request: RequestId, keep: bool) {
        let me = self.me.lock().clone();
        let mut flushes = PendingFlushes::new();
        let tell = |told| self.told.lock().push(told);
        let submitted = match op {
            Op::Do(command) | Op::Wait(command, ..) | Op::RenewSession(command, _) => {
                engine.submit(&me, request, keep, command.get(), &mut flushes)
            }
            Op::Read(query) => engine.query(&me, request, borrowed(query)),
            Op::Sync => engine.barrier(&me, request),
            Op::Kick { session } => engine.kick(&me, request, *session, &mut flushes),
            Op::Keep { .. } => {
                let (SessionSecret(secret), submitted) = engine.keep(&me, request);
                tell(Told::Secret(request, secret));
                submitted
            }
            Op::Attach { secret } => {
                *self.attaching.lock() = Some(request);
                let secret = SessionSecret(*secret);
                match engine.attach(&me, request, secret, &mut flushes) {
                    Attaching::Later => return,
                    // Nobody could say, so the client comes again.
                    Attaching::Done(_) => Submitted::Gone,
                }
            }
        };
        match submitted {
            Submitted::Done(outcome) => tell(Told::Answer(request, outcome)),
            Submitted::Later(_) => {}
            Submitted::Gone => tell(Told::Closed),
        }
        flushes.run();
    }

    /// The answer to an attach is an event of its own.
    fn translate(&self, engine: &Engine, told: Told) -> Told {
        let Told::Answer(request, outcome) = told else { return told };
        let mut attaching = self.attaching.lock();
        if *attaching != Some(request) {
            return Told::Answer(request, outcome);
        }
        *attaching = None;
        let mut me = self.me.lock();
        match engine.attached(&me) {
            Some(attached) => {
                *me = attached;
                Told::Attached(request, true)
            }
            None if outcome == Outcome::Refused(dflockd_core::Refusal::NotHeld) => {
                Told::Attached(request, false)
            }
            None => Told::Closed,
        }
    }
}

/// A query as the engine takes it.
#[must_use]
pub fn borrowed(query: &OwnedQuery) -> Query<'_> {
    match query {
        OwnedQuery::Counter(key) => Query::Counter { key },
        OwnedQuery::Kv(key) => Query::Kv { key },
        OwnedQuery::Entry(key) => Query::Entry { key },
        OwnedQuery::Length(key) => Query::Length { key },
        OwnedQuery::Range(key, start, stop) => Query::Range { key, start: *start, stop: *stop },
    }
}
