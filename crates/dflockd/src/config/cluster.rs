//! The settings of replicated mode: what they are made of, and the rules that tie them together.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::time::Duration;

use dflockd_engine::replica::types::AutoRelease;
use zeroize::Zeroizing;

use super::rules::{is_loopback, is_wildcard};
use super::secrets::{RAFT_TOKEN_BYTES_MIN, Secret};
use super::{Config, ConfigError, refuse};

/// What a node that does not lead does with a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FollowerMode {
    /// Tells the client where the leader is.
    Redirect,
    /// Passes it on to the leader.
    Forward,
    /// Redirects clients that know of clusters (`hello` with `redirect`, or `stable-ref`) and passes
    /// on the requests of all others.
    Auto,
}

/// A host and a port.
///
/// Two that are written differently but mean the same text (case, forms of an IPv6 address) are
/// equal; nothing is looked up.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostPort {
    /// A name or an IP address, the latter without brackets.
    pub host: String,
    /// 0 only where one binds.
    pub port: u16,
}

impl HostPort {
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (host, port) = text.rsplit_once(':')?;
        let port = port.bytes().all(|b| b.is_ascii_digit()).then(|| port.parse().ok())??;
        if let Some(rest) = host.strip_prefix('[') {
            let address: Ipv6Addr = rest.strip_suffix(']')?.parse().ok()?;
            return Some(Self { host: address.to_string(), port });
        }
        let is_name_byte = |b: u8| b.is_ascii_alphanumeric() || b".-_".contains(&b);
        let is_name = (1..=253).contains(&host.len()) && host.bytes().all(is_name_byte);
        is_name.then(|| Self { host: host.to_ascii_lowercase(), port })
    }

    /// Whether another machine could connect to it: not a wildcard, not a port yet to be chosen.
    pub(super) fn can_be_dialled(&self) -> bool {
        self.port != 0 && !is_wildcard(&self.host)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { host, port } = self;
        if host.contains(':') { write!(f, "[{host}]:{port}") } else { write!(f, "{host}:{port}") }
    }
}

/// One node in `--cluster-peers`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerSpec {
    /// Its node id.
    pub node: String,
    /// Where the other nodes dial it.
    pub raft_addr: HostPort,
    /// Where clients find it.
    pub client_addr: HostPort,
}

/// How a node without state on disk comes to be part of a cluster. With state it does not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Formation {
    /// It makes a cluster of itself alone (`--cluster-bootstrap`).
    Bootstrap,
    /// It starts together with all the others in `--cluster-peers`.
    Static,
    /// It waits until a leader adds it.
    Join,
}

/// Everything replicated mode needs, checked.
#[derive(Debug, Clone)]
pub struct ClusterConfig {
    /// Where log and snapshots are.
    pub dir: PathBuf,
    /// The name of this node.
    pub node: String,
    /// Where the peer port binds; the port may be 0, the host a wildcard.
    pub raft_addr: HostPort,
    /// Where clients find this node, by `--advertise-addr` or its entry in the list. `None` stands
    /// for `--host` and the port that was bound.
    pub advertise_addr: Option<HostPort>,
    /// What to do if the directory is empty.
    pub formation: Formation,
    /// The list, sorted by node id, so that all nodes number it alike; empty if none was given.
    pub peers: Vec<PeerSpec>,
    /// This node keeps the log, but no state.
    pub witness: bool,
    /// What peers must prove to know. There is a secret, or TLS, or both.
    pub secret: Option<Secret>,
    /// The files of mutual TLS between peers.
    pub tls: Option<RaftTls>,
    /// What a node that does not lead does with a request.
    pub follower_mode: FollowerMode,
    /// What happens to the holds of a connection that ends.
    pub auto_release: AutoRelease,
    /// How long locks of a cleanly closed connection with a stable reference wait for its return.
    pub orphan_ttl: Duration,
    /// Time after a change of leader during which no lease ends.
    pub failover_grace: Duration,
    /// Entries of the log after which a snapshot replaces them.
    pub snapshot_entries: u64,
    /// The lower end of the random election timeout; the upper end is twice this.
    pub election_timeout: Duration,
    /// Pause between two signs of life of the leader, at most a third of `election_timeout`.
    pub heartbeat_interval: Duration,
}

impl ClusterConfig {
    /// The entry of this node in the list.
    pub fn own_entry(&self) -> Option<&PeerSpec> {
        self.peers.iter().find(|peer| peer.node == self.node)
    }

    /// Where other nodes should dial this one, as far as it can say: a node that joins is dialled at
    /// the address it was added with.
    pub fn dial_addr(&self) -> &HostPort {
        self.own_entry().map_or(&self.raft_addr, |own| &own.raft_addr)
    }
}

/// The files of mutual TLS between peers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RaftTls {
    /// The chain, this node's own certificate first.
    pub cert: PathBuf,
    /// The private key of this node.
    pub key: PathBuf,
    /// The authorities that sign the certificates of the nodes.
    pub ca: PathBuf,
}

impl Config {
    /// The settings of replicated mode, if `--raft-dir` switches it on.
    pub(super) fn cluster_config(&self) -> Result<Option<ClusterConfig>, ConfigError> {
        let Some(dir) = &self.raft_dir else { return Ok(None) };
        let Some(node) = &self.node_id else { return refuse("--raft-dir needs --node-id") };
        let Some(raft_addr) = &self.raft_addr else {
            return refuse("--raft-dir needs --raft-addr");
        };
        let formation = self.formation(node, raft_addr)?;
        let tls = self.raft_tls()?;
        let secret = match &self.raft_auth_token {
            Some(secret) => Some(secret.newest().clone()),
            None if tls.is_some() => None,
            // Nobody else could be there to share it with.
            None if formation == Formation::Bootstrap && is_loopback(&raft_addr.host) => {
                Some(Secret::new(&*Zeroizing::new(rand::random::<[u8; RAFT_TOKEN_BYTES_MIN]>())))
            }
            None => {
                return refuse(
                    "--raft-dir needs --raft-auth-token or --raft-auth-token-file, \
                     or --raft-tls-cert, --raft-tls-key and --raft-tls-ca",
                );
            }
        };
        if tls.is_none() && !self.raft_no_tls {
            let peers = self.cluster_peers.iter().map(|peer| &peer.raft_addr);
            let mut all = [raft_addr].into_iter().chain(peers);
            if let Some(beyond) = all.find(|addr| !is_loopback(&addr.host)) {
                return refuse(format!(
                    "peers beyond loopback ({beyond}) need --raft-tls-cert, --raft-tls-key and \
                     --raft-tls-ca, which `dflockctl cluster init` and `dflockctl cluster cert` \
                     make, or --raft-no-tls to rely on the shared secret alone"
                ));
            }
        }
        let own = self.cluster_peers.iter().find(|peer| peer.node == *node);
        let advertised = self.advertise_addr.as_ref().or(own.map(|own| &own.client_addr));
        Ok(Some(ClusterConfig {
            dir: dir.clone(),
            node: node.clone(),
            raft_addr: raft_addr.clone(),
            advertise_addr: advertised.cloned(),
            formation,
            peers: self.cluster_peers.clone(),
            witness: self.witness,
            secret,
            tls,
            follower_mode: self.follower_mode,
            auto_release: self.disconnect_policy(),
            orphan_ttl: self.orphan_ttl,
            failover_grace: self.failover_grace,
            snapshot_entries: self.snapshot_entries,
            election_timeout: self.election_timeout,
            heartbeat_interval: self.heartbeat()?,
        }))
    }

    fn formation(&self, node: &str, raft_addr: &HostPort) -> Result<Formation, ConfigError> {
        let mut others: Vec<_> = self.cluster_peers.iter().map(|peer| peer.node.as_str()).collect();
        others.retain(|other| *other != node);
        let listed = !self.cluster_peers.is_empty();
        if listed && others.len() == self.cluster_peers.len() {
            return refuse(format!(
                "--cluster-peers must contain this node (--node-id {node} is not in it)"
            ));
        }
        if self.cluster_bootstrap {
            if !others.is_empty() {
                return refuse(format!(
                    "--cluster-bootstrap contradicts other nodes in --cluster-peers ({})",
                    others.join(", ")
                ));
            }
            // Its address goes into the membership, where the nodes that are added find it.
            if !listed && !raft_addr.can_be_dialled() && !is_loopback(&raft_addr.host) {
                return refuse(format!(
                    "--cluster-bootstrap needs a --raft-addr that others can dial, or this node \
                     in --cluster-peers (got {raft_addr})"
                ));
            }
        }
        if self.witness && others.is_empty() && (listed || self.cluster_bootstrap) {
            return refuse("--witness needs other nodes: it serves no clients itself");
        }
        Ok(match (self.cluster_bootstrap, listed) {
            (true, _) => Formation::Bootstrap,
            (false, true) => Formation::Static,
            (false, false) => Formation::Join,
        })
    }

    fn raft_tls(&self) -> Result<Option<RaftTls>, ConfigError> {
        let files = [
            ("--raft-tls-cert", &self.raft_tls_cert),
            ("--raft-tls-key", &self.raft_tls_key),
            ("--raft-tls-ca", &self.raft_tls_ca),
        ];
        let given = files.iter().find(|(_, file)| file.is_some());
        let missing = files.iter().find(|(_, file)| file.is_none());
        if let (Some((given, _)), Some((missing, _))) = (given, missing) {
            return refuse(format!("{given} needs {missing}"));
        }
        let [cert, key, ca] = files.map(|(_, file)| file.clone());
        Ok(cert.zip(key).zip(ca).map(|((cert, key), ca)| RaftTls { cert, key, ca }))
    }

    fn heartbeat(&self) -> Result<Duration, ConfigError> {
        let (heartbeat, election) = (self.heartbeat_interval, self.election_timeout);
        if heartbeat * 3 <= election {
            return Ok(heartbeat);
        }
        let third = election.as_millis() / 3;
        if self.is_given("heartbeat-interval-ms") {
            return refuse(format!(
                "--heartbeat-interval-ms must be at most a third of --election-timeout-ms, {third} \
                 (got {})",
                heartbeat.as_millis()
            ));
        }
        Ok(Duration::from_millis(u64::try_from(third).expect("the range ends far below")))
    }
}
