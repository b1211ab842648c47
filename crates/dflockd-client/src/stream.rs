//! Where servers are and how they are reached: sockets, TLS or not, and what is common to the transports.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Request, Unit};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::Error;
#[cfg(feature = "grpc")]
use crate::grpc;
use crate::lines::{self, Lines};
use crate::link::OnDisconnect;
use crate::reply::{Incoming, Reply};

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
            Box::pin(async move { dialer.open(&target).await })
        };
        let (auth, client_name) = (self.auth.clone(), Arc::clone(&self.client_name));
        let address = Address::custom(name, dial, auth, client_name, self.connect_timeout);
        Address { transport: self.transport, ..address }
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
#[derive(Clone)]
pub(crate) struct Address {
    /// As the user wrote it.
    pub(crate) name: String,
    dial: Arc<dyn Fn() -> BoxFuture<io::Result<BoxBytes>> + Send + Sync>,
    pub(crate) auth: Option<Arc<str>>,
    pub(crate) client_name: Arc<str>,
    pub(crate) connect_timeout: Duration,
    pub(crate) transport: Transport,
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
        Self { name, dial, auth, client_name, connect_timeout, transport: Transport::Lines }
    }

    /// Whether a server of an older generation may be there.
    pub(crate) fn may_be_old(&self) -> bool {
        self.transport == Transport::Lines
    }

    /// Connects and authenticates.
    pub(crate) async fn connect(&self) -> Result<Connection, Error> {
        let connected = async {
            let stream = (self.dial)().await?;
            Ok::<_, io::Error>(match self.transport {
                Transport::Lines => Connection::Lines(Box::new(Lines::new(stream))),
                #[cfg(feature = "grpc")]
                Transport::Grpc => {
                    let token = self.auth.as_deref();
                    let conversation = grpc::Conversation::new(stream, &self.name, token).await?;
                    Connection::Grpc(Box::new(conversation))
                }
            })
        };
        let mut connection = match tokio::time::timeout(self.connect_timeout, connected).await {
            Ok(connected) => connected.map_err(|error| self.unreachable(error))?,
            Err(_) => return Err(self.unreachable("connecting took too long")),
        };
        // Over gRPC each call carries the token.
        if let (Connection::Lines(_), Some(token)) = (&connection, &self.auth) {
            let request = Request::Auth { token: token.as_bytes() };
            let reply = connection.ask(None, &request, self.connect_timeout).await;
            let reply = reply.map_err(|error| self.unreachable(error))?;
            if matches!(reply, Reply::Refused(ErrorCode::Draining)) {
                return Err(Error::Refused(ErrorCode::Draining));
            }
            reply.done("auth").map_err(|_| Error::Auth)?;
        }
        Ok(connection)
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

/// A connection by either transport: requests go in, what the server says comes out.
pub(crate) enum Connection {
    Lines(Box<Lines>),
    #[cfg(feature = "grpc")]
    Grpc(Box<grpc::Conversation>),
}

/// A request as a transport sends it; kept until it is answered, because it may have to go out again.
pub(crate) enum Message {
    Lines(lines::Message),
    #[cfg(feature = "grpc")]
    Grpc(Box<grpc::Message>),
}

impl Message {
    pub(crate) fn new(request: &Request<'_>, transport: Transport, unit: Unit) -> Self {
        match transport {
            Transport::Lines => Self::Lines(lines::Message::new(request, unit)),
            #[cfg(feature = "grpc")]
            Transport::Grpc => Self::Grpc(Box::new(grpc::Message::new(request))),
        }
    }
}

impl Connection {
    /// Takes a request to be sent, at the latest by `flush`.
    pub(crate) fn queue(&mut self, number: Option<u64>, message: &Message) {
        match (self, message) {
            (Self::Lines(lines), Message::Lines(message)) => lines.queue(number, message),
            #[cfg(feature = "grpc")]
            (Self::Grpc(conversation), Message::Grpc(message)) => {
                conversation.queue(number, message);
            }
            #[cfg(feature = "grpc")]
            (Self::Lines(_), Message::Grpc(_)) | (Self::Grpc(_), Message::Lines(_)) => {
                unreachable!("a route has one transport")
            }
        }
    }

    /// Sends within `limit`; what comes meanwhile goes to `hear`.
    pub(crate) async fn flush(
        &mut self,
        limit: Duration,
        hear: impl FnMut(Incoming),
    ) -> io::Result<()> {
        match self {
            Self::Lines(lines) => lines.flush(limit, hear).await,
            #[cfg(feature = "grpc")]
            Self::Grpc(_) => Ok(()),
        }
    }

    /// What comes next. Cancel-safe.
    pub(crate) async fn next(&mut self) -> io::Result<Incoming> {
        match self {
            Self::Lines(lines) => lines.next().await,
            #[cfg(feature = "grpc")]
            Self::Grpc(conversation) => conversation.next().await,
        }
    }

    /// Sends a request and waits for its answer; what else comes meanwhile is dropped.
    pub(crate) async fn ask(
        &mut self,
        number: Option<u64>,
        request: &Request<'_>,
        timeout: Duration,
    ) -> io::Result<Reply> {
        let message = match self {
            Self::Lines(lines) => Message::new(request, Transport::Lines, lines.unit()),
            #[cfg(feature = "grpc")]
            Self::Grpc(_) => Message::new(request, Transport::Grpc, Unit::Millis),
        };
        self.ask_hearing(number, &message, timeout, |_| {}).await
    }

    /// Asks and waits for the answer, `timeout` at most; what else comes goes to `hear`.
    pub(crate) async fn ask_hearing(
        &mut self,
        number: Option<u64>,
        message: &Message,
        timeout: Duration,
        mut hear: impl FnMut(Incoming),
    ) -> io::Result<Reply> {
        self.queue(number, message);
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
        within(timeout, asked).await
    }

    /// Tells who it is and asks for a session.
    pub(crate) async fn greet(
        &mut self,
        name: &str,
        wanted: Session<'_>,
        timeout: Duration,
    ) -> io::Result<Greeting> {
        match self {
            Self::Lines(lines) => within(timeout, lines.greet(name, wanted)).await,
            #[cfg(feature = "grpc")]
            Self::Grpc(conversation) => within(timeout, conversation.greet(name, wanted)).await,
        }
    }

    /// Ends the connection in order.
    pub(crate) async fn close(self) {
        match self {
            Self::Lines(lines) => lines.close().await,
            #[cfg(feature = "grpc")]
            Self::Grpc(conversation) => conversation.close().await,
        }
    }
}

async fn within<T>(limit: Duration, outcome: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let outcome = tokio::time::timeout(limit, outcome).await;
    outcome.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// What a connection is for.
#[derive(Clone, Copy)]
pub(crate) enum Session<'a> {
    /// Requests without numbers, and no session.
    None,
    /// A session of its own.
    New(OnDisconnect),
    /// The session that the client had before.
    Attach(&'a str),
    /// The session of another client, whose last request is to be told.
    TakeOver(&'a str),
}

/// What a server says to a greeting.
pub(crate) enum Greeting {
    /// Welcome.
    Accepted {
        /// By this another connection can attach to the session, if it is kept.
        session: Option<String>,
        /// The highest number of a request of the session that is taken over, if the server tells.
        last: Option<u64>,
    },
    /// It can not do all that was asked for.
    Unsuited,
    /// A refusal. `error` is what servers say that do not know the greeting, or the session that it names.
    Refused(ErrorCode),
    /// To be asked elsewhere.
    NotLeader(Option<String>),
}
