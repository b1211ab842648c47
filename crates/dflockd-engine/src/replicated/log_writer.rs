//! The thread that writes the log and waits for the disk.
//!
//! The replica hands out [`LogWrite`]s in order and goes on; threads that serve clients and peers never wait for them.
//! The log thread takes all that is there, writes it, syncs once for all of it, tells the replica, and drives it for
//! what follows. With few requests at a time the answers leave from this thread, without waking another one for them;
//! under load the designated thread of the combiner writes them while this one begins the next sync. While a sync
//! hangs, requests pile up to the bounds of the replica's queue and nothing is acknowledged, but everything that needs
//! no durable entry goes on.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflockd_core::bugs::{Bug, bug};
use dflockd_replica::disk::{Disk, is_out_of_descriptors};
use dflockd_replica::log::{LogBatch, LogStore, Room};
use dflockd_replica::{Gone, LogWrite};
use parking_lot::{Condvar, Mutex};
use raft::eraftpb::SnapshotMetadata;

use super::Replicated;
use super::driver::Host;

/// How often the log thread looks whether a full disk has room again.
const ROOM_LOOK: Duration = Duration::from_secs(1);
/// Pauses between attempts to open a file while the process has no descriptor for it: each is twice as long as the one
/// before.
pub(super) const DESCRIPTOR_PAUSE_MIN: Duration = Duration::from_millis(10);
pub(super) const DESCRIPTOR_PAUSE_MAX: Duration = Duration::from_millis(500);

/// The longest wait for jobs that counts as short: it was not worth to sleep.
const WAIT_SHORT_MAX: Duration = Duration::from_micros(300);
/// After so many short waits in a row the log thread spins before it sleeps.
const SHORT_WAITS_BEFORE_SPIN: u32 = 8;
/// How long the log thread spins for jobs; if none comes, it sleeps.
const SPIN_MAX: Duration = Duration::from_micros(150);
/// If it takes longer than this until the log thread has its core again, others want it, and it does not spin.
const YIELD_MAX: Duration = Duration::from_micros(60);

/// What there is to do for the log.
pub(super) enum LogJob {
    /// To be reported to the replica.
    Write(LogWrite),
    /// A snapshot was stored beside the log, which may now follow from it.
    SnapshotStored(SnapshotMetadata),
    /// Entries before an index are not needed any more, and neither is what the replica had of them in memory.
    TruncateBefore(u64, Option<Gone>),
    /// A key and a value of the node's metadata, durable when it is written.
    Note(Vec<u8>, Vec<u8>),
    /// Obsolete files were removed: there may be room again.
    Swept,
}

/// How long the log thread waited for jobs lately, which decides whether it spins before it sleeps.
#[derive(Default)]
struct Waits {
    /// So many waits in a row were short.
    short: u32,
}

impl Waits {
    /// A wait has ended, of which a spin is a part: one that found nothing is forgiven if jobs came soon after it.
    fn ended(&mut self, took: Duration) {
        self.short = if took < WAIT_SHORT_MAX { self.short.saturating_add(1) } else { 0 };
    }

    /// Whether the next wait begins with a spin. Under load there is work when the sync ends, and the core is better
    /// used by others.
    fn want_spin(&self, is_light: bool) -> bool {
        self.short >= SHORT_WAITS_BEFORE_SPIN && is_light
    }
}

/// Whether a spin ends without jobs: it has lasted long, or it took long until the thread had its core again.
fn spin_is_over(lasted: Duration, away: Duration) -> bool {
    lasted >= SPIN_MAX || away > YIELD_MAX
}

impl LogJob {
    /// Whether it counts only when it is durable.
    fn wants_sync(&self) -> bool {
        match self {
            Self::Write(write) => write.sync,
            Self::Note(..) => true,
            Self::SnapshotStored(_) | Self::TruncateBefore(..) | Self::Swept => false,
        }
    }
}

/// The queue of the log thread.
#[derive(Default)]
pub(super) struct LogWriter {
    jobs: Mutex<VecDeque<LogJob>>,
    came: Condvar,
}

impl LogWriter {
    /// Leaves jobs to the log thread, which does them in order.
    pub(super) fn put(&self, jobs: impl IntoIterator<Item = LogJob>) {
        let mut queue = self.jobs.lock();
        let was_empty = queue.is_empty();
        queue.extend(jobs);
        if was_empty && !queue.is_empty() {
            drop(queue);
            self.came.notify_one();
        }
    }

    /// Lets the log thread see that the node stops.
    pub(super) fn wake(&self) {
        // Not between its look at the queue and its sleep.
        drop(self.jobs.lock());
        self.came.notify_one();
    }

    /// Looks for jobs for a moment without sleeping, and lets whoever wants this core have it meanwhile.
    fn spin(&self) {
        let (begun, mut looked_at) = (Instant::now(), Instant::now());
        loop {
            if !self.jobs.lock().is_empty() {
                return;
            }
            std::thread::yield_now();
            let now = Instant::now();
            if spin_is_over(now - begun, now - looked_at) {
                return;
            }
            looked_at = now;
        }
    }

    /// Waits for jobs, [`ROOM_LOOK`] at most. Returns all of them.
    fn wait(&self, is_over: impl Fn() -> bool) -> VecDeque<LogJob> {
        let mut jobs = self.jobs.lock();
        if jobs.is_empty() && !is_over() {
            self.came.wait_for(&mut jobs, ROOM_LOOK);
        }
        std::mem::take(&mut *jobs)
    }

    /// Whether there is something to do.
    #[cfg(feature = "sim")]
    pub(super) fn has_jobs(&self) -> bool {
        !self.jobs.lock().is_empty()
    }

    /// All jobs, without waiting for one.
    #[cfg(feature = "sim")]
    pub(super) fn take(&self) -> VecDeque<LogJob> {
        std::mem::take(&mut *self.jobs.lock())
    }

    /// Puts jobs that could not be done before all others.
    fn put_back(&self, left: VecDeque<LogJob>) {
        let mut jobs = self.jobs.lock();
        let later = std::mem::replace(&mut *jobs, left);
        jobs.extend(later);
    }
}

/// What the log thread works with.
pub(super) struct LogThread<D: Disk> {
    written: WrittenLog<D>,
    front: Arc<Replicated>,
    host: Arc<dyn Host>,
}

impl<D: Disk> LogThread<D> {
    pub(super) fn new(log: LogStore<D>, front: Arc<Replicated>, host: Arc<dyn Host>) -> Self {
        Self { written: WrittenLog::new(log), front, host }
    }

    pub(super) fn front(&self) -> &Arc<Replicated> {
        &self.front
    }

    /// The log, before the thread begins.
    #[cfg(feature = "sim")]
    pub(super) fn log(&mut self) -> &mut LogStore<D> {
        &mut self.written.log
    }

    /// What the log thread does until the node stops.
    ///
    /// # Errors
    ///
    /// If the log can not be written: the node must stop.
    pub(super) fn run(&mut self) -> io::Result<()> {
        let front = Arc::clone(&self.front);
        let writer = &front.log_writer;
        let (mut pause, mut waits) = (DESCRIPTOR_PAUSE_MIN, Waits::default());
        while !front.is_over() {
            let begun = Instant::now();
            if waits.want_spin(front.is_light()) {
                writer.spin();
            }
            let jobs = writer.wait(|| front.is_over());
            waits.ended(begun.elapsed());
            let pass = self.write(jobs)?;
            if pass.wants_sync {
                let began = front.clock().now();
                self.sync()?;
                let took = front.clock().now().since(began);
                front.gauges().synced(took, self.written.log.bytes());
            }
            if self.finish(pass)? {
                std::thread::sleep(pause);
                pause = (pause * 2).min(DESCRIPTOR_PAUSE_MAX);
            } else {
                pause = DESCRIPTOR_PAUSE_MIN;
            }
        }
        self.written.log.sync()
    }

    /// Writes what there is to write.
    pub(super) fn write(&mut self, jobs: VecDeque<LogJob>) -> io::Result<Pass> {
        let pass = self.written.perform(jobs)?;
        if bug(Bug::ReportedUnsynced) {
            self.front.written(pass.number, None);
        }
        Ok(pass)
    }

    /// Makes what was written durable. What clients send meanwhile goes into one entry afterwards.
    pub(super) fn sync(&mut self) -> io::Result<()> {
        self.front.syncing();
        self.written.log.sync()
    }

    /// Tells the replica what was written. True: the log waits for a file descriptor.
    pub(super) fn finish(&mut self, mut pass: Pass) -> io::Result<bool> {
        self.front.log_writer.put_back(std::mem::take(&mut pass.left));
        if let Some((files, gone)) = self.written.next_sweep() {
            self.host.sweep(files, gone)?;
        }
        let room = self.written.room_change();
        if pass.wants_sync || pass.number.is_some() || room.is_some() {
            self.front.written(pass.number, room);
        }
        Ok(self.written.set_lacking(pass.lacking))
    }
}

/// The message of a node that ends because its log can not be written.
pub(super) fn log_failed(error: &io::Error) -> String {
    format!("the log can not be written: {error}")
}

/// The log as its thread knows it.
struct WrittenLog<D: Disk> {
    log: LogStore<D>,
    /// As the replica was last told.
    room: Room,
    /// Entries in memory that nobody needs, to be dropped by somebody who has the time.
    gone: Option<Gone>,
    /// Obsolete files are being removed.
    is_sweeping: bool,
    /// The log waits for a file descriptor.
    is_lacking: bool,
}

/// What came of some jobs.
#[derive(Default)]
pub(super) struct Pass {
    /// The number of the last write.
    number: Option<u64>,
    /// Some of the jobs count only after a sync.
    pub(super) wants_sync: bool,
    /// Jobs that could not be done for want of a file descriptor, and all behind them.
    left: VecDeque<LogJob>,
    /// Why they could not.
    lacking: Option<io::Error>,
}

impl<D: Disk> WrittenLog<D> {
    fn new(log: LogStore<D>) -> Self {
        Self { log, room: Room::Plenty, gone: None, is_sweeping: false, is_lacking: false }
    }

    /// Does jobs in order, up to the first that finds no file descriptor; without any, looks whether a full disk has
    /// room again.
    fn perform(&mut self, mut jobs: VecDeque<LogJob>) -> io::Result<Pass> {
        if jobs.is_empty() {
            self.retry_room()?;
        }
        let mut pass = Pass::default();
        while let Some(mut job) = jobs.pop_front() {
            match self.perform_one(&mut job) {
                Ok(()) => {
                    pass.wants_sync |= job.wants_sync();
                    if let LogJob::Write(write) = job {
                        pass.number = Some(write.number);
                    }
                }
                Err(error) if is_out_of_descriptors(&error) => {
                    jobs.push_front(job);
                    pass.lacking = Some(error);
                    pass.left = jobs;
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(pass)
    }

    /// May be repeated if it [`is_out_of_descriptors`]: what is done of the job is taken from it.
    fn perform_one(&mut self, job: &mut LogJob) -> io::Result<()> {
        match job {
            LogJob::Write(write) => self.write(write),
            LogJob::Note(key, value) => {
                let notes = vec![(key.clone(), value.clone())];
                self.log.write(&LogBatch { notes, ..LogBatch::default() })
            }
            LogJob::SnapshotStored(metadata) => self.log.adopt(metadata),
            LogJob::TruncateBefore(index, gone) => {
                self.log.retire_before(*index)?;
                self.gone = gone.take();
                Ok(())
            }
            LogJob::Swept => {
                self.is_sweeping = false;
                self.log.swept();
                Ok(())
            }
        }
    }

    fn write(&mut self, write: &mut LogWrite) -> io::Result<()> {
        if let Some(snapshot) = &write.snapshot {
            if snapshot.install {
                self.log.install_snapshot(&snapshot.metadata, &snapshot.data)?;
            } else {
                match self.log.store_snapshot(&snapshot.metadata, &snapshot.data) {
                    // The older one, and the log behind it, will do.
                    Err(error) if is_passing(&error) => {}
                    stored => stored?,
                }
            }
            write.snapshot = None;
        }
        self.log.write(&write.batch)
    }

    /// What is obsolete, unless what was obsolete before is still being removed.
    fn next_sweep(&mut self) -> Option<(VecDeque<String>, Option<Gone>)> {
        if self.is_sweeping && !bug(Bug::SweepsOverlap) {
            return None;
        }
        let (files, gone) = (self.log.take_obsolete(), self.gone.take());
        self.is_sweeping = !files.is_empty() || gone.is_some();
        self.is_sweeping.then_some((files, gone))
    }

    /// Looks whether a full disk has room again.
    fn retry_room(&mut self) -> io::Result<()> {
        if self.room != Room::Low {
            return Ok(());
        }
        match self.log.retry_room() {
            // There will be another look.
            Err(error) if is_out_of_descriptors(&error) => Ok(()),
            looked => looked.map(drop),
        }
    }

    /// What the replica does not know yet.
    fn room_change(&mut self) -> Option<Room> {
        let room = self.log.room();
        (std::mem::replace(&mut self.room, room) != room).then_some(room)
    }

    /// Whether the log waits for a descriptor. Said once in the log of the process, and once more when it goes on.
    fn set_lacking(&mut self, lacking: Option<io::Error>) -> bool {
        let was_lacking = std::mem::replace(&mut self.is_lacking, lacking.is_some());
        match lacking {
            Some(error) if !was_lacking => {
                tracing::error!(%error, "the log waits for a file descriptor");
            }
            None if was_lacking => tracing::info!("the log has its file descriptor and goes on"),
            Some(_) | None => {}
        }
        self.is_lacking
    }
}

/// Whether a snapshot could not be written for a reason that passes. The log goes on without it.
pub(super) fn is_passing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::StorageFull || is_out_of_descriptors(error)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use dflockd_replica::disk::RealDisk;
    use dflockd_replica::log::LogOptions;
    use dflockd_testkit::Dir;

    use super::*;

    /// A real directory on a disk that can be full: files do not grow then, and none comes.
    struct SmallDisk {
        disk: RealDisk,
        full: Arc<AtomicBool>,
    }

    impl SmallDisk {
        fn check_room(&self) -> io::Result<()> {
            match self.full.load(Ordering::Relaxed) {
                true => Err(io::ErrorKind::StorageFull.into()),
                false => Ok(()),
            }
        }
    }

    impl Disk for SmallDisk {
        fn list(&self) -> io::Result<Vec<String>> {
            self.disk.list()
        }

        fn len(&self, name: &str) -> io::Result<u64> {
            self.disk.len(name)
        }

        fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
            self.disk.read(name, offset, buffer)
        }

        fn create(&mut self, name: &str, len: u64) -> io::Result<()> {
            self.check_room()?;
            self.disk.create(name, len)
        }

        fn write(&mut self, name: &str, offset: u64, bytes: &[u8]) -> io::Result<()> {
            if offset + bytes.len() as u64 > self.len(name)? {
                self.check_room()?;
            }
            self.disk.write(name, offset, bytes)
        }

        fn sync(&mut self, name: &str) -> io::Result<()> {
            self.disk.sync(name)
        }

        fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
            self.disk.rename(from, to)
        }

        fn remove(&mut self, name: &str) -> io::Result<()> {
            self.disk.remove(name)
        }

        fn sync_dir(&mut self) -> io::Result<()> {
            self.disk.sync_dir()
        }
    }

    fn note(value: u8) -> LogJob {
        LogJob::Note(b"key".to_vec(), vec![value])
    }

    fn open() -> (WrittenLog<RealDisk>, Dir) {
        let dir = Dir::new();
        let disk = RealDisk::open(&dir.path("data")).unwrap();
        (WrittenLog::new(LogStore::open(disk, LogOptions::default()).unwrap().0), dir)
    }

    fn write(number: u64, sync: bool) -> LogJob {
        let (batch, snapshot) = (LogBatch::default(), None);
        LogJob::Write(LogWrite { number, sync, batch, snapshot })
    }

    #[test]
    fn a_change_of_room_is_told_once() {
        let (mut written, _dir) = open();
        written.room = Room::Low;
        assert_eq!(written.room_change(), Some(Room::Plenty));
        assert_eq!(written.room_change(), None);
    }

    /// GUARANTEES 40: the log thread notices that the disk is full while the last segment takes writes, and looks again
    /// when it has nothing to do. Nobody has removed anything of the log's meanwhile.
    #[test]
    fn a_full_disk_is_noticed_and_looked_at_again() {
        let dir = Dir::new();
        let full = Arc::new(AtomicBool::new(false));
        let disk = RealDisk::open(&dir.path("data")).unwrap();
        let disk = SmallDisk { disk, full: Arc::clone(&full) };
        let options = LogOptions { segment_bytes: 16 << 10 };
        let mut written = WrittenLog::new(LogStore::open(disk, options).unwrap().0);
        // A pass as the log thread makes it.
        let mut pass = |jobs: VecDeque<LogJob>| {
            written.perform(jobs).unwrap();
            written.log.sync().unwrap();
            written.room_change()
        };
        let large = || LogJob::Note(b"key".to_vec(), vec![7; 1000]);
        for _ in 0..100 {
            assert_eq!(pass([large()].into()), None, "there is room");
        }
        full.store(true, Ordering::Relaxed);
        let low = (0..100).find_map(|_| pass([large()].into()));
        assert_eq!(low, Some(Room::Low), "told before a write fails");
        assert_eq!(pass([large()].into()), None, "told once, and the segment takes more");
        assert_eq!(pass(VecDeque::new()), None, "it is still full");
        full.store(false, Ordering::Relaxed);
        assert_eq!(pass([large()].into()), None, "nobody has looked");
        assert_eq!(pass(VecDeque::new()), Some(Room::Plenty));
        assert_eq!(pass(VecDeque::new()), None);
        for _ in 0..100 {
            assert_eq!(pass([large()].into()), None, "the log goes on");
        }
    }

    #[test]
    fn the_log_thread_spins_while_waits_are_short() {
        let mut waits = Waits::default();
        let short = WAIT_SHORT_MAX - Duration::from_micros(1);
        for _ in 0..SHORT_WAITS_BEFORE_SPIN {
            assert!(!waits.want_spin(true));
            waits.ended(short);
        }
        assert!(waits.want_spin(true) && !waits.want_spin(false), "under load it sleeps");
        // A spin has found nothing, but jobs came soon after it.
        waits.ended(SPIN_MAX + Duration::from_micros(100));
        assert!(waits.want_spin(true));
        waits.ended(WAIT_SHORT_MAX);
        assert!(!waits.want_spin(true), "one long wait, and it counts anew");
        for _ in 1..SHORT_WAITS_BEFORE_SPIN {
            waits.ended(Duration::ZERO);
        }
        assert!(!waits.want_spin(true));
        waits.ended(Duration::ZERO);
        assert!(waits.want_spin(true));
    }

    #[test]
    fn a_spin_ends_when_it_is_long_or_others_want_the_core() {
        let us = Duration::from_micros;
        assert!(!spin_is_over(us(149), us(60)) && spin_is_over(us(150), us(0)));
        assert!(spin_is_over(us(61), us(61)));
    }

    /// GUARANTEES 39: what counts only when it is durable asks for a sync, whatever else is written with it.
    #[test]
    fn one_sync_for_all_that_wants_one() {
        let (mut written, _dir) = open();
        let pass = written.perform([write(1, false)].into()).unwrap();
        assert_eq!((pass.number, pass.wants_sync), (Some(1), false));
        let pass = written.perform([write(2, true), write(3, false)].into()).unwrap();
        assert_eq!((pass.number, pass.wants_sync), (Some(3), true));
        let pass = written.perform([note(1)].into()).unwrap();
        assert_eq!((pass.number, pass.wants_sync), (None, true));
        assert!(!written.perform([LogJob::Swept].into()).unwrap().wants_sync);
    }

    /// GUARANTEES 35: segments go one after the other, the oldest first, also if the file system takes long for some.
    #[test]
    fn a_sweep_waits_for_the_one_before() {
        let (mut written, _dir) = open();
        let truncate = || LogJob::TruncateBefore(0, Some(Gone::default()));
        written.perform([truncate()].into()).unwrap();
        assert!(written.next_sweep().is_some());
        written.perform([truncate()].into()).unwrap();
        assert!(written.next_sweep().is_none(), "the first is not done");
        written.perform([LogJob::Swept].into()).unwrap();
        assert!(written.next_sweep().is_some(), "what was left is not forgotten");
    }

    #[test]
    fn jobs_that_could_not_be_done_come_first() {
        let writer = LogWriter::default();
        writer.put([write(2, true)]);
        writer.put_back([write(1, true)].into());
        let numbers: Vec<_> = writer.wait(|| false).iter().map(number).collect();
        assert_eq!(numbers, [1, 2]);
        assert!(writer.wait(|| true).is_empty(), "who stops does not wait");
    }

    fn number(job: &LogJob) -> u64 {
        let LogJob::Write(write) = job else { panic!("a write") };
        write.number
    }
}
