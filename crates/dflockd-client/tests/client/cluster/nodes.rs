//! A cluster of three server processes, used from tasks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use dflockd_client::{Client, ClientBuilder, Guard, Instant, Transport};
use dflockd_testkit::cluster::{Addresses, NAMES};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::forms::Forms;
use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{Cluster, LIMIT, Turn};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::block_in_place;

use super::super::server::crowded;

/// A lease that outlives elections, and a machine that stands still for a while.
pub(super) const LEASE: Duration = Duration::from_secs(30);

/// The members; what waits for them leaves the other tasks their time.
pub(super) struct Nodes {
    cluster: Cluster,
    /// Where clients dial them, by what the members tell.
    advertised: Vec<SocketAddr>,
    grpc: Vec<SocketAddr>,
    http: Vec<SocketAddr>,
    inspection: Inspection,
}

impl Nodes {
    /// Three members that have a leader.
    pub(super) fn start(flags: &[&str]) -> Self {
        Self::start_at(Addresses::free(3), flags)
    }

    /// Members at these addresses.
    pub(super) fn start_at(addresses: Addresses, flags: &[&str]) -> Self {
        let usual = ["--election-timeout-ms", "500", "--shutdown-timeout", "5"];
        let flags = [&usual, flags].concat();
        let mut cluster = Cluster::prepare_at(Turn::free(), &addresses, &flags);
        let grpc = cluster.add_api("--grpc-port");
        let http = cluster.add_api("--http-port");
        let inspection = Inspection::default();
        let mut nodes = Self { cluster, advertised: addresses.advertised, grpc, http, inspection };
        nodes.start_all();
        nodes
    }

    /// Three members whose answers on lines are held to the forms that their requests allow.
    pub(super) async fn start_inspected() -> Self {
        let mut addresses = Addresses::free(3);
        let inspection = Inspection::default();
        for (at, member) in addresses.clients.iter().enumerate() {
            addresses.advertised[at] = inspection.stand_before(*member).await;
        }
        Self { inspection, ..Self::start_at(addresses, &[]) }
    }

    /// GUARANTEES 47: every answer that went through had a form that its request allows.
    #[track_caller]
    pub(super) fn check_forms(&self) {
        assert_eq!(*self.inspection.broken.lock(), Vec::<String>::new());
    }

    /// How many answers went through.
    pub(super) fn answers_inspected(&self) -> u64 {
        self.inspection.answers.load(Ordering::SeqCst)
    }

    pub(super) fn start_all(&mut self) {
        block_in_place(|| self.cluster.start_all());
    }

    pub(super) fn restart(&mut self, at: usize) {
        self.cluster.nodes[at].start();
        self.wait_until_ready();
    }

    /// Ends it as a crash would.
    pub(super) fn kill(&mut self, at: usize) {
        self.cluster.nodes[at].kill();
    }

    /// Ends it as an operator would.
    pub(super) fn terminate(&mut self, at: usize) {
        block_in_place(|| self.cluster.nodes[at].terminate());
    }

    pub(super) fn signal(&mut self, at: usize, name: &str) {
        self.cluster.nodes[at].process().signal(name);
    }

    pub(super) fn wait_until_ready(&self) {
        block_in_place(|| self.cluster.wait_until_ready());
    }

    /// Who leads and serves.
    pub(super) fn leader(&self) -> usize {
        block_in_place(|| self.cluster.leader())
    }

    /// How often the members had to look at their state, this look not included.
    pub(super) fn looks(&self) -> u64 {
        let looks = |&http| {
            let page = Wire::open(http, None).ask(&Ask::get("/metrics")).text();
            let line = page.lines().find_map(|line| line.strip_prefix("dflockd_raft_looks_total "));
            line.unwrap().parse::<u64>().unwrap() - 1
        };
        block_in_place(|| self.http.iter().map(looks).sum())
    }

    pub(super) fn address(&self, at: usize) -> String {
        self.advertised[at].to_string()
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        let members = self.advertised.iter().map(ToString::to_string);
        Client::builder().cluster(members).lease(LEASE).request_timeout(LIMIT)
    }

    /// The same by gRPC, with a single seed.
    pub(super) fn grpc_builder(&self) -> ClientBuilder {
        let seed = self.grpc[0].to_string();
        let builder = Client::builder().transport(Transport::Grpc).cluster([seed]);
        builder.lease(LEASE).request_timeout(LIMIT)
    }

    pub(super) async fn client(&self, name: &str) -> Client {
        self.builder().name(name).connect().await.unwrap()
    }
}

/// What stands between clients and members and reads along.
#[derive(Clone, Default)]
struct Inspection {
    answers: Arc<AtomicU64>,
    broken: Arc<Mutex<Vec<String>>>,
}

impl Inspection {
    /// The address of something that passes all bytes on to a member and from it.
    async fn stand_before(&self, member: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (address, inspection) = (listener.local_addr().unwrap(), self.clone());
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                tokio::spawn(inspection.clone().carry(client, member));
            }
        });
        address
    }

    async fn carry(self, client: TcpStream, member: SocketAddr) {
        let Ok(server) = TcpStream::connect(member).await else { return };
        let (from_client, to_client) = client.into_split();
        let (from_server, to_server) = server.into_split();
        let forms = Mutex::new(Forms::default());
        let mut request: Vec<String> = Vec::new();
        let requests = carry_lines(from_client, to_server, |line| {
            request.push(String::from_utf8_lossy(line).into_owned());
            if let [command, key, arg] = request.as_slice() {
                forms.lock().asked(command, key, arg);
                request.clear();
            }
        });
        let answers = carry_lines(from_server, to_client, |line| {
            self.answers.fetch_add(1, Ordering::SeqCst);
            self.broken.lock().extend(forms.lock().check(line).err());
        });
        tokio::join!(requests, answers);
    }
}

/// Passes bytes on, whole lines at a time, each after it was looked at.
async fn carry_lines(from: OwnedReadHalf, mut to: OwnedWriteHalf, mut look: impl FnMut(&[u8])) {
    let mut from = BufReader::new(from);
    let mut line = Vec::new();
    while let Ok(1..) = from.read_until(b'\n', &mut line).await {
        look(line.strip_suffix(b"\n").unwrap_or(&line));
        if to.write_all(&line).await.is_err() {
            return;
        }
        line.clear();
    }
    // Who has nothing more to say may still hear something.
    let _ = to.shutdown().await;
}

/// The member that a client talks to.
pub(super) async fn node_of(client: &Client) -> usize {
    eventually("the client is at a member", async || {
        let node = client.membership().unwrap().node?;
        NAMES.iter().position(|name| *name == node)
    })
    .await
}

/// Waits until the client talks to another member.
pub(super) async fn moved_from(client: &Client, at: usize) {
    eventually("the client has moved", async || {
        let node = client.membership().unwrap().node?;
        (node != NAMES[at]).then_some(())
    })
    .await;
}

/// Waits until a count has grown by so much.
pub(super) async fn eventually_more(what: &str, count: &AtomicI64, by: i64) {
    let least = count.load(Ordering::SeqCst) + by;
    eventually(what, async || count.load(Ordering::SeqCst) >= least).await;
}

/// Waits until nobody holds a key.
pub(super) async fn eventually_free(client: &Client, key: &str) {
    crowded(client, key, (0, 0)).await;
}

pub(super) async fn held(client: &Client, key: &str) -> Guard {
    let taken = soon("a free lock", client.lock(key).acquire_timeout(LIMIT)).await;
    taken.unwrap().expect("it is free")
}

/// A stay in a lock: since when and until when its holder could believe in it.
#[derive(Debug)]
pub(super) struct Stay {
    pub(super) fence: u64,
    pub(super) from: Instant,
    pub(super) until: Instant,
}

impl Stay {
    /// To be called before the guard is released.
    pub(super) fn of(guard: &Guard, from: Instant) -> Self {
        Self { fence: guard.fence(), from, until: guard.valid_until().min(Instant::now()) }
    }
}

/// Promises 2 and 3: no two of them at a time, and fences grow with time.
#[track_caller]
pub(super) fn check_stays(mut stays: Vec<Stay>) {
    stays.sort_by_key(|stay| stay.from);
    for two in stays.windows(2) {
        assert!(two[0].fence < two[1].fence, "fences do not grow: {two:?}");
        assert!(two[0].until <= two[1].from, "two valid guards: {two:?}");
    }
}
