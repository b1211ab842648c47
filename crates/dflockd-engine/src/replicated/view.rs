//! The cluster as a node sees it, for those who ask without waiting for the replica.

use std::collections::BTreeMap;

use dflockd_core::bugs::{Bug, bug};
use dflockd_replica::types::{Addresses, Bits128, Member, Policy, RaftId};
use dflockd_replica::{Replica, Status};

use crate::transport::Identity;

/// The cluster as this node sees it.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// The number of this node in the cluster.
    pub raft_id: RaftId,
    /// What this node is at the moment; none before it takes part.
    pub status: Option<Status>,
    /// All members by their numbers.
    pub members: BTreeMap<RaftId, Member>,
    /// The members that vote.
    pub voters: Vec<RaftId>,
    /// The members that take entries and do not vote.
    pub learners: Vec<RaftId>,
    /// The policy that all members decide by.
    pub policy: Option<Policy>,
    /// Where else the members can be reached.
    pub addresses: BTreeMap<RaftId, Addresses>,
    /// The cluster's name.
    pub cluster: Bits128,
    /// The newest version that each member reads.
    pub versions: BTreeMap<RaftId, u32>,
    /// The version of the log that all members agreed to use.
    pub version: u32,
    /// The newest number that a member was given.
    pub(super) last_raft_id: RaftId,
}

/// Where clients find the leader of a cluster, as far as that is known.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Leader {
    /// The address of its line protocol.
    pub line: Option<String>,
    /// The address of its HTTP API, if it has one.
    pub http: Option<String>,
    /// The address of its gRPC API, if it has one.
    pub grpc: Option<String>,
}

impl View {
    /// Where clients find the leader, if there is one.
    #[must_use]
    pub fn leader_addr(&self) -> Option<&str> {
        let leader = self.status?.leader?;
        self.members.get(&leader).map(|member| member.client_addr.as_str())
    }

    /// Where clients find the leader, by each API.
    #[must_use]
    pub fn leader(&self) -> Leader {
        let addresses = self.status.and_then(|status| self.addresses.get(&status.leader?));
        let known = |addr: &String| Some(addr.clone()).filter(|addr| !addr.is_empty());
        Leader {
            line: self.leader_addr().map(str::to_owned),
            http: addresses.and_then(|addresses| known(&addresses.http)),
            grpc: addresses.and_then(|addresses| known(&addresses.grpc)),
        }
    }

    /// Whether this node leads.
    #[must_use]
    pub fn is_leader(&self) -> bool {
        self.status.is_some_and(|status| status.is_leader())
    }

    /// Whether this node takes entries, but does not vote.
    #[must_use]
    pub fn is_learner(&self) -> bool {
        self.learners.contains(&self.raft_id)
    }

    /// Takes over what the replicated state says about the cluster.
    pub(super) fn set_members(&mut self, replica: &Replica) {
        let machine = replica.machine();
        let conf = replica.conf_state();
        self.raft_id = replica.id();
        let former = std::mem::replace(&mut self.members, machine.members().clone());
        if bug(Bug::RemovedHeard) {
            for (raft_id, member) in former {
                self.members.entry(raft_id).or_insert(member);
            }
        }
        self.last_raft_id = machine.next_raft_id() - 1;
        self.voters = conf.voters;
        self.learners = conf.learners;
        self.policy = machine.policy().cloned();
        self.addresses = machine.addresses().clone();
        self.cluster = machine.cluster();
        self.versions = machine.versions().clone();
        self.version = machine.version();
    }

    /// Admits only a member with the data directory that this member is known to have.
    pub(super) fn admit_known(&self, peer: &Identity) -> Result<(), String> {
        self.admit(peer)?;
        match self.members.get(&peer.raft_id) {
            Some(member) if member.disk == Some(peer.disk) => Ok(()),
            Some(_) | None => Err(format!(
                "{} is no member that this cluster knows by its data directory, and presents the id of its beginning",
                peer.node
            )),
        }
    }

    /// Whether a node that has proven who it is may take part in this cluster.
    pub(super) fn admit(&self, peer: &Identity) -> Result<(), String> {
        if self.members.is_empty() {
            return Ok(());
        }
        match self.members.get(&peer.raft_id) {
            Some(member) if member.node != peer.node => {
                Err(format!("member {} is {}, not {}", peer.raft_id, member.node, peer.node))
            }
            Some(member) if member.disk.is_some_and(|disk| disk != peer.disk) => Err(format!(
                "{} came back with another data directory; remove it and let it join under a new id",
                peer.node
            )),
            Some(_) => Ok(()),
            None if peer.raft_id == 0 => {
                let known = self.members.values().find(|member| member.node == peer.node);
                match known {
                    Some(member) if member.disk.is_some_and(|disk| disk != peer.disk) => {
                        Err(format!(
                            "{} came back with an empty data directory; remove it and let it join under a \
                         new id",
                            peer.node
                        ))
                    }
                    _ => Ok(()),
                }
            }
            None if peer.raft_id <= self.last_raft_id => {
                Err(format!("{} was removed from the cluster", peer.node))
            }
            // Added by entries that this node has not seen yet.
            None => Ok(()),
        }
    }
}
