//! What comes out: rounds, their comparison, and how both are shown.

use std::fmt::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

use crate::numbers::Spread;

/// The figures of one round on one side.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Round {
    /// Operations within the window.
    pub(crate) ops: u64,
    /// Length of the window.
    pub(crate) seconds: f64,
    /// Operations per second.
    pub(crate) ops_per_s: f64,
    /// Median latency of an operation in microseconds.
    pub(crate) p50_us: f64,
    /// 99th percentile.
    pub(crate) p99_us: f64,
    /// 99.9th percentile.
    pub(crate) p999_us: f64,
    /// Processor time of the server per operation, if its process is known.
    pub(crate) server_us_per_op: Option<f64>,
    /// Processor time of the generator per operation.
    pub(crate) generator_us_per_op: f64,
    /// Share of one processor that the generator used.
    pub(crate) generator_load: f64,
    /// Resident memory of the server at the end.
    pub(crate) memory_bytes: Option<u64>,
    /// Growth of that memory per holder (w4).
    pub(crate) bytes_per_holder: Option<f64>,
    /// Grants that were checked for mutual exclusion, warm-up included.
    pub(crate) grants_checked: u64,
    /// Attempts that found the lock taken (servers without a queue).
    pub(crate) retries: u64,
    /// Grants per second to another client than the one before (w2): a client that takes the
    /// lock again at once does not count.
    pub(crate) hand_overs_per_s: Option<f64>,
    /// Jain's index over the clients.
    pub(crate) jain: f64,
    /// Operations of the client with the fewest.
    pub(crate) least: u64,
    /// Operations of the client with the most.
    pub(crate) most: u64,
    /// Share of grants that went to the request sent first (w2).
    pub(crate) in_order: Option<f64>,
    /// The most later requests that were granted before one (w2).
    pub(crate) passed_max: Option<u64>,
    /// What the server must never do.
    pub(crate) violations: Vec<String>,
}

/// All rounds of one side.
#[derive(Debug, Serialize)]
pub(crate) struct Lap {
    /// Its name.
    pub(crate) name: String,
    /// In the order in which they ran.
    pub(crate) rounds: Vec<Round>,
}

impl Lap {
    /// No rounds yet.
    pub(crate) fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), rounds: Vec::new() }
    }

    fn spread(&self, figure: impl Fn(&Round) -> Option<f64>) -> Option<Spread> {
        Spread::of(self.rounds.iter().filter_map(figure))
    }
}

/// The first side divided by another, round by round.
#[derive(Debug, Serialize)]
pub(crate) struct Ratio {
    /// The other side.
    pub(crate) to: String,
    /// Of operations per second: more is better.
    pub(crate) ops: Option<Spread>,
    /// Of hand-overs per second (w2): more is better.
    pub(crate) hand_overs: Option<Spread>,
    /// Of processor time per operation: less is better.
    pub(crate) server_cpu: Option<Spread>,
}

/// Sides that ran in turn under the same load.
#[derive(Debug, Serialize)]
pub(crate) struct Race {
    /// The workload.
    pub(crate) workload: String,
    /// What it does.
    pub(crate) description: String,
    /// The first is ours.
    pub(crate) sides: Vec<Lap>,
    /// The first to each other.
    pub(crate) ratios: Vec<Ratio>,
}

impl Race {
    /// Compares the first side with the others.
    pub(crate) fn new(workload: &str, description: String, sides: Vec<Lap>) -> Self {
        let ratios = match sides.split_first() {
            Some((first, others)) => others.iter().map(|other| compare(first, other)).collect(),
            None => Vec::new(),
        };
        Self { workload: workload.to_owned(), description, sides, ratios }
    }

    /// What servers did that they must never do.
    pub(crate) fn violations(&self) -> impl Iterator<Item = String> {
        self.sides.iter().flat_map(|side| {
            let rounds = side.rounds.iter();
            rounds.flat_map(|round| &round.violations).map(|text| format!("{}: {text}", side.name))
        })
    }

    /// For people.
    pub(crate) fn text(&self) -> String {
        let mut text = format!("{}: {}\n", self.workload, self.description);
        let _ = writeln!(
            text,
            "{:<24} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>9}",
            "", "ops/s", "p50 µs", "p99 µs", "p99.9 µs", "server µs", "generator", "memory"
        );
        for side in &self.sides {
            let cell = |figure: &dyn Fn(&Round) -> Option<f64>, digits: usize| {
                side.spread(figure).map_or("-".to_owned(), |at| format!("{:.digits$}", at.median))
            };
            let _ = writeln!(
                text,
                "{:<24} {:>9} {:>9} {:>9} {:>9} {:>10} {:>10} {:>9}",
                side.name,
                cell(&|round| Some(round.ops_per_s), 0),
                cell(&|round| Some(round.p50_us), 0),
                cell(&|round| Some(round.p99_us), 0),
                cell(&|round| Some(round.p999_us), 0),
                cell(&|round| round.server_us_per_op, 2),
                cell(&|round| Some(round.generator_us_per_op), 2),
                side.spread(|round| Some(round.memory_bytes? as f64 / 1e6))
                    .map_or("-".to_owned(), |at| format!("{:.1} MB", at.max)),
            );
        }
        for side in &self.sides {
            side.describe(&mut text);
        }
        for ratio in &self.ratios {
            let show = |spread: Option<Spread>| {
                spread.map_or("-".to_owned(), |at| {
                    format!("{:.2} ({:.2} to {:.2})", at.median, at.min, at.max)
                })
            };
            let hand_overs = match ratio.hand_overs {
                Some(_) => format!("hand-overs {}, ", show(ratio.hand_overs)),
                None => String::new(),
            };
            let _ = writeln!(
                text,
                "{} / {}: ops {}, {hand_overs}server CPU per op {}",
                self.sides[0].name,
                ratio.to,
                show(ratio.ops),
                show(ratio.server_cpu)
            );
        }
        text
    }
}

impl Lap {
    fn describe(&self, text: &mut String) {
        let Some(last) = self.rounds.last() else {
            return;
        };
        let _ = write!(text, "{}:", self.name);
        if let Some(load) = self.spread(|round| Some(round.generator_load)) {
            let _ = write!(text, " generator {:.0} % of a core,", load.median * 100.0);
        }
        // Only the first round starts from a server that never had holders.
        if let Some(bytes) = self.rounds[0].bytes_per_holder {
            let _ = write!(text, " {bytes:.0} bytes per holder,");
        }
        let checked: u64 = self.rounds.iter().map(|round| round.grants_checked).sum();
        if checked > 0 {
            let _ = write!(
                text,
                " {checked} grants checked, Jain {:.4}, clients {} to {} ops,",
                last.jain, last.least, last.most
            );
        }
        if let Some(rate) = self.spread(|round| round.hand_overs_per_s) {
            let _ = write!(text, " {:.0} hand-overs/s,", rate.median);
        }
        let retries: u64 = self.rounds.iter().map(|round| round.retries).sum();
        if retries > 0 {
            let _ = write!(text, " {retries} attempts in vain,");
        }
        if let (Some(share), Some(passed)) = (last.in_order, last.passed_max) {
            let _ = write!(
                text,
                " {:.2} % in order of sending, at most {passed} passed one,",
                share * 100.0
            );
        }
        let violations: usize = self.rounds.iter().map(|round| round.violations.len()).sum();
        let _ = match violations {
            0 => writeln!(text, " no violation"),
            count => writeln!(text, " {count} VIOLATIONS"),
        };
    }
}

fn compare(first: &Lap, other: &Lap) -> Ratio {
    let of = |figure: &dyn Fn(&Round) -> Option<f64>| {
        let pairs = first.rounds.iter().zip(&other.rounds);
        Spread::of(pairs.filter_map(|(ours, theirs)| Some(figure(ours)? / figure(theirs)?)))
    };
    Ratio {
        to: other.name.clone(),
        ops: of(&|round| Some(round.ops_per_s)),
        hand_overs: of(&|round| round.hand_overs_per_s),
        server_cpu: of(&|round| round.server_us_per_op),
    }
}

/// The bar on the terminal; without a terminal it does nothing.
#[derive(Debug)]
pub(crate) struct Progress {
    bar: ProgressBar,
    started_at: Instant,
}

impl Progress {
    /// For a run of about this length.
    pub(crate) fn new(expected: Duration) -> Self {
        let bar = ProgressBar::new(u64::try_from(expected.as_millis()).unwrap_or(u64::MAX));
        if let Ok(style) = ProgressStyle::with_template("{bar:40} {percent:>3} % {msg}") {
            bar.set_style(style);
        }
        Self { bar, started_at: Instant::now() }
    }

    /// Says what is going on.
    pub(crate) fn step(&self, text: String) {
        self.bar.set_message(text);
        self.tick();
    }

    /// Moves the bar; drawing is limited to a few times per second by the bar itself.
    pub(crate) fn tick(&self) {
        let elapsed = u64::try_from(self.started_at.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.bar.set_position(elapsed.min(self.bar.length().unwrap_or(u64::MAX)));
    }

    /// Sleeps until then, or until `stop`.
    pub(crate) fn wait_until(&self, then: Instant, stop: &AtomicBool) {
        while !stop.load(Ordering::Relaxed) {
            let left = then.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.tick();
            thread::sleep(left.min(Duration::from_millis(100)));
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lap(name: &str, rates: &[f64], cpu: f64) -> Lap {
        let round =
            |&ops_per_s: &f64| Round { ops_per_s, server_us_per_op: Some(cpu), ..Round::default() };
        Lap { name: name.into(), rounds: rates.iter().map(round).collect() }
    }

    #[test]
    fn ratio_is_taken_round_by_round() {
        let sides = vec![lap("a", &[10.0, 20.0, 30.0], 4.0), lap("b", &[10.0, 10.0, 10.0], 8.0)];
        let race = Race::new("w1", String::new(), sides);
        let ops = race.ratios[0].ops.unwrap();
        assert_eq!((ops.median, ops.min, ops.max), (2.0, 1.0, 3.0));
        assert_eq!(race.ratios[0].server_cpu.unwrap().median, 0.5);
        assert!(race.text().contains("a / b: ops 2.00 (1.00 to 3.00), server CPU per op 0.50"));
    }

    #[test]
    fn violations_are_collected() {
        let mut side = lap("a", &[1.0], 1.0);
        side.rounds[0].violations.push("two holders".into());
        let race = Race::new("w2", String::new(), vec![side]);
        assert_eq!(race.violations().collect::<Vec<_>>(), ["a: two holders"]);
    }
}
