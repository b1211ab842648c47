//! Clients that keep the client rule never believe to hold the same lock at the same time.

use std::collections::BTreeMap;

use dflockd_core::{Fence, Mode, SessionId};

use super::Broken;

/// What a client believes.
#[derive(Clone, Debug)]
pub struct Belief {
    /// Who.
    pub client: usize,
    /// The hold.
    pub fence: Fence,
    /// Whose session got it.
    pub session: Option<SessionId>,
    mode: Mode,
    /// In true time.
    until: u64,
}

/// All of them, by namespace and key.
#[derive(Default)]
pub struct Beliefs {
    held: BTreeMap<(bool, Vec<u8>), Vec<Belief>>,
}

fn name(key: &[u8], mode: Mode) -> (bool, Vec<u8>) {
    (matches!(mode, Mode::Semaphore { .. }), key.to_vec())
}

impl Beliefs {
    /// A client holds a lock, as it thinks, until some instant.
    #[expect(clippy::too_many_arguments, reason = "the parts of a belief")]
    pub fn begin(
        &mut self,
        key: &[u8],
        mode: Mode,
        client: usize,
        fence: Fence,
        session: Option<SessionId>,
        until: u64,
        now: u64,
    ) -> Result<(), Broken> {
        let held = self.held.entry(name(key, mode)).or_default();
        held.retain(|belief| belief.until > now && belief.fence != fence);
        if until <= now {
            return Ok(());
        }
        held.push(Belief { client, fence, session, mode, until });
        let fits = match mode {
            Mode::Mutex | Mode::Election | Mode::Write => held.len() == 1,
            Mode::Semaphore { limit } => held.len() <= limit as usize,
            Mode::Read => held.iter().all(|belief| belief.mode == Mode::Read),
        };
        if fits {
            return Ok(());
        }
        let what = format!("{}: {held:?}", key.escape_ascii());
        Err(Broken::new("client-exclusion", what))
    }

    /// A client gives a hold back, or somebody takes it.
    pub fn end(&mut self, fence: Fence) {
        for held in self.held.values_mut() {
            held.retain(|belief| belief.fence != fence);
        }
    }

    /// Everything of a session is void.
    pub fn end_session(&mut self, session: SessionId) {
        for held in self.held.values_mut() {
            held.retain(|belief| belief.session != Some(session));
        }
    }

    /// Everything of a client is void.
    pub fn end_client(&mut self, client: usize) {
        for held in self.held.values_mut() {
            held.retain(|belief| belief.client != client);
        }
    }
}
