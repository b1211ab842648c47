//! How many connections, sessions and streams each source address may have, and all addresses together.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use dflockd_engine::{AddressKey, Api};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::frontend::descriptors::Connections;

/// Permits for source addresses. All caps are exact.
pub(crate) struct Caps {
    total: Total,
    per_address_max: u64,
    taken: Mutex<Taken>,
    /// Notified when the last permit is given back.
    empty: Notify,
    /// Told how many permits are taken, whenever that changes.
    gauge: Box<dyn Fn(u64) + Send + Sync>,
}

/// What limits the number of permits of all addresses together.
pub(crate) enum Total {
    /// A number; zero is no limit.
    Max(u64),
    /// The API's share of the file descriptors.
    Connections(Arc<Connections>, Api),
}

#[derive(Default)]
struct Taken {
    by_address: HashMap<AddressKey, u64>,
    total: u64,
}

/// Why there is no permit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Full {
    /// All permits are taken.
    Total,
    /// The source address has as many as it may have.
    Address,
}

/// A permit, given back when dropped.
pub(crate) struct Permit {
    caps: Arc<Caps>,
    address: AddressKey,
}

impl Caps {
    /// So many permits for each address, zero is no limit, and in total. `gauge` is told how many are taken.
    pub(crate) fn new(
        total: Total,
        per_address_max: u64,
        gauge: impl Fn(u64) + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (taken, empty, gauge) = (Mutex::default(), Notify::new(), Box::new(gauge));
        Arc::new(Self { total, per_address_max, taken, empty, gauge })
    }

    /// A permit for a client at this address.
    pub(crate) fn take(self: &Arc<Self>, address: IpAddr) -> Result<Permit, Full> {
        let address = AddressKey::from(address);
        let mut taken = self.taken.lock();
        if matches!(self.total, Total::Max(max @ 1..) if taken.total >= max) {
            return Err(Full::Total);
        }
        let here = taken.by_address.get(&address).copied().unwrap_or(0);
        if self.per_address_max > 0 && here >= self.per_address_max {
            return Err(Full::Address);
        }
        if let Total::Connections(connections, api) = &self.total
            && !connections.enter(*api)
        {
            return Err(Full::Total);
        }
        taken.by_address.insert(address, here + 1);
        taken.total += 1;
        (self.gauge)(taken.total);
        Ok(Permit { caps: Arc::clone(self), address })
    }

    /// How many permits are taken.
    pub(crate) fn count(&self) -> u64 {
        self.taken.lock().total
    }

    /// Waits until no permit is taken.
    pub(crate) async fn emptied(&self) {
        loop {
            let empty = self.empty.notified();
            if self.count() == 0 {
                return;
            }
            empty.await;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let caps = &*self.caps;
        let mut taken = caps.taken.lock();
        if let Total::Connections(connections, api) = &caps.total {
            connections.leave(*api);
        }
        if let Some(here) = taken.by_address.get_mut(&self.address) {
            *here -= 1;
            if *here == 0 {
                taken.by_address.remove(&self.address);
            }
        }
        taken.total -= 1;
        (caps.gauge)(taken.total);
        if taken.total == 0 {
            caps.empty.notify_waiters();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    #[test]
    fn caps_are_exact_and_a_permit_comes_back_when_it_is_dropped() {
        let shown = Arc::new(AtomicU64::new(0));
        let gauge = Arc::clone(&shown);
        let caps = Caps::new(Total::Max(3), 2, move |count| gauge.store(count, Ordering::Relaxed));
        let first = caps.take(address(1)).unwrap();
        let second = caps.take(address(1)).unwrap();
        assert_eq!(caps.take(address(1)).err(), Some(Full::Address));
        let third = caps.take(address(2)).unwrap();
        assert_eq!(caps.take(address(1)).err(), Some(Full::Total), "the total comes first");
        assert_eq!((caps.count(), shown.load(Ordering::Relaxed)), (3, 3));
        drop(first);
        drop(third);
        let again = caps.take(address(1)).unwrap();
        assert_eq!(caps.take(address(1)).err(), Some(Full::Address));
        drop((second, again));
        assert_eq!((caps.count(), shown.load(Ordering::Relaxed)), (0, 0));
        assert!(caps.taken.lock().by_address.is_empty(), "nothing is kept for who has nothing");
    }

    #[test]
    fn zero_is_no_limit() {
        let caps = Caps::new(Total::Max(0), 0, |_| ());
        let permits: Vec<_> = (0..100).map(|_| caps.take(address(1)).unwrap()).collect();
        assert_eq!(caps.count(), permits.len() as u64);
    }

    #[tokio::test]
    async fn it_is_told_when_the_last_permit_is_given_back() {
        let caps = Caps::new(Total::Max(0), 0, |_| ());
        let permit = caps.take(address(1)).unwrap();
        let wait = tokio::spawn({
            let caps = Arc::clone(&caps);
            async move { caps.emptied().await }
        });
        tokio::task::yield_now().await;
        assert!(!wait.is_finished());
        drop(permit);
        wait.await.unwrap();
        caps.emptied().await;
    }
}
