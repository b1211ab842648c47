//! The scripts of the line protocol through gRPC.

use dflockd_testkit::script::list::Difference;
use dflockd_testkit::{each_script, play_through};
use dflockd_wire::Op;

use super::play::Played;

each_script!(play_through, Played);

/// Whether a call stands for a request. What `stats` tells are messages here, and an operator's token is metadata.
pub(super) fn has_call(op: Op) -> bool {
    !matches!(op, Op::Stats | Op::ForceRelease)
}

pub(super) const PLAYED_MIN: usize = 140;

pub(super) const NOT_THE_SAME: &[Difference] = &[(
    "elections",
    "observe while somebody leads: told at once; repeating is free and may repeat the line",
    "nothing is repeated here (promise 29)",
)];
