//! Snapshots of a [`Replica`]: when one is made, what becomes of it, and those that come from other members.
//!
//! [`Snapshots`](crate::snapshots) keeps the books, [`Transfers`](crate::transfer) has those under way.

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Effect, Outcome, Progress, Refusal, Timestamp};
use raft::eraftpb::{Message, MessageType, SnapshotMetadata};

use super::Replica;
use crate::codec;
use crate::machine::{Event, Machine};
use crate::snapshots::Differs;
use crate::transfer::Complete;
use crate::types::{LeaderCommand, RaftId};
use crate::{MadeSnapshot, NodeEvent, Outputs, ReceivedSnapshot, SnapshotJob};

impl Replica {
    /// A snapshot was made and stored; none: there was no room for it.
    pub fn handle_snapshot(&mut self, made: Option<MadeSnapshot>, outputs: &mut Outputs) {
        self.snapshots.end();
        let Some(MadeSnapshot { metadata, data, digest }) = made else {
            let full = || Err("there is no room for a snapshot on the disk".to_owned());
            let waiting = self.admins.forget_snapshots();
            self.queue.extend(waiting.map(|id| NodeEvent::Admin(id, full())));
            return;
        };
        let index = metadata.index;
        let tail = self.consensus.tail();
        if index <= tail.snapshot.index {
            return;
        }
        let cut = self.snapshots.cut(index, tail.first());
        let since = tail.slice(index + 1, self.applied + 1);
        self.snapshots.set_bytes_since(since.map(|entry| entry.data.len() as u64).sum());
        outputs.gone = Some(self.consensus.tail_mut().compact(metadata, data, cut));
        outputs.truncate_before = Some(cut + 1);
        let compared = self.snapshots.made(index, digest);
        self.check_state(index, compared);
        if self.consensus.is_leader() {
            self.leading.order(LeaderCommand::Digest { index, digest });
            self.copy_to_witnesses();
        }
    }

    /// A node whose state is not the leader's must not answer anybody.
    pub(super) fn check_state(&mut self, index: u64, compared: Result<(), Differs>) {
        if let Err(Differs) = compared {
            self.fatal = Some(format!(
                "the state at entry {index} differs from the leader's; remove this node and let it join anew"
            ));
        }
    }

    /// Has a snapshot of all that is applied made aside, unless there is one or one is being made.
    pub(crate) fn make_snapshot(&mut self, outputs: &mut Outputs) {
        let tail = self.consensus.tail();
        let has_one = self.applied <= tail.snapshot.index;
        if self.snapshots.is_making() || self.config.witness || has_one {
            return;
        }
        let mut metadata = SnapshotMetadata { index: self.applied, ..Default::default() };
        metadata.term = tail.term_at(self.applied).expect("just applied");
        metadata.set_conf_state(self.consensus.conf_state());
        if bug(Bug::StaleMembers) {
            metadata.set_conf_state(tail.snapshot.get_conf_state().clone());
        }
        let entries = tail.slice(tail.snapshot.index + 1, self.applied + 1).cloned().collect();
        let base = tail.snapshot_data.clone();
        outputs.snapshot_job = Some(SnapshotJob { base, entries, metadata });
        self.snapshots.begin();
    }

    /// A snapshot of another member replaces the state: what it skipped was never seen here.
    pub(super) fn install(&mut self, metadata: SnapshotMetadata, data: Bytes) {
        match Machine::restore(&data, self.config.witness) {
            Ok(mut machine) => {
                machine.continue_tally(&self.machine);
                self.machine = machine;
            }
            Err(error) => {
                self.fatal = Some(format!("a received snapshot can not be used: {error}"));
                return;
            }
        }
        self.applied = metadata.index;
        self.changes.skip_to(self.applied);
        self.snapshots.set_bytes_since(0);
        self.see_time(metadata.term, self.machine.now());
        self.consensus.tail_mut().install(metadata, data);
        self.queue.push(NodeEvent::Machine(Event::Members));
        self.queue.push(NodeEvent::Skipped);
        let own = self.accepting.run();
        match self.machine.newest_run(self.id()) {
            Some(run) if run > own => {
                self.handle_event(Event::IncarnationStarted(run));
                return;
            }
            Some(run) if run == own && self.machine.run_of(self.id()).is_none() => {
                self.lose_incarnation();
                return;
            }
            _ => {}
        }
        self.forget_applied();
        self.answer_skipped();
    }

    /// Answers the requests whose entries a received snapshot skipped, as far as its state knows their outcomes.
    fn answer_skipped(&mut self) {
        let applied = self.machine.applied_seq(self.accepting.run()).unwrap_or(0);
        for (session, request) in self.requests.applied(applied) {
            let progress = self.machine.store().map(|store| store.progress(session, request));
            let outcome = match progress {
                Some(Progress::Waiting) => continue,
                Some(Progress::Answered(outcome)) => outcome,
                Some(Progress::Unknown) | None => Outcome::Refused(Refusal::Forgotten),
            };
            let effect = Effect::Reply { session, request, outcome };
            self.handle_event(Event::Effect(effect));
        }
    }

    /// A whole snapshot has come from another member.
    pub(super) fn handle_transferred(&mut self, from: RaftId, complete: Complete) {
        let Complete { header, data, keep_only } = complete;
        let Ok(mut message) = codec::decode_message(&header) else { return };
        if !keep_only {
            message.mut_snapshot().data = data;
            self.handle_message(from, Timestamp(0), message);
            return;
        }
        let metadata = message.get_snapshot().get_metadata().clone();
        let index = metadata.index;
        let tail = self.consensus.tail();
        let known = index <= tail.last() && index <= self.applied && index > tail.snapshot.index;
        if self.config.witness && known {
            self.snapshots.keep(ReceivedSnapshot {
                metadata: metadata.clone(),
                data: data.clone(),
                install: false,
            });
            drop(self.consensus.tail_mut().compact(metadata, data, index));
        }
    }

    fn copy_to_witnesses(&mut self) {
        let members = self.machine.members().iter().filter(|(_, member)| member.witness);
        let witnesses: Vec<RaftId> = members.map(|(&id, _)| id).collect();
        for to in witnesses {
            let tail = self.consensus.tail();
            let mut message = Message { msg_type: MessageType::MsgSnapshot, ..Message::default() };
            message.to = to;
            message.from = self.id();
            message.term = self.consensus.term();
            message.mut_snapshot().set_metadata(tail.snapshot.clone());
            let data = tail.snapshot_data.clone();
            self.transfers.begin(to, codec::encode_message(&message), data, true, self.now);
        }
    }
}
