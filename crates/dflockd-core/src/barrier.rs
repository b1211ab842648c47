//! Barriers: all arrive, or none passes.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use dflockd_api::{
    Bytes, Caller, Outcome, Refusal, RequestId, SessionId, Span, Timestamp, command,
};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::session::Blocked;
use crate::store::Store;

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Barrier {
    pub(crate) count: u32,
    pub(crate) arrivals: BTreeMap<SessionId, (RequestId, TimerKey)>,
    pub(crate) changed_at: Timestamp,
}

impl Store {
    pub(crate) fn barrier_wait(
        &mut self,
        caller: Caller,
        command: command::BarrierWait<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Outcome> {
        let command::BarrierWait { count, wait, key } = command;
        let Caller { session, request, .. } = caller;
        let mut arrived = 0;
        if let Some(barrier) = self.barriers.get(key) {
            if barrier.count != count {
                return Some(Outcome::Refused(Refusal::CountMismatch));
            }
            if barrier.arrivals.contains_key(&session) {
                return Some(Outcome::Refused(Refusal::AlreadyWaiting));
            }
            arrived = barrier.arrivals.len();
        }
        let short = usize::from(bug(Bug::BarrierShort));
        if arrived + 1 + short >= count as usize {
            self.dissolve(key, &Outcome::Done, effects);
            return Some(Outcome::Done);
        }
        if wait == Span::ZERO {
            return Some(Outcome::Timeout);
        }
        if self.has_all_waits(session) {
            return Some(Outcome::Refused(Refusal::MaxWaits));
        }
        let known = self.barriers.get_key_value(key).map(|(key, _)| key.clone());
        let key = match known {
            Some(key) => key,
            None if self.add_key() => Bytes::from(key),
            None => return Some(Outcome::Refused(Refusal::MaxKeys)),
        };
        let timer = self.deadlines.add_timer(self.now + wait, Timer::Barrier { session, request });
        let new = Barrier { count, arrivals: BTreeMap::new(), changed_at: self.now };
        let barrier = self.barriers.entry(key.clone()).or_insert(new);
        barrier.arrivals.insert(session, (request, timer));
        barrier.changed_at = self.now;
        self.session(session).blocked.insert(request, Blocked::Barrier { key });
        None
    }

    /// A participant leaves: the barrier is broken for everybody, itself included.
    pub(crate) fn barrier_over(
        &mut self,
        session: SessionId,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) {
        if self.leave_barrier(session, request, effects) {
            self.answer(session, request, Outcome::Timeout, effects);
        }
    }

    /// Takes a participant out, which breaks the barrier for the others.
    pub(crate) fn leave_barrier(
        &mut self,
        session: SessionId,
        request: RequestId,
        effects: &mut Vec<Effect>,
    ) -> bool {
        let owner = self.session(session);
        let Some(Blocked::Barrier { key }) = owner.blocked.remove(&request) else {
            return false;
        };
        let barrier = self.barriers.get_mut(&key).expect("somebody waits at it");
        let (_, timer) = barrier.arrivals.remove(&session).expect("it was blocked");
        self.deadlines.remove_timer(timer);
        self.dissolve(&key, &Outcome::Timeout, effects);
        true
    }

    /// Ends a barrier, if there is one, with the same answer for all who wait at it.
    fn dissolve(&mut self, key: &[u8], outcome: &Outcome, effects: &mut Vec<Effect>) {
        let Some(barrier) = self.barriers.remove(key) else { return };
        self.shared.remove_key();
        for (session, (request, timer)) in barrier.arrivals {
            self.deadlines.remove_timer(timer);
            self.session(session).blocked.remove(&request);
            self.answer(session, request, outcome.clone(), effects);
        }
    }
}
