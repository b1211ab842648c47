//! Items: what a client of some node wants, in the form in which it is forwarded and stands in the log.
//!
//! An item is session (8 bytes), epoch (4), request (8), keep (1), kind (1) and the fields of its kind.

use dflockd_core::field::Field;
use dflockd_core::{Command, Given, Grant, Outcome, SessionId};

use super::{Malformed, pack, put_bytes, take, unpack};
use crate::types::{Proposal, ProposalBody};

/// Every kind of item that is no command, once. Commands have the numbers from 16 on, in their table. A retired number
/// stays here as a comment and is never given out again.
mod kind {
    pub(super) const START: u8 = 1;
    pub(super) const KEEP: u8 = 2;
    pub(super) const ATTACH: u8 = 3;
    pub(super) const CLOSE: u8 = 4;
    pub(super) const KICK: u8 = 5;
    pub(super) const BARRIER: u8 = 6;
    pub(super) const UNDO: u8 = 7;
    pub(super) const ADDRESSES: u8 = 8;
    pub(super) const END: u8 = 9;
    pub(super) const IDENTIFY: u8 = 10;
}

/// Appends an item.
///
/// A [`ProposalBody::Undo`] of an outcome that holds nothing is written as one of [`Outcome::Done`], which does as
/// little.
///
/// # Panics
///
/// If the command is one that only the state machine gives itself: [`Command::Tick`], [`Command::NewTerm`],
/// [`Command::Detach`], [`Command::Attach`], [`Command::Identify`], [`Command::Orphan`] or [`Command::EndSession`].
pub fn put_item(out: &mut Vec<u8>, item: &Proposal<'_>) {
    match &item.body {
        ProposalBody::Start(start) => {
            put_head(out, item, kind::START);
            put_bytes(out, &pack(start));
        }
        ProposalBody::Command(command) => put_command(out, item, command),
        ProposalBody::Undo(outcome) => put_undo(out, item, outcome),
        ProposalBody::Keep { secret } => {
            put_head(out, item, kind::KEEP);
            out.extend_from_slice(secret);
        }
        ProposalBody::Attach { secret } => {
            put_head(out, item, kind::ATTACH);
            out.extend_from_slice(secret);
        }
        ProposalBody::Close { orderly, referenced } => {
            put_head(out, item, kind::CLOSE);
            orderly.put(out);
            referenced.put(out);
        }
        ProposalBody::Identify { name, reference } => {
            put_head(out, item, kind::IDENTIFY);
            put_bytes(out, name);
            put_bytes(out, reference);
        }
        ProposalBody::Kick { session } => {
            put_head(out, item, kind::KICK);
            session.0.put(out);
        }
        ProposalBody::End { session } => {
            put_head(out, item, kind::END);
            session.0.put(out);
        }
        ProposalBody::Barrier => put_head(out, item, kind::BARRIER),
        ProposalBody::Addresses(addresses) => {
            put_head(out, item, kind::ADDRESSES);
            put_bytes(out, &pack(addresses));
        }
    }
}

/// Takes an item from the front. Keys and values are borrowed from `input`, which is left in the middle of the item if
/// that is malformed.
pub fn take_item<'a>(input: &mut &'a [u8]) -> Result<Proposal<'a>, Malformed> {
    // All at once, because this is done for every command on every node.
    let mut head: &[u8] = &take::<[u8; HEAD_BYTES]>(input)?;
    let session = SessionId(take(&mut head)?);
    let epoch = take(&mut head)?;
    let request = take(&mut head)?;
    let keep = take(&mut head)?;
    let body = match take::<u8>(&mut head)? {
        kind::START => ProposalBody::Start(unpack(take(input)?)?),
        kind::KEEP => ProposalBody::Keep { secret: take(input)? },
        kind::ATTACH => ProposalBody::Attach { secret: take(input)? },
        kind::CLOSE => ProposalBody::Close { orderly: take(input)?, referenced: take(input)? },
        kind::IDENTIFY => ProposalBody::Identify { name: take(input)?, reference: take(input)? },
        kind::KICK => ProposalBody::Kick { session: SessionId(take(input)?) },
        kind::END => ProposalBody::End { session: SessionId(take(input)?) },
        kind::BARRIER => ProposalBody::Barrier,
        kind::ADDRESSES => ProposalBody::Addresses(unpack(take(input)?)?),
        kind::UNDO => ProposalBody::Undo(take_undo(input)?),
        number => ProposalBody::Command(Command::take(number, input)?),
    };
    Ok(Proposal { session, epoch, request, keep, body })
}

const HEAD_BYTES: usize = 8 + 4 + 8 + 1 + 1;

fn put_head(out: &mut Vec<u8>, item: &Proposal<'_>, kind: u8) {
    let mut head = [0; HEAD_BYTES];
    head[..8].copy_from_slice(&item.session.0.to_le_bytes());
    head[8..12].copy_from_slice(&item.epoch.to_le_bytes());
    head[12..20].copy_from_slice(&item.request.0.to_le_bytes());
    head[20] = item.keep.into();
    head[21] = kind;
    out.extend_from_slice(&head);
}

fn put_command(out: &mut Vec<u8>, item: &Proposal<'_>, command: &Command<'_>) {
    if let Command::Undo(outcome) = command {
        debug_assert!(false, "an undo is an body of its own: it is not read back as this");
        return put_undo(out, item, outcome);
    }
    let number = command.number().expect("what no client can cause follows from another body");
    put_head(out, item, number);
    command.put(out);
}

/// What an undo takes back.
mod undo {
    pub(super) const NOTHING: u8 = 0;
    pub(super) const GRANTED: u8 = 1;
    pub(super) const ACQUIRED: u8 = 2;
    pub(super) const POPPED: u8 = 3;
}

fn put_undo(out: &mut Vec<u8>, item: &Proposal<'_>, outcome: &Outcome) {
    put_head(out, item, kind::UNDO);
    match outcome.given() {
        Some(Given::Granted(grant)) => {
            out.push(undo::GRANTED);
            put_grant(out, grant);
        }
        Some(Given::Acquired(grant)) => {
            out.push(undo::ACQUIRED);
            put_grant(out, grant);
        }
        Some(Given::Popped { key, end, value }) => {
            out.push(undo::POPPED);
            end.put(out);
            put_bytes(out, key);
            put_bytes(out, value);
        }
        None => out.push(undo::NOTHING),
    }
}

fn take_undo(input: &mut &[u8]) -> Result<Outcome, Malformed> {
    Ok(match take::<u8>(input)? {
        undo::NOTHING => Outcome::Done,
        undo::GRANTED => Outcome::Granted(take_grant(input)?),
        undo::ACQUIRED => Outcome::Acquired(take_grant(input)?),
        undo::POPPED => {
            let end = take(input)?;
            let key = take::<&[u8]>(input)?.into();
            Outcome::Popped { key, end, value: take::<&[u8]>(input)?.into() }
        }
        _ => return Err(Malformed::Form("an unknown kind of undo")),
    })
}

fn put_grant(out: &mut Vec<u8>, grant: &Grant) {
    grant.token.put(out);
    grant.lease.put(out);
}

fn take_grant(input: &mut &[u8]) -> Result<Grant, Malformed> {
    Ok(Grant { token: take(input)?, lease: take(input)? })
}
