//! Sessions, and the way from an effect to whoever waits for it.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dflockd_core::{Outcome, Push, RequestId, SessionId, Usage};
use parking_lot::{Mutex, RwLock};

/// The receiving end of a session: a connection of some transport.
///
/// `reply` and `push` are called while a shard is locked: they only put things aside. Whoever caused them
/// calls `flush` afterwards, when no lock is held.
pub trait Mailbox: Send + Sync {
    /// The answer to an earlier request.
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed;
    /// Something the session is told.
    fn push(&self, push: Push) -> Pushed;
    /// The receiver is too slow for what it is told and must be cut off.
    fn overflow(&self);
    /// The session is no longer this mailbox's: finish what is written and close.
    fn close(&self);
    /// Closes the mailbox because another connection has taken the session over.
    fn hand_over(&self) {
        self.close();
    }
    /// Closes the mailbox because this node was out of touch with the others: nobody else has taken the session over.
    fn cut(&self) {
        self.close();
    }
    /// Through which API the client came.
    fn api(&self) -> Api {
        Api::Line
    }
    /// Delivers what was put aside; does nothing while another thread delivers, which will see it.
    fn flush(&self);
    /// Delivers what was put aside by a mailbox that is nearly full: waits a little for a thread that delivers already.
    fn flush_urgently(&self) {
        self.flush();
    }
}

/// How a client speaks to the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    /// The line protocol.
    Line,
    /// HTTP.
    Http,
    /// gRPC.
    Grpc,
}

impl Api {
    /// All of them, in the order of their discriminants.
    pub const ALL: [Self; 3] = [Self::Line, Self::Http, Self::Grpc];

    /// The name of the API in labels of metrics, lists of sessions and records of operators.
    pub fn name(self) -> &'static str {
        match self {
            Self::Line => "line",
            Self::Http => "http",
            Self::Grpc => "grpc",
        }
    }
}

/// What became of something handed to a mailbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pushed {
    /// Put aside behind other things that somebody will flush.
    Behind,
    /// Put aside; the mailbox wants a flush.
    First,
    /// Put aside; the mailbox wants a flush before more is handed to it.
    Urgent,
    /// No room for it.
    Full,
    /// Nobody is there any more.
    Gone,
}

/// Mailboxes to flush once no lock is held.
#[derive(Default)]
pub struct PendingFlushes {
    mailboxes: Vec<(Arc<dyn Mailbox>, bool)>,
    urgent: bool,
}

impl PendingFlushes {
    /// None.
    #[must_use]
    pub const fn new() -> Self {
        Self { mailboxes: Vec::new(), urgent: false }
    }

    /// Some mailbox is nearly full.
    #[must_use]
    pub fn is_urgent(&self) -> bool {
        self.urgent
    }

    pub(crate) fn add(&mut self, mailbox: &Arc<dyn Mailbox>) {
        self.mailboxes.push((Arc::clone(mailbox), false));
    }

    pub(crate) fn add_urgent(&mut self, mailbox: &Arc<dyn Mailbox>) {
        self.mailboxes.push((Arc::clone(mailbox), true));
        self.urgent = true;
    }

    /// Flushes them all.
    pub fn run(&mut self) {
        self.urgent = false;
        for (mailbox, urgent) in self.mailboxes.drain(..) {
            let flush = || if urgent { mailbox.flush_urgently() } else { mailbox.flush() };
            // One broken connection must neither keep the others from being served nor end the thread that does it.
            if catch_unwind(AssertUnwindSafe(flush)).is_err() {
                mailbox.close();
            }
        }
    }
}

/// The 128 random bits by which a kept session is attached again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionSecret(pub [u8; 16]);

pub(crate) struct Session {
    /// Changes only before anybody but this process has heard of the session ([`Router::rename`]).
    id: AtomicU64,
    /// Through which it was opened.
    api: Api,
    /// A bit per shard that knows the session.
    touched: [AtomicU64; 2],
    /// What it has in all shards together.
    pub(crate) usage: Arc<Usage>,
    /// Raised by each attach; requests of an older one do nothing.
    pub(crate) epoch: AtomicU64,
    /// The cluster was told who is behind the session.
    identified: AtomicBool,
    pub(crate) state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) mailbox: Option<Arc<dyn Mailbox>>,
    pub(crate) label: Arc<str>,
    /// By which the client is known when it comes back.
    pub(crate) reference: Option<Arc<str>>,
    /// Set if the session outlives its connection.
    pub(crate) secret: Option<SessionSecret>,
    /// The session that this one's connection is to have instead, until it takes it.
    pub(crate) attached: Option<Attachment>,
}

impl State {
    /// Leaves an answer for the connection of the session; false if nobody can be told.
    pub(crate) fn deliver(
        &self,
        request: RequestId,
        outcome: &Outcome,
        flushes: &mut PendingFlushes,
    ) -> bool {
        let Some(mailbox) = &self.mailbox else { return false };
        match mailbox.reply(request, outcome.clone()) {
            Pushed::First | Pushed::Urgent => {
                flushes.add(mailbox);
                true
            }
            Pushed::Behind => true,
            Pushed::Full => {
                mailbox.overflow();
                flushes.add(mailbox);
                false
            }
            Pushed::Gone => false,
        }
    }
}

impl Session {
    pub(crate) fn id(&self) -> SessionId {
        SessionId(self.id.load(Ordering::Acquire))
    }

    /// Whether the thread that submits a request of this session may do for it what others could do: HTTP and gRPC hold
    /// no lock then. The threads of line connections do, and first take what their other connections have sent.
    pub(crate) fn may_drive(&self) -> bool {
        self.api != Api::Line
    }

    pub(crate) fn touch(&self, shard: usize) {
        let (word, bit) = (&self.touched[shard / 64], 1 << (shard % 64));
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Whether the cluster was told who is behind the session.
    pub(crate) fn is_identified(&self) -> bool {
        self.identified.load(Ordering::Acquire)
    }

    /// Notes whether the cluster was told who is behind the session; true if that is new.
    pub(crate) fn set_identified(&self, identified: bool) -> bool {
        self.identified.swap(identified, Ordering::AcqRel) != identified
    }

    /// Whether any shard knows the session.
    pub(crate) fn is_touched(&self) -> bool {
        self.shards().next().is_some()
    }

    /// Forgets a shard; true if it was the last.
    pub(crate) fn untouch(&self, shard: usize) -> bool {
        self.touched[shard / 64].fetch_and(!(1 << (shard % 64)), Ordering::Relaxed);
        self.touched.iter().all(|word| word.load(Ordering::Relaxed) == 0)
    }

    /// The shards that know the session.
    pub(crate) fn shards(&self) -> impl Iterator<Item = usize> + use<> {
        let words = [&self.touched[0], &self.touched[1]].map(|word| word.load(Ordering::Relaxed));
        (0..128).filter(move |shard| words[shard / 64] & (1 << (shard % 64)) != 0)
    }
}

/// The right to act for a session, as long as nobody attaches to it elsewhere.
#[derive(Clone)]
pub struct Attachment {
    pub(crate) session: Arc<Session>,
    pub(crate) epoch: u64,
    pub(crate) last_request: RequestId,
}

impl Attachment {
    /// The session's id; for a connection also the connection's.
    #[must_use]
    pub fn id(&self) -> SessionId {
        self.session.id()
    }

    /// How often the session was attached before.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The highest number that a repeatable request of the session had when this began.
    #[must_use]
    pub fn last_request(&self) -> RequestId {
        self.last_request
    }

    /// Gives the session a name that people see.
    pub fn set_label(&self, label: Arc<str>) {
        self.session.state.lock().label = label;
        self.session.set_identified(false);
    }

    /// Gives the session a reference: in a cluster, what it leaves behind waits for a session with the same.
    pub fn set_reference(&self, reference: Arc<str>) {
        self.session.state.lock().reference = Some(reference);
        self.session.set_identified(false);
    }

    /// Flushes the session's mailbox.
    pub fn flush(&self) {
        let mailbox = self.session.state.lock().mailbox.clone();
        if let Some(mailbox) = mailbox {
            mailbox.flush();
        }
    }

    /// Whether the session is kept and nobody has it since this attachment ended.
    pub(crate) fn is_waiting(&self) -> bool {
        let state = self.session.state.lock();
        self.is_current() && state.secret.is_some() && state.mailbox.is_none()
    }

    pub(crate) fn is_current(&self) -> bool {
        self.session.epoch.load(Ordering::SeqCst) == self.epoch
    }
}

const PARTS: usize = 64;

/// All sessions.
pub(crate) struct Router {
    /// In parts, so that many threads seldom meet.
    parts: Vec<RwLock<HashMap<SessionId, Arc<Session>>>>,
    kept: Mutex<HashMap<SessionSecret, Arc<Session>>>,
    last_id: AtomicU64,
    /// How many there are, by API.
    counts: [AtomicU64; 3],
}

impl Router {
    pub(crate) fn new() -> Self {
        Self {
            parts: (0..PARTS).map(|_| RwLock::default()).collect(),
            kept: Mutex::default(),
            last_id: AtomicU64::new(0),
            counts: Default::default(),
        }
    }

    pub(crate) fn open(&self, mailbox: Arc<dyn Mailbox>, label: Arc<str>) -> Attachment {
        let id = SessionId(self.last_id.fetch_add(1, Ordering::Relaxed) + 1);
        self.open_as(id, 0, mailbox, label)
    }

    /// A session whose id was given out elsewhere.
    pub(crate) fn open_as(
        &self,
        id: SessionId,
        epoch: u64,
        mailbox: Arc<dyn Mailbox>,
        label: Arc<str>,
    ) -> Attachment {
        let api = mailbox.api();
        let state =
            State { mailbox: Some(mailbox), label, reference: None, secret: None, attached: None };
        let session = Arc::new(Session {
            id: AtomicU64::new(id.0),
            api,
            touched: [AtomicU64::new(0), AtomicU64::new(0)],
            usage: Arc::default(),
            epoch: AtomicU64::new(epoch),
            identified: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        let before = self.part(id).write().insert(id, Arc::clone(&session));
        self.counts[api as usize].fetch_add(1, Ordering::Relaxed);
        if let Some(before) = before {
            self.counts[before.api as usize].fetch_sub(1, Ordering::Relaxed);
        }
        Attachment { session, epoch, last_request: RequestId(0) }
    }

    /// Gives a session another id, unless it has another one already. Nobody but this process may have heard of it.
    pub(crate) fn rename(&self, session: &Arc<Session>, before: SessionId, id: SessionId) {
        // First, so that an answer to whoever sees the id finds the session.
        self.part(id).write().insert(id, Arc::clone(session));
        let order = Ordering::AcqRel;
        let renamed = session.id.compare_exchange(before.0, id.0, order, Ordering::Acquire);
        let unused = if renamed.is_ok() { before } else { id };
        self.part(unused).write().remove(&unused);
    }

    /// All of them, by their ids.
    pub(crate) fn all(&self) -> Vec<Arc<Session>> {
        let parts = self.parts.iter();
        let mut all: Vec<_> =
            parts.flat_map(|part| part.read().values().cloned().collect::<Vec<_>>()).collect();
        all.sort_by_key(|session| session.id());
        all
    }

    pub(crate) fn get(&self, id: SessionId) -> Option<Arc<Session>> {
        self.part(id).read().get(&id).cloned()
    }

    /// Nobody can attach with this secret any more.
    pub(crate) fn forget_secret(&self, secret: SessionSecret) {
        self.kept.lock().remove(&secret);
    }

    /// Forgets a session for ever.
    pub(crate) fn remove(&self, session: &Session) {
        if let Some(secret) = session.state.lock().secret.take() {
            self.forget_secret(secret);
        }
        let id = session.id();
        let mut part = self.part(id).write();
        if part.get(&id).is_some_and(|known| std::ptr::eq(&**known, session)) {
            part.remove(&id);
            self.counts[session.api as usize].fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// How many sessions there are that were opened through an API.
    pub(crate) fn count(&self, api: Api) -> u64 {
        self.counts[api as usize].load(Ordering::Relaxed)
    }

    /// Lets a session outlive its connection, unless `max` others do; 0 = unlimited.
    pub(crate) fn keep(&self, session: &Arc<Session>, secret: SessionSecret, max: u64) -> bool {
        let mut state = session.state.lock();
        let mut kept = self.kept.lock();
        if max > 0 && kept.len() as u64 >= max {
            return false;
        }
        state.secret = Some(secret);
        kept.insert(secret, Arc::clone(session));
        true
    }

    pub(crate) fn find_kept(&self, secret: SessionSecret) -> Option<Arc<Session>> {
        self.kept.lock().get(&secret).cloned()
    }

    /// The first sessions after `after`, in order, `limit` at most.
    pub(crate) fn ids(&self, after: SessionId, limit: usize) -> BTreeSet<SessionId> {
        let mut ids = BTreeSet::new();
        for part in &self.parts {
            let mut part: Vec<_> = part.read().keys().filter(|&&id| id > after).copied().collect();
            part.sort_unstable();
            ids.extend(part.into_iter().take(limit));
            while ids.len() > limit {
                ids.pop_last();
            }
        }
        ids
    }

    /// Through which API the session's client came, if it is there.
    pub(crate) fn api(&self, id: SessionId) -> Option<Api> {
        let session = self.get(id)?;
        let state = session.state.lock();
        state.mailbox.as_ref().map(|mailbox| mailbox.api())
    }

    pub(crate) fn label(&self, id: SessionId) -> Option<Arc<str>> {
        self.get(id).map(|session| Arc::clone(&session.state.lock().label))
    }

    fn part(&self, id: SessionId) -> &RwLock<HashMap<SessionId, Arc<Session>>> {
        &self.parts[usize::try_from(id.0 % PARTS as u64).expect("small")]
    }
}
