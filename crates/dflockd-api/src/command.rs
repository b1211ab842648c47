//! Everything that can change the store, and everything that can be asked of it.
//!
//! Chance (salts) and time come in with the command; keys and values are borrowed from wherever
//! they were read.

use crate::outcome::Outcome;
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
/// Every command is answered by exactly one reply to its caller, at once or (for the
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

/// What is true of each command: its name in figures and listings, its key and its wait if it has one, when it is
/// refused under load, whether a repeated request gets the first answer again, and whether the answer may give
/// something away.
///
/// A row is `Name "name" Urgency Repeat [key(field)] [wait(field)] [gives(true)];` and becomes one arm in each method
/// below, as
///
/// ```text
/// Acquire "acquire" Grows Kept key(key) wait(wait) gives(true);
///
/// fn name(&self) -> &'static str { match self { Self::Acquire { .. } => "acquire", .. } }
/// fn key(&self) -> Option<&'a [u8]> { if let Self::Acquire { key, .. } = self { return Some(key) } .. None }
/// ```
///
/// A command without a row does not compile. Rows of `client` are counted, in this order, by [`CommandKind`].
macro_rules! commands {
    (
        client { $($client:ident $client_name:literal $client_urgency:ident $client_repeat:ident
            $(key($client_key:ident))? $(wait($client_wait:ident))? $(gives($client_gives:literal))?;)* }
        engine { $($engine:ident $engine_name:literal $engine_urgency:ident;)* }
    ) => {
        /// A command that clients send, as it is counted.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the names say it")]
        pub enum CommandKind {
            $($client,)*
        }

        impl CommandKind {
            /// All of them with their names for people, in the order of the counters of the store.
            pub const ALL: &'static [(Self, &'static str)] =
                &[$((Self::$client, $client_name),)*];
        }

        impl<'a> Command<'a> {
            /// What it is counted as, if a client sent it.
            #[must_use]
            pub fn kind(&self) -> Option<CommandKind> {
                match self {
                    $(Self::$client { .. } => Some(CommandKind::$client),)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// Its name in figures and listings.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$client { .. } => $client_name,)*
                    $(Self::$engine { .. } => $engine_name,)*
                }
            }

            /// The one key that it is about.
            #[must_use]
            pub fn key(&self) -> Option<&'a [u8]> {
                $($(if let Self::$client { $client_key, .. } = self {
                    return Some($client_key);
                })?)*
                None
            }

            fn wait_mut(&mut self) -> Option<&mut Span> {
                $($(if let Self::$client { $client_wait, .. } = self {
                    return AsWait::as_wait($client_wait);
                })?)*
                None
            }

            /// Whether its answer may give something away: see [`Outcome::gives`].
            #[must_use]
            pub fn may_give(&self) -> bool {
                match self {
                    $(Self::$client { .. } => false $(|| $client_gives)?,)*
                    $(Self::$engine { .. } => false,)*
                }
            }

            /// When it is refused because there is too much to do.
            #[must_use]
            pub fn urgency(&self) -> Urgency {
                match self {
                    $(Self::$client { .. } => Urgency::$client_urgency,)*
                    $(Self::$engine { .. } => Urgency::$engine_urgency,)*
                }
            }

            /// Whether a repeated request gets the first answer again instead of being executed.
            #[must_use]
            pub fn is_kept(&self) -> bool {
                match self {
                    $(Self::$client { .. } => Repeat::$client_repeat == Repeat::Kept,)*
                    $(Self::$engine { .. } => false,)*
                }
            }
        }
    };
}

commands! {
    client {
        Acquire "acquire" Grows Kept key(key) wait(wait) gives(true);
        Enqueue "enqueue" Grows Kept key(key) gives(true);
        Wait "wait" Grows Kept key(key) wait(wait) gives(true);
        Release "release" Keeps Kept key(key);
        Renew "renew" Keeps Kept key(key);
        ForceRelease "force_release" Keeps Kept key(key);
        Add "counter_add" Grows Kept key(key);
        CounterSet "counter_set" Grows Kept key(key);
        KvSet "kv_set" Grows Kept key(key);
        KvDelete "kv_delete" Plain Kept key(key);
        KvCompareAndSet "kv_cas" Grows Kept key(key);
        Push "list_push" Grows Kept key(key);
        Pop "list_pop" Plain Kept key(key) wait(wait) gives(true);
        BarrierWait "barrier_wait" Grows Kept key(key) wait(wait);
        Signal "signal" Grows Kept;
        Subscribe "subscribe" Grows Kept;
        Unsubscribe "unsubscribe" Plain Kept;
        RenewSession "renew_session" Keeps Anew;
    }
    engine {
        Cancel "cancel" Follows;
        Acknowledge "acknowledge" Plain;
        Undo "undo" Follows;
        Tick "tick" Follows;
        NewTerm "new_term" Follows;
        Detach "detach" Follows;
        Attach "attach" Plain;
        Orphan "orphan" Follows;
        EndSession "end_session" Keeps;
    }
}

/// What becomes of a request that is repeated.
#[derive(PartialEq, Eq)]
enum Repeat {
    /// Its answer was kept.
    Kept,
    /// It is executed again, which does no harm.
    Anew,
}

/// The field that says how long a command waits.
trait AsWait {
    fn as_wait(&mut self) -> Option<&mut Span>;
}

impl AsWait for Span {
    fn as_wait(&mut self) -> Option<&mut Span> {
        Some(self)
    }
}

impl AsWait for Option<Span> {
    fn as_wait(&mut self) -> Option<&mut Span> {
        self.as_mut()
    }
}

impl Command<'_> {
    /// How long the command may wait for its answer by its own will.
    #[must_use]
    pub fn wait(&self) -> Span {
        self.clone().wait_mut().map_or(Span::ZERO, |wait| *wait)
    }

    /// Makes the wait shorter by the time that went by before the command was asked for.
    pub fn shorten_wait(&mut self, by: Span) {
        if let Some(wait) = self.wait_mut() {
            *wait = Span(wait.0.saturating_sub(by.0));
        }
    }
}

/// When a command is refused because there is too much to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// The state may grow by it: refused first of all, and when the disk is nearly full.
    Grows,
    /// It changes what is there, or asks for something that can be asked for again.
    Plain,
    /// It gives something back or keeps it. There is room for it beyond the bound, or an overload would not end and
    /// holders would lose what they have.
    Keeps,
    /// It follows from what was accepted before, as the end of a session does. Never refused.
    Follows,
}

impl Urgency {
    /// Whether an item is taken that finds so much before it.
    #[must_use]
    pub fn fits(self, before: usize, bound: usize) -> bool {
        match self {
            Self::Grows | Self::Plain => before <= bound,
            Self::Keeps => before <= bound + bound / 4,
            Self::Follows => true,
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
