//! A signal goes to one member of a queue group.

use std::collections::BTreeMap;

use dflockd_core::{Push, SessionId};

use super::Broken;

/// Payload, pattern and group.
type Delivery = (Vec<u8>, Vec<u8>, Vec<u8>);

/// What was delivered.
#[derive(Default)]
pub struct Signals {
    delivered: BTreeMap<Delivery, SessionId>,
}

impl Signals {
    /// The log has a push for a session, as a member of a group by its pattern and name.
    pub fn check(
        &mut self,
        session: SessionId,
        push: &Push,
        group: Option<(&[u8], &[u8])>,
    ) -> Result<(), Broken> {
        let (Push::Signal { payload, .. }, Some((pattern, name))) = (push, group) else {
            return Ok(());
        };
        let delivery = (payload.to_vec(), pattern.to_vec(), name.to_vec());
        match self.delivered.insert(delivery, session) {
            Some(other) => {
                let what = format!("{push:?} went to {other:?} and {session:?} of one group");
                Err(Broken::new("signals", what))
            }
            None => Ok(()),
        }
    }
}
