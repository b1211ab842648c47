//! `cluster` and `drain`: looking after the members of a cluster.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::certificates;
use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status, complain};
use crate::init;
use crate::operator::{
    CHECK_SERVERS, Cluster, Operator, SNAPSHOT_TIMEOUT, run_server, server_program,
};
use crate::output::{self, Paint, Table, clean};
use crate::time;

const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// What all verbs take that change something.
#[derive(Debug, clap::Args)]
pub(crate) struct Change {
    #[command(flatten)]
    operator: Operator,
    /// How long to wait until it is done.
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time::parse)]
    timeout: Duration,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Subcommand)]
pub(crate) enum ClusterVerb {
    /// Write what the nodes of a new cluster need: settings, secrets and certificates for each.
    Init(init::Args),
    /// Make certificates for the peer port of further nodes, or renew those of nodes.
    Cert(certificates::Args),
    /// Ask every member how it is; status 69 if one does not answer.
    Status {
        /// Wait so long until all members answer and are ready.
        #[arg(long, value_name = "TIME", value_parser = time::parse)]
        wait: Option<Duration>,
        #[command(flatten)]
        common: Common,
    },
    /// List the members, as one of them knows them.
    Members {
        #[command(flatten)]
        common: Common,
    },
    /// Add a node, as a learner; it must run, without `--cluster-bootstrap` and with an empty directory.
    Add {
        /// Its node id.
        node: String,
        /// Where the others dial its peer port, `host:port`.
        peer_addr: String,
        /// Where clients find it, `host:port`.
        client_addr: String,
        /// It was started with `--witness`.
        #[arg(long)]
        witness: bool,
        /// Make it a voter as soon as it has caught up.
        #[arg(long)]
        promote: bool,
        #[command(flatten)]
        change: Change,
    },
    /// Make a learner a voter, as soon as it has caught up.
    Promote {
        /// Its node id.
        node: String,
        /// Even if fewer voters than a majority are reachable then: the cluster may not be able to decide anything.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        change: Change,
    },
    /// Remove a member for ever; its node id is never used again.
    Remove {
        /// Its node id.
        node: String,
        /// Even if fewer voters than a majority are reachable then: the cluster may not be able to decide anything.
        #[arg(long)]
        force: bool,
        #[command(flatten)]
        change: Change,
    },
    /// Let another voter lead: the named one, or the one that is farthest.
    Transfer {
        /// Its node id.
        node: Option<String>,
        #[command(flatten)]
        change: Change,
    },
    /// Make a snapshot now, so that the log can be cut.
    Snapshot {
        /// On which node; on the first server that answers if not given.
        node: Option<String>,
        #[command(flatten)]
        change: Change,
    },
    /// Show the replicated policy, or change settings of it.
    Policy {
        /// What to change, by the name of the flag; times in seconds.
        #[arg(value_name = "NAME=VALUE")]
        settings: Vec<String>,
        #[command(flatten)]
        change: Change,
    },
    /// Change where the others dial a member's peer port.
    Address {
        /// Its node id.
        node: String,
        /// `host:port`.
        peer_addr: String,
        #[command(flatten)]
        change: Change,
    },
    /// Let the cluster use what all its members can read, after an upgrade of all of them.
    Finalize {
        #[command(flatten)]
        change: Change,
    },
    /// Make a cluster of its own of the one node that is left, on this machine; the majority is lost for good.
    ForceNew {
        /// Data directory of the node, which must not run.
        #[arg(long, value_name = "DIR")]
        raft_dir: PathBuf,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
        /// Only say what would be done.
        #[arg(long)]
        dry_run: bool,
        /// Grant nothing for so many seconds; never less than the longest lease that is known.
        #[arg(long, value_name = "SECONDS")]
        grant_delay: Option<u64>,
        /// But for no more than so many, even if a longer lease is known: its holder may still believe in it.
        #[arg(long, value_name = "SECONDS")]
        grant_delay_max: Option<u64>,
        /// The server program.
        #[arg(long, value_name = "FILE")]
        dflockd: Option<PathBuf>,
    },
}

#[derive(Debug, clap::Args)]
pub(crate) struct DrainArgs {
    /// The node.
    node: String,
    /// Let it lead again.
    #[arg(long)]
    undo: bool,
    #[command(flatten)]
    change: Change,
}

/// `cluster`.
pub(crate) fn run(verb: ClusterVerb, outer: &Settings) -> Result<Status, Failure> {
    match verb {
        ClusterVerb::Init(args) => init::run(&args),
        ClusterVerb::Cert(args) => certificates::run(&args),
        ClusterVerb::Status { wait, common } => status(wait, common, outer),
        ClusterVerb::Members { common } => members(common, outer),
        ClusterVerb::Add { node, peer_addr, client_addr, witness, promote, change } => {
            let mut task = Task::new(change, outer)?;
            let arguments = json!({
                "node": node, "peer_addr": peer_addr, "client_addr": client_addr, "witness": witness,
            });
            task.change("add", arguments)?;
            if promote {
                task.promote(&node, false)?;
                return task.print_result(
                    &format!("{node} votes"),
                    json!({ "node": node, "voter": true }),
                );
            }
            // It can be added before it runs, but that is seldom what was meant.
            if let Err(failure) = task.cluster.status_at(&client_addr) {
                let text = failure.to_string();
                let why = text.strip_suffix(CHECK_SERVERS).unwrap_or(&text);
                complain(format_args!("{node} does not answer yet: {}; start it", clean(why)));
            }
            let next = format!("make it a voter: dflockctl cluster promote {node}");
            let text = format!("{node} is a learner; {next}");
            task.print_result(&text, json!({ "node": node, "voter": false }))
        }
        ClusterVerb::Promote { node, force, change } => {
            let mut task = Task::new(change, outer)?;
            task.promote(&node, force)?;
            task.print_result(&format!("{node} votes"), json!({ "node": node, "voter": true }))
        }
        ClusterVerb::Remove { node, force, change } => {
            let mut task = Task::new(change, outer)?;
            task.change("remove", whom(&node, force))?;
            task.print_result(&format!("{node} is no member any more"), json!({ "node": node }))
        }
        ClusterVerb::Transfer { node, change } => transfer(node, Task::new(change, outer)?),
        ClusterVerb::Snapshot { node, change } => snapshot(node, Task::new(change, outer)?),
        ClusterVerb::Policy { settings, change } => policy(&settings, Task::new(change, outer)?),
        ClusterVerb::Address { node, peer_addr, change } => {
            let mut task = Task::new(change, outer)?;
            task.change("address", json!({ "node": node, "peer_addr": peer_addr }))?;
            let text = format!("{node} is dialed at {peer_addr}");
            task.print_result(&text, json!({ "node": node, "peer_addr": peer_addr }))
        }
        ClusterVerb::Finalize { change } => finalize(Task::new(change, outer)?),
        ClusterVerb::ForceNew { raft_dir, yes, dry_run, grant_delay, grant_delay_max, dflockd } => {
            let mut args = vec!["force-new".to_owned(), "--raft-dir".to_owned()];
            args.push(raft_dir.display().to_string());
            args.extend(yes.then(|| "--yes".to_owned()));
            args.extend(dry_run.then(|| "--dry-run".to_owned()));
            if let Some(delay) = grant_delay {
                args.extend(["--grant-delay".to_owned(), delay.to_string()]);
            }
            if let Some(delay) = grant_delay_max {
                args.extend(["--grant-delay-max".to_owned(), delay.to_string()]);
            }
            run_server(&server_program(dflockd.as_deref()), &args)
        }
    }
}

/// A change under way.
struct Task {
    cluster: Cluster,
    timeout: Duration,
    begun: Instant,
    json: bool,
}

impl Task {
    fn new(change: Change, outer: &Settings) -> Result<Self, Failure> {
        let Change { operator, timeout, common } = change;
        let cluster = Cluster::new(common.settings.or(outer), Some(&operator))?;
        Ok(Self { cluster, timeout, begun: Instant::now(), json: common.output.json })
    }

    fn left(&self) -> Duration {
        self.timeout.saturating_sub(self.begun.elapsed())
    }

    fn change(&mut self, verb: &str, arguments: Value) -> Result<Value, Failure> {
        self.cluster.change(verb, arguments, self.left())
    }

    /// Makes it a voter, and waits until it can serve.
    fn promote(&mut self, node: &str, force: bool) -> Result<(), Failure> {
        self.change("promote", whom(node, force)).map_err(|failure| {
            let text = failure.to_string();
            if !text.contains("caught up") {
                return failure;
            }
            let advice =
                "`dflockctl cluster status` shows whether it runs and how far it is behind";
            Failure::new(Status::Unreachable, format!("{text}; {advice}"))
        })?;
        let address = self.address_of(node)?;
        self.wait(&format!("{node} votes, but is not ready yet"), |cluster| {
            Ok(cluster.status_at(&address)?["ready"] == true)
        })
    }

    fn status(&mut self) -> Result<Value, Failure> {
        self.cluster.ask("status", json!({}))
    }

    /// Polls until `is_so`; after the timeout the error begins with `what`, what is the case instead.
    fn wait(
        &mut self,
        what: &str,
        mut is_so: impl FnMut(&mut Cluster) -> Result<bool, Failure>,
    ) -> Result<(), Failure> {
        loop {
            match is_so(&mut self.cluster) {
                Ok(true) => return Ok(()),
                Err(failure) if failure.status != Status::Unreachable => return Err(failure),
                Ok(false) | Err(_) => {}
            }
            if self.left().is_zero() {
                return Err(Failure::new(
                    Status::Unreachable,
                    format!("{what}; `dflockctl doctor` may say why"),
                ));
            }
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn print_result(&self, text: &str, mut value: Value) -> Result<Status, Failure> {
        if self.json {
            value["done"] = true.into();
            output::json(&value);
        } else {
            output::line(text);
        }
        Ok(Status::Ok)
    }

    /// Where clients find a member.
    fn address_of(&mut self, node: &str) -> Result<String, Failure> {
        let status = self.status()?;
        let members = status["members"].as_array().into_iter().flatten();
        let mut found = members.filter(|member| member["node_id"] == node);
        let address = found.next().and_then(|member| member["client_addr"].as_str());
        let none = || Failure::new(Status::No, format!("no member has the id {}", clean(node)));
        address.map(str::to_owned).ok_or_else(none)
    }
}

/// A server that knows no `force` refuses a request that names it, so it is named only where it is wanted.
fn whom(node: &str, force: bool) -> Value {
    if force { json!({ "node": node, "force": true }) } else { json!({ "node": node }) }
}

fn transfer(node: Option<String>, mut task: Task) -> Result<Status, Failure> {
    let before = task.status()?["leader_id"].clone();
    let arguments = node.as_ref().map_or_else(|| json!({}), |node| json!({ "node": node }));
    task.change("transfer", arguments)?;
    let mut leader = Value::Null;
    let not_yet = node.as_ref().map_or_else(
        || "no other node leads yet".to_owned(),
        |node| format!("{} does not lead yet", clean(node)),
    );
    task.wait(&not_yet, |cluster| {
        leader = cluster.ask("status", json!({}))?["leader_id"].clone();
        Ok(match &node {
            Some(node) => leader == node.as_str(),
            None => leader != "" && leader != before,
        })
    })?;
    let name = clean(leader.as_str().unwrap_or_default());
    task.print_result(&format!("{name} leads"), json!({ "leader": leader }))
}

fn snapshot(node: Option<String>, mut task: Task) -> Result<Status, Failure> {
    let arguments = json!({ "reason": task.cluster.reason() });
    let made = match node {
        None => task.cluster.ask_within("snapshot", arguments, SNAPSHOT_TIMEOUT)?,
        Some(node) => {
            let address = task.address_of(&node)?;
            task.cluster.ask_node((&node, &address), "snapshot", &arguments, SNAPSHOT_TIMEOUT)?
        }
    };
    task.print_result(
        &format!("snapshot at entry {}", made["index"]),
        json!({ "index": made["index"] }),
    )
}

fn policy(settings: &[String], mut task: Task) -> Result<Status, Failure> {
    let mut set = serde_json::Map::new();
    for setting in settings {
        let (name, value) = setting
            .split_once('=')
            .ok_or_else(|| Failure::usage(format!("{setting:?} is not NAME=VALUE")))?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        set.insert(name.trim_start_matches('-').to_owned(), value);
    }
    if !set.is_empty() {
        task.change("policy", json!({ "set": set }))?;
    }
    let mut shown = Value::Null;
    // Another member may have answered than the one that is looked at now.
    task.wait("the policy is not changed here yet", |cluster| {
        shown = cluster.ask("policy", json!({}))?["policy"].take();
        Ok(set.iter().all(|(name, value)| shown[name.as_str()] == *value))
    })?;
    if task.json {
        output::json(&shown);
        return Ok(Status::Ok);
    }
    let mut table = Table::new(&["SETTING", "VALUE"]);
    for (name, value) in shown.as_object().into_iter().flatten() {
        table.row([clean(name), clean(value.as_str().unwrap_or(&value.to_string()))]);
    }
    table.print();
    Ok(Status::Ok)
}

fn finalize(mut task: Task) -> Result<Status, Failure> {
    let before = task.status()?["cluster_version"].clone();
    task.change("finalize", json!({}))?;
    let mut after = Value::Null;
    // Another member may have decided than the one that is looked at now.
    task.wait("the version is not raised here yet", |cluster| {
        let status = cluster.ask("status", json!({}))?;
        after = status["cluster_version"].clone();
        let reads = status["versions"].as_array().into_iter().flatten();
        let newest = reads.filter_map(|version| version["value"].as_u64()).max();
        Ok(after.as_u64() >= newest)
    })?;
    let text = if before == after {
        format!("the cluster uses version {after} already, the newest that all members read")
    } else {
        format!("the cluster uses version {after} now, before it was {before}")
    };
    task.print_result(&text, json!({ "cluster_version": after }))
}

/// `drain`.
pub(crate) fn drain(args: DrainArgs, outer: &Settings) -> Result<Status, Failure> {
    let DrainArgs { node, undo, change } = args;
    let mut task = Task::new(change, outer)?;
    let address = task.address_of(&node)?;
    let arguments = json!({ "undo": undo, "reason": task.cluster.reason() });
    task.cluster.ask_node((&node, &address), "drain", &arguments, Duration::from_secs(20))?;
    if undo {
        return task
            .print_result(&format!("{node} may lead"), json!({ "node": node, "drained": false }));
    }
    task.wait(&format!("{node} is drained, but no other node leads yet"), |cluster| {
        let status = cluster.status_at(&address)?;
        Ok(status["role"] != "leader" && status["leader_id"] != "")
    })?;
    let text = format!("{node} does not lead, and will not until `--undo` or a restart");
    task.print_result(&text, json!({ "node": node, "drained": true }))
}

/// The members as a table: what they are called, and what each is.
pub(crate) fn listed(status: &Value) -> Vec<(String, Value)> {
    let is_in = |list: &str, node: &Value| {
        status[list].as_array().is_some_and(|nodes| nodes.contains(node))
    };
    let versions: BTreeMap<&str, &Value> = status["versions"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(|version| Some((version["node_id"].as_str()?, &version["value"])))
        .collect();
    let members = status["members"].as_array().into_iter().flatten();
    let member = |member: &Value| {
        let node = &member["node_id"];
        let role = match () {
            () if is_in("witnesses", node) => "witness",
            () if is_in("voters", node) => "voter",
            () => "learner",
        };
        let name = node.as_str().unwrap_or_default().to_owned();
        let version = versions.get(name.as_str()).map_or(Value::Null, |version| (*version).clone());
        let about = json!({
            "node_id": node,
            "role": role,
            "leader": status["leader_id"] == *node,
            "peer_addr": member["peer_addr"],
            "client_addr": member["client_addr"],
            "version": version,
        });
        (name, about)
    };
    members.map(member).collect()
}

fn members(common: Common, outer: &Settings) -> Result<Status, Failure> {
    let mut cluster = Cluster::new(common.settings.or(outer), None)?;
    let status = cluster.ask("status", json!({}))?;
    let members = listed(&status);
    if common.output.json {
        output::json(&members.into_iter().map(|(_, about)| about).collect());
        return Ok(Status::Ok);
    }
    let mut table = Table::new(&["NODE", "ROLE", "LEADER", "PEERS", "CLIENTS", "VERSION"]);
    for (name, about) in &members {
        let leads = about["leader"] == true;
        table.painted([
            (clean(name), Paint::None),
            (word(&about["role"]), Paint::Dim),
            (if leads { "leads" } else { "" }.to_owned(), Paint::Green),
            (word(&about["peer_addr"]), Paint::None),
            (word(&about["client_addr"]), Paint::None),
            (word(&about["version"]), Paint::None),
        ]);
    }
    table.print();
    Ok(Status::Ok)
}

/// A member: its name, what is known of it, and what it says itself.
type Reached = (String, Value, Result<Value, Failure>);

/// Asks one member who there is, and then each of them.
fn reach(cluster: &mut Cluster) -> Result<(Value, Vec<Reached>), Failure> {
    let seen = cluster.ask("status", json!({}))?;
    let mut reached = Vec::new();
    for (name, about) in listed(&seen) {
        let address = about["client_addr"].as_str().unwrap_or_default().to_owned();
        reached.push((name, about, cluster.status_at(&address)));
    }
    Ok((seen, reached))
}

fn is_ready((_, _, status): &Reached) -> bool {
    status.as_ref().is_ok_and(|status| status["ready"] == true)
}

fn status(wait: Option<Duration>, common: Common, outer: &Settings) -> Result<Status, Failure> {
    let mut cluster = Cluster::new(common.settings.or(outer), None)?;
    let begun = Instant::now();
    let (seen, reached) = loop {
        let found = reach(&mut cluster);
        let is_well = found.as_ref().is_ok_and(|(_, reached)| reached.iter().all(is_ready));
        if is_well || wait.is_none_or(|wait| begun.elapsed() >= wait) {
            break found?;
        }
        std::thread::sleep(POLL_INTERVAL);
    };
    let all_answer = reached.iter().all(|(.., status)| status.is_ok());
    let all_answer = all_answer && (wait.is_none() || reached.iter().all(is_ready));
    let ended = if all_answer { Status::Ok } else { Status::Unreachable };
    if common.output.json {
        let members = reached.into_iter().map(|(_, mut about, status)| {
            match status {
                Ok(status) => about["status"] = status,
                Err(failure) => about["why"] = failure.to_string().into(),
            }
            about
        });
        output::json(&json!({
            "cluster_id": seen["cluster_id"],
            "cluster_version": seen["cluster_version"],
            "leader_id": seen["leader_id"],
            "term": seen["term"],
            "members": members.collect::<Vec<_>>(),
        }));
        return Ok(ended);
    }
    let leader = match seen["leader_id"].as_str() {
        None | Some("") => "nobody".to_owned(),
        Some(leader) => clean(leader),
    };
    output::line(format!(
        "cluster {}, version {}, term {}, led by {leader}",
        word(&seen["cluster_id"]),
        seen["cluster_version"],
        seen["term"]
    ));
    let heading = ["NODE", "ROLE", "STATE", "CLIENTS", "APPLIED", "LAG", "READS", "SERVER", "NOTE"];
    let mut table = Table::new(&heading);
    let lags: BTreeMap<String, String> = reached
        .iter()
        .filter_map(|(.., status)| status.as_ref().ok())
        .flat_map(|status| status["lags"].as_array().cloned().unwrap_or_default())
        .map(|lag| (word(&lag["node_id"]), word(&lag["value"])))
        .collect();
    for (name, about, status) in &reached {
        let lag = lags.get(name).cloned().unwrap_or_else(|| "-".to_owned());
        let (state, paint, applied, server, note) = match status {
            Err(failure) => {
                let text = failure.to_string();
                let why = text.strip_suffix(CHECK_SERVERS).unwrap_or(&text);
                ("down".to_owned(), Paint::Red, "-".to_owned(), "-".to_owned(), clean(why))
            }
            Ok(status) => {
                let ready = status["ready"] == true;
                let role = word(&status["role"]);
                let paint = if ready { Paint::Green } else { Paint::Yellow };
                let mut notes = Vec::new();
                if !ready {
                    notes.push("not ready");
                }
                if status["drained"] == true {
                    notes.push("drained");
                }
                (
                    role,
                    paint,
                    word(&status["applied_index"]),
                    word(&status["server"]),
                    notes.join(", "),
                )
            }
        };
        table.painted([
            (clean(name), Paint::None),
            (word(&about["role"]), Paint::Dim),
            (state, paint),
            (word(&about["client_addr"]), Paint::None),
            (applied, Paint::None),
            (lag, Paint::None),
            (word(&about["version"]), Paint::None),
            (server, Paint::None),
            (note, Paint::None),
        ]);
    }
    table.print();
    Ok(ended)
}

/// A value as a cell.
pub(crate) fn word(value: &Value) -> String {
    match value {
        Value::String(text) => clean(text),
        Value::Null => "-".to_owned(),
        other @ (Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_)) => {
            other.to_string()
        }
    }
}
