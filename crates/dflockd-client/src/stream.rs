//! Where servers are and how they are reached: sockets, TLS or not, and the greeting.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Request};
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::Error;
use crate::lines::Lines;
use crate::link::OnDisconnect;
use crate::reply::Reply;

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
