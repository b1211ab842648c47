//! Random commands against the store and its [`Model`]: both must answer alike, step by step.
//!
//! A case is made from a seed and is symbolic ("the second youngest hold", "the last request but
//! one"), so that any part of it can be left out and the rest still makes sense. What fails is cut
//! down to the commands that matter and printed with the way to run it again:
//!
//! ```text
//! DFLOCKD_CASES=1000000 cargo test -p dflockd-core       more cases than the default
//! DFLOCKD_SEED=17 cargo test -p dflockd-core locks_      one case of one family
//! ```

extern crate std;

use alloc::borrow::ToOwned;
use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::cell::Cell;
use core::fmt::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;

use super::model::{LockId, Model, is_answered};
use super::{
    add, answer, cancel, delete, detach, refused, renew_session, signal, subscribe, token,
    unsubscribe,
};
use crate::{
    Bytes, Caller, Command, Effect, End, Event, Expect, Fence, Grant, LeaderEvent, Limits,
    LimitsV2, LostReason, Mode, Only, Outcome, OwnedCommand, Push, Query, Refusal, RequestId,
    Revision, SessionId, Shared, Space, Span, Store, Subscription, Timestamp, Token, command,
};

const CASES: u64 = 40_000;
const FAMILIES: u64 = 4;
const COMMANDS: usize = 200;
const FIRST_FENCE: u64 = 100;

const KEYS: [&[u8]; 4] = [b"a", b"a.b", b"c.d.e", b"a/b.c"];
/// Those with a wildcard behind a slash are bad ones by the first rules.
const PATTERNS: [&[u8]; 14] = [
    b"a", b"a.b", b"*", b">", b"a.*", b"a.>", b"*.b", b"c.*.e", b"c.d.>", b"*.*.*", b"*.c",
    b"a/b.*", b"a/>", b"*/*.c",
];
const BAD_PATTERNS: [&[u8]; 5] = [b"a*", b"a.>.b", b">.", b"a.b>", b"a/b*"];
const GROUPS: [&[u8]; 3] = [b"", b"g", b"h"];
const VALUES: [&[u8]; 4] = [b"x", b"yy", b"zzz", b"too-long"];
/// Of clients, some of whom share one.
const REFERENCES: [&[u8]; 4] = [b"", b"r", b"r", b"s"];
const DELTAS: [i64; 6] = [0, 1, -1, 5, i64::MAX, i64::MIN];

#[test]
fn locks_match_the_model() {
    check_family(Family::Locks);
}

#[test]
fn values_match_the_model() {
    check_family(Family::Values);
}

#[test]
fn subscriptions_match_the_model() {
    check_family(Family::Subscriptions);
}

#[test]
fn everything_matches_the_model() {
    check_family(Family::Everything);
}

// Cases.

/// Which commands a case is made of, mostly.
#[derive(Clone, Copy, Debug)]
enum Family {
    Locks,
    Values,
    Subscriptions,
    Everything,
}

#[derive(Clone, Debug)]
struct Case {
    limits: Limits,
    grants_from: Timestamp,
    /// How many fences there are at first.
    fences: u64,
    /// For each client, whether its results are kept.
    keeps: Vec<bool>,
    /// For each client, what it says of itself when it comes.
    references: Vec<&'static [u8]>,
    ops: Vec<Op>,
}

#[derive(Clone, Debug)]
enum Op {
    /// From now on this many fences can be had.
    Fences(u64),
    /// The store goes through a snapshot.
    Restore,
    /// A client says something.
    Do { advance: Advance, client: usize, act: Act },
    /// A client repeats one of its last requests.
    Retry { advance: Advance, client: usize, back: usize },
}

#[derive(Clone, Copy, Debug)]
enum Advance {
    By(u64),
    /// To the next instant at which something is due.
    ToDue,
}

/// A command of which some parts are only known when it is sent.
#[derive(Clone, Debug)]
enum Act {
    Fixed(Command<'static>),
    Release { hold: Pick, resign: bool },
    Renew { hold: Pick, lease: Option<Span> },
    ForceRelease { hold: Pick },
    ExpectRevision { key: &'static [u8], back: u64 },
    WatchFrom { pattern: &'static [u8], back: u64 },
    Cancel { back: u64 },
    Acknowledge { back: u64 },
    Undo { back: usize },
    Detach { after: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Pick {
    /// Among the holds that have not ended, or among all there ever were.
    live: bool,
    back: usize,
    twist: Twist,
}

/// What is wrong with a token.
#[derive(Clone, Copy, Debug)]
enum Twist {
    Nothing,
    Key,
    Space,
    Salt,
}

/// SplitMix64: fast, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn index(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).expect("an index fits");
        usize::try_from(self.below(bound)).expect("it is below a usize")
    }

    fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }
}

impl Case {
    fn generate(family: Family, seed: u64) -> Self {
        let mut rng = Random(seed.wrapping_mul(FAMILIES).wrapping_add(family as u64));
        let limits = Limits {
            locks_max: rng.pick(&[2, 3, 4, 1024]),
            keys_max: rng.pick(&[0, 0, 2, 3, 5]),
            list_length_max: rng.pick(&[0, 1, 2, 3]),
            waiters_max: rng.pick(&[0, 0, 1, 2]),
            subscriptions_max: rng.pick(&[0, 0, 1, 2, 3]),
            value_bytes_max: rng.pick(&[3, 3, 2]),
            default_lease: Span(rng.pick(&[5, 10, 20])),
            idle_max: Span(rng.pick(&[0, 5, 20, 60])),
            gc_interval: Span(rng.pick(&[1, 5, 7])),
            shared_namespace: rng.percent(30),
            kv_idle_gc: rng.percent(30),
            failover_grace: Span(rng.pick(&[0, 3, 8])),
            events_max: rng.pick(&[0, 8]),
            results_max: rng.pick(&[1, 2, 4, 1024]),
            results_bytes_max: 1 << 40,
            expired_notes_max: rng.pick(&[1, 2, 1024]),
            rules: rng.pick(&[1, 2, 2]),
            lease_max: Span(rng.pick(&[0, 0, 7, 12])),
            holds_per_session_max: rng.pick(&[0, 0, 2, 4]),
            waits_per_session_max: rng.pick(&[0, 0, 1, 3]),
            subscription_bytes_max: rng.pick(&[0, 0, 3, 7]),
            subscriptions_total_max: rng.pick(&[0, 0, 4, 6]),
            subscription_bytes_total_max: rng.pick(&[0, 0, 9, 16]),
            pattern_tokens_max: rng.pick(&[0, 0, 2, 3]),
            ..Limits::default()
        };
        // The first rules know no more than this.
        let limits = match limits.rules {
            1 => limits.with_v2(LimitsV2::default()),
            _ => limits,
        };
        let scarce = rng.percent(25);
        let keeps = (0..3 + rng.below(3)).map(|_| rng.percent(50)).collect::<Vec<_>>();
        let references = keeps.iter().map(|_| rng.pick(&REFERENCES)).collect();
        // Two out of three requests for a key agree on what it is, or all would be refused.
        let favoured = [(); KEYS.len()].map(|()| any_mode(&mut rng));
        let ops = (0..COMMANDS)
            .map(|_| match rng.below(100) {
                0..=1 => Op::Restore,
                2..=5 if scarce => Op::Fences(rng.pick(&[0, 1, 2, 3, 1000])),
                _ => {
                    let advance = match rng.below(20) {
                        0..=8 => Advance::By(0),
                        9..=14 => Advance::By(1 + rng.below(3)),
                        15..=17 => Advance::ToDue,
                        18 => Advance::By(rng.below(12)),
                        _ => Advance::By(rng.below(40)),
                    };
                    let client = rng.index(keeps.len());
                    if keeps[client] && rng.percent(8) {
                        Op::Retry { advance, client, back: rng.index(6) }
                    } else {
                        Op::Do { advance, client, act: any_act(&mut rng, family, &favoured) }
                    }
                }
            })
            .collect();
        Self {
            limits,
            grants_from: Timestamp(if rng.percent(15) { 1 + rng.below(40) } else { 0 }),
            fences: if scarce { rng.below(8) } else { u64::MAX - FIRST_FENCE },
            keeps,
            references,
            ops,
        }
    }
}

fn any_mode(rng: &mut Random) -> Mode {
    match rng.below(8) {
        0..=1 => Mode::Mutex,
        2 => Mode::Election,
        3..=4 => Mode::Semaphore { limit: 1 + u32::from(rng.percent(70)) },
        5..=6 => Mode::Read,
        _ => Mode::Write,
    }
}

fn any_act(rng: &mut Random, family: Family, favoured: &[Mode; KEYS.len()]) -> Act {
    let [service, locks, values] = match family {
        Family::Locks => [12, 80, 2],
        Family::Values => [12, 5, 75],
        Family::Subscriptions => [12, 30, 25],
        Family::Everything => [15, 40, 30],
    };
    let roll = rng.below(100);
    if roll < service {
        service_act(rng)
    } else if roll < service + locks {
        lock_act(rng, favoured)
    } else if roll < service + locks + values {
        value_act(rng)
    } else {
        subscription_act(rng)
    }
}

fn service_act(rng: &mut Random) -> Act {
    match rng.below(30) {
        0..=3 => Act::Fixed(Command::Tick),
        4..=5 => Act::Fixed(Command::NewTerm),
        6..=11 => Act::Cancel { back: rng.below(8) },
        12..=14 => Act::Acknowledge { back: rng.below(6) },
        15..=17 => Act::Undo { back: rng.index(6) },
        18..=20 => Act::Detach { after: rng.below(20) },
        21..=22 => Act::Fixed(Command::Attach),
        23..=26 => {
            let ttl = Span(rng.pick(&[0, 3, 10, 40]));
            Act::Fixed(Command::Orphan { ttl, cut: rng.percent(50) })
        }
        27 => {
            let reference = rng.pick(&REFERENCES);
            Act::Fixed(Command::Identify { name: reference, reference })
        }
        _ => Act::Fixed(Command::EndSession { release: rng.percent(70), forced: rng.percent(50) }),
    }
}

fn any_wait(rng: &mut Random) -> Span {
    Span(rng.pick(&[0, 0, 0, 1, 1, 3, 3, 5, 5, 10, 10, 20, 50, u64::MAX]))
}

fn any_lease(rng: &mut Random) -> Option<Span> {
    let long = if rng.percent(10) { u64::MAX } else { 40 };
    rng.pick(&[None, Some(1), Some(3), Some(6), Some(15), Some(long)]).map(Span)
}

fn any_space(rng: &mut Random) -> Space {
    if rng.percent(70) { Space::Locks } else { Space::Semaphores }
}

fn any_pick(rng: &mut Random) -> Pick {
    let twist = match rng.below(30) {
        0 => Twist::Key,
        1 => Twist::Space,
        2 => Twist::Salt,
        _ => Twist::Nothing,
    };
    Pick { live: rng.percent(70), back: rng.index(5), twist }
}

fn lock_act(rng: &mut Random, favoured: &[Mode; KEYS.len()]) -> Act {
    let index = rng.index(KEYS.len());
    let key = KEYS[index];
    let mode = match (favoured[index], rng.percent(85)) {
        (Mode::Read | Mode::Write, true) => {
            if rng.percent(60) {
                Mode::Read
            } else {
                Mode::Write
            }
        }
        (Mode::Mutex | Mode::Election, true) => {
            if rng.percent(60) {
                Mode::Mutex
            } else {
                Mode::Election
            }
        }
        (mode @ Mode::Semaphore { .. }, true) => mode,
        (_, false) => any_mode(rng),
    };
    let space = if rng.percent(90) { mode.space() } else { any_space(rng) };
    let (wait, lease, salt) = (any_wait(rng), any_lease(rng), rng.next());
    match rng.below(20) {
        0..=7 => Act::Fixed(Command::Acquire(command::Acquire { key, mode, wait, lease, salt })),
        8..=10 => {
            let mode = if mode == Mode::Election { Mode::Mutex } else { mode };
            Act::Fixed(Command::Enqueue(command::Enqueue { key, mode, lease, salt }))
        }
        11..=13 => Act::Fixed(Command::Wait(command::Wait { key, space, wait })),
        14..=16 => Act::Release { hold: any_pick(rng), resign: rng.percent(30) },
        17 => Act::Renew { hold: any_pick(rng), lease },
        18 if rng.percent(50) => Act::Renew { hold: any_pick(rng), lease },
        18 => {
            // Leases are few, so that some hold often has this one.
            let lease = lease.unwrap_or(Limits::default().default_lease);
            Act::Fixed(Command::RenewSession(command::RenewSession { lease }))
        }
        _ => Act::ForceRelease { hold: any_pick(rng) },
    }
}

fn value_act(rng: &mut Random) -> Act {
    let key = rng.pick(&KEYS);
    let value = rng.pick(&VALUES);
    let end = if rng.percent(50) { End::Left } else { End::Right };
    let ttl = rng.pick(&[None, None, Some(1), Some(4), Some(12)]).map(Span);
    let wait = any_wait(rng);
    Act::Fixed(match rng.below(24) {
        0..=2 => {
            Command::Add(command::Add { key, delta: rng.pick(&DELTAS), decrement: rng.percent(50) })
        }
        3 => Command::CounterSet(command::CounterSet { key, value: rng.pick(&DELTAS) }),
        4..=5 => Command::KvSet(command::KvSet { key, value, ttl }),
        6 => Command::KvDelete(command::KvDelete { key }),
        7 => return Act::ExpectRevision { key, back: rng.below(5) },
        8..=9 => {
            let expect =
                if rng.percent(50) { Expect::Absent } else { Expect::Value(rng.pick(&VALUES)) };
            Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl })
        }
        10..=13 => Command::Push(command::Push { key, end, value }),
        14..=15 => Command::Pop(command::Pop { key, end, wait: None }),
        16..=19 => Command::Pop(command::Pop { key, end, wait: Some(wait) }),
        _ => {
            let count = rng.pick(&[1, 2, 2, 2, 3, 3]);
            Command::BarrierWait(command::BarrierWait { key, count, wait })
        }
    })
}

fn subscription_act(rng: &mut Random) -> Act {
    let bad = rng.percent(4);
    let pattern = if bad { rng.pick(&BAD_PATTERNS) } else { rng.pick(&PATTERNS) };
    let key = if bad { pattern } else { rng.pick(&KEYS) };
    let group = rng.pick(&GROUPS);
    let subscription = match rng.below(10) {
        0..=3 => Subscription::Signals { pattern, group },
        4..=6 => Subscription::Changes { pattern, from: None },
        _ => Subscription::Leaders { key },
    };
    match rng.below(16) {
        0..=5 => Act::Fixed(Command::Subscribe(command::Subscribe { to: subscription })),
        6..=7 => Act::WatchFrom { pattern, back: rng.below(12) },
        8..=10 => Act::Fixed(Command::Unsubscribe(command::Unsubscribe { from: subscription })),
        _ => Act::Fixed(Command::Signal(command::Signal {
            channel: key,
            payload: rng.pick(&VALUES),
        })),
    }
}

// Running.

struct Run {
    store: Store,
    shared: Arc<Shared>,
    model: Model,
    idle_max: Span,
    now: Timestamp,
    clients: Vec<Client>,
    sessions: u64,
    /// What was asked under each number: more than one only if somebody repeats it.
    asked: BTreeMap<(SessionId, RequestId), Vec<OwnedCommand>>,
    /// What can be undone, oldest first.
    outcomes: Vec<Outcome>,
    /// What was done, in words, if somebody wants to read it.
    trace: Option<String>,
    /// The kinds of effects there were, if somebody wants to know.
    seen: Option<BTreeSet<String>>,
}

struct Client {
    session: SessionId,
    reference: &'static [u8],
    /// It has said who it is.
    known: bool,
    keep: bool,
    requests: Vec<(RequestId, Command<'static>)>,
    acknowledged: RequestId,
}

impl Client {
    fn new(session: u64, keep: bool, reference: &'static [u8]) -> Self {
        let (session, known) = (SessionId(session), reference.is_empty());
        Self { session, reference, known, keep, requests: Vec::new(), acknowledged: RequestId(0) }
    }

    fn last_request(&self) -> u64 {
        self.requests.last().map_or(0, |(request, _)| request.0)
    }
}

impl Run {
    fn new(case: &Case) -> Self {
        let shared = Arc::new(Shared::new());
        let ceiling = FIRST_FENCE + case.fences;
        shared.set_fences(FIRST_FENCE, ceiling);
        let mut model = Model::new(case.limits.clone(), case.grants_from);
        model.set_fences(FIRST_FENCE, ceiling);
        let store = Store::new(case.limits.clone(), 42, Arc::clone(&shared), case.grants_from);
        let clients = case.keeps.iter().zip(&case.references);
        let clients = (1..).zip(clients).map(|(id, (keep, by))| Client::new(id, *keep, by));
        Self {
            store,
            shared,
            model,
            idle_max: case.limits.idle_max,
            now: Timestamp(0),
            clients: clients.collect(),
            sessions: u64::try_from(case.keeps.len()).expect("a few"),
            asked: BTreeMap::new(),
            outcomes: Vec::new(),
            trace: None,
            seen: None,
        }
    }

    fn step(&mut self, op: &Op) -> Result<(), String> {
        match op {
            Op::Fences(available) => {
                let (next, _) = self.model.fences();
                let ceiling = next.saturating_add(*available);
                self.model.set_fences(next, ceiling);
                self.shared.set_fences(next, ceiling);
                self.note(|| format!("fences {next}..{ceiling}"));
                Ok(())
            }
            Op::Restore => self.restore(),
            Op::Do { advance, client, act } => {
                self.advance(*advance);
                self.act(*client, act)
            }
            Op::Retry { advance, client, back } => {
                let Client { session, keep, ref requests, acknowledged, .. } =
                    self.clients[*client];
                let mut earlier = requests.iter().rev().skip(*back);
                // Nobody asks again for what was acknowledged.
                let Some((request, command)) = earlier.next().filter(|(r, _)| *r > acknowledged)
                else {
                    return Ok(());
                };
                let (request, command) = (*request, *command);
                self.advance(*advance);
                self.apply(Caller { session, request, keep }, command).map(|_| ())
            }
        }
    }

    fn advance(&mut self, advance: Advance) {
        self.now = match advance {
            Advance::By(span) => self.now + Span(span),
            // A wait without end is not waited for.
            Advance::ToDue => {
                let due = self.model.next_due_at().unwrap_or(self.now);
                due.max(self.now).min(self.now + Span(1000))
            }
        };
    }

    fn act(&mut self, client: usize, act: &Act) -> Result<(), String> {
        let Client { session, keep, reference, known, .. } = self.clients[client];
        if !known {
            self.clients[client].known = true;
            let caller = Caller { session, request: RequestId(0), keep: false };
            self.apply(caller, Command::Identify { name: b"client", reference })?;
        }
        let last = self.clients[client].last_request();
        let command = match act {
            Act::Fixed(command) => *command,
            Act::Release { hold, resign } => {
                let Some((space, key, token)) = self.pick(*hold) else { return Ok(()) };
                Command::Release(command::Release { key, space, token, resign: *resign })
            }
            Act::Renew { hold, lease } => {
                let Some((space, key, token)) = self.pick(*hold) else { return Ok(()) };
                Command::Renew(command::Renew { key, space, token, lease: *lease })
            }
            Act::ForceRelease { hold } => {
                let Some((space, key, token)) = self.pick(*hold) else { return Ok(()) };
                // Here the twist that hits the salt hits the fence.
                let off = u64::from(matches!(hold.twist, Twist::Salt));
                let fence = Fence(token.fence.0 + off * 1000);
                Command::ForceRelease(command::ForceRelease { key, space, fence })
            }
            Act::ExpectRevision { key, back } => {
                Command::KvCompareAndSet(command::KvCompareAndSet {
                    key,
                    expect: Expect::Revision(Revision(
                        self.model.revision().0.saturating_sub(*back),
                    )),
                    value: VALUES[0],
                    ttl: None,
                })
            }
            Act::WatchFrom { pattern, back } => {
                let from = (self.model.revision().0 + 2).saturating_sub(*back).max(1);
                let from = Some(Revision(from));
                Command::Subscribe(command::Subscribe {
                    to: Subscription::Changes { pattern, from },
                })
            }
            Act::Cancel { back } => {
                Command::Cancel(command::Cancel { request: RequestId(last.saturating_sub(*back)) })
            }
            Act::Acknowledge { back } => {
                let up_to = RequestId(last.saturating_sub(*back));
                let acknowledged = &mut self.clients[client].acknowledged;
                *acknowledged = (*acknowledged).max(up_to);
                Command::Acknowledge(command::Acknowledge { up_to })
            }
            Act::Detach { after } => Command::Detach { until: self.now + Span(*after) },
            Act::Undo { back } => {
                let Some(outcome) = self.outcomes.iter().rev().nth(*back).cloned() else {
                    return Ok(());
                };
                let caller = Caller { session, request: RequestId(0), keep };
                return self.apply(caller, Command::Undo(&outcome)).map(|_| ());
            }
        };
        let is_answered = is_answered(&command);
        let request = RequestId(if is_answered { last + 1 } else { 0 });
        if is_answered {
            self.clients[client].requests.push((request, command));
        }
        let ends = matches!(command, Command::EndSession { .. } | Command::Orphan { .. });
        self.apply(Caller { session, request, keep }, command)?;
        if ends {
            self.replace(session);
        }
        Ok(())
    }

    /// The session is gone for ever; its client comes back with a new one.
    fn replace(&mut self, session: SessionId) {
        if let Some(client) = self.clients.iter_mut().find(|client| client.session == session) {
            self.sessions += 1;
            *client = Client::new(self.sessions, client.keep, client.reference);
        }
    }

    fn pick(&self, pick: Pick) -> Option<(Space, &'static [u8], Token)> {
        let live: Vec<(LockId, Token)>;
        let holds = if pick.live {
            live = self.model.holds();
            &live
        } else {
            &self.model.granted
        };
        let ((space, key), token) = holds.iter().rev().nth(pick.back).or(holds.last())?;
        let key = KEYS.into_iter().find(|k| **k == **key).expect("all keys are known");
        let (space, token) = (*space, *token);
        Some(match pick.twist {
            Twist::Nothing => (space, key, token),
            Twist::Key => (space, if key == KEYS[0] { KEYS[1] } else { KEYS[0] }, token),
            Twist::Space => match space {
                Space::Locks => (Space::Semaphores, key, token),
                Space::Semaphores => (Space::Locks, key, token),
            },
            Twist::Salt => (space, key, Token { salt: token.salt ^ 1, ..token }),
        })
    }

    /// Sends one command to both, and compares all that can be seen of them.
    fn apply(&mut self, caller: Caller, command: Command<'_>) -> Result<Vec<Effect>, String> {
        let now = self.now;
        self.note(|| {
            let Caller { session, request, keep } = caller;
            let kept = if keep { " keep" } else { "" };
            format!("@{} session {} request {}{kept}: {command:?}", now.0, session.0, request.0)
        });
        let expected = self.model.apply(caller, command, now);
        let mut effects = Vec::new();
        if self.trace.is_some() {
            for effect in &expected {
                self.note(|| format!("    model {effect:?}"));
            }
        }
        self.store.apply(caller, command, now, &mut effects);
        if self.trace.is_some() {
            for effect in &effects {
                self.note(|| format!("    store {effect:?}"));
            }
        }
        if let Some(seen) = &mut self.seen {
            seen.extend(effects.iter().map(kind_of));
        }
        compare(&effects, &expected)?;
        self.check_forms(caller, command, &effects)?;
        self.store.check_invariants();
        self.compare_state(&effects)?;
        self.expect_no_vain_deadline()?;
        for effect in &effects {
            match effect {
                Effect::SessionEnded { session } => self.replace(*session),
                Effect::Reply {
                    outcome:
                        outcome @ (Outcome::Granted(_) | Outcome::Acquired(_) | Outcome::Popped { .. }),
                    ..
                } => self.outcomes.push(outcome.clone()),
                Effect::Reply { .. } | Effect::Push { .. } => {}
            }
        }
        Ok(effects)
    }

    /// Every answer has a form that its command allows, also if it comes later or again.
    fn check_forms(
        &mut self,
        caller: Caller,
        command: Command<'_>,
        effects: &[Effect],
    ) -> Result<(), String> {
        if is_answered(&command) {
            let asked = self.asked.entry((caller.session, caller.request)).or_default();
            asked.push(command.into());
        }
        for effect in effects {
            let Effect::Reply { session, request, outcome } = effect else { continue };
            let Some(asked) = self.asked.get(&(*session, *request)) else {
                return Err(format!("{effect:?} answers nothing"));
            };
            // By the first rules a pop that was withdrawn timed out.
            let is_old = |command| {
                !self.store.limits().follows(2)
                    && matches!((command, outcome), (Command::Pop(_), Outcome::Timeout))
            };
            let mut asked_for = asked.iter().map(OwnedCommand::get);
            if !asked_for.any(|command| command.allows(outcome) || is_old(command)) {
                return Err(format!("{effect:?} is no answer to {asked:?}"));
            }
        }
        Ok(())
    }

    fn compare_state(&self, effects: &[Effect]) -> Result<(), String> {
        let (now, revision) = (self.now, self.model.revision());
        differ("revision", self.store.revision(), revision)?;
        for key in KEYS {
            for query in [
                Query::Counter { key },
                Query::Kv { key },
                Query::Entry { key },
                Query::Length { key },
                Query::Range { key, start: 0, stop: -1 },
            ] {
                differ(query, self.store.read(query, now), self.model.read(query, now))?;
            }
        }
        // Reads look ahead of the last command, too.
        let (key, later) = (KEYS[0], now + Span(3));
        for query in [Query::Kv { key }, Query::Entry { key }] {
            differ("later read", self.store.read(query, later), self.model.read(query, later))?;
        }
        let query = Query::Range { key, start: -2, stop: 1 };
        differ(query, self.store.read(query, now), self.model.read(query, now))?;

        let (deadline, due) = (self.store.next_deadline(), self.model.next_due_at());
        if due.is_some_and(|due| deadline.is_none_or(|deadline| deadline > due)) {
            return Err(format!("next deadline is {deadline:?}, but {due:?} brings a change"));
        }
        for effect in effects {
            if let Effect::Push { group: Some(group), .. } = effect {
                let mut members: Vec<SessionId> = self.store.group_members(group).collect();
                let mut expected = self.model.group_members(group);
                members.sort();
                expected.sort();
                differ(group, members, expected)?;
            }
        }
        Ok(())
    }

    /// Whoever waits for a deadline that has passed waits in vain, and at once again.
    fn expect_no_vain_deadline(&self) -> Result<(), String> {
        let (now, deadline) = (self.now, self.store.next_deadline());
        // What may not be idle for an instant can be overdue as soon as a command makes it idle.
        let overdue = deadline.is_some_and(|at| at <= now) && self.idle_max > Span::ZERO;
        if overdue && self.model.next_due_at().is_none_or(|due| due > now) {
            return Err(format!("next deadline is {deadline:?}, but nothing is left for {now:?}"));
        }
        Ok(())
    }

    fn restore(&mut self) -> Result<(), String> {
        self.note(|| "snapshot and restore".to_owned());
        let snapshot = self.store.snapshot();
        let (next, ceiling) = self.model.fences();
        self.shared = Arc::new(Shared::new());
        self.shared.set_fences(next, ceiling);
        self.store = match Store::restore(&snapshot, Arc::clone(&self.shared)) {
            Ok(store) => store,
            Err(error) => return Err(format!("the snapshot cannot be read: {error:?}")),
        };
        // A snapshot may know better than the counter; both must go on with the same numbers.
        self.shared.set_fences(next, ceiling);
        if self.store.snapshot() != snapshot {
            return Err("restored and written again, the snapshot differs".to_owned());
        }
        self.store.check_invariants();
        self.compare_state(&[])
    }

    fn note(&mut self, text: impl FnOnce() -> String) {
        if let Some(trace) = &mut self.trace {
            trace.push_str(&text());
            trace.push('\n');
        }
    }
}

fn differ<T: PartialEq + core::fmt::Debug>(
    what: impl core::fmt::Debug,
    store: T,
    model: T,
) -> Result<(), String> {
    if store == model {
        return Ok(());
    }
    Err(format!("{what:?}: the store says {store:?}, the model {model:?}"))
}

/// Replies in any order, pushes in order for each session; but which of several queue groups comes
/// first is nobody's business.
fn compare(store: &[Effect], model: &[Effect]) -> Result<(), String> {
    if store == model {
        return Ok(());
    }
    let session = |effect: &Effect| match effect {
        Effect::Push { session, .. } => *session,
        Effect::Reply { .. } | Effect::SessionEnded { .. } => SessionId(0),
    };
    let split = |effects: &[Effect]| {
        let (mut pushes, rest): (Vec<Effect>, Vec<Effect>) =
            effects.iter().cloned().partition(|effect| matches!(effect, Effect::Push { .. }));
        pushes.sort_by_key(session);
        for copies in pushes.chunk_by_mut(|a, b| copy_of(a).is_some() && copy_of(a) == copy_of(b)) {
            copies.sort_by_key(|copy| match copy {
                Effect::Push { group, .. } => group.clone(),
                Effect::Reply { .. } | Effect::SessionEnded { .. } => None,
            });
        }
        (pushes, rest)
    };
    let ((store_pushes, store_rest), (model_pushes, mut model_rest)) = (split(store), split(model));
    for effect in &store_rest {
        match model_rest.iter().position(|other| other == effect) {
            Some(index) => drop(model_rest.remove(index)),
            None => return Err(format!("only the store has {effect:?}")),
        }
    }
    if let Some(effect) = model_rest.first() {
        return Err(format!("only the model has {effect:?}"));
    }
    differ("pushes by session", store_pushes, model_pushes)
}

/// Whose copy of what, if it is one for a queue group.
fn copy_of(effect: &Effect) -> Option<(SessionId, &Push)> {
    match effect {
        Effect::Push { session, push, group: Some(_) } => Some((*session, push)),
        Effect::Push { .. } | Effect::Reply { .. } | Effect::SessionEnded { .. } => None,
    }
}

// Failing.

/// Runs `ops`; on failure, says why and how many of them were run.
fn run(case: &Case, ops: &[Op], trace: Option<&mut String>) -> Result<(), (String, usize)> {
    let mut run = Run::new(case);
    run.trace = trace.as_ref().map(|_| String::new());
    let mut done = 0;
    let result = catch_unwind(AssertUnwindSafe(|| {
        for op in ops {
            done += 1;
            run.step(op)?;
        }
        Ok(())
    }));
    if let (Some(trace), Some(text)) = (trace, run.trace.take()) {
        *trace = text;
    }
    match result {
        Ok(result) => result.map_err(|why| (why, done)),
        Err(panic) => {
            let why = panic
                .downcast_ref::<String>()
                .cloned()
                .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
                .unwrap_or_else(|| "?".to_owned());
            // Whatever is in there is broken: dropping it might panic again.
            core::mem::forget(run);
            Err((format!("panic: {why}"), done))
        }
    }
}

fn check_family(family: Family) {
    let number = |name| std::env::var(name).ok().map(|text| text.parse::<u64>().expect(name));
    if let Some(seed) = number("DFLOCKD_SEED") {
        return check_seed(family, seed);
    }
    let cases = number("DFLOCKD_CASES").unwrap_or(CASES) / FAMILIES;
    for seed in 0..cases {
        check_seed(family, seed);
    }
}

fn check_seed(family: Family, seed: u64) {
    let case = Case::generate(family, seed);
    let Err((_, done)) = run(&case, &case.ops, None) else { return };

    let mut trace = String::new();
    let (ops, failure) = quietly(|| {
        let ops = shrink(&case, &case.ops[..done]);
        let failure = run(&case, &ops, Some(&mut trace));
        (ops, failure)
    });

    let mut report = String::new();
    let (why, _) = failure.err().unwrap_or_default();
    writeln!(report, "{why}\n\n{:?}, seed {seed}, cut down to {} steps", family, ops.len())
        .and_then(|()| writeln!(report, "{:?}, grants from {:?}", case.limits, case.grants_from))
        .and_then(|()| writeln!(report, "fences at first: {}\n{trace}", case.fences))
        .expect("a string takes all");
    let name = match family {
        Family::Locks => "locks_match",
        Family::Values => "values_match",
        Family::Subscriptions => "subscriptions_match",
        Family::Everything => "everything_matches",
    };
    panic!("{report}\nagain: DFLOCKD_SEED={seed} cargo test -p dflockd-core {name}");
}

/// Runs `work` without a message for each panic in it; other threads go on as usual.
fn quietly<T>(work: impl FnOnce() -> T) -> T {
    std::thread_local! {
        static QUIET: Cell<bool> = const { Cell::new(false) };
    }
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let usual = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !QUIET.get() {
                usual(info);
            }
        }));
    });
    QUIET.set(true);
    let result = work();
    QUIET.set(false);
    result
}

/// Leaves out whatever can be left out so that the rest still fails.
fn shrink(case: &Case, ops: &[Op]) -> Vec<Op> {
    let mut ops = ops.to_vec();
    let mut size = ops.len() / 2;
    while size > 0 {
        let before = ops.len();
        let mut start = 0;
        while start < ops.len() {
            let end = (start + size).min(ops.len());
            let fewer: Vec<Op> = [&ops[..start], &ops[end..]].concat();
            match run(case, &fewer, None) {
                Err((_, done)) => ops = fewer[..done].to_vec(),
                Ok(()) => start = end,
            }
        }
        // At the end, as long as single steps can go.
        if size > 1 || ops.len() == before {
            size /= 2;
        }
    }
    ops
}

/// A case that never gets anywhere proves nothing: together they see every kind of answer and push.
#[test]
fn cases_reach_every_kind_of_effect() {
    let mut reached = BTreeSet::new();
    for family in [Family::Locks, Family::Values, Family::Subscriptions, Family::Everything] {
        for seed in 0..300 {
            let case = Case::generate(family, seed);
            let mut run = Run::new(&case);
            run.seen = Some(BTreeSet::new());
            for op in &case.ops {
                // A difference is the business of the tests above.
                if run.step(op).is_err() {
                    break;
                }
            }
            reached.extend(run.seen.into_iter().flatten());
        }
    }
    let expected = "
        Done Granted Acquired Queued Renewed Timeout Empty Conflict Number Written Popped Compacted
        MaxLocks MaxWaiters MaxKeys ListFull ValueTooLarge MaxSubscriptions LimitMismatch
        MaxHolds MaxWaits TypeMismatch CountMismatch AlreadyEnqueued NotEnqueued AlreadyWaiting LeaseExpired NotHeld
        Overflow BadPattern NoFence Forgotten
        Signal Elected Resigned Failover Expired Forced Session SessionEnded grouped
        Acquire Release Elect Resign Incr Decr Cset Kset Kdel Kcas Lpush Rpush Lpop Rpop Blpop Brpop";
    let missing: Vec<&str> =
        expected.split_whitespace().filter(|kind| !reached.contains(*kind)).collect();
    assert!(missing.is_empty(), "never seen: {missing:?}");
}

/// The name of what happened, without the details.
fn kind_of(effect: &Effect) -> String {
    let text = match effect {
        Effect::Reply { outcome: Outcome::Refused(refusal), .. } => format!("{refusal:?}"),
        Effect::Reply { outcome, .. } => format!("{outcome:?}"),
        Effect::Push { group: Some(_), .. } => "grouped".to_owned(),
        Effect::Push { push: Push::Change(change), .. } => format!("{:?}", change.event),
        Effect::Push { push: Push::Leader { event, .. }, .. } => format!("{event:?}"),
        Effect::Push { push: Push::Lost { reason, .. }, .. } => format!("{reason:?}"),
        Effect::Push { push, .. } => format!("{push:?}"),
        Effect::SessionEnded { .. } => "SessionEnded".to_owned(),
    };
    text.chars().take_while(|letter| letter.is_alphabetic()).collect()
}

// Rules worth a page of their own. Each test names the promise of docs/guarantees.md that it checks.

/// Store and model side by side, one command at a time; any difference is a panic.
struct Pair {
    run: Run,
    requests: u64,
}

impl Pair {
    fn new(limits: Limits) -> Self {
        Self::opening_at(limits, 0)
    }

    fn opening_at(limits: Limits, grants_from: u64) -> Self {
        let case = Case {
            limits,
            grants_from: Timestamp(grants_from),
            fences: 1 << 20,
            keeps: Vec::new(),
            references: Vec::new(),
            ops: Vec::new(),
        };
        Self { run: Run::new(&case), requests: 0 }
    }

    fn at(&mut self, now: u64) -> &mut Self {
        self.run.now = Timestamp(now);
        self
    }

    fn fences(&mut self, available: u64) {
        self.run.step(&Op::Fences(available)).unwrap();
    }

    fn restore(&mut self) {
        self.run.restore().unwrap();
    }

    fn send_as(&mut self, caller: Caller, command: Command<'_>) -> Vec<Effect> {
        self.run.trace.get_or_insert_default();
        let result = self.run.apply(caller, command);
        result.unwrap_or_else(|why| panic!("{why}\n{}", self.run.trace.take().unwrap_or_default()))
    }

    /// All that comes of a command.
    fn send(&mut self, session: u64, command: Command<'_>) -> Vec<Effect> {
        self.requests += 1;
        let request = RequestId(self.requests);
        self.send_as(Caller { session: SessionId(session), request, keep: false }, command)
    }

    /// The answer to a command that is answered at once.
    fn ask(&mut self, session: u64, command: Command<'_>) -> Outcome {
        let effects = self.send(session, command);
        answer(effects, RequestId(self.requests)).expect("it is answered at once")
    }

    fn lock(&mut self, session: u64, key: &[u8], mode: Mode, lease: u64) -> Token {
        token(&self.ask(session, acquire(key, mode, 0, lease)))
    }

    /// A command that has to wait; its request id.
    fn block(&mut self, session: u64, command: Command<'_>) -> RequestId {
        let effects = self.send(session, command);
        assert_eq!(answers(&effects), [], "it should wait");
        RequestId(self.requests)
    }
}

fn acquire(key: &[u8], mode: Mode, wait: u64, lease: u64) -> Command<'_> {
    let (wait, lease) = (Span(wait), Some(Span(lease)));
    Command::Acquire(command::Acquire { key, mode, wait, lease, salt: 7 })
}

fn enqueue(key: &[u8], mode: Mode, lease: u64) -> Command<'_> {
    Command::Enqueue(command::Enqueue { key, mode, lease: Some(Span(lease)), salt: 7 })
}

fn wait(key: &[u8], wait: u64) -> Command<'_> {
    Command::Wait(command::Wait { key, space: Space::Locks, wait: Span(wait) })
}

fn release(key: &[u8], token: Token) -> Command<'_> {
    Command::Release(command::Release { key, space: Space::Locks, token, resign: false })
}

fn resign(key: &[u8], space: Space, token: Token) -> Command<'_> {
    Command::Release(command::Release { key, space, token, resign: true })
}

fn renew(key: &[u8], token: Token, lease: u64) -> Command<'_> {
    Command::Renew(command::Renew { key, space: Space::Locks, token, lease: Some(Span(lease)) })
}

fn pop(key: &[u8], end: End, wait: u64) -> Command<'_> {
    Command::Pop(command::Pop { key, end, wait: Some(Span(wait)) })
}

fn push<'a>(key: &'a [u8], end: End, value: &'a [u8]) -> Command<'a> {
    Command::Push(command::Push { key, end, value })
}

fn arrive(key: &[u8], count: u32, wait: u64) -> Command<'_> {
    Command::BarrierWait(command::BarrierWait { key, count, wait: Span(wait) })
}

fn granted(fence: u64, lease: u64) -> Outcome {
    let token = Token { fence: Fence(fence), salt: 7 };
    Outcome::Granted(Grant { token, lease: Span(lease) })
}

fn popped(key: &[u8], end: End, value: &[u8]) -> Outcome {
    Outcome::Popped { key: key.into(), end, value: value.into() }
}

/// Who was answered what, in order of session.
fn answers(effects: &[Effect]) -> Vec<(u64, Outcome)> {
    let mut answers: Vec<(u64, Outcome)> = effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Reply { session, outcome, .. } => Some((session.0, outcome.clone())),
            Effect::Push { .. } | Effect::SessionEnded { .. } => None,
        })
        .collect();
    answers.sort_by_key(|(session, _)| *session);
    answers
}

/// What one session was told.
fn pushes(effects: &[Effect], to: u64) -> Vec<Push> {
    effects
        .iter()
        .filter_map(|effect| match effect {
            Effect::Push { session, push, .. } if session.0 == to => Some(push.clone()),
            Effect::Push { .. } | Effect::Reply { .. } | Effect::SessionEnded { .. } => None,
        })
        .collect()
}

/// Promise 1: never more holders than the lock allows.
#[test]
fn promise_1_exclusion() {
    let mut pair = Pair::new(Limits::default());
    let two = Mode::Semaphore { limit: 2 };
    pair.lock(1, b"s", two, 10);
    pair.lock(1, b"s", two, 10);
    assert_eq!(pair.ask(2, acquire(b"s", two, 0, 10)), Outcome::Timeout);
    assert_eq!(
        pair.ask(2, acquire(b"s", Mode::Semaphore { limit: 3 }, 0, 10)),
        refused(Refusal::LimitMismatch)
    );

    pair.lock(1, b"rw", Mode::Read, 10);
    pair.lock(2, b"rw", Mode::Read, 10);
    assert_eq!(pair.ask(3, acquire(b"rw", Mode::Write, 0, 10)), Outcome::Timeout);
    assert_eq!(pair.ask(3, acquire(b"rw", Mode::Mutex, 0, 10)), refused(Refusal::TypeMismatch));

    // An election is a mutex, and nobody is let in twice.
    pair.lock(1, b"e", Mode::Election, 10);
    assert_eq!(pair.ask(1, acquire(b"e", Mode::Mutex, 0, 10)), Outcome::Timeout);
}

fn identify(reference: &[u8]) -> Command<'_> {
    Command::Identify { name: b"client", reference }
}

fn orphan(ttl: u64) -> Command<'static> {
    Command::Orphan { ttl: Span(ttl), cut: true }
}

/// Promises 4 and 11: a client that comes back has its token again, once, with a lease that counts from then.
#[test]
fn promise_4_a_client_that_comes_back_has_its_token() {
    let mut pair = Pair::new(Limits::default());
    for session in 1..=4 {
        pair.send(session, identify(b"me"));
    }
    let token = pair.lock(1, b"k", Mode::Mutex, 100);
    assert_eq!(pair.ask(2, acquire(b"k", Mode::Mutex, 0, 9)), Outcome::Timeout, "1 lives");
    pair.send(1, orphan(20));
    pair.restore();
    assert_eq!(pair.ask(5, acquire(b"k", Mode::Mutex, 0, 9)), Outcome::Timeout, "a stranger");
    assert_eq!(pair.ask(2, acquire(b"k", Mode::Election, 0, 9)), Outcome::Timeout, "another mode");
    // An answer that nobody got is no reason to give it away.
    let untold = Outcome::Granted(Grant { token, lease: Span(100) });
    pair.send(5, Command::Undo(&untold));
    assert_eq!(pair.at(5).ask(2, acquire(b"k", Mode::Mutex, 0, 60)), granted(token.fence.0, 60));
    assert_eq!(pair.ask(3, acquire(b"k", Mode::Mutex, 0, 9)), Outcome::Timeout, "2 lives");
    let waiting = pair.block(5, acquire(b"k", Mode::Mutex, 100, 9));
    let effects = pair.at(65).send(9, Command::Tick);
    assert_eq!(answer(effects, waiting), Some(granted(101, 9)), "not before, and not later");
}

/// Promises 5, 6 and 44: a place is kept in its order; at the head it is held for its client, no longer than it would
/// have stayed; and those behind it move up then.
#[test]
fn promise_5_a_place_is_kept_for_its_client() {
    let mut pair = Pair::new(Limits::default());
    let held = pair.lock(1, b"k", Mode::Mutex, 100);
    for session in [2, 3, 12, 13] {
        pair.send(session, identify(if session % 10 == 2 { b"two" } else { b"three" }));
    }
    pair.block(2, acquire(b"k", Mode::Mutex, 100, 100));
    assert_eq!(pair.ask(3, enqueue(b"k", Mode::Mutex, 100)), Outcome::Queued);
    let last = pair.block(4, acquire(b"k", Mode::Mutex, 100, 100));
    pair.send(2, orphan(20));
    pair.send(3, orphan(30));
    pair.restore();
    assert_eq!(pair.ask(13, enqueue(b"k", Mode::Mutex, 100)), Outcome::Queued);
    assert_eq!(pair.ask(13, enqueue(b"k", Mode::Mutex, 100)), refused(Refusal::AlreadyEnqueued));
    let effects = pair.at(10).send(1, release(b"k", held));
    assert_eq!(answers(&effects), [(1, Outcome::Done)], "two is the next, and is not there");
    let held = pair.at(19).lock(12, b"k", Mode::Mutex, 50);
    assert_eq!(held.fence, Fence(101), "it was granted when its turn came");
    pair.send(12, orphan(5));
    pair.at(24).send(9, Command::Tick);
    assert_eq!(pair.ask(13, wait(b"k", 0)), granted(102, 100), "the place of three");
    pair.send(13, orphan(1000));
    let effects = pair.at(123).send(9, Command::Tick);
    assert_eq!(answer(effects, last), Some(Outcome::Timeout), "a lease is not made longer");
}

/// Promise 44: whoever comes back before it is known that the other connection is gone gets what that one leaves behind
/// at that moment, hold or place.
#[test]
fn promise_44_who_waits_already_gets_what_the_other_leaves() {
    let mut pair = Pair::new(Limits::default());
    for session in [1, 2] {
        pair.send(session, identify(b"me"));
    }
    let token = pair.lock(1, b"k", Mode::Mutex, 100);
    let other = pair.lock(3, b"q", Mode::Mutex, 100);
    pair.block(1, acquire(b"q", Mode::Mutex, 100, 100));
    pair.block(4, acquire(b"k", Mode::Mutex, 100, 100));
    pair.block(4, acquire(b"q", Mode::Mutex, 100, 100));
    let hold = pair.at(1).block(2, acquire(b"k", Mode::Mutex, 100, 50));
    let place = pair.block(2, acquire(b"q", Mode::Mutex, 100, 50));
    let effects = pair.at(2).send(1, orphan(20));
    assert_eq!(answer(effects.clone(), hold), Some(granted(token.fence.0, 50)));
    assert_eq!(answers(&effects).len(), 1);
    let effects = pair.send(3, release(b"q", other));
    assert_eq!(answer(effects, place), Some(granted(102, 50)), "ahead of 4");
}

/// Promise 48: the places of clients that are gone are no more than those of one session may be.
#[test]
fn promise_48_few_places_are_kept() {
    let mut pair = Pair::new(Limits { waits_per_session_max: 2, ..Limits::default() });
    let held = pair.lock(1, b"k", Mode::Mutex, 100);
    for session in 2..=4 {
        pair.send(session, identify(b"me"));
        pair.block(session, acquire(b"k", Mode::Mutex, 100, 100));
    }
    for session in 2..=4 {
        pair.send(session, orphan(50));
    }
    let waiters =
        |pair: &Pair| pair.run.store.view_locks(b"k", Only::All, pair.run.now, 9)[0].waiters_total;
    assert_eq!(waiters(&pair), 2);
    pair.send(1, release(b"k", held));
    assert_eq!(waiters(&pair), 1, "one is held for its client");
    pair.at(50).send(1, Command::Tick);
    assert_eq!(waiters(&pair), 0);
    pair.lock(1, b"k", Mode::Mutex, 100);
}

/// Promise 3: fences grow, whatever becomes of the key in between.
#[test]
fn promise_3_fences_grow() {
    let mut pair =
        Pair::new(Limits { idle_max: Span(10), gc_interval: Span(5), ..Limits::default() });
    let first = pair.lock(1, b"k", Mode::Mutex, 10);
    pair.send(1, release(b"k", first));
    // Idle since 0, forgotten at 10: only then can the key become something else.
    assert_eq!(pair.at(9).ask(1, acquire(b"k", Mode::Read, 0, 10)), refused(Refusal::TypeMismatch));
    let second = pair.at(10).lock(1, b"k", Mode::Read, 10);
    pair.restore();
    pair.send(1, release(b"k", second));
    let third = pair.lock(1, b"k", Mode::Write, 10);
    assert!(first.fence < second.fence && second.fence < third.fence);
    // An old token does nothing.
    assert_eq!(pair.ask(1, release(b"k", first)), refused(Refusal::NotHeld));
}

/// Promise 5: no overtaking, neither by readers nor by those who take two steps.
#[test]
fn promise_5_first_in_first_out() {
    let mut pair = Pair::new(Limits::default());
    let reader = pair.lock(1, b"k", Mode::Read, 100);
    pair.block(2, acquire(b"k", Mode::Write, 100, 100));
    pair.block(3, acquire(b"k", Mode::Read, 100, 100));
    assert_eq!(pair.ask(4, enqueue(b"k", Mode::Read, 100)), Outcome::Queued);
    assert_eq!(pair.ask(5, acquire(b"k", Mode::Read, 0, 100)), Outcome::Timeout);

    let effects = pair.send(1, release(b"k", reader));
    assert_eq!(answers(&effects), [(1, Outcome::Done), (2, granted(101, 100))]);
    let writer = Token { fence: Fence(101), salt: 7 };
    let effects = pair.send(2, release(b"k", writer));
    assert_eq!(answers(&effects), [(2, Outcome::Done), (3, granted(102, 100))]);
    assert_eq!(pair.ask(4, wait(b"k", 0)), granted(103, 100));
}

/// Promises 5 and 12: leases that end together end in the order of their fences, also if it is the
/// grace after a change of leader that makes them end together.
#[test]
fn promise_5_leases_end_in_order() {
    let mut pair = Pair::new(Limits { failover_grace: Span(10), ..Limits::default() });
    let second = pair.lock(1, b"b", Mode::Mutex, 7);
    pair.lock(2, b"a", Mode::Mutex, 5);
    pair.block(3, acquire(b"a", Mode::Mutex, 100, 100));
    pair.block(4, acquire(b"b", Mode::Mutex, 100, 100));
    // Both bases are before 12 and at most 10 later than that: both end at 12, "b" first.
    pair.at(2).send(9, Command::NewTerm);
    assert_eq!(answers(&pair.at(11).send(9, Command::Tick)), []);
    let effects = pair.at(12).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(3, granted(103, 100)), (4, granted(102, 100))]);
    let lost =
        Push::Lost { key: b"b"[..].into(), fence: second.fence, reason: LostReason::Expired };
    assert_eq!(pushes(&effects, 1), [lost]);
}

/// Promise 6: whoever leaves the queue, those behind go on at once.
#[test]
fn promise_6_no_lost_wakeup() {
    let mut pair = Pair::new(Limits::default());
    pair.lock(1, b"k", Mode::Read, 1000);
    // Time limit, cancel, session end and an impatient wait, each with a reader behind.
    pair.block(2, acquire(b"k", Mode::Write, 5, 100));
    pair.block(3, acquire(b"k", Mode::Read, 500, 100));
    let effects = pair.at(5).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(2, Outcome::Timeout), (3, granted(101, 100))]);

    let request = pair.block(2, acquire(b"k", Mode::Write, 500, 100));
    pair.block(3, acquire(b"k", Mode::Read, 500, 100));
    let effects = pair.send(2, cancel(request));
    assert_eq!(
        answers(&effects),
        [(2, Outcome::Timeout), (2, Outcome::Done), (3, granted(102, 100))]
    );

    pair.block(2, acquire(b"k", Mode::Write, 500, 100));
    pair.block(3, acquire(b"k", Mode::Read, 500, 100));
    let effects = pair.send(2, Command::EndSession { release: false, forced: false });
    assert_eq!(answers(&effects), [(3, granted(103, 100))]);

    assert_eq!(pair.ask(4, enqueue(b"k", Mode::Write, 100)), Outcome::Queued);
    pair.block(3, acquire(b"k", Mode::Read, 500, 100));
    let effects = pair.send(4, wait(b"k", 0));
    assert_eq!(answers(&effects), [(3, granted(104, 100)), (4, Outcome::Timeout)]);
}

/// Promise 6: a promotion that found no fence is made up for, in order of key.
#[test]
fn promise_6_fences_run_out_and_come_back() {
    let mut pair = Pair::new(Limits::default());
    let b = pair.lock(1, b"b", Mode::Mutex, 100);
    let a = pair.lock(1, b"a", Mode::Mutex, 100);
    pair.block(2, acquire(b"b", Mode::Mutex, 100, 100));
    pair.block(3, acquire(b"a", Mode::Mutex, 100, 100));
    pair.fences(0);
    assert_eq!(answers(&pair.send(1, release(b"b", b))), [(1, Outcome::Done)]);
    assert_eq!(answers(&pair.send(1, release(b"a", a))), [(1, Outcome::Done)]);
    assert_eq!(pair.ask(1, acquire(b"c", Mode::Mutex, 50, 100)), refused(Refusal::NoFence));
    // The key is free, but not for somebody who comes later.
    assert_eq!(pair.ask(1, acquire(b"a", Mode::Mutex, 0, 100)), Outcome::Timeout);
    pair.restore();
    pair.fences(10);
    let effects = pair.send(9, Command::Tick);
    assert_eq!(answers(&effects), [(2, granted(103, 100)), (3, granted(102, 100))]);
}

/// Promises 2 and 6: before grants begin everybody queues, then the queues move without a command.
#[test]
fn promise_6_grants_begin_late() {
    let mut pair = Pair::opening_at(Limits::default(), 50);
    assert_eq!(pair.ask(1, acquire(b"k", Mode::Mutex, 0, 100)), Outcome::Timeout);
    assert_eq!(pair.ask(2, enqueue(b"k", Mode::Mutex, 100)), Outcome::Queued);
    pair.block(3, acquire(b"r", Mode::Read, 49, 100));
    pair.block(4, acquire(b"r", Mode::Read, 50, 100));
    // One waited too long, the other just long enough.
    let effects = pair.at(60).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(3, Outcome::Timeout), (4, granted(101, 100))]);
    assert_eq!(pair.ask(2, wait(b"k", 0)), granted(100, 100));
}

/// Promise 7: a wait that ended before the lock was free gets nothing; one that ends with it does.
#[test]
fn promise_7_no_grant_after_the_wait() {
    let mut pair = Pair::new(Limits::default());
    pair.lock(1, b"k", Mode::Mutex, 10);
    pair.block(2, acquire(b"k", Mode::Mutex, 9, 100));
    pair.block(3, acquire(b"k", Mode::Mutex, 10, 100));
    let effects = pair.at(200).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(2, Outcome::Timeout), (3, granted(101, 100))]);
    // The lease began when it was granted, not when the lock came free.
    let token = Token { fence: Fence(101), salt: 7 };
    let renewed = Outcome::Renewed { fence: token.fence, lease: Span(5) };
    assert_eq!(pair.at(299).ask(3, renew(b"k", token, 5)), renewed);
    assert_eq!(pair.at(304).ask(3, renew(b"k", token, 5)), refused(Refusal::LeaseExpired));
}

/// Promise 7: a wait that ended before grants began stays without one, whoever left the queue
/// before it and however late the store hears of it.
#[test]
fn promise_7_no_grant_before_grants_begin() {
    let mut pair = Pair::opening_at(Limits::default(), 50);
    pair.block(1, acquire(b"k", Mode::Write, 40, 100));
    pair.block(2, acquire(b"k", Mode::Read, 45, 100));
    let effects = pair.at(60).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(1, Outcome::Timeout), (2, Outcome::Timeout)]);
}

/// Promise 7: a session that ends is granted nothing while its places are cleared away.
#[test]
fn promise_7_no_grant_to_an_ending_session() {
    let mut pair = Pair::new(Limits::default());
    pair.lock(1, b"k", Mode::Read, 1000);
    assert_eq!(pair.ask(2, enqueue(b"k", Mode::Write, 100)), Outcome::Queued);
    pair.block(2, acquire(b"k", Mode::Read, 500, 100));
    pair.block(3, acquire(b"k", Mode::Read, 500, 100));
    let effects = pair.send(2, Command::EndSession { release: false, forced: false });
    assert_eq!(answers(&effects), [(3, granted(101, 100))]);
}

/// Promise 8: enqueue and wait make one acquire.
#[test]
fn promise_8_two_phases() {
    let mut pair = Pair::new(Limits::default());
    let first = pair.lock(1, b"k", Mode::Mutex, 10);
    assert_eq!(pair.ask(2, wait(b"k", 5)), refused(Refusal::NotEnqueued));
    assert_eq!(pair.ask(2, enqueue(b"k", Mode::Mutex, 20)), Outcome::Queued);
    assert_eq!(pair.ask(2, enqueue(b"k", Mode::Mutex, 20)), refused(Refusal::AlreadyEnqueued));
    let request = pair.block(2, wait(b"k", 5));
    assert_eq!(pair.ask(2, wait(b"k", 5)), refused(Refusal::AlreadyWaiting));
    // The time limit takes the place in the queue with it.
    assert_eq!(answers(&pair.at(5).send(9, Command::Tick)), [(2, Outcome::Timeout)]);
    assert_eq!(pair.ask(2, cancel(request)), Outcome::Done);
    assert_eq!(pair.ask(2, wait(b"k", 5)), refused(Refusal::NotEnqueued));

    // Promoted before it waits: the lease runs, and waiting starts it anew.
    assert_eq!(pair.ask(2, enqueue(b"k", Mode::Mutex, 20)), Outcome::Queued);
    pair.send(1, release(b"k", first));
    assert_eq!(pair.at(24).ask(2, wait(b"k", 0)), granted(101, 20));
    pair.block(1, acquire(b"k", Mode::Mutex, 100, 10));
    assert_eq!(answers(&pair.at(43).send(9, Command::Tick)), []);
    assert_eq!(answers(&pair.at(44).send(9, Command::Tick)), [(1, granted(102, 10))]);
}

/// Promises 7 and 8: a grant nobody claimed in time is not claimed later, and that is said once.
#[test]
fn promise_8_unclaimed_grant() {
    let mut pair = Pair::new(Limits::default());
    let claimed = pair.ask(1, enqueue(b"k", Mode::Mutex, 10));
    assert_eq!(claimed, Outcome::Acquired(Grant { token: token(&claimed), lease: Span(10) }));
    assert_eq!(pair.at(10).ask(1, wait(b"k", 5)), refused(Refusal::LeaseExpired));
    assert_eq!(pair.ask(1, wait(b"k", 5)), refused(Refusal::NotEnqueued));

    // Enqueued again, the note is gone; so is the record with the release of its token.
    let again = token(&pair.ask(1, enqueue(b"k", Mode::Mutex, 10)));
    pair.at(20).send(9, Command::Tick);
    let third = token(&pair.ask(1, enqueue(b"k", Mode::Mutex, 10)));
    assert!(again.fence < third.fence);
    assert_eq!(pair.ask(2, release(b"k", third)), Outcome::Done);
    assert_eq!(pair.ask(1, wait(b"k", 5)), refused(Refusal::NotEnqueued));
}

/// Promise 11: one command restarts the leases of all holds that follow their session, and of no others; it cuts none
/// short.
#[test]
fn promise_11_a_session_renews_what_follows_it() {
    let mut pair = Pair::new(Limits::default());
    let follows = pair.lock(1, b"follows", Mode::Mutex, 10);
    pair.lock(1, b"own", Mode::Mutex, 12);
    let longer = pair.lock(1, b"longer", Mode::Mutex, 10);
    pair.lock(2, b"others", Mode::Mutex, 10);
    pair.block(1, acquire(b"others", Mode::Mutex, 100, 10));
    pair.ask(1, renew(b"longer", longer, 50));
    assert_eq!(pair.at(9).ask(1, renew_session(Span(10))), Outcome::Number(2));
    assert_eq!(pair.ask(3, renew_session(Span(10))), Outcome::Number(0));
    // What was only waited for follows once it is granted.
    assert_eq!(pair.at(10).send(9, Command::Tick).len(), 2);
    assert_eq!(pair.at(18).ask(1, renew_session(Span(10))), Outcome::Number(3));
    let renewed = Outcome::Renewed { fence: follows.fence, lease: Span(1) };
    assert_eq!(pair.at(27).ask(1, renew(b"follows", follows, 1)), renewed);
    assert_eq!(pair.at(28).ask(1, renew(b"follows", follows, 1)), refused(Refusal::LeaseExpired));
    assert_eq!(pair.at(49).ask(2, acquire(b"longer", Mode::Mutex, 0, 1)), Outcome::Timeout);
    pair.at(50).lock(2, b"longer", Mode::Mutex, 1);
}

/// Promises 11 and 12: a lease ends at its end, not before, and a renewal counts from itself.
#[test]
fn promise_11_not_early_12_not_late() {
    let mut pair = Pair::new(Limits { default_lease: Span(30), ..Limits::default() });
    let token = pair.lock(1, b"k", Mode::Mutex, 10);
    let renewed = Outcome::Renewed { fence: token.fence, lease: Span(30) };
    let command =
        Command::Renew(command::Renew { key: b"k", space: Space::Locks, token, lease: None });
    assert_eq!(pair.at(9).ask(2, command), renewed);
    assert_eq!(pair.at(38).ask(2, acquire(b"k", Mode::Mutex, 0, 1)), Outcome::Timeout);
    assert_eq!(pair.run.store.next_deadline(), Some(Timestamp(39)));
    assert_eq!(pair.at(39).ask(2, acquire(b"k", Mode::Mutex, 0, 1)), granted(101, 1));
    assert_eq!(pair.ask(1, renew(b"k", token, 10)), refused(Refusal::LeaseExpired));
    assert_eq!(pair.ask(1, release(b"k", token)), refused(Refusal::NotHeld));
}

/// Promise 13: a change of leader lengthens a running lease, by the grace at most, however often.
#[test]
fn promise_13_failover_grace() {
    let mut pair = Pair::new(Limits { failover_grace: Span(10), ..Limits::default() });
    pair.lock(1, b"long", Mode::Mutex, 100);
    pair.lock(1, b"k", Mode::Mutex, 20);
    for now in [5, 12, 19, 26] {
        pair.at(now).send(9, Command::NewTerm);
        assert_eq!(pair.ask(2, acquire(b"k", Mode::Mutex, 0, 1)), Outcome::Timeout);
    }
    assert_eq!(pair.at(29).ask(2, acquire(b"k", Mode::Mutex, 0, 1)), Outcome::Timeout);
    pair.restore();
    assert_eq!(pair.at(30).ask(2, acquire(b"k", Mode::Mutex, 0, 1)), granted(102, 1));
    // The long one was in no danger and gets nothing.
    assert_eq!(pair.at(99).ask(2, acquire(b"long", Mode::Mutex, 0, 1)), Outcome::Timeout);
    assert_eq!(pair.at(100).ask(2, acquire(b"long", Mode::Mutex, 0, 1)), granted(103, 1));
}

/// Promise 19: a request takes effect once, however often it is sent.
#[test]
fn promise_19_exactly_once() {
    let mut pair = Pair::new(Limits { results_max: 2, ..Limits::default() });
    let caller =
        |request| Caller { session: SessionId(1), request: RequestId(request), keep: true };
    let add = || add(b"c", 1, false);
    let one = [(1, Outcome::Number(1))];
    assert_eq!(answers(&pair.send_as(caller(1), add())), one);
    pair.restore();
    assert_eq!(answers(&pair.send_as(caller(1), add())), one);

    // While it waits there is nothing to repeat, and what it gets is kept like the rest.
    let hold = pair.lock(2, b"k", Mode::Mutex, 100);
    let command = || acquire(b"k", Mode::Mutex, 100, 100);
    assert_eq!(answers(&pair.send_as(caller(2), command())), []);
    assert_eq!(answers(&pair.send_as(caller(2), command())), []);
    assert_eq!(pair.send(2, release(b"k", hold)).len(), 2);
    assert_eq!(answers(&pair.send_as(caller(2), command())), [(1, granted(101, 100))]);

    // The third result drives out the first: never again, not even as a new request.
    assert_eq!(answers(&pair.send_as(caller(3), add())), [(1, Outcome::Number(2))]);
    let forgotten = [(1, refused(Refusal::Forgotten))];
    assert_eq!(answers(&pair.send_as(caller(1), add())), forgotten);
    let command = Command::Acknowledge(command::Acknowledge { up_to: RequestId(3) });
    assert_eq!(answers(&pair.send_as(caller(4), command)), [(1, Outcome::Done)]);
    assert_eq!(answers(&pair.send_as(caller(5), add())), [(1, Outcome::Number(3))]);
    assert_eq!(answers(&pair.send_as(caller(5), add())), [(1, Outcome::Number(3))]);
}

/// Promise 23: a counter that would overflow stays what it is.
#[test]
fn promise_23_counters() {
    let mut pair = Pair::new(Limits { keys_max: 1, ..Limits::default() });
    let add = |delta, decrement| add(b"c", delta, decrement);
    assert_eq!(pair.ask(1, add(i64::MIN, true)), refused(Refusal::Overflow));
    assert_eq!(pair.ask(1, add(i64::MAX, false)), Outcome::Number(i64::MAX));
    assert_eq!(pair.ask(1, add(1, false)), refused(Refusal::Overflow));
    assert_eq!(pair.ask(1, add(-1, true)), refused(Refusal::Overflow));
    let other = || Command::CounterSet(command::CounterSet { key: b"d", value: 1 });
    assert_eq!(pair.ask(1, other()), refused(Refusal::MaxKeys));
    assert_eq!(pair.ask(1, add(i64::MAX, true)), Outcome::Number(0));
    assert_eq!(pair.ask(1, other()), Outcome::Done, "a counter at zero makes room");
}

/// Promise 24: compare-and-set sees value, revision and time to live as they are at its stamp.
#[test]
fn promise_24_compare_and_set() {
    let mut pair = Pair::new(Limits::default());
    let cas = |expect, value, ttl: Option<u64>| {
        let (key, ttl) = (b"k", ttl.map(Span));
        Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl })
    };
    let value = Expect::Value(b"x");
    assert_eq!(pair.ask(1, cas(value, b"y", None)), Outcome::Conflict);
    assert_eq!(pair.ask(1, cas(Expect::Absent, b"x", Some(10))), Outcome::Written(Revision(1)));
    assert_eq!(pair.ask(1, cas(Expect::Absent, b"x", None)), Outcome::Conflict);
    let revision = |revision| Expect::Revision(Revision(revision));
    assert_eq!(pair.ask(1, cas(revision(1), b"x", Some(20))), Outcome::Written(Revision(2)));
    assert_eq!(pair.ask(1, cas(revision(1), b"z", None)), Outcome::Conflict);
    assert_eq!(pair.at(19).ask(1, cas(value, b"x", Some(5))), Outcome::Written(Revision(3)));
    let query = Query::Kv { key: b"k" };
    assert_eq!(pair.run.store.read(query, Timestamp(23)), Outcome::Value(b"x"[..].into()));
    assert_eq!(pair.run.store.read(query, Timestamp(24)), Outcome::Empty);
    assert_eq!(pair.at(24).ask(1, cas(value, b"x", None)), Outcome::Conflict);
    assert_eq!(pair.ask(1, delete(b"k")), Outcome::Done);
    assert_eq!(pair.run.store.revision(), Revision(4));
}

/// Promises 25 and 26: what was pushed is popped once, in order, and an undone pop puts it back.
#[test]
fn promise_25_lists_26_nothing_is_lost() {
    let mut pair = Pair::new(Limits { list_length_max: 2, keys_max: 1, ..Limits::default() });
    for (value, length) in [(b"b", 1), (b"c", 2)] {
        assert_eq!(pair.ask(1, push(b"q", End::Right, value)), Outcome::Number(length));
    }
    assert_eq!(pair.ask(1, push(b"q", End::Left, b"a")), refused(Refusal::ListFull));
    assert_eq!(pair.ask(1, push(b"r", End::Left, b"a")), refused(Refusal::MaxKeys));
    let first = pair.ask(1, pop(b"q", End::Left, 0));
    assert_eq!(first, popped(b"q", End::Left, b"b"));
    assert_eq!(pair.ask(1, push(b"q", End::Right, b"d")), Outcome::Number(2));
    // Back where it was, although the list is full.
    assert_eq!(answers(&pair.send(1, Command::Undo(&first))), []);
    let query = Query::Range { key: b"q", start: 0, stop: -1 };
    let items = [b"b", b"c", b"d"].map(|item| Bytes::from(&item[..])).to_vec();
    assert_eq!(pair.run.store.read(query, Timestamp(0)), Outcome::Items(items));
    for value in [b"d", b"c", b"b"] {
        let command = Command::Pop(command::Pop { key: b"q", end: End::Right, wait: None });
        assert_eq!(pair.ask(2, command), popped(b"q", End::Right, value));
    }
    // An empty list counts no more.
    assert_eq!(pair.ask(1, push(b"r", End::Left, b"a")), Outcome::Number(1));
}

/// Promises 26 and 27: whoever has waited longest is served first, also with what comes back.
#[test]
fn promise_27_poppers_in_order() {
    let mut pair = Pair::new(Limits::default());
    pair.send(9, subscribe(Subscription::Changes { pattern: b"q", from: None }));
    let cancelled = pair.block(1, pop(b"q", End::Left, 100));
    pair.block(2, pop(b"q", End::Right, 5));
    pair.block(3, pop(b"q", End::Right, 100));
    pair.block(4, pop(b"q", End::Left, 100));
    let effects = pair.send(1, cancel(cancelled));
    assert_eq!(answers(&effects), [(1, Outcome::Empty), (1, Outcome::Done)]);
    assert_eq!(answers(&pair.at(5).send(9, Command::Tick)), [(2, Outcome::Empty)]);

    let effects = pair.send(8, push(b"q", End::Left, b"x"));
    let taken = popped(b"q", End::Right, b"x");
    assert_eq!(answers(&effects), [(3, taken.clone()), (8, Outcome::Number(0))]);
    let events = pushes(&effects, 9).into_iter().map(|push| match push {
        Push::Change(change) => change.event,
        Push::Signal { .. } | Push::Leader { .. } | Push::Lost { .. } => panic!("{push:?}"),
    });
    assert!(events.eq([Event::Lpush, Event::Brpop]));

    // Nobody could be told, so the next one gets it.
    let effects = pair.send(3, Command::Undo(&taken));
    assert_eq!(answers(&effects), [(4, popped(b"q", End::Left, b"x"))]);
    assert_eq!(pair.ask(8, push(b"q", End::Left, b"y")), Outcome::Number(1));
}

/// Promise 28: all pass the barrier or none does.
#[test]
fn promise_28_barrier() {
    let mut pair = Pair::new(Limits::default());
    assert_eq!(pair.ask(1, arrive(b"b", 1, 0)), Outcome::Done);
    assert_eq!(pair.ask(1, arrive(b"b", 3, 0)), Outcome::Timeout);
    pair.block(1, arrive(b"b", 3, 10));
    pair.block(2, arrive(b"b", 3, 20));
    assert_eq!(pair.ask(2, arrive(b"b", 3, 20)), refused(Refusal::AlreadyWaiting));
    assert_eq!(pair.ask(3, arrive(b"b", 2, 20)), refused(Refusal::CountMismatch));
    // Looking in does no harm; leaving breaks it for everybody.
    let mut look = arrive(b"b", 3, 0);
    assert_eq!(pair.ask(3, look), Outcome::Done);

    for leave in ["limit", "cancel", "end"] {
        let now = pair.run.now.0;
        let request = pair.block(1, arrive(b"b", 3, 10));
        pair.block(2, arrive(b"b", 3, 20));
        look = match leave {
            "limit" => {
                pair.at(now + 10);
                Command::Tick
            }
            "cancel" => cancel(request),
            _ => Command::EndSession { release: true, forced: true },
        };
        let broken = answers(&pair.send(1, look));
        assert_eq!(broken.iter().filter(|(session, _)| *session == 2).count(), 1, "{leave}");
        assert!(broken.iter().all(|(session, o)| *session == 1 || *o == Outcome::Timeout));
        // The next to come begins a new one.
        assert_eq!(pair.ask(3, arrive(b"b", 2, 0)), Outcome::Timeout);
    }
}

/// Promises 10 and 29: observers hear of every change of leader, in order.
#[test]
fn promise_29_observers() {
    let mut pair = Pair::new(Limits::default());
    let observe = || subscribe(Subscription::Leaders { key: b"e" });
    let leader = |event| Push::Leader { event, key: b"e"[..].into() };
    assert_eq!(pushes(&pair.send(9, observe()), 9), []);
    let effects = pair.send(1, acquire(b"e", Mode::Election, 0, 100));
    assert_eq!(pushes(&effects, 9), [leader(LeaderEvent::Elected)]);
    assert_eq!(pushes(&effects, 1), []);
    let first = token(&answers(&effects)[0].1);
    assert_eq!(pushes(&pair.send(9, observe()), 9), [leader(LeaderEvent::Elected)]);

    pair.block(2, acquire(b"e", Mode::Election, 100, 100));
    pair.block(3, acquire(b"e", Mode::Mutex, 100, 100));
    pair.send(2, observe());
    let effects = pair.send(1, resign(b"e", Space::Locks, first));
    let (resigned, failover) = (leader(LeaderEvent::Resigned), leader(LeaderEvent::Failover));
    let elected = leader(LeaderEvent::Elected);
    assert_eq!(pushes(&effects, 9), [resigned.clone(), failover.clone(), elected]);
    assert_eq!(pushes(&effects, 2), [resigned, failover.clone()]);
    assert_eq!(pushes(&effects, 1), []);

    // Taken away by an operator; the next one does not lead, but it has taken over.
    let fence = Fence(first.fence.0 + 1);
    let force =
        Command::ForceRelease(command::ForceRelease { key: b"e", space: Space::Locks, fence });
    let effects = pair.send(9, force);
    assert_eq!(pushes(&effects, 9), core::slice::from_ref(&failover));
    let lost = Push::Lost { key: b"e"[..].into(), fence, reason: LostReason::Forced };
    assert_eq!(pushes(&effects, 2), [lost, failover]);
}

/// Promise 29: a semaphore of the same name is another thing, and no leader gives up with it.
#[test]
fn promise_29_other_namespace() {
    let mut pair = Pair::new(Limits::default());
    pair.send(9, subscribe(Subscription::Leaders { key: b"e" }));
    pair.lock(1, b"e", Mode::Election, 100);
    let token = pair.lock(2, b"e", Mode::Semaphore { limit: 1 }, 100);
    let effects = pair.send(2, resign(b"e", Space::Semaphores, token));
    assert_eq!((pushes(&effects, 1), pushes(&effects, 9)), (Vec::new(), Vec::new()));
}

/// Promise 17: a session without a connection lasts until its time and its leases are over.
#[test]
fn promise_17_detached_session() {
    let mut pair = Pair::new(Limits::default());
    let ended = Effect::SessionEnded { session: SessionId(1) };
    pair.lock(1, b"k", Mode::Mutex, 20);
    pair.block(1, acquire(b"k", Mode::Mutex, 100, 20));
    pair.send(1, detach(10));
    // Its own waiter takes over from the lease that ends.
    let effects = pair.at(20).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(1, granted(101, 20))]);
    pair.block(2, acquire(b"k", Mode::Mutex, 100, 20));
    assert!(!pair.at(39).send(9, Command::Tick).contains(&ended));
    let effects = pair.at(40).send(9, Command::Tick);
    assert!(effects.contains(&ended));
    assert_eq!(answers(&effects), [(2, granted(102, 20))]);
}

/// Promise 17: the last lease may end sooner than it was to; the session ends with it.
#[test]
fn promise_17_detached_session_with_a_short_lease() {
    let mut pair = Pair::new(Limits::default());
    let ended = |session| Effect::SessionEnded { session: SessionId(session) };
    let first = pair.lock(1, b"k", Mode::Mutex, 100);
    let second = pair.lock(2, b"l", Mode::Mutex, 100);
    for session in [1, 2] {
        pair.send(session, detach(5));
    }
    pair.at(10).send(9, Command::Tick);
    pair.send(9, renew(b"k", first, 1));
    let effects = pair.at(11).send(9, Command::Tick);
    assert_eq!((effects.contains(&ended(1)), effects.contains(&ended(2))), (true, false));
    pair.send(9, release(b"l", second));
    assert!(pair.run.store.next_deadline().is_some_and(|at| at <= Timestamp(11)));
    assert!(pair.send(9, Command::Tick).contains(&ended(2)));
}

/// Promise 20: a refusal changes nothing, not even what the next refusal will say.
#[test]
fn promise_20_refusals_have_no_effect() {
    let mut pair = Pair::new(Limits::default());
    pair.ask(1, enqueue(b"k", Mode::Mutex, 10));
    pair.at(10).send(9, Command::Tick);
    assert_eq!(pair.ask(1, enqueue(b"k", Mode::Read, 10)), refused(Refusal::TypeMismatch));
    assert_eq!(pair.ask(1, wait(b"k", 0)), refused(Refusal::LeaseExpired));

    let malformed = Subscription::Changes { pattern: b"a.>.b", from: None };
    for command in [subscribe(malformed), unsubscribe(malformed)] {
        assert_eq!(pair.ask(1, command), refused(Refusal::BadPattern));
    }
}

/// Promise 20: what ends together with a session is answered first.
#[test]
fn promise_20_session_ends_last() {
    let mut pair = Pair::new(Limits::default());
    pair.send(1, detach(10));
    pair.block(1, pop(b"q", End::Left, 10));
    let effects = pair.at(10).send(9, Command::Tick);
    assert_eq!(answers(&effects), [(1, Outcome::Empty)]);
    assert!(effects.contains(&Effect::SessionEnded { session: SessionId(1) }));
}

/// Promise 31: a watch goes on where it stopped, or is told that it cannot.
#[test]
fn promise_31_resumed_watch() {
    let mut pair = Pair::new(Limits { events_max: 2, ..Limits::default() });
    for _ in 0..3 {
        pair.send(1, delete(b"k"));
    }
    let watch =
        |from| subscribe(Subscription::Changes { pattern: b"*", from: Some(Revision(from)) });
    assert_eq!(pair.ask(2, watch(1)), Outcome::Compacted(Revision(1)));
    assert_eq!(pushes(&pair.send(1, delete(b"k")), 2), []);
    assert_eq!(pushes(&pair.send(2, watch(3)), 2).len(), 2);
    assert_eq!(pushes(&pair.send(3, watch(5)), 3), []);
    let effects = pair.send(1, delete(b"k"));
    assert_eq!((pushes(&effects, 2).len(), pushes(&effects, 3).len()), (1, 1));
}

/// Promise 54: the answer to a command is before the pushes that it causes on its own connection.
#[test]
fn promise_54_answer_first() {
    let mut pair = Pair::new(Limits::default());
    for session in [1, 2] {
        pair.send(session, subscribe(Subscription::Changes { pattern: b"k", from: None }));
    }
    for command in [add(b"k", 1, false), delete(b"k"), acquire(b"k", Mode::Mutex, 0, 10)] {
        let effects = pair.send(1, command);
        let own = effects.iter().filter_map(|effect| match effect {
            Effect::Reply { session, .. } if session.0 == 1 => Some(true),
            Effect::Push { session, .. } if session.0 == 1 => Some(false),
            Effect::Reply { .. } | Effect::Push { .. } | Effect::SessionEnded { .. } => None,
        });
        let own: Vec<_> = own.collect();
        assert_eq!(own.first(), Some(&true), "{effects:?}");
    }
}

/// Promise 33: one member of a queue group gets the signal, each in turn.
#[test]
fn promise_33_queue_groups() {
    let mut pair = Pair::new(Limits::default());
    let listen = |group| Subscription::Signals { pattern: b"s.*", group };
    for session in [1, 2, 3] {
        pair.send(session, subscribe(listen(b"g")));
    }
    pair.send(1, subscribe(listen(b"")));
    let turn = |pair: &mut Pair| {
        let effects = pair.send(9, signal(b"s.x", b"p"));
        assert_eq!(answers(&effects), [(9, Outcome::Number(2))]);
        let grouped = effects.iter().find_map(|effect| match effect {
            Effect::Push { session, group: Some(_), .. } => Some(session.0),
            Effect::Push { .. } | Effect::Reply { .. } | Effect::SessionEnded { .. } => None,
        });
        grouped.expect("one member gets it")
    };
    assert_eq!([turn(&mut pair), turn(&mut pair)], [1, 2]);
    // The one whose turn it was not leaves, and it is still the third one's turn.
    pair.send(1, unsubscribe(listen(b"g")));
    assert_eq!([turn(&mut pair), turn(&mut pair), turn(&mut pair)], [3, 2, 3]);
    let command = signal(b"s.*", b"p");
    assert_eq!(pair.ask(9, command), refused(Refusal::BadPattern));
}

/// GUARANTEES 48: a pattern has as many tokens as the limits say; one that is longer can still be ended.
#[test]
fn promise_48_tokens() {
    let mut pair = Pair::new(Limits { pattern_tokens_max: 3, ..Limits::default() });
    let watch = |pattern| Subscription::Changes { pattern, from: None };
    let listen = |pattern| Subscription::Signals { pattern, group: b"g" };
    for subscription in [watch(b"*.*.*.*"), watch(b"a.b.c.>"), listen(b"a.b.c.d"), listen(b"...")] {
        let command = subscribe(subscription);
        assert_eq!(pair.ask(1, command), refused(Refusal::BadPattern));
        assert_eq!(pair.ask(1, unsubscribe(subscription)), Outcome::Done);
    }
    for subscription in [watch(b"*.*.*"), listen(b"a.b.>"), listen(b"..")] {
        assert_eq!(pair.ask(1, subscribe(subscription)), Outcome::Done);
    }
    let leaders = Subscription::Leaders { key: b"a.b.c.d.e" };
    assert_eq!(pair.ask(1, subscribe(leaders)), Outcome::Done, "a key is no pattern");
}

/// GUARANTEES 48: subscriptions are counted and weighed, per session and in all.
#[test]
fn promise_48_subscriptions() {
    let full = refused(Refusal::MaxSubscriptions);
    let listen = |pattern, group| subscribe(Subscription::Signals { pattern, group });
    let mut pair = Pair::new(Limits {
        subscriptions_max: 2,
        subscription_bytes_max: 10,
        subscriptions_total_max: 4,
        subscription_bytes_total_max: 16,
        ..Limits::default()
    });
    // Names of groups count.
    assert_eq!(pair.ask(1, listen(b"abcde", b"123456")), full);
    assert_eq!(pair.ask(1, listen(b"abcde", b"12345")), Outcome::Done);
    assert_eq!(pair.ask(1, listen(b"abcde", b"12345")), Outcome::Done, "nothing is new");
    assert_eq!(pair.ask(1, listen(b"a", b"")), full);
    assert_eq!(pair.ask(2, listen(b"abcdefg", b"")), full, "17 bytes in all");
    assert_eq!(pair.ask(2, listen(b"a", b"")), Outcome::Done);
    assert_eq!(pair.ask(2, listen(b"b", b"")), Outcome::Done);
    assert_eq!(pair.ask(2, listen(b"c", b"")), full, "two for each");
    assert_eq!(pair.ask(3, listen(b"d", b"")), Outcome::Done);
    assert_eq!(pair.ask(3, listen(b"e", b"")), full, "four in all");
    let unlisten = unsubscribe(Subscription::Signals { pattern: b"a", group: b"" });
    assert_eq!(pair.ask(2, unlisten), Outcome::Done, "the end of one is never refused");
    assert_eq!(pair.ask(3, listen(b"e", b"")), Outcome::Done);
    // Also without a connection they are there, and with their session they go.
    pair.send(1, detach(10));
    assert_eq!(pair.ask(4, listen(b"f", b"")), full);
    pair.at(10).send(9, Command::Tick);
    assert_eq!(pair.ask(4, listen(b"f", b"")), Outcome::Done);
}

/// GUARANTEES 48: whoever has no connection is told nothing, has no turn in its queue groups, and is no receiver; with
/// the next connection all is as it was.
#[test]
fn promise_48_detached_sessions_do_not_listen() {
    let mut pair = Pair::new(Limits::default());
    let signals = |group| subscribe(Subscription::Signals { pattern: b"s.*", group });
    for session in [1, 2] {
        pair.send(session, signals(b"g"));
        pair.send(session, signals(b""));
        pair.send(session, subscribe(Subscription::Leaders { key: b"e" }));
        let (pattern, from) = (b">", None);
        pair.send(session, subscribe(Subscription::Changes { pattern, from }));
    }
    let told = |pair: &mut Pair| {
        let effects = pair.send(9, signal(b"s.x", b"p"));
        let count = answers(&effects)[0].1.clone();
        (count, pushes(&effects, 1).len(), pushes(&effects, 2).len())
    };
    assert_eq!(told(&mut pair), (Outcome::Number(3), 2, 1));
    pair.send(1, detach(100));
    for _ in 0..3 {
        assert_eq!(told(&mut pair), (Outcome::Number(2), 0, 2), "every turn is the other's");
    }
    let effects = pair.send(3, acquire(b"e", Mode::Election, 0, 5));
    assert_eq!((pushes(&effects, 1).len(), pushes(&effects, 2).len()), (0, 2));
    // What it asks for meanwhile waits as well.
    pair.send(1, signals(b"h"));
    assert_eq!(told(&mut pair), (Outcome::Number(2), 0, 2));
    pair.send(2, detach(100));
    assert_eq!(told(&mut pair), (Outcome::Number(0), 0, 0));
    pair.restore();
    pair.send(1, Command::Attach);
    assert_eq!(told(&mut pair), (Outcome::Number(3), 3, 0));
    pair.send(2, Command::Attach);
    assert_eq!(told(&mut pair), (Outcome::Number(4), 3, 1), "the first has joined before");
    assert_eq!(told(&mut pair), (Outcome::Number(4), 2, 2));
}

/// GUARANTEES 42, 48: until all members know the rule, sessions without a connection listen; then those that are
/// without one stop.
#[test]
fn promise_48_from_version_2_on() {
    let first = Limits::default().with_v2(LimitsV2::default());
    let mut store = Store::new(first, 42, Arc::new(Shared::new()), Timestamp(0));
    let send = |store: &mut Store, session, command| {
        let caller = Caller { session: SessionId(session), request: RequestId(0), keep: false };
        let mut effects = Vec::new();
        store.apply(caller, command, Timestamp(1), &mut effects);
        store.check_invariants();
        effects
    };
    let long = b"*.".repeat(100);
    let listen = |pattern, group| subscribe(Subscription::Signals { pattern, group });
    let signal = signal(b"x", b"p");
    send(&mut store, 1, listen(b">", b"g"));
    assert_eq!(answers(&send(&mut store, 1, listen(&long, b""))), [(1, Outcome::Done)]);
    send(&mut store, 1, detach(50));
    assert_eq!(answers(&send(&mut store, 2, signal)), [(2, Outcome::Number(1))]);
    let before = store.snapshot();

    store.set_limits(Limits::default());
    store.check_invariants();
    assert_eq!(answers(&send(&mut store, 2, signal)), [(2, Outcome::Number(0))]);
    let bytes = store.snapshot();
    let mut store = Store::restore(&bytes, Arc::new(Shared::new())).expect("it was just written");
    assert!(store.snapshot() == bytes);
    // What was accepted stays, and can be ended; another one is not accepted.
    send(&mut store, 1, Command::Attach);
    assert_eq!(answers(&send(&mut store, 2, signal)), [(2, Outcome::Number(1))]);
    assert_eq!(store.view_session(SessionId(1)).subscriptions, 2);
    let refusal = refused(Refusal::BadPattern);
    assert_eq!(answers(&send(&mut store, 2, listen(&long, b""))), [(2, refusal)]);
    let unlisten = unsubscribe(Subscription::Signals { pattern: &long, group: b"" });
    send(&mut store, 1, unlisten);
    assert_eq!(store.view_session(SessionId(1)).subscriptions, 1);

    let old = Store::restore(&before, Arc::new(Shared::new())).expect("it was written before");
    assert!(old.snapshot() == before);
}
