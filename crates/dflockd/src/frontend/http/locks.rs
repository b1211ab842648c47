//! Locks, semaphores, read-write locks, elections: acquire, release, renew, and the two steps of enqueue and wait.

use axum::response::Response;
use dflockd_core::{Command, Mode, Space, command};
use serde::Deserialize;
use utoipa::{OpenApi, ToSchema};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::Shared;
use super::answer::{self, GrantBody, RenewedBody};
use super::body::{Json, Key};
use super::error::ApiError;
use super::fields;
use super::openapi_parts::{
    AcquireConflict, EnqueueConflict, InKey, NeedsSession, NotHeld, Referred, Refusals,
    SessionGone, WaitConflict,
};
use super::sessions::{InSession, OwnSession};

/// Makes the routes of a list: `name: path, tag, verb(mode)`, or the space of the key where a verb needs no mode. All
/// are POST requests of a session. What a verb takes and answers is here, once for all kinds of locks; what it does is
/// in the function of the same name below.
macro_rules! lock_routes {
    ($($(#[$doc:meta])* $name:ident: $path:literal, $tag:literal, $verb:ident $of:tt;)+) => {
        pub(crate) fn routes() -> OpenApiRouter<Shared> {
            OpenApiRouter::with_openapi(Referred::openapi())$(.routes(routes!($name)))+
        }

        $(lock_routes! { @$verb $of [$(#[$doc])* $name, $path, $tag] })+
    };
    (@acquire $of:tt $route:tt) => {
        lock_routes! { acquire $of $route Json<Acquire>, [Acquire], [
            (status = 200, description = "Granted, or not in time.", body = GrantBody), AcquireConflict
        ] }
    };
    (@acquire_slot $of:tt $route:tt) => {
        lock_routes! { acquire_slot $of $route Json<AcquireSemaphore>, [AcquireSemaphore], [
            (status = 200, description = "Granted, or not in time.", body = GrantBody), AcquireConflict
        ] }
    };
    (@enqueue $of:tt $route:tt) => {
        lock_routes! { enqueue $of $route Option<Json<Enqueue>>, [Option<Enqueue>], [
            (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody), EnqueueConflict
        ] }
    };
    (@enqueue_slot $of:tt $route:tt) => {
        lock_routes! { enqueue_slot $of $route Json<EnqueueSemaphore>, [EnqueueSemaphore], [
            (status = 200, description = "Granted at once, or a place in the queue.", body = GrantBody), EnqueueConflict
        ] }
    };
    (@wait $of:tt $route:tt) => {
        lock_routes! { wait $of $route Json<Wait>, [Wait], [
            (status = 200, description = "Granted, or not in time.", body = GrantBody), WaitConflict
        ] }
    };
    (@release $of:tt $route:tt) => {
        lock_routes! { release $of $route Json<Release>, [Release], [
            (status = 204, description = "Done."), NotHeld
        ] }
    };
    (@renew $of:tt $route:tt) => {
        lock_routes! { renew $of $route Json<Renew>, [Renew], [
            (status = 200, description = "The lease begins again.", body = RenewedBody), NotHeld
        ] }
    };
    (
        $verb:ident($($of:expr),*) [$(#[$doc:meta])* $name:ident, $path:literal, $tag:literal]
        $body:ty, [$($schema:tt)+], [$($response:tt)+]
    ) => {
        $(#[$doc])*
        #[utoipa::path(
            post,
            path = $path,
            tag = $tag,
            params(InKey, NeedsSession),
            request_body = $($schema)+,
            responses($($response)+, SessionGone, Refusals)
        )]
        async fn $name(key: Key, InSession(session): InSession, body: $body) -> Result<Response, ApiError> {
            $verb(&key, &session, $($of,)* body).await
        }
    };
}

lock_routes! {
    /// Acquires a lock: a long poll.
    acquire_lock: "/v1/locks/{key}", "locks", acquire(Mode::Mutex);
    /// Gives a hold back.
    release_lock: "/v1/locks/{key}/release", "locks", release(Space::Locks, false);
    /// Restarts the lease of a hold.
    renew_lock: "/v1/locks/{key}/renew", "locks", renew(Space::Locks);
    /// Takes a place in the queue of a lock, without waiting for the grant.
    enqueue_lock: "/v1/locks/{key}/enqueue", "locks", enqueue(Mode::Mutex);
    /// Waits for the grant of an enqueued request: a long poll.
    wait_lock: "/v1/locks/{key}/wait", "locks", wait(Space::Locks);

    /// Acquires one of the slots of a semaphore: a long poll.
    acquire_semaphore: "/v1/semaphores/{key}", "semaphores", acquire_slot();
    /// Gives a hold back.
    release_semaphore: "/v1/semaphores/{key}/release", "semaphores", release(Space::Semaphores, false);
    /// Restarts the lease of a hold.
    renew_semaphore: "/v1/semaphores/{key}/renew", "semaphores", renew(Space::Semaphores);
    /// Takes a place in the queue of a semaphore, without waiting for the grant.
    enqueue_semaphore: "/v1/semaphores/{key}/enqueue", "semaphores", enqueue_slot();
    /// Waits for the grant of an enqueued request: a long poll.
    wait_semaphore: "/v1/semaphores/{key}/wait", "semaphores", wait(Space::Semaphores);

    /// Acquires a read-write lock for reading: a long poll.
    acquire_read: "/v1/rwlocks/{key}/read", "rwlocks", acquire(Mode::Read);
    /// Acquires a read-write lock for writing: a long poll.
    acquire_write: "/v1/rwlocks/{key}/write", "rwlocks", acquire(Mode::Write);
    /// Takes a reader's place in the queue, without waiting for the grant.
    enqueue_read: "/v1/rwlocks/{key}/read/enqueue", "rwlocks", enqueue(Mode::Read);
    /// Takes a writer's place in the queue, without waiting for the grant.
    enqueue_write: "/v1/rwlocks/{key}/write/enqueue", "rwlocks", enqueue(Mode::Write);
    /// Waits for the grant of an enqueued request: a long poll.
    wait_rwlock: "/v1/rwlocks/{key}/wait", "rwlocks", wait(Space::Locks);
    /// Gives a hold back.
    release_rwlock: "/v1/rwlocks/{key}/release", "rwlocks", release(Space::Locks, false);
    /// Restarts the lease of a hold.
    renew_rwlock: "/v1/rwlocks/{key}/renew", "rwlocks", renew(Space::Locks);

    /// Stands for election and waits to lead: a long poll.
    campaign: "/v1/elections/{key}", "elections", acquire(Mode::Election);
    /// Stops leading.
    resign: "/v1/elections/{key}/resign", "elections", release(Space::Locks, true);
    /// Restarts the lease of a hold.
    renew_election: "/v1/elections/{key}/renew", "elections", renew(Space::Locks);
}

/// How long to wait for a lock and for how long to have it. Each time in seconds or milliseconds, not both.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Acquire {
    /// How long to wait in the queue; 0 or nothing: only try.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    acquire_timeout_s: Option<u64>,
    /// How long to wait in the queue, in milliseconds; instead of `acquire_timeout_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    acquire_timeout_ms: Option<u64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The lease in milliseconds; instead of `lease_ttl_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// How many may hold a semaphore, how long to wait for a slot and for how long to have it. Each time in seconds or
/// milliseconds, not both.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct AcquireSemaphore {
    /// How many may hold it. All who use the key name the same number.
    #[schema(required = true, value_type = i64, minimum = 1, maximum = 1048576)]
    limit: Option<i64>,
    /// How long to wait in the queue; 0 or nothing: only try.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    acquire_timeout_s: Option<u64>,
    /// How long to wait in the queue, in milliseconds; instead of `acquire_timeout_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    acquire_timeout_ms: Option<u64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The lease in milliseconds; instead of `lease_ttl_s`.
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
    /// The lease in milliseconds; instead of `lease_ttl_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

/// How many may hold a semaphore, and for how long to have the slot once it is granted.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct EnqueueSemaphore {
    /// How many may hold it. All who use the key name the same number.
    #[schema(required = true, value_type = i64, minimum = 1, maximum = 1048576)]
    limit: Option<i64>,
    /// The lease; 0 or nothing: the server's default.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    lease_ttl_s: Option<u64>,
    /// The lease in milliseconds; instead of `lease_ttl_s`.
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
    /// How long to wait, in milliseconds; instead of `timeout_s`.
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
    /// The lease in milliseconds; instead of `lease_ttl_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    lease_ttl_ms: Option<u64>,
}

async fn acquire(
    key: &Key,
    session: &OwnSession,
    mode: Mode,
    Json(body): Json<Acquire>,
) -> Result<Response, ApiError> {
    let wait = fields::wait(body.acquire_timeout_s, body.acquire_timeout_ms)?;
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    claim(session, command::Acquire { key, mode, wait, lease, salt: 0 }).await
}

async fn acquire_slot(
    key: &Key,
    session: &OwnSession,
    Json(body): Json<AcquireSemaphore>,
) -> Result<Response, ApiError> {
    let mode = Mode::Semaphore { limit: fields::count(body.limit)? };
    let times = Acquire {
        acquire_timeout_s: body.acquire_timeout_s,
        acquire_timeout_ms: body.acquire_timeout_ms,
        lease_ttl_s: body.lease_ttl_s,
        lease_ttl_ms: body.lease_ttl_ms,
    };
    acquire(key, session, mode, Json(times)).await
}

async fn enqueue(
    key: &Key,
    session: &OwnSession,
    mode: Mode,
    body: Option<Json<Enqueue>>,
) -> Result<Response, ApiError> {
    let body = body.map_or_else(Enqueue::default, |Json(body)| body);
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    claim(session, command::Enqueue { key, mode, lease, salt: 0 }).await
}

async fn enqueue_slot(
    key: &Key,
    session: &OwnSession,
    Json(body): Json<EnqueueSemaphore>,
) -> Result<Response, ApiError> {
    let mode = Mode::Semaphore { limit: fields::count(body.limit)? };
    let lease = Enqueue { lease_ttl_s: body.lease_ttl_s, lease_ttl_ms: body.lease_ttl_ms };
    enqueue(key, session, mode, Some(Json(lease))).await
}

async fn wait(
    key: &Key,
    session: &OwnSession,
    space: Space,
    Json(body): Json<Wait>,
) -> Result<Response, ApiError> {
    let wait = fields::wait(body.timeout_s, body.timeout_ms)?;
    claim(session, command::Wait { key, space, wait }).await
}

/// Executes a command that may give the session a lock.
async fn claim<'a>(
    session: &OwnSession,
    command: impl Into<Command<'a>>,
) -> Result<Response, ApiError> {
    answer::grant(session.claim().await?.call(command.into()).await?)
}

async fn release(
    key: &Key,
    session: &OwnSession,
    space: Space,
    resign: bool,
    Json(body): Json<Release>,
) -> Result<Response, ApiError> {
    let token = fields::token(body.token.as_deref())?;
    let claim = session.claim().await?;
    let answer =
        claim.call(Command::Release(command::Release { key, space, token, resign })).await?;
    answer::done(answer.outcome())
}

async fn renew(
    key: &Key,
    session: &OwnSession,
    space: Space,
    Json(body): Json<Renew>,
) -> Result<Response, ApiError> {
    let token = fields::token(body.token.as_deref())?;
    let lease = fields::lasting(body.lease_ttl_s, body.lease_ttl_ms)?;
    let claim = session.claim().await?;
    answer::renewed(&claim.call(Command::Renew(command::Renew { key, space, token, lease })).await?)
}
