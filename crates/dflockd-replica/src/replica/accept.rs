//! The accepting side of a [`Replica`]: what its node's clients ask for, and what they read.
//!
//! The parts that keep the books are [`Accepting`](crate::accepting) for items on their way, with the rule of exactly
//! once, [`Requests`](crate::requests) for who waits until when, and [`Reads`](crate::reads).

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Outcome, Refusal, RequestId, SessionId, Span, Urgency, command};

use super::Replica;
use crate::accepting::end_of;
use crate::codec::{self, Frame};
use crate::leading::Accepted;
use crate::reads::{Read, ReadWhat};
use crate::requests::{Answer, GIVE_UP};
use crate::types::{Incarnation, Proposal, ProposalBody};
use crate::{NodeEvent, Outgoing, Outputs, OwnedQuery, TOO_MANY_STARTS, note, urgency};

impl Replica {
    /// Accepts what a client asks for. `wait` is how long the request may block, none if it is not answered at all.
    /// False: it is refused, nothing will come of it.
    pub fn submit(&mut self, item: &Proposal<'_>, wait: Option<Span>) -> bool {
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, item);
        let Proposal { session, request, keep, ref body, .. } = *item;
        self.submit_encoded(&bytes, session, request, keep, wait, urgency(body))
    }

    /// Accepts an item that has the form of the log already, as [`Replica::submit`] does.
    pub fn submit_encoded(
        &mut self,
        item: &[u8],
        session: SessionId,
        request: RequestId,
        keep: bool,
        wait: Option<Span>,
        urgency: Urgency,
    ) -> bool {
        let refused = self.config.witness
            || !self.accepting.has_room(urgency)
            || self.writing.is_room_low() && urgency == Urgency::Grows;
        if refused {
            return false;
        }
        self.accepting.push(item, self.now);
        if let Some(wait) = wait {
            let seq = self.accepting.last_seq();
            self.requests.insert((session, request), seq, keep, wait, self.now);
        }
        true
    }

    /// Answers a read when it is certain to see everything that was done before.
    pub fn read(&mut self, session: SessionId, request: RequestId, query: OwnedQuery) {
        self.add_read(ReadWhat::Query { session, request, query });
    }

    /// Says by [`NodeEvent::Job`] when the state is certain to hold everything that was done before.
    pub fn read_job(&mut self, id: u64) {
        self.add_read(ReadWhat::Job(id));
    }

    /// The first item of an incarnation tells who this node is.
    pub(super) fn begin_incarnation(&mut self) {
        self.push_item(SessionId(0), ProposalBody::Start(self.config.start.clone()));
    }

    /// Begins a new incarnation if this one has no more numbers for sessions: `old` is the incarnation that has none.
    /// Its connections are closed, as if the process had been started again.
    pub fn renew_incarnation(&mut self, old: Incarnation) {
        if self.run() == old {
            tracing::warn!(
                "session numbers used up; connections are closed and a new incarnation begins"
            );
            self.begin_next_incarnation();
        }
    }

    /// The others have given this incarnation up, and with it every session of a connection here.
    pub(super) fn lose_incarnation(&mut self) {
        tracing::warn!(
            "the leader took this node for lost; connections are closed and a new incarnation begins"
        );
        self.begin_next_incarnation();
    }

    fn begin_next_incarnation(&mut self) {
        let start = (self.accepting.run().0 & Incarnation::START_MAX) + 1;
        if start > Incarnation::START_MAX {
            self.fatal = Some(TOO_MANY_STARTS.into());
            return;
        }
        let run = Incarnation::new(self.id(), start);
        self.writing.note(note::START, start.to_le_bytes().to_vec());
        self.accepting.begin_again(run, self.writing.next());
        self.requests.clear();
        self.begin_incarnation();
        self.queue.push(NodeEvent::NewIncarnation(run));
    }

    /// Accepts an item of the node itself, which nobody waits for.
    fn push_item(&mut self, session: SessionId, body: ProposalBody<'_>) {
        let item = Proposal { session, epoch: 0, request: RequestId(0), keep: false, body };
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, &item);
        self.accepting.push(&bytes, self.now);
    }

    pub(super) fn forget_applied(&mut self) {
        if let Some(applied) = self.machine.applied_seq(self.accepting.run()) {
            self.accepting.forget_applied(applied, self.now);
        }
    }

    /// Brings what is not applied to the leader.
    pub(super) fn forward(&mut self, outputs: &mut Outputs) {
        self.accepting.close_batch(self.now);
        let Some(leader) = self.consensus.leader() else { return };
        let applied = self.machine.applied_seq(self.accepting.run()).unwrap_or(0);
        let to = (leader, self.consensus.term());
        self.accepting.send_to(to, applied, self.now);
        while let Some(batch) = self.accepting.next_unsent().cloned() {
            let end = end_of(&batch);
            if leader == self.id() {
                if !matches!(self.accept(batch), Accepted::Yes | Accepted::Before) {
                    break;
                }
            } else {
                let bytes = Frame::Forward(batch).encode();
                outputs.frames.push(Outgoing { to: leader, bulk: false, bytes });
            }
            self.accepting.sent(end);
        }
    }

    pub(super) fn look_after_requests(&mut self) {
        let due = self.requests.take_due(self.now);
        for (session, request) in due.cancel {
            self.push_item(session, ProposalBody::Command(command::Cancel { request }.into()));
        }
        for (session, request) in due.give_up {
            self.reply(session, request, Outcome::Refused(Refusal::Forgotten));
        }
    }

    /// An outcome of the replicated state is for a client of this node, if it is there; what a client of this node was
    /// not told of is given back.
    pub(super) fn settle(&mut self, session: SessionId, request: RequestId, outcome: Outcome) {
        match self.requests.answer((session, request)) {
            Answer::Deliver { undo } => {
                self.queue.push(NodeEvent::Reply { session, request, outcome, undo });
            }
            Answer::TooLate { keep } => {
                if outcome.gives() && (!keep || bug(Bug::UndoKept)) {
                    self.push_item(session, ProposalBody::Undo(outcome));
                }
            }
        }
    }

    /// An answer that gives nothing.
    fn reply(&mut self, session: SessionId, request: RequestId, outcome: Outcome) {
        self.queue.push(NodeEvent::Reply { session, request, outcome, undo: false });
    }

    fn add_read(&mut self, what: ReadWhat) {
        let after_seq = self.accepting.last_seq();
        let read = Read { what, after_seq, give_up_at: self.now + GIVE_UP };
        if self.reads.is_full() {
            return self.answer_read(read, false);
        }
        if bug(Bug::ReadAtOnce) {
            self.reads.add_confirmed(read, self.applied);
        } else {
            self.reads.add(read);
        }
    }

    /// Asks the leader for an index, for all reads that wait.
    pub(super) fn ask_reads(&mut self) {
        let Some(leader) = self.consensus.leader().filter(|_| !self.config.witness) else { return };
        let of = (leader, self.consensus.term());
        if let Some(question) = self.reads.ask(of, self.accepting.run(), self.now) {
            self.consensus.read_index(question);
        }
    }

    pub(super) fn answer_reads(&mut self) {
        let applied_seq = self.machine.applied_seq(self.accepting.run()).unwrap_or(u64::MAX);
        for read in self.reads.take_answerable(self.applied, applied_seq) {
            self.answer_read(read, true);
        }
    }

    fn answer_read(&mut self, read: Read, can: bool) {
        match read.what {
            ReadWhat::Job(id) => self.queue.push(NodeEvent::Job(id, can)),
            ReadWhat::Query { session, request, query } => {
                let store = self.machine.store().filter(|_| can);
                let outcome = match store {
                    Some(store) => store.read(query.borrow(), self.machine.now()),
                    None => Outcome::Refused(Refusal::Unavailable),
                };
                self.reply(session, request, outcome);
            }
        }
    }

    pub(super) fn look_after_reads(&mut self) {
        for read in self.reads.expire(self.now) {
            self.answer_read(read, false);
        }
    }
}
