//! Changes of the cluster that an operator asks for. Any member takes the request, the leader decides.
//!
//! # Membership
//!
//! A cluster begins with a snapshot at index 1 that holds its members: those of `--cluster-peers`, sorted, or the node
//! alone. A member is added as a learner, promoted when its log is within 1,000 entries of the commit index, and
//! removed for ever; one change at a time. A leader that is to be removed hands leadership over first. Numbers and
//! names are never used again. Addresses are replicated. [`AdminRequest`] is the way in for the command `cluster`, HTTP
//! and gRPC; what concerns one node (snapshot, drain) that node does itself.
//!
//! A removal is done for its operator when an entry behind it is committed, too: head of `changes.rs`.
//!
//! The leader refuses a promotion or a removal after which fewer voters than a majority would be reachable, unless the
//! operator forces it: the cluster could decide nothing any more, not even to take the change back. A voter is
//! reachable if it has answered the leader within an election timeout, and its process is not known to be gone.

use std::collections::BTreeMap;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{Span, Timestamp};
use raft::eraftpb::Entry;
use serde::{Deserialize, Serialize};

use super::codec::{self, Frame};
use super::machine::Machine;
use super::types::{Incarnation, LeaderCommand, Member, MemberChange, Policy, RaftId, WholePolicy};
use super::version;
use super::{NodeEvent, Outgoing, Outputs, Replica, StateCopy};

/// How long a request may take.
const PATIENCE: Span = Span::from_secs(10);
/// A request that was not answered is sent again after this.
const AGAIN: Span = Span::from_millis(300);
/// How far behind a learner may be to become a voter.
const LEVEL: u64 = 1000;

/// What an operator can ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AdminRequest {
    /// A new member, as a learner.
    Add {
        /// The name of the new member.
        node: String,
        /// Where peers dial the new member.
        peer_addr: String,
        /// Where clients find the new member.
        client_addr: String,
        /// Whether the new member is a witness: it keeps the log, but no state.
        witness: bool,
    },
    /// A learner becomes a voter.
    Promote {
        /// The name of the learner.
        node: String,
    },
    /// A member goes for ever.
    Remove {
        /// The name of the member.
        node: String,
    },
    /// Another voter leads: the named one, or the one that is farthest.
    Transfer {
        /// The name of the voter that is to lead.
        to: Option<String>,
    },
    /// The policy that all members decide by from now on.
    SetPolicy(Box<Policy>),
    /// A member is dialed elsewhere from now on.
    Address {
        /// The name of the member.
        node: String,
        /// Where peers dial the member.
        peer_addr: String,
    },
    /// What all members can read is used from now on; there is no way back to an older server.
    Finalize,
    /// The node that is asked makes a snapshot now, so that its log can be cut.
    Snapshot,
    /// The node that is asked makes a snapshot now and hands out a copy of it.
    Copy,
    /// The node that is asked does not lead any more, until it is started again or this is taken back.
    Drain {
        /// Whether the node stops to lead; false takes that back.
        on: bool,
    },
    /// Like [`AdminRequest::SetPolicy`], but refused with [`POLICY_CHANGED`] if the policy is not the one that this was
    /// made from. A leader that does not know it yet leaves it unanswered.
    ChangePolicy {
        /// The policy that the change was made from.
        from: Box<Policy>,
        /// The policy that all members decide by from now on.
        to: Box<Policy>,
    },
    /// [`AdminRequest::ChangePolicy`] of a cluster that has reached version 2, with all that a policy has there.
    ChangeWholePolicy {
        /// The policy that the change was made from.
        from: Box<WholePolicy>,
        /// The policy that all members decide by from now on.
        to: Box<WholePolicy>,
    },
    /// [`AdminRequest::Remove`], even if fewer voters than a majority are reachable then.
    ForceRemove {
        /// The name of the member.
        node: String,
    },
    /// [`AdminRequest::Promote`], even if fewer voters than a majority are reachable then.
    ForcePromote {
        /// The name of the learner.
        node: String,
    },
}

impl AdminRequest {
    /// The promotion of a learner.
    #[must_use]
    pub fn promote(node: String, force: bool) -> Self {
        if force { Self::ForcePromote { node } } else { Self::Promote { node } }
    }

    /// The removal of a member.
    #[must_use]
    pub fn remove(node: String, force: bool) -> Self {
        if force { Self::ForceRemove { node } } else { Self::Remove { node } }
    }

    /// The request in the words that a leader knows which reads this version: an older program asks about no quorum, so
    /// for it every change is a forced one.
    fn for_reader(&self, version: u32) -> Self {
        let is_older = version < version::NAMED;
        if let Self::ForceRemove { node } = self
            && is_older
        {
            return Self::Remove { node: node.clone() };
        }
        if let Self::ForcePromote { node } = self
            && is_older
        {
            return Self::Promote { node: node.clone() };
        }
        self.clone()
    }

    /// The member that is to go, if one is.
    fn removes(&self) -> Option<&str> {
        match self {
            Self::Remove { node } | Self::ForceRemove { node } => Some(node),
            Self::Add { .. }
            | Self::Promote { .. }
            | Self::ForcePromote { .. }
            | Self::Transfer { .. }
            | Self::SetPolicy(_)
            | Self::ChangePolicy { .. }
            | Self::ChangeWholePolicy { .. }
            | Self::Address { .. }
            | Self::Finalize
            | Self::Snapshot
            | Self::Copy
            | Self::Drain { .. } => None,
        }
    }

    /// The change of a policy that both members of a cluster of this version understand.
    #[must_use]
    pub fn change_policy(version: u32, from: Policy, to: Policy) -> Self {
        if version < 2 {
            return Self::ChangePolicy { from: Box::new(from), to: Box::new(to) };
        }
        let (from, to) = (Box::new(WholePolicy(from)), Box::new(WholePolicy(to)));
        Self::ChangeWholePolicy { from, to }
    }
}

/// Somebody else has changed the policy meanwhile: another one must be made from what it is now.
pub const POLICY_CHANGED: &str = "the policy has changed meanwhile; ask again";

/// What came of it: an error says why not.
pub type AdminResult = Result<(), String>;

#[derive(Default)]
pub(super) struct Admins {
    /// Asked of this node.
    asked: BTreeMap<u64, Asked>,
    /// For this node to decide, as long as it leads.
    to_decide: Vec<(RaftId, u64, AdminRequest)>,
    /// Proposed by this node: who asked, and the entry that will tell.
    proposed: Vec<Proposed>,
    /// Who waits for a snapshot of this node.
    snapshots: Vec<Waiting>,
    /// The term and index of the last policy that this node proposed.
    policy_at: (u64, u64),
}

struct Asked {
    request: AdminRequest,
    give_up_at: Timestamp,
    sent_at: Option<Timestamp>,
}

struct Proposed {
    origin: RaftId,
    id: u64,
    request: AdminRequest,
    index: u64,
    term: u64,
    /// A change of the membership, which Raft may replace by nothing.
    is_change: bool,
    /// The cluster should use this version then, which members may have prevented.
    version: Option<u32>,
}

/// Somebody waits for a snapshot.
struct Waiting {
    id: u64,
    /// The index up to which the snapshot must reach at least.
    index: u64,
    wants_copy: bool,
}

impl Admins {
    /// Nothing will come of the snapshots that are waited for.
    pub(super) fn forget_snapshots(&mut self) -> impl Iterator<Item = u64> + use<> {
        std::mem::take(&mut self.snapshots).into_iter().map(|waiting| waiting.id)
    }

    pub(super) fn ask(&mut self, id: u64, request: AdminRequest, now: Timestamp) {
        let asked = Asked { request, give_up_at: now + PATIENCE, sent_at: None };
        self.asked.insert(id, asked);
    }

    pub(super) fn forwarded(&mut self, origin: RaftId, id: u64, request: AdminRequest) {
        let is_same = |known: &(RaftId, u64, AdminRequest)| (known.0, known.1) == (origin, id);
        let is_running = self.proposed.iter().any(|p| (p.origin, p.id) == (origin, id));
        if !is_running && !self.to_decide.iter().any(is_same) {
            self.to_decide.push((origin, id, request));
        }
    }

    pub(super) fn answered(&mut self, id: u64, result: AdminResult) -> Option<AdminResult> {
        self.asked.remove(&id).map(|_| result)
    }

    /// This node was removed: takes the requests that asked for the removal of somebody who `is_gone`, and are done by
    /// that. The leader's answer to them may not come any more.
    pub(super) fn removed(&mut self, is_gone: impl Fn(&str) -> bool) -> Vec<u64> {
        let is_done = |asked: &Asked| asked.request.removes().is_some_and(&is_gone);
        self.asked.extract_if(.., |_, asked| is_done(asked)).map(|(id, _)| id).collect()
    }

    /// Whether a request of this node is for the removal of a member.
    pub(super) fn asks_to_remove(&self, id: u64, node: &str) -> bool {
        self.asked.get(&id).is_some_and(|asked| asked.request.removes() == Some(node))
    }

    /// Gives up what took too long.
    pub(super) fn look(&mut self, now: Timestamp) -> Vec<(u64, AdminResult)> {
        let over: Vec<u64> = self
            .asked
            .iter()
            .filter(|(_, asked)| asked.give_up_at <= now)
            .map(|(&id, _)| id)
            .collect();
        let unknown = || Err("no answer in time; it may still happen".to_owned());
        over.into_iter().filter_map(|id| Some((id, self.answered(id, unknown())?))).collect()
    }

    /// An entry was applied: whose request it decides, and how.
    pub(super) fn applied(
        &mut self,
        entry: &Entry,
        is_change: bool,
        machine: &Machine,
    ) -> Vec<Decided> {
        let (index, term) = (entry.index, entry.term);
        let mut decided = Vec::new();
        let all = std::mem::take(&mut self.proposed).into_iter();
        let (over, left): (Vec<_>, Vec<_>) = all.partition(|proposed| proposed.index <= index);
        self.proposed = left;
        for proposed in over {
            let same = proposed.index == index && proposed.term == term;
            let has_version = proposed.version.is_none_or(|version| machine.version() >= version);
            let done = same && is_change == proposed.is_change && has_version;
            let refused = || Err("the cluster did not take the change; try again".to_owned());
            let Proposed { origin, id, request, .. } = proposed;
            if done && is_change && matches!(request, AdminRequest::Remove { .. }) {
                // Decided once more, now that it is done: see `Replica::confirm_removal`.
                self.to_decide.push((origin, id, request));
                continue;
            }
            let result = if done { Ok(()) } else { refused() };
            decided.push(Decided { origin, id, request, result });
        }
        decided
    }
}

/// A request that the leader has decided.
pub(super) struct Decided {
    origin: RaftId,
    id: u64,
    request: AdminRequest,
    result: AdminResult,
}

/// What the leader makes of a request.
enum Decision {
    Now(AdminResult),
    /// When the entry at this index is applied.
    At(u64),
    /// When the order at this index is applied, which is no change of the membership.
    Ordered(u64),
    /// When the order at this index is applied, which raises the version.
    Raised(u64, u32),
    /// It can not be decided yet; whoever asks will ask again.
    Later,
}

impl Replica {
    /// Sends on or decides what was asked.
    pub(super) fn serve_admins(&mut self, outputs: &mut Outputs) {
        let leader = self.consensus.leader();
        let own = self.id();
        let mut mine = Vec::new();
        for (&id, asked) in &mut self.admins.asked {
            let waits = asked.sent_at.is_some_and(|sent| self.now.since(sent) < AGAIN);
            let Some(leader) = leader else { break };
            if waits {
                continue;
            }
            asked.sent_at = Some(self.now);
            if leader == own {
                mine.push((id, asked.request.clone()));
            } else {
                let reads = self.machine.versions().get(&leader).copied().unwrap_or(1);
                let request = codec::pack(&asked.request.for_reader(reads)).into();
                let bytes = Frame::Admin { id, request }.encode();
                outputs.frames.push(Outgoing { to: leader, bulk: false, bytes });
            }
        }
        for (id, request) in mine {
            self.admins.forwarded(own, id, request);
        }
        for (origin, id, request) in std::mem::take(&mut self.admins.to_decide) {
            let (index, is_change, version) = match self.decide(request.clone()) {
                Decision::Now(result) => {
                    self.answer_admin(Decided { origin, id, request, result }, outputs);
                    continue;
                }
                Decision::At(index) => (index, true, None),
                Decision::Ordered(index) => (index, false, None),
                Decision::Raised(index, to) => (index, false, Some(to)),
                Decision::Later => continue,
            };
            let term = self.consensus.term();
            let proposed = Proposed { origin, id, request, index, term, is_change, version };
            self.admins.proposed.push(proposed);
        }
    }

    /// Does what concerns this node alone; gives back what the leader has to decide.
    pub(super) fn admin_here(&mut self, id: u64, request: AdminRequest) -> Option<AdminRequest> {
        let result = match request {
            AdminRequest::Snapshot | AdminRequest::Copy if self.config.witness => {
                Err("a witness keeps no state; ask another member".to_owned())
            }
            AdminRequest::Snapshot | AdminRequest::Copy => {
                let wants_copy = request == AdminRequest::Copy;
                let index = if bug(Bug::BackupStale) { 0 } else { self.applied };
                self.admins.snapshots.push(Waiting { id, index, wants_copy });
                return None;
            }
            AdminRequest::Drain { on: true } if !self.could_others_lead() => {
                Err("no other voter could lead".to_owned())
            }
            AdminRequest::Drain { on } => {
                self.candidacy.drain(on);
                Ok(())
            }
            AdminRequest::Add { .. }
            | AdminRequest::Promote { .. }
            | AdminRequest::ForcePromote { .. }
            | AdminRequest::Remove { .. }
            | AdminRequest::ForceRemove { .. }
            | AdminRequest::Transfer { .. }
            | AdminRequest::SetPolicy(_)
            | AdminRequest::ChangePolicy { .. }
            | AdminRequest::ChangeWholePolicy { .. }
            | AdminRequest::Address { .. }
            | AdminRequest::Finalize => return Some(request),
        };
        self.queue.push(NodeEvent::Admin(id, result));
        None
    }

    fn could_others_lead(&self) -> bool {
        let mut members = self.machine.members().iter();
        members
            .any(|(&id, member)| id != self.id() && !member.witness && self.consensus.is_voter(id))
    }

    /// Makes the snapshot that somebody waits for, or hands out the one that is there.
    pub(super) fn serve_snapshots(&mut self, outputs: &mut Outputs) {
        if self.admins.snapshots.is_empty() {
            return;
        }
        let tail = self.consensus.tail();
        let (index, term) = (tail.snapshot.index, tail.snapshot.term);
        let copy = StateCopy { index, term, data: tail.snapshot_data.clone() };
        self.admins.snapshots.retain(|waiting| {
            if waiting.index > index {
                return true;
            }
            if waiting.wants_copy {
                outputs.copies.push((waiting.id, copy.clone()));
            }
            outputs.events.push(NodeEvent::Admin(waiting.id, Ok(())));
            false
        });
        if !self.admins.snapshots.is_empty() {
            self.make_snapshot(outputs);
        }
    }

    pub(super) fn answer_admin(&mut self, decided: Decided, outputs: &mut Outputs) {
        let Decided { origin, id, request, result } = decided;
        if origin == self.id() {
            if let Some(result) = self.admins.answered(id, result) {
                self.queue.push(NodeEvent::Admin(id, result));
            }
            return;
        }
        let reply = codec::pack(&result).into();
        let bytes = Frame::AdminReply { id, reply }.encode();
        outputs.frames.push(Outgoing { to: origin, bulk: false, bytes });
        self.queue.push(NodeEvent::Decided { origin, request, done: result.is_ok() });
    }

    fn decide(&mut self, request: AdminRequest) -> Decision {
        if !self.is_open() || self.consensus.is_transferring() {
            return Decision::Later;
        }
        let is_forced =
            matches!(request, AdminRequest::ForcePromote { .. } | AdminRequest::ForceRemove { .. })
                || bug(Bug::QuorumUnchecked);
        let change = match request {
            AdminRequest::Add { node, peer_addr, client_addr, witness } => {
                let member = Member { node, peer_addr, client_addr, witness, disk: None };
                match self.check_new(&member) {
                    Err(result) => return Decision::Now(result),
                    Ok(()) => MemberChange::Add { raft_id: self.machine.next_raft_id(), member },
                }
            }
            AdminRequest::Promote { node } | AdminRequest::ForcePromote { node } => match self
                .member(&node)
            {
                None => return refused(format!("no member has the id {node}")),
                Some(raft_id) if self.consensus.is_voter(raft_id) => return Decision::Now(Ok(())),
                Some(raft_id) => {
                    let matched = self.consensus.progress(raft_id).map_or(0, |(at, _)| at);
                    if matched + LEVEL < self.consensus.commit() || matched == 0 {
                        return refused(format!("{node} has not caught up yet"));
                    }
                    MemberChange::Promote { raft_id }
                }
            },
            AdminRequest::Remove { node } | AdminRequest::ForceRemove { node } => {
                match self.member(&node) {
                    None if self.machine.is_retired(&node) => {
                        return self.confirm_removal(is_forced);
                    }
                    None => return refused(format!("no member has the id {node}")),
                    Some(raft_id) => MemberChange::Remove { raft_id },
                }
            }
            AdminRequest::Transfer { to } => return self.decide_transfer(to),
            AdminRequest::SetPolicy(policy) => return self.order_policy(policy),
            AdminRequest::ChangePolicy { from, to } => return self.decide_policy(&from, to),
            AdminRequest::ChangeWholePolicy { from, to } => {
                return self.decide_policy(&from.0, Box::new(to.0));
            }
            AdminRequest::Address { node, peer_addr } => {
                return self.decide_address(&node, peer_addr);
            }
            AdminRequest::Finalize => return self.decide_version(),
            AdminRequest::Snapshot | AdminRequest::Copy | AdminRequest::Drain { .. } => {
                return refused("only the node itself can do that; ask it".into());
            }
        };
        if self.consensus.has_pending_change() {
            return refused("another change of the membership is under way".into());
        }
        if !is_forced && let Some(decision) = self.check_quorum_after(&change) {
            return decision;
        }
        if change == (MemberChange::Remove { raft_id: self.id() }) {
            // A leader can not remove itself: somebody else must lead first, and will be asked again.
            return match self.best_successor() {
                Some(to) => {
                    self.consensus.transfer(to);
                    Decision::Later
                }
                None => refused("no other voter could lead after this node is removed".into()),
            };
        }
        if self.consensus.propose_change(&change) {
            Decision::At(self.consensus.last_index())
        } else {
            Decision::Later
        }
    }

    /// Refuses a change after which fewer voters than a majority would be reachable: nothing could be decided then.
    fn check_quorum_after(&self, change: &MemberChange) -> Option<Decision> {
        let mut voters = self.consensus.conf_state().voters;
        match change {
            MemberChange::Add { .. } => return None,
            MemberChange::Promote { raft_id } => voters.push(*raft_id),
            // What does not vote leaves all voters as they are.
            MemberChange::Remove { raft_id } if !voters.contains(raft_id) => return None,
            MemberChange::Remove { raft_id } => voters.retain(|voter| voter != raft_id),
        }
        if voters.is_empty() {
            // Then it is the leader that would go, and it has no successor.
            return None;
        }
        let majority = voters.len() / 2 + 1;
        let (reachable, silent): (Vec<_>, Vec<_>) =
            voters.into_iter().partition(|&voter| self.is_reachable(voter));
        if reachable.len() >= majority {
            return None;
        }
        if self.leads_newly() {
            // Voters may not have had the time to answer this leader yet.
            return Some(Decision::Later);
        }
        let name = |id: RaftId| match self.machine.members().get(&id) {
            Some(member) => member.node.clone(),
            None => id.to_string(),
        };
        let silent: Vec<String> = silent.into_iter().map(name).collect();
        Some(refused(format!(
            "{} of then {} voters would be reachable, fewer than a majority; not reachable: {}; bring them back first, \
             or force the change (`--force` of dflockctl, `force` in the request)",
            reachable.len(),
            reachable.len() + silent.len(),
            silent.join(", "),
        )))
    }

    /// A removal that has been applied is told as done when an entry behind it is committed: a majority of the voters
    /// that are left remembers it then, whichever of them lose their power. A forced one is told at once: those that
    /// are left may be no majority.
    fn confirm_removal(&mut self, is_forced: bool) -> Decision {
        if is_forced {
            return Decision::Now(Ok(()));
        }
        self.order(&LeaderCommand::Tick)
    }

    fn order(&mut self, order: &LeaderCommand) -> Decision {
        self.propose_order(order).map_or(Decision::Later, Decision::Ordered)
    }

    fn order_policy(&mut self, policy: Box<Policy>) -> Decision {
        let decision = self.order(&LeaderCommand::Policy(policy));
        if let Decision::Ordered(index) = decision {
            self.policy_proposed(index);
        }
        decision
    }

    pub(super) fn policy_proposed(&mut self, index: u64) {
        self.admins.policy_at = (self.consensus.term(), index);
    }

    /// Whether a policy that this node proposed is not applied yet.
    pub(super) fn is_policy_under_way(&self) -> bool {
        let (term, index) = self.admins.policy_at;
        term == self.consensus.term() && index > self.applied
    }

    /// Only a leader proposes a policy, and one whose leadership is open has applied all that earlier ones proposed. So
    /// the policy in force is known here, unless one is still under way.
    fn decide_policy(&mut self, from: &Policy, to: Box<Policy>) -> Decision {
        if self.is_policy_under_way() {
            return Decision::Later;
        }
        match compare_policy(self.machine.policy(), from, &to) {
            Some(result) => Decision::Now(result),
            None => self.order_policy(to),
        }
    }

    fn decide_address(&mut self, node: &str, peer_addr: String) -> Decision {
        let Some(raft_id) = self.member(node) else {
            return refused(format!("no member has the id {node}"));
        };
        let members = self.machine.members();
        if members[&raft_id].peer_addr == peer_addr {
            return Decision::Now(Ok(()));
        }
        if members.values().any(|known| known.peer_addr == peer_addr) {
            return refused(format!("another member has the address {peer_addr}"));
        }
        self.order(&LeaderCommand::Address { raft_id, peer_addr })
    }

    fn decide_version(&mut self) -> Decision {
        let mut reads = Vec::new();
        for (raft_id, member) in self.machine.members() {
            match self.machine.versions().get(raft_id) {
                Some(&version) => reads.push((version, member.node.as_str())),
                None => {
                    return refused(format!(
                        "{} has not said yet which versions it reads",
                        member.node
                    ));
                }
            }
        }
        let newest = reads.iter().map(|(version, _)| *version).max().unwrap_or(1);
        let old: Vec<_> = reads.iter().filter(|(version, _)| *version < newest).collect();
        if !old.is_empty() && !bug(Bug::VersionEarly) {
            let names = old.iter().map(|(version, node)| format!("{node} (up to {version})"));
            return refused(format!(
                "not all members read version {newest}: {}; let them run the newer server first, or remove them",
                names.collect::<Vec<_>>().join(", ")
            ));
        }
        if newest <= self.machine.version() {
            return Decision::Now(Ok(()));
        }
        let order = LeaderCommand::Version { version: newest };
        self.propose_order(&order).map_or(Decision::Later, |index| Decision::Raised(index, newest))
    }

    fn decide_transfer(&mut self, to: Option<String>) -> Decision {
        let target = match to {
            None => match self.best_successor() {
                Some(raft_id) => raft_id,
                None => return refused("there is no other voter".into()),
            },
            Some(node) => match self.member(&node) {
                Some(raft_id) if raft_id == self.id() => return Decision::Now(Ok(())),
                Some(raft_id) if self.consensus.is_voter(raft_id) => {
                    if self.machine.members()[&raft_id].witness {
                        return refused(format!("{node} is a witness and can not lead"));
                    }
                    raft_id
                }
                _ => return refused(format!("no voter has the id {node}")),
            },
        };
        self.consensus.transfer(target);
        Decision::Now(Ok(()))
    }

    fn check_new(&self, member: &Member) -> Result<(), AdminResult> {
        if let Some(known) = self.machine.members().values().find(|known| known.node == member.node)
        {
            let same = (&known.peer_addr, known.witness) == (&member.peer_addr, member.witness);
            let no = || Err(format!("{} is a member with another address or role", member.node));
            return Err(if same { Ok(()) } else { no() });
        }
        if self.machine.is_retired(&member.node) {
            let why = "was removed once; a node id is never used again";
            return Err(Err(format!("{} {why}", member.node)));
        }
        let mut members = self.machine.members().values();
        if members.any(|known| known.peer_addr == member.peer_addr) {
            return Err(Err(format!("another member has the address {}", member.peer_addr)));
        }
        if self.machine.next_raft_id() > Incarnation::RAFT_ID_MAX {
            return Err(Err("no member numbers are left".into()));
        }
        Ok(())
    }

    fn member(&self, node: &str) -> Option<RaftId> {
        let mut members = self.machine.members().iter();
        members.find(|(_, member)| member.node == node).map(|(&id, _)| id)
    }
}

fn refused(why: String) -> Decision {
    Decision::Now(Err(why))
}

/// What becomes of a change of the policy; none if it is to be made.
fn compare_policy(now: Option<&Policy>, from: &Policy, to: &Policy) -> Option<AdminResult> {
    match now {
        // Asked twice, because the first answer was lost.
        Some(now) if now == to => Some(Ok(())),
        Some(now) if now == from => None,
        Some(_) | None => Some(Err(POLICY_CHANGED.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use dflockd_core::{Limits, LimitsV2};
    use raft::eraftpb::{ConfState, HardState, SnapshotMetadata};

    use super::super::log::{Recovered, StoredSnapshot};
    use super::super::types::{AutoRelease, Start};
    use super::super::{RaftConfig, ReplicaConfig};
    use super::*;

    #[test]
    fn a_policy_is_changed_from_what_it_is() {
        let with = |locks_max| {
            let limits = Limits { locks_max, ..Limits::default() };
            Policy { limits, auto_release: AutoRelease::Clean, orphan_ttl: Span::ZERO }
        };
        let changed = || Some(Err(POLICY_CHANGED.to_owned()));
        assert_eq!(compare_policy(Some(&with(1)), &with(1), &with(2)), None);
        assert_eq!(compare_policy(Some(&with(2)), &with(1), &with(2)), Some(Ok(())), "once more");
        assert_eq!(compare_policy(Some(&with(3)), &with(1), &with(2)), changed());
        assert_eq!(compare_policy(None, &with(1), &with(2)), changed());
    }

    /// Who hears nothing asks again. What is being decided for it is not decided a second time.
    #[test]
    fn a_request_that_is_asked_again_is_decided_once() {
        let mut admins = Admins::default();
        let request = || AdminRequest::Finalize;
        admins.forwarded(2, 7, request());
        admins.forwarded(2, 7, request());
        assert_eq!(admins.to_decide.len(), 1, "it waits already");
        for (origin, id) in [(2, 8), (3, 7)] {
            admins.forwarded(origin, id, request());
        }
        assert_eq!(admins.to_decide.len(), 3, "another one of the same, the same one of another");
        let (origin, id, request) = admins.to_decide.remove(0);
        let (index, term, is_change, version) = (5, 1, false, None);
        let again = request.clone();
        admins.proposed.push(Proposed { origin, id, request, index, term, is_change, version });
        admins.to_decide.clear();
        admins.forwarded(2, 7, again.clone());
        assert!(admins.to_decide.is_empty(), "it is proposed already");
        admins.forwarded(2, 9, again);
        assert_eq!(admins.to_decide.len(), 1);
    }

    /// GUARANTEES 48: who was removed asks for nothing and sends no state any more, although its connection may still
    /// be up for a moment.
    #[test]
    fn who_was_removed_is_not_listened_to() {
        let member = |node: &str| Member {
            node: node.into(),
            peer_addr: format!("{node}:1"),
            client_addr: format!("{node}:2"),
            witness: false,
            disk: None,
        };
        let members = BTreeMap::from([(1, member("a")), (3, member("c"))]);
        let voters = members.keys().copied().collect();
        let mut metadata = SnapshotMetadata { index: 1, term: 1, ..Default::default() };
        metadata.set_conf_state(ConfState { voters, ..Default::default() });
        let data = Machine::new([7; 16], members).snapshot().into();
        let recovered = Recovered {
            hard_state: HardState { term: 1, commit: 1, ..Default::default() },
            notes: BTreeMap::new(),
            snapshot: Some(StoredSnapshot { metadata, data, digest: [0; 32] }),
            entries: Vec::new(),
            cut: false,
        };
        let config = ReplicaConfig {
            raft: RaftConfig { id: 1, election_ticks: 100, heartbeat_ticks: 10, seed: 1 },
            witness: false,
            policy: Policy {
                limits: Limits::default(),
                auto_release: AutoRelease::Clean,
                orphan_ttl: Span::ZERO,
            },
            fence: 1,
            seed: 1,
            cluster: [8; 16],
            run: Incarnation::new(1, 1),
            start: Start { disk: 1, client_addr: "a:2".into(), version: 1, witness: false },
            snapshot_entries: 1000,
            snapshot_bytes: 1 << 20,
        };
        let mut replica = Replica::new(config, recovered, Timestamp(1)).unwrap();
        let ask = |id| {
            let request = codec::pack(&AdminRequest::Remove { node: "c".into() }).into();
            Frame::Admin { id, request }.encode()
        };
        let piece = Frame::Chunk {
            transfer: 1,
            offset: 0,
            total: 100,
            digest: [0; 32],
            keep_only: false,
            header: Bytes::new(),
            data: Bytes::from_static(b"piece"),
        }
        .encode();
        // 2 was a member once, 0 has not said who it is, 9 is nobody yet.
        for stranger in [2, 0, 9] {
            replica.handle_frame(stranger, ask(stranger));
            assert!(replica.admins.to_decide.is_empty(), "{stranger} was listened to");
        }
        for stranger in [2, 0] {
            replica.handle_frame(stranger, piece.clone());
            assert!(!replica.transfers.is_coming(stranger), "a piece of {stranger} was taken");
        }
        replica.handle_frame(3, ask(3));
        assert_eq!(replica.admins.to_decide.len(), 1, "a member may ask");
        // One that was added by entries that are not here yet may lead by now.
        replica.handle_frame(9, piece);
        assert!(replica.transfers.is_coming(9));
    }

    /// What members say to each other has numbers, which may not change.
    #[test]
    fn requests_keep_their_numbers() {
        let policy = || {
            Box::new(Policy {
                limits: Limits::default(),
                auto_release: AutoRelease::Clean,
                orphan_ttl: Span::ZERO,
            })
        };
        let v1 = || policy().with_v2(LimitsV2::default());
        for (request, number) in [
            (AdminRequest::promote("c".into(), false), 1),
            (AdminRequest::remove("c".into(), false), 2),
            (AdminRequest::Transfer { to: None }, 3),
            (AdminRequest::SetPolicy(Box::new(v1())), 4),
            (AdminRequest::Finalize, 6),
            (AdminRequest::Drain { on: true }, 9),
            (AdminRequest::change_policy(1, v1(), v1()), 10),
            (AdminRequest::change_policy(2, *policy(), *policy()), 11),
            (AdminRequest::remove("c".into(), true), 12),
            (AdminRequest::promote("c".into(), true), 13),
        ] {
            let bytes = codec::pack(&request);
            assert_eq!(bytes[0], number, "{request:?}");
            assert_eq!(codec::unpack::<AdminRequest>(&bytes).ok().as_ref(), Some(&request));
            let before = codec::pack(&request.for_reader(2))[0];
            let known = if number > 11 { 14 - number } else { number };
            assert_eq!(before, known, "a leader of version 2 knows no more than 11");
        }
    }
}
