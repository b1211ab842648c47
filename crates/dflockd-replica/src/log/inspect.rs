//! What is in a data directory, for people. Changes nothing, and goes on behind damage where that makes sense.

use std::collections::BTreeMap;

use raft::eraftpb::{Entry, HardState, SnapshotMetadata};

use super::recovery::{self, Replay, Tail, read_segment};
use super::{LogOptions, OpenError, read_snapshot, segment_of, snapshot};
use crate::disk::Disk;

/// What was found.
pub struct Inspection {
    /// The segments, the oldest first.
    pub segments: Vec<SegmentReport>,
    /// The snapshots, the oldest first.
    pub snapshots: Vec<SnapshotReport>,
    /// The log as a whole, as a node would find it; none if there is none.
    pub log: Result<Option<LogReport>, OpenError>,
}

/// One segment.
pub struct SegmentReport {
    /// The name of the file.
    pub file: String,
    /// The length of the file.
    pub bytes: u64,
    /// How many bytes of the file are used.
    pub used_bytes: u64,
    /// The first and the last entry that was written to the segment, in the order of writing.
    pub entries: Option<(u64, u64)>,
    /// How the segment ends: `open`, `closed` or `interrupted write`.
    pub end: &'static str,
    /// Where the segment is damaged, and how.
    pub damage: Option<(u64, String)>,
}

/// One snapshot.
pub struct SnapshotReport {
    /// The name of the file.
    pub file: String,
    /// The length of the file.
    pub bytes: u64,
    /// Index, term and members of the snapshot, if the file is whole.
    pub metadata: Result<SnapshotMetadata, String>,
}

/// The log as a node would find it.
pub struct LogReport {
    /// Term, vote and commit.
    pub hard_state: HardState,
    /// The metadata of the node.
    pub notes: BTreeMap<Vec<u8>, Vec<u8>>,
    /// The state of the newest snapshot.
    pub snapshot: Option<super::StoredSnapshot>,
    /// The entries that count.
    pub entries: Vec<Entry>,
    /// Index and term of the last entry.
    pub last: (u64, u64),
    /// An interrupted write at the end will be cut, or was at the last start.
    pub cut: bool,
}

/// Looks at everything.
///
/// # Errors
///
/// If the directory can not be read.
pub fn inspect<D: Disk>(disk: &D) -> std::io::Result<Inspection> {
    let mut names = disk.list()?;
    names.sort();
    let mut segments = Vec::new();
    for (name, number) in names.iter().filter_map(|name| Some((name, segment_of(name)?))) {
        segments.push(segment(disk, name, number)?);
    }
    let mut snapshots = Vec::new();
    for (name, index) in names.iter().filter_map(|name| Some((name, snapshot::index_of(name)?))) {
        let read = read_snapshot(disk, index);
        let metadata = read.map(|read| read.metadata).map_err(|error| brief(&error).1);
        snapshots.push(SnapshotReport { file: name.clone(), bytes: disk.len(name)?, metadata });
    }
    let log = recovery::read(disk, LogOptions::default().segment_bytes()).map(|found| {
        found.map(|found| LogReport {
            cut: found.cut_marked || !found.torn.is_empty(),
            last: (found.tip.last.index, found.tip.last.term),
            hard_state: found.tip.hard_state,
            notes: found.tip.notes,
            entries: if found.void { Vec::new() } else { found.entries },
            snapshot: found.snapshot,
        })
    });
    Ok(Inspection { segments, snapshots, log })
}

fn segment<D: Disk>(disk: &D, name: &str, number: u64) -> std::io::Result<SegmentReport> {
    let bytes = disk.len(name)?;
    let mut report = SegmentReport {
        file: name.to_owned(),
        bytes,
        used_bytes: 0,
        entries: None,
        end: "open",
        damage: None,
    };
    let read = match read_segment(disk, number, LogOptions::default().segment_bytes()) {
        Ok(read) => read,
        Err(error) => {
            report.damage = Some(brief(&error));
            return Ok(report);
        }
    };
    let mut replay = Replay::new(read.header.clone());
    match replay.scan(&read) {
        Err(error) => report.damage = Some(brief(&error)),
        Ok(scanned) => {
            report.used_bytes = scanned.end as u64;
            match scanned.tail {
                Tail::Clean => {}
                Tail::Torn { .. } => report.end = "interrupted write",
                Tail::Closed => report.end = "closed",
                Tail::Bad(damage) => report.damage = Some((damage.offset as u64, damage.what)),
            }
        }
    }
    let ends = (replay.entries.first(), replay.entries.last());
    if let (Some(first), Some(last)) = ends {
        report.entries = Some((first.index, last.index));
    }
    Ok(report)
}

/// Where and what, without the advice for a node.
fn brief(error: &OpenError) -> (u64, String) {
    match error {
        OpenError::Damaged { offset, what, .. } => (*offset, what.clone()),
        OpenError::UnknownVersion { .. } | OpenError::Io(_) => (0, error.to_string()),
    }
}
