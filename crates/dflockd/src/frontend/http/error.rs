//! What a request is told when it is refused: `{"error":"<code>","detail":"<text>"}` and a status.
//!
//! Codes are stable, details are prose. No detail ever holds a token, a value or a payload.

use std::borrow::Cow;

use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use dflockd_core::{Refusal, RefusalSpec};
use serde::Serialize;
use utoipa::ToSchema;

use super::body;
use crate::frontend::caller::SessionEnded;

/// When a request may come again, in whole seconds as the header wants it.
const RETRY_SECONDS: HeaderValue = HeaderValue::from_static("1");

/// A refusal.
#[derive(Clone, Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) code: &'static str,
    pub(crate) detail: Option<Cow<'static, str>>,
    /// Boxed, because nearly all have none and results should stay small.
    pub(crate) headers: Option<Box<HeaderMap>>,
}

/// The body of every refusal.
#[derive(Serialize, ToSchema)]
#[schema(as = Error)]
pub(crate) struct ErrorBody {
    /// What is wrong, for programs.
    error: &'static str,
    /// What is wrong, for people.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, nullable = false)]
    detail: Option<Cow<'static, str>>,
}

impl ApiError {
    pub(crate) fn new(status: StatusCode, code: &'static str) -> Self {
        Self { status, code, detail: None, headers: None }
    }

    /// With a text for people.
    #[must_use]
    pub(crate) fn because(mut self, detail: impl Into<Cow<'static, str>>) -> Self {
        self.detail = Some(detail.into());
        self
    }

    /// With one more header.
    #[must_use]
    pub(crate) fn with_header(mut self, name: HeaderName, value: HeaderValue) -> Self {
        self.headers.get_or_insert_default().insert(name, value);
        self
    }

    pub(crate) fn bad_request(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "bad_request").because(detail)
    }

    pub(crate) fn unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "unauthorized")
    }

    /// The token was right once.
    pub(crate) fn revoked() -> Self {
        Self::unauthorized().because("the token is no longer valid")
    }

    /// Too many tokens were wrong.
    pub(crate) fn auth_throttled() -> Self {
        Self::rate_limited()
            .because("too many wrong tokens from this address")
            .with_header(RETRY_AFTER, RETRY_SECONDS)
    }

    pub(crate) fn admin_unauthorized() -> Self {
        Self::new(StatusCode::UNAUTHORIZED, "admin_unauthorized")
    }

    pub(crate) fn admin_disabled() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "admin_disabled")
            .because("no admin token is configured")
    }

    pub(crate) fn not_found() -> Self {
        Self::new(StatusCode::NOT_FOUND, "not_found")
    }

    pub(crate) fn not_held() -> Self {
        Self::refused(Refusal::NotHeld)
    }

    pub(crate) fn cluster_disabled() -> Self {
        Self::new(StatusCode::NOT_FOUND, "cluster_disabled")
    }

    pub(crate) fn method_not_allowed() -> Self {
        Self::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed")
    }

    pub(crate) fn session_gone() -> Self {
        Self::new(StatusCode::GONE, "session_gone")
    }

    /// The request is for a host that this server is not known as.
    pub(crate) fn host_not_allowed() -> Self {
        Self::new(StatusCode::MISDIRECTED_REQUEST, "host_not_allowed").because(
            "without a token the Host must be a loopback address or one of --http-allowed-hosts",
        )
    }

    /// The page of another origin asks.
    pub(crate) fn origin_not_allowed() -> Self {
        Self::new(StatusCode::FORBIDDEN, "origin_not_allowed")
            .because("without a token pages of other origins need --http-cors-allowed-origins")
    }

    /// The body says to be something else than JSON.
    pub(crate) fn unsupported_media_type() -> Self {
        Self::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type")
            .because("without a token the Content-Type of a body must be application/json")
    }

    pub(crate) fn rate_limited() -> Self {
        Self::new(StatusCode::TOO_MANY_REQUESTS, "rate_limited")
    }

    pub(crate) fn max_sessions() -> Self {
        Self::refused(Refusal::MaxSessions)
    }

    pub(crate) fn max_sessions_per_ip() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "max_sessions_per_ip")
    }

    pub(crate) fn session_create_failed() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "session_create_failed")
    }

    pub(crate) fn draining() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "draining")
    }

    /// Nobody can say or decide it now; nothing has been done.
    pub(crate) fn unavailable() -> Self {
        Self::refused(Refusal::Unavailable)
    }

    /// Somebody else must be asked, at these addresses if they are known.
    pub(crate) fn not_leader(line: Option<&str>, http: Option<&str>) -> Self {
        let mut error = Self::new(StatusCode::SERVICE_UNAVAILABLE, "not_leader");
        for (name, address) in [("x-dflockd-leader", line), ("x-dflockd-leader-http", http)] {
            if let Some(value) = address.and_then(|text| HeaderValue::from_str(text).ok()) {
                error = error.with_header(HeaderName::from_static(name), value);
            }
        }
        error
    }

    /// What never should happen.
    pub(crate) fn internal() -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal")
    }

    /// What the core said no to.
    pub(crate) fn refused(refusal: Refusal) -> Self {
        let RefusalSpec { http_status, http_error, advice, text, .. } = *refusal.spec();
        let status = StatusCode::from_u16(http_status).expect("the table has statuses only");
        let refused = Self::new(status, http_error).because(text);
        if advice.may_retry() { refused.with_header(RETRY_AFTER, RETRY_SECONDS) } else { refused }
    }
}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        Self::refused(refusal)
    }
}

impl From<SessionEnded> for ApiError {
    fn from(_: SessionEnded) -> Self {
        Self::session_gone()
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let told = ErrorBody { error: self.code, detail: self.detail };
        let mut response = body::reply_with(self.status, &told);
        if let Some(headers) = self.headers {
            response.headers_mut().extend(*headers);
        }
        response
    }
}
