//! Pushes reach a session in the order of the log, each once, without a gap.

use std::collections::BTreeMap;

use dflockd_core::{Push, SessionId};

use super::Broken;
use crate::oracle::Oracle;

/// Payload, pattern and group.
type Delivery = (Vec<u8>, Vec<u8>, Vec<u8>);

/// What was delivered.
#[derive(Default)]
pub struct Pushes {
    signals: BTreeMap<Delivery, SessionId>,
}

impl Pushes {
    /// A node has the `count`-th push for a session.
    pub fn check(
        &mut self,
        session: SessionId,
        count: usize,
        push: &Push,
        group: Option<(&[u8], &[u8])>,
        oracle: &Oracle,
    ) -> Result<(), Broken> {
        let expected = oracle.pushes.get(&session).and_then(|pushes| pushes.get(count));
        if expected.map(|(_, push)| push) != Some(push) {
            let what =
                format!("{session:?} got {push:?} as number {count} instead of {expected:?}");
            return Err(Broken::new("pushes", what));
        }
        if let (Push::Signal { payload, .. }, Some((pattern, name))) = (push, group) {
            let delivery = (payload.to_vec(), pattern.to_vec(), name.to_vec());
            if let Some(other) = self.signals.insert(delivery, session) {
                let what = format!("{push:?} went to {other:?} and {session:?} of one group");
                return Err(Broken::new("signals", what));
            }
        }
        Ok(())
    }
}
