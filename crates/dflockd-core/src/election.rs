//! Who is told about the leaders of an election. The election itself is a mutex, see `lock.rs`.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use dflockd_api::{Bytes, LeaderEvent, Push, SessionId};

use crate::effect::Effect;

/// Why a session is told.
#[derive(Clone, Copy, Default)]
pub(crate) struct Reason {
    /// It asked to.
    pub(crate) explicit: bool,
    /// It leads.
    pub(crate) leads: bool,
}

/// By election, then by session.
pub(crate) struct Observers(pub(crate) BTreeMap<Bytes, BTreeMap<SessionId, Reason>>);

impl Observers {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn tell(
        &self,
        event: LeaderEvent,
        key: &Bytes,
        except: Option<SessionId>,
        effects: &mut Vec<Effect>,
    ) {
        let Some(sessions) = self.0.get(key) else { return };
        for &session in sessions.keys().filter(|&&session| Some(session) != except) {
            let push = Push::Leader { event, key: key.clone() };
            effects.push(Effect::Push { session, push, group: None });
        }
    }

    pub(crate) fn observe(&mut self, key: &Bytes, session: SessionId) {
        self.0.entry(key.clone()).or_default().entry(session).or_default().explicit = true;
    }

    pub(crate) fn add_leader(&mut self, key: &Bytes, session: SessionId) {
        self.0.entry(key.clone()).or_default().entry(session).or_default().leads = true;
    }

    pub(crate) fn forget_leader(&mut self, key: &[u8], session: SessionId) {
        let Some(reason) = self.0.get_mut(key).and_then(|sessions| sessions.get_mut(&session))
        else {
            return;
        };
        reason.leads = false;
        if !reason.explicit {
            self.forget(key, session);
        }
    }

    /// The session does not observe the election any more, unless it leads.
    pub(crate) fn ignore(&mut self, key: &[u8], session: SessionId) {
        let Some(reason) = self.0.get_mut(key).and_then(|sessions| sessions.get_mut(&session))
        else {
            return;
        };
        reason.explicit = false;
        if !reason.leads {
            self.forget(key, session);
        }
    }

    pub(crate) fn forget(&mut self, key: &[u8], session: SessionId) {
        if let Some(sessions) = self.0.get_mut(key) {
            sessions.remove(&session);
            if sessions.is_empty() {
                self.0.remove(key);
            }
        }
    }
}
