//! The service `Admin`: what an operator does. All of it is audited.

use std::sync::Arc;

use dflockd_core::{Outcome, Refusal, SessionId};
use dflockd_engine::Api;
use dflockd_wire::grpc::admin_server::Admin;
use dflockd_wire::grpc::{
    AuditRecord, AuditRequest, EndSessionRequest, EndSessionResponse, ForceReleaseRequest,
    ForceReleaseResponse, ListSessionsRequest, ListSessionsResponse, Reason, SessionView,
};
use prost::Message;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::gate::TOO_MANY;
use super::session_calls::ResponseStream;
use super::{App, Peer, Services, budget, done, fields, fitting, open};
use crate::audit::{AuditEvent, By, Record};
use crate::frontend::auth::{Denied, Origin, Pass, TokenKind};
use crate::operate;

/// Records that may wait for their reader; what comes behind them is kept elsewhere.
const RECORDS_MAX: usize = 64;

#[tonic::async_trait]
impl Admin for Services {
    async fn force_release(
        &self,
        request: Request<ForceReleaseRequest>,
    ) -> Result<Response<ForceReleaseResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let request = request.into_inner();
        let (key, space) = (fields::key(&request.key)?, fields::space(request.mode)?);
        let hold = (key.to_vec(), space, request.fence);
        let reason = fields::reason(&request.reason)?.to_owned();
        let ended =
            operate::end_hold(self.0.service.clone(), self.0.common(), by, hold, reason).await;
        done(&ended.map_err(|_| Refused::unknown())?)?;
        Ok(Response::new(ForceReleaseResponse {}))
    }

    async fn list_sessions(
        &self,
        request: Request<ListSessionsRequest>,
    ) -> Result<Response<ListSessionsResponse>, Status> {
        self.0.check_admin(&request).await?;
        let budget = budget(&request)?;
        let ListSessionsRequest { after, limit } = request.into_inner();
        let limit = fields::page(limit)?;
        let app = Arc::clone(&self.0);
        let listed = move || {
            let infos = app.service.engine.sessions(SessionId(after), limit)?;
            let mut metadata = app.metadata();
            let is_last = infos.len() < limit;
            let mut next = infos.last().filter(|_| !is_last).map_or(0, |last| last.id.0);
            let sessions = infos.into_iter().map(|info| SessionView {
                number: info.id.0,
                client: info.label.map(|label| label.as_ref().to_owned()).unwrap_or_default(),
                api: info.api.map_or("", Api::name).to_owned(),
                holds: info.view.holds as u64,
                waits: info.view.waits as u64,
                subscriptions: info.view.subscriptions as u64,
                metadata: metadata.remove(&info.id).unwrap_or_default(),
            });
            let mut sessions: Vec<_> = sessions.collect();
            let count = fitting(sessions.iter().map(Message::encoded_len));
            if count < sessions.len() {
                sessions.truncate(count);
                next = sessions.last().map_or(0, |last| last.number);
            }
            Some(ListSessionsResponse { sessions, next })
        };
        Ok(self.0.show(&budget, listed).await?)
    }

    async fn end_session(
        &self,
        request: Request<EndSessionRequest>,
    ) -> Result<Response<EndSessionResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let EndSessionRequest { number, reason } = request.into_inner();
        let reason = fields::reason(&reason)?.to_owned();
        let ended =
            operate::end_session(self.0.service.clone(), self.0.common(), by, number, reason).await;
        let outcome = ended.map_err(|_| Refused::unknown())?;
        if outcome == Outcome::Refused(Refusal::NotHeld) {
            return Err(Refused::not_found("there is no such session").into());
        }
        done(&outcome)?;
        Ok(Response::new(EndSessionResponse {}))
    }

    type AuditStream = ResponseStream<AuditRecord>;

    async fn audit(
        &self,
        request: Request<AuditRequest>,
    ) -> Result<Response<Self::AuditStream>, Status> {
        let (_, pass) = self.0.check_admin(&request).await?;
        let (Peer(peer, _), request) = open(request)?;
        let app = Arc::clone(&self.0);
        let permit = app.sessions.permit(peer)?;
        let (sender, records) = mpsc::channel(RECORDS_MAX);
        tokio::spawn(async move {
            let _permit = permit;
            let ended = tokio::select! {
                () = stream_audit(&app, request, &sender) => return,
                () = sender.closed() => return,
                () = app.drained() => Refused::draining(),
                () = app.service.auth.revoked(TokenKind::Admin, pass) => {
                    app.service.metrics.revoked(Api::Grpc);
                    Refused::admin_revoked()
                }
            };
            let _ = sender.send(Err(ended.into())).await;
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(records))))
    }
}

/// Tells what was done until that is enough, or nobody listens.
async fn stream_audit(
    app: &App,
    request: AuditRequest,
    records: &mpsc::Sender<Result<AuditRecord, Status>>,
) {
    let AuditRequest { mut after, limit, follow } = request;
    let mut left = if limit == 0 { usize::MAX } else { limit as usize };
    let audit = &app.service.audit;
    if after > audit.newest() {
        // It was counted by an earlier process.
        after = 0;
    }
    loop {
        let found = audit.after(after, left);
        for record in &found {
            if records.send(Ok(told(record))).await.is_err() {
                return;
            }
            after = record.number;
            left -= 1;
        }
        if left == 0 || !follow {
            return;
        }
        audit.beyond(after).await;
    }
}

fn told(record: &Record) -> AuditRecord {
    let mut told = AuditRecord {
        number: record.number,
        unix_ms: record.unix_ms,
        api: record.via.name().to_owned(),
        peer: record.peer.as_ref().to_owned(),
        identity: record.identity.as_ref().to_owned(),
        what: record.event.name().to_owned(),
        reason: record.reason.clone(),
        done: record.done,
        ..AuditRecord::default()
    };
    match &record.event {
        AuditEvent::EndHold { key, fence } => {
            told.key = key.clone().into();
            told.fence = *fence;
        }
        AuditEvent::EndSession { session } => told.session = *session,
        AuditEvent::Change { node, .. } => told.node = node.clone().unwrap_or_default(),
        AuditEvent::Backup => {}
    }
    told
}

impl App {
    /// Whether a call comes from an operator: who that is, and with which token.
    pub(super) async fn check_admin<T>(&self, request: &Request<T>) -> Result<(By, Pass), Refused> {
        let origin = request.extensions().get::<Origin>().ok_or_else(Refused::internal)?;
        let headers = request.metadata().as_ref();
        let admitted = self.service.admit_admin(Api::Grpc, origin, headers).await;
        let by = |pass| By::address(Api::Grpc, origin.address, self.service.auth.who(pass).name());
        admitted.map(|pass| (by(pass), pass)).map_err(|denied| match denied {
            Denied::Wrong => {
                let text = "a valid admin token is required";
                Refused::new(Code::PermissionDenied, Reason::NotAdmin, text)
            }
            Denied::TooMany => Refused::rate_limited(TOO_MANY),
            Denied::Disabled => {
                let text = "no admin token is configured";
                Refused::new(Code::FailedPrecondition, Reason::AdminDisabled, text)
            }
            Denied::Unaudited => Refused::unavailable(),
        })
    }
}
