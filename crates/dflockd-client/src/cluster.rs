//! What is known of a cluster: who belongs to it, who leads, and which member to talk to next.
//!
//! The seeds are where it begins. From then on the members tell of each other, in the `cluster` part of `stats`, which
//! a server tells alone if it knows how to be asked for it.
//! Nothing here decides about locks; it only answers where to dial. The session that moves from member to
//! member is in `link.rs`.

use std::collections::{BTreeMap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use dflockd_wire::{ErrorCode, Request};
use parking_lot::Mutex;
use rand::seq::SliceRandom;
use serde::Deserialize;
use tokio::task::JoinSet;

use crate::client::above_all_numbers;
use crate::clock::Instant;
use crate::error::Error;
use crate::link::OnDisconnect;
use crate::reply::Reply;
use crate::stream::{Address, Connection, Dialer, Greeting, Session, Transport};

/// The next member is dialed when the one before took so long.
const STAGGER: Duration = Duration::from_millis(200);
/// How long a member may take to connect: there are others.
const DIAL_MAX: Duration = Duration::from_secs(2);
/// How long a member may take to greet: an election is over by then, and there are others.
pub(crate) const GREETING_MAX: Duration = Duration::from_secs(3);
/// A member that failed is tried last for so long.
const FAILED_FOR: Duration = Duration::from_secs(3);
/// A server of another cluster, for so long.
const FOREIGN_FOR: Duration = Duration::from_secs(60);
/// How often the members are asked for.
const LEARN_EVERY: Duration = Duration::from_secs(30);
/// An older server tells of all keys as well. If the text is longer than this, it is asked for less often.
const TEXT_BYTES_CHEAP: usize = 256 * 1024;
/// The longest pause between two questions, however long the text.
const LEARN_EVERY_MAX: Duration = Duration::from_secs(3600);
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(1);

/// A member of a cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its name.
    pub node_id: String,
    /// Where its clients reach it.
    pub address: String,
    /// Whether it only votes and has nothing to say to clients.
    pub witness: bool,
}

/// A cluster as a client knows it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership {
    /// Who belongs to it.
    pub members: Vec<Member>,
    /// The name of the leader, if there is one.
    pub leader: Option<String>,
    /// The name of the member that the client talks to, if it is connected and that is known.
    pub node: Option<String>,
}

/// Where a client connects to.
#[derive(Clone)]
pub(crate) enum Route {
    /// One server.
    One(Address),
    /// Any member of a cluster.
    Cluster(Arc<Cluster>),
}

impl Route {
    /// A connection: to the server, or to some member.
    pub(crate) async fn connect(&self) -> Result<Connection, Error> {
        match self {
            Self::One(address) => address.connect().await,
            Self::Cluster(cluster) => {
                let mut candidates = cluster.candidates();
                Ok(cluster.first_reached(&mut candidates).await?.1)
            }
        }
    }

    pub(crate) fn client_name(&self) -> Arc<str> {
        match self {
            Self::One(address) => Arc::clone(&address.client_name),
            Self::Cluster(cluster) => Arc::clone(&cluster.dialer.client_name),
        }
    }

    /// How long a greeting or another small thing may take.
    pub(crate) fn patience(&self) -> Duration {
        match self {
            Self::One(address) => address.connect_timeout,
            Self::Cluster(cluster) => cluster.dialer.connect_timeout,
        }
    }

    pub(crate) fn transport(&self) -> Transport {
        match self {
            Self::One(address) => address.transport,
            Self::Cluster(cluster) => cluster.dialer.transport,
        }
    }

    pub(crate) fn unreachable(&self, reason: impl ToString) -> Error {
        match self {
            Self::One(address) => address.unreachable(reason),
            Self::Cluster(cluster) => cluster.unreachable(reason),
        }
    }

    pub(crate) fn cluster(&self) -> Option<&Arc<Cluster>> {
        match self {
            Self::One(_) => None,
            Self::Cluster(cluster) => Some(cluster),
        }
    }
}

/// The members and how to reach them.
pub(crate) struct Cluster {
    dialer: Dialer,
    seeds: Vec<String>,
    prefer_leader: bool,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    membership: Membership,
    /// Name and peer address of each member: by these a cluster is told from others.
    peers: Vec<(String, String)>,
    /// Members do not pass requests on but name the leader.
    wants_leader: bool,
    /// Addresses that failed, and until when they are tried last.
    failed: BTreeMap<String, Instant>,
    /// When to ask for the members again.
    learn_at: Option<Instant>,
    /// How long the last text was.
    text_bytes: usize,
}

/// What a server said of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    /// A member of this cluster, in touch with the leader or not.
    Member { ready: bool },
    /// No member of any cluster, or of another one.
    Foreign,
}

#[derive(Deserialize)]
struct Stats {
    cluster: Option<Report>,
}

#[derive(Deserialize)]
struct Report {
    node_id: String,
    #[serde(default)]
    ready: bool,
    #[serde(default)]
    leader_id: String,
    #[serde(default)]
    witnesses: Vec<String>,
    #[serde(default)]
    members: Vec<ReportedMember>,
}

#[derive(Deserialize)]
struct ReportedMember {
    node_id: String,
    #[serde(default)]
    peer_addr: String,
    #[serde(default)]
    client_addr: String,
}

impl Cluster {
    pub(crate) fn new(mut dialer: Dialer, seeds: Vec<String>, prefer_leader: bool) -> Arc<Self> {
        // Bytes that nobody acknowledges end the connection, or the kernel would go on for minutes.
        dialer.user_timeout = Some(dialer.connect_timeout);
        Arc::new(Self { dialer, seeds, prefer_leader, known: Mutex::default() })
    }

    pub(crate) fn membership(&self) -> Membership {
        self.known.lock().membership.clone()
    }

    pub(crate) fn unreachable(&self, reason: impl ToString) -> Error {
        Error::Unreachable { server: self.seeds.join(","), reason: reason.to_string() }
    }

    /// Where to dial, in this order. Members come in random order, so that clients spread; then the seeds, which may
    /// lead to members that have moved; then whatever failed a moment ago.
    pub(crate) fn candidates(&self) -> VecDeque<Address> {
        let mut known = self.known.lock();
        known.failed.retain(|_, until| !until.remaining().is_zero());
        let mut rng = rand::rng();
        let members = &known.membership.members;
        let mut names: Vec<&String> = members
            .iter()
            .filter(|member| !member.witness && can_be_dialed(&member.address))
            .map(|member| &member.address)
            .collect();
        names.shuffle(&mut rng);
        let mut seeds: Vec<&String> = self.seeds.iter().collect();
        seeds.shuffle(&mut rng);
        for seed in seeds {
            let witness = members.iter().any(|member| member.witness && member.address == *seed);
            if !names.contains(&seed) && !witness {
                names.push(seed);
            }
        }
        if names.is_empty() {
            names.extend(&self.seeds);
        }
        let leader = known.leader_address().filter(|_| self.prefer_leader || known.wants_leader);
        // Stable: whatever failed goes to the end, and the leader to the front unless it failed.
        names.sort_by_key(|name| {
            let failed = known.failed.contains_key(*name);
            (failed, Some(name.as_str()) != leader)
        });
        let connect_timeout = self.dialer.connect_timeout.min(DIAL_MAX);
        let dialer = Dialer { connect_timeout, ..self.dialer.clone() };
        names.into_iter().map(|name| dialer.address(name.clone())).collect()
    }

    /// The first candidate that can be reached. What was not tried, or not to the end, stays.
    pub(crate) async fn first_reached(
        &self,
        candidates: &mut VecDeque<Address>,
    ) -> Result<(Address, Connection), Error> {
        let mut dials = JoinSet::new();
        let mut dialed: Vec<Address> = Vec::new();
        let mut last = self.unreachable("no member is known");
        loop {
            if let Some(next) = candidates.pop_front() {
                dialed.push(next.clone());
                dials.spawn(async move {
                    let connected = next.connect().await;
                    (next, connected)
                });
            } else if dials.is_empty() {
                return Err(last);
            }
            let joined = if candidates.is_empty() {
                dials.join_next().await
            } else {
                match tokio::time::timeout(STAGGER, dials.join_next()).await {
                    Ok(joined) => joined,
                    Err(_) => continue,
                }
            };
            let Some(Ok((address, connected))) = joined else { continue };
            dialed.retain(|other| other.name != address.name);
            match connected {
                Ok(connection) => {
                    for other in dialed.into_iter().rev() {
                        candidates.push_front(other);
                    }
                    return Ok((address, connection));
                }
                Err(error) => {
                    self.handle_failure(&address.name);
                    last = error;
                }
            }
        }
    }

    /// A member could not be reached, or was left because something is wrong with it.
    pub(crate) fn handle_failure(&self, address: &str) {
        self.put_off(address, FAILED_FOR);
    }

    /// The session is at this address now.
    pub(crate) fn handle_attached(&self, address: &str) {
        let mut known = self.known.lock();
        known.failed.remove(address);
        let at = known.membership.members.iter().find(|member| member.address == address);
        known.membership.node = at.map(|member| member.node_id.clone());
        // Something has changed, so it is worth to ask; spread, because many come at once then. A long text is
        // asked for in its own time.
        if known.text_bytes <= TEXT_BYTES_CHEAP {
            let soon = Duration::from_millis(rand::random_range(0..500));
            known.learn_at = Some(Instant::now() + soon);
        }
    }

    /// The session is nowhere at the moment.
    pub(crate) fn handle_detached(&self) {
        self.known.lock().membership.node = None;
    }

    /// A member named the leader instead of doing what it was asked. Only members are believed in: whoever can
    /// answer in their place shall not lead clients, and their tokens, astray.
    pub(crate) fn handle_redirect(&self, address: Option<&str>) {
        let mut known = self.known.lock();
        known.wants_leader = true;
        let named = known.membership.members.iter().find(|it| Some(it.address.as_str()) == address);
        let named = named.map(|member| member.node_id.clone());
        known.membership.leader.clone_from(&named);
        if named.is_none() {
            known.learn_at = Some(Instant::now());
        } else if let Some(address) = address {
            known.failed.remove(address);
        }
    }

    /// Whether the session should move to the leader.
    pub(crate) fn is_better_elsewhere(&self) -> bool {
        let known = self.known.lock();
        let Membership { leader, node, .. } = &known.membership;
        let wanted = self.prefer_leader || known.wants_leader;
        let fresh = known.leader_address().is_some_and(|it| !known.failed.contains_key(it));
        wanted && leader.is_some() && node.is_some() && leader != node && fresh
    }

    /// When to ask for the members.
    pub(crate) fn learn_at(&self) -> Instant {
        *self.known.lock().learn_at.get_or_insert_with(Instant::now)
    }

    /// The members are asked for.
    pub(crate) fn handle_asked(&self) {
        let mut known = self.known.lock();
        let times = u32::try_from(known.text_bytes / TEXT_BYTES_CHEAP).unwrap_or(u32::MAX);
        let pause = LEARN_EVERY.saturating_mul(times.saturating_add(1)).min(LEARN_EVERY_MAX);
        known.learn_at = Some(Instant::now() + pause.mul_f64(rand::random_range(0.8..1.2)));
    }

    /// Reads what the server at `address` told of its cluster: the answer to `stats`, whole or not.
    pub(crate) fn learn(&self, address: &str, answer: &Reply, attached: bool) -> Told {
        let report = match answer.json::<Stats>("stats") {
            Ok(Stats { cluster: Some(report) }) => report,
            Ok(Stats { cluster: None }) | Err(_) => {
                self.put_off(address, FOREIGN_FOR);
                return Told::Foreign;
            }
        };
        let peers: Vec<_> = report
            .members
            .iter()
            .map(|member| (member.node_id.clone(), member.peer_addr.clone()))
            .collect();
        let mut known = self.known.lock();
        let is_first = known.peers.is_empty();
        if !is_first && !peers.is_empty() && !peers.iter().any(|peer| known.peers.contains(peer)) {
            drop(known);
            self.put_off(address, FOREIGN_FOR);
            return Told::Foreign;
        }
        known.text_bytes = answer.text_bytes();
        // One that is out of touch may tell of a past.
        if report.ready || is_first {
            let witness = |node: &String| report.witnesses.contains(node);
            let member = |it: &ReportedMember| Member {
                node_id: it.node_id.clone(),
                address: it.client_addr.clone(),
                witness: witness(&it.node_id),
            };
            known.membership.members = report.members.iter().map(member).collect();
            known.membership.leader = Some(report.leader_id).filter(|leader| !leader.is_empty());
            known.peers = peers;
        }
        if attached {
            known.membership.node = Some(report.node_id);
        }
        Told::Member { ready: report.ready }
    }

    fn put_off(&self, address: &str, time: Duration) {
        self.known.lock().failed.insert(address.to_owned(), Instant::now() + time);
    }

    /// Asks a server on a connection that was not greeted whether it is a member, and what it knows.
    pub(crate) async fn ask(&self, address: &Address, connection: &mut Connection) -> Option<Told> {
        let answer = connection.ask(None, &Request::Members, address.connect_timeout).await.ok()?;
        Some(self.learn(&address.name, &answer, false))
    }

    /// Makes a session at some member, or takes one over.
    pub(crate) async fn join(
        &self,
        on_disconnect: OnDisconnect,
        session: Option<&str>,
    ) -> Result<Joined, Error> {
        let begun = Instant::now();
        let mut backoff = BACKOFF_MIN;
        loop {
            let error = match self.join_any(on_disconnect, session).await {
                Ok(joined) => return Ok(joined),
                Err(error) => error,
            };
            if begun.elapsed() >= self.dialer.connect_timeout || !error.may_retry() {
                return Err(error);
            }
            tokio::time::sleep(backoff.mul_f64(rand::random())).await;
            backoff = (backoff * 2).min(BACKOFF_MAX);
        }
    }

    /// Joins by any candidate, trying each once. Of several errors it is one that time may mend, if there is one.
    async fn join_any(
        &self,
        on_disconnect: OnDisconnect,
        session: Option<&str>,
    ) -> Result<Joined, Error> {
        let mut candidates = self.candidates();
        let mut first: Option<Error> = None;
        loop {
            if candidates.is_empty()
                && let Some(error) = first
            {
                return Err(error);
            }
            let (error, over) = match self.first_reached(&mut candidates).await {
                Err(error) => (error, true),
                Ok((address, connection)) => {
                    let name = address.name.clone();
                    match self.join_at(address, connection, on_disconnect, session).await {
                        Ok(joined) => return Ok(joined),
                        Err(error) => {
                            self.handle_failure(&name);
                            (error, false)
                        }
                    }
                }
            };
            let error = first.take().filter(Error::may_retry).unwrap_or(error);
            if over {
                return Err(error);
            }
            first = Some(error);
        }
    }

    async fn join_at(
        &self,
        address: Address,
        mut connection: Connection,
        on_disconnect: OnDisconnect,
        session: Option<&str>,
    ) -> Result<Joined, Error> {
        let wanted = session.map_or(Session::New(on_disconnect), Session::TakeOver);
        let greeted = connection.greet(&address.client_name, wanted, GREETING_MAX).await;
        let (session, last) = match greeted.map_err(|error| address.greeting_failed(&error))? {
            Greeting::Accepted { session: made, .. } if session.is_none() => (made, 0),
            Greeting::Accepted { session, last } => {
                (session, last.unwrap_or_else(above_all_numbers))
            }
            Greeting::Unsuited => return Err(address.unreachable("it does not keep sessions")),
            Greeting::NotLeader(leader) => {
                // A witness; it knows the others.
                self.ask(&address, &mut connection).await;
                self.handle_redirect(leader.as_deref());
                return Err(address.unreachable("it serves no clients"));
            }
            Greeting::Refused(ErrorCode::Error) => {
                let told = self.ask(&address, &mut connection).await;
                let known = session.is_none() || told != Some(Told::Member { ready: true });
                return Err(match told {
                    Some(Told::Foreign) => not_a_member(&address),
                    _ if known => address.unreachable("it makes no sessions at the moment"),
                    _ => Error::Invalid("no such session".to_owned()),
                });
            }
            Greeting::Refused(code) => return Err(address.unreachable(code.text())),
        };
        let last = last + 1;
        let asked = connection.ask(Some(last), &Request::Members, address.connect_timeout).await;
        let answer = asked.map_err(|error| address.unreachable(error))?;
        if self.learn(&address.name, &answer, true) == Told::Foreign {
            return Err(not_a_member(&address));
        }
        self.handle_asked();
        Ok(Joined { address, connection, session, last })
    }
}

impl Known {
    fn leader_address(&self) -> Option<&str> {
        let Membership { members, leader, .. } = &self.membership;
        let leader = leader.as_ref()?;
        let member = members.iter().find(|member| member.node_id == *leader)?;
        can_be_dialed(&member.address).then_some(member.address.as_str())
    }
}

/// A session at a member.
pub(crate) struct Joined {
    pub(crate) address: Address,
    pub(crate) connection: Connection,
    pub(crate) session: Option<String>,
    /// The last number that was used.
    pub(crate) last: u64,
}

fn not_a_member(address: &Address) -> Error {
    Error::Invalid(format!("{} is not a member of this cluster, or of any", address.name))
}

/// Not what a member bound that names no host of its own: to dial it would lead to this machine.
fn can_be_dialed(address: &str) -> bool {
    match address.parse::<SocketAddr>() {
        Ok(address) => !address.ip().is_unspecified() && address.port() != 0,
        Err(_) => address.contains(':') && !address.starts_with(':'),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(seeds: &[&str], prefer_leader: bool) -> Arc<Cluster> {
        let dialer = Dialer {
            tls: None,
            auth: None,
            client_name: "test".into(),
            connect_timeout: Duration::from_secs(5),
            user_timeout: None,
            transport: Transport::Lines,
        };
        Cluster::new(dialer, seeds.iter().map(ToString::to_string).collect(), prefer_leader)
    }

    fn report(node: &str, leader: &str, members: &[(&str, &str)]) -> Reply {
        let members: Vec<_> = members
            .iter()
            .map(|(node, address)| {
                format!(
                    r#"{{"node_id":"{node}","peer_addr":"p-{node}:1","client_addr":"{address}"}}"#
                )
            })
            .collect();
        let members = members.join(",");
        let text = format!(
            r#"{{"connections":1,"locks":[],"cluster":{{"node_id":"{node}","ready":true,"leader_id":"{leader}",
            "voters":[],"witnesses":["w"],"members":[{members}]}}}}"#
        );
        Reply::Value(text.into_bytes())
    }

    fn names(cluster: &Cluster) -> Vec<String> {
        cluster.candidates().into_iter().map(|address| address.name).collect()
    }

    const THREE: [(&str, &str); 4] = [("a", "h:1"), ("b", "h:2"), ("c", "h:3"), ("w", "h:4")];

    #[test]
    fn members_come_before_seeds_and_a_witness_not_at_all() {
        let cluster = cluster(&["h:4", "seed:9", "h:1"], false);
        let mut first = names(&cluster);
        first.sort();
        assert_eq!(first, ["h:1", "h:4", "seed:9"]);
        assert_eq!(
            cluster.learn("h:1", &report("a", "b", &THREE), true),
            Told::Member { ready: true }
        );
        let mut spread = std::collections::BTreeSet::new();
        for _ in 0..200 {
            let mut now = names(&cluster);
            assert_eq!(now.pop().as_deref(), Some("seed:9"));
            spread.insert(now[0].clone());
            now.sort();
            assert_eq!(now, ["h:1", "h:2", "h:3"]);
        }
        assert_eq!(spread.len(), 3, "{spread:?}");
        assert_eq!(cluster.membership().node.as_deref(), Some("a"));
    }

    #[test]
    fn what_failed_is_tried_last() {
        let cluster = cluster(&["h:1"], true);
        cluster.learn("h:1", &report("a", "b", &THREE), true);
        assert_eq!(names(&cluster)[0], "h:2", "the leader first");
        assert!(cluster.is_better_elsewhere());
        cluster.handle_failure("h:2");
        assert_eq!(names(&cluster)[2], "h:2");
        assert!(!cluster.is_better_elsewhere());
        cluster.handle_attached("h:2");
        assert_eq!(names(&cluster)[0], "h:2");
        assert_eq!(cluster.membership().node.as_deref(), Some("b"));
    }

    #[test]
    fn only_members_are_followed() {
        let cluster = cluster(&["h:1"], false);
        cluster.learn("h:1", &report("a", "b", &THREE), true);
        cluster.handle_redirect(Some("evil:1"));
        assert!(!names(&cluster).contains(&"evil:1".to_owned()));
        assert_eq!(cluster.membership().leader, None);
        cluster.handle_redirect(Some("h:3"));
        assert_eq!(names(&cluster)[0], "h:3");
    }

    #[test]
    fn strangers_are_told_apart() {
        let cluster = cluster(&["h:1"], false);
        let alone = Reply::Value(b"{\"connections\":1}".to_vec());
        assert_eq!(cluster.learn("h:9", &alone, true), Told::Foreign);
        cluster.learn("h:1", &report("a", "b", &THREE), true);
        let other = report("x", "x", &[("x", "h:8")]);
        assert_eq!(cluster.learn("h:8", &other, true), Told::Foreign);
        assert_eq!(cluster.membership().members.len(), 4);
        // One that moved.
        let moved = [("a", "h:1"), ("b", "h:22"), ("c", "0.0.0.0:3")];
        cluster.learn("h:1", &report("a", "b", &moved), true);
        let mut now = names(&cluster);
        now.sort();
        assert_eq!(now, ["h:1", "h:22"]);
    }
}
