//! What is different on a terminal. `script` makes one.

use std::process::Command;

use dflockd_testkit::process::signal;
use dflockd_testkit::{Dir, Process};

use crate::command::{EXE, Server};

/// Runs a shell command on a terminal of its own.
fn on_terminal(server: &Server, command: &str) -> Process {
    let mut script = Command::new("script");
    let command = format!("stty rows 30 cols 120; exec {command}");
    script.args(["-q", "-f", "-e", "-c", &command, "/dev/null"]);
    script.env("DFLOCKD_SERVERS", server.address.to_string()).env("TERM", "xterm");
    script.env("SHELL", "/bin/sh").env_remove("NO_COLOR");
    Process::spawn(script)
}

#[test]
fn the_place_in_the_queue() {
    let server = Server::start(&[]);
    let ran = server.ctl(&["acquire", "k", "--lease", "60s", "--name", "holder"]).run().expect(0);
    let token = ran.out.split(' ').next().unwrap().to_owned();
    let waiter = on_terminal(&server, &format!("{EXE} lock k -- echo got it"));
    waiter.wait_for_out("waiting for k, place 1 of 1, held by holder for ");
    server.ctl(&["release", "k", &token]).run().expect(0);
    assert!(waiter.end().expect(0).out.contains("got it"));
}

#[test]
fn one_key_press_is_one_signal() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let (got, ready, stop) = (dir.name("got"), dir.name("ready"), dir.name("stop"));
    let script = dir.write(
        "script",
        format!(
            "trap 'echo INT >> {got}' INT; trap 'echo USR1 >> {got}' USR1; echo $PPID > {ready}; \
             while [ ! -e {stop} ]; do sleep 0.02; done; exit 6"
        ),
    );
    let mut running = on_terminal(&server, &format!("{EXE} lock k -- sh {script}"));
    dir.wait_for("ready", "\n");
    running.write(b"\x03");
    dir.wait_for("got", "INT");
    // Sent by somebody, so it is passed on, and after anything that came before.
    signal(dir.read("ready").trim().parse().unwrap(), "USR1");
    dir.wait_for("got", "USR1");
    dir.write("stop", "");
    running.end().expect(6);
    assert_eq!(dir.read("got"), "INT\nUSR1\n");
}

#[test]
fn colours() {
    let server = Server::start(&[]);
    let ran = on_terminal(&server, &format!("{EXE} status")).end().expect(0);
    assert!(ran.out.contains("\u{1b}[32mup"), "{ran:?}");
    let ran = on_terminal(&server, &format!("env NO_COLOR=1 {EXE} status")).end().expect(0);
    assert!(!ran.out.contains('\u{1b}'), "{ran:?}");
}

#[test]
fn top_leaves_the_terminal_as_it_was() {
    let server = Server::start(&[]);
    server.ctl(&["acquire", "first-key", "--lease", "60s"]).run().expect(0);
    let mut top = on_terminal(&server, &format!("{EXE} top --interval 50ms"));
    top.wait_for_out("first-key");
    server.ctl(&["acquire", "second-key", "--lease", "60s"]).run().expect(0);
    top.wait_for_out("second-key");
    top.write(b"s");
    top.wait_for_out("longest");
    top.write(b"/none\r");
    // Only what changes is drawn; this part was blank before.
    top.wait_for_out("(none)");
    top.write(b"q");
    let ran = top.end().expect(0);
    assert!(ran.out.contains("\u{1b}[?1049h") && ran.out.contains("\u{1b}[?1049l"), "{ran:?}");
}
