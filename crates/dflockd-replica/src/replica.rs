//! [`Replica`]: inputs, what follows from them, and what is to be done.
//!
//! Here is the order of the steps: ticks, frames, Raft's Ready, applying. What has to be remembered for one purpose
//! stands in a part of its own beside this file, and the steps of one side in a file below it: `accept.rs`, `lead.rs`,
//! `snapshot.rs`.

mod accept;
mod lead;
mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Effect, Span, Timestamp};
use raft::eraftpb::{ConfState, Entry, Message, MessageType, SnapshotMetadata};

use super::accepting::Accepting;
use super::acknowledging::Acknowledging;
use super::admin::{AdminRequest, AdminResult, Admins};
use super::candidacy::Candidacy;
use super::changes::Changes;
use super::codec::{self, Frame};
use super::consensus::{Consensus, MemoryLog, Place, change_of};
use super::leading::Leading;
use super::log::{LogBatch, Recovered};
use super::machine::{Event, Machine};
use super::reads::Reads;
use super::requests::Requests;
use super::snapshots::Snapshots;
use super::transfer::Transfers;
use super::types::{Incarnation, Member, RaftId};
use super::writing::Writing;
use super::{
    NodeEvent, Outgoing, Outputs, REMOVED, ReceivedSnapshot, ReplicaConfig, Status, TICK,
    apply_entry, note, stamp_of,
};

/// How often requests, reads, leadership, transfers and admin requests are looked after.
const LOOK: Span = Span::from_millis(100);

/// How many ticks lie between the followers of a leader whose process is gone: each gives the one before it time to be
/// elected.
const CAMPAIGN_GAP_TICKS: usize = 10;

/// A member of a cluster.
pub struct Replica {
    pub(super) config: ReplicaConfig,
    pub(super) consensus: Consensus,
    pub(super) machine: Machine,
    /// The index of the last entry that is in `machine`.
    pub(super) applied: u64,

    // Time.
    /// Local time, as of the last [`Replica::handle_time`].
    pub(super) now: Timestamp,
    next_tick: Timestamp,
    looked_at: Timestamp,
    /// The stamp of the last entry that was applied, and the local time at which that was seen.
    stamped: (Timestamp, Timestamp),
    /// The newest term of which a leader's time was seen, in an entry or in a frame, and the highest time of that term.
    /// What leaders of older terms told counts no more: a later one may have begun to count from less, and leases are
    /// counted by its time.
    time_seen: (u64, Timestamp),

    // What is remembered, by purpose.
    accepting: Accepting,
    requests: Requests,
    reads: Reads,
    leading: Leading,
    pub(super) candidacy: Candidacy,
    writing: Writing,
    changes: Changes,
    acknowledging: Acknowledging,
    snapshots: Snapshots,
    pub(super) transfers: Transfers,
    pub(super) admins: Admins,
    /// Members that have spoken to this node and that its own state does not know yet, as they say: where to answer.
    introduced: BTreeMap<RaftId, Member>,

    // What goes out with the next poll.
    pub(super) queue: Vec<NodeEvent>,
    fatal: Option<String>,
    /// Empty; kept for its memory.
    events: Vec<Event>,
}

impl Replica {
    /// A member that goes on from what its log has.
    ///
    /// # Errors
    ///
    /// If that is not consistent.
    pub fn new(
        config: ReplicaConfig,
        recovered: Recovered,
        now: Timestamp,
    ) -> Result<Self, String> {
        let (metadata, data) = match recovered.snapshot {
            Some(snapshot) => (snapshot.metadata, snapshot.data),
            None => (SnapshotMetadata::default(), Bytes::new()),
        };
        let machine = if data.is_empty() {
            Machine::new([0; 16], BTreeMap::new())
        } else {
            Machine::restore(&data, config.witness)?
        };
        let applied = metadata.index;
        let stamps =
            recovered.entries.iter().filter_map(|entry| Some((entry.term, stamp_of(entry)?)));
        let time_seen = stamps.fold((metadata.term, machine.now()), Ord::max);
        let was_cut = recovered.cut || recovered.notes.contains_key(note::NON_VOTING);
        let tail = MemoryLog::new(recovered.hard_state, metadata, data, recovered.entries)?;
        let consensus =
            Consensus::new(&config.raft, tail).map_err(|error| format!("raft: {error}"))?;
        let alone = is_alone(&consensus, config.raft.id);
        let mut replica = Self {
            consensus,
            machine,
            applied,
            now,
            next_tick: now + TICK,
            looked_at: now,
            stamped: (Timestamp(0), now),
            time_seen,
            accepting: Accepting::new(config.run, now),
            requests: Requests::default(),
            reads: Reads::default(),
            leading: Leading::default(),
            // Nobody else could tell a single voter what it has lost.
            candidacy: Candidacy::new(was_cut && !alone),
            writing: Writing::default(),
            changes: Changes::default(),
            acknowledging: Acknowledging::new(Span(
                TICK.0 * config.raft.heartbeat_ticks as u64 / 2,
            )),
            snapshots: Snapshots::new(config.snapshot_entries, config.snapshot_bytes),
            transfers: Transfers::default(),
            admins: Admins::default(),
            introduced: BTreeMap::new(),
            queue: Vec::new(),
            fatal: None,
            events: Vec::new(),
            config,
        };
        if recovered.cut && replica.candidacy.is_behind() {
            replica.writing.note(note::NON_VOTING, vec![1]);
        }
        replica.take_place();
        if alone {
            // Nobody to wait for.
            replica.consensus.campaign_in(0);
        }
        replica.begin_incarnation();
        Ok(replica)
    }

    // ---- Inputs ----

    /// Time has passed. To be called before any other input of that instant, and at [`Replica::next_deadline`].
    pub fn handle_time(&mut self, now: Timestamp) {
        let stood_still = now.since(self.now);
        self.now = now;
        if self.stamped.0 != self.machine.now() {
            self.stamped = (self.machine.now(), now);
        }
        self.machine.show(self.stamped.0 + now.since(self.stamped.1));
        if stood_still > self.election_timeout() {
            // Others may have elected somebody meanwhile: nothing may be stamped on the strength of the old leadership,
            // and time that was not lived through is no reason to suspect anybody.
            if self.consensus.is_leader() && !is_alone(&self.consensus, self.id()) {
                let stalled_ms = stood_still.0 / 1_000_000;
                tracing::warn!(stalled_ms, "process stalled; stepping down");
                self.consensus.step_down();
            }
            self.next_tick = now + TICK;
            self.tick();
        }
        while self.next_tick <= now {
            self.next_tick = self.next_tick + TICK;
            self.tick();
        }
        if now.since(self.looked_at) >= LOOK {
            self.looked_at = now;
            self.look();
        }
    }

    /// A frame of another member, whose identity is certain.
    pub fn handle_frame(&mut self, from: RaftId, bytes: Bytes) {
        let frame = match Frame::decode(bytes) {
            Ok(frame) => frame,
            Err(error) => {
                tracing::warn!(from, %error, "malformed frame from a peer, dropped");
                return;
            }
        };
        // A removed member, whose connection is about to be closed, or a node that has no number yet. A number that is
        // not known is of a member that was added by entries which this node has not seen, and which may lead by now.
        let is_no_member = self.machine.was_removed(from) && !self.machine.members().is_empty();
        if is_no_member && !matches!(frame, Frame::Raft { .. }) {
            return;
        }
        self.leading.hear(from, self.now);
        match frame {
            Frame::Raft { time, message } => self.handle_message(from, time, message),
            Frame::Forward(batch) => {
                if self.machine.members().contains_key(&from) && batch.run.raft_id() == from {
                    self.handle_forward(from, batch);
                }
            }
            Frame::Expect { term, run, seq } => {
                self.accepting.expect((from, term), run, seq, self.now);
            }
            Frame::Chunk { transfer, offset, total, digest, keep_only, header, data } => {
                let complete = self
                    .transfers
                    .receive(from, transfer, offset, total, digest, keep_only, header, &data);
                if let Some(complete) = complete {
                    self.handle_transferred(from, complete);
                }
            }
            Frame::ChunkAck { transfer, received } => {
                if self.transfers.acknowledged(from, transfer, received, self.now) {
                    self.consensus.report_snapshot(from, true);
                }
            }
            Frame::Admin { id, request } => {
                if self.machine.members().contains_key(&from)
                    && let Ok(request) = codec::unpack::<AdminRequest>(&request)
                {
                    self.admins.forwarded(from, id, request);
                }
            }
            Frame::Members { members } => {
                if let Ok(members) = codec::unpack::<BTreeMap<RaftId, Member>>(&members) {
                    self.handle_introduction(from, members);
                }
            }
            Frame::AdminReply { id, reply } => {
                let Ok(reply) = codec::unpack::<AdminResult>(&reply) else { return };
                let own = self.machine.members().get(&self.id()).map(|member| &*member.node);
                if reply.is_ok() && own.is_some_and(|node| self.admins.asks_to_remove(id, node)) {
                    // Nobody sends the entry that says so any more.
                    self.fatal = Some(REMOVED.into());
                }
                if let Some(result) = self.admins.answered(id, reply) {
                    self.queue.push(NodeEvent::Admin(id, result));
                }
            }
        }
    }

    /// A member says who the members are. This node believes its own state first; of a member that it does not know it
    /// learns where to answer, and of all if it has no state.
    fn handle_introduction(&mut self, from: RaftId, mut members: BTreeMap<RaftId, Member>) {
        let known = self.machine.members();
        if !known.is_empty() {
            let may = !bug(Bug::NotIntroduced);
            members.retain(|&id, _| may && id == from && !known.contains_key(&id));
        }
        self.introduced.retain(|id, _| !known.contains_key(id));
        let is_news = |(id, member): (&RaftId, &Member)| self.introduced.get(id) != Some(member);
        if members.iter().any(is_news) {
            self.introduced.append(&mut members);
            self.queue.push(NodeEvent::Peers);
        }
    }

    /// Whom there is to talk to: all members, and those that have been introduced.
    #[must_use]
    pub fn peers(&self) -> BTreeMap<RaftId, Member> {
        let mut peers = self.introduced.clone();
        peers.retain(|&id, _| self.machine.members().is_empty() || !self.machine.was_removed(id));
        peers.extend(self.machine.members().iter().map(|(&id, member)| (id, member.clone())));
        peers
    }

    /// Log writes up to this number are done, durable where that was asked.
    pub fn handle_written(&mut self, number: u64) {
        if let Some(ready) = self.writing.written(number) {
            self.consensus.persisted(ready);
            self.consensus.applied(self.applied);
        }
        self.accepting.written(number);
        if self.changes.written(number) {
            // Whoever the change removes is not spoken to any more once it is applied.
            self.consensus.tell_commit();
        }
    }

    /// The disk has only its reserve left, or has room again.
    pub fn handle_room(&mut self, low: bool) {
        if !self.writing.set_room_low(low, self.now) {
            return;
        }
        if low {
            tracing::warn!("disk space is low; requests that make the state grow are refused");
        } else {
            tracing::warn!("there is disk space again; all requests are accepted");
        }
    }

    /// The connection to a member broke; `refused`: its process is gone.
    pub fn handle_unreachable(&mut self, peer: RaftId, refused: bool) {
        self.consensus.report_unreachable(peer);
        self.acknowledging.forget();
        if refused {
            self.leading.lose(peer);
        }
        if !refused || !self.candidacy.lose(peer, self.consensus.leader()) {
            return;
        }
        // The followers must not fire together. A witness goes last.
        if let Some(Place { rank, .. }) = self.place_without(Some(peer))
            && !self.candidacy.is_behind()
            && self.may_lead()
        {
            self.consensus.campaign_in(rank * CAMPAIGN_GAP_TICKS);
        }
    }

    /// The place of this node among the full voters without one of them; none if it is no full voter.
    fn place_without(&self, gone: Option<RaftId>) -> Option<Place> {
        let (mut rank, mut of) = (None, 0);
        for (&id, member) in self.machine.members() {
            if member.witness || Some(id) == gone || !self.consensus.is_voter(id) {
                continue;
            }
            if id == self.id() {
                rank = Some(of);
            }
            of += 1;
        }
        rank.map(|rank| Place { rank, of })
    }

    /// Asks for a change of the cluster, which the leader decides. Answered by [`NodeEvent::Admin`].
    /// What concerns this node alone it does itself.
    pub fn admin(&mut self, id: u64, request: AdminRequest) {
        if let Some(request) = self.admin_here(id, request) {
            self.admins.ask(id, request, self.now);
        }
    }

    // ---- Outputs ----

    /// What is to be done now.
    pub fn poll(&mut self, outputs: &mut Outputs) {
        // Applying an entry can make new work (a next tick, an answer to take back), so until there is none.
        loop {
            self.lead();
            self.forward(outputs);
            self.ask_reads();
            self.serve_admins(outputs);
            let mut any = false;
            while self.consensus.has_ready() && self.fatal.is_none() {
                any = true;
                self.process_ready(outputs);
            }
            // After the messages: who asked another member for a change finds it done there when the leader answers.
            if self.apply_committed(outputs) {
                any = true;
                self.consensus.applied(self.applied);
            }
            self.answer_reads();
            if !any {
                break;
            }
        }
        if self.consensus.tail().is_wanted() {
            self.make_snapshot(outputs);
        }
        self.serve_snapshots(outputs);
        let to_keep = self.snapshots.take_to_keep();
        let has_news = self.writing.has_notes() || to_keep.is_some();
        if has_news || self.writing.is_commit_due() {
            self.write(LogBatch::default(), to_keep, has_news, 0, Vec::new(), outputs);
        }
        let released = self.writing.take_released();
        self.send(released, outputs);
        self.transfers.send(outputs);
        outputs.events.append(&mut self.queue);
        outputs.fatal = self.fatal.take().or(outputs.fatal.take());
    }

    /// When to call [`Replica::handle_time`] at the latest.
    ///
    /// Ticks that change nothing are made up for later: a member that nothing comes to sleeps from one look to the
    /// next. It sleeps for no more than a part of the election timeout, or it would take its sleep for a stall.
    #[must_use]
    pub fn next_deadline(&self) -> Timestamp {
        // A leader that can not propose a tick now is not woken for one: it would find nothing to do, again and again.
        let deadline = self.machine.next_deadline().filter(|_| self.may_propose());
        let due = self.leading.wakes_at(deadline, self.applied);
        let ticks = if self.counts_ticks() { 1 } else { self.consensus.ticks_to_event() };
        let tick_at = self.next_tick + Span(TICK.0 * (ticks as u64 - 1));
        let sleep_max = Span(self.election_timeout().0 / 4).max(TICK);
        let at = tick_at.min(self.looked_at + LOOK).min(self.now + sleep_max);
        due.map_or(at, |due| due.min(at))
    }

    // ---- What a node is at the moment ----

    /// The replicated state.
    #[must_use]
    pub fn machine(&self) -> &Machine {
        &self.machine
    }

    /// The number of this member.
    #[must_use]
    pub fn id(&self) -> RaftId {
        self.config.raft.id
    }

    /// The incarnation that this node is in.
    #[must_use]
    pub fn run(&self) -> Incarnation {
        self.accepting.run()
    }

    /// Voters and learners, as of the last applied entry.
    #[must_use]
    pub fn conf_state(&self) -> ConfState {
        self.consensus.conf_state()
    }

    /// The newest snapshot.
    #[must_use]
    pub fn snapshot_metadata(&self) -> &SnapshotMetadata {
        &self.consensus.tail().snapshot
    }

    /// How things stand.
    #[must_use]
    pub fn status(&self) -> Status {
        let leader = self.consensus.leader();
        let has_begun = self.machine.applied_seq(self.run()).is_some_and(|seq| seq > 0);
        Status {
            role: self.consensus.role(),
            term: self.consensus.term(),
            leader,
            commit: self.consensus.commit(),
            applied: self.applied,
            last: self.consensus.tail().last(),
            snapshot: self.consensus.tail().snapshot.index,
            ready: leader.is_some()
                && (has_begun || self.config.witness)
                && self.candidacy.is_level(self.applied)
                && !self.machine.is_settling(),
            drained: self.candidacy.is_drained(),
        }
    }

    /// On the leader, how many entries each other member has not confirmed.
    pub fn lags(&self) -> Vec<(RaftId, u64)> {
        let last = self.consensus.tail().last();
        let others = self.machine.members().keys().filter(|&&id| id != self.id());
        let lag = |&id| Some((id, last.saturating_sub(self.consensus.progress(id)?.0)));
        others.filter_map(lag).collect()
    }

    /// The newest cluster time that was seen here.
    pub fn time_seen(&self) -> Timestamp {
        self.time_seen.1
    }

    /// The index and term of each entry in memory, for those who check that logs agree.
    pub fn log_terms(&self) -> impl Iterator<Item = (u64, u64)> {
        let tail = self.consensus.tail();
        (tail.first()..=tail.last()).filter_map(|index| Some((index, tail.term_at(index)?)))
    }

    /// The last entry of the log, for those who check that logs agree.
    pub fn last_index(&self) -> u64 {
        self.consensus.last_index()
    }

    /// Entries in memory from `low` up to and with `high`, for those who check that logs agree.
    pub fn log_entries(&self, low: u64, high: u64) -> impl Iterator<Item = &Entry> {
        let tail = self.consensus.tail();
        let end = (high.min(tail.last()) + 1).max(tail.first());
        tail.slice(low.clamp(tail.first(), end), end)
    }

    // ---- Time ----

    /// Whether each tick changes something, whatever Raft makes of it: see [`Replica::tick`].
    fn counts_ticks(&self) -> bool {
        self.candidacy.is_behind() || self.candidacy.is_drained() || self.writing.is_installing()
    }

    fn tick(&mut self) {
        self.take_place();
        if self.candidacy.is_behind() || self.writing.is_installing() {
            self.consensus.reset_election_timer();
        }
        if self.candidacy.is_drained()
            && self.candidacy.tick_drained(self.consensus.misses_leader())
        {
            self.consensus.suppress_campaign();
        }
        self.consensus.tick();
        if self.candidacy.tick_behind() {
            tracing::warn!("no leader to catch up with; this node votes with the log it has");
            self.writing.note(note::NON_VOTING, Vec::new());
        }
    }

    /// Finds out when it is this node's turn to lead. Who leaves leading to others has no turn.
    fn take_place(&mut self) {
        let leader = self.consensus.leader();
        let place = if self.candidacy.is_drained() { None } else { self.place_without(leader) };
        self.consensus.set_place(place);
    }

    /// Looks after what may take too long.
    fn look(&mut self) {
        self.writing.flush_commit();
        self.look_after_requests();
        self.look_after_reads();
        self.look_after_leadership();
        for to in self.transfers.look(self.now) {
            self.consensus.report_snapshot(to, false);
        }
        let over = self.admins.look(self.now);
        self.queue.extend(over.into_iter().map(|(id, result)| NodeEvent::Admin(id, result)));
    }

    fn election_timeout(&self) -> Span {
        Span(TICK.0 * self.config.raft.election_ticks as u64)
    }

    // ---- Raft ----

    fn handle_message(&mut self, from: RaftId, time: Timestamp, mut message: Message) {
        if message.msg_type == MessageType::MsgHeartbeat {
            // Of a leader that does not know yet that the end of this log was cut.
            message.commit = message.commit.min(self.consensus.last_index());
        }
        if message.from != from || message.to != self.id() || !self.may_speak(from, &message) {
            return;
        }
        let from_leader = matches!(
            message.msg_type,
            MessageType::MsgAppend | MessageType::MsgHeartbeat | MessageType::MsgSnapshot
        );
        let is_append = message.msg_type == MessageType::MsgAppend;
        if is_append && !message.entries.is_empty() {
            self.acknowledging.forget();
        }
        let (term, commit) = (message.term, is_append.then_some(message.commit));
        let is_answer = matches!(
            message.msg_type,
            MessageType::MsgAppendResponse | MessageType::MsgHeartbeatResponse
        );
        if is_answer && self.consensus.is_leader() && self.consensus.term() == term {
            self.leading.answered(from, self.now);
        }
        self.consensus.step(message);
        if from_leader && self.consensus.term() == term {
            self.candidacy.hear_leader(commit);
            self.see_time(term, time);
        }
    }

    /// Whether a message may have any influence, before it can change a term or a vote.
    fn may_speak(&self, from: RaftId, message: &Message) -> bool {
        if self.machine.was_removed(from) && !self.machine.members().is_empty() {
            return false;
        }
        if message.msg_type == MessageType::MsgTimeoutNow && !self.may_lead() {
            return false;
        }
        let is_vote = is_vote_request(message);
        // Whether the candidate is a voter in this node's state does not matter: that state may be older than the
        // candidate's, and Raft counts votes by the configuration of the candidate. A majority in which one voter was
        // away when the others were exchanged could never elect anybody else.
        let is_known = !bug(Bug::VoterUnknown) || self.consensus.is_voter(from);
        !is_vote || !self.candidacy.is_behind() && is_known
    }

    fn may_lead(&self) -> bool {
        !self.writing.is_installing() && !self.candidacy.is_drained()
    }

    fn process_ready(&mut self, outputs: &mut Outputs) {
        let mut ready = self.consensus.ready();
        let number = ready.number();
        for read in ready.take_read_states() {
            if let Ok(question) = read.request_ctx.as_slice().try_into() {
                let too_early = bug(Bug::ReadTooEarly);
                let index = if too_early { read.index.min(self.applied) } else { read.index };
                self.reads.confirm(u64::from_le_bytes(question), index);
            }
        }
        let messages = ready.take_messages();
        let mut received = None;
        if ready.snapshot().get_metadata().index > 0 {
            let snapshot = ready.snapshot().clone();
            let metadata = snapshot.get_metadata().clone();
            self.install(metadata.clone(), snapshot.data.clone());
            if self.fatal.is_some() {
                return;
            }
            received = Some(ReceivedSnapshot { metadata, data: snapshot.data, install: true });
        }
        let entries = ready.take_entries();
        for (entry, stamp) in entries.iter().filter_map(|entry| Some((entry, stamp_of(entry)?))) {
            self.see_time(entry.term, stamp);
        }
        let (mut sync, is_leader) = (ready.must_sync(), self.consensus.is_leader());
        let hard_state = ready.hs().cloned();
        let tail = self.consensus.tail_mut();
        tail.append(&entries);
        if let Some(hard_state) = &hard_state {
            let before = std::mem::replace(&mut tail.hard_state, hard_state.clone());
            if (before.term, before.vote) != (hard_state.term, hard_state.vote) {
                self.writing.begin_term();
            }
            for change in tail.changes(before.commit, hard_state.commit).filter(|_| is_leader) {
                self.changes.commit(change, self.writing.next());
                sync = true;
            }
        }
        let mut held = Vec::new();
        if self.writing.is_term_written() {
            self.send(messages, outputs);
        } else {
            held = messages;
        }
        self.changes.hold(ready.take_committed_entries());
        self.apply_committed(outputs);
        if self.fatal.is_some() {
            return;
        }
        let mut messages = held;
        messages.extend(ready.take_persisted_messages());
        self.consensus.advance(ready);
        self.consensus.applied(self.applied);
        let mut hard_state = hard_state.filter(|_| !bug(Bug::VoteNotKept));
        if hard_state.is_some() && !sync && received.is_none() {
            self.writing.defer_commit();
            hard_state = None;
        }
        if bug(Bug::CountedBeforeSync) {
            self.consensus.persisted(number);
        }
        let batch = LogBatch { entries, hard_state, ..LogBatch::default() };
        let nothing = batch.entries.is_empty()
            && batch.hard_state.is_none()
            && received.is_none()
            && !self.writing.has_notes();
        if nothing && self.writing.is_done() {
            self.consensus.persisted(number);
            self.send(messages, outputs);
        } else {
            self.write(batch, received, sync, number, messages, outputs);
        }
    }

    /// Hands something to the log. `messages` leave when it is there.
    fn write(
        &mut self,
        mut batch: LogBatch,
        snapshot: Option<ReceivedSnapshot>,
        sync: bool,
        ready: u64,
        mut messages: Vec<Message>,
        outputs: &mut Outputs,
    ) {
        if bug(Bug::AckBeforeSync) {
            self.send(std::mem::take(&mut messages), outputs);
        }
        if self.writing.take_commit() && !bug(Bug::VoteNotKept) {
            let tail = self.consensus.tail();
            batch.hard_state.get_or_insert_with(|| tail.hard_state.clone());
        }
        let write = self.writing.write(batch, snapshot, sync, ready, messages, self.now);
        outputs.writes.push(write);
    }

    fn send(&mut self, messages: Vec<Message>, outputs: &mut Outputs) {
        let time = self.cluster_time().unwrap_or_default();
        for mut message in self.acknowledging.without_repeats(messages, self.now) {
            let to = message.to;
            message.commit = message.commit.min(self.changes.told_max());
            if is_vote_request(&message) {
                // A voter that was away when this node became a member does not know where to answer.
                let members = codec::pack(self.machine.members()).into();
                let bytes = Frame::Members { members }.encode();
                outputs.frames.push(Outgoing { to, bulk: false, bytes });
            }
            if message.msg_type == MessageType::MsgSnapshot {
                let data = message.mut_snapshot().take_data();
                let header = codec::encode_message(&message);
                self.transfers.begin(to, header, data, false, self.now);
                continue;
            }
            let bytes = Frame::Raft { time, message }.encode();
            outputs.frames.push(Outgoing { to, bulk: false, bytes });
        }
    }

    // ---- Applying ----

    /// Applies what is committed, as far as nothing has to be durable before. False if there is nothing.
    fn apply_committed(&mut self, outputs: &mut Outputs) -> bool {
        let before = self.applied;
        loop {
            let may_leave = self.may_leave();
            let Some(entry) = self.changes.next(self.id(), may_leave) else { break };
            self.apply(&entry, outputs);
        }
        self.applied > before
    }

    /// Whether this node may apply its own removal: a leader that knows has told it, or as one it has told others. Raft
    /// can not remove a leader.
    fn may_leave(&self) -> bool {
        let is_told = self.consensus.leader().is_some_and(|leader| leader != self.id());
        is_told || self.changes.has_left() && !self.consensus.is_leader()
    }

    fn apply(&mut self, entry: &Entry, outputs: &mut Outputs) {
        if self.fatal.is_some() {
            return;
        }
        let change = change_of(entry);
        if let Some(change) = &change
            && let Err(error) = self.consensus.apply_change(change)
        {
            self.fatal = Some(format!("entry {}: {error}", entry.index));
            return;
        }
        let mut events = std::mem::take(&mut self.events);
        if let Err(error) = apply_entry(&mut self.machine, entry, &mut events) {
            self.fatal = Some(format!("entry {}: {error}", entry.index));
            return;
        }
        self.applied = entry.index;
        for event in events.drain(..) {
            self.handle_event(event);
        }
        self.events = events;
        for decided in self.admins.applied(entry, change.is_some(), &self.machine) {
            self.answer_admin(decided, outputs);
        }
        self.forget_applied();
        if self.candidacy.catch_up(self.applied) {
            tracing::info!("caught up with the leader; this node votes again");
            self.writing.note(note::NON_VOTING, Vec::new());
        }
        if self.snapshots.applied(entry.index, entry.data.len() as u64) {
            self.make_snapshot(outputs);
        }
    }

    /// What the state brought about: what concerns the node itself is done, the rest is for its clients.
    fn handle_event(&mut self, event: Event) {
        if let Event::Effect(Effect::Reply { session, request, outcome }) = event {
            return self.settle(session, request, outcome);
        }
        match &event {
            Event::Attached { by: session, request, .. } | Event::Gone { session, request, .. } => {
                self.requests.answer((*session, *request));
            }
            // A node that was removed ends with its incarnation, and has something to tell its clients before.
            Event::IncarnationEnded(run)
                if *run == self.run()
                    && !bug(Bug::RunKept)
                    && !self.machine.was_removed(self.id()) =>
            {
                self.lose_incarnation();
            }
            Event::IncarnationStarted(run) if run.raft_id() == self.id() && *run > self.run() => {
                self.fatal = Some(
                    "the cluster knows a later start of this node: its data directory is an old copy; \
                     remove the node and let it join under a new id"
                        .into(),
                );
            }
            Event::Members => {
                // The node notes what it learns from it: the name of its cluster.
                self.writing.need_commit();
                let removed = self.machine.was_removed(self.id());
                if removed && !self.machine.members().is_empty() {
                    let done = self.admins.removed(|node| self.machine.is_retired(node));
                    self.queue.extend(done.into_iter().map(|id| NodeEvent::Admin(id, Ok(()))));
                    self.fatal = Some(REMOVED.into());
                }
            }
            Event::Digest { index, digest } => {
                let compared = self.snapshots.told(*index, *digest);
                self.check_state(*index, compared);
            }
            Event::PolicyChanged => {
                let (version, known) = (self.machine.version(), self.config.start.version);
                if version > known {
                    self.fatal = Some(format!(
                        "the cluster has version {version}, this server knows up to {known}; start a newer one"
                    ));
                }
            }
            Event::Effect(_)
            | Event::Kicked { .. }
            | Event::IncarnationStarted(_)
            | Event::IncarnationEnded(_) => {}
        }
        self.queue.push(NodeEvent::Machine(event));
    }
}

/// Whether a candidate asks for a vote, or whether it would get one.
fn is_vote_request(message: &Message) -> bool {
    matches!(message.msg_type, MessageType::MsgRequestVote | MessageType::MsgRequestPreVote)
}

fn is_alone(consensus: &Consensus, id: RaftId) -> bool {
    consensus.conf_state().voters == [id]
}
