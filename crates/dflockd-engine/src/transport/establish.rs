//! A connection before its first frame, whoever dialed: the options of its socket, TLS, and the messages of the
//! handshake. And why there is none.

use std::io::{self, ErrorKind};
use std::time::Duration;

use bytes::BytesMut;
use ring::error::Unspecified;
use rustls::ConnectionCommon;
use socket2::{SockRef, TcpKeepalive};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::credentials::{Chain, PeerTls, any_server_name, common_name};
use super::handshake::{self, Binding, Fault, Identity, Malformed, Version};
use super::seal::Framing;

/// A TCP connection, or TLS over one.
pub(super) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// A connection with TLS done, if there is any, and the handshake ahead.
pub(super) struct Fresh {
    pub(super) stream: Box<dyn Duplex>,
    pub(super) certificates: Option<Chain>,
    pub(super) binding: Option<Binding>,
    /// What the other side may still say before it is authenticated.
    pub(super) input_left: usize,
}

impl Fresh {
    pub(super) fn plain(tcp: TcpStream) -> Self {
        Self::new(Box::new(tcp), None, None)
    }

    pub(super) async fn dial_tls(tcp: TcpStream, tls: &PeerTls) -> Result<Self, NoConnection> {
        let connector = TlsConnector::from(tls.client());
        let stream = connector.connect(any_server_name(), tcp).await.map_err(tls_fault)?;
        let (certificates, binding) = session(stream.get_ref().1)?;
        Ok(Self::new(Box::new(stream), Some(certificates), Some(binding)))
    }

    pub(super) async fn accept_tls(tcp: TcpStream, tls: &PeerTls) -> Result<Self, NoConnection> {
        let acceptor = TlsAcceptor::from(tls.server());
        let stream = acceptor.accept(tcp).await.map_err(tls_fault)?;
        let (certificates, binding) = session(stream.get_ref().1)?;
        Ok(Self::new(Box::new(stream), Some(certificates), Some(binding)))
    }

    fn new(stream: Box<dyn Duplex>, certificates: Option<Chain>, binding: Option<Binding>) -> Self {
        Self { stream, certificates, binding, input_left: handshake::BYTES_MAX }
    }

    /// With TLS the certificate says who is there; it must be `node`.
    pub(super) fn check_name(&self, node: &str) -> Result<(), NoConnection> {
        let Some(chain) = &self.certificates else { return Ok(()) };
        let name = chain.first().map_or_else(|| Err("no certificate".to_owned()), common_name)?;
        if name != node {
            let name = name.escape_debug();
            return Err(format!("it shows the certificate of {name} and says it is {node}").into());
        }
        Ok(())
    }

    pub(super) async fn read(&mut self) -> Result<Vec<u8>, NoConnection> {
        let mut prefix = [0; 4];
        self.stream.read_exact(&mut prefix).await?;
        let length = usize::try_from(u32::from_le_bytes(prefix)).unwrap_or(usize::MAX);
        if length.saturating_add(4) > self.input_left {
            let tls = matches!(prefix, [0x15 | 0x16, 3, ..]);
            let reason = Malformed::Field("too much before authentication");
            return Err(Fault::from(if tls { Malformed::Tls } else { reason }).into());
        }
        self.input_left -= 4 + length;
        let mut message = vec![0; length];
        self.stream.read_exact(&mut message).await?;
        Ok(message)
    }

    pub(super) async fn write(&mut self, message: &[u8]) -> io::Result<()> {
        self.write_framed(message, &mut Framing::Plain).await
    }

    /// Writes the last message of the handshake, which is framed as what comes behind it.
    pub(super) async fn write_framed(
        &mut self,
        message: &[u8],
        framing: &mut Framing,
    ) -> io::Result<()> {
        let mut bytes = BytesMut::new();
        framing.put(message, &mut bytes);
        self.stream.write_all(&bytes).await?;
        self.stream.flush().await
    }
}

/// Who is at the other end of a TLS session, and what both ends of it know.
fn session<Side>(session: &ConnectionCommon<Side>) -> Result<(Chain, Binding), NoConnection> {
    let certificates = session.peer_certificates().map(<[_]>::to_vec).unwrap_or_default();
    let binding = session.export_keying_material([0; 32], b"EXPORTER-dflockd-peer", None);
    Ok((certificates, binding.map_err(|error| error.to_string())?))
}

/// Why there is no connection.
pub(super) struct NoConnection {
    pub(super) reason: String,
    /// Nobody listens there.
    pub(super) refused: bool,
    /// Not worth a warning: somebody came and went without a word.
    pub(super) dull: bool,
    /// Somebody there says that he knows the version without seals only.
    pub(super) older: bool,
    /// Whom we have dialed, and who refused us.
    pub(super) refused_by: Option<Box<Identity>>,
}

impl From<String> for NoConnection {
    fn from(reason: String) -> Self {
        Self { reason, refused: false, dull: false, older: false, refused_by: None }
    }
}

impl From<Fault> for NoConnection {
    fn from(fault: Fault) -> Self {
        let older = matches!(fault, Fault::Version { theirs: Version::Plain, .. });
        let plain = Self { older, ..fault.to_string().into() };
        let Fault::RefusedBy { theirs, .. } = fault else { return plain };
        Self { refused_by: Some(theirs), ..plain }
    }
}

impl From<io::Error> for NoConnection {
    fn from(error: io::Error) -> Self {
        let closed = [ErrorKind::UnexpectedEof, ErrorKind::ConnectionReset, ErrorKind::BrokenPipe];
        if closed.contains(&error.kind()) {
            let reason = "closed by the other side during the handshake".to_owned();
            return Self { dull: true, ..reason.into() };
        }
        error.to_string().into()
    }
}

/// Small frames go at once, and a host that has vanished is noticed.
pub(super) fn prepare(tcp: &TcpStream, stall: Duration) {
    let socket = SockRef::from(tcp);
    let probe = (stall / 5).max(Duration::from_secs(1));
    let keepalive = TcpKeepalive::new().with_time(probe * 2).with_interval(probe).with_retries(3);
    let result = socket.set_tcp_nodelay(true).and_then(|()| socket.set_tcp_keepalive(&keepalive));
    #[cfg(any(target_os = "linux", target_os = "android"))]
    let result = result.and_then(|()| socket.set_tcp_user_timeout(Some(stall)));
    if let Err(error) = result {
        // It only means that a lost host is noticed later.
        tracing::debug!(%error, "a peer socket does not take its options");
    }
}

pub(super) fn no_random(_: Unspecified) -> NoConnection {
    "the operating system gives no random numbers".to_owned().into()
}

fn tls_fault(error: io::Error) -> NoConnection {
    let fault = NoConnection::from(error);
    NoConnection { reason: format!("TLS: {}", fault.reason), ..fault }
}
