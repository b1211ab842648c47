//! `cluster init`: what the nodes of a new cluster need, made at once so that it fits together.

use std::path::PathBuf;

use crate::certificates::{AUTHORITY, AUTHORITY_KEY, Authority, CERTIFICATE, KEY, Validity};
use crate::failure::{Failure, Status};
use crate::files::{make_directory, secret, write};
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
    /// Make no certificates for the peer port: the shared secret alone then protects it.
    #[arg(long)]
    no_tls: bool,
    #[command(flatten)]
    validity: Validity,
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
    let authority = if args.no_tls { None } else { Some(Authority::make(&args.dir)?) };
    for node in &nodes {
        let dir = args.dir.join(&node.id);
        make_directory(&dir)?;
        write(&dir.join("dflockd.env"), &settings(node, &list, args), 0o644)?;
        for (name, secret, _) in &secrets {
            write(&dir.join(name), &format!("{secret}\n"), 0o600)?;
        }
        if let Some(authority) = &authority {
            authority.issue(&node.id, &dir, &args.validity, false)?;
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
    if authority.is_some() {
        output::line(format!("{CERTIFICATE}, {KEY}, {AUTHORITY}: mutual TLS between the nodes"));
        output::line(format!(
            "{shown}/{AUTHORITY_KEY}: signs for further nodes (dflockctl cluster cert); keep it secret, \
             and away from the nodes"
        ));
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
    check_node(id)?;
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

/// Whether this can be a node id, and a directory can be called so.
pub(crate) fn check_node(id: &str) -> Result<(), Failure> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if id.is_empty() || id.len() > 64 || !id.bytes().all(is_allowed) {
        return Err(Failure::usage(format!("{id:?}: a node id is 1 to 64 of A-Z a-z 0-9 . _ -")));
    }
    if [".", "..", AUTHORITY, AUTHORITY_KEY].contains(&id) {
        return Err(Failure::usage(format!("{id:?} is the name of something else")));
    }
    Ok(())
}

fn settings(node: &Node, list: &str, args: &Args) -> String {
    let config_dir = args.config_dir.replace("{node}", &node.id);
    let data_dir = args.data_dir.replace("{node}", &node.id);
    let port_of = |address: &str| address.rsplit_once(':').map_or("", |(_, port)| port).to_owned();
    let loopback = node.clients.starts_with("127.") || node.clients.starts_with("localhost:");
    let host_of = |address: &str| address.rsplit_once(':').map_or("", |(host, _)| host).to_owned();
    let host = if loopback { host_of(&node.clients) } else { "0.0.0.0".to_owned() };
    let peer_host = if loopback { host_of(&node.peers) } else { "0.0.0.0".to_owned() };
    let mut lines = vec![
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
    if args.no_tls {
        lines.push(("DFLOCKD_RAFT_NO_TLS", "true".to_owned()));
    } else {
        lines.extend([
            ("DFLOCKD_RAFT_TLS_CERT", format!("{config_dir}/{CERTIFICATE}")),
            ("DFLOCKD_RAFT_TLS_KEY", format!("{config_dir}/{KEY}")),
            ("DFLOCKD_RAFT_TLS_CA", format!("{config_dir}/{AUTHORITY}")),
        ]);
    }
    lines.iter().map(|(name, value)| format!("{name}={value}\n")).collect()
}
