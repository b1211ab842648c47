//! The byte forms of replicated mode: items of clients, the payload of a log entry, Raft messages, and the frames
//! between nodes. Nothing here knows a socket, a file or what the bytes are good for.
//!
//! Numbers are little-endian and of fixed width, byte strings have a length of 32 bits in front, a flag is a byte that
//! is 0 or 1, and every value has exactly one form. Only what is rare is written by `postcard`: [`Order`],
//! [`MemberChange`], the start of a node, what operators send.
//!
//! What stands in the log begins with a version, because it is read by later programs. Frames have none: which form two
//! nodes speak is settled when they connect.
//!
//! A decoder accepts all that its encoder can write, never panics, looks at a size before it allocates, and leaves
//! meaning to others: an entry that some node accepted must not be one that another can not read.

use std::fmt;
use std::iter::FusedIterator;

use bytes::Bytes;
use dflockd_core::{
    Command, End, Expect, Fence, Grant, Mode, Outcome, RequestId, Revision, SessionId, Space, Span,
    Subscription, Timestamp, Token,
};
use raft::eraftpb::{
    ConfState, Entry, EntryType, Message, MessageType, Snapshot, SnapshotMetadata,
};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::types::{Action, Bits128, Item, MemberChange, Order, Run};
use super::version;

#[cfg(test)]
mod tests;

/// The first form of what stands in the log.
pub const VERSION: u8 = 1;

/// Bytes of a frame.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Bytes of an entry's data, and of its context.
pub const ENTRY_BYTES_MAX: usize = 8 << 20;
/// Bytes of the items that are forwarded together: with all that the leader adds they must fit into an entry.
pub const BATCH_BYTES_MAX: usize = ENTRY_BYTES_MAX / 2;
/// Entries of a message.
pub const ENTRIES_MAX: usize = 65_536;
/// Members named by the conf state of a snapshot.
pub const CONF_IDS_MAX: usize = 1_024;

/// Why bytes can not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They may be well-formed, but a later program wrote them.
    #[error("{}", version::too_new(*.0, version::newest()))]
    Version(u8),
    /// They are damaged, or were never one of these.
    #[error("malformed: {0}")]
    Form(&'static str),
}

const SHORT: Malformed = Malformed::Form("ends too early");
const TRAILING: Malformed = Malformed::Form("goes on behind its end");

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

mod section {
    pub(super) const BATCH: u8 = 1;
    pub(super) const ORDER: u8 = 2;
}

/// A part of an entry's payload.
#[derive(Debug)]
pub enum Section<'a> {
    /// What clients of one node want.
    Batch {
        /// The node's life.
        run: Run,
        /// The number of the first item within the run; the others follow.
        first_seq: u64,
        /// How many items.
        count: u16,
        /// The items.
        items: Items<'a>,
    },
    /// What the leader wants.
    Order(Order),
}

/// Begins the payload of an entry; sections follow. It is of the version that the cluster uses when it is written.
///
/// # Panics
///
/// If that is above 255.
pub fn begin_payload(out: &mut Vec<u8>, version: u32, stamp: Timestamp) {
    out.push(u8::try_from(version).expect("there are few versions"));
    put_u64(out, stamp.0);
}

/// Appends `count` items, which [`put_item`] has written one behind the other, to a payload.
pub fn put_batch(out: &mut Vec<u8>, run: Run, first_seq: u64, count: u16, items: &[u8]) {
    out.push(section::BATCH);
    put_batch_body(out, run, first_seq, count, items);
}

/// Appends an order to a payload.
pub fn put_order(out: &mut Vec<u8>, order: &Order) {
    out.push(section::ORDER);
    put_bytes(out, &pack(order));
}

/// When the leader made the entry.
///
/// The empty entries and the conf changes of the Raft library have no payload in this form.
pub fn stamp_of(mut payload: &[u8]) -> Result<Timestamp, Malformed> {
    take_stamp(&mut payload)
}

/// The sections of a payload, in order. Ends after the first that is malformed.
pub fn sections(payload: &[u8]) -> Sections<'_> {
    let mut rest = payload;
    let failed = take_stamp(&mut rest).err();
    Sections { rest, failed }
}

fn take_stamp(payload: &mut &[u8]) -> Result<Timestamp, Malformed> {
    take_version(payload)?;
    Ok(Timestamp(take_u64(payload)?))
}

/// See [`sections`].
#[derive(Clone, Debug)]
pub struct Sections<'a> {
    rest: &'a [u8],
    /// What was wrong with the head.
    failed: Option<Malformed>,
}

impl<'a> Sections<'a> {
    fn take(&mut self) -> Result<Section<'a>, Malformed> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        match take_u8(&mut self.rest)? {
            section::BATCH => {
                let (run, first_seq, count, items) = take_batch_body(&mut self.rest)?;
                let items = Items { left: count, rest: items };
                Ok(Section::Batch { run, first_seq, count, items })
            }
            section::ORDER => Ok(Section::Order(unpack(take_bytes(&mut self.rest)?)?)),
            _ => Err(Malformed::Form("an unknown kind of section")),
        }
    }
}

impl<'a> Iterator for Sections<'a> {
    type Item = Result<Section<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() && self.failed.is_none() {
            return None;
        }
        let section = self.take();
        if section.is_err() {
            self.rest = &[];
        }
        Some(section)
    }
}

impl FusedIterator for Sections<'_> {}

/// The items of a batch, in order. Ends after the first that is malformed.
#[derive(Clone)]
pub struct Items<'a> {
    left: u16,
    rest: &'a [u8],
}

impl<'a> Iterator for Items<'a> {
    type Item = Result<Item<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        let item = match self.left {
            0 if self.rest.is_empty() => return None,
            0 => Err(TRAILING),
            _ => take_item(&mut self.rest),
        };
        match item {
            Ok(_) => self.left -= 1,
            Err(_) => (self.left, self.rest) = (0, &[]),
        }
        Some(item)
    }
}

impl FusedIterator for Items<'_> {}

impl fmt::Debug for Items<'_> {
    /// Items have secrets and values in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Items({} in {} bytes)", self.left, self.rest.len())
    }
}

fn put_batch_body(out: &mut Vec<u8>, run: Run, first_seq: u64, count: u16, items: &[u8]) {
    put_u32(out, run.0);
    put_u64(out, first_seq);
    put_u16(out, count);
    put_bytes(out, items);
}

fn take_batch_body<'a>(input: &mut &'a [u8]) -> Result<(Run, u64, u16, &'a [u8]), Malformed> {
    let run = Run(take_u32(input)?);
    let first_seq = take_u64(input)?;
    let count = take_u16(input)?;
    if first_seq.checked_add(count.into()).is_none() {
        return Err(Malformed::Form("runs out of numbers"));
    }
    Ok((run, first_seq, count, take_bytes(input)?))
}

/// Items on their way to the leader. Their bytes go into the entry as they are.
#[derive(Clone, PartialEq, Eq)]
pub struct Batch {
    /// The life of the node that sends them.
    pub run: Run,
    /// The number of the first; the others follow.
    pub first_seq: u64,
    /// How many.
    pub count: u16,
    /// All of them, as [`put_item`] writes them.
    pub bytes: Bytes,
}

impl Batch {
    /// The items.
    #[must_use]
    pub fn items(&self) -> Items<'_> {
        Items { left: self.count, rest: &self.bytes }
    }

    /// Drops the first `n` items, all if there are fewer. Leaves the batch as it was if it is malformed.
    pub fn skip(&mut self, n: u64) -> Result<(), Malformed> {
        let n = u16::try_from(n).unwrap_or(u16::MAX).min(self.count);
        let mut rest = &self.bytes[..];
        for _ in 0..n {
            take_item(&mut rest)?;
        }
        self.bytes = self.bytes.slice_ref(rest);
        self.first_seq += u64::from(n);
        self.count -= n;
        Ok(())
    }

    /// Appends them to a payload.
    pub fn put(&self, payload: &mut Vec<u8>) {
        put_batch(payload, self.run, self.first_seq, self.count, &self.bytes);
    }

    fn take(frame: &Bytes, input: &mut &[u8]) -> Result<Self, Malformed> {
        let (run, first_seq, count, bytes) = take_batch_body(input)?;
        if bytes.len() > BATCH_BYTES_MAX {
            return Err(Malformed::Form("a batch that is too large"));
        }
        let batch = Self { run, first_seq, count, bytes: frame.slice_ref(bytes) };
        // The leader copies the bytes into its log, and what stands there all nodes must be able to read.
        batch.items().try_for_each(|item| item.map(drop))?;
        Ok(batch)
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { run, first_seq, .. } = self;
        write!(f, "Batch({run:?} from {first_seq}, {:?})", self.items())
    }
}

/// The context of a conf change entry.
#[must_use]
pub fn encode_member_change(change: &MemberChange) -> Bytes {
    let mut out = vec![VERSION];
    out.extend_from_slice(&pack(change));
    out.into()
}

/// The reverse of [`encode_member_change`].
pub fn decode_member_change(mut context: &[u8]) -> Result<MemberChange, Malformed> {
    take_version(&mut context)?;
    unpack(context)
}

fn take_version(input: &mut &[u8]) -> Result<(), Malformed> {
    match take_u8(input)? {
        0 => Err(Malformed::Form("of no version")),
        known if u32::from(known) <= version::newest() => Ok(()),
        later => Err(Malformed::Version(later)),
    }
}

/// Something rare as bytes.
#[must_use]
pub fn pack<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    postcard::to_allocvec(value).expect("plain data has a form, and memory has no end")
}

/// The reverse of [`pack`].
pub fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((value, [])) => Ok(value),
        Ok(_) => Err(TRAILING),
        Err(_) => Err(Malformed::Form("not in the form of postcard")),
    }
}

/// Both directions of a small enum, from one list of its numbers.
macro_rules! numbered {
    (
        $put:ident, $take:ident, $type:ident { $($variant:ident = $number:literal),+ $(,)? }
        $(local { $($local:ident),+ $(,)? })?
    ) => {
        fn $put(out: &mut Vec<u8>, value: $type) {
            out.push(match value {
                $($type::$variant => $number,)+
                $($($type::$local)|+ => unreachable!("{value:?} does not leave its node"),)?
            });
        }

        fn $take(input: &mut &[u8]) -> Result<$type, Malformed> {
            match take_u8(input)? {
                $($number => Ok($type::$variant),)+
                _ => Err(Malformed::Form(concat!("an unknown ", stringify!($type)))),
            }
        }
    };
}

numbered!(put_space, take_space, Space { Locks = 0, Semaphores = 1 });
numbered!(put_end, take_end, End { Left = 0, Right = 1 });
numbered!(
    put_entry_type,
    take_entry_type,
    EntryType { EntryNormal = 0, EntryConfChange = 1, EntryConfChangeV2 = 2 }
);
// The numbers of the library, so that they can be found there.
numbered!(
    put_message_type,
    take_message_type,
    MessageType {
        MsgAppend = 3,
        MsgAppendResponse = 4,
        MsgRequestVote = 5,
        MsgRequestVoteResponse = 6,
        MsgSnapshot = 7,
        MsgHeartbeat = 8,
        MsgHeartbeatResponse = 9,
        MsgTransferLeader = 13,
        MsgTimeoutNow = 14,
        MsgReadIndex = 15,
        MsgReadIndexResp = 16,
        MsgRequestPreVote = 17,
        MsgRequestPreVoteResponse = 18,
    }
    local { MsgHup, MsgBeat, MsgPropose, MsgUnreachable, MsgSnapStatus, MsgCheckQuorum }
);

/// A message as bytes, without the data of its snapshot.
///
/// # Panics
///
/// If the message is one that a node only sends to itself.
#[must_use]
pub fn encode_message(message: &Message) -> Bytes {
    let mut out = Vec::with_capacity(message_bytes(message));
    put_message(&mut out, message);
    out.into()
}

/// The reverse of [`encode_message`]. The message shares `bytes`.
pub fn decode_message(bytes: &Bytes) -> Result<Message, Malformed> {
    let mut input = &bytes[..];
    let message = take_message(bytes, &mut input)?;
    at_end(input)?;
    Ok(message)
}

/// At least what it takes without a snapshot.
fn message_bytes(message: &Message) -> usize {
    let sizes = message.entries.iter().map(|e| ENTRY_HEAD_BYTES + e.context.len() + e.data.len());
    MESSAGE_HEAD_BYTES + message.context.len() + sizes.sum::<usize>()
}

const MESSAGE_HEAD_BYTES: usize = 2 + 10 * 8 + 4 + 1 + 4;
const ENTRY_HEAD_BYTES: usize = 1 + 2 * 8 + 2 * 4;

// `deprecated_priority` and `sync_log` are left out: the first repeats `priority`, nobody reads the second.
fn put_message(out: &mut Vec<u8>, message: &Message) {
    put_message_type(out, message.msg_type);
    put_bool(out, message.reject);
    put_u64(out, message.to);
    put_u64(out, message.from);
    put_u64(out, message.term);
    put_u64(out, message.log_term);
    put_u64(out, message.index);
    put_u64(out, message.commit);
    put_u64(out, message.commit_term);
    put_u64(out, message.request_snapshot);
    put_u64(out, message.reject_hint);
    put_i64(out, message.priority);
    put_bytes(out, &message.context);
    put_bool(out, message.has_snapshot());
    if message.has_snapshot() {
        put_metadata(out, message.get_snapshot().get_metadata());
    }
    debug_assert!(message.entries.len() <= ENTRIES_MAX, "too many entries in a message");
    put_len(out, message.entries.len());
    for entry in message.get_entries() {
        put_entry(out, entry);
    }
}

fn take_message(frame: &Bytes, input: &mut &[u8]) -> Result<Message, Malformed> {
    let mut message = Message {
        msg_type: take_message_type(input)?,
        reject: take_bool(input)?,
        to: take_u64(input)?,
        from: take_u64(input)?,
        term: take_u64(input)?,
        log_term: take_u64(input)?,
        index: take_u64(input)?,
        commit: take_u64(input)?,
        commit_term: take_u64(input)?,
        request_snapshot: take_u64(input)?,
        reject_hint: take_u64(input)?,
        priority: take_i64(input)?,
        context: frame.slice_ref(take_bytes(input)?),
        ..Message::default()
    };
    if take_bool(input)? {
        let mut snapshot = Snapshot::default();
        snapshot.set_metadata(take_metadata(input)?);
        message.set_snapshot(snapshot);
    }
    let count = take_len(input, ENTRIES_MAX, ENTRY_HEAD_BYTES)?;
    let mut entries = Vec::with_capacity(count);
    for _ in 0..count {
        entries.push(take_entry(frame, input)?);
    }
    message.set_entries(entries.into());
    check_entries(&message)?;
    Ok(message)
}

/// The library takes these for granted, and would panic.
fn check_entries(message: &Message) -> Result<(), Malformed> {
    let entries = message.get_entries();
    if message.msg_type == MessageType::MsgReadIndex && entries.is_empty() {
        return Err(Malformed::Form("a read without its context"));
    }
    let mut before = message.index;
    if message.msg_type == MessageType::MsgAppend {
        for entry in entries {
            if before.checked_add(1) != Some(entry.index) {
                return Err(Malformed::Form("entries with a gap"));
            }
            before = entry.index;
        }
    }
    Ok(())
}

fn put_entry(out: &mut Vec<u8>, entry: &Entry) {
    debug_assert!(entry.data.len() <= ENTRY_BYTES_MAX, "an entry that nobody takes");
    put_entry_type(out, entry.entry_type);
    put_u64(out, entry.term);
    put_u64(out, entry.index);
    put_bytes(out, &entry.context);
    put_bytes(out, &entry.data);
}

fn take_entry(frame: &Bytes, input: &mut &[u8]) -> Result<Entry, Malformed> {
    Ok(Entry {
        entry_type: take_entry_type(input)?,
        term: take_u64(input)?,
        index: take_u64(input)?,
        context: frame.slice_ref(take_entry_bytes(input)?),
        data: frame.slice_ref(take_entry_bytes(input)?),
        ..Entry::default()
    })
}

fn take_entry_bytes<'a>(input: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    let bytes = take_bytes(input)?;
    if bytes.len() > ENTRY_BYTES_MAX {
        return Err(Malformed::Form("an entry that is too large"));
    }
    Ok(bytes)
}

fn put_metadata(out: &mut Vec<u8>, metadata: &SnapshotMetadata) {
    put_u64(out, metadata.index);
    put_u64(out, metadata.term);
    let conf = metadata.get_conf_state();
    put_bool(out, conf.auto_leave);
    for ids in [&conf.voters, &conf.learners, &conf.voters_outgoing, &conf.learners_next] {
        put_len(out, ids.len());
        for &id in ids {
            put_u64(out, id);
        }
    }
}

fn take_metadata(input: &mut &[u8]) -> Result<SnapshotMetadata, Malformed> {
    let mut metadata =
        SnapshotMetadata { index: take_u64(input)?, term: take_u64(input)?, ..Default::default() };
    let auto_leave = take_bool(input)?;
    let mut left = CONF_IDS_MAX;
    let mut take_ids = || {
        let count = take_len(input, left, size_of::<u64>())?;
        left -= count;
        (0..count).map(|_| take_u64(input)).collect::<Result<Vec<_>, _>>()
    };
    metadata.set_conf_state(ConfState {
        voters: take_ids()?,
        learners: take_ids()?,
        voters_outgoing: take_ids()?,
        learners_next: take_ids()?,
        auto_leave,
        ..ConfState::default()
    });
    Ok(metadata)
}

/// Every kind of frame, once.
mod frame {
    pub(super) const RAFT: u8 = 1;
    pub(super) const FORWARD: u8 = 2;
    pub(super) const EXPECT: u8 = 3;
    pub(super) const CHUNK: u8 = 4;
    pub(super) const CHUNK_ACK: u8 = 5;
    pub(super) const ADMIN: u8 = 6;
    pub(super) const ADMIN_REPLY: u8 = 7;
    pub(super) const MEMBERS: u8 = 8;
}

/// What one node tells another.
#[derive(Clone, PartialEq)]
pub enum Frame {
    /// A message of the Raft group. If it has a snapshot, then without the data.
    Raft {
        /// The time of the cluster, if the sender leads it; else zero.
        time: Timestamp,
        /// The message.
        message: Message,
    },
    /// Items for the leader. Well-formed, if it was decoded.
    Forward(Batch),
    /// The leader tells a node which of its items it wants next.
    Expect {
        /// In which it leads.
        term: u64,
        /// The life of the node.
        run: Run,
        /// The number of the item.
        seq: u64,
    },
    /// A piece of a snapshot.
    Chunk {
        /// To tell several snapshots apart.
        transfer: u64,
        /// Where the piece begins.
        offset: u64,
        /// Bytes of the whole snapshot.
        total: u64,
        /// SHA-256 of the whole snapshot.
        digest: [u8; 32],
        /// For the disk of a witness: to be kept and not restored.
        keep_only: bool,
        /// The message that brings the snapshot, by [`encode_message`].
        header: Bytes,
        /// The piece.
        data: Bytes,
    },
    /// A snapshot has come so far.
    ChunkAck {
        /// Which.
        transfer: u64,
        /// All bytes below are there.
        received: u64,
    },
    /// An operator asks the leader, through another node.
    Admin {
        /// What the reply will name.
        id: u64,
        /// By [`pack`].
        request: Bytes,
    },
    /// What the leader answers.
    AdminReply {
        /// Of the request.
        id: u64,
        /// By [`pack`].
        reply: Bytes,
    },
    /// The leader tells a member that has no state yet whom there is to talk to.
    Members {
        /// By [`pack`], as the machine has them.
        members: Bytes,
    },
}

impl Frame {
    /// The frame as bytes. How they are told from the next frame is up to the connection.
    ///
    /// # Panics
    ///
    /// If a message is one that a node only sends to itself.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.bytes());
        match self {
            Self::Raft { time, message } => {
                out.push(frame::RAFT);
                put_u64(&mut out, time.0);
                put_message(&mut out, message);
            }
            Self::Forward(batch) => {
                debug_assert!(batch.bytes.len() <= BATCH_BYTES_MAX, "a batch that nobody takes");
                out.push(frame::FORWARD);
                put_batch_body(&mut out, batch.run, batch.first_seq, batch.count, &batch.bytes);
            }
            Self::Expect { term, run, seq } => {
                out.push(frame::EXPECT);
                put_u64(&mut out, *term);
                put_u32(&mut out, run.0);
                put_u64(&mut out, *seq);
            }
            Self::Chunk { transfer, offset, total, digest, keep_only, header, data } => {
                out.push(frame::CHUNK);
                put_u64(&mut out, *transfer);
                put_u64(&mut out, *offset);
                put_u64(&mut out, *total);
                out.extend_from_slice(digest);
                put_bool(&mut out, *keep_only);
                put_bytes(&mut out, header);
                put_bytes(&mut out, data);
            }
            Self::ChunkAck { transfer, received } => {
                out.push(frame::CHUNK_ACK);
                put_u64(&mut out, *transfer);
                put_u64(&mut out, *received);
            }
            Self::Admin { id, request } => {
                out.push(frame::ADMIN);
                put_u64(&mut out, *id);
                put_bytes(&mut out, request);
            }
            Self::AdminReply { id, reply } => {
                out.push(frame::ADMIN_REPLY);
                put_u64(&mut out, *id);
                put_bytes(&mut out, reply);
            }
            Self::Members { members } => {
                out.push(frame::MEMBERS);
                put_bytes(&mut out, members);
            }
        }
        debug_assert!(out.len() <= FRAME_BYTES_MAX, "a frame that nobody takes");
        out.into()
    }

    /// The reverse of [`Frame::encode`]. The frame shares `bytes`.
    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(Malformed::Form("a frame that is too large"));
        }
        let mut input = &bytes[..];
        let taken = Self::take(&bytes, &mut input)?;
        at_end(input)?;
        Ok(taken)
    }

    fn take(bytes: &Bytes, input: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(match take_u8(input)? {
            frame::RAFT => Self::Raft {
                time: Timestamp(take_u64(input)?),
                message: take_message(bytes, input)?,
            },
            frame::FORWARD => Self::Forward(Batch::take(bytes, input)?),
            frame::EXPECT => Self::Expect {
                term: take_u64(input)?,
                run: Run(take_u32(input)?),
                seq: take_u64(input)?,
            },
            frame::CHUNK => Self::Chunk {
                transfer: take_u64(input)?,
                offset: take_u64(input)?,
                total: take_u64(input)?,
                digest: take_array(input)?,
                keep_only: take_bool(input)?,
                header: bytes.slice_ref(take_bytes(input)?),
                data: bytes.slice_ref(take_bytes(input)?),
            },
            frame::CHUNK_ACK => {
                Self::ChunkAck { transfer: take_u64(input)?, received: take_u64(input)? }
            }
            frame::ADMIN => {
                Self::Admin { id: take_u64(input)?, request: bytes.slice_ref(take_bytes(input)?) }
            }
            frame::ADMIN_REPLY => Self::AdminReply {
                id: take_u64(input)?,
                reply: bytes.slice_ref(take_bytes(input)?),
            },
            frame::MEMBERS => Self::Members { members: bytes.slice_ref(take_bytes(input)?) },
            _ => return Err(Malformed::Form("an unknown kind of frame")),
        })
    }

    /// About what it takes.
    fn bytes(&self) -> usize {
        const REST: usize = 96;
        REST + match self {
            Self::Raft { message, .. } => message_bytes(message),
            Self::Forward(batch) => batch.bytes.len(),
            Self::Chunk { header, data, .. } => header.len() + data.len(),
            Self::Admin { request: bytes, .. }
            | Self::AdminReply { reply: bytes, .. }
            | Self::Members { members: bytes } => bytes.len(),
            Self::Expect { .. } | Self::ChunkAck { .. } => 0,
        }
    }
}

impl fmt::Debug for Frame {
    /// What a trace needs. Items, entries and snapshots have secrets and values in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raft { time, message: m } => write!(
                f,
                "{:?}({} to {}, term {}, log_term {}, index {}, commit {}, reject {}, {} entries, time {})",
                m.msg_type,
                m.from,
                m.to,
                m.term,
                m.log_term,
                m.index,
                m.commit,
                m.reject,
                m.entries.len(),
                time.0,
            ),
            Self::Forward(batch) => write!(f, "Forward({batch:?})"),
            Self::Expect { term, run, seq } => write!(f, "Expect(term {term}, {run:?}, {seq})"),
            Self::Chunk { transfer, offset, total, keep_only, data, .. } => write!(
                f,
                "Chunk({transfer}: {} bytes at {offset} of {total}, keep_only {keep_only})",
                data.len(),
            ),
            Self::ChunkAck { transfer, received } => write!(f, "ChunkAck({transfer}: {received})"),
            Self::Admin { id, request } => write!(f, "Admin({id}: {} bytes)", request.len()),
            Self::AdminReply { id, reply } => write!(f, "AdminReply({id}: {} bytes)", reply.len()),
            Self::Members { members } => write!(f, "Members({} bytes)", members.len()),
        }
    }
}

fn put_bool(out: &mut Vec<u8>, value: bool) {
    out.push(value.into());
}

fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_i64(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_option(out: &mut Vec<u8>, value: Option<u64>) {
    put_bool(out, value.is_some());
    if let Some(value) = value {
        put_u64(out, value);
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    put_u32(out, u32::try_from(len).expect("nothing has more than a few megabytes"));
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

fn take_array<const N: usize>(input: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (array, rest) = input.split_first_chunk().ok_or(SHORT)?;
    *input = rest;
    Ok(*array)
}

fn take_u8(input: &mut &[u8]) -> Result<u8, Malformed> {
    take_array(input).map(u8::from_le_bytes)
}

fn take_u16(input: &mut &[u8]) -> Result<u16, Malformed> {
    take_array(input).map(u16::from_le_bytes)
}

fn take_u32(input: &mut &[u8]) -> Result<u32, Malformed> {
    take_array(input).map(u32::from_le_bytes)
}

fn take_u64(input: &mut &[u8]) -> Result<u64, Malformed> {
    take_array(input).map(u64::from_le_bytes)
}

fn take_i64(input: &mut &[u8]) -> Result<i64, Malformed> {
    take_array(input).map(i64::from_le_bytes)
}

fn take_bool(input: &mut &[u8]) -> Result<bool, Malformed> {
    match take_u8(input)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed::Form("a flag that is neither 0 nor 1")),
    }
}

fn take_option(input: &mut &[u8]) -> Result<Option<u64>, Malformed> {
    Ok(if take_bool(input)? { Some(take_u64(input)?) } else { None })
}

/// A number of things of at least `bytes_min` each: not more than can still follow.
fn take_len(input: &mut &[u8], max: usize, bytes_min: usize) -> Result<usize, Malformed> {
    let len = usize::try_from(take_u32(input)?).map_err(|_| SHORT)?;
    if len > max {
        return Err(Malformed::Form("too many of something"));
    }
    if len > input.len() / bytes_min {
        return Err(SHORT);
    }
    Ok(len)
}

fn take_bytes<'a>(input: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    let len = usize::try_from(take_u32(input)?).map_err(|_| SHORT)?;
    let (bytes, rest) = input.split_at_checked(len).ok_or(SHORT)?;
    *input = rest;
    Ok(bytes)
}

fn at_end(input: &[u8]) -> Result<(), Malformed> {
    if input.is_empty() { Ok(()) } else { Err(TRAILING) }
}
