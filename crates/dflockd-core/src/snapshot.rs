//! The whole store as bytes, out and in.
//!
//! Everything is written in an order that does not depend on how the store came to be, so equal stores
//! give equal bytes. What can be derived (indexes, chains, counts) is not written but rebuilt, and what was
//! read is verified before it is used.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet, VecDeque};
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use dflockd_api::{
    Bytes, Change, Fence, RequestId, Revision, SessionId, Space, Span, Timestamp, Token,
};
use serde::{Deserialize, Serialize};

use crate::barrier::Barrier;
use crate::bugs::{Bug, bug};
use crate::chain::{Chain, Links, Slot};
use crate::client::Client;
use crate::counter::Counter;
use crate::deadline::{Timer, TimerKey};
use crate::election::Reason;
use crate::kv::KvEntry;
use crate::limits::{Limits, LimitsV2};
use crate::list::{List, Popper};
use crate::lock::{Claim, Hold, Lock};
use crate::session::{Blocked, Enqueued, Results, Session};
use crate::shared::Shared;
use crate::store::{IdleValue, Store};
use crate::subscription::{Members, Owned};
use crate::view::LockKind;

/// The form with what every store has.
const VERSION: u8 = 1;
/// The form with what every store has, and behind it the holds that were renewed for longer than they were taken for.
/// Only if there are some: so each state has one form.
const WITH_RENEWED: u8 = 2;
/// The form of a store that follows the rules of version 2: the limits of that version behind the head, and the renewed
/// holds whether there are some or not.
const OF_RULES_2: u8 = 3;
/// The form of a store that knows who is behind sessions: the limits of version 2 and the renewed holds in any case,
/// and behind them the clients. Only if there are some.
const WITH_CLIENTS: u8 = 4;

/// Why bytes are not a snapshot.
#[derive(Debug, PartialEq, Eq)]
pub enum SnapshotError {
    /// Not in the form of a snapshot of a known version.
    Malformed,
    /// In the right form, but no store can look like this.
    Inconsistent(String),
}

impl fmt::Display for SnapshotError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed => f.write_str("not a snapshot of a known version"),
            Self::Inconsistent(what) => write!(f, "inconsistent snapshot: {what}"),
        }
    }
}

impl core::error::Error for SnapshotError {}

/// What comes before the locks. They are not part of any structure here: there can be millions, so they are written and
/// read one by one.
#[derive(Serialize, Deserialize)]
struct Head {
    limits: Limits,
    seed: u64,
    now: Timestamp,
    grace_until: Timestamp,
    grants_timer: Option<TimerKey>,
    serial: u64,
    fence_next: u64,
    revision: Revision,
}

/// What comes behind the locks.
#[derive(Serialize, Deserialize)]
struct Rest {
    stalled: BTreeSet<(Space, Bytes)>,
    counters: BTreeMap<Bytes, Counter>,
    kv: BTreeMap<Bytes, KvEntry>,
    lists: BTreeMap<Bytes, List>,
    barriers: BTreeMap<Bytes, Barrier>,
    sessions: BTreeMap<SessionId, SessionData>,
    groups: Vec<(Bytes, Bytes, Members)>,
    observers: Vec<(Bytes, SessionId, bool, bool)>,
    changes: VecDeque<Change>,
}

#[derive(Serialize, Deserialize)]
struct LockData {
    space: Space,
    key: Bytes,
    kind: LockKind,
    last_fence: Fence,
    expired: Option<Token>,
    revision: Revision,
    idle_since: Option<Timestamp>,
    holders: Vec<ClaimData>,
    queue: Vec<ClaimData>,
}

#[derive(Serialize, Deserialize)]
struct ClaimData {
    session: SessionId,
    exclusive: bool,
    election: bool,
    salt: u64,
    lease: Span,
    since: Timestamp,
    request: Option<RequestId>,
    enqueued: bool,
    timer: Option<TimerKey>,
    hold: Option<Hold>,
    orphaned: bool,
}

#[derive(Serialize, Deserialize)]
struct SessionData {
    notes: BTreeMap<u64, (Space, Bytes)>,
    subscriptions: BTreeSet<Owned>,
    results: Option<Results>,
    detached: Option<(Timestamp, TimerKey)>,
}

/// Names and references. A client that has said neither is known by its orphans.
type ClientData = BTreeMap<SessionId, (Bytes, Option<Bytes>)>;

impl From<&Claim> for ClaimData {
    fn from(claim: &Claim) -> Self {
        // Every field is named: one that is added must not be forgotten here.
        let &Claim {
            lock: _,
            session,
            exclusive,
            election,
            salt,
            lease,
            since,
            request,
            enqueued,
            timer,
            hold,
            orphaned,
            lock_links: _,
            session_links: _,
        } = claim;
        Self {
            session,
            exclusive,
            election,
            salt,
            lease,
            since,
            request,
            enqueued,
            timer,
            hold,
            orphaned,
        }
    }
}

impl Store {
    /// The whole state.
    ///
    /// # Panics
    ///
    /// If memory runs out.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let written = "plain data can be written";
        let renewed = &self.locks.renewed;
        let clients = self.client_data();
        let version = match renewed.is_empty() {
            _ if !clients.is_empty() => WITH_CLIENTS,
            _ if self.limits.follows(2) => OF_RULES_2,
            true => VERSION,
            false => WITH_RENEWED,
        };
        let mut bytes = postcard::to_extend(&self.head(), alloc::vec![version]).expect(written);
        if version >= OF_RULES_2 {
            bytes = postcard::to_extend(&self.limits.v2(), bytes).expect(written);
        }
        let mut slots: Vec<_> = self.locks.arena.iter().collect();
        slots.sort_unstable_by(|(_, a), (_, b)| (a.space, &a.key).cmp(&(b.space, &b.key)));
        bytes = postcard::to_extend(&slots.len(), bytes).expect(written);
        for (_, lock) in slots {
            bytes = postcard::to_extend(&self.lock_data(lock), bytes).expect(written);
        }
        bytes = postcard::to_extend(&self.rest(), bytes).expect(written);
        if version != VERSION {
            bytes = postcard::to_extend(renewed, bytes).expect(written);
        }
        if version == WITH_CLIENTS {
            bytes = postcard::to_extend(&clients, bytes).expect(written);
        }
        bytes
    }

    /// A store in the state that was written. Counters of `shared` are raised to what the snapshot needs.
    pub fn restore(bytes: &[u8], shared: Arc<Shared>) -> Result<Self, SnapshotError> {
        let Some((&version @ VERSION..=WITH_CLIENTS, bytes)) = bytes.split_first() else {
            return Err(SnapshotError::Malformed);
        };
        let (mut head, mut bytes) = take::<Head>(bytes)?;
        if version >= OF_RULES_2 {
            let v2: LimitsV2;
            (v2, bytes) = take(bytes)?;
            head.limits = head.limits.with_v2(v2);
            if version == OF_RULES_2 && !head.limits.follows(2) {
                return Err(SnapshotError::Malformed);
            }
        }
        let (count, locks) = take::<usize>(bytes)?;
        if count > locks.len() {
            return Err(SnapshotError::Malformed);
        }
        // Locks belong to sessions, which stand behind them.
        let mut bytes = locks;
        for _ in 0..count {
            (_, bytes) = take::<LockData>(bytes)?;
        }
        let (rest, bytes) = take::<Rest>(bytes)?;
        let (renewed, bytes) = match version {
            WITH_RENEWED..=WITH_CLIENTS => take::<BTreeMap<Fence, Span>>(bytes)?,
            _ => (BTreeMap::new(), bytes),
        };
        let (clients, bytes) = match version {
            WITH_CLIENTS => take::<ClientData>(bytes)?,
            _ => (ClientData::new(), bytes),
        };
        let unmarked = version == WITH_CLIENTS && clients.is_empty();
        if !bytes.is_empty() || unmarked || (version == WITH_RENEWED && renewed.is_empty()) {
            return Err(SnapshotError::Malformed);
        }
        let mut store = Self::from_parts(head, count, locks, rest, shared)?;
        store.locks.renewed = renewed;
        store.restore_clients(clients);
        store.verify().map_err(SnapshotError::Inconsistent)?;
        Ok(store)
    }

    fn head(&self) -> Head {
        let grants_timer = self
            .deadlines
            .timers()
            .iter()
            .find_map(|(&key, timer)| matches!(timer, Timer::GrantsOpen).then_some(key));
        Head {
            limits: self.limits.clone(),
            seed: self.seed,
            now: self.now,
            grace_until: self.deadlines.grace_until,
            grants_timer,
            serial: self.deadlines.serial(),
            fence_next: self.shared.fence_next(),
            revision: self.revision(),
        }
    }

    fn lock_data(&self, lock: &Lock) -> LockData {
        let claims = |chain: &Chain<0>| {
            chain.iter(&self.locks.claims).map(|(_, claim)| claim.into()).collect()
        };
        let Lock {
            key,
            space,
            kind,
            holders,
            queue,
            writer: _,
            last_fence,
            expired,
            revision,
            idle_since,
            idle_links: _,
        } = lock;
        LockData {
            space: *space,
            key: key.clone(),
            kind: *kind,
            last_fence: *last_fence,
            expired: *expired,
            revision: *revision,
            idle_since: *idle_since,
            holders: claims(holders),
            queue: claims(queue),
        }
    }

    fn rest(&self) -> Rest {
        let mut sessions = BTreeMap::new();
        for (&id, session) in &self.sessions {
            let session = SessionData {
                notes: session.notes.clone(),
                subscriptions: session.subscriptions.clone(),
                results: session.results.as_deref().cloned(),
                detached: session.detached,
            };
            sessions.insert(id, session);
        }
        let groups = self.subscriptions.signals.iter().flat_map(|(pattern, listeners)| {
            let groups = listeners.groups.iter();
            groups.map(|(name, members)| (pattern.clone(), name.clone(), members.clone()))
        });
        let observers = self.observers.0.iter().flat_map(|(key, sessions)| {
            let sessions = sessions.iter();
            sessions.map(|(&id, reason)| (key.clone(), id, reason.explicit, reason.leads))
        });
        Rest {
            stalled: self.locks.stalled.clone(),
            counters: self.counters.clone(),
            kv: self.kv.clone(),
            lists: self.lists.clone(),
            barriers: self.barriers.clone(),
            sessions,
            groups: groups.collect(),
            observers: observers.collect(),
            changes: self.changes.clone(),
        }
    }

    fn from_parts(
        head: Head,
        count: usize,
        locks: &[u8],
        rest: Rest,
        shared: Arc<Shared>,
    ) -> Result<Self, SnapshotError> {
        let mut store = Self::new(head.limits, head.seed, shared, Timestamp(0));
        store.now = head.now;
        if !bug(Bug::GraceForgotten) {
            store.deadlines.grace_until = head.grace_until;
        }
        store.deadlines.restore_serial(head.serial);
        if !bug(Bug::FenceForgotten) {
            store.shared.raise_fence(head.fence_next);
        }
        if !bug(Bug::RevisionForgotten) {
            store.shared.set_revision(head.revision);
        }
        if let Some(key) = head.grants_timer {
            store.grants_open = false;
            store.deadlines.restore_timer(key, Timer::GrantsOpen);
        }
        for (id, session) in rest.sessions {
            store.restore_session(id, session);
        }
        store.restore_locks(count, locks)?;
        store.locks.stalled = rest.stalled;
        store
            .restore_values(rest.counters, rest.kv, rest.lists, rest.barriers)
            .map_err(SnapshotError::Inconsistent)?;
        for (pattern, name, members) in rest.groups {
            store.subscriptions.signals.entry(&pattern).groups.insert(name, members);
        }
        for (key, session, explicit, leads) in rest.observers {
            let sessions = store.observers.0.entry(key).or_default();
            sessions.insert(session, Reason { explicit, leads });
        }
        store.forgotten = match rest.changes.front() {
            Some(oldest) => Revision(oldest.revision.0.saturating_sub(1)),
            None => head.revision,
        };
        store.changes = rest.changes;
        Ok(store)
    }

    fn restore_session(&mut self, id: SessionId, data: SessionData) {
        let mut session = Session::new(None);
        for (&number, record) in &data.notes {
            session.enqueued.insert(record.clone(), Enqueued::Expired(number));
        }
        session.notes = data.notes;
        session.results = data.results.map(Into::into).filter(|_| !bug(Bug::ResultsForgotten));
        session.detached = data.detached;
        if let Some((_, key)) = data.detached {
            self.deadlines.restore_timer(key, Timer::Session(id));
        }
        // As in `Store::listens`, which does not know the session yet.
        let listens = data.detached.is_none() || !self.limits.follows(2);
        for subscription in data.subscriptions.iter().filter(|_| listens) {
            // Groups and observers have more to them and come by themselves.
            match subscription {
                Owned::Signals { group, .. } if !group.is_empty() => {}
                Owned::Leaders { .. } => {}
                Owned::Signals { .. } | Owned::Changes { .. } => self.list(id, subscription),
            }
        }
        for subscription in &data.subscriptions {
            *self.tally.subscriptions(subscription) += 1;
            self.subscriptions.volume.add(subscription);
            session.subscribed.add(subscription);
        }
        self.tally.results_changed((0, 0), session.results_kept());
        session.subscriptions = data.subscriptions;
        self.sessions.insert(id, Box::new(session));
        self.session_order.insert(id);
    }

    fn restore_locks(&mut self, count: usize, mut bytes: &[u8]) -> Result<(), SnapshotError> {
        let inconsistent = |why: &str| SnapshotError::Inconsistent(why.into());
        let mut idle = Vec::new();
        let mut holds = Vec::with_capacity(count);
        let mut leases = Vec::with_capacity(count);
        self.locks.reserve(count);
        for _ in 0..count {
            let (data, rest) = take::<LockData>(bytes)?;
            bytes = rest;
            if self.locks.find(data.space, &data.key).is_some() {
                return Err(inconsistent("a lock comes twice"));
            }
            self.shared.add_lock(u64::MAX);
            if let Some(since) = data.idle_since {
                idle.push((since, data.space, data.key.clone()));
            }
            let record = (data.space, data.key.clone());
            let slot = self.locks.insert(Lock {
                key: data.key,
                space: data.space,
                kind: data.kind,
                holders: Chain::new(),
                queue: Chain::new(),
                writer: data.kind == LockKind::ReadWrite
                    && data.holders.iter().any(|claim| claim.exclusive),
                last_fence: data.last_fence,
                expired: data.expired,
                revision: data.revision,
                idle_since: data.idle_since,
                idle_links: Links::NONE,
            });
            for claim in data.holders {
                let hold = claim.hold.ok_or_else(|| inconsistent("a holder without a hold"))?;
                let (session, orphaned) = (claim.session, claim.orphaned);
                let claim = self
                    .restore_claim(slot, &record, claim)
                    .map_err(SnapshotError::Inconsistent)?;
                self.locks.arena[slot].holders.push_back(&mut self.locks.claims, claim);
                let primitive = self.primitive(claim);
                self.tally.counts(primitive).held += 1;
                self.locks.by_fence.insert(hold.fence, claim);
                leases.push(((hold.base, hold.fence), claim));
                if !orphaned {
                    holds.push((hold.fence, session, claim));
                }
            }
            for claim in data.queue {
                if claim.hold.is_some() {
                    return Err(inconsistent("a waiter with a hold"));
                }
                let claim = self
                    .restore_claim(slot, &record, claim)
                    .map_err(SnapshotError::Inconsistent)?;
                self.locks.arena[slot].queue.push_back(&mut self.locks.claims, claim);
                self.queue_lengths.grew(self.locks.arena[slot].queue.len());
                let primitive = self.primitive(claim);
                self.tally.counts(primitive).waiting += 1;
            }
        }
        self.deadlines.restore_leases(leases);
        holds.sort_unstable();
        for (_, session, claim) in holds {
            let owner = self.sessions.get_mut(&session);
            let owner = owner.ok_or_else(|| inconsistent("a hold of no session"))?;
            owner.holds.push_back(&mut self.locks.claims, claim);
        }
        idle.sort_unstable();
        for (_, space, key) in idle {
            let slot = self.locks.find(space, &key).expect("just inserted");
            self.locks.idle.push_back(&mut self.locks.arena, slot);
        }
        Ok(())
    }

    fn restore_claim(
        &mut self,
        lock: u32,
        record: &(Space, Bytes),
        data: ClaimData,
    ) -> Result<u32, String> {
        let slot = self.locks.claims.insert(Claim {
            lock,
            session: data.session,
            exclusive: data.exclusive,
            election: data.election,
            salt: data.salt,
            lease: data.lease,
            since: data.since,
            request: data.request,
            enqueued: data.enqueued,
            timer: data.timer,
            hold: data.hold,
            orphaned: data.orphaned,
            lock_links: Links::NONE,
            session_links: Links::NONE,
        });
        if let Some(key) = data.timer {
            self.deadlines.restore_timer(key, Timer::Claim(slot));
        }
        if data.enqueued || data.request.is_some() {
            let owner = self.sessions.get_mut(&data.session).ok_or("a claim of no session")?;
            if let Some(request) = data.request {
                owner.blocked.insert(request, Blocked::Claim(slot));
            }
            if data.enqueued {
                owner.enqueued.insert(record.clone(), Enqueued::Claim(slot));
            }
        }
        Ok(slot)
    }

    fn client_data(&self) -> ClientData {
        let mut clients = ClientData::new();
        for (&id, Client { name, reference, orphans: _ }) in &self.clients {
            if let Some(name) = name {
                clients.insert(id, (name.clone(), reference.clone()));
            }
        }
        clients
    }

    fn restore_clients(&mut self, clients: ClientData) {
        for (id, (name, reference)) in clients {
            self.clients.insert(id, Client { name: Some(name), reference, orphans: 0 });
        }
        let claims: Vec<Slot> = self.locks.claims.iter().map(|(slot, _)| slot).collect();
        for slot in claims {
            let claim = &self.locks.claims[slot];
            if claim.orphaned {
                self.clients.entry(claim.session).or_default().orphans += 1;
            }
            self.refer(slot);
        }
    }

    fn restore_values(
        &mut self,
        counters: BTreeMap<Bytes, Counter>,
        kv: BTreeMap<Bytes, KvEntry>,
        lists: BTreeMap<Bytes, List>,
        barriers: BTreeMap<Bytes, Barrier>,
    ) -> Result<(), String> {
        for (key, counter) in counters.iter().filter(|(_, counter)| counter.value == 0) {
            self.idle_values[IdleValue::Counter].insert((counter.changed_at, key.clone()));
        }
        for (key, entry) in &kv {
            match entry.timer {
                Some(timer) => self.deadlines.restore_timer(timer, Timer::Kv(key.clone())),
                None if self.limits.kv_idle_gc => {
                    self.idle_values[IdleValue::Kv].insert((entry.changed_at, key.clone()));
                }
                None => {}
            }
        }
        for (key, list) in &lists {
            for (&place, &Popper { session, request, timer, .. }) in &list.poppers {
                self.deadlines.restore_timer(timer, Timer::Pop { session, request });
                let owner = self.sessions.get_mut(&session).ok_or("a popper of no session")?;
                owner.blocked.insert(request, Blocked::Pop { key: key.clone(), place });
            }
        }
        for (key, barrier) in &barriers {
            for (&session, &(request, timer)) in &barrier.arrivals {
                self.deadlines.restore_timer(timer, Timer::Barrier { session, request });
                let owner = self.sessions.get_mut(&session).ok_or("an arrival of no session")?;
                owner.blocked.insert(request, Blocked::Barrier { key: key.clone() });
            }
        }
        for _ in 0..counters.len() + kv.len() + lists.len() + barriers.len() {
            self.shared.add_key(0);
        }
        (self.counters, self.kv, self.lists, self.barriers) = (counters, kv, lists, barriers);
        Ok(())
    }
}

fn take<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<(T, &'a [u8]), SnapshotError> {
    postcard::take_from_bytes(bytes).map_err(|_| SnapshotError::Malformed)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_refused(bytes: &[u8]) -> bool {
        matches!(Store::restore(bytes, Arc::new(Shared::new())), Err(SnapshotError::Malformed))
    }

    /// GUARANTEES 42: a state has one form, so what says more or less than its first byte promises is none.
    #[test]
    fn a_state_has_one_form() {
        for limits in [Limits::default(), Limits::default().with_v2(LimitsV2::default())] {
            let store = Store::new(limits.clone(), 1, Arc::new(Shared::new()), Timestamp(0));
            let bytes = store.snapshot();
            assert!(Store::restore(&bytes, Arc::new(Shared::new())).is_ok());
            assert!(is_refused(&[&bytes[..], &[0]].concat()), "something behind its end");
            assert!(is_refused(&bytes[..bytes.len() - 1]), "it ends too early");
            let marked = |version: u8, more: &[u8]| [&[version], &bytes[1..], more].concat();
            if limits.follows(2) {
                assert!(is_refused(&marked(WITH_CLIENTS, &[0])), "no client is there");
            } else {
                assert!(is_refused(&marked(WITH_RENEWED, &[0])), "nothing was renewed");
            }
        }
    }
}
