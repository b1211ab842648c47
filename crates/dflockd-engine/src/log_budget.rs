//! How many log lines others can cause.
//!
//! What a stranger or a client does wrong is worth a line, and worth nothing the thousandth time. Each address has a
//! budget for each kind of line; what is left out is counted and told with the next line of its kind.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::address::AddressKey;

/// Lines of one kind that an address may cause at once.
const BURST: u32 = 10;
/// The time after which it may cause one more.
const REFILL: Duration = Duration::from_secs(10);
/// Addresses and kinds that are told apart. All others share a budget per kind.
const ROWS_MAX: usize = 1024;

/// The budget of one server, or of its peer port.
#[derive(Default)]
pub struct LogBudget {
    rows: Mutex<HashMap<(Option<AddressKey>, &'static str), Row>>,
    suppressed: AtomicU64,
}

struct Row {
    /// When the budget is whole again: each line moves it on.
    whole_at: Instant,
    /// Lines that were left out since the last one.
    suppressed: u64,
}

/// Lines of a kind that were left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Suppressed {
    /// Whose; none for all that are not told apart.
    pub peer: Option<AddressKey>,
    /// What they would have been about.
    pub kind: &'static str,
    /// How many.
    pub count: u64,
}

impl LogBudget {
    /// Whether an address may cause a line of this kind now. The answer is how many were left out before it, if any:
    /// to be told with the line.
    pub fn admit(&self, peer: IpAddr, kind: &'static str) -> Option<Option<u64>> {
        self.admit_at(peer.into(), kind, Instant::now())
    }

    /// How many lines were left out so far.
    pub fn suppressed(&self) -> u64 {
        self.suppressed.load(Ordering::Relaxed)
    }

    /// What was left out and has not been told, of those who could cause a line again; it counts as told then. Forgets
    /// who has been quiet. To be called now and then, so that the end of a flood is told although nothing follows it.
    pub fn take_suppressed(&self) -> Vec<Suppressed> {
        self.take_suppressed_at(Instant::now())
    }

    fn admit_at(&self, peer: AddressKey, kind: &'static str, now: Instant) -> Option<Option<u64>> {
        let mut rows = self.rows.lock();
        let mut key = (Some(peer), kind);
        if rows.len() >= ROWS_MAX && !rows.contains_key(&key) {
            rows.retain(|_, row| row.suppressed > 0 || row.whole_at > now);
            if rows.len() >= ROWS_MAX {
                key = (None, kind);
            }
        }
        let row = match rows.entry(key) {
            Entry::Occupied(row) => row.into_mut(),
            Entry::Vacant(room) => room.insert(Row { whole_at: now, suppressed: 0 }),
        };
        if row.spend(now) {
            let suppressed = std::mem::take(&mut row.suppressed);
            return Some((suppressed > 0).then_some(suppressed));
        }
        row.suppressed += 1;
        self.suppressed.fetch_add(1, Ordering::Relaxed);
        None
    }

    fn take_suppressed_at(&self, now: Instant) -> Vec<Suppressed> {
        let mut untold = Vec::new();
        self.rows.lock().retain(|&(peer, kind), row| {
            if row.suppressed > 0 && row.spend(now) {
                let count = std::mem::take(&mut row.suppressed);
                untold.push(Suppressed { peer, kind, count });
            }
            row.suppressed > 0 || row.whole_at > now
        });
        untold
    }
}

impl Row {
    /// Takes a line from the budget, if there is one left.
    fn spend(&mut self, now: Instant) -> bool {
        let whole_at = self.whole_at.max(now);
        let is_left = whole_at.duration_since(now) <= REFILL * (BURST - 1);
        if is_left {
            self.whole_at = whole_at + REFILL;
        }
        is_left
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn peer(number: u32) -> AddressKey {
        Ipv4Addr::from_bits(number).into()
    }

    /// GUARANTEES 48: an address causes ten lines of a kind at once and then one each ten seconds; what is left out is
    /// told with the next.
    #[test]
    fn a_flood_becomes_a_few_lines() {
        let budget = LogBudget::default();
        let now = Instant::now();
        let lines = (0..10_000).filter(|_| budget.admit_at(peer(1), "a", now).is_some()).count();
        assert_eq!(lines, 10);
        assert_eq!(budget.admit_at(peer(1), "b", now), Some(None), "another kind");
        assert_eq!(budget.admit_at(peer(2), "a", now), Some(None), "another address");
        let later = now + REFILL;
        assert_eq!(budget.admit_at(peer(1), "a", later), Some(Some(9990)));
        assert_eq!(budget.admit_at(peer(1), "a", later), None);
        assert_eq!(budget.suppressed(), 9991);
    }

    #[test]
    fn the_end_of_a_flood_is_told() {
        let budget = LogBudget::default();
        let now = Instant::now();
        for _ in 0..15 {
            let _ = budget.admit_at(peer(1), "a", now);
        }
        assert!(budget.take_suppressed_at(now).is_empty(), "that would be one too many as well");
        let told = Suppressed { peer: Some(peer(1)), kind: "a", count: 5 };
        assert_eq!(budget.take_suppressed_at(now + REFILL), [told]);
        assert!(budget.take_suppressed_at(now + 2 * REFILL).is_empty());
        assert!(!budget.rows.lock().is_empty());
        budget.take_suppressed_at(now + 12 * REFILL);
        assert!(budget.rows.lock().is_empty(), "who is quiet is forgotten");
    }

    /// GUARANTEES 48: many addresses need no more memory than some, and cause no more lines.
    #[test]
    fn many_addresses_share_a_budget() {
        let budget = LogBudget::default();
        let now = Instant::now();
        let all = 0..100_000;
        let lines = all.filter(|&n| budget.admit_at(peer(n), "a", now).is_some()).count();
        assert_eq!(lines, ROWS_MAX + BURST as usize);
        assert_eq!(budget.rows.lock().len(), ROWS_MAX + 1);
        let later = now + REFILL;
        assert_eq!(budget.admit_at(peer(200_000), "a", later), Some(None), "there is room again");
    }
}
