//! A held lock: how long it is valid, how it is renewed, and how one learns that it is gone.

use std::sync::{Arc, Weak};
use std::time::Duration;

use dflockd_wire::{Request, Space, Token, TokenText, command};
use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

use crate::clock::Instant;
use crate::error::{Error, Lost};
use crate::link::LinkHandle;
use crate::reply::Reply;
use crate::stream::Connection;

/// Pause after a renewal that failed for want of a connection.
const RENEW_RETRY: Duration = Duration::from_millis(50);
/// How long a hold may outlive its guard.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Time a release in the background may take.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

/// How a hold talks to its server.
pub(crate) enum Channel {
    /// Over the connection shared by all.
    Shared(Arc<LinkHandle>),
    /// Over a connection of its own, on servers that know nothing better.
    Own(Box<Own>),
}

/// A connection that belongs to one hold or one place in a queue.
pub(crate) struct Own {
    pub(crate) connection: tokio::sync::Mutex<Option<Connection>>,
    /// Somebody wants to use the connection while it is watched for its end.
    wanted: Notify,
}

impl Own {
    pub(crate) fn new(connection: Connection) -> Box<Self> {
        let connection = tokio::sync::Mutex::new(Some(connection));
        Box::new(Self { connection, wanted: Notify::new() })
    }

    /// Completes when the server ends the connection: with it goes the lock.
    async fn broken(&self) {
        loop {
            let mut connection = self.connection.lock().await;
            let Some(open) = connection.as_mut() else { return };
            tokio::select! {
                // Nothing is asked, so whatever comes is the end or its announcement.
                _ = open.next() => {
                    *connection = None;
                    return;
                }
                // The mutex is fair: whoever wants it is next.
                () = self.wanted.notified() => {}
            }
        }
    }
}

/// The state behind a guard.
pub(crate) struct Hold {
    key: Vec<u8>,
    space: Space,
    election: bool,
    token: Token,
    text: TokenText,
    lease: Duration,
    channel: Channel,
    timeout: Duration,
    valid_until: Mutex<Instant>,
    lost: watch::Sender<Option<Lost>>,
    /// It is to be renewed before its time.
    hurry: Arc<Notify>,
}

/// What is known of a fresh grant.
pub(crate) struct Granted {
    pub(crate) key: Vec<u8>,
    pub(crate) space: Space,
    pub(crate) election: bool,
    pub(crate) token: Token,
    pub(crate) lease: Duration,
    /// When the request was sent.
    pub(crate) sent_at: Instant,
}

impl Hold {
    pub(crate) fn new(granted: Granted, channel: Channel, timeout: Duration) -> Arc<Self> {
        let Granted { key, space, election, token, lease, sent_at } = granted;
        let hold = Arc::new(Self {
            key,
            space,
            election,
            token,
            text: token.text(),
            lease,
            channel,
            timeout,
            valid_until: Mutex::new(sent_at + validity(lease)),
            lost: watch::Sender::new(None),
            hurry: Arc::default(),
        });
        if let Channel::Shared(link) = &hold.channel {
            link.watch_hold(&hold);
        }
        hold
    }

    pub(crate) fn fence(&self) -> u64 {
        self.token.fence.0
    }

    pub(crate) fn lease(&self) -> Duration {
        self.lease
    }

    /// Asks whoever renews it to do so now.
    pub(crate) fn renew_soon(&self) {
        self.hurry.notify_one();
    }

    /// Notes that the lock is gone; the first reason counts.
    pub(crate) fn lose(&self, reason: Lost) {
        self.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            if first {
                *lost = Some(reason);
            }
            first
        });
    }

    fn lost_reason(&self) -> Option<Lost> {
        *self.lost.borrow()
    }

    /// Renews once, and counts the validity from the sending.
    pub(crate) async fn renew(&self) -> Result<(), Error> {
        let sent_at = Instant::now();
        let request = Request::command(command::Renew {
            space: self.space,
            key: &self.key,
            token: self.token,
            lease: Some(self.lease.into()),
        });
        self.ask(&request).await?.renewed("renew")?;
        let mut valid_until = self.valid_until.lock();
        *valid_until = (*valid_until).max(sent_at + validity(self.lease));
        Ok(())
    }

    async fn ask(&self, request: &Request<'_>) -> Result<Reply, Error> {
        match &self.channel {
            Channel::Shared(link) => Ok(link.call(request)?.wait(self.timeout).await?.claim()),
            Channel::Own(own) => {
                own.wanted.notify_one();
                let mut connection = own.connection.lock().await;
                let Some(open) = connection.as_mut() else {
                    return Err(Error::Unknown { reason: "the connection broke".to_owned() });
                };
                open.ask(None, request, self.timeout).await.map_err(|error| {
                    // Its answer could be taken for that of the next request.
                    *connection = None;
                    Error::Unknown { reason: error.to_string() }
                })
            }
        }
    }

    async fn release(&self) -> Result<(), Error> {
        let reply = self.ask(&self.release_request()).await?;
        self.lose(Lost::Released);
        self.forget();
        reply.done("release")
    }

    fn release_request(&self) -> Request<'_> {
        Request::command(command::Release {
            space: self.space,
            key: &self.key,
            token: self.token,
            resign: self.election,
        })
    }

    fn forget(&self) {
        if let Channel::Shared(link) = &self.channel {
            link.forget_hold(self.fence());
        }
    }
}

/// Completes when the own connection of a hold breaks.
async fn broken(hold: &Weak<Hold>) {
    // Looked at anew now and then: this must not keep a hold alive that nobody has any more.
    while let Some(hold) = hold.upgrade() {
        let Channel::Own(own) = &hold.channel else { break };
        if tokio::time::timeout(LOOK_EVERY, own.broken()).await.is_ok() {
            return;
        }
    }
    std::future::pending().await
}

/// Renews a hold until it is lost or dropped.
pub(crate) async fn keep_renewed(hold: Weak<Hold>) {
    let watched = hold.upgrade().map(|hold| (hold.lost.subscribe(), Arc::clone(&hold.hurry)));
    let Some((mut lost, hurry)) = watched else { return };
    loop {
        let Some(pause) = hold.upgrade().map(|hold| hold.lease / 3) else { return };
        tokio::select! {
            _ = lost.wait_for(Option::is_some) => return,
            () = broken(&hold) => {
                if let Some(hold) = hold.upgrade() {
                    hold.lose(Lost::Disconnected);
                }
                return;
            }
            () = hurry.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
        // Tries as long as the lock could still be ours.
        loop {
            let Some(hold) = hold.upgrade() else { return };
            let left = hold.valid_until.lock().remaining();
            if left.is_zero() {
                hold.lose(Lost::Unreachable);
                return;
            }
            match tokio::time::timeout(left, hold.renew()).await {
                Ok(Ok(())) => break,
                Ok(Err(Error::Refused(code))) if !code.may_retry() => {
                    hold.lose(Lost::Expired);
                    return;
                }
                // Nobody decided: it is as much ours as before.
                Ok(Err(Error::Refused(_))) => {}
                Ok(Err(_)) if matches!(hold.channel, Channel::Own(_)) => {
                    // The server may have released it when the connection went.
                    hold.lose(Lost::Disconnected);
                    return;
                }
                Ok(Err(_)) => {}
                Err(_) => continue,
            }
            drop(hold);
            tokio::time::sleep(RENEW_RETRY.min(left)).await;
        }
    }
}

/// A held lock, semaphore slot, read or write lock, or leadership.
///
/// It is renewed in the background at a third of its lease. Act only while [`Guard::is_valid`]: that is
/// counted from the *sending* of the last successful acquire or renewal, one per cent less than the lease,
/// on a clock that also counts the time the machine was suspended.
///
/// Dropping it releases in the background; [`Guard::release`] waits for the server and tells the outcome.
#[must_use = "a guard that is dropped releases its lock"]
pub struct Guard {
    hold: Arc<Hold>,
    released: bool,
}

impl Guard {
    /// Takes over a hold and begins to renew it.
    pub(crate) fn new(hold: Arc<Hold>) -> Self {
        tokio::spawn(keep_renewed(Arc::downgrade(&hold)));
        Self { hold, released: false }
    }

    /// What is locked.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.hold.key
    }

    /// The number of the grant: larger than that of every earlier holder of this key. Hand it to the storage you
    /// write to, see [`crate::fencing`].
    #[must_use]
    pub fn fence(&self) -> u64 {
        self.hold.fence()
    }

    /// The credential of the hold; whoever has it can release or renew.
    #[must_use]
    pub fn token(&self) -> &str {
        &self.hold.text
    }

    /// The lease it is renewed with.
    #[must_use]
    pub fn lease(&self) -> Duration {
        self.hold.lease
    }

    /// Until when the lock is ours for sure, as far as is known now.
    #[must_use]
    pub fn valid_until(&self) -> Instant {
        *self.hold.valid_until.lock()
    }

    /// Whether the lock is ours at this instant.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        self.hold.lost_reason().is_none() && !self.valid_until().remaining().is_zero()
    }

    /// Completes when the lock is no longer ours, with the reason.
    pub async fn lost(&self) -> Lost {
        let mut lost = self.hold.lost.subscribe();
        let expired = async {
            loop {
                let left = self.valid_until().remaining();
                if left.is_zero() {
                    return Lost::Unreachable;
                }
                tokio::time::sleep(left).await;
            }
        };
        tokio::select! {
            biased;
            reason = lost.wait_for(Option::is_some) => {
                reason.ok().and_then(|reason| *reason).unwrap_or(Lost::Released)
            }
            reason = expired => {
                self.hold.lose(reason);
                self.hold.lost_reason().unwrap_or(reason)
            }
        }
    }

    /// Renews now, beside the renewals in the background.
    ///
    /// # Errors
    ///
    /// If the server refuses or can not be asked.
    pub async fn renew(&self) -> Result<(), Error> {
        self.hold.renew().await
    }

    /// Releases, and tells whether the server agreed: an error means that the lock was lost before, or that the
    /// outcome is not known and the lease will end it.
    ///
    /// # Errors
    ///
    /// See above.
    pub async fn release(mut self) -> Result<(), Error> {
        let outcome = self.hold.release().await;
        // If the answer was lost, dropping tries once more; releasing twice does no harm.
        self.released = !matches!(outcome, Err(Error::Unknown { .. }));
        outcome
    }

    /// Gives up the guard without releasing: the lock is held until its lease ends or somebody releases it by its
    /// token, which is returned.
    #[must_use]
    pub fn forget(mut self) -> String {
        self.released = true;
        self.hold.lose(Lost::Released);
        self.hold.forget();
        self.token().to_owned()
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.released {
            return;
        }
        release_in_background(&self.hold);
    }
}

/// A hold that is given back unless it becomes a guard.
pub(crate) struct Unclaimed(Option<Arc<Hold>>);

impl Unclaimed {
    pub(crate) fn new(hold: Arc<Hold>) -> Self {
        Self(Some(hold))
    }

    pub(crate) fn hold(&self) -> &Hold {
        self.0.as_ref().expect("taken only by `claim`")
    }

    pub(crate) fn claim(mut self) -> Guard {
        Guard::new(self.0.take().expect("taken only here"))
    }
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        if let Some(hold) = &self.0 {
            release_in_background(hold);
        }
    }
}

fn release_in_background(hold: &Arc<Hold>) {
    let lost = hold.lost_reason().is_some();
    hold.lose(Lost::Released);
    hold.forget();
    match &hold.channel {
        Channel::Shared(link) => link.tell(&hold.release_request()),
        Channel::Own(_) if lost => {}
        Channel::Own(_) => {
            let hold = Arc::clone(hold);
            if let Ok(runtime) = tokio::runtime::Handle::try_current() {
                runtime.spawn(async move {
                    let _ = tokio::time::timeout(RELEASE_TIMEOUT, hold.release()).await;
                });
            }
        }
    }
}

/// The part of a lease that a client may rely on: clocks may differ a little.
fn validity(lease: Duration) -> Duration {
    lease - lease / 100
}
