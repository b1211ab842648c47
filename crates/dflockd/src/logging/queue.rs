//! Lines on their way to stderr.
//!
//! Nobody waits for stderr but a thread of its own. When stderr blocks, ordinary lines are lost beyond a bound, and
//! counted. Lines about what operators did are never lost: beyond a bound of theirs nothing more is done that would
//! need one ([`Queue::has_room`]).

use std::collections::VecDeque;
use std::io::{self, Write};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};
use tracing::Metadata;
use tracing_subscriber::fmt::MakeWriter;

/// Ordinary lines that may wait, and how many bytes they have.
const LINES_MAX: usize = 16_384;
const LINES_BYTES_MAX: usize = 8 << 20;
/// Lines about operators that may wait before operators have to.
const AUDIT_LINES_MAX: usize = 4096;
/// How much is written at once.
const WRITE_BYTES: usize = 64 << 10;
/// The field by which lines about operators are known.
const AUDIT: &str = "audit";

/// Lines that are to be written.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    came: Condvar,
    emptied: Condvar,
}

#[derive(Default)]
struct State {
    lines: VecDeque<Line>,
    /// Those that are not written yet, the ones that are being written included.
    ordinary: usize,
    ordinary_bytes: usize,
    audit: usize,
    /// Ordinary lines for which there was no room.
    lost: u64,
    /// How many of them have been told.
    told: u64,
    closed: bool,
}

struct Line {
    text: Box<[u8]>,
    audit: bool,
}

impl Queue {
    /// Adds a line, or drops it.
    fn put(&self, text: &[u8], audit: bool) {
        let mut state = self.state.lock();
        if audit {
            state.audit += 1;
        } else if state.ordinary >= LINES_MAX || state.ordinary_bytes >= LINES_BYTES_MAX {
            state.lost += 1;
            return;
        } else {
            state.ordinary += 1;
            state.ordinary_bytes += text.len();
        }
        state.lines.push_back(Line { text: text.into(), audit });
        drop(state);
        self.came.notify_one();
    }

    /// Whether operators may go on.
    pub(super) fn has_room(&self) -> bool {
        self.state.lock().audit < AUDIT_LINES_MAX
    }

    /// How many lines were lost.
    pub(super) fn lost(&self) -> u64 {
        self.state.lock().lost
    }

    /// Writes lines as they come, until the queue is closed and empty. `tell_lost` makes a line of how many were lost.
    pub(super) fn run(&self, mut out: impl Write, tell_lost: impl Fn(u64)) {
        let mut buffer = Vec::with_capacity(WRITE_BYTES);
        loop {
            let mut written = State::default();
            let untold = {
                let mut state = self.state.lock();
                while state.lines.is_empty() && !state.closed {
                    self.came.wait(&mut state);
                }
                if state.lines.is_empty() {
                    return;
                }
                while buffer.len() < WRITE_BYTES
                    && let Some(line) = state.lines.pop_front()
                {
                    buffer.extend_from_slice(&line.text);
                    if line.audit {
                        written.audit += 1;
                    } else {
                        written.ordinary += 1;
                        written.ordinary_bytes += line.text.len();
                    }
                }
                state.lost - state.told
            };
            // Where should it be reported?
            let _ = out.write_all(&buffer);
            buffer.clear();
            {
                let mut state = self.state.lock();
                state.audit -= written.audit;
                state.ordinary -= written.ordinary;
                state.ordinary_bytes -= written.ordinary_bytes;
                state.told += untold;
                if state.lines.is_empty() {
                    self.emptied.notify_all();
                }
            }
            if untold > 0 {
                tell_lost(untold);
            }
        }
    }

    /// Waits until all lines are written, not longer than this, and ends the thread.
    pub(super) fn close(&self, patience: Duration) {
        let mut state = self.state.lock();
        state.closed = true;
        self.came.notify_one();
        let is_busy = |state: &mut State| state.audit + state.ordinary > 0;
        self.emptied.wait_while_for(&mut state, is_busy, patience);
    }
}

/// Makes a writer for each event.
pub(super) struct Lines(pub(super) Arc<Queue>);

/// Where the line of one event goes.
pub(super) struct LineWriter<'a> {
    queue: &'a Queue,
    audit: bool,
}

impl<'a> MakeWriter<'a> for Lines {
    type Writer = LineWriter<'a>;

    fn make_writer(&'a self) -> LineWriter<'a> {
        LineWriter { queue: &self.0, audit: false }
    }

    fn make_writer_for(&'a self, event: &Metadata<'_>) -> LineWriter<'a> {
        LineWriter { queue: &self.0, audit: event.fields().field(AUDIT).is_some() }
    }
}

impl Write for LineWriter<'_> {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.queue.put(text, self.audit);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    /// Blocks at its first line until it is told to go on, as a pipe does that nobody reads.
    struct Stuck {
        go_on: Option<mpsc::Receiver<()>>,
        text: Arc<Mutex<Vec<u8>>>,
    }

    impl Write for Stuck {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            if let Some(go_on) = self.go_on.take() {
                go_on.recv().unwrap();
            }
            self.text.lock().extend_from_slice(text);
            Ok(text.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    /// GUARANTEES 48: whoever writes a line never waits, ordinary lines are lost beyond a bound and counted, and lines
    /// about operators are all there, however many others came.
    #[test]
    fn a_stuck_stderr_costs_ordinary_lines_only() {
        let queue = Arc::new(Queue::default());
        let (go, go_on) = mpsc::channel();
        let text = Arc::new(Mutex::new(Vec::new()));
        let out = Stuck { go_on: Some(go_on), text: Arc::clone(&text) };
        let (writer, told) = (Arc::clone(&queue), Arc::new(Mutex::new(Vec::new())));
        let (in_writer, tells) = (Arc::clone(&told), Arc::clone(&queue));
        let thread = thread::spawn(move || {
            writer.run(out, |lost| {
                in_writer.lock().push(lost);
                tells.put(b"lost\n", false);
            });
        });
        for number in 0..40_000 {
            queue.put(b"ordinary\n", false);
            if number % 10 == 0 {
                queue.put(format!("audit {number}\n").as_bytes(), true);
            }
        }
        assert_eq!(queue.lost(), 40_000 - LINES_MAX as u64);
        assert!(queue.has_room());
        for number in 40_000..40_096 {
            queue.put(format!("audit {number}\n").as_bytes(), true);
        }
        assert!(!queue.has_room(), "operators wait rather than do what nobody can read about");
        go.send(()).unwrap();
        queue.close(Duration::from_secs(30));
        thread.join().unwrap();
        assert!(queue.has_room());
        let text = String::from_utf8(text.lock().clone()).unwrap();
        let audit: Vec<_> = text.lines().filter_map(|line| line.strip_prefix("audit ")).collect();
        let expected: Vec<_> = (0..40_000).step_by(10).chain(40_000..40_096).collect();
        assert_eq!(audit, expected.iter().map(ToString::to_string).collect::<Vec<_>>());
        assert_eq!(text.lines().filter(|line| *line == "ordinary").count(), LINES_MAX);
        assert_eq!(told.lock().iter().sum::<u64>(), queue.lost());
    }

    #[test]
    fn bytes_are_bounded_as_well() {
        let queue = Queue::default();
        let line = vec![b'x'; 1 << 20];
        (0..20).for_each(|_| queue.put(&line, false));
        assert_eq!(queue.lost(), 12);
    }
}
