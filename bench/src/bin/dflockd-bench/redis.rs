//! Redis: `SET key token NX PX lease`, and scripts that compare the token before they delete or extend. A lock that is
//! taken is tried again after a pause: Redis has no queue.

use std::io::{self, Write};
use std::net::TcpStream;

use dflockd_bench::Random;
use dflockd_bench::protocol::{
    Answer, Dialect, Greeted, Proof, Protocol, Request, concat, decimal, line, read_answer,
};

const RELEASE_SCRIPT: &str =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) else return 0 end";
const RENEW_SCRIPT: &str = "if redis.call('get',KEYS[1])==ARGV[1] then \
     return redis.call('pexpire',KEYS[1],ARGV[2]) else return 0 end";

/// Redis, one instance.
#[derive(Debug)]
pub(crate) struct Redis;

impl Protocol for Redis {
    fn name(&self) -> &'static str {
        "redis"
    }

    fn queues(&self) -> bool {
        false
    }

    fn pipelines(&self) -> bool {
        true
    }

    fn greet(&self, stream: &mut TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        // Tokens of connections that are open at the same time must differ.
        let seed = u64::from(stream.local_addr()?.port()) << 32 | u64::from(std::process::id());
        Ok(Box::new(Scripts {
            random: Random::new(seed),
            lease_ms: (lease_s * 1000).to_string(),
            release: load_script(stream, RELEASE_SCRIPT)?,
            renew: load_script(stream, RENEW_SCRIPT)?,
        }))
    }
}

fn load_script(stream: &mut TcpStream, script: &str) -> io::Result<String> {
    let mut request = Vec::new();
    resp(&mut request, &[b"SCRIPT", b"LOAD", script.as_bytes()]);
    stream.write_all(&request)?;
    let length = read_answer(stream, line)?;
    let digest = read_answer(stream, line)?;
    if length != b"$40\r\n" {
        return Err(io::Error::other(String::from_utf8_lossy(&length).into_owned()));
    }
    Ok(String::from_utf8_lossy(digest.trim_ascii_end()).into_owned())
}

#[derive(Debug)]
struct Scripts {
    /// Draws tokens.
    random: Random,
    lease_ms: String,
    /// The digests of the two scripts.
    release: String,
    renew: String,
}

impl Dialect for Scripts {
    fn write(&mut self, out: &mut Vec<u8>, request: Request, key: &[u8], proof: &mut Proof) {
        let lease_ms = self.lease_ms.as_bytes();
        match request {
            Request::Acquire => {
                let token = hex(self.random.bits());
                proof.set(&token);
                resp(out, &[b"SET", key, &token, b"NX", b"PX", lease_ms]);
            }
            Request::Release => {
                resp(out, &[b"EVALSHA", self.release.as_bytes(), b"1", key, proof.get()]);
            }
            Request::Renew => {
                let script = self.renew.as_bytes();
                resp(out, &[b"EVALSHA", script, b"1", key, proof.get(), lease_ms]);
            }
        }
    }

    fn frame(&self, input: &[u8]) -> Option<usize> {
        line(input)
    }

    fn read(&self, request: Request, answer: &[u8], _proof: &mut Proof) -> Answer {
        match (request, answer) {
            (Request::Acquire, b"+OK\r\n") => Answer::Granted { fence: 0 },
            (Request::Acquire, b"$-1\r\n") => Answer::Busy,
            (Request::Release | Request::Renew, b":1\r\n") => Answer::Done,
            _ => Answer::Refused,
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    fn scripts() -> Scripts {
        Scripts {
            random: Random::new(0),
            lease_ms: "10000".into(),
            release: "aa".into(),
            renew: "bb".into(),
        }
    }

    #[test]
    fn requests() {
        for (request, expected) in [
            (
                Request::Acquire,
                "*6\r\n$3\r\nSET\r\n$1\r\nk\r\n$16\r\ne220a8397b1dcdaf\r\n$2\r\nNX\r\n$2\r\nPX\r\n\
                 $5\r\n10000\r\n",
            ),
            (
                Request::Release,
                "*5\r\n$7\r\nEVALSHA\r\n$2\r\naa\r\n$1\r\n1\r\n$1\r\nk\r\n$5\r\nproof\r\n",
            ),
        ] {
            let (mut out, mut proof) = (Vec::new(), Proof::none());
            proof.set(b"proof");
            scripts().write(&mut out, request, b"k", &mut proof);
            assert_eq!(String::from_utf8(out).unwrap(), expected);
        }
    }

    #[test]
    fn answers() {
        let read = |request, line: &[u8]| scripts().read(request, line, &mut Proof::none());
        assert_eq!(read(Request::Acquire, b"+OK\r\n"), Answer::Granted { fence: 0 });
        assert_eq!(read(Request::Acquire, b"$-1\r\n"), Answer::Busy);
        assert_eq!(read(Request::Release, b":1\r\n"), Answer::Done);
        assert_eq!(read(Request::Release, b":0\r\n"), Answer::Refused);
        assert_eq!(read(Request::Acquire, b"-OOM\r\n"), Answer::Refused);
    }
}
