//! One conversation of the line protocol, without sockets: bytes in, bytes out, deadlines.
//!
//! Input: [`Connection::handle_input`], [`Connection::handle_end_of_input`],
//! [`Connection::handle_messages`], [`Connection::handle_time`], [`Connection::handle_drain`].
//! Output: [`Connection::output`], [`Connection::next_deadline`], [`Connection::is_over`]. After an input
//! the shell writes what there is to write and asks for the next deadline.
//!
//! What other connections cause (grants, pushes) arrives in the [`Inbox`], which any thread may fill.

mod greeting;
mod inbox;
mod undecided;

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{
    Bytes, Command, Outcome, Refusal, RequestId, SessionId, Span, Timestamp, command,
};
use dflockd_engine::{Api, Attachment, PendingFlushes, Place, Submitted};
use dflockd_identity::Access;
use dflockd_replica::types::AutoRelease;
use dflockd_wire::{Decoded, Decoder, ErrorCode, Frame, Op, ParseError, Request, Response, Unit};

use self::greeting::Greeting;
use self::inbox::PUSHES_URGENT;
pub(crate) use self::inbox::push_bytes;
pub use self::inbox::{Inbox, Message, Text};
use self::undecided::Undecided;
use crate::audit::{AuditEvent, By, Via};
use crate::frontend::admission::NotServed;
use crate::frontend::auth::{Denied, Origin, Pass, TokenKind, WRONG_TOKEN_PAUSE, Who};
use crate::frontend::line::foreign::{FirstLine, Verdict};
use crate::frontend::line::translate::{self, ClientFeatures};
use crate::frontend::pool::Pool;
use crate::operate::{self, Backup};
use crate::report;
use crate::service::{ANSWER_BYTES_MAX, Service};
use rustls::pki_types::CertificateDer;

/// Unread input behind a blocking command at which the connection is closed as abusive.
const UNREAD_MAX: usize = 4096;
/// Output at which no further request is executed and no further message printed until it is written.
const OUTPUT_HIGH: usize = 64 * 1024;
/// Items of a list that are written down at once.
const ITEMS_BYTES_AT_ONCE: usize = 16 * 1024;
/// Requests for texts that may wait for the one that is being made; nothing behind them is executed.
const TEXTS_MAX: usize = 64;
/// Open requests of a numbered connection.
const OPEN_MAX: usize = 65_536;
/// How long an answer from behind a log is waited for when the client sends nothing more and the request may wait.
const LINGER: Span = Span::from_millis(250);
/// How long a client whose token was dropped has to read that.
const LAST_WORD: Span = Span::from_millis(500);
/// What may be kept of a request before its client has authenticated, unless a valid token is longer.
const STRANGER_BYTES_MAX: usize = 4096;
/// Room for the lines around a token.
const AUTH_LINES_BYTES_MAX: usize = 1024;
/// Progress that earns a slow reader a new write time limit: the longest line that every client can read.
const WRITE_PROGRESS: usize = 64 * 1024;

/// One conversation.
pub struct Connection {
    service: Arc<Service>,
    inbox: Arc<Inbox>,
    me: Attachment,
    peer: Arc<str>,
    origin: Origin,
    /// The token it came with.
    pass: Pass,
    /// Whose token that is.
    who: Who,
    /// Whose token the last request of an operator came with.
    operator: Option<Who>,
    /// How often tokens had been dropped when that was last looked at.
    generation: u64,
    /// A refusal that is told when the pause is over, and the number of its request.
    refusal: Option<Option<u64>>,
    failed_attaches: u8,
    /// The token it came with is no longer valid, and its client has until then to read that.
    revoked: Option<Timestamp>,
    phase: Phase,
    /// None once it is known what the client speaks.
    first_line: Option<FirstLine>,
    decoder: Decoder,
    /// Input that is not used yet: part of a request, or what came behind a blocking one.
    pending: Vec<u8>,
    output: Vec<u8>,
    /// How much of the output is written.
    written: usize,
    /// Push lines in the output.
    pushes_printed: usize,
    unit: Unit,
    client_features: ClientFeatures,
    /// Requests carry numbers and are answered in any order.
    numbered: bool,
    kept: bool,
    greeted: bool,
    /// No request was executed yet.
    fresh: bool,
    has_reference: bool,
    wants_redirect: bool,
    greeting: Option<Box<Greeting>>,
    /// The request that everything behind it waits for; never on a numbered connection.
    blocked: Option<(RequestId, Open)>,
    /// The requests of a numbered connection that are not answered.
    #[expect(
        clippy::box_collection,
        reason = "few connections are numbered, and all pay for the room"
    )]
    open: Option<Box<HashMap<RequestId, Open>>>,
    /// What the answers to open reads may have in bytes, at most.
    expected_bytes: usize,
    /// Answers that another thread makes, if any was asked for.
    texts: Option<Box<Texts>>,
    last_request: u64,
    /// The client sends nothing more.
    input_ended: bool,
    /// Not before then is a client that sends nothing more taken as gone because of a wait.
    linger_until: Timestamp,
    /// Waits end because the server shuts down.
    draining: bool,
    /// The request that is asked again as long as nobody can decide it. Only a client that has not greeted needs it:
    /// the others have a word for that.
    undecided: Option<Box<Undecided>>,
    /// How many requests there were.
    frames: u64,
    /// Answers that would be lost with the connection, until the output is written up to where they end.
    unwritten: VecDeque<(usize, Place, Outcome)>,
    /// Requests wait only for the output to be written.
    held_back: bool,
    /// What an operator of a cluster fetches piece by piece.
    backup: Option<Arc<Backup>>,
    deadlines: Deadlines,
    now: Timestamp,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// The first request must be `auth`.
    Stranger,
    Ready,
    /// No input counts any more; over once the output is written and this instant has come.
    Closing(Timestamp),
    Over,
}

/// A request that is not answered yet.
#[derive(Clone, Copy)]
struct Open {
    op: Op,
    /// Whether it may wait by its own will.
    may_wait: bool,
    /// Where what it may be given lives; none while a text is being made.
    place: Option<Place>,
}

impl Open {
    /// A request that is given nothing and does not wait.
    fn new(op: Op) -> Self {
        Self { op, may_wait: false, place: None }
    }
}

/// Answers that another thread makes, one at a time.
#[derive(Default)]
struct Texts {
    in_progress: bool,
    waiting: VecDeque<TextJob>,
}

struct TextJob {
    request: RequestId,
    pool: Arc<Pool>,
    make: Box<dyn FnOnce(&Service) -> Text + Send>,
}

#[derive(Default)]
struct Deadlines {
    /// For the line in progress.
    read: Option<Timestamp>,
    /// How many lines of how many requests there were when it was set.
    read_progress: (u64, usize),
    idle: Option<Timestamp>,
    write: Option<Timestamp>,
    /// How much has been written since it was set.
    write_progress: usize,
}

impl Connection {
    /// A conversation that begins now.
    #[must_use]
    pub fn new(service: Arc<Service>, inbox: Arc<Inbox>, me: Attachment, peer: Arc<str>) -> Self {
        let now = service.engine.clock().now();
        let phase = if service.auth.is_required() { Phase::Stranger } else { Phase::Ready };
        let who = service.auth.who(Pass::OPEN);
        let client_features = ClientFeatures {
            fence: service.wire_fence,
            lease_status: service.wire_fence,
            ..ClientFeatures::default()
        };
        inbox.set_bytes_max(service.pending_bytes_max);
        let mut connection = Self {
            decoder: Decoder::new(service.value_bytes_max),
            service,
            inbox,
            me,
            peer,
            origin: Origin::new(IpAddr::from(Ipv4Addr::LOCALHOST)),
            pass: Pass::OPEN,
            who,
            operator: None,
            generation: 0,
            refusal: None,
            failed_attaches: 0,
            revoked: None,
            phase,
            first_line: Some(FirstLine::default()),
            pending: Vec::new(),
            output: Vec::new(),
            written: 0,
            pushes_printed: 0,
            unit: Unit::Seconds,
            client_features,
            numbered: false,
            kept: false,
            greeted: false,
            fresh: true,
            has_reference: false,
            wants_redirect: false,
            greeting: None,
            blocked: None,
            open: None,
            expected_bytes: 0,
            texts: None,
            last_request: 0,
            input_ended: false,
            linger_until: now,
            draining: false,
            undecided: None,
            frames: 0,
            unwritten: VecDeque::new(),
            held_back: false,
            backup: None,
            deadlines: Deadlines::default(),
            now,
        };
        connection.arm();
        connection
    }

    /// Counts what it does wrong for this address; otherwise it counts for this machine.
    #[must_use]
    pub fn coming_from(mut self, address: IpAddr) -> Self {
        self.origin = Origin::new(address);
        self
    }

    /// The handshake of TLS is done: these are the certificates that its client has shown, its own first.
    pub(crate) fn set_certificates(&mut self, certificates: Option<&[CertificateDer<'static>]>) {
        self.origin = self.origin.clone().with_certificates(certificates);
    }

    /// The connection's number.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.me.id()
    }

    /// The request that everything behind it waits for, on a connection without numbers.
    #[must_use]
    pub fn blocked_on(&self) -> Option<RequestId> {
        self.blocked.as_ref().map(|(request, _)| *request)
    }

    /// Bytes from the client.
    pub fn handle_input(&mut self, bytes: &[u8], flushes: &mut PendingFlushes) {
        self.now = self.service.engine.clock().now();
        self.look_at_pass();
        if matches!(self.phase, Phase::Closing(_) | Phase::Over) {
            return;
        }
        if self.first_line.is_some() && self.turn_away(bytes) {
            return self.arm();
        }
        if self.pending.is_empty() {
            let used = self.execute(bytes, flushes);
            self.pending.extend_from_slice(&bytes[used..]);
            if bug(Bug::TornLine) && !self.pending.is_empty() && !self.is_blocked() {
                self.pending.push(b'\n');
                self.resume(flushes);
            }
        } else {
            self.pending.extend_from_slice(bytes);
            self.resume(flushes);
        }
        let replicated = self.service.engine.is_replicated();
        if self.is_blocked() && self.pending.len() >= UNREAD_MAX && !replicated {
            self.log("too much input behind a blocking command");
            self.phase = Phase::Over;
        }
        if self.phase == Phase::Stranger && self.pending.len() > self.stranger_bytes_max() {
            self.handle_long_line();
            self.pending = Vec::new();
        }
        self.arm();
    }

    /// Sends away who speaks another protocol, before anything of it is executed.
    fn turn_away(&mut self, bytes: &[u8]) -> bool {
        let verdict = self.first_line.as_mut().and_then(|first_line| first_line.read(bytes));
        let Some(verdict) = verdict else { return false };
        self.first_line = None;
        let Verdict::Foreign(protocol) = verdict else { return false };
        self.service.metrics.foreign.add(protocol);
        let kind = "closed: it does not speak the line protocol";
        if let Some(suppressed) = self.log_budget(kind) {
            tracing::warn!(peer = %self.peer, protocol = protocol.name(), suppressed, "{kind}");
        }
        self.pending = Vec::new();
        self.output.extend_from_slice(protocol.hint());
        self.close();
        true
    }

    /// The client sends nothing more. What it has sent is executed; if something waits then, the client is taken
    /// as gone.
    pub fn handle_end_of_input(&mut self) {
        self.now = self.service.engine.clock().now();
        self.input_ended = true;
        self.linger_until = self.now + LINGER;
        self.arm();
    }

    /// Handles what others left in the inbox.
    pub fn handle_messages(&mut self, flushes: &mut PendingFlushes) {
        self.now = self.service.engine.clock().now();
        self.look_at_pass();
        let ending = self.inbox.ending.swap(false, Ordering::AcqRel);
        if self.revoked.is_some() {
            // Nothing more is told, so nothing is given either.
            let untold = self.inbox.take();
            self.give_back(untold, flushes);
            return self.arm();
        }
        if ending && self.inbox.overflowed.load(Ordering::Relaxed) {
            self.log("closed: it reads its answers and pushes too slowly");
            self.service.metrics.slow_reader(Api::Line);
            // What was put aside stays there: after a line that was dropped nothing more may be told.
            self.phase = Phase::Over;
            return self.arm();
        }
        let had_messages = self.print_messages();
        if ending {
            if self.kept && self.inbox.taken_over.load(Ordering::Relaxed) {
                // So that the client does not take back what another connection has taken over.
                self.output.extend_from_slice(b"detached\n");
            }
            self.close();
        }
        if had_messages {
            self.resume(flushes);
        }
        self.arm();
    }

    /// An instant that [`Connection::next_deadline`] named may have come.
    pub fn handle_time(&mut self, flushes: &mut PendingFlushes) {
        self.now = self.service.engine.clock().now();
        let now = self.now;
        if self.again_at().is_some_and(|at| at <= now) {
            self.ask_again(flushes);
        }
        let due = |deadline: Option<Timestamp>| deadline.is_some_and(|at| at <= now);
        if due(self.deadlines.write) {
            self.log("closed: it takes in nothing of its answers");
            self.service.metrics.slow_reader(Api::Line);
            self.phase = Phase::Over;
        }
        if let Phase::Closing(at) = self.phase
            && at <= self.now
            && let Some(number) = self.refusal.take()
        {
            self.respond(number, &Response::Error(ErrorCode::Auth));
        }
        match self.phase {
            Phase::Stranger if due(self.deadlines.read) => {
                self.service.metrics.auth_failed(Api::Line, TokenKind::Client, Denied::Wrong);
                self.refuse(None);
            }
            Phase::Ready if due(self.deadlines.read) => {
                self.reject(self.no_number(), ParseError::READ_TIMEOUT);
                self.close();
            }
            Phase::Ready if due(self.deadlines.idle) => {
                self.respond(self.no_number(), &Response::Error(ErrorCode::Error));
                self.close();
            }
            Phase::Stranger | Phase::Ready | Phase::Closing(_) | Phase::Over => {}
        }
        self.arm();
    }

    /// The server is shutting down: waits end, and so does the connection if it had one, or if it has nothing that
    /// keeps it.
    pub fn handle_drain(&mut self, flushes: &mut PendingFlushes) {
        self.now = self.service.engine.clock().now();
        if self.undecided.take_if(|undecided| undecided.again_at.is_some()).is_some() {
            self.refuse_for_drain(None);
            return self.arm();
        }
        let open = self.open.iter().flat_map(|open| open.iter());
        let open = open.map(|(request, open)| (*request, *open));
        let mut waiting: Vec<_> = self.blocked.into_iter().chain(open).collect();
        waiting.sort_by_key(|(request, _)| *request);
        if waiting.is_empty() {
            if !self.is_within_request() && self.service.is_idle(self.me.id()) {
                self.close();
                self.arm();
            }
            return;
        }
        self.draining = true;
        if let Some(texts) = &mut self.texts {
            texts.waiting.clear();
        }
        let goes_on = self.kept && self.numbered && self.service.engine.is_replicated();
        for (request, open) in waiting {
            match open.place {
                // The session goes on through another member, with its places in queues, and the client asks again
                // there.
                Some(_) if goes_on => {
                    self.take_open(request);
                }
                // What comes of it arrives in the inbox, behind a log later: the end of the wait, or what came first.
                Some(place) => self.service.engine.cancel(&self.me, request, place, flushes),
                None => {
                    self.take_open(request);
                    let number = self.number_of(request);
                    self.respond(number, &Response::Error(ErrorCode::Draining));
                }
            }
        }
        self.print_messages();
        self.arm();
    }

    /// A token is no longer valid: what came with it ends, and its client is told why.
    pub fn handle_revoke(&mut self) {
        self.now = self.service.engine.clock().now();
        self.look_at_pass();
    }

    /// Ends the conversation if a token was dropped that it came with.
    fn look_at_pass(&mut self) {
        let generation = self.service.auth.generation();
        if generation == self.generation {
            return;
        }
        self.generation = generation;
        let is_valid = self.service.auth.is_valid(TokenKind::Client, self.pass);
        if self.phase != Phase::Ready || is_valid {
            return;
        }
        self.revoked = Some(self.now + LAST_WORD);
        self.service.metrics.revoked(Api::Line);
        tracing::info!(peer = %self.peer, conn = self.me.id().0, "closed: its token was dropped");
        self.respond(self.no_number(), &Response::Error(ErrorCode::Auth));
        self.close();
        self.arm();
    }

    /// Ends the session, or leaves it to be attached again. To be called once, when the connection is over.
    pub fn end(&mut self, flushes: &mut PendingFlushes) {
        self.phase = Phase::Over;
        let engine = Arc::clone(&self.service.engine);
        // Nobody could ever claim what comes of it; places taken by an enqueue stay.
        if self.kept
            && !self.numbered
            && let Some((request, Open { place: Some(place), .. })) = self.blocked
        {
            engine.cancel(&self.me, request, place, flushes);
        }
        // It may end by itself just when its token is dropped.
        let is_valid = self.service.auth.is_valid(TokenKind::Client, self.pass);
        if self.revoked.is_some() || self.kept && !is_valid {
            let request = self.request_id(None);
            engine.end_revoked(&self.me, request, flushes);
        } else {
            if self.kept {
                self.service.detached.note(&self.me, self.pass);
            }
            let referenced = self.has_reference && !self.kept;
            engine.close(&self.me, self.input_ended, referenced, flushes);
        }
        let left = self.inbox.shut();
        // What a numbered request of a kept session came to is told when it is repeated. All others give back what
        // nobody was told, after their end: a client with a reference may come back for it.
        if !(self.kept && self.numbered) {
            for (_, place, outcome) in self.unwritten.drain(..) {
                engine.undo(place, &outcome, flushes);
            }
            self.give_back(left, flushes);
        }
    }

    /// Undoes what was granted in answers that nobody will be told. What a numbered request of a kept session came to
    /// goes with the session.
    fn give_back(&mut self, untold: VecDeque<Message>, flushes: &mut PendingFlushes) {
        for message in untold {
            if let Message::Reply(request, outcome) = message
                && let Some(Open { place: Some(place), .. }) = self.take_open(request)
                && !(self.kept && self.numbered)
            {
                self.service.engine.undo(place, &outcome, flushes);
            }
        }
    }

    /// Bytes to write.
    #[must_use]
    pub fn output(&self) -> &[u8] {
        &self.output[self.written..]
    }

    /// So many bytes of the output are written.
    pub fn handle_written(&mut self, count: usize) {
        self.written += count;
        if self.written < self.output.len() {
            self.now = self.service.engine.clock().now();
        }
        self.deadlines.write_progress += count;
        while self.unwritten.front().is_some_and(|(end, ..)| *end <= self.written) {
            self.unwritten.pop_front();
        }
        if self.written == self.output.len() {
            self.output.clear();
            self.written = 0;
            if self.pushes_printed > 0 {
                self.inbox.pushes_written(self.pushes_printed);
                self.pushes_printed = 0;
            }
        }
        self.arm();
    }

    /// Gives the connection a buffer to print into, if it has none.
    pub fn lend_output(&mut self, buffer: &mut Vec<u8>) {
        if self.output.capacity() == 0 {
            std::mem::swap(&mut self.output, buffer);
        }
    }

    /// Takes an empty buffer back: an idle connection keeps none.
    pub fn return_output(&mut self, buffer: &mut Vec<u8>) {
        if self.output.is_empty() && buffer.capacity() == 0 {
            std::mem::swap(&mut self.output, buffer);
        }
    }

    /// Whether there is something that only waited for output to be written: requests, messages or texts.
    pub fn has_more(&self) -> bool {
        let has_room = self.output().len() < OUTPUT_HIGH && self.phase != Phase::Over;
        self.held_back && self.can_execute()
            || has_room && (self.inbox.is_stalled() || self.can_make_text())
    }

    /// Handles what was held back.
    pub fn handle_more(&mut self, flushes: &mut PendingFlushes) {
        self.now = self.service.engine.clock().now();
        self.print_messages();
        self.resume(flushes);
        self.arm();
    }

    /// Whether input is wanted now. Without it TCP slows the client down.
    #[must_use]
    pub fn wants_input(&self) -> bool {
        if self.input_ended {
            return false;
        }
        match self.phase {
            Phase::Stranger | Phase::Ready => {
                let making_text = self.blocked.is_some_and(|(_, open)| open.place.is_none());
                // Behind a log every request takes a moment, so what follows it is no abuse, but must wait.
                let enough = self.is_blocked() && self.pending.len() >= UNREAD_MAX;
                let waits = self.must_write_first() || self.must_answer_first();
                !making_text && !enough && !waits
            }
            // Read and dropped: closing with unread input would reset the connection and lose the last answer.
            Phase::Closing(_) => true,
            Phase::Over => false,
        }
    }

    /// Whether nothing of what the client has sent remains to be executed or written down.
    fn has_done_all(&self) -> bool {
        // In memory only a wait is not answered at once. Behind a log nothing is.
        let replicated = self.service.engine.is_replicated();
        let comes_soon = |open: &Open| {
            let waits = open.may_wait && self.now >= self.linger_until;
            open.place.is_none() || replicated && !waits
        };
        let blocked = self.blocked.as_ref().map(|(_, open)| open);
        let open = self.open.iter().flat_map(|open| open.values());
        let unprinted = self.held_back || self.inbox.is_stalled();
        let undecided = self.again_at().is_some() && self.now < self.linger_until;
        !unprinted && !undecided && !blocked.into_iter().chain(open).any(comes_soon)
    }

    /// When [`Connection::handle_time`] should be called if nothing happens before.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        let closing = match self.phase {
            Phase::Closing(at) if self.output().is_empty() => Some(at),
            Phase::Stranger | Phase::Ready | Phase::Closing(_) | Phase::Over => None,
        };
        let lingers = self.input_ended && closing.is_none() && self.linger_until > self.now;
        let linger = lingers.then_some(self.linger_until);
        let Deadlines { read, idle, write, .. } = self.deadlines;
        [read, idle, write, closing, linger, self.again_at()].into_iter().flatten().min()
    }

    /// Whether the socket can be closed.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match self.phase {
            Phase::Over => true,
            Phase::Closing(at) => {
                self.refusal.is_none()
                    && self.output().is_empty()
                    && at <= self.service.engine.clock().now()
            }
            Phase::Stranger | Phase::Ready => false,
        }
    }

    /// Whether the client should see an orderly end, not a reset.
    #[must_use]
    pub fn ends_orderly(&self) -> bool {
        matches!(self.phase, Phase::Closing(_))
    }

    /// Executes the requests in the pending input.
    fn resume(&mut self, flushes: &mut PendingFlushes) {
        if self.pending.is_empty() {
            self.held_back = false;
            return;
        }
        let mut pending = std::mem::take(&mut self.pending);
        let used = self.execute(&pending, flushes);
        if used < pending.len() {
            pending.drain(..used);
            self.pending = pending;
        }
    }

    /// Executes the requests at the start of `input` and returns how many bytes they had.
    fn execute(&mut self, input: &[u8], flushes: &mut PendingFlushes) -> usize {
        let mut used = 0;
        self.held_back = false;
        while self.can_execute() {
            match self.decoder.decode(&input[used..]) {
                Decoded::Frame { frame, used: bytes } => {
                    let text = &input[used..used + bytes];
                    used += bytes;
                    self.handle_frame(&frame, flushes);
                    if self.is_blocked()
                        && let Some(undecided) = &mut self.undecided
                    {
                        undecided.keep(text);
                    }
                    if flushes.is_urgent() {
                        self.relieve(flushes);
                    }
                }
                Decoded::Incomplete => break,
                Decoded::TooLong { used: bytes, done } => {
                    used += bytes;
                    if done {
                        self.handle_long_line();
                    }
                    break;
                }
            }
        }
        self.held_back = self.must_write_first() && used < input.len();
        if matches!(self.phase, Phase::Closing(_) | Phase::Over) { input.len() } else { used }
    }

    /// Whether a request has begun and not ended.
    fn is_within_request(&self) -> bool {
        !self.pending.is_empty() || self.decoder.is_draining()
    }

    fn can_execute(&self) -> bool {
        matches!(self.phase, Phase::Stranger | Phase::Ready)
            && !self.is_blocked()
            && !self.must_write_first()
            && !self.must_answer_first()
    }

    /// Whether a request must be answered before anything else is executed.
    fn is_blocked(&self) -> bool {
        self.blocked.is_some() || self.again_at().is_some()
    }

    /// Whether the output must be written before anything else is executed: there is much of it, or more waits behind
    /// it, or it holds so many pushes to this very connection that their queue would overflow.
    fn must_write_first(&self) -> bool {
        self.output().len() >= OUTPUT_HIGH
            || self.pushes_printed >= PUSHES_URGENT
            || self.inbox.is_stalled()
    }

    /// Whether open requests must be answered before anything else is executed: their answers may have as many bytes
    /// as may wait for a client, or there are too many texts among them.
    fn must_answer_first(&self) -> bool {
        self.expected_bytes >= self.service.pending_bytes_max
            || self.texts.as_ref().is_some_and(|texts| texts.waiting.len() >= TEXTS_MAX)
    }

    /// Serves the readers of what this connection sends before their queues are full.
    fn relieve(&mut self, flushes: &mut PendingFlushes) {
        flushes.run();
        // It may be its own reader.
        self.print_messages();
    }

    /// Prints messages until there is enough to write; the others stay where they are. Whether there were any.
    fn print_messages(&mut self) -> bool {
        if self.output().len() >= OUTPUT_HIGH {
            self.inbox.stall();
            return false;
        }
        let mut messages = self.inbox.take();
        let any = !messages.is_empty();
        while let Some(message) = messages.pop_front() {
            self.print_message(message);
            if !messages.is_empty() && self.output().len() >= OUTPUT_HIGH {
                self.inbox.put_back(messages);
                break;
            }
        }
        self.make_next_text();
        any
    }

    fn print_message(&mut self, message: Message) {
        match message {
            Message::Reply(request, outcome) => self.answer_open(request, outcome),
            Message::Text(request, text) => {
                if let Some(texts) = &mut self.texts {
                    texts.in_progress = false;
                }
                if self.take_open(request).is_some() {
                    let text = match &text {
                        Text::Value(text) => Response::Value(text),
                        Text::Nil => Response::Nil,
                        Text::Unavailable => {
                            Response::Error(translate::unavailable(self.client_features))
                        }
                        Text::TooLarge => Response::Error(ErrorCode::TooLarge),
                    };
                    self.respond(self.number_of(request), &text);
                }
            }
            Message::Push(push) => {
                translate::push(&push).print(&mut self.output);
                self.pushes_printed += 1;
            }
        }
    }

    fn handle_frame(&mut self, frame: &Frame<'_>, flushes: &mut PendingFlushes) {
        self.frames += 1;
        let op = Op::parse(frame.command);
        if self.phase == Phase::Stranger {
            // Who says `auth` is who the token says, whatever the certificate.
            if !self.origin.has_certificate() || op == Some(Op::Auth) {
                return self.handle_stranger(op, frame);
            }
            match self.service.admit(TokenKind::Client, Api::Line, &self.origin, None) {
                Ok(pass) => self.welcome(pass),
                Err(_) => return self.refuse(None),
            }
        }
        // A request that makes no sense is refused for that reason, too.
        if self.service.is_draining() {
            return self.refuse_for_drain(frame.number);
        }
        if self.numbered && frame.number.is_none() {
            return self.reject(self.no_number(), ParseError::BAD_NUMBER);
        }
        let Some(op) = op else {
            return self.reject(frame.number, ParseError::UNKNOWN_COMMAND);
        };
        tracing::debug!(
            conn = self.me.id().0,
            command = op.name(),
            key = %frame.key.escape_ascii(),
            "request"
        );
        match Request::parse(op, frame, self.unit) {
            Ok(request) => {
                self.service.metrics.line_request(op);
                self.handle_request(op, frame.number, &request, flushes);
            }
            Err(error) => self.reject(frame.number, error),
        }
    }

    fn handle_stranger(&mut self, op: Option<Op>, frame: &Frame<'_>) {
        let presented = match op.map(|op| (op, Request::parse(op, frame, self.unit))) {
            Some((Op::Auth, Ok(Request::Auth { token }))) => Some(token),
            _ => None,
        };
        let admitted = self.service.admit(TokenKind::Client, Api::Line, &self.origin, presented);
        let Some(pass) = admitted.ok().filter(|_| presented.is_some()) else {
            return self.refuse(None);
        };
        if self.service.is_draining() {
            return self.refuse_for_drain(None);
        }
        self.welcome(pass);
        self.respond(None, &Response::Ok);
    }

    /// Lets a client in.
    fn welcome(&mut self, pass: Pass) {
        self.pass = pass;
        self.who = self.service.auth.who(pass);
        self.phase = Phase::Ready;
    }

    /// Refuses a request because the server shuts down, and closes.
    fn refuse_for_drain(&mut self, number: Option<u64>) {
        self.respond(number, &Response::Error(ErrorCode::Draining));
        self.close();
    }

    /// Refuses a request for its token and closes, both after a pause.
    fn refuse(&mut self, number: Option<u64>) {
        self.refusal = Some(number);
        self.phase = Phase::Closing(self.now + WRONG_TOKEN_PAUSE.into());
    }

    /// How much of a request is kept before its client has authenticated.
    fn stranger_bytes_max(&self) -> usize {
        STRANGER_BYTES_MAX.max(self.service.auth.longest() + AUTH_LINES_BYTES_MAX)
    }

    fn handle_long_line(&mut self) {
        if self.phase == Phase::Stranger {
            self.service.metrics.auth_failed(Api::Line, TokenKind::Client, Denied::Wrong);
            return self.refuse(None);
        }
        self.reject(self.no_number(), ParseError::LINE_TOO_LONG);
        self.close();
    }

    fn handle_request(
        &mut self,
        op: Op,
        number: Option<u64>,
        request: &Request<'_>,
        flushes: &mut PendingFlushes,
    ) {
        match self.check_served(op) {
            Ok(()) => {}
            Err(NotServed::Draining) => return self.refuse_for_drain(number),
            Err(NotServed::NotLeader(leader)) => {
                return self.respond(number, &Response::NotLeader(leader.line.as_deref()));
            }
        }
        if let Err(refusal) = self.check_right(request) {
            return self.respond(number, &Response::Error(refusal.spec().line));
        }
        let was_fresh = std::mem::replace(&mut self.fresh, false);
        let id = self.request_id(number);
        if let Some(open) = &self.open
            && (open.len() >= OPEN_MAX || open.contains_key(&id) && !self.kept)
        {
            return self.respond(number, &Response::Error(ErrorCode::Error));
        }
        if let Request::ForceRelease { token, .. }
        | Request::EndSession { token, .. }
        | Request::Cluster { token, .. } = *request
            && !matches!(request, Request::Cluster { verb: operate::STATUS, .. })
        {
            match self.service.admit_operator(Api::Line, &self.origin, Some(token)) {
                Ok(pass) => self.operator = Some(self.service.auth.who(pass)),
                Err(Denied::Unaudited) => {
                    return self.respond(number, &Response::Error(ErrorCode::Error));
                }
                Err(Denied::Wrong | Denied::TooMany | Denied::Disabled) => {
                    return self.refuse(number);
                }
            }
        }
        match *request {
            Request::Command(Command::Cancel(_) | Command::Acknowledge(_)) => {
                self.handle_own(op, id, number, request, was_fresh, flushes);
            }
            Request::Command(mut command) => {
                self.set_time_to_decide(Some(&mut command));
                let (open, submitted) = self.submit(op, id, command, flushes);
                self.resolve(open, id, number, submitted);
            }
            Request::ForceRelease { command, reason, .. } => {
                // Each attempt of an operator is written down, so there is one.
                self.undecided = None;
                let (open, submitted) = self.submit(op, id, command.into(), flushes);
                let (key, fence) = (command.key.to_vec(), command.fence.0);
                let event = AuditEvent::EndHold { key, fence };
                self.service.audit.note(&self.by(), event, reason, known(&submitted));
                self.resolve(open, id, number, submitted);
            }
            Request::Query(query) => {
                self.set_time_to_decide(None);
                let submitted = self.service.engine.query(&self.me, id, query);
                self.resolve(Open::new(op), id, number, submitted);
            }
            Request::EndSession { .. }
            | Request::Cluster { .. }
            | Request::Auth { .. }
            | Request::Hello { .. }
            | Request::StableRef { .. }
            | Request::Ping
            | Request::Stats
            | Request::Members
            | Request::Barrier
            | Request::Inspect { .. }
            | Request::Ls { .. } => self.handle_own(op, id, number, request, was_fresh, flushes),
        }
    }

    fn submit(
        &self,
        op: Op,
        id: RequestId,
        command: Command<'_>,
        flushes: &mut PendingFlushes,
    ) -> (Open, Submitted) {
        let engine = &self.service.engine;
        let given = command.key().filter(|_| command.gift().is_some());
        let place = given.map(|key| engine.place(key));
        let open = Open { op, may_wait: command.may_wait(), place };
        let keep = self.kept && self.numbered;
        (open, engine.submit(&self.me, id, keep, command, flushes))
    }

    /// Answers a request, or waits for its answer.
    fn resolve(&mut self, open: Open, id: RequestId, number: Option<u64>, submitted: Submitted) {
        match submitted {
            Submitted::Done(Outcome::Items(items)) if are_many(&items) => {
                self.make_items(id, open.op, items);
            }
            Submitted::Done(outcome) if self.is_undecided(&outcome) => self.wait_to_ask_again(),
            Submitted::Done(outcome) => self.answer(open.op, number, open.place, outcome),
            Submitted::Later(place) => self.wait(id, Open { place: Some(place), ..open }),
            Submitted::Gone => self.close(),
        }
    }

    /// Whether the client may ask for that. What operators do, they prove with a token in the request.
    fn check_right(&self, request: &Request<'_>) -> Result<(), Refusal> {
        let access = match request {
            Request::Command(command) => Access::command(command),
            Request::Query(query) => Access::query(query),
            Request::Inspect { key } => Access::read(key),
            // It shows what the client may see.
            Request::Stats | Request::Ls { .. } => Access::OWN,
            Request::Members
            | Request::Barrier
            | Request::Hello { .. }
            | Request::StableRef { .. }
            | Request::ForceRelease { .. }
            | Request::EndSession { .. }
            | Request::Cluster { .. } => Access::OWN,
            Request::Auth { .. } | Request::Ping => return Ok(()),
        };
        self.service.check_right(Api::Line, &self.who, access, self.origin.address)
    }

    /// Whether a request is served here and now.
    fn check_served(&self, op: Op) -> Result<(), NotServed> {
        if matches!(op, Op::Auth | Op::Ping | Op::Stats | Op::Cluster) {
            return Ok(());
        }
        let is_own = matches!(op, Op::StableRef | Op::Hello | Op::Cancel | Op::Ack);
        let redirects = self.service.redirects(self.has_reference || self.wants_redirect);
        self.service.check_served(redirects && !is_own)
    }

    /// Requests about the connection or the server.
    #[expect(clippy::wildcard_enum_match_arm, reason = "`handle_request` names every request")]
    fn handle_own(
        &mut self,
        op: Op,
        id: RequestId,
        number: Option<u64>,
        request: &Request<'_>,
        was_fresh: bool,
        flushes: &mut PendingFlushes,
    ) {
        let refused = Response::Error(ErrorCode::Error);
        match *request {
            Request::Ping => self.respond(number, &Response::Ok),
            Request::Barrier => {
                self.set_time_to_decide(None);
                let submitted = self.service.engine.barrier(&self.me, id);
                self.resolve(Open::new(op), id, number, submitted);
            }
            Request::StableRef { reference } => {
                let first = !std::mem::replace(&mut self.has_reference, true);
                if first {
                    self.me.set_reference(reference.into());
                }
                self.respond(number, if first { &Response::Ok } else { &refused });
            }
            Request::Hello { name, ref words } => {
                if was_fresh && !self.greeted {
                    self.greet(id, number, name, words, flushes);
                } else {
                    self.respond(number, &refused);
                }
            }
            Request::Stats => {
                let asked = self.now.0;
                let (looks, who) = (Arc::clone(&self.service.looks), Arc::clone(&self.who));
                let make = move |service: &Service| Text::Value(service.stats_for(&who, asked));
                self.make_text(id, op, looks, make);
            }
            // No more than a look at what this thread can see: every client of a cluster asks now and then.
            Request::Members => {
                self.respond(number, &Response::Value(&report::members(&self.service)));
            }
            Request::Ls { prefix, limit, after } => {
                let (within, after) = (self.who.readable(prefix), after.map(<[u8]>::to_vec));
                let looks = Arc::clone(&self.service.looks);
                self.make_text(id, op, looks, move |service| {
                    let text = report::ls(service, &within, after.as_deref(), limit);
                    text.map_or(Text::Unavailable, |text| Text::Value(text.into()))
                });
            }
            Request::Inspect { key } => {
                let key = key.to_vec();
                let looks = Arc::clone(&self.service.looks);
                self.make_text(id, op, looks, move |service| {
                    match report::inspect(service, &key) {
                        Some(Some(text)) => Text::Value(text.into()),
                        Some(None) => Text::Nil,
                        None => Text::Unavailable,
                    }
                });
            }
            Request::Command(Command::Cancel(command::Cancel { request: cancelled }))
                if self.numbered =>
            {
                let open = self.open.as_ref().and_then(|open| open.get(&cancelled));
                if let Some(&Open { place: Some(place), .. }) = open {
                    self.service.engine.cancel(&self.me, cancelled, place, flushes);
                }
                self.respond(number, &Response::Ok);
            }
            Request::Command(command @ Command::Acknowledge(_)) if self.numbered => {
                if self.service.engine.submit(&self.me, id, false, command, flushes)
                    == Submitted::Gone
                {
                    return self.close();
                }
                self.respond(number, &Response::Ok);
            }
            Request::EndSession { session, reason, .. } => {
                let submitted = self.service.engine.kick(&self.me, id, SessionId(session), flushes);
                let event = AuditEvent::EndSession { session };
                self.service.audit.note(&self.by(), event, reason, known(&submitted));
                self.resolve(Open::new(op), id, number, submitted);
            }
            Request::Cluster { verb, json, .. } => {
                let backup = Arc::clone(self.backup.get_or_insert_default());
                let (verb, json) = (verb.to_owned(), json.to_owned());
                let by = self.by();
                let pool = Arc::clone(&self.service.operations);
                self.make_text(id, op, pool, move |service| {
                    let answer = operate::serve(service, &verb, &json, &by, &backup);
                    Text::Value(answer.to_string().into_bytes().into())
                });
            }
            // `auth` when it is not due, `cancel` and `ack` without numbers.
            _ => self.respond(number, &refused),
        }
    }

    /// Lets another thread make the answer, because it takes a while: after those that were asked for before, and when
    /// what there is to write is written.
    fn make_text(
        &mut self,
        request: RequestId,
        op: Op,
        pool: Arc<Pool>,
        make: impl FnOnce(&Service) -> Text + Send + 'static,
    ) {
        self.wait(request, Open::new(op));
        let job = TextJob { request, pool, make: Box::new(make) };
        self.texts.get_or_insert_default().waiting.push_back(job);
        self.make_next_text();
    }

    /// Lets another thread write down the items of a list: a mebibyte would take this one a while.
    fn make_items(&mut self, request: RequestId, op: Op, items: Vec<Bytes>) {
        let looks = Arc::clone(&self.service.looks);
        self.make_text(request, op, looks, move |_| {
            let mut text = Vec::new();
            let fits = translate::print_items(&items, &mut text);
            if fits { Text::Value(text.into()) } else { Text::TooLarge }
        });
    }

    fn can_make_text(&self) -> bool {
        self.texts.as_ref().is_some_and(|texts| !texts.in_progress && !texts.waiting.is_empty())
    }

    fn make_next_text(&mut self) {
        if !self.can_make_text() || self.output().len() >= OUTPUT_HIGH || self.inbox.is_stalled() {
            return;
        }
        let Some(texts) = &mut self.texts else { return };
        let Some(TextJob { request, pool, make }) = texts.waiting.pop_front() else { return };
        texts.in_progress = true;
        let (service, inbox) = (Arc::clone(&self.service), Arc::clone(&self.inbox));
        let me = self.me.clone();
        pool.run(Box::new(move || {
            if !inbox.is_closed() {
                inbox.put(Message::Text(request, make(&service)));
                me.flush();
            }
        }));
    }

    fn wait(&mut self, id: RequestId, request: Open) {
        self.expected_bytes += self.answer_bytes_max(request);
        match &mut self.open {
            Some(open) => {
                // A kept session may repeat a request that is open.
                if let Some(before) = open.insert(id, request) {
                    self.expected_bytes -= self.answer_bytes_max(before);
                }
            }
            None => self.blocked = Some((id, request)),
        }
    }

    fn take_open(&mut self, id: RequestId) -> Option<Open> {
        let taken = match &mut self.open {
            Some(open) => open.remove(&id),
            None => self.blocked.take_if(|(blocked, _)| *blocked == id).map(|(_, open)| open),
        };
        if let Some(open) = taken {
            self.expected_bytes -= self.answer_bytes_max(open);
        }
        taken
    }

    /// The bytes that the answer to an open request may have. Nothing if it may wait for long: what comes of those is
    /// bounded where it arrives. Neither is a text counted that is made when it is its turn.
    fn answer_bytes_max(&self, open: Open) -> usize {
        if matches!(open.op, Op::Kget | Op::Lpop | Op::Rpop) {
            self.service.value_bytes_max
        } else if open.op == Op::Lrange {
            ANSWER_BYTES_MAX
        } else {
            0
        }
    }

    fn answer_open(&mut self, id: RequestId, outcome: Outcome) {
        // Not there: it was asked on an earlier connection of this session and will be repeated.
        let Some(Open { op, place, .. }) = self.take_open(id) else { return };
        let number = self.number_of(id);
        if let Some(greeting) = self.greeting.take() {
            if outcome == Outcome::Refused(Refusal::MaxSessions) {
                self.service.engine.keep_refused(&self.me);
            }
            let session = if outcome == Outcome::Done {
                Ok(self.service.engine.attached(&self.me).unwrap_or_else(|| self.me.clone()))
            } else {
                Err(translate::no_session(&outcome))
            };
            return self.finish_greeting(number, *greeting, session);
        }
        if let Outcome::Items(items) = &outcome
            && are_many(items)
        {
            return self.make_items(id, op, items.clone());
        }
        if self.is_undecided(&outcome) {
            return self.wait_to_ask_again();
        }
        let is_end = outcome == Outcome::Timeout
            || outcome == Outcome::Empty && matches!(op, Op::Blpop | Op::Brpop);
        if self.draining && is_end {
            self.respond(number, &Response::Error(ErrorCode::Draining));
        } else {
            self.answer(op, number, place, outcome);
        }
    }

    fn answer(&mut self, op: Op, number: Option<u64>, place: Option<Place>, outcome: Outcome) {
        let mut items = Vec::new();
        let response = translate::respond(op, &outcome, self.client_features, &mut items);
        response.print(self.unit, number, &mut self.output);
        // A hold of a session that ends with its connection is released then.
        let stays = || self.service.auto_release != AutoRelease::Any && !self.kept;
        let is_item = matches!(outcome, Outcome::Popped { .. });
        let lost_if_unwritten = outcome.gives() && (is_item || stays());
        if lost_if_unwritten && let Some(place) = place {
            self.unwritten.push_back((self.output.len(), place, outcome));
        }
    }

    fn respond(&mut self, number: Option<u64>, response: &Response<'_>) {
        response.print(self.unit, number, &mut self.output);
    }

    fn reject(&mut self, number: Option<u64>, error: ParseError) {
        if let Some(suppressed) = self.log_budget("parse error") {
            let ParseError { code, text, .. } = error;
            tracing::warn!(peer = %self.peer, code, text, suppressed, "parse error");
        }
        self.respond(number, &Response::Error(ErrorCode::Error));
    }

    /// Notes something that the client has caused, unless it has caused much.
    fn log(&self, kind: &'static str) {
        if let Some(suppressed) = self.log_budget(kind) {
            tracing::warn!(peer = %self.peer, conn = self.me.id().0, suppressed, "{kind}");
        }
    }

    /// Whether the client may cause one more line of a kind, and how many of them were left out before.
    fn log_budget(&self, kind: &'static str) -> Option<Option<u64>> {
        // Whoever is connected otherwise than through a socket has no address.
        let address =
            self.peer.parse::<SocketAddr>().map_or(Ipv4Addr::UNSPECIFIED.into(), |peer| peer.ip());
        self.service.log_budget.admit(address, kind)
    }

    fn close(&mut self) {
        if self.phase != Phase::Over {
            self.phase = Phase::Closing(self.now);
        }
    }

    /// Who does something here.
    fn by(&self) -> By {
        let session = Some(self.me.id().0);
        let identity = self.operator.as_ref().map_or("", |operator| operator.name()).into();
        By { via: Via::Api(Api::Line), session, peer: Arc::clone(&self.peer), identity }
    }

    fn request_id(&mut self, number: Option<u64>) -> RequestId {
        RequestId(number.unwrap_or_else(|| {
            self.last_request += 1;
            // The bits from 40 on tell the connections of a kept session apart.
            RequestId::UNREPEATABLE | self.me.epoch() << 40 | self.last_request
        }))
    }

    /// What an answer to no request in particular is numbered.
    fn no_number(&self) -> Option<u64> {
        self.numbered.then_some(0)
    }

    fn number_of(&self, id: RequestId) -> Option<u64> {
        self.numbered.then_some(id.0)
    }

    /// Sets the time limits that fit the state, and ends the conversation when there is nothing more to it.
    fn arm(&mut self) {
        self.inbox.set_unwritten(self.output().len());
        let conversing = matches!(self.phase, Phase::Stranger | Phase::Ready);
        let open = self.open.as_ref().is_some_and(|open| !open.is_empty());
        let answered_all = !self.is_blocked() && !open;
        if conversing && (self.input_ended && self.has_done_all() || self.draining && answered_all)
        {
            self.close();
        }
        let service = &self.service;
        let reading = match self.phase {
            Phase::Stranger => true,
            Phase::Ready => !self.is_blocked() && self.is_within_request(),
            Phase::Closing(_) | Phase::Over => false,
        } && self.output().len() < OUTPUT_HIGH;
        let progress = (self.frames, self.decoder.lines_complete());
        if !reading {
            self.deadlines.read = None;
        } else if self.deadlines.read.is_none() || self.deadlines.read_progress != progress {
            self.deadlines.read = Some(self.now + service.read_timeout);
        }
        self.deadlines.read_progress = progress;

        let idle = self.phase == Phase::Ready
            && !self.is_within_request()
            && !self.is_blocked()
            && !open
            && self.output().is_empty();
        match (service.idle_timeout, idle, self.deadlines.idle) {
            (Some(timeout), true, None) => self.deadlines.idle = Some(self.now + timeout),
            (_, true, _) => {}
            (_, false, _) => self.deadlines.idle = None,
        }

        if self.output().is_empty() {
            self.deadlines.write = None;
        } else if self.deadlines.write.is_none() || self.deadlines.write_progress >= WRITE_PROGRESS
        {
            self.deadlines.write = service.write_timeout.map(|timeout| self.now + timeout);
            self.deadlines.write_progress = 0;
        }
        if let Some(last) = self.revoked
            && !self.output().is_empty()
        {
            // Who does not read why must not keep what it has for longer.
            self.deadlines.write = Some(self.deadlines.write.map_or(last, |at| at.min(last)));
        }
    }
}

/// Whether items of a list are too many to be written down at once on a thread that serves others as well.
fn are_many(items: &[Bytes]) -> bool {
    items.iter().map(|item| item.len()).sum::<usize>() > ITEMS_BYTES_AT_ONCE
}

/// Whether what an operator named was there, for the log; not known yet behind a log of commands.
fn known(submitted: &Submitted) -> Option<bool> {
    match submitted {
        Submitted::Done(outcome) => Some(*outcome == Outcome::Done),
        Submitted::Later(_) | Submitted::Gone => None,
    }
}
