//! Requests per second of one address: a bucket of tokens for each.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// How often buckets that nobody uses are dropped.
pub(crate) const SWEEP: Duration = Duration::from_secs(5 * 60);
/// How long nobody used them then.
const UNUSED: Duration = Duration::from_secs(10 * 60);

/// The buckets of all addresses.
pub(crate) struct RateLimit {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<IpAddr, Bucket>>,
}

struct Bucket {
    tokens: f64,
    used_at: Instant,
}

impl RateLimit {
    /// None if there is no limit. Without a burst, that of a second.
    pub(crate) fn new(per_second: u64, burst: u64) -> Option<Self> {
        #[expect(clippy::cast_precision_loss, reason = "nobody limits to 2^53 requests")]
        let [rate, burst] =
            [per_second, if burst > 0 { burst } else { per_second }].map(|n| n as f64);
        let buckets = Mutex::default();
        (per_second > 0).then_some(Self { per_second: rate, burst, buckets })
    }

    /// Whether one more request of the address may pass now.
    pub(crate) fn admit(&self, address: IpAddr, now: Instant) -> bool {
        let mut buckets = self.buckets.lock();
        let full = || Bucket { tokens: self.burst, used_at: now };
        let bucket = buckets.entry(address).or_insert_with(full);
        let passed = now.saturating_duration_since(bucket.used_at).as_secs_f64();
        bucket.tokens = (bucket.tokens + passed * self.per_second).min(self.burst);
        bucket.used_at = now;
        let admitted = bucket.tokens >= 1.0;
        if admitted {
            bucket.tokens -= 1.0;
        }
        admitted
    }

    /// Drops buckets that nobody used for a while.
    pub(crate) fn sweep(&self, now: Instant) {
        let mut buckets = self.buckets.lock();
        buckets.retain(|_, bucket| now.saturating_duration_since(bucket.used_at) < UNUSED);
        buckets.shrink_to_fit();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_for_each_address() {
        let limit = RateLimit::new(2, 3).unwrap();
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse().unwrap());
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let admitted = |address, now| limit.admit(address, now);
        assert_eq!([0; 4].map(|_| admitted(a, at(0))), [true, true, true, false]);
        assert!(admitted(b, at(0)));
        assert_eq!([0; 2].map(|_| admitted(a, at(500))), [true, false]);
        // It holds no more than the burst, and time that runs back gives nothing.
        assert_eq!([0; 4].map(|_| admitted(a, at(60_000))), [true, true, true, false]);
        assert!(!admitted(a, at(59_000)));
    }

    #[test]
    fn a_burst_of_a_second_without_one() {
        assert!(RateLimit::new(0, 7).is_none());
        let limit = RateLimit::new(2, 0).unwrap();
        let address = "::1".parse().unwrap();
        let now = Instant::now();
        assert_eq!([0; 3].map(|_| limit.admit(address, now)), [true, true, false]);
    }

    #[test]
    fn unused_buckets_go() {
        let limit = RateLimit::new(1, 1).unwrap();
        let [a, b] = ["10.0.0.1", "10.0.0.2"].map(|text| text.parse().unwrap());
        let start = Instant::now();
        limit.admit(a, start);
        limit.admit(b, start + UNUSED / 2);
        limit.sweep(start + UNUSED);
        assert_eq!(limit.buckets.lock().keys().collect::<Vec<_>>(), [&b]);
    }
}
