//! Sessions over gRPC: kept sessions of the engine, used by their secret through any connection.
//!
//! A session's time to live is part of its id, so that every member knows it. Here it decides when a client that is
//! silent is given up; the leases of its locks are the engine's.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dflockd_core::{Command, Outcome, RequestId, SessionId, Span};
use dflockd_engine::{Door, SessionSecret};
use parking_lot::Mutex;

use super::error::Refused;
use super::{App, Peer, fields};
use crate::config::Config;
use crate::frontend::auth::{LatestPass, Pass};
use crate::frontend::caller::{Answer, Caller, Gone};
use crate::frontend::caps::{Caps, Permit};
use crate::frontend::rate;
use crate::service::span;

/// The shortest time to live.
pub(crate) const TTL_MIN: Span = Span::from_secs(1);
/// The longest.
pub(crate) const TTL_MAX: Span = Span::from_secs(3600);
/// How often it is looked for clients that are silent.
const SWEEP: Duration = Duration::from_millis(250);
/// Sessions that are fetched from elsewhere at the same time.
const FETCHES_MAX: usize = 64;

/// The id of a session: a secret, and its time to live in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionKey {
    secret: [u8; 16],
    ttl_ms: Option<u32>,
}

/// All sessions that are used here.
pub(crate) struct Sessions {
    default_ttl: Span,
    started: Instant,
    caps: Arc<Caps>,
    open: Mutex<HashMap<[u8; 16], Arc<Session>>>,
    /// One of these is held while a session is fetched, so that two calls do not take it from each other.
    fetching: [tokio::sync::Mutex<()>; FETCHES_MAX],
}

/// A session that is used here.
pub(crate) struct Session {
    pub(crate) caller: Caller,
    pub(crate) ttl: Span,
    pub(crate) metadata: BTreeMap<String, String>,
    /// With which token it was used last.
    pass: LatestPass,
    in_flight: AtomicUsize,
    started: Instant,
    /// Milliseconds after `started`.
    used_at: AtomicU64,
    _permit: Permit,
}

/// Who makes a call, and how.
pub(crate) struct Client {
    app: Arc<App>,
    who: Who,
    request: Option<RequestId>,
}

enum Who {
    Session(Busy),
    /// Whatever it asks for belongs to nobody.
    Common(Arc<Caller>),
}

/// A session with a call under way.
struct Busy(Arc<Session>);

/// What a command came to.
pub(crate) enum Told {
    /// Given back if it does not reach the client.
    Answer(Answer),
    /// The client comes back for it if it does not arrive.
    Kept(Outcome),
}

/// The fields that calls about sessions have in common.
pub(crate) trait Headed {
    /// The session, the number of the request, and up to where answers arrived.
    fn head(&self) -> (&str, u64, u64);
}

macro_rules! headed {
    ($($request:ident)*) => {
        $(impl Headed for dflockd_wire::grpc::$request {
            fn head(&self) -> (&str, u64, u64) {
                (&self.session, self.request_id, self.ack_through)
            }
        })*
    };
}

headed! {
    AcquireRequest TryAcquireRequest ReleaseRequest RenewRequest EnqueueRequest WaitRequest CampaignRequest
    ResignRequest AddCounterRequest SetCounterRequest SetRequest DeleteRequest CompareAndSetRequest PushRequest
    PopRequest BarrierWaitRequest PublishRequest
}

impl Sessions {
    pub(crate) fn new(config: &Config) -> Self {
        Self {
            default_ttl: span(config.default_lease_ttl).clamp(TTL_MIN, TTL_MAX),
            started: Instant::now(),
            caps: Caps::new(config.http_max_sessions, config.http_max_sessions_per_ip, |_| ()),
            open: Mutex::default(),
            fetching: std::array::from_fn(|_| tokio::sync::Mutex::default()),
        }
    }

    /// The time to live of who does not name one.
    pub(crate) fn default_ttl(&self) -> Span {
        self.default_ttl
    }

    /// A permit for one more session or stream of an address.
    pub(crate) fn permit(&self, address: IpAddr) -> Result<Permit, Refused> {
        self.caps.take(address).map_err(|_| Refused::max_sessions())
    }

    /// What the client of a session that is used here said about itself.
    pub(crate) fn metadata(&self) -> HashMap<SessionId, BTreeMap<String, String>> {
        let open = self.open.lock();
        let told = open.values().filter(|session| !session.metadata.is_empty());
        told.map(|session| (session.caller.id(), session.metadata.clone())).collect()
    }

    /// Gives up the clients that were silent for longer than their time to live.
    fn sweep(&self) {
        let now = self.started.elapsed();
        let mut over = Vec::new();
        self.open.lock().retain(|_, session| {
            let used_at = Duration::from_millis(session.used_at.load(Ordering::SeqCst));
            let is_silent = session.in_flight.load(Ordering::SeqCst) == 0
                && now.saturating_sub(used_at) > Duration::from_nanos(session.ttl.0);
            let stays = !is_silent && !session.caller.is_gone();
            if !stays {
                over.push(Arc::clone(session));
            }
            stays
        });
        for session in over {
            session.caller.detach(session.pass.get());
        }
    }

    /// Forgets all sessions here. In a cluster they wait for their clients at other members.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.open.lock());
        for session in all.into_values() {
            session.caller.detach(session.pass.get());
        }
    }

    /// Forgets the sessions that came with such a token, and gives them to whoever ends them.
    pub(crate) fn take_if(&self, is_gone: impl Fn(Pass) -> bool) -> Vec<Arc<Session>> {
        let mut open = self.open.lock();
        open.extract_if(|_, session| is_gone(session.pass.get())).map(|(_, gone)| gone).collect()
    }

    fn find(&self, key: SessionKey) -> Option<Arc<Session>> {
        let open = self.open.lock();
        let session = open.get(&key.secret)?;
        session.touch();
        Some(Arc::clone(session))
    }

    pub(crate) fn remove(&self, key: SessionKey, session: &Arc<Session>) {
        let mut open = self.open.lock();
        if open.get(&key.secret).is_some_and(|known| Arc::ptr_eq(known, session)) {
            open.remove(&key.secret);
        }
    }
}

impl App {
    /// Gives up silent clients, for ever.
    pub(crate) async fn sweep(self: Arc<Self>) {
        let mut rates_swept = Instant::now();
        loop {
            tokio::time::sleep(SWEEP).await;
            self.sessions.sweep();
            if rates_swept.elapsed() >= rate::SWEEP {
                rates_swept = Instant::now();
                self.sweep_rates();
            }
        }
    }

    /// A new session.
    pub(crate) async fn open_session(
        &self,
        peer: Peer,
        name: Option<&str>,
        ttl: Span,
        metadata: BTreeMap<String, String>,
    ) -> Result<(SessionKey, Arc<Session>), Refused> {
        let permit = self.sessions.permit(peer.0)?;
        let label = name.map_or_else(|| peer.0.to_string(), str::to_owned);
        let caller = Caller::open_at(&self.service, Door::Grpc, label.into());
        if !caller.has_home() {
            return Err(Refused::unavailable());
        }
        let secret = caller.keep().await.map_err(|_| Refused::unavailable())?;
        let SessionSecret(secret) = secret.ok_or_else(Refused::max_sessions)?;
        let ttl_ms = u32::try_from(ttl.0 / 1_000_000).ok();
        let key = SessionKey { secret, ttl_ms };
        Ok((key, self.enter(key, caller, permit, peer, metadata)))
    }

    /// The session with this id, here or fetched from elsewhere. One that comes from elsewhere counts for `peer`.
    pub(crate) async fn session(
        &self,
        text: &str,
        peer: Peer,
    ) -> Result<(SessionKey, Arc<Session>), Refused> {
        let key = SessionKey::parse(text.as_bytes())
            .ok_or_else(|| Refused::bad_request("malformed session id"))?;
        if let Some(session) = self.sessions.find(key)
            && !session.caller.is_gone()
        {
            session.pass.set(peer.1);
            return Ok((key, session));
        }
        let lane = usize::from(key.secret[0]) % FETCHES_MAX;
        let _turn = self.sessions.fetching[lane].lock().await;
        if let Some(session) = self.sessions.find(key) {
            if !session.caller.is_gone() {
                session.pass.set(peer.1);
                return Ok((key, session));
            }
            self.sessions.remove(key, &session);
        }
        let permit = self.sessions.permit(peer.0)?;
        let label = peer.0.to_string().into();
        let secret = SessionSecret(key.secret);
        match Caller::attach_at(&self.service, Door::Grpc, label, secret).await {
            Some(caller) => Ok((key, self.enter(key, caller, permit, peer, BTreeMap::new()))),
            None if self.is_ready() => Err(Refused::session_gone()),
            None => Err(Refused::unavailable()),
        }
    }

    fn enter(
        &self,
        key: SessionKey,
        caller: Caller,
        permit: Permit,
        peer: Peer,
        metadata: BTreeMap<String, String>,
    ) -> Arc<Session> {
        let ttl = key.ttl_ms.map(|ms| Span::from_millis(ms.into()).clamp(TTL_MIN, TTL_MAX));
        let session = Arc::new(Session {
            caller,
            ttl: ttl.unwrap_or(self.sessions.default_ttl),
            metadata,
            pass: LatestPass::new(peer.1),
            in_flight: AtomicUsize::new(0),
            started: self.sessions.started,
            used_at: AtomicU64::new(0),
            _permit: permit,
        });
        // Streams are told of everything else.
        session.caller.hear_only_losses();
        session.touch();
        self.sessions.open.lock().insert(key.secret, Arc::clone(&session));
        session
    }

    /// The session of calls that have none.
    pub(crate) fn common(&self) -> Arc<Caller> {
        self.common.get()
    }

    /// Who makes a call that can do without a session.
    pub(crate) async fn client(
        self: &Arc<Self>,
        peer: Peer,
        request: &impl Headed,
    ) -> Result<Client, Refused> {
        let (session, number, ack_through) = request.head();
        if !session.is_empty() {
            return self.member(peer, request).await;
        }
        if number != 0 || ack_through != 0 {
            return Err(Refused::bad_request("a request id needs a session"));
        }
        Ok(Client { app: Arc::clone(self), who: Who::Common(self.common()), request: None })
    }

    /// Who makes a call that needs a session.
    pub(crate) async fn member(
        self: &Arc<Self>,
        peer: Peer,
        request: &impl Headed,
    ) -> Result<Client, Refused> {
        let (session, number, ack_through) = request.head();
        let request = fields::request(number)?;
        let ack_through = fields::request(ack_through)?;
        let (_, session) = self.session(session, peer).await?;
        let busy = Busy::new(session);
        if let Some(up_to) = ack_through {
            busy.0.caller.call(Command::Acknowledge { up_to }).await?;
        }
        Ok(Client { app: Arc::clone(self), who: Who::Session(busy), request })
    }
}

impl Session {
    /// The client lives.
    pub(crate) fn touch(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.used_at.store(now, Ordering::SeqCst);
    }

    pub(crate) fn ttl_ms(&self) -> u64 {
        self.ttl.0 / 1_000_000
    }
}

impl Busy {
    fn new(session: Arc<Session>) -> Self {
        session.in_flight.fetch_add(1, Ordering::SeqCst);
        Self(session)
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Client {
    /// The lease that is asked for: 0 is that of the session.
    pub(crate) fn lease(&self, lease_ms: u64) -> Result<Span, Refused> {
        match (&self.who, fields::lasting(lease_ms)?) {
            (_, Some(lease)) => Ok(lease),
            (Who::Session(busy), None) => Ok(busy.0.ttl),
            (Who::Common(_), None) => Err(Refused::bad_request("a lease or a session is required")),
        }
    }

    /// Executes a command. Ends early if the server does.
    pub(crate) async fn execute(&self, command: Command<'_>) -> Result<Told, Refused> {
        let caller = match &self.who {
            Who::Session(busy) => &busy.0.caller,
            Who::Common(caller) => caller,
        };
        let executed = async {
            Ok(match self.request {
                Some(request) => Told::Kept(caller.call_once(request, command).await?),
                None => Told::Answer(caller.call(command).await?),
            })
        };
        tokio::select! {
            biased;
            told = executed => told.map_err(|gone: Gone| match &self.who {
                Who::Session(_) => Refused::from(gone),
                // That the common session is gone says nothing about the client.
                Who::Common(_) => Refused::unknown(),
            }),
            // What can be repeated stays, and may come to something yet.
            () = self.app.drained() => Err(match self.request {
                Some(_) => Refused::draining().perhaps(),
                None => Refused::draining(),
            }),
        }
    }
}

impl Told {
    pub(crate) fn outcome(&self) -> &Outcome {
        match self {
            Self::Answer(answer) => answer.outcome(),
            Self::Kept(outcome) => outcome,
        }
    }
}

impl SessionKey {
    /// 32 lower-case hexadecimal digits, and 8 more for the time to live. Without these it is a session that began at
    /// another door.
    fn parse(text: &[u8]) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        if text.len() != 32 && text.len() != 40 {
            return None;
        }
        let mut bytes = [0; 20];
        for (byte, pair) in bytes.iter_mut().zip(text.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        let [secret @ .., a, b, c, d] = bytes;
        let ttl_ms = (text.len() == 40).then_some(u32::from_be_bytes([a, b, c, d]));
        Some(Self { secret, ttl_ms })
    }

    pub(crate) fn text(self) -> String {
        let mut text = String::with_capacity(40);
        let ttl = self.ttl_ms.map(u32::to_be_bytes);
        for byte in self.secret.iter().chain(ttl.iter().flatten()) {
            write!(text, "{byte:02x}").expect("a string takes everything");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_a_secret_and_a_time_to_live() {
        let text = "00ff1234567890abcdef00112233445a000003e8";
        let key = SessionKey::parse(text.as_bytes()).unwrap();
        assert_eq!((key.text().as_str(), key.ttl_ms), (text, Some(1000)));
        let other = SessionKey::parse(&text.as_bytes()[..32]).unwrap();
        assert_eq!((other.secret, other.ttl_ms), (key.secret, None));
        for wrong in ["", &text[1..], &text[..34], &text.to_uppercase(), &format!("{text}00")] {
            assert!(SessionKey::parse(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }
}
