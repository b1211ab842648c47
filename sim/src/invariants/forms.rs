//! Every answer has one of the forms that what was asked for allows, whoever gives it: the log, a node that gives up, a
//! cancel that comes late.

use dflockd_core::{Command, Outcome, Refusal};

use super::Broken;
use crate::history::Asked;
use crate::op::Op;
use crate::oracle::Oracle;
use crate::process::borrowed;

/// A client is told something.
pub fn check(asked: &Asked, outcome: &Outcome, oracle: &Oracle) -> Result<(), Broken> {
    if allows(&asked.op, outcome) || follows_first_rules(asked, outcome, oracle) {
        return Ok(());
    }
    Err(Broken::new("forms", format!("{outcome:?} answers {asked:?}")))
}

/// A new cluster follows the first rules until all its members have begun. By those a pop that was withdrawn timed out.
fn follows_first_rules(asked: &Asked, outcome: &Outcome, oracle: &Oracle) -> bool {
    let is_such =
        matches!((asked.op.command(), outcome), (Some(Command::Pop(_)), Outcome::Timeout));
    let answers = asked.session.and_then(|session| oracle.replies.get(&(session, asked.request)));
    let first = answers.and_then(|answers| answers.first());
    is_such && first.is_some_and(|(index, _)| *index <= oracle.first_rules_until)
}

fn allows(op: &Op, outcome: &Outcome) -> bool {
    if let Some(command) = op.command() {
        return command.allows(outcome);
    }
    if let Outcome::Refused(refusal) = outcome
        && refusal.meets_any_request()
    {
        return true;
    }
    match op {
        Op::Keep { .. } => {
            matches!(outcome, Outcome::Done | Outcome::Refused(Refusal::MaxSessions))
        }
        Op::Kick { .. } => matches!(outcome, Outcome::Done | Outcome::Refused(Refusal::NotHeld)),
        Op::Sync => *outcome == Outcome::Done,
        Op::Read(query) => borrowed(query).allows(outcome),
        // It is answered by an event of its own; the rest are commands.
        Op::Attach { .. } | Op::Do(_) | Op::Wait(..) | Op::RenewSession(..) => false,
    }
}
