//! Key-value entries with time to live and compare-and-set.

use alloc::vec::Vec;

use dflockd_api::{Bytes, Event, Expect, Outcome, Refusal, Revision, Span, Timestamp, command};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::deadline::{Timer, TimerKey};
use crate::effect::Effect;
use crate::store::{IdleValue, Store};

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct KvEntry {
    pub(crate) value: Bytes,
    /// Set for an entry with a time to live.
    pub(crate) timer: Option<TimerKey>,
    pub(crate) changed_at: Timestamp,
    pub(crate) revision: Revision,
}

impl Store {
    /// A read may come at an instant that no command has yet reached, so the end of life is checked here, too.
    pub(crate) fn kv_alive(&self, key: &[u8], now: Timestamp) -> Option<&KvEntry> {
        self.kv.get(key).filter(|entry| entry.timer.is_none_or(|(end, _)| end > now))
    }

    pub(crate) fn kv_set(
        &mut self,
        command: command::KvSet<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::KvSet { ttl, key, value } = command;
        if value.len() as u64 > self.limits.value_bytes_max {
            return Outcome::Refused(Refusal::ValueTooLarge);
        }
        self.kv_store(key, value, ttl, Event::Kset, effects)
    }

    pub(crate) fn kv_compare_and_set(
        &mut self,
        command: command::KvCompareAndSet<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::KvCompareAndSet { expect, ttl, key, value } = command;
        if value.len() as u64 > self.limits.value_bytes_max {
            return Outcome::Refused(Refusal::ValueTooLarge);
        }
        let as_expected = match (expect, self.kv.get(key)) {
            (Expect::Absent, entry) => entry.is_none(),
            (Expect::Value(_) | Expect::Revision(_), None) => false,
            (Expect::Value(value), Some(entry)) => *entry.value == *value,
            (Expect::Revision(revision), Some(entry)) => {
                entry.revision == revision || bug(Bug::CasBlind)
            }
        };
        if !as_expected {
            return Outcome::Conflict;
        }
        self.kv_store(key, value, ttl, Event::Kcas, effects)
    }

    pub(crate) fn kv_delete(
        &mut self,
        command::KvDelete { key }: command::KvDelete<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let key = match self.kv.remove_entry(key) {
            Some((key, entry)) => {
                self.kv_unindex(&key, &entry);
                self.shared.remove_key();
                key
            }
            None => Bytes::from(key),
        };
        self.change(Event::Kdel, &key, effects);
        Outcome::Done
    }

    /// The time to live of an entry is over.
    pub(crate) fn kv_expire(&mut self, key: &[u8]) {
        if self.kv.remove(key).is_some() {
            self.shared.remove_key();
        }
    }

    fn kv_store(
        &mut self,
        key: &[u8],
        value: &[u8],
        ttl: Option<Span>,
        event: Event,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let key = match self.kv.remove_entry(key) {
            Some((key, entry)) => {
                self.kv_unindex(&key, &entry);
                key
            }
            None if self.add_key() => Bytes::from(key),
            None => return Outcome::Refused(Refusal::MaxKeys),
        };
        let timer = ttl.map(|ttl| self.deadlines.add_timer(self.now + ttl, Timer::Kv(key.clone())));
        if timer.is_none() && self.limits.kv_idle_gc {
            self.idle_values[IdleValue::Kv].insert((self.now, key.clone()));
        }
        let revision = self.change(event, &key, effects);
        let entry = KvEntry { value: Bytes::from(value), timer, changed_at: self.now, revision };
        self.kv.insert(key, entry);
        Outcome::Written(revision)
    }

    fn kv_unindex(&mut self, key: &Bytes, entry: &KvEntry) {
        match entry.timer {
            Some(timer) => self.deadlines.remove_timer(timer),
            None => {
                self.idle_values[IdleValue::Kv].remove(&(entry.changed_at, key.clone()));
            }
        }
    }
}
