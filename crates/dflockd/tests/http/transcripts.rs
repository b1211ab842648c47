//! The scripts of the line protocol through HTTP.

use dflockd_testkit::script::list::Difference;
use dflockd_testkit::{each_script, play_through};
use dflockd_wire::{Frame, Op};

use super::play::Played;

each_script!(play_through, Played);

/// Whether a route stands for a request. JSON and queries carry text only; keys in a path may have any bytes.
pub(super) fn has_route(op: Op, frame: &Frame<'_>) -> bool {
    let in_query = matches!(op, Op::Listen | Op::Unlisten | Op::Watch | Op::Unwatch);
    let is_text = |bytes: &[u8]| std::str::from_utf8(bytes).is_ok();
    is_text(frame.arg) && (!in_query || is_text(frame.key))
}

pub(super) const PLAYED_MIN: usize = 140;

pub(super) const NOT_THE_SAME: &[Difference] = &[
    (
        "rw",
        "a renewal after the lease ended says so",
        "a renewal has one refusal here: 404 `not_held`, whatever ended the hold",
    ),
    ("lifecycle", "ids of connections count from 1 and are never used again", IDS),
    ("signals", "at most one ungrouped copy per connection", PATTERNS),
    ("stats", "an election is a lock", IDS),
    (
        "stats",
        "channels",
        "a watch is a place in the history here, not a subscription that is counted",
    ),
    ("watches", "lists", "a pop that may wait for no time at all is one that does not wait"),
    ("watches", "patterns, and one line per event however many of them match", PATTERNS),
];

const IDS: &str = "it expects the ids of sessions, of which the server has one itself";
const PATTERNS: &str =
    "a stream has one pattern; who has several streams gets what each of them is told";
