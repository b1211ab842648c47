//! A cluster of three server processes.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU32, Ordering};
use std::time::Duration;

use dflockd_client::{Client, ClientBuilder, Guard, Instant, Transport};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

use super::super::support::{Dir, LIMIT, Reaper, dflockd, eventually, free_addresses, signal};
pub(super) use super::super::support::{crowded, millis, soon};

pub(super) const NAMES: [&str; 3] = ["node-a", "node-b", "node-c"];
/// Nothing came yet; for the proxy.
pub(super) const PATIENCE: [ErrorKind; 3] =
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];
/// A lease that outlives elections, and a machine that stands still for a while.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// A member: what it was started with, and its process if it runs.
struct Node {
    client: SocketAddr,
    /// Where clients dial it, by what the members tell.
    advertised: SocketAddr,
    grpc: SocketAddr,
    flags: Vec<String>,
    process: Option<Reaper>,
}

pub(super) struct Nodes {
    nodes: Vec<Node>,
    dir: Dir,
}

/// An address of its own for each cluster: a member that is down must find its ports free when it comes back.
fn host() -> Ipv4Addr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    if !cfg!(target_os = "linux") {
        return Ipv4Addr::LOCALHOST;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 20 + u8::try_from(count % 80).unwrap(), high, low.max(2))
}

impl Nodes {
    /// Three members that have a leader.
    pub(super) async fn start(flags: &[&str]) -> Self {
        let mut nodes =
            Self::prepare(flags, async |addresses| addresses.to_vec(), |peers| peers.to_vec())
                .await;
        nodes.start_all().await;
        nodes
    }

    /// Members that are not started. `advertised` says for the client addresses where clients dial them, `dialed` the
    /// same for the peer addresses and members.
    pub(super) async fn prepare(
        flags: &[&str],
        advertised: impl AsyncFnOnce(&[SocketAddr]) -> Vec<SocketAddr>,
        dialed: impl FnOnce(&[SocketAddr]) -> Vec<SocketAddr>,
    ) -> Self {
        let dir = Dir::new();
        let addresses = free_addresses(host(), 3 * NAMES.len());
        let (clients, others) = addresses.split_at(NAMES.len());
        let (peers, grpc) = others.split_at(NAMES.len());
        let (advertised, dialed) = (advertised(clients).await, dialed(peers));
        let list: Vec<_> = NAMES
            .iter()
            .zip(dialed.iter().zip(&advertised))
            .map(|(name, (peer, client))| format!("{name}={peer}@{client}"))
            .collect();
        let list = list.join(",");
        let node = |at: usize| {
            let (client, peer) = (clients[at], peers[at]);
            let data = dir.path(NAMES[at]).to_str().unwrap().to_owned();
            let own = [
                ("--host", client.ip().to_string()),
                ("--port", client.port().to_string()),
                ("--grpc-port", grpc[at].port().to_string()),
                ("--raft-dir", data),
                ("--node-id", NAMES[at].to_owned()),
                ("--raft-addr", peer.to_string()),
                ("--raft-auth-token", "0123456789abcdef0123456789abcdef".to_owned()),
                ("--cluster-peers", list.clone()),
                ("--election-timeout-ms", "500".to_owned()),
                ("--shutdown-timeout", "5".to_owned()),
            ];
            let own = own.into_iter().flat_map(|(flag, value)| [flag.to_owned(), value]);
            let flags = own.chain(flags.iter().map(ToString::to_string)).collect();
            Node { client, advertised: advertised[at], grpc: grpc[at], flags, process: None }
        };
        let nodes = (0..NAMES.len()).map(node).collect();
        Self { nodes, dir }
    }

    pub(super) async fn start_all(&mut self) {
        for at in 0..self.nodes.len() {
            self.spawn(at);
        }
        self.wait_until_ready().await;
    }

    /// Starts a member without waiting for it.
    pub(super) fn spawn(&mut self, at: usize) {
        let node = &mut self.nodes[at];
        assert!(node.process.is_none(), "{} runs", NAMES[at]);
        let log = self.dir.path(&format!("{}.log", NAMES[at]));
        let log = File::options().create(true).append(true).open(log).unwrap();
        let mut command = Command::new(dflockd());
        command.args(&node.flags).env_clear();
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        node.process = Some(Reaper(command.spawn().unwrap()));
    }

    pub(super) async fn restart(&mut self, at: usize) {
        self.spawn(at);
        self.wait_until_ready().await;
    }

    /// Ends it as a crash would.
    pub(super) fn kill(&mut self, at: usize) {
        drop(self.nodes[at].process.take().expect("it runs"));
    }

    /// Ends it as an operator would.
    pub(super) async fn terminate(&mut self, at: usize) {
        let mut process = self.nodes[at].process.take().expect("it runs");
        signal(process.0.id(), "TERM");
        let what = format!("{} ends", NAMES[at]);
        let status = eventually(&what, async || process.0.try_wait().unwrap()).await;
        assert!(status.success(), "{}: {status}", NAMES[at]);
    }

    pub(super) fn signal(&self, at: usize, name: &str) {
        signal(self.nodes[at].process.as_ref().expect("it runs").0.id(), name);
    }

    pub(super) async fn wait_until_ready(&self) {
        for node in self.nodes.iter().filter(|node| node.process.is_some()) {
            eventually("a member is ready", async || {
                status(node.client).await.filter(|status| status["ready"] == true)
            })
            .await;
        }
    }

    /// Who leads and serves.
    pub(super) async fn leader(&self) -> usize {
        eventually("a leader", async || {
            for (at, node) in self.nodes.iter().enumerate() {
                let status = match &node.process {
                    Some(_) => status(node.client).await,
                    None => None,
                };
                if status.is_some_and(|it| it["role"] == "leader" && it["ready"] == true) {
                    return Some(at);
                }
            }
            None
        })
        .await
    }

    pub(super) fn address(&self, at: usize) -> String {
        self.nodes[at].advertised.to_string()
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        let members = (0..self.nodes.len()).map(|at| self.address(at));
        Client::builder().cluster(members).lease(LEASE).request_timeout(LIMIT)
    }

    /// The same by gRPC, with a single seed.
    pub(super) fn grpc_builder(&self) -> ClientBuilder {
        let seed = self.nodes[0].grpc.to_string();
        let builder = Client::builder().transport(Transport::Grpc).cluster([seed]);
        builder.lease(LEASE).request_timeout(LIMIT)
    }

    pub(super) async fn client(&self, name: &str) -> Client {
        self.builder().name(name).connect().await.unwrap()
    }
}

impl Drop for Nodes {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for name in NAMES {
            let log = fs::read_to_string(self.dir.path(&format!("{name}.log"))).unwrap_or_default();
            let lines: Vec<_> = log.lines().collect();
            println!("{name}:\n{}", lines[lines.len().saturating_sub(40)..].join("\n"));
        }
    }
}

/// The member `cluster` of a server's stats, if it answers soon.
async fn status(address: SocketAddr) -> Option<Value> {
    let asked = async {
        let mut socket = TcpStream::connect(address).await.ok()?;
        socket.write_all(b"stats\n_\n\n").await.ok()?;
        let mut line = String::new();
        BufReader::new(socket).read_line(&mut line).await.ok()?;
        let mut stats: Value = serde_json::from_str(line.strip_prefix("ok ")?).ok()?;
        Some(stats["cluster"].take())
    };
    tokio::time::timeout(Duration::from_secs(1), asked).await.ok().flatten()
}

/// The member that a client talks to.
pub(super) async fn node_of(client: &Client) -> usize {
    eventually("the client is at a member", async || {
        let node = client.membership().unwrap().node?;
        NAMES.iter().position(|name| *name == node)
    })
    .await
}

/// Waits until the client talks to another member.
pub(super) async fn moved_from(client: &Client, at: usize) {
    eventually("the client has moved", async || {
        let node = client.membership().unwrap().node?;
        (node != NAMES[at]).then_some(())
    })
    .await;
}

/// Waits until a count has grown by so much.
pub(super) async fn eventually_more(what: &str, count: &AtomicI64, by: i64) {
    let least = count.load(Ordering::SeqCst) + by;
    eventually(what, async || (count.load(Ordering::SeqCst) >= least).then_some(())).await;
}

/// Waits until nobody holds a key.
pub(super) async fn eventually_free(client: &Client, key: &str) {
    crowded(client, key, (0, 0)).await;
}

pub(super) async fn held(client: &Client, key: &str) -> Guard {
    let taken = soon("a free lock", client.lock(key).acquire_timeout(LIMIT)).await;
    taken.unwrap().expect("it is free")
}

/// A stay in a lock: since when and until when its holder could believe in it.
#[derive(Debug)]
pub(super) struct Stay {
    pub(super) fence: u64,
    pub(super) from: Instant,
    pub(super) until: Instant,
}

impl Stay {
    /// To be called before the guard is released.
    pub(super) fn of(guard: &Guard, from: Instant) -> Self {
        Self { fence: guard.fence(), from, until: guard.valid_until().min(Instant::now()) }
    }
}

/// Promises 2 and 3: no two of them at a time, and fences grow with time.
#[track_caller]
pub(super) fn check_stays(mut stays: Vec<Stay>) {
    stays.sort_by_key(|stay| stay.from);
    for two in stays.windows(2) {
        assert!(two[0].fence < two[1].fence, "fences do not grow: {two:?}");
        assert!(two[0].until <= two[1].from, "two valid guards: {two:?}");
    }
}
