//! The clients: what they do next, and what they believe.

use std::collections::BTreeMap;

use dflockd_core::{End as ListEnd, Revision};
use dflockd_core::{Mode, Outcome, Push, RequestId, SessionId, Space, Span, Timestamp, Token};
use dflockd_engine::replica::OwnedQuery;
use dflockd_engine::replica::types::{AutoRelease, Bits128, RaftId};

use crate::op::{Expected, Op};
use crate::oracle;
use crate::plan::{Kind, MS, Plan, SEC};
use crate::rng::Rng;

/// After its own time a client gives a request up.
const PATIENCE: u64 = 8 * SEC;

/// A client.
pub struct Client {
    id: usize,
    ppm: i64,
    /// Connection and node.
    pub link: Option<(u64, RaftId)>,
    /// The secret of its session, if that is kept.
    kept: Option<Bits128>,
    /// The connection is not the kept session's yet.
    attaching: Option<RequestId>,
    next_number: u64,
    next_request: u64,
    /// Requests without an answer: place in the history, and when to lose patience.
    pub open: BTreeMap<RequestId, (usize, u64)>,
    holds: Vec<Held>,
    /// Keys it has a place at.
    enqueued: Vec<(Vec<u8>, Mode, Span)>,
    subscribed: bool,
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
    pub fn new(id: usize, ppm: i64) -> Self {
        Self {
            id,
            ppm,
            link: None,
            kept: None,
            attaching: None,
            next_number: 1,
            next_request: 1,
            open: BTreeMap::new(),
            holds: Vec::new(),
            enqueued: Vec::new(),
            subscribed: false,
            revisions: BTreeMap::new(),
            dead: false,
        }
    }

    /// Whether requests carry numbers that can be repeated.
    #[must_use]
    pub fn is_kept(&self) -> bool {
        self.kept.is_some()
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

    fn ask(&mut self, op: Op) -> Want {
        let keep = self.kept.is_some()
            && !matches!(
                op,
                Op::Keep { .. }
                    | Op::Cancel { .. }
                    | Op::Acknowledge { .. }
                    | Op::RenewSession { .. }
                    | Op::Sync
                    | Op::Kick { .. }
                    | Op::Read(_)
            );
        let request = if keep { self.request() } else { self.server_request() };
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
        self.holds.retain(|held| held.forget_at > now);
        let due = self.holds.iter().position(|held| held.renew_at <= now);
        if let Some(at) = due {
            let held = &mut self.holds[at];
            held.renew_at = now + held.lease.0 / 3;
            if rng.chance(600) {
                let (key, token, lease) = (held.key.clone(), held.token, held.lease);
                let space = held.mode.space();
                if self.kept.is_some() && token.salt.is_multiple_of(3) {
                    return self.ask(Op::RenewSession { token, lease });
                }
                return self.ask(Op::Renew { key, space, token, lease });
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
        if let Some((key, mode, lease)) = self.enqueued.pop() {
            let wait = span(rng, &[0, 300, 2000]);
            return self.ask(Op::Wait { key, mode, wait, lease });
        }
        let kind = *rng.pick(&plan.kinds);
        self.choose(kind, plan, rng, now, calm)
    }

    fn release(&mut self, held: Held, rng: &mut Rng) -> Want {
        let resign = held.mode == Mode::Election && rng.chance(500);
        let Held { key, mode, token, .. } = held;
        self.ask(Op::Release { key, space: mode.space(), token, resign })
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
            return self.ask(Op::Enqueue { key, mode, lease, salt });
        }
        let wait = if letter == 'x' { Span::ZERO } else { span(rng, &[100, 1000, 5000]) };
        self.ask(Op::Acquire { key, mode, wait, lease, salt })
    }

    #[expect(clippy::too_many_lines, reason = "a list of everything there is")]
    fn choose(&mut self, kind: Kind, plan: &Plan, rng: &mut Rng, now: u64, calm: bool) -> Want {
        let number = rng.below(plan.keys);
        let key = |letter: char| format!("{letter}{number}").into_bytes();
        let unique = format!("{}.{now}.{}", self.id, rng.below(1000)).into_bytes();
        let read = |key: Vec<u8>| Op::Read(OwnedQuery::from(oracle::query(&key)));
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
                let op = if rng.chance(300) { read(key('c')) } else { Op::Add { key: key('c') } };
                self.ask(op)
            }
            Kind::CounterSet => {
                let value = i64::try_from(rng.below(1 << 40)).expect("small");
                let set = Op::CounterSet { key: key('d'), value };
                let op = if rng.chance(500) { read(key('d')) } else { set };
                self.ask(op)
            }
            Kind::Kv => {
                let op = match rng.below(5) {
                    0 => Op::KvDelete { key: key('k') },
                    1 | 2 => Op::KvSet { key: key('k'), value: unique, ttl: None },
                    _ => read(key('k')),
                };
                self.ask(op)
            }
            Kind::Cas => {
                let expect = match self.revisions.get(&key('k')) {
                    None => Expected::Absent,
                    Some(_) if rng.chance(100) => Expected::Value(b"none".to_vec()),
                    Some(revision) => Expected::Revision(*revision),
                };
                self.ask(Op::Cas { key: key('k'), expect, value: unique })
            }
            Kind::KvTtl => {
                let ttl = Some(span(rng, &[200, 1000]));
                let set = Op::KvSet { key: key('t'), value: unique, ttl };
                let op = if rng.chance(500) { read(key('t')) } else { set };
                self.ask(op)
            }
            Kind::List => {
                let end = |rng: &mut Rng| *rng.pick(&[ListEnd::Left, ListEnd::Right]);
                let op = match rng.below(6) {
                    0 => Op::Push { key: key('q'), end: ListEnd::Right, value: unique },
                    1 => Op::Pop { key: key('q'), end: ListEnd::Left, wait: None },
                    2 => Op::Push { key: key('r'), end: end(rng), value: unique },
                    3 => Op::Pop { key: key('r'), end: end(rng), wait: None },
                    4 => read(key('q')),
                    _ => read(key('r')),
                };
                self.ask(op)
            }
            Kind::BlockingPop => {
                let push = Op::Push { key: key('q'), end: ListEnd::Right, value: unique };
                let wait = Some(span(rng, &[0, 500, 3000]));
                let pop = Op::Pop { key: key('q'), end: ListEnd::Left, wait };
                let op = if rng.chance(500) { push } else { pop };
                self.ask(op)
            }
            Kind::Barrier => {
                let count = u32::try_from(number % 3).expect("small") + 1;
                let wait = span(rng, &[200, 1000, 4000]);
                self.ask(Op::BarrierWait { key: key('b'), count, wait })
            }
            Kind::Signal if !self.subscribed => {
                self.subscribed = true;
                let group = if rng.chance(500) { b"g".to_vec() } else { Vec::new() };
                let pattern = rng.pick(&[&b"sig.*"[..], b"sig.1", b"sig.>"]).to_vec();
                self.ask(Op::Listen { pattern, group })
            }
            Kind::Signal => {
                let channel = format!("sig.{}", rng.below(3)).into_bytes();
                self.ask(Op::Signal { channel, payload: unique })
            }
            Kind::Watch => {
                let letter = *rng.pick(&['l', 'c', 'k', 'q', 'e']);
                self.ask(Op::Watch { pattern: key(letter) })
            }
            Kind::Observe => self.ask(Op::Observe { key: key('e') }),
            Kind::Kept if self.kept.is_none() && self.open.is_empty() => {
                let mut secret = [0; 16];
                secret[..8].copy_from_slice(&rng.bits().to_le_bytes());
                secret[8..].copy_from_slice(&rng.bits().to_le_bytes());
                self.ask(Op::Keep { secret })
            }
            Kind::Kept => self.acknowledge(),
            // The world fills in whom.
            Kind::Kick if !calm && rng.chance(150) => self.ask(Op::Kick { session: SessionId(0) }),
            Kind::Force if !calm && rng.chance(300) => {
                let fence = dflockd_core::Fence(0);
                self.ask(Op::Force { key: key('l'), space: Space::Locks, fence })
            }
            Kind::Cancel => match self.open.keys().next() {
                Some(&request) => self.ask(Op::Cancel { request }),
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
        self.ask(Op::Acknowledge { up_to: RequestId(up_to) })
    }

    /// A request goes out.
    pub fn sent(&mut self, request: RequestId, place: usize, op: &Op, now: u64) {
        self.open.insert(request, (place, now + op.wait().0 + PATIENCE));
    }

    /// A connection is there. If the session is kept, first that.
    pub fn opened(&mut self, conn: u64, node: RaftId) -> Option<Want> {
        self.link = Some((conn, node));
        let secret = self.kept?;
        let request = self.server_request();
        self.attaching = Some(request);
        Some(Want::Ask(Op::Attach { secret }, request, false))
    }

    /// The connection has ended. The requests whose fate nobody will know.
    pub fn closed(&mut self, orderly: bool, policy: AutoRelease) -> (Vec<usize>, bool) {
        self.link = None;
        self.attaching = None;
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
        self.subscribed = false;
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
        match (op, outcome) {
            (Op::Acquire { key, mode, lease, .. }, Outcome::Granted(grant))
            | (Op::Wait { key, mode, lease, .. }, Outcome::Granted(grant)) => {
                let valid = valid(*lease);
                let (key, mode, lease, token) = (key.clone(), *mode, *lease, grant.token);
                let (renew_at, forget_at) = (now + lease.0 / 3, sent + valid);
                self.holds.push(Held { key: key.clone(), mode, token, lease, renew_at, forget_at });
                Some(Learned { key, mode, token, valid })
            }
            (Op::Enqueue { key, mode, lease, .. }, Outcome::Acquired(_) | Outcome::Queued) => {
                self.enqueued.push((key.clone(), *mode, *lease));
                None
            }
            (Op::Renew { token, lease, .. }, Outcome::Renewed { .. }) => {
                let valid = valid(*lease);
                let held = self.holds.iter_mut().find(|held| held.token == *token)?;
                held.forget_at = held.forget_at.max(sent + valid);
                let (key, mode) = (held.key.clone(), held.mode);
                Some(Learned { key, mode, token: *token, valid })
            }
            // It does not say which holds it found, so only one that is still valid here goes on.
            (Op::RenewSession { token, lease }, Outcome::Number(1..)) => {
                let valid = valid(*lease);
                let held = self.holds.iter_mut().find(|held| held.token == *token)?;
                if held.forget_at <= now {
                    return None;
                }
                held.forget_at = held.forget_at.max(sent + valid);
                let (key, mode) = (held.key.clone(), held.mode);
                Some(Learned { key, mode, token: *token, valid })
            }
            (Op::Renew { token, .. } | Op::RenewSession { token, .. }, _) => {
                self.holds.retain(|held| held.token != *token);
                None
            }
            (Op::Keep { secret }, Outcome::Done) => {
                self.kept = Some(*secret);
                self.next_request = 0;
                None
            }
            (Op::Cas { key, .. } | Op::KvSet { key, .. }, Outcome::Written(revision)) => {
                self.revisions.insert(key.clone(), *revision);
                None
            }
            (Op::Cas { key, .. }, Outcome::Conflict) => {
                self.revisions.remove(key);
                None
            }
            _ => None,
        }
    }

    /// Something was pushed.
    pub fn pushed(&mut self, push: &Push) {
        if let Push::Lost { fence, .. } = push {
            self.holds.retain(|held| held.token.fence != *fence);
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

#[expect(clippy::wildcard_enum_match_arm, reason = "only one kind has a wait to lose")]
impl Want {
    fn without_wait(self) -> Self {
        match self {
            Self::Ask(Op::Acquire { key, mode, lease, salt, .. }, request, keep) => {
                Self::Ask(Op::Acquire { key, mode, wait: Span::ZERO, lease, salt }, request, keep)
            }
            other => other,
        }
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
