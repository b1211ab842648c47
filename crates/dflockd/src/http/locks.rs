//! Locks, semaphores, read-write locks, elections: acquire, release, renew, and the two steps of enqueue and wait.

use axum::response::Response;
use dflockd_core::{Command, Mode, Space, Span};
use serde::Deserialize;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Shared;
use super::answer::{self, GrantBody, RenewedBody};
use super::body::{Json, Key};
use super::contract::{
    AcquireConflict, EnqueueConflict, InKey, NeedsSession, NotHeld, Referred, Refusals,
    SessionGone, WaitConflict,
};
use super::error::ApiError;
use super::fields;
use super::sessions::{InSession, Session};

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::with_openapi(Referred::openapi())
        .routes(routes!(acquire_lock))
        .routes(routes!(release_lock))
        .routes(routes!(renew_lock))
        .routes(routes!(enqueue_lock))
        .routes(routes!(wait_lock))
        .routes(routes!(acquire_semaphore))
        .routes(routes!(release_semaphore))
        .routes(routes!(renew_semaphore))
        .routes(routes!(enqueue_semaphore))
        .routes(routes!(wait_semaphore))
        .routes(routes!(acquire_read))
        .routes(routes!(acquire_write))
        .routes(routes!(enqueue_read))
        .routes(routes!(enqueue_write))
        .routes(routes!(wait_rwlock))
        .routes(routes!(release_rwlock))
        .routes(routes!(renew_rwlock))
        .routes(routes!(campaign))
        .routes(routes!(resign))
        .routes(routes!(renew_election))
}

/// How long to wait for a lock and for how long to have it. Each time in seconds or milliseconds, not both.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Acquire {
    /// How long to wait in the queue; 0 or nothing: only try.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    acquire_timeout_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    acquire_timeout_ms: Option<u64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// The same for a semaphore.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct AcquireSemaphore {
    /// How many may hold it. All who use the key name the same number.
    #[schema(required = true, value_type = i64, minimum = 1, maximum = 1048576)]
    limit: Option<i64>,
    /// How long to wait in the queue; 0 or nothing: only try.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    acquire_timeout_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    acquire_timeout_ms: Option<u64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// For how long to have the lock once it is granted.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Enqueue {
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// The same for a semaphore.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct EnqueueSemaphore {
    /// How many may hold it. All who use the key name the same number.
    #[schema(required = true, value_type = i64, minimum = 1, maximum = 1048576)]
    limit: Option<i64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// How long to wait for the grant of an enqueued request.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Wait {
    /// 0 or nothing: only look.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    timeout_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    timeout_ms: Option<u64>,
}

/// Which hold to give back.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Release {
    /// What the grant gave.
    #[schema(required = true, value_type = String, pattern = "^[0-9a-f]{32}$")]
    token: Option<String>,
}

/// Which hold to keep for longer.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Renew {
    /// What the grant gave.
    #[schema(required = true, value_type = String, pattern = "^[0-9a-f]{32}$")]
    token: Option<String>,
    /// The new lease, from now; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The same in milliseconds.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// How long to wait, and the lease.
struct Times {
    wait: Span,
    lease: Option<Span>,
}

impl Acquire {
    fn times(&self) -> Result<Times, ApiError> {
        let wait = fields::wait(self.acquire_timeout_s, self.acquire_timeout_ms)?;
        Ok(Times { wait, lease: fields::lasting(self.lease_ttl_s, self.lease_ttl_ms)? })
    }
}

impl AcquireSemaphore {
    fn times(&self) -> Result<Times, ApiError> {
        let wait = fields::wait(self.acquire_timeout_s, self.acquire_timeout_ms)?;
        Ok(Times { wait, lease: fields::lasting(self.lease_ttl_s, self.lease_ttl_ms)? })
    }
}

async fn acquire(
    key: &Key,
    session: &Session,
    mode: Mode,
    times: Times,
) -> Result<Response, ApiError> {
    let claim = session.claim().await?;
    let Times { wait, lease } = times;
    let command = Command::Acquire { key, mode, wait, lease, salt: rand::random() };
    answer::grant(claim.call(command).await?)
}

async fn enqueue(
    key: &Key,
    session: &Session,
    mode: Mode,
    lease: Option<Span>,
) -> Result<Response, ApiError> {
    let claim = session.claim().await?;
    let command = Command::Enqueue { key, mode, lease, salt: rand::random() };
    answer::grant(claim.call(command).await?)
}

async fn wait(
    key: &Key,
    session: &Session,
    space: Space,
    body: &Wait,
) -> Result<Response, ApiError> {
    let wait = fields::wait(body.timeout_s, body.timeout_ms)?;
    let claim = session.claim().await?;
    answer::grant(claim.call(Command::Wait { key, space, wait }).await?)
}

async fn release(
    key: &Key,
    session: &Session,
    space: Space,
    body: &Release,
    resign: bool,
) -> Result<Response, ApiError> {
    let token = fields::token(body.token.as_deref())?;
    let claim = session.claim().await?;
    let token = token.ok_or_else(ApiError::not_held)?;
    let answer = claim.call(Command::Release { key, space, token, resign }).await?;
    answer::done(answer.outcome())
}

async fn renew(
    key: &Key,
    session: &Session,
    space: Space,
    body: &Renew,
) -> Result<Response, ApiError> {
    let token = fields::token(body.token.as_deref())?;
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    let claim = session.claim().await?;
    let token = token.ok_or_else(ApiError::not_held)?;
    answer::renewed(&claim.call(Command::Renew { key, space, token, lease }).await?)
}

/// Acquires a lock: a long poll.
#[utoipa::path(
    post,
    path = "/v1/locks/{key}",
    tag = "locks",
    operation_id = "acquire_lock",
    params(InKey, NeedsSession),
    request_body = Acquire,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        AcquireConflict,
        SessionGone,
        Refusals
    )
)]
async fn acquire_lock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Acquire>,
) -> Result<Response, ApiError> {
    acquire(&key, &session, Mode::Mutex, body.times()?).await
}

/// Gives a hold back.
#[utoipa::path(
    post,
    path = "/v1/locks/{key}/release",
    tag = "locks",
    operation_id = "release_lock",
    params(InKey, NeedsSession),
    request_body = Release,
    responses((status = 204, description = "Done."), NotHeld, SessionGone, Refusals)
)]
async fn release_lock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Release>,
) -> Result<Response, ApiError> {
    release(&key, &session, Space::Locks, &body, false).await
}

/// Restarts the lease of a hold.
#[utoipa::path(
    post,
    path = "/v1/locks/{key}/renew",
    tag = "locks",
    operation_id = "renew_lock",
    params(InKey, NeedsSession),
    request_body = Renew,
    responses(
        (status = 200, description = "The lease begins again.", body = RenewedBody),
        NotHeld,
        SessionGone,
        Refusals
    )
)]
async fn renew_lock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Renew>,
) -> Result<Response, ApiError> {
    renew(&key, &session, Space::Locks, &body).await
}

/// Takes a place in the queue of a lock, without waiting for the grant.
#[utoipa::path(
    post,
    path = "/v1/locks/{key}/enqueue",
    tag = "locks",
    operation_id = "enqueue_lock",
    params(InKey, NeedsSession),
    request_body = Option<Enqueue>,
    responses(
        (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody),
        EnqueueConflict,
        SessionGone,
        Refusals
    )
)]
async fn enqueue_lock(
    key: Key,
    InSession(session): InSession,
    body: Option<Json<Enqueue>>,
) -> Result<Response, ApiError> {
    let body = body.map_or_else(Enqueue::default, |Json(body)| body);
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    enqueue(&key, &session, Mode::Mutex, lease).await
}

/// Waits for the grant of an enqueued request: a long poll.
#[utoipa::path(
    post,
    path = "/v1/locks/{key}/wait",
    tag = "locks",
    operation_id = "wait_lock",
    params(InKey, NeedsSession),
    request_body = Wait,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        WaitConflict,
        SessionGone,
        Refusals
    )
)]
async fn wait_lock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Wait>,
) -> Result<Response, ApiError> {
    wait(&key, &session, Space::Locks, &body).await
}

/// Acquires one of the slots of a semaphore: a long poll.
#[utoipa::path(
    post,
    path = "/v1/semaphores/{key}",
    tag = "semaphores",
    operation_id = "acquire_semaphore",
    params(InKey, NeedsSession),
    request_body = AcquireSemaphore,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        AcquireConflict,
        SessionGone,
        Refusals
    )
)]
async fn acquire_semaphore(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<AcquireSemaphore>,
) -> Result<Response, ApiError> {
    acquire(&key, &session, Mode::Semaphore { limit: fields::limit(body.limit)? }, body.times()?)
        .await
}

/// Gives a hold back.
#[utoipa::path(
    post,
    path = "/v1/semaphores/{key}/release",
    tag = "semaphores",
    operation_id = "release_semaphore",
    params(InKey, NeedsSession),
    request_body = Release,
    responses((status = 204, description = "Done."), NotHeld, SessionGone, Refusals)
)]
async fn release_semaphore(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Release>,
) -> Result<Response, ApiError> {
    release(&key, &session, Space::Semaphores, &body, false).await
}

/// Restarts the lease of a hold.
#[utoipa::path(
    post,
    path = "/v1/semaphores/{key}/renew",
    tag = "semaphores",
    operation_id = "renew_semaphore",
    params(InKey, NeedsSession),
    request_body = Renew,
    responses(
        (status = 200, description = "The lease begins again.", body = RenewedBody),
        NotHeld,
        SessionGone,
        Refusals
    )
)]
async fn renew_semaphore(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Renew>,
) -> Result<Response, ApiError> {
    renew(&key, &session, Space::Semaphores, &body).await
}

/// Takes a place in the queue of a semaphore, without waiting for the grant.
#[utoipa::path(
    post,
    path = "/v1/semaphores/{key}/enqueue",
    tag = "semaphores",
    operation_id = "enqueue_semaphore",
    params(InKey, NeedsSession),
    request_body = EnqueueSemaphore,
    responses(
        (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody),
        EnqueueConflict,
        SessionGone,
        Refusals
    )
)]
async fn enqueue_semaphore(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<EnqueueSemaphore>,
) -> Result<Response, ApiError> {
    let mode = Mode::Semaphore { limit: fields::limit(body.limit)? };
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    enqueue(&key, &session, mode, lease).await
}

/// Waits for the grant of an enqueued request: a long poll.
#[utoipa::path(
    post,
    path = "/v1/semaphores/{key}/wait",
    tag = "semaphores",
    operation_id = "wait_semaphore",
    params(InKey, NeedsSession),
    request_body = Wait,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        WaitConflict,
        SessionGone,
        Refusals
    )
)]
async fn wait_semaphore(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Wait>,
) -> Result<Response, ApiError> {
    wait(&key, &session, Space::Semaphores, &body).await
}

/// Acquires a read-write lock for reading: a long poll.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/read",
    tag = "rwlocks",
    operation_id = "acquire_read",
    params(InKey, NeedsSession),
    request_body = Acquire,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        AcquireConflict,
        SessionGone,
        Refusals
    )
)]
async fn acquire_read(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Acquire>,
) -> Result<Response, ApiError> {
    acquire(&key, &session, Mode::Read, body.times()?).await
}

/// Acquires a read-write lock for writing: a long poll.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/write",
    tag = "rwlocks",
    operation_id = "acquire_write",
    params(InKey, NeedsSession),
    request_body = Acquire,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        AcquireConflict,
        SessionGone,
        Refusals
    )
)]
async fn acquire_write(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Acquire>,
) -> Result<Response, ApiError> {
    acquire(&key, &session, Mode::Write, body.times()?).await
}

/// Takes a reader's place in the queue, without waiting for the grant.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/read/enqueue",
    tag = "rwlocks",
    operation_id = "enqueue_read",
    params(InKey, NeedsSession),
    request_body = Option<Enqueue>,
    responses(
        (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody),
        EnqueueConflict,
        SessionGone,
        Refusals
    )
)]
async fn enqueue_read(
    key: Key,
    InSession(session): InSession,
    body: Option<Json<Enqueue>>,
) -> Result<Response, ApiError> {
    let body = body.map_or_else(Enqueue::default, |Json(body)| body);
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    enqueue(&key, &session, Mode::Read, lease).await
}

/// Takes a writer's place in the queue, without waiting for the grant.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/write/enqueue",
    tag = "rwlocks",
    operation_id = "enqueue_write",
    params(InKey, NeedsSession),
    request_body = Option<Enqueue>,
    responses(
        (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody),
        EnqueueConflict,
        SessionGone,
        Refusals
    )
)]
async fn enqueue_write(
    key: Key,
    InSession(session): InSession,
    body: Option<Json<Enqueue>>,
) -> Result<Response, ApiError> {
    let body = body.map_or_else(Enqueue::default, |Json(body)| body);
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    enqueue(&key, &session, Mode::Write, lease).await
}

/// Waits for the grant of an enqueued request: a long poll.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/wait",
    tag = "rwlocks",
    operation_id = "wait_rwlock",
    params(InKey, NeedsSession),
    request_body = Wait,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        WaitConflict,
        SessionGone,
        Refusals
    )
)]
async fn wait_rwlock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Wait>,
) -> Result<Response, ApiError> {
    wait(&key, &session, Space::Locks, &body).await
}

/// Gives a hold back.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/release",
    tag = "rwlocks",
    operation_id = "release_rwlock",
    params(InKey, NeedsSession),
    request_body = Release,
    responses((status = 204, description = "Done."), NotHeld, SessionGone, Refusals)
)]
async fn release_rwlock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Release>,
) -> Result<Response, ApiError> {
    release(&key, &session, Space::Locks, &body, false).await
}

/// Restarts the lease of a hold.
#[utoipa::path(
    post,
    path = "/v1/rwlocks/{key}/renew",
    tag = "rwlocks",
    operation_id = "renew_rwlock",
    params(InKey, NeedsSession),
    request_body = Renew,
    responses(
        (status = 200, description = "The lease begins again.", body = RenewedBody),
        NotHeld,
        SessionGone,
        Refusals
    )
)]
async fn renew_rwlock(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Renew>,
) -> Result<Response, ApiError> {
    renew(&key, &session, Space::Locks, &body).await
}

/// Stands for election and waits to lead: a long poll.
#[utoipa::path(
    post,
    path = "/v1/elections/{key}",
    tag = "elections",
    operation_id = "campaign",
    params(InKey, NeedsSession),
    request_body = Acquire,
    responses(
        (status = 200, description = "Granted, or not in time.", body = GrantBody),
        AcquireConflict,
        SessionGone,
        Refusals
    )
)]
async fn campaign(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Acquire>,
) -> Result<Response, ApiError> {
    acquire(&key, &session, Mode::Election, body.times()?).await
}

/// Stops leading.
#[utoipa::path(
    post,
    path = "/v1/elections/{key}/resign",
    tag = "elections",
    operation_id = "resign",
    params(InKey, NeedsSession),
    request_body = Release,
    responses((status = 204, description = "Done."), NotHeld, SessionGone, Refusals)
)]
async fn resign(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Release>,
) -> Result<Response, ApiError> {
    release(&key, &session, Space::Locks, &body, true).await
}

/// Restarts the lease of a hold.
#[utoipa::path(
    post,
    path = "/v1/elections/{key}/renew",
    tag = "elections",
    operation_id = "renew_election",
    params(InKey, NeedsSession),
    request_body = Renew,
    responses(
        (status = 200, description = "The lease begins again.", body = RenewedBody),
        NotHeld,
        SessionGone,
        Refusals
    )
)]
async fn renew_election(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Renew>,
) -> Result<Response, ApiError> {
    renew(&key, &session, Space::Locks, &body).await
}
