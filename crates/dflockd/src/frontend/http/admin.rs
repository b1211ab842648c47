//! What an operator does: ends a hold or a session, changes who is in the cluster. All of it is audited, and what was
//! done is told here.

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use dflockd_core::{Outcome, Refusal, SessionId, Space, check};
use dflockd_replica::admin::AdminRequest;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{self, Decimal, StatusBody};
use super::body::{self, Json, Key, Query, reply};
use super::error::ApiError;
use super::inspection::fitting;
use super::layers::not_leader;
use super::openapi_parts::{
    AdminRefusals, InKey, NeedsAdmin, NoCluster, NotFound, NotHeld, Refusals,
};
use super::{Admin, App, Shared, fields};
use crate::audit::{AuditEvent, Record, run_detached};
use crate::operate::{self, is_address, is_node};
use crate::report::json_bytes;

/// The usual page of what was done, and the longest.
const PAGE: usize = 100;
const PAGE_MAX: usize = 1000;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(force_release))
        .routes(routes!(end_session))
        .routes(routes!(add_voter))
        .routes(routes!(remove_voter))
        .routes(routes!(read_index))
        .routes(routes!(audit))
}

/// The `{id}` of the path.
struct Id(String);

impl FromRequestParts<Shared> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        let id = body::segment(parts, "{id}")?;
        String::from_utf8(id).map(Self).map_err(|_| ApiError::bad_request("malformed id"))
    }
}

/// Which hold, and why it ends.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct ForceRelease {
    /// Where the lock lives.
    space: LockSpace,
    /// The fence of the hold.
    #[schema(pattern = "^[0-9]{1,20}$")]
    fence: String,
    /// For the log.
    #[schema(min_length = 1, max_length = 256)]
    reason: String,
}

/// `lock` for mutexes, elections and read-write locks, `sem` for semaphores.
#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum LockSpace {
    Lock,
    Sem,
}

/// Why a session ends.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct EndSession {
    /// For the log.
    #[schema(min_length = 1, max_length = 256)]
    reason: String,
}

/// Ends somebody's hold.
#[utoipa::path(
    post,
    path = "/v1/admin/locks/{key}/force-release",
    tag = "admin",
    params(NeedsAdmin, InKey),
    request_body = ForceRelease,
    responses((status = 204, description = "The hold has ended."), NotHeld, AdminRefusals)
)]
async fn force_release(
    Admin(by): Admin,
    State(app): State<Shared>,
    key: Key,
    Json(body): Json<ForceRelease>,
) -> Result<Response, ApiError> {
    let fence = fields::number(&body.fence);
    let fence = fence.ok_or_else(|| ApiError::bad_request("a fence is a number"))?;
    let reason = check::reason(&body.reason)?;
    let space = match body.space {
        LockSpace::Lock => Space::Locks,
        LockSpace::Sem => Space::Semaphores,
    };
    let hold = (key.0, space, fence);
    let ended =
        operate::end_hold(app.service.clone(), app.common(), by, hold, reason.to_owned()).await;
    answer::done(&ended.map_err(|_| ApiError::refused(Refusal::Forgotten))?)
}

/// Ends somebody's session or connection. What it holds is released.
#[utoipa::path(
    post,
    path = "/v1/admin/sessions/{id}/end",
    tag = "admin",
    params(
        NeedsAdmin,
        ("id" = String, Path, description = "The number of the session, as in `/v1/sessions`.",
            pattern = "^[0-9]{1,20}$")
    ),
    request_body = EndSession,
    responses((status = 204, description = "The session has ended."), NotFound, AdminRefusals)
)]
async fn end_session(
    Admin(by): Admin,
    State(app): State<Shared>,
    Id(id): Id,
    Json(body): Json<EndSession>,
) -> Result<Response, ApiError> {
    let session = fields::number(&id);
    let session = session.ok_or_else(|| ApiError::bad_request("a session has a number"))?;
    let reason = check::reason(&body.reason)?;
    let common = app.common();
    if common.id() == SessionId(session) {
        return Err(ApiError::not_found());
    }
    let ended =
        operate::end_session(app.service.clone(), common, by, session, reason.to_owned()).await;
    let outcome = ended.map_err(|_| ApiError::refused(Refusal::Forgotten))?;
    if outcome == Outcome::Refused(Refusal::NotHeld) {
        return Err(ApiError::not_found());
    }
    answer::done(&outcome)
}

// ---- The cluster ----

/// A new member.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct AddVoter {
    /// Its name, never used before.
    #[schema(min_length = 1, max_length = 64, pattern = "^[A-Za-z0-9._-]+$")]
    node_id: String,
    /// Where its peers dial it.
    #[schema(min_length = 3, max_length = 262, pattern = r"^\S+:[0-9]{1,5}$")]
    raft_addr: String,
    /// Where clients find it.
    #[schema(min_length = 3, max_length = 262, pattern = r"^\S+:[0-9]{1,5}$")]
    client_addr: String,
    /// It keeps the log, but no state.
    witness: Option<bool>,
    /// It votes even if fewer voters than a majority are reachable then.
    force: Option<bool>,
}

/// How a member is removed.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct HowToRemove {
    /// Even if fewer voters than a majority are reachable then.
    force: Option<bool>,
}

/// What was done to whom.
#[derive(Serialize, ToSchema)]
struct Voter {
    /// `ok`
    #[schema(value_type = String, example = "ok")]
    status: &'static str,
    node_id: String,
}

/// Adds a member: it listens until it has caught up, then it votes.
#[utoipa::path(
    post,
    path = "/v1/admin/voters",
    tag = "cluster",
    params(NeedsAdmin),
    request_body = AddVoter,
    responses(
        (status = 200, description = "It votes. Repeating the request changes nothing.", body = Voter),
        NoCluster,
        AdminRefusals
    )
)]
async fn add_voter(
    Admin(by): Admin,
    State(app): State<Shared>,
    Json(body): Json<AddVoter>,
) -> Result<Response, ApiError> {
    check_cluster(&app)?;
    let AddVoter { node_id, raft_addr, client_addr, witness, force } = body;
    if !is_node(&node_id) {
        return Err(ApiError::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"));
    }
    if !is_address(&raft_addr) || !is_address(&client_addr) {
        return Err(ApiError::bad_request("an address is host:port"));
    }
    let promote = AdminRequest::promote(node_id.clone(), force.unwrap_or(false));
    let add = AdminRequest::Add {
        node: node_id.clone(),
        peer_addr: raft_addr,
        client_addr,
        witness: witness.unwrap_or(false),
    };
    let added =
        run_detached(async move { operate::add_voter(&app.service, &by, add, promote).await });
    let result = added.await.ok_or_else(ApiError::internal)?;
    told(result, node_id, "add_voter_failed")
}

/// Removes a member for ever: its name is never used again.
#[utoipa::path(
    delete,
    path = "/v1/admin/voters/{id}",
    tag = "cluster",
    params(
        NeedsAdmin,
        ("id" = String, Path, description = "The name of the member.", min_length = 1, max_length = 64,
            pattern = "^[A-Za-z0-9._-]+$"),
        HowToRemove
    ),
    responses(
        (status = 200, description = "It is no member. Repeating the request changes nothing.", body = Voter),
        NoCluster,
        AdminRefusals
    )
)]
async fn remove_voter(
    Admin(by): Admin,
    State(app): State<Shared>,
    Id(node): Id,
    Query(how): Query<HowToRemove>,
) -> Result<Response, ApiError> {
    check_cluster(&app)?;
    if !is_node(&node) {
        return Err(ApiError::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"));
    }
    let remove = AdminRequest::remove(node.clone(), how.force.unwrap_or(false));
    let removal =
        run_detached(async move { operate::remove_voter(&app.service, &by, remove).await });
    let result = removal.await.ok_or_else(ApiError::internal)?;
    told(result, node, "remove_voter_failed")
}

fn told(
    result: Result<(), String>,
    node_id: String,
    code: &'static str,
) -> Result<Response, ApiError> {
    match result {
        Ok(()) => Ok(reply(&Voter { status: "ok", node_id })),
        Err(why) => Err(ApiError::new(StatusCode::BAD_REQUEST, code).because(why)),
    }
}

fn check_cluster(app: &App) -> Result<(), ApiError> {
    let is_member = app.service.engine.is_replicated();
    is_member.then_some(()).ok_or_else(ApiError::cluster_disabled)
}

/// Answers when everything that was done before, by anybody, can be seen here.
#[utoipa::path(
    get,
    path = "/v1/readindex",
    tag = "cluster",
    responses((status = 200, description = "It can.", body = StatusBody), NoCluster, Refusals)
)]
async fn read_index(State(app): State<Shared>) -> Result<Response, ApiError> {
    check_cluster(&app)?;
    if app.service.redirects(false) {
        app.service.engine.serves(true).map_err(|leader| not_leader(&leader))?;
    }
    if app.common().barrier().await == Ok(Outcome::Done) {
        Ok(reply(&StatusBody { status: "ok" }))
    } else {
        let view = app.service.engine.view().ok_or_else(ApiError::cluster_disabled)?;
        Err(not_leader(&view.leader()))
    }
}

// ---- What was done ----

/// Which records.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct WhichRecords {
    /// How many; 100 if nothing is said.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// `next` of the page before. One that was not given out yet is of an earlier life of the server, and stands for 0.
    #[param(pattern = "^[0-9]{1,20}$")]
    after: Option<String>,
}

/// What operators did, in order.
#[derive(Serialize, ToSchema)]
struct AuditList {
    records: Vec<AuditEntry>,
    /// What to ask for as `after` to get the next page; null if this is the last.
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    next: Option<Decimal>,
}

/// What an operator did, or tried to do.
#[derive(Serialize, ToSchema)]
struct AuditEntry {
    /// 1, 2, 3 ... since the server was started. A gap is what is no longer kept.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    number: Decimal,
    /// When, in milliseconds of Unix time, by the clock of this server.
    unix_ms: u64,
    /// By which protocol: `line`, `http` or `grpc`; `member` if another member was asked and this one, the leader,
    /// decided.
    #[schema(value_type = String, example = "http")]
    api: &'static str,
    /// The address it was asked from, or the member that passed it on.
    #[schema(value_type = String)]
    peer: std::sync::Arc<str>,
    /// Whose token it came with; empty if another member was asked.
    #[schema(value_type = String, example = "admin-token")]
    identity: std::sync::Arc<str>,
    /// `force-release`, `end-session`, `backup`, or the change of the cluster, such as `add`.
    #[schema(value_type = String, example = "force-release")]
    what: &'static str,
    /// The lock, where a hold was ended.
    key: Option<String>,
    /// The fence of that hold.
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    fence: Option<Decimal>,
    /// The number of the session that was ended.
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    session: Option<Decimal>,
    /// The member that it was about, if one was named.
    node: Option<String>,
    /// Why, in the operator's words.
    reason: String,
    /// Whether it was done; null if that was not known yet when it was written down.
    done: Option<bool>,
}

impl AuditEntry {
    fn new(record: &Record) -> Self {
        let mut entry = Self {
            number: Decimal(record.number),
            unix_ms: record.unix_ms,
            api: record.via.name(),
            peer: record.peer.clone(),
            identity: record.identity.clone(),
            what: record.event.name(),
            key: None,
            fence: None,
            session: None,
            node: None,
            reason: record.reason.clone(),
            done: record.done,
        };
        match &record.event {
            AuditEvent::EndHold { key, fence } => {
                entry.key = Some(String::from_utf8_lossy(key).into_owned());
                entry.fence = Some(Decimal(*fence));
            }
            AuditEvent::EndSession { session } => entry.session = Some(Decimal(*session)),
            AuditEvent::Change { node, .. } => entry.node.clone_from(node),
            AuditEvent::Backup => {}
        }
        entry
    }
}

/// What operators asked of this server, by whatever protocol. The last 1000 are kept; what lasts is the log.
#[utoipa::path(
    get,
    path = "/v1/admin/audit",
    tag = "admin",
    params(NeedsAdmin, WhichRecords),
    responses((status = 200, description = "A page of records.", body = AuditList), AdminRefusals)
)]
async fn audit(
    _: Admin,
    State(app): State<Shared>,
    Query(query): Query<WhichRecords>,
) -> Result<Response, ApiError> {
    let limit = check::page(query.limit, PAGE, PAGE_MAX)?;
    let after = query.after.as_deref().map_or(Some(0), fields::number);
    let after = after.ok_or_else(|| ApiError::bad_request("after is no number of a record"))?;
    let found = app.service.audit.after(after, limit);
    let mut records: Vec<_> = found.iter().map(|record| AuditEntry::new(record)).collect();
    records.truncate(fitting(records.iter().map(json_bytes)));
    let is_last = records.len() == found.len() && found.len() < limit;
    let last = found[..records.len()].last().filter(|_| !is_last);
    Ok(reply(&AuditList { records, next: last.map(|last| Decimal(last.number)) }))
}
