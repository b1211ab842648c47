//! `dflockctl` and `dflockd` as real processes.

#![cfg(test)]

#[path = "process/bad_day.rs"]
mod bad_day;
#[path = "process/bench.rs"]
mod bench;
#[path = "process/cluster.rs"]
mod cluster;
#[path = "process/contend.rs"]
mod contend;
#[path = "process/lock.rs"]
mod lock;
#[path = "process/look.rs"]
mod look;
#[path = "process/loss.rs"]
mod loss;
#[path = "process/manual.rs"]
mod manual;
#[path = "process/scripts.rs"]
mod scripts;
#[path = "process/settings.rs"]
mod settings;
#[path = "process/support.rs"]
mod support;
#[path = "process/terminal.rs"]
mod terminal;
#[path = "process/values.rs"]
mod values;
