//! The bug bank: each known mistake must be found, a few in each run and all on demand.
//!
//! `DFLOCKD_BUGS` says how many (`all`: all), `DFLOCKD_BUGS_FROM` with which to begin; by default the day decides.
#![cfg(feature = "bugs")]

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use dflockd_core::bugs::{self, Bug};
use dflockd_sim::plan::Switches;
use dflockd_sim::runner;

const SEEDS_MAX: u64 = 2000;
/// How many mistakes a run looks for, unless it is told another number.
const A_DAY: usize = 5;

#[test]
fn known_mistakes_are_found() {
    let days = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs() / 86_400;
    let from = std::env::var("DFLOCKD_BUGS_FROM").ok().and_then(|text| text.parse().ok());
    let from: usize = from.unwrap_or(usize::try_from(days).unwrap() * A_DAY);
    let count = match std::env::var("DFLOCKD_BUGS").as_deref() {
        Ok("all") => Bug::ALL.len(),
        Ok(text) => text.parse().unwrap(),
        Err(_) => A_DAY,
    };
    // The mistakes panic a lot.
    std::panic::set_hook(Box::new(|_| {}));
    let mut missed = Vec::new();
    for number in from..from + count {
        let bug = Bug::ALL[number % Bug::ALL.len()];
        let begin = Instant::now();
        match find(bug) {
            Some((seed, property)) => {
                let seconds = begin.elapsed().as_secs_f64();
                eprintln!("{bug:?}: seed {seed}, {property}, {seconds:.1} s");
            }
            None => missed.push(bug),
        }
    }
    assert!(missed.is_empty(), "not found within {SEEDS_MAX} seeds: {missed:?}");
}

/// The first seed that fails because of the mistake: one that fails without it, too, has found something else.
fn find(bug: Bug) -> Option<(u64, &'static str)> {
    let mut from = 1;
    while from <= SEEDS_MAX {
        bugs::set(Some(bug));
        let left = Some(SEEDS_MAX + 1 - from);
        let summary = runner::run_many(from, left, 2, &Switches::default(), 1, None);
        bugs::set(None);
        for (seed, broken) in &summary.failed {
            match runner::run(*seed, &Switches::default(), false).broken {
                None => return Some((*seed, broken.property)),
                Some((_, other)) => eprintln!("seed {seed} fails without {bug:?}: {other:?}"),
            }
        }
        from = summary.failed.last()?.0 + 1;
    }
    None
}
