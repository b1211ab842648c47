//! A node around its replica: how it comes to a cluster, its threads, and what is done with the replica's outputs.
//!
//! The combiner drives a [`ReplicaDriver`]: it lets the [`Replica`] take all that has come and decide, hands writes to
//! the log thread and frames to the transport, and leaves notices for clients to the thread that delivers them. The
//! timer thread of the combiner is called `replica`. A snapshot has a thread of its own while it is made. Peers are
//! served by the runtime's threads.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use parking_lot::Mutex;
use raft::eraftpb::{ConfState, HardState, SnapshotMetadata};
use ring::digest;

use super::combiner::Drive;
use super::delivery::Notice;
use super::log_writer::{
    DESCRIPTOR_PAUSE_MAX, DESCRIPTOR_PAUSE_MIN, LogJob, LogWriter, is_passing, log_failed,
};
use super::{Input, Inputs, Replicated};
use crate::clock::unix_nanos;
use crate::transport::{Handler, Identity, Lane, PeerAddress, Transport, TransportConfig};
use dflockd_replica::codec::{self, Frame};
use dflockd_replica::disk::{RealDisk, is_out_of_descriptors};
use dflockd_replica::log::{LogBatch, LogOptions, LogStore, Recovered, write_snapshot};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Bits128, Member, NodeIdentity, Policy, RaftId, Run, Start};
use dflockd_replica::{
    MadeSnapshot, Outputs, RaftConfig, Replica, ReplicaConfig, SnapshotJob, TICK, TOO_MANY_STARTS,
    note, version,
};

/// Bytes of log after which a snapshot is made.
const SNAPSHOT_BYTES: u64 = 64 << 20;
/// How long a finished snapshot waits for a descriptor before it is given up.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(60);

/// How a node comes to a cluster if its data directory is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formation {
    /// It is the first and only member of a new one.
    Bootstrap,
    /// These begin together; name, peer address and client address, the node itself among them.
    Static(Vec<(String, String, String)>),
    /// It waits to be added.
    Join,
}

/// How to run a member.
pub struct ClusterOptions {
    /// Its data.
    pub dir: PathBuf,
    /// Its name.
    pub node: String,
    /// Its peer port and credentials.
    pub transport: TransportConfig,
    /// Where peers dial it, if it is the first.
    pub peer_addr: String,
    /// Where clients find it.
    pub client_addr: String,
    /// How it comes to a cluster.
    pub formation: Formation,
    /// Keeps the log, but no state.
    pub witness: bool,
    /// What all decide by, if it is the first leader.
    pub policy: Policy,
    /// Without a leader for so long, at random up to twice as long, it wants to lead.
    pub election_timeout: Duration,
    /// How often a leader shows that it is there.
    pub heartbeat_interval: Duration,
    /// Entries between snapshots.
    pub snapshot_entries: u64,
}

type Log = LogStore<RealDisk>;

/// Opens the data directory and begins to take part. Must be called inside a runtime.
///
/// # Errors
///
/// If the directory, the port or the credentials can not be used.
pub(crate) async fn start(
    front: &Arc<Replicated>,
    options: ClusterOptions,
) -> Result<Arc<Transport>, String> {
    let disk = RealDisk::open(&options.dir)
        .map_err(|error| format!("data directory {}: {error}", options.dir.display()))?;
    let (mut log, mut recovered) = LogStore::open(disk.clone(), LogOptions::default())
        .map_err(|error| format!("data directory {}: {error}", options.dir.display()))?;
    version::check(&recovered)
        .map_err(|why| format!("data directory {}: {why}", options.dir.display()))?;
    let io = |error: io::Error| format!("data directory {}: {error}", options.dir.display());

    let mut who = match recovered.notes.get(note::IDENTITY) {
        Some(bytes) => codec::unpack::<NodeIdentity>(bytes)
            .map_err(|error| format!("the node's identity in its data directory: {error}"))?,
        None => NodeIdentity {
            cluster: None,
            node: options.node.clone(),
            raft_id: 0,
            disk: rand::random(),
        },
    };
    if who.node != options.node {
        return Err(format!(
            "the data directory belongs to node {}, not to {}",
            who.node, options.node
        ));
    }
    let is_new = recovered.snapshot.is_none() && recovered.entries.is_empty();
    let beginning = if is_new { beginning(&options, &mut who) } else { None };
    let start = next_start(recovered.notes.get(note::START))
        .map_err(|why| format!("data directory {}: {why}", options.dir.display()))?;
    if who.raft_id > Run::RAFT_ID_MAX {
        return Err(format!(
            "the data directory belongs to member {}, which can not be",
            who.raft_id
        ));
    }
    if who.raft_id != 0 {
        // Before the first client can be there: what it asks for waits in the queue until the replica takes part.
        front.begin_run(Run::new(who.raft_id, start));
    }
    let notes = vec![
        (note::IDENTITY.to_vec(), codec::pack(&who)),
        (note::START.to_vec(), start.to_le_bytes().to_vec()),
    ];
    log.write(&LogBatch { notes, ..LogBatch::default() }).map_err(io)?;
    log.sync().map_err(io)?;
    if let Some((metadata, data)) = beginning {
        log.install_snapshot(&metadata, &data).map_err(io)?;
        let snapshot = dflockd_replica::log::StoredSnapshot { metadata, data, digest: [0; 32] };
        recovered.hard_state = HardState { commit: 1, term: 1, ..HardState::default() };
        recovered.snapshot = Some(snapshot);
    }

    let gate = Arc::new(Gate {
        front: Arc::downgrade(front),
        who: Mutex::new(who),
        formed_as: Mutex::default(),
        witness: options.witness,
    });
    let transport = Transport::start(options.transport.clone(), gate.clone() as Arc<dyn Handler>)
        .await
        .map_err(|error| error.to_string())?;
    if version::is_used(&recovered.entries, version::SEALED) {
        transport.seal();
    }
    let site = Site {
        front: Arc::clone(front),
        gate,
        transport: Arc::clone(&transport),
        log_writer: Arc::clone(&front.log_writer),
        disk,
        start,
        options,
    };
    spawn("replica", move || site.run(log, recovered))?;
    Ok(transport)
}

/// The number of this start, from the note of the last one. A note that can not be read is damage: if it counted as
/// none, a run would be used twice, and what the earlier one had sent would be taken for that of this one.
fn next_start(noted: Option<&Vec<u8>>) -> Result<u32, String> {
    let Some(noted) = noted else { return Ok(1) };
    let starts = <[u8; 4]>::try_from(noted.as_slice()).map(u32::from_le_bytes).map_err(|_| {
        let bytes = noted.len();
        format!(
            "the count of starts is damaged: {bytes} bytes instead of 4; remove this node from the cluster and let it \
             join under a new id with an empty directory, or restore a backup"
        )
    })?;
    if starts >= Run::START_MAX {
        return Err(TOO_MANY_STARTS.into());
    }
    Ok(starts + 1)
}

/// The identity of a new cluster's member and the state all its members begin with, if it is to be one.
fn beginning(
    options: &ClusterOptions,
    who: &mut NodeIdentity,
) -> Option<(SnapshotMetadata, Bytes)> {
    let peers = match &options.formation {
        Formation::Join => return None,
        Formation::Bootstrap => {
            who.cluster.get_or_insert_with(rand::random);
            vec![(options.node.clone(), options.peer_addr.clone(), options.client_addr.clone())]
        }
        Formation::Static(peers) => {
            let mut peers = peers.clone();
            peers.sort();
            let mut hash = digest::Context::new(&digest::SHA256);
            for (node, peer_addr, _) in &peers {
                hash.update(format!("{node}={peer_addr},").as_bytes());
            }
            let digest = hash.finish();
            who.cluster = digest.as_ref()[..16].try_into().ok();
            peers
        }
    };
    let mut members = BTreeMap::new();
    for (raft_id, (node, peer_addr, client_addr)) in (1..).zip(peers) {
        if node == options.node {
            who.raft_id = raft_id;
        }
        let member = Member { node, peer_addr, client_addr, witness: false, disk: None };
        members.insert(raft_id, member);
    }
    let conf_state = ConfState { voters: members.keys().copied().collect(), ..Default::default() };
    let mut metadata = SnapshotMetadata { index: 1, term: 1, ..Default::default() };
    metadata.set_conf_state(conf_state);
    let machine = Machine::new(who.cluster?, members);
    Some((metadata, Bytes::from(machine.snapshot())))
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
struct Gate {
    front: std::sync::Weak<Replicated>,
    who: Mutex<NodeIdentity>,
    /// The name that the cluster began with, once it has another one and this node knows both.
    formed_as: Mutex<Option<Bits128>>,
    witness: bool,
}

impl Handler for Gate {
    fn identity(&self) -> Identity {
        let who = self.who.lock();
        Identity {
            cluster: who.cluster,
            node: who.node.clone(),
            raft_id: who.raft_id,
            disk: who.disk,
            witness: self.witness,
            version: version::newest(),
        }
    }

    fn former_identity(&self, peer: &Identity) -> Option<Result<Identity, String>> {
        let (formed_as, ours) = (*self.formed_as.lock(), self.identity());
        if formed_as.is_none() || peer.cluster != formed_as || formed_as == ours.cluster {
            return None;
        }
        let front = self.front.upgrade()?;
        Some(front.admit_known(peer).map(|()| Identity { cluster: formed_as, ..ours }))
    }

    fn admit(&self, peer: &Identity) -> Result<(), String> {
        let Some(front) = self.front.upgrade() else { return Err("shutting down".into()) };
        front.admit(peer)?;
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
    site: Site,
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
        let Self { site, replica, outputs, notices, inputs } = self;
        let front = Arc::clone(&site.front);
        let fuse = FailNodeOnPanic::new(&front);
        let began = front.clock().now();
        replica.handle_time(began);
        inputs.feed(replica, outputs);
        replica.poll(outputs);
        front.gauges().turned(replica, began, front.clock().now());
        if let Err(why) = site.hand_out(replica, outputs, notices) {
            front.fail(why);
        }
        fuse.disarm();
        replica.next_deadline().0
    }
}

/// What is around a replica.
struct Site {
    front: Arc<Replicated>,
    gate: Arc<Gate>,
    transport: Arc<Transport>,
    log_writer: Arc<LogWriter>,
    disk: RealDisk,
    start: u32,
    options: ClusterOptions,
}

/// A replica, and the frame that told it who it is, if one had to.
type Begun = (Replica, Option<(RaftId, Bytes)>);

impl Site {
    fn run(self, log: Log, recovered: Recovered) {
        let front = Arc::clone(&self.front);
        let fuse = FailNodeOnPanic::new(&front);
        if let Err(why) = self.take_part(log, recovered) {
            front.fail(why);
        }
        fuse.disarm();
    }

    fn take_part(self, log: Log, recovered: Recovered) -> Result<(), String> {
        let (front, writer) = (Arc::clone(&self.front), Arc::clone(&self.log_writer));
        let disk = self.disk.clone();
        spawn("log", move || {
            let fuse = FailNodeOnPanic::new(&front);
            if let Err(error) = writer.run(log, &disk, &front) {
                front.fail(log_failed(&error));
            }
            fuse.disarm();
        })?;
        let Some((mut replica, first)) = self.begin(recovered)? else { return Ok(()) };
        self.meet(&replica);
        if let Some((from, bytes)) = first {
            replica.handle_frame(from, bytes);
        }
        let front = Arc::clone(&self.front);
        let (outputs, inputs) = (Outputs::default(), Inputs::default());
        front.run(ReplicaDriver { site: self, replica, outputs, notices: Vec::new(), inputs });
        Ok(())
    }

    /// The replica, once it is known who this node is.
    fn begin(&self, recovered: Recovered) -> Result<Option<Begun>, String> {
        let mut raft_id = self.gate.who.lock().raft_id;
        let mut first = None;
        while raft_id == 0 {
            let Some(mut inputs) = self.front.wait_for_work(Duration::from_secs(1)) else {
                return Ok(None);
            };
            for input in inputs.take_others() {
                if let Input::Job { id, .. } = input {
                    self.front.refuse_job(id);
                } else if let Input::Admin { id, .. } = input {
                    self.front.refuse_admin(id);
                } else if let Input::Frame { from, bytes, .. } = input
                    && let Ok(Frame::Raft { message, .. }) = Frame::decode(bytes.clone())
                    && first.is_none()
                {
                    if !(1..=Run::RAFT_ID_MAX).contains(&message.to) {
                        let to = message.to;
                        tracing::warn!(
                            from,
                            to,
                            "a peer calls this node by a number that no member has"
                        );
                        continue;
                    }
                    raft_id = message.to;
                    first = Some((from, bytes));
                }
            }
        }
        let who = {
            let mut who = self.gate.who.lock();
            who.raft_id = raft_id;
            who.clone()
        };
        self.log_writer.put([LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&who))]);
        let options = &self.options;
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
                seed: rand::random(),
            },
            witness: options.witness,
            policy: options.policy.clone(),
            fence: unix_nanos(),
            seed: rand::random(),
            cluster: rand::random(),
            run: Run::new(raft_id, self.start),
            start: Start {
                disk: who.disk,
                client_addr: options.client_addr.clone(),
                version: version::newest(),
                witness: options.witness,
            },
            snapshot_entries: options.snapshot_entries,
            snapshot_bytes: SNAPSHOT_BYTES,
        };
        let replica = Replica::new(config, recovered, self.front.clock().now())?;
        if first.is_some() {
            self.front.begin_run(replica.run());
        }
        Ok(Some((replica, first)))
    }

    /// Takes the name that the cluster has drawn, and remembers it before anybody is told.
    fn take_name(&self, machine: &Machine) {
        let Some(formed_as) = machine.formed_as() else { return };
        *self.gate.formed_as.lock() = Some(formed_as);
        let mut who = self.gate.who.lock();
        if who.cluster != Some(machine.cluster()) {
            who.cluster = Some(machine.cluster());
            self.log_writer.put([LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&*who))]);
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
            self.transport.seal();
        }
        self.dial(machine.members());
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
        self.transport.set_peers(peers.collect());
    }

    /// Does what the replica wants. What is for the log is put there and done later: the peers work meanwhile.
    fn hand_out(
        &self,
        replica: &mut Replica,
        outputs: &mut Outputs,
        notices: &mut Vec<Notice>,
    ) -> Result<(), String> {
        self.log_writer.put(outputs.writes.drain(..).map(LogJob::Write));
        for frame in outputs.frames.drain(..) {
            let lane = if frame.bulk { Lane::Bulk } else { Lane::Main };
            self.transport.send(frame.to, lane, frame.bytes);
        }
        for (id, copy) in outputs.copies.drain(..) {
            self.front.hand_copy(id, copy);
        }
        let events = outputs.events.drain(..);
        let members_changed =
            self.front.route(events, replica, notices, |members| self.dial(&members));
        if members_changed {
            self.meet(replica);
        }
        self.front.set_status(replica.status());
        if let Some(index) = outputs.cut_before.take() {
            let metadata = replica.snapshot_metadata().clone();
            let gone = outputs.gone.take();
            self.log_writer
                .put([LogJob::SnapshotStored(metadata), LogJob::TruncateBefore(index, gone)]);
        }
        if let Some(job) = outputs.snapshot_job.take() {
            let (front, disk) = (Arc::clone(&self.front), self.disk.clone());
            spawn("snapshot", move || make_snapshot(job, disk, &front))?;
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
                front.enqueue(Input::Snapshot(Some(made)));
            }
            Err(error) if is_passing(&error) => {
                tracing::warn!(%error, "no room for a snapshot; the next one is tried later");
                front.enqueue(Input::Snapshot(None));
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

    #[test]
    fn a_start_follows_the_one_that_was_noted() {
        let noted = |starts: u32| next_start(Some(&starts.to_le_bytes().to_vec()));
        assert_eq!(next_start(None), Ok(1), "the first");
        assert_eq!((noted(1), noted(Run::START_MAX - 1)), (Ok(2), Ok(Run::START_MAX)));
        for starts in [Run::START_MAX, u32::MAX] {
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
            node: "b".to_owned(),
            transport: transport(),
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
        };
        let joiner = Replicated::start(options, Clock::system()).await.unwrap();
        let rogue = Arc::new(Rogue::default());
        let handler = Arc::clone(&rogue) as Arc<dyn Handler>;
        let peer = Transport::start(transport(), handler).await.unwrap();
        let address = joiner.peer_addr().unwrap().to_string();
        peer.set_peers(vec![PeerAddress { raft_id: 2, node: "b".to_owned(), address }]);
        let connected = async || rogue.connected.load(Ordering::Relaxed) == 2;
        eventually("a connection", connected).await;
        for to in [Run::RAFT_ID_MAX + 1, u64::MAX, 0, 2] {
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
