//! Tests of the whole store: a naive twin of it, and random commands that both must answer alike.

mod bounds;
mod model;
mod properties;

use alloc::vec::Vec;

use crate::{
    Command, Effect, Outcome, Refusal, RequestId, Span, Subscription, Timestamp, Token, command,
};

// Commands in few words.

fn subscribe(to: Subscription<'_>) -> Command<'_> {
    Command::Subscribe(command::Subscribe { to })
}

fn unsubscribe(from: Subscription<'_>) -> Command<'_> {
    Command::Unsubscribe(command::Unsubscribe { from })
}

fn signal<'a>(channel: &'a [u8], payload: &'a [u8]) -> Command<'a> {
    Command::Signal(command::Signal { channel, payload })
}

fn cancel<'a>(request: RequestId) -> Command<'a> {
    Command::Cancel(command::Cancel { request })
}

fn delete(key: &[u8]) -> Command<'_> {
    Command::KvDelete(command::KvDelete { key })
}

fn add(key: &[u8], delta: i64, decrement: bool) -> Command<'_> {
    Command::Add(command::Add { key, delta, decrement })
}

fn renew_session<'a>(lease: Span) -> Command<'a> {
    Command::RenewSession(command::RenewSession { lease })
}

fn detach<'a>(until: u64) -> Command<'a> {
    Command::Detach { until: Timestamp(until) }
}

// And what comes of them.

fn refused(refusal: Refusal) -> Outcome {
    Outcome::Refused(refusal)
}

#[track_caller]
fn token(outcome: &Outcome) -> Token {
    let (Outcome::Granted(grant) | Outcome::Acquired(grant)) = outcome else {
        panic!("not granted: {outcome:?}")
    };
    grant.token
}

/// The answer to a request, none if it waits.
fn answer(effects: Vec<Effect>, to: RequestId) -> Option<Outcome> {
    effects.into_iter().find_map(|effect| match effect {
        Effect::Reply { request, outcome, .. } if request == to => Some(outcome),
        Effect::Reply { .. } | Effect::Push { .. } | Effect::SessionEnded { .. } => None,
    })
}
