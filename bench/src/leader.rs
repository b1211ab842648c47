//! Who leads a cluster, for loads that go to one member only.

use std::io::{self, BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use super::target::{Target, find, member, post};
use super::{grpc, link};

/// How long a cluster may be without a leader.
const WITHIN: Duration = Duration::from_secs(15);

/// How long until it is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// The leader among `servers`. One alone need not be asked.
pub(crate) fn find_among(target: Target, servers: &[SocketAddr]) -> io::Result<SocketAddr> {
    if let &[only] = servers {
        return Ok(only);
    }
    let give_up_at = Instant::now() + WITHIN;
    loop {
        for &server in servers {
            if leads(target, &mut link::connect(server)?)? {
                return Ok(server);
            }
        }
        if Instant::now() > give_up_at {
            return Err(io::Error::other(format!(
                "no leader among the servers of {}",
                target.name()
            )));
        }
        thread::sleep(PAUSE);
    }
}

fn leads(target: Target, stream: &mut TcpStream) -> io::Result<bool> {
    match target {
        Target::Dflockd => {
            stream.write_all(b"stats\n_\n_\n")?;
            let mut line = Vec::new();
            BufReader::new(stream).read_until(b'\n', &mut line)?;
            Ok(find(&line, b"\"role\":\"leader\"").is_some())
        }
        Target::Grpc => grpc::leads(stream),
        Target::Etcd | Target::EtcdGrpc => {
            let mut request = Vec::new();
            post(&mut request, "/v3/maintenance/status", &[b"{}"]);
            stream.write_all(&request)?;
            Ok(etcd_member_leads(&Target::Etcd.read_answer(stream)?))
        }
        Target::Http | Target::Redis | Target::Echo => {
            Err(io::Error::other(format!("{} does not tell who leads", target.name())))
        }
    }
}

/// Whether the member that answered is the one it calls leader.
fn etcd_member_leads(answer: &[u8]) -> bool {
    let itself = member(answer, b"\"member_id\":\"");
    itself.is_some() && itself == member(answer, b"\"leader\":\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etcd_tells_who_leads() {
        for (leader, expected) in
            [("\"leader\":\"12\",", true), ("\"leader\":\"13\",", false), ("", false)]
        {
            let answer =
                format!("{{\"header\":{{\"member_id\":\"12\"}},{leader}\"raftIndex\":\"8\"}}");
            assert_eq!(etcd_member_leads(answer.as_bytes()), expected, "{answer}");
        }
    }
}
