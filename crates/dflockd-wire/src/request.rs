//! Frames to requests and back. Everything that can be said about a request without knowing the
//! server's state is checked here; whoever holds a [`Request`] need not check it again.
//!
//! Not checked: how long a value is, because that limit belongs to the store. A malformed token is read as the one that
//! nobody holds.

use core::fmt;

use dflockd_api::check::{self, Invalid};
use dflockd_api::command::{
    Acknowledge, Acquire, Add, BarrierWait, Cancel, CounterSet, Enqueue, ForceRelease,
    KvCompareAndSet, KvDelete, KvSet, Pop, Push, Release, Renew, Signal, Subscribe, Unsubscribe,
    Wait,
};
use dflockd_api::{
    Command, End, Expect, Fence, Mode, Query, RequestId, Space, Span, Subscription, Token,
};
use memchr::memchr;

use crate::line::Frame;
use crate::op::Op;
use crate::text::{
    Shown, Unit, parse_i64, parse_number, parse_u64, print_i64, print_u64, split_field, trim,
};

/// The most keys one `ls` may ask for.
pub const LS_LIMIT_MAX: usize = 10_000;

/// The argument of `stats` that asks for no more than the cluster.
const ONLY_CLUSTER: &[u8] = b"cluster";
/// What the third line of [`Lines::acquire`] holds.
pub(crate) const ACQUIRE: &str = "<timeout> [<lease>]";
/// What the third line of [`Lines::semaphore_acquire`] holds.
pub(crate) const ACQUIRE_SEMAPHORE: &str = "<timeout> <limit> [<lease>]";

/// A well-formed request.
///
/// Commands that differ in name only are one: the token or the enqueue record tells a read lock from a write lock, not
/// `rr` or `wr`. Where the answer depends on the name (`rn` carries the fence, `n` does not) the caller still has the
/// [`Op`] it parsed.
#[derive(Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields repeat the commands' arguments, described in `OPS`")]
pub enum Request<'a> {
    /// What the store is asked to do. No salt is drawn yet.
    Command(Command<'a>),
    /// What the store is asked to tell.
    Query(Query<'a>),
    /// `force-release`. The token is the administrator's.
    ForceRelease { command: ForceRelease<'a>, token: &'a [u8], reason: &'a str },
    /// `end-session`. The token is the administrator's.
    EndSession { session: u64, token: &'a [u8], reason: &'a str },
    /// `cluster`. The token is the administrator's; what the verb needs stands in the JSON, which may be empty.
    Cluster { verb: &'a str, token: &'a [u8], json: &'a str },
    /// `auth`.
    Auth { token: &'a [u8] },
    /// `hello`. Words that are not known are left to the server to ignore.
    Hello { name: &'a str, words: Vec<&'a str> },
    /// `stable-ref`.
    StableRef { reference: &'a str },
    /// `ping`.
    Ping,
    /// `stats`.
    Stats,
    /// `stats` with the argument `cluster`: only the members. A server that does not know the argument tells all.
    Members,
    /// `barrier`.
    Barrier,
    /// `inspect`.
    Inspect { key: &'a [u8] },
    /// `ls`. An empty prefix, on the wire `_`, means all keys; the prefix `_` itself cannot be sent.
    Ls { prefix: &'a [u8], limit: usize, after: Option<&'a [u8]> },
}

/// Why a frame is no request. Shows nothing of the frame, so it can go into any log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ParseError {
    /// The class of the error; logged only, the client always sees a bare `error`.
    pub code: u8,
    /// What is wrong.
    pub text: &'static str,
}

impl ParseError {
    /// [`Op::parse`] found no command.
    pub const UNKNOWN_COMMAND: Self = Self::new(3, "unknown command");
    /// A numbered connection sent a request without a well-formed number.
    pub const BAD_NUMBER: Self = Self::new(4, "request number missing or malformed");
    /// A line took longer to arrive than it may. The connection is closed.
    pub const READ_TIMEOUT: Self = Self::new(10, "read timeout");
    /// A line is over its limit. The connection is closed.
    pub const LINE_TOO_LONG: Self = Self::new(12, "line too long");

    const fn new(code: u8, text: &'static str) -> Self {
        Self { code, text }
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)
    }
}

impl core::error::Error for ParseError {}

impl From<Invalid> for ParseError {
    fn from(Invalid { code, text }: Invalid) -> Self {
        Self { code, text }
    }
}

type Parsed<'a> = Result<Request<'a>, ParseError>;

impl<'a> Request<'a> {
    /// The request for a command.
    #[must_use]
    pub fn command(command: impl Into<Command<'a>>) -> Self {
        Self::Command(command.into())
    }

    /// Reads the lines of a command `op`; checks the key, then the number of fields, then the fields
    /// from left to right.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    #[inline]
    pub fn parse(op: Op, frame: &Frame<'a>, unit: Unit) -> Parsed<'a> {
        op.read(Lines { key: frame.key, arg: frame.arg, unit })
    }

    /// The command this request is sent as.
    ///
    /// # Panics
    ///
    /// If it is none: engines and other APIs have commands that no line stands for.
    #[must_use]
    pub const fn op(&self) -> Op {
        match self {
            Self::Command(command) => op_of(command),
            Self::Query(query) => match query {
                Query::Counter { .. } => Op::Get,
                Query::Kv { .. } => Op::Kget,
                Query::Entry { .. } => panic!("the line protocol has no revisions"),
                Query::Length { .. } => Op::Llen,
                Query::Range { .. } => Op::Lrange,
            },
            Self::ForceRelease { .. } => Op::ForceRelease,
            Self::EndSession { .. } => Op::EndSession,
            Self::Cluster { .. } => Op::Cluster,
            Self::Auth { .. } => Op::Auth,
            Self::Hello { .. } => Op::Hello,
            Self::StableRef { .. } => Op::StableRef,
            Self::Ping => Op::Ping,
            Self::Stats | Self::Members => Op::Stats,
            Self::Barrier => Op::Barrier,
            Self::Inspect { .. } => Op::Inspect,
            Self::Ls { .. } => Op::Ls,
        }
    }

    /// Appends the three lines of this request; on a numbered connection [`print_number`] goes first.
    ///
    /// Lengths of time are rounded up to whole units and cut to the largest a server accepts. Bytes
    /// are written as they are: a key, value or payload from outside must be checked before, or an
    /// LF in it starts another request.
    ///
    /// # Panics
    ///
    /// If it is no request of the line protocol, see [`Request::op`].
    ///
    /// [`print_number`]: crate::print_number
    pub fn print(&self, unit: Unit, out: &mut Vec<u8>) {
        out.extend_from_slice(self.op().name().as_bytes());
        out.push(b'\n');
        self.print_key(out);
        out.push(b'\n');
        self.print_arg(unit, out);
        out.push(b'\n');
    }

    fn print_key(&self, out: &mut Vec<u8>) {
        let line = match *self {
            Self::Command(ref command) => subject(command),
            Self::Query(
                Query::Counter { key }
                | Query::Kv { key }
                | Query::Entry { key }
                | Query::Length { key }
                | Query::Range { key, .. },
            )
            | Self::Inspect { key } => key,
            Self::ForceRelease { command, .. } => command.key,
            Self::EndSession { session, .. } => return print_u64(session, out),
            Self::Cluster { verb, .. } => verb.as_bytes(),
            Self::Hello { name, .. } => name.as_bytes(),
            Self::StableRef { reference } => reference.as_bytes(),
            Self::Ls { prefix: b"", .. }
            | Self::Auth { .. }
            | Self::Ping
            | Self::Stats
            | Self::Members
            | Self::Barrier => b"_",
            Self::Ls { prefix, .. } => prefix,
        };
        out.extend_from_slice(line);
    }

    fn print_arg(&self, unit: Unit, out: &mut Vec<u8>) {
        match *self {
            Self::Command(ref command) => print_command(command, unit, out),
            Self::Query(Query::Range { start, stop, .. }) => {
                print_i64(start, out);
                out.push(b' ');
                print_i64(stop, out);
            }
            Self::Query(_)
            | Self::Ping
            | Self::Stats
            | Self::Barrier
            | Self::StableRef { .. }
            | Self::Inspect { .. } => (),
            Self::Members => out.extend_from_slice(ONLY_CLUSTER),
            Self::Auth { token } => out.extend_from_slice(token),
            Self::Hello { ref words, .. } => {
                for (position, word) in words.iter().enumerate() {
                    if position > 0 {
                        out.push(b' ');
                    }
                    out.extend_from_slice(word.as_bytes());
                }
            }
            Self::Ls { limit, after, .. } => {
                print_u64(limit as u64, out);
                if let Some(after) = after {
                    out.push(b' ');
                    out.extend_from_slice(after);
                }
            }
            Self::ForceRelease { command: ForceRelease { space, fence, .. }, token, reason } => {
                out.extend_from_slice(token);
                out.extend_from_slice(match space {
                    Space::Locks => b" lock ",
                    Space::Semaphores => b" sem ",
                });
                print_u64(fence.0, out);
                out.push(b' ');
                out.extend_from_slice(reason.as_bytes());
            }
            Self::EndSession { token, reason, .. } => {
                out.extend_from_slice(token);
                out.push(b' ');
                out.extend_from_slice(reason.as_bytes());
            }
            Self::Cluster { token, json, .. } => {
                out.extend_from_slice(token);
                if !json.is_empty() {
                    out.push(b' ');
                    out.extend_from_slice(json.as_bytes());
                }
            }
        }
    }
}

impl fmt::Debug for Request<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut key = Vec::new();
        self.print_key(&mut key);
        f.debug_struct("Request")
            .field("op", &self.op())
            .field("key", &Shown(&key))
            .finish_non_exhaustive()
    }
}

/// The key of a command, or what has its place: a channel, a pattern.
fn subject<'a>(command: &Command<'a>) -> &'a [u8] {
    if let Command::Signal(Signal { channel, .. }) = *command {
        return channel;
    }
    if let Command::Subscribe(Subscribe { to: subscription })
    | Command::Unsubscribe(Unsubscribe { from: subscription }) = *command
    {
        return match subscription {
            Subscription::Signals { pattern, .. } | Subscription::Changes { pattern, .. } => {
                pattern
            }
            Subscription::Leaders { key } => key,
        };
    }
    command.key().unwrap_or(b"_")
}

const fn op_of(command: &Command<'_>) -> Op {
    match command {
        Command::Acquire(Acquire { mode, .. }) => match mode {
            Mode::Mutex => Op::L,
            Mode::Election => Op::Elect,
            Mode::Semaphore { .. } => Op::Sl,
            Mode::Read => Op::Rl,
            Mode::Write => Op::Wl,
        },
        Command::Enqueue(Enqueue { mode, .. }) => match mode {
            // An election shares its queue with the mutex of the same key.
            Mode::Mutex | Mode::Election => Op::E,
            Mode::Semaphore { .. } => Op::Se,
            Mode::Read => Op::Re,
            Mode::Write => Op::We,
        },
        Command::Wait(Wait { space: Space::Locks, .. }) => Op::W,
        Command::Wait(Wait { space: Space::Semaphores, .. }) => Op::Sw,
        Command::Release(Release { resign: true, .. }) => Op::Resign,
        Command::Release(Release { space: Space::Locks, .. }) => Op::R,
        Command::Release(Release { space: Space::Semaphores, .. }) => Op::Sr,
        Command::Renew(Renew { space: Space::Locks, .. }) => Op::N,
        Command::Renew(Renew { space: Space::Semaphores, .. }) => Op::Sn,
        Command::Add(Add { decrement: false, .. }) => Op::Incr,
        Command::Add(Add { decrement: true, .. }) => Op::Decr,
        Command::CounterSet(_) => Op::Cset,
        Command::KvSet(_) => Op::Kset,
        Command::KvDelete(_) => Op::Kdel,
        Command::KvCompareAndSet(_) => Op::Kcas,
        Command::Push(Push { end: End::Left, .. }) => Op::Lpush,
        Command::Push(Push { end: End::Right, .. }) => Op::Rpush,
        Command::Pop(Pop { end: End::Left, wait: None, .. }) => Op::Lpop,
        Command::Pop(Pop { end: End::Right, wait: None, .. }) => Op::Rpop,
        Command::Pop(Pop { end: End::Left, wait: Some(_), .. }) => Op::Blpop,
        Command::Pop(Pop { end: End::Right, wait: Some(_), .. }) => Op::Brpop,
        Command::BarrierWait(_) => Op::Bwait,
        Command::Signal(_) => Op::Signal,
        Command::Subscribe(Subscribe { to }) => match to {
            Subscription::Signals { .. } => Op::Listen,
            Subscription::Changes { .. } => Op::Watch,
            Subscription::Leaders { .. } => Op::Observe,
        },
        Command::Unsubscribe(Unsubscribe { from }) => match from {
            Subscription::Signals { .. } => Op::Unlisten,
            Subscription::Changes { .. } => Op::Unwatch,
            Subscription::Leaders { .. } => Op::Unobserve,
        },
        Command::Cancel(_) => Op::Cancel,
        Command::Acknowledge(_) => Op::Ack,
        // As a request it has an operator's token and a reason.
        Command::ForceRelease(_)
        | Command::RenewSession(_)
        | Command::Undo(_)
        | Command::Tick
        | Command::NewTerm
        | Command::Detach { .. }
        | Command::Attach
        | Command::Identify { .. }
        | Command::Orphan { .. }
        | Command::EndSession { .. } => panic!("no command of the line protocol"),
    }
}

/// Appends the third line of a command.
fn print_command(command: &Command<'_>, unit: Unit, out: &mut Vec<u8>) {
    let print_span = |span: Span, out: &mut Vec<u8>| print_u64(unit.count_up(span), out);
    match *command {
        Command::Acquire(Acquire { mode, wait, lease, salt: _, key: _ }) => {
            print_span(wait, out);
            if let Mode::Semaphore { limit } = mode {
                out.push(b' ');
                print_u64(limit.into(), out);
            }
            print_lease(lease, unit, out);
        }
        Command::Enqueue(Enqueue { mode, lease, salt: _, key: _ }) => {
            if let Mode::Semaphore { limit } = mode {
                print_u64(limit.into(), out);
                print_lease(lease, unit, out);
            } else if let Some(lease) = lease {
                print_span(lease, out);
            }
        }
        Command::Wait(Wait { wait, space: _, key: _ }) => print_span(wait, out),
        Command::Release(Release { token, space: _, resign: _, key: _ }) => {
            out.extend_from_slice(token.text().as_bytes());
        }
        Command::Renew(Renew { token, lease, space: _, key: _ }) => {
            out.extend_from_slice(token.text().as_bytes());
            print_lease(lease, unit, out);
        }
        Command::Add(Add { delta, decrement: _, key: _ }) => print_i64(delta, out),
        Command::CounterSet(CounterSet { value, key: _ }) => print_i64(value, out),
        Command::KvSet(KvSet { value, ttl, key: _ }) => {
            out.extend_from_slice(value);
            out.push(b'\t');
            print_span(ttl.unwrap_or_default(), out);
        }
        Command::KvCompareAndSet(KvCompareAndSet { expect, value, ttl, key: _ }) => {
            match expect {
                Expect::Absent => (),
                Expect::Value(old) => out.extend_from_slice(old),
                Expect::Revision(_) => panic!("the line protocol has no revisions"),
            }
            out.push(b'\t');
            out.extend_from_slice(value);
            out.push(b'\t');
            print_span(ttl.unwrap_or_default(), out);
        }
        Command::Push(Push { value, end: _, key: _ }) => out.extend_from_slice(value),
        Command::Pop(Pop { wait: Some(wait), end: _, key: _ }) => print_span(wait, out),
        Command::BarrierWait(BarrierWait { count, wait, key: _ }) => {
            print_u64(count.into(), out);
            out.push(b' ');
            print_span(wait, out);
        }
        Command::Signal(Signal { payload, channel: _ }) => out.extend_from_slice(payload),
        Command::Subscribe(Subscribe { to: Subscription::Signals { group, .. } })
        | Command::Unsubscribe(Unsubscribe { from: Subscription::Signals { group, .. } }) => {
            out.extend_from_slice(group);
        }
        Command::Cancel(Cancel { request }) => print_u64(request.0, out),
        Command::Acknowledge(Acknowledge { up_to }) => print_u64(up_to.0, out),
        Command::KvDelete(_)
        | Command::Pop(Pop { wait: None, .. })
        | Command::Subscribe(_)
        | Command::Unsubscribe(_) => (),
        // `op_of` refuses them.
        Command::ForceRelease(_)
        | Command::RenewSession(_)
        | Command::Undo(_)
        | Command::Tick
        | Command::NewTerm
        | Command::Detach { .. }
        | Command::Attach
        | Command::Identify { .. }
        | Command::Orphan { .. }
        | Command::EndSession { .. } => (),
    }
}

/// Appends ` <lease>`, or nothing for the server's default.
fn print_lease(lease: Option<Span>, unit: Unit, out: &mut Vec<u8>) {
    if let Some(lease) = lease {
        out.push(b' ');
        print_u64(unit.count_up(lease), out);
    }
}

/// The second and third line of a request, with a reader for each form that they have.
#[derive(Clone, Copy)]
pub(crate) struct Lines<'a> {
    pub(crate) key: &'a [u8],
    pub(crate) arg: &'a [u8],
    pub(crate) unit: Unit,
}

impl<'a> Lines<'a> {
    pub(crate) fn bare(self, request: Request<'a>) -> Parsed<'a> {
        Ok(request)
    }

    /// Any other argument is ignored.
    pub(crate) fn stats(self) -> Parsed<'a> {
        Ok(if trim(self.arg) == ONLY_CLUSTER { Request::Members } else { Request::Stats })
    }

    pub(crate) fn auth(self) -> Parsed<'a> {
        Ok(Request::Auth { token: trim(self.arg) })
    }

    pub(crate) fn stable_ref(self) -> Parsed<'a> {
        let printable = |byte: u8| matches!(byte, 0x20..=0x7e);
        let reference = ascii(trim(self.key), 64, printable)
            .ok_or(ParseError::new(8, "stable ref is not 1 to 64 printable bytes"))?;
        Ok(Request::StableRef { reference })
    }

    pub(crate) fn hello(self) -> Parsed<'a> {
        let printable = |byte: u8| byte.is_ascii_graphic();
        let name = ascii(self.key, 64, printable).ok_or(ParseError::new(
            5,
            "client name is not 1 to 64 printable bytes without space",
        ))?;
        let mut words = Vec::new();
        let mut rest = self.arg;
        loop {
            let (word, behind) = split_field(rest);
            if word.is_empty() {
                return Ok(Request::Hello { name, words });
            }
            let word = ascii(word, usize::MAX, printable)
                .ok_or(ParseError::new(8, "feature word is not printable"))?;
            words.push(word);
            rest = behind;
        }
    }

    pub(crate) fn acquire(self, mode: Mode) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [wait, lease] = fields(self.arg, 1)?;
        let (wait, lease) = (self.timeout(wait)?, self.lease(lease)?);
        command(Acquire { mode, wait, lease, salt: 0, key })
    }

    pub(crate) fn semaphore_acquire(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [wait, limit, lease] = fields(self.arg, 2)?;
        let (wait, limit) = (self.timeout(wait)?, count(limit)?);
        let (mode, lease) = (Mode::Semaphore { limit }, self.lease(lease)?);
        command(Acquire { mode, wait, lease, salt: 0, key })
    }

    pub(crate) fn enqueue(self, mode: Mode) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [lease] = fields(self.arg, 0)?;
        command(Enqueue { mode, lease: self.lease(lease)?, salt: 0, key })
    }

    pub(crate) fn semaphore_enqueue(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [limit, lease] = fields(self.arg, 1)?;
        let mode = Mode::Semaphore { limit: count(limit)? };
        command(Enqueue { mode, lease: self.lease(lease)?, salt: 0, key })
    }

    pub(crate) fn wait(self, space: Space) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [wait] = fields(self.arg, 1)?;
        command(Wait { space, wait: self.timeout(wait)?, key })
    }

    pub(crate) fn release(self, space: Space, resign: bool) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let token = trim(self.arg);
        if token.is_empty() {
            return Err(ParseError::new(7, "empty token"));
        }
        command(Release { space, token: token_of(token), resign, key })
    }

    pub(crate) fn renew(self, space: Space) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [token, lease] = fields(self.arg, 1)?;
        command(Renew { space, token: token_of(token), lease: self.lease(lease)?, key })
    }

    pub(crate) fn observe(self) -> Parsed<'a> {
        command(Subscribe { to: Subscription::Leaders { key: check::key(self.key)? } })
    }

    pub(crate) fn unobserve(self) -> Parsed<'a> {
        command(Unsubscribe { from: Subscription::Leaders { key: check::key(self.key)? } })
    }

    pub(crate) fn add(self, decrement: bool) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [delta] = fields(self.arg, 1)?;
        command(Add { delta: integer(delta)?, decrement, key })
    }

    pub(crate) fn get(self) -> Parsed<'a> {
        Ok(Request::Query(Query::Counter { key: check::key(self.key)? }))
    }

    pub(crate) fn counter_set(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [value] = fields(self.arg, 1)?;
        command(CounterSet { value: integer(value)?, key })
    }

    pub(crate) fn kv_set(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let Some(tab) = memchr(b'\t', self.arg) else {
            return command(KvSet { ttl: None, key, value: check::value(self.arg)? });
        };
        let (value, ttl) = (&self.arg[..tab], &self.arg[tab + 1..]);
        if memchr(b'\t', ttl).is_some() {
            return Err(ParseError::new(8, "more than one TAB"));
        }
        let value = check::value(value)?;
        if ttl.is_empty() {
            return Err(ParseError::new(8, "no TTL behind the TAB"));
        }
        command(KvSet { ttl: self.ttl(ttl)?, key, value })
    }

    pub(crate) fn kv_get(self) -> Parsed<'a> {
        Ok(Request::Query(Query::Kv { key: check::key(self.key)? }))
    }

    pub(crate) fn kv_delete(self) -> Parsed<'a> {
        command(KvDelete { key: check::key(self.key)? })
    }

    pub(crate) fn kv_compare_and_set(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let mut parts = self.arg.split(|byte| *byte == b'\t');
        let (Some(old), Some(new), Some(ttl), None) =
            (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(ParseError::new(8, "not exactly two TABs"));
        };
        let expect = match old {
            b"" => Expect::Absent,
            old => Expect::Value(check::value(old)?),
        };
        let value = check::value(new)?;
        let ttl = match ttl {
            b"" => None,
            ttl => self.ttl(ttl)?,
        };
        command(KvCompareAndSet { expect, ttl, key, value })
    }

    pub(crate) fn push(self, end: End) -> Parsed<'a> {
        let key = check::key(self.key)?;
        command(Push { end, key, value: check::value(self.arg)? })
    }

    pub(crate) fn pop(self, end: End) -> Parsed<'a> {
        command(Pop { end, wait: None, key: check::key(self.key)? })
    }

    pub(crate) fn blocking_pop(self, end: End) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [wait] = fields(self.arg, 1)?;
        command(Pop { end, wait: Some(self.timeout(wait)?), key })
    }

    pub(crate) fn length(self) -> Parsed<'a> {
        Ok(Request::Query(Query::Length { key: check::key(self.key)? }))
    }

    pub(crate) fn range(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [start, stop] = fields(self.arg, 2)?;
        Ok(Request::Query(Query::Range { key, start: integer(start)?, stop: integer(stop)? }))
    }

    pub(crate) fn barrier_wait(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let [participants, wait] = fields(self.arg, 2)?;
        command(BarrierWait { count: count(participants)?, wait: self.timeout(wait)?, key })
    }

    pub(crate) fn listen(self) -> Parsed<'a> {
        let (pattern, group) = (check::pattern(self.key)?, trim(self.arg));
        command(Subscribe { to: Subscription::Signals { pattern, group } })
    }

    pub(crate) fn unlisten(self) -> Parsed<'a> {
        let (pattern, group) = (check::old_pattern(self.key)?, trim(self.arg));
        command(Unsubscribe { from: Subscription::Signals { pattern, group } })
    }

    pub(crate) fn signal(self) -> Parsed<'a> {
        let channel = check::channel(self.key)?;
        command(Signal { channel, payload: check::payload(channel, self.arg)? })
    }

    pub(crate) fn watch(self) -> Parsed<'a> {
        let pattern = check::pattern(self.key)?;
        command(Subscribe { to: Subscription::Changes { pattern, from: None } })
    }

    pub(crate) fn unwatch(self) -> Parsed<'a> {
        let pattern = check::old_pattern(self.key)?;
        command(Unsubscribe { from: Subscription::Changes { pattern, from: None } })
    }

    pub(crate) fn cancel(self) -> Parsed<'a> {
        command(Cancel { request: self.number()? })
    }

    pub(crate) fn acknowledge(self) -> Parsed<'a> {
        command(Acknowledge { up_to: self.number()? })
    }

    pub(crate) fn inspect(self) -> Parsed<'a> {
        Ok(Request::Inspect { key: check::key(self.key)? })
    }

    pub(crate) fn ls(self) -> Parsed<'a> {
        let prefix = match check::key(self.key)? {
            b"_" => b"",
            prefix => prefix,
        };
        let [limit, after] = fields(self.arg, 1)?;
        let limit = u64::try_from(integer(limit)?).unwrap_or_default();
        let limit = check::page(Some(limit), LS_LIMIT_MAX, LS_LIMIT_MAX)?;
        let after = match after {
            b"" => None,
            after => Some(check::key(after)?),
        };
        Ok(Request::Ls { prefix, limit, after })
    }

    pub(crate) fn force_release(self) -> Parsed<'a> {
        let key = check::key(self.key)?;
        let (token, rest) = split_field(self.arg);
        let (space, rest) = split_field(rest);
        let (fence, reason) = split_field(rest);
        if reason.is_empty() {
            return Err(ParseError::new(8, "not an admin token, a space, a fence and a reason"));
        }
        let space = match space {
            b"lock" => Space::Locks,
            b"sem" => Space::Semaphores,
            _ => return Err(ParseError::new(8, "neither lock nor sem")),
        };
        let fence =
            parse_u64(fence).ok_or(ParseError::new(4, "fence is not an unsigned integer"))?;
        let command = ForceRelease { space, fence: Fence(fence), key };
        Ok(Request::ForceRelease { command, token, reason: check_reason(reason)? })
    }

    pub(crate) fn end_session(self) -> Parsed<'a> {
        let session = parse_u64(self.key).ok_or(ParseError::new(5, "key is not a session id"))?;
        let (token, reason) = split_field(self.arg);
        if reason.is_empty() {
            return Err(ParseError::new(8, "not an admin token and a reason"));
        }
        Ok(Request::EndSession { session, token, reason: check_reason(reason)? })
    }

    pub(crate) fn cluster(self) -> Parsed<'a> {
        let verb = ascii(self.key, 32, |byte| byte.is_ascii_lowercase() || byte == b'-')
            .ok_or(ParseError::new(5, "key is not a verb"))?;
        let (token, json) = split_field(self.arg);
        if token.is_empty() {
            return Err(ParseError::new(8, "no admin token"));
        }
        Ok(Request::Cluster { verb, token, json: check_text(json)? })
    }

    fn timeout(self, field: &[u8]) -> Result<Span, ParseError> {
        self.span(field, 0, ParseError::new(6, "timeout negative or too large"))
    }

    /// The lease in `field`, none if it is missing.
    fn lease(self, field: &[u8]) -> Result<Option<Span>, ParseError> {
        if field.is_empty() {
            return Ok(None);
        }
        self.span(field, 1, ParseError::new(9, "lease not positive or too large")).map(Some)
    }

    /// The TTL in `field`, none if it is 0.
    fn ttl(self, field: &[u8]) -> Result<Option<Span>, ParseError> {
        let ttl = self.span(field, 0, ParseError::new(4, "TTL negative or too large"))?;
        Ok(Some(ttl).filter(|ttl| *ttl > Span::ZERO))
    }

    fn span(self, field: &[u8], min: u64, out_of_range: ParseError) -> Result<Span, ParseError> {
        let count = u64::try_from(integer(field)?).map_err(|_| out_of_range)?;
        if count < min || count > self.unit.count_max() {
            return Err(out_of_range);
        }
        Ok(self.unit.span(count))
    }

    /// The number of a request.
    fn number(self) -> Result<RequestId, ParseError> {
        let [number] = fields(self.arg, 1)?;
        let number = parse_number(number).ok_or(ParseError::new(4, "not a request number"))?;
        Ok(RequestId(number))
    }
}

fn command<'a>(command: impl Into<Command<'a>>) -> Parsed<'a> {
    Ok(Request::Command(command.into()))
}

fn token_of(text: &[u8]) -> Token {
    Token::parse(text).unwrap_or(Token::NONE)
}

/// Text that stays on its line, of whatever length the line has.
fn check_text(text: &[u8]) -> Result<&str, ParseError> {
    core::str::from_utf8(text)
        .ok()
        .filter(|text| !text.contains(|char: char| char.is_control() && char != '\t'))
        .ok_or(ParseError::new(8, "not printable text"))
}

fn check_reason(reason: &[u8]) -> Result<&str, ParseError> {
    Ok(check::reason(check_text(reason)?)?)
}

/// The fields of `arg`, at least `min` and at most `MAX`; those that are missing are empty.
fn fields<const MAX: usize>(arg: &[u8], min: usize) -> Result<[&[u8]; MAX], ParseError> {
    let mut fields = [&b""[..]; MAX];
    let mut found = 0;
    let mut rest = arg;
    loop {
        let (field, behind) = split_field(rest);
        if field.is_empty() {
            break;
        }
        let Some(slot) = fields.get_mut(found) else {
            return Err(ParseError::new(8, "too many fields"));
        };
        *slot = field;
        found += 1;
        rest = behind;
    }
    if found < min { Err(ParseError::new(8, "too few fields")) } else { Ok(fields) }
}

fn integer(field: &[u8]) -> Result<i64, ParseError> {
    parse_i64(field).ok_or(ParseError::new(4, "not an integer or out of range"))
}

fn count(field: &[u8]) -> Result<u32, ParseError> {
    Ok(check::count(integer(field)?)?)
}

/// `bytes` as text, if there are 1 to `bytes_max` and all are `allowed` ASCII.
fn ascii(bytes: &[u8], bytes_max: usize, allowed: impl Fn(u8) -> bool) -> Option<&str> {
    let fits = (1..=bytes_max).contains(&bytes.len());
    if !fits || !bytes.iter().all(|byte| byte.is_ascii() && allowed(*byte)) {
        return None;
    }
    core::str::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests;
