//! Which lock is asked for, and the calls of the client library for each kind.

use std::time::Duration;

use dflockd_client::{Client, Error, Guard, Ticket};

use crate::failure::Failure;
use crate::time;

/// On which terms a lock is asked for, whatever its kind and whoever holds it then.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Terms {
    /// Lock for so long at a time [default: 10s, renewed while the program runs; `acquire`, `enqueue` and `wait`: 30s,
    /// which only `dflockctl renew` renews].
    #[arg(long, value_name = "TIME", value_parser = time::parse_some)]
    lease: Option<Duration>,
}

impl Terms {
    /// A request for a lock; `lease` if none is named.
    pub(crate) fn request(self, key: String, kind: LockKind, lease: Duration) -> LockRequest {
        LockRequest { key, kind, lease: self.lease.unwrap_or(lease) }
    }
}

/// A lock to be acquired: its key, kind and lease.
#[derive(Clone, Debug)]
pub(crate) struct LockRequest {
    pub(crate) key: String,
    pub(crate) kind: LockKind,
    lease: Duration,
}

/// The kinds of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LockKind {
    Mutex,
    Semaphore { limit: u32 },
    Read,
    Write,
    Election,
}

impl LockRequest {
    /// Acquires the lock; none if `wait` is over first.
    pub(crate) async fn acquire(
        &self,
        client: &Client,
        wait: Duration,
    ) -> Result<Option<Guard>, Error> {
        let (key, lease) = (self.key.as_str(), self.lease);
        match self.kind {
            LockKind::Mutex => client.lock(key).lease(lease).acquire_timeout(wait).await,
            LockKind::Semaphore { limit } => {
                client.semaphore(key, limit).lease(lease).acquire_timeout(wait).await
            }
            LockKind::Read => client.rw_lock(key).read().lease(lease).acquire_timeout(wait).await,
            LockKind::Write => client.rw_lock(key).write().lease(lease).acquire_timeout(wait).await,
            LockKind::Election => client.election(key).lease(lease).acquire_timeout(wait).await,
        }
    }

    /// Takes a place in the lock's queue.
    pub(crate) async fn enqueue(&self, client: &Client) -> Result<Ticket, Failure> {
        let (key, lease) = (self.key.as_str(), self.lease);
        let ticket = match self.kind {
            LockKind::Mutex => client.lock(key).lease(lease).enqueue().await,
            LockKind::Semaphore { limit } => {
                client.semaphore(key, limit).lease(lease).enqueue().await
            }
            LockKind::Read => client.rw_lock(key).read().lease(lease).enqueue().await,
            LockKind::Write => client.rw_lock(key).write().lease(lease).enqueue().await,
            LockKind::Election => return Err(Failure::usage("an election has no two-phase form")),
        };
        Ok(ticket?)
    }

    /// The place that an earlier client of the session has taken.
    pub(crate) fn ticket(&self, client: &Client) -> Result<Ticket, Failure> {
        let (key, lease) = (self.key.as_str(), self.lease);
        let ticket = match self.kind {
            LockKind::Mutex => client.lock(key).lease(lease).ticket(),
            LockKind::Semaphore { limit } => client.semaphore(key, limit).lease(lease).ticket(),
            LockKind::Read => client.rw_lock(key).read().lease(lease).ticket(),
            LockKind::Write => client.rw_lock(key).write().lease(lease).ticket(),
            LockKind::Election => return Err(Failure::usage("an election has no two-phase form")),
        };
        Ok(ticket?)
    }
}
