//! The state machine: whatever is sent to it in whatever order, its invariants hold, every request is
//! answered at most once, and the same commands give the same effects, through a snapshot or not and
//! whatever seeds the hash maps.
//!
//! Input: settings, then steps of a time, a caller and a command, all picked from small pools so that they
//! meet. The end of the input reads as zeros.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dflockd_core::{
    Caller, Command, Effect, End, Expect, Fence, Limits, Listed, Mode, Outcome, OwnedCommand,
    Query, RequestId, Revision, SessionId, Shared, Space, Span, Store, Subscription, Timestamp,
    Token, command,
};

const CLIENTS: u64 = 4;
const STEPS_MAX: usize = 400;
const STEPS_PER_SNAPSHOT: usize = 16;

const KEYS: [&[u8]; 4] = [b"a", b"a.b", b"c.d.e", b""];
const PATTERNS: [&[u8]; 8] = [b"a", b"a.b", b"*", b">", b"a.*", b"a.>", b"c.*.e", b"a*"];
const GROUPS: [&[u8]; 3] = [b"", b"g", b"h"];
const VALUES: [&[u8]; 4] = [b"x", b"yy", b"", b"too-long"];
const DELTAS: [i64; 6] = [0, 1, -1, 5, i64::MAX, i64::MIN];
const SPANS: [u64; 8] = [0, 1, 2, 5, 10, 50, 200, u64::MAX];
const LEASES: [Option<Span>; 6] =
    [None, Some(Span(1)), Some(Span(3)), Some(Span(10)), Some(Span(50)), Some(Span(u64::MAX))];

/// Who lets time pass.
const NOBODY: Caller = Caller { session: SessionId(0), request: RequestId(0), keep: false };

/// All that could be seen at one step.
#[derive(Debug, PartialEq, Eq)]
pub struct Seen {
    effects: Vec<Effect>,
    reads: Vec<Outcome>,
    listed: Vec<Listed>,
    deadline: Option<Timestamp>,
    revision: Revision,
    locks: u64,
    keys: u64,
}

/// Plays the input twice: once straight through, once with another seed and a store that is replaced by
/// its own snapshot all the time.
pub fn run(data: &[u8]) {
    check_same(&play(data), &Game::new(data, 7, true).play());
}

/// Plays the input straight through.
pub fn play(data: &[u8]) -> Vec<Seen> {
    Game::new(data, 42, false).play()
}

/// Panics if two plays of one input differ.
pub fn check_same(one: &[Seen], other: &[Seen]) {
    for (step, (one, other)) in one.iter().zip(other).enumerate() {
        assert_eq!(one, other, "step {step} differs");
    }
    assert_eq!(one.len(), other.len(), "one play is longer");
}

/// The snapshots taken on the way: what a fuzzer of snapshots starts from.
pub fn snapshots(data: &[u8]) -> Vec<Vec<u8>> {
    let mut game = Game::new(data, 42, false);
    game.play();
    game.snapshots
}

struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> u8 {
        let Some((first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        *first
    }

    fn index(&mut self, bound: usize) -> usize {
        usize::from(self.next()) % bound
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.index(from.len())]
    }

    fn flag(&mut self) -> bool {
        self.next() & 1 != 0
    }
}

struct Client {
    session: SessionId,
    keep: bool,
    last: u64,
    detached: bool,
}

impl Client {
    fn new(session: u64, keep: bool) -> Self {
        Self { session: SessionId(session), keep, last: 0, detached: false }
    }
}

/// What is known of a request.
struct Sent {
    /// Under one number; a repetition may ask for something else, and be answered all the same.
    commands: Vec<OwnedCommand>,
    replies: usize,
    space: Space,
    key: &'static [u8],
}

struct Game<'a> {
    bytes: Bytes<'a>,
    store: Store,
    shared: Arc<Shared>,
    fence_ceiling: u64,
    /// Go on with a restored store after each snapshot.
    restores: bool,
    now: Timestamp,
    clients: Vec<Client>,
    sessions: u64,
    sent: BTreeMap<(SessionId, RequestId), Sent>,
    ended: BTreeSet<SessionId>,
    grants: Vec<(Space, &'static [u8], Token)>,
    /// What can be undone.
    outcomes: Vec<Outcome>,
    snapshots: Vec<Vec<u8>>,
}

impl<'a> Game<'a> {
    fn new(data: &'a [u8], seed: u64, restores: bool) -> Self {
        let mut bytes = Bytes(data);
        let limits = limits(&mut bytes);
        let fence_ceiling = bytes.pick(&[u64::MAX, 100, 101, 103]);
        let shared = Arc::new(Shared::new());
        shared.set_fences(100, fence_ceiling);
        let grants_from = Timestamp(bytes.pick(&[0, 0, 7]));
        let keeps = bytes.next();
        let clients = (1..=CLIENTS).map(|id| Client::new(id, keeps >> id & 1 != 0)).collect();
        Self {
            bytes,
            store: Store::new(limits, seed, Arc::clone(&shared), grants_from),
            shared,
            fence_ceiling,
            restores,
            now: Timestamp(0),
            clients,
            sessions: CLIENTS,
            sent: BTreeMap::new(),
            ended: BTreeSet::new(),
            grants: Vec::new(),
            outcomes: Vec::new(),
            snapshots: Vec::new(),
        }
    }

    fn play(&mut self) -> Vec<Seen> {
        let mut seen = Vec::new();
        for step in 1..=STEPS_MAX {
            if self.bytes.0.is_empty() {
                break;
            }
            self.step(&mut seen);
            if step % STEPS_PER_SNAPSHOT == 0 {
                self.pass_through_snapshot();
            }
        }
        self.pass_through_snapshot();
        self.finish(&mut seen);
        seen
    }

    /// After the last instant everybody has an answer, and when all have gone no lock is left.
    fn finish(&mut self, seen: &mut Vec<Seen>) {
        self.now = Timestamp::NEVER;
        seen.push(self.apply(NOBODY, Command::Tick));
        for ((session, request), sent) in &self.sent {
            let answered = sent.replies > 0 || self.ended.contains(session);
            assert!(answered, "{request:?} of {session:?} was never answered");
        }
        for session in self.clients.iter().map(|client| client.session).collect::<Vec<_>>() {
            let caller = Caller { session, ..NOBODY };
            seen.push(self.apply(caller, Command::EndSession { release: true, forced: false }));
        }
        seen.push(self.apply(NOBODY, Command::Tick));
        assert_eq!(self.shared.locks(), 0, "locks are left");
    }

    fn step(&mut self, seen: &mut Vec<Seen>) {
        let advance = self.bytes.next();
        self.now = match advance & 15 {
            0..=8 => self.now,
            9 => self.now + Span(1),
            10 => self.now + Span(2),
            11 => self.now + Span(5),
            12 => self.now + Span(20),
            13 => self.now + Span(1_000),
            _ => {
                let due = self.store.next_deadline().unwrap_or(self.now);
                due.max(self.now).min(self.now + Span(1_000))
            }
        };
        if advance & 0xf0 == 0xf0 {
            self.fence_ceiling = self.fence_ceiling.max(self.shared.fence_next() + 2);
            self.shared.raise_fence_ceiling(self.fence_ceiling);
        }
        let who = self.bytes.next();
        let client = usize::from(who & 3);
        if self.clients[client].detached {
            // It may end right now, and then it is another session that goes on.
            seen.push(self.apply(NOBODY, Command::Tick));
        }
        let outcome = self.pick_outcome(who);
        let (command, space, key) = self.command(client, &outcome);

        let Client { session, keep, last, ref mut detached } = self.clients[client];
        if !is_answered(&command) {
            *detached |= matches!(command, Command::Detach { .. });
            *detached &= command != Command::Attach;
            seen.push(self.apply(Caller { session, request: RequestId(0), keep }, command));
            return;
        }
        // Only who has its results kept may repeat a request.
        let back = u64::from(who >> 2 & 3);
        let retry = who & 0xf0 == 0xf0 && keep && last > back;
        let request = RequestId(if retry { last - back } else { last + 1 });
        if !retry {
            self.clients[client].last += 1;
        }
        let sent = Sent { commands: Vec::new(), replies: 0, space, key };
        self.sent.entry((session, request)).or_insert(sent).commands.push(command.into());
        let at_once = !retry && !command.may_wait();
        let now_seen = self.apply(Caller { session, request, keep }, command);
        let is_mine = |effect: &&Effect| {
            let Effect::Reply { session: to, request: about, .. } = effect else { return false };
            (*to, *about) == (session, request)
        };
        if at_once {
            assert_eq!(now_seen.effects.iter().filter(is_mine).count(), 1, "not answered at once");
        }
        seen.push(now_seen);
    }

    fn apply(&mut self, caller: Caller, command: Command<'_>) -> Seen {
        let mut effects = Vec::new();
        let (ends, ticks) =
            (matches!(command, Command::EndSession { .. }), command == Command::Tick);
        self.store.apply(caller, command, self.now, &mut effects);
        self.store.check_invariants();
        for effect in &effects {
            self.take(effect);
        }
        if ends {
            self.end(caller.session);
        }
        let deadline = self.store.next_deadline();
        if ticks && self.now < Timestamp::NEVER {
            let later = deadline.is_none_or(|deadline| deadline > self.now);
            assert!(later, "something is still due at {:?} after {:?}", deadline, self.now);
        }
        self.see(effects, deadline)
    }

    fn take(&mut self, effect: &Effect) {
        let told = match effect {
            Effect::Reply { session, .. }
            | Effect::Push { session, .. }
            | Effect::SessionEnded { session } => *session,
        };
        assert!(!self.ended.contains(&told), "{told:?} has ended, but is told {effect:?}");
        match effect {
            Effect::Reply { session, request, outcome } => {
                let Some(sent) = self.sent.get_mut(&(*session, *request)) else {
                    panic!("{effect:?} answers nothing");
                };
                sent.replies += 1;
                assert!(sent.replies <= sent.commands.len(), "{effect:?} answers once more");
                let fits = sent.commands.iter().any(|command| command.get().allows(outcome));
                assert!(fits, "{effect:?} is no answer to {:?}", sent.commands);
                if let Outcome::Granted(grant) | Outcome::Acquired(grant) = outcome {
                    self.grants.push((sent.space, sent.key, grant.token));
                }
                self.outcomes.push(outcome.clone());
            }
            Effect::Push { group, .. } => {
                if let Some(group) = group {
                    assert!(self.store.group_members(group).count() <= self.clients.len());
                }
            }
            Effect::SessionEnded { session } => self.end(*session),
        }
    }

    /// The session is gone for ever; its client comes back with a new one.
    fn end(&mut self, session: SessionId) {
        self.ended.insert(session);
        if let Some(client) = self.clients.iter_mut().find(|client| client.session == session) {
            self.sessions += 1;
            *client = Client::new(self.sessions, client.keep);
        }
    }

    fn see(&self, effects: Vec<Effect>, deadline: Option<Timestamp>) -> Seen {
        let mut reads = Vec::new();
        for key in KEYS {
            for query in [
                Query::Counter { key },
                Query::Kv { key },
                Query::Length { key },
                Query::Range { key, start: -2, stop: 1 },
            ] {
                reads.push(self.store.read(query, self.now));
            }
        }
        Seen {
            effects,
            reads,
            listed: self.store.ls(&[b"a".to_vec()], None, 3, self.now),
            deadline,
            revision: self.store.revision(),
            locks: self.shared.locks(),
            keys: self.shared.keys(),
        }
    }

    fn pass_through_snapshot(&mut self) {
        let bytes = self.store.snapshot();
        let shared = Arc::new(Shared::new());
        shared.set_fences(self.shared.fence_next(), self.fence_ceiling);
        let store = match Store::restore(&bytes, Arc::clone(&shared)) {
            Ok(store) => store,
            Err(error) => panic!("a snapshot is refused: {error}"),
        };
        assert!(store.snapshot() == bytes, "the snapshot of a snapshot differs");
        for key in KEYS {
            let [before, after] = [&self.store, &store].map(|it| it.inspect(key, self.now, 3));
            assert_eq!(format!("{before:?}"), format!("{after:?}"), "it looks different");
        }
        if self.restores {
            (self.store, self.shared) = (store, shared);
        }
        self.snapshots.push(bytes);
    }

    /// What an undo takes back, if the command will be one.
    fn pick_outcome(&self, who: u8) -> Outcome {
        let back = usize::from(who >> 2 & 3);
        self.outcomes.iter().rev().nth(back).cloned().unwrap_or(Outcome::Done)
    }

    /// The next command, and the lock it is about.
    fn command<'o>(
        &mut self,
        client: usize,
        outcome: &'o Outcome,
    ) -> (Command<'o>, Space, &'static [u8]) {
        let kind = self.bytes.next() % 32;
        let (space, key) = self.pick_lock();
        let last = self.clients[client].last;
        let bytes = &mut self.bytes;
        let salt = last;
        let command = match kind {
            0 => Command::Tick,
            1 => Command::NewTerm,
            2..=5 => {
                let mode = mode(bytes);
                let (wait, lease) = (Span(bytes.pick(&SPANS)), bytes.pick(&LEASES));
                let command = Command::Acquire(command::Acquire { key, mode, wait, lease, salt });
                return (command, mode.space(), key);
            }
            6..=7 => {
                let mode = match mode(bytes) {
                    // Elections have no two-phase form.
                    Mode::Election => Mode::Mutex,
                    mode @ (Mode::Mutex | Mode::Semaphore { .. } | Mode::Read | Mode::Write) => {
                        mode
                    }
                };
                let command = Command::Enqueue(command::Enqueue {
                    key,
                    mode,
                    lease: bytes.pick(&LEASES),
                    salt,
                });
                return (command, mode.space(), key);
            }
            8..=9 => Command::Wait(command::Wait { key, space, wait: Span(bytes.pick(&SPANS)) }),
            10..=12 => return self.hold_command(kind),
            13 => Command::Add(command::Add {
                key,
                delta: bytes.pick(&DELTAS),
                decrement: bytes.flag(),
            }),
            14 => Command::CounterSet(command::CounterSet { key, value: bytes.pick(&DELTAS) }),
            15 => Command::KvSet(command::KvSet {
                key,
                value: bytes.pick(&VALUES),
                ttl: bytes.pick(&LEASES),
            }),
            16 => Command::KvDelete(command::KvDelete { key }),
            17 => {
                let expect = match bytes.next() & 3 {
                    0 => Expect::Absent,
                    1 => Expect::Revision(self.store.revision()),
                    _ => Expect::Value(bytes.pick(&VALUES)),
                };
                let (value, ttl) = (bytes.pick(&VALUES), bytes.pick(&LEASES));
                Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl })
            }
            18 => Command::Push(command::Push { key, end: end(bytes), value: bytes.pick(&VALUES) }),
            19 => Command::Pop(command::Pop { key, end: end(bytes), wait: None }),
            20..=21 => {
                let wait = Some(Span(bytes.pick(&SPANS)));
                Command::Pop(command::Pop { key, end: end(bytes), wait })
            }
            22 => {
                let count = bytes.pick(&[1, 2, 2, 3]);
                Command::BarrierWait(command::BarrierWait {
                    key,
                    count,
                    wait: Span(bytes.pick(&SPANS)),
                })
            }
            23 => Command::Signal(command::Signal { channel: key, payload: bytes.pick(&VALUES) }),
            24..=25 => Command::Subscribe(command::Subscribe { to: self.subscription(key) }),
            26 => Command::Unsubscribe(command::Unsubscribe { from: self.subscription(key) }),
            27 => {
                let back = u64::from(bytes.next() & 3);
                Command::Cancel(command::Cancel { request: RequestId(last.saturating_sub(back)) })
            }
            28 => {
                let back = u64::from(bytes.next() & 3);
                Command::Acknowledge(command::Acknowledge {
                    up_to: RequestId(last.saturating_sub(back)),
                })
            }
            29 => Command::Undo(outcome),
            30 => {
                if bytes.flag() {
                    Command::Attach
                } else {
                    Command::Detach { until: self.now + Span(bytes.pick(&SPANS)) }
                }
            }
            _ => {
                let flags = bytes.next();
                Command::EndSession { release: flags & 1 != 0, forced: flags & 2 != 0 }
            }
        };
        (command, space, key)
    }

    /// A command about a hold that is, was, or almost is.
    fn hold_command(&mut self, kind: u8) -> (Command<'static>, Space, &'static [u8]) {
        let how = self.bytes.next();
        let grants = &self.grants;
        let grant = grants.iter().rev().nth(usize::from(how & 3)).or(grants.last()).copied();
        let nothing = Token { fence: Fence(0), salt: 0 };
        let (mut space, mut key, mut token) = grant.unwrap_or((Space::Locks, KEYS[0], nothing));
        match how >> 5 {
            0 => key = KEYS[1],
            1 => space = Space::Semaphores,
            2 => token.salt ^= 1,
            _ => {}
        }
        let command = match kind {
            10 => Command::Release(command::Release { key, space, token, resign: how & 16 != 0 }),
            11 => match self.bytes.pick(&LEASES) {
                Some(lease) if how & 16 != 0 => {
                    Command::RenewSession(command::RenewSession { lease })
                }
                lease => Command::Renew(command::Renew { key, space, token, lease }),
            },
            _ => Command::ForceRelease(command::ForceRelease { key, space, fence: token.fence }),
        };
        (command, space, key)
    }

    fn subscription(&mut self, key: &'static [u8]) -> Subscription<'static> {
        let pattern = self.bytes.pick(&PATTERNS);
        match self.bytes.next() & 3 {
            0 => Subscription::Signals { pattern, group: self.bytes.pick(&GROUPS) },
            1 => Subscription::Changes { pattern, from: None },
            2 => {
                let back = u64::from(self.bytes.next() & 15);
                let from = Some(Revision((self.store.revision().0 + 2).saturating_sub(back)));
                Subscription::Changes { pattern, from }
            }
            _ => Subscription::Leaders { key },
        }
    }

    fn pick_lock(&mut self) -> (Space, &'static [u8]) {
        let which = self.bytes.next();
        let space = if which & 4 == 0 { Space::Locks } else { Space::Semaphores };
        (space, KEYS[usize::from(which & 3)])
    }
}

fn limits(bytes: &mut Bytes<'_>) -> Limits {
    Limits {
        locks_max: bytes.pick(&[1024, 2, 3]),
        keys_max: bytes.pick(&[0, 2, 3]),
        list_length_max: bytes.pick(&[0, 1, 2]),
        waiters_max: bytes.pick(&[0, 0, 1, 2]),
        subscriptions_max: bytes.pick(&[0, 0, 1, 2]),
        value_bytes_max: 3,
        default_lease: Span(bytes.pick(&[10, 5, 20])),
        idle_max: Span(bytes.pick(&[20, 0, 5, 60])),
        gc_interval: Span(bytes.pick(&[5, 0, 1, 7])),
        shared_namespace: bytes.flag(),
        kv_idle_gc: bytes.flag(),
        failover_grace: Span(bytes.pick(&[3, 0, 8, 100])),
        events_max: bytes.pick(&[0, 1, 8]),
        results_max: bytes.pick(&[1024, 0, 1, 2]),
        results_bytes_max: bytes.pick(&[1 << 20, 0, 200]),
        expired_notes_max: bytes.pick(&[1024, 0, 1, 2]),
        ..Limits::default()
    }
}

fn mode(bytes: &mut Bytes<'_>) -> Mode {
    match bytes.next() % 8 {
        0..=1 => Mode::Mutex,
        2 => Mode::Election,
        3 => Mode::Semaphore { limit: 1 },
        4..=5 => Mode::Semaphore { limit: 2 },
        6 => Mode::Read,
        _ => Mode::Write,
    }
}

fn end(bytes: &mut Bytes<'_>) -> End {
    if bytes.flag() { End::Right } else { End::Left }
}

fn is_answered(command: &Command<'_>) -> bool {
    !matches!(
        command,
        Command::Tick
            | Command::NewTerm
            | Command::Undo(_)
            | Command::Detach { .. }
            | Command::Attach
            | Command::EndSession { .. }
    )
}
