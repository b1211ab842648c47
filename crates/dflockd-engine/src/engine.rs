//! The two engines behind one face.

use std::sync::Arc;

use dflockd_core::{Command, KeyView, Listed, Outcome, Query, RequestId, SessionId, Store, Survey};

use crate::clock::Clock;
use crate::memory::{Memory, Place, Submitted};
use crate::replica::types::Action;
use crate::replicated::Replicated;
use crate::router::{Attachment, Pokes, SessionSecret, Sink};

/// Keys of each kind in a survey of a cluster's state: it is made by the thread that everything else waits for.
const NAMES_MAX: usize = 5000;

/// What keeps the state.
#[expect(clippy::large_enum_variant, reason = "a process has one of it")]
pub enum Engine {
    /// This process, in memory.
    Memory(Memory),
    /// A cluster, of which this process is a member.
    Replicated(Arc<Replicated>),
}

/// What became of an attach.
pub enum Attaching {
    /// The session, unless there is none with this secret.
    Done(Option<Attachment>),
    /// The answer comes through the sink; then [`Engine::attached`] has the session.
    Later,
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

    /// Executes a command for a session. Sinks of others that have something to do are added to `pokes`.
    pub fn submit(
        &self,
        by: &Attachment,
        request: RequestId,
        keep: bool,
        command: Command<'_>,
        pokes: &mut Pokes,
    ) -> Submitted {
        match self {
            Self::Memory(memory) => memory.submit(by, request, keep, command, pokes),
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
            Self::Replicated(member) => member.act(by, request, Action::Barrier),
        }
    }

    /// Withdraws a blocked request. Its answer comes through the sink, unless it was answered before. A connection
    /// may do this for its own requests even after the session was attached elsewhere.
    pub fn cancel(&self, by: &Attachment, request: RequestId, place: Place, pokes: &mut Pokes) {
        match self {
            Self::Memory(memory) => memory.cancel(by, request, place, pokes),
            Self::Replicated(member) => member.cancel(by, request),
        }
    }

    /// Gives back what could not be told to the one who asked for it.
    pub fn undo(&self, place: Place, outcome: &Outcome, pokes: &mut Pokes) {
        match self {
            Self::Memory(memory) => memory.undo(place, outcome, pokes),
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

    /// Everything there is, as far as this process knows. May take a while.
    pub fn survey(&self, each_max: usize) -> Survey {
        match self {
            Self::Memory(memory) => memory.survey(each_max),
            Self::Replicated(member) => {
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
                    machine.store().map(|store| store.inspect(&key, machine.now(), each_max))
                });
                views.flatten()
            }
        }
    }

    /// A page of keys in order. A key that is several things is not split, so it can be a little longer. None if
    /// nobody can say.
    pub fn ls(&self, prefix: &[u8], after: Option<&[u8]>, limit: usize) -> Option<Vec<Listed>> {
        match self {
            Self::Memory(memory) => Some(memory.ls(prefix, after, limit)),
            Self::Replicated(member) => {
                let (prefix, after) = (prefix.to_vec(), after.map(<[u8]>::to_vec));
                let listed = member.look(true, move |machine| {
                    let ls =
                        |store: &Store| store.ls(&prefix, after.as_deref(), limit, machine.now());
                    machine.store().map(ls)
                });
                listed.flatten()
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

    /// The name of a session for people, if it is known.
    pub fn label(&self, id: SessionId) -> Option<Arc<str>> {
        match self {
            Self::Memory(memory) => memory.label(id),
            Self::Replicated(member) => member.label(id),
        }
    }

    /// A new session whose answers go to `sink`.
    pub fn open(&self, sink: Arc<dyn Sink>, label: Arc<str>) -> Attachment {
        match self {
            Self::Memory(memory) => memory.open(sink, label),
            Self::Replicated(member) => member.open(sink, label),
        }
    }

    /// Lets the session outlive its connection; whoever knows the secret can attach to it.
    pub fn keep(&self, by: &Attachment, request: RequestId) -> (SessionSecret, Submitted) {
        match self {
            Self::Memory(memory) => (memory.keep(by), Submitted::Done(Outcome::Done)),
            Self::Replicated(member) => {
                let secret = rand::random();
                by.session.state.lock().secret = Some(SessionSecret(secret));
                let submitted = member.act(by, request, Action::Keep { secret });
                (SessionSecret(secret), submitted)
            }
        }
    }

    /// Takes a kept session over, in place of `by`, which is a fresh one. The connection that had it is closed.
    pub fn attach(
        &self,
        by: &Attachment,
        request: RequestId,
        secret: SessionSecret,
        pokes: &mut Pokes,
    ) -> Attaching {
        match self {
            Self::Memory(memory) => Attaching::Done(memory.attach(by, secret, pokes)),
            Self::Replicated(member) => {
                let action = Action::Attach { secret: secret.0 };
                match member.act(by, request, action) {
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

    /// The connection of a session has ended: `orderly` if the client closed it, `referenced` if it had given a stable
    /// reference.
    pub fn close(&self, by: &Attachment, orderly: bool, referenced: bool, pokes: &mut Pokes) {
        match self {
            Self::Memory(memory) => memory.close(by, orderly, pokes),
            Self::Replicated(member) => member.close(by, orderly, referenced),
        }
    }

    /// Ends a session for an operator, who may have to end one whose client is gone.
    pub fn kick(
        &self,
        by: &Attachment,
        request: RequestId,
        id: SessionId,
        pokes: &mut Pokes,
    ) -> Submitted {
        match self {
            Self::Memory(memory) => Submitted::Done(memory.kick(id, pokes)),
            Self::Replicated(member) => member.act(by, request, Action::Kick { session: id }),
        }
    }

    /// Lets the state look at the time, where nobody else does it.
    pub fn tick(&self, pokes: &mut Pokes) {
        match self {
            Self::Memory(memory) => memory.tick(pokes),
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

    /// Ends what [`Engine::start`] began.
    pub fn stop(&self) {
        match self {
            Self::Memory(memory) => memory.stop(),
            Self::Replicated(member) => member.stop(),
        }
    }
}
