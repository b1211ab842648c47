//! Reads that wait until they are certain to see all that was done before them.
//!
//! `get kget llen lrange inspect ls` ask Raft for a read index: the leader confirms with a majority that it still
//! leads, and the node answers once it has applied up to that index and all its own earlier items. Reads that wait
//! share one question. `stats` shows what the node itself has, without asking.
//!
//! [`Reads`] knows neither consensus nor state: it says which question to ask and which reads may be answered.

use std::collections::BTreeMap;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{RequestId, SessionId, Span, Timestamp};

use super::OwnedQuery;
use super::types::{RaftId, Run};

/// A read whose index did not come is asked for again after this. The answer takes four ways between members, which may
/// be far apart.
const RETRY: Span = Span::from_millis(500);
/// How many questions may be open at a time.
const QUESTIONS_MAX: usize = 4;

/// The reads of this node's clients.
#[derive(Default)]
pub(super) struct Reads {
    /// Reads that nobody was asked about.
    waiting: Vec<Read>,
    /// Reads whose index was asked for: by the number of the question, with the time.
    asked: BTreeMap<u64, (Timestamp, Vec<Read>)>,
    /// The leader that was asked, and its term.
    asked_of: Option<(RaftId, u64)>,
    /// Reads that may be answered when the entry at an index is applied.
    confirmed: BTreeMap<u64, Vec<Read>>,
    /// Counts questions. It may begin again at 0: few are open at a time.
    last: u32,
}

pub(super) struct Read {
    pub(super) what: ReadWhat,
    /// Items of this node up to this number must be applied before.
    pub(super) after_seq: u64,
    pub(super) give_up_at: Timestamp,
}

pub(super) enum ReadWhat {
    Query { session: SessionId, request: RequestId, query: OwnedQuery },
    Job(u64),
}

impl Reads {
    pub(super) fn add(&mut self, read: Read) {
        self.waiting.push(read);
    }

    /// The number of the question to ask the leader of a term now, if there is one. `run` tells the questions of all
    /// members and of all lives of this one apart.
    pub(super) fn ask(&mut self, of: (RaftId, u64), run: Run, now: Timestamp) -> Option<u64> {
        if self.asked_of != Some(of) {
            // The leader that was asked before will not answer any more.
            self.asked_of = Some(of);
            for (_, (_, reads)) in std::mem::take(&mut self.asked) {
                self.waiting.extend(reads);
            }
        }
        if self.waiting.is_empty() || self.asked.len() >= QUESTIONS_MAX {
            return None;
        }
        if !bug(Bug::ReadIdReused) || self.last == 0 {
            self.last = self.last.wrapping_add(1);
        }
        let question = u64::from(run.0) << 32 | u64::from(self.last);
        self.asked.insert(question, (now, std::mem::take(&mut self.waiting)));
        Some(question)
    }

    /// The leader has answered a question: its reads must see the entry at `index`.
    pub(super) fn confirm(&mut self, question: u64, index: u64) {
        if let Some((_, reads)) = self.asked.remove(&question) {
            self.confirmed.entry(index).or_default().extend(reads);
        }
    }

    /// A read that needs no question, because it is known what it must see.
    pub(super) fn add_confirmed(&mut self, read: Read, index: u64) {
        self.confirmed.entry(index).or_default().push(read);
    }

    /// The reads that see all they must in a state with the entry at `applied` and the items up to `applied_seq`.
    pub(super) fn take_answerable(&mut self, applied: u64, applied_seq: u64) -> Vec<Read> {
        let mut answerable = Vec::new();
        while let Some(entry) = self.confirmed.first_entry()
            && *entry.key() <= applied
        {
            let (now, later): (Vec<_>, Vec<_>) =
                entry.remove().into_iter().partition(|read| read.after_seq <= applied_seq);
            answerable.extend(now);
            if !later.is_empty() {
                // Behind writes of this node that are on their way.
                self.confirmed.entry(applied + 1).or_default().extend(later);
            }
        }
        answerable
    }

    /// Makes questions without an answer due again. Gives the reads that have waited too long.
    pub(super) fn expire(&mut self, now: Timestamp) -> Vec<Read> {
        let stale = self.asked.iter().filter(|(_, (asked, _))| now.since(*asked) >= RETRY);
        let stale: Vec<u64> = stale.map(|(&question, _)| question).collect();
        for question in stale {
            if let Some((_, reads)) = self.asked.remove(&question) {
                self.waiting.extend(reads);
            }
        }
        let (over, alive) = self.waiting.drain(..).partition(|read| read.give_up_at <= now);
        self.waiting = alive;
        over
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEADER: (RaftId, u64) = (2, 7);
    const NONE: [u64; 0] = [];

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn read(job: u64, after_seq: u64) -> Read {
        Read { what: ReadWhat::Job(job), after_seq, give_up_at: at(5000) }
    }

    fn jobs(reads: Vec<Read>) -> Vec<u64> {
        let job = |read: Read| match read.what {
            ReadWhat::Job(job) => job,
            ReadWhat::Query { .. } => unreachable!("only jobs are used here"),
        };
        reads.into_iter().map(job).collect()
    }

    fn ask(reads: &mut Reads, ms: u64) -> Option<u64> {
        reads.ask(LEADER, Run::new(1, 1), at(ms))
    }

    #[test]
    fn reads_that_wait_share_a_question() {
        let mut reads = Reads::default();
        assert_eq!(ask(&mut reads, 0), None, "there is nothing to ask");
        reads.add(read(1, 0));
        reads.add(read(2, 0));
        let question = ask(&mut reads, 0).unwrap();
        assert_eq!(ask(&mut reads, 0), None);
        assert_eq!(jobs(reads.take_answerable(9, 9)), NONE, "nobody has answered");
        reads.confirm(question + 1, 5);
        reads.confirm(question, 6);
        assert_eq!(jobs(reads.take_answerable(5, 9)), NONE);
        assert_eq!(jobs(reads.take_answerable(6, 9)), [1, 2]);
        assert_eq!(jobs(reads.take_answerable(6, 9)), NONE);
    }

    #[test]
    fn a_read_waits_for_earlier_items_of_its_node() {
        let mut reads = Reads::default();
        reads.add(read(1, 3));
        reads.add(read(2, 4));
        let question = ask(&mut reads, 0).unwrap();
        reads.confirm(question, 5);
        assert_eq!(jobs(reads.take_answerable(8, 2)), NONE);
        assert_eq!(jobs(reads.take_answerable(9, 3)), [1]);
        assert_eq!(jobs(reads.take_answerable(10, 4)), [2]);
    }

    #[test]
    fn only_so_many_questions_are_open() {
        let mut reads = Reads::default();
        let mut questions = Vec::new();
        for job in 0..6 {
            reads.add(read(job, 0));
            questions.extend(ask(&mut reads, 0));
        }
        assert_eq!(questions.len(), QUESTIONS_MAX);
        reads.confirm(questions[0], 1);
        assert!(ask(&mut reads, 0).is_some());
        assert_eq!(jobs(reads.take_answerable(1, 0)), [0]);
    }

    #[test]
    fn another_leader_and_a_silent_one_are_asked_again() {
        let mut reads = Reads::default();
        reads.add(read(1, 0));
        let first = ask(&mut reads, 0).unwrap();
        let second = reads.ask((3, 8), Run::new(1, 1), at(1)).unwrap();
        assert_ne!(first, second);
        reads.confirm(first, 1);
        assert_eq!(jobs(reads.take_answerable(9, 9)), NONE, "an answer to the old question");
        assert_eq!(jobs(reads.expire(at(500))), NONE);
        assert_eq!(reads.ask((3, 8), Run::new(1, 1), at(500)), None, "499 ms are not long");
        assert_eq!(jobs(reads.expire(at(501))), NONE);
        assert!(reads.ask((3, 8), Run::new(1, 1), at(501)).is_some());
    }

    #[test]
    fn questions_are_counted_without_end() {
        let mut reads = Reads { last: u32::MAX, ..Reads::default() };
        reads.add(read(1, 0));
        let question = ask(&mut reads, 0).unwrap();
        assert_eq!(question, u64::from(Run::new(1, 1).0) << 32, "only the count begins again");
        reads.confirm(question, 1);
        assert_eq!(jobs(reads.take_answerable(1, 0)), [1]);
    }

    #[test]
    fn a_read_is_given_up() {
        let mut reads = Reads::default();
        reads.add(read(1, 0));
        assert_eq!(jobs(reads.expire(at(4999))), NONE);
        assert_eq!(jobs(reads.expire(at(5000))), [1]);
        assert_eq!(jobs(reads.expire(at(9000))), NONE);
    }
}
