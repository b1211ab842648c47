//! What clients may expect of a counter, an entry, a list and a lock, written from the documents and as simple as can
//! be: nothing of the core is asked.

use std::collections::BTreeMap;

use crate::search::Model;

/// A counter.
pub struct Counter;

/// A call of a counter.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CounterOp {
    /// Adds one; the value after that, if it is known.
    Add(Option<i64>),
    /// Sets it.
    Set(i64),
    /// Reads it.
    Read(i64),
}

impl Model for Counter {
    type State = i64;
    type Op = CounterOp;

    fn step(&self, state: &i64, op: &CounterOp, _: u64) -> Vec<i64> {
        match *op {
            CounterOp::Add(told) if told.is_none_or(|told| told == state + 1) => vec![state + 1],
            CounterOp::Set(value) => vec![value],
            CounterOp::Read(told) if told == *state => vec![*state],
            CounterOp::Add(_) | CounterOp::Read(_) => Vec::new(),
        }
    }
}

/// An entry of the KV store.
pub struct Entry;

/// The answer to a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Written {
    /// With this revision.
    At(u64),
    /// It was not as expected.
    Conflict,
    /// Nobody knows.
    Unknown,
}

/// What a compare-and-set wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Expected {
    /// Anything.
    Any,
    /// No entry.
    Absent,
    /// This value.
    Value(Vec<u8>),
    /// This revision.
    Revision(u64),
}

/// A call of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EntryOp {
    /// Writes a value, if what is there is as expected.
    Write(Expected, Vec<u8>, Written),
    /// Deletes it.
    Delete,
    /// Reads it.
    Read(Option<Vec<u8>>),
}

impl Model for Entry {
    /// Value, and revision if its writer was told.
    type State = Option<(Vec<u8>, Option<u64>)>;
    type Op = EntryOp;

    fn step(&self, state: &Self::State, op: &EntryOp, _: u64) -> Vec<Self::State> {
        match op {
            EntryOp::Write(expected, value, written) => {
                let fits = match (expected, state) {
                    (Expected::Any, _) => true,
                    (Expected::Absent, state) => state.is_none(),
                    (Expected::Value(wanted), Some((value, _))) => wanted == value,
                    // A revision that its writer was not told of nobody can ask for.
                    (Expected::Revision(wanted), Some((_, revision))) => Some(*wanted) == *revision,
                    (Expected::Value(_) | Expected::Revision(_), None) => false,
                };
                match (fits, *written) {
                    (true, Written::At(revision)) => vec![Some((value.clone(), Some(revision)))],
                    (true, Written::Unknown) => vec![Some((value.clone(), None))],
                    (false, Written::Conflict) => vec![state.clone()],
                    (true, Written::Conflict) | (false, Written::At(_) | Written::Unknown) => {
                        Vec::new()
                    }
                }
            }
            EntryOp::Delete => vec![None],
            EntryOp::Read(told) if *told == state.as_ref().map(|(value, _)| value.clone()) => {
                vec![state.clone()]
            }
            EntryOp::Read(_) => Vec::new(),
        }
    }
}

/// A list.
pub struct List;

/// A call of a list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListOp {
    /// Puts an item at the left or right end; the length after that, 0 if somebody waited for the item.
    Push {
        /// At the left end.
        left: bool,
        /// What.
        item: Vec<u8>,
        /// If it is known.
        length: Option<i64>,
    },
    /// Takes an item; the first none: nobody knows, the second: there was nothing.
    Pop {
        /// From the left end.
        left: bool,
        /// It was ready to wait.
        waits: bool,
        /// What was told.
        item: Option<Option<Vec<u8>>>,
    },
    /// Reads the length.
    Length(i64),
}

impl Model for List {
    /// The items, and whether the only one of them is on its way to somebody who waits.
    type State = (Vec<Vec<u8>>, bool);
    type Op = ListOp;

    fn step(&self, (items, handed): &Self::State, op: &ListOp, _: u64) -> Vec<Self::State> {
        let mut items = items.clone();
        match op {
            ListOp::Push { left, item, length } if !handed => {
                let waited_for = *length == Some(0);
                if waited_for && !items.is_empty() {
                    return Vec::new();
                }
                items.insert(if *left { 0 } else { items.len() }, item.clone());
                let fits = length.is_none_or(|length| waited_for || length == items.len() as i64);
                if fits { vec![(items, waited_for)] } else { Vec::new() }
            }
            ListOp::Pop { left, waits, item } if *waits || !handed => {
                let popped = match items.len() {
                    0 => None,
                    len => Some(items.remove(if *left { 0 } else { len - 1 })),
                };
                let fits = item.as_ref().is_none_or(|told| *told == popped);
                if fits { vec![(items, false)] } else { Vec::new() }
            }
            ListOp::Length(told) if !handed && *told == items.len() as i64 => {
                vec![(items, false)]
            }
            ListOp::Push { .. } | ListOp::Pop { .. } | ListOp::Length(_) => Vec::new(),
        }
    }
}

/// A lock.
pub struct Lock {
    /// So many can hold it; none: one writer or any number of readers.
    pub slots: Option<usize>,
    /// From when on a hold, by its fence, may have ended without a word: its lease is over, or its client gave it up.
    pub ends: BTreeMap<u64, u64>,
}

/// A call of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockOp {
    /// A hold, by its fence, and whether it writes.
    Grant(u64, bool),
    /// Somebody who has a place in the queue is told of the hold.
    Claim(u64, bool),
    /// The hold is given back or taken away; whether there was one.
    Release(u64, bool),
    /// The lease is asked to go on; whether there was a hold.
    Renew(u64, bool),
}

/// Holds by fence, and whether they write.
type Holds = Vec<(u64, bool)>;

impl Lock {
    fn has_room(&self, holds: &Holds, writes: bool) -> bool {
        match self.slots {
            Some(slots) => holds.len() < slots,
            None if writes => holds.is_empty(),
            None => holds.iter().all(|hold| !hold.1),
        }
    }

    /// The holds without one, if it may have ended by then.
    fn without(&self, holds: &Holds, fence: u64, by: u64) -> Option<Holds> {
        let ends = self.ends.get(&fence).is_some_and(|&end| end <= by);
        ends.then(|| holds.iter().copied().filter(|hold| hold.0 != fence).collect())
    }

    /// All ways in which there is room for one more, with as many holds as can be.
    fn make_room(&self, holds: &Holds, writes: bool, by: u64) -> Vec<Holds> {
        if self.has_room(holds, writes) {
            return vec![holds.clone()];
        }
        let is_in_the_way = |hold: &&(u64, bool)| self.slots.is_some() || writes || hold.1;
        let mut in_the_way = holds.iter().filter(is_in_the_way);
        if self.slots.is_some() {
            return in_the_way.filter_map(|hold| self.without(holds, hold.0, by)).collect();
        }
        let all_ended =
            in_the_way.try_fold(holds.clone(), |holds, hold| self.without(&holds, hold.0, by));
        all_ended.into_iter().collect()
    }
}

impl Model for Lock {
    /// The holds, and the highest fence of a grant.
    type State = (Holds, u64);
    type Op = LockOp;

    fn step(&self, (holds, last): &Self::State, op: &LockOp, by: u64) -> Vec<Self::State> {
        let held = |fence: u64| holds.iter().any(|hold| hold.0 == fence);
        let grant = |fence: u64, writes: bool, last: u64| {
            let ways = self.make_room(holds, writes, by).into_iter();
            ways.map(|mut holds| {
                holds.push((fence, writes));
                holds.sort_unstable();
                (holds, last)
            })
            .collect()
        };
        match *op {
            LockOp::Grant(fence, writes) if fence > *last => grant(fence, writes, fence),
            LockOp::Grant(..) => Vec::new(),
            LockOp::Claim(fence, _) if held(fence) => vec![(holds.clone(), *last)],
            // It was granted before it was claimed, so its fence is not the newest.
            LockOp::Claim(fence, writes) => grant(fence, writes, *last),
            LockOp::Release(fence, true) if held(fence) => {
                vec![(holds.iter().copied().filter(|hold| hold.0 != fence).collect(), *last)]
            }
            LockOp::Renew(fence, true) if held(fence) => vec![(holds.clone(), *last)],
            LockOp::Release(_, true) | LockOp::Renew(_, true) => Vec::new(),
            LockOp::Release(fence, false) | LockOp::Renew(fence, false) => {
                let without =
                    if held(fence) { self.without(holds, fence, by) } else { Some(holds.clone()) };
                without.map(|holds| (holds, *last)).into_iter().collect()
            }
        }
    }
}
