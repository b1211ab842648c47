//! Threads around a replica: the only place here that touches disk and sockets.
//!
//! Whoever turns to the [`Replica`] has its `Seat`: lets it take all that has come and decide, and hands out what is
//! to be done. `replica` is the thread that does so when time passes or something takes long. `log` writes and syncs
//! all that is queued at once, so one slow disk stops neither the clock nor the network. A snapshot has a thread of
//! its own while it is made. Peers are served by the runtime's threads.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::mpsc;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dflockd_core::Timestamp;
use raft::eraftpb::{ConfState, HardState, SnapshotMetadata};
use ring::digest;

use super::codec::{self, Frame};
use super::disk::RealDisk;
use super::log::{LogBatch, LogOptions, LogStore, Recovered, Room, write_snapshot};
use super::machine::Machine;
use super::transport::{Handler, Identity, Lane, PeerAddress, Transport, TransportConfig};
use super::types::{Bits128, Member, Policy, RaftId, Run, Start};
use super::{LogWrite, Outputs, RaftConfig, Replica, ReplicaConfig, SnapshotJob, TICK, note};
use crate::clock::unix_nanos;
use crate::replicated::{Input, Inputs, Replicated};
use crate::router::Pokes;

/// The newest form of entries and frames this program can read.
const VERSION: u32 = 1;
/// Bytes of log after which a snapshot is made.
const SNAPSHOT_BYTES: u64 = 64 << 20;

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

/// What a node is, kept with its data.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(super) struct Who {
    pub(super) cluster: Option<Bits128>,
    pub(super) node: String,
    pub(super) raft_id: RaftId,
    pub(super) disk: u64,
}

pub(super) const WHO: &[u8] = b"who";

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
    let io = |error: io::Error| format!("data directory {}: {error}", options.dir.display());

    let mut who = match recovered.notes.get(WHO) {
        Some(bytes) => codec::unpack::<Who>(bytes)
            .map_err(|error| format!("the node's identity in its data directory: {error}"))?,
        None => Who { cluster: None, node: options.node.clone(), raft_id: 0, disk: rand::random() },
    };
    if who.node != options.node {
        return Err(format!(
            "the data directory belongs to node {}, not to {}",
            who.node, options.node
        ));
    }
    let is_new = recovered.snapshot.is_none() && recovered.entries.is_empty();
    let beginning = if is_new { beginning(&options, &mut who) } else { None };
    let start = recovered
        .notes
        .get(note::START)
        .and_then(|bytes| bytes.as_slice().try_into().ok())
        .map_or(0, u32::from_le_bytes)
        + 1;
    if start > Run::START_MAX {
        return Err("this node was started too often; let a new one take its place".into());
    }
    let notes = vec![
        (WHO.to_vec(), codec::pack(&who)),
        (note::START.to_vec(), start.to_le_bytes().to_vec()),
    ];
    log.write(&LogBatch { notes, ..LogBatch::default() }).map_err(io)?;
    log.sync().map_err(io)?;
    if let Some((metadata, data)) = beginning {
        log.install_snapshot(&metadata, &data).map_err(io)?;
        let snapshot = super::log::StoredSnapshot { metadata, data, digest: [0; 32] };
        recovered.hard_state = HardState { commit: 1, term: 1, ..HardState::default() };
        recovered.snapshot = Some(snapshot);
    }

    let gate = Arc::new(Gate {
        front: Arc::downgrade(front),
        who: parking_lot::Mutex::new(who),
        witness: options.witness,
    });
    let transport = Transport::start(options.transport.clone(), gate.clone() as Arc<dyn Handler>)
        .await
        .map_err(|error| error.to_string())?;
    let seats = Seats {
        front: Arc::clone(front),
        gate,
        transport: Arc::clone(&transport),
        disk,
        start,
        options,
    };
    spawn("replica", move || seats.run(log, recovered))?;
    Ok(transport)
}

/// The identity of a new cluster's member and the state all its members begin with, if it is to be one.
fn beginning(options: &ClusterOptions, who: &mut Who) -> Option<(SnapshotMetadata, Bytes)> {
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

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
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
    who: parking_lot::Mutex<Who>,
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
            version: VERSION,
        }
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
            front.bring(Input::Frame { from, bytes: frame, bulk: lane == Lane::Bulk });
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
            front.give(Input::Unreachable { peer, refused });
        }
    }

    fn stream_lost(&self, _peer: u64, _lane: Lane) {}
}

/// A replica that takes part, and what whoever turns to it needs.
pub(crate) struct Seat {
    seats: Seats,
    replica: Replica,
    outputs: Outputs,
    jobs: mpsc::Sender<LogJob>,
    /// What it takes now; empty in between.
    pub(crate) inputs: Inputs,
}

impl Seat {
    /// Lets the replica take its inputs, and hands out what it wants. Says when it wants to look at the time.
    pub(crate) fn pass(
        &mut self,
        front: &Replicated,
        pokes: &mut Pokes,
    ) -> Result<Timestamp, String> {
        let Self { seats, replica, outputs, jobs, inputs } = self;
        let began = front.clock().now();
        replica.handle_time(began);
        front.feed(inputs, replica, outputs);
        replica.poll(outputs);
        front.gauges().turned(replica, began, front.clock().now());
        seats.hand_out(replica, outputs, jobs, pokes)?;
        Ok(replica.next_deadline())
    }
}

/// What is around a replica.
struct Seats {
    front: Arc<Replicated>,
    gate: Arc<Gate>,
    transport: Arc<Transport>,
    disk: RealDisk,
    start: u32,
    options: ClusterOptions,
}

/// A replica, and the frame that told it who it is, if one had to.
type Begun = (Replica, Option<(RaftId, Bytes)>);

/// What the log's thread is told.
enum LogJob {
    Write(LogWrite),
    SnapshotStored(SnapshotMetadata),
    CutBefore(u64),
    Note(Vec<u8>, Vec<u8>),
}

impl Seats {
    fn run(self, log: Log, recovered: Recovered) {
        let front = Arc::clone(&self.front);
        let bomb = Bomb::new(&front);
        if let Err(why) = self.take_part(log, recovered) {
            front.fail(why);
        }
        bomb.defuse();
    }

    fn take_part(self, log: Log, recovered: Recovered) -> Result<(), String> {
        let (jobs, queue) = mpsc::channel();
        let front = Arc::clone(&self.front);
        spawn("log", move || {
            let bomb = Bomb::new(&front);
            if let Err(error) = keep_log(log, &queue, &front) {
                front.fail(format!("the log can not be written: {error}"));
            }
            bomb.defuse();
        })?;
        let Some((mut replica, first)) = self.begin(recovered, &jobs)? else { return Ok(()) };
        self.meet(&replica);
        if let Some((from, bytes)) = first {
            replica.handle_frame(from, bytes);
        }
        let front = Arc::clone(&self.front);
        let (outputs, inputs) = (Outputs::default(), Inputs::default());
        front.attend(Box::new(Seat { seats: self, replica, outputs, jobs, inputs }));
        Ok(())
    }

    /// The replica, once it is known who this node is.
    fn begin(
        &self,
        recovered: Recovered,
        jobs: &mpsc::Sender<LogJob>,
    ) -> Result<Option<Begun>, String> {
        let mut raft_id = self.gate.who.lock().raft_id;
        let mut first = None;
        while raft_id == 0 {
            let Some(inputs) = self.front.wait_inputs(Duration::from_secs(1)) else {
                return Ok(None);
            };
            for input in inputs.others {
                if let Input::Job { id, .. } = input {
                    self.front.refuse_job(id);
                } else if let Input::Admin { id, .. } = input {
                    self.front.refuse_admin(id);
                } else if let Input::Frame { from, bytes, .. } = input
                    && let Ok(Frame::Raft { message, .. }) = Frame::decode(bytes.clone())
                    && first.is_none()
                {
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
        let _ = jobs.send(LogJob::Note(WHO.to_vec(), codec::pack(&who)));
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
            run: Run::new(raft_id, self.start),
            start: Start {
                disk: who.disk,
                client_addr: options.client_addr.clone(),
                version: VERSION,
                witness: options.witness,
            },
            snapshot_entries: options.snapshot_entries,
            snapshot_bytes: SNAPSHOT_BYTES,
        };
        let replica = Replica::new(config, recovered, self.front.clock().now())?;
        self.front.begin_run(replica.run());
        Ok(Some((replica, first)))
    }

    /// Tells the transport whom there is to talk to.
    fn meet(&self, replica: &Replica) {
        self.dial(replica.machine().members());
        if let Some(policy) = replica.machine().policy()
            && self.front.view().policy.as_ref() != Some(policy)
        {
            let differ = self.options.policy.differences(policy);
            if !differ.is_empty() {
                let settings = differ.join(", ");
                tracing::warn!(
                    settings,
                    "the cluster decides by other values than this node's flags"
                );
            }
        }
        self.front.set_members(replica);
    }

    fn dial(&self, members: &BTreeMap<RaftId, Member>) {
        let peers = members.iter().map(|(&raft_id, member)| PeerAddress {
            raft_id,
            node: member.node.clone(),
            address: member.peer_addr.clone(),
        });
        self.transport.set_peers(peers.collect());
    }

    /// Does what the replica wants.
    fn hand_out(
        &self,
        replica: &mut Replica,
        outputs: &mut Outputs,
        jobs: &mpsc::Sender<LogJob>,
        pokes: &mut Pokes,
    ) -> Result<(), String> {
        if !outputs.writes.is_empty() {
            self.front.set_writing();
        }
        // The log first: what follows happens while it is being written.
        for write in outputs.writes.drain(..) {
            // Nobody takes it if the log has failed, which is said elsewhere.
            let _ = jobs.send(LogJob::Write(write));
        }
        for frame in outputs.frames.drain(..) {
            let lane = if frame.bulk { Lane::Bulk } else { Lane::Main };
            self.transport.send(frame.to, lane, frame.bytes);
        }
        for (id, copy) in outputs.copies.drain(..) {
            self.front.hand_copy(id, copy);
        }
        let events = outputs.events.drain(..);
        let members_changed =
            self.front.route(events, replica, pokes, |members| self.dial(&members));
        if members_changed {
            self.meet(replica);
        }
        self.front.set_status(replica.status());
        if let Some(index) = outputs.cut_before.take() {
            let metadata = replica.snapshot_metadata().clone();
            let _ = jobs.send(LogJob::SnapshotStored(metadata));
            let _ = jobs.send(LogJob::CutBefore(index));
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
    let bomb = Bomb::new(front);
    match job.run() {
        Err(why) => front.fail(format!("a snapshot can not be made: {why}")),
        Ok(made) => match write_snapshot(&mut disk, &made.metadata, &made.data) {
            Ok(()) => front.give(Input::Snapshot(Some(made))),
            Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                tracing::warn!("no room for a snapshot");
                front.give(Input::Snapshot(None));
            }
            Err(error) => front.fail(format!("a snapshot can not be written: {error}")),
        },
    }
    bomb.defuse();
}

/// Writes and syncs all that is queued, again and again.
fn keep_log(mut log: Log, queue: &mpsc::Receiver<LogJob>, front: &Replicated) -> io::Result<()> {
    const LOOK: Duration = Duration::from_secs(1);
    let (mut low, mut looked) = (false, Instant::now());
    loop {
        let mut next = match queue.recv_timeout(LOOK) {
            Ok(job) => Some(job),
            Err(mpsc::RecvTimeoutError::Timeout) => None,
            Err(mpsc::RecvTimeoutError::Disconnected) => return log.sync(),
        };
        let (mut number, mut sync) = (0, false);
        while let Some(job) = next {
            match job {
                LogJob::Write(write) => {
                    if let Some(snapshot) = write.snapshot {
                        if snapshot.install {
                            log.install_snapshot(&snapshot.metadata, &snapshot.data)?;
                        } else {
                            match log.store_snapshot(&snapshot.metadata, &snapshot.data) {
                                // The older one, and the log behind it, will do.
                                Err(error) if error.kind() == io::ErrorKind::StorageFull => {}
                                stored => stored?,
                            }
                        }
                    }
                    log.write(&write.batch)?;
                    number = write.number;
                    sync |= write.sync;
                }
                LogJob::Note(key, value) => {
                    let notes = vec![(key, value)];
                    log.write(&LogBatch { notes, ..LogBatch::default() })?;
                    sync = true;
                }
                LogJob::SnapshotStored(metadata) => log.snapshot_stored(&metadata)?,
                LogJob::CutBefore(index) => log.cut_before(index)?,
            }
            next = queue.try_recv().ok();
        }
        if sync {
            let began = front.clock().now();
            log.sync()?;
            front.gauges().synced(front.clock().now().since(began), log.bytes());
        }
        if number > 0 {
            front.written(number);
        }
        if low && looked.elapsed() >= LOOK {
            looked = Instant::now();
            log.retry_room()?;
        }
        if (log.room() == Room::Low) != low {
            low = !low;
            front.give(Input::Room { low });
        }
    }
}

/// Whoever panics at the replica or its log takes the process along: half of a member is worse than none.
pub(crate) struct Bomb<'a>(&'a Replicated);

impl<'a> Bomb<'a> {
    pub(crate) fn new(front: &'a Replicated) -> Self {
        Self(front)
    }

    pub(crate) fn defuse(self) {
        std::mem::forget(self);
    }
}

impl Drop for Bomb<'_> {
    fn drop(&mut self) {
        self.0.fail("a thread of the replica has panicked".into());
    }
}

/// Where fatal errors are noted, once.
pub(crate) type Fatal = OnceLock<String>;
