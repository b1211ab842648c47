//! A client of the line protocol, blocking, that can also be slow, rude and wrong.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ClientConnection, StreamOwned};
use serde_json::Value;
use socket2::SockRef;

use crate::forms::Forms;
use crate::{LIMIT, eventually};

/// How long the answer of a member of a cluster may take to a request that does not wait by its own will: five seconds,
/// and some for the machine.
pub const ANSWER: Duration = Duration::from_secs(10);

/// The errors of a read for which nothing came yet.
pub const PATIENCE: [ErrorKind; 3] =
    [ErrorKind::WouldBlock, ErrorKind::TimedOut, ErrorKind::Interrupted];

/// The errors of a read that are the end of the connection.
const ENDS: [ErrorKind; 4] = [
    ErrorKind::ConnectionReset,
    ErrorKind::ConnectionAborted,
    ErrorKind::BrokenPipe,
    ErrorKind::UnexpectedEof,
];

/// A stream that can say that it ends.
pub(crate) trait Stream: Read + Write + Send {
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

/// TLS to `localhost` over a socket; the error is that of the handshake.
pub(crate) fn handshake(
    mut socket: TcpStream,
    config: Arc<ClientConfig>,
) -> std::io::Result<StreamOwned<ClientConnection, TcpStream>> {
    socket.set_read_timeout(Some(LIMIT))?;
    let name = ServerName::try_from("localhost").unwrap();
    let mut tls = ClientConnection::new(config, name).unwrap();
    while tls.is_handshaking() {
        tls.complete_io(&mut socket)?;
    }
    Ok(StreamOwned::new(tls, socket))
}

/// What came of a read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard<L = String> {
    /// A line, without its end.
    Line(L),
    /// Closed or reset by the server.
    End,
    /// Neither in time.
    Nothing,
}

impl Heard {
    /// The line, if it is one.
    pub fn line(&self) -> Option<&str> {
        match self {
            Self::Line(line) => Some(line),
            Self::End | Self::Nothing => None,
        }
    }
}

/// What a client knows after the handshake of TLS.
#[derive(Debug)]
pub struct Facts {
    /// The version that was agreed on.
    pub version: rustls::ProtocolVersion,
    /// The certificates of the server.
    pub chain: Vec<Vec<u8>>,
}

/// One connection.
pub struct Client {
    stream: Box<dyn Stream>,
    socket: TcpStream,
    /// How long it waits for a line that must come.
    patience: Duration,
    buffer: Vec<u8>,
    used: usize,
    /// What the answers to its requests may be like, as long as it sends nothing else.
    forms: Option<Forms>,
}

impl Client {
    /// A connection to a member of a cluster, which may be down.
    pub fn connect(address: SocketAddr) -> std::io::Result<Self> {
        let socket = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        socket.set_nodelay(true)?;
        Ok(Self { patience: ANSWER, ..Self::over(socket) })
    }

    /// Plain text over a socket.
    pub fn over(socket: TcpStream) -> Self {
        let other = socket.try_clone().unwrap();
        Self::new(Box::new(other), socket)
    }

    /// TLS over a socket; the error is that of the handshake.
    pub fn over_tls(
        socket: TcpStream,
        config: Arc<ClientConfig>,
    ) -> std::io::Result<(Self, Facts)> {
        let other = socket.try_clone().unwrap();
        let stream = handshake(socket, config)?;
        let facts = Facts {
            version: stream.conn.protocol_version().unwrap(),
            chain: stream.conn.peer_certificates().unwrap().iter().map(|c| c.to_vec()).collect(),
        };
        Ok((Self::new(Box::new(stream), other), facts))
    }

    fn new(stream: Box<dyn Stream>, socket: TcpStream) -> Self {
        socket.set_write_timeout(Some(LIMIT)).unwrap();
        let (patience, forms) = (LIMIT, Some(Forms::default()));
        Self { stream, socket, patience, buffer: Vec::new(), used: 0, forms }
    }

    /// Sends bytes as they are.
    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).unwrap();
    }

    /// Sends bytes to a server that may be gone.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.forms = None;
        self.write(bytes.as_ref())
    }

    fn write(&mut self, bytes: &[u8]) -> std::io::Result<()> {
        self.stream.write_all(bytes)?;
        self.stream.flush()
    }

    /// Sends the last bytes, but keeps reading.
    pub fn send_last(&mut self, bytes: impl AsRef<[u8]>) {
        self.forms = None;
        self.stream.send_last(bytes.as_ref());
    }

    /// Sends a request without waiting for its answer. Whether the server is gone shows when that is read.
    pub fn begin(&mut self, command: &str, key: &str, arg: &str) {
        // What is more or less than a request has more or fewer answers.
        self.forms.take_if(|_| [command, key, arg].iter().any(|part| part.contains('\n')));
        if let Some(forms) = &mut self.forms {
            forms.asked(command, key, arg);
        }
        let _ = self.write(format!("{command}\n{key}\n{arg}\n").as_bytes());
    }

    /// A request and its answer.
    #[track_caller]
    pub fn ask(&mut self, command: &str, key: &str, arg: &str) -> String {
        match self.try_ask(command, key, arg, self.patience) {
            Heard::Line(line) => line,
            other @ (Heard::End | Heard::Nothing) => {
                panic!("{other:?} instead of an answer to {command} {key} {arg}")
            }
        }
    }

    /// A request and what came of it before the time was over.
    pub fn try_ask(&mut self, command: &str, key: &str, arg: &str, time: Duration) -> Heard {
        self.begin(command, key, arg);
        self.hear(time)
    }

    /// A request that must have this answer.
    #[track_caller]
    pub fn check(&mut self, command: &str, key: &str, arg: &str, answer: &str) {
        assert_eq!(self.ask(command, key, arg), answer, "{command} {key} {arg}");
    }

    /// Takes a lock that must be free now, or become so within the wait; gives its token.
    #[track_caller]
    pub fn lock(&mut self, key: &str, arg: &str) -> String {
        granted(&self.ask("l", key, arg))
    }

    /// Takes a lock that must be free now, or become so within the wait, and gives it back.
    #[track_caller]
    pub fn lock_and_release(&mut self, key: &str, arg: &str) {
        let token = self.lock(key, arg);
        self.check("r", key, &token, "ok");
    }

    /// Makes its session one that outlives the connection; gives the secret of it.
    #[track_caller]
    pub fn keep(&mut self, name: &str) -> String {
        let answer = self.ask("hello", name, "keep");
        answer.strip_prefix("ok keep=").unwrap_or_else(|| panic!("{answer}")).to_owned()
    }

    /// The address that the server sees.
    pub fn local_addr(&self) -> SocketAddr {
        self.socket.local_addr().unwrap()
    }

    /// The next line, which must come.
    #[track_caller]
    pub fn line(&mut self) -> String {
        match self.hear(self.patience) {
            Heard::Line(line) => line,
            other @ (Heard::End | Heard::Nothing) => panic!("{other:?} instead of a line"),
        }
    }

    /// That this is the next line.
    #[track_caller]
    pub fn expect(&mut self, line: &str) {
        assert_eq!(self.line(), line);
    }

    /// That these are the next lines, in any order: an answer and a push may overtake each other.
    #[track_caller]
    pub fn expect_all(&mut self, lines: &[&str]) {
        let mut heard: Vec<_> = lines.iter().map(|_| self.line()).collect();
        let mut wanted: Vec<_> = lines.iter().map(ToString::to_string).collect();
        heard.sort();
        wanted.sort();
        assert_eq!(heard, wanted);
    }

    /// That the server closes.
    #[track_caller]
    pub fn expect_end(&mut self) {
        assert_eq!(self.hear(self.patience), Heard::End);
    }

    /// That this is the next line, and that the server closes behind it.
    #[track_caller]
    pub fn expect_last(&mut self, line: &str) {
        self.expect(line);
        self.expect_end();
    }

    /// That nothing comes for a while, not even the end.
    #[track_caller]
    pub fn expect_silence(&mut self, time: Duration) {
        assert_eq!(self.hear(time), Heard::Nothing);
    }

    /// The next line, if there is one before the time is over; without any time, if it is there.
    #[track_caller]
    pub fn hear(&mut self, time: Duration) -> Heard {
        match self.hear_bytes(time) {
            Heard::Line(line) => Heard::Line(String::from_utf8_lossy(&line).into_owned()),
            Heard::End => Heard::End,
            Heard::Nothing => Heard::Nothing,
        }
    }

    /// The next line as it came, if there is one before the time is over. An answer has a form that its request allows.
    #[track_caller]
    pub fn hear_bytes(&mut self, time: Duration) -> Heard<Vec<u8>> {
        let heard = self.next_line(time);
        if let (Heard::Line(line), Some(forms)) = (&heard, &mut self.forms)
            && let Err(why) = forms.check(line)
        {
            panic!("GUARANTEES 47: {why}");
        }
        heard
    }

    fn next_line(&mut self, time: Duration) -> Heard<Vec<u8>> {
        let until = Instant::now() + time;
        let mut looked = self.used;
        loop {
            if let Some(at) = self.buffer[looked..].iter().position(|byte| *byte == b'\n') {
                let line = self.buffer[self.used..looked + at].to_vec();
                self.used = looked + at + 1;
                if self.used == self.buffer.len() {
                    self.buffer.clear();
                    self.used = 0;
                }
                return Heard::Line(line);
            }
            looked = self.buffer.len();
            let left = until.saturating_duration_since(Instant::now());
            let mut bytes = [0; 64 * 1024];
            match self.read(&mut bytes, left) {
                Ok(0) => return Heard::End,
                Ok(count) => self.buffer.extend_from_slice(&bytes[..count]),
                Err(error) if PATIENCE.contains(&error.kind()) => {
                    if left.is_zero() {
                        return Heard::Nothing;
                    }
                }
                Err(error) if ENDS.contains(&error.kind()) => return Heard::End,
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Reads once, without waiting if there is no time.
    fn read(&mut self, bytes: &mut [u8], time: Duration) -> std::io::Result<usize> {
        if !time.is_zero() {
            let _ = self.socket.set_read_timeout(Some(time));
            return self.stream.read(bytes);
        }
        self.socket.set_nonblocking(true)?;
        let read = self.stream.read(bytes);
        self.socket.set_nonblocking(false)?;
        read
    }

    /// Says that nothing more will be sent, to a server that may be gone.
    pub fn half_close(&self) {
        let _ = self.socket.shutdown(Shutdown::Write);
    }

    /// Ends with a reset, as a crashed machine's kernel would.
    pub fn reset(self) {
        SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// The state of the server.
    #[track_caller]
    pub fn stats(&mut self) -> Value {
        self.try_stats(self.patience).expect("an answer to stats")
    }

    /// The state of the server, if it answers before the time is over.
    pub fn try_stats(&mut self, time: Duration) -> Option<Value> {
        let answer = self.try_ask("stats", "_", "", time);
        serde_json::from_str(answer.line()?.strip_prefix("ok ")?).ok()
    }

    /// How many wait for a lock of any kind.
    #[track_caller]
    pub fn waiters(&mut self, key: &str) -> u64 {
        waiters_in(&self.stats(), key)
    }

    /// Waits until so many wait for a lock of any kind.
    #[track_caller]
    pub fn wait_for_waiters(&mut self, key: &str, count: u64) {
        eventually(&format!("{count} waiters"), || {
            let stats = self.try_stats(self.patience)?;
            (waiters_in(&stats, key) == count).then_some(())
        });
    }
}

fn waiters_in(stats: &Value, key: &str) -> u64 {
    let kinds = ["locks", "semaphores", "rw_locks"].iter();
    let locks = kinds.filter_map(|list| entry(stats, list, key));
    locks.filter_map(|lock| lock["waiters"].as_u64()).sum()
}

/// One entry of a list in the stats.
pub fn entry<'a>(stats: &'a Value, list: &str, key: &str) -> Option<&'a Value> {
    stats[list].as_array()?.iter().find(|entry| entry["key"] == key)
}

/// The token of a grant.
#[track_caller]
pub fn granted(answer: &str) -> String {
    let mut words = answer.split(' ');
    assert!(matches!(words.next(), Some("ok" | "acquired")), "no grant: {answer}");
    let token = words.next().unwrap_or_else(|| panic!("no grant: {answer}"));
    assert_eq!(token.len(), 32, "{answer}");
    token.to_owned()
}

/// The fence in a token.
pub fn fence(token: &str) -> u64 {
    u64::from_str_radix(&token[..16], 16).unwrap()
}
