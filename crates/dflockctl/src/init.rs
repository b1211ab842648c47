//! `cluster init`: what the nodes of a new cluster need, made at once so that it fits together.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crate::failure::{Failure, Status};
use crate::output;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The nodes: `ID=HOST` with the usual ports, or `ID=RAFTHOST:PORT@CLIENTHOST:PORT`.
    #[arg(required = true, value_name = "NODE")]
    nodes: Vec<String>,
    /// Where to write; a directory per node, to be copied to it.
    #[arg(long, value_name = "DIR")]
    dir: PathBuf,
    /// Client port of nodes that are given by their host.
    #[arg(long, value_name = "PORT", default_value = "6388")]
    port: u16,
    /// Peer port of nodes that are given by their host.
    #[arg(long, value_name = "PORT", default_value = "7388")]
    raft_port: u16,
    /// HTTP port of every node; 0 for none.
    #[arg(long, value_name = "PORT", default_value = "6389")]
    http_port: u16,
    /// Where the files will be on a node; `{node}` stands for its id.
    #[arg(long, value_name = "DIR", default_value = "/etc/dflockd")]
    config_dir: String,
    /// Where a node will keep its data; `{node}` stands for its id.
    #[arg(long, value_name = "DIR", default_value = "/var/lib/dflockd/data")]
    data_dir: String,
}

struct Node {
    id: String,
    peers: String,
    clients: String,
}

/// `cluster init`.
pub(crate) fn run(args: &Args) -> Result<Status, Failure> {
    let mut nodes = Vec::new();
    for text in &args.nodes {
        nodes.push(parse(text, args)?);
    }
    let mut ids: Vec<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
    ids.sort_unstable();
    if ids.windows(2).any(|two| two[0] == two[1]) {
        return Err(Failure::usage("a node id is given twice"));
    }
    let list: Vec<String> =
        nodes.iter().map(|node| format!("{}={}@{}", node.id, node.peers, node.clients)).collect();
    let list = list.join(",");
    let secrets = [
        ("raft-token", secret()?, "what the nodes prove themselves with to each other"),
        ("auth-token", secret()?, "what clients send first"),
        ("admin-token", secret()?, "for operators"),
    ];
    for node in &nodes {
        let dir = args.dir.join(&node.id);
        make_directory(&dir)?;
        write(&dir.join("dflockd.env"), &settings(node, &list, args), 0o644)?;
        for (name, secret, _) in &secrets {
            write(&dir.join(name), &format!("{secret}\n"), 0o600)?;
        }
    }
    let shown = args.dir.display();
    for node in &nodes {
        let config_dir = args.config_dir.replace("{node}", &node.id);
        output::line(format!("{shown}/{}/*: copy to {} on {}", node.id, config_dir, node.clients));
    }
    for (name, _, what) in &secrets {
        output::line(format!("{name}: {what}; the same on all nodes, keep it secret"));
    }
    output::line(
        "then start dflockd on each of them with the variables of dflockd.env, for example:",
    );
    output::line("  set -a; . ./dflockd.env; dflockd");
    output::line(format!("and look: dflockctl --servers {} cluster status", nodes[0].clients));
    if nodes.len() % 2 == 0 {
        output::line(format!(
            "note: {} voters survive no more failures than {} would",
            nodes.len(),
            nodes.len() - 1
        ));
    }
    Ok(Status::Ok)
}

fn parse(text: &str, args: &Args) -> Result<Node, Failure> {
    let wrong = || {
        Failure::usage(format!("{text:?} is neither ID=HOST nor ID=RAFTHOST:PORT@CLIENTHOST:PORT"))
    };
    let (id, rest) = text.split_once('=').ok_or_else(wrong)?;
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if id.is_empty() || id.len() > 64 || !id.bytes().all(is_allowed) {
        return Err(Failure::usage(format!("{id:?}: a node id is 1 to 64 of A-Z a-z 0-9 . _ -")));
    }
    let is_address = |address: &str| {
        address.rsplit_once(':').is_some_and(|(host, port)| {
            !host.is_empty() && port.parse::<u16>().is_ok_and(|port| port > 0)
        })
    };
    let (peers, clients) = match rest.split_once('@') {
        Some((peers, clients)) if is_address(peers) && is_address(clients) => {
            (peers.to_owned(), clients.to_owned())
        }
        Some(_) => return Err(wrong()),
        None if rest.is_empty() || (is_address(rest) && !rest.ends_with(']')) => {
            return Err(wrong());
        }
        None => (format!("{rest}:{}", args.raft_port), format!("{rest}:{}", args.port)),
    };
    Ok(Node { id: id.to_owned(), peers, clients })
}

fn settings(node: &Node, list: &str, args: &Args) -> String {
    let config_dir = args.config_dir.replace("{node}", &node.id);
    let data_dir = args.data_dir.replace("{node}", &node.id);
    let port_of = |address: &str| address.rsplit_once(':').map_or("", |(_, port)| port).to_owned();
    let loopback = node.clients.starts_with("127.") || node.clients.starts_with("localhost:");
    let host_of = |address: &str| address.rsplit_once(':').map_or("", |(host, _)| host).to_owned();
    let host = if loopback { host_of(&node.clients) } else { "0.0.0.0".to_owned() };
    let peer_host = if loopback { host_of(&node.peers) } else { "0.0.0.0".to_owned() };
    let lines = [
        ("DFLOCKD_NODE_ID", node.id.clone()),
        ("DFLOCKD_RAFT_DIR", data_dir),
        ("DFLOCKD_CLUSTER_PEERS", list.to_owned()),
        ("DFLOCKD_HOST", host),
        ("DFLOCKD_PORT", port_of(&node.clients)),
        ("DFLOCKD_ADVERTISE_ADDR", node.clients.clone()),
        ("DFLOCKD_RAFT_ADDR", format!("{peer_host}:{}", port_of(&node.peers))),
        ("DFLOCKD_HTTP_PORT", args.http_port.to_string()),
        ("DFLOCKD_RAFT_AUTH_TOKEN_FILE", format!("{config_dir}/raft-token")),
        ("DFLOCKD_AUTH_TOKEN_FILE", format!("{config_dir}/auth-token")),
        ("DFLOCKD_ADMIN_TOKEN_FILE", format!("{config_dir}/admin-token")),
        ("DFLOCKD_REQUIRE_AUTH", "true".to_owned()),
    ];
    lines.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}

/// 256 random bits as text.
pub(crate) fn secret() -> Result<String, Failure> {
    let mut bytes = [0_u8; 32];
    let read = fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut bytes));
    read.map_err(|error| Failure::new(Status::No, format!("no random numbers: {error}")))?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

pub(crate) fn make_directory(dir: &Path) -> Result<(), Failure> {
    let made = DirBuilder::new().recursive(true).mode(0o700).create(dir);
    made.map_err(|error| {
        Failure::new(Status::No, format!("can not make {}: {error}", dir.display()))
    })
}

/// Writes a new file; never over one that is there, which may be in use.
pub(crate) fn write(path: &Path, content: &str, mode: u32) -> Result<(), Failure> {
    let mut options = OpenOptions::new();
    let file = options.write(true).create_new(true).mode(mode).open(path);
    let written = file.and_then(|mut file| file.write_all(content.as_bytes()));
    written.map_err(|error| {
        Failure::new(Status::No, format!("can not write {}: {error}", path.display()))
    })
}
