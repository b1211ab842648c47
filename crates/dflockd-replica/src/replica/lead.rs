//! The leading side of a [`Replica`]: what it proposes and when, and handing leadership on.
//!
//! [`Leading`](crate::leading) keeps the books, and its head tells what cluster time is.

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Span, Timestamp};

use super::Replica;
use crate::codec::{self, Batch, Frame};
use crate::leading::Accepted;
use crate::types::{LeaderCommand, RaftId};
use crate::{Outputs, stamp_of};

/// How long a leader that had no room on its disk before it led goes on.
const NO_ROOM_PATIENCE: Span = Span::from_millis(30_000);
/// How far behind the last entry a successor may be.
const SUCCESSOR_LAG_MAX: u64 = 1000;

impl Replica {
    /// Cluster time, on a leader.
    pub(super) fn cluster_time(&self) -> Option<Timestamp> {
        let is_leader = self.consensus.is_leader();
        self.leading.time(self.consensus.term(), self.now).filter(|_| is_leader)
    }

    /// Cluster time on a leader that accepts requests, and the local time at which it was that.
    pub fn open_time(&self) -> Option<(Timestamp, Timestamp)> {
        let time = self.cluster_time().filter(|_| self.is_open())?;
        Some((time, self.now))
    }

    /// Whether clients' batches may be proposed.
    pub(crate) fn is_open(&self) -> bool {
        self.cluster_time().is_some() && self.leading.is_open(self.applied)
    }

    /// Whether this node leads, and proposes whatever is due.
    pub(super) fn may_propose(&self) -> bool {
        self.is_open() && !self.config.witness && !self.consensus.is_transferring()
    }

    /// Begins or ends a leadership, and proposes all that waits.
    pub(super) fn lead(&mut self) {
        if !self.consensus.is_leader() {
            self.end_leadership();
            self.changes.lead_no_more();
            return;
        }
        if self.cluster_time().is_none() {
            self.begin_leadership();
        }
        if self.changes.must_say_goodbye(self.id()) && self.consensus.propose(vec![Bytes::new()]) {
            self.changes.said_goodbye(self.consensus.last_index());
        }
        if self.changes.leaves(self.consensus.commit()) {
            self.consensus.step_down();
            self.end_leadership();
            return;
        }
        if self.config.witness || self.consensus.is_transferring() {
            return;
        }
        let Some(stamp) = self.cluster_time() else { return };
        let mut orders = Vec::new();
        if self.leading.must_open() {
            self.order_opening(&mut orders);
        } else if self.is_open() {
            for (from, batch) in self.leading.take_early() {
                self.handle_forward(from, batch);
            }
            self.forward_own();
            orders = self.leading.take_orders();
            self.order_what_is_due(stamp, &mut orders);
        } else {
            return;
        }
        if orders.is_empty() && !self.leading.has_proposals() {
            return;
        }
        let payloads = self.leading.payloads(self.machine.version(), stamp, &orders);
        if !self.consensus.propose(payloads) {
            // Digests and policies come again by whoever asked; the rest is due again at the next look.
            self.leading.refused();
            return;
        }
        let last = self.consensus.last_index();
        self.leading.proposed(&orders, stamp, last);
        self.see_time(self.consensus.term(), stamp);
        if orders.iter().any(|order| matches!(order, LeaderCommand::Policy(_))) {
            self.policy_proposed(last);
        }
    }

    /// Proposes an order by itself, so that whoever asked for it can be told when it is applied: at this index.
    pub(crate) fn propose_order(&mut self, order: &LeaderCommand) -> Option<u64> {
        let stamp = self.cluster_time()?;
        let mut payload = Vec::new();
        codec::begin_payload(&mut payload, self.machine.version(), stamp);
        codec::put_leader_command(&mut payload, self.machine.version(), order);
        if !self.consensus.propose(vec![payload.into()]) {
            return None;
        }
        self.leading.proposed_alone(stamp);
        self.see_time(self.consensus.term(), stamp);
        Some(self.consensus.last_index())
    }

    /// This node's own clients, when it leads.
    fn forward_own(&mut self) {
        if self.consensus.leader() == Some(self.id()) {
            let mut nothing = Outputs::default();
            self.forward(&mut nothing);
        }
    }

    /// A leader of this term has stamped or told a time. One that has not begun to count tells none.
    pub(super) fn see_time(&mut self, term: u64, time: Timestamp) {
        if time > Timestamp(0) {
            let highest = self.time_seen.1.max(time);
            self.time_seen = self.time_seen.max((term, time));
            if bug(Bug::OldTimeKept) {
                self.time_seen.1 = highest;
            }
        }
    }

    /// The time at which the next leader would begin, if it were this node. Entries of an older term that nobody has
    /// replaced may have later stamps than a newer leader told, and time does not run back in the log.
    fn last_time(&self) -> Timestamp {
        let tail = self.consensus.tail();
        let logged = tail.slice(self.applied + 1, tail.last() + 1).filter_map(stamp_of).max();
        self.time_seen.1.max(self.machine.now()).max(logged.unwrap_or_default())
    }

    fn begin_leadership(&mut self) {
        self.end_leadership();
        let mut base = self.last_time();
        if bug(Bug::TimeRunsAhead) {
            base = base + Span::from_secs(5);
        }
        let term = self.consensus.term();
        self.leading.begin(term, base, self.now, self.machine.members().keys().copied());
        tracing::info!(term, "became leader");
    }

    /// Whether a member has answered this leader lately.
    pub(crate) fn is_reachable(&self, id: RaftId) -> bool {
        id == self.id() || self.leading.has_answered(id, self.election_timeout(), self.now)
    }

    /// Whether this node has led for such a short time that members may not have answered it yet.
    pub(crate) fn leads_newly(&self) -> bool {
        let leads_for = self.leading.leads_for(self.now);
        leads_for.is_some_and(|leads_for| leads_for < self.election_timeout())
    }

    fn end_leadership(&mut self) {
        if self.leading.end() {
            tracing::info!("stepped down");
        }
    }

    fn order_opening(&self, orders: &mut Vec<LeaderCommand>) {
        if self.machine.policy().is_none() {
            orders.push(LeaderCommand::Init {
                policy: Box::new(self.config.policy.clone()),
                seed: self.config.seed,
                fence: self.config.fence,
            });
        }
        orders.push(LeaderCommand::NewTerm);
    }

    fn order_what_is_due(&self, stamp: Timestamp, orders: &mut Vec<LeaderCommand>) {
        let deadline = self.machine.next_deadline();
        if self.leading.is_tick_due(deadline, stamp, self.applied) && !bug(Bug::NoTick) {
            orders.push(LeaderCommand::Tick);
        }
        self.order_version(orders);
        let mut silent = self.leading.silent(self.now, self.applied).filter(|&id| id != self.id());
        let silent = silent.find_map(|id| Some((id, self.machine.run_of(id)?)));
        if let Some((id, run)) = silent {
            tracing::warn!(raft_id = id, "member unreachable; its sessions are ended");
            orders.push(LeaderCommand::NodeLost { run });
        }
    }

    /// What a cluster that has just begun, or has got a new version, still lacks.
    fn order_version(&self, orders: &mut Vec<LeaderCommand>) {
        if self.leading.is_version_under_way(self.applied) || self.is_policy_under_way() {
            return;
        }
        if let Some(version) = self.machine.first_version() {
            tracing::info!(version, "all members of the new cluster read this version");
            orders.push(LeaderCommand::Version { version });
        } else if let Some(policy) = self.machine.policy()
            && self.machine.lacks_limits()
        {
            tracing::info!(
                "the policy gets the limits of this version from the settings of this node"
            );
            let policy = policy.clone().with_v2(self.config.policy.limits.v2());
            orders.push(LeaderCommand::Policy(Box::new(policy)));
        } else if self.machine.lacks_name() {
            tracing::info!("the cluster gets a name of its own");
            orders.push(LeaderCommand::ClusterId { id: self.config.cluster });
        }
    }

    /// A batch of a member, itself included.
    pub(super) fn handle_forward(&mut self, from: RaftId, batch: Batch) {
        if batch.first_seq == 1 && self.machine.applied_seq(batch.run) == Some(0) {
            self.consensus.probe_again(from);
        }
        if self.consensus.is_leader() && !self.is_open() {
            // Who hears of a new leader sends at once; it must not have to send again.
            self.leading.keep_early(from, batch);
            return;
        }
        let run = batch.run;
        if let Accepted::Expects(seq) = self.accept(batch) {
            let frame = Frame::Expect { term: self.consensus.term(), run, seq };
            self.transfers.push_frame(from, frame.encode());
        }
    }

    pub(super) fn accept(&mut self, batch: Batch) -> Accepted {
        if !self.is_open() {
            return Accepted::Not;
        }
        let applied_seq = self.machine.applied_seq(batch.run);
        self.leading.accept(batch, applied_seq)
    }

    /// Tells new members, who have no state yet, where the others are.
    fn introduce(&mut self) {
        let is_new = |id: &RaftId| {
            *id != self.id() && self.consensus.progress(*id).is_some_and(|(at, _)| at == 0)
        };
        let new: Vec<RaftId> = self.machine.members().keys().copied().filter(is_new).collect();
        if new.is_empty() {
            return;
        }
        let members = codec::pack(self.machine.members()).into();
        let bytes = Frame::Members { members }.encode();
        for id in new {
            self.transfers.push_frame(id, bytes.clone());
        }
    }

    pub(super) fn look_after_leadership(&mut self) {
        if !self.consensus.is_leader() {
            return;
        }
        self.introduce();
        if self.consensus.is_transferring() {
            return;
        }
        let (stalled, low) = (self.writing.is_stalled(self.now), self.leads_without_room());
        let drained = self.candidacy.is_drained();
        if (self.config.witness || stalled || low || drained)
            && let Some(to) = if low { self.next_successor() } else { self.best_successor() }
        {
            tracing::warn!(to, stalled, low, drained, "leadership is handed over");
            self.consensus.transfer(to);
        }
    }

    /// Whether somebody else should lead because the disk has only its reserve left. A leader that had no room before
    /// it led may have been handed leadership by one that has none either, and does not hand it back at once.
    fn leads_without_room(&self) -> bool {
        let low_for = self.writing.room_low_for(self.now);
        let leads_for = self.leading.leads_for(self.now);
        let (Some(low_for), Some(leads_for)) = (low_for, leads_for) else { return false };
        low_for < leads_for || leads_for >= NO_ROOM_PATIENCE
    }

    /// The full voter whose log reaches farthest.
    pub(crate) fn best_successor(&self) -> Option<RaftId> {
        self.successors().max().map(|(_, id)| id)
    }

    /// The next full voter by number that is not far behind: nobody knows here who has room on its disk, so all have
    /// their turn.
    fn next_successor(&self) -> Option<RaftId> {
        let far = self.consensus.last_index().saturating_sub(SUCCESSOR_LAG_MAX);
        let near = self.successors().filter(|(matched, _)| *matched >= far);
        near.map(|(_, id)| id).min_by_key(|&id| (id < self.id(), id)).or(self.best_successor())
    }

    /// The other full voters that have been heard of lately, and how far their logs reach.
    fn successors(&self) -> impl Iterator<Item = (u64, RaftId)> {
        let members = self.machine.members().iter().filter(|&(&id, member)| {
            id != self.id() && !member.witness && self.consensus.is_voter(id)
        });
        members.filter_map(|(&id, _)| match self.consensus.progress(id) {
            Some((matched, true)) => Some((matched, id)),
            _ => None,
        })
    }
}
