//! Addresses that nobody uses, and connections of a special kind.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicU32, Ordering};

use socket2::{Domain, Socket, Type};

/// An address of the loopback network that no other test of any process uses: a node that is down must find its ports
/// free when it comes back, and connections to others come from 127.0.0.1.
pub fn host() -> IpAddr {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    if !cfg!(target_os = "linux") {
        return Ipv4Addr::LOCALHOST.into();
    }
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let [_, _, high, low] = std::process::id().to_be_bytes();
    Ipv4Addr::new(127, 20 + u8::try_from(count % 200).unwrap(), high, low.max(2)).into()
}

/// Ports that no system gives out by itself, to a listener on port 0 or to a connection: what is free here stays free.
const PORTS: std::ops::Range<u16> = 10_000..32_000;

/// Free ports of an address, each given out once by this process. Bound, but never listened on: a process that another
/// test starts at this moment has a copy of each socket until it is the server, and a copy that listens would keep the
/// port.
pub fn free_addresses(host: impl Into<IpAddr>, count: usize) -> Vec<SocketAddr> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let host = host.into();
    let ports = u32::from(PORTS.end - PORTS.start);
    let candidate = || {
        // Processes begin at places of their own.
        let next =
            std::process::id().wrapping_mul(101).wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed));
        SocketAddr::from((host, PORTS.start + u16::try_from(next % ports).unwrap()))
    };
    let is_free = |address: &SocketAddr| {
        let socket = Socket::new(Domain::for_address(*address), Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&(*address).into()).is_ok()
    };
    let found: Vec<_> =
        std::iter::repeat_with(candidate).take(PORTS.len()).filter(is_free).take(count).collect();
    assert_eq!(found.len(), count, "no free ports of {host}");
    found
}

/// A free port of 127.0.0.1.
pub fn free_address() -> SocketAddr {
    free_addresses(Ipv4Addr::LOCALHOST, 1)[0]
}

/// A connection that comes from an address of the loopback network with this last number.
pub fn connect_from(last: u8, to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    let own = SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0));
    socket.bind(&own.into()).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

/// A connection with small buffers, which is soon full if nobody reads.
pub fn connect_narrow(to: SocketAddr) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.set_recv_buffer_size(8 * 1024).unwrap();
    socket.connect(&to.into()).unwrap();
    socket.into()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_free_address_is_given_once_and_by_nobody_else() {
        let given = free_addresses(host(), 100);
        assert_eq!(given.iter().collect::<BTreeSet<_>>().len(), 100);
        let Ok(range) = std::fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range") else {
            return;
        };
        let first: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        assert!(given.iter().all(|address| address.port() < first), "{range}: {given:?}");
    }
}
