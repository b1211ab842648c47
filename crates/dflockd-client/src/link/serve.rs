//! The connections of a link, one after the other: making them, carrying connection, noticing that one is dead.

use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Query, Request};

use super::{Kind, Link, Lost, OnDisconnect, Sent};
use crate::clock::Instant;
use crate::cluster::{Cluster, GREETING_MAX, Route, Told};
use crate::error::Error;
use crate::stream::{Address, Connection, Greeting, Session};

const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// A member that was left sooner was no good, and the next may not be either.
const WORKED: Duration = Duration::from_secs(1);
/// How long a closed link waits for grants that are under way, to give them back, and then for the connection's end.
const FAREWELL: Duration = Duration::from_secs(1);
/// How long a server may leave what is sent to it unread.
const UNREAD_MAX: Duration = Duration::from_secs(10);

// What follows is for clusters.

/// The pace at which a member is asked how it is while nothing depends on it.
const PACE_IDLE: Duration = Duration::from_secs(5);
const PACE_MIN: Duration = Duration::from_millis(100);
/// How long a member may take to say that it is there: longer than the kernel takes to send a lost packet again.
const HASTY_MIN: Duration = Duration::from_millis(250);
/// The part of a lease after which silence is asked about.
const PACE_OF_LEASE: u32 = 10;
/// How long a member may be out of touch with the leader: longer than an election takes.
const PROBE_MAX: Duration = Duration::from_secs(3);
/// A proof of contact that takes longer was not given by a healthy member.
pub(super) const PROBE_SLOW: Duration = Duration::from_secs(1);
/// The others give a member up after 10 s.
pub(super) const OUT_OF_TOUCH: Duration = Duration::from_secs(8);
/// A read that asks the leader and changes nothing.
const PROBE: Request<'static> = Request::Query(Query::Counter { key: b"_" });

/// Serves a link until it is closed.
pub(super) async fn run(link: Arc<Link>, connection: Connection) {
    let mut connection = Some(connection);
    let mut backoff = BACKOFF_MIN;
    while !link.is_closed() {
        let connected = match connection.take() {
            Some(connection) => Ok(connection),
            None => link.reconnect().await,
        };
        match connected {
            Ok(connection) => {
                let begun = Instant::now();
                let reason = serve(&link, connection).await;
                link.handle_disconnected(&reason);
                if link.route.cluster().is_none() || begun.elapsed() > WORKED {
                    backoff = BACKOFF_MIN;
                }
            }
            Err(error) => {
                if error == Error::Auth {
                    link.fail_all(&error);
                }
                link.state.lock().trouble = Some(error);
            }
        }
        // Spread, so that a thousand clients of a restarted server do not come back at once.
        let pause = backoff.mul_f64(rand::random());
        let _ = tokio::time::timeout(pause, link.closing.notified()).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
    link.fail_all(&Error::Closed);
}

/// When a connection was last heard, and since when it has been asked to speak.
struct Pulse {
    heard_at: Instant,
    /// When something was first sent since then that somebody waits for.
    sent_at: Option<Instant>,
    asked_at: Option<Instant>,
}

impl Pulse {
    fn new() -> Self {
        Self { heard_at: Instant::now(), sent_at: None, asked_at: None }
    }

    fn hear(&mut self) {
        *self = Self::new();
    }

    /// When to ask a silent connection to speak, or to give it up if it was asked.
    ///
    /// `hasty`: somebody waits for an answer that another member could give. Then a third of the pace is enough of
    /// silence, and two thirds are for the answer: as much as a packet needs that is lost twice. A request that rightly
    /// takes long, a wait for a lock, changes that once: when the connection has spoken there is nothing unheard.
    fn next(&self, pace: Duration, patience: Duration, hasty: bool) -> Instant {
        let sent_at = self.sent_at.filter(|_| hasty);
        match (self.asked_at, sent_at) {
            (None, None) => self.heard_at + pace,
            (None, Some(sent_at)) => (self.heard_at + pace).min(sent_at + (pace / 3).max(PACE_MIN)),
            (Some(asked_at), None) => asked_at + patience,
            (Some(asked_at), Some(sent_at)) => {
                let answer = (pace * 2 / 3).max(HASTY_MIN);
                (asked_at + patience).min(asked_at.max(sent_at) + answer)
            }
        }
    }
}

/// Carries requests and answers until the connection breaks; says why it did.
async fn serve(link: &Arc<Link>, mut connection: Connection) -> String {
    let mut pulse = Pulse::new();
    let mut closed_at = None;
    loop {
        let look_at = match link.look_after(&mut pulse) {
            Ok(look_at) => look_at,
            Err(reason) => return reason.to_owned(),
        };
        let sent = link.queue_unsent(&mut connection);
        if sent.is_some() {
            if sent == Some(Sent::Awaited) {
                pulse.sent_at.get_or_insert_with(Instant::now);
            }
            let hear = |incoming| {
                pulse.hear();
                link.handle(incoming);
            };
            if let Err(error) = connection.flush(link.unread_max(), hear).await {
                return error.to_string();
            }
            continue;
        }
        let mut pause = look_at.remaining();
        if link.is_closed() {
            let closed_at = *closed_at.get_or_insert_with(Instant::now);
            if !link.owes_something() || closed_at.elapsed() > FAREWELL {
                let _ = tokio::time::timeout(FAREWELL, connection.close()).await;
                return "closed".to_owned();
            }
            pause = pause.min(FAREWELL);
        }
        tokio::select! {
            // First what has come: after a pause of the whole process it must not look like silence.
            biased;
            incoming = connection.next() => match incoming {
                Ok(incoming) => {
                    pulse.hear();
                    link.handle(incoming);
                }
                Err(error) => return error.to_string(),
            },
            () = link.wake.notified() => {}
            () = tokio::time::sleep(pause) => {}
        }
    }
}

impl Link {
    /// How long a connection may be silent before it is asked to speak.
    fn pace(&self) -> Duration {
        if self.route.cluster().is_none() {
            return self.heartbeat;
        }
        let state = self.state.lock();
        if state.holds.is_empty() && state.pending.is_empty() {
            return PACE_IDLE.max(self.heartbeat);
        }
        let lease = state.lease_min.filter(|_| !state.holds.is_empty());
        lease.map_or(self.heartbeat, |it| (it / PACE_OF_LEASE).max(PACE_MIN).min(self.heartbeat))
    }

    fn unread_max(&self) -> Duration {
        self.route.cluster().map_or(UNREAD_MAX, |_| UNREAD_MAX.min(self.pace() * 3))
    }

    /// Asks a silent connection to speak, and a member of a cluster how it is. Says when to look again, or why
    /// the connection is to be given up.
    fn look_after(&self, pulse: &mut Pulse) -> Result<Instant, &'static str> {
        let pace = self.pace();
        let Some(cluster) = self.route.cluster() else {
            return self.look_after_silence(pulse, pace, pace, false);
        };
        // To leave a member costs a session that is not kept all that it holds.
        let hasty = self.on_disconnect == OnDisconnect::Keep;
        let mut next = self.look_after_silence(pulse, pace, pace * 2, hasty)?;
        let mut state = self.state.lock();
        if let Some(reason) = state.member.leave.take() {
            return Err(reason);
        }
        let touched_at = *state.member.touched_at.get_or_insert_with(Instant::now);
        match state.member.probed_at {
            Some(at) if at.elapsed() >= PROBE_MAX => return Err("the member is out of touch"),
            Some(at) => next = next.min(at + PROBE_MAX),
            None if touched_at.elapsed() >= pace => {
                state.push_as(Kind::Probe, &PROBE);
                let now = Instant::now();
                state.member.probed_at = Some(now);
                next = next.min(now + PROBE_MAX);
            }
            None => next = next.min(touched_at + pace),
        }
        let learn_at = cluster.learn_at();
        if learn_at.remaining().is_zero() {
            cluster.handle_asked();
            state.push_as(Kind::Members, &Request::Members);
        } else {
            next = next.min(learn_at);
        }
        Ok(next)
    }

    fn look_after_silence(
        &self,
        pulse: &mut Pulse,
        pace: Duration,
        patience: Duration,
        hasty: bool,
    ) -> Result<Instant, &'static str> {
        let next = pulse.next(pace, patience, hasty);
        if !next.remaining().is_zero() {
            return Ok(next);
        }
        if pulse.asked_at.is_some() {
            return Err("the server is silent");
        }
        self.tell(&Request::Ping);
        pulse.asked_at = Some(Instant::now());
        Ok(pulse.next(pace, patience, hasty))
    }

    /// Connects again, to the same session if there is one.
    async fn reconnect(&self) -> Result<Connection, Error> {
        match &self.route {
            Route::One(address) => self.reconnect_to(address).await,
            Route::Cluster(cluster) => self.reconnect_within(cluster).await,
        }
    }

    async fn reconnect_to(&self, address: &Address) -> Result<Connection, Error> {
        let mut connection = address.connect().await?;
        let session = self.state.lock().session.clone();
        let timeout = address.connect_timeout;
        let name = &address.client_name;
        if let Some(session) = session {
            let greeted = connection.greet(name, Session::Attach(&session), timeout).await;
            match greeted.map_err(|error| address.greeting_failed(&error))? {
                Greeting::Accepted { session, .. } => {
                    self.handle_connected(session, &address.name);
                    return Ok(connection);
                }
                Greeting::Refused(ErrorCode::Error) => {
                    self.handle_session_lost(Lost::Session, "the session has ended");
                }
                Greeting::Refused(code) => return Err(address.unreachable(code.text())),
                Greeting::Unsuited => return Err(address.unreachable("it does not keep sessions")),
                Greeting::NotLeader(_) => return Err(address.unreachable("it does not lead")),
            }
        }
        let greeted = connection.greet(name, Session::New(self.on_disconnect), timeout).await;
        match greeted.map_err(|error| address.greeting_failed(&error))? {
            Greeting::Accepted { session, .. } => {
                self.handle_connected(session, &address.name);
                Ok(connection)
            }
            Greeting::Unsuited | Greeting::Refused(_) | Greeting::NotLeader(_) => {
                Err(address.unreachable("the server no longer speaks the same protocol"))
            }
        }
    }

    /// Connects again to any member of the cluster: those that can be reached are tried one after the other.
    async fn reconnect_within(&self, cluster: &Arc<Cluster>) -> Result<Connection, Error> {
        let mut candidates = cluster.candidates();
        let mut last: Option<Error> = None;
        while !self.is_closed() {
            let (address, connection) = match cluster.first_reached(&mut candidates).await {
                Ok(reached) => reached,
                Err(error) => return Err(last.unwrap_or(error)),
            };
            match self.attach_at(cluster, &address, connection).await {
                Ok(connection) => return Ok(connection),
                Err(error) => {
                    cluster.handle_failure(&address.name);
                    last = Some(error);
                }
            }
        }
        Err(Error::Closed)
    }

    async fn attach_at(
        &self,
        cluster: &Arc<Cluster>,
        address: &Address,
        mut connection: Connection,
    ) -> Result<Connection, Error> {
        let session = self.state.lock().session.clone();
        let wanted = session.as_deref().map_or(Session::New(self.on_disconnect), Session::Attach);
        // Until there is an answer the attempt may be executed at any time.
        let is_attempt = u32::from(session.is_some());
        self.state.lock().member.ghosts += is_attempt;
        let greeted = connection.greet(&address.client_name, wanted, GREETING_MAX).await;
        let greeting = greeted.map_err(|error| address.greeting_failed(&error))?;
        match greeting {
            Greeting::Accepted { session, .. } => {
                self.state.lock().member.ghosts -= is_attempt;
                self.handle_connected(session, &address.name);
                Ok(connection)
            }
            Greeting::Unsuited => Err(address.unreachable("it does not keep sessions")),
            Greeting::NotLeader(leader) => {
                self.state.lock().member.ghosts -= is_attempt;
                cluster.ask(address, &mut connection).await;
                cluster.handle_redirect(leader.as_deref());
                Err(address.unreachable("it serves no clients"))
            }
            Greeting::Refused(ErrorCode::Error) if session.is_some() => {
                self.state.lock().member.ghosts -= is_attempt;
                // A server that has nothing to do with it says the same.
                if cluster.ask(address, &mut connection).await == Some(Told::Member { ready: true })
                {
                    self.handle_session_lost(Lost::Session, "the session has ended");
                }
                Err(address.unreachable("it does not know the session"))
            }
            Greeting::Refused(code) => {
                if code == ErrorCode::Unavailable {
                    self.state.lock().member.ghosts -= is_attempt;
                }
                Err(address.unreachable(code.text()))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: Duration = Duration::from_secs(1);
    const PATIENCE: Duration = Duration::from_secs(2);

    #[test]
    fn silence_is_asked_about_sooner_while_somebody_waits() {
        let base = Instant::now();
        let at = |ms| base + Duration::from_millis(ms);
        let next = |sent: Option<u64>, asked: Option<u64>, pace, hasty| {
            let (sent_at, asked_at) = (sent.map(at), asked.map(at));
            Pulse { heard_at: base, sent_at, asked_at }.next(pace, pace * 2, hasty)
        };
        assert_eq!(next(None, None, PACE, true), at(1000));
        assert_eq!(next(Some(100), None, PACE, false), at(1000), "the session is not kept");
        assert!(next(Some(100), None, PACE, true) < at(434));
        assert_eq!(next(Some(900), None, PACE, true), at(1000), "never later than without");
        assert_eq!(next(None, Some(1000), PACE, true), base + PACE + PATIENCE);
        assert_eq!(next(Some(100), Some(434), PACE, false), at(434) + PATIENCE);
        assert!(next(Some(100), Some(434), PACE, true) < at(1101));
        let late = next(Some(1900), Some(1000), PACE, true);
        assert!(late > at(2500) && late < at(2567), "a request has time to be answered, too");
        // A short lease is no reason to take a lost packet for the end.
        let short = Duration::from_millis(150);
        assert_eq!(next(Some(0), None, short, true), at(100));
        assert_eq!(next(Some(0), Some(100), short, true), at(350));
        let shorter = Duration::from_millis(100);
        assert_eq!(next(Some(0), Some(100), shorter, true), at(300), "never later than without");
    }
}
