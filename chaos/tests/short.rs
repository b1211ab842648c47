//! A short piece of chaos for each size of a cluster. `dflockd-chaos` runs for longer.

use dflockd_chaos::{Options, run};

/// One after the other: each has a machine's work to do.
#[test]
fn promises_are_kept_while_processes_are_killed_stopped_and_cut_off() {
    for nodes in [1, 3, 5] {
        let options = Options { nodes, seconds: 20, seed: 1, act_seconds: 20, is_verbose: false };
        let report = run(&options);
        println!("{nodes} nodes: {}", report.text());
        assert!(report.broken.is_empty(), "{options:?}: {report:#?}");
        assert!(report.requests > 100 && report.ordered > 100, "{nodes} nodes: {report:#?}");
    }
}
