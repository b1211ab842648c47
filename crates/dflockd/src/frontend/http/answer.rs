//! Outcomes as JSON. A body that gives something away takes it back if nobody takes the body.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that a request does not hope for is refused alike"
)]

use axum::body::Body;
use axum::http::StatusCode;
use axum::response::Response;
use dflockd_core::{Grant, Outcome, Span, Token};
use serde::{Serialize, Serializer};
use utoipa::ToSchema;

use super::body::{json_line, json_response, no_content, reply};
use super::error::ApiError;
use crate::frontend::caller::Answer;
use crate::frontend::giveback::Giving;

/// The answer to a request for a lock. Without a grant there is only the status.
#[derive(Serialize, ToSchema)]
#[schema(as = Grant)]
pub(crate) struct GrantBody {
    /// `ok` or `acquired`: granted. `queued`: it has a place in the queue. `timeout`: it was not granted in time.
    #[schema(value_type = String, example = "ok")]
    status: &'static str,
    /// The credential of the hold.
    #[serde(skip_serializing_if = "Option::is_none", serialize_with = "token_text")]
    #[schema(value_type = Option<String>, pattern = "^[0-9a-f]{32}$")]
    token: Option<Token>,
    /// The lease in whole seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ttl_s: Option<u64>,
    /// The lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    lease_ttl_ms: Option<u64>,
    /// The number of the grant, larger for later ones of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    fence: Option<Decimal>,
    /// For how long the hold lasts if it is not renewed, counted from when the request was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    valid_for_ms: Option<u64>,
}

/// The answer to a renewal.
#[derive(Serialize, ToSchema)]
#[schema(as = Renewed)]
pub(crate) struct RenewedBody {
    /// The new lease in whole seconds.
    remaining_s: u64,
    /// The new lease.
    remaining_ms: u64,
    /// The number of the grant.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    fence: Decimal,
}

/// Nothing but how it ended.
#[derive(Serialize, ToSchema)]
#[schema(as = Status)]
pub(crate) struct StatusBody {
    /// How it ended.
    #[schema(value_type = String, example = "ok")]
    pub(crate) status: &'static str,
}

/// A number that is written as a string.
#[derive(Clone, Copy)]
pub(crate) struct Decimal(pub(crate) u64);

impl Serialize for Decimal {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&self.0)
    }
}

fn token_text<S: Serializer>(token: &Option<Token>, to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&token.unwrap_or(Token::NONE).text())
}

impl GrantBody {
    fn new(status: &'static str, grant: Option<Grant>) -> Self {
        let token = grant.map(|grant| grant.token);
        let lease = grant.map(|grant| millis(grant.lease));
        Self {
            status,
            token,
            lease_ttl_s: lease.map(|lease| lease / 1000),
            lease_ttl_ms: lease,
            fence: token.map(|token| Decimal(token.fence.0)),
            valid_for_ms: lease,
        }
    }
}

/// The answer to a request for a lock.
pub(crate) fn grant(answer: Answer) -> Result<Response, ApiError> {
    let told = match answer.outcome() {
        Outcome::Granted(grant) => GrantBody::new("ok", Some(*grant)),
        Outcome::Acquired(grant) => GrantBody::new("acquired", Some(*grant)),
        Outcome::Queued => GrantBody::new("queued", None),
        Outcome::Timeout => GrantBody::new("timeout", None),
        other => return Err(refused(other)),
    };
    Ok(giving(answer, &told))
}

/// The answer to a renewal.
pub(crate) fn renewed(answer: &Answer) -> Result<Response, ApiError> {
    match answer.outcome() {
        Outcome::Renewed { fence, lease } => {
            let lease = millis(*lease);
            let fence = Decimal(fence.0);
            Ok(reply(&RenewedBody { remaining_s: lease / 1000, remaining_ms: lease, fence }))
        }
        // Whoever renews too late holds nothing, whatever it was that ended the hold.
        Outcome::Refused(dflockd_core::Refusal::LeaseExpired) => {
            Err(ApiError::not_held().because("the lease has ended"))
        }
        other => Err(refused(other)),
    }
}

/// The answer to what can only succeed.
pub(crate) fn done(outcome: &Outcome) -> Result<Response, ApiError> {
    match outcome {
        Outcome::Done | Outcome::Written(_) => Ok(no_content()),
        other => Err(refused(other)),
    }
}

/// The number that a request is answered with.
pub(crate) fn number(outcome: &Outcome) -> Result<i64, ApiError> {
    match outcome {
        Outcome::Number(number) => Ok(*number),
        other => Err(refused(other)),
    }
}

/// An answer that was not hoped for.
pub(crate) fn refused(outcome: &Outcome) -> ApiError {
    if let Outcome::Refused(refusal) = outcome {
        return ApiError::refused(*refusal);
    }
    tracing::error!("an outcome that the request can not have");
    ApiError::internal()
}

/// JSON that tells an answer. If nobody takes it, what the answer gave is given back.
pub(crate) fn giving(answer: Answer, told: &impl Serialize) -> Response {
    if !answer.gives() {
        return reply(told);
    }
    let body = Giving::new(Body::from(json_line(told)), Some(answer));
    json_response(StatusCode::OK, Body::new(body))
}

/// Whole milliseconds.
pub(crate) fn millis(span: Span) -> u64 {
    span.0 / 1_000_000
}
