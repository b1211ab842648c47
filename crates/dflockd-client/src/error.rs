//! What can go wrong, and what a caller must know about it.

use dflockd_wire::ErrorCode;
use dflockd_wire::check::Invalid;

/// Why a request did not succeed.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The server can not be reached, and the request was never sent.
    #[error("server {server} can not be reached: {reason}")]
    Unreachable {
        /// Its address.
        server: String,
        /// What the attempt to connect said.
        reason: String,
    },
    /// The request was sent, and its answer did not arrive in time or at all.
    #[error("the outcome is not known: {reason}")]
    Unknown {
        /// What happened.
        reason: String,
    },
    /// The server refused the token.
    #[error("authentication failed")]
    Auth,
    /// The server said no; nothing has changed.
    #[error("refused: {}", .0.text())]
    Refused(ErrorCode),
    /// A key, value or time that the protocol can not carry.
    #[error("{0}")]
    Invalid(String),
    /// The server does not know the command, or answers in a way this library does not.
    #[error("unexpected answer to {command}: {answer}")]
    Protocol {
        /// What was asked.
        command: String,
        /// What came back.
        answer: String,
    },
    /// The client was closed.
    #[error("the client is closed")]
    Closed,
}

impl From<Invalid> for Error {
    fn from(invalid: Invalid) -> Self {
        Self::Invalid(invalid.text.to_owned())
    }
}

impl Error {
    /// Whether the request may have taken effect although it failed.
    #[must_use]
    pub fn may_have_applied(&self) -> bool {
        match self {
            Self::Unknown { .. } | Self::Protocol { .. } => true,
            Self::Refused(code) => code.may_have_applied(),
            Self::Unreachable { .. } | Self::Auth | Self::Invalid(_) | Self::Closed => false,
        }
    }

    /// Whether the same request may succeed later. If it may also have applied, trying again can do it twice.
    #[must_use]
    pub fn may_retry(&self) -> bool {
        match self {
            Self::Unreachable { .. } | Self::Unknown { .. } => true,
            Self::Refused(code) => code.may_retry(),
            Self::Auth | Self::Invalid(_) | Self::Protocol { .. } | Self::Closed => false,
        }
    }
}

/// Why a held lock is no longer ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Lost {
    /// Its lease ran out at the server.
    #[error("its lease ran out")]
    Expired,
    /// An operator ended it.
    #[error("an operator ended it")]
    Forced,
    /// The session that owned it has ended.
    #[error("its session ended")]
    Session,
    /// The server could not be asked to renew it in time.
    #[error("it could not be renewed in time")]
    Unreachable,
    /// The connection broke, and the client was told to release on disconnect.
    #[error("the connection broke")]
    Disconnected,
    /// It was released by this process.
    #[error("it was released")]
    Released,
}
