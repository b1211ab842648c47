//! What waits for the replica, bounded.
//!
//! While the replica is busy, for instance because a snapshot is installed, clients and peers go on: what they send is
//! refused or left out here at a bound, so that a stall costs a known amount of memory. A client is told at once that
//! nothing was done. What gives something back has room beyond that, because it is what ends an overload; what follows
//! from something that was accepted before is always taken, and so is as bounded as that.

use std::vec::Drain;

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Outcome, Refusal, RequestId, SessionId, Span, Urgency};

use dflockd_replica::admin::AdminRequest;
use dflockd_replica::types::{Incarnation, Proposal, RaftId};
use dflockd_replica::{MadeSnapshot, NodeEvent, Outputs, OwnedQuery, Replica, codec};

use super::combiner::Queue;

/// Items of clients that wait, and how many bytes they have.
pub(super) const ITEMS_MAX: usize = 128 << 10;
pub(super) const ITEMS_BYTES_MAX: usize = 32 << 20;

/// Reads of clients that wait.
pub(super) const READS_MAX: usize = 64 << 10;

/// Frames of peers that wait: more than a leader has on its way to a follower, and than the followers of a large
/// cluster have on theirs. One more is lost, as it may be on the network, and sent again.
const FRAMES_MAX: usize = 64 << 10;
const FRAMES_BYTES_MAX: usize = 256 << 20;

/// Memory that stays for the next ones.
const BYTES_KEPT: usize = 4 << 20;
const COUNT_KEPT: usize = 32 << 10;

/// What the replica has to take.
#[derive(Default)]
pub(crate) struct Inputs {
    /// Items in the form of the log, one behind the other.
    items: Vec<u8>,
    heads: Vec<Head>,
    others: Vec<Input>,
    reads: usize,
    frames: usize,
    frames_bytes: usize,
    /// The next incarnation is asked for.
    renews: bool,
    /// Some of it takes long and is left to the replica's thread.
    needs_timer_thread: bool,
}

/// What there is to know about an item besides its bytes.
struct Head {
    end: usize,
    session: SessionId,
    request: RequestId,
    keep: bool,
    wait: Option<Span>,
    urgency: Urgency,
}

/// What is no client's command.
pub(crate) enum Input {
    Frame {
        from: RaftId,
        bytes: Bytes,
        bulk: bool,
    },
    Unreachable {
        peer: RaftId,
        refused: bool,
    },
    Written(u64),
    Snapshot(Option<MadeSnapshot>),
    Room {
        low: bool,
    },
    Read {
        session: SessionId,
        request: RequestId,
        query: OwnedQuery,
    },
    /// A look at the state: as of now for the whole cluster, or as this node has it; `brief` if it takes no longer than
    /// a command.
    Job {
        id: u64,
        linear: bool,
        brief: bool,
    },
    Admin {
        id: u64,
        request: AdminRequest,
    },
    RenewIncarnation(Incarnation),
}

impl Input {
    /// Whether it may take long.
    pub(super) fn needs_timer_thread(&self) -> bool {
        match self {
            Self::Frame { bulk, .. } => *bulk,
            Self::Snapshot(_) => true,
            Self::Job { brief, .. } => !brief,
            Self::Unreachable { .. }
            | Self::Written(_)
            | Self::Room { .. }
            | Self::Read { .. }
            | Self::Admin { .. }
            | Self::RenewIncarnation(_) => false,
        }
    }
}

impl Queue for Inputs {
    fn requests(&self) -> usize {
        self.heads.len()
    }

    fn is_empty(&self) -> bool {
        self.heads.is_empty() && self.others.is_empty()
    }

    fn needs_timer_thread(&self) -> bool {
        self.needs_timer_thread
    }
}

impl Inputs {
    /// Gives the replica all of it; the buffers stay.
    pub(super) fn feed(&mut self, replica: &mut Replica, outputs: &mut Outputs) {
        self.take_items(|bytes, head| {
            let Head { session, request, keep, wait, urgency, .. } = head;
            let taken = replica.submit_encoded(bytes, session, request, keep, wait, urgency);
            if !taken && wait.is_some() {
                // What is repeated may have had its effect before, through this node or another.
                let why = if keep { Refusal::Forgotten } else { Refusal::Unavailable };
                let outcome = Outcome::Refused(why);
                outputs.events.push(NodeEvent::Reply { session, request, outcome, undo: false });
            }
        });
        for input in self.take_others() {
            match input {
                Input::Frame { from, bytes, bulk: _ } => replica.handle_frame(from, bytes),
                Input::Unreachable { peer, refused } => replica.handle_unreachable(peer, refused),
                Input::Written(number) => replica.handle_written(number),
                Input::Snapshot(made) => replica.handle_snapshot(made, outputs),
                Input::Room { low } => replica.handle_room(low),
                Input::Read { session, request, query } => replica.read(session, request, query),
                Input::Job { id, linear: true, .. } => replica.read_job(id),
                Input::Job { id, linear: false, .. } => {
                    outputs.events.push(NodeEvent::Job(id, true));
                }
                Input::Admin { id, request } => replica.admin(id, request),
                Input::RenewIncarnation(run) => replica.renew_incarnation(run),
            }
        }
        self.tidy();
    }

    /// Takes an item. False: there is too much before it.
    pub(super) fn put_item(
        &mut self,
        item: &Proposal<'_>,
        wait: Option<Span>,
        urgency: Urgency,
    ) -> bool {
        if !urgency.fits(self.heads.len(), ITEMS_MAX)
            || !urgency.fits(self.items.len(), ITEMS_BYTES_MAX)
        {
            return false;
        }
        if bug(Bug::InputForgotten) && item.request.0 % 64 == 63 {
            return true;
        }
        codec::put_item(&mut self.items, item);
        let Proposal { session, request, keep, .. } = *item;
        let end = self.items.len();
        self.heads.push(Head { end, session, request, keep, wait, urgency });
        true
    }

    /// Takes something else. False: there is too much of its kind.
    pub(super) fn put(&mut self, input: Input) -> bool {
        match &input {
            Input::Read { .. } => {
                if self.reads >= READS_MAX {
                    return false;
                }
                self.reads += 1;
            }
            Input::Frame { bytes, .. } => {
                if self.frames >= FRAMES_MAX || self.frames_bytes >= FRAMES_BYTES_MAX {
                    return false;
                }
                self.frames += 1;
                self.frames_bytes += bytes.len();
            }
            // Asked for by each connection that finds no number for its session.
            Input::RenewIncarnation(_) => {
                if std::mem::replace(&mut self.renews, true) {
                    return true;
                }
            }
            // This node's own, one at a time, or one for each of its threads that waits for an answer.
            Input::Unreachable { .. }
            | Input::Written(_)
            | Input::Snapshot(_)
            | Input::Room { .. }
            | Input::Job { .. }
            | Input::Admin { .. } => {}
        }
        self.needs_timer_thread |= input.needs_timer_thread();
        self.others.push(input);
        true
    }

    /// Takes all items out.
    fn take_items(&mut self, mut each: impl FnMut(&[u8], Head)) {
        let mut begin = 0;
        for head in self.heads.drain(..) {
            let end = head.end;
            each(&self.items[begin..end], head);
            begin = end;
        }
        self.items.clear();
    }

    /// Takes all others out.
    pub(crate) fn take_others(&mut self) -> Drain<'_, Input> {
        (self.needs_timer_thread, self.renews) = (false, false);
        (self.reads, self.frames, self.frames_bytes) = (0, 0, 0);
        self.others.drain(..)
    }

    /// Whether all that waits is within its bounds: items that give something back have a quarter more room, and the
    /// last one of each kind may be large.
    #[cfg(feature = "sim")]
    pub(super) fn check_bounds(&self) -> Result<(), String> {
        let last = 2 << 20;
        let bounds = [
            ("items", self.heads.len(), ITEMS_MAX + ITEMS_MAX / 4 + 1),
            ("bytes of items", self.items.len(), ITEMS_BYTES_MAX + ITEMS_BYTES_MAX / 4 + last),
            ("reads", self.reads, READS_MAX),
            ("frames", self.frames, FRAMES_MAX),
            ("bytes of frames", self.frames_bytes, FRAMES_BYTES_MAX + (64 << 20)),
        ];
        match bounds.iter().find(|(_, count, max)| count > max) {
            Some((what, count, max)) => Err(format!("{count} {what} wait, {max} may")),
            None => Ok(()),
        }
    }

    /// When all is taken: keeps the memory for the next ones, unless it is the memory of a flood.
    fn tidy(&mut self) {
        if self.items.capacity() > BYTES_KEPT {
            self.items.shrink_to(BYTES_KEPT);
        }
        if self.heads.capacity() > COUNT_KEPT {
            self.heads.shrink_to(COUNT_KEPT);
        }
        if self.others.capacity() > COUNT_KEPT {
            self.others.shrink_to(COUNT_KEPT);
        }
    }
}

#[cfg(test)]
mod tests {
    use dflockd_core::{Command, End, command};

    use super::*;
    use dflockd_replica::types::ProposalBody;
    use dflockd_replica::urgency;

    fn put(inputs: &mut Inputs, command: Command<'_>) -> bool {
        let body = ProposalBody::Command(command);
        let urgency = urgency(&body);
        let (session, request) = (SessionId(1), RequestId(1));
        let item = Proposal { session, epoch: 0, request, keep: false, body };
        inputs.put_item(&item, Some(Span::ZERO), urgency)
    }

    fn frame(bytes: usize) -> Input {
        Input::Frame { from: 1, bytes: Bytes::from(vec![0; bytes]), bulk: false }
    }

    /// GUARANTEES 48: values that wait have a bound in bytes, whoever sends them.
    #[test]
    fn bytes_that_wait_have_a_bound() {
        let mut inputs = Inputs::default();
        let value = vec![7; 1 << 20];
        let set = || Command::Push(command::Push { key: b"k", end: End::Left, value: &value });
        let mut taken = 0;
        while put(&mut inputs, set()) {
            taken += 1;
            assert!(taken <= 64, "there is no bound");
        }
        assert!(inputs.items.len() <= ITEMS_BYTES_MAX + (1 << 20) + 100);
        assert!(put(&mut inputs, Command::Cancel(command::Cancel { request: RequestId(9) })));
        let mut seen = 0;
        inputs.take_items(|_, _| seen += 1);
        inputs.tidy();
        assert_eq!(seen, taken + 1);
        assert!(inputs.items.capacity() <= BYTES_KEPT, "what was large is given back");
        assert!(put(&mut inputs, set()));
    }

    /// GUARANTEES 48: requests that wait have a bound in number; those that give something back have room beyond it,
    /// and what follows from an accepted request is always taken.
    #[test]
    fn items_that_wait_have_a_bound() {
        let mut inputs = Inputs::default();
        let add = || Command::Add(command::Add { key: b"k", delta: 1, decrement: false });
        let renew = || Command::RenewSession(command::RenewSession { lease: Span::from_secs(9) });
        for _ in 0..=ITEMS_MAX {
            assert!(put(&mut inputs, add()));
        }
        assert!(!put(&mut inputs, add()));
        for _ in 0..ITEMS_MAX / 4 {
            assert!(put(&mut inputs, renew()));
        }
        assert!(!put(&mut inputs, renew()));
        assert!(put(&mut inputs, Command::Cancel(command::Cancel { request: RequestId(9) })));
        inputs.take_items(|_, _| ());
        inputs.tidy();
        assert!(inputs.heads.capacity() <= COUNT_KEPT, "what was large is given back");
        assert!(put(&mut inputs, add()));
    }

    /// GUARANTEES 48: frames of peers and reads of clients have bounds of their own.
    #[test]
    fn frames_and_reads_that_wait_have_a_bound() {
        let mut inputs = Inputs::default();
        let mut taken = 0;
        while inputs.put(frame(64 << 20)) {
            taken += 1;
            assert!(taken <= 8, "there is no bound");
        }
        assert_eq!(taken, 4);
        assert!(inputs.put(Input::Written(1)), "what this node tells itself is not left out");
        assert_eq!(inputs.take_others().count(), 5);
        for _ in 0..FRAMES_MAX {
            assert!(inputs.put(frame(1)));
        }
        assert!(!inputs.put(frame(1)));
        let read = || Input::Read {
            session: SessionId(1),
            request: RequestId(1),
            query: dflockd_core::Query::Counter { key: b"k" }.into(),
        };
        for _ in 0..READS_MAX {
            assert!(inputs.put(read()));
        }
        assert!(!inputs.put(read()));
        assert_eq!(inputs.take_others().count(), FRAMES_MAX + READS_MAX);
        assert!(inputs.put(read()) && inputs.put(frame(1)));
        inputs.take_others();
        for _ in 0..3 {
            assert!(inputs.put(Input::RenewIncarnation(Incarnation::new(1, 1))));
        }
        assert_eq!(inputs.take_others().count(), 1, "one renewal is enough");
        assert!(inputs.put(Input::RenewIncarnation(Incarnation::new(1, 2))));
        assert_eq!(inputs.take_others().count(), 1);
    }
}
