//! What can be asked of dflockd and what can come of it, each thing declared once: ids and lengths of time, commands
//! with what is true of each, outcomes, refusals and what every API says for them, and the checks that a request must
//! pass wherever it comes from.
//!
//! The state machine (`dflockd-core`) decides by these types, the line protocol (`dflockd-wire`) carries them, and the
//! other APIs build them. Nothing here decides, allocates a connection or knows a clock.

#![no_std]

extern crate alloc;
#[cfg(test)]
extern crate std;

pub mod check;
pub mod command;
mod error_code;
pub mod field;
mod outcome;
mod push;
mod refusal;
mod types;

pub use command::{
    Caller, Command, CommandKind, Expect, Gift, OwnedCommand, Query, Right, Subject, Subscription,
    Urgency,
};
pub use error_code::{Advice, ERROR_CODES, ErrorCode, ErrorSpec};
pub use outcome::{Given, Grant, Outcome};
pub use push::{Change, Event, LeaderEvent, LostReason, Push};
pub use refusal::{GrpcCode, REFUSALS, RETRY_AFTER_MS, Refusal, RefusalSpec};
pub use types::{
    Bytes, End, Fence, Mode, RequestId, Revision, SessionId, Space, Span, Timestamp, Token,
    TokenText,
};
