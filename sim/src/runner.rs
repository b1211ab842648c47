//! Runs seeds, many at a time, and makes failures small.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::invariants::Broken;
use crate::plan::{Fault, Kind, Plan, Switches};
use crate::world::{Report, World};

/// Runs one seed.
#[must_use]
pub fn run(seed: u64, switches: &Switches, verbose: bool) -> Report {
    let plan = Plan::new(seed, switches);
    let world = World::new(plan, verbose);
    catch_unwind(AssertUnwindSafe(|| world.run())).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<String>()
            .cloned()
            .or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()))
            .unwrap_or_default();
        Report {
            hash: 0,
            broken: Some((0, Broken::new("panic", text))),
            simulated: 0,
            entries: 0,
            answered: 0,
            ordered: 0,
            terms: 0,
            trace: Vec::new(),
        }
    })
}

/// What many seeds came to.
#[derive(Debug, Default)]
pub struct Summary {
    /// How many ran.
    pub seeds: u64,
    /// Simulated time in nanoseconds.
    pub simulated: u64,
    /// Committed entries.
    pub entries: u64,
    /// Answered requests.
    pub answered: u64,
    /// Those of them that an order was found for.
    pub ordered: u64,
    /// Terms that had a leader.
    pub terms: u64,
    /// Time it took.
    pub real: Duration,
    /// The seed that took longest, and how long.
    pub slowest: (Duration, u64),
    /// Those that failed.
    pub failed: Vec<(u64, Broken)>,
}

/// Runs seeds from `from` on, `count` of them or without end, on several threads. Stops after `failures_max` failures.
#[must_use]
pub fn run_many(
    from: u64,
    count: Option<u64>,
    jobs: usize,
    switches: &Switches,
    failures_max: usize,
    until: Option<Instant>,
) -> Summary {
    let next = AtomicU64::new(from);
    let stop = AtomicBool::new(false);
    let summary = Mutex::new(Summary::default());
    let begin = Instant::now();
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed)
                    && until.is_none_or(|until| Instant::now() < until)
                {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if count.is_some_and(|count| seed >= from + count) {
                        break;
                    }
                    let begin = Instant::now();
                    let report = run(seed, switches, false);
                    let took = begin.elapsed();
                    let mut summary = summary.lock().expect("no panics here");
                    summary.seeds += 1;
                    summary.simulated += report.simulated;
                    summary.entries += report.entries;
                    summary.answered += report.answered;
                    summary.ordered += report.ordered;
                    summary.terms += report.terms as u64;
                    summary.slowest = summary.slowest.max((took, seed));
                    if let Some((_, broken)) = report.broken {
                        tracing::error!(
                            seed,
                            property = broken.property,
                            "{}",
                            broken.what.chars().take(600).collect::<String>()
                        );
                        summary.failed.push((seed, broken));
                        if summary.failed.len() >= failures_max {
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    let mut summary = summary.into_inner().expect("no panics here");
    summary.real = begin.elapsed();
    summary.failed.sort_by_key(|failure| failure.0);
    summary
}

impl Summary {
    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let real = self.real.as_secs_f64().max(1e-9);
        format!(
            "{} seeds in {real:.1} s ({:.0} seeds per hour), {:.1} simulated hours, \
             simulated:real {:.0}:1, {} entries, {} answers ({} put in order), {} terms, \
             slowest seed {} in {:.1} s, {} failures",
            self.seeds,
            self.seeds as f64 / real * 3600.0,
            self.simulated as f64 / 3.6e12,
            self.simulated as f64 / 1e9 / real,
            self.entries,
            self.answered,
            self.ordered,
            self.terms,
            self.slowest.1,
            self.slowest.0.as_secs_f64(),
            self.failed.len()
        )
    }
}

/// Switches kinds of faults and requests off as long as the same promise is broken.
#[must_use]
pub fn shrink(seed: u64, switches: &Switches) -> Switches {
    let property =
        |switches: &Switches| run(seed, switches, false).broken.map(|(_, broken)| broken.property);
    let wanted = property(switches);
    let mut smallest = switches.clone();
    let names = Fault::ALL.iter().map(|fault| fault.name());
    let names = names.chain(Kind::ALL.iter().map(|kind| kind.name())).chain(["long-life"]);
    for name in names {
        let mut smaller = smallest.clone();
        smaller.off.push(name.to_owned());
        if property(&smaller) == wanted {
            smallest = smaller;
        }
    }
    smallest
}
