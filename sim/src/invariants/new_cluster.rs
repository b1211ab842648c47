//! A cluster that begins again, from a backup or from the one member that is left, is another cluster: nobody of the
//! old one is listened to or owns anything in it, its fences are above all that were given out, and the values are
//! those of the entry that it says. That nothing is granted until old leases have ended is checked with each entry.

use std::collections::BTreeSet;

use dflockd_core::{SessionId, Timestamp};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::Bits128;

use super::Broken;
use crate::oracle::{self, Oracle};

/// Looks at the state that a new cluster begins with. `old` is the log of the former one, `known` are the ids of all
/// clusters there were. If the state is that of an entry of `old`, `index` names it.
pub fn check(
    state: &Machine,
    old: &Oracle,
    known: &BTreeSet<Bits128>,
    index: Option<u64>,
) -> Result<(), Broken> {
    let broken = |what: String| Err(Broken::new("new-cluster", what));
    if known.contains(&state.cluster()) {
        return broken("the new cluster has the id of another one".into());
    }
    let Some(store) = state.store() else { return broken("the new cluster has no state".into()) };
    store.check_invariants();
    let sessions = store.session_ids(SessionId(0)..=SessionId(u64::MAX)).len();
    if sessions > 0 {
        return broken(format!("{sessions} sessions of the old cluster are left"));
    }
    let survey = store.survey(state.now(), 1, usize::MAX);
    let owned = |lock: &&dflockd_core::LockView| lock.holders_total > 0 || lock.waiters_total > 0;
    if let Some(lock) = survey.locks.iter().find(owned) {
        return broken(format!("a lock of the old cluster is held or waited for: {lock:?}"));
    }
    let (next, highest) = (state.fence_next(), old.highest_fence());
    if next <= highest.0 {
        return broken(format!("the next fence is {next}, though {highest:?} was given out"));
    }
    let Some(index) = index else { return Ok(()) };
    let now: Timestamp = state.now();
    for key in old.keys() {
        let (value, was) = (oracle::read(store, key, now), old.value_at(key, index));
        if was.is_some_and(|was| *was != value) {
            let key = key.escape_ascii();
            return broken(format!("{key} is {value:?}, and was {was:?} at entry {index}"));
        }
    }
    Ok(())
}
