//! Servers with a gRPC API, and clients to use it with.

use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::http::{Ask, Reply, Wire};
use dflockd_testkit::{Cluster, LIMIT, Server, Turn, free_address, millis};
use dflockd_wire::grpc::*;
use prost::Message;
use tokio::task::JoinHandle;
use tonic::metadata::MetadataValue;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};

/// A server in memory mode.
pub(super) struct Site {
    pub(super) server: Server,
    pub(super) grpc: SocketAddr,
}

impl Site {
    pub(super) fn start(flags: &[&str]) -> Self {
        let (server, grpc) = Server::start_with_api("--grpc-port", flags);
        Self { server, grpc }
    }

    /// The same with an HTTP API.
    pub(super) fn start_with_http(flags: &[&str]) -> (Self, SocketAddr) {
        let http = free_address();
        let port = http.port().to_string();
        let flags = [&["--http-port", &port], flags].concat();
        (Self::start(&flags), http)
    }

    pub(super) async fn link(&self) -> Link {
        Link::connect(self.grpc).await
    }

    /// A connection that speaks no gRPC yet.
    pub(super) fn socket(&self) -> TcpStream {
        let socket = TcpStream::connect(self.grpc).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        socket
    }
}

/// A server in memory mode or a durable node, for tests that must not see the difference.
pub(super) enum Either {
    Memory(Site),
    Durable(Members),
}

impl Either {
    /// One after the other.
    pub(super) fn both() -> impl Iterator<Item = Self> {
        let start: [fn() -> Self; 2] =
            [|| Self::Memory(Site::start(&[])), || Self::Durable(Members::start(1, &[]))];
        start.into_iter().map(|start| start())
    }

    pub(super) async fn link(&self) -> Link {
        match self {
            Self::Memory(site) => site.link().await,
            Self::Durable(members) => members.link(0).await,
        }
    }
}

/// Members of a cluster, each with a gRPC API.
pub(super) struct Members {
    pub(super) cluster: Cluster,
    pub(super) grpc: Vec<SocketAddr>,
}

impl Members {
    pub(super) fn start(size: usize, flags: &[&str]) -> Self {
        let mut all = vec!["--election-timeout-ms", "500"];
        all.extend_from_slice(flags);
        let mut cluster = Cluster::prepare(Turn::shared(), size, &all);
        let grpc = cluster.add_api("--grpc-port");
        cluster.start_all();
        Self { cluster, grpc }
    }

    pub(super) async fn link(&self, at: usize) -> Link {
        Link::connect(self.grpc[at]).await
    }
}

/// One connection.
#[derive(Clone)]
pub(super) struct Link {
    pub(super) channel: Channel,
}

macro_rules! clients {
    ($($name:ident $module:ident $client:ident)*) => {
        $(pub(super) fn $name(&self) -> $module::$client<Channel> {
            $module::$client::new(self.channel.clone())
        })*
    };
}

impl Link {
    pub(super) async fn connect(address: SocketAddr) -> Self {
        Self::over(Endpoint::from_shared(format!("http://{address}")).unwrap()).await
    }

    pub(super) async fn over(endpoint: Endpoint) -> Self {
        let begun = Instant::now();
        loop {
            match endpoint.connect().await {
                Ok(channel) => return Self { channel },
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error:?}"),
            }
            tokio::time::sleep(millis(10)).await;
        }
    }

    clients! {
        sessions sessions_client SessionsClient
        locks locks_client LocksClient
        elections elections_client ElectionsClient
        counters counters_client CountersClient
        kv kv_client KvClient
        lists lists_client ListsClient
        barriers barriers_client BarriersClient
        signals signals_client SignalsClient
        watch watch_client WatchClient
        cluster cluster_client ClusterClient
        admin admin_client AdminClient
    }

    pub(super) async fn open(&self, ttl_ms: u64) -> Session {
        let request = OpenRequest { ttl_ms, ..OpenRequest::default() };
        let opened = self.sessions().open(request).await.unwrap().into_inner();
        Session { link: self.clone(), id: opened.session, number: opened.number }
    }

    /// The first lock that a key is.
    pub(super) async fn describe(&self, key: &str) -> Option<Lock> {
        let request = DescribeRequest { key: key.to_owned().into() };
        match self.locks().describe(request).await {
            Ok(described) => described.into_inner().locks.into_iter().next(),
            Err(status) if status.code() == Code::NotFound => None,
            Err(status) => panic!("{status}"),
        }
    }

    pub(super) async fn wait_for_waiters(&self, key: &str, count: u32) {
        self.wait_for("waiters", key, |lock| lock.waiters_total == count).await;
    }

    pub(super) async fn wait_for_holders(&self, key: &str, count: u32) {
        self.wait_for("holders", key, |lock| lock.holders_total == count).await;
    }

    /// Waits for what a key is to be seen; nothing is a lock without anybody.
    async fn wait_for(&self, what: &str, key: &str, seen: impl Fn(Lock) -> bool) {
        eventually(what, async || seen(self.describe(key).await.unwrap_or_default())).await;
    }
}

/// A session and the connection it is used through.
#[derive(Clone)]
pub(super) struct Session {
    pub(super) link: Link,
    pub(super) id: String,
    pub(super) number: u64,
}

impl Session {
    pub(super) fn through(&self, link: &Link) -> Self {
        Self { link: link.clone(), ..self.clone() }
    }

    pub(super) fn request(&self, key: &str, wait_ms: u64) -> AcquireRequest {
        let (session, key) = (self.id.clone(), key.to_owned().into());
        AcquireRequest { session, key, wait_ms, ..AcquireRequest::default() }
    }

    pub(super) async fn try_acquire(
        &self,
        request: AcquireRequest,
    ) -> Result<Option<Grant>, Status> {
        Ok(self.link.locks().acquire(request).await?.into_inner().grant)
    }

    /// The same in the background.
    pub(super) fn begin(
        &self,
        request: AcquireRequest,
    ) -> JoinHandle<Result<Option<Grant>, Status>> {
        let session = self.clone();
        tokio::spawn(async move { session.try_acquire(request).await })
    }

    /// A mutex that is free, or becomes so in time.
    pub(super) async fn lock(&self, key: &str) -> Grant {
        let request = self.request(key, 20_000);
        self.try_acquire(request).await.unwrap().expect("it is granted")
    }

    /// The same in the background.
    pub(super) fn begin_lock(&self, key: &'static str) -> JoinHandle<Grant> {
        let session = self.clone();
        tokio::spawn(async move { session.lock(key).await })
    }

    pub(super) async fn unlock(&self, key: &str, grant: &Grant) -> Result<(), Status> {
        let (session, token) = (self.id.clone(), grant.token.clone());
        let key = key.to_owned().into();
        let request = ReleaseRequest { session, key, token, ..ReleaseRequest::default() };
        self.link.locks().release(request).await.map(|_| ())
    }

    pub(super) async fn keep_alive(&self) -> Result<KeepAliveResponse, Status> {
        let request = KeepAliveRequest { session: self.id.clone(), ack_through: 0 };
        Ok(self.link.sessions().keep_alive(request).await?.into_inner())
    }

    pub(super) async fn close(&self) -> Result<(), Status> {
        let request = CloseRequest { session: self.id.clone() };
        self.link.sessions().close(request).await.map(|_| ())
    }
}

/// The last word of a stream.
pub(super) async fn end<T>(stream: &mut Streaming<T>) -> Status {
    loop {
        match soon("its end", stream.message()).await {
            Ok(Some(_)) => {}
            Ok(None) => panic!("it ends with a reason"),
            Err(status) => return status,
        }
    }
}

/// The answer to an HTTP request.
pub(super) fn ask_http(address: SocketAddr, ask: &Ask) -> Reply {
    tokio::task::block_in_place(|| Wire::open(address, None).ask(ask))
}

/// A call of an operator.
pub(super) fn admin<T>(token: &str, message: T) -> Request<T> {
    let mut request = Request::new(message);
    request.metadata_mut().insert("x-dflockd-admin", MetadataValue::try_from(token).unwrap());
    request
}

/// What must not happen; the future goes on.
pub(super) async fn not_yet(future: &mut (impl Future + Unpin)) {
    let waited = tokio::time::timeout(Duration::from_millis(150), future).await;
    assert!(waited.is_err(), "too soon");
}

/// The details of an error: a `google.rpc.Status` with one `ErrorInfo`.
pub(super) fn info(status: &Status) -> ErrorInfo {
    #[derive(Clone, PartialEq, Message)]
    struct RpcStatus {
        #[prost(int32, tag = "1")]
        code: i32,
        #[prost(message, repeated, tag = "3")]
        details: Vec<prost_types::Any>,
    }
    let details = RpcStatus::decode(status.details()).unwrap();
    assert_eq!(details.code, i32::from(status.code()));
    let [any] = &details.details[..] else { panic!("{status:?}") };
    assert_eq!(any.type_url, "type.googleapis.com/dflockd.v1.ErrorInfo");
    ErrorInfo::decode(&any.value[..]).unwrap()
}

#[track_caller]
pub(super) fn refused<T: std::fmt::Debug>(result: Result<T, Status>, code: Code, reason: Reason) {
    let status = result.expect_err("it is refused");
    assert_eq!((status.code(), info(&status).reason()), (code, reason), "{status:?}");
}
