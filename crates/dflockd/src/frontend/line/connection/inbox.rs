//! Where other threads leave what a connection must hear: answers that come later, and pushes.
//!
//! What waits here for a client that does not read is bounded: pushes in number, everything with a payload in bytes.
//! Answers without a payload are as many as there are open requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use dflockd_core::{Outcome, Push, RequestId};
use dflockd_engine::{Mailbox, Pushed};
use parking_lot::Mutex;

/// Push lines that may wait for a slow reader; one more and it is cut off.
const PUSHES_MAX: usize = 64;
/// From here on a push is urgent: its reader should be served before more is sent to it.
pub(super) const PUSHES_URGENT: usize = PUSHES_MAX / 2;
/// How long a thread with something urgent waits for another one that serves the connection. Not for ever: that one may
/// be waiting for it.
const PATIENCE: Duration = Duration::from_millis(5);

/// What arrives from elsewhere.
#[derive(Debug)]
pub enum Message {
    /// The answer to an earlier request.
    Reply(RequestId, Outcome),
    /// The answer to an earlier request that took a while to write.
    Text(RequestId, Text),
    /// Something the client is told.
    Push(Push),
}

/// A text that took a while to write.
#[derive(Debug)]
pub enum Text {
    /// `ok` and this.
    Value(Arc<[u8]>),
    /// Nothing is known.
    Nil,
    /// Nobody could say.
    Unavailable,
    /// It would be too long.
    TooLarge,
}

impl Message {
    /// The bytes of its payload.
    fn bytes(&self) -> usize {
        match self {
            Self::Reply(_, outcome) => match outcome {
                Outcome::Value(value) | Outcome::Entry { value, .. } => value.len(),
                Outcome::Popped { key, value, .. } => key.len() + value.len(),
                Outcome::Items(items) | Outcome::Part(items) => {
                    items.iter().map(|item| item.len() + size_of_val(item)).sum()
                }
                Outcome::Done
                | Outcome::Granted(_)
                | Outcome::Acquired(_)
                | Outcome::Queued
                | Outcome::Renewed { .. }
                | Outcome::Timeout
                | Outcome::Empty
                | Outcome::Conflict
                | Outcome::Number(_)
                | Outcome::Written(_)
                | Outcome::Compacted(_)
                | Outcome::Refused(_) => 0,
            },
            Self::Text(_, Text::Value(text)) => text.len(),
            Self::Text(_, Text::Nil | Text::Unavailable | Text::TooLarge) => 0,
            Self::Push(push) => push_bytes(push),
        }
    }
}

/// The bytes of a push.
pub(crate) fn push_bytes(push: &Push) -> usize {
    match push {
        Push::Signal { channel, payload } => channel.len() + payload.len(),
        Push::Change(change) => change.key.len(),
        Push::Leader { key, .. } | Push::Lost { key, .. } => key.len(),
    }
}

/// Where other threads leave what a connection must hear.
#[derive(Debug)]
pub struct Inbox {
    queue: Mutex<Queue>,
    /// Bytes of output that are not written yet, as the connection said last.
    unwritten: AtomicUsize,
    /// The connection leaves the messages here until its output is written.
    stalled: AtomicBool,
    /// Push lines that are not written yet, those already printed included.
    pushes: AtomicUsize,
    /// The client wants to hear of lost holds.
    pub(super) wants_lost: AtomicBool,
    /// Too slow: nothing more is told.
    pub(super) overflowed: AtomicBool,
    closing: AtomicBool,
    /// Another connection has the session now, as far as anybody knows.
    pub(super) taken_over: AtomicBool,
    /// One of the two has just been set.
    pub(super) ending: AtomicBool,
    closed: AtomicBool,
}

#[derive(Debug)]
struct Queue {
    messages: VecDeque<Message>,
    /// Of their payloads.
    bytes: usize,
    bytes_max: usize,
}

impl Default for Inbox {
    fn default() -> Self {
        Self {
            queue: Mutex::new(Queue { messages: VecDeque::new(), bytes: 0, bytes_max: usize::MAX }),
            unwritten: AtomicUsize::new(0),
            stalled: AtomicBool::new(false),
            pushes: AtomicUsize::new(0),
            wants_lost: AtomicBool::new(false),
            overflowed: AtomicBool::new(false),
            closing: AtomicBool::new(false),
            taken_over: AtomicBool::new(false),
            ending: AtomicBool::new(false),
            closed: AtomicBool::new(false),
        }
    }
}

/// The mailbox of a line connection: everything goes into its inbox.
struct IntoInbox<F> {
    inbox: Arc<Inbox>,
    flush: F,
}

impl<F: Fn(Duration) + Send + Sync> Mailbox for IntoInbox<F> {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        self.inbox.put(Message::Reply(request, outcome))
    }

    fn push(&self, push: Push) -> Pushed {
        self.inbox.put(Message::Push(push))
    }

    fn overflow(&self) {
        self.inbox.overflow();
    }

    fn close(&self) {
        self.inbox.close();
    }

    fn cut(&self) {
        self.inbox.cut();
    }

    fn flush(&self) {
        (self.flush)(Duration::ZERO);
    }

    fn flush_urgently(&self) {
        (self.flush)(PATIENCE);
    }
}

impl Inbox {
    /// The mailbox that a connection opens its session with. `flush` has the connection handle what is in the inbox; if
    /// another thread serves the connection, it waits for that thread as long as it is told and no longer.
    pub fn mailbox(
        self: &Arc<Self>,
        flush: impl Fn(Duration) + Send + Sync + 'static,
    ) -> Arc<dyn Mailbox> {
        Arc::new(IntoInbox { inbox: Arc::clone(self), flush })
    }

    /// Sets how many bytes may wait for the client here and in the output.
    pub(super) fn set_bytes_max(&self, bytes_max: usize) {
        self.queue.lock().bytes_max = bytes_max;
    }

    /// The connection has so many bytes of output that are not written.
    pub(super) fn set_unwritten(&self, bytes: usize) {
        self.unwritten.store(bytes, Ordering::Relaxed);
    }

    /// Leaves a message. Full: the client must be cut off, see [`Inbox::overflow`].
    pub(super) fn put(&self, message: Message) -> Pushed {
        let is_push = matches!(message, Message::Push(_));
        if matches!(message, Message::Push(Push::Lost { .. }))
            && !self.wants_lost.load(Ordering::Relaxed)
        {
            return Pushed::Behind;
        }
        let bytes = message.bytes();
        let mut queue = self.queue.lock();
        if self.closed.load(Ordering::Relaxed) {
            return Pushed::Gone;
        }
        // A text is the only one of its connection, and shorter than what may be built in one piece.
        if !matches!(message, Message::Text(..)) {
            if self.overflowed.load(Ordering::Relaxed) {
                return Pushed::Gone;
            }
            let waiting = queue.bytes + self.unwritten.load(Ordering::Relaxed);
            // What comes alone is taken, however large a value may be.
            if bytes > 0 && waiting > 0 && waiting + bytes > queue.bytes_max {
                return Pushed::Full;
            }
        }
        let mut pushes = 0;
        if is_push {
            pushes = self.pushes.load(Ordering::Relaxed);
            if pushes >= PUSHES_MAX {
                return Pushed::Full;
            }
            self.pushes.store(pushes + 1, Ordering::Relaxed);
        }
        queue.bytes += bytes;
        queue.messages.push_back(message);
        if pushes >= PUSHES_URGENT {
            Pushed::Urgent
        } else if queue.messages.len() == 1 {
            Pushed::First
        } else {
            Pushed::Behind
        }
    }

    /// The client is too slow.
    fn overflow(&self) {
        self.overflowed.store(true, Ordering::Relaxed);
        self.ending.store(true, Ordering::Release);
    }

    /// The session is no longer this connection's.
    fn close(&self) {
        self.taken_over.store(true, Ordering::Relaxed);
        self.cut();
    }

    /// The connection ends; the session may go on elsewhere.
    fn cut(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.ending.store(true, Ordering::Release);
    }

    /// Whether there is nothing that can be handled now.
    pub fn is_empty(&self) -> bool {
        let queue = self.queue.lock();
        (queue.messages.is_empty() || self.is_stalled()) && !self.ending.load(Ordering::Acquire)
    }

    /// Whether the messages wait for the output to be written.
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// Whether nobody will take out what is left here.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// Leaves everything where it is until the output is written.
    pub(super) fn stall(&self) {
        let queue = self.queue.lock();
        self.stalled.store(!queue.messages.is_empty(), Ordering::Relaxed);
    }

    pub(super) fn take(&self) -> VecDeque<Message> {
        let mut queue = self.queue.lock();
        self.stalled.store(false, Ordering::Relaxed);
        queue.bytes = 0;
        std::mem::take(&mut queue.messages)
    }

    /// Puts back what was taken, before what has come since, until the output is written.
    pub(super) fn put_back(&self, mut messages: VecDeque<Message>) {
        let mut queue = self.queue.lock();
        self.stalled.store(true, Ordering::Relaxed);
        queue.bytes += messages.iter().map(Message::bytes).sum::<usize>();
        messages.append(&mut queue.messages);
        queue.messages = messages;
    }

    pub(super) fn pushes_written(&self, count: usize) {
        let _queue = self.queue.lock();
        self.pushes.fetch_sub(count, Ordering::Relaxed);
    }

    /// Accepts nothing more and gives out what is left.
    pub(super) fn shut(&self) -> VecDeque<Message> {
        let mut queue = self.queue.lock();
        self.closed.store(true, Ordering::Relaxed);
        std::mem::take(&mut queue.messages)
    }
}

#[cfg(test)]
mod tests {
    use dflockd_core::Bytes;

    use super::*;

    fn inbox(bytes_max: usize) -> Inbox {
        let inbox = Inbox::default();
        inbox.set_bytes_max(bytes_max);
        inbox
    }

    fn popped(request: u64, bytes: usize) -> Message {
        let value = Bytes::from(&vec![b'x'; bytes][..]);
        Message::Reply(RequestId(request), Outcome::Value(value))
    }

    fn signal(bytes: usize) -> Message {
        let payload = Bytes::from(&vec![b'x'; bytes][..]);
        Message::Push(Push::Signal { channel: Bytes::from(&b"c"[..]), payload })
    }

    /// GUARANTEES 48: answers and pushes that wait for a client are bounded in bytes, what is printed included.
    #[test]
    fn what_waits_is_bounded_in_bytes() {
        let inbox = inbox(1000);
        assert_eq!(inbox.put(popped(1, 600)), Pushed::First);
        assert_eq!(inbox.put(popped(2, 400)), Pushed::Behind);
        assert_eq!(inbox.put(popped(3, 1)), Pushed::Full);
        assert_eq!(inbox.put(signal(1)), Pushed::Full);
        // Without a payload there are only as many as there are open requests.
        assert_eq!(inbox.put(Message::Reply(RequestId(4), Outcome::Timeout)), Pushed::Behind);
        assert_eq!(inbox.take().len(), 3);
        inbox.set_unwritten(999);
        assert_eq!(inbox.put(signal(1)), Pushed::Full);
        inbox.set_unwritten(0);
        // Alone it is taken, or a value larger than the bound could never be told.
        assert_eq!(inbox.put(popped(5, 5000)), Pushed::First);
    }

    /// What is put back comes before what has come since, and nobody is sent to look for it.
    #[test]
    fn what_is_put_back_waits_in_order() {
        let inbox = inbox(1000);
        for request in 1..=3 {
            inbox.put(popped(request, 300));
        }
        let mut taken = inbox.take();
        taken.pop_front();
        inbox.put(popped(4, 100));
        inbox.put_back(taken);
        assert!(inbox.is_empty() && inbox.is_stalled());
        assert_eq!(inbox.put(popped(5, 300)), Pushed::Behind);
        assert_eq!(inbox.put(popped(6, 1)), Pushed::Full);
        let requests: Vec<_> = inbox.take().iter().map(request_of).collect();
        assert_eq!(requests, [2, 3, 4, 5]);
        assert!(!inbox.is_stalled());
    }

    fn request_of(message: &Message) -> u64 {
        match message {
            Message::Reply(request, _) | Message::Text(request, _) => request.0,
            Message::Push(_) => 0,
        }
    }
}
