//! What the kernel says about a process: time on the processor and memory.

use std::fs;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Processor time used so far by all threads of `pid`.
///
/// From `schedstat`, which counts nanoseconds, where the kernel has it; from `stat`, which counts
/// hundredths of a second, elsewhere.
pub(crate) fn cpu(pid: u32) -> Option<Duration> {
    cpu_by_thread(pid).or_else(|| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        cpu_of_stat(&stat)
    })
}

/// Processor time used so far by this process, threads that have ended included.
pub(crate) fn own_cpu() -> Duration {
    Duration::try_from(clock_gettime(ClockId::ProcessCPUTime)).unwrap_or_default()
}

/// Resident memory of `pid` in bytes.
pub(crate) fn resident(pid: u32) -> Option<u64> {
    resident_of_status(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?)
}

/// The sum over several processes; `None` if there are none or one cannot be read.
pub(crate) fn sum<T: std::iter::Sum>(pids: &[u32], of: impl Fn(u32) -> Option<T>) -> Option<T> {
    if pids.is_empty() {
        return None;
    }
    pids.iter().map(|&pid| of(pid)).sum()
}

fn cpu_by_thread(pid: u32) -> Option<Duration> {
    let mut total = Duration::ZERO;
    for thread in fs::read_dir(format!("/proc/{pid}/task")).ok()? {
        let Ok(text) = fs::read_to_string(thread.ok()?.path().join("schedstat")) else {
            continue;
        };
        total += Duration::from_nanos(text.split(' ').next()?.parse().ok()?);
    }
    (!total.is_zero()).then_some(total)
}

fn cpu_of_stat(stat: &str) -> Option<Duration> {
    // The name in parentheses may contain anything, also blanks and parentheses.
    let (_, after_name) = stat.rsplit_once(") ")?;
    let mut fields = after_name.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(Duration::from_millis((user + system) * 10))
}

fn resident_of_status(status: &str) -> Option<u64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.trim().strip_suffix(" kB")?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_with_a_nasty_name() {
        let stat = "17 (a) b (c) S 1 17 17 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 5 6 7";
        assert_eq!(cpu_of_stat(stat), Some(Duration::from_secs(3)));
        assert_eq!(cpu_of_stat("17 (x) S 1"), None);
    }

    #[test]
    fn status_in_kilobytes() {
        assert_eq!(resident_of_status("VmPeak:\t9 kB\nVmRSS:\t    1234 kB\n"), Some(1234 * 1024));
        assert_eq!(resident_of_status("VmPeak:\t9 kB\n"), None);
    }

    #[test]
    fn own_process_can_be_read() {
        let pid = std::process::id();
        assert!(resident(pid).unwrap() > 0);
        assert!(cpu(pid).is_some());
        assert_eq!(sum(&[], cpu), None);
        assert_eq!(sum(&[u32::MAX], cpu), None);
    }
}
