//! What the fields of a request must be like, wherever it comes from: every API and the client library check here, so
//! that what one of them takes all of them can show.
//!
//! How long a value may be is not checked, because that limit belongs to the store.

use core::fmt;

use memchr::{memchr, memchr2, memchr2_iter};

use crate::types::Span;

/// Bytes of a key, a channel, a pattern and the name of a queue group.
pub const KEY_BYTES_MAX: usize = 256;
/// Tokens of a pattern.
pub const PATTERN_TOKENS_MAX: usize = 16;
/// The largest limit of a semaphore and the largest count of a barrier.
pub const COUNT_MAX: u32 = 1_048_576;
/// The longest lease, wait or TTL in seconds: what fits into 63 bits of nanoseconds.
pub const SECONDS_MAX: u64 = 9_223_372_036;
/// Bytes of the reason of an operator.
pub const REASON_BYTES_MAX: usize = 256;
/// Characters of the name of a client.
pub const CLIENT_NAME_CHARS_MAX: usize = 64;
/// Bytes of the line that carries a signal to its listeners, `sig <channel> <payload>`.
pub const SIGNAL_BYTES_MAX: usize = 65_536;

/// What is wrong with a field. Shows nothing of it, so it can go into any log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Invalid {
    /// The class of the error in the logs of the line protocol.
    pub code: u8,
    /// What is wrong, for people.
    pub text: &'static str,
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text)
    }
}

impl core::error::Error for Invalid {}

type Checked<T> = Result<T, Invalid>;

const fn invalid<T>(code: u8, text: &'static str) -> Checked<T> {
    Err(Invalid { code, text })
}

/// A key.
///
/// # Errors
///
/// If it is empty, too long or has white space.
#[inline]
pub fn key(key: &[u8]) -> Checked<&[u8]> {
    let is_space = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
    if key.is_empty() || key.len() > KEY_BYTES_MAX || key.iter().any(is_space) {
        return invalid(5, "a key has 1 to 256 bytes and no white space");
    }
    Ok(key)
}

/// A pattern to subscribe to: at most 16 tokens between dots or slashes. `*` and `>` stand alone, and `>` is last.
///
/// # Errors
///
/// If it is no such pattern.
pub fn pattern(pattern: &[u8]) -> Checked<&[u8]> {
    let tokens = memchr2_iter(b'.', b'/', pattern).count() + 1;
    match old_pattern(pattern) {
        Ok(pattern) if tokens <= PATTERN_TOKENS_MAX => Ok(pattern),
        Ok(_) | Err(_) => invalid(5, "malformed pattern, or one of more than 16 tokens"),
    }
}

/// A pattern that may have been subscribed to when more tokens were allowed, so that the subscription can be ended.
///
/// # Errors
///
/// If it is no pattern.
pub fn old_pattern(pattern: &[u8]) -> Checked<&[u8]> {
    let mut tokens = key(pattern)?.split(|byte| matches!(byte, b'.' | b'/')).peekable();
    while let Some(token) = tokens.next() {
        let is_valid = match token {
            b"*" => true,
            b">" => tokens.peek().is_none(),
            token => memchr2(b'*', b'>', token).is_none(),
        };
        if !is_valid {
            return invalid(5, "malformed pattern");
        }
    }
    Ok(pattern)
}

/// A channel to send to.
///
/// # Errors
///
/// If it is no key, or has a wildcard.
pub fn channel(channel: &[u8]) -> Checked<&[u8]> {
    if memchr2(b'*', b'>', key(channel)?).is_some() {
        return invalid(5, "a channel has no wildcard");
    }
    Ok(channel)
}

/// The name of a queue group, without the white space around it: lines can name no other, and a group has members from
/// everywhere. Empty for none.
///
/// # Errors
///
/// If it is too long or more than one line.
pub fn group(group: &[u8]) -> Checked<&[u8]> {
    if group.len() > KEY_BYTES_MAX || memchr2(b'\r', b'\n', group).is_some() {
        return invalid(8, "a group has at most 256 bytes and neither CR nor LF");
    }
    Ok(group.trim_ascii())
}

/// An item of a list, or what else can be a part of one line.
///
/// # Errors
///
/// If it is empty or more than one line.
#[inline]
pub fn value(value: &[u8]) -> Checked<&[u8]> {
    if value.is_empty() || memchr2(b'\r', b'\n', value).is_some() {
        return invalid(8, "a value is not empty and has neither CR nor LF");
    }
    Ok(value)
}

/// The value of a KV entry. In the line protocol a TAB ends it.
///
/// # Errors
///
/// If it is no value, or has a TAB.
pub fn entry(entry: &[u8]) -> Checked<&[u8]> {
    if memchr(b'\t', value(entry)?).is_some() {
        return invalid(8, "the value of an entry has no TAB");
    }
    Ok(entry)
}

/// What a signal on a channel carries.
///
/// # Errors
///
/// If it is no value, shows nothing, or is too long for the listeners of the line protocol.
pub fn payload<'a>(channel: &[u8], payload: &'a [u8]) -> Checked<&'a [u8]> {
    let is_blank = |byte: &u8| matches!(byte, b' ' | b'\t');
    if value(payload)?.iter().all(is_blank) {
        return invalid(8, "a payload is more than white space");
    }
    if payload.len() + channel.len() + "sig  ".len() > SIGNAL_BYTES_MAX {
        return invalid(8, "the payload is too long");
    }
    Ok(payload)
}

/// How many may hold a semaphore, or must meet at a barrier.
///
/// # Errors
///
/// If it is not 1 to [`COUNT_MAX`].
pub fn count(count: i64) -> Checked<u32> {
    match u32::try_from(count) {
        Ok(count @ 1..=COUNT_MAX) => Ok(count),
        Ok(_) | Err(_) => invalid(13, "a limit or count is 1 to 1048576"),
    }
}

/// A length of time in seconds.
///
/// # Errors
///
/// If it is longer than any time may be.
pub fn seconds(seconds: u64) -> Checked<Span> {
    if seconds > SECONDS_MAX {
        return invalid(6, "a time is at most 9223372036 seconds");
    }
    Ok(Span::from_secs(seconds))
}

/// A length of time in milliseconds.
///
/// # Errors
///
/// If it is longer than any time may be.
pub fn millis(millis: u64) -> Checked<Span> {
    if millis > SECONDS_MAX * 1_000 {
        return invalid(6, "a time is at most 9223372036000 milliseconds");
    }
    Ok(Span::from_millis(millis))
}

/// Why an operator does something, without the white space around it. It ends up in logs, so it stays on its line.
///
/// # Errors
///
/// If there is none, or it is too long or not printable.
pub fn reason(reason: &str) -> Checked<&str> {
    let reason = reason.trim();
    if reason.is_empty() || reason.len() > REASON_BYTES_MAX || reason.contains(char::is_control) {
        return invalid(8, "a reason of 1 to 256 bytes of printable text is required");
    }
    Ok(reason)
}

/// What people call a client; none if it is empty.
///
/// # Errors
///
/// If it is too long or not printable.
pub fn client_name(name: &str) -> Checked<Option<&str>> {
    if name.chars().count() > CLIENT_NAME_CHARS_MAX || name.contains(char::is_control) {
        return invalid(8, "a client name has at most 64 printable characters");
    }
    Ok(Some(name).filter(|name| !name.is_empty()))
}

/// How many entries a page has that asks for `limit`, if it says so.
///
/// # Errors
///
/// If it is not 1 to `max`.
pub fn page(limit: Option<u64>, default: usize, max: usize) -> Checked<usize> {
    match limit.map_or(Some(default), |limit| usize::try_from(limit).ok()) {
        Some(limit) if (1..=max).contains(&limit) => Ok(limit),
        Some(_) | None => invalid(4, "the limit of a page is out of range"),
    }
}

#[cfg(test)]
mod tests {
    use std::vec;

    use super::*;

    #[test]
    fn keys_and_patterns() {
        assert!(key(b"a").is_ok() && key(&[0xff; 256]).is_ok());
        for bad in [&b""[..], b"a b", b"a\n", b"\t", &[b'a'; 257]] {
            assert!(key(bad).is_err() && pattern(bad).is_err() && channel(bad).is_err(), "{bad:?}");
        }
        let deep = vec![b'.'; 16];
        for good in [&b"a.*.>"[..], b"*", b"a/*/b", b">", &deep[..15]] {
            assert!(pattern(good).is_ok(), "{good:?}");
        }
        for bad in [&b"a*"[..], b">.a", b"a/>/b", b"*a.b", &deep] {
            assert!(pattern(bad).is_err(), "{bad:?}");
        }
        assert!(old_pattern(&deep).is_ok() && old_pattern(b"a*").is_err());
        assert!(channel(b"a.b").is_ok() && channel(b"a.*").is_err() && channel(b"a>").is_err());
        assert_eq!(group(b" a b ").unwrap(), b"a b");
        assert!(group(b"").is_ok() && group(b"a\n").is_err() && group(&[b'g'; 257]).is_err());
    }

    #[test]
    fn values() {
        assert!(value(b" ").is_ok() && value(b"a\tb").is_ok() && entry(b"a b").is_ok());
        for bad in [&b""[..], b"a\nb", b"a\r"] {
            let refused = [value(bad), entry(bad), payload(b"c", bad)];
            assert!(refused.iter().all(Result::is_err), "{bad:?}");
        }
        assert!(entry(b"a\tb").is_err() && payload(b"c", b" \t").is_err());
        let longest = vec![b'p'; SIGNAL_BYTES_MAX - "sig c ".len()];
        assert!(payload(b"c", &longest).is_ok() && payload(b"cc", &longest).is_err());
    }

    #[test]
    fn numbers() {
        assert_eq!(count(1_048_576), Ok(1_048_576));
        for bad in [0, -1, 1_048_577, i64::MAX, i64::MIN] {
            assert!(count(bad).is_err(), "{bad}");
        }
        assert_eq!(seconds(SECONDS_MAX), Ok(Span::from_secs(SECONDS_MAX)));
        assert_eq!(millis(SECONDS_MAX * 1_000), Ok(Span::from_secs(SECONDS_MAX)));
        assert!(seconds(SECONDS_MAX + 1).is_err() && millis(SECONDS_MAX * 1_000 + 1).is_err());
        assert_eq!((page(None, 5, 9), page(Some(9), 5, 9)), (Ok(5), Ok(9)));
        assert!(page(Some(0), 5, 9).is_err() && page(Some(10), 5, 9).is_err());
    }

    #[test]
    fn texts() {
        assert_eq!(reason(" stuck job "), Ok("stuck job"));
        for bad in ["", "  ", "a\nb", "a\tb", &"r".repeat(257)] {
            assert!(reason(bad).is_err(), "{bad:?}");
        }
        assert_eq!((client_name(""), client_name("a b")), (Ok(None), Ok(Some("a b"))));
        assert!(client_name(&"é".repeat(64)).is_ok() && client_name(&"é".repeat(65)).is_err());
    }
}
