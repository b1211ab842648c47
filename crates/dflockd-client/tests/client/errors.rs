//! TLS, authentication, and what errors say about a request.

use std::time::Duration;

use dflockd_client::{Client, Error, ErrorCode, OnDisconnect, Transport};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::{Dir, Pair, millis};

use super::proxy::Proxy;
use super::server::{LONG, Process, crowded};

fn error<T>(outcome: Result<T, Error>) -> Error {
    outcome.map(|_| ()).expect_err("it fails")
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_and_a_token() {
    let (pair, other, dir) = (Pair::new(), Pair::new(), Dir::new());
    let [cert, key] = pair.flags(&dir);
    let flags = ["--auth-token", "s3cret", &cert, &key];
    let (server, grpc) = Process::start_with_grpc(&flags);
    for (transport, address) in [(Transport::Lines, server.address), (Transport::Grpc, grpc)] {
        let key = format!("{transport:?}");
        let plain = || Client::builder().transport(transport).server(address.to_string());
        let builder = || plain().tls(pair.client());

        let client = builder().auth_token("s3cret").connect().await.unwrap();
        let guard = client.lock(key.as_str()).try_acquire().await.unwrap().unwrap();
        guard.renew().await.unwrap();
        let mut signals = client.listen("s", None).await.unwrap();
        assert_eq!(client.signal("s", b"hi").await, Ok(1));
        assert_eq!(soon("a signal", signals.next()).await.unwrap().payload, b"hi");
        let named = format!("localhost:{}", address.port());
        let named = builder().server(named).auth_token("s3cret").connect().await.unwrap();
        assert!(named.lock(key.as_str()).try_acquire().await.unwrap().is_none());

        assert_eq!(error(builder().auth_token("wrong").connect().await), Error::Auth);
        assert!(!Error::Auth.may_have_applied() && !Error::Auth.may_retry());
        assert_eq!(error(builder().connect().await), Error::Auth);

        let distrusting = plain().tls(other.client()).auth_token("s3cret");
        let distrusted = error(distrusting.connect().await);
        assert!(matches!(distrusted, Error::Unreachable { .. }), "{distrusted}");
        assert!(!distrusted.may_have_applied());
        let plain = plain().auth_token("s3cret").connect_timeout(Duration::from_secs(5));
        assert!(plain.connect().await.is_err());
        assert!(guard.is_valid());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_tls() {
    let server = Process::start(&["--auth-token", "s3cret"]);
    let client = server.builder().auth_token("s3cret").connect().await.unwrap();
    client.ping().await.unwrap();
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
        let builder = server.builder().on_disconnect(on_disconnect);
        assert_eq!(error(builder.clone().auth_token("wrong").connect().await), Error::Auth);
        assert_eq!(error(builder.connect().await), Error::Auth, "no token at all");
    }
}

/// The token changes while a client is connected: it is told at its next connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_is_no_longer_right() {
    let dir = Dir::new();
    let file = dir.write("token", "one");
    let server = Process::start(&["--auth-token-file", &file]);
    let proxy = Proxy::to(server.address).await;
    let client = proxy.builder().auth_token("one").connect().await.unwrap();
    dir.write("token", "two");
    server.signal("HUP");
    let refused = async || {
        proxy.cut();
        client.counter("c").get().await == Err(Error::Auth)
    };
    eventually("the refusal", refused).await;
    let other = proxy.builder().auth_token("two").connect().await.unwrap();
    other.ping().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_there() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    drop(listener);
    let error = error(Client::connect(address.clone()).await);
    let Error::Unreachable { server, .. } = &error else { panic!("{error}") };
    assert_eq!(*server, address);
    assert!(!error.may_have_applied() && error.may_retry());
}

#[tokio::test(flavor = "multi_thread")]
async fn gone_meanwhile() {
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
        let server = Process::start::<&str>(&[]);
        let builder = server.builder().request_timeout(millis(300)).on_disconnect(on_disconnect);
        let client = builder.connect().await.unwrap();
        drop(server);
        // The first request may still have been sent to the connection that was dying.
        let gone = async || {
            let error = error(client.counter("c").add(1).await);
            (!matches!(error, Error::Unknown { .. })).then_some(error)
        };
        let error = eventually("it is known to be gone", gone).await;
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
        assert!(!error.may_have_applied() && error.may_retry());
        let error = self::error(client.lock("k").try_acquire().await);
        assert!(matches!(error, Error::Unreachable { .. }), "{error}");
    }
}

/// The request arrives, its answer does not.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer() {
    let server = Process::start::<&str>(&[]);
    for on_disconnect in [OnDisconnect::Keep, OnDisconnect::Release] {
        let proxy = Proxy::to(server.address).await;
        let builder = proxy.builder().on_disconnect(on_disconnect).request_timeout(millis(300));
        let (client, other) = (builder.connect().await.unwrap(), server.client().await);
        other.counter("c").set(0).await.unwrap();
        proxy.pass(true, false);
        let error = error(client.counter("c").add(1).await);
        assert!(matches!(error, Error::Unknown { .. }), "{error}");
        assert!(error.may_have_applied() && error.may_retry());
        assert_eq!(other.counter("c").get().await, Ok(1));

        // A lock whose answer was lost is not left behind: when the way is free again it is given back.
        let outcome = client.lock("k").lease(LONG).try_acquire().await;
        assert!(matches!(self::error(outcome), Error::Unknown { .. }));
        proxy.pass(true, true);
        crowded(&other, "k", (0, 0)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals() {
    let server = Process::start(&["--max-waiters", "1", "--max-keys", "1"]);
    let (a, b, c) = (server.client().await, server.client().await, server.client().await);
    let _slot = a.semaphore("s", 1).acquire().await.unwrap();
    let mismatch = error(b.semaphore("s", 2).try_acquire().await);
    assert_eq!(mismatch, Error::Refused(ErrorCode::LimitMismatch));
    assert!(!mismatch.may_have_applied() && !mismatch.may_retry());

    let semaphore = b.semaphore("s", 1);
    let _waiting = tokio::spawn(async move { semaphore.acquire().await });
    crowded(&a, "s", (1, 1)).await;
    let full = error(c.semaphore("s", 1).acquire().await);
    assert_eq!(full, Error::Refused(ErrorCode::MaxWaiters));
    assert!(!full.may_have_applied() && full.may_retry());

    a.kv("one").set(b"x", None).await.unwrap();
    let full = error(a.kv("two").set(b"x", None).await);
    assert_eq!(full, Error::Refused(ErrorCode::MaxKeys));

    let invalid = error(a.lock("two words").acquire().await);
    assert!(matches!(invalid, Error::Invalid(_)), "{invalid}");
    assert!(!invalid.may_have_applied() && !invalid.may_retry());
    let invalid = error(a.lock("k").lease(Duration::ZERO).acquire().await);
    assert!(matches!(invalid, Error::Invalid(_)), "{invalid}");
}
