//! The settings of replicated mode: what they are made of, and the rules that tie them together.

use std::fmt;
use std::net::Ipv6Addr;
use std::path::Path;
use std::time::Duration;

use zeroize::Zeroizing;

use super::rules::{is_loopback, is_wildcard};
use super::secrets::{RAFT_TOKEN_BYTES_MIN, Secret, Tokens};
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

/// What replicated mode needs of the settings, checked.
#[derive(Debug, Clone, Copy)]
pub struct ClusterConfig<'a> {
    /// Where log and snapshots are.
    pub dir: &'a Path,
    /// The name of this node.
    pub node: &'a str,
    /// Where the peer port binds; the port may be 0, the host a wildcard.
    pub raft_addr: &'a HostPort,
    /// Where other nodes should dial this one, as far as it can say: a node that joins is dialled at
    /// the address it was added with.
    pub dial_addr: &'a HostPort,
    /// Where clients find this node, by `--advertise-addr` or its entry in the list. `None` stands
    /// for `--host` and the port that was bound.
    pub advertise_addr: Option<&'a HostPort>,
    /// What to do if the directory is empty.
    pub formation: Formation,
    /// What peers must prove to know. There is a secret, or TLS, or both.
    pub secret: Option<&'a Secret>,
    /// The files of mutual TLS between peers.
    pub tls: Option<RaftTls<'a>>,
}

/// The files of mutual TLS between peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RaftTls<'a> {
    /// The chain, this node's own certificate first.
    pub cert: &'a Path,
    /// The private key of this node.
    pub key: &'a Path,
    /// The authorities that sign the certificates of the nodes.
    pub ca: &'a Path,
}

impl Config {
    /// What replicated mode needs, or `None` in memory mode.
    pub fn replicated(&self) -> Option<ClusterConfig<'_>> {
        let node = self.node_id.as_deref()?;
        let raft_addr = self.raft_addr.as_ref()?;
        let own = self.cluster_peers.iter().find(|peer| peer.node == node);
        let tls_files = (&self.raft_tls_cert, &self.raft_tls_key, &self.raft_tls_ca);
        Some(ClusterConfig {
            dir: self.raft_dir.as_deref()?,
            node,
            raft_addr,
            dial_addr: own.map_or(raft_addr, |own| &own.raft_addr),
            advertise_addr: self.advertise_addr.as_ref().or(own.map(|own| &own.client_addr)),
            formation: match (self.cluster_bootstrap, own) {
                (true, _) => Formation::Bootstrap,
                (false, Some(_)) => Formation::Static,
                (false, None) => Formation::Join,
            },
            secret: self
                .raft_auth_token
                .as_ref()
                .map(Tokens::newest)
                .or(self.drawn_secret.as_ref()),
            tls: match tls_files {
                (Some(cert), Some(key), Some(ca)) => Some(RaftTls { cert, key, ca }),
                _ => None,
            },
        })
    }

    /// The rules of replicated mode, if `--raft-dir` switches it on. Settles what the settings leave
    /// open: the secret of a node alone, and the heartbeat interval below a short election timeout.
    pub(super) fn complete_cluster(&mut self) -> Result<(), ConfigError> {
        if self.raft_dir.is_none() {
            return Ok(());
        }
        for (flag, missing) in
            [("node-id", self.node_id.is_none()), ("raft-addr", self.raft_addr.is_none())]
        {
            if missing {
                return refuse(format!("--raft-dir needs --{flag}"));
            }
        }
        let cluster = self.replicated().expect("its three settings are there");
        self.check_formation(&cluster)?;
        self.check_raft_tls()?;
        let is_bare = cluster.secret.is_none() && cluster.tls.is_none();
        // Nobody else could be there to share it with.
        let is_alone =
            cluster.formation == Formation::Bootstrap && is_loopback(&cluster.raft_addr.host);
        if is_bare && !is_alone {
            return refuse(
                "--raft-dir needs --raft-auth-token or --raft-auth-token-file, \
                 or --raft-tls-cert, --raft-tls-key and --raft-tls-ca",
            );
        }
        if cluster.tls.is_none() && !self.raft_no_tls {
            let peers = self.cluster_peers.iter().map(|peer| &peer.raft_addr);
            let mut all = [cluster.raft_addr].into_iter().chain(peers);
            if let Some(beyond) = all.find(|addr| !is_loopback(&addr.host)) {
                return refuse(format!(
                    "peers beyond loopback ({beyond}) need --raft-tls-cert, --raft-tls-key and \
                     --raft-tls-ca, which `dflockctl cluster init` and `dflockctl cluster cert` \
                     make, or --raft-no-tls to rely on the shared secret alone"
                ));
            }
        }
        self.drawn_secret = is_bare
            .then(|| Secret::new(&*Zeroizing::new(rand::random::<[u8; RAFT_TOKEN_BYTES_MIN]>())));
        self.heartbeat_interval = self.heartbeat()?;
        Ok(())
    }

    fn check_formation(&self, cluster: &ClusterConfig<'_>) -> Result<(), ConfigError> {
        let ClusterConfig { node, raft_addr, .. } = cluster;
        let mut others: Vec<_> = self.cluster_peers.iter().map(|peer| peer.node.as_str()).collect();
        others.retain(|other| other != node);
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
        Ok(())
    }

    fn check_raft_tls(&self) -> Result<(), ConfigError> {
        let files = [
            ("--raft-tls-cert", &self.raft_tls_cert),
            ("--raft-tls-key", &self.raft_tls_key),
            ("--raft-tls-ca", &self.raft_tls_ca),
        ];
        let given = files.iter().find(|(_, file)| file.is_some());
        let missing = files.iter().find(|(_, file)| file.is_none());
        match (given, missing) {
            (Some((given, _)), Some((missing, _))) => refuse(format!("{given} needs {missing}")),
            _ => Ok(()),
        }
    }

    /// The pause between two signs of life of the leader, at most a third of the election timeout.
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
