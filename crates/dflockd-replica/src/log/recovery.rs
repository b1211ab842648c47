//! What is found on disk at a start, and whether it can be trusted. Only reads.

use std::collections::VecDeque;

use dflockd_core::bugs::{Bug, bug};
use raft::eraftpb::Entry;

use super::format::{
    self, BadHeader, Header, Part, Position, ReadHeader, Record, SECTOR_BYTES, Sector, length,
};
use super::snapshot::{self, StoredSnapshot, read_snapshot};
use super::{
    CUT, Closed, OpenError, SEGMENT_BYTES_MAX, damaged, segment_name, segment_of, set_note,
};
use crate::disk::Disk;

/// A log that is whole, but for an interrupted write at its end.
pub(super) struct Found {
    pub(super) snapshot: Option<StoredSnapshot>,
    /// The snapshot came from elsewhere and the entries do not lead to it.
    pub(super) void: bool,
    pub(super) entries: Vec<Entry>,
    pub(super) tip: Header,
    /// The segments before the last.
    pub(super) closed: VecDeque<Closed>,
    /// The one before the last has no closing sector.
    pub(super) unclosed: Option<Unclosed>,
    pub(super) salt: u32,
    /// The size of the last segment.
    pub(super) segment_bytes: u64,
    /// Where the next block goes in it.
    pub(super) end: usize,
    /// The sectors of the last block in it, empty if there is none.
    pub(super) last_block: Vec<u8>,
    /// What an interrupted write left behind `end`, empty if there was none.
    pub(super) torn: Vec<u8>,
    pub(super) cut_marked: bool,
}

/// What a segment lacks, and where.
pub(super) struct Unclosed {
    pub(super) end: usize,
    pub(super) sector: Vec<u8>,
}

/// `None`: there is no log yet. No segment was ever shorter than `segment_bytes`.
pub(super) fn read<D: Disk>(disk: &D, segment_bytes: u64) -> Result<Option<Found>, OpenError> {
    let names = disk.list()?;
    let newest = names.iter().filter_map(|name| snapshot::index_of(name)).max();
    let snapshot = newest.map(|index| read_snapshot(disk, index)).transpose()?;
    let mut numbers: Vec<u64> = names.iter().filter_map(|name| segment_of(name)).collect();
    numbers.sort_unstable();
    let Some((&first, later)) = numbers.split_first() else {
        if snapshot.is_some() {
            let what = "there is no log, although there is a snapshot";
            return Err(damaged(&segment_name(1), 0, what));
        }
        return Ok(None);
    };

    let segment = read_segment(disk, first, segment_bytes)?;
    let mut replay = Replay::new(segment.header.clone());
    let mut scanned = replay.scan(&segment)?;
    let mut last = segment;
    let mut closed = VecDeque::new();
    let mut unclosed = None;
    for &number in later {
        if number != last.header.segment + 1 {
            return Err(damaged(&segment_name(last.header.segment + 1), 0, "the file is missing"));
        }
        let segment = read_segment(disk, number, segment_bytes)?;
        check_continued(&replay.tip, &last, &scanned, &segment)?;
        closed.push_back(Closed {
            number: last.header.segment,
            bytes: last.bytes.len() as u64,
            last_index: replay.tip.last.index,
        });
        unclosed = matches!(scanned.tail, Tail::Clean).then(|| Unclosed {
            end: scanned.end,
            sector: format::closing_sector(last.salt, replay.tip.block),
        });
        replay.tip.segment = number;
        replay.was_reset = false;
        scanned = replay.scan(&segment)?;
        if replay.was_reset {
            closed.iter_mut().for_each(|segment: &mut Closed| segment.last_index = 0);
        }
        last = segment;
    }

    let torn_end = match scanned.tail {
        Tail::Clean => scanned.end,
        Tail::Torn { end } => end,
        Tail::Closed => {
            let next = segment_name(last.header.segment + 1);
            return Err(damaged(&next, 0, "the file is missing, although it was begun"));
        }
        Tail::Bad(damage) => return Err(damage.of(&last)),
    };
    let void = match &snapshot {
        Some(snapshot) => replay.check_snapshot(snapshot)?,
        None => replay.check_reaches_back(0)?,
    };
    let mut last_block = last.bytes[scanned.last_block..scanned.end].to_vec();
    format::complete_sectors(&mut last_block);
    Ok(Some(Found {
        snapshot,
        void,
        entries: replay.entries,
        tip: replay.tip,
        closed,
        unclosed,
        salt: last.salt,
        segment_bytes: last.bytes.len() as u64,
        end: scanned.end,
        last_block,
        torn: last.bytes[scanned.end..torn_end].to_vec(),
        cut_marked: names.iter().any(|name| name == CUT),
    }))
}

/// A segment whose header is good.
pub(super) struct Segment {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
    pub(super) header: Header,
    header_bytes: usize,
    salt: u32,
}

pub(super) fn read_segment<D: Disk>(
    disk: &D,
    number: u64,
    segment_bytes: u64,
) -> Result<Segment, OpenError> {
    let name = segment_name(number);
    let bytes = disk.len(&name)?;
    let len = usize::try_from(bytes)
        .ok()
        .filter(|_| bytes <= SEGMENT_BYTES_MAX)
        .ok_or_else(|| damaged(&name, 0, format!("{bytes} bytes are too many for a segment")))?;
    if bytes < segment_bytes {
        // It had its size before it got its name: no interrupted write looks like that.
        let what = format!("the file ends here, although it had {segment_bytes} bytes");
        return Err(damaged(&name, len, what));
    }
    let mut bytes = vec![0; len];
    disk.read(&name, 0, &mut bytes)?;
    // A segment grows for a block that is too large for it. What that lacks at its end was never written, like zeros.
    bytes.resize(len.next_multiple_of(SECTOR_BYTES), 0);
    let ReadHeader { header, bytes: header_bytes, salt } =
        Header::decode(&bytes).map_err(|error| match error {
            BadHeader::Damaged(what) => damaged(&name, 0, what),
            BadHeader::Version(version) => {
                OpenError::UnknownVersion { file: name.clone(), version }
            }
        })?;
    if header.segment != number {
        return Err(damaged(&name, 16, format!("it is segment {}", header.segment)));
    }
    Ok(Segment { name, bytes, header, header_bytes, salt })
}

/// Whether `next` goes on exactly where `before` ends. What may stand behind that end does not matter any more.
fn check_continued(
    tip: &Header,
    before: &Segment,
    scanned: &Scanned,
    next: &Segment,
) -> Result<(), OpenError> {
    if next.header.block != tip.block {
        if let Tail::Bad(damage) = &scanned.tail {
            return Err(damage.of(before));
        }
        let what = format!(
            "block {} should be here, because segment {} begins with block {}",
            tip.block, next.header.segment, next.header.block
        );
        return Err(damaged(&before.name, scanned.end, what));
    }
    if next.header != (Header { segment: next.header.segment, ..tip.clone() }) {
        return Err(damaged(&next.name, 0, "its header contradicts the segment before"));
    }
    Ok(())
}

/// Something is wrong with a segment.
pub(super) struct Damage {
    pub(super) offset: usize,
    pub(super) what: String,
}

impl Damage {
    fn of(&self, segment: &Segment) -> OpenError {
        damaged(&segment.name, self.offset, self.what.clone())
    }
}

/// What stands behind the last good block of a segment.
pub(super) enum Tail {
    Clean,
    /// An interrupted write.
    Torn {
        end: usize,
    },
    /// There is, or was, a further segment.
    Closed,
    Bad(Damage),
}

pub(super) struct Scanned {
    /// Where the last good block begins.
    last_block: usize,
    /// Where the good blocks end.
    pub(super) end: usize,
    pub(super) tail: Tail,
}

/// The log as far as it is read.
pub(super) struct Replay {
    tip: Header,
    /// The entry before the first of `entries`. Its term is 0 if it is not known.
    base: Position,
    pub(super) entries: Vec<Entry>,
    was_reset: bool,
    /// The records of a block; kept for its memory.
    records: Vec<u8>,
}

impl Replay {
    pub(super) fn new(header: Header) -> Self {
        let base = header.last;
        let (entries, records) = (Vec::new(), Vec::new());
        Self { tip: header, base, entries, was_reset: false, records }
    }

    /// Reads the good blocks of a segment and looks at what is behind them.
    pub(super) fn scan(&mut self, segment: &Segment) -> Result<Scanned, OpenError> {
        let mut end = segment.header_bytes;
        let mut last_block = end;
        while let Some(block_bytes) = self.collect(segment, end) {
            let mut records = std::mem::take(&mut self.records);
            self.apply_all(&records).map_err(|what| Damage { offset: end, what }.of(segment))?;
            records.clear();
            self.records = records;
            self.tip.block += 1;
            last_block = end;
            end += block_bytes;
        }
        Ok(Scanned { last_block, end, tail: judge_tail(segment, end, self.tip.block) })
    }

    /// Takes the records of the next block, if all of it is there, and says how long it is.
    fn collect(&mut self, segment: &Segment, start: usize) -> Option<usize> {
        self.records.clear();
        let mut sectors = sectors(segment, start);
        let (_, Sector::Whole(head)) = sectors.next()? else { return None };
        if (head.block, head.index) != (self.tip.block, 0) || head.count == 0 {
            return None;
        }
        self.records.extend_from_slice(head.payload);
        for index in 1..head.count {
            let (_, Sector::Whole(part)) = sectors.next()? else { return None };
            if (part.block, part.index, part.count) != (head.block, index, head.count) {
                return None;
            }
            self.records.extend_from_slice(part.payload);
        }
        Some(usize::try_from(head.count).ok()? * SECTOR_BYTES)
    }

    fn apply_all(&mut self, mut records: &[u8]) -> Result<(), String> {
        let block = self.tip.block;
        while let Some(record) = format::read_record(&mut records, &mut self.tip.chain)
            .map_err(|what| format!("block {block} is there, but {what}"))?
        {
            self.apply(record)?;
        }
        Ok(())
    }

    fn apply(&mut self, record: Record<'_>) -> Result<(), String> {
        match record {
            Record::Entry(entry) => {
                let last = self.tip.last.index;
                if entry.index == 0 || entry.index > last.saturating_add(1) {
                    return Err(format!("entry {} does not follow entry {last}", entry.index));
                }
                if entry.index <= self.base.index {
                    // It replaced entries of a segment that has been removed since.
                    self.base = Position { index: entry.index - 1, term: 0 };
                    self.entries.clear();
                }
                let kept = entry.index - self.base.index - 1;
                if !bug(Bug::StaleTail) {
                    self.entries.truncate(usize::try_from(kept).unwrap_or(usize::MAX));
                }
                self.tip.last = Position { index: entry.index, term: entry.term };
                self.entries.push(entry);
            }
            Record::HardState(state) => self.tip.hard_state = state,
            Record::Note { key, value } => set_note(&mut self.tip.notes, key, value),
            Record::Reset(position) => {
                self.base = position;
                self.tip.last = position;
                self.entries.clear();
                self.was_reset = true;
            }
        }
        Ok(())
    }

    /// Whether the snapshot makes all entries void, because they do not lead to it.
    fn check_snapshot(&self, snapshot: &StoredSnapshot) -> Result<bool, OpenError> {
        let (index, term) = (snapshot.metadata.index, snapshot.metadata.term);
        self.check_reaches_back(index)?;
        if index > self.tip.last.index {
            return Ok(true);
        }
        if index == self.base.index {
            if self.base.term != 0 && self.base.term != term {
                let what = format!("its term is {term}, in the log it is {}", self.base.term);
                return Err(damaged(&snapshot::file_name(index), 24, what));
            }
            return Ok(false);
        }
        let at = usize::try_from(index - self.base.index - 1).unwrap_or(usize::MAX);
        Ok(self.entries.get(at).is_none_or(|entry| entry.term != term))
    }

    /// Whether the log goes on behind a snapshot at `covered`. Gives `false`: then it is not void either.
    fn check_reaches_back(&self, covered: u64) -> Result<bool, OpenError> {
        let base = self.base.index;
        if covered < base {
            let what = format!(
                "the log begins behind entry {base}, so there must be a snapshot at {base} or \
                 later, but the newest one is at {covered}"
            );
            return Err(damaged(&snapshot::file_name(base), 0, what));
        }
        Ok(false)
    }
}

/// The sectors of a segment from `start` on, each with its place.
fn sectors(segment: &Segment, start: usize) -> impl Iterator<Item = (usize, Sector<'_>)> {
    let places = (start..).step_by(SECTOR_BYTES);
    let sectors = segment.bytes[start..].chunks_exact(SECTOR_BYTES);
    places.zip(sectors.map(|bytes| format::read_sector(segment.salt, bytes)))
}

/// Judges what is at `start`, where `block` would be the next one and is not whole.
fn judge_tail(segment: &Segment, start: usize, block: u64) -> Tail {
    let mut end = start;
    let mut sectors_of_block = None;
    for (offset, sector) in sectors(segment, start) {
        match sector {
            Sector::Zero => continue,
            Sector::Short => (),
            Sector::Whole(Part { block: number, count: 0, .. })
                if number == block && offset == start =>
            {
                return Tail::Closed;
            }
            Sector::Whole(part) => {
                let in_place = part.block == block
                    && part.index < part.count
                    && length((offset - start) / SECTOR_BYTES) == part.index
                    && sectors_of_block.is_none_or(|count| count == part.count);
                if !in_place {
                    return Tail::Bad(misplaced(start, offset, block, &part));
                }
                sectors_of_block = Some(part.count);
            }
            Sector::Broken => {
                let what = "a sector was written to its end, but its checksum fails".to_owned();
                return Tail::Bad(Damage { offset, what });
            }
        }
        end = offset + SECTOR_BYTES;
    }
    if end == start { Tail::Clean } else { Tail::Torn { end } }
}

fn misplaced(start: usize, offset: usize, block: u64, part: &Part<'_>) -> Damage {
    if part.block > block {
        let what = format!(
            "block {block} is not whole, although block {} was begun behind it at byte {offset}",
            part.block
        );
        return Damage { offset: start, what };
    }
    let what = format!("a sector of block {} stands where block {block} belongs", part.block);
    Damage { offset, what }
}
