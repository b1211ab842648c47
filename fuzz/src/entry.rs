//! Entries of the log: their sections and items are read or refused, and what is read is read again from what is
//! written for it. An iterator that has refused something ends there.
//!
//! Input: the payload of an entry; or, if it is one, the context of a conf change.

use dflockd_core::Timestamp;
use dflockd_replica::codec::{
    Malformed, Section, begin_payload, decode_member_change, encode_member_change, put_batch,
    put_item, put_leader_command, sections, stamp_of,
};
use dflockd_replica::types::{Incarnation, LeaderCommand, Proposal};
use dflockd_replica::version::NEWEST;

/// What a payload says.
#[derive(Debug, PartialEq)]
pub struct Payload<'a> {
    stamp: Timestamp,
    parts: Vec<Part<'a>>,
}

#[derive(Debug, PartialEq)]
enum Part<'a> {
    Batch { run: Incarnation, first_seq: u64, count: u16, items: Vec<Proposal<'a>> },
    LeaderCommand(LeaderCommand),
}

/// Reads `data`, writes what it says, and reads that.
pub fn run(data: &[u8]) {
    if let Ok(change) = decode_member_change(data) {
        let again = decode_member_change(&encode_member_change(&change));
        assert!(again == Ok(change), "a change is read back as {again:?}");
    }
    match read(data) {
        Ok(payload) => {
            let written = write(&payload);
            check_same(&payload, &read(&written).expect("what was written can be read"));
        }
        Err(error) => assert!(!error.to_string().is_empty(), "no reason given"),
    }
}

/// All that a payload says.
pub fn read(data: &[u8]) -> Result<Payload<'_>, Malformed> {
    let mut parts = Vec::new();
    let mut sections = sections(data);
    while let Some(section) = sections.next() {
        if section.is_err() {
            assert!(sections.next().is_none(), "it goes on behind an error");
        }
        parts.push(match section? {
            Section::LeaderCommand(order) => Part::LeaderCommand(order),
            Section::Batch { run, first_seq, count, items: mut rest } => {
                let mut items = Vec::new();
                while let Some(item) = rest.next() {
                    if item.is_err() {
                        assert!(rest.next().is_none(), "it goes on behind an error");
                    }
                    items.push(item?);
                }
                Part::Batch { run, first_seq, count, items }
            }
        });
    }
    Ok(Payload { stamp: stamp_of(data)?, parts })
}

fn write(payload: &Payload<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    begin_payload(&mut out, NEWEST, payload.stamp);
    for part in &payload.parts {
        match part {
            Part::LeaderCommand(order) => put_leader_command(&mut out, NEWEST, order),
            Part::Batch { run, first_seq, count, items } => {
                assert_eq!(usize::from(*count), items.len(), "the wrong number of items");
                let mut bytes = Vec::new();
                for item in items {
                    put_item(&mut bytes, item);
                }
                put_batch(&mut out, *run, *first_seq, *count, &bytes);
            }
        }
    }
    out
}

/// Panics if a payload is not what it was before it was written.
pub fn check_same(payload: &Payload<'_>, again: &Payload<'_>) {
    assert!(payload == again, "{payload:?} is read back as {again:?}");
}
