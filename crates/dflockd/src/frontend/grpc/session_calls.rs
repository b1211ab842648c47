//! The service `Sessions`.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::sync::Arc;

use dflockd_core::{Outcome, Push, Refusal, command};
use dflockd_wire::grpc::sessions_server::Sessions as Service;
use dflockd_wire::grpc::{
    AttachRequest, AttachResponse, CancelRequest, CancelResponse, CloseRequest, CloseResponse,
    KeepAliveRequest, KeepAliveResponse, LostLock, LostReason as Lost, OpenRequest, OpenResponse,
};
use tokio::sync::mpsc;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};

use super::error::Refused;
use super::sessions::{Session, TTL_MAX, TTL_MIN};
use super::{App, Peer, Services, fields, open};
use crate::frontend::auth::Allowed;

/// Entries of what a client says about itself.
const METADATA_MAX: usize = 16;
const METADATA_NAME_BYTES_MAX: usize = 64;
const METADATA_VALUE_BYTES_MAX: usize = 256;
/// Answers to keep-alives that may wait for their reader.
const ANSWERS_MAX: usize = 16;

/// What a stream tells its client.
pub(super) type ResponseStream<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Service for Services {
    async fn open(&self, request: Request<OpenRequest>) -> Result<Response<OpenResponse>, Status> {
        let (peer, request) = open(request)?;
        let Self(app) = self;
        let ttl = match fields::lasting(request.ttl_ms)? {
            None => app.default_ttl,
            Some(ttl) if (TTL_MIN..=TTL_MAX).contains(&ttl) => ttl,
            Some(_) => {
                let text = "a time to live is 1000 to 3600000 milliseconds";
                return Err(Refused::bad_request(text).into());
            }
        };
        let name = fields::client_name(&request.client_name)?;
        check_metadata(&request.metadata)?;
        let opened = app.open_session(peer, name, ttl, request.metadata.clone());
        let (key, session) = opened.await?;
        Ok(Response::new(OpenResponse {
            session: key.text(),
            number: session.caller.id().0,
            ttl_ms: session.ttl_ms(),
        }))
    }

    async fn keep_alive(
        &self,
        request: Request<KeepAliveRequest>,
    ) -> Result<Response<KeepAliveResponse>, Status> {
        let (peer, request) = open(request)?;
        let (_, session) = self.0.session(&request.session, peer).await?;
        let mut response = renew(&session, request.ack_through).await?;
        response.lost = lost(session.caller.take_pushes());
        Ok(Response::new(response))
    }

    type KeepAliveStreamStream = ResponseStream<KeepAliveResponse>;

    async fn keep_alive_stream(
        &self,
        request: Request<Streaming<KeepAliveRequest>>,
    ) -> Result<Response<Self::KeepAliveStreamStream>, Status> {
        let peer = Peer::of(&request)?;
        let mut requests = request.into_inner();
        let first = requests.message().await?;
        let first = first.ok_or_else(|| Refused::bad_request("a session is required"))?;
        let (_, session) = self.0.session(&first.session, peer).await?;
        let (sender, answers) = mpsc::channel(ANSWERS_MAX);
        let app = Arc::clone(&self.0);
        tokio::spawn(async move {
            let ended = tokio::select! {
                ended = stay(&session, first, requests, &sender) => ended,
                () = sender.closed() => return,
                () = app.drained() => Err(Refused::draining().into()),
            };
            if let Err(status) = ended {
                let _ = sender.send(Err(status)).await;
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(answers))))
    }

    async fn close(
        &self,
        request: Request<CloseRequest>,
    ) -> Result<Response<CloseResponse>, Status> {
        let (peer, request) = open(request)?;
        self.0.close_session(&request.session, peer).await?;
        Ok(Response::new(CloseResponse {}))
    }

    async fn attach(
        &self,
        request: Request<AttachRequest>,
    ) -> Result<Response<AttachResponse>, Status> {
        let (peer, request) = open(request)?;
        let name = fields::client_name(&request.client_name)?;
        let (_, session) = self.0.session(&request.session, peer).await?;
        if let Some(name) = name {
            session.caller.set_label(name.into());
        }
        let id = session.caller.id();
        let mut last_request_id = None;
        if request.tell_last_request_id {
            // The session may be here already, and may have been used since through another member.
            let engine = Arc::clone(&self.0.service.engine);
            let last = self.0.service.looks.wait(move || engine.last_request(id)).await.flatten();
            last_request_id = Some(last.ok_or_else(Refused::unavailable)?.0);
        }
        let ttl_ms = session.ttl_ms();
        Ok(Response::new(AttachResponse { number: id.0, ttl_ms, last_request_id }))
    }

    async fn cancel(
        &self,
        request: Request<CancelRequest>,
    ) -> Result<Response<CancelResponse>, Status> {
        let (peer, request) = open(request)?;
        let number = fields::request(request.request_id)?;
        let number = number.ok_or_else(|| Refused::bad_request("a request id is required"))?;
        let (_, session) = self.0.session(&request.session, peer).await?;
        let waited = session.caller.cancel(number);
        Ok(Response::new(CancelResponse { waited }))
    }
}

impl App {
    /// Ends a session for its client, which is no disconnect: whatever the policy says about those, its holds are
    /// released. Done when all members know.
    async fn close_session(&self, id: &str, peer: Peer) -> Result<(), Refused> {
        let (key, session) = self.session(id, peer).await?;
        // If the common session is gone, that says nothing about this one.
        let kicked = self.common().kick(session.caller.id()).await;
        let outcome = kicked.map_err(|_| Refused::unknown())?;
        if outcome == Outcome::Refused(Refusal::NotHeld) {
            self.sessions.remove(key.secret, &session);
            return Err(Refused::session_gone());
        }
        if let Outcome::Refused(refusal) = outcome {
            return Err(Refused::by_core(refusal));
        }
        self.sessions.close(key.secret, &session);
        Ok(())
    }
}

/// Answers keep-alives and tells of lost locks until the client has no more to say, or the session is gone.
async fn stay(
    session: &Session,
    first: KeepAliveRequest,
    mut requests: Streaming<KeepAliveRequest>,
    answers: &mpsc::Sender<Result<KeepAliveResponse, Status>>,
) -> Result<(), Status> {
    let id = first.session.clone();
    let mut request = Some(first);
    loop {
        if let Some(request) = request.take() {
            if !request.session.is_empty() && request.session != id {
                let text = "a stream keeps one session alive";
                return Err(Refused::bad_request(text).into());
            }
            let response = renew(session, request.ack_through).await?;
            if answers.send(Ok(response)).await.is_err() {
                return Ok(());
            }
        }
        tokio::select! {
            next = requests.message() => match next? {
                Some(next) => request = Some(next),
                None => return Ok(()),
            },
            push = session.caller.pushed() => {
                let push = push.ok_or_else(Refused::session_gone)?;
                let all = [push].into_iter().chain(session.caller.take_pushes());
                let lost = lost(all.collect());
                if !lost.is_empty() {
                    let response = KeepAliveResponse { lost, ..KeepAliveResponse::default() };
                    if answers.send(Ok(response)).await.is_err() {
                        return Ok(());
                    }
                }
            }
        }
    }
}

/// The client lives, and the locks that follow its session go on.
async fn renew(session: &Session, ack_through: u64) -> Result<KeepAliveResponse, Refused> {
    session.touch();
    if let Some(up_to) = fields::request(ack_through)? {
        session.caller.acknowledge(up_to).await?;
    }
    let renew = command::RenewSession { lease: session.details.ttl };
    // Whoever has a session may keep what is its own.
    let renewed = session.caller.call(Allowed::by_server(renew.into())).await?;
    session.touch();
    let Outcome::Number(renewed) = renewed.outcome() else {
        return Err(Refused::by(renewed.outcome()));
    };
    let (valid_for_ms, renewed) = (session.ttl_ms(), renewed.unsigned_abs());
    Ok(KeepAliveResponse { valid_for_ms, renewed, lost: Vec::new() })
}

fn lost(pushes: Vec<Push>) -> Vec<LostLock> {
    let lost = pushes.into_iter().filter_map(|push| match push {
        Push::Lost { key, fence, reason } => {
            let reason = Lost::from(reason);
            Some(LostLock { key: key.to_vec().into(), fence: fence.0, reason: reason.into() })
        }
        // A leader is told of its successor; observers are who should know.
        Push::Signal { .. } | Push::Change(_) | Push::Leader { .. } => None,
    });
    lost.collect()
}

fn check_metadata(metadata: &BTreeMap<String, String>) -> Result<(), Refused> {
    let fits = |(name, value): (&String, &String)| {
        (1..=METADATA_NAME_BYTES_MAX).contains(&name.len())
            && value.len() <= METADATA_VALUE_BYTES_MAX
    };
    if metadata.len() <= METADATA_MAX && metadata.iter().all(fits) {
        return Ok(());
    }
    let text = "at most 16 metadata with names of 1 to 64 bytes and values of at most 256";
    Err(Refused::bad_request(text))
}
