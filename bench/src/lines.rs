//! dflockd by the line protocol: `l`, `r`, `n`, one line per answer.

use std::io::{self, BufRead, BufReader, Write};
use std::net::TcpStream;

use crate::protocol::{
    Answer, Dialect, Greeted, Proof, Protocol, Request, WAIT_S, concat, decimal, find, line,
    read_answer,
};

/// The line protocol of dflockd.
#[derive(Debug)]
pub struct Lines;

impl Protocol for Lines {
    fn name(&self) -> &'static str {
        "dflockd"
    }

    fn pipelines(&self) -> bool {
        true
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, mux: bool) -> Greeted {
        if mux {
            stream.write_all(b"hello\ndflockd-bench\nmux\n")?;
            let answer = read_answer(stream, line)?;
            if !answer.starts_with(b"ok") || !answer.ends_with(b"mux\n") {
                return Err(io::Error::other("the server does not know mux"));
            }
        }
        Ok(Box::new(Form::new(lease_s, mux)))
    }

    fn leads(&self, stream: &mut TcpStream) -> io::Result<bool> {
        stream.write_all(b"stats\n_\n_\n")?;
        let mut line = Vec::new();
        BufReader::new(stream).read_until(b'\n', &mut line)?;
        Ok(find(&line, b"\"role\":\"leader\"").is_some())
    }
}

#[derive(Debug)]
struct Form {
    mux: bool,
    /// The last line of an acquire: how long to wait, and the lease.
    acquire_end: Vec<u8>,
    /// What follows the token of a renewal.
    renew_end: Vec<u8>,
}

impl Form {
    fn new(lease_s: u64, mux: bool) -> Self {
        let acquire_end = format!("\n{WAIT_S} {lease_s}\n").into_bytes();
        Self { mux, acquire_end, renew_end: format!(" {lease_s}\n").into_bytes() }
    }
}

impl Dialect for Form {
    fn numbered(&self) -> bool {
        self.mux
    }

    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        match request {
            Request::Acquire => concat(out, &[b"l\n", key, &self.acquire_end]),
            Request::Release => concat(out, &[b"r\n", key, b"\n", proof.get(), b"\n"]),
            Request::Renew => concat(out, &[b"n\n", key, b"\n", proof.get(), &self.renew_end]),
        }
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        line(input)
    }

    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
        match request {
            Request::Acquire => read_grant(answer, proof),
            Request::Release | Request::Renew if answer.starts_with(b"ok") => Answer::Done,
            Request::Release | Request::Renew => Answer::Refused,
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
    proof.set_token(rest.split(|&byte| byte == b' ').next().unwrap_or_default())
}

/// Appends the number of a request on a `mux` connection.
pub(crate) fn write_number(out: &mut Vec<u8>, number: u64) {
    decimal(out, number);
    out.push(b' ');
}

/// Splits the number off an answer of a `mux` connection.
pub(crate) fn split_number(answer: &[u8]) -> Option<(u64, &[u8])> {
    let blank = answer.iter().position(|&byte| byte == b' ')?;
    let number = std::str::from_utf8(&answer[..blank]).ok()?.parse().ok()?;
    Some((number, &answer[blank + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        for (request, expected) in [
            (Request::Acquire, "l\nk\n600 10\n"),
            (Request::Release, "r\nk\nproof\n"),
            (Request::Renew, "n\nk\nproof 10\n"),
        ] {
            let (mut out, mut proof) = (Vec::new(), Proof::none());
            proof.set(b"proof");
            Form::new(10, false).write(&mut out, request, b"k", &mut proof);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn grants() {
        let form = Form::new(10, false);
        let mut proof = Proof::none();
        let line = b"ok 00000000000000ff0123456789abcdef 33\n";
        let answer = form.read(Request::Acquire, line, &mut proof);
        assert_eq!(answer, Answer::Granted { fence: 255 });
        assert_eq!(proof.get(), b"00000000000000ff0123456789abcdef");
        for (line, expected) in [
            (&b"timeout\n"[..], Answer::Busy),
            (b"error_max_locks\n", Answer::Refused),
            (b"ok short 33\n", Answer::Refused),
        ] {
            assert_eq!(form.read(Request::Acquire, line, &mut proof), expected);
        }
    }

    #[test]
    fn numbers() {
        let mut out = Vec::new();
        write_number(&mut out, 12);
        assert_eq!(out, b"12 ");
        assert_eq!(split_number(b"12 ok\n"), Some((12, &b"ok\n"[..])));
        assert_eq!(split_number(b"ok\n"), None);
    }
}
