//! What clients ask for, as data of their own.

use dflockd_core::{Command, Mode, OwnedCommand, SessionId, Span, Token};
use dflockd_replica::OwnedQuery;
use dflockd_replica::types::{Bits128, ProposalBody};

/// A request.
#[derive(Clone, Debug)]
pub enum Op {
    /// A command.
    Do(OwnedCommand),
    /// The command that waits for a grant, and how its place in the queue was asked for.
    Wait(OwnedCommand, Mode, Span),
    /// The command that renews all holds with a lease, and the token of the one it is sent for.
    RenewSession(OwnedCommand, Token),
    /// The session is kept.
    Keep {
        /// What proves whose it is.
        secret: Bits128,
    },
    /// The kept session continues on this connection.
    Attach {
        /// What proves whose it is.
        secret: Bits128,
    },
    /// An operator ends a session.
    Kick {
        /// Whose.
        session: SessionId,
    },
    /// Nothing, but after all that came before.
    Sync,
    /// A read.
    Read(OwnedQuery),
}

impl<'a, C: Into<Command<'a>>> From<C> for Op {
    fn from(command: C) -> Self {
        Self::Do(command.into().into())
    }
}

impl Op {
    /// The command, if it is one.
    #[must_use]
    pub fn command(&self) -> Option<Command<'_>> {
        match self {
            Self::Do(command) | Self::Wait(command, ..) | Self::RenewSession(command, _) => {
                Some(command.get())
            }
            Self::Keep { .. }
            | Self::Attach { .. }
            | Self::Kick { .. }
            | Self::Sync
            | Self::Read(_) => None,
        }
    }

    /// What stands in the log. Reads do not.
    #[must_use]
    pub fn action(&self) -> Option<ProposalBody<'_>> {
        match self {
            Self::Do(command) | Self::Wait(command, ..) | Self::RenewSession(command, _) => {
                Some(ProposalBody::Command(command.get()))
            }
            Self::Keep { secret } => Some(ProposalBody::Keep { secret: *secret }),
            Self::Attach { secret } => Some(ProposalBody::Attach { secret: *secret }),
            Self::Kick { session } => Some(ProposalBody::Kick { session: *session }),
            Self::Sync => Some(ProposalBody::Barrier),
            Self::Read(_) => None,
        }
    }

    /// How long it may block.
    #[must_use]
    pub fn wait(&self) -> Span {
        self.command().map_or(Span::ZERO, |command| command.wait())
    }

    /// Whether its answer is kept for a repetition, if the session is.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.command().is_some_and(|command| command.is_kept())
    }
}
