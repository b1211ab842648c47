//! The fence state file: fences that keep growing over a restart, whatever the clock does.
//!
//! The file remembers the end of the range of fences that may have been given out (the *ceiling*)
//! and the largest lease ever granted. The caller reserves a range here before it uses the first
//! fence of it.
//!
//! The file is a journal of two slots, 4096 bytes apart so that they share no disk block. A write
//! goes to the older slot and is synced before it counts, so an interrupted write leaves the newer
//! slot whole. Each slot begins with this record, integers big-endian:
//!
//! | Offset | Bytes | Field |
//! | --- | --- | --- |
//! | 0 | 8 | magic `dflkfnce` |
//! | 8 | 4 | version, 1 |
//! | 12 | 8 | sequence: odd in the first slot, even in the second; the higher one counts |
//! | 20 | 8 | ceiling |
//! | 28 | 8 | largest lease in nanoseconds |
//! | 36 | 4 | CRC-32 of the bytes before |
//!
//! Later versions keep magic, version and checksum where they are, so that an old server can tell a
//! newer file from a damaged one. This module never invents a ceiling: what it cannot read, it
//! refuses.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

const MAGIC: [u8; 8] = *b"dflkfnce";
const VERSION: u32 = 1;
const RECORD_BYTES: usize = 40;
const CHECKED_BYTES: usize = RECORD_BYTES - 4;

/// Distance of the two slots: a torn write of one block or page never reaches the other slot.
const SLOT_STRIDE: usize = 4096;
const FILE_BYTES: usize = 2 * SLOT_STRIDE;

/// What development builds wrote: the ceiling alone, big-endian.
const LEGACY_BYTES: usize = 8;

/// How often the file may be replaced under our hands while we open it. Each round means that
/// another process just created or upgraded it, and that process then holds the lock.
const OPEN_ATTEMPTS: usize = 8;

/// Why the fence state file cannot be used.
#[derive(Debug, Error)]
pub enum FenceFileError {
    /// Another process uses the file.
    #[error("fence state file {path} is in use by another process; give each server its own file")]
    Locked {
        /// The file.
        path: PathBuf,
    },
    /// The content cannot be trusted, and guessing could give out a fence twice.
    #[error(
        "fence state file {path} is damaged: {reason}; restore it from a backup, or, if the clock \
         of this machine has not been set back since the last start, move it away and start again: \
         fences then go on from the clock"
    )]
    Corrupt {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file is whole but its format is not known here.
    #[error(
        "fence state file {path} has format version {version}, this server knows only version \
         {VERSION}; start the newer server that wrote it"
    )]
    UnknownVersion {
        /// The file.
        path: PathBuf,
        /// The version it claims.
        version: u32,
    },
    /// The operating system refused.
    #[error("cannot {body} fence state file {path}: {error}")]
    Io {
        /// What was tried.
        body: &'static str,
        /// The file.
        path: PathBuf,
        /// The answer of the system.
        error: io::Error,
    },
}

/// An open fence state file, locked for as long as this value lives.
#[derive(Debug)]
pub struct FenceFile {
    file: File,
    /// What is known to be on disk. The next write goes to the *other* slot, also after a failure:
    /// a failed write or sync leaves that slot in an unknown state, and this record is the only
    /// good one.
    durable: Record,
}

impl FenceFile {
    /// Opens, creates or upgrades the file and locks it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, FenceFileError> {
        let path = path.as_ref();
        for _ in 0..OPEN_ATTEMPTS {
            let opened = match OpenOptions::new().read(true).write(true).open(path) {
                Ok(file) => Self::load(file, path)?,
                Err(error) if error.kind() == ErrorKind::NotFound => Self::create(path)?,
                Err(error) => return Err(failed("open", path)(error)),
            };
            if let Some(opened) = opened {
                return Ok(opened);
            }
        }
        // A link that leads nowhere, for one: it cannot be opened and its name cannot be taken.
        Err(failed("open", path)(io::Error::other("the name exists but leads to no stable file")))
    }

    /// The end of the range of fences that may be in use: the next one to give out is not below it.
    pub fn ceiling(&self) -> u64 {
        self.durable.ceiling
    }

    /// The largest lease ever granted, in nanoseconds, as far as it was reported.
    pub fn lease_max_ns(&self) -> u64 {
        self.durable.lease_max_ns
    }

    /// Makes both values durable before it returns. Neither ever falls: a lower one keeps what is
    /// stored.
    ///
    /// After an error the old values stand, in memory and on disk, and the call may be repeated.
    pub fn reserve(&mut self, ceiling: u64, lease_max_ns: u64) -> io::Result<()> {
        let next = Record {
            sequence: self.durable.sequence + 1,
            ceiling: ceiling.max(self.durable.ceiling),
            lease_max_ns: lease_max_ns.max(self.durable.lease_max_ns),
        };
        if (next.ceiling, next.lease_max_ns) == (self.durable.ceiling, self.durable.lease_max_ns) {
            return Ok(());
        }
        self.write(next)?;
        self.durable = next;
        Ok(())
    }

    /// Puts a record into its slot and waits until it is on disk.
    fn write(&mut self, record: Record) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(record.offset() as u64))?;
        self.file.write_all(&record.encode())?;
        self.file.sync_data()
    }

    /// Takes over an existing file. `None` means that the name leads to another file by now.
    fn load(mut file: File, path: &Path) -> Result<Option<Self>, FenceFileError> {
        if !file.metadata().map_err(failed("inspect", path))?.is_file() {
            return Err(corrupt(path, "it is not a regular file"));
        }
        lock(&file, path)?;
        // An upgrade may have put a new file in place after we opened this one. The lock of a file
        // without a name keeps nobody out.
        if !is_same_file(&file, path).map_err(failed("inspect", path))? {
            return Ok(None);
        }

        let mut content = Vec::new();
        Read::by_ref(&mut file)
            .take(FILE_BYTES as u64 + 1)
            .read_to_end(&mut content)
            .map_err(failed("read", path))?;
        if let Ok(legacy) = <[u8; LEGACY_BYTES]>::try_from(&content[..]) {
            // `file` stays locked until the new one, locked as well, has taken its name.
            return Self::upgrade(u64::from_be_bytes(legacy), path).map(Some);
        }
        let mut loaded = Self { durable: newest_record(&content, path)?, file };
        // What was read may exist in memory only, if the last owner died before its sync or its
        // sync failed. The next write overwrites the other slot, so this one must be on disk first.
        loaded.write(loaded.durable).map_err(failed("write", path))?;
        fs::canonicalize(path)
            .and_then(|target| sync_directory(&target))
            .map_err(failed("sync the directory of", path))?;
        Ok(Some(loaded))
    }

    /// Publishes a new file. `None` means that somebody else was faster.
    fn create(path: &Path) -> Result<Option<Self>, FenceFileError> {
        let (aside, created) = Self::write_aside(0, path)?;
        // A link, unlike a rename, never replaces a file that another server has published
        // meanwhile.
        let linked = fs::hard_link(&aside.0, path);
        drop(aside);
        match linked {
            Ok(()) => {
                sync_directory(path).map_err(failed("publish", path))?;
                Ok(Some(created))
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(None),
            Err(error) => Err(failed("create", path)(error)),
        }
    }

    /// Replaces the format of development builds.
    fn upgrade(ceiling: u64, path: &Path) -> Result<Self, FenceFileError> {
        // Through a link, so that the file itself is replaced and not the link to it.
        let target = fs::canonicalize(path).map_err(failed("upgrade", path))?;
        let (aside, upgraded) = Self::write_aside(ceiling, &target)?;
        fs::rename(&aside.0, &target).map_err(failed("upgrade", path))?;
        sync_directory(&target).map_err(failed("upgrade", path))?;
        Ok(upgraded)
    }

    /// A complete, synced and locked file beside `path`, so that the name never stands for half a
    /// file.
    fn write_aside(ceiling: u64, path: &Path) -> Result<(Aside, Self), FenceFileError> {
        let (aside, mut file) = Aside::create(path).map_err(failed("create", path))?;
        lock(&file, path)?;
        // Both slots, so that from now on a bad slot always means an interrupted write or damage.
        let older = Record { sequence: 1, ceiling, lease_max_ns: 0 };
        let durable = Record { sequence: 2, ..older };
        let mut content = vec![0; FILE_BYTES];
        for record in [older, durable] {
            content[record.offset()..][..RECORD_BYTES].copy_from_slice(&record.encode());
        }
        file.write_all(&content).and_then(|()| file.sync_all()).map_err(failed("write", path))?;
        Ok((aside, Self { file, durable }))
    }
}

/// The content of one slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Record {
    sequence: u64,
    ceiling: u64,
    lease_max_ns: u64,
}

/// Why a slot does not count.
enum BadSlot {
    /// An interrupted write, or damage.
    Damaged,
    /// Whole, but of another version.
    Version(u32),
}

impl Record {
    /// Where the record belongs. Two records in a row never share a slot.
    fn offset(&self) -> usize {
        if self.sequence % 2 == 1 { 0 } else { SLOT_STRIDE }
    }

    fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
        bytes[12..20].copy_from_slice(&self.sequence.to_be_bytes());
        bytes[20..28].copy_from_slice(&self.ceiling.to_be_bytes());
        bytes[28..36].copy_from_slice(&self.lease_max_ns.to_be_bytes());
        let checksum = crc32fast::hash(&bytes[..CHECKED_BYTES]);
        bytes[CHECKED_BYTES..].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }

    /// Reads the record at `offset` of the file.
    fn decode(content: &[u8], offset: usize) -> Result<Self, BadSlot> {
        let bytes = &content[offset..][..RECORD_BYTES];
        let u32_at = |at: usize| u32::from_be_bytes(array_at(bytes, at));
        let u64_at = |at: usize| u64::from_be_bytes(array_at(bytes, at));
        if bytes[..8] != MAGIC || u32_at(CHECKED_BYTES) != crc32fast::hash(&bytes[..CHECKED_BYTES])
        {
            return Err(BadSlot::Damaged);
        }
        // After the checksum: a damaged version field must not look like a newer server.
        if u32_at(8) != VERSION {
            return Err(BadSlot::Version(u32_at(8)));
        }
        let record = Self { sequence: u64_at(12), ceiling: u64_at(20), lease_max_ns: u64_at(28) };
        // A whole record in the wrong place was not put there by us.
        if record.offset() == offset { Ok(record) } else { Err(BadSlot::Damaged) }
    }
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("a slice of N bytes fills an array of N bytes")
}

/// The record that counts.
fn newest_record(content: &[u8], path: &Path) -> Result<Record, FenceFileError> {
    if content.len() != FILE_BYTES {
        let size = match content.len() {
            0 => "it is empty".to_owned(),
            size if size > FILE_BYTES => format!("it is longer than {FILE_BYTES} bytes"),
            size => format!("it has {size} bytes instead of {FILE_BYTES}"),
        };
        return Err(corrupt(path, size));
    }
    let mut newest: Option<Record> = None;
    for offset in [0, SLOT_STRIDE] {
        match Record::decode(content, offset) {
            Ok(record) => {
                newest = newest.filter(|other| other.sequence > record.sequence).or(Some(record));
            }
            // Not even if the other slot is good: the newer server may have gone far beyond it.
            Err(BadSlot::Version(version)) => {
                return Err(FenceFileError::UnknownVersion { path: path.to_owned(), version });
            }
            // One slot like this is what an interrupted write leaves behind.
            Err(BadSlot::Damaged) => (),
        }
    }
    newest.ok_or_else(|| corrupt(path, "neither slot holds a valid record"))
}

fn lock(file: &File, path: &Path) -> Result<(), FenceFileError> {
    match file.try_lock() {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => Err(FenceFileError::Locked { path: path.to_owned() }),
        Err(TryLockError::Error(error)) => Err(failed("lock", path)(error)),
    }
}

/// Whether `path` still leads to `file`.
#[cfg(unix)]
fn is_same_file(file: &File, path: &Path) -> io::Result<bool> {
    use std::os::unix::fs::MetadataExt;

    let ours = file.metadata()?;
    match fs::metadata(path) {
        Ok(named) => Ok((named.dev(), named.ino()) == (ours.dev(), ours.ino())),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

/// Other systems do not let go of the name of an open file, so it cannot have changed.
#[cfg(not(unix))]
fn is_same_file(_: &File, _: &Path) -> io::Result<bool> {
    Ok(true)
}

/// Makes a new name durable: syncing the file alone does not keep its entry in the directory.
fn sync_directory(path: &Path) -> io::Result<()> {
    if cfg!(unix) { File::open(directory_of(path))?.sync_all() } else { Ok(()) }
}

fn directory_of(path: &Path) -> &Path {
    // The parent of a bare file name is the empty path, which cannot be opened.
    path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// The name of an unfinished file, removed again when dropped. After a rename it is gone already.
struct Aside(PathBuf);

impl Aside {
    fn create(path: &Path) -> io::Result<(Self, File)> {
        static CREATED: AtomicU64 = AtomicU64::new(0);

        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file_name = path
            .file_name()
            .ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the path names no file"))?;
        loop {
            let number = CREATED.fetch_add(1, Ordering::Relaxed);
            let mut name = OsString::from(file_name);
            name.push(format!(".{}.{number}.tmp", std::process::id()));
            let aside = directory_of(path).join(name);
            match options.open(&aside) {
                Ok(file) => return Ok((Self(aside), file)),
                // Left by a crash of a process with our id, which is common in containers.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => (),
                Err(error) => return Err(error),
            }
        }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // A file that stays behind is litter, not an error.
        let _ = fs::remove_file(&self.0);
    }
}

fn corrupt(path: &Path, reason: impl Into<String>) -> FenceFileError {
    FenceFileError::Corrupt { path: path.to_owned(), reason: reason.into() }
}

fn failed(body: &'static str, path: &Path) -> impl FnOnce(io::Error) -> FenceFileError {
    let path = path.to_owned();
    move |error| FenceFileError::Io { body, path, error }
}

#[cfg(test)]
mod tests {
    use dflockd_testkit::Dir;

    use super::*;

    /// The file of a test in its directory.
    fn file_in(dir: &Dir) -> PathBuf {
        dir.path("fence")
    }

    fn values(file: &FenceFile) -> (u64, u64) {
        (file.ceiling(), file.lease_max_ns())
    }

    /// Opens a file with this content; gives ceiling and lease, or the error as text.
    fn open_content(dir: &Dir, content: &[u8]) -> Result<(u64, u64), String> {
        fs::write(file_in(dir), content).unwrap();
        FenceFile::open(file_in(dir)).map(|file| values(&file)).map_err(|error| error.to_string())
    }

    #[track_caller]
    fn check_damaged(dir: &Dir, content: &[u8], reason: &str) {
        let error = open_content(dir, content).unwrap_err();
        let start = format!("fence state file {} is damaged: {reason}", file_in(dir).display());
        assert!(error.starts_with(&start), "{error}");
        assert!(error.contains("restore it from a backup"), "{error}");
    }

    /// A file with two reservations: (100, 7) in the first slot, (200, 9) in the second.
    fn two_reservations(dir: &Dir) -> Vec<u8> {
        let mut file = FenceFile::open(file_in(dir)).unwrap();
        file.reserve(100, 7).unwrap();
        file.reserve(200, 9).unwrap();
        fs::read(file_in(dir)).unwrap()
    }

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn values_survive() {
        let dir = Dir::new();
        let mut file = FenceFile::open(file_in(&dir)).unwrap();
        assert_eq!(values(&file), (0, 0));
        for round in 1..10 {
            file.reserve(round * 1000, round).unwrap();
            assert_eq!(values(&file), (round * 1000, round));
            drop(file);
            file = FenceFile::open(file_in(&dir)).unwrap();
            assert_eq!(values(&file), (round * 1000, round));
        }
        file.reserve(u64::MAX, u64::MAX).unwrap();
        drop(file);
        assert_eq!(values(&FenceFile::open(file_in(&dir)).unwrap()), (u64::MAX, u64::MAX));
        assert_eq!(dir.names(), ["fence"]);
    }

    #[test]
    fn values_never_fall() {
        let dir = Dir::new();
        let mut file = FenceFile::open(file_in(&dir)).unwrap();
        file.reserve(100, 7).unwrap();
        file.reserve(50, 9).unwrap();
        assert_eq!(values(&file), (100, 9));
        let before = fs::read(file_in(&dir)).unwrap();
        file.reserve(50, 5).unwrap();
        assert_eq!(fs::read(file_in(&dir)).unwrap(), before);
        drop(file);
        assert_eq!(values(&FenceFile::open(file_in(&dir)).unwrap()), (100, 9));
    }

    #[test]
    fn golden_bytes() {
        let dir = Dir::new();
        drop(FenceFile::open(file_in(&dir)).unwrap());
        let content = fs::read(file_in(&dir)).unwrap();
        assert_eq!(content.len(), 8192);
        let head = "64666c6b666e6365" /* magic */.to_owned() + "00000001" /* version */;
        let first = head.clone() + "0000000000000001" + "0000000000000000" + "0000000000000000";
        let second = head.clone() + "0000000000000002" + "0000000000000000" + "0000000000000000";
        assert_eq!(hex(&content[..40]), first + "a582ed74");
        assert_eq!(hex(&content[4096..4136]), second + "f618b6f0");

        let record = Record { sequence: 0x0102, ceiling: 0x1122_3344_5566_7788, lease_max_ns: 33 };
        let golden =
            head + "0000000000000102" + "1122334455667788" + "0000000000000021" + "420de7cc";
        assert_eq!(hex(&record.encode()), golden);
        // The checksum is the common CRC-32, which other tools can verify.
        assert_eq!(crc32fast::hash(b"123456789"), 0xcbf4_3926);
    }

    #[test]
    fn writes_alternate() {
        let dir = Dir::new();
        let mut file = FenceFile::open(file_in(&dir)).unwrap();
        let mut before = fs::read(file_in(&dir)).unwrap();
        for round in 1..=6_u32 {
            file.reserve(round.into(), 0).unwrap();
            let after = fs::read(file_in(&dir)).unwrap();
            let written = if round % 2 == 1 { 0 } else { SLOT_STRIDE };
            let kept = SLOT_STRIDE - written;
            assert_eq!(before[kept..][..SLOT_STRIDE], after[kept..][..SLOT_STRIDE]);
            assert_ne!(before[written..][..SLOT_STRIDE], after[written..][..SLOT_STRIDE]);
            before = after;
        }
    }

    #[test]
    fn any_damaged_byte_of_a_slot_leaves_the_other() {
        let dir = Dir::new();
        let good = two_reservations(&dir);
        for (slot, other) in [(0, (200, 9)), (SLOT_STRIDE, (100, 7))] {
            for at in slot..slot + RECORD_BYTES {
                for flip in [0x01, 0x80, 0xff] {
                    let mut content = good.clone();
                    content[at] ^= flip;
                    assert_eq!(open_content(&dir, &content), Ok(other), "byte {at}");
                }
            }
        }
        for at in 0..RECORD_BYTES {
            let mut content = good.clone();
            content[at] ^= 1;
            content[SLOT_STRIDE + RECORD_BYTES - 1 - at] ^= 1;
            check_damaged(&dir, &content, "neither slot holds a valid record");
        }
    }

    #[test]
    fn torn_write_at_any_length_keeps_the_older_slot() {
        let dir = Dir::new();
        let before = two_reservations(&dir);
        let mut file = FenceFile::open(file_in(&dir)).unwrap();
        file.reserve(300, 11).unwrap();
        drop(file);
        let after = fs::read(file_in(&dir)).unwrap();
        for length in 0..=RECORD_BYTES {
            let mut torn = before.clone();
            torn[..length].copy_from_slice(&after[..length]);
            let whole = torn[..RECORD_BYTES] == after[..RECORD_BYTES];
            let expected = if whole { (300, 11) } else { (200, 9) };
            assert_eq!(open_content(&dir, &torn), Ok(expected), "length {length}");
            // The repaired file takes the next write where the torn one was.
            let mut file = FenceFile::open(file_in(&dir)).unwrap();
            file.reserve(400, 0).unwrap();
            drop(file);
            assert_eq!(FenceFile::open(file_in(&dir)).unwrap().ceiling(), 400);
        }
    }

    #[test]
    fn wrong_sizes_are_damage() {
        let dir = Dir::new();
        let good = two_reservations(&dir);
        check_damaged(&dir, &[], "it is empty");
        for length in (1..good.len()).filter(|length| *length != LEGACY_BYTES) {
            let reason = format!("it has {length} bytes instead of 8192");
            check_damaged(&dir, &good[..length], &reason);
        }
        check_damaged(&dir, &[&good[..], &[0]].concat(), "it is longer than 8192 bytes");
        check_damaged(&dir, &[0; FILE_BYTES], "neither slot holds a valid record");
        assert_eq!(open_content(&dir, &good), Ok((200, 9)));
    }

    #[test]
    fn swapped_slots_are_damage() {
        let dir = Dir::new();
        let mut content = two_reservations(&dir);
        content.rotate_left(SLOT_STRIDE);
        check_damaged(&dir, &content, "neither slot holds a valid record");
    }

    #[test]
    fn unknown_version_is_refused_even_beside_a_good_slot() {
        let dir = Dir::new();
        let good = two_reservations(&dir);
        for slot in [0, SLOT_STRIDE] {
            let mut content = good.clone();
            let bytes = &mut content[slot..][..RECORD_BYTES];
            bytes[11] = 2;
            let checksum = crc32fast::hash(&bytes[..CHECKED_BYTES]);
            bytes[CHECKED_BYTES..].copy_from_slice(&checksum.to_be_bytes());
            let error = open_content(&dir, &content).unwrap_err();
            assert!(error.contains("format version 2") && error.contains("newer"), "{error}");
            assert!(error.contains(file_in(&dir).to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn second_opener_is_refused() {
        let dir = Dir::new();
        // Both a file just created and one that existed before.
        for _ in 0..2 {
            let first = FenceFile::open(file_in(&dir)).unwrap();
            let error = FenceFile::open(file_in(&dir)).unwrap_err();
            assert!(matches!(error, FenceFileError::Locked { .. }), "{error}");
            drop(first);
        }
        FenceFile::open(file_in(&dir)).unwrap();
    }

    #[test]
    fn only_one_of_many_creators_wins() {
        let dir = Dir::new();
        let path = file_in(&dir);
        let opened: Vec<_> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..16).map(|_| scope.spawn(|| FenceFile::open(&path))).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        let refused = |r: &Result<_, _>| matches!(r, Err(FenceFileError::Locked { .. }));
        assert_eq!(opened.iter().filter(|result| refused(result)).count(), 15, "{opened:?}");
        assert_eq!(dir.names(), ["fence"]);
    }

    #[test]
    fn file_of_development_builds_is_upgraded() {
        let dir = Dir::new();
        fs::write(file_in(&dir), 0x0102_0304_0506_0708_u64.to_be_bytes()).unwrap();
        let upgraded = FenceFile::open(file_in(&dir)).unwrap();
        assert_eq!(values(&upgraded), (0x0102_0304_0506_0708, 0));
        assert!(matches!(FenceFile::open(file_in(&dir)), Err(FenceFileError::Locked { .. })));
        drop(upgraded);
        assert_eq!(fs::metadata(file_in(&dir)).unwrap().len(), 8192);
        assert_eq!(FenceFile::open(file_in(&dir)).unwrap().ceiling(), 0x0102_0304_0506_0708);
        assert_eq!(dir.names(), ["fence"]);
    }

    #[test]
    fn upgrade_waits_for_the_owner() {
        let dir = Dir::new();
        fs::write(file_in(&dir), 7_u64.to_be_bytes()).unwrap();
        let owner = File::open(file_in(&dir)).unwrap();
        owner.try_lock().unwrap();
        assert!(matches!(FenceFile::open(file_in(&dir)), Err(FenceFileError::Locked { .. })));
        assert_eq!(fs::read(file_in(&dir)).unwrap(), 7_u64.to_be_bytes());
    }

    #[test]
    fn replaced_file_is_opened_anew() {
        let dir = Dir::new();
        let good = two_reservations(&dir);
        let stale = OpenOptions::new().read(true).write(true).open(file_in(&dir)).unwrap();
        fs::write(dir.path("new"), &good).unwrap();
        fs::rename(dir.path("new"), file_in(&dir)).unwrap();
        assert!(FenceFile::load(stale, &file_in(&dir)).unwrap().is_none());
    }

    #[test]
    fn failed_write_is_repeated_in_the_same_slot() {
        let dir = Dir::new();
        let good = two_reservations(&dir);
        let mut file = FenceFile::open(file_in(&dir)).unwrap();
        // A handle that cannot write makes the system refuse.
        let writable = std::mem::replace(&mut file.file, File::open(file_in(&dir)).unwrap());
        for _ in 0..3 {
            file.reserve(300, 11).unwrap_err();
            assert_eq!(values(&file), (200, 9));
        }
        file.file = writable;
        file.reserve(400, 12).unwrap();
        let after = fs::read(file_in(&dir)).unwrap();
        assert_eq!(after[SLOT_STRIDE..], good[SLOT_STRIDE..]);
        drop(file);
        assert_eq!(open_content(&dir, &after), Ok((400, 12)));
    }

    #[test]
    fn what_cannot_be_opened_is_named() {
        let dir = Dir::new();
        let error = FenceFile::open(dir.path("missing/fence")).unwrap_err();
        assert!(error.to_string().starts_with("cannot create fence state file "), "{error}");
        let error = FenceFile::open(dir.path("")).unwrap_err();
        assert!(error.to_string().starts_with("cannot open fence state file "), "{error}");
    }

    #[cfg(unix)]
    #[test]
    fn permissions_and_links() {
        use std::os::unix::fs::{PermissionsExt, symlink};

        let dir = Dir::new();
        let mode = || fs::metadata(file_in(&dir)).unwrap().permissions().mode() & 0o777;
        drop(FenceFile::open(file_in(&dir)).unwrap());
        assert_eq!(mode(), 0o600);
        fs::write(file_in(&dir), 7_u64.to_be_bytes()).unwrap();
        let link = dir.path("link");
        symlink(file_in(&dir), &link).unwrap();
        assert_eq!(FenceFile::open(&link).unwrap().ceiling(), 7);
        assert_eq!(mode(), 0o600);
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        assert_eq!(FenceFile::open(file_in(&dir)).unwrap().ceiling(), 7);

        let dangling = dir.path("dangling");
        symlink(dir.path("nowhere"), &dangling).unwrap();
        let error = FenceFile::open(&dangling).unwrap_err();
        assert!(error.to_string().contains("leads to no stable file"), "{error}");
        assert_eq!(dir.names(), ["dangling", "fence", "link"]);
        let error = FenceFile::open("/dev/null").unwrap_err();
        assert!(error.to_string().contains("not a regular file"), "{error}");
    }
}
