//! The engine behind a Raft log, as connections see it.
//!
//! A command becomes an item in a queue, and its answer comes later, through the session's sink, when this node has
//! applied the entry with the item in it.
//!
//! The replica has no thread that everything must pass through: whoever has something for it may turn to it, one at a
//! time, and who finds it busy leaves, because the one who is at it looks again. Under load that is the *tender*, a
//! thread that serves connections: it reads what many clients sent, turns to the replica once for all of it, writes the
//! log, and then the answers. To wake a thread for each of these steps costs more than the steps. The thread `replica`
//! (`replicated/driver.rs`) does what takes long and looks at the time.

pub(crate) mod driver;
mod inputs;
#[cfg(test)]
mod tests;

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dflockd_core::{
    Command, Effect, Outcome, Push, Query, Refusal, RequestId, SessionId, Span, Store, Timestamp,
    command,
};
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot};

use self::driver::{Bomb, ClusterOptions, Desk, Fatal, Seat, log_failed};
use crate::clock::Clock;
use crate::gauges::Gauges;
use crate::memory::Submitted;
use crate::router::{Attachment, PendingFlushes, Pushed, Router, Session, SessionSecret, Sink};
use crate::transport::{Credentials, Identity, Transport};
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::log::Room;
use dflockd_replica::machine::{Event, Machine};
use dflockd_replica::types::{Action, Addresses, Bits128, Item, Member, Policy, RaftId, Run};
use dflockd_replica::{NodeEvent, Outputs, Replica, StateCopy, Status, urgency};

use self::inputs::Head;
pub(crate) use self::inputs::{Input, Inputs};

/// Places of locks that are looked at in one go: everybody else waits meanwhile.
const SLOTS_MAX: usize = 50_000;

/// See [`Replicated::on_decided`].
type NoteDecided = Box<dyn Fn(&str, AdminRequest, bool) + Send + Sync>;

/// A member of a cluster, for connections.
pub struct Replicated {
    clock: Clock,
    router: Router,
    inputs: Mutex<Inputs>,
    /// There may be something in them.
    stirred: AtomicBool,
    /// For the replica's thread.
    came: Condvar,
    /// The replica, while it takes part.
    seat: Mutex<Option<Box<Seat>>>,
    has_begun: AtomicBool,
    /// Its log, likewise.
    desk: OnceLock<Weak<Desk>>,
    stopped: AtomicBool,
    /// When the replica wants to look at the time, and when its thread will.
    due: AtomicU64,
    armed: AtomicU64,
    /// About how many items are taken at a time.
    taken: AtomicUsize,
    tender: OnceLock<Tender>,
    run: AtomicU32,
    /// Where else this node can be reached.
    addresses: Mutex<Addresses>,
    last_session: AtomicU32,
    view: Mutex<View>,
    jobs: Mutex<HashMap<u64, Job>>,
    admins: Mutex<HashMap<u64, oneshot::Sender<AdminResult>>>,
    /// Copies of the state that somebody waits for.
    copies: Mutex<HashMap<u64, StateCopy>>,
    dir: std::path::PathBuf,
    last_id: AtomicU64,
    pushes_dropped: AtomicU64,
    gauges: Gauges,
    transport: Mutex<Option<Arc<Transport>>>,
    fatal: Fatal,
    decided: OnceLock<NoteDecided>,
    failed: Notify,
    node: String,
    witness: bool,
}

/// Items at a time up to which the load is light: then whoever has news for the replica turns to it.
const LIGHT: usize = 4;

thread_local! {
    /// This thread turns to the replica before it sleeps.
    static TENDS: Cell<bool> = const { Cell::new(false) };
}

/// A thread that turns to the replica whenever it has nothing else to do.
struct Tender {
    wake: Box<dyn Fn() + Send + Sync>,
    asleep: AtomicBool,
}

impl Tender {
    fn call(&self) {
        fence(Ordering::SeqCst);
        if self.asleep.swap(false, Ordering::SeqCst) {
            (self.wake)();
        }
    }
}

/// Whether who turns to the replica may wait for the disk. Who brings what a peer says may not: there may be heartbeats
/// behind it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    No,
    Yes,
}

/// Something that looks at the state on the replica's thread; without one if that is not possible.
type Job = Box<dyn FnOnce(Option<&Machine>) + Send>;

/// The cluster as this node sees it.
#[derive(Clone, Debug)]
pub struct View {
    /// This node.
    pub raft_id: RaftId,
    /// How it stands.
    pub status: Option<Status>,
    /// All members.
    pub members: std::collections::BTreeMap<RaftId, Member>,
    /// Who votes.
    pub voters: Vec<RaftId>,
    /// Who listens.
    pub learners: Vec<RaftId>,
    /// What all decide by.
    pub policy: Option<Policy>,
    /// Where else the members can be reached.
    pub addresses: std::collections::BTreeMap<RaftId, Addresses>,
    /// The cluster's name.
    pub cluster: Bits128,
    /// The newest version that each member reads.
    pub versions: std::collections::BTreeMap<RaftId, u32>,
    /// The version that all agreed to use.
    pub version: u32,
    last_raft_id: RaftId,
}

/// Where clients find the leader of a cluster, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leader {
    /// The address of its line protocol.
    pub line: Option<String>,
    /// The address of its HTTP API, if it has one.
    pub http: Option<String>,
    /// The address of its gRPC API, if it has one.
    pub grpc: Option<String>,
}

impl View {
    /// Where clients find the leader, if there is one.
    #[must_use]
    pub fn leader_addr(&self) -> Option<&str> {
        let leader = self.status?.leader?;
        self.members.get(&leader).map(|member| member.client_addr.as_str())
    }

    /// Where clients find the leader, by each API.
    #[must_use]
    pub fn leader(&self) -> Leader {
        let addresses = self.status.and_then(|status| self.addresses.get(&status.leader?));
        let known = |addr: &String| Some(addr.clone()).filter(|addr| !addr.is_empty());
        Leader {
            line: self.leader_addr().map(str::to_owned),
            http: addresses.and_then(|addresses| known(&addresses.http)),
            grpc: addresses.and_then(|addresses| known(&addresses.grpc)),
        }
    }

    /// Whether this node leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.status.is_some_and(|status| status.role == "leader")
    }
}

impl Replicated {
    /// Opens the data directory and begins to take part. Must be called inside a runtime.
    ///
    /// # Errors
    ///
    /// If the directory, the port or the credentials can not be used.
    pub async fn start(options: ClusterOptions, clock: Clock) -> Result<Arc<Self>, String> {
        let front = Arc::new(Self {
            clock,
            router: Router::new(),
            inputs: Mutex::default(),
            stirred: AtomicBool::new(false),
            came: Condvar::new(),
            seat: Mutex::default(),
            has_begun: AtomicBool::new(false),
            desk: OnceLock::new(),
            stopped: AtomicBool::new(false),
            due: AtomicU64::new(0),
            armed: AtomicU64::new(0),
            taken: AtomicUsize::new(0),
            tender: OnceLock::new(),
            run: AtomicU32::new(0),
            addresses: Mutex::default(),
            last_session: AtomicU32::new(0),
            view: Mutex::new(View {
                raft_id: 0,
                status: None,
                members: std::collections::BTreeMap::new(),
                voters: Vec::new(),
                learners: Vec::new(),
                policy: None,
                addresses: std::collections::BTreeMap::new(),
                cluster: Bits128::default(),
                versions: std::collections::BTreeMap::new(),
                version: 1,
                last_raft_id: 0,
            }),
            jobs: Mutex::default(),
            admins: Mutex::default(),
            copies: Mutex::default(),
            dir: options.dir.clone(),
            last_id: AtomicU64::new(0),
            pushes_dropped: AtomicU64::new(0),
            gauges: Gauges::default(),
            transport: Mutex::default(),
            fatal: Fatal::new(),
            decided: OnceLock::new(),
            failed: Notify::new(),
            node: options.node.clone(),
            witness: options.witness,
        });
        let transport = driver::start(&front, options).await?;
        *front.transport.lock() = Some(transport);
        Ok(front)
    }

    /// Local time.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    /// This node's name.
    #[must_use]
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Whether it keeps no state.
    #[must_use]
    pub fn is_witness(&self) -> bool {
        self.witness
    }

    /// The cluster as this node sees it.
    #[must_use]
    pub fn view(&self) -> View {
        self.view.lock().clone()
    }

    /// What this member counts.
    #[must_use]
    pub fn gauges(&self) -> &Gauges {
        &self.gauges
    }

    /// How many pushes were too much for their receivers.
    #[must_use]
    pub fn pushes_dropped(&self) -> u64 {
        self.pushes_dropped.load(Ordering::Relaxed)
    }

    /// The last entry that is applied here.
    pub(crate) fn applied(&self) -> u64 {
        self.view.lock().status.map_or(0, |status| status.applied)
    }

    /// Whether this node leads.
    ///
    /// # Errors
    ///
    /// If not: where clients find who does, as far as that is known.
    pub fn leadership(&self) -> Result<(), Leader> {
        let view = self.view.lock();
        if view.is_leader() { Ok(()) } else { Err(view.leader()) }
    }

    /// Whether clients should come here.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.fatal.get().is_none() && self.view.lock().status.is_some_and(|status| status.ready)
    }

    /// Where the peer port is.
    #[must_use]
    pub fn peer_addr(&self) -> Option<std::net::SocketAddr> {
        self.transport.lock().as_ref().map(|transport| transport.local_addr())
    }

    /// Waits until the node can not go on, and says why.
    pub async fn failed(&self) -> String {
        loop {
            let failed = self.failed.notified();
            if let Some(why) = self.fatal.get() {
                return why.clone();
            }
            failed.await;
        }
    }

    /// What to do with each change of the cluster that this member has decided as the leader, and that was asked of
    /// another one: the name of that one, what was asked for, and whether it was done. Can be set once; must not block.
    pub fn on_decided(&self, note: impl Fn(&str, AdminRequest, bool) + Send + Sync + 'static) {
        let _ = self.decided.set(Box::new(note));
    }

    /// Uses other credentials towards peers.
    ///
    /// # Errors
    ///
    /// If they can not be used.
    pub fn reload(&self, credentials: Credentials) -> Result<(), String> {
        match &*self.transport.lock() {
            Some(transport) => transport.reload(credentials).map_err(|error| error.to_string()),
            None => Ok(()),
        }
    }

    /// Asks for a change of the cluster.
    ///
    /// # Errors
    ///
    /// Why it was not done.
    pub async fn admin(&self, request: AdminRequest) -> AdminResult {
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        self.ask_admin(id, request).await
    }

    async fn ask_admin(&self, id: u64, request: AdminRequest) -> AdminResult {
        let (sender, receiver) = oneshot::channel();
        self.admins.lock().insert(id, sender);
        if self.fatal.get().is_some() {
            self.admins.lock().remove(&id);
            return Err(self.stopped_because());
        }
        self.give(Input::Admin { id, request: request.clone() });
        let result = receiver.await.unwrap_or_else(|_| Err("this node is shutting down".into()));
        self.gauges.asked(&request, &result);
        result
    }

    /// What operators are told whose request this node will not answer.
    fn stopped_because(&self) -> String {
        let why = self.fatal.get().map_or("it is shutting down", String::as_str);
        format!("this member stops: {why}; it may still happen, ask another one")
    }

    /// A copy of the whole state, with everything in it that was done before.
    ///
    /// # Errors
    ///
    /// If this node can not say.
    pub async fn copy(self: &Arc<Self>) -> Result<StateCopy, String> {
        let front = Arc::clone(self);
        let seen = tokio::task::spawn_blocking(move || front.look(true, |_| ())).await;
        if seen.ok().flatten().is_none() {
            return Err("no leader confirms what is committed; try again".into());
        }
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        self.ask_admin(id, AdminRequest::Copy).await?;
        self.copies.lock().remove(&id).ok_or_else(|| "this node is shutting down".into())
    }

    pub(crate) fn hand_copy(&self, id: u64, copy: StateCopy) {
        // Who asked may have given up, and nobody would take it then.
        if self.admins.lock().get(&id).is_some_and(|sender| !sender.is_closed()) {
            self.copies.lock().insert(id, copy);
        }
    }

    /// Bytes that are free and that there are on the disk of the data directory.
    #[must_use]
    pub fn disk_space(&self) -> Option<(u64, u64)> {
        let stat = rustix::fs::statvfs(&self.dir).ok()?;
        Some((stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize))
    }

    /// Hands leadership over, if this node has it, and waits until somebody else leads, three seconds at most.
    pub async fn hand_over(&self) {
        let deadline = self.clock.now() + Span::from_secs(3);
        if !self.view.lock().is_leader() {
            return;
        }
        if self.admin(AdminRequest::Transfer { to: None }).await.is_err() {
            return;
        }
        while self.view.lock().is_leader() && self.clock.now() < deadline {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until what connections left behind is applied, a second at most.
    pub async fn settle(self: &Arc<Self>) {
        let front = Arc::clone(self);
        let applied = tokio::task::spawn_blocking(move || front.look(true, |_| ()));
        let _ = tokio::time::timeout(Duration::from_secs(1), applied).await;
    }

    /// Ends the threads. Nothing is answered any more.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.call();
        self.desk().inspect(|desk| desk.call());
        if let Some(transport) = self.transport.lock().take() {
            transport.stop();
        }
    }

    // ---- For connections ----

    pub(crate) fn open(&self, sink: Arc<dyn Sink>, label: Arc<str>) -> Attachment {
        let number = self.last_session.fetch_add(1, Ordering::Relaxed) + 1;
        let run = Run(self.run.load(Ordering::Acquire));
        self.router.open_as(run.session(number), 0, sink, label)
    }

    pub(crate) fn submit(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        command: Command<'_>,
    ) -> Submitted {
        if let Some(refused) = self.refuse(by) {
            return refused;
        }
        let answered = !matches!(command, Command::Acknowledge(_) | Command::Cancel(_));
        let wait = answered.then(|| command.wait());
        if !self.put(by, request, keep, Action::Command(command), wait) {
            return self.too_much(keep);
        }
        if answered {
            Submitted::Later(crate::memory::Place::ANY)
        } else {
            Submitted::Done(Outcome::Done)
        }
    }

    /// An action that is answered through the sink.
    pub(crate) fn act(&self, by: &Attachment, request: RequestId, action: Action<'_>) -> Submitted {
        if let Some(refused) = self.refuse(by) {
            return refused;
        }
        if !self.put(by, request, false, action, Some(Span::ZERO)) {
            return self.too_much(false);
        }
        Submitted::Later(crate::memory::Place::ANY)
    }

    /// The answer to a request that finds too many others before it. Nothing has come of it; but what is repeated may
    /// have had its effect before, through this node or another.
    fn too_much(&self, keep: bool) -> Submitted {
        self.gauges.proposals_failed.fetch_add(1, Ordering::Relaxed);
        let why = if keep { Refusal::Forgotten } else { Refusal::Unavailable };
        Submitted::Done(Outcome::Refused(why))
    }

    /// Why nothing can be done for a session, if so.
    fn refuse(&self, by: &Attachment) -> Option<Submitted> {
        if !by.is_current() {
            return Some(Submitted::Gone);
        }
        if Run::of(by.id()) != Run(0) {
            return None;
        }
        // Opened before this node was a member.
        let is_member = self.run.load(Ordering::Acquire) != 0;
        let refused = Submitted::Done(Outcome::Refused(Refusal::Unavailable));
        Some(if is_member { Submitted::Gone } else { refused })
    }

    pub(crate) fn cancel(&self, by: &Attachment, request: RequestId) {
        let action = Action::Command(Command::Cancel(command::Cancel { request }));
        self.put(by, RequestId(0), false, action, None);
    }

    pub(crate) fn undo(&self, outcome: &Outcome) {
        if outcome.gives() {
            self.put_item(
                SessionId(0),
                0,
                RequestId(0),
                false,
                Action::Undo(outcome.clone()),
                None,
            );
        }
    }

    pub(crate) fn query(&self, by: &Attachment, request: RequestId, query: Query<'_>) -> Submitted {
        if let Some(refused) = self.refuse(by) {
            return refused;
        }
        let (session, query) = (by.id(), query.into());
        if !self.give(Input::Read { session, request, query }) {
            return self.too_much(false);
        }
        Submitted::Later(crate::memory::Place::ANY)
    }

    pub(crate) fn close(&self, by: &Attachment, orderly: bool, referenced: bool) {
        let was_used = by.session.is_touched();
        let untaken = by.session.state.lock().attached.take();
        if let Some(untaken) = untaken {
            // It was told that nobody knows what came of its attach.
            self.router.remove(&untaken.session);
            self.leave(untaken.id(), untaken.epoch());
        }
        if by.is_current() {
            by.session.state.lock().sink = None;
            self.router.remove(&by.session);
        }
        if was_used {
            let action = Action::Close { orderly, referenced };
            self.put(by, RequestId(0), false, action, None);
        }
    }

    /// The sessions whose clients are here.
    pub(crate) fn router(&self) -> &Router {
        &self.router
    }

    pub(crate) fn label(&self, id: SessionId) -> Option<Arc<str>> {
        if let Some(label) = self.router.label(id) {
            return Some(label);
        }
        let view = self.view.lock();
        let member = view.members.get(&Run::of(id).raft_id())?;
        Some(format!("at {}", member.node).into())
    }

    /// What became of an attach that was answered.
    pub(crate) fn attached(&self, by: &Attachment) -> Option<Attachment> {
        let attached = by.session.state.lock().attached.take();
        if attached.is_some() {
            self.router.remove(&by.session);
        }
        attached
    }

    /// Looks at the state, on the replica's thread: as of now for the whole cluster, or as this node has it.
    /// None if that
    /// is not possible in time. Blocks.
    pub(crate) fn look<T: Send + 'static>(
        &self,
        linear: bool,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Option<T> {
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let id = self.last_id.fetch_add(1, Ordering::Relaxed) + 1;
        let job: Job = Box::new(move |machine| {
            let _ = sender.send(machine.map(look));
        });
        self.jobs.lock().insert(id, job);
        self.give(Input::Job { id, linear });
        receiver.recv_timeout(Duration::from_secs(10)).ok().flatten()
    }

    /// Looks at all locks, a part at a time, so that others are served in between. Blocks.
    pub(crate) fn look_at_locks<T: Send + 'static>(
        &self,
        mut seen: T,
        look: impl Fn(&Store, Range<usize>, Timestamp, &mut T) + Copy + Send + 'static,
    ) -> Option<T> {
        let mut begin = 0;
        loop {
            let slots = begin..begin + SLOTS_MAX;
            let part = self.look(begin == 0, move |machine| {
                let store = machine.store()?;
                let end = store.lock_slots();
                look(store, slots.start..slots.end.min(end), machine.shown(), &mut seen);
                Some((seen, end))
            });
            let end;
            (seen, end) = part.flatten()?;
            begin += SLOTS_MAX;
            if begin >= end {
                return Some(seen);
            }
        }
    }

    /// False: there is too much to do already, and nothing will come of it.
    fn put(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        action: Action<'_>,
        wait: Option<Span>,
    ) -> bool {
        let epoch = u32::try_from(by.epoch()).unwrap_or(u32::MAX);
        let is_put = self.put_item(by.id(), epoch, request, keep, action, wait);
        if is_put {
            // A session that nobody but this node has heard of needs no end in the log.
            by.session.touch(0);
        }
        is_put
    }

    fn put_item(
        &self,
        session: SessionId,
        epoch: u32,
        request: RequestId,
        keep: bool,
        action: Action<'_>,
        wait: Option<Span>,
    ) -> bool {
        let urgency = urgency(&action);
        let item = Item { session, epoch, request, keep, action };
        let is_put = self.inputs.lock().put_item(&item, wait, urgency);
        if is_put {
            self.stir();
        }
        is_put
    }

    // ---- Turning to the replica ----

    /// This thread turns to the replica before it sleeps, and is woken by `wake`. There is one such thread.
    pub fn set_tender(&self, wake: impl Fn() + Send + Sync + 'static) {
        let tender = Tender { wake: Box::new(wake), asleep: AtomicBool::new(false) };
        if self.tender.set(tender).is_ok() {
            TENDS.set(true);
        }
    }

    /// What the tender does before it sleeps: turns to the replica if there is something for it. False: there is
    /// something again, and it may not sleep.
    pub fn tend(&self) -> bool {
        let Some(tender) = self.tender.get() else { return true };
        if self.wants_tender() {
            self.turn(Waits::Yes);
        }
        tender.asleep.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.wants_tender() {
            tender.asleep.store(false, Ordering::SeqCst);
            return false;
        }
        true
    }

    /// Whether there is something for the tender to do.
    pub fn wants_tender(&self) -> bool {
        if !self.has_begun.load(Ordering::SeqCst) || self.is_over() {
            return false;
        }
        // Who is at the replica or the log looks again when it is done, and calls. What takes long is for the
        // replica's thread.
        let replica = || {
            self.stirred.load(Ordering::SeqCst)
                && !self.seat.is_locked()
                && !self.inputs.lock().is_heavy()
        };
        replica() || self.desk().is_some_and(|desk| desk.wants_writer(&self.clock))
    }

    fn is_light(&self) -> bool {
        self.taken.load(Ordering::Relaxed) <= LIGHT
    }

    /// The tender is awake again.
    pub fn rise(&self) {
        if let Some(tender) = self.tender.get() {
            tender.asleep.store(false, Ordering::SeqCst);
        }
    }

    /// Lets the replica take what has come, and does what follows from it. Who finds somebody else at it leaves.
    fn turn(&self, waits: Waits) {
        self.try_pass();
        if waits == Waits::Yes && self.write() {
            self.try_pass();
        }
        // What came meanwhile is for the tender, who looks at its connections before.
        if self.wants_tender() {
            self.stir();
        }
    }

    fn try_pass(&self) {
        let Some(seat) = self.seat.try_lock() else { return };
        if self.inputs.lock().is_heavy() {
            drop(seat);
            return self.call();
        }
        self.pass(seat);
    }

    /// Writes what there is for the log, unless that is for somebody else. True: something was written.
    fn write(&self) -> bool {
        let Some(desk) = self.desk() else { return false };
        let bomb = Bomb::new(self);
        let written = desk.write(self);
        bomb.defuse();
        written.unwrap_or_else(|error| {
            self.fail(log_failed(&error));
            false
        })
    }

    /// The replica is to know what was written, and whether there is room again or no more.
    pub(crate) fn written(&self, number: Option<u64>, room: Option<Room>) {
        let room = room.map(|room| Input::Room { low: room == Room::Low });
        let news = number.map(Input::Written).into_iter().chain(room);
        let mut inputs = self.inputs.lock();
        for input in news {
            inputs.put(input);
        }
        drop(inputs);
        self.stirred.store(true, Ordering::SeqCst);
    }

    pub(crate) fn set_desk(&self, desk: &Arc<Desk>) {
        let _ = self.desk.set(Arc::downgrade(desk));
    }

    fn desk(&self) -> Option<Arc<Desk>> {
        self.desk.get()?.upgrade()
    }

    fn pass(&self, mut seat: MutexGuard<'_, Option<Box<Seat>>>) {
        if self.is_over() {
            return;
        }
        let Some(taken) = seat.as_mut() else { return };
        let tends = TENDS.replace(true);
        let bomb = Bomb::new(self);
        let mut flushes = PendingFlushes::new();
        self.stirred.store(false, Ordering::SeqCst);
        std::mem::swap(&mut *self.inputs.lock(), &mut taken.inputs);
        let (now, before) = (taken.inputs.items(), self.taken.load(Ordering::Relaxed));
        self.taken.store(now.max(before - before.div_ceil(8)), Ordering::Relaxed);
        let due = taken.pass(self, &mut flushes);
        bomb.defuse();
        drop(seat);
        match due {
            Ok(due) => self.set_due(due),
            Err(why) => self.fail(why),
        }
        flushes.run();
        TENDS.set(tends);
    }

    /// The replica wants to look at the time then.
    fn set_due(&self, due: Timestamp) {
        self.due.store(due.0, Ordering::SeqCst);
        if due.0 < self.armed.load(Ordering::SeqCst) {
            self.call();
        }
    }

    /// Something was left for the replica: sees to it that somebody takes it.
    pub(crate) fn stir(&self) {
        self.stirred.store(true, Ordering::SeqCst);
        if TENDS.get() {
            return;
        }
        match self.tender.get() {
            Some(tender) if self.has_begun.load(Ordering::SeqCst) => tender.call(),
            _ => self.call(),
        }
    }

    /// Calls the replica's thread.
    fn call(&self) {
        // Not between its look at the queue and its sleep.
        drop(self.inputs.lock());
        self.came.notify_all();
    }

    pub(crate) fn is_over(&self) -> bool {
        self.stopped.load(Ordering::SeqCst) || self.fatal.get().is_some()
    }

    /// False: there is too much already, and it is left out.
    pub(crate) fn give(&self, input: Input) -> bool {
        let heavy = input.is_heavy();
        if !self.inputs.lock().put(input) {
            return false;
        }
        if heavy {
            self.stirred.store(true, Ordering::SeqCst);
            self.call();
        } else {
            self.stir();
        }
        true
    }

    /// The same, and turns to the replica at once if the load is light.
    pub(crate) fn bring(&self, input: Input) -> bool {
        if input.is_heavy() || !self.is_light() || !self.has_begun.load(Ordering::SeqCst) {
            return self.give(input);
        }
        if !self.inputs.lock().put(input) {
            return false;
        }
        self.stirred.store(true, Ordering::SeqCst);
        self.turn(Waits::No);
        true
    }

    // ---- For the replica's thread ----

    /// Waits for something to come before the replica takes part, `wait` at most. None: it is over.
    pub(crate) fn wait_inputs(&self, wait: Duration) -> Option<Inputs> {
        let mut inputs = self.inputs.lock();
        if inputs.is_empty() && !self.is_over() {
            self.came.wait_for(&mut inputs, wait);
        }
        if self.is_over() {
            return None;
        }
        Some(std::mem::take(&mut inputs))
    }

    /// Lets the replica take part, looks at the time for it, and does what takes long, until it is over.
    pub(crate) fn attend(&self, seat: Box<Seat>) {
        *self.seat.lock() = Some(seat);
        self.has_begun.store(true, Ordering::SeqCst);
        while !self.is_over() {
            self.pass(self.seat.lock());
            // Not this thread waits for the disk: nobody else looks at the time.
            if self.tender.get().is_none() {
                self.desk().inspect(|desk| desk.call());
            } else if self.wants_tender() {
                self.stir();
            }
            let mut inputs = self.inputs.lock();
            loop {
                let due = self.due.load(Ordering::SeqCst);
                self.armed.store(due, Ordering::SeqCst);
                let wanted = inputs.is_heavy() || self.tender.get().is_none() && !inputs.is_empty();
                let wait = self.clock.until(Timestamp(due));
                if wanted || wait.is_zero() || self.is_over() {
                    break;
                }
                if due == self.due.load(Ordering::SeqCst) {
                    self.came.wait_for(&mut inputs, wait);
                }
            }
        }
        *self.seat.lock() = None;
    }

    /// Gives the replica what has come; the buffers stay.
    pub(crate) fn feed(&self, inputs: &mut Inputs, replica: &mut Replica, outputs: &mut Outputs) {
        inputs.take_items(|bytes, head| {
            let Head { session, request, keep, wait, urgency, .. } = head;
            let taken = replica.submit_encoded(bytes, session, request, keep, wait, urgency);
            if !taken && wait.is_some() {
                // What is repeated may have had its effect before, through this node or another.
                let why = if keep { Refusal::Forgotten } else { Refusal::Unavailable };
                let outcome = Outcome::Refused(why);
                let effect = Effect::Reply { session, request, outcome };
                outputs.events.push(NodeEvent::Machine(Event::Effect(effect)));
            }
        });
        for input in inputs.take_others() {
            match input {
                Input::Frame { from, bytes, bulk: _ } => replica.handle_frame(from, bytes),
                Input::Unreachable { peer, refused } => replica.handle_unreachable(peer, refused),
                Input::Written(number) => replica.handle_written(number),
                Input::Snapshot(made) => replica.handle_snapshot(made, outputs),
                Input::Room { low } => replica.handle_room(low),
                Input::Read { session, request, query } => replica.read(session, request, query),
                Input::Job { id, linear: true } => replica.read_job(id),
                Input::Job { id, linear: false } => outputs.events.push(NodeEvent::Job(id, true)),
                Input::Admin { id, request } => replica.admin(id, request),
            }
        }
        inputs.tidy();
    }

    /// There is no cluster to change.
    pub(crate) fn refuse_admin(&self, id: u64) {
        if let Some(sender) = self.admins.lock().remove(&id) {
            let _ = sender.send(Err("this node is no member of a cluster yet".into()));
        }
    }

    /// There is no state to look at.
    pub(crate) fn refuse_job(&self, id: u64) {
        if let Some(job) = self.jobs.lock().remove(&id) {
            job(None);
        }
    }

    pub(crate) fn begin_run(&self, run: Run) {
        self.run.store(run.0, Ordering::Release);
        self.announce_addresses();
    }

    /// Where else clients find this node, for the others to know.
    pub fn set_addresses(&self, addresses: Addresses) {
        *self.addresses.lock() = addresses;
        if self.run.load(Ordering::Acquire) != 0 {
            self.announce_addresses();
        }
    }

    fn announce_addresses(&self) {
        let addresses = self.addresses.lock().clone();
        if addresses != Addresses::default() {
            let action = Action::Addresses(addresses);
            self.put_item(SessionId(0), 0, RequestId(0), false, action, None);
        }
    }

    pub(crate) fn set_status(&self, status: Status) {
        self.view.lock().status = Some(status);
    }

    pub(crate) fn set_members(&self, replica: &Replica) {
        let machine = replica.machine();
        let conf = replica.conf_state();
        let mut view = self.view.lock();
        view.raft_id = replica.id();
        view.members = machine.members().clone();
        view.last_raft_id = machine.next_raft_id() - 1;
        view.voters = conf.voters;
        view.learners = conf.learners;
        view.policy = machine.policy().cloned();
        view.addresses = machine.addresses().clone();
        view.cluster = machine.cluster();
        view.versions = machine.versions().clone();
        view.version = machine.version();
    }

    /// Admits only a member with the data directory that this member is known to have.
    pub(crate) fn admit_known(&self, peer: &Identity) -> Result<(), String> {
        self.admit(peer)?;
        let view = self.view.lock();
        match view.members.get(&peer.raft_id) {
            Some(member) if member.disk == Some(peer.disk) => Ok(()),
            Some(_) | None => Err(format!(
                "{} is no member that this cluster knows by its data directory, and presents the id of its beginning",
                peer.node
            )),
        }
    }

    pub(crate) fn admit(&self, peer: &Identity) -> Result<(), String> {
        let view = self.view.lock();
        if view.members.is_empty() {
            return Ok(());
        }
        match view.members.get(&peer.raft_id) {
            Some(member) if member.node != peer.node => {
                Err(format!("member {} is {}, not {}", peer.raft_id, member.node, peer.node))
            }
            Some(member) if member.disk.is_some_and(|disk| disk != peer.disk) => Err(format!(
                "{} came back with another data directory; remove it and let it join under a new id",
                peer.node
            )),
            Some(_) => Ok(()),
            None if peer.raft_id == 0 => {
                let known = view.members.values().find(|member| member.node == peer.node);
                match known {
                    Some(member) if member.disk.is_some_and(|disk| disk != peer.disk) => {
                        Err(format!(
                            "{} came back with an empty data directory; remove it and let it join under a \
                         new id",
                            peer.node
                        ))
                    }
                    _ => Ok(()),
                }
            }
            None if peer.raft_id <= view.last_raft_id => {
                Err(format!("{} was removed from the cluster", peer.node))
            }
            // Added by entries that this node has not seen yet.
            None => Ok(()),
        }
    }

    /// The node can not go on.
    pub(crate) fn fail(&self, why: String) {
        tracing::error!(why, "this member stops");
        let _ = self.fatal.set(why);
        // Nothing comes of them here any more, and operators are to hear why.
        let asked = std::mem::take(&mut *self.admins.lock());
        asked.into_values().for_each(|sender| {
            let _ = sender.send(Err(self.stopped_because()));
        });
        self.failed.notify_waiters();
        self.failed.notify_one();
        self.call();
    }

    /// Brings events to this node's clients. True: the members have changed. Whom there is to talk to goes to `meet`.
    pub(crate) fn route(
        &self,
        events: impl Iterator<Item = NodeEvent>,
        replica: &Replica,
        flushes: &mut PendingFlushes,
        mut meet: impl FnMut(std::collections::BTreeMap<RaftId, Member>),
    ) -> bool {
        let mut members = false;
        for event in events {
            match event {
                NodeEvent::Machine(event) => {
                    members |= matches!(event, Event::Members | Event::PolicyChanged);
                    self.route_event(event, replica.machine(), flushes);
                }
                NodeEvent::Job(id, can) => {
                    if let Some(job) = self.jobs.lock().remove(&id) {
                        job(can.then(|| replica.machine()));
                    }
                }
                NodeEvent::Admin(id, result) => {
                    if let Some(sender) = self.admins.lock().remove(&id) {
                        let _ = sender.send(result);
                    }
                }
                NodeEvent::Decided { origin, request, done } => {
                    let members = replica.machine().members();
                    // A member that was removed at its own wish is not there any more.
                    let node = members.get(&origin).map(|member| member.node.clone());
                    let node = node.unwrap_or_else(|| origin.to_string());
                    if let Some(note) = self.decided.get() {
                        note(&node, request, done);
                    }
                }
                NodeEvent::Peers(members) => meet(members),
                NodeEvent::Skipped => {
                    let Some(store) = replica.machine().store() else { continue };
                    for session in self.router.all() {
                        if store.subscribes(session.id) {
                            self.expel(&session, flushes);
                        }
                    }
                }
                NodeEvent::NewRun(run) => {
                    self.begin_run(run);
                    for session in self.router.all() {
                        if let Some(sink) = session.state.lock().sink.take() {
                            sink.cut();
                            flushes.add(&sink);
                        }
                    }
                }
            }
        }
        members
    }

    fn route_event(&self, event: Event, machine: &Machine, flushes: &mut PendingFlushes) {
        match event {
            Event::Effect(Effect::Reply { session, request, outcome }) => {
                // What was given and can not be told is taken back by the node that should have told it, and
                // by no other.
                let repeatable = machine.is_kept(session) && request.is_repeatable();
                let own = machine.home(session) == Some(Run(self.run.load(Ordering::Acquire)));
                self.reply(session, request, outcome, own && !repeatable, flushes);
            }
            Event::Effect(Effect::Push { session, push, .. }) => self.push(session, push, flushes),
            Event::Effect(Effect::SessionEnded { session }) => {
                if let Some(session) = self.router.get(session) {
                    self.expel(&session, flushes);
                }
            }
            Event::Attached { by, request, to } => self.attach(by, request, to, flushes),
            Event::Gone { session, epoch, .. } => {
                if let Some(session) = self.router.get(session)
                    && session.epoch.load(Ordering::SeqCst) == u64::from(epoch)
                {
                    self.expel(&session, flushes);
                }
            }
            Event::Kicked { session } => {
                if let Some(session) = self.router.get(session) {
                    self.expel(&session, flushes);
                }
            }
            Event::RunStarted(_)
            | Event::RunEnded(_)
            | Event::Members
            | Event::PolicyChanged
            | Event::Digest { .. } => {}
        }
    }

    /// The session is no longer its connection's.
    fn expel(&self, session: &Session, flushes: &mut PendingFlushes) {
        if let Some(sink) = session.state.lock().sink.take() {
            sink.close();
            flushes.add(&sink);
        }
    }

    /// Answers a request of a connection here. `undo`: what it gave is to be taken back if nobody is there.
    fn reply(
        &self,
        id: SessionId,
        request: RequestId,
        outcome: Outcome,
        undo: bool,
        flushes: &mut PendingFlushes,
    ) {
        let Some(session) = self.router.get(id) else {
            // Its connection ended before the answer came.
            if undo {
                self.undo(&outcome);
            }
            return;
        };
        if let Outcome::Refused(Refusal::Unavailable | Refusal::Forgotten) = outcome {
            self.gauges.proposals_failed.fetch_add(1, Ordering::Relaxed);
        }
        let told = session.state.lock().deliver(request, &outcome, flushes);
        if !told && undo {
            self.undo(&outcome);
        }
    }

    fn push(&self, id: SessionId, push: Push, flushes: &mut PendingFlushes) {
        let Some(session) = self.router.get(id) else { return };
        let state = session.state.lock();
        let Some(sink) = &state.sink else { return };
        match sink.push(push) {
            Pushed::First => flushes.add(sink),
            Pushed::Urgent => {
                flushes.add_urgent(sink);
                let sink = Arc::clone(sink);
                drop(state);
                drop(sink);
                flushes.run();
            }
            Pushed::Behind | Pushed::Gone => {}
            Pushed::Full => {
                self.pushes_dropped.fetch_add(1, Ordering::Relaxed);
                sink.overflow();
                flushes.add(sink);
            }
        }
    }

    /// Gives a kept session back that nobody here has: it waits for its client again.
    fn leave(&self, id: SessionId, epoch: u64) {
        let epoch = u32::try_from(epoch).unwrap_or(u32::MAX);
        let action = Action::Close { orderly: false, referenced: false };
        self.put_item(id, epoch, RequestId(0), false, action, None);
    }

    fn attach(
        &self,
        by: SessionId,
        request: RequestId,
        to: Option<(SessionId, u32)>,
        flushes: &mut PendingFlushes,
    ) {
        if let Some((id, epoch)) = to
            && let Some(old) = self.router.get(id)
            && old.epoch.load(Ordering::SeqCst) < u64::from(epoch)
        {
            old.epoch.store(u64::from(epoch), Ordering::SeqCst);
            if let Some(sink) = old.state.lock().sink.take() {
                sink.hand_over();
                flushes.add(&sink);
            }
            self.router.remove(&old);
        }
        let Some(session) = self.router.get(by) else {
            if let Some((id, epoch)) = to
                && Run::of(by) == Run(self.run.load(Ordering::Acquire))
            {
                self.leave(id, u64::from(epoch));
            }
            return;
        };
        let outcome = match to {
            None => Outcome::Refused(Refusal::NotHeld),
            Some((id, epoch)) => {
                let mut state = session.state.lock();
                if let Some(sink) = state.sink.clone() {
                    let label = Arc::clone(&state.label);
                    let attachment = self.router.open_as(id, u64::from(epoch), sink, label);
                    attachment.session.touch(0);
                    attachment.session.state.lock().secret = Some(SessionSecret([0; 16]));
                    state.attached = Some(attachment);
                }
                Outcome::Done
            }
        };
        self.reply(by, request, outcome, false, flushes);
    }
}
