//! The queue of a lane, and how frames get from there into a socket.
//!
//! Sealed frames are numbered in the order in which they are written, so one place at a time has the [`Line`] with the
//! numbers: the task behind the connection, or the queue while that task has nothing to write.

use std::collections::VecDeque;
use std::future::Future;
use std::io::{self, ErrorKind, IoSlice};
use std::sync::Arc;
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use parking_lot::Mutex;
use tokio::io::{AsyncWrite, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::time::timeout;

use super::LaneLimits;
use super::seal::Framing;

/// What is taken from a queue at once, unless a single frame is longer.
const BATCH_BYTES: usize = 1 << 20;

/// Up to here a frame is copied into one buffer with its neighbours.
pub(super) const COALESCE_BYTES: usize = 16 << 10;

/// More slices than this are not worth a longer system call.
const SLICES: usize = 64;

/// Frames that wait for a connection.
#[derive(Default)]
pub(super) struct Outbox {
    queue: Mutex<Queue>,
    filled: Notify,
    /// Tells the dialing task not to wait any longer.
    pub(super) hint: Notify,
}

#[derive(Default)]
struct Queue {
    frames: VecDeque<Bytes>,
    /// The sum of their lengths.
    bytes: usize,
    /// The connection, while all that was taken from here is written: then a small frame goes to its socket without the
    /// detour over another thread.
    lent: Option<Line>,
    /// What the socket did not take of such a frame.
    rest: Option<Bytes>,
}

/// A connection as frames see it.
pub(super) struct Line {
    pub(super) framing: Framing,
    /// The socket, if there is nothing around it.
    pub(super) direct: Option<Arc<std::net::TcpStream>>,
}

impl Outbox {
    /// If it is too much, the newest frame goes: a stream with a hole in it would be of no use.
    pub(super) fn push(&self, frame: Bytes, limits: &LaneLimits) -> bool {
        let mut queue = self.queue.lock();
        if queue.write(&frame) {
            if queue.rest.is_some() {
                drop(queue);
                self.filled.notify_one();
            }
            return true;
        }
        let Queue { frames, bytes, .. } = &mut *queue;
        let full = frames.len() >= limits.queue_frames_max
            || !frames.is_empty() && *bytes + frame.len() > limits.queue_bytes_max;
        if full {
            return false;
        }
        *bytes += frame.len();
        frames.push_back(frame);
        drop(queue);
        self.filled.notify_one();
        true
    }

    /// What is to be written next. If that is nothing, frames may go to the socket of `line`, which is lent to the
    /// queue then: `line` is empty until the next call gets it back.
    pub(super) fn take(&self, line: &mut Option<Line>) -> Batch {
        let mut queue = self.queue.lock();
        let Queue { frames, bytes, rest, lent } = &mut *queue;
        if lent.is_some() {
            *line = lent.take();
        }
        if frames.is_empty() && rest.is_none() {
            if line.as_ref().is_some_and(|line| line.direct.is_some()) {
                *lent = line.take();
            }
            return Batch::default();
        }
        let rest = rest.take();
        let (mut count, mut sum) = (0, 0);
        while let Some(frame) = frames.get(count)
            && (count == 0 || sum + frame.len() <= BATCH_BYTES)
        {
            count += 1;
            sum += frame.len();
        }
        *bytes -= sum;
        let taken = frames.drain(..count).collect::<Vec<_>>();
        drop(queue);
        let line = line.as_mut().expect("it is lent only while there is nothing to write");
        Batch::new(rest, taken, &mut line.framing)
    }

    pub(super) fn clear(&self) {
        *self.queue.lock() = Queue::default();
    }

    pub(super) async fn filled(&self) {
        while self.is_empty() {
            self.filled.notified().await;
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        let queue = self.queue.lock();
        queue.frames.is_empty() && queue.rest.is_none()
    }

    /// The connection is gone.
    pub(super) fn disconnect(&self) {
        let mut queue = self.queue.lock();
        (queue.lent, queue.rest) = (None, None);
    }
}

impl Queue {
    /// True: the frame is in the socket, or the socket's next task.
    fn write(&mut self, frame: &Bytes) -> bool {
        let Some(Line { framing, direct: Some(socket) }) = &mut self.lent else { return false };
        if frame.len() > COALESCE_BYTES || self.rest.is_some() || !self.frames.is_empty() {
            return false;
        }
        let mut bytes = BytesMut::new();
        framing.put(frame, &mut bytes);
        // If the socket is broken, the task behind it finds out.
        let written = io::Write::write(&mut &**socket, &bytes).unwrap_or(0);
        bytes.advance(written);
        if !bytes.is_empty() {
            self.rest = Some(bytes.freeze());
        }
        true
    }
}

/// Frames on their way into a socket. Can be left and taken up again at any time.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) chunks: VecDeque<Bytes>,
    /// Written, but perhaps still in a buffer of TLS.
    unflushed: bool,
}

impl Batch {
    /// The rest of a frame that is under way, then frames.
    pub(super) fn new(rest: Option<Bytes>, frames: Vec<Bytes>, framing: &mut Framing) -> Self {
        let mut chunks = VecDeque::from_iter(rest);
        let mut small = BytesMut::new();
        for frame in frames {
            if frame.len() <= COALESCE_BYTES {
                framing.put(&frame, &mut small);
            } else if framing.is_plain() {
                Framing::put_length(frame.len(), &mut small);
                chunks.push_back(small.split().freeze());
                chunks.push_back(frame);
            } else {
                // Copied once, into a buffer of its own: growing the common one would copy it again.
                if !small.is_empty() {
                    chunks.push_back(small.split().freeze());
                }
                let mut large = BytesMut::new();
                framing.put(&frame, &mut large);
                chunks.push_back(large.freeze());
            }
        }
        if !small.is_empty() {
            chunks.push_back(small.freeze());
        }
        Self { chunks, unflushed: false }
    }

    pub(super) fn is_done(&self) -> bool {
        self.chunks.is_empty() && !self.unflushed
    }

    /// Writes all of it; fails if there is no progress for as long as `stall`.
    pub(super) async fn write(
        &mut self,
        writer: &mut (impl AsyncWrite + Unpin),
        stall: Duration,
    ) -> io::Result<()> {
        while !self.chunks.is_empty() {
            let slices: Vec<_> =
                self.chunks.iter().take(SLICES).map(|chunk| IoSlice::new(chunk)).collect();
            let written = in_time(stall, writer.write_vectored(&slices)).await?;
            if written == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            self.advance(written);
            self.unflushed = true;
        }
        in_time(stall, writer.flush()).await?;
        self.unflushed = false;
        Ok(())
    }

    pub(super) fn advance(&mut self, mut written: usize) {
        while let Some(chunk) = self.chunks.front_mut() {
            let step = written.min(chunk.len());
            chunk.advance(step);
            written -= step;
            if !chunk.is_empty() {
                return;
            }
            self.chunks.pop_front();
        }
    }
}

async fn in_time<T>(limit: Duration, io: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let stalled = |_| io::Error::new(ErrorKind::TimedOut, "the other side does not read");
    timeout(limit, io).await.map_err(stalled)?
}
