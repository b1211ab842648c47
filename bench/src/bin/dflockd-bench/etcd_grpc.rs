//! etcd's v3lock by gRPC: one lease and one connection per client, and the same frames as for the gRPC API of dflockd.

use std::io;
use std::net::TcpStream;
use std::time::Instant;

use dflockd_bench::http2::{self, Calls, Method};
use dflockd_bench::proto::{self, Fields};
use dflockd_bench::protocol::{Answer, Dialect, Greeted, Proof, Protocol, Request, refused};

use crate::etcd_gateway::Gateway;

const GRANT: Method = Method { place: 0, path: "/etcdserverpb.Lease/LeaseGrant" };
const LOCK: Method = Method { place: 1, path: "/v3lockpb.Lock/Lock" };
const UNLOCK: Method = Method { place: 2, path: "/v3lockpb.Lock/Unlock" };
const KEEP_ALIVE: Method = Method { place: 3, path: "/etcdserverpb.Lease/LeaseKeepAlive" };

/// etcd by gRPC.
#[derive(Debug)]
pub(crate) struct EtcdGrpc;

impl Protocol for EtcdGrpc {
    fn name(&self) -> &'static str {
        "etcd-grpc"
    }

    fn note(&self) -> Option<&'static str> {
        Some("by gRPC")
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        let mut forms = Forms::default();
        let answer =
            forms.calls.call(stream, GRANT, |message| proto::number(message, 1, lease_s))?;
        forms.lease = http2::message(&answer).map_or(0, |message| Fields::number(message, 2));
        if forms.lease == 0 {
            return Err(refused("the request for a lease", &answer));
        }
        Ok(Box::new(forms))
    }

    fn leads(&self, stream: &mut TcpStream) -> io::Result<bool> {
        // The gateway is behind the same port.
        Gateway.leads(stream)
    }
}

/// What requests of one connection are made of.
#[derive(Debug, Default)]
struct Forms {
    /// What was said on the connection before.
    calls: Calls,
    lease: u64,
}

impl Dialect for Forms {
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        match request {
            Request::Acquire => self.calls.write(out, LOCK, |message| {
                proto::bytes(message, 1, key);
                proto::number(message, 2, self.lease);
            }),
            Request::Release => {
                self.calls.write(out, UNLOCK, |message| proto::bytes(message, 1, proof.get()));
            }
            Request::Renew => {
                self.calls.write(out, KEEP_ALIVE, |message| proto::number(message, 1, self.lease));
            }
        }
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        http2::frame(input)
    }

    fn read(&self, request: Request, answer: &[u8], proof: &mut Proof) -> Answer {
        let Some(message) = http2::message(answer) else { return Answer::Refused };
        match request {
            Request::Acquire => match Fields::bytes(message, 2) {
                b"" => Answer::Refused,
                key if proof.set(key) => Answer::Granted { fence: 0 },
                _ => Answer::Refused,
            },
            Request::Release => Answer::Done,
            // A lease that has ended has no time left.
            Request::Renew if Fields::number(message, 3) > 0 => Answer::Done,
            Request::Renew => Answer::Refused,
        }
    }

    fn reply(&mut self, out: &mut Vec<u8>, answer: &[u8], now: Instant) {
        self.calls.reply(answer, out, now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests() {
        let mut forms = Forms { lease: 300, ..Forms::default() };
        let mut proof = Proof::none();
        proof.set(b"k/12c");
        for (request, expected) in [
            (Request::Acquire, &b"\x0a\x01k\x10\xac\x02"[..]),
            (Request::Release, b"\x0a\x05k/12c"),
            (Request::Renew, b"\x08\xac\x02"),
        ] {
            let mut out = Vec::new();
            forms.write(&mut out, request, b"k", &mut proof);
            let call = out.strip_prefix(http2::PREFACE).unwrap_or(&out);
            assert_eq!(http2::message(call), Some(expected), "{request:?}");
        }
    }

    /// The frame of an answer that carries `message`.
    fn answer(message: &[u8]) -> Vec<u8> {
        let length = u8::try_from(message.len()).unwrap();
        let (head, prefix) = ([0, 0, length + 5, 0, 0, 0, 0, 0, 1], [0, 0, 0, 0, length]);
        [&head[..], &prefix, message].concat()
    }

    #[test]
    fn answers() {
        let forms = Forms::default();
        let mut proof = Proof::none();
        let mut message = Vec::new();
        proto::bytes(&mut message, 1, b"header");
        let empty = answer(&message);
        proto::bytes(&mut message, 2, b"k/12c");
        let granted = answer(&message);
        let first = forms.read(Request::Acquire, &granted, &mut proof);
        assert_eq!((first, proof.get()), (Answer::Granted { fence: 0 }, &b"k/12c"[..]));
        assert_eq!(forms.read(Request::Acquire, &empty, &mut proof), Answer::Refused);
        assert_eq!(forms.read(Request::Release, &empty, &mut proof), Answer::Done);
        assert_eq!(forms.read(Request::Renew, &empty, &mut proof), Answer::Refused, "no time left");
        assert_eq!(forms.read(Request::Release, b"", &mut proof), Answer::Refused);
    }
}
