//! Never more holders than a lock has room for.

use super::Broken;
use crate::oracle::Step;

/// After each entry.
pub fn check(step: &Step<'_>) -> Result<(), Broken> {
    for ((_, key), lock) in step.after {
        let writers = lock.holders.iter().filter(|holder| holder.2).count();
        let fits = match lock.slots {
            Some(limit) => lock.holders.len() <= limit as usize,
            None => writers == 0 || lock.holders.len() == 1,
        };
        if !fits {
            let what =
                format!("entry {}: {} has {:?}", step.index, key.escape_ascii(), lock.holders);
            return Err(Broken::new("state-exclusion", what));
        }
    }
    Ok(())
}
