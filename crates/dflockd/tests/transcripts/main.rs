//! Conversations with the server, played four times: without sockets on a manual clock, where silence and time
//! are exact, and over TCP with the real binary: in memory mode, as a durable single node, and as a follower in a
//! cluster of three. `dflockd_testkit::script` says what a script looks like.
//!
//! Over TCP `+` really waits, so totals are kept small; each section has a process and a thread there. A step
//! begins when the server has come to rest after the one before, so a blocking request is in its queue when
//! the next line is played. If the machine is slow, silence that depends on time is not checked there.

mod without_sockets;

use dflockd_testkit::each_script;
use dflockd_testkit::script::list::{
    self, NOT_REPLICATED, SCRIPTS, check_differences, differs, play_all,
};
use dflockd_testkit::script::player::Player;
use dflockd_testkit::script::steps::{Section, Way};
use dflockd_testkit::script::tcp::Tcp;

use crate::without_sockets::InProcess;

/// Sections of one file that are played at the same time over TCP, where most only wait.
const TCP_AT_ONCE: usize = 12;

/// Less where each is a process that syncs, or three.
const DURABLE_AT_ONCE: usize = 8;
const FOLLOWER_AT_ONCE: usize = 5;

macro_rules! scripts {
    ($($name:ident)*) => {
        scripts! { in_process InProcess: $($name)* }
        scripts! { tcp Tcp: $($name)* }
        scripts! { durable Durable: $($name)* }
        scripts! { follower Follower: $($name)* }
    };
    ($module:ident $way:ident: $($name:ident)*) => {
        mod $module {
            $(#[test]
            fn $name() {
                crate::play(stringify!($name), crate::Way::$way);
            })*
        }
    };
}

each_script!(scripts);

#[test]
fn what_is_not_replicated_is_there() {
    check_differences(NOT_REPLICATED);
}

/// Plays all sections of a script; fails with a report of each that failed.
fn play(name: &str, way: Way) {
    let (file, sections) = list::sections(name);
    let here = |section: &&Section| match way {
        Way::InProcess | Way::Tcp => section.only.is_none_or(|only| only == way),
        Way::Durable | Way::Follower => {
            section.only != Some(Way::InProcess) && !differs(NOT_REPLICATED, name, section)
        }
    };
    let sections: Vec<_> = sections.iter().filter(here).collect();
    let at_once = match way {
        Way::InProcess => 1,
        Way::Tcp => TCP_AT_ONCE,
        Way::Durable => DURABLE_AT_ONCE,
        Way::Follower => FOLLOWER_AT_ONCE,
    };
    play_all(&file, &sections, at_once, |section| play_section(section, &file, way));
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
            let mut server = Tcp::start_replicated(&section.flags, size);
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
