//! An answer is what the committed log says, and respects real time: writes by their place in the log, reads by a value
//! the key had at an entry between what was known before the question and what the node had applied.

use dflockd_core::{Outcome, Refusal};
use dflockd_replica::OwnedQuery;

use super::Broken;
use crate::history::Asked;
use crate::op::Op;
use crate::oracle::Oracle;

/// Whether nobody knows what will become of the request.
#[must_use]
pub fn is_unknown(outcome: &Outcome) -> bool {
    *outcome == Outcome::Refused(Refusal::Forgotten)
}

/// A client was told something by a node that had applied so much. The entry the answer comes from.
pub fn check(
    asked: &Asked,
    outcome: &Outcome,
    applied: u64,
    oracle: &Oracle,
) -> Result<u64, Broken> {
    if is_unknown(outcome) || *outcome == Outcome::Refused(Refusal::Unavailable) {
        return Ok(0);
    }
    if let Op::Read(query) = &asked.op {
        return check_read(asked, query, outcome, applied, oracle);
    }
    let broken = |what: String| Err(Broken::new("answers", format!("{what}: {asked:?}")));
    let Some(session) = asked.session else { return broken("answered without a session".into()) };
    let answers = oracle.replies.get(&(session, asked.request));
    let Some(&(index, _)) = answers.and_then(|answers| answers.first()) else {
        return broken(format!("{outcome:?} is not in the log"));
    };
    let known = answers.is_some_and(|answers| answers.iter().any(|(_, known)| known == outcome));
    if !known {
        return broken(format!("{outcome:?}, the log says {answers:?}"));
    }
    if index < asked.floor {
        return broken(format!("{outcome:?} at {index}, though {} was known before", asked.floor));
    }
    Ok(index)
}

fn check_read(
    asked: &Asked,
    query: &OwnedQuery,
    outcome: &Outcome,
    applied: u64,
    oracle: &Oracle,
) -> Result<u64, Broken> {
    let (OwnedQuery::Counter(key)
    | OwnedQuery::Kv(key)
    | OwnedQuery::Entry(key)
    | OwnedQuery::Length(key)
    | OwnedQuery::Range(key, _, _)) = query;
    let versions = oracle.values.get(key).map_or(&[][..], |versions| versions);
    // The version that was current at the floor, and all later ones up to what the node had.
    let first = versions.partition_point(|(index, _)| *index <= asked.floor).saturating_sub(1);
    let versions = versions[first..].iter().take_while(|(index, _)| *index <= applied);
    let mut seen = Vec::new();
    for (index, value) in versions {
        if value == outcome {
            return Ok(*index);
        }
        seen.push((*index, value.clone()));
    }
    let nothing = matches!(outcome, Outcome::Empty | Outcome::Number(0));
    if seen.is_empty() && nothing {
        return Ok(0);
    }
    seen.truncate(8);
    let what = format!("a read at {applied} says {outcome:?}, possible were {seen:?}: {asked:?}");
    Err(Broken::new("linearizable-reads", what))
}
