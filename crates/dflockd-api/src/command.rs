//! Every command, declared once, with what is true of it: its number and fields in the log, its name, when it is
//! refused under load, whether a repeated request gets the first answer again, who may send it, which of its fields is
//! the key, the wait, the lease and the salt, and which forms its answer can have.
//!
//! Chance (salts) and time come in with the command; keys and values are borrowed from wherever they were read.
//!
//! A row of `commands!` becomes a struct, a variant of [`Command`], a variant of [`CommandKind`], the bytes of the log
//! in the order of the fields, and one arm in each method of [`Command`]:
//!
//! ```text
//! /// Asks for a lock and waits up to `wait` for it; `wait` zero only tries.
//! 16 Acquire<'a> "acquire" [Grows Kept Lock key(key) wait(wait) lease(lease) salt(salt) gives(Lock)]
//!     -> [Granted Timeout; MaxLocks MaxHolds ...] {
//!     /// How the lock is asked for.
//!     mode: Mode,
//!     ...
//! }
//!
//! pub struct Acquire<'a> { pub mode: Mode, ... }
//! impl<'a> Field<'a> for Acquire<'a> { fn put(..) { self.mode.put(out); ... } fn take(..) { ... } }
//! impl<'a> From<Acquire<'a>> for Command<'a> { ... }
//!
//! pub enum Command<'a> { Acquire(Acquire<'a>), ... }
//! pub enum CommandKind { Acquire, ... }
//! impl Command<'_> {
//!     fn name(&self) -> &'static str { match self { Self::Acquire(_) => "acquire", ... } }
//!     fn number(&self) -> Option<u8> { match self { Self::Acquire(_) => Some(16), ... } }
//!     fn key(&self) -> Option<&[u8]> { match self { Self::Acquire(command) => Some(command.key), ... } }
//!     fn allows(&self, answer: &Outcome) -> bool {
//!         match (self, answer) {
//!             (Self::Acquire(_), Outcome::Granted { .. } | Outcome::Timeout { .. }) => true,
//!             (Self::Acquire(_), Outcome::Refused(Refusal::MaxLocks | ...)) => true,
//!             ...
//!             (_, Outcome::Refused(refusal)) => refusal.meets_any_request(),
//!             _ => false,
//!         }
//!     }
//!     ...
//! }
//! ```
//!
//! So a command without a row does not exist, and nothing else lists commands to answer one of these questions.

use alloc::vec::Vec;
use core::fmt;

use crate::field::{Field, Malformed, variants};
use crate::outcome::Outcome;
use crate::refusal::Refusal;
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

/// The struct of a command, its bytes, and the way into [`Command`].
macro_rules! command {
    (
        $(#[$doc:meta])* $name:ident $(<$life:lifetime>)?
        { $($(#[$field_doc:meta])* $field:ident: $type:ty,)* }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name $(<$life>)? {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl<'a> Field<'a> for $name $(<$life>)? {
            #[inline]
            fn put(&self, out: &mut Vec<u8>) {
                $(self.$field.put(out);)*
            }

            #[inline]
            fn take(input: &mut &'a [u8]) -> Result<Self, Malformed> {
                Ok(Self { $($field: Field::take(input)?,)* })
            }
        }

        impl<'a> From<$name $(<$life>)?> for Command<'a> {
            #[inline]
            fn from(command: $name $(<$life>)?) -> Self {
                Self::$name(command)
            }
        }
    };
}

/// See the head of this file. Rows of `client` are counted by [`CommandKind`]; those of `session` are not; those of
/// `engine` follow from something else in the log and have neither a number nor a client.
macro_rules! commands {
    (
        client { $(
            $(#[$client_doc:meta])*
            $client_number:literal $client:ident $(<$client_life:lifetime>)? $client_name:literal
                [$client_urgency:ident $client_repeat:ident $client_right:ident $(key($key:ident))?
                    $(wait($wait:ident))? $(lease($lease:ident))? $(salt($salt:ident))? $(gives($gives:ident))?]
                -> [$($client_form:ident)+ $(; $($client_refusal:ident)+)?]
                $client_fields:tt
        )* }
        session { $(
            $(#[$session_doc:meta])*
            $session_number:literal $session:ident $session_name:literal [$session_urgency:ident]
                -> [$session_form:ident] $session_fields:tt
        )* }
        engine { $(
            $(#[$engine_doc:meta])*
            $engine:ident $(($engine_inner:ty))? $engine_name:literal [$engine_urgency:ident]
                $({ $($(#[$engine_field_doc:meta])* $engine_field:ident: $engine_type:ty,)* })?
        )* }
    ) => {
        $(command! { $(#[$client_doc])* $client $(<$client_life>)? $client_fields })*
        $(command! { $(#[$session_doc])* $session $session_fields })*

        /// A change of the store.
        ///
        /// Every command is answered by exactly one reply to its caller, at once or (for the ones with a `wait`) later,
        /// but for those that say that they are not answered.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Command<'a> {
            $($(#[$client_doc])* $client($client $(<$client_life>)?),)*
            $($(#[$session_doc])* $session($session),)*
            $(
                $(#[$engine_doc])*
                $engine $(($engine_inner))? $({ $($(#[$engine_field_doc])* $engine_field: $engine_type,)* })?,
            )*
        }

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
                    $(Self::$client(_) => Some(CommandKind::$client),)*
                    $(Self::$session(_) => None,)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// Its name in metrics and listings.
            #[must_use]
            pub fn name(&self) -> &'static str {
                match self {
                    $(Self::$client(_) => $client_name,)*
                    $(Self::$session(_) => $session_name,)*
                    $(Self::$engine { .. } => $engine_name,)*
                }
            }

            /// Its number in the log; none for a command that does not stand there.
            #[must_use]
            #[inline]
            pub fn number(&self) -> Option<u8> {
                match self {
                    $(Self::$client(_) => Some($client_number),)*
                    $(Self::$session(_) => Some($session_number),)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// Appends its fields, in the form of the log.
            ///
            /// # Panics
            ///
            /// If the command has no [`number`](Self::number).
            #[inline]
            pub fn put(&self, out: &mut Vec<u8>) {
                match self {
                    $(Self::$client(command) => command.put(out),)*
                    $(Self::$session(command) => command.put(out),)*
                    $(Self::$engine { .. } => unreachable!("{self:?} does not stand in the log"),)*
                }
            }

            /// Takes the fields of the command with this number.
            ///
            /// # Errors
            ///
            /// If there is no such command, or these are not its fields.
            #[inline]
            pub fn take(number: u8, input: &mut &'a [u8]) -> Result<Self, Malformed> {
                match number {
                    $($client_number => $client::take(input).map(Self::$client),)*
                    $($session_number => $session::take(input).map(Self::$session),)*
                    _ => Err(Malformed("an unknown kind of item")),
                }
            }

            /// The one key that it is about.
            #[must_use]
            #[inline]
            pub fn key(&self) -> Option<&'a [u8]> {
                match self {
                    $(Self::$client(_command) => None $(.or(Some(_command.$key)))?,)*
                    $(Self::$session(_) => None,)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// How long the command may wait for its answer by its own will.
            #[must_use]
            pub fn wait(&self) -> Span {
                match self {
                    $(Self::$client(_command) => Span::ZERO $(.max(AsWait::wait(_command.$wait)))?,)*
                    $(Self::$session(_) => Span::ZERO,)*
                    $(Self::$engine { .. } => Span::ZERO,)*
                }
            }

            /// Whether its answer may come later by its own will.
            #[must_use]
            pub fn may_wait(&self) -> bool {
                match self {
                    $(Self::$client(_command) => false $(|| AsWait::may_wait(_command.$wait))?,)*
                    $(Self::$session(_) => false,)*
                    $(Self::$engine { .. } => false,)*
                }
            }

            /// Makes the wait shorter by the time that went by before the command was asked for.
            pub fn shorten_wait(&mut self, by: Span) {
                match self {
                    $(Self::$client(_command) => { $(_command.$wait.shorten(by);)? })*
                    $(Self::$session(_) => {})*
                    $(Self::$engine { .. } => {})*
                }
            }

            /// The lease that it asks for, none inside if it is the default. None if it does not ask for one.
            #[must_use]
            pub fn lease(&self) -> Option<Option<Span>> {
                match self {
                    $(Self::$client(_command) => None $(.or(Some(_command.$lease)))?,)*
                    $(Self::$session(_) => None,)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// Asks for this lease where the command asks for the default.
            pub fn set_default_lease(&mut self, lease: Span) {
                match self {
                    $(Self::$client(_command) => { $(_command.$lease = _command.$lease.or(Some(lease));)? })*
                    $(Self::$session(_) => {})*
                    $(Self::$engine { .. } => {})*
                }
            }

            /// Draws the random bits of the token that the command may give away. Who asks for a lock does not.
            #[inline]
            pub fn draw_salt(&mut self, _draw: impl FnOnce() -> u64) {
                match self {
                    $(Self::$client(_command) => { $(_command.$salt = _draw();)? })*
                    $(Self::$session(_) => {})*
                    $(Self::$engine { .. } => {})*
                }
            }

            /// What its answer may give away: see [`Outcome::gives`].
            #[must_use]
            #[inline]
            pub fn gift(&self) -> Option<Gift> {
                match self {
                    $(Self::$client(_command) => None $(.or(Some(Gift::$gives(_command.given()))))?,)*
                    $(Self::$session(_) => None,)*
                    $(Self::$engine { .. } => None,)*
                }
            }

            /// Whether it can be answered like this, at once or later, on whatever way: every answer has one of the
            /// forms of the row. What a request of any kind can be refused with says
            /// [`Refusal::meets_any_request`]; what is not answered allows nothing.
            #[must_use]
            pub fn allows(&self, answer: &Outcome) -> bool {
                match (self, answer) {
                    $((Self::$client(_), $(Outcome::$client_form { .. })|+) => true,)*
                    $($((Self::$client(_), Outcome::Refused($(Refusal::$client_refusal)|+)) => true,)?)*
                    $((Self::$session(_), Outcome::$session_form { .. }) => true,)*
                    $((Self::$engine { .. }, _) => false,)*
                    (_, Outcome::Refused(refusal)) => refusal.meets_any_request(),
                    _ => false,
                }
            }

            /// When it is refused because there is too much to do.
            #[must_use]
            pub fn urgency(&self) -> Urgency {
                match self {
                    $(Self::$client(_) => Urgency::$client_urgency,)*
                    $(Self::$session(_) => Urgency::$session_urgency,)*
                    $(Self::$engine { .. } => Urgency::$engine_urgency,)*
                }
            }

            /// Whether a repeated request gets the first answer again instead of being executed.
            #[must_use]
            pub fn is_kept(&self) -> bool {
                match self {
                    $(Self::$client(_) => Repeat::$client_repeat == Repeat::Kept,)*
                    $(Self::$session(_) => false,)*
                    $(Self::$engine { .. } => false,)*
                }
            }

            /// What a client must be allowed to do to send it.
            #[must_use]
            pub fn right(&self) -> Right {
                match self {
                    $(Self::$client(_) => Right::$client_right,)*
                    $(Self::$session(_) => Right::Own,)*
                    $(Self::$engine { .. } => Right::Own,)*
                }
            }
        }
    };
}

commands! {
    client {
        /// Asks for a lock and waits up to `wait` for it; `wait` zero only tries.
        16 Acquire<'a> "acquire" [Grows Kept Lock key(key) wait(wait) lease(lease) salt(salt) gives(Lock)]
            -> [Granted Timeout; MaxLocks MaxHolds MaxWaiters MaxWaits LimitMismatch TypeMismatch NoFence] {
            /// How the lock is asked for.
            mode: Mode,
            /// How long to queue.
            wait: Span,
            /// The lease of the hold; the default lease if none.
            lease: Option<Span>,
            /// Random bits of the token: see [`Command::draw_salt`].
            salt: u64,
            /// The lock.
            key: &'a [u8],
        }
        /// Asks for a lock and takes a place in the queue without waiting for the grant.
        17 Enqueue<'a> "enqueue" [Grows Kept Lock key(key) lease(lease) salt(salt) gives(Lock)]
            -> [Acquired Queued;
                MaxLocks MaxHolds MaxWaiters MaxWaits LimitMismatch TypeMismatch NoFence AlreadyEnqueued] {
            /// How the lock is asked for; elections have no two-phase form.
            mode: Mode,
            /// The lease of the hold; the default lease if none.
            lease: Option<Span>,
            /// Random bits of the token: see [`Command::draw_salt`].
            salt: u64,
            /// The lock.
            key: &'a [u8],
        }
        /// Waits for the grant of an earlier [`Enqueue`] of the same session and key.
        18 Wait<'a> "wait" [Grows Kept Lock key(key) wait(wait) gives(Lock)]
            -> [Granted Timeout; NotEnqueued AlreadyWaiting LeaseExpired] {
            /// Where the lock lives.
            space: Space,
            /// How long to wait.
            wait: Span,
            /// The lock.
            key: &'a [u8],
        }
        /// Gives a hold back.
        19 Release<'a> "release" [Keeps Kept Lock key(key)] -> [Done; NotHeld] {
            /// Where the lock lives.
            space: Space,
            /// The hold.
            token: Token,
            /// Observers hear of a resignation.
            resign: bool,
            /// The lock.
            key: &'a [u8],
        }
        /// Restarts the lease of a hold.
        20 Renew<'a> "renew" [Keeps Kept Lock key(key) lease(lease)] -> [Renewed; NotHeld LeaseExpired NoFence] {
            /// Where the lock lives.
            space: Space,
            /// The hold.
            token: Token,
            /// The new lease; the default lease if none.
            lease: Option<Span>,
            /// The lock.
            key: &'a [u8],
        }
        /// Ends the hold of another session.
        21 ForceRelease<'a> "force_release" [Keeps Kept Administer key(key)] -> [Done; NotHeld] {
            /// Where the lock lives.
            space: Space,
            /// Which hold.
            fence: Fence,
            /// The lock.
            key: &'a [u8],
        }
        /// Adds `delta` to a counter.
        22 Add<'a> "counter_add" [Grows Kept Write key(key)] -> [Number; MaxKeys Overflow] {
            /// What is added. Subtracting is adding the negative, see `decrement`.
            delta: i64,
            /// Subtract instead. Kept apart because the watch event differs and -i64::MIN does not exist.
            decrement: bool,
            /// The counter.
            key: &'a [u8],
        }
        /// Sets a counter.
        23 CounterSet<'a> "counter_set" [Grows Kept Write key(key)] -> [Done; MaxKeys] {
            /// Its new value.
            value: i64,
            /// The counter.
            key: &'a [u8],
        }
        /// Sets a KV entry.
        24 KvSet<'a> "kv_set" [Grows Kept Write key(key)] -> [Written; MaxKeys ValueTooLarge] {
            /// Time to live; none = for ever.
            ttl: Option<Span>,
            /// The entry.
            key: &'a [u8],
            /// Its new value.
            value: &'a [u8],
        }
        /// Deletes a KV entry.
        25 KvDelete<'a> "kv_delete" [Plain Kept Write key(key)] -> [Done] {
            /// The entry.
            key: &'a [u8],
        }
        /// Sets a KV entry if it is as expected.
        26 KvCompareAndSet<'a> "kv_cas" [Grows Kept Write key(key)] -> [Written Conflict; MaxKeys ValueTooLarge] {
            /// What must be there.
            expect: Expect<'a>,
            /// Time to live; none = for ever.
            ttl: Option<Span>,
            /// The entry.
            key: &'a [u8],
            /// Its new value.
            value: &'a [u8],
        }
        /// Puts an item at one end of a list, or hands it to a session that waits for one.
        27 Push<'a> "list_push" [Grows Kept Write key(key)] -> [Number; MaxKeys ListFull ValueTooLarge] {
            /// Which end.
            end: End,
            /// The list.
            key: &'a [u8],
            /// The item.
            value: &'a [u8],
        }
        /// Takes an item from one end of a list.
        28 Pop<'a> "list_pop" [Plain Kept Write key(key) wait(wait) gives(Item)] -> [Popped Empty; MaxKeys MaxWaits] {
            /// Which end.
            end: End,
            /// How long to wait for an item. `None` = a plain pop; `Some(zero)` = a blocking pop that only tries
            /// (they differ in the watch event).
            wait: Option<Span>,
            /// The list.
            key: &'a [u8],
        }
        /// Arrives at a barrier and waits for the others.
        29 BarrierWait<'a> "barrier_wait" [Grows Kept Lock key(key) wait(wait)]
            -> [Done Timeout; MaxKeys MaxWaits CountMismatch AlreadyWaiting] {
            /// How many must arrive.
            count: u32,
            /// How long to wait.
            wait: Span,
            /// The barrier.
            key: &'a [u8],
        }
        /// Sends a payload to the listeners of a channel.
        30 Signal<'a> "signal" [Grows Kept Signal] -> [Number; BadPattern] {
            /// The channel: no wildcards.
            channel: &'a [u8],
            /// What they get.
            payload: &'a [u8],
        }
        /// Subscribes the session. Repeating it changes nothing.
        31 Subscribe<'a> "subscribe" [Grows Kept Read] -> [Done Compacted; BadPattern MaxSubscriptions] {
            /// What the session listens to.
            to: Subscription<'a>,
        }
        /// Ends a subscription.
        32 Unsubscribe<'a> "unsubscribe" [Plain Kept Own] -> [Done; BadPattern] {
            /// What the session no longer listens to.
            from: Subscription<'a>,
        }
        /// Restarts the lease of every hold of the caller's session that was asked for with exactly this lease: such
        /// holds follow the session. No lease is cut short. Answered by the number of these holds; never kept for
        /// retries, because it can be repeated.
        35 RenewSession "renew_session" [Keeps Anew Own] -> [Number] {
            /// The lease of the session.
            lease: Span,
        }
    }
    session {
        /// Withdraws a blocked request of the caller's session, which is then answered as when its time is over.
        33 Cancel "cancel" [Follows] -> [Done] {
            /// Which one.
            request: RequestId,
        }
        /// The caller has seen the results of all requests up to this one.
        34 Acknowledge "acknowledge" [Plain] -> [Done] {
            /// The last one seen.
            up_to: RequestId,
        }
    }
    engine {
        /// Takes back a grant or a popped item that could not be delivered. Not answered.
        Undo(&'a Outcome) "undo" [Follows]
        /// Nothing but the passing of time. Not answered.
        Tick "tick" [Follows]
        /// A new leader begins: running leases get the failover grace. Not answered.
        NewTerm "new_term" [Follows]
        /// The session has no connection now; it ends at `until` or with its last lease, whichever is later.
        /// Not answered.
        Detach "detach" [Follows] {
            /// Not before.
            until: Timestamp,
        }
        /// The session has a connection again. Not answered.
        Attach "attach" [Plain]
        /// Says who is behind the caller's session. Not answered.
        Identify "identify" [Grows] {
            /// What people see. The last one counts.
            name: &'a [u8],
            /// Sessions with the same reference belong to the same client; empty = none. The first one counts.
            reference: &'a [u8],
        }
        /// Ends the caller's session like `EndSession` without a release. If the session has a reference, its places in
        /// queues stay for `ttl`, and a session with the same reference that asks for the same lock again gets the hold
        /// or the place back. Not answered.
        Orphan "orphan" [Follows] {
            /// How long the places stay.
            ttl: Span,
            /// The holds stay no longer than that, unless somebody who knows a token renews it (else they run until
            /// their leases end).
            cut: bool,
        }
        /// Ends the caller's session: subscriptions, enqueue records, waits, then, if `release`, its holds.
        /// Not answered.
        EndSession "end_session" [Keeps] {
            /// Release the holds (else they run until their leases end).
            release: bool,
            /// What a holder is told if the session is ended by somebody else.
            forced: bool,
        }
    }
}

impl<'a> Command<'a> {
    /// What it is about.
    #[must_use]
    pub fn subject(&self) -> Subject<'a> {
        if let Self::Signal(Signal { channel, .. }) = *self {
            return Subject::Name(channel);
        }
        let (Self::Subscribe(Subscribe { to: of }) | Self::Unsubscribe(Unsubscribe { from: of })) =
            *self
        else {
            return self.key().map_or(Subject::Session, Subject::Name);
        };
        match of {
            Subscription::Signals { pattern, .. } | Subscription::Changes { pattern, .. } => {
                Subject::Pattern(pattern)
            }
            Subscription::Leaders { key } => Subject::Name(key),
        }
    }
}

/// A command with memory of its own, for programs that keep commands: simulators and tests. It holds the bytes of the
/// log, so it follows from the table like everything else.
#[derive(Clone, PartialEq, Eq)]
pub struct OwnedCommand {
    number: u8,
    bytes: Vec<u8>,
}

impl OwnedCommand {
    /// The command.
    ///
    /// # Panics
    ///
    /// Never: the bytes were made from one.
    #[must_use]
    pub fn get(&self) -> Command<'_> {
        Command::take(self.number, &mut self.bytes.as_slice()).expect("made from a command")
    }
}

impl<'a, C: Into<Command<'a>>> From<C> for OwnedCommand {
    /// # Panics
    ///
    /// For a command that does not stand in the log.
    fn from(command: C) -> Self {
        let command = command.into();
        let mut bytes = Vec::new();
        command.put(&mut bytes);
        Self { number: command.number().expect("it has bytes"), bytes }
    }
}

impl fmt::Debug for OwnedCommand {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
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

/// What a client must be allowed to do with the [`Subject`] of a command to send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// To see what is there, and to be told of changes, leaders and signals.
    Read,
    /// To take locks and places in queues, to keep and to release them, and to meet at barriers.
    Lock,
    /// To change counters, values and lists, and to take what is in a list.
    Write,
    /// To send signals.
    Signal,
    /// To have a session: what it owns already, nobody else's.
    Own,
    /// To act on what belongs to others, as operators do.
    Administer,
}

/// What a command is about, for those who decide whether its client may send it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject<'a> {
    /// No key: the session of the client.
    Session,
    /// A key, or the channel of a signal.
    Name(&'a [u8]),
    /// All keys or channels that match.
    Pattern(&'a [u8]),
}

/// What a command may give away, and where it is given back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gift {
    /// A hold of the lock with the command's key.
    Lock(Space),
    /// An item of the list with the command's key.
    Item(End),
}

/// Where what a command gives away comes from.
trait Gives {
    type From;
    fn given(&self) -> Self::From;
}

macro_rules! gives {
    ($($command:ident: $from:ty = |$it:ident| $given:expr;)*) => {
        $(impl Gives for $command<'_> {
            type From = $from;

            #[inline]
            fn given(&self) -> $from {
                let $it = self;
                $given
            }
        })*
    };
}

gives! {
    Acquire: Space = |acquire| acquire.mode.space();
    Enqueue: Space = |enqueue| enqueue.mode.space();
    Wait: Space = |wait| wait.space;
    Pop: End = |pop| pop.end;
}

/// The field that says how long a command waits.
trait AsWait: Copy {
    fn wait(self) -> Span;
    fn may_wait(self) -> bool;
    fn shorten(&mut self, by: Span);
}

impl AsWait for Span {
    fn wait(self) -> Span {
        self
    }

    fn may_wait(self) -> bool {
        true
    }

    fn shorten(&mut self, by: Span) {
        *self = Self(self.0.saturating_sub(by.0));
    }
}

impl AsWait for Option<Span> {
    fn wait(self) -> Span {
        self.unwrap_or(Span::ZERO)
    }

    fn may_wait(self) -> bool {
        self.is_some()
    }

    fn shorten(&mut self, by: Span) {
        if let Some(wait) = self {
            wait.shorten(by);
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

impl<'a> Query<'a> {
    /// The key that it is about. To ask takes the right to [read](Right::Read) it.
    #[must_use]
    pub fn key(&self) -> &'a [u8] {
        match *self {
            Self::Counter { key }
            | Self::Kv { key }
            | Self::Entry { key }
            | Self::Length { key }
            | Self::Range { key, .. } => key,
        }
    }

    /// Whether it can be answered like this: see [`Command::allows`].
    #[must_use]
    pub fn allows(&self, answer: &Outcome) -> bool {
        if let Outcome::Refused(refusal) = answer {
            return refusal.meets_any_request();
        }
        match self {
            Self::Counter { .. } | Self::Length { .. } => matches!(answer, Outcome::Number(_)),
            Self::Kv { .. } => matches!(answer, Outcome::Value(_) | Outcome::Empty),
            Self::Entry { .. } => matches!(answer, Outcome::Entry { .. } | Outcome::Empty),
            Self::Range { .. } => matches!(answer, Outcome::Items(_) | Outcome::Part(_)),
        }
    }
}

variants! {
    Expect<'a> "an unknown expectation" {
        0 => Absent,
        1 => Value(value),
        2 => Revision(revision),
    }
    Subscription<'a> "an unknown kind of subscription" {
        0 => Signals { pattern, group },
        1 => Changes { from, pattern },
        2 => Leaders { key },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owned_commands_are_what_they_were_made_from() {
        let subscription = Subscription::Changes { pattern: b"a.*", from: Some(Revision(7)) };
        let commands: [Command<'_>; 3] = [
            Pop { end: End::Right, wait: Some(Span::from_secs(1)), key: b"k" }.into(),
            Subscribe { to: subscription }.into(),
            Cancel { request: RequestId(9) }.into(),
        ];
        for command in commands {
            assert_eq!(OwnedCommand::from(command).get(), command);
        }
    }

    #[test]
    fn properties() {
        let mut pop = Command::from(Pop { end: End::Left, wait: None, key: b"k" });
        assert_eq!((pop.wait(), pop.key()), (Span::ZERO, Some(&b"k"[..])));
        assert!(!pop.may_wait());
        assert_eq!(pop.gift(), Some(Gift::Item(End::Left)));
        pop.shorten_wait(Span::from_secs(1));
        assert_eq!(pop, Pop { end: End::Left, wait: None, key: b"k" }.into());
        let mut wait = Command::from(BarrierWait { count: 2, wait: Span(5), key: b"b" });
        wait.shorten_wait(Span(2));
        assert_eq!((wait.wait(), wait.lease(), wait.gift()), (Span(3), None, None));
        assert!(wait.may_wait());
        let mut enqueue =
            Command::from(Enqueue { mode: Mode::Read, lease: None, salt: 0, key: b"k" });
        assert_eq!(enqueue.gift(), Some(Gift::Lock(Space::Locks)));
        enqueue.draw_salt(|| 7);
        for lease in [Span(8), Span(9)] {
            enqueue.set_default_lease(lease);
        }
        let drawn = Enqueue { mode: Mode::Read, lease: Some(Span(8)), salt: 7, key: b"k" };
        assert_eq!(enqueue, drawn.into());
        let force = ForceRelease { space: Space::Locks, fence: Fence(1), key: b"k" };
        assert_eq!(Command::from(force).right(), Right::Administer);
        let renew = Renew {
            space: Space::Locks,
            token: Token { fence: Fence(1), salt: 2 },
            lease: None,
            key: b"k",
        };
        assert_eq!(Command::from(renew).lease(), Some(None));
    }

    #[test]
    fn subjects() {
        let subject = |command: Command<'static>| command.subject();
        assert_eq!(subject(KvDelete { key: b"k" }.into()), Subject::Name(b"k"));
        let signal = Signal { channel: b"c", payload: b"p" };
        assert_eq!(subject(signal.into()), Subject::Name(b"c"));
        let changes = Subscription::Changes { pattern: b"a.*", from: None };
        assert_eq!(subject(Subscribe { to: changes }.into()), Subject::Pattern(b"a.*"));
        assert_eq!(subject(Unsubscribe { from: changes }.into()), Subject::Pattern(b"a.*"));
        let leaders = Subscription::Leaders { key: b"e" };
        assert_eq!(subject(Subscribe { to: leaders }.into()), Subject::Name(b"e"));
        assert_eq!(subject(RenewSession { lease: Span(1) }.into()), Subject::Session);
    }

    #[test]
    fn forms_of_answers() {
        let refused = Outcome::Refused;
        let pop = Command::from(Pop { end: End::Left, wait: Some(Span(1)), key: b"k" });
        assert!(pop.allows(&Outcome::Empty) && pop.allows(&refused(Refusal::MaxWaits)));
        assert!(pop.allows(&refused(Refusal::Forgotten)));
        assert!(!pop.allows(&Outcome::Timeout) && !pop.allows(&refused(Refusal::NotHeld)));
        let barrier = Command::from(BarrierWait { count: 2, wait: Span(5), key: b"b" });
        assert!(barrier.allows(&Outcome::Timeout) && !barrier.allows(&Outcome::Empty));
        let cancel = Command::from(Cancel { request: RequestId(1) });
        assert!(cancel.allows(&Outcome::Done) && cancel.allows(&refused(Refusal::Unavailable)));
        assert!(!cancel.allows(&Outcome::Timeout) && !cancel.allows(&refused(Refusal::MaxKeys)));
        // What is not answered has no form.
        assert!(!Command::Tick.allows(&Outcome::Done));
        assert!(!Command::Tick.allows(&refused(Refusal::Unavailable)));
        let read = Query::Kv { key: b"k" };
        assert!(read.allows(&Outcome::Empty) && read.allows(&refused(Refusal::Unavailable)));
        assert!(!read.allows(&Outcome::Number(0)) && !read.allows(&refused(Refusal::NotHeld)));
    }
}
