//! What one connection over HTTP or gRPC may cost in memory, however many requests it has at a time.
//!
//! Answers to reads are made only when there is room for them, one look at the state at a time, and count until they
//! are taken in. Pushes that wait for the streams of a connection are counted together.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::frontend::giveback::PolledFrame;

/// A body is handed on in pieces of this, each when there is room for it: what was handed on can not be counted.
pub(crate) const PIECE_BYTES: usize = 16 * 1024;

/// What one connection may cost.
pub(crate) struct Budget {
    bytes_max: usize,
    /// Room for answers that are made and not taken in.
    answers: Arc<Semaphore>,
    /// The right to look at the state.
    look: Arc<Semaphore>,
    /// Room for messages that have begun to arrive.
    arriving: Arc<Semaphore>,
    pub(crate) pushes: Arc<PushBytes>,
    pub(crate) unsent: Unsent,
}

impl Budget {
    /// One with so many bytes for each of what waits: answers, pushes, and messages that are not complete.
    pub(crate) fn new(bytes_max: usize) -> Arc<Self> {
        let room = || Arc::new(Semaphore::new(bytes_max.min(Semaphore::MAX_PERMITS)));
        Arc::new(Self {
            bytes_max,
            answers: room(),
            look: Arc::new(Semaphore::new(1)),
            arriving: room(),
            pushes: Arc::new(PushBytes::new(bytes_max)),
            unsent: Unsent { bytes: AtomicUsize::new(0), bytes_max, waiting: Mutex::default() },
        })
    }

    /// Waits for room for an answer.
    pub(crate) async fn answer(&self, bytes: usize) -> Reserved {
        self.reserve(&self.answers, bytes).await
    }

    /// Waits for the turn to look at the state, and for room for the answer.
    pub(crate) async fn inspection(&self, bytes: usize) -> (Reserved, Reserved) {
        let turn = self.reserve(&self.look, 1).await;
        (turn, self.answer(bytes).await)
    }

    /// Waits for room for a message that arrives.
    pub(crate) fn arriving(&self, bytes: usize) -> impl Future<Output = Reserved> + Send + 'static {
        let (room, bytes) = (Arc::clone(&self.arriving), self.permits(bytes));
        async move { Reserved(room.acquire_many_owned(bytes).await.ok()) }
    }

    async fn reserve(&self, room: &Arc<Semaphore>, bytes: usize) -> Reserved {
        // It is never closed.
        Reserved(Arc::clone(room).acquire_many_owned(self.permits(bytes)).await.ok())
    }

    /// What is more than all the room takes all of it.
    fn permits(&self, bytes: usize) -> u32 {
        u32::try_from(bytes.min(self.bytes_max)).unwrap_or(u32::MAX)
    }
}

/// Room that is given back when this is dropped.
#[derive(Default)]
pub(crate) struct Reserved(Option<OwnedSemaphorePermit>);

impl Reserved {
    /// Gives back what is not needed.
    pub(crate) fn shrink_to(&mut self, bytes: usize) {
        if let Some(permit) = &mut self.0 {
            drop(permit.split(permit.num_permits().saturating_sub(bytes)));
        }
    }
}

/// Bytes of pushes that wait, of one session or of all streams of a connection.
pub(crate) struct PushBytes {
    bytes: AtomicUsize,
    bytes_max: usize,
}

impl PushBytes {
    pub(crate) fn new(bytes_max: usize) -> Self {
        Self { bytes: AtomicUsize::new(0), bytes_max }
    }

    /// Takes room for a push; false if there is none. One that comes alone always has room.
    pub(crate) fn add(&self, bytes: usize) -> bool {
        let fits = |before: usize| {
            let after = before + bytes;
            (before == 0 || after <= self.bytes_max).then_some(after)
        };
        self.bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }

    pub(crate) fn remove(&self, bytes: usize) {
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Bytes that were handed to the protocol and are not in the socket.
pub(crate) struct Unsent {
    bytes: AtomicUsize,
    bytes_max: usize,
    waiting: Mutex<Vec<Waker>>,
}

impl Unsent {
    /// Ready when more may be handed on.
    pub(crate) fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        let has_room = || self.bytes.load(Ordering::Acquire) < self.bytes_max;
        if has_room() {
            return Poll::Ready(());
        }
        self.waiting.lock().push(cx.waker().clone());
        // It may have been written in between.
        if has_room() { Poll::Ready(()) } else { Poll::Pending }
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// So many bytes are in the socket, heads of frames among them, which nobody has counted.
    pub(crate) fn written(&self, bytes: usize) {
        let left = |before: usize| Some(before.saturating_sub(bytes));
        let before = self.bytes.fetch_update(Ordering::AcqRel, Ordering::Relaxed, left);
        if before.is_ok_and(|before| before >= self.bytes_max) {
            for waker in std::mem::take(&mut *self.waiting.lock()) {
                waker.wake();
            }
        }
    }
}

/// A body that is there as a whole and is handed on in pieces. Its room is free again when it is taken in.
pub(crate) struct Pieces {
    rest: Bytes,
    _reserved: Reserved,
}

impl Pieces {
    pub(crate) fn new(text: Vec<u8>, mut reserved: Reserved) -> Self {
        reserved.shrink_to(text.len());
        Self { rest: text.into(), _reserved: reserved }
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> PolledFrame<Self::Error> {
        if self.rest.is_empty() {
            return Poll::Ready(None);
        }
        let length = self.rest.len().min(PIECE_BYTES);
        Poll::Ready(Some(Ok(Frame::data(self.rest.split_to(length)))))
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.rest.len() as u64)
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;

    /// GUARANTEES 48: answers of one connection wait for each other when they are many bytes together.
    #[tokio::test]
    async fn answers_wait_for_room() {
        let budget = Budget::new(1000);
        let mut first = budget.answer(600).await;
        let mut second = by_hand(budget.answer(600));
        assert!(second.poll_now().is_none());
        first.shrink_to(300);
        assert!(second.poll_now().is_some());
        drop((first, second));
        // More than all there is takes all there is.
        let all = budget.answer(5000).await;
        assert!(by_hand(budget.answer(1)).poll_now().is_none());
        drop(all);
    }

    /// GUARANTEES 48: a connection looks at the state once at a time.
    #[tokio::test]
    async fn one_look_at_a_time() {
        let budget = Budget::new(1000);
        let (turn, room) = budget.inspection(10).await;
        let mut next = by_hand(budget.inspection(10));
        assert!(next.poll_now().is_none());
        drop(turn);
        assert!(next.poll_now().is_some());
        drop(room);
    }

    #[tokio::test]
    async fn a_body_comes_in_pieces_and_gives_its_room_back() {
        let budget = Budget::new(PIECE_BYTES * 3);
        let text = vec![b'x'; PIECE_BYTES * 2 + 5];
        let mut body = Pieces::new(text.clone(), budget.answer(PIECE_BYTES * 3).await);
        assert_eq!(body.size_hint().exact(), Some(text.len() as u64));
        assert_eq!(budget.answers.available_permits(), PIECE_BYTES - 5);
        let first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(first.len(), PIECE_BYTES);
        assert_eq!(body.collect().await.unwrap().to_bytes().len(), PIECE_BYTES + 5);
        assert_eq!(budget.answers.available_permits(), PIECE_BYTES * 3);
    }

    #[test]
    fn what_is_unsent_holds_back_what_comes() {
        let budget = Budget::new(100);
        let mut cx = Context::from_waker(Waker::noop());
        assert!(budget.unsent.poll_room(&mut cx).is_ready());
        budget.unsent.add(150);
        assert!(budget.unsent.poll_room(&mut cx).is_pending());
        budget.unsent.written(60);
        assert!(budget.unsent.poll_room(&mut cx).is_ready());
        budget.unsent.written(1000);
        budget.unsent.add(99);
        assert!(budget.unsent.poll_room(&mut cx).is_ready());
    }

    /// A future that is polled by hand.
    struct ByHand<F>(Pin<Box<F>>);

    fn by_hand<F: Future>(future: F) -> ByHand<F> {
        ByHand(Box::pin(future))
    }

    impl<F: Future> ByHand<F> {
        fn poll_now(&mut self) -> Option<F::Output> {
            match self.0.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                Poll::Ready(done) => Some(done),
                Poll::Pending => None,
            }
        }
    }
}
