//! Sessions over gRPC: kept sessions of the engine, used by their secret through any connection.
//!
//! A session's time to live is part of its id, so that every member knows it. Here it decides when a client that is
//! silent is given up; the leases of its locks are the engine's.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use dflockd_core::{Command, Outcome, RequestId, SessionId, Span};
use dflockd_engine::Api;
use dflockd_wire::grpc::Head;
use tonic::Status;

use super::error::Refused;
use super::{App, Peer, fields};
use crate::config::Config;
use crate::frontend::auth::Asker;
use crate::frontend::caller::{Answer, Caller, SessionEnded};
use crate::frontend::caps::{Caps, Total};
use crate::frontend::sessions::{self, Busy, NoSession, SessionKey, SessionStore};
use crate::service::Service;

/// The shortest time to live.
pub(crate) const TTL_MIN: Span = Span::from_secs(1);
/// The longest.
pub(crate) const TTL_MAX: Span = Span::from_secs(3600);
/// How often it is looked for clients that are silent.
const SWEEP: Duration = Duration::from_millis(250);
/// A session that is used here.
pub(crate) type Session = sessions::Session<Details>;

/// What a session has over gRPC.
pub(crate) struct Details {
    pub(crate) ttl: Span,
    /// What its client said about itself.
    metadata: BTreeMap<String, String>,
}

/// Asker makes a call, and how.
pub(crate) struct Client {
    app: Arc<App>,
    asker: Asker,
    place: Place,
    request: Option<RequestId>,
}

/// Whose its holds are.
enum Place {
    Session {
        session: Arc<Session>,
        _busy: Busy,
    },
    /// Whatever it asks for belongs to nobody.
    Common(Arc<Caller>),
}

/// What a command came to.
pub(crate) enum Executed {
    /// Given back if it does not reach the client.
    Answer(Answer),
    /// The client comes back for it if it does not arrive.
    Kept(Outcome),
}

/// A store without sessions.
pub(super) fn store(config: &Config, service: &Arc<Service>) -> SessionStore<Details> {
    let max = Total::Max(config.http_max_sessions);
    let caps = Caps::new(max, config.http_max_sessions_per_ip, |_| ());
    SessionStore::new(service, Api::Grpc, true, caps)
}

impl From<NoSession> for Refused {
    fn from(why: NoSession) -> Self {
        match why {
            NoSession::Full(_) => Self::max_sessions(),
            NoSession::Gone => Self::session_gone(),
            NoSession::Unavailable | NoSession::NotKept => Self::unavailable(),
        }
    }
}

impl From<NoSession> for Status {
    fn from(why: NoSession) -> Self {
        Refused::from(why).into()
    }
}

impl App {
    /// What the clients of sessions that are used here said about themselves.
    pub(crate) fn metadata(&self) -> HashMap<SessionId, BTreeMap<String, String>> {
        let all = self.sessions.all().into_iter();
        let told = all.filter(|session| !session.details.metadata.is_empty());
        told.map(|session| (session.caller.id(), session.details.metadata.clone())).collect()
    }

    /// Gives up silent clients, for ever.
    pub(crate) async fn sweep(self: Arc<Self>) {
        self.sessions.sweep_every(SWEEP, self.rate_limit.as_ref()).await;
    }

    /// A new session.
    pub(crate) async fn open_session(
        &self,
        peer: Peer,
        name: Option<&str>,
        ttl: Span,
        metadata: BTreeMap<String, String>,
    ) -> Result<(SessionKey, Arc<Session>), Refused> {
        let silence_max = Some(Duration::from_nanos(ttl.0));
        let opened = self
            .sessions
            .open(peer, name, None, silence_max, |caller| Details::of(caller, ttl, metadata));
        let (secret, session) = opened.await?;
        Ok((SessionKey { secret, ttl_ms: u32::try_from(session.ttl_ms()).ok() }, session))
    }

    /// The session with this id, here or fetched from elsewhere. One that comes from elsewhere counts for `peer`.
    pub(crate) async fn session(
        &self,
        text: &str,
        peer: Peer,
    ) -> Result<(SessionKey, Arc<Session>), Refused> {
        let key = SessionKey::parse(text.as_bytes())
            .ok_or_else(|| Refused::bad_request("malformed session id"))?;
        // One without a time to live began through another API.
        let ttl = key.ttl_ms.map(|ms| Span::from_millis(ms.into()).clamp(TTL_MIN, TTL_MAX));
        let ttl = ttl.unwrap_or(self.default_ttl);
        let silence_max = Some(Duration::from_nanos(ttl.0));
        let session = self
            .sessions
            .get(key.secret, peer, silence_max, |caller| Details::of(caller, ttl, BTreeMap::new()));
        Ok((key, session.await?))
    }

    /// The session of calls that have none.
    pub(crate) fn common(&self) -> Arc<Caller> {
        self.common.get()
    }

    /// Asker makes a call that can do without a session.
    pub(crate) async fn client(
        self: &Arc<Self>,
        peer: Peer,
        head: Head<'_>,
    ) -> Result<Client, Refused> {
        if !head.session.is_empty() {
            return self.member(peer, head).await;
        }
        if head != Head::default() {
            return Err(Refused::bad_request("a request id needs a session"));
        }
        let asker = Asker::new(&self.service, Api::Grpc, peer);
        Ok(Client {
            app: Arc::clone(self),
            asker,
            place: Place::Common(self.common()),
            request: None,
        })
    }

    /// Asker makes a call that needs a session.
    pub(crate) async fn member(
        self: &Arc<Self>,
        peer: Peer,
        head: Head<'_>,
    ) -> Result<Client, Refused> {
        let request = fields::request(head.request_id)?;
        let ack_through = fields::request(head.ack_through)?;
        let (_, session) = self.session(head.session, peer).await?;
        let busy = session.begin();
        if let Some(up_to) = ack_through {
            session.caller.acknowledge(up_to).await?;
        }
        Ok(Client {
            app: Arc::clone(self),
            asker: Asker::new(&self.service, Api::Grpc, peer),
            place: Place::Session { session, _busy: busy },
            request,
        })
    }
}

impl Details {
    fn of(caller: &Caller, ttl: Span, metadata: BTreeMap<String, String>) -> Self {
        // Streams are told of everything else.
        caller.hear_only_losses();
        Self { ttl, metadata }
    }
}

impl Session {
    pub(crate) fn ttl_ms(&self) -> u64 {
        self.details.ttl.0 / 1_000_000
    }
}

impl Client {
    /// Asks for the lease of the session where the command names none.
    pub(crate) fn set_lease(&self, command: &mut Command<'_>) -> Result<(), Refused> {
        if command.lease() == Some(None) {
            let Place::Session { session, .. } = &self.place else {
                return Err(Refused::bad_request("a lease or a session is required"));
            };
            command.set_default_lease(session.details.ttl);
        }
        Ok(())
    }

    /// Executes a command. Ends early if the server does.
    pub(crate) async fn execute(&self, command: Command<'_>) -> Result<Executed, Refused> {
        let command = self.asker.command(command)?;
        let caller = match &self.place {
            Place::Session { session, .. } => &session.caller,
            Place::Common(caller) => caller,
        };
        let executed = async {
            Ok(match self.request {
                Some(request) => Executed::Kept(caller.call_once(request, command).await?),
                None => Executed::Answer(caller.call(command).await?),
            })
        };
        tokio::select! {
            biased;
            told = executed => told.map_err(|gone: SessionEnded| match &self.place {
                Place::Session { .. } => Refused::from(gone),
                // That the common session is gone says nothing about the client.
                Place::Common(_) => Refused::unknown(),
            }),
            // What can be repeated stays, and may come to something yet.
            () = self.app.drained() => Err(match self.request {
                Some(_) => Refused::draining().perhaps(),
                None => Refused::draining(),
            }),
        }
    }
}

impl Executed {
    pub(crate) fn outcome(&self) -> &Outcome {
        match self {
            Self::Answer(answer) => answer.outcome(),
            Self::Kept(outcome) => outcome,
        }
    }
}
