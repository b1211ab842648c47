//! Nobody waits at the head of a queue while there is room.

use super::Broken;
use crate::oracle::Step;

/// After each entry.
pub fn check(step: &Step<'_>) -> Result<(), Broken> {
    for ((_, key), lock) in step.after {
        let Some(head) = lock.queue.first() else { continue };
        let room = match lock.slots {
            Some(limit) => lock.holders.len() < limit as usize,
            None if head.2 => lock.holders.is_empty(),
            None => lock.holders.iter().all(|holder| !holder.2),
        };
        if room {
            let what =
                format!("entry {}: {} waits for {}", step.index, head.0.0, key.escape_ascii());
            return Err(Broken::new("no-lost-wakeup", what));
        }
    }
    Ok(())
}
