//! The bytes of a log segment, in and out. The picture is in the documentation of the module above.
//!
//! Knows nothing of files, and nothing of what entries mean.

use std::collections::BTreeMap;

use bytes::Bytes;
use raft::eraftpb::{Entry, EntryType, HardState};

/// What a disk writes at once: after a crash a sector that was being written is there or not.
pub(super) const SECTOR_BYTES: usize = 512;
const SECTOR_HEAD_BYTES: usize = 16;
const SECTOR_CRC_AT: usize = SECTOR_HEAD_BYTES + PAYLOAD_BYTES;
const SECTOR_MARK_AT: usize = SECTOR_BYTES - 1;
/// What a sector carries of a block's records.
pub(super) const PAYLOAD_BYTES: usize = SECTOR_BYTES - SECTOR_HEAD_BYTES - 5;

/// The last byte of a sector. Not zero, so that a sector whose end was not written is known by it.
const SECTOR_MARK: u8 = 0xd5;

const MAGIC: [u8; 8] = *b"dflkdlog";
const VERSION: u32 = 1;
/// Everything before the notes.
const HEADER_FIXED_BYTES: usize = 84;
/// Far above what [`NOTES_BYTES_MAX`] allows.
const HEADER_BYTES_MAX: usize = 256 << 10;

/// All notes together, with [`NOTE_COST_BYTES`] for each.
pub(super) const NOTES_BYTES_MAX: usize = 64 << 10;
/// What a note takes beside its key and value.
pub(super) const NOTE_COST_BYTES: usize = 8;

const RECORD_HEAD_BYTES: usize = 28;
const CRC_BYTES: usize = 4;

/// The only Raft group so far.
const GROUP: u32 = 0;

/// An entry's place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) index: u64,
    pub(super) term: u64,
}

// Sectors and blocks

/// What a sector turns out to be.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Sector<'a> {
    /// Never written, or lost.
    Zero,
    /// The checksum holds.
    Whole(Part<'a>),
    /// Something is there, but the end was never written.
    Short,
    /// Written to the end, and the checksum fails.
    Broken,
}

/// One sector of a block.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Part<'a> {
    /// The number of the block, counted over the whole life of the log.
    pub(super) block: u64,
    pub(super) index: u32,
    /// How many sectors the block has. None: this sector says that the segment is closed.
    pub(super) count: u32,
    pub(super) payload: &'a [u8],
}

/// How many bytes of a segment a block of so many bytes of records takes.
pub(super) fn block_bytes(records_bytes: usize) -> usize {
    records_bytes.div_ceil(PAYLOAD_BYTES) * SECTOR_BYTES
}

/// Puts records into the sectors of a block.
pub(super) fn put_block(out: &mut Vec<u8>, salt: u32, block: u64, records: &[u8]) {
    let count = length(records.len().div_ceil(PAYLOAD_BYTES));
    for (index, payload) in (0..).zip(records.chunks(PAYLOAD_BYTES)) {
        put_sector(out, salt, &Part { block, index, count, payload });
    }
}

/// The sector behind the last block of a segment that has a successor. `block` is the first one there.
pub(super) fn closing_sector(salt: u32, block: u64) -> Vec<u8> {
    let mut out = Vec::with_capacity(SECTOR_BYTES);
    put_sector(&mut out, salt, &Part { block, index: 0, count: 0, payload: &[] });
    out
}

fn put_sector(out: &mut Vec<u8>, salt: u32, part: &Part<'_>) {
    let start = out.len();
    out.extend_from_slice(&part.block.to_le_bytes());
    out.extend_from_slice(&part.index.to_le_bytes());
    out.extend_from_slice(&part.count.to_le_bytes());
    out.extend_from_slice(part.payload);
    out.resize(start + SECTOR_CRC_AT, 0);
    let crc = chained_crc(salt, &out[start..]);
    out.extend_from_slice(&crc.to_le_bytes());
    out.push(SECTOR_MARK);
}

/// Puts the mark at the end of sectors that are whole without it.
pub(super) fn complete_sectors(bytes: &mut [u8]) {
    for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
        sector[SECTOR_MARK_AT] = SECTOR_MARK;
    }
}

/// Takes the mark from the end of sectors: those that are not whole are short then.
pub(super) fn shorten_sectors(bytes: &mut [u8]) {
    for sector in bytes.chunks_exact_mut(SECTOR_BYTES) {
        sector[SECTOR_MARK_AT] = 0;
    }
}

/// Looks at one sector.
pub(super) fn read_sector(salt: u32, bytes: &[u8]) -> Sector<'_> {
    if bytes.iter().all(|byte| *byte == 0) {
        return Sector::Zero;
    }
    // The mark need not be there: it carries nothing, so without it nothing is missing.
    if chained_crc(salt, &bytes[..SECTOR_CRC_AT]) == u32_at(bytes, SECTOR_CRC_AT) {
        return Sector::Whole(Part {
            block: u64_at(bytes, 0),
            index: u32_at(bytes, 8),
            count: u32_at(bytes, 12),
            payload: &bytes[SECTOR_HEAD_BYTES..SECTOR_CRC_AT],
        });
    }
    if bytes[SECTOR_MARK_AT] == 0 { Sector::Short } else { Sector::Broken }
}

// Records

/// Something the log remembers.
#[derive(Debug, PartialEq)]
pub(super) enum Record<'a> {
    Entry(Entry),
    HardState(HardState),
    Note {
        key: &'a [u8],
        value: &'a [u8],
    },
    /// A snapshot from elsewhere took the place of all entries so far; the log goes on behind it.
    Reset(Position),
}

const KIND_ENTRY: u8 = 1;
const KIND_HARD_STATE: u8 = 2;
const KIND_NOTE: u8 = 3;
const KIND_RESET: u8 = 4;

/// How many bytes [`put_entry`] will put, or `None` if they are too many.
pub(super) fn entry_bytes(entry: &Entry) -> Option<usize> {
    let body = 4_usize.checked_add(entry.data.len())?.checked_add(entry.context.len())?;
    let bytes = record_bytes(body)?;
    u32::try_from(bytes).is_ok().then_some(bytes)
}

pub(super) fn put_entry(out: &mut Vec<u8>, chain: &mut u32, entry: &Entry) {
    let kind = match entry.entry_type {
        EntryType::EntryNormal => 0,
        EntryType::EntryConfChange => 1,
        EntryType::EntryConfChangeV2 => 2,
    };
    let data_bytes = length(entry.data.len()).to_le_bytes();
    let position = Position { index: entry.index, term: entry.term };
    let body = [&data_bytes, &entry.data[..], &entry.context[..]];
    put_record(out, chain, [KIND_ENTRY, kind], position, &body);
}

/// How many bytes [`put_hard_state`] puts.
pub(super) const HARD_STATE_BYTES: usize = RECORD_HEAD_BYTES + 8 + CRC_BYTES;

pub(super) fn put_hard_state(out: &mut Vec<u8>, chain: &mut u32, state: &HardState) {
    let position = Position { index: state.commit, term: state.term };
    put_record(out, chain, [KIND_HARD_STATE, 0], position, &[&state.vote.to_le_bytes()]);
}

/// How many bytes [`put_note`] puts.
pub(super) fn note_bytes(key: &[u8], value: &[u8]) -> usize {
    RECORD_HEAD_BYTES + 4 + key.len() + value.len() + CRC_BYTES
}

pub(super) fn put_note(out: &mut Vec<u8>, chain: &mut u32, key: &[u8], value: &[u8]) {
    let key_bytes = length(key.len()).to_le_bytes();
    put_record(out, chain, [KIND_NOTE, 0], Position::default(), &[&key_bytes, key, value]);
}

/// How many bytes [`put_reset`] puts.
pub(super) const RESET_BYTES: usize = RECORD_HEAD_BYTES + CRC_BYTES;

pub(super) fn put_reset(out: &mut Vec<u8>, chain: &mut u32, position: Position) {
    put_record(out, chain, [KIND_RESET, 0], position, &[]);
}

fn record_bytes(body_bytes: usize) -> Option<usize> {
    body_bytes.checked_add(RECORD_HEAD_BYTES + CRC_BYTES)
}

fn put_record(
    out: &mut Vec<u8>,
    chain: &mut u32,
    kind: [u8; 2],
    position: Position,
    body: &[&[u8]],
) {
    let start = out.len();
    let body_bytes = body.iter().map(|part| part.len()).sum();
    let bytes = record_bytes(body_bytes).expect("callers keep within 32 bits");
    out.extend_from_slice(&length(bytes).to_le_bytes());
    out.extend_from_slice(&kind);
    out.extend_from_slice(&[0; 2]);
    out.extend_from_slice(&GROUP.to_le_bytes());
    out.extend_from_slice(&position.index.to_le_bytes());
    out.extend_from_slice(&position.term.to_le_bytes());
    for part in body {
        out.extend_from_slice(part);
    }
    *chain = chained_crc(*chain, &out[start..]);
    out.extend_from_slice(&chain.to_le_bytes());
}

/// Reads the next record from the payload of a block and moves `bytes` behind it. `None` is the end.
pub(super) fn read_record<'a>(
    bytes: &mut &'a [u8],
    chain: &mut u32,
) -> Result<Option<Record<'a>>, &'static str> {
    // No record has a length of zero: that is the space behind the last one.
    if bytes.len() < 4 || u32_at(bytes, 0) == 0 {
        let blank = bytes.iter().all(|byte| *byte == 0);
        *bytes = &[];
        return if blank { Ok(None) } else { Err("there are bytes behind its last record") };
    }
    let record_bytes = usize::try_from(u32_at(bytes, 0)).unwrap_or(usize::MAX);
    if record_bytes < RECORD_HEAD_BYTES + CRC_BYTES || record_bytes > bytes.len() {
        return Err("a record has an impossible length");
    }
    let (record, rest) = bytes.split_at(record_bytes);
    let (checked, crc) = record.split_at(record_bytes - CRC_BYTES);
    if chained_crc(*chain, checked) != u32_at(crc, 0) {
        return Err("the checksum of a record does not continue the one before");
    }
    *chain = u32_at(crc, 0);
    *bytes = rest;
    if u32_at(checked, 8) != GROUP {
        return Err("a record belongs to an unknown group");
    }
    let position = Position { index: u64_at(checked, 12), term: u64_at(checked, 20) };
    decode_record([checked[4], checked[5]], position, &checked[RECORD_HEAD_BYTES..]).map(Some)
}

fn decode_record(
    kind: [u8; 2],
    Position { index, term }: Position,
    body: &[u8],
) -> Result<Record<'_>, &'static str> {
    // A length, so many bytes, and the rest.
    let split = || {
        let at = usize::try_from(u32_at(body.get(..4)?, 0)).ok()?;
        body[4..].split_at_checked(at)
    };
    match kind {
        [KIND_ENTRY, entry_type @ 0..=2] => {
            let (data, context) = split().ok_or("the data of an entry are too long")?;
            let mut entry = Entry::default();
            entry.set_entry_type(match entry_type {
                0 => EntryType::EntryNormal,
                1 => EntryType::EntryConfChange,
                _ => EntryType::EntryConfChangeV2,
            });
            entry.index = index;
            entry.term = term;
            // Copies: a slice would keep the memory of the whole segment.
            entry.data = Bytes::copy_from_slice(data);
            entry.context = Bytes::copy_from_slice(context);
            Ok(Record::Entry(entry))
        }
        [KIND_HARD_STATE, 0] if body.len() == 8 => {
            Ok(Record::HardState(hard_state(term, u64_at(body, 0), index)))
        }
        [KIND_NOTE, 0] => {
            let (key, value) = split().ok_or("the key of a note is too long")?;
            Ok(Record::Note { key, value })
        }
        [KIND_RESET, 0] if body.is_empty() => Ok(Record::Reset(Position { index, term })),
        _ => Err("a record is of an unknown kind"),
    }
}

// The header of a segment

/// What a segment begins with: all that is known where it begins, so that those before it can go.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Header {
    pub(super) segment: u64,
    /// The number of its first block.
    pub(super) block: u64,
    /// The checksum of the last record before.
    pub(super) chain: u32,
    /// The last entry before.
    pub(super) last: Position,
    pub(super) hard_state: HardState,
    pub(super) notes: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// A header as it was found.
pub(super) struct ReadHeader {
    pub(super) header: Header,
    /// Where the first block begins.
    pub(super) bytes: usize,
    pub(super) salt: u32,
}

/// Why a header cannot be read.
pub(super) enum BadHeader {
    Damaged(&'static str),
    Version(u32),
}

impl Header {
    /// The header, filled up to whole sectors, and the salt of the sectors behind it.
    pub(super) fn encode(&self) -> (Vec<u8>, u32) {
        let notes_bytes: usize = notes_bytes(&self.notes);
        let bytes = (HEADER_FIXED_BYTES + notes_bytes + CRC_BYTES).next_multiple_of(SECTOR_BYTES);
        let mut out = Vec::with_capacity(bytes);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&length(bytes).to_le_bytes());
        out.extend_from_slice(&self.segment.to_le_bytes());
        out.extend_from_slice(&self.block.to_le_bytes());
        out.extend_from_slice(&self.chain.to_le_bytes());
        out.extend_from_slice(&GROUP.to_le_bytes());
        let HardState { term, vote, commit, .. } = self.hard_state;
        for number in [self.last.index, self.last.term, term, vote, commit] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&length(self.notes.len()).to_le_bytes());
        for (key, value) in &self.notes {
            out.extend_from_slice(&length(key.len()).to_le_bytes());
            out.extend_from_slice(&length(value.len()).to_le_bytes());
            out.extend_from_slice(key);
            out.extend_from_slice(value);
        }
        out.resize(bytes - CRC_BYTES, 0);
        let crc = crc32fast::hash(&out);
        out.extend_from_slice(&crc.to_le_bytes());
        (out, crc)
    }

    /// Reads the header at the beginning of a segment.
    pub(super) fn decode(segment: &[u8]) -> Result<ReadHeader, BadHeader> {
        if segment.len() < SECTOR_BYTES || segment[..8] != MAGIC {
            return Err(BadHeader::Damaged("the file does not begin like a log segment"));
        }
        let bytes = usize::try_from(u32_at(segment, 12)).unwrap_or(usize::MAX);
        if bytes < SECTOR_BYTES
            || bytes > HEADER_BYTES_MAX.min(segment.len())
            || !bytes.is_multiple_of(SECTOR_BYTES)
        {
            return Err(BadHeader::Damaged("its header has an impossible length"));
        }
        let (checked, crc) = segment[..bytes].split_at(bytes - CRC_BYTES);
        let salt = u32_at(crc, 0);
        if crc32fast::hash(checked) != salt {
            return Err(BadHeader::Damaged("the checksum of its header fails"));
        }
        // After the checksum: a damaged version field must not look like a newer server.
        if u32_at(checked, 8) != VERSION {
            return Err(BadHeader::Version(u32_at(checked, 8)));
        }
        if u32_at(checked, 36) != GROUP {
            return Err(BadHeader::Damaged("its header belongs to an unknown group"));
        }
        let header = Self {
            segment: u64_at(checked, 16),
            block: u64_at(checked, 24),
            chain: u32_at(checked, 32),
            last: Position { index: u64_at(checked, 40), term: u64_at(checked, 48) },
            hard_state: hard_state(u64_at(checked, 56), u64_at(checked, 64), u64_at(checked, 72)),
            notes: read_notes(u32_at(checked, 80), &checked[HEADER_FIXED_BYTES..])
                .ok_or(BadHeader::Damaged("the notes in its header are cut off"))?,
        };
        Ok(ReadHeader { header, bytes, salt })
    }
}

/// What all notes take together.
pub(super) fn notes_bytes(notes: &BTreeMap<Vec<u8>, Vec<u8>>) -> usize {
    notes.iter().map(|(key, value)| NOTE_COST_BYTES + key.len() + value.len()).sum()
}

fn read_notes(count: u32, mut bytes: &[u8]) -> Option<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut notes = BTreeMap::new();
    for _ in 0..count {
        let (lengths, rest) = bytes.split_at_checked(NOTE_COST_BYTES)?;
        let (key, rest) = rest.split_at_checked(usize::try_from(u32_at(lengths, 0)).ok()?)?;
        let (value, rest) = rest.split_at_checked(usize::try_from(u32_at(lengths, 4)).ok()?)?;
        notes.insert(key.to_vec(), value.to_vec());
        bytes = rest;
    }
    Some(notes)
}

// Numbers

/// The checksum of `bytes`, mixed with another one.
fn chained_crc(before: u32, bytes: &[u8]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    hasher.update(&before.to_le_bytes());
    hasher.update(bytes);
    hasher.finalize()
}

pub(super) fn hard_state(term: u64, vote: u64, commit: u64) -> HardState {
    HardState { term, vote, commit, ..HardState::default() }
}

pub(super) fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).expect("callers keep within 32 bits")
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}
