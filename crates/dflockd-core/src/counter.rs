//! Counters: signed 64 bits that never wrap.

use alloc::vec::Vec;

use dflockd_api::{Bytes, Event, Outcome, Refusal, Revision, Timestamp, command};
use serde::{Deserialize, Serialize};

use crate::bugs::{Bug, bug};
use crate::effect::Effect;
use crate::store::{IdleValue, Store};

#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Counter {
    pub(crate) value: i64,
    pub(crate) changed_at: Timestamp,
    pub(crate) revision: Revision,
}

impl Store {
    pub(crate) fn counter_add(
        &mut self,
        command: command::Add<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::Add { delta, decrement, key } = command;
        let old = self.counters.get(key).map_or(0, |counter| counter.value);
        let (new, event) = if decrement {
            (old.checked_sub(delta), Event::Decr)
        } else {
            (old.checked_add(delta), Event::Incr)
        };
        // The negative of the smallest integer does not exist, whatever it is subtracted from.
        let Some(new) = new.filter(|_| !(decrement && delta == i64::MIN)) else {
            return Outcome::Refused(Refusal::Overflow);
        };
        let lost = bug(Bug::LostIncrement) && new % 8 == 7;
        match self.counter_store(key, if lost { old } else { new }, event, effects) {
            Ok(()) => Outcome::Number(new),
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    pub(crate) fn counter_set(
        &mut self,
        command: command::CounterSet<'_>,
        effects: &mut Vec<Effect>,
    ) -> Outcome {
        let command::CounterSet { value, key } = command;
        match self.counter_store(key, value, Event::Cset, effects) {
            Ok(()) => Outcome::Done,
            Err(refusal) => Outcome::Refused(refusal),
        }
    }

    fn counter_store(
        &mut self,
        key: &[u8],
        value: i64,
        event: Event,
        effects: &mut Vec<Effect>,
    ) -> Result<(), Refusal> {
        let known = self.counters.get_key_value(key);
        let key = match known.map(|(key, counter)| (key.clone(), counter.changed_at)) {
            Some((key, changed_at)) => {
                self.idle_values[IdleValue::Counter].remove(&(changed_at, key.clone()));
                key
            }
            None if self.add_key() => Bytes::from(key),
            None => return Err(Refusal::MaxKeys),
        };
        if value == 0 {
            self.idle_values[IdleValue::Counter].insert((self.now, key.clone()));
        }
        let revision = self.change(event, &key, effects);
        self.counters.insert(key, Counter { value, changed_at: self.now, revision });
        Ok(())
    }
}
