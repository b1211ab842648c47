//! Whether processes have come to rest: without this a blocking request and one on another connection could be executed
//! in any order.

use std::time::{Duration, Instant};

/// How long to wait for a server to come to rest.
const LIMIT: Duration = Duration::from_secs(10);
/// After this nothing will come of what the server has not noticed.
const UNNOTICED: Duration = Duration::from_millis(50);
/// How often the processes of a cluster must be seen at rest: while one of them is looked at, what it waits for may
/// just have been given to another.
const RESTS: u32 = 2;
/// Where nobody can tell, they get some time.
const BLIND: Duration = Duration::from_millis(30);

/// What the threads of processes are doing.
#[derive(Clone, Copy)]
pub struct Activity {
    /// None runs or could.
    asleep: bool,
    /// How often they went to sleep.
    switches: u64,
}

impl Activity {
    /// None where there is no `/proc`.
    pub fn of(pids: &[u32]) -> Option<Self> {
        let mut all = Self { asleep: true, switches: 0 };
        for pid in pids {
            for thread in std::fs::read_dir(format!("/proc/{pid}/task")).ok()? {
                // A thread that has just ended does nothing any more.
                let Ok(status) = std::fs::read_to_string(thread.ok()?.path().join("status")) else {
                    continue;
                };
                all.add(&status);
            }
        }
        Some(all)
    }

    fn add(&mut self, status: &str) {
        for line in status.lines() {
            if let Some(state) = line.strip_prefix("State:") {
                self.asleep &= state.trim_start().starts_with(['S', 'I', 'Z', 'X']);
            } else if let Some(count) = line.strip_prefix("voluntary_ctxt_switches:") {
                self.switches += count.trim().parse::<u64>().unwrap_or_default();
            }
        }
    }
}

/// A wait until all threads of some processes sleep and, if told what they had done before, did more.
pub struct Rest {
    before: Option<Activity>,
    begun: Instant,
    /// How often they were seen at rest, one after the other, and how often they must be.
    seen: u32,
    enough: u32,
    pause: Duration,
}

impl Rest {
    /// Begins to wait. Members of a cluster must be seen at rest more often.
    pub fn new(before: Option<Activity>, replicated: bool) -> Self {
        let (enough, micros) = if replicated { (RESTS, 1000) } else { (1, 20) };
        let pause = Duration::from_micros(micros);
        Self { before, begun: Instant::now(), seen: 0, enough, pause }
    }

    /// Looks once; if they do not rest yet, a little later.
    pub fn has_come(&mut self, pids: &[u32]) -> bool {
        let Some(now) = Activity::of(pids) else {
            std::thread::sleep(BLIND);
            return true;
        };
        let moved = self.before.is_none_or(|before| before.switches != now.switches);
        let waited = self.begun.elapsed();
        // What is sent to a connection that is already closed wakes nobody.
        let rests = now.asleep && (moved || waited > UNNOTICED);
        self.seen = if rests { self.seen + 1 } else { 0 };
        if self.seen >= self.enough || waited > LIMIT {
            return true;
        }
        std::thread::sleep(self.pause);
        self.pause = (self.pause * 2).min(Duration::from_millis(1));
        false
    }
}
