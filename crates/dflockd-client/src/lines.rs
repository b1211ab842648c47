//! The line protocol as a transport.

use std::collections::HashMap;
use std::io;
use std::pin::pin;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Op, Push, Request, Unit, print_number, split_number};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, ReadHalf, WriteHalf};

use crate::link::OnDisconnect;
use crate::reply::{Incoming, Reply};
use crate::stream::{BoxBytes, Greeting, Session};

/// Longest line a server may send; `stats` can be large.
const LINE_BYTES_MAX: usize = 256 * 1024 * 1024;

/// What a connection with a session must do, or can.
const SESSION_WORDS: [&str; 5] = ["mux", "ms", "fence", "lost", "lease-status"];

/// A request as this transport sends it.
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
    pub(crate) fn new(stream: BoxBytes) -> Self {
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

    pub(crate) fn unit(&self) -> Unit {
        self.reader.unit
    }

    /// Tells who it is and asks for a session.
    pub(crate) async fn greet(&mut self, name: &str, session: Session<'_>) -> io::Result<Greeting> {
        let (extra, is_kept) = match session {
            Session::None | Session::New(OnDisconnect::Release) => (None, false),
            Session::New(OnDisconnect::Keep) => (Some("keep".to_owned()), true),
            Session::Attach(session) | Session::TakeOver(session) => {
                (Some(format!("attach={session}")), true)
            }
        };
        let is_plain = matches!(session, Session::None);
        let mut words = if is_plain { Vec::new() } else { SESSION_WORDS.to_vec() };
        words.extend(extra.as_deref());
        if matches!(session, Session::TakeOver(_)) {
            words.push("last");
        }
        let request = Request::Hello { name, words };
        self.queue(None, &Message::new(&request, Unit::Seconds));
        self.flush(Duration::MAX, |_| {}).await?;
        let reply = loop {
            if let Incoming::Reply(None, reply) = self.next().await? {
                break reply;
            }
        };
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
        let last = accepted.split(' ').find_map(|word| word.strip_prefix("last=")?.parse().ok());
        if has("ms") {
            self.reader.unit = Unit::Millis;
        }
        let suits = has("mux") && has("ms") && has("fence") && (!is_kept || session.is_some());
        let accepted = Greeting::Accepted { session, last };
        Ok(if suits || is_plain { accepted } else { Greeting::Unsuited })
    }

    /// Ends the connection in order.
    pub(crate) async fn close(mut self) {
        let _ = self.writer.shutdown().await;
    }
}
