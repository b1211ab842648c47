//! The scripts of the line protocol (`tests/scripts`), played through gRPC: the same answers, in memory mode and on a
//! durable node.
//!
//! A section is left out if it is about what gRPC does not have: bytes that are no whole requests, `hello` and what
//! comes with it, `auth` and the commands with an operator's token in them (metadata here), the texts of `stats`,
//! `inspect` and `ls` (messages here), how sockets end, and signals to the process. What else differs is in
//! [`NOT_THE_SAME`]. A line that is no request has no call that stands for it and is answered by the player.

use std::thread;

use parking_lot::{Condvar, Mutex};

use super::play::{Played, stands_for_calls};
use super::transcript::player::Player;
use super::transcript::script::{self, Action, Deed, Names, Section, Way, expand};

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

macro_rules! scripts {
    ($($name:ident)*) => {
        const SCRIPTS: &[(&str, &str)] = &[
            $((stringify!($name), include_str!(concat!("../scripts/", stringify!($name), ".txt")))),*
        ];

        mod memory {
            $(#[test]
            fn $name() {
                super::play(stringify!($name), false);
            })*
        }

        mod durable {
            $(#[test]
            fn $name() {
                super::play(stringify!($name), true);
            })*
        }
    };
}

scripts! {
    vectors framing parse_errors auth lifecycle disconnect mutex two_phase semaphores rw elections
    counters kv lists barriers signals watches stats service hello mux sessions reports admin gc
    startup_delay shutdown
}

/// Sections that rightly differ: script, title, reason.
const NOT_THE_SAME: &[(&str, &str, &str)] = &[
    (
        "counters",
        "get does not create; a failed one does not either",
        "what is subtracted is added with the other sign, which the smallest integer does not have",
    ),
    (
        "elections",
        "observe while somebody leads: told at once; repeating is free and may repeat the line",
        "nothing is repeated here (promise 29)",
    ),
    (
        "elections",
        "an explicit observer hears everything but the election of itself (decision 12)",
        OBSERVERS,
    ),
    (
        "elections",
        "an observer that is promoted hears of the failover, not of its own election",
        OBSERVERS,
    ),
    ("elections", "unobserve ends it, for the leader, too", OBSERVERS),
];

const OBSERVERS: &str = "an observer is a stream, which is told of all elections";

/// How many sections there are to play; a filter that leaves out too much is a mistake.
const PLAYED_MIN: usize = 120;

/// Whether a section is about something that gRPC has.
fn is_played(name: &str, section: &Section, durable: bool) -> bool {
    let differs = NOT_THE_SAME
        .iter()
        .any(|(script, title, _)| *script == name && (title.is_empty() || *title == section.title));
    let has = |flag: &str| section.flags.iter().any(|given| given.starts_with(flag));
    // The token comes with every call, and limits of connections are about sockets.
    let about_sockets = ["--auth-token", "--max-connections", "--idle-timeout", "--read-timeout"];
    // A stream has its own subscriptions, every grant has its fence, and closing a session is no disconnect.
    let otherwise = ["--max-subscriptions", "--wire-fence", "--auto-release", "--no-auto-release"];
    let by_flags = about_sockets.iter().chain(&otherwise).any(|flag| has(flag));
    let of_memory = durable && has("--startup-grant-delay");
    !differs
        && !by_flags
        && !of_memory
        && section.only != Some(Way::InProcess)
        && section.steps.iter().all(|step| match &step.action {
            Action::Send { lines, .. } => {
                let lines: Vec<_> = lines.iter().map(|line| sample(line)).collect();
                let mut bytes = lines.join(&b'\n');
                bytes.push(b'\n');
                stands_for_calls(&bytes)
            }
            Action::SendRaw { text, .. } => stands_for_calls(&sample(text)),
            Action::Expect { pattern, .. } => pattern != "EOF",
            Action::Do { deed, .. } => matches!(deed, Deed::Open | Deed::Close),
            Action::ExpectAll { .. }
            | Action::ExpectNothing { .. }
            | Action::Pass(_)
            | Action::Below(..) => true,
            Action::ExpectJson { .. } | Action::Terminate => false,
        })
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

fn play(name: &str, durable: bool) {
    let (_, text) = SCRIPTS.iter().find(|(known, _)| *known == name).expect("it is in the list");
    let file = format!("crates/dflockd/tests/scripts/{name}.txt");
    let sections = script::parse(text).unwrap_or_else(|error| panic!("{file}: {error}"));
    let sections: Vec<_> =
        sections.iter().filter(|section| is_played(name, section, durable)).collect();
    let mut failures = Vec::new();
    for part in sections.chunks(AT_ONCE) {
        thread::scope(|scope| {
            let played: Vec<_> = part
                .iter()
                .map(|section| scope.spawn(|| play_section(section, &file, durable)))
                .collect();
            for (section, played) in part.iter().zip(played) {
                let outcome = played.join().unwrap_or_else(|payload| {
                    let reason = payload.downcast_ref::<&str>().copied().map(str::to_owned);
                    let reason = reason.or_else(|| payload.downcast_ref::<String>().cloned());
                    Err(format!(
                        "{file} ({}): panic: {}",
                        section.title,
                        reason.unwrap_or_default()
                    ))
                });
                failures.extend(outcome.err());
            }
        });
    }
    assert!(failures.is_empty(), "\n\n{}\n", failures.join("\n\n"));
}

fn play_section(section: &Section, file: &str, durable: bool) -> Result<(), String> {
    let _turn = Turn::take();
    let mut server = Played::start(&section.flags, durable)
        .map_err(|error| format!("{file} ({}): {error}", section.title))?;
    Player::new(&mut server).play(section, file)
}

#[test]
fn most_sections_are_played() {
    let mut played = 0;
    for (name, text) in SCRIPTS {
        let sections = script::parse(text).expect("it can be read");
        played += sections.iter().filter(|section| is_played(name, section, false)).count();
        for (script, title, _) in NOT_THE_SAME.iter().filter(|(script, _, _)| script == name) {
            let known = title.is_empty() || sections.iter().any(|it| it.title == *title);
            assert!(known, "{script}: {title}");
        }
    }
    assert!(played >= PLAYED_MIN, "{played}");
}
