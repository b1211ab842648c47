//! Sessions over HTTP: what a connection is in the line protocol.
//!
//! A session owns its holds and queue places. Its operations take turns; a ping and its end do not wait for them. In
//! replicated mode its id is the secret of a kept session, which works through any member.

use std::collections::HashMap;
use std::fmt::Write;
use std::net::IpAddr;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use dflockd_core::{Command, Outcome, Refusal};
use dflockd_engine::{Door, SessionSecret};
use parking_lot::Mutex;
use tokio::sync::MutexGuard;

use super::error::ApiError;
use super::{App, Drain, Peer, Room, Shared};
use crate::config::Config;
use crate::frontend::auth::{LatestPass, Pass};
use crate::frontend::caller::{Answer, Caller};
use crate::frontend::caps::{Caps, Full, Permit};
use crate::service::Service;

/// The header that names the session.
const HEADER: &str = "x-dflockd-session";
/// Longest pause between two looks for sessions that nobody uses.
const SWEEP_MAX: Duration = Duration::from_secs(30);
/// Sessions that are fetched from elsewhere at the same time.
const FETCHES_MAX: usize = 64;

/// The id of a session: a secret.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct SessionKey([u8; 16]);

/// All sessions, and who may have more.
pub(crate) struct Sessions {
    /// Unit of the idle time, zero if sessions do not end by themselves.
    pub(crate) idle: Duration,
    started: Instant,
    caps: Arc<Caps>,
    open: Mutex<HashMap<SessionKey, Arc<Session>>>,
    /// One of these is held while a session is fetched, so that two requests do not take it from each other.
    fetching: [tokio::sync::Mutex<()>; FETCHES_MAX],
}

/// A session.
pub(crate) struct Session {
    caller: Caller,
    /// With which token it was used last.
    pass: LatestPass,
    drain: Arc<Drain>,
    turn: tokio::sync::Mutex<()>,
    in_flight: AtomicUsize,
    started: Instant,
    /// Milliseconds after `started`.
    used_at: AtomicU64,
    /// Given back when the session ends, although a request may still know it.
    permit: Mutex<Option<Permit>>,
}

/// The hidden session of an event stream. It counts like any other and ends when dropped.
pub(crate) struct Hidden {
    caller: Caller,
    _permit: Permit,
}

/// A session whose turn it is.
pub(crate) struct Claim<'a> {
    session: &'a Session,
    _turn: MutexGuard<'a, ()>,
    _busy: Busy<'a>,
}

struct Busy<'a>(&'a Session);

impl Sessions {
    pub(crate) fn new(config: &Config, service: &Arc<Service>) -> Self {
        let max = match (config.http_max_sessions, config.max_sessions) {
            // In a cluster all members count them together, with those of other APIs.
            (max, _) if config.replicated().is_some() => max,
            (0, max) | (max, 0) => max,
            (http, all) => http.min(all),
        };
        let service = Arc::clone(service);
        let gauge = move |count| service.metrics.set_http_sessions(count);
        Self {
            idle: config.http_session_idle_timeout,
            started: Instant::now(),
            caps: Caps::new(max, config.http_max_sessions_per_ip, gauge),
            open: Mutex::default(),
            fetching: std::array::from_fn(|_| tokio::sync::Mutex::default()),
        }
    }

    /// How many sessions there are, hidden ones included.
    pub(crate) fn count(&self) -> u64 {
        self.caps.count()
    }

    /// A permit for one more session or stream of an address.
    pub(crate) fn permit(&self, address: IpAddr) -> Result<Permit, ApiError> {
        self.caps.take(address).map_err(|full| match full {
            Full::Total => ApiError::max_sessions(),
            Full::Address => ApiError::max_sessions_per_ip(),
        })
    }

    /// How long to wait between two sweeps.
    pub(crate) fn sweep_interval(&self) -> Duration {
        if self.idle.is_zero() { SWEEP_MAX } else { self.idle.min(SWEEP_MAX) }
    }

    /// Ends the sessions that nobody has used for more than twice the idle time, and forgets those that have ended.
    pub(crate) fn sweep(&self) {
        let now = self.started.elapsed();
        let mut over = Vec::new();
        let mut open = self.open.lock();
        open.retain(|_, session| {
            let used_at = Duration::from_millis(session.used_at.load(Ordering::SeqCst));
            let is_idle = !self.idle.is_zero()
                && session.in_flight.load(Ordering::SeqCst) == 0
                && now.saturating_sub(used_at) > self.idle * 2;
            let stays = !is_idle && !session.caller.is_gone();
            if !stays {
                over.push(Arc::clone(session));
            }
            stays
        });
        drop(open);
        for session in over {
            // A request whose body still comes may have it; that one finds it gone.
            session.abandon();
        }
    }

    /// Forgets all sessions of this process. What they hold follows the policy.
    pub(crate) fn clear(&self) {
        let all = std::mem::take(&mut *self.open.lock());
        for session in all.into_values() {
            session.abandon();
        }
    }

    /// Forgets the sessions that came with such a token, and gives them to whoever ends them.
    pub(crate) fn take_if(&self, is_gone: impl Fn(Pass) -> bool) -> Vec<Arc<Session>> {
        let mut open = self.open.lock();
        open.extract_if(|_, session| is_gone(session.pass.get())).map(|(_, gone)| gone).collect()
    }

    fn find(&self, key: SessionKey) -> Option<Arc<Session>> {
        let open = self.open.lock();
        let session = open.get(&key)?;
        session.touch();
        Some(Arc::clone(session))
    }

    fn remove(&self, key: SessionKey, session: &Arc<Session>) {
        let mut open = self.open.lock();
        if open.get(&key).is_some_and(|known| Arc::ptr_eq(known, session)) {
            open.remove(&key);
        }
    }
}

impl App {
    /// A new session, and its id.
    pub(crate) async fn open_session(
        &self,
        peer: Peer,
        label: Option<String>,
    ) -> Result<String, ApiError> {
        let permit = self.sessions.permit(peer.0)?;
        let label = label.unwrap_or_else(|| peer.0.to_string());
        let caller = Caller::open(&self.service, label.into());
        let key = if !self.service.engine.is_replicated() {
            SessionKey(rand::random())
        } else if !caller.has_home() {
            return Err(ApiError::unavailable());
        } else {
            match caller.keep().await {
                Ok(Some(SessionSecret(secret))) => SessionKey(secret),
                Ok(None) => return Err(ApiError::max_sessions()),
                Err(_) if !self.is_ready() => return Err(ApiError::unavailable()),
                Err(_) => return Err(ApiError::session_create_failed()),
            }
        };
        self.enter(key, caller, permit, peer);
        Ok(key.text())
    }

    /// The session that a request names in its header.
    pub(crate) async fn session(
        &self,
        headers: &HeaderMap,
        peer: Peer,
    ) -> Result<Arc<Session>, ApiError> {
        let id = session_id(headers)?;
        self.session_by_id(id, peer).await.map(|(_, session)| session)
    }

    /// The session with this id; one that comes from another member counts for `peer`.
    async fn session_by_id(
        &self,
        text: &[u8],
        peer: Peer,
    ) -> Result<(SessionKey, Arc<Session>), ApiError> {
        let key =
            SessionKey::parse(text).ok_or_else(|| ApiError::bad_request("invalid session id"))?;
        if let Some(session) = self.sessions.find(key)
            && !session.caller.is_gone()
        {
            session.pass.set(peer.1);
            return Ok((key, session));
        }
        if !self.service.engine.is_replicated() {
            return Err(ApiError::session_gone());
        }
        self.fetch(key, peer).await.map(|session| (key, session))
    }

    /// Takes over a session that another member of the cluster had.
    async fn fetch(&self, key: SessionKey, peer: Peer) -> Result<Arc<Session>, ApiError> {
        let lane = usize::from(key.0[0]) % FETCHES_MAX;
        let _turn = self.sessions.fetching[lane].lock().await;
        if let Some(session) = self.sessions.find(key) {
            if !session.caller.is_gone() {
                session.pass.set(peer.1);
                return Ok(session);
            }
            self.sessions.remove(key, &session);
        }
        let permit = self.sessions.permit(peer.0)?;
        let label = peer.0.to_string().into();
        match Caller::attach(&self.service, label, SessionSecret(key.0)).await {
            Some(caller) => Ok(self.enter(key, caller, permit, peer)),
            None if self.is_ready() => Err(ApiError::session_gone()),
            None => Err(ApiError::unavailable()),
        }
    }

    fn enter(&self, key: SessionKey, caller: Caller, permit: Permit, peer: Peer) -> Arc<Session> {
        let session = Arc::new(Session {
            caller,
            pass: LatestPass::new(peer.1),
            drain: Arc::clone(&self.drain),
            turn: tokio::sync::Mutex::default(),
            in_flight: AtomicUsize::new(0),
            started: self.sessions.started,
            used_at: AtomicU64::new(0),
            permit: Mutex::new(Some(permit)),
        });
        session.touch();
        self.sessions.open.lock().insert(key, Arc::clone(&session));
        session
    }

    /// Ends a session for its client: what waits for it is told so, and what it holds is released before this returns,
    /// unless the policy says otherwise.
    pub(crate) async fn close_session(&self, id: &[u8], peer: Peer) -> Result<(), ApiError> {
        let (key, session) = self.session_by_id(id, peer).await?;
        if self.service.engine.is_replicated() {
            self.end_kept(&session).await.inspect_err(|error| {
                if error.status == StatusCode::GONE {
                    self.sessions.remove(key, &session);
                }
            })?;
        }
        self.sessions.remove(key, &session);
        session.caller.close();
        session.permit.lock().take();
        Ok(())
    }

    /// Ends a session that would otherwise wait for its client to come back. Done when all members know.
    async fn end_kept(&self, session: &Session) -> Result<(), ApiError> {
        // If the common session is gone, that says nothing about this one.
        let ended = self.common().end_session(session.caller.id()).await;
        let outcome = ended.map_err(|_| ApiError::unavailable())?;
        if let Outcome::Refused(refusal) = outcome {
            let gone = refusal == Refusal::NotHeld;
            return Err(if gone { ApiError::session_gone() } else { ApiError::refused(refusal) });
        }
        Ok(())
    }

    /// Notes that a session is in use.
    pub(crate) async fn ping_session(&self, id: &[u8], peer: Peer) -> Result<(), ApiError> {
        self.session_by_id(id, peer).await.map(|_| ())
    }

    /// A session for an event stream of this peer.
    pub(crate) fn hidden(&self, peer: Peer, room: &Room, label: &str) -> Result<Hidden, ApiError> {
        let permit = self.sessions.permit(peer.0)?;
        let pushes = Arc::clone(&room.0.pushes);
        let caller = Caller::open_with(&self.service, Door::Http, label.into(), pushes);
        Ok(Hidden { caller, _permit: permit })
    }
}

/// The id that a request names in its header.
pub(crate) fn session_id(headers: &HeaderMap) -> Result<&[u8], ApiError> {
    let header = headers.get(HEADER);
    let id = header.ok_or_else(|| ApiError::bad_request("X-Dflockd-Session header required"))?;
    Ok(id.as_bytes())
}

impl SessionKey {
    /// 32 lower-case hexadecimal digits.
    fn parse(text: &[u8]) -> Option<Self> {
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Some(byte - b'0'),
            b'a'..=b'f' => Some(byte - b'a' + 10),
            _ => None,
        };
        let mut key = [0; 16];
        if text.len() != 2 * key.len() {
            return None;
        }
        for (byte, pair) in key.iter_mut().zip(text.chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Some(Self(key))
    }

    fn text(self) -> String {
        let mut text = String::with_capacity(32);
        for byte in self.0 {
            write!(text, "{byte:02x}").expect("a string takes everything");
        }
        text
    }
}

impl Session {
    fn touch(&self) {
        let now = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.used_at.store(now, Ordering::SeqCst);
    }

    /// Why a request gets no answer here. Only a session that has ended is gone for ever.
    fn gone(&self) -> ApiError {
        if self.caller.is_elsewhere() {
            ApiError::unavailable().because("the session is used through another member")
        } else {
            ApiError::session_gone()
        }
    }

    fn abandon(&self) {
        // Only those of a cluster are kept; the others end, and are not found when it is asked.
        self.caller.detach(self.pass.get());
        self.permit.lock().take();
    }

    pub(crate) fn revoke(&self) {
        self.caller.revoke();
        self.permit.lock().take();
    }

    /// Waits for the session's turn. From now on it is in use.
    pub(crate) async fn claim(&self) -> Result<Claim<'_>, ApiError> {
        self.in_flight.fetch_add(1, Ordering::SeqCst);
        let busy = Busy(self);
        let turn = tokio::select! {
            biased;
            turn = self.turn.lock() => turn,
            () = self.caller.gone() => return Err(self.gone()),
            () = self.drain.begun() => return Err(ApiError::draining()),
        };
        if self.caller.is_gone() {
            return Err(self.gone());
        }
        Ok(Claim { session: self, _turn: turn, _busy: busy })
    }
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.touch();
        self.0.in_flight.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Claim<'_> {
    /// Executes a command. Ends early if the session or the server does.
    pub(crate) async fn call(&self, command: Command<'_>) -> Result<Answer, ApiError> {
        tokio::select! {
            biased;
            answer = self.session.caller.call(command) => answer.map_err(|_| self.session.gone()),
            () = self.session.drain.begun() => Err(ApiError::draining()),
        }
    }
}

impl Deref for Claim<'_> {
    type Target = Caller;

    fn deref(&self) -> &Caller {
        &self.session.caller
    }
}

impl Deref for Hidden {
    type Target = Caller;

    fn deref(&self) -> &Caller {
        &self.caller
    }
}

/// The session that the request's header names, as an argument of a handler.
pub(crate) struct InSession(pub(crate) Arc<Session>);

impl FromRequestParts<Shared> for InSession {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let peer = Peer::of(parts)?;
        app.session(&parts.headers, peer).await.map(Self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_32_lower_case_digits() {
        let text = "00ff1234567890abcdef00112233445a";
        let key = SessionKey::parse(text.as_bytes()).unwrap();
        assert_eq!(key.text(), text);
        for wrong in ["", "00FF1234567890abcdef00112233445a", &text[1..], &format!("{text}0"), "é"]
        {
            assert!(SessionKey::parse(wrong.as_bytes()).is_none(), "{wrong}");
        }
    }
}
