//! Conversations with the server, played four times: without sockets on a manual clock, where silence and time
//! are exact, and over TCP with the real binary: in memory mode, as a durable single node, and as a follower in a
//! cluster of three. The scripts are in `scripts/`; one line is one step:
//!
//! ```text
//! # a comment
//! == title                     a section begins: a new server
//! flags: --max-locks 2         … with these flags
//! only: process                … and only without sockets; or `tcp`
//! a> l|k|0                     connection a, opened when first named, sends three lines
//! a>> l\nk\n0                  it sends these bytes and nothing else
//! a< ok <T1> 33                the next line it gets; EOF if the server closes
//! a<any ok 1 || watch incr c   the next lines in any order (pushes may overtake answers)
//! a<json locks.k.waiters=1     JSON in the next line, see below
//! b-                           nothing has arrived
//! +500ms                       time passes (also +2s)
//! a! close                     the client closes and the server has noticed; also `open`, `half-close`,
//!                              `reset` (gone without a word) and `stall` (it stops reading)
//! ? T1 < T2                    the fence of the first is below that of the second
//! ! terminate                  SIGTERM
//! ```
//!
//! Text has the escapes `\n \r \t \\ \xNN`, `${x*256}` for repetitions and `${T1}` for what was received.
//! In an expected line `<T1>` is a token and `<S1>` a session secret (32 hex), `<F1>` a fence and `<N1>` a
//! number (decimal), the same each time; `<F1>` must be the fence in token `<T1>` if there is one. `<*>` is
//! anything up to the end of the line.
//!
//! JSON checks are `path=value`, `path<=value`, `path>=value` or `!path` (absent), separated by blanks. A
//! path goes by member names, list indices, the `key` or `pattern` of a list item, and `#` for a length.
//!
//! Over TCP `+` really waits, so totals are kept small; each section has a process and a thread there. A step
//! begins when the server has come to rest after the one before, so a blocking request is in its queue when
//! the next line is played. If the machine is slow, silence that depends on time is not checked there.

mod transcript;

use std::thread;

use transcript::in_process::InProcess;
use transcript::player::Player;
use transcript::script::{self, Section, Way};
use transcript::tcp::Tcp;

/// Sections of one file that are played at the same time over TCP, where most only wait.
const TCP_AT_ONCE: usize = 12;

/// Less where each is a process that syncs, or three.
const DURABLE_AT_ONCE: usize = 8;
const FOLLOWER_AT_ONCE: usize = 5;

macro_rules! scripts {
    ($($name:ident)*) => {
        const SCRIPTS: &[(&str, &str)] =
            &[$((stringify!($name), include_str!(concat!("scripts/", stringify!($name), ".txt")))),*];

        mod in_process {
            $(#[test]
            fn $name() {
                crate::play(stringify!($name), crate::Way::InProcess);
            })*
        }

        mod tcp {
            $(#[test]
            fn $name() {
                crate::play(stringify!($name), crate::Way::Tcp);
            })*
        }

        mod durable {
            $(#[test]
            fn $name() {
                crate::play(stringify!($name), crate::Way::Durable);
            })*
        }

        mod follower {
            $(#[test]
            fn $name() {
                crate::play(stringify!($name), crate::Way::Follower);
            })*
        }
    };
}

scripts! {
    vectors framing parse_errors auth lifecycle disconnect mutex two_phase semaphores rw elections
    counters kv lists barriers signals watches stats service hello mux sessions reports admin gc
    startup_delay shutdown
}

/// Ids of sessions name the node and its start there; they do not count from 1.
const IDS: &str = "it expects the ids of sessions";
const DELAY: &str = "--startup-grant-delay cannot be used with --raft-dir";
const BEHIND: &str =
    "every request takes a moment there, so input behind one waits and is no abuse";

/// Sections that are rightly different behind a log: script, title (all if empty), reason.
const NOT_REPLICATED: &[(&str, &str, &str)] = &[
    ("admin", "end-session ends all of one connection, which is told and closed", IDS),
    ("admin", "end-session of one that waits", IDS),
    ("admin", "end-session of a kept session, for ever (promise 18)", IDS),
    (
        "disconnect",
        "--auto-release-on-disconnect=false: waiters and enqueue records go all the same",
        IDS,
    ),
    ("lifecycle", "ids of connections count from 1 and are never used again", IDS),
    ("lifecycle", "4095 bytes behind a blocking command are kept, one more is abuse", BEHIND),
    ("lifecycle", "4096 bytes at once, together with the blocking command", BEHIND),
    ("reports", "inspect a lock", IDS),
    ("startup_delay", "", DELAY),
    ("stats", "nothing: arrays, never null", "it expects that there is no cluster"),
    ("stats", "locks", IDS),
    ("stats", "an election is a lock", IDS),
    ("stats", "a lock with waiters but no holder: owner 0, expiry 0", DELAY),
];

fn is_replicated(name: &str, section: &Section) -> bool {
    !NOT_REPLICATED
        .iter()
        .any(|(script, title, _)| *script == name && (title.is_empty() || *title == section.title))
}

#[test]
fn what_is_not_replicated_is_there() {
    for (script, title, _) in NOT_REPLICATED {
        let (_, text) = SCRIPTS.iter().find(|(name, _)| name == script).expect("it is a script");
        let titles = script::parse(text).expect("it can be read").into_iter();
        assert!(title.is_empty() || titles.into_iter().any(|it| it.title == *title), "{title}");
    }
}

/// Plays all sections of a script; fails with a report of each that failed.
fn play(name: &str, way: Way) {
    let (_, text) = SCRIPTS.iter().find(|(known, _)| *known == name).expect("it is in the list");
    let file = format!("crates/dflockd/tests/scripts/{name}.txt");
    let sections = match script::parse(text) {
        Ok(sections) => sections,
        Err(error) => panic!("{file}: {error}"),
    };
    let here = |section: &&Section| match way {
        Way::InProcess | Way::Tcp => section.only.is_none_or(|only| only == way),
        Way::Durable | Way::Follower => {
            section.only != Some(Way::InProcess) && is_replicated(name, section)
        }
    };
    let sections: Vec<_> = sections.iter().filter(here).collect();
    let at_once = match way {
        Way::InProcess => 1,
        Way::Tcp => TCP_AT_ONCE,
        Way::Durable => DURABLE_AT_ONCE,
        Way::Follower => FOLLOWER_AT_ONCE,
    };
    let mut failures = Vec::new();
    for part in sections.chunks(at_once) {
        thread::scope(|scope| {
            let played: Vec<_> = part
                .iter()
                .map(|section| scope.spawn(|| play_section(section, &file, way)))
                .collect();
            for (section, played) in part.iter().zip(played) {
                let outcome = played.join().unwrap_or_else(|payload| {
                    let reason = payload.downcast_ref::<&str>().copied().map(str::to_owned);
                    let reason = reason.or_else(|| payload.downcast_ref::<String>().cloned());
                    let reason = reason.unwrap_or_default();
                    Err(format!("{file} ({}): panic: {reason}", section.title))
                });
                failures.extend(outcome.err());
            }
        });
    }
    assert!(failures.is_empty(), "\n\n{}\n", failures.join("\n\n"));
}

fn play_section(section: &Section, file: &str, way: Way) -> Result<(), String> {
    let start_failed = |error| format!("{file} ({}): {error}", section.title);
    match way {
        Way::InProcess => {
            let mut server = InProcess::start(&section.flags).map_err(start_failed)?;
            Player::new(&mut server).play(section, file)
        }
        Way::Tcp => {
            let mut server = Tcp::start(&section.flags).map_err(start_failed)?;
            Player::new(&mut server).play(section, file)
        }
        Way::Durable | Way::Follower => {
            let size = if way == Way::Durable { 1 } else { 3 };
            let mut server = Tcp::start_replicated(&section.flags, size).map_err(start_failed)?;
            Player::new(&mut server).play(section, file)
        }
    }
}

#[test]
fn every_script_is_played() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scripts");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .expect("the scripts are there")
        .map(|entry| entry.expect("readable").file_name().into_string().expect("plain name"))
        .collect();
    files.sort();
    let mut known: Vec<_> = SCRIPTS.iter().map(|(name, _)| format!("{name}.txt")).collect();
    known.sort();
    assert_eq!(files, known);
}
