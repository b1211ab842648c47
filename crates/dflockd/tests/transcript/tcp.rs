//! The real binary, real sockets, real time.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use socket2::SockRef;

use super::{Received, Server};

/// How long an expected line may take, beside the time that the script lets pass.
const PATIENCE: Duration = Duration::from_secs(5);
/// How far real time may run ahead of the script before silence proves nothing.
const LATE: Duration = Duration::from_millis(150);
/// How long to wait for the server to come to rest.
const REST: Duration = Duration::from_secs(2);
/// After this nothing will come of what the server has not noticed.
const UNNOTICED: Duration = Duration::from_millis(50);

pub(crate) struct Tcp {
    server: Child,
    address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
    clients: BTreeMap<String, Client>,
    started: Instant,
    /// What the script let pass.
    passed: Duration,
}

struct Client {
    stream: TcpStream,
    received: Vec<u8>,
    ended: bool,
}

impl Tcp {
    pub(crate) fn start(flags: &[String]) -> Result<Self, String> {
        let mut server = Command::new(env!("CARGO_BIN_EXE_dflockd"))
            .args(["--port", "0"])
            .args(flags)
            .env_clear()
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|error| error.to_string())?;
        let mut stderr = BufReader::new(server.stderr.take().expect("piped"));
        let mut first = Vec::new();
        let address = loop {
            let mut line = String::new();
            if stderr.read_line(&mut line).is_ok_and(|count| count == 0) {
                let _ = server.wait();
                return Err(format!("the server did not start: {}", first.concat()));
            }
            first.push(line.clone());
            let address = line.split_whitespace().find_map(|word| word.strip_prefix("addr="));
            if line.contains("listening")
                && let Some(address) = address.and_then(|address| address.parse().ok())
            {
                break address;
            }
        };
        let log = Arc::new(Mutex::new(first));
        let more = Arc::clone(&log);
        std::thread::spawn(move || {
            for line in stderr.lines().map_while(Result::ok) {
                more.lock().push(line);
            }
        });
        Ok(Self {
            server,
            address,
            log,
            clients: BTreeMap::new(),
            started: Instant::now(),
            passed: Duration::ZERO,
        })
    }

    /// Does something that the server notices, and returns when it has dealt with it: when some thread of the
    /// server has run since and all sleep again. Without this a blocking request and one on another
    /// connection could be executed in any order.
    fn cause(&mut self, act: impl FnOnce(&mut Self)) {
        self.settle(None);
        let before = Activity::of(self.server.id());
        act(self);
        self.settle(before);
    }

    /// Waits until all threads of the server sleep and, if told what they had done before, did more.
    fn settle(&self, before: Option<Activity>) {
        let started = Instant::now();
        let mut pause = Duration::from_micros(20);
        loop {
            // Not Linux: nobody can tell, so it gets some time.
            let Some(now) = Activity::of(self.server.id()) else {
                return std::thread::sleep(Duration::from_millis(30));
            };
            let moved = before.is_none_or(|before| before.switches != now.switches);
            let waited = started.elapsed();
            // What is sent to a connection that is already closed wakes nobody.
            if now.asleep && (moved || waited > UNNOTICED) || waited > REST {
                return;
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
    }

    fn client(&mut self, conn: &str) -> &mut Client {
        self.clients.get_mut(conn).expect("opened before it is used")
    }
}

impl Server for Tcp {
    fn open(&mut self, conn: &str) {
        self.cause(|tcp| {
            let stream = TcpStream::connect(tcp.address).expect("the server listens");
            stream.set_nodelay(true).expect("a socket takes options");
            let client = Client { stream, received: Vec::new(), ended: false };
            tcp.clients.insert(conn.to_owned(), client);
        });
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        // The server may have closed already, which the script will see.
        self.cause(|tcp| {
            let _ = tcp.client(conn).stream.write_all(bytes);
        });
    }

    fn half_close(&mut self, conn: &str) {
        self.cause(|tcp| {
            let _ = tcp.client(conn).stream.shutdown(Shutdown::Write);
        });
    }

    fn close(&mut self, conn: &str) {
        self.half_close(conn);
        // The server closes its side when it has cleaned up.
        while let Received::Line(_) = self.receive(conn) {}
    }

    fn reset(&mut self, conn: &str) {
        self.cause(|tcp| {
            let client = tcp.clients.remove(conn).expect("opened before it is used");
            let _ = SockRef::from(&client.stream).set_linger(Some(Duration::ZERO));
        });
    }

    fn stall(&mut self, _conn: &str) {
        panic!("sockets have buffers of their own: mark the section `only: process`");
    }

    fn receive(&mut self, conn: &str) -> Received {
        self.client(conn).receive(Instant::now() + PATIENCE)
    }

    fn receive_now(&mut self, conn: &str) -> Received {
        self.settle(None);
        self.client(conn).receive(Instant::now())
    }

    fn pass(&mut self, time: Duration) {
        std::thread::sleep(time);
        self.passed += time;
    }

    fn is_late(&self) -> bool {
        self.started.elapsed() > self.passed + LATE
    }

    fn terminate(&mut self) {
        self.cause(|tcp| {
            let pid = tcp.server.id().to_string();
            let status = Command::new("kill").args(["-TERM", &pid]).status();
            assert!(status.is_ok_and(|status| status.success()), "kill -TERM {pid} failed");
        });
    }

    fn check(&mut self) {}

    fn log(&self) -> Vec<String> {
        self.log.lock().clone()
    }
}

impl Drop for Tcp {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

impl Client {
    fn receive(&mut self, until: Instant) -> Received {
        loop {
            if let Some(end) = self.received.iter().position(|byte| *byte == b'\n') {
                return Received::Line(self.received.drain(..=end).take(end).collect());
            }
            if self.ended {
                return Received::End;
            }
            let left = until.saturating_duration_since(Instant::now());
            self.stream.set_nonblocking(left.is_zero()).expect("a socket takes options");
            let timeout = left.max(Duration::from_millis(1));
            self.stream.set_read_timeout(Some(timeout)).expect("a socket takes options");
            let mut buffer = [0; 16 * 1024];
            let read = self.stream.read(&mut buffer);
            self.stream.set_nonblocking(false).expect("a socket takes options");
            match read {
                Ok(0) => self.ended = true,
                Ok(count) => self.received.extend_from_slice(&buffer[..count]),
                Err(error) if is_early(&error) => return Received::Nothing,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // A reset is an end, too.
                Err(_) => self.ended = true,
            }
        }
    }
}

/// Whether there was just nothing to read yet.
fn is_early(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut)
}

/// What the threads of a process are doing.
#[derive(Clone, Copy)]
struct Activity {
    /// None runs or could.
    asleep: bool,
    /// How often they went to sleep.
    switches: u64,
}

impl Activity {
    /// None where there is no `/proc`.
    fn of(pid: u32) -> Option<Self> {
        let mut activity = Self { asleep: true, switches: 0 };
        for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
            // A thread that has just ended does nothing any more.
            let Ok(status) = std::fs::read_to_string(thread.ok()?.path().join("status")) else {
                continue;
            };
            for line in status.lines() {
                if let Some(state) = line.strip_prefix("State:") {
                    activity.asleep &= state.trim_start().starts_with(['S', 'I', 'Z', 'X']);
                } else if let Some(count) = line.strip_prefix("voluntary_ctxt_switches:") {
                    activity.switches += count.trim().parse::<u64>().unwrap_or_default();
                }
            }
        }
        Some(activity)
    }
}
