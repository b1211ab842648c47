//! `acquire`, `release`, `renew`, `enqueue`, `wait`: locks that outlive the process that took them.

use std::time::Duration;

use dflockd_client::{Client, Guard};
use serde_json::{Value, json};

use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status};
use crate::lock_request::{LockKind, LockRequest, Terms};
use crate::output::{self, Output};
use crate::signals::Signals;
use crate::time;

/// How long a lock is held unless a script says otherwise.
const LEASE: Duration = Duration::from_secs(30);

/// The kinds of locks that scripts can hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum KindArg {
    /// A lock with one holder.
    #[value(alias = "lock")]
    Mutex,
    /// A slot of a semaphore.
    #[value(alias = "sem")]
    Semaphore,
    /// A read lock.
    Read,
    /// A write lock.
    Write,
}

/// The lock that a script asks for.
#[derive(Debug, clap::Args)]
pub(crate) struct LockArgs {
    /// What to lock.
    key: String,
    /// What kind of lock it is.
    #[arg(long, value_name = "KIND", default_value = "mutex")]
    kind: KindArg,
    /// How many may hold the semaphore at a time.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,
    #[command(flatten)]
    terms: Terms,
}

impl LockArgs {
    fn request(self) -> Result<LockRequest, Failure> {
        let kind = match (self.kind, self.limit) {
            (KindArg::Semaphore, Some(limit)) => LockKind::Semaphore { limit },
            (KindArg::Semaphore, None) => {
                return Err(Failure::usage("--kind semaphore needs --limit N"));
            }
            (_, Some(_)) => return Err(Failure::usage("--limit is for --kind semaphore")),
            (KindArg::Mutex, None) => LockKind::Mutex,
            (KindArg::Read, None) => LockKind::Read,
            (KindArg::Write, None) => LockKind::Write,
        };
        Ok(self.terms.request(self.key, kind, LEASE))
    }
}

#[derive(Debug, clap::Args)]
pub(crate) struct AcquireArgs {
    #[command(flatten)]
    lock: LockArgs,
    /// Do not wait: end with status 75 if somebody else holds it.
    #[arg(long = "try", conflicts_with = "wait")]
    now: bool,
    /// Wait so long at most, then end with status 75; for ever if not given.
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    wait: Option<Duration>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct EnqueueArgs {
    #[command(flatten)]
    lock: LockArgs,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct WaitArgs {
    #[command(flatten)]
    lock: LockArgs,
    /// The session that `enqueue` printed [variable: DFLOCKD_SESSION, which others can not see].
    #[arg(long, value_name = "SESSION")]
    session: Option<String>,
    /// Wait so long at most, then give up the place and end with status 75; for ever if not given.
    #[arg(long, value_name = "TIME", value_parser = time::parse)]
    wait: Option<Duration>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct ReleaseArgs {
    /// What is locked.
    key: String,
    /// The token of the hold [variable: DFLOCKD_TOKEN, which others can not see].
    token: Option<String>,
    /// What kind of lock it is.
    #[arg(long, value_name = "KIND", default_value = "mutex")]
    kind: KindArg,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub(crate) struct RenewArgs {
    #[command(flatten)]
    release: ReleaseArgs,
    /// Lock for so long from now.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time::parse_some)]
    lease: Duration,
}

/// `acquire`.
pub(crate) async fn acquire(args: AcquireArgs, outer: &Settings) -> Result<Status, Failure> {
    let request = args.lock.request()?;
    let connection = args.common.settings.or(outer).resolve()?;
    let mut signals = Signals::listen()?;
    let client = signals.connect(connection.connect_for(&request.key)).await?;
    let wait = if args.now { Some(Duration::ZERO) } else { args.wait };
    // Without a session the lock would end with this process.
    session(&client)?;
    let acquiring = request.acquire(&client, wait.unwrap_or(Duration::MAX));
    let guard = signals.unless_interrupted(&client, acquiring).await??;
    hand_over(&request, &client, guard, args.common.output)
}

/// `enqueue`.
pub(crate) async fn enqueue(args: EnqueueArgs, outer: &Settings) -> Result<Status, Failure> {
    let request = args.lock.request()?;
    let connection = args.common.settings.or(outer).resolve()?;
    let client = connection.connect_for(&request.key).await?;
    let session = session(&client)?;
    let ticket = request.enqueue(&client).await?;
    let state = if ticket.is_granted() { "acquired" } else { "queued" };
    ticket.forget();
    if args.common.output.json {
        output::json(&json!({ "key": request.key, "state": state, "session": session }));
    } else {
        output::line(session);
    }
    Ok(Status::Ok)
}

/// `wait`.
pub(crate) async fn wait(args: WaitArgs, outer: &Settings) -> Result<Status, Failure> {
    let request = args.lock.request()?;
    let session = secret(args.session, "DFLOCKD_SESSION").ok_or_else(|| {
        Failure::usage("name the session that `enqueue` printed with --session or DFLOCKD_SESSION")
    })?;
    let connection = args.common.settings.or(outer).resolve()?;
    let server = connection.server_of(&request.key);
    let mut signals = Signals::listen()?;
    let attaching = connection.builder().server(server).attach(session).connect();
    let client = signals.connect(async { Ok(attaching.await?) }).await?;
    let ticket = request.ticket(&client)?;
    let waiting = ticket.wait(args.wait.unwrap_or(Duration::MAX));
    let guard = signals.unless_interrupted(&client, waiting).await??;
    hand_over(&request, &client, guard, args.common.output)
}

/// `release`.
pub(crate) async fn release(args: ReleaseArgs, outer: &Settings) -> Result<Status, Failure> {
    let token = token(args.token)?;
    let (client, json) = args.common.connect(&args.key, outer).await?;
    client.release_token(args.key.as_bytes(), args.kind == KindArg::Semaphore, &token).await?;
    if json {
        output::json(&json!({ "key": args.key, "released": true }));
    }
    Ok(Status::Ok)
}

/// `renew`.
pub(crate) async fn renew(args: RenewArgs, outer: &Settings) -> Result<Status, Failure> {
    let RenewArgs { release: args, lease } = args;
    let token = token(args.token)?;
    let (client, json) = args.common.connect(&args.key, outer).await?;
    let (key, semaphore) = (args.key.as_bytes(), args.kind == KindArg::Semaphore);
    let remaining = client.renew_token(key, semaphore, &token, lease).await?;
    if json {
        output::json(&json!({ "key": args.key, "valid_for_ms": millis(remaining) }));
    } else {
        output::line(time::short_duration(remaining));
    }
    Ok(Status::Ok)
}

/// Prints by what the lock can be released, and leaves it to its lease.
fn hand_over(
    request: &LockRequest,
    client: &Client,
    guard: Option<Guard>,
    output: Output,
) -> Result<Status, Failure> {
    let Some(guard) = guard else {
        let key = output::clean(&request.key);
        return Err(Failure::not_acquired(format!("{key} was not free in time; try again later")));
    };
    let (fence, valid_for) = (guard.fence(), guard.valid_until().remaining());
    let token = guard.forget();
    if output.json {
        output::json(&json!({
            "key": request.key,
            "token": token,
            "fence": fence.to_string(),
            "session": client.session().map_or(Value::Null, Value::String),
            "valid_for_ms": millis(valid_for),
        }));
    } else {
        output::line(format!("{token} {fence}"));
    }
    Ok(Status::Ok)
}

fn session(client: &Client) -> Result<String, Failure> {
    client.session().ok_or_else(|| {
        Failure::new(Status::No, "the server does not keep sessions; use `dflockctl lock`")
    })
}

fn token(given: Option<String>) -> Result<String, Failure> {
    secret(given, "DFLOCKD_TOKEN").ok_or_else(|| {
        Failure::usage("give the token that `acquire` printed, or set DFLOCKD_TOKEN")
    })
}

fn secret(given: Option<String>, variable: &str) -> Option<String> {
    given.or_else(|| std::env::var(variable).ok()).filter(|secret| !secret.is_empty())
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
