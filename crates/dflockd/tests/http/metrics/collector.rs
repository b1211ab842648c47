//! A collector of traces that speaks just enough gRPC: it takes in what is sent and says that all is well.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::mpsc;
use std::thread;

use bytes::Bytes;
use dflockd_testkit::LIMIT;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;

/// Takes in spans until dropped.
pub(super) struct Collector {
    pub(super) address: SocketAddr,
    batches: mpsc::Receiver<Vec<u8>>,
    _runtime: tokio::runtime::Runtime,
}

impl Collector {
    pub(super) fn start() -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = { runtime }.worker_threads(1).enable_all().build().unwrap();
        let (sender, batches) = mpsc::channel();
        let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        runtime.spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let sender = sender.clone();
                tokio::spawn(async move {
                    let serve = service_fn(move |request| take(request, sender.clone()));
                    // A sender that is ended in the middle is no failure of the collector.
                    let _ = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                        .serve_connection(TokioIo::new(stream), serve)
                        .await;
                });
            }
        });
        Self { address, batches, _runtime: runtime }
    }

    pub(super) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Waits until everything in `wanted` was in a batch, not necessarily in the same one.
    #[track_caller]
    pub(super) fn wait_for(&self, wanted: &[&[u8]]) -> Vec<u8> {
        let begun = std::time::Instant::now();
        let mut seen = Vec::new();
        let has = |seen: &[u8], bytes: &[u8]| seen.windows(bytes.len()).any(|it| it == bytes);
        while !wanted.iter().all(|bytes| has(&seen, bytes)) {
            let left = LIMIT.saturating_sub(begun.elapsed());
            let batch = self.batches.recv_timeout(left);
            seen.extend(batch.unwrap_or_else(|_| {
                panic!("spans that did not come: {wanted:?}, came: {}", seen.escape_ascii())
            }));
        }
        seen
    }

    /// Everything that is already there, and comes before the sender is done.
    pub(super) fn rest(&self) -> Vec<u8> {
        thread::yield_now();
        self.batches.try_iter().flatten().collect()
    }
}

async fn take(
    request: Request<Incoming>,
    sender: mpsc::Sender<Vec<u8>>,
) -> Result<Response<http_body_util::combinators::BoxBody<Bytes, Infallible>>, Infallible> {
    assert!(request.uri().path().ends_with("TraceService/Export"), "{}", request.uri());
    if let Ok(body) = request.into_body().collect().await {
        let _ = sender.send(body.to_bytes().to_vec());
    }
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    // An empty message, not compressed.
    let frames = [Frame::data(Bytes::from_static(&[0; 5])), Frame::trailers(trailers)];
    let body = StreamBody::new(tokio_stream::iter(frames.map(Ok)));
    let mut response = Response::new(BodyExt::boxed(body));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    Ok(response)
}
