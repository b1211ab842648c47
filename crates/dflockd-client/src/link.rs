//! One multiplexed connection to one server, or to one member of a cluster at a time, kept alive over disconnects.
//!
//! Requests are numbered. While the session is kept, a request whose answer was lost is sent again with its
//! number after the session is attached to a new connection, and the server answers it exactly once. In a
//! cluster the session is everybody's: the new connection may go to any member.
//!
//! Here are the requests and what becomes of them; `serve.rs` carries them over one connection after the other.

mod serve;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dflockd_wire::{Command, End, ErrorCode, Gift, Request, RequestId, Space, Unit, command};
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::clock::Instant;
use crate::cluster::Route;
use crate::error::{Error, Lost};
use crate::guard::Hold;
use crate::reply::{Incoming, Reply};
use crate::stream::{Connection, Message, Transport};

/// A member that answers later than this does so because it gave up: its own limit is 5 s.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(4);
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
    /// A connection that is silent for so long is asked whether it stands, and given up if it does not answer.
    pub(crate) heartbeat: Duration,
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
    route: Route,
    on_disconnect: OnDisconnect,
    heartbeat: Duration,
    state: Mutex<State>,
    /// There is something to send, or the link is closed.
    wake: Notify,
    /// The link is closed while it has no connection.
    closing: Notify,
}

#[derive(Default)]
struct State {
    transport: Transport,
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
    /// What is known of the member of a cluster at the other end.
    member: Contact,
    /// The shortest lease since there were no holds.
    lease_min: Option<Duration>,
}

/// A link's dealings with a member of a cluster.
#[derive(Default)]
struct Contact {
    /// Where it is.
    address: String,
    /// When an answer last proved that it is in touch with the leader.
    touched_at: Option<Instant>,
    /// When it was last asked for such a proof that has not come.
    probed_at: Option<Instant>,
    /// Why it is to be left.
    leave: Option<&'static str>,
    /// Attempts to attach whose outcome was never heard. Each may still be executed, and take the session away
    /// from the member where it is by then.
    ghosts: u32,
}

/// Who waits for an answer.
type Waiter = oneshot::Sender<Result<Answer, Error>>;

struct Pending {
    message: Message,
    kind: Kind,
    /// When it went out last; none if it never did, or was certainly not executed.
    sent_at: Option<Instant>,
    /// None if nobody waits for it.
    answer: Option<Waiter>,
    give_back: Option<GiveBack>,
}

/// What kind of request it is, and what its answer tells of a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Answered by the member itself.
    Local,
    /// Who belongs to the cluster, answered by the member itself.
    Members,
    /// Whether the member is in touch with the leader.
    Probe,
    /// May be repeated at will.
    Read,
    /// Executed once by the whole cluster.
    Write,
}

/// What was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    /// Only what the link itself wanted to know or say.
    Own,
    /// Something that somebody waits for.
    Awaited,
}

/// Why a request is to be repeated at another member.
#[derive(Debug, PartialEq, Eq)]
enum Elsewhere<'a> {
    /// It was not executed; only the leader takes requests.
    NotLeader(Option<&'a str>),
    /// It was not executed; the member goes.
    Draining,
    /// The member could not learn what became of it. Repeated under its number it is executed once.
    GivenUp,
}

impl Pending {
    /// Whether this answer of a member settles nothing.
    fn elsewhere<'a>(&self, reply: &'a Reply, kept: bool) -> Option<Elsewhere<'a>> {
        if let Reply::NotLeader(leader) = reply {
            return Some(Elsewhere::NotLeader(leader.as_deref()));
        }
        let Reply::Refused(code) = *reply else { return None };
        if code == ErrorCode::Draining {
            return Some(Elsewhere::Draining);
        }
        let late = self.sent_at.is_some_and(|sent_at| sent_at.elapsed() > GIVEN_UP_AFTER);
        let given_up = match (code, self.kind) {
            // At once means that the result is forgotten: no other member knows better.
            (ErrorCode::Unknown, _) => kept && late,
            (ErrorCode::Error | ErrorCode::Unavailable, Kind::Read | Kind::Probe) => late,
            _ => false,
        };
        given_up.then_some(Elsewhere::GivenUp)
    }
}

/// How to undo a request when nobody waits for it any more.
#[derive(Clone)]
enum GiveBack {
    /// Withdraw it.
    Nothing,
    /// Withdraw it, and release the lock if it was granted.
    Lock { key: Vec<u8>, space: Space },
    /// Withdraw it, and put the item back if there was one.
    Item { key: Vec<u8>, end: End },
}

/// What kind of request it is, and how to undo it if there is anything to undo.
fn nature_of(request: &Request<'_>) -> (Kind, Option<GiveBack>) {
    match *request {
        Request::Command(Command::Cancel(_) | Command::Acknowledge(_))
        | Request::Auth { .. }
        | Request::Hello { .. }
        | Request::StableRef { .. }
        | Request::Ping
        | Request::Stats
        | Request::Members => (Kind::Local, None),
        Request::Query(_) | Request::Inspect { .. } | Request::Ls { .. } => (Kind::Read, None),
        Request::Command(ref command) => (Kind::Write, give_back(command)),
        Request::Barrier
        | Request::ForceRelease { .. }
        | Request::EndSession { .. }
        | Request::Cluster { .. } => (Kind::Write, None),
    }
}

/// How to undo a command that nobody waits for any more; none if there is nothing to undo.
fn give_back(command: &Command<'_>) -> Option<GiveBack> {
    let key = command.key().unwrap_or_default().to_vec();
    match command.gift() {
        Some(Gift::Lock(space)) => Some(GiveBack::Lock { key, space }),
        Some(Gift::Item(end)) => Some(GiveBack::Item { key, end }),
        None => command.may_wait().then_some(GiveBack::Nothing),
    }
}

/// How long the server may let a request wait.
pub(crate) fn wait_of(request: &Request<'_>) -> Duration {
    if let Request::Command(command) = request { command.wait().into() } else { Duration::ZERO }
}

/// An answer on its way. If it is dropped before somebody claims it, the lock it grants is given back.
pub(crate) struct Answer {
    reply: Reply,
    link: Weak<Link>,
    give_back: Option<GiveBack>,
}

impl Answer {
    pub(crate) fn claim(mut self) -> Reply {
        self.give_back = None;
        std::mem::replace(&mut self.reply, Reply::Nil)
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        let Some(link) = self.link.upgrade() else { return };
        match (&self.give_back, &self.reply) {
            (Some(GiveBack::Lock { key, space }), Reply::Granted { token, .. }) => {
                link.forget_hold(token.fence.0);
                let (space, token) = (*space, *token);
                let release = command::Release { space, key, token, resign: false };
                link.tell(&Request::command(release));
            }
            (Some(GiveBack::Item { key, end }), Reply::Value(value)) if !value.is_empty() => {
                link.tell(&Request::command(command::Push { key, end: *end, value }));
            }
            (Some(_) | None, _) => {}
        }
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
    /// A link over a connection that has been greeted. `address` is where it goes.
    pub(crate) fn start(
        route: Route,
        address: String,
        start: Start,
        connection: Connection,
        session: Option<String>,
    ) -> Arc<LinkHandle> {
        let Start { on_disconnect, heartbeat, last } = start;
        let is_better_elsewhere = route.cluster().is_some_and(|it| it.is_better_elsewhere());
        let leave = is_better_elsewhere.then_some("the leader is elsewhere");
        let member = Contact { address, leave, ..Contact::default() };
        let transport = route.transport();
        let state = State { transport, session, last, member, ..State::default() };
        let link = Arc::new(Self {
            route,
            on_disconnect,
            heartbeat,
            state: Mutex::new(state),
            wake: Notify::new(),
            closing: Notify::new(),
        });
        tokio::spawn(serve::run(Arc::clone(&link), connection));
        Arc::new(LinkHandle(link))
    }

    /// Sends a request. If nobody waits for it any more, what it brings is given back.
    pub(crate) fn call(self: &Arc<Self>, request: &Request<'_>) -> Result<Call, Error> {
        let (sender, answer) = oneshot::channel();
        let mut state = self.state.lock();
        if state.closed {
            return Err(Error::Closed);
        }
        if state.pending.len() >= OPEN_MAX {
            return Err(Error::Invalid("too many requests are open".to_owned()));
        }
        let number = state.push(request, Some(sender));
        drop(state);
        self.wake.notify_one();
        Ok(Call { link: Arc::clone(self), number, answer })
    }

    /// Sends a request whose answer does not matter. What it brings is given back.
    pub(crate) fn tell(&self, request: &Request<'_>) {
        // After the link was closed as well: it says goodbye to what it still owes.
        self.state.lock().push(request, None);
        self.wake.notify_one();
    }

    /// Lets the link tell a hold that it was lost, or has been already.
    pub(crate) fn watch_hold(&self, hold: &Arc<Hold>) {
        let mut state = self.state.lock();
        if let Some(Some(reason)) = state.fresh.remove(&hold.fence()) {
            drop(state);
            return hold.lose(reason);
        }
        let shortest = if state.holds.is_empty() { None } else { state.lease_min };
        state.lease_min = Some(shortest.map_or(hold.lease(), |lease| lease.min(hold.lease())));
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
        let sent = state.pending.get(&number).is_none_or(|pending| pending.sent_at.is_some());
        match &state.trouble {
            Some(trouble) if !sent => trouble.clone(),
            _ if sent => Error::Unknown { reason: "no answer in time".to_owned() },
            _ => self.route.unreachable("no connection in time"),
        }
    }

    /// Nobody waits for this request any more.
    fn withdraw(&self, number: u64) {
        let mut state = self.state.lock();
        let Some(pending) = state.pending.get_mut(&number) else { return };
        if pending.sent_at.is_none() {
            state.pending.remove(&number);
            return;
        }
        pending.answer = None;
        if pending.give_back.is_some() {
            let cancel = command::Cancel { request: RequestId(number) };
            state.push(&Request::command(cancel), None);
            drop(state);
            self.wake.notify_one();
        }
    }

    /// Handles what came from the server.
    fn handle(self: &Arc<Self>, incoming: Incoming) {
        match incoming {
            Incoming::Reply(Some(number), reply) => self.handle_reply(number, reply),
            Incoming::Lost { fence, reason } => {
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
            }
            Incoming::Detached => self.state.lock().detached = true,
            Incoming::Reply(None, _) | Incoming::Event(_) | Incoming::Other => {}
        }
    }

    fn handle_reply(self: &Arc<Self>, number: u64, reply: Reply) {
        let mut state = self.state.lock();
        if self.route.cluster().is_some() && self.is_for_another(&mut state, number, &reply) {
            return;
        }
        let Some(pending) = state.pending.remove(&number) else { return };
        match pending.kind {
            Kind::Local => {}
            Kind::Members => {
                drop(state);
                return self.handle_members(&reply);
            }
            Kind::Probe => {
                state.member.probed_at = None;
                state.member.touched_at = Some(Instant::now());
                return;
            }
            Kind::Read | Kind::Write => state.member.touched_at = Some(Instant::now()),
        }
        if matches!(pending.give_back, Some(GiveBack::Lock { .. }))
            && let Reply::Granted { token, .. } = &reply
        {
            state.fresh.insert(token.fence.0, None);
        }
        state.answered += 1;
        if state.answered >= ACKNOWLEDGE_EVERY && self.on_disconnect == OnDisconnect::Keep {
            state.answered = 0;
            let first_open = state.pending.keys().next().copied();
            let up_to = first_open.map_or(state.last, |first| first - 1);
            if up_to > 0 {
                let acknowledge = command::Acknowledge { up_to: RequestId(up_to) };
                state.push(&Request::command(acknowledge), None);
                self.wake.notify_one();
            }
        }
        // Before the answer goes anywhere: what happens to it may need the state.
        drop(state);
        let Pending { answer, give_back, .. } = pending;
        let told = Answer { reply, link: Arc::downgrade(self), give_back };
        if let Some(answer) = answer {
            let _ = answer.send(Ok(told));
        }
    }

    /// Leaves a member that can not answer a request, which stays to be asked elsewhere. False: the answer counts.
    fn is_for_another(&self, state: &mut State, number: u64, reply: &Reply) -> bool {
        let kept = self.on_disconnect == OnDisconnect::Keep;
        let Some(pending) = state.pending.get_mut(&number) else { return false };
        let Some(why) = pending.elsewhere(reply, kept) else { return false };
        match why {
            Elsewhere::NotLeader(_) | Elsewhere::Draining => pending.sent_at = None,
            Elsewhere::GivenUp => {}
        }
        let is_wanted = match pending.kind {
            Kind::Local | Kind::Members | Kind::Probe => false,
            Kind::Read => pending.answer.is_some(),
            Kind::Write => true,
        };
        if !is_wanted {
            state.pending.remove(&number);
        }
        let reason = match why {
            Elsewhere::NotLeader(_) => "the member does not lead",
            Elsewhere::Draining => "the member is shutting down",
            Elsewhere::GivenUp => "the member is out of touch",
        };
        if let (Elsewhere::NotLeader(leader), Some(cluster)) = (why, self.route.cluster()) {
            cluster.handle_redirect(leader);
        }
        state.member.leave.get_or_insert(reason);
        true
    }

    /// What a member tells of the cluster.
    fn handle_members(&self, reply: &Reply) {
        let Some(cluster) = self.route.cluster() else { return };
        let address = self.state.lock().member.address.clone();
        cluster.learn(&address, reply, true);
        if cluster.is_better_elsewhere() {
            self.state.lock().member.leave.get_or_insert("the leader is elsewhere");
        }
    }

    /// Gives the connection what is to be sent now; none if there is nothing.
    fn queue_unsent(&self, connection: &mut Connection) -> Option<Sent> {
        let mut state = self.state.lock();
        let unsent = std::mem::take(&mut state.unsent);
        let mut sent = (!unsent.is_empty()).then_some(Sent::Own);
        for number in &unsent {
            if let Some(pending) = state.pending.get_mut(number) {
                pending.sent_at = Some(Instant::now());
                connection.queue(Some(*number), &pending.message);
                if pending.answer.is_some() {
                    sent = Some(Sent::Awaited);
                }
            }
        }
        sent
    }

    /// A connection stands: everything that is not answered goes out, again or for the first time.
    fn handle_connected(&self, session: Option<String>, address: &str) {
        let mut state = self.state.lock();
        state.trouble = None;
        let is_kept = session.is_some() && session == state.session;
        state.session = session;
        let ghosts = state.member.ghosts;
        state.member = Contact { address: address.to_owned(), ghosts, ..Contact::default() };
        let outdated = |pending: &mut Pending| matches!(pending.kind, Kind::Members | Kind::Probe);
        state.pending.retain(|_, pending| !outdated(pending));
        state.unsent = state.pending.keys().copied().collect();
        let holds = state.holds.values().filter_map(Weak::upgrade);
        let holds: Vec<_> = if is_kept { holds.collect() } else { Vec::new() };
        drop(state);
        if let Some(cluster) = self.route.cluster() {
            cluster.handle_attached(address);
        }
        // If one was lost meanwhile, nobody could tell.
        for hold in holds {
            hold.renew_soon();
        }
    }

    /// The connection is gone, and with it, unless the session is kept, all that it owned.
    fn handle_disconnected(&self, reason: &str) {
        let mut state = self.state.lock();
        let detached = std::mem::take(&mut state.detached);
        let by_another = detached && !(self.route.cluster().is_some() && state.is_own_doing());
        let address = state.member.address.clone();
        drop(state);
        if let Some(cluster) = self.route.cluster() {
            cluster.handle_failure(&address);
            cluster.handle_detached();
        }
        if by_another {
            self.handle_session_lost(Lost::Session, "the session was taken over or has ended");
        } else if self.on_disconnect == OnDisconnect::Release {
            self.handle_session_lost(Lost::Disconnected, reason);
        }
    }

    /// The session is gone: its holds are lost, and what was sent may or may not have been executed.
    fn handle_session_lost(&self, lost: Lost, reason: &str) {
        let (holds, failed) = {
            let mut state = self.state.lock();
            state.session = None;
            state.member.ghosts = 0;
            state.fresh.values_mut().for_each(|fresh| *fresh = fresh.or(Some(lost)));
            let holds = std::mem::take(&mut state.holds);
            let sent: Vec<u64> = state
                .pending
                .iter()
                .filter(|(_, it)| it.sent_at.is_some())
                .map(|(&at, _)| at)
                .collect();
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
}

impl State {
    fn push(&mut self, request: &Request<'_>, answer: Option<Waiter>) -> u64 {
        let (kind, give_back) = nature_of(request);
        self.last += 1;
        let message = Message::new(request, self.transport, Unit::Millis);
        let pending = Pending { message, kind, sent_at: None, answer, give_back };
        self.pending.insert(self.last, pending);
        self.unsent.push(self.last);
        self.last
    }

    /// Asks the member something for the link itself.
    fn push_as(&mut self, kind: Kind, request: &Request<'_>) {
        let number = self.push(request, None);
        self.pending.entry(number).and_modify(|pending| pending.kind = kind);
    }

    /// Whether nobody else need have taken the session: an attempt of our own came late, or the others have given
    /// this member up.
    fn is_own_doing(&mut self) -> bool {
        if self.member.ghosts > 0 {
            self.member.ghosts -= 1;
            return true;
        }
        let for_long = |at: Option<Instant>, limit| at.is_some_and(|at| at.elapsed() > limit);
        for_long(self.member.probed_at, serve::PROBE_SLOW)
            || for_long(self.member.touched_at, serve::OUT_OF_TOUCH)
    }
}
