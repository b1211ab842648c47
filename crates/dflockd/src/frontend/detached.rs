//! Kept sessions whose clients are away, and the tokens they came with.
//!
//! A session that waits for its client ends when the token that it came with is dropped. What is known here is what was
//! left through this process, since it was started; a session that somebody has attached to since is not concerned.

use std::collections::HashMap;
use std::sync::Arc;

use dflockd_core::SessionId;
use dflockd_engine::{Api, Attachment, PendingFlushes};
use parking_lot::Mutex;

use crate::frontend::auth::{Pass, TokenKind};
use crate::frontend::caller::Caller;
use crate::service::Service;

/// Up to so many are kept without a look whether they still wait.
const UNCHECKED_MAX: usize = 1024;

/// Sessions that were left, each with the token it came with.
#[derive(Default)]
pub(crate) struct Detached(Mutex<Table>);

#[derive(Default)]
struct Table {
    left: HashMap<SessionId, (Attachment, Pass)>,
    /// How many there were after the last look.
    checked: usize,
}

impl Detached {
    /// The connection of a kept session has ended.
    pub(crate) fn note(&self, session: &Attachment, pass: Pass) {
        // Where no token was needed none can be dropped: tokens are not introduced while the server runs.
        if pass != Pass::OPEN {
            self.0.lock().left.insert(session.id(), (session.clone(), pass));
        }
    }

    fn is_large(&self) -> bool {
        let table = self.0.lock();
        table.left.len() > 2 * table.checked + UNCHECKED_MAX
    }
}

impl Service {
    /// Forgets the sessions that wait no longer, if there are many. May take a while.
    pub(crate) fn tidy_detached(&self) {
        if !self.detached.is_large() {
            return;
        }
        let known = self.detached.0.lock().left.values().map(|(by, _)| by.clone()).collect();
        let Some(waiting) = self.engine.waiting(known) else { return };
        let waiting: HashMap<_, _> = waiting.iter().map(|by| (by.id(), by.epoch())).collect();
        let mut table = self.detached.0.lock();
        // One that was left meanwhile was not asked about, but is soon asked about again.
        table.left.retain(|id, (by, _)| waiting.get(id) == Some(&by.epoch()));
        table.checked = table.left.len();
        table.left.shrink_to_fit();
    }

    /// Ends the sessions that wait and came with a token that is no longer valid.
    pub(crate) async fn end_detached(self: Arc<Self>) {
        let is_gone = |pass: Pass| !self.auth.is_valid(TokenKind::Client, pass);
        let left: Vec<_> = {
            let mut table = self.detached.0.lock();
            let gone = table.left.extract_if(|_, (_, pass)| is_gone(*pass));
            gone.map(|(_, (by, _))| by).collect()
        };
        if left.is_empty() {
            return;
        }
        let service = Arc::clone(&self);
        let waiting = tokio::task::spawn_blocking(move || service.engine.waiting(left)).await;
        let Ok(Some(waiting)) = waiting else {
            return tracing::error!("sessions of a dropped token not ended: nobody can say which");
        };
        let caller = Caller::open(&self, Api::Line, "revocation".into());
        for session in waiting {
            let id = session.id();
            let ended = if self.engine.is_replicated() {
                caller.end_session(id).await.is_ok()
            } else {
                let mut flushes = PendingFlushes::new();
                self.engine.end_revoked(&session, caller.next_request(), &mut flushes);
                flushes.run();
                true
            };
            if ended {
                self.metrics.revoked(Api::Line);
                tracing::info!(session = id.0, "ended: its token was dropped");
            } else {
                tracing::error!(session = id.0, "not ended although its token was dropped");
            }
        }
    }
}
