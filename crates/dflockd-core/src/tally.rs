//! What has happened and how much there is, counted for whoever looks after a server.
//!
//! Nothing decides by these numbers. They are in no snapshot and no part of the state: two stores in the same state may
//! have counted differently. What they say of the present (held, waiting, kept) is exact, and known without a look at
//! every lock.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use dflockd_api::{Command, CommandKind, Mode, Outcome, REFUSALS, Span};

use crate::lock::{Claim, EndOfHold, Lock};
use crate::store::Store;
use crate::subscription::Owned;
use crate::view::{KeyKind, LockKind};

/// A kind of hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Primitive {
    Mutex,
    Election,
    Semaphore,
    Read,
    Write,
}

impl Primitive {
    /// All of them, in the order of [`Tally::primitives`].
    pub const ALL: [Self; 5] =
        [Self::Mutex, Self::Election, Self::Semaphore, Self::Read, Self::Write];

    /// Its name for people: that of the kind of lock, but for what the kind does not tell apart.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mutex => KeyKind::Mutex.name(),
            Self::Election => "election",
            Self::Semaphore => KeyKind::Semaphore.name(),
            Self::Read => "read",
            Self::Write => "write",
        }
    }

    /// What a claim is or wants.
    pub(crate) fn of(lock: &Lock, claim: &Claim) -> Self {
        Self::new(lock, claim.exclusive, claim.election)
    }

    /// What a claim would be.
    pub(crate) fn asked(lock: &Lock, mode: Mode) -> Self {
        Self::new(lock, mode == Mode::Write, mode == Mode::Election)
    }

    fn new(lock: &Lock, exclusive: bool, election: bool) -> Self {
        match lock.kind {
            LockKind::ReadWrite if exclusive => Self::Write,
            LockKind::ReadWrite => Self::Read,
            LockKind::Slots(_) if election => Self::Election,
            LockKind::Slots(_) => match KeyKind::of_lock(lock.space, lock.kind) {
                KeyKind::Mutex => Self::Mutex,
                KeyKind::Semaphore
                | KeyKind::ReadWrite
                | KeyKind::Counter
                | KeyKind::Kv
                | KeyKind::List
                | KeyKind::Barrier => Self::Semaphore,
            },
        }
    }
}

/// Upper bounds of the buckets of a [`Histogram`], the bound included.
pub const BUCKETS: [Span; 19] = [
    Span(100_000),
    Span(500_000),
    Span::from_millis(1),
    Span(2_500_000),
    Span::from_millis(5),
    Span::from_millis(10),
    Span::from_millis(25),
    Span::from_millis(50),
    Span::from_millis(100),
    Span::from_millis(250),
    Span::from_millis(500),
    Span::from_secs(1),
    Span::from_millis(2500),
    Span::from_secs(5),
    Span::from_secs(10),
    Span::from_secs(30),
    Span::from_secs(60),
    Span::from_secs(300),
    Span::from_secs(1800),
];

/// How often which length of time was seen.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    /// By [`BUCKETS`], each counted in one of them; the last is for what is longer than all.
    pub counts: [u64; BUCKETS.len() + 1],
    /// In nanoseconds. A hundred thousand holds would fill 64 bits within days.
    pub sum: u128,
}

impl Histogram {
    /// How many lengths of time were seen.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    fn observe(&mut self, span: Span) {
        self.counts[BUCKETS.partition_point(|&bound| bound < span)] += 1;
        self.sum += u128::from(span.0);
    }

    fn add(&mut self, other: &Self) {
        add_each(&mut self.counts, &other.counts);
        self.sum += other.sum;
    }
}

/// What happened to the holds of one kind, and how many there are.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Holds that began.
    pub grants: u64,
    /// Holds that were given back, or could not be told to the one who asked.
    pub releases: u64,
    /// Holds whose lease ran out.
    pub expiries: u64,
    /// Holds that an operator ended.
    pub forced: u64,
    /// Holds that ended with their session.
    pub ended: u64,
    /// Requests that ended without a grant: it took too long, they were withdrawn, or only tried.
    pub timeouts: u64,
    /// Holds there are now.
    pub held: u64,
    /// Places in queues there are now.
    pub waiting: u64,
    /// From the queue to the grant, for those who had to queue.
    pub wait: Histogram,
    /// From the grant to the end of the hold.
    pub hold: Histogram,
}

impl Counts {
    fn add(&mut self, other: &Self) {
        self.grants += other.grants;
        self.releases += other.releases;
        self.expiries += other.expiries;
        self.forced += other.forced;
        self.ended += other.ended;
        self.timeouts += other.timeouts;
        self.held += other.held;
        self.waiting += other.waiting;
        self.wait.add(&other.wait);
        self.hold.add(&other.hold);
    }
}

/// Everything that is counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// By [`Primitive::ALL`].
    pub primitives: [Counts; Primitive::ALL.len()],
    /// Commands that were executed, by [`CommandKind::ALL`].
    pub commands: [u64; CommandKind::ALL.len()],
    /// Commands that were refused, by [`REFUSALS`].
    pub refusals: [u64; REFUSALS.len()],
    /// Grants and items that could not be told to the one who asked, and were taken back.
    pub undone: u64,
    /// Listeners to signals there are now.
    pub listeners: u64,
    /// Watches there are now.
    pub watches: u64,
    /// Observers of elections there are now.
    pub observers: u64,
    /// Results kept for retries now.
    pub results: u64,
    /// About how many bytes they have.
    pub results_bytes: u64,
    /// Keys of locks there are now, idle ones among them.
    pub lock_keys: u64,
    /// Counters there are now.
    pub counters: u64,
    /// KV entries there are now.
    pub kv: u64,
    /// Lists there are now.
    pub lists: u64,
    /// Barriers there are now.
    pub barriers: u64,
    /// Waiters in the longest queue of a lock now.
    pub longest_queue: u64,
}

impl Tally {
    /// What happened to the holds of a kind.
    #[must_use]
    pub fn of(&self, primitive: Primitive) -> &Counts {
        &self.primitives[primitive as usize]
    }

    /// Adds the numbers of another store of the same server.
    pub fn add(&mut self, other: &Self) {
        for (mine, theirs) in self.primitives.iter_mut().zip(&other.primitives) {
            mine.add(theirs);
        }
        add_each(&mut self.commands, &other.commands);
        add_each(&mut self.refusals, &other.refusals);
        self.undone += other.undone;
        self.listeners += other.listeners;
        self.watches += other.watches;
        self.observers += other.observers;
        self.results += other.results;
        self.results_bytes += other.results_bytes;
        self.lock_keys += other.lock_keys;
        self.counters += other.counters;
        self.kv += other.kv;
        self.lists += other.lists;
        self.barriers += other.barriers;
        self.longest_queue = self.longest_queue.max(other.longest_queue);
    }

    /// Forgets what a store of many keeps for all of them, or would be counted once for each.
    pub fn forget_subscriptions(&mut self) {
        self.listeners = 0;
        self.watches = 0;
        self.observers = 0;
        self.commands[CommandKind::Subscribe as usize] = 0;
        self.commands[CommandKind::Unsubscribe as usize] = 0;
    }

    pub(crate) fn command(&mut self, command: &Command<'_>) {
        if let Some(kind) = command.kind()
            && let Some(count) = self.commands.get_mut(kind as usize)
        {
            *count += 1;
        }
    }

    pub(crate) fn outcome(&mut self, outcome: &Outcome) {
        if let Outcome::Refused(refusal) = outcome
            && let Some(count) = self.refusals.get_mut(*refusal as usize)
        {
            *count += 1;
        }
    }

    pub(crate) fn counts(&mut self, primitive: Primitive) -> &mut Counts {
        &mut self.primitives[primitive as usize]
    }

    /// `waited` is none for a claim that did not have to queue.
    pub(crate) fn granted(&mut self, primitive: Primitive, waited: Option<Span>) {
        let counts = self.counts(primitive);
        counts.grants += 1;
        counts.held += 1;
        if let Some(waited) = waited {
            counts.wait.observe(waited);
        }
    }

    pub(crate) fn ended(&mut self, primitive: Primitive, end: EndOfHold, held: Span) {
        let counts = self.counts(primitive);
        match end {
            EndOfHold::Released | EndOfHold::Resigned => counts.releases += 1,
            EndOfHold::Expired => counts.expiries += 1,
            EndOfHold::Forced => counts.forced += 1,
            EndOfHold::Session(_) => counts.ended += 1,
        }
        counts.held -= 1;
        counts.hold.observe(held);
    }

    pub(crate) fn subscriptions(&mut self, subscription: &Owned) -> &mut u64 {
        match subscription {
            Owned::Signals { .. } => &mut self.listeners,
            Owned::Changes { .. } => &mut self.watches,
            Owned::Leaders { .. } => &mut self.observers,
        }
    }

    /// A session had results of so many bytes kept, and now has others.
    pub(crate) fn results_changed(&mut self, before: (u64, u64), after: (u64, u64)) {
        self.results = self.results.wrapping_sub(before.0).wrapping_add(after.0);
        // Of a snapshot that is about to be refused this may be anything.
        self.results_bytes = self.results_bytes.wrapping_sub(before.1).wrapping_add(after.1);
    }
}

fn add_each(mine: &mut [u64], theirs: &[u64]) {
    for (mine, theirs) in mine.iter_mut().zip(theirs) {
        *mine += theirs;
    }
}

/// How many queues have which length, so that the longest is known without a look at all of them. A queue grows and
/// shrinks by one.
#[derive(Default)]
pub(crate) struct QueueLengths {
    /// At `n - 1` the queues of length `n`. The last is never zero.
    counts: Vec<u32>,
}

impl QueueLengths {
    /// Below this, room to grow is kept.
    const ROOM: usize = 1024;

    pub(crate) fn grew(&mut self, to: u32) {
        let to = to as usize;
        if to > self.counts.len() {
            self.counts.push(0);
        }
        self.counts[to - 1] += 1;
        if to > 1 {
            self.counts[to - 2] -= 1;
        }
    }

    pub(crate) fn shrank(&mut self, to: u32) {
        let to = to as usize;
        self.counts[to] -= 1;
        if to > 0 {
            self.counts[to - 1] += 1;
        }
        if self.counts.last() == Some(&0) {
            self.counts.pop();
            if self.counts.capacity() > Self::ROOM && self.counts.len() < self.counts.capacity() / 4
            {
                self.counts.shrink_to(self.counts.capacity() / 2);
            }
        }
    }

    fn longest(&self) -> u64 {
        self.counts.len() as u64
    }
}

impl Store {
    /// What has happened since this store was made, and how much there is in it now.
    #[must_use]
    pub fn tally(&self) -> Tally {
        let mut tally = self.tally.clone();
        tally.lock_keys = self.locks.arena.len() as u64;
        tally.counters = self.counters.len() as u64;
        tally.kv = self.kv.len() as u64;
        tally.lists = self.lists.len() as u64;
        tally.barriers = self.barriers.len() as u64;
        tally.longest_queue = self.queue_lengths.longest();
        tally
    }

    /// Goes on from what an earlier store of this process counted, whose place this one takes.
    pub fn continue_tally(&mut self, earlier: &Self) {
        let mut sum = earlier.tally.clone();
        for counts in &mut sum.primitives {
            counts.held = 0;
            counts.waiting = 0;
        }
        (sum.listeners, sum.watches, sum.observers) = (0, 0, 0);
        (sum.results, sum.results_bytes) = (0, 0);
        sum.add(&self.tally);
        self.tally = sum;
    }

    /// Whether what is said of the present is so.
    pub(crate) fn verify_tally(&self) -> Result<(), String> {
        let mut seen = Tally::default();
        for (_, lock) in self.locks.arena.iter() {
            for (_, claim) in lock.holders.iter(&self.locks.claims) {
                seen.counts(Primitive::of(lock, claim)).held += 1;
            }
            for (_, claim) in lock.queue.iter(&self.locks.claims) {
                seen.counts(Primitive::of(lock, claim)).waiting += 1;
            }
            seen.longest_queue = seen.longest_queue.max(u64::from(lock.queue.len()));
        }
        for session in self.sessions.values() {
            for subscription in &session.subscriptions {
                *seen.subscriptions(subscription) += 1;
            }
            seen.results_changed((0, 0), session.results_kept());
        }
        for primitive in Primitive::ALL {
            let (counted, seen) = (self.tally.of(primitive), seen.of(primitive));
            if (counted.held, counted.waiting) != (seen.held, seen.waiting) {
                return Err(format!("holds or waits of {primitive:?} are miscounted"));
            }
        }
        let present =
            |it: &Tally| (it.listeners, it.watches, it.observers, it.results, it.results_bytes);
        if present(&self.tally) != present(&seen) {
            return Err("subscriptions or kept results are miscounted".into());
        }
        if self.queue_lengths.longest() != seen.longest_queue {
            return Err("the longest queue is miscounted".into());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use alloc::sync::Arc;

    use super::*;
    use dflockd_api::{Caller, RequestId, SessionId, Space, Timestamp, Token, command};

    use crate::limits::Limits;
    use crate::shared::Shared;

    struct Scene {
        store: Store,
        requests: u64,
        now: Timestamp,
    }

    impl Scene {
        fn new() -> Self {
            let store = Store::new(Limits::default(), 1, Arc::new(Shared::new()), Timestamp(0));
            Self { store, requests: 0, now: Timestamp(0) }
        }

        /// What the caller is told at once.
        fn run(&mut self, session: u64, command: Command<'_>) -> Option<Outcome> {
            self.requests += 1;
            let (session, request) = (SessionId(session), RequestId(self.requests));
            let mut effects = Vec::new();
            let caller = Caller { session, request, keep: true };
            self.store.apply(caller, command, self.now, &mut effects);
            self.store.check_invariants();
            effects.into_iter().find_map(|effect| match effect {
                crate::Effect::Reply { session: to, request: of, outcome }
                    if (to, of) == (session, request) =>
                {
                    Some(outcome)
                }
                crate::Effect::Reply { .. }
                | crate::Effect::Push { .. }
                | crate::Effect::SessionEnded { .. } => None,
            })
        }

        fn acquire(&mut self, session: u64, key: &[u8], mode: Mode, wait: Span) -> Option<Token> {
            let lease = Some(Span::from_secs(10));
            let command = Command::Acquire(command::Acquire { key, mode, wait, lease, salt: 7 });
            match self.run(session, command) {
                Some(Outcome::Granted(grant)) => Some(grant.token),
                _ => None,
            }
        }
    }

    #[test]
    fn what_happens_to_holds_is_counted() {
        let wait = Span::from_secs(60);
        let mut it = Scene::new();
        // A hold that is given back after a second, one that expires, one that an operator ends, one that goes with
        // its session.
        let token = it.acquire(1, b"k", Mode::Mutex, wait).unwrap();
        for session in 2..=4 {
            assert_eq!(it.acquire(session, b"k", Mode::Mutex, wait), None);
        }
        assert_eq!(it.acquire(5, b"k", Mode::Mutex, Span::ZERO), None);
        let counts = it.store.tally();
        assert_eq!((counts.of(Primitive::Mutex).held, counts.of(Primitive::Mutex).waiting), (1, 3));
        assert_eq!(counts.longest_queue, 3);
        it.now = it.now + Span::from_secs(1);
        let space = Space::Locks;
        it.run(1, Command::Release(command::Release { key: b"k", space, token, resign: false }));
        it.now = it.now + Span::from_secs(10);
        it.run(9, Command::Tick);
        let holder = it.store.locks.by_fence.keys().copied().next().unwrap();
        it.run(9, Command::ForceRelease(command::ForceRelease { key: b"k", space, fence: holder }));
        it.run(4, Command::EndSession { release: true, forced: false });
        it.run(9, Command::Release(command::Release { key: b"k", space, token, resign: false }));

        let tally = it.store.tally();
        let counts = tally.of(Primitive::Mutex);
        assert_eq!((counts.grants, counts.releases, counts.expiries), (4, 1, 1));
        assert_eq!((counts.forced, counts.ended, counts.timeouts), (1, 1, 1));
        assert_eq!((counts.held, counts.waiting, tally.longest_queue), (0, 0, 0));
        assert_eq!((counts.wait.total(), counts.hold.total()), (3, 4));
        assert_eq!(counts.wait.sum, u128::from(Span::from_secs(1 + 11 + 11).0));
        assert_eq!(counts.hold.sum, u128::from(Span::from_secs(1 + 10).0));
        assert_eq!(tally.commands[CommandKind::Acquire as usize], 5);
        assert_eq!(tally.refusals[crate::Refusal::NotHeld as usize], 1);
        assert_eq!((tally.lock_keys, tally.refusals.iter().sum::<u64>()), (1, 1));
    }

    #[test]
    fn kinds_of_holds_are_told_apart() {
        let mut it = Scene::new();
        let limit = Mode::Semaphore { limit: 1 };
        for (session, mode) in
            (1..).zip([Mode::Mutex, Mode::Election, limit, Mode::Read, Mode::Read, Mode::Write])
        {
            let key = alloc::format!("{mode:?}");
            it.acquire(session, key.as_bytes(), mode, Span::ZERO).unwrap();
        }
        let tally = it.store.tally();
        let held = Primitive::ALL.map(|primitive| tally.of(primitive).held);
        assert_eq!(held, [1, 1, 1, 2, 1]);
    }

    #[test]
    fn a_restored_store_knows_how_much_there_is_and_goes_on_counting() {
        let wait = Span::from_secs(60);
        let mut it = Scene::new();
        it.acquire(1, b"k", Mode::Write, wait).unwrap();
        it.acquire(2, b"k", Mode::Read, wait);
        it.acquire(3, b"k", Mode::Read, wait);
        let pattern = b"jobs.>";
        it.run(
            1,
            Command::Subscribe(command::Subscribe {
                to: crate::Subscription::Signals { pattern, group: b"g" },
            }),
        );
        let before = it.store.tally();
        let bytes = it.store.snapshot();
        let mut restored = Store::restore(&bytes, Arc::new(Shared::new())).unwrap();
        assert_eq!(restored.tally().of(Primitive::Write).grants, 0);
        restored.continue_tally(&it.store);
        assert_eq!(restored.tally(), before);
        assert_eq!((before.of(Primitive::Read).waiting, before.listeners), (2, 1));
        assert!(before.results > 0 && before.results_bytes > 0);
        assert_eq!(restored.snapshot(), bytes, "numbers are no state");
    }

    /// What several stores of a server count is added up, but for the longest queue.
    #[test]
    fn tallies_of_several_stores_are_added() {
        let histogram = |n: u64| {
            let mut histogram = Histogram::default();
            (0..n).for_each(|_| histogram.observe(Span(n)));
            histogram
        };
        let tally = |n: u64| {
            let counts = Counts {
                grants: n,
                releases: 2 * n,
                expiries: 3 * n,
                forced: 4 * n,
                ended: 5 * n,
                timeouts: 6 * n,
                held: 7 * n,
                waiting: 8 * n,
                wait: histogram(n),
                hold: histogram(2 * n),
            };
            Tally {
                primitives: core::array::from_fn(|_| counts.clone()),
                commands: [9 * n; CommandKind::ALL.len()],
                refusals: [10 * n; REFUSALS.len()],
                undone: 11 * n,
                listeners: 12 * n,
                watches: 13 * n,
                observers: 14 * n,
                results: 15 * n,
                results_bytes: 16 * n,
                lock_keys: 17 * n,
                counters: 18 * n,
                kv: 19 * n,
                lists: 20 * n,
                barriers: 21 * n,
                longest_queue: 22 * n,
            }
        };
        let mut sum = tally(1);
        sum.add(&tally(2));
        let mut expected = tally(3);
        expected.longest_queue = 44;
        for counts in &mut expected.primitives {
            counts.wait.sum = 1 + 4;
            counts.hold.sum = 4 + 16;
        }
        assert_eq!(sum, expected);
    }

    #[test]
    fn names_are_in_the_order_of_the_numbers() {
        let names = Primitive::ALL.map(Primitive::name);
        assert_eq!(names, ["mutex", "election", "semaphore", "read", "write"]);
        for (index, primitive) in Primitive::ALL.into_iter().enumerate() {
            assert_eq!(primitive as usize, index);
        }
        for (index, (kind, _)) in CommandKind::ALL.iter().enumerate() {
            assert_eq!(*kind as usize, index);
        }
        for (index, (refusal, _)) in REFUSALS.iter().enumerate() {
            assert_eq!(*refusal as usize, index);
        }
    }

    #[test]
    fn a_bound_belongs_to_its_bucket() {
        assert!(BUCKETS.is_sorted());
        let mut histogram = Histogram::default();
        let check = |histogram: &mut Histogram, span: Span, bucket: usize| {
            let before = histogram.counts[bucket];
            histogram.observe(span);
            assert_eq!(histogram.counts[bucket], before + 1, "{span:?}");
        };
        check(&mut histogram, Span::ZERO, 0);
        check(&mut histogram, BUCKETS[0], 0);
        check(&mut histogram, Span(BUCKETS[0].0 + 1), 1);
        check(&mut histogram, BUCKETS[18], 18);
        check(&mut histogram, Span(u64::MAX), 19);
        assert_eq!(histogram.total(), 5);
        assert!(histogram.sum > u128::from(u64::MAX));
    }

    #[test]
    fn the_longest_queue_is_known_while_queues_grow_and_shrink() {
        let mut lengths = QueueLengths::default();
        let mut queues = [0u32; 7];
        let mut random = 1u64;
        for _ in 0..100_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let queue = &mut queues[(random >> 40) as usize % 7];
            if (random >> 60).is_multiple_of(2) && *queue < 3000 {
                *queue += 1;
                lengths.grew(*queue);
            } else if *queue > 0 {
                *queue -= 1;
                lengths.shrank(*queue);
            }
            assert_eq!(lengths.longest(), u64::from(*queues.iter().max().unwrap()));
        }
        for queue in &mut queues {
            while *queue > 0 {
                *queue -= 1;
                lengths.shrank(*queue);
            }
        }
        assert_eq!(lengths.longest(), 0);
    }
}
