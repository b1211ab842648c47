//! Several replicas in one thread over perfect links and disks, for what members decide together. Faults are for the
//! simulator.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use dflockd_core::{RequestId, command};
use raft::eraftpb::{ConfState, Entry, HardState, SnapshotMetadata};

use super::admin::{AdminRequest, AdminResult};
use super::codec::Frame;
use super::consensus::change_of;
use super::log::{LogBatch, Recovered, StoredSnapshot};
use super::types::{AutoRelease, Member, Proposal, ProposalBody};
use super::*;

const ELECTION_TICKS: usize = 50;

/// Members of one cluster, and who of them is cut off.
struct Group {
    replicas: BTreeMap<RaftId, Replica>,
    away: BTreeSet<RaftId>,
    now: Timestamp,
    frames: VecDeque<(RaftId, Outgoing)>,
    answers: BTreeMap<u64, AdminResult>,
    ended: BTreeMap<RaftId, String>,
    last_admin: u64,
    disks: BTreeMap<RaftId, TestDisk>,
    /// Members whose disks hang.
    hung: BTreeSet<RaftId>,
}

/// When, by whom, to whom, and what.
type SentFrame = (Timestamp, RaftId, RaftId, Bytes);

/// What a member has written.
#[derive(Default)]
struct TestDisk {
    entries: Vec<Entry>,
    hard_state: HardState,
    /// Written since the last sync, which a crash loses.
    unsynced: Vec<LogBatch>,
}

impl TestDisk {
    fn write(&mut self, write: LogWrite) {
        self.unsynced.push(write.batch);
        if !write.sync {
            return;
        }
        for batch in self.unsynced.drain(..) {
            if let Some(first) = batch.entries.first() {
                self.entries.retain(|entry| entry.index < first.index);
            }
            self.entries.extend(batch.entries);
            self.hard_state = batch.hard_state.unwrap_or(self.hard_state.clone());
        }
    }
}

/// `n1`, `n2`, ...
fn name(id: RaftId) -> String {
    format!("n{id}")
}

fn member(id: RaftId) -> Member {
    let node = name(id);
    let (peer_addr, client_addr) = (format!("{node}:1"), format!("{node}:2"));
    Member { node, peer_addr, client_addr, witness: false, disk: None }
}

impl Group {
    /// A new cluster of so many voters, with a leader.
    fn new(voters: u64) -> Self {
        let mut group = Self {
            replicas: BTreeMap::new(),
            away: BTreeSet::new(),
            now: Timestamp(1),
            frames: VecDeque::new(),
            answers: BTreeMap::new(),
            ended: BTreeMap::new(),
            last_admin: 0,
            disks: BTreeMap::new(),
            hung: BTreeSet::new(),
        };
        for id in 1..=voters {
            group.start(id, voters);
        }
        group.run_until("a leader", |group| group.leader().is_some());
        group
    }

    /// A member of a new cluster of so many voters loses its power and starts again.
    fn crash(&mut self, id: RaftId, voters: u64) {
        self.replicas.remove(&id).expect("it runs");
        self.frames.retain(|(from, _)| *from != id);
        self.hung.remove(&id);
        self.start(id, voters);
    }

    /// Starts a member of a new cluster of so many voters, or one that knows nothing, with what is on its disk.
    fn start(&mut self, id: RaftId, voters: u64) {
        let snapshot = (voters > 0).then(|| {
            let members: BTreeMap<_, _> = (1..=voters).map(|id| (id, member(id))).collect();
            let voters = members.keys().copied().collect();
            let mut metadata = SnapshotMetadata { index: 1, term: 1, ..Default::default() };
            metadata.set_conf_state(ConfState { voters, ..Default::default() });
            let data = Machine::new([7; 16], members).snapshot().into();
            StoredSnapshot { metadata, data, digest: [0; 32] }
        });
        let hard_state = match &snapshot {
            Some(_) => HardState { term: 1, commit: 1, ..Default::default() },
            None => HardState::default(),
        };
        let notes = BTreeMap::new();
        let first = TestDisk { hard_state, ..TestDisk::default() };
        let disk = self.disks.entry(id).or_insert(first);
        disk.unsynced.clear();
        let (entries, hard_state) = (disk.entries.clone(), disk.hard_state.clone());
        let boot = entries.iter().map(|entry| u32::try_from(entry.term).unwrap()).max();
        let recovered = Recovered { hard_state, notes, snapshot, entries, cut: false };
        let policy = Policy { auto_release: AutoRelease::Clean, ..Policy::default() };
        let config = ReplicaConfig {
            raft: RaftConfig {
                id,
                election_ticks: ELECTION_TICKS,
                heartbeat_ticks: ELECTION_TICKS / 10,
                seed: 1,
            },
            witness: false,
            policy,
            fence: 1,
            seed: 1,
            // Each draws its own.
            cluster: [u8::try_from(id).unwrap(); 16],
            // Later than all before it.
            run: Incarnation::new(id, boot.unwrap_or(0) + 1),
            start: Start {
                disk: id,
                client_addr: format!("{}:2", name(id)),
                version: version::NEWEST,
                witness: false,
            },
            snapshot_entries: 1000,
            snapshot_bytes: 1 << 20,
        };
        self.replicas.insert(id, Replica::new(config, recovered, self.now).unwrap());
    }

    /// One tick for all, and all that follows from it.
    fn tick(&mut self) {
        self.now = self.now + TICK;
        for id in self.ids() {
            let now = self.now;
            self.replica(id).handle_time(now);
            self.poll(id);
        }
        while self.deliver() {}
    }

    /// The next instant at which somebody has asked to be woken, and all that follows from it. Returns the frames that
    /// were sent, and how many members were woken.
    fn wake(&mut self) -> (Vec<SentFrame>, usize) {
        let at = self.replicas.values().map(Replica::next_deadline).min().expect("members");
        self.now = self.now.max(at);
        let (now, mut sent, mut woken) = (self.now, Vec::new(), 0);
        for id in self.ids() {
            if self.replicas[&id].next_deadline() <= now {
                self.replica(id).handle_time(now);
                self.poll(id);
                woken += 1;
            }
        }
        while let Some((from, frame)) = self.frames.front() {
            sent.push((now, *from, frame.to, frame.bytes.clone()));
            self.deliver();
        }
        (sent, woken)
    }

    /// Delivers one frame. False if there is none.
    fn deliver(&mut self) -> bool {
        let Some((from, frame)) = self.frames.pop_front() else { return false };
        let is_cut = self.away.contains(&from) || self.away.contains(&frame.to);
        if !is_cut && self.replicas.contains_key(&frame.to) {
            let now = self.now;
            self.replica(frame.to).handle_time(now);
            self.replica(frame.to).handle_frame(from, frame.bytes);
            self.poll(frame.to);
        }
        true
    }

    fn poll(&mut self, id: RaftId) {
        let mut outputs = Outputs::default();
        let replica = self.replicas.get_mut(&id).expect("it runs");
        replica.poll(&mut outputs);
        loop {
            if let Some(job) = outputs.snapshot_job.take() {
                replica.handle_snapshot(Some(job.run().unwrap()), &mut outputs);
            } else if outputs.writes.is_empty() || self.hung.contains(&id) {
                break;
            }
            for write in outputs.writes.drain(..).filter(|_| !self.hung.contains(&id)) {
                let number = write.number;
                self.disks.entry(id).or_default().write(write);
                replica.handle_written(number);
            }
            replica.poll(&mut outputs);
        }
        self.frames.extend(outputs.frames.into_iter().map(|frame| (id, frame)));
        for event in outputs.events {
            if let NodeEvent::Admin(number, result) = event {
                self.answers.insert(number, result);
            }
        }
        if let Some(why) = outputs.fatal {
            self.ended.insert(id, why);
            self.replicas.remove(&id);
        }
    }

    fn ids(&self) -> Vec<RaftId> {
        self.replicas.keys().copied().collect()
    }

    fn replica(&mut self, id: RaftId) -> &mut Replica {
        self.replicas.get_mut(&id).expect("it runs")
    }

    /// Who leads and can be talked to.
    fn leader(&self) -> Option<RaftId> {
        let mut here = self.replicas.iter().filter(|(id, _)| !self.away.contains(id));
        here.find(|(_, replica)| replica.is_open()).map(|(&id, _)| id)
    }

    #[track_caller]
    fn run_until(&mut self, what: &str, mut is_so: impl FnMut(&Self) -> bool) {
        // Two minutes of its time.
        for _ in 0..12_000 {
            if is_so(self) {
                return;
            }
            self.tick();
        }
        panic!("never: {what}");
    }

    /// Long enough for a leader to know who does not answer.
    fn pass_election_timeout(&mut self) {
        for _ in 0..2 * ELECTION_TICKS {
            self.tick();
        }
    }

    /// What comes of a request to a member.
    #[track_caller]
    fn ask(&mut self, of: RaftId, request: AdminRequest) -> AdminResult {
        self.last_admin += 1;
        let number = self.last_admin;
        self.replica(of).admin(number, request);
        self.run_until("an answer", |group| group.answers.contains_key(&number));
        self.answers.remove(&number).expect("just seen")
    }

    fn voters(&self, of: RaftId) -> Vec<RaftId> {
        self.replicas[&of].conf_state().voters
    }

    /// That a request is refused because of these voters, and changes nothing.
    #[track_caller]
    fn check_refused(&mut self, of: RaftId, request: AdminRequest, silent: &[RaftId]) {
        let before = self.voters(of);
        let why = self.ask(of, request).unwrap_err();
        let names: Vec<String> = silent.iter().copied().map(name).collect();
        assert!(why.contains(&format!("not reachable: {};", names.join(", "))), "{why}");
        assert!(why.contains("force"), "{why}");
        self.pass_election_timeout();
        assert_eq!(self.voters(of), before);
    }

    /// Whether the change of the membership in the log of a member is committed there; none if there is none.
    fn has_change(&self, id: RaftId) -> Option<bool> {
        let entries = &self.disks[&id].entries;
        let change = entries.iter().find(|entry| change_of(entry).is_some())?.index;
        Some(self.replicas.get(&id).is_some_and(|replica| replica.status().commit >= change))
    }

    /// A learner that has caught up.
    fn add_learner(&mut self, of: RaftId) -> RaftId {
        let id = self.replicas[&of].machine().next_raft_id();
        let Member { node, peer_addr, client_addr, witness, .. } = member(id);
        let add = AdminRequest::Add { node, peer_addr, client_addr, witness };
        self.ask(of, add).unwrap();
        self.start(id, 0);
        self.run_until("it has caught up", |group| {
            group.replicas[&id].status().applied >= group.replicas[&of].status().commit
        });
        id
    }
}

fn remove(id: RaftId, force: bool) -> AdminRequest {
    AdminRequest::remove(name(id), force)
}

fn promote(id: RaftId, force: bool) -> AdminRequest {
    AdminRequest::promote(name(id), force)
}

/// GUARANTEES 50: a voter that is not needed to reach a majority may go, one that is needed may not.
#[test]
fn promise_50_no_removal_leaves_fewer_reachable_voters_than_a_majority() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let others: Vec<RaftId> = group.ids().into_iter().filter(|&id| id != leader).collect();
    let (here, away) = (others[0], others[1]);
    group.away.insert(away);
    group.pass_election_timeout();
    // Of two voters both must be there. The leader hands nothing over before it refuses.
    group.check_refused(leader, remove(here, false), &[away]);
    group.check_refused(here, remove(here, false), &[away]);
    group.check_refused(here, remove(leader, false), &[away]);
    assert_eq!(group.leader(), Some(leader));
    // The one that is not there is not missed.
    group.ask(leader, remove(away, false)).unwrap();
    assert_eq!(group.voters(leader).len(), 2);
    // The leader is not counted when it is the one that goes.
    group.ask(here, remove(leader, false)).unwrap();
    assert_eq!(group.voters(here), [here]);
}

/// GUARANTEES 50: a voter more may raise the majority above what is reachable.
#[test]
fn promise_50_no_promotion_raises_the_majority_above_the_reachable_voters() {
    let mut group = Group::new(1);
    let learner = group.add_learner(1);
    group.away.insert(learner);
    group.pass_election_timeout();
    group.check_refused(1, promote(learner, false), &[learner]);
    group.away.clear();
    group.pass_election_timeout();
    group.ask(1, promote(learner, false)).unwrap();
    assert_eq!(group.voters(1), [1, learner]);

    // With one of three away a fourth is needed for the majority of four, so it must be there itself.
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let learner = group.add_learner(leader);
    let away = if leader == 1 { 2 } else { 1 };
    group.away.extend([away, learner]);
    group.pass_election_timeout();
    group.check_refused(leader, promote(learner, false), &[away, learner]);
    group.away.remove(&learner);
    group.pass_election_timeout();
    group.ask(leader, promote(learner, false)).unwrap();
    assert_eq!(group.voters(leader).len(), 4);
}

/// GUARANTEES 50: an operator who says so gets it all the same. The members that do not vote are nobody's majority.
#[test]
fn promise_50_a_forced_change_is_made() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let learner = group.add_learner(leader);
    let others: Vec<RaftId> = (1..=3).filter(|&id| id != leader).collect();
    group.away.insert(others[1]);
    group.pass_election_timeout();
    group.ask(leader, remove(learner, false)).unwrap();
    group.check_refused(leader, remove(others[0], false), &[others[1]]);
    group.ask(leader, remove(others[0], true)).unwrap();
    assert!(!group.voters(leader).contains(&others[0]));

    let mut group = Group::new(1);
    let learner = group.add_learner(1);
    group.away.insert(learner);
    group.pass_election_timeout();
    group.ask(1, promote(learner, true)).unwrap();
    assert_eq!(group.voters(1), [1, learner]);
}

/// GUARANTEES 50: a leader that has just begun waits for answers instead of refusing what it can not know yet.
#[test]
fn promise_50_a_new_leader_does_not_take_silence_for_absence() {
    for step in [1, 2] {
        let mut group = Group::new(3);
        let leader = group.leader().unwrap();
        let to = leader % 3 + 1;
        group.ask(leader, AdminRequest::Transfer { to: Some(name(to)) }).unwrap();
        group.run_until("it leads", |group| group.replicas[&to].status().is_leader());
        group.ask(to, remove((to + step - 1) % 3 + 1, false)).unwrap();
    }
}

/// A leader that can not propose yet is not woken for what is due: it would look again and again without an end.
#[test]
fn a_leader_that_is_not_open_sleeps() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let to = leader % 3 + 1;
    let ttl = Some(Span::from_millis(100));
    let item = Proposal {
        session: group.replicas[&leader].run().session(1),
        epoch: 0,
        request: RequestId(1),
        keep: false,
        body: ProposalBody::Command(command::KvSet { ttl, key: b"key", value: b"value" }.into()),
    };
    assert!(group.replica(leader).submit(&item, Some(Span::ZERO)));
    group.tick();
    assert!(group.replicas[&to].machine().next_deadline().is_some());
    group.replica(leader).admin(1, AdminRequest::Transfer { to: Some(name(to)) });
    group.poll(leader);
    while !group.replicas[&to].status().is_leader() {
        assert!(group.deliver(), "it never leads");
    }
    assert!(!group.replicas[&to].is_open());
    let (begin, replica) = (group.now, group.replica(to));
    for _ in 0..40 {
        replica.handle_time(replica.next_deadline());
        replica.poll(&mut Outputs::default());
    }
    assert!(!replica.is_open());
    assert!(replica.next_deadline().since(begin).0 >= 40 * TICK.0, "it looks between ticks");
}

/// GUARANTEES 40: a leader whose disk is full hands over, but not to and fro where nobody has room.
#[test]
fn promise_40_leadership_does_not_go_to_and_fro() {
    let mut group = Group::new(2);
    let first = group.leader().unwrap();
    group.replica(first).handle_room(true);
    group.run_until("the one with room leads", |group| {
        group.leader().is_some_and(|leader| leader != first)
    });
    let second = group.leader().unwrap();
    group.replica(second).handle_room(true);
    group.run_until("it hands over", |group| group.leader() == Some(first));
    let before = group.replicas[&first].status().term;
    for _ in 0..6000 {
        group.tick();
    }
    let terms = group.replicas[&first].status().term - before;
    assert!((1..=2).contains(&terms), "{terms} terms in a minute");
}

/// GUARANTEES 37: a single voter leads as soon as it wants to, but says nothing in a term that it could forget: after a
/// crash it would lead in the same term again, with other entries and another time, and a learner could not tell.
#[test]
fn promise_37_nothing_is_said_in_a_term_that_is_not_durable() {
    let mut group = Group::new(1);
    let learner = group.add_learner(1);
    group.crash(1, 1);
    group.hung.insert(1);
    let before = group.replicas[&learner].status().term;
    for _ in 0..100 {
        group.tick();
    }
    let status = group.replicas[&1].status();
    assert!(status.is_leader() && status.term > before, "{status:?}");
    assert_eq!(group.replicas[&learner].status().term, before, "it has heard of the term");
    group.crash(1, 1);
    assert_eq!(group.replicas[&1].status().term, before);
    group.run_until("both agree", |group| {
        let [voter, learner] = [1, learner].map(|id| group.replicas[&id].status());
        learner.term == status.term && voter.last > 1 && voter.last == learner.applied
    });
}

/// The commit index alone is no reason to write, but the file is not far behind it.
#[test]
fn the_commit_index_is_written_soon() {
    let mut group = Group::new(3);
    group.run_until("nothing is under way", |group| {
        let mut all = group.replicas.values().map(Replica::status);
        all.all(|status| status.commit == status.last && status.applied == status.last)
    });
    for _ in 0..20 {
        group.tick();
    }
    for (id, replica) in &group.replicas {
        let disk = &group.disks[id];
        let unsynced = disk.unsynced.iter().filter_map(|batch| batch.hard_state.as_ref());
        let state = unsynced.last().unwrap_or(&disk.hard_state);
        assert_eq!(state.commit, replica.status().commit, "n{id}");
    }
}

/// GUARANTEES 43: what a member notes because of its state, the name of its cluster, can not be on its disk without the
/// commit of that state: it would know the name and not where it is from, and talk to nobody who does not know it.
#[test]
fn a_name_is_noted_behind_its_commit() {
    let mut group = Group::new(3);
    let mut named = BTreeSet::new();
    for _ in 0..10_000 {
        for (id, replica) in &group.replicas {
            if replica.machine().formed_as().is_none() || !named.insert(*id) {
                continue;
            }
            let disk = &group.disks[id];
            let unsynced = disk.unsynced.iter().filter_map(|batch| batch.hard_state.as_ref());
            let state = unsynced.last().unwrap_or(&disk.hard_state);
            assert!(state.commit >= replica.status().applied, "n{id}: {state:?}");
        }
        if named.len() == 3 {
            return;
        }
        if !group.deliver() {
            group.now = group.now + TICK;
            for id in group.ids() {
                let now = group.now;
                group.replica(id).handle_time(now);
                group.poll(id);
            }
        }
    }
    panic!("they never have a name");
}

/// A member that sleeps while its ticks change nothing sends the same frames at the same instants as one that is woken
/// for each tick: heartbeats, and the elections after two leaders have fallen silent.
#[test]
fn a_member_sleeps_through_ticks_that_change_nothing() {
    let (mut ticking, mut sleeping) = (Group::new(5), Group::new(5));
    let second = Span::from_millis(1000);
    for phase in 0..3 {
        let begin = ticking.now;
        let end = begin + Span(second.0 * 10);
        let mut expected = Vec::new();
        while ticking.now + TICK <= end {
            ticking.now = ticking.now + TICK;
            for id in ticking.ids() {
                let now = ticking.now;
                ticking.replica(id).handle_time(now);
                ticking.poll(id);
            }
            while let Some((from, frame)) = ticking.frames.front() {
                expected.push((ticking.now, *from, frame.to, frame.bytes.clone()));
                ticking.deliver();
            }
        }
        let (mut sent, mut woken) = (Vec::new(), 0);
        while sleeping.replicas.values().any(|replica| replica.next_deadline() <= end) {
            let (frames, count) = sleeping.wake();
            sent.extend(frames);
            woken += count;
        }
        assert!(expected.len() > 100, "{}", expected.len());
        for (at, (expected, sent)) in expected.iter().zip(&sent).enumerate() {
            assert_eq!(expected, sent, "frame {at} of phase {phase}");
        }
        assert_eq!(expected.len(), sent.len(), "phase {phase}");
        // A look of each member every 100 ms, and a heartbeat of the leader every 50 ms.
        let most = 10 * (5 * 10 + 20) + 100;
        assert!(woken < most, "phase {phase}: woken {woken} times in 10 s");
        let leader = ticking.leader().expect("a majority is there");
        assert_eq!(sleeping.leader(), Some(leader));
        for group in [&mut ticking, &mut sleeping] {
            group.now = end;
            group.away.insert(leader);
        }
    }
}

/// GUARANTEES 41: the members of a new cluster agree on a name that one of them has drawn, and keep it.
#[test]
fn a_new_cluster_agrees_on_a_name() {
    let mut group = Group::new(3);
    let names = |group: &Group| {
        let machines = group.replicas.values().map(Replica::machine);
        machines.map(|machine| (machine.formed_as(), machine.cluster())).collect::<BTreeSet<_>>()
    };
    group.run_until("all have a name", |group| {
        let names = names(group);
        names.len() == 1 && names.iter().all(|(formed_as, _)| formed_as.is_some())
    });
    let agreed = names(&group);
    let leader = group.leader().unwrap();
    let drawn = [u8::try_from(leader).unwrap(); 16];
    assert_eq!(agreed, BTreeSet::from([(Some([7; 16]), drawn)]));
    let to = leader % 3 + 1;
    group.ask(leader, AdminRequest::Transfer { to: Some(name(to)) }).unwrap();
    group.run_until("it leads", |group| group.leader() == Some(to));
    group.pass_election_timeout();
    assert_eq!(names(&group), agreed, "another leader draws no other");
}

/// GUARANTEES 20: who is asked for its own removal says that it is done before it ends, leader or not.
#[test]
fn a_member_that_removes_itself_says_so() {
    for is_leader in [true, false] {
        let mut group = Group::new(3);
        let leader = group.leader().unwrap();
        let asked = if is_leader { leader } else { leader % 3 + 1 };
        group.ask(asked, remove(asked, false)).unwrap();
        group.run_until("it ends", |group| group.ended.contains_key(&asked));
        assert_eq!(group.ended[&asked], REMOVED);
    }
}

/// GUARANTEES 20: the entry that says so may never come to who was removed; the answer of the leader will do.
#[test]
fn a_member_that_hears_of_its_removal_ends() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let asked = leader % 3 + 1;
    let reply = codec::pack(&AdminResult::Ok(())).into();
    group.replica(asked).admin(7, remove(leader, false));
    group.replica(asked).admin(8, remove(asked, false));
    // Of somebody else's removal nothing follows.
    group.replica(asked).handle_frame(leader, Frame::AdminReply { id: 7, reply }.encode());
    group.poll(asked);
    assert_eq!((group.answers.get(&7), group.ended.get(&asked)), (Some(&Ok(())), None));
    let reply = codec::pack(&AdminResult::Ok(())).into();
    group.replica(asked).handle_frame(leader, Frame::AdminReply { id: 8, reply }.encode());
    group.poll(asked);
    assert_eq!(group.answers.get(&8), Some(&Ok(())));
    assert_eq!(group.ended[&asked], REMOVED);
}

/// GUARANTEES 35, 41: a removal that was acknowledged outlives the power loss of whoever is left.
#[test]
fn a_single_voter_remembers_that_the_other_one_was_removed() {
    let mut group = Group::new(2);
    let leader = group.leader().unwrap();
    let removed = 3 - leader;
    group.ask(leader, remove(removed, false)).unwrap();
    group.run_until("it ends", |group| group.ended.contains_key(&removed));
    group.crash(leader, 2);
    group.run_until("a leader", |group| group.leader() == Some(leader));
    assert_eq!(group.voters(leader), [leader]);
}

/// GUARANTEES 41, 43: a removal that was acknowledged outlives the power loss of all and the loss of the leader: of
/// four voters three are left, and two of them are a majority.
#[test]
fn a_majority_remembers_that_somebody_was_removed() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let fourth = group.add_learner(leader);
    group.ask(leader, promote(fourth, false)).unwrap();
    group.away.insert(fourth);
    group.pass_election_timeout();
    group.ask(leader, remove(fourth, false)).unwrap();
    let others: Vec<RaftId> = (1..=3).filter(|id| *id != leader).collect();
    group.away.insert(leader);
    for &id in &others {
        group.crash(id, 3);
    }
    group.run_until("another leader", |group| group.leader().is_some());
    let now = group.leader().unwrap();
    assert!(others.contains(&now));
    let voters: BTreeSet<RaftId> = group.voters(now).into_iter().collect();
    assert_eq!(voters, (1..=3).collect());
}

/// Of two members the first, which leads, has proposed the removal of the second and lost that with its power.
fn with_an_inherited_removal() -> (Group, RaftId, RaftId) {
    let mut group = Group::new(2);
    let first = group.leader().unwrap();
    let second = 3 - first;
    group.hung.insert(first);
    group.replica(first).admin(1, remove(second, false));
    group.poll(first);
    while group.deliver() {}
    group.crash(first, 2);
    assert_eq!((group.has_change(first), group.has_change(second)), (None, Some(false)));
    (group, first, second)
}

/// A leader may find its own removal in the log, proposed by one that has lost it with its power.
#[test]
fn a_leader_can_be_removed_by_an_earlier_one() {
    let (mut group, first, second) = with_an_inherited_removal();
    group.run_until("it ends", |group| group.ended.contains_key(&second));
    assert_eq!(group.ended[&second], REMOVED);
    group.run_until("the other one leads", |group| group.leader() == Some(first));
    assert_eq!(group.voters(first), [first]);
}

/// GUARANTEES 41, 43: such a leader stays until the other one knows that the removal is committed, which that one could
/// not find out by itself.
#[test]
fn a_removed_leader_stays_until_others_know() {
    let (mut group, first, second) = with_an_inherited_removal();
    // What it says is lost from the moment on at which it knows that its removal is committed.
    for _ in 0..20 * ELECTION_TICKS {
        group.now = group.now + TICK;
        for id in group.ids() {
            let now = group.now;
            group.replica(id).handle_time(now);
            group.poll(id);
        }
        while group.has_change(second) == Some(false) && group.deliver() {}
        if group.has_change(second) != Some(false) {
            break;
        }
    }
    assert_eq!(group.has_change(second), Some(true));
    group.frames.clear();
    group.away.insert(second);
    group.pass_election_timeout();
    assert!(!group.ended.contains_key(&second), "nobody knows that it is removed");
    group.away.clear();
    group.run_until("the other one leads", |group| group.leader() == Some(first));
    assert_eq!(group.voters(first), [first]);
}

/// GUARANTEES 40: a member without room hands leadership on until somebody leads that has room.
#[test]
fn who_has_room_leads_in_the_end() {
    for roomy in 1..=3 {
        let mut group = Group::new(3);
        for id in group.ids().into_iter().filter(|id| *id != roomy) {
            group.replica(id).handle_room(true);
        }
        group.run_until("it leads", |group| group.leader() == Some(roomy));
        group.pass_election_timeout();
        assert_eq!(group.leader(), Some(roomy));
    }
}

/// GUARANTEES 41: a voter is there until its removal is durable where it is decided.
#[test]
fn nothing_follows_from_a_removal_before_its_commit_is_durable() {
    let mut group = Group::new(2);
    let leader = group.leader().unwrap();
    let removed = 3 - leader;
    group.replica(leader).admin(1, remove(removed, false));
    group.poll(leader);
    // The leader has written the change, and its disk hangs before the other one acknowledges it.
    group.hung.insert(leader);
    for _ in 0..ELECTION_TICKS / 2 {
        group.tick();
    }
    assert!(group.disks[&removed].entries.iter().any(|entry| change_of(entry).is_some()));
    assert_eq!((group.ended.get(&removed), group.answers.get(&1)), (None, None));
    group.crash(leader, 2);
    group.run_until("a leader", |group| group.leader().is_some());
}

/// GUARANTEES 50: a voter whose process is gone is not counted until it answers again, however lately it did.
#[test]
fn promise_50_a_process_that_is_gone_is_not_reachable() {
    let mut group = Group::new(3);
    let leader = group.leader().unwrap();
    let (here, gone) = (leader % 3 + 1, (leader + 1) % 3 + 1);
    group.pass_election_timeout();
    group.away.insert(gone);
    group.replica(leader).handle_unreachable(gone, true);
    group.check_refused(leader, remove(here, false), &[gone]);
    group.away.clear();
    group.pass_election_timeout();
    group.ask(leader, remove(here, false)).unwrap();
}

/// Of the followers of a leader that falls silent the first is elected before the next wants to lead; if it is away as
/// well, the next one's turn comes soon after.
#[test]
fn a_silent_leader_is_replaced_by_turns() {
    let mut group = Group::new(5);
    for lost in 1..=2 {
        let leader = group.leader().unwrap();
        let others: Vec<RaftId> = group
            .ids()
            .into_iter()
            .filter(|id| *id != leader && !group.away.contains(id))
            .collect();
        group.away.insert(leader);
        let mut ticks = 0;
        group.run_until("another leader", |group| {
            ticks += 1;
            group.leader().is_some()
        });
        // The places are those among all voters but the leader that was lost, those that are away included.
        let place = group.ids().into_iter().filter(|id| *id != leader);
        let rank = place.take_while(|id| *id != others[0]).count();
        assert_eq!(group.leader(), Some(others[0]), "{lost}");
        let slot = ELECTION_TICKS / 4;
        let latest = ELECTION_TICKS + rank * slot + slot / 2 + 5;
        assert!(ticks <= latest, "{lost}: {ticks} ticks, at most {latest}");
    }
}
