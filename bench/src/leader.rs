//! Who leads a cluster, for loads that go to one member only.

use std::io;
use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::link;
use crate::protocol::Protocol;

/// How long a cluster may be without a leader.
const WITHIN: Duration = Duration::from_secs(15);

/// How long until it is asked again.
const PAUSE: Duration = Duration::from_millis(100);

/// The leader among `servers`. One alone need not be asked.
pub(crate) fn find_among(
    protocol: &dyn Protocol,
    servers: &[SocketAddr],
) -> io::Result<SocketAddr> {
    if let &[only] = servers {
        return Ok(only);
    }
    let give_up_at = Instant::now() + WITHIN;
    loop {
        for &server in servers {
            if protocol.leads(&mut link::connect(server)?)? {
                return Ok(server);
            }
        }
        if Instant::now() > give_up_at {
            return Err(io::Error::other(format!(
                "no leader among the servers of {}",
                protocol.name()
            )));
        }
        thread::sleep(PAUSE);
    }
}
