//! The HTTP interface: JSON over the same engine as the line protocol, one queue per key over both.
//!
//! `listen` has the sockets, `pace` their time limits, `layers` what every request passes (`cors`, `origin`, `rate`),
//! `sessions` who asks, `body` what comes in and goes out, `error` the refusals, `openapi` the description of it all.
//! The routes are in the other files.

mod admin;
mod answer;
pub(crate) mod body;
mod cors;
mod error;
pub(crate) mod fields;
mod inspection;
mod layers;
mod listen;
mod locks;
mod openapi;
mod openapi_parts;
mod origin;
mod pace;
mod service_routes;
mod session_routes;
mod sessions;
mod streams;
mod ui;
mod values;

use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::FromRequestParts;
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::response::Response;
use bytes::Bytes;
use dflockd_engine::Api;

use self::cors::Cors;
use self::error::ApiError;
use self::layers::ApiLayer;
pub(crate) use self::listen::listen;
use self::origin::Hosts;
use self::sessions::Turn;
use crate::audit::By;
use crate::config::Config;
pub(crate) use crate::frontend::auth::Peer;
use crate::frontend::auth::{Asker, Denied, Origin};
use crate::frontend::budget::{Budget, Pieces};
use crate::frontend::caller::{Caller, Common};
use crate::frontend::rate::RateLimit;
use crate::frontend::sessions::SessionStore;
use crate::service::{ANSWER_BYTES_MAX, Service};

/// What all requests share.
pub(crate) struct App {
    pub(crate) service: Arc<Service>,
    pub(crate) sessions: SessionStore<Turn>,
    /// Unit of the idle time of sessions, zero if they do not end by themselves.
    pub(crate) idle: Duration,
    /// The server is about to shut down: nobody new should come.
    pub(crate) leaving: AtomicBool,
    /// Time a client has for the body of a request.
    pub(crate) read_timeout: Duration,
    /// How often a comment is written to event streams; zero is never.
    pub(crate) sse_ping: Duration,
    /// Whether HTTP/2 is spoken without TLS.
    pub(crate) h2c: bool,
    /// Whether the server listens on all addresses of the machine.
    pub(crate) is_everywhere: bool,
    hosts: Hosts,
    cors: Cors,
    rate_limit: Option<RateLimit>,
    /// For requests that need no session.
    common: Common,
    /// The OpenAPI document, once the routes are known.
    document: OnceLock<Bytes>,
}

/// The state of all handlers.
pub(crate) type Shared = Arc<App>;

impl App {
    pub(crate) fn new(config: &Config, service: &Arc<Service>) -> Self {
        Self {
            sessions: sessions::store(config, service),
            idle: config.http_session_idle_timeout,
            leaving: AtomicBool::new(false),
            read_timeout: config.read_timeout,
            sse_ping: config.sse_ping(),
            h2c: config.http_h2c,
            is_everywhere: config.http_listens_everywhere(),
            hosts: Hosts::new(config),
            cors: Cors::new(&config.http_cors_allowed_origins),
            rate_limit: RateLimit::new(config.http_rate_limit_per_ip, config.http_rate_limit_burst),
            common: Common::new(service, Api::Http, "http"),
            document: OnceLock::new(),
            service: Arc::clone(service),
        }
    }

    /// The session of requests that have none.
    pub(crate) fn common(&self) -> Arc<Caller> {
        self.common.get()
    }

    /// Whether requests are answered here now.
    pub(crate) fn is_ready(&self) -> bool {
        self.service.engine.is_ready()
    }
}

/// All routes, behind the gate.
pub(crate) fn router(app: Shared) -> Router {
    let (router, document) = session_routes::routes()
        .merge(locks::routes())
        .merge(values::routes())
        .merge(streams::routes())
        .merge(inspection::routes())
        .merge(admin::routes())
        .merge(service_routes::routes())
        .split_for_parts();
    app.document.get_or_init(|| openapi::text(document));
    router
        .merge(ui::routes())
        .fallback(async || ApiError::not_found())
        .method_not_allowed_fallback(async || ApiError::method_not_allowed())
        .layer(ApiLayer(Arc::clone(&app)))
        .with_state(app)
}

/// What the connection of a request may cost, as an argument of a handler.
pub(crate) struct Room(pub(crate) Arc<Budget>);

impl FromRequestParts<Shared> for Room {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        let budget = parts.extensions.get::<Arc<Budget>>().cloned();
        budget.map(Self).ok_or_else(ApiError::internal)
    }
}

impl Room {
    /// Looks at the state and answers with JSON: one look at a time for each connection and few for the server, on a
    /// thread that may be busy. None: nobody can say.
    pub(crate) async fn inspect(
        &self,
        app: &App,
        work: impl FnOnce() -> Option<Result<Vec<u8>, ApiError>> + Send + 'static,
    ) -> Result<Response, ApiError> {
        let (_turn, room) = self.0.inspection(ANSWER_BYTES_MAX).await;
        let made = app.service.looks.wait(work).await.ok_or_else(ApiError::internal)?;
        let text = made.ok_or_else(ApiError::unavailable)??;
        Ok(body::json_response(StatusCode::OK, Body::new(Pieces::new(text, room))))
    }

    /// Reads something that is at hand and answers with JSON, when there is room for so many bytes.
    pub(crate) async fn read(
        &self,
        bytes_max: usize,
        reading: impl Future<Output = Result<Vec<u8>, ApiError>>,
    ) -> Result<Response, ApiError> {
        let room = self.0.answer(bytes_max).await;
        let text = reading.await?;
        Ok(body::json_response(StatusCode::OK, Body::new(Pieces::new(text, room))))
    }
}

impl FromRequestParts<Shared> for Peer {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        parts.extensions.get::<Self>().copied().ok_or_else(ApiError::internal)
    }
}

impl FromRequestParts<Shared> for Asker {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let peer = Peer::from_request_parts(parts, app).await?;
        Ok(Self::new(&app.service, Api::Http, peer))
    }
}

/// Proof that the request comes from an operator, and who that is. The first argument of a handler, so that nothing is
/// looked at before.
pub(crate) struct Admin(By);

impl FromRequestParts<Shared> for Admin {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let origin = parts.extensions.get::<Origin>().ok_or_else(ApiError::internal)?;
        let admitted = app.service.admit_admin(Api::Http, origin, &parts.headers).await;
        let by = |pass| By::address(Api::Http, origin.address, app.service.auth.who(pass).name());
        admitted.map(|pass| Self(by(pass))).map_err(|denied| match denied {
            Denied::Wrong => ApiError::admin_unauthorized(),
            Denied::TooMany => ApiError::auth_throttled(),
            Denied::Disabled => ApiError::admin_disabled(),
            Denied::Unaudited => ApiError::unavailable(),
        })
    }
}
