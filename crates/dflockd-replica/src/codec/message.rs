//! Messages of the Raft library, and the entries and the metadata of snapshots in them.

use bytes::Bytes;
use dflockd_core::field::Field;
use raft::eraftpb::{
    ConfState, Entry, EntryType, Message, MessageType, Snapshot, SnapshotMetadata,
};

use super::{
    CONF_IDS_MAX, ENTRIES_MAX, ENTRY_BYTES_MAX, Malformed, at_end, numbered, put_bytes, put_len,
    take, take_len,
};

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
pub(super) fn message_bytes(message: &Message) -> usize {
    let sizes = message.entries.iter().map(|e| ENTRY_HEAD_BYTES + e.context.len() + e.data.len());
    MESSAGE_HEAD_BYTES + message.context.len() + sizes.sum::<usize>()
}

const MESSAGE_HEAD_BYTES: usize = 2 + 10 * 8 + 4 + 1 + 4;
pub(super) const ENTRY_HEAD_BYTES: usize = 1 + 2 * 8 + 2 * 4;

// `deprecated_priority` and `sync_log` are left out: the first repeats `priority`, nobody reads the second.
pub(super) fn put_message(out: &mut Vec<u8>, message: &Message) {
    put_message_type(out, message.msg_type);
    message.reject.put(out);
    message.to.put(out);
    message.from.put(out);
    message.term.put(out);
    message.log_term.put(out);
    message.index.put(out);
    message.commit.put(out);
    message.commit_term.put(out);
    message.request_snapshot.put(out);
    message.reject_hint.put(out);
    message.priority.put(out);
    put_bytes(out, &message.context);
    message.has_snapshot().put(out);
    if message.has_snapshot() {
        put_metadata(out, message.get_snapshot().get_metadata());
    }
    debug_assert!(message.entries.len() <= ENTRIES_MAX, "too many entries in a message");
    put_len(out, message.entries.len());
    for entry in message.get_entries() {
        put_entry(out, entry);
    }
}

pub(super) fn take_message(frame: &Bytes, input: &mut &[u8]) -> Result<Message, Malformed> {
    let mut message = Message {
        msg_type: take_message_type(input)?,
        reject: take(input)?,
        to: take(input)?,
        from: take(input)?,
        term: take(input)?,
        log_term: take(input)?,
        index: take(input)?,
        commit: take(input)?,
        commit_term: take(input)?,
        request_snapshot: take(input)?,
        reject_hint: take(input)?,
        priority: take(input)?,
        context: frame.slice_ref(take(input)?),
        ..Message::default()
    };
    if take(input)? {
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
    entry.term.put(out);
    entry.index.put(out);
    put_bytes(out, &entry.context);
    put_bytes(out, &entry.data);
}

fn take_entry(frame: &Bytes, input: &mut &[u8]) -> Result<Entry, Malformed> {
    Ok(Entry {
        entry_type: take_entry_type(input)?,
        term: take(input)?,
        index: take(input)?,
        context: frame.slice_ref(take_entry_bytes(input)?),
        data: frame.slice_ref(take_entry_bytes(input)?),
        ..Entry::default()
    })
}

fn take_entry_bytes<'a>(input: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    let bytes = take::<&[u8]>(input)?;
    if bytes.len() > ENTRY_BYTES_MAX {
        return Err(Malformed::Form("an entry that is too large"));
    }
    Ok(bytes)
}

fn put_metadata(out: &mut Vec<u8>, metadata: &SnapshotMetadata) {
    metadata.index.put(out);
    metadata.term.put(out);
    let conf = metadata.get_conf_state();
    conf.auto_leave.put(out);
    for ids in [&conf.voters, &conf.learners, &conf.voters_outgoing, &conf.learners_next] {
        put_len(out, ids.len());
        for &id in ids {
            id.put(out);
        }
    }
}

fn take_metadata(input: &mut &[u8]) -> Result<SnapshotMetadata, Malformed> {
    let mut metadata =
        SnapshotMetadata { index: take(input)?, term: take(input)?, ..Default::default() };
    let auto_leave = take(input)?;
    let mut left = CONF_IDS_MAX;
    let mut take_ids = || {
        let count = take_len(input, left, size_of::<u64>())?;
        left -= count;
        (0..count).map(|_| take(input)).collect::<Result<Vec<_>, _>>()
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
