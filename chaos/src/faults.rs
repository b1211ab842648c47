//! What is broken, by chance.

use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::{Noise, millis};
use serde_json::json;

use crate::Broken;
use crate::history::Act;
use crate::site::Site;

/// The chance of a run, and what is broken at the moment.
pub struct Faults {
    noise: Noise,
    /// The end of the act: nothing is broken for longer.
    until: Instant,
}

/// What can be broken, and how often of all times.
const ALL: [(&str, usize, Fault); 20] = [
    ("kill of a member", 4, Faults::kill_one),
    ("kill of the leader", 4, Faults::kill_leader),
    ("kill of several", 2, Faults::kill_several),
    ("kill of all", 2, Faults::kill_all),
    ("kill at the start", 2, Faults::kill_at_start),
    ("stop of the leader", 4, Faults::stop_leader),
    ("stop of a member", 3, Faults::stop_one),
    ("stop of several", 1, Faults::stop_several),
    ("restart", 3, Faults::restart),
    ("rolling restart", 1, Faults::rolling),
    ("member alone", 3, Faults::isolate),
    ("leader alone", 2, Faults::isolate_leader),
    ("split", 2, Faults::split),
    ("one-way cuts", 4, Faults::one_way),
    ("delays", 3, Faults::delays),
    ("slow disks", 2, Faults::slow_disks),
    ("hung disk", 4, Faults::hung_disk),
    ("transfer", 3, Faults::transfer),
    ("replacement", 1, Faults::replace),
    ("backup, snapshot", 2, Faults::backup),
];

/// What a single node is spared.
const OF_MANY: [&str; 10] = [
    "kill of several",
    "kill of all",
    "stop of several",
    "rolling restart",
    "member alone",
    "leader alone",
    "split",
    "one-way cuts",
    "delays",
    "transfer",
];

type Fault = fn(&mut Faults, &mut Site, &Act) -> Result<(), Broken>;

impl Faults {
    /// Those of one act.
    pub fn new(seed: u64, act: u64, until: Instant) -> Self {
        Self { noise: Noise::new(seed ^ (act << 20)), until }
    }

    /// Breaks something, mends it, and waits a little. Network and disks may stay broken while something else happens.
    pub fn strike(&mut self, site: &mut Site, act: &Act) -> Result<(), Broken> {
        let can =
            |what: &str| site.size() > 1 || (!OF_MANY.contains(&what) && what != "replacement");
        let kinds: Vec<_> = ALL.iter().filter(|(what, ..)| can(what)).collect();
        let all: usize = kinds.iter().map(|(_, often, _)| often).sum();
        for _ in 0..=self.noise.below(3) / 2 {
            let mut at = self.noise.below(all);
            let mut kinds = kinds.iter();
            let (what, _, fault) = loop {
                let Some(kind) = kinds.next() else { return Ok(()) };
                if at < kind.1 {
                    break kind;
                }
                at -= kind.1;
            };
            act.count(what);
            fault(self, site, act)?;
        }
        self.pause(100, 3000);
        site.mend();
        for at in 0..site.size() {
            site.begin(at);
        }
        site.check_processes(false)?;
        self.pause(200, 2500);
        Ok(())
    }

    /// Lets things be for a while.
    fn pause(&mut self, least: u64, most: u64) {
        let time = millis(least + self.noise.next() % (most - least + 1));
        thread::sleep(time.min(self.until.saturating_duration_since(Instant::now())));
    }

    fn any(&mut self, site: &Site) -> usize {
        self.noise.below(site.size())
    }

    fn leader(&mut self, site: &Site) -> usize {
        site.leader().unwrap_or_else(|| self.noise.below(site.size()))
    }

    /// Some members, at least one, at most so many.
    fn some(&mut self, site: &Site, most: usize) -> Vec<usize> {
        let mut all: Vec<_> = (0..site.size()).collect();
        let count = 1 + self.noise.below(most.max(1));
        (0..count.min(all.len())).map(|_| all.swap_remove(self.noise.below(all.len()))).collect()
    }

    fn kill(&mut self, site: &mut Site, some: &[usize]) -> Result<(), Broken> {
        for &at in some {
            site.kill(at)?;
        }
        self.pause(0, 3000);
        for &at in some {
            site.begin(at);
        }
        Ok(())
    }

    fn kill_one(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        self.kill(site, &[at])
    }

    fn kill_leader(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.leader(site);
        self.kill(site, &[at])
    }

    fn kill_several(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let some = self.some(site, site.size());
        self.kill(site, &some)
    }

    fn kill_all(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let all: Vec<_> = (0..site.size()).collect();
        self.kill(site, &all)
    }

    fn kill_at_start(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        for _ in 0..=self.noise.below(3) {
            site.kill(at)?;
            site.begin(at);
            self.pause(0, 200);
        }
        Ok(())
    }

    fn stop(&mut self, site: &mut Site, some: &[usize]) {
        some.iter().for_each(|&at| site.signal(at, "STOP"));
        if self.noise.below(6) == 0 {
            self.pause(3000, 10_000);
        } else {
            self.pause(200, 3000);
        }
        some.iter().for_each(|&at| site.signal(at, "CONT"));
    }

    fn stop_leader(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.leader(site);
        self.stop(site, &[at]);
        Ok(())
    }

    fn stop_one(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        self.stop(site, &[at]);
        Ok(())
    }

    fn stop_several(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let some = self.some(site, site.size());
        self.stop(site, &some);
        Ok(())
    }

    fn restart(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        site.terminate(at)?;
        self.pause(0, 1000);
        site.begin(at);
        Ok(())
    }

    fn rolling(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        site.heal()?;
        for at in 0..site.size() {
            site.terminate(at)?;
            site.begin(at);
            site.wait_until_ready()?;
        }
        Ok(())
    }

    fn isolate(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        Self::cut_off(site, &[at]);
        self.pause(500, 6000);
        Ok(())
    }

    fn isolate_leader(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let at = self.leader(site);
        Self::cut_off(site, &[at]);
        self.pause(500, 6000);
        Ok(())
    }

    fn split(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let some = self.some(site, site.size() / 2);
        Self::cut_off(site, &some);
        self.pause(500, 6000);
        Ok(())
    }

    /// Nothing gets from these to the others and back.
    fn cut_off(site: &Site, some: &[usize]) {
        for &one in some {
            for other in (0..site.size()).filter(|other| !some.contains(other)) {
                site.cut(one, other);
                site.cut(other, one);
            }
        }
    }

    fn one_way(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        for _ in 0..=self.noise.below(site.size()) {
            let (from, to) = (self.any(site), self.any(site));
            site.cut(from, to);
        }
        self.pause(500, 6000);
        Ok(())
    }

    fn delays(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        for from in 0..site.size() {
            for to in (0..site.size()).filter(|to| *to != from) {
                if self.noise.below(2) == 0 {
                    let by = millis(5 + self.noise.next() % 150);
                    site.delay(from, to, by);
                }
            }
        }
        self.pause(500, 5000);
        Ok(())
    }

    fn slow_disks(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        for at in self.some(site, site.size()) {
            let by = millis(10 + self.noise.next() % 200);
            site.brake(at, by);
        }
        self.pause(500, 5000);
        Ok(())
    }

    fn hung_disk(&mut self, site: &mut Site, _: &Act) -> Result<(), Broken> {
        let some = match self.noise.below(4) {
            0 => self.some(site, site.size()),
            1 => self.some(site, 1),
            _ => vec![self.leader(site)],
        };
        some.iter().for_each(|&at| site.brake(at, Duration::from_secs(60)));
        self.pause(500, 7000);
        // A disk may hang until the process is gone.
        if self.noise.below(3) == 0 {
            for &at in &some {
                site.kill(at)?;
            }
        }
        site.mend();
        some.iter().for_each(|&at| site.begin(at));
        Ok(())
    }

    fn transfer(&mut self, site: &mut Site, act: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        let answer = site.operate(at, "transfer", json!({}));
        if answer.is_some_and(|answer| answer["done"] == true) {
            act.count("transfer done");
        }
        Ok(())
    }

    fn replace(&mut self, site: &mut Site, act: &Act) -> Result<(), Broken> {
        // The slowest of all: only if there is time for it.
        if self.until.saturating_duration_since(Instant::now()) < Duration::from_secs(5) {
            return Ok(());
        }
        site.heal()?;
        let old = self.any(site);
        let via = (old + 1) % site.size();
        if site.replace(old, via)? {
            act.count("replacement done");
        }
        *act.servers.lock() = site.servers();
        Ok(())
    }

    fn backup(&mut self, site: &mut Site, act: &Act) -> Result<(), Broken> {
        let at = self.any(site);
        if self.noise.below(2) == 0 {
            site.operate(at, "snapshot", json!({}));
        } else if site.backup(at)?.is_some() {
            act.count("backup done");
        }
        Ok(())
    }
}
