//! Snapshots as files of their own.
//!
//! They are written and read here without the log's help, so that a background thread can do it over its own handle on
//! the directory while the log goes on. Only afterwards the log is told.

use std::io::{self, ErrorKind};

use bytes::Bytes;
use raft::eraftpb::{ConfState, SnapshotMetadata};
use ring::digest::{Context, SHA256, digest};

use super::format::{length, u32_at, u64_at};
use super::{OpenError, damaged};
use crate::disk::Disk;

const MAGIC: [u8; 8] = *b"dflksnap";
const VERSION: u32 = 1;
/// Everything before the ids of the members.
const FIXED_BYTES: usize = 60;
const DIGEST_BYTES: usize = 32;

/// So much is written before it is synced: one sync of a large snapshot would keep the disk from the log for too long.
const CHUNK_BYTES: usize = 512 << 10;

/// A snapshot as it was found on disk.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredSnapshot {
    /// Index, term and members.
    pub metadata: SnapshotMetadata,
    /// The state.
    pub data: Bytes,
    /// SHA-256 over the metadata and the state.
    pub digest: [u8; 32],
}

/// Puts a snapshot into a file, durable when this returns. A crash on the way leaves nothing behind that counts.
///
/// To be followed by [`LogStore::snapshot_stored`](super::LogStore::snapshot_stored) or
/// [`LogStore::snapshot_installed`](super::LogStore::snapshot_installed). Not two of the same index at a time.
pub fn write_snapshot<D: Disk>(
    disk: &mut D,
    metadata: &SnapshotMetadata,
    data: &[u8],
) -> io::Result<()> {
    let name = file_name(metadata.index);
    let aside = format!("{name}{ASIDE}");
    let written = write_aside(disk, &aside, metadata, data);
    if written.is_err() {
        // So that it does not keep the room that may be missing. If this fails too, the next start does it.
        let _ = disk.remove(&aside);
    }
    written?;
    disk.rename(&aside, &name)?;
    disk.sync_dir()
}

fn write_aside<D: Disk>(
    disk: &mut D,
    aside: &str,
    metadata: &SnapshotMetadata,
    data: &[u8],
) -> io::Result<()> {
    match disk.remove(aside) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => (),
    }
    disk.create(aside, 0)?;
    let head = encode_head(metadata, data.len());
    let mut context = Context::new(&SHA256);
    let mut offset = 0;
    let mut append = |disk: &mut D, bytes: &[u8]| {
        disk.write(aside, offset, bytes)?;
        offset += bytes.len() as u64;
        io::Result::Ok(())
    };
    context.update(&head);
    append(disk, &head)?;
    for chunk in data.chunks(CHUNK_BYTES) {
        context.update(chunk);
        append(disk, chunk)?;
        disk.sync(aside)?;
    }
    append(disk, context.finish().as_ref())?;
    disk.sync(aside)
}

/// Reads and verifies the snapshot at an index.
pub fn read_snapshot<D: Disk>(disk: &D, index: u64) -> Result<StoredSnapshot, OpenError> {
    let name = file_name(index);
    let file_bytes = usize::try_from(disk.len(&name)?).map_err(io::Error::other)?;
    if file_bytes < FIXED_BYTES + DIGEST_BYTES {
        return Err(damaged(&name, 0, "the file is too short for a snapshot"));
    }
    let mut bytes = vec![0; file_bytes];
    disk.read(&name, 0, &mut bytes)?;
    let bytes = Bytes::from(bytes);
    let (content, stored) = bytes.split_at(file_bytes - DIGEST_BYTES);
    if content[..8] != MAGIC {
        return Err(damaged(&name, 0, "the file does not begin like a snapshot"));
    }
    if digest(&SHA256, content).as_ref() != stored {
        return Err(damaged(&name, 0, "the digest of the snapshot fails"));
    }
    // After the digest: a damaged version field must not look like a newer server.
    if u32_at(content, 8) != VERSION {
        return Err(OpenError::UnknownVersion { file: name, version: u32_at(content, 8) });
    }
    let (metadata, data_at) = decode_head(content)
        .ok_or_else(|| damaged(&name, 0, "the lengths in the snapshot do not add up"))?;
    if metadata.index != index {
        let what = format!("it is the snapshot of index {}", metadata.index);
        return Err(damaged(&name, 16, what));
    }
    let data = bytes.slice(data_at..content.len());
    Ok(StoredSnapshot { metadata, data, digest: stored.try_into().expect("just split off") })
}

fn encode_head(metadata: &SnapshotMetadata, data_bytes: usize) -> Vec<u8> {
    let conf_state = metadata.get_conf_state();
    let lists = members(conf_state);
    let mut head = Vec::with_capacity(FIXED_BYTES);
    head.extend_from_slice(&MAGIC);
    head.extend_from_slice(&VERSION.to_le_bytes());
    // The Raft group; so far there is one.
    head.extend_from_slice(&0_u32.to_le_bytes());
    head.extend_from_slice(&metadata.index.to_le_bytes());
    head.extend_from_slice(&metadata.term.to_le_bytes());
    head.extend_from_slice(&(data_bytes as u64).to_le_bytes());
    head.extend_from_slice(&u32::from(conf_state.auto_leave).to_le_bytes());
    for list in lists {
        head.extend_from_slice(&length(list.len()).to_le_bytes());
    }
    for id in lists.into_iter().flatten() {
        head.extend_from_slice(&id.to_le_bytes());
    }
    head
}

/// The metadata, and where the data begin. `None` if the lengths do not fit together.
fn decode_head(content: &[u8]) -> Option<(SnapshotMetadata, usize)> {
    if u32_at(content, 12) != 0 {
        return None;
    }
    let mut ids = &content[FIXED_BYTES..];
    let mut list = |at: usize| {
        let count = usize::try_from(u32_at(content, at)).ok()?;
        let (taken, rest) = ids.split_at_checked(count.checked_mul(8)?)?;
        ids = rest;
        Some(taken.chunks_exact(8).map(|id| u64_at(id, 0)).collect::<Vec<_>>())
    };
    let conf_state = ConfState {
        voters: list(44)?,
        learners: list(48)?,
        voters_outgoing: list(52)?,
        learners_next: list(56)?,
        auto_leave: u32_at(content, 40) != 0,
        ..ConfState::default()
    };
    let data_bytes = usize::try_from(u64_at(content, 32)).ok()?;
    let mut metadata = SnapshotMetadata::default();
    metadata.set_conf_state(conf_state);
    metadata.index = u64_at(content, 16);
    metadata.term = u64_at(content, 24);
    (ids.len() == data_bytes).then_some((metadata, content.len() - data_bytes))
}

fn members(conf_state: &ConfState) -> [&[u64]; 4] {
    let ConfState { voters, learners, voters_outgoing, learners_next, .. } = conf_state;
    [voters, learners, voters_outgoing, learners_next]
}

const PREFIX: &str = "snapshot-";
/// Ends the name of a file that does not count yet.
const ASIDE: &str = ".tmp";

pub(super) fn file_name(index: u64) -> String {
    format!("{PREFIX}{index:016x}")
}

/// The index of the snapshot in a file of this name.
pub(super) fn index_of(name: &str) -> Option<u64> {
    let index = u64::from_str_radix(name.strip_prefix(PREFIX)?, 16).ok()?;
    (file_name(index) == name).then_some(index)
}

/// Whether this is what an interrupted [`write_snapshot`] left behind.
pub(super) fn is_aside(name: &str) -> bool {
    name.strip_suffix(ASIDE).and_then(index_of).is_some()
}
