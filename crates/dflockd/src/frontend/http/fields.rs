//! Members of request bodies and queries that many routes have, in the forms that JSON gives them. What they must be
//! like is checked by [`check`].

use dflockd_core::check::{self, Invalid};
use dflockd_core::{Revision, Span, Token};

use super::error::ApiError;

/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 256;

impl From<Invalid> for ApiError {
    fn from(invalid: Invalid) -> Self {
        Self::bad_request(invalid.text)
    }
}

/// A length of time, in seconds or milliseconds; none if neither is there.
pub(crate) fn span(seconds: Option<u64>, millis: Option<u64>) -> Result<Option<Span>, ApiError> {
    match (seconds, millis) {
        (None, None) => Ok(None),
        (Some(seconds), None) => Ok(Some(check::seconds(seconds)?)),
        (None, Some(millis)) => Ok(Some(check::millis(millis)?)),
        (Some(_), Some(_)) => {
            Err(ApiError::bad_request("a time is given in seconds or in milliseconds"))
        }
    }
}

/// How long to wait; not at all if nothing is said.
pub(crate) fn wait(seconds: Option<u64>, millis: Option<u64>) -> Result<Span, ApiError> {
    Ok(span(seconds, millis)?.unwrap_or(Span::ZERO))
}

/// A lease or a time to live, of which zero is none.
pub(crate) fn lasting(seconds: Option<u64>, millis: Option<u64>) -> Result<Option<Span>, ApiError> {
    Ok(span(seconds, millis)?.filter(|span| *span > Span::ZERO))
}

/// A limit or count, which must be there.
pub(crate) fn count(count: Option<i64>) -> Result<u32, ApiError> {
    Ok(check::count(count.unwrap_or_default())?)
}

/// A token. A text that is none is not held.
pub(crate) fn token(text: Option<&str>) -> Result<Token, ApiError> {
    let text = text.unwrap_or_default();
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX || text.contains(char::is_whitespace) {
        return Err(ApiError::bad_request("token required"));
    }
    Ok(Token::parse(text.as_bytes()).unwrap_or(Token::NONE))
}

/// A decimal number in a string: fences, revisions and ids do not fit into the numbers of JavaScript.
pub(crate) fn number(text: &str) -> Option<u64> {
    let digits = text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|_| digits)
}

pub(crate) fn revision(text: &str) -> Result<Revision, ApiError> {
    let number = number(text).ok_or_else(|| ApiError::bad_request("a revision is a number"))?;
    Ok(Revision(number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        let check = |seconds, millis, expected: Option<Option<Span>>| {
            assert_eq!(span(seconds, millis).ok(), expected, "{seconds:?} {millis:?}");
        };
        check(None, None, Some(None));
        check(Some(0), None, Some(Some(Span::ZERO)));
        check(Some(9_223_372_036), None, Some(Some(Span::from_secs(9_223_372_036))));
        check(Some(9_223_372_037), None, None);
        check(None, Some(1), Some(Some(Span::from_millis(1))));
        check(None, Some(9_223_372_036_001), None);
        check(Some(1), Some(1), None);
        assert_eq!(lasting(Some(0), None).ok(), Some(None));
        assert_eq!(wait(None, None).ok(), Some(Span::ZERO));
    }

    #[test]
    fn tokens() {
        let parsed = |text: Option<&str>| token(text).ok().map(|token| token != Token::NONE);
        assert_eq!(parsed(None), None);
        assert_eq!(parsed(Some("")), None);
        assert_eq!(parsed(Some("a b")), None);
        assert_eq!(parsed(Some(&"a".repeat(257))), None);
        assert_eq!(parsed(Some(&"z".repeat(256))), Some(false));
        assert_eq!(parsed(Some("0123456789abcdef0123456789abcdef")), Some(true));
    }

    #[test]
    fn counts() {
        assert_eq!(count(Some(1_048_576)).ok(), Some(1_048_576));
        assert!(count(None).is_err() && count(Some(0)).is_err());
        assert_eq!(number("18446744073709551615"), Some(u64::MAX));
        for bad in ["", "+1", "-1", "1.0", "18446744073709551616"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }
}
