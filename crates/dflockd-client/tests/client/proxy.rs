//! What stands between a client and its server, and can go wrong.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use dflockd_client::{Client, ClientBuilder, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// Something between client and server that can go wrong.
pub(super) struct Proxy {
    pub(super) address: SocketAddr,
    wire: Arc<Wire>,
}

struct Wire {
    /// Counts cuts.
    cuts: watch::Sender<u64>,
    /// Whether bytes pass, to the server and from it.
    passes: watch::Sender<[bool; 2]>,
    /// Counts hangs.
    hangs: watch::Sender<u64>,
    refuses: AtomicBool,
    connections: AtomicUsize,
    /// When the client last sent anything.
    heard_at: Mutex<Option<Instant>>,
}

impl Proxy {
    pub(super) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let wire = Arc::new(Wire {
            cuts: watch::Sender::new(0),
            passes: watch::Sender::new([true; 2]),
            hangs: watch::Sender::new(0),
            refuses: AtomicBool::new(false),
            connections: AtomicUsize::new(0),
            heard_at: Mutex::new(None),
        });
        let shared = Arc::clone(&wire);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                if shared.refuses.load(Ordering::SeqCst) {
                    continue;
                }
                tokio::spawn(carry(Arc::clone(&shared), client, target));
            }
        });
        Self { address, wire }
    }

    pub(super) fn builder(&self) -> ClientBuilder {
        Client::builder().server(self.address.to_string())
    }

    /// Closes all connections that stand now.
    pub(super) fn cut(&self) {
        self.wire.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Lets bytes pass or holds them, to the server and from it.
    pub(super) fn pass(&self, to: bool, from: bool) {
        self.wire.passes.send_replace([to, from]);
    }

    /// From now on nothing passes on the connections that stand, but they are not closed.
    pub(super) fn hang(&self) {
        self.wire.hangs.send_modify(|hangs| *hangs += 1);
    }

    /// Closes every new connection at once.
    pub(super) fn refuse(&self, refuse: bool) {
        self.wire.refuses.store(refuse, Ordering::SeqCst);
    }

    /// How many connections there ever were.
    pub(super) fn connections(&self) -> usize {
        self.wire.connections.load(Ordering::SeqCst)
    }

    pub(super) fn heard_at(&self) -> Option<Instant> {
        *self.wire.heard_at.lock().unwrap()
    }
}

async fn carry(wire: Arc<Wire>, client: TcpStream, target: SocketAddr) {
    let (mut cuts, mut hangs) = (wire.cuts.subscribe(), wire.hangs.subscribe());
    let Ok(server) = TcpStream::connect(target).await else { return };
    wire.connections.fetch_add(1, Ordering::SeqCst);
    client.set_nodelay(true).unwrap();
    server.set_nodelay(true).unwrap();
    // Here, so that they stay open while the connection hangs.
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (client.into_split(), server.into_split());
    let heard = || *wire.heard_at.lock().unwrap() = Some(Instant::now());
    tokio::select! {
        _ = cuts.changed() => {}
        _ = hangs.changed() => { let _ = cuts.changed().await; }
        () = pump(&mut from_client, &mut to_server, wire.passes.subscribe(), 0, heard) => {}
        () = pump(&mut from_server, &mut to_client, wire.passes.subscribe(), 1, || {}) => {}
    }
}

async fn pump(
    from: &mut OwnedReadHalf,
    to: &mut OwnedWriteHalf,
    mut passes: watch::Receiver<[bool; 2]>,
    direction: usize,
    heard: impl Fn(),
) {
    let mut bytes = [0; 16 * 1024];
    while let Ok(count @ 1..) = from.read(&mut bytes).await {
        heard();
        if passes.wait_for(|passes| passes[direction]).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..count]).await.is_err() {
            return;
        }
    }
}
