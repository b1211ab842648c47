//! What an operator does: ends a hold or a session, changes who is in the cluster. All of it is audited.

use std::time::Duration;

use axum::extract::{FromRequestParts, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use dflockd_core::{Command, Fence, Outcome, Refusal, SessionId, Space};
use dflockd_engine::replica::admin::AdminRequest;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{self, StatusBody};
use super::body::{self, Json, Key, reply};
use super::contract::{AdminRefusals, InKey, NeedsAdmin, NoCluster, NotFound, NotHeld, Refusals};
use super::error::ApiError;
use super::{Admin, Peer, Shared, fields};
use crate::config::FollowerMode;

/// How long a new member may take to catch up before the request ends.
const CATCH_UP: Duration = Duration::from_secs(10);
/// How often it is looked whether it has.
const CATCH_UP_LOOK: Duration = Duration::from_millis(100);
/// The longest name of a node.
const NODE_BYTES_MAX: usize = 64;
/// The longest address.
const ADDRESS_BYTES_MAX: usize = 262;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(force_release))
        .routes(routes!(end_session))
        .routes(routes!(add_voter))
        .routes(routes!(remove_voter))
        .routes(routes!(read_index))
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
    _: Admin,
    State(app): State<Shared>,
    Peer(peer): Peer,
    key: Key,
    Json(body): Json<ForceRelease>,
) -> Result<Response, ApiError> {
    let fence = fields::number(&body.fence);
    let fence = fence.ok_or_else(|| ApiError::bad_request("a fence is a number"))?;
    let reason = fields::reason(&body.reason)?;
    let space = match body.space {
        LockSpace::Lock => Space::Locks,
        LockSpace::Sem => Space::Semaphores,
    };
    let command = Command::ForceRelease { key: &key, space, fence: Fence(fence) };
    let answer = app.call_common(command).await?;
    let known = *answer.outcome() == Outcome::Done;
    let key = key.escape_ascii();
    tracing::info!(audit = true, %peer, %key, fence, known, reason, "hold ended by an operator");
    answer::done(answer.outcome())
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
    _: Admin,
    State(app): State<Shared>,
    Peer(peer): Peer,
    Id(id): Id,
    Json(body): Json<EndSession>,
) -> Result<Response, ApiError> {
    let session = fields::number(&id);
    let session = session.ok_or_else(|| ApiError::bad_request("a session has a number"))?;
    let reason = fields::reason(&body.reason)?;
    let common = app.common();
    if common.id() == SessionId(session) {
        return Err(ApiError::not_found());
    }
    let outcome = common.kick(SessionId(session)).await;
    let outcome = outcome.map_err(|_| ApiError::refused(Refusal::Forgotten))?;
    let known = outcome == Outcome::Done;
    tracing::info!(audit = true, %peer, session, known, reason, "session ended by an operator");
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
    _: Admin,
    State(app): State<Shared>,
    Peer(peer): Peer,
    Json(body): Json<AddVoter>,
) -> Result<Response, ApiError> {
    let member = app.service.engine.replicated().ok_or_else(ApiError::cluster_disabled)?;
    let AddVoter { node_id, raft_addr, client_addr, witness } = body;
    if !is_node(&node_id) {
        return Err(ApiError::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"));
    }
    if !is_address(&raft_addr) || !is_address(&client_addr) {
        return Err(ApiError::bad_request("an address is host:port"));
    }
    let node = node_id.clone();
    let add = AdminRequest::Add {
        node: node.clone(),
        peer_addr: raft_addr,
        client_addr,
        witness: witness.unwrap_or(false),
    };
    let mut result = member.admin(add).await;
    let deadline = Instant::now() + CATCH_UP;
    while result.is_ok() {
        result = member.admin(AdminRequest::Promote { node: node.clone() }).await;
        if result.is_ok() || Instant::now() >= deadline {
            result = result.map_err(|why| format!("{why}; it is a learner until you ask again"));
            break;
        }
        tokio::time::sleep(CATCH_UP_LOOK).await;
        result = Ok(());
    }
    let done = result.is_ok();
    tracing::info!(audit = true, %peer, node, done, "member added by an operator");
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
            pattern = "^[A-Za-z0-9._-]+$")
    ),
    responses(
        (status = 200, description = "It is no member. Repeating the request changes nothing.", body = Voter),
        NoCluster,
        AdminRefusals
    )
)]
async fn remove_voter(
    _: Admin,
    State(app): State<Shared>,
    Peer(peer): Peer,
    Id(node): Id,
) -> Result<Response, ApiError> {
    let member = app.service.engine.replicated().ok_or_else(ApiError::cluster_disabled)?;
    if !is_node(&node) {
        return Err(ApiError::bad_request("a node id is 1 to 64 of A-Z a-z 0-9 . _ -"));
    }
    let result = member.admin(AdminRequest::Remove { node: node.clone() }).await;
    let done = result.is_ok();
    tracing::info!(audit = true, %peer, node, done, "member removed by an operator");
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

fn is_node(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NODE_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed)
}

fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let printable = host.bytes().all(|byte| byte.is_ascii_graphic());
    text.len() <= ADDRESS_BYTES_MAX
        && !host.is_empty()
        && printable
        && port.parse::<u16>().is_ok_and(|port| port > 0)
}

/// Answers when everything that was done before, by anybody, can be seen here.
#[utoipa::path(
    get,
    path = "/v1/readindex",
    tag = "cluster",
    responses((status = 200, description = "It can.", body = StatusBody), NoCluster, Refusals)
)]
async fn read_index(State(app): State<Shared>) -> Result<Response, ApiError> {
    let member = app.service.engine.replicated().ok_or_else(ApiError::cluster_disabled)?;
    let not_leader = || {
        let view = member.view();
        ApiError::not_leader(view.leader_addr(), view.leader_http_addr())
    };
    if app.service.follower_mode == FollowerMode::Redirect && member.leadership().is_err() {
        return Err(not_leader());
    }
    if app.common().barrier().await == Ok(Outcome::Done) {
        Ok(reply(&StatusBody { status: "ok" }))
    } else {
        Err(not_leader())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_addresses() {
        for node in ["n1", "A.b_c-9", &"n".repeat(64)] {
            assert!(is_node(node), "{node}");
        }
        for node in ["", "n 1", "n/1", "n\u{e9}", &"n".repeat(65)] {
            assert!(!is_node(node), "{node}");
        }
        for address in ["127.0.0.1:7001", "[::1]:1", "host.example:65535"] {
            assert!(is_address(address), "{address}");
        }
        for address in ["", ":1", "host", "host:", "host:0", "host:65536", "ho st:1", "host:x"] {
            assert!(!is_address(address), "{address}");
        }
    }
}
