//! The durable log: entries, hard state and notes in segments, and snapshots beside them.
//!
//! [`LogStore`] owns the files of one data directory through a [`Disk`]. It never knows what entries mean. The bytes
//! are made and read in `format.rs`, what is found at a start is judged in `recovery.rs`, snapshots are in
//! `snapshot.rs`.
//!
//! # Files
//!
//! | Name | Content |
//! | --- | --- |
//! | `log-<n>` | segment n (16 hexadecimal digits): a header, blocks, zeros up to its size |
//! | `snapshot-<i>` | the state at index i |
//! | `reserve` | zeros, the next segment; grows in steps until it is large enough |
//! | `cut` | an interrupted write was cut away, and nothing has been written since |
//! | `snapshot-<i>.tmp` | a snapshot that is not finished, removed at the next start |
//!
//! Segments are filled with zeros and synced before they are used, so that a sync of the log writes data and nothing
//! about the file. A new segment gets its name only when its header is synced, and its first block only when the name
//! is. Then the segment before is closed with a sector that says so: from there on the new one must not be missing.
//!
//! # Segments
//!
//! All numbers are little-endian, all checksums CRC-32. A segment begins with a header of whole sectors (512 bytes):
//!
//! | Offset | Bytes | Field |
//! | --- | --- | --- |
//! | 0 | 8 | magic `dflkdlog` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | bytes of the header, a multiple of 512 |
//! | 16 | 8 | number of the segment |
//! | 24 | 8 | number of its first block |
//! | 32 | 4 | checksum of the last record before |
//! | 36 | 4 | Raft group, 0 |
//! | 40 | 16 | index and term of the last entry before |
//! | 56 | 24 | hard state: term, vote, commit |
//! | 80 | 4 | number of notes |
//! | 84 | … | per note: length of key, length of value (4 bytes each), key, value |
//! | end − 4 | 4 | checksum of the header, the *salt* of the sectors behind it |
//!
//! Behind it stand *blocks*. A block is what one sync makes durable: it begins at a sector, no sector belongs to two,
//! and **it is begun only when the block before is synced**. So any sector of a later block proves that a block was
//! synced. Blocks are numbered over the whole life of the log. Each of their sectors can be judged by itself:
//!
//! | Offset | Bytes | Field |
//! | --- | --- | --- |
//! | 0 | 8 | number of the block |
//! | 8 | 4 | which sector of the block this is, from 0 |
//! | 12 | 4 | how many the block has; 0: the segment is closed, the number is that of the next segment's first block |
//! | 16 | 491 | the next piece of the records, zeros behind the last |
//! | 507 | 4 | checksum of the salt and all before |
//! | 511 | 1 | 0xd5: written to the end |
//!
//! The pieces together are *records*:
//!
//! | Offset | Bytes | Field |
//! | --- | --- | --- |
//! | 0 | 4 | bytes of the record |
//! | 4 | 1 | kind: 1 entry, 2 hard state, 3 note, 4 reset |
//! | 5 | 1 | type of an entry: 0 normal, 1 conf change, 2 conf change v2 |
//! | 6 | 2 | 0 |
//! | 8 | 4 | Raft group, 0 |
//! | 12 | 8 | index (of a hard state: commit) |
//! | 20 | 8 | term |
//! | 28 | … | entry: length of data (4), data, context; hard state: vote (8); note: length of key (4), key, value |
//! | end − 4 | 4 | checksum of the previous record's checksum and all before |
//!
//! An entry whose index is not above the last one replaces that one and all behind it. A note with an empty value
//! removes the note. A reset says that a snapshot of this index and term came from elsewhere and all entries before are
//! void.
//!
//! # Snapshots
//!
//! | Offset | Bytes | Field |
//! | --- | --- | --- |
//! | 0 | 8 | magic `dflksnap` |
//! | 8 | 4 | version, 1 |
//! | 12 | 4 | Raft group, 0 |
//! | 16 | 16 | index and term |
//! | 32 | 8 | bytes of data |
//! | 40 | 4 | auto leave, 0 or 1 |
//! | 44 | 16 | how many voters, learners, outgoing voters, next learners |
//! | 60 | … | their ids (8 bytes each), then the data |
//! | end − 32 | 32 | SHA-256 of all before |
//!
//! Later versions keep magic, version and checksum where they are, so that an old server can tell a newer file from a
//! damaged one.
//!
//! # What is cut and what is damage
//!
//! When everything readable is read, the rest of the last segment decides. The last block may be one whose sync was
//! never reported: after a crash each of its sectors is there or reads as zero, in any order, and one may be short.
//!
//! - All zero: the log ends here.
//! - Otherwise every sector of the rest must be zero, short (its last byte is zero and its checksum fails) or a whole
//!   sector of this one block in its place. Then the block is cut as a whole: overwritten with zeros, and reported.
//! - Anything else is damage: a sector that was written to the end and fails its checksum, a sector of a later block, a
//!   record that does not continue the chain, a missing file, a bad header or digest. Nothing is changed then.
//!
//! Some faults can not be told from a crash, or from nothing, by looking at the files:
//!
//! 1. All sectors of the last block, or of the last few, read as zero though they were synced: looks like a clean end.
//! 2. Some sectors of the last block do: looks like an interrupted write. The caller is told of the cut, and so can
//!    catch up before it votes again. Each further block proves the one before, so only the very last is at risk.
//! 3. A byte changed in the zeros behind the end: reported as a cut (which cuts nothing) or, in the last byte of a
//!    sector, as damage. Behind the end of a closed segment it is not noticed.
//! 4. An interrupted write that keeps the end of a sector and loses its beginning: no disk is known to do that, it is
//!    refused as damage.
//! 5. The whole directory is an older copy of itself, or empty: only the other members can notice.
//!
//! A cut leaves a node that may have forgotten a vote or an entry it acknowledged: it neither votes nor stands for
//! election until it has applied what a leader had committed, unless it is the only voter. `LOCK`, in the same
//! directory, belongs to `disk.rs` and keeps a second process out.

mod format;
pub mod inspect;
mod recovery;
mod snapshot;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, ErrorKind};

use dflockd_core::bugs::{Bug, bug};
use raft::eraftpb::{Entry, HardState, SnapshotMetadata};
use thiserror::Error;

use self::format::{Header, Position, SECTOR_BYTES};
use self::recovery::Found;
pub use self::snapshot::{StoredSnapshot, read_snapshot, write_snapshot};
use super::disk::{Disk, is_out_of_descriptors};

const RESERVE: &str = "reserve";
const CUT: &str = "cut";

/// So much of the reserve is written and synced at once: more would hold up the log.
const RESERVE_STEP_BYTES: u64 = 1 << 20;

/// Beyond this a segment is not read. One grows over its size only for a batch that fits into none.
const SEGMENT_BYTES_MAX: u64 = 1 << 30;

/// What may wait for one sync.
const BATCH_BYTES_MAX: usize = 256 << 20;

/// Memory that is kept for the next block.
const BUFFER_BYTES_KEPT: usize = 4 << 20;

const REMEDY: &str = "this node can not go on with it: remove the node from the cluster and let a \
                      replacement join under a new id with an empty data directory; a single node \
                      needs its data directory restored from a backup";

/// How a log is kept.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// The size of a segment file. Those that exist keep theirs, which must not be smaller: that would be damage.
    pub segment_bytes: u64,
}

impl Default for LogOptions {
    fn default() -> Self {
        Self { segment_bytes: 16 << 20 }
    }
}

impl LogOptions {
    fn segment_bytes(&self) -> u64 {
        let whole = self.segment_bytes.next_multiple_of(SECTOR_BYTES as u64);
        whole.clamp(4 * SECTOR_BYTES as u64, SEGMENT_BYTES_MAX)
    }
}

/// Why a log cannot be used.
#[derive(Debug, Error)]
pub enum OpenError {
    /// What is there cannot be trusted. Nothing was changed.
    #[error("file {file} in the data directory is damaged at byte {offset}: {what}; {remedy}")]
    Damaged {
        /// The name of the file in the data directory.
        file: String,
        /// Where in the file.
        offset: u64,
        /// What is wrong.
        what: String,
        /// What people can do about it.
        remedy: &'static str,
    },
    /// The file is whole but its format is not known here.
    #[error(
        "file {file} in the data directory has format version {version}, which this server does \
         not know; start the newer server that wrote it"
    )]
    UnknownVersion {
        /// The name of the file in the data directory.
        file: String,
        /// The version it claims.
        version: u32,
    },
    /// The operating system refused.
    #[error("cannot use the data directory: {0}")]
    Io(#[from] io::Error),
}

fn damaged(file: &str, offset: usize, what: impl Into<String>) -> OpenError {
    let (file, what) = (file.to_owned(), what.into());
    OpenError::Damaged { file, offset: offset as u64, what, remedy: REMEDY }
}

/// Everything the log remembers, at a start.
#[derive(Debug)]
pub struct Recovered {
    /// Term, vote and commit. The commit is at least the index of the snapshot, the term at least its term, though they
    /// may not have been written yet when the snapshot was.
    pub hard_state: HardState,
    /// The notes that were written last.
    pub notes: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The newest snapshot.
    pub snapshot: Option<StoredSnapshot>,
    /// The entries, without a gap. The first is at most the one behind the snapshot: what is still on disk before it is
    /// there, too.
    pub entries: Vec<Entry>,
    /// Whether an interrupted write at the end was cut away. Reported again at each start until entries or a hard state
    /// were written and synced, so the reader has the time to note what it makes of it.
    pub cut: bool,
}

/// What is written together. It is found again as a whole or, if it was not synced, perhaps not at all.
#[derive(Clone, Debug, Default)]
pub struct LogBatch {
    /// Entries in order and without a gap. The first may have the index of one that is there already: then that one and
    /// all behind it are replaced.
    pub entries: Vec<Entry>,
    /// Term, vote and commit index, if they have changed.
    pub hard_state: Option<HardState>,
    /// The notes that have changed. An empty value removes a note. All notes together take at most 64 KiB, each
    /// counting eight bytes more than its key and value.
    pub notes: Vec<(Vec<u8>, Vec<u8>)>,
}

/// Whether there is room for new work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Room {
    /// The next segment is there, or can be.
    Plenty,
    /// The disk is full. What is left of the segment in use, nearly all of it when this is first said, is for what must
    /// go on.
    Low,
}

/// The log of one node.
///
/// [`write`](Self::write) collects, [`sync`](Self::sync) makes everything collected durable at once. After an error of
/// the disk nothing is accepted any more, as nobody knows what of the failed write will be there after a restart.
///
/// The one exception is an error that [`is_out_of_descriptors`]: no file could be opened, so nothing was begun. Whoever
/// gets it calls the same method again later, with the same arguments, before any other that writes.
#[derive(Debug)]
pub struct LogStore<D> {
    disk: D,
    segment_bytes: u64,
    /// Older segments, the oldest first.
    closed: VecDeque<Closed>,
    active: Active,
    reserve: Reserve,
    /// What the header of a segment would say now. Runs ahead of the disk by what is pending.
    tip: Header,
    /// Records that wait for the next sync.
    pending: Vec<u8>,
    /// The sectors of a block; kept for its memory.
    block: Vec<u8>,
    snapshot: Option<KnownSnapshot>,
    /// Files that are not needed any more, in the order in which they must go.
    obsolete: VecDeque<String>,
    /// Files that are being removed outside of the log.
    under_removal: VecDeque<String>,
    cut: CutMark,
    /// What went wrong first.
    failed: Option<String>,
}

#[derive(Debug)]
struct Closed {
    number: u64,
    bytes: u64,
    /// No entry in it, nor before it, that still counts has a higher index.
    last_index: u64,
}

/// The segment in use.
#[derive(Debug)]
struct Active {
    name: String,
    salt: u32,
    /// Where the next block goes.
    offset: u64,
    bytes: u64,
    /// It has a block already.
    used: bool,
}

/// The next segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Reserve {
    Ready,
    Filling {
        bytes: u64,
        /// There was no room before.
        low: bool,
    },
    /// No room. Tried again when something was removed, and when asked to.
    Refused,
}

#[derive(Debug, Clone, Copy)]
struct KnownSnapshot {
    index: u64,
    bytes: u64,
}

/// Whether the file is there that tells of a cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CutMark {
    Absent,
    Present,
    /// Not needed any more when the next block is synced.
    Obsolete,
}

impl<D: Disk> LogStore<D> {
    /// Reads what is there, judges it, and goes on behind it. An empty directory becomes an empty log.
    pub fn open(disk: D, options: LogOptions) -> Result<(Self, Recovered), OpenError> {
        let segment_bytes = options.segment_bytes();
        // Nothing is changed before all of it is found to be good.
        match recovery::read(&disk, segment_bytes)? {
            Some(found) => Self::resume(disk, segment_bytes, found),
            None => Self::begin(disk, segment_bytes),
        }
    }

    /// The first segment of a new log.
    fn begin(mut disk: D, segment_bytes: u64) -> Result<(Self, Recovered), OpenError> {
        remove_litter(&mut disk, None)?;
        remove_if_there(&mut disk, CUT)?;
        let tip = Header {
            // So that the first one gets the number 1.
            segment: 0,
            block: 1,
            chain: 0,
            last: Position::default(),
            hard_state: HardState::default(),
            notes: BTreeMap::new(),
        };
        let nowhere = Active { name: String::new(), salt: 0, offset: 0, bytes: 0, used: false };
        let mut log = Self {
            disk,
            segment_bytes,
            closed: VecDeque::new(),
            obsolete: VecDeque::new(),
            under_removal: VecDeque::new(),
            active: nowhere,
            reserve: Reserve::Filling { bytes: 0, low: false },
            tip,
            pending: Vec::new(),
            block: Vec::new(),
            snapshot: None,
            cut: CutMark::Absent,
            failed: None,
        };
        log.change_segment()?;
        log.fill_reserve()?;
        let recovered = Recovered {
            hard_state: HardState::default(),
            notes: BTreeMap::new(),
            snapshot: None,
            entries: Vec::new(),
            cut: false,
        };
        Ok((log, recovered))
    }

    /// Goes on where `found` ends.
    fn resume(
        mut disk: D,
        segment_bytes: u64,
        mut found: Found,
    ) -> Result<(Self, Recovered), OpenError> {
        // First of all: names that are seen here may not be durable yet, and what follows relies on them.
        disk.sync_dir()?;
        let name = segment_name(found.tip.segment);
        let offset = found.end as u64;
        if !found.torn.is_empty() {
            if !found.cut_marked {
                // First, or a crash between the cut and the caller's note of it would hide the cut.
                disk.create(CUT, 0)?;
                disk.sync(CUT)?;
                disk.sync_dir()?;
                found.cut_marked = true;
            }
            // In two steps, so that a crash in between leaves nothing but short sectors even on a disk that does not
            // write sectors as a whole.
            format::shorten_sectors(&mut found.torn);
            disk.write(&name, offset, &found.torn)?;
            disk.sync(&name)?;
            found.torn.fill(0);
            disk.write(&name, offset, &found.torn)?;
        }
        // The last block may be in memory only: its writer may have died before its sync, or because of it. The next
        // block says that this one is durable, so it has to be.
        let last_block_at = offset - found.last_block.len() as u64;
        disk.write(&name, last_block_at, &found.last_block)?;
        disk.sync(&name)?;
        if let Some(unclosed) = &found.unclosed {
            let predecessor = segment_name(found.tip.segment - 1);
            disk.write(&predecessor, unclosed.end as u64, &unclosed.sector)?;
            disk.sync(&predecessor)?;
        }
        remove_litter(&mut disk, found.snapshot.as_ref().map(|snapshot| snapshot.metadata.index))?;

        let snapshot = match &found.snapshot {
            Some(StoredSnapshot { metadata, .. }) => Some(KnownSnapshot {
                index: metadata.index,
                bytes: disk.len(&snapshot::file_name(metadata.index))?,
            }),
            None => None,
        };
        let bytes = found.segment_bytes.max(offset);
        let used = !found.last_block.is_empty();
        let mut log = Self {
            disk,
            segment_bytes,
            closed: found.closed,
            obsolete: VecDeque::new(),
            under_removal: VecDeque::new(),
            active: Active { name, salt: found.salt, offset, bytes, used },
            reserve: Reserve::Filling { bytes: 0, low: false },
            tip: found.tip,
            pending: Vec::new(),
            block: Vec::new(),
            snapshot,
            cut: if found.cut_marked { CutMark::Present } else { CutMark::Absent },
            failed: None,
        };
        let mut hard_state = log.tip.hard_state.clone();
        if let Some(StoredSnapshot { metadata, .. }) = &found.snapshot {
            if found.void {
                // The crash came between storing and installing it.
                log.reset(metadata)?;
                found.entries.clear();
            }
            hard_state.commit = hard_state.commit.max(metadata.index);
            if hard_state.term < metadata.term {
                // Nothing was promised in that term yet: a vote would have been synced.
                hard_state.term = metadata.term;
                hard_state.vote = 0;
            }
        }
        log.fill_reserve()?;
        let recovered = Recovered {
            hard_state,
            notes: log.tip.notes.clone(),
            snapshot: found.snapshot,
            entries: found.entries,
            cut: found.cut_marked,
        };
        Ok((log, recovered))
    }

    /// Takes a batch. Not durable before [`sync`](Self::sync).
    ///
    /// A batch that does not follow from what is there is refused as [`ErrorKind::InvalidInput`] and changes nothing.
    pub fn write(&mut self, batch: &LogBatch) -> io::Result<()> {
        self.check_usable()?;
        let bytes = self.check_batch(batch)?;
        if bytes == 0 {
            return Ok(());
        }
        self.guard(|log| log.make_room(bytes))?;
        let (out, tip) = (&mut self.pending, &mut self.tip);
        for (key, value) in &batch.notes {
            format::put_note(out, &mut tip.chain, key, value);
            set_note(&mut tip.notes, key, value);
        }
        for entry in &batch.entries {
            format::put_entry(out, &mut tip.chain, entry);
            tip.last = Position { index: entry.index, term: entry.term };
        }
        if let Some(state) = &batch.hard_state {
            format::put_hard_state(out, &mut tip.chain, state);
            tip.hard_state = format::hard_state(state.term, state.vote, state.commit);
        }
        if self.cut == CutMark::Present && (!batch.entries.is_empty() || batch.hard_state.is_some())
        {
            self.cut = CutMark::Obsolete;
        }
        Ok(())
    }

    /// Makes everything written so far durable.
    ///
    /// Now and then it also works a little on the next segment.
    pub fn sync(&mut self) -> io::Result<()> {
        self.check_usable()?;
        self.guard(|log| {
            log.flush()?;
            match log.step_reserve() {
                // What was asked for is durable. The next sync goes on with the reserve.
                Err(error) if is_out_of_descriptors(&error) => Ok(()),
                done => done,
            }
        })
    }

    /// Stores a snapshot of what is in the log. The entries stay.
    ///
    /// If the disk is full ([`ErrorKind::StorageFull`]) nothing has changed and the log can be used on.
    pub fn store_snapshot(&mut self, metadata: &SnapshotMetadata, data: &[u8]) -> io::Result<()> {
        self.check_usable()?;
        self.check_covered(metadata)?;
        match write_snapshot(&mut self.disk, metadata, data) {
            Err(error) if is_full(&error) => return Err(error),
            written => self.guard(|_| written)?,
        }
        self.snapshot_stored(metadata)
    }

    /// A snapshot of what is in the log was stored by [`write_snapshot`]: older ones go.
    pub fn snapshot_stored(&mut self, metadata: &SnapshotMetadata) -> io::Result<()> {
        self.adopt(metadata)?;
        self.sweep()
    }

    /// A snapshot of what is in the log was stored by [`write_snapshot`]: older ones become
    /// [obsolete](Self::take_obsolete).
    pub fn adopt(&mut self, metadata: &SnapshotMetadata) -> io::Result<()> {
        self.check_usable()?;
        self.check_covered(metadata)?;
        self.guard(|log| log.adopt_snapshot(metadata.index))
    }

    /// What is not needed any more. To be removed file by file, each removal durable before the next, outside of the
    /// log: to give room back takes the file system long. Nothing more is given out until [`swept`](Self::swept) says
    /// that it is done: a segment must not be gone while an older one is there, or the log would have a gap after a
    /// crash.
    pub fn take_obsolete(&mut self) -> VecDeque<String> {
        if !self.under_removal.is_empty() && !bug(Bug::SweepsOverlap) {
            return VecDeque::new();
        }
        self.under_removal = std::mem::take(&mut self.obsolete);
        self.under_removal.clone()
    }

    /// Files were removed: there may be room again.
    pub fn swept(&mut self) {
        self.under_removal.clear();
        self.expect_room();
    }

    /// Removes what is not needed any more, unless somebody else removes what was not needed before.
    fn sweep(&mut self) -> io::Result<()> {
        self.check_usable()?;
        if !self.under_removal.is_empty() {
            return Ok(());
        }
        self.guard(|log| {
            while let Some(name) = log.obsolete.pop_front() {
                log.disk.remove(&name)?;
                log.disk.sync_dir()?;
                log.expect_room();
            }
            Ok(())
        })
    }

    /// Stores a snapshot that came from elsewhere, and lets the log go on behind it: all entries so far are void.
    pub fn install_snapshot(&mut self, metadata: &SnapshotMetadata, data: &[u8]) -> io::Result<()> {
        self.check_usable()?;
        self.check_newer(metadata)?;
        // Even a full disk is fatal here: if the new name is there after a restart the log is void, so nothing may be
        // added to it any more. Without a descriptor there is no new name yet, and the call is repeated before anything
        // else is written.
        self.guard(|log| write_snapshot(&mut log.disk, metadata, data))?;
        self.snapshot_installed(metadata)
    }

    /// A snapshot that came from elsewhere was stored by [`write_snapshot`], and nothing was written to the log since
    /// that began: the log goes on behind it, all entries so far are void.
    pub fn snapshot_installed(&mut self, metadata: &SnapshotMetadata) -> io::Result<()> {
        self.check_usable()?;
        self.check_newer(metadata)?;
        self.guard(|log| {
            log.reset(metadata)?;
            log.adopt_snapshot(metadata.index)
        })?;
        self.sweep()
    }

    /// Removes segments in which everything is below `index`, but nothing that the snapshot does not cover.
    #[cfg(test)]
    fn truncate_before(&mut self, index: u64) -> io::Result<()> {
        self.retire_before(index)?;
        self.sweep()
    }

    /// Makes segments in which everything is below `index` [obsolete](Self::take_obsolete), but nothing that the
    /// snapshot does not cover.
    pub fn retire_before(&mut self, index: u64) -> io::Result<()> {
        self.check_usable()?;
        let covered = self.snapshot.map_or(0, |snapshot| snapshot.index);
        let is_old =
            |oldest: &mut Closed| oldest.last_index < index && oldest.last_index <= covered;
        // The oldest first: if a later removal were durable and an earlier one not, there would be a gap.
        while let Some(oldest) = self.closed.pop_front_if(is_old) {
            self.obsolete.push_back(segment_name(oldest.number));
        }
        Ok(())
    }

    /// Whether new work can be accepted.
    pub fn room(&self) -> Room {
        match self.reserve {
            Reserve::Refused | Reserve::Filling { low: true, .. } => Room::Low,
            Reserve::Ready | Reserve::Filling { low: false, .. } => Room::Plenty,
        }
    }

    /// Looks again for room on the disk. To be called about once a second while there is not [`Room::Plenty`]: somebody
    /// else may have made room.
    pub fn retry_room(&mut self) -> io::Result<Room> {
        self.check_usable()?;
        self.guard(|log| {
            log.expect_room();
            log.step_reserve()
        })?;
        Ok(self.room())
    }

    /// Whether the next segment is complete, so that the log can go on without opening a file.
    pub fn is_reserved(&self) -> bool {
        self.reserve == Reserve::Ready
    }

    /// How many bytes the log (with its reserve) and the snapshot take.
    pub fn bytes(&self) -> (u64, u64) {
        let reserve = match self.reserve {
            Reserve::Ready => self.segment_bytes,
            Reserve::Filling { bytes, .. } => bytes,
            Reserve::Refused => 0,
        };
        let closed: u64 = self.closed.iter().map(|segment| segment.bytes).sum();
        let snapshot = self.snapshot.map_or(0, |snapshot| snapshot.bytes);
        (closed + self.active.bytes + reserve, snapshot)
    }

    // Checks that change nothing

    fn check_usable(&self) -> io::Result<()> {
        match &self.failed {
            Some(first) => Err(io::Error::other(format!("the log has failed before: {first}"))),
            None => Ok(()),
        }
    }

    /// How many bytes the batch's records take.
    fn check_batch(&self, batch: &LogBatch) -> io::Result<usize> {
        let mut bytes = batch.hard_state.as_ref().map_or(0, |_| format::HARD_STATE_BYTES);
        if let Some(first) = batch.entries.first() {
            let covered = self.snapshot.map_or(0, |snapshot| snapshot.index);
            let last = self.tip.last.index;
            if first.index <= covered || first.index > last.saturating_add(1) {
                return Err(invalid(format!(
                    "entry {} follows neither the snapshot at {covered} nor an entry up to {last}",
                    first.index
                )));
            }
            for (index, entry) in (first.index..).zip(&batch.entries) {
                if entry.index != index {
                    return Err(invalid(format!("entry {} instead of {index}", entry.index)));
                }
                let entry_bytes = format::entry_bytes(entry).unwrap_or(usize::MAX);
                bytes = bytes.saturating_add(entry_bytes);
            }
        }
        if !batch.notes.is_empty() {
            let mut notes = self.tip.notes.clone();
            for (key, value) in &batch.notes {
                bytes += format::note_bytes(key, value);
                set_note(&mut notes, key, value);
            }
            if format::notes_bytes(&notes) > format::NOTES_BYTES_MAX {
                return Err(invalid("the notes are too long".to_owned()));
            }
        }
        if bytes > BATCH_BYTES_MAX {
            return Err(invalid(format!("a batch of {bytes} bytes is too large")));
        }
        Ok(bytes)
    }

    /// A snapshot of our own holds nothing that the log does not have: found behind its end, it would void the log.
    fn check_covered(&self, metadata: &SnapshotMetadata) -> io::Result<()> {
        let last = self.tip.last.index;
        if metadata.index == 0 || metadata.index > last {
            return Err(invalid(format!(
                "a snapshot at {} of a log that ends at {last}",
                metadata.index
            )));
        }
        Ok(())
    }

    fn check_newer(&self, metadata: &SnapshotMetadata) -> io::Result<()> {
        let newest = self.snapshot.map_or(0, |snapshot| snapshot.index);
        if metadata.index <= newest {
            return Err(invalid(format!(
                "a snapshot at {}, not above the one at {newest}",
                metadata.index
            )));
        }
        Ok(())
    }

    /// Does something with the disk. If it fails the log is not used any more, unless it was not even begun.
    fn guard<T>(&mut self, work: impl FnOnce(&mut Self) -> io::Result<T>) -> io::Result<T> {
        let result = work(self);
        if let Err(error) = &result
            && !is_out_of_descriptors(error)
        {
            self.failed = Some(error.to_string());
        }
        result
    }

    // Blocks and segments

    /// Makes sure that the next block can take `bytes` more.
    fn make_room(&mut self, bytes: usize) -> io::Result<()> {
        if self.fits(bytes) {
            return Ok(());
        }
        // A batch is not split over blocks, and a block not over segments.
        self.flush()?;
        if !self.fits(bytes) {
            self.change_segment()?;
        }
        Ok(())
    }

    fn fits(&self, bytes: usize) -> bool {
        let block_bytes = format::block_bytes(self.pending.len() + bytes) as u64;
        // One sector is kept to close the segment. A batch that is too large for any makes an empty one grow.
        self.active.offset + block_bytes + SECTOR_BYTES as u64 <= self.active.bytes
            || (!self.active.used && self.pending.is_empty())
    }

    /// Writes what is pending as one block and syncs it.
    fn flush(&mut self) -> io::Result<()> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let active = &mut self.active;
        self.block.clear();
        format::put_block(&mut self.block, active.salt, self.tip.block, &self.pending);
        self.disk.write(&active.name, active.offset, &self.block)?;
        self.disk.sync(&active.name)?;
        active.offset += self.block.len() as u64;
        active.bytes = active.bytes.max(active.offset);
        active.used = true;
        self.tip.block += 1;
        self.pending.clear();
        self.pending.shrink_to(BUFFER_BYTES_KEPT);
        self.block.shrink_to(BUFFER_BYTES_KEPT);
        if self.cut == CutMark::Obsolete {
            self.disk.remove(CUT)?;
            self.cut = CutMark::Absent;
        }
        Ok(())
    }

    /// Makes the reserve the segment in use. Everything written before is synced.
    fn change_segment(&mut self) -> io::Result<()> {
        if self.reserve == Reserve::Refused {
            self.expect_room();
        }
        self.fill_reserve()?;
        if self.reserve == Reserve::Refused {
            return Err(io::Error::new(
                ErrorKind::StorageFull,
                "there is no room on the disk for a further segment of the log",
            ));
        }
        // Both are open as a rule. If one is not, better to be told so now than between two steps.
        self.disk.len(RESERVE)?;
        if self.tip.segment > 0 {
            self.disk.len(&self.active.name)?;
        }
        self.enter_reserve().map_err(begun)
    }

    /// The part of [`change_segment`](Self::change_segment) that can not be repeated.
    fn enter_reserve(&mut self) -> io::Result<()> {
        let header = Header { segment: self.tip.segment + 1, ..self.tip.clone() };
        let name = segment_name(header.segment);
        let (bytes, salt) = header.encode();
        self.disk.write(RESERVE, 0, &bytes)?;
        self.disk.sync(RESERVE)?;
        self.disk.rename(RESERVE, &name)?;
        self.disk.sync_dir()?;
        self.reserve = Reserve::Filling { bytes: 0, low: false };
        let next = Active {
            name,
            salt,
            offset: bytes.len() as u64,
            bytes: self.segment_bytes.max(bytes.len() as u64),
            used: false,
        };
        let closed = std::mem::replace(&mut self.active, next);
        if self.tip.segment > 0 {
            // Only now: it says that the next one is there.
            let sector = format::closing_sector(closed.salt, header.block);
            self.disk.write(&closed.name, closed.offset, &sector)?;
            self.disk.sync(&closed.name)?;
            self.closed.push_back(Closed {
                number: self.tip.segment,
                bytes: closed.bytes.max(closed.offset + sector.len() as u64),
                last_index: self.tip.last.index,
            });
        }
        self.tip = header;
        Ok(())
    }

    // The reserve

    /// Works on the reserve until it is there or refused.
    fn fill_reserve(&mut self) -> io::Result<()> {
        while let Reserve::Filling { .. } = self.reserve {
            self.step_reserve()?;
        }
        Ok(())
    }

    /// Works on the reserve for a moment. May be repeated if it [`is_out_of_descriptors`].
    fn step_reserve(&mut self) -> io::Result<()> {
        let Reserve::Filling { bytes, low } = self.reserve else { return Ok(()) };
        let step = RESERVE_STEP_BYTES.min(self.segment_bytes - bytes);
        match self.extend_reserve(bytes, step) {
            Ok(()) if bytes + step == self.segment_bytes => self.reserve = Reserve::Ready,
            Ok(()) => self.reserve = Reserve::Filling { bytes: bytes + step, low },
            // A sync may be what finds the disk full; nothing of value is in the file.
            Err(error) if is_full(&error) => {
                self.reserve = Reserve::Refused;
                // What is left of the disk is for a snapshot, after which segments can go.
                remove_if_there(&mut self.disk, RESERVE)?;
            }
            Err(error) => {
                if bytes == 0 && is_out_of_descriptors(&error) {
                    // It is created again.
                    remove_if_there(&mut self.disk, RESERVE)?;
                }
                return Err(error);
            }
        }
        Ok(())
    }

    fn extend_reserve(&mut self, bytes: u64, step: u64) -> io::Result<()> {
        if bytes == 0 {
            self.disk.create(RESERVE, step)?;
        } else {
            let zeros = vec![0; usize::try_from(step).map_err(io::Error::other)?];
            self.disk.write(RESERVE, bytes, &zeros)?;
        }
        self.disk.sync(RESERVE)
    }

    /// After something was removed the reserve may find room again.
    fn expect_room(&mut self) {
        if self.reserve == Reserve::Refused {
            self.reserve = Reserve::Filling { bytes: 0, low: true };
        }
    }

    // Snapshots

    /// All entries so far are void. Durable when this returns.
    fn reset(&mut self, metadata: &SnapshotMetadata) -> io::Result<()> {
        self.make_room(format::RESET_BYTES)?;
        let position = Position { index: metadata.index, term: metadata.term };
        format::put_reset(&mut self.pending, &mut self.tip.chain, position);
        self.tip.last = position;
        self.flush()?;
        for segment in &mut self.closed {
            segment.last_index = 0;
        }
        Ok(())
    }

    /// Takes note of a stored snapshot. All but the newest are obsolete.
    fn adopt_snapshot(&mut self, index: u64) -> io::Result<()> {
        let newest = index.max(self.snapshot.map_or(0, |snapshot| snapshot.index));
        let bytes = self.disk.len(&snapshot::file_name(newest))?;
        let names = self.disk.list()?;
        // Behind all that needs a descriptor, as the call may be repeated.
        self.snapshot = Some(KnownSnapshot { index: newest, bytes });
        for name in names {
            if snapshot::index_of(&name).is_some_and(|index| index < newest)
                && !self.obsolete.contains(&name)
                && !self.under_removal.contains(&name)
            {
                self.obsolete.push_back(name);
            }
        }
        Ok(())
    }
}

fn segment_name(number: u64) -> String {
    format!("{SEGMENT_PREFIX}{number:016x}")
}

const SEGMENT_PREFIX: &str = "log-";

/// The number of the segment in a file of this name.
fn segment_of(name: &str) -> Option<u64> {
    let number = u64::from_str_radix(name.strip_prefix(SEGMENT_PREFIX)?, 16).ok()?;
    (segment_name(number) == name).then_some(number)
}

fn set_note(notes: &mut BTreeMap<Vec<u8>, Vec<u8>>, key: &[u8], value: &[u8]) {
    if value.is_empty() {
        notes.remove(key);
    } else {
        notes.insert(key.to_vec(), value.to_vec());
    }
}

/// Removes what a crash may have left: an unfinished reserve and snapshots that are unfinished or older than `newest`.
fn remove_litter<D: Disk>(disk: &mut D, newest: Option<u64>) -> io::Result<()> {
    for name in disk.list()? {
        let older = snapshot::index_of(&name).is_some_and(|index| Some(index) < newest);
        if name == RESERVE || snapshot::is_aside(&name) || older {
            disk.remove(&name)?;
        }
    }
    Ok(())
}

fn remove_if_there<D: Disk>(disk: &mut D, name: &str) -> io::Result<()> {
    match disk.remove(name) {
        Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// An error in the middle of something: even if no file could be opened, it can not be repeated.
fn begun(error: io::Error) -> io::Error {
    if is_out_of_descriptors(&error) { io::Error::other(error.to_string()) } else { error }
}

fn is_full(error: &io::Error) -> bool {
    error.kind() == ErrorKind::StorageFull
}

fn invalid(message: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, message)
}
