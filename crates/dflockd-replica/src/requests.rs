//! Requests of this node's clients that are not answered yet, and until when somebody waits for them.
//!
//! A blocking request has its own deadline in the store. 500 ms after it the accepting node asks for a `Cancel` as
//! well; 5 s after it the client is told `error_unknown`, and what comes of the request later is taken back by `Undo`,
//! unless its result is kept for a retry. A command that does not block is given up after 5 s. If a received snapshot
//! skipped the entry of a request, its outcome is looked up in the new state: answered, still waiting, or unknown.
//! Pushes that the snapshot skipped are lost, so connections with subscriptions are closed.

use std::collections::{BTreeMap, BTreeSet};

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{RequestId, SessionId, Span, Timestamp};

/// How long after its own time a request is given up, with an answer that says so.
pub(super) const GIVE_UP: Span = Span::from_secs(5);
/// How long after a wait should have ended its accepting node asks for the end.
const CANCEL: Span = Span::from_millis(500);

/// Which request of which session.
pub(super) type RequestKey = (SessionId, RequestId);

/// The requests that were accepted here and are not answered.
#[derive(Default)]
pub(super) struct Requests {
    pending: BTreeMap<RequestKey, Pending>,
    /// When each request is to be looked at next, earliest first: one row for each that is not given up, no others. A
    /// look must not walk all that wait, which can be hundreds of thousands.
    due: BTreeSet<(Timestamp, RequestKey)>,
}

struct Pending {
    /// The number of its item.
    seq: u64,
    /// When the node asks for the end of the wait.
    cancel_at: Option<Timestamp>,
    give_up_at: Timestamp,
    /// The client was told that nobody knows.
    given_up: bool,
    /// The client can repeat it and gets the same answer then.
    keep: bool,
}

impl Pending {
    /// When it is to be looked at next.
    fn due_at(&self) -> Option<Timestamp> {
        (!self.given_up).then(|| self.cancel_at.unwrap_or(self.give_up_at))
    }
}

/// What has come due.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Due {
    /// Requests whose waits should have ended.
    pub(super) cancel: Vec<RequestKey>,
    /// Requests whose clients are to be told that nobody knows.
    pub(super) give_up: Vec<RequestKey>,
}

/// What the answer of a request is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// For the client. `undo`: this node has accepted the request, and the client can not ask for the answer again.
    Deliver { undo: bool },
    /// For nobody: the client has been told that nobody knows. `keep`: it may still ask again.
    TooLate { keep: bool },
}

impl Requests {
    /// Remembers a request, whose item has the number `seq` and which may block for `wait`.
    pub(super) fn insert(
        &mut self,
        key: RequestKey,
        seq: u64,
        keep: bool,
        wait: Span,
        now: Timestamp,
    ) {
        let end = now + wait;
        let cancel_at = (wait > Span::ZERO).then(|| end + CANCEL);
        let pending = Pending { seq, cancel_at, give_up_at: end + GIVE_UP, given_up: false, keep };
        self.forget(key);
        self.due.extend(pending.due_at().map(|at| (at, key)));
        self.pending.insert(key, pending);
    }

    /// A request is answered, and forgotten.
    pub(super) fn answer(&mut self, key: RequestKey) -> Answer {
        match self.forget(key) {
            Some(Pending { given_up: true, keep, .. }) => Answer::TooLate { keep },
            // Of what another node has accepted this one takes nothing back.
            None => Answer::Deliver { undo: bug(Bug::UndoElsewhere) },
            Some(pending) => Answer::Deliver { undo: !pending.keep },
        }
    }

    fn forget(&mut self, key: RequestKey) -> Option<Pending> {
        let pending = self.pending.remove(&key)?;
        if let Some(at) = pending.due_at() {
            self.due.remove(&(at, key));
        }
        Some(pending)
    }

    /// All sessions of the incarnation have ended.
    pub(super) fn clear(&mut self) {
        self.pending.clear();
        self.due.clear();
    }

    /// Those whose items are in the state. Walks all that wait, because no order of theirs is that of the items: asked
    /// once per snapshot that another member sent and that was installed, which costs more.
    pub(super) fn applied(&self, seq: u64) -> Vec<RequestKey> {
        let applied = self.pending.iter().filter(|(_, pending)| pending.seq <= seq);
        applied.map(|(&key, _)| key).collect()
    }

    /// What has come due since the last call, each list by session and request.
    pub(super) fn take_due(&mut self, now: Timestamp) -> Due {
        let mut due = Due::default();
        while let Some(&(at, key)) = self.due.first()
            && at <= now
        {
            self.due.pop_first();
            let pending = self.pending.get_mut(&key).expect("a row of `due` has its request");
            if pending.cancel_at.take().is_some() {
                due.cancel.push(key);
            } else {
                pending.given_up = true;
                due.give_up.push(key);
            }
            self.due.extend(pending.due_at().map(|at| (at, key)));
        }
        due.cancel.sort_unstable();
        due.give_up.sort_unstable();
        due
    }
}

#[cfg(test)]
mod tests {
    use dflockd_testkit::Noise;

    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn key(session: u64, request: u64) -> RequestKey {
        (SessionId(session), RequestId(request))
    }

    #[test]
    fn a_wait_is_cancelled_then_given_up() {
        let mut requests = Requests::default();
        requests.insert(key(1, 1), 1, false, Span::from_secs(1), at(0));
        assert_eq!(requests.take_due(at(1499)), Due::default());
        assert_eq!(requests.take_due(at(1500)).cancel, [key(1, 1)]);
        assert_eq!(requests.take_due(at(5999)), Due::default(), "cancelled once");
        assert_eq!(requests.take_due(at(6000)).give_up, [key(1, 1)]);
        assert_eq!(requests.take_due(at(60_000)), Due::default(), "given up once");
        assert_eq!(requests.answer(key(1, 1)), Answer::TooLate { keep: false });
        let unknown = Answer::Deliver { undo: false };
        assert_eq!(requests.answer(key(1, 1)), unknown, "it is forgotten");
    }

    #[test]
    fn what_does_not_block_is_only_given_up() {
        let mut requests = Requests::default();
        requests.insert(key(2, 1), 1, true, Span::ZERO, at(0));
        requests.insert(key(1, 1), 2, true, Span::ZERO, at(0));
        requests.insert(key(3, 1), 3, true, Span::ZERO, at(1));
        assert_eq!(requests.take_due(at(4999)), Due::default());
        let due = requests.take_due(at(5000));
        assert_eq!(due, Due { cancel: vec![], give_up: vec![key(1, 1), key(2, 1)] });
        assert_eq!(requests.answer(key(1, 1)), Answer::TooLate { keep: true });
        assert_eq!(requests.answer(key(3, 1)), Answer::Deliver { undo: false }, "it is kept");
        requests.insert(key(3, 2), 4, false, Span::ZERO, at(1));
        assert_eq!(requests.answer(key(3, 2)), Answer::Deliver { undo: true });
    }

    #[test]
    fn who_looks_late_finds_both() {
        let mut requests = Requests::default();
        requests.insert(key(1, 1), 1, false, Span::from_secs(1), at(0));
        let both = Due { cancel: vec![key(1, 1)], give_up: vec![key(1, 1)] };
        assert_eq!(requests.take_due(at(9000)), both);
    }

    #[test]
    fn those_in_the_state_are_known_by_number() {
        let mut requests = Requests::default();
        for (request, seq) in [(1, 4), (2, 5), (3, 6)] {
            requests.insert(key(1, request), seq, false, Span::ZERO, at(0));
        }
        assert_eq!(requests.applied(5), [key(1, 1), key(1, 2)]);
        requests.clear();
        assert_eq!(requests.applied(9), []);
        assert_eq!(requests.take_due(at(9000)), Due::default());
    }

    /// The same requests without an index: each look walks all of them.
    #[derive(Default)]
    struct Twin(BTreeMap<RequestKey, Pending>);

    impl Twin {
        fn take_due(&mut self, now: Timestamp) -> Due {
            let mut due = Due::default();
            for (&key, pending) in &mut self.0 {
                if pending.cancel_at.is_some_and(|at| at <= now) {
                    pending.cancel_at = None;
                    due.cancel.push(key);
                }
                if pending.give_up_at <= now && !pending.given_up {
                    pending.given_up = true;
                    due.give_up.push(key);
                }
            }
            due
        }
    }

    #[test]
    fn a_look_finds_what_a_walk_over_all_would() {
        let mut noise = Noise::new(7);
        let mut below = |end: u64| noise.next() % end;
        let (mut requests, mut twin) = (Requests::default(), Twin::default());
        let mut ms = 0;
        for seq in 1..20_000 {
            ms += below(50);
            let key = key(below(20), below(20));
            match below(4) {
                0 => {
                    let answer = requests.answer(key);
                    let too_late = twin.0.remove(&key).is_some_and(|pending| pending.given_up);
                    assert_eq!(matches!(answer, Answer::TooLate { .. }), too_late);
                }
                1 => assert_eq!(requests.take_due(at(ms)), twin.take_due(at(ms)), "at {ms}"),
                _ => {
                    let wait = Span::from_millis(below(3) * 1000);
                    requests.insert(key, seq, false, wait, at(ms));
                    let cancel_at = (wait > Span::ZERO).then(|| at(ms) + wait + CANCEL);
                    let give_up_at = at(ms) + wait + GIVE_UP;
                    let (given_up, keep) = (false, false);
                    twin.0.insert(key, Pending { seq, cancel_at, give_up_at, given_up, keep });
                }
            }
            let not_given_up = requests.pending.values().filter(|pending| !pending.given_up);
            assert_eq!(requests.due.len(), not_given_up.count(), "one row for each, no others");
        }
    }
}
