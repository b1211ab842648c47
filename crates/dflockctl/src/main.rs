//! The command line of dflockd.
//!
//! `run.rs` is the heart: a program under a lock. `escalation.rs` decides when a program that lost its lock has to
//! end, `process_tree.rs` signals what it started. `hold.rs` has the locks of scripts, `query.rs` the queries; most
//! other files are named by their verbs. Errors become one line and an exit status in `failure.rs`.

mod admin;
mod backup;
mod certificates;
mod cluster;
mod connect;
mod dev_cluster;
mod doctor;
mod escalation;
mod events;
mod failure;
mod files;
mod hold;
mod identity;
mod init;
mod inspect_data;
mod lock_request;
mod manual;
mod operator;
mod output;
mod process_tree;
mod query;
mod run;
mod signals;
mod stats;
mod time;
mod top;
mod values;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use connect::Settings;
use failure::{Failure, Status, complain};
use lock_request::LockKind;

const AFTER_HELP: &str = "\
Exit statuses: 0 done, 1 no such thing or refused, 64 usage, 69 server not reachable, 75 not acquired, 76 lock \
lost while the program ran, 77 token missing or wrong, 126 program not executable, 127 program not found, 128+n \
ended by signal n; otherwise that of the program.";

/// The command line of the dflockd lock server.
#[derive(Debug, Parser)]
#[command(name = "dflockctl", version, after_help = AFTER_HELP, disable_help_subcommand = true)]
struct Cli {
    #[command(flatten)]
    settings: Settings,
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Run a program under a lock.
    Lock(run::Args),
    /// Run a program under a semaphore, together with a limited number of others.
    Sem(run::SemArgs),
    /// Run a program under a read lock, together with other readers.
    Rlock(run::Args),
    /// Run a program under a write lock, alone.
    Wlock(run::Args),
    /// Run a program as the leader of an election.
    Elect(run::Args),
    /// Take a lock that outlives this process; prints its token and fence.
    Acquire(hold::AcquireArgs),
    /// Release a lock by its token.
    Release(hold::ReleaseArgs),
    /// Renew a lock by its token; prints for how long it is locked now.
    Renew(hold::RenewArgs),
    /// Take a place in a queue that outlives this process; prints the session to `wait` with.
    Enqueue(hold::EnqueueArgs),
    /// Wait at a place that was taken with `enqueue`; prints token and fence.
    Wait(hold::WaitArgs),
    /// List keys.
    Ls(query::LsArgs),
    /// Show one key: who holds it, who waits, and for how long.
    Show(query::ShowArgs),
    /// Show what each server holds.
    Status(query::StatusArgs),
    /// Show locks and queues as they change, on the whole screen.
    Top(top::Args),
    /// Print changes of keys as they come.
    Watch(events::WatchArgs),
    /// Print signals as they come.
    Listen(events::ListenArgs),
    /// Send a signal; prints how many got it.
    Signal(events::SignalArgs),
    /// Values under keys.
    Kv {
        #[command(subcommand)]
        verb: values::KvVerb,
    },
    /// Counters.
    Counter {
        #[command(subcommand)]
        verb: values::CounterVerb,
    },
    /// Lists.
    List {
        #[command(subcommand)]
        verb: values::ListVerb,
    },
    /// Wait until as many have arrived at a barrier.
    Barrier(values::BarrierArgs),
    /// Ask each server whether it answers, and how fast.
    Ping(query::PingArgs),
    /// End somebody's hold; for administrators.
    ForceRelease(admin::ForceReleaseArgs),
    /// End somebody's session with all it holds; for administrators.
    EndSession(admin::EndSessionArgs),
    /// Look after a cluster: members, policy, snapshots, leadership.
    Cluster {
        #[command(subcommand)]
        verb: cluster::ClusterVerb,
    },
    /// Take leadership from a node and keep it from leading, before work on it.
    Drain(cluster::DrainArgs),
    /// Write a consistent copy of a cluster's whole state to a file.
    Backup(backup::BackupArgs),
    /// Begin a new cluster from a backup: make the data directory of its first node, on this machine.
    Restore(backup::RestoreArgs),
    /// Say what is in the data directory of a node that does not run; changes nothing.
    InspectData(inspect_data::Args),
    /// Check a cluster, and say what to do about what is found.
    Doctor(doctor::Args),
    /// Entries for the file of identities of a server.
    Identity {
        #[command(subcommand)]
        verb: identity::IdentityVerb,
    },
    /// Run a cluster on this machine, for trying things out and for tests.
    DevCluster(dev_cluster::Args),
    /// Put load on servers and measure them.
    Bench(dflockd_bench::Args<dflockd_bench::Api>),
    /// Print completions for a shell.
    Completions(manual::CompletionsArgs),
    /// Print the manual page, or write all of them.
    Man(manual::ManArgs),
}

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return refuse(&error),
    };
    // Has its own threads and its own options.
    if let Verb::Bench(args) = &cli.verb {
        if cli.settings.is_given() {
            complain(
                "options of the connection do not apply to bench; see `dflockctl bench --help`",
            );
            return Status::Usage.into();
        }
        return args.run("dflockctl bench");
    }
    match run(cli.verb, &cli.settings) {
        Ok(status) => status.into(),
        Err(failure) => {
            complain(&failure);
            failure.status.into()
        }
    }
}

fn run(verb: Verb, settings: &Settings) -> Result<Status, Failure> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| Failure::new(Status::No, format!("can not start: {error}")))?;
    let outcome = runtime.block_on(dispatch(verb, settings));
    // A thread that waits for a key of the terminal would be waited for.
    runtime.shutdown_background();
    outcome
}

async fn dispatch(verb: Verb, settings: &Settings) -> Result<Status, Failure> {
    match verb {
        Verb::Lock(args) => run::run(LockKind::Mutex, args, settings).await,
        Verb::Sem(run::SemArgs { limit, args }) => {
            run::run(LockKind::Semaphore { limit }, args, settings).await
        }
        Verb::Rlock(args) => run::run(LockKind::Read, args, settings).await,
        Verb::Wlock(args) => run::run(LockKind::Write, args, settings).await,
        Verb::Elect(args) => run::run(LockKind::Election, args, settings).await,
        Verb::Acquire(args) => hold::acquire(args, settings).await,
        Verb::Release(args) => hold::release(args, settings).await,
        Verb::Renew(args) => hold::renew(args, settings).await,
        Verb::Enqueue(args) => hold::enqueue(args, settings).await,
        Verb::Wait(args) => hold::wait(args, settings).await,
        Verb::Ls(args) => query::ls(args, settings).await,
        Verb::Show(args) => query::show(args, settings).await,
        Verb::Status(args) => query::status(args, settings).await,
        Verb::Top(args) => top::run(args, settings).await,
        Verb::Watch(args) => events::watch(args, settings).await,
        Verb::Listen(args) => events::listen(args, settings).await,
        Verb::Signal(args) => events::signal(args, settings).await,
        Verb::Kv { verb } => values::kv(verb, settings).await,
        Verb::Counter { verb } => values::counter(verb, settings).await,
        Verb::List { verb } => values::list(verb, settings).await,
        Verb::Barrier(args) => values::barrier(args, settings).await,
        Verb::Ping(args) => query::ping(args, settings).await,
        Verb::ForceRelease(args) => admin::force_release(args, settings).await,
        Verb::EndSession(args) => admin::end_session(args, settings).await,
        Verb::Cluster { verb } => cluster::run(verb, settings),
        Verb::Drain(args) => cluster::drain(args, settings),
        Verb::Backup(args) => backup::backup(args, settings),
        Verb::Restore(args) => backup::restore(&args),
        Verb::InspectData(args) => inspect_data::run(&args),
        Verb::Doctor(args) => doctor::run(args, settings),
        Verb::Identity { verb } => identity::run(verb),
        Verb::DevCluster(args) => dev_cluster::run(args).await,
        Verb::Completions(args) => Ok(manual::completions(&args, Cli::command())),
        Verb::Man(args) => manual::man(&args, Cli::command()),
        Verb::Bench(_) => unreachable!("it runs without a runtime"),
    }
}

/// Help goes to stdout as it is, a wrong command line becomes one line.
fn refuse(error: &clap::Error) -> ExitCode {
    if !error.use_stderr() {
        let text = if output::colours() {
            error.render().ansi().to_string()
        } else {
            error.render().to_string()
        };
        output::line(text.trim_end());
        return Status::Ok.into();
    }
    let text = error.render().to_string();
    let problem = text.split("Usage: ").next().unwrap_or_default();
    let problem = problem
        .trim_start_matches("error: ")
        .replace("For more information, try '--help'.", "")
        .split_whitespace()
        .collect::<Vec<_>>()
        .join(" ")
        .replace(" tip: ", "; ");
    complain(format_args!("{problem}; see `{} --help`", named_verb()));
    Status::Usage.into()
}

/// As much of the command line as names a verb.
fn named_verb() -> String {
    let mut named = "dflockctl".to_owned();
    let mut command = &Cli::command();
    for word in std::env::args_os().skip(1).take_while(|word| word != "--") {
        if let Some(verb) = command.find_subcommand(&word) {
            named = format!("{named} {}", verb.get_name());
            command = verb;
        }
    }
    named
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definitions_fit_together() {
        Cli::command().debug_assert();
    }
}
