//! Sessions of APIs whose requests name one by its id: a store of them, within caps, that gives up silent clients.
//!
//! What an API adds to a session is its parameter: HTTP lets requests take turns, gRPC has a time to live and metadata.
//! Where sessions are kept, a client finds its session again through any connection, and in a cluster through any
//! member.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use dflockd_engine::{Api, SessionSecret};
use parking_lot::Mutex;

use crate::frontend::auth::{LatestPass, Peer, TokenKind};
use crate::frontend::caller::Caller;
use crate::frontend::caps::{Caps, Full, Permit};
use crate::frontend::rate::{self, RateLimit};
use crate::service::Service;

/// Sessions that are fetched from elsewhere at the same time.
const FETCHES_MAX: usize = 64;

/// The sessions that are used here through one API.
pub(crate) struct SessionStore<T> {
    service: Arc<Service>,
    api: Api,
    /// Whether a session outlives its use here: then it can be fetched from where it was used before.
    keeps: bool,
    caps: Arc<Caps>,
    started: Instant,
    open: Mutex<HashMap<SessionSecret, Arc<Session<T>>>>,
    /// One of these is held while a session is fetched, so that two requests do not take it from each other.
    fetching: [tokio::sync::Mutex<()>; FETCHES_MAX],
}

/// A session that is used here.
pub(crate) struct Session<T> {
    pub(crate) caller: Caller,
    /// What the API adds.
    pub(crate) details: T,
    /// With which token it was used last.
    pass: LatestPass,
    usage: Arc<Usage>,
    /// A client that is silent for longer is given up.
    silence_max: Option<Duration>,
    /// Given back when the session ends, although a request may still know it.
    permit: Mutex<Option<Permit>>,
}

/// When a session was used last, and whether it is in use.
struct Usage {
    started: Instant,
    /// Milliseconds after `started`.
    used_at: AtomicU64,
    in_flight: AtomicUsize,
}

/// A request of a session is under way.
pub(crate) struct Busy(Arc<Usage>);

/// Why there is no session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoSession {
    /// There are as many as may be.
    Full(Full),
    /// It has ended.
    Gone,
    /// Nobody can say now.
    Unavailable,
    /// It could not be kept.
    NotKept,
}

impl From<Full> for NoSession {
    fn from(full: Full) -> Self {
        Self::Full(full)
    }
}

impl<T> SessionStore<T> {
    pub(crate) fn new(service: &Arc<Service>, api: Api, keeps: bool, caps: Arc<Caps>) -> Self {
        Self {
            service: Arc::clone(service),
            api,
            keeps,
            caps,
            started: Instant::now(),
            open: Mutex::default(),
            fetching: std::array::from_fn(|_| tokio::sync::Mutex::default()),
        }
    }

    /// A permit for one more session or stream of an address.
    pub(crate) fn permit(&self, address: IpAddr) -> Result<Permit, NoSession> {
        Ok(self.caps.take(address)?)
    }

    /// How many sessions and streams there are.
    pub(crate) fn count(&self) -> u64 {
        self.caps.count()
    }

    /// All sessions.
    pub(crate) fn all(&self) -> Vec<Arc<Session<T>>> {
        self.open.lock().values().cloned().collect()
    }

    /// A new session with this name for people and this reference, and its secret.
    pub(crate) async fn open(
        &self,
        peer: Peer,
        label: Option<&str>,
        reference: Option<&str>,
        silence_max: Option<Duration>,
        details: impl FnOnce(&Caller) -> T,
    ) -> Result<(SessionSecret, Arc<Session<T>>), NoSession> {
        let permit = self.permit(peer.0)?;
        let label = label.map_or_else(|| peer.0.to_string(), str::to_owned);
        let caller = Caller::open(&self.service, self.api, label.into());
        if let Some(reference) = reference {
            caller.set_reference(reference.into());
        }
        let secret = if !self.keeps {
            SessionSecret(rand::random())
        } else if !caller.has_home() {
            return Err(NoSession::Unavailable);
        } else {
            match caller.keep().await {
                Ok(Some(secret)) => secret,
                Ok(None) => return Err(NoSession::Full(Full::Total)),
                Err(_) if !self.service.engine.is_ready() => return Err(NoSession::Unavailable),
                Err(_) => return Err(NoSession::NotKept),
            }
        };
        let details = details(&caller);
        Ok((secret, self.enter(secret, caller, permit, peer, silence_max, details)))
    }

    /// The session with this secret, here or fetched from elsewhere. One that comes from elsewhere counts for `peer`.
    pub(crate) async fn get(
        &self,
        secret: SessionSecret,
        peer: Peer,
        silence_max: Option<Duration>,
        details: impl FnOnce(&Caller) -> T,
    ) -> Result<Arc<Session<T>>, NoSession> {
        if let Some(session) = self.find(secret, peer) {
            return Ok(session);
        }
        if !self.keeps {
            return Err(NoSession::Gone);
        }
        let _turn = self.fetching[usize::from(secret.0[0]) % FETCHES_MAX].lock().await;
        if let Some(session) = self.find(secret, peer) {
            return Ok(session);
        }
        // One that is over here counts no more for the client that used it.
        let over = self.open.lock().remove(&secret);
        drop(over);
        let permit = self.permit(peer.0)?;
        let label = peer.0.to_string().into();
        match Caller::attach(&self.service, self.api, label, secret).await {
            Some(caller) => {
                let details = details(&caller);
                Ok(self.enter(secret, caller, permit, peer, silence_max, details))
            }
            None if self.service.is_draining() => Err(NoSession::Unavailable),
            None if self.service.engine.is_ready() => Err(NoSession::Gone),
            None => Err(NoSession::Unavailable),
        }
    }

    fn find(&self, secret: SessionSecret, peer: Peer) -> Option<Arc<Session<T>>> {
        let session = self.open.lock().get(&secret).cloned()?;
        session.touch();
        if session.caller.is_gone() {
            return None;
        }
        session.pass.set(peer.1);
        Some(session)
    }

    fn enter(
        &self,
        secret: SessionSecret,
        caller: Caller,
        permit: Permit,
        peer: Peer,
        silence_max: Option<Duration>,
        details: T,
    ) -> Arc<Session<T>> {
        let (used_at, in_flight) = (AtomicU64::new(0), AtomicUsize::new(0));
        let session = Arc::new(Session {
            caller,
            details,
            pass: LatestPass::new(peer.1),
            usage: Arc::new(Usage { started: self.started, used_at, in_flight }),
            silence_max,
            permit: Mutex::new(Some(permit)),
        });
        session.touch();
        self.open.lock().insert(secret, Arc::clone(&session));
        session
    }

    /// Forgets a session, unless another one has taken its place.
    pub(crate) fn remove(&self, secret: SessionSecret, session: &Arc<Session<T>>) {
        let mut open = self.open.lock();
        if open.get(&secret).is_some_and(|known| Arc::ptr_eq(known, session)) {
            open.remove(&secret);
        }
    }

    /// Forgets a session that its client has ended.
    pub(crate) fn close(&self, secret: SessionSecret, session: &Arc<Session<T>>) {
        self.remove(secret, session);
        session.caller.close();
        session.permit.lock().take();
    }

    /// Gives up the clients that were silent for too long, and forgets the sessions that have ended.
    fn sweep(&self) {
        let over: Vec<_> = {
            let mut open = self.open.lock();
            open.extract_if(|_, session| session.is_silent() || session.caller.is_gone()).collect()
        };
        // A request whose body still comes may have one of them, and finds it gone.
        for (_, session) in over {
            session.abandon(true);
        }
    }

    /// Gives up silent clients, and forgets addresses that are not limited any more, for ever.
    pub(crate) async fn sweep_every(&self, interval: Duration, limit: Option<&RateLimit>) {
        let mut rates_swept = Instant::now();
        loop {
            tokio::time::sleep(interval).await;
            self.sweep();
            if rates_swept.elapsed() >= rate::SWEEP {
                rates_swept = Instant::now();
                if let Some(limit) = limit {
                    limit.sweep(rates_swept);
                }
            }
        }
    }

    /// Forgets all sessions here. What they hold follows the policy; in a cluster they wait for their clients.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.open.lock());
        for session in all.into_values() {
            session.abandon(false);
        }
    }

    /// Ends the sessions that came with a token that is no longer valid. Streams and requests that wait see it
    /// themselves.
    pub(crate) fn revoke(&self) {
        let auth = &self.service.auth;
        let revoked: Vec<_> = {
            let mut open = self.open.lock();
            let is_gone =
                |session: &Session<T>| !auth.is_valid(TokenKind::Client, session.pass.get());
            open.extract_if(|_, session| is_gone(session)).collect()
        };
        for (_, session) in revoked {
            self.service.metrics.revoked(self.api);
            session.caller.revoke();
            session.permit.lock().take();
        }
    }
}

impl<T> Session<T> {
    /// The client lives.
    pub(crate) fn touch(&self) {
        self.usage.touch();
    }

    /// The session is in use until this is dropped.
    pub(crate) fn begin(&self) -> Busy {
        self.usage.in_flight.fetch_add(1, Ordering::SeqCst);
        Busy(Arc::clone(&self.usage))
    }

    fn is_silent(&self) -> bool {
        let Usage { started, used_at, in_flight } = &*self.usage;
        let used_at = Duration::from_millis(used_at.load(Ordering::SeqCst));
        let silence = started.elapsed().saturating_sub(used_at);
        in_flight.load(Ordering::SeqCst) == 0 && self.silence_max.is_some_and(|max| silence > max)
    }

    fn abandon(&self, silent: bool) {
        // Those that are not kept end, and are not found when it is asked.
        self.caller.detach(self.pass.get(), silent);
        self.permit.lock().take();
    }
}

impl Usage {
    fn touch(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.used_at.store(now, Ordering::SeqCst);
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The id of a session: a secret, and perhaps its time to live in milliseconds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SessionKey {
    pub(crate) secret: SessionSecret,
    pub(crate) ttl_ms: Option<u32>,
}

impl SessionKey {
    /// 32 lower-case hexadecimal digits, and 8 more if there is a time to live.
    pub(crate) fn parse(text: &[u8]) -> Option<Self> {
        let has_ttl = match text.len() {
            32 => false,
            40 => true,
            _ => return None,
        };
        // An id has one form.
        if text.iter().any(u8::is_ascii_uppercase) {
            return None;
        }
        let mut bytes = [0; 20];
        hex::decode_to_slice(text, &mut bytes[..text.len() / 2]).ok()?;
        let [secret @ .., a, b, c, d] = bytes;
        let ttl_ms = has_ttl.then_some(u32::from_be_bytes([a, b, c, d]));
        Some(Self { secret: SessionSecret(secret), ttl_ms })
    }

    pub(crate) fn text(self) -> String {
        let ttl = self.ttl_ms.map(|ttl_ms| hex::encode(ttl_ms.to_be_bytes()));
        hex::encode(self.secret.0) + &ttl.unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_have_a_secret_and_perhaps_a_time_to_live() {
        let text = "00ff1234567890abcdef00112233445a000003e8";
        let key = SessionKey::parse(text.as_bytes()).unwrap();
        assert_eq!((key.text().as_str(), key.ttl_ms), (text, Some(1000)));
        let other = SessionKey::parse(&text.as_bytes()[..32]).unwrap();
        assert_eq!((other.text().as_str(), other.ttl_ms), (&text[..32], None));
        assert!(other.secret == key.secret);
        for wrong in ["", "é", &text[1..], &text[..34], &text.to_uppercase(), &format!("{text}00")]
        {
            assert!(SessionKey::parse(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }
}
