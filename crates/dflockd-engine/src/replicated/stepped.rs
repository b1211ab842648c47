//! A member whose threads are steps that somebody else takes: for the simulator, which has no threads.
//!
//! | Thread of a server | Steps |
//! | --- | --- |
//! | a worker | [`Replicated::before_sleep`] and [`Replicated::after_sleep`], and what connections ask for |
//! | `replica` | [`Stepped::run_timer`], when [`Stepped::timer_sleeps_until`] has come or it was woken |
//! | `log` | [`Stepped::write_log`], [`Stepped::sync_log`], [`Stepped::finish_log`] |
//! | the runtime's | [`Stepped::received`], [`Stepped::unreachable`] |
//!
//! What a thread does between two steps of others is up to the caller, who may also let others come in between at the
//! points of [`with_points`](crate::with_points). All code behind the steps is that of a server.

use std::cell::RefCell;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::Receiver;

use bytes::Bytes;
use dflockd_core::SessionId;
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_replica::disk::Disk;
use dflockd_replica::log::{LogOptions, Recovered};
use dflockd_replica::types::{Bits128, RaftId};
use dflockd_replica::{LogWrite, Replica, StateCopy};
use tokio::sync::oneshot;

use super::Replicated;
use super::combiner::Queue;
use super::driver::{self, Host, MemberOptions, Node, Opened};
use super::formation::{self, FirstMember};
use super::log_writer::{LogJob, LogThread, Pass, log_failed};
use crate::chance::Chance;
use crate::clock::Clock;
use crate::offline::{Around, Backup, Beginning, Begun, Delay, force_new_on};
use crate::transport::{Handler, Identity, Lane};

/// A member without threads.
pub struct Stepped<D: Disk> {
    front: Arc<Replicated>,
    gate: Arc<driver::Gate>,
    log: RefCell<LogThread<D>>,
    /// What the log thread has written and not finished.
    pass: RefCell<Option<Pass>>,
    /// None once the node knows who it is.
    waiting: RefCell<Option<(Node, Recovered)>>,
}

/// What first members of this list present until they know each other's data directories.
#[must_use]
pub fn list_id(members: &[FirstMember]) -> Bits128 {
    formation::list_id(members)
}

/// A state without members, for those who watch a cluster before it is formed.
#[must_use]
pub fn no_state() -> Bytes {
    formation::first_state(Bits128::default(), Vec::new()).1
}

/// Makes an empty data directory that of the first member of a new cluster, with the state of a backup.
///
/// # Errors
///
/// If the backup or the directory can not be used.
pub fn restore<D: Disk>(
    disk: D,
    backup: &[u8],
    beginning: &Beginning,
    log: LogOptions,
    chance: &Chance,
    unix_nanos: u64,
) -> Result<Begun, String> {
    Backup::read(backup)?.put(disk, beginning, &Around { log, chance, unix_nanos })
}

/// Makes a cluster of its own of the one member whose directory this is.
///
/// # Errors
///
/// If the directory can not be used.
pub fn force_new<D: Disk>(
    disk: D,
    delay: Delay,
    log: LogOptions,
    chance: &Chance,
    unix_nanos: u64,
) -> Result<Begun, String> {
    force_new_on(disk, delay, false, &Around { log, chance, unix_nanos })
}

/// The driver of the replica knows the member, which has it: a server ends that when its timer thread does.
impl<D: Disk> Drop for Stepped<D> {
    fn drop(&mut self) {
        self.front.combiner.clear();
    }
}

impl<D: Disk> Stepped<D> {
    /// Opens a data directory. `look` sees what was found there before it is used.
    ///
    /// # Errors
    ///
    /// If it can not be used.
    #[expect(clippy::too_many_arguments, reason = "everything around a member")]
    pub fn start(
        options: MemberOptions,
        disk: D,
        log_options: LogOptions,
        clock: Clock,
        chance: Chance,
        first_fence: u64,
        host: impl FnOnce(&Arc<Replicated>) -> Arc<dyn Host>,
        look: impl FnOnce(&Recovered),
    ) -> Result<Self, String> {
        let front = Replicated::new(&options, "".into(), clock, chance, first_fence);
        let Opened { log, recovered, gate, start, options } =
            driver::open(&front, disk, log_options, options)?;
        look(&recovered);
        let host = host(&front);
        let log = LogThread::new(log, Arc::clone(&front), Arc::clone(&host));
        let raft_id = gate.number();
        let node =
            Node { front: Arc::clone(&front), gate: Arc::clone(&gate), host, start, options };
        let waiting = if raft_id == 0 || gate.is_forming() {
            Some((node, recovered))
        } else {
            front.combiner.begin(Box::new(node.begin(raft_id, None, recovered)?));
            None
        };
        let (log, waiting) = (RefCell::new(log), RefCell::new(waiting));
        Ok(Self { front, gate, log, pass: RefCell::default(), waiting })
    }

    /// The member as connections see it.
    #[must_use]
    pub fn front(&self) -> &Arc<Replicated> {
        &self.front
    }

    /// Whether this node and another one would talk to each other, as their handshake decides it.
    ///
    /// # Errors
    ///
    /// Why not.
    pub fn meets(&self, other: &Self) -> Result<(), String> {
        let (ours, theirs) = (self.gate.identity(), other.gate.identity());
        let shown = self.presents(&theirs);
        let seen = other.presents(&ours);
        let is_foreign =
            shown.cluster.is_some() && seen.cluster.is_some() && shown.cluster != seen.cluster;
        let admitted =
            if is_foreign { Err("another cluster".into()) } else { self.gate.admit(&seen) };
        if let Err(why) = admitted {
            other.gate.refused_by(&shown);
            return Err(why);
        }
        other.gate.admit(&shown)
    }

    /// Whether the node is a first member of a cluster and does not know all the others.
    #[must_use]
    pub fn is_forming(&self) -> bool {
        self.gate.is_forming()
    }

    /// Begins the cluster if all first members are known: the thread that waits for them does that in a server.
    pub fn form(&self) {
        if !self.is_forming() {
            return;
        }
        let Some((node, mut recovered)) = self.waiting.borrow_mut().take() else { return };
        let formed = self.gate.form(self.log.borrow_mut().log(), &mut recovered, &[]);
        let begun = match formed {
            Ok(true) => node.begin(self.gate.number(), None, recovered),
            Ok(false) => {
                *self.waiting.borrow_mut() = Some((node, recovered));
                return;
            }
            Err(why) => Err(why),
        };
        match begun {
            Ok(driver) => self.front.combiner.begin(Box::new(driver)),
            Err(why) => self.front.fail(why),
        }
    }

    /// Who this node says it is: a member that has not heard of its cluster's name knows it by the one before.
    fn presents(&self, peer: &Identity) -> Identity {
        match self.gate.former_identity(peer) {
            Some(Ok(former)) => former,
            Some(Err(_)) | None => self.gate.identity(),
        }
    }

    /// Whether the node knows who it is. One that waits to be added has no replica to drive.
    #[must_use]
    pub fn takes_part(&self) -> bool {
        self.waiting.borrow().is_none()
    }

    /// Whether the node is of a cluster, or is about to form one. One that waits to be added is of none until a member
    /// has reached it, and may be taken in by any.
    #[must_use]
    pub fn has_cluster(&self) -> bool {
        self.gate.identity().cluster.is_some()
    }

    /// Why the node can not go on, if so.
    #[must_use]
    pub fn fatal(&self) -> Option<&str> {
        self.front.fatal.get().map(String::as_str)
    }

    /// Looks at the replica, if it takes part and nobody drives it now.
    pub fn with_replica<R>(&self, look: impl FnOnce(&Replica) -> R) -> Option<R> {
        self.front.combiner.with_driven(|driver| look(driver.replica()))
    }

    // ---- The threads of the runtime ----

    /// A frame of a peer has come.
    pub fn received(&self, from: RaftId, lane: Lane, frame: Bytes) {
        self.gate.received(from, lane, frame);
        if self.is_forming() {
            return;
        }
        let Some((node, recovered)) = self.waiting.borrow_mut().take() else { return };
        let Some(inputs) = self.front.wait_for_work(std::time::Duration::ZERO) else { return };
        match node.find_number(inputs) {
            Some((raft_id, first)) => match node.begin(raft_id, Some(first), recovered) {
                Ok(driver) => self.front.combiner.begin(Box::new(driver)),
                Err(why) => self.front.fail(why),
            },
            None => *self.waiting.borrow_mut() = Some((node, recovered)),
        }
    }

    /// A peer can not be reached, or its port refuses.
    pub fn unreachable(&self, peer: RaftId, refused: bool) {
        self.gate.unreachable(peer, Lane::Main, refused);
    }

    /// Asks for a change of the cluster, as an operator does.
    pub fn admin(&self, request: AdminRequest) -> oneshot::Receiver<AdminResult> {
        let id = self.front.next_id();
        self.front.post_admin(id, request)
    }

    /// Asks a leader what is committed, which is the first step of [`Replicated::copy`].
    #[must_use]
    pub fn confirm(&self) -> Receiver<Option<()>> {
        self.front.post_look(true, |_| ())
    }

    /// Asks for a copy of the state, which is the second step of [`Replicated::copy`]. The number of the copy.
    #[must_use]
    pub fn copy(&self) -> (u64, oneshot::Receiver<AdminResult>) {
        let id = self.front.next_id();
        (id, self.front.post_admin(id, AdminRequest::Copy))
    }

    /// Takes a copy that was made.
    #[must_use]
    pub fn take_copy(&self, id: u64) -> Option<StateCopy> {
        self.front.copies.lock().remove(&id)
    }

    // ---- The timer thread ----

    /// Until when the timer thread sleeps unless it is woken; none if there is something for it to do.
    #[must_use]
    pub fn timer_sleeps_until(&self) -> Option<u64> {
        self.front.combiner.arm_timer()
    }

    /// How often the timer thread was woken.
    #[must_use]
    pub fn timer_notices(&self) -> usize {
        self.front.combiner.timer_notices()
    }

    /// The timer thread drives the replica. It would wait for another thread that drives it, so nobody may.
    pub fn run_timer(&self) {
        self.front.combiner.drive_as_timer();
    }

    /// Whether a thread drives the replica.
    #[must_use]
    pub fn is_driven(&self) -> bool {
        self.front.combiner.is_driven()
    }

    /// Whether work waits for the replica, and whether some of it is for the timer thread only.
    #[must_use]
    pub fn queued(&self) -> (bool, bool) {
        self.front.combiner.with_queue(|queue| (!queue.is_empty(), queue.needs_timer_thread()))
    }

    /// What waits for the replica is within its bounds.
    ///
    /// # Errors
    ///
    /// What is not.
    pub fn check_bounds(&self) -> Result<(), String> {
        self.front.combiner.with_queue(super::Inputs::check_bounds)
    }

    /// How many notices for clients wait to be delivered.
    #[must_use]
    pub fn undelivered(&self) -> usize {
        self.front.delivery.backlog()
    }

    // ---- The log thread ----

    /// Whether there is something to write.
    #[must_use]
    pub fn has_log_jobs(&self) -> bool {
        self.front.log_writer.has_jobs()
    }

    /// Whether the log thread has written something and not finished.
    #[must_use]
    pub fn is_log_busy(&self) -> bool {
        self.pass.borrow().is_some()
    }

    /// Writes what there is to write; `look` sees it before. True: it counts only after a sync.
    ///
    /// # Errors
    ///
    /// If the log can not be written: the node stops.
    pub fn write_log(&self, mut look: impl FnMut(&LogWrite)) -> io::Result<bool> {
        let jobs = self.front.log_writer.take();
        for job in &jobs {
            if let LogJob::Write(write) = job {
                look(write);
            }
        }
        let pass = self.log.borrow_mut().write(jobs)?;
        let wants_sync = pass.wants_sync;
        *self.pass.borrow_mut() = Some(pass);
        Ok(wants_sync)
    }

    /// Begins a sync of what was written.
    ///
    /// # Errors
    ///
    /// If it fails: the node stops.
    pub fn sync_log(&self) -> io::Result<()> {
        self.log.borrow_mut().sync()
    }

    /// Tells the replica what was written, and drives it.
    ///
    /// # Errors
    ///
    /// If what is obsolete can not be removed: the node stops.
    pub fn finish_log(&self) -> io::Result<()> {
        let pass = self.pass.borrow_mut().take();
        match pass {
            Some(pass) => self.log.borrow_mut().finish(pass).map(drop),
            None => Ok(()),
        }
    }

    /// The log could not be written.
    pub fn fail(&self, error: &io::Error) {
        self.front.fail(log_failed(error));
    }
}

impl Replicated {
    /// Looks for the sessions that hold or wait for something, as a server does that shuts down. The answer comes when
    /// a leader has confirmed it.
    pub fn look_for_busy(&self) -> Receiver<Option<Option<HashSet<SessionId>>>> {
        self.post_look(true, |machine| Some(machine.store()?.busy_sessions().collect()))
    }
}
