//! One cluster with its clients, in one thread, on one heap of events.
//!
//! A node is a real [`Replica`] and a real [`LogStore`] on a [`SimDisk`], driven as the server's driver does it: time
//! first, then what came, then `poll`, then what that wants done. Two phases: a storm of faults in which nothing wrong
//! may happen, then calm in which the right things must.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};

use bytes::Bytes;
use dflockd_core::{
    Command, Effect, Limits, Outcome, Push, Refusal, RequestId, SessionId, Span, Timestamp, command,
};
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::log::{LogBatch, LogOptions, LogStore, OpenError, Room, write_snapshot};
use dflockd_replica::machine::{Event as MachineEvent, Machine};
use dflockd_replica::types::{Action, AutoRelease, Item, Member, Policy, RaftId, Run, Start};
use dflockd_replica::{
    LogWrite, MadeSnapshot, NodeEvent, Outputs, RaftConfig, Replica, ReplicaConfig, SnapshotJob,
    note,
};
use raft::eraftpb::{ConfState, Entry, SnapshotMetadata};

use crate::disk::SimDisk;
use crate::history::{Asked, End, History};
use crate::invariants::client_exclusion::Beliefs;
use crate::invariants::durable::Durable;
use crate::invariants::pushes::Pushes;
use crate::invariants::raft_safety::Leaders;
use crate::invariants::{Broken, answers, forms, linearizable, totals};
use crate::net::Net;
use crate::op::Op;
use crate::oracle::{self, Oracle};
use crate::plan::{Fault, MS, Plan, SEC};
use crate::rng::Rng;
use crate::workload::{self, Client, Want};

const CLUSTER: [u8; 16] = *b"simulated dflock";
const GRACE: u64 = 3 * SEC;
/// After the storm, how long until all must be well.
const SETTLE: u64 = 12 * SEC;
/// How long clients work on then.
const CALM: u64 = 8 * SEC;
/// And how long it takes until nothing may be left of them: requests, kept sessions, leases.
const DRAIN: u64 = 30 * SEC;

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
    event: Event,
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
    Arrive(RaftId, u64, Input),
    /// A sync is done: up to which write, and position on the disk.
    Synced(RaftId, u64, u64, usize, Durable),
    /// A snapshot is made.
    Snapshot(RaftId, u64, SnapshotJob),
    /// And stored.
    Stored(RaftId, u64, MadeSnapshot, usize),
    Start(RaftId),
    Client(usize),
    /// For a client, over a connection.
    Tell(usize, u64, Tell),
    Fault,
    Heal,
    /// The cluster must be well.
    Settled,
    Silence,
    End,
}

enum Input {
    Frame(RaftId, Bytes),
    Unreachable(RaftId, bool),
    Written(u64),
    Made(Option<MadeSnapshot>),
    Open(u64, usize),
    Ask(u64, usize, RequestId, bool),
    Close(u64, bool),
    Admin(u64, AdminRequest),
}

enum Tell {
    Answer(RequestId, Outcome, u64),
    Refused(RequestId),
    Attached(RequestId, bool),
    Push(Push),
    Broken,
}

struct Node {
    id: RaftId,
    name: String,
    witness: bool,
    disk: SimDisk,
    disk_id: u64,
    ppm: i64,
    /// How often it was started in the simulation; what was meant for another life is dropped.
    life: u64,
    live: Option<Box<Live>>,
    paused_until: u64,
    durable: Durable,
    /// It will not come back.
    gone: bool,
    full: bool,
    slow_until: u64,
    stalled_until: u64,
    wake_at: u64,
}

struct Live {
    replica: Replica,
    log: LogStore<SimDisk>,
    inbox: Vec<Input>,
    writes: VecDeque<LogWrite>,
    syncing: bool,
    /// The log as it was handed to the disk.
    entries: BTreeMap<u64, Entry>,
    written: Durable,
    applied: u64,
    conns: BTreeMap<u64, Conn>,
    by_session: BTreeMap<SessionId, u64>,
    next_session: u32,
    room_at: u64,
}

struct Conn {
    client: usize,
    session: SessionId,
    epoch: u32,
    pushes: usize,
    subscribed: bool,
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
    pushes: Pushes,
    hash: crc32fast::Hasher,
    broken: Option<(u64, Broken)>,
    trace: VecDeque<String>,
    next_conn: u64,
    next_admin: u64,
    /// What the admin wants in the end.
    admin: Membership,
    storm: bool,
    calm: bool,
    over: bool,
    answered: u64,
    rotten: bool,
    /// Sessions and holds that somebody is about to end: no client rule protects them.
    doomed: BTreeSet<u64>,
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
        let mut members = BTreeMap::new();
        let mut nodes = BTreeMap::new();
        for id in 1..=plan.voters {
            let witness = plan.witness && id == plan.voters;
            let name = format!("n{id}");
            members.insert(id, member(&name, witness));
            nodes.insert(id, Node::new(id, name, witness, drift()));
        }
        let initial = Machine::new(CLUSTER, members).snapshot();
        let keys = workload::value_keys(&plan);
        let oracle = Oracle::new(&initial, keys, plan.lease_min, GRACE);
        for node in nodes.values() {
            node.prepare(&plan, &initial);
        }
        let clients = (0..plan.clients).map(|id| Client::new(id, drift())).collect();
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
            pushes: Pushes::default(),
            hash: crc32fast::Hasher::new(),
            broken: None,
            trace: VecDeque::new(),
            next_conn: 0,
            next_admin: 0,
            admin: Membership::Idle,
            storm: true,
            calm: false,
            over: false,
            answered: 0,
            rotten: false,
            doomed: BTreeSet::new(),
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
        let storm = world.plan.storm;
        world.schedule(storm, Event::Heal);
        world.schedule(storm + SETTLE, Event::Settled);
        world.schedule(storm + SETTLE + CALM, Event::Silence);
        world.schedule(storm + SETTLE + CALM + DRAIN, Event::End);
        world
    }

    /// Lets it all happen.
    #[must_use]
    pub fn run(mut self) -> Report {
        while !self.over && self.broken.is_none() {
            let Some(Reverse(Scheduled { at, event, .. })) = self.heap.pop() else { break };
            self.now = at;
            self.handle(event);
        }
        let mut ordered = 0;
        if self.broken.is_none() && self.clients.len() <= linearizable::CLIENTS_MAX {
            let locks = self.plan.auto_release != AutoRelease::Any && self.plan.keeps_rate();
            let undone = &self.oracle.undone;
            let result = linearizable::check(&self.history, &self.doomed, undone, locks);
            self.check(result.map(|count| ordered = count));
        }
        Report {
            hash: self.hash.finalize(),
            broken: self.broken,
            simulated: self.now,
            entries: self.oracle.last(),
            answered: self.answered,
            ordered,
            terms: self.leaders.count(),
            trace: self.trace.into(),
        }
    }

    fn schedule(&mut self, delay: u64, event: Event) {
        self.serial += 1;
        let at = self.now + delay;
        self.heap.push(Reverse(Scheduled { at, serial: self.serial, event }));
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
            Event::Synced(id, life, number, position, durable) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life
                    && let Some(live) = &mut node.live
                {
                    live.syncing = false;
                    node.disk.commit(position);
                    node.durable = durable;
                    self.arrive(id, life, Input::Written(number));
                }
            }
            Event::Snapshot(id, life, job) => self.make_snapshot(id, life, job),
            Event::Stored(id, life, made, position) => {
                let node = self.nodes.get_mut(&id).expect("known");
                if node.life == life && node.live.is_some() {
                    node.disk.commit(position);
                    self.arrive(id, life, Input::Made(Some(made)));
                }
            }
            Event::Start(id) => self.start(id),
            Event::Client(client) => self.client_turn(client),
            Event::Tell(client, conn, tell) => self.tell(client, conn, tell),
            Event::Fault => self.fault(),
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
        let seed = self.plan.seed;
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        if node.gone || node.live.is_some() {
            return;
        }
        node.life += 1;
        let options = LogOptions { segment_bytes: self.plan.segment_bytes };
        let opened = LogStore::open(node.disk.clone(), options);
        let (mut log, mut recovered) = match opened {
            Ok(opened) => opened,
            Err(OpenError::Io(_)) => {
                // A full disk, or one that failed its last sync while nobody looked.
                node.disk.crash(false, &mut self.disk_rng);
                self.schedule(SEC, Event::Start(id));
                return;
            }
            Err(error) => {
                if self.rotten {
                    node.gone = true;
                    self.note(|| format!("n{id} refuses to start: {error}"));
                } else {
                    let what = format!("n{id} does not start: {error}");
                    self.check(Err(Broken::new("recovery", what)));
                }
                return;
            }
        };
        let durable = if self.rotten { Ok(()) } else { node.durable.check(&recovered) };
        let start = recovered.notes.get(note::START).map_or(0, |bytes| {
            u32::from_le_bytes(bytes.as_slice().try_into().expect("four bytes"))
        }) + 1;
        recovered.notes.insert(note::START.to_vec(), start.to_le_bytes().to_vec());
        let notes = vec![(note::START.to_vec(), start.to_le_bytes().to_vec())];
        let noted = log.write(&LogBatch { notes, ..LogBatch::default() }).and_then(|()| log.sync());
        node.disk.commit(node.disk.position());
        if noted.is_err() {
            drop(log);
            node.disk.crash(false, &mut self.disk_rng);
            self.schedule(SEC, Event::Start(id));
            return;
        }
        let run = Run::new(id, start);
        let config = ReplicaConfig {
            raft: RaftConfig {
                id,
                election_ticks: 100,
                heartbeat_ticks: 10,
                seed: seed ^ u64::from(start),
            },
            witness: node.witness,
            policy: Policy {
                limits: Limits {
                    failover_grace: Span(GRACE),
                    events_max: 64,
                    results_max: 64,
                    idle_max: Span::from_secs(5),
                    gc_interval: Span::from_secs(1),
                    ..Limits::default()
                },
                auto_release: self.plan.auto_release,
                orphan_ttl: Span::ZERO,
            },
            fence: 1000,
            seed,
            cluster: u128::from(seed).to_le_bytes(),
            run,
            start: Start {
                disk: node.disk_id,
                client_addr: node.name.clone(),
                version: dflockd_replica::version::NEWEST,
                witness: node.witness,
            },
            snapshot_entries: self.plan.snapshot_entries,
            snapshot_bytes: 1 << 20,
        };
        let entries: BTreeMap<u64, Entry> =
            recovered.entries.iter().map(|entry| (entry.index, entry.clone())).collect();
        let written = Durable {
            hard_state: recovered.hard_state.clone(),
            last: recovered.entries.last().map_or((0, 0), |entry| (entry.index, entry.term)),
        };
        node.durable = written.clone();
        let applied = recovered.snapshot.as_ref().map_or(0, |snapshot| snapshot.metadata.index);
        let local = node.local(now);
        let cut = recovered.cut;
        let replica = Replica::new(config, recovered, local);
        self.check(durable);
        let replica = match replica {
            Ok(replica) => replica,
            Err(error) => {
                self.check(Err(Broken::new("recovery", format!("n{id}: {error}"))));
                return;
            }
        };
        let node = self.nodes.get_mut(&id).expect("known");
        node.live = Some(Box::new(Live {
            replica,
            log,
            inbox: Vec::new(),
            writes: VecDeque::new(),
            syncing: false,
            entries,
            written,
            applied,
            conns: BTreeMap::new(),
            by_session: BTreeMap::new(),
            next_session: 0,
            room_at: 0,
        }));
        node.paused_until = 0;
        self.note(|| format!("n{id} starts for the {start}. time, snapshot {applied}, cut {cut}"));
        self.turn(id);
    }

    /// The process of a node ends.
    fn crash(&mut self, id: RaftId, power: bool, back_in: u64) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = node.live.take() else { return };
        node.life += 1;
        node.disk.crash(power, &mut self.disk_rng);
        let conns: Vec<(usize, u64)> =
            live.conns.iter().map(|(&conn, known)| (known.client, conn)).collect();
        drop(live);
        self.note(|| format!("n{id} crashes, power {power}"));
        for (client, conn) in conns {
            let delay = self.work_rng.between(MS, if power { 3 * SEC } else { 50 * MS });
            self.schedule(delay, Event::Tell(client, conn, Tell::Broken));
        }
        if !power {
            let others: Vec<RaftId> =
                self.nodes.keys().copied().filter(|&other| other != id).collect();
            for other in others {
                if !self.net.is_cut(id, other, self.now) {
                    let delay = self.net.rng().between(MS, 20 * MS);
                    let life = self.nodes[&other].life;
                    let gone = Input::Unreachable(id, true);
                    self.schedule(delay, Event::Arrive(other, life, gone));
                }
            }
        }
        self.schedule(back_in, Event::Start(id));
    }

    fn arrive(&mut self, id: RaftId, life: u64, input: Input) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        if node.life != life {
            return;
        }
        let Some(live) = &mut node.live else { return };
        live.inbox.push(input);
        // Several things often come before the thread looks.
        let delay = self.net.rng().below(30_000);
        let at = (now + delay).max(node.paused_until);
        if at < node.wake_at || node.wake_at <= now {
            node.wake_at = at;
            self.schedule(at - now, Event::Wake(id, life));
        }
    }

    /// A node's thread does what there is to do.
    fn turn(&mut self, id: RaftId) {
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        let local = node.local(now);
        let Some(live) = &mut node.live else { return };
        live.replica.handle_time(local);
        let mut outputs = Outputs::default();
        let mut failed = false;
        let mut tells = Vec::new();
        for input in std::mem::take(&mut live.inbox) {
            match input {
                Input::Frame(from, bytes) => live.replica.handle_frame(from, bytes),
                Input::Unreachable(peer, refused) => live.replica.handle_unreachable(peer, refused),
                Input::Written(number) => live.replica.handle_written(number),
                Input::Made(made) => {
                    if let Some(made) = &made {
                        failed |= live.log.snapshot_stored(&made.metadata).is_err();
                    }
                    live.replica.handle_snapshot(made, &mut outputs);
                }
                Input::Admin(number, request) => live.replica.admin(number, request),
                Input::Open(conn, client) => live.open(conn, client),
                Input::Close(conn, orderly) => live.close(conn, orderly),
                Input::Ask(conn, place, request, keep) => {
                    let asked = &mut self.history.asked[place];
                    if let Some(tell) = live.ask(conn, asked, request, keep) {
                        tells.push((asked.client, conn, tell));
                    }
                }
            }
        }
        live.replica.poll(&mut outputs);
        for write in &outputs.writes {
            if write.snapshot.as_ref().is_some_and(|snapshot| snapshot.install) {
                live.entries.clear();
            }
            for entry in &write.batch.entries {
                live.entries.split_off(&entry.index);
                live.entries.insert(entry.index, entry.clone());
            }
        }
        for (client, conn, tell) in tells {
            self.send_client(client, conn, tell);
        }
        self.observe(id);
        if self.broken.is_none() {
            self.carry_out(id, outputs, failed);
        }
        self.plan_wake(id);
    }

    fn plan_wake(&mut self, id: RaftId) {
        let now = self.now;
        let Some(node) = self.nodes.get_mut(&id) else { return };
        let Some(live) = &node.live else { return };
        let deadline = live.replica.next_deadline();
        let at = node.when(deadline, now).max(now + 1000);
        let life = node.life;
        if at < node.wake_at || node.wake_at <= now {
            node.wake_at = at;
            self.schedule(at - now, Event::Wake(id, life));
        }
    }

    /// Looks at what a node has applied and what it is.
    fn observe(&mut self, id: RaftId) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return };
        let status = live.replica.status();
        if status.role == "leader" {
            let result =
                self.leaders.leads(id, status.term, &live.entries, status.snapshot, &self.oracle);
            if result.is_err() {
                return self.check(result);
            }
        }
        let from = live.applied + 1;
        for index in from..=status.applied {
            let Some(entry) = live.entries.get(&index) else { continue };
            let result = self.oracle.observe(entry);
            if result.is_err() {
                return self.check(result);
            }
        }
        live.applied = status.applied;
        let index = status.applied;
        if from <= index
            && oracle::is_sampled(index)
            && !node.witness
            && let Some(&digest) = self.oracle.digests.get(&index)
            && digest != crc32fast::hash(&live.replica.machine().snapshot())
        {
            let what = format!("the state of n{id} at entry {index} differs");
            self.check(Err(Broken::new("replicas-agree", what)));
        }
    }

    /// Does what a replica wants done.
    fn carry_out(&mut self, id: RaftId, outputs: Outputs, mut failed: bool) {
        for outgoing in outputs.frames {
            self.hash.update(&outgoing.bytes);
            let Some(to) = self.nodes.get(&outgoing.to) else { continue };
            let life = to.life;
            for at in self.net.send(id, outgoing.to, outgoing.bulk, self.now) {
                let frame = Input::Frame(id, outgoing.bytes.clone());
                self.schedule(at - self.now, Event::Arrive(outgoing.to, life, frame));
            }
        }
        let node = self.nodes.get_mut(&id).expect("known");
        let live = node.live.as_mut().expect("it just ran");
        let life = node.life;
        let mut installed = false;
        for write in outputs.writes {
            if let Some(snapshot) = &write.snapshot
                && snapshot.install
            {
                installed = true;
            }
            live.writes.push_back(write);
        }
        if let Some(index) = outputs.cut_before {
            failed |= live.log.cut_before(index).is_err();
        }
        if let Some(fatal) = outputs.fatal {
            let rotten = self.rotten;
            let removed = fatal.contains("removed from the cluster");
            node.gone = removed;
            if !removed && !rotten {
                return self.check(Err(Broken::new("fatal", format!("n{id}: {fatal}"))));
            }
            self.note(|| format!("n{id} ends: {fatal}"));
            return self.crash(id, false, 100 * MS);
        }
        if let Some(job) = outputs.snapshot_job {
            let delay = self.disk_rng.between(MS, 500 * MS);
            self.schedule(delay, Event::Snapshot(id, life, job));
        }
        failed |= !self.write(id);
        if installed {
            self.cut_listeners(id);
        }
        for event in outputs.events {
            self.node_event(id, event);
        }
        if failed {
            self.note(|| format!("the disk of n{id} fails"));
            let back = self.fault_rng.between(100 * MS, 3 * SEC);
            self.crash(id, false, back);
        }
    }

    /// What a snapshot skipped, subscribers here will never hear of: their connections end.
    fn cut_listeners(&mut self, id: RaftId) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return };
        let cut: Vec<(u64, usize)> = live
            .conns
            .iter()
            .filter(|(_, conn)| conn.subscribed)
            .map(|(&conn, known)| (conn, known.client))
            .collect();
        for &(conn, _) in &cut {
            live.close(conn, false);
        }
        // Others only miss that holds were lost, which they know by their own clocks.
        for conn in live.conns.values_mut() {
            let pushes = self.oracle.pushes.get(&conn.session).map_or(&[][..], |pushes| pushes);
            conn.pushes = pushes.partition_point(|(index, _)| *index <= live.applied);
        }
        for (conn, client) in cut {
            self.send_client(client, conn, Tell::Broken);
        }
    }

    /// Lets the log thread take what is queued. False if the disk failed.
    fn write(&mut self, id: RaftId) -> bool {
        let now = self.now;
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return true };
        if live.log.room() == Room::Low && live.room_at <= now {
            live.room_at = now + SEC;
            if live.log.retry_room().is_err() {
                return false;
            }
        }
        let low = live.log.room() == Room::Low;
        live.replica.handle_room(low);
        if live.syncing || live.writes.is_empty() {
            return true;
        }
        let mut number = 0;
        let mut sync = false;
        for write in std::mem::take(&mut live.writes) {
            number = write.number;
            sync |= write.sync || write.snapshot.is_some();
            if let Some(snapshot) = &write.snapshot {
                let stored = if snapshot.install {
                    live.log.install_snapshot(&snapshot.metadata, &snapshot.data)
                } else {
                    live.log.store_snapshot(&snapshot.metadata, &snapshot.data)
                };
                if stored.is_err() {
                    return false;
                }
                if snapshot.install {
                    live.written.last = (snapshot.metadata.index, snapshot.metadata.term);
                }
            }
            if let Err(error) = live.log.write(&write.batch) {
                if error.kind() == std::io::ErrorKind::InvalidInput {
                    self.check(Err(Broken::new("log", format!("n{id}: {error}"))));
                }
                return false;
            }
            if let Some(entry) = write.batch.entries.last() {
                live.written.last = (entry.index, entry.term);
            }
            if let Some(state) = write.batch.hard_state {
                live.written.hard_state = state;
            }
        }
        if !sync {
            // What must not be synced is soon reported.
            let life = node.life;
            self.arrive(id, life, Input::Written(number));
            return true;
        }
        if live.log.sync().is_err() {
            return false;
        }
        live.syncing = true;
        let position = node.disk.position();
        let durable = live.written.clone();
        let mut delay = self.plan.sync + self.disk_rng.below(self.plan.sync);
        if node.slow_until > now {
            delay += self.disk_rng.between(5 * MS, 150 * MS);
        }
        delay += node.stalled_until.saturating_sub(now);
        let life = node.life;
        self.schedule(delay, Event::Synced(id, life, number, position, durable));
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
                return self.arrive(id, life, Input::Made(None));
            }
            return self.crash(id, false, SEC);
        }
        let position = disk.position();
        let delay = self.disk_rng.between(MS, 100 * MS);
        self.schedule(delay, Event::Stored(id, life, made, position));
    }

    // ---- What nodes tell ----

    fn send_client(&mut self, client: usize, conn: u64, tell: Tell) {
        let delay = self.work_rng.between(50_000, 500_000);
        self.schedule(delay, Event::Tell(client, conn, tell));
    }

    fn node_event(&mut self, id: RaftId, event: NodeEvent) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return };
        let applied = live.applied;
        match event {
            // The world cuts connections with subscriptions when a snapshot is installed.
            NodeEvent::Skipped | NodeEvent::Peers(_) | NodeEvent::Decided { .. } => {}
            NodeEvent::Machine(MachineEvent::Effect(Effect::Reply {
                session,
                request,
                outcome,
            })) => {
                if let Some(&conn) = live.by_session.get(&session) {
                    let client = live.conns[&conn].client;
                    self.send_client(client, conn, Tell::Answer(request, outcome, applied));
                }
            }
            NodeEvent::Machine(MachineEvent::Effect(Effect::Push { session, push, group })) => {
                if let Some(&conn) = live.by_session.get(&session) {
                    let known = live.conns.get_mut(&conn).expect("listed");
                    let client = known.client;
                    let count = known.pushes;
                    known.pushes += 1;
                    let group = group.as_ref().map(|group| (&*group.pattern, &*group.name));
                    let result = self.pushes.check(session, count, &push, group, &self.oracle);
                    self.check(result);
                    self.send_client(client, conn, Tell::Push(push));
                }
            }
            NodeEvent::Machine(MachineEvent::Attached { by, request, to }) => {
                self.attached(id, by, request, to);
            }
            NodeEvent::Machine(MachineEvent::Gone { session, epoch, .. }) => {
                let conn = live.by_session.get(&session).copied();
                if let Some(conn) = conn
                    && live.conns[&conn].epoch == epoch
                {
                    self.cut(id, conn);
                }
            }
            NodeEvent::Machine(
                MachineEvent::Kicked { session }
                | MachineEvent::Effect(Effect::SessionEnded { session }),
            ) => {
                if let Some(conn) = live.by_session.get(&session).copied() {
                    self.cut(id, conn);
                }
            }
            NodeEvent::NewRun(_) => {
                let conns = std::mem::take(&mut live.conns);
                live.by_session.clear();
                live.next_session = 0;
                self.note(|| format!("n{id} was given up"));
                for (conn, known) in conns {
                    self.send_client(known.client, conn, Tell::Broken);
                }
            }
            NodeEvent::Admin(number, result) => self.admin_told(number, result),
            NodeEvent::Job(..)
            | NodeEvent::Machine(
                MachineEvent::RunStarted(_)
                | MachineEvent::RunEnded(_)
                | MachineEvent::Members
                | MachineEvent::PolicyChanged
                | MachineEvent::Digest { .. },
            ) => {}
        }
    }

    /// The node ends a connection.
    fn cut(&mut self, id: RaftId, conn: u64) {
        let node = self.nodes.get_mut(&id).expect("known");
        let Some(live) = &mut node.live else { return };
        let Some(client) = live.conns.get(&conn).map(|known| known.client) else { return };
        live.close(conn, false);
        self.send_client(client, conn, Tell::Broken);
    }

    fn attached(
        &mut self,
        id: RaftId,
        by: SessionId,
        request: RequestId,
        to: Option<(SessionId, u32)>,
    ) {
        let node = self.nodes.get_mut(&id).expect("known");
        let live = node.live.as_mut().expect("it just ran");
        if let Some((session, _)) = to
            && let Some(&older) = live.by_session.get(&session)
        {
            self.cut(id, older);
        }
        let node = self.nodes.get_mut(&id).expect("known");
        let live = node.live.as_mut().expect("it just ran");
        let Some(&conn) = live.by_session.get(&by) else { return };
        let known = live.conns.get_mut(&conn).expect("listed");
        let client = known.client;
        if let Some((session, epoch)) = to {
            (known.session, known.epoch, known.subscribed) = (session, epoch, true);
            known.pushes = self.oracle.attached.get(&(by, request)).map_or(0, |known| known.1);
            live.by_session.remove(&by);
            live.by_session.insert(session, conn);
        }
        self.send_client(client, conn, Tell::Attached(request, to.is_some()));
    }

    // ---- Clients ----

    fn client_turn(&mut self, client: usize) {
        if self.clients[client].dead {
            return;
        }
        let think = self.plan.think;
        let delay = self.work_rng.between(think / 4, think * 2);
        self.schedule(delay, Event::Client(client));
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
                self.next_conn += 1;
                let conn = self.next_conn;
                self.send_node(id, Input::Open(conn, client));
                if let Some(first) = self.clients[client].opened(conn, id) {
                    self.want(client, first);
                }
            }
            Want::Close { orderly } => {
                if let Some((conn, id)) = self.clients[client].link {
                    self.send_node(id, Input::Close(conn, orderly));
                }
                self.client_closed(client, orderly);
            }
            Want::Ask(mut op, request, keep) => {
                if !self.aim(client, &mut op) {
                    return;
                }
                let Some((conn, node)) = self.clients[client].link else { return };
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
                self.send_node(node, Input::Ask(conn, place, request, keep));
            }
            Want::Repeat(place, request) => {
                let Some((conn, node)) = self.clients[client].link else { return };
                self.history.asked[place].node = node;
                self.history.asked[place].repeated = true;
                let op = self.history.asked[place].op.clone();
                self.clients[client].sent(request, place, &op, self.now);
                self.send_node(node, Input::Ask(conn, place, request, true));
            }
        }
    }

    /// Fills in whom a hostile request is about.
    fn aim(&mut self, client: usize, op: &mut Op) -> bool {
        if let Op::Kick { session: target } = op {
            let victim = self.work_rng.index(self.clients.len());
            let Some((conn, id)) = self.clients[victim].link else { return false };
            let Some(live) = &self.nodes[&id].live else { return false };
            let Some(known) = live.conns.get(&conn) else { return false };
            if victim == client {
                return false;
            }
            *target = known.session;
            self.doomed.insert(known.session.0);
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

    fn send_node(&mut self, id: RaftId, input: Input) {
        let Some(node) = self.nodes.get(&id) else { return };
        let life = node.life;
        // In order, as on a connection.
        let delay = 200_000;
        self.schedule(delay, Event::Arrive(id, life, input));
    }

    fn client_closed(&mut self, client: usize, orderly: bool) {
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

    fn tell(&mut self, client: usize, conn: u64, tell: Tell) {
        if self.clients[client].link.is_none_or(|(current, _)| current != conn) {
            return;
        }
        match tell {
            Tell::Broken => self.client_closed(client, false),
            Tell::Push(push) => self.clients[client].pushed(&push),
            Tell::Refused(request) => {
                if let Some((place, _)) = self.clients[client].open.remove(&request) {
                    let asked = &mut self.history.asked[place];
                    asked.end = if asked.repeated { End::Unknown } else { End::Refused };
                }
            }
            Tell::Attached(request, there) => {
                let (again, lost) = self.clients[client].attached(request, there);
                for want in again {
                    self.want(client, want);
                }
                for place in lost {
                    self.history.asked[place].end = End::Unknown;
                }
            }
            Tell::Answer(request, outcome, applied) => {
                let Some((place, _)) = self.clients[client].open.remove(&request) else { return };
                let asked = &mut self.history.asked[place];
                let checked = forms::check(asked, &outcome, &self.oracle)
                    .and_then(|()| answers::check(asked, &outcome, applied, &self.oracle));
                match checked {
                    Ok(index) => self.history.floor = self.history.floor.max(index),
                    Err(broken) => return self.check(Err(broken)),
                }
                self.answered += 1;
                asked.end = if answers::is_unknown(&outcome) {
                    End::Unknown
                } else {
                    End::Told(self.now, outcome.clone())
                };
                if asked.calm
                    && matches!(
                        outcome,
                        Outcome::Refused(Refusal::Forgotten | Refusal::Unavailable)
                    )
                {
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
                    let until = sent + learned.valid;
                    let (key, mode, fence) = (&learned.key, learned.mode, learned.token.fence);
                    let now = self.now;
                    let result = self.beliefs.begin(key, mode, client, fence, session, until, now);
                    self.check(result);
                }
            }
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
        let short = rng.between(10 * MS, 3 * SEC);
        let long = rng.between(200 * MS, 12 * SEC);
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
            Fault::OneWay => {
                let to = *rng.pick(&ids);
                self.note(|| format!("cut {id} -> {to} for {} ms", long / MS));
                self.net.cut(id, to, now + long);
                if self.fault_rng.chance(300)
                    && let Some(node) = self.nodes.get(&id)
                {
                    let life = node.life;
                    self.schedule(MS, Event::Arrive(id, life, Input::Unreachable(to, false)));
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
                if !self.rotten && self.plan.voters > 1 {
                    self.rotten = true;
                    self.crash(id, false, short);
                    let rotten = self.nodes[&id].disk.rot(&mut self.disk_rng);
                    self.note(|| format!("n{id} rots: {rotten:?}"));
                }
            }
            Fault::Pause => {
                let node = self.nodes.get_mut(&id).expect("known");
                let span = if self.fault_rng.chance(200) { long * 2 } else { short };
                node.paused_until = now + span;
                self.note(|| format!("n{id} pauses for {} ms", span / MS));
            }
            Fault::ClientCut => {
                let client = self.fault_rng.index(self.clients.len());
                if let Some((conn, id)) = self.clients[client].link {
                    let seen = self.fault_rng.chance(700);
                    if seen {
                        self.send_node(id, Input::Close(conn, false));
                    }
                    self.client_closed(client, false);
                }
            }
            Fault::Transfer => {
                let to = if self.fault_rng.chance(500) { None } else { Some(format!("n{id}")) };
                self.ask_admin(id, AdminRequest::Transfer { to });
            }
            Fault::Membership => self.change_members(),
            Fault::Loss | Fault::Duplicate | Fault::Reorder | Fault::Drift | Fault::WildClock => {}
        }
    }

    fn ask_admin(&mut self, id: RaftId, request: AdminRequest) -> u64 {
        self.next_admin += 1;
        let number = self.next_admin;
        self.note(|| format!("n{id} is asked for {request:?}"));
        let life = self.nodes[&id].life;
        self.schedule(MS, Event::Arrive(id, life, Input::Admin(number, request)));
        number
    }

    fn leader(&self) -> Option<RaftId> {
        let leads = |node: &&Node| {
            node.live.as_ref().is_some_and(|live| live.replica.status().role == "leader")
        };
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
        let learner = self.nodes.get(&via).and_then(|node| node.live.as_ref()).and_then(|live| {
            let conf = live.replica.conf_state();
            conf.learners.first().copied()
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
            let name = format!("n{}x{}", members.len(), self.next_admin);
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
        let mut node = Node::new(id, name.to_owned(), witness, ppm);
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
        let ids: Vec<RaftId> = self.nodes.keys().copied().collect();
        for id in ids {
            if !self.oracle.machine().members().contains_key(&id) {
                // It may never hear of its removal; its operator switches it off.
                self.nodes.get_mut(&id).expect("known").gone = true;
                self.crash(id, false, SEC);
                continue;
            }
            let node = self.nodes.get_mut(&id).expect("known");
            (node.full, node.slow_until, node.stalled_until) = (false, 0, 0);
            node.disk.heal();
            if node.paused_until > self.now {
                node.paused_until = self.now;
                let life = node.life;
                node.wake_at = self.now;
                self.schedule(0, Event::Wake(id, life));
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
            .filter(|(id, _)| !self.nodes.contains_key(id))
            .map(|(_, member)| (member.node.clone(), member.witness))
            .collect();
        for (name, witness) in missing {
            self.join(&name, witness);
        }
    }

    /// Whether so many voters are lost that nothing can be demanded.
    fn is_hopeless(&self) -> bool {
        let Some(live) = self
            .nodes
            .values()
            .filter_map(|node| node.live.as_ref())
            .max_by_key(|live| live.applied)
        else {
            return true;
        };
        let voters = live.replica.conf_state().voters;
        let lost = voters.iter().filter(|id| self.nodes.get(id).is_none_or(|node| node.gone));
        lost.count() * 2 >= voters.len()
    }

    fn settled(&mut self) {
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
            .filter_map(|node| match &node.live {
                None => Some(format!("n{} is down", node.id)),
                Some(live) => {
                    let status = live.replica.status();
                    let begun = node.witness
                        || live.replica.machine().applied_seq(live.replica.run()) > Some(0);
                    let level = status.applied + 200 >= self.oracle.last();
                    let well = status.leader.is_some() && begun && level;
                    (!well).then(|| format!("n{}: {status:?}", node.id))
                }
            })
            .collect();
        if !unwell.is_empty() {
            self.check(Err(Broken::new("settled", unwell.join("; "))));
        }
    }

    fn end(&mut self) {
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
            let Some(live) = &node.live else { continue };
            if node.witness || !self.oracle.machine().members().contains_key(&node.id) {
                continue;
            }
            let status = live.replica.status();
            if status.applied != self.oracle.last() || live.replica.machine().snapshot() != state {
                let what =
                    format!("n{} ends at {status:?}, the log at {}", node.id, self.oracle.last());
                return self.check(Err(Broken::new("replicas-agree", what)));
            }
        }
        let result = totals::check(&self.history, &self.oracle);
        self.check(result);
    }
}

impl Node {
    fn new(id: RaftId, name: String, witness: bool, ppm: i64) -> Self {
        Self {
            id,
            name,
            witness,
            disk: SimDisk::default(),
            disk_id: id * 1000 + 7,
            ppm,
            life: 0,
            live: None,
            paused_until: 0,
            durable: Durable::default(),
            gone: false,
            full: false,
            slow_until: 0,
            stalled_until: 0,
            wake_at: 0,
        }
    }

    /// The state of a new cluster, as the first start writes it.
    fn prepare(&self, plan: &Plan, initial: &[u8]) {
        let options = LogOptions { segment_bytes: plan.segment_bytes };
        let (mut log, _) = LogStore::open(self.disk.clone(), options).expect("an empty disk");
        let mut metadata = SnapshotMetadata { index: 1, term: 1, ..SnapshotMetadata::default() };
        let conf_state = ConfState { voters: (1..=plan.voters).collect(), ..ConfState::default() };
        metadata.set_conf_state(conf_state);
        log.install_snapshot(&metadata, initial).expect("an empty disk");
        self.disk.commit(self.disk.position());
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

impl Live {
    fn open(&mut self, conn: u64, client: usize) {
        self.next_session += 1;
        let session = self.replica.run().session(self.next_session);
        self.conns.insert(conn, Conn { client, session, epoch: 0, pushes: 0, subscribed: false });
        self.by_session.insert(session, conn);
    }

    fn close(&mut self, conn: u64, orderly: bool) {
        let Some(known) = self.conns.remove(&conn) else { return };
        if self.by_session.get(&known.session) == Some(&conn) {
            self.by_session.remove(&known.session);
        }
        let item = Item {
            session: known.session,
            epoch: known.epoch,
            request: RequestId(0),
            keep: false,
            action: Action::Close { orderly, referenced: false },
        };
        self.replica.submit(&item, None);
    }

    fn ask(
        &mut self,
        conn: u64,
        asked: &mut Asked,
        request: RequestId,
        keep: bool,
    ) -> Option<Tell> {
        let known = self.conns.get_mut(&conn)?;
        asked.session = Some(known.session);
        if matches!(asked.op.command(), Some(Command::Subscribe(_))) {
            known.subscribed = true;
        }
        let Some(action) = asked.op.action() else {
            if let Op::Read(query) = &asked.op {
                self.replica.read(known.session, request, query.clone());
            }
            return None;
        };
        let (session, epoch) = (known.session, known.epoch);
        let item = Item { session, epoch, request, keep, action };
        let taken = self.replica.submit(&item, Some(asked.op.wait()));
        (!taken).then_some(Tell::Refused(request))
    }
}

fn member(name: &str, witness: bool) -> Member {
    let name = name.to_owned();
    Member { node: name.clone(), peer_addr: name.clone(), client_addr: name, witness, disk: None }
}
