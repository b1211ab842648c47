//! Puts load on dflockd and on other lock servers and compares them.
//!
//! The load, the workloads and the figures are the library's; what is spoken with servers of others is here, and the
//! servers and clients that a comparison needs besides: [`echo`] and [`crowd`].

mod crowd;
mod echo;
mod etcd_gateway;
mod etcd_grpc;
mod redis;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use dflockd_bench::lines::Lines;
use dflockd_bench::protocol::Protocol;
use dflockd_bench::{Args, Grpc, Http, Target, exit, raise_descriptor_limit};

/// In errors.
const NAME: &str = "dflockd-bench";

/// Put load on lock servers and compare them.
#[derive(Debug, Parser)]
#[command(name = NAME, version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(subcommand)]
    verb: Option<Verb>,
    #[command(flatten)]
    load: Args<Server>,
    /// Mean pause in microseconds before a taken lock is tried again, for Redis; `,retry-us=N` in --compare for one
    /// side.
    #[arg(long, default_value = "1000")]
    retry_us: u64,
}

#[derive(Debug, clap::Subcommand)]
enum Verb {
    /// Serve fixed answers: the floor of a comparison.
    Echo(echo::Args),
    /// Slow HTTP clients, to measure others beside them.
    Crowd(crowd::Args),
}

/// A kind of server.
#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Server {
    /// dflockd by the line protocol.
    Dflockd,
    /// dflockd by HTTP.
    Http,
    /// dflockd by gRPC.
    Grpc,
    /// Redis, one instance.
    Redis,
    /// etcd's v3lock by the JSON gateway.
    Etcd,
    /// etcd's v3lock by gRPC.
    EtcdGrpc,
    /// The fixed-answer server: `dflockd-bench echo`.
    Echo,
}

impl Target for Server {
    fn protocol(&self) -> &'static dyn Protocol {
        match self {
            Self::Dflockd => &Lines,
            Self::Http => &Http,
            Self::Grpc => &Grpc,
            Self::Redis => &redis::Redis,
            Self::Etcd => &etcd_gateway::Gateway,
            Self::EtcdGrpc => &etcd_grpc::EtcdGrpc,
            Self::Echo => &echo::Echo,
        }
    }
}

fn main() -> ExitCode {
    let Cli { verb, mut load, retry_us } = Cli::parse();
    match verb {
        Some(Verb::Echo(args)) => exit(NAME, echo::run(&args)),
        Some(Verb::Crowd(args)) => {
            raise_descriptor_limit();
            exit(NAME, crowd::run(&args))
        }
        None => {
            load.retry = Duration::from_micros(retry_us);
            load.run(NAME)
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_definitions_fit_together() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_pause_is_for_servers_without_a_queue() {
        let parse = |side| Cli::try_parse_from([NAME, "--compare", side]);
        let cli = parse("redis=127.0.0.1:1,retry-us=10").unwrap();
        assert!(format!("{cli:?}").contains("retry: Some(10µs)"), "{cli:?}");
        assert!(parse("etcd=127.0.0.1:1,retry-us=10").is_err());
    }
}
