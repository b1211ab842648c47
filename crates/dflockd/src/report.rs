//! `stats`, `inspect` and `ls`: the state as JSON. Labels are looked up and text is written after the
//! shards have been left. No text is longer than an answer may be, and none is written before that is known.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dflockd_core::{
    Bytes, ChannelView, HolderView, KeyKind, KeyView, Listed, LockKind, LockView, SessionId,
    Survey, WaiterView,
};
use dflockd_engine::{Engine, readable};
use dflockd_identity::{Access, Identity};
use dflockd_replica::Role;
use serde::Serialize;

use crate::service::{ANSWER_BYTES_MAX, Service, seconds};

/// Holders and waiters shown per lock in `stats`.
const STATS_EACH_MAX: usize = 32;
/// Holders and waiters shown per key in `inspect`.
const INSPECT_EACH_MAX: usize = 1000;

#[derive(Serialize)]
struct Stats<'a> {
    connections: usize,
    lock_keys: usize,
    value_keys: usize,
    locks: Vec<Lock<'a>>,
    semaphores: Vec<Semaphore<'a>>,
    rw_locks: Vec<ReadWrite<'a>>,
    idle_locks: Vec<Idle<'a>>,
    idle_semaphores: Vec<Idle<'a>>,
    counters: Vec<Counter<'a>>,
    kv_entries: Vec<Kv<'a>>,
    lists: Vec<List<'a>>,
    barriers: Vec<Barrier<'a>>,
    signal_channels: Vec<SignalChannel<'a>>,
    watch_channels: Vec<WatchChannel<'a>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    cluster: Option<Cluster>,
}

#[derive(Serialize)]
struct Lock<'a> {
    key: Cow<'a, str>,
    owner_conn_id: u64,
    lease_expires_in_s: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<String>,
    waiters: u32,
    #[serde(flatten)]
    who: Participants,
}

#[derive(Serialize)]
struct Semaphore<'a> {
    key: Cow<'a, str>,
    limit: u32,
    holders: u32,
    waiters: u32,
    held_by: Vec<Holder>,
    #[serde(skip_serializing_if = "is_zero")]
    held_by_more: u32,
    queue: Vec<Waiter>,
    #[serde(skip_serializing_if = "is_zero")]
    queue_more: u32,
}

#[derive(Serialize)]
struct ReadWrite<'a> {
    key: Cow<'a, str>,
    readers: u32,
    writer: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    fence: Option<String>,
    waiters: u32,
    #[serde(flatten)]
    who: Participants,
}

/// Participants holds a lock and who waits for it; what does not fit is counted.
#[derive(Serialize)]
struct Participants {
    holders: Vec<Holder>,
    #[serde(skip_serializing_if = "is_zero")]
    holders_more: u32,
    queue: Vec<Waiter>,
    #[serde(skip_serializing_if = "is_zero")]
    queue_more: u32,
}

#[derive(Serialize)]
struct Holder {
    conn: u64,
    fence: String,
    expires_in_s: f64,
    held_s: f64,
    client: Arc<str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    writer: bool,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    leader: bool,
}

#[derive(Serialize)]
struct Waiter {
    conn: u64,
    waiting_s: f64,
    client: Arc<str>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    writer: bool,
}

#[derive(Serialize)]
struct Idle<'a> {
    key: Cow<'a, str>,
    idle_s: f64,
}

#[derive(Serialize)]
struct Counter<'a> {
    key: Cow<'a, str>,
    value: i64,
    idle_s: f64,
}

#[derive(Serialize)]
struct Kv<'a> {
    key: Cow<'a, str>,
    value_len: usize,
    /// Seconds left, 0 = for ever.
    ttl: f64,
    idle_s: f64,
}

#[derive(Serialize)]
struct List<'a> {
    key: Cow<'a, str>,
    len: usize,
    #[serde(skip_serializing_if = "is_none")]
    pop_waiters: usize,
    idle_s: f64,
}

#[derive(Serialize)]
struct Barrier<'a> {
    key: Cow<'a, str>,
    count: u32,
    participants: usize,
    idle_s: f64,
}

#[derive(Serialize)]
struct SignalChannel<'a> {
    pattern: Cow<'a, str>,
    #[serde(skip_serializing_if = "str::is_empty")]
    group: Cow<'a, str>,
    listeners: usize,
}

#[derive(Serialize)]
struct WatchChannel<'a> {
    pattern: Cow<'a, str>,
    watchers: usize,
}

/// The cluster as a member of it sees it.
#[derive(Serialize)]
pub(crate) struct Cluster {
    node_id: String,
    role: &'static str,
    ready: bool,
    term: u64,
    leader_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    leader_addr: Option<String>,
    commit_index: u64,
    applied_index: u64,
    last_log_index: u64,
    snapshot_index: u64,
    voters: Vec<String>,
    learners: Vec<String>,
    witnesses: Vec<String>,
    members: Vec<ClusterMember>,
}

#[derive(Serialize)]
struct ClusterMember {
    node_id: String,
    peer_addr: String,
    client_addr: String,
    /// Entries of the log that it does not have yet; only the leader knows.
    #[serde(skip_serializing_if = "Option::is_none")]
    lag: Option<u64>,
}

/// The cluster that this server is a member of, if it is one.
pub(crate) fn cluster(service: &Service) -> Option<Cluster> {
    let member = service.engine.replicated()?;
    let view = member.view();
    let name = |id: &u64| view.members.get(id).map_or_else(|| id.to_string(), |m| m.node.clone());
    let status = view.status;
    let lags = member.gauges().lags.lock().clone();
    Some(Cluster {
        node_id: member.node().to_owned(),
        role: Role::name_of(status.map(|status| status.role)),
        ready: member.is_ready(),
        term: status.map_or(0, |status| status.term),
        leader_id: status.and_then(|status| status.leader).map_or_else(String::new, |id| name(&id)),
        leader_addr: view.leader_addr().map(str::to_owned),
        commit_index: status.map_or(0, |status| status.commit),
        applied_index: status.map_or(0, |status| status.applied),
        last_log_index: status.map_or(0, |status| status.last),
        snapshot_index: status.map_or(0, |status| status.snapshot),
        voters: view.voters.iter().map(name).collect(),
        learners: view.learners.iter().map(name).collect(),
        witnesses: view.members.values().filter(|m| m.witness).map(|m| m.node.clone()).collect(),
        members: view
            .members
            .iter()
            .map(|(id, member)| ClusterMember {
                node_id: member.node.clone(),
                peer_addr: member.peer_addr.clone(),
                client_addr: member.client_addr.clone(),
                lag: lags.iter().find(|(of, _)| of == id).map(|(_, lag)| *lag),
            })
            .collect(),
    })
}

/// The answer to `stats` with the argument `cluster`. Costs a look at what this member knows of the cluster: no survey
/// of the state, and nobody else is asked.
pub(crate) fn members(service: &Service) -> Vec<u8> {
    #[derive(Serialize)]
    struct Members {
        #[serde(skip_serializing_if = "Option::is_none")]
        cluster: Option<Cluster>,
    }
    json(&Members { cluster: cluster(service) })
}

/// The answer to `stats`, with what somebody may see. The totals tell nobody a key.
pub(crate) fn stats(service: &Service, who: &Identity) -> Vec<u8> {
    let mut survey = service.engine.survey(STATS_EACH_MAX);
    keep_readable(&mut survey, who);
    let mut names = Names::new(&service.engine);
    let mut stats = Stats {
        connections: service.connections.load(Ordering::Relaxed)
            + usize::try_from(service.metrics.http_sessions()).unwrap_or(usize::MAX),
        lock_keys: survey.locks_total,
        value_keys: survey.values_total,
        locks: Vec::new(),
        semaphores: Vec::new(),
        rw_locks: Vec::new(),
        idle_locks: Vec::new(),
        idle_semaphores: Vec::new(),
        counters: Vec::new(),
        kv_entries: Vec::new(),
        lists: Vec::new(),
        barriers: Vec::new(),
        signal_channels: survey.signal_channels.iter().map(signal_channel).collect(),
        watch_channels: Vec::new(),
        cluster: cluster(service),
    };
    for lock in &survey.locks {
        stats.add_lock(lock, &mut names);
    }
    stats.counters.extend(survey.counters.iter().map(|counter| Counter {
        key: text(&counter.key),
        value: counter.value,
        idle_s: seconds(counter.idle),
    }));
    stats.kv_entries.extend(survey.kv.iter().map(|entry| Kv {
        key: text(&entry.key),
        value_len: entry.value_bytes,
        ttl: entry.ttl.map_or(0.0, seconds),
        idle_s: seconds(entry.idle),
    }));
    stats.lists.extend(survey.lists.iter().map(|list| List {
        key: text(&list.key),
        len: list.length,
        pop_waiters: list.pop_waiters,
        idle_s: seconds(list.idle),
    }));
    stats.barriers.extend(survey.barriers.iter().map(|barrier| Barrier {
        key: text(&barrier.key),
        count: barrier.count,
        participants: barrier.participants,
        idle_s: seconds(barrier.idle),
    }));
    stats.watch_channels.extend(survey.watch_channels.iter().map(|channel| WatchChannel {
        pattern: text(&channel.pattern),
        watchers: channel.sessions,
    }));
    if !fits(&stats) {
        stats.name_nobody();
    }
    while !fits(&stats) && stats.shorten() {}
    json(&stats)
}

/// Leaves out the keys and patterns that somebody may not see.
fn keep_readable(survey: &mut Survey, who: &Identity) {
    if who.sees_all() {
        return;
    }
    let reads = |key: &[u8]| who.may(Access::read(key));
    let follows = |pattern: &[u8]| who.may(Access::follow(pattern));
    survey.locks.retain(|lock| reads(&lock.key));
    survey.counters.retain(|counter| reads(&counter.key));
    survey.kv.retain(|entry| reads(&entry.key));
    survey.lists.retain(|list| reads(&list.key));
    survey.barriers.retain(|barrier| reads(&barrier.key));
    survey.signal_channels.retain(|channel| follows(&channel.pattern));
    survey.watch_channels.retain(|channel| follows(&channel.pattern));
}

impl<'a> Stats<'a> {
    /// Leaves only the numbers of holders and waiters; `inspect` has the names.
    fn name_nobody(&mut self) {
        let count = |names: usize| u32::try_from(names).unwrap_or(u32::MAX);
        let locks = self.locks.iter_mut().map(|lock| &mut lock.who);
        for who in locks.chain(self.rw_locks.iter_mut().map(|lock| &mut lock.who)) {
            who.holders_more += count(std::mem::take(&mut who.holders).len());
            who.queue_more += count(std::mem::take(&mut who.queue).len());
        }
        for semaphore in &mut self.semaphores {
            semaphore.held_by_more += count(std::mem::take(&mut semaphore.held_by).len());
            semaphore.queue_more += count(std::mem::take(&mut semaphore.queue).len());
        }
    }

    /// Leaves out half of the longest array; false if all are empty. The totals are told all the same.
    fn shorten(&mut self) -> bool {
        let lengths = [
            self.locks.len(),
            self.semaphores.len(),
            self.rw_locks.len(),
            self.idle_locks.len(),
            self.idle_semaphores.len(),
            self.counters.len(),
            self.kv_entries.len(),
            self.lists.len(),
            self.barriers.len(),
            self.signal_channels.len(),
            self.watch_channels.len(),
        ];
        let longest = lengths.iter().copied().max().unwrap_or_default();
        let keep = longest / 2;
        self.locks.truncate(keep);
        self.semaphores.truncate(keep);
        self.rw_locks.truncate(keep);
        self.idle_locks.truncate(keep);
        self.idle_semaphores.truncate(keep);
        self.counters.truncate(keep);
        self.kv_entries.truncate(keep);
        self.lists.truncate(keep);
        self.barriers.truncate(keep);
        self.signal_channels.truncate(keep);
        self.watch_channels.truncate(keep);
        longest > 0
    }

    fn add_lock(&mut self, lock: &'a LockView, names: &mut Names<'_>) {
        let key = text(&lock.key);
        let kind = KeyKind::of_lock(lock.space, lock.kind);
        if let Some(idle) = lock.idle {
            let idle = Idle { key, idle_s: seconds(idle) };
            if kind == KeyKind::Semaphore {
                self.idle_semaphores.push(idle);
            } else {
                self.idle_locks.push(idle);
            }
            return;
        }
        let first = lock.holders.first();
        let fence = first.map(|holder| holder.fence.0.to_string());
        let waiters = lock.waiters_total;
        let who = names.who(lock);
        match (kind, lock.kind) {
            (KeyKind::Semaphore, LockKind::Slots(limit)) => self.semaphores.push(Semaphore {
                key,
                limit,
                holders: lock.holders_total,
                waiters,
                held_by: who.holders,
                held_by_more: who.holders_more,
                queue: who.queue,
                queue_more: who.queue_more,
            }),
            (_, LockKind::ReadWrite) => {
                let writer = first.is_some_and(|holder| holder.writer);
                let readers = if writer { 0 } else { lock.holders_total };
                self.rw_locks.push(ReadWrite { key, readers, writer, fence, waiters, who });
            }
            (_, LockKind::Slots(_)) => self.locks.push(Lock {
                key,
                owner_conn_id: first.map_or(0, |holder| holder.session.0),
                lease_expires_in_s: first.map_or(0.0, |holder| seconds(holder.expires_in)),
                fence,
                waiters,
                who,
            }),
        }
    }
}

/// One of the things a key is.
#[derive(Serialize)]
struct Inspected<'a> {
    kind: &'static str,
    #[serde(flatten)]
    view: InspectedView<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum InspectedView<'a> {
    Lock(InspectedLock<'a>),
    Counter { key: Cow<'a, str>, value: i64, idle_s: f64, revision: u64 },
    Kv { key: Cow<'a, str>, value_len: usize, ttl: f64, idle_s: f64, revision: u64 },
    List { key: Cow<'a, str>, len: usize, pop_waiters: usize, idle_s: f64, revision: u64 },
    Barrier { key: Cow<'a, str>, count: u32, participants: usize, idle_s: f64 },
}

#[derive(Serialize)]
struct InspectedLock<'a> {
    key: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u32>,
    holders_total: u32,
    waiters: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    idle_s: Option<f64>,
    revision: u64,
    #[serde(flatten)]
    who: Participants,
}

#[derive(Serialize)]
struct Inspection<'a> {
    #[serde(flatten)]
    first: Inspected<'a>,
    /// What else the key is, in other namespaces.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    others: Vec<Inspected<'a>>,
}

/// The answer to `inspect`: nothing if nothing is known of the key. None if nobody can say.
pub(crate) fn inspect(service: &Service, key: &[u8]) -> Option<Option<Vec<u8>>> {
    let views = service.engine.inspect(key, INSPECT_EACH_MAX)?;
    let mut names = Names::new(&service.engine);
    let mut all = views.iter().map(|view| Inspected {
        kind: view.kind().name(),
        view: match view {
            KeyView::Lock(lock) => InspectedView::Lock(inspect_lock(lock, &mut names)),
            KeyView::Counter(view) => InspectedView::Counter {
                key: text(&view.key),
                value: view.value,
                idle_s: seconds(view.idle),
                revision: view.revision.0,
            },
            KeyView::Kv(view) => InspectedView::Kv {
                key: text(&view.key),
                value_len: view.value_bytes,
                ttl: view.ttl.map_or(0.0, seconds),
                idle_s: seconds(view.idle),
                revision: view.revision.0,
            },
            KeyView::List(view) => InspectedView::List {
                key: text(&view.key),
                len: view.length,
                pop_waiters: view.pop_waiters,
                idle_s: seconds(view.idle),
                revision: view.revision.0,
            },
            KeyView::Barrier(view) => InspectedView::Barrier {
                key: text(&view.key),
                count: view.count,
                participants: view.participants,
                idle_s: seconds(view.idle),
            },
        },
    });
    let Some(first) = all.next() else { return Some(None) };
    let mut inspection = Inspection { first, others: all.collect() };
    while !fits(&inspection) && inspection.name_fewer() {}
    Some(Some(json(&inspection)))
}

impl Inspection<'_> {
    /// Leaves out half of the names of holders and waiters, which are counted then; false if there are none.
    fn name_fewer(&mut self) -> bool {
        let mut any = false;
        for inspected in std::iter::once(&mut self.first).chain(&mut self.others) {
            if let InspectedView::Lock(lock) = &mut inspected.view {
                any |= lock.who.name_fewer();
            }
        }
        any
    }
}

impl Participants {
    fn name_fewer(&mut self) -> bool {
        let count = |names: usize| u32::try_from(names).unwrap_or(u32::MAX);
        let (holders, queue) = (self.holders.len(), self.queue.len());
        self.holders.truncate(holders / 2);
        self.queue.truncate(queue / 2);
        self.holders_more += count(holders - self.holders.len());
        self.queue_more += count(queue - self.queue.len());
        holders + queue > 0
    }
}

fn inspect_lock<'a>(lock: &'a LockView, names: &mut Names<'_>) -> InspectedLock<'a> {
    InspectedLock {
        key: text(&lock.key),
        limit: match lock.kind {
            LockKind::Slots(limit) => Some(limit),
            LockKind::ReadWrite => None,
        },
        holders_total: lock.holders_total,
        waiters: lock.waiters_total,
        idle_s: lock.idle.map(seconds),
        revision: lock.revision.0,
        who: names.who(lock),
    }
}

#[derive(Serialize)]
struct ListedKey<'a> {
    key: Cow<'a, str>,
    kind: &'static str,
    holders: usize,
    waiters: usize,
}

/// The answer to `ls`: keys that begin with one of these prefixes. None if nobody can say.
pub(crate) fn ls(
    service: &Service,
    within: &[Vec<u8>],
    after: Option<&[u8]>,
    limit: usize,
) -> Option<Vec<u8>> {
    let listed = service.engine.ls(within, after, limit)?;
    let mut keys = Vec::new();
    let mut bytes = "[]".len();
    // Everything that a key is stays together, because the next page begins after a key.
    for same in listed.chunk_by(|a, b| a.key == b.key) {
        let before = keys.len();
        keys.extend(same.iter().map(|Listed { key, kind, holders, waiters }| ListedKey {
            key: text(key),
            kind: kind.name(),
            holders: *holders,
            waiters: *waiters,
        }));
        bytes += keys[before..].iter().map(|key| json_bytes(key) + ",".len()).sum::<usize>();
        if bytes > ANSWER_BYTES_MAX && before > 0 {
            keys.truncate(before);
            break;
        }
    }
    Some(json(&keys))
}

/// Names of sessions, each looked up once.
pub(crate) struct Names<'a> {
    engine: &'a Engine,
    known: HashMap<SessionId, Arc<str>>,
}

impl<'a> Names<'a> {
    pub(crate) fn new(engine: &'a Engine) -> Self {
        Self { engine, known: HashMap::new() }
    }

    /// The name of a session, which the state may have as that of its `client`; empty if nobody knows one.
    pub(crate) fn of(&mut self, session: SessionId, client: Option<&Bytes>) -> Arc<str> {
        let name = || match client {
            Some(name) => readable(name),
            None => self.engine.label(session).unwrap_or_else(|| "".into()),
        };
        Arc::clone(self.known.entry(session).or_insert_with(name))
    }

    fn who(&mut self, lock: &LockView) -> Participants {
        let more = |total: u32, shown: usize| total - u32::try_from(shown).unwrap_or(total);
        Participants {
            holders_more: more(lock.holders_total, lock.holders.len()),
            queue_more: more(lock.waiters_total, lock.queue.len()),
            holders: lock.holders.iter().map(|holder| self.holder(holder)).collect(),
            queue: lock.queue.iter().map(|waiter| self.waiter(waiter)).collect(),
        }
    }

    fn holder(&mut self, holder: &HolderView) -> Holder {
        Holder {
            conn: holder.session.0,
            fence: holder.fence.0.to_string(),
            expires_in_s: seconds(holder.expires_in),
            held_s: seconds(holder.held_for),
            client: self.of(holder.session, holder.client.as_ref()),
            writer: holder.writer,
            leader: holder.leader,
        }
    }

    fn waiter(&mut self, waiter: &WaiterView) -> Waiter {
        Waiter {
            conn: waiter.session.0,
            waiting_s: seconds(waiter.waiting),
            client: self.of(waiter.session, waiter.client.as_ref()),
            writer: waiter.writer,
        }
    }
}

fn signal_channel(channel: &ChannelView) -> SignalChannel<'_> {
    SignalChannel {
        pattern: text(&channel.pattern),
        group: text(&channel.group),
        listeners: channel.sessions,
    }
}

fn text(bytes: &Bytes) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

fn json(value: &impl Serialize) -> Vec<u8> {
    serde_json::to_vec(value).expect("plain data can be written")
}

/// Whether the JSON of this may be an answer.
fn fits(value: &impl Serialize) -> bool {
    json_bytes(value) <= ANSWER_BYTES_MAX
}

/// How long the JSON of this is, found out without making it.
pub(crate) fn json_bytes(value: &impl Serialize) -> usize {
    struct Count(usize);
    impl std::io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    serde_json::to_writer(&mut count, value).expect("plain data can be written");
    count.0
}

fn is_zero(count: &u32) -> bool {
    *count == 0
}

fn is_none(count: &usize) -> bool {
    *count == 0
}
