//! `lock`, `sem`, `rlock`, `wlock`, `elect`: a program under a lock.

use std::ffi::OsString;
use std::io::{ErrorKind, IsTerminal};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::time::Duration;

use dflockd_client::{Client, Error, ErrorCode, Guard, Instant, Lost};
use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::process::{Child, Command};

use crate::connect::{Connection, Settings};
use crate::escalation::{Escalation, OnLost, Step};
use crate::failure::{Failure, Status, complain};
use crate::lock_request::{LockKind, LockRequest, Terms};
use crate::output::clean;
use crate::process_tree::ProcessTree;
use crate::signals::Signals;
use crate::time;

/// Pause before asking again when the server was restarted.
const RETRY_DELAY: Duration = Duration::from_millis(200);
/// How late an answer may be.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// How long an inspection of the key may take.
const INSPECT_TIMEOUT: Duration = Duration::from_secs(2);
/// Waits that are over sooner are not worth a word.
const SHOW_AFTER: Duration = Duration::from_millis(300);

/// How long a lock lasts at a time, unless it is said otherwise.
const LEASE: Duration = Duration::from_secs(10);

/// A program under a lock.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What to lock.
    pub(crate) key: String,
    #[command(flatten)]
    pub(crate) options: WaitArgs,
    #[command(flatten)]
    pub(crate) settings: Settings,
    /// The program to run while it is locked, and its arguments.
    #[arg(last = true, required = true, value_name = "PROGRAM")]
    pub(crate) program: Vec<OsString>,
}

/// A program under a semaphore.
#[derive(Debug, clap::Args)]
pub(crate) struct SemArgs {
    /// How many may hold it at a time; the same for everybody who uses it.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) limit: u32,
    #[command(flatten)]
    pub(crate) args: Args,
}

/// How to wait and what to do if the lock is lost.
#[derive(Debug, clap::Args)]
pub(crate) struct WaitArgs {
    /// Do not wait: end with status 75 if somebody else holds it.
    #[arg(long = "try", conflicts_with = "wait")]
    now: bool,
    /// Wait so long at most, then end with status 75; for ever if not given.
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    wait: Option<Duration>,
    #[command(flatten)]
    terms: Terms,
    /// What to do with the program when the lock is lost.
    #[arg(long, value_name = "WHAT", default_value = "term")]
    on_lost: OnLost,
}

/// Runs a program under a lock.
pub(crate) async fn run(kind: LockKind, args: Args, outer: &Settings) -> Result<Status, Failure> {
    let Args { key, options, settings, program } = args;
    let mut signals = Signals::listen()?;
    let connection = settings.or(outer).resolve()?;
    let request = options.terms.request(key, kind, LEASE);

    let client = signals.connect(connection.connect_for(&request.key)).await?;
    let wait = if options.now { Some(Duration::ZERO) } else { options.wait };
    let waiting = async {
        tokio::select! {
            acquired = acquire(&client, &request, wait) => acquired,
            never = show_queue(&client, &connection, &request) => match never {},
        }
    };
    match signals.unless_interrupted(&client, waiting).await?? {
        Some(guard) => supervise(guard, &program, options.on_lost, &mut signals).await,
        None => Err(not_acquired(&client, &request, wait).await),
    }
}

/// Waits for the lock, over restarts of the server; none if the time is over.
async fn acquire(
    client: &Client,
    request: &LockRequest,
    wait: Option<Duration>,
) -> Result<Option<Guard>, Failure> {
    let begun_at = Instant::now();
    let mut last_reason = String::new();
    loop {
        let left = wait.map_or(Duration::MAX, |wait| wait.saturating_sub(begun_at.elapsed()));
        let asked = request.acquire(client, left);
        let error = match tokio::time::timeout(left.saturating_add(ANSWER_TIMEOUT), asked).await {
            Ok(Ok(acquired)) => return Ok(acquired),
            Ok(Err(error)) => error,
            Err(_) => Error::Unknown { reason: "the server does not answer".to_owned() },
        };
        // Asking twice does no harm: the place of a request that is given up is given up with it.
        let again = matches!(
            error,
            Error::Unknown { .. }
                | Error::Refused(
                    ErrorCode::Draining | ErrorCode::NotLeader | ErrorCode::Unavailable
                )
        );
        if !again || wait.is_some_and(|wait| begun_at.elapsed() >= wait) {
            return Err(error.into());
        }
        let reason = error.to_string();
        if reason != last_reason {
            complain(format_args!("waiting for {}: {reason}; asking again", clean(&request.key)));
            last_reason = reason;
        }
        tokio::time::sleep(RETRY_DELAY).await;
    }
}

async fn not_acquired(client: &Client, request: &LockRequest, wait: Option<Duration>) -> Failure {
    let key = clean(&request.key);
    let inspected =
        tokio::time::timeout(INSPECT_TIMEOUT, client.inspect(request.key.as_bytes())).await;
    let holder = match inspected {
        Ok(Ok(Some(inspected))) => held_by(entry(&inspected, request.kind)),
        _ => None,
    };
    let holder = holder.map(|holder| format!(", {holder}")).unwrap_or_default();
    Failure::not_acquired(match wait {
        Some(wait) if !wait.is_zero() => {
            let wait = time::short_duration(wait);
            format!("{key} not acquired within {wait}{holder}; wait longer with --wait")
        }
        _ => format!("{key} is not free{holder}; wait for it with --wait TIME"),
    })
}

/// Shows the place in the queue while somebody looks.
async fn show_queue(
    client: &Client,
    connection: &Connection,
    request: &LockRequest,
) -> std::convert::Infallible {
    if !std::io::stderr().is_terminal() {
        return std::future::pending().await;
    }
    tokio::time::sleep(SHOW_AFTER).await;
    let spinner = Spinner::new();
    loop {
        let text = match client.inspect(request.key.as_bytes()).await {
            Ok(Some(inspected)) => {
                describe_queue(entry(&inspected, request.kind), &connection.name)
            }
            Ok(None) => String::new(),
            Err(error) => error.to_string(),
        };
        spinner.0.set_message(format!("waiting for {}{text}", clean(&request.key)));
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// A spinner that cleans up after itself.
struct Spinner(ProgressBar);

impl Spinner {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        let style = ProgressStyle::with_template("{spinner} {wide_msg} {elapsed}");
        bar.set_style(style.expect("the template is valid"));
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// What an inspected key is as this kind of lock.
fn entry(inspected: &Value, kind: LockKind) -> &Value {
    let semaphore = matches!(kind, LockKind::Semaphore { .. });
    let fits = |value: &&Value| match value["kind"].as_str() {
        Some("semaphore") => semaphore,
        Some("mutex" | "rwlock") => !semaphore,
        Some(_) | None => false,
    };
    let others = inspected["others"].as_array().into_iter().flatten();
    std::iter::once(inspected).chain(others).find(fits).unwrap_or(&Value::Null)
}

fn describe_queue(entry: &Value, name: &str) -> String {
    let queue = entry["queue"].as_array().map(Vec::as_slice).unwrap_or_default();
    let place = queue.iter().position(|waiter| waiter["client"] == name);
    let place = place.map(|place| {
        let total = entry["waiters"].as_u64().unwrap_or_default();
        format!(", place {} of {total}", place + 1)
    });
    let holder = held_by(entry).map(|holder| format!(", {holder}"));
    [place, holder].into_iter().flatten().collect()
}

/// The first holder of a lock, since when, and how many others hold it.
fn held_by(entry: &Value) -> Option<String> {
    let holder = entry["holders"].as_array()?.first()?;
    let client = match holder["client"].as_str() {
        Some(client) if !client.is_empty() => clean(client),
        _ => format!("connection {}", holder["conn"]),
    };
    let age = time::short(holder["held_s"].as_f64()?);
    let more = match entry["holders_total"].as_u64() {
        Some(total @ 2..) => format!(" and {} more", total - 1),
        _ => String::new(),
    };
    Some(format!("held by {client} for {age}{more}"))
}

/// Runs the program as long as the lock is held, and releases it.
async fn supervise(
    guard: Guard,
    program: &[OsString],
    on_lost: OnLost,
    signals: &mut Signals,
) -> Result<Status, Failure> {
    let child = match spawn(&guard, program) {
        Ok(child) => child,
        Err(failure) => {
            release(guard).await;
            return Err(failure);
        }
    };
    let mut supervised =
        Supervised { escalation: Escalation::new(on_lost, guard.lease()), guard, lost: None };
    let status = supervised.watch_over(child, signals).await?;

    let Supervised { guard, escalation, lost } = supervised;
    let name = program[0].to_string_lossy();
    if escalation.last().is_none() && guard.is_valid() {
        release(guard).await;
        return Ok(program_status(status));
    }
    let reason = lost.map_or(Lost::Unreachable, |(reason, _)| reason);
    let end = match (escalation.last(), status.signal()) {
        (Some(Step::Term | Step::Kill), Some(_)) => "was terminated",
        (Some(Step::Term | Step::Kill), None) => "was told to end",
        (Some(Step::Warn) | None, _) => "has run on",
    };
    complain(format_args!("lost {} while {name} ran: {reason}; it {end}", shown_key(&guard)));
    if guard.is_valid() {
        // Renewed after all, but the program had been told to end.
        release(guard).await;
    }
    Ok(Status::Lost)
}

/// A lock and the program that runs under it.
struct Supervised {
    guard: Guard,
    escalation: Escalation,
    lost: Option<(Lost, Instant)>,
}

impl Supervised {
    /// Passes signals on, ends the program when the lock is lost, and returns how it ended.
    async fn watch_over(
        &mut self,
        mut child: Child,
        signals: &mut Signals,
    ) -> Result<ExitStatus, Failure> {
        let id = child.id();
        let mut tree = id.map(ProcessTree::new);
        let pid = id.and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        let status = loop {
            let pause = self.escalation.pause();
            tokio::select! {
                biased;
                status = child.wait() => break status.map_err(|error| {
                    Failure::new(Status::No, format!("can not wait for the program: {error}"))
                })?,
                received = signals.next() => {
                    if let Some(pid) = pid.filter(|_| !received.by_terminal) {
                        // It may have ended in this instant.
                        let _ = kill_process(pid, received.signal);
                    }
                }
                reason = self.guard.lost(), if self.lost.is_none() => {
                    self.lost = Some((reason, Instant::now()));
                }
                () = tokio::time::sleep(pause) => {}
            }
            if let Some(step) = self.next_step() {
                self.take(step, pid, tree.as_mut());
            }
        };
        // What the program started has no lock either. It has as much time as the program would have had.
        if self.escalation.last() == Some(Step::Term)
            && let Some(tree) = &mut tree
        {
            while tree.is_alive() {
                if self.next_step() == Some(Step::Kill) {
                    tree.signal(Signal::KILL);
                    break;
                }
                tokio::time::sleep(self.escalation.pause()).await;
            }
        }
        Ok(status)
    }

    fn next_step(&mut self) -> Option<Step> {
        let lost = self.lost.map(|(_, at)| at.elapsed());
        self.escalation.next(self.guard.valid_until().remaining(), lost)
    }

    fn take(&self, step: Step, pid: Option<Pid>, tree: Option<&mut ProcessTree>) {
        let signal = match step {
            Step::Warn => {
                let reason = self.lost.map_or(Lost::Unreachable, |(reason, _)| reason);
                complain(format_args!("lost {}: {reason}; the program goes on", self.key()));
                return;
            }
            Step::Term => Signal::TERM,
            Step::Kill => Signal::KILL,
        };
        if let Some(tree) = tree {
            tree.signal(signal);
            if step == Step::Term {
                // One that was stopped could not end itself.
                tree.signal(Signal::CONT);
            }
        }
        if let Some(pid) = pid.filter(|_| step == Step::Kill) {
            // On kernels where descendants can not be signalled.
            let _ = kill_process(pid, signal);
        }
    }

    fn key(&self) -> String {
        shown_key(&self.guard)
    }
}

fn spawn(guard: &Guard, program: &[OsString]) -> Result<Child, Failure> {
    let (name, args) = program.split_first().expect("required by the parser");
    let spawned = Command::new(name)
        .args(args)
        .env("DFLOCKD_KEY", String::from_utf8_lossy(guard.key()).as_ref())
        .env("DFLOCKD_FENCE", guard.fence().to_string())
        .env("DFLOCKD_TOKEN", guard.token())
        // What opens the whole server is not for every program that runs under a lock.
        .env_remove("DFLOCKD_AUTH_TOKEN")
        .env_remove("DFLOCKD_ADMIN_TOKEN")
        .spawn();
    spawned.map_err(|error| {
        let missing = error.kind() == ErrorKind::NotFound;
        let status = if missing { Status::NotFound } else { Status::NotExecutable };
        let name = name.to_string_lossy();
        Failure::new(status, format!("can not run {name}: {error}; check the name and its mode"))
    })
}

/// Releases, and says so if that fails: nobody waits longer than the lease for it.
async fn release(guard: Guard) {
    let (key, left) = (shown_key(&guard), guard.valid_until().remaining());
    let reason = match tokio::time::timeout(left.min(ANSWER_TIMEOUT), guard.release()).await {
        Ok(Ok(())) => return,
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the server does not answer".to_owned(),
    };
    complain(format_args!("warning: {key} was not released: {reason}; its lease will end it"));
}

fn program_status(status: ExitStatus) -> Status {
    match (status.code(), status.signal()) {
        (Some(code), _) => Status::Program(u8::try_from(code).unwrap_or(u8::MAX)),
        (None, Some(signal)) => Status::Signal(signal),
        (None, None) => Status::No,
    }
}

fn shown_key(guard: &Guard) -> String {
    crate::output::printable(guard.key())
}
