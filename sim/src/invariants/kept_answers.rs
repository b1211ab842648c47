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

#[cfg(test)]
mod tests {
    use dflockd_core::End;

    use super::*;
    use crate::oracle::{LocksNow, Touched};

    fn popped() -> Outcome {
        Outcome::Popped {
            key: b"q".as_slice().into(),
            end: End::Left,
            value: b"v".as_slice().into(),
        }
    }

    fn apply(kept: &mut KeptAnswers, undone: Vec<Outcome>) -> Result<(), Broken> {
        let (touched, locks) = (Touched { undone, ..Touched::default() }, LocksNow::new());
        let step = Step { index: 1, now: 0, touched: &touched, before: &locks, after: &locks };
        kept.check(&step)
    }

    #[test]
    fn a_kept_answer_is_not_taken_back() {
        let mut kept = KeptAnswers::default();
        kept.answer(SessionId(1), RequestId(1), &popped());
        apply(&mut kept, vec![]).unwrap();
        apply(&mut kept, vec![popped()]).unwrap_err();
        kept.end(SessionId(1));
        apply(&mut kept, vec![popped()]).unwrap();
    }

    /// Seed 367 of 2026-11-18: the item came back from a client without a kept session, and went to one with.
    #[test]
    fn what_is_taken_back_can_be_given_anew_in_the_same_entry() {
        let mut kept = KeptAnswers::default();
        kept.answer(SessionId(2), RequestId(1), &popped());
        apply(&mut kept, vec![popped()]).unwrap();
        apply(&mut kept, vec![popped()]).unwrap_err();
    }
}
