//! The fences of a key's grants grow, even when the key was forgotten in between.

use std::collections::BTreeMap;

use dflockd_core::Fence;

use super::Broken;
use crate::oracle::Step;

/// The highest fence of each key.
#[derive(Default)]
pub struct Fences {
    highest: BTreeMap<(u8, Vec<u8>), Fence>,
}

impl Fences {
    /// The highest fence of all keys.
    #[must_use]
    pub fn highest(&self) -> Fence {
        self.highest.values().copied().max().unwrap_or(Fence(0))
    }

    /// The highest fence of each key.
    #[must_use]
    pub fn by_key(&self) -> BTreeMap<Vec<u8>, u64> {
        self.highest.iter().map(|((_, key), fence)| (key.clone(), fence.0)).collect()
    }

    /// After each entry.
    pub fn check(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        for (name, after) in step.after {
            let before = step.before.get(name);
            let is_new = |fence: Fence| {
                before.is_none_or(|before| before.holders.iter().all(|known| known.1 != fence))
            };
            let highest = self.highest.entry(name.clone()).or_insert(Fence(0));
            for &(_, fence, _) in after.holders.iter().filter(|holder| is_new(holder.1)) {
                if fence <= *highest {
                    let key = name.1.escape_ascii();
                    let what = format!(
                        "entry {}: {key} was granted with {fence:?} after {highest:?}",
                        step.index
                    );
                    return Err(Broken::new("fence-order", what));
                }
                *highest = fence;
            }
        }
        Ok(())
    }
}
