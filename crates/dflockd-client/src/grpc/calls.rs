//! The call that stands for each request, and the reply that stands for its answer.

use std::time::Duration;

use dflockd_wire::grpc::admin_client::AdminClient;
use dflockd_wire::grpc::cluster_client::ClusterClient;
use dflockd_wire::grpc::counters_client::CountersClient;
use dflockd_wire::grpc::kv_client::KvClient;
use dflockd_wire::grpc::lists_client::ListsClient;
use dflockd_wire::grpc::locks_client::LocksClient;
use dflockd_wire::grpc::{
    CommandCall, DescribeRequest, EndSessionRequest, ForceReleaseRequest, GetCounterRequest,
    GetRequest, HealthRequest, LengthRequest, Lock, LockMode, MemberRole, MembersRequest,
    ObserveRequest, RangeRequest, Reason, SubscribeRequest, Subscription as Wish, WatchRequest,
    space_number,
};
use dflockd_wire::{Command, Query, Request, Subscription, command};
use prost::bytes::Bytes;
use serde_json::{Value, json};

use super::{Api, Failure, Outlet, streams};
use crate::reply::Reply;

/// Makes [`Call`] of commands, of reads, and of what is more than a call, or none.
macro_rules! calls {
    (
        |$api:ident, $outlet:ident|
        reads { $(
            $query:pat => $read:ident($key:ident { $($part:ident: $of:expr),* })
                $reader:ident.$ask:ident |$heard:ident| $answer:expr;
        )* }
        other { $($wish:pat => $other:ident($payload:ident: $type:ty = $made:expr) $make:expr;)* }
    ) => {
        /// A request as a call, before it is known in which session and over which connection it is made.
        #[derive(Clone)]
        pub(super) enum Call {
            Command(CommandCall),
            Refused(Reason),
            $($read($key),)*
            $($other($type),)*
        }

        impl Call {
            pub(super) fn new(request: &Request<'_>) -> Self {
                match *request {
                    $($wish => Self::$other($made),)*
                    $(Request::Query($query) => Self::$read($key { $($part: $of),* }),)*
                    Request::Command(ref command) => {
                        CommandCall::new(command).map_or_else(Self::Refused, Self::Command)
                    }
                    Request::Auth { .. }
                    | Request::Barrier
                    | Request::StableRef { .. }
                    | Request::Hello { .. }
                    | Request::Ls { .. }
                    | Request::Cluster { .. } => Self::Refused(Reason::BadRequest),
                }
            }

            pub(super) async fn make(self, $api: &Api, $outlet: &Outlet) -> Result<Reply, Failure> {
                match self {
                    Self::Command(call) => {
                        let metadata = $api.request(()).into_parts().0;
                        let told = call.make($api.channel.clone(), metadata, $api.head($outlet.number));
                        Ok(told.await?.into())
                    }
                    Self::Refused(reason) => Err(Failure::Refused(reason)),
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
    reads {
        Query::Counter { key } => GetCounter(GetCounterRequest { key: bytes(key) })
            CountersClient.get |told| Reply::Number(told.value);
        Query::Kv { key } | Query::Entry { key } => Get(GetRequest { key: bytes(key) })
            KvClient.get |told| told.entry.map_or(Reply::Nil, |entry| Reply::Value(entry.value.into()));
        Query::Length { key } => Length(LengthRequest { key: bytes(key) })
            ListsClient.length |told| Reply::Number(i64::try_from(told.length).unwrap_or(i64::MAX));
    }
    other {
        Request::Query(Query::Range { key, start, stop }) => Range(
            message: RangeRequest = RangeRequest { key: bytes(key), start, stop }
        ) range(api, message).await;
        // Any answer is one.
        Request::Ping => Ping(message: MembersRequest = MembersRequest {}) match members(api, message).await {
            Err(failure @ (Failure::Gone | Failure::Broken)) => Err(failure),
            Ok(_) | Err(Failure::Refused(_) | Failure::NotLeader(_)) => Ok(Reply::Ok),
        };
        Request::Stats | Request::Members => Stats(
            message: MembersRequest = MembersRequest {}
        ) match members(api, message).await {
            Err(Failure::Refused(Reason::NoCluster)) => Ok(Reply::Json(json!({}))),
            members => Ok(Reply::Json(json!({ "cluster": members? }))),
        };
        Request::Inspect { key } => Inspect(
            message: DescribeRequest = DescribeRequest { key: bytes(key) }
        ) inspect(api, message).await;
        Request::ForceRelease { command: command::ForceRelease { space, fence, key }, token, reason } => ForceRelease(
            call: (Bytes, ForceReleaseRequest) = (bytes(token), ForceReleaseRequest {
                key: bytes(key), mode: space_number(space), fence: fence.0, reason: reason.to_owned()
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
        Request::Command(Command::Subscribe(command::Subscribe {
            to: Subscription::Signals { pattern, group }
        })) => Listen(
            message: SubscribeRequest = SubscribeRequest {
                add: vec![Wish { pattern: bytes(pattern), group: bytes(group) }], remove: Vec::new()
            }
        ) Err(streams::listen(api, message, outlet).await);
        Request::Command(Command::Subscribe(command::Subscribe {
            to: Subscription::Changes { pattern, from: None }
        })) => Watch(message: WatchRequest = WatchRequest {
            patterns: vec![bytes(pattern)], ..WatchRequest::default()
        }) Err(streams::watch(api, message, outlet).await);
        Request::Command(Command::Subscribe(command::Subscribe { to: Subscription::Leaders { key } })) => Observe(
            message: ObserveRequest = ObserveRequest { key: bytes(key) }
        ) Err(streams::observe(api, message, outlet).await);
        Request::Command(Command::Acknowledge(command::Acknowledge { up_to })) => Acknowledge(up_to: u64 = up_to.0) {
            api.acknowledge(up_to);
            Ok(Reply::Ok)
        };
        Request::Command(Command::Cancel(command::Cancel { request })) => Cancel(number: u64 = request.0) {
            api.withdraw(number).await;
            Ok(Reply::Ok)
        };
    }
}

impl Call {
    /// What it is told if it was withdrawn before it was made.
    pub(super) fn given_up(&self) -> Reply {
        let is_pop = matches!(self, Self::Command(CommandCall::PopRequest(_)));
        if is_pop { Reply::Nil } else { Reply::Timeout }
    }
}

fn bytes(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
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
    let key = String::from_utf8_lossy(&message.key).into_owned();
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
