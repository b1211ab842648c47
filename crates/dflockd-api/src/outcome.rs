//! What can come of a command or a query.

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::refusal::Refusal;
use crate::types::{Bytes, End, Fence, Revision, Span, Token};

/// A granted hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Grant {
    /// Its credential, fence included.
    pub token: Token,
    /// How long it lasts from now.
    pub lease: Span,
}

/// The answer to a command or query.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Outcome {
    /// Done, nothing to say.
    Done,
    /// The caller holds the lock.
    Granted(Grant),
    /// An enqueue was granted at once.
    Acquired(Grant),
    /// An enqueue took its place.
    Queued,
    /// The lease was restarted.
    Renewed {
        /// Of the hold.
        fence: Fence,
        /// The lease.
        lease: Span,
    },
    /// The wait ended without success.
    Timeout,
    /// No such value, or nothing to pop.
    Empty,
    /// A compare-and-set found something else.
    Conflict,
    /// A counter, a length or a number of deliveries.
    Number(i64),
    /// A value.
    Value(Bytes),
    /// An entry written by a KV command, with the revision it got.
    Written(Revision),
    /// A popped item.
    Popped {
        /// The list.
        key: Bytes,
        /// The end it came from.
        end: End,
        /// The item.
        value: Bytes,
    },
    /// Items of a list.
    Items(Vec<Bytes>),
    /// The events asked for are gone; the oldest kept one is after this revision.
    Compacted(Revision),
    /// A definite no: nothing has changed.
    Refused(Refusal),
    /// A KV entry.
    Entry {
        /// What it holds.
        value: Bytes,
        /// The revision of its last change.
        revision: Revision,
    },
    /// The first of the items of a list that were asked for, because all of them are too much for one answer
    /// (`RANGE_BYTES_MAX` of the store). At least one.
    Part(Vec<Bytes>),
}

/// What an outcome gives away, which is taken back if the answer can not be told.
#[derive(Clone, Copy, Debug)]
pub enum Given<'a> {
    /// The hold of [`Outcome::Granted`].
    Granted(&'a Grant),
    /// The hold of [`Outcome::Acquired`].
    Acquired(&'a Grant),
    /// The item of [`Outcome::Popped`].
    Popped {
        /// The list.
        key: &'a Bytes,
        /// The end it came from.
        end: End,
        /// The item.
        value: &'a Bytes,
    },
}

impl Outcome {
    /// Whether it gives something away that is taken back if the answer can not be told.
    #[must_use]
    pub fn gives(&self) -> bool {
        self.given().is_some()
    }

    /// What it gives away.
    #[must_use]
    pub fn given(&self) -> Option<Given<'_>> {
        match self {
            Self::Granted(grant) => Some(Given::Granted(grant)),
            Self::Acquired(grant) => Some(Given::Acquired(grant)),
            Self::Popped { key, end, value } => Some(Given::Popped { key, end: *end, value }),
            Self::Done
            | Self::Queued
            | Self::Renewed { .. }
            | Self::Timeout
            | Self::Empty
            | Self::Conflict
            | Self::Number(_)
            | Self::Value(_)
            | Self::Written(_)
            | Self::Items(_)
            | Self::Part(_)
            | Self::Compacted(_)
            | Self::Entry { .. }
            | Self::Refused(_) => None,
        }
    }
}
