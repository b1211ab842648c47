//! Servers of earlier generations: no greeting, one connection per lock.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dflockd_client::{Client, Error, Instant, Lost};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{LIMIT, millis};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::server::{LONG, Process, SLACK, acquiring, crowd, crowded, held};

/// What it does with a greeting.
#[derive(Clone, Copy, Debug)]
enum Manners {
    /// Answers `error` and goes on: from v1.8.1.
    Refuses,
    /// Answers `error` and hangs up: before.
    RefusesAndCloses,
    /// Hangs up.
    Closes,
}

/// A server that does not know the greeting, made of one that does.
struct OldServer {
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    manners: Manners,
    target: SocketAddr,
    open: AtomicUsize,
    commands: Mutex<Vec<String>>,
    cuts: watch::Sender<u64>,
}

impl OldServer {
    async fn before(target: SocketAddr, manners: Manners) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            manners,
            target,
            open: AtomicUsize::new(0),
            commands: Mutex::default(),
            cuts: watch::Sender::new(0),
        });
        let all = Arc::clone(&shared);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let shared = Arc::clone(&all);
                tokio::spawn(async move {
                    shared.open.fetch_add(1, Ordering::SeqCst);
                    let mut cuts = shared.cuts.subscribe();
                    tokio::select! {
                        _ = cuts.changed() => {}
                        _ = converse(&shared, client) => {}
                    }
                    shared.open.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        Self { address, shared }
    }

    async fn client(&self) -> Client {
        Client::connect(self.address.to_string()).await.unwrap()
    }

    fn open(&self) -> usize {
        self.shared.open.load(Ordering::SeqCst)
    }

    async fn open_is(&self, count: usize) {
        let what = format!("{count} connections");
        eventually(&what, async || self.open() == count).await;
    }

    fn heard(&self, command: &str) -> usize {
        self.shared.commands.lock().unwrap().iter().filter(|it| *it == command).count()
    }
}

async fn converse(shared: &Shared, client: TcpStream) -> std::io::Result<()> {
    let mut server = TcpStream::connect(shared.target).await?;
    let (from_server, mut to_server) = server.split();
    let (from_client, to_client) = client.into_split();
    let to_client = Arc::new(tokio::sync::Mutex::new(to_client));
    let refusals = Arc::clone(&to_client);
    let requests = async move {
        let mut lines = BufReader::new(from_client).lines();
        while let Some(command) = lines.next_line().await? {
            let (Some(key), Some(arg)) = (lines.next_line().await?, lines.next_line().await?)
            else {
                break;
            };
            shared.commands.lock().unwrap().push(command.clone());
            if command == "hello" {
                if !matches!(shared.manners, Manners::Closes) {
                    refusals.lock().await.write_all(b"error\n").await?;
                }
                if !matches!(shared.manners, Manners::Refuses) {
                    break;
                }
                continue;
            }
            let request = format!("{command}\n{key}\n{arg}\n");
            to_server.write_all(request.as_bytes()).await?;
        }
        Ok(())
    };
    let answers = async move {
        let mut lines = BufReader::new(from_server).lines();
        while let Some(line) = lines.next_line().await? {
            to_client.lock().await.write_all(format!("{line}\n").as_bytes()).await?;
        }
        Ok(())
    };
    tokio::select! {
        ended = requests => ended,
        ended = answers => ended,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn everything_works_with_every_generation() {
    for manners in [Manners::Refuses, Manners::RefusesAndCloses, Manners::Closes] {
        let server = Process::start::<&str>(&[]);
        let old = OldServer::before(server.address, manners).await;
        let (a, b) = (old.client().await, old.client().await);
        assert_eq!(a.session(), None);
        a.ping().await.unwrap_or_else(|error| panic!("{manners:?}: {error}"));
        let modern = server.client().await;

        let first = held(&a, "k", Duration::from_secs(20)).await;
        assert!(first.is_valid());
        assert!(b.lock("k").try_acquire().await.unwrap().is_none());
        assert!(b.lock("k").acquire_timeout(millis(100)).await.unwrap().is_none());
        let waiting = acquiring(b.lock("k").lease(LONG));
        crowded(&modern, "k", (1, 1)).await;
        let fence = first.fence();
        first.release().await.unwrap();
        let second = soon("the lock", waiting).await.unwrap().unwrap();
        assert!(second.fence() > fence);
        second.renew().await.unwrap();
        drop(second);
        crowded(&modern, "k", (0, 0)).await;

        let slot = a.semaphore("s", 1).try_acquire().await.unwrap().unwrap();
        slot.renew().await.unwrap();
        slot.release().await.unwrap();
        let read = a.rw_lock("rw").read().acquire().await.unwrap();
        read.renew().await.unwrap();
        assert!(b.rw_lock("rw").write().try_acquire().await.unwrap().is_none());
        read.release().await.unwrap();
        a.election("e").acquire().await.unwrap().release().await.unwrap();

        let first = held(&a, "k", LONG).await;
        let ticket = b.lock("k").enqueue().await.unwrap();
        assert!(!ticket.is_granted());
        drop(ticket);
        crowded(&modern, "k", (1, 0)).await;
        let ticket = b.lock("k").enqueue().await.unwrap();
        first.release().await.unwrap();
        ticket.wait(LIMIT).await.unwrap().unwrap().release().await.unwrap();
        assert!(b.lock("k").ticket().is_err());

        assert_eq!(a.counter("c").add(3).await, Ok(3));
        assert_eq!(b.counter("c").get().await, Ok(3));
        a.kv("v").set(b"x", Some(LONG)).await.unwrap();
        assert_eq!(b.kv("v").get().await, Ok(Some(b"x".to_vec())));
        a.list("l").push_left(b"x").await.unwrap();
        assert_eq!(b.list("l").pop_left_wait(LIMIT).await, Ok(Some(b"x".to_vec())));
        assert!(!a.stats().await.unwrap().is_empty());
        if matches!(manners, Manners::Refuses | Manners::Closes) {
            let mut signals = a.listen("s.*", None).await.unwrap();
            assert_eq!(b.signal("s.x", b"hi").await, Ok(1));
            assert_eq!(soon("a signal", signals.next()).await.unwrap().payload, b"hi");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_for_each_lock() {
    let server = Process::start::<&str>(&[]);
    let old = OldServer::before(server.address, Manners::Refuses).await;
    let (client, modern) = (old.client().await, server.client().await);
    // One connection for all that is no lock.
    client.ping().await.unwrap();
    old.open_is(1).await;
    let one = held(&client, "one", LONG).await;
    let two = held(&client, "two", LONG).await;
    old.open_is(3).await;
    let waiting = acquiring(client.lock("one"));
    crowded(&modern, "one", (1, 1)).await;
    old.open_is(4).await;
    // Dropping the request closes its connection, and the server forgets the place.
    waiting.abort();
    old.open_is(3).await;
    crowded(&modern, "one", (1, 0)).await;
    one.release().await.unwrap();
    old.open_is(2).await;
    drop(two);
    old.open_is(1).await;
    assert_eq!(crowd(&modern, "two").await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn it_is_renewed() {
    let server = Process::start::<&str>(&[]);
    let old = OldServer::before(server.address, Manners::Refuses).await;
    let (client, modern) = (old.client().await, server.client().await);
    let lease = Duration::from_secs(2);
    let guard = held(&client, "k", lease).await;
    let begun = Instant::now();
    while begun.elapsed() < lease * 2 {
        assert!(guard.is_valid(), "after {:?}", begun.elapsed());
        assert!(modern.lock("k").try_acquire().await.unwrap().is_none());
        tokio::time::sleep(millis(50)).await;
    }
    assert!(old.heard("n") >= 3, "{}", old.heard("n"));
    // Fractions of a second are nothing to old servers: rounded up, never down.
    let brief = held(&client, "brief", millis(1500)).await;
    assert!(brief.lease() >= millis(1500), "{:?}", brief.lease());
}

/// Connection loss is lock loss, and is noticed at once, not at the next renewal.
#[tokio::test(flavor = "multi_thread")]
async fn lost_with_its_connection() {
    let server = Process::start::<&str>(&[]);
    let old = OldServer::before(server.address, Manners::Refuses).await;
    let (client, modern) = (old.client().await, server.client().await);
    let guard = held(&client, "k", LONG).await;
    old.shared.cuts.send_modify(|cuts| *cuts += 1);
    let next = soon("the lock", modern.lock("k").acquire()).await.unwrap();
    let lost = tokio::time::timeout(SLACK, guard.lost()).await;
    assert_eq!(lost, Ok(Lost::Disconnected));
    assert!(!guard.is_valid());
    let released = guard.release().await;
    assert!(matches!(released, Err(Error::Unknown { .. } | Error::Refused(_))), "{released:?}");
    next.renew().await.unwrap();
    // The client itself goes on.
    assert!(held(&client, "other", LONG).await.is_valid());
}

/// Dropped at random moments: nothing is left behind.
#[tokio::test(flavor = "multi_thread")]
async fn dropped_requests() {
    let server = Process::start::<&str>(&[]);
    let old = OldServer::before(server.address, Manners::Closes).await;
    let (client, modern) = (old.client().await, server.client().await);
    let over = Arc::new(AtomicBool::new(false));
    let turns = {
        let (lock, over) = (modern.lock("k").lease(LONG), Arc::clone(&over));
        tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                lock.acquire().await.unwrap().release().await.unwrap();
                tokio::time::sleep(millis(1)).await;
            }
        })
    };
    for round in 0..60 {
        let time = Duration::from_micros(round * 53);
        drop(tokio::time::timeout(time, client.lock("k").lease(LONG).acquire()).await);
    }
    over.store(true, Ordering::SeqCst);
    soon("the last turn", turns).await.unwrap();
    crowded(&modern, "k", (0, 0)).await;
    assert!(modern.lock("k").try_acquire().await.unwrap().is_some());
}
