//! What a client can be told again stays given: an answer that is kept for a retry is not taken back while its session
//! lives.

use dflockd_core::{Outcome, RequestId, SessionId};

use super::Broken;
use crate::oracle::Step;

/// What kept answers have given away.
#[derive(Default)]
pub struct KeptAnswers {
    given: Vec<(SessionId, Outcome)>,
    /// What was given in the current entry: what the entry takes back is from before, and may be given anew in it.
    given_now: Vec<(SessionId, Outcome)>,
}

impl KeptAnswers {
    /// A request was answered for the first time.
    pub fn answer(&mut self, session: SessionId, request: RequestId, outcome: &Outcome) {
        if request.is_repeatable() && outcome.gives() {
            self.given_now.push((session, outcome.clone()));
        }
    }

    /// A session has ended: nobody can ask for its answers again.
    pub fn end(&mut self, session: SessionId) {
        self.given.retain(|(of, _)| *of != session);
        self.given_now.retain(|(of, _)| *of != session);
    }

    /// After each entry.
    pub fn check(&mut self, step: &Step<'_>) -> Result<(), Broken> {
        let is_kept = |undone: &&Outcome| self.given.iter().any(|(_, given)| given == *undone);
        if let Some(undone) = step.touched.undone.iter().find(is_kept) {
            let what = format!("entry {} takes {undone:?} back, which is kept", step.index);
            return Err(Broken::new("kept-answers", what));
        }
        self.given.append(&mut self.given_now);
        Ok(())
    }
}
