//! `dflockd inspect-data`, `restore` and `force-new`: the data directory of a node that does not run.

use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, UNIX_EPOCH};

use clap::{Arg, ArgAction, ArgMatches, Command};
use dflockd_core::Span;
use dflockd_engine::offline::{self, Beginning, Begun, Delay, Report};
use dflockd_replica::version;
use serde_json::{Value, json};

use crate::logging::timestamp;
use crate::operate::cluster_id;

/// How many entries are shown unless told otherwise.
const ENTRIES: &str = "20";

/// What one of them does.
type Action = fn(&ArgMatches) -> Result<ExitCode, String>;

/// Runs one of them, if the arguments name one.
pub(crate) fn run(args: &[String]) -> Option<ExitCode> {
    let verb = args.first()?.as_str();
    let (command, action): (Command, Action) = match verb {
        "inspect-data" => (inspect_command(), inspect),
        "restore" => (restore_command(), restore),
        "force-new" => (force_new_command(), force_new),
        _ => return None,
    };
    let matches = match command.no_binary_name(true).try_get_matches_from(&args[1..]) {
        Ok(matches) => matches,
        Err(error) => {
            // Help goes to stdout. Nobody is left to tell if that is closed.
            let _ = error.print();
            return Some(if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS });
        }
    };
    Some(action(&matches).unwrap_or_else(|why| {
        eprintln!("dflockd {verb}: {why}");
        ExitCode::FAILURE
    }))
}

fn flag(name: &'static str, value: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).value_name(value).help(help)
}

fn switch(name: &'static str, help: &'static str) -> Arg {
    Arg::new(name).long(name).action(ArgAction::SetTrue).help(help)
}

fn dir_flag() -> Arg {
    flag("raft-dir", "DIR", "Data directory of the node").required(true)
}

fn delay_flag() -> Arg {
    flag(
        "grant-delay",
        "SECONDS",
        "Grant nothing for so long; never less than the longest lease that is known, and --failover-grace",
    )
    .default_value("0")
    .value_parser(clap::value_parser!(u64))
}

fn delay_max_flag() -> Arg {
    flag(
        "grant-delay-max",
        "SECONDS",
        "Grant nothing for no longer than this, even if a longer lease is known; risks two holders of one lock",
    )
    .value_parser(clap::value_parser!(u64))
}

fn text<'a>(matches: &'a ArgMatches, name: &str) -> &'a str {
    matches.get_one::<String>(name).map_or("", String::as_str)
}

fn delay(matches: &ArgMatches) -> Result<Delay, String> {
    let given = |name| matches.get_one::<u64>(name).map(|seconds| Span::from_secs(*seconds));
    let (min, max) = (given("grant-delay").unwrap_or_default(), given("grant-delay-max"));
    if max.is_some_and(|max| max < min) {
        return Err("--grant-delay is above --grant-delay-max".into());
    }
    Ok(Delay { min, max })
}

/// Says what an upper bound of the delay risks, if it has made it shorter.
fn warn_of_risk(begun: &Begun) {
    if begun.delay < begun.delay_safe {
        eprintln!(
            "warning: a lease of before may last for {} s, and --grant-delay-max cuts the delay to {} s. Its holder \
             may still believe in it when the lock is granted again: make sure that no client of before still works, \
             or that the storage checks fences.",
            seconds(begun.delay_safe),
            seconds(begun.delay)
        );
    }
}

fn say(line: impl AsRef<str>) {
    // Whoever read has gone; there is no other place for it.
    let _ = writeln!(std::io::stdout(), "{}", line.as_ref());
}

fn seconds(span: Span) -> f64 {
    Duration::from_nanos(span.0).as_secs_f64()
}

// ---- restore ----

fn restore_command() -> Command {
    Command::new("dflockd restore")
        .about("Makes the data directory of the first node of a new cluster from a backup.")
        .arg(dir_flag())
        .arg(flag("from", "FILE", "What `dflockctl backup` wrote").required(true))
        .arg(flag("node-id", "ID", "Name of the node").required(true))
        .arg(
            flag("raft-addr", "HOST:PORT", "Where other nodes will dial its peer port")
                .required(true),
        )
        .arg(flag(
            "advertise-addr",
            "HOST:PORT",
            "Where clients find it; it says so itself when it starts",
        ))
        .arg(delay_flag())
        .arg(delay_max_flag())
}

fn restore(matches: &ArgMatches) -> Result<ExitCode, String> {
    let file = Path::new(text(matches, "from"));
    let backup = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let beginning = Beginning {
        node: check_node(text(matches, "node-id"))?,
        peer_addr: check_address("--raft-addr", text(matches, "raft-addr"))?,
        client_addr: match text(matches, "advertise-addr") {
            "" => String::new(),
            address => check_address("--advertise-addr", address)?,
        },
        delay: delay(matches)?,
    };
    let dir = PathBuf::from(text(matches, "raft-dir"));
    let begun = offline::restore(&dir, &backup, &beginning)?;
    warn_of_risk(&begun);
    say(format!("restored: {} is the first node of a new cluster", beginning.node));
    print_result(&begun, &cluster_id(&begun.cluster));
    say("lost: everything that was done after the backup was made");
    say(format!(
        "next: start it with --raft-dir {} --node-id {}, then add the others with empty directories",
        dir.display(),
        beginning.node
    ));
    Ok(ExitCode::SUCCESS)
}

fn print_result(begun: &Begun, cluster: &str) {
    say(format!("cluster id: {cluster} (was {})", cluster_id(&begun.was)));
    if begun.made_at > 0 {
        let made_at = timestamp(UNIX_EPOCH + Duration::from_nanos(begun.made_at));
        say(format!("backup: of entry {}, made at {made_at}", begun.index));
    } else {
        say(format!("state: of entry {}", begun.index));
    }
    say(format!("sessions ended: {}, with all that they held and waited for", begun.sessions));
    say(format!("first fence: {}", begun.fence));
    say(format!("nothing is granted for {} s after it leads", seconds(begun.delay)));
    if !begun.dropped.is_empty() {
        say(format!("no longer members: {}", begun.dropped.join(", ")));
    }
}

fn check_node(node: &str) -> Result<String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=64).contains(&node.len()) && node.bytes().all(is_allowed) {
        return Ok(node.to_owned());
    }
    Err("--node-id is 1 to 64 of A-Z a-z 0-9 . _ -".into())
}

fn check_address(name: &str, address: &str) -> Result<String, String> {
    let parts = address.rsplit_once(':');
    let is_port = |port: &str| port.parse::<u16>().is_ok_and(|port| port > 0);
    match parts.filter(|(host, port)| !host.is_empty() && is_port(port)) {
        Some(_) => Ok(address.to_owned()),
        None => Err(format!("{name} is not host:port")),
    }
}

// ---- force-new ----

const WARNING: &str = "\
The majority of the cluster is lost for good, and this node is to go on alone: as a new cluster.
- What the lost members had acknowledged and this node had not received yet is lost.
- All sessions end. Locks are released, and granted again only after every lease of before has ended.
- The lost members can never come back: remove their data directories, and let them join as new nodes.
- Never do this while the others may still run: there would be two clusters, each granting the same locks.
A majority that will come back is better than this; so is a newer backup.";

fn force_new_command() -> Command {
    Command::new("dflockd force-new")
        .about("Makes a cluster of its own of the one node that is left, when the majority is lost for good.")
        .arg(dir_flag())
        .arg(switch("yes", "Do not ask"))
        .arg(switch("dry-run", "Only say what would be done"))
        .arg(delay_flag())
        .arg(delay_max_flag())
}

fn force_new(matches: &ArgMatches) -> Result<ExitCode, String> {
    let dir = PathBuf::from(text(matches, "raft-dir"));
    let dry_run = matches.get_flag("dry-run");
    let delay = delay(matches)?;
    let would = offline::force_new(&dir, delay, true)?;
    warn_of_risk(&would);
    if !dry_run {
        eprintln!("{WARNING}");
        if !matches.get_flag("yes") && !is_confirmed()? {
            return Err("not confirmed; nothing was changed".into());
        }
    }
    if dry_run {
        say("would be done: the node becomes the only one of a new cluster");
        print_result(&would, "a new one");
        return Ok(ExitCode::SUCCESS);
    }
    let begun = offline::force_new(&dir, delay, false)?;
    say("done: the node is the only one of a new cluster");
    print_result(&begun, &cluster_id(&begun.cluster));
    say("next: start it as before, then add new nodes with empty directories");
    Ok(ExitCode::SUCCESS)
}

fn is_confirmed() -> Result<bool, String> {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err("nobody is there to ask; give --yes".into());
    }
    eprint!("Type yes to go on: ");
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer).map_err(|error| error.to_string())?;
    Ok(answer.trim() == "yes")
}

// ---- inspect-data ----

fn inspect_command() -> Command {
    Command::new("dflockd inspect-data")
        .about("Says what is in the data directory of a node that does not run, or in a copy. Changes nothing.")
        .arg(Arg::new("dir").value_name("DIR").required(true).help("The data directory"))
        .arg(switch("entries", "Also the last entries of the log, without keys and values"))
        .arg(
            flag("last", "N", "How many entries")
                .default_value(ENTRIES)
                .value_parser(clap::value_parser!(usize)),
        )
        .arg(switch("json", "Print JSON"))
}

fn inspect(matches: &ArgMatches) -> Result<ExitCode, String> {
    let dir = Path::new(text(matches, "dir"));
    let report = offline::look(dir).map_err(|error| format!("{}: {error}", dir.display()))?;
    if report.files.segments.is_empty() && report.files.snapshots.is_empty() {
        return Err(format!("{} is no data directory of a node", dir.display()));
    }
    let entries = matches
        .get_flag("entries")
        .then(|| matches.get_one::<usize>("last").copied().unwrap_or_default());
    let shown = show(dir, &report, entries);
    if matches.get_flag("json") {
        say(shown.to_string());
    } else {
        print_report(&shown);
    }
    let is_whole =
        shown["damage"].as_array().is_none_or(Vec::is_empty) && shown["not_readable"].is_null();
    Ok(if is_whole { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn show(dir: &Path, report: &Report, entries: Option<usize>) -> Value {
    let mut damage = Vec::new();
    let mut note = |file: &str, offset: u64, what: &str| {
        let found = json!({ "file": file, "offset": offset, "what": what });
        if !damage.contains(&found) {
            damage.push(found);
        }
    };
    let files = &report.files;
    for segment in &files.segments {
        if let Some((offset, what)) = &segment.damage {
            note(&segment.file, *offset, what);
        }
    }
    for snapshot in &files.snapshots {
        if let Err(what) = &snapshot.metadata {
            note(&snapshot.file, 0, what);
        }
    }
    if let Err(error) = &files.log {
        use dflockd_replica::log::OpenError;
        match error {
            OpenError::Damaged { file, offset, what, .. } => note(file, *offset, what),
            OpenError::UnknownVersion { file, .. } => note(file, 0, &error.to_string()),
            OpenError::Io(_) => note("", 0, &error.to_string()),
        }
    }
    let log = files.log.as_ref().ok().and_then(Option::as_ref);
    let machine = report.machine.as_ref().and_then(|machine| machine.as_ref().ok());
    let mut value = json!({
        "directory": dir.display().to_string(),
        "node": report.known.as_ref().map(|known| json!({
            "node_id": known.node,
            "raft_id": known.raft_id,
            "starts": known.starts,
            "cluster_id": known.cluster.as_ref().map(cluster_id),
        })),
        "hard_state": log.map(|log| json!({
            "term": log.hard_state.term, "vote": log.hard_state.vote, "commit": log.hard_state.commit,
        })),
        "last_entry": log.map(|log| json!({ "index": log.last.0, "term": log.last.1 })),
        "interrupted_write": log.is_some_and(|log| log.cut),
        "members": machine.map(|machine| members(machine, log)),
        "cluster_version": machine.map(|machine| machine.version()),
        // Whole, by its digest, but not for this program.
        "not_readable": report.machine.as_ref().and_then(|machine| machine.as_ref().err()),
        "snapshots": files.snapshots.iter().map(|snapshot| match &snapshot.metadata {
            Ok(metadata) => json!({
                "file": snapshot.file, "bytes": snapshot.bytes, "digest_ok": true,
                "index": metadata.index, "term": metadata.term,
            }),
            Err(_) => json!({ "file": snapshot.file, "bytes": snapshot.bytes, "digest_ok": false }),
        }).collect::<Vec<_>>(),
        "segments": files.segments.iter().map(|segment| json!({
            "file": segment.file,
            "bytes": segment.bytes,
            "used_bytes": segment.used_bytes,
            "first_index": segment.entries.map(|(first, _)| first),
            "last_index": segment.entries.map(|(_, last)| last),
            "end": segment.end,
        })).collect::<Vec<_>>(),
        "damage": damage,
    });
    if let (Some(count), Some(log)) = (entries, log) {
        let first = log.entries.len().saturating_sub(count);
        let described = log.entries[first..].iter().map(|entry| {
            json!({
                "index": entry.index,
                "term": entry.term,
                "bytes": entry.data.len(),
                "version": version::of_entry(entry),
                "what": offline::describe(entry),
            })
        });
        value["entries"] = described.collect();
    }
    value
}

fn members(
    machine: &dflockd_replica::machine::Machine,
    log: Option<&dflockd_replica::log::inspect::LogReport>,
) -> Value {
    let conf = log.and_then(|log| log.snapshot.as_ref()).map(|snapshot| &snapshot.metadata);
    let voters = conf.map(|metadata| metadata.get_conf_state().voters.clone()).unwrap_or_default();
    let members = machine.members().iter().map(|(id, member)| {
        json!({
            "node_id": member.node,
            "raft_id": id,
            "peer_addr": member.peer_addr,
            "client_addr": member.client_addr,
            "role": match (member.witness, voters.contains(id)) {
                (true, _) => "witness",
                (false, true) => "voter",
                (false, false) => "learner",
            },
        })
    });
    members.collect()
}

fn print_report(shown: &Value) {
    let word = |value: &Value| match value {
        Value::String(text) => text.clone(),
        Value::Null => "-".to_owned(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            other.to_string()
        }
    };
    let node = &shown["node"];
    say(format!("directory   {}", word(&shown["directory"])));
    if node.is_null() {
        say("node        not known: no log, or a damaged one");
    } else {
        let (id, raft, starts) = (word(&node["node_id"]), &node["raft_id"], &node["starts"]);
        say(format!("node        {id} (member {raft}, started {starts} times)"));
        say(format!("cluster     {}", word(&node["cluster_id"])));
    }
    if !shown["cluster_version"].is_null() {
        say(format!("version     {} (as of the snapshot)", shown["cluster_version"]));
    }
    let state = &shown["hard_state"];
    if !state.is_null() {
        let (term, vote, commit) = (&state["term"], &state["vote"], &state["commit"]);
        say(format!("hard state  term {term}, vote {vote}, commit {commit}"));
        let last = &shown["last_entry"];
        say(format!("last entry  {} of term {}", last["index"], last["term"]));
    }
    if shown["interrupted_write"] == true {
        say("end         an interrupted write, which the next start cuts away");
    }
    let list = |name: &str| shown[name].as_array().cloned().unwrap_or_default();
    for member in list("members") {
        let text =
            ["node_id", "role", "peer_addr", "client_addr"].map(|field| word(&member[field]));
        say(format!("member      {} (as of the snapshot)", text.join(" ")));
    }
    for snapshot in list("snapshots") {
        let file = word(&snapshot["file"]);
        let state = if snapshot["digest_ok"] == true { "digest ok" } else { "DAMAGED" };
        let (index, term) = (word(&snapshot["index"]), word(&snapshot["term"]));
        say(format!(
            "snapshot    {file}: entry {index} of term {term}, {} bytes, {state}",
            snapshot["bytes"]
        ));
    }
    for segment in list("segments") {
        let (first, last) = (word(&segment["first_index"]), word(&segment["last_index"]));
        let (file, end) = (word(&segment["file"]), word(&segment["end"]));
        let (used, bytes) = (&segment["used_bytes"], &segment["bytes"]);
        say(format!(
            "segment     {file}: entries {first} to {last}, {used} of {bytes} bytes, {end}"
        ));
    }
    for entry in list("entries") {
        let (index, term, bytes) = (&entry["index"], &entry["term"], &entry["bytes"]);
        say(format!("entry       {index} of term {term}, {bytes} bytes: {}", word(&entry["what"])));
    }
    if !shown["not_readable"].is_null() {
        say(format!("NOT READ    the newest snapshot: {}", word(&shown["not_readable"])));
    }
    for found in list("damage") {
        let (file, offset) = (word(&found["file"]), &found["offset"]);
        say(format!("DAMAGE      {file} at byte {offset}: {}", word(&found["what"])));
    }
}
