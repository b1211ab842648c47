//! Frames to requests and back. Everything that can be said about a request without knowing the
//! server's state is checked here; whoever holds a [`Request`] need not check it again.
//!
//! Not checked: how long a value is, because that limit belongs to the store, and what a token is,
//! because a malformed one simply is not held.

use core::fmt;
use core::time::Duration;

use dflockd_api::check::{self, Invalid};
use dflockd_api::{End, Mode, Space};
use memchr::memchr;

use crate::line::Frame;
use crate::op::Op;
use crate::text::{
    Shown, Unit, parse_i64, parse_number, parse_u64, print_i64, print_u64, split_field, trim,
};

/// The most keys one `ls` may ask for.
pub const LS_LIMIT_MAX: usize = 10_000;

/// A well-formed request.
///
/// Commands that differ in name only are one variant: the token or the enqueue record tells a read
/// lock from a write lock, not `rr` or `wr`. Where the answer depends on the name (`rn` carries the
/// fence, `n` does not) the caller still has the [`Op`] it parsed.
#[derive(Clone, PartialEq, Eq)]
#[expect(missing_docs, reason = "the fields repeat the commands' arguments, described in `OPS`")]
pub enum Request<'a> {
    /// `auth`.
    Auth { token: &'a [u8] },
    /// `ping`.
    Ping,
    /// `stats`.
    Stats,
    /// `barrier`.
    Barrier,
    /// `stable-ref`.
    StableRef { reference: &'a str },
    /// `hello`. Words that are not known are left to the server to ignore.
    Hello { name: &'a str, words: Vec<&'a str> },
    /// `l`, `sl`, `rl`, `wl`, `elect`. No lease means the server's default.
    Acquire { mode: Mode, key: &'a [u8], wait: Duration, lease: Option<Duration> },
    /// `r`, `sr`, `rr`, `wr`, `resign`.
    Release { space: Space, key: &'a [u8], token: &'a [u8], resign: bool },
    /// `n`, `sn`, `rn`, `wn`. No lease means the server's default.
    Renew { space: Space, key: &'a [u8], token: &'a [u8], lease: Option<Duration> },
    /// `e`, `se`, `re`, `we`; never an election.
    Enqueue { mode: Mode, key: &'a [u8], lease: Option<Duration> },
    /// `w`, `sw`, `rw`, `ww`.
    Wait { space: Space, key: &'a [u8], wait: Duration },
    /// `observe`.
    Observe { key: &'a [u8] },
    /// `unobserve`.
    Unobserve { key: &'a [u8] },
    /// `incr`, `decr`. The sign stays apart: the smallest integer cannot be negated.
    Add { key: &'a [u8], delta: i64, decrement: bool },
    /// `get`.
    CounterGet { key: &'a [u8] },
    /// `cset`.
    CounterSet { key: &'a [u8], value: i64 },
    /// `kset`. No TTL means no expiry.
    KvSet { key: &'a [u8], value: &'a [u8], ttl: Option<Duration> },
    /// `kget`.
    KvGet { key: &'a [u8] },
    /// `kdel`.
    KvDelete { key: &'a [u8] },
    /// `kcas`. No old value means that there must be no entry.
    KvCompareAndSet { key: &'a [u8], old: Option<&'a [u8]>, new: &'a [u8], ttl: Option<Duration> },
    /// `lpush`, `rpush`.
    Push { key: &'a [u8], end: End, value: &'a [u8] },
    /// `lpop`, `rpop`.
    Pop { key: &'a [u8], end: End },
    /// `llen`.
    Length { key: &'a [u8] },
    /// `lrange`.
    Range { key: &'a [u8], start: i64, stop: i64 },
    /// `blpop`, `brpop`.
    BlockingPop { key: &'a [u8], end: End, wait: Duration },
    /// `bwait`.
    BarrierWait { key: &'a [u8], count: u32, wait: Duration },
    /// `listen`. An empty group means none.
    Listen { pattern: &'a [u8], group: &'a [u8] },
    /// `unlisten`. An empty group means none.
    Unlisten { pattern: &'a [u8], group: &'a [u8] },
    /// `signal`.
    Signal { channel: &'a [u8], payload: &'a [u8] },
    /// `watch`.
    Watch { pattern: &'a [u8] },
    /// `unwatch`.
    Unwatch { pattern: &'a [u8] },
    /// `cancel`.
    Cancel { number: u64 },
    /// `ack`.
    Ack { number: u64 },
    /// `inspect`.
    Inspect { key: &'a [u8] },
    /// `ls`. An empty prefix, on the wire `_`, means all keys; the prefix `_` itself cannot be sent.
    Ls { prefix: &'a [u8], limit: usize, after: Option<&'a [u8]> },
    /// `force-release`. The token is the administrator's.
    ForceRelease { key: &'a [u8], token: &'a [u8], space: Space, fence: u64, reason: &'a str },
    /// `end-session`. The token is the administrator's.
    EndSession { session: u64, token: &'a [u8], reason: &'a str },
    /// `cluster`. The token is the administrator's; what the verb needs stands in the JSON, which may be empty.
    Cluster { verb: &'a str, token: &'a [u8], json: &'a str },
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
    /// The peer is gone.
    pub const DISCONNECTED: Self = Self::new(11, "peer disconnected");
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
    /// Reads the lines of a command `op`; checks the key, then the number of fields, then the fields
    /// from left to right.
    ///
    /// # Errors
    ///
    /// The first thing that is wrong.
    pub fn parse(op: Op, frame: &Frame<'a>, unit: Unit) -> Parsed<'a> {
        let Frame { key, arg, .. } = *frame;
        match op {
            Op::Auth => Ok(Self::Auth { token: trim(arg) }),
            Op::Ping => Ok(Self::Ping),
            Op::Stats => Ok(Self::Stats),
            Op::Barrier => Ok(Self::Barrier),
            Op::StableRef => stable_ref(key),
            Op::Hello => hello(key, arg),

            Op::L => acquire(Mode::Mutex, key, arg, unit),
            Op::Rl => acquire(Mode::Read, key, arg, unit),
            Op::Wl => acquire(Mode::Write, key, arg, unit),
            Op::Elect => acquire(Mode::Election, key, arg, unit),
            Op::Sl => semaphore_acquire(key, arg, unit),
            Op::R | Op::Rr | Op::Wr => release(Space::Locks, key, arg, false),
            Op::Resign => release(Space::Locks, key, arg, true),
            Op::Sr => release(Space::Semaphores, key, arg, false),
            Op::N | Op::Rn | Op::Wn => renew(Space::Locks, key, arg, unit),
            Op::Sn => renew(Space::Semaphores, key, arg, unit),
            Op::E => enqueue(Mode::Mutex, key, arg, unit),
            Op::Re => enqueue(Mode::Read, key, arg, unit),
            Op::We => enqueue(Mode::Write, key, arg, unit),
            Op::Se => semaphore_enqueue(key, arg, unit),
            Op::W | Op::Rw | Op::Ww => wait_for(Space::Locks, key, arg, unit),
            Op::Sw => wait_for(Space::Semaphores, key, arg, unit),
            Op::Observe => Ok(Self::Observe { key: check::key(key)? }),
            Op::Unobserve => Ok(Self::Unobserve { key: check::key(key)? }),

            Op::Incr => add(key, arg, false),
            Op::Decr => add(key, arg, true),
            Op::Get => Ok(Self::CounterGet { key: check::key(key)? }),
            Op::Cset => counter_set(key, arg),
            Op::Kset => kv_set(key, arg, unit),
            Op::Kget => Ok(Self::KvGet { key: check::key(key)? }),
            Op::Kdel => Ok(Self::KvDelete { key: check::key(key)? }),
            Op::Kcas => kv_compare_and_set(key, arg, unit),
            Op::Lpush => push(key, End::Left, arg),
            Op::Rpush => push(key, End::Right, arg),
            Op::Lpop => Ok(Self::Pop { key: check::key(key)?, end: End::Left }),
            Op::Rpop => Ok(Self::Pop { key: check::key(key)?, end: End::Right }),
            Op::Llen => Ok(Self::Length { key: check::key(key)? }),
            Op::Lrange => range(key, arg),
            Op::Blpop => blocking_pop(key, End::Left, arg, unit),
            Op::Brpop => blocking_pop(key, End::Right, arg, unit),
            Op::Bwait => barrier_wait(key, arg, unit),

            Op::Listen => Ok(Self::Listen { pattern: check::pattern(key)?, group: trim(arg) }),
            Op::Unlisten => {
                Ok(Self::Unlisten { pattern: check::old_pattern(key)?, group: trim(arg) })
            }
            Op::Signal => signal(key, arg),
            Op::Watch => Ok(Self::Watch { pattern: check::pattern(key)? }),
            Op::Unwatch => Ok(Self::Unwatch { pattern: check::old_pattern(key)? }),

            Op::Cancel => Ok(Self::Cancel { number: number(arg)? }),
            Op::Ack => Ok(Self::Ack { number: number(arg)? }),
            Op::Inspect => Ok(Self::Inspect { key: check::key(key)? }),
            Op::Ls => ls(key, arg),
            Op::ForceRelease => force_release(key, arg),
            Op::EndSession => end_session(key, arg),
            Op::Cluster => cluster(key, arg),
        }
    }

    /// The command this request is sent as.
    #[must_use]
    pub const fn op(&self) -> Op {
        match self {
            Self::Auth { .. } => Op::Auth,
            Self::Ping => Op::Ping,
            Self::Stats => Op::Stats,
            Self::Barrier => Op::Barrier,
            Self::StableRef { .. } => Op::StableRef,
            Self::Hello { .. } => Op::Hello,
            Self::Acquire { mode, .. } => match mode {
                Mode::Mutex => Op::L,
                Mode::Election => Op::Elect,
                Mode::Semaphore { .. } => Op::Sl,
                Mode::Read => Op::Rl,
                Mode::Write => Op::Wl,
            },
            Self::Release { resign: true, .. } => Op::Resign,
            Self::Release { space: Space::Locks, .. } => Op::R,
            Self::Release { space: Space::Semaphores, .. } => Op::Sr,
            Self::Renew { space: Space::Locks, .. } => Op::N,
            Self::Renew { space: Space::Semaphores, .. } => Op::Sn,
            Self::Enqueue { mode, .. } => match mode {
                // An election shares its queue with the mutex of the same key.
                Mode::Mutex | Mode::Election => Op::E,
                Mode::Semaphore { .. } => Op::Se,
                Mode::Read => Op::Re,
                Mode::Write => Op::We,
            },
            Self::Wait { space: Space::Locks, .. } => Op::W,
            Self::Wait { space: Space::Semaphores, .. } => Op::Sw,
            Self::Observe { .. } => Op::Observe,
            Self::Unobserve { .. } => Op::Unobserve,
            Self::Add { decrement: false, .. } => Op::Incr,
            Self::Add { decrement: true, .. } => Op::Decr,
            Self::CounterGet { .. } => Op::Get,
            Self::CounterSet { .. } => Op::Cset,
            Self::KvSet { .. } => Op::Kset,
            Self::KvGet { .. } => Op::Kget,
            Self::KvDelete { .. } => Op::Kdel,
            Self::KvCompareAndSet { .. } => Op::Kcas,
            Self::Push { end: End::Left, .. } => Op::Lpush,
            Self::Push { end: End::Right, .. } => Op::Rpush,
            Self::Pop { end: End::Left, .. } => Op::Lpop,
            Self::Pop { end: End::Right, .. } => Op::Rpop,
            Self::Length { .. } => Op::Llen,
            Self::Range { .. } => Op::Lrange,
            Self::BlockingPop { end: End::Left, .. } => Op::Blpop,
            Self::BlockingPop { end: End::Right, .. } => Op::Brpop,
            Self::BarrierWait { .. } => Op::Bwait,
            Self::Listen { .. } => Op::Listen,
            Self::Unlisten { .. } => Op::Unlisten,
            Self::Signal { .. } => Op::Signal,
            Self::Watch { .. } => Op::Watch,
            Self::Unwatch { .. } => Op::Unwatch,
            Self::Cancel { .. } => Op::Cancel,
            Self::Ack { .. } => Op::Ack,
            Self::Inspect { .. } => Op::Inspect,
            Self::Ls { .. } => Op::Ls,
            Self::ForceRelease { .. } => Op::ForceRelease,
            Self::EndSession { .. } => Op::EndSession,
            Self::Cluster { .. } => Op::Cluster,
        }
    }

    /// How long the server may let this request wait; none if it answers at once.
    #[must_use]
    pub const fn wait(&self) -> Option<Duration> {
        match *self {
            Self::Acquire { wait, .. }
            | Self::Wait { wait, .. }
            | Self::BlockingPop { wait, .. }
            | Self::BarrierWait { wait, .. } => Some(wait),
            Self::Auth { .. }
            | Self::Ping
            | Self::Stats
            | Self::Barrier
            | Self::StableRef { .. }
            | Self::Hello { .. }
            | Self::Release { .. }
            | Self::Renew { .. }
            | Self::Enqueue { .. }
            | Self::Observe { .. }
            | Self::Unobserve { .. }
            | Self::Add { .. }
            | Self::CounterGet { .. }
            | Self::CounterSet { .. }
            | Self::KvSet { .. }
            | Self::KvGet { .. }
            | Self::KvDelete { .. }
            | Self::KvCompareAndSet { .. }
            | Self::Push { .. }
            | Self::Pop { .. }
            | Self::Length { .. }
            | Self::Range { .. }
            | Self::Listen { .. }
            | Self::Unlisten { .. }
            | Self::Signal { .. }
            | Self::Watch { .. }
            | Self::Unwatch { .. }
            | Self::Cancel { .. }
            | Self::Ack { .. }
            | Self::Inspect { .. }
            | Self::Ls { .. }
            | Self::ForceRelease { .. }
            | Self::EndSession { .. }
            | Self::Cluster { .. } => None,
        }
    }

    /// Appends the three lines of this request; on a numbered connection [`print_number`] goes first.
    ///
    /// Lengths of time are rounded up to whole units and cut to the largest a server accepts. Bytes
    /// are written as they are: a key, value or payload from outside must be checked before, or an
    /// LF in it starts another request.
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
            Self::Auth { .. }
            | Self::Ping
            | Self::Stats
            | Self::Barrier
            | Self::Cancel { .. }
            | Self::Ack { .. }
            | Self::Ls { prefix: b"", .. } => b"_",
            Self::StableRef { reference } => reference.as_bytes(),
            Self::Hello { name, .. } => name.as_bytes(),
            Self::Cluster { verb, .. } => verb.as_bytes(),
            Self::Acquire { key, .. }
            | Self::Release { key, .. }
            | Self::Renew { key, .. }
            | Self::Enqueue { key, .. }
            | Self::Wait { key, .. }
            | Self::Observe { key }
            | Self::Unobserve { key }
            | Self::Add { key, .. }
            | Self::CounterGet { key }
            | Self::CounterSet { key, .. }
            | Self::KvSet { key, .. }
            | Self::KvGet { key }
            | Self::KvDelete { key }
            | Self::KvCompareAndSet { key, .. }
            | Self::Push { key, .. }
            | Self::Pop { key, .. }
            | Self::Length { key }
            | Self::Range { key, .. }
            | Self::BlockingPop { key, .. }
            | Self::BarrierWait { key, .. }
            | Self::Inspect { key }
            | Self::ForceRelease { key, .. } => key,
            Self::Listen { pattern, .. }
            | Self::Unlisten { pattern, .. }
            | Self::Watch { pattern }
            | Self::Unwatch { pattern } => pattern,
            Self::Signal { channel, .. } => channel,
            Self::Ls { prefix, .. } => prefix,
            Self::EndSession { session, .. } => return print_u64(session, out),
        };
        out.extend_from_slice(line);
    }

    fn print_arg(&self, unit: Unit, out: &mut Vec<u8>) {
        let print_duration =
            |duration: Duration, out: &mut Vec<u8>| print_u64(unit.count_up(duration), out);
        match *self {
            Self::Ping
            | Self::Stats
            | Self::Barrier
            | Self::StableRef { .. }
            | Self::Observe { .. }
            | Self::Unobserve { .. }
            | Self::CounterGet { .. }
            | Self::KvGet { .. }
            | Self::KvDelete { .. }
            | Self::Pop { .. }
            | Self::Length { .. }
            | Self::Watch { .. }
            | Self::Unwatch { .. }
            | Self::Inspect { .. } => (),
            Self::Auth { token } | Self::Release { token, .. } => out.extend_from_slice(token),
            Self::Hello { ref words, .. } => {
                for (position, word) in words.iter().enumerate() {
                    if position > 0 {
                        out.push(b' ');
                    }
                    out.extend_from_slice(word.as_bytes());
                }
            }
            Self::Acquire { mode, wait, lease, .. } => {
                print_duration(wait, out);
                if let Mode::Semaphore { limit } = mode {
                    out.push(b' ');
                    print_u64(limit.into(), out);
                }
                print_lease(lease, unit, out);
            }
            Self::Renew { token, lease, .. } => {
                out.extend_from_slice(token);
                print_lease(lease, unit, out);
            }
            Self::Enqueue { mode: Mode::Semaphore { limit }, lease, .. } => {
                print_u64(limit.into(), out);
                print_lease(lease, unit, out);
            }
            Self::Enqueue { lease, .. } => {
                if let Some(lease) = lease {
                    print_duration(lease, out);
                }
            }
            Self::Wait { wait, .. } | Self::BlockingPop { wait, .. } => print_duration(wait, out),
            Self::Add { delta, .. } => print_i64(delta, out),
            Self::CounterSet { value, .. } => print_i64(value, out),
            Self::KvSet { value, ttl, .. } => {
                out.extend_from_slice(value);
                out.push(b'\t');
                print_duration(ttl.unwrap_or_default(), out);
            }
            Self::KvCompareAndSet { old, new, ttl, .. } => {
                out.extend_from_slice(old.unwrap_or_default());
                out.push(b'\t');
                out.extend_from_slice(new);
                out.push(b'\t');
                print_duration(ttl.unwrap_or_default(), out);
            }
            Self::Push { value, .. } => out.extend_from_slice(value),
            Self::Range { start, stop, .. } => {
                print_i64(start, out);
                out.push(b' ');
                print_i64(stop, out);
            }
            Self::BarrierWait { count, wait, .. } => {
                print_u64(count.into(), out);
                out.push(b' ');
                print_duration(wait, out);
            }
            Self::Listen { group, .. } | Self::Unlisten { group, .. } => {
                out.extend_from_slice(group);
            }
            Self::Signal { payload, .. } => out.extend_from_slice(payload),
            Self::Cancel { number } | Self::Ack { number } => print_u64(number, out),
            Self::Ls { limit, after, .. } => {
                print_u64(limit as u64, out);
                if let Some(after) = after {
                    out.push(b' ');
                    out.extend_from_slice(after);
                }
            }
            Self::ForceRelease { token, space, fence, reason, .. } => {
                out.extend_from_slice(token);
                out.extend_from_slice(match space {
                    Space::Locks => b" lock ",
                    Space::Semaphores => b" sem ",
                });
                print_u64(fence, out);
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

/// Appends ` <lease>`, or nothing for the server's default.
fn print_lease(lease: Option<Duration>, unit: Unit, out: &mut Vec<u8>) {
    if let Some(lease) = lease {
        out.push(b' ');
        print_u64(unit.count_up(lease), out);
    }
}

fn stable_ref(line: &[u8]) -> Parsed<'_> {
    let printable = |byte: u8| matches!(byte, 0x20..=0x7e);
    let reference = ascii(trim(line), 64, printable)
        .ok_or(ParseError::new(8, "stable ref is not 1 to 64 printable bytes"))?;
    Ok(Request::StableRef { reference })
}

fn hello<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let printable = |byte: u8| byte.is_ascii_graphic();
    let name = ascii(line, 64, printable)
        .ok_or(ParseError::new(5, "client name is not 1 to 64 printable bytes without space"))?;
    let mut words = Vec::new();
    let mut rest = arg;
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

fn acquire<'a>(mode: Mode, line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [wait, lease] = fields(arg, 1)?;
    Ok(Request::Acquire { mode, key, wait: timeout(wait, unit)?, lease: lease_of(lease, unit)? })
}

fn semaphore_acquire<'a>(line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [wait, limit, lease] = fields(arg, 2)?;
    let wait = timeout(wait, unit)?;
    let mode = Mode::Semaphore { limit: count(limit)? };
    Ok(Request::Acquire { mode, key, wait, lease: lease_of(lease, unit)? })
}

fn release<'a>(space: Space, line: &'a [u8], arg: &'a [u8], resign: bool) -> Parsed<'a> {
    let key = check::key(line)?;
    let token = trim(arg);
    if token.is_empty() {
        return Err(ParseError::new(7, "empty token"));
    }
    Ok(Request::Release { space, key, token, resign })
}

fn renew<'a>(space: Space, line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [token, lease] = fields(arg, 1)?;
    Ok(Request::Renew { space, key, token, lease: lease_of(lease, unit)? })
}

fn enqueue<'a>(mode: Mode, line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [lease] = fields(arg, 0)?;
    Ok(Request::Enqueue { mode, key, lease: lease_of(lease, unit)? })
}

fn semaphore_enqueue<'a>(line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [limit, lease] = fields(arg, 1)?;
    let mode = Mode::Semaphore { limit: count(limit)? };
    Ok(Request::Enqueue { mode, key, lease: lease_of(lease, unit)? })
}

fn wait_for<'a>(space: Space, line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [wait] = fields(arg, 1)?;
    Ok(Request::Wait { space, key, wait: timeout(wait, unit)? })
}

fn add<'a>(line: &'a [u8], arg: &'a [u8], decrement: bool) -> Parsed<'a> {
    let key = check::key(line)?;
    let [delta] = fields(arg, 1)?;
    Ok(Request::Add { key, delta: integer(delta)?, decrement })
}

fn counter_set<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let key = check::key(line)?;
    let [value] = fields(arg, 1)?;
    Ok(Request::CounterSet { key, value: integer(value)? })
}

fn kv_set<'a>(line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let Some(tab) = memchr(b'\t', arg) else {
        return Ok(Request::KvSet { key, value: check::value(arg)?, ttl: None });
    };
    let (value, ttl) = (&arg[..tab], &arg[tab + 1..]);
    if memchr(b'\t', ttl).is_some() {
        return Err(ParseError::new(8, "more than one TAB"));
    }
    let value = check::value(value)?;
    if ttl.is_empty() {
        return Err(ParseError::new(8, "no TTL behind the TAB"));
    }
    Ok(Request::KvSet { key, value, ttl: ttl_of(ttl, unit)? })
}

fn kv_compare_and_set<'a>(line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let mut parts = arg.split(|byte| *byte == b'\t');
    let (Some(old), Some(new), Some(ttl), None) =
        (parts.next(), parts.next(), parts.next(), parts.next())
    else {
        return Err(ParseError::new(8, "not exactly two TABs"));
    };
    let old = match old {
        b"" => None,
        old => Some(check::value(old)?),
    };
    let new = check::value(new)?;
    let ttl = match ttl {
        b"" => None,
        ttl => ttl_of(ttl, unit)?,
    };
    Ok(Request::KvCompareAndSet { key, old, new, ttl })
}

fn push<'a>(line: &'a [u8], end: End, arg: &'a [u8]) -> Parsed<'a> {
    let key = check::key(line)?;
    Ok(Request::Push { key, end, value: check::value(arg)? })
}

fn range<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let key = check::key(line)?;
    let [start, stop] = fields(arg, 2)?;
    Ok(Request::Range { key, start: integer(start)?, stop: integer(stop)? })
}

fn blocking_pop<'a>(line: &'a [u8], end: End, arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [wait] = fields(arg, 1)?;
    Ok(Request::BlockingPop { key, end, wait: timeout(wait, unit)? })
}

fn barrier_wait<'a>(line: &'a [u8], arg: &'a [u8], unit: Unit) -> Parsed<'a> {
    let key = check::key(line)?;
    let [participants, wait] = fields(arg, 2)?;
    Ok(Request::BarrierWait { key, count: count(participants)?, wait: timeout(wait, unit)? })
}

fn signal<'a>(line: &'a [u8], payload: &'a [u8]) -> Parsed<'a> {
    let channel = check::channel(line)?;
    Ok(Request::Signal { channel, payload: check::payload(channel, payload)? })
}

fn ls<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let prefix = match check::key(line)? {
        b"_" => b"",
        prefix => prefix,
    };
    let [limit, after] = fields(arg, 1)?;
    let limit = u64::try_from(integer(limit)?).unwrap_or_default();
    let limit = check::page(Some(limit), LS_LIMIT_MAX, LS_LIMIT_MAX)?;
    let after = match after {
        b"" => None,
        after => Some(check::key(after)?),
    };
    Ok(Request::Ls { prefix, limit, after })
}

fn force_release<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let key = check::key(line)?;
    let (token, rest) = split_field(arg);
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
    let fence = parse_u64(fence).ok_or(ParseError::new(4, "fence is not an unsigned integer"))?;
    Ok(Request::ForceRelease { key, token, space, fence, reason: check_reason(reason)? })
}

fn end_session<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let session = parse_u64(line).ok_or(ParseError::new(5, "key is not a session id"))?;
    let (token, reason) = split_field(arg);
    if reason.is_empty() {
        return Err(ParseError::new(8, "not an admin token and a reason"));
    }
    Ok(Request::EndSession { session, token, reason: check_reason(reason)? })
}

fn cluster<'a>(line: &'a [u8], arg: &'a [u8]) -> Parsed<'a> {
    let verb = ascii(line, 32, |byte| byte.is_ascii_lowercase() || byte == b'-')
        .ok_or(ParseError::new(5, "key is not a verb"))?;
    let (token, json) = split_field(arg);
    if token.is_empty() {
        return Err(ParseError::new(8, "no admin token"));
    }
    Ok(Request::Cluster { verb, token, json: check_text(json)? })
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

fn timeout(field: &[u8], unit: Unit) -> Result<Duration, ParseError> {
    duration(field, 0, unit, ParseError::new(6, "timeout negative or too large"))
}

/// The lease in `field`, none if it is missing.
fn lease_of(field: &[u8], unit: Unit) -> Result<Option<Duration>, ParseError> {
    if field.is_empty() {
        return Ok(None);
    }
    duration(field, 1, unit, ParseError::new(9, "lease not positive or too large")).map(Some)
}

/// The TTL in `field`, none if it is 0.
fn ttl_of(field: &[u8], unit: Unit) -> Result<Option<Duration>, ParseError> {
    let ttl = duration(field, 0, unit, ParseError::new(4, "TTL negative or too large"))?;
    Ok((!ttl.is_zero()).then_some(ttl))
}

fn duration(
    field: &[u8],
    min: u64,
    unit: Unit,
    out_of_range: ParseError,
) -> Result<Duration, ParseError> {
    let count = u64::try_from(integer(field)?).map_err(|_| out_of_range)?;
    if count < min || count > unit.count_max() {
        return Err(out_of_range);
    }
    Ok(unit.duration(count))
}

fn count(field: &[u8]) -> Result<u32, ParseError> {
    Ok(check::count(integer(field)?)?)
}

fn number(arg: &[u8]) -> Result<u64, ParseError> {
    let [number] = fields(arg, 1)?;
    parse_number(number).ok_or(ParseError::new(4, "not a request number"))
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
