//! Bytes to frames: where lines end, how long they may be, which number they carry. What the lines
//! mean is the business of `request`; the one thing looked up here is how long a command's
//! argument may be.

use core::fmt;

use memchr::memchr;

use crate::op::{ArgLimit, Op, SHORT_BYTES_MAX};
use crate::text::{Hidden, Shown, parse_number, trim_cr};

/// By how much the number of a request lengthens its first line: 20 digits and a space.
pub const NUMBER_BYTES_MAX: usize = 21;

/// The three lines of a request, without their ends.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The number of the request on a numbered connection. `None` there means that the number is
    /// missing or malformed and the frame must be refused, whatever `command` says.
    pub number: Option<u64>,
    /// The first line, without the number.
    pub command: &'a [u8],
    /// The second line.
    pub key: &'a [u8],
    /// The third line.
    pub arg: &'a [u8],
}

impl fmt::Debug for Frame<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Frame")
            .field("number", &self.number)
            .field("command", &Shown(self.command))
            .field("key", &Shown(self.key))
            .field("arg", &Hidden(self.arg))
            .finish()
    }
}

/// What [`Decoder::decode`] found at the start of its input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A whole request in the first `used` bytes.
    Frame {
        /// The request.
        frame: Frame<'a>,
        /// How many bytes to drop before the next call.
        used: usize,
    },
    /// More input is needed; nothing may be dropped.
    Incomplete,
    /// A line over its limit. The request is lost and the connection cannot go on, but the line is
    /// still read to its end: closing with unread input would reset the connection and take the
    /// answer with it.
    TooLong {
        /// How many bytes to drop before the next call.
        used: usize,
        /// Whether the end of the line was among them.
        done: bool,
    },
}

/// Finds the requests in a stream of bytes.
///
/// The caller keeps the bytes: it passes all that were not used yet, and after
/// [`Decoded::Incomplete`] the same ones again with more behind them. The decoder remembers how far
/// it looked, so a request that arrives byte by byte is still read only once.
#[derive(Clone, Debug)]
pub struct Decoder {
    value_bytes_max: usize,
    numbered: bool,
    /// Inside a line that is too long.
    draining: bool,
    /// How many lines of the frame in progress are complete, and where their LFs are.
    lines: usize,
    ends: [usize; 2],
    /// No LF between the last complete line and here.
    scanned: usize,
}

impl Decoder {
    /// A decoder at the start of a stream, for values of at most `value_bytes_max` bytes.
    #[must_use]
    pub const fn new(value_bytes_max: usize) -> Self {
        Self {
            value_bytes_max,
            numbered: false,
            draining: false,
            lines: 0,
            ends: [0; 2],
            scanned: 0,
        }
    }

    /// Sets whether requests carry numbers, from the next frame on.
    pub const fn set_numbered(&mut self, numbered: bool) {
        self.numbered = numbered;
        // What was already looked at was judged by the other rule.
        self.start_frame();
    }

    /// Whether the decoder is inside a line that is too long.
    #[must_use]
    pub const fn is_draining(&self) -> bool {
        self.draining
    }

    /// How many lines of the frame in progress are complete, 0 to 2.
    #[must_use]
    pub const fn lines_complete(&self) -> usize {
        self.lines
    }

    /// Looks for a request at the start of `input`, which holds all bytes not used so far.
    ///
    /// Empty input is always [`Decoded::Incomplete`].
    pub fn decode<'a>(&mut self, input: &'a [u8]) -> Decoded<'a> {
        if self.draining {
            return self.drain(input);
        }
        if input.len() < self.scanned {
            // Not the input we know. Reading it anew beats reading past its end.
            self.start_frame();
        }
        loop {
            let start = match self.lines {
                0 => 0,
                lines => self.ends[lines - 1] + 1,
            };
            let found = memchr(b'\n', &input[self.scanned..]);
            let end = found.map_or(input.len(), |found| self.scanned + found);
            if self.is_too_long(input, end - start) {
                self.start_frame();
                return self.drain_from(input, found.map(|_| end));
            }
            if found.is_none() {
                self.scanned = end;
                return Decoded::Incomplete;
            }
            if self.lines == self.ends.len() {
                let frame = self.frame(input, &input[start..end]);
                self.start_frame();
                return Decoded::Frame { frame, used: end + 1 };
            }
            self.ends[self.lines] = end;
            self.lines += 1;
            self.scanned = end + 1;
        }
    }

    fn drain<'a>(&mut self, input: &[u8]) -> Decoded<'a> {
        if input.is_empty() {
            // Nothing to drop: a caller that loops until it has to wait for input must come to wait.
            return Decoded::Incomplete;
        }
        self.drain_from(input, memchr(b'\n', input))
    }

    const fn drain_from<'a>(&mut self, input: &[u8], end: Option<usize>) -> Decoded<'a> {
        match end {
            Some(end) => {
                self.draining = false;
                Decoded::TooLong { used: end + 1, done: true }
            }
            None => {
                self.draining = true;
                Decoded::TooLong { used: input.len(), done: false }
            }
        }
    }

    /// Whether the current line is over its limit with `bytes` bytes.
    fn is_too_long(&self, input: &[u8], bytes: usize) -> bool {
        // No limit is lower, so the usual line costs no look at its command.
        if bytes <= SHORT_BYTES_MAX {
            return false;
        }
        match self.lines {
            0 => !self.numbered || bytes > SHORT_BYTES_MAX + NUMBER_BYTES_MAX,
            1 => true,
            _ => {
                let (_, command) = self.command(input);
                let limit = Op::parse(command).map_or(ArgLimit::Short, |op| op.spec().arg_limit);
                bytes > limit.bytes_max(self.value_bytes_max)
            }
        }
    }

    fn frame<'a>(&self, input: &'a [u8], arg: &'a [u8]) -> Frame<'a> {
        let (number, command) = self.command(input);
        let key = trim_cr(&input[self.ends[0] + 1..self.ends[1]]);
        Frame { number, command, key, arg: trim_cr(arg) }
    }

    /// The number and the name on the first line.
    fn command<'a>(&self, input: &'a [u8]) -> (Option<u64>, &'a [u8]) {
        let line = trim_cr(&input[..self.ends[0]]);
        if !self.numbered {
            return (None, line);
        }
        split_number(line).map_or((None, line), |(number, command)| (Some(number), command))
    }

    const fn start_frame(&mut self) {
        self.lines = 0;
        self.scanned = 0;
    }
}

/// Splits `<n> ` off the start of a line: a request or an answer of a numbered connection.
///
/// `None` if there is no well-formed number, as on every push line.
#[must_use]
pub fn split_number(line: &[u8]) -> Option<(u64, &[u8])> {
    let space = memchr(b' ', line)?;
    Some((parse_number(&line[..space])?, &line[space + 1..]))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const VALUE_BYTES_MAX: usize = 1_000;

    /// What became of a stream: frames as text, and the lengths of lines that were too long.
    fn decode_all(chunks: &[&[u8]], numbered: bool) -> Vec<String> {
        let mut decoder = Decoder::new(VALUE_BYTES_MAX);
        decoder.set_numbered(numbered);
        let mut found = Vec::new();
        let mut input = Vec::new();
        let mut dropped = 0;
        for chunk in chunks {
            input.extend_from_slice(chunk);
            loop {
                match decoder.decode(&input) {
                    Decoded::Frame { frame: Frame { number, command, key, arg }, used } => {
                        let [command, key, arg] = [command, key, arg].map(<[u8]>::escape_ascii);
                        let number = number.map_or(String::new(), |number| format!("{number}#"));
                        found.push(format!("{number}{command}|{key}|{arg}"));
                        input.drain(..used);
                    }
                    Decoded::TooLong { used, done } => {
                        dropped += used;
                        if done {
                            found.push(format!("too long: {dropped}"));
                            dropped = 0;
                        }
                        input.drain(..used);
                    }
                    Decoded::Incomplete => break,
                }
            }
        }
        found
    }

    fn check(input: &[u8], expected: &[&str]) {
        assert_eq!(decode_all(&[input], false), expected);
        let bytes: Vec<&[u8]> = input.chunks(1).collect();
        assert_eq!(decode_all(&bytes, false), expected, "byte by byte");
    }

    fn check_numbered(input: &[u8], expected: &[&str]) {
        assert_eq!(decode_all(&[input], true), expected);
        let bytes: Vec<&[u8]> = input.chunks(1).collect();
        assert_eq!(decode_all(&bytes, true), expected, "byte by byte");
    }

    #[test]
    fn frames() {
        check(b"", &[]);
        check(b"l\nk\n0\n", &["l|k|0"]);
        check(b"l\nk\n0", &[]);
        check(b"\n\n\n", &["||"]);
        check(b"l\nk\n0\nr\nk\nT\npi", &["l|k|0", "r|k|T"]);
        check(b"l\r\nk\r\r\n0\r\n", &["l|k|0"]);
        check(b"kset\nk\na\rb\r\n", &["kset|k|a\\rb"]);
        check(b"\xff\n\0\n\x01\n", &["\\xff|\\x00|\\x01"]);
    }

    /// A frame whose line `line` has `bytes` bytes.
    fn with_long_line(command: &[u8], line: usize, bytes: usize) -> Vec<u8> {
        let mut lines = [command.to_vec(), b"k".to_vec(), b"0".to_vec()];
        lines[line].resize(bytes, b'x');
        let mut input = lines.join(&b'\n');
        input.push(b'\n');
        input
    }

    /// Lines of `bytes_max` bytes pass, of one more do not, and what follows is found again.
    fn check_limit(command: &[u8], line: usize, bytes_max: usize) {
        let mut input = with_long_line(command, line, bytes_max);
        input.extend_from_slice(b"ping\n_\n\n");
        let found = decode_all(&[&input], false);
        assert_eq!(found.len(), 2, "{:?} {line} {bytes_max}", Shown(command));
        assert_eq!(found[1], "ping|_|");

        for chunk in [1, 7, 100_000_000] {
            let mut input = with_long_line(command, line, bytes_max + 1);
            let lines_before: usize =
                input.split_inclusive(|byte| *byte == b'\n').take(line).map(<[u8]>::len).sum();
            let end = lines_before + bytes_max + 2;
            input.truncate(end);
            input.extend_from_slice(b"ping\n_\n\n");
            let chunks: Vec<&[u8]> = input.chunks(chunk).collect();
            assert_eq!(
                decode_all(&chunks, false),
                [format!("too long: {end}"), "ping|_|".into()],
                "{:?} {line} {bytes_max}",
                Shown(command)
            );
        }
    }

    #[test]
    fn limits() {
        check_limit(b"l", 0, 256);
        check_limit(b"l", 1, 256);
        check_limit(b"l", 2, 256);
        check_limit(b"zz", 2, 256);
        check_limit(b"hello", 2, 256);
        check_limit(b"auth", 2, 65_536);
        check_limit(b"signal", 2, 65_536);
        check_limit(b"signal\r", 2, 65_536);
        check_limit(b"force-release", 2, 65_536);
        check_limit(b"lpush", 2, VALUE_BYTES_MAX);
        check_limit(b"rpush", 2, VALUE_BYTES_MAX);
        check_limit(b"kset", 2, VALUE_BYTES_MAX + 21);
        check_limit(b"kcas", 2, 2 * VALUE_BYTES_MAX + 22);
    }

    #[test]
    fn a_cr_counts() {
        let mut input = b"l\n".to_vec();
        input.extend_from_slice(&[b'x'; 256]);
        input.extend_from_slice(b"\r\n");
        check(&input, &["too long: 260"]);
    }

    #[test]
    fn a_long_line_is_refused_before_its_end() {
        let mut decoder = Decoder::new(VALUE_BYTES_MAX);
        assert_eq!(decoder.decode(&[b'x'; 256]), Decoded::Incomplete);
        assert_eq!(decoder.decode(&[b'x'; 257]), Decoded::TooLong { used: 257, done: false });
        assert_eq!(decoder.decode(b""), Decoded::Incomplete);
        assert_eq!(decoder.decode(b"xx"), Decoded::TooLong { used: 2, done: false });
        assert_eq!(decoder.decode(b"x\nping"), Decoded::TooLong { used: 2, done: true });
        assert_eq!(decoder.decode(b"ping"), Decoded::Incomplete);
    }

    #[test]
    fn numbered_frames() {
        check_numbered(b"7 l\nk\n0\n8 ping\n_\n\n", &["7#l|k|0", "8#ping|_|"]);
        check_numbered(b"9223372036854775807 l\r\nk\n0\n", &["9223372036854775807#l|k|0"]);
        check_numbered(b"1 \nk\n0\n", &["1#|k|0"]);
        for malformed in ["l", "0 l", "-1 l", "+1 l", "x l", " l", "1", "9223372036854775808 l"] {
            let input = format!("{malformed}\nk\n0\n");
            check_numbered(input.as_bytes(), &[&format!("{malformed}|k|0")]);
        }
    }

    #[test]
    fn numbered_limits() {
        let line = format!("{} {}\nk\n0\n", "1".repeat(19), "x".repeat(257));
        assert!(decode_all(&[line.as_bytes()], true)[0].starts_with("1111111111111111111#x"));
        let line = format!("{} {}\n", "1".repeat(19), "x".repeat(258));
        check_numbered(line.as_bytes(), &["too long: 279"]);
        let line = format!("5 rpush\nk\n{}\n", "x".repeat(VALUE_BYTES_MAX));
        assert!(decode_all(&[line.as_bytes()], true)[0].starts_with("5#rpush|k|xxx"));
    }

    #[test]
    fn numbers_start_with_the_next_frame() {
        let mut decoder = Decoder::new(VALUE_BYTES_MAX);
        let input = b"hello\nme\nmux\n1 ping\n_\n\n";
        let Decoded::Frame { used, .. } = decoder.decode(input) else { panic!("no frame") };
        decoder.set_numbered(true);
        let Decoded::Frame { frame, .. } = decoder.decode(&input[used..]) else {
            panic!("no frame")
        };
        assert_eq!((frame.number, frame.command), (Some(1), &b"ping"[..]));
    }

    #[test]
    fn lines_complete() {
        let mut decoder = Decoder::new(VALUE_BYTES_MAX);
        let input = b"l\nk\n0\n";
        let mut seen = Vec::new();
        for end in 0..=input.len() {
            decoder.decode(&input[..end]);
            seen.push(decoder.lines_complete());
        }
        assert_eq!(seen, [0, 0, 1, 1, 2, 2, 0]);
    }

    #[test]
    fn shorter_input_than_before_is_read_anew() {
        let mut decoder = Decoder::new(VALUE_BYTES_MAX);
        assert_eq!(decoder.decode(b"l\nk\n00000"), Decoded::Incomplete);
        assert!(matches!(decoder.decode(b"\n\n\n"), Decoded::Frame { used: 3, .. }));
    }

    #[test]
    fn debug_output_hides_the_argument() {
        let frame = Frame { number: None, command: b"auth", key: b"_", arg: b"secret" };
        assert!(!format!("{frame:?}").contains("secret"));
    }

    /// Mostly what a client sends, with ends of lines and long runs where they hurt.
    fn stream() -> impl Strategy<Value = Vec<u8>> {
        let piece = prop_oneof![
            Just(b"\n".to_vec()),
            Just(b"\r\n".to_vec()),
            Just(b"l\nk\n0\n".to_vec()),
            Just(b"12 rpush\nk\n".to_vec()),
            Just(b"kcas\nk\n".to_vec()),
            (200_usize..2_100).prop_map(|bytes| vec![b'x'; bytes]),
            proptest::collection::vec(any::<u8>(), 0..20),
        ];
        proptest::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat())
    }

    proptest! {
        #[test]
        fn chunks_do_not_matter(
            input in stream(),
            cuts in proptest::collection::vec(1_usize..600, 1..20),
            numbered: bool,
        ) {
            let mut chunks = Vec::new();
            let mut rest = &input[..];
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (chunk, behind) = rest.split_at((*cut).min(rest.len()));
                chunks.push(chunk);
                rest = behind;
            }
            prop_assert_eq!(decode_all(&chunks, numbered), decode_all(&[&input], numbered));
        }

        #[test]
        fn random_bytes_never_panic(
            inputs in proptest::collection::vec(
                proptest::collection::vec(any::<u8>(), 0..400), 0..10),
            numbered: bool,
        ) {
            // Unrelated inputs instead of a growing one: a caller that breaks the contract.
            let mut decoder = Decoder::new(VALUE_BYTES_MAX);
            decoder.set_numbered(numbered);
            for input in &inputs {
                decoder.decode(input);
            }
        }
    }
}
