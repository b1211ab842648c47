//! `dev-cluster`: some nodes on this machine, for as long as this runs.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;
use tokio::process::{Child, Command};
use tokio::signal::unix::{SignalKind, signal};

use crate::connect::Connection;
use crate::failure::{Failure, Status, complain};
use crate::files::{make_directory, make_temporary_directory, secret, write};
use crate::operator::{Cluster, server_program};
use crate::output;

/// How long the nodes may take until they serve.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// How long they may take to end.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// What was chosen for a directory, so that it can be started again.
const PORTS: &str = "ports.json";

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// How many.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u8).range(1..=7))]
    nodes: u8,
    /// Where they keep their data; kept for the next time. A temporary directory if not given.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// The server program.
    #[arg(long, value_name = "FILE")]
    dflockd: Option<PathBuf>,
    /// Further settings for every node, behind `--`.
    #[arg(last = true, value_name = "FLAG")]
    flags: Vec<String>,
    #[command(flatten)]
    output: output::Output,
}

/// The ports of a node: clients, peers, HTTP, gRPC.
type Ports = [u16; 4];

/// `dev-cluster`.
pub(crate) async fn run(args: Args) -> Result<Status, Failure> {
    let failed =
        |what: &str, error: std::io::Error| Failure::new(Status::No, format!("{what}: {error}"));
    // Before anything runs that would have to be ended.
    let mut interrupts =
        signal(SignalKind::interrupt()).map_err(|error| failed("signals", error))?;
    let mut ends = signal(SignalKind::terminate()).map_err(|error| failed("signals", error))?;
    let (dir, temporary) = match &args.dir {
        Some(dir) => {
            make_directory(dir)?;
            (dir.clone(), false)
        }
        // Secrets go there, so nobody else may have made it before.
        None => (make_temporary_directory("dflockd-dev-cluster")?, true),
    };
    // The variables it prints should do in every directory.
    let dir = dir.canonicalize().unwrap_or(dir);
    let ports = ports(&dir, usize::from(args.nodes))?;
    for name in ["raft-token", "admin-token"] {
        let path = dir.join(name);
        if !path.exists() {
            write(&path, &format!("{}\n", secret()?), 0o600)?;
        }
    }
    let program = server_program(args.dflockd.as_deref());
    let mut children = Vec::new();
    for number in 1..=ports.len() {
        children.push(start(&program, &dir, number, &ports, &args.flags)?);
    }
    let serving = async {
        wait_until_ready(&dir, &ports, &mut children).await?;
        print_nodes(&dir, &ports, args.output.json);
        Err(all_ended(&dir, &mut children).await)
    };
    let outcome = tokio::select! {
        outcome = serving => outcome,
        _ = interrupts.recv() => Ok(Status::Ok),
        _ = ends.recv() => Ok(Status::Ok),
    };
    stop(children).await;
    if temporary && outcome.is_ok() {
        // Only what it made itself, and nobody will look for it; after a failure somebody may.
        let _ = fs::remove_dir_all(&dir);
    }
    outcome
}

/// The ports of an earlier time, or free ones.
fn ports(dir: &Path, nodes: usize) -> Result<Vec<Ports>, Failure> {
    let path = dir.join(PORTS);
    if let Ok(text) = fs::read_to_string(&path) {
        let ports: Vec<Ports> = serde_json::from_str(&text)
            .map_err(|error| Failure::new(Status::No, format!("{}: {error}", path.display())))?;
        if ports.len() != nodes {
            let (there, shown) = (ports.len(), dir.display());
            let text =
                format!("{shown} has a cluster of {there}; give --nodes {there} or another --dir");
            return Err(Failure::usage(text));
        }
        return Ok(ports);
    }
    let bound: Result<Vec<TcpListener>, _> =
        (0..nodes * 4).map(|_| TcpListener::bind(("127.0.0.1", 0))).collect();
    let bound = bound.and_then(|bound| {
        bound.iter().map(|socket| Ok(socket.local_addr()?.port())).collect::<Result<Vec<_>, _>>()
    });
    let bound =
        bound.map_err(|error| Failure::new(Status::No, format!("no free ports: {error}")))?;
    let ports: Vec<Ports> =
        bound.chunks_exact(4).map(|four| [four[0], four[1], four[2], four[3]]).collect();
    write(&path, &json!(ports).to_string(), 0o600)?;
    Ok(ports)
}

fn start(
    program: &Path,
    dir: &Path,
    number: usize,
    ports: &[Ports],
    flags: &[String],
) -> Result<Child, Failure> {
    let peers: Vec<String> = (1..)
        .zip(ports)
        .map(|(number, [clients, peers, ..])| {
            format!("n{number}=127.0.0.1:{peers}@127.0.0.1:{clients}")
        })
        .collect();
    let [client_port, peer_port, http_port, grpc_port] = ports[number - 1];
    let path = |name: &str| dir.join(name).display().to_string();
    let failed = |error: std::io::Error| {
        let shown = program.display();
        Failure::new(
            Status::NotFound,
            format!("can not run {shown}: {error}; name it with --dflockd"),
        )
    };
    // Behind what is there: it may be of nodes that still run.
    let path_of_log = log_of(dir, number);
    let log =
        fs::File::options().create(true).append(true).open(&path_of_log).map_err(|error| {
            Failure::new(Status::No, format!("can not write {}: {error}", path_of_log.display()))
        })?;
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DFLOCKD_") {
            command.env_remove(name);
        }
    }
    let settings = [
        ("--host", "127.0.0.1".to_owned()),
        ("--port", client_port.to_string()),
        ("--http-port", http_port.to_string()),
        ("--grpc-port", grpc_port.to_string()),
        ("--raft-dir", path(&format!("n{number}"))),
        ("--node-id", format!("n{number}")),
        ("--raft-addr", format!("127.0.0.1:{peer_port}")),
        ("--cluster-peers", peers.join(",")),
        ("--raft-auth-token-file", path("raft-token")),
        ("--admin-token-file", path("admin-token")),
    ];
    for (flag, value) in settings {
        command.args([flag, &value]);
    }
    command.args(flags).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.kill_on_drop(true).spawn().map_err(failed)
}

async fn wait_until_ready(
    dir: &Path,
    ports: &[Ports],
    children: &mut [Child],
) -> Result<(), Failure> {
    let begun = Instant::now();
    for [port, ..] in ports {
        let server = format!("127.0.0.1:{port}");
        loop {
            if let Some(number) = ended(children) {
                return Err(has_ended(dir, number));
            }
            let cluster = Cluster::read_only(Connection::local(vec![server.clone()]));
            if cluster.status_at(&server).is_ok_and(|status| status["ready"] == true) {
                break;
            }
            if begun.elapsed() > START_TIMEOUT {
                let text =
                    format!("{server} does not get ready; look at its log in {}", dir.display());
                return Err(Failure::new(Status::Unreachable, text));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
    Ok(())
}

/// The number of a node that has ended.
fn ended(children: &mut [Child]) -> Option<usize> {
    let mut numbered = (1..).zip(children);
    numbered.find_map(|(number, child)| matches!(child.try_wait(), Ok(Some(_))).then_some(number))
}

/// Reports each node that ends; returns when the last has, because trying out failures of some is what this is for.
async fn all_ended(dir: &Path, children: &mut [Child]) -> Failure {
    let mut reported = vec![false; children.len()];
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        for (position, child) in children.iter_mut().enumerate() {
            if !reported[position] && matches!(child.try_wait(), Ok(Some(_))) {
                reported[position] = true;
                complain(has_ended(dir, position + 1));
            }
        }
        if reported.iter().all(|reported| *reported) {
            return Failure::new(Status::No, "no node runs any more");
        }
    }
}

fn log_of(dir: &Path, number: usize) -> PathBuf {
    dir.join(format!("n{number}.log"))
}

/// The last line of its log most often says why.
fn has_ended(dir: &Path, number: usize) -> Failure {
    let path = log_of(dir, number);
    let log = fs::read_to_string(&path).unwrap_or_default();
    let last = output::clean(log.lines().next_back().unwrap_or("it said nothing"));
    let path = path.display();
    Failure::new(Status::No, format!("n{number} has ended; its log, {path}, ends with: {last}"))
}

fn print_nodes(dir: &Path, ports: &[Ports], as_json: bool) {
    let servers: Vec<String> = ports.iter().map(|[port, ..]| format!("127.0.0.1:{port}")).collect();
    let token = dir.join("admin-token").display().to_string();
    if as_json {
        let nodes = (1..).zip(ports).map(|(number, [clients, peers, http, grpc])| {
            json!({
                "node_id": format!("n{number}"),
                "client_addr": format!("127.0.0.1:{clients}"),
                "peer_addr": format!("127.0.0.1:{peers}"),
                "http_addr": format!("127.0.0.1:{http}"),
                "grpc_addr": format!("127.0.0.1:{grpc}"),
            })
        });
        let nodes: Vec<_> = nodes.collect();
        output::json(
            &json!({ "nodes": nodes, "admin_token_file": token, "dir": dir.display().to_string() }),
        );
        return;
    }
    let mut table = output::Table::new(&["NODE", "CLIENTS", "HTTP", "GRPC"]);
    for (number, [clients, _, http, grpc]) in (1..).zip(ports) {
        table.row([
            format!("n{number}"),
            format!("127.0.0.1:{clients}"),
            format!("http://127.0.0.1:{http}/ui"),
            format!("127.0.0.1:{grpc}"),
        ]);
    }
    table.print();
    output::line(format!("export DFLOCKD_SERVERS={}", servers.join(",")));
    output::line(format!("export DFLOCKD_ADMIN_TOKEN_FILE={token}"));
    output::line(format!("data and logs are in {}; Ctrl-C ends all nodes", dir.display()));
}

async fn stop(mut children: Vec<Child>) {
    for child in &children {
        let id = child.id().and_then(|id| i32::try_from(id).ok());
        if let Some(id) = id.and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process(id, rustix::process::Signal::TERM);
        }
    }
    let all = async {
        for child in &mut children {
            let _ = child.wait().await;
        }
    };
    // A child that is left is killed when it is dropped.
    let _ = tokio::time::timeout(STOP_TIMEOUT, all).await;
}
