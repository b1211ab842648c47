//! What a server says, as values: however it was carried, the rest of the library reads it in this form.

use std::time::Duration;

use dflockd_wire::{ErrorCode, LeaderEvent as News, LostReason, Op, Push, Response, Token, Unit};
#[cfg(feature = "grpc")]
use dflockd_wire::{Grant, Outcome};
use serde::de::DeserializeOwned;

use crate::error::{Error, Lost};
use crate::events::{Change, LeaderEvent, Signal};

/// What came over a connection.
pub(crate) enum Incoming {
    /// The answer to a request, with the request's number if it had one.
    Reply(Option<u64>, Reply),
    /// Something happened that was subscribed to.
    Event(Event),
    /// A hold of the session has ended without its doing.
    Lost { fence: u64, reason: Lost },
    /// The session was taken over by another connection, or has ended.
    Detached,
    /// Nothing of these; a sign of life.
    Other,
}

/// What subscriptions bring.
pub(crate) enum Event {
    Signal(Signal),
    Change(Change),
    Leader(LeaderEvent),
}

impl From<Push<'_>> for Incoming {
    fn from(push: Push<'_>) -> Self {
        match push {
            Push::Signal { channel, payload } => {
                let channel = String::from_utf8_lossy(channel).into_owned();
                Self::Event(Event::Signal(Signal { channel, payload: payload.to_vec() }))
            }
            Push::Watch { event, key } => {
                let (event, key) = (event.to_owned(), key.to_vec());
                Self::Event(Event::Change(Change { event, key }))
            }
            Push::Leader { event, .. } => match News::parse(event) {
                Some(News::Elected) => Self::Event(Event::Leader(LeaderEvent::Elected)),
                Some(News::Resigned) => Self::Event(Event::Leader(LeaderEvent::Resigned)),
                Some(News::Failover) => Self::Event(Event::Leader(LeaderEvent::Failover)),
                None => Self::Other,
            },
            Push::Lost { fence, reason, .. } => {
                let reason = LostReason::parse(reason).unwrap_or(LostReason::Expired);
                Self::Lost { fence, reason: reason.into() }
            }
        }
    }
}

/// The answer to a request: a [`Response`] that owns what it says.
pub(crate) enum Reply {
    Ok,
    /// A lock is held, at once or after waiting.
    Granted {
        token: Token,
        lease: Duration,
    },
    Renewed(Duration),
    Queued,
    Timeout,
    Nil,
    CasConflict,
    Number(i64),
    /// A value, or JSON as text.
    Value(Vec<u8>),
    /// JSON that never was text.
    #[cfg(feature = "grpc")]
    Json(serde_json::Value),
    Refused(ErrorCode),
    NotLeader(Option<String>),
    /// None of these, of which only the status word is kept: the rest may hold a token or a value.
    Unexpected(String),
}

impl From<LostReason> for Lost {
    fn from(reason: LostReason) -> Self {
        match reason {
            LostReason::Expired => Self::Expired,
            LostReason::Forced => Self::Forced,
            LostReason::Session => Self::Session,
        }
    }
}

#[cfg(feature = "grpc")]
impl From<Outcome> for Reply {
    fn from(outcome: Outcome) -> Self {
        match outcome {
            Outcome::Done | Outcome::Written(_) => Self::Ok,
            Outcome::Granted(Grant { token, lease })
            | Outcome::Acquired(Grant { token, lease }) => {
                Self::Granted { token, lease: lease.into() }
            }
            Outcome::Renewed { lease, .. } => Self::Renewed(lease.into()),
            Outcome::Queued => Self::Queued,
            Outcome::Timeout => Self::Timeout,
            Outcome::Empty => Self::Nil,
            Outcome::Conflict => Self::CasConflict,
            Outcome::Number(number) => Self::Number(number),
            Outcome::Value(value)
            | Outcome::Popped { value, .. }
            | Outcome::Entry { value, .. } => Self::Value(value.to_vec()),
            Outcome::Items(items) | Outcome::Part(items) => {
                Self::Json(items.iter().map(|item| String::from_utf8_lossy(item)).collect())
            }
            Outcome::Refused(refusal) => Self::Refused(refusal.spec().line),
            Outcome::Compacted(_) => Self::Refused(ErrorCode::Error),
        }
    }
}

impl Reply {
    /// Reads the answer to a request `op`.
    pub(crate) fn parse(op: Op, line: &[u8], unit: Unit) -> Self {
        match Response::parse(op, line, unit) {
            Some(Response::Ok) => Self::Ok,
            Some(
                Response::Granted { token, lease, .. } | Response::Acquired { token, lease, .. },
            ) => Self::Granted { token, lease: lease.into() },
            Some(Response::Renewed { remaining, .. }) => Self::Renewed(remaining.into()),
            Some(Response::Queued) => Self::Queued,
            Some(Response::Timeout) => Self::Timeout,
            Some(Response::Nil) => Self::Nil,
            Some(Response::CasConflict) => Self::CasConflict,
            Some(Response::Number(number)) => Self::Number(number),
            Some(Response::Value(value)) => Self::Value(value.to_vec()),
            Some(Response::Error(code)) => Self::Refused(code),
            Some(Response::NotLeader(leader)) => Self::NotLeader(leader.map(str::to_owned)),
            None => {
                let status = line.split(|&byte| byte == b' ').next().unwrap_or_default();
                let status = String::from_utf8_lossy(status);
                let code = ErrorCode::parse(&status);
                code.map_or_else(|| Self::Unexpected(status.into_owned()), Self::Refused)
            }
        }
    }

    /// What it means to whoever expected another answer to `command`: it is a refusal, or can not be understood.
    pub(crate) fn refusal(&self, command: &str) -> Error {
        let status = match self {
            Self::Refused(ErrorCode::Unknown) => {
                return Error::Unknown { reason: "the server does not know".to_owned() };
            }
            Self::Refused(code) => return Error::Refused(*code),
            Self::NotLeader(_) => return Error::Refused(ErrorCode::NotLeader),
            #[cfg(feature = "grpc")]
            Self::Json(_) => "ok",
            Self::Ok
            | Self::Granted { .. }
            | Self::Renewed(_)
            | Self::Number(_)
            | Self::Value(_) => "ok",
            Self::Queued => "queued",
            Self::Timeout => "timeout",
            Self::Nil => "nil",
            Self::CasConflict => "cas_conflict",
            Self::Unexpected(status) => status,
        };
        Error::Protocol { command: command.to_owned(), answer: status.to_owned() }
    }

    /// Whether it says no.
    pub(crate) fn is_refusal(&self) -> bool {
        matches!(self, Self::Refused(_) | Self::NotLeader(_) | Self::Unexpected(_))
    }

    pub(crate) fn done(&self, command: &str) -> Result<(), Error> {
        if matches!(self, Self::Ok) { Ok(()) } else { Err(self.refusal(command)) }
    }

    pub(crate) fn renewed(&self, command: &str) -> Result<Duration, Error> {
        if let Self::Renewed(left) = self { Ok(*left) } else { Err(self.refusal(command)) }
    }

    pub(crate) fn number(&self, command: &str) -> Result<i64, Error> {
        if let Self::Number(number) = self { Ok(*number) } else { Err(self.refusal(command)) }
    }

    /// A number that is never negative.
    pub(crate) fn count(&self, command: &str) -> Result<u64, Error> {
        Ok(u64::try_from(self.number(command)?).unwrap_or_default())
    }

    /// A value, or none if there is none, even after waiting.
    pub(crate) fn value(self, command: &str) -> Result<Option<Vec<u8>>, Error> {
        if matches!(self, Self::Nil | Self::Timeout) {
            return Ok(None);
        }
        if let Self::Value(value) = self { Ok(Some(value)) } else { Err(self.refusal(command)) }
    }

    /// How long it is as text.
    pub(crate) fn text_bytes(&self) -> usize {
        if let Self::Value(text) = self { text.len() } else { 0 }
    }

    /// What the JSON of a value says.
    pub(crate) fn json<T: DeserializeOwned>(&self, command: &str) -> Result<T, Error> {
        let told = match self {
            #[cfg(feature = "grpc")]
            Self::Json(json) => T::deserialize(json),
            Self::Value(text) => serde_json::from_slice(text),
            _ => return Err(self.refusal(command)),
        };
        told.map_err(|error| Error::Protocol {
            command: command.to_owned(),
            answer: error.to_string(),
        })
    }
}
