//! Taking part in a cluster: the settings of replicated mode as the engine wants them.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context, anyhow};
use dflockd_engine::transport::{
    Credentials, Limits as TransportLimits, PeerTls, Secret, TransportConfig, Version,
};
use dflockd_engine::{Clock, ClusterOptions, Formation, MemberOptions, Replicated};
use dflockd_replica::types::Addresses;
use dflockd_replica::version;

use crate::config::{self, ClusterConfig, Config, HostPort};

/// How many past events every member keeps for watches that resume.
const EVENTS_MAX: u64 = 10_000;

/// Where others find the APIs that this node has besides the line protocol.
pub(crate) fn advertised_addresses(
    config: &Config,
    cluster: &ClusterConfig<'_>,
    http: Option<SocketAddr>,
    grpc: Option<SocketAddr>,
) -> Addresses {
    let address = |bound: Option<SocketAddr>, advertised: &Option<HostPort>| match bound {
        None => String::new(),
        Some(bound) => match (advertised, cluster.advertise_addr) {
            (Some(addr), _) => addr.to_string(),
            (None, Some(addr)) if bound.ip().is_unspecified() => {
                HostPort { host: addr.host.clone(), port: bound.port() }.to_string()
            }
            (None, _) => bound.to_string(),
        },
    };
    Addresses {
        http: address(http, &config.http_advertise_addr),
        grpc: address(grpc, &config.grpc_advertise_addr),
    }
}

/// Opens the data directory and begins to take part.
pub(crate) async fn start(
    config: &Config,
    cluster: &ClusterConfig<'_>,
    bound: SocketAddr,
    strangers_max: u64,
) -> anyhow::Result<Arc<Replicated>> {
    let client_addr = match cluster.advertise_addr {
        Some(addr) => addr.to_string(),
        None => SocketAddr::new(bound.ip(), bound.port()).to_string(),
    };
    let mut policy = config.policy();
    policy.limits.events_max = EVENTS_MAX;
    let formation = match cluster.formation {
        config::Formation::Bootstrap => Formation::Bootstrap,
        config::Formation::Join => Formation::Join,
        config::Formation::Static => {
            let peers = config.cluster_peers.iter();
            let peers = peers.map(|peer| {
                (peer.node.clone(), peer.raft_addr.to_string(), peer.client_addr.to_string())
            });
            Formation::Static(peers.collect())
        }
    };
    let options = ClusterOptions {
        dir: cluster.dir.to_owned(),
        transport: TransportConfig {
            listen: cluster.raft_addr.to_string(),
            credentials: credentials(cluster, [cluster.secret, None])?,
            version_max: Version::newest(),
            limits: TransportLimits {
                strangers_max: usize::try_from(strangers_max)?,
                ..TransportLimits::default()
            },
        },
        member: MemberOptions {
            node: cluster.node.to_owned(),
            peer_addr: cluster.dial_addr.to_string(),
            client_addr,
            formation,
            witness: config.witness,
            policy,
            election_timeout: config.election_timeout,
            heartbeat_interval: config.heartbeat_interval,
            snapshot_entries: config.snapshot_entries,
            version: version::newest(),
        },
    };
    let member = Replicated::start(options, Clock::system()).await;
    member.map_err(|why| anyhow!(why)).context("cannot take part in the cluster")
}

/// What peers are shown: the first secret is used for dialing, the second, the one before a reload, is still
/// accepted, so that
/// the members can be told one after the other.
pub(crate) fn credentials(
    cluster: &ClusterConfig<'_>,
    given: [Option<&config::Secret>; 2],
) -> anyhow::Result<Credentials> {
    let mut secrets = Vec::new();
    for secret in given.into_iter().flatten() {
        let secret = Secret::new(secret.bytes().to_vec())?;
        if !secrets.contains(&secret) {
            secrets.push(secret);
        }
    }
    let tls = cluster.tls.map(|tls| PeerTls::load(tls.cert, tls.key, tls.ca));
    Ok(Credentials { secrets, tls: tls.transpose()? })
}
