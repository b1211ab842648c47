//! How the first members of a cluster agree on who they are, before there is a log that they could agree by.
//!
//! The members of `--cluster-peers` begin with the same state, so they must not begin with different ideas of who is
//! behind a name: if two machines took part as the same member, there could be two majorities. Therefore a node takes
//! part only when it has met every node of the list, and has learnt the number that each of them has drawn for its data
//! directory. The id of the cluster is a digest of the list with those numbers: it is as random as they are, all first
//! members come to it by themselves, and nodes have the same one only if they mean the same data directories. Two
//! clusters of one list, even if they are formed while their nodes reach each other, have different ids from the first
//! vote on.
//!
//! While a node waits for others it presents the digest of the list alone, so that it can tell who belongs to another
//! one. It refuses every connection after it has learnt who is there: no frame comes before the node knows its cluster.
//! A node that knows presents that digest as well to first members that it knows by their data directories, so that
//! they learn of it ([`Handler::former_identity`](crate::transport::Handler::former_identity)).
//!
//! So all first members must be up once, at the same time, for a cluster to be formed; from then on a majority is
//! enough. A first member whose data directory is lost after that is replaced as any other member is.

use std::collections::BTreeMap;

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Bits128, Member, RaftId};
use raft::eraftpb::{ConfState, SnapshotMetadata};
use ring::digest;

use crate::transport::{Identity, PeerAddress};

/// Name, peer address and client address of a first member.
pub type FirstMember = (String, String, String);

/// A first member that waits for the others.
pub(super) struct Forming {
    /// In the order of their numbers, this node among them.
    members: Vec<FirstMember>,
    /// The data directories that are known, by name.
    disks: BTreeMap<String, u64>,
}

impl Forming {
    /// The node `node`, whose data directory is `disk`, begins to look for the others. None if it is not in the list.
    pub(super) fn new(members: &[FirstMember], node: &str, disk: u64) -> Option<Self> {
        let members = sorted(members);
        members
            .iter()
            .any(|(name, ..)| name == node)
            .then(|| Self { members, disks: BTreeMap::from([(node.to_owned(), disk)]) })
    }

    /// The number that a first member has.
    pub(super) fn number(&self, node: &str) -> Option<RaftId> {
        (1..).zip(&self.members).find(|(_, (name, ..))| name == node).map(|(number, _)| number)
    }

    /// What the node presents until it knows its cluster.
    pub(super) fn list_id(&self) -> Bits128 {
        list_id(&self.members)
    }

    /// Whom to dial.
    pub(super) fn peers(&self) -> Vec<PeerAddress> {
        let peers = (1..).zip(&self.members).map(|(raft_id, (node, address, _))| PeerAddress {
            raft_id,
            node: node.clone(),
            address: address.clone(),
        });
        peers.collect()
    }

    /// A node has proven who it is. What it said last counts: until a cluster is formed, a directory that was emptied
    /// has done no harm.
    pub(super) fn hear(&mut self, peer: &Identity) {
        if peer.cluster == Some(self.list_id()) && self.number(&peer.node) == Some(peer.raft_id) {
            self.disks.insert(peer.node.clone(), peer.disk);
        }
    }

    /// The first members that were not heard, for people.
    pub(super) fn missing(&self) -> String {
        let names = self.members.iter().map(|(node, ..)| node.as_str());
        let missing: Vec<&str> = names.filter(|node| !self.disks.contains_key(*node)).collect();
        missing.join(", ")
    }

    /// The id of the cluster and the state that all its members begin with, once all are known.
    pub(super) fn formed(&self) -> Option<(Bits128, SnapshotMetadata, Bytes)> {
        let members = self.members.iter().map(|member| {
            let disk = self.disks.get(&member.0).copied();
            (disk.is_some() || bug(Bug::FormedTooEarly)).then_some((member.clone(), disk))
        });
        let members = members.collect::<Option<Vec<_>>>()?;
        let id = if bug(Bug::FormedTooEarly) { self.list_id() } else { cluster_id(&members) };
        let (metadata, data) = first_state(id, members);
        Some((id, metadata, data))
    }
}

/// The state that a cluster with these first members begins with, and its place in the log.
pub(super) fn first_state(
    cluster: Bits128,
    members: Vec<(FirstMember, Option<u64>)>,
) -> (SnapshotMetadata, Bytes) {
    let members = (1..).zip(members).map(|(raft_id, ((node, peer_addr, client_addr), disk))| {
        (raft_id, Member { node, peer_addr, client_addr, witness: false, disk })
    });
    let members: BTreeMap<RaftId, Member> = members.collect();
    let conf_state = ConfState { voters: members.keys().copied().collect(), ..Default::default() };
    let mut metadata = SnapshotMetadata { index: 1, term: 1, ..Default::default() };
    metadata.set_conf_state(conf_state);
    (metadata, Bytes::from(Machine::new(cluster, members).snapshot()))
}

/// The id that all nodes of a list present while they look for each other.
pub(super) fn list_id(members: &[FirstMember]) -> Bits128 {
    digest_of(sorted(members).iter().map(|(node, peer_addr, _)| format!("{node}={peer_addr},")))
}

/// The id of the cluster of these members with these data directories.
fn cluster_id(members: &[(FirstMember, Option<u64>)]) -> Bits128 {
    digest_of(members.iter().map(|((node, peer_addr, _), disk)| {
        format!("{node}={peer_addr}#{:016x},", disk.unwrap_or_default())
    }))
}

fn digest_of(texts: impl Iterator<Item = String>) -> Bits128 {
    let mut hash = digest::Context::new(&digest::SHA256);
    texts.for_each(|text| hash.update(text.as_bytes()));
    let mut id = Bits128::default();
    let length = id.len();
    id.copy_from_slice(&hash.finish().as_ref()[..length]);
    id
}

/// First members in the order of their numbers.
fn sorted(members: &[FirstMember]) -> Vec<FirstMember> {
    let mut members = members.to_vec();
    members.sort();
    members
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(names: &[&str]) -> Vec<FirstMember> {
        let member = |name: &&str| (name.to_string(), format!("{name}:1"), format!("{name}:2"));
        names.iter().map(member).collect()
    }

    fn identity(of: &Forming, node: &str, disk: u64) -> Identity {
        Identity {
            cluster: Some(of.list_id()),
            node: node.to_owned(),
            raft_id: of.number(node).unwrap_or_default(),
            disk,
            witness: false,
            version: 1,
        }
    }

    fn id_of(forming: &Forming) -> Option<Bits128> {
        forming.formed().map(|(id, ..)| id)
    }

    /// GUARANTEES 41: whoever knows all data directories comes to the same cluster, and nobody before.
    #[test]
    fn all_first_members_come_to_one_id() {
        let mut a = Forming::new(&list(&["b", "a", "c"]), "a", 1).unwrap();
        let mut c = Forming::new(&list(&["c", "a", "b"]), "c", 3).unwrap();
        assert_eq!((a.number("a"), a.number("c"), a.number("d")), (Some(1), Some(3), None));
        assert_eq!((id_of(&a), a.missing()), (None, "b, c".into()));
        for (node, disk) in [("b", 2), ("c", 3)] {
            a.hear(&identity(&a, node, disk));
        }
        for (node, disk) in [("a", 1), ("b", 2)] {
            c.hear(&identity(&c, node, disk));
        }
        assert!(id_of(&a).is_some() && id_of(&a) == id_of(&c));
        assert_ne!(id_of(&a), Some(a.list_id()));
        let (_, metadata, data) = a.formed().unwrap();
        assert_eq!(metadata.get_conf_state().voters, [1, 2, 3]);
        let machine = Machine::restore(&data, false).unwrap();
        let disks: Vec<_> = machine.members().values().map(|member| member.disk).collect();
        assert_eq!(disks, [Some(1), Some(2), Some(3)]);
    }

    /// GUARANTEES 41: another data directory behind one of the names makes another cluster.
    #[test]
    fn another_data_directory_makes_another_id() {
        let formed = |disk_of_b| {
            let mut a = Forming::new(&list(&["a", "b"]), "a", 1).unwrap();
            a.hear(&identity(&a, "b", disk_of_b));
            id_of(&a).unwrap()
        };
        assert_ne!(formed(2), formed(3));
    }

    #[test]
    fn strangers_are_not_heard() {
        let mut a = Forming::new(&list(&["a", "b"]), "a", 1).unwrap();
        let known = identity(&a, "b", 2);
        a.hear(&Identity { cluster: Some([9; 16]), ..known.clone() });
        a.hear(&Identity { cluster: None, ..known.clone() });
        a.hear(&Identity { raft_id: 1, ..known.clone() });
        a.hear(&Identity { node: "d".into(), raft_id: 0, ..known.clone() });
        assert_eq!(a.missing(), "b");
        // A directory that was emptied meanwhile.
        a.hear(&known);
        let first = id_of(&a);
        a.hear(&Identity { disk: 7, ..known });
        assert!(id_of(&a).is_some() && id_of(&a) != first);
        assert!(Forming::new(&list(&["a", "b"]), "c", 1).is_none());
    }
}
