//! Locks and values as people see them.

use dflockd_core::{Bytes, KeyKind, KeyView, LockKind, LockView, SessionId, Span};
use dflockd_engine::Engine;
use dflockd_wire::grpc::{
    BarrierView, CounterView, DescribeResponse, EntryView, Holder, ListView, Lock, LockMode, Waiter,
};

use crate::report;

/// Names of sessions, in messages.
pub(super) struct Names<'a>(report::Names<'a>);

impl<'a> Names<'a> {
    pub(super) fn new(engine: &'a Engine) -> Self {
        Self(report::Names::new(engine))
    }

    pub(super) fn of(&mut self, session: SessionId, client: Option<&Bytes>) -> String {
        self.0.of(session, client).as_ref().to_owned()
    }

    pub(super) fn lock(&mut self, view: &LockView) -> Lock {
        let holders = view.holders.iter().map(|holder| Holder {
            session: holder.session.0,
            client: self.of(holder.session, holder.client.as_ref()),
            fence: holder.fence.0,
            lease_left_ms: millis(holder.expires_in),
            held_ms: millis(holder.held_for),
            writer: holder.writer,
            leader: holder.leader,
        });
        let holders = holders.collect();
        let queue = view.queue.iter().map(|waiter| Waiter {
            session: waiter.session.0,
            client: self.of(waiter.session, waiter.client.as_ref()),
            waiting_ms: millis(waiter.waiting),
            writer: waiter.writer,
        });
        let queue = queue.collect();
        let kind = match KeyKind::of_lock(view.space, view.kind) {
            KeyKind::Semaphore => LockMode::Semaphore,
            KeyKind::ReadWrite => LockMode::Write,
            KeyKind::Mutex | KeyKind::Counter | KeyKind::Kv | KeyKind::List | KeyKind::Barrier => {
                LockMode::Mutex
            }
        };
        Lock {
            key: view.key.to_vec().into(),
            kind: kind.into(),
            limit: match view.kind {
                LockKind::Slots(limit) => limit,
                LockKind::ReadWrite => 0,
            },
            holders_total: view.holders_total,
            holders,
            waiters_total: view.waiters_total,
            queue,
            revision: view.revision.0,
        }
    }

    /// Everything a key is.
    pub(super) fn key(&mut self, views: &[KeyView]) -> DescribeResponse {
        let mut all = DescribeResponse::default();
        for view in views {
            match view {
                KeyView::Lock(lock) => all.locks.push(self.lock(lock)),
                KeyView::Counter(view) => {
                    let revision = view.revision.0;
                    all.counter = Some(CounterView { value: view.value, revision });
                }
                KeyView::Kv(view) => {
                    all.entry = Some(EntryView {
                        value_bytes: view.value_bytes as u64,
                        ttl_ms: view.ttl.map(millis),
                        revision: view.revision.0,
                    });
                }
                KeyView::List(view) => {
                    all.list = Some(ListView {
                        length: view.length as u64,
                        pop_waiters: view.pop_waiters as u64,
                        revision: view.revision.0,
                    });
                }
                KeyView::Barrier(view) => {
                    let participants = view.participants as u64;
                    all.barrier = Some(BarrierView { count: view.count, participants });
                }
            }
        }
        all
    }
}

/// Leaves out half of the holders and waiters, whose number is told all the same; false if none are named.
pub(super) fn name_fewer(all: &mut DescribeResponse) -> bool {
    let mut any = false;
    for lock in &mut all.locks {
        any |= !(lock.holders.is_empty() && lock.queue.is_empty());
        lock.holders.truncate(lock.holders.len() / 2);
        lock.queue.truncate(lock.queue.len() / 2);
    }
    any
}

/// Whole milliseconds.
pub(super) fn millis(span: Span) -> u64 {
    span.0 / 1_000_000
}
