//! The line protocol of dflockd, both directions, without sockets.
//!
//! A request is three lines (`<command>`, `<key>`, `<arg>`), an answer is one, and a connection that
//! subscribed to something also gets push lines in between. This crate turns those bytes into typed
//! values and back; it knows neither sockets nor clocks nor what the server does with a request.
//!
//! # Layout
//!
//! - `op`: [`OPS`], every command once: its name, its arguments, its answers.
//! - `line`: [`Decoder`], bytes to [`Frame`]s: partial input, line limits, request numbers.
//! - `request`: [`Request`], a frame to a checked request and back: mostly a command or a query of `dflockd-api`.
//! - `response`: [`Response`] and [`Push`], what the server writes.
//! - `text`: how integers, fields and units of time are written; shared by both directions.
//!
//! The path on the server is [`Decoder::decode`], [`Op::parse`], [`Request::parse`], and later
//! [`Response::print`]; on the client [`Request::print`], then [`split_number`], [`Push::parse`] and
//! [`Response::parse`].
//!
//! No `Debug` output and no [`ParseError`] of this crate shows a token, a value or a payload, so
//! that a careless log line cannot leak one.

#[cfg(feature = "grpc")]
pub mod grpc;
mod line;
mod op;
mod request;
mod response;
mod text;

pub use dflockd_api::check::{
    COUNT_MAX, KEY_BYTES_MAX, PATTERN_TOKENS_MAX, REASON_BYTES_MAX, SECONDS_MAX,
};
pub use dflockd_api::{
    Bytes, Command, ERROR_CODES, End, ErrorCode, ErrorSpec, Expect, Fence, Gift, Grant,
    LeaderEvent, LostReason, Mode, Outcome, Query, REFUSALS, RequestId, Revision, Space, Span,
    Subscription, Token, TokenText, check, command,
};
pub use line::{Decoded, Decoder, Frame, NUMBER_BYTES_MAX};
pub use op::{ArgLimit, LONG_BYTES_MAX, OPS, Op, OpSpec, SHORT_BYTES_MAX};
pub use request::{LS_LIMIT_MAX, ParseError, Request};
pub use response::{Push, Response, print_number, split_number};
pub use text::Unit;
