//! Answers over HTTP and gRPC that give something away, such as a lock: it is given back if no client takes the answer.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;

use crate::frontend::caller::Answer;

/// What a body says when it is asked for its next frame.
pub(crate) type PolledFrame<E> = Poll<Option<Result<Frame<Bytes>, E>>>;

/// The body of an answer. What the answer gave is given back unless the beginning of the body is taken.
pub(crate) struct Giving<B> {
    body: B,
    answer: Option<Answer>,
}

impl<B> Giving<B> {
    pub(crate) fn new(body: B, answer: Option<Answer>) -> Self {
        Self { body, answer }
    }
}

impl<B: Body<Data = Bytes> + Unpin> Body for Giving<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<B::Error> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && frame.is_data()
            && let Some(answer) = self.answer.take()
        {
            answer.told();
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// An answer that gives something away, on its way from a handler to its body. The first who takes it has it.
#[derive(Clone)]
pub(crate) struct Gift(Arc<Mutex<Option<Answer>>>);

impl Gift {
    pub(crate) fn new(answer: Answer) -> Self {
        Self(Arc::new(Mutex::new(Some(answer))))
    }

    pub(crate) fn take(&self) -> Option<Answer> {
        self.0.lock().take()
    }
}
