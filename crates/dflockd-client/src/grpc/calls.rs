//! The call that stands for each request, and the reply that stands for its answer.

use std::time::Duration;

use dflockd_wire::grpc::admin_client::AdminClient;
use dflockd_wire::grpc::barriers_client::BarriersClient;
use dflockd_wire::grpc::cluster_client::ClusterClient;
use dflockd_wire::grpc::compare_and_set_request::Expect;
use dflockd_wire::grpc::counters_client::CountersClient;
use dflockd_wire::grpc::elections_client::ElectionsClient;
use dflockd_wire::grpc::kv_client::KvClient;
use dflockd_wire::grpc::lists_client::ListsClient;
use dflockd_wire::grpc::locks_client::LocksClient;
use dflockd_wire::grpc::signals_client::SignalsClient;
use dflockd_wire::grpc::{
    AcquireRequest, AddCounterRequest, BarrierWaitRequest, CampaignRequest, CompareAndSetRequest,
    DeleteRequest, DescribeRequest, EndSessionRequest, EnqueueRequest, ForceReleaseRequest,
    GetCounterRequest, GetRequest, Grant, HealthRequest, LengthRequest, ListEnd, Lock, LockMode,
    MemberRole, MembersRequest, ObserveRequest, PopRequest, PublishRequest, PushRequest,
    RangeRequest, Reason, ReleaseRequest, RenewRequest, ResignRequest, SetCounterRequest,
    SetRequest, SubscribeRequest, Subscription, WaitRequest, WatchRequest,
};
use dflockd_wire::{End, ErrorCode, Mode, Request, SECONDS_MAX, Space, TokenText};
use prost::bytes::Bytes;
use serde_json::{Value, json};

use super::{Api, Failure, Outlet, streams};
use crate::reply::Reply;

/// Makes [`Call`] of three lists of requests: those that are executed once, to whose messages the session and the
/// number are added when the call is made; those that may be repeated at will; and what is more than a call, or none.
/// A row is the request, the message, the call, and what its answer means.
macro_rules! calls {
    (
        |$api:ident, $outlet:ident|
        once { $(
            $request:pat => $call:ident($message:ident { $($field:ident: $value:expr),* })
                $client:ident.$method:ident |$told:ident| $reply:expr;
        )* }
        at_will { $(
            $question:pat => $read:ident($key:ident { $($part:ident: $of:expr),* })
                $reader:ident.$ask:ident |$heard:ident| $answer:expr;
        )* }
        other { $($wish:pat => $other:ident($payload:ident: $type:ty = $from:expr) $make:expr;)* }
    ) => {
        /// A request as a call, before it is known in which session and over which connection it is made.
        #[derive(Clone)]
        pub(super) enum Call {
            $($call($message),)*
            $($read($key),)*
            $($other($type),)*
        }

        impl Call {
            pub(super) fn new(request: &Request<'_>) -> Self {
                match *request {
                    $($wish => Self::$other($from),)*
                    $($request => {
                        Self::$call($message { $($field: $value,)* ..$message::default() })
                    })*
                    $($question => Self::$read($key { $($part: $of),* }),)*
                }
            }

            pub(super) async fn make(self, $api: &Api, $outlet: &Outlet) -> Result<Reply, Failure> {
                match self {
                    $(Self::$call(message) => {
                        let (session, ack_through) = ($api.session.clone(), $api.ack_through());
                        // A number needs a session.
                        let number = $outlet.number.filter(|_| !session.is_empty());
                        let request_id = number.unwrap_or_default();
                        let message = $message { session, request_id, ack_through, ..message };
                        let mut client = $client::new($api.channel.clone());
                        let $told = client.$method($api.request(message)).await?.into_inner();
                        Ok($reply)
                    })*
                    $(Self::$read(message) => {
                        let mut client = $reader::new($api.channel.clone());
                        let $heard = client.$ask($api.request(message)).await?.into_inner();
                        Ok($answer)
                    })*
                    $(Self::$other($payload) => $make,)*
                }
            }
        }
    };
}

calls! {
    |api, outlet|
    once {
        Request::Acquire { mode: Mode::Election, key, wait, lease } => Campaign(CampaignRequest {
            key: bytes(key), wait_ms: millis(wait), lease_ms: lease.map_or(0, millis)
        }) ElectionsClient.campaign |told| granted(told.grant, Reply::Timeout);
        Request::Acquire { mode, key, wait, lease } => Acquire(AcquireRequest {
            key: bytes(key), mode: mode_of(mode), limit: limit_of(mode), wait_ms: millis(wait),
            lease_ms: lease.map_or(0, millis)
        }) LocksClient.acquire |told| granted(told.grant, Reply::Timeout);
        Request::Enqueue { mode, key, lease } => Enqueue(EnqueueRequest {
            key: bytes(key), mode: mode_of(mode), limit: limit_of(mode), lease_ms: lease.map_or(0, millis)
        }) LocksClient.enqueue |told| granted(told.grant, Reply::Queued);
        Request::Wait { space, key, wait } => Wait(WaitRequest {
            key: bytes(key), mode: space_of(space), wait_ms: millis(wait)
        }) LocksClient.wait |told| granted(told.grant, Reply::Timeout);
        Request::Release { key, token, resign: true, .. } => Resign(ResignRequest {
            key: bytes(key), token: text(token)
        }) ElectionsClient.resign |_told| Reply::Ok;
        Request::Release { space, key, token, resign: false } => Release(ReleaseRequest {
            key: bytes(key), mode: space_of(space), token: text(token)
        }) LocksClient.release |_told| Reply::Ok;
        Request::Renew { space, key, token, lease } => Renew(RenewRequest {
            key: bytes(key), mode: space_of(space), token: text(token), lease_ms: lease.map_or(0, millis)
        }) LocksClient.renew |told| Reply::Renewed(lease_of(told.valid_for_ms));
        Request::Add { key, delta, decrement } => AddCounter(AddCounterRequest {
            key: bytes(key), delta: if decrement { delta.wrapping_neg() } else { delta }
        }) CountersClient.add |told| Reply::Number(told.value);
        Request::CounterSet { key, value } => SetCounter(SetCounterRequest {
            key: bytes(key), value: value
        }) CountersClient.set |_told| Reply::Ok;
        Request::KvSet { key, value, ttl } => Set(SetRequest {
            key: bytes(key), value: bytes(value), ttl_ms: ttl.map_or(0, millis)
        }) KvClient.set |_told| Reply::Ok;
        Request::KvDelete { key } => Delete(DeleteRequest { key: bytes(key) })
            KvClient.delete |_told| Reply::Ok;
        Request::KvCompareAndSet { key, old, new, ttl } => CompareAndSet(CompareAndSetRequest {
            key: bytes(key), expect: Some(old.map_or(Expect::Absent(true), |old| Expect::Value(bytes(old)))),
            new_value: bytes(new), ttl_ms: ttl.map_or(0, millis)
        }) KvClient.compare_and_set |told| if told.written { Reply::Ok } else { Reply::CasConflict };
        Request::Push { key, end, value } => Push(PushRequest {
            key: bytes(key), end: end_of(end), item: bytes(value)
        }) ListsClient.push |told| count_of(told.length);
        Request::Pop { key, end } => Pop(PopRequest { key: bytes(key), end: end_of(end) })
            ListsClient.pop |told| value_of(told.item);
        Request::BlockingPop { key, end, wait } => BlockingPop(PopRequest {
            key: bytes(key), end: end_of(end), wait_ms: Some(millis(wait))
        }) ListsClient.pop |told| value_of(told.item);
        Request::BarrierWait { key, count, wait } => BarrierWait(BarrierWaitRequest {
            key: bytes(key), count: count, wait_ms: millis(wait)
        }) BarriersClient.wait |told| if told.passed { Reply::Ok } else { Reply::Timeout };
        Request::Signal { channel, payload } => Publish(PublishRequest {
            channel: bytes(channel), payload: bytes(payload)
        }) SignalsClient.publish |told| count_of(told.receivers);
    }
    at_will {
        Request::CounterGet { key } => GetCounter(GetCounterRequest { key: bytes(key) })
            CountersClient.get |told| Reply::Number(told.value);
        Request::KvGet { key } => Get(GetRequest { key: bytes(key) })
            KvClient.get |told| value_of(told.entry.map(|entry| entry.value));
        Request::Length { key } => Length(LengthRequest { key: bytes(key) })
            ListsClient.length |told| count_of(told.length);
    }
    other {
        Request::Range { key, start, stop } => Range(
            message: RangeRequest = RangeRequest { key: bytes(key), start, stop }
        ) range(api, message).await;
        // Any answer is one.
        Request::Ping => Ping(message: MembersRequest = MembersRequest {}) match members(api, message).await {
            Err(failure @ (Failure::Gone | Failure::Broken)) => Err(failure),
            Ok(_) | Err(Failure::Refused(_) | Failure::NotLeader(_)) => Ok(Reply::Ok),
        };
        Request::Stats => Stats(message: MembersRequest = MembersRequest {}) match members(api, message).await {
            Err(Failure::Refused(Reason::NoCluster)) => Ok(Reply::Json(json!({}))),
            members => Ok(Reply::Json(json!({ "cluster": members? }))),
        };
        Request::Inspect { key } => Inspect(
            message: DescribeRequest = DescribeRequest { key: bytes(key) }
        ) inspect(api, message).await;
        Request::ForceRelease { key, token, space, fence, reason } => ForceRelease(
            call: (Bytes, ForceReleaseRequest) = (bytes(token), ForceReleaseRequest {
                key: bytes(key), mode: space_of(space), fence, reason: reason.to_owned()
            })
        ) {
            let request = api.admin_request(call.1, &call.0);
            AdminClient::new(api.channel.clone()).force_release(request).await?;
            Ok(Reply::Ok)
        };
        Request::EndSession { session: number, token, reason } => EndSession(
            call: (Bytes, EndSessionRequest)
                = (bytes(token), EndSessionRequest { number, reason: reason.to_owned() })
        ) {
            let request = api.admin_request(call.1, &call.0);
            AdminClient::new(api.channel.clone()).end_session(request).await?;
            Ok(Reply::Ok)
        };
        Request::Listen { pattern, group } => Listen(message: SubscribeRequest = SubscribeRequest {
            add: vec![Subscription { pattern: bytes(pattern), group: bytes(group) }], remove: Vec::new()
        }) Err(streams::listen(api, message, outlet).await);
        Request::Watch { pattern } => Watch(message: WatchRequest = WatchRequest {
            patterns: vec![bytes(pattern)], ..WatchRequest::default()
        }) Err(streams::watch(api, message, outlet).await);
        Request::Observe { key } => Observe(message: ObserveRequest = ObserveRequest { key: bytes(key) })
            Err(streams::observe(api, message, outlet).await);
        Request::Ack { number } => Ack(up_to: u64 = number) {
            api.acknowledge(up_to);
            Ok(Reply::Ok)
        };
        Request::Cancel { number } => Cancel(number: u64 = number) {
            api.withdraw(number).await;
            Ok(Reply::Ok)
        };
        Request::Auth { .. }
        | Request::Barrier
        | Request::StableRef { .. }
        | Request::Hello { .. }
        | Request::Unobserve { .. }
        | Request::Unlisten { .. }
        | Request::Unwatch { .. }
        | Request::Ls { .. }
        | Request::Cluster { .. }
        // In a call it would stand for the server's default.
        | Request::Renew { lease: Some(Duration::ZERO), .. } => Refused(reason: Reason = Reason::BadRequest)
            Err(Failure::Refused(reason));
    }
}

impl Call {
    /// What it is told if it was withdrawn before it was made.
    pub(super) fn given_up(&self) -> Reply {
        if matches!(self, Self::BlockingPop(_)) { Reply::Nil } else { Reply::Timeout }
    }
}

fn bytes(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Rounded up, as in the line protocol, and at most what a server takes.
fn millis(time: Duration) -> u64 {
    let millis = time.as_nanos().div_ceil(1_000_000);
    u64::try_from(millis).unwrap_or(u64::MAX).min(SECONDS_MAX * 1_000)
}

fn mode_of(mode: Mode) -> i32 {
    match mode {
        Mode::Mutex | Mode::Election => LockMode::Mutex.into(),
        Mode::Semaphore { .. } => LockMode::Semaphore.into(),
        Mode::Read => LockMode::Read.into(),
        Mode::Write => LockMode::Write.into(),
    }
}

fn limit_of(mode: Mode) -> u32 {
    if let Mode::Semaphore { limit } = mode { limit } else { 0 }
}

fn space_of(space: Space) -> i32 {
    match space {
        Space::Locks => LockMode::Mutex.into(),
        Space::Semaphores => LockMode::Semaphore.into(),
    }
}

fn end_of(end: End) -> i32 {
    match end {
        End::Left => ListEnd::Left.into(),
        End::Right => ListEnd::Right.into(),
    }
}

/// Never nothing: that would be no lease at all.
fn lease_of(millis: u64) -> Duration {
    Duration::from_millis(millis.max(1))
}

fn granted(grant: Option<Grant>, none: Reply) -> Reply {
    let Some(grant) = grant else { return none };
    match TokenText::from_bytes(grant.token.as_bytes()) {
        Some(token) => Reply::Granted { token, lease: lease_of(grant.valid_for_ms) },
        None => Reply::Refused(ErrorCode::Unknown),
    }
}

fn count_of(count: u64) -> Reply {
    Reply::Number(i64::try_from(count).unwrap_or(i64::MAX))
}

fn value_of(value: Option<Bytes>) -> Reply {
    value.map_or(Reply::Nil, |value| Reply::Value(value.into()))
}

async fn range(api: &Api, message: RangeRequest) -> Result<Reply, Failure> {
    let mut lists = ListsClient::new(api.channel.clone());
    let mut items = Vec::new();
    let mut next = Some(message.start);
    while let Some(start) = next {
        let request = RangeRequest { start, ..message.clone() };
        let told = lists.range(api.request(request)).await?.into_inner();
        items.extend(told.items);
        next = told.next;
    }
    Ok(Reply::Json(items.iter().map(|item| String::from_utf8_lossy(item)).collect()))
}

/// The part `cluster` of `stats`, all there is of it here. The addresses are those for gRPC; a member that has none
/// is not dialed.
async fn members(api: &Api, message: MembersRequest) -> Result<Value, Failure> {
    let mut cluster = ClusterClient::new(api.channel.clone());
    let told = cluster.members(api.request(message)).await?.into_inner().members;
    let mut health = cluster.health(api.request(HealthRequest {})).await?.into_inner();
    let ready = health.message().await?.is_some_and(|health| health.ready && !health.draining);
    let name = |found: Option<&dflockd_wire::grpc::Member>| {
        found.map(|member| member.node.clone()).unwrap_or_default()
    };
    let witnesses: Vec<_> = told
        .iter()
        .filter(|member| member.role() == MemberRole::Witness)
        .map(|member| member.node.clone())
        .collect();
    let members: Vec<_> = told
        .iter()
        .map(|member| {
            json!({
                "node_id": member.node,
                "peer_addr": member.peer_addr,
                "client_addr": member.grpc_addr,
            })
        })
        .collect();
    Ok(json!({
        "node_id": name(told.iter().find(|member| member.self_)),
        "leader_id": name(told.iter().find(|member| member.leader)),
        "ready": ready,
        "witnesses": witnesses,
        "members": members,
    }))
}

/// What a key is; if it is several things, the first of them.
async fn inspect(api: &Api, message: DescribeRequest) -> Result<Reply, Failure> {
    let key = text(&message.key);
    let asked = LocksClient::new(api.channel.clone()).describe(api.request(message)).await;
    let told = match asked.map_err(Failure::from) {
        Ok(told) => told.into_inner(),
        Err(Failure::Refused(Reason::NotFound)) => return Ok(Reply::Nil),
        Err(failure) => return Err(failure),
    };
    let seconds = |millis: u64| Duration::from_millis(millis).as_secs_f64();
    let lock = told.locks.first().map(|lock| describe(&key, lock));
    let counter = told.counter.map(
        |it| json!({ "key": key, "kind": "counter", "value": it.value, "revision": it.revision }),
    );
    let entry = told.entry.map(|it| {
        let ttl = it.ttl_ms.map_or(0.0, seconds);
        let (value_len, revision) = (it.value_bytes, it.revision);
        json!({ "key": key, "kind": "kv", "value_len": value_len, "ttl": ttl, "revision": revision })
    });
    let list = told.list.map(|it| {
        let (len, pop_waiters, revision) = (it.length, it.pop_waiters, it.revision);
        json!({
            "key": key, "kind": "list", "len": len, "pop_waiters": pop_waiters, "revision": revision
        })
    });
    let barrier = told.barrier.map(|it| {
        let (count, participants) = (it.count, it.participants);
        json!({ "key": key, "kind": "barrier", "count": count, "participants": participants })
    });
    let about = lock.or(counter).or(entry).or(list).or(barrier);
    Ok(about.map_or(Reply::Nil, Reply::Json))
}

fn describe(key: &str, lock: &Lock) -> Value {
    let kind = match lock.kind() {
        LockMode::Semaphore => "semaphore",
        LockMode::Read | LockMode::Write => "rwlock",
        LockMode::Mutex | LockMode::Unspecified => "mutex",
    };
    let seconds = |millis: u64| Duration::from_millis(millis).as_secs_f64();
    let holders: Vec<_> = lock
        .holders
        .iter()
        .map(|holder| {
            json!({
                "conn": holder.session,
                "fence": holder.fence.to_string(),
                "expires_in_s": seconds(holder.lease_left_ms),
                "held_s": seconds(holder.held_ms),
                "client": holder.client,
            })
        })
        .collect();
    let queue: Vec<_> = lock
        .queue
        .iter()
        .map(|waiter| {
            let waiting_s = seconds(waiter.waiting_ms);
            json!({ "conn": waiter.session, "waiting_s": waiting_s, "client": waiter.client })
        })
        .collect();
    json!({
        "key": key,
        "kind": kind,
        "limit": lock.limit,
        "holders": holders,
        "queue": queue,
        "revision": lock.revision,
    })
}
