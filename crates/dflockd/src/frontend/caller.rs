//! A session for APIs that are no conversation of lines (HTTP, gRPC): each request is a future.
//!
//! A request whose future is dropped before it is answered is withdrawn, and what it was granted meanwhile is given
//! back. So is what the answer gave if whoever was to tell it drops it: see [`Answer`].

use std::cell::RefCell;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use arc_swap::ArcSwap;
use dflockd_core::{Command, Outcome, Push, Query, Refusal, RequestId, SessionId, command};
use dflockd_engine::{
    Api, Attaching, Attachment, Engine, Mailbox, PendingFlushes, Place, Pushed, SessionSecret,
    Submitted,
};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::frontend::auth::{Allowed, Pass, TokenKind};
use crate::frontend::budget::PushBytes;
use crate::frontend::line::connection::push_bytes;
use crate::service::Service;

/// Pushes that may wait for a slow reader; one more and it is cut off.
const PUSHES_MAX: usize = 1024;

/// The session has ended, or is somebody else's now: nothing was done, or nobody can say what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionEnded;

/// A session whose requests are awaited. It ends when this is dropped, unless it was kept.
pub(crate) struct Caller {
    service: Arc<Service>,
    mailbox: Arc<CallMailbox>,
    me: Attachment,
    last_request: AtomicU64,
    orderly: AtomicBool,
}

impl Caller {
    /// A new session.
    pub(crate) fn open(service: &Arc<Service>, api: Api, label: Arc<str>) -> Self {
        let push_bytes = Arc::new(PushBytes::new(service.pending_bytes_max));
        Self::open_with(service, api, label, push_bytes)
    }

    /// A new session whose pushes are counted together with those of others.
    pub(crate) fn open_with(
        service: &Arc<Service>,
        api: Api,
        label: Arc<str>,
        push_bytes: Arc<PushBytes>,
    ) -> Self {
        let mailbox = Arc::new(CallMailbox::new(Arc::clone(&service.engine), api, push_bytes));
        let into: Arc<dyn Mailbox> = Arc::<CallMailbox>::clone(&mailbox);
        let me = service.engine.open(into, label);
        Self {
            service: Arc::clone(service),
            mailbox,
            me,
            last_request: AtomicU64::new(0),
            orderly: AtomicBool::new(false),
        }
    }

    /// The session with this secret, wherever it was until now; none if there is no such session.
    pub(crate) async fn attach(
        service: &Arc<Service>,
        api: Api,
        label: Arc<str>,
        secret: SessionSecret,
    ) -> Option<Self> {
        let mut caller = Self::open(service, api, label);
        let id = caller.next_request();
        let mut pending = caller.expect(id, false, b"");
        let mut flushes = PendingFlushes::new();
        let attaching = service.engine.attach(&caller.me, id, secret, &mut flushes);
        flushes.run();
        match attaching {
            Attaching::Done(attached) => {
                pending.forget();
                drop(pending);
                caller.me = attached?;
            }
            Attaching::Later => {
                let outcome = pending.wait().await.ok()?;
                if outcome != Outcome::Done {
                    return None;
                }
                caller.me = service.engine.attached(&caller.me)?;
            }
        }
        Some(caller)
    }

    /// Lets the session outlive this process' knowledge of it: whoever knows the secret can attach to it. None if as
    /// many sessions as may be are kept.
    pub(crate) async fn keep(&self) -> Result<Option<SessionSecret>, SessionEnded> {
        let id = self.next_request();
        let pending = self.expect(id, false, b"");
        let (secret, submitted) = self.service.engine.keep(&self.me, id);
        let outcome = pending.resolve(submitted).await?;
        if outcome == Outcome::Refused(Refusal::MaxSessions) {
            self.service.engine.keep_refused(&self.me);
            return Ok(None);
        }
        if outcome == Outcome::Done { Ok(Some(secret)) } else { Err(SessionEnded) }
    }

    /// The session's number.
    pub(crate) fn id(&self) -> SessionId {
        self.me.id()
    }

    /// Waits until the server shuts down.
    pub(crate) async fn drained(&self) {
        self.service.drained().await;
    }

    /// Gives the session a reference by which its client is known.
    pub(crate) fn set_reference(&self, reference: Arc<str>) {
        self.me.set_reference(reference);
    }

    /// Gives the session a name that people see.
    pub(crate) fn set_label(&self, label: Arc<str>) {
        self.me.set_label(label);
    }

    /// Executes a command.
    pub(crate) async fn call(&self, command: Allowed<Command<'_>>) -> Result<Answer, SessionEnded> {
        let command = command.get();
        let place = self.service.engine.place(command.key().unwrap_or_default());
        let id = self.next_request();
        let outcome = self.submit(id, false, command).await?;
        Ok(Answer { engine: Arc::clone(&self.service.engine), place, outcome: Some(outcome) })
    }

    /// Executes a command once, however often it is repeated with this number by the session. Dropping the future
    /// withdraws nothing: the client will come back for the answer.
    pub(crate) async fn call_once(
        &self,
        request: RequestId,
        command: Allowed<Command<'_>>,
    ) -> Result<Outcome, SessionEnded> {
        self.submit(request, true, command.get()).await
    }

    /// Withdraws a request of [`Caller::call_once`] that waits: it is answered as one that was not granted in time.
    /// Whether it waits, as far as is known here.
    pub(crate) fn cancel(&self, request: RequestId) -> bool {
        let engine = &self.service.engine;
        let known = {
            let state = self.mailbox.state.lock();
            let waiting = state.waiting.get(&request).map(|waiting| waiting.place);
            waiting.or_else(|| state.left.get(&request).copied())
        };
        // The log of a cluster is one place, so what was asked through another member is withdrawn as well.
        if let Some(place) = known.or_else(|| engine.only_place()) {
            let mut flushes = PendingFlushes::new();
            engine.cancel(&self.me, request, place, &mut flushes);
            flushes.run();
        }
        known.is_some()
    }

    /// The client has seen the results of all requests of the session up to this one.
    pub(crate) async fn acknowledge(&self, up_to: RequestId) -> Result<(), SessionEnded> {
        let acknowledge = Command::Acknowledge(command::Acknowledge { up_to });
        self.call(Allowed::by_server(acknowledge)).await.map(|_| ())
    }

    /// Answers a read.
    pub(crate) async fn query(&self, query: Allowed<Query<'_>>) -> Result<Outcome, SessionEnded> {
        let id = self.next_request();
        let pending = self.expect(id, false, b"");
        let submitted = self.service.engine.query(&self.me, id, query.get());
        pending.resolve(submitted).await
    }

    /// Answers when everything that was done before, by anybody, can be seen here.
    pub(crate) async fn barrier(&self) -> Result<Outcome, SessionEnded> {
        let id = self.next_request();
        let pending = self.expect(id, false, b"");
        let submitted = self.service.engine.barrier(&self.me, id);
        pending.resolve(submitted).await
    }

    /// Ends somebody's session.
    pub(crate) async fn kick(&self, session: SessionId) -> Result<Outcome, SessionEnded> {
        let id = self.next_request();
        let pending = self.expect(id, false, b"");
        let mut flushes = PendingFlushes::new();
        let submitted = self.service.engine.kick(&self.me, id, session, &mut flushes);
        flushes.run();
        pending.resolve(submitted).await
    }

    /// Ends a session of a cluster for its client.
    pub(crate) async fn end_session(&self, session: SessionId) -> Result<Outcome, SessionEnded> {
        let id = self.next_request();
        let pending = self.expect(id, false, b"");
        let submitted = self.service.engine.end(&self.me, id, session);
        pending.resolve(submitted).await
    }

    /// The next thing the session is told; none once it is over or was too slow.
    pub(crate) async fn pushed(&self) -> Option<Push> {
        loop {
            let pushed = self.mailbox.pushed.notified();
            {
                let mut state = self.mailbox.state.lock();
                if let Some(push) = state.pushes.pop_front() {
                    self.mailbox.push_bytes.remove(push_bytes(&push));
                    return Some(push);
                }
                if state.closed {
                    return None;
                }
            }
            pushed.await;
        }
    }

    /// From now on the session is only told which locks it lost.
    pub(crate) fn hear_only_losses(&self) {
        self.mailbox.state.lock().only_losses = true;
    }

    /// What the session was told and nobody has taken.
    pub(crate) fn take_pushes(&self) -> Vec<Push> {
        let pushes: Vec<_> = self.mailbox.state.lock().pushes.drain(..).collect();
        self.mailbox.push_bytes.remove(pushes.iter().map(push_bytes).sum());
        pushes
    }

    /// Whether the session can be used at all: one that was opened before this member of a cluster had taken its place
    /// is never answered.
    pub(crate) fn has_home(&self) -> bool {
        self.service.engine.answers(self.id())
    }

    /// Waits until the session is over.
    pub(crate) async fn gone(&self) {
        loop {
            let gone = self.mailbox.gone.notified();
            if self.is_gone() {
                return;
            }
            gone.await;
        }
    }

    /// Whether the session goes on, but not here.
    pub(crate) fn is_elsewhere(&self) -> bool {
        self.mailbox.state.lock().elsewhere
    }

    /// Whether the session is over.
    pub(crate) fn is_gone(&self) -> bool {
        self.mailbox.state.lock().closed
    }

    /// The client says that it is done: what the session holds is released, as the policy says.
    pub(crate) fn close(&self) {
        if !self.orderly.swap(true, Ordering::SeqCst) {
            self.end(true, false);
        }
    }

    /// The client was not heard of for too long, or the server leaves: the session ends like a lost connection.
    /// If it is `expected`, a client with a reference may come back with another session.
    fn abandon(&self, expected: bool) {
        if !self.orderly.swap(true, Ordering::SeqCst) {
            self.end(false, expected);
        }
    }

    /// The client of a kept session was not heard of for too long (`silent`), or the server leaves: the session waits
    /// for it, as long as this token is valid. What a silent client with a reference has waits for the reference.
    pub(crate) fn detach(&self, pass: Pass, silent: bool) {
        if !self.service.auth.is_valid(TokenKind::Client, pass) {
            return self.revoke();
        }
        self.service.detached.note(&self.me, pass);
        self.abandon(silent);
    }

    /// The token of the client was dropped: the session ends, also one that would wait for its client.
    pub(crate) fn revoke(&self) {
        if !self.orderly.swap(true, Ordering::SeqCst) {
            self.mailbox.shut();
            let mut flushes = PendingFlushes::new();
            let request = self.next_request();
            self.service.engine.end_revoked(&self.me, request, &mut flushes);
            flushes.run();
        }
    }

    fn end(&self, orderly: bool, referenced: bool) {
        self.mailbox.shut();
        let mut flushes = PendingFlushes::new();
        self.service.engine.close(&self.me, orderly, referenced, &mut flushes);
        flushes.run();
    }

    async fn submit(
        &self,
        id: RequestId,
        keep: bool,
        command: Command<'_>,
    ) -> Result<Outcome, SessionEnded> {
        let pending = self.expect(id, keep, command.key().unwrap_or_default());
        let mut flushes = PendingFlushes::new();
        let submitted = self.service.engine.submit(&self.me, id, keep, command, &mut flushes);
        flushes.run();
        pending.resolve(submitted).await
    }

    /// Gets ready for an answer, before the question: it may come at once, from another thread.
    fn expect(&self, id: RequestId, keep: bool, key: &[u8]) -> Pending<'_> {
        let (sender, receiver) = oneshot::channel();
        let place = self.service.engine.place(key);
        let mut state = self.mailbox.state.lock();
        state.last_waiting += 1;
        let number = state.last_waiting;
        let waiting = Waiting { number, sender, place, keep, others: Vec::new() };
        match state.waiting.entry(id) {
            // A request that is repeated while it is open is answered everywhere.
            Entry::Occupied(mut first) => first.get_mut().others.push(waiting),
            Entry::Vacant(free) => {
                free.insert(waiting);
            }
        }
        drop(state);
        Pending { caller: self, id, number, keep, place, receiver, phase: Phase::New }
    }

    pub(crate) fn next_request(&self) -> RequestId {
        let number = self.last_request.fetch_add(1, Ordering::Relaxed) + 1;
        // The bits from 40 on tell the holders of a kept session apart.
        RequestId(RequestId::UNREPEATABLE | self.me.epoch() << 40 | number)
    }
}

impl Drop for Caller {
    fn drop(&mut self) {
        if !*self.orderly.get_mut() {
            self.end(false, false);
        }
    }
}

/// The session of requests that have none. A new one takes its place when it is gone.
pub(crate) struct Common {
    service: Arc<Service>,
    api: Api,
    label: Arc<str>,
    caller: ArcSwap<Caller>,
}

impl Common {
    pub(crate) fn new(service: &Arc<Service>, api: Api, label: &str) -> Self {
        let label: Arc<str> = label.into();
        let caller = Caller::open(service, api, Arc::clone(&label));
        let caller = ArcSwap::from_pointee(caller);
        Self { service: Arc::clone(service), api, label, caller }
    }

    pub(crate) fn get(&self) -> Arc<Caller> {
        let caller = self.caller.load_full();
        if !caller.is_gone() && caller.has_home() {
            return caller;
        }
        let fresh = Caller::open(&self.service, self.api, Arc::clone(&self.label));
        let fresh = Arc::new(fresh);
        self.caller.store(Arc::clone(&fresh));
        fresh
    }
}

/// A request that is not answered yet. Dropping it withdraws the request.
struct Pending<'a> {
    caller: &'a Caller,
    id: RequestId,
    /// Tells those who wait for the same request apart.
    number: u64,
    keep: bool,
    place: Place,
    receiver: oneshot::Receiver<Outcome>,
    phase: Phase,
}

#[derive(PartialEq, Eq)]
enum Phase {
    New,
    Submitted,
    Settled,
}

impl Pending<'_> {
    async fn resolve(mut self, submitted: Submitted) -> Result<Outcome, SessionEnded> {
        match submitted {
            Submitted::Done(outcome) => {
                self.forget();
                Ok(outcome)
            }
            Submitted::Gone => {
                self.forget();
                Err(SessionEnded)
            }
            Submitted::Later(_) => self.wait().await,
        }
    }

    async fn wait(mut self) -> Result<Outcome, SessionEnded> {
        self.phase = Phase::Submitted;
        let answer = (&mut self.receiver).await;
        self.phase = Phase::Settled;
        answer.map_err(|_| {
            if !self.keep {
                // Nobody will ask for it again, wherever the session is now.
                let Caller { service, me, .. } = self.caller;
                let mut flushes = PendingFlushes::new();
                service.engine.cancel(me, self.id, self.place, &mut flushes);
                flushes.run();
            }
            SessionEnded
        })
    }

    fn forget(&mut self) {
        self.phase = Phase::Settled;
        self.caller.mailbox.state.lock().forget(self.id, self.number);
    }
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        if self.phase == Phase::Settled {
            return;
        }
        let Caller { service, mailbox, me, .. } = self.caller;
        let unanswered = {
            let mut state = mailbox.state.lock();
            let waiting = state.forget(self.id, self.number);
            if waiting && self.phase == Phase::Submitted {
                let unheard = if self.keep { &mut state.left } else { &mut state.abandoned };
                unheard.insert(self.id, self.place);
            }
            waiting
        };
        if self.phase == Phase::New || self.keep {
            return;
        }
        let mut flushes = PendingFlushes::new();
        if unanswered {
            service.engine.cancel(me, self.id, self.place, &mut flushes);
        } else if let Some(outcome) = last_word(&mut self.receiver) {
            service.engine.undo(self.place, &outcome, &mut flushes);
        }
        flushes.run();
    }
}

/// The answer that was sent to a receiver which nobody listens to any more. One that is sent later comes back to its
/// sender: an answer that stays in a channel whose receiver is then dropped would be lost with what it gives.
fn last_word(receiver: &mut oneshot::Receiver<Outcome>) -> Option<Outcome> {
    receiver.close();
    receiver.try_recv().ok()
}

/// What a command came to. Whoever cannot tell it to the client drops it, and what it gave is given back.
pub(crate) struct Answer {
    engine: Arc<Engine>,
    place: Place,
    /// Taken once it was told.
    outcome: Option<Outcome>,
}

impl Answer {
    pub(crate) fn outcome(&self) -> &Outcome {
        self.outcome.as_ref().expect("until it is told")
    }

    /// The client has it, or will come back for it.
    pub(crate) fn told(mut self) -> Outcome {
        self.outcome.take().expect("told once")
    }

    /// Whether something is given back if the answer is not told.
    pub(crate) fn gives(&self) -> bool {
        self.outcome.as_ref().is_some_and(Outcome::gives)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if self.gives()
            && let Some(outcome) = &self.outcome
        {
            let mut flushes = PendingFlushes::new();
            self.engine.undo(self.place, outcome, &mut flushes);
            flushes.run();
        }
    }
}

thread_local! {
    /// What is still to be flushed while this thread flushes, and only then.
    static FLUSHING: RefCell<Option<VecDeque<PendingFlushes>>> = const { RefCell::new(None) };
}

/// Flushes the mailboxes that got what a session gave back. If one of them calls this, the others are flushed after it:
/// each may have to give back in turn, and thousands of them within each other would exhaust the stack.
fn run_in_turn(mut flushes: PendingFlushes) {
    /// Whatever happens, the next one begins anew.
    struct Done;
    impl Drop for Done {
        fn drop(&mut self) {
            FLUSHING.set(None);
        }
    }
    let outermost = FLUSHING.with_borrow_mut(|flushing| match flushing {
        Some(later) => {
            later.push_back(std::mem::take(&mut flushes));
            None
        }
        None => {
            *flushing = Some(VecDeque::new());
            Some(Done)
        }
    });
    let Some(_done) = outermost else { return };
    loop {
        flushes.run();
        let next =
            FLUSHING.with_borrow_mut(|flushing| flushing.as_mut().and_then(VecDeque::pop_front));
        let Some(next) = next else { return };
        flushes = next;
    }
}

/// Where the engine leaves what a session must hear.
struct CallMailbox {
    engine: Arc<Engine>,
    api: Api,
    state: Mutex<State>,
    /// What the pushes that wait have in bytes, here and perhaps elsewhere.
    push_bytes: Arc<PushBytes>,
    pushed: Notify,
    gone: Notify,
}

impl Drop for CallMailbox {
    fn drop(&mut self) {
        let pushes = &self.state.get_mut().pushes;
        self.push_bytes.remove(pushes.iter().map(push_bytes).sum());
    }
}

#[derive(Default)]
struct State {
    /// Answers that nobody has looked at.
    arrived: Vec<(RequestId, Outcome)>,
    waiting: HashMap<RequestId, Waiting>,
    last_waiting: u64,
    /// Withdrawn, but not answered yet.
    abandoned: HashMap<RequestId, Place>,
    /// Not answered yet, and nobody waits for the answer now; but somebody will come for it.
    left: HashMap<RequestId, Place>,
    pushes: VecDeque<Push>,
    only_losses: bool,
    closed: bool,
    /// Somebody else has the session, or may get it.
    elsewhere: bool,
}

struct Waiting {
    number: u64,
    sender: oneshot::Sender<Outcome>,
    place: Place,
    keep: bool,
    /// Who asked the same.
    others: Vec<Self>,
}

impl State {
    /// Somebody does not wait for an answer any more; whether it did.
    fn forget(&mut self, id: RequestId, number: u64) -> bool {
        let Entry::Occupied(mut first) = self.waiting.entry(id) else { return false };
        let waiting = first.get_mut();
        if waiting.number == number {
            let mut others = std::mem::take(&mut waiting.others);
            match others.pop() {
                Some(other) => *waiting = Waiting { others, ..other },
                None => {
                    first.remove();
                }
            }
            return true;
        }
        let before = waiting.others.len();
        waiting.others.retain(|other| other.number != number);
        waiting.others.len() < before
    }
}

impl CallMailbox {
    fn new(engine: Arc<Engine>, api: Api, push_bytes: Arc<PushBytes>) -> Self {
        let (pushed, gone) = (Notify::new(), Notify::new());
        Self { engine, api, state: Mutex::default(), push_bytes, pushed, gone }
    }

    /// Where what an answer gave is taken back, if that can be told without knowing what was asked.
    fn place_of(&self, outcome: &Outcome) -> Place {
        if let Outcome::Popped { key, .. } = outcome {
            self.engine.place(key)
        } else {
            Place::UNKNOWN
        }
    }

    /// Nothing more is told or answered.
    fn shut(&self) {
        self.state.lock().closed = true;
        self.flush();
    }
}

impl Mailbox for CallMailbox {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        let mut state = self.state.lock();
        if state.closed {
            return Pushed::Gone;
        }
        state.arrived.push((request, outcome));
        if state.arrived.len() == 1 { Pushed::First } else { Pushed::Behind }
    }

    fn push(&self, push: Push) -> Pushed {
        let mut state = self.state.lock();
        if state.closed {
            return Pushed::Gone;
        }
        let is_loss = matches!(push, Push::Lost { .. });
        if state.only_losses && !is_loss {
            return Pushed::Behind;
        }
        if state.pushes.len() >= PUSHES_MAX {
            if !is_loss {
                return Pushed::Full;
            }
            // Nobody has to listen to these, so nobody is cut off for it.
            if let Some(oldest) = state.pushes.pop_front() {
                self.push_bytes.remove(push_bytes(&oldest));
            }
        }
        while !self.push_bytes.add(push_bytes(&push)) {
            let oldest = if is_loss { state.pushes.pop_front() } else { None };
            let Some(oldest) = oldest else { return Pushed::Full };
            self.push_bytes.remove(push_bytes(&oldest));
        }
        state.pushes.push_back(push);
        if state.pushes.len() == 1 { Pushed::First } else { Pushed::Behind }
    }

    fn overflow(&self) {
        self.close();
    }

    fn close(&self) {
        self.state.lock().closed = true;
    }

    fn hand_over(&self) {
        let mut state = self.state.lock();
        (state.closed, state.elsewhere) = (true, true);
    }

    fn cut(&self) {
        self.hand_over();
    }

    fn api(&self) -> Api {
        self.api
    }

    fn flush(&self) {
        let mut undone = Vec::new();
        let mut answered = Vec::new();
        let mut state = self.state.lock();
        for (request, outcome) in std::mem::take(&mut state.arrived) {
            state.left.remove(&request);
            if let Some(waiting) = state.waiting.remove(&request) {
                answered.push((waiting, outcome));
            } else if let Some(place) = state.abandoned.remove(&request) {
                undone.push((place, outcome));
            } else if !request.is_repeatable() {
                // Asked by an earlier holder of this session, who can not ask again.
                undone.push((self.place_of(&outcome), outcome));
            }
            // Else by one who will repeat it.
        }
        let closed = state.closed;
        // Whoever waits for these learns that the session is gone.
        let unanswered = if closed { std::mem::take(&mut state.waiting) } else { HashMap::new() };
        drop(state);
        for (mut first, outcome) in answered {
            let others = std::mem::take(&mut first.others);
            for Waiting { sender, place, keep, .. } in others.into_iter().chain([first]) {
                if let Err(outcome) = sender.send(outcome.clone())
                    && !keep
                {
                    undone.push((place, outcome));
                }
            }
        }
        drop(unanswered);
        let mut flushes = PendingFlushes::new();
        for (place, outcome) in undone {
            self.engine.undo(place, &outcome, &mut flushes);
        }
        run_in_turn(flushes);
        self.pushed.notify_waiters();
        if closed {
            self.gone.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::pin::{Pin, pin};
    use std::sync::atomic::AtomicU32;
    use std::task::{Context, Poll, Waker};

    use dflockd_core::{End, Mode, Span, command};
    use dflockd_engine::Clock;

    use super::*;
    use crate::config::{Config, Parsed};

    /// Far more than fit on a stack if each were handled within the one before.
    const CALLS: usize = 20_000;

    const ROUNDS: u32 = 20_000;

    fn poll<F: Future>(call: Pin<&mut F>) -> Poll<F::Output> {
        call.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn done(call: impl Future<Output = Result<Answer, SessionEnded>>) -> Answer {
        match poll(pin!(call)) {
            Poll::Ready(answer) => answer.unwrap(),
            Poll::Pending => panic!("it waits"),
        }
    }

    /// Two threads go on at the same moment, which a barrier that sleeps does not do.
    #[derive(Default)]
    struct Meeting(AtomicU32);

    impl Meeting {
        fn meet(&self) {
            let arrived = self.0.fetch_add(1, Ordering::SeqCst) + 1;
            let both = arrived.next_multiple_of(2);
            while self.0.load(Ordering::SeqCst) < both {
                std::hint::spin_loop();
            }
        }
    }

    fn spin(times: u32) {
        for _ in 0..times {
            std::hint::spin_loop();
        }
    }

    fn service() -> Arc<Service> {
        let parsed = Config::from_args(std::iter::empty(), &|_| None).unwrap();
        let Parsed::Run(config) = parsed else { unreachable!("no flags") };
        Arc::new(Service::new(&config, Clock::system(), |job| job()).unwrap())
    }

    fn acquire(wait: Span) -> Command<'static> {
        Command::Acquire(command::Acquire {
            key: b"k",
            mode: Mode::Mutex,
            wait,
            lease: None,
            salt: 7,
        })
    }

    /// A session that holds the lock, and one with many calls that wait for it.
    async fn scene(service: &Arc<Service>) -> (Caller, Arc<Caller>) {
        let holder = Caller::open(service, Api::Http, "holder".into());
        holder.call(Allowed::by_server(acquire(Span::ZERO))).await.unwrap().told();
        let victim = Arc::new(Caller::open(service, Api::Http, "victim".into()));
        for _ in 0..CALLS {
            let victim = Arc::clone(&victim);
            tokio::spawn(async move {
                victim.call(Allowed::by_server(acquire(Span::from_secs(3600)))).await.is_ok()
            });
        }
        while service.engine.tally().unwrap().of(dflockd_core::Primitive::Mutex).waiting
            < CALLS as u64
        {
            tokio::task::yield_now().await;
        }
        (holder, victim)
    }

    async fn lock_is_free(service: &Arc<Service>) {
        let other = Caller::open(service, Api::Http, "other".into());
        let answer = other.call(Allowed::by_server(acquire(Span::from_secs(60)))).await.unwrap();
        assert!(answer.gives(), "{:?}", answer.outcome());
    }

    /// GUARANTEES 48: thousands of open calls whose session was taken over are given back in a loop, not within each
    /// other.
    #[tokio::test]
    async fn open_calls_of_a_session_that_is_taken_over() {
        let service = service();
        let (holder, victim) = scene(&service).await;
        let secret = victim.keep().await.unwrap();
        let now = Caller::attach(&service, Api::Http, "now".into(), secret.unwrap()).await.unwrap();
        // Before any of the calls has noticed: each is granted the lock in turn, and nobody takes it.
        holder.close();
        lock_is_free(&service).await;
        drop(now);
    }

    /// GUARANTEES 26: an answer that is sent while its call is given up is either seen there or comes back to the
    /// sender, who gives back what it gave.
    #[test]
    fn an_answer_to_a_call_that_is_given_up_is_not_lost() {
        let (sender, mut receiver) = oneshot::channel();
        sender.send(Outcome::Done).unwrap();
        assert_eq!(last_word(&mut receiver), Some(Outcome::Done));
        let (sender, mut receiver) = oneshot::channel();
        assert_eq!(last_word(&mut receiver), None);
        // The receiver is still there, as it is while its call is dropped.
        assert_eq!(sender.send(Outcome::Done), Err(Outcome::Done));
        drop(receiver);
    }

    /// GUARANTEES 26, 48: a call is given up by one thread while another one answers it, at every moment of both.
    #[test]
    fn an_item_is_told_or_stays_in_the_list() {
        let service = service();
        let popper = Caller::open(&service, Api::Http, "popper".into());
        let pusher = Caller::open(&service, Api::Http, "pusher".into());
        let pop = |wait| Command::Pop(command::Pop { key: b"l", end: End::Left, wait });
        let ready = Meeting::default();
        let mut lost = 0;
        std::thread::scope(|scope| {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    ready.meet();
                    let push = command::Push { key: b"l", end: End::Right, value: b"v" };
                    done(pusher.call(Allowed::by_server(Command::Push(push)))).told();
                    ready.meet();
                }
            });
            for round in 0..ROUNDS {
                let mut call =
                    Box::pin(popper.call(Allowed::by_server(pop(Some(Span::from_secs(3600))))));
                assert!(poll(call.as_mut()).is_pending());
                ready.meet();
                spin(round % 1024);
                drop(call);
                ready.meet();
                let found = done(pusher.call(Allowed::by_server(pop(None))));
                lost += u32::from(!matches!(found.told(), Outcome::Popped { .. }));
            }
        });
        assert_eq!(lost, 0, "of {ROUNDS} items");
    }

    /// GUARANTEES 48: so are those of a session that was cut off.
    #[tokio::test]
    async fn open_calls_of_a_session_that_is_cut_off() {
        let service = service();
        let (holder, victim) = scene(&service).await;
        victim.mailbox.overflow();
        holder.close();
        lock_is_free(&service).await;
        drop(victim);
    }
}
