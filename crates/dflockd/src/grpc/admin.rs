//! The service `Admin`: what an operator does. All of it is audited.

use std::sync::Arc;

use axum::http::HeaderMap;
use dflockd_core::{Command, Fence, Outcome, Refusal, SessionId};
use dflockd_engine::Door;
use dflockd_wire::grpc::admin_server::Admin;
use dflockd_wire::grpc::{
    EndSessionRequest, EndSessionResponse, ForceReleaseRequest, ForceReleaseResponse,
    ListSessionsRequest, ListSessionsResponse, Reason, SessionView,
};
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::gate::WRONG_TOKEN_PAUSE;
use super::locks::done;
use super::{Api, App, Peer, blocking, fields, open};

#[tonic::async_trait]
impl Admin for Api {
    async fn force_release(
        &self,
        request: Request<ForceReleaseRequest>,
    ) -> Result<Response<ForceReleaseResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (Peer(peer), request) = open(request)?;
        let (key, space) = (fields::key(&request.key)?, fields::space(request.mode)?);
        let (fence, reason) = (request.fence, fields::reason(&request.reason)?);
        let command = Command::ForceRelease { key, space, fence: Fence(fence) };
        let answer = self.0.common().call(command).await.map_err(|_| Refused::unknown())?;
        let known = *answer.outcome() == Outcome::Done;
        let key = key.escape_ascii();
        tracing::info!(audit = true, %peer, %key, fence, known, reason, "hold ended by an operator");
        done(answer.outcome())?;
        Ok(Response::new(ForceReleaseResponse {}))
    }

    async fn list_sessions(
        &self,
        request: Request<ListSessionsRequest>,
    ) -> Result<Response<ListSessionsResponse>, Status> {
        self.0.check_admin(&request).await?;
        let ListSessionsRequest { after, limit } = request.into_inner();
        let limit = fields::page(limit)?;
        let app = Arc::clone(&self.0);
        let listed = blocking(move || {
            let infos = app.service.engine.sessions(SessionId(after), limit)?;
            let mut metadata = app.sessions.metadata();
            let is_last = infos.len() < limit;
            let next = infos.last().filter(|_| !is_last).map_or(0, |last| last.id.0);
            let sessions = infos.into_iter().map(|info| SessionView {
                number: info.id.0,
                client: info.label.map(|label| label.as_ref().to_owned()).unwrap_or_default(),
                door: info.door.map_or("", door_name).to_owned(),
                holds: info.view.holds as u64,
                waits: info.view.waits as u64,
                subscriptions: info.view.subscriptions as u64,
                metadata: metadata.remove(&info.id).unwrap_or_default(),
            });
            Some(ListSessionsResponse { sessions: sessions.collect(), next })
        });
        Ok(Response::new(listed.await?))
    }

    async fn end_session(
        &self,
        request: Request<EndSessionRequest>,
    ) -> Result<Response<EndSessionResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (Peer(peer), EndSessionRequest { number, reason }) = open(request)?;
        let reason = fields::reason(&reason)?;
        let outcome = self.0.common().kick(SessionId(number)).await;
        let outcome = outcome.map_err(|_| Refused::unknown())?;
        let known = outcome == Outcome::Done;
        let session = number;
        tracing::info!(audit = true, %peer, session, known, reason, "session ended by an operator");
        if outcome == Outcome::Refused(Refusal::NotHeld) {
            return Err(Refused::not_found("there is no such session").into());
        }
        done(&outcome)?;
        Ok(Response::new(EndSessionResponse {}))
    }
}

impl App {
    /// Whether a call carries the admin token.
    pub(super) async fn check_admin<T>(&self, request: &Request<T>) -> Result<(), Refused> {
        let Some(token) = self.service.admin.load_full() else {
            let text = "no admin token is configured";
            return Err(Refused::new(Code::FailedPrecondition, Reason::AdminDisabled, text));
        };
        let headers: &HeaderMap = request.metadata().as_ref();
        let presented = headers.get("x-dflockd-admin");
        if presented.is_some_and(|presented| token.matches(presented.as_bytes())) {
            return Ok(());
        }
        let peer = request.extensions().get::<Peer>().map(|peer| peer.0.to_string());
        tracing::warn!(peer, "admin authentication failed");
        tokio::time::sleep(WRONG_TOKEN_PAUSE).await;
        let text = "a valid admin token is required";
        Err(Refused::new(Code::PermissionDenied, Reason::NotAdmin, text))
    }
}

fn door_name(door: Door) -> &'static str {
    match door {
        Door::Line => "line",
        Door::Http => "http",
        Door::Grpc => "grpc",
    }
}
