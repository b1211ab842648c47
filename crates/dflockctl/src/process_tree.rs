//! A program and the processes it started.
//!
//! Ending `sh -c 'first; second'` alone would leave `first` at work without the lock. A process group
//! of its own would do as well, but would take the terminal from the program.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

/// One process, told apart from a later one with the same number by when it was started.
struct Process {
    pid: i32,
    started_at: u64,
    /// None on kernels without pidfds; then only the program itself is signalled.
    pidfd: Option<OwnedFd>,
}

/// A program and every process it started that `refresh` has seen.
pub(crate) struct ProcessTree {
    processes: Vec<Process>,
}

impl ProcessTree {
    pub(crate) fn new(program: u32) -> Self {
        let pid = i32::try_from(program).unwrap_or(0);
        let mut tree = Self { processes: Vec::new() };
        if let Some(stat) = Stat::of(pid) {
            tree.add(pid, stat.started_at);
        }
        tree
    }

    /// Sends a signal to all, those included that were started since.
    pub(crate) fn signal(&mut self, signal: Signal) {
        self.refresh();
        for pidfd in self.processes.iter().filter_map(|process| process.pidfd.as_ref()) {
            // It may have ended.
            let _ = pidfd_send_signal(pidfd, signal);
        }
    }

    /// Whether one of them still runs.
    pub(crate) fn is_alive(&mut self) -> bool {
        self.refresh();
        self.processes.iter().any(|process| {
            Stat::of(process.pid)
                .is_some_and(|stat| stat.started_at == process.started_at && !stat.ended)
        })
    }

    /// Finds the descendants of all processes. Those whose parent has ended are found only before that.
    fn refresh(&mut self) {
        let mut children: BTreeMap<i32, Vec<(i32, u64)>> = BTreeMap::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let pid = entry.file_name().to_str().and_then(|name| name.parse().ok());
            let stat = pid.and_then(|pid| Some((pid, Stat::of(pid)?)));
            if let Some((pid, stat)) = stat.filter(|(_, stat)| !stat.ended) {
                children.entry(stat.parent).or_default().push((pid, stat.started_at));
            }
        }
        let mut position = 0;
        while let Some(process) = self.processes.get(position) {
            let parent = process.pid;
            for (pid, started_at) in children.remove(&parent).unwrap_or_default() {
                if !self.processes.iter().any(|it| it.pid == pid && it.started_at == started_at) {
                    self.add(pid, started_at);
                }
            }
            position += 1;
        }
    }

    fn add(&mut self, pid: i32, started_at: u64) {
        let Some(id) = Pid::from_raw(pid) else { return };
        let pidfd = pidfd_open(id, PidfdFlags::empty()).ok();
        // Looked at again, now that the number can not be given away unnoticed.
        if Stat::of(pid).is_some_and(|stat| stat.started_at == started_at) {
            self.processes.push(Process { pid, started_at, pidfd });
        }
    }
}

/// What the kernel says of a process.
struct Stat {
    parent: i32,
    started_at: u64,
    ended: bool,
}

impl Stat {
    fn of(pid: i32) -> Option<Self> {
        let text = fs::read(format!("/proc/{pid}/stat")).ok()?;
        Self::parse(&String::from_utf8_lossy(&text))
    }

    fn parse(text: &str) -> Option<Self> {
        // The name stands in parentheses and may contain anything.
        let (_, rest) = text.rsplit_once(") ")?;
        let fields: Vec<&str> = rest.split(' ').collect();
        let ended = matches!(*fields.first()?, "Z" | "X");
        let parent = fields.get(1)?.parse().ok()?;
        let started_at = fields.get(19)?.parse().ok()?;
        Some(Self { parent, started_at, ended })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_do_not_confuse() {
        let text = "7 (a) R (b) S 5 7 7 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4242 1 1";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.parent, stat.started_at, stat.ended), (5, 4242, false));
        assert!(Stat::parse("7 (a").is_none());
    }
}
