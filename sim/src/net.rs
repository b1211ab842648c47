//! The network between the members: a delay per directed link, and what can happen to a frame on its way.

use std::collections::BTreeMap;

use dflockd_replica::types::RaftId;

use crate::plan::{Fault, MS, Plan};
use crate::rng::Rng;

/// The state of all links.
pub struct Net {
    rng: Rng,
    delay: u64,
    jitter: u64,
    loss: u64,
    duplicate: u64,
    reorder: u64,
    /// Until when nothing passes.
    cut: BTreeMap<(RaftId, RaftId), u64>,
    /// A node that nothing passes to or from, and until when.
    away: Option<(RaftId, u64)>,
    /// Until when everything waits.
    clogged: BTreeMap<(RaftId, RaftId), u64>,
    /// When the last frame of a lane arrives, so that the next comes later.
    last: BTreeMap<(RaftId, RaftId, bool), u64>,
}

impl Net {
    /// All links are well.
    #[must_use]
    pub fn new(plan: &Plan) -> Self {
        let mut rng = Rng::new(plan.seed, 2);
        let mut rate = |fault, max| if plan.has(fault) { rng.between(1, max) } else { 0 };
        let (loss, duplicate, reorder) =
            (rate(Fault::Loss, 100), rate(Fault::Duplicate, 100), rate(Fault::Reorder, 200));
        Self {
            rng,
            delay: plan.delay,
            jitter: plan.jitter,
            loss,
            duplicate,
            reorder,
            cut: BTreeMap::new(),
            away: None,
            clogged: BTreeMap::new(),
            last: BTreeMap::new(),
        }
    }

    /// When a frame sent now arrives; never, once or more often.
    pub fn send(&mut self, from: RaftId, to: RaftId, bulk: bool, now: u64) -> Vec<u64> {
        if self.is_cut(from, to, now) || self.rng.chance(self.loss) {
            return Vec::new();
        }
        let mut times = Vec::new();
        let copies = if self.rng.chance(self.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let mut at = now + self.delay + self.rng.below(self.jitter);
            if bulk {
                at += self.delay;
            }
            if let Some(&until) = self.clogged.get(&(from, to)) {
                at = at.max(until + self.rng.below(MS));
            }
            if self.rng.chance(self.reorder) {
                at += self.rng.below(10 * self.delay + 20 * MS);
            } else {
                let last = self.last.entry((from, to, bulk)).or_default();
                at = at.max(*last + 1);
                *last = at;
            }
            times.push(at);
        }
        times
    }

    /// Whether nothing passes now.
    #[must_use]
    pub fn is_cut(&self, from: RaftId, to: RaftId, now: u64) -> bool {
        self.away(now).is_some_and(|away| from == away || to == away)
            || self.cut.get(&(from, to)).is_some_and(|&until| until > now)
    }

    /// The node that is cut off from all others now.
    #[must_use]
    pub fn away(&self, now: u64) -> Option<RaftId> {
        self.away.filter(|&(_, until)| until > now).map(|(id, _)| id)
    }

    /// Nothing passes to or from a node until then, whatever happens to links meanwhile.
    pub fn send_away(&mut self, id: RaftId, until: u64) {
        self.away = Some((id, until));
    }

    /// Nothing passes this way until then.
    pub fn cut(&mut self, from: RaftId, to: RaftId, until: u64) {
        self.cut.insert((from, to), until);
    }

    /// Everything waits until then.
    pub fn clog(&mut self, from: RaftId, to: RaftId, until: u64) {
        self.clogged.insert((from, to), until);
    }

    /// All is well again.
    pub fn heal(&mut self) {
        self.cut.clear();
        self.away = None;
        self.clogged.clear();
        (self.loss, self.duplicate, self.reorder) = (0, 0, 0);
    }

    /// Chance, for those who make faults of links.
    pub fn rng(&mut self) -> &mut Rng {
        &mut self.rng
    }
}
