//! How long clients wait when the leader of a cluster of three is lost.
//!
//! ```text
//! cargo run --release -p dflockd-bench --example failover -- --kind kill --rounds 40
//! ```
//!
//! Starts three members on loopback, with their logs in the directory for temporary files, and takes their leader away,
//! again and again. Three clients ask all the time, one request after the other with a pause of 10 ms:
//!
//! - `line`: a plain connection to a follower,
//! - `client, follower`: the client library, whose session is at a follower,
//! - `client, leader`: the client library, whose session is at the leader, so that it has to move.
//!
//! Each sends one more request right behind the fault, repeated until it succeeds. `sent after` is the time from the
//! fault to that success, `in flight` the time from the fault to the next answer in the row of requests, which is that
//! of the request under way if there was one. The fault is the system call that sends the signal, or the moment at
//! which the proxies stop to forward.
//!
//! After each round the member comes back, and the next round begins when all three serve and have been connected for
//! more than a second. Elections count real time: on a busy machine the figures are about the machine.

#![expect(clippy::unwrap_used, reason = "whatever fails here is the end of the measurement")]
#![expect(clippy::print_stdout, reason = "what it finds is what it prints")]

mod gate;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use clap::Parser;
use dflockd_client::Client as Library;
use dflockd_testkit::cluster::Addresses;
use dflockd_testkit::peers::Proxy;
use dflockd_testkit::process::set_dflockd;
use dflockd_testkit::{Client, Cluster, Turn, eventually};
use rustix::process::{Pid, Signal, kill_process};

use crate::gate::Gates;

/// The pause between two requests of a client.
const PAUSE: Duration = Duration::from_millis(10);

/// How long one request may take; servers give up after 5 s.
const ANSWER: Duration = Duration::from_secs(10);

/// How long members have been connected when the leader is lost: what was lost before a second has passed is not dialed
/// again at once.
const SETTLED: Duration = Duration::from_millis(1300);

/// Measure how long clients wait when the leader of a cluster of three is lost.
#[derive(Debug, Parser)]
struct Args {
    /// The server; the one beside this program if not given.
    #[arg(long)]
    binary: Option<PathBuf>,
    /// How the leader is lost.
    #[arg(long, value_enum)]
    kind: Kind,
    /// How often.
    #[arg(long, default_value = "40")]
    rounds: u32,
    /// `--election-timeout-ms` of the members; their default if not given.
    #[arg(long)]
    election_timeout: Option<u64>,
    /// The heartbeat of the client library in milliseconds; its default if not given.
    #[arg(long)]
    heartbeat: Option<u64>,
    /// Print each round.
    #[arg(long)]
    verbose: bool,
    /// Print what the members have logged since the fault of each round that took longer, in milliseconds.
    #[arg(long)]
    slow: Option<u64>,
}

/// How a leader is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// SIGKILL: its connections are reset, and its ports refuse.
    Kill,
    /// SIGSTOP: its connections stand, and nobody answers.
    Stop,
    /// Proxies before all ports of the members stop to forward what the leader sends and what it is sent, and close
    /// nothing. The leader runs on, alone.
    Swallow,
}

fn main() {
    let args = Args::parse();
    if let Some(binary) = &args.binary {
        set_dflockd(binary.clone());
    }
    let mut site = Site::start(&args);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let mut times: [[Vec<Duration>; 2]; 3] = Default::default();
    for round in 0..args.rounds {
        let found = site.round(&runtime, &args);
        if args.verbose {
            let ms = found.map(|pair| pair.map(|time| time.as_millis()));
            println!("round {round}: leader {}, [sent after, in flight] ms: {ms:?}", site.leader);
        }
        for (all, pair) in times.iter_mut().flatten().zip(found.into_iter().flatten()) {
            all.push(pair);
        }
    }
    report(&args, &mut times);
}

/// The names of the clients, in the order of their figures.
const CLIENTS: [&str; 3] = ["line", "client, follower", "client, leader"];

fn report(args: &Args, times: &mut [[Vec<Duration>; 2]; 3]) {
    let timeout = args.election_timeout.map_or("default".to_owned(), |ms| format!("{ms} ms"));
    println!("{:?}, {} rounds, election timeout {timeout}; milliseconds", args.kind, args.rounds);
    println!("| Client | Request | p50 | p90 | p99 | max |");
    println!("|---|---|---|---|---|---|");
    for (client, pair) in CLIENTS.iter().zip(times) {
        for (request, all) in ["sent after", "in flight"].iter().zip(pair) {
            all.sort_unstable();
            let at = |part: usize| all[(all.len() * part).div_ceil(100).max(1) - 1].as_millis();
            let [p50, p90, p99, max] = [50, 90, 99, 100].map(at);
            println!("| {client} | {request} | {p50} | {p90} | {p99} | {max} |");
        }
    }
}

/// The cluster, and what stands between it and others.
struct Site {
    cluster: Cluster,
    /// Where clients are told to go.
    clients: Vec<SocketAddr>,
    proxies: Option<(Proxy, Gates)>,
    leader: usize,
}

impl Site {
    fn start(args: &Args) -> Self {
        let mut addresses = Addresses::free(3);
        let proxies = (args.kind == Kind::Swallow)
            .then(|| (Proxy::between(&mut addresses), Gates::before(&mut addresses)));
        let timeout = args.election_timeout.map(|ms| ms.to_string());
        let flags = timeout.iter().flat_map(|ms| ["--election-timeout-ms", ms]);
        let flags: Vec<&str> = flags.collect();
        let mut cluster = Cluster::prepare_at(Turn::alone(), &addresses, &flags);
        cluster.start_all();
        Self { cluster, clients: addresses.advertised, proxies, leader: 0 }
    }

    /// Loses the leader once, and gets it back. Gives for each client the times from the fault.
    fn round(&mut self, runtime: &tokio::runtime::Runtime, args: &Args) -> [[Duration; 2]; 3] {
        eventually("all serve", || self.cluster.nodes.iter().all(|node| node.is_ready()));
        // Not in step with the heartbeats.
        let extra = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().subsec_micros() % 200;
        thread::sleep(SETTLED + Duration::from_millis(extra.into()));
        self.leader = self.cluster.leader();
        let follower = self.cluster.others(self.leader)[usize::from(extra % 2 == 1)];
        let [at_follower, at_leader] =
            [follower, self.leader].map(|at| self.library(runtime, at, args));
        let is_lost = Arc::new(AtomicBool::new(false));
        let askers: Vec<thread::JoinHandle<[Instant; 2]>> = vec![
            ask_lines(self.clients[follower], &is_lost),
            ask_library(runtime, at_follower, &is_lost),
            ask_library(runtime, at_leader, &is_lost),
        ];
        thread::sleep(Duration::from_millis(300));
        let lost_at = self.lose(args.kind);
        is_lost.store(true, Ordering::SeqCst);
        let answered = askers.into_iter().map(|asker| asker.join().unwrap());
        let times: Vec<_> =
            answered.map(|times| times.map(|at| at.duration_since(lost_at))).collect();
        if args.slow.is_some_and(|ms| times.iter().flatten().any(|it| it.as_millis() > ms.into())) {
            for node in &self.cluster.nodes {
                let output = node.output();
                let last = output.lines().rev().take(30).collect::<Vec<_>>();
                println!("{}:", node.name);
                last.iter().rev().for_each(|line| println!("  {line}"));
            }
        }
        self.get_back(args.kind);
        times.try_into().unwrap()
    }

    /// A client whose session is at a member.
    fn library(&self, runtime: &tokio::runtime::Runtime, at: usize, args: &Args) -> Library {
        let mut builder = Library::builder().cluster([self.clients[at].to_string()]);
        if let Some(ms) = args.heartbeat {
            builder = builder.heartbeat(Duration::from_millis(ms));
        }
        runtime.block_on(builder.connect()).unwrap()
    }

    fn lose(&mut self, kind: Kind) -> Instant {
        let pid = self.cluster.nodes[self.leader].process().pid();
        let pid = Pid::from_raw(pid.try_into().unwrap()).unwrap();
        let now = Instant::now();
        match kind {
            Kind::Kill => kill_process(pid, Signal::KILL).unwrap(),
            Kind::Stop => kill_process(pid, Signal::STOP).unwrap(),
            Kind::Swallow => {
                let (proxy, gates) = self.proxies.as_ref().unwrap();
                gates.shut(self.leader, true);
                proxy.isolate(self.leader, &self.cluster.others(self.leader));
            }
        }
        now
    }

    fn get_back(&mut self, kind: Kind) {
        let node = &mut self.cluster.nodes[self.leader];
        match kind {
            Kind::Kill => node.restart(),
            Kind::Stop => node.process().signal("CONT"),
            Kind::Swallow => {
                let (proxy, gates) = self.proxies.as_ref().unwrap();
                gates.shut(self.leader, false);
                proxy.heal();
            }
        }
    }
}

/// Asks on plain connections; gives when the request sent behind the fault succeeded, and the one before it.
fn ask_lines(member: SocketAddr, is_lost: &Arc<AtomicBool>) -> thread::JoinHandle<[Instant; 2]> {
    let is_lost = Arc::clone(is_lost);
    let ask = |client: &mut Client, key: &str| {
        let heard = client.try_ask("incr", key, "1", ANSWER);
        heard.line().is_some_and(|line| line.starts_with("ok "))
    };
    let (mut row, mut after) = (Client::connect(member).unwrap(), Client::connect(member).unwrap());
    assert!(ask(&mut after, "after"), "it works before the fault");
    let told = Arc::clone(&is_lost);
    let row = thread::spawn(move || {
        loop {
            let was_lost = told.load(Ordering::SeqCst);
            let done = ask(&mut row, "row");
            if done && (was_lost || told.load(Ordering::SeqCst)) {
                return Instant::now();
            }
            thread::sleep(PAUSE);
        }
    });
    thread::spawn(move || {
        wait_for(&is_lost);
        while !ask(&mut after, "after") {
            thread::sleep(PAUSE);
        }
        [Instant::now(), row.join().unwrap()]
    })
}

/// The same with the client library.
fn ask_library(
    runtime: &tokio::runtime::Runtime,
    client: Library,
    is_lost: &Arc<AtomicBool>,
) -> thread::JoinHandle<[Instant; 2]> {
    let (is_lost, told) = (Arc::clone(is_lost), Arc::clone(is_lost));
    let other = client.clone();
    let row = runtime.spawn(async move {
        loop {
            let done = other.counter("row").add(1).await.is_ok();
            if done && told.load(Ordering::SeqCst) {
                return Instant::now();
            }
            tokio::time::sleep(PAUSE).await;
        }
    });
    let runtime = runtime.handle().clone();
    thread::spawn(move || {
        wait_for(&is_lost);
        let after = async {
            while client.counter("after").add(1).await.is_err() {
                tokio::time::sleep(PAUSE).await;
            }
            Instant::now()
        };
        let after = runtime.block_on(after);
        [after, runtime.block_on(row).unwrap()]
    })
}

fn wait_for(flag: &AtomicBool) {
    while !flag.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_micros(500));
    }
}
