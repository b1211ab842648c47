//! Runs simulated clusters: one seed, many, or without end.

use std::time::{Duration, Instant};

use clap::Parser;
use dflockd_sim::plan::{Plan, Switches};
use dflockd_sim::runner;
use mimalloc::MiMalloc;

// A seed makes and drops millions of small objects.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

#[derive(Parser)]
struct Arguments {
    /// Run this seed and tell what happens.
    #[arg(long)]
    seed: Option<u64>,
    /// How many seeds to run.
    #[arg(long, default_value_t = 1000)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 1)]
    from: u64,
    /// Threads.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Run until stopped.
    #[arg(long)]
    forever: bool,
    /// Switch kinds of faults and requests off while the failure stays.
    #[arg(long)]
    shrink: bool,
    /// Kinds of faults and requests to leave out.
    #[arg(long, value_delimiter = ',')]
    off: Vec<String>,
    /// Stop after so many seconds.
    #[arg(long)]
    seconds: Option<u64>,
    /// Tell everything.
    #[arg(long)]
    verbose: bool,
    /// Stop after so many failures.
    #[arg(long, default_value_t = 5)]
    failures: usize,
}

#[expect(clippy::print_stdout, reason = "a program for people")]
fn main() {
    let arguments = Arguments::parse();
    tracing_subscriber::fmt()
        .without_time()
        .with_target(false)
        .with_max_level(if arguments.verbose {
            tracing::Level::INFO
        } else {
            tracing::Level::ERROR
        })
        .with_writer(std::io::stderr)
        .init();
    let mut switches = Switches { off: arguments.off };
    if let Some(seed) = arguments.seed {
        if arguments.shrink {
            switches = runner::shrink(seed, &switches);
            println!("--seed {seed} --off {}", switches.off.join(","));
        }
        let report = runner::run(seed, &switches, arguments.verbose);
        println!("{:?}", Plan::new(seed, &switches));
        for line in report.trace.iter().rev().take(60).rev() {
            println!("{line}");
        }
        println!(
            "hash {:08x}, {} entries, {} answers, {} terms, {:.1} s",
            report.hash,
            report.entries,
            report.answered,
            report.terms,
            report.simulated as f64 / 1e9
        );
        if let Some((at, broken)) = report.broken {
            println!("BROKEN at {:.6}: {}: {}", at as f64 / 1e9, broken.property, broken.what);
            std::process::exit(1);
        }
        return;
    }
    let count = (!arguments.forever).then_some(arguments.seeds);
    let until = arguments.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let (from, jobs) = (arguments.from, arguments.jobs);
    let summary = runner::run_many(from, count, jobs, &switches, arguments.failures, until);
    println!("{}", summary.text());
    for (seed, broken) in &summary.failed {
        println!("{}: cargo run -p dflockd-sim --release -- --seed {seed}", broken.property);
    }
    if !summary.failed.is_empty() {
        std::process::exit(1);
    }
}
