//! GUARANTEES 48: what one client can cost has a bound.

use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use super::{add, answer, renew_session, token};
use crate::{
    Caller, Command, Effect, End, Grant, Idle, Limits, LimitsV2, Mode, Outcome, RANGE_BYTES_MAX,
    Refusal, RequestId, SessionId, Shared, Space, Span, Store, Timestamp, Token, Usage, command,
};

struct Client {
    store: Store,
    now: u64,
    requests: u64,
}

impl Client {
    fn new(limits: Limits) -> Self {
        let store = Store::new(limits, 1, Arc::new(Shared::new()), Timestamp(0));
        Self { store, now: 0, requests: 0 }
    }

    /// One of several stores that count together what session 1 has.
    fn sharing(limits: Limits, usage: &Arc<Usage>) -> Self {
        let (mut client, usage) = (Self::new(limits), Arc::clone(usage));
        let of = move |id| (id == SessionId(1)).then(|| Arc::clone(&usage));
        client.store.share_usages(Arc::new(of));
        client
    }

    fn at(&mut self, now: u64) -> &mut Self {
        self.now = now;
        self
    }

    /// The answer of a command, none if it waits.
    fn ask(&mut self, session: u64, command: Command<'_>) -> Option<Outcome> {
        self.requests += 1;
        let request = RequestId(self.requests);
        let caller = Caller { session: SessionId(session), request, keep: false };
        let mut effects = Vec::new();
        self.store.apply(caller, command, Timestamp(self.now), &mut effects);
        self.store.check_invariants();
        answer(effects, request)
    }

    fn lock(&mut self, session: u64, key: &[u8]) -> Option<Outcome> {
        self.ask(session, acquire(key, 0, Some(10)))
    }

    /// Takes a lock that is free.
    #[track_caller]
    fn take(&mut self, session: u64, key: &[u8]) -> Token {
        token(&self.lock(session, key).expect("it does not wait"))
    }

    /// Takes a lock that is free, for as long as possible.
    #[track_caller]
    fn longest(&mut self, key: &[u8]) -> Grant {
        let outcome = self.ask(1, acquire(key, 0, Some(u64::MAX)));
        let Some(Outcome::Granted(grant)) = outcome else { panic!("not granted: {outcome:?}") };
        grant
    }

    fn release(&mut self, session: u64, key: &[u8], token: Token) {
        let release =
            Command::Release(command::Release { key, space: Space::Locks, token, resign: false });
        assert_eq!(self.ask(session, release), Some(Outcome::Done));
    }
}

fn acquire(key: &[u8], wait: u64, lease: Option<u64>) -> Command<'_> {
    let (mode, wait, lease) = (Mode::Mutex, Span(wait), lease.map(Span));
    Command::Acquire(command::Acquire { key, mode, wait, lease, salt: 7 })
}

fn enqueue(key: &[u8]) -> Command<'_> {
    Command::Enqueue(command::Enqueue { key, mode: Mode::Mutex, lease: None, salt: 7 })
}

fn pop() -> Command<'static> {
    Command::Pop(command::Pop { key: b"list", end: End::Left, wait: Some(Span(9)) })
}

fn renew(key: &[u8], token: Token, lease: Option<u64>) -> Command<'_> {
    let (space, lease) = (Space::Locks, lease.map(Span));
    Command::Renew(command::Renew { key, space, token, lease })
}

fn refused(refusal: Refusal) -> Option<Outcome> {
    Some(super::refused(refusal))
}

/// A longer lease is granted, renewed and told with the longest; the hold ends with it.
#[test]
fn no_lease_is_longer_than_the_longest() {
    let limits = Limits { lease_max: Span(50), default_lease: Span(20), ..Limits::default() };
    let mut client = Client::new(limits.clone());
    let grant = client.longest(b"k");
    assert_eq!(grant.lease, Span(50));
    let renew = |lease| renew(b"k", grant.token, Some(lease));
    let renewed = |lease| Some(Outcome::Renewed { fence: grant.token.fence, lease: Span(lease) });
    assert_eq!(client.at(40).ask(1, renew(30)), renewed(30));
    assert_eq!(client.ask(1, renew(u64::MAX)), renewed(50));
    // A hold that was taken with the longest lease follows a session that asked for more.
    assert_eq!(client.at(60).ask(1, renew_session(Span(u64::MAX))), Some(Outcome::Number(1)));
    assert_eq!(client.at(109).lock(2, b"k"), Some(Outcome::Timeout));
    // Who waited while the longest became shorter gets that one.
    assert_eq!(client.ask(2, acquire(b"k", 100, Some(u64::MAX))), None);
    client.store.set_limits(Limits { lease_max: Span(5), ..limits });
    client.at(110).ask(3, Command::Tick);
    assert_eq!(client.store.next_deadline(), Some(Timestamp(115)));
    client.store.set_limits(Limits { lease_max: Span(0), ..Limits::default() });
    assert_eq!(client.longest(b"l").lease, Span(u64::MAX), "0 is no bound");
}

/// What is certain to be refused needs no record of its lease.
#[test]
fn only_what_may_be_granted_counts_as_a_lease() {
    let mut client = Client::new(Limits { waiters_max: 1, ..Limits::default() });
    let held = client.take(1, b"k");
    let wrong = Token { salt: 8, ..held };
    let (key, mode, wait) = (b"k", Mode::Read, Span(9));
    let read = Command::Acquire(command::Acquire { key, mode, wait, lease: None, salt: 1 });
    for (command, may) in [
        (renew(b"k", held, None), true),
        (renew(b"k", wrong, None), false),
        (renew(b"nosuch", wrong, None), false),
        (acquire(b"free", 0, None), true),
        (acquire(b"k", 0, None), false),
        (acquire(b"k", 9, None), true),
        (enqueue(b"k"), true),
        (read, false),
    ] {
        assert_eq!(client.store.may_lease(&command), may, "{command:?}");
    }
    assert_eq!(client.ask(2, acquire(b"k", 9, None)), None);
    assert!(!client.store.may_lease(&enqueue(b"k")), "the queue is full");
    // Readers share what a writer does not.
    let shared = |mode| {
        let (key, wait) = (b"rw", Span::ZERO);
        Command::Acquire(command::Acquire { key, mode, wait, lease: None, salt: 1 })
    };
    assert!(matches!(client.ask(1, shared(Mode::Read)), Some(Outcome::Granted(_))));
    assert!(client.store.may_lease(&shared(Mode::Read)));
    assert!(!client.store.may_lease(&shared(Mode::Write)));
}

/// Idle keys are asked to make room only for a new one, and only if there are as many as may be.
#[test]
fn only_a_new_key_lacks_room() {
    let mut client = Client::new(Limits { locks_max: 1, keys_max: 1, ..Limits::default() });
    assert_eq!(client.store.lacks_room(&acquire(b"k", 0, None)), None);
    assert_eq!(client.store.lacks_room(&add(b"n", 1, false)), None);
    client.take(1, b"k");
    client.ask(1, add(b"n", 1, false));
    let push = |key| Command::Push(command::Push { key, end: End::Left, value: b"v" });
    let set = Command::KvSet(command::KvSet { key: b"n", value: b"v", ttl: None });
    let meet = command::BarrierWait { key: b"n", count: 2, wait: Span(9) };
    for (command, lacks) in [
        (acquire(b"k", 0, None), None),
        (enqueue(b"k"), None),
        (acquire(b"l", 0, None), Some(Idle::Locks)),
        (enqueue(b"l"), Some(Idle::Locks)),
        (add(b"n", 1, false), None),
        (add(b"m", 1, false), Some(Idle::Counters)),
        (set, Some(Idle::Counters)),
        (push(b"list"), Some(Idle::Counters)),
        (pop(), Some(Idle::Counters)),
        (Command::Pop(command::Pop { key: b"list", end: End::Left, wait: None }), None),
        (Command::BarrierWait(meet), Some(Idle::Counters)),
        (Command::Tick, None),
    ] {
        assert_eq!(client.store.lacks_room(&command), lacks, "{command:?}");
    }
}

/// Locks that nobody holds make room, longest idle first; a refusal needs live ones. By the first rules nothing does.
#[test]
fn idle_locks_make_room() {
    let limits = Limits { locks_max: 3, ..Limits::default() };
    let mut client = Client::new(limits.clone());
    for (at, key) in [(1, b"a"), (2, b"b"), (3, b"c")] {
        let held = client.at(at).take(1, key);
        client.release(1, key, held);
    }
    let a = client.at(4).take(1, b"a");
    client.take(2, b"d");
    assert!(!client.store.has_lock(Space::Locks, b"b"), "it was idle for longest");
    assert!(client.store.has_lock(Space::Locks, b"c"));
    client.take(2, b"e");
    assert!(!client.store.has_lock(Space::Locks, b"c"));
    assert_eq!(client.lock(2, b"f"), refused(Refusal::MaxLocks));
    client.release(1, b"a", a);
    client.take(2, b"f");
    assert_eq!(client.store.idlest(Idle::Locks), None);

    let mut older = Client::new(limits.with_v2(LimitsV2::default()));
    for key in [b"a", b"b", b"c"] {
        let held = older.take(1, key);
        older.release(1, key, held);
    }
    assert_eq!(older.lock(1, b"d"), refused(Refusal::MaxLocks));
}

/// All that became idle at one instant goes together: which of it came first is not part of the state, and members of a
/// cluster must agree.
#[test]
fn what_makes_room_does_not_depend_on_a_snapshot() {
    let mut client = Client::new(Limits { locks_max: 3, ..Limits::default() });
    for key in [b"c", b"a"] {
        client.take(1, key);
    }
    client.at(1).ask(1, Command::EndSession { release: true, forced: false });
    let held = client.at(2).take(2, b"b");
    client.release(2, b"b", held);
    let shared = Arc::new(Shared::new());
    let again = Store::restore(&client.store.snapshot(), shared).expect("it was just written");
    let mut other = Client { store: again, now: 2, requests: client.requests };
    for client in [&mut client, &mut other] {
        client.take(3, b"d");
        let left = [b"a", b"b", b"c", b"d"].map(|key| client.store.has_lock(Space::Locks, key));
        assert_eq!(left, [false, true, false, true]);
    }
    assert!(client.store.snapshot() == other.store.snapshot());
}

/// A counter at zero makes room for another value; a value of somebody never does.
#[test]
fn counters_at_zero_make_room() {
    let mut client = Client::new(Limits { keys_max: 2, kv_idle_gc: true, ..Limits::default() });
    let set = |key| Command::KvSet(command::KvSet { key, value: b"v", ttl: None });
    let zero = Command::CounterSet(command::CounterSet { key: b"zero", value: 0 });
    assert!(matches!(client.ask(1, set(b"first")), Some(Outcome::Written(_))));
    assert_eq!(client.at(1).ask(1, zero), Some(Outcome::Done));
    assert!(matches!(client.ask(1, set(b"second")), Some(Outcome::Written(_))));
    assert_eq!(client.ask(1, set(b"third")), refused(Refusal::MaxKeys));
    let push = Command::Push(command::Push { key: b"list", end: End::Left, value: b"v" });
    assert_eq!(client.ask(1, push), refused(Refusal::MaxKeys));
}

/// A session holds and waits for so much and no more; what it has it can renew, release and wait for all the same.
#[test]
fn holds_and_waits_of_a_session() {
    let limits = Limits { holds_per_session_max: 2, waits_per_session_max: 2, ..Limits::default() };
    let mut client = Client::new(limits);
    let a = client.take(1, b"a");
    client.take(1, b"b");
    assert_eq!(client.lock(1, b"c"), refused(Refusal::MaxHolds));
    assert_eq!(client.ask(1, enqueue(b"c")), refused(Refusal::MaxHolds));
    client.take(2, b"c");
    assert!(matches!(client.ask(1, renew(b"a", a, None)), Some(Outcome::Renewed { .. })));
    client.release(1, b"a", a);
    client.take(1, b"a");

    assert_eq!(client.ask(3, acquire(b"a", 9, None)), None);
    assert_eq!(client.ask(3, enqueue(b"b")), Some(Outcome::Queued));
    for command in [
        acquire(b"c", 9, None),
        enqueue(b"c"),
        pop(),
        Command::BarrierWait(command::BarrierWait { key: b"barrier", count: 2, wait: Span(9) }),
    ] {
        assert_eq!(client.ask(3, command), refused(Refusal::MaxWaits));
    }
    assert_eq!(client.ask(3, acquire(b"c", 0, None)), Some(Outcome::Timeout), "it does not wait");
    let wait = Command::Wait(command::Wait { key: b"b", space: Space::Locks, wait: Span(9) });
    assert_eq!(client.ask(3, wait), None);
    client.take(3, b"d");
    // A wait that is over makes room.
    client.at(9).ask(3, Command::Tick);
    assert_eq!(client.ask(3, enqueue(b"c")), Some(Outcome::Queued));
}

/// Who comes back to a place that was left behind waits there like anybody else, so it must be allowed to wait.
#[test]
fn who_comes_back_waits_for_no_more_than_others() {
    let mut client = Client::new(Limits { waits_per_session_max: 1, ..Limits::default() });
    client.take(1, b"k");
    let me = Command::Identify { name: b"worker", reference: b"me" };
    client.ask(2, me);
    assert_eq!(client.ask(2, acquire(b"k", 9, None)), None);
    client.ask(2, Command::Orphan { ttl: Span(100), cut: false });
    client.ask(3, me);
    assert_eq!(client.ask(3, pop()), None);
    assert_eq!(client.ask(3, acquire(b"k", 9, None)), refused(Refusal::MaxWaits));
    client.at(9).ask(3, Command::Tick);
    assert_eq!(client.ask(3, acquire(b"k", 9, None)), None, "the other wait is over");
}

/// Where several stores are one server, they count what a session has together.
#[test]
fn several_stores_count_together() {
    let limits = Limits { holds_per_session_max: 2, waits_per_session_max: 1, ..Limits::default() };
    let usage = Arc::new(Usage::default());
    let mut clients = [(); 3].map(|()| Client::sharing(limits.clone(), &usage));
    let first = clients[0].take(1, b"a");
    clients[1].take(1, b"b");
    for client in &mut clients {
        assert_eq!(client.lock(1, b"c"), refused(Refusal::MaxHolds));
        client.take(2, b"c");
    }
    // The third store has not heard of the session before.
    clients[0].release(1, b"a", first);
    clients[1].take(1, b"d");
    assert_eq!(clients[0].ask(1, pop()), None);
    assert_eq!(clients[1].ask(1, pop()), refused(Refusal::MaxWaits));
    clients[0].at(9).ask(1, Command::Tick);
    assert_eq!(clients[1].ask(1, pop()), None);
    for client in &mut clients {
        client.ask(1, Command::EndSession { release: false, forced: false });
    }
    let mut other = Client::sharing(limits, &usage);
    other.take(1, b"a");
    other.take(1, b"b");
    assert_eq!(other.lock(1, b"c"), refused(Refusal::MaxHolds), "nothing was left behind");
}

/// A place that ran out unclaimed is only a note, which nobody waits for.
#[test]
fn a_note_counts_as_no_wait_in_any_store() {
    let limits = Limits { waits_per_session_max: 1, default_lease: Span(5), ..Limits::default() };
    let usage = Arc::new(Usage::default());
    let mut clients = [(); 2].map(|()| Client::sharing(limits.clone(), &usage));
    assert!(matches!(clients[0].ask(1, enqueue(b"k")), Some(Outcome::Acquired(_))));
    assert_eq!(clients[1].ask(1, pop()), refused(Refusal::MaxWaits));
    clients[0].at(5).ask(1, Command::Tick);
    assert_eq!(clients[1].ask(1, pop()), None);
    let wait = Command::Wait(command::Wait { key: b"k", space: Space::Locks, wait: Span(9) });
    assert_eq!(clients[0].ask(1, wait), refused(Refusal::LeaseExpired), "there is a note");
}

/// A request whose result is kept.
fn add_once(client: &mut Client, request: u64) -> Outcome {
    let caller = Caller { session: SessionId(1), request: RequestId(request), keep: true };
    let mut effects = Vec::new();
    client.store.apply(caller, add(b"n", 1, false), Timestamp(0), &mut effects);
    let Some(Effect::Reply { outcome, .. }) = effects.pop() else { panic!("it is answered") };
    outcome
}

/// The results that a session has kept in several stores are forgotten in the order they were made, wherever they are.
#[test]
fn results_of_several_stores_are_forgotten_together() {
    let usage = Arc::new(Usage::default());
    let mut clients = [(); 2].map(|()| Client::sharing(Limits::default(), &usage));
    // The second store answers a request that was sent before the others.
    for (at, request) in [(0, 2), (0, 3), (1, 1), (0, 4), (1, 5)] {
        assert!(matches!(add_once(&mut clients[at], request), Outcome::Number(_)));
    }
    assert_eq!(usage.results(), (5, 5 * 64));
    let made: Vec<Vec<u64>> = (clients.iter())
        .map(|client| client.store.results_made(SessionId(1)).iter().map(|it| it.0).collect())
        .collect();
    assert_eq!(made, [[0, 1, 3].to_vec(), [2, 4].to_vec()]);
    for client in &mut clients {
        client.store.forget_results(SessionId(1), 1);
        client.store.check_invariants();
    }
    assert_eq!(usage.results(), (3, 3 * 64));
    let later = add_once(&mut clients[1], 1);
    assert_eq!(later, Outcome::Number(1), "made later than those that are gone");
    assert_eq!(add_once(&mut clients[0], 3), Outcome::Refused(Refusal::Forgotten));
    assert_eq!(add_once(&mut clients[0], 4), Outcome::Number(3));
    // What its client has seen is gone for good, and the rest is known as before.
    let seen = Command::Acknowledge(command::Acknowledge { up_to: RequestId(1) });
    clients[1].ask(1, seen);
    assert_eq!(clients[1].store.results_made(SessionId(1)), [(4, 64)]);
}

/// The results that are kept for retries have a bound in bytes, the oldest goes first.
#[test]
fn kept_results_have_a_bound_in_bytes() {
    let mut client = Client::new(Limits { results_bytes_max: 3 * 64 + 1, ..Limits::default() });
    for request in 1..=4 {
        let made = i64::try_from(request).expect("small");
        assert_eq!(add_once(&mut client, request), Outcome::Number(made));
    }
    assert_eq!(add_once(&mut client, 1), Outcome::Refused(Refusal::Forgotten));
    assert_eq!(add_once(&mut client, 2), Outcome::Number(2), "it is kept");
}

/// A range answers with the first items that fit into one answer, each with something for its place.
#[test]
fn a_range_has_a_bound_in_bytes() {
    let mut client = Client::new(Limits::default());
    let sixteenth = RANGE_BYTES_MAX / 16 - 16;
    for (key, bytes) in [(&b"fits"[..], sixteenth), (b"too large", sixteenth + 1)] {
        let value = vec![b'v'; bytes];
        for length in 1..=17 {
            let push = Command::Push(command::Push { key, end: End::Right, value: &value });
            assert_eq!(client.ask(1, push), Some(Outcome::Number(length)));
        }
    }
    let range = |key, start, stop| {
        let outcome = client.store.list_range(key, start, stop);
        let is_all = matches!(outcome, Outcome::Items(_));
        let (Outcome::Items(items) | Outcome::Part(items)) = outcome else { panic!("{outcome:?}") };
        (items.len(), is_all)
    };
    assert_eq!(range(b"fits", 0, 15), (16, true));
    assert_eq!(range(b"fits", 0, -1), (16, false));
    assert_eq!(range(b"fits", 1, -1), (16, true));
    assert_eq!(range(b"too large", 0, 15), (15, false));
    assert_eq!(range(b"too large", 0, 14), (15, true));
}
