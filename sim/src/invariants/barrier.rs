//! One `ok` of a barrier means as many as it counts.

use std::collections::BTreeMap;

use dflockd_core::{Outcome, RequestId, SessionId};

use super::Broken;
use crate::oracle::Step;

/// After each entry.
pub fn check(
    step: &Step<'_>,
    barriers: &BTreeMap<(SessionId, RequestId), (Vec<u8>, u32)>,
) -> Result<(), Broken> {
    let mut passed: BTreeMap<&(Vec<u8>, u32), usize> = BTreeMap::new();
    for &(session, request, ref outcome) in &step.touched.replies {
        if *outcome == Outcome::Done
            && let Some(barrier) = barriers.get(&(session, request))
        {
            *passed.entry(barrier).or_default() += 1;
        }
    }
    for ((key, count), who) in passed {
        if who % *count as usize != 0 {
            let key = key.escape_ascii();
            let what = format!("entry {}: {} of {count} passed {key}", step.index, who);
            return Err(Broken::new("barrier", what));
        }
    }
    Ok(())
}
