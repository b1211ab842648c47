//! How numbers, fields and lengths of time are written. Knows no command.

use core::fmt;

use dflockd_api::Span;
use dflockd_api::check::SECONDS_MAX;

/// What the numbers of timeouts, leases and TTLs on a connection count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Whole seconds, the protocol's own unit.
    #[default]
    Seconds,
    /// Milliseconds, after `hello` agreed on the word `ms`.
    Millis,
}

impl Unit {
    /// The largest count a request may carry.
    pub(crate) const fn count_max(self) -> u64 {
        match self {
            Self::Seconds => SECONDS_MAX,
            Self::Millis => SECONDS_MAX * 1_000,
        }
    }

    pub(crate) const fn span(self, count: u64) -> Span {
        match self {
            Self::Seconds => Span::from_secs(count),
            Self::Millis => Span::from_millis(count),
        }
    }

    /// Whole units in `span`, the rest dropped.
    pub(crate) const fn count_down(self, span: Span) -> u64 {
        match self {
            Self::Seconds => span.0 / Self::Seconds.span(1).0,
            Self::Millis => span.0 / Self::Millis.span(1).0,
        }
    }

    /// Whole units that cover `span`, at most what a server accepts.
    ///
    /// Rounds up as all clients do: a wait of 300 ms must not become a try-lock.
    pub(crate) fn count_up(self, span: Span) -> u64 {
        let down = self.count_down(span);
        (down + u64::from(self.span(down) < span)).min(self.count_max())
    }
}

/// Space and TAB, the only white space of the protocol.
pub(crate) const fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// `bytes` without blanks at either end.
pub(crate) fn trim(mut bytes: &[u8]) -> &[u8] {
    while let [first, rest @ ..] = bytes
        && is_blank(*first)
    {
        bytes = rest;
    }
    while let [rest @ .., last] = bytes
        && is_blank(*last)
    {
        bytes = rest;
    }
    bytes
}

/// `line` without the CRs at its end.
pub(crate) fn trim_cr(mut line: &[u8]) -> &[u8] {
    while let [rest @ .., b'\r'] = line {
        line = rest;
    }
    line
}

/// The first field of `bytes` and what follows it, both without blanks around them.
///
/// The field is empty only if there is none.
pub(crate) fn split_field(bytes: &[u8]) -> (&[u8], &[u8]) {
    let bytes = trim(bytes);
    let end = bytes.iter().position(|byte| is_blank(*byte)).unwrap_or(bytes.len());
    let (field, rest) = bytes.split_at(end);
    (field, trim(rest))
}

/// A decimal number of digits only.
pub(crate) fn parse_u64(digits: &[u8]) -> Option<u64> {
    if digits.is_empty() {
        return None;
    }
    let mut number = 0_u64;
    for byte in digits {
        if !byte.is_ascii_digit() {
            return None;
        }
        number = number.checked_mul(10)?.checked_add(u64::from(byte - b'0'))?;
    }
    Some(number)
}

/// A decimal number with an optional sign.
pub(crate) fn parse_i64(field: &[u8]) -> Option<i64> {
    match field {
        [b'-', digits @ ..] => 0_i64.checked_sub_unsigned(parse_u64(digits)?),
        [b'+', digits @ ..] | digits => i64::try_from(parse_u64(digits)?).ok(),
    }
}

/// The number of a request: 1 up to the largest signed 64-bit integer, digits only.
pub(crate) fn parse_number(digits: &[u8]) -> Option<u64> {
    parse_u64(digits).filter(|number| (1..=i64::MAX.unsigned_abs()).contains(number))
}

/// Appends `number` in decimal.
pub(crate) fn print_u64(mut number: u64, out: &mut Vec<u8>) {
    let mut digits = [0_u8; 20];
    let mut start = digits.len();
    loop {
        start -= 1;
        digits[start] = DIGITS[(number % 10) as usize];
        number /= 10;
        if number == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[start..]);
}

const DIGITS: &[u8; 10] = b"0123456789";

/// Appends `number` in decimal.
pub(crate) fn print_i64(number: i64, out: &mut Vec<u8>) {
    if number < 0 {
        out.push(b'-');
    }
    print_u64(number.unsigned_abs(), out);
}

/// Stands in for bytes that must not be shown.
pub(crate) struct Hidden<'a>(pub(crate) &'a [u8]);

impl fmt::Debug for Hidden<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "<{} bytes>", self.0.len())
    }
}

/// Shows bytes that may be shown as text with escapes.
pub(crate) struct Shown<'a>(pub(crate) &'a [u8]);

impl fmt::Debug for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn check(field: &[u8], expected: Option<i64>) {
        assert_eq!(parse_i64(field), expected, "{:?}", Shown(field));
    }

    #[test]
    fn integers() {
        check(b"0", Some(0));
        check(b"+7", Some(7));
        check(b"-7", Some(-7));
        check(b"007", Some(7));
        check(b"9223372036854775807", Some(i64::MAX));
        check(b"-9223372036854775808", Some(i64::MIN));
        check(b"9223372036854775808", None);
        check(b"-9223372036854775809", None);
        check(b"99999999999999999999999", None);
        for no_integer in
            [&b""[..], b"+", b"-", b"--1", b"+-1", b"1_0", b"1.0", b"0x1", b"1 ", b"a"]
        {
            check(no_integer, None);
        }
    }

    #[test]
    fn request_numbers() {
        assert_eq!(parse_number(b"1"), Some(1));
        assert_eq!(parse_number(b"9223372036854775807"), Some(i64::MAX.unsigned_abs()));
        for malformed in [&b""[..], b"0", b"+1", b"-1", b"9223372036854775808", b"x"] {
            assert_eq!(parse_number(malformed), None, "{:?}", Shown(malformed));
        }
    }

    #[test]
    fn fields() {
        assert_eq!(split_field(b"  a \t b c "), (&b"a"[..], &b"b c"[..]));
        assert_eq!(split_field(b"a"), (&b"a"[..], &b""[..]));
        assert_eq!(split_field(b" \t "), (&b""[..], &b""[..]));
    }

    #[test]
    fn rounding() {
        let up = |millis| Unit::Seconds.count_up(Span::from_millis(millis));
        assert_eq!((up(0), up(1), up(1_000), up(1_001)), (0, 1, 1, 2));
        assert_eq!(Unit::Millis.count_up(Span(1_000)), 1);
        assert_eq!(Unit::Seconds.count_up(Span(u64::MAX)), 9_223_372_036);
        assert_eq!(Unit::Millis.count_up(Span(u64::MAX)), 9_223_372_036_000);
        assert_eq!(Unit::Seconds.count_down(Span::from_millis(1_999)), 1);
    }

    proptest! {
        #[test]
        fn integers_round_trip(number: i64, unsigned: u64) {
            let mut out = Vec::new();
            print_i64(number, &mut out);
            prop_assert_eq!(&out, &number.to_string().into_bytes());
            prop_assert_eq!(parse_i64(&out), Some(number));

            out.clear();
            print_u64(unsigned, &mut out);
            prop_assert_eq!(&out, &unsigned.to_string().into_bytes());
            prop_assert_eq!(parse_u64(&out), Some(unsigned));
        }
    }
}
