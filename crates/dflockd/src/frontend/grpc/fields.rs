//! Fields of requests that many calls have, checked.

use dflockd_core::{End, Fence, Mode, RequestId, Space, Span, Token};
use dflockd_wire::grpc::{ListEnd, LockMode};
use dflockd_wire::{COUNT_MAX, SECONDS_MAX, TokenText, key_is_valid, pattern_is_valid};

use super::error::Refused;

/// The longest key.
const KEY_BYTES_MAX: usize = 256;
/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 256;
/// The longest reason of an operator.
const REASON_BYTES_MAX: usize = 256;
/// The longest name of a client.
const NAME_CHARS_MAX: usize = 64;
/// The usual page.
const PAGE: u32 = 100;
/// The longest page.
const PAGE_MAX: u32 = 1000;

type Checked<T> = Result<T, Refused>;

pub(crate) fn key(key: &[u8]) -> Checked<&[u8]> {
    if key.len() <= KEY_BYTES_MAX && key_is_valid(key) {
        Ok(key)
    } else {
        Err(Refused::bad_request("a key has 1 to 256 bytes and no white space"))
    }
}

pub(crate) fn pattern(pattern: &[u8]) -> Checked<&[u8]> {
    if pattern.len() <= KEY_BYTES_MAX && key_is_valid(pattern) && pattern_is_valid(pattern) {
        Ok(pattern)
    } else {
        Err(Refused::bad_request("malformed pattern, or one of more than 16 tokens"))
    }
}

pub(crate) fn group(group: &[u8]) -> Checked<&[u8]> {
    let is_line_end = |byte: &u8| matches!(byte, b'\r' | b'\n');
    if group.len() > KEY_BYTES_MAX || group.iter().any(is_line_end) {
        return Err(Refused::bad_request("a group has at most 256 bytes and neither CR nor LF"));
    }
    // The line protocol can name no other: a group has members from everywhere.
    Ok(group.trim_ascii())
}

/// A value, item or payload that the line protocol can carry, too.
pub(crate) fn value(value: &[u8]) -> Checked<&[u8]> {
    if value.is_empty() || value.iter().any(|byte| matches!(byte, b'\r' | b'\n')) {
        return Err(Refused::bad_request("a value is not empty and has neither CR nor LF"));
    }
    Ok(value)
}

/// A payload, which also must show something.
pub(crate) fn payload(payload: &[u8]) -> Checked<&[u8]> {
    if payload.iter().all(|byte| matches!(byte, b' ' | b'\t')) {
        return Err(Refused::bad_request("a payload is more than white space"));
    }
    value(payload)
}

pub(crate) fn span(millis: u64) -> Checked<Span> {
    if millis <= SECONDS_MAX * 1000 {
        Ok(Span::from_millis(millis))
    } else {
        Err(Refused::bad_request("a time is at most 9223372036000 milliseconds"))
    }
}

/// A time to live, of which zero is none.
pub(crate) fn lasting(millis: u64) -> Checked<Option<Span>> {
    Ok(Some(span(millis)?).filter(|span| *span > Span::ZERO))
}

/// How a lock is asked for. A limit is looked at for semaphores only.
pub(crate) fn mode(mode: i32, limit: u32) -> Checked<Mode> {
    Ok(match lock_mode(mode)? {
        LockMode::Unspecified | LockMode::Mutex => Mode::Mutex,
        LockMode::Semaphore => Mode::Semaphore { limit: count(limit)? },
        LockMode::Read => Mode::Read,
        LockMode::Write => Mode::Write,
    })
}

/// Where a lock lives.
pub(crate) fn space(mode: i32) -> Checked<Space> {
    Ok(match lock_mode(mode)? {
        LockMode::Semaphore => Space::Semaphores,
        LockMode::Unspecified | LockMode::Mutex | LockMode::Read | LockMode::Write => Space::Locks,
    })
}

fn lock_mode(mode: i32) -> Checked<LockMode> {
    LockMode::try_from(mode).map_err(|_| Refused::bad_request("an unknown mode of locks"))
}

/// How many may hold a semaphore or must meet at a barrier.
pub(crate) fn count(count: u32) -> Checked<u32> {
    if (1..=COUNT_MAX).contains(&count) {
        Ok(count)
    } else {
        Err(Refused::bad_request("a limit or count is 1 to 1048576"))
    }
}

pub(crate) fn end(end: i32) -> Checked<End> {
    match ListEnd::try_from(end) {
        Ok(ListEnd::Unspecified | ListEnd::Left) => Ok(End::Left),
        Ok(ListEnd::Right) => Ok(End::Right),
        Err(_) => Err(Refused::bad_request("an unknown end of a list")),
    }
}

/// A token. One that nobody can hold is not held.
pub(crate) fn token(text: &str) -> Checked<Token> {
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX {
        return Err(Refused::bad_request("a token is required"));
    }
    let (fence, salt) = TokenText::parse(text.as_bytes()).ok_or_else(Refused::not_held)?;
    Ok(Token { fence: Fence(fence), salt })
}

/// The number of a request that can be repeated, if it has one.
pub(crate) fn request(number: u64) -> Checked<Option<RequestId>> {
    let request = RequestId(number);
    if request.is_repeatable() {
        Ok(Some(request).filter(|request| request.0 != 0))
    } else {
        Err(Refused::bad_request("a request id is below 2^63"))
    }
}

/// How many entries a page has.
pub(crate) fn page(limit: u32) -> Checked<usize> {
    let limit = if limit == 0 { PAGE } else { limit };
    usize::try_from(limit)
        .ok()
        .filter(|_| limit <= PAGE_MAX)
        .ok_or_else(|| Refused::bad_request("a limit of a page is 1 to 1000"))
}

/// Why an operator does something. It ends up in a log, so it stays on its line.
pub(crate) fn reason(text: &str) -> Checked<&str> {
    let text = text.trim();
    if text.is_empty() || text.len() > REASON_BYTES_MAX || text.contains(char::is_control) {
        return Err(Refused::bad_request(
            "a reason of 1 to 256 bytes of printable text is required",
        ));
    }
    Ok(text)
}

/// What people call a client; none if it does not say.
pub(crate) fn client_name(text: &str) -> Checked<Option<&str>> {
    if text.chars().count() > NAME_CHARS_MAX || text.contains(char::is_control) {
        return Err(Refused::bad_request("a client name has at most 64 printable characters"));
    }
    Ok(Some(text).filter(|text| !text.is_empty()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_values_and_patterns() {
        assert!(key(b"a").is_ok() && key(&[0xff; 256]).is_ok());
        for bad in [&b""[..], b"a b", b"a\n", &[b'a'; 257]] {
            assert!(key(bad).is_err(), "{bad:?}");
        }
        assert!(value(b" ").is_ok() && payload(b" a ").is_ok());
        assert!(value(b"").is_err() && value(b"a\r").is_err() && payload(b" \t").is_err());
        assert!(pattern(b"a.*.>").is_ok() && pattern(b"a*").is_err());
        assert!(group(b"").is_ok() && group(b"a b").is_ok() && group(b"a\n").is_err());
    }

    #[test]
    fn numbers() {
        assert_eq!(span(9_223_372_036_000).ok(), Some(Span::from_secs(9_223_372_036)));
        assert!(span(9_223_372_036_001).is_err());
        assert_eq!(lasting(0).ok(), Some(None));
        assert_eq!(request(0).ok(), Some(None));
        assert_eq!(request(7).ok(), Some(Some(RequestId(7))));
        assert!(request(1 << 63).is_err());
        assert!(count(0).is_err() && count(1_048_577).is_err());
        assert_eq!((page(0).ok(), page(1000).ok(), page(1001).ok()), (Some(100), Some(1000), None));
        assert!(mode(2, 0).is_err() && mode(1, 0).is_ok() && mode(9, 1).is_err());
    }

    #[test]
    fn texts() {
        assert!(token("").is_err() && token("0123456789abcdef0123456789abcdef").is_ok());
        assert!(reason(" because ").is_ok() && reason(" ").is_err() && reason("a\nb").is_err());
        assert_eq!(client_name("").ok(), Some(None));
        assert!(client_name(&"é".repeat(64)).is_ok() && client_name(&"é".repeat(65)).is_err());
    }
}
