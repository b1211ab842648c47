//! The two engines behind one face.

use std::collections::HashSet;
use std::sync::Arc;

use dflockd_core::{
    Bytes, Change, Command, Contention, KeyView, Listed, LockPage, LockView, Outcome, Query,
    Refusal, RequestId, Revision, Separators, SessionId, SessionView, Store, Survey, Tally,
};

use crate::clock::Clock;
use crate::memory::{Memory, Place, Submitted};
use crate::replicated::{Leader, Replicated, View};
use crate::router::{Api, Attachment, Mailbox, PendingFlushes, SessionSecret};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Incarnation, ProposalBody};
use tokio::sync::watch;

/// Keys of each kind in a survey of a cluster's state: it is made by the thread that everything else waits for.
pub(crate) const NAMES_MAX: usize = 5000;

/// Changes of all keys that are handed out at a time.
pub const LATEST_MAX: usize = 1024;

/// What keeps the state.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum Engine {
    /// The memory of this process keeps the state.
    Memory(Memory),
    /// A cluster keeps the state; this process is a member of it.
    Replicated(Arc<Replicated>),
}

/// A session as an operator sees it.
pub struct SessionInfo {
    /// The number of the session.
    pub id: SessionId,
    /// The name of the client for people, if it is known.
    pub label: Option<Arc<str>>,
    /// How the client of the session speaks to this process, if it does.
    pub api: Option<Api>,
    /// What the session holds, waits for and subscribes to.
    pub view: SessionView,
}

/// The name of a client, as the state has it, for people.
#[must_use]
pub fn readable(name: &[u8]) -> Arc<str> {
    String::from_utf8_lossy(name).into()
}

/// What became of an attach.
pub enum Attaching {
    /// The session, unless there is none with this secret.
    Done(Option<Attachment>),
    /// The answer comes through the mailbox; then [`Engine::attached`] has the session.
    Later,
}

/// Tells whoever follows that there are changes up to a revision.
pub(crate) fn tell_growth(growth: &watch::Sender<Revision>, revision: impl FnOnce() -> Revision) {
    if growth.receiver_count() == 0 {
        return;
    }
    let revision = revision();
    growth.send_if_modified(|told| {
        let is_more = revision > *told;
        *told = revision.max(*told);
        is_more
    });
}

/// The kept changes in a store, see [`Engine::changes`].
fn changes_of(
    store: &Store,
    pattern: &[u8],
    after: Revision,
    max: usize,
) -> Result<(Vec<Change>, Revision), Revision> {
    let upto = store.revision();
    if after > upto {
        // Of a cluster that was restored from a backup, or this node is behind.
        return Ok((Vec::new(), after));
    }
    let changes = store.changes(pattern, Separators::NEWEST, after, upto, max)?;
    let full = changes.len() == max;
    let last = changes.last().map(|change| change.revision);
    Ok((changes, last.filter(|_| full).unwrap_or(upto)))
}

impl Engine {
    /// Where connections take their time from.
    #[must_use]
    pub fn clock(&self) -> &Clock {
        match self {
            Self::Memory(memory) => memory.clock(),
            Self::Replicated(member) => member.clock(),
        }
    }

    /// The member of a cluster, if it is one.
    #[must_use]
    pub fn replicated(&self) -> Option<&Arc<Replicated>> {
        match self {
            Self::Memory(_) => None,
            Self::Replicated(member) => Some(member),
        }
    }

    /// Whether the state is kept by a cluster, behind a log.
    #[must_use]
    pub fn is_replicated(&self) -> bool {
        self.replicated().is_some()
    }

    /// Whether clients should come here.
    #[must_use]
    pub fn is_ready(&self) -> bool {
        self.replicated().is_none_or(|member| member.is_ready())
    }

    /// Whether this process votes in a cluster but keeps no state.
    #[must_use]
    pub fn is_witness(&self) -> bool {
        self.replicated().is_some_and(|member| member.is_witness())
    }

    /// The name of this process in its cluster.
    #[must_use]
    pub fn node(&self) -> Option<&str> {
        self.replicated().map(|member| member.node())
    }

    /// The cluster as this process sees it; none if it is no member of one.
    #[must_use]
    pub fn view(&self) -> Option<View> {
        self.replicated().map(|member| member.view())
    }

    /// Whether requests are served by this process: a witness serves none, and some are only for the leader.
    ///
    /// # Errors
    ///
    /// If not: where the leader is.
    pub fn serves(&self, leader_only: bool) -> Result<(), Leader> {
        match self {
            // It may lead for a moment, but is nobody to send clients to.
            Self::Replicated(member) if member.is_witness() => {
                Err(member.leadership().err().unwrap_or_default())
            }
            Self::Replicated(member) if leader_only => member.leadership(),
            Self::Memory(_) | Self::Replicated(_) => Ok(()),
        }
    }

    /// Executes a command for a session. Mailboxes of others that have something to do are added to `flushes`. The salt
    /// of a token is drawn here, for all APIs.
    pub fn submit(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        mut command: Command<'_>,
        flushes: &mut PendingFlushes,
    ) -> Submitted {
        match self {
            Self::Memory(_) => command.draw_salt(rand::random),
            Self::Replicated(member) => command.draw_salt(|| member.chance().draw()),
        }
        match self {
            Self::Memory(memory) => memory.submit(by, request, keep, command, flushes),
            Self::Replicated(member) => member.submit(by, request, keep, command),
        }
    }

    /// Answers a read.
    pub fn query(&self, by: &Attachment, request: RequestId, query: Query<'_>) -> Submitted {
        match self {
            Self::Memory(memory) => Submitted::Done(memory.query(query)),
            Self::Replicated(member) => member.query(by, request, query),
        }
    }

    /// Answers when everything that was done before, by anybody, can be seen here.
    pub fn barrier(&self, by: &Attachment, request: RequestId) -> Submitted {
        match self {
            Self::Memory(_) => Submitted::Done(Outcome::Done),
            Self::Replicated(member) => member.act(by, request, ProposalBody::Barrier),
        }
    }

    /// Withdraws a blocked request. Its answer comes through the mailbox, unless it was answered before. A connection
    /// may do this for its own requests even after the session was attached elsewhere.
    pub fn cancel(
        &self,
        by: &Attachment,
        request: RequestId,
        place: Place,
        flushes: &mut PendingFlushes,
    ) {
        match self {
            Self::Memory(memory) => memory.cancel(by, request, place, flushes),
            Self::Replicated(member) => member.cancel(by, request),
        }
    }

    /// Gives back what could not be told to the one who asked for it.
    pub fn undo(&self, place: Place, outcome: &Outcome, flushes: &mut PendingFlushes) {
        match self {
            Self::Memory(memory) => memory.undo(place, outcome, flushes),
            Self::Replicated(member) => member.undo(outcome),
        }
    }

    /// Where requests for a key are executed.
    #[must_use]
    pub fn place(&self, key: &[u8]) -> Place {
        match self {
            Self::Memory(memory) => memory.place(key),
            Self::Replicated(_) => Place::ANY,
        }
    }

    /// Where all requests are executed, if that is one place: a cluster has one log.
    #[must_use]
    pub fn only_place(&self) -> Option<Place> {
        self.replicated().map(|_| Place::ANY)
    }

    /// Whether requests of a session are ever answered. One that was opened before this member of a cluster had taken
    /// its place has no answers.
    #[must_use]
    pub fn answers(&self, id: SessionId) -> bool {
        !self.is_replicated() || Incarnation::of(id) != Incarnation(0)
    }

    /// Everything there is, as far as this process knows. May take a while.
    pub fn survey(&self, each_max: usize) -> Survey {
        match self {
            Self::Memory(memory) => memory.survey(each_max),
            Self::Replicated(member) => {
                // As of the last entry, so that members who have the same state say the same.
                let survey = member.look(false, move |machine| {
                    machine.store().map(|store| store.survey(machine.now(), each_max, NAMES_MAX))
                });
                survey.flatten().unwrap_or_default()
            }
        }
    }

    /// Everything a key is; none if nobody can say. May take a while.
    pub fn inspect(&self, key: &[u8], each_max: usize) -> Option<Vec<KeyView>> {
        match self {
            Self::Memory(memory) => Some(memory.inspect(key, each_max)),
            Self::Replicated(member) => {
                let key = key.to_vec();
                let views = member.look(true, move |machine| {
                    machine.store().map(|store| store.inspect(&key, machine.shown(), each_max))
                });
                views.flatten()
            }
        }
    }

    /// A page of keys in order that begin with one of these prefixes. A key that is several things is not split, so it
    /// can be a little longer. None if nobody can say.
    pub fn ls(
        &self,
        within: &[Vec<u8>],
        after: Option<&[u8]>,
        limit: usize,
    ) -> Option<Vec<Listed>> {
        match self {
            Self::Memory(memory) => Some(memory.ls(within, after, limit)),
            Self::Replicated(member) => {
                let (within, after) = (within.to_vec(), after.map(<[u8]>::to_vec));
                let listed = member.look(true, move |machine| {
                    let ls =
                        |store: &Store| store.ls(&within, after.as_deref(), limit, machine.shown());
                    machine.store().map(ls)
                });
                listed.flatten()
            }
        }
    }

    /// A page of locks in order with at most `each_max` holders and waiters each, and the key after which the next
    /// page begins. What changes meanwhile is on it or not. None if nobody can say. May take a while.
    pub fn locks(&self, page: LockPage, each_max: usize) -> Option<(Vec<LockView>, Option<Bytes>)> {
        match self {
            Self::Memory(memory) => Some(memory.locks(page, each_max)),
            Self::Replicated(member) => {
                let page = member.look_at_locks(page, |store, slots, _, page| {
                    store.page_locks(slots, page);
                })?;
                let next = page.next().cloned();
                let views = member.look(false, move |machine| {
                    let store = machine.store()?;
                    let view =
                        |key: &Bytes| store.view_locks(key, page.only(), machine.shown(), each_max);
                    Some(page.keys().flat_map(view).collect())
                });
                Some((views.flatten()?, next))
            }
        }
    }

    /// The locks with the longest queues. None if nobody can say. May take a while.
    pub fn contention(&self, page: Contention) -> Option<Contention> {
        match self {
            Self::Memory(memory) => Some(memory.contention(page)),
            Self::Replicated(member) => member.look_at_locks(page, |store, slots, now, page| {
                store.page_contention(slots, now, page);
            }),
        }
    }

    /// The first sessions after `after`, in order, `limit` at most: of the whole cluster, if it is one. None if
    /// nobody can say. May take a while.
    pub fn sessions(&self, after: SessionId, limit: usize) -> Option<Vec<SessionInfo>> {
        match self {
            Self::Memory(memory) => Some(memory.sessions(after, limit)),
            Self::Replicated(member) => {
                // Some have done nothing yet, so that the cluster does not know them.
                let mut ids = member.router().ids(after, limit);
                let views = member.look(true, move |machine| {
                    let store = machine.store()?;
                    ids.extend(store.sessions(after, limit));
                    let ids = ids.into_iter().take(limit);
                    let seen = ids.map(|id| {
                        let name = store.client_name(id).map(|name| readable(name));
                        (id, store.view_session(id), name)
                    });
                    Some(seen.collect::<Vec<_>>())
                });
                let infos = views.flatten()?.into_iter().map(|(id, view, name)| {
                    let (label, api) = (name.or_else(|| member.label(id)), member.router().api(id));
                    SessionInfo { id, label, api, view }
                });
                Some(infos.collect())
            }
        }
    }

    /// The sessions that hold or wait for something, all requests seen that were made here before. None if nobody can
    /// say. May take a while.
    pub fn busy_sessions(&self) -> Option<HashSet<SessionId>> {
        match self {
            Self::Memory(memory) => Some(memory.busy_sessions()),
            Self::Replicated(member) => {
                let busy = |machine: &Machine| Some(machine.store()?.busy_sessions().collect());
                member.look(true, busy).flatten()
            }
        }
    }

    /// What has happened here and how much there is. None if this process keeps no state or can not say. May take a
    /// while, but not longer for a million locks than for one.
    pub fn tally(&self) -> Option<Tally> {
        match self {
            Self::Memory(memory) => Some(memory.tally()),
            Self::Replicated(member) => {
                member.look(false, |machine| machine.store().map(Store::tally)).flatten()
            }
        }
    }

    /// How many sessions this process has that were opened through an API.
    #[must_use]
    pub fn session_count(&self, api: Api) -> u64 {
        match self {
            Self::Memory(memory) => memory.session_count(api),
            Self::Replicated(member) => member.router().count(api),
        }
    }

    /// Follows the history: the receiver wakes up when there are changes after the revision that it was told last. Who
    /// has it looks once, for what was there before; from then on no change is missed. A change costs nothing more
    /// while nobody follows.
    #[must_use]
    pub fn follow(&self) -> watch::Receiver<Revision> {
        match self {
            Self::Memory(memory) => memory.follow(),
            Self::Replicated(member) => member.follow(),
        }
    }

    /// The revision of the last change, as far as this process knows. May take a while.
    #[must_use]
    pub fn revision(&self) -> Option<Revision> {
        match self {
            Self::Memory(memory) => Some(memory.revision()),
            Self::Replicated(member) => {
                member.glance(|machine| machine.store().map(Store::revision)).flatten()
            }
        }
    }

    /// The kept changes of keys that match, after a revision, in order, and the revision up to which there are no
    /// others. None if nobody can say. May take a while.
    ///
    /// # Errors
    ///
    /// If some of them are no longer kept: the last revision that is gone.
    pub fn changes(
        &self,
        pattern: &[u8],
        after: Revision,
        max: usize,
    ) -> Option<Result<(Vec<Change>, Revision), Revision>> {
        match self {
            Self::Memory(memory) => Some(memory.changes(pattern, after, max)),
            Self::Replicated(member) => {
                let pattern = pattern.to_vec();
                let look = move |store: &Store| changes_of(store, &pattern, after, max);
                member.look(false, move |machine| machine.store().map(look)).flatten()
            }
        }
    }

    /// As [`Engine::changes`], of all keys and [`LATEST_MAX`] at most: takes no longer than a command.
    ///
    /// # Errors
    ///
    /// If some of them are no longer kept: the last revision that is gone.
    pub fn latest_changes(
        &self,
        after: Revision,
    ) -> Option<Result<(Vec<Change>, Revision), Revision>> {
        match self {
            Self::Memory(memory) => Some(memory.changes(b">", after, LATEST_MAX)),
            Self::Replicated(member) => {
                let look = move |store: &Store| changes_of(store, b">", after, LATEST_MAX);
                member.glance(move |machine| machine.store().map(look)).flatten()
            }
        }
    }

    /// The last `max` changes of keys that match that are still kept, oldest first. None if nobody can say. May take a
    /// while.
    pub fn recent_changes(&self, pattern: &[u8], max: usize) -> Option<Vec<Change>> {
        match self {
            Self::Memory(memory) => Some(memory.recent_changes(pattern, max)),
            Self::Replicated(member) => {
                let pattern = pattern.to_vec();
                let recent = move |store: &Store| {
                    let (after, upto) = (store.forgotten(), store.revision());
                    let kept = store.changes(&pattern, Separators::NEWEST, after, upto, usize::MAX);
                    let mut changes = kept.unwrap_or_default();
                    changes.drain(..changes.len().saturating_sub(max));
                    changes
                };
                member.look(false, move |machine| machine.store().map(recent)).flatten()
            }
        }
    }

    /// Checks the state.
    ///
    /// # Panics
    ///
    /// If it is broken.
    pub fn check_invariants(&self) {
        match self {
            Self::Memory(memory) => memory.check_invariants(),
            Self::Replicated(member) => {
                member.look(false, |machine| {
                    if let Some(store) = machine.store() {
                        store.check_invariants();
                    }
                });
            }
        }
    }

    /// The name of a session for people, as far as this process knows it by itself. What the state says of a session
    /// goes before it: the names in the views of the state, [`readable`].
    pub fn label(&self, id: SessionId) -> Option<Arc<str>> {
        match self {
            Self::Memory(memory) => memory.label(id),
            Self::Replicated(member) => member.label(id),
        }
    }

    /// A new session whose answers go to `mailbox`.
    pub fn open(&self, mailbox: Arc<dyn Mailbox>, label: Arc<str>) -> Attachment {
        match self {
            Self::Memory(memory) => memory.open(mailbox, label),
            Self::Replicated(member) => member.open(mailbox, label),
        }
    }

    /// Lets the session outlive its connection; whoever knows the secret can attach to it.
    pub fn keep(&self, by: &Attachment, request: RequestId) -> (SessionSecret, Submitted) {
        match self {
            Self::Memory(memory) => match memory.keep(by) {
                Some(secret) => (secret, Submitted::Done(Outcome::Done)),
                None => {
                    let refused = Outcome::Refused(Refusal::MaxSessions);
                    (SessionSecret([0; 16]), Submitted::Done(refused))
                }
            },
            Self::Replicated(member) => {
                let secret = member.chance().draw();
                by.session.state.lock().secret = Some(SessionSecret(secret));
                let submitted = member.act(by, request, ProposalBody::Keep { secret });
                (SessionSecret(secret), submitted)
            }
        }
    }

    /// The session was not kept after all.
    pub fn keep_refused(&self, by: &Attachment) {
        by.session.state.lock().secret = None;
    }

    /// Takes a kept session over, in place of `by`, which is a fresh one. The connection that had it is closed.
    pub fn attach(
        &self,
        by: &Attachment,
        request: RequestId,
        secret: SessionSecret,
        flushes: &mut PendingFlushes,
    ) -> Attaching {
        match self {
            Self::Memory(memory) => Attaching::Done(memory.attach(by, secret, flushes)),
            Self::Replicated(member) => {
                let body = ProposalBody::Attach { secret: secret.0 };
                match member.act(by, request, body) {
                    Submitted::Later(_) => Attaching::Later,
                    Submitted::Done(_) | Submitted::Gone => Attaching::Done(None),
                }
            }
        }
    }

    /// The session that an attach brought, once it was answered. The old one is gone.
    pub fn attached(&self, by: &Attachment) -> Option<Attachment> {
        match self {
            Self::Memory(_) => None,
            Self::Replicated(member) => member.attached(by),
        }
    }

    /// The highest number that a repeatable request of a session had, through whatever member: what is asked under a
    /// higher one is new. None if nobody can say. May take a while.
    pub fn last_request(&self, id: SessionId) -> Option<RequestId> {
        match self {
            Self::Memory(memory) => memory.last_request_of(id),
            Self::Replicated(member) => {
                let look = move |machine: &Machine| Some(machine.store()?.last_request(id));
                member.look(true, look).flatten()
            }
        }
    }

    /// The connection of a session has ended: `orderly` if the client closed it, `referenced` if it had given a stable
    /// reference.
    pub fn close(
        &self,
        by: &Attachment,
        orderly: bool,
        referenced: bool,
        flushes: &mut PendingFlushes,
    ) {
        match self {
            Self::Memory(memory) => memory.close(by, orderly, flushes),
            Self::Replicated(member) => member.close(by, orderly, referenced),
        }
    }

    /// Ends a kept session for its client, who will not come back. Only a cluster keeps sessions.
    pub fn end(&self, by: &Attachment, request: RequestId, id: SessionId) -> Submitted {
        match self {
            Self::Memory(_) => Submitted::Done(Outcome::Refused(Refusal::NotHeld)),
            Self::Replicated(member) => member.act(by, request, ProposalBody::End { session: id }),
        }
    }

    /// Ends a session whose client may no longer use it. A kept one does not wait for its client, and its holds are
    /// released unless the policy leaves them to their leases; any other ends like a lost connection.
    pub fn end_revoked(&self, by: &Attachment, request: RequestId, flushes: &mut PendingFlushes) {
        match self {
            Self::Memory(memory) => memory.end_revoked(by, flushes),
            Self::Replicated(member) => {
                let is_kept = by.session.state.lock().secret.is_some();
                if is_kept {
                    // Nobody waits for the answer; a session that is gone already is as good.
                    let _ = member.act(by, request, ProposalBody::End { session: by.id() });
                }
                member.close(by, false, false);
            }
        }
    }

    /// Which of these kept sessions wait for their clients: nobody has attached to them since. None if nobody can say.
    /// May take a while.
    pub fn waiting(&self, left: Vec<Attachment>) -> Option<Vec<Attachment>> {
        match self {
            Self::Memory(_) => Some(left.into_iter().filter(Attachment::is_waiting).collect()),
            Self::Replicated(member) => {
                let all: Vec<_> = left.iter().map(|by| (by.id(), by.epoch())).collect();
                let waiting = member.look(true, move |machine| {
                    let waits = |(id, epoch)| machine.detached_epoch(id) == Some(epoch);
                    all.into_iter().map(waits).collect::<Vec<bool>>()
                })?;
                let both = left.into_iter().zip(waiting);
                Some(both.filter(|(_, waits)| *waits).map(|(by, _)| by).collect())
            }
        }
    }

    /// Ends a session for an operator, who may have to end one whose client is gone.
    pub fn kick(
        &self,
        by: &Attachment,
        request: RequestId,
        id: SessionId,
        flushes: &mut PendingFlushes,
    ) -> Submitted {
        match self {
            Self::Memory(memory) => Submitted::Done(memory.kick(id, flushes)),
            Self::Replicated(member) => member.act(by, request, ProposalBody::Kick { session: id }),
        }
    }

    /// Lets the state look at the time, where nobody else does it.
    pub fn tick(&self, flushes: &mut PendingFlushes) {
        match self {
            Self::Memory(memory) => memory.tick(flushes),
            Self::Replicated(_) => {}
        }
    }

    /// Runs what must run beside the connections.
    ///
    /// # Errors
    ///
    /// If a thread can not be started.
    pub fn start(self: &Arc<Self>) -> std::io::Result<()> {
        match &**self {
            Self::Memory(_) => Memory::start(self),
            Self::Replicated(_) => Ok(()),
        }
    }

    /// Makes the calling thread the one that drives the replica before it sleeps, if there is a replica; `wake` wakes
    /// the thread.
    pub fn designate(&self, wake: impl Fn() + Send + Sync + 'static) {
        if let Self::Replicated(member) = self {
            member.designate(wake);
        }
    }

    /// Drives the replica. Whether the designated thread may sleep then; when it does not sleep any more it calls
    /// [`Engine::after_sleep`].
    pub fn before_sleep(&self) -> bool {
        self.replicated().is_none_or(|member| member.before_sleep())
    }

    /// Whether the replica waits to be driven.
    #[must_use]
    pub fn has_work(&self) -> bool {
        self.replicated().is_some_and(|member| member.has_work())
    }

    /// The designated thread does not sleep any more.
    pub fn after_sleep(&self) {
        if let Self::Replicated(member) = self {
            member.after_sleep();
        }
    }

    /// Waits until the engine can not go on, and says why.
    pub async fn failed(&self) -> String {
        match self {
            Self::Memory(_) => std::future::pending().await,
            Self::Replicated(member) => member.failed().await,
        }
    }

    /// Hands leadership over, if this process has it.
    pub async fn hand_over(&self) {
        if let Self::Replicated(member) = self {
            member.hand_over().await;
        }
    }

    /// Waits until what connections left behind is applied, a second at most.
    pub async fn settle(&self) {
        if let Self::Replicated(member) = self {
            member.settle().await;
        }
    }

    /// Ends what [`Engine::start`] began.
    pub fn stop(&self) {
        match self {
            Self::Memory(memory) => memory.stop(),
            Self::Replicated(member) => member.stop(),
        }
    }
}
