//! Everything the store asks of the outside: answers and pushes.

use dflockd_api::{Bytes, Outcome, Push, RequestId, SessionId};

/// Something to tell a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// The answer to a request.
    Reply {
        /// Who asked.
        session: SessionId,
        /// What is answered.
        request: RequestId,
        /// The answer.
        outcome: Outcome,
    },
    /// Something a session subscribed to, or must know.
    Push {
        /// Who is told.
        session: SessionId,
        /// What.
        push: Push,
        /// Set if this is the delivery to a queue group: [`Store::group_members`](crate::Store::group_members)
        /// names the members who can take it instead.
        group: Option<Group>,
    },
    /// A detached session waited long enough and is gone.
    SessionEnded {
        /// Which.
        session: SessionId,
    },
}

/// A queue group.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Group {
    /// The pattern its members listen to.
    pub pattern: Bytes,
    /// Its name.
    pub name: Bytes,
}
