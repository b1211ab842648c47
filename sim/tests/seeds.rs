//! Many seeds, some of them twice, and those that once failed.

use std::time::Instant;

use dflockd_sim::plan::Switches;
use dflockd_sim::runner;

fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(otherwise)
}

#[test]
fn promises_are_kept() {
    let from = number("DFLOCKD_SIM_FROM", 1);
    let count = number("DFLOCKD_SEEDS", 500);
    let begin = Instant::now();
    let summary = runner::run_many(from, Some(count), 2, &Switches::default(), 5, None);
    eprintln!("{}", summary.text());
    for (seed, broken) in &summary.failed {
        eprintln!("{}: {}", broken.property, broken.what);
        eprintln!("    cargo run -p dflockd-sim --release -- --seed {seed}");
    }
    assert!(summary.failed.is_empty(), "{} of {} seeds fail", summary.failed.len(), summary.seeds);
    assert_eq!(summary.seeds, count);
    assert!(
        summary.answered > count * 50,
        "the clients did next to nothing in {:?}",
        begin.elapsed()
    );
    let few = summary.ordered < summary.answered / 10;
    assert!(count < 100 || !few, "few histories were looked at: {}", summary.text());
}

#[test]
fn same_seed_same_history() {
    for seed in 1..=20 {
        let first = runner::run(seed, &Switches::default(), false);
        let second = runner::run(seed, &Switches::default(), false);
        assert_eq!(first.hash, second.hash, "seed {seed}");
        assert_eq!(first.trace, second.trace, "seed {seed}");
    }
}

/// Each line of a scenario is a seed, then the kinds to switch off.
#[test]
fn old_failures_stay_away() {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/scenarios");
    let mut files: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|file| file.unwrap().path()).collect();
    files.sort();
    assert!(!files.is_empty());
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        for line in text.lines().filter(|line| !line.starts_with('#') && !line.is_empty()) {
            let mut words = line.split_whitespace();
            let seed = words.next().unwrap().parse().unwrap();
            let off = words
                .next()
                .map_or_else(Vec::new, |off| off.split(',').map(str::to_owned).collect());
            let report = runner::run(seed, &Switches { off }, false);
            assert_eq!(report.broken, None, "{}: {line}", file.display());
        }
    }
}
