//! What has a path of its own over gRPC: losses, repeats, acknowledgements.

use dflockd_client::{Client, Lost, Transport};
use dflockd_testkit::eventually::tasks::{eventually, soon};
use dflockd_testkit::free_address;
use dflockd_testkit::http::{Ask, Wire};

use super::proxy::Proxy;
use super::server::{LONG, Process};

#[tokio::test(flavor = "multi_thread")]
async fn a_loss_is_told() {
    let (_server, address) = Process::start_with_grpc(&["--admin-token", "adm1n"]);
    let builder = Client::builder().transport(Transport::Grpc).server(address.to_string());
    let client = builder.connect().await.unwrap();
    let guard = client.lock("k").lease(LONG).acquire().await.unwrap();
    client.force_release(b"k", false, guard.fence(), "adm1n", "a test").await.unwrap();
    assert_eq!(soon("the loss", guard.lost()).await, Lost::Forced);
}

/// A request whose answer was lost is asked again under its number, and done once.
#[tokio::test(flavor = "multi_thread")]
async fn a_lost_answer_comes_again() {
    let (server, address) = Process::start_with_grpc(&[]);
    let proxy = Proxy::to(address).await;
    let client = proxy.builder().transport(Transport::Grpc).connect().await.unwrap();
    let other = server.client().await;
    for round in 1..=3 {
        proxy.pass(true, false);
        let counter = client.counter("c");
        let adding = tokio::spawn(async move { counter.add(1).await });
        let done = async || other.counter("c").get().await == Ok(round);
        eventually("it is done", done).await;
        let before = proxy.connections();
        proxy.cut();
        let again = async || proxy.connections() > before;
        eventually("a new connection", again).await;
        proxy.pass(true, true);
        assert_eq!(soon("the answer", adding).await.unwrap(), Ok(round));
    }
}

/// The server need not keep answers that have arrived.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_acknowledged() {
    const REQUESTS: i64 = 300;
    let http = free_address();
    let flags = ["--http-port", &http.port().to_string()];
    let (_server, address) = Process::start_with_grpc(&flags);
    let builder = Client::builder().transport(Transport::Grpc).server(address.to_string());
    let client = builder.connect().await.unwrap();
    for _ in 0..REQUESTS {
        client.counter("c").add(1).await.unwrap();
    }
    let few = async || {
        let scrape = || Wire::open(http, None).ask(&Ask::get("/metrics"));
        let kept = tokio::task::block_in_place(scrape).metric("dflockd_kept_results");
        kept < REQUESTS as f64 / 2.0
    };
    eventually("most are forgotten", few).await;
}
