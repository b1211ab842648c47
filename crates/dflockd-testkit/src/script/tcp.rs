//! Scripts before the real binary, over real sockets, in real time.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use super::rest::{Activity, Rest};
use super::{Received, Server};
use crate::cluster::{Cluster, Turn};
use crate::line::Client;
use crate::process::{self, command, signal};

/// How long an expected line may take, beside the time that the script lets pass.
const PATIENCE: Duration = Duration::from_secs(5);
/// How far real time may run ahead of the script before silence proves nothing.
const LATE: Duration = Duration::from_millis(150);

/// What the script talks to.
enum Servers {
    One(process::Server),
    Cluster(Cluster),
}

/// A server that is talked to over TCP.
pub struct Tcp {
    servers: Servers,
    /// Where the script connects to.
    address: SocketAddr,
    /// The processes; the script talks to the first.
    pids: Vec<u32>,
    clients: BTreeMap<String, Client>,
    started: Instant,
    /// What the script let pass.
    passed: Duration,
}

impl Tcp {
    /// One in memory mode.
    pub fn start(flags: &[String]) -> Result<Self, String> {
        let server = process::Server::try_launch(command(flags))?;
        Ok(Self::over(server.address, vec![server.pid()], Servers::One(server)))
    }

    /// Members of a cluster that begins with this script. The script talks to one that does not lead, if there are
    /// several.
    pub fn start_replicated(flags: &[String], size: usize) -> Self {
        let mut all = vec!["--follower-mode", "forward", "--election-timeout-ms", "400"];
        // Leases end when the scripts say so, although there was an election.
        all.extend(["--failover-grace", "0"]);
        // What the scripts are about is the default of one server.
        if !flags.iter().any(|flag| flag.contains("auto-release")) {
            all.extend(["--auto-release", "any"]);
        }
        all.extend(flags.iter().map(String::as_str));
        let mut cluster = Cluster::start_with(Turn::free(), size, &all);
        let leader = cluster.leader();
        cluster.nodes.rotate_left((leader + 1) % size);
        let pids = cluster.nodes.iter_mut().map(|node| node.process().pid()).collect();
        let tcp = Self::over(cluster.nodes[0].client, pids, Servers::Cluster(cluster));
        // What was asked is over.
        tcp.settle(None);
        Self { started: Instant::now(), ..tcp }
    }

    fn over(address: SocketAddr, pids: Vec<u32>, servers: Servers) -> Self {
        let (clients, started, passed) = (BTreeMap::new(), Instant::now(), Duration::ZERO);
        Self { servers, address, pids, clients, started, passed }
    }

    fn is_replicated(&self) -> bool {
        matches!(self.servers, Servers::Cluster(_))
    }

    /// Does something that the server notices, and returns when it has dealt with it: when some thread of the
    /// server has run since and all sleep again.
    fn cause(&mut self, act: impl FnOnce(&mut Self)) {
        if !self.is_replicated() {
            self.settle(None);
        }
        let before = Activity::of(&self.pids);
        act(self);
        self.settle(before);
    }

    /// Waits until the servers have come to rest and, if told what they had done before, did more.
    fn settle(&self, before: Option<Activity>) {
        let mut rest = Rest::new(before, self.is_replicated());
        while !rest.has_come(&self.pids) {}
    }

    fn client(&mut self, conn: &str) -> &mut Client {
        self.clients.get_mut(conn).expect("opened before it is used")
    }
}

impl Server for Tcp {
    fn open(&mut self, conn: &str) {
        self.cause(|tcp| {
            let stream = TcpStream::connect(tcp.address).expect("the server listens");
            stream.set_nodelay(true).expect("a socket takes options");
            tcp.clients.insert(conn.to_owned(), Client::over(stream));
        });
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        // The server may have closed already, which the script will see.
        self.cause(|tcp| {
            let _ = tcp.client(conn).try_send(bytes);
        });
    }

    fn half_close(&mut self, conn: &str) {
        self.cause(|tcp| tcp.client(conn).half_close());
    }

    fn close(&mut self, conn: &str) {
        self.half_close(conn);
        // The server closes its side when it has cleaned up.
        while let Received::Line(_) = self.receive(conn) {}
    }

    fn reset(&mut self, conn: &str) {
        self.cause(|tcp| tcp.clients.remove(conn).expect("opened before it is used").reset());
    }

    fn stall(&mut self, _conn: &str) {
        panic!("sockets have buffers of their own: mark the section `only: process`");
    }

    fn receive(&mut self, conn: &str) -> Received {
        let received = self.client(conn).hear_bytes(PATIENCE);
        if self.is_replicated() && received == Received::End {
            // What the end means goes through the log, behind the end itself.
            self.settle(None);
        }
        received
    }

    fn receive_now(&mut self, conn: &str) -> Received {
        self.settle(None);
        self.client(conn).hear_bytes(Duration::ZERO)
    }

    fn pass(&mut self, time: Duration) {
        std::thread::sleep(time);
        self.passed += time;
    }

    fn is_late(&self) -> bool {
        self.started.elapsed() > self.passed + LATE
    }

    fn terminate(&mut self) {
        self.cause(|tcp| signal(tcp.pids[0], "TERM"));
    }

    fn check(&mut self) {}

    fn log(&self) -> Vec<String> {
        let outputs = match &self.servers {
            Servers::One(server) => vec![server.output()],
            Servers::Cluster(cluster) => cluster.nodes.iter().map(|node| node.output()).collect(),
        };
        outputs.iter().flat_map(|output| output.lines()).map(str::to_owned).collect()
    }
}
