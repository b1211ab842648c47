//! The checks that members of HTTP and gRPC requests pass, as the fuzz targets call them. No part of what this library
//! offers: nothing here is kept compatible.

/// What HTTP lets through.
pub mod http {
    use std::borrow::Cow;

    use dflockd_core::{Span, Token, check};
    use serde::{Deserialize, Serialize};

    use crate::frontend::http::{body, fields};

    /// A body with a member of each type that bodies have.
    #[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub struct Members {
        /// A text that must be there.
        pub token: String,
        /// One that may be.
        pub value: Option<String>,
        /// A number without a sign.
        pub lease_ttl_ms: Option<u64>,
        /// A number.
        pub delta: Option<i64>,
        /// A choice.
        pub keep: Option<bool>,
    }

    /// A key as it stands in a path, percent-encoded.
    #[must_use]
    pub fn key(segment: &str) -> Option<Vec<u8>> {
        let decoded = body::decode(segment)?;
        body::key(decoded).ok().map(|key| key.0)
    }

    /// A body, or what its sender is told.
    ///
    /// # Errors
    ///
    /// If it is not of that form.
    pub fn members(bytes: &[u8]) -> Result<Members, String> {
        match body::parse(bytes) {
            Ok(body::Json(members)) => Ok(members),
            Err(error) => Err(error.detail.map(Cow::into_owned).unwrap_or_default()),
        }
    }

    /// A pattern of keys or channels.
    #[must_use]
    pub fn pattern(text: &str) -> Option<&[u8]> {
        check::pattern(text.as_bytes()).ok()
    }

    /// An item of a list, or a payload.
    #[must_use]
    pub fn value(text: &str) -> Option<&[u8]> {
        check::value(text.as_bytes()).ok()
    }

    /// The value of an entry.
    #[must_use]
    pub fn entry(text: &str) -> Option<&[u8]> {
        check::entry(text.as_bytes()).ok()
    }

    /// A token that somebody may hold.
    #[must_use]
    pub fn token(text: &str) -> Option<Token> {
        fields::token(Some(text)).ok().flatten()
    }

    /// A length of time, if it is a legal one.
    #[must_use]
    pub fn span(seconds: Option<u64>, millis: Option<u64>) -> Option<Option<Span>> {
        fields::span(seconds, millis).ok()
    }

    /// A decimal number in a string.
    #[must_use]
    pub fn number(text: &str) -> Option<u64> {
        fields::number(text)
    }

    /// Why an operator does something.
    #[must_use]
    pub fn reason(text: &str) -> Option<&str> {
        check::reason(text).ok()
    }
}

/// What gRPC lets through.
pub mod grpc {
    use dflockd_core::{Mode, RequestId, Span, Token};

    use crate::frontend::grpc::fields;

    /// A key.
    #[must_use]
    pub fn key(key: &[u8]) -> Option<&[u8]> {
        fields::key(key).ok()
    }

    /// A pattern of keys or channels.
    #[must_use]
    pub fn pattern(pattern: &[u8]) -> Option<&[u8]> {
        fields::pattern(pattern).ok()
    }

    /// The name of a queue group.
    #[must_use]
    pub fn group(group: &[u8]) -> Option<&[u8]> {
        fields::group(group).ok()
    }

    /// A value or an item of a list.
    #[must_use]
    pub fn value(value: &[u8]) -> Option<&[u8]> {
        fields::value(value).ok()
    }

    /// What a signal carries.
    #[must_use]
    pub fn payload(payload: &[u8]) -> Option<&[u8]> {
        fields::payload(b"c", payload).ok()
    }

    /// A length of time, if it is a legal one.
    #[must_use]
    pub fn span(millis: u64) -> Option<Span> {
        fields::millis(millis).ok()
    }

    /// How a lock is asked for.
    #[must_use]
    pub fn mode(mode: i32, limit: u32) -> Option<Mode> {
        fields::mode(mode, limit).ok()
    }

    /// A token that somebody may hold.
    #[must_use]
    pub fn token(text: &str) -> Option<Token> {
        fields::token(text).ok()
    }

    /// The number of a request that can be repeated, if it is a legal one.
    #[must_use]
    pub fn request(number: u64) -> Option<Option<RequestId>> {
        fields::request(number).ok()
    }

    /// How many entries a page has.
    #[must_use]
    pub fn page(limit: u32) -> Option<usize> {
        fields::page(limit).ok()
    }

    /// Why an operator does something.
    #[must_use]
    pub fn reason(text: &str) -> Option<&str> {
        fields::reason(text).ok()
    }

    /// What people call a client, if it is a legal name.
    #[must_use]
    pub fn client_name(text: &str) -> Option<Option<&str>> {
        fields::client_name(text).ok()
    }
}
