//! `kv`, `counter`, `list`, `barrier`.

use std::time::Duration;

use clap::Subcommand;
use serde_json::json;

use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status};
use crate::output;
use crate::signals::Signals;
use crate::time;

#[derive(Debug, Subcommand)]
pub(crate) enum KvVerb {
    /// Print the value; status 1 if there is none.
    Get {
        key: String,
        #[command(flatten)]
        common: Common,
    },
    /// Store a value.
    Set {
        key: String,
        value: String,
        /// Delete it after so long.
        #[arg(long, value_name = "TIME", value_parser = time::parse_some)]
        ttl: Option<Duration>,
        #[command(flatten)]
        common: Common,
    },
    /// Delete the value, if there is one.
    Del {
        key: String,
        #[command(flatten)]
        common: Common,
    },
    /// Store a value if the present one is OLD; status 1 if it is not.
    Cas {
        key: String,
        /// The present value; empty ('') if there must be none.
        old: String,
        new: String,
        /// Delete it after so long.
        #[arg(long, value_name = "TIME", value_parser = time::parse_some)]
        ttl: Option<Duration>,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum CounterVerb {
    /// Print the value; 0 if it was never set.
    Get {
        key: String,
        #[command(flatten)]
        common: Common,
    },
    /// Add a number, and print the new value.
    Add {
        key: String,
        #[arg(allow_hyphen_values = true, default_value = "1")]
        delta: i64,
        #[command(flatten)]
        common: Common,
    },
    /// Set the value.
    Set {
        key: String,
        #[arg(allow_hyphen_values = true)]
        value: i64,
        #[command(flatten)]
        common: Common,
    },
}

/// Which end of a list.
#[derive(Debug, clap::Args)]
pub(crate) struct End {
    /// At the left end.
    #[arg(long, conflicts_with = "right")]
    left: bool,
    /// At the right end.
    #[arg(long)]
    right: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ListVerb {
    /// Put items at an end, the right one if not said otherwise; prints the length.
    Push {
        key: String,
        #[arg(required = true)]
        items: Vec<String>,
        #[command(flatten)]
        end: End,
        #[command(flatten)]
        common: Common,
    },
    /// Take an item from an end, the left one if not said otherwise; status 1 if there is none.
    Pop {
        key: String,
        #[command(flatten)]
        end: End,
        /// Wait so long for an item; status 75 if none came.
        #[arg(long, value_name = "TIME", value_parser = time::parse)]
        wait: Option<Duration>,
        #[command(flatten)]
        common: Common,
    },
    /// Print how many items there are.
    Len {
        key: String,
        #[command(flatten)]
        common: Common,
    },
    /// Print items, one on a line; negative positions count from the right.
    Range {
        key: String,
        #[arg(allow_hyphen_values = true, default_value = "0")]
        start: i64,
        #[arg(allow_hyphen_values = true, default_value = "-1")]
        stop: i64,
        #[command(flatten)]
        common: Common,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct BarrierArgs {
    /// The name of the barrier.
    key: String,
    /// How many must arrive.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Wait so long at most, then end with status 75; for ever if not given.
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    wait: Option<Duration>,
    #[command(flatten)]
    common: Common,
}

/// `kv`.
pub(crate) async fn kv(verb: KvVerb, outer: &Settings) -> Result<Status, Failure> {
    match verb {
        KvVerb::Get { key, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let value = client.kv(key.as_str()).get().await?;
            print_found(&key, value, json, Status::No)
        }
        KvVerb::Set { key, value, ttl, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            client.kv(key.as_str()).set(value.as_bytes(), ttl).await?;
            print_done(&key, json)
        }
        KvVerb::Del { key, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            client.kv(key.as_str()).delete().await?;
            print_done(&key, json)
        }
        KvVerb::Cas { key, old, new, ttl, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let old = Some(old.as_bytes()).filter(|old| !old.is_empty());
            let swapped = client.kv(key.as_str()).compare_and_set(old, new.as_bytes(), ttl).await?;
            if json {
                output::json(&json!({ "key": key, "swapped": swapped }));
            }
            if !swapped {
                let key = output::clean(&key);
                let message = format!("{key} has another value; look with `dflockctl kv get`");
                return Err(Failure::new(Status::No, message));
            }
            Ok(Status::Ok)
        }
    }
}

/// `counter`.
pub(crate) async fn counter(verb: CounterVerb, outer: &Settings) -> Result<Status, Failure> {
    match verb {
        CounterVerb::Get { key, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let value = client.counter(key.as_str()).get().await?;
            print_value(&key, value, json)
        }
        CounterVerb::Add { key, delta, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let value = client.counter(key.as_str()).add(delta).await?;
            print_value(&key, value, json)
        }
        CounterVerb::Set { key, value, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            client.counter(key.as_str()).set(value).await?;
            print_done(&key, json)
        }
    }
}

/// `list`.
pub(crate) async fn list(verb: ListVerb, outer: &Settings) -> Result<Status, Failure> {
    match verb {
        ListVerb::Push { key, items, end, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let list = client.list(key.as_str());
            let mut length = 0;
            for item in &items {
                length = if end.left {
                    list.push_left(item.as_bytes()).await?
                } else {
                    list.push_right(item.as_bytes()).await?
                };
            }
            if json {
                output::json(&json!({ "key": key, "length": length }));
            } else {
                output::line(length.to_string());
            }
            Ok(Status::Ok)
        }
        ListVerb::Pop { key, end, wait, common } => {
            let mut signals = Signals::listen()?;
            let json = common.output.json;
            let connecting = async { Ok(common.connect(&key, outer).await?.0) };
            let client = signals.connect(connecting).await?;
            let list = client.list(key.as_str());
            let popping = async {
                match (end.right, wait) {
                    (false, None) => list.pop_left().await,
                    (true, None) => list.pop_right().await,
                    (false, Some(wait)) => list.pop_left_wait(wait).await,
                    (true, Some(wait)) => list.pop_right_wait(wait).await,
                }
            };
            let item = signals.unless_interrupted(&client, popping).await??;
            let nothing = if wait.is_some() { Status::NotAcquired } else { Status::No };
            print_found(&key, item, json, nothing)
        }
        ListVerb::Len { key, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let length = client.list(key.as_str()).len().await?;
            if json {
                output::json(&json!({ "key": key, "length": length }));
            } else {
                output::line(length.to_string());
            }
            Ok(Status::Ok)
        }
        ListVerb::Range { key, start, stop, common } => {
            let (client, json) = common.connect(&key, outer).await?;
            let items = client.list(key.as_str()).range(start, stop).await?;
            if json {
                output::json(&json!(items));
            } else {
                items.iter().for_each(output::line);
            }
            Ok(Status::Ok)
        }
    }
}

/// `barrier`.
pub(crate) async fn barrier(args: BarrierArgs, outer: &Settings) -> Result<Status, Failure> {
    let BarrierArgs { key, count, wait, common } = args;
    let mut signals = Signals::listen()?;
    let json = common.output.json;
    let connecting = async { Ok(common.connect(&key, outer).await?.0) };
    let client = signals.connect(connecting).await?;
    let barrier = client.barrier(key.as_str(), count);
    let waiting = barrier.wait(wait.unwrap_or(Duration::MAX));
    let passed = signals.unless_interrupted(&client, waiting).await??;
    if json {
        output::json(&json!({ "key": key, "passed": passed }));
    }
    if passed {
        return Ok(Status::Ok);
    }
    let key = output::clean(&key);
    Err(Failure::not_acquired(format!("not all {count} arrived at {key} in time; try again")))
}

/// A value for pipes: its bytes as they are. None is a status without a word, as with grep.
fn print_found(
    key: &str,
    value: Option<Vec<u8>>,
    json: bool,
    nothing: Status,
) -> Result<Status, Failure> {
    let status = if value.is_some() { Status::Ok } else { nothing };
    if json {
        let value = value.map(|value| String::from_utf8_lossy(&value).into_owned());
        output::json(&json!({ "key": key, "value": value }));
    } else if let Some(value) = value {
        output::line(value);
    }
    Ok(status)
}

fn print_value(key: &str, value: i64, json: bool) -> Result<Status, Failure> {
    if json {
        output::json(&json!({ "key": key, "value": value }));
    } else {
        output::line(value.to_string());
    }
    Ok(Status::Ok)
}

fn print_done(key: &str, json: bool) -> Result<Status, Failure> {
    if json {
        output::json(&json!({ "key": key, "ok": true }));
    }
    Ok(Status::Ok)
}
