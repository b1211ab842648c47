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
    SetRequest, SubscribeRequest, WaitRequest, WatchRequest,
};
use dflockd_wire::{End, ErrorCode, Mode, Request, SECONDS_MAX, Space, TokenText};
use prost::bytes::Bytes;
use serde_json::{Value, json};

use super::streams::{Subscription, follow};
use super::{Api, Failure, Outlet};
use crate::reply::Reply;

/// Makes [`Call`] of three lists: calls that are executed once, to which the session and the number are added when
/// they are made; calls that may be repeated at will; and what is more than a call, or none.
macro_rules! calls {
    (
        |$api:ident, $outlet:ident|
        once { $($call:ident($message:ident) $client:ident.$method:ident |$told:ident| $reply:expr;)* }
        at_will { $($read:ident($question:ident) $reader:ident.$ask:ident |$heard:ident| $answer:expr;)* }
        other { $($other:ident($payload:ident: $type:ty) $make:expr;)* }
    ) => {
        /// A request as a call, before it is known in which session and over which connection it is made.
        #[derive(Clone)]
        pub(super) enum Call {
            $($call($message),)*
            $($read($question),)*
            $($other($type),)*
        }

        impl Call {
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
        Acquire(AcquireRequest) LocksClient.acquire |told| granted(told.grant, Reply::Timeout);
        Campaign(CampaignRequest) ElectionsClient.campaign |told| granted(told.grant, Reply::Timeout);
        Enqueue(EnqueueRequest) LocksClient.enqueue |told| granted(told.grant, Reply::Queued);
        Wait(WaitRequest) LocksClient.wait |told| granted(told.grant, Reply::Timeout);
        Resign(ResignRequest) ElectionsClient.resign |_told| Reply::Ok;
        Release(ReleaseRequest) LocksClient.release |_told| Reply::Ok;
        Renew(RenewRequest) LocksClient.renew |told| Reply::Renewed(lease_of(told.valid_for_ms));
        AddCounter(AddCounterRequest) CountersClient.add |told| Reply::Number(told.value);
        SetCounter(SetCounterRequest) CountersClient.set |_told| Reply::Ok;
        Set(SetRequest) KvClient.set |_told| Reply::Ok;
        Delete(DeleteRequest) KvClient.delete |_told| Reply::Ok;
        CompareAndSet(CompareAndSetRequest) KvClient.compare_and_set
            |told| if told.written { Reply::Ok } else { Reply::CasConflict };
        Push(PushRequest) ListsClient.push |told| count(told.length);
        Pop(PopRequest) ListsClient.pop |told| value(told.item);
        BarrierWait(BarrierWaitRequest) BarriersClient.wait
            |told| if told.passed { Reply::Ok } else { Reply::Timeout };
        Publish(PublishRequest) SignalsClient.publish |told| count(told.receivers);
    }
    at_will {
        GetCounter(GetCounterRequest) CountersClient.get |told| Reply::Number(told.value);
        Get(GetRequest) KvClient.get |told| value(told.entry.map(|entry| entry.value));
        Length(LengthRequest) ListsClient.length |told| count(told.length);
    }
    other {
        Range(message: RangeRequest) range(api, message).await;
        // Any answer is one.
        Ping(message: MembersRequest) match members(api, message).await {
            Err(failure @ (Failure::Gone | Failure::Broken)) => Err(failure),
            Ok(_) | Err(Failure::Refused(_) | Failure::NotLeader(_)) => Ok(Reply::Ok),
        };
        Stats(message: MembersRequest) match members(api, message).await {
            Err(Failure::Refused(Reason::NoCluster)) => Ok(Reply::Json(json!({}))),
            members => Ok(Reply::Json(json!({ "cluster": members? }))),
        };
        Inspect(message: DescribeRequest) inspect(api, message).await;
        ForceRelease(call: (ForceReleaseRequest, Bytes)) {
            let request = api.admin_request(call.0, &call.1);
            AdminClient::new(api.channel.clone()).force_release(request).await?;
            Ok(Reply::Ok)
        };
        EndSession(call: (EndSessionRequest, Bytes)) {
            let request = api.admin_request(call.0, &call.1);
            AdminClient::new(api.channel.clone()).end_session(request).await?;
            Ok(Reply::Ok)
        };
        Subscribe(to: Subscription) Err(follow(api, to, outlet).await);
        Ack(up_to: u64) {
            api.acknowledge(up_to);
            Ok(Reply::Ok)
        };
        Cancel(number: u64) {
            api.withdraw(number).await;
            Ok(Reply::Ok)
        };
        Refused(reason: Reason) Err(Failure::Refused(reason));
    }
}

impl Call {
    #[expect(clippy::too_many_lines, reason = "one call per request")]
    pub(super) fn new(request: &Request<'_>) -> Self {
        match *request {
            Request::Acquire { mode: Mode::Election, key, wait, lease } => {
                Self::Campaign(CampaignRequest {
                    key: bytes(key),
                    wait_ms: millis(wait),
                    lease_ms: lease.map_or(0, millis),
                    ..CampaignRequest::default()
                })
            }
            Request::Acquire { mode, key, wait, lease } => Self::Acquire(AcquireRequest {
                key: bytes(key),
                mode: mode_of(mode),
                limit: limit_of(mode),
                wait_ms: millis(wait),
                lease_ms: lease.map_or(0, millis),
                ..AcquireRequest::default()
            }),
            Request::Enqueue { mode, key, lease } => Self::Enqueue(EnqueueRequest {
                key: bytes(key),
                mode: mode_of(mode),
                limit: limit_of(mode),
                lease_ms: lease.map_or(0, millis),
                ..EnqueueRequest::default()
            }),
            Request::Wait { space, key, wait } => Self::Wait(WaitRequest {
                key: bytes(key),
                mode: space_of(space),
                wait_ms: millis(wait),
                ..WaitRequest::default()
            }),
            Request::Release { key, token, resign: true, .. } => Self::Resign(ResignRequest {
                key: bytes(key),
                token: text(token),
                ..ResignRequest::default()
            }),
            Request::Release { space, key, token, resign: false } => {
                Self::Release(ReleaseRequest {
                    key: bytes(key),
                    mode: space_of(space),
                    token: text(token),
                    ..ReleaseRequest::default()
                })
            }
            // In a call it would stand for the server's default.
            Request::Renew { lease: Some(Duration::ZERO), .. } => Self::Refused(Reason::BadRequest),
            Request::Renew { space, key, token, lease } => Self::Renew(RenewRequest {
                key: bytes(key),
                mode: space_of(space),
                token: text(token),
                lease_ms: lease.map_or(0, millis),
                ..RenewRequest::default()
            }),
            Request::Add { key, delta, decrement } => Self::AddCounter(AddCounterRequest {
                key: bytes(key),
                delta: if decrement { delta.wrapping_neg() } else { delta },
                ..AddCounterRequest::default()
            }),
            Request::CounterGet { key } => Self::GetCounter(GetCounterRequest { key: bytes(key) }),
            Request::CounterSet { key, value } => Self::SetCounter(SetCounterRequest {
                key: bytes(key),
                value,
                ..SetCounterRequest::default()
            }),
            Request::KvSet { key, value, ttl } => Self::Set(SetRequest {
                key: bytes(key),
                value: bytes(value),
                ttl_ms: ttl.map_or(0, millis),
                ..SetRequest::default()
            }),
            Request::KvGet { key } => Self::Get(GetRequest { key: bytes(key) }),
            Request::KvDelete { key } => {
                Self::Delete(DeleteRequest { key: bytes(key), ..DeleteRequest::default() })
            }
            Request::KvCompareAndSet { key, old, new, ttl } => {
                Self::CompareAndSet(CompareAndSetRequest {
                    key: bytes(key),
                    expect: Some(old.map_or(Expect::Absent(true), |old| Expect::Value(bytes(old)))),
                    new_value: bytes(new),
                    ttl_ms: ttl.map_or(0, millis),
                    ..CompareAndSetRequest::default()
                })
            }
            Request::Push { key, end, value } => Self::Push(PushRequest {
                key: bytes(key),
                end: end_of(end),
                item: bytes(value),
                ..PushRequest::default()
            }),
            Request::Pop { key, end } => {
                Self::Pop(PopRequest { key: bytes(key), end: end_of(end), ..PopRequest::default() })
            }
            Request::BlockingPop { key, end, wait } => Self::Pop(PopRequest {
                key: bytes(key),
                end: end_of(end),
                wait_ms: Some(millis(wait)),
                ..PopRequest::default()
            }),
            Request::Length { key } => Self::Length(LengthRequest { key: bytes(key) }),
            Request::Range { key, start, stop } => {
                Self::Range(RangeRequest { key: bytes(key), start, stop })
            }
            Request::BarrierWait { key, count, wait } => Self::BarrierWait(BarrierWaitRequest {
                key: bytes(key),
                count,
                wait_ms: millis(wait),
                ..BarrierWaitRequest::default()
            }),
            Request::Signal { channel, payload } => Self::Publish(PublishRequest {
                channel: bytes(channel),
                payload: bytes(payload),
                ..PublishRequest::default()
            }),
            Request::Ping => Self::Ping(MembersRequest {}),
            Request::Stats => Self::Stats(MembersRequest {}),
            Request::Inspect { key } => Self::Inspect(DescribeRequest { key: bytes(key) }),
            Request::ForceRelease { key, token, space, fence, reason } => {
                let (key, mode, reason) = (bytes(key), space_of(space), reason.to_owned());
                Self::ForceRelease((ForceReleaseRequest { key, mode, fence, reason }, bytes(token)))
            }
            Request::EndSession { session: number, token, reason } => {
                let reason = reason.to_owned();
                Self::EndSession((EndSessionRequest { number, reason }, bytes(token)))
            }
            Request::Listen { pattern, group } => {
                let signals = dflockd_wire::grpc::Subscription {
                    pattern: bytes(pattern),
                    group: bytes(group),
                };
                let message = SubscribeRequest { add: vec![signals], remove: Vec::new() };
                Self::Subscribe(Subscription::Signals(message))
            }
            Request::Watch { pattern } => Self::Subscribe(Subscription::Changes(WatchRequest {
                patterns: vec![bytes(pattern)],
                ..WatchRequest::default()
            })),
            Request::Observe { key } => {
                Self::Subscribe(Subscription::Leaders(ObserveRequest { key: bytes(key) }))
            }
            Request::Cancel { number } => Self::Cancel(number),
            Request::Ack { number } => Self::Ack(number),
            Request::Auth { .. }
            | Request::Barrier
            | Request::StableRef { .. }
            | Request::Hello { .. }
            | Request::Unobserve { .. }
            | Request::Unlisten { .. }
            | Request::Unwatch { .. }
            | Request::Ls { .. }
            | Request::Cluster { .. } => Self::Refused(Reason::BadRequest),
        }
    }

    /// What it is told if it was withdrawn before it was made.
    pub(super) fn given_up(&self) -> Reply {
        if matches!(self, Self::Pop(_)) { Reply::Nil } else { Reply::Timeout }
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

fn count(count: u64) -> Reply {
    Reply::Number(i64::try_from(count).unwrap_or(i64::MAX))
}

fn value(value: Option<Bytes>) -> Reply {
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
