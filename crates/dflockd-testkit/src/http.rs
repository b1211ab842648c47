//! HTTP/1.1 by hand over a blocking socket: requests can be cut anywhere, sent slowly or sent wrong.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustls::ClientConfig;
use serde_json::Value;
use socket2::SockRef;

use crate::line::{PATIENCE, handshake};
use crate::{LIMIT, eventually};

/// A request.
#[derive(Clone, Debug)]
pub struct Ask {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    body: Option<Vec<u8>>,
}

impl Ask {
    /// A request without a body.
    pub fn new(method: &str, path: &str) -> Self {
        Self { method: method.into(), path: path.into(), headers: Vec::new(), body: None }
    }

    /// A request for a page.
    pub fn get(path: &str) -> Self {
        Self::new("GET", path)
    }

    /// A request with a JSON body.
    pub fn post(path: &str, body: &Value) -> Self {
        Self::new("POST", path).body(body.to_string())
    }

    /// With another header.
    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// In a session.
    pub fn session(self, id: &str) -> Self {
        self.header("X-Dflockd-Session", id)
    }

    /// With the token of an operator.
    pub fn admin(self, token: &str) -> Self {
        self.header("X-Dflockd-Admin", token)
    }

    /// With a body.
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.body = Some(body.into());
        self
    }

    /// What goes over the wire.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.head(self.body.as_ref().map(Vec::len));
        bytes.extend(self.body.iter().flatten());
        bytes
    }

    /// Everything before the body, which is announced with this length.
    pub fn head(&self, length: Option<usize>) -> Vec<u8> {
        let mut text = format!("{} {} HTTP/1.1\r\n", self.method, self.path);
        if !self.headers.iter().any(|(name, _)| name == "Host") {
            text += "Host: localhost\r\n";
        }
        for (name, value) in &self.headers {
            text += &format!("{name}: {value}\r\n");
        }
        if let Some(length) = length {
            text += &format!("Content-Length: {length}\r\n");
        } else if self.method == "POST" || self.method == "PUT" {
            text += "Content-Length: 0\r\n";
        }
        text += "\r\n";
        text.into_bytes()
    }
}

/// An answer.
#[derive(Clone, Debug)]
pub struct Reply {
    /// The status code.
    pub status: u16,
    /// All headers, in order.
    pub headers: Vec<(String, String)>,
    /// The body, whole.
    pub body: Vec<u8>,
}

impl Reply {
    /// The header `name`, if it is there.
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut found = self.headers.iter().filter(|(known, _)| known.eq_ignore_ascii_case(name));
        found.next().map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The value of a metric on a page of them, by its name and its labels as they are written.
    #[track_caller]
    pub fn metric(&self, name: &str) -> f64 {
        let page = self.text();
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.unwrap_or_else(|| panic!("no {name} in {page}")).parse().expect("a number")
    }

    /// The JSON of a success.
    #[track_caller]
    pub fn ok(&self) -> Value {
        assert_eq!(self.status, 200, "{}", self.text());
        self.json()
    }

    /// A body of JSON in the form in which all are.
    #[track_caller]
    pub fn json(&self) -> Value {
        assert_eq!(self.header("content-type"), Some("application/json"), "{self:?}");
        assert_eq!(self.header("x-content-type-options"), Some("nosniff"), "{self:?}");
        assert!(self.body.ends_with(b"\n"), "no LF behind {}", self.text());
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// A success that says nothing.
    #[track_caller]
    pub fn empty(&self) {
        assert_eq!(self.status, 204, "{}", self.text());
        assert!(self.body.is_empty() && self.header("transfer-encoding").is_none(), "{self:?}");
    }

    /// A refusal; gives its detail.
    #[track_caller]
    pub fn refused(&self, status: u16, code: &str) -> String {
        assert_eq!(self.status, status, "instead of {code}: {}", self.text());
        let error = self.json();
        assert_eq!(error["error"], code, "{error}");
        let members = error.as_object().unwrap();
        assert!(members.keys().all(|name| name == "error" || name == "detail"), "{error}");
        members.get("detail").map_or_else(String::new, |text| text.as_str().unwrap().to_owned())
    }

    /// That something was wrong with a request of which there are many.
    #[track_caller]
    pub fn bad_for(&self, which: &str) {
        assert_eq!(self.status, 400, "{which}: {}", self.text());
        self.bad();
    }

    /// What was wrong with a request.
    #[track_caller]
    pub fn bad(&self) -> String {
        let detail = self.refused(400, "bad_request");
        assert!(!detail.is_empty(), "no detail");
        detail
    }
}

/// What came of a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Got {
    /// Bytes.
    More,
    /// Closed or reset by the server.
    End,
    /// Neither in time.
    Nothing,
}

trait Stream: Read + Write + Send {}

impl<T: Read + Write + Send> Stream for T {}

/// One connection.
pub struct Wire {
    stream: Box<dyn Stream>,
    /// Below TLS, if there is any.
    pub socket: TcpStream,
    buffer: Vec<u8>,
    /// Whether the next answer is one to HEAD.
    headless: bool,
}

impl Wire {
    /// A connection to a server that may not listen.
    pub fn connect(address: SocketAddr, tls: Option<&Arc<ClientConfig>>) -> std::io::Result<Self> {
        let socket = TcpStream::connect(address)?;
        socket.set_nodelay(true)?;
        socket.set_write_timeout(Some(LIMIT))?;
        Self::over(socket, tls)
    }

    /// A connection over a socket.
    pub fn over(socket: TcpStream, tls: Option<&Arc<ClientConfig>>) -> std::io::Result<Self> {
        let other = socket.try_clone()?;
        let stream: Box<dyn Stream> = match tls {
            None => Box::new(socket),
            Some(config) => Box::new(handshake(socket, Arc::clone(config))?),
        };
        Ok(Self { stream, socket: other, buffer: Vec::new(), headless: false })
    }

    /// A connection as soon as the server listens.
    #[track_caller]
    pub fn open(address: SocketAddr, tls: Option<&Arc<ClientConfig>>) -> Self {
        eventually(&format!("a connection to {address}"), || Self::connect(address, tls).ok())
    }

    /// Sends bytes as they are.
    #[track_caller]
    pub fn send(&mut self, bytes: impl AsRef<[u8]>) {
        self.try_send(bytes).unwrap();
    }

    /// Sends to a server that may be gone.
    pub fn try_send(&mut self, bytes: impl AsRef<[u8]>) -> std::io::Result<()> {
        self.stream.write_all(bytes.as_ref())?;
        self.stream.flush()
    }

    /// Sends a request without waiting for its answer.
    #[track_caller]
    pub fn begin(&mut self, ask: &Ask) {
        self.headless = ask.method == "HEAD";
        self.send(ask.bytes());
    }

    /// A request and its answer.
    #[track_caller]
    pub fn ask(&mut self, ask: &Ask) -> Reply {
        self.begin(ask);
        self.reply()
    }

    /// The next answer, which must come.
    #[track_caller]
    pub fn reply(&mut self) -> Reply {
        self.try_reply(LIMIT).unwrap_or_else(|got| panic!("{got:?} instead of an answer"))
    }

    /// The next answer, if there is one before the time is over.
    pub fn try_reply(&mut self, time: Duration) -> Result<Reply, Got> {
        let until = Instant::now() + time;
        let mut reply = self.head(until)?;
        let bodiless = self.headless || matches!(reply.status, 100..200 | 204 | 304);
        self.headless = false;
        if bodiless {
            return Ok(reply);
        }
        if let Some(length) = reply.header("content-length") {
            let length: usize = length.parse().expect("a length");
            while self.buffer.len() < length {
                self.more(until)?;
            }
            reply.body = self.buffer.drain(..length).collect();
        } else if reply.header("transfer-encoding") == Some("chunked") {
            while let Some(chunk) = self.chunk(until)? {
                reply.body.extend(chunk);
            }
        } else {
            while self.more(until).is_ok() {}
            reply.body = std::mem::take(&mut self.buffer);
        }
        Ok(reply)
    }

    /// The beginning of an answer, without its body.
    pub fn head(&mut self, until: Instant) -> Result<Reply, Got> {
        let end = loop {
            if let Some(end) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break end;
            }
            self.more(until)?;
        };
        let head: Vec<u8> = self.buffer.drain(..end + 4).take(end).collect();
        let head = String::from_utf8(head).expect("a head is text");
        let mut lines = head.split("\r\n");
        let first = lines.next().unwrap_or_default();
        let status = first.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
        let status = status.and_then(|code| code.parse().ok());
        let status = status.unwrap_or_else(|| panic!("no status line: {first}"));
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(':').unwrap_or_else(|| panic!("{line}"));
            (name.to_owned(), value.trim().to_owned())
        });
        Ok(Reply { status, headers: headers.collect(), body: Vec::new() })
    }

    /// The next piece of a chunked body, none at its end.
    pub fn chunk(&mut self, until: Instant) -> Result<Option<Vec<u8>>, Got> {
        loop {
            if let Some(end) = self.buffer.windows(2).position(|two| two == b"\r\n") {
                let size = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
                let size = usize::from_str_radix(&size, 16).expect("a size");
                let whole = end + 2 + size + 2;
                if self.buffer.len() >= whole {
                    let chunk = self.buffer[end + 2..end + 2 + size].to_vec();
                    self.buffer.drain(..whole);
                    return Ok((size > 0).then_some(chunk));
                }
            }
            self.more(until)?;
        }
    }

    /// Reads once.
    fn more(&mut self, until: Instant) -> Result<(), Got> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Got::Nothing);
            }
            let _ = self.socket.set_read_timeout(Some(left));
            let mut bytes = [0; 64 * 1024];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Err(Got::End),
                Ok(count) => {
                    self.buffer.extend_from_slice(&bytes[..count]);
                    return Ok(());
                }
                Err(error) if PATIENCE.contains(&error.kind()) => {}
                // A reset is an end, too.
                Err(_) => return Err(Got::End),
            }
        }
    }

    /// What comes next, whatever it is; bytes are kept.
    pub fn hear(&mut self, time: Duration) -> Got {
        match self.more(Instant::now() + time) {
            Ok(()) => Got::More,
            Err(got) => got,
        }
    }

    /// That the server closes, whatever it says before.
    #[track_caller]
    pub fn expect_end(&mut self) {
        let until = Instant::now() + LIMIT;
        loop {
            match self.more(until) {
                Ok(()) => {}
                Err(Got::End) => return,
                Err(got) => panic!("{got:?} instead of the end"),
            }
        }
    }

    /// Takes everything that was read and not used.
    pub fn taken(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.buffer)
    }

    /// Reads until so many bytes are there.
    pub fn exactly(&mut self, count: usize) -> Result<Vec<u8>, Got> {
        let until = Instant::now() + LIMIT;
        while self.buffer.len() < count {
            self.more(until)?;
        }
        Ok(self.buffer.drain(..count).collect())
    }

    /// Says that nothing more will be sent.
    pub fn half_close(&self) {
        self.socket.shutdown(Shutdown::Write).unwrap();
    }

    /// Ends with a reset, as a crashed machine's kernel would.
    pub fn reset(self) {
        SockRef::from(&self.socket).set_linger(Some(Duration::ZERO)).unwrap();
    }

    /// Turns into a stream of events, once its head has come.
    #[track_caller]
    pub fn into_events(mut self) -> Events {
        let head = self.head(Instant::now() + LIMIT).expect("an answer");
        assert_eq!(head.status, 200, "{head:?}");
        assert_eq!(head.header("content-type"), Some("text/event-stream"));
        assert_eq!(head.header("cache-control"), Some("no-cache"));
        assert_eq!(head.header("x-accel-buffering"), Some("no"));
        let mut events = Events { wire: self, text: String::new(), pings: 0 };
        let first = events.block(LIMIT).expect("the first bytes");
        assert_eq!(first, ":ok", "the first bytes");
        events
    }
}

/// One event of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What happened.
    pub name: String,
    /// Where to go on after it.
    pub id: Option<String>,
    /// What is told about it.
    pub data: Value,
}

/// A stream of server-sent events.
pub struct Events {
    wire: Wire,
    text: String,
    /// Comments that were skipped.
    pub pings: usize,
}

impl Events {
    /// The next event, which must come.
    #[expect(clippy::should_implement_trait, reason = "the end is a failure")]
    #[track_caller]
    pub fn next(&mut self) -> Event {
        self.hear(LIMIT).unwrap_or_else(|got| panic!("{got:?} instead of an event"))
    }

    /// The next event of some name, with these data.
    #[track_caller]
    pub fn expect(&mut self, name: &str, data: &Value) {
        let event = self.next();
        assert_eq!((event.name.as_str(), &event.data), (name, data));
    }

    /// The next event, if there is one before the time is over.
    pub fn hear(&mut self, time: Duration) -> Result<Event, Got> {
        let until = Instant::now() + time;
        loop {
            let block = self.block(until.saturating_duration_since(Instant::now()))?;
            // On a watch it comes with a bookmark: nothing up to there is missing.
            let comment = block.lines().last().filter(|line| line.starts_with(':'));
            if let Some(comment) = comment {
                assert_eq!(comment, ":ping", "a comment");
                self.pings += 1;
                continue;
            }
            let field = |name: &str| {
                let mut lines = block.lines();
                lines
                    .find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
                    .map(str::to_owned)
            };
            let data = field("data").unwrap_or_else(|| panic!("no data: {block}"));
            return Ok(Event {
                name: field("event").unwrap_or_else(|| panic!("no event: {block}")),
                id: field("id"),
                data: serde_json::from_str(&data).unwrap_or_else(|error| panic!("{error}: {data}")),
            });
        }
    }

    /// The text up to the next empty line.
    fn block(&mut self, time: Duration) -> Result<String, Got> {
        let until = Instant::now() + time;
        loop {
            if let Some(end) = self.text.find("\n\n") {
                let block = self.text[..end].to_owned();
                self.text.drain(..end + 2);
                return Ok(block);
            }
            let Some(chunk) = self.wire.chunk(until)? else { return Err(Got::End) };
            self.text += std::str::from_utf8(&chunk).expect("events are text");
        }
    }

    /// That the stream ends, after whatever is left of it.
    #[track_caller]
    pub fn expect_end(&mut self) {
        loop {
            match self.hear(LIMIT) {
                Ok(_) => {}
                Err(Got::End) => return,
                Err(got) => panic!("{got:?} instead of the end"),
            }
        }
    }

    /// Ends with a reset.
    pub fn reset(self) {
        self.wire.reset();
    }
}

/// A key as a segment of a path.
pub fn escape(key: impl AsRef<[u8]>) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    let escaped = key.as_ref().iter().map(|&byte| {
        if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }
    });
    escaped.collect()
}
