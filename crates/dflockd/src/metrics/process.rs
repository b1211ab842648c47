//! What the system says about this process, from `/proc`. Where it says nothing, nothing is shown.

use std::fs;

/// Ticks per second of the times in `/proc`: the same on every Linux, whatever the kernel's own clock does.
const TICKS: f64 = 100.0;

/// What is known of this process.
#[derive(Debug, Default)]
pub(super) struct Process {
    pub(super) cpu_seconds: Option<f64>,
    pub(super) start_seconds: Option<f64>,
    pub(super) virtual_bytes: Option<u64>,
    pub(super) resident_bytes: Option<u64>,
    pub(super) threads: Option<u64>,
    pub(super) fds: Option<u64>,
    pub(super) fds_max: Option<u64>,
}

impl Process {
    pub(super) fn read() -> Self {
        let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
        let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
        let system = fs::read_to_string("/proc/stat").unwrap_or_default();
        let stat = Stat::parse(&stat);
        let booted = named(&system, "btime ").and_then(|rest| rest.trim().parse::<f64>().ok());
        Self {
            cpu_seconds: stat.as_ref().map(|stat| stat.cpu_ticks / TICKS),
            start_seconds: stat.as_ref().zip(booted).map(|(it, booted)| booted + it.start / TICKS),
            virtual_bytes: stat.as_ref().map(|stat| stat.virtual_bytes),
            resident_bytes: named(&status, "VmRSS:").and_then(kilobytes),
            threads: stat.as_ref().map(|stat| stat.threads),
            fds: fds(),
            fds_max: rlimit::getrlimit(rlimit::Resource::NOFILE).ok().map(|(soft, _)| soft),
        }
    }
}

struct Stat {
    cpu_ticks: f64,
    start: f64,
    threads: u64,
    virtual_bytes: u64,
}

impl Stat {
    fn parse(stat: &str) -> Option<Self> {
        // The name of the program comes first, and may have spaces and parentheses in it.
        let (_, rest) = stat.rsplit_once(") ")?;
        let fields: Vec<_> = rest.split_ascii_whitespace().collect();
        // Numbered as in the manual, where the first of these is field 3.
        let field = |number: usize| fields.get(number - 3);
        let number = |at: usize| field(at)?.parse::<f64>().ok();
        Some(Self {
            cpu_ticks: number(14)? + number(15)?,
            start: number(22)?,
            threads: field(20)?.parse().ok()?,
            virtual_bytes: field(23)?.parse().ok()?,
        })
    }
}

/// The rest of the line that begins with `name`.
fn named<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    text.lines().find_map(|line| line.strip_prefix(name))
}

fn kilobytes(text: &str) -> Option<u64> {
    let number: u64 = text.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(number * 1024)
}

fn fds() -> Option<u64> {
    // Newer kernels say how many there are; to look at a hundred thousand of them takes a while.
    match fs::metadata("/proc/self/fd").ok()?.len() {
        0 => Some(fs::read_dir("/proc/self/fd").ok()?.count() as u64),
        known => Some(known),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_no_obstacle() {
        let stat =
            "7 (a) b (c)) S 1 7 7 0 -1 4194304 1 2 3 4 250 50 0 0 20 0 9 0 12345 4096000 5 6";
        let stat = Stat::parse(stat).unwrap();
        assert_eq!((stat.cpu_ticks, stat.start), (300.0, 12345.0));
        assert_eq!((stat.threads, stat.virtual_bytes), (9, 4_096_000));
        assert!(Stat::parse("").is_none() && Stat::parse("7 (x) S 1").is_none());
        assert_eq!(kilobytes("   12 kB"), Some(12 * 1024));
    }
}
