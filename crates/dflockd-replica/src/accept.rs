//! The accepting side of a [`Replica`]: what this node's clients asked for and what has become of it; reads.
//!
//! # Exactly once
//!
//! The accepting node numbers all items of a run, 1, 2, 3 and so on, and sends them in batches to the leader, itself
//! included. The machine takes a number only if it is the next of its run: what comes twice is skipped, what lacks its
//! predecessor is not applied, and the leader answers with [`Frame::Expect`]. What is not applied after 500 ms, or when
//! the leader changes, is sent again. So a retry has no second effect and the order of a connection is kept, without a
//! table of request ids. (Numbered requests of kept sessions have kept results in the store, as in memory mode.)
//!
//! A blocking request has its own deadline in the store. 500 ms after it the accepting node asks for a `Cancel` as
//! well; 5 s after it the client is told `error_unknown`, and what comes of the request later is taken back by `Undo`,
//! unless its result is kept for a retry. A command that does not block is given up after 5 s. If a received snapshot
//! skipped the entry of a request, its outcome is looked up in the new state: answered, still waiting, or unknown.
//! Pushes that the snapshot skipped are lost, so connections with subscriptions are closed.
//!
//! # Reads
//!
//! `get kget llen lrange inspect ls` ask Raft for a read index: the leader confirms with a majority that it still
//! leads, and the node answers once it has applied up to that index and all its own earlier items. Reads that wait
//! share one question. `stats` shows what the node itself has, without asking.

use dflockd_core::command;

use super::lead::Accepted;
use super::*;

impl Replica {
    pub(super) fn begin_run(&mut self) {
        let item = Item {
            session: SessionId(0),
            epoch: 0,
            request: RequestId(0),
            keep: false,
            action: Action::Start(self.config.start.clone()),
        };
        self.push_item(&item);
    }

    /// The others have given this life up, and with it every session of a connection here.
    pub(super) fn lose_run(&mut self) {
        let start = self.run.0 & Run::START_MAX;
        let run = Run::new(self.id(), start + 1);
        tracing::warn!("given up by the others; connections are closed and the node begins anew");
        self.run = run;
        self.notes.push((note::START.to_vec(), (start + 1).to_le_bytes().to_vec()));
        // Not told to anybody before it is written down.
        self.run_noted = Some(self.last_number + 1);
        self.next_seq = 1;
        self.next_send = 1;
        self.open_batch = (0, Vec::new());
        self.unapplied.clear();
        self.backlog_bytes = 0;
        self.pending.clear();
        self.begin_run();
        self.queue.push(NodeEvent::NewRun(run));
    }

    pub(super) fn push_item(&mut self, item: &Item<'_>) {
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, item);
        self.push_encoded(&bytes);
    }

    pub(super) fn push_encoded(&mut self, item: &[u8]) {
        let (count, bytes) = &mut self.open_batch;
        bytes.extend_from_slice(item);
        *count += 1;
        self.backlog_bytes += item.len();
        self.next_seq += 1;
        if *count >= BATCH_ITEMS_MAX || bytes.len() >= BATCH_BYTES_MAX {
            self.close_batch();
        }
    }

    pub(super) fn close_batch(&mut self) {
        let (count, bytes) = std::mem::take(&mut self.open_batch);
        if count == 0 {
            return;
        }
        let first_seq = self.next_seq - u64::from(count);
        if self.unapplied.is_empty() {
            self.progress_at = self.now;
        }
        let bytes = Bytes::from(bytes);
        self.unapplied.push_back(Batch { run: self.run, first_seq, count, bytes });
    }

    pub(super) fn forget_applied(&mut self) {
        let Some(applied) = self.machine.applied_seq(self.run) else { return };
        while let Some(batch) = self.unapplied.front()
            && batch.first_seq + u64::from(batch.count) - 1 <= applied
        {
            self.backlog_bytes -= batch.bytes.len();
            self.unapplied.pop_front();
            self.progress_at = self.now;
        }
        self.next_send = self.next_send.max(applied + 1);
    }

    /// Brings what is not applied to the leader.
    pub(super) fn forward(&mut self, outputs: &mut Outputs) {
        self.close_batch();
        let Some(leader) = self.consensus.leader() else { return };
        if self.run_noted.is_some() || self.unapplied.is_empty() {
            return;
        }
        let to = (leader, self.consensus.term());
        let applied = self.machine.applied_seq(self.run).unwrap_or(0);
        if self.sent_to != Some(to) {
            self.sent_to = Some(to);
            self.next_send = applied + 1;
        } else if self.now.since(self.progress_at) >= RESEND && !bug(Bug::NoResend) {
            self.next_send = applied + 1;
            self.progress_at = self.now;
        }
        let mut unsent = Vec::new();
        for batch in self.unapplied.iter().rev() {
            if batch.first_seq + u64::from(batch.count) <= self.next_send {
                break;
            }
            unsent.push(batch.clone());
        }
        for batch in unsent.into_iter().rev() {
            let end = batch.first_seq + u64::from(batch.count);
            if leader == self.id() {
                if self.accept(batch) != Accepted::Yes {
                    break;
                }
            } else {
                let bytes = Frame::Forward(batch).encode();
                outputs.frames.push(Outgoing { to: leader, bulk: false, bytes });
            }
            self.next_send = end;
        }
    }

    pub(super) fn look_after_requests(&mut self) {
        let now = self.now;
        let mut cancel = Vec::new();
        let mut give_up = Vec::new();
        for (&key, pending) in &mut self.pending {
            if pending.cancel_at.is_some_and(|at| at <= now) {
                pending.cancel_at = None;
                cancel.push(key);
            }
            if pending.give_up_at <= now && !pending.given_up {
                pending.given_up = true;
                give_up.push(key);
            }
        }
        for (session, request) in cancel {
            self.push_item(&Item {
                session,
                epoch: 0,
                request: RequestId(0),
                keep: false,
                action: Action::Command(command::Cancel { request }.into()),
            });
        }
        for (session, request) in give_up {
            let outcome = Outcome::Refused(Refusal::Forgotten);
            let effect = Effect::Reply { session, request, outcome };
            self.queue.push(NodeEvent::Machine(Event::Effect(effect)));
        }
    }

    /// Gives back what nobody was told of.
    pub(super) fn take_back(&mut self, session: SessionId, outcome: Outcome) {
        if outcome.gives() {
            let action = Action::Undo(outcome);
            let request = RequestId(0);
            self.push_item(&Item { session, epoch: 0, request, keep: false, action });
        }
    }

    // ---- Reads ----

    pub(super) fn add_read(&mut self, what: ReadWhat) {
        let give_up_at = self.now + GIVE_UP;
        let read = Read { what, after_seq: self.next_seq - 1, give_up_at };
        if bug(Bug::ReadAtOnce) {
            self.reads_confirmed.entry(self.applied).or_default().push(read);
            return;
        }
        self.reads.push(read);
    }

    pub(super) fn ask_reads(&mut self) {
        let of = self.consensus.leader().map(|leader| (leader, self.consensus.term()));
        if of.is_some() && of != self.reads_asked_of {
            // Whoever was asked before will not answer any more.
            self.reads_asked_of = of;
            for (_, (_, reads)) in std::mem::take(&mut self.reads_asked) {
                self.reads.extend(reads);
            }
        }
        if self.reads.is_empty() || self.reads_asked.len() >= 4 || self.config.witness {
            return;
        }
        if self.consensus.leader().is_none() {
            return;
        }
        self.last_read += u32::from(!bug(Bug::ReadIdReused) || self.last_read == 0);
        // The leader tells reads apart by this, those of all members.
        let context = u64::from(self.run.0) << 32 | u64::from(self.last_read);
        let reads = std::mem::take(&mut self.reads);
        self.reads_asked.insert(context, (self.now, reads));
        self.consensus.read_index(context);
    }

    pub(super) fn confirm_read(&mut self, context: u64, index: u64) {
        let index = if bug(Bug::ReadTooEarly) { index.min(self.applied) } else { index };
        if let Some((_, reads)) = self.reads_asked.remove(&context) {
            self.reads_confirmed.entry(index).or_default().extend(reads);
        }
    }

    pub(super) fn answer_reads(&mut self) {
        while let Some(entry) = self.reads_confirmed.first_entry()
            && *entry.key() <= self.applied
        {
            let applied = self.machine.applied_seq(self.run).unwrap_or(u64::MAX);
            let (now, later): (Vec<_>, Vec<_>) =
                entry.remove().into_iter().partition(|read| read.after_seq <= applied);
            for read in now {
                self.answer_read(read, true);
            }
            if !later.is_empty() {
                // Behind writes of this node that are on their way.
                self.reads_confirmed.entry(self.applied + 1).or_default().extend(later);
            }
        }
    }

    pub(super) fn answer_read(&mut self, read: Read, can: bool) {
        match read.what {
            ReadWhat::Job(id) => self.queue.push(NodeEvent::Job(id, can)),
            ReadWhat::Query { session, request, query } => {
                let store = self.machine.store().filter(|_| can);
                let outcome = match store {
                    Some(store) => store.read(query.borrow(), self.machine.now()),
                    None => Outcome::Refused(Refusal::Unavailable),
                };
                let effect = Effect::Reply { session, request, outcome };
                self.queue.push(NodeEvent::Machine(Event::Effect(effect)));
            }
        }
    }

    pub(super) fn look_after_reads(&mut self) {
        let now = self.now;
        let stale: Vec<u64> = self
            .reads_asked
            .iter()
            .filter(|(_, (asked, _))| now.since(*asked) >= READ_RETRY)
            .map(|(&context, _)| context)
            .collect();
        for context in stale {
            if let Some((_, reads)) = self.reads_asked.remove(&context) {
                self.reads.extend(reads);
            }
        }
        let (over, alive) = self.reads.drain(..).partition(|read| read.give_up_at <= now);
        self.reads = alive;
        let over: Vec<Read> = over;
        for read in over {
            self.answer_read(read, false);
        }
    }
}
