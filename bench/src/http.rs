//! dflockd's HTTP API as a load generator uses it, one session per connection: requests are written from parts that
//! were prepared when the connection was made, answers are looked at no further than needed. HTTP/1.1 with kept
//! connections.

use std::io::Write;
use std::net::TcpStream;

use crate::protocol::{
    Answer, Dialect, Greeted, Proof, Protocol, Request, TOKEN_BYTES, WAIT_S, concat, member,
    read_answer, refused,
};

/// The first request of a connection.
const OPEN_SESSION: &[u8] =
    b"POST /v1/sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n";

/// dflockd by its HTTP API.
#[derive(Debug)]
pub struct Http;

impl Protocol for Http {
    fn name(&self) -> &'static str {
        "http"
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        stream.write_all(OPEN_SESSION)?;
        let answer = read_answer(stream, frame)?;
        let id = member(&answer, b"\"session_id\":\"")
            .ok_or_else(|| refused("the opening of a session", &answer))?;
        Ok(Box::new(Forms::new(id, lease_s)))
    }
}

/// What follows the key in each request of one connection, but for the token.
#[derive(Debug)]
struct Forms {
    acquire: Vec<u8>,
    /// The body up to the token.
    release: Vec<u8>,
    renew: Vec<u8>,
    /// The body of a renewal after the token.
    renew_end: Vec<u8>,
}

impl Forms {
    /// The forms of a session.
    fn new(session: &[u8], lease_s: u64) -> Self {
        let session = String::from_utf8_lossy(session);
        let form = |verb: &str, start: &str, more: usize| {
            let length = start.len() + more;
            format!(
                "{verb} HTTP/1.1\r\nHost: localhost\r\nX-Dflockd-Session: {session}\r\n\
                 Content-Length: {length}\r\n\r\n{start}"
            )
            .into_bytes()
        };
        let acquire = format!("{{\"acquire_timeout_s\":{WAIT_S},\"lease_ttl_s\":{lease_s}}}");
        let renew_end = format!("\",\"lease_ttl_s\":{lease_s}}}");
        let token = "{\"token\":\"";
        Self {
            acquire: form("", &acquire, 0),
            release: form("/release", token, TOKEN_BYTES + 2),
            renew: form("/renew", token, TOKEN_BYTES + renew_end.len()),
            renew_end: renew_end.into_bytes(),
        }
    }
}

impl Dialect for Forms {
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        out.extend_from_slice(b"POST /v1/locks/");
        for &byte in key {
            // The only one of our key names that means something in a path.
            if byte == b'/' {
                out.extend_from_slice(b"%2F");
            } else {
                out.push(byte);
            }
        }
        match request {
            Request::Acquire => out.extend_from_slice(&self.acquire),
            Request::Release => concat(out, &[&self.release, proof.get(), b"\"}"]),
            Request::Renew => concat(out, &[&self.renew, proof.get(), &self.renew_end]),
        }
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        frame(input)
    }

    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
        let status = answer.get(9..12).unwrap_or_default();
        match (request, status) {
            (Request::Acquire, b"200") => {
                let token = member(answer, b"\"token\":\"");
                token.map_or(Answer::Busy, |token| proof.set_token(token))
            }
            (Request::Release, b"204") | (Request::Renew, b"200") => Answer::Done,
            _ => Answer::Refused,
        }
    }
}

/// The length of the first whole answer.
fn frame(input: &[u8]) -> Option<usize> {
    const LENGTH: &[u8] = b"content-length:";
    let mut at = 0;
    let mut body = 0;
    loop {
        let line = input[at..].iter().position(|&byte| byte == b'\n')?;
        let text = &input[at..at + line];
        at += line + 1;
        if text.len() <= 1 {
            break;
        }
        if let Some((name, value)) = text.split_at_checked(LENGTH.len())
            && name.eq_ignore_ascii_case(LENGTH)
        {
            body = std::str::from_utf8(value).ok()?.trim().parse().ok()?;
        }
    }
    (input.len() >= at + body).then_some(at + body)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &[u8] = b"00000000000000ff0123456789abcdef";

    fn written(request: Request) -> String {
        let mut proof = Proof::none();
        proof.set(TOKEN);
        let mut out = Vec::new();
        Forms::new(b"5e5510", 10).write(&mut out, request, b"a/b", &mut proof);
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn requests() {
        for (request, verb, body) in [
            (Request::Acquire, "", r#"{"acquire_timeout_s":600,"lease_ttl_s":10}"#),
            (Request::Release, "/release", r#"{"token":"00000000000000ff0123456789abcdef"}"#),
            (
                Request::Renew,
                "/renew",
                r#"{"token":"00000000000000ff0123456789abcdef","lease_ttl_s":10}"#,
            ),
        ] {
            let length = body.len();
            assert_eq!(
                written(request),
                format!(
                    "POST /v1/locks/a%2Fb{verb} HTTP/1.1\r\nHost: localhost\r\n\
                     X-Dflockd-Session: 5e5510\r\nContent-Length: {length}\r\n\r\n{body}"
                )
            );
        }
    }

    #[test]
    fn answers() {
        let forms = Forms::new(b"5e5510", 10);
        let body = "{\"status\":\"ok\",\"token\":\"00000000000000ff0123456789abcdef\"}\n";
        let length = body.len();
        let whole = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
        );
        let whole = whole.as_bytes();
        assert_eq!(frame(whole), Some(whole.len()));
        assert_eq!(frame(&[whole, b"HTTP"].concat()), Some(whole.len()));
        for end in 0..whole.len() {
            assert_eq!(frame(&whole[..end]), None);
        }
        let mut proof = Proof::none();
        let answer = forms.read(Request::Acquire, whole, &mut proof);
        assert_eq!((answer, proof.get()), (Answer::Granted { fence: 255 }, TOKEN));
        let empty = b"HTTP/1.1 204 No Content\r\nx: y\r\n\r\n";
        assert_eq!(frame(empty), Some(empty.len()));
        assert_eq!(forms.read(Request::Release, empty, &mut proof), Answer::Done);
        let busy = b"HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{\"status\":\"timeout\"}\n";
        assert_eq!(forms.read(Request::Acquire, busy, &mut proof), Answer::Busy);
        let refused = b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(forms.read(Request::Acquire, refused, &mut proof), Answer::Refused);
    }
}
