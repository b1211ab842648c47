//! Members of request bodies and queries that many routes have, checked.

use dflockd_core::{Fence, Revision, Span, Token};
use dflockd_wire::{COUNT_MAX, SECONDS_MAX, TokenText};

use super::body::KEY_BYTES_MAX;
use super::error::ApiError;

/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 256;
/// The longest reason of an operator.
const REASON_BYTES_MAX: usize = 256;

/// A length of time, in seconds or milliseconds; none if neither is there.
pub(crate) fn span(seconds: Option<u64>, millis: Option<u64>) -> Result<Option<Span>, ApiError> {
    let span = match (seconds, millis) {
        (None, None) => return Ok(None),
        (Some(seconds), None) if seconds <= SECONDS_MAX => Span::from_secs(seconds),
        (None, Some(millis)) if millis <= SECONDS_MAX * 1000 => Span::from_millis(millis),
        (Some(_), Some(_)) => {
            return Err(ApiError::bad_request("a time is given in seconds or in milliseconds"));
        }
        (Some(_), None) | (None, Some(_)) => {
            return Err(ApiError::bad_request("a time is at most 9223372036 seconds"));
        }
    };
    Ok(Some(span))
}

/// How long to wait; not at all if nothing is said.
pub(crate) fn wait(seconds: Option<u64>, millis: Option<u64>) -> Result<Span, ApiError> {
    Ok(span(seconds, millis)?.unwrap_or(Span::ZERO))
}

/// A lease or a time to live, of which zero is none.
pub(crate) fn lasting(seconds: Option<u64>, millis: Option<u64>) -> Result<Option<Span>, ApiError> {
    Ok(span(seconds, millis)?.filter(|span| *span > Span::ZERO))
}

/// How many may hold a semaphore.
pub(crate) fn limit(limit: Option<i64>) -> Result<u32, ApiError> {
    match limit {
        Some(limit @ 1..) => {
            count(Some(limit)).ok_or_else(|| ApiError::bad_request("limit must be at most 1048576"))
        }
        Some(_) | None => Err(ApiError::bad_request("limit must be > 0")),
    }
}

/// How many must meet at a barrier, or a limit.
pub(crate) fn count(count: Option<i64>) -> Option<u32> {
    u32::try_from(count?).ok().filter(|count| (1..=COUNT_MAX).contains(count))
}

/// A token; none inside if nobody can hold it.
pub(crate) fn token(text: Option<&str>) -> Result<Option<Token>, ApiError> {
    let text = text.unwrap_or_default();
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX || text.contains(char::is_whitespace) {
        return Err(ApiError::bad_request("token required"));
    }
    let parts = TokenText::parse(text.as_bytes());
    Ok(parts.map(|(fence, salt)| Token { fence: Fence(fence), salt }))
}

/// A value that the line protocol can carry, too.
pub(crate) fn value(text: &str) -> Result<&[u8], ApiError> {
    if text.is_empty() || text.contains(['\r', '\n']) {
        return Err(ApiError::bad_request("a value is not empty and has neither CR nor LF"));
    }
    Ok(text.as_bytes())
}

/// A value of an entry. The line protocol has a TAB behind it.
pub(crate) fn entry(text: &str) -> Result<&[u8], ApiError> {
    if text.contains('\t') {
        return Err(ApiError::bad_request("the value of an entry has no TAB"));
    }
    value(text)
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

/// A pattern of keys or channels.
pub(crate) fn pattern(text: &str) -> Result<&[u8], ApiError> {
    let bytes = text.as_bytes();
    let wellformed = bytes.len() <= KEY_BYTES_MAX
        && dflockd_wire::key_is_valid(bytes)
        && dflockd_wire::pattern_is_valid(bytes);
    if wellformed {
        Ok(bytes)
    } else {
        Err(ApiError::bad_request("malformed pattern, or one of more than 16 tokens"))
    }
}

/// How many entries a page has.
pub(crate) fn page(limit: Option<u64>, default: usize, max: usize) -> Result<usize, ApiError> {
    let limit = limit.map_or(Some(default), |limit| usize::try_from(limit).ok());
    limit
        .filter(|limit| (1..=max).contains(limit))
        .ok_or_else(|| ApiError::bad_request(format!("limit is 1 to {max}")))
}

/// Why an operator does something. It ends up in a log, so it stays on its line.
pub(crate) fn reason(text: &str) -> Result<&str, ApiError> {
    let text = text.trim();
    if text.is_empty() || text.len() > REASON_BYTES_MAX || text.contains(char::is_control) {
        return Err(ApiError::bad_request(
            "a reason of 1 to 256 bytes of printable text is required",
        ));
    }
    Ok(text)
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
        let parsed = |text: Option<&str>| token(text).ok().map(|token| token.is_some());
        assert_eq!(parsed(None), None);
        assert_eq!(parsed(Some("")), None);
        assert_eq!(parsed(Some("a b")), None);
        assert_eq!(parsed(Some(&"a".repeat(257))), None);
        assert_eq!(parsed(Some(&"z".repeat(256))), Some(false));
        assert_eq!(parsed(Some("0123456789abcdef0123456789abcdef")), Some(true));
    }

    #[test]
    fn counts() {
        assert_eq!(limit(Some(1_048_576)).ok(), Some(1_048_576));
        for bad in [None, Some(0), Some(-1), Some(1_048_577), Some(i64::MAX)] {
            assert!(limit(bad).is_err(), "{bad:?}");
        }
        assert_eq!(number("18446744073709551615"), Some(u64::MAX));
        for bad in ["", "+1", "-1", "1.0", "18446744073709551616"] {
            assert_eq!(number(bad), None, "{bad}");
        }
    }

    #[test]
    fn texts() {
        assert!(value("a b").is_ok());
        for bad in ["", "a\nb", "a\r"] {
            assert!(value(bad).is_err(), "{bad:?}");
        }
        assert!(value("a\tb").is_ok() && entry("a b").is_ok() && entry("a\tb").is_err());
        assert_eq!(reason(" stuck job ").ok(), Some("stuck job"));
        for bad in ["", "  ", "a\nb", &"r".repeat(257)] {
            assert!(reason(bad).is_err(), "{bad:?}");
        }
        assert!(pattern("a.*.>").is_ok());
        for bad in ["", "a b", "a*", ">.a", &"p".repeat(257)] {
            assert!(pattern(bad).is_err(), "{bad:?}");
        }
    }
}
