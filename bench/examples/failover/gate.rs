//! Proxies before the client ports of members, which can stop to forward without closing anything.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use dflockd_testkit::cluster::Addresses;

/// How often a gate that is shut looks whether it is open again.
const LOOK: Duration = Duration::from_millis(5);

/// A proxy for each member.
pub(crate) struct Gates(Vec<Arc<AtomicBool>>);

impl Gates {
    /// Puts one before each client port; that is where clients are told to go.
    pub(crate) fn before(addresses: &mut Addresses) -> Self {
        let gate = |(member, advertised): (&SocketAddr, &mut SocketAddr)| {
            let listener = TcpListener::bind((member.ip(), 0)).unwrap();
            *advertised = listener.local_addr().unwrap();
            let is_shut = Arc::<AtomicBool>::default();
            let (member, shared) = (*member, Arc::clone(&is_shut));
            thread::spawn(move || {
                for client in listener.incoming() {
                    let shared = Arc::clone(&shared);
                    thread::spawn(move || carry(client.unwrap(), member, &shared));
                }
            });
            is_shut
        };
        Self(addresses.clients.iter().zip(&mut addresses.advertised).map(gate).collect())
    }

    /// Stops to forward, or forwards again: what came meanwhile comes late.
    pub(crate) fn shut(&self, member: usize, shut: bool) {
        self.0[member].store(shut, Ordering::SeqCst);
    }
}

fn carry(client: TcpStream, member: SocketAddr, is_shut: &Arc<AtomicBool>) {
    wait(is_shut);
    let Ok(server) = TcpStream::connect(member) else { return };
    let back = (server.try_clone().unwrap(), client.try_clone().unwrap(), Arc::clone(is_shut));
    thread::spawn(move || pump(back.0, back.1, &back.2));
    pump(client, server, is_shut);
}

fn pump(mut from: TcpStream, mut to: TcpStream, is_shut: &AtomicBool) {
    let _ = to.set_nodelay(true);
    let mut bytes = vec![0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        wait(is_shut);
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // Also the end of a connection does not pass a gate that is shut.
    wait(is_shut);
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}

fn wait(is_shut: &AtomicBool) {
    while is_shut.load(Ordering::SeqCst) {
        thread::sleep(LOOK);
    }
}
