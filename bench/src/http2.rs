//! Calls of gRPC as a load generator makes them: frames of HTTP/2 written by hand, without a task or an allocation in
//! between, and answers read no further than needed. Headers are those of a usual client; each stands in the table of
//! the connection after its first use.
//!
//! One call at a time on a connection: answers are not told apart by their stream. Knows nothing of what is called;
//! that is the business of the protocols.

use std::cell::Cell;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::protocol::concat;

/// What a connection begins with.
pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
/// In front of a message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// The first place of the table that a connection fills itself.
const DYNAMIC: u8 = 62;
/// Pings of a connection are answered this often. A server that measures the way to its client by pings sends one with
/// every call if each is answered at once, which would cost it and us more than the call's own frames do.
const PING_PAUSE: Duration = Duration::from_secs(1);
/// Methods of one service that one connection calls.
const METHODS_MAX: usize = 4;

/// The headers that all calls share: the place of the name in the fixed table, or the name; and the value.
const COMMON: [(u8, &str, &str); 3] =
    [(1, "", "bench"), (31, "", "application/grpc"), (0, "te", "trailers")];

/// A method that is called.
#[derive(Debug, Clone, Copy)]
pub struct Method {
    /// Distinguishes those of one connection, from 0.
    pub place: usize,
    /// Service and name.
    pub path: &'static str,
}

/// The calling side of one connection.
#[derive(Debug, Default)]
pub struct Calls {
    /// The stream of the last call; 0 before the first.
    stream: Cell<u32>,
    /// How many headers have been put into the table.
    entered: Cell<u8>,
    /// By method: how many were there before its path.
    paths: [Cell<Option<u8>>; METHODS_MAX],
    /// By common header: how many were there before it.
    common: [Cell<Option<u8>>; COMMON.len()],
    /// The last ping that is not answered yet.
    ping: Cell<Option<[u8; 8]>>,
    /// When one was answered last.
    ping_answered_at: Cell<Option<Instant>>,
}

impl Calls {
    /// Appends a call; `fill` appends its message.
    pub fn write(&self, out: &mut Vec<u8>, method: Method, fill: impl FnOnce(&mut Vec<u8>)) {
        let stream = match self.stream.get() {
            0 => {
                out.extend_from_slice(PREFACE);
                frame_head(out, SETTINGS, 0, 0);
                // Answers are small, but nobody says that they were taken.
                let start = frame_head(out, WINDOW_UPDATE, 0, 0);
                out.extend_from_slice(&0x7fff_0000_u32.to_be_bytes());
                end_frame(out, start);
                1
            }
            last => last + 2,
        };
        self.stream.set(stream);

        let start = frame_head(out, HEADERS, END_HEADERS, stream);
        // POST, http.
        out.extend_from_slice(&[0x83, 0x86]);
        self.header(out, &self.paths[method.place], (4, "", method.path));
        for (known, header) in self.common.iter().zip(COMMON) {
            self.header(out, known, header);
        }
        end_frame(out, start);

        let start = frame_head(out, DATA, END_STREAM, stream);
        out.extend_from_slice(&[0; PREFIX]);
        let message = out.len();
        fill(out);
        let length = u32::try_from(out.len() - message).unwrap_or(u32::MAX);
        out[message - 4..message].copy_from_slice(&length.to_be_bytes());
        end_frame(out, start);
    }

    /// By its place in the table, or in full and with a place from now on.
    fn header(&self, out: &mut Vec<u8>, known: &Cell<Option<u8>>, header: (u8, &str, &str)) {
        let entered = self.entered.get();
        if let Some(before) = known.get() {
            // The last one to come is the first of the table.
            out.push(0x80 | (DYNAMIC + entered - 1 - before));
            return;
        }
        let (place, name, value) = header;
        out.push(0x40 | place);
        for text in [name, value].into_iter().filter(|text| !text.is_empty()) {
            out.push(u8::try_from(text.len()).unwrap_or(0));
            out.extend_from_slice(text.as_bytes());
        }
        known.set(Some(entered));
        self.entered.set(entered + 1);
    }

    /// Calls and waits, before the load begins: the whole answer.
    pub fn call(
        &self,
        stream: &mut TcpStream,
        method: Method,
        fill: impl FnOnce(&mut Vec<u8>),
    ) -> io::Result<Vec<u8>> {
        let mut out = Vec::new();
        self.write(&mut out, method, fill);
        stream.write_all(&out)?;
        let mut answer = Vec::new();
        while frame(&answer).is_none() {
            let start = answer.len();
            answer.resize(start + HEAD, 0);
            stream.read_exact(&mut answer[start..])?;
            let body = answer.len();
            answer.resize(body + payload_length(&answer[start..]), 0);
            stream.read_exact(&mut answer[body..])?;
        }
        out.clear();
        self.reply(&answer, &mut out, Instant::now());
        stream.write_all(&out)?;
        Ok(answer)
    }

    /// Appends what the server expects to hear about the connection: that its settings are known, that we are there.
    pub fn reply(&self, answer: &[u8], out: &mut Vec<u8>, now: Instant) {
        let mut rest = answer;
        while let Some((kind, flags, payload, behind)) = split(rest) {
            rest = behind;
            match kind {
                SETTINGS if flags & ACK == 0 => {
                    frame_head(out, SETTINGS, ACK, 0);
                }
                PING if flags & ACK == 0 => self.ping.set(payload.try_into().ok()),
                _ => {}
            }
        }
        let Some(ping) = self.ping.get() else { return };
        if self.ping_answered_at.get().is_none_or(|last| now >= last + PING_PAUSE) {
            self.ping.set(None);
            self.ping_answered_at.set(Some(now));
            let start = frame_head(out, PING, ACK, 0);
            out.extend_from_slice(&ping);
            end_frame(out, start);
        }
    }
}

/// Begins a frame and returns where.
fn frame_head(out: &mut Vec<u8>, kind: u8, flags: u8, stream: u32) -> usize {
    let start = out.len();
    concat(out, &[&[0, 0, 0, kind, flags], &stream.to_be_bytes()]);
    start
}

/// Writes the length of what was appended since into the frame that begins at `start`.
fn end_frame(out: &mut [u8], start: usize) {
    let length = u32::try_from(out.len() - start - HEAD).unwrap_or(u32::MAX).to_be_bytes();
    out[start..start + 3].copy_from_slice(&length[1..]);
}

fn payload_length(head: &[u8]) -> usize {
    usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2])
}

/// The first frame: its kind, its flags, its payload, and what is behind it.
fn split(input: &[u8]) -> Option<(u8, u8, &[u8], &[u8])> {
    let (head, rest) = input.split_at_checked(HEAD)?;
    let (payload, rest) = rest.split_at_checked(payload_length(head))?;
    Some((head[3], head[4], payload, rest))
}

/// The length of the first whole answer, with what the server says about the connection in front of it.
pub fn frame(input: &[u8]) -> Option<usize> {
    let mut rest = input;
    loop {
        let (kind, flags, _, behind) = split(rest)?;
        rest = behind;
        let ends = matches!(kind, DATA | HEADERS) && flags & END_STREAM != 0;
        if ends || matches!(kind, RST_STREAM | GOAWAY) {
            return Some(input.len() - rest.len());
        }
    }
}

/// The message of an answer, without its prefix; a refusal has none.
pub fn message(answer: &[u8]) -> Option<&[u8]> {
    let mut rest = answer;
    while let Some((kind, _, payload, behind)) = split(rest) {
        if kind == DATA {
            return payload.get(PREFIX..);
        }
        rest = behind;
    }
    None
}

/// An answer as a server would give it.
#[cfg(test)]
pub(crate) fn answer(message: Option<&[u8]>) -> Vec<u8> {
    let mut out = Vec::new();
    frame_head(&mut out, SETTINGS, 0, 0);
    if let Some(message) = message {
        let start = frame_head(&mut out, HEADERS, END_HEADERS, 1);
        out.extend([0x88, 0xc0]);
        end_frame(&mut out, start);
        let start = frame_head(&mut out, DATA, 0, 1);
        out.extend([0, 0, 0, 0, u8::try_from(message.len()).unwrap()]);
        out.extend_from_slice(message);
        end_frame(&mut out, start);
    }
    let start = frame_head(&mut out, HEADERS, END_HEADERS | END_STREAM, 1);
    out.push(0xbf);
    end_frame(&mut out, start);
    out
}

/// The message of a call that was written behind what a connection begins with.
#[cfg(test)]
pub(crate) fn called(out: &[u8]) -> Option<&[u8]> {
    message(out.strip_prefix(PREFACE).unwrap_or(out))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Method = Method { place: 0, path: "/a/One" };
    const TWO: Method = Method { place: 1, path: "/a/Two" };

    /// The headers of the call in `out`, and its stream.
    fn headers(out: &[u8]) -> (Vec<u8>, u8) {
        let mut rest = out.strip_prefix(PREFACE).unwrap_or(out);
        loop {
            let stream = rest[8];
            let (kind, flags, payload, behind) = split(rest).unwrap();
            if kind == HEADERS {
                assert_eq!(flags, END_HEADERS);
                return (payload.to_vec(), stream);
            }
            rest = behind;
        }
    }

    fn written(calls: &Calls, method: Method) -> (Vec<u8>, u8) {
        let mut out = Vec::new();
        calls.write(&mut out, method, |out| out.extend_from_slice(b"message"));
        assert_eq!(called(&out), Some(&b"message"[..]));
        headers(&out)
    }

    #[test]
    fn headers_are_said_once() {
        let calls = Calls::default();
        let literal =
            b"\x83\x86\x44\x06/a/One\x41\x05bench\x5f\x10application/grpc\x40\x02te\x08trailers";
        assert_eq!(written(&calls, ONE), (literal.to_vec(), 1));
        // te, the type, the authority, the path: the last one to come has the first place, 62.
        assert_eq!(written(&calls, ONE), (vec![0x83, 0x86, 0xc1, 0xc0, 0xbf, 0xbe], 3));
        // A new path moves all others by one, in its own call as well.
        assert_eq!(written(&calls, TWO), (b"\x83\x86\x44\x06/a/Two\xc1\xc0\xbf".to_vec(), 5));
        assert_eq!(written(&calls, TWO), (vec![0x83, 0x86, 0xbe, 0xc1, 0xc0, 0xbf], 7));
        assert_eq!(written(&calls, ONE), (vec![0x83, 0x86, 0xc2, 0xc1, 0xc0, 0xbf], 9));
    }

    #[test]
    fn answers_are_found() {
        let whole = answer(Some(b"text"));
        for end in 0..whole.len() {
            assert_eq!(frame(&whole[..end]), None, "{end}");
        }
        let length = whole.len();
        assert_eq!(frame(&[&whole[..], &[0]].concat()), Some(length));
        assert_eq!(message(&whole), Some(&b"text"[..]));
        let refused = answer(None);
        assert_eq!((frame(&refused), message(&refused)), (Some(refused.len()), None));
    }

    fn replied(calls: &Calls, said: &[u8], now: Instant) -> Vec<(u8, u8, Vec<u8>)> {
        let mut out = Vec::new();
        calls.reply(said, &mut out, now);
        let mut frames = Vec::new();
        let mut rest = &out[..];
        while let Some((kind, flags, payload, behind)) = split(rest) {
            frames.push((kind, flags, payload.to_vec()));
            rest = behind;
        }
        assert_eq!(rest, b"");
        frames
    }

    fn ping(number: u8, flags: u8) -> Vec<u8> {
        let mut said = Vec::new();
        let start = frame_head(&mut said, PING, flags, 0);
        said.extend_from_slice(&[number; 8]);
        end_frame(&mut said, start);
        said
    }

    #[test]
    fn settings_and_pings_are_replied_to() {
        let (calls, now) = (Calls::default(), Instant::now());
        let pong = |number: u8| vec![(PING, ACK, vec![number; 8])];
        assert_eq!(replied(&calls, &answer(None), now), [(SETTINGS, ACK, Vec::new())]);
        assert_eq!(replied(&calls, &ping(1, 0), now), pong(1));
        assert_eq!(replied(&calls, &ping(2, 0), now), [], "one was answered just now");
        assert_eq!(replied(&calls, &[], now + PING_PAUSE), pong(2));
        assert_eq!(replied(&calls, &[], now + 3 * PING_PAUSE), [], "it was answered");
        assert_eq!(replied(&calls, &ping(3, ACK), now + 3 * PING_PAUSE), [], "it is an answer");
    }
}
