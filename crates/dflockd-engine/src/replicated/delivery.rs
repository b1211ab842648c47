//! What the replica has for this node's clients, on its way to their mailboxes.
//!
//! The thread that drives the replica leaves notices here, under the combiner's lock and therefore in the order of the
//! log. When it has released that lock it delivers them, or leaves them to a thread that delivers already and looks
//! again when it is done. The log thread leaves them to the designated thread of the combiner, as long as that keeps
//! up. So a slow client delays other clients' notices at worst, never the replica: no mailbox is touched, and no socket
//! written, while the replica is locked.

use std::mem;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Outcome, Push, RequestId, SessionId};

use crate::sync::{Mutex, point};

/// Notices at which the log thread delivers, too, instead of leaving that to others.
const CROWDED_MIN: usize = 16 << 10;
/// Notices at which a thread that drives the replica waits for the one that delivers. The timer thread never does.
const BACKLOG_MAX: usize = 256 << 10;

/// Something for a session of this node, or for one that was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Notice {
    /// The answer to a request. `undo`: if nobody is there to be told, what it gives is to be taken back.
    Reply { session: SessionId, request: RequestId, outcome: Outcome, undo: bool },
    /// Something the session is told.
    Push { session: SessionId, push: Push },
    /// The session is no longer its connection's; if there is an epoch, only that of this epoch.
    Expel { session: SessionId, epoch: Option<u32> },
    /// Another connection asked for the session `to` and has it now, or there is none. `is_own`: that connection was
    /// opened by this incarnation of the node.
    Attached { by: SessionId, request: RequestId, to: Option<AttachedTo>, is_own: bool },
    /// The others gave this node up: its connections are cut.
    Cut { session: SessionId },
}

/// The session that a connection has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AttachedTo {
    pub(super) session: SessionId,
    /// How often it was attached.
    pub(super) epoch: u32,
    /// The highest number that a repeatable request of it had.
    pub(super) last_request: RequestId,
}

/// Notices in order, and the right to deliver them.
pub(super) struct Delivery<N = Notice> {
    notices: Mutex<Vec<N>>,
    /// Held by the thread that delivers.
    delivering: Mutex<()>,
}

impl<N> Delivery<N> {
    pub(super) fn new() -> Self {
        Self { notices: Mutex::new(Vec::new()), delivering: Mutex::new(()) }
    }

    /// Leaves notices, in order. Followed by [`Delivery::run`] when no lock is held.
    pub(super) fn enqueue(&self, notices: &mut Vec<N>) {
        if !notices.is_empty() {
            self.notices.lock().append(notices);
        }
    }

    /// Whether those who deliver do not keep up.
    pub(super) fn is_crowded(&self) -> bool {
        self.notices.lock().len() >= CROWDED_MIN
    }

    /// How many notices wait.
    #[cfg(feature = "sim")]
    pub(super) fn backlog(&self) -> usize {
        self.notices.lock().len()
    }

    /// Delivers all there is, unless another thread delivers, which sees it. With `may_wait` the thread waits for the
    /// other one if there is too much.
    pub(super) fn run(&self, may_wait: bool, mut deliver: impl FnMut(Vec<N>)) {
        loop {
            let backlog = self.notices.lock().len();
            if backlog == 0 {
                return;
            }
            let delivering = if may_wait && backlog > BACKLOG_MAX {
                self.delivering.lock()
            } else if let Some(delivering) = self.delivering.try_lock() {
                delivering
            } else {
                return;
            };
            let mut notices = mem::take(&mut *self.notices.lock());
            if bug(Bug::DeliveryReversed) {
                notices.reverse();
            }
            point();
            deliver(notices);
            drop(delivering);
            point();
            if bug(Bug::DeliveryForgotten) {
                return;
            }
        }
    }
}
