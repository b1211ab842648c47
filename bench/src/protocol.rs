//! What the generator must know of a protocol of locks, and what the protocols have in common.
//!
//! Implementations know bytes only; sockets and order are the business of `link.rs` and `load.rs`.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

/// A wait longer than any run, in seconds.
pub(crate) const WAIT_S: u64 = 600;

/// A kind of server, driven as its lock clients drive it.
pub trait Protocol: fmt::Debug + Sync {
    /// The name in reports.
    fn name(&self) -> &'static str;

    /// Whether a lock has one holder at a time; a server that says yes to everybody is a floor, no lock server.
    fn excludes(&self) -> bool {
        true
    }

    /// Whether the server keeps those who wait and serves them in the order in which they came. At a server without a
    /// queue a lock that is taken is tried again after a pause.
    fn queues(&self) -> bool {
        true
    }

    /// Whether several requests may be on the way on one connection.
    fn pipelines(&self) -> bool {
        false
    }

    /// How the server is driven, where its name does not say it.
    fn note(&self) -> Option<&'static str> {
        None
    }

    /// Says what has to be said first on a connection. Protocols that can number their requests do so with `mux`.
    fn greet(&self, stream: &mut TcpStream, lease_s: u64, mux: bool) -> Greeted;

    /// Whether the server at the other end leads its cluster.
    fn leads(&self, _stream: &mut TcpStream) -> io::Result<bool> {
        Err(io::Error::other(format!("{} does not tell who leads", self.name())))
    }
}

/// What a connection speaks after the first words, or why it can not be used.
pub type Greeted = io::Result<Box<dyn Dialect>>;

/// How requests are written and answers read on one connection.
pub trait Dialect: fmt::Debug + Send {
    /// Whether a number stands before each request and comes back before its answer.
    fn numbered(&self) -> bool {
        false
    }

    /// Appends a request, without its number.
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof);

    /// The length of the first whole answer in `input`.
    fn frame(&self, input: &[u8]) -> Option<usize>;

    /// What a whole answer (without its number) to `request` means. A grant's proof is kept.
    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer;

    /// Appends what a whole answer asks for besides the next request.
    fn reply(&mut self, _out: &mut Vec<u8>, _answer: &[u8], _now: Instant) {}
}

/// What is asked of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request {
    /// Take the lock.
    Acquire,
    /// Give it back.
    Release,
    /// Extend its lease.
    Renew,
}

/// What it answered.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    /// The lock is ours.
    Granted {
        /// Grows with each grant of the key; 0 from servers without fences.
        fence: u64,
    },
    /// Somebody else has it.
    Busy,
    /// Released or renewed.
    Done,
    /// Anything else: the run cannot go on.
    Refused,
}

/// Proof of holding, kept without allocating: a token, or etcd's key of the lock.
#[derive(Debug, Clone)]
pub struct Proof {
    bytes: [u8; Self::BYTES_MAX],
    length: usize,
}

/// A token of dflockd is as long as that.
pub(crate) const TOKEN_BYTES: usize = 32;

impl Proof {
    const BYTES_MAX: usize = 120;

    /// No proof yet.
    pub fn none() -> Self {
        Self { bytes: [0; Self::BYTES_MAX], length: 0 }
    }

    /// The bytes of it.
    pub fn get(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Whether it fitted.
    pub fn set(&mut self, bytes: &[u8]) -> bool {
        let fits = bytes.len() <= Self::BYTES_MAX;
        if fits {
            self.bytes[..bytes.len()].copy_from_slice(bytes);
            self.length = bytes.len();
        }
        fits
    }

    /// Keeps a token of dflockd: hexadecimal digits, the first half of them the fence.
    pub(crate) fn set_token(&mut self, token: &[u8]) -> Answer {
        let fence = token.get(..16).and_then(|fence| std::str::from_utf8(fence).ok());
        match fence.and_then(|fence| u64::from_str_radix(fence, 16).ok()) {
            Some(fence) if token.len() == TOKEN_BYTES && self.set(token) => {
                Answer::Granted { fence }
            }
            _ => Answer::Refused,
        }
    }
}

/// The server answered something that ends the run.
pub fn refused(what: &str, answer: &[u8]) -> io::Error {
    let text = String::from_utf8_lossy(answer);
    let advice = match text.trim() {
        "error_max_locks" => "; start the server with a larger --max-locks",
        "error_max_waiters" => "; start the server with a larger --max-waiters",
        _ => "",
    };
    let shown: String = text.trim().chars().take(300).collect();
    io::Error::other(format!("the server answered {shown:?} to {what}{advice}"))
}

/// One answer as `frame` delimits it, on a blocking stream, byte by byte: for the few before the load begins.
pub fn read_answer(
    stream: &mut TcpStream,
    frame: impl Fn(&[u8]) -> Option<usize>,
) -> io::Result<Vec<u8>> {
    let mut answer = Vec::new();
    let mut byte = [0];
    while frame(&answer).is_none() {
        stream.read_exact(&mut byte)?;
        answer.push(byte[0]);
    }
    Ok(answer)
}

/// The length of the first line in `input`.
pub fn line(input: &[u8]) -> Option<usize> {
    input.iter().position(|&byte| byte == b'\n').map(|end| end + 1)
}

/// Appends all of them.
pub fn concat(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for part in parts {
        out.extend_from_slice(part);
    }
}

/// Appends `number` as text.
pub fn decimal(out: &mut Vec<u8>, number: u64) {
    // Formatting into a vector that has room does not allocate.
    write!(out, "{number}").expect("a vector takes everything");
}

/// Where `needle` begins.
pub fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// The text after `opening` up to the next quote.
pub fn member<'a>(answer: &'a [u8], opening: &[u8]) -> Option<&'a [u8]> {
    let start = find(answer, opening)? + opening.len();
    let length = answer[start..].iter().position(|&byte| byte == b'"')?;
    Some(&answer[start..start + length])
}
