//! The line protocol and the core: requests to commands, outcomes to responses. HTTP and gRPC make commands in their
//! handlers.

use std::time::Duration;

use dflockd_core as core;
use dflockd_core::{
    Command, Event, Expect, Fence, LeaderEvent, LostReason, Outcome, Query, Refusal, Subscription,
    command,
};
use dflockd_wire::{ErrorCode, Op, Push, Request, Response, TokenText};

use crate::service::{ANSWER_BYTES_MAX, span};

/// What a request asks of the engine.
pub(crate) enum Asked<'a> {
    Command(Command<'a>),
    Query(Query<'a>),
    /// It names a token that nobody can hold.
    NotHeld,
    /// It is for the connection itself.
    Connection,
}

pub(crate) fn ask<'a>(request: &Request<'a>, salt: impl FnOnce() -> u64) -> Asked<'a> {
    let command = match *request {
        Request::Acquire { mode, key, wait, lease } => Command::Acquire(command::Acquire {
            key,
            mode,
            wait: span(wait),
            lease: lease.map(span),
            salt: salt(),
        }),
        Request::Enqueue { mode, key, lease } => {
            Command::Enqueue(command::Enqueue { key, mode, lease: lease.map(span), salt: salt() })
        }
        Request::Wait { space, key, wait } => {
            Command::Wait(command::Wait { key, space, wait: span(wait) })
        }
        Request::Release { space, key, token, resign } => {
            let Some(token) = token_of(token) else { return Asked::NotHeld };
            Command::Release(command::Release { key, space, token, resign })
        }
        Request::Renew { space, key, token, lease } => {
            let Some(token) = token_of(token) else { return Asked::NotHeld };
            Command::Renew(command::Renew { key, space, token, lease: lease.map(span) })
        }
        Request::Add { key, delta, decrement } => {
            Command::Add(command::Add { key, delta, decrement })
        }
        Request::CounterSet { key, value } => {
            Command::CounterSet(command::CounterSet { key, value })
        }
        Request::KvSet { key, value, ttl } => {
            Command::KvSet(command::KvSet { key, value, ttl: ttl.map(span) })
        }
        Request::KvDelete { key } => Command::KvDelete(command::KvDelete { key }),
        Request::KvCompareAndSet { key, old, new, ttl } => {
            Command::KvCompareAndSet(command::KvCompareAndSet {
                key,
                expect: old.map_or(Expect::Absent, Expect::Value),
                value: new,
                ttl: ttl.map(span),
            })
        }
        Request::Push { key, end, value } => Command::Push(command::Push { key, end, value }),
        Request::Pop { key, end } => Command::Pop(command::Pop { key, end, wait: None }),
        Request::BlockingPop { key, end, wait } => {
            Command::Pop(command::Pop { key, end, wait: Some(span(wait)) })
        }
        Request::BarrierWait { key, count, wait } => {
            Command::BarrierWait(command::BarrierWait { key, count, wait: span(wait) })
        }
        Request::Signal { channel, payload } => {
            Command::Signal(command::Signal { channel, payload })
        }
        Request::Listen { pattern, group } => {
            Command::Subscribe(command::Subscribe { to: Subscription::Signals { pattern, group } })
        }
        Request::Unlisten { pattern, group } => Command::Unsubscribe(command::Unsubscribe {
            from: Subscription::Signals { pattern, group },
        }),
        Request::Watch { pattern } => Command::Subscribe(command::Subscribe {
            to: Subscription::Changes { pattern, from: None },
        }),
        Request::Unwatch { pattern } => Command::Unsubscribe(command::Unsubscribe {
            from: Subscription::Changes { pattern, from: None },
        }),
        Request::Observe { key } => {
            Command::Subscribe(command::Subscribe { to: Subscription::Leaders { key } })
        }
        Request::Unobserve { key } => {
            Command::Unsubscribe(command::Unsubscribe { from: Subscription::Leaders { key } })
        }
        Request::CounterGet { key } => return Asked::Query(Query::Counter { key }),
        Request::KvGet { key } => return Asked::Query(Query::Kv { key }),
        Request::Length { key } => return Asked::Query(Query::Length { key }),
        Request::Range { key, start, stop } => {
            return Asked::Query(Query::Range { key, start, stop });
        }
        Request::ForceRelease { key, space, fence, .. } => {
            Command::ForceRelease(command::ForceRelease { key, space, fence: Fence(fence) })
        }
        Request::Auth { .. }
        | Request::Ping
        | Request::Stats
        | Request::Barrier
        | Request::StableRef { .. }
        | Request::Hello { .. }
        | Request::Cancel { .. }
        | Request::Ack { .. }
        | Request::Inspect { .. }
        | Request::Ls { .. }
        | Request::EndSession { .. }
        | Request::Cluster { .. } => return Asked::Connection,
    };
    Asked::Command(command)
}

/// How a connection wants its answers.
#[derive(Clone, Copy, Default)]
pub(crate) struct ClientFeatures {
    /// The fence as a field of its own, also where old clients would not expect it.
    pub(crate) fence: bool,
    /// The reason why a renewal failed, also where old clients would not expect it.
    pub(crate) lease_status: bool,
    /// A word of its own for what nobody could decide.
    pub(crate) unavailable: bool,
}

/// What a client is told. `items` is where the text of a listing is kept while it is printed.
pub(crate) fn respond<'a>(
    op: Op,
    outcome: &'a Outcome,
    client_features: ClientFeatures,
    items: &'a mut Vec<u8>,
) -> Response<'a> {
    let fence = |fence: Fence| (client_features.fence || always_has_fence(op)).then_some(fence.0);
    match outcome {
        Outcome::Done => Response::Ok,
        Outcome::Granted(grant) => Response::Granted {
            token: text_of(grant.token),
            lease: duration(grant.lease),
            fence: fence(grant.token.fence),
        },
        Outcome::Acquired(grant) => Response::Acquired {
            token: text_of(grant.token),
            lease: duration(grant.lease),
            fence: fence(grant.token.fence),
        },
        Outcome::Renewed { fence: renewed, lease } => {
            Response::Renewed { remaining: duration(*lease), fence: fence(*renewed) }
        }
        Outcome::Queued => Response::Queued,
        // A member of a cluster that follows version 1 ends a pop like a lock.
        Outcome::Timeout if matches!(op, Op::Blpop | Op::Brpop) => Response::Nil,
        Outcome::Timeout => Response::Timeout,
        Outcome::Empty => Response::Nil,
        Outcome::Conflict => Response::CasConflict,
        Outcome::Number(number) => Response::Number(*number),
        Outcome::Value(value) | Outcome::Popped { value, .. } | Outcome::Entry { value, .. } => {
            Response::Value(value)
        }
        Outcome::Written(_) => Response::Ok,
        Outcome::Items(values) => {
            if print_items(values, items) {
                Response::Value(items)
            } else {
                Response::Error(ErrorCode::TooLarge)
            }
        }
        Outcome::Part(_) => Response::Error(ErrorCode::TooLarge),
        Outcome::Compacted(_) => Response::Error(ErrorCode::Error),
        Outcome::Refused(refusal) => Response::Error(error_code(op, *refusal, client_features)),
    }
}

fn error_code(op: Op, refusal: Refusal, client_features: ClientFeatures) -> ErrorCode {
    let code = refusal.spec().line;
    let unasked = matches!(op, Op::N | Op::Sn) && !client_features.lease_status;
    if code == ErrorCode::LeaseExpired && unasked {
        ErrorCode::Error
    } else if code == ErrorCode::Unavailable {
        unavailable(client_features)
    } else {
        code
    }
}

/// Nobody could decide it. Old clients take the word for that as the end of the conversation.
pub(crate) fn unavailable(client_features: ClientFeatures) -> ErrorCode {
    if client_features.unavailable { ErrorCode::Unavailable } else { ErrorCode::Error }
}

/// Why a client that greets gets no session.
pub(crate) fn no_session(outcome: &Outcome) -> ErrorCode {
    let client_features = ClientFeatures { unavailable: true, ..ClientFeatures::default() };
    let Outcome::Refused(refusal) = outcome else { return ErrorCode::Unknown };
    error_code(Op::Hello, *refusal, client_features)
}

pub(crate) fn push(push: &core::Push) -> Push<'_> {
    match push {
        core::Push::Signal { channel, payload } => Push::Signal { channel, payload },
        core::Push::Change(change) => {
            Push::Watch { event: event_name(change.event), key: &change.key }
        }
        core::Push::Leader { event, key } => {
            let event = match event {
                LeaderEvent::Elected => "elected",
                LeaderEvent::Resigned => "resigned",
                LeaderEvent::Failover => "failover",
            };
            Push::Leader { event, key }
        }
        core::Push::Lost { key, fence, reason } => {
            let reason = match reason {
                LostReason::Expired => "expired",
                LostReason::Forced => "forced",
                LostReason::Session => "session",
            };
            Push::Lost { key, fence: fence.0, reason }
        }
    }
}

pub(crate) fn event_name(event: Event) -> &'static str {
    match event {
        Event::Acquire => "acquire",
        Event::Release => "release",
        Event::Elect => "elect",
        Event::Resign => "resign",
        Event::Incr => "incr",
        Event::Decr => "decr",
        Event::Cset => "cset",
        Event::Kset => "kset",
        Event::Kdel => "kdel",
        Event::Kcas => "kcas",
        Event::Lpush => "lpush",
        Event::Rpush => "rpush",
        Event::Lpop => "lpop",
        Event::Rpop => "rpop",
        Event::Blpop => "blpop",
        Event::Brpop => "brpop",
    }
}

/// The commands that came with fences; the older ones have clients that count fields.
fn always_has_fence(op: Op) -> bool {
    matches!(op, Op::Rl | Op::Wl | Op::Re | Op::We | Op::Rw | Op::Ww | Op::Rn | Op::Wn | Op::Elect)
}

/// Writes a JSON array of strings; false if it is too long for one answer, which one item never is. In JSON a byte can
/// have six.
pub(crate) fn print_items(values: &[core::Bytes], out: &mut Vec<u8>) -> bool {
    out.push(b'[');
    for (index, value) in values.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        let value = String::from_utf8_lossy(value);
        serde_json::to_writer(&mut *out, &value).expect("strings can be written to memory");
        if index > 0 && out.len() >= ANSWER_BYTES_MAX {
            return false;
        }
    }
    out.push(b']');
    true
}

fn token_of(text: &[u8]) -> Option<core::Token> {
    let (fence, salt) = TokenText::parse(text)?;
    Some(core::Token { fence: Fence(fence), salt })
}

fn text_of(token: core::Token) -> TokenText {
    TokenText::from_parts(token.fence.0, token.salt)
}

fn duration(span: core::Span) -> Duration {
    Duration::from_nanos(span.0)
}
