//! All scripts, and the playing of their sections side by side.

use std::thread;

use super::steps::{self, Section};

/// Calls a macro with the names of all scripts, behind what else it wants.
#[macro_export]
macro_rules! each_script {
    ($then:ident $(, $more:ident)*) => {
        $then! {
            $($more,)*
            vectors framing parse_errors auth lifecycle disconnect mutex two_phase semaphores rw
            elections counters kv lists barriers signals watches stats service hello mux sessions
            reports admin gc startup_delay shutdown foreign references
        }
    };
}

macro_rules! texts {
    ($($name:ident)*) => {
        &[$((
            stringify!($name),
            include_str!(concat!(
                env!("CARGO_MANIFEST_DIR"), "/../dflockd/tests/scripts/", stringify!($name), ".txt"
            )),
        )),*]
    };
}

/// Names and texts.
pub const SCRIPTS: &[(&str, &str)] = each_script!(texts);

/// A section that a way of playing rightly answers otherwise: script, title (all if empty), reason.
pub type Difference = (&'static str, &'static str, &'static str);

/// Ids of sessions name the node and its start there; they do not count from 1.
const IDS: &str = "it expects the ids of sessions";
const DELAY: &str = "--startup-grant-delay cannot be used with --raft-dir";
const BEHIND: &str =
    "every request takes a moment there, so input behind one waits and is no abuse";

/// Sections that are rightly different behind a log.
pub const NOT_REPLICATED: &[Difference] = &[
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

/// Whether a section is one of these.
pub fn differs(differences: &[Difference], name: &str, section: &Section) -> bool {
    differences
        .iter()
        .any(|(script, title, _)| *script == name && (title.is_empty() || *title == section.title))
}

/// Fails if one of these names a section that is not there.
pub fn check_differences(differences: &[Difference]) {
    for (script, title, reason) in differences {
        let known = title.is_empty() || sections(script).1.iter().any(|it| it.title == *title);
        assert!(known && !reason.is_empty(), "{script}: {title}");
    }
}

/// The file of a script, and what is in it.
pub fn sections(name: &str) -> (String, Vec<Section>) {
    let (_, text) = SCRIPTS.iter().find(|(known, _)| *known == name).expect("it is in the list");
    let file = format!("crates/dflockd/tests/scripts/{name}.txt");
    let sections = steps::parse(text).unwrap_or_else(|error| panic!("{file}: {error}"));
    (file, sections)
}

/// Plays sections, so many at the same time; fails with a report of each that failed.
pub fn play_all(
    file: &str,
    sections: &[&Section],
    at_once: usize,
    play: impl Fn(&Section) -> Result<(), String> + Sync,
) {
    let mut failures = Vec::new();
    for part in sections.chunks(at_once) {
        thread::scope(|scope| {
            let play = &play;
            let played: Vec<_> =
                part.iter().map(|section| scope.spawn(move || play(section))).collect();
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
