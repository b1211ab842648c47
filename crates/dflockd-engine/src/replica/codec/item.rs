//! Items: what a client of some node wants, in the form in which it is forwarded and stands in the log.

use dflockd_core::{
    Command, End, Expect, Fence, Grant, Mode, Outcome, RequestId, Revision, SessionId, Space, Span,
    Subscription, Token,
};

use super::{
    Malformed, numbered, pack, put_bool, put_bytes, put_i64, put_option, put_u32, put_u64,
    take_array, take_bool, take_bytes, take_i64, take_option, take_u8, take_u32, take_u64, unpack,
};
use crate::replica::types::{Action, Bits128, Item};

/// Every kind of item, once. A retired number stays here as a comment and is never given out again.
mod kind {
    pub(super) const START: u8 = 1;
    pub(super) const KEEP: u8 = 2;
    pub(super) const ATTACH: u8 = 3;
    pub(super) const CLOSE: u8 = 4;
    pub(super) const KICK: u8 = 5;
    pub(super) const BARRIER: u8 = 6;
    pub(super) const UNDO: u8 = 7;
    pub(super) const DOORS: u8 = 8;
    pub(super) const END: u8 = 9;

    pub(super) const ACQUIRE: u8 = 16;
    pub(super) const ENQUEUE: u8 = 17;
    pub(super) const WAIT: u8 = 18;
    pub(super) const RELEASE: u8 = 19;
    pub(super) const RENEW: u8 = 20;
    pub(super) const FORCE_RELEASE: u8 = 21;
    pub(super) const ADD: u8 = 22;
    pub(super) const COUNTER_SET: u8 = 23;
    pub(super) const KV_SET: u8 = 24;
    pub(super) const KV_DELETE: u8 = 25;
    pub(super) const KV_COMPARE_AND_SET: u8 = 26;
    pub(super) const PUSH: u8 = 27;
    pub(super) const POP: u8 = 28;
    pub(super) const BARRIER_WAIT: u8 = 29;
    pub(super) const SIGNAL: u8 = 30;
    pub(super) const SUBSCRIBE: u8 = 31;
    pub(super) const UNSUBSCRIBE: u8 = 32;
    pub(super) const CANCEL: u8 = 33;
    pub(super) const ACKNOWLEDGE: u8 = 34;
    pub(super) const RENEW_SESSION: u8 = 35;
}

/// Appends an item.
///
/// An [`Action::Undo`] of an outcome that holds nothing is written as one of [`Outcome::Done`], which does as little.
///
/// # Panics
///
/// If the command is one that only the state machine gives itself: [`Command::Tick`], [`Command::NewTerm`],
/// [`Command::Detach`], [`Command::Attach`], [`Command::Orphan`] or [`Command::EndSession`].
pub fn put_item(out: &mut Vec<u8>, item: &Item<'_>) {
    match &item.action {
        Action::Start(start) => {
            put_head(out, item, kind::START);
            put_bytes(out, &pack(start));
        }
        Action::Command(command) => put_command(out, item, command),
        Action::Undo(outcome) => put_undo(out, item, outcome),
        Action::Keep { secret } => {
            put_head(out, item, kind::KEEP);
            out.extend_from_slice(secret);
        }
        Action::Attach { secret } => {
            put_head(out, item, kind::ATTACH);
            out.extend_from_slice(secret);
        }
        Action::Close { orderly, referenced } => {
            put_head(out, item, kind::CLOSE);
            put_bool(out, *orderly);
            put_bool(out, *referenced);
        }
        Action::Kick { session } => {
            put_head(out, item, kind::KICK);
            put_u64(out, session.0);
        }
        Action::End { session } => {
            put_head(out, item, kind::END);
            put_u64(out, session.0);
        }
        Action::Barrier => put_head(out, item, kind::BARRIER),
        Action::Doors(doors) => {
            put_head(out, item, kind::DOORS);
            put_bytes(out, &pack(doors));
        }
    }
}

/// Takes an item from the front. Keys and values are borrowed from `input`, which is left in the middle of the item if
/// that is malformed.
pub fn take_item<'a>(input: &mut &'a [u8]) -> Result<Item<'a>, Malformed> {
    // All at once, because this is done for every command on every node.
    let mut head: &[u8] = &take_array::<HEAD_BYTES>(input)?;
    let session = SessionId(take_u64(&mut head)?);
    let epoch = take_u32(&mut head)?;
    let request = RequestId(take_u64(&mut head)?);
    let keep = take_bool(&mut head)?;
    let action = match take_u8(&mut head)? {
        kind::START => Action::Start(unpack(take_bytes(input)?)?),
        kind::KEEP => Action::Keep { secret: take_secret(input)? },
        kind::ATTACH => Action::Attach { secret: take_secret(input)? },
        kind::CLOSE => Action::Close { orderly: take_bool(input)?, referenced: take_bool(input)? },
        kind::KICK => Action::Kick { session: SessionId(take_u64(input)?) },
        kind::END => Action::End { session: SessionId(take_u64(input)?) },
        kind::BARRIER => Action::Barrier,
        kind::DOORS => Action::Doors(unpack(take_bytes(input)?)?),
        kind::UNDO => Action::Undo(take_undo(input)?),
        kind => Action::Command(take_command(kind, input)?),
    };
    Ok(Item { session, epoch, request, keep, action })
}

const HEAD_BYTES: usize = 8 + 4 + 8 + 1 + 1;

fn put_head(out: &mut Vec<u8>, item: &Item<'_>, kind: u8) {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&item.session.0.to_le_bytes());
    head[8..12].copy_from_slice(&item.epoch.to_le_bytes());
    head[12..20].copy_from_slice(&item.request.0.to_le_bytes());
    head[20] = item.keep.into();
    head[21] = kind;
    out.extend_from_slice(&head);
}

fn put_command(out: &mut Vec<u8>, item: &Item<'_>, command: &Command<'_>) {
    match *command {
        Command::Acquire { key, mode, wait, lease, salt } => {
            put_head(out, item, kind::ACQUIRE);
            put_mode(out, mode);
            put_u64(out, wait.0);
            put_span(out, lease);
            put_u64(out, salt);
            put_bytes(out, key);
        }
        Command::Enqueue { key, mode, lease, salt } => {
            put_head(out, item, kind::ENQUEUE);
            put_mode(out, mode);
            put_span(out, lease);
            put_u64(out, salt);
            put_bytes(out, key);
        }
        Command::Wait { key, space, wait } => {
            put_head(out, item, kind::WAIT);
            put_space(out, space);
            put_u64(out, wait.0);
            put_bytes(out, key);
        }
        Command::Release { key, space, token, resign } => {
            put_head(out, item, kind::RELEASE);
            put_space(out, space);
            put_token(out, token);
            put_bool(out, resign);
            put_bytes(out, key);
        }
        Command::Renew { key, space, token, lease } => {
            put_head(out, item, kind::RENEW);
            put_space(out, space);
            put_token(out, token);
            put_span(out, lease);
            put_bytes(out, key);
        }
        Command::ForceRelease { key, space, fence } => {
            put_head(out, item, kind::FORCE_RELEASE);
            put_space(out, space);
            put_u64(out, fence.0);
            put_bytes(out, key);
        }
        Command::Add { key, delta, decrement } => {
            put_head(out, item, kind::ADD);
            put_i64(out, delta);
            put_bool(out, decrement);
            put_bytes(out, key);
        }
        Command::CounterSet { key, value } => {
            put_head(out, item, kind::COUNTER_SET);
            put_i64(out, value);
            put_bytes(out, key);
        }
        Command::KvSet { key, value, ttl } => {
            put_head(out, item, kind::KV_SET);
            put_span(out, ttl);
            put_bytes(out, key);
            put_bytes(out, value);
        }
        Command::KvDelete { key } => {
            put_head(out, item, kind::KV_DELETE);
            put_bytes(out, key);
        }
        Command::KvCompareAndSet { key, expect, value, ttl } => {
            put_head(out, item, kind::KV_COMPARE_AND_SET);
            put_expect(out, expect);
            put_span(out, ttl);
            put_bytes(out, key);
            put_bytes(out, value);
        }
        Command::Push { key, end, value } => {
            put_head(out, item, kind::PUSH);
            put_end(out, end);
            put_bytes(out, key);
            put_bytes(out, value);
        }
        Command::Pop { key, end, wait } => {
            put_head(out, item, kind::POP);
            put_end(out, end);
            put_span(out, wait);
            put_bytes(out, key);
        }
        Command::BarrierWait { key, count, wait } => {
            put_head(out, item, kind::BARRIER_WAIT);
            put_u32(out, count);
            put_u64(out, wait.0);
            put_bytes(out, key);
        }
        Command::Signal { channel, payload } => {
            put_head(out, item, kind::SIGNAL);
            put_bytes(out, channel);
            put_bytes(out, payload);
        }
        Command::Subscribe(subscription) => {
            put_head(out, item, kind::SUBSCRIBE);
            put_subscription(out, subscription);
        }
        Command::Unsubscribe(subscription) => {
            put_head(out, item, kind::UNSUBSCRIBE);
            put_subscription(out, subscription);
        }
        Command::Cancel { request } => {
            put_head(out, item, kind::CANCEL);
            put_u64(out, request.0);
        }
        Command::Acknowledge { up_to } => {
            put_head(out, item, kind::ACKNOWLEDGE);
            put_u64(out, up_to.0);
        }
        Command::RenewSession { lease } => {
            put_head(out, item, kind::RENEW_SESSION);
            put_u64(out, lease.0);
        }
        Command::Undo(outcome) => {
            debug_assert!(false, "an undo is an action of its own: it is not read back as this");
            put_undo(out, item, outcome);
        }
        Command::Tick
        | Command::NewTerm
        | Command::Detach { .. }
        | Command::Attach
        | Command::Orphan { .. }
        | Command::EndSession { .. } => {
            unreachable!("no client can cause it: it follows from an order or another action")
        }
    }
}

fn take_command<'a>(kind: u8, input: &mut &'a [u8]) -> Result<Command<'a>, Malformed> {
    Ok(match kind {
        kind::ACQUIRE => {
            let mode = take_mode(input)?;
            let wait = Span(take_u64(input)?);
            let lease = take_span(input)?;
            let salt = take_u64(input)?;
            Command::Acquire { key: take_bytes(input)?, mode, wait, lease, salt }
        }
        kind::ENQUEUE => {
            let mode = take_mode(input)?;
            let lease = take_span(input)?;
            let salt = take_u64(input)?;
            Command::Enqueue { key: take_bytes(input)?, mode, lease, salt }
        }
        kind::WAIT => {
            let space = take_space(input)?;
            let wait = Span(take_u64(input)?);
            Command::Wait { key: take_bytes(input)?, space, wait }
        }
        kind::RELEASE => {
            let space = take_space(input)?;
            let token = take_token(input)?;
            let resign = take_bool(input)?;
            Command::Release { key: take_bytes(input)?, space, token, resign }
        }
        kind::RENEW => {
            let space = take_space(input)?;
            let token = take_token(input)?;
            let lease = take_span(input)?;
            Command::Renew { key: take_bytes(input)?, space, token, lease }
        }
        kind::FORCE_RELEASE => {
            let space = take_space(input)?;
            let fence = Fence(take_u64(input)?);
            Command::ForceRelease { key: take_bytes(input)?, space, fence }
        }
        kind::ADD => {
            let delta = take_i64(input)?;
            let decrement = take_bool(input)?;
            Command::Add { key: take_bytes(input)?, delta, decrement }
        }
        kind::COUNTER_SET => {
            let value = take_i64(input)?;
            Command::CounterSet { key: take_bytes(input)?, value }
        }
        kind::KV_SET => {
            let ttl = take_span(input)?;
            Command::KvSet { key: take_bytes(input)?, value: take_bytes(input)?, ttl }
        }
        kind::KV_DELETE => Command::KvDelete { key: take_bytes(input)? },
        kind::KV_COMPARE_AND_SET => {
            let expect = take_expect(input)?;
            let ttl = take_span(input)?;
            let key = take_bytes(input)?;
            Command::KvCompareAndSet { key, expect, value: take_bytes(input)?, ttl }
        }
        kind::PUSH => {
            let end = take_end(input)?;
            Command::Push { key: take_bytes(input)?, end, value: take_bytes(input)? }
        }
        kind::POP => {
            let end = take_end(input)?;
            let wait = take_span(input)?;
            Command::Pop { key: take_bytes(input)?, end, wait }
        }
        kind::BARRIER_WAIT => {
            let count = take_u32(input)?;
            let wait = Span(take_u64(input)?);
            Command::BarrierWait { key: take_bytes(input)?, count, wait }
        }
        kind::SIGNAL => {
            Command::Signal { channel: take_bytes(input)?, payload: take_bytes(input)? }
        }
        kind::SUBSCRIBE => Command::Subscribe(take_subscription(input)?),
        kind::UNSUBSCRIBE => Command::Unsubscribe(take_subscription(input)?),
        kind::CANCEL => Command::Cancel { request: RequestId(take_u64(input)?) },
        kind::ACKNOWLEDGE => Command::Acknowledge { up_to: RequestId(take_u64(input)?) },
        kind::RENEW_SESSION => Command::RenewSession { lease: Span(take_u64(input)?) },
        _ => return Err(Malformed::Form("an unknown kind of item")),
    })
}

/// What an undo takes back.
mod undo {
    pub(super) const NOTHING: u8 = 0;
    pub(super) const GRANTED: u8 = 1;
    pub(super) const ACQUIRED: u8 = 2;
    pub(super) const POPPED: u8 = 3;
}

fn put_undo(out: &mut Vec<u8>, item: &Item<'_>, outcome: &Outcome) {
    put_head(out, item, kind::UNDO);
    match outcome {
        Outcome::Granted(grant) => {
            out.push(undo::GRANTED);
            put_grant(out, grant);
        }
        Outcome::Acquired(grant) => {
            out.push(undo::ACQUIRED);
            put_grant(out, grant);
        }
        Outcome::Popped { key, end, value } => {
            out.push(undo::POPPED);
            put_end(out, *end);
            put_bytes(out, key);
            put_bytes(out, value);
        }
        Outcome::Done
        | Outcome::Queued
        | Outcome::Renewed { .. }
        | Outcome::Timeout
        | Outcome::Empty
        | Outcome::Conflict
        | Outcome::Number(_)
        | Outcome::Value(_)
        | Outcome::Written(_)
        | Outcome::Items(_)
        | Outcome::Part(_)
        | Outcome::Compacted(_)
        | Outcome::Entry { .. }
        | Outcome::Refused(_) => out.push(undo::NOTHING),
    }
}

fn take_undo(input: &mut &[u8]) -> Result<Outcome, Malformed> {
    Ok(match take_u8(input)? {
        undo::NOTHING => Outcome::Done,
        undo::GRANTED => Outcome::Granted(take_grant(input)?),
        undo::ACQUIRED => Outcome::Acquired(take_grant(input)?),
        undo::POPPED => {
            let end = take_end(input)?;
            let key = take_bytes(input)?.into();
            Outcome::Popped { key, end, value: take_bytes(input)?.into() }
        }
        _ => return Err(Malformed::Form("an unknown kind of undo")),
    })
}

fn put_subscription(out: &mut Vec<u8>, subscription: Subscription<'_>) {
    match subscription {
        Subscription::Signals { pattern, group } => {
            out.push(0);
            put_bytes(out, pattern);
            put_bytes(out, group);
        }
        Subscription::Changes { pattern, from } => {
            out.push(1);
            put_option(out, from.map(|revision| revision.0));
            put_bytes(out, pattern);
        }
        Subscription::Leaders { key } => {
            out.push(2);
            put_bytes(out, key);
        }
    }
}

fn take_subscription<'a>(input: &mut &'a [u8]) -> Result<Subscription<'a>, Malformed> {
    Ok(match take_u8(input)? {
        0 => Subscription::Signals { pattern: take_bytes(input)?, group: take_bytes(input)? },
        1 => {
            let from = take_option(input)?.map(Revision);
            Subscription::Changes { pattern: take_bytes(input)?, from }
        }
        2 => Subscription::Leaders { key: take_bytes(input)? },
        _ => return Err(Malformed::Form("an unknown kind of subscription")),
    })
}

fn put_expect(out: &mut Vec<u8>, expect: Expect<'_>) {
    match expect {
        Expect::Absent => out.push(0),
        Expect::Value(value) => {
            out.push(1);
            put_bytes(out, value);
        }
        Expect::Revision(revision) => {
            out.push(2);
            put_u64(out, revision.0);
        }
    }
}

fn take_expect<'a>(input: &mut &'a [u8]) -> Result<Expect<'a>, Malformed> {
    Ok(match take_u8(input)? {
        0 => Expect::Absent,
        1 => Expect::Value(take_bytes(input)?),
        2 => Expect::Revision(Revision(take_u64(input)?)),
        _ => return Err(Malformed::Form("an unknown expectation")),
    })
}

fn put_mode(out: &mut Vec<u8>, mode: Mode) {
    match mode {
        Mode::Mutex => out.push(0),
        Mode::Election => out.push(1),
        Mode::Semaphore { limit } => {
            out.push(2);
            put_u32(out, limit);
        }
        Mode::Read => out.push(3),
        Mode::Write => out.push(4),
    }
}

fn take_mode(input: &mut &[u8]) -> Result<Mode, Malformed> {
    Ok(match take_u8(input)? {
        0 => Mode::Mutex,
        1 => Mode::Election,
        2 => Mode::Semaphore { limit: take_u32(input)? },
        3 => Mode::Read,
        4 => Mode::Write,
        _ => return Err(Malformed::Form("an unknown mode of a lock")),
    })
}

fn put_grant(out: &mut Vec<u8>, grant: &Grant) {
    put_token(out, grant.token);
    put_u64(out, grant.lease.0);
}

fn take_grant(input: &mut &[u8]) -> Result<Grant, Malformed> {
    Ok(Grant { token: take_token(input)?, lease: Span(take_u64(input)?) })
}

fn put_token(out: &mut Vec<u8>, token: Token) {
    put_u64(out, token.fence.0);
    put_u64(out, token.salt);
}

fn take_token(input: &mut &[u8]) -> Result<Token, Malformed> {
    Ok(Token { fence: Fence(take_u64(input)?), salt: take_u64(input)? })
}

fn put_span(out: &mut Vec<u8>, span: Option<Span>) {
    put_option(out, span.map(|span| span.0));
}

fn take_span(input: &mut &[u8]) -> Result<Option<Span>, Malformed> {
    Ok(take_option(input)?.map(Span))
}

fn take_secret(input: &mut &[u8]) -> Result<Bits128, Malformed> {
    take_array(input)
}

numbered!(put_space, take_space, Space { Locks = 0, Semaphores = 1 });
numbered!(put_end, take_end, End { Left = 0, Right = 1 });
