//! `ls`, `show`, `status`, `ping`: queries that change nothing.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status, complain};
use crate::operator::Cluster;
use crate::output::{self, Paint, Table, clean};
use crate::stats::{Answer, Holder, ServerClients, ServerStats};
use crate::time;

/// Queues shown by `status`.
const QUEUES_SHOWN: usize = 5;

#[derive(Debug, clap::Args)]
pub(crate) struct LsArgs {
    /// What the keys begin with; all keys if not given.
    #[arg(default_value = "", hide_default_value = true)]
    prefix: String,
    /// List so many at most.
    #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..))]
    limit: u32,
    /// Go on after this key.
    #[arg(long, value_name = "KEY")]
    after: Option<String>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ShowArgs {
    /// Which key.
    key: String,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct PingArgs {
    /// Ask so often.
    #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Pause between two questions.
    #[arg(long, value_name = "TIME", default_value = "1s", value_parser = time::parse)]
    interval: Duration,
    #[command(flatten)]
    common: Common,
}

/// `ls`.
pub(crate) async fn ls(args: LsArgs, outer: &Settings) -> Result<Status, Failure> {
    if args.prefix == "_" {
        return Err(Failure::usage(
            "the protocol can not ask for the prefix _ alone; list all keys",
        ));
    }
    let client = args.common.settings.or(outer).resolve()?.connect().await?;
    let limit = args.limit as usize;
    let after = args.after.as_deref().map(str::as_bytes);
    let keys = client.keys(args.prefix.as_bytes(), limit, after).await?;
    if args.common.output.json {
        output::json(&Value::Array(keys));
        return Ok(Status::Ok);
    }
    let mut table = Table::new(&["KEY", "KIND", "HOLDERS", "WAITERS"]);
    for key in &keys {
        let waiters = key["waiters"].as_u64().unwrap_or_default();
        table.painted([
            (text(key, "key"), Paint::None),
            (text(key, "kind"), Paint::Dim),
            (key["holders"].to_string(), Paint::None),
            (waiters.to_string(), if waiters > 0 { Paint::Yellow } else { Paint::None }),
        ]);
    }
    table.print();
    if let Some(last) = keys.last().filter(|_| keys.len() >= limit) {
        complain(format_args!("there may be more: --after '{}'", text(last, "key")));
    }
    Ok(Status::Ok)
}

/// `show`.
pub(crate) async fn show(args: ShowArgs, outer: &Settings) -> Result<Status, Failure> {
    let (client, json) = args.common.connect(&args.key, outer).await?;
    let Some(inspected) = client.inspect(args.key.as_bytes()).await? else {
        if json {
            output::json(&Value::Null);
        }
        let key = clean(&args.key);
        return Err(Failure::new(
            Status::No,
            format!("nothing is known of {key}; try `dflockctl ls`"),
        ));
    };
    if json {
        output::json(&inspected);
        return Ok(Status::Ok);
    }
    let others = inspected["others"].as_array().into_iter().flatten();
    for (position, entry) in std::iter::once(&inspected).chain(others).enumerate() {
        if position > 0 {
            output::line("");
        }
        show_entry(entry);
    }
    Ok(Status::Ok)
}

fn show_entry(entry: &Value) {
    let colours = output::colours();
    let heading = format!("{} ({})", text(entry, "key"), text(entry, "kind"));
    output::line(output::paint(&heading, Paint::Bold, colours));
    let facts = [
        ("limit", "limit"),
        ("value", "value"),
        ("value_len", "bytes"),
        ("len", "items"),
        ("pop_waiters", "waiting to pop"),
        ("count", "count"),
        ("participants", "arrived"),
        ("revision", "revision"),
    ];
    let facts = facts.iter().filter(|(name, _)| !entry[*name].is_null());
    let mut facts: Vec<String> =
        facts.map(|(name, shown)| format!("{shown} {}", entry[*name])).collect();
    if let Some(ttl) = entry["ttl"].as_f64().filter(|ttl| *ttl > 0.0) {
        facts.push(format!("ends in {}", time::short(ttl)));
    }
    if let Some(idle) = entry["idle_s"].as_f64() {
        facts.push(format!("idle for {}", time::short(idle)));
    }
    output::line(format!("  {}", facts.join(", ")));
    let Some(holders) = entry["holders"].as_array() else { return };
    if holders.is_empty() {
        output::line("  nobody holds it");
    } else {
        let mut table = Table::new(&["  HOLDER", "CONN", "FENCE", "HELD", "ENDS IN", "ROLE"]);
        for holder in holders.iter().map(Holder::read) {
            table.painted([
                (format!("  {}", name_or_dash(&holder.client)), Paint::Green),
                (holder.conn.to_string(), Paint::None),
                (holder.fence, Paint::None),
                (time::short(holder.held_s), Paint::None),
                (time::short(holder.expires_in_s), Paint::None),
                (holder.role.to_owned(), Paint::Dim),
            ]);
        }
        table.print();
        more(entry, "holders_more");
    }
    let queue = entry["queue"].as_array().map(Vec::as_slice).unwrap_or_default();
    if !queue.is_empty() {
        let mut table = Table::new(&["  PLACE", "WAITER", "CONN", "WAITS", "ROLE"]);
        for (position, waiter) in queue.iter().enumerate() {
            let writer = waiter["writer"].as_bool().unwrap_or_default();
            table.painted([
                (format!("  {}", position + 1), Paint::None),
                (name_or_dash(&text(waiter, "client")), Paint::Yellow),
                (waiter["conn"].to_string(), Paint::None),
                (time::short(waiter["waiting_s"].as_f64().unwrap_or_default()), Paint::None),
                (if writer { "writer" } else { "" }.to_owned(), Paint::Dim),
            ]);
        }
        table.print();
        more(entry, "queue_more");
    }
}

fn more(entry: &Value, name: &str) {
    if let Some(count) = entry[name].as_u64() {
        output::line(format!("  and {count} more"));
    }
}

fn name_or_dash(client: &str) -> String {
    if client.is_empty() { "-".to_owned() } else { client.to_owned() }
}

fn text(value: &Value, name: &str) -> String {
    clean(value[name].as_str().unwrap_or_default())
}

/// `status`.
pub(crate) async fn status(args: StatusArgs, outer: &Settings) -> Result<Status, Failure> {
    let settings = args.common.settings.or(outer);
    let connection = settings.clone().resolve()?;
    let mut clients = ServerClients::new(&connection);
    let answers = clients.stats(&connection).await;
    let members = Cluster::read_only(settings.resolve()?);
    if args.common.output.json {
        output::json(&answers.iter().map(status_json).collect());
    } else {
        let mut table = Table::new(&["SERVER", "STATE", "CONNECTIONS", "HELD", "WAITING", "KEYS"]);
        for (server, stats) in &answers {
            let (state, how, numbers) = match stats {
                Ok(it) => {
                    let keys = it.keys as u64;
                    (
                        "up",
                        Paint::Green,
                        [it.connections, it.held, it.waiting, keys].map(|n| n.to_string()),
                    )
                }
                Err(_) => {
                    // A member that stands alone answers its operators, and nobody else.
                    let is_alone = members.status_at(server).is_ok_and(|it| it["ready"] == false);
                    let state = if is_alone { "not ready" } else { "down" };
                    (state, Paint::Red, [const { String::new() }; 4].map(|_| "-".to_owned()))
                }
            };
            let cells = [(server.clone(), Paint::None), (state.to_owned(), how)];
            table.painted(cells.into_iter().chain(numbers.map(|number| (number, Paint::None))));
        }
        table.print();
        show_queues(answers.iter().filter_map(|(_, stats)| stats.as_ref().ok()));
    }
    // All servers are shown before one that is down becomes the end of it.
    let mut errors: Vec<_> = answers.into_iter().filter_map(|(_, stats)| stats.err()).collect();
    let last = errors.pop();
    for error in errors {
        complain(Failure::from(error));
    }
    match last {
        Some(error) => Err(error.into()),
        None => Ok(Status::Ok),
    }
}

fn show_queues<'a>(answers: impl Iterator<Item = &'a ServerStats>) {
    let mut queues: Vec<_> = answers.flat_map(|stats| stats.longest_queues(QUEUES_SHOWN)).collect();
    queues.sort_by_key(|lock| std::cmp::Reverse(lock.waiters));
    queues.truncate(QUEUES_SHOWN);
    if queues.is_empty() {
        return;
    }
    output::line("");
    let mut table = Table::new(&["LONGEST QUEUES", "KIND", "WAITERS", "FIRST WAITS", "HELD BY"]);
    for lock in queues {
        let holder = lock.holders.first().map(|holder| holder.client.clone()).unwrap_or_default();
        table.row([
            lock.key.clone(),
            lock.kind.to_owned(),
            lock.waiters.to_string(),
            time::short(lock.longest_wait_s),
            holder,
        ]);
    }
    table.print();
}

fn status_json((server, stats): &Answer) -> Value {
    match stats {
        Ok(stats) => {
            let queues = stats.longest_queues(QUEUES_SHOWN);
            let queues = queues
                .iter()
                .map(|lock| json!({ "key": lock.key, "kind": lock.kind, "waiters": lock.waiters }));
            json!({
                "server": server,
                "up": true,
                "connections": stats.connections,
                "held": stats.held,
                "waiting": stats.waiting,
                "keys": stats.keys,
                "longest_queues": queues.collect::<Vec<_>>(),
            })
        }
        Err(error) => json!({ "server": server, "up": false, "error": error.to_string() }),
    }
}

/// `ping`.
pub(crate) async fn ping(args: PingArgs, outer: &Settings) -> Result<Status, Failure> {
    let connection = args.common.settings.or(outer).resolve()?;
    let mut clients = ServerClients::new(&connection);
    let mut times: Vec<Vec<Duration>> = vec![Vec::new(); clients.servers.len()];
    let mut last_error = None;
    for round in 0..args.count {
        if round > 0 {
            tokio::time::sleep(args.interval).await;
        }
        for (position, times) in times.iter_mut().enumerate() {
            let asked = match clients.client(position, &connection).await {
                Ok(client) => {
                    let asked_at = Instant::now();
                    client.ping().await.map(|()| asked_at.elapsed())
                }
                Err(error) => Err(error),
            };
            let server = &clients.servers[position].0;
            match asked {
                Ok(took) => {
                    times.push(took);
                    if args.common.output.json {
                        output::json(&json!({ "server": server, "ms": millis(took) }));
                    } else {
                        output::line(format!("{server}: {:.3} ms", millis(took)));
                    }
                }
                Err(error) => {
                    if args.common.output.json {
                        output::json(&json!({ "server": server, "error": error.to_string() }));
                    } else {
                        output::line(format!("{server}: {error}"));
                    }
                    last_error = Some(error);
                }
            }
        }
    }
    if args.count > 1 && !args.common.output.json {
        for ((server, _), times) in clients.servers.iter().zip(&mut times) {
            times.sort();
            let [Some(min), Some(max)] = [times.first(), times.last()] else { continue };
            let median = times[times.len() / 2];
            output::line(format!(
                "{server}: {} of {} answered, min {:.3} median {:.3} max {:.3} ms",
                times.len(),
                args.count,
                millis(*min),
                millis(median),
                millis(*max)
            ));
        }
    }
    match last_error {
        Some(error) => Err(error.into()),
        None => Ok(Status::Ok),
    }
}

fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}
