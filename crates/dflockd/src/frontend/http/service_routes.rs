//! How the server is: probes, stats, metrics, and the document of the interface.

use std::sync::atomic::Ordering;

use axum::body::Body;
use axum::extract::State;
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::body::{json_response, reply, reply_with};
use super::error::ApiError;
use super::{Room, Shared};
use crate::frontend::auth::Asker;
use crate::metrics;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::default()
        .routes(routes!(health))
        .routes(routes!(ready))
        .routes(routes!(stats))
        .routes(routes!(metrics))
        .routes(routes!(document))
}

/// How a server is.
#[derive(Serialize, ToSchema)]
struct Condition {
    /// `ok`, `draining` or `not_ready`.
    status: &'static str,
    /// What a member of a cluster is that holds no vote over the state: `learner`, `witness` or `joining`.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
}

/// Whether the process answers
#[utoipa::path(
    get,
    path = "/health",
    tag = "service",
    responses((status = 200, description = "It does", body = Condition)),
)]
async fn health() -> Response {
    reply(&Condition { status: "ok", role: None })
}

/// Whether requests should be sent here
#[utoipa::path(
    get,
    path = "/ready",
    tag = "service",
    responses(
        (status = 200, description = "They should", body = Condition),
        (status = 503, description = "`draining` or `not_ready`", body = Condition),
    ),
)]
async fn ready(State(app): State<Shared>) -> Response {
    let engine = &app.service.engine;
    let role = match engine.view() {
        Some(_) if engine.is_witness() => Some("witness"),
        Some(view) if view.status.is_none() => Some("joining"),
        Some(view) => view.is_learner().then_some("learner"),
        None => None,
    };
    let unavailable =
        |status| reply_with(StatusCode::SERVICE_UNAVAILABLE, &Condition { status, role });
    if app.leaving.load(Ordering::SeqCst) || app.service.is_draining() {
        return unavailable("draining");
    }
    if !app.is_ready() {
        return unavailable("not_ready");
    }
    reply(&Condition { status: "ok", role })
}

/// The state, as `stats` of the line protocol shows it
#[utoipa::path(
    get,
    path = "/v1/stats",
    tag = "service",
    responses((status = 200, description = "The state", body = Object)),
)]
async fn stats(State(app): State<Shared>, asker: Asker, room: Room) -> Result<Response, ApiError> {
    let asked = app.service.engine.clock().now().0;
    let service = std::sync::Arc::clone(&app.service);
    let work = move || {
        let mut line = service.stats_for(&asker.who, asked).to_vec();
        line.push(b'\n');
        Some(Ok(line))
    };
    room.inspect(&app, work).await
}

/// Figures for Prometheus
#[utoipa::path(
    get,
    path = "/metrics",
    tag = "service",
    responses((status = 200, description = "Text format", content_type = "text/plain", body = String)),
)]
async fn metrics(State(app): State<Shared>) -> Result<Response, ApiError> {
    let figures = std::sync::Arc::clone(&app.service.figures);
    let text = figures.wait(move || app.service.metrics.encode(&app.service)).await;
    let text = text.ok_or_else(ApiError::internal)?;
    let mut response = Response::new(Body::from(text));
    let kind = HeaderValue::from_static(metrics::CONTENT_TYPE);
    response.headers_mut().insert(CONTENT_TYPE, kind);
    Ok(response)
}

/// This document
#[utoipa::path(
    get,
    path = "/v1/openapi.json",
    tag = "service",
    responses((status = 200, description = "OpenAPI 3.1", body = Object)),
)]
async fn document(State(app): State<Shared>) -> Response {
    let text = app.document.get().cloned().unwrap_or_default();
    let mut response = json_response(StatusCode::OK, Body::from(text));
    let cache = HeaderValue::from_static("public, max-age=60");
    response.headers_mut().insert(CACHE_CONTROL, cache);
    response
}
