//! What kind of lock is asked for.

use std::time::Duration;

use dflockd_client::{Client, Error, Guard, Ticket};

use crate::failure::Failure;

/// A lock to be had: its key and kind.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: String,
    pub(crate) kind: Kind,
    pub(crate) lease: Duration,
}

/// The kinds of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Mutex,
    Semaphore { limit: u32 },
    Read,
    Write,
    Election,
}

impl Wanted {
    /// Takes it; none if the time is over.
    pub(crate) async fn acquire(
        &self,
        client: &Client,
        wait: Duration,
    ) -> Result<Option<Guard>, Error> {
        let (key, lease) = (self.key.as_str(), self.lease);
        match self.kind {
            Kind::Mutex => client.lock(key).lease(lease).acquire_timeout(wait).await,
            Kind::Semaphore { limit } => {
                client.semaphore(key, limit).lease(lease).acquire_timeout(wait).await
            }
            Kind::Read => client.rw_lock(key).read().lease(lease).acquire_timeout(wait).await,
            Kind::Write => client.rw_lock(key).write().lease(lease).acquire_timeout(wait).await,
            Kind::Election => client.election(key).lease(lease).acquire_timeout(wait).await,
        }
    }

    /// Takes a place in its queue.
    pub(crate) async fn enqueue(&self, client: &Client) -> Result<Ticket, Failure> {
        let (key, lease) = (self.key.as_str(), self.lease);
        let ticket = match self.kind {
            Kind::Mutex => client.lock(key).lease(lease).enqueue().await,
            Kind::Semaphore { limit } => client.semaphore(key, limit).lease(lease).enqueue().await,
            Kind::Read => client.rw_lock(key).read().lease(lease).enqueue().await,
            Kind::Write => client.rw_lock(key).write().lease(lease).enqueue().await,
            Kind::Election => return Err(Failure::usage("an election has no two-phase form")),
        };
        Ok(ticket?)
    }

    /// The place that an earlier client of the session has taken.
    pub(crate) fn ticket(&self, client: &Client) -> Result<Ticket, Failure> {
        let (key, lease) = (self.key.as_str(), self.lease);
        let ticket = match self.kind {
            Kind::Mutex => client.lock(key).lease(lease).ticket(),
            Kind::Semaphore { limit } => client.semaphore(key, limit).lease(lease).ticket(),
            Kind::Read => client.rw_lock(key).read().lease(lease).ticket(),
            Kind::Write => client.rw_lock(key).write().lease(lease).ticket(),
            Kind::Election => return Err(Failure::usage("an election has no two-phase form")),
        };
        Ok(ticket?)
    }
}
