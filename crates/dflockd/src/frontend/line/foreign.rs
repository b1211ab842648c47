//! Clients that speak HTTP or TLS to the port of the line protocol, recognised by their first bytes.
//!
//! Every web page that somebody visits can make the browser send an HTTP request to any port of that machine, with a
//! body that the page chooses. The lines of that body must never be executed as requests, so such a connection gets one
//! answer in its own protocol and is closed. The same answer helps whoever has mixed up the ports.
//!
//! No request of the line protocol can be taken for one of these: its first line is the bare name of a command, without
//! a space, and no name begins with a control character.

use std::sync::atomic::{AtomicU64, Ordering};

/// A protocol that is not spoken here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Foreign {
    Http,
    Tls,
}

/// What the first bytes of a connection are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The line protocol, or nothing that is known.
    Lines,
    Foreign(Foreign),
}

/// Reads the first line of a connection that is not empty, up to where it can be told what it is.
#[derive(Debug, Default)]
pub(crate) struct FirstLine {
    state: State,
    /// The beginning of the first word.
    word: [u8; METHOD_BYTES_MAX],
    /// How long that word is so far.
    length: u8,
}

#[derive(Clone, Copy, Debug, Default)]
enum State {
    /// Only ends of lines so far, which HTTP allows before a request.
    #[default]
    Blank,
    /// The first byte of a TLS record of a handshake.
    Record,
    /// The first word.
    Word,
    /// Behind a word that could be a method, and a space.
    Target,
    /// Within the rest of that line, and how much of `HTTP/` has just passed.
    Rest(u8),
}

/// The methods that are known; their names as they stand on the wire. `PRI` begins HTTP/2.
const METHODS: [&[u8]; 10] = [
    b"GET", b"HEAD", b"POST", b"PUT", b"DELETE", b"CONNECT", b"OPTIONS", b"TRACE", b"PATCH", b"PRI",
];
/// The longest of them.
const METHOD_BYTES_MAX: usize = 7;
/// The longest word that is still taken for a method, if it is an unknown one.
const WORD_BYTES_MAX: u8 = 64;

const VERSION: &[u8] = b"HTTP/";
const HANDSHAKE: u8 = 0x16;
const TLS_MAJOR: u8 = 0x03;

impl FirstLine {
    /// Reads on. The verdict is there at the end of the line at the latest, so before its request can be executed.
    pub(crate) fn read(&mut self, bytes: &[u8]) -> Option<Verdict> {
        bytes.iter().find_map(|&byte| self.step(byte))
    }

    fn step(&mut self, byte: u8) -> Option<Verdict> {
        let http = Some(Verdict::Foreign(Foreign::Http));
        self.state = match (self.state, byte) {
            (State::Blank, b'\r' | b'\n') => State::Blank,
            (State::Blank, HANDSHAKE) => State::Record,
            (State::Record, TLS_MAJOR) => return Some(Verdict::Foreign(Foreign::Tls)),
            (State::Word, b' ') if self.is_known_method() => return http,
            (State::Word, b' ') => State::Target,
            (State::Target, b'/') => return http,
            (State::Blank, _) if byte.is_ascii_alphabetic() => self.push(byte),
            (State::Word, _) if is_token(byte) && self.length < WORD_BYTES_MAX => self.push(byte),
            (State::Target, b'\n') | (State::Rest(_), b'\n') => return Some(Verdict::Lines),
            (State::Target, _) => follow(0, byte),
            (State::Rest(passed), _) => follow(passed, byte),
            (State::Blank | State::Record | State::Word, _) => return Some(Verdict::Lines),
        };
        matches!(self.state, State::Rest(passed) if usize::from(passed) == VERSION.len())
            .then_some(Verdict::Foreign(Foreign::Http))
    }

    fn push(&mut self, byte: u8) -> State {
        if let Some(place) = self.word.get_mut(usize::from(self.length)) {
            *place = byte;
        }
        self.length += 1;
        State::Word
    }

    fn is_known_method(&self) -> bool {
        let word = self.word.get(..usize::from(self.length));
        word.is_some_and(|word| METHODS.contains(&word))
    }
}

/// One more byte in the search for `HTTP/`.
fn follow(passed: u8, byte: u8) -> State {
    let wanted = VERSION.get(usize::from(passed));
    State::Rest(if wanted == Some(&byte) { passed + 1 } else { u8::from(byte == VERSION[0]) })
}

/// Whether a byte may be part of a method.
fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

/// What an HTTP client is told. The body's length is checked by a test.
const HTTP_HINT: &[u8] = b"HTTP/1.1 400 Bad Request\r\n\
    Content-Type: text/plain; charset=utf-8\r\n\
    Content-Length: 124\r\n\
    Cache-Control: no-store\r\n\
    X-Content-Type-Options: nosniff\r\n\
    Connection: close\r\n\
    \r\n\
    This is the port of dflockd's line protocol, not of HTTP. \
    HTTP is served on the port set with --http-port, if there is one.\n";

/// A fatal alert, `protocol_version`.
const TLS_HINT: &[u8] = &[0x15, 0x03, 0x03, 0, 2, 2, 70];

impl Foreign {
    /// All of them.
    pub(crate) const ALL: [Self; 2] = [Self::Http, Self::Tls];

    /// Its name in metrics and in the log.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Http => "http",
            Self::Tls => "tls",
        }
    }

    /// The one answer that its clients get.
    pub(crate) const fn hint(self) -> &'static [u8] {
        match self {
            Self::Http => HTTP_HINT,
            Self::Tls => TLS_HINT,
        }
    }
}

/// How many clients of other protocols there were.
#[derive(Debug, Default)]
pub(crate) struct ForeignCounts {
    by_protocol: [AtomicU64; Foreign::ALL.len()],
}

impl ForeignCounts {
    pub(crate) fn add(&self, protocol: Foreign) {
        self.by_protocol[protocol as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// How many there were.
    pub(crate) fn count(&self, protocol: Foreign) -> u64 {
        self.by_protocol[protocol as usize].load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use dflockd_wire::OPS;

    use super::*;

    /// The verdict on these bytes, which must not depend on how they arrive.
    #[track_caller]
    fn verdict(bytes: &[u8]) -> Option<Verdict> {
        let whole = FirstLine::default().read(bytes);
        for split in 0..=bytes.len() {
            let mut first = FirstLine::default();
            let (a, b) = bytes.split_at(split);
            let found = first.read(a).or_else(|| first.read(b));
            assert_eq!(found, whole, "{:?} split at {split}", bytes.escape_ascii().to_string());
        }
        let mut first = FirstLine::default();
        let single = bytes.chunks(1).find_map(|byte| first.read(byte));
        assert_eq!(single, whole, "{:?} byte by byte", bytes.escape_ascii().to_string());
        whole
    }

    #[test]
    fn http_is_recognised() {
        let long = format!("POST /{} HTTP/1.1\r\n", "x".repeat(1 << 16));
        for first in [
            "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            "POST /x HTTP/1.1\r\n\r\nkset\nk\nv\n",
            "HEAD / HTTP/1.0\n",
            "PUT http://127.0.0.1:6388/ HTTP/1.1\r\n",
            "DELETE /",
            "CONNECT evil.example:443 HTTP/1.1\r\n",
            "OPTIONS * HTTP/1.1\r\n",
            "TRACE / HTTP/1.1\r\n",
            "PATCH / HTTP/1.1\r\n",
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            // HTTP/0.9.
            "GET /\r\n",
            "GET ",
            // Methods that a page may make up, in any case.
            "BREW /pot HTTP/1.1\r\n",
            "kset / HTTP/1.1\r\n",
            "get /k HTTP/1.1\r\n",
            "x-y!z /",
            "BREW http://x/ HTTP/1.1\r\n",
            "BREW * HHTTP/1.1\r\n",
            // Empty lines first.
            "\r\nGET / HTTP/1.1\r\n",
            "\n\n\n\n\r\n\nPOST / HTTP/1.1\r\n",
            &long,
        ] {
            let found = verdict(first.as_bytes());
            assert_eq!(found, Some(Verdict::Foreign(Foreign::Http)), "{first:.60}");
        }
    }

    #[test]
    fn tls_is_recognised() {
        for first in [&b"\x16\x03\x01\x02\x00\x01\x00"[..], b"\x16\x03\x03", b"\r\n\x16\x03\x01"] {
            assert_eq!(verdict(first), Some(Verdict::Foreign(Foreign::Tls)));
        }
        assert_eq!(verdict(b"\x16"), None);
        assert_eq!(verdict(b"\x16\n"), Some(Verdict::Lines));
    }

    #[test]
    fn no_command_is_taken_for_another_protocol() {
        for spec in OPS {
            assert!(!spec.name.contains(' '), "{}: see the head of this file", spec.name);
            for end in ["\n", "\r\n", "\r\r\n"] {
                let first = format!("{}{end}/ HTTP/1.1\nGET / HTTP/1.1\n", spec.name);
                assert_eq!(verdict(first.as_bytes()), Some(Verdict::Lines), "{}", spec.name);
                let first = format!("\n\n\n{first}");
                assert_eq!(verdict(first.as_bytes()), Some(Verdict::Lines), "{}", spec.name);
            }
        }
    }

    #[test]
    fn what_is_wrong_in_lines_stays_so() {
        for first in [
            "zz\nk\n0\n",
            "GET\n/ HTTP/1.1\n\n",
            "l \nk\n0\n",
            "1 ping\n_\n\n",
            "GETS you nowhere\n",
            " GET / HTTP/1.1\n",
            "\tGET / HTTP/1.1\n",
            "HTTP/1.1\n",
            "\0\n",
            "\u{e4} /\n",
        ] {
            assert_eq!(verdict(first.as_bytes()), Some(Verdict::Lines), "{first:?}");
        }
        // A word without an end is none that HTTP has, and is not waited for.
        let word = "x".repeat(usize::from(WORD_BYTES_MAX) + 1);
        assert_eq!(verdict(word.as_bytes()), Some(Verdict::Lines));
        for unfinished in ["", "\r\n\n", "k", "GET", "BREW ", "l x"] {
            assert_eq!(verdict(unfinished.as_bytes()), None, "{unfinished:?}");
        }
    }

    #[test]
    fn the_hints_have_the_form_they_claim() {
        let hint = std::str::from_utf8(HTTP_HINT).unwrap();
        let (head, body) = hint.split_once("\r\n\r\n").unwrap();
        assert!(
            head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())),
            "{}",
            body.len()
        );
        assert!(body.contains("--http-port"));
        assert_eq!(usize::from(TLS_HINT[4]), TLS_HINT.len() - 5);
    }
}
