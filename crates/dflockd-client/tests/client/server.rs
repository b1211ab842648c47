//! Servers to talk to, and what they know.

use std::ffi::OsStr;
use std::net::SocketAddr;
use std::ops::Deref;
use std::time::Duration;

use dflockd_client::{Client, ClientBuilder, Error, Guard, Lock, OnDisconnect, Transport, testing};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{Server, command};
use serde_json::Value;
use tokio::task::JoinHandle;

use super::proxy::Proxy;

/// How late a task may run on a busy machine.
pub(super) const SLACK: Duration = Duration::from_secs(2);

/// A lease that no busy machine overruns.
pub(super) const LONG: Duration = Duration::from_secs(60);

/// The built binary as a process.
pub(super) struct Process(Server);

impl Deref for Process {
    type Target = Server;

    fn deref(&self) -> &Server {
        &self.0
    }
}

impl Process {
    /// On a free port of the loopback interface.
    pub(super) fn start<S: AsRef<OsStr>>(args: &[S]) -> Self {
        Self(Server::start(args))
    }

    /// With a gRPC port, too.
    pub(super) fn start_with_grpc(args: &[&str]) -> (Self, SocketAddr) {
        let (server, grpc) = Server::start_with_api("--grpc-port", args);
        (Self(server), grpc)
    }

    /// Ends it as a crash would, and starts it again on the same port.
    pub(super) fn crash_and_restart(self) -> Self {
        let port = self.0.kill().to_string();
        let again = || Server::try_launch(command(&["--port", &port])).ok();
        Self(dflockd_testkit::eventually("its port is free again", again))
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        Client::builder().server(self.address.to_string())
    }

    pub(super) async fn client(&self) -> Client {
        self.builder().connect().await.unwrap()
    }
}

/// A server of either kind, for what must be the same with both.
pub(super) enum Either {
    InProcess(testing::Server),
    Process(Process),
    /// A process that is talked to by gRPC.
    Grpc {
        _process: Process,
        address: SocketAddr,
    },
}

impl Either {
    pub(super) fn both() -> [Self; 2] {
        [
            Self::InProcess(testing::Server::start().unwrap()),
            Self::Process(Process::start::<&str>(&[])),
        ]
    }

    /// These two, and gRPC.
    pub(super) fn all() -> [Self; 3] {
        let [first, second] = Self::both();
        let (process, address) = Process::start_with_grpc(&[]);
        [first, second, Self::Grpc { _process: process, address }]
    }

    pub(super) async fn client(&self) -> Client {
        self.client_with(Client::builder()).await.unwrap()
    }

    pub(super) async fn named(&self, name: &str) -> Client {
        self.client_with(Client::builder().name(name)).await.unwrap()
    }

    pub(super) async fn client_with(&self, builder: ClientBuilder) -> Result<Client, Error> {
        match self {
            Self::InProcess(server) => server.client_with(builder).await,
            Self::Process(process) => builder.server(process.address.to_string()).connect().await,
            Self::Grpc { address, .. } => {
                builder.transport(Transport::Grpc).server(address.to_string()).connect().await
            }
        }
    }
}

/// One in this process, and two clients of it.
pub(super) async fn in_process() -> (testing::Server, Client, Client) {
    let server = testing::Server::start().unwrap();
    let (a, b) = (server.client().await.unwrap(), server.client().await.unwrap());
    (server, a, b)
}

/// A process, a way to it that can go wrong, and a client that goes this way.
pub(super) async fn proxied(on_disconnect: OnDisconnect) -> (Process, Proxy, Client) {
    let server = Process::start::<&str>(&[]);
    let proxy = Proxy::to(server.address).await;
    let client = proxy.builder().on_disconnect(on_disconnect).connect().await.unwrap();
    (server, proxy, client)
}

/// Takes a lock that is free.
pub(super) async fn held(client: &Client, key: &str, lease: Duration) -> Guard {
    client.lock(key).lease(lease).try_acquire().await.unwrap().expect("it is free")
}

/// Waits for a lock in the background.
pub(super) fn acquiring(lock: Lock) -> JoinHandle<Result<Guard, Error>> {
    tokio::spawn(async move { lock.acquire().await })
}

/// How many hold a key and how many wait for it.
pub(super) async fn crowd(client: &Client, key: &str) -> (usize, usize) {
    let about = soon("inspect", client.inspect(key.as_bytes())).await.unwrap();
    let count = |list: &str| {
        let list = about.as_ref().map(|about| &about[list]);
        list.and_then(Value::as_array).map_or(0, Vec::len)
    };
    (count("holders"), count("queue"))
}

/// Waits until so many hold a key and so many wait for it.
pub(super) async fn crowded(client: &Client, key: &str, expected: (usize, usize)) {
    let what = format!("{expected:?} holders and waiters of {key}");
    eventually(&what, async || crowd(client, key).await == expected).await;
}
