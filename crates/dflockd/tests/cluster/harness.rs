//! A cluster of server processes, and a client that speaks to one of them.

use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;
use socket2::{Domain, SockRef, Socket, Type};

/// How long anything may take that is bound to happen. Generous: the machine may be busy.
pub(super) const LIMIT: Duration = Duration::from_secs(30);
/// How long the answer to a request may take that does not wait by its own will: five seconds, and some for
/// the machine.
pub(super) const ANSWER: Duration = Duration::from_secs(10);
pub(super) const SECRET: &str = "0123456789abcdef0123456789abcdef";
pub(super) const NAMES: [&str; 7] =
    ["node-a", "node-b", "node-c", "node-d", "node-e", "node-f", "node-g"];

/// How long members are patient with their leader where an election would be a failure.
pub(super) const CALM_MS: &str = "2000";

pub(super) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Asks again and again until there is an answer.
#[track_caller]
pub(super) fn eventually<T>(what: &str, ask: impl FnMut() -> Option<T>) -> T {
    within(LIMIT, what, ask)
}

#[track_caller]
pub(super) fn within<T>(limit: Duration, what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < limit, "waited in vain for: {what}");
        thread::sleep(millis(5));
    }
}

/// The right to use the machine. Two tests may at a time, one that measures is alone.
pub(super) struct Turn(u32);

static TURNS: (Mutex<u32>, Condvar) = (Mutex::new(2), Condvar::new());

impl Turn {
    pub(super) fn shared() -> Self {
        Self::take(1)
    }

    pub(super) fn alone() -> Self {
        Self::take(2)
    }

    fn take(count: u32) -> Self {
        let (free, came) = &TURNS;
        let mut free = free.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        while *free < count {
            free = came.wait(free).unwrap_or_else(|poisoned| poisoned.into_inner());
        }
        *free -= count;
        Self(count)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let (free, came) = &TURNS;
        *free.lock().unwrap_or_else(|poisoned| poisoned.into_inner()) += self.0;
        came.notify_all();
    }
}

/// A directory that is removed at the end.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dflockd-cluster-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// An address of its own for each cluster: a node that is down must find its ports free when it comes back, and
/// connections to others come from 127.0.0.1.
pub(super) fn host() -> Ipv4Addr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    if !cfg!(target_os = "linux") {
        return Ipv4Addr::LOCALHOST;
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 100 + u8::try_from(count % 100).unwrap(), high, low.max(2))
}

/// Free ports, all different. Bound, but never listened on: a process that another test starts at this moment has
/// a copy of each socket until it is the server, and a copy that listens would keep the port.
pub(super) fn free_addresses(host: Ipv4Addr, count: usize) -> Vec<SocketAddr> {
    let bind = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from((host, 0)).into()).unwrap();
        socket
    };
    let bound: Vec<_> = (0..count).map(bind).collect();
    let address = |socket: &Socket| socket.local_addr().unwrap().as_socket().unwrap();
    bound.iter().map(address).collect()
}

/// A server process, ended by its own id when it is no longer needed.
pub(super) struct Process {
    child: Child,
    output: Arc<Mutex<Vec<u8>>>,
}

impl Process {
    pub(super) fn start(args: &[String]) -> Self {
        Self::start_with(args, None)
    }

    /// The same with a variable in its environment, which is empty otherwise.
    pub(super) fn start_with(args: &[String], variable: Option<(&str, &str)>) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dflockd"));
        command.args(args).env_clear().envs(variable);
        let mut child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary exists");
        let output: Arc<Mutex<Vec<u8>>> = Arc::default();
        let (mut stream, kept) = (child.stderr.take().expect("piped"), Arc::clone(&output));
        thread::spawn(move || {
            let mut bytes = [0; 4096];
            while let Ok(count @ 1..) = stream.read(&mut bytes) {
                kept.lock().unwrap().extend_from_slice(&bytes[..count]);
            }
        });
        Self { child, output }
    }

    pub(super) fn output(&self) -> String {
        String::from_utf8_lossy(&self.output.lock().unwrap()).into_owned()
    }

    pub(super) fn signal(&self, name: &str) {
        let status = Command::new("/bin/kill")
            .args([format!("-{name}"), self.child.id().to_string()])
            .status()
            .expect("kill exists");
        assert!(status.success(), "kill -{name}");
    }

    /// The processor time it has used.
    pub(super) fn cpu_time(&self) -> Duration {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.child.id())).expect("it runs");
        let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        // Those of its own and of the kernel for it, in hundredths of a second.
        let ticks: u64 =
            fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
        millis(ticks * 10)
    }

    pub(super) fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("it is our child")
    }

    #[track_caller]
    pub(super) fn wait_for_end(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.ended() {
                // What it said last may still be on its way.
                thread::sleep(millis(20));
                return status;
            }
            assert!(begun.elapsed() < LIMIT, "it does not end: {}", self.output());
            thread::sleep(millis(5));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A member: what it was started with, and its process if it runs.
pub(super) struct Node {
    pub(super) name: String,
    pub(super) client: SocketAddr,
    pub(super) dir: PathBuf,
    pub(super) flags: Vec<String>,
    pub(super) variable: Option<(&'static str, &'static str)>,
    pub(super) process: Option<Process>,
}

impl Node {
    /// Its flags for a node that is to find its own way (`formation`).
    pub(super) fn new(
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
        Self { name: name.to_owned(), client, dir, flags, variable: None, process: None }
    }

    pub(super) fn start(&mut self) {
        assert!(self.process.is_none(), "{} runs", self.name);
        self.process = Some(Process::start_with(&self.flags, self.variable));
    }

    /// Starts it and demands that it ends by itself; gives what it said.
    #[track_caller]
    pub(super) fn start_in_vain(&mut self) -> String {
        let mut process = Process::start_with(&self.flags, self.variable);
        let status = process.wait_for_end();
        assert!(!status.success(), "{}: {}", self.name, process.output());
        process.output()
    }

    pub(super) fn kill(&mut self) {
        drop(self.process.take().expect("it runs"));
    }

    /// Ends it as an operator would.
    #[track_caller]
    pub(super) fn terminate(&mut self) {
        let mut process = self.process.take().expect("it runs");
        process.signal("TERM");
        let status = process.wait_for_end();
        assert!(status.success(), "{}: {status}: {}", self.name, process.output());
    }

    pub(super) fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("it runs")
    }

    pub(super) fn output(&self) -> String {
        self.process.as_ref().map(Process::output).unwrap_or_default()
    }

    /// A connection, as soon as it listens.
    #[track_caller]
    pub(super) fn connect(&self) -> Client {
        let what = format!("{} listens", self.name);
        eventually(&what, || Client::connect(self.client).ok())
    }

    /// The member `cluster` of its stats, if it answers soon.
    pub(super) fn status(&self) -> Option<Value> {
        let mut client = Client::connect(self.client).ok()?;
        client.stats(Duration::from_secs(1)).map(|mut stats| stats["cluster"].take())
    }

    pub(super) fn is_ready(&self) -> bool {
        self.status().is_some_and(|status| status["ready"] == true)
    }

    #[track_caller]
    pub(super) fn wait_until_ready(&self) {
        let begun = Instant::now();
        while !self.is_ready() {
            let late = begun.elapsed() > LIMIT;
            assert!(!late, "{} is not ready: {:?} {}", self.name, self.status(), self.output());
            thread::sleep(millis(10));
        }
    }
}

/// Some nodes that begin together.
pub(super) struct Cluster {
    pub(super) nodes: Vec<Node>,
    pub(super) dir: Dir,
    _turn: Turn,
}

impl Cluster {
    /// One where a busy machine is no reason for an election.
    pub(super) fn calm(size: usize) -> Self {
        Self::start_with(Turn::shared(), size, &["--election-timeout-ms", CALM_MS])
    }

    /// A cluster that has a leader.
    pub(super) fn start(size: usize, flags: &[&str]) -> Self {
        Self::start_with(Turn::shared(), size, flags)
    }

    pub(super) fn start_with(turn: Turn, size: usize, flags: &[&str]) -> Self {
        let mut cluster = Self::prepare(turn, size, flags, |addresses| addresses.to_vec());
        for node in &mut cluster.nodes {
            node.start();
        }
        cluster.wait_until_ready();
        cluster
    }

    /// Nodes that are not started. `dialed` says for the peer addresses where others dial them.
    pub(super) fn prepare(
        turn: Turn,
        size: usize,
        flags: &[&str],
        dialed: impl FnOnce(&[SocketAddr]) -> Vec<SocketAddr>,
    ) -> Self {
        let dir = Dir::new();
        let addresses = free_addresses(host(), 2 * size);
        let (clients, peers) = addresses.split_at(size);
        let dialed = dialed(peers);
        let list: Vec<_> = NAMES[..size]
            .iter()
            .zip(clients.iter().zip(&dialed))
            .map(|(name, (client, peer))| format!("{name}={peer}@{client}"))
            .collect();
        let mut formation = vec!["--cluster-peers".to_owned(), list.join(",")];
        formation.extend(flags.iter().map(ToString::to_string));
        let nodes = NAMES[..size]
            .iter()
            .zip(clients.iter().zip(peers))
            .map(|(name, (client, peer))| {
                Node::new(name, *client, *peer, dir.path(name), &formation)
            })
            .collect();
        Self { nodes, dir, _turn: turn }
    }

    #[track_caller]
    pub(super) fn wait_until_ready(&self) {
        for node in self.nodes.iter().filter(|node| node.process.is_some()) {
            node.wait_until_ready();
        }
    }

    /// Who leads and serves.
    #[track_caller]
    pub(super) fn leader(&self) -> usize {
        self.leader_among(&(0..self.nodes.len()).collect::<Vec<_>>())
    }

    #[track_caller]
    pub(super) fn leader_among(&self, some: &[usize]) -> usize {
        eventually("a leader", || {
            some.iter().copied().find(|&at| {
                self.nodes[at].process.is_some()
                    && self.nodes[at]
                        .status()
                        .is_some_and(|status| status["role"] == "leader" && status["ready"] == true)
            })
        })
    }

    /// All but one.
    pub(super) fn others(&self, than: usize) -> Vec<usize> {
        (0..self.nodes.len()).filter(|&at| at != than).collect()
    }

    pub(super) fn connect(&self, at: usize) -> Client {
        self.nodes[at].connect()
    }

    /// Waits until all that run have applied the same entries, and compares what they have then.
    #[track_caller]
    pub(super) fn wait_until_equal(&self) {
        let running: Vec<_> = self.nodes.iter().filter(|node| node.process.is_some()).collect();
        let mut last = Vec::new();
        let begun = Instant::now();
        loop {
            let states: Vec<_> = running.iter().map(|node| state_of(node)).collect();
            if states.iter().all(Option::is_some) && states.windows(2).all(|two| two[0] == two[1]) {
                return;
            }
            if begun.elapsed() > LIMIT {
                last.extend(states.into_iter().flatten());
                panic!("the nodes do not agree: {last:#?}");
            }
            thread::sleep(millis(20));
        }
    }
}

/// What a node has applied, and what came of it.
fn state_of(node: &Node) -> Option<(u64, Value)> {
    let mut client = Client::connect(node.client).ok()?;
    let mut stats = client.stats(Duration::from_secs(2))?;
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

/// What came of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Line(String),
    /// Closed or reset by the server.
    End,
    Nothing,
}

impl Heard {
    pub(super) fn line(&self) -> Option<&str> {
        match self {
            Self::Line(line) => Some(line),
            Self::End | Self::Nothing => None,
        }
    }
}

/// Nothing came yet.
pub(super) const PATIENCE: [ErrorKind; 3] =
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];

/// One connection.
pub(super) struct Client {
    socket: TcpStream,
    buffer: Vec<u8>,
}

impl Client {
    pub(super) fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(ANSWER))?;
        Ok(Self { socket, buffer: Vec::new() })
    }

    /// Sends a request without waiting for its answer. Whether the server is gone shows when that is read.
    pub(super) fn begin(&mut self, command: &str, key: &str, arg: &str) {
        let _ = self.socket.write_all(format!("{command}\n{key}\n{arg}\n").as_bytes());
    }

    /// A request and its answer.
    #[track_caller]
    pub(super) fn ask(&mut self, command: &str, key: &str, arg: &str) -> String {
        match self.try_ask(command, key, arg, ANSWER) {
            Heard::Line(line) => line,
            other @ (Heard::End | Heard::Nothing) => {
                panic!("{other:?} instead of an answer to {command} {key} {arg}")
            }
        }
    }

    pub(super) fn try_ask(&mut self, command: &str, key: &str, arg: &str, time: Duration) -> Heard {
        self.begin(command, key, arg);
        self.hear(time)
    }

    #[track_caller]
    pub(super) fn check(&mut self, command: &str, key: &str, arg: &str, answer: &str) {
        assert_eq!(self.ask(command, key, arg), answer, "{command} {key} {arg}");
    }

    /// Takes a lock that must be free now, or become so within the wait; gives its token.
    #[track_caller]
    pub(super) fn lock(&mut self, key: &str, arg: &str) -> String {
        granted(&self.ask("l", key, arg))
    }

    #[track_caller]
    pub(super) fn line(&mut self) -> String {
        match self.hear(ANSWER) {
            Heard::Line(line) => line,
            other @ (Heard::End | Heard::Nothing) => panic!("{other:?} instead of a line"),
        }
    }

    #[track_caller]
    pub(super) fn expect(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// Lines in any order: an answer and a push may overtake each other.
    #[track_caller]
    pub(super) fn expect_all(&mut self, lines: &[&str]) {
        let mut heard: Vec<_> = lines.iter().map(|_| self.line()).collect();
        let mut wanted: Vec<_> = lines.iter().map(ToString::to_string).collect();
        heard.sort();
        wanted.sort();
        assert_eq!(heard, wanted);
    }

    #[track_caller]
    pub(super) fn expect_end(&mut self) {
        assert_eq!(self.hear(ANSWER), Heard::End);
    }

    /// The next line, if there is one before the time is over.
    pub(super) fn hear(&mut self, time: Duration) -> Heard {
        let until = Instant::now() + time;
        loop {
            if let Some(end) = self.buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.buffer.drain(..=end).take(end).collect();
                return Heard::Line(String::from_utf8_lossy(&line).into_owned());
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Heard::Nothing;
            }
            let _ = self.socket.set_read_timeout(Some(left));
            let mut bytes = [0; 64 * 1024];
            match self.socket.read(&mut bytes) {
                Ok(0) => return Heard::End,
                Ok(count) => self.buffer.extend_from_slice(&bytes[..count]),
                Err(error) if PATIENCE.contains(&error.kind()) => {}
                // A reset is an end, too.
                Err(_) => return Heard::End,
            }
        }
    }

    /// Ends with a reset, as a crashed machine's kernel would.
    pub(super) fn reset(self) {
        SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// The state of the server as it sees it.
    pub(super) fn stats(&mut self, time: Duration) -> Option<Value> {
        let answer = self.try_ask("stats", "_", "", time);
        serde_json::from_str(answer.line()?.strip_prefix("ok ")?).ok()
    }

    #[track_caller]
    pub(super) fn wait_for_waiters(&mut self, list: &str, key: &str, count: u64) {
        eventually(&format!("{count} waiters"), || {
            let stats = self.stats(ANSWER)?;
            let waiters = entry(&stats, list, key)?["waiters"].as_u64()?;
            (waiters == count).then_some(())
        });
    }
}

/// One entry of a list in the stats.
pub(super) fn entry<'a>(stats: &'a Value, list: &str, key: &str) -> Option<&'a Value> {
    stats[list].as_array()?.iter().find(|entry| entry["key"] == key)
}

/// The token of a grant.
#[track_caller]
pub(super) fn granted(answer: &str) -> String {
    let mut words = answer.split(' ');
    assert!(matches!(words.next(), Some("ok" | "acquired")), "no grant: {answer}");
    let token = words.next().unwrap_or_else(|| panic!("no grant: {answer}"));
    assert_eq!(token.len(), 32, "{answer}");
    token.to_owned()
}

/// The fence in a token.
pub(super) fn fence(token: &str) -> u64 {
    u64::from_str_radix(&token[..16], 16).unwrap()
}

/// Files of a data directory, in order.
pub(super) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

/// Numbers that look random but are the same in every run.
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self((seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        // Xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }
}
