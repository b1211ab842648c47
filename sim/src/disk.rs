//! A disk that forgets: what was not synced may be kept, lost or torn by a crash, sector by sector.
//!
//! Everything done to it goes into a journal. The caller says up to where the journal has really happened
//! ([`SimDisk::commit`]); a crash happens at any point behind that, so a crash in the middle of every
//! operation is tried
//! though the operations themselves are calls that return at once.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::rc::Rc;

use dflockd_replica::disk::Disk;

use crate::rng::Rng;

const SECTOR: usize = 512;

/// One handle on a simulated directory.
#[derive(Clone, Debug, Default)]
pub struct SimDisk(Rc<RefCell<Inner>>);

#[derive(Debug, Default)]
struct Inner {
    /// As the process sees it.
    view: BTreeMap<String, Vec<u8>>,
    journal: Vec<Op>,
    /// How many operations went before those in the journal.
    done: usize,
    platter: Platter,
    full: bool,
    fails: bool,
}

#[derive(Clone, Debug)]
enum Op {
    Create(String, usize),
    Write(String, usize, Vec<u8>),
    Sync(String),
    Rename(String, String),
    Remove(String),
    SyncDir,
}

/// What has reached the operating system, and what of it the disk itself.
#[derive(Clone, Debug, Default)]
struct Platter {
    inodes: BTreeMap<u64, Inode>,
    last_inode: u64,
    names: BTreeMap<String, u64>,
    durable_names: BTreeMap<String, u64>,
    /// Changes of names that are not durable, in order: a crash keeps some from the front.
    name_ops: Vec<Op>,
    /// The files that the creations among them made.
    created: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
struct Inode {
    synced: Vec<u8>,
    /// Sectors that differ from `synced`.
    pending: BTreeMap<usize, Vec<u8>>,
    len: usize,
}

impl Inode {
    fn content(&self) -> Vec<u8> {
        let mut content = self.synced.clone();
        content.resize(self.len, 0);
        for (&sector, bytes) in &self.pending {
            let at = sector * SECTOR;
            content[at..at + bytes.len()].copy_from_slice(bytes);
        }
        content
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.len = self.len.max(offset + bytes.len());
        let mut at = offset;
        while at < offset + bytes.len() {
            let sector = at / SECTOR;
            let begin = sector * SECTOR;
            let end = (begin + SECTOR).min(self.len);
            let upto = end.min(offset + bytes.len());
            let held = self.pending.entry(sector).or_insert_with(|| {
                self.synced.get(begin..end.min(self.synced.len())).unwrap_or_default().to_vec()
            });
            held.resize(held.len().max(end - begin), 0);
            held[at - begin..upto - begin].copy_from_slice(&bytes[at - offset..upto - offset]);
            at = upto;
        }
    }

    fn sync(&mut self) {
        self.synced.resize(self.len, 0);
        for (sector, bytes) in std::mem::take(&mut self.pending) {
            let at = sector * SECTOR;
            self.synced[at..at + bytes.len()].copy_from_slice(&bytes);
        }
    }

    /// The power goes.
    fn crash(&mut self, rng: &mut Rng) {
        if self.len > self.synced.len() {
            // The length is something about the file, written before or after its content.
            let len = match rng.below(4) {
                0 => self.synced.len(),
                1 => self.synced.len() + rng.index(self.len - self.synced.len() + 1),
                _ => self.len,
            };
            self.len = len;
            self.synced.resize(len, 0);
        }
        let all = rng.below(3);
        for (sector, bytes) in std::mem::take(&mut self.pending) {
            let at = sector * SECTOR;
            let keep = match (all, rng.below(8)) {
                (0, _) => bytes.len(),
                (_, 0..=3) => bytes.len(),
                (_, 4..=6) => 0,
                _ => rng.index(bytes.len() + 1),
            };
            let end = (at + keep).min(self.synced.len());
            if at < end {
                self.synced[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
    }
}

impl Platter {
    fn apply(&mut self, op: Op) {
        match &op {
            Op::Create(name, len) => {
                self.last_inode += 1;
                let inode = Inode { len: *len, ..Inode::default() };
                self.inodes.insert(self.last_inode, inode);
                self.names.insert(name.clone(), self.last_inode);
                self.created.push(self.last_inode);
                self.name_ops.push(op);
            }
            Op::Write(name, offset, bytes) => self.inode(name).write(*offset, bytes),
            Op::Sync(name) => self.inode(name).sync(),
            Op::Rename(from, to) => {
                let inode = self.names.remove(from).expect("it was there");
                self.names.insert(to.clone(), inode);
                self.name_ops.push(op);
            }
            Op::Remove(name) => {
                self.names.remove(name);
                self.name_ops.push(op);
            }
            Op::SyncDir => self.keep_names(usize::MAX),
        }
    }

    fn inode(&mut self, name: &str) -> &mut Inode {
        let inode = self.names.get(name).expect("it was there");
        self.inodes.get_mut(inode).expect("every name has one")
    }

    /// Makes the first changes of names durable.
    fn keep_names(&mut self, count: usize) {
        let mut created = std::mem::take(&mut self.created).into_iter();
        for op in std::mem::take(&mut self.name_ops).into_iter().take(count) {
            match op {
                Op::Create(name, _) => {
                    let inode = created.next().expect("one for each creation");
                    self.durable_names.insert(name, inode);
                }
                Op::Rename(from, to) => {
                    if let Some(inode) = self.durable_names.remove(&from) {
                        self.durable_names.insert(to, inode);
                    }
                }
                Op::Remove(name) => {
                    self.durable_names.remove(&name);
                }
                Op::Write(..) | Op::Sync(_) | Op::SyncDir => unreachable!("not about names"),
            }
        }
        let used: Vec<u64> =
            self.durable_names.values().chain(self.names.values()).copied().collect();
        self.inodes.retain(|inode, _| used.contains(inode));
    }

    fn crash(&mut self, rng: &mut Rng) {
        let count = rng.index(self.name_ops.len() + 1);
        self.keep_names(count);
        self.names = self.durable_names.clone();
        let used: Vec<u64> = self.names.values().copied().collect();
        self.inodes.retain(|inode, _| used.contains(inode));
        for inode in self.inodes.values_mut() {
            inode.crash(rng);
        }
    }

    fn view(&self) -> BTreeMap<String, Vec<u8>> {
        let content = |inode: &u64| self.inodes[inode].content();
        self.names.iter().map(|(name, inode)| (name.clone(), content(inode))).collect()
    }
}

impl SimDisk {
    /// Where the journal stands.
    #[must_use]
    pub fn position(&self) -> usize {
        let inner = self.0.borrow();
        inner.done + inner.journal.len()
    }

    /// Everything before `position` has happened.
    pub fn commit(&self, position: usize) {
        let inner = &mut *self.0.borrow_mut();
        let count = position.saturating_sub(inner.done);
        for op in inner.journal.drain(..count) {
            inner.platter.apply(op);
        }
        inner.done += count;
    }

    /// The process ends, and with `power` the machine: at some point of what is in the journal.
    pub fn crash(&self, power: bool, rng: &mut Rng) {
        let inner = &mut *self.0.borrow_mut();
        let done = rng.index(inner.journal.len() + 1);
        inner.done += inner.journal.len();
        for op in std::mem::take(&mut inner.journal).into_iter().take(done) {
            inner.platter.apply(op);
        }
        if power {
            inner.platter.crash(rng);
        }
        inner.view = inner.platter.view();
        inner.fails = false;
    }

    /// Whether there is room for new files.
    pub fn set_full(&self, full: bool) {
        self.0.borrow_mut().full = full;
    }

    /// The next sync fails.
    pub fn fail(&self) {
        self.0.borrow_mut().fails = true;
    }

    /// Whether it is full or fails.
    #[must_use]
    pub fn is_sick(&self) -> bool {
        let inner = self.0.borrow();
        inner.full || inner.fails
    }

    /// Nothing fails any more, and there is room.
    pub fn heal(&self) {
        let inner = &mut *self.0.borrow_mut();
        (inner.fails, inner.full) = (false, false);
    }

    /// A bit changes by itself. To be used on a node that is down.
    pub fn rot(&self, rng: &mut Rng) -> Option<String> {
        let inner = &mut *self.0.borrow_mut();
        let names: Vec<String> = inner.platter.names.keys().cloned().collect();
        if names.is_empty() {
            return None;
        }
        let name = rng.pick(&names).clone();
        let inode = inner.platter.inode(&name);
        inode.sync();
        let used = inode.synced.iter().rposition(|&byte| byte != 0)?;
        let at = rng.index(used + 1);
        inode.synced[at] ^= 1 << rng.below(8);
        inner.view = inner.platter.view();
        Some(format!("{name}@{at}"))
    }
}

fn missing(name: &str) -> io::Error {
    io::Error::new(ErrorKind::NotFound, format!("no file {name}"))
}

impl Disk for SimDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        Ok(self.0.borrow().view.keys().cloned().collect())
    }

    fn len(&self, name: &str) -> io::Result<u64> {
        self.0.borrow().view.get(name).map(|file| file.len() as u64).ok_or_else(|| missing(name))
    }

    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        let inner = self.0.borrow();
        let file = inner.view.get(name).ok_or_else(|| missing(name))?;
        let at = usize::try_from(offset).map_err(io::Error::other)?;
        let bytes = file.get(at..at + buffer.len()).ok_or(ErrorKind::UnexpectedEof)?;
        buffer.copy_from_slice(bytes);
        Ok(())
    }

    fn create(&mut self, name: &str, len: u64) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        if inner.view.contains_key(name) {
            return Err(ErrorKind::AlreadyExists.into());
        }
        if inner.full {
            return Err(ErrorKind::StorageFull.into());
        }
        let len = usize::try_from(len).map_err(io::Error::other)?;
        inner.view.insert(name.to_owned(), vec![0; len]);
        inner.journal.push(Op::Create(name.to_owned(), len));
        Ok(())
    }

    fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        let file = inner.view.get_mut(name).ok_or_else(|| missing(name))?;
        let at = usize::try_from(offset).map_err(io::Error::other)?;
        if file.len() < at + bytes.len() {
            if inner.full {
                return Err(ErrorKind::StorageFull.into());
            }
            file.resize(at + bytes.len(), 0);
        }
        file[at..at + bytes.len()].copy_from_slice(bytes);
        inner.journal.push(Op::Write(name.to_owned(), at, bytes.to_vec()));
        Ok(())
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        if !inner.view.contains_key(name) {
            return Err(missing(name));
        }
        if inner.fails {
            return Err(io::Error::other("the disk fails"));
        }
        inner.journal.push(Op::Sync(name.to_owned()));
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        let file = inner.view.remove(from).ok_or_else(|| missing(from))?;
        inner.view.insert(to.to_owned(), file);
        inner.journal.push(Op::Rename(from.to_owned(), to.to_owned()));
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        inner.view.remove(name).ok_or_else(|| missing(name))?;
        inner.journal.push(Op::Remove(name.to_owned()));
        Ok(())
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        let inner = &mut *self.0.borrow_mut();
        if inner.fails {
            return Err(io::Error::other("the disk fails"));
        }
        inner.journal.push(Op::SyncDir);
        Ok(())
    }
}
