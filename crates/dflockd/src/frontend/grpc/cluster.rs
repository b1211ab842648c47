//! The service `Cluster`.

use std::sync::Arc;
use std::time::Duration;

use dflockd_engine::View;
use dflockd_replica::admin::AdminRequest;
use dflockd_replica::policy::{PolicySetting, PolicyValue};
use dflockd_replica::types::{AutoRelease as Release, Policy as CorePolicy};
use dflockd_replica::{Role, policy_settings};
use dflockd_wire::grpc::cluster_server::Cluster;
use dflockd_wire::grpc::{
    AddRequest, AddressRequest, AutoRelease, ClusterResponse, DrainRequest, FinalizeRequest,
    HealthRequest, HealthResponse, Member, MemberRole, MembersRequest, MembersResponse, Policy,
    PolicyRequest, PolicyResponse, PromoteRequest, Reason, RemoveRequest, SetPolicyRequest,
    SnapshotRequest, SnapshotResponse, TransferRequest,
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status};

use super::error::Refused;
use super::session_calls::ResponseStream;
use super::{App, Peer, Services, fields};
use crate::audit::{By, run_detached};
use crate::operate::{self, AdminAction, Done, Settings};

/// How often it is looked how the server is.
const LOOK: Duration = Duration::from_millis(100);
/// Reports that may wait for their reader.
const REPORTS_MAX: usize = 4;

#[tonic::async_trait]
impl Cluster for Services {
    async fn members(
        &self,
        _: Request<MembersRequest>,
    ) -> Result<Response<MembersResponse>, Status> {
        let view = self.0.cluster()?;
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
            http_addr: view
                .addresses
                .get(id)
                .map(|addresses| addresses.http.clone())
                .unwrap_or_default(),
            grpc_addr: view
                .addresses
                .get(id)
                .map(|addresses| addresses.grpc.clone())
                .unwrap_or_default(),
        });
        Ok(Response::new(MembersResponse { members: members.collect() }))
    }

    async fn add(&self, request: Request<AddRequest>) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let request = request.into_inner();
        let AddRequest { node, peer_addr, client_addr, witness, reason } = request;
        check_node(&node)?;
        check_address(&peer_addr)?;
        check_address(&client_addr)?;
        let action = AdminRequest::Add { node, peer_addr, client_addr, witness };
        self.0.change(by, AdminAction::Ask(action), &reason).await
    }

    async fn promote(
        &self,
        request: Request<PromoteRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let PromoteRequest { node, reason, force } = request.into_inner();
        check_node(&node)?;
        let action = AdminAction::Ask(AdminRequest::promote(node, force));
        self.0.change(by, action, &reason).await
    }

    async fn remove(
        &self,
        request: Request<RemoveRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let RemoveRequest { node, reason, force } = request.into_inner();
        check_node(&node)?;
        let action = AdminAction::Ask(AdminRequest::remove(node, force));
        self.0.change(by, action, &reason).await
    }

    async fn transfer(
        &self,
        request: Request<TransferRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let TransferRequest { node, reason } = request.into_inner();
        let to = Some(node).filter(|node| !node.is_empty());
        to.as_deref().map(check_node).transpose()?;
        self.0.change(by, AdminAction::Ask(AdminRequest::Transfer { to }), &reason).await
    }

    async fn snapshot(
        &self,
        request: Request<SnapshotRequest>,
    ) -> Result<Response<SnapshotResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let SnapshotRequest { reason } = request.into_inner();
        let reason = if reason.is_empty() { "" } else { fields::reason(&reason)? };
        let index =
            match self.0.perform(by, AdminAction::Ask(AdminRequest::Snapshot), reason).await? {
                Done::Snapshot { index } => index,
                Done::Changed => return Err(Refused::internal().into()),
            };
        Ok(Response::new(SnapshotResponse { index }))
    }

    async fn policy(
        &self,
        request: Request<PolicyRequest>,
    ) -> Result<Response<PolicyResponse>, Status> {
        self.0.check_admin(&request).await?;
        self.0.cluster()?;
        let policy = operate::policy(&self.0.service).map_err(by_cluster)?;
        Ok(Response::new(PolicyResponse { policy: Some(policy_to_message(&policy)) }))
    }

    async fn set_policy(
        &self,
        request: Request<SetPolicyRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let SetPolicyRequest { set, reason } = request.into_inner();
        let settings = settings(&set.unwrap_or_default())?;
        self.0.change(by, AdminAction::SetPolicy(settings), &reason).await
    }

    async fn address(
        &self,
        request: Request<AddressRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let AddressRequest { node, peer_addr, reason } = request.into_inner();
        check_node(&node)?;
        check_address(&peer_addr)?;
        let action = AdminRequest::Address { node, peer_addr };
        self.0.change(by, AdminAction::Ask(action), &reason).await
    }

    async fn finalize(
        &self,
        request: Request<FinalizeRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let FinalizeRequest { reason } = request.into_inner();
        self.0.change(by, AdminAction::Ask(AdminRequest::Finalize), &reason).await
    }

    async fn drain(
        &self,
        request: Request<DrainRequest>,
    ) -> Result<Response<ClusterResponse>, Status> {
        let (by, _) = self.0.check_admin(&request).await?;
        let DrainRequest { undo, reason } = request.into_inner();
        self.0.change(by, AdminAction::Ask(AdminRequest::Drain { on: !undo }), &reason).await
    }

    type HealthStream = ResponseStream<HealthResponse>;

    async fn health(
        &self,
        request: Request<HealthRequest>,
    ) -> Result<Response<Self::HealthStream>, Status> {
        let Peer(peer, _) = Peer::of(&request)?;
        let app = Arc::clone(&self.0);
        let permit = app.sessions.permit(peer)?;
        let (sender, reports) = mpsc::channel(REPORTS_MAX);
        tokio::spawn(async move {
            let _permit = permit;
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
    fn cluster(&self) -> Result<View, Refused> {
        self.service.engine.view().ok_or_else(|| {
            let text = "this server is no member of a cluster";
            Refused::new(Code::FailedPrecondition, Reason::NoCluster, text)
        })
    }

    /// Changes the cluster for an operator, who must say why.
    async fn change(
        &self,
        by: By,
        action: AdminAction,
        reason: &str,
    ) -> Result<Response<ClusterResponse>, Status> {
        self.perform(by, action, fields::reason(reason)?).await?;
        Ok(Response::new(ClusterResponse {}))
    }

    async fn perform(&self, by: By, action: AdminAction, reason: &str) -> Result<Done, Refused> {
        self.cluster()?;
        let (service, reason) = (Arc::clone(&self.service), reason.to_owned());
        let done =
            run_detached(async move { operate::perform(&service, &by, action, &reason).await });
        done.await.ok_or_else(Refused::internal)?.map_err(by_cluster)
    }

    fn health(&self) -> HealthResponse {
        let (ready, draining) = (self.is_ready(), self.service.is_draining());
        let Some(view) = self.service.engine.view() else {
            let role = "memory".to_owned();
            return HealthResponse { ready, draining, role, ..HealthResponse::default() };
        };
        let leader = view.status.and_then(|status| status.leader);
        let leader = leader.and_then(|leader| view.members.get(&leader));
        HealthResponse {
            ready,
            draining,
            role: Role::name_of(view.status.map(|status| status.role)).to_owned(),
            leader: leader.map(|leader| leader.node.clone()).unwrap_or_default(),
            term: view.status.map_or(0, |status| status.term),
        }
    }
}

fn by_cluster(why: String) -> Refused {
    Refused::new(Code::FailedPrecondition, Reason::ClusterRefused, why)
}

fn check_node(text: &str) -> Result<(), Refused> {
    if operate::is_node(text) {
        return Ok(());
    }
    Err(Refused::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"))
}

fn check_address(text: &str) -> Result<(), Refused> {
    if operate::is_address(text) {
        return Ok(());
    }
    Err(Refused::bad_request("an address is host:port"))
}

macro_rules! message {
    ($($group:ident { $($at:ident = $name:literal, $version:literal, $valid:expr,
        ($($flag:tt)+), $field:ident;)+ })+) => {
        /// With every setting.
        fn policy_to_message(policy: &CorePolicy) -> Policy {
            Policy { $($($field: Field::told(setting($name).get(policy)),)+)+ }
        }

        /// The settings that a message has.
        fn settings(policy: &Policy) -> Result<Settings, Refused> {
            let mut settings = Settings::new();
            $($(
                if let Some(value) = policy.$field {
                    settings.push((setting($name), value.value()?));
                }
            )+)+
            if settings.is_empty() {
                return Err(Refused::bad_request("at least one setting is required"));
            }
            operate::check_settings(&settings).map_err(Refused::bad_request)?;
            Ok(settings)
        }
    };
}

policy_settings!(message);

fn setting(name: &str) -> &'static PolicySetting {
    PolicySetting::named(name).expect("the name is from the list")
}

/// A field of the message `Policy`.
trait Field: Sized {
    /// `None` if the setting is of another kind.
    fn told(value: PolicyValue) -> Option<Self>;

    fn value(self) -> Result<PolicyValue, Refused>;
}

impl Field for u64 {
    fn told(value: PolicyValue) -> Option<Self> {
        if let PolicyValue::Number(number) = value { Some(number) } else { None }
    }

    fn value(self) -> Result<PolicyValue, Refused> {
        Ok(PolicyValue::Number(self))
    }
}

impl Field for bool {
    fn told(value: PolicyValue) -> Option<Self> {
        if let PolicyValue::Bool(flag) = value { Some(flag) } else { None }
    }

    fn value(self) -> Result<PolicyValue, Refused> {
        Ok(PolicyValue::Bool(self))
    }
}

/// The number of an [`AutoRelease`].
impl Field for i32 {
    fn told(value: PolicyValue) -> Option<Self> {
        let PolicyValue::Release(release) = value else { return None };
        Some(Self::from(match release {
            Release::Any => AutoRelease::Any,
            Release::Clean => AutoRelease::Clean,
            Release::Lease => AutoRelease::Lease,
        }))
    }

    fn value(self) -> Result<PolicyValue, Refused> {
        Ok(PolicyValue::Release(match AutoRelease::try_from(self) {
            Ok(AutoRelease::Any) => Release::Any,
            Ok(AutoRelease::Clean) => Release::Clean,
            Ok(AutoRelease::Lease) => Release::Lease,
            Ok(AutoRelease::Unspecified) | Err(_) => {
                return Err(Refused::bad_request("an unknown policy of releases"));
            }
        }))
    }
}

#[cfg(test)]
mod tests {
    use dflockd_core::Span;
    use dflockd_replica::policy::POLICY_SETTINGS;

    use super::*;

    /// Every setting is told, and can be given back under the name it has everywhere.
    #[test]
    fn what_is_shown_can_be_set() {
        let policy = CorePolicy {
            auto_release: Release::Clean,
            orphan_ttl: Span::from_secs(3),
            ..CorePolicy::default()
        };
        let mut told = policy_to_message(&policy);
        assert!(settings(&told).is_err(), "the name spaces stay what they are");
        told.shared_key_namespace = None;
        let settings = settings(&told).expect("they are in range");
        assert_eq!(settings.len(), POLICY_SETTINGS.len() - 1);
        for (setting, value) in settings {
            assert_eq!(setting.get(&policy), value, "{}", setting.name);
        }
        assert_eq!((told.orphan_ttl_s, told.auto_release()), (Some(3), AutoRelease::Clean));
    }

    #[test]
    fn wrong_settings_are_refused() {
        assert!(settings(&Policy::default()).is_err(), "none");
        for policy in [
            Policy { max_locks: Some(0), ..Policy::default() },
            Policy { max_value_bytes: Some(1_048_577), ..Policy::default() },
            Policy { auto_release: Some(0), ..Policy::default() },
            Policy { auto_release: Some(9), ..Policy::default() },
        ] {
            assert!(settings(&policy).is_err(), "{policy:?}");
        }
    }
}
