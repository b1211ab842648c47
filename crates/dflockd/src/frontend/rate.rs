//! How often something may happen per address: a token bucket for each.
//!
//! HTTP and gRPC limit requests with it, `auth.rs` limits wrong tokens.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use dflockd_engine::AddressKey;

/// How often buckets that are full again are dropped.
pub(crate) const SWEEP: Duration = Duration::from_secs(5 * 60);
/// Addresses that have a bucket of their own. Those beyond share one, so that nobody can fill the memory by coming from
/// many addresses.
const BUCKETS_MAX: usize = 65_536;
/// How often a table without room is searched for buckets that can be dropped: each search looks at all of them.
const SEARCH_PAUSE: Duration = Duration::from_secs(1);

/// The buckets of all addresses.
pub(crate) struct RateLimit {
    rate: Rate,
    table: Mutex<Table>,
    /// How many buckets there are, so that an empty table costs no lock.
    count: AtomicUsize,
}

struct Table {
    buckets: HashMap<AddressKey, Bucket>,
    /// Of the addresses for which there was no room.
    shared: Bucket,
    searched_at: Option<Instant>,
}

/// How fast a bucket fills, and how much it holds.
#[derive(Clone, Copy)]
pub(crate) struct Rate {
    per_second: f64,
    burst: f64,
}

/// What is left for one address.
#[derive(Clone, Copy)]
pub(crate) struct Bucket {
    tokens: f64,
    used_at: Option<Instant>,
}

impl Rate {
    #[expect(clippy::cast_precision_loss, reason = "nobody limits to 2^53 a second")]
    pub(crate) fn new(per_second: u64, burst: u64) -> Self {
        Self { per_second: per_second as f64, burst: burst as f64 }
    }

    pub(crate) fn full(self) -> Bucket {
        Bucket { tokens: self.burst, used_at: None }
    }
}

impl Bucket {
    /// What is in it at `now`.
    fn level(&self, rate: Rate, now: Instant) -> f64 {
        let passed = self.used_at.map_or(Duration::ZERO, |at| now.saturating_duration_since(at));
        (self.tokens + passed.as_secs_f64() * rate.per_second).min(rate.burst)
    }

    /// Whether there is a token in it.
    pub(crate) fn has_any(&self, rate: Rate, now: Instant) -> bool {
        self.level(rate, now) >= 1.0
    }

    /// Takes a token, if there is one.
    pub(crate) fn take(&mut self, rate: Rate, now: Instant) -> bool {
        let level = self.level(rate, now);
        // Time that runs back gives nothing, also not later.
        self.used_at = Some(self.used_at.map_or(now, |at| at.max(now)));
        let taken = level >= 1.0;
        self.tokens = if taken { level - 1.0 } else { level };
        taken
    }
}

impl RateLimit {
    /// None if there is no limit. Without a burst, that of a second.
    pub(crate) fn new(per_second: u64, burst: u64) -> Option<Self> {
        let rate = Rate::new(per_second, if burst > 0 { burst } else { per_second });
        let table = Table { buckets: HashMap::new(), shared: rate.full(), searched_at: None };
        let (table, count) = (Mutex::new(table), AtomicUsize::new(0));
        (per_second > 0).then_some(Self { rate, table, count })
    }

    /// Takes one for the address; false if it has used up what it may.
    pub(crate) fn take(&self, address: AddressKey, now: Instant) -> bool {
        let mut table = self.table.lock();
        let known = table.buckets.contains_key(&address);
        if !known && table.buckets.len() >= BUCKETS_MAX {
            table.make_room(self.rate, now);
        }
        let full = !known && table.buckets.len() >= BUCKETS_MAX;
        let bucket = if full {
            &mut table.shared
        } else {
            table.buckets.entry(address).or_insert_with(|| self.rate.full())
        };
        let taken = bucket.take(self.rate, now);
        self.count.store(table.buckets.len(), Ordering::Release);
        taken
    }

    /// Whether the address may have one more now. Takes nothing.
    pub(crate) fn has_any(&self, address: AddressKey, now: Instant) -> bool {
        if self.count.load(Ordering::Acquire) == 0 {
            return true;
        }
        let table = self.table.lock();
        match table.buckets.get(&address) {
            Some(bucket) => bucket.has_any(self.rate, now),
            None if table.buckets.len() < BUCKETS_MAX => true,
            None => table.shared.has_any(self.rate, now),
        }
    }

    /// Drops buckets that are full again: a new one would be the same.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut table = self.table.lock();
        table.drop_full(self.rate, now);
        table.buckets.shrink_to_fit();
        self.count.store(table.buckets.len(), Ordering::Release);
    }
}

impl Table {
    fn make_room(&mut self, rate: Rate, now: Instant) {
        let searched = |at: Instant| now.saturating_duration_since(at) < SEARCH_PAUSE;
        if !self.searched_at.is_some_and(searched) {
            self.searched_at = Some(now);
            self.drop_full(rate, now);
        }
    }

    fn drop_full(&mut self, rate: Rate, now: Instant) {
        self.buckets.retain(|_, bucket| bucket.level(rate, now) < rate.burst);
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;

    fn address(text: &str) -> AddressKey {
        text.parse::<IpAddr>().unwrap().into()
    }

    #[test]
    fn a_bucket_for_each_address() {
        let limit = RateLimit::new(2, 3).unwrap();
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(address);
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let taken = |address, now| limit.take(address, now);
        assert_eq!([0; 4].map(|_| taken(a, at(0))), [true, true, true, false]);
        assert!(taken(b, at(0)));
        assert_eq!([0; 2].map(|_| taken(a, at(500))), [true, false]);
        // It holds no more than the burst, and time that runs back gives nothing.
        assert_eq!([0; 4].map(|_| taken(a, at(60_000))), [true, true, true, false]);
        assert!(!taken(a, at(59_000)));
        assert!(!taken(a, at(60_000)));
    }

    #[test]
    fn to_look_takes_nothing() {
        let limit = RateLimit::new(1, 2).unwrap();
        let (a, now) = (address("10.0.0.1"), Instant::now());
        assert!([0; 5].iter().all(|_| limit.has_any(a, now)));
        assert!(limit.take(a, now) && limit.has_any(a, now));
        assert!(limit.take(a, now) && !limit.has_any(a, now));
        assert!(limit.has_any(a, now + Duration::from_secs(1)));
    }

    #[test]
    fn a_burst_of_a_second_without_one() {
        assert!(RateLimit::new(0, 7).is_none());
        let limit = RateLimit::new(2, 0).unwrap();
        let now = Instant::now();
        assert_eq!([0; 3].map(|_| limit.take(address("::1"), now)), [true, true, false]);
    }

    #[test]
    fn full_buckets_go() {
        let limit = RateLimit::new(1, 2).unwrap();
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(address);
        let start = Instant::now();
        limit.take(a, start);
        limit.take(b, start + Duration::from_millis(500));
        limit.sweep(start + Duration::from_secs(1));
        assert_eq!(limit.table.lock().buckets.keys().collect::<Vec<_>>(), [&b]);
        limit.sweep(start + Duration::from_secs(2));
        assert_eq!(limit.count.load(Ordering::Relaxed), 0);
    }

    /// GUARANTEES 48: whoever comes from many addresses takes no more memory than this, and no more of what is limited.
    #[test]
    fn many_addresses_share_a_bucket() {
        let limit = RateLimit::new(1, 1).unwrap();
        let now = Instant::now();
        let number = |number: u32| AddressKey::from(IpAddr::from(Ipv4Addr::from(number)));
        let taken = (0..200_000).filter(|&n| limit.take(number(n), now)).count();
        assert_eq!(taken, BUCKETS_MAX + 1);
        assert_eq!(limit.table.lock().buckets.len(), BUCKETS_MAX);
        assert!(!limit.has_any(number(300_000), now));
        // Those that are full again make room.
        let later = now + Duration::from_secs(2);
        assert!(limit.take(number(300_000), later));
        assert_eq!(limit.table.lock().buckets.len(), 1);
    }
}
