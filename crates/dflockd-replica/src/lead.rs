//! Leading: the time of the cluster, what is proposed, and handing leadership on.
//!
//! # Cluster time
//!
//! In replicated mode a [`Timestamp`] is *cluster time*, and only a leader makes it. A `Reign` is a term, the cluster
//! time at which it began, and the local monotonic time at that instant; a stamp is the first plus what has passed
//! since the second. A reign begins at the highest time that the leader knows: of its log, of its state, or told by a
//! leader of the same term, whose frames carry it. So time never runs back in the log and never runs ahead of real
//! time, but for the rate of a clock. Time without a leader does not pass.
//!
//! - The first entry of a reign is `NewTerm`; batches of clients wait until it is applied. It sets `grace_until =
//!   max(grace_until, stamp + grace)`: a lease is extended by one grace at most since its last renewal, however many
//!   elections there are (`deadline.rs` of the core).
//! - [`Order::Tick`] is proposed when the store's next deadline has come, and every 5 s while there is any deadline, so
//!   that a restart of all members sets time back by no more than that.
//! - A leader that hears of no majority for an election timeout steps down (CheckQuorum). One whose loop stood still
//!   for longer than that steps down before it stamps anything. One whose disk write takes over a second, or whose disk
//!   is full, hands leadership over.
//! - The wall clock decides one thing: the first fence of a new cluster.

use super::*;

impl Replica {
    /// Cluster time, on a leader.
    pub(super) fn cluster_time(&self) -> Option<Timestamp> {
        let reign = self.reign.as_ref()?;
        let is_current = self.consensus.is_leader() && self.consensus.term() == reign.term;
        is_current.then(|| reign.base + self.now.since(reign.since))
    }

    /// Whether clients' batches may be proposed.
    pub(super) fn is_open(&self) -> bool {
        let opening = self.reign.as_ref().and_then(|reign| reign.opening);
        self.cluster_time().is_some() && opening.is_some_and(|index| index <= self.applied)
    }

    pub(super) fn lead(&mut self) {
        if !self.consensus.is_leader() {
            self.end_reign();
            return;
        }
        if self.cluster_time().is_none() {
            self.begin_reign();
        }
        if self.config.witness || self.consensus.is_transferring() {
            return;
        }
        let Some(stamp) = self.cluster_time() else { return };
        let mut orders = Vec::new();
        let opens = self.reign.as_ref().is_some_and(|reign| reign.opening.is_none());
        if opens {
            if self.machine.policy().is_none() {
                orders.push(Order::Init {
                    policy: Box::new(self.config.policy.clone()),
                    seed: self.config.seed,
                    fence: self.config.fence,
                });
            }
            orders.push(Order::NewTerm);
        } else if self.is_open() {
            self.early_bytes = 0;
            for (from, batch) in std::mem::take(&mut self.early) {
                self.handle_forward(from, batch);
            }
            self.forward_own();
            orders.append(&mut self.orders);
            self.order_what_is_due(stamp, &mut orders);
        } else {
            return;
        }
        if orders.is_empty() && self.proposals.is_empty() {
            return;
        }
        let payloads = self.payloads(stamp, &orders);
        if !self.consensus.propose(payloads) {
            // Digests and policies come again by whoever asked; the rest is due again at the next look.
            return;
        }
        self.proposals.clear();
        self.proposal_bytes = 0;
        self.stamped_at = stamp;
        self.time_seen = self.time_seen.max(stamp);
        let last = self.consensus.last_index();
        if let Some(reign) = &mut self.reign
            && opens
        {
            reign.opening = Some(last);
        }
        for order in orders {
            match order {
                Order::Tick => self.tick_index = last,
                Order::NodeLost { run } => self.lost_proposed = Some((run, last)),
                Order::Policy(_) => self.policy_proposed(last),
                Order::Version { .. } | Order::ClusterId { .. } => self.version_index = last,
                Order::Init { .. }
                | Order::NewTerm
                | Order::Digest { .. }
                | Order::Address { .. } => {}
            }
        }
    }

    /// Proposes an order by itself, so that whoever asked for it can be told when it is applied: at this index.
    pub(super) fn propose_order(&mut self, order: &Order) -> Option<u64> {
        let stamp = self.cluster_time()?;
        let mut payload = Vec::new();
        codec::begin_payload(&mut payload, self.machine.version(), stamp);
        codec::put_order(&mut payload, self.machine.version(), order);
        if !self.consensus.propose(vec![payload.into()]) {
            return None;
        }
        self.stamped_at = stamp;
        self.time_seen = self.time_seen.max(stamp);
        Some(self.consensus.last_index())
    }

    /// This node's own clients, when it leads.
    pub(super) fn forward_own(&mut self) {
        if self.consensus.leader() == Some(self.id()) {
            let mut nothing = Outputs::default();
            self.forward(&mut nothing);
        }
    }

    pub(super) fn begin_reign(&mut self) {
        self.end_reign();
        let mut base = self.time_seen.max(self.machine.now());
        if bug(Bug::TimeRunsAhead) {
            base = base + Span::from_secs(5);
        }
        let term = self.consensus.term();
        self.reign = Some(Reign { term, base, since: self.now, opening: None });
        self.stamped_at = base;
        // Nobody is silent who was never listened to.
        self.heard = self.machine.members().keys().map(|&id| (id, self.now)).collect();
        tracing::info!(term, "this node leads");
    }

    pub(super) fn end_reign(&mut self) {
        if self.reign.take().is_some() {
            tracing::info!("this node leads no more");
        }
        self.answered.clear();
        self.expected.clear();
        self.proposals.clear();
        self.proposal_bytes = 0;
        self.early.clear();
        self.early_bytes = 0;
        self.orders.clear();
        self.tick_index = 0;
        self.lost_proposed = None;
        self.version_index = 0;
    }

    /// What a cluster that has just begun, or has got a new version, still lacks.
    fn order_version(&mut self, orders: &mut Vec<Order>) {
        if self.version_index > self.applied || self.is_policy_under_way() {
            return;
        }
        if let Some(version) = self.machine.first_version() {
            tracing::info!(version, "all members of the new cluster read this version");
            orders.push(Order::Version { version });
        } else if let Some(policy) = self.machine.policy()
            && self.machine.lacks_limits()
        {
            tracing::info!(
                "the policy gets the limits of this version from the settings of this node"
            );
            let policy = policy.clone().with_v2(self.config.policy.limits.v2());
            orders.push(Order::Policy(Box::new(policy)));
        } else if self.machine.lacks_name() {
            tracing::info!("the cluster gets a name of its own");
            orders.push(Order::ClusterId { id: self.config.cluster });
        }
    }

    pub(super) fn order_what_is_due(&mut self, stamp: Timestamp, orders: &mut Vec<Order>) {
        let deadline = self.machine.next_deadline();
        let due = deadline.is_some_and(|at| at <= stamp)
            || deadline.is_some() && stamp.since(self.stamped_at) >= TIME_ENTRY;
        if due && self.tick_index <= self.applied && !bug(Bug::NoTick) {
            orders.push(Order::Tick);
        }
        self.order_version(orders);
        if self.lost_proposed.is_some_and(|(_, index)| index > self.applied) {
            return;
        }
        let silent = self.heard.iter().find(|&(&id, &heard)| {
            id != self.id() && self.now.since(heard) >= SILENCE && self.machine.run_of(id).is_some()
        });
        if let Some((&id, _)) = silent
            && let Some(run) = self.machine.run_of(id)
        {
            tracing::warn!(raft_id = id, "a member is silent; its connections are given up");
            orders.push(Order::NodeLost { run });
        }
    }

    /// All that waits, as entries with one stamp.
    pub(super) fn payloads(&self, stamp: Timestamp, orders: &[Order]) -> Vec<Bytes> {
        let mut payloads = Vec::new();
        let mut payload = Vec::new();
        codec::begin_payload(&mut payload, self.machine.version(), stamp);
        for order in orders {
            codec::put_order(&mut payload, self.machine.version(), order);
        }
        let mut items = 0;
        for batch in &self.proposals {
            if items > 0
                && (items + u32::from(batch.count) > u32::from(BATCH_ITEMS_MAX)
                    || payload.len() + batch.bytes.len() > BATCH_BYTES_MAX)
            {
                payloads.push(Bytes::from(std::mem::take(&mut payload)));
                codec::begin_payload(&mut payload, self.machine.version(), stamp);
                items = 0;
            }
            items += u32::from(batch.count);
            batch.put(&mut payload);
        }
        payloads.push(Bytes::from(payload));
        payloads
    }

    pub(super) fn handle_forward(&mut self, from: RaftId, batch: Batch) {
        if batch.first_seq == 1 && self.machine.applied_seq(batch.run) == Some(0) {
            self.consensus.probe_again(from);
        }
        if self.consensus.is_leader() && !self.is_open() {
            // Who hears of a new leader sends at once; it must not have to send again.
            self.early_bytes += batch.bytes.len();
            if self.early_bytes <= PENDING_BYTES_MAX {
                self.early.push((from, batch));
            }
            return;
        }
        let run = batch.run;
        let expected = match self.accept(batch) {
            Accepted::Yes | Accepted::Not => return,
            Accepted::Expects(seq) => seq,
        };
        let frame = Frame::Expect { term: self.consensus.term(), run, seq: expected };
        self.transfers.frames.push((from, frame.encode()));
    }

    pub(super) fn accept(&mut self, mut batch: Batch) -> Accepted {
        if !self.is_open() || self.proposal_bytes > PENDING_BYTES_MAX {
            return Accepted::Not;
        }
        let Some(applied) = self.machine.applied_seq(batch.run) else { return Accepted::Not };
        let expected = self.expected.entry(batch.run).or_insert(applied + 1);
        if batch.first_seq > *expected {
            return Accepted::Expects(*expected);
        }
        let known = *expected - batch.first_seq;
        if known >= u64::from(batch.count) {
            return Accepted::Expects(*expected);
        }
        if known > 0 && batch.skip(known).is_err() {
            return Accepted::Not;
        }
        *expected = batch.first_seq + u64::from(batch.count);
        self.proposal_bytes += batch.bytes.len();
        self.proposals.push_back(batch);
        Accepted::Yes
    }

    /// Tells new members, who have no state yet, where the others are.
    pub(super) fn introduce(&mut self) {
        let is_new = |id: &RaftId| {
            *id != self.id() && self.consensus.progress(*id).is_some_and(|(at, _)| at == 0)
        };
        let new: Vec<RaftId> = self.machine.members().keys().copied().filter(is_new).collect();
        if !new.is_empty() {
            let members = codec::pack(self.machine.members()).into();
            let bytes = Frame::Members { members }.encode();
            self.transfers.frames.extend(new.into_iter().map(|id| (id, bytes.clone())));
        }
    }

    pub(super) fn look_after_leadership(&mut self) {
        if self.consensus.is_leader() {
            self.introduce();
        }
        if !self.consensus.is_leader() || self.consensus.is_transferring() {
            return;
        }
        let stalled =
            self.unwritten.front().is_some_and(|write| self.now.since(write.since) >= WRITE_STALL);
        if (self.config.witness || stalled || self.room_low || self.drained)
            && let Some(to) = self.best_successor()
        {
            let (low, drained) = (self.room_low, self.drained);
            tracing::warn!(to, stalled, low, drained, "leadership is handed over");
            self.consensus.transfer(to);
        }
    }

    /// The full voter whose log reaches farthest.
    pub(super) fn best_successor(&self) -> Option<RaftId> {
        let members = self.machine.members().iter();
        members
            .filter(|&(&id, member)| {
                id != self.id() && !member.witness && self.consensus.is_voter(id)
            })
            .filter_map(|(&id, _)| match self.consensus.progress(id) {
                Some((matched, true)) => Some((matched, id)),
                _ => None,
            })
            .max()
            .map(|(_, id)| id)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    Yes,
    /// Not now, or never.
    Not,
    /// Another number is next.
    Expects(u64),
}
