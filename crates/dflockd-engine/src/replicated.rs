//! The engine behind a Raft log, as connections see it.
//!
//! A command becomes an item in the queue of the [`Combiner`], and its answer comes later, through the session's
//! mailbox, when this node has applied the entry with the item in it. Any thread may drive the replica, one at a time
//! (flat combining, `combiner.rs`); `driver.rs` does what the replica wants, `log_writer.rs` waits for the disk, and
//! `delivery.rs` brings answers and pushes to connections when the replica is unlocked again.

mod combiner;
mod delivery;
pub(crate) mod driver;
pub(crate) mod formation;
mod inputs;
mod log_writer;
#[cfg(feature = "sim")]
pub mod stepped;
#[cfg(test)]
mod tests;
mod view;

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc::Receiver;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{
    CLIENT_BYTES_MAX, Command, Effect, Outcome, Push, Query, Refusal, RequestId, Revision,
    SessionId, Span, Store, Timestamp, command,
};
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::log::Room;
use dflockd_replica::machine::{Event, Machine};
use dflockd_replica::types::{Addresses, Incarnation, Proposal, ProposalBody};
use dflockd_replica::{MadeSnapshot, NodeEvent, Replica, StateCopy, Status, urgency, version};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot, watch};

use self::combiner::Combiner;
use self::delivery::{AttachedTo, Delivery, Notice};
use self::driver::{ClusterOptions, Fatal, MemberOptions, ReplicaDriver};
use self::inputs::{Input, Inputs};
use self::log_writer::{LogJob, LogWriter};
pub use self::view::{Leader, View};
use crate::chance::Chance;
use crate::clock::{Clock, unix_nanos};
use crate::engine::tell_growth;
use crate::gauges::Gauges;
use crate::memory::Submitted;
use crate::router::{Attachment, Mailbox, PendingFlushes, Pushed, Router, SessionSecret};
use crate::transport::{Credentials, Identity, Transport};

/// Places of locks that are looked at in one go: everybody else waits meanwhile.
const SLOTS_MAX: usize = 50_000;

/// See [`Replicated::on_decided`].
type NoteDecided = Box<dyn Fn(&str, AdminRequest, bool) + Send + Sync>;

/// A member of a cluster, for connections.
pub struct Replicated {
    clock: Clock,
    chance: Chance,
    /// The first fence of a new cluster, if this node is its first leader.
    first_fence: u64,
    router: Router,
    combiner: Combiner<ReplicaDriver>,
    delivery: Delivery,
    log_writer: LogWriter,
    /// The [`Incarnation`] of this node, 0 while it is no member yet.
    run: AtomicU32,
    /// The last id of a session that was given out: the incarnation, and a number of 32 bits.
    last_session: AtomicU64,
    /// The last number of a session that was opened while no id could be given out.
    last_nameless: AtomicU32,
    /// Where else this node can be reached.
    addresses: Mutex<Addresses>,
    view: Mutex<View>,
    /// The cluster has reached the version in which sessions say who is behind them.
    identifies: AtomicBool,
    /// The last change that is applied here.
    revision: AtomicU64,
    /// The last change that is applied here, for those who follow.
    growth: watch::Sender<Revision>,
    jobs: Mutex<HashMap<u64, Job>>,
    admins: Mutex<HashMap<u64, oneshot::Sender<AdminResult>>>,
    /// Copies of the state, each until the one who waits for it takes it or gives up.
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

/// Something that looks at the state on the thread that drives the replica; it is given none if that is not possible.
type Job = Box<dyn FnOnce(Option<&Machine>) + Send>;

impl Replicated {
    /// Opens the data directory and begins to take part. Must be called inside a runtime.
    ///
    /// # Errors
    ///
    /// If the directory, the port or the credentials can not be used.
    pub async fn start(options: ClusterOptions, clock: Clock) -> Result<Arc<Self>, String> {
        let member = &options.member;
        let front = Self::new(member, options.dir.clone(), clock, Chance::System, unix_nanos());
        let transport = driver::start(&front, options).await?;
        *front.transport.lock() = Some(transport);
        Ok(front)
    }

    fn new(
        options: &MemberOptions,
        dir: std::path::PathBuf,
        clock: Clock,
        chance: Chance,
        first_fence: u64,
    ) -> Arc<Self> {
        Arc::new_cyclic(|front: &Weak<Self>| {
            let front = front.clone();
            let after_pass = move |may_wait| {
                if let Some(front) = front.upgrade() {
                    front.deliver(may_wait);
                    front.tell_growth();
                }
            };
            Self {
                clock,
                chance,
                first_fence,
                router: Router::new(),
                combiner: Combiner::new(after_pass),
                delivery: Delivery::new(),
                log_writer: LogWriter::default(),
                run: AtomicU32::new(0),
                addresses: Mutex::default(),
                last_session: AtomicU64::new(0),
                last_nameless: AtomicU32::new(0),
                view: Mutex::new(View { version: 1, ..View::default() }),
                identifies: AtomicBool::new(false),
                revision: AtomicU64::new(0),
                growth: watch::Sender::new(Revision(0)),
                jobs: Mutex::default(),
                admins: Mutex::default(),
                copies: Mutex::default(),
                dir,
                last_id: AtomicU64::new(0),
                pushes_dropped: AtomicU64::new(0),
                gauges: Gauges::default(),
                transport: Mutex::default(),
                fatal: Fatal::new(),
                decided: OnceLock::new(),
                failed: Notify::new(),
                node: options.node.clone(),
                witness: options.witness,
            }
        })
    }

    /// Where salts, secrets and seeds come from.
    pub(crate) fn chance(&self) -> &Chance {
        &self.chance
    }

    fn first_fence(&self) -> u64 {
        self.first_fence
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

    /// Whether this node is a witness: it keeps the log, but no state.
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

    /// See [`Engine::follow`](crate::Engine::follow).
    pub(crate) fn follow(&self) -> watch::Receiver<Revision> {
        self.growth.subscribe()
    }

    /// Tells those who follow that there are changes, while no lock of the replica is held.
    fn tell_growth(&self) {
        tell_growth(&self.growth, || Revision(self.revision.load(Ordering::Acquire)));
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
        self.ask_admin(self.next_id(), request).await
    }

    async fn ask_admin(&self, id: u64, request: AdminRequest) -> AdminResult {
        let told = self.post_admin(id, request.clone());
        let result = told.await.unwrap_or_else(|_| Err("this node is shutting down".into()));
        self.gauges.asked(&request, &result);
        result
    }

    /// Asks for a change of the cluster; what came of it is told later.
    fn post_admin(&self, id: u64, request: AdminRequest) -> oneshot::Receiver<AdminResult> {
        let (sender, receiver) = oneshot::channel();
        self.admins.lock().insert(id, sender);
        if self.fatal.get().is_none() {
            self.enqueue(Input::Admin { id, request });
        } else if let Some(sender) = self.admins.lock().remove(&id) {
            let _ = sender.send(Err(self.stopped_because()));
        }
        receiver
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
        let awaited = AwaitedCopy { front: self, id: self.next_id() };
        self.ask_admin(awaited.id, AdminRequest::Copy).await?;
        awaited.take().ok_or_else(|| "this node is shutting down".into())
    }

    pub(crate) fn hand_copy(&self, id: u64, copy: StateCopy) {
        // Locked before the look: whoever gives up from here on removes the copy when it is there.
        let mut copies = self.copies.lock();
        if self.admins.lock().get(&id).is_some_and(|sender| !sender.is_closed()) {
            copies.insert(id, copy);
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
        self.combiner.end();
        self.log_writer.wake();
        if let Some(transport) = self.transport.lock().take() {
            transport.stop();
        }
    }

    // ---- For connections ----

    pub(crate) fn open(&self, mailbox: Arc<dyn Mailbox>, label: Arc<str>) -> Attachment {
        let id = self.next_session().unwrap_or_else(|| {
            let number = self.last_nameless.fetch_add(1, Ordering::Relaxed);
            Incarnation(0).session(number)
        });
        self.router.open_as(id, 0, mailbox, label)
    }

    /// The id of a new session, which nobody had before. None while this node is no member yet, or if its incarnation
    /// has no more numbers: then the next incarnation is asked for.
    fn next_session(&self) -> Option<SessionId> {
        let next = |last: u64| {
            let is_left = last >> 32 != 0 && last & u64::from(u32::MAX) != u64::from(u32::MAX);
            is_left.then(|| last + 1)
        };
        match self.last_session.fetch_update(Ordering::AcqRel, Ordering::Acquire, next) {
            Ok(last) if bug(Bug::SessionReused) => Some(SessionId((last + 1) & !1)),
            Ok(last) => Some(SessionId(last + 1)),
            Err(0) => None,
            Err(last) => {
                self.enqueue(Input::RenewIncarnation(Incarnation::of(SessionId(last))));
                None
            }
        }
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
        if is_asked_about(&command) && !self.identify(by) {
            return self.too_much(keep);
        }
        let answered = !matches!(command, Command::Acknowledge(_) | Command::Cancel(_));
        let wait = answered.then(|| command.wait());
        let body = ProposalBody::Command(command);
        if !self.put(by, request, keep, body, wait, by.session.may_drive()) {
            return self.too_much(keep);
        }
        if answered {
            Submitted::Later(crate::memory::Place::ANY)
        } else {
            Submitted::Done(Outcome::Done)
        }
    }

    /// Tells the cluster who is behind a session, if that is not known. In the same batch as what follows, so it costs
    /// no time. False: there is too much to do already.
    fn identify(&self, by: &Attachment) -> bool {
        let session = &by.session;
        // Noted first: what is changed from now on is told with the next command.
        let is_known = session.is_identified() || !self.identifies.load(Ordering::Relaxed);
        if is_known || !session.set_identified(true) {
            return true;
        }
        let (name, reference) = {
            let state = session.state.lock();
            (Arc::clone(&state.label), state.reference.clone())
        };
        let name = &name.as_bytes()[..name.len().min(CLIENT_BYTES_MAX)];
        let reference = reference.as_deref().unwrap_or_default().as_bytes();
        let body = ProposalBody::Identify { name, reference };
        let is_put = self.put(by, RequestId(0), false, body, None, false);
        if !is_put {
            session.set_identified(false);
        }
        is_put
    }

    /// An action that is answered through the mailbox.
    pub(crate) fn act(
        &self,
        by: &Attachment,
        request: RequestId,
        body: ProposalBody<'_>,
    ) -> Submitted {
        if let Some(refused) = self.refuse(by) {
            return refused;
        }
        if matches!(body, ProposalBody::Keep { .. }) && !self.identify(by) {
            return self.too_much(false);
        }
        if !self.put(by, request, false, body, Some(Span::ZERO), by.session.may_drive()) {
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

    /// Why nothing can be done for a session, if so. A session that was opened before this node was a member gets its
    /// id here.
    fn refuse(&self, by: &Attachment) -> Option<Submitted> {
        if !by.is_current() {
            return Some(Submitted::Gone);
        }
        let id = by.id();
        if Incarnation::of(id) != Incarnation(0) {
            return None;
        }
        match self.next_session() {
            Some(next) => {
                self.router.rename(&by.session, id, next);
                None
            }
            None => Some(Submitted::Done(Outcome::Refused(Refusal::Unavailable))),
        }
    }

    pub(crate) fn cancel(&self, by: &Attachment, request: RequestId) {
        let body = ProposalBody::Command(Command::Cancel(command::Cancel { request }));
        self.put(by, RequestId(0), false, body, None, false);
    }

    pub(crate) fn undo(&self, outcome: &Outcome) {
        if outcome.gives() {
            let body = ProposalBody::Undo(outcome.clone());
            self.put_item(SessionId(0), 0, RequestId(0), false, body, None, false);
        }
    }

    pub(crate) fn query(&self, by: &Attachment, request: RequestId, query: Query<'_>) -> Submitted {
        if let Some(refused) = self.refuse(by) {
            return refused;
        }
        let (session, query) = (by.id(), query.into());
        let read = Input::Read { session, request, query };
        let is_put =
            if by.session.may_drive() { self.enqueue_and_drive(read) } else { self.enqueue(read) };
        if !is_put {
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
        // Before anybody finds the session gone, and takes back what it was granted: its client may come back for it.
        if was_used {
            if referenced {
                self.identify(by);
            }
            let body = ProposalBody::Close { orderly, referenced };
            self.put(by, RequestId(0), false, body, None, false);
        }
        if by.is_current() {
            by.session.state.lock().mailbox = None;
            self.router.remove(&by.session);
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
        let member = view.members.get(&Incarnation::of(id).raft_id())?;
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

    /// Looks at the state, on the replica's thread: as of now for the whole cluster, or as this node has it. None if
    /// that is not possible in time. Blocks.
    pub(crate) fn look<T: Send + 'static>(
        &self,
        linear: bool,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Option<T> {
        wait_for(&self.post_look(linear, look))
    }

    /// Looks at the state as this node has it, for no longer than a command would: whichever thread drives the replica
    /// next does it. None if that is not possible in time. Blocks.
    pub(crate) fn glance<T: Send + 'static>(
        &self,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Option<T> {
        wait_for(&self.post_job(|id| Input::Job { id, linear: false, brief: true }, look))
    }

    /// Asks for a look at the state; what it saw comes later.
    fn post_look<T: Send + 'static>(
        &self,
        linear: bool,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Receiver<Option<T>> {
        self.post_job(|id| Input::Job { id, linear, brief: false }, look)
    }

    fn post_job<T: Send + 'static>(
        &self,
        input: impl FnOnce(u64) -> Input,
        look: impl FnOnce(&Machine) -> T + Send + 'static,
    ) -> Receiver<Option<T>> {
        self.gauges.looks.fetch_add(1, Ordering::Relaxed);
        let (sender, receiver) = std::sync::mpsc::sync_channel(1);
        let id = self.next_id();
        let job: Job = Box::new(move |machine| {
            let _ = sender.send(machine.map(look));
        });
        self.jobs.lock().insert(id, job);
        self.enqueue(input(id));
        receiver
    }

    /// The number of a question to the replica.
    fn next_id(&self) -> u64 {
        self.last_id.fetch_add(1, Ordering::Relaxed) + 1
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

    /// False: there is too much to do already, and nothing will come of it. `may_drive`: the calling thread may drive
    /// the replica for it.
    fn put(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        body: ProposalBody<'_>,
        wait: Option<Span>,
        may_drive: bool,
    ) -> bool {
        let epoch = u32::try_from(by.epoch()).unwrap_or(u32::MAX);
        let is_put = self.put_item(by.id(), epoch, request, keep, body, wait, may_drive);
        if is_put {
            // A session that nobody but this node has heard of needs no end in the log.
            by.session.touch(0);
        }
        is_put
    }

    /// As [`Replicated::put`], for a session by its id. `may_drive`: the calling thread may drive the replica for it.
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of a proposal, and what becomes of it"
    )]
    fn put_item(
        &self,
        session: SessionId,
        epoch: u32,
        request: RequestId,
        keep: bool,
        body: ProposalBody<'_>,
        wait: Option<Span>,
        may_drive: bool,
    ) -> bool {
        let urgency = urgency(&body);
        let item = Proposal { session, epoch, request, keep, body };
        let put = |inputs: &mut Inputs| inputs.put_item(&item, wait, urgency);
        // While the log thread waits for the disk, what comes is left to it and goes into one entry.
        if may_drive && self.combiner.is_light() && !self.combiner.is_driver_expected() {
            self.combiner.enqueue_and_drive(put)
        } else {
            self.combiner.enqueue(put)
        }
    }

    // ---- Driving the replica ----

    /// Makes the calling thread the designated one of the combiner: it drives the replica before it sleeps, and is
    /// woken by `wake`.
    pub fn designate(&self, wake: impl Fn() + Send + Sync + 'static) {
        self.combiner.designate(wake);
    }

    /// Drives the replica if there is work for it. False: there is work again, and the designated thread may not sleep.
    pub fn before_sleep(&self) -> bool {
        self.combiner.before_sleep()
    }

    /// The designated thread does not sleep any more.
    pub fn after_sleep(&self) {
        self.combiner.after_sleep();
    }

    /// Whether there is work for the designated thread.
    pub fn has_work(&self) -> bool {
        self.combiner.has_work()
    }

    /// Leaves something to the thread that drives the replica next. False: there is too much already, and it is left
    /// out.
    pub(crate) fn enqueue(&self, input: Input) -> bool {
        self.combiner.enqueue(|inputs| inputs.put(input))
    }

    /// Drives the replica at once with something, if the load is light. False: there is too much already, and it is
    /// left out.
    pub(crate) fn enqueue_and_drive(&self, input: Input) -> bool {
        if self.combiner.is_light() {
            self.combiner.enqueue_and_drive(|inputs| inputs.put(input))
        } else {
            self.enqueue(input)
        }
    }

    /// Whether little is asked of the replica at a time.
    pub(super) fn is_light(&self) -> bool {
        self.combiner.is_light()
    }

    /// The log thread waits for the disk: what comes meanwhile goes into one entry afterwards.
    pub(super) fn syncing(&self) {
        self.combiner.expect_driver(true);
    }

    /// The log thread tells the replica what was written, and whether there is room again or no more. It drives the
    /// replica itself for what follows from that, so that no other thread must be woken for it. Under load the answers
    /// are left to the designated thread: the next sync begins while they are written.
    pub(super) fn written(&self, number: Option<u64>, room: Option<Room>) {
        let room = room.map(|room| Input::Room { low: room == Room::Low });
        let news = number.map(Input::Written).into_iter().chain(room);
        let put = |inputs: &mut Inputs| news.fold(true, |_, input| inputs.put(input));
        self.combiner.expect_driver(false);
        if self.is_light() || self.delivery.is_crowded() {
            self.combiner.enqueue_and_drive(put);
        } else {
            self.combiner.enqueue_and_drive_only(put);
        }
    }

    /// A snapshot was made and stored; none: there was no room for it, and the next one is tried later.
    pub fn snapshot_made(&self, made: Option<MadeSnapshot>) {
        self.enqueue(Input::Snapshot(made));
    }

    /// Obsolete files were removed: there may be room again.
    pub fn swept(&self) {
        self.log_writer.put([LogJob::Swept]);
    }

    pub(crate) fn is_over(&self) -> bool {
        self.combiner.is_over()
    }

    /// Waits for something to come before the replica takes part, `wait` at most. None: it is over.
    fn wait_for_work(&self, wait: Duration) -> Option<Inputs> {
        self.combiner.wait_for_work(wait)
    }

    /// Lets the thread look that waits for work before the replica takes part.
    fn wake_timer(&self) {
        self.combiner.wake_timer();
    }

    /// Lets the replica take part, and is the timer thread of the combiner until it is over.
    fn run(&self, driver: ReplicaDriver) {
        self.combiner.run(Box::new(driver), |due| self.clock.until(Timestamp(due)));
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

    /// This node is a member and begins an incarnation: sessions get their ids from it.
    pub(crate) fn begin_incarnation(&self, run: Incarnation) {
        self.last_session.store(run.session(0).0, Ordering::Release);
        self.run.store(run.0, Ordering::Release);
        self.announce_addresses();
    }

    /// Whether the node has begun an incarnation.
    fn has_incarnation(&self) -> bool {
        self.run.load(Ordering::Acquire) != 0
    }

    /// Where else clients find this node, for the others to know.
    pub fn set_addresses(&self, addresses: Addresses) {
        *self.addresses.lock() = addresses;
        if self.has_incarnation() {
            self.announce_addresses();
        }
    }

    fn announce_addresses(&self) {
        let addresses = self.addresses.lock().clone();
        if addresses != Addresses::default() {
            let body = ProposalBody::Addresses(addresses);
            self.put_item(SessionId(0), 0, RequestId(0), false, body, None, false);
        }
    }

    pub(crate) fn set_status(&self, status: Status) {
        self.view.lock().status = Some(status);
    }

    pub(super) fn set_members(&self, replica: &Replica) {
        let mut view = self.view.lock();
        view.set_members(replica);
        self.identifies.store(view.version >= version::IDENTIFIED, Ordering::Relaxed);
    }

    pub(super) fn admit(&self, peer: &Identity) -> Result<(), String> {
        self.view.lock().admit(peer)
    }

    pub(super) fn admit_known(&self, peer: &Identity) -> Result<(), String> {
        self.view.lock().admit_known(peer)
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
        self.combiner.end();
        self.log_writer.wake();
    }

    /// Sorts out the replica's events, under the combiner's lock: what is for clients becomes notices. True: the
    /// members have changed, or whom there is to talk to.
    fn route(
        &self,
        events: impl Iterator<Item = NodeEvent>,
        replica: &Replica,
        notices: &mut Vec<Notice>,
    ) -> bool {
        let mut members = false;
        for event in events {
            match event {
                NodeEvent::Machine(event) => {
                    members |= matches!(event, Event::Members | Event::PolicyChanged);
                    notices.extend(self.notice(event, replica.machine()));
                }
                NodeEvent::Reply { session, request, outcome, undo } => {
                    notices.push(Notice::Reply { session, request, outcome, undo });
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
                NodeEvent::Peers => members = true,
                NodeEvent::Skipped => {
                    let Some(store) = replica.machine().store() else { continue };
                    let sessions = self.router.all().into_iter().map(|session| session.id());
                    let listeners = sessions.filter(|&session| store.subscribes(session));
                    notices.extend(listeners.map(|session| Notice::Expel { session, epoch: None }));
                }
                NodeEvent::NewIncarnation(run) => {
                    self.begin_incarnation(run);
                    let sessions = self.router.all().into_iter().map(|session| session.id());
                    let is_old = |session: &SessionId| {
                        ![Incarnation(0), run].contains(&Incarnation::of(*session))
                    };
                    notices.extend(sessions.filter(is_old).map(|session| Notice::Cut { session }));
                }
            }
        }
        self.delivery.enqueue(notices);
        let revision = replica.machine().store().map_or(Revision(0), Store::revision);
        self.revision.store(revision.0, Ordering::Release);
        members
    }

    /// What is to be told of an event of the replicated state, if anything.
    fn notice(&self, event: Event, machine: &Machine) -> Option<Notice> {
        let run = Incarnation(self.run.load(Ordering::Acquire));
        match event {
            // Told by an event of the replica, which knows whose request it was.
            Event::Effect(Effect::Reply { .. }) => None,
            Event::Effect(Effect::Push { session, push, .. }) => {
                Some(Notice::Push { session, push })
            }
            Event::Effect(Effect::SessionEnded { session }) | Event::Kicked { session } => {
                Some(Notice::Expel { session, epoch: None })
            }
            Event::Attached { by, request, to } => {
                let to = to.zip(machine.store()).map(|((session, epoch), store)| AttachedTo {
                    session,
                    epoch,
                    last_request: store.last_request(session),
                });
                Some(Notice::Attached { by, request, to, is_own: Incarnation::of(by) == run })
            }
            Event::Gone { session, epoch, .. } => {
                Some(Notice::Expel { session, epoch: Some(epoch) })
            }
            Event::IncarnationStarted(_)
            | Event::IncarnationEnded(_)
            | Event::Members
            | Event::PolicyChanged
            | Event::Digest { .. } => None,
        }
    }

    // ---- Delivering ----

    /// Brings notices to the mailboxes of this node's clients, while no lock of the replica is held.
    fn deliver(&self, may_wait: bool) {
        self.delivery.run(may_wait, |notices| {
            let mut flushes = PendingFlushes::new();
            for notice in notices {
                match notice {
                    Notice::Reply { session, request, outcome, undo } => {
                        self.reply(session, request, outcome, undo, &mut flushes);
                    }
                    Notice::Push { session, push } => self.push(session, push, &mut flushes),
                    Notice::Expel { session, epoch } => self.expel(session, epoch, &mut flushes),
                    Notice::Attached { by, request, to, is_own } => {
                        self.attach(by, request, to, is_own, &mut flushes);
                    }
                    Notice::Cut { session } => self.cut(session, &mut flushes),
                }
            }
            flushes.run();
        });
    }

    /// The session is no longer its connection's.
    fn expel(&self, id: SessionId, epoch: Option<u32>, flushes: &mut PendingFlushes) {
        let Some(session) = self.router.get(id) else { return };
        let is_current = |epoch| session.epoch.load(Ordering::SeqCst) == u64::from(epoch);
        if !epoch.is_none_or(is_current) {
            return;
        }
        if let Some(mailbox) = session.state.lock().mailbox.take() {
            mailbox.close();
            flushes.add(&mailbox);
        }
    }

    /// The connection of a session ends because this node was out of touch with the others.
    fn cut(&self, id: SessionId, flushes: &mut PendingFlushes) {
        let Some(session) = self.router.get(id) else { return };
        if let Some(mailbox) = session.state.lock().mailbox.take() {
            mailbox.cut();
            flushes.add(&mailbox);
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
        let Some(mailbox) = &state.mailbox else { return };
        match mailbox.push(push) {
            Pushed::First => flushes.add(mailbox),
            Pushed::Urgent => {
                flushes.add_urgent(mailbox);
                drop(state);
                flushes.run();
            }
            Pushed::Behind | Pushed::Gone => {}
            Pushed::Full => {
                self.pushes_dropped.fetch_add(1, Ordering::Relaxed);
                mailbox.overflow();
                flushes.add(mailbox);
            }
        }
    }

    /// Gives a kept session back that nobody here has: it waits for its client again.
    fn leave(&self, id: SessionId, epoch: u64) {
        let epoch = u32::try_from(epoch).unwrap_or(u32::MAX);
        let body = ProposalBody::Close { orderly: false, referenced: false };
        self.put_item(id, epoch, RequestId(0), false, body, None, false);
    }

    fn attach(
        &self,
        by: SessionId,
        request: RequestId,
        to: Option<AttachedTo>,
        is_own: bool,
        flushes: &mut PendingFlushes,
    ) {
        if let Some(AttachedTo { session: id, epoch, .. }) = to
            && let Some(old) = self.router.get(id)
            && old.epoch.load(Ordering::SeqCst) < u64::from(epoch)
        {
            old.epoch.store(u64::from(epoch), Ordering::SeqCst);
            if let Some(mailbox) = old.state.lock().mailbox.take() {
                mailbox.hand_over();
                flushes.add(&mailbox);
            }
            self.router.remove(&old);
        }
        let Some(session) = self.router.get(by) else {
            if let Some(AttachedTo { session: id, epoch, .. }) = to
                && is_own
            {
                self.leave(id, u64::from(epoch));
            }
            return;
        };
        let outcome = match to {
            None => Outcome::Refused(Refusal::NotHeld),
            Some(AttachedTo { session: id, epoch, last_request }) => {
                let mut state = session.state.lock();
                if let Some(mailbox) = state.mailbox.clone() {
                    let label = Arc::clone(&state.label);
                    let attachment = self.router.open_as(id, u64::from(epoch), mailbox, label);
                    let attachment = Attachment { last_request, ..attachment };
                    attachment.session.touch(0);
                    // A kept session keeps the name that it has.
                    attachment.session.set_identified(true);
                    attachment.session.state.lock().secret = Some(SessionSecret([0; 16]));
                    state.attached = Some(attachment);
                }
                Outcome::Done
            }
        };
        self.reply(by, request, outcome, false, flushes);
    }
}

/// A copy of the state that somebody waits for. Whoever gives up leaves none behind: it is as large as the state.
struct AwaitedCopy<'a> {
    front: &'a Replicated,
    id: u64,
}

impl AwaitedCopy<'_> {
    fn take(&self) -> Option<StateCopy> {
        self.front.copies.lock().remove(&self.id)
    }
}

impl Drop for AwaitedCopy<'_> {
    fn drop(&mut self) {
        self.take();
    }
}

/// Whether a command can make its session one that people see: it holds, waits or listens then.
fn is_asked_about(command: &Command<'_>) -> bool {
    matches!(
        command,
        Command::Acquire(_)
            | Command::Enqueue(_)
            | Command::Pop(command::Pop { wait: Some(_), .. })
            | Command::BarrierWait(_)
            | Command::Subscribe(_)
    )
}

/// What a look at the state saw, if it was possible in time. Blocks.
fn wait_for<T>(seen: &Receiver<Option<T>>) -> Option<T> {
    seen.recv_timeout(Duration::from_secs(10)).ok().flatten()
}
