//! dflockd's gRPC API as a load generator uses it: one session and one connection per client.

use std::io;
use std::net::TcpStream;
use std::time::Instant;

use crate::http2::{self, Calls, Method};
use crate::proto::{self, Fields, Value};
use crate::protocol::{
    Answer, Dialect, Greeted, Proof, Protocol, Request, TOKEN_BYTES, WAIT_S, refused,
};

const OPEN: Method = Method { place: 0, path: "/dflockd.v1.Sessions/Open" };
const ACQUIRE: Method = Method { place: 1, path: "/dflockd.v1.Locks/Acquire" };
const RELEASE: Method = Method { place: 2, path: "/dflockd.v1.Locks/Release" };
const RENEW: Method = Method { place: 3, path: "/dflockd.v1.Locks/Renew" };
const MEMBERS: Method = Method { place: 0, path: "/dflockd.v1.Cluster/Members" };

/// dflockd by its gRPC API.
#[derive(Debug)]
pub struct Grpc;

impl Protocol for Grpc {
    fn name(&self) -> &'static str {
        "grpc"
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        Ok(Box::new(Forms::greet(stream, lease_s)?))
    }

    fn leads(&self, stream: &mut TcpStream) -> io::Result<bool> {
        let answer = Calls::default().call(stream, MEMBERS, |_| ())?;
        Ok(http2::message(&answer).is_some_and(member_that_answers_leads))
    }
}

/// What requests of one connection are made of.
#[derive(Debug, Default)]
struct Forms {
    /// What was said on the connection before.
    calls: Calls,
    /// `session`, as a field.
    session: Vec<u8>,
    /// What follows the key of an acquire.
    acquire_end: Vec<u8>,
    /// What follows the token of a renewal.
    renew_end: Vec<u8>,
}

impl Forms {
    /// Opens a session.
    fn greet(stream: &mut TcpStream, lease_s: u64) -> io::Result<Self> {
        let mut forms = Self::default();
        let lease_ms = lease_s * 1000;
        let answer =
            forms.calls.call(stream, OPEN, |message| proto::number(message, 1, lease_ms))?;
        let opened = http2::message(&answer);
        let opened = opened.ok_or_else(|| refused("the opening of a session", &answer))?;
        let session = Fields::bytes(opened, 1);
        if session.is_empty() {
            return Err(io::Error::other("the server opened a session without an id"));
        }
        proto::bytes(&mut forms.session, 1, session);
        proto::number(&mut forms.acquire_end, 7, WAIT_S * 1000);
        proto::number(&mut forms.acquire_end, 8, lease_ms);
        proto::number(&mut forms.renew_end, 7, lease_ms);
        Ok(forms)
    }
}

impl Dialect for Forms {
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        let method = match request {
            Request::Acquire => ACQUIRE,
            Request::Release => RELEASE,
            Request::Renew => RENEW,
        };
        self.calls.write(out, method, |message| {
            message.extend_from_slice(&self.session);
            proto::bytes(message, 4, key);
            match request {
                Request::Acquire => message.extend_from_slice(&self.acquire_end),
                Request::Release => proto::bytes(message, 6, proof.get()),
                Request::Renew => {
                    proto::bytes(message, 6, proof.get());
                    message.extend_from_slice(&self.renew_end);
                }
            }
        });
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        http2::frame(input)
    }

    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
        let Some(message) = http2::message(answer) else { return Answer::Refused };
        if request != Request::Acquire {
            return Answer::Done;
        }
        // A grant, and its token first of all.
        let [0x0a, _, 0x0a, 32, grant @ ..] = message else { return Answer::Busy };
        proof.set_token(grant.get(..TOKEN_BYTES).unwrap_or_default())
    }

    fn reply(&mut self, out: &mut Vec<u8>, answer: &[u8], now: Instant) {
        self.calls.reply(answer, out, now);
    }
}

fn member_that_answers_leads(members: &[u8]) -> bool {
    Fields(members).any(|(tag, member)| match member {
        Value::Bytes(member) if tag == 1 => {
            Fields::number(member, 5) == 1 && Fields::number(member, 6) == 1
        }
        Value::Bytes(_) | Value::Number(_) => false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers() {
        let forms = Forms::default();
        let token = b"00000000000000ff0123456789abcdef";
        let (mut grant, mut message) = (Vec::new(), Vec::new());
        proto::bytes(&mut grant, 1, token);
        proto::number(&mut grant, 2, 255);
        proto::bytes(&mut message, 1, &grant);
        let mut proof = Proof::none();
        let granted = forms.read(Request::Acquire, &http2::answer(Some(&message)), &mut proof);
        assert_eq!((granted, proof.get()), (Answer::Granted { fence: 255 }, &token[..]));
        let empty = http2::answer(Some(b""));
        assert_eq!(forms.read(Request::Acquire, &empty, &mut proof), Answer::Busy);
        assert_eq!(forms.read(Request::Release, &empty, &mut proof), Answer::Done);
        assert_eq!(forms.read(Request::Release, &http2::answer(None), &mut proof), Answer::Refused);
    }

    #[test]
    fn requests() {
        let mut forms = Forms { session: vec![0x0a, 1, b's'], ..Forms::default() };
        let (mut out, mut proof) = (Vec::new(), Proof::none());
        proof.set(b"token");
        forms.write(&mut out, Request::Release, b"key", &mut proof);
        assert_eq!(http2::called(&out), Some(&b"\x0a\x01s\x22\x03key\x32\x05token"[..]));
    }

    #[test]
    fn who_leads() {
        let members = |leads: [bool; 2], answers: [bool; 2]| {
            let mut all = Vec::new();
            for (leads, answers) in leads.into_iter().zip(answers) {
                let mut member = Vec::new();
                proto::bytes(&mut member, 1, b"n1");
                for (tag, it) in [(5, leads), (6, answers)] {
                    // What is false is left out.
                    if it {
                        proto::number(&mut member, tag, 1);
                    }
                }
                proto::bytes(&mut all, 1, &member);
            }
            all
        };
        assert!(member_that_answers_leads(&members([false, true], [false, true])));
        assert!(!member_that_answers_leads(&members([true, false], [false, true])));
        assert!(!member_that_answers_leads(&members([false, false], [true, false])));
    }
}
