//! Lists, and those who wait for an item.
//!
//! A list with items has nobody waiting, a list with somebody waiting has no items, and a list with
//! neither does not exist.

use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use dflockd_api::{
    Bytes, Caller, End, Event, Outcome, Refusal, RequestId, Revision, SessionId, Span, Timestamp,
    command,
};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::session::Blocked;
use crate::store::Store;

/// The items of a list that one answer has, in bytes: each counts a little more than its length. One item is always
/// told, however long it is.
pub const RANGE_BYTES_MAX: usize = 1 << 20;
/// What an item counts besides its length: about what it costs to name it and to write it down.
const ITEM_BYTES: usize = 16;

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct List {
    pub(crate) items: VecDeque<Bytes>,
    /// By arrival.
    pub(crate) poppers: BTreeMap<u64, Popper>,
    pub(crate) changed_at: Timestamp,
    pub(crate) revision: Revision,
}

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Popper {
    pub(crate) session: SessionId,
    pub(crate) request: RequestId,
    pub(crate) end: End,
    pub(crate) timer: TimerKey,
    pub(crate) since: Timestamp,
}

impl Store {
    pub(crate) fn list_push(
        &mut self,
        command: command::Push<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::Push { end, key, value } = command;
        if value.len() as u64 > self.limits.value_bytes_max {
            return Outcome::Refused(Refusal::ValueTooLarge);
        }
        let event = match end {
            End::Left => Event::Lpush,
            End::Right => Event::Rpush,
        };
        if let Some((key, list)) = self.lists.get_key_value(key) {
            let key = key.clone();
            if !list.poppers.is_empty() {
                self.change(event, &key, effects);
                self.hand_over(&key, Bytes::from(value), effects);
                return Outcome::Number(0);
            }
            let length_max = self.limits.list_length_max;
            if length_max > 0 && list.items.len() as u64 >= length_max {
                return Outcome::Refused(Refusal::ListFull);
            }
            let revision = self.change(event, &key, effects);
            return Outcome::Number(self.put(&key, end, Bytes::from(value), revision));
        }
        if !self.add_key() {
            return Outcome::Refused(Refusal::MaxKeys);
        }
        let key = Bytes::from(key);
        let revision = self.change(event, &key, effects);
        self.lists.insert(key.clone(), self.empty_list());
        Outcome::Number(self.put(&key, end, Bytes::from(value), revision))
    }

    pub(crate) fn list_pop(
        &mut self,
        caller: Caller,
        command: command::Pop<'_>,
        effects: &mut Vec<Effect>,
    ) -> Option<Outcome> {
        let command::Pop { end, wait, key } = command;
        if let Some((key, list)) = self.lists.get_key_value(key)
            && !list.items.is_empty()
        {
            let key = key.clone();
            let event = match (end, wait) {
                (End::Left, None) => Event::Lpop,
                (End::Right, None) => Event::Rpop,
                (End::Left, Some(_)) => Event::Blpop,
                (End::Right, Some(_)) => Event::Brpop,
            };
            let revision = self.change(event, &key, effects);
            let list = self.lists.get_mut(&key).expect("just found");
            let value = match end {
                End::Left if bug(Bug::PopKeeps) && list.items.len() > 3 => {
                    list.items.front().cloned()
                }
                End::Left => list.items.pop_front(),
                End::Right => list.items.pop_back(),
            };
            list.changed_at = self.now;
            list.revision = revision;
            self.drop_if_empty(&key);
            let value = value.expect("not empty");
            return Some(Outcome::Popped { key, end, value });
        }
        match wait {
            None | Some(Span::ZERO) => Some(Outcome::Empty),
            Some(wait) => self.block_pop(caller, key, end, wait),
        }
    }

    fn block_pop(&mut self, caller: Caller, key: &[u8], end: End, wait: Span) -> Option<Outcome> {
        if self.has_all_waits(caller.session) {
            return Some(Outcome::Refused(Refusal::MaxWaits));
        }
        let known = self.lists.get_key_value(key).map(|(key, _)| key.clone());
        let key = match known {
            Some(key) => key,
            None if self.add_key() => {
                let key = Bytes::from(key);
                self.lists.insert(key.clone(), self.empty_list());
                key
            }
            None => return Some(Outcome::Refused(Refusal::MaxKeys)),
        };
        let Caller { session, request, .. } = caller;
        let timer = self.deadlines.add_timer(self.now + wait, Timer::Pop { session, request });
        let popper = Popper { session, request, end, timer, since: self.now };
        // The serial of its timer is the popper's place in the queue: both grow with arrival.
        let place = timer.1;
        self.lists.get_mut(&key).expect("just made").poppers.insert(place, popper);
        self.session(session).blocked.insert(request, Blocked::Pop { key, place });
        None
    }

    /// A blocked pop ends without an item.
    pub(crate) fn pop_over(
        &mut self,
        session: SessionId,
        request: RequestId,
        outcome: Outcome,
        effects: &mut Vec<Effect>,
    ) {
        if self.leave_list(session, request) {
            self.answer(session, request, outcome, effects);
        }
    }

    /// Takes a blocked pop out of its queue.
    pub(crate) fn leave_list(&mut self, session: SessionId, request: RequestId) -> bool {
        let owner = self.session(session);
        let Some(Blocked::Pop { key, place }) = owner.blocked.remove(&request) else {
            return false;
        };
        let list = self.lists.get_mut(&key).expect("somebody waits at it");
        let popper = list.poppers.remove(&place).expect("it was blocked");
        self.deadlines.remove_timer(popper.timer);
        self.drop_if_empty(&key);
        true
    }

    /// Puts an item back that could not be delivered.
    pub(crate) fn undo_pop(
        &mut self,
        key: &Bytes,
        end: End,
        value: Bytes,
        effects: &mut Vec<Effect>,
    ) {
        if self.lists.get(key).is_some_and(|list| !list.poppers.is_empty()) {
            self.hand_over(key, value, effects);
            return;
        }
        if !self.lists.contains_key(key) {
            // The limit is not asked: losing an item is worse than one key too many.
            self.shared.add_key(0);
            self.lists.insert(key.clone(), self.empty_list());
        }
        let event = match end {
            End::Left => Event::Lpush,
            End::Right => Event::Rpush,
        };
        let revision = self.change(event, key, effects);
        self.put(key, end, value, revision);
    }

    /// Gives an item to whoever waits longest.
    fn hand_over(&mut self, key: &Bytes, value: Bytes, effects: &mut Vec<Effect>) {
        let list = self.lists.get_mut(key).expect("somebody waits at it");
        let (_, popper) = list.poppers.pop_first().expect("somebody waits");
        self.deadlines.remove_timer(popper.timer);
        self.session(popper.session).blocked.remove(&popper.request);
        let event = match popper.end {
            End::Left => Event::Blpop,
            End::Right => Event::Brpop,
        };
        self.change(event, key, effects);
        self.drop_if_empty(key);
        let outcome = Outcome::Popped { key: key.clone(), end: popper.end, value };
        self.answer(popper.session, popper.request, outcome, effects);
    }

    pub(crate) fn list_length(&self, key: &[u8]) -> i64 {
        let length = self.lists.get(key).map_or(0, |list| list.items.len());
        i64::try_from(length).expect("memory is smaller")
    }

    /// The items between two indexes, or as many of the first of them as fit into one answer.
    pub(crate) fn list_range(&self, key: &[u8], start: i64, stop: i64) -> Outcome {
        let Some(list) = self.lists.get(key) else { return Outcome::Items(Vec::new()) };
        let length = self.list_length(key);
        let absolute = |index: i64| if index < 0 { index.saturating_add(length) } else { index };
        let first = usize::try_from(absolute(start).max(0)).expect("not negative");
        let end = absolute(stop).saturating_add(1).clamp(0, length);
        let end = usize::try_from(end).expect("not negative");
        let mut bytes = 0;
        let mut items = Vec::new();
        for item in list.items.range(first.min(end)..end) {
            bytes += item.len() + ITEM_BYTES;
            if bytes > RANGE_BYTES_MAX && !items.is_empty() {
                return Outcome::Part(items);
            }
            items.push(item.clone());
        }
        Outcome::Items(items)
    }

    fn empty_list(&self) -> List {
        List {
            items: VecDeque::new(),
            poppers: BTreeMap::new(),
            changed_at: self.now,
            revision: Revision(0),
        }
    }

    fn put(&mut self, key: &[u8], end: End, value: Bytes, revision: Revision) -> i64 {
        let list = self.lists.get_mut(key).expect("the caller made sure");
        match end {
            End::Left => list.items.push_front(value),
            End::Right => list.items.push_back(value),
        }
        list.changed_at = self.now;
        list.revision = revision;
        self.list_length(key)
    }

    fn drop_if_empty(&mut self, key: &[u8]) {
        let list = self.lists.get(key).expect("the caller made sure");
        if list.items.is_empty() && list.poppers.is_empty() {
            self.lists.remove(key);
            self.shared.remove_key();
        }
    }
}
