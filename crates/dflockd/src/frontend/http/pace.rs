//! How long a connection may take: for the head of a request, between requests, and to take in what it is sent.
//!
//! hyper's own timer for heads also runs between requests, and is made anew for each of them. Here a connection has one
//! timer, which is set again only when it fires or something falls due earlier.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io;
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Body;
use axum::routing::future::RouteFuture;
use bytes::Bytes;
use http_body::{Body as HttpBody, SizeHint};
use hyper::Response;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::server::TlsStream;

use crate::frontend::frames::Frames;
use crate::frontend::giveback::PolledFrame;

/// How long a connection may take.
#[derive(Clone, Copy)]
pub(crate) struct PaceLimits {
    /// For the head of a request, from its first byte, or from the connect.
    pub(crate) head: Duration,
    /// Between requests.
    pub(crate) idle: Duration,
    /// Without a byte being taken of what is there to be sent.
    pub(crate) stall: Duration,
}

/// How often to look whether the peer is gone where nobody says so.
const LOOK_AGAIN: Duration = Duration::from_secs(1);
/// How a connection over HTTP/2 begins.
const H2_BEGIN: &[u8] = b"PRI ";

/// What a connection is doing, and since when.
pub(crate) struct Pace {
    limits: PaceLimits,
    begun: Instant,
    /// Requests whose response is not sent yet.
    in_flight: AtomicUsize,
    /// Those of them whose handler is not done.
    waiting: AtomicUsize,
    /// Whether nobody will say when the peer of a waiting request is gone.
    look_again: AtomicBool,
    /// Whether some of a head has come.
    head: AtomicBool,
    /// Milliseconds after `begun` at which the head, or the pause between requests, began.
    since: AtomicU64,
    /// Milliseconds after `begun`, plus one, at which the peer stopped taking in; 0 if it does.
    stalled: AtomicU64,
    /// Frames that are no request come and go here, so there is no telling what belongs to a head.
    is_h2: AtomicBool,
}

impl Pace {
    pub(crate) fn new(limits: PaceLimits) -> Self {
        Self {
            limits,
            begun: Instant::now(),
            in_flight: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            look_again: AtomicBool::new(false),
            head: AtomicBool::new(true),
            since: AtomicU64::new(0),
            stalled: AtomicU64::new(0),
            is_h2: AtomicBool::new(false),
        }
    }

    /// A request has come; until this is dropped it is not answered.
    pub(crate) fn request(self: &Arc<Self>) -> InFlight {
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        self.head.store(false, Ordering::Relaxed);
        InFlight(Arc::clone(self))
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    fn handle_read(&self, bytes: &[u8]) {
        if self.in_flight.load(Ordering::Relaxed) > 0 || self.is_h2.load(Ordering::Relaxed) {
            return;
        }
        // Only the first request of a connection finds the flag set without a byte.
        if self.since.load(Ordering::Relaxed) == 0 && bytes.starts_with(H2_BEGIN) {
            self.is_h2.store(true, Ordering::Relaxed);
            self.head.store(false, Ordering::Relaxed);
        } else if !self.head.swap(true, Ordering::Relaxed) {
            self.since.store(self.now(), Ordering::Relaxed);
        }
    }

    fn handle_write(&self, taken: bool) {
        let stalled = self.stalled.load(Ordering::Relaxed);
        if taken && stalled != 0 {
            self.stalled.store(0, Ordering::Relaxed);
        } else if !taken && stalled == 0 {
            self.stalled.store(self.now() + 1, Ordering::Relaxed);
        }
    }

    /// Whether the peer takes nothing in although there is something for it.
    pub(crate) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed) > 0
    }

    /// When the connection is to be closed if nothing happens.
    fn due(&self) -> Option<Instant> {
        let at = |millis| self.begun + Duration::from_millis(millis);
        let stalled = self.stalled.load(Ordering::Relaxed);
        let stall = (stalled > 0).then(|| at(stalled) + self.limits.stall);
        if self.in_flight.load(Ordering::Relaxed) > 0 {
            return stall;
        }
        let PaceLimits { head, idle, .. } = self.limits;
        let limit = if self.head.load(Ordering::Relaxed) { head } else { idle };
        let pause = at(self.since.load(Ordering::Relaxed)) + limit;
        Some(stall.map_or(pause, |stall| stall.min(pause)))
    }

    /// Runs a connection until it ends or has taken too long for something.
    pub(crate) async fn run<T>(&self, connection: impl Future<Output = T>) -> Option<T> {
        let mut connection = pin!(connection);
        let mut fires = self.begun + self.limits.head;
        let mut timer = pin!(tokio::time::sleep_until(fires));
        poll_fn(|cx| {
            loop {
                if let Poll::Ready(done) = connection.as_mut().poll(cx) {
                    return Poll::Ready(Some(done));
                }
                let mut due = self.due();
                if self.look_again.swap(false, Ordering::Relaxed) {
                    let soon = Instant::now() + LOOK_AGAIN;
                    due = Some(due.map_or(soon, |due| due.min(soon)));
                }
                if let Some(due) = due
                    && due < fires
                {
                    fires = due;
                    timer.as_mut().reset(due);
                }
                if timer.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                let now = Instant::now();
                let due = self.due();
                if due.is_some_and(|due| due <= now) {
                    return Poll::Ready(None);
                }
                fires = due.unwrap_or(now + self.limits.idle);
                timer.as_mut().reset(fires);
            }
        })
        .await
    }
}

/// A request that is not answered yet.
pub(crate) struct InFlight(Arc<Pace>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let pace = &*self.0;
        // Before the count, or a look in between would find an old pause.
        pace.since.store(pace.now().max(1), Ordering::Relaxed);
        pace.in_flight.fetch_sub(1, Ordering::Release);
    }
}

/// A stream that can say that its peer is gone although there is more to read.
pub(crate) trait HangUp {
    /// Whether the peer has closed or aborted. If not, the task is woken when it does, unless nobody knows.
    fn poll_hung_up(&self, cx: &mut Context<'_>) -> HungUp;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HungUp {
    Yes,
    No,
    /// Not yet, and the task is not woken.
    AskAgain,
}

impl HangUp for TcpStream {
    fn poll_hung_up(&self, cx: &mut Context<'_>) -> HungUp {
        if self.poll_read_ready(cx).is_pending() {
            return HungUp::No;
        }
        // Bytes, or the end behind them. What is ready for this interest is the end alone.
        #[cfg(target_os = "linux")]
        if pin!(self.ready(tokio::io::Interest::PRIORITY)).poll(cx).is_ready() {
            return HungUp::Yes;
        }
        HungUp::AskAgain
    }
}

impl<S: HangUp> HangUp for TlsStream<S> {
    fn poll_hung_up(&self, cx: &mut Context<'_>) -> HungUp {
        self.get_ref().0.poll_hung_up(cx)
    }
}

/// A stream whose traffic is noted, and which ends when its client floods it with frames.
pub(crate) struct Paced<S> {
    stream: S,
    pace: Arc<Pace>,
    frames: Frames,
    peer: IpAddr,
}

impl<S> Paced<S> {
    pub(crate) fn new(stream: S, pace: Arc<Pace>, peer: IpAddr) -> Self {
        Self { stream, pace, frames: Frames::from_the_start(), peer }
    }

    fn note<T>(&self, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        self.pace.handle_write(written.is_ready());
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Paced<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.pace.handle_read(&buf.filled()[before..]);
            if self.frames.is_flood(&buf.filled()[before..]) {
                tracing::warn!(peer = %self.peer, "closed: a flood of HTTP/2 frames");
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        read
    }
}

impl<S: AsyncWrite + HangUp + Unpin> AsyncWrite for Paced<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.note(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        // hyper comes here whenever it has nothing to write. While a handler waits it reads no further if there is
        // another request already, and so would never notice that the client is gone.
        let Pace { waiting, is_h2, look_again, .. } = &*self.pace;
        if waiting.load(Ordering::Relaxed) > 0 && !is_h2.load(Ordering::Relaxed) {
            match self.stream.poll_hung_up(cx) {
                HungUp::Yes => return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into())),
                HungUp::No => {}
                HungUp::AskAgain => look_again.store(true, Ordering::Relaxed),
            }
        }
        // Says nothing about what the peer takes in: on plain sockets it is always done.
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.note(shut)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.note(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

/// The answer to a request, which is in flight until its body is gone.
pub(crate) struct Answering {
    future: RouteFuture<Infallible>,
    in_flight: Option<InFlight>,
    waits: bool,
}

impl Answering {
    pub(crate) fn new(future: RouteFuture<Infallible>, in_flight: InFlight) -> Self {
        Self { future, in_flight: Some(in_flight), waits: false }
    }

    fn set_waits(&mut self, waits: bool) {
        let Some(InFlight(pace)) = &self.in_flight else { return };
        if waits && !self.waits {
            pace.waiting.fetch_add(1, Ordering::Relaxed);
        } else if !waits && self.waits {
            pace.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        self.waits = waits;
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.set_waits(false);
    }
}

impl Future for Answering {
    type Output = Result<Response<PacedBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let polled = Pin::new(&mut self.future).poll(cx);
        self.set_waits(polled.is_pending());
        polled.map_ok(|response| {
            let in_flight = self.in_flight.take();
            response.map(|body| PacedBody { body, _in_flight: in_flight })
        })
    }
}

/// The body of a response, whose request is in flight until it is gone.
pub(crate) struct PacedBody {
    body: Body,
    _in_flight: Option<InFlight>,
}

impl HttpBody for PacedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<axum::Error> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    impl HangUp for tokio::io::DuplexStream {
        fn poll_hung_up(&self, _: &mut Context<'_>) -> HungUp {
            HungUp::No
        }
    }

    const SHORT: Duration = Duration::from_millis(40);
    const NEVER: Duration = Duration::from_secs(3600);

    fn pace(head: Duration, idle: Duration, stall: Duration) -> Arc<Pace> {
        Arc::new(Pace::new(PaceLimits { head, idle, stall }))
    }

    /// Whether a connection on which this happens is closed; for how long it lived.
    async fn life<T>(pace: &Arc<Pace>, happens: impl Future<Output = T>) -> (bool, Duration) {
        let begun = Instant::now();
        let run = tokio::time::timeout(Duration::from_secs(30), pace.run(happens));
        let done = run.await.expect("it is closed at last");
        (done.is_none(), begun.elapsed())
    }

    async fn forever() {
        std::future::pending().await
    }

    #[tokio::test]
    async fn silence_at_first_is_a_slow_head() {
        let pace = pace(SHORT, NEVER, NEVER);
        let (closed, lived) = life(&pace, forever()).await;
        assert!(closed && lived >= SHORT);
    }

    #[tokio::test]
    async fn a_request_has_no_limit_and_the_pause_after_it_has() {
        let pace = pace(SHORT, SHORT, SHORT);
        let (closed, lived) = life(&pace, async {
            let in_flight = pace.request();
            tokio::time::sleep(SHORT * 5).await;
            drop(in_flight);
            forever().await;
        })
        .await;
        assert!(closed && lived >= SHORT * 6);
    }

    #[tokio::test]
    async fn a_head_that_comes_in_drops() {
        let pace = pace(SHORT, NEVER, NEVER);
        let (mut client, server) = duplex(64);
        let mut server = Paced::new(server, Arc::clone(&pace), IpAddr::from([127, 0, 0, 1]));
        let lived = life(&pace, async {
            drop(pace.request());
            let mut byte = [0];
            while server.read(&mut byte).await.is_ok() {}
        });
        let client = async {
            tokio::time::sleep(SHORT * 5).await;
            loop {
                let _ = client.write_all(b"G").await;
                tokio::time::sleep(SHORT / 4).await;
            }
        };
        let (closed, lived) = tokio::select! {
            lived = lived => lived,
            () = client => unreachable!("goes on for ever"),
        };
        assert!(closed && lived >= SHORT * 6);
    }

    #[tokio::test]
    async fn frames_of_http_2_are_no_head() {
        let pace = pace(SHORT, SHORT * 5, NEVER);
        let (mut client, server) = duplex(64);
        let mut server = Paced::new(server, Arc::clone(&pace), IpAddr::from([127, 0, 0, 1]));
        client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.unwrap();
        let (closed, lived) = life(&pace, async {
            let mut bytes = [0; 64];
            while server.read(&mut bytes).await.is_ok() {}
        })
        .await;
        assert!(closed && lived >= SHORT * 5);
    }

    #[tokio::test]
    async fn a_peer_that_takes_nothing_in() {
        let pace = pace(NEVER, NEVER, SHORT * 4);
        let (mut client, server) = duplex(64);
        let mut server = Paced::new(server, Arc::clone(&pace), IpAddr::from([127, 0, 0, 1]));
        let lived = life(&pace, async {
            let _in_flight = pace.request();
            let _ = server.write_all(&[b'x'; 129]).await;
            forever().await;
        });
        let client = async {
            tokio::time::sleep(SHORT).await;
            let mut some = [0; 64];
            client.read_exact(&mut some).await.unwrap();
            forever().await;
        };
        let (closed, lived) = tokio::select! {
            lived = lived => lived,
            () = client => unreachable!("goes on for ever"),
        };
        // What it took in the meantime set the clock back.
        assert!(closed && lived >= SHORT * 5);
    }
}
