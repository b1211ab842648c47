//! Snapshots that nobody wrote: `Store::restore` says yes or no and nothing else, and a store it
//! accepts is as good as any other.
//!
//! Input: the snapshot. The fuzzer starts from real ones, which are made from the seeds of `apply`.

use std::sync::Arc;

use dflockd_core::{
    Caller, Command, End, Mode, RequestId, SessionId, Shared, Space, Span, Store, Timestamp,
    command,
};

/// The sessions of the seeds, and a few more.
const SESSIONS: u64 = 12;
/// The keys of the seeds.
const KEYS: [&[u8]; 3] = [b"a", b"a.b", b"c.d.e"];

/// Restores `data` and, if that is a store, lets everything in it end in three ways.
pub fn run(data: &[u8]) {
    let Ok(store) = Store::restore(data, Arc::new(Shared::new())) else { return };
    store.check_invariants();
    let bytes = store.snapshot();
    check_same(&bytes);
    let now = stamp(&bytes);
    let restore = || Store::restore(&bytes, Arc::new(Shared::new())).expect("it was accepted");
    Incarnation::new(store).end_by_time();
    Incarnation::new(restore()).end_by_session(now);
    Incarnation::new(restore()).end_by_use(now);
}

/// Panics if these bytes are not the snapshot of what they restore to.
pub fn check_same(bytes: &[u8]) {
    match Store::restore(bytes, Arc::new(Shared::new())) {
        Ok(store) => assert!(store.snapshot() == bytes, "the snapshot of a snapshot differs"),
        Err(error) => panic!("the snapshot of an accepted store is refused: {error}"),
    }
}

/// A store in use.
struct Incarnation {
    store: Store,
    requests: u64,
}

impl Incarnation {
    fn new(store: Store) -> Self {
        // Above the requests of the seeds: no session sends a number twice.
        Self { store, requests: 1_000_000 }
    }

    fn apply(&mut self, session: u64, command: Command<'_>, now: Timestamp) {
        self.requests += 1;
        let request = RequestId(self.requests);
        let caller = Caller { session: SessionId(session), request, keep: false };
        self.store.apply(caller, command, now, &mut Vec::new());
        self.store.check_invariants();
    }

    /// All that is due comes due at once.
    fn end_by_time(mut self) {
        self.apply(0, Command::Tick, Timestamp::NEVER);
        self.end_sessions(Timestamp::NEVER);
    }

    fn end_by_session(mut self, now: Timestamp) {
        self.end_sessions(now);
        self.apply(0, Command::Tick, Timestamp::NEVER);
    }

    fn end_sessions(&mut self, now: Timestamp) {
        for session in 0..=SESSIONS {
            let release = session % 2 == 0;
            self.apply(session, Command::EndSession { release, forced: release }, now);
        }
    }

    /// Does something to everything, as new and as old sessions.
    fn end_by_use(mut self, now: Timestamp) {
        for session in 0..=SESSIONS {
            let acknowledge =
                Command::Acknowledge(command::Acknowledge { up_to: RequestId(u64::MAX) });
            self.apply(session, acknowledge, now);
        }
        for key in KEYS {
            let (wait, lease, salt) = (Span(5), None, 1);
            for mode in [Mode::Mutex, Mode::Semaphore { limit: 2 }, Mode::Read, Mode::Write] {
                self.apply(
                    1,
                    Command::Acquire(command::Acquire { key, mode, wait, lease, salt }),
                    now,
                );
            }
            for space in [Space::Locks, Space::Semaphores] {
                self.apply(2, Command::Wait(command::Wait { key, space, wait }), now);
            }
            self.apply(2, Command::Add(command::Add { key, delta: 1, decrement: false }), now);
            self.apply(
                2,
                Command::KvSet(command::KvSet { key, value: b"x", ttl: Some(wait) }),
                now,
            );
            self.apply(2, Command::Push(command::Push { key, end: End::Left, value: b"x" }), now);
            self.apply(
                3,
                Command::Pop(command::Pop { key, end: End::Left, wait: Some(wait) }),
                now,
            );
            self.apply(3, Command::BarrierWait(command::BarrierWait { key, count: 2, wait }), now);
            self.apply(4, Command::Signal(command::Signal { channel: key, payload: b"x" }), now);
        }
        self.apply(1, Command::Detach { until: now }, now);
        self.apply(0, Command::NewTerm, now);
        self.apply(0, Command::Tick, now + Span(10));
        self.end_by_time();
    }
}

/// The stamp of the last command: the number behind the 16 limits and the seed.
fn stamp(snapshot: &[u8]) -> Timestamp {
    let mut bytes = snapshot.iter().skip(1);
    let mut number = 0;
    for _ in 0..18 {
        number = 0;
        for shift in (0..64).step_by(7) {
            let byte = bytes.next().copied().unwrap_or_default();
            number |= u64::from(byte & 127) << shift;
            if byte < 128 {
                break;
            }
        }
    }
    Timestamp(number)
}
