//! Whether what clients were told in an act can be true: the searches of the simulator over what they saw of each key,
//! and simpler sums that need no search.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "of each key only its own requests are looked at"
)]

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Debug;
use std::time::Duration;

use dflockd_sim::models::{
    Counter, CounterOp, Entry, EntryOp, Expected, List, ListOp, Lock, LockOp, Written,
};
use dflockd_sim::search::{Call, Model, Verdict, search};
use serde_json::Value;

use crate::history::{Act, Event, History, Moment, moment};
use crate::request::{Kind, Request, Want, fence_of, token_of};

const STEPS_MAX: usize = 1_000_000;
/// More requests that nobody knows of make too many lists: each item may be there or not.
const OPEN_MAX: usize = 6;

/// Lists in an act.
pub const LISTS: usize = 3;

/// What came of the checks.
#[derive(Debug, Default)]
pub struct Findings {
    /// What can not be.
    pub broken: Vec<String>,
    /// Requests for which there is an order.
    pub ordered: u64,
    /// Keys for which there was no verdict, or none was asked for.
    pub left_out: u64,
}

/// What is in the lists at the end.
pub type Items = BTreeMap<String, Vec<String>>;

/// Checks all of an act. `items` are what the lists have at its end.
pub fn check(history: &History, items: &Items) -> Findings {
    let mut findings = Findings::default();
    let mut keys: BTreeMap<&str, Vec<&Event>> = BTreeMap::new();
    for event in &history.events {
        keys.entry(&event.request.key).or_default().push(event);
        check_refusal(event, &mut findings);
    }
    for (key, events) in keys {
        let name = key.split_once('.').map_or(key, |(_, name)| name);
        match name.as_bytes().first() {
            Some(b'c') => {
                let calls = calls(&events, counter_op);
                decide(key, &Counter, &0, &calls, &mut findings);
            }
            Some(b'k') => {
                let calls = calls(&events, entry_op);
                decide(key, &Entry, &None, &calls, &mut findings);
            }
            Some(b'q') => {
                let items = items.get(key).map(Vec::as_slice).unwrap_or_default();
                check_items(key, &events, items, &mut findings);
                let calls = calls(&events, list_op);
                // An item may have been popped and put back if nobody was told of it.
                let is_whole = |call: &Call<ListOp>| match &call.op {
                    ListOp::Pop { item, .. } => item.is_some(),
                    ListOp::Push { .. } | ListOp::Length(_) => true,
                };
                let open = calls.iter().filter(|call| call.end.is_none()).count();
                if calls.iter().all(is_whole) && open <= OPEN_MAX {
                    decide(key, &List, &(Vec::new(), false), &calls, &mut findings);
                } else {
                    findings.left_out += 1;
                }
            }
            _ => {
                let lock = Lock { slots: slots(name), ends: ends(history, &events) };
                let calls = calls(&events, lock_op);
                decide(key, &lock, &(Vec::new(), 0), &calls, &mut findings);
            }
        }
    }
    check_stays(history, &mut findings);
    findings
}

/// How many can hold the lock with this name, none for one writer or any number of readers.
fn slots(name: &str) -> Option<usize> {
    match name.as_bytes() {
        [b'w', ..] => None,
        [b's', slots, ..] => Some(usize::from(slots - b'0')),
        _ => Some(1),
    }
}

/// A definite no has a reason. Nobody asks for what is malformed, so a bare `error` means "not held", or, to a client
/// that did not say `hello`, that nobody could decide for five seconds.
fn check_refusal(event: &Event, findings: &mut Findings) {
    let Some((end, answer)) = &event.end else { return };
    let is_soon = end - event.begin < moment(Duration::from_millis(4900));
    let may_be_refused = matches!(event.request.want, Want::Release(..) | Want::Renew(..));
    if answer == "error" && !may_be_refused && (is_soon || event.greeted) {
        let after = (end - event.begin) / 1_000_000;
        findings.broken.push(format!("49: error after {after} ms: {event:?}"));
    }
}

/// The calls of a key, without those that were refused and did nothing.
fn calls<O>(events: &[&Event], op: impl Fn(&Event, Option<&str>) -> Option<O>) -> Vec<Call<O>> {
    let call = |event: &&Event| {
        let told = event.end.as_ref().map(|(_, answer)| answer.as_str());
        let end = event.end.as_ref().map(|(at, _)| *at);
        Some(Call { begin: event.begin, end, op: op(event, told)? })
    };
    events.iter().filter_map(call).collect()
}

fn number(told: Option<&str>) -> Option<i64> {
    told.and_then(|told| told.strip_prefix("ok ")).and_then(|number| number.parse().ok())
}

fn is_refused(told: Option<&str>) -> bool {
    told.is_some_and(|told| told.starts_with("error"))
}

fn counter_op(event: &Event, told: Option<&str>) -> Option<CounterOp> {
    if is_refused(told) {
        return None;
    }
    match event.request.want {
        Want::Add => Some(CounterOp::Add(number(told))),
        Want::Reset(value) => Some(CounterOp::Set(value)),
        Want::Count => number(told).map(CounterOp::Read),
        _ => None,
    }
}

fn entry_op(event: &Event, told: Option<&str>) -> Option<EntryOp> {
    if is_refused(told) {
        return None;
    }
    // No revision is told on lines, and nobody asks for one.
    let written = match told {
        Some("ok") => Written::At(0),
        Some(_) => Written::Conflict,
        None => Written::Unknown,
    };
    let bytes = |value: &str| value.as_bytes().to_vec();
    match &event.request.want {
        Want::Put(value) => Some(EntryOp::Write(Expected::Any, bytes(value), written)),
        Want::Swap(old, new) => {
            let expected = old.as_ref().map_or(Expected::Absent, |old| Expected::Value(bytes(old)));
            Some(EntryOp::Write(expected, bytes(new), written))
        }
        Want::Delete => Some(EntryOp::Delete),
        Want::Fetch => Some(EntryOp::Read(told?.strip_prefix("ok ").map(bytes))),
        _ => None,
    }
}

fn list_op(event: &Event, told: Option<&str>) -> Option<ListOp> {
    if is_refused(told) {
        return None;
    }
    match &event.request.want {
        Want::Push(left, item) => {
            let item = item.as_bytes().to_vec();
            Some(ListOp::Push { left: *left, item, length: number(told) })
        }
        Want::Pop(left, wait) => {
            let item = told.map(|told| told.strip_prefix("ok ").map(|it| it.as_bytes().to_vec()));
            Some(ListOp::Pop { left: *left, waits: !wait.is_zero(), item })
        }
        Want::Length => number(told).map(ListOp::Length),
        _ => None,
    }
}

fn lock_op(event: &Event, told: Option<&str>) -> Option<LockOp> {
    let told = told?;
    let writes = |kind: Kind| kind == Kind::Write;
    let fence = token_of(told).map(fence_of);
    // A plain client hears a bare error also if nobody could decide.
    let (end, _) = event.end.as_ref()?;
    let is_undecided = !event.greeted && end - event.begin > moment(Duration::from_millis(4900));
    let is_held = match told {
        "error" if is_undecided => None,
        "error" | "error_lease_expired" => Some(false),
        other if other.starts_with("error") => None,
        _ => Some(true),
    };
    match &event.request.want {
        Want::Acquire(kind, ..) | Want::Enqueue(kind, _) => {
            fence.map(|fence| LockOp::Grant(fence, writes(*kind)))
        }
        Want::Claim(kind, _) => fence.map(|fence| LockOp::Claim(fence, writes(*kind))),
        Want::Release(_, token) => is_held.map(|held| LockOp::Release(fence_of(token), held)),
        Want::Renew(_, token, _) => is_held.map(|held| LockOp::Renew(fence_of(token), held)),
        _ => None,
    }
}

/// From when on each hold, by its fence, may have ended without a word: its lease is over, its client left, a release
/// or a wait is without an answer.
fn ends(history: &History, events: &[&Event]) -> BTreeMap<u64, Moment> {
    struct Hold {
        client: usize,
        since: Moment,
        until: Moment,
    }
    let mut holds: BTreeMap<u64, Hold> = BTreeMap::new();
    let mut gone: Vec<(usize, Moment)> = history.given_up.clone();
    let mut released: BTreeMap<u64, Moment> = BTreeMap::new();
    for event in events {
        let Event { client, request, begin, end, .. } = event;
        match (&request.want, end) {
            (Want::Acquire(_, _, lease) | Want::Enqueue(_, lease), Some((_, answer))) => {
                if let Some(token) = token_of(answer) {
                    let until = begin + moment(*lease) / 100 * 99;
                    let hold = Hold { client: *client, since: *begin, until };
                    holds.insert(fence_of(token), hold);
                }
            }
            (Want::Claim(..), Some((_, answer))) => {
                // Its lease is that of the place in the queue, which was not shorter than this.
                if let Some(token) = token_of(answer) {
                    let until = begin + moment(lease_of(answer)) / 100 * 99;
                    let (client, since) = (*client, *begin);
                    let hold = holds.entry(fence_of(token));
                    let hold = hold.or_insert(Hold { client, since, until });
                    hold.until = hold.until.max(until);
                }
            }
            (Want::Claim(..), None) => gone.push((*client, *begin)),
            (Want::Renew(_, token, lease), Some((_, answer))) if answer.starts_with("ok") => {
                if let Some(hold) = holds.get_mut(&fence_of(token)) {
                    hold.until = hold.until.max(begin + moment(*lease) / 100 * 99);
                }
            }
            (Want::Release(_, token), None) => {
                let at = released.entry(fence_of(token)).or_insert(*begin);
                *at = (*at).min(*begin);
            }
            _ => {}
        }
    }
    let end = |(fence, hold): (u64, Hold)| {
        let left = gone.iter().filter(|(client, at)| *client == hold.client && *at >= hold.since);
        let ended = left.map(|(_, at)| *at).chain(released.get(&fence).copied());
        (fence, ended.fold(hold.until, Moment::min))
    };
    holds.into_iter().map(end).collect()
}

/// The lease in a grant to a connection that counts in seconds.
fn lease_of(answer: &str) -> Duration {
    let seconds = answer.split(' ').nth(2).and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(0))
}

fn decide<M: Model>(
    key: &str,
    model: &M,
    initial: &M::State,
    calls: &[Call<M::Op>],
    findings: &mut Findings,
) where
    M::Op: Debug,
{
    match search(model, initial, calls, STEPS_MAX) {
        Verdict::Linearizable => findings.ordered += calls.len() as u64,
        Verdict::Unknown => findings.left_out += 1,
        Verdict::Impossible(at) => {
            let Call { begin, end, .. } = calls[at];
            let end = end.unwrap_or(Moment::MAX);
            let is_near =
                |other: &&Call<_>| other.begin <= end && other.end.is_none_or(|it| it >= begin);
            let near: Vec<_> = calls.iter().filter(is_near).take(20).collect();
            let what = format!("22: {key}: no order explains {:?} among {near:#?}", calls[at]);
            findings.broken.push(what);
        }
    }
}

/// That each item was popped at most once, and that only pops without an answer can have taken what is missing.
fn check_items(key: &str, events: &[&Event], left: &[String], findings: &mut Findings) {
    let (mut pushed, mut perhaps, mut popped, mut unknown) =
        (BTreeSet::new(), BTreeSet::new(), Vec::new(), 0);
    for event in events {
        let told = event.end.as_ref().map(|(_, answer)| answer.as_str());
        match (&event.request.want, told) {
            (Want::Push(_, item), Some(told)) if told.starts_with("ok") => {
                pushed.insert(item.clone());
            }
            (Want::Push(_, item), None) => {
                perhaps.insert(item.clone());
            }
            (Want::Pop(..), Some(told)) => {
                popped.extend(told.strip_prefix("ok ").map(str::to_owned));
            }
            (Want::Pop(..), None) => unknown += 1,
            _ => {}
        }
    }
    let mut seen = BTreeSet::new();
    for item in popped.iter().chain(left) {
        if !seen.insert(item) {
            findings.broken.push(format!("25: {key}: {item} came twice"));
        }
        if !pushed.contains(item) && !perhaps.contains(item) {
            findings.broken.push(format!("25: {key}: nobody pushed {item}"));
        }
    }
    let missing: Vec<_> = pushed.iter().filter(|item| !seen.contains(item)).collect();
    if missing.len() > unknown {
        let what = format!("25: {key}: {missing:?} are lost, {unknown} pops were not answered");
        findings.broken.push(what);
    }
}

/// That nobody was entitled to act at the same time as somebody else, and that fences grew.
fn check_stays(history: &History, findings: &mut Findings) {
    let mut stays = history.stays.clone();
    stays.sort_by(|one, other| (&one.key, one.from).cmp(&(&other.key, other.from)));
    for two in stays.windows(2).filter(|two| two[0].key == two[1].key) {
        if two[0].fence == two[1].fence {
            continue;
        }
        if two[0].until > two[1].from {
            findings.broken.push(format!("2: two at the same time: {two:?}"));
        }
        if two[0].fence > two[1].fence {
            findings.broken.push(format!("3: fences do not grow: {two:?}"));
        }
    }
}

/// What there is to be read of the keys of an act, in the end.
pub fn last_reads(act: &Act) -> Vec<Request> {
    let reads = [("c", 2, Want::Count), ("k", 2, Want::Fetch), ("q", LISTS, Want::Length)];
    let all = reads.iter().flat_map(|(name, count, want)| {
        (0..*count).map(move |number| Request {
            key: act.key(format!("{name}{number}")),
            want: want.clone(),
        })
    });
    all.collect()
}

/// The items of a list as they are told.
pub fn items(answer: &str) -> Option<Vec<String>> {
    let told: Value = serde_json::from_str(answer.strip_prefix("ok ")?).ok()?;
    told.as_array()?.iter().map(|item| item.as_str().map(str::to_owned)).collect()
}
