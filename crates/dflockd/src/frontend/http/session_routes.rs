//! The routes of sessions themselves.

use axum::extract::{FromRequestParts, State};
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::body::{Json, no_content, reply, segment};
use super::error::{ApiError, ErrorBody};
use super::openapi_parts::{NeedsSession, OwnSession};
use super::sessions::{InSession, session_id};
use super::{Peer, Shared};

/// The longest name of a client or stable reference.
const NAME_BYTES_MAX: usize = 64;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::default()
        .routes(routes!(create_session))
        .routes(routes!(ping_own_session))
        .routes(routes!(delete_own_session))
        .routes(routes!(ping_session))
        .routes(routes!(delete_session))
}

/// What a new session may say of itself.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct NewSession {
    /// A name that people see: 1-64 printable bytes without space.
    #[schema(min_length = 1, max_length = 64, pattern = "^[!-~]+$")]
    client: Option<String>,
    /// A name that stays the same over restarts of the client: 1-64 printable bytes. In a cluster with an orphan TTL,
    /// a session with the same one gets back what an earlier session left behind, by asking for the same lock again.
    #[schema(min_length = 1, max_length = 64, pattern = "^[ -~]+$")]
    stable_ref: Option<String>,
}

#[derive(Serialize, ToSchema)]
struct CreatedSession {
    /// The id, which is a secret: whoever knows it can use the session.
    #[schema(pattern = "^[0-9a-f]{32}$")]
    session_id: String,
    /// The session ends when it was not used for twice this; 0 is never.
    idle_timeout_s: u64,
}

impl NewSession {
    /// Whether the names can be used.
    fn check(&self) -> Result<(), ApiError> {
        let fits = |name: &str, first: u8| {
            (1..=NAME_BYTES_MAX).contains(&name.len())
                && name.bytes().all(|byte| (first..=b'~').contains(&byte))
        };
        if self.stable_ref.as_deref().is_some_and(|name| !fits(name, b' ')) {
            return Err(ApiError::bad_request("stable_ref is not 1 to 64 printable bytes"));
        }
        if self.client.as_deref().is_some_and(|name| !fits(name, b'!')) {
            let why = "client is not 1 to 64 printable bytes without space";
            return Err(ApiError::bad_request(why));
        }
        Ok(())
    }

    /// What people see of the session.
    fn label(&self) -> Option<&str> {
        self.client.as_deref().or(self.stable_ref.as_deref())
    }
}

/// The `{id}` of the path: 32 hexadecimal digits, to be looked up.
struct Id(Vec<u8>);

impl FromRequestParts<Shared> for Id {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        segment(parts, "{id}").map(Self)
    }
}

/// Open a session
///
/// It stands for what a connection is in the line protocol: it owns holds and queue places. It ends when it was not
/// used for twice the idle time; ping it at about half of that.
#[utoipa::path(
    post,
    path = "/v1/sessions",
    tag = "sessions",
    request_body(content = Option<NewSession>),
    responses(
        (status = 200, description = "The session", body = CreatedSession),
        (status = 400, description = "`bad_request`", body = ErrorBody),
        (status = 500, description = "`session_create_failed`", body = ErrorBody),
        (
            status = 503,
            description = "`max_sessions`, `max_sessions_per_ip`, `draining`, `unavailable`",
            body = ErrorBody,
        ),
    ),
)]
async fn create_session(
    State(app): State<Shared>,
    peer: Peer,
    new: Option<Json<NewSession>>,
) -> Result<Response, ApiError> {
    let new = new.map(|Json(new)| new).unwrap_or_default();
    new.check()?;
    let session_id = app.open_session(peer, new.label(), new.stable_ref.as_deref()).await?;
    let idle_timeout_s = app.idle.as_secs();
    Ok(reply(&CreatedSession { session_id, idle_timeout_s }))
}

/// Keep a session alive
#[utoipa::path(
    post,
    path = "/v1/sessions/self/ping",
    tag = "sessions",
    params(NeedsSession),
    responses(
        (status = 204, description = "It is alive"),
        OwnSession,
    ),
)]
async fn ping_own_session(_: InSession) -> Response {
    // To be looked up is to be used.
    no_content()
}

/// End a session
///
/// Its long poll answers 410, its queue places go, and what it holds is released (unless the server is told to leave
/// holds to their leases) before this is answered.
#[utoipa::path(
    delete,
    path = "/v1/sessions/self",
    tag = "sessions",
    params(NeedsSession),
    responses(
        (status = 204, description = "It has ended"),
        OwnSession,
    ),
)]
async fn delete_own_session(
    State(app): State<Shared>,
    peer: Peer,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    app.close_session(session_id(&headers)?, peer).await?;
    Ok(no_content())
}

/// Keep a session alive, by a path that shows its secret
///
/// Paths are written to the logs of proxies: prefer `/v1/sessions/self/ping`.
#[utoipa::path(
    post,
    path = "/v1/sessions/{id}/ping",
    tag = "sessions",
    params(("id" = String, Path, pattern = "^[0-9a-f]{32}$")),
    responses(
        (status = 204, description = "It is alive"),
        OwnSession,
    ),
)]
async fn ping_session(State(app): State<Shared>, peer: Peer, id: Id) -> Result<Response, ApiError> {
    app.ping_session(&id.0, peer).await?;
    Ok(no_content())
}

/// End a session, by a path that shows its secret
///
/// Paths are written to the logs of proxies: prefer `/v1/sessions/self`.
#[utoipa::path(
    delete,
    path = "/v1/sessions/{id}",
    tag = "sessions",
    params(("id" = String, Path, pattern = "^[0-9a-f]{32}$")),
    responses(
        (status = 204, description = "It has ended"),
        OwnSession,
    ),
)]
async fn delete_session(
    State(app): State<Shared>,
    peer: Peer,
    id: Id,
) -> Result<Response, ApiError> {
    app.close_session(&id.0, peer).await?;
    Ok(no_content())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(client: Option<&str>, stable_ref: Option<&str>) -> Option<Option<String>> {
        let [client, stable_ref] = [client, stable_ref].map(|name| name.map(str::to_owned));
        let new = NewSession { client, stable_ref };
        new.check().ok().map(|()| new.label().map(str::to_owned))
    }

    #[test]
    fn names() {
        assert_eq!(label(None, None), Some(None));
        assert_eq!(label(None, Some("a b")), Some(Some("a b".to_owned())));
        assert_eq!(label(Some("c"), Some("a b")), Some(Some("c".to_owned())));
        let long = "x".repeat(65);
        for wrong in ["", "ä", "a\n", &long] {
            assert_eq!(label(None, Some(wrong)), None, "{wrong}");
            assert_eq!(label(Some(wrong), None), None, "{wrong}");
        }
        assert_eq!(label(Some("a b"), None), None);
        assert!(label(Some(&long[..64]), Some(&long[..64])).is_some());
    }
}
