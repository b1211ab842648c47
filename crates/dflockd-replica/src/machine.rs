//! The replicated state: the store, and what a cluster must agree on besides it.
//!
//! [`Machine::apply`] is a function of the committed log alone: members, the incarnations of nodes, kept sessions, the
//! policy and the store change here and nowhere else. Every member applies every entry; what comes of it for clients is
//! handed out as [`Event`]s, of which each node uses those for its own connections.
//!
//! # Sessions of a cluster
//!
//! An [`Incarnation`] is one start of a member's process and what follows: the member's number (12 bits) and how often
//! it was started (20 bits), noted on disk before anybody is told. A session's id is its incarnation in the upper 32
//! bits and a count of its own in the lower, so each id tells where its connection is. A cluster has room for 4,095
//! members and 1,048,575 starts of each in all, and an incarnation for 2^32 sessions.
//!
//! - The first item of an incarnation is `Start`: it names the data directory (a random number), the client address,
//!   and whether the node is a witness. It ends what older incarnations of the node left: waits, enqueue records and
//!   subscriptions at once, holds with their leases. Another data directory under the same name is not accepted, and a
//!   node that learns of a later start than its own is an old copy and stops.
//! - A member that the leader has not heard for 10 s is *lost* (`NodeLost`), which ends its incarnation like a new
//!   start. A member that was only slow closes its connections and begins a new incarnation.
//! - Kept sessions are bound to no incarnation: the end of their incarnation detaches them. `Keep`, `Attach`, `Close`
//!   and `Kick` are items, so the epoch is decided in the log, and what an older attachment sent does nothing on any
//!   node. From version 2 on, a detached session does not listen: its subscriptions leave the indexes and are entered
//!   again by `Attach`.
//! - `Close` says whether the client closed with a FIN; `Policy::auto_release` then decides about the holds.
//! - `Identify` tells who is behind a session (since version 4): a name for people, and the `stable-ref`. If a session
//!   with a reference ends because its connection or its node did, its places in queues stay for `--orphan-ttl`, and
//!   so do its holds where the policy would have released them; the others have their leases. Another session of the
//!   same reference gets both back by asking again, on any node. Without `Identify` a `stable-ref` only keeps the
//!   holds.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{
    Caller, Command, Effect, KEPT_FOR, Limits, LimitsV2, Outcome, Refusal, RequestId, SessionId,
    Shared, Span, Store, Timestamp,
};
use serde::{Deserialize, Serialize};

use super::codec::{self, Malformed, Section};
use super::types::{
    Addresses, AutoRelease, Bits128, Incarnation, LeaderCommand, Member, MemberChange, Policy,
    Proposal, ProposalBody, RaftId, Start,
};
use super::version;

/// The byte form of the whole machine in a cluster of the first version; each later version has the next one.
const FIRST_FORM: u8 = 2;

/// The replicated state of one member.
pub struct Machine {
    registry: Registry,
    registry_v2: RegistryV2,
    /// The name that the cluster began with, once it has another one. In snapshots since version 3.
    formed_as: Option<Bits128>,
    /// None before the first leader's `Init`, and always on a witness.
    store: Option<Store>,
    shared: Arc<Shared>,
    /// Mirrors `registry.kept`.
    by_secret: BTreeMap<Bits128, SessionId>,
    /// Mirrors the homes in `registry.kept`: the end of one incarnation must not look at the sessions of the others.
    at_home: BTreeSet<(Incarnation, SessionId)>,
    /// A witness follows membership and time, but keeps no state.
    witness: bool,
    effects: Vec<Effect>,
    /// The oldest version that a program read which was ever a member. Known only to a machine that has applied the log
    /// from its very beginning; no part of the state.
    oldest: Option<u32>,
    from_beginning: bool,
    /// What people are shown as the time, on this node.
    shown: Timestamp,
}

/// What the members agree on besides the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Registry {
    cluster: Bits128,
    now: Timestamp,
    members: BTreeMap<RaftId, Member>,
    last_raft_id: RaftId,
    /// Names that were removed and may not come back.
    retired: BTreeSet<String>,
    /// The newest incarnation of each member.
    incarnations: BTreeMap<RaftId, IncarnationState>,
    kept: BTreeMap<SessionId, Kept>,
    /// Ended while their connections were not closed yet: nothing these sent meanwhile may bring them back.
    dead: BTreeSet<SessionId>,
    policy: Option<Box<Policy>>,
}

/// The fields of the registry that form 2 of a snapshot added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct RegistryV2 {
    addresses: BTreeMap<RaftId, Addresses>,
    /// The newest version that each member reads, as it said when it last started.
    versions: BTreeMap<RaftId, u32>,
    /// The version that all members agreed to use; 0 stands for 1, the first.
    version: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct IncarnationState {
    run: Incarnation,
    /// The number of the last item of the incarnation that was applied.
    seq: u64,
    /// Whether the others have not given the incarnation up.
    live: bool,
}

/// A session that outlives its connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    secret: Bits128,
    epoch: u32,
    /// The incarnation of the node that the session is attached through, if it is attached.
    home: Option<Incarnation>,
    /// The connection that began it has ended, so nothing more can come from there.
    left: bool,
}

/// What applying an entry brought about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// An effect of the store, for a session.
    Effect(Effect),
    /// A connection's session has become another one.
    Attached {
        /// The session the connection had.
        by: SessionId,
        /// The request that asked for it.
        request: RequestId,
        /// The kept session and how often it was attached; none if there is no such session.
        to: Option<(SessionId, u32)>,
    },
    /// What an attachment sent came too late: the session is no longer its own.
    Gone {
        /// The session as the attachment knew it.
        session: SessionId,
        /// How often it was attached then.
        epoch: u32,
        /// The request that came too late.
        request: RequestId,
    },
    /// A session was ended by an operator.
    Kicked {
        /// The session that was ended.
        session: SessionId,
    },
    /// A node began an incarnation.
    IncarnationStarted(Incarnation),
    /// The others gave a node up, or it began a new incarnation.
    IncarnationEnded(Incarnation),
    /// The members or their addresses have changed.
    Members,
    /// The policy or the version has changed.
    PolicyChanged,
    /// The digest of a snapshot, as the leader has it.
    Digest {
        /// The index of the snapshot.
        index: u64,
        /// SHA-256 of the snapshot.
        digest: [u8; 32],
    },
}

impl Machine {
    /// The state at the very beginning of a cluster.
    #[must_use]
    pub fn new(cluster: Bits128, members: BTreeMap<RaftId, Member>) -> Self {
        let registry = Registry {
            cluster,
            now: Timestamp(0),
            last_raft_id: members.keys().max().copied().unwrap_or(0),
            members,
            retired: BTreeSet::new(),
            incarnations: BTreeMap::new(),
            kept: BTreeMap::new(),
            dead: BTreeSet::new(),
            policy: None,
        };
        Self::with(registry, None, Arc::new(Shared::new()), false)
    }

    fn with(registry: Registry, store: Option<Store>, shared: Arc<Shared>, witness: bool) -> Self {
        let kept = registry.kept.iter();
        let at_home =
            kept.clone().filter_map(|(&session, kept)| Some((kept.home?, session))).collect();
        let mut by_secret: BTreeMap<_, _> =
            kept.map(|(&session, kept)| (kept.secret, session)).collect();
        if bug(Bug::SecretsForgotten) {
            by_secret.clear();
        }
        let (registry_v2, formed_as) = (RegistryV2::default(), None);
        let (effects, shown) = (Vec::new(), registry.now);
        let from_beginning = registry.policy.is_none() && registry.incarnations.is_empty();
        let oldest = None;
        Self {
            registry,
            registry_v2,
            formed_as,
            store,
            shared,
            by_secret,
            at_home,
            witness,
            effects,
            oldest,
            from_beginning,
            shown,
        }
    }

    /// The whole state as bytes; equal states give equal bytes.
    ///
    /// # Panics
    ///
    /// If memory runs out.
    #[must_use]
    pub fn snapshot(&self) -> Vec<u8> {
        let registry = postcard::to_extend(&self.registry, vec![form(self.version())]);
        let registry = registry.expect("memory is all it needs");
        let mut bytes =
            postcard::to_extend(&self.registry_v2, registry).expect("memory is all it needs");
        if self.version() >= 2 {
            let v2 = self.policy().map(|policy| policy.limits.v2());
            bytes = postcard::to_extend(&v2, bytes).expect("memory is all it needs");
        }
        if self.version() >= version::NAMED {
            bytes = postcard::to_extend(&self.formed_as, bytes).expect("memory is all it needs");
        }
        match &self.store {
            None => bytes.push(0),
            Some(store) => {
                bytes.push(1);
                bytes.extend_from_slice(&store.snapshot());
            }
        }
        bytes
    }

    /// The state that was written by [`Machine::snapshot`]. A witness leaves the store aside.
    ///
    /// # Errors
    ///
    /// If the bytes are not such a state.
    pub fn restore(bytes: &[u8], witness: bool) -> Result<Self, String> {
        check_form(bytes)?;
        let Some((&form, rest)) = bytes.split_first() else {
            return Err("a snapshot that ends too early".into());
        };
        let malformed = |error| format!("the registry of a snapshot: {error}");
        let (mut registry, rest) =
            postcard::take_from_bytes::<Registry>(rest).map_err(malformed)?;
        let (registry_v2, mut rest) = match form {
            1 => (RegistryV2::default(), rest),
            _ => postcard::take_from_bytes(rest).map_err(malformed)?,
        };
        if form > FIRST_FORM {
            let v2: Option<LimitsV2>;
            (v2, rest) = postcard::take_from_bytes(rest).map_err(malformed)?;
            registry.policy = match (registry.policy, v2) {
                (Some(policy), Some(v2)) => Some(Box::new(policy.with_v2(v2))),
                (None, None) => None,
                _ => return Err("a snapshot with one half of a policy".into()),
            };
        }
        let mut formed_as = None;
        if form >= self::form(version::NAMED) {
            (formed_as, rest) = postcard::take_from_bytes(rest).map_err(malformed)?;
        }
        let shared = Arc::new(Shared::new());
        let store = match rest.split_first() {
            Some((0, [])) => None,
            Some((1, _)) if witness => None,
            Some((1, bytes)) => {
                let store = Store::restore(bytes, Arc::clone(&shared));
                Some(store.map_err(|error| error.to_string())?)
            }
            _ => return Err("a snapshot that ends too early".into()),
        };
        Ok(Self { registry_v2, formed_as, ..Self::with(registry, store, shared, witness) })
    }

    /// Applies the payload of a log entry.
    ///
    /// # Errors
    ///
    /// If it is not one: all members see the same bytes, so none may go on.
    pub fn apply(&mut self, payload: &[u8], events: &mut Vec<Event>) -> Result<(), Malformed> {
        let stamp = codec::stamp_of(payload)?;
        assert!(self.registry.now <= stamp, "{stamp:?} is before {:?}", self.registry.now);
        self.registry.now = stamp;
        // What has ended by now ends first, whatever the entry brings (R3).
        self.run_store(NOBODY, Command::Tick, events);
        for section in codec::sections(payload) {
            match section? {
                Section::LeaderCommand(order) => self.execute_order(order, events),
                Section::Batch { run, first_seq, items, .. } => {
                    for (seq, item) in (first_seq..).zip(items) {
                        self.execute_item(run, seq, item?, events);
                    }
                }
            }
        }
        Ok(())
    }

    /// Applies a change of the membership.
    pub fn apply_change(&mut self, change: MemberChange, events: &mut Vec<Event>) {
        match change {
            MemberChange::Add { raft_id, member } => {
                self.registry.last_raft_id = self.registry.last_raft_id.max(raft_id);
                self.registry.members.insert(raft_id, member);
            }
            // Who votes is kept by Raft.
            MemberChange::Promote { .. } => {}
            MemberChange::Remove { raft_id } => {
                self.registry_v2.addresses.remove(&raft_id);
                self.registry_v2.versions.remove(&raft_id);
                if let Some(member) = self.registry.members.remove(&raft_id) {
                    self.registry.retired.insert(member.node);
                }
                if let Some(IncarnationState { run, live: true, .. }) =
                    self.registry.incarnations.get(&raft_id).copied()
                {
                    self.end_incarnation(run, events);
                }
                self.registry.incarnations.remove(&raft_id);
            }
        }
        events.push(Event::Members);
    }

    /// The stamp of the last entry.
    #[must_use]
    pub fn now(&self) -> Timestamp {
        self.registry.now
    }

    /// The store, unless this is a witness or the cluster has not begun.
    #[must_use]
    pub fn store(&self) -> Option<&Store> {
        self.store.as_ref()
    }

    /// Goes on counting where an earlier state of this process was.
    pub(super) fn continue_tally(&mut self, earlier: &Self) {
        if let (Some(store), Some(earlier)) = (&mut self.store, &earlier.store) {
            store.continue_tally(earlier);
        }
    }

    /// The cluster's name.
    #[must_use]
    pub fn cluster(&self) -> Bits128 {
        self.registry.cluster
    }

    /// Cluster time as far as it can be told between entries, for people. Nothing is decided by it.
    #[must_use]
    pub fn shown(&self) -> Timestamp {
        self.shown.max(self.registry.now)
    }

    /// Local time has moved on.
    pub(super) fn show(&mut self, now: Timestamp) {
        self.shown = now;
    }

    /// What all decide by, once the cluster has begun.
    #[must_use]
    pub fn policy(&self) -> Option<&Policy> {
        self.registry.policy.as_deref()
    }

    /// Where else members can be reached.
    #[must_use]
    pub fn addresses(&self) -> &BTreeMap<RaftId, Addresses> {
        &self.registry_v2.addresses
    }

    /// The newest version that each member reads, as far as it has said.
    #[must_use]
    pub fn versions(&self) -> &BTreeMap<RaftId, u32> {
        &self.registry_v2.versions
    }

    /// The version that all members agreed to use.
    #[must_use]
    pub fn version(&self) -> u32 {
        self.registry_v2.version.max(1)
    }

    /// The version that a cluster which has just begun should use: one that all its members read, and that no program
    /// was too old for which has ever been a member, so that nobody could want to go back. None if it has one already,
    /// or if this machine can not know.
    #[must_use]
    pub fn first_version(&self) -> Option<u32> {
        if self.registry_v2.version != 0 || !self.from_beginning || self.registry.policy.is_none() {
            return None;
        }
        let versions =
            self.registry.members.keys().map(|id| self.registry_v2.versions.get(id).copied());
        let read_by_all = versions.min()??;
        (read_by_all > 1 && self.oldest == Some(read_by_all)).then_some(read_by_all)
    }

    /// Whether a node that is the whole cluster, and has just begun it, is about to raise its version and to set the
    /// limits of that: in a moment, and then never again.
    #[must_use]
    pub fn is_settling(&self) -> bool {
        let is_new = self.from_beginning && self.oldest == Some(self.version());
        let alone = self.registry.members.len() == 1;
        let lacks = self.lacks_limits() || self.lacks_name();
        alone && (self.first_version().is_some() || is_new && lacks)
    }

    /// Whether the cluster has reached the version in which it has a name of its own, and all its members can be known
    /// by their data directories, but still has the name that it began with.
    #[must_use]
    pub fn lacks_name(&self) -> bool {
        self.version() >= version::NAMED
            && self.formed_as.is_none()
            && self.registry.members.values().all(|member| member.disk.is_some())
            && !bug(Bug::NameNotDrawn)
    }

    /// The name that the cluster began with, once it has another one.
    #[must_use]
    pub fn formed_as(&self) -> Option<Bits128> {
        self.formed_as
    }

    /// Whether the cluster has reached a version whose limits and rules are not in its policy yet.
    #[must_use]
    pub fn lacks_limits(&self) -> bool {
        let known = self.version().min(Limits::RULES);
        self.policy().is_some_and(|policy| !policy.limits.follows(known))
    }

    /// The fence that the next grant will get.
    pub fn fence_next(&self) -> u64 {
        self.shared.fence_next()
    }

    /// Makes it the state of another cluster, of one member. All sessions and holds end, fences go on from `fence`,
    /// nothing is granted for `delay`, the first at least and the second at most; values and the policy stay.
    pub fn begin_anew(
        &mut self,
        cluster: Bits128,
        raft_id: RaftId,
        member: Member,
        fence: u64,
        delay: (Span, Option<Span>),
    ) {
        // It is drawn as well, and nobody knows another one.
        self.formed_as = (self.version() >= version::NAMED).then_some(cluster);
        let registry = &mut self.registry;
        registry.cluster = cluster;
        registry.last_raft_id = registry.last_raft_id.max(raft_id);
        registry.retired.remove(&member.node);
        registry.members = BTreeMap::from([(raft_id, member)]);
        registry.incarnations.clear();
        registry.kept.clear();
        registry.dead.clear();
        self.by_secret.clear();
        self.at_home.clear();
        self.registry_v2 =
            RegistryV2 { version: self.registry_v2.version, ..RegistryV2::default() };
        if let Some(store) = &mut self.store {
            store.begin_anew(fence, delay);
        }
    }

    /// The members by number.
    #[must_use]
    pub fn members(&self) -> &BTreeMap<RaftId, Member> {
        &self.registry.members
    }

    /// Whether a name was removed for ever.
    #[must_use]
    pub fn is_retired(&self, node: &str) -> bool {
        self.registry.retired.contains(node)
    }

    /// Whether a number was a member's once and is not any more.
    #[must_use]
    pub fn was_removed(&self, raft_id: RaftId) -> bool {
        raft_id <= self.registry.last_raft_id && !self.registry.members.contains_key(&raft_id)
    }

    /// The number the next new member gets.
    #[must_use]
    pub fn next_raft_id(&self) -> RaftId {
        let is_free = |id: &RaftId| !self.registry.members.contains_key(id);
        if bug(Bug::IdReused)
            && let Some(id) = (1..=self.registry.last_raft_id).find(is_free)
        {
            return id;
        }
        self.registry.last_raft_id + 1
    }

    /// The newest incarnation of a member that the others have not given up.
    #[must_use]
    pub fn run_of(&self, raft_id: RaftId) -> Option<Incarnation> {
        self.registry.incarnations.get(&raft_id).filter(|state| state.live).map(|state| state.run)
    }

    /// The newest incarnation of a member, given up or not.
    #[must_use]
    pub fn newest_run(&self, raft_id: RaftId) -> Option<Incarnation> {
        self.registry.incarnations.get(&raft_id).map(|state| state.run)
    }

    /// The last item of an incarnation that was applied; 0 if none. None if nothing of the incarnation counts any more.
    #[must_use]
    pub fn applied_seq(&self, run: Incarnation) -> Option<u64> {
        match self.registry.incarnations.get(&run.raft_id()) {
            Some(state) if state.run == run && bug(Bug::DeadRun) => Some(state.seq),
            Some(state) if state.run == run => state.live.then_some(state.seq),
            Some(state) if state.run > run => None,
            _ => Some(0),
        }
    }

    /// When the store wants time to be looked at.
    #[must_use]
    pub fn next_deadline(&self) -> Option<Timestamp> {
        self.store.as_ref().and_then(Store::next_deadline)
    }

    /// The incarnation of a node to which a session's connection belongs, if it has one.
    #[must_use]
    pub fn home(&self, session: SessionId) -> Option<Incarnation> {
        self.registry.kept.get(&session).map_or(Some(Incarnation::of(session)), |kept| kept.home)
    }

    /// How often a kept session was attached, if it waits for its client now.
    #[must_use]
    pub fn detached_epoch(&self, session: SessionId) -> Option<u64> {
        let kept = self.registry.kept.get(&session)?;
        kept.home.is_none().then_some(kept.epoch.into())
    }

    /// Whether a session outlives its connection.
    #[must_use]
    pub fn is_kept(&self, session: SessionId) -> bool {
        self.registry.kept.contains_key(&session)
    }

    fn execute_order(&mut self, order: LeaderCommand, events: &mut Vec<Event>) {
        match order {
            LeaderCommand::Init { policy, seed, fence } => {
                if self.registry.policy.is_some() {
                    return;
                }
                if !self.witness {
                    self.shared.set_fences(fence, u64::MAX);
                    let shared = Arc::clone(&self.shared);
                    self.store =
                        Some(Store::new(policy.limits.clone(), seed, shared, Timestamp(0)));
                }
                self.registry.policy = Some(policy);
                events.push(Event::PolicyChanged);
            }
            // Its stamp was all it had to say.
            LeaderCommand::Tick => {}
            LeaderCommand::NewTerm => self.run_store(NOBODY, Command::NewTerm, events),
            LeaderCommand::NodeLost { run } => {
                if self.run_of(run.raft_id()) == Some(run) {
                    self.end_incarnation(run, events);
                }
            }
            LeaderCommand::Policy(policy) => {
                if let Some(store) = &mut self.store {
                    store.set_limits(policy.limits.clone());
                }
                self.registry.policy = Some(policy);
                events.push(Event::PolicyChanged);
            }
            LeaderCommand::Digest { index, digest } => events.push(Event::Digest { index, digest }),
            LeaderCommand::Address { raft_id, peer_addr } => {
                if let Some(member) = self.registry.members.get_mut(&raft_id) {
                    member.peer_addr = peer_addr;
                    events.push(Event::Members);
                }
            }
            LeaderCommand::Version { version } => {
                // Members may have come or gone back to an older program since it was proposed.
                let versions = &self.registry_v2.versions;
                let reads = |id| versions.get(id).is_some_and(|newest| *newest >= version);
                if self.registry.members.keys().all(reads) || bug(Bug::VersionEarly) {
                    self.registry_v2.version = self.version().max(version);
                    events.push(Event::PolicyChanged);
                }
            }
            LeaderCommand::ClusterId { id } => {
                // Members may have come since it was proposed.
                if self.lacks_name() {
                    self.formed_as = Some(std::mem::replace(&mut self.registry.cluster, id));
                    events.push(Event::Members);
                }
            }
        }
    }

    fn execute_item(
        &mut self,
        run: Incarnation,
        seq: u64,
        item: Proposal<'_>,
        events: &mut Vec<Event>,
    ) {
        let raft_id = run.raft_id();
        if let ProposalBody::Start(start) = item.body {
            if seq == 1 {
                self.start_incarnation(run, start, events);
            }
            return;
        }
        match self.registry.incarnations.get_mut(&raft_id) {
            // Exactly once, in order, without gaps: what comes twice is skipped, what lacks its predecessor
            // is sent again.
            Some(state) if bug(Bug::BatchTwice) && state.run == run && seq <= state.seq => {}
            Some(state) if bug(Bug::DeadRun) && state.run == run && state.seq + 1 == seq => {
                state.seq = seq;
            }
            Some(state) if state.run == run && state.live && state.seq + 1 == seq => {
                state.seq = seq;
            }
            _ => return,
        }
        let Proposal { session, epoch, request, keep, body } = item;
        let is_own = match self.registry.kept.get(&session) {
            Some(kept) => kept.epoch == epoch && kept.home == Some(run),
            // A session that was kept and has ended, or was never this incarnation's.
            None => epoch == 0 && Incarnation::of(session) == run,
        };
        let is_dead = self.registry.dead.contains(&session);
        // What an attachment gives back or withdraws is its own business, also when the session has moved on.
        let always = matches!(
            body,
            ProposalBody::Undo(_)
                | ProposalBody::Close { .. }
                | ProposalBody::Command(Command::Cancel(_))
                | ProposalBody::Addresses(_)
        );
        if (!is_own || is_dead) && !always {
            events.push(Event::Gone { session, epoch, request });
            return;
        }
        let caller = Caller { session, request, keep };
        match body {
            ProposalBody::Start(_) => unreachable!("handled above"),
            ProposalBody::Command(command) => self.run_store(caller, command, events),
            ProposalBody::Undo(outcome) => self.run_store(NOBODY, Command::Undo(&outcome), events),
            ProposalBody::Keep { .. } if self.keeps_all_it_may(session) => {
                reply(caller, Outcome::Refused(Refusal::MaxSessions), events);
            }
            ProposalBody::Keep { secret } => {
                let kept = Kept { secret, epoch: 0, home: Some(run), left: false };
                // Its own session has no other home, so nothing else is at home now.
                self.registry.kept.insert(session, kept);
                self.by_secret.insert(secret, session);
                self.at_home.insert((run, session));
                // The store must know of it, or nobody would ever end it.
                self.run_store(caller, Command::Attach, events);
                reply(caller, Outcome::Done, events);
            }
            ProposalBody::Attach { secret } => self.attach(run, caller, secret, events),
            ProposalBody::Identify { name, reference } => {
                if self.version() >= version::IDENTIFIED {
                    self.run_store(caller, Command::Identify { name, reference }, events);
                }
            }
            ProposalBody::Close { orderly, referenced } => {
                if let Some(kept) = self.registry.kept.get_mut(&session) {
                    kept.left |= epoch == 0;
                }
                // An ended session is remembered for what its first connection may have under way. Those that
                // attached later send nothing that could bring it back, so their ends say nothing about that.
                let is_first = epoch == 0 || self.version() < version::ENDED_FOR_GOOD;
                if !(is_first && self.registry.dead.remove(&session)) && is_own {
                    self.close(session, orderly, referenced, events);
                }
            }
            ProposalBody::Kick { session: ended } => self.end(caller, ended, true, events),
            ProposalBody::End { session: ended } => self.end(caller, ended, false, events),
            ProposalBody::Barrier => reply(caller, Outcome::Done, events),
            ProposalBody::Addresses(addresses) => {
                if self.registry_v2.addresses.get(&raft_id) != Some(&addresses) {
                    self.registry_v2.addresses.insert(raft_id, addresses);
                    events.push(Event::Members);
                }
            }
        }
    }

    /// Whether one more session that outlives its connection would be one too many.
    fn keeps_all_it_may(&self, session: SessionId) -> bool {
        let max = self.policy().map_or(0, |policy| policy.limits.sessions_max);
        let kept = &self.registry.kept;
        max > 0 && kept.len() as u64 >= max && !kept.contains_key(&session)
    }

    fn start_incarnation(&mut self, run: Incarnation, start: Start, events: &mut Vec<Event>) {
        let raft_id = run.raft_id();
        let Some(member) = self.registry.members.get_mut(&raft_id) else { return };
        if member.disk.is_some_and(|disk| disk != start.disk) {
            return;
        }
        let older = self.registry.incarnations.get(&raft_id).copied();
        if older.is_some_and(|older| older.run >= run) {
            return;
        }
        self.oldest = Some(self.oldest.map_or(start.version, |oldest| oldest.min(start.version)));
        if self.registry_v2.versions.insert(raft_id, start.version) != Some(start.version) {
            events.push(Event::Members);
        }
        let known = (member.disk, &member.client_addr, member.witness);
        if known != (Some(start.disk), &start.client_addr, start.witness) {
            member.disk = Some(start.disk);
            member.client_addr = start.client_addr;
            member.witness = start.witness;
            events.push(Event::Members);
        }
        if let Some(IncarnationState { run: older, live: true, .. }) = older {
            self.end_incarnation(older, events);
        }
        self.registry.incarnations.insert(raft_id, IncarnationState { run, seq: 1, live: true });
        events.push(Event::IncarnationStarted(run));
    }

    /// Ends what depended on an incarnation of a node: waits, enqueue records and subscriptions of its connections at
    /// once, their holds with their leases. Kept sessions are only detached.
    fn end_incarnation(&mut self, run: Incarnation, events: &mut Vec<Event>) {
        if let Some(state) = self.registry.incarnations.get_mut(&run.raft_id()) {
            state.live = false;
        }
        let detached = self.at_home.range((run, SessionId(0))..=(run, SessionId(u64::MAX)));
        let detached: Vec<_> = detached.map(|&(_, session)| session).collect();
        for &session in &detached {
            self.set_home(session, None);
        }
        for session in detached {
            self.detach(session, events);
        }
        let ids = run.session(0)..=run.session(u32::MAX);
        let store = self.store.as_ref();
        let sessions = store.map(|store| store.session_ids(ids.clone())).unwrap_or_default();
        for session in sessions {
            if !self.registry.kept.contains_key(&session) {
                let release = bug(Bug::LostNodeReleases);
                let command = match self.waits_for_client(session) {
                    Some(ttl) => Command::Orphan { ttl, cut: false },
                    None => Command::EndSession { release, forced: false },
                };
                self.run_store(of(session), command, events);
            }
        }
        let dead: Vec<_> = self.registry.dead.range(ids).copied().collect();
        for session in dead {
            self.registry.dead.remove(&session);
        }
        events.push(Event::IncarnationEnded(run));
    }

    /// A kept session is attached through an incarnation, or detached.
    fn set_home(&mut self, session: SessionId, home: Option<Incarnation>) {
        let Some(kept) = self.registry.kept.get_mut(&session) else { return };
        if let Some(left) = std::mem::replace(&mut kept.home, home) {
            self.at_home.remove(&(left, session));
        }
        self.at_home.extend(home.map(|run| (run, session)));
    }

    fn attach(
        &mut self,
        run: Incarnation,
        caller: Caller,
        secret: Bits128,
        events: &mut Vec<Event>,
    ) {
        let Caller { session: by, request, .. } = caller;
        let target = self.by_secret.get(&secret).copied();
        let to = target.and_then(|session| {
            self.set_home(session, Some(run));
            let kept = self.registry.kept.get_mut(&session)?;
            kept.epoch += 1;
            Some((session, kept.epoch))
        });
        if let Some((session, _)) = to {
            self.run_store(of(session), Command::Attach, events);
            // The connection's own session was only the way here.
            let command = Command::EndSession { release: true, forced: false };
            self.run_store(of(by), command, events);
        }
        events.push(Event::Attached { by, request, to });
    }

    fn close(
        &mut self,
        session: SessionId,
        orderly: bool,
        referenced: bool,
        events: &mut Vec<Event>,
    ) {
        let waits = self.waits_for_client(session).filter(|_| referenced);
        if self.registry.kept.contains_key(&session) {
            if let Some(ttl) = waits {
                self.run_store(of(session), Command::Orphan { ttl, cut: false }, events);
                return self.forget_kept(session);
            }
            self.set_home(session, None);
            self.detach(session, events);
            return;
        }
        let Some(policy) = &self.registry.policy else { return };
        let release = match policy.auto_release {
            AutoRelease::Any => true,
            AutoRelease::Clean => orderly,
            AutoRelease::Lease => false,
        };
        let ttl = policy.orphan_ttl;
        let is_kept = release && referenced && ttl > Span::ZERO;
        let command = if is_kept || waits.is_some() {
            Command::Orphan { ttl, cut: release }
        } else {
            Command::EndSession { release, forced: false }
        };
        self.run_store(of(session), command, events);
    }

    /// For how long the client of a session is waited for who has lost it; none if it is not.
    fn waits_for_client(&self, session: SessionId) -> Option<Span> {
        let ttl = self.policy()?.orphan_ttl;
        let has_reference = self.store.as_ref().is_some_and(|store| store.has_reference(session));
        (has_reference && ttl > Span::ZERO).then_some(ttl)
    }

    fn detach(&mut self, session: SessionId, events: &mut Vec<Event>) {
        let until = self.registry.now + KEPT_FOR;
        self.run_store(of(session), Command::Detach { until }, events);
    }

    /// Ends a session, for an operator (`forced`) or for its client.
    fn end(&mut self, caller: Caller, ended: SessionId, forced: bool, events: &mut Vec<Event>) {
        let known = self.store.as_ref().is_some_and(|store| store.has_session(ended));
        if known {
            let policy = self.registry.policy.as_ref().map(|policy| policy.auto_release);
            let release = forced || policy != Some(AutoRelease::Lease);
            self.run_store(of(ended), Command::EndSession { release, forced }, events);
            if self.registry.kept.contains_key(&ended) {
                self.forget_kept(ended);
            } else {
                self.registry.dead.insert(ended);
            }
            events.push(Event::Kicked { session: ended });
        }
        let outcome = if known { Outcome::Done } else { Outcome::Refused(Refusal::NotHeld) };
        reply(caller, outcome, events);
    }

    fn run_store(&mut self, caller: Caller, command: Command<'_>, events: &mut Vec<Event>) {
        let Some(store) = &mut self.store else { return };
        let mut ended = Vec::new();
        store.apply(caller, command, self.registry.now, &mut self.effects);
        for effect in self.effects.drain(..) {
            if let Effect::SessionEnded { session } = effect {
                ended.push(session);
            }
            events.push(Event::Effect(effect));
        }
        for session in ended {
            self.forget_kept(session);
        }
    }

    fn forget_kept(&mut self, session: SessionId) {
        let Some(kept) = self.registry.kept.remove(&session) else { return };
        self.by_secret.remove(&kept.secret);
        if let Some(run) = kept.home {
            self.at_home.remove(&(run, session));
        }
        let first_home = Incarnation::of(session);
        if !kept.left && self.run_of(first_home.raft_id()) == Some(first_home) {
            self.registry.dead.insert(session);
        }
    }
}

/// The form of a snapshot in a cluster of some version.
fn form(version: u32) -> u8 {
    let later = u8::try_from(version.saturating_sub(1)).expect("there are few versions");
    FIRST_FORM + later
}

/// Whether this program reads a snapshot, as far as its first byte tells.
pub(super) fn check_form(bytes: &[u8]) -> Result<(), String> {
    let known = form(version::newest());
    match bytes.first() {
        Some(&form) if form > known => Err(version::too_new(form, known.into())),
        Some(0) => Err("a snapshot of no form".into()),
        Some(_) | None => Ok(()),
    }
}

/// The caller of commands that nobody sent.
const NOBODY: Caller = of(SessionId(0));

/// The caller of a command about a session that answers no request.
const fn of(session: SessionId) -> Caller {
    Caller { session, request: RequestId(0), keep: false }
}

fn reply(caller: Caller, outcome: Outcome, events: &mut Vec<Event>) {
    let Caller { session, request, .. } = caller;
    events.push(Event::Effect(Effect::Reply { session, request, outcome }));
}

#[cfg(test)]
mod tests {
    use super::*;
    use dflockd_core::command;

    /// The version of the next entry, also in a cluster that is ahead of this program.
    fn written(machine: &Machine) -> u32 {
        machine.version().min(version::newest())
    }

    fn apply(machine: &mut Machine, stamp: u64, put: impl Fn(&mut Vec<u8>)) -> Vec<Event> {
        let mut payload = Vec::new();
        codec::begin_payload(&mut payload, written(machine), Timestamp(stamp));
        put(&mut payload);
        let mut events = Vec::new();
        machine.apply(&payload, &mut events).expect("it was just made");
        events
    }

    fn order(machine: &mut Machine, stamp: u64, order: &LeaderCommand) -> Vec<Event> {
        let version = written(machine);
        apply(machine, stamp, |payload| codec::put_leader_command(payload, version, order))
    }

    fn machine() -> Machine {
        let member = |node: &str| Member {
            node: node.into(),
            peer_addr: format!("{node}:7000"),
            client_addr: String::new(),
            witness: false,
            disk: None,
        };
        let mut machine = Machine::new([1; 16], [(1, member("a")), (2, member("b"))].into());
        let limits = Limits::default();
        let auto_release = AutoRelease::Clean;
        let policy = Box::new(Policy { limits, auto_release, orphan_ttl: Span::ZERO });
        order(&mut machine, 1, &LeaderCommand::Init { policy, seed: 1, fence: 100 });
        machine
    }

    fn again(machine: &Machine) -> Machine {
        Machine::restore(&machine.snapshot(), false).expect("it was just written")
    }

    fn start(machine: &mut Machine, stamp: u64, raft_id: RaftId, starts: u32, version: u32) {
        apply(machine, stamp, |payload| {
            let start = Start { disk: 5, client_addr: String::new(), version, witness: false };
            let body = ProposalBody::Start(start);
            let session = SessionId(0);
            let request = RequestId(0);
            let mut bytes = Vec::new();
            codec::put_item(
                &mut bytes,
                &Proposal { session, epoch: 0, request, keep: false, body },
            );
            let run = Incarnation::new(raft_id, starts);
            codec::Batch { run, first_seq: 1, count: 1, bytes: bytes.into() }.put(payload);
        });
    }

    /// Appends a batch of one item of an incarnation's `n`-th session.
    fn put_one(payload: &mut Vec<u8>, run: Incarnation, seq: u64, n: u32, body: ProposalBody<'_>) {
        let (session, request) = (run.session(n), RequestId(seq));
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, &Proposal { session, epoch: 0, request, keep: false, body });
        codec::Batch { run, first_seq: seq, count: 1, bytes: bytes.into() }.put(payload);
    }

    fn acquire(key: &[u8], wait: Span) -> ProposalBody<'_> {
        let mode = dflockd_core::Mode::Mutex;
        let lease = Some(Span::from_secs(600));
        let command = command::Acquire { key, mode, wait, lease, salt: 7 };
        ProposalBody::Command(command.into())
    }

    /// A client with a name and a reference, and two places of it: one of them a hold.
    fn identified() -> [ProposalBody<'static>; 3] {
        let wait = Span::from_secs(60);
        let identify = ProposalBody::Identify { name: b"worker", reference: b"the one" };
        [identify, acquire(b"k", wait), acquire(b"k", wait)]
    }

    /// GUARANTEES 42: all use a version from one place of the log on, and only if all read it there.
    #[test]
    fn a_version_is_used_when_all_read_it() {
        // Above what this program reads, because it would go unnoticed otherwise: so there is no snapshot of it here.
        let version = version::newest() + 1;
        let mut machine = machine();
        assert_eq!((machine.version(), machine.versions().len()), (1, 0));
        start(&mut machine, 2, 1, 1, version);
        assert_eq!(machine.versions(), &BTreeMap::from([(1, version)]));
        let raise = LeaderCommand::Version { version };
        assert_eq!(order(&mut machine, 3, &raise), [], "one has not said what it reads");
        start(&mut machine, 4, 2, 1, version - 1);
        assert_eq!(order(&mut machine, 5, &raise), [], "one does not read it");
        start(&mut machine, 6, 2, 2, version);
        start(&mut machine, 7, 1, 2, version - 1);
        assert_eq!(order(&mut machine, 8, &raise), [], "one went back to an older program");
        start(&mut machine, 9, 1, 3, version);
        assert_eq!((machine.version(), again(&machine).version()), (1, 1));
        assert_eq!(machine.snapshot()[0], FIRST_FORM);

        let events = order(&mut machine, 10, &raise);
        assert!(events.contains(&Event::PolicyChanged), "whoever knows less must stop");
        order(&mut machine, 10, &LeaderCommand::Version { version: version - 1 });
        assert_eq!(machine.version(), version, "it only grows");
        let snapshot = machine.snapshot();
        assert_eq!(snapshot[0], FIRST_FORM + 4);
        let why = Machine::restore(&snapshot, false).err().unwrap();
        assert!(why.contains("newer server") && why.contains("form 6"), "{why}");
    }

    /// GUARANTEES 42: version 1 knows nothing of the limits of version 2, whatever the leader's settings are; from
    /// version 2 on they are in the policy, in the store and in snapshots of both.
    #[test]
    fn the_limits_of_version_2_come_with_it() {
        let mut machine = machine();
        let limits_of = |machine: &Machine| {
            let store = machine.store().expect("it has begun").limits().clone();
            assert_eq!(
                store,
                machine.policy().expect("a store has a policy").limits,
                "both know the same"
            );
            store
        };
        assert_eq!(limits_of(&machine).v2(), LimitsV2::default(), "as the older program has it");
        assert!(!machine.lacks_limits(), "version 1 has no more");
        let wanted = Policy { limits: Limits::default(), ..machine.policy().cloned().unwrap() };
        order(&mut machine, 2, &LeaderCommand::Policy(Box::new(wanted.clone())));
        assert_eq!(limits_of(&machine).v2(), LimitsV2::default());
        assert_eq!(machine.snapshot()[0], FIRST_FORM);

        start(&mut machine, 3, 1, 1, 2);
        start(&mut machine, 4, 2, 1, 2);
        order(&mut machine, 5, &LeaderCommand::Version { version: 2 });
        assert!(machine.lacks_limits() && again(&machine).lacks_limits());
        assert_eq!(limits_of(&machine).v2(), LimitsV2::default(), "they come with the policy");
        order(&mut machine, 6, &LeaderCommand::Policy(Box::new(wanted.clone())));
        assert_eq!(limits_of(&machine), wanted.limits);
        let restored = again(&machine);
        assert_eq!(limits_of(&restored), wanted.limits);
        assert!(!machine.lacks_limits() && !restored.lacks_limits());
        assert!(restored.snapshot() == machine.snapshot());
    }

    /// GUARANTEES 42: the snapshots of each version, byte by byte; all of them are read.
    #[test]
    fn golden_snapshots() {
        let golden = include_str!("../tests/golden/snapshots.txt");
        let mut machine = machine();
        // Not the defaults, which may change.
        let limits = Limits {
            locks_max: 9,
            default_lease: Span(33),
            subscriptions_max: 5,
            rules: 2,
            lease_max: Span(15),
            holds_per_session_max: 16,
            waits_per_session_max: 17,
            sessions_max: 18,
            subscription_bytes_max: 19,
            subscriptions_total_max: 20,
            subscription_bytes_total_max: 21,
            pattern_tokens_max: 22,
            ..Limits::default()
        };
        let (auto_release, orphan_ttl) = (AutoRelease::Any, Span(300));
        let policy = || Box::new(Policy { limits: limits.clone(), auto_release, orphan_ttl });
        order(&mut machine, 2, &LeaderCommand::Policy(policy()));
        start(&mut machine, 3, 1, 1, 2);
        start(&mut machine, 4, 2, 1, 2);
        let mut states = vec![("v1", machine.snapshot())];
        order(&mut machine, 5, &LeaderCommand::Version { version: 2 });
        states.push(("v2-before-its-limits", machine.snapshot()));
        order(&mut machine, 6, &LeaderCommand::Policy(policy()));
        states.push(("v2", machine.snapshot()));
        start(&mut machine, 7, 1, 2, 3);
        start(&mut machine, 8, 2, 2, 3);
        order(&mut machine, 9, &LeaderCommand::Version { version: 3 });
        states.push(("v3-before-its-name", machine.snapshot()));
        order(&mut machine, 10, &LeaderCommand::ClusterId { id: [0xcd; 16] });
        states.push(("v3", machine.snapshot()));
        start(&mut machine, 11, 1, 3, 4);
        start(&mut machine, 12, 2, 3, 4);
        order(&mut machine, 13, &LeaderCommand::Version { version: 4 });
        states.push(("v4-without-clients", machine.snapshot()));
        for (stamp, body) in (14..).zip(identified()) {
            let seq = stamp - 12;
            apply(&mut machine, stamp, |payload| {
                put_one(payload, Incarnation::new(1, 3), seq, 1, body.clone());
            });
        }
        states.push(("v4", machine.snapshot()));
        apply(&mut machine, 17, |payload| {
            let close = ProposalBody::Close { orderly: true, referenced: true };
            put_one(payload, Incarnation::new(1, 3), 5, 1, close);
        });
        states.push(("v4-orphans", machine.snapshot()));
        let mut other = String::new();
        for (name, state) in states {
            let digits: String = state.iter().map(|byte| format!("{byte:02x}")).collect();
            let line = format!("{name}: {digits}");
            if !golden.lines().any(|known| known == line) {
                other = format!("{other}{line}\n");
            }
            let restored = Machine::restore(&state, false).expect("it is one");
            assert!(restored.snapshot() == state, "{name} is written as it was read");
        }
        assert!(other.is_empty(), "other forms than in the file:\n{other}");
    }

    /// A cluster that no older program was ever a member of goes to the newest version that all its members read;
    /// every other one waits for its operator.
    #[test]
    fn only_a_new_cluster_raises_its_version_by_itself() {
        let mut new = machine();
        assert_eq!(new.first_version(), None);
        start(&mut new, 2, 1, 1, 2);
        assert_eq!(new.first_version(), None, "one has not said what it reads");
        start(&mut new, 3, 1, 2, 2);
        start(&mut new, 4, 2, 1, 2);
        assert_eq!(new.first_version(), Some(2), "that one was started twice is no upgrade");
        assert_eq!(again(&new).first_version(), None, "who has only a snapshot can not know");
        order(&mut new, 5, &LeaderCommand::Version { version: 2 });
        assert_eq!(new.first_version(), None, "it has one now");

        let mut upgraded = machine();
        start(&mut upgraded, 2, 1, 1, 1);
        start(&mut upgraded, 3, 2, 1, 2);
        assert_eq!(upgraded.first_version(), None);
        start(&mut upgraded, 4, 1, 2, 2);
        assert_eq!(upgraded.first_version(), None, "it was an older program");
        let mut later = machine();
        start(&mut later, 2, 1, 1, 2);
        start(&mut later, 3, 2, 1, 3);
        assert_eq!(later.first_version(), Some(2));
        start(&mut later, 4, 1, 2, 3);
        assert_eq!(later.first_version(), None, "one could go back to 2");
    }

    /// GUARANTEES 41: two clusters that began with the same members have different names.
    #[test]
    fn a_cluster_takes_a_name_of_its_own_once() {
        let name = |id| LeaderCommand::ClusterId { id: [id; 16] };
        let mut machine = machine();
        start(&mut machine, 2, 1, 1, 3);
        start(&mut machine, 3, 2, 1, 3);
        assert!(!machine.lacks_name(), "version 1 has no names");
        assert_eq!(order(&mut machine, 4, &name(9)), []);
        order(&mut machine, 5, &LeaderCommand::Version { version: 3 });
        assert!(machine.lacks_name() && again(&machine).lacks_name());

        // A member that nobody could know by its data directory would be locked out.
        let member = Member { node: "c".into(), disk: None, ..machine.members()[&2].clone() };
        machine.apply_change(MemberChange::Add { raft_id: 3, member }, &mut Vec::new());
        assert!(!machine.lacks_name());
        assert_eq!(order(&mut machine, 6, &name(9)), []);
        assert_eq!((machine.cluster(), machine.formed_as()), ([1; 16], None));
        start(&mut machine, 7, 3, 1, 3);

        assert_eq!(order(&mut machine, 8, &name(9)), [Event::Members]);
        assert_eq!(order(&mut machine, 9, &name(10)), [], "once");
        for mut machine in [again(&machine), machine] {
            assert_eq!((machine.cluster(), machine.formed_as()), ([9; 16], Some([1; 16])));
            assert!(!machine.lacks_name());
            let member = machine.members()[&2].clone();
            machine.begin_anew([2; 16], 2, member, 5000, (Span::ZERO, None));
            assert_eq!((machine.cluster(), machine.formed_as()), ([2; 16], Some([2; 16])));
        }
    }

    #[test]
    fn an_address_changes() {
        let mut machine = machine();
        let change = LeaderCommand::Address { raft_id: 2, peer_addr: "c:9".into() };
        assert!(order(&mut machine, 2, &change).contains(&Event::Members));
        order(&mut machine, 3, &LeaderCommand::Address { raft_id: 9, peer_addr: "d:9".into() });
        let machine = again(&machine);
        assert_eq!(machine.members()[&2].peer_addr, "c:9");
        assert_eq!(machine.members()[&1].peer_addr, "a:7000");
    }

    /// GUARANTEES R5: a new cluster goes on with higher fences, and knows nobody of the old one.
    #[test]
    fn another_cluster_begins_with_the_state() {
        let mut machine = machine();
        let member = Member { node: "b".into(), ..machine.members()[&2].clone() };
        machine.begin_anew([2; 16], 2, member, 5000, (Span::from_secs(9), None));
        let machine = again(&machine);
        assert_eq!((machine.cluster(), machine.fence_next()), ([2; 16], 5000));
        assert_eq!(machine.members().keys().collect::<Vec<_>>(), [&2]);
        assert!(machine.was_removed(1) && machine.run_of(1).is_none());
        assert!(machine.next_deadline().is_some(), "grants begin later");
        assert_eq!(machine.next_raft_id(), 3);
    }

    /// GUARANTEES R8: whoever ends a session has not lost a connection. All it has goes, whatever the policy says about
    /// the end of connections.
    #[test]
    fn a_session_that_is_ended_releases_all() {
        let mut machine = machine();
        let policy = machine.policy().cloned().expect("it has begun");
        let policy = Box::new(Policy { auto_release: AutoRelease::Lease, ..policy });
        order(&mut machine, 2, &LeaderCommand::Policy(policy));
        start(&mut machine, 3, 1, 1, 1);
        let run = Incarnation::new(1, 1);
        let mut seq = 1;
        let mut send = |session, body| {
            seq += 1;
            let item = Proposal { session, epoch: 0, request: RequestId(seq), keep: false, body };
            apply(&mut machine, 3 + seq, |payload| {
                let mut bytes = Vec::new();
                codec::put_item(&mut bytes, &item);
                codec::Batch { run, first_seq: seq, count: 1, bytes: bytes.into() }.put(payload);
            })
        };
        let acquire = |key, seconds| acquire(key, Span::from_secs(seconds));
        let granted = |events: &[Event], to| {
            let is_grant = |event: &Event| {
                matches!(event, Event::Effect(Effect::Reply { session, outcome: Outcome::Granted(_), .. })
                    if *session == to)
            };
            events.iter().any(is_grant)
        };
        let [ended, other, line] = [1, 2, 3].map(|number| run.session(number));
        send(ended, ProposalBody::Keep { secret: [3; 16] });
        assert!(granted(&send(ended, acquire(b"mine", 0)), ended));
        assert!(granted(&send(other, acquire(b"theirs", 0)), other));
        assert!(!granted(&send(ended, acquire(b"theirs", 600)), ended), "it waits");
        assert!(!granted(&send(other, acquire(b"mine", 600)), other), "it waits");
        let events = send(other, ProposalBody::Kick { session: ended });
        assert!(granted(&events, other), "the lock is free: {events:?}");
        assert!(events.contains(&Event::Kicked { session: ended }));
        let events = send(other, ProposalBody::End { session: ended });
        let refused = Outcome::Refused(Refusal::NotHeld);
        let is_refused = |event: &Event| {
            let Event::Effect(Effect::Reply { outcome, .. }) = event else { return false };
            *outcome == refused
        };
        assert!(events.iter().any(is_refused), "it has ended already: {events:?}");
        // The end of a connection is another thing.
        assert!(granted(&send(line, acquire(b"line", 0)), line));
        send(line, ProposalBody::Close { orderly: true, referenced: false });
        assert!(!granted(&send(other, acquire(b"line", 0)), other), "it stays");
        let store = machine.store().expect("it has begun");
        assert!(store.session_ids(ended..=ended).is_empty(), "its waits have ended");
        for session in [ended, other, line, run.session(9)] {
            let is_listed = !store.session_ids(session..=session).is_empty();
            assert_eq!(store.has_session(session), is_listed, "{session:?}");
        }
    }

    /// A cluster of two members of this version, whose incarnations have begun, with so long an orphan TTL.
    fn two_runs(version: u32, orphan_ttl: Span) -> (Machine, [Incarnation; 2]) {
        let mut machine = machine();
        start(&mut machine, 2, 1, 1, version);
        start(&mut machine, 3, 2, 1, version);
        order(&mut machine, 4, &LeaderCommand::Version { version });
        let policy = machine.policy().cloned().expect("it has begun");
        let limits = Limits::default();
        order(
            &mut machine,
            5,
            &LeaderCommand::Policy(Box::new(Policy { limits, orphan_ttl, ..policy })),
        );
        (machine, [1, 2].map(|raft_id| Incarnation::new(raft_id, 1)))
    }

    /// The token that a session was given, if it was.
    fn token_of(events: &[Event], to: SessionId) -> Option<dflockd_core::Token> {
        events.iter().find_map(|event| {
            let Event::Effect(Effect::Reply { session, outcome, .. }) = event else { return None };
            let Outcome::Granted(grant) = outcome else { return None };
            (*session == to).then_some(grant.token)
        })
    }

    const ME: ProposalBody<'static> = ProposalBody::Identify { name: b"worker", reference: b"me" };

    /// GUARANTEES 17, 36: what a client has left behind with its node comes back through another node, on a member that
    /// has only a snapshot, too.
    #[test]
    fn a_client_comes_back_through_another_node() {
        let (mut machine, [lost, other]) = two_runs(4, Span::from_secs(30));
        let mut seqs = [1, 1];
        let mut stamp = 10;
        let mut send = |machine: &mut Machine, run: Incarnation, n, body: ProposalBody<'_>| {
            let seq = &mut seqs[usize::try_from(run.raft_id()).expect("small") - 1];
            *seq += 1;
            stamp += 1;
            apply(machine, stamp, |payload| put_one(payload, run, *seq, n, body.clone()))
        };
        let wait = Span::from_secs(60);
        send(&mut machine, lost, 1, ME);
        let held = send(&mut machine, lost, 1, acquire(b"held", Span::ZERO));
        let token = token_of(&held, lost.session(1)).expect("it is free");
        let first = send(&mut machine, other, 1, acquire(b"wanted", Span::ZERO));
        let first = token_of(&first, other.session(1)).expect("it is free");
        send(&mut machine, lost, 1, acquire(b"wanted", wait));
        send(&mut machine, other, 2, acquire(b"wanted", wait));
        // While its node lives, the session does: another one of the same client waits like anybody else.
        send(&mut machine, other, 3, ME);
        let early = send(&mut machine, other, 3, acquire(b"held", Span::ZERO));
        assert_eq!(token_of(&early, other.session(3)), None);

        order(&mut machine, 100, &LeaderCommand::NodeLost { run: lost });
        let mut machine = again(&machine);
        stamp = 100;
        let mut send = |machine: &mut Machine, n, body: ProposalBody<'_>| {
            seqs[1] += 1;
            stamp += 1;
            apply(machine, stamp, |payload| put_one(payload, other, seqs[1], n, body.clone()))
        };
        let back = send(&mut machine, 3, acquire(b"held", Span::ZERO));
        assert_eq!(token_of(&back, other.session(3)), Some(token));
        send(&mut machine, 3, acquire(b"wanted", wait));
        let (key, space) = (b"wanted", dflockd_core::Space::Locks);
        let release = command::Release { key, space, token: first, resign: false };
        let freed = send(&mut machine, 1, ProposalBody::Command(release.into()));
        assert!(token_of(&freed, other.session(3)).is_some(), "its place was the first: {freed:?}");
        assert_eq!(token_of(&freed, other.session(2)), None);
        assert!(again(&machine).snapshot() == machine.snapshot());
    }

    /// GUARANTEES 42: before version 4, and without an orphan TTL, nobody is waited for.
    #[test]
    fn a_reference_means_nothing_before_its_version() {
        for (version, ttl) in [(3, Span::from_secs(30)), (4, Span::ZERO)] {
            let (mut machine, [lost, other]) = two_runs(version, ttl);
            let mut send = |stamp, run, seq, n, body: ProposalBody<'_>| {
                apply(&mut machine, stamp, |payload| put_one(payload, run, seq, n, body.clone()))
            };
            send(10, lost, 2, 1, ME);
            assert!(
                token_of(&send(11, lost, 3, 1, acquire(b"k", Span::ZERO)), lost.session(1))
                    .is_some()
            );
            send(12, lost, 4, 1, acquire(b"k", Span::from_secs(60)));
            order(&mut machine, 13, &LeaderCommand::NodeLost { run: lost });
            let store = machine.store().expect("it has begun");
            assert_eq!(
                store.view_locks(b"k", Default::default(), machine.now(), 9)[0].waiters_total,
                0
            );
            let mut send = |stamp, seq, body: ProposalBody<'_>| {
                apply(&mut machine, stamp, |payload| put_one(payload, other, seq, 1, body.clone()))
            };
            send(14, 2, ME);
            let asked = send(15, 3, acquire(b"k", Span::ZERO));
            assert_eq!(token_of(&asked, other.session(1)), None, "version {version}");
        }
    }

    /// A kept session whose client was silent for too long ends, and what it has waits for the reference; any other end
    /// of its connection only detaches it.
    #[test]
    fn a_kept_session_with_a_reference_is_given_up_for_it() {
        let (mut machine, [run, _]) = two_runs(4, Span::from_secs(30));
        let mut seq = 1;
        let mut send = |n, body: ProposalBody<'_>| {
            seq += 1;
            apply(&mut machine, 10 + seq, |payload| put_one(payload, run, seq, n, body.clone()))
        };
        let mut tokens = Vec::new();
        for (n, key) in [(1, b"a"), (2, b"b")] {
            send(n, ME);
            send(n, ProposalBody::Keep { secret: [u8::try_from(n).expect("small"); 16] });
            tokens.push(token_of(&send(n, acquire(key, Span::ZERO)), run.session(n)));
            send(n, ProposalBody::Close { orderly: false, referenced: n == 1 });
        }
        send(3, ME);
        let [a, b] =
            [b"a", b"b"].map(|key| token_of(&send(3, acquire(key, Span::ZERO)), run.session(3)));
        assert_eq!((a, b), (tokens[0], None));
        assert!(!machine.is_kept(run.session(1)) && machine.is_kept(run.session(2)));
    }

    /// Exactly once stands on this: a leader takes the next number of an incarnation, and nothing of one that is over.
    #[test]
    fn the_last_number_of_a_run_is_known_while_it_counts() {
        let mut machine = machine();
        let run = |starts| Incarnation::new(2, starts);
        assert_eq!(machine.applied_seq(run(5)), Some(0), "nothing was heard of it");
        start(&mut machine, 2, 2, 5, 1);
        assert_eq!(machine.applied_seq(run(5)), Some(1), "its start");
        assert_eq!(machine.applied_seq(run(6)), Some(0), "the next one has not begun");
        assert_eq!(machine.applied_seq(run(4)), None, "it is over");
        assert_eq!(machine.applied_seq(Incarnation::new(1, 5)), Some(0), "of another member");
        order(&mut machine, 3, &LeaderCommand::NodeLost { run: run(4) });
        assert_eq!(machine.applied_seq(run(5)), Some(1), "another run was lost");
        order(&mut machine, 4, &LeaderCommand::NodeLost { run: run(5) });
        assert_eq!(machine.applied_seq(run(5)), None, "it was given up");
        assert_eq!(machine.applied_seq(run(6)), Some(0), "the node may come back");
        assert_eq!((machine.run_of(2), machine.newest_run(2)), (None, Some(run(5))));
    }

    #[test]
    fn snapshots_that_are_none_are_refused() {
        let mut machine = machine();
        for stamp in [2, 3] {
            start(&mut machine, stamp, stamp - 1, 1, 2);
        }
        order(&mut machine, 4, &LeaderCommand::Version { version: 2 });
        let whole = machine.snapshot();
        for end in 0..whole.len() {
            assert!(Machine::restore(&whole[..end], false).is_err(), "{end} bytes of it");
        }
        let newer = [&[form(version::newest()) + 1], &whole[1..]].concat();
        let why = Machine::restore(&newer, false).err().expect("too new");
        assert!(why.contains("newer server"), "{why}");
        assert!(Machine::restore(&[&[0], &whole[1..]].concat(), false).is_err(), "no form");
        // The first form had only the registry and the store.
        let mut oldest = postcard::to_extend(&machine.registry, vec![1]).expect("memory");
        oldest.push(0);
        let restored = Machine::restore(&oldest, false).expect("it is one");
        assert_eq!((restored.version(), restored.versions().len()), (1, 0));
        assert_eq!(restored.members(), machine.members());
        oldest.push(0);
        assert!(Machine::restore(&oldest, false).is_err(), "something behind its end");
    }

    /// What comes twice is skipped, and nothing is applied whose predecessor is missing or whose incarnation is over.
    #[test]
    fn each_number_is_taken_once_and_in_order() {
        let mut machine = machine();
        start(&mut machine, 2, 1, 1, 1);
        let mut stamp = 2;
        let mut add = |machine: &mut Machine, run: Incarnation, seq| {
            let session = run.session(1);
            let command = command::Add { key: b"key", delta: 1, decrement: false };
            let (request, body) = (RequestId(seq), ProposalBody::Command(command.into()));
            let mut bytes = Vec::new();
            codec::put_item(
                &mut bytes,
                &Proposal { session, epoch: 0, request, keep: false, body },
            );
            stamp += 1;
            let batch = codec::Batch { run, first_seq: seq, count: 1, bytes: bytes.into() };
            apply(machine, stamp, |payload| batch.put(payload));
            let query = dflockd_core::Query::Counter { key: b"key" };
            machine.store().expect("it has begun").read(query, machine.now())
        };
        let run = Incarnation::new(1, 1);
        assert_eq!(add(&mut machine, run, 2), Outcome::Number(1));
        assert_eq!(add(&mut machine, run, 2), Outcome::Number(1), "it comes twice");
        assert_eq!(add(&mut machine, run, 4), Outcome::Number(1), "one is missing");
        assert_eq!(add(&mut machine, Incarnation::new(1, 2), 3), Outcome::Number(1), "not begun");
        assert_eq!(add(&mut machine, run, 3), Outcome::Number(2));
        assert_eq!(machine.applied_seq(run), Some(3));
        order(&mut machine, 8, &LeaderCommand::NodeLost { run });
        assert_eq!(add(&mut machine, run, 4), Outcome::Number(2), "it was given up");
    }

    /// GUARANTEES 33: a witness votes and follows the members, and keeps nothing of clients.
    #[test]
    fn a_witness_keeps_no_store() {
        let bytes = machine().snapshot();
        let witness = Machine::restore(&bytes, true).expect("it was just written");
        assert!(witness.store().is_none() && witness.policy().is_some());
        assert_eq!(witness.members().len(), 2);
        assert!(Machine::restore(&bytes, false).is_ok_and(|machine| machine.store().is_some()));
    }

    #[test]
    fn time_is_shown_between_entries() {
        let mut machine = machine();
        assert_eq!((machine.now(), machine.shown()), (Timestamp(1), Timestamp(1)));
        machine.show(Timestamp(50));
        assert_eq!((machine.now(), machine.shown()), (Timestamp(1), Timestamp(50)));
        order(&mut machine, 80, &LeaderCommand::Tick);
        assert_eq!(machine.shown(), Timestamp(80), "never behind an entry");
    }

    #[test]
    fn who_was_removed_does_not_come_back() {
        let mut machine = machine();
        assert!(!machine.is_retired("b") && !machine.was_removed(2));
        machine.apply_change(MemberChange::Remove { raft_id: 2 }, &mut Vec::new());
        for machine in [again(&machine), machine] {
            assert!(machine.is_retired("b") && machine.was_removed(2));
            assert!(!machine.is_retired("a") && !machine.was_removed(1) && !machine.was_removed(3));
            assert_eq!(machine.next_raft_id(), 3, "a number is not used again");
        }
    }

    /// A node that has just begun a cluster of its own takes clients when its version, its limits and its name stand.
    #[test]
    fn a_single_node_settles_once() {
        let alone = || {
            let member = machine().members()[&1].clone();
            Machine::new([1; 16], [(1, member)].into())
        };
        let policy = machine().policy().cloned().expect("it has begun");
        let whole = Box::new(Policy { limits: Limits::default(), ..policy.clone() });
        let init = LeaderCommand::Init { policy: Box::new(policy), seed: 1, fence: 100 };
        let raise = LeaderCommand::Version { version: 4 };
        let mut new = alone();
        order(&mut new, 1, &init);
        assert!(!new.is_settling(), "nobody has said what it reads");
        start(&mut new, 2, 1, 1, 4);
        assert!(new.is_settling(), "it has no version yet");
        assert!(!again(&new).is_settling(), "after a start it has been what it is for long");
        order(&mut new, 3, &raise);
        assert!(new.is_settling() && new.lacks_limits());
        order(&mut new, 4, &LeaderCommand::Policy(whole));
        assert!(new.is_settling() && !new.lacks_limits() && new.lacks_name());
        order(&mut new, 5, &LeaderCommand::ClusterId { id: [9; 16] });
        assert!(!new.is_settling());

        let mut upgraded = alone();
        order(&mut upgraded, 1, &init);
        start(&mut upgraded, 2, 1, 1, 1);
        start(&mut upgraded, 3, 1, 2, 4);
        assert!(!upgraded.is_settling(), "it waits for its operator");
        order(&mut upgraded, 4, &raise);
        assert!(upgraded.lacks_limits() && !upgraded.is_settling(), "it has served before");

        let mut two = machine();
        start(&mut two, 2, 1, 1, 4);
        start(&mut two, 3, 2, 1, 4);
        assert!(two.first_version().is_some() && !two.is_settling(), "it is not alone");
    }

    /// What a run sends for a session that is not its own, or is not its own any more, does nothing.
    #[test]
    fn a_run_speaks_for_its_own_sessions() {
        let (mut machine, [run, other]) = two_runs(4, Span::ZERO);
        let mut seq = 1;
        let mut send = |session, epoch, body| {
            seq += 1;
            let request = RequestId(seq);
            let item = Proposal { session, epoch, request, keep: false, body };
            let events = apply(&mut machine, 10 + seq, |payload| {
                let mut bytes = Vec::new();
                codec::put_item(&mut bytes, &item);
                codec::Batch { run, first_seq: seq, count: 1, bytes: bytes.into() }.put(payload);
            });
            events.contains(&Event::Gone { session, epoch, request })
        };
        let [kept, by] = [1, 2].map(|n| run.session(n));
        let add =
            || ProposalBody::Command(command::Add { key: b"n", delta: 1, decrement: false }.into());
        assert!(!send(kept, 0, add()));
        assert!(send(other.session(1), 0, add()), "of another run");
        assert!(send(kept, 1, add()), "it was never attached to");
        assert!(!send(kept, 0, ProposalBody::Keep { secret: [3; 16] }));
        assert!(!send(by, 0, ProposalBody::Attach { secret: [3; 16] }));
        assert!(send(kept, 0, add()), "another connection has it now");
        assert!(!send(kept, 1, add()));
        let query = dflockd_core::Query::Counter { key: b"n" };
        let read = machine.store().expect("it has begun").read(query, machine.now());
        assert_eq!(read, Outcome::Number(2));
    }

    /// A session that was ended is remembered until its connection is closed or its run is over, and no longer.
    #[test]
    fn ended_sessions_are_remembered_while_they_could_come_back() {
        let (mut machine, runs) = two_runs(4, Span::ZERO);
        let mut seqs = [1, 1];
        let mut stamp = 10;
        let mut send = |machine: &mut Machine, at: usize, n, body: ProposalBody<'_>| {
            seqs[at] += 1;
            stamp += 1;
            apply(machine, stamp, |payload| put_one(payload, runs[at], seqs[at], n, body.clone()));
            machine.registry.dead.iter().copied().collect::<Vec<_>>()
        };
        let close = || ProposalBody::Close { orderly: false, referenced: false };
        let keep = |n| ProposalBody::Keep { secret: [n; 16] };
        let end = |session| ProposalBody::End { session };
        let [a, b] = runs.map(|run| run.session(1));
        send(&mut machine, 0, 1, keep(1));
        assert_eq!(send(&mut machine, 0, 9, end(a)), [a], "its connection is still there");
        assert_eq!(send(&mut machine, 0, 1, close()), []);
        // Of a kept session whose first connection has left nothing more can come.
        let left = runs[0].session(2);
        send(&mut machine, 0, 2, keep(2));
        send(&mut machine, 0, 2, close());
        assert_eq!(send(&mut machine, 0, 9, end(left)), []);

        let late = runs[0].session(3);
        send(&mut machine, 0, 3, keep(3));
        assert_eq!(send(&mut machine, 0, 9, end(late)), [late]);
        send(&mut machine, 1, 1, keep(4));
        assert_eq!(send(&mut machine, 1, 9, end(b)), [late, b]);
        order(&mut machine, 100, &LeaderCommand::NodeLost { run: runs[0] });
        assert_eq!(machine.registry.dead, BTreeSet::from([b]), "the other run goes on");
    }

    /// GUARANTEES 18, 19: what the first connection of a kept session has under way comes to nothing when the session
    /// was ended meanwhile, although a connection that had attached to it has closed since. Programs before version 4
    /// forgot the session then.
    #[test]
    fn an_ended_session_stays_ended_when_a_later_connection_closes() {
        for version in [3, 4] {
            let (mut machine, runs) = two_runs(version, Span::ZERO);
            let [kept, by] = runs.map(|run| run.session(1));
            let mut seqs = [1, 1];
            let mut stamp = 10;
            let mut send = |machine: &mut Machine, at: usize, session, epoch, body| {
                seqs[at] += 1;
                stamp += 1;
                let request = RequestId(seqs[at]);
                let item = Proposal { session, epoch, request, keep: true, body };
                let events = apply(machine, stamp, |payload| {
                    let mut bytes = Vec::new();
                    codec::put_item(&mut bytes, &item);
                    let (run, first_seq) = (runs[at], seqs[at]);
                    codec::Batch { run, first_seq, count: 1, bytes: bytes.into() }.put(payload);
                });
                events.contains(&Event::Gone { session, epoch, request })
            };
            let close = || ProposalBody::Close { orderly: false, referenced: false };
            let add = || {
                ProposalBody::Command(command::Add { key: b"n", delta: 1, decrement: false }.into())
            };
            send(&mut machine, 0, kept, 0, ProposalBody::Keep { secret: [3; 16] });
            send(&mut machine, 1, by, 0, ProposalBody::Attach { secret: [3; 16] });
            assert!(!send(&mut machine, 1, kept, 1, add()), "it is attached there");
            send(&mut machine, 1, runs[1].session(2), 0, ProposalBody::Kick { session: kept });
            send(&mut machine, 1, kept, 1, close());
            let mut machine = again(&machine);
            let remembers = version >= version::ENDED_FOR_GOOD;
            assert_eq!(machine.registry.dead.contains(&kept), remembers);
            assert_eq!(send(&mut machine, 0, kept, 0, add()), remembers, "it was under way");
            send(&mut machine, 0, kept, 0, close());
            assert!(machine.registry.dead.is_empty(), "nothing more can come");
            let query = dflockd_core::Query::Counter { key: b"n" };
            let read = machine.store().expect("it has begun").read(query, machine.now());
            assert_eq!(read, Outcome::Number(if remembers { 1 } else { 2 }));
        }
    }

    /// The end of a run detaches the kept sessions that were attached there, and no others.
    #[test]
    fn the_end_of_a_run_detaches_its_own_sessions() {
        let (mut machine, runs) = two_runs(4, Span::ZERO);
        for (stamp, run) in (10..).zip(runs) {
            let secret = [u8::try_from(stamp).expect("small"); 16];
            let keep = ProposalBody::Keep { secret };
            apply(&mut machine, stamp, |payload| put_one(payload, run, 2, 1, keep.clone()));
        }
        order(&mut machine, 12, &LeaderCommand::NodeLost { run: runs[0] });
        let [lost, other] = runs.map(|run| run.session(1));
        assert_eq!((machine.home(lost), machine.home(other)), (None, Some(runs[1])));
        let epochs = (machine.detached_epoch(lost), machine.detached_epoch(other));
        assert_eq!(epochs, (Some(0), None));
    }

    /// The end of a run ends what a walk over all sessions would find to be the run's, and looks at no others: the
    /// indexes have a row for each session of the run, and the rows of the other runs stay as they are.
    #[test]
    fn the_end_of_a_run_looks_at_its_own_sessions() {
        let (mut machine, _) = two_runs(4, Span::ZERO);
        let third = Member { node: "c".into(), ..machine.members()[&1].clone() };
        let third = Member { disk: None, ..third };
        machine.apply_change(MemberChange::Add { raft_id: 3, member: third }, &mut Vec::new());
        start(&mut machine, 6, 3, 1, 4);
        let runs = [1, 2, 3].map(|raft_id| Incarnation::new(raft_id, 1));
        let mut seqs = [1; 3];
        let mut stamp = 10;
        let mut send = |machine: &mut Machine, at: usize, n, body: ProposalBody<'_>| {
            seqs[at] += 1;
            stamp += 1;
            apply(machine, stamp, |payload| put_one(payload, runs[at], seqs[at], n, body.clone()));
        };
        let secret = |at: usize, n: u8| [u8::try_from(at).expect("small") * 16 + n; 16];
        for (at, run) in runs.into_iter().enumerate() {
            // Two that are kept, two that are not, and one that was ended while it had a connection.
            for n in 1..=2 {
                send(&mut machine, at, n.into(), ProposalBody::Keep { secret: secret(at, n) });
            }
            for n in 3..=5 {
                let key = [u8::try_from(at).expect("small"), n];
                send(&mut machine, at, n.into(), acquire(&key, Span::ZERO));
            }
            let ended = run.session(5);
            send(&mut machine, at, 6, ProposalBody::Kick { session: ended });
        }
        // One that began at the first node has moved to the second, and one has closed there.
        send(&mut machine, 1, 7, ProposalBody::Attach { secret: secret(0, 1) });
        let close = ProposalBody::Close { orderly: false, referenced: false };
        send(&mut machine, 1, 2, close);

        let at_home = |machine: &Machine, run| -> Vec<_> {
            let mut found = Vec::new();
            for (&session, kept) in &machine.registry.kept {
                found.extend((kept.home == Some(run)).then_some(session));
            }
            let range = (run, SessionId(0))..=(run, SessionId(u64::MAX));
            assert!(machine.at_home.range(range).map(|row| &row.1).eq(&found), "{run:?}");
            found
        };
        let numbered = |machine: &Machine, run: Incarnation| {
            let store = machine.store().expect("it has begun");
            let all = store.session_ids(SessionId(0)..=SessionId(u64::MAX));
            let mut own = all.clone();
            own.retain(|&session| Incarnation::of(session) == run);
            assert_eq!(store.session_ids(run.session(0)..=run.session(u32::MAX)), own);
            own
        };
        let of =
            |at: usize, ns: &[u32]| -> Vec<_> { ns.iter().map(|&n| runs[at].session(n)).collect() };
        let moved = runs[0].session(1);
        assert_eq!(at_home(&machine, runs[0]), of(0, &[2]));
        assert_eq!(at_home(&machine, runs[1]), [moved, runs[1].session(1)]);
        assert_eq!(at_home(&machine, runs[2]), of(2, &[1, 2]));
        assert_eq!(
            machine.registry.dead,
            [of(0, &[5]), of(1, &[5]), of(2, &[5])].concat().into_iter().collect()
        );
        let mut restored = again(&machine);

        for machine in [&mut machine, &mut restored] {
            let events = order(machine, 100, &LeaderCommand::NodeLost { run: runs[1] });
            assert_eq!(events.last(), Some(&Event::IncarnationEnded(runs[1])));
            let detached: Vec<_> = machine
                .registry
                .kept
                .keys()
                .copied()
                .filter(|&id| machine.home(id).is_none())
                .collect();
            assert_eq!(detached, [moved, runs[1].session(1), runs[1].session(2)]);
            assert_eq!(
                (at_home(machine, runs[0]), at_home(machine, runs[1])),
                (of(0, &[2]), vec![])
            );
            assert_eq!(at_home(machine, runs[2]), of(2, &[1, 2]));
            // What is kept stays in the store, and so do the sessions of the others.
            assert_eq!(numbered(machine, runs[0]), of(0, &[1, 2, 3, 4]));
            assert_eq!(numbered(machine, runs[1]), of(1, &[1, 2]));
            assert_eq!(numbered(machine, runs[2]), of(2, &[1, 2, 3, 4]));
            let dead: Vec<_> = machine.registry.dead.iter().copied().collect();
            assert_eq!(dead, [runs[0].session(5), runs[2].session(5)]);
        }
        assert_eq!(machine.snapshot(), restored.snapshot());
    }

    /// GUARANTEES 48: kept sessions have a bound; one that is kept already may say so again.
    #[test]
    fn kept_sessions_have_a_bound() {
        let (mut machine, [run, _]) = two_runs(4, Span::ZERO);
        let keep = |machine: &mut Machine, seq, n, secret| {
            let body = ProposalBody::Keep { secret: [secret; 16] };
            let events =
                apply(machine, 10 + seq, |payload| put_one(payload, run, seq, n, body.clone()));
            events.into_iter().find_map(|event| {
                let Event::Effect(Effect::Reply { outcome, .. }) = event else { return None };
                Some(outcome)
            })
        };
        assert_eq!(keep(&mut machine, 2, 1, 1), Some(Outcome::Done));
        let mut policy = machine.policy().cloned().expect("it has begun");
        policy.limits.sessions_max = 2;
        order(&mut machine, 12, &LeaderCommand::Policy(Box::new(policy)));
        assert_eq!(keep(&mut machine, 3, 2, 2), Some(Outcome::Done));
        let refused = Some(Outcome::Refused(Refusal::MaxSessions));
        assert_eq!(keep(&mut machine, 4, 3, 3), refused);
        assert_eq!(keep(&mut machine, 5, 2, 2), Some(Outcome::Done), "it is one of them");
    }

    /// What the end of a connection would release waits for the reference of its client, if there is a time for that.
    #[test]
    fn a_referenced_hold_outlives_its_connection() {
        for (ttl, stays) in [(Span(50), true), (Span::ZERO, false)] {
            let (mut machine, [run, _]) = two_runs(1, ttl);
            let mut seq = 1;
            let mut send = |stamp, n, body: ProposalBody<'_>| {
                seq += 1;
                apply(&mut machine, stamp, |payload| put_one(payload, run, seq, n, body.clone()))
            };
            let held = send(10, 1, acquire(b"k", Span::ZERO));
            assert!(token_of(&held, run.session(1)).is_some());
            send(11, 1, ProposalBody::Close { orderly: true, referenced: true });
            let asked = send(60, 2, acquire(b"k", Span::ZERO));
            assert_eq!(token_of(&asked, run.session(2)).is_none(), stays, "{ttl:?}");
            let asked = send(61, 3, acquire(b"k", Span::ZERO));
            assert_eq!(token_of(&asked, run.session(3)).is_some(), stays, "{ttl:?}");
        }
    }
}
