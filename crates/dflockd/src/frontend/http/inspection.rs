//! What there is, for people and for the web page: locks with their holders and queues, sessions, contention, events.
//!
//! Everything is in pages, which have a limited number of items and of bytes. What takes a while is done on a thread
//! that may be busy.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::extract::State;
use axum::response::Response;
use dflockd_core::check::{self, KEY_BYTES_MAX};
use dflockd_core::{
    Contention, HolderView, KeyKind, KeyView, LockKind, LockPage, LockView, Only, Primitive,
    SessionId, Tally, WaiterView,
};
use dflockd_engine::Api;
use dflockd_identity::Access;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{Decimal, millis};
use super::body::{Key, Query, json_line, reply};
use super::error::ApiError;
use super::openapi_parts::{InKey, NoCluster, NotFound, Refusals};
use super::streams::ChangeBody;
use super::{Room, Shared, fields};
use crate::frontend::auth::{Allowed, Asker};
use crate::report::{self, Names, json_bytes};
use crate::service::ANSWER_BYTES_MAX;

/// The longest page.
const PAGE_MAX: usize = 1000;
/// The usual page.
const PAGE: usize = 100;
/// The usual number of contended locks.
const CONTENTION: usize = 20;
/// Holders and waiters that are named per lock in a list.
const EACH_MAX: usize = 32;
/// Holders and waiters that are named where one key is inspected.
const EACH_OF_ONE_MAX: usize = 1000;
/// What the items of a list may have in bytes: a little less than an answer.
const LIST_BYTES_MAX: usize = ANSWER_BYTES_MAX - 4096;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(list_locks))
        .routes(routes!(show_key))
        .routes(routes!(list_sessions))
        .routes(routes!(contention))
        .routes(routes!(events))
        .routes(routes!(overview))
        .routes(routes!(members))
}

/// How many of the first items fit into one answer, by how long their JSON is; at least one.
pub(super) fn fitting(lengths: impl IntoIterator<Item = usize>) -> usize {
    let mut bytes = 0;
    let fits = |(index, length): &(usize, usize)| {
        bytes += length + ",".len();
        bytes <= LIST_BYTES_MAX || *index == 0
    };
    lengths.into_iter().enumerate().take_while(fits).count()
}

// ---- Locks ----

/// Which locks.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct ListLocks {
    /// Only keys that begin like this.
    #[param(max_length = 256)]
    prefix: Option<String>,
    /// `next` of the page before.
    #[param(max_length = 513)]
    after: Option<String>,
    /// How many; 100 if nothing is said.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// Only locks that somebody holds, or that somebody waits for.
    #[param(inline)]
    only: Option<OnlySome>,
}

#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum OnlySome {
    Held,
    Waiting,
}

/// A page of locks, in the order of their keys.
#[derive(Serialize, ToSchema)]
struct LockList {
    locks: Vec<Lock>,
    /// What to ask for as `after` to get the next page; null if this is the last.
    next: Option<String>,
}

/// A lock of any kind.
#[derive(Serialize, ToSchema)]
struct Lock {
    key: String,
    /// `mutex`, `semaphore` or `rwlock`.
    #[schema(value_type = String, example = "mutex")]
    kind: &'static str,
    /// How many may hold it; null for a read-write lock.
    limit: Option<u32>,
    /// How many hold it.
    holders_total: u32,
    /// The first of them, in the order of their grants.
    holders: Vec<Holder>,
    /// How many wait for it.
    waiters_total: u32,
    /// The first of them, in order.
    queue: Vec<Waiter>,
    /// The revision of its last change.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    revision: Decimal,
}

/// Who holds a lock.
#[derive(Serialize, ToSchema)]
struct Holder {
    /// The number of the session.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    session: Decimal,
    /// Its name for people.
    #[schema(value_type = String)]
    client: Arc<str>,
    /// The number of the grant.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    fence: Decimal,
    /// What is left of the lease.
    lease_left_ms: u64,
    /// For how long it has been held.
    held_ms: u64,
    /// It is a write lock.
    writer: bool,
    /// It was granted by an election.
    leader: bool,
}

/// Who waits for a lock.
#[derive(Serialize, ToSchema)]
struct Waiter {
    /// The number of the session.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    session: Decimal,
    /// Its name for people.
    #[schema(value_type = String)]
    client: Arc<str>,
    /// For how long it has waited.
    waiting_ms: u64,
    /// It wants a write lock.
    writer: bool,
}

/// Locks with their holders and queues.
#[utoipa::path(
    get,
    path = "/v1/locks",
    tag = "inspection",
    params(ListLocks),
    responses((status = 200, description = "A page of locks.", body = LockList), Refusals)
)]
async fn list_locks(
    State(app): State<Shared>,
    asker: Asker,
    room: Room,
    Query(query): Query<ListLocks>,
) -> Result<Response, ApiError> {
    let limit = check::page(query.limit, PAGE, PAGE_MAX)?;
    let prefix = query.prefix.unwrap_or_default();
    if prefix.len() > KEY_BYTES_MAX {
        return Err(ApiError::bad_request("a prefix has at most 256 bytes"));
    }
    let after = match &query.after {
        None => None,
        Some(text) => {
            let place = place_of(text).filter(|key| key.len() <= KEY_BYTES_MAX);
            Some(place.ok_or_else(|| ApiError::bad_request("after is no place between keys"))?)
        }
    };
    let only = match query.only {
        None => Only::All,
        Some(OnlySome::Held) => Only::Held,
        Some(OnlySome::Waiting) => Only::Waiting,
    };
    let within = asker.who.readable(prefix.as_bytes());
    let page = LockPage::new(within, after.as_deref(), limit, only);
    let service = Arc::clone(&app.service);
    let work = move || {
        let (views, mut next) = service.engine.locks(page, EACH_MAX)?;
        let mut names = Names::new(&service.engine);
        // The locks of a key stay together, because the next page begins after a key.
        let keys: Vec<_> = views.chunk_by(|a, b| a.key == b.key).collect();
        let count = fitting(keys.iter().map(|views| {
            views.iter().map(|view| json_bytes(&Lock::new(view, &mut names)) + ",".len()).sum()
        }));
        if count < keys.len() {
            next = keys[count - 1].first().map(|view| view.key.clone());
        }
        let locks = keys[..count].iter().flat_map(|views| views.iter());
        let locks = locks.map(|view| Lock::new(view, &mut names)).collect();
        Some(Ok(json_line(&LockList { locks, next: next.map(|key| place(&key)) })))
    };
    room.inspect(&app, work).await
}

/// A place between keys as text. A key that is no text is written in hexadecimal digits after a space, which no key
/// begins with.
fn place(key: &[u8]) -> String {
    match std::str::from_utf8(key) {
        Ok(text) => text.to_owned(),
        Err(_) => format!(" {}", hex::encode(key)),
    }
}

fn place_of(text: &str) -> Option<Vec<u8>> {
    match text.strip_prefix(' ') {
        Some(digits) => hex::decode(digits).ok(),
        None => Some(text.as_bytes().to_vec()),
    }
}

/// Everything a key is. What it is not is left out.
#[derive(Serialize, ToSchema)]
struct Inspected {
    key: String,
    /// A key can be a semaphore besides.
    locks: Vec<Lock>,
    #[serde(skip_serializing_if = "Option::is_none")]
    counter: Option<CounterInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kv: Option<KvInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    list: Option<ListInfo>,
    #[serde(skip_serializing_if = "Option::is_none")]
    barrier: Option<BarrierInfo>,
}

/// A counter.
#[derive(Serialize, ToSchema)]
struct CounterInfo {
    value: i64,
    #[schema(value_type = String, pattern = "^-?[0-9]+$")]
    value_s: String,
    idle_ms: u64,
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    revision: Decimal,
}

/// A KV entry, without its value.
#[derive(Serialize, ToSchema)]
struct KvInfo {
    value_bytes: usize,
    /// What is left of its time to live; null: for ever.
    ttl_ms: Option<u64>,
    idle_ms: u64,
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    revision: Decimal,
}

/// A list, without its items.
#[derive(Serialize, ToSchema)]
struct ListInfo {
    length: usize,
    /// How many wait for an item.
    pop_waiters: usize,
    idle_ms: u64,
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    revision: Decimal,
}

/// A barrier somebody waits at.
#[derive(Serialize, ToSchema)]
struct BarrierInfo {
    count: u32,
    participants: usize,
}

/// Everything a key is: locks with their holders and queues, counter, entry, list, barrier.
#[utoipa::path(
    get,
    path = "/v1/locks/{key}",
    tag = "inspection",
    params(InKey),
    responses((status = 200, description = "What the key is.", body = Inspected), NotFound, Refusals)
)]
async fn show_key(
    State(app): State<Shared>,
    asker: Asker,
    room: Room,
    key: Key,
) -> Result<Response, ApiError> {
    asker.check(Access::read(&key))?;
    let service = Arc::clone(&app.service);
    let work = move || {
        let views = service.engine.inspect(&key, EACH_OF_ONE_MAX)?;
        if views.is_empty() {
            return Some(Err(ApiError::not_found()));
        }
        let mut names = Names::new(&service.engine);
        let mut all = inspected(&key, &views, &mut names);
        while json_bytes(&all) > LIST_BYTES_MAX && all.name_fewer() {}
        Some(Ok(json_line(&all)))
    };
    room.inspect(&app, work).await
}

impl Inspected {
    /// Leaves out half of the holders and waiters, whose number is told all the same; false if none are named.
    fn name_fewer(&mut self) -> bool {
        let mut any = false;
        for lock in &mut self.locks {
            any |= !(lock.holders.is_empty() && lock.queue.is_empty());
            lock.holders.truncate(lock.holders.len() / 2);
            lock.queue.truncate(lock.queue.len() / 2);
        }
        any
    }
}

fn inspected(key: &[u8], views: &[KeyView], names: &mut Names<'_>) -> Inspected {
    let mut all = Inspected {
        key: lossy(key),
        locks: Vec::new(),
        counter: None,
        kv: None,
        list: None,
        barrier: None,
    };
    for view in views {
        match view {
            KeyView::Lock(lock) => all.locks.push(Lock::new(lock, names)),
            KeyView::Counter(view) => {
                all.counter = Some(CounterInfo {
                    value: view.value,
                    value_s: view.value.to_string(),
                    idle_ms: millis(view.idle),
                    revision: Decimal(view.revision.0),
                });
            }
            KeyView::Kv(view) => {
                all.kv = Some(KvInfo {
                    value_bytes: view.value_bytes,
                    ttl_ms: view.ttl.map(millis),
                    idle_ms: millis(view.idle),
                    revision: Decimal(view.revision.0),
                });
            }
            KeyView::List(view) => {
                all.list = Some(ListInfo {
                    length: view.length,
                    pop_waiters: view.pop_waiters,
                    idle_ms: millis(view.idle),
                    revision: Decimal(view.revision.0),
                });
            }
            KeyView::Barrier(view) => {
                all.barrier =
                    Some(BarrierInfo { count: view.count, participants: view.participants });
            }
        }
    }
    all
}

impl Lock {
    fn new(view: &LockView, names: &mut Names<'_>) -> Self {
        Self {
            key: lossy(&view.key),
            kind: KeyKind::of_lock(view.space, view.kind).name(),
            limit: match view.kind {
                LockKind::Slots(limit) => Some(limit),
                LockKind::ReadWrite => None,
            },
            holders_total: view.holders_total,
            holders: view.holders.iter().map(|holder| Holder::new(holder, names)).collect(),
            waiters_total: view.waiters_total,
            queue: view.queue.iter().map(|waiter| Waiter::new(waiter, names)).collect(),
            revision: Decimal(view.revision.0),
        }
    }
}

impl Holder {
    fn new(view: &HolderView, names: &mut Names<'_>) -> Self {
        Self {
            session: Decimal(view.session.0),
            client: names.of(view.session, view.client.as_ref()),
            fence: Decimal(view.fence.0),
            lease_left_ms: millis(view.expires_in),
            held_ms: millis(view.held_for),
            writer: view.writer,
            leader: view.leader,
        }
    }
}

impl Waiter {
    fn new(view: &WaiterView, names: &mut Names<'_>) -> Self {
        Self {
            session: Decimal(view.session.0),
            client: names.of(view.session, view.client.as_ref()),
            waiting_ms: millis(view.waiting),
            writer: view.writer,
        }
    }
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

// ---- Sessions ----

/// Which sessions.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct ListSessions {
    /// How many; 100 if nothing is said.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
    /// `next` of the page before.
    #[param(pattern = "^[0-9]{1,20}$")]
    after: Option<String>,
}

/// A page of sessions, in the order of their numbers.
#[derive(Serialize, ToSchema)]
struct SessionList {
    sessions: Vec<SessionSummary>,
    /// What to ask for as `after` to get the next page; null if this is the last.
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    next: Option<Decimal>,
}

/// A session or connection.
#[derive(Serialize, ToSchema)]
struct SessionSummary {
    /// Its number: not the secret by which a session is used.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    id: Decimal,
    /// Its name for people.
    #[schema(value_type = String)]
    client: Arc<str>,
    /// `line`, `http` or `grpc`; null if its client speaks to another member, or to nobody now.
    #[schema(value_type = Option<String>, example = "http")]
    api: Option<&'static str>,
    /// Locks it holds.
    holds: usize,
    /// What it waits for.
    waits: usize,
    /// What it listens to.
    subscriptions: usize,
}

/// Sessions and connections of all protocols.
#[utoipa::path(
    get,
    path = "/v1/sessions",
    tag = "inspection",
    params(ListSessions),
    responses((status = 200, description = "A page of sessions.", body = SessionList), Refusals)
)]
async fn list_sessions(
    State(app): State<Shared>,
    asker: Asker,
    room: Room,
    Query(query): Query<ListSessions>,
) -> Result<Response, ApiError> {
    asker.check(Access::SeeAll)?;
    let limit = check::page(query.limit, PAGE, PAGE_MAX)?;
    let after = query.after.as_deref().map_or(Some(0), fields::number);
    let after = after.ok_or_else(|| ApiError::bad_request("after is no number of a session"))?;
    // The server's own session has nothing that would interest anybody.
    let own = app.common().id();
    let service = Arc::clone(&app.service);
    let work = move || {
        let infos = service.engine.sessions(SessionId(after), limit)?;
        let mut next = infos.last().filter(|_| infos.len() == limit).map(|info| info.id.0);
        let infos = infos.into_iter().filter(|info| info.id != own);
        let sessions = infos.map(|info| SessionSummary {
            id: Decimal(info.id.0),
            client: info.label.unwrap_or_else(|| "".into()),
            api: info.api.map(Api::name),
            holds: info.view.holds,
            waits: info.view.waits,
            subscriptions: info.view.subscriptions,
        });
        let mut sessions: Vec<_> = sessions.collect();
        let count = fitting(sessions.iter().map(json_bytes));
        if count < sessions.len() {
            sessions.truncate(count);
            next = sessions.last().map(|session| session.id.0);
        }
        Some(Ok(json_line(&SessionList { sessions, next: next.map(Decimal) })))
    };
    room.inspect(&app, work).await
}

// ---- Contention ----

/// How many.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct HowMany {
    /// 20 if nothing is said.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// Locks with queues.
#[derive(Serialize, ToSchema)]
struct ContentionList {
    /// The longest queue first.
    keys: Vec<ContendedKey>,
}

/// A lock that somebody waits for.
#[derive(Serialize, ToSchema)]
struct ContendedKey {
    key: String,
    /// `mutex`, `semaphore` or `rwlock`.
    #[schema(value_type = String, example = "mutex")]
    kind: &'static str,
    holders: u32,
    waiters: u32,
    /// For how long the first in the queue has waited.
    longest_wait_ms: u64,
}

/// The locks with the longest queues.
#[utoipa::path(
    get,
    path = "/v1/contention",
    tag = "inspection",
    params(HowMany),
    responses((status = 200, description = "Those that somebody waits for.", body = ContentionList), Refusals)
)]
async fn contention(
    State(app): State<Shared>,
    asker: Asker,
    room: Room,
    Query(query): Query<HowMany>,
) -> Result<Response, ApiError> {
    let limit = check::page(query.limit, CONTENTION, PAGE_MAX)?;
    let service = Arc::clone(&app.service);
    let work = move || {
        let page = Contention::new(asker.who.readable(b""), limit);
        let locks = service.engine.contention(page)?.into_locks();
        let keys = locks.map(|lock| ContendedKey {
            key: lossy(&lock.key),
            kind: lock.kind.name(),
            holders: lock.holders,
            waiters: lock.waiters,
            longest_wait_ms: millis(lock.longest_wait),
        });
        let mut keys: Vec<_> = keys.collect();
        keys.truncate(fitting(keys.iter().map(json_bytes)));
        Some(Ok(json_line(&ContentionList { keys })))
    };
    room.inspect(&app, work).await
}

// ---- Events ----

/// Which events.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct RecentEvents {
    /// A key, or a pattern: at most 16 tokens between dots, `*` for one token, `>` for all that follow. All that the
    /// client may see if nothing is said.
    #[param(min_length = 1, max_length = 256, pattern = r"^\S+$")]
    pattern: Option<String>,
    /// 100 if nothing is said.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<u64>,
}

/// Changes of keys.
#[derive(Serialize, ToSchema)]
struct EventList {
    /// The newest last.
    events: Vec<ChangeBody>,
}

/// The last changes of keys that are still known.
#[utoipa::path(
    get,
    path = "/v1/events",
    tag = "watch",
    params(RecentEvents),
    responses((status = 200, description = "The newest last.", body = EventList), Refusals)
)]
async fn events(
    State(app): State<Shared>,
    asker: Asker,
    room: Room,
    Query(query): Query<RecentEvents>,
) -> Result<Response, ApiError> {
    let limit = check::page(query.limit, PAGE, PAGE_MAX)?;
    let pattern = match &query.pattern {
        Some(pattern) => asker.pattern(check::pattern(pattern.as_bytes())?)?,
        // All that may be seen: what may not is left out.
        None => Allowed::by_server(b">".as_slice()),
    };
    let reading = async {
        let changes = app.service.feed.recent(pattern, limit).await;
        let changes = changes.map_err(|_| ApiError::unavailable())?;
        let seen = changes.iter().filter(|change| asker.who.may(Access::read(&change.key)));
        let mut events: Vec<_> = seen.map(ChangeBody::from).collect();
        // The newest are told.
        let count = fitting(events.iter().rev().map(json_bytes));
        events.drain(..events.len() - count);
        Ok(json_line(&EventList { events }))
    };
    room.read(ANSWER_BYTES_MAX, reading).await
}

// ---- The whole ----

/// The server at a glance.
#[derive(Serialize, ToSchema)]
struct Overview {
    #[schema(value_type = String)]
    version: &'static str,
    /// `memory` or `replicated`.
    #[schema(value_type = String, example = "memory")]
    mode: &'static str,
    /// The name of this member of a cluster.
    node: Option<String>,
    /// Since the process began.
    uptime_ms: u64,
    /// Connections of the line protocol.
    connections: usize,
    /// HTTP sessions and event streams.
    http_sessions: u64,
    /// Holds there are.
    held: u64,
    /// Places in queues there are.
    waiting: u64,
    /// Keys of locks, idle ones among them.
    lock_keys: u64,
    /// Counters, entries, lists and barriers.
    value_keys: u64,
    totals: Totals,
    /// As in `/v1/stats`; null where there is none.
    #[schema(value_type = Option<Object>)]
    cluster: Option<report::Cluster>,
    /// Requests need a token.
    auth: bool,
    /// There is an admin token.
    admin: bool,
}

/// What happened since the process began.
#[derive(Serialize, ToSchema)]
struct Totals {
    grants: u64,
    releases: u64,
    expiries: u64,
    forced_releases: u64,
    timeouts: u64,
    requests: u64,
}

/// The server at a glance.
#[utoipa::path(
    get,
    path = "/v1/overview",
    tag = "inspection",
    responses((status = 200, description = "Numbers.", body = Overview), Refusals)
)]
async fn overview(State(app): State<Shared>, room: Room) -> Result<Response, ApiError> {
    let (service, http_sessions) = (Arc::clone(&app.service), app.sessions.count());
    let work = move || {
        // A member that has no state yet still says how its cluster is.
        let tally = service.engine.tally().unwrap_or_default();
        let sum = |count: fn(&Tally, Primitive) -> u64| -> u64 {
            Primitive::ALL.iter().map(|&primitive| count(&tally, primitive)).sum()
        };
        Some(Ok(json_line(&Overview {
            version: env!("CARGO_PKG_VERSION"),
            mode: if service.engine.is_replicated() { "replicated" } else { "memory" },
            node: service.engine.node().map(str::to_owned),
            uptime_ms: service.engine.clock().now().0 / 1_000_000,
            connections: service.connections.load(Ordering::Relaxed),
            http_sessions,
            held: sum(|tally, of| tally.of(of).held),
            waiting: sum(|tally, of| tally.of(of).waiting),
            lock_keys: tally.lock_keys,
            value_keys: tally.counters + tally.kv + tally.lists + tally.barriers,
            totals: Totals {
                grants: sum(|tally, of| tally.of(of).grants),
                releases: sum(|tally, of| tally.of(of).releases + tally.of(of).ended),
                expiries: sum(|tally, of| tally.of(of).expiries),
                forced_releases: sum(|tally, of| tally.of(of).forced),
                timeouts: sum(|tally, of| tally.of(of).timeouts),
                requests: service.metrics.requests(),
            },
            cluster: report::cluster(&service),
            auth: service.auth.is_required(),
            admin: service.auth.has_operators(),
        })))
    };
    room.inspect(&app, work).await
}

/// Who is in the cluster.
#[derive(Serialize, ToSchema)]
struct MemberList {
    members: Vec<MemberInfo>,
}

/// A member of the cluster.
#[derive(Serialize, ToSchema)]
struct MemberInfo {
    node_id: String,
    /// Where its peers dial it.
    raft_addr: String,
    /// Where clients of the line protocol find it.
    client_addr: String,
    /// `voter`, `learner` or `witness`.
    #[schema(value_type = String, example = "voter")]
    role: &'static str,
    /// It leads, as far as this member knows.
    leader: bool,
}

/// The members of the cluster, as this one knows them.
#[utoipa::path(
    get,
    path = "/v1/cluster/members",
    tag = "cluster",
    responses((status = 200, description = "All members.", body = MemberList), NoCluster, Refusals)
)]
async fn members(State(app): State<Shared>) -> Result<Response, ApiError> {
    let view = app.service.engine.view().ok_or_else(ApiError::cluster_disabled)?;
    let leader = view.status.and_then(|status| status.leader);
    let members = view.members.iter().map(|(id, member)| MemberInfo {
        node_id: member.node.clone(),
        raft_addr: member.peer_addr.clone(),
        client_addr: member.client_addr.clone(),
        role: match (member.witness, view.voters.contains(id)) {
            (true, _) => "witness",
            (false, true) => "voter",
            (false, false) => "learner",
        },
        leader: leader == Some(*id),
    });
    Ok(reply(&MemberList { members: members.collect() }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_between_keys() {
        for key in [&b"jobs/1"[..], "schl\u{fc}ssel".as_bytes(), b"k\xff", b"\xf0\x28"] {
            assert_eq!(place_of(&place(key)).as_deref(), Some(key), "{key:?}");
        }
        for bad in [" 6", " +f", " zz", " \u{e9}"] {
            assert!(place_of(bad).is_none(), "{bad}");
        }
    }
}
