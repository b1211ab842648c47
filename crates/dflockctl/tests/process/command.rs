//! The command line as a process, and the servers it is for.

use std::ffi::OsStr;
use std::ops::Deref;
use std::process::Command;

use dflockd_testkit::process::clean;
use dflockd_testkit::{Process, Ran, eventually};
use serde_json::Value;

pub(super) const EXE: &str = env!("CARGO_BIN_EXE_dflockctl");

/// A command line to run.
pub(super) struct Ctl(Command);

/// The command line without the settings of whoever runs the tests.
pub(super) fn ctl<S: AsRef<OsStr>>(args: &[S]) -> Ctl {
    let mut command = Command::new(EXE);
    clean(&mut command);
    command.args(args).env("HOME", "/nonexistent").env_remove("XDG_CONFIG_HOME");
    Ctl(command)
}

impl Ctl {
    pub(super) fn env(mut self, name: &str, value: &str) -> Self {
        self.0.env(name, value);
        self
    }

    pub(super) fn run(self) -> Ran {
        self.spawn().end()
    }

    pub(super) fn spawn(self) -> Process {
        Process::spawn(self.0)
    }
}

/// A running server.
pub(super) struct Server(dflockd_testkit::Server);

impl Deref for Server {
    type Target = dflockd_testkit::Server;

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl Server {
    pub(super) fn start(args: &[&str]) -> Self {
        Self::launch(dflockd_testkit::command(args))
    }

    pub(super) fn start_at(port: u16, args: &[&str]) -> Self {
        Self(dflockd_testkit::Server::start_at(port, args))
    }

    /// Starts a command that must end up as a server.
    pub(super) fn launch(command: Command) -> Self {
        Self(dflockd_testkit::Server::launch(command))
    }

    /// Ends it as a crash would; gives its port.
    pub(super) fn kill(self) -> u16 {
        self.0.kill()
    }

    /// The command line, for this server.
    pub(super) fn ctl<S: AsRef<OsStr>>(&self, args: &[S]) -> Ctl {
        ctl(args).env("DFLOCKD_SERVERS", &self.address.to_string())
    }

    /// Its output, which must be JSON.
    #[track_caller]
    pub(super) fn json(&self, args: &[&str]) -> Value {
        self.ctl(args).run().json()
    }

    /// What is known of a lock.
    #[track_caller]
    pub(super) fn shown(&self, key: &str) -> Value {
        self.json(&["show", key, "--json"])
    }

    #[track_caller]
    pub(super) fn wait_for_holders(&self, key: &str, count: u64) {
        self.wait_for("holders_total", key, count);
    }

    #[track_caller]
    pub(super) fn wait_for_waiters(&self, key: &str, count: u64) {
        self.wait_for("waiters", key, count);
    }

    #[track_caller]
    fn wait_for(&self, what: &str, key: &str, count: u64) {
        let shown = || self.shown(key)[what].as_u64().unwrap_or_default();
        eventually(&format!("{count} {what}"), || shown() == count);
    }
}
