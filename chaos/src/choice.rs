//! What clients do, by chance: few keys, so that they meet.

use std::collections::BTreeMap;
use std::time::Duration;

use dflockd_testkit::{Noise, millis};

use crate::history::Act;
use crate::request::{Kind, Request, Want};

/// Leases of locks, in milliseconds.
const LEASES: [u64; 4] = [2000, 3000, 4000, 6000];

/// The chance of one client, and what it remembers of keys.
pub struct Choice<'a> {
    act: &'a Act,
    client: usize,
    /// Its chance.
    pub noise: Noise,
    made: u64,
    /// The value that the client knows of each key.
    known: BTreeMap<String, Option<String>>,
}

impl<'a> Choice<'a> {
    /// The chance of a client.
    pub fn new(act: &'a Act, seed: u64, client: usize) -> Self {
        let mixed = seed ^ (act.number << 32) ^ ((client as u64 + 1) << 48);
        let known = BTreeMap::new();
        Self { act, client, noise: Noise::new(mixed), made: 0, known }
    }

    /// Once in so many times.
    pub fn one_in(&mut self, count: usize) -> bool {
        self.noise.below(count) == 0
    }

    /// A time between two numbers of milliseconds.
    pub fn between(&mut self, least: u64, most: u64) -> Duration {
        millis(least + self.noise.next() % (most - least + 1))
    }

    /// A text that nobody else has.
    fn unique(&mut self) -> String {
        self.made += 1;
        format!("{}-{}", self.client, self.made)
    }

    /// Something with a value, a counter or a list.
    pub fn value(&mut self, may_block: bool) -> Request {
        let (mut number, left) = (self.noise.below(2), self.one_in(2));
        let kind = self.noise.below(20);
        // A list that is empty most of the time, so that pops wait for somebody or in vain.
        if matches!(kind, 13 if self.one_in(4)) || (matches!(kind, 16 | 17) && may_block) {
            number = 2;
        }
        let (name, want) = match kind {
            0..=3 => ("c", Want::Add),
            4 => ("c", Want::Count),
            5 if number == 1 => ("c", Want::Reset(self.noise.below(1000) as i64)),
            5 => ("c", Want::Add),
            6 | 7 => ("k", Want::Put(self.unique())),
            8 | 9 => {
                let key = self.act.key(format!("k{number}"));
                let old = self.known.get(&key).cloned().flatten();
                ("k", Want::Swap(old, self.unique()))
            }
            10 => ("k", Want::Delete),
            11 | 12 => ("k", Want::Fetch),
            13..=15 => ("q", Want::Push(left, self.unique())),
            16 | 17 if may_block => {
                let wait = millis(1000 * (1 + self.noise.next() % 4));
                ("q", Want::Pop(left, wait))
            }
            16..=18 => ("q", Want::Pop(left, Duration::ZERO)),
            _ => ("q", Want::Length),
        };
        Request { key: self.act.key(format!("{name}{number}")), want }
    }

    /// What the client knows of a value now.
    pub fn learn(&mut self, request: &Request, answer: &str) {
        let value = match (&request.want, answer) {
            (Want::Put(value) | Want::Swap(_, value), "ok") => Some(value.clone()),
            (Want::Delete, "ok") | (Want::Fetch, "nil") => None,
            (Want::Fetch, answer) => match answer.strip_prefix("ok ") {
                Some(value) => Some(value.to_owned()),
                None => return,
            },
            _ => return,
        };
        self.known.insert(request.key.clone(), value);
    }

    /// A lock of some kind, and for how long.
    pub fn lock(&mut self) -> (String, Kind, Duration) {
        let (name, kind) = match self.noise.below(12) {
            0..=2 => ("m0", Kind::Mutex),
            3 | 4 => ("m1", Kind::Mutex),
            5 | 6 => ("s2", Kind::Semaphore(2)),
            7 => ("s3", Kind::Semaphore(3)),
            8 => ("w0", Kind::Read),
            9 => ("w0", Kind::Write),
            _ => ("e0", Kind::Election),
        };
        (self.act.key(name), kind, millis(LEASES[self.noise.below(LEASES.len())]))
    }

    /// How long a lock is waited for.
    pub fn wait(&mut self) -> Duration {
        millis(1000 * (self.noise.next() % 5))
    }
}
