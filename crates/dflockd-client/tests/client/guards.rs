//! What a guard promises: how long it is valid, and that it tells when it is lost.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dflockd_client::{Client, Error, Guard, Instant, Lost, OnDisconnect};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::millis;
use dflockd_testkit::process::{Reaper, example};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader as AsyncReader};
use tokio::net::{TcpListener, TcpStream};

use super::proxy::Proxy;
use super::server::{LONG, Process, SLACK, acquiring, crowd, crowded, held, in_process, proxied};

/// What a client may rely on of a lease.
fn validity(lease: Duration) -> Duration {
    lease - lease / 100
}

/// The guard is lost for want of answers, and not long after it ceased to be valid.
async fn lost_unreachable(guard: &Guard) {
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Unreachable);
    assert!(!guard.is_valid());
    let late = guard.valid_until().elapsed();
    assert!(late < SLACK, "told {late:?} after its end");
    assert!(guard.valid_until() <= Instant::now());
}

#[tokio::test(flavor = "multi_thread")]
async fn validity_counts_from_the_sending() {
    let (_server, proxy, client) = proxied(OnDisconnect::Keep).await;
    // Short of the hundredth part of the lease, from where on the grant is renewed first.
    let (lease, delay) = (Duration::from_secs(100), millis(400));

    proxy.pass(true, false);
    let before = Instant::now();
    let lock = client.lock("k").lease(lease);
    let acquiring = tokio::spawn(async move { lock.try_acquire().await });
    let heard = async || proxy.heard_at().filter(|at| *at > before);
    let sent_at = eventually("the request", heard).await;
    tokio::time::sleep(delay).await;
    proxy.pass(true, true);
    let guard = soon("the answer", acquiring).await.unwrap().unwrap().unwrap();
    assert!(before + validity(lease) <= guard.valid_until());
    assert!(guard.valid_until() <= sent_at + validity(lease));

    proxy.pass(true, false);
    let before = Instant::now();
    let renewing = tokio::spawn(async move {
        guard.renew().await.unwrap();
        guard
    });
    let heard = async || proxy.heard_at().filter(|at| *at > before);
    let sent_at = eventually("the renewal", heard).await;
    tokio::time::sleep(delay).await;
    proxy.pass(true, true);
    let guard = soon("the answer", renewing).await.unwrap();
    assert!(before + validity(lease) <= guard.valid_until());
    assert!(guard.valid_until() <= sent_at + validity(lease));
}

#[tokio::test]
async fn a_late_grant_is_renewed_first() {
    let (_server, a, b) = in_process().await;
    let lease = Duration::from_secs(3);
    let first = held(&a, "k", LONG).await;
    let waiting = acquiring(b.lock("k").lease(lease));
    crowded(&a, "k", (1, 1)).await;
    tokio::time::sleep(lease + millis(200)).await;
    let freed_at = Instant::now();
    first.release().await.unwrap();
    let guard = soon("the lock", waiting).await.unwrap().unwrap();
    assert!(guard.is_valid());
    assert!(guard.valid_until() > freed_at + lease * 9 / 10);
    assert!(guard.valid_until() <= Instant::now() + validity(lease));
}

#[tokio::test(flavor = "multi_thread")]
async fn renewal_keeps_it() {
    let server = Process::start::<&str>(&[]);
    let (a, b) = (server.client().await, server.client().await);
    let lease = millis(1500);
    let guard = held(&a, "k", lease).await;
    let fence = guard.fence();
    let begun = Instant::now();
    while begun.elapsed() < lease * 3 {
        assert!(guard.is_valid(), "after {:?}", begun.elapsed());
        assert!(guard.valid_until() <= Instant::now() + validity(lease));
        assert!(b.lock("k").try_acquire().await.unwrap().is_none());
        tokio::time::sleep(millis(20)).await;
    }
    assert_eq!(guard.fence(), fence);
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn renewal_comes_at_a_third() {
    let (_server, proxy, client) = proxied(OnDisconnect::Keep).await;
    let lease = Duration::from_secs(6);
    let guard = held(&client, "k", lease).await;
    let granted_at = Instant::now();
    let first = guard.valid_until();
    let renewed = async || (guard.valid_until() > first).then(|| proxy.heard_at().unwrap());
    let renewed_at = eventually("a renewal", renewed).await;
    assert!(renewed_at + millis(50) >= granted_at + lease / 3);
    assert!(renewed_at < granted_at + lease / 3 + SLACK);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_when_the_server_stands_still() {
    let server = Process::start::<&str>(&[]);
    let client = server.client().await;
    let guard = held(&client, "k", millis(1200)).await;
    server.signal("STOP");
    lost_unreachable(&guard).await;
    server.signal("CONT");
    // It stays lost, whatever the server says later.
    client.ping().await.unwrap();
    assert!(!guard.is_valid());
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Unreachable);
    let other = server.client().await;
    let next = soon("the lock", other.lock("k").acquire()).await.unwrap();
    assert!(next.fence() > guard.fence());
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_when_nothing_passes() {
    let server = Process::start::<&str>(&[]);
    for (to, from) in [(false, false), (true, false), (false, true)] {
        let proxy = Proxy::to(server.address).await;
        let client = proxy.builder().connect().await.unwrap();
        let guard = held(&client, "k", millis(1200)).await;
        proxy.pass(to, from);
        let _ = tokio::time::timeout(millis(1), guard.renew()).await;
        lost_unreachable(&guard).await;
        let next = server.client().await;
        let next = soon("the lock", next.lock("k").acquire()).await.unwrap();
        assert!(!guard.is_valid() && next.fence() > guard.fence());
        next.release().await.unwrap();
        drop(guard);
        proxy.pass(true, true);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_hangs_is_replaced() {
    let server = Process::start::<&str>(&[]);
    let proxy = Proxy::to(server.address).await;
    let builder = proxy.builder().request_timeout(millis(500));
    let client = builder.connect().await.unwrap();
    client.ping().await.unwrap();
    // What stands now never carries anything again, as after a change of the network; new ones would.
    proxy.hang();
    let works = async || client.ping().await.is_ok();
    eventually("the client finds a way", works).await;
}

#[tokio::test]
async fn lost_when_somebody_releases_it() {
    let (_server, a, b) = in_process().await;
    let guard = held(&a, "k", millis(900)).await;
    b.release_token(b"k", false, guard.token()).await.unwrap();
    let next = held(&b, "k", LONG).await;
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Expired);
    assert!(!guard.is_valid());
    assert!(matches!(guard.release().await, Err(Error::Refused(_))));
    assert!(next.is_valid());
    next.renew().await.unwrap();
}

#[tokio::test]
async fn the_second_reason_does_not_count() {
    let server = Process::start(&["--admin-token", "adm1n"]);
    let client = server.client().await;
    let guard = held(&client, "k", millis(900)).await;
    client.force_release(b"k", false, guard.fence(), "adm1n", "because").await.unwrap();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Forced);
    let valid_until = guard.valid_until();
    eventually("its lease ends", async || valid_until.remaining().is_zero()).await;
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Forced);
}

#[tokio::test]
async fn the_release_tells() {
    let (_server, a, b) = in_process().await;
    let guard = held(&a, "k", LONG).await;
    guard.release().await.unwrap();
    assert_eq!(crowd(&a, "k").await, (0, 0));
    let guard = held(&a, "k", LONG).await;
    b.release_token(b"k", false, guard.token()).await.unwrap();
    assert!(matches!(guard.release().await, Err(Error::Refused(_))));
    // A release that is dropped half way is done in the background.
    let guard = held(&a, "k", LONG).await;
    drop(tokio::time::timeout(Duration::ZERO, guard.release()).await);
    crowded(&b, "k", (0, 0)).await;
}

/// The thread stands still past the lease, and nothing in the background has run when it goes on.
#[tokio::test]
async fn known_at_the_first_look_after_a_pause() {
    let server = Process::start::<&str>(&[]);
    let client = server.client().await;
    let lease = millis(600);
    let guard = held(&client, "k", lease).await;
    std::thread::sleep(lease);
    assert!(!guard.is_valid());
    let other = server.client().await;
    let next = soon("the lock", other.lock("k").acquire()).await.unwrap();
    assert!(next.fence() > guard.fence());
    assert!(!guard.is_valid());
    let reason = soon("the loss", guard.lost()).await;
    assert!(matches!(reason, Lost::Unreachable | Lost::Expired), "{reason}");
}

/// The holder of the example is stopped past its lease, somebody else writes, then the holder goes on: it knows
/// that its lock is gone, and what it writes all the same is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_paused_holder_is_fenced_off() {
    let server = Process::start::<&str>(&[]);
    let child = Command::new(example("fenced_writes"))
        .arg(server.address.to_string())
        .stdout(Stdio::piped())
        .spawn();
    let mut child = Reaper(child.unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines();
    let told = tokio::task::spawn_blocking(move || {
        let told: Vec<String> = lines.by_ref().map_while(Result::ok).collect();
        (told, child.0.wait().unwrap())
    });
    let (told, status) = soon("the example", told).await.unwrap();
    assert!(status.success(), "{told:?}");
    let value = |prefix: &str| -> String {
        let line = told.iter().find_map(|line| line.strip_prefix(prefix));
        line.unwrap_or_else(|| panic!("no {prefix:?} in {told:?}")).to_owned()
    };
    let fence = |prefix: &str| -> u64 { value(prefix).parse().unwrap() };
    assert!(fence("first holder: fence ") < fence("second holder: fence "));
    assert_eq!(value("first holder: wrote in time, status "), "204");
    assert_eq!(value("second holder: wrote, status "), "204");
    assert_eq!(value("first holder: valid after the pause: "), "false");
    assert_eq!(value("first holder: wrote all the same, status "), "412");
    assert_eq!(value("stored: "), "by the second");
}

/// A server that can decide no renewal while `undecided` is set, made of one that can. Counts what it could not decide.
async fn undecided_before(
    target: SocketAddr,
    undecided: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (client, _) = listener.accept().await?;
        let (from_client, mut to_client) = client.into_split();
        let (from_server, mut to_server) = TcpStream::connect(target).await?.into_split();
        let mut asked = AsyncReader::new(from_client).lines();
        let mut told = AsyncReader::new(from_server).lines();
        let mut request: Vec<String> = Vec::new();
        loop {
            tokio::select! {
                line = told.next_line() => {
                    let Some(line) = line? else { break };
                    to_client.write_all(format!("{line}\n").as_bytes()).await?;
                }
                line = asked.next_line() => {
                    let Some(line) = line? else { break };
                    request.push(line);
                    if request.len() < 3 {
                        continue;
                    }
                    match request[0].split_once(' ') {
                        Some((number, "n")) if undecided.load(Ordering::SeqCst) => {
                            count.fetch_add(1, Ordering::SeqCst);
                            let answer = format!("{number} error_unavailable\n");
                            to_client.write_all(answer.as_bytes()).await?;
                        }
                        _ => {
                            let request = format!("{}\n", request.join("\n"));
                            to_server.write_all(request.as_bytes()).await?;
                        }
                    }
                    request.clear();
                }
            }
        }
        std::io::Result::Ok(())
    });
    address
}

/// GUARANTEES 20: a renewal that nobody could decide is tried again; the hold is as much ours as before.
#[tokio::test(flavor = "multi_thread")]
async fn what_nobody_decides_is_not_lost() {
    let server = Process::start::<&str>(&[]);
    let (undecided, count) = (Arc::<AtomicBool>::default(), Arc::<AtomicUsize>::default());
    let (flag, counted) = (Arc::clone(&undecided), Arc::clone(&count));
    let address = undecided_before(server.address, flag, counted).await;
    let client = Client::connect(address.to_string()).await.unwrap();
    // Another lease than the session's: it is renewed by itself.
    let guard = held(&client, "k", Duration::from_secs(6)).await;
    undecided.store(true, Ordering::SeqCst);
    let refused = guard.renew().await.unwrap_err();
    assert!(refused.may_retry() && !refused.may_have_applied(), "{refused}");
    let several = async || count.load(Ordering::SeqCst) >= 3;
    eventually("renewals that nobody decides", several).await;
    assert!(guard.is_valid());
    let until = guard.valid_until();
    undecided.store(false, Ordering::SeqCst);
    eventually("a renewal", async || guard.valid_until() > until).await;
    guard.release().await.unwrap();
}
