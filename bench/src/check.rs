//! The oracle: watches what the server grants while it is under load.
//!
//! A key counts as held from the moment the grant is seen until the release is about to be sent.
//! Both ends lie within the time in which the server must regard it as held, so two holders seen
//! here are two holders there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Who holds what and with which fence, shared by all threads of the generator.
#[derive(Debug)]
pub(crate) struct Exclusion {
    /// By key: the slot that holds it plus one; 0 is nobody.
    holders: Vec<AtomicU32>,
    /// By key: the largest fence seen; 0 where the server has none.
    fences: Vec<AtomicU64>,
}

impl Exclusion {
    /// Nothing held.
    pub(crate) fn new(keys: usize) -> Self {
        Self {
            holders: (0..keys).map(|_| AtomicU32::new(0)).collect(),
            fences: (0..keys).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// `slot` saw its grant. Says what is wrong with it, if anything.
    pub(crate) fn granted(&self, key: usize, slot: u32, fence: u64) -> Option<String> {
        let before = self.holders[key].swap(slot + 1, Ordering::AcqRel);
        if before != 0 {
            return Some(format!(
                "two holders of key {key}: client {} and client {slot}",
                before - 1
            ));
        }
        let largest = self.fences[key].fetch_max(fence, Ordering::AcqRel);
        if fence != 0 && largest >= fence {
            return Some(format!("fence of key {key} did not grow: {largest} then {fence}"));
        }
        None
    }

    /// The holder is about to send its release.
    pub(crate) fn releasing(&self, key: usize) {
        self.holders[key].store(0, Ordering::Release);
    }
}

/// Whether one key's waiters are served in the order in which their requests were sent.
///
/// Requests of different connections that are on their way at the same moment may be read by
/// the server in another order, which is no fault of its queue. So the exact order is reported
/// as a share, and only a request that others pass again and again is a violation.
#[derive(Debug, Default)]
pub(crate) struct Order {
    /// Requests that were sent, oldest first: whether granted.
    sent: VecDeque<bool>,
    /// Number of the oldest entry of `sent`, which is never granted.
    oldest: u64,
    /// Entries of `sent` that are granted: how many have passed the oldest.
    passed: u64,
    /// The most that ever passed one request.
    pub(crate) passed_max: u64,
    /// Grants that went to the oldest request.
    pub(crate) in_order: u64,
    /// All grants.
    pub(crate) grants: u64,
}

impl Order {
    /// A request is sent; the number identifies it.
    pub(crate) fn sent(&mut self) -> u64 {
        self.sent.push_back(false);
        self.oldest + self.sent.len() as u64 - 1
    }

    /// The request of that number was granted.
    pub(crate) fn granted(&mut self, number: u64) {
        self.grants += 1;
        let place = usize::try_from(number - self.oldest).expect("not more than were sent");
        self.sent[place] = true;
        if place > 0 {
            self.passed += 1;
            self.passed_max = self.passed_max.max(self.passed);
            return;
        }
        self.in_order += 1;
        self.sent.pop_front();
        self.oldest += 1;
        while self.sent.front() == Some(&true) {
            self.sent.pop_front();
            self.oldest += 1;
            self.passed -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusion_sees_two_holders() {
        let check = Exclusion::new(2);
        assert_eq!(check.granted(0, 3, 0), None);
        assert_eq!(check.granted(1, 4, 0), None);
        assert!(check.granted(0, 5, 0).unwrap().contains("two holders of key 0"));
    }

    #[test]
    fn exclusion_sees_a_fence_that_stands_still() {
        let check = Exclusion::new(1);
        for (fence, wrong) in [(7, false), (9, false), (9, true), (10, false)] {
            assert_eq!(check.granted(0, 1, fence).is_some(), wrong, "{fence}");
            check.releasing(0);
        }
    }

    #[test]
    fn order_counts_who_was_passed() {
        let mut order = Order::default();
        let numbers: Vec<u64> = (0..5).map(|_| order.sent()).collect();
        for place in [0, 2, 3, 1, 4] {
            order.granted(numbers[place]);
        }
        assert_eq!((order.grants, order.in_order, order.passed_max), (5, 3, 2));
        assert_eq!((order.passed, order.sent.len()), (0, 0));
        let next = order.sent();
        order.granted(next);
        assert_eq!(order.in_order, 4);
    }
}
