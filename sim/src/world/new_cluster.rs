//! Disasters: a backup is made into a new cluster, or the one member that is left is.
//!
//! All nodes end at once. What clients had asked of the old cluster is looked at for itself, and the history begins
//! anew with what the new cluster has. Nodes of the old one stay as they were, so that it can be tried whether the new
//! ones talk to them.

use std::rc::Rc;
use std::sync::mpsc::{Receiver, TryRecvError};

use bytes::Bytes;
use dflockd_core::{Outcome, Query, Span};
use dflockd_engine::offline::{Beginning, Begun, Delay, write_backup};
use dflockd_engine::{Chance, stepped};
use dflockd_replica::admin::AdminResult;
use dflockd_replica::log::{LogOptions, LogStore, Recovered};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{AutoRelease, RaftId};
use tokio::sync::oneshot;

use super::{Event, Membership, Node, World};
use crate::disk::SimDisk;
use crate::history::{Before, End, History};
use crate::invariants::durable::Durable;
use crate::invariants::raft_safety::Leaders;
use crate::invariants::{Broken, linearizable, new_cluster, totals};
use crate::plan::{Fault, MS, Plan, SEC};

/// A new cluster grows to so many members.
const MEMBERS: usize = 3;

/// What there is of backups and new clusters.
#[derive(Default)]
pub(super) struct Disasters {
    /// How many clusters there were before this one.
    pub(super) era: u32,
    /// By which faults they began.
    seen: Vec<Fault>,
    /// A backup that an operator waits for.
    under_way: Option<UnderWay>,
    /// The last one that was made, with the entry whose state it has.
    backup: Option<(Bytes, u64)>,
    /// Ids of all clusters there were.
    clusters: std::collections::BTreeSet<dflockd_replica::types::Bits128>,
    /// Nodes of the last cluster, as they were when they were lost.
    former: Vec<Rc<crate::process::Process>>,
    /// Terms of earlier clusters that had a leader.
    pub(super) terms: usize,
    /// Requests to earlier clusters that an order was found for.
    pub(super) ordered: u64,
}

/// A backup that is being made.
struct UnderWay {
    node: RaftId,
    life: u64,
    /// What clients had been told of before it was asked for.
    floor: u64,
    step: Step,
}

enum Step {
    Confirming(Receiver<Option<()>>),
    Copying(u64, oneshot::Receiver<AdminResult>),
}

impl World {
    /// An operator makes a backup, or has one and a disaster to use it for.
    pub(super) fn back_up_or_restore(&mut self, id: RaftId) {
        let may = self.disasters.backup.is_some()
            && !self.disasters.seen.contains(&Fault::Restore)
            && !self.is_mid_step();
        if may && self.fault_rng.chance(500) {
            return self.restore();
        }
        let node = &self.nodes[&id];
        let Some(live) = &node.live else { return };
        if node.witness || !live.process.member.takes_part() {
            return;
        }
        let (floor, life) = (self.history.floor, node.life);
        let step = Step::Confirming(live.process.member.confirm());
        self.disasters.under_way = Some(UnderWay { node: id, life, floor, step });
        self.note(|| format!("n{id} is asked for a backup"));
        self.wake_soon(id);
    }

    /// Goes on with a backup of this node.
    pub(super) fn go_on_with_backup(&mut self, id: RaftId) {
        let Some(mut under_way) = self.disasters.under_way.take() else { return };
        let node = &self.nodes[&id];
        if under_way.node != id {
            self.disasters.under_way = Some(under_way);
            return;
        }
        let Some(live) = node.live.as_ref().filter(|_| node.life == under_way.life) else { return };
        let member = &live.process.member;
        match &mut under_way.step {
            Step::Confirming(told) => match told.try_recv() {
                Ok(Some(())) => {
                    let (number, told) = member.copy();
                    under_way.step = Step::Copying(number, told);
                    self.disasters.under_way = Some(under_way);
                    self.wake_soon(id);
                }
                Err(TryRecvError::Empty) => self.disasters.under_way = Some(under_way),
                Ok(None) | Err(TryRecvError::Disconnected) => {}
            },
            Step::Copying(number, told) => match told.try_recv() {
                Ok(Ok(())) => {
                    let Some(copy) = member.take_copy(*number) else { return };
                    let (index, floor) = (copy.index, under_way.floor);
                    let cluster = self.oracle.machine().cluster();
                    let bytes = write_backup(cluster, &node.name, &copy);
                    self.note(|| format!("a backup of entry {index}"));
                    if index < floor {
                        let what = format!(
                            "a backup has the state of entry {index}, though {floor} was known before"
                        );
                        self.check(Err(Broken::new("backup", what)));
                    }
                    self.disasters.backup = Some((bytes, index));
                }
                Err(oneshot::error::TryRecvError::Empty) => {
                    self.disasters.under_way = Some(under_way);
                }
                Ok(Err(_)) | Err(oneshot::error::TryRecvError::Closed) => {}
            },
        }
    }

    /// Whether a process stalls in the middle of a step: then not all can end at once.
    fn is_mid_step(&self) -> bool {
        self.nodes.values().any(|node| node.live.is_some() && node.stall_ends_at > self.now)
    }

    /// All members are lost, and a backup is restored into a new data directory.
    fn restore(&mut self) {
        let Some((backup, index)) = self.disasters.backup.take() else { return };
        let era = self.disasters.era + 1;
        // A new name, or that of a member of the old cluster.
        let name = if self.fault_rng.chance(500) { format!("r{era}") } else { "n1".into() };
        self.note(|| format!("all is lost, and the backup of entry {index} is restored as {name}"));
        let former = self.lose_all();
        let beginning = Beginning {
            node: name.clone(),
            peer_addr: name.clone(),
            client_addr: name.clone(),
            delay: Delay { min: self.longest_lease(), max: None },
        };
        let chance = Chance::seeded(self.plan.seed ^ 0x7e57 ^ self.now);
        let (now, options) = (self.now, log_options(&self.plan));
        let mut disk = SimDisk::default();
        if self.fault_rng.chance(300) {
            // The machine goes down meanwhile. Its directory is emptied, and it is done again.
            let first =
                stepped::restore(disk.clone(), &backup, &beginning, options.clone(), &chance, now);
            self.check_begun(first.map(drop));
            disk = SimDisk::default();
        }
        let begun =
            stepped::restore(disk.clone(), &backup, &beginning, options.clone(), &chance, now);
        match begun {
            Ok(begun) => {
                self.disasters.seen.push(Fault::Restore);
                let delay = (begun.delay, begun.delay);
                self.begin_anew(disk, name, &begun, delay, Some(index), former);
            }
            Err(why) => self.check_begun(Err(why)),
        }
    }

    /// All members but one are lost for good, and that one goes on alone.
    pub(super) fn force_new(&mut self) {
        if self.disasters.seen.contains(&Fault::ForceNew) || self.is_mid_step() {
            return;
        }
        let members = self.oracle.machine().members();
        let is_full = |node: &&Node| {
            !node.gone && members.get(&node.id).is_some_and(|member| !member.witness)
        };
        let survivors: Vec<RaftId> =
            self.nodes.values().filter(is_full).map(|node| node.id).collect();
        if survivors.is_empty() || self.oracle.machine().store().is_none() {
            return;
        }
        let id = *self.fault_rng.pick(&survivors);
        self.note(|| format!("all is lost but n{id}, which goes on alone"));
        let former = self.lose_all();
        let options = log_options(&self.plan);
        let node = &self.nodes[&id];
        let (disk, name) = (node.disk.clone(), node.name.clone());
        disk.heal();
        let found = match find(&disk, &options) {
            Ok(found) => found,
            Err(why) => return self.give_up(id, &why),
        };
        let last = found.entries.last().map(|entry| (entry.index, entry.term));
        let at_snapshot = found
            .snapshot
            .as_ref()
            .map(|snapshot| (snapshot.metadata.index, snapshot.metadata.term));
        let (index, term) = last.max(at_snapshot).unwrap_or_default();
        // Whoever has all that was committed knows of all leases.
        let is_whole = index >= self.oracle.last();
        let trusts = is_whole && self.fault_rng.chance(500);
        let min = if trusts { Span::ZERO } else { self.longest_lease() };
        let delay = Delay { min, max: None };
        let chance = Chance::seeded(self.plan.seed ^ 0xf04ce ^ self.now);
        let now = self.now;
        let mut first_delay = Span::ZERO;
        if self.fault_rng.chance(500) {
            // The machine goes down in the middle of it. It can be done again.
            match stepped::force_new(disk.clone(), delay, options.clone(), &chance, now) {
                // If that was done, its delay goes on; the leases that it was for are not known any more.
                Ok(begun) => first_delay = begun.delay,
                Err(why) => return self.give_up(id, &why),
            }
            disk.crash(true, &mut self.disk_rng);
        }
        match stepped::force_new(disk.clone(), delay, options, &chance, now) {
            Ok(begun) => {
                self.disasters.seen.push(Fault::ForceNew);
                // If all its entries were committed, the state is that of the last one.
                let known = self.oracle.term(index) == Some(term);
                let delay = (begun.delay, begun.delay.max(first_delay));
                self.begin_anew(disk, name, &begun, delay, known.then_some(index), former);
            }
            Err(why) => self.give_up(id, &why),
        }
    }

    /// The survivor can not be used: others are.
    fn give_up(&mut self, id: RaftId, why: &str) {
        let is_known = ["has not begun", "holds no member", "was removed"];
        self.note(|| format!("n{id} can not go on alone: {why}"));
        if !self.rotten && !is_known.iter().any(|known| why.contains(known)) {
            self.check_begun(Err(why.to_owned()));
        }
    }

    fn check_begun(&mut self, begun: Result<(), String>) {
        if let Err(why) = begun {
            self.check(Err(Broken::new("new-cluster", why)));
        }
    }

    /// A lease that nobody has asked for more than: on lines it is whole seconds.
    fn longest_lease(&self) -> Span {
        Span(self.plan.lease_max + SEC)
    }

    /// All nodes end, with or without power. The processes of the cluster, as they were: a node that was added and that
    /// nobody had reached yet is of no cluster, so the next one may talk to it.
    fn lose_all(&mut self) -> Vec<Rc<crate::process::Process>> {
        let lives = self.nodes.values().filter_map(|node| node.live.as_ref());
        let members = lives.filter(|live| live.process.member.has_cluster());
        let former = members.map(|live| Rc::clone(&live.process)).collect();
        let power = self.fault_rng.chance(500);
        for id in self.nodes.keys().copied().collect::<Vec<_>>() {
            self.crash(id, power, SEC);
        }
        former
    }

    /// Another cluster begins with what is on a disk. Its state is that of an entry of the old one, if that is known.
    fn begin_anew(
        &mut self,
        disk: SimDisk,
        name: String,
        begun: &Begun,
        delay: (Span, Span),
        index: Option<u64>,
        former: Vec<Rc<crate::process::Process>>,
    ) {
        disk.commit(disk.position());
        let state = find(&disk, &log_options(&self.plan)).and_then(|found| {
            let snapshot = found.snapshot.ok_or("nothing was written")?;
            let machine = Machine::restore(&snapshot.data, false)?;
            Ok((snapshot, machine))
        });
        let (snapshot, machine) = match state {
            Ok(state) => state,
            Err(why) => return self.check_begun(Err(why)),
        };
        disk.commit(disk.position());
        let old = self.oracle.machine();
        self.disasters.clusters.extend([old.cluster(), begun.was]);
        self.disasters.clusters.extend(old.formed_as());
        let result = new_cluster::check(&machine, &self.oracle, &self.disasters.clusters, index);
        self.check(result);
        let Some((&id, _)) = machine.members().iter().next() else {
            return self.check_begun(Err("the new cluster has no member".into()));
        };
        self.end_history();
        for node in self.nodes.values_mut() {
            node.gone = true;
        }
        let ppm = self.nodes.values().next().map_or(0, |node| node.ppm);
        let mut node = Node::new(id, name, false, false, ppm);
        node.life = self.nodes.get(&id).map_or(0, |other| other.life + 1);
        (node.disk, node.durable) = (disk, Durable::default());
        self.nodes.insert(id, node);
        self.note(|| format!("n{id} begins a new cluster, and grants nothing for {delay:?}"));
        self.oracle.begin_anew(&snapshot.data, snapshot.metadata.index, delay);
        self.history.before = before(&machine, &self.oracle);
        let disasters = &mut self.disasters;
        disasters.terms += self.leaders.count();
        disasters.era += 1;
        (disasters.former, disasters.under_way, disasters.backup) = (former, None, None);
        (self.leaders, self.admin) = (Leaders::default(), Membership::Idle);
        self.forced.clear();
        let soon = self.fault_rng.between(10 * MS, SEC);
        self.schedule(soon, Event::Start(id));
        self.schedule(soon + 2 * SEC, Event::Grow);
    }

    /// The clients lose their connections, and what they asked the old cluster for is checked.
    fn end_history(&mut self) {
        for client in 0..self.clients.len() {
            self.client_closed(client, false);
            for place in self.clients[client].begin_anew() {
                self.history.asked[place].end = End::Unknown;
            }
        }
        let result = totals::check(&self.history, &self.oracle);
        self.check(result);
        self.disasters.ordered += self.put_in_order();
        self.history = History::default();
    }

    /// Looks for an order of all that clients were told by this cluster. How many requests there is one for.
    pub(super) fn put_in_order(&mut self) -> u64 {
        if self.broken.is_some() || self.clients.len() > linearizable::CLIENTS_MAX {
            return 0;
        }
        let locks = self.plan.auto_release != AutoRelease::Any && self.plan.keeps_rate();
        let undone = &self.oracle.undone;
        let result = linearizable::check(&self.history, &self.doomed, undone, locks);
        let mut ordered = 0;
        self.check(result.map(|count| ordered = count));
        ordered
    }

    /// A new cluster gets more members, of new names or of old ones.
    pub(super) fn grow(&mut self) {
        if !self.storm {
            return;
        }
        self.schedule(2 * SEC, Event::Grow);
        let leader = self.leader().and_then(|id| self.nodes.get(&id));
        let learners = leader
            .and_then(|node| node.with_replica(|replica| replica.conf_state().learners.len()));
        let members = self.oracle.machine().members().len();
        if learners.is_some_and(|learners| learners > 0) || members < MEMBERS {
            self.change_members();
        }
    }

    /// A node that has begun does not talk to those of an older cluster.
    pub(super) fn check_former(&mut self, id: RaftId) {
        if self.disasters.former.is_empty() {
            return;
        }
        let Some(live) = &self.nodes[&id].live else { return };
        let member = &live.process.member;
        let talks = |former: &&Rc<crate::process::Process>| {
            member.takes_part()
                && (member.meets(&former.member).is_ok() || former.member.meets(member).is_ok())
        };
        if self.disasters.former.iter().any(|former| talks(&former)) {
            let what = format!("n{id} talks to a node of the old cluster");
            self.check(Err(Broken::new("new-cluster", what)));
        }
    }
}

fn log_options(plan: &Plan) -> LogOptions {
    LogOptions { segment_bytes: plan.segment_bytes }
}

/// What is in a data directory.
fn find(disk: &SimDisk, options: &LogOptions) -> Result<Recovered, String> {
    let opened = LogStore::open(disk.clone(), options.clone());
    opened.map(|(_, recovered)| recovered).map_err(|error| error.to_string())
}

/// What clients find in a new cluster.
fn before(machine: &Machine, oracle: &crate::oracle::Oracle) -> Before {
    let mut before = Before { fences: oracle.fences_by_key(), ..Before::default() };
    let Some(store) = machine.store() else { return before };
    let now = machine.now();
    for key in oracle.keys() {
        if let Outcome::Number(value) = store.read(Query::Counter { key }, now) {
            before.counters.insert(key.clone(), value);
        }
        if let Outcome::Entry { value, revision, .. } = store.read(Query::Entry { key }, now) {
            before.entries.insert(key.clone(), (value.to_vec(), revision.0));
        }
        let range = Query::Range { key, start: 0, stop: -1 };
        if let Outcome::Items(items) | Outcome::Part(items) = store.read(range, now) {
            let items = items.iter().map(|item| item.to_vec()).collect();
            before.lists.insert(key.clone(), items);
        }
    }
    before
}
