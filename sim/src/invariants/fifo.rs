//! Grants follow the order of the queue, and nobody overtakes.

use super::Broken;
use crate::oracle::Step;

/// After each entry.
pub fn check(step: &Step<'_>) -> Result<(), Broken> {
    for (name, before) in step.before {
        let Some(after) = step.after.get(name) else { continue };
        let has_twins = |queue: &[_]| {
            let mut places = queue.to_vec();
            places.sort_unstable();
            places.windows(2).any(|pair| pair[0] == pair[1])
        };
        if has_twins(&before.queue) || has_twins(&after.queue) {
            // One session asked twice at the same instant: nobody can tell its places apart.
            continue;
        }
        let old = |place: &(_, u64, _)| before.queue.iter().position(|known| known == place);
        // A place of this very instant may be one that this entry has made: its session can have had another one since
        // an entry of the same instant, and that is granted or given up by now.
        let is_certain = |place: &&(_, u64, _)| place.1 < step.now;
        let places: Vec<usize> = after.queue.iter().filter(is_certain).filter_map(old).collect();
        let broken = |what: &str| {
            let key = name.1.escape_ascii();
            Err(Broken::new(
                "fifo",
                format!("entry {}: {key}: {what}: {before:?} {after:?}", step.index),
            ))
        };
        if !places.is_sorted() {
            return broken("the queue changed its order");
        }
        let Some(&first_left) = places.first() else { continue };
        let granted = after
            .holders
            .iter()
            .filter(|holder| !before.holders.iter().any(|known| known.1 == holder.1));
        for holder in granted {
            let ahead = &before.queue[..first_left];
            if !ahead.iter().any(|waiter| (waiter.0, waiter.2) == (holder.0, holder.2)) {
                return broken("somebody was granted before the head of the queue");
            }
        }
    }
    Ok(())
}
