//! Whether answers have a form that their requests allow (GUARANTEES 47), as whoever reads the lines sees it: the table
//! of commands says which forms there are, and every answer that a [`Client`](crate::Client) of a test reads is held to
//! it.

use std::collections::VecDeque;

use dflockd_wire::{
    Bytes, End, ErrorCode, Fence, Frame, Grant, Op, Outcome, Push, Query, REFUSALS, Request,
    Response, Revision, Unit, split_number,
};

/// The requests of a connection that are not answered.
#[derive(Debug, Default)]
pub struct Forms {
    open: VecDeque<Asked>,
}

/// A request as it was sent: its number if it has one, and its lines.
#[derive(Debug)]
struct Asked {
    number: Option<u64>,
    command: String,
    key: String,
    arg: String,
}

impl Forms {
    /// A request is sent.
    pub fn asked(&mut self, command: &str, key: &str, arg: &str) {
        let (number, command) = match split_number(command.as_bytes()) {
            Some((number, rest)) => (Some(number), String::from_utf8_lossy(rest).into_owned()),
            None => (None, command.to_owned()),
        };
        let (key, arg) = (key.to_owned(), arg.to_owned());
        self.open.push_back(Asked { number, command, key, arg });
    }

    /// A line has come. An answer must have a form that its request allows; if not, the error says what answers what.
    pub fn check(&mut self, line: &[u8]) -> Result<(), String> {
        let of = |number| self.open.iter().position(|asked| asked.number == number);
        let (at, answer) = match split_number(line) {
            Some((number, rest)) if of(Some(number)).is_some() => (of(Some(number)), rest),
            // What was asked without a number where there must be one.
            Some((0, rest)) => (of(None), rest),
            _ if Push::parse(line).is_some() || line == b"detached" => return Ok(()),
            _ => (of(None), line),
        };
        let Some(asked) = at.and_then(|at| self.open.remove(at)) else { return Ok(()) };
        if asked.allows(answer) {
            return Ok(());
        }
        Err(format!("{} answers {asked:?}", String::from_utf8_lossy(answer)))
    }
}

impl Asked {
    /// Whether it can be answered like this.
    fn allows(&self, answer: &[u8]) -> bool {
        let Some(op) = Op::parse(self.command.as_bytes()) else { return true };
        let (key, arg) = (self.key.as_bytes(), self.arg.as_bytes());
        let frame = Frame { number: None, command: self.command.as_bytes(), key, arg };
        // What is malformed, or only is in this unit, is not in the table.
        let Ok(request) = Request::parse(op, &frame, Unit::Seconds) else { return true };
        let Some(response) = Response::parse(op, answer, Unit::Seconds) else { return false };
        let takes = |outcome: &Outcome| match &request {
            Request::Command(command) => command.allows(outcome),
            Request::Query(query) => query.allows(outcome),
            // No commands of the store: these have the forms that the parser knows.
            Request::Inspect { .. } => matches!(outcome, Outcome::Value(_) | Outcome::Empty),
            Request::ForceRelease { .. }
            | Request::EndSession { .. }
            | Request::Cluster { .. }
            | Request::Auth { .. }
            | Request::Hello { .. }
            | Request::StableRef { .. }
            | Request::Ping
            | Request::Stats
            | Request::Members
            | Request::Barrier
            | Request::Ls { .. } => matches!(outcome, Outcome::Done | Outcome::Value(_)),
        };
        if let Response::NotLeader(_) = response {
            return true;
        }
        if let Response::Error(code) = response {
            // Of any request: it is refused before it is looked at, or the client knows no better word.
            let before =
                [ErrorCode::Error, ErrorCode::Auth, ErrorCode::Draining, ErrorCode::Forbidden];
            return before.contains(&code)
                || code == ErrorCode::TooLarge
                    && matches!(request, Request::Query(Query::Range { .. }))
                || REFUSALS.iter().any(|(refusal, spec)| {
                    spec.line == code
                        && (refusal.meets_any_request() || takes(&Outcome::Refused(*refusal)))
                });
        }
        outcomes(&response).iter().any(takes)
    }
}

/// What may be told like this.
fn outcomes(response: &Response<'_>) -> Vec<Outcome> {
    let grant = |token, lease| Grant { token, lease };
    match *response {
        Response::Ok => vec![Outcome::Done, Outcome::Written(Revision(0))],
        Response::Granted { token, lease, .. } => vec![Outcome::Granted(grant(token, lease))],
        Response::Acquired { token, lease, .. } => vec![Outcome::Acquired(grant(token, lease))],
        Response::Renewed { remaining, .. } => {
            vec![Outcome::Renewed { lease: remaining, fence: Fence(0) }]
        }
        Response::Queued => vec![Outcome::Queued],
        Response::Timeout => vec![Outcome::Timeout],
        Response::Nil => vec![Outcome::Empty],
        Response::CasConflict => vec![Outcome::Conflict],
        Response::Number(number) => vec![Outcome::Number(number)],
        Response::Value(value) => {
            let (key, value) = (Bytes::from(&b"key"[..]), Bytes::from(value));
            let popped = Outcome::Popped { key, end: End::Left, value: value.clone() };
            vec![Outcome::Value(value), popped, Outcome::Items(Vec::new())]
        }
        Response::Error(_) | Response::NotLeader(_) => Vec::new(),
    }
}
