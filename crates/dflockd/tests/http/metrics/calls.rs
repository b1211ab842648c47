//! Calls over gRPC, as they are scraped.

use std::task::{Context, Poll};

use axum::http::{Request, Uri};
use dflockd_testkit::{LIMIT, eventually, millis};
use dflockd_wire::grpc::locks_client::LocksClient;
use dflockd_wire::grpc::sessions_client::SessionsClient;
use dflockd_wire::grpc::watch_client::WatchClient;
use dflockd_wire::grpc::{AcquireRequest, CloseRequest, OpenRequest, WatchRequest};
use tonic::body::Body;
use tonic::transport::{Channel, Endpoint};
use tower::Service;

use super::text::Scrape;
use crate::site::Site;

/// What is in every key of this test, and must not be in a page.
const HIDDEN: &str = "hush";

async fn connect(port: u16) -> Channel {
    let endpoint = Endpoint::from_shared(format!("http://127.0.0.1:{port}")).unwrap();
    let begun = std::time::Instant::now();
    loop {
        match endpoint.connect().await {
            Ok(channel) => return channel,
            Err(error) => assert!(begun.elapsed() < LIMIT, "{error:?}"),
        }
        tokio::time::sleep(millis(10)).await;
    }
}

/// Calls something else than it is told to.
#[derive(Clone)]
struct Strays(Channel, &'static str);

impl Service<Request<Body>> for Strays {
    type Response = <Channel as Service<Request<Body>>>::Response;
    type Error = <Channel as Service<Request<Body>>>::Error;
    type Future = <Channel as Service<Request<Body>>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        *request.uri_mut() = Uri::from_static(self.1);
        self.0.call(request)
    }
}

/// A call of a method that does not exist.
async fn call_nothing(channel: &Channel, path: &'static str) -> tonic::Code {
    let mut client = SessionsClient::new(Strays(channel.clone(), path));
    client.open(OpenRequest::default()).await.unwrap_err().code()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_are_counted_by_method_and_code() {
    let port = dflockd_testkit::free_address().port();
    let site = Site::start(&["--grpc-port", &port.to_string()]);
    let channel = connect(port).await;
    let mut sessions = SessionsClient::new(channel.clone());
    let mut locks = LocksClient::new(channel.clone());
    let session = sessions.open(OpenRequest::default()).await.unwrap().into_inner().session;
    let acquire = |key: &str, wait_ms| {
        let (session, key) = (session.clone(), format!("{HIDDEN}{key}").into());
        AcquireRequest { session, key, wait_ms, ..AcquireRequest::default() }
    };
    locks.acquire(acquire("a", 0)).await.unwrap();
    locks.acquire(acquire("a", 30)).await.unwrap();
    locks.acquire(acquire(" b", 0)).await.unwrap_err();
    // One whose client goes away, one that takes longer than its client waits.
    let mut late = tonic::Request::new(acquire("a", 600_000));
    late.set_timeout(millis(50));
    locks.acquire(late).await.unwrap_err();
    let watch = WatchRequest { patterns: vec![">".into()], ..WatchRequest::default() };
    let mut watched = WatchClient::new(channel.clone()).watch(watch).await.unwrap().into_inner();
    watched.message().await.unwrap().unwrap();
    drop(watched);
    sessions.close(CloseRequest { session: "none".into() }).await.unwrap_err();
    for path in ["/dflockd.v1.Locks/Hush", "/hush.Hush/Hush", "/hush"] {
        assert_eq!(call_nothing(&channel, path).await, tonic::Code::Unimplemented, "{path}");
    }

    let scrape = || {
        let text = site.get("/metrics").text();
        assert!(!text.contains(HIDDEN) && !text.contains("Hush"), "a word of a client is shown");
        Scrape::parse(&text)
    };
    let count = |page: &Scrape, service: &str, method: &str, code: &str| {
        let labels = [("service", service), ("method", method), ("code", code)];
        let calls = page.find("dflockd_grpc_requests_total", &labels).unwrap_or(0.0);
        if calls > 0.0 {
            let counted = page.get("dflockd_grpc_request_duration_seconds_count", &labels);
            assert_eq!(counted, calls, "{labels:?}");
            let sum = page.get("dflockd_grpc_request_duration_seconds_sum", &labels);
            assert!(sum > 0.0, "{labels:?}");
        }
        calls
    };
    tokio::task::block_in_place(|| {
        // They are counted when they are over, and some clients are ahead of that.
        let page = eventually("all are counted", || {
            let page = scrape();
            let sum = page.sum("dflockd_grpc_requests_total");
            assert!(sum <= 10.0, "{sum}");
            (sum == 10.0).then_some(page)
        });
        let locks = "dflockd.v1.Locks";
        for (service, method, code, calls) in [
            ("dflockd.v1.Sessions", "Open", "OK", 1.0),
            (locks, "Acquire", "OK", 2.0),
            (locks, "Acquire", "INVALID_ARGUMENT", 1.0),
            ("dflockd.v1.Watch", "Watch", "CANCELLED", 1.0),
            ("dflockd.v1.Sessions", "Close", "INVALID_ARGUMENT", 1.0),
            ("other", "other", "UNIMPLEMENTED", 3.0),
        ] {
            assert_eq!(count(&page, service, method, code), calls, "{service} {method} {code}");
        }
        // Whoever sees first that the time is over says so.
        let late =
            ["DEADLINE_EXCEEDED", "CANCELLED"].map(|code| count(&page, locks, "Acquire", code));
        assert_eq!(late.iter().sum::<f64>(), 1.0);
        let labels = [("service", locks), ("method", "Acquire"), ("code", "OK")];
        let took = page.get("dflockd_grpc_request_duration_seconds_sum", &labels);
        assert!(took >= 0.03, "the wait is a part of it: {took}");
    });
}
