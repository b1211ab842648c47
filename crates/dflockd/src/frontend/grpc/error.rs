//! What a call is told when it is refused: a canonical code, and in the details a [`Reason`] for programs.
//!
//! No message ever holds a token, a value or a payload.

use bytes::Bytes;
use dflockd_core::{Advice, Outcome, RETRY_AFTER_MS, Refusal, RefusalSpec, Revision};
use dflockd_wire::grpc::{ErrorInfo, Reason};
use prost::Message;
use tonic::{Code, Status};

use crate::frontend::caller::SessionEnded;

/// When one that came too often may: rates are per second.
const RATE_RETRY_MS: u64 = 1000;
/// Where the type of the details is found.
const TYPE_URL: &str = "type.googleapis.com/dflockd.v1.ErrorInfo";

/// A refusal before it becomes a [`Status`].
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Refused {
    code: Code,
    message: String,
    info: ErrorInfo,
}

/// What `google.rpc.Status` looks like on the wire.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<prost_types::Any>,
}

impl Refused {
    pub(crate) fn new(code: Code, reason: Reason, message: impl Into<String>) -> Self {
        let info = ErrorInfo { reason: reason.into(), ..ErrorInfo::default() };
        Self { code, message: message.into(), info }
    }

    pub(crate) fn bad_request(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, Reason::BadRequest, message)
    }

    pub(crate) fn unauthenticated() -> Self {
        Self::new(Code::Unauthenticated, Reason::Unauthenticated, "a valid auth token is required")
    }

    /// The token was right once.
    pub(crate) fn revoked() -> Self {
        let text = "the auth token is no longer valid";
        Self::new(Code::Unauthenticated, Reason::Unauthenticated, text).perhaps()
    }

    /// The admin token was right once.
    pub(crate) fn admin_revoked() -> Self {
        let text = "the admin token is no longer valid";
        Self::new(Code::PermissionDenied, Reason::NotAdmin, text)
    }

    /// Too many calls, or too many tokens that were wrong.
    pub(crate) fn rate_limited(message: &'static str) -> Self {
        let mut refused = Self::new(Code::ResourceExhausted, Reason::RateLimited, message);
        refused.info.retry_after_ms = RATE_RETRY_MS;
        refused
    }

    pub(crate) fn session_gone() -> Self {
        Self::new(Code::NotFound, Reason::SessionGone, "there is no such session")
    }

    pub(crate) fn not_found(message: &'static str) -> Self {
        Self::new(Code::NotFound, Reason::NotFound, message)
    }

    pub(crate) fn max_sessions() -> Self {
        Self::by_core(Refusal::MaxSessions)
    }

    pub(crate) fn draining() -> Self {
        Self::new(Code::Unavailable, Reason::Draining, "the server is shutting down")
    }

    /// Nobody can say or decide it now; nothing has been done.
    pub(crate) fn unavailable() -> Self {
        Self::by_core(Refusal::Unavailable)
    }

    /// Nobody knows what came of it.
    pub(crate) fn unknown() -> Self {
        Self::by_core(Refusal::Forgotten)
    }

    /// The client said that it waits no longer.
    pub(crate) fn too_late() -> Self {
        Self::new(Code::DeadlineExceeded, Reason::Unspecified, "the deadline has passed").perhaps()
    }

    /// Somebody else must be asked, at these addresses if they are known.
    pub(crate) fn not_leader(line: Option<&str>, grpc: Option<&str>) -> Self {
        let text = "not the leader";
        let mut refused = Self::new(Code::Unavailable, Reason::NotLeader, text);
        refused.info.leader = line.unwrap_or_default().to_owned();
        refused.info.leader_grpc = grpc.unwrap_or_default().to_owned();
        refused
    }

    pub(crate) fn internal() -> Self {
        Self::new(Code::Internal, Reason::Internal, "internal error")
    }

    /// Changes up to a revision can not be told.
    pub(crate) fn missed(code: Code, reason: Reason, message: &str, upto: Revision) -> Self {
        let mut refused = Self::new(code, reason, message);
        refused.info.revision = upto.0;
        refused
    }

    /// It may have had its effect.
    #[must_use]
    pub(crate) fn perhaps(mut self) -> Self {
        self.info.may_have_applied = true;
        self
    }

    /// A later try may succeed.
    #[must_use]
    fn again(mut self) -> Self {
        self.info.retry_after_ms = RETRY_AFTER_MS;
        self
    }

    /// What the core said no to.
    pub(crate) fn by_core(refusal: Refusal) -> Self {
        let RefusalSpec { grpc_code, grpc_reason, advice, text, .. } = *refusal.spec();
        let reason = Reason::from_str_name(grpc_reason).expect("the table has reasons only");
        let refused = Self::new(Code::from_i32(grpc_code as i32), reason, text);
        match advice {
            Advice::Final => refused,
            Advice::Retry => refused.again(),
            Advice::Unknown => refused.again().perhaps(),
        }
    }

    /// An answer that was not hoped for.
    pub(crate) fn by(outcome: &Outcome) -> Self {
        if let Outcome::Refused(refusal) = outcome {
            return Self::by_core(*refusal);
        }
        tracing::error!("an outcome that the call can not have");
        Self::internal()
    }
}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self::by_core(refusal)
    }
}

impl From<SessionEnded> for Refused {
    fn from(_: SessionEnded) -> Self {
        Self::session_gone().perhaps()
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        let Refused { code, message, info } = refused;
        let any = prost_types::Any { type_url: TYPE_URL.to_owned(), value: info.encode_to_vec() };
        let details = RpcStatus { code: code.into(), message: message.clone(), details: vec![any] };
        Self::with_details(code, message, Bytes::from(details.encode_to_vec()))
    }
}

#[cfg(test)]
mod tests {
    use dflockd_core::REFUSALS;

    use super::*;

    #[test]
    fn every_refusal_has_its_reason_and_its_code() {
        for (refusal, spec) in REFUSALS {
            let refused = Refused::by_core(*refusal);
            assert_eq!(refused.info.reason().as_str_name(), spec.grpc_reason);
            assert_eq!(format!("{:?}", refused.code), format!("{:?}", spec.grpc_code));
            assert_eq!(refused.info.may_have_applied, spec.advice.may_have_applied());
        }
    }
}
