//! What the core says, in the line protocol: outcomes to responses, pushes to pushes.

use dflockd_core as core;
use dflockd_core::{Fence, Outcome, Refusal};
use dflockd_wire::{ErrorCode, Op, Push, Response};

use crate::service::ANSWER_BYTES_MAX;

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
            token: grant.token,
            lease: grant.lease,
            fence: fence(grant.token.fence),
        },
        Outcome::Acquired(grant) => Response::Acquired {
            token: grant.token,
            lease: grant.lease,
            fence: fence(grant.token.fence),
        },
        Outcome::Renewed { fence: renewed, lease } => {
            Response::Renewed { remaining: *lease, fence: fence(*renewed) }
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
        core::Push::Change(change) => Push::Watch { event: change.event.name(), key: &change.key },
        core::Push::Leader { event, key } => Push::Leader { event: event.name(), key },
        core::Push::Lost { key, fence, reason } => {
            Push::Lost { key, fence: fence.0, reason: reason.name() }
        }
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
