//! Addresses that nobody uses.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
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

/// Free ports of an address, each given out once. Bound, but never listened on: a process that another test starts at
/// this moment has a copy of each socket until it is the server, and a copy that listens would keep the port.
pub fn free_addresses(host: impl Into<IpAddr>, count: usize) -> Vec<SocketAddr> {
    // What is given out is not bound any more: the system may find the same port again.
    static GIVEN: Mutex<BTreeSet<SocketAddr>> = Mutex::new(BTreeSet::new());
    let host = host.into();
    let mut given = GIVEN.lock();
    let (mut bound, mut found) = (Vec::new(), Vec::new());
    while found.len() < count {
        let socket =
            Socket::new(Domain::for_address((host, 0).into()), Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        socket.bind(&SocketAddr::from((host, 0)).into()).unwrap();
        let address = socket.local_addr().unwrap().as_socket().unwrap();
        bound.push(socket);
        if given.insert(address) {
            found.push(address);
        }
    }
    found
}

/// A free port of 127.0.0.1.
pub fn free_address() -> SocketAddr {
    free_addresses(Ipv4Addr::LOCALHOST, 1)[0]
}
