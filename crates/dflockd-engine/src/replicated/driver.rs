//! A node around its replica: how it comes to a cluster, its threads, and what is done with the replica's outputs.
//!
//! The combiner drives a [`ReplicaDriver`]: it lets the [`Replica`] take all that has come and decide, hands writes to
//! the log thread and frames to the transport, and leaves notices for clients to the thread that delivers them. The
//! timer thread of the combiner is called `replica`. A snapshot has a thread of its own while it is made. Peers are
//! served by the runtime's threads.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use parking_lot::Mutex;
use raft::eraftpb::HardState;

use super::combiner::Drive;
use super::delivery::Notice;
use super::formation::{self, FirstMember, Forming};
use super::log_writer::{
    DESCRIPTOR_PAUSE_MAX, DESCRIPTOR_PAUSE_MIN, LogJob, LogThread, is_passing, log_failed,
};
use super::{Input, Inputs, Replicated};
use crate::transport::{Handler, Identity, Lane, PeerAddress, Transport, TransportConfig};
use dflockd_replica::codec::{self, Frame};
use dflockd_replica::disk::{Disk, RealDisk, is_out_of_descriptors};
use dflockd_replica::log::{LogBatch, LogOptions, LogStore, Recovered, write_snapshot};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Bits128, Incarnation, Member, NodeIdentity, Policy, RaftId, Start};
use dflockd_replica::{
    Gone, MadeSnapshot, Outputs, RaftConfig, Replica, ReplicaConfig, SnapshotJob, TICK,
    TOO_MANY_STARTS, note, version,
};

/// Bytes of log after which a snapshot is made.
const SNAPSHOT_BYTES: u64 = 64 << 20;
/// How long a finished snapshot waits for a descriptor before it is given up.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(60);

/// How a node comes to a cluster if its data directory is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formation {
    /// The node is the first and only member of a new cluster.
    Bootstrap,
    /// These nodes begin a cluster together, the node itself among them, once all of them have met.
    Static(Vec<FirstMember>),
    /// The node waits to be added to a cluster.
    Join,
}

/// How to run a member in a process of its own.
pub struct ClusterOptions {
    /// The data directory of the member.
    pub dir: PathBuf,
    /// The peer port of the member, and its credentials.
    pub transport: TransportConfig,
    /// What the member is.
    pub member: MemberOptions,
}

/// What a member is, wherever it runs.
pub struct MemberOptions {
    /// The name of the node.
    pub node: String,
    /// Where peers dial the node, if it is the first of a cluster.
    pub peer_addr: String,
    /// Where clients find the node.
    pub client_addr: String,
    /// How the node comes to a cluster.
    pub formation: Formation,
    /// Whether the node is a witness: it keeps the log, but no state.
    pub witness: bool,
    /// The policy that the node proposes if it is the first leader of the cluster.
    pub policy: Policy,
    /// Without a leader for so long, at random up to twice as long, the node stands for election.
    pub election_timeout: Duration,
    /// How often a leader sends heartbeats.
    pub heartbeat_interval: Duration,
    /// How many entries there are between two snapshots.
    pub snapshot_entries: u64,
    /// The newest version of the log that this member says it reads.
    pub version: u32,
}

/// What a member needs of the world around it. The host of a server has sockets, threads and files; that of the
/// simulator has none of them.
pub trait Host: Send + Sync {
    /// Sends a frame to a member, or loses it.
    fn send(&self, to: RaftId, lane: Lane, frame: Bytes);

    /// Sets whom there is to talk to from now on.
    fn set_peers(&self, peers: Vec<PeerAddress>);

    /// Seals frames from now on, because all members can read that.
    fn seal(&self);

    /// Makes a snapshot, stores it beside the others, and then calls [`Replicated::snapshot_made`].
    ///
    /// # Errors
    ///
    /// If that can not begin.
    fn make_snapshot(&self, job: SnapshotJob) -> Result<(), String>;

    /// Removes files that nobody needs, drops what was in memory of them, and then calls [`Replicated::swept`].
    ///
    /// # Errors
    ///
    /// If that can not begin.
    fn sweep(&self, files: VecDeque<String>, gone: Option<Gone>) -> io::Result<()>;
}

/// The host of a server.
struct Threads {
    front: Arc<Replicated>,
    transport: Arc<Transport>,
    disk: RealDisk,
}

impl Host for Threads {
    fn send(&self, to: RaftId, lane: Lane, frame: Bytes) {
        self.transport.send(to, lane, frame);
    }

    fn set_peers(&self, peers: Vec<PeerAddress>) {
        self.transport.set_peers(peers);
    }

    fn seal(&self) {
        self.transport.seal();
    }

    fn make_snapshot(&self, job: SnapshotJob) -> Result<(), String> {
        let (front, disk) = (Arc::clone(&self.front), self.disk.clone());
        spawn("snapshot", move || make_snapshot(job, disk, &front))
    }

    /// On a thread of its own: to give room back takes the file system long.
    fn sweep(&self, files: VecDeque<String>, gone: Option<Gone>) -> io::Result<()> {
        let (front, mut disk) = (Arc::clone(&self.front), self.disk.clone());
        let sweep = move || {
            let fuse = FailNodeOnPanic::new(&front);
            drop(gone);
            for name in files {
                let removed = disk.remove(&name).and_then(|()| disk.sync_dir());
                if let Err(error) = removed {
                    front.fail(log_failed(&error));
                    break;
                }
            }
            front.swept();
            fuse.disarm();
        };
        spawn("sweep", sweep).map_err(io::Error::other)
    }
}

/// Opens the data directory and begins to take part. Must be called inside a runtime.
///
/// # Errors
///
/// If the directory, the port or the credentials can not be used.
pub(crate) async fn start(
    front: &Arc<Replicated>,
    options: ClusterOptions,
) -> Result<Arc<Transport>, String> {
    let ClusterOptions { dir, transport, member } = options;
    let named = |why: String| format!("data directory {}: {why}", dir.display());
    let disk = RealDisk::open(&dir).map_err(|error| named(error.to_string()))?;
    let opened = open(front, disk.clone(), LogOptions::default(), member).map_err(named)?;
    let Opened { log, recovered, gate, start, options } = opened;
    let transport = Transport::start(transport, gate.clone() as Arc<dyn Handler>)
        .await
        .map_err(|error| error.to_string())?;
    if version::is_used(&recovered.entries, version::SEALED) {
        transport.seal();
    }
    let host = Threads { front: Arc::clone(front), transport: Arc::clone(&transport), disk };
    let node = Node { front: Arc::clone(front), gate, host: Arc::new(host), start, options };
    spawn("replica", move || node.run(log, recovered))?;
    Ok(transport)
}

/// A data directory that is open, and the node that it belongs to.
pub(super) struct Opened<D: Disk> {
    pub(super) log: LogStore<D>,
    pub(super) recovered: Recovered,
    pub(super) gate: Arc<Gate>,
    pub(super) start: u32,
    pub(super) options: MemberOptions,
}

/// Opens the data directory of a node and counts this start in it.
///
/// # Errors
///
/// If the directory can not be used, or belongs to another node.
pub(super) fn open<D: Disk>(
    front: &Arc<Replicated>,
    disk: D,
    log_options: LogOptions,
    options: MemberOptions,
) -> Result<Opened<D>, String> {
    let (mut log, mut recovered) =
        LogStore::open(disk, log_options).map_err(|error| error.to_string())?;
    version::check(&recovered)?;
    let io = |error: io::Error| error.to_string();

    let mut who = match recovered.notes.get(note::IDENTITY) {
        Some(bytes) => codec::unpack::<NodeIdentity>(bytes)
            .map_err(|error| format!("the node's identity is damaged: {error}"))?,
        None => NodeIdentity {
            cluster: None,
            node: options.node.clone(),
            raft_id: 0,
            disk: front.chance().draw(),
        },
    };
    if who.node != options.node {
        return Err(format!("it belongs to node {}, not to {}", who.node, options.node));
    }
    let is_new = recovered.snapshot.is_none() && recovered.entries.is_empty();
    let forming = if is_new { forming(&options, &mut who) } else { None };
    let start = next_start(recovered.notes.get(note::START))?;
    if who.raft_id > Incarnation::RAFT_ID_MAX {
        return Err(format!("it belongs to member {}, which can not be", who.raft_id));
    }
    let list_id = match &options.formation {
        Formation::Static(members) => Some(formation::list_id(members)),
        Formation::Bootstrap | Formation::Join => None,
    };
    let gate = Arc::new(Gate {
        front: Arc::downgrade(front),
        who: Mutex::new(who),
        forming: Mutex::new(forming),
        list_id,
        formed_as: Mutex::default(),
        witness: options.witness,
        version: options.version,
    });
    let mut notes = vec![(note::START.to_vec(), start.to_le_bytes().to_vec())];
    if !gate.form(&mut log, &mut recovered, &notes)? {
        notes.push((note::IDENTITY.to_vec(), codec::pack(&*gate.who.lock())));
        log.write(&LogBatch { notes, ..LogBatch::default() }).map_err(io)?;
        if !bug(Bug::StartUnsynced) {
            log.sync().map_err(io)?;
        }
    }
    let raft_id = gate.number();
    if raft_id != 0 && !gate.is_forming() {
        // Before the first client can be there: what it asks for waits in the queue until the replica takes part.
        front.begin_incarnation(Incarnation::new(raft_id, start));
    }
    Ok(Opened { log, recovered, gate, start, options })
}

/// The number of this start, from the note of the last one. A note that can not be read is damage: if it counted as
/// none, an incarnation would be used twice, and what the earlier one had sent would be taken for that of this one.
fn next_start(noted: Option<&Vec<u8>>) -> Result<u32, String> {
    let Some(noted) = noted else { return Ok(1) };
    let starts = <[u8; 4]>::try_from(noted.as_slice()).map(u32::from_le_bytes).map_err(|_| {
        let bytes = noted.len();
        format!(
            "the count of starts is damaged: {bytes} bytes instead of 4; remove this node from the cluster and let it \
             join under a new id with an empty directory, or restore a backup"
        )
    })?;
    if starts >= Incarnation::START_MAX {
        return Err(TOO_MANY_STARTS.into());
    }
    Ok(starts + 1)
}

/// The first members of a new cluster, as far as they are known, and the number of this one, if the node is to be one.
fn forming(options: &MemberOptions, who: &mut NodeIdentity) -> Option<Forming> {
    let MemberOptions { node, peer_addr, client_addr, .. } = options;
    let alone = [(node.clone(), peer_addr.clone(), client_addr.clone())];
    let members = match &options.formation {
        Formation::Join => return None,
        Formation::Bootstrap => &alone[..],
        Formation::Static(members) => members,
    };
    let forming = Forming::new(members, node, who.disk)?;
    who.raft_id = forming.number(node)?;
    Some(forming)
}

pub(super) fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let runtime = tokio::runtime::Handle::current();
    std::thread::Builder::new()
        .name(name.into())
        .spawn(move || {
            // Connections that are served from here may want to spawn something.
            let _context = runtime.enter();
            run();
        })
        .map(drop)
        .map_err(|error| format!("thread {name}: {error}"))
}

/// The transport's way in.
pub(super) struct Gate {
    front: std::sync::Weak<Replicated>,
    who: Mutex<NodeIdentity>,
    /// The other first members, while this one does not know all of them.
    forming: Mutex<Option<Forming>>,
    /// What first members of the same list present until they know all of them.
    list_id: Option<Bits128>,
    /// The name that the cluster began with, once it has another one and this node knows both.
    formed_as: Mutex<Option<Bits128>>,
    witness: bool,
    version: u32,
}

impl Gate {
    /// The node's number in the cluster, 0 if it has none yet.
    pub(super) fn number(&self) -> RaftId {
        self.who.lock().raft_id
    }

    /// Whether the node is a first member that does not know all the others.
    pub(super) fn is_forming(&self) -> bool {
        self.forming.lock().is_some()
    }

    /// The first members that this one waits for, if it is one.
    pub(super) fn missing(&self) -> Option<String> {
        self.forming.lock().as_ref().map(Forming::missing)
    }

    /// Begins the cluster if all first members are known: what they begin with is in the log then, and the node knows
    /// its cluster. True: it is so from now on.
    pub(super) fn form<D: Disk>(
        &self,
        log: &mut LogStore<D>,
        recovered: &mut Recovered,
        notes: &[(Vec<u8>, Vec<u8>)],
    ) -> Result<bool, String> {
        // Peers are answered while this waits for the disk: until all is durable the node is still forming for them.
        let formed = self.forming.lock().as_ref().and_then(Forming::formed);
        let Some((cluster, metadata, data)) = formed else { return Ok(false) };
        let io = |error: io::Error| error.to_string();
        let who = NodeIdentity { cluster: Some(cluster), ..self.who.lock().clone() };
        let mut notes = notes.to_vec();
        notes.push((note::IDENTITY.to_vec(), codec::pack(&who)));
        log.write(&LogBatch { notes, ..LogBatch::default() }).map_err(io)?;
        if !bug(Bug::StartUnsynced) {
            log.sync().map_err(io)?;
        }
        log.install_snapshot(&metadata, &data).map_err(io)?;
        let snapshot = dflockd_replica::log::StoredSnapshot { metadata, data, digest: [0; 32] };
        recovered.hard_state = HardState { commit: 1, term: 1, ..HardState::default() };
        recovered.snapshot = Some(snapshot);
        *self.who.lock() = who;
        *self.forming.lock() = None;
        Ok(true)
    }

    /// Whether a peer has presented what first members present before they know their cluster. This node may have come
    /// to know its own while they shook hands: such a connection is for getting to know each other only.
    fn is_of_no_cluster(&self, peer: &Identity) -> bool {
        let is_list = peer.cluster.is_some() && peer.cluster == self.list_id;
        // Clusters that older programs have formed had the id of their list.
        let had_it = [self.who.lock().cluster, *self.formed_as.lock()].contains(&self.list_id);
        is_list && !had_it
    }

    /// A node has proven who it is. If this one is forming its cluster, why it does not talk to anybody yet.
    fn hear(&self, peer: &Identity) -> Option<String> {
        let mut forming = self.forming.lock();
        let forming = forming.as_mut()?;
        forming.hear(peer);
        let missing = forming.missing();
        if !missing.is_empty() {
            return Some(format!("the cluster is not formed yet: waiting for {missing}"));
        }
        if let Some(front) = self.front.upgrade() {
            front.wake_timer();
        }
        Some("the cluster is being formed".to_owned())
    }
}

impl Handler for Gate {
    fn identity(&self) -> Identity {
        let forming = self.forming.lock().as_ref().map(Forming::list_id);
        let who = self.who.lock();
        Identity {
            cluster: forming.or(who.cluster),
            node: who.node.clone(),
            raft_id: who.raft_id,
            disk: who.disk,
            witness: self.witness,
            version: self.version,
        }
    }

    fn former_identity(&self, peer: &Identity) -> Option<Result<Identity, String>> {
        let (formed_as, ours) = (*self.formed_as.lock(), self.identity());
        let former = peer.cluster.filter(|_| peer.cluster != ours.cluster)?;
        if ![formed_as, self.list_id].contains(&Some(former)) {
            return None;
        }
        let front = self.front.upgrade()?;
        Some(front.admit_known(peer).map(|()| Identity { cluster: Some(former), ..ours }))
    }

    fn refused_by(&self, peer: &Identity) {
        self.hear(peer);
    }

    fn admit(&self, peer: &Identity) -> Result<(), String> {
        let Some(front) = self.front.upgrade() else { return Err("shutting down".into()) };
        front.admit(peer)?;
        if let Some(not_yet) = self.hear(peer) {
            return Err(not_yet);
        }
        if self.is_of_no_cluster(peer) {
            return Err(format!("{} has not formed its cluster yet", peer.node));
        }
        let mut who = self.who.lock();
        if who.cluster.is_none() {
            // Whoever knows the secret and dials this node by its name may take it in.
            who.cluster = peer.cluster;
        }
        Ok(())
    }

    fn received(&self, from: u64, lane: Lane, frame: Bytes) {
        if let Some(front) = self.front.upgrade() {
            front.enqueue_and_drive(Input::Frame { from, bytes: frame, bulk: lane == Lane::Bulk });
        }
    }

    fn reachable(&self, peer: u64, lane: Lane) {
        if lane == Lane::Main
            && let Some(front) = self.front.upgrade()
        {
            front.gauges().connected.lock().insert(peer);
        }
    }

    fn unreachable(&self, peer: u64, lane: Lane, refused: bool) {
        if lane == Lane::Main
            && let Some(front) = self.front.upgrade()
        {
            front.gauges().connected.lock().remove(&peer);
            front.enqueue(Input::Unreachable { peer, refused });
        }
    }

    fn bad_frame(&self, _peer: u64, _lane: Lane) {
        if let Some(front) = self.front.upgrade() {
            front.gauges().bad_frames.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn stream_lost(&self, _peer: u64, _lane: Lane) {}
}

/// The replica and all that is needed to do what it wants: what the combiner drives.
pub(super) struct ReplicaDriver {
    node: Node,
    replica: Replica,
    outputs: Outputs,
    notices: Vec<Notice>,
    /// What the replica takes now; empty in between.
    inputs: Inputs,
}

impl Drive for ReplicaDriver {
    type Queue = Inputs;

    fn queue(&mut self) -> &mut Inputs {
        &mut self.inputs
    }

    /// Lets the replica take its inputs, and does what it wants.
    fn drive(&mut self) -> u64 {
        let Self { node, replica, outputs, notices, inputs } = self;
        let front = Arc::clone(&node.front);
        let fuse = FailNodeOnPanic::new(&front);
        let began = front.clock().now();
        replica.handle_time(began);
        inputs.feed(replica, outputs);
        replica.poll(outputs);
        front.gauges().turned(replica, began, front.clock().now());
        if let Err(why) = node.hand_out(replica, outputs, notices) {
            front.fail(why);
        }
        fuse.disarm();
        replica.next_deadline().0
    }
}

impl ReplicaDriver {
    /// The replica that is driven.
    #[cfg(feature = "sim")]
    pub(super) fn replica(&self) -> &Replica {
        &self.replica
    }
}

/// The node around a replica: how it is seen by connections and peers, what it is given by its host, and its options.
pub(super) struct Node {
    pub(super) front: Arc<Replicated>,
    pub(super) gate: Arc<Gate>,
    pub(super) host: Arc<dyn Host>,
    pub(super) start: u32,
    pub(super) options: MemberOptions,
}

/// The number by which a peer has called this node, and the frame with it.
pub(super) type FirstFrame = (RaftId, Bytes);

impl Node {
    fn run<D: Disk + Send + 'static>(self, log: LogStore<D>, recovered: Recovered) {
        let front = Arc::clone(&self.front);
        let fuse = FailNodeOnPanic::new(&front);
        if let Err(why) = self.take_part(log, recovered) {
            front.fail(why);
        }
        fuse.disarm();
    }

    fn take_part<D: Disk + Send + 'static>(
        self,
        log: LogStore<D>,
        recovered: Recovered,
    ) -> Result<(), String> {
        let (mut log, mut recovered) = (log, recovered);
        self.look_for_first_members();
        while self.gate.is_forming() {
            let Some(inputs) = self.front.wait_for_work(Duration::from_secs(1)) else {
                return Ok(());
            };
            self.find_number(inputs);
            self.gate.form(&mut log, &mut recovered, &[])?;
        }
        let (front, host) = (Arc::clone(&self.front), Arc::clone(&self.host));
        let mut thread = LogThread::new(log, front, host);
        spawn("log", move || {
            let front = Arc::clone(thread.front());
            let fuse = FailNodeOnPanic::new(&front);
            if let Err(error) = thread.run() {
                front.fail(log_failed(&error));
            }
            fuse.disarm();
        })?;
        let mut raft_id = self.gate.number();
        let mut first = None;
        while raft_id == 0 {
            let Some(inputs) = self.front.wait_for_work(Duration::from_secs(1)) else {
                return Ok(());
            };
            if let Some((called, frame)) = self.find_number(inputs) {
                raft_id = called;
                first = Some(frame);
            }
        }
        let driver = self.begin(raft_id, first, recovered)?;
        let front = Arc::clone(&driver.node.front);
        front.run(driver);
        Ok(())
    }

    /// Dials the other first members, if this is one that does not know all of them.
    pub(super) fn look_for_first_members(&self) {
        let peers = self.gate.forming.lock().as_ref().map(Forming::peers);
        if let (Some(peers), Some(missing)) = (peers, self.gate.missing()) {
            tracing::info!(missing, "waiting for the other first members of the cluster");
            self.host.set_peers(peers);
        }
    }

    /// Looks for the number that this node has in the cluster in what has come, before it is a member. Whoever asks for
    /// something is told that there is no cluster yet.
    pub(super) fn find_number(&self, mut inputs: Inputs) -> Option<(RaftId, FirstFrame)> {
        let mut found = None;
        for input in inputs.take_others() {
            if let Input::Job { id, .. } = input {
                self.front.refuse_job(id);
            } else if let Input::Admin { id, .. } = input {
                self.front.refuse_admin(id);
            } else if let Input::Frame { from, bytes, .. } = input
                && let Ok(Frame::Raft { message, .. }) = Frame::decode(bytes.clone())
                && found.is_none()
            {
                let to = message.to;
                if (1..=Incarnation::RAFT_ID_MAX).contains(&to) {
                    found = Some((to, (from, bytes)));
                } else {
                    tracing::warn!(
                        from,
                        to,
                        "a peer calls this node by a number that no member has"
                    );
                }
            }
        }
        found
    }

    /// The replica and what drives it, once it is known who this node is.
    pub(super) fn begin(
        self,
        raft_id: RaftId,
        first: Option<FirstFrame>,
        recovered: Recovered,
    ) -> Result<ReplicaDriver, String> {
        let who = {
            let mut who = self.gate.who.lock();
            who.raft_id = raft_id;
            who.clone()
        };
        self.front.log_writer.put([LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&who))]);
        let (options, chance) = (&self.options, self.front.chance());
        let ticks = |duration: Duration| {
            usize::try_from(duration.as_nanos() / u128::from(TICK.0)).unwrap_or(usize::MAX).max(1)
        };
        // A witness lets the others go first.
        let patience = if options.witness { 2 } else { 1 };
        let config = ReplicaConfig {
            raft: RaftConfig {
                id: raft_id,
                election_ticks: ticks(options.election_timeout) * patience,
                heartbeat_ticks: ticks(options.heartbeat_interval),
                seed: chance.draw(),
            },
            witness: options.witness,
            policy: options.policy.clone(),
            fence: self.front.first_fence(),
            seed: chance.draw(),
            cluster: chance.draw(),
            run: Incarnation::new(raft_id, self.start),
            start: Start {
                disk: who.disk,
                client_addr: options.client_addr.clone(),
                version: options.version,
                witness: options.witness,
            },
            snapshot_entries: options.snapshot_entries,
            snapshot_bytes: SNAPSHOT_BYTES,
        };
        let mut replica = Replica::new(config, recovered, self.front.clock().now())?;
        if !self.front.has_incarnation() {
            self.front.begin_incarnation(replica.run());
        }
        self.meet(&replica);
        if let Some((from, bytes)) = first {
            replica.handle_frame(from, bytes);
        }
        let (outputs, inputs) = (Outputs::default(), Inputs::default());
        Ok(ReplicaDriver { node: self, replica, outputs, notices: Vec::new(), inputs })
    }

    /// Takes the name that the cluster has drawn, and remembers it before anybody is told.
    fn take_name(&self, machine: &Machine) {
        let Some(formed_as) = machine.formed_as() else { return };
        *self.gate.formed_as.lock() = Some(formed_as);
        let mut who = self.gate.who.lock();
        if who.cluster != Some(machine.cluster()) {
            who.cluster = Some(machine.cluster());
            let note = LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&*who));
            self.front.log_writer.put([note]);
        }
    }

    /// Tells the transport whom there is to talk to.
    fn meet(&self, replica: &Replica) {
        let machine = replica.machine();
        let known = self.front.view().policy;
        self.front.set_members(replica);
        self.take_name(machine);
        // Before anybody is dialed: who reads this version seals frames, too.
        if machine.version() >= version::SEALED {
            self.host.seal();
        }
        self.dial(&replica.peers());
        if let Some(policy) = machine.policy().filter(|&policy| known.as_ref() != Some(policy)) {
            self.warn_of_differences(policy);
        }
    }

    /// Warns the operator whose settings count for nothing here.
    fn warn_of_differences(&self, policy: &Policy) {
        let differ = self.options.policy.differences(policy);
        if !differ.is_empty() {
            let settings = differ.join(", ");
            tracing::warn!(settings, "the cluster decides by other values than this node's flags");
        }
    }

    fn dial(&self, members: &BTreeMap<RaftId, Member>) {
        let peers = members.iter().map(|(&raft_id, member)| PeerAddress {
            raft_id,
            node: member.node.clone(),
            address: member.peer_addr.clone(),
        });
        self.host.set_peers(peers.collect());
    }

    /// Does what the replica wants. What is for the log is put there and done later: the peers work meanwhile.
    fn hand_out(
        &self,
        replica: &mut Replica,
        outputs: &mut Outputs,
        notices: &mut Vec<Notice>,
    ) -> Result<(), String> {
        let log_writer = &self.front.log_writer;
        log_writer.put(outputs.writes.drain(..).map(LogJob::Write));
        for frame in outputs.frames.drain(..) {
            let lane = if frame.bulk { Lane::Bulk } else { Lane::Main };
            self.host.send(frame.to, lane, frame.bytes);
        }
        for (id, copy) in outputs.copies.drain(..) {
            self.front.hand_copy(id, copy);
        }
        let events = outputs.events.drain(..);
        let members_changed = self.front.route(events, replica, notices);
        if members_changed {
            self.meet(replica);
        }
        self.front.set_status(replica.status());
        if let Some(index) = outputs.truncate_before.take() {
            let metadata = replica.snapshot_metadata().clone();
            let gone = outputs.gone.take();
            log_writer.put([LogJob::SnapshotStored(metadata), LogJob::TruncateBefore(index, gone)]);
        }
        if let Some(job) = outputs.snapshot_job.take() {
            self.host.make_snapshot(job)?;
        }
        match outputs.fatal.take() {
            Some(why) => Err(why),
            None => Ok(()),
        }
    }
}

fn make_snapshot(job: SnapshotJob, mut disk: RealDisk, front: &Arc<Replicated>) {
    let fuse = FailNodeOnPanic::new(front);
    // Nobody waits for it. This is for one thread on Linux, and for the whole process elsewhere.
    if cfg!(target_os = "linux") {
        let _ = rustix::process::nice(10);
    }
    match job.run() {
        Err(why) => front.fail(format!("a snapshot can not be made: {why}")),
        Ok(made) => match write_patiently(&mut disk, &made, front) {
            Ok(()) => {
                front.snapshot_made(Some(made));
            }
            Err(error) if is_passing(&error) => {
                tracing::warn!(%error, "no room for a snapshot; the next one is tried later");
                front.snapshot_made(None);
            }
            Err(error) => front.fail(format!("a snapshot can not be written: {error}")),
        },
    }
    fuse.disarm();
}

/// Writes a snapshot, and waits for a descriptor if there is none: to make the snapshot again costs more.
fn write_patiently(disk: &mut RealDisk, made: &MadeSnapshot, front: &Replicated) -> io::Result<()> {
    let give_up_at = Instant::now() + SNAPSHOT_PATIENCE;
    let mut pause = DESCRIPTOR_PAUSE_MIN;
    loop {
        match write_snapshot(disk, &made.metadata, &made.data) {
            Err(error)
                if is_out_of_descriptors(&error)
                    && Instant::now() < give_up_at
                    && !front.is_over() =>
            {
                if pause == DESCRIPTOR_PAUSE_MIN {
                    tracing::warn!(%error, "a snapshot waits for a file descriptor");
                }
                std::thread::sleep(pause);
                pause = (pause * 2).min(DESCRIPTOR_PAUSE_MAX);
            }
            written => return written,
        }
    }
}

/// Ends the node if the thread panics before it is disarmed: half of a member is worse than none.
pub(super) struct FailNodeOnPanic<'a>(&'a Replicated);

impl<'a> FailNodeOnPanic<'a> {
    pub(super) fn new(front: &'a Replicated) -> Self {
        Self(front)
    }

    pub(super) fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for FailNodeOnPanic<'_> {
    fn drop(&mut self) {
        self.0.fail("a thread of the replica has panicked".into());
    }
}

/// Where fatal errors are noted, once.
pub(crate) type Fatal = OnceLock<String>;

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU64;

    use dflockd_core::{Limits, Span, Timestamp};
    use dflockd_testkit::Dir;
    use dflockd_testkit::eventually::tasks::eventually;
    use raft::eraftpb::{Message, MessageType};

    use super::*;
    use crate::clock::Clock;
    use crate::transport::{Credentials, Limits as TransportLimits, Secret, Version};
    use dflockd_replica::types::AutoRelease;

    /// A member made by hand, which knows the secret and says what it is told to.
    #[derive(Default)]
    struct Rogue {
        connected: AtomicU64,
    }

    impl Handler for Rogue {
        fn identity(&self) -> Identity {
            let cluster = Some([7; 16]);
            let node = "a".to_owned();
            Identity { cluster, node, raft_id: 1, disk: 1, witness: false, version: 1 }
        }

        fn former_identity(&self, _: &Identity) -> Option<Result<Identity, String>> {
            None
        }

        fn refused_by(&self, _: &Identity) {}

        fn admit(&self, _: &Identity) -> Result<(), String> {
            Ok(())
        }

        fn received(&self, _: u64, _: Lane, _: Bytes) {}

        fn reachable(&self, _: u64, _: Lane) {
            self.connected.fetch_add(1, Ordering::Relaxed);
        }

        fn unreachable(&self, _: u64, _: Lane, _: bool) {}

        fn bad_frame(&self, _: u64, _: Lane) {}

        fn stream_lost(&self, _: u64, _: Lane) {}
    }

    fn transport() -> TransportConfig {
        let secrets = vec![Secret::new(vec![1; 32]).unwrap()];
        TransportConfig {
            listen: "127.0.0.1:0".to_owned(),
            credentials: Credentials { secrets, tls: None },
            version_max: Version::Sealed,
            limits: TransportLimits::default(),
        }
    }

    /// GUARANTEES 41: two nodes that come to know their clusters while they shake hands do not talk to each other
    /// afterwards, because those may be two.
    #[test]
    fn who_presents_a_list_is_of_no_cluster() {
        let (list_id, cluster) = (Some([1; 16]), Some([2; 16]));
        let gate = |cluster, formed_as| Gate {
            front: std::sync::Weak::new(),
            who: Mutex::new(NodeIdentity { cluster, node: "a".into(), raft_id: 1, disk: 1 }),
            forming: Mutex::default(),
            list_id,
            formed_as: Mutex::new(formed_as),
            witness: false,
            version: 1,
        };
        let peer = |cluster| Identity {
            cluster,
            node: "b".into(),
            raft_id: 2,
            disk: 2,
            witness: false,
            version: 1,
        };
        assert!(gate(cluster, None).is_of_no_cluster(&peer(list_id)));
        assert!(gate(Some([3; 16]), cluster).is_of_no_cluster(&peer(list_id)));
        assert!(!gate(cluster, None).is_of_no_cluster(&peer(cluster)));
        assert!(!gate(cluster, None).is_of_no_cluster(&peer(None)), "it waits to be added");
        assert!(!gate(cluster, list_id).is_of_no_cluster(&peer(list_id)), "an older cluster");
        assert!(!gate(list_id, None).is_of_no_cluster(&peer(list_id)), "an older cluster");
    }

    #[test]
    fn a_start_follows_the_one_that_was_noted() {
        let noted = |starts: u32| next_start(Some(&starts.to_le_bytes().to_vec()));
        assert_eq!(next_start(None), Ok(1), "the first");
        assert_eq!(
            (noted(1), noted(Incarnation::START_MAX - 1)),
            (Ok(2), Ok(Incarnation::START_MAX))
        );
        for starts in [Incarnation::START_MAX, u32::MAX] {
            assert_eq!(noted(starts), Err(TOO_MANY_STARTS.to_owned()));
        }
        for bytes in [&[][..], &[7, 0, 0], &[7, 0, 0, 0, 0]] {
            let why = next_start(Some(&bytes.to_vec())).unwrap_err();
            assert!(why.contains("damaged"), "{bytes:?}: {why}");
        }
    }

    /// GUARANTEES 48: a node that waits to be added does not take a number that no member can have, and does not end
    /// because of it.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_number_that_no_member_can_have_is_refused() {
        let dir = Dir::new();
        let options = ClusterOptions {
            dir: dir.path("data"),
            transport: transport(),
            member: MemberOptions {
                node: "b".to_owned(),
                peer_addr: "127.0.0.1:1".to_owned(),
                client_addr: "127.0.0.1:2".to_owned(),
                formation: Formation::Join,
                witness: false,
                policy: Policy {
                    limits: Limits::default(),
                    auto_release: AutoRelease::Clean,
                    orphan_ttl: Span::ZERO,
                },
                election_timeout: Duration::from_secs(60),
                heartbeat_interval: Duration::from_secs(1),
                snapshot_entries: 1000,
                version: version::newest(),
            },
        };
        let joiner = Replicated::start(options, Clock::system()).await.unwrap();
        let rogue = Arc::new(Rogue::default());
        let handler = Arc::clone(&rogue) as Arc<dyn Handler>;
        let peer = Transport::start(transport(), handler).await.unwrap();
        let address = joiner.peer_addr().unwrap().to_string();
        peer.set_peers(vec![PeerAddress { raft_id: 2, node: "b".to_owned(), address }]);
        let connected = async || rogue.connected.load(Ordering::Relaxed) == 2;
        eventually("a connection", connected).await;
        for to in [Incarnation::RAFT_ID_MAX + 1, u64::MAX, 0, 2] {
            let mut message = Message { from: 1, to, term: 1, ..Message::default() };
            message.set_msg_type(MessageType::MsgHeartbeat);
            let frame = Frame::Raft { time: Timestamp(0), message }.encode();
            assert!(peer.send(2, Lane::Main, frame));
        }
        eventually("it takes the one that can be", async || joiner.view().raft_id == 2).await;
        let failed = tokio::time::timeout(Duration::ZERO, joiner.failed()).await;
        assert!(failed.is_err(), "{failed:?}");
        joiner.stop();
        peer.stop();
    }
}
