//! Sums that must come out: increments exactly once, items of lists neither lost nor doubled.

use std::collections::{BTreeMap, BTreeSet};

use dflockd_core::{Command, Outcome, Query, command};

use super::Broken;
use crate::history::{End, History};
use crate::op::Op;
use crate::oracle::Oracle;

/// When everything is over.
pub fn check(history: &History, oracle: &Oracle) -> Result<(), Broken> {
    counters(history, oracle)?;
    lists(history, oracle)
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a counter has one kind of answer")]
fn counters(history: &History, oracle: &Oracle) -> Result<(), Broken> {
    let mut sums: BTreeMap<&[u8], (i64, i64)> = BTreeMap::new();
    for asked in &history.asked {
        let Some(Command::Add(command::Add { key, .. })) = asked.op.command() else { continue };
        let (sure, perhaps) = sums.entry(key).or_default();
        match &asked.end {
            End::Told(_, Outcome::Number(_)) => *sure += 1,
            End::Open | End::Unknown => *perhaps += 1,
            End::Told(..) | End::Refused => {}
        }
    }
    let Some(store) = oracle.machine().store() else { return Ok(()) };
    for (key, (sure, perhaps)) in sums {
        let value = match store.read(Query::Counter { key }, oracle.machine().now()) {
            Outcome::Number(value) => value,
            other => return Err(Broken::new("totals", format!("a counter is {other:?}"))),
        };
        let before = history.before.counters.get(key).copied().unwrap_or(0);
        let value = value - before;
        if value < sure || value > sure + perhaps {
            let key = key.escape_ascii();
            let what = format!("{key} is {value}, {sure} increments and perhaps {perhaps} more");
            return Err(Broken::new("totals", what));
        }
    }
    Ok(())
}

#[expect(clippy::wildcard_enum_match_arm, reason = "a list has few kinds of answers")]
fn lists(history: &History, oracle: &Oracle) -> Result<(), Broken> {
    let Some(store) = oracle.machine().store() else { return Ok(()) };
    let mut pushed: BTreeMap<&[u8], (&[u8], bool)> = BTreeMap::new();
    for (key, items) in &history.before.lists {
        pushed.extend(items.iter().map(|item| (&**item, (&**key, true))));
    }
    let mut told: BTreeMap<Vec<u8>, usize> = BTreeMap::new();
    for (at, asked) in history.asked.iter().enumerate() {
        match (asked.op.command(), &asked.end) {
            (
                Some(Command::Push(command::Push { key, value, .. })),
                End::Told(_, Outcome::Number(_)),
            ) => {
                pushed.insert(value, (key, true));
            }
            (Some(Command::Push(command::Push { key, value, .. })), End::Open | End::Unknown) => {
                pushed.insert(value, (key, false));
            }
            (Some(Command::Pop(_)), End::Told(_, Outcome::Popped { value, .. })) => {
                if let Some(other) = told.insert(value.to_vec(), at) {
                    let what = format!(
                        "{value:?} was popped twice: {:?} and {asked:?}",
                        history.asked[other]
                    );
                    return Err(Broken::new("totals", what));
                }
                let is_it = |op: &Op| {
                    let push = op.command();
                    matches!(push, Some(Command::Push(push)) if *push.value == **value)
                };
                let known = pushed.contains_key(&**value)
                    || history.asked.iter().any(|other| is_it(&other.op));
                if !known {
                    return Err(Broken::new("totals", format!("{value:?} was never pushed")));
                }
            }
            _ => {}
        }
    }
    // An item that went to somebody who could not be told is given away: default pops are at most once.
    let given: BTreeSet<&[u8]> = oracle
        .replies
        .values()
        .flatten()
        .filter_map(|(_, outcome)| match outcome {
            Outcome::Popped { value, .. } => Some(&**value),
            _ => None,
        })
        .collect();
    let mut left: BTreeMap<&[u8], Vec<dflockd_core::Bytes>> = BTreeMap::new();
    for (value, (key, sure)) in &pushed {
        let items = left.entry(key).or_insert_with(|| {
            let query = Query::Range { key, start: 0, stop: -1 };
            match store.read(query, oracle.machine().now()) {
                Outcome::Items(items) | Outcome::Part(items) => items,
                _ => Vec::new(),
            }
        });
        let count = items.iter().filter(|item| ***item == **value).count();
        let popped = told.contains_key(*value);
        if count > 1 || count == 1 && popped {
            return Err(Broken::new("totals", format!("{} is there again", value.escape_ascii())));
        }
        if *sure && count == 0 && !given.contains(value) {
            return Err(Broken::new("totals", format!("{} is lost", value.escape_ascii())));
        }
    }
    Ok(())
}
