//! Locks of every kind, and the two-phase form of asking for them.

use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Mode, Request, SECONDS_MAX, Space, Span, Token, command};

use crate::client::{Client, Server, Way, check_key};
use crate::clock::Instant;
use crate::error::Error;
use crate::events::Leaders;
use crate::guard::{Channel, Granted, Guard, Hold, Own, Unclaimed};
use crate::link::wait_of;
use crate::reply::Reply;
use crate::stream::Connection;

/// The longest wait there is; as good as for ever.
const FOR_EVER: Duration = Duration::from_secs(SECONDS_MAX);

/// A request for a lock, before it is sent.
#[derive(Clone)]
struct Ask {
    client: Client,
    key: Vec<u8>,
    mode: Mode,
    lease: Duration,
}

impl Ask {
    fn new(client: &Client, key: Vec<u8>, mode: Mode) -> Self {
        Self { client: client.clone(), key, mode, lease: client.inner.lease }
    }

    fn server(&self) -> &Server {
        self.client.server(&self.key)
    }

    fn space(&self) -> Space {
        self.mode.space()
    }

    /// Sends a request, over a connection of its own if there is none for all.
    async fn send(&self, request: &Request<'_>) -> Result<(Reply, Channel), Error> {
        let timeout = self.client.inner.request_timeout.saturating_add(wait_of(request));
        match &self.server().way {
            Way::Shared(link) => {
                let reply = link.call(request)?.wait(timeout).await?.claim();
                Ok((reply, Channel::Shared(Arc::clone(link))))
            }
            Way::Plain(_) => {
                let mut connection = self.server().route.connect().await?;
                let reply = ask_own(&mut connection, request, timeout).await?;
                Ok((reply, Channel::Own(Own::new(connection))))
            }
        }
    }

    fn check(&self) -> Result<(), Error> {
        check_key(&self.key)?;
        if self.lease.is_zero() || self.lease > FOR_EVER {
            return Err(Error::Invalid(format!("not a lease: {:?}", self.lease)));
        }
        Ok(())
    }

    /// Asks and waits. None if the time is over.
    async fn acquire(&self, wait: Duration) -> Result<Option<Guard>, Error> {
        self.check()?;
        let wait = wait.min(FOR_EVER);
        let request = Request::command(command::Acquire {
            mode: self.mode,
            key: &self.key,
            wait: wait.into(),
            lease: Some(self.lease.into()),
            salt: 0,
        });
        let sent_at = Instant::now();
        let (reply, channel) = self.send(&request).await?;
        self.finish(request.op().name(), &reply, sent_at, channel).await
    }

    /// Makes a guard of a grant.
    async fn finish(
        &self,
        command: &str,
        reply: &Reply,
        sent_at: Instant,
        channel: Channel,
    ) -> Result<Option<Guard>, Error> {
        if matches!(reply, Reply::Timeout) {
            return Ok(None);
        }
        let Reply::Granted { token, lease } = *reply else { return Err(reply.refusal(command)) };
        self.guard(token, lease, sent_at, channel).await.map(Some)
    }

    async fn guard(
        &self,
        token: Token,
        lease: Duration,
        sent_at: Instant,
        channel: Channel,
    ) -> Result<Guard, Error> {
        let granted = Granted {
            key: self.key.clone(),
            space: self.space(),
            election: self.mode == Mode::Election,
            token,
            lease,
            sent_at,
        };
        let timeout = self.client.inner.request_timeout;
        let hold = Unclaimed::new(Hold::new(granted, channel, timeout));
        // A grant that came after waiting says nothing about when it was made; a renewal does.
        if sent_at.elapsed() > lease / 100 {
            hold.hold().renew().await?;
        }
        Ok(hold.claim())
    }

    fn ticket(&self) -> Result<Ticket, Error> {
        self.check()?;
        match &self.server().way {
            Way::Shared(link) => {
                let state = Place::Queued(Channel::Shared(Arc::clone(link)));
                Ok(Ticket { ask: self.clone(), state: Some(state) })
            }
            Way::Plain(_) => Err(Error::Invalid("the server does not keep sessions".to_owned())),
        }
    }

    async fn enqueue(&self) -> Result<Ticket, Error> {
        self.check()?;
        let request = Request::command(command::Enqueue {
            mode: self.mode,
            key: &self.key,
            lease: Some(self.lease.into()),
            salt: 0,
        });
        let sent_at = Instant::now();
        let (reply, channel) = self.send(&request).await?;
        let state = if matches!(reply, Reply::Queued) {
            Place::Queued(channel)
        } else if let Reply::Granted { token, lease } = reply {
            Place::Granted(self.guard(token, lease, sent_at, channel).await?)
        } else {
            return Err(reply.refusal(request.op().name()));
        };
        Ok(Ticket { ask: self.clone(), state: Some(state) })
    }
}

async fn ask_own(
    connection: &mut Connection,
    request: &Request<'_>,
    timeout: Duration,
) -> Result<Reply, Error> {
    let reply = connection.ask(None, request, timeout).await;
    reply.map_err(|error| Error::Unknown { reason: error.to_string() })
}

/// A place in a queue, taken without waiting. Dropping it gives the place, or the lock, back.
///
/// [`Ticket::forget`] leaves the place to the session, for another process that attaches to it; [`Lock::ticket`]
/// and its like pick it up there.
#[must_use = "a ticket that is dropped gives its place back"]
pub struct Ticket {
    ask: Ask,
    state: Option<Place>,
}

enum Place {
    Queued(Channel),
    Granted(Guard),
}

impl Ticket {
    /// Whether the lock was granted already when the place was taken.
    #[must_use]
    pub fn is_granted(&self) -> bool {
        matches!(self.state, Some(Place::Granted(_)))
    }

    /// Leaves the place, or the granted lock, to the session.
    pub fn forget(mut self) {
        if let Some(Place::Granted(guard)) = self.state.take() {
            let _token = guard.forget();
        }
    }

    /// Waits for the lock. None if the time is over; the place is gone then.
    ///
    /// # Errors
    ///
    /// If the server refuses, or the lock was granted and its lease ran out before this call.
    pub async fn wait(mut self, wait: Duration) -> Result<Option<Guard>, Error> {
        let wait = wait.min(FOR_EVER);
        let ask = self.ask.clone();
        let timeout = ask.client.inner.request_timeout.saturating_add(wait);
        let sent_at = Instant::now();
        let request = Request::command(command::Wait {
            space: ask.space(),
            key: &ask.key,
            wait: wait.into(),
        });
        let reply = match self.state.as_mut().expect("taken only at the end") {
            Place::Granted(_) => {
                let Some(Place::Granted(guard)) = self.state.take() else { return Ok(None) };
                return Ok(Some(guard));
            }
            Place::Queued(Channel::Shared(link)) => {
                link.call(&request)?.wait(timeout).await?.claim()
            }
            Place::Queued(Channel::Own(own)) => {
                let connection = own.connection.get_mut();
                let open = connection.as_mut().ok_or(Error::Closed)?;
                match ask_own(open, &request, timeout).await {
                    Ok(reply) => reply,
                    Err(error) => {
                        *connection = None;
                        return Err(error);
                    }
                }
            }
        };
        let Some(Place::Queued(channel)) = self.state.take() else { return Ok(None) };
        ask.finish(request.op().name(), &reply, sent_at, channel).await
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // A granted one is a guard and releases itself; an own connection takes its place with it.
        if let Some(Place::Queued(Channel::Shared(link))) = &self.state {
            // A wait that gives up at once leaves the queue; if the lock was granted meanwhile it is given back.
            let request = Request::command(command::Wait {
                space: self.ask.space(),
                key: &self.ask.key,
                wait: Span::ZERO,
            });
            link.tell(&request);
        }
    }
}

/// The same three ways to ask for every kind of lock.
macro_rules! asking {
    ($name:ident) => {
        impl $name {
            /// Locks for this long at a time; it is renewed while the guard lives.
            #[must_use]
            pub fn lease(mut self, lease: Duration) -> Self {
                self.ask.lease = lease;
                self
            }

            /// Takes it if that is possible at once.
            ///
            /// # Errors
            ///
            /// If the server refuses or can not be asked.
            pub async fn try_acquire(&self) -> Result<Option<Guard>, Error> {
                self.ask.acquire(Duration::ZERO).await
            }

            /// Waits for it, up to a limit. None if the time is over.
            ///
            /// Dropping the future leaves neither a held lock nor a place in the queue.
            ///
            /// # Errors
            ///
            /// If the server refuses or can not be asked.
            pub async fn acquire_timeout(&self, wait: Duration) -> Result<Option<Guard>, Error> {
                self.ask.acquire(wait).await
            }

            /// Waits for it as long as it takes.
            ///
            /// Dropping the future leaves neither a held lock nor a place in the queue.
            ///
            /// # Errors
            ///
            /// If the server refuses or can not be asked.
            pub async fn acquire(&self) -> Result<Guard, Error> {
                let guard = self.ask.acquire(FOR_EVER).await?;
                guard.ok_or(Error::Refused(ErrorCode::Error))
            }
        }
    };
}

macro_rules! two_phases {
    ($name:ident) => {
        impl $name {
            /// Takes a place in the queue without waiting.
            ///
            /// # Errors
            ///
            /// If the server refuses or can not be asked.
            pub async fn enqueue(&self) -> Result<Ticket, Error> {
                self.ask.enqueue().await
            }

            /// The place that an earlier client of this session has taken, to wait for.
            ///
            /// # Errors
            ///
            /// If the server does not keep sessions.
            pub fn ticket(&self) -> Result<Ticket, Error> {
                self.ask.ticket()
            }
        }
    };
}

/// A mutex.
#[derive(Clone)]
pub struct Lock {
    ask: Ask,
}

impl Lock {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { ask: Ask::new(client, key, Mode::Mutex) }
    }
}

asking!(Lock);
two_phases!(Lock);

/// A semaphore: so many holders at a time.
#[derive(Clone)]
pub struct Semaphore {
    ask: Ask,
}

impl Semaphore {
    pub(crate) fn new(client: &Client, key: Vec<u8>, limit: u32) -> Self {
        Self { ask: Ask::new(client, key, Mode::Semaphore { limit }) }
    }
}

asking!(Semaphore);
two_phases!(Semaphore);

/// A read-write lock.
#[derive(Clone)]
pub struct RwLock {
    client: Client,
    key: Vec<u8>,
}

impl RwLock {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { client: client.clone(), key }
    }

    /// Asking to read, together with other readers.
    #[must_use]
    pub fn read(&self) -> ReadLock {
        ReadLock { ask: Ask::new(&self.client, self.key.clone(), Mode::Read) }
    }

    /// Asking to write, alone.
    #[must_use]
    pub fn write(&self) -> WriteLock {
        WriteLock { ask: Ask::new(&self.client, self.key.clone(), Mode::Write) }
    }
}

/// The reading side of a [`RwLock`].
#[derive(Clone)]
pub struct ReadLock {
    ask: Ask,
}

asking!(ReadLock);
two_phases!(ReadLock);

/// The writing side of a [`RwLock`].
#[derive(Clone)]
pub struct WriteLock {
    ask: Ask,
}

asking!(WriteLock);
two_phases!(WriteLock);

/// A leader election: whoever acquires leads, and its observers are told.
#[derive(Clone)]
pub struct Election {
    ask: Ask,
}

impl Election {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { ask: Ask::new(client, key, Mode::Election) }
    }

    /// What happens to its leaders from now on.
    ///
    /// # Errors
    ///
    /// If the server can not be reached or refuses.
    pub async fn observe(&self) -> Result<Leaders, Error> {
        check_key(&self.ask.key)?;
        Leaders::new(&self.ask.client, &self.ask.key).await
    }
}

asking!(Election);
