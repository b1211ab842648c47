//! The real binary, real sockets, real time.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::{Domain, SockRef, Socket, Type};

use super::rest::{Activity, Rest};
use super::{Received, Server};

/// How long an expected line may take, beside the time that the script lets pass.
const PATIENCE: Duration = Duration::from_secs(5);
/// How far real time may run ahead of the script before silence proves nothing.
const LATE: Duration = Duration::from_millis(150);
/// How long a cluster may take to have a leader.
const START: Duration = Duration::from_secs(20);
pub(crate) struct Tcp {
    /// The one that the script talks to first.
    servers: Vec<Process>,
    clients: BTreeMap<String, Client>,
    started: Instant,
    /// What the script let pass.
    passed: Duration,
    /// Of a cluster.
    dir: Option<Dir>,
}

struct Process {
    child: Child,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

struct Client {
    stream: TcpStream,
    received: Vec<u8>,
    ended: bool,
}

impl Process {
    fn start(flags: &[String]) -> Result<Self, String> {
        let mut child = Command::new(env!("CARGO_BIN_EXE_dflockd"))
            .args(flags)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
        let mut first = Vec::new();
        let address = loop {
            let mut line = String::new();
            if stderr.read_line(&mut line).is_ok_and(|count| count == 0) {
                let _ = child.wait();
                return Err(format!("the server did not start: {}", first.concat()));
            }
            first.push(line.clone());
            let address = line.split_whitespace().find_map(|word| word.strip_prefix("addr="));
            if line.contains("listening")
                && let Some(address) = address.and_then(|address| address.parse().ok())
            {
                break address;
            }
        };
        let log = Arc::new(Mutex::new(first));
        let more = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                more.lock().push(line);
            }
        });
        Ok(Self { child, address, log })
    }

    /// The role of a member that serves.
    fn role(&self, flags: &[String]) -> Option<String> {
        let stream = TcpStream::connect(self.address).ok()?;
        let mut client = Client { stream, received: Vec::new(), ended: false };
        let given = flags.iter().position(|flag| flag == "--auth-token");
        let token = given.and_then(|at| flags.get(at + 1)).map(String::as_str);
        let inline = || flags.iter().find_map(|flag| flag.strip_prefix("--auth-token="));
        let mut greeting = String::new();
        if let Some(token) = token.or_else(inline) {
            greeting = format!("auth\n_\n{token}\n");
        }
        client.stream.write_all(format!("{greeting}stats\n_\n\n").as_bytes()).ok()?;
        loop {
            let Received::Line(line) = client.receive(Instant::now() + PATIENCE) else {
                return None;
            };
            let Some(json) = line.strip_prefix(b"ok {") else { continue };
            let json: serde_json::Value = serde_json::from_slice(&[b"{", json].concat()).ok()?;
            let cluster = &json["cluster"];
            return (cluster["ready"] == true)
                .then(|| cluster["role"].as_str().unwrap_or("").to_owned());
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A directory that is removed at the end.
struct Dir(PathBuf);

impl Dir {
    fn new(number: u32) -> Self {
        let name = format!("dflockd-transcript-{}-{number}", std::process::id());
        Self(std::env::temp_dir().join(name))
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Tcp {
    pub(crate) fn start(flags: &[String]) -> Result<Self, String> {
        let mut all = vec!["--port".to_owned(), "0".to_owned()];
        all.extend_from_slice(flags);
        Ok(Self::over(vec![Process::start(&all)?], None))
    }

    /// Members of a cluster that begins with this script. The script talks to one that does not lead, if there are
    /// several.
    pub(crate) fn start_replicated(flags: &[String], size: usize) -> Result<Self, String> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let dir = Dir::new(number);
        // Connections to others come from 127.0.0.1, so nobody takes these ports in between.
        let [_, _, high, low] = (std::process::id() ^ number << 8).to_be_bytes();
        let host = if cfg!(target_os = "linux") {
            Ipv4Addr::new(127, 201, high, low.max(2))
        } else {
            Ipv4Addr::LOCALHOST
        };
        let addresses = free_addresses(host, 2 * size);
        let list: Vec<_> = addresses
            .chunks(2)
            .enumerate()
            .map(|(at, pair)| format!("n{at}={}@{}", pair[1], pair[0]))
            .collect();
        let begun = Instant::now();
        let mut servers = Vec::new();
        for (at, pair) in addresses.chunks(2).enumerate() {
            let mut all: Vec<String> = Vec::new();
            for (flag, value) in [
                ("--host", host.to_string()),
                ("--port", pair[0].port().to_string()),
                ("--raft-dir", dir.0.join(at.to_string()).display().to_string()),
                ("--node-id", format!("n{at}")),
                ("--raft-addr", pair[1].to_string()),
                ("--cluster-peers", list.join(",")),
                ("--raft-auth-token", "0123456789abcdef0123456789abcdef".to_owned()),
                ("--follower-mode", "forward".to_owned()),
                ("--election-timeout-ms", "400".to_owned()),
                // Leases end when the scripts say so, although there was an election.
                ("--failover-grace", "0".to_owned()),
            ] {
                all.extend([flag.to_owned(), value]);
            }
            // What the scripts are about is the default of one server.
            if !flags.iter().any(|flag| flag.contains("auto-release")) {
                all.extend(["--auto-release".to_owned(), "any".to_owned()]);
            }
            all.extend_from_slice(flags);
            std::fs::create_dir_all(&dir.0).map_err(|error| error.to_string())?;
            servers.push(Process::start(&all)?);
        }
        loop {
            let roles: Vec<_> = servers.iter().map(|server| server.role(flags)).collect();
            if roles.iter().all(Option::is_some) {
                let follower = roles.iter().position(|role| role.as_deref() == Some("follower"));
                servers.swap(0, follower.unwrap_or(0));
                break;
            }
            if begun.elapsed() > START {
                return Err(format!("the cluster has no leader: {roles:?}"));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let tcp = Self::over(servers, Some(dir));
        // What was asked is over.
        tcp.settle(None);
        Ok(Self { started: Instant::now(), ..tcp })
    }

    fn over(servers: Vec<Process>, dir: Option<Dir>) -> Self {
        Self {
            servers,
            clients: BTreeMap::new(),
            started: Instant::now(),
            passed: Duration::ZERO,
            dir,
        }
    }

    fn is_replicated(&self) -> bool {
        self.dir.is_some()
    }

    fn pids(&self) -> Vec<u32> {
        self.servers.iter().map(|server| server.child.id()).collect()
    }

    /// Does something that the server notices, and returns when it has dealt with it: when some thread of the
    /// server has run since and all sleep again.
    fn cause(&mut self, act: impl FnOnce(&mut Self)) {
        if !self.is_replicated() {
            self.settle(None);
        }
        let before = Activity::of(&self.pids());
        act(self);
        self.settle(before);
    }

    /// Waits until the servers have come to rest and, if told what they had done before, did more.
    fn settle(&self, before: Option<Activity>) {
        let pids = self.pids();
        let mut rest = Rest::new(before, self.is_replicated());
        while !rest.has_come(&pids) {}
    }

    fn client(&mut self, conn: &str) -> &mut Client {
        self.clients.get_mut(conn).expect("opened before it is used")
    }
}

impl Server for Tcp {
    fn open(&mut self, conn: &str) {
        self.cause(|tcp| {
            let stream = TcpStream::connect(tcp.servers[0].address).expect("the server listens");
            stream.set_nodelay(true).expect("a socket takes options");
            let client = Client { stream, received: Vec::new(), ended: false };
            tcp.clients.insert(conn.to_owned(), client);
        });
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        // The server may have closed already, which the script will see.
        self.cause(|tcp| {
            let _ = tcp.client(conn).stream.write_all(bytes);
        });
    }

    fn half_close(&mut self, conn: &str) {
        self.cause(|tcp| {
            let _ = tcp.client(conn).stream.shutdown(Shutdown::Write);
        });
    }

    fn close(&mut self, conn: &str) {
        self.half_close(conn);
        // The server closes its side when it has cleaned up.
        while let Received::Line(_) = self.receive(conn) {}
    }

    fn reset(&mut self, conn: &str) {
        self.cause(|tcp| {
            let client = tcp.clients.remove(conn).expect("opened before it is used");
            let _ = SockRef::from(&client.stream).set_linger(Some(Duration::ZERO));
        });
    }

    fn stall(&mut self, _conn: &str) {
        panic!("sockets have buffers of their own: mark the section `only: process`");
    }

    fn receive(&mut self, conn: &str) -> Received {
        let received = self.client(conn).receive(Instant::now() + PATIENCE);
        if self.is_replicated() && matches!(received, Received::End) {
            // What the end means goes through the log, behind the end itself.
            self.settle(None);
        }
        received
    }

    fn receive_now(&mut self, conn: &str) -> Received {
        self.settle(None);
        self.client(conn).receive(Instant::now())
    }

    fn pass(&mut self, time: Duration) {
        std::thread::sleep(time);
        self.passed += time;
    }

    fn is_late(&self) -> bool {
        self.started.elapsed() > self.passed + LATE
    }

    fn terminate(&mut self) {
        self.cause(|tcp| {
            let pid = tcp.servers[0].child.id().to_string();
            let status = Command::new("kill").args(["-TERM", &pid]).status();
            assert!(status.is_ok_and(|status| status.success()), "kill -TERM {pid} failed");
        });
    }

    fn check(&mut self) {}

    fn log(&self) -> Vec<String> {
        self.servers.iter().flat_map(|server| server.log.lock().clone()).collect()
    }
}

impl Client {
    fn receive(&mut self, until: Instant) -> Received {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                return Received::Line(self.received.drain(..=end).take(end).collect());
            }
            if self.ended {
                return Received::End;
            }
            let left = until.saturating_duration_since(Instant::now());
            self.stream.set_nonblocking(left.is_zero()).expect("a socket takes options");
            let timeout = left.max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(timeout)).expect("a socket takes options");
            let mut buffer = [0; 16 * 1024];
            let read = self.stream.read(&mut buffer);
            self.stream.set_nonblocking(false).expect("a socket takes options");
            match read {
                Ok(0) => self.ended = true,
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if is_early(&error) => return Received::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A reset is an end, too.
                Err(_) => self.ended = true,
            }
        }
    }
}

/// Whether there was just nothing to read yet.
fn is_early(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// Free ports, all different. Bound, but never listened on: a process that another test starts at this moment has
/// a copy of each socket until it is the server, and a copy that listens would keep the port.
fn free_addresses(host: Ipv4Addr, count: usize) -> Vec<SocketAddr> {
    let bind = |_| {
        let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
        socket.set_reuse_address(true).expect("a new socket");
        socket.bind(&SocketAddr::from((host, 0)).into()).expect("a free port");
        socket
    };
    let bound: Vec<_> = (0..count).map(bind).collect();
    let address = |socket: &Socket| socket.local_addr().expect("bound").as_socket().expect("IPv4");
    bound.iter().map(address).collect()
}
