//! What clients saw of each key could have happened one request after the other. Asks no log: a search over the history
//! alone, with models of their own (`models.rs`), so that it can find what the oracle believes like everybody else.
//!
//! A request without an answer may take effect at any time after it was sent, or never. A hold may end by itself as
//! soon as its lease may be over by the fastest clock, its client gave it up, or somebody ended its session.
//!
//! Left out: entries with a time to live, lists from which an item was popped and put back or with many requests that
//! were not answered, locks that end with connections (`auto-release any`), waits that ended in vain, and keys with
//! very many requests.

use std::collections::{BTreeMap, BTreeSet};

use dflockd_core::{Command, End as ListEnd, Expect, Mode, Outcome, Refusal, Span, command};
use dflockd_replica::OwnedQuery;

use super::Broken;
use crate::history::{Asked, End, History};
use crate::models::{
    Counter, CounterOp, Entry, EntryOp, Expected, List, ListOp, Lock, LockOp, Written,
};
use crate::op::Op;
use crate::search::{Call, Model, Verdict, search};

/// More clients make too many orders.
pub const CLIENTS_MAX: usize = 8;
const CALLS_MAX: usize = 1000;
/// Where many requests were lost, an order takes some millions.
const STEPS_MAX: usize = 20_000_000;
/// More requests that nobody knows of make too many lists: each item may be there or not.
const OPEN_MAX: usize = 6;
/// Clocks of nodes run at most this much too fast, in thousandths of a lease.
const RATE: u64 = 10;

/// Calls by key.
type Calls<O> = BTreeMap<Vec<u8>, Vec<Call<O>>>;

/// What is known of a hold: who asked when, and until when it lasts at least.
struct Hold {
    key: Vec<u8>,
    client: usize,
    doomed: bool,
    since: u64,
    until: u64,
}

/// When everything is over. `doomed` are sessions that somebody ended, `undone` are items that were put back; locks are
/// only looked at if `locks`. How many requests there is an order for.
pub fn check(
    history: &History,
    doomed: &BTreeSet<u64>,
    undone: &[Vec<u8>],
    locks: bool,
) -> Result<u64, Broken> {
    let mut calls = Histories::default();
    for asked in &history.asked {
        calls.take(asked, doomed);
    }
    let before = &history.before;
    let counter = |key: &[u8]| before.counters.get(key).copied().unwrap_or(0);
    let mut ordered = decide("counter", |_| Counter, counter, &calls.counters)?;
    let entry = |key: &[u8]| {
        before.entries.get(key).map(|(value, revision)| (value.clone(), Some(*revision)))
    };
    ordered += decide("entry", |_| Entry, entry, &calls.entries)?;
    let is_whole = |key: &[u8], calls: &[Call<ListOp>]| {
        let open = calls.iter().filter(|call| call.end.is_none()).count();
        let pushed = calls.iter().filter_map(|call| match &call.op {
            ListOp::Push { item, .. } => Some(item),
            ListOp::Pop { .. } | ListOp::Length(_) => None,
        });
        let mut items = pushed.chain(before.lists.get(key).into_iter().flatten());
        open <= OPEN_MAX && !items.any(|item| undone.contains(item))
    };
    calls.lists.retain(|key, calls| is_whole(key, calls));
    let list = |key: &[u8]| (before.lists.get(key).cloned().unwrap_or_default(), false);
    ordered += decide("list", |_| List, list, &calls.lists)?;
    if locks {
        let ends = calls.ends(history);
        let lock = |key: &[u8]| {
            let ends = ends.get(key).cloned().unwrap_or_default();
            Lock { slots: slots(key), ends }
        };
        let free = |key: &[u8]| (Vec::new(), before.fences.get(key).copied().unwrap_or(0));
        ordered += decide("lock", lock, free, &calls.locks)?;
    }
    Ok(ordered)
}

/// How many can hold the lock with this key, none for one writer or any number of readers. See `Client::lock`.
fn slots(key: &[u8]) -> Option<usize> {
    match key.first() {
        Some(b'w') => None,
        Some(b's') => Some(usize::from(key[1] - b'0') % 3 + 1),
        _ => Some(1),
    }
}

fn decide<M: Model>(
    what: &str,
    model: impl Fn(&[u8]) -> M,
    initial: impl Fn(&[u8]) -> M::State,
    calls: &Calls<M::Op>,
) -> Result<u64, Broken>
where
    M::Op: std::fmt::Debug,
{
    let mut ordered = 0;
    for (key, calls) in calls.iter().filter(|(_, calls)| calls.len() <= CALLS_MAX) {
        let why = match search(&model(key), &initial(key), calls, STEPS_MAX) {
            Verdict::Linearizable => {
                ordered += calls.len() as u64;
                continue;
            }
            Verdict::Impossible(call) => {
                let Call { begin, end, .. } = calls[call];
                let end = end.unwrap_or(u64::MAX);
                let near = calls.iter().filter(|other| {
                    other.begin <= end && other.end.is_none_or(|other| other >= begin)
                });
                let near: Vec<_> = near.take(12).collect();
                format!("no order explains {:?} among {near:?}", calls[call])
            }
            Verdict::Unknown => format!("nothing found for {} calls", calls.len()),
        };
        let what = format!("{what} {}: {why}", key.escape_ascii());
        return Err(Broken::new("linearizable", what));
    }
    Ok(ordered)
}

#[derive(Default)]
struct Histories {
    counters: Calls<CounterOp>,
    entries: Calls<EntryOp>,
    lists: Calls<ListOp>,
    locks: Calls<LockOp>,
    holds: BTreeMap<u64, Hold>,
    /// Releases that nobody knows of: fence, and when they were sent.
    released: BTreeMap<u64, u64>,
    /// Waits without an answer: client, key, and when they were sent. If the answer can not be told, the hold is given
    /// back, although its enqueue may have told of it before.
    waited: Vec<(usize, Vec<u8>, u64)>,
}

fn put<O>(calls: &mut Calls<O>, key: &[u8], asked: &Asked, op: O) {
    let end = match asked.end {
        End::Told(at, _) => Some(at),
        End::Open | End::Unknown | End::Refused => None,
    };
    calls.entry(key.to_vec()).or_default().push(Call { begin: asked.sent, end, op });
}

impl Histories {
    /// Takes a request down. What was refused had no effect.
    #[expect(clippy::wildcard_enum_match_arm, reason = "the rest is not looked at")]
    fn take(&mut self, asked: &Asked, doomed: &BTreeSet<u64>) {
        let told = match &asked.end {
            End::Told(_, outcome) => Some(outcome),
            End::Open | End::Unknown => None,
            End::Refused => return,
        };
        if let Op::Read(query) = &asked.op {
            return self.take_read(asked, query, told);
        }
        let number = match told {
            None => None,
            Some(Outcome::Number(number)) => Some(*number),
            Some(_) => Some(-1),
        };
        let refused = matches!(told, Some(Outcome::Refused(_)));
        match asked.op.command() {
            Some(Command::Add(command::Add { key, .. })) if !refused => {
                put(&mut self.counters, key, asked, CounterOp::Add(number));
            }
            Some(Command::CounterSet(command::CounterSet { key, value })) if !refused => {
                put(&mut self.counters, key, asked, CounterOp::Set(value));
            }
            Some(Command::KvSet(command::KvSet { ttl: None, key, value })) if !refused => {
                let op = EntryOp::Write(Expected::Any, value.to_vec(), written(told));
                put(&mut self.entries, key, asked, op);
            }
            Some(Command::KvCompareAndSet(command)) if !refused => {
                let command::KvCompareAndSet { expect, key, value, .. } = command;
                let expected = match expect {
                    Expect::Absent => Expected::Absent,
                    Expect::Value(value) => Expected::Value(value.to_vec()),
                    Expect::Revision(revision) => Expected::Revision(revision.0),
                };
                let op = EntryOp::Write(expected, value.to_vec(), written(told));
                put(&mut self.entries, key, asked, op);
            }
            Some(Command::KvDelete(command::KvDelete { key })) if !refused => {
                put(&mut self.entries, key, asked, EntryOp::Delete);
            }
            Some(Command::Push(command::Push { end, key, value })) if !refused => {
                let (left, item) = (end == ListEnd::Left, value.to_vec());
                put(&mut self.lists, key, asked, ListOp::Push { left, item, length: number });
            }
            Some(Command::Pop(command::Pop { end, wait, key })) if !refused => {
                let item = told.map(|told| match told {
                    Outcome::Popped { value, .. } => Some(value.to_vec()),
                    _ => None,
                });
                let (left, waits) = (end == ListEnd::Left, wait.is_some());
                put(&mut self.lists, key, asked, ListOp::Pop { left, waits, item });
            }
            Some(command) => self.take_lock(asked, command, told, doomed),
            None => {}
        }
    }

    fn take_read(&mut self, asked: &Asked, query: &OwnedQuery, told: Option<&Outcome>) {
        match (query, told) {
            (OwnedQuery::Counter(key), Some(Outcome::Number(number))) => {
                put(&mut self.counters, key, asked, CounterOp::Read(*number));
            }
            (OwnedQuery::Length(key), Some(Outcome::Number(number))) => {
                put(&mut self.lists, key, asked, ListOp::Length(*number));
            }
            (OwnedQuery::Kv(key), Some(Outcome::Value(_) | Outcome::Empty)) if key[0] != b't' => {
                let value = match told {
                    Some(Outcome::Value(value)) => Some(value.to_vec()),
                    _ => None,
                };
                put(&mut self.entries, key, asked, EntryOp::Read(value));
            }
            _ => {}
        }
    }

    /// A grant or a wait that nobody knows of can only keep others from something, so nothing is lost without it.
    fn take_lock(
        &mut self,
        asked: &Asked,
        command: Command<'_>,
        told: Option<&Outcome>,
        doomed: &BTreeSet<u64>,
    ) {
        let held = match told {
            Some(Outcome::Refused(Refusal::NotHeld | Refusal::LeaseExpired)) => false,
            Some(Outcome::Refused(_)) => return,
            Some(_) | None => true,
        };
        let (key, op) = match (command, told) {
            (
                Command::Acquire(command::Acquire { key, mode, .. }),
                Some(Outcome::Granted(grant)),
            )
            | (
                Command::Enqueue(command::Enqueue { key, mode, .. }),
                Some(Outcome::Acquired(grant)),
            ) => {
                let fence = grant.token.fence.0;
                self.hold(asked, key, fence, grant.lease, doomed);
                (key, LockOp::Grant(fence, mode == Mode::Write))
            }
            (Command::Wait(command::Wait { key, .. }), Some(Outcome::Granted(grant))) => {
                let Op::Wait(_, mode, _) = asked.op else { return };
                let fence = grant.token.fence.0;
                self.hold(asked, key, fence, grant.lease, doomed);
                (key, LockOp::Claim(fence, mode == Mode::Write))
            }
            (Command::Wait(command::Wait { key, .. }), None) => {
                self.waited.push((asked.client, key.to_vec(), asked.sent));
                return;
            }
            (Command::Release(command::Release { token, .. }), None) => {
                self.released.entry(token.fence.0).or_insert(asked.sent);
                return;
            }
            (Command::ForceRelease(command::ForceRelease { fence, .. }), None) => {
                self.released.entry(fence.0).or_insert(asked.sent);
                return;
            }
            (Command::Release(command::Release { key, token, .. }), Some(_)) => {
                (key, LockOp::Release(token.fence.0, held))
            }
            (Command::ForceRelease(command::ForceRelease { key, fence, .. }), Some(_)) => {
                (key, LockOp::Release(fence.0, held))
            }
            (Command::Renew(command::Renew { key, token, .. }), Some(outcome)) => {
                if let Outcome::Renewed { lease, .. } = outcome {
                    self.hold(asked, key, token.fence.0, *lease, doomed);
                }
                (key, LockOp::Renew(token.fence.0, held))
            }
            _ => return,
        };
        put(&mut self.locks, key, asked, op);
    }

    fn hold(&mut self, asked: &Asked, key: &[u8], fence: u64, lease: Span, doomed: &BTreeSet<u64>) {
        let until = asked.sent + lease.0 / 1000 * (1000 - RATE);
        let hold = self.holds.entry(fence).or_insert_with(|| Hold {
            key: key.to_vec(),
            client: asked.client,
            doomed: asked.session.is_some_and(|session| doomed.contains(&session.0)),
            since: asked.sent,
            until,
        });
        hold.until = hold.until.max(until);
    }

    /// From when on each hold may have ended by itself, by key.
    fn ends(&self, history: &History) -> BTreeMap<&[u8], BTreeMap<u64, u64>> {
        let mut ends: BTreeMap<&[u8], BTreeMap<u64, u64>> = BTreeMap::new();
        for (&fence, hold) in &self.holds {
            let given_up = history.given_up.iter();
            let given_up = given_up
                .filter(|&&(client, at)| client == hold.client && at >= hold.since)
                .map(|&(_, at)| at);
            let doomed = hold.doomed.then_some(hold.since);
            let released = self.released.get(&fence).copied();
            let waited = self.waited.iter().filter(|(client, key, at)| {
                *client == hold.client && *key == hold.key && *at >= hold.since
            });
            let waited = waited.map(|(.., at)| *at);
            let ended = given_up.chain(doomed).chain(released).chain(waited);
            let end = ended.fold(hold.until, u64::min);
            ends.entry(&hold.key).or_default().insert(fence, end);
        }
        ends
    }
}

fn written(told: Option<&Outcome>) -> Written {
    match told {
        Some(Outcome::Written(revision)) => Written::At(revision.0),
        Some(_) => Written::Conflict,
        None => Written::Unknown,
    }
}
