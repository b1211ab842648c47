//! The service `Cluster`.

use std::sync::Arc;
use std::time::Duration;

use dflockd_engine::Replicated;
use dflockd_engine::replica::admin::AdminRequest;
use dflockd_wire::grpc::cluster_server::Cluster;
use dflockd_wire::grpc::{
    AddRequest, ClusterResponse, HealthRequest, HealthResponse, Member, MemberRole, MembersRequest,
    MembersResponse, PromoteRequest, Reason, RemoveRequest, TransferRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::session_calls::Told;
use super::{Api, App, Peer, fields, open};

/// How often it is looked how the server is.
const LOOK: Duration = Duration::from_millis(100);
/// Reports that may wait for their reader.
const REPORTS_MAX: usize = 4;
/// The longest name of a node.
const NODE_BYTES_MAX: usize = 64;
/// The longest address.
const ADDRESS_BYTES_MAX: usize = 262;

#[tonic::async_trait]
impl Cluster for Api {
    async fn members(
        &self,
        _: Request<MembersRequest>,
    ) -> Result<Response<MembersResponse>, Status> {
        let view = self.0.cluster()?.view();
        let leader = view.status.and_then(|status| status.leader);
        let members = view.members.iter().map(|(id, member)| Member {
            node: member.node.clone(),
            peer_addr: member.peer_addr.clone(),
            client_addr: member.client_addr.clone(),
            role: match () {
                () if member.witness => MemberRole::Witness,
                () if view.voters.contains(id) => MemberRole::Voter,
                () if view.learners.contains(id) => MemberRole::Learner,
                () => MemberRole::Unspecified,
            }
            .into(),
            leader: leader == Some(*id),
            self_: view.raft_id == *id,
            http_addr: view.doors.get(id).map(|doors| doors.http.clone()).unwrap_or_default(),
            grpc_addr: view.doors.get(id).map(|doors| doors.grpc.clone()).unwrap_or_default(),
        });
        Ok(Response::new(MembersResponse { members: members.collect() }))
    }

    async fn add(&self, request: Request<AddRequest>) -> Result<Response<ClusterResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (peer, request) = open(request)?;
        let AddRequest { node, peer_addr, client_addr, witness, reason } = request;
        check_node(&node)?;
        if !is_address(&peer_addr) || !is_address(&client_addr) {
            return Err(Refused::bad_request("an address is host:port").into());
        }
        let change = AdminRequest::Add { node: node.clone(), peer_addr, client_addr, witness };
        self.0.change(peer, change, "added", &node, &reason).await
    }

    async fn promote(
        &self,
        request: Request<PromoteRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (peer, PromoteRequest { node, reason }) = open(request)?;
        check_node(&node)?;
        let change = AdminRequest::Promote { node: node.clone() };
        self.0.change(peer, change, "promoted", &node, &reason).await
    }

    async fn remove(
        &self,
        request: Request<RemoveRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (peer, RemoveRequest { node, reason }) = open(request)?;
        check_node(&node)?;
        let change = AdminRequest::Remove { node: node.clone() };
        self.0.change(peer, change, "removed", &node, &reason).await
    }

    async fn transfer(
        &self,
        request: Request<TransferRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        self.0.check_admin(&request).await?;
        let (peer, TransferRequest { node, reason }) = open(request)?;
        let to = Some(node.clone()).filter(|node| !node.is_empty());
        to.as_deref().map(check_node).transpose()?;
        self.0.change(peer, AdminRequest::Transfer { to }, "made leader", &node, &reason).await
    }

    type HealthStream = Told<HealthResponse>;

    async fn health(
        &self,
        request: Request<HealthRequest>,
    ) -> Result<Response<Self::HealthStream>, Status> {
        let Peer(peer) = Peer::of(&request)?;
        let app = Arc::clone(&self.0);
        let seat = app.sessions.seat(peer)?;
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        tokio::spawn(async move {
            let _seat = seat;
            let mut last = None;
            loop {
                let now = app.health();
                if last.as_ref() != Some(&now) {
                    last = Some(now.clone());
                    if sender.send(Ok(now)).await.is_err() {
                        return;
                    }
                }
                tokio::select! {
                    () = sender.closed() => return,
                    () = tokio::time::sleep(LOOK) => {}
                }
                // Its last word is that it goes.
                if last.as_ref().is_some_and(|last| last.draining) {
                    return;
                }
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(reports))))
    }
}

impl App {
    fn cluster(&self) -> Result<&Arc<Replicated>, Refused> {
        self.service.engine.replicated().ok_or_else(|| {
            let text = "this server is no member of a cluster";
            Refused::new(Code::FailedPrecondition, Reason::NoCluster, text)
        })
    }

    async fn change(
        &self,
        Peer(peer): Peer,
        change: AdminRequest,
        how: &'static str,
        node: &str,
        reason: &str,
    ) -> Result<Response<ClusterResponse>, Status> {
        let reason = fields::reason(reason)?;
        let result = self.cluster()?.admin(change).await;
        let done = result.is_ok();
        tracing::info!(audit = true, %peer, node, how, done, reason, "cluster changed by an operator");
        match result {
            Ok(()) => Ok(Response::new(ClusterResponse {})),
            Err(why) => {
                let refused = Refused::new(Code::FailedPrecondition, Reason::ClusterRefused, why);
                Err(refused.into())
            }
        }
    }

    fn health(&self) -> HealthResponse {
        let (ready, draining) = (self.is_ready(), self.service.is_draining());
        let Some(member) = self.service.engine.replicated() else {
            let role = "memory".to_owned();
            return HealthResponse { ready, draining, role, ..HealthResponse::default() };
        };
        let view = member.view();
        let leader = view.status.and_then(|status| status.leader);
        let leader = leader.and_then(|leader| view.members.get(&leader));
        HealthResponse {
            ready,
            draining,
            role: view.status.map_or("joining", |status| status.role).to_owned(),
            leader: leader.map(|leader| leader.node.clone()).unwrap_or_default(),
            term: view.status.map_or(0, |status| status.term),
        }
    }
}

fn check_node(text: &str) -> Result<(), Refused> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    if (1..=NODE_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed) {
        return Ok(());
    }
    Err(Refused::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"))
}

fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    text.len() <= ADDRESS_BYTES_MAX
        && !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_graphic())
        && port.parse::<u16>().is_ok_and(|port| port > 0)
}
