//! Sessions over HTTP: what a connection is in the line protocol.
//!
//! A session owns its holds and queue places. Its operations take turns; a ping and its end do not wait for them. In
//! replicated mode its id is the secret of a kept session, which works through any member.

use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use dflockd_core::{Command, Outcome, Refusal};
use dflockd_engine::Api;
use tokio::sync::MutexGuard;

use super::error::ApiError;
use super::{App, Peer, Room, Shared};
use crate::config::Config;
use crate::frontend::auth::Asker;
use crate::frontend::caller::{Answer, Caller};
use crate::frontend::caps::{Caps, Full, Permit, Total};
use crate::frontend::sessions::{self, Busy, NoSession, SessionKey, SessionStore};
use crate::service::Service;

/// The header that names the session.
const HEADER: &str = "x-dflockd-session";
/// Longest pause between two looks for sessions that nobody uses.
const SWEEP_MAX: Duration = Duration::from_secs(30);

/// A session, whose operations take turns.
pub(crate) type Session = sessions::Session<Turn>;

/// Held by the operation whose turn it is.
pub(crate) type Turn = tokio::sync::Mutex<()>;

/// The hidden session of an event stream. It counts like any other and ends when dropped.
pub(crate) struct Hidden {
    caller: Caller,
    _permit: Permit,
}

/// A session, and whoever asks in it.
pub(crate) struct OwnSession {
    session: Arc<Session>,
    asker: Asker,
}

/// A session whose turn it is.
pub(crate) struct Claim<'a> {
    session: &'a Session,
    asker: &'a Asker,
    _turn: MutexGuard<'a, ()>,
    _busy: Busy,
}

/// A store without sessions.
pub(super) fn store(config: &Config, service: &Arc<Service>) -> SessionStore<Turn> {
    let keeps = service.engine.is_replicated();
    let max = match (config.http_max_sessions, config.max_sessions) {
        // In a cluster all members count them together, with those of other APIs.
        (max, _) if keeps => max,
        (0, max) | (max, 0) => max,
        (http, all) => http.min(all),
    };
    let counted = Arc::clone(service);
    let gauge = move |count| counted.metrics.set_http_sessions(count);
    let caps = Caps::new(Total::Max(max), config.http_max_sessions_per_ip, gauge);
    SessionStore::new(service, Api::Http, keeps, caps)
}

impl From<NoSession> for ApiError {
    fn from(why: NoSession) -> Self {
        match why {
            NoSession::Full(Full::Total) => Self::max_sessions(),
            NoSession::Full(Full::Address) => Self::max_sessions_per_ip(),
            NoSession::Gone => Self::session_gone(),
            NoSession::Unavailable => Self::unavailable(),
            NoSession::NotKept => Self::session_create_failed(),
        }
    }
}

impl App {
    /// Ends sessions and forgets addresses that are not used any more, for ever.
    pub(crate) async fn sweep(self: Arc<Self>) {
        let interval = if self.idle.is_zero() { SWEEP_MAX } else { self.idle.min(SWEEP_MAX) };
        self.sessions.sweep_every(interval, self.rate_limit.as_ref()).await;
    }

    /// For how long a client may be silent.
    fn silence_max(&self) -> Option<Duration> {
        (!self.idle.is_zero()).then(|| self.idle * 2)
    }

    /// A new session, and its id.
    pub(crate) async fn open_session(
        &self,
        peer: Peer,
        label: Option<&str>,
        reference: Option<&str>,
    ) -> Result<String, ApiError> {
        let silence_max = self.silence_max();
        let opened = self.sessions.open(peer, label, reference, silence_max, |_| Turn::default());
        let (secret, _) = opened.await?;
        Ok(SessionKey { secret, ttl_ms: None }.text())
    }

    /// The session that a request names in its header.
    pub(crate) async fn session(
        &self,
        headers: &HeaderMap,
        peer: Peer,
    ) -> Result<OwnSession, ApiError> {
        let id = session_id(headers)?;
        let (_, session) = self.session_by_id(id, peer).await?;
        Ok(OwnSession { session, asker: Asker::new(&self.service, Api::Http, peer) })
    }

    /// The session with this id; one that comes from another member counts for `peer`.
    async fn session_by_id(
        &self,
        text: &[u8],
        peer: Peer,
    ) -> Result<(SessionKey, Arc<Session>), ApiError> {
        let key = SessionKey::parse(text).filter(|key| key.ttl_ms.is_none());
        let key = key.ok_or_else(|| ApiError::bad_request("invalid session id"))?;
        let silence_max = self.silence_max();
        let session = self.sessions.get(key.secret, peer, silence_max, |_| Turn::default());
        Ok((key, session.await?))
    }

    /// Ends a session for its client: what waits for it is told so, and what it holds is released before this returns,
    /// unless the policy says otherwise.
    pub(crate) async fn close_session(&self, id: &[u8], peer: Peer) -> Result<(), ApiError> {
        let (key, session) = self.session_by_id(id, peer).await?;
        if self.service.engine.is_replicated() {
            self.end_kept(&session).await.inspect_err(|error| {
                if error.status == StatusCode::GONE {
                    self.sessions.remove(key.secret, &session);
                }
            })?;
        }
        self.sessions.close(key.secret, &session);
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
        let caller = Caller::open_with(&self.service, Api::Http, label.into(), pushes);
        Ok(Hidden { caller, _permit: permit })
    }
}

/// The id that a request names in its header.
pub(crate) fn session_id(headers: &HeaderMap) -> Result<&[u8], ApiError> {
    let header = headers.get(HEADER);
    let id = header.ok_or_else(|| ApiError::bad_request("X-Dflockd-Session header required"))?;
    Ok(id.as_bytes())
}

impl Session {
    /// Why a request gets no answer here. Only a session that has ended is gone for ever.
    fn gone(&self) -> ApiError {
        if self.caller.is_elsewhere() {
            ApiError::unavailable().because("the session is used through another member")
        } else {
            ApiError::session_gone()
        }
    }
}

impl OwnSession {
    /// Waits for the session's turn. From now on it is in use.
    pub(crate) async fn claim(&self) -> Result<Claim<'_>, ApiError> {
        let Self { session, asker } = self;
        let busy = session.begin();
        let turn = tokio::select! {
            biased;
            turn = session.details.lock() => turn,
            () = session.caller.gone() => return Err(session.gone()),
            () = session.caller.drained() => return Err(ApiError::draining()),
        };
        if session.caller.is_gone() {
            return Err(session.gone());
        }
        Ok(Claim { session, asker, _turn: turn, _busy: busy })
    }
}

impl Claim<'_> {
    /// Executes a command. Ends early if the session or the server does.
    pub(crate) async fn call(&self, command: Command<'_>) -> Result<Answer, ApiError> {
        let command = self.asker.command(command)?;
        tokio::select! {
            biased;
            answer = self.session.caller.call(command) => answer.map_err(|_| self.session.gone()),
            () = self.session.caller.drained() => Err(ApiError::draining()),
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
pub(crate) struct InSession(pub(crate) OwnSession);

impl FromRequestParts<Shared> for InSession {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let peer = Peer::from_request_parts(parts, app).await?;
        app.session(&parts.headers, peer).await.map(Self)
    }
}
