//! The line protocol as a client sees it: requests as bytes, lines of answers and pushes.
//!
//! What a line means is read here from the documents, not from the server's own translation: an answer must be what one
//! of the outcomes in the log looks like on a line.

use std::collections::{BTreeMap, VecDeque};

use dflockd_core::{
    Command, Expect, Outcome, Push, Refusal, RequestId, Span, Subscription, command,
};
use dflockd_replica::types::Bits128;
use dflockd_wire::{
    Decoded, Decoder, ErrorCode, Op as LineOp, Push as PushLine, Request, Response, Unit,
    print_number, split_number,
};

use crate::history::Asked;
use crate::invariants::Broken;
use crate::op::Op;
use crate::oracle::Oracle;
use crate::process::{Api, borrowed};

/// How a client speaks to the server, as long as it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Face {
    /// Like the handlers of HTTP and gRPC.
    Calls,
    /// Lines without a greeting: whole seconds, one request after the other.
    Plain,
    /// Lines with a greeting.
    Greeted,
    /// Numbered lines, answered in any order.
    Numbered,
    /// Numbered lines of a session that is kept.
    Kept,
}

impl Face {
    /// All of them.
    pub const ALL: &[Self] = &[Self::Calls, Self::Plain, Self::Greeted, Self::Numbered, Self::Kept];

    /// What the process sees.
    #[must_use]
    pub fn api(self) -> Api {
        if self == Self::Calls { Api::Calls } else { Api::Line }
    }
}

/// A request that has no answer yet.
#[derive(Clone, Debug)]
pub struct Sent {
    /// Its number among the requests of the client.
    pub request: RequestId,
    op: LineOp,
    is_greeting: bool,
}

/// One connection, at the end of the client.
pub struct LineLink {
    face: Face,
    unit: Unit,
    /// The greeting was answered, if there is one.
    pub is_ready: bool,
    input: Vec<u8>,
    waiting: VecDeque<Sent>,
    open: BTreeMap<u64, Sent>,
    last_number: u64,
    /// How many answers were heard.
    pub answers: usize,
}

/// What a line says.
pub enum Heard<'a> {
    /// The answer to a request.
    Answer(Sent, Response<'a>),
    /// The answer to the greeting: the words, or why not.
    Greeted(Sent, Result<&'a [u8], ErrorCode>),
    /// A push.
    Push(PushLine<'a>),
    /// The session is another connection's now.
    Detached,
}

impl LineLink {
    /// A connection that has just been opened, and the bytes to begin with. `attach` is the secret of a session to go
    /// on with, `request` the number of the greeting among the client's requests.
    #[must_use]
    pub fn open(face: Face, request: RequestId, attach: Option<Bits128>) -> (Self, Vec<u8>) {
        let unit = if face == Face::Plain { Unit::Seconds } else { Unit::Millis };
        let mut link = Self {
            face,
            unit,
            is_ready: face == Face::Plain,
            input: Vec::new(),
            waiting: VecDeque::new(),
            open: BTreeMap::new(),
            last_number: 0,
            answers: 0,
        };
        let mut bytes = Vec::new();
        if !link.is_ready {
            let secret = attach.map(|secret| format!("attach={}", hex(&secret)));
            let mut words = vec!["ms", "fence", "lease-status", "lost"];
            if matches!(face, Face::Numbered | Face::Kept) {
                words.push("mux");
            }
            match (&secret, face) {
                (Some(secret), _) => words.push(secret),
                (None, Face::Kept) => words.push("keep"),
                (None, Face::Calls | Face::Plain | Face::Greeted | Face::Numbered) => {}
            }
            let hello = Request::Hello { name: "simulated", words };
            hello.print(Unit::Seconds, &mut bytes);
            link.waiting.push_back(Sent { request, op: LineOp::Hello, is_greeting: true });
        }
        (link, bytes)
    }

    /// Whether requests carry numbers.
    #[must_use]
    pub fn is_numbered(&self) -> bool {
        matches!(self.face, Face::Numbered | Face::Kept)
    }

    /// Whether the client hears of lost holds.
    #[must_use]
    pub fn wants_lost(&self) -> bool {
        self.face != Face::Plain
    }

    /// The number that the next request is to have, if requests of this connection are numbered and not kept.
    pub fn next_number(&mut self) -> u64 {
        self.last_number += 1;
        self.last_number
    }

    /// The bytes of a request, and what the server sees in them. None if the line protocol has no word for it.
    pub fn print(&mut self, op: &Op, request: RequestId) -> Option<(Vec<u8>, Op)> {
        let asked = self.request(op)?;
        let line = asked.op();
        let mut bytes = Vec::new();
        asked.print(self.unit, &mut bytes);
        let op = self.read_back(op, line, &bytes);
        let sent = Sent { request, op: line, is_greeting: false };
        if self.is_numbered() {
            let mut numbered = Vec::new();
            print_number(request.0, &mut numbered);
            numbered.append(&mut bytes);
            bytes = numbered;
            self.open.insert(request.0, sent);
        } else {
            self.waiting.push_back(sent);
        }
        Some((bytes, op))
    }

    fn request<'a>(&self, op: &'a Op) -> Option<Request<'a>> {
        let command = match op {
            Op::Do(command) | Op::Wait(command, ..) => command.get(),
            Op::Read(query) => return Some(Request::Query(borrowed(query))),
            Op::Sync => return Some(Request::Barrier),
            Op::RenewSession(..) | Op::Keep { .. } | Op::Attach { .. } | Op::Kick { .. } => {
                return None;
            }
        };
        let can = match &command {
            Command::Cancel(_) | Command::Acknowledge(_) => self.is_numbered(),
            Command::KvCompareAndSet(command::KvCompareAndSet { expect, .. }) => {
                !matches!(expect, Expect::Revision(_))
            }
            Command::Subscribe(command::Subscribe { to: Subscription::Changes { from, .. } }) => {
                from.is_none()
            }
            Command::ForceRelease(_) | Command::RenewSession(_) => false,
            Command::Acquire(_)
            | Command::Enqueue(_)
            | Command::Wait(_)
            | Command::Release(_)
            | Command::Renew(_)
            | Command::Add(_)
            | Command::CounterSet(_)
            | Command::KvSet(_)
            | Command::KvDelete(_)
            | Command::Push(_)
            | Command::Pop(_)
            | Command::BarrierWait(_)
            | Command::Signal(_)
            | Command::Subscribe(_)
            | Command::Unsubscribe(_) => true,
            Command::Undo(_)
            | Command::Tick
            | Command::NewTerm
            | Command::Detach { .. }
            | Command::Attach
            | Command::Identify { .. }
            | Command::Orphan { .. }
            | Command::EndSession { .. } => false,
        };
        can.then_some(Request::Command(command))
    }

    /// The request as the server reads it: lengths of time are whole units there.
    fn read_back(&self, op: &Op, line: LineOp, bytes: &[u8]) -> Op {
        let mut decoder = Decoder::new(1 << 20);
        let Decoded::Frame { frame, .. } = decoder.decode(bytes) else { return op.clone() };
        match (op, Request::parse(line, &frame, self.unit)) {
            (Op::Do(_), Ok(Request::Command(command))) => Op::Do(command.into()),
            (Op::Wait(_, mode, lease), Ok(Request::Command(command))) => {
                Op::Wait(command.into(), *mode, *lease)
            }
            (op, _) => op.clone(),
        }
    }

    /// Takes bytes of the server. The lines that are complete then.
    pub fn take_lines(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.input.extend_from_slice(bytes);
        let mut lines: Vec<Vec<u8>> =
            self.input.split(|&byte| byte == b'\n').map(Vec::from).collect();
        self.input = lines.pop().unwrap_or_default();
        lines
    }

    /// What a line says.
    pub fn read<'a>(&mut self, line: &'a [u8]) -> Result<Heard<'a>, Broken> {
        let broken = |what: &str| {
            let what = format!("{what}: {}", line.escape_ascii());
            Err(Broken::new("lines", what))
        };
        if line == b"detached" {
            return Ok(Heard::Detached);
        }
        if let Some(push) = PushLine::parse(line) {
            return Ok(Heard::Push(push));
        }
        let (sent, answer) = match self.waiting.front() {
            Some(Sent { is_greeting: true, .. }) => (self.waiting.pop_front(), line),
            Some(_) | None if self.is_numbered() => match split_number(line) {
                Some((number, answer)) => (self.open.remove(&number), answer),
                None => return broken("an answer without a number"),
            },
            Some(_) | None => (self.waiting.pop_front(), line),
        };
        let Some(sent) = sent else { return broken("an answer that nobody waits for") };
        self.answers += 1;
        let Some(response) = Response::parse(sent.op, answer, self.unit) else {
            return broken(&format!("no answer to {:?}", sent.op));
        };
        if !sent.is_greeting {
            return Ok(Heard::Answer(sent, response));
        }
        if let Response::Value(words) = response {
            self.is_ready = true;
            return Ok(Heard::Greeted(sent, Ok(words)));
        }
        if let Response::Error(code) = response {
            return Ok(Heard::Greeted(sent, Err(code)));
        }
        broken(&format!("{response:?} answers a greeting"))
    }

    /// The outcome that an answer stands for: one that the log has for the request, or one of those that mean that
    /// nobody could decide.
    #[expect(clippy::wildcard_enum_match_arm, reason = "reads have few answers, and so has doubt")]
    pub fn outcome(
        &self,
        asked: &Asked,
        response: &Response<'_>,
        oracle: &Oracle,
    ) -> Result<Outcome, Broken> {
        if let Op::Read(_) = asked.op {
            let read = match *response {
                Response::Number(number) => Some(Outcome::Number(number)),
                Response::Value(value) => Some(Outcome::Value(value.into())),
                Response::Nil => Some(Outcome::Empty),
                _ => None,
            };
            if let Some(read) = read {
                return Ok(read);
            }
        }
        let told = asked.session.and_then(|session| oracle.replies.get(&(session, asked.request)));
        let told = told.into_iter().flatten().map(|(_, outcome)| outcome);
        if let Some(outcome) = told.clone().find(|outcome| self.fits(outcome, response)) {
            return Ok(outcome.clone());
        }
        let is_own =
            matches!(asked.op.command(), Some(Command::Cancel(_) | Command::Acknowledge(_)));
        match response {
            Response::Ok if is_own => Ok(Outcome::Done),
            Response::Error(ErrorCode::Unknown) => Ok(Outcome::Refused(Refusal::Forgotten)),
            // Without a word of its own for it, `error` may say that nobody could decide.
            Response::Error(ErrorCode::Unavailable | ErrorCode::Error | ErrorCode::Draining) => {
                Ok(Outcome::Refused(Refusal::Unavailable))
            }
            _ => {
                let told: Vec<_> = told.collect();
                let what = format!("{response:?} answers {asked:?}, the log says {told:?}");
                Err(Broken::new("lines", what))
            }
        }
    }

    /// Whether an outcome looks like this on a line.
    fn fits(&self, outcome: &Outcome, response: &Response<'_>) -> bool {
        let is_lease = |lease: Span, told: Span| self.rounded_down(lease) == told;
        let is_fence = |fence: u64, told: Option<u64>| told.is_none_or(|told| told == fence);
        match (outcome, response) {
            (Outcome::Done | Outcome::Written(_), Response::Ok)
            | (Outcome::Queued, Response::Queued)
            | (Outcome::Timeout, Response::Timeout)
            | (Outcome::Timeout | Outcome::Empty, Response::Nil)
            | (Outcome::Conflict, Response::CasConflict) => true,
            (Outcome::Granted(grant), Response::Granted { token, lease, fence })
            | (Outcome::Acquired(grant), Response::Acquired { token, lease, fence }) => {
                grant.token == *token
                    && is_lease(grant.lease, *lease)
                    && is_fence(grant.token.fence.0, *fence)
            }
            (Outcome::Renewed { fence, lease }, Response::Renewed { remaining, fence: told }) => {
                is_lease(*lease, *remaining) && is_fence(fence.0, *told)
            }
            (Outcome::Number(number), Response::Number(told)) => number == told,
            (Outcome::Value(value) | Outcome::Popped { value, .. }, Response::Value(told)) => {
                **value == **told
            }
            (Outcome::Refused(refusal), Response::Error(code)) => {
                refusal.spec().line == *code || *code == ErrorCode::Error
            }
            (Outcome::Compacted(_), Response::Error(ErrorCode::Error)) => true,
            _ => false,
        }
    }

    /// A lease as it is told: rounded down to whole units, but never to none.
    fn rounded_down(&self, lease: Span) -> Span {
        let unit = match self.unit {
            Unit::Seconds => 1_000_000_000,
            Unit::Millis => 1_000_000,
        };
        Span((lease.0 / unit).max(1) * unit)
    }
}

/// Whether a push looks like this on a line.
#[must_use]
pub fn is_push(push: &Push, line: &PushLine<'_>) -> bool {
    match (push, line) {
        (Push::Signal { channel, payload }, PushLine::Signal { channel: to, payload: what }) => {
            **channel == **to && **payload == **what
        }
        (Push::Change(change), PushLine::Watch { event, key }) => {
            change.event.name() == *event && *change.key == **key
        }
        (Push::Leader { event, key }, PushLine::Leader { event: told, key: of }) => {
            event.name() == *told && **key == **of
        }
        (
            Push::Lost { key, fence, reason },
            PushLine::Lost { key: of, fence: hold, reason: why },
        ) => **key == **of && fence.0 == *hold && reason.name() == *why,
        _ => false,
    }
}

/// The secret in the answer to a greeting, if the session is kept.
#[must_use]
pub fn secret(words: &[u8]) -> Option<Bits128> {
    let words = std::str::from_utf8(words).ok()?;
    let digits = words.split(' ').find_map(|word| word.strip_prefix("keep="))?;
    let mut secret = Bits128::default();
    for (at, byte) in secret.iter_mut().enumerate() {
        *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
    }
    Some(secret)
}

fn hex(bytes: &[u8]) -> String {
    use std::fmt::Write;
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}
