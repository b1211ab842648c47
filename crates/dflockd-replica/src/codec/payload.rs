//! What stands in an entry of the log: a payload with its sections, or the context of a conf change. And the batches
//! on their way there.
//!
//! An entry is the version of the cluster (1 byte), a stamp (8), and sections. Section 1 is a batch: incarnation (4),
//! number of the first item (8), count (2), length (4), items. Section 2 is a leader command: length, then
//! `postcard`. A change of the membership is a conf change entry with a [`MemberChange`] in its context. An unknown
//! version, section or kind is an error.

use std::fmt;
use std::iter::FusedIterator;

use bytes::Bytes;
use dflockd_core::Timestamp;
use dflockd_core::field::Field;

use super::item::take_item;
use super::{
    BATCH_BYTES_MAX, Malformed, TRAILING, VERSION, at_end, pack, put_bytes, take, unpack,
    unpack_first,
};
use crate::types::{Incarnation, LeaderCommand, MemberChange, Policy, Proposal};
use crate::version;

mod section {
    pub(super) const BATCH: u8 = 1;
    pub(super) const ORDER: u8 = 2;
}

/// A part of an entry's payload.
#[derive(Debug)]
pub enum Section<'a> {
    /// What clients of one node want.
    Batch {
        /// The incarnation of the node that accepted the items.
        run: Incarnation,
        /// The number of the first item within the incarnation; the others follow.
        first_seq: u64,
        /// How many items.
        count: u16,
        /// The items.
        items: Items<'a>,
    },
    /// What the leader wants.
    LeaderCommand(LeaderCommand),
}

/// Begins the payload of an entry; sections follow. It is of the version that the cluster uses when it is written.
///
/// # Panics
///
/// If that is above 255.
pub fn begin_payload(out: &mut Vec<u8>, version: u32, stamp: Timestamp) {
    out.push(u8::try_from(version).expect("there are few versions"));
    stamp.0.put(out);
}

/// Appends `count` items, which [`put_item`](super::put_item) has written one behind the other, to a payload.
pub fn put_batch(out: &mut Vec<u8>, run: Incarnation, first_seq: u64, count: u16, items: &[u8]) {
    out.push(section::BATCH);
    put_batch_body(out, run, first_seq, count, items);
}

/// Appends a leader command to a payload of some version. What a policy has got since the first one stands behind the
/// order.
pub fn put_leader_command(out: &mut Vec<u8>, version: u32, order: &LeaderCommand) {
    out.push(section::ORDER);
    let mut bytes = pack(order);
    if version >= 2
        && let LeaderCommand::Init { policy, .. } | LeaderCommand::Policy(policy) = order
    {
        bytes.extend_from_slice(&pack(&policy.limits.v2()));
    }
    put_bytes(out, &bytes);
}

fn take_leader_command(version: u8, bytes: &[u8]) -> Result<LeaderCommand, Malformed> {
    if version < 2 {
        return unpack(bytes);
    }
    let (mut order, rest) = unpack_first::<LeaderCommand>(bytes)?;
    match &mut order {
        LeaderCommand::Init { policy, .. } | LeaderCommand::Policy(policy) => {
            **policy = Policy::clone(policy).with_v2(unpack(rest)?);
        }
        LeaderCommand::Tick
        | LeaderCommand::NewTerm
        | LeaderCommand::NodeLost { .. }
        | LeaderCommand::Digest { .. }
        | LeaderCommand::Address { .. }
        | LeaderCommand::Version { .. }
        | LeaderCommand::ClusterId { .. } => at_end(rest)?,
    }
    Ok(order)
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
    let version = payload.first().copied().unwrap_or(0);
    Sections { version, rest, failed }
}

fn take_stamp(payload: &mut &[u8]) -> Result<Timestamp, Malformed> {
    take_version(payload)?;
    Ok(Timestamp(take(payload)?))
}

/// See [`sections`].
#[derive(Clone, Debug)]
pub struct Sections<'a> {
    version: u8,
    rest: &'a [u8],
    /// What was wrong with the head.
    failed: Option<Malformed>,
}

impl<'a> Sections<'a> {
    fn take(&mut self) -> Result<Section<'a>, Malformed> {
        if let Some(error) = self.failed.take() {
            return Err(error);
        }
        match take(&mut self.rest)? {
            section::BATCH => {
                let (run, first_seq, count, items) = take_batch_body(&mut self.rest)?;
                let items = Items { left: count, rest: items };
                Ok(Section::Batch { run, first_seq, count, items })
            }
            section::ORDER => {
                let order = take_leader_command(self.version, take(&mut self.rest)?)?;
                Ok(Section::LeaderCommand(order))
            }
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
    type Item = Result<Proposal<'a>, Malformed>;

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

pub(super) fn put_batch_body(
    out: &mut Vec<u8>,
    run: Incarnation,
    first_seq: u64,
    count: u16,
    items: &[u8],
) {
    run.0.put(out);
    first_seq.put(out);
    count.put(out);
    put_bytes(out, items);
}

fn take_batch_body<'a>(
    input: &mut &'a [u8],
) -> Result<(Incarnation, u64, u16, &'a [u8]), Malformed> {
    let run = Incarnation(take(input)?);
    let first_seq = take::<u64>(input)?;
    let count = take::<u16>(input)?;
    if first_seq.checked_add(count.into()).is_none() {
        return Err(Malformed::Form("runs out of numbers"));
    }
    Ok((run, first_seq, count, take(input)?))
}

/// Items on their way to the leader. Their bytes go into the entry as they are.
#[derive(Clone, PartialEq, Eq)]
pub struct Batch {
    /// The incarnation of the node that sends them.
    pub run: Incarnation,
    /// The number of the first; the others follow.
    pub first_seq: u64,
    /// How many.
    pub count: u16,
    /// All of them, as [`put_item`](super::put_item) writes them.
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

    pub(super) fn take(frame: &Bytes, input: &mut &[u8]) -> Result<Self, Malformed> {
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
    match take(input)? {
        0 => Err(Malformed::Form("of no version")),
        known if u32::from(known) <= version::newest() => Ok(()),
        later => Err(Malformed::Version(later)),
    }
}
