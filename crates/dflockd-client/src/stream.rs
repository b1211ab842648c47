//! Lines over a socket, TLS or not, and the greeting.

use std::collections::HashMap;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Op, Push, Request, Unit, print_number, split_number};
use rustls::pki_types::ServerName;
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::Error;
use crate::link::OnDisconnect;
use crate::reply::{Incoming, Reply};

/// Longest line a server may send; `stats` can be large.
const LINE_BYTES_MAX: usize = 256 * 1024 * 1024;

/// What a connection with a session must do, or can.
const SESSION_WORDS: [&str; 5] = ["mux", "ms", "fence", "lost", "lease-status"];

/// Bytes both ways.
pub(crate) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

pub(crate) type BoxBytes = Box<dyn Bytes>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How to talk to servers, wherever they are.
#[derive(Clone)]
pub(crate) struct Dialer {
    pub(crate) tls: Option<Arc<rustls::ClientConfig>>,
    pub(crate) auth: Option<Arc<str>>,
    pub(crate) client_name: Arc<str>,
    pub(crate) connect_timeout: Duration,
    /// How long sent bytes may be without an acknowledgement of the other machine.
    pub(crate) user_timeout: Option<Duration>,
    pub(crate) transport: Transport,
}

/// What is spoken to servers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Transport {
    /// The line protocol. The default.
    #[default]
    Lines,
    /// gRPC. The addresses of servers are those of their gRPC ports.
    #[cfg(feature = "grpc")]
    Grpc,
}

impl Dialer {
    /// A server behind a socket, `host:port`.
    pub(crate) fn address(&self, name: String) -> Address {
        let (target, dialer) = (name.clone(), self.clone());
        let dial = move || -> BoxFuture<io::Result<BoxBytes>> {
            let (target, dialer) = (target.clone(), dialer.clone());
            Box::pin(async move {
                match dialer.transport {
                    Transport::Lines => dialer.open(&target).await,
                    #[cfg(feature = "grpc")]
                    Transport::Grpc => {
                        crate::grpc::converse(dialer.open(&target).await?, &target).await
                    }
                }
            })
        };
        let (auth, client_name) = (self.auth.clone(), Arc::clone(&self.client_name));
        let address = Address::custom(name, dial, auth, client_name, self.connect_timeout);
        Address { may_be_old: self.transport == Transport::Lines, ..address }
    }

    /// A socket, with TLS if that is wanted.
    async fn open(&self, target: &str) -> io::Result<BoxBytes> {
        let stream = TcpStream::connect(target).await?;
        stream.set_nodelay(true)?;
        if let Some(limit) = self.user_timeout {
            set_user_timeout(&stream, limit);
        }
        let Some(tls) = self.tls() else { return Ok(Box::new(stream)) };
        let host = target.rsplit_once(':').map_or(target, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let host = ServerName::try_from(host).map_err(io::Error::other)?;
        let stream = TlsConnector::from(tls).connect(host, stream).await?;
        Ok(Box::new(stream))
    }

    fn tls(&self) -> Option<Arc<rustls::ClientConfig>> {
        let config = self.tls.clone()?;
        match self.transport {
            Transport::Lines => Some(config),
            #[cfg(feature = "grpc")]
            Transport::Grpc => {
                let mut config = rustls::ClientConfig::clone(&config);
                config.alpn_protocols = vec![b"h2".to_vec()];
                Some(Arc::new(config))
            }
        }
    }
}

/// Without it the heartbeat notices, a little later.
#[cfg(target_os = "linux")]
fn set_user_timeout(stream: &TcpStream, limit: Duration) {
    let millis = u32::try_from(limit.as_millis()).unwrap_or(u32::MAX);
    let _ = rustix::net::sockopt::set_tcp_user_timeout(stream, millis);
}

#[cfg(not(target_os = "linux"))]
fn set_user_timeout(_stream: &TcpStream, _limit: Duration) {}

/// Where a server is and how to talk to it.
///
/// This is where transports differ: `dial` may give any pair of byte streams. What speaks no lines, such as gRPC, is
/// dialed by giving one end of a pipe away and translating at the other.
#[derive(Clone)]
pub(crate) struct Address {
    /// As the user wrote it, for messages.
    pub(crate) name: String,
    dial: Arc<dyn Fn() -> BoxFuture<io::Result<BoxBytes>> + Send + Sync>,
    pub(crate) auth: Option<Arc<str>>,
    pub(crate) client_name: Arc<str>,
    pub(crate) connect_timeout: Duration,
    /// Servers of older generations may be there.
    pub(crate) may_be_old: bool,
}

impl Address {
    /// A server reached by `dial`.
    pub(crate) fn custom(
        name: String,
        dial: impl Fn() -> BoxFuture<io::Result<BoxBytes>> + Send + Sync + 'static,
        auth: Option<Arc<str>>,
        client_name: Arc<str>,
        connect_timeout: Duration,
    ) -> Self {
        let dial = Arc::new(dial);
        Self { name, dial, auth, client_name, connect_timeout, may_be_old: true }
    }

    /// Connects and authenticates.
    pub(crate) async fn connect(&self) -> Result<Lines, Error> {
        let dial = tokio::time::timeout(self.connect_timeout, (self.dial)());
        let stream = match dial.await {
            Ok(Ok(stream)) => stream,
            Ok(Err(error)) => return Err(self.unreachable(error)),
            Err(_) => return Err(self.unreachable("connecting took too long")),
        };
        let mut lines = Lines::new(stream);
        if let Some(token) = &self.auth {
            let request = Request::Auth { token: token.as_bytes() };
            let reply = lines.ask(None, &request, self.connect_timeout).await;
            let reply = reply.map_err(|error| self.unreachable(error))?;
            if matches!(reply, Reply::Refused(ErrorCode::Draining)) {
                return Err(Error::Refused(ErrorCode::Draining));
            }
            reply.done("auth").map_err(|_| Error::Auth)?;
        }
        Ok(lines)
    }

    /// What a failed greeting means.
    pub(crate) fn greeting_failed(&self, error: &io::Error) -> Error {
        if error.kind() == io::ErrorKind::PermissionDenied {
            return Error::Auth;
        }
        self.unreachable(error)
    }

    pub(crate) fn unreachable(&self, reason: impl ToString) -> Error {
        Error::Unreachable { server: self.name.clone(), reason: reason.to_string() }
    }
}

/// A request as it is sent; kept until it is answered, because it may have to go out again.
pub(crate) struct Message {
    op: Op,
    lines: Vec<u8>,
}

impl Message {
    pub(crate) fn new(request: &Request<'_>, unit: Unit) -> Self {
        let mut lines = Vec::new();
        request.print(unit, &mut lines);
        Self { op: request.op(), lines }
    }
}

/// A connection as lines.
pub(crate) struct Lines {
    reader: LineReader,
    writer: WriteHalf<BoxBytes>,
    /// What is to be sent.
    output: Vec<u8>,
}

struct LineReader {
    reader: BufReader<ReadHalf<BoxBytes>>,
    line: Vec<u8>,
    unit: Unit,
    /// What is asked and not answered, by number: an answer is read according to its question.
    open: HashMap<Option<u64>, Op>,
}

impl LineReader {
    /// What comes next. Cancel-safe: a partial line is kept.
    async fn next(&mut self) -> io::Result<Incoming> {
        loop {
            let chunk = self.reader.fill_buf().await?;
            if chunk.is_empty() {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let used = end.map_or(chunk.len(), |end| end + 1);
            self.line.extend_from_slice(&chunk[..used]);
            self.reader.consume(used);
            if self.line.len() > LINE_BYTES_MAX {
                return Err(io::Error::other("the server sent an endless line"));
            }
            if end.is_some() {
                let mut line = std::mem::take(&mut self.line);
                line.pop();
                while line.last() == Some(&b'\r') {
                    line.pop();
                }
                return Ok(self.read(&line));
            }
        }
    }

    fn read(&mut self, line: &[u8]) -> Incoming {
        if let Some((number, rest)) = split_number(line)
            && let Some(op) = self.open.remove(&Some(number))
        {
            Incoming::Reply(Some(number), Reply::parse(op, rest, self.unit))
        } else if let Some(push) = Push::parse(line) {
            push.into()
        } else if let Some(op) = self.open.remove(&None) {
            Incoming::Reply(None, Reply::parse(op, line, self.unit))
        } else if line == b"detached" {
            Incoming::Detached
        } else {
            Incoming::Other
        }
    }
}

impl Lines {
    fn new(stream: BoxBytes) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        let reader = BufReader::new(reader);
        let (line, unit, open) = (Vec::new(), Unit::Seconds, HashMap::new());
        Self { reader: LineReader { reader, line, unit, open }, writer, output: Vec::new() }
    }

    /// Takes a request to be sent by `flush`.
    pub(crate) fn queue(&mut self, number: Option<u64>, message: &Message) {
        if let Some(number) = number {
            print_number(number, &mut self.output);
        }
        self.output.extend_from_slice(&message.lines);
        self.reader.open.insert(number, message.op);
    }

    /// Sends within `limit`, and hears meanwhile: a server whose answers are not taken stops reading.
    pub(crate) async fn flush(
        &mut self,
        limit: Duration,
        mut hear: impl FnMut(Incoming),
    ) -> io::Result<()> {
        let Self { reader, writer, output } = self;
        let output = std::mem::take(output);
        let written = async {
            writer.write_all(&output).await?;
            writer.flush().await
        };
        let mut written = pin!(tokio::time::timeout(limit, written));
        loop {
            tokio::select! {
                biased;
                outcome = &mut written => {
                    return outcome.unwrap_or_else(|_| Err(io::Error::other("the server reads nothing")));
                }
                incoming = reader.next() => hear(incoming?),
            }
        }
    }

    /// What comes next. Cancel-safe.
    pub(crate) async fn next(&mut self) -> io::Result<Incoming> {
        self.reader.next().await
    }

    /// Sends a request and waits for its answer; what else comes meanwhile is dropped.
    pub(crate) async fn ask(
        &mut self,
        number: Option<u64>,
        request: &Request<'_>,
        timeout: Duration,
    ) -> io::Result<Reply> {
        self.ask_hearing(number, request, timeout, |_| {}).await
    }

    /// The same; what else comes goes to `hear`.
    pub(crate) async fn ask_hearing(
        &mut self,
        number: Option<u64>,
        request: &Request<'_>,
        timeout: Duration,
        mut hear: impl FnMut(Incoming),
    ) -> io::Result<Reply> {
        self.queue(number, &Message::new(request, self.reader.unit));
        let asked = async {
            self.flush(timeout, &mut hear).await?;
            loop {
                let incoming = self.next().await?;
                if let Incoming::Reply(answered, reply) = incoming {
                    if answered == number {
                        return Ok(reply);
                    }
                } else {
                    hear(incoming);
                }
            }
        };
        let asked = tokio::time::timeout(timeout, asked).await;
        asked.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }

    /// Tells who it is and asks for a session.
    pub(crate) async fn greet(
        &mut self,
        name: &str,
        session: Session<'_>,
        timeout: Duration,
    ) -> io::Result<Greeting> {
        let (extra, is_kept) = match session {
            Session::None | Session::New(OnDisconnect::Release) => (None, false),
            Session::New(OnDisconnect::Keep) => (Some("keep".to_owned()), true),
            Session::Attach(session) => (Some(format!("attach={session}")), true),
        };
        let is_plain = matches!(session, Session::None);
        let mut words = if is_plain { Vec::new() } else { SESSION_WORDS.to_vec() };
        words.extend(extra.as_deref());
        let reply = self.ask(None, &Request::Hello { name, words }, timeout).await?;
        if let Reply::NotLeader(leader) = reply {
            return Ok(Greeting::NotLeader(leader));
        }
        if let Reply::Refused(code) = reply {
            let denied = || Err(io::ErrorKind::PermissionDenied.into());
            return if code == ErrorCode::Auth { denied() } else { Ok(Greeting::Refused(code)) };
        }
        let Reply::Value(accepted) = reply else {
            return Err(io::Error::other("the answer to the greeting is not understood"));
        };
        let accepted = String::from_utf8_lossy(&accepted);
        let has = |wanted: &str| accepted.split(' ').any(|word| word == wanted);
        let mut secrets = accepted
            .split(' ')
            .filter_map(|word| word.strip_prefix("keep=").or_else(|| word.strip_prefix("attach=")));
        let session = secrets.next().map(str::to_owned);
        if has("ms") {
            self.reader.unit = Unit::Millis;
        }
        let suits = has("mux") && has("ms") && has("fence") && (!is_kept || session.is_some());
        Ok(if suits || is_plain { Greeting::Accepted(session) } else { Greeting::Unsuited })
    }

    /// Ends the connection in order.
    pub(crate) async fn close(mut self) {
        let _ = self.writer.shutdown().await;
    }
}

/// What a connection is for.
#[derive(Clone, Copy)]
pub(crate) enum Session<'a> {
    /// Requests without numbers, and no session.
    None,
    /// A session of its own.
    New(OnDisconnect),
    /// A session that exists.
    Attach(&'a str),
}

/// What a server says to a greeting.
pub(crate) enum Greeting {
    /// Welcome; by this another connection can attach to the session, if it is kept.
    Accepted(Option<String>),
    /// It can not do all that was asked for.
    Unsuited,
    /// A refusal. `error` is what servers say that do not know the greeting, or the session that it names.
    Refused(ErrorCode),
    /// To be asked elsewhere.
    NotLeader(Option<String>),
}
