//! The log against crashes, flipped bytes and full disks, on a disk in memory that loses what was not synced.

use std::cell::{Ref, RefCell};
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::path::PathBuf;
use std::rc::Rc;

use bytes::Bytes;
use raft::eraftpb::{ConfState, Entry, EntryType, HardState, SnapshotMetadata};
use rustix::io::Errno;

use super::format::{self, SECTOR_BYTES, Sector};
use super::*;
use crate::disk::RealDisk;

// A disk that crashes

/// A directory in memory. Clones are handles on the same one.
#[derive(Clone, Debug, Default)]
struct CrashDisk(Rc<RefCell<CrashDir>>);

#[derive(Clone, Debug, Default)]
struct CrashDir {
    /// Name to place in `files`.
    names: BTreeMap<String, usize>,
    /// What `names` was when it was synced, and the changes since.
    synced_names: BTreeMap<String, usize>,
    unsynced_names: Vec<NameChange>,
    files: Vec<CrashFile>,
    /// How many changes and syncs there were.
    operations: u64,
    /// The operation that does not return.
    crash_at: Option<u64>,
    /// Creating and growing files is refused.
    full: bool,
    /// No file can be opened: those that are in use still can be, a new one and the directory can not.
    starved: bool,
    /// This file is not open, and can not be opened.
    shut: Option<String>,
    sync_fails: bool,
    random: Random,
}

/// Knows the file by its place, as a file system does: the name may be that of another one after a crash.
#[derive(Clone, Debug)]
enum NameChange {
    Create(String, usize),
    Rename(String, String, usize),
    Remove(String, usize),
}

impl NameChange {
    fn apply(&self, names: &mut BTreeMap<String, usize>) {
        match self {
            Self::Create(name, at) => {
                names.insert(name.clone(), *at);
            }
            Self::Rename(from, to, at) => {
                names.retain(|name, known| name != from || known != at);
                names.insert(to.clone(), *at);
            }
            Self::Remove(name, at) => {
                names.retain(|known_name, known| known_name != name || known != at)
            }
        }
    }
}

#[derive(Clone, Debug, Default)]
struct CrashFile {
    content: Vec<u8>,
    synced: Vec<u8>,
    /// What was written to each sector since.
    unsynced: BTreeMap<usize, Vec<Vec<u8>>>,
}

impl CrashFile {
    fn write(&mut self, offset: usize, bytes: &[u8]) {
        let end = offset + bytes.len();
        self.content.resize(self.content.len().max(end), 0);
        self.content[offset..end].copy_from_slice(bytes);
        for sector in offset / SECTOR_BYTES..end.div_ceil(SECTOR_BYTES) {
            let start = sector * SECTOR_BYTES;
            let stop = self.content.len().min(start + SECTOR_BYTES);
            let mut version = self.content[start..stop].to_vec();
            version.resize(SECTOR_BYTES, 0);
            self.unsynced.entry(sector).or_default().push(version);
        }
    }

    fn sync(&mut self) {
        self.synced.clone_from(&self.content);
        self.unsynced.clear();
    }

    /// Each sector that was not synced is as before, as written, or torn in between.
    fn lose_power(&mut self, random: &mut Random) {
        let grown = self.content.len() - self.synced.len();
        let len = self.synced.len()
            + match random.below(3) {
                0 => 0,
                1 => grown,
                _ => random.below(grown + 1),
            };
        self.synced.resize(len.next_multiple_of(SECTOR_BYTES), 0);
        for (sector, versions) in std::mem::take(&mut self.unsynced) {
            let start = sector * SECTOR_BYTES;
            let Some(old) = self.synced.get_mut(start..start + SECTOR_BYTES) else { continue };
            let newest = random.below(versions.len() + 1);
            for (version, bytes) in versions.iter().take(newest).enumerate() {
                let torn = version + 1 == newest && random.chance(1, 4);
                let kept = if torn { random.below(SECTOR_BYTES) } else { SECTOR_BYTES };
                old[..kept].copy_from_slice(&bytes[..kept]);
            }
        }
        self.synced.truncate(len);
        self.content.clone_from(&self.synced);
    }
}

impl CrashDisk {
    fn new(seed: u64) -> Self {
        let dir = CrashDir { random: Random(seed), ..CrashDir::default() };
        Self(Rc::new(RefCell::new(dir)))
    }

    /// Another directory with the same content.
    fn copy(&self) -> Self {
        Self(Rc::new(RefCell::new(self.0.borrow().clone())))
    }

    /// Another directory in which one file differs.
    fn copy_with(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        let copy = self.copy();
        copy.damage(name, change);
        copy
    }

    /// Another directory in which files are missing.
    fn copy_without(&self, names: impl IntoIterator<Item = String>) -> Self {
        let copy = self.copy();
        names.into_iter().for_each(|name| copy.delete(&name));
        copy
    }

    fn set(&self, change: impl FnOnce(&mut CrashDir)) {
        change(&mut self.0.borrow_mut());
    }

    /// What was not synced may be lost.
    fn lose_power(&self) {
        let dir = &mut *self.0.borrow_mut();
        // Each change by itself.
        for change in std::mem::take(&mut dir.unsynced_names) {
            if dir.random.chance(1, 2) {
                change.apply(&mut dir.synced_names);
            }
        }
        dir.names.clone_from(&dir.synced_names);
        for file in &mut dir.files {
            file.lose_power(&mut dir.random);
        }
        dir.crash_at = None;
    }

    fn content(&self, name: &str) -> Vec<u8> {
        self.file(name).unwrap().content.clone()
    }

    /// Changes a file behind the log's back, for good.
    fn damage(&self, name: &str, change: impl FnOnce(&mut Vec<u8>)) {
        let dir = &mut *self.0.borrow_mut();
        let file = &mut dir.files[dir.names[name]];
        change(&mut file.content);
        file.sync();
    }

    fn put(&self, name: &str, content: &[u8]) {
        let dir = &mut *self.0.borrow_mut();
        dir.names.insert(name.to_owned(), dir.files.len());
        dir.sync_names();
        let (content, synced) = (content.to_vec(), content.to_vec());
        dir.files.push(CrashFile { content, synced, unsynced: BTreeMap::new() });
    }

    fn delete(&self, name: &str) {
        let dir = &mut *self.0.borrow_mut();
        dir.names.remove(name).unwrap();
        dir.sync_names();
    }

    fn names(&self) -> Vec<String> {
        self.0.borrow().names.keys().cloned().collect()
    }

    fn file(&self, name: &str) -> io::Result<Ref<'_, CrashFile>> {
        let at = self.place(name)?;
        Ok(Ref::map(self.0.borrow(), |dir| &dir.files[at]))
    }

    fn place(&self, name: &str) -> io::Result<usize> {
        Ok(*self.0.borrow().names.get(name).ok_or(ErrorKind::NotFound)?)
    }

    /// Counts an operation. `Some`: it is the one that does not return, but may yet do something.
    fn begin(&self) -> io::Result<bool> {
        let dir = &mut *self.0.borrow_mut();
        dir.operations += 1;
        match dir.crash_at {
            Some(at) if dir.operations > at => Err(io::Error::other("crashed")),
            Some(at) => Ok(dir.operations == at),
            None => Ok(false),
        }
    }

    fn change_names(&self, change: NameChange) -> io::Result<()> {
        let crashes = self.begin()?;
        let dir = &mut *self.0.borrow_mut();
        change.apply(&mut dir.names);
        dir.unsynced_names.push(change);
        if crashes { Err(io::Error::other("crashed")) } else { Ok(()) }
    }

    fn check_descriptors(&self) -> io::Result<()> {
        match self.0.borrow().starved {
            true => Err(io::Error::from_raw_os_error(Errno::MFILE.raw_os_error())),
            false => Ok(()),
        }
    }

    fn check_open(&self, name: &str) -> io::Result<()> {
        match self.0.borrow().shut.as_deref() == Some(name) {
            true => Err(io::Error::from_raw_os_error(Errno::MFILE.raw_os_error())),
            false => Ok(()),
        }
    }
}

impl CrashDir {
    fn sync_names(&mut self) {
        self.synced_names.clone_from(&self.names);
        self.unsynced_names.clear();
    }
}

impl Disk for CrashDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        self.check_descriptors()?;
        Ok(self.names())
    }

    fn len(&self, name: &str) -> io::Result<u64> {
        self.check_open(name)?;
        Ok(self.file(name)?.content.len() as u64)
    }

    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let file = self.file(name)?;
        let offset = usize::try_from(offset).unwrap();
        let bytes = file.content.get(offset..offset + buffer.len());
        buffer.copy_from_slice(bytes.ok_or(ErrorKind::UnexpectedEof)?);
        Ok(())
    }

    fn create(&mut self, name: &str, len: u64) -> io::Result<()> {
        self.check_descriptors()?;
        let at = {
            let dir = &mut *self.0.borrow_mut();
            if dir.names.contains_key(name) {
                return Err(ErrorKind::AlreadyExists.into());
            }
            if dir.full {
                return Err(ErrorKind::StorageFull.into());
            }
            let mut file = CrashFile::default();
            file.write(0, &vec![0; usize::try_from(len).unwrap()]);
            dir.files.push(file);
            dir.files.len() - 1
        };
        self.change_names(NameChange::Create(name.to_owned(), at))
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.check_open(name)?;
        let crashes = self.begin()?;
        let dir = &mut *self.0.borrow_mut();
        let at = *dir.names.get(name).ok_or(ErrorKind::NotFound)?;
        let offset = usize::try_from(offset).unwrap();
        if dir.full && offset + bytes.len() > dir.files[at].content.len() {
            return Err(ErrorKind::StorageFull.into());
        }
        if crashes {
            let done = dir.random.below(bytes.len() + 1);
            dir.files[at].write(offset, &bytes[..done]);
            return Err(io::Error::other("crashed"));
        }
        dir.files[at].write(offset, bytes);
        Ok(())
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.check_open(name)?;
        let crashes = self.begin()?;
        let dir = &mut *self.0.borrow_mut();
        let at = *dir.names.get(name).ok_or(ErrorKind::NotFound)?;
        if crashes || dir.sync_fails {
            return Err(io::Error::other("not synced"));
        }
        dir.files[at].sync();
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let at = self.place(from)?;
        self.change_names(NameChange::Rename(from.to_owned(), to.to_owned(), at))
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let at = self.place(name)?;
        self.change_names(NameChange::Remove(name.to_owned(), at))
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        let crashes = self.begin()?;
        let dir = &mut *self.0.borrow_mut();
        if crashes || dir.sync_fails {
            return Err(io::Error::other("not synced"));
        }
        dir.sync_names();
        Ok(())
    }
}

/// SplitMix64.
#[derive(Clone, Debug, Default)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    /// From `first` to `last`.
    fn within(&mut self, first: u64, last: u64) -> u64 {
        first + self.next() % (last - first + 1)
    }

    fn chance(&mut self, part: u64, of: u64) -> bool {
        self.next() % of < part
    }
}

// Short ways to write down what is stored

fn entry(index: u64, term: u64, data: &[u8]) -> Entry {
    Entry { index, term, data: Bytes::copy_from_slice(data), ..Entry::default() }
}

fn of_type(kind: EntryType, context: &'static [u8], entry: Entry) -> Entry {
    let mut entry = Entry { context: Bytes::from_static(context), ..entry };
    entry.set_entry_type(kind);
    entry
}

fn batch_of(entries: Vec<Entry>) -> LogBatch {
    LogBatch { entries, ..LogBatch::default() }
}

fn entries(indexes: std::ops::RangeInclusive<u64>, term: u64, bytes: usize) -> LogBatch {
    let entry = |index: u64| entry(index, term, &vec![u8::try_from(index % 256).unwrap(); bytes]);
    batch_of(indexes.map(entry).collect())
}

fn note(key: &str, value: &str) -> LogBatch {
    LogBatch { notes: vec![(key.into(), value.into())], ..LogBatch::default() }
}

fn metadata(index: u64, term: u64) -> SnapshotMetadata {
    let mut metadata = SnapshotMetadata { index, term, ..SnapshotMetadata::default() };
    metadata.set_conf_state(ConfState { voters: vec![1, 2, 3], ..ConfState::default() });
    metadata
}

fn small() -> LogOptions {
    LogOptions { segment_bytes: 2048 }
}

fn open(disk: &CrashDisk) -> (LogStore<CrashDisk>, Recovered) {
    LogStore::open(disk.clone(), small()).unwrap()
}

/// A disk and the log that was begun on it.
fn begun() -> (CrashDisk, LogStore<CrashDisk>) {
    let disk = CrashDisk::new(1);
    let (log, _) = open(&disk);
    (disk, log)
}

/// Opens a copy. So the same disk can be opened many times.
fn recover(disk: &CrashDisk) -> Result<Recovered, OpenError> {
    LogStore::open(disk.copy(), small()).map(|(_, recovered)| recovered)
}

fn write_synced(log: &mut LogStore<impl Disk>, batch: &LogBatch) {
    log.write(batch).unwrap();
    log.sync().unwrap();
}

/// Each entry by itself.
fn write_each(
    log: &mut LogStore<impl Disk>,
    indexes: std::ops::RangeInclusive<u64>,
    term: u64,
    bytes: usize,
) {
    indexes.for_each(|index| write_synced(log, &entries(index..=index, term, bytes)));
}

fn indexes(recovered: &Recovered) -> Vec<u64> {
    recovered.entries.iter().map(|entry| entry.index).collect()
}

/// The entries that a start finds.
fn found(disk: &CrashDisk) -> Vec<u64> {
    indexes(&recover(disk).unwrap())
}

/// Everything that must not differ.
type Content = (HardState, BTreeMap<Vec<u8>, Vec<u8>>, Option<StoredSnapshot>, Vec<Entry>);

fn content(recovered: &Recovered) -> Content {
    let Recovered { hard_state, notes, snapshot, entries, cut: _ } = recovered;
    (hard_state.clone(), notes.clone(), snapshot.clone(), entries.clone())
}

#[track_caller]
fn check_damaged(result: Result<Recovered, OpenError>, file: &str, at: u64, what: &str) {
    let error = result.unwrap_err();
    let text = error.to_string();
    let OpenError::Damaged { file: found, offset, what: found_what, remedy } = error else {
        panic!("{text}");
    };
    assert_eq!((&found[..], offset), (file, at), "{text}");
    assert!(found_what.contains(what), "{text}");
    assert!(text.contains(file) && text.contains(&format!("byte {at}")), "{text}");
    assert!(text.contains(remedy) && remedy.contains("under a new id"), "{text}");
}

fn first_segment() -> String {
    segment_name(1)
}

// Crashes

/// What the log has been told, in the order of its telling.
#[derive(Clone, Debug, Default)]
struct Model {
    hard_state: HardState,
    notes: BTreeMap<Vec<u8>, Vec<u8>>,
    entries: BTreeMap<u64, Entry>,
    /// The entry before the first.
    base: (u64, u64),
}

impl Model {
    fn last(&self) -> (u64, u64) {
        self.entries.last_key_value().map_or(self.base, |(&index, entry)| (index, entry.term))
    }

    fn write(&mut self, batch: &LogBatch) {
        if let Some(first) = batch.entries.first() {
            self.entries.retain(|&index, _| index < first.index);
        }
        for entry in &batch.entries {
            self.entries.insert(entry.index, entry.clone());
        }
        for (key, value) in &batch.notes {
            set_note(&mut self.notes, key, value);
        }
        if let Some(hard_state) = &batch.hard_state {
            self.hard_state = hard_state.clone();
        }
    }

    fn reset(&mut self, (index, term): (u64, u64)) {
        self.entries.clear();
        self.base = (index, term);
    }
}

type Stored = (u64, u64, Vec<u8>);

/// A log, what it was told, and what it has confirmed.
struct Trial {
    disk: CrashDisk,
    log: LogStore<CrashDisk>,
    random: Random,
    /// The states a crash may leave: what was synced first, then after each write since.
    states: Vec<Model>,
    snapshot: Option<Stored>,
    /// Being stored, and whether it is installed.
    incoming: Option<(Stored, bool)>,
    truncate_before: u64,
    options: LogOptions,
}

impl Trial {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let disk = CrashDisk::new(random.next());
        let options = LogOptions { segment_bytes: 2048 << random.below(3) };
        let (log, recovered) = LogStore::open(disk.clone(), options.clone()).unwrap();
        assert!(recovered.entries.is_empty() && recovered.snapshot.is_none());
        Self {
            disk,
            log,
            random,
            states: vec![Model::default()],
            snapshot: None,
            incoming: None,
            truncate_before: 0,
            options,
        }
    }

    fn newest(&self) -> &Model {
        self.states.last().unwrap()
    }

    fn snapshot_index(&self) -> u64 {
        self.snapshot.as_ref().map_or(0, |snapshot| snapshot.0)
    }

    fn step(&mut self) -> io::Result<()> {
        match self.random.below(20) {
            0..=8 => self.write(),
            9..=14 => self.sync(),
            15 | 16 => self.store_snapshot(),
            17 => self.install_snapshot(),
            18 => {
                let index = self.random.within(0, self.newest().last().0 + 2);
                // In effect even if it does not return.
                self.truncate_before = self.truncate_before.max(index);
                self.log.truncate_before(index)
            }
            _ => self.log.retry_room().map(drop),
        }
    }

    fn write(&mut self) -> io::Result<()> {
        let random = &mut self.random;
        let model = self.states.last().unwrap();
        let mut batch = LogBatch::default();
        let (last, mut term) = model.last();
        term = term.max(model.hard_state.term) + u64::from(random.chance(1, 6));
        let mut commit = model.hard_state.commit;
        let mut end = last;
        if random.chance(4, 5) {
            let floor = commit.max(self.snapshot.as_ref().map_or(0, |snapshot| snapshot.0));
            let overlaps = floor < last && random.chance(1, 4);
            let first = if overlaps { random.within(floor + 1, last) } else { last + 1 };
            // Entries that replace others are of a later term.
            term += u64::from(overlaps);
            end = first + random.within(0, 3);
            for index in first..=end {
                batch.entries.push(random_entry(random, index, term));
            }
        }
        if random.chance(1, 2) {
            commit = random.within(commit, end.max(commit));
            batch.hard_state = Some(format::hard_state(term, random.within(0, 3), commit));
        }
        while random.chance(1, 4) {
            let key = vec![b'a' + u8::try_from(random.below(5)).unwrap()];
            batch.notes.push((key, vec![7; random.below(40)]));
        }
        let mut next = model.clone();
        next.write(&batch);
        self.log.write(&batch)?;
        self.states.push(next);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        self.log.sync()?;
        self.states.drain(..self.states.len() - 1);
        Ok(())
    }

    /// Of something committed and synced, as the replica does.
    fn store_snapshot(&mut self) -> io::Result<()> {
        self.sync()?;
        let model = self.newest();
        let commit = model.hard_state.commit;
        if commit <= self.snapshot_index() {
            return Ok(());
        }
        let index = self.random.within(self.snapshot_index() + 1, commit);
        let term = self.newest().entries[&index].term;
        let data = self.random_data(1500);
        self.incoming = Some(((index, term, data.clone()), false));
        let metadata = metadata(index, term);
        // Here, or by somebody else while the log goes on.
        if self.random.chance(1, 2) {
            self.log.store_snapshot(&metadata, &data)?;
        } else {
            write_snapshot(&mut self.disk.clone(), &metadata, &data)?;
            self.write()?;
            self.log.snapshot_stored(&metadata)?;
        }
        self.snapshot = self.incoming.take().map(|(snapshot, _)| snapshot);
        Ok(())
    }

    fn install_snapshot(&mut self) -> io::Result<()> {
        let model = self.newest();
        let (last, term) = model.last();
        let floor = model.hard_state.commit.max(self.snapshot_index());
        // Later than all that is there, so it contradicts an entry it meets.
        let term = term.max(model.hard_state.term) + 1;
        let index = self.random.within(floor + 1, last.max(floor) + 5);
        let data = self.random_data(1500);
        self.incoming = Some(((index, term, data.clone()), true));
        self.log.install_snapshot(&metadata(index, term), &data)?;
        let mut model = self.newest().clone();
        model.reset((index, term));
        self.states = vec![model];
        self.snapshot = self.incoming.take().map(|(snapshot, _)| snapshot);
        Ok(())
    }

    fn random_data(&mut self, bytes_max: usize) -> Vec<u8> {
        let bytes = self.random.below(bytes_max);
        (0..bytes).map(|_| self.random.next().to_le_bytes()[0]).collect()
    }

    /// Goes on after a crash. What was confirmed must be there, and nothing that was never told.
    fn restart(&mut self) {
        let recovered = loop {
            if self.random.chance(2, 3) {
                self.disk.lose_power();
            }
            let operations = self.disk.0.borrow().operations;
            let crash_at = self.random.chance(1, 3).then(|| operations + self.random.within(1, 20));
            self.disk.set(|dir| dir.crash_at = crash_at);
            match LogStore::open(self.disk.clone(), self.options.clone()) {
                Ok((log, recovered)) => {
                    self.log = log;
                    break recovered;
                }
                Err(error) => assert!(
                    crash_at.is_some() && matches!(error, OpenError::Io(_)),
                    "{error}, files {:?}",
                    self.disk.names()
                ),
            }
        };
        self.disk.set(|dir| dir.crash_at = None);

        let found = recovered.snapshot.as_ref().map(|snapshot| {
            (snapshot.metadata.index, snapshot.metadata.term, snapshot.data.to_vec())
        });
        let installed = match self.incoming.take() {
            Some((incoming, install)) if found.as_ref() == Some(&incoming) => install,
            _ => {
                assert_eq!(found, self.snapshot, "the snapshot is another one");
                false
            }
        };
        self.snapshot = found;
        let mut states = std::mem::take(&mut self.states);
        if let (true, Some((index, term, _))) = (installed, &self.snapshot) {
            states.iter_mut().for_each(|state| state.reset((*index, *term)));
        }
        let same = states.iter().find(|state| self.is_state(state, &recovered));
        let Some(same) = same else {
            panic!("found {recovered:#?}\ninstead of one of {states:#?}");
        };
        self.states = vec![same.clone()];
    }

    fn is_state(&self, model: &Model, recovered: &Recovered) -> bool {
        let mut hard_state = model.hard_state.clone();
        if let Some((index, term, _)) = &self.snapshot {
            hard_state.commit = hard_state.commit.max(*index);
            if hard_state.term < *term {
                hard_state = format::hard_state(*term, 0, hard_state.commit);
            }
        }
        // What is above the cut or the snapshot is needed, more may be there.
        let needed = self.truncate_before.min(self.snapshot_index() + 1).max(model.base.0 + 1);
        let first = recovered.entries.first().map_or(model.last().0 + 1, |entry| entry.index);
        first <= needed
            && model.entries.range(first..).map(|(_, entry)| entry).eq(&recovered.entries)
            && recovered.notes == model.notes
            && recovered.hard_state == hard_state
    }
}

fn random_entry(random: &mut Random, index: u64, term: u64) -> Entry {
    let bytes = match random.below(12) {
        0 => random.below(6000),
        1..=3 => random.below(1200),
        _ => random.below(200),
    };
    let zeros = random.chance(1, 4);
    let data = (0..bytes).map(|_| if zeros { 0 } else { random.next().to_le_bytes()[0] });
    let entry = Entry { index, term, data: data.collect(), ..Entry::default() };
    match random.chance(1, 8) {
        true => of_type(EntryType::EntryConfChangeV2, b"why", entry),
        false => entry,
    }
}

#[test]
fn crashes_lose_nothing_that_was_synced() {
    let mut crashes = 0;
    for seed in 0..600 {
        let run = std::panic::catch_unwind(|| {
            let mut trial = Trial::new(seed);
            for _ in 0..6 {
                let operations = trial.disk.0.borrow().operations;
                let crash_at = operations + trial.random.within(1, 80);
                trial.disk.set(|dir| dir.crash_at = Some(crash_at));
                while trial.step().is_ok() {}
                trial.restart();
            }
            6
        });
        crashes += run.unwrap_or_else(|_| panic!("seed {seed}"));
    }
    assert_eq!(crashes, 3600);
}

#[test]
fn a_block_is_there_as_a_whole_or_cut() {
    let disk = CrashDisk::new(1);
    let options = LogOptions { segment_bytes: 8192 };
    let (mut log, _) = LogStore::open(disk.clone(), options).unwrap();
    write_synced(&mut log, &entries(1..=1, 1, 10));
    let before = content(&recover(&disk).unwrap());
    // Zeros in the data are no missing sectors.
    write_synced(&mut log, &batch_of(vec![entry(2, 1, &[0; 1300])]));
    let after = content(&recover(&disk).unwrap());
    let whole = disk.content(&first_segment());
    let (start, sectors) = (2 * SECTOR_BYTES, 3);
    for kept in 0..1 << sectors {
        let copy = disk.copy_with(&first_segment(), |bytes| {
            for sector in (0..sectors).filter(|sector| kept & (1 << sector) == 0) {
                bytes[start + sector * SECTOR_BYTES..][..SECTOR_BYTES].fill(0);
            }
        });
        let recovered = recover(&copy).unwrap();
        let complete = kept == (1 << sectors) - 1;
        assert_eq!(recovered.cut, !complete && kept != 0, "{kept:b}");
        assert_eq!(&content(&recovered), if complete { &after } else { &before }, "{kept:b}");

        // The place of the cut is used again.
        let (mut log, _) = open(&copy);
        write_synced(&mut log, &entries(recovered.entries.len() as u64 + 1..=9, 2, 300));
        assert_eq!(found(&copy), (1..=9).collect::<Vec<_>>());
    }
    // A sector that ends early is missing as well, but one whose beginning is wrong is not.
    for kept in 0..SECTOR_BYTES {
        let at = start + SECTOR_BYTES;
        let end = |bytes: &mut Vec<u8>| bytes[at + kept..][..SECTOR_BYTES - kept].fill(0);
        let recovered = recover(&disk.copy_with(&first_segment(), end)).unwrap();
        // All that counts is there if only the mark is missing.
        let complete = kept >= SECTOR_BYTES - 1;
        assert_eq!(&content(&recovered), if complete { &after } else { &before }, "{kept}");

        match recover(&disk.copy_with(&first_segment(), |bytes| bytes[at..][..kept].fill(0))) {
            Ok(recovered) => assert_eq!(content(&recovered), after, "{kept}"),
            Err(error) => assert!(error.to_string().contains("checksum"), "{error}"),
        }
    }
    assert_eq!(disk.content(&first_segment()), whole);
}

#[test]
fn what_a_dead_process_left_unsynced_is_synced_at_the_next_start() {
    for seed in 0..50 {
        let disk = CrashDisk::new(seed);
        let options = LogOptions { segment_bytes: 8192 };
        let (mut log, _) = LogStore::open(disk.clone(), options).unwrap();
        write_synced(&mut log, &entries(1..=1, 1, 10));
        disk.set(|dir| dir.sync_fails = true);
        log.write(&entries(2..=3, 1, 400)).unwrap();
        log.sync().unwrap_err();
        disk.set(|dir| dir.sync_fails = false);
        // Seen by the next process, and so promised to others.
        let (_, recovered) = open(&disk);
        assert_eq!(indexes(&recovered), [1, 2, 3]);
        disk.lose_power();
        assert_eq!(found(&disk), [1, 2, 3], "seed {seed}");
    }
}

/// One block, of which a sector is missing.
fn torn_log() -> CrashDisk {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=2, 1, 600));
    disk.copy_with(&first_segment(), |bytes| bytes[2 * SECTOR_BYTES..3 * SECTOR_BYTES].fill(0))
}

#[test]
fn a_cut_is_reported_until_something_is_made_of_it() {
    let disk = torn_log();
    for _ in 0..3 {
        let (mut log, recovered) = open(&disk);
        assert!(recovered.cut);
        assert!(recovered.entries.is_empty());
        // Who starts again and again and notes only that does not count.
        write_synced(&mut log, &note("start", "n"));
        drop(log);
        disk.lose_power();
    }
    let (mut log, recovered) = open(&disk);
    assert!(recovered.cut);
    log.write(&entries(1..=1, 2, 10)).unwrap();
    assert!(disk.names().iter().any(|name| name == CUT), "not before it is synced");
    log.sync().unwrap();
    let recovered = recover(&disk).unwrap();
    assert!(!recovered.cut);
    assert_eq!(indexes(&recovered), [1]);
}

#[test]
fn a_crash_while_cutting_does_not_hide_the_cut() {
    let torn = torn_log();
    for seed in 0..200 {
        let disk = torn.copy();
        let crash_at = disk.0.borrow().operations + 1 + seed % 10;
        disk.set(|dir| (dir.random, dir.crash_at) = (Random(seed), Some(crash_at)));
        LogStore::open(disk.clone(), small()).unwrap_err();
        disk.lose_power();
        let recovered = recover(&disk).unwrap();
        assert!(recovered.cut && recovered.entries.is_empty(), "seed {seed}");
    }
}

#[test]
fn a_crash_between_storing_and_installing_installs() {
    // Behind the end of the log, and at an entry of another term.
    for (index, term) in [(9, 1), (3, 2)] {
        let (disk, mut log) = begun();
        let mut batch = entries(1..=5, 1, 100);
        batch.hard_state = Some(format::hard_state(1, 2, 2));
        write_synced(&mut log, &batch);
        write_snapshot(&mut disk.clone(), &metadata(index, term), b"state").unwrap();
        let (mut log, recovered) = open(&disk);
        assert!(recovered.entries.is_empty());
        assert_eq!(recovered.snapshot.unwrap().metadata, metadata(index, term));
        let vote = if term == 1 { 2 } else { 0 };
        assert_eq!(recovered.hard_state, format::hard_state(term, vote, index));
        assert_eq!(log.write(&entries(1..=1, 1, 1)).unwrap_err().kind(), ErrorKind::InvalidInput);
        write_synced(&mut log, &entries(index + 1..=index + 2, 2, 10));
        assert_eq!(found(&disk), [index + 1, index + 2]);
    }
    // Where the log leads to it, all stays.
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=5, 1, 100));
    write_snapshot(&mut disk.clone(), &metadata(5, 1), b"state").unwrap();
    assert_eq!(found(&disk), [1, 2, 3, 4, 5]);
}

/// GUARANTEES 35: files that somebody removes are not given out again, whatever comes meanwhile, and nothing newer goes
/// before they are gone.
#[test]
fn a_file_is_given_out_for_removal_once() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=9, 1, 100));
    let store = |log: &mut LogStore<CrashDisk>, index: u64| {
        write_snapshot(&mut disk.clone(), &metadata(index, 1), b"state").unwrap();
        log.adopt(&metadata(index, 1)).unwrap();
    };
    store(&mut log, 3);
    store(&mut log, 5);
    let first = log.take_obsolete();
    assert_eq!(first.len(), 1, "{first:?}");
    store(&mut log, 7);
    assert!(log.take_obsolete().is_empty(), "the first is not gone");
    // As the log does it when a snapshot of another member is installed.
    log.snapshot_stored(&metadata(7, 1)).unwrap();
    assert!(disk.clone().list().unwrap().contains(&first[0]));
    disk.clone().remove(&first[0]).unwrap();
    log.swept();
    let second = log.take_obsolete();
    assert_eq!(second.len(), 1, "{second:?}");
    assert_ne!(first, second);
}

// Damage

/// Several segments, a snapshot in the middle, and a last block of several sectors; all synced.
fn long_log() -> CrashDisk {
    let (disk, mut log) = begun();
    for index in 1..=12 {
        let mut batch = entries(index..=index, 1, 300);
        batch.hard_state = Some(format::hard_state(1, 1, index - 1));
        batch.notes = vec![(b"node".to_vec(), vec![u8::try_from(index).unwrap(); 9])];
        write_synced(&mut log, &batch);
    }
    log.store_snapshot(&metadata(5, 1), b"the state after five entries").unwrap();
    write_synced(&mut log, &batch_of(vec![entry(13, 1, &[0; 1300])]));
    assert!(log.closed.len() >= 3, "{:?}", log.closed);
    disk
}

/// Where the blocks of a segment end.
fn end_of_blocks(disk: &CrashDisk, name: &str) -> usize {
    let bytes = disk.content(name);
    let Ok(format::ReadHeader { bytes: mut end, salt, .. }) = Header::decode(&bytes) else {
        panic!("a bad header");
    };
    while let Some(sector) = bytes.get(end..end + SECTOR_BYTES)
        && let Sector::Whole(format::Part { count: 1.., .. }) = format::read_sector(salt, sector)
    {
        end += SECTOR_BYTES;
    }
    end
}

#[test]
fn no_flipped_byte_is_ever_overlooked() {
    let disk = long_log();
    let whole = content(&recover(&disk).unwrap());
    let mut harmless = 0;
    let mut refused = 0;
    for name in disk.names().iter().filter(|name| *name != RESERVE) {
        let bytes = disk.content(name).len();
        let end = segment_of(name).map_or(bytes, |_| end_of_blocks(&disk, name));
        for at in 0..bytes {
            let flip = [0x01, 0x80, 0xff][at % 3];
            let copy = disk.copy_with(name, |bytes| bytes[at] ^= flip);
            let before = (copy.names(), copy.content(name));
            match LogStore::open(copy.clone(), small()) {
                Ok((_, recovered)) => {
                    assert_eq!(content(&recovered), whole, "{name} at {at}");
                    let is_mark = at % SECTOR_BYTES == SECTOR_BYTES - 1;
                    assert!(at >= end || is_mark, "{name} at {at} was not noticed");
                    harmless += 1;
                }
                Err(OpenError::Damaged { file, offset, .. }) => {
                    assert_eq!(&file, name, "at {at}");
                    assert!(offset <= at as u64, "{name} at {at}");
                    assert_eq!((copy.names(), copy.content(name)), before, "changed nothing");
                    refused += 1;
                }
                Err(error) => panic!("{name} at {at}: {error}"),
            }
        }
    }
    assert!(harmless > 1000 && refused > 5000, "{harmless} harmless, {refused} refused");
}

#[test]
fn damage_of_any_log_is_refused_or_harmless() {
    let (mut harmless, mut refused) = (0, 0);
    for seed in 0..150 {
        let mut trial = Trial::new(seed);
        for _ in 0..60 {
            trial.step().unwrap();
        }
        trial.sync().unwrap();
        let open = |disk: &CrashDisk| LogStore::open(disk.copy(), trial.options.clone());
        let whole = content(&open(&trial.disk).unwrap().1);
        let names: Vec<_> = trial.disk.names().into_iter().filter(|name| name != RESERVE).collect();
        for _ in 0..20 {
            let name = &names[trial.random.below(names.len())];
            let at = trial.random.below(trial.disk.content(name).len());
            let flip = trial.random.within(1, 255).to_le_bytes()[0];
            match open(&trial.disk.copy_with(name, |bytes| bytes[at] ^= flip)) {
                Ok((_, recovered)) => {
                    assert_eq!(content(&recovered), whole, "seed {seed}, {name} at {at}");
                    harmless += 1;
                }
                Err(OpenError::Damaged { .. }) => refused += 1,
                Err(error) => panic!("seed {seed}, {name} at {at}: {error}"),
            }
        }
    }
    assert!(harmless > 300 && refused > 300, "{harmless} harmless, {refused} refused");
}

#[test]
fn a_lost_sector_is_damage_but_at_the_very_end() {
    let disk = long_log();
    let whole = content(&recover(&disk).unwrap());
    let names: Vec<_> =
        disk.names().into_iter().filter(|name| segment_of(name).is_some()).collect();
    let last = names.last().unwrap();
    let (mut cut, mut refused) = (0, 0);
    for name in &names {
        let end = end_of_blocks(&disk, name);
        for at in (0..disk.content(name).len()).step_by(SECTOR_BYTES) {
            let lost = |bytes: &mut Vec<u8>| bytes[at..at + SECTOR_BYTES].fill(0);
            match recover(&disk.copy_with(name, lost)) {
                Ok(recovered) if recovered.cut => {
                    assert!(name == last && at < end && at >= SECTOR_BYTES, "{name} at {at}");
                    assert_eq!(indexes(&recovered), (1..=12).collect::<Vec<_>>());
                    cut += 1;
                }
                Ok(recovered) => {
                    assert_eq!(content(&recovered), whole);
                    assert!(at >= end, "{name} at {at}");
                }
                Err(error) => {
                    assert!(error.to_string().contains(name), "{error}");
                    refused += 1;
                }
            }
        }
    }
    assert_eq!(cut, 3, "the sectors of the last block");
    assert!(refused > 10, "{refused}");
}

#[test]
fn damage_is_told_with_place_and_remedy() {
    let disk = CrashDisk::new(1);
    let options = || LogOptions { segment_bytes: 1 << 16 };
    let (mut log, _) = LogStore::open(disk.clone(), options()).unwrap();
    write_each(&mut log, 1..=3, 1, 600);
    let sector = |n: usize| n * SECTOR_BYTES..(n + 1) * SECTOR_BYTES;
    let check = |at: u64, what: &str, change: &dyn Fn(&mut Vec<u8>)| {
        let copy = disk.copy_with(&first_segment(), change);
        let result = LogStore::open(copy, options()).map(|(_, recovered)| recovered);
        check_damaged(result, &first_segment(), at, what);
    };
    // Blocks of two sectors at 1, 3 and 5.
    let behind = "block 1 is not whole, although block 2 was begun behind it";
    check(512, behind, &|bytes| bytes[sector(2)].fill(0));
    check(1536, "block 2 is not whole, although block 3", &|bytes| {
        bytes[sector(3).start..sector(4).end].fill(0);
    });
    check(2560, "checksum fails", &|bytes| bytes[sector(5)][100] ^= 4);
    // The last block: one sector missing, another one wrong.
    check(3072, "checksum fails", &|bytes| {
        bytes[sector(5)].fill(0);
        bytes[sector(6)][100] ^= 4;
    });
    // An old sector where a new one should be.
    let old = "a sector of block 2 stands where block 3 belongs";
    check(2560, old, &|bytes| bytes.copy_within(sector(3), sector(5).start));
    check(0, "does not begin like a log segment", &|bytes| bytes[0] = b'x');
    check(0, "does not begin like a log segment", &|bytes| bytes[..100].fill(0));
    check(0, "checksum of its header", &|bytes| bytes[60] ^= 1);
    check(0, "impossible length", &|bytes| bytes[12] ^= 1);
    // Promise 35: a segment has its size before anything is in it, so no crash makes it shorter, and what was
    // acknowledged may have been in the part that is missing.
    for len in [0, 100, SECTOR_BYTES, 6 * SECTOR_BYTES + 99, 7 * SECTOR_BYTES, (1 << 16) - 1] {
        check(len as u64, "the file ends here", &|bytes| bytes.truncate(len));
    }
}

#[test]
fn missing_and_mixed_up_files_are_damage() {
    let disk = long_log();
    let segments = disk.names().iter().filter(|name| segment_of(name).is_some()).count() as u64;
    for number in 1..=segments {
        let result = recover(&disk.copy_without([segment_name(number)]));
        match number {
            1 => {
                // The snapshot covers what was there.
                let recovered = result.unwrap();
                assert!(recovered.entries.first().unwrap().index <= 6, "{recovered:?}");
            }
            2 => check_damaged(result, &segment_name(2), 0, "the file is missing"),
            _ => check_damaged(result, &segment_name(number), 0, "missing"),
        }
    }
    let copy = disk.copy_without([1, 2, 3].map(segment_name));
    let text = recover(&copy).unwrap_err().to_string();
    assert!(text.contains("the log begins behind entry"), "{text}");

    let copy = disk.copy();
    copy.put(&segment_name(2), &disk.content(&segment_name(3)));
    check_damaged(recover(&copy), &segment_name(2), 16, "it is segment 3");

    // A segment of another log that looks like the right one.
    let (other, mut log) = begun();
    write_each(&mut log, 1..=12, 1, 305);
    let copy = disk.copy();
    copy.put(&segment_name(2), &other.content(&segment_name(2)));
    assert!(recover(&copy).unwrap_err().to_string().contains(&segment_name(2)));

    let copy = disk.copy_without((1..=segments).map(segment_name));
    check_damaged(recover(&copy), &segment_name(1), 0, "there is no log");
}

#[test]
fn the_last_segment_is_missed_even_if_a_crash_kept_it_from_being_announced() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=1, 1, 900));
    // The header and its sync, the name and its sync; then the sector that closes the first segment.
    let crash_at = disk.0.borrow().operations + 5;
    disk.set(|dir| dir.crash_at = Some(crash_at));
    log.write(&entries(2..=2, 1, 900)).unwrap_err();
    disk.lose_power();
    disk.damage(&first_segment(), |bytes| bytes[3 * SECTOR_BYTES..].fill(0));
    // Nothing was lost with it so far.
    assert_eq!(found(&disk.copy_without([segment_name(2)])), [1]);
    let (mut log, _) = open(&disk);
    write_synced(&mut log, &entries(2..=2, 1, 900));
    let result = recover(&disk.copy_without([segment_name(2)]));
    check_damaged(result, &segment_name(2), 0, "the file is missing, although it was begun");
}

#[test]
fn snapshots_are_verified_and_needed() {
    let disk = long_log();
    let name = snapshot::file_name(5);
    let cut = disk.copy();
    let (mut log, _) = open(&cut);
    log.truncate_before(6).unwrap();
    assert!(log.closed.front().unwrap().number > 1);
    drop(log);

    // With the whole log it can be missing, but not damaged; also not if there is an older one.
    assert_eq!(found(&disk.copy_without([name.clone()])), (1..=13).collect::<Vec<_>>());
    cut.delete(&name);
    let base = recover(&cut).unwrap_err();
    assert!(base.to_string().contains("the newest one is at 0"), "{base}");
    let copy = disk.copy();
    copy.put(&snapshot::file_name(3), &disk.content(&name));
    assert_eq!(recover(&copy).unwrap().snapshot.unwrap().metadata.index, 5);
    copy.damage(&name, |bytes| *bytes.last_mut().unwrap() ^= 1);
    check_damaged(recover(&copy), &name, 0, "digest");
    copy.put(&name, &disk.content(&name)[..70]);
    check_damaged(recover(&copy), &name, 0, "too short");
    copy.put(&name, &[7; 200]);
    check_damaged(recover(&copy), &name, 0, "does not begin like a snapshot");
    copy.delete(&name);
    copy.put(&snapshot::file_name(6), &disk.content(&name));
    check_damaged(recover(&copy), &snapshot::file_name(6), 16, "it is the snapshot of index 5");
}

#[test]
fn newer_formats_are_told_from_damage() {
    let disk = long_log();
    disk.damage(&segment_name(2), |bytes| {
        bytes[8] = 2;
        let crc = crc32fast::hash(&bytes[..SECTOR_BYTES - 4]);
        bytes[SECTOR_BYTES - 4..SECTOR_BYTES].copy_from_slice(&crc.to_le_bytes());
    });
    let error = recover(&disk).unwrap_err();
    assert!(matches!(error, OpenError::UnknownVersion { version: 2, .. }), "{error}");
    assert!(error.to_string().contains(&segment_name(2)), "{error}");
    let name = snapshot::file_name(5);
    disk.damage(&name, |bytes| {
        bytes[8] = 3;
        let content = bytes.len() - 32;
        let digest = ring::digest::digest(&ring::digest::SHA256, &bytes[..content]);
        bytes[content..].copy_from_slice(digest.as_ref());
    });
    let error = recover(&disk).unwrap_err();
    assert!(matches!(error, OpenError::UnknownVersion { version: 3, .. }), "{error}");
}

#[test]
fn lengths_are_checked_before_they_are_believed() {
    // Whole sectors and chained checksums around records that make no sense.
    let mut crc = 0;
    let mut records = Vec::new();
    format::put_entry(&mut records, &mut crc, &entry(1, 1, b"data"));
    let read =
        |bytes: &[u8]| format::read_record(&mut &bytes[..], &mut 0).map(|record| record.is_some());
    assert_eq!(read(&records), Ok(true));
    assert_eq!(read(&[]), Ok(false));
    assert_eq!(read(&[0; 3]), Ok(false));
    read(&[0, 0, 0, 0, 1]).unwrap_err();
    read(&records[..records.len() - 1]).unwrap_err();
    for length in [1, 31, 1 << 20, u32::MAX] {
        let mut bytes = records.clone();
        bytes[..4].copy_from_slice(&length.to_le_bytes());
        read(&bytes).unwrap_err();
    }
    let refitted = |change: &dyn Fn(&mut Vec<u8>)| {
        let mut bytes = records.clone();
        change(&mut bytes);
        let end = bytes.len() - 4;
        let crc = crc32fast::hash(&[&[0; 4], &bytes[..end]].concat());
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
        read(&bytes)
    };
    assert_eq!(refitted(&|_| ()), Ok(true));
    refitted(&|bytes| bytes[28] = 5).unwrap_err();
    refitted(&|bytes| bytes[31] = 0xff).unwrap_err();
    refitted(&|bytes| bytes[4] = 9).unwrap_err();
    refitted(&|bytes| bytes[5] = 3).unwrap_err();
    refitted(&|bytes| bytes[8] = 1).unwrap_err();
}

// What the log promises when all goes well

#[test]
fn everything_is_found_again() {
    let disk = CrashDisk::new(1);
    let (mut log, recovered) = open(&disk);
    assert_eq!(content(&recovered), Content::default());
    let conf_change = of_type(EntryType::EntryConfChange, b"context", entry(2, 1, b"change"));
    let batch = LogBatch {
        entries: vec![entry(1, 1, b""), conf_change.clone()],
        hard_state: Some(format::hard_state(1, 2, 1)),
        notes: vec![(b"a".to_vec(), b"1".to_vec()), (b"b".to_vec(), b"2".to_vec())],
    };
    log.write(&batch).unwrap();
    assert_eq!(content(&recover(&disk).unwrap()), Content::default(), "nothing before the sync");
    log.write(&note("a", "3")).unwrap();
    log.write(&note("b", "")).unwrap();
    log.sync().unwrap();
    let recovered = recover(&disk).unwrap();
    assert_eq!(recovered.entries, [entry(1, 1, b""), conf_change]);
    assert_eq!(recovered.hard_state, format::hard_state(1, 2, 1));
    assert_eq!(recovered.notes, BTreeMap::from([(b"a".to_vec(), b"3".to_vec())]));
    // Replaced from the second on.
    write_synced(&mut log, &batch_of(vec![entry(2, 2, b"x")]));
    write_synced(&mut log, &batch_of(vec![entry(3, 2, b"y")]));
    write_synced(&mut log, &batch_of(vec![entry(2, 3, b"z")]));
    assert_eq!(recover(&disk).unwrap().entries, [entry(1, 1, b""), entry(2, 3, b"z")]);
}

#[test]
fn one_sync_is_one_write_and_one_sync() {
    let disk = CrashDisk::new(1);
    let (mut log, _) = LogStore::open(disk.clone(), LogOptions { segment_bytes: 1 << 16 }).unwrap();
    let before = disk.0.borrow().operations;
    for index in 1..=20 {
        log.write(&entries(index..=index, 1, 100)).unwrap();
    }
    assert_eq!(disk.0.borrow().operations, before);
    log.sync().unwrap();
    assert_eq!(disk.0.borrow().operations, before + 2);
    log.sync().unwrap();
    assert_eq!(disk.0.borrow().operations, before + 2, "nothing to do");
}

#[test]
fn a_batch_larger_than_a_segment_is_kept_whole() {
    let (disk, mut log) = begun();
    for (first, bytes) in [(1, 5000), (4, 10), (7, 9000), (10, 100)] {
        write_synced(&mut log, &entries(first..=first + 2, 1, bytes));
    }
    assert_eq!(found(&disk), (1..=12).collect::<Vec<_>>());
    disk.lose_power();
    assert_eq!(found(&disk), (1..=12).collect::<Vec<_>>());
}

#[test]
fn notes_survive_the_segments_they_were_written_in() {
    let (disk, mut log) = begun();
    let mut batch = note("id", "n1");
    batch.hard_state = Some(format::hard_state(4, 3, 0));
    // More than a segment: its header makes it grow.
    batch.notes.push((b"long".to_vec(), vec![1; 5000]));
    write_synced(&mut log, &batch);
    write_each(&mut log, 1..=20, 4, 300);
    log.store_snapshot(&metadata(18, 4), b"state").unwrap();
    log.truncate_before(19).unwrap();
    assert!(!disk.names().contains(&first_segment()));
    let recovered = recover(&disk).unwrap();
    assert_eq!(recovered.notes[&b"id"[..]], b"n1");
    assert_eq!(recovered.notes[&b"long"[..]], [1; 5000]);
    assert_eq!(recovered.hard_state, format::hard_state(4, 3, 18));
    assert!(recovered.entries.first().unwrap().index <= 19);

    let error = log.write(&note("more", &"x".repeat(61_000))).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    write_synced(&mut log, &note("more", &"x".repeat(60_000)));
    assert_eq!(recover(&disk).unwrap().notes[&b"more"[..]].len(), 60_000);
}

#[test]
fn nothing_is_cut_that_the_snapshot_does_not_cover() {
    let (disk, mut log) = begun();
    write_each(&mut log, 1..=20, 1, 300);
    let all = disk.names();
    log.truncate_before(21).unwrap();
    assert_eq!(disk.names(), all);
    log.store_snapshot(&metadata(9, 1), b"state").unwrap();
    log.truncate_before(4).unwrap();
    let recovered = recover(&disk).unwrap();
    assert!((2..=4).contains(&recovered.entries[0].index), "{:?}", indexes(&recovered));
    log.truncate_before(21).unwrap();
    let recovered = recover(&disk).unwrap();
    assert!((5..=10).contains(&recovered.entries[0].index), "{:?}", indexes(&recovered));
    assert_eq!(recovered.entries.last().unwrap().index, 20);
}

#[test]
fn entries_that_replaced_others_in_a_removed_segment() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=3, 1, 300));
    assert!(log.closed.is_empty());
    // Into the next segment, over what the first one has.
    write_synced(&mut log, &entries(2..=4, 2, 200));
    assert_eq!(log.closed.len(), 1);
    log.store_snapshot(&metadata(3, 2), b"state").unwrap();
    log.truncate_before(4).unwrap();
    assert!(log.closed.is_empty());
    let recovered = recover(&disk).unwrap();
    assert_eq!(indexes(&recovered), [2, 3, 4]);
    assert!(recovered.entries.iter().all(|entry| entry.term == 2));
}

#[test]
fn an_installed_snapshot_takes_the_place_of_the_log() {
    let (disk, mut log) = begun();
    write_each(&mut log, 1..=10, 1, 300);
    log.store_snapshot(&metadata(2, 1), b"old").unwrap();
    log.install_snapshot(&metadata(50, 3), b"new").unwrap();
    let recovered = recover(&disk).unwrap();
    assert!(recovered.entries.is_empty());
    assert_eq!(recovered.snapshot.as_ref().unwrap().data, &b"new"[..]);
    assert!(!disk.names().contains(&snapshot::file_name(2)));
    write_synced(&mut log, &entries(51..=52, 3, 300));
    log.truncate_before(51).unwrap();
    assert!(!disk.names().contains(&first_segment()));
    assert_eq!(found(&disk), [51, 52]);

    // Entries with higher indexes than the snapshot's are void as well.
    for restart in [false, true] {
        let (disk, mut log) = begun();
        write_each(&mut log, 1..=10, 1, 300);
        log.install_snapshot(&metadata(3, 2), b"new").unwrap();
        if restart {
            log = open(&disk).0;
        }
        log.truncate_before(4).unwrap();
        assert!(log.closed.is_empty(), "{:?}", log.closed);
        assert!(recover(&disk).unwrap().entries.is_empty());
    }

    // A snapshot of our own that was begun before comes too late.
    write_snapshot(&mut disk.clone(), &metadata(7, 1), b"late").unwrap();
    log.snapshot_stored(&metadata(7, 1)).unwrap();
    assert!(!disk.names().contains(&snapshot::file_name(7)));
    assert_eq!(recover(&disk).unwrap().snapshot.unwrap().metadata.index, 50);
}

#[test]
fn what_does_not_follow_is_refused_and_changes_nothing() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=5, 1, 10));
    log.store_snapshot(&metadata(3, 1), b"state").unwrap();
    let whole = content(&recover(&disk).unwrap());
    let gap = batch_of(vec![entry(6, 1, b""), entry(8, 1, b"")]);
    for batch in [entries(7..=7, 1, 1), entries(3..=3, 2, 1), entries(0..=0, 1, 1), gap] {
        let error = log.write(&batch).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    for result in [
        log.store_snapshot(&metadata(6, 1), b""),
        log.store_snapshot(&metadata(0, 0), b""),
        log.install_snapshot(&metadata(3, 2), b""),
    ] {
        assert_eq!(result.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    assert_eq!(content(&recover(&disk).unwrap()), whole);
    write_synced(&mut log, &entries(6..=6, 1, 10));
    assert_eq!(found(&disk), [1, 2, 3, 4, 5, 6]);
}

#[test]
fn litter_is_removed_and_strange_files_are_left_alone() {
    let disk = long_log();
    let aside = format!("{}.tmp", snapshot::file_name(9));
    disk.put(&aside, b"half a snapshot");
    disk.put(&snapshot::file_name(4), b"older");
    for strange in ["log-1", "snapshot-x", "notes.txt", "log-000000000000000A"] {
        disk.put(strange, b"?");
    }
    let (log, _) = open(&disk);
    let names = disk.names();
    assert!(!names.contains(&aside) && !names.contains(&snapshot::file_name(4)), "{names:?}");
    assert!(names.contains(&"log-1".to_owned()) && names.contains(&"notes.txt".to_owned()));
    let segments = names.iter().filter(|name| segment_of(name).is_some() || *name == RESERVE);
    let log_bytes: u64 = segments.map(|name| disk.len(name).unwrap()).sum();
    assert_eq!(log.bytes().0, log_bytes);
    assert_eq!(log.bytes().1, disk.len(&snapshot::file_name(5)).unwrap());
}

// Disks that refuse

#[test]
fn a_full_disk_is_noticed_while_there_is_still_room() {
    let (disk, mut log) = begun();
    assert_eq!(log.room(), Room::Plenty);
    disk.set(|dir| dir.full = true);
    let mut index = 0;
    let mut write = |log: &mut LogStore<CrashDisk>| {
        index += 1;
        let result = log.write(&entries(index..=index, 1, 10)).and_then(|()| log.sync());
        result.map(|()| index)
    };
    while log.room() == Room::Plenty {
        write(&mut log).unwrap();
    }
    // The reserve is in use, and has just been begun.
    assert_eq!(log.tip.segment, 2);
    assert!(!disk.names().iter().any(|name| name == RESERVE));
    let mut on_reserve = 0;
    let error = loop {
        match write(&mut log) {
            Ok(_) => on_reserve += 1,
            Err(error) => break error,
        }
        assert_eq!(log.room(), Room::Low);
    };
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert_eq!(on_reserve, 1, "of the three sectors one is the header's and one closes it");
    write(&mut log).unwrap_err();
    let recovered = recover(&disk).unwrap();
    assert_eq!(recovered.entries.len(), 4);
}

/// GUARANTEES 39, 48: a process without descriptors goes on to the end of its reserve, then waits, and loses nothing;
/// what it said to be durable is.
#[test]
fn a_log_without_descriptors_waits_and_goes_on() {
    let (disk, mut log) = begun();
    disk.set(|dir| dir.starved = true);
    let mut durable = 0;
    let error = loop {
        let next = durable + 1;
        match log.write(&entries(next..=next, 1, 10)).and_then(|()| log.sync()) {
            Ok(()) => durable = next,
            Err(error) => break error,
        }
        assert!(durable < 100, "the reserve has no end");
        assert_eq!(log.room(), Room::Plenty, "the disk is not full");
    };
    assert!(is_out_of_descriptors(&error), "{error}");
    assert_eq!(log.tip.segment, 2, "the reserve was open");
    let copy = disk.copy();
    copy.set(|dir| dir.starved = false);
    assert_eq!(recover(&copy).unwrap().entries.len() as u64, durable);
    let next = durable + 1;
    for _ in 0..3 {
        let error = log.write(&entries(next..=next, 1, 10)).unwrap_err();
        assert!(is_out_of_descriptors(&error), "{error}");
        log.sync().unwrap();
    }
    disk.set(|dir| dir.starved = false);
    write_each(&mut log, next..=next + 19, 1, 10);
    let recovered = recover(&disk).unwrap();
    assert_eq!(indexes(&recovered), (1..next + 20).collect::<Vec<_>>());
    assert!(!recovered.cut);
}

/// GUARANTEES 39, 48: the next segment is begun only if the one before can be closed.
#[test]
fn a_segment_is_left_when_it_can_be_opened() {
    let (disk, mut log) = begun();
    let mut next = 1;
    while log.fits(format::entry_bytes(&entry(next, 1, &[0; 10])).unwrap()) {
        write_each(&mut log, next..=next, 1, 10);
        next += 1;
    }
    disk.set(|dir| dir.shut = Some(segment_name(1)));
    for _ in 0..2 {
        let error = log.write(&entries(next..=next, 1, 10)).unwrap_err();
        assert!(is_out_of_descriptors(&error), "{error}");
    }
    assert_eq!(log.tip.segment, 1);
    disk.set(|dir| dir.shut = None);
    write_each(&mut log, next..=next + 4, 1, 10);
    assert_eq!(found(&disk), (1..=next + 4).collect::<Vec<_>>());
}

/// GUARANTEES 39, 48: a snapshot that finds no descriptor is taken note of, stored or installed later.
#[test]
fn snapshots_wait_for_descriptors() {
    let (disk, mut log) = begun();
    write_each(&mut log, 1..=6, 1, 400);
    let starve = |starved| disk.set(|dir| dir.starved = starved);
    starve(true);
    let error = log.store_snapshot(&metadata(4, 1), b"state").unwrap_err();
    assert!(is_out_of_descriptors(&error), "{error}");
    starve(false);
    write_snapshot(&mut disk.clone(), &metadata(5, 1), b"state").unwrap();
    starve(true);
    assert!(is_out_of_descriptors(&log.adopt(&metadata(5, 1)).unwrap_err()));
    starve(false);
    log.adopt(&metadata(5, 1)).unwrap();
    starve(true);
    let error = log.install_snapshot(&metadata(20, 2), b"from elsewhere").unwrap_err();
    assert!(is_out_of_descriptors(&error), "{error}");
    starve(false);
    log.install_snapshot(&metadata(20, 2), b"from elsewhere").unwrap();
    write_synced(&mut log, &entries(21..=21, 2, 10));
    let recovered = recover(&disk).unwrap();
    assert_eq!(recovered.snapshot.unwrap().metadata.index, 20);
    assert_eq!(recovered.entries.len(), 1);
}

#[test]
fn room_comes_back_when_something_is_removed() {
    let (disk, mut log) = begun();
    for index in 1..=8 {
        disk.set(|dir| dir.full = index == 8);
        write_synced(&mut log, &entries(index..=index, 1, 400));
    }
    disk.set(|dir| dir.full = true);
    let error = log.store_snapshot(&metadata(6, 1), b"state").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    let mut index = 8;
    while log.room() == Room::Plenty {
        index += 1;
        write_synced(&mut log, &entries(index..=index, 1, 400));
    }
    assert_eq!(log.retry_room().unwrap(), Room::Low);
    disk.set(|dir| dir.full = false);
    log.store_snapshot(&metadata(6, 1), b"state").unwrap();
    disk.set(|dir| dir.full = true);
    log.sync().unwrap();
    assert_eq!(log.room(), Room::Low);
    disk.set(|dir| dir.full = false);
    log.sync().unwrap();
    assert_eq!(log.room(), Room::Low, "nothing was removed, nobody asked");
    log.truncate_before(7).unwrap();
    log.sync().unwrap();
    assert_eq!(log.room(), Room::Plenty);
    disk.set(|dir| dir.full = true);
    while log.room() == Room::Plenty {
        index += 1;
        write_synced(&mut log, &entries(index..=index, 1, 400));
    }
    disk.set(|dir| dir.full = false);
    assert_eq!(log.retry_room().unwrap(), Room::Plenty);
}

#[test]
fn a_start_on_a_full_disk_says_so() {
    let disk = CrashDisk::new(1);
    disk.set(|dir| dir.full = true);
    let error = LogStore::open(disk.clone(), small()).unwrap_err();
    assert!(matches!(error, OpenError::Io(_)), "{error}");
    disk.set(|dir| dir.full = false);
    let (mut log, _) = open(&disk);
    write_synced(&mut log, &entries(1..=1, 1, 10));
    drop(log);
    disk.set(|dir| dir.full = true);
    let (mut log, recovered) = open(&disk);
    assert_eq!(indexes(&recovered), [1]);
    assert_eq!(log.room(), Room::Low);
    write_synced(&mut log, &entries(2..=2, 1, 10));
}

#[test]
fn after_a_failed_sync_nothing_is_accepted() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=1, 1, 10));
    log.write(&entries(2..=2, 1, 10)).unwrap();
    disk.set(|dir| dir.sync_fails = true);
    log.sync().unwrap_err();
    disk.set(|dir| dir.sync_fails = false);
    let operations = disk.0.borrow().operations;
    let text = log.sync().unwrap_err().to_string();
    assert!(text.contains("failed before") && text.contains("not synced"), "{text}");
    log.write(&entries(3..=3, 1, 10)).unwrap_err();
    log.store_snapshot(&metadata(1, 1), b"").unwrap_err();
    log.snapshot_stored(&metadata(1, 1)).unwrap_err();
    log.install_snapshot(&metadata(9, 1), b"").unwrap_err();
    log.snapshot_installed(&metadata(9, 1)).unwrap_err();
    log.truncate_before(2).unwrap_err();
    log.retry_room().unwrap_err();
    assert_eq!(disk.0.borrow().operations, operations, "the disk is left alone");
    assert_eq!(recover(&disk).unwrap().entries[0].index, 1);
}

// Fixed bytes

/// What version 1 looks like. `UPDATE_GOLDEN=1` writes the files anew; their change is a change of the format.
#[test]
fn version_1_is_read_and_written_as_ever() {
    let (disk, mut log) = begun();
    let mut conf_change = entry(2, 1, b"");
    conf_change.set_entry_type(EntryType::EntryConfChangeV2);
    conf_change.context = Bytes::from_static(b"member");
    let batch = LogBatch {
        entries: vec![entry(1, 1, b"first"), conf_change.clone()],
        hard_state: Some(format::hard_state(1, 3, 1)),
        notes: vec![(b"node".to_vec(), b"a".to_vec())],
    };
    write_synced(&mut log, &batch);
    write_synced(&mut log, &batch_of(vec![entry(3, 1, &[0xab; 600])]));
    // It replaces the third.
    write_synced(&mut log, &batch_of(vec![entry(3, 2, b"third")]));
    let mut snapshot = SnapshotMetadata { index: 2, term: 1, ..SnapshotMetadata::default() };
    snapshot.set_conf_state(ConfState {
        voters: vec![1, 2],
        learners: vec![4],
        voters_outgoing: vec![1, 2, 3],
        learners_next: vec![3],
        auto_leave: true,
        ..ConfState::default()
    });
    log.store_snapshot(&snapshot, b"state").unwrap();

    let names = [1, 2, 3].map(segment_name).into_iter().chain([snapshot::file_name(2)]);
    let names: Vec<String> = names.collect();
    let golden = |name: &str| {
        let directory = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        directory.join(format!("v1-{name}"))
    };
    let stored = CrashDisk::new(1);
    for name in &names {
        if std::env::var_os("UPDATE_GOLDEN").is_some_and(|value| value == "1") {
            std::fs::write(golden(name), disk.content(name)).unwrap();
        }
        let bytes = std::fs::read(golden(name)).unwrap();
        assert!(disk.content(name) == bytes, "{name} is not what version 1 wrote");
        stored.put(name, &bytes);
    }
    let (_, recovered) = open(&stored);
    assert_eq!(recovered.entries, [entry(1, 1, b"first"), conf_change, entry(3, 2, b"third")]);
    assert_eq!(recovered.hard_state, format::hard_state(1, 3, 2));
    assert_eq!(recovered.notes, BTreeMap::from([(b"node".to_vec(), b"a".to_vec())]));
    let found = recovered.snapshot.unwrap();
    assert_eq!((found.metadata, &found.data[..]), (snapshot, &b"state"[..]));
    assert!(stored.content(&snapshot::file_name(2)).ends_with(&found.digest));
    assert!(!recovered.cut);
}

#[test]
fn the_real_disk_keeps_it_too() {
    let dir = dflockd_testkit::Dir::new();
    let path = dir.path("data");
    let options = LogOptions { segment_bytes: 1 << 16 };
    let (mut log, _) = LogStore::open(RealDisk::open(&path).unwrap(), options.clone()).unwrap();
    write_each(&mut log, 1..=100, 1, 2000);
    drop(log);
    let disk = RealDisk::open(&path).unwrap();
    let (mut log, recovered) = LogStore::open(disk.clone(), options.clone()).unwrap();
    assert_eq!(indexes(&recovered), (1..=100).collect::<Vec<_>>());
    let data = vec![5; 9 << 20];
    std::thread::scope(|scope| {
        let mut disk = disk.clone();
        let data = &data;
        let writing = scope.spawn(move || write_snapshot(&mut disk, &metadata(90, 1), data));
        write_each(&mut log, 101..=130, 1, 2000);
        writing.join().unwrap().unwrap();
    });
    log.snapshot_stored(&metadata(90, 1)).unwrap();
    log.truncate_before(91).unwrap();
    drop((log, disk));
    let disk = RealDisk::open(&path).unwrap();
    assert!(!disk.list().unwrap().contains(&first_segment()));
    assert_eq!(read_snapshot(&disk, 90).unwrap().data, data);
    let (_, recovered) = LogStore::open(disk, options).unwrap();
    assert_eq!(recovered.entries.last().unwrap().index, 130);
    assert!(recovered.entries[0].index <= 91);
    assert_eq!(recovered.snapshot.unwrap().metadata, metadata(90, 1));
}

// Sizes

/// The log tells how large its files are, those that it has closed by itself among them.
#[test]
fn the_log_is_as_large_as_its_files() {
    let (disk, mut log) = begun();
    write_each(&mut log, 1..=20, 1, 300);
    assert!(log.closed.len() > 2);
    let files: u64 = disk.names().iter().map(|name| disk.len(name).unwrap()).sum();
    assert_eq!(log.bytes(), (files, 0));
}

/// Room is looked for by these numbers before anything is put.
#[test]
fn records_take_what_was_said() {
    let put = |put: &dyn Fn(&mut Vec<u8>, &mut u32)| {
        let mut out = Vec::new();
        put(&mut out, &mut 7);
        out.len()
    };
    for (key, value) in [(&b"key"[..], &b"value"[..]), (b"key", b""), (b"", b"")] {
        let bytes = put(&|out, chain| format::put_note(out, chain, key, value));
        assert_eq!(format::note_bytes(key, value), bytes);
    }
    for data in [&b""[..], b"data"] {
        let entry = of_type(EntryType::EntryConfChange, b"context", entry(3, 2, data));
        let bytes = put(&|out, chain| format::put_entry(out, chain, &entry));
        assert_eq!(format::entry_bytes(&entry), Some(bytes));
    }
    let state = HardState { term: 1, vote: 2, commit: 3, ..HardState::default() };
    let bytes = put(&|out, chain| format::put_hard_state(out, chain, &state));
    assert_eq!(format::HARD_STATE_BYTES, bytes);
    let bytes = put(&|out, chain| format::put_reset(out, chain, Position::default()));
    assert_eq!(format::RESET_BYTES, bytes);
}

#[test]
fn a_file_that_is_shorter_than_a_sector_is_no_segment() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=1, 1, 10));
    let name = segment_name(1);
    let content = disk.content(&name);
    assert!(Header::decode(&content).is_ok());
    for length in [0, 7, 8, 15, SECTOR_BYTES - 1] {
        assert!(Header::decode(&content[..length]).is_err(), "{length} bytes");
        let error = recover(&disk.copy_with(&name, |bytes| bytes.truncate(length))).unwrap_err();
        assert!(matches!(error, OpenError::Damaged { .. }), "{length} bytes: {error}");
    }
}

/// A sector whose last byte was lost lacks nothing, and gets it again.
#[test]
fn a_lost_mark_is_written_again() {
    let (disk, mut log) = begun();
    write_synced(&mut log, &entries(1..=1, 1, 10));
    let (name, mark) = (segment_name(1), usize::try_from(log.active.offset).unwrap() - 1);
    let whole = disk.content(&name);
    disk.damage(&name, |bytes| bytes[mark] = 0);
    let (_, recovered) = open(&disk);
    assert_eq!((indexes(&recovered), recovered.cut), (vec![1], false));
    assert!(disk.content(&name) == whole);
}
