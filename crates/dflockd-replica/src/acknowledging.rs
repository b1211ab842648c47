//! Which messages of Raft tell their receiver nothing, and are not sent: each costs both sides more than most requests.
//!
//! - An append without entries tells a follower what is committed. The next append to it tells that, too.
//! - An acknowledgement tells a leader how far a log reaches. A later one that leaves at the same time tells that, too.
//! - A follower that was only told what is committed acknowledges what it has acknowledged before. It does that again
//!   only after a while, for the case that the first acknowledgement was lost: a leader that misses one asks again with
//!   each heartbeat.
//!
//! Raft allows for the loss of any message, so this can cost time, but never safety.

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Span, Timestamp};
use raft::eraftpb::{Message, MessageType};

use super::types::RaftId;

/// What was acknowledged to whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Acknowledged {
    to: RaftId,
    term: u64,
    index: u64,
}

/// What this node has acknowledged last.
pub(super) struct Acknowledging {
    last: Option<(Acknowledged, Timestamp)>,
    /// How long nothing is acknowledged again.
    again_after: Span,
}

impl Acknowledging {
    /// `again_after` must be shorter than the time between two heartbeats.
    pub(super) fn new(again_after: Span) -> Self {
        Self { last: None, again_after }
    }

    /// The next acknowledgement is sent, whatever was acknowledged before: entries have come from a leader, which waits
    /// for the answer, or what was sent may be lost.
    pub(super) fn forget(&mut self) {
        self.last = None;
    }

    /// The messages that tell their receivers something, in their order.
    pub(super) fn without_repeats(
        &mut self,
        messages: Vec<Message>,
        now: Timestamp,
    ) -> Vec<Message> {
        let mut kept: Vec<Message> = Vec::with_capacity(messages.len());
        for message in messages {
            kept.retain(|earlier| !is_told_by(earlier, &message));
            kept.push(message);
        }
        kept.retain(|message| !self.is_repeat(message, now));
        kept
    }

    /// Whether a message acknowledges what was acknowledged just now. If not, it is the one that counts from now on.
    fn is_repeat(&mut self, message: &Message, now: Timestamp) -> bool {
        if message.msg_type != MessageType::MsgAppendResponse || message.reject {
            return false;
        }
        let told = Acknowledged { to: message.to, term: message.term, index: message.index };
        let again_after = self.again_after;
        let is_recent = |at: Timestamp| now.since(at) < again_after || bug(Bug::AckOnce);
        if self.last.is_some_and(|(last, at)| last == told && is_recent(at)) {
            return true;
        }
        self.last = Some((told, now));
        false
    }
}

/// Whether a later message of the same moment tells all that an earlier one does.
fn is_told_by(earlier: &Message, later: &Message) -> bool {
    let is_same = (earlier.msg_type, earlier.to, earlier.term)
        == (later.msg_type, later.to, later.term)
        && earlier.index <= later.index
        && earlier.commit <= later.commit;
    let is_commit = earlier.msg_type == MessageType::MsgAppend && earlier.entries.is_empty();
    let is_acknowledgement = earlier.msg_type == MessageType::MsgAppendResponse;
    is_same && (is_commit || is_acknowledgement && !earlier.reject && !later.reject)
}

#[cfg(test)]
mod tests {
    use raft::eraftpb::Entry;

    use super::*;

    const AGAIN: Span = Span::from_millis(75);

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn append(to: RaftId, index: u64, commit: u64, entries: usize) -> Message {
        let mut message = Message { to, index, commit, term: 3, ..Message::default() };
        message.set_msg_type(MessageType::MsgAppend);
        message.entries = vec![Entry::default(); entries].into();
        message
    }

    fn ack(to: RaftId, index: u64) -> Message {
        let mut message = Message { to, index, term: 3, ..Message::default() };
        message.set_msg_type(MessageType::MsgAppendResponse);
        message
    }

    fn reject(to: RaftId, index: u64) -> Message {
        Message { reject: true, ..ack(to, index) }
    }

    #[track_caller]
    fn check(messages: &[Message], kept: &[usize]) {
        let mut all = Acknowledging::new(AGAIN);
        let kept: Vec<Message> = kept.iter().map(|&at| messages[at].clone()).collect();
        assert_eq!(all.without_repeats(messages.to_vec(), at(1)), kept);
    }

    #[test]
    fn a_commit_goes_with_the_next_append() {
        check(&[append(2, 5, 5, 0), append(3, 5, 5, 0), append(2, 5, 5, 1)], &[1, 2]);
        check(&[append(2, 5, 5, 0), append(2, 5, 6, 0)], &[1]);
        check(&[append(2, 5, 5, 1), append(2, 6, 5, 1)], &[0, 1]);
        // What begins earlier in the log may end earlier, too, and what is committed counts up to its end only.
        check(&[append(2, 5, 5, 0), append(2, 4, 5, 1)], &[0, 1]);
        check(&[append(2, 5, 6, 0), append(2, 5, 5, 1)], &[0, 1]);
        check(&[append(2, 5, 5, 0), Message { term: 4, ..append(2, 5, 5, 1) }], &[0, 1]);
    }

    #[test]
    fn of_acknowledgements_the_last_counts() {
        check(&[ack(2, 5), ack(2, 6), ack(3, 4)], &[1, 2]);
        check(&[ack(2, 5), reject(2, 6)], &[0, 1]);
        check(&[reject(2, 5), ack(2, 6)], &[0, 1]);
        check(&[ack(2, 6), ack(2, 5)], &[0, 1]);
        let heartbeat = |index| {
            let mut message = ack(2, index);
            message.set_msg_type(MessageType::MsgHeartbeatResponse);
            message
        };
        check(&[heartbeat(5), heartbeat(5)], &[0, 1]);
    }

    #[test]
    fn an_acknowledgement_is_repeated_after_a_while() {
        let mut all = Acknowledging::new(AGAIN);
        let mut sent = |message: Message, ms| all.without_repeats(vec![message], at(ms)).len();
        assert_eq!(sent(ack(2, 5), 0), 1);
        assert_eq!(sent(ack(2, 5), 74), 0);
        assert_eq!(sent(ack(2, 5), 75), 1, "the first may be lost");
        assert_eq!(sent(ack(2, 5), 149), 0);
        assert_eq!(sent(reject(2, 5), 150), 1, "it is another answer");
        assert_eq!(sent(ack(2, 6), 151), 1);
        assert_eq!(sent(ack(3, 6), 152), 1, "another leader");
        assert_eq!(sent(Message { term: 4, ..ack(3, 6) }, 153), 1, "another term");
    }

    #[test]
    fn entries_are_acknowledged_each_time() {
        let mut all = Acknowledging::new(AGAIN);
        let sent = |all: &mut Acknowledging| all.without_repeats(vec![ack(2, 5)], at(1)).len();
        assert_eq!((sent(&mut all), sent(&mut all)), (1, 0));
        all.forget();
        assert_eq!((sent(&mut all), sent(&mut all)), (1, 0));
    }
}
