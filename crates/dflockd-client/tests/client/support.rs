//! Servers to talk to, and a proxy between.

use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime};

use dflockd_client::{Client, ClientBuilder, Error, Instant, Transport, testing};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;

/// How long anything may take that is bound to happen. Generous: the machine may be busy.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// How late a task may run on a busy machine.
pub(super) const SLACK: Duration = Duration::from_secs(2);

/// A lease that no busy machine overruns.
pub(super) const LONG: Duration = Duration::from_secs(60);

pub(super) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Asks again and again until there is an answer.
pub(super) async fn eventually<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(begun.elapsed() < LIMIT, "waited in vain for: {what}");
        tokio::time::sleep(millis(5)).await;
    }
}

/// The outcome of something that is bound to happen.
pub(super) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    match tokio::time::timeout(LIMIT, future).await {
        Ok(outcome) => outcome,
        Err(_) => panic!("waited in vain for: {what}"),
    }
}

/// Where cargo puts what it builds in the profile of this test.
fn built() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.parent().and_then(Path::parent).unwrap().to_owned()
}

/// A program of this workspace, built if it is missing or older than its sources.
fn program(name: &str, cargo: &[&str], sources: &[&str]) -> PathBuf {
    let path = built().join(name);
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let newest = sources.iter().map(|source| newest(&crates.join(source))).max().unwrap();
    let age = fs::metadata(&path).and_then(|it| it.modified());
    if age.is_ok_and(|built| built >= newest) {
        return path;
    }
    let mut command = Command::new(env!("CARGO"));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).arg("build").args(cargo).arg("--offline");
    if built().ends_with("release") {
        command.arg("--release");
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    path
}

fn newest(path: &Path) -> SystemTime {
    if path.is_dir() {
        let entries = fs::read_dir(path).unwrap().map(|entry| newest(&entry.unwrap().path()));
        return entries.max().unwrap_or(SystemTime::UNIX_EPOCH);
    }
    fs::metadata(path).unwrap().modified().unwrap()
}

/// The built server.
pub(super) fn dflockd() -> &'static Path {
    static PATH: OnceLock<PathBuf> = OnceLock::new();
    PATH.get_or_init(|| {
        let sources = ["dflockd/src", "dflockd-core/src", "dflockd-engine/src", "dflockd-wire/src"];
        program("dflockd", &["-p", "dflockd"], &sources)
    })
}

/// A built example.
pub(super) fn example(name: &str) -> PathBuf {
    static ONE: Mutex<()> = Mutex::new(());
    let _one = ONE.lock();
    let cargo = ["-p", "dflockd-client", "--example", name];
    let sources = ["dflockd-client/src", "dflockd-client/examples"];
    program(&format!("examples/{name}"), &cargo, &sources)
}

/// Ends a child, by its own id.
pub(super) struct Reaper(pub(super) Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Sends a signal, by its name without `SIG`.
pub(super) fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.unwrap().success(), "kill -{name}");
}

/// Free ports, all different. Bound, but never listened on, so that no process that is started meanwhile keeps one.
pub(super) fn free_addresses(host: Ipv4Addr, count: usize) -> Vec<SocketAddr> {
    let bind = |_| {
        let socket = TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind((host, 0).into()).unwrap();
        socket
    };
    let bound: Vec<_> = (0..count).map(bind).collect();
    bound.iter().map(|socket| socket.local_addr().unwrap()).collect()
}

/// The built binary as a process.
pub(super) struct Process {
    child: Reaper,
    pub(super) address: SocketAddr,
}

impl Process {
    /// On a free port of the loopback interface.
    pub(super) fn start<S: AsRef<OsStr>>(args: &[S]) -> Self {
        Self::start_at(0, args).unwrap_or_else(|error| panic!("{error}"))
    }

    /// With a gRPC port, too.
    pub(super) fn start_with_grpc(args: &[&str]) -> (Self, SocketAddr) {
        let begun = Instant::now();
        loop {
            let address = free_addresses(Ipv4Addr::LOCALHOST, 1)[0];
            let port = address.port().to_string();
            let args = [&["--grpc-port", &port], args].concat();
            match Self::start_at(0, &args) {
                Ok(process) => return (process, address),
                // Somebody else may have the port now.
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
        }
    }

    /// The error says what it printed.
    pub(super) fn start_at<S: AsRef<OsStr>>(port: u16, args: &[S]) -> Result<Self, String> {
        let mut command = Command::new(dflockd());
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("DFLOCKD_") || name == "NOTIFY_SOCKET" {
                command.env_remove(name);
            }
        }
        command.args(["--host", "127.0.0.1", "--port", &port.to_string()]).args(args);
        let command = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = Reaper(command.spawn().unwrap());
        let output = Arc::<Mutex<Vec<u8>>>::default();
        collect(child.0.stdout.take().unwrap(), Arc::clone(&output));
        collect(child.0.stderr.take().unwrap(), Arc::clone(&output));
        let begun = Instant::now();
        loop {
            let text = String::from_utf8_lossy(&output.lock().unwrap()).into_owned();
            if let Some((_, rest)) = text.split_once("msg=\"listening\" addr=")
                && let Some((address, _)) = rest.split_once([' ', '\n'])
            {
                return Ok(Self { child, address: address.parse().unwrap() });
            }
            if child.0.try_wait().unwrap().is_some() || begun.elapsed() > LIMIT {
                return Err(text);
            }
            thread::sleep(millis(5));
        }
    }

    pub(super) fn signal(&self, name: &str) {
        signal(self.child.0.id(), name);
    }

    /// Ends it as a crash would, and starts it again on the same port.
    pub(super) fn crash_and_restart(self) -> Self {
        let port = self.address.port();
        drop(self.child);
        let begun = Instant::now();
        loop {
            match Self::start_at::<&str>(port, &[]) {
                Ok(process) => return process,
                Err(error) => assert!(begun.elapsed() < LIMIT, "{error}"),
            }
        }
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        Client::builder().server(self.address.to_string())
    }

    pub(super) async fn client(&self) -> Client {
        self.builder().connect().await.unwrap()
    }
}

/// Keeps what a process prints, for as long as it prints.
fn collect(mut stream: impl Read + Send + 'static, output: Arc<Mutex<Vec<u8>>>) {
    thread::spawn(move || {
        let mut bytes = [0; 4096];
        while let Ok(count @ 1..) = stream.read(&mut bytes) {
            output.lock().unwrap().extend_from_slice(&bytes[..count]);
        }
    });
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
    eventually(&what, async || (crowd(client, key).await == expected).then_some(())).await;
}

/// Something between client and server that can go wrong.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    wire: Arc<Wire>,
}

struct Wire {
    /// Counts cuts.
    cuts: watch::Sender<u64>,
    /// Whether bytes pass, to the server and from it.
    passes: watch::Sender<[bool; 2]>,
    /// Counts hangs.
    hangs: watch::Sender<u64>,
    refuses: AtomicBool,
    connections: AtomicUsize,
    /// When the client last sent anything.
    heard_at: Mutex<Option<Instant>>,
}

impl Proxy {
    pub(super) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let wire = Arc::new(Wire {
            cuts: watch::Sender::new(0),
            passes: watch::Sender::new([true; 2]),
            hangs: watch::Sender::new(0),
            refuses: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            heard_at: Mutex::new(None),
        });
        let shared = Arc::clone(&wire);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if shared.refuses.load(Ordering::SeqCst) {
                    continue;
                }
                tokio::spawn(carry(Arc::clone(&shared), client, target));
            }
        });
        Self { address, wire }
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        Client::builder().server(self.address.to_string())
    }

    /// Closes all connections that stand now.
    pub(super) fn cut(&self) {
        self.wire.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Lets bytes pass or holds them, to the server and from it.
    pub(super) fn pass(&self, to: bool, from: bool) {
        self.wire.passes.send_replace([to, from]);
    }

    /// From now on nothing passes on the connections that stand, but they are not closed.
    pub(super) fn hang(&self) {
        self.wire.hangs.send_modify(|hangs| *hangs += 1);
    }

    /// Closes every new connection at once.
    pub(super) fn refuse(&self, refuse: bool) {
        self.wire.refuses.store(refuse, Ordering::SeqCst);
    }

    /// How many connections there ever were.
    pub(super) fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    pub(super) fn heard_at(&self) -> Option<Instant> {
        *self.wire.heard_at.lock().unwrap()
    }
}

async fn carry(wire: Arc<Wire>, client: TcpStream, target: SocketAddr) {
    let (mut cuts, mut hangs) = (wire.cuts.subscribe(), wire.hangs.subscribe());
    let Ok(server) = TcpStream::connect(target).await else { return };
    wire.connections.fetch_add(1, Ordering::SeqCst);
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    // Here, so that they stay open while the connection hangs.
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let heard = || *wire.heard_at.lock().unwrap() = Some(Instant::now());
    tokio::select! {
        _ = cuts.changed() => {}
        _ = hangs.changed() => { let _ = cuts.changed().await; }
        () = pump(&mut from_client, &mut to_server, wire.passes.subscribe(), 0, heard) => {}
        () = pump(&mut from_server, &mut to_client, wire.passes.subscribe(), 1, || {}) => {}
    }
}

async fn pump(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mut passes: watch::Receiver<[bool; 2]>,
    direction: usize,
    heard: impl Fn(),
) {
    let mut bytes = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        heard();
        if passes.wait_for(|passes| passes[direction]).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}

/// A directory that is removed at the end.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dflockd-client-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    pub(super) fn write(&self, name: &str, content: &str) -> String {
        fs::write(self.path(name), content).unwrap();
        self.path(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}
