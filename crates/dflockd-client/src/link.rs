//! One multiplexed connection to one server, kept alive over disconnects.
//!
//! Requests are numbered. While the session is kept, a request whose answer was lost is sent again with its
//! number after the session is attached to a new connection, and the server answers it exactly once.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dflockd_wire::{End, Push, Request, Space, TokenText, Unit, print_number, split_number};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::sync::{Notify, oneshot};

use crate::clock::Instant;
use crate::error::{Error, Lost};
use crate::guard::Hold;
use crate::stream::{Address, Lines};

const BACKOFF_MIN: Duration = Duration::from_millis(20);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
const HEARTBEAT_MAX: Duration = Duration::from_secs(5);
/// How long a closed link waits for grants that are under way, to give them back.
const FAREWELL: Duration = Duration::from_secs(1);
/// Answers after which the server is told that it need not keep them.
const ACKNOWLEDGE_EVERY: u64 = 64;
/// What a server accepts.
const OPEN_MAX: usize = 65_000;

/// What to do when the connection to a server breaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnDisconnect {
    /// Attach to the session again; locks stay valid as long as their leases. The default.
    #[default]
    Keep,
    /// Whatever was held is lost at once, at the server as well.
    Release,
}

/// How a link begins.
pub(crate) struct Start {
    pub(crate) on_disconnect: OnDisconnect,
    /// How long an answer may take.
    pub(crate) patience: Duration,
    /// Numbers of requests begin after this one.
    pub(crate) last: u64,
}

/// A link in use. It is closed when nobody uses it any more.
pub(crate) struct LinkHandle(Arc<Link>);

impl std::ops::Deref for LinkHandle {
    type Target = Arc<Link>;

    fn deref(&self) -> &Arc<Link> {
        &self.0
    }
}

impl Drop for LinkHandle {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// A connection that many requests share.
pub(crate) struct Link {
    address: Address,
    on_disconnect: OnDisconnect,
    /// A connection that is silent for so long is asked whether it stands, and given up if it does not answer.
    heartbeat: Duration,
    state: Mutex<State>,
    /// There is something to send, or the link is closed.
    wake: Notify,
    /// The link is closed while it has no connection.
    closing: Notify,
}

#[derive(Default)]
struct State {
    unsent: Vec<u64>,
    pending: BTreeMap<u64, Pending>,
    last: u64,
    /// Answers since the last acknowledgement.
    answered: u64,
    holds: HashMap<u64, Weak<Hold>>,
    /// Grants whose answer has arrived but whose hold is not made yet, by fence; and why they were lost meanwhile.
    fresh: HashMap<u64, Option<Lost>>,
    /// The session was taken over by another connection.
    detached: bool,
    session: Option<String>,
    closed: bool,
    /// Why the server can not be reached at the moment.
    trouble: Option<Error>,
}

struct Pending {
    bytes: Vec<u8>,
    sent: bool,
    /// None if nobody waits for it.
    answer: Option<oneshot::Sender<Result<Answer, Error>>>,
    give_back: Option<GiveBack>,
}

/// How to undo a request that blocks when nobody waits for it any more.
#[derive(Clone)]
pub(crate) enum GiveBack {
    /// Withdraw it.
    Nothing,
    /// Withdraw it, and release the lock if it was granted.
    Lock { key: Vec<u8>, space: Space },
    /// Withdraw it, and put the item back if there was one.
    Item { key: Vec<u8>, end: End },
}

/// An answer on its way. If it is dropped before somebody claims it, the lock it grants is given back.
pub(crate) struct Answer {
    line: Vec<u8>,
    link: Weak<Link>,
    give_back: Option<GiveBack>,
}

impl Answer {
    pub(crate) fn claim(mut self) -> Vec<u8> {
        self.give_back = None;
        std::mem::take(&mut self.line)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some(link) = self.link.upgrade() else { return };
        match &self.give_back {
            Some(GiveBack::Lock { key, space }) => {
                if let Some(token) = granted_token(&self.line) {
                    link.forget_hold(fence_of(token));
                    link.tell(&Request::Release { space: *space, key, token, resign: false });
                }
            }
            Some(GiveBack::Item { key, end }) => {
                if let Some(value) = self.line.strip_prefix(b"ok ") {
                    link.tell(&Request::Push { key, end: *end, value });
                }
            }
            Some(GiveBack::Nothing) | None => {}
        }
    }
}

fn fence_of(token: &[u8]) -> u64 {
    TokenText::parse(token).map_or(0, |(fence, _)| fence)
}

fn granted_token(line: &[u8]) -> Option<&[u8]> {
    let mut fields = line.split(|&byte| byte == b' ');
    match fields.next() {
        Some(b"ok" | b"acquired") => fields.next().filter(|token| token.len() == 32),
        Some(_) | None => None,
    }
}

/// A request under way. Dropping it withdraws the request.
pub(crate) struct Call {
    link: Arc<Link>,
    number: u64,
    answer: oneshot::Receiver<Result<Answer, Error>>,
}

impl Call {
    /// The answer, if it comes within `timeout`.
    pub(crate) async fn wait(mut self, timeout: Duration) -> Result<Answer, Error> {
        match tokio::time::timeout(timeout, &mut self.answer).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(_)) => Err(Error::Closed),
            Err(_) => Err(self.link.late(self.number)),
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.link.withdraw(self.number);
    }
}

impl Link {
    /// A link over a connection that has been greeted.
    pub(crate) fn start(
        address: Address,
        start: Start,
        lines: Lines,
        words: &[String],
    ) -> Arc<LinkHandle> {
        let Start { on_disconnect, patience, last } = start;
        let state = State { session: session_of(words), last, ..State::default() };
        let link = Arc::new(Self {
            address,
            on_disconnect,
            heartbeat: patience.min(HEARTBEAT_MAX),
            state: Mutex::new(state),
            wake: Notify::new(),
            closing: Notify::new(),
        });
        tokio::spawn(run(Arc::clone(&link), lines));
        Arc::new(LinkHandle(link))
    }

    /// The words to greet with.
    pub(crate) fn words(on_disconnect: OnDisconnect) -> Vec<&'static str> {
        match on_disconnect {
            OnDisconnect::Keep => vec!["mux", "ms", "fence", "lost", "lease-status", "keep"],
            OnDisconnect::Release => vec!["mux", "ms", "fence", "lost", "lease-status"],
        }
    }

    /// Whether a server that accepted these words can be used through a link.
    pub(crate) fn suits(on_disconnect: OnDisconnect, words: &[String]) -> bool {
        let has = |wanted: &str| words.iter().any(|word| word == wanted);
        let kept = on_disconnect == OnDisconnect::Release || session_of(words).is_some();
        has("mux") && has("ms") && has("fence") && kept
    }

    /// Sends a request. `give_back` says how to release what it grants if nobody waits for it any more.
    pub(crate) fn call(
        self: &Arc<Self>,
        request: &Request<'_>,
        give_back: Option<GiveBack>,
    ) -> Result<Call, Error> {
        let (sender, answer) = oneshot::channel();
        let number = self.enqueue(request, Some(sender), give_back)?;
        Ok(Call { link: Arc::clone(self), number, answer })
    }

    /// Sends a request whose answer does not matter.
    pub(crate) fn tell(&self, request: &Request<'_>) {
        // After the link was closed as well: it says goodbye to what it still owes.
        self.state.lock().push(request, None, None);
        self.wake.notify_one();
    }

    /// Sends a request whose only purpose is to undo what it brings.
    pub(crate) fn tell_and_give_back(&self, request: &Request<'_>, give_back: GiveBack) {
        self.state.lock().push(request, None, Some(give_back));
        self.wake.notify_one();
    }

    fn enqueue(
        &self,
        request: &Request<'_>,
        answer: Option<oneshot::Sender<Result<Answer, Error>>>,
        give_back: Option<GiveBack>,
    ) -> Result<u64, Error> {
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::Closed);
        }
        if state.pending.len() >= OPEN_MAX {
            return Err(Error::Invalid("too many requests are open".to_owned()));
        }
        let number = state.push(request, answer, give_back);
        drop(state);
        self.wake.notify_one();
        Ok(number)
    }

    /// Lets the link tell a hold that it was lost, or has been already.
    pub(crate) fn watch_hold(&self, hold: &Arc<Hold>) {
        let mut state = self.state.lock();
        if let Some(Some(reason)) = state.fresh.remove(&hold.fence()) {
            drop(state);
            return hold.lose(reason);
        }
        state.holds.insert(hold.fence(), Arc::downgrade(hold));
    }

    pub(crate) fn forget_hold(&self, fence: u64) {
        let mut state = self.state.lock();
        state.holds.remove(&fence);
        state.fresh.remove(&fence);
    }

    /// By what another process can attach to the session.
    pub(crate) fn session(&self) -> Option<String> {
        self.state.lock().session.clone()
    }

    fn close(&self) {
        self.state.lock().closed = true;
        self.wake.notify_one();
        self.closing.notify_one();
    }

    /// What to say of a request that was not answered in time.
    fn late(&self, number: u64) -> Error {
        let state = self.state.lock();
        let sent = state.pending.get(&number).is_none_or(|pending| pending.sent);
        match &state.trouble {
            Some(trouble) if !sent => trouble.clone(),
            _ if sent => Error::Unknown { reason: "no answer in time".to_owned() },
            _ => self.address.unreachable("no connection in time"),
        }
    }

    /// Nobody waits for this request any more.
    fn withdraw(&self, number: u64) {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&number) else { return };
        if !pending.sent {
            state.pending.remove(&number);
            return;
        }
        pending.answer = None;
        if pending.give_back.is_some() {
            state.push(&Request::Cancel { number }, None, None);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Handles a line from the server.
    fn handle_line(self: &Arc<Self>, line: &[u8]) {
        if let Some((number, rest)) = split_number(line) {
            self.handle_answer(number, rest.to_vec());
        } else if let Some(Push::Lost { fence, reason, .. }) = Push::parse(line) {
            let reason = match reason {
                "forced" => Lost::Forced,
                "session" => Lost::Session,
                _ => Lost::Expired,
            };
            let hold = {
                let mut state = self.state.lock();
                if let Some(lost) = state.fresh.get_mut(&fence) {
                    *lost = Some(reason);
                }
                state.holds.remove(&fence)
            };
            if let Some(hold) = hold.and_then(|hold| hold.upgrade()) {
                hold.lose(reason);
            }
        } else if line == b"detached" {
            self.state.lock().detached = true;
        }
    }

    fn handle_answer(self: &Arc<Self>, number: u64, line: Vec<u8>) {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.remove(&number) else { return };
        if matches!(pending.give_back, Some(GiveBack::Lock { .. }))
            && let Some(token) = granted_token(&line)
        {
            state.fresh.insert(fence_of(token), None);
        }
        state.answered += 1;
        if state.answered >= ACKNOWLEDGE_EVERY && self.on_disconnect == OnDisconnect::Keep {
            state.answered = 0;
            let first_open = state.pending.keys().next().copied();
            let up_to = first_open.map_or(state.last, |first| first - 1);
            if up_to > 0 {
                state.push(&Request::Ack { number: up_to }, None, None);
                self.wake.notify_one();
            }
        }
        // Before the answer goes anywhere: what happens to it may need the state.
        drop(state);
        let Pending { answer, give_back, .. } = pending;
        let told = Answer { line, link: Arc::downgrade(self), give_back };
        if let Some(answer) = answer {
            let _ = answer.send(Ok(told));
        }
    }

    /// Takes what is to be sent now.
    fn take_unsent(&self) -> Vec<u8> {
        let mut state = self.state.lock();
        let mut bytes = Vec::new();
        for number in std::mem::take(&mut state.unsent) {
            if let Some(pending) = state.pending.get_mut(&number) {
                pending.sent = true;
                bytes.extend_from_slice(&pending.bytes);
            }
        }
        bytes
    }

    /// A connection stands: everything that is not answered goes out, again or for the first time.
    fn handle_connected(&self, session: Option<String>) {
        let mut state = self.state.lock();
        state.trouble = None;
        state.session = session;
        state.unsent = state.pending.keys().copied().collect();
    }

    /// The connection is gone, and with it, unless the session is kept, all that it owned.
    fn handle_disconnected(&self, reason: &str) {
        if std::mem::take(&mut self.state.lock().detached) {
            self.handle_session_lost(Lost::Session, "the session was taken over");
        } else if self.on_disconnect == OnDisconnect::Release {
            self.handle_session_lost(Lost::Disconnected, reason);
        }
    }

    /// The session is gone: its holds are lost, and what was sent may or may not have been executed.
    fn handle_session_lost(&self, lost: Lost, reason: &str) {
        let (holds, failed) = {
            let mut state = self.state.lock();
            state.session = None;
            state.fresh.values_mut().for_each(|fresh| *fresh = fresh.or(Some(lost)));
            let holds = std::mem::take(&mut state.holds);
            let sent: Vec<u64> =
                state.pending.iter().filter(|(_, it)| it.sent).map(|(&number, _)| number).collect();
            let failed: Vec<Pending> =
                sent.iter().filter_map(|number| state.pending.remove(number)).collect();
            (holds, failed)
        };
        for hold in holds.into_values().filter_map(|hold| hold.upgrade()) {
            hold.lose(lost);
        }
        for answer in failed.into_iter().filter_map(|pending| pending.answer) {
            let _ = answer.send(Err(Error::Unknown { reason: reason.to_owned() }));
        }
    }

    /// Whether there are answers to come that may have to be given back.
    fn owes_something(&self) -> bool {
        self.state.lock().pending.values().any(|pending| pending.give_back.is_some())
    }

    fn is_closed(&self) -> bool {
        self.state.lock().closed
    }

    /// Fails everything that waits; for what no new connection can mend.
    fn fail_all(&self, error: &Error) {
        let failed = std::mem::take(&mut self.state.lock().pending);
        for answer in failed.into_values().filter_map(|pending| pending.answer) {
            let _ = answer.send(Err(error.clone()));
        }
    }

    /// Connects again, to the same session if there is one.
    async fn reconnect(&self) -> Result<Lines, Error> {
        let mut lines = self.address.connect().await?;
        let session = self.state.lock().session.clone();
        let timeout = self.address.connect_timeout;
        let name = Arc::clone(&self.address.client_name);
        if let Some(session) = session {
            let attach = format!("attach={session}");
            let words = [&["mux", "ms", "fence", "lost", "lease-status"][..], &[&attach]].concat();
            let greeted = lines.greet(&name, &words, timeout).await;
            if greeted.map_err(|error| self.address.greeting_failed(&error))?.is_some() {
                self.handle_connected(Some(session));
                return Ok(lines);
            }
            self.handle_session_lost(Lost::Session, "the session has ended");
        }
        let words = Self::words(self.on_disconnect);
        let greeted = lines.greet(&name, &words, timeout).await;
        match greeted.map_err(|error| self.address.greeting_failed(&error))? {
            Some(words) if Self::suits(self.on_disconnect, &words) => {
                self.handle_connected(session_of(&words));
                Ok(lines)
            }
            _ => Err(self.address.unreachable("the server no longer speaks the same protocol")),
        }
    }
}

impl State {
    fn push(
        &mut self,
        request: &Request<'_>,
        answer: Option<oneshot::Sender<Result<Answer, Error>>>,
        give_back: Option<GiveBack>,
    ) -> u64 {
        self.last += 1;
        let number = self.last;
        let mut bytes = Vec::new();
        print_number(number, &mut bytes);
        request.print(Unit::Millis, &mut bytes);
        let pending = Pending { bytes, sent: false, answer, give_back };
        self.pending.insert(number, pending);
        self.unsent.push(number);
        number
    }
}

fn session_of(words: &[String]) -> Option<String> {
    let secret = |word: &String| {
        let secret = word.strip_prefix("keep=").or_else(|| word.strip_prefix("attach="));
        secret.map(str::to_owned)
    };
    words.iter().find_map(secret)
}

/// Serves a link until it is closed.
async fn run(link: Arc<Link>, lines: Lines) {
    let mut lines = Some(lines);
    let mut backoff = BACKOFF_MIN;
    while !link.is_closed() {
        let connected = match lines.take() {
            Some(lines) => Ok(lines),
            None => link.reconnect().await,
        };
        match connected {
            Ok(lines) => {
                backoff = BACKOFF_MIN;
                let reason = serve(&link, lines).await;
                link.handle_disconnected(&reason);
            }
            Err(error) => {
                if error == Error::Auth {
                    link.fail_all(&error);
                }
                link.state.lock().trouble = Some(error);
            }
        }
        // Spread, so that a thousand clients of a restarted server do not come back at once.
        let pause = backoff.mul_f64(rand::random_range(0.5..1.0));
        let _ = tokio::time::timeout(pause, link.closing.notified()).await;
        backoff = (backoff * 2).min(BACKOFF_MAX);
    }
    link.fail_all(&Error::Closed);
}

/// Carries lines both ways until the connection breaks; says why it did.
async fn serve(link: &Arc<Link>, lines: Lines) -> String {
    let Lines { mut reader, mut writer } = lines;
    let mut silent_for = 0;
    let mut closed_at = None;
    loop {
        let bytes = link.take_unsent();
        if !bytes.is_empty() {
            let written = async {
                writer.write_all(&bytes).await?;
                writer.flush().await
            };
            if let Err(error) = written.await {
                return error.to_string();
            }
            continue;
        }
        if link.is_closed() {
            let closed_at = *closed_at.get_or_insert_with(Instant::now);
            if !link.owes_something() || closed_at.elapsed() > FAREWELL {
                let _ = writer.shutdown().await;
                return "closed".to_owned();
            }
        }
        let pause = if closed_at.is_some() { FAREWELL } else { link.heartbeat };
        tokio::select! {
            line = reader.next() => match line {
                Ok(line) => {
                    silent_for = 0;
                    link.handle_line(&line);
                }
                Err(error) => return error.to_string(),
            },
            () = link.wake.notified() => {}
            () = tokio::time::sleep(pause) => {
                silent_for += 1;
                if silent_for > 1 {
                    return "the server is silent".to_owned();
                }
                link.tell(&Request::Ping);
            }
        }
    }
}
