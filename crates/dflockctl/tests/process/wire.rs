//! A wire between the command line and a server.

use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// A wire to a server that can be cut.
pub(super) struct Wire {
    pub(super) address: SocketAddr,
    ends: Arc<Mutex<Vec<TcpStream>>>,
}

impl Wire {
    pub(super) fn to(server: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let ends: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let kept = Arc::clone(&ends);
        thread::spawn(move || {
            for near in listener.incoming() {
                let (Ok(near), Ok(far)) = (near, TcpStream::connect(server)) else { return };
                let clone = |stream: &TcpStream| stream.try_clone().unwrap();
                kept.lock().unwrap().extend([clone(&near), clone(&far)]);
                for (mut from, mut to) in [(clone(&near), clone(&far)), (far, near)] {
                    thread::spawn(move || {
                        let _ = std::io::copy(&mut from, &mut to);
                        let _ = to.shutdown(Shutdown::Both);
                    });
                }
            }
        });
        Self { address, ends }
    }

    /// Breaks all connections; new ones can be made. Returns how many there were.
    pub(super) fn cut(&self) -> usize {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap());
        for end in &ends {
            let _ = end.shutdown(Shutdown::Both);
        }
        ends.len() / 2
    }

    pub(super) fn connections(&self) -> usize {
        self.ends.lock().unwrap().len() / 2
    }
}
