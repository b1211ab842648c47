//! The generator: a closed loop over many connections, one readiness loop per thread.
//!
//! One operation is one acquire and one release. A client of the load (a *slot*) sends its next
//! request when the answer to the last one has come; a connection carries one slot, or several
//! if it is pipelined. The loop allocates nothing per operation.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use mio::{Events, Poll};

use crate::check::{Exclusion, Order};
use crate::lines::{split_number, write_number};
use crate::link::{Greeted, Link};
use crate::numbers::{Random, Zipf, jain};
use crate::process;
use crate::protocol::{Answer, Proof, Protocol, Request, refused};
use crate::report::{Progress, Round};

/// Bytes taken in by one read.
const SCRATCH_BYTES: usize = 65_536;

/// Every so many grants the lock is kept until all sockets have been looked at once more, so
/// that a second holder would be seen.
const LINGER_EVERY: u64 = 64;

/// How often all others together may pass one request before the queue counts as unfair.
const PASSED_ROUNDS_MAX: u64 = 16;

/// How long the operations under way at the end may take.
const DRAIN_WITHIN: Duration = Duration::from_secs(3);

/// How keys are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keys {
    /// Each slot has its own.
    Own,
    /// All want the same one.
    One,
    /// Each operation draws one of so many, exponent 0.99.
    Zipf(usize),
}

/// One round of load on one server (or several).
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    /// What is spoken.
    pub(crate) protocol: &'static dyn Protocol,
    /// Connection `i` goes to server `i` modulo their number.
    pub(crate) servers: Vec<SocketAddr>,
    /// The processes whose time and memory are counted.
    pub(crate) pids: Vec<u32>,
    /// How many connections.
    pub(crate) connections: usize,
    /// Slots of each connection.
    pub(crate) in_flight: usize,
    /// Which keys.
    pub(crate) keys: Keys,
    /// Lease of each lock in seconds.
    pub(crate) lease_s: u64,
    /// What is measured.
    pub(crate) measure: Duration,
    /// What runs before that.
    pub(crate) warmup: Duration,
    /// Threads of the generator.
    pub(crate) threads: usize,
    /// Numbered requests, where the server knows them.
    pub(crate) mux: bool,
    /// Mean pause before a lock that was taken is tried again, for servers without a queue.
    pub(crate) retry: Duration,
}

impl Plan {
    fn key_count(&self) -> usize {
        match self.keys {
            Keys::Own => self.connections * self.in_flight,
            Keys::One => 1,
            Keys::Zipf(count) => count,
        }
    }

    /// Makes and greets connection `index`.
    pub(crate) fn connect(&self, index: usize) -> io::Result<Greeted> {
        let address = self.servers[index % self.servers.len()];
        Greeted::connect(self.protocol, address, self.lease_s, self.mux)
    }
}

/// The name of key `index` of this process, distinct from what an earlier run may have left.
pub(crate) fn key_name(index: usize) -> Vec<u8> {
    format!("bench/{:x}/{index}", std::process::id()).into_bytes()
}

/// When a round is warm and when it ends.
#[derive(Debug, Clone, Copy)]
struct Window {
    warm_at: Instant,
    end_at: Instant,
}

/// What all threads of a round share.
struct Shared<'a> {
    plan: &'a Plan,
    window: Window,
    keys: &'a [Vec<u8>],
    zipf: Option<&'a Zipf>,
    exclusion: Option<&'a Exclusion>,
    failed: &'a AtomicBool,
}

/// Runs one round.
pub(crate) fn run(plan: &Plan, progress: &Progress) -> io::Result<Round> {
    let keys: Vec<Vec<u8>> = (0..plan.key_count()).map(key_name).collect();
    let zipf = match plan.keys {
        Keys::Zipf(count) => Some(Zipf::new(count, 0.99)),
        Keys::Own | Keys::One => None,
    };
    let exclusion = plan.protocol.excludes().then(|| Exclusion::new(keys.len()));
    let threads = plan.threads.clamp(1, plan.connections);
    let mut connections: Vec<Vec<(usize, Greeted)>> = (0..threads).map(|_| Vec::new()).collect();
    for index in 0..plan.connections {
        connections[index % threads].push((index, plan.connect(index)?));
    }
    let warm_at = Instant::now() + plan.warmup;
    let shared = Shared {
        plan,
        window: Window { warm_at, end_at: warm_at + plan.measure },
        keys: &keys,
        zipf: zipf.as_ref(),
        exclusion: exclusion.as_ref(),
        failed: &AtomicBool::new(false),
    };
    thread::scope(|scope| {
        let workers: Vec<_> = connections
            .into_iter()
            .map(|own| {
                let shared = &shared;
                scope.spawn(move || {
                    let tally = Worker::new(shared, own).and_then(Worker::run);
                    if tally.is_err() {
                        shared.failed.store(true, Ordering::Relaxed);
                    }
                    tally
                })
            })
            .collect();
        let usage = Usage::over(plan, shared.window, shared.failed, progress);
        let mut whole = Tally::new();
        for worker in workers {
            whole.add(worker.join().map_err(|_| io::Error::other("the generator panicked"))??);
        }
        Ok(whole.round(plan, usage))
    })
}

/// Processor time of both sides over the window, and memory at its end.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Usage {
    server: Option<Duration>,
    generator: Duration,
    memory: Option<u64>,
}

impl Usage {
    /// Waits for the window to pass and looks at its ends.
    fn over(plan: &Plan, window: Window, failed: &AtomicBool, progress: &Progress) -> Self {
        progress.wait_until(window.warm_at, failed);
        let start = Self::now(&plan.pids);
        progress.wait_until(window.end_at, failed);
        Self::now(&plan.pids).since(start)
    }

    /// What was used so far.
    pub(crate) fn now(pids: &[u32]) -> Self {
        Self {
            server: process::sum(pids, process::cpu),
            generator: process::own_cpu(),
            memory: process::sum(pids, process::resident),
        }
    }

    /// What was used between the two.
    pub(crate) fn since(self, start: Self) -> Self {
        let between =
            |end: Option<Duration>, start: Option<Duration>| Some(end?.saturating_sub(start?));
        Self {
            server: between(self.server, start.server),
            generator: self.generator.saturating_sub(start.generator),
            memory: self.memory,
        }
    }

    /// Puts it into a round, divided by the operations.
    pub(crate) fn fill(self, round: &mut Round) {
        let each = |time: Duration| time.as_secs_f64() * 1e6 / (round.ops.max(1) as f64);
        round.server_us_per_op = self.server.map(each);
        round.generator_us_per_op = each(self.generator);
        round.generator_load = self.generator.as_secs_f64() / round.seconds;
        round.memory_bytes = self.memory;
    }
}

/// What was counted within the window.
pub(crate) struct Tally {
    /// Nanoseconds of each operation.
    latency: Histogram<u64>,
    ops: u64,
    grants: u64,
    retries: u64,
    /// Grants of the only key to another slot than the one before; `None` with several keys.
    hand_overs: Option<u64>,
    /// By slot.
    shares: Vec<u64>,
    order: Option<Order>,
    violations: Vec<String>,
}

impl Tally {
    /// Nothing counted yet.
    pub(crate) fn new() -> Self {
        Self {
            latency: Histogram::new_with_bounds(1, 600_000_000_000, 3)
                .expect("bounds that hdrhistogram documents as valid"),
            ops: 0,
            grants: 0,
            retries: 0,
            hand_overs: None,
            shares: Vec::new(),
            order: None,
            violations: Vec::new(),
        }
    }

    /// One operation done.
    pub(crate) fn count(&mut self, took: Duration) {
        self.ops += 1;
        self.latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }

    fn violation(&mut self, text: String) {
        // The first few say what is wrong; a broken server would fill the memory with the rest.
        if self.violations.len() < 10 {
            self.violations.push(text);
        }
    }

    fn add(&mut self, other: Self) {
        self.latency.add(&other.latency).expect("same bounds");
        self.ops += other.ops;
        self.grants += other.grants;
        self.retries += other.retries;
        self.hand_overs = self.hand_overs.or(other.hand_overs);
        self.shares.extend(other.shares);
        self.order = self.order.take().or(other.order);
        self.violations.extend(other.violations);
    }

    /// The figures of the round.
    pub(crate) fn round(self, plan: &Plan, usage: Usage) -> Round {
        let seconds = plan.measure.as_secs_f64();
        let micros = |quantile| self.latency.value_at_quantile(quantile) as f64 / 1e3;
        let mut round = Round {
            ops: self.ops,
            seconds,
            ops_per_s: self.ops as f64 / seconds,
            p50_us: micros(0.5),
            p99_us: micros(0.99),
            p999_us: micros(0.999),
            grants_checked: self.grants,
            retries: self.retries,
            hand_overs_per_s: self.hand_overs.map(|count| count as f64 / seconds),
            jain: jain(&self.shares),
            least: self.shares.iter().min().copied().unwrap_or(0),
            most: self.shares.iter().max().copied().unwrap_or(0),
            in_order: self
                .order
                .as_ref()
                .map(|order| order.in_order as f64 / order.grants.max(1) as f64),
            passed_max: self.order.as_ref().map(|order| order.passed_max),
            violations: self.violations,
            ..Round::default()
        };
        usage.fill(&mut round);
        round
    }
}

/// One client of the load.
struct Slot {
    link: usize,
    key: usize,
    proof: Proof,
    request: Request,
    started_at: Instant,
    /// Its number in the order of requests.
    sent: u64,
}

/// Which answer belongs to whom, on one connection.
#[derive(Default)]
struct Pending {
    in_order: VecDeque<usize>,
    numbered: HashMap<u64, usize>,
    numbers_used: u64,
}

/// One thread of the generator.
struct Worker<'a> {
    shared: &'a Shared<'a>,
    poll: Poll,
    links: Vec<Link>,
    pending: Vec<Pending>,
    slots: Vec<Slot>,
    /// Distinguishes the slots of all threads.
    slot_base: u32,
    /// Slots that try again, and when.
    retries: BinaryHeap<Reverse<(Instant, usize)>>,
    /// Slots that hold on until the sockets have been looked at again, and since which look.
    lingering: VecDeque<(usize, u64)>,
    /// How often the sockets have been looked at.
    looks: u64,
    /// Slots in the middle of an operation.
    busy: usize,
    /// The slot of the last grant.
    last_granted: usize,
    random: Random,
    now: Instant,
    tally: Tally,
}

impl<'a> Worker<'a> {
    fn new(shared: &'a Shared<'a>, own: Vec<(usize, Greeted)>) -> io::Result<Self> {
        let plan = shared.plan;
        let poll = Poll::new()?;
        let first = own.first().map_or(0, |(index, _)| *index);
        let now = Instant::now();
        let mut links = Vec::with_capacity(own.len());
        let mut slots = Vec::with_capacity(own.len() * plan.in_flight);
        for (link, (index, greeted)) in own.into_iter().enumerate() {
            links.push(Link::new(greeted, poll.registry(), link)?);
            slots.extend((0..plan.in_flight).map(|place| Slot {
                link,
                key: if plan.keys == Keys::Own { index * plan.in_flight + place } else { 0 },
                proof: Proof::none(),
                request: Request::Acquire,
                started_at: now,
                sent: 0,
            }));
        }
        let mut tally = Tally::new();
        tally.shares = vec![0; slots.len()];
        // With several threads nobody sees all grants.
        let one = plan.keys == Keys::One && plan.threads == 1;
        tally.hand_overs = one.then_some(0);
        tally.order = (one && plan.protocol.queues()).then(Order::default);
        Ok(Self {
            shared,
            poll,
            pending: links.iter().map(|_| Pending::default()).collect(),
            links,
            slot_base: u32::try_from(first << 20).unwrap_or(0),
            busy: 0,
            last_granted: usize::MAX,
            slots,
            retries: BinaryHeap::new(),
            lingering: VecDeque::new(),
            looks: 0,
            random: Random::new(first as u64 + u64::from(std::process::id())),
            now,
            tally,
        })
    }

    fn run(mut self) -> io::Result<Tally> {
        let mut events = Events::with_capacity(1024);
        let mut scratch = vec![0; SCRATCH_BYTES];
        for slot in 0..self.slots.len() {
            self.start(slot);
        }
        for link in &mut self.links {
            link.flush()?;
        }
        let give_up_at = self.shared.window.end_at + DRAIN_WITHIN;
        while self.busy > 0 && self.now < give_up_at {
            if self.shared.failed.load(Ordering::Relaxed) {
                break;
            }
            self.poll.poll(&mut events, Some(self.patience()))?;
            for event in &events {
                self.now = Instant::now();
                self.serve(event.token().0, &mut scratch)?;
            }
            self.now = Instant::now();
            self.retry_due()?;
            self.release_lingering()?;
        }
        if let Some(order) = &self.tally.order {
            let limit = PASSED_ROUNDS_MAX * self.slots.len() as u64;
            if order.passed_max > limit {
                let text = format!("a waiter was passed {} times", order.passed_max);
                self.tally.violation(text);
            }
        }
        Ok(self.tally)
    }

    fn patience(&self) -> Duration {
        if !self.lingering.is_empty() {
            return Duration::ZERO;
        }
        match self.retries.peek() {
            Some(Reverse((due_at, _))) => due_at.saturating_duration_since(self.now),
            None => Duration::from_millis(100),
        }
    }

    /// Takes in what a connection has to say and answers it.
    fn serve(&mut self, link: usize, scratch: &mut [u8]) -> io::Result<()> {
        loop {
            let filled = self.links[link].receive(scratch)?;
            let mut done = 0;
            while let Some(length) = self.links[link].dialect.frame(&scratch[done..filled]) {
                self.answered(link, &scratch[done..done + length])?;
                done += length;
            }
            self.links[link].keep(&scratch[done..filled]);
            self.links[link].flush()?;
            if filled < scratch.len() {
                return Ok(());
            }
        }
    }

    fn answered(&mut self, link: usize, answer: &[u8]) -> io::Result<()> {
        let pending = &mut self.pending[link];
        let (slot, body) = if self.links[link].dialect.numbered() {
            let numbered = split_number(answer);
            match numbered.and_then(|(n, body)| Some((pending.numbered.remove(&n)?, body))) {
                Some(found) => found,
                None => return Err(refused("a request", answer)),
            }
        } else {
            match pending.in_order.pop_front() {
                Some(slot) => (slot, answer),
                None => return Err(refused("nothing", answer)),
            }
        };
        let Link { out, dialect, .. } = &mut self.links[link];
        dialect.reply(out, answer, self.now);
        let state = &mut self.slots[slot];
        match dialect.read(state.request, body, &mut state.proof) {
            Answer::Granted { fence } => self.granted(slot, fence),
            Answer::Busy => self.taken(slot),
            Answer::Done => self.released(slot),
            Answer::Refused if state.request == Request::Acquire => {
                return Err(refused("an acquire", body));
            }
            Answer::Refused => return Err(refused("a release", body)),
        }
        Ok(())
    }

    fn start(&mut self, slot: usize) {
        let shared = self.shared;
        if let Some(zipf) = shared.zipf {
            self.slots[slot].key = zipf.draw(&mut self.random);
        }
        self.slots[slot].started_at = self.now;
        self.busy += 1;
        self.send(slot, Request::Acquire);
        if let Some(order) = &mut self.tally.order {
            self.slots[slot].sent = order.sent();
        }
    }

    fn granted(&mut self, slot: usize, fence: u64) {
        let Window { warm_at, end_at } = self.shared.window;
        if let Some(count) = &mut self.tally.hand_overs
            && (warm_at..end_at).contains(&self.now)
        {
            *count += u64::from(self.last_granted != slot);
        }
        self.last_granted = slot;
        let state = &self.slots[slot];
        if let Some(order) = &mut self.tally.order {
            order.granted(state.sent);
        }
        if let Some(exclusion) = self.shared.exclusion {
            self.tally.grants += 1;
            let id = self.slot_base.wrapping_add(u32::try_from(slot).unwrap_or(u32::MAX - 1));
            if let Some(text) = exclusion.granted(state.key, id, fence) {
                self.tally.violation(text);
            }
            if self.tally.grants.is_multiple_of(LINGER_EVERY) {
                self.lingering.push_back((slot, self.looks));
                return;
            }
        }
        self.release(slot);
    }

    fn release(&mut self, slot: usize) {
        if let Some(exclusion) = self.shared.exclusion {
            exclusion.releasing(self.slots[slot].key);
        }
        self.send(slot, Request::Release);
    }

    /// Sends the releases of those who have been looked over once.
    fn release_lingering(&mut self) -> io::Result<()> {
        while let Some(&(slot, look)) = self.lingering.front() {
            if look == self.looks {
                break;
            }
            self.lingering.pop_front();
            self.release(slot);
            self.links[self.slots[slot].link].flush()?;
        }
        self.looks += 1;
        Ok(())
    }

    fn taken(&mut self, slot: usize) {
        self.tally.retries += 1;
        if self.now >= self.shared.window.end_at {
            self.busy -= 1;
            return;
        }
        let retry = self.shared.plan.retry;
        let share = self.random.below(1024);
        let pause = retry / 2 + retry * u32::try_from(share).expect("below 1024") / 1024;
        self.retries.push(Reverse((self.now + pause, slot)));
    }

    fn retry_due(&mut self) -> io::Result<()> {
        while let Some(&Reverse((due_at, slot))) = self.retries.peek() {
            if due_at > self.now {
                break;
            }
            self.retries.pop();
            if self.now >= self.shared.window.end_at {
                self.busy -= 1;
                continue;
            }
            self.send(slot, Request::Acquire);
            self.links[self.slots[slot].link].flush()?;
        }
        Ok(())
    }

    fn released(&mut self, slot: usize) {
        let Window { warm_at, end_at } = self.shared.window;
        self.busy -= 1;
        if self.now >= end_at {
            return;
        }
        if self.now >= warm_at {
            self.tally.count(self.now - self.slots[slot].started_at);
            self.tally.shares[slot] += 1;
        }
        self.start(slot);
    }

    fn send(&mut self, slot: usize, request: Request) {
        let state = &mut self.slots[slot];
        state.request = request;
        let link = &mut self.links[state.link];
        let pending = &mut self.pending[state.link];
        if link.dialect.numbered() {
            pending.numbers_used += 1;
            write_number(&mut link.out, pending.numbers_used);
            pending.numbered.insert(pending.numbers_used, slot);
        } else {
            pending.in_order.push_back(slot);
        }
        let key = &self.shared.keys[state.key];
        link.dialect.write(&mut link.out, request, key, &mut state.proof);
    }
}
