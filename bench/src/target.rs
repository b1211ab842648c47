//! The protocols of the servers that can be driven, each as its lock clients speak it.
//!
//! - dflockd and the echo floor: `l`, `r`, `n` of the line protocol.
//! - Redis: `SET key token NX PX lease`, and scripts that compare the token before they delete
//!   or extend. A lock that is taken is tried again after a pause: Redis has no queue.
//! - etcd: the v3lock service by way of the JSON gateway of the client port, HTTP/1.1; or by gRPC, see
//!   [`super::etcd`].
//! - dflockd by its gRPC door: one session and one connection per client; see [`super::grpc`].
//! - dflockd by its HTTP door: one session per connection, which is kept alive; see [`super::http`].
//!
//! Knows bytes only; sockets and order are the business of [`super::link`] and [`super::load`].

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::time::Instant;

use super::numbers::Random;
use super::{etcd, grpc, http, http2};

/// A kind of server.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Target {
    /// The lock server of this project.
    Dflockd,
    /// The same by its HTTP door.
    Http,
    /// The same by its gRPC door.
    Grpc,
    /// Redis, one instance.
    Redis,
    /// etcd's v3lock by the JSON gateway.
    Etcd,
    /// etcd's v3lock by gRPC.
    EtcdGrpc,
    /// The fixed-answer server: `dflockctl bench echo`.
    Echo,
}

/// What is asked of a server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Take the lock.
    Acquire,
    /// Give it back.
    Release,
    /// Extend its lease.
    Renew,
}

/// What it answered.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// The lock is ours; servers without fences say 0.
    Granted { fence: u64 },
    /// Somebody else has it.
    Busy,
    /// Released or renewed.
    Done,
    /// Anything else: the run cannot go on.
    Refused,
}

/// Proof of holding, kept without allocating: a token, or etcd's key of the lock.
#[derive(Debug, Clone)]
pub(crate) struct Proof {
    bytes: [u8; Self::BYTES_MAX],
    length: usize,
}

impl Proof {
    const BYTES_MAX: usize = 120;

    /// No proof yet.
    pub(crate) fn none() -> Self {
        Self { bytes: [0; Self::BYTES_MAX], length: 0 }
    }

    /// The bytes of it.
    pub(crate) fn get(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Whether it fitted.
    pub(crate) fn set(&mut self, bytes: &[u8]) -> bool {
        let fits = bytes.len() <= Self::BYTES_MAX;
        if fits {
            self.bytes[..bytes.len()].copy_from_slice(bytes);
            self.length = bytes.len();
        }
        fits
    }
}

/// What one connection needs to know to write requests.
#[derive(Debug, Clone, Default)]
pub(crate) struct Dialect {
    /// Seconds, as text.
    lease: String,
    /// Milliseconds, as text.
    lease_ms: String,
    /// etcd: the lease of the connection.
    lease_id: String,
    /// Redis: the digests of the two scripts.
    release_script: String,
    renew_script: String,
    /// dflockd: requests and answers carry a number.
    pub(crate) mux: bool,
    /// HTTP: what is the same in all requests of the connection.
    http: http::Forms,
    /// gRPC: likewise.
    grpc: grpc::Forms,
    /// etcd by gRPC: likewise.
    etcd: etcd::Forms,
}

const RELEASE_SCRIPT: &str =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end";
const RENEW_SCRIPT: &str = "if redis.call('get',KEYS[1])==ARGV[1] then \
     return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end";

/// A wait longer than any run.
const WAIT_S: &str = "600";

impl Target {
    /// The name in reports.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dflockd => "dflockd",
            Self::Http => "http",
            Self::Grpc => "grpc",
            Self::Redis => "redis",
            Self::Etcd => "etcd",
            Self::EtcdGrpc => "etcd-grpc",
            Self::Echo => "echo",
        }
    }

    /// Whether it excludes at all; the floor says yes to everybody.
    pub(crate) fn excludes(self) -> bool {
        self != Self::Echo
    }

    /// Whether those who wait are served in the order in which they came.
    pub(crate) fn queues(self) -> bool {
        matches!(self, Self::Dflockd | Self::Http | Self::Grpc | Self::Etcd | Self::EtcdGrpc)
    }

    /// Whether several requests may be on the way on one connection.
    pub(crate) fn pipelines(self) -> bool {
        !matches!(self, Self::Http | Self::Grpc | Self::Etcd | Self::EtcdGrpc)
    }

    /// Says what has to be said first on a connection.
    pub(crate) fn greet(
        self,
        stream: &mut TcpStream,
        lease_s: u64,
        mux: bool,
    ) -> io::Result<Dialect> {
        let mut dialect = Dialect {
            lease: lease_s.to_string(),
            lease_ms: (lease_s * 1000).to_string(),
            ..Dialect::default()
        };
        match self {
            Self::Dflockd if mux => {
                stream.write_all(b"hello\ndflockctl-bench\nmux\n")?;
                let answer = self.read_answer(stream)?;
                dialect.mux = answer.starts_with(b"ok") && answer.ends_with(b"mux\n");
                if !dialect.mux {
                    return Err(io::Error::other("the server does not know mux"));
                }
            }
            Self::Dflockd | Self::Echo => {}
            Self::Http => {
                stream.write_all(http::OPEN_SESSION)?;
                let answer = self.read_answer(stream)?;
                let id = member(&answer, b"\"session_id\":\"").ok_or_else(|| {
                    io::Error::other(format!("no session: {}", String::from_utf8_lossy(&answer)))
                })?;
                dialect.http = http::Forms::new(id, WAIT_S, lease_s);
            }
            Self::Grpc => {
                let wait_ms = WAIT_S.parse::<u64>().map_err(io::Error::other)? * 1000;
                dialect.grpc = grpc::Forms::greet(stream, wait_ms, lease_s)?;
            }
            Self::EtcdGrpc => dialect.etcd = etcd::Forms::greet(stream, lease_s)?,
            Self::Redis => {
                dialect.release_script = self.load_script(stream, RELEASE_SCRIPT)?;
                dialect.renew_script = self.load_script(stream, RENEW_SCRIPT)?;
            }
            Self::Etcd => {
                let mut request = Vec::new();
                let body = format!("{{\"TTL\":{lease_s}}}");
                post(&mut request, "/v3/lease/grant", &[body.as_bytes()]);
                stream.write_all(&request)?;
                let answer = self.read_answer(stream)?;
                let id = member(&answer, b"\"ID\":\"").ok_or_else(|| {
                    io::Error::other(format!("no lease: {}", String::from_utf8_lossy(&answer)))
                })?;
                dialect.lease_id = String::from_utf8_lossy(id).into_owned();
            }
        }
        Ok(dialect)
    }

    fn load_script(self, stream: &mut TcpStream, script: &str) -> io::Result<String> {
        let mut request = Vec::new();
        resp(&mut request, &[b"SCRIPT", b"LOAD", script.as_bytes()]);
        stream.write_all(&request)?;
        let length = self.read_answer(stream)?;
        let digest = self.read_answer(stream)?;
        if length != b"$40\r\n" {
            return Err(io::Error::other(String::from_utf8_lossy(&length).into_owned()));
        }
        Ok(String::from_utf8_lossy(digest.trim_ascii_end()).into_owned())
    }

    /// One answer, on a blocking stream, byte by byte: for the few before the load begins.
    pub(crate) fn read_answer(self, stream: &mut TcpStream) -> io::Result<Vec<u8>> {
        let mut answer = Vec::new();
        let mut byte = [0];
        while self.frame(&answer).is_none() {
            stream.read_exact(&mut byte)?;
            answer.push(byte[0]);
        }
        Ok(answer)
    }

    /// Appends a request. `number` is used where answers may come in any order.
    #[expect(clippy::too_many_arguments, reason = "all of it is on the wire")]
    pub(crate) fn write(
        self,
        out: &mut Vec<u8>,
        dialect: &Dialect,
        request: Request,
        key: &[u8],
        proof: &mut Proof,
        number: u64,
        random: &mut Random,
    ) {
        match self {
            Self::Dflockd | Self::Echo => {
                if dialect.mux {
                    decimal(out, number);
                    out.push(b' ');
                }
                let lease = dialect.lease.as_bytes();
                match request {
                    Request::Acquire => {
                        let wait = WAIT_S.as_bytes();
                        concat(out, &[b"l\n", key, b"\n", wait, b" ", lease, b"\n"]);
                    }
                    Request::Release => concat(out, &[b"r\n", key, b"\n", proof.get(), b"\n"]),
                    Request::Renew => {
                        concat(out, &[b"n\n", key, b"\n", proof.get(), b" ", lease, b"\n"]);
                    }
                }
            }
            Self::Http => dialect.http.write(out, request, key, proof),
            Self::Grpc => dialect.grpc.write(out, request, key, proof),
            Self::EtcdGrpc => dialect.etcd.write(out, request, key, proof),
            Self::Redis => {
                let lease_ms = dialect.lease_ms.as_bytes();
                match request {
                    Request::Acquire => {
                        let token = hex(random.next());
                        proof.set(&token);
                        resp(out, &[b"SET", key, &token, b"NX", b"PX", lease_ms]);
                    }
                    Request::Release => {
                        let script = dialect.release_script.as_bytes();
                        resp(out, &[b"EVALSHA", script, b"1", key, proof.get()]);
                    }
                    Request::Renew => {
                        let script = dialect.renew_script.as_bytes();
                        resp(out, &[b"EVALSHA", script, b"1", key, proof.get(), lease_ms]);
                    }
                }
            }
            Self::Etcd => {
                let lease = dialect.lease_id.as_bytes();
                match request {
                    Request::Acquire => {
                        let name = base64(key);
                        post(
                            out,
                            "/v3/lock/lock",
                            &[b"{\"name\":\"", name.as_bytes(), b"\",\"lease\":", lease, b"}"],
                        );
                    }
                    Request::Release => {
                        post(out, "/v3/lock/unlock", &[b"{\"key\":\"", proof.get(), b"\"}"]);
                    }
                    Request::Renew => {
                        post(out, "/v3/lease/keepalive", &[b"{\"ID\":", lease, b"}"]);
                    }
                }
            }
        }
    }

    /// The length of the first whole answer in `input`.
    pub(crate) fn frame(self, input: &[u8]) -> Option<usize> {
        match self {
            Self::Dflockd | Self::Echo | Self::Redis => {
                input.iter().position(|&byte| byte == b'\n').map(|end| end + 1)
            }
            Self::Http => http::frame(input),
            Self::Grpc | Self::EtcdGrpc => http2::frame(input),
            Self::Etcd => {
                let head = find(input, b"\r\n\r\n")? + 4;
                if let Some(length) = header(&input[..head], b"content-length:") {
                    let length: usize = std::str::from_utf8(length).ok()?.trim().parse().ok()?;
                    return (input.len() >= head + length).then_some(head + length);
                }
                find(&input[head..], b"\r\n0\r\n\r\n").map(|end| head + end + 7)
            }
        }
    }

    /// What a whole answer (without its number) to `request` means. A grant's proof is kept.
    pub(crate) fn read(self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
        match self {
            Self::Dflockd | Self::Echo => match request {
                Request::Acquire => read_grant(answer, proof),
                Request::Release | Request::Renew if answer.starts_with(b"ok") => Answer::Done,
                Request::Release | Request::Renew => Answer::Refused,
            },
            Self::Http => http::read(request, answer, proof),
            Self::Grpc => grpc::read(request, answer, proof),
            Self::EtcdGrpc => etcd::read(request, answer, proof),
            Self::Redis => match (request, answer) {
                (Request::Acquire, b"+OK\r\n") => Answer::Granted { fence: 0 },
                (Request::Acquire, b"$-1\r\n") => Answer::Busy,
                (Request::Release | Request::Renew, b":1\r\n") => Answer::Done,
                _ => Answer::Refused,
            },
            Self::Etcd => {
                if !answer.starts_with(b"HTTP/1.1 200") {
                    return Answer::Refused;
                }
                match request {
                    Request::Acquire => match member(answer, b"\"key\":\"") {
                        Some(key) if proof.set(key) => Answer::Granted { fence: 0 },
                        _ => Answer::Refused,
                    },
                    Request::Release => Answer::Done,
                    Request::Renew if find(answer, b"\"TTL\":\"").is_some() => Answer::Done,
                    Request::Renew => Answer::Refused,
                }
            }
        }
    }

    /// Appends what a whole answer asks for besides the next request.
    pub(crate) fn reply(self, out: &mut Vec<u8>, dialect: &Dialect, answer: &[u8], now: Instant) {
        match self {
            Self::Grpc => dialect.grpc.calls.reply(answer, out, now),
            Self::EtcdGrpc => dialect.etcd.calls.reply(answer, out, now),
            Self::Dflockd | Self::Http | Self::Redis | Self::Etcd | Self::Echo => {}
        }
    }
}

/// `ok <token> <lease>`; the first half of the token is the fence.
fn read_grant(answer: &[u8], proof: &mut Proof) -> Answer {
    if answer.starts_with(b"timeout") {
        return Answer::Busy;
    }
    let Some(rest) = answer.strip_prefix(b"ok ") else {
        return Answer::Refused;
    };
    let token = rest.split(|&byte| byte == b' ').next().unwrap_or_default();
    let fence = token.get(..16).and_then(|fence| std::str::from_utf8(fence).ok());
    match fence.and_then(|fence| u64::from_str_radix(fence, 16).ok()) {
        Some(fence) if proof.set(token) => Answer::Granted { fence },
        _ => Answer::Refused,
    }
}

/// Splits the number off an answer of a `mux` connection.
pub(crate) fn split_number(answer: &[u8]) -> Option<(u64, &[u8])> {
    let blank = answer.iter().position(|&byte| byte == b' ')?;
    let number = std::str::from_utf8(&answer[..blank]).ok()?.parse().ok()?;
    Some((number, &answer[blank + 1..]))
}

/// Appends all of them.
pub(crate) fn concat(out: &mut Vec<u8>, parts: &[&[u8]]) {
    for part in parts {
        out.extend_from_slice(part);
    }
}

fn decimal(out: &mut Vec<u8>, number: u64) {
    // Formatting into a vector that has room does not allocate.
    write!(out, "{number}").expect("a vector takes everything");
}

fn hex(number: u64) -> [u8; 16] {
    let bytes = number.to_be_bytes();
    let nibble = |place: usize| (bytes[place / 2] >> (4 * (1 - place % 2))) & 15;
    std::array::from_fn(|place| b"0123456789abcdef"[usize::from(nibble(place))])
}

fn resp(out: &mut Vec<u8>, words: &[&[u8]]) {
    out.push(b'*');
    decimal(out, words.len() as u64);
    for word in words {
        out.extend_from_slice(b"\r\n$");
        decimal(out, word.len() as u64);
        concat(out, &[b"\r\n", word]);
    }
    out.extend_from_slice(b"\r\n");
}

/// Appends a request of HTTP/1.1.
pub(crate) fn post(out: &mut Vec<u8>, path: &str, body: &[&[u8]]) {
    let length: usize = body.iter().map(|part| part.len()).sum();
    concat(out, &[b"POST ", path.as_bytes(), b" HTTP/1.1\r\nHost: bench\r\nContent-Length: "]);
    decimal(out, length as u64);
    out.extend_from_slice(b"\r\n\r\n");
    concat(out, body);
}

/// Where `needle` begins.
pub(crate) fn find(haystack: &[u8], needle: &[u8]) -> Option<usize> {
    haystack.windows(needle.len()).position(|window| window == needle)
}

/// The value of the header `name` (lower case, with the colon).
fn header<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    head.split(|&byte| byte == b'\n').find_map(|line| {
        let (start, value) = line.split_at_checked(name.len())?;
        start.eq_ignore_ascii_case(name).then_some(value)
    })
}

/// The text after `opening` up to the next quote.
pub(crate) fn member<'a>(answer: &'a [u8], opening: &[u8]) -> Option<&'a [u8]> {
    let start = find(answer, opening)? + opening.len();
    let length = answer[start..].iter().position(|&byte| byte == b'"')?;
    Some(&answer[start..start + length])
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |place: usize| u32::from(chunk.get(place).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for place in 0..4 {
            let digit = DIGITS[(bits >> (18 - 6 * place)) as usize & 63];
            text.push(if place > chunk.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(target: Target, request: Request, dialect: &Dialect) -> String {
        let mut out = Vec::new();
        let mut proof = Proof::none();
        proof.set(b"proof");
        target.write(&mut out, dialect, request, b"k", &mut proof, 7, &mut Random::new(0));
        String::from_utf8(out).unwrap()
    }

    fn dialect() -> Dialect {
        Dialect {
            lease: "10".into(),
            lease_ms: "10000".into(),
            lease_id: "99".into(),
            release_script: "aa".into(),
            renew_script: "bb".into(),
            ..Dialect::default()
        }
    }

    #[test]
    fn dflockd_requests() {
        let mux = Dialect { mux: true, ..dialect() };
        assert_eq!(written(Target::Dflockd, Request::Acquire, &dialect()), "l\nk\n600 10\n");
        assert_eq!(written(Target::Dflockd, Request::Release, &dialect()), "r\nk\nproof\n");
        assert_eq!(written(Target::Dflockd, Request::Renew, &mux), "7 n\nk\nproof 10\n");
    }

    #[test]
    fn redis_requests() {
        assert_eq!(
            written(Target::Redis, Request::Acquire, &dialect()),
            "*6\r\n$3\r\nSET\r\n$1\r\nk\r\n$16\r\ne220a8397b1dcdaf\r\n$2\r\nNX\r\n$2\r\nPX\r\n\
             $5\r\n10000\r\n"
        );
        assert_eq!(
            written(Target::Redis, Request::Release, &dialect()),
            "*5\r\n$7\r\nEVALSHA\r\n$2\r\naa\r\n$1\r\n1\r\n$1\r\nk\r\n$5\r\nproof\r\n"
        );
    }

    #[test]
    fn etcd_requests() {
        assert_eq!(
            written(Target::Etcd, Request::Acquire, &dialect()),
            "POST /v3/lock/lock HTTP/1.1\r\nHost: bench\r\nContent-Length: 26\r\n\r\n\
             {\"name\":\"aw==\",\"lease\":99}"
        );
    }

    #[test]
    fn grants() {
        let mut proof = Proof::none();
        let line = b"ok 00000000000000ff0123456789abcdef 33\n";
        let answer = Target::Dflockd.read(Request::Acquire, line, &mut proof);
        assert_eq!(answer, Answer::Granted { fence: 255 });
        assert_eq!(proof.get(), b"00000000000000ff0123456789abcdef");
        for (line, expected) in [
            (&b"timeout\n"[..], Answer::Busy),
            (b"error_max_locks\n", Answer::Refused),
            (b"ok short 33\n", Answer::Refused),
        ] {
            assert_eq!(Target::Dflockd.read(Request::Acquire, line, &mut proof), expected);
        }
    }

    #[test]
    fn answers_of_redis() {
        let read = |request, line: &[u8]| Target::Redis.read(request, line, &mut Proof::none());
        assert_eq!(read(Request::Acquire, b"+OK\r\n"), Answer::Granted { fence: 0 });
        assert_eq!(read(Request::Acquire, b"$-1\r\n"), Answer::Busy);
        assert_eq!(read(Request::Release, b":1\r\n"), Answer::Done);
        assert_eq!(read(Request::Release, b":0\r\n"), Answer::Refused);
        assert_eq!(read(Request::Acquire, b"-OOM\r\n"), Answer::Refused);
    }

    #[test]
    fn answers_of_etcd() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{\"key\":\"YWJj\"}\n";
        assert_eq!(Target::Etcd.frame(whole), Some(whole.len()));
        assert_eq!(Target::Etcd.frame(&whole[..whole.len() - 1]), None);
        let mut proof = Proof::none();
        let answer = Target::Etcd.read(Request::Acquire, whole, &mut proof);
        assert_eq!((answer, proof.get()), (Answer::Granted { fence: 0 }, &b"YWJj"[..]));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        assert_eq!(Target::Etcd.frame(chunked), Some(chunked.len()));
    }

    #[test]
    fn numbered_answers() {
        assert_eq!(split_number(b"12 ok\n"), Some((12, &b"ok\n"[..])));
        assert_eq!(split_number(b"ok\n"), None);
    }

    #[test]
    fn base64_pads() {
        assert_eq!(
            [&b""[..], b"f", b"fo", b"foo", b"foob"].map(base64),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]
        );
    }
}
