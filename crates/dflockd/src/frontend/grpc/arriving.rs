//! Messages of clients on their way in. The library behind the gate makes room for as many bytes as a message
//! announces; so it gets to see a message only when it is complete. Until then its bytes are kept here, as many as have
//! arrived, and they have a limit in time and, for all calls of a connection together, in bytes.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http_body::{Body as HttpBody, Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::{Code, Status};

use super::MESSAGE_BYTES_MAX;
use crate::frontend::budget::{Budget, Reserved};
use crate::frontend::giveback::PolledFrame;

/// Before each message: whether it is compressed, and its length.
const HEAD: usize = 5;

/// What a client sends: whole messages.
pub(super) struct Arriving {
    body: Body,
    has_ended: bool,
    /// The beginning of a message.
    partial: BytesMut,
    room: Room,
    /// Since when a message is awaited that must come.
    since: Option<Instant>,
    limit: Duration,
    timer: Option<Pin<Box<Sleep>>>,
    budget: Arc<Budget>,
}

/// Room for the message that has begun.
enum Room {
    /// Its length is not known.
    None,
    Awaited(Pin<Box<dyn Future<Output = Reserved> + Send>>),
    Taken {
        _reserved: Reserved,
    },
}

impl Arriving {
    /// `since`: when the call began, if its one message must come in time; between the messages of a stream there may
    /// be any time.
    pub(super) fn new(
        body: Body,
        since: Option<Instant>,
        limit: Duration,
        budget: Arc<Budget>,
    ) -> Self {
        let (partial, room) = (BytesMut::new(), Room::None);
        Self { body, has_ended: false, partial, room, since, limit, timer: None, budget }
    }

    /// Whether the message that has begun may be read on.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if let (Room::None, Some(length)) = (&self.room, announced(&self.partial)) {
            self.room = Room::Awaited(Box::pin(self.budget.arriving(length)));
        }
        if let Room::Awaited(awaited) = &mut self.room {
            let reserved = std::task::ready!(awaited.as_mut().poll(cx));
            self.room = Room::Taken { _reserved: reserved };
        }
        Poll::Ready(())
    }

    /// Takes in some bytes. What is complete of them and of what came before.
    fn take(&mut self, mut bytes: Bytes) -> Option<Bytes> {
        // Nearly always a message comes in one piece, which is passed on as it is.
        let whole = if self.partial.is_empty() {
            let length = whole(&bytes);
            let now = bytes.split_to(length);
            self.partial.extend_from_slice(&bytes);
            now
        } else {
            self.partial.extend_from_slice(&bytes);
            let length = whole(&self.partial);
            self.partial.split_to(length).freeze()
        };
        if !whole.is_empty() {
            (self.room, self.since, self.timer) = (Room::None, None, None);
        }
        if self.partial.is_empty() {
            // Or the room that it had would be kept between two messages.
            self.partial = BytesMut::new();
        } else if self.since.is_none() {
            self.since = Some(Instant::now());
        }
        (!whole.is_empty()).then_some(whole)
    }

    /// Waits, but not for ever.
    fn wait(&mut self, cx: &mut Context<'_>) -> PolledFrame<Status> {
        let Some(since) = self.since else { return Poll::Pending };
        let until = since + self.limit;
        let timer = self.timer.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        std::task::ready!(timer.as_mut().poll(cx));
        self.has_ended = true;
        (self.partial, self.room) = (BytesMut::new(), Room::None);
        let text = "the message of the call did not arrive in time";
        Poll::Ready(Some(Err(Status::new(Code::DeadlineExceeded, text))))
    }
}

impl HttpBody for Arriving {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<Status> {
        let this = &mut *self;
        if this.has_ended {
            return Poll::Ready(None);
        }
        loop {
            if announced(&this.partial).is_some_and(|length| length > MESSAGE_BYTES_MAX + HEAD) {
                // Refused by whoever sees how long it is to be.
                this.since = None;
                return Poll::Ready(Some(Ok(Frame::data(this.partial.split().freeze()))));
            }
            if this.poll_room(cx).is_pending() {
                return this.wait(cx);
            }
            match Pin::new(&mut this.body).poll_frame(cx) {
                Poll::Pending => return this.wait(cx),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => {
                        if let Some(whole) = this.take(bytes) {
                            return Poll::Ready(Some(Ok(Frame::data(whole))));
                        }
                    }
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Poll::Ready(None) => {
                    this.has_ended = true;
                    // Half a message is an error that is told by whoever waits for the rest.
                    let rest = this.partial.split().freeze();
                    let last = rest.has_remaining().then(|| Ok(Frame::data(rest)));
                    return Poll::Ready(last);
                }
                failed @ Poll::Ready(Some(Err(_))) => return failed,
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.has_ended || self.partial.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

/// The length that the message at the beginning is to have, its head included.
fn announced(bytes: &[u8]) -> Option<usize> {
    let (head, _) = bytes.split_first_chunk::<HEAD>()?;
    let length = u32::from_be_bytes([head[1], head[2], head[3], head[4]]);
    Some(usize::try_from(length).unwrap_or(usize::MAX).saturating_add(HEAD))
}

/// How many bytes the complete messages at the beginning have.
fn whole(bytes: &[u8]) -> usize {
    let mut length = 0;
    while let Some(next) = announced(&bytes[length..])
        && next <= bytes.len() - length
    {
        length += next;
    }
    length
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;
    use tokio::sync::mpsc;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(200);

    /// A body whose frames come from a channel.
    struct Frames(mpsc::UnboundedReceiver<Bytes>);

    impl HttpBody for Frames {
        type Data = Bytes;
        type Error = Status;

        fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<Status> {
            self.0.poll_recv(cx).map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
        }
    }

    fn arriving(
        is_unary: bool,
        budget: &Arc<Budget>,
    ) -> (mpsc::UnboundedSender<Bytes>, Pin<Box<Arriving>>) {
        let (sender, frames) = mpsc::unbounded_channel();
        let since = is_unary.then(Instant::now);
        let arriving = Arriving::new(Body::new(Frames(frames)), since, LIMIT, Arc::clone(budget));
        (sender, Box::pin(arriving))
    }

    fn message(length: usize) -> Vec<u8> {
        let mut message = vec![0];
        message.extend_from_slice(&u32::try_from(length).unwrap().to_be_bytes());
        message.resize(HEAD + length, 7);
        message
    }

    async fn next(arriving: &mut Pin<Box<Arriving>>) -> Option<Result<Bytes, Status>> {
        let frame = arriving.frame().await?;
        Some(frame.map(|frame| frame.into_data().unwrap()))
    }

    /// Messages are seen whole, however they are cut.
    #[tokio::test]
    async fn messages_are_seen_whole() {
        let all = [message(0), message(3), message(70_000), message(1)].concat();
        for piece in [1000, 4, 16_384, 100_000] {
            let (sender, mut arriving) = arriving(false, &Budget::new(1 << 20));
            for bytes in all.chunks(piece) {
                sender.send(Bytes::copy_from_slice(bytes)).unwrap();
            }
            drop(sender);
            let mut seen = Vec::new();
            while let Some(bytes) = next(&mut arriving).await {
                let bytes = bytes.unwrap();
                assert_eq!(whole(&bytes), bytes.len(), "{piece}");
                seen.extend_from_slice(&bytes);
            }
            assert!(seen == all, "{piece}");
        }
    }

    /// GUARANTEES 48: half a message has a time limit, and so has a call whose message never begins.
    #[tokio::test]
    async fn half_a_message_is_not_waited_for_without_end() {
        let budget = Budget::new(1 << 20);
        let (sender, mut arriving_one) = arriving(false, &budget);
        sender.send(Bytes::copy_from_slice(&message(100)[..50])).unwrap();
        let error = next(&mut arriving_one).await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        assert!(next(&mut arriving_one).await.is_none());
        let (_silent, mut arriving_none) = arriving(true, &budget);
        let error = next(&mut arriving_none).await.unwrap().unwrap_err();
        assert_eq!(error.code(), Code::DeadlineExceeded);
        // A stream may be silent between its messages.
        let (sender, mut stream) = arriving(false, &budget);
        sender.send(message(10).into()).unwrap();
        assert!(next(&mut stream).await.unwrap().is_ok());
        let silence = tokio::time::timeout(LIMIT * 3, next(&mut stream)).await;
        assert!(silence.is_err(), "{silence:?}");
    }

    /// GUARANTEES 48: messages that are not complete have a limit in bytes for all calls of a connection; who comes
    /// later waits.
    #[tokio::test]
    async fn incomplete_messages_share_a_budget() {
        let budget = Budget::new(1000);
        let (first_sender, mut first) = arriving(false, &budget);
        let (sender, mut second) = arriving(false, &budget);
        let (small_sender, mut small) = arriving(false, &budget);
        first_sender.send(Bytes::copy_from_slice(&message(600)[..100])).unwrap();
        let waits = tokio::time::timeout(Duration::from_millis(1), next(&mut first)).await;
        assert!(waits.is_err());
        for bytes in message(600).chunks(100) {
            sender.send(Bytes::copy_from_slice(bytes)).unwrap();
        }
        let waits = tokio::time::timeout(Duration::from_millis(1), next(&mut second)).await;
        assert!(waits.is_err());
        assert!(second.partial.len() <= 100, "{}", second.partial.len());
        // What comes whole needs no room.
        small_sender.send(message(50).into()).unwrap();
        assert!(next(&mut small).await.unwrap().is_ok());
        first_sender.send(Bytes::copy_from_slice(&message(600)[100..])).unwrap();
        assert_eq!(next(&mut first).await.unwrap().unwrap().len(), 605);
        assert_eq!(next(&mut second).await.unwrap().unwrap().len(), 605);
    }

    /// What is announced as too long is passed on to whoever refuses it; nothing else is before it is complete.
    #[tokio::test]
    async fn too_long_a_message_is_not_kept() {
        let longest = u32::try_from(MESSAGE_BYTES_MAX).unwrap();
        for (length, passes) in [(u32::MAX, true), (longest + 1, true), (longest, false)] {
            let (sender, mut arriving) = arriving(true, &Budget::new(4 << 20));
            let head = [&[0][..], &length.to_be_bytes()].concat();
            sender.send(head.clone().into()).unwrap();
            let seen = next(&mut arriving).await.unwrap();
            assert_eq!(seen.ok().as_deref(), passes.then_some(&head[..]), "{length}");
        }
    }
}
