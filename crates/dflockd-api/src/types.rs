//! The nouns of the domain: ids, time, tokens, modes. Nothing here decides anything.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::ops::{Add, Deref};
use core::time::Duration;

use serde::{Deserialize, Serialize};

/// An instant in nanoseconds of the clock that stamps commands. Where it starts is up to the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Timestamp(pub u64);

impl Timestamp {
    /// Later than every instant that can be reached.
    pub const NEVER: Self = Self(u64::MAX);

    /// The time from `earlier` to `self`, zero if it is not earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Span {
        Span(self.0.saturating_sub(earlier.0))
    }
}

impl Add<Span> for Timestamp {
    type Output = Self;

    fn add(self, span: Span) -> Self {
        Self(self.0.saturating_add(span.0))
    }
}

/// A length of time in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Span(pub u64);

impl Span {
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// `seconds` as a span, saturating.
    #[must_use]
    pub const fn from_secs(seconds: u64) -> Self {
        Self(seconds.saturating_mul(1_000_000_000))
    }

    /// `milliseconds` as a span, saturating.
    #[must_use]
    pub const fn from_millis(milliseconds: u64) -> Self {
        Self(milliseconds.saturating_mul(1_000_000))
    }
}

impl From<Span> for Duration {
    fn from(span: Span) -> Self {
        Self::from_nanos(span.0)
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// Who asks: a connection or a session of any transport. Never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct SessionId(pub u64);

/// The number of a request within its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

impl RequestId {
    /// Numbers from here on are given by the server's side. The client does not know them and can not repeat them.
    pub const UNREPEATABLE: u64 = 1 << 63;

    /// Whether the client could repeat the request.
    #[must_use]
    pub fn is_repeatable(self) -> bool {
        self.0 < Self::UNREPEATABLE
    }
}

/// The number of a grant. Larger means later; comparable per key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fence(pub u64);

/// Counts the changes of the store.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
pub struct Revision(pub u64);

/// The credential of a hold: its fence and eight random bytes.
///
/// Whoever presents it may release the hold, so `Debug` shows the fence only.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Token {
    /// The number of the grant.
    pub fence: Fence,
    /// What makes the token hard to guess.
    pub salt: u64,
}

impl Token {
    /// A token of no hold: fences begin with 1. Texts that are no tokens are read as this one.
    pub const NONE: Self = Self { fence: Fence(0), salt: 0 };

    /// The token that stands in `text`, if it is a well-formed one.
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (fence, salt) = text.split_at_checked(16)?;
        Some(Self { fence: Fence(parse_hex(fence)?), salt: parse_hex(salt)? })
    }

    /// Its text.
    #[must_use]
    pub fn text(self) -> TokenText {
        const DIGITS: &[u8; 16] = b"0123456789abcdef";
        let mut text = [0; 32];
        let bytes = self.fence.0.to_be_bytes().into_iter().chain(self.salt.to_be_bytes());
        for (pair, byte) in text.chunks_exact_mut(2).zip(bytes) {
            pair[0] = DIGITS[usize::from(byte >> 4)];
            pair[1] = DIGITS[usize::from(byte & 15)];
        }
        TokenText(text)
    }
}

/// Exactly 16 lowercase hexadecimal digits. Every renewal and release has 32 of them, so none is decided by a branch.
fn parse_hex(digits: &[u8]) -> Option<u64> {
    let digits: &[u8; 16] = digits.try_into().ok()?;
    let (mut number, mut seen) = (0, 0);
    for &byte in digits {
        let digit = HEX_DIGITS[usize::from(byte)];
        seen |= digit;
        number = number << 4 | u64::from(digit & 0xf);
    }
    (seen <= 0xf).then_some(number)
}

/// The value of each byte as a lowercase hexadecimal digit; above 15 for those that are none.
const HEX_DIGITS: [u8; 256] = {
    let mut values = [u8::MAX; 256];
    let mut digit = 0;
    while digit < 16 {
        values[b"0123456789abcdef"[digit as usize] as usize] = digit;
        digit += 1;
    }
    values
};

impl fmt::Debug for Token {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Token(fence {})", self.fence.0)
    }
}

/// The text of a [`Token`] on every API: 32 lowercase hexadecimal digits, the first 16 of them the fence.
pub struct TokenText([u8; 32]);

impl Deref for TokenText {
    type Target = str;

    fn deref(&self) -> &str {
        core::str::from_utf8(&self.0).unwrap_or_default()
    }
}

/// A key, value, item, channel or payload: any bytes, cheap to share.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Bytes(Arc<[u8]>);

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl core::borrow::Borrow<[u8]> for Bytes {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl From<&[u8]> for Bytes {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into())
    }
}

impl fmt::Debug for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.escape_ascii())
    }
}

/// The two namespaces of locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Space {
    /// Mutexes, elections and read-write locks.
    Locks,
    /// Semaphores, unless the limit `shared_namespace` of the store puts them beside the others.
    Semaphores,
}

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Mode {
    /// One holder.
    Mutex,
    /// One holder, and the key's observers are told.
    Election,
    /// Up to `limit` holders.
    Semaphore {
        /// At least 1.
        limit: u32,
    },
    /// Any number of readers.
    Read,
    /// One writer and no reader.
    Write,
}

impl Mode {
    /// The namespace a request in this mode looks in.
    #[must_use]
    pub fn space(self) -> Space {
        match self {
            Self::Mutex | Self::Election | Self::Read | Self::Write => Space::Locks,
            Self::Semaphore { .. } => Space::Semaphores,
        }
    }
}

/// One end of a list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum End {
    /// Index 0.
    Left,
    /// The last index.
    Right,
}

#[cfg(test)]
mod tests {
    use std::format;

    use super::*;

    #[test]
    fn tokens_are_hexadecimal() {
        let token = Token { fence: Fence(42), salt: 0x0123_4567_89ab_cdef };
        let text = "000000000000002a0123456789abcdef";
        assert_eq!((&*token.text(), Token::parse(text.as_bytes())), (text, Some(token)));
        assert_eq!(format!("{token:?}"), "Token(fence 42)");
        assert_eq!(&*Token::NONE.text(), "0".repeat(32));
        for bad in [
            "",
            "2a",
            "000000000000002A0123456789abcdef",
            "000000000000002a0123456789abcdef0",
            "+0000000000000020123456789abcdef",
        ] {
            assert_eq!(Token::parse(bad.as_bytes()), None, "{bad}");
        }
    }
}
