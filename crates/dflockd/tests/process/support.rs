//! A server process and a client that speaks to it, both blocking.

use std::ffi::OsStr;
use std::fs;
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned};
use rustls::{SupportedProtocolVersion, version};
use serde_json::Value;
use socket2::SockRef;

pub(super) const EXE: &str = env!("CARGO_BIN_EXE_dflockd");

/// How long anything may take that is bound to happen. Generous: the machine may be busy.
pub(super) const LIMIT: Duration = Duration::from_secs(30);

/// Long enough to see that something does not happen.
pub(super) const A_WHILE: Duration = Duration::from_millis(300);

pub(super) fn millis(count: u64) -> Duration {
    Duration::from_millis(count)
}

/// Asks again and again until there is an answer.
#[track_caller]
pub(super) fn eventually<T>(what: &str, mut ask: impl FnMut() -> Option<T>) -> T {
    let begun = Instant::now();
    loop {
        if let Some(answer) = ask() {
            return answer;
        }
        assert!(begun.elapsed() < LIMIT, "waited in vain for: {what}");
        thread::sleep(millis(5));
    }
}

/// The binary with some arguments and without the variables that this process happens to have.
pub(super) fn command<S: AsRef<OsStr>>(args: &[S]) -> Command {
    let mut command = Command::new(EXE);
    command.args(args);
    clean(&mut command);
    command
}

/// Removes the variables that this process happens to have.
pub(super) fn clean(command: &mut Command) {
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("DFLOCKD_") || name == "NOTIFY_SOCKET" {
            command.env_remove(name);
        }
    }
}

/// Runs a server that should not start. One that does start is ended.
pub(super) fn run_to_end(mut command: Command) -> Output {
    let child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary exists");
    let mut child = Reaper(child);
    let (mut out, mut err) =
        (child.0.stdout.take().expect("piped"), child.0.stderr.take().expect("piped"));
    let reader = thread::spawn(move || read_all(&mut out));
    let errors = thread::spawn(move || read_all(&mut err));
    let begun = Instant::now();
    let status = loop {
        if let Some(status) = child.0.try_wait().expect("it is our child") {
            break status;
        }
        if begun.elapsed() > LIMIT {
            drop(child);
            let errors = errors.join().unwrap();
            panic!("it runs although it should not: {}", String::from_utf8_lossy(&errors));
        }
        thread::sleep(millis(5));
    };
    Output { status, stdout: reader.join().unwrap(), stderr: errors.join().unwrap() }
}

fn read_all(stream: &mut impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes
}

/// Ends a child, by its own id.
pub(super) struct Reaper(pub(super) Child);

impl Drop for Reaper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A running server.
pub(super) struct Server {
    child: Reaper,
    pub(super) address: SocketAddr,
    /// When it was started.
    pub(super) begun_at: Instant,
    output: Arc<Mutex<Vec<u8>>>,
}

impl Server {
    /// A server on a free port of the loopback interface.
    pub(super) fn start<S: AsRef<OsStr>>(args: &[S]) -> Self {
        Self::launch(command(args))
    }

    /// Starts `command`, which must end up as a server.
    pub(super) fn launch(command: Command) -> Self {
        Self::try_launch(command).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Starts `command`, which may end up as a server; the error says how it ended otherwise.
    pub(super) fn try_launch(mut command: Command) -> Result<Self, String> {
        let begun_at = Instant::now();
        let child = command
            .args(["--port", "0"])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary exists");
        let mut child = Reaper(child);
        let output = Arc::default();
        collect(child.0.stdout.take().expect("piped"), Arc::clone(&output));
        collect(child.0.stderr.take().expect("piped"), Arc::clone(&output));
        let address = eventually("the server listens", || {
            let text = text_of(&output);
            if let Some(status) = child.0.try_wait().expect("it is our child") {
                return Some(Err(format!("the server ended with {status}: {text}")));
            }
            let (_, rest) = text.split_once("msg=\"listening\" addr=")?;
            let (address, _) = rest.split_once([' ', '\n'])?;
            let address: SocketAddr = address.parse().expect("an address is logged");
            Some(Ok(SocketAddr::from(([127, 0, 0, 1], address.port()))))
        });
        Ok(Self { child, address: address?, begun_at, output })
    }

    pub(super) fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Everything it has printed.
    pub(super) fn output(&self) -> String {
        text_of(&self.output)
    }

    #[track_caller]
    pub(super) fn wait_for_output(&self, text: &str) {
        eventually(text, || self.output().contains(text).then_some(()));
    }

    /// Sends a signal, by its name without `SIG`.
    pub(super) fn signal(&self, name: &str) {
        let status = Command::new("/bin/kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status()
            .expect("kill exists");
        assert!(status.success(), "kill -{name}");
    }

    pub(super) fn is_running(&mut self) -> bool {
        self.child.0.try_wait().expect("it is our child").is_none()
    }

    #[track_caller]
    pub(super) fn wait_for_end(&mut self) -> ExitStatus {
        eventually("the server ends", || self.child.0.try_wait().expect("it is our child"))
    }

    /// Ends it as a crash would.
    pub(super) fn kill(mut self) {
        self.child.0.kill().expect("it is our child");
        self.child.0.wait().expect("it is our child");
    }

    pub(super) fn connect(&self) -> Client {
        Client::over(self.socket())
    }

    /// A bare socket.
    pub(super) fn socket(&self) -> TcpStream {
        let socket = TcpStream::connect(self.address).expect("the server listens");
        socket.set_nodelay(true).unwrap();
        socket
    }

    /// A socket with small buffers, which is soon full if nobody reads.
    pub(super) fn narrow_socket(&self) -> TcpStream {
        let domain = socket2::Domain::IPV4;
        let socket = socket2::Socket::new(domain, socket2::Type::STREAM, None).unwrap();
        socket.set_recv_buffer_size(8 * 1024).unwrap();
        socket.connect(&self.address.into()).unwrap();
        socket.into()
    }

    /// Resident memory in KiB.
    pub(super) fn resident_kib(&self) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }
}

fn text_of(output: &Mutex<Vec<u8>>) -> String {
    String::from_utf8_lossy(&output.lock().unwrap()).into_owned()
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

trait Stream: Read + Write + Send {
    /// Sends the last bytes and that they are the last, if possible in one packet.
    fn send_last(&mut self, bytes: &[u8]);
}

impl Stream for TcpStream {
    fn send_last(&mut self, bytes: &[u8]) {
        self.write_all(bytes).unwrap();
        self.shutdown(Shutdown::Write).unwrap();
    }
}

impl Stream for StreamOwned<ClientConnection, TcpStream> {
    fn send_last(&mut self, bytes: &[u8]) {
        self.conn.set_buffer_limit(None);
        self.conn.writer().write_all(bytes).unwrap();
        self.conn.send_close_notify();
        let mut packet = Vec::new();
        while self.conn.wants_write() {
            self.conn.write_tls(&mut packet).unwrap();
        }
        self.sock.write_all(&packet).unwrap();
    }
}

const PATIENCE: [ErrorKind; 3] =
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];
const ENDS: [ErrorKind; 4] = [
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::BrokenPipe,
    ErrorKind::UnexpectedEof,
];

/// One connection.
pub(super) struct Client {
    stream: Box<dyn Stream>,
    socket: TcpStream,
    buffer: Vec<u8>,
    used: usize,
}

/// What came of a read.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Heard {
    Line(String),
    /// Closed or reset by the server.
    End,
    Nothing,
}

impl Client {
    pub(super) fn over(socket: TcpStream) -> Self {
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        Self { stream: Box::new(socket.try_clone().unwrap()), socket, buffer: Vec::new(), used: 0 }
    }

    /// TLS; the error is that of the handshake.
    pub(super) fn over_tls(
        mut socket: TcpStream,
        config: Arc<ClientConfig>,
    ) -> std::io::Result<(Self, ClientFacts)> {
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        socket.set_read_timeout(Some(LIMIT)).unwrap();
        let name = ServerName::try_from("localhost").unwrap();
        let mut tls = ClientConnection::new(config, name).unwrap();
        while tls.is_handshaking() {
            tls.complete_io(&mut socket)?;
        }
        let facts = ClientFacts {
            version: tls.protocol_version().unwrap(),
            chain: tls.peer_certificates().unwrap().iter().map(|c| c.to_vec()).collect(),
        };
        let other = socket.try_clone().unwrap();
        let stream = Box::new(StreamOwned::new(tls, socket));
        Ok((Self { stream, socket: other, buffer: Vec::new(), used: 0 }, facts))
    }

    /// Sends bytes as they are.
    #[track_caller]
    pub(super) fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.write_all(bytes.as_ref()).unwrap();
        self.stream.flush().unwrap();
    }

    /// Sends bytes to a server that may be gone.
    pub(super) fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref())?;
        self.stream.flush()
    }

    /// Sends the last bytes, but keeps reading.
    pub(super) fn send_last(&mut self, bytes: impl AsRef<[u8]>) {
        self.stream.send_last(bytes.as_ref());
    }

    /// Sends a request without waiting for its answer.
    #[track_caller]
    pub(super) fn begin(&mut self, command: &str, key: &str, arg: &str) {
        self.send(format!("{command}\n{key}\n{arg}\n"));
    }

    /// A request and its answer.
    #[track_caller]
    pub(super) fn ask(&mut self, command: &str, key: &str, arg: &str) -> String {
        self.begin(command, key, arg);
        self.line()
    }

    #[track_caller]
    pub(super) fn check(&mut self, command: &str, key: &str, arg: &str, answer: &str) {
        assert_eq!(self.ask(command, key, arg), answer, "{command} {key} {arg}");
    }

    /// Takes a lock that must be free now, or become so within the wait; gives its token.
    #[track_caller]
    pub(super) fn lock(&mut self, key: &str, arg: &str) -> String {
        granted(&self.ask("l", key, arg))
    }

    #[track_caller]
    pub(super) fn line(&mut self) -> String {
        match self.hear(LIMIT) {
            Heard::Line(line) => line,
            other @ (Heard::End | Heard::Nothing) => panic!("{other:?} instead of a line"),
        }
    }

    #[track_caller]
    pub(super) fn expect_end(&mut self) {
        assert_eq!(self.hear(LIMIT), Heard::End);
    }

    /// That nothing comes for a while, not even the end.
    #[track_caller]
    pub(super) fn expect_silence(&mut self, time: Duration) {
        assert_eq!(self.hear(time), Heard::Nothing);
    }

    /// The next line, if there is one before the time is over.
    pub(super) fn hear(&mut self, time: Duration) -> Heard {
        let until = Instant::now() + time;
        let mut looked = self.used;
        loop {
            if let Some(at) = self.buffer[looked..].iter().position(|byte| *byte == b'\n') {
                let line = &self.buffer[self.used..looked + at];
                let line = String::from_utf8_lossy(line).into_owned();
                self.used = looked + at + 1;
                if self.used == self.buffer.len() {
                    self.buffer.clear();
                    self.used = 0;
                }
                return Heard::Line(line);
            }
            looked = self.buffer.len();
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Heard::Nothing;
            }
            self.socket.set_read_timeout(Some(left)).unwrap();
            let mut bytes = [0; 64 * 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Heard::End,
                Ok(count) => self.buffer.extend_from_slice(&bytes[..count]),
                Err(error) if PATIENCE.contains(&error.kind()) => {}
                Err(error) if ENDS.contains(&error.kind()) => return Heard::End,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Ends with a reset, as a crashed machine's kernel would.
    pub(super) fn reset(self) {
        SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// The state of the server.
    #[track_caller]
    pub(super) fn stats(&mut self) -> Value {
        let answer = self.ask("stats", "_", "");
        let text = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}"));
        serde_json::from_str(text).unwrap()
    }

    /// How many wait for a lock.
    #[track_caller]
    pub(super) fn waiters(&mut self, key: &str) -> u64 {
        let stats = self.stats();
        entry(&stats, "locks", key).map_or(0, |lock| lock["waiters"].as_u64().unwrap())
    }

    #[track_caller]
    pub(super) fn wait_for_waiters(&mut self, key: &str, count: u64) {
        eventually(&format!("{count} waiters"), || (self.waiters(key) == count).then_some(()));
    }
}

/// What a client knows after the handshake.
pub(super) struct ClientFacts {
    pub(super) version: rustls::ProtocolVersion,
    pub(super) chain: Vec<Vec<u8>>,
}

/// One entry of a list in the stats.
pub(super) fn entry<'a>(stats: &'a Value, list: &str, key: &str) -> Option<&'a Value> {
    stats[list].as_array().unwrap().iter().find(|entry| entry["key"] == key)
}

/// The token of a grant.
#[track_caller]
pub(super) fn granted(answer: &str) -> String {
    let mut words = answer.split(' ');
    assert!(matches!(words.next(), Some("ok" | "acquired")), "no grant: {answer}");
    let token = words.next().unwrap_or_else(|| panic!("no grant: {answer}"));
    assert_eq!(token.len(), 32, "{answer}");
    token.to_owned()
}

/// The fence in a token.
pub(super) fn fence(token: &str) -> u64 {
    u64::from_str_radix(&token[..16], 16).unwrap()
}

/// A directory that is removed at the end.
pub(super) struct Dir(PathBuf);

impl Dir {
    pub(super) fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("dflockd-process-{}-{number}", std::process::id());
        let path = std::env::temp_dir().join(name);
        fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The same as text, for the command line.
    pub(super) fn name(&self, name: &str) -> String {
        self.path(name).to_str().unwrap().to_owned()
    }

    pub(super) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> String {
        fs::write(self.path(name), content).unwrap();
        self.name(name)
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// A certificate for `localhost` and its key.
pub(super) struct Pair {
    pub(super) cert: String,
    pub(super) key: String,
}

impl Pair {
    pub(super) fn new() -> Self {
        let key = KeyPair::generate().unwrap();
        let params = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
        let cert = params.self_signed(&key).unwrap().pem();
        Self { cert, key: key.serialize_pem() }
    }

    /// Writes both files and gives the flags that name them.
    pub(super) fn flags(&self, dir: &Dir) -> [String; 2] {
        let (cert, key) = (dir.write("cert.pem", &self.cert), dir.write("key.pem", &self.key));
        [format!("--tls-cert={cert}"), format!("--tls-key={key}")]
    }

    /// A client that trusts this certificate only.
    pub(super) fn client(&self) -> Arc<ClientConfig> {
        trusting(&self.cert, &[&version::TLS12, &version::TLS13])
    }
}

/// A client that trusts one certificate and speaks some versions.
pub(super) fn trusting(
    root: &str,
    versions: &[&'static SupportedProtocolVersion],
) -> Arc<ClientConfig> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(root.as_bytes()).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_protocol_versions(versions)
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    Arc::new(config)
}

/// A TLS server, and how to connect to it.
pub(super) struct TlsServer {
    pub(super) server: Server,
    pub(super) pair: Pair,
    pub(super) dir: Dir,
    pub(super) config: Arc<ClientConfig>,
}

impl TlsServer {
    pub(super) fn start(args: &[&str]) -> Self {
        let (dir, pair) = (Dir::new(), Pair::new());
        let flags = pair.flags(&dir);
        let mut all: Vec<&str> = flags.iter().map(String::as_str).collect();
        all.extend_from_slice(args);
        let config = pair.client();
        Self { server: Server::start(&all), pair, dir, config }
    }

    pub(super) fn connect(&self) -> Client {
        let (client, _) = Client::over_tls(self.server.socket(), Arc::clone(&self.config)).unwrap();
        client
    }
}

/// A server that speaks plain text or TLS, for tests that should hold over both.
pub(super) enum Either {
    Plain(Server),
    Tls(Box<TlsServer>),
}

impl Either {
    pub(super) fn both(args: &[&str]) -> [Self; 2] {
        [Self::Plain(Server::start(args)), Self::Tls(Box::new(TlsServer::start(args)))]
    }

    pub(super) fn connect(&self) -> Client {
        match self {
            Self::Plain(server) => server.connect(),
            Self::Tls(server) => server.connect(),
        }
    }
}

/// Numbers that look random but are the same in every run.
pub(super) struct Noise(u64);

impl Noise {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn next(&mut self) -> u64 {
        // Xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end as u64).unwrap()
    }

    pub(super) fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next().to_le_bytes()[3]).collect()
    }
}

pub(super) fn exists(path: &Path) -> bool {
    fs::metadata(path).is_ok()
}
