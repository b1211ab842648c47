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
use super::types::{Incarnation, RaftId};

/// A read whose index did not come is asked for again after this. The answer takes four ways between members, which may
/// be far apart.
const RETRY: Span = Span::from_millis(500);
/// How many questions may be open at a time.
const QUESTIONS_MAX: usize = 4;
/// How many reads may wait at a time, whatever for. While nobody leads each of them stays for seconds.
const READS_MAX: usize = 256 << 10;

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
    /// How many reads there are in all.
    count: usize,
    /// No read is given up before this time, so until then a look need not walk them. Too early at worst.
    none_due_before: Timestamp,
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
    /// Whether no more reads can be taken.
    pub(super) fn is_full(&self) -> bool {
        self.count >= READS_MAX
    }

    pub(super) fn add(&mut self, read: Read) {
        self.note(&read);
        self.waiting.push(read);
    }

    fn note(&mut self, read: &Read) {
        if self.count == 0 {
            self.none_due_before = read.give_up_at;
        }
        self.count += 1;
        self.none_due_before = self.none_due_before.min(read.give_up_at);
    }

    /// The number of the question to ask the leader of a term now, if there is one. `run` tells the questions of all
    /// members, and of all incarnations of this one, apart.
    pub(super) fn ask(
        &mut self,
        of: (RaftId, u64),
        run: Incarnation,
        now: Timestamp,
    ) -> Option<u64> {
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
        self.note(&read);
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
        self.count -= answerable.len();
        answerable
    }

    /// Makes questions without an answer due again. Gives the reads that have waited too long: for an answer, or for
    /// entries that a member which lost its leader does not get.
    pub(super) fn expire(&mut self, now: Timestamp) -> Vec<Read> {
        let stale = self.asked.iter().filter(|(_, (asked, _))| now.since(*asked) >= RETRY);
        let stale: Vec<u64> = stale.map(|(&question, _)| question).collect();
        for question in stale {
            if let Some((_, reads)) = self.asked.remove(&question) {
                self.waiting.extend(reads);
            }
        }
        if now < self.none_due_before {
            return Vec::new();
        }
        let is_over = |read: &mut Read| read.give_up_at <= now;
        let mut over: Vec<Read> = self.waiting.extract_if(.., is_over).collect();
        for reads in self.confirmed.values_mut() {
            over.extend(reads.extract_if(.., is_over));
        }
        self.confirmed.retain(|_, reads| !reads.is_empty());
        self.count -= over.len();
        let asked = self.asked.values().flat_map(|(_, reads)| reads);
        let alive = self.waiting.iter().chain(asked).chain(self.confirmed.values().flatten());
        self.none_due_before = alive.map(|read| read.give_up_at).min().unwrap_or(now);
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
        reads.ask(LEADER, Incarnation::new(1, 1), at(ms))
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
        let second = reads.ask((3, 8), Incarnation::new(1, 1), at(1)).unwrap();
        assert_ne!(first, second);
        reads.confirm(first, 1);
        assert_eq!(jobs(reads.take_answerable(9, 9)), NONE, "an answer to the old question");
        assert_eq!(jobs(reads.expire(at(500))), NONE);
        assert_eq!(reads.ask((3, 8), Incarnation::new(1, 1), at(500)), None, "499 ms are not long");
        assert_eq!(jobs(reads.expire(at(501))), NONE);
        assert!(reads.ask((3, 8), Incarnation::new(1, 1), at(501)).is_some());
    }

    #[test]
    fn questions_are_counted_without_end() {
        let mut reads = Reads { last: u32::MAX, ..Reads::default() };
        reads.add(read(1, 0));
        let question = ask(&mut reads, 0).unwrap();
        assert_eq!(
            question,
            u64::from(Incarnation::new(1, 1).0) << 32,
            "only the count begins again"
        );
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
        reads.add(Read { give_up_at: at(14_000), ..read(2, 0) });
        reads.add(Read { give_up_at: at(13_000), ..read(3, 0) });
        assert_eq!(jobs(reads.expire(at(12_999))), NONE);
        assert_eq!(jobs(reads.expire(at(13_000))), [3]);
        assert_eq!(jobs(reads.expire(at(14_000))), [2]);
    }

    /// A member that loses its leader after the index came, but before the entries did, does not keep clients waiting.
    #[test]
    fn a_read_whose_entries_do_not_come_is_given_up() {
        let mut reads = Reads::default();
        for job in 1..3 {
            reads.add(Read { give_up_at: at(5000 + job), ..read(job, 0) });
        }
        let question = ask(&mut reads, 0).unwrap();
        reads.confirm(question, 6);
        assert_eq!(jobs(reads.take_answerable(5, 9)), NONE);
        assert_eq!(jobs(reads.expire(at(5001))), [1]);
        assert_eq!(jobs(reads.take_answerable(6, 9)), [2], "the other was in time");
        assert_eq!(reads.count, 0);
        assert_eq!(jobs(reads.expire(at(9000))), NONE);
    }

    /// GUARANTEES 48: reads that wait have a bound, and room again when they are answered or given up.
    #[test]
    fn reads_that_wait_have_a_bound() {
        let mut reads = Reads::default();
        while !reads.is_full() {
            reads.add(read(1, 0));
            assert!(reads.count <= READS_MAX, "there is no bound");
            if reads.count == READS_MAX / 2 {
                let question = ask(&mut reads, 0).unwrap();
                reads.confirm(question, 6);
            }
        }
        assert_eq!(reads.take_answerable(6, 9).len(), READS_MAX / 2);
        assert!(!reads.is_full());
        assert_eq!(reads.expire(at(5000)).len(), READS_MAX / 2);
        assert_eq!(reads.count, 0);
    }
}
