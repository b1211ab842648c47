//! `dflockctl` and `dflockd` as real processes.

#![cfg(test)]

mod bad_day;
mod bench;
mod cluster;
mod command;
mod contend;
mod identity;
mod lock;
mod loss;
mod manual;
mod query;
mod scripts;
mod settings;
mod terminal;
mod values;
mod wire;
