//! The scripts of the line protocol (`tests/scripts`), played through another API: the same answers, in memory mode
//! and on a durable node.
//!
//! A section is left out if it is about what the API does not have: bytes that are no whole requests, commands that
//! nothing there stands for (`is_of_lines`, [`Api::has`]), flags that mean nothing there (`SOCKETS`,
//! `OTHERWISE`), how sockets end, and signals to the process. What else differs is in `NOT_THE_SAME` and
//! [`Api::NOT_THE_SAME`], and behind a log in [`NOT_REPLICATED`]. A line that is no request has nothing that stands
//! for it and is answered by the player.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use dflockd_wire::{
    Decoded, Decoder, ErrorCode, Fence, Frame, Grant, Op, Outcome, Push, Request, Response, Unit,
};
use parking_lot::{Condvar, Mutex};

use super::list::{
    Difference, NOT_REPLICATED, SCRIPTS, check_differences, differs, play_all, sections,
};
use super::player::Player;
use super::steps::{Action, Deed, Names, Section, Way, expand};
use super::{Received, Server};

/// How long an expected line may take, beside the time that the script lets pass.
const PATIENCE: Duration = Duration::from_secs(15);
/// How far real time may run ahead of the script before silence proves nothing.
const LATE: Duration = Duration::from_millis(150);
/// How far real time may run ahead before the script lets time pass: nothing in it lasts for less than a second.
const LATE_AT_FIRST: Duration = Duration::from_millis(900);
/// How often a section is played on a machine that is too slow for what it says about time.
const TRIES: u32 = 4;
/// The longest line of a script, and more.
const LINE_BYTES_MAX: usize = 1 << 20;
/// What has to do with connections of the line protocol only. The token comes with every request elsewhere.
const SOCKETS: &[&str] = &["--auth-token", "--max-connections", "--idle-timeout", "--read-timeout"];
/// A stream has its own subscriptions, every grant has its fence, and closing a session is no disconnect.
const OTHERWISE: &[&str] =
    &["--max-subscriptions", "--wire-fence", "--auto-release", "--no-auto-release"];

/// Sections that rightly differ wherever there are no lines.
const NOT_THE_SAME: &[Difference] = &[
    (
        "counters",
        "get does not create; a failed one does not either",
        "what is subtracted is added with the other sign, which the smallest integer does not have",
    ),
    ("elections", "an explicit observer hears everything but the election of itself", OBSERVERS),
    (
        "elections",
        "an observer that is promoted hears of the failover, not of its own election",
        OBSERVERS,
    ),
    ("elections", "unobserve ends it, for the leader, too", OBSERVERS),
];

const OBSERVERS: &str = "an observer is a stream, which is told of all elections";

/// Whether a command is one of the line protocol only: `hello` and what comes with it, `auth` and the commands of
/// operators that name numbers of sessions or carry JSON, the name of a session that is there already, `barrier`, which
/// not every server has elsewhere, and JSON that has another form there.
fn is_of_lines(op: Op) -> bool {
    matches!(
        op,
        Op::Auth
            | Op::Barrier
            | Op::StableRef
            | Op::Hello
            | Op::Cancel
            | Op::Ack
            | Op::Inspect
            | Op::Ls
            | Op::EndSession
            | Op::Cluster
    )
}

/// A server that is talked to in another way than by lines. Connections are what the API has in their place.
pub trait Api: Sized {
    /// What else rightly differs.
    const NOT_THE_SAME: &'static [Difference];
    /// How many sections there are to play; a filter that leaves out too much is a mistake.
    const PLAYED_MIN: usize;

    /// Whether something stands for a request with this command, if it is not one of lines only.
    fn has(op: Op, frame: &Frame<'_>) -> bool;
    /// A server with these flags, in memory mode or with a log.
    fn start(flags: &[String], durable: bool) -> Result<Self, String>;
    /// Opens a connection.
    fn open(&mut self, conn: &str);
    /// Executes whole requests, one after the other; returns when all are answered or wait.
    fn send(&mut self, conn: &str, requests: Vec<Vec<u8>>);
    /// Ends a connection; returns when the server has cleaned up.
    fn close(&mut self, conn: &str);
    /// The next line that is there.
    fn line(&mut self, conn: &str) -> Option<Vec<u8>>;
    /// Waits until everything that was asked has had its effect.
    fn settle(&mut self);
    /// What the server said about itself.
    fn log(&self) -> Vec<String>;
}

/// The line of what a command came to.
pub fn outcome_line(op: Op, outcome: &Outcome) -> Vec<u8> {
    let has_fence = matches!(
        op,
        Op::Rl | Op::Wl | Op::Re | Op::We | Op::Rw | Op::Ww | Op::Rn | Op::Wn | Op::Elect
    );
    let fence = |fence: Fence| has_fence.then_some(fence.0);
    let enqueued = matches!(op, Op::E | Op::Se | Op::Re | Op::We);
    answer_line(&match outcome {
        Outcome::Done | Outcome::Written(_) => Response::Ok,
        Outcome::Granted(Grant { token, lease }) | Outcome::Acquired(Grant { token, lease }) => {
            let (token, lease, fence) = (*token, *lease, fence(token.fence));
            if enqueued {
                Response::Acquired { token, lease, fence }
            } else {
                Response::Granted { token, lease, fence }
            }
        }
        Outcome::Renewed { fence: of, lease } => {
            Response::Renewed { remaining: *lease, fence: fence(*of) }
        }
        Outcome::Queued => Response::Queued,
        Outcome::Timeout => Response::Timeout,
        Outcome::Empty => Response::Nil,
        Outcome::Conflict => Response::CasConflict,
        Outcome::Number(number) => Response::Number(*number),
        Outcome::Value(value) | Outcome::Popped { value, .. } | Outcome::Entry { value, .. } => {
            Response::Value(value)
        }
        Outcome::Items(_) | Outcome::Part(_) | Outcome::Compacted(_) | Outcome::Refused(_) => {
            panic!("{op:?} came to {outcome:?}")
        }
    })
}

/// The line of an answer.
pub fn answer_line(response: &Response<'_>) -> Vec<u8> {
    let mut line = Vec::new();
    response.print(Unit::Seconds, None, &mut line);
    line.pop();
    line
}

/// The next of the lines that have come. Answers and pushes travel by streams of their own, whose order nobody knows:
/// here an answer is before the pushes, as on a line connection (GUARANTEES 54).
pub fn next_line(lines: &mut VecDeque<Vec<u8>>) -> Option<Vec<u8>> {
    let pushes = ["sig ", "watch ", "leader ", "lost "].map(str::as_bytes);
    let is_push = |line: &Vec<u8>| pushes.iter().any(|push| line.starts_with(push));
    let at = lines.iter().position(|line| !is_push(line)).unwrap_or(0);
    lines.remove(at)
}

/// The line of a push.
pub fn push_line(push: &Push<'_>) -> Vec<u8> {
    let mut line = Vec::new();
    push.print(&mut line);
    line.pop();
    line
}

/// What one request asks; a line if it is none.
pub fn read(bytes: &[u8]) -> Result<(Op, Request<'_>), Vec<u8>> {
    let Decoded::Frame { frame, .. } = Decoder::new(LINE_BYTES_MAX).decode(bytes) else {
        unreachable!("only whole requests are played")
    };
    Op::parse(frame.command)
        .and_then(|op| Some((op, Request::parse(op, &frame, Unit::Seconds).ok()?)))
        .ok_or_else(|| answer_line(&Response::Error(ErrorCode::Error)))
}

/// The requests in some bytes, none if there is more in them.
fn requests(bytes: &[u8], mut each: impl FnMut(&Frame<'_>, &[u8])) -> Option<()> {
    let mut decoder = Decoder::new(LINE_BYTES_MAX);
    let mut rest = bytes;
    while let Decoded::Frame { frame, used } = decoder.decode(rest) {
        each(&frame, &rest[..used]);
        rest = &rest[used..];
    }
    (rest.is_empty() && !bytes.is_empty()).then_some(())
}

/// A server as scripts see it.
struct Guest<D> {
    api: D,
    started: Instant,
    /// What the script let pass.
    passed: Duration,
}

impl<D: Api> Server for Guest<D> {
    fn open(&mut self, conn: &str) {
        self.api.open(conn);
    }

    fn send(&mut self, conn: &str, bytes: &[u8]) {
        let mut all = Vec::new();
        requests(bytes, |_, request| all.push(request.to_vec())).expect("whole requests");
        self.api.send(conn, all);
    }

    fn half_close(&mut self, _: &str) {
        unreachable!("sections with it are not played")
    }

    fn close(&mut self, conn: &str) {
        self.api.close(conn);
    }

    fn reset(&mut self, _: &str) {
        unreachable!("sections with it are not played")
    }

    fn stall(&mut self, _: &str) {
        unreachable!("sections with it are not played")
    }

    fn receive(&mut self, conn: &str) -> Received {
        let begun = Instant::now();
        loop {
            if let Some(line) = self.api.line(conn) {
                return Received::Line(line);
            }
            if begun.elapsed() > PATIENCE {
                return Received::Nothing;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn receive_now(&mut self, conn: &str) -> Received {
        self.api.settle();
        self.api.line(conn).map_or(Received::Nothing, Received::Line)
    }

    fn pass(&mut self, time: Duration) {
        std::thread::sleep(time);
        self.passed += time;
    }

    fn is_late(&self) -> bool {
        let late = if self.passed.is_zero() { LATE_AT_FIRST } else { LATE };
        self.started.elapsed() > self.passed + late
    }

    fn terminate(&mut self) {
        unreachable!("sections with it are not played")
    }

    fn check(&mut self) {}

    fn log(&self) -> Vec<String> {
        self.api.log()
    }
}

/// Sections of all scripts that are played at the same time. Most only wait, but each has a server, and what the
/// scripts say about time must hold.
const AT_ONCE: usize = 6;

static FREE: (Mutex<usize>, Condvar) = (Mutex::new(AT_ONCE), Condvar::new());

/// The right to play a section.
struct Turn;

impl Turn {
    fn take() -> Self {
        let mut free = FREE.0.lock();
        FREE.1.wait_while(&mut free, |free| *free == 0);
        *free -= 1;
        Self
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        *FREE.0.lock() += 1;
        FREE.1.notify_one();
    }
}

/// A test of each script in each mode through this API, and of what is left out.
#[macro_export]
macro_rules! play_through {
    ($api:ident, $($name:ident)*) => {
        mod memory {
            $(#[test]
            fn $name() {
                $crate::script::through::play::<super::$api>(stringify!($name), false);
            })*
        }

        mod durable {
            $(#[test]
            fn $name() {
                $crate::script::through::play::<super::$api>(stringify!($name), true);
            })*
        }

        #[test]
        fn most_sections_are_played() {
            $crate::script::through::check_played::<$api>();
        }
    };
}

/// Plays all sections of a script that the API can play.
pub fn play<D: Api>(name: &str, durable: bool) {
    let (file, sections) = sections(name);
    let played = |section: &&Section| is_played::<D>(name, section, durable);
    let sections: Vec<_> = sections.iter().filter(played).collect();
    // All at once: each waits for its turn.
    let count = sections.len().max(1);
    play_all(&file, &sections, count, |section| play_section::<D>(section, &file, durable));
}

/// Plays a section, again if it failed while the machine lagged behind: leases that ended too soon prove nothing then.
fn play_section<D: Api>(section: &Section, file: &str, durable: bool) -> Result<(), String> {
    let _turn = Turn::take();
    let mut tries = 0;
    loop {
        let begun = Instant::now();
        let api = D::start(&section.flags, durable)
            .map_err(|error| format!("{file} ({}): {error}", section.title))?;
        // What begins with the server, `--startup-grant-delay`, is there in memory mode only.
        let started = if durable { Instant::now() } else { begun };
        let mut guest = Guest { api, started, passed: Duration::ZERO };
        let outcome = Player::new(&mut guest).play(section, file);
        tries += 1;
        if outcome.is_ok() || !guest.is_late() || tries == TRIES {
            return outcome;
        }
    }
}

/// Fails if too much is left out.
pub fn check_played<D: Api>() {
    check_differences(NOT_THE_SAME);
    check_differences(D::NOT_THE_SAME);
    for durable in [false, true] {
        let mut played = 0;
        for (name, _) in SCRIPTS {
            let all = sections(name).1;
            played += all.iter().filter(|section| is_played::<D>(name, section, durable)).count();
        }
        assert!(played >= D::PLAYED_MIN, "{played} with durable = {durable}");
    }
}

/// Whether a section is about something that the API has.
fn is_played<D: Api>(name: &str, section: &Section, durable: bool) -> bool {
    let has = |flag: &str| section.flags.iter().any(|given| given.starts_with(flag));
    let is_otherwise = SOCKETS.iter().chain(OTHERWISE).any(|flag| has(flag))
        || differs(NOT_THE_SAME, name, section)
        || differs(D::NOT_THE_SAME, name, section)
        || durable && differs(NOT_REPLICATED, name, section);
    !is_otherwise
        && !matches!(section.only, Some(Way::InProcess | Way::Durable))
        && section.steps.iter().all(|step| match &step.action {
            Action::Send { lines, .. } => {
                let lines: Vec<_> = lines.iter().map(|line| sample(line)).collect();
                let mut bytes = lines.join(&b'\n');
                bytes.push(b'\n');
                has_all::<D>(&bytes)
            }
            Action::SendRaw { text, .. } => has_all::<D>(&sample(text)),
            Action::Expect { pattern, .. } => pattern != "EOF",
            Action::Do { deed, .. } => matches!(deed, Deed::Open | Deed::Close),
            Action::ExpectAll { .. }
            | Action::ExpectJson { .. }
            | Action::ExpectNothing { .. }
            | Action::Pass(_)
            | Action::Below(..) => true,
            Action::Terminate => false,
        })
}

/// Whether these are whole requests, each with something that stands for it.
fn has_all<D: Api>(bytes: &[u8]) -> bool {
    let mut all = true;
    let whole = requests(bytes, |frame, _| {
        all &= Op::parse(frame.command).is_none_or(|op| !is_of_lines(op) && D::has(op, frame));
    });
    whole.is_some() && all
}

/// A text with something in place of what was received.
fn sample(text: &str) -> Vec<u8> {
    let mut names = Names::new();
    loop {
        match expand(text, &names) {
            Ok(bytes) => return bytes,
            Err(_) => {
                let unknown = text.split("${").skip(1).filter_map(|rest| rest.split_once('}'));
                let before = names.len();
                for (name, _) in unknown {
                    names.insert(name.to_owned(), "0".repeat(32));
                }
                assert!(names.len() > before, "{text}");
            }
        }
    }
}
