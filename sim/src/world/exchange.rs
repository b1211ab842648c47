//! Members are exchanged while one of them is away: it comes back to a cluster whose other voters it does not know, and
//! is needed for a majority.
//!
//! One of three voters is switched off. A new member is added and becomes a voter, another one is removed. Then the
//! last one that the first knows is lost for good, and the first comes back: it and the new one are the majority.

use dflockd_replica::admin::AdminRequest;
use dflockd_replica::types::RaftId;

use super::{Event, Membership, World};
use crate::plan::SEC;

/// How far an exchange of members has come.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Exchange {
    #[default]
    NotBegun,
    /// Members are exchanged while this one is away.
    Without(RaftId),
    /// A member was lost for good.
    Done,
}

impl World {
    /// The next step of an exchange, if there is to be one.
    pub(super) fn exchange(&mut self) {
        if !self.storm || self.exchange == Exchange::Done {
            return;
        }
        self.schedule(SEC * self.plan.pace / 2, Event::Exchange);
        let Some(leader) = self.leader() else { return };
        let voters =
            self.nodes[&leader].with_replica(|replica| replica.conf_state()).unwrap_or_default();
        let (voters, learners) = (voters.voters, voters.learners);
        let are_there = |ids: &[RaftId]| {
            ids.iter().all(|id| self.nodes.get(id).is_some_and(|node| node.live.is_some()))
        };
        match self.exchange {
            Exchange::NotBegun => {
                let away = voters.iter().copied().find(|&id| id != leader);
                if voters.len() == 3
                    && learners.is_empty()
                    && are_there(&voters)
                    && let Some(away) = away
                {
                    self.note(|| format!("n{away} is switched off, and members are exchanged"));
                    self.exchange = Exchange::Without(away);
                    self.crash(away, false, self.plan.storm);
                }
            }
            Exchange::Without(away) => {
                let others: Vec<RaftId> = voters.into_iter().filter(|&id| id != away).collect();
                self.exchange_without(away, leader, &others, &learners);
            }
            Exchange::Done => {}
        }
    }

    fn exchange_without(
        &mut self,
        away: RaftId,
        leader: RaftId,
        others: &[RaftId],
        learners: &[RaftId],
    ) {
        let members = self.oracle.machine().members();
        let name_of = |id: &RaftId| members.get(id).map(|member| member.node.clone());
        let new = others.iter().copied().find(|&id| id > self.plan.voters);
        let is_busy = !matches!(self.admin, Membership::Idle);
        match (learners, new, others) {
            (_, Some(new), &[one, other]) if !self.rotten => {
                let known = if one == new { other } else { one };
                self.note(|| format!("n{known} is lost for good, and n{away} comes back"));
                self.exchange = Exchange::Done;
                self.nodes.get_mut(&known).expect("known").gone = true;
                self.crash(known, true, SEC);
                self.schedule(SEC, Event::Start(away));
            }
            (_, Some(_), _) => {
                let oldest = others.iter().find(|&&id| id <= self.plan.voters);
                if let Some(node) = oldest.and_then(name_of) {
                    self.ask_admin(leader, AdminRequest::Remove { node });
                }
            }
            (&[learner, ..], None, _) => {
                if let Some(node) = name_of(&learner) {
                    self.ask_admin(leader, AdminRequest::Promote { node });
                }
            }
            (&[], None, _) if !is_busy => {
                let name = format!("e{}", self.next_admin);
                let (peer_addr, client_addr) = (name.clone(), name.clone());
                let request = AdminRequest::Add {
                    node: name.clone(),
                    peer_addr,
                    client_addr,
                    witness: false,
                };
                let number = self.ask_admin(leader, request);
                self.admin = Membership::Adding(number, name, false);
            }
            (&[], None, _) => {}
        }
    }
}
