//! The checks that members of HTTP and gRPC requests pass, as the fuzz targets call them. No part of what this library
//! offers: nothing here is kept compatible.

/// What HTTP lets through.
pub mod http {
    use std::borrow::Cow;

    use dflockd_core::{Span, Token};
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

    /// A token that somebody may hold.
    #[must_use]
    pub fn token(text: &str) -> Option<Token> {
        fields::token(Some(text)).ok().filter(|token| *token != Token::NONE)
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
}

/// What gRPC lets through besides what `dflockd-wire` checks.
pub mod grpc {
    use dflockd_core::RequestId;

    use crate::frontend::grpc::fields;

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
}
