//! The network between the members of a cluster: every connection between two of them goes through here, and each
//! direction of each pair can be cut or slowed down. What is cut says nothing: bytes wait, and come late when it is
//! healed. And somebody can send a frame of his own between two of a member's.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use crate::cluster::{Addresses, NAMES};
use crate::line::PATIENCE;
use crate::millis;

/// How often a pump looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(50);

/// All connections between the members.
pub struct Proxy {
    shared: Arc<Shared>,
}

/// A direction: from, to.
type Way = (usize, usize);

#[derive(Default)]
struct Shared {
    /// Directions that are cut: from, to.
    cut: Mutex<BTreeSet<(usize, usize)>>,
    /// What each direction takes longer.
    delays: Mutex<BTreeMap<Way, Duration>>,
    /// What is to be sent between two frames: from, to, the frame with its length.
    injected: Mutex<Option<(Way, Vec<u8>)>>,
    stopped: AtomicBool,
}

impl Proxy {
    /// One listener per member in front of its peer port; that is where the others dial it.
    pub fn between(addresses: &mut Addresses) -> Self {
        let proxy = Self { shared: Arc::default() };
        for (to, (peer, dialed)) in addresses.peers.iter().zip(&mut addresses.dialed).enumerate() {
            *dialed = proxy.in_front_of(to, *peer);
        }
        proxy
    }

    /// A listener in front of the peer port of one more member; gives where the others dial it.
    pub fn in_front_of(&self, to: usize, peer: SocketAddr) -> SocketAddr {
        let listener = TcpListener::bind((peer.ip(), 0)).unwrap();
        let dialed = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        let shared = Arc::clone(&self.shared);
        thread::spawn(move || listen(&listener, to, peer, &shared));
        dialed
    }

    /// Nothing gets from one member to another any more.
    pub fn cut(&self, from: usize, to: usize) {
        self.shared.cut.lock().unwrap().insert((from, to));
    }

    /// A member is alone.
    pub fn isolate(&self, member: usize, others: &[usize]) {
        for &other in others {
            self.cut(member, other);
            self.cut(other, member);
        }
    }

    /// Sends a frame as if it came from one member to another, once, on their connection for small frames.
    pub fn inject(&self, from: usize, to: usize, frame: &[u8]) {
        let length = u32::try_from(frame.len()).unwrap().to_le_bytes();
        let bytes = [&length[..], frame].concat();
        *self.shared.injected.lock().unwrap() = Some(((from, to), bytes));
    }

    /// Whether it was sent.
    pub fn has_injected(&self) -> bool {
        self.shared.injected.lock().unwrap().is_none()
    }

    /// What one member sends to another takes this much longer.
    pub fn delay(&self, from: usize, to: usize, by: Duration) {
        self.shared.delays.lock().unwrap().insert((from, to), by);
    }

    /// All directions work again, without delay.
    pub fn heal(&self) {
        self.shared.cut.lock().unwrap().clear();
        self.shared.delays.lock().unwrap().clear();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::Relaxed);
    }
}

impl Shared {
    fn is_cut(&self, from: usize, to: usize) -> bool {
        self.cut.lock().unwrap().contains(&(from, to))
    }

    fn delay(&self, way: Way) -> Option<Duration> {
        self.delays.lock().unwrap().get(&way).copied()
    }

    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }
}

fn listen(listener: &TcpListener, to: usize, peer: SocketAddr, shared: &Arc<Shared>) {
    while !shared.is_stopped() {
        let Ok((dialer, _)) = listener.accept() else {
            thread::sleep(millis(5));
            continue;
        };
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let _ = carry(dialer, to, peer, &shared);
        });
    }
}

/// Both directions of one connection. Its dialer is known by its name in the first bytes.
fn carry(
    mut dialer: TcpStream,
    to: usize,
    peer: SocketAddr,
    shared: &Arc<Shared>,
) -> std::io::Result<()> {
    dialer.set_nonblocking(false)?;
    dialer.set_nodelay(true)?;
    dialer.set_read_timeout(Some(Duration::from_secs(5)))?;
    let mut hello = vec![0; 4096];
    let count = dialer.read(&mut hello)?;
    hello.truncate(count);
    let names = |name: &str| hello.windows(name.len()).any(|part| part == name.as_bytes());
    let from = (0..NAMES.len()).find(|&at| at != to && names(NAMES[at]));
    let Some(from) = from else { return Ok(()) };
    let wait = || {
        while shared.is_cut(from, to) && !shared.is_stopped() {
            thread::sleep(millis(5));
        }
    };
    wait();
    // If nobody listens there, the dialer hears of it by the end of its own connection.
    let mut acceptor = TcpStream::connect(peer)?;
    acceptor.set_nodelay(true)?;
    acceptor.write_all(&hello)?;
    let (back_from, back_to) = (acceptor.try_clone()?, dialer.try_clone()?);
    let other = Arc::clone(shared);
    let back = thread::spawn(move || pump(back_from, back_to, (to, from), &other, None));
    let mut frames = Frames::default();
    frames.pass(&hello);
    // Length, tag, magic, version and mode come before the lane.
    let is_main = hello.get(16) == Some(&0);
    pump(dialer, acceptor, (from, to), shared, is_main.then_some(frames));
    let _ = back.join();
    Ok(())
}

/// Where frames end in what one side sends: each message and each frame has its length before it.
#[derive(Default)]
struct Frames {
    length: Vec<u8>,
    left: usize,
    ended: usize,
}

impl Frames {
    /// Hello, proof and verdict come before the first frame.
    const HANDSHAKE: usize = 3;

    fn pass(&mut self, bytes: &[u8]) {
        for byte in bytes {
            if self.left > 0 {
                self.left -= 1;
            } else {
                self.length.push(*byte);
                let Ok(length) = <[u8; 4]>::try_from(&self.length[..]) else { continue };
                self.length.clear();
                self.left = usize::try_from(u32::from_le_bytes(length)).unwrap();
            }
            self.ended += usize::from(self.left == 0);
        }
    }

    /// Whether the next byte is the first of a frame.
    fn is_between(&self) -> bool {
        self.left == 0 && self.length.is_empty() && self.ended > Self::HANDSHAKE
    }
}

fn pump(
    mut source: TcpStream,
    mut sink: TcpStream,
    way: (usize, usize),
    shared: &Shared,
    mut frames: Option<Frames>,
) {
    let _ = source.set_read_timeout(Some(LOOK));
    let mut bytes = vec![0; 64 * 1024];
    while !shared.is_stopped() {
        let count = match source.read(&mut bytes) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if PATIENCE.contains(&error.kind()) => continue,
            Err(_) => break,
        };
        if let Some(delay) = shared.delay(way) {
            thread::sleep(delay);
        }
        while shared.is_cut(way.0, way.1) && !shared.is_stopped() {
            thread::sleep(millis(5));
        }
        if sink.write_all(&bytes[..count]).is_err() {
            break;
        }
        let Some(frames) = &mut frames else { continue };
        frames.pass(&bytes[..count]);
        let mut injected = shared.injected.lock().unwrap();
        if frames.is_between()
            && let Some((_, frame)) = injected.take_if(|(between, _)| *between == way)
        {
            drop(injected);
            if sink.write_all(&frame).is_err() {
                break;
            }
        }
    }
    let _ = source.shutdown(Shutdown::Both);
    let _ = sink.shutdown(Shutdown::Both);
}
