//! The call that stands for each request, and the line that stands for its answer.

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
    MemberRole, MembersRequest, PopRequest, PublishRequest, PushRequest, RangeRequest, Reason,
    ReleaseRequest, RenewRequest, ResignRequest, SetCounterRequest, SetRequest, WaitRequest,
};
use dflockd_wire::{End, ErrorCode, Mode, Request, Response, Space, TokenText, Unit};
use prost::bytes::Bytes;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{Api, Failure, Said, bytes, code, streams};

/// An answer that owns what it says.
enum Answer {
    Granted(Option<Grant>),
    /// The same as the answer to an enqueue.
    Acquired(Option<Grant>),
    Renewed {
        remaining: Duration,
        fence: u64,
    },
    Done(bool),
    Written(bool),
    Number(i64),
    Value(Option<Bytes>),
    Json(Value),
}

/// Makes the call and says what came of it.
pub(super) async fn call(
    api: &Api,
    number: Option<u64>,
    unit: Unit,
    request: &Request<'_>,
    said: &mpsc::UnboundedSender<Said>,
) {
    let mut line = Vec::new();
    let mut print = |response: &Response<'_>| response.print(unit, number, &mut line);
    let mut ok = Vec::new();
    Response::Ok.print(unit, number, &mut ok);
    let failure = match streams::follow(api, request, &ok, said).await {
        Some(ended) => Some(ended),
        None => match ask(api, number.unwrap_or_default(), request).await {
            Ok(answer) => {
                answer.print(&mut print);
                None
            }
            Err(failure) => Some(failure),
        },
    };
    let end = match failure {
        None => None,
        Some(Failure::Broken) => Some(Said::Broken),
        Some(Failure::NotLeader(leader)) => {
            print(&Response::NotLeader(leader.as_deref()));
            None
        }
        Some(Failure::Refused(reason)) => match code(reason) {
            Some(code) => {
                print(&Response::Error(code));
                None
            }
            None => Some(Said::Gone),
        },
    };
    let _ = said.send(end.unwrap_or(Said::Lines(line)));
}

impl Answer {
    fn print(&self, print: &mut impl FnMut(&Response<'_>)) {
        let parts = |grant: &Grant| {
            let token = TokenText::from_bytes(grant.token.as_bytes());
            token.map(|token| (token, Duration::from_millis(grant.valid_for_ms), Some(grant.fence)))
        };
        match self {
            Self::Granted(Some(grant)) => match parts(grant) {
                Some((token, lease, fence)) => print(&Response::Granted { token, lease, fence }),
                None => print(&Response::Error(ErrorCode::Unknown)),
            },
            Self::Granted(None) | Self::Done(false) => print(&Response::Timeout),
            Self::Acquired(Some(grant)) => match parts(grant) {
                Some((token, lease, fence)) => print(&Response::Acquired { token, lease, fence }),
                None => print(&Response::Error(ErrorCode::Unknown)),
            },
            Self::Acquired(None) => print(&Response::Queued),
            Self::Renewed { remaining, fence } => {
                print(&Response::Renewed { remaining: *remaining, fence: Some(*fence) });
            }
            Self::Done(true) | Self::Written(true) => print(&Response::Ok),
            Self::Written(false) => print(&Response::CasConflict),
            Self::Number(number) => print(&Response::Number(*number)),
            Self::Value(Some(value)) => print(&Response::Value(value)),
            Self::Value(None) => print(&Response::Nil),
            Self::Json(json) => print(&Response::Value(json.to_string().as_bytes())),
        }
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn mode_of(mode: Mode) -> (i32, u32) {
    let (mode, limit) = match mode {
        Mode::Mutex | Mode::Election => (LockMode::Mutex, 0),
        Mode::Semaphore { limit } => (LockMode::Semaphore, limit),
        Mode::Read => (LockMode::Read, 0),
        Mode::Write => (LockMode::Write, 0),
    };
    (mode.into(), limit)
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

fn number_of(count: u64) -> Answer {
    Answer::Number(i64::try_from(count).unwrap_or(i64::MAX))
}

#[expect(clippy::too_many_lines, reason = "one call per request")]
async fn ask(api: &Api, request_id: u64, request: &Request<'_>) -> Result<Answer, Failure> {
    let (session, ack_through) = (api.session.clone(), api.ack_through());
    // A number needs a session.
    let request_id = if session.is_empty() { 0 } else { request_id };
    let channel = api.channel.clone();
    match *request {
        Request::Acquire { mode: Mode::Election, key, wait, lease } => {
            let (key, wait_ms) = (bytes(key), millis(wait));
            let lease_ms = lease.map_or(0, millis);
            let request =
                CampaignRequest { session, request_id, ack_through, key, wait_ms, lease_ms };
            let told = ElectionsClient::new(channel).campaign(api.request(request)).await?;
            Ok(Answer::Granted(told.into_inner().grant))
        }
        Request::Acquire { mode, key, wait, lease } => {
            let (key, wait_ms, (mode, limit)) = (bytes(key), millis(wait), mode_of(mode));
            let lease_ms = lease.map_or(0, millis);
            let request = AcquireRequest {
                session,
                request_id,
                ack_through,
                key,
                mode,
                limit,
                wait_ms,
                lease_ms,
            };
            let told = LocksClient::new(channel).acquire(api.request(request)).await?;
            Ok(Answer::Granted(told.into_inner().grant))
        }
        Request::Enqueue { mode, key, lease } => {
            let (key, (mode, limit)) = (bytes(key), mode_of(mode));
            let lease_ms = lease.map_or(0, millis);
            let request =
                EnqueueRequest { session, request_id, ack_through, key, mode, limit, lease_ms };
            let told = LocksClient::new(channel).enqueue(api.request(request)).await?;
            Ok(Answer::Acquired(told.into_inner().grant))
        }
        Request::Wait { space, key, wait } => {
            let (key, mode, wait_ms) = (bytes(key), space_of(space), millis(wait));
            let request = WaitRequest { session, request_id, ack_through, key, mode, wait_ms };
            let told = LocksClient::new(channel).wait(api.request(request)).await?;
            Ok(Answer::Granted(told.into_inner().grant))
        }
        Request::Release { key, token, resign: true, .. } => {
            let (key, token) = (bytes(key), text(token));
            let request = ResignRequest { session, request_id, ack_through, key, token };
            ElectionsClient::new(channel).resign(api.request(request)).await?;
            Ok(Answer::Done(true))
        }
        Request::Release { space, key, token, resign: false } => {
            let (key, mode, token) = (bytes(key), space_of(space), text(token));
            let request = ReleaseRequest { session, request_id, ack_through, key, mode, token };
            LocksClient::new(channel).release(api.request(request)).await?;
            Ok(Answer::Done(true))
        }
        Request::Renew { space, key, token, lease } => {
            let (key, mode, token) = (bytes(key), space_of(space), text(token));
            let lease_ms = lease.map_or(0, millis);
            let request =
                RenewRequest { session, request_id, ack_through, key, mode, token, lease_ms };
            let told = LocksClient::new(channel).renew(api.request(request)).await?.into_inner();
            let remaining = Duration::from_millis(told.valid_for_ms);
            Ok(Answer::Renewed { remaining, fence: told.fence })
        }
        Request::Add { key, delta, decrement } => {
            let delta = if decrement { delta.wrapping_neg() } else { delta };
            let request =
                AddCounterRequest { session, request_id, ack_through, key: bytes(key), delta };
            let told = CountersClient::new(channel).add(api.request(request)).await?;
            Ok(Answer::Number(told.into_inner().value))
        }
        Request::CounterGet { key } => {
            let request = GetCounterRequest { key: bytes(key) };
            let told = CountersClient::new(channel).get(api.request(request)).await?;
            Ok(Answer::Number(told.into_inner().value))
        }
        Request::CounterSet { key, value } => {
            let request =
                SetCounterRequest { session, request_id, ack_through, key: bytes(key), value };
            CountersClient::new(channel).set(api.request(request)).await?;
            Ok(Answer::Done(true))
        }
        Request::KvSet { key, value, ttl } => {
            let (key, value, ttl_ms) = (bytes(key), bytes(value), ttl.map_or(0, millis));
            let request = SetRequest { session, request_id, ack_through, key, value, ttl_ms };
            KvClient::new(channel).set(api.request(request)).await?;
            Ok(Answer::Done(true))
        }
        Request::KvGet { key } => {
            let request = GetRequest { key: bytes(key) };
            let told = KvClient::new(channel).get(api.request(request)).await?;
            Ok(Answer::Value(told.into_inner().entry.map(|entry| entry.value)))
        }
        Request::KvDelete { key } => {
            let request = DeleteRequest { session, request_id, ack_through, key: bytes(key) };
            KvClient::new(channel).delete(api.request(request)).await?;
            Ok(Answer::Done(true))
        }
        Request::KvCompareAndSet { key, old, new, ttl } => {
            let request = CompareAndSetRequest {
                session,
                request_id,
                ack_through,
                key: bytes(key),
                expect: Some(old.map_or(Expect::Absent(true), |old| Expect::Value(bytes(old)))),
                new_value: bytes(new),
                ttl_ms: ttl.map_or(0, millis),
            };
            let told = KvClient::new(channel).compare_and_set(api.request(request)).await?;
            Ok(Answer::Written(told.into_inner().written))
        }
        Request::Push { key, end, value } => {
            let (key, end, item) = (bytes(key), end_of(end), bytes(value));
            let request = PushRequest { session, request_id, ack_through, key, end, item };
            let told = ListsClient::new(channel).push(api.request(request)).await?;
            Ok(number_of(told.into_inner().length))
        }
        Request::Pop { key, end } => {
            let (key, end) = (bytes(key), end_of(end));
            let request = PopRequest { session, request_id, ack_through, key, end, wait_ms: None };
            let told = ListsClient::new(channel).pop(api.request(request)).await?;
            Ok(Answer::Value(told.into_inner().item))
        }
        Request::BlockingPop { key, end, wait } => {
            let (key, end, wait_ms) = (bytes(key), end_of(end), Some(millis(wait)));
            let request = PopRequest { session, request_id, ack_through, key, end, wait_ms };
            let told = ListsClient::new(channel).pop(api.request(request)).await?;
            Ok(Answer::Value(told.into_inner().item))
        }
        Request::Length { key } => {
            let request = LengthRequest { key: bytes(key) };
            let told = ListsClient::new(channel).length(api.request(request)).await?;
            Ok(number_of(told.into_inner().length))
        }
        Request::Range { key, start, stop } => {
            let mut lists = ListsClient::new(channel);
            let mut items = Vec::new();
            let mut next = Some(start);
            while let Some(start) = next {
                let request = RangeRequest { key: bytes(key), start, stop };
                let told = lists.range(api.request(request)).await?.into_inner();
                items.extend(told.items);
                next = told.next;
            }
            Ok(Answer::Json(items.iter().map(|item| String::from_utf8_lossy(item)).collect()))
        }
        Request::BarrierWait { key, count, wait } => {
            let (key, wait_ms) = (bytes(key), millis(wait));
            let request =
                BarrierWaitRequest { session, request_id, ack_through, key, count, wait_ms };
            let told = BarriersClient::new(channel).wait(api.request(request)).await?;
            Ok(Answer::Done(told.into_inner().passed))
        }
        Request::Signal { channel: to, payload } => {
            let (to, payload) = (bytes(to), bytes(payload));
            let request = PublishRequest { session, request_id, ack_through, channel: to, payload };
            let told = SignalsClient::new(channel).publish(api.request(request)).await?;
            Ok(number_of(told.into_inner().receivers))
        }
        // Any answer is one.
        Request::Ping => match members(api).await {
            Ok(_) | Err(Failure::Refused(_) | Failure::NotLeader(_)) => Ok(Answer::Done(true)),
            Err(Failure::Broken) => Err(Failure::Broken),
        },
        Request::Stats => match members(api).await {
            Ok(members) => Ok(Answer::Json(json!({ "cluster": members }))),
            Err(Failure::Refused(Reason::NoCluster)) => Ok(Answer::Json(json!({}))),
            Err(failure) => Err(failure),
        },
        Request::Inspect { key } => inspect(api, key).await,
        Request::ForceRelease { key, token, space, fence, reason } => {
            let (key, mode, reason) = (bytes(key), space_of(space), reason.to_owned());
            let request = ForceReleaseRequest { key, mode, fence, reason };
            AdminClient::new(channel).force_release(api.admin_request(request, token)).await?;
            Ok(Answer::Done(true))
        }
        Request::EndSession { session: number, token, reason } => {
            let request = EndSessionRequest { number, reason: reason.to_owned() };
            AdminClient::new(channel).end_session(api.admin_request(request, token)).await?;
            Ok(Answer::Done(true))
        }
        Request::Auth { .. }
        | Request::Barrier
        | Request::StableRef { .. }
        | Request::Hello { .. }
        | Request::Observe { .. }
        | Request::Unobserve { .. }
        | Request::Listen { .. }
        | Request::Unlisten { .. }
        | Request::Watch { .. }
        | Request::Unwatch { .. }
        | Request::Cancel { .. }
        | Request::Ack { .. }
        | Request::Ls { .. }
        | Request::Cluster { .. } => Err(Failure::Refused(Reason::BadRequest)),
    }
}

/// The part `cluster` of `stats`, all there is of it here. The addresses are those for gRPC; a member that has none
/// is not dialed.
async fn members(api: &Api) -> Result<Value, Failure> {
    let mut cluster = ClusterClient::new(api.channel.clone());
    let told = cluster.members(api.request(MembersRequest {})).await?.into_inner().members;
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
async fn inspect(api: &Api, key: &[u8]) -> Result<Answer, Failure> {
    let request = api.request(DescribeRequest { key: bytes(key) });
    let told = match LocksClient::new(api.channel.clone()).describe(request).await {
        Ok(told) => told.into_inner(),
        Err(status) => {
            return match Failure::from(status) {
                Failure::Refused(Reason::NotFound) => Ok(Answer::Value(None)),
                failure @ (Failure::Refused(_) | Failure::NotLeader(_) | Failure::Broken) => {
                    Err(failure)
                }
            };
        }
    };
    let key = text(key);
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
    Ok(about.map_or(Answer::Value(None), Answer::Json))
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
