//! Breaks a cluster of real servers for a while. Exit status 1: a promise was broken; 3: the harness failed.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use dflockd_chaos::{Options, run};
use dflockd_testkit::process::set_dflockd;

#[derive(Parser)]
struct Arguments {
    /// Members of the cluster.
    #[arg(long, default_value_t = 3)]
    nodes: usize,
    /// How long things are broken, in all acts together.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Where chance begins.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long one act lasts: then all is healed and checked.
    #[arg(long, default_value_t = 45)]
    act_seconds: u64,
    /// The server.
    #[arg(long, default_value = "target/release/dflockd")]
    binary: PathBuf,
    /// Say nothing while it runs.
    #[arg(long)]
    quiet: bool,
}

#[expect(clippy::print_stdout, reason = "a program for people")]
fn main() -> ExitCode {
    let Arguments { nodes, seconds, seed, act_seconds, binary, quiet } = Arguments::parse();
    let Ok(path) = binary.canonicalize() else {
        eprintln!("dflockd-chaos: there is no server at {}", binary.display());
        return ExitCode::from(3);
    };
    set_dflockd(path);
    if !(1..=7).contains(&nodes) || act_seconds == 0 {
        eprintln!("dflockd-chaos: 1 to 7 nodes, acts of a second or more");
        return ExitCode::from(3);
    }
    let report = run(&Options { nodes, seconds, seed, act_seconds, is_verbose: !quiet });
    println!("{nodes} nodes, seed {seed}: {}", report.text());
    for (what, count) in &report.counts {
        println!("{count:>8} {what}");
    }
    if report.broken.is_empty() {
        return ExitCode::SUCCESS;
    }
    for broken in &report.broken {
        println!("{}: {}", if broken.is_harness { "HARNESS" } else { "BROKEN" }, broken.what);
    }
    if let Some(dir) = &report.kept_in {
        println!("data and logs: {}", dir.display());
    }
    println!(
        "again: cargo run --release -p dflockd-chaos -- --nodes {nodes} --seconds {seconds} --seed {seed} \
         --act-seconds {act_seconds} --binary {}",
        binary.display()
    );
    let only_harness = report.broken.iter().all(|broken| broken.is_harness);
    ExitCode::from(if only_harness { 3 } else { 1 })
}
