//! The few file operations that the durable log needs, and the real ones.
//!
//! [`Disk`] is one directory of files without subdirectories. The log and the snapshots reach files through it only, so
//! the simulator and the tests can put a directory in its place that loses what was not synced. Nothing here knows what
//! the files mean.

use std::fs::{self, DirBuilder, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;
use rustix::io::Errno;
use thiserror::Error;

/// The files of one data directory.
pub trait Disk {
    /// Names of all files.
    fn list(&self) -> io::Result<Vec<String>>;

    /// The length of a file in bytes.
    fn len(&self, name: &str) -> io::Result<u64>;

    /// Fills the whole buffer from `offset`.
    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()>;

    /// A new file of `len` zero bytes, really allocated (not sparse). Not durable before `sync` + `sync_dir`.
    fn create(&mut self, name: &str, len: u64) -> io::Result<()>;

    /// Writes at `offset`, growing the file if needed. Not durable before `sync`.
    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()>;

    /// Makes the content of a file durable (fdatasync).
    fn sync(&mut self, name: &str) -> io::Result<()>;

    /// Gives a file another name; a file that has it already is replaced.
    fn rename(&mut self, from: &str, to: &str) -> io::Result<()>;

    /// Removes a file.
    fn remove(&mut self, name: &str) -> io::Result<()>;

    /// Makes creations, renames and removals durable.
    fn sync_dir(&mut self) -> io::Result<()>;
}

/// Who has a lock on this file owns the directory.
const LOCK: &str = "LOCK";

/// Enough for the segment in use, the next one, and a snapshot or two.
const OPEN_FILES_MAX: usize = 8;

const ZEROS_BYTES: usize = 1 << 20;

/// A directory of the file system, locked against other processes.
///
/// Clones are further handles on the same directory, for other threads. The lock lasts until the last one is dropped.
#[derive(Clone, Debug)]
pub struct RealDisk {
    directory: Arc<Directory>,
}

#[derive(Debug)]
struct Directory {
    path: PathBuf,
    /// For syncing it.
    handle: File,
    /// Locked as long as it is open.
    _lock: File,
    /// The files used last, the latest at the end: opening one for each write would cost more than the write.
    ///
    /// Shared by all clones, so that a file renamed or removed through one is not met by its old name in another.
    open: Mutex<Vec<(String, Arc<File>)>>,
}

impl RealDisk {
    /// Takes possession of a directory, and creates it if it is missing.
    pub fn open(path: &Path) -> io::Result<Self> {
        if !path.is_dir() {
            create_directory(path).map_err(failed("create directory", path))?;
        }
        let lock_path = path.join(LOCK);
        let lock = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&lock_path)
            .map_err(failed("open", &lock_path))?;
        match lock.try_lock() {
            Ok(()) => (),
            Err(TryLockError::WouldBlock) => {
                let message = format!(
                    "data directory {} is in use by another process; give each node its own",
                    path.display()
                );
                return Err(io::Error::new(ErrorKind::WouldBlock, message));
            }
            Err(TryLockError::Error(error)) => return Err(failed("lock", &lock_path)(error)),
        }
        let handle = File::open(path).map_err(failed("open directory", path))?;
        let directory =
            Directory { path: path.to_owned(), handle, _lock: lock, open: Mutex::default() };
        Ok(Self { directory: Arc::new(directory) })
    }

    fn path(&self, name: &str) -> PathBuf {
        assert!(!name.contains('/'), "{name:?} leads out of the data directory");
        self.directory.path.join(name)
    }

    /// The open file of this name.
    fn file(&self, name: &str) -> io::Result<Arc<File>> {
        let mut open = self.directory.open.lock();
        if let Some(at) = open.iter().position(|(known, _)| known == name) {
            // To the end: the front is what goes when there are too many.
            open[at..].rotate_left(1);
        } else {
            let path = self.path(name);
            let file = OpenOptions::new().read(true).write(true).open(&path);
            keep(&mut open, name, file.map_err(failed("open", &path))?);
        }
        Ok(Arc::clone(&open.last().expect("just put there").1))
    }
}

impl Disk for RealDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        let path = &self.directory.path;
        let mut names = Vec::new();
        for entry in fs::read_dir(path).map_err(failed("list", path))? {
            let entry = entry.map_err(failed("list", path))?;
            let is_file = entry.file_type().map_err(failed("list", path))?.is_file();
            // Names that are no text are not ours.
            if let (true, Ok(name)) = (is_file, entry.file_name().into_string())
                && name != LOCK
            {
                names.push(name);
            }
        }
        names.sort();
        Ok(names)
    }

    fn len(&self, name: &str) -> io::Result<u64> {
        let metadata = self.file(name)?.metadata().map_err(failed("inspect", &self.path(name)))?;
        Ok(metadata.len())
    }

    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        self.file(name)?.read_exact_at(buffer, offset).map_err(failed("read", &self.path(name)))
    }

    fn create(&mut self, name: &str, len: u64) -> io::Result<()> {
        let path = self.path(name);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed("create", &path))?;
        if let Err(error) = write_zeros(&file, len) {
            // Half a file would keep the room that is missing.
            let _ = fs::remove_file(&path);
            return Err(failed("allocate", &path)(error));
        }
        keep(&mut self.directory.open.lock(), name, file);
        Ok(())
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.file(name)?.write_all_at(bytes, offset).map_err(failed("write", &self.path(name)))
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.file(name)?.sync_data().map_err(failed("sync", &self.path(name)))
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let mut open = self.directory.open.lock();
        fs::rename(self.path(from), self.path(to)).map_err(failed("rename", &self.path(from)))?;
        open.retain(|(known, _)| known != to);
        if let Some((known, _)) = open.iter_mut().find(|(known, _)| known == from) {
            to.clone_into(known);
        }
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        fs::remove_file(self.path(name)).map_err(failed("remove", &self.path(name)))?;
        let mut open = self.directory.open.lock();
        let at = open.iter().position(|(known, _)| known == name);
        let removed = at.map(|at| open.remove(at));
        // To give the room of a large file back takes long: others must be able to go on.
        drop(open);
        drop(removed);
        Ok(())
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        self.directory.handle.sync_all().map_err(failed("sync directory", &self.directory.path))
    }
}

/// Creates a directory and those above it, durably, for the eyes of its owner only: entries hold what clients sent.
fn create_directory(path: &Path) -> io::Result<()> {
    // The parent of a bare name is the empty path, which cannot be opened.
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    let parent = parent.unwrap_or(Path::new("."));
    if !parent.is_dir() {
        create_directory(parent)?;
    }
    DirBuilder::new().mode(0o700).create(path)?;
    File::open(parent)?.sync_all()
}

fn keep(open: &mut Vec<(String, Arc<File>)>, name: &str, file: File) {
    if open.len() == OPEN_FILES_MAX {
        open.remove(0);
    }
    open.push((name.to_owned(), Arc::new(file)));
}

/// Real zeros: a hole, or room that is reserved but was never written, makes each later write change the file's map of
/// blocks, and then each sync has to write that as well.
fn write_zeros(file: &File, len: u64) -> io::Result<()> {
    let zeros = vec![0; ZEROS_BYTES.min(usize::try_from(len).unwrap_or(usize::MAX))];
    let mut written = 0;
    while written < len {
        let step = usize::try_from(len - written).map_or(zeros.len(), |rest| rest.min(zeros.len()));
        file.write_all_at(&zeros[..step], written)?;
        written += step as u64;
    }
    Ok(())
}

/// Whether the operating system refused to open one more file: the process, or the whole system, has too many open.
/// What was asked for was not begun then, and may be asked for again.
#[must_use]
pub fn is_out_of_descriptors(error: &io::Error) -> bool {
    let inner = error.get_ref().and_then(|inner| inner.downcast_ref::<OnFile>());
    let code = inner.map_or(error, |inner| &inner.error).raw_os_error();
    [Errno::MFILE, Errno::NFILE].map(|errno| Some(errno.raw_os_error())).contains(&code)
}

/// Says what failed on which file, and keeps the kind of the error. A full quota is a full disk to us.
fn failed(body: &'static str, path: &Path) -> impl FnOnce(io::Error) -> io::Error {
    let path = path.to_owned();
    move |error| {
        let is_quota = error.kind() == ErrorKind::QuotaExceeded;
        let kind = if is_quota { ErrorKind::StorageFull } else { error.kind() };
        io::Error::new(kind, OnFile { body, path, error })
    }
}

/// What the operating system said about a file. Kept as it is, because not every code has a kind.
#[derive(Debug, Error)]
#[error("cannot {body} {}: {error}", path.display())]
struct OnFile {
    body: &'static str,
    path: PathBuf,
    error: io::Error,
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use dflockd_testkit::Dir;

    use super::*;

    fn content(disk: &RealDisk, name: &str) -> Vec<u8> {
        let mut bytes = vec![0xee; usize::try_from(disk.len(name).unwrap()).unwrap()];
        disk.read(name, 0, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn only_the_owner_may_look() {
        let dir = Dir::new();
        let mut disk = RealDisk::open(&dir.path("a/b")).unwrap();
        disk.create("file", 10).unwrap();
        let mode = |path: &str| fs::metadata(dir.path(path)).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode("a/b"), 0o700);
        assert_eq!(mode("a/b/file"), 0o600);
        assert_eq!(mode("a/b/LOCK"), 0o600);
    }

    #[test]
    fn second_process_is_refused_until_the_last_handle_goes() {
        let dir = Dir::new();
        let first = RealDisk::open(&dir.path("data")).unwrap();
        let second_handle = first.clone();
        drop(first);
        let error = RealDisk::open(&dir.path("data")).unwrap_err();
        assert!(error.to_string().contains("in use by another process"), "{error}");
        assert!(error.to_string().contains(&dir.name("data")), "{error}");
        drop(second_handle);
        RealDisk::open(&dir.path("data")).unwrap();
    }

    #[test]
    fn files_are_created_written_grown_renamed_and_removed() {
        let dir = Dir::new();
        let mut disk = RealDisk::open(&dir.path("data")).unwrap();
        let other = disk.clone();
        disk.create("a", 6).unwrap();
        assert_eq!(content(&disk, "a"), [0; 6]);
        assert_eq!(disk.create("a", 6).unwrap_err().kind(), ErrorKind::AlreadyExists);
        disk.write("a", 4, b"long").unwrap();
        assert_eq!(content(&other, "a"), b"\0\0\0\0long");

        disk.create("b", 1).unwrap();
        disk.create("c", 0).unwrap();
        disk.write("c", 0, b"other").unwrap();
        disk.sync("a").unwrap();
        disk.rename("a", "b").unwrap();
        disk.sync_dir().unwrap();
        assert_eq!(disk.list().unwrap(), ["b", "c"]);
        assert_eq!(disk.len("a").unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(content(&disk, "c"), b"other");
        disk.remove("c").unwrap();
        // Through either handle the name leads to the new file, though both had the old one open.
        assert_eq!(content(&disk, "b"), b"\0\0\0\0long");
        assert_eq!(content(&other, "b"), b"\0\0\0\0long");

        disk.remove("b").unwrap();
        assert_eq!(other.len("b").unwrap_err().kind(), ErrorKind::NotFound);
        assert!(disk.list().unwrap().is_empty());
        let mut byte = [0];
        let error = disk.read("missing", 0, &mut byte).unwrap_err();
        assert!(error.to_string().contains("missing"), "{error}");
        // What a sync does can not be seen without a power cut, only that it asks for the file.
        assert_eq!(disk.sync("missing").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_refused_descriptor_is_told_from_other_failures() {
        let path = Path::new("file");
        for errno in [Errno::MFILE, Errno::NFILE] {
            let error = io::Error::from_raw_os_error(errno.raw_os_error());
            assert!(is_out_of_descriptors(&error));
            let error = failed("create", path)(error);
            assert!(is_out_of_descriptors(&error), "{error}");
            assert!(error.to_string().starts_with("cannot create file: "), "{error}");
        }
        for errno in [Errno::NOSPC, Errno::IO, Errno::ACCESS, Errno::BUSY] {
            let error = io::Error::from_raw_os_error(errno.raw_os_error());
            assert!(!is_out_of_descriptors(&failed("create", path)(error)));
        }
        assert!(!is_out_of_descriptors(&io::Error::other("Too many open files")));
    }

    #[test]
    fn more_files_than_are_kept_open() {
        let dir = Dir::new();
        let mut disk = RealDisk::open(&dir.path("data")).unwrap();
        for round in 0..3_u8 {
            for file in 0..20_u8 {
                let name = format!("file-{file}");
                if round == 0 {
                    disk.create(&name, 3).unwrap();
                }
                disk.write(&name, round.into(), &[file]).unwrap();
            }
        }
        for file in 0..20_u8 {
            assert_eq!(content(&disk, &format!("file-{file}")), [file; 3]);
        }
        assert!(disk.directory.open.lock().len() <= OPEN_FILES_MAX);
    }
}
