//! Counts the HTTP/2 frames that a client can send without end and that make the server work for nothing. HTTP/2 itself
//! sets no limit to them, and they need no authentication.
//!
//! HTTP and gRPC pass everything that they read from a connection through [`Frames`].

use std::time::{Duration, Instant};

/// What every connection over HTTP/2 begins with.
pub(crate) const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

const HEAD_BYTES: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const CONTINUATION: u8 = 9;

/// Pings, settings and resets in a second: the server must answer or undo something for each. More than any client
/// needs, too few to keep a core busy.
const ANSWERED_MAX: u32 = 10_000;
/// Other frames that carry no request (window updates, priorities, unknown kinds) in a second.
const IGNORED_MAX: u32 = 20_000;
/// How many of those each request may bring with it besides: busy clients update their window for each answer.
const IGNORED_PER_REQUEST: u32 = 4;
const IN: Duration = Duration::from_secs(1);

/// The frames of one connection.
#[derive(Debug)]
pub(crate) struct Frames {
    phase: Phase,
    answered: Rate,
    ignored: Rate,
}

#[derive(Debug)]
enum Phase {
    /// So many bytes of the preface have come.
    Preface(usize),
    /// It is not HTTP/2.
    Other,
    Frames {
        head: [u8; HEAD_BYTES],
        /// Bytes of the head that are there.
        known: usize,
        /// Bytes of the payload that are to come.
        left: usize,
    },
}

#[derive(Debug, Default)]
struct Rate {
    count: u32,
    since: Option<Instant>,
}

impl Frames {
    /// For a connection from its first byte on; one that does not begin with the preface of HTTP/2 has no frames.
    pub(crate) fn from_the_start() -> Self {
        Self { phase: Phase::Preface(0), answered: Rate::default(), ignored: Rate::default() }
    }

    /// For a connection whose preface has passed.
    pub(crate) fn after_the_preface() -> Self {
        let phase = Phase::Frames { head: [0; HEAD_BYTES], known: 0, left: 0 };
        Self { phase, ..Self::from_the_start() }
    }

    /// Whether these bytes, the next of the connection, are too much.
    pub(crate) fn is_flood(&mut self, bytes: &[u8]) -> bool {
        let bytes = match &mut self.phase {
            Phase::Other => return false,
            Phase::Frames { .. } => bytes,
            Phase::Preface(matched) => {
                let rest = &PREFACE[*matched..];
                let common = rest.len().min(bytes.len());
                if rest[..common] != bytes[..common] {
                    self.phase = Phase::Other;
                    return false;
                }
                *matched += common;
                if *matched < PREFACE.len() {
                    return false;
                }
                self.phase = Phase::Frames { head: [0; HEAD_BYTES], known: 0, left: 0 };
                &bytes[common..]
            }
        };
        self.count(bytes)
    }

    fn count(&mut self, mut bytes: &[u8]) -> bool {
        let Phase::Frames { head, known, left } = &mut self.phase else { return false };
        while !bytes.is_empty() {
            let skipped = (*left).min(bytes.len());
            *left -= skipped;
            bytes = &bytes[skipped..];
            let taken = (HEAD_BYTES - *known).min(bytes.len());
            head[*known..*known + taken].copy_from_slice(&bytes[..taken]);
            *known += taken;
            bytes = &bytes[taken..];
            if *known < HEAD_BYTES {
                return false;
            }
            *known = 0;
            let [a, b, c, kind, ..] = *head;
            *left = usize::from(a) << 16 | usize::from(b) << 8 | usize::from(c);
            let is_flood = match kind {
                HEADERS => {
                    self.ignored.count = self.ignored.count.saturating_sub(IGNORED_PER_REQUEST);
                    false
                }
                // The library bounds both.
                DATA | CONTINUATION => false,
                PING | SETTINGS | RST_STREAM => self.answered.add(ANSWERED_MAX),
                _ => self.ignored.add(IGNORED_MAX),
            };
            if is_flood {
                return true;
            }
        }
        false
    }
}

impl Rate {
    /// One more; true if the last `max` of them came in too short a time. The clock is read once for all of those.
    fn add(&mut self, max: u32) -> bool {
        self.count += 1;
        if self.count <= max {
            return false;
        }
        let now = Instant::now();
        let is_flood = self.since.is_some_and(|since| now.duration_since(since) < IN);
        self.since = Some(now);
        self.count = 0;
        is_flood
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW_UPDATE: u8 = 8;
    const PRIORITY: u8 = 2;

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let mut frame = vec![0, 0, u8::try_from(payload).unwrap(), kind, 0, 0, 0, 0, 0];
        frame.resize(HEAD_BYTES + payload, 1);
        frame
    }

    /// Whether bytes that arrive in pieces of this size are too much.
    fn floods(frames: &mut Frames, bytes: &[u8], piece: usize) -> bool {
        bytes.chunks(piece).any(|bytes| frames.is_flood(bytes))
    }

    /// GUARANTEES 48: what a stranger makes the server do for nothing has a bound.
    #[test]
    fn floods_are_noticed_however_they_arrive() {
        let kinds = [(PING, 8), (SETTINGS, 0), (RST_STREAM, 4), (PRIORITY, 5), (WINDOW_UPDATE, 4)];
        for (kind, payload) in kinds.into_iter().chain([(99, 0)]) {
            let one = frame(kind, payload);
            let flood = one.repeat(3 * IGNORED_MAX as usize);
            // Looks like the same, but is the payload of another frame.
            let data = [&frame(DATA, 0)[..], &one, &one].concat();
            let data =
                [&[0, 0, u8::try_from(data.len() - HEAD_BYTES).unwrap()], &data[3..]].concat();
            let data = data.repeat(3 * IGNORED_MAX as usize);
            for piece in [1, 7, 17, 4096] {
                let mut frames = Frames::after_the_preface();
                assert!(!floods(&mut frames, &data, piece), "kind {kind} in pieces of {piece}");
                assert!(floods(&mut frames, &flood, piece), "kind {kind} in pieces of {piece}");
                let mut frames = Frames::from_the_start();
                assert!(!floods(&mut frames, PREFACE, piece));
                assert!(floods(&mut frames, &flood, piece), "behind the preface");
            }
        }
    }

    #[test]
    fn what_is_no_http_2_has_no_frames() {
        let pings = frame(PING, 8).repeat(3 * ANSWERED_MAX as usize);
        for start in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"PRI * HTTP/1.1\r\n\r\n", b"\0"] {
            let mut frames = Frames::from_the_start();
            assert!(!floods(&mut frames, &[start, &pings].concat(), 3));
        }
    }

    /// A client that asks as fast as it can updates its window for each answer.
    #[test]
    fn busy_clients_are_no_flood() {
        let updates = frame(WINDOW_UPDATE, 4).repeat(IGNORED_PER_REQUEST as usize);
        let call = [frame(HEADERS, 30), frame(DATA, 50), updates].concat();
        let calls = call.repeat(IGNORED_MAX as usize);
        assert!(!floods(&mut Frames::after_the_preface(), &calls, 4096));
    }
}
