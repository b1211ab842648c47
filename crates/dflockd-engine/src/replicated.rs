//! The engine behind a Raft log, as connections see it.
//!
//! A command becomes an item in a queue, and its answer comes later, through the session's sink, when this node has
//! applied the entry with the item in it. The queue is emptied by the replica's thread
//! (`replica/driver.rs`), which also
//! brings the events back here.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use dflockd_core::{Command, Effect, Outcome, Push, Query, Refusal, RequestId, SessionId, Span};
use parking_lot::{Condvar, Mutex};
use tokio::sync::{Notify, oneshot};

use crate::clock::Clock;
use crate::memory::Submitted;
use crate::replica::admin::{AdminRequest, AdminResult};
use crate::replica::driver::{self, ClusterOptions, Fatal};
use crate::replica::machine::{Event, Machine};
use crate::replica::transport::{Credentials, Identity, Transport};
use crate::replica::types::{Action, Item, Member, Policy, RaftId, Run};
use crate::replica::{
    MadeSnapshot, NodeEvent, Outputs, OwnedQuery, Replica, Status, codec, grows, is_given,
};
use crate::router::{Attachment, Pokes, Pushed, Router, Session, SessionSecret, Sink};

/// A member of a cluster, for connections.
pub struct Replicated {
    clock: Clock,
    router: Router,
    inputs: Mutex<Inputs>,
    came: Condvar,
    run: AtomicU32,
    last_session: AtomicU32,
    view: Mutex<View>,
    jobs: Mutex<HashMap<u64, Job>>,
    admins: Mutex<HashMap<u64, oneshot::Sender<AdminResult>>>,
    last_id: AtomicU64,
    pushes_dropped: AtomicU64,
    transport: Mutex<Option<Arc<Transport>>>,
    fatal: Fatal,
    failed: Notify,
    node: String,
    witness: bool,
}

/// Something that looks at the state on the replica's thread; without one if that is not possible.
type Job = Box<dyn FnOnce(Option<&Machine>) + Send>;

/// What the replica's thread has to take.
#[derive(Default)]
pub(crate) struct Inputs {
    /// Items in the form of the log, one behind the other.
    items: Vec<u8>,
    heads: Vec<Head>,
    pub(crate) others: Vec<Input>,
    /// The thread sleeps.
    waiting: bool,
    stopped: bool,
}

struct Head {
    end: usize,
    session: SessionId,
    request: RequestId,
    keep: bool,
    wait: Option<Span>,
    grows: bool,
}

/// What is no client's command.
pub(crate) enum Input {
    Frame { from: RaftId, bytes: Bytes },
    Unreachable { peer: RaftId, refused: bool },
    Written(u64),
    Snapshot(Option<MadeSnapshot>),
    Room { low: bool },
    Read { session: SessionId, request: RequestId, query: OwnedQuery },
    Job { id: u64, linear: bool },
    Admin { id: u64, request: AdminRequest },
}

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
    last_raft_id: RaftId,
}

impl View {
    /// Where clients find the leader, if there is one.
    #[must_use]
    pub fn leader_addr(&self) -> Option<&str> {
        let leader = self.status?.leader?;
        self.members.get(&leader).map(|member| member.client_addr.as_str())
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
            came: Condvar::new(),
            run: AtomicU32::new(0),
            last_session: AtomicU32::new(0),
            view: Mutex::new(View {
                raft_id: 0,
                status: None,
                members: std::collections::BTreeMap::new(),
                voters: Vec::new(),
                learners: Vec::new(),
                policy: None,
                last_raft_id: 0,
            }),
            jobs: Mutex::default(),
            admins: Mutex::default(),
            last_id: AtomicU64::new(0),
            pushes_dropped: AtomicU64::new(0),
            transport: Mutex::default(),
            fatal: Fatal::new(),
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

    /// Whether this node leads.
    ///
    /// # Errors
    ///
    /// If not: where clients find who does, if that is known.
    pub fn leadership(&self) -> Result<(), Option<String>> {
        let view = self.view.lock();
        if view.is_leader() { Ok(()) } else { Err(view.leader_addr().map(str::to_owned)) }
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
        let (sender, receiver) = oneshot::channel();
        self.admins.lock().insert(id, sender);
        self.give(Input::Admin { id, request });
        receiver.await.unwrap_or_else(|_| Err("this node is shutting down".into()))
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
        self.inputs.lock().stopped = true;
        self.came.notify_all();
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
        let answered = !matches!(command, Command::Acknowledge { .. } | Command::Cancel { .. });
        let wait = answered.then(|| wait_of(&command));
        self.put(by, request, keep, Action::Command(command), wait);
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
        self.put(by, request, false, action, Some(Span::ZERO));
        Submitted::Later(crate::memory::Place::ANY)
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
        let action = Action::Command(Command::Cancel { request });
        self.put(by, RequestId(0), false, action, None);
    }

    pub(crate) fn undo(&self, outcome: &Outcome) {
        if is_given(outcome) {
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
        self.give(Input::Read { session, request, query });
        Submitted::Later(crate::memory::Place::ANY)
    }

    pub(crate) fn close(&self, by: &Attachment, orderly: bool, referenced: bool) {
        let was_used = by.session.is_touched();
        if by.is_current() {
            by.session.state.lock().sink = None;
            self.router.remove(&by.session);
        }
        if was_used {
            let action = Action::Close { orderly, referenced };
            self.put(by, RequestId(0), false, action, None);
        }
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

    fn put(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        action: Action<'_>,
        wait: Option<Span>,
    ) {
        by.session.touch(0);
        let epoch = u32::try_from(by.epoch()).unwrap_or(u32::MAX);
        self.put_item(by.id(), epoch, request, keep, action, wait);
    }

    fn put_item(
        &self,
        session: SessionId,
        epoch: u32,
        request: RequestId,
        keep: bool,
        action: Action<'_>,
        wait: Option<Span>,
    ) {
        let grows = grows(&action);
        let mut inputs = self.inputs.lock();
        codec::put_item(&mut inputs.items, &Item { session, epoch, request, keep, action });
        let end = inputs.items.len();
        inputs.heads.push(Head { end, session, request, keep, wait, grows });
        self.wake(&mut inputs);
    }

    // ---- For the replica's thread ----

    pub(crate) fn give(&self, input: Input) {
        let mut inputs = self.inputs.lock();
        inputs.others.push(input);
        self.wake(&mut inputs);
    }

    fn wake(&self, inputs: &mut Inputs) {
        if std::mem::take(&mut inputs.waiting) {
            self.came.notify_one();
        }
    }

    /// Waits for something to come, `wait` at most. None: it is over.
    pub(crate) fn take_inputs(&self, wait: Duration) -> Option<Inputs> {
        let mut inputs = self.inputs.lock();
        if inputs.heads.is_empty() && inputs.others.is_empty() && !inputs.stopped {
            inputs.waiting = true;
            self.came.wait_for(&mut inputs, wait);
            inputs.waiting = false;
        }
        if inputs.stopped || self.fatal.get().is_some() {
            return None;
        }
        Some(std::mem::take(&mut inputs))
    }

    pub(crate) fn feed(&self, inputs: Inputs, replica: &mut Replica, outputs: &mut Outputs) {
        let mut begin = 0;
        for head in inputs.heads {
            let bytes = &inputs.items[begin..head.end];
            begin = head.end;
            let Head { session, request, keep, wait, grows, .. } = head;
            let taken = replica.submit_encoded(bytes, session, request, keep, wait, grows);
            if !taken && wait.is_some() {
                // What is repeated may have had its effect before, through this node or another.
                let why = if keep { Refusal::Forgotten } else { Refusal::Unavailable };
                let outcome = Outcome::Refused(why);
                let effect = Effect::Reply { session, request, outcome };
                outputs.events.push(NodeEvent::Machine(Event::Effect(effect)));
            }
        }
        for input in inputs.others {
            match input {
                Input::Frame { from, bytes } => replica.handle_frame(from, bytes),
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
    }

    /// There is no state to look at.
    pub(crate) fn refuse_job(&self, id: u64) {
        if let Some(job) = self.jobs.lock().remove(&id) {
            job(None);
        }
    }

    pub(crate) fn begin_run(&self, run: Run) {
        self.run.store(run.0, Ordering::Release);
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
        self.failed.notify_waiters();
        self.failed.notify_one();
        self.came.notify_all();
    }

    /// Brings events to this node's clients. True: the members have changed. Whom there is to talk to goes to `meet`.
    pub(crate) fn route(
        &self,
        events: impl Iterator<Item = NodeEvent>,
        replica: &Replica,
        mut meet: impl FnMut(std::collections::BTreeMap<RaftId, Member>),
    ) -> bool {
        let mut pokes = Pokes::new();
        let mut members = false;
        for event in events {
            match event {
                NodeEvent::Machine(event) => {
                    members |= matches!(event, Event::Members | Event::PolicyChanged);
                    self.route_event(event, replica.machine(), &mut pokes);
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
                NodeEvent::Peers(members) => meet(members),
                NodeEvent::Skipped => {
                    let Some(store) = replica.machine().store() else { continue };
                    for session in self.router.all() {
                        if store.subscribes(session.id) {
                            self.expel(&session, &mut pokes);
                        }
                    }
                }
                NodeEvent::NewRun(run) => {
                    self.begin_run(run);
                    for session in self.router.all() {
                        self.expel(&session, &mut pokes);
                    }
                }
            }
        }
        pokes.run();
        members
    }

    fn route_event(&self, event: Event, machine: &Machine, pokes: &mut Pokes) {
        match event {
            Event::Effect(Effect::Reply { session, request, outcome }) => {
                // What was given and can not be told is taken back by the node that should have told it, and
                // by no other.
                let repeatable = machine.is_kept(session) && request.is_repeatable();
                let own = machine.home(session) == Some(Run(self.run.load(Ordering::Acquire)));
                self.reply(session, request, outcome, own && !repeatable, pokes);
            }
            Event::Effect(Effect::Push { session, push, .. }) => self.push(session, push, pokes),
            Event::Effect(Effect::SessionEnded { session }) => {
                if let Some(session) = self.router.get(session) {
                    self.expel(&session, pokes);
                }
            }
            Event::Attached { by, request, to } => self.attach(by, request, to, pokes),
            Event::Gone { session, epoch, .. } => {
                if let Some(session) = self.router.get(session)
                    && session.epoch.load(Ordering::SeqCst) == u64::from(epoch)
                {
                    self.expel(&session, pokes);
                }
            }
            Event::Kicked { session } => {
                if let Some(session) = self.router.get(session) {
                    self.expel(&session, pokes);
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
    fn expel(&self, session: &Session, pokes: &mut Pokes) {
        if let Some(sink) = session.state.lock().sink.take() {
            sink.close();
            pokes.add(&sink);
        }
    }

    /// Answers a request of a connection here. `undo`: what it gave is to be taken back if nobody is there.
    fn reply(
        &self,
        id: SessionId,
        request: RequestId,
        outcome: Outcome,
        undo: bool,
        pokes: &mut Pokes,
    ) {
        let Some(session) = self.router.get(id) else {
            // Its connection ended before the answer came.
            if undo {
                self.undo(&outcome);
            }
            return;
        };
        let state = session.state.lock();
        let told = match &state.sink {
            Some(sink) => match sink.reply(request, outcome.clone()) {
                Pushed::First | Pushed::Urgent => {
                    pokes.add(sink);
                    true
                }
                Pushed::Behind => true,
                Pushed::Full | Pushed::Gone => false,
            },
            None => false,
        };
        drop(state);
        if !told && undo {
            self.undo(&outcome);
        }
    }

    fn push(&self, id: SessionId, push: Push, pokes: &mut Pokes) {
        let Some(session) = self.router.get(id) else { return };
        let state = session.state.lock();
        let Some(sink) = &state.sink else { return };
        match sink.push(push) {
            Pushed::First => pokes.add(sink),
            Pushed::Urgent => {
                pokes.add_urgent(sink);
                let sink = Arc::clone(sink);
                drop(state);
                drop(sink);
                pokes.run();
            }
            Pushed::Behind | Pushed::Gone => {}
            Pushed::Full => {
                self.pushes_dropped.fetch_add(1, Ordering::Relaxed);
                sink.overflow();
                pokes.add(sink);
            }
        }
    }

    fn attach(
        &self,
        by: SessionId,
        request: RequestId,
        to: Option<(SessionId, u32)>,
        pokes: &mut Pokes,
    ) {
        if let Some((id, epoch)) = to
            && let Some(old) = self.router.get(id)
            && old.epoch.load(Ordering::SeqCst) < u64::from(epoch)
        {
            old.epoch.store(u64::from(epoch), Ordering::SeqCst);
            self.expel(&old, pokes);
            self.router.remove(&old);
        }
        let Some(session) = self.router.get(by) else { return };
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
        self.reply(by, request, outcome, false, pokes);
    }
}

/// How long a command may wait for its answer by its own will.
fn wait_of(command: &Command<'_>) -> Span {
    match *command {
        Command::Acquire { wait, .. }
        | Command::Wait { wait, .. }
        | Command::BarrierWait { wait, .. }
        | Command::Pop { wait: Some(wait), .. } => wait,
        Command::Pop { wait: None, .. }
        | Command::Enqueue { .. }
        | Command::Release { .. }
        | Command::Renew { .. }
        | Command::ForceRelease { .. }
        | Command::Add { .. }
        | Command::CounterSet { .. }
        | Command::KvSet { .. }
        | Command::KvDelete { .. }
        | Command::KvCompareAndSet { .. }
        | Command::Push { .. }
        | Command::Signal { .. }
        | Command::Subscribe(_)
        | Command::Unsubscribe(_)
        | Command::Cancel { .. }
        | Command::Acknowledge { .. }
        | Command::Undo(_)
        | Command::Tick
        | Command::NewTerm
        | Command::Detach { .. }
        | Command::Attach
        | Command::Orphan { .. }
        | Command::EndSession { .. } => Span::ZERO,
    }
}
