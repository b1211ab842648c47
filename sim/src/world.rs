//! One cluster with its clients, in one thread, on one heap of events.
//!
//! A node is a whole server but for sockets, files, clocks and threads ([`Process`]), with a log on a [`SimDisk`].
//! Clients speak the line protocol in bytes, or call the engine as the handlers of HTTP and gRPC do. Two phases: a
//! storm of faults in which nothing wrong may happen, then calm in which the right things must.

mod exchange;
mod new_cluster;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{
    Command, Fence, Limits, Outcome, Push, Refusal, RequestId, SessionId, Span, Timestamp, command,
};
use dflockd_engine::stepped::{self, Stepped};
use dflockd_engine::transport::Lane;
use dflockd_engine::{Chance, Clock, FirstMember, Formation, MemberOptions};
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::codec;
use dflockd_replica::disk::Disk;
use dflockd_replica::log::{LogOptions, write_snapshot};
use dflockd_replica::types::{AutoRelease, Member, MemberChange, Policy, RaftId};
use dflockd_replica::{MadeSnapshot, Replica, SnapshotJob, Status, version};
use dflockd_wire::{ErrorCode, Push as PushLine};
use raft::eraftpb::{EntryType, HardState};
use tokio::sync::oneshot;

use self::exchange::Exchange;
use self::new_cluster::Disasters;
use crate::disk::SimDisk;
use crate::history::{Asked, End, History};
use crate::invariants::client_exclusion::Beliefs;
use crate::invariants::durable::Durable;
use crate::invariants::idle::Idle;
use crate::invariants::raft_safety::Leaders;
use crate::invariants::{Broken, answers, forms, quorum, totals};
use crate::line_client::{self, Face, Heard, LineLink};
use crate::net::Net;
use crate::op::Op;
use crate::oracle::{self, Oracle};
use crate::plan::{Fault, MS, Plan, SEC};
use crate::process::{Arrival, Output, Process, Surroundings, Told};
use crate::rng::Rng;
use crate::workload::{self, Client, Want};

const GRACE: u64 = 3 * SEC;

/// How long clients wait for the answer to a greeting.
const GREETING_PATIENCE: u64 = 8 * SEC;

/// What came of a run.
#[derive(Clone, Debug)]
pub struct Report {
    /// Of everything that happened, in order.
    pub hash: u32,
    /// What was broken, and when.
    pub broken: Option<(u64, Broken)>,
    /// Simulated time.
    pub simulated: u64,
    /// Committed entries.
    pub entries: u64,
    /// Requests that were answered.
    pub answered: u64,
    /// Those of them that an order was found for.
    pub ordered: u64,
    /// Terms that had a leader.
    pub terms: usize,
    /// The last things that happened.
    pub trace: Vec<String>,
}

struct Scheduled {
    at: u64,
    serial: u64,
    /// Boxed, because the heap moves its elements about.
    event: Box<Event>,
}

impl PartialEq for Scheduled {
    fn eq(&self, other: &Self) -> bool {
        self.serial == other.serial
    }
}
impl Eq for Scheduled {}
impl PartialOrd for Scheduled {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Scheduled {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.serial).cmp(&(other.at, other.serial))
    }
}

enum Event {
    /// A node looks at what came.
    Wake(RaftId, u64),
    /// Something comes to a life of a node.
    Arrive(RaftId, u64, Arrival),
    /// A sync is done: position on the disk, and what is durable then.
    Synced(RaftId, u64, usize, Durable),
    /// A snapshot is made.
    Snapshot(RaftId, u64, SnapshotJob),
    /// And stored.
    Stored(RaftId, u64, MadeSnapshot, usize),
    /// Obsolete files go.
    Sweep(RaftId, u64, VecDeque<String>),
    /// An operator asks.
    Ask(RaftId, u64, u64, AdminRequest),
    /// A node that shuts down is out of patience.
    Stop(RaftId, u64),
    Start(RaftId),
    Client(usize),
    /// For a client, over a connection, by a node that had applied so much.
    Tell(usize, u64, Told, u64),
    Fault,
    /// A new cluster gets more members.
    Grow,
    /// Members are exchanged, step by step.
    Exchange,
    /// A node is killed or told to end at this moment of its life.
    Kill(RaftId, u64, bool),
    Drain(RaftId, u64),
    Heal,
    /// The cluster must be well.
    Settled,
    Silence,
    End,
}

struct Node {
    id: RaftId,
    name: String,
    witness: bool,
    /// It began with the cluster, and was not added later.
    first: bool,
    disk: SimDisk,
    ppm: i64,
    /// How often it was started in the simulation; what was meant for another life is dropped.
    life: u64,
    live: Option<Box<Live>>,
    /// The newest version of the log that its last program read; 0 before the first.
    program: u32,
    paused_until: u64,
    /// When the stall ends that its process has had in the middle of its last step. The rest of the step has been
    /// computed, with a clock that had gone on, so the process neither runs nor ends before.
    stall_ends_at: u64,
    durable: Durable,
    /// It will not come back.
    gone: bool,
    full: bool,
    slow_until: u64,
    stalled_until: u64,
    wake_at: u64,
    idle: Idle,
}

struct Live {
    process: Rc<Process>,
    /// The log as it was handed to the disk.
    written: Durable,
    applied: u64,
    /// When the log thread looks for room at the latest.
    room_at: u64,
    /// What operators wait for here.
    admins: Vec<(u64, oneshot::Receiver<AdminResult>)>,
    /// Whose frames came since the last turn, and who was heard when.
    senders: Vec<RaftId>,
    heard: quorum::Heard,
    /// The last entry that was looked at for changes of the membership.
    looked_at: u64,
}

/// A connection, as the world knows it.
struct Conn {
    client: usize,
    /// Nothing that was sent before arrives later.
    last_at: u64,
    /// Its session, as its node says.
    session: Option<SessionId>,
    /// The one before it.
    session_before: Option<SessionId>,
    /// Pushes that the session has had.
    pushes: usize,
    opened_at: u64,
    /// When the last bytes of the client arrive, so that the next come later.
    sent_until: u64,
    /// By which session and number the engine knows its requests, if they have no numbers of their own.
    known: BTreeMap<usize, (SessionId, RequestId)>,
    /// The line protocol, if that is what it speaks.
    line: Option<LineLink>,
}

/// Everything.
pub struct World {
    plan: Plan,
    now: u64,
    serial: u64,
    heap: BinaryHeap<Reverse<Scheduled>>,
    net: Net,
    disk_rng: Rng,
    fault_rng: Rng,
    work_rng: Rng,
    nodes: BTreeMap<RaftId, Node>,
    clients: Vec<Client>,
    history: History,
    oracle: Oracle,
    beliefs: Beliefs,
    leaders: Leaders,
    conns: BTreeMap<u64, Conn>,
    peers: Vec<FirstMember>,
    /// The newest version that the next node to start reads.
    program: u32,
    /// An operator has asked for the newest version.
    is_finalized: bool,
    hash: crc32fast::Hasher,
    broken: Option<(u64, Broken)>,
    trace: VecDeque<String>,
    next_conn: u64,
    next_admin: u64,
    /// What the admin wants in the end.
    admin: Membership,
    /// Members that somebody wanted removed whatever comes of it.
    forced: BTreeSet<String>,
    storm: bool,
    calm: bool,
    over: bool,
    /// How often the end may be put off because a member has not heard of the last entry yet.
    looks_left: u32,
    answered: u64,
    rotten: bool,
    /// Sessions and holds that somebody is about to end: no client rule protects them.
    doomed: BTreeSet<u64>,
    disasters: Disasters,
    exchange: Exchange,
    /// When requests are torn, and where.
    torn_rng: Rng,
    verbose: bool,
}

/// A change of the membership under way.
enum Membership {
    Idle,
    Adding(u64, String, bool),
    Promoting(u64),
    Removing(u64),
}

impl World {
    /// The world of a plan.
    #[must_use]
    pub fn new(plan: Plan, verbose: bool) -> Self {
        let mut clocks = Rng::new(plan.seed, 4);
        let mut drift = || {
            let span = plan.drift_ppm * 2 + 1;
            i64::try_from(clocks.below(span)).expect("small")
                - i64::try_from(plan.drift_ppm).expect("small")
        };
        let mut nodes = BTreeMap::new();
        let mut peers = Vec::new();
        for id in 1..=plan.voters {
            let witness = plan.witness && id == plan.voters;
            let name = format!("n{id}");
            peers.push((name.clone(), name.clone(), name.clone()));
            nodes.insert(id, Node::new(id, name, witness, true, drift()));
        }
        let keys = workload::value_keys(&plan);
        let oracle = Oracle::new(&stepped::no_state(), keys, plan.lease_min, GRACE);
        let mut faces = Rng::new(plan.seed, 11);
        let clients =
            (0..plan.clients).map(|id| Client::new(id, drift(), *faces.pick(&plan.faces)));
        let clients = clients.collect();
        let mut world = Self {
            now: SEC,
            serial: 0,
            heap: BinaryHeap::new(),
            net: Net::new(&plan),
            disk_rng: Rng::new(plan.seed, 3),
            fault_rng: Rng::new(plan.seed, 5),
            work_rng: Rng::new(plan.seed, 6),
            nodes,
            clients,
            history: History::default(),
            oracle,
            beliefs: Beliefs::default(),
            leaders: Leaders::default(),
            conns: BTreeMap::new(),
            peers,
            program: version::NEWEST,
            is_finalized: false,
            hash: crc32fast::Hasher::new(),
            broken: None,
            trace: VecDeque::new(),
            next_conn: 0,
            next_admin: 0,
            admin: Membership::Idle,
            forced: BTreeSet::new(),
            storm: true,
            calm: false,
            over: false,
            looks_left: 3,
            answered: 0,
            rotten: false,
            doomed: BTreeSet::new(),
            disasters: Disasters::default(),
            exchange: Exchange::default(),
            torn_rng: Rng::new(plan.seed, 13),
            verbose,
            plan,
        };
        for id in 1..=world.plan.voters {
            let delay = world.fault_rng.below(200 * MS);
            world.schedule(delay, Event::Start(id));
        }
        for client in 0..world.clients.len() {
            let delay = world.work_rng.below(SEC);
            world.schedule(delay, Event::Client(client));
        }
        let gap = world.plan.fault_gap;
        world.schedule(gap, Event::Fault);
        if world.plan.exchanges() {
            world.schedule(2 * SEC * world.plan.pace, Event::Exchange);
        }
        let storm = world.plan.storm;
        world.schedule(storm, Event::Heal);
        let Plan { settle, calm, drain, .. } = world.plan;
        world.schedule(storm + settle, Event::Settled);
        world.schedule(storm + settle + calm, Event::Silence);
        world.schedule(storm + settle + calm + drain, Event::End);
        world
    }

    /// Lets it all happen.
    #[must_use]
    pub fn run(mut self) -> Report {
        while !self.over && self.broken.is_none() {
            let Some(Reverse(Scheduled { at, event, .. })) = self.heap.pop() else { break };
            self.now = at;
            self.handle(*event);
        }
        let ordered = self.disasters.ordered + self.put_in_order();
        Report {
            hash: self.hash.finalize(),
            broken: self.broken,
            simulated: self.now,
            entries: self.oracle.last(),
            answered: self.answered,
            ordered,
            terms: self.disasters.terms + self.leaders.count(),
            trace: self.trace.into(),
        }
    }

    fn schedule(&mut self, delay: u64, event: Event) {
        self.serial += 1;
        let at = self.now + delay;
        self.heap.push(Reverse(Scheduled { at, serial: self.serial, event: Box::new(event) }));
    }

    fn note(&mut self, what: impl FnOnce() -> String) {
        let line = format!("{:>12.6} {}", self.now as f64 / 1e9, what());
        self.hash.update(line.as_bytes());
        if self.verbose {
            tracing::info!("{line}");
        }
        if self.trace.len() >= 400 {
            self.trace.pop_front();
        }
        self.trace.push_back(line);
    }

    fn check(&mut self, result: Result<(), Broken>) {
        if let Err(broken) = result
            && self.broken.is_none()
        {
            self.note(|| format!("BROKEN {broken:?}"));
            self.broken = Some((self.now, broken));
        }
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Wake(id, life) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life && node.live.is_some() && node.wake_at <= self.now {
                    if node.paused_until > self.now {
                        let delay = node.paused_until - self.now;
                        node.wake_at = node.paused_until;
                        self.schedule(delay, Event::Wake(id, life));
                    } else {
                        self.turn(id);
                    }
                }
            }
            Event::Arrive(id, life, input) => self.arrive(id, life, input),
            Event::Synced(id, life, position, durable) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life && node.live.is_some() {
                    node.disk.commit(position);
                    node.durable = durable;
                    self.arrive(id, life, Arrival::Synced);
                }
            }
            Event::Snapshot(id, life, job) => self.make_snapshot(id, life, job),
            Event::Stored(id, life, made, position) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life && node.live.is_some() {
                    node.disk.commit(position);
                    self.arrive(id, life, Arrival::Made(Some(made)));
                }
            }
            Event::Sweep(id, life, files) => self.sweep(id, life, &files),
            Event::Ask(id, life, number, request) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life
                    && let Some(live) = &mut node.live
                {
                    live.admins.push((number, live.process.member.admin(request)));
                    self.wake_soon(id);
                }
            }
            Event::Stop(id, life) => {
                if self.nodes[&id].life == life {
                    let back = self.fault_rng.between(10 * MS, 2 * SEC);
                    self.crash(id, false, back);
                }
            }
            Event::Start(id) => self.start(id),
            Event::Client(client) => self.client_turn(client),
            Event::Tell(client, conn, told, applied) => self.tell(client, conn, told, applied),
            Event::Fault => self.fault(),
            Event::Grow => self.grow(),
            Event::Exchange => self.exchange(),
            Event::Kill(id, life, power) => {
                if self.nodes[&id].life == life {
                    let back = self.fault_rng.between(MS, SEC);
                    self.crash(id, power, back);
                }
            }
            Event::Drain(id, life) => {
                if self.nodes[&id].life == life {
                    self.drain(id);
                }
            }
            Event::Heal => self.heal(),
            Event::Settled => self.settled(),
            Event::Silence => {
                for client in 0..self.clients.len() {
                    self.clients[client].dead = true;
                }
                self.note(|| "clients fall silent".into());
            }
            Event::End => self.end(),
        }
    }

    // ---- Nodes ----

    fn start(&mut self, id: RaftId) {
        let now = self.now;
        self.choose_program();
        let node = self.nodes.get_mut(&id).expect("known");
        if node.gone || node.live.is_some() {
            return;
        }
        node.program = self.program;
        node.life += 1;
        let seed = self.plan.seed ^ (id << 40) ^ (node.life << 48);
        let clock = Clock::manual();
        clock.advance(Span(node.local(now).0));
        let options = MemberOptions {
            node: node.name.clone(),
            peer_addr: node.name.clone(),
            client_addr: node.name.clone(),
            formation: if node.first {
                Formation::Static(self.peers.clone())
            } else {
                Formation::Join
            },
            witness: node.witness,
            policy: Policy {
                limits: Limits {
                    failover_grace: Span(GRACE),
                    events_max: 64,
                    results_max: 64,
                    idle_max: Span(5 * self.plan.gc_interval),
                    gc_interval: Span(self.plan.gc_interval),
                    default_lease: if self.plan.begins_anew() {
                        Span::from_secs(1)
                    } else {
                        Limits::default().default_lease
                    },
                    ..Limits::default()
                },
                auto_release: self.plan.auto_release,
                orphan_ttl: Span::ZERO,
            },
            election_timeout: Duration::from_nanos(self.plan.election),
            heartbeat_interval: Duration::from_nanos(self.plan.election / 10),
            snapshot_entries: self.plan.snapshot_entries,
            version: self.program,
        };
        let log_options = LogOptions { segment_bytes: self.plan.segment_bytes };
        let surroundings = Surroundings::new();
        let mut durable = Ok(());
        let mut written = Durable::default();
        let mut found = (0, false);
        let started = Stepped::start(
            options,
            node.disk.clone(),
            log_options,
            clock,
            Chance::seeded(seed),
            1000,
            |_| surroundings.host(),
            |recovered| {
                durable = node.durable.check(recovered);
                written = Durable {
                    hard_state: recovered.hard_state.clone(),
                    last: recovered
                        .entries
                        .last()
                        .map_or((0, 0), |entry| (entry.index, entry.term)),
                };
                let snapshot = recovered.snapshot.as_ref();
                found = (snapshot.map_or(0, |snapshot| snapshot.metadata.index), recovered.cut);
            },
        );
        let member = match started {
            Ok(member) => member,
            Err(why) => {
                // A full disk, or one that failed its last sync while nobody looked.
                let is_passing = node.disk.is_sick();
                node.disk.crash(false, &mut self.disk_rng);
                if is_passing {
                    self.schedule(SEC, Event::Start(id));
                } else if self.rotten {
                    node.gone = true;
                    self.note(|| format!("n{id} refuses to start: {why}"));
                } else {
                    let what = format!("n{id} does not start: {why}");
                    self.check(Err(Broken::new("recovery", what)));
                }
                return;
            }
        };
        let (applied, cut) = found;
        let is_hurried = self.plan.has(Fault::Starts) && self.storm && self.fault_rng.chance(300);
        let hurry = if is_hurried { self.fault_rng.below(3) } else { u64::MAX };
        if hurry == 0 {
            // It ends before all that it has done to its disk has happened.
            let power = self.fault_rng.chance(500);
            node.disk.crash(power, &mut self.disk_rng);
            self.note(|| format!("n{id} is killed while it starts, power {power}"));
            let back = self.fault_rng.between(MS, SEC);
            return self.schedule(back, Event::Start(id));
        }
        node.disk.commit(node.disk.position());
        node.durable = written.clone();
        let rng = Rng::new(seed, 12);
        let process = Process::new(member, &surroundings, rng, self.plan.between);
        node.live = Some(Box::new(Live {
            process,
            written,
            applied,
            room_at: now,
            admins: Vec::new(),
            senders: Vec::new(),
            heard: quorum::Heard::default(),
            looked_at: 0,
        }));
        (node.paused_until, node.stall_ends_at) = (0, 0);
        if !self.rotten {
            self.check(durable);
        }
        self.note(|| format!("n{id} starts, snapshot {applied}, cut {cut}"));
        self.check_former(id);
        self.watch_beginning(id);
        if is_hurried {
            let (life, power) = (self.nodes[&id].life, self.fault_rng.chance(500));
            let delay = self.fault_rng.below(300 * MS);
            let end =
                if hurry == 1 { Event::Kill(id, life, power) } else { Event::Drain(id, life) };
            self.schedule(delay, end);
        }
        self.turn(id);
    }

    /// A first member dials the others. Whoever knows all of them begins the cluster.
    fn meet_first_members(&mut self, id: RaftId) {
        let met: Vec<(RaftId, Rc<Process>)> = self
            .nodes
            .values()
            .filter(|node| node.first && node.stall_ends_at <= self.now)
            .filter(|node| node.id == id || node.paused_until <= self.now)
            .filter(|node| {
                node.id == id
                    || !self.net.is_cut(id, node.id, self.now)
                        && !self.net.is_cut(node.id, id, self.now)
            })
            .filter_map(|node| Some((node.id, Rc::clone(&node.live.as_ref()?.process))))
            .collect();
        let Some((_, process)) = met.iter().find(|(met, _)| *met == id) else { return };
        for (_, other) in met.iter().filter(|(other, _)| *other != id) {
            // Who is there is all that is of interest.
            let _ = other.member.meets(&process.member);
        }
        for (met, process) in &met {
            self.form(*met, process);
        }
    }

    /// A first member that knows all others begins, with what is on its disk then.
    fn form(&mut self, id: RaftId, process: &Process) {
        if !process.member.is_forming() {
            return;
        }
        process.member.form();
        let node = self.nodes.get_mut(&id).expect("known");
        if let Some(fatal) = process.member.fatal()
            && node.disk.is_sick()
        {
            self.note(|| format!("n{id} ends: {fatal}"));
            return self.crash(id, false, SEC);
        }
        if process.member.is_forming() {
            return;
        }
        node.disk.commit(node.disk.position());
        if let Some(live) = &mut node.live {
            live.written.hard_state = HardState { term: 1, commit: 1, ..HardState::default() };
            live.applied = 1;
            node.durable = live.written.clone();
        }
        self.note(|| format!("n{id} knows all first members"));
        self.watch_beginning(id);
        self.wake_soon(id);
    }

    /// Takes the state that the cluster begins with from the first member that begins. All data directories are known
    /// in it, so that a cluster of the same list has another id.
    fn watch_beginning(&mut self, id: RaftId) {
        if !self.oracle.machine().members().is_empty() {
            return;
        }
        let state = self.nodes[&id].with_replica(|replica| replica.machine().snapshot());
        let Some(state) = state else { return };
        self.oracle.begin(&state);
        let machine = self.oracle.machine();
        let are_known = machine.members().values().all(|member| member.disk.is_some());
        if !are_known || machine.cluster() == stepped::list_id(&self.peers) {
            let what = "the cluster begins with an id that others of the same list have";
            self.check(Err(Broken::new("cluster-id", what)));
        }
    }

    /// Which version of the log the next node that starts can read: while the cluster is upgraded, the newest or the
    /// one before, until an operator has asked for the newest. From then on the log may have it at any time, and a
    /// server that can not read it stops, as it says. So may that of a new cluster whose members have all said that
    /// they read it.
    fn choose_program(&mut self) {
        let is_upgrading = self.plan.has(Fault::Upgrade) && self.storm;
        let is_agreed = self.oracle.machine().version() >= version::NEWEST
            || self.nodes.values().all(|node| node.program == version::NEWEST);
        let may_be_old = is_upgrading && !is_agreed && !self.is_finalized;
        let is_old = may_be_old && self.fault_rng.chance(500);
        self.program = if is_old { version::NEWEST - 1 } else { version::NEWEST };
    }

    /// The process of a node ends, or is about to: after the stall that it is in.
    fn crash(&mut self, id: RaftId, power: bool, back_in: u64) {
        let node = self.nodes.get_mut(&id).expect("known");
        if node.live.is_some() && node.stall_ends_at > self.now {
            let (life, delay) = (node.life, node.stall_ends_at - self.now);
            return self.schedule(delay, Event::Kill(id, life, power));
        }
        let Some(live) = node.live.take() else { return };
        node.life += 1;
        node.disk.crash(power, &mut self.disk_rng);
        let conns = live.process.connections();
        drop(live);
        self.note(|| format!("n{id} crashes, power {power}"));
        for conn in conns {
            let delay = self.work_rng.between(MS, if power { 3 * SEC } else { 50 * MS });
            self.send_client(conn, Told::Closed, delay);
        }
        if !power {
            let others: Vec<RaftId> =
                self.nodes.keys().copied().filter(|&other| other != id).collect();
            for other in others {
                if !self.net.is_cut(id, other, self.now) {
                    let delay = self.net.rng().between(MS, 20 * MS);
                    let life = self.nodes[&other].life;
                    let gone = Arrival::Unreachable(id, true);
                    self.schedule(delay, Event::Arrive(other, life, gone));
                }
            }
        }
        self.schedule(back_in, Event::Start(id));
    }

    fn arrive(&mut self, id: RaftId, life: u64, arrival: Arrival) {
        let Some(node) = self.nodes.get(&id) else { return };
        if node.life != life {
            return;
        }
        let Some(live) = &node.live else { return };
        let process = Rc::clone(&live.process);
        if let Arrival::Frame(from, ..) = &arrival {
            let met = match self.nodes.get(from).and_then(|node| node.live.as_ref()) {
                Some(sender) => process.member.meets(&sender.process.member),
                // What a node that has ended had sent comes by a connection. A node without a cluster has none.
                None if process.member.has_cluster() => Ok(()),
                None => Err("they have not met".into()),
            };
            if let Err(why) = met {
                let from = *from;
                return self.note(|| format!("n{id} does not talk to n{from}: {why}"));
            }
        }
        if let Arrival::Frame(from, ..) = &arrival
            && !self.oracle.machine().members().contains_key(from)
        {
            let knows = process.member.with_replica(|replica| {
                let machine = replica.machine();
                machine.was_removed(*from) && !machine.members().is_empty()
            });
            let is_heard = self.nodes.get(from).is_some_and(|sender| sender.live.is_some());
            if knows == Some(true) && is_heard {
                let what = format!("n{id} listens to n{from}, which it knows was removed");
                return self.check(Err(Broken::new("removed", what)));
            }
        }
        if let Arrival::Frame(from, ..) = &arrival
            && let Some(live) = self.nodes.get_mut(&id).and_then(|node| node.live.as_mut())
        {
            live.senders.push(*from);
        }
        if let Arrival::Ask(conn, ..) = &arrival {
            let session = process.session_of(*conn);
            self.note_session(*conn, session);
        }
        process.arrive(arrival);
        self.wake_soon(id);
    }

    /// Several things often come before a thread looks.
    fn wake_soon(&mut self, id: RaftId) {
        let delay = self.net.rng().below(30_000);
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        let at = (now + delay).max(node.paused_until);
        let life = node.life;
        if at < node.wake_at || node.wake_at <= now {
            node.wake_at = at;
            self.schedule(at - now, Event::Wake(id, life));
        }
    }

    /// The threads of a node do what there is to do.
    fn turn(&mut self, id: RaftId) {
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        let local = node.local(now);
        let Some(live) = &mut node.live else { return };
        let process = Rc::clone(&live.process);
        let has_arrivals = process.has_arrivals();
        let idle = if has_arrivals { Ok(()) } else { node.idle.turn(id, now) };
        for from in live.senders.drain(..) {
            live.heard.frame(from, now);
        }
        process.set_time(local);
        let outputs = process.run();
        let stalled = process.stalled();
        if stalled > 0 {
            node.stall_ends_at = now + stalled;
            node.paused_until = node.paused_until.max(node.stall_ends_at);
            self.note(|| format!("n{id} stalled for {} ms in the middle of a step", stalled / MS));
        }
        self.check(process.check_wakeups());
        self.check(idle);
        if has_arrivals || !outputs.is_empty() {
            // Nothing has become of connections otherwise.
            self.check(process.check_connections());
            self.note_requests(id);
        }
        self.check_proposed(id);
        self.observe(id);
        if self.broken.is_some() {
            return;
        }
        self.carry_out(id, outputs);
        let failed = process.take_log_error().is_some() || !self.write(id);
        self.tell_operators(id);
        self.go_on_with_backup(id);
        if let Some(fatal) = process.member.fatal() {
            let removed = fatal.contains("removed from the cluster");
            self.nodes.get_mut(&id).expect("known").gone = removed;
            if !removed && !self.rotten {
                return self.check(Err(Broken::new("fatal", format!("n{id}: {fatal}"))));
            }
            self.note(|| format!("n{id} ends: {fatal}"));
            return self.crash(id, false, 100 * MS);
        }
        if failed {
            self.note(|| format!("the disk of n{id} fails"));
            let back = self.fault_rng.between(100 * MS, 3 * SEC);
            return self.crash(id, false, back);
        }
        if process.is_drained() {
            let back = self.fault_rng.between(10 * MS, 2 * SEC);
            return self.crash(id, false, back);
        }
        if process.member.is_forming() {
            self.meet_first_members(id);
        }
        self.plan_wake(id);
    }

    /// Looks at the changes of the membership that a leader begins, and that nobody has forced.
    fn check_proposed(&mut self, id: RaftId) {
        let Some(live) = &self.nodes[&id].live else { return };
        let (process, looked_at) = (Rc::clone(&live.process), live.looked_at);
        let members = self.oracle.machine().members();
        let seen = process.member.with_replica(|replica| {
            let (status, last) = (replica.status(), replica.last_index());
            let proposed = replica.log_entries(looked_at + 1, last).filter(|entry| {
                status.is_leader()
                    && entry.term == status.term
                    && entry.entry_type != EntryType::EntryNormal
            });
            for entry in proposed {
                let Ok(change) = codec::decode_member_change(&entry.context) else { continue };
                let (MemberChange::Add { raft_id, .. }
                | MemberChange::Promote { raft_id }
                | MemberChange::Remove { raft_id }) = &change;
                if members.get(raft_id).is_none_or(|it| !self.forced.contains(&it.node)) {
                    let voters = replica.conf_state().voters;
                    live.heard.check(id, &change, voters, self.now, self.plan.election)?;
                }
            }
            Ok(last)
        });
        match seen {
            Some(Ok(last)) => {
                let live = self.nodes.get_mut(&id).and_then(|node| node.live.as_mut());
                live.expect("it just ran").looked_at = last;
            }
            Some(Err(broken)) => self.check(Err(broken)),
            None => {}
        }
    }

    fn plan_wake(&mut self, id: RaftId) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(live) = &node.live else { return };
        let deadline = live.process.next_deadline();
        let mut at = node.when(deadline, now).max(now + 1000).max(node.paused_until);
        if deadline > node.local(now) {
            // Where nothing is to be done at once, threads may wake late.
            at = at.max(now + self.plan.drowsy);
        }
        let life = node.life;
        if at < node.wake_at || node.wake_at <= now {
            node.wake_at = at;
            self.schedule(at - now, Event::Wake(id, life));
        }
    }

    /// The requests that a client has under way on a connection were sent in this session.
    fn note_session(&mut self, conn: u64, session: Option<SessionId>) {
        let Some(known) = self.conns.get(&conn) else { return };
        let client = &self.clients[known.client];
        if client.link.is_none_or(|(link, _)| link != conn) || client.is_attaching() {
            return;
        }
        for (place, _) in client.open.values() {
            let asked = &mut self.history.asked[*place];
            if session.is_some() && !matches!(asked.op, Op::Attach { .. }) {
                asked.session = session;
            }
        }
    }

    /// Which sessions of a node the requests on its connections belong to.
    fn note_requests(&mut self, id: RaftId) {
        let Some(live) = &self.nodes[&id].live else { return };
        let process = Rc::clone(&live.process);
        for conn in process.connections() {
            self.note_session(conn, process.session_of(conn));
        }
    }

    /// Looks at what a node has applied and what it is.
    fn observe(&mut self, id: RaftId) {
        let node = &self.nodes[&id];
        let Some(live) = &node.live else { return };
        let (process, from) = (Rc::clone(&live.process), live.applied + 1);
        let (leaders, oracle) = (&mut self.leaders, &mut self.oracle);
        let witness = node.witness;
        // Each clock may be off by the drift, in either direction.
        let (now, here) = (self.now, node.local(self.now));
        let tolerance = SEC + now / 1_000_000 * self.plan.drift_ppm * 2;
        let seen = process.member.with_replica(|replica| {
            let status = replica.status();
            if status.is_leader() && !leaders.is_known(id, status.term) {
                let terms = replica.log_terms().collect();
                leaders.leads(id, status.term, &terms, status.snapshot, oracle)?;
            }
            if let Some((time, local)) = replica.open_time() {
                // A process that stalls in the middle of a step is ahead of the world.
                let at = now + local.since(here).0;
                let behind = at.saturating_sub(time.0 + here.since(local).0);
                leaders.counts(status.term, behind, tolerance)?;
            }
            for entry in replica.log_entries(from, status.applied) {
                oracle.observe(entry, status.term)?;
            }
            let index = status.applied;
            if from <= index
                && oracle::is_sampled(index)
                && !witness
                && let Some(&digest) = oracle.digests.get(&index)
                && digest != crc32fast::hash(&replica.machine().snapshot())
            {
                let what = format!("the state of n{id} at entry {index} differs");
                return Err(Broken::new("replicas-agree", what));
            }
            Ok(index)
        });
        match seen {
            Some(Ok(applied)) => {
                let live = self.nodes.get_mut(&id).and_then(|node| node.live.as_mut());
                if let Some(live) = live {
                    live.applied = applied;
                }
            }
            Some(Err(broken)) => self.check(Err(broken)),
            // It waits to be added.
            None => {}
        }
    }

    /// Does what a process wants done.
    fn carry_out(&mut self, id: RaftId, outputs: Vec<(u64, Output)>) {
        for (stalled, output) in outputs {
            match output {
                Output::Frame(to, lane, bytes) => {
                    self.hash.update(&bytes);
                    let Some(node) = self.nodes.get(&to) else { continue };
                    let life = node.life;
                    for at in self.net.send(id, to, lane == Lane::Bulk, self.now + stalled) {
                        let frame = Arrival::Frame(id, lane, bytes.clone());
                        self.schedule(at - self.now, Event::Arrive(to, life, frame));
                    }
                }
                Output::Snapshot(job) => {
                    let delay = stalled + self.disk_rng.between(MS, 500 * MS);
                    let life = self.nodes[&id].life;
                    self.schedule(delay, Event::Snapshot(id, life, job));
                }
                Output::Sweep(files) => {
                    let delay = stalled + self.disk_rng.between(MS, 2 * SEC);
                    let life = self.nodes[&id].life;
                    self.schedule(delay, Event::Sweep(id, life, files));
                }
                Output::Tell(conn, Told::Session(session)) => {
                    if let Some(known) = self.conns.get_mut(&conn) {
                        known.session_before = known.session.replace(session);
                    }
                }
                Output::Tell(conn, Told::Known(at, session, request)) => {
                    if let Some(known) = self.conns.get_mut(&conn) {
                        known.known.insert(at, (session, request));
                    }
                }
                Output::Tell(conn, told) => {
                    let delay = stalled + self.work_rng.between(50_000, 500_000);
                    self.send_client(conn, told, delay);
                }
            }
        }
    }

    /// Lets the log thread take what is queued. False if the disk failed.
    fn write(&mut self, id: RaftId) -> bool {
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        let life = node.life;
        let Some(live) = &mut node.live else { return true };
        let process = Rc::clone(&live.process);
        let member = &process.member;
        if member.is_log_busy() || !member.has_log_jobs() && live.room_at > now {
            return true;
        }
        if !member.has_log_jobs() {
            live.room_at = now + SEC;
        }
        let written = &mut live.written;
        let wants_sync = member.write_log(|write| {
            if let Some(snapshot) = &write.snapshot
                && snapshot.install
            {
                written.last = (snapshot.metadata.index, snapshot.metadata.term);
            }
            if let Some(entry) = write.batch.entries.last() {
                written.last = (entry.index, entry.term);
            }
            if let Some(state) = &write.batch.hard_state {
                written.hard_state = state.clone();
            }
        });
        let wants_sync = match wants_sync {
            Ok(wants_sync) => wants_sync,
            Err(error) => {
                if error.kind() == std::io::ErrorKind::InvalidInput {
                    self.check(Err(Broken::new("log", format!("n{id}: {error}"))));
                }
                return false;
            }
        };
        if !wants_sync {
            // What must not be synced is soon reported.
            self.arrive(id, life, Arrival::Synced);
            return true;
        }
        if member.sync_log().is_err() {
            return false;
        }
        let position = node.disk.position();
        let durable = live.written.clone();
        let mut delay = self.plan.sync + self.disk_rng.below(self.plan.sync);
        if node.slow_until > now {
            delay += self.disk_rng.between(5 * MS, 150 * MS);
        }
        delay += node.stalled_until.saturating_sub(now);
        self.schedule(delay, Event::Synced(id, life, position, durable));
        true
    }

    fn make_snapshot(&mut self, id: RaftId, life: u64, job: SnapshotJob) {
        let node = self.nodes.get_mut(&id).expect("known");
        if node.life != life || node.live.is_none() {
            return;
        }
        let made = match job.run() {
            Ok(made) => made,
            Err(error) => return self.check(Err(Broken::new("snapshot", error))),
        };
        let index = made.metadata.index;
        if let Some(&digest) = self.oracle.digests.get(&index)
            && digest != crc32fast::hash(&made.data)
        {
            let what = format!("the snapshot of n{id} at {index} differs");
            return self.check(Err(Broken::new("replicas-agree", what)));
        }
        let mut disk = node.disk.clone();
        if write_snapshot(&mut disk, &made.metadata, &made.data).is_err() {
            if node.full {
                // It is made again when there is room; until then the log grows.
                return self.arrive(id, life, Arrival::Made(None));
            }
            return self.crash(id, false, SEC);
        }
        let position = disk.position();
        let delay = self.disk_rng.between(MS, 100 * MS);
        self.schedule(delay, Event::Stored(id, life, made, position));
    }

    fn sweep(&mut self, id: RaftId, life: u64, files: &VecDeque<String>) {
        let node = self.nodes.get_mut(&id).expect("known");
        if node.life != life || node.live.is_none() {
            return;
        }
        for name in files {
            let removed = node.disk.remove(name).and_then(|()| node.disk.sync_dir());
            if removed.is_err() {
                return self.crash(id, false, SEC);
            }
        }
        self.arrive(id, life, Arrival::Swept);
    }

    /// Tells operators what became of their requests.
    fn tell_operators(&mut self, id: RaftId) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return };
        let mut told = Vec::new();
        live.admins.retain_mut(|(number, receiver)| match receiver.try_recv() {
            Ok(result) => {
                told.push((*number, result));
                false
            }
            Err(oneshot::error::TryRecvError::Empty) => true,
            Err(oneshot::error::TryRecvError::Closed) => false,
        });
        for (number, result) in told {
            self.admin_told(number, result);
        }
    }

    // ---- What nodes tell ----

    /// Brings something to a client, after everything that was sent to it before.
    fn send_client(&mut self, conn: u64, told: Told, delay: u64) {
        let now = self.now;
        let Some(known) = self.conns.get_mut(&conn) else { return };
        let client = known.client;
        known.last_at = (now + delay).max(known.last_at + 1);
        let delay = known.last_at - now;
        let node = self.clients[client].link.filter(|(link, _)| *link == conn);
        let node = node.and_then(|(_, id)| self.nodes.get(&id)?.live.as_ref());
        let applied = node.map_or(u64::MAX, |live| live.applied);
        self.schedule(delay, Event::Tell(client, conn, told, applied));
    }

    // ---- Clients ----

    fn client_turn(&mut self, client: usize) {
        if self.clients[client].dead {
            return;
        }
        let think = self.plan.think;
        let delay = self.work_rng.between(think / 4, think * 2);
        self.schedule(delay, Event::Client(client));
        let conn = self.clients[client].link.and_then(|(conn, _)| self.conns.get(&conn));
        if let Some(Conn { line: Some(line), opened_at, .. }) = conn
            && !line.is_ready
        {
            if opened_at + GREETING_PATIENCE < self.now {
                self.close_link(client, false, true);
            }
            return;
        }
        let want = self.clients[client].next(&self.plan, &mut self.work_rng, self.now, self.calm);
        self.want(client, want);
    }

    fn want(&mut self, client: usize, want: Want) {
        match want {
            Want::Nothing => {}
            Want::Open => {
                let ids: Vec<RaftId> = self
                    .nodes
                    .values()
                    .filter(|node| node.live.is_some() && !node.witness)
                    .map(|node| node.id)
                    .collect();
                if ids.is_empty() {
                    return;
                }
                let id = *self.work_rng.pick(&ids);
                self.open_link(client, id);
            }
            Want::Close { orderly } => self.close_link(client, orderly, true),
            Want::Ask(mut op, request, keep) => {
                if !self.aim(client, &mut op) {
                    return;
                }
                let Some((conn, node)) = self.clients[client].link else { return };
                let Some((arrival, request)) = self.word(conn, &mut op, request, keep) else {
                    return;
                };
                let is_cut = self.tears_off();
                if let Some(Command::Release(command::Release { token, .. })) = op.command() {
                    self.beliefs.end(token.fence);
                }
                let place = self.history.asked.len();
                self.clients[client].sent(request, place, &op, self.now);
                self.history.asked.push(Asked {
                    client,
                    op,
                    sent: self.now,
                    session: None,
                    request,
                    node,
                    repeated: false,
                    floor: self.history.floor,
                    calm: self.calm,
                    end: End::Open,
                });
                if is_cut && let Arrival::Bytes(conn, bytes) = &arrival {
                    return self.tear_off(client, (*conn, node), bytes, place);
                }
                self.send_node(node, arrival);
            }
            Want::Repeat(place, request) => {
                let Some((conn, node)) = self.clients[client].link else { return };
                self.history.asked[place].node = node;
                self.history.asked[place].repeated = true;
                let mut op = self.history.asked[place].op.clone();
                let keep = op.is_kept();
                let Some((arrival, request)) = self.word(conn, &mut op, request, keep) else {
                    return;
                };
                self.clients[client].sent(request, place, &op, self.now);
                self.send_node(node, arrival);
            }
        }
    }

    /// A client connects to a node, and greets if it speaks lines.
    fn open_link(&mut self, client: usize, id: RaftId) {
        self.next_conn += 1;
        let conn = self.next_conn;
        let face = self.clients[client].face;
        let mut known = Conn {
            client,
            last_at: 0,
            session: None,
            session_before: None,
            pushes: 0,
            opened_at: self.now,
            sent_until: 0,
            known: BTreeMap::new(),
            line: None,
        };
        self.send_node(id, Arrival::Open(conn, face.api()));
        let first = self.clients[client].opened(conn, id);
        if face == Face::Calls {
            self.conns.insert(conn, known);
            if let Some(first) = first {
                self.want(client, first);
            }
            return;
        }
        let (request, secret) = match first {
            Some(Want::Ask(Op::Attach { secret }, request, _)) => (request, Some(secret)),
            _ => (RequestId(0), None),
        };
        let (line, hello) = LineLink::open(face, request, secret);
        known.line = Some(line);
        self.conns.insert(conn, known);
        if !hello.is_empty() {
            self.send_node(id, Arrival::Bytes(conn, hello));
        }
    }

    /// A client ends its connection, or loses it. The node sees that or does not.
    fn close_link(&mut self, client: usize, orderly: bool, is_seen: bool) {
        if let Some((conn, id)) = self.clients[client].link
            && is_seen
        {
            let api = self.clients[client].face.api();
            self.send_node(id, Arrival::Close(conn, api, orderly));
        }
        self.client_closed(client, orderly);
    }

    /// A request as it goes over a connection, with the number it has there. None if the client can not say it.
    fn word(
        &mut self,
        conn: u64,
        op: &mut Op,
        request: RequestId,
        keep: bool,
    ) -> Option<(Arrival, RequestId)> {
        let known = self.conns.get_mut(&conn)?;
        let Some(line) = &mut known.line else {
            return Some((Arrival::Ask(conn, op.clone(), request, keep), request));
        };
        let is_kept = self.clients[known.client].face == Face::Kept;
        let request =
            if line.is_numbered() && !is_kept { RequestId(line.next_number()) } else { request };
        let (bytes, seen) = line.print(op, request)?;
        *op = seen;
        Some((Arrival::Bytes(conn, bytes), request))
    }

    /// Fills in whom a hostile request is about.
    fn aim(&mut self, client: usize, op: &mut Op) -> bool {
        if let Op::Kick { session: target } = op {
            let victim = self.work_rng.index(self.clients.len());
            let Some((conn, id)) = self.clients[victim].link else { return false };
            let Some(live) = &self.nodes[&id].live else { return false };
            let Some(session) = live.process.session_of(conn) else { return false };
            if victim == client {
                return false;
            }
            *target = session;
            self.doomed.insert(session.0);
            self.beliefs.end_client(victim);
            self.history.given_up.push((victim, self.now));
            self.clients[victim].forget_holds();
        } else if let Some(Command::ForceRelease(_)) = op.command() {
            let victim = self.work_rng.index(self.clients.len());
            let Some((key, space, token)) = self.clients[victim].any_hold() else {
                return false;
            };
            *op = command::ForceRelease { space, fence: token.fence, key }.into();
            self.doomed.insert(token.fence.0);
            self.beliefs.end(token.fence);
        }
        true
    }

    fn send_node(&mut self, id: RaftId, mut arrival: Arrival) {
        let Some(node) = self.nodes.get(&id) else { return };
        let life = node.life;
        // In order, as on a connection.
        let mut delay = 200_000;
        if self.plan.has(Fault::TornLines)
            && let Arrival::Bytes(conn, _) | Arrival::Close(conn, ..) = &arrival
            && let Some(known) = self.conns.get_mut(conn)
        {
            delay = delay.max((known.sent_until + 1).saturating_sub(self.now));
            if let Arrival::Bytes(conn, bytes) = &mut arrival
                && bytes.len() > 1
                && self.torn_rng.chance(300)
            {
                // In two packets.
                let tail = bytes.split_off(1 + self.torn_rng.index(bytes.len() - 1));
                let (conn, head) = (*conn, std::mem::replace(bytes, tail));
                let begins_in = delay;
                delay += self.torn_rng.below(100 * MS);
                known.sent_until = self.now + delay;
                let head = Arrival::Bytes(conn, head);
                self.schedule(begins_in, Event::Arrive(id, life, head));
            } else {
                known.sent_until = self.now + delay;
            }
        }
        self.schedule(delay, Event::Arrive(id, life, arrival));
    }

    /// Whether a client is lost in the middle of its next request.
    fn tears_off(&mut self) -> bool {
        self.plan.has(Fault::TornLines) && self.storm && self.torn_rng.chance(20)
    }

    /// A client sends a part of a request and is gone. What did not come to its end is not executed.
    fn tear_off(&mut self, client: usize, (conn, node): (u64, RaftId), bytes: &[u8], place: usize) {
        let part = bytes[..self.torn_rng.index(bytes.len())].to_vec();
        if !part.is_empty() {
            self.send_node(node, Arrival::Bytes(conn, part));
        }
        let orderly = self.torn_rng.chance(500);
        self.close_link(client, orderly, true);
        if self.history.asked[place].end == End::Unknown {
            self.history.asked[place].end = End::Refused;
        }
    }

    fn client_closed(&mut self, client: usize, orderly: bool) {
        if let Some((conn, _)) = self.clients[client].link {
            self.conns.remove(&conn);
        }
        let policy = self.plan.auto_release;
        let (lost, gone) = self.clients[client].closed(orderly, policy);
        if gone {
            self.beliefs.end_client(client);
            self.history.given_up.push((client, self.now));
        }
        for place in lost {
            self.history.asked[place].end = End::Unknown;
        }
    }

    fn tell(&mut self, client: usize, conn: u64, told: Told, applied: u64) {
        if self.clients[client].link.is_none_or(|(current, _)| current != conn) {
            return;
        }
        match told {
            Told::Closed => self.client_closed(client, false),
            Told::Bytes(bytes) => self.hear(client, conn, &bytes, applied),
            Told::Push(push) => {
                self.check_push(conn, &format!("{push:?}"), |expected| *expected == push);
                self.clients[client].pushed(&push);
            }
            Told::Secret(request, secret) => {
                if let Some((place, _)) = self.clients[client].open.get(&request) {
                    self.history.asked[*place].op = Op::Keep { secret };
                }
            }
            // Taken down when it was said.
            Told::Known(..) | Told::Session(_) => {}
            Told::Attached(request, there) => self.attached(client, conn, request, there),
            Told::Answer(request, outcome) => self.answered(client, request, outcome, applied),
        }
    }

    /// Lines have come.
    fn hear(&mut self, client: usize, conn: u64, bytes: &[u8], applied: u64) {
        self.hash.update(bytes);
        let line = |world: &mut Self| world.conns.get_mut(&conn).and_then(|conn| conn.line.take());
        let Some(mut link) = line(self) else { return };
        let lines = link.take_lines(bytes);
        self.put_back(conn, link);
        for text in lines {
            // A line before this one may have ended the connection.
            let Some(mut link) = line(self) else { return };
            let at = link.answers;
            let heard = link.read(&text);
            let known = self.conns.get(&conn).and_then(|conn| conn.known.get(&at)).copied();
            if let (Ok(Heard::Answer(sent, _)), Some((session, request))) = (&heard, known)
                && !link.is_numbered()
                && let Some((place, _)) = self.clients[client].open.get(&sent.request)
            {
                let asked = &mut self.history.asked[*place];
                (asked.session, asked.request) = (Some(session), request);
            }
            let outcome = match &heard {
                Ok(Heard::Answer(sent, response)) => {
                    let asked = self.clients[client].open.get(&sent.request);
                    asked.map(|(place, _)| {
                        link.outcome(&self.history.asked[*place], response, &self.oracle)
                    })
                }
                Ok(Heard::Greeted(..) | Heard::Push(_) | Heard::Detached) | Err(_) => None,
            };
            self.put_back(conn, link);
            match (heard, outcome) {
                (Err(broken), _) | (Ok(_), Some(Err(broken))) => {
                    return self.check(Err(broken));
                }
                (Ok(Heard::Answer(sent, _)), Some(Ok(outcome))) => {
                    self.answered(client, sent.request, outcome, applied);
                }
                (Ok(Heard::Answer(..) | Heard::Detached), _) => {}
                (Ok(Heard::Push(push)), _) => {
                    let told = format!("{push:?}");
                    self.check_push(conn, &told, |expected| line_client::is_push(expected, &push));
                    if let PushLine::Lost { fence, .. } = push {
                        self.clients[client].lost(Fence(fence));
                    }
                }
                (Ok(Heard::Greeted(sent, words)), _) => {
                    self.greeted(client, conn, sent.request, words);
                }
            }
        }
    }

    fn put_back(&mut self, conn: u64, link: LineLink) {
        if let Some(known) = self.conns.get_mut(&conn) {
            known.line = Some(link);
        }
    }

    /// A greeting was answered with words, or refused.
    fn greeted(
        &mut self,
        client: usize,
        conn: u64,
        request: RequestId,
        words: Result<&[u8], ErrorCode>,
    ) {
        match words {
            Ok(_) if self.clients[client].is_attaching() => {
                self.attached(client, conn, request, true);
            }
            Ok(words) => {
                if let Some(secret) = line_client::secret(words) {
                    self.clients[client].keep(secret);
                }
            }
            Err(code) => {
                if self.clients[client].is_attaching() && code == ErrorCode::Error {
                    self.attached(client, conn, request, false);
                }
                // It comes again over another connection.
                self.close_link(client, true, true);
            }
        }
    }

    /// A kept session is this connection's, or is gone.
    fn attached(&mut self, client: usize, conn: u64, request: RequestId, there: bool) {
        if let Some(known) = self.conns.get_mut(&conn)
            && there
        {
            // By which session and number the engine knows the request: on lines that of the greeting.
            let by = match known.line {
                Some(_) => known.known.get(&0).copied(),
                None => known.session_before.map(|session| (session, request)),
            };
            let attached = by.and_then(|by| self.oracle.attached.get(&by));
            known.pushes = attached.map_or(0, |(_, pushes)| *pushes);
        }
        let (again, lost) = self.clients[client].attached(request, there);
        for want in again {
            self.want(client, want);
        }
        for place in lost {
            self.history.asked[place].end = End::Unknown;
        }
    }

    /// Pushes reach a session in the order of the log, each once. A loss can go unheard: the client did not ask to hear
    /// of it, or the node skipped it with a snapshot.
    fn check_push(&mut self, conn: u64, told: &str, is_it: impl Fn(&Push) -> bool) {
        let Some(known) = self.conns.get_mut(&conn) else { return };
        let Some(session) = known.session else { return };
        let pushes = self.oracle.pushes.get(&session).map_or(&[][..], |pushes| pushes);
        let mut at = known.pushes;
        while let Some((_, expected)) = pushes.get(at) {
            at += 1;
            if is_it(expected) {
                known.pushes = at;
                return;
            }
            if !matches!(expected, Push::Lost { .. }) {
                break;
            }
        }
        let what = format!(
            "{session:?} of client {} ({:?}) got {told} instead of {:?} as number {}",
            known.client,
            self.clients[known.client].face,
            pushes.get(known.pushes),
            known.pushes
        );
        self.check(Err(Broken::new("pushes", what)));
    }

    fn answered(&mut self, client: usize, request: RequestId, outcome: Outcome, applied: u64) {
        let Some((place, _)) = self.clients[client].open.remove(&request) else { return };
        let asked = &mut self.history.asked[place];
        let now = self.now;
        if matches!(asked.op.command(), Some(Command::Cancel(_) | Command::Acknowledge(_))) {
            // The connection answers it, the log does not.
            asked.end = End::Told(now, outcome);
            return;
        }
        let checked = forms::check(asked, &outcome, &self.oracle)
            .and_then(|()| answers::check(asked, &outcome, applied, &self.oracle));
        match checked {
            Ok(index) => self.history.floor = self.history.floor.max(index),
            Err(broken) => return self.check(Err(broken)),
        }
        self.answered += 1;
        let is_undecided = outcome == Outcome::Refused(Refusal::Unavailable);
        // Of what was sent more than once a refusal speaks of the last time only.
        let is_unknown = answers::is_unknown(&outcome) || is_undecided && asked.repeated;
        asked.end = if is_unknown { End::Unknown } else { End::Told(now, outcome.clone()) };
        if is_unknown && !self.calm {
            let at = now + self.work_rng.below(4 * SEC * self.plan.pace);
            self.clients[client].unknown(request, place, at);
        }
        if asked.calm && (is_undecided || answers::is_unknown(&outcome)) {
            let what = format!("in calm, {asked:?} was answered {outcome:?}");
            return self.check(Err(Broken::new("progress", what)));
        }
        let (op, sent, session) = (asked.op.clone(), asked.sent, asked.session);
        let learned = self.clients[client].told(&op, sent, &outcome, self.now, self.calm);
        let doomed = |number| self.doomed.contains(&number);
        if let Some(learned) = learned
            && !session.is_some_and(|session| doomed(session.0))
            && !doomed(learned.token.fence.0)
            && self.plan.auto_release != AutoRelease::Any
            && self.plan.keeps_rate()
        {
            let counted_from = if bug(Bug::CountedFromReply) { now } else { sent };
            let until = counted_from + learned.valid;
            let (key, mode, fence) = (&learned.key, learned.mode, learned.token.fence);
            let result = self.beliefs.begin(key, mode, client, fence, session, until, now);
            self.check(result);
        }
    }

    // ---- Faults ----

    #[expect(clippy::too_many_lines, reason = "a list of everything there is")]
    fn fault(&mut self) {
        if !self.storm {
            return;
        }
        let gap = self.plan.fault_gap;
        let delay = self.fault_rng.between(gap / 2, gap * 2);
        self.schedule(delay, Event::Fault);
        if self.plan.faults.is_empty() {
            return;
        }
        let fault = *self.fault_rng.pick(&self.plan.faults);
        let ids: Vec<RaftId> =
            self.nodes.values().filter(|node| !node.gone).map(|node| node.id).collect();
        if ids.is_empty() {
            return;
        }
        let mut id = *self.fault_rng.pick(&ids);
        let leader = self.leader();
        if let Some(leader) = leader
            && self.fault_rng.chance(400)
        {
            id = leader;
        }
        let now = self.now;
        let rng = &mut self.fault_rng;
        let pace = self.plan.pace;
        let short = rng.between(10 * MS, 3 * SEC * pace);
        let long = rng.between(200 * MS, 12 * SEC * pace);
        match fault {
            Fault::Kill => self.crash(id, false, short),
            Fault::Power => self.crash(id, true, short),
            Fault::PowerAll => {
                for id in ids {
                    let back = short + self.fault_rng.below(SEC);
                    self.crash(id, true, back);
                }
            }
            Fault::Partition => {
                let side: Vec<bool> = ids.iter().map(|_| rng.chance(500)).collect();
                self.note(|| format!("partition {ids:?} {side:?} for {} ms", long / MS));
                for (a, &from) in ids.iter().enumerate() {
                    for (b, &to) in ids.iter().enumerate() {
                        if side[a] != side[b] {
                            self.net.cut(from, to, now + long);
                        }
                    }
                }
            }
            Fault::Away => {
                // Long enough to be given up by the others, while it serves its clients on.
                let span = self.fault_rng.between(11 * SEC, 20 * SEC);
                if self.net.away(now).is_none() {
                    self.note(|| format!("n{id} is away for {} ms", span / MS));
                    self.net.send_away(id, now + span);
                }
            }
            Fault::OneWay => {
                let to = *rng.pick(&ids);
                self.note(|| format!("cut {id} -> {to} for {} ms", long / MS));
                self.net.cut(id, to, now + long);
                if self.fault_rng.chance(300)
                    && let Some(node) = self.nodes.get(&id)
                {
                    let life = node.life;
                    let lost = Arrival::Unreachable(to, false);
                    self.schedule(MS, Event::Arrive(id, life, lost));
                }
            }
            Fault::Clog => {
                let to = *rng.pick(&ids);
                self.note(|| format!("clog {id} -> {to} for {} ms", short / MS));
                self.net.clog(id, to, now + short);
            }
            Fault::SlowDisk => self.nodes.get_mut(&id).expect("known").slow_until = now + long,
            Fault::StallDisk => {
                self.note(|| format!("the disk of n{id} stalls for {} ms", short / MS));
                self.nodes.get_mut(&id).expect("known").stalled_until = now + short;
            }
            Fault::HangDisk => {
                // A sync that has begun ends with the storm at the latest.
                let left = (SEC + self.plan.storm).saturating_sub(now);
                let span = self.fault_rng.between(SEC, 20 * SEC).min(left);
                self.note(|| format!("the disk of n{id} hangs for {} ms", span / MS));
                self.nodes.get_mut(&id).expect("known").stalled_until = now + span;
            }
            Fault::FailSync => self.nodes[&id].disk.fail(),
            Fault::FullDisk => {
                let node = self.nodes.get_mut(&id).expect("known");
                node.full = !node.full;
                node.disk.set_full(node.full);
                let full = node.full;
                self.note(|| format!("the disk of n{id} is full: {full}"));
            }
            Fault::Rot => {
                let may = self.plan.voters > 1
                    && !self.plan.begins_anew()
                    && self.exchange != Exchange::Done
                    && self.nodes[&id].stall_ends_at <= now;
                if may && !self.rotten {
                    self.rotten = true;
                    self.crash(id, false, short);
                    let rotten = self.nodes[&id].disk.rot(&mut self.disk_rng);
                    self.note(|| format!("n{id} rots: {rotten:?}"));
                }
            }
            Fault::Pause => {
                let node = self.nodes.get_mut(&id).expect("known");
                let span = if self.fault_rng.chance(200) { long * 2 } else { short };
                node.paused_until = node.paused_until.max(now + span);
                self.note(|| format!("n{id} pauses for {} ms", span / MS));
            }
            Fault::ClientCut => {
                let client = self.fault_rng.index(self.clients.len());
                if self.clients[client].link.is_some() {
                    let is_seen = self.fault_rng.chance(700);
                    self.close_link(client, false, is_seen);
                }
            }
            Fault::Transfer => {
                let to = if self.fault_rng.chance(500) { None } else { Some(format!("n{id}")) };
                self.ask_admin(id, AdminRequest::Transfer { to });
            }
            Fault::Membership => self.change_members(),
            Fault::Quorum => self.remove_blindly(id),
            Fault::Drain => self.drain(id),
            Fault::Restore => self.back_up_or_restore(id),
            Fault::ForceNew => self.force_new(),
            Fault::Upgrade => {
                if self.fault_rng.chance(300) {
                    self.is_finalized = true;
                    self.ask_admin(id, AdminRequest::Finalize);
                } else {
                    self.crash(id, false, short);
                }
            }
            Fault::SlowReader => {
                let client = self.fault_rng.index(self.clients.len());
                if let Some((conn, id)) = self.clients[client].link {
                    let life = self.nodes[&id].life;
                    self.note(|| format!("client {client} reads nothing for {} ms", short / MS));
                    self.schedule(0, Event::Arrive(id, life, Arrival::Reads(conn, false)));
                    self.schedule(short, Event::Arrive(id, life, Arrival::Reads(conn, true)));
                }
            }
            Fault::Stall => {
                if let Some(live) = &self.nodes[&id].live {
                    let span = if self.fault_rng.chance(200) { long } else { short };
                    live.process.stall(span.min(self.plan.storm + SEC - now));
                }
            }
            Fault::Loss
            | Fault::Duplicate
            | Fault::Reorder
            | Fault::Drift
            | Fault::WildClock
            | Fault::Starts
            | Fault::TornLines
            | Fault::Exchange => {}
        }
    }

    /// A node is told to end in an orderly way.
    fn drain(&mut self, id: RaftId) {
        let Some(live) = &self.nodes[&id].live else { return };
        live.process.begin_drain();
        self.note(|| format!("n{id} is told to end"));
        let life = self.nodes[&id].life;
        self.ask_admin(id, AdminRequest::Transfer { to: None });
        self.wake_soon(id);
        let patience = self.fault_rng.between(100 * MS, 3 * SEC);
        self.schedule(patience, Event::Stop(id, life));
    }

    fn ask_admin(&mut self, id: RaftId, request: AdminRequest) -> u64 {
        self.next_admin += 1;
        let number = self.next_admin;
        self.note(|| format!("n{id} is asked for {request:?}"));
        let life = self.nodes[&id].life;
        self.schedule(MS, Event::Ask(id, life, number, request));
        number
    }

    fn leader(&self) -> Option<RaftId> {
        let leads = |node: &&Node| node.status().is_some_and(|status| status.is_leader());
        self.nodes.values().filter(leads).map(|node| node.id).next()
    }

    fn change_members(&mut self) {
        let Some(via) = self.leader() else { return };
        let members: Vec<(RaftId, Member)> = self
            .oracle
            .machine()
            .members()
            .iter()
            .map(|(&id, member)| (id, member.clone()))
            .collect();
        let learner = self.nodes.get(&via).and_then(|node| {
            node.with_replica(|replica| replica.conf_state().learners.first().copied()).flatten()
        });
        if let Some(learner) = learner
            && let Some((_, member)) = members.iter().find(|(id, _)| *id == learner)
        {
            let node = member.node.clone();
            let number = self.ask_admin(via, AdminRequest::Promote { node });
            self.admin = Membership::Promoting(number);
            return;
        }
        let voters = members.len();
        if voters < 4 || voters < 7 && self.fault_rng.chance(400) {
            let name = self.next_name(&members);
            let witness = self.fault_rng.chance(100);
            let request = AdminRequest::Add {
                node: name.clone(),
                peer_addr: name.clone(),
                client_addr: name.clone(),
                witness,
            };
            let number = self.ask_admin(via, request);
            self.admin = Membership::Adding(number, name, witness);
        } else {
            let (_, member) = self.fault_rng.pick(&members).clone();
            let full = members.iter().filter(|(_, member)| !member.witness).count();
            if full <= 3 && !member.witness {
                return;
            }
            let node = member.node;
            let number = self.ask_admin(via, AdminRequest::Remove { node });
            self.admin = Membership::Removing(number);
        }
    }

    /// The name of a new member. After a disaster it may be that of a member of the old cluster.
    fn next_name(&mut self, members: &[(RaftId, Member)]) -> String {
        let name = format!("n{}x{}", members.len(), self.next_admin);
        if self.disasters.era == 0 || self.fault_rng.chance(500) {
            return name;
        }
        let machine = self.oracle.machine();
        let is_free = |name: &String| {
            !machine.is_retired(name) && members.iter().all(|(_, member)| member.node != *name)
        };
        (1..=self.plan.voters).map(|id| format!("n{id}")).find(is_free).unwrap_or(name)
    }

    /// An operator removes somebody without a look at who is there.
    fn remove_blindly(&mut self, via: RaftId) {
        let members: Vec<Member> = self.oracle.machine().members().values().cloned().collect();
        let full = members.iter().filter(|member| !member.witness).count();
        if members.len() < 2 || self.nodes[&via].live.is_none() {
            return;
        }
        let Member { node, witness, .. } = self.fault_rng.pick(&members).clone();
        if full < 2 && !witness {
            return;
        }
        let force = self.fault_rng.chance(200);
        if force {
            self.forced.insert(node.clone());
        }
        self.ask_admin(via, AdminRequest::remove(node, force));
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "what is not answered goes on")]
    fn admin_told(&mut self, number: u64, result: AdminResult) {
        self.note(|| format!("admin {number}: {result:?}"));
        match std::mem::replace(&mut self.admin, Membership::Idle) {
            Membership::Adding(known, name, witness) if known == number => {
                self.join(&name, witness);
            }
            Membership::Promoting(known) | Membership::Removing(known) if known == number => {}
            other => self.admin = other,
        }
    }

    /// A node that became a member starts with nothing.
    fn join(&mut self, name: &str, witness: bool) {
        let members = self.oracle.machine().members();
        let Some((&id, _)) = members.iter().find(|(_, member)| member.node == name) else { return };
        if self.nodes.get(&id).is_some_and(|node| !node.gone) {
            return;
        }
        let ppm = i64::try_from(self.plan.drift_ppm).expect("small");
        let mut node = Node::new(id, name.to_owned(), witness, false, ppm);
        // Nobody has the number of another, but for a mistake; what was meant for that one is not for this one.
        node.life = self.nodes.get(&id).map_or(0, |other| other.life + 1);
        self.nodes.insert(id, node);
        self.schedule(10 * MS, Event::Start(id));
    }

    // ---- The end ----

    fn heal(&mut self) {
        self.note(|| "the storm is over".into());
        self.storm = false;
        self.net.heal();
        self.switch_off_removed();
        let ids: Vec<RaftId> = self.nodes.keys().copied().collect();
        for id in ids {
            let node = self.nodes.get_mut(&id).expect("known");
            (node.full, node.slow_until, node.stalled_until) = (false, 0, 0);
            node.disk.heal();
            if let Some(live) = &node.live {
                live.process.stall(0);
            }
            if node.paused_until > self.now {
                node.paused_until = node.stall_ends_at.max(self.now);
                let life = node.life;
                node.wake_at = node.paused_until;
                let delay = node.wake_at - self.now;
                self.schedule(delay, Event::Wake(id, life));
            }
            if self.nodes[&id].live.is_none() {
                self.schedule(MS, Event::Start(id));
            }
        }
        // Members that were asked for and never came would count as lost for ever.
        let missing: Vec<(String, bool)> = self
            .oracle
            .machine()
            .members()
            .iter()
            .filter(|&(id, member)| {
                // The number may have been that of a member of another cluster.
                self.nodes.get(id).is_none_or(|node| node.gone && node.name != member.node)
            })
            .map(|(_, member)| (member.node.clone(), member.witness))
            .collect();
        for (name, witness) in missing {
            self.join(&name, witness);
        }
    }

    /// A node may never hear of its removal: its operator switches it off.
    fn switch_off_removed(&mut self) {
        let members = self.oracle.machine().members();
        if members.is_empty() {
            // No cluster is formed yet.
            return;
        }
        let removed: Vec<RaftId> =
            self.nodes.keys().copied().filter(|id| !members.contains_key(id)).collect();
        for id in removed {
            self.nodes.get_mut(&id).expect("known").gone = true;
            self.crash(id, false, SEC);
        }
    }

    /// Whether so many voters are lost that nothing can be demanded, or a first member that another one has not met.
    fn is_hopeless(&self) -> bool {
        let is_forming =
            |node: &Node| node.live.as_ref().is_some_and(|live| live.process.member.is_forming());
        if self.nodes.values().any(is_forming)
            && self.nodes.values().any(|node| node.first && node.gone)
        {
            return true;
        }
        let conf = |node: &Node| {
            node.with_replica(|replica| (replica.status().applied, replica.conf_state().voters))
        };
        let Some((_, voters)) = self.nodes.values().filter_map(conf).max_by_key(|conf| conf.0)
        else {
            return true;
        };
        let lost = voters.iter().filter(|id| self.nodes.get(id).is_none_or(|node| node.gone));
        lost.count() * 2 >= voters.len()
    }

    fn settled(&mut self) {
        // Removals that were asked for in the storm may have come after it.
        self.switch_off_removed();
        if self.is_hopeless() {
            self.over = true;
            return;
        }
        self.calm = true;
        self.note(|| "calm begins".into());
        let unwell: Vec<String> = self
            .nodes
            .values()
            .filter(|node| !node.gone && self.oracle.machine().members().contains_key(&node.id))
            .filter_map(|node| {
                let seen = node.with_replica(|replica| {
                    let begun = replica.machine().applied_seq(replica.run()) > Some(0);
                    (replica.status(), node.witness || begun)
                });
                let Some((status, begun)) = seen else {
                    return Some(format!("n{} is down", node.id));
                };
                let level = status.applied + 200 >= self.oracle.last();
                let well = status.leader.is_some() && begun && level;
                (!well).then(|| format!("n{}: {status:?}", node.id))
            })
            .collect();
        if !unwell.is_empty() {
            self.check(Err(Broken::new("settled", unwell.join("; "))));
        }
        let machine = self.oracle.machine();
        let are_known = machine.members().values().all(|member| member.disk.is_some());
        if machine.version() >= version::NAMED && are_known && machine.formed_as().is_none() {
            let what = "the cluster still has the id that others of the same list have";
            self.check(Err(Broken::new("cluster-id", what)));
        }
    }

    fn end(&mut self) {
        // Members commit entries of their own while clients are silent, and the others hear of one a moment later.
        if self.looks_left > 0 && self.nodes.values().any(|node| self.is_behind(node)) {
            self.looks_left -= 1;
            return self.schedule(self.plan.election, Event::End);
        }
        self.over = true;
        let open: Vec<String> = self
            .clients
            .iter()
            .filter(|client| client.link.is_some())
            .flat_map(|client| client.open.values())
            .map(|(place, _)| format!("{:?}", self.history.asked[*place]))
            .collect();
        if let Some(first) = open.first() {
            return self.check(Err(Broken::new("progress", format!("never answered: {first}"))));
        }
        let now = self.oracle.machine().now();
        let Some(store) = self.oracle.machine().store() else {
            return self.check(Err(Broken::new("progress", "the cluster never began")));
        };
        store.check_invariants();
        let held = store
            .survey(now, 8, usize::MAX)
            .locks
            .into_iter()
            .find(|lock| lock.holders_total > 0 || lock.waiters_total > 0);
        if let Some(lock) = held {
            return self.check(Err(Broken::new("not-late", format!("{lock:?}"))));
        }
        let state = self.oracle.machine().snapshot();
        for node in self.nodes.values() {
            if !self.has_state(node) {
                continue;
            }
            let seen = node
                .with_replica(|replica| (replica.status(), replica.machine().snapshot() == state));
            let Some((status, is_same)) = seen else { continue };
            if status.applied != self.oracle.last() || !is_same {
                let what =
                    format!("n{} ends at {status:?}, the log at {}", node.id, self.oracle.last());
                return self.check(Err(Broken::new("replicas-agree", what)));
            }
        }
        let result = totals::check(&self.history, &self.oracle);
        self.check(result);
    }
}

impl World {
    /// Whether a node is a member that keeps the state.
    fn has_state(&self, node: &Node) -> bool {
        !node.witness && self.oracle.machine().members().contains_key(&node.id)
    }

    /// Whether a node has not applied all that is committed.
    fn is_behind(&self, node: &Node) -> bool {
        let applied = node.with_replica(|replica| replica.status().applied);
        self.has_state(node) && applied.is_some_and(|applied| applied != self.oracle.last())
    }
}

impl Node {
    fn new(id: RaftId, name: String, witness: bool, first: bool, ppm: i64) -> Self {
        Self {
            id,
            name,
            witness,
            first,
            disk: SimDisk::default(),
            ppm,
            life: 0,
            live: None,
            program: 0,
            paused_until: 0,
            stall_ends_at: 0,
            durable: Durable::default(),
            gone: false,
            full: false,
            slow_until: 0,
            stalled_until: 0,
            wake_at: 0,
            idle: Idle::default(),
        }
    }

    /// Looks at the replica of a node that runs and is a member.
    fn with_replica<R>(&self, look: impl FnOnce(&Replica) -> R) -> Option<R> {
        self.live.as_ref()?.process.member.with_replica(look)
    }

    fn status(&self) -> Option<Status> {
        self.with_replica(Replica::status)
    }

    /// The node's own clock.
    fn local(&self, now: u64) -> Timestamp {
        let rate = u128::try_from(1_000_000 + self.ppm).expect("positive");
        let local = u128::from(now) * rate / 1_000_000;
        Timestamp(u64::try_from(local).expect("short"))
    }

    /// When the node's clock shows an instant.
    fn when(&self, local: Timestamp, now: u64) -> u64 {
        let rate = u128::try_from(1_000_000 + self.ppm).expect("positive");
        let at = u128::from(local.0) * 1_000_000 / rate + 1;
        u64::try_from(at).unwrap_or(u64::MAX).clamp(now, now + SEC)
    }
}
