//! A node that nothing has come to sleeps until the instant it has named, and does not name one after the other while
//! nothing changes: its thread would burn a core.

use dflockd_replica::types::RaftId;

use super::Broken;
use crate::plan::MS;

const WINDOW: u64 = 10 * MS;
/// A tick, leases that run out one after the other, and clocks that are rounded make a few.
const TURNS_MAX: u32 = 1000;

/// How often a node has looked lately though nothing had come.
#[derive(Default)]
pub struct Idle {
    since: u64,
    turns: u32,
}

impl Idle {
    /// A node looks though nothing has come.
    pub fn turn(&mut self, id: RaftId, now: u64) -> Result<(), Broken> {
        if now - self.since >= WINDOW {
            (self.since, self.turns) = (now, 0);
        }
        self.turns += 1;
        if self.turns <= TURNS_MAX {
            return Ok(());
        }
        let what = format!("n{id} looked {TURNS_MAX} times within 10 ms, and nothing had come");
        Err(Broken::new("idle", what))
    }
}
