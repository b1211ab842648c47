//! etcd's v3lock by way of the JSON gateway of the client port, HTTP/1.1.

use std::io::{self, Write};
use std::net::TcpStream;

use dflockd_bench::protocol::{
    Answer, Dialect, Greeted, Proof, Protocol, Request, concat, decimal, find, member, read_answer,
    refused,
};

/// etcd by its JSON gateway.
#[derive(Debug)]
pub(crate) struct Gateway;

impl Protocol for Gateway {
    fn name(&self) -> &'static str {
        "etcd"
    }

    fn note(&self) -> Option<&'static str> {
        Some("by its JSON gateway")
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        let mut request = Vec::new();
        let body = format!("{{\"TTL\":{lease_s}}}");
        post(&mut request, "/v3/lease/grant", &[body.as_bytes()]);
        stream.write_all(&request)?;
        let answer = read_answer(stream, frame)?;
        let id = member(&answer, b"\"ID\":\"")
            .ok_or_else(|| refused("the request for a lease", &answer))?;
        Ok(Box::new(Lease { id: id.to_vec() }))
    }

    fn leads(&self, stream: &mut TcpStream) -> io::Result<bool> {
        let mut request = Vec::new();
        post(&mut request, "/v3/maintenance/status", &[b"{}"]);
        stream.write_all(&request)?;
        Ok(member_that_answers_leads(&read_answer(stream, frame)?))
    }
}

/// Whether the member that answered is the one it calls leader.
fn member_that_answers_leads(answer: &[u8]) -> bool {
    let itself = member(answer, b"\"member_id\":\"");
    itself.is_some() && itself == member(answer, b"\"leader\":\"")
}

/// The lease of a connection, which all its locks have.
#[derive(Debug)]
struct Lease {
    /// Its number, as text.
    id: Vec<u8>,
}

impl Dialect for Lease {
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        match request {
            Request::Acquire => {
                let name = base64(key);
                let body = [b"{\"name\":\"", name.as_bytes(), b"\",\"lease\":", &self.id, b"}"];
                post(out, "/v3/lock/lock", &body);
            }
            Request::Release => {
                post(out, "/v3/lock/unlock", &[b"{\"key\":\"", proof.get(), b"\"}"]);
            }
            Request::Renew => post(out, "/v3/lease/keepalive", &[b"{\"ID\":", &self.id, b"}"]),
        }
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        frame(input)
    }

    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
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

/// The length of the first whole answer.
fn frame(input: &[u8]) -> Option<usize> {
    let head = find(input, b"\r\n\r\n")? + 4;
    if let Some(length) = header(&input[..head], b"content-length:") {
        let length: usize = std::str::from_utf8(length).ok()?.trim().parse().ok()?;
        return (input.len() >= head + length).then_some(head + length);
    }
    find(&input[head..], b"\r\n0\r\n\r\n").map(|end| head + end + 7)
}

/// Appends a request of HTTP/1.1.
fn post(out: &mut Vec<u8>, path: &str, body: &[&[u8]]) {
    let length: usize = body.iter().map(|part| part.len()).sum();
    concat(out, &[b"POST ", path.as_bytes(), b" HTTP/1.1\r\nHost: bench\r\nContent-Length: "]);
    decimal(out, length as u64);
    out.extend_from_slice(b"\r\n\r\n");
    concat(out, body);
}

/// The value of the header `name` (lower case, with the colon).
fn header<'a>(head: &'a [u8], name: &[u8]) -> Option<&'a [u8]> {
    head.split(|&byte| byte == b'\n').find_map(|line| {
        let (start, value) = line.split_at_checked(name.len())?;
        start.eq_ignore_ascii_case(name).then_some(value)
    })
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

    #[test]
    fn requests() {
        let mut out = Vec::new();
        let mut lease = Lease { id: b"99".to_vec() };
        lease.write(&mut out, Request::Acquire, b"k", &mut Proof::none());
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "POST /v3/lock/lock HTTP/1.1\r\nHost: bench\r\nContent-Length: 26\r\n\r\n\
             {\"name\":\"aw==\",\"lease\":99}"
        );
    }

    #[test]
    fn answers() {
        let whole = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n{\"key\":\"YWJj\"}\n";
        assert_eq!(frame(whole), Some(whole.len()));
        assert_eq!(frame(&whole[..whole.len() - 1]), None);
        let mut proof = Proof::none();
        let answer = Lease { id: Vec::new() }.read(Request::Acquire, whole, &mut proof);
        assert_eq!((answer, proof.get()), (Answer::Granted { fence: 0 }, &b"YWJj"[..]));
        let chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
        assert_eq!(frame(chunked), Some(chunked.len()));
    }

    #[test]
    fn a_member_tells_whether_it_leads() {
        for (leader, expected) in
            [("\"leader\":\"12\",", true), ("\"leader\":\"13\",", false), ("", false)]
        {
            let answer =
                format!("{{\"header\":{{\"member_id\":\"12\"}},{leader}\"raftIndex\":\"8\"}}");
            assert_eq!(member_that_answers_leads(answer.as_bytes()), expected, "{answer}");
        }
    }

    #[test]
    fn base64_pads() {
        assert_eq!(
            [&b""[..], b"f", b"fo", b"foo", b"foob"].map(base64),
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg=="]
        );
    }
}
