//! Everything that can change the store, and everything that can be asked of it.
//!
//! Chance (salts) and time come in with the command; keys and values are borrowed from wherever
//! they were read.

use crate::effect::Outcome;
use crate::types::{
    End, Fence, Mode, RequestId, Revision, SessionId, Space, Span, Timestamp, Token,
};

/// Whose command it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caller {
    /// The session that owns what the command creates.
    pub session: SessionId,
    /// The request the outcome answers.
    pub request: RequestId,
    /// The outcome is kept for retries until acknowledged, and a repeated request id gets it again.
    pub keep: bool,
}

/// A change of the store.
///
/// Every command is answered by exactly one [`Effect::Reply`](crate::Effect::Reply) to its caller, at once or (for the
/// ones with a `wait`) later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command<'a> {
    /// Nothing but the passing of time. Not answered.
    Tick,
    /// A new leader begins: running leases get the failover grace. Not answered.
    NewTerm,

    /// Asks for a lock and waits up to `wait` for it; `wait` zero only tries.
    Acquire {
        /// The lock.
        key: &'a [u8],
        /// How it is asked for.
        mode: Mode,
        /// How long to queue.
        wait: Span,
        /// The lease of the hold; the default lease if none.
        lease: Option<Span>,
        /// Random bits of the token.
        salt: u64,
    },
    /// Asks for a lock and takes a place in the queue without waiting for the grant.
    Enqueue {
        /// The lock.
        key: &'a [u8],
        /// How it is asked for; elections have no two-phase form.
        mode: Mode,
        /// The lease of the hold; the default lease if none.
        lease: Option<Span>,
        /// Random bits of the token.
        salt: u64,
    },
    /// Waits for the grant of an earlier [`Command::Enqueue`] of the same session and key.
    Wait {
        /// The lock.
        key: &'a [u8],
        /// Where the lock lives.
        space: Space,
        /// How long to wait.
        wait: Span,
    },
    /// Gives a hold back.
    Release {
        /// The lock.
        key: &'a [u8],
        /// Where the lock lives.
        space: Space,
        /// The hold.
        token: Token,
        /// Observers hear of a resignation.
        resign: bool,
    },
    /// Restarts the lease of a hold.
    Renew {
        /// The lock.
        key: &'a [u8],
        /// Where the lock lives.
        space: Space,
        /// The hold.
        token: Token,
        /// The new lease; the default lease if none.
        lease: Option<Span>,
    },
    /// Restarts the lease of every hold of the caller's session that was asked for with exactly this lease: such holds
    /// follow the session. No lease is cut short. Answered by the number of these holds; never kept for retries,
    /// because it can be repeated.
    RenewSession {
        /// The lease of the session.
        lease: Span,
    },
    /// Ends somebody's hold.
    ForceRelease {
        /// The lock.
        key: &'a [u8],
        /// Where the lock lives.
        space: Space,
        /// Which hold.
        fence: Fence,
    },

    /// Adds `delta` to a counter.
    Add {
        /// The counter.
        key: &'a [u8],
        /// What is added. Subtracting is adding the negative, see `decrement`.
        delta: i64,
        /// Subtract instead. Kept apart because the watch event differs and -i64::MIN does not exist.
        decrement: bool,
    },
    /// Sets a counter.
    CounterSet {
        /// The counter.
        key: &'a [u8],
        /// Its new value.
        value: i64,
    },

    /// Sets a KV entry.
    KvSet {
        /// The entry.
        key: &'a [u8],
        /// Its new value.
        value: &'a [u8],
        /// Time to live; none = for ever.
        ttl: Option<Span>,
    },
    /// Deletes a KV entry.
    KvDelete {
        /// The entry.
        key: &'a [u8],
    },
    /// Sets a KV entry if it is as expected.
    KvCompareAndSet {
        /// The entry.
        key: &'a [u8],
        /// What must be there.
        expect: Expect<'a>,
        /// Its new value.
        value: &'a [u8],
        /// Time to live; none = for ever.
        ttl: Option<Span>,
    },

    /// Puts an item at one end of a list, or hands it to whoever waits for one.
    Push {
        /// The list.
        key: &'a [u8],
        /// Which end.
        end: End,
        /// The item.
        value: &'a [u8],
    },
    /// Takes an item from one end of a list.
    Pop {
        /// The list.
        key: &'a [u8],
        /// Which end.
        end: End,
        /// How long to wait for an item. `None` = a plain pop; `Some(zero)` = a blocking pop that only tries
        /// (they differ in the watch event).
        wait: Option<Span>,
    },

    /// Arrives at a barrier and waits for the others.
    BarrierWait {
        /// The barrier.
        key: &'a [u8],
        /// How many must arrive.
        count: u32,
        /// How long to wait.
        wait: Span,
    },

    /// Sends a payload to the listeners of a channel.
    Signal {
        /// The channel: no wildcards.
        channel: &'a [u8],
        /// What they get.
        payload: &'a [u8],
    },
    /// Subscribes the session. Repeating it changes nothing.
    Subscribe(Subscription<'a>),
    /// Ends a subscription.
    Unsubscribe(Subscription<'a>),

    /// Withdraws a blocked request of the caller's session, which is then answered as when its time is over.
    Cancel {
        /// Which one.
        request: RequestId,
    },
    /// The caller has seen the results of all requests up to this one.
    Acknowledge {
        /// The last one seen.
        up_to: RequestId,
    },
    /// Takes back a grant or a popped item that could not be delivered. Not answered.
    Undo(&'a Outcome),

    /// The session has no connection now; it ends at `until` or with its last lease, whichever is later.
    /// Not answered.
    Detach {
        /// Not before.
        until: Timestamp,
    },
    /// The session has a connection again. Not answered.
    Attach,
    /// Ends the caller's session like [`Command::EndSession`] without a release, but its holds stay for `ttl` at most,
    /// unless somebody who knows a token renews it. Not answered.
    Orphan {
        /// How long the holds stay.
        ttl: Span,
    },
    /// Ends the caller's session: subscriptions, enqueue records, waits, then, if `release`, its holds. Not answered.
    EndSession {
        /// Release the holds (else they run until their leases end).
        release: bool,
        /// What a holder is told if the session is ended by somebody else.
        forced: bool,
    },
}

impl Command<'_> {
    /// How long the command may wait for its answer by its own will.
    #[must_use]
    pub fn wait(&self) -> Span {
        let mut copy = self.clone();
        copy.wait_mut().map_or(Span::ZERO, |wait| *wait)
    }

    /// Makes the wait shorter by the time that went by before the command was asked for.
    pub fn shorten_wait(&mut self, by: Span) {
        if let Some(wait) = self.wait_mut() {
            *wait = Span(wait.0.saturating_sub(by.0));
        }
    }

    fn wait_mut(&mut self) -> Option<&mut Span> {
        match self {
            Self::Acquire { wait, .. }
            | Self::Wait { wait, .. }
            | Self::BarrierWait { wait, .. }
            | Self::Pop { wait: Some(wait), .. } => Some(wait),
            Self::Pop { wait: None, .. }
            | Self::Enqueue { .. }
            | Self::Release { .. }
            | Self::Renew { .. }
            | Self::RenewSession { .. }
            | Self::ForceRelease { .. }
            | Self::Add { .. }
            | Self::CounterSet { .. }
            | Self::KvSet { .. }
            | Self::KvDelete { .. }
            | Self::KvCompareAndSet { .. }
            | Self::Push { .. }
            | Self::Signal { .. }
            | Self::Subscribe(_)
            | Self::Unsubscribe(_)
            | Self::Cancel { .. }
            | Self::Acknowledge { .. }
            | Self::Undo(_)
            | Self::Tick
            | Self::NewTerm
            | Self::Detach { .. }
            | Self::Attach
            | Self::Orphan { .. }
            | Self::EndSession { .. } => None,
        }
    }
}

/// What a compare-and-set expects to find.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Expect<'a> {
    /// No entry.
    Absent,
    /// An entry with this value.
    Value(&'a [u8]),
    /// An entry last changed at this revision.
    Revision(Revision),
}

/// What a session listens to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subscription<'a> {
    /// Signals on channels that match; with a group, each signal goes to one member.
    Signals {
        /// A channel or pattern.
        pattern: &'a [u8],
        /// The queue group; empty = none.
        group: &'a [u8],
    },
    /// Changes of keys that match.
    Changes {
        /// A key or pattern.
        pattern: &'a [u8],
        /// Also the kept events from this revision on.
        from: Option<Revision>,
    },
    /// Leaders of one election.
    Leaders {
        /// The election.
        key: &'a [u8],
    },
}

/// A read: sees the store at its stamp, changes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Query<'a> {
    /// The value of a counter.
    Counter {
        /// The counter.
        key: &'a [u8],
    },
    /// The value of a KV entry.
    Kv {
        /// The entry.
        key: &'a [u8],
    },
    /// A KV entry with its revision.
    Entry {
        /// The entry.
        key: &'a [u8],
    },
    /// The length of a list.
    Length {
        /// The list.
        key: &'a [u8],
    },
    /// Items of a list, both bounds inclusive, negative ones from the end.
    Range {
        /// The list.
        key: &'a [u8],
        /// First index.
        start: i64,
        /// Last index.
        stop: i64,
    },
}
