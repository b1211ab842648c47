//! The clients: what they do next, and what they believe.

use std::collections::{BTreeMap, BTreeSet};

use dflockd_core::{
    Command, End, Expect, Fence, Mode, Outcome, Push, RequestId, Revision, SessionId, Space, Span,
    Subscription, Timestamp, Token, command,
};
use dflockd_replica::OwnedQuery;
use dflockd_replica::types::{AutoRelease, Bits128, RaftId};

use crate::line_client::Face;
use crate::op::Op;
use crate::oracle;
use crate::plan::{Kind, MS, Plan, SEC};
use crate::rng::Rng;

/// After its own time a client gives a request up.
const PATIENCE: u64 = 8 * SEC;

/// A client.
pub struct Client {
    id: usize,
    ppm: i64,
    /// How it speaks to the server.
    pub face: Face,
    /// Connection and node.
    pub link: Option<(u64, RaftId)>,
    /// The secret of its session, if that is kept.
    kept: Option<Bits128>,
    /// The connection is not the kept session's yet.
    attaching: Option<RequestId>,
    /// How many sessions it has had.
    sessions: u64,
    next_number: u64,
    next_request: u64,
    /// Requests without an answer: place in the history, and when to lose patience.
    pub open: BTreeMap<RequestId, (usize, u64)>,
    /// Those of them whose fate nobody knew, and when they are sent again.
    again: BTreeMap<RequestId, u64>,
    holds: Vec<Held>,
    /// Keys it has a place at.
    enqueued: Vec<(Vec<u8>, Mode, Span)>,
    subscribed: bool,
    /// Keys that its session watches.
    watched: BTreeSet<Vec<u8>>,
    /// The last changes it was told of, by key.
    seen: BTreeMap<Vec<u8>, Revision>,
    /// Its last known revisions of KV entries.
    revisions: BTreeMap<Vec<u8>, Revision>,
    /// It does nothing any more.
    pub dead: bool,
}

struct Held {
    key: Vec<u8>,
    mode: Mode,
    token: Token,
    lease: Span,
    renew_at: u64,
    forget_at: u64,
    /// Which of its client's sessions got it.
    session: u64,
}

/// What a client wants done.
pub enum Want {
    /// A connection to a node.
    Open,
    /// The connection ends.
    Close {
        /// With a FIN.
        orderly: bool,
    },
    /// A request, new or again.
    Ask(Op, RequestId, bool),
    /// A request that was sent before, over a new connection.
    Repeat(usize, RequestId),
    /// Nothing now.
    Nothing,
}

/// What a client learns of its hold.
pub struct Learned {
    /// The lock.
    pub key: Vec<u8>,
    /// How it is held.
    pub mode: Mode,
    /// The hold.
    pub token: Token,
    /// Valid this long from the sending, in true time.
    pub valid: u64,
}

impl Client {
    /// A client that has done nothing yet.
    #[must_use]
    pub fn new(id: usize, ppm: i64, face: Face) -> Self {
        Self {
            id,
            ppm,
            face,
            link: None,
            kept: None,
            sessions: 0,
            attaching: None,
            next_number: 1,
            next_request: 1,
            open: BTreeMap::new(),
            again: BTreeMap::new(),
            holds: Vec::new(),
            enqueued: Vec::new(),
            subscribed: false,
            watched: BTreeSet::new(),
            seen: BTreeMap::new(),
            revisions: BTreeMap::new(),
            dead: false,
        }
    }

    /// Whether requests carry numbers that can be repeated.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Whether its kept session is not on its new connection yet.
    #[must_use]
    pub fn is_attaching(&self) -> bool {
        self.attaching.is_some()
    }

    /// Its session is kept.
    pub fn keep(&mut self, secret: Bits128) {
        self.kept = Some(secret);
        self.next_request = 0;
    }

    /// A hold has ended without its doing.
    pub fn lost(&mut self, fence: Fence) {
        self.holds.retain(|held| held.token.fence != fence);
    }

    fn request(&mut self) -> RequestId {
        if self.kept.is_some() {
            self.next_request += 1;
            RequestId(self.next_request)
        } else {
            self.server_request()
        }
    }

    fn server_request(&mut self) -> RequestId {
        self.next_number += 1;
        RequestId(RequestId::UNREPEATABLE + self.next_number)
    }

    fn ask(&mut self, op: impl Into<Op>) -> Want {
        let op = op.into();
        let keep = self.kept.is_some() && op.is_kept();
        // On a numbered connection all requests have numbers.
        let is_numbered = keep || self.face == Face::Kept;
        let request = if is_numbered { self.request() } else { self.server_request() };
        Want::Ask(op, request, keep)
    }

    /// What next?
    pub fn next(&mut self, plan: &Plan, rng: &mut Rng, now: u64, calm: bool) -> Want {
        if self.link.is_none() {
            return Want::Open;
        }
        if self.open.values().any(|&(_, patience)| patience < now) {
            return Want::Close { orderly: rng.chance(500) };
        }
        if self.attaching.is_some() {
            return Want::Nothing;
        }
        if let Some((&request, _)) = self.again.iter().find(|(_, at)| **at <= now) {
            self.again.remove(&request);
            if let Some(&(place, _)) = self.open.get(&request) {
                return Want::Repeat(place, request);
            }
        }
        self.holds.retain(|held| held.forget_at > now);
        let due = self.holds.iter().position(|held| held.renew_at <= now);
        if let Some(at) = due {
            let held = &mut self.holds[at];
            held.renew_at = now + held.lease.0 / 3;
            if rng.chance(600) {
                let (key, token, lease) = (held.key.clone(), held.token, held.lease);
                let space = held.mode.space();
                // The holds of an earlier session do not go on with this one.
                let is_ours = self.kept.is_some() && held.session == self.sessions;
                if is_ours && token.salt.is_multiple_of(3) {
                    let renew = Command::from(command::RenewSession { lease });
                    return self.ask(Op::RenewSession(renew.into(), token));
                }
                return self.ask(command::Renew { space, token, lease: Some(lease), key: &key });
            }
            let held = self.holds.remove(at);
            if plan.kinds.contains(&Kind::Abandon) && rng.chance(300) {
                return Want::Nothing;
            }
            return self.release(held, rng);
        }
        if self.open.len() >= plan.outstanding {
            return Want::Nothing;
        }
        if !self.holds.is_empty() && rng.chance(250) {
            let held = self.holds.remove(rng.index(self.holds.len()));
            return self.release(held, rng);
        }
        if plan.readers && self.id % 2 == 1 {
            let key = rng.pick(&value_keys(plan)).clone();
            return self.ask(Op::Read(OwnedQuery::from(oracle::query(&key))));
        }
        if let Some((key, mode, lease)) = self.enqueued.pop() {
            let wait = plan.paced(span(rng, &[0, 300, 2000]));
            let wait = Command::from(command::Wait { space: mode.space(), wait, key: &key });
            return self.ask(Op::Wait(wait.into(), mode, lease));
        }
        let kind = *rng.pick(&plan.kinds);
        self.choose(kind, plan, rng, now, calm)
    }

    fn release(&mut self, held: Held, rng: &mut Rng) -> Want {
        let resign = held.mode == Mode::Election && rng.chance(500);
        let Held { key, mode, token, .. } = held;
        self.ask(command::Release { space: mode.space(), token, resign, key: &key })
    }

    fn lock(&mut self, letter: char, mode: Mode, two: bool, plan: &Plan, rng: &mut Rng) -> Want {
        let number = rng.below(plan.keys);
        let mode = match mode {
            Mode::Semaphore { .. } => {
                Mode::Semaphore { limit: u32::try_from(number % 3).unwrap_or(0) + 1 }
            }
            Mode::Mutex | Mode::Election | Mode::Read | Mode::Write => mode,
        };
        let key = format!("{letter}{number}").into_bytes();
        let lease = Span(rng.between(plan.lease_min, plan.lease_max));
        let salt = rng.bits();
        if two {
            return self.ask(command::Enqueue { mode, lease: Some(lease), salt, key: &key });
        }
        let wait = if letter == 'x' { Span::ZERO } else { span(rng, &[100, 1000, 5000]) };
        let wait = plan.paced(wait);
        self.ask(command::Acquire { mode, wait, lease: Some(lease), salt, key: &key })
    }

    #[expect(clippy::too_many_lines, reason = "a list of everything there is")]
    fn choose(&mut self, kind: Kind, plan: &Plan, rng: &mut Rng, now: u64, calm: bool) -> Want {
        let number = rng.below(plan.keys);
        let is_operator = self.face == Face::Calls;
        let key = |letter: char| format!("{letter}{number}").into_bytes();
        let unique = format!("{}.{now}.{}", self.id, rng.below(1000)).into_bytes();
        let read = |key: Vec<u8>| Op::Read(OwnedQuery::from(oracle::query(&key)));
        let push =
            |letter, end| -> Op { command::Push { end, key: &key(letter), value: &unique }.into() };
        let pop =
            |letter, end, wait| -> Op { command::Pop { end, wait, key: &key(letter) }.into() };
        match kind {
            Kind::Lock => self.lock('l', Mode::Mutex, false, plan, rng),
            Kind::TryLock => self.lock('l', Mode::Mutex, false, plan, rng).without_wait(),
            Kind::TwoPhase => {
                let mode = *rng.pick(&[
                    Mode::Mutex,
                    Mode::Semaphore { limit: 1 },
                    Mode::Write,
                    Mode::Read,
                ]);
                let letter = match mode {
                    Mode::Semaphore { .. } => 's',
                    Mode::Read | Mode::Write => 'w',
                    Mode::Mutex | Mode::Election => 'l',
                };
                self.lock(letter, mode, true, plan, rng)
            }
            Kind::Semaphore => self.lock('s', Mode::Semaphore { limit: 1 }, false, plan, rng),
            Kind::ReadWrite => {
                let mode = *rng.pick(&[Mode::Read, Mode::Read, Mode::Write]);
                self.lock('w', mode, false, plan, rng)
            }
            Kind::Election => self.lock('e', Mode::Election, false, plan, rng),
            Kind::Counter => {
                let add = command::Add { delta: 1, decrement: false, key: &key('c') }.into();
                let op = if rng.chance(300) { read(key('c')) } else { add };
                self.ask(op)
            }
            Kind::CounterSet => {
                let value = i64::try_from(rng.below(1 << 40)).expect("small");
                let set = command::CounterSet { value, key: &key('d') }.into();
                let op = if rng.chance(500) { read(key('d')) } else { set };
                self.ask(op)
            }
            Kind::Kv => {
                let op = match rng.below(5) {
                    0 => command::KvDelete { key: &key('k') }.into(),
                    1 | 2 => command::KvSet { ttl: None, key: &key('k'), value: &unique }.into(),
                    _ => read(key('k')),
                };
                self.ask(op)
            }
            Kind::Cas => {
                let expect = match self.revisions.get(&key('k')) {
                    None => Expect::Absent,
                    Some(_) if rng.chance(100) => Expect::Value(b"none"),
                    Some(revision) => Expect::Revision(*revision),
                };
                let (key, value) = (&*key('k'), &*unique);
                self.ask(command::KvCompareAndSet { expect, ttl: None, key, value })
            }
            Kind::KvTtl => {
                let ttl = Some(plan.paced(span(rng, &[200, 1000])));
                let set = command::KvSet { ttl, key: &key('t'), value: &unique }.into();
                let op = if rng.chance(500) { read(key('t')) } else { set };
                self.ask(op)
            }
            Kind::List => {
                let end = |rng: &mut Rng| *rng.pick(&[End::Left, End::Right]);
                let op = match rng.below(6) {
                    0 => push('q', End::Right),
                    1 => pop('q', End::Left, None),
                    2 => push('r', end(rng)),
                    3 => pop('r', end(rng), None),
                    4 => read(key('q')),
                    _ => read(key('r')),
                };
                self.ask(op)
            }
            Kind::BlockingPop => {
                let push = push('q', End::Right);
                let wait = Some(plan.paced(span(rng, &[0, 500, 3000])));
                let pop = pop('q', End::Left, wait);
                let op = if rng.chance(500) { push } else { pop };
                self.ask(op)
            }
            Kind::Barrier => {
                let count = u32::try_from(number % 3).expect("small") + 1;
                let wait = plan.paced(span(rng, &[200, 1000, 4000]));
                self.ask(command::BarrierWait { count, wait, key: &key('b') })
            }
            Kind::Signal if !self.subscribed => {
                self.subscribed = true;
                let group = if rng.chance(500) { &b"g"[..] } else { b"" };
                let pattern = *rng.pick(&[&b"sig.*"[..], b"sig.1", b"sig.>"]);
                self.ask(command::Subscribe { to: Subscription::Signals { pattern, group } })
            }
            Kind::Signal => {
                let channel = format!("sig.{}", rng.below(3)).into_bytes();
                self.ask(command::Signal { channel: &channel, payload: &unique })
            }
            Kind::Watch => {
                let letter = *rng.pick(&['l', 'c', 'k', 'q', 'e']);
                let key = key(letter);
                // A new session goes on where the last one was.
                let last = self.seen.get(&key).filter(|_| !self.watched.contains(&key));
                let from = last.map(|last| Revision(last.0 + 1));
                self.watched.insert(key.clone());
                let to = Subscription::Changes { pattern: &key, from };
                self.ask(command::Subscribe { to })
            }
            Kind::Observe => {
                let to = Subscription::Leaders { key: &key('e') };
                self.ask(command::Subscribe { to })
            }
            Kind::Kept if self.face != Face::Calls && self.face != Face::Kept => Want::Nothing,
            Kind::Kept if self.kept.is_none() && self.open.is_empty() => {
                let mut secret = [0; 16];
                secret[..8].copy_from_slice(&rng.bits().to_le_bytes());
                secret[8..].copy_from_slice(&rng.bits().to_le_bytes());
                self.ask(Op::Keep { secret })
            }
            Kind::Kept => self.acknowledge(),
            // The world fills in whom.
            Kind::Kick if !calm && is_operator && rng.chance(150) => {
                self.ask(Op::Kick { session: SessionId(0) })
            }
            Kind::Force if !calm && is_operator && rng.chance(300) => {
                let (space, fence) = (Space::Locks, Fence(0));
                self.ask(command::ForceRelease { space, fence, key: &key('l') })
            }
            Kind::Cancel => match self.open.keys().next() {
                Some(&request) => self.ask(command::Cancel { request }),
                None => Want::Nothing,
            },
            Kind::Sync => self.ask(Op::Sync),
            Kind::Abandon if !calm && rng.chance(100) => Want::Close { orderly: rng.chance(500) },
            Kind::Kick | Kind::Force | Kind::Abandon => Want::Nothing,
        }
    }

    fn acknowledge(&mut self) -> Want {
        let open = self.open.keys().find(|request| request.is_repeatable());
        let up_to = open.map_or(self.next_request, |request| request.0 - 1);
        if up_to == 0 {
            return Want::Nothing;
        }
        self.ask(command::Acknowledge { up_to: RequestId(up_to) })
    }

    /// Another cluster has begun, which knows nothing of what was asked before. The requests whose fate nobody will
    /// know. The secret of a kept session is tried all the same, and so are tokens.
    pub fn begin_anew(&mut self) -> Vec<usize> {
        self.again.clear();
        self.seen.clear();
        std::mem::take(&mut self.open).into_values().map(|(place, _)| place).collect()
    }

    /// A request goes out.
    pub fn sent(&mut self, request: RequestId, place: usize, op: &Op, now: u64) {
        self.open.insert(request, (place, now + op.wait().0 + PATIENCE));
    }

    /// Nobody knows what came of a request. If the session keeps its answer, the client asks again at some instant.
    pub fn unknown(&mut self, request: RequestId, place: usize, at: u64) {
        if self.kept.is_some() && request.is_repeatable() {
            self.open.insert(request, (place, at + PATIENCE));
            self.again.insert(request, at);
        }
    }

    /// A connection is there. If the session is kept, first that.
    pub fn opened(&mut self, conn: u64, node: RaftId) -> Option<Want> {
        self.link = Some((conn, node));
        self.sessions += u64::from(self.kept.is_none());
        let secret = self.kept?;
        let request = self.server_request();
        self.attaching = Some(request);
        Some(Want::Ask(Op::Attach { secret }, request, false))
    }

    /// The connection has ended. The requests whose fate nobody will know.
    pub fn closed(&mut self, orderly: bool, policy: AutoRelease) -> (Vec<usize>, bool) {
        self.link = None;
        self.attaching = None;
        // What stays open is sent again over the next connection.
        self.again.clear();
        let kept = self.kept.is_some();
        let mut lost = Vec::new();
        self.open.retain(|request, (place, _)| {
            let stays = kept && request.is_repeatable();
            if !stays {
                lost.push(*place);
            }
            stays
        });
        if !kept {
            self.subscribed = false;
            self.watched.clear();
            self.enqueued.clear();
        }
        let release = match policy {
            AutoRelease::Any => true,
            AutoRelease::Clean => orderly,
            AutoRelease::Lease => false,
        };
        let gone = release && !kept;
        if gone {
            self.holds.clear();
        }
        (lost, gone)
    }

    /// The kept session is this connection's now, or is gone. What to send again, or what nobody will know.
    pub fn attached(&mut self, request: RequestId, there: bool) -> (Vec<Want>, Vec<usize>) {
        if self.attaching != Some(request) {
            return (Vec::new(), Vec::new());
        }
        self.attaching = None;
        self.open.remove(&request);
        if there {
            let again = self.open.iter().filter(|(request, _)| request.is_repeatable());
            let again = again.map(|(&request, &(place, _))| Want::Repeat(place, request));
            return (again.collect(), Vec::new());
        }
        self.kept = None;
        self.sessions += 1;
        self.subscribed = false;
        self.watched.clear();
        self.enqueued.clear();
        let lost = std::mem::take(&mut self.open).into_values().map(|(place, _)| place).collect();
        (Vec::new(), lost)
    }

    /// An answer has come.
    pub fn told(
        &mut self,
        op: &Op,
        sent: u64,
        outcome: &Outcome,
        now: u64,
        calm: bool,
    ) -> Option<Learned> {
        let valid = |lease: Span| {
            let local = u128::from(lease.0) * 99 / 100;
            let rate = u128::try_from(1_000_000 + self.ppm).expect("positive");
            u64::try_from(local * 1_000_000 / rate).expect("short")
        };
        let _ = calm;
        let command = op.command();
        match (op, command, outcome) {
            (
                Op::Do(_),
                Some(Command::Acquire(command::Acquire { mode, lease: Some(lease), key, .. })),
                Outcome::Granted(grant),
            )
            | (
                &Op::Wait(_, mode, lease),
                Some(Command::Wait(command::Wait { key, .. })),
                Outcome::Granted(grant),
            ) => {
                let (valid, token) = (valid(lease), grant.token);
                let (renew_at, forget_at) = (now + lease.0 / 3, sent + valid);
                let (key, session) = (key.to_vec(), self.sessions);
                let held =
                    Held { key: key.clone(), mode, token, lease, renew_at, forget_at, session };
                self.holds.push(held);
                Some(Learned { key, mode, token, valid })
            }
            (
                Op::Do(_),
                Some(Command::Enqueue(command::Enqueue { mode, lease: Some(lease), key, .. })),
                Outcome::Acquired(_) | Outcome::Queued,
            ) => {
                self.enqueued.push((key.to_vec(), mode, lease));
                None
            }
            (
                Op::Do(_),
                Some(Command::Renew(command::Renew { token, lease: Some(lease), .. })),
                Outcome::Renewed { .. },
            ) => {
                let valid = valid(lease);
                let held = self.holds.iter_mut().find(|held| held.token == token)?;
                held.forget_at = held.forget_at.max(sent + valid);
                let (key, mode) = (held.key.clone(), held.mode);
                Some(Learned { key, mode, token, valid })
            }
            // It does not say which holds it found, so only one that is still valid here goes on.
            (
                &Op::RenewSession(_, token),
                Some(Command::RenewSession(command::RenewSession { lease })),
                Outcome::Number(1..),
            ) => {
                let valid = valid(lease);
                let held = self.holds.iter_mut().find(|held| held.token == token)?;
                if held.forget_at <= now {
                    return None;
                }
                held.forget_at = held.forget_at.max(sent + valid);
                let (key, mode) = (held.key.clone(), held.mode);
                Some(Learned { key, mode, token, valid })
            }
            (_, Some(Command::Renew(command::Renew { token, .. })), _)
            | (&Op::RenewSession(_, token), ..) => {
                self.holds.retain(|held| held.token != token);
                None
            }
            (Op::Keep { secret }, ..) if *outcome == Outcome::Done => {
                self.keep(*secret);
                None
            }
            (
                _,
                Some(
                    Command::KvCompareAndSet(command::KvCompareAndSet { key, .. })
                    | Command::KvSet(command::KvSet { key, .. }),
                ),
                Outcome::Written(revision),
            ) => {
                self.revisions.insert(key.to_vec(), *revision);
                None
            }
            (
                _,
                Some(Command::KvCompareAndSet(command::KvCompareAndSet { key, .. })),
                Outcome::Conflict,
            ) => {
                self.revisions.remove(key);
                None
            }
            _ => None,
        }
    }

    /// Something was pushed.
    pub fn pushed(&mut self, push: &Push) {
        if let Push::Lost { fence, .. } = push {
            self.lost(*fence);
        }
        if let Push::Change(change) = push {
            self.seen.insert(change.key.to_vec(), change.revision);
        }
    }

    /// Something it holds, for those who want to take it away.
    #[must_use]
    pub fn any_hold(&self) -> Option<(&[u8], Space, Token)> {
        let held = self.holds.first()?;
        Some((&held.key, held.mode.space(), held.token))
    }

    /// Nothing is held any more.
    pub fn forget_holds(&mut self) {
        self.holds.clear();
    }
}

impl Want {
    fn without_wait(self) -> Self {
        let Self::Ask(Op::Do(command), request, keep) = self else { return self };
        let mut command = command.get();
        command.shorten_wait(command.wait());
        Self::Ask(command.into(), request, keep)
    }
}

fn span(rng: &mut Rng, ms: &[u64]) -> Span {
    Span(*rng.pick(ms) * MS)
}

/// The keys whose values are watched.
#[must_use]
pub fn value_keys(plan: &Plan) -> Vec<Vec<u8>> {
    let letters = ['c', 'd', 'k', 't', 'q', 'r'];
    letters
        .iter()
        .flat_map(|letter| (0..plan.keys).map(move |n| format!("{letter}{n}").into_bytes()))
        .collect()
}

/// An instant as a timestamp.
#[must_use]
pub fn at(time: u64) -> Timestamp {
    Timestamp(time)
}
