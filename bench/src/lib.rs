//! Load on lock servers, and how they compare.
//!
//! `load` is the generator, [`protocol`] what it must know of what it speaks, `check` the oracle beside it; `holders`
//! and `grow` are the workloads that are no closed loop; `report` shows the outcome. Which servers there are is the
//! caller's business ([`Target`]); the library itself speaks with dflockd only. Absolute figures depend on the machine
//! and on what else runs on it: compare sides of one run.

mod check;
mod grow;
mod grpc;
mod holders;
mod http;
pub mod http2;
mod leader;
pub mod lines;
mod link;
mod load;
mod numbers;
mod process;
pub mod proto;
pub mod protocol;
mod report;
mod side;

use std::fmt;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

pub use self::grpc::Grpc;
pub use self::http::Http;
use self::lines::Lines;
use self::load::{Keys, Plan};
pub use self::numbers::Random;
use self::protocol::Protocol;
use self::report::{Lap, Progress, Race};
use self::side::Side;
pub use self::side::resolve;

/// What to run.
#[derive(Debug, clap::Args)]
pub struct Args<T: Target> {
    /// The load: own keys, one key, zipf, idle holders, pipelined, several servers, state grows.
    #[arg(long, value_enum, default_value = "w1")]
    workload: Workload,
    /// Servers; connection i goes to server i modulo their number.
    #[arg(long, value_delimiter = ',', default_value = "127.0.0.1:6388", value_parser = resolve)]
    servers: Vec<SocketAddr>,
    /// Send everything to the server that leads, on all sides; asked before each round.
    #[arg(long)]
    leader: bool,
    /// What the servers are.
    #[arg(long, value_enum, default_value = "dflockd")]
    target: T,
    /// Processes of the servers, for processor time and memory.
    #[arg(long, value_delimiter = ',')]
    pid: Vec<u32>,
    /// Another side, in alternating rounds: `TARGET=HOST:PORT[+HOST:PORT…][,pid=PID][,name=NAME]`.
    #[arg(long, value_name = "SIDE", value_parser = Side::parse::<T>)]
    compare: Vec<Side>,
    /// Connections [w1, w2, w6: 64; w3: 256; w4: 10000 holders; w5: 1; grow: 10000 waiters].
    #[arg(long)]
    connections: Option<usize>,
    /// Requests on their way at once on each connection of w5.
    #[arg(long, default_value = "64")]
    in_flight: usize,
    /// Keys of w3 (default 10000), or other locks held in grow (default 1000000).
    #[arg(long)]
    keys: Option<usize>,
    /// Measured seconds per round.
    #[arg(long, default_value = "5")]
    seconds: f64,
    /// Seconds before that in each round.
    #[arg(long, default_value = "0.5")]
    warmup: f64,
    /// Rounds of each side.
    #[arg(long, default_value = "1")]
    rounds: usize,
    /// Lease of each lock in seconds; w4 renews after a third of it.
    #[arg(long, default_value = "10")]
    lease: u64,
    /// Threads of the generator; the order of grants is checked with one only.
    #[arg(long, default_value = "1")]
    threads: usize,
    /// Number the requests (feature word mux) instead of relying on the order of answers.
    #[arg(long)]
    mux: bool,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    /// Mean pause before a lock that is taken is tried again, where the server has no queue.
    #[arg(skip = Duration::from_millis(1))]
    pub retry: Duration,
}

/// The kinds of servers that a program knows, as values of its options.
pub trait Target: clap::ValueEnum + fmt::Debug + Send + Sync + 'static {
    /// What is spoken with such a server.
    fn protocol(&self) -> &'static dyn Protocol;
}

/// The APIs of dflockd.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
pub enum Api {
    /// The line protocol of dflockd.
    Dflockd,
    /// The HTTP API of dflockd.
    Http,
    /// The gRPC API of dflockd.
    Grpc,
}

impl Target for Api {
    fn protocol(&self) -> &'static dyn Protocol {
        match self {
            Self::Dflockd => &Lines,
            Self::Http => &Http,
            Self::Grpc => &Grpc,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Workload {
    /// Each connection has its own key.
    W1,
    /// All connections want one key: hand-overs.
    W2,
    /// Keys drawn by zipf(0.99).
    W3,
    /// Idle holders that renew: memory and processor time each.
    W4,
    /// One connection, many requests on their way.
    W5,
    /// As w1, spread over several servers.
    W6,
    /// A million other locks held, and a long queue, compared with none and a short one.
    Grow,
}

/// Exit status if the server cannot be reached.
const UNREACHABLE: u8 = 69;

/// The exit status for `outcome`, after telling on stderr as `program` what went wrong.
pub fn exit(program: &str, outcome: io::Result<()>) -> ExitCode {
    let Err(error) = outcome else {
        return ExitCode::SUCCESS;
    };
    complain(program, &error);
    let unreachable = [io::ErrorKind::ConnectionRefused, io::ErrorKind::TimedOut];
    ExitCode::from(if unreachable.contains(&error.kind()) { UNREACHABLE } else { 1 })
}

fn complain(program: &str, what: impl fmt::Display) {
    eprintln!("{program}: {what}");
}

impl<T: Target> Args<T> {
    /// Puts the load on the servers and prints the figures; `program` is named in errors.
    pub fn run(&self, program: &str) -> ExitCode {
        let shown = self.races().and_then(|races| {
            io::stdout().write_all(self.show(&races)?.as_bytes())?;
            Ok(races)
        });
        let races = match shown {
            Ok(races) => races,
            Err(error) => return exit(program, Err(error)),
        };
        let mut violated = false;
        for text in races.iter().flat_map(Race::violations) {
            violated = true;
            complain(program, format_args!("violation: {text}"));
        }
        if violated { ExitCode::FAILURE } else { ExitCode::SUCCESS }
    }

    fn show(&self, races: &[Race]) -> io::Result<String> {
        if self.json {
            return Ok(serde_json::to_string_pretty(races)? + "\n");
        }
        Ok(races.iter().map(Race::text).collect())
    }

    fn races(&self) -> io::Result<Vec<Race>> {
        if self.rounds == 0 || self.lease == 0 || self.threads == 0 || self.in_flight == 0 {
            return Err(io::Error::other("rounds, lease, threads and in-flight start at 1"));
        }
        if self.connections == Some(0) || self.keys == Some(0) {
            return Err(io::Error::other("connections and keys start at 1"));
        }
        let valid = |seconds: f64| (0.0..=86_400.0).contains(&seconds);
        if !valid(self.seconds) || !valid(self.warmup) || self.seconds == 0.0 {
            return Err(io::Error::other("seconds and warmup are at most a day"));
        }
        if self.mux && matches!(self.workload, Workload::W4 | Workload::Grow) {
            return Err(io::Error::other("w4 and grow do not number their requests"));
        }
        let sides = self.sides();
        let pipelined = self.workload == Workload::W5 && self.in_flight > 1;
        if let Some(side) = sides.iter().find(|side| pipelined && !side.protocol.pipelines()) {
            return Err(io::Error::other(format!("{} cannot be pipelined", side.name)));
        }
        if self.leader && self.workload == Workload::Grow {
            return Err(io::Error::other("grow has no leader"));
        }
        raise_descriptor_limit();
        let each = self.seconds + self.warmup;
        let rounds = u32::try_from(self.rounds * sides.len()).unwrap_or(u32::MAX);
        let progress = Progress::new(Duration::from_secs_f64(each) * rounds);
        if self.workload == Workload::Grow {
            return Ok(vec![self.held(&sides, &progress)?, self.queues(&sides[0], &progress)?]);
        }
        let mut laps: Vec<Lap> = sides.iter().map(|side| Lap::new(&side.name)).collect();
        let plans: Vec<Plan> = sides.iter().map(|side| self.plan(side)).collect();
        let baselines: Vec<Option<u64>> =
            plans.iter().map(|plan| process::sum(&plan.pids, process::resident)).collect();
        for round in 1..=self.rounds {
            for ((plan, lap), &baseline) in plans.iter().zip(&mut laps).zip(&baselines) {
                progress.step(format!("round {round} of {}: {}", self.rounds, lap.name));
                let mut plan = plan.clone();
                if self.leader {
                    // Another one may lead by now.
                    plan.servers = vec![leader::find_among(plan.protocol, &plan.servers)?];
                }
                lap.rounds.push(if self.workload == Workload::W4 {
                    holders::run(&plan, baseline, &progress)?
                } else {
                    load::run(&plan, &progress)?
                });
            }
        }
        drop(progress);
        Ok(vec![Race::new(self.workload.name(), self.describe(&plans), laps)])
    }

    /// The servers given by options of their own, then those to compare with.
    fn sides(&self) -> Vec<Side> {
        let protocol = self.target.protocol();
        let mut sides = vec![Side {
            name: protocol.name().to_owned(),
            protocol,
            servers: self.servers.clone(),
            pids: self.pid.clone(),
            retry: None,
        }];
        sides.extend(self.compare.iter().cloned());
        sides
    }

    fn plan(&self, side: &Side) -> Plan {
        let (connections, in_flight, keys) = match self.workload {
            Workload::W1 | Workload::W6 | Workload::Grow => (64, 1, Keys::Own),
            Workload::W2 => (64, 1, Keys::One),
            Workload::W3 => (256, 1, Keys::Zipf(self.keys.unwrap_or(10_000))),
            Workload::W4 => (10_000, 1, Keys::Own),
            Workload::W5 => (1, self.in_flight, Keys::Own),
        };
        Plan {
            protocol: side.protocol,
            servers: side.servers.clone(),
            pids: side.pids.clone(),
            connections: self.connections.unwrap_or(connections),
            in_flight,
            keys,
            lease_s: self.lease,
            measure: Duration::from_secs_f64(self.seconds),
            warmup: Duration::from_secs_f64(self.warmup),
            threads: self.threads,
            mux: self.mux,
            retry: side.retry.unwrap_or(self.retry),
        }
    }

    fn describe(&self, plans: &[Plan]) -> String {
        let plan = &plans[0];
        let connections = plan.connections;
        let what = match self.workload {
            Workload::W1 => format!("{connections} connections, own keys"),
            Workload::W2 => format!("{connections} connections, one key"),
            Workload::W3 => {
                let keys = self.keys.unwrap_or(10_000);
                format!("{connections} connections, {keys} keys, zipf 0.99")
            }
            Workload::W4 => format!(
                "{connections} idle holders, renewals every {:.1} s (an op is a renewal)",
                self.lease as f64 / 3.0
            ),
            Workload::W5 => format!(
                "{connections} connection, {} in flight{}",
                plan.in_flight,
                if plan.mux { ", numbered requests" } else { "" }
            ),
            Workload::W6 => {
                format!("{connections} connections, own keys, {} servers", plan.servers.len())
            }
            Workload::Grow => String::new(),
        };
        let contended = matches!(plan.keys, Keys::One | Keys::Zipf(_));
        let mut text = format!("{what}; {} x {} s", self.rounds, self.seconds);
        if self.leader {
            text += "; all to the leader";
        }
        let mut told = Vec::new();
        for protocol in plans.iter().map(|plan| plan.protocol) {
            let name = protocol.name();
            if told.contains(&name) {
                continue;
            }
            told.push(name);
            if contended && protocol.excludes() && !protocol.queues() {
                let pause = self.retry.as_micros();
                text += &format!(
                    "; {name} tries again after {pause} µs unless its name says otherwise"
                );
            }
            if let Some(note) = protocol.note() {
                text += &format!("; {name} {note}");
            }
        }
        text
    }

    /// W1 with many other locks held. The other side is a second server that stays empty, in
    /// alternating rounds; without one, the same server before it is filled.
    fn held(&self, sides: &[Side], progress: &Progress) -> io::Result<Race> {
        let count = self.keys.unwrap_or(1_000_000);
        let mut plan = self.plan(&sides[0]);
        plan.connections = 64;
        let mut full = Lap::new(format!("{count} held"));
        let mut empty = Lap::new("empty");
        if let Some(other) = sides.get(1) {
            let mut other = self.plan(other);
            other.connections = 64;
            progress.step(format!("taking {count} locks"));
            let _held = grow::fill(&plan, count, progress)?;
            for _ in 0..self.rounds {
                progress.step("full, empty".to_owned());
                full.rounds.push(load::run(&plan, progress)?);
                empty.rounds.push(load::run(&other, progress)?);
            }
        } else {
            for _ in 0..self.rounds {
                empty.rounds.push(load::run(&plan, progress)?);
            }
            progress.step(format!("taking {count} locks"));
            let _held = grow::fill(&plan, count, progress)?;
            for _ in 0..self.rounds {
                full.rounds.push(load::run(&plan, progress)?);
            }
        }
        let text = format!("W1 with {count} other locks held, and with none");
        Ok(Race::new("grow-held", text, vec![full, empty]))
    }

    /// Release with many waiters and with ten.
    fn queues(&self, side: &Side, progress: &Progress) -> io::Result<Race> {
        let mut plan = self.plan(side);
        let waiters = self.connections.unwrap_or(10_000).max(10);
        plan.connections = waiters + 1;
        let short = (waiters + 1).div_ceil(11);
        let mut long = Lap::new(format!("{waiters} waiters"));
        let mut ten = Lap::new("10 waiters");
        for _ in 0..self.rounds {
            progress.step("long queue, short queues".to_owned());
            long.rounds.push(grow::hand_over(&plan, 1, progress)?);
            ten.rounds.push(grow::hand_over(&plan, short, progress)?);
        }
        let text = format!(
            "release to next grant, one at a time, {} connections on one key and on {short} keys",
            waiters + 1
        );
        Ok(Race::new("grow-waiters", text, vec![long, ten]))
    }
}

impl Workload {
    fn name(self) -> &'static str {
        match self {
            Self::W1 => "w1",
            Self::W2 => "w2",
            Self::W3 => "w3",
            Self::W4 => "w4",
            Self::W5 => "w5",
            Self::W6 => "w6",
            Self::Grow => "grow",
        }
    }
}

/// Each connection takes a descriptor; if the limit cannot be raised, connecting says so.
pub fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let _ = setrlimit(Resource::Nofile, raised);
}
