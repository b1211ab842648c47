//! A cluster of server processes on an address of its own.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use serde_json::Value;

use crate::{Client, Dir, LIMIT, Process, command, eventually, free_addresses, host, millis};

/// What the members of all clusters know and others do not.
pub const SECRET: &str = "0123456789abcdef0123456789abcdef";

/// The names of members, in order: those of the first ones, and more for members that come later.
pub const NAMES: [&str; 26] = [
    "node-a", "node-b", "node-c", "node-d", "node-e", "node-f", "node-g", "node-h", "node-i",
    "node-j", "node-k", "node-l", "node-m", "node-n", "node-o", "node-p", "node-q", "node-r",
    "node-s", "node-t", "node-u", "node-v", "node-w", "node-x", "node-y", "node-z",
];

/// How long members are patient with their leader where an election would be a failure.
pub const CALM_MS: &str = "2000";

/// The flags of a cluster of one, with its log in a directory.
pub fn single(dir: &Dir) -> Vec<String> {
    let peer = free_addresses(host(), 1)[0].to_string();
    let flags = ["--raft-dir", &dir.name("log"), "--node-id", "n1", "--raft-addr", &peer];
    let flags = flags.into_iter().chain(["--cluster-bootstrap", "--raft-auth-token", SECRET]);
    flags.map(str::to_owned).collect()
}

/// The right to use the machine. Two tests may at a time, one that measures is alone.
#[derive(Debug)]
pub struct Turn(u32);

static TURNS: (Mutex<u32>, Condvar) = (Mutex::new(2), Condvar::new());

impl Turn {
    /// The turn of a test that leaves room for another.
    pub fn shared() -> Self {
        Self::take(1)
    }

    /// The turn of a test that measures.
    pub fn alone() -> Self {
        Self::take(2)
    }

    /// For tests that limit themselves in another way.
    pub fn free() -> Self {
        Self::take(0)
    }

    fn take(count: u32) -> Self {
        let (free, came) = &TURNS;
        let mut free = free.lock();
        came.wait_while(&mut free, |free| *free < count);
        *free -= count;
        Self(count)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (free, came) = &TURNS;
        *free.lock() += self.0;
        came.notify_all();
    }
}

/// A member: what it is started with, and its process if it runs.
#[derive(Debug)]
pub struct Node {
    /// Its name.
    pub name: String,
    /// Where it speaks the line protocol.
    pub client: SocketAddr,
    /// Where it speaks with other members.
    pub peer: SocketAddr,
    /// Its data directory.
    pub dir: PathBuf,
    /// Its command line.
    pub flags: Vec<String>,
    /// A variable in its environment.
    pub variable: Option<(&'static str, &'static str)>,
    /// Its process, if it runs.
    pub process: Option<Process>,
}

impl Node {
    /// A node that is not started. The flags behind the usual ones say how it finds its cluster.
    pub fn new(
        name: &str,
        client: SocketAddr,
        peer: SocketAddr,
        dir: PathBuf,
        formation: &[String],
    ) -> Self {
        let mut flags = Vec::new();
        for (flag, value) in [
            ("--host", client.ip().to_string()),
            ("--port", client.port().to_string()),
            ("--raft-dir", dir.to_str().unwrap().to_owned()),
            ("--node-id", name.to_owned()),
            ("--raft-addr", peer.to_string()),
            ("--raft-auth-token", SECRET.to_owned()),
        ] {
            flags.extend([flag.to_owned(), value]);
        }
        flags.extend_from_slice(formation);
        Self { name: name.to_owned(), client, peer, dir, flags, variable: None, process: None }
    }

    /// A node at addresses that nobody uses.
    pub fn anywhere(name: &str, dir: PathBuf, formation: &[&str]) -> Self {
        let addresses = free_addresses(host(), 2);
        let formation: Vec<_> = formation.iter().map(ToString::to_string).collect();
        Self::new(name, addresses[0], addresses[1], dir, &formation)
    }

    /// The value of a flag.
    pub fn flag(&mut self, name: &str) -> &mut String {
        let at = self.flags.iter().position(|flag| flag == name).expect("it has this flag");
        &mut self.flags[at + 1]
    }

    fn spawn(&self) -> Process {
        let mut command = command(&self.flags);
        command.envs(self.variable);
        Process::spawn(command)
    }

    /// Starts it without waiting for it.
    pub fn start(&mut self) {
        assert!(self.process.is_none(), "{} runs", self.name);
        self.process = Some(self.spawn());
    }

    /// Starts it and waits until it serves.
    #[track_caller]
    pub fn start_ready(&mut self) {
        self.start();
        self.wait_until_ready();
    }

    /// Starts it again after a crash, and waits until it serves.
    #[track_caller]
    pub fn restart(&mut self) {
        self.kill();
        self.start_ready();
    }

    /// Starts it and demands that it ends by itself; gives what it said.
    #[track_caller]
    pub fn start_in_vain(&mut self) -> String {
        let mut process = self.spawn();
        let status = process.wait_for_end();
        assert!(!status.success(), "{}: {}", self.name, process.output());
        process.output()
    }

    /// Ends it as a crash would.
    pub fn kill(&mut self) {
        drop(self.process.take().expect("it runs"));
    }

    /// Ends it as an operator would.
    #[track_caller]
    pub fn terminate(&mut self) {
        self.process.take().expect("it runs").terminate();
    }

    /// Its process, which must run.
    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("it runs")
    }

    /// What it has said since it was started.
    pub fn output(&self) -> String {
        self.process.as_ref().map(Process::output).unwrap_or_default()
    }

    /// A connection, as soon as it listens.
    #[track_caller]
    pub fn connect(&self) -> Client {
        let what = format!("{} listens", self.name);
        eventually(&what, || Client::connect(self.client).ok())
    }

    /// The cluster as it sees it, if it answers soon.
    pub fn status(&self) -> Option<Value> {
        let mut client = Client::connect(self.client).ok()?;
        if let Some(token) = self.token() {
            client.try_ask("auth", "_", token, Duration::from_secs(1));
        }
        let answer = client.try_ask("stats", "_", "cluster", Duration::from_secs(1));
        let told: Value = serde_json::from_str(answer.line()?.strip_prefix("ok ")?).ok()?;
        told.get("cluster").cloned()
    }

    /// What clients must know.
    fn token(&self) -> Option<&str> {
        let mut flags = self.flags.iter();
        flags
            .find_map(|flag| flag.strip_prefix("--auth-token"))
            .and_then(|rest| rest.strip_prefix('=').or_else(|| flags.next().map(String::as_str)))
    }

    /// Whether it runs and says that it serves.
    pub fn is_ready(&self) -> bool {
        self.process.is_some() && self.status().is_some_and(|status| status["ready"] == true)
    }

    /// Whether it runs, leads and serves.
    pub fn leads(&self) -> bool {
        let leads = |status: Value| status["role"] == "leader" && status["ready"] == true;
        self.process.is_some() && self.status().is_some_and(leads)
    }

    /// Waits until it serves.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        let begun = Instant::now();
        while !self.is_ready() {
            let late = begun.elapsed() > LIMIT;
            assert!(!late, "{} is not ready: {:?} {}", self.name, self.status(), self.output());
            thread::sleep(millis(10));
        }
    }
}

/// Where the members of a cluster listen, and where others are told that they do: something may stand between.
#[derive(Clone, Debug)]
pub struct Addresses {
    /// Where members listen for clients.
    pub clients: Vec<SocketAddr>,
    /// Where members listen for each other.
    pub peers: Vec<SocketAddr>,
    /// Where clients are told to go.
    pub advertised: Vec<SocketAddr>,
    /// Where members dial each other.
    pub dialed: Vec<SocketAddr>,
}

impl Addresses {
    /// Free ones, with nothing between.
    pub fn free(size: usize) -> Self {
        let all = free_addresses(host(), 2 * size);
        let (clients, peers) = (all[..size].to_vec(), all[size..].to_vec());
        Self { advertised: clients.clone(), dialed: peers.clone(), clients, peers }
    }
}

/// Some nodes that begin together.
#[derive(Debug)]
pub struct Cluster {
    /// Its members.
    pub nodes: Vec<Node>,
    /// Their data directories, and room for more.
    pub dir: Dir,
    _turn: Turn,
}

impl Cluster {
    /// A running cluster for which a busy machine is no reason for an election.
    #[track_caller]
    pub fn calm(size: usize) -> Self {
        Self::start(size, &["--election-timeout-ms", CALM_MS])
    }

    /// A running cluster that has a leader.
    #[track_caller]
    pub fn start(size: usize, flags: &[&str]) -> Self {
        Self::start_with(Turn::shared(), size, flags)
    }

    /// A running cluster of a test that has its turn already.
    #[track_caller]
    pub fn start_with(turn: Turn, size: usize, flags: &[&str]) -> Self {
        let mut cluster = Self::prepare(turn, size, flags);
        cluster.start_all();
        cluster
    }

    /// Nodes that are not started.
    pub fn prepare(turn: Turn, size: usize, flags: &[&str]) -> Self {
        Self::prepare_at(turn, &Addresses::free(size), flags)
    }

    /// Nodes at these addresses that are not started.
    pub fn prepare_at(turn: Turn, addresses: &Addresses, flags: &[&str]) -> Self {
        let dir = Dir::new();
        let Addresses { clients, peers, advertised, dialed } = addresses;
        let list: Vec<_> = NAMES
            .iter()
            .zip(dialed.iter().zip(advertised))
            .map(|(name, (peer, client))| format!("{name}={peer}@{client}"))
            .collect();
        let mut formation = vec!["--cluster-peers".to_owned(), list.join(",")];
        formation.extend(flags.iter().map(ToString::to_string));
        let node = |(name, (client, peer)): (&&str, (&SocketAddr, &SocketAddr))| {
            Node::new(name, *client, *peer, dir.path(name), &formation)
        };
        let nodes = NAMES.iter().zip(clients.iter().zip(peers)).map(node).collect();
        Self { nodes, dir, _turn: turn }
    }

    /// More free ports on the address of its members.
    pub fn more_addresses(&self, count: usize) -> Vec<SocketAddr> {
        free_addresses(self.nodes[0].client.ip(), count)
    }

    /// Gives each member another API, whose port a flag names; says where they are.
    pub fn add_api(&mut self, flag: &str) -> Vec<SocketAddr> {
        let addresses = self.more_addresses(self.nodes.len());
        for (node, address) in self.nodes.iter_mut().zip(&addresses) {
            node.flags.extend([flag.to_owned(), address.port().to_string()]);
        }
        addresses
    }

    /// Starts all members and waits until they serve.
    #[track_caller]
    pub fn start_all(&mut self) {
        self.nodes.iter_mut().for_each(Node::start);
        self.wait_until_ready();
    }

    /// Ends all members as a crash would.
    pub fn kill_all(&mut self) {
        self.nodes.iter_mut().for_each(Node::kill);
    }

    /// Where all members speak the line protocol.
    pub fn clients(&self) -> Vec<SocketAddr> {
        self.nodes.iter().map(|node| node.client).collect()
    }

    /// Waits until all that run serve.
    #[track_caller]
    pub fn wait_until_ready(&self) {
        for node in self.nodes.iter().filter(|node| node.process.is_some()) {
            node.wait_until_ready();
        }
    }

    /// Who leads and serves.
    #[track_caller]
    pub fn leader(&self) -> usize {
        self.leader_among(&(0..self.nodes.len()).collect::<Vec<_>>())
    }

    /// Who of these leads and serves.
    #[track_caller]
    pub fn leader_among(&self, some: &[usize]) -> usize {
        eventually("a leader", || some.iter().copied().find(|&at| self.nodes[at].leads()))
    }

    /// Who leads and serves, and all the others.
    #[track_caller]
    pub fn leader_and_others(&self) -> (usize, Vec<usize>) {
        let leader = self.leader();
        (leader, self.others(leader))
    }

    /// One that does not lead.
    #[track_caller]
    pub fn follower(&self) -> usize {
        self.others(self.leader())[0]
    }

    /// All but one.
    pub fn others(&self, than: usize) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&at| at != than).collect()
    }

    /// A connection to a member, as soon as it listens.
    #[track_caller]
    pub fn connect(&self, at: usize) -> Client {
        self.nodes[at].connect()
    }

    /// Waits until all that run have applied the same entries, and compares what they have then.
    #[track_caller]
    pub fn wait_until_equal(&self) {
        let running: Vec<_> = self.nodes.iter().filter(|node| node.process.is_some()).collect();
        let begun = Instant::now();
        loop {
            let states: Vec<_> = running.iter().map(|node| state_of(node)).collect();
            if states.iter().all(Option::is_some) && states.windows(2).all(|two| two[0] == two[1]) {
                return;
            }
            assert!(begun.elapsed() < LIMIT, "the nodes do not agree: {states:#?}");
            thread::sleep(millis(20));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if !thread::panicking() {
            return;
        }
        for node in &self.nodes {
            let output = node.output();
            let lines: Vec<_> = output.lines().collect();
            eprintln!("{}:\n{}", node.name, lines[lines.len().saturating_sub(40)..].join("\n"));
        }
    }
}

/// What a node has applied, and what came of it.
fn state_of(node: &Node) -> Option<(u64, Value)> {
    let mut client = Client::connect(node.client).ok()?;
    let mut stats = client.try_stats(Duration::from_secs(2))?;
    let applied = stats["cluster"]["applied_index"].as_u64()?;
    let mut state = serde_json::Map::new();
    for part in ["counters", "kv_entries", "lists", "barriers"] {
        state.insert(part.to_owned(), stats[part].take());
    }
    // Without what counts down.
    for part in ["locks", "semaphores", "rw_locks"] {
        let keys = stats[part].as_array()?.iter().map(|lock| {
            let of = |field: &str| lock.get(field).cloned().unwrap_or_default();
            Value::Array(vec![of("key"), of("fence"), of("waiters")])
        });
        state.insert(part.to_owned(), keys.collect());
    }
    Some((applied, Value::Object(state)))
}
