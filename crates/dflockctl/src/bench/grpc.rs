//! dflockd's gRPC door as a load generator sees it: HTTP/2 frames written from parts that were prepared when the
//! connection was made, and read no further than needed. One session and one connection per client; headers are those
//! of a usual client, in the table of the connection after their first use.
//!
//! A ping of the server is not answered, so a connection lasts for less than a minute.

use std::cell::Cell;
use std::io::{self, Write};
use std::net::TcpStream;

use super::target::{Answer, Proof, Request, Target, concat};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const HEAD: usize = 9;
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const ACK: u8 = 1;
/// A token is as long as that.
const TOKEN_BYTES: usize = 32;

/// The paths, in the order in which they enter the table of headers.
const PATHS: [(Request, &str); 3] = [
    (Request::Acquire, "/dflockd.v1.Locks/Acquire"),
    (Request::Renew, "/dflockd.v1.Locks/Renew"),
    (Request::Release, "/dflockd.v1.Locks/Release"),
];

/// What requests of one connection are made of.
#[derive(Debug, Clone, Default)]
pub(crate) struct Forms {
    /// `session`, as a field.
    session: Vec<u8>,
    /// What follows the key of an acquire.
    acquire_end: Vec<u8>,
    /// What follows the token of a renewal.
    renew_end: Vec<u8>,
    /// The stream of the last request.
    stream: Cell<u32>,
}

impl Forms {
    /// Opens a session and makes the connection's headers known.
    pub(crate) fn greet(stream: &mut TcpStream, wait_ms: u64, lease_s: u64) -> io::Result<Self> {
        let mut out = PREFACE.to_vec();
        frame_head(&mut out, 0, SETTINGS, 0, 0);
        // Answers are small, but nobody says that they were taken.
        frame_head(&mut out, 4, WINDOW_UPDATE, 0, 0);
        out.extend_from_slice(&0x7fff_0000_u32.to_be_bytes());
        let mut block = vec![0x83, 0x86];
        literal(&mut block, &[0x04], "/dflockd.v1.Sessions/Open");
        for (name, value) in [(1, "bench"), (31, "application/grpc"), (0, "trailers")] {
            // With a place in the table: the number of the name, or the name itself.
            block.push(0x40 | name);
            if name == 0 {
                string(&mut block, b"te");
            }
            string(&mut block, value.as_bytes());
        }
        let mut message = Vec::new();
        number(&mut message, 1, lease_s * 1000);
        call(&mut out, 1, &block, &message);
        stream.write_all(&out)?;
        let answer = Target::Grpc.read_answer(stream)?;
        let session = data(&answer).and_then(|message| message.strip_prefix(&[0x0a, 40]));
        let session = session.and_then(|message| message.get(..40));
        let session = session
            .ok_or_else(|| io::Error::other(format!("no session: {}", answer.escape_ascii())))?;
        let mut forms = Self { stream: Cell::new(1), ..Self::default() };
        field(&mut forms.session, 1, session);
        number(&mut forms.acquire_end, 7, wait_ms);
        number(&mut forms.acquire_end, 8, lease_s * 1000);
        number(&mut forms.renew_end, 7, lease_s * 1000);

        out.clear();
        frame_head(&mut out, 0, SETTINGS, ACK, 0);
        stream.write_all(&out)?;
        let key = [b"bench/greet/", session].concat();
        let mut proof = Proof::none();
        for (place, (request, path)) in PATHS.into_iter().enumerate() {
            let mut block = vec![0x83, 0x86, 0x44];
            string(&mut block, path.as_bytes());
            // The three that were added first are behind the paths that were added since, this one included.
            let last = u8::try_from(63 + place).unwrap_or(63);
            block.extend([0x80 | (last + 2), 0x80 | (last + 1), 0x80 | last]);
            out.clear();
            let message = forms.message(request, &key, &proof);
            call(&mut out, forms.next_stream(), &block, &message);
            stream.write_all(&out)?;
            let answer = Target::Grpc.read_answer(stream)?;
            if read(request, &answer, &mut proof) == Answer::Refused {
                return Err(super::load::refused("a greeting", &answer));
            }
        }
        Ok(forms)
    }

    /// Appends a request.
    pub(crate) fn write(&self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &Proof) {
        let place = PATHS.iter().position(|(path, _)| *path == request).unwrap_or(0);
        let path = u8::try_from(64 - place).unwrap_or(64);
        let block = [0x83, 0x86, 0x80 | path, 0x80 | 67, 0x80 | 66, 0x80 | 65];
        call(out, self.next_stream(), &block, &self.message(request, key, proof));
    }

    fn next_stream(&self) -> u32 {
        self.stream.set(self.stream.get() + 2);
        self.stream.get()
    }

    fn message(&self, request: Request, key: &[u8], proof: &Proof) -> Vec<u8> {
        let mut message = Vec::with_capacity(160);
        message.extend_from_slice(&self.session);
        field(&mut message, 4, key);
        match request {
            Request::Acquire => message.extend_from_slice(&self.acquire_end),
            Request::Release => field(&mut message, 6, proof.get()),
            Request::Renew => {
                field(&mut message, 6, proof.get());
                message.extend_from_slice(&self.renew_end);
            }
        }
        message
    }
}

/// A call: its headers and its message.
fn call(out: &mut Vec<u8>, stream: u32, block: &[u8], message: &[u8]) {
    frame_head(out, block.len(), HEADERS, END_HEADERS, stream);
    out.extend_from_slice(block);
    frame_head(out, 5 + message.len(), DATA, END_STREAM, stream);
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    concat(out, &[&[0], &length.to_be_bytes(), message]);
}

fn frame_head(out: &mut Vec<u8>, length: usize, kind: u8, flags: u8, stream: u32) {
    let length = u32::try_from(length).unwrap_or(u32::MAX).to_be_bytes();
    concat(out, &[&length[1..], &[kind, flags], &stream.to_be_bytes()]);
}

/// A header that gets no place in the table.
fn literal(block: &mut Vec<u8>, name: &[u8], value: &str) {
    block.extend_from_slice(name);
    string(block, value.as_bytes());
}

fn string(block: &mut Vec<u8>, text: &[u8]) {
    block.push(u8::try_from(text.len()).unwrap_or(0));
    block.extend_from_slice(text);
}

/// A field of bytes. All of ours are short.
fn field(out: &mut Vec<u8>, tag: u8, bytes: &[u8]) {
    out.push(tag << 3 | 2);
    string(out, bytes);
}

/// A field with a number.
fn number(out: &mut Vec<u8>, tag: u8, mut value: u64) {
    out.push(tag << 3);
    while value >= 0x80 {
        out.push(u8::try_from(value & 0x7f).unwrap_or(0) | 0x80);
        value >>= 7;
    }
    out.push(u8::try_from(value).unwrap_or(0));
}

/// The first frame: its kind, its flags, its payload, and what is behind it.
fn split(input: &[u8]) -> Option<(u8, u8, &[u8], &[u8])> {
    let (head, rest) = input.split_at_checked(HEAD)?;
    let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
    let (payload, rest) = rest.split_at_checked(length)?;
    Some((head[3], head[4], payload, rest))
}

/// The length of the first whole answer, with what the server says about the connection in front of it.
pub(crate) fn frame(input: &[u8]) -> Option<usize> {
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
fn data(answer: &[u8]) -> Option<&[u8]> {
    let mut rest = answer;
    while let Some((kind, _, payload, behind)) = split(rest) {
        if kind == DATA {
            return payload.get(5..);
        }
        rest = behind;
    }
    None
}

/// What a whole answer means.
pub(crate) fn read(request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
    let Some(message) = data(answer) else { return Answer::Refused };
    if request != Request::Acquire {
        return Answer::Done;
    }
    // A grant, and its token first of all.
    let [0x0a, _, 0x0a, 32, grant @ ..] = message else { return Answer::Busy };
    let Some(token) = grant.get(..TOKEN_BYTES) else { return Answer::Refused };
    let fence = std::str::from_utf8(&token[..16]).ok();
    match fence.and_then(|fence| u64::from_str_radix(fence, 16).ok()) {
        Some(fence) if proof.set(token) => Answer::Granted { fence },
        _ => Answer::Refused,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_and_read() {
        let mut answer = Vec::new();
        frame_head(&mut answer, 0, SETTINGS, 0, 0);
        frame_head(&mut answer, 2, HEADERS, END_HEADERS, 1);
        answer.extend([0x88, 0xc0]);
        let token = b"00000000000000ff0123456789abcdef";
        let grant = [&[0x0a, 32][..], token, &[0x10, 0xff, 0x01]].concat();
        let mut message = Vec::new();
        field(&mut message, 1, &grant);
        frame_head(&mut answer, 5 + message.len(), DATA, 0, 1);
        answer.extend([0, 0, 0, 0, u8::try_from(message.len()).unwrap()]);
        answer.extend_from_slice(&message);
        assert_eq!(frame(&answer), None, "its trailers are to come");
        frame_head(&mut answer, 1, HEADERS, END_HEADERS | END_STREAM, 1);
        answer.push(0xbf);
        let whole = answer.len();
        answer.push(0);
        assert_eq!(frame(&answer), Some(whole));
        let mut proof = Proof::none();
        let granted = read(Request::Acquire, &answer[..whole], &mut proof);
        assert_eq!((granted, proof.get()), (Answer::Granted { fence: 255 }, &token[..]));
        // Headers and nothing else: an error.
        let mut refused = Vec::new();
        frame_head(&mut refused, 1, HEADERS, END_HEADERS | END_STREAM, 1);
        refused.push(0x88);
        assert_eq!(frame(&refused), Some(refused.len()));
        assert_eq!(read(Request::Release, &refused, &mut proof), Answer::Refused);
    }

    #[test]
    fn requests_are_two_frames() {
        let forms = Forms { session: vec![0x0a, 1, b's'], ..Forms::default() };
        let (mut out, mut proof) = (Vec::new(), Proof::none());
        proof.set(b"token");
        forms.write(&mut out, Request::Release, b"key", &proof);
        let (kind, flags, block, rest) = split(&out).unwrap();
        assert_eq!((kind, flags, block.len()), (HEADERS, END_HEADERS, 6));
        let (kind, flags, message, rest) = split(rest).unwrap();
        assert_eq!((kind, flags, rest.len()), (DATA, END_STREAM, 0));
        assert_eq!(&message[5..], b"\x0a\x01s\x22\x03key\x32\x05token");
        assert_eq!(&out[5..9], &[0, 0, 0, 2], "the next stream");
    }
}
