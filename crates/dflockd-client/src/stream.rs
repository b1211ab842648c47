//! Lines over a socket, TLS or not, and the greeting.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Op, Request, Response, Unit};
use rustls::pki_types::ServerName;
use tokio::io::{
    AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, ReadHalf, WriteHalf,
};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::error::Error;

/// Longest line a server may send; `stats` can be large.
const LINE_BYTES_MAX: usize = 256 * 1024 * 1024;

/// Bytes both ways.
pub(crate) trait Bytes: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Bytes for T {}

type BoxBytes = Box<dyn Bytes>;
pub(crate) type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// Where a server is and how to talk to it.
#[derive(Clone)]
pub(crate) struct Address {
    /// As the user wrote it, for messages.
    pub(crate) name: String,
    dial: Arc<dyn Fn() -> BoxFuture<io::Result<BoxBytes>> + Send + Sync>,
    pub(crate) auth: Option<Arc<str>>,
    pub(crate) client_name: Arc<str>,
    pub(crate) connect_timeout: Duration,
}

impl Address {
    /// A server behind a socket.
    pub(crate) fn tcp(
        name: String,
        tls: Option<Arc<rustls::ClientConfig>>,
        auth: Option<Arc<str>>,
        client_name: Arc<str>,
        connect_timeout: Duration,
    ) -> Self {
        let target = name.clone();
        Self::custom(
            name,
            move || {
                let (target, tls) = (target.clone(), tls.clone());
                Box::pin(async move {
                    let stream = TcpStream::connect(&target).await?;
                    stream.set_nodelay(true)?;
                    let Some(tls) = tls else { return Ok(Box::new(stream) as BoxBytes) };
                    let host = target.rsplit_once(':').map_or(target.as_str(), |(host, _)| host);
                    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
                    let host = ServerName::try_from(host).map_err(io::Error::other)?;
                    let stream = TlsConnector::from(tls).connect(host, stream).await?;
                    Ok(Box::new(stream) as BoxBytes)
                })
            },
            auth,
            client_name,
            connect_timeout,
        )
    }

    /// A server reached in some other way.
    pub(crate) fn custom(
        name: String,
        dial: impl Fn() -> BoxFuture<io::Result<BoxBytes>> + Send + Sync + 'static,
        auth: Option<Arc<str>>,
        client_name: Arc<str>,
        connect_timeout: Duration,
    ) -> Self {
        Self { name, dial: Arc::new(dial), auth, client_name, connect_timeout }
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
            let answer = lines.ask(&request, self.connect_timeout).await;
            match answer.map_err(|error| self.unreachable(error))?.as_slice() {
                b"ok" => {}
                b"error_draining" => return Err(Error::Refused(ErrorCode::Draining)),
                _ => return Err(Error::Auth),
            }
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

/// A connection as lines.
pub(crate) struct Lines {
    pub(crate) reader: LineReader,
    pub(crate) writer: WriteHalf<BoxBytes>,
}

pub(crate) struct LineReader {
    reader: BufReader<ReadHalf<BoxBytes>>,
    line: Vec<u8>,
}

impl LineReader {
    /// The next line without its end. Cancel-safe: a partial line is kept.
    pub(crate) async fn next(&mut self) -> io::Result<Vec<u8>> {
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
                return Ok(line);
            }
        }
    }
}

impl Lines {
    fn new(stream: BoxBytes) -> Self {
        let (reader, writer) = tokio::io::split(stream);
        Self { reader: LineReader { reader: BufReader::new(reader), line: Vec::new() }, writer }
    }

    /// Sends a request without a number, in seconds, and waits for its answer.
    pub(crate) async fn ask(
        &mut self,
        request: &Request<'_>,
        timeout: Duration,
    ) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        request.print(Unit::Seconds, &mut bytes);
        self.send(&bytes).await?;
        match tokio::time::timeout(timeout, self.reader.next()).await {
            Ok(line) => line,
            Err(_) => Err(io::ErrorKind::TimedOut.into()),
        }
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.writer.write_all(bytes).await?;
        self.writer.flush().await
    }

    /// Offers feature words and returns the accepted ones; none if the server does not know them.
    pub(crate) async fn greet(
        &mut self,
        name: &str,
        words: &[&str],
        timeout: Duration,
    ) -> io::Result<Option<Vec<String>>> {
        let request = Request::Hello { name, words: words.to_vec() };
        let answer = self.ask(&request, timeout).await?;
        let accepted = match Response::parse(Op::Hello, &answer, Unit::Seconds) {
            Some(Response::Value(words)) => String::from_utf8_lossy(words).into_owned(),
            Some(Response::Ok) => String::new(),
            Some(Response::Error(ErrorCode::Auth)) => {
                return Err(io::ErrorKind::PermissionDenied.into());
            }
            // What servers say that do not know the command.
            Some(Response::Error(ErrorCode::Error)) => return Ok(None),
            _ => return Err(io::Error::other(String::from_utf8_lossy(&answer).into_owned())),
        };
        Ok(Some(accepted.split(' ').map(str::to_owned).collect()))
    }
}
