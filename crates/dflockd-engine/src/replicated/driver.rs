//! Threads around a replica: the only place here that touches disk and sockets.
//!
//! Whoever turns to the [`Replica`] has its `Seat`: lets it take all that has come and decide, and hands out what
//! follows. Then it turns to the `Desk` and writes and syncs all that is there for the log, while others may turn to
//! the replica: a slow disk stops neither the clock nor the network. `replica` is the thread that does this when time
//! passes or something takes long; `log` is for a disk that turns out to be slow. A snapshot has a thread of its own
//! while it is made. Peers are served by the runtime's threads.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use bytes::Bytes;
use dflockd_core::{Span, Timestamp};
use parking_lot::{Condvar, Mutex};
use raft::eraftpb::{ConfState, HardState, SnapshotMetadata};
use ring::digest;

use crate::clock::{Clock, unix_nanos};
use crate::replicated::{Input, Inputs, Replicated};
use crate::router::PendingFlushes;
use crate::transport::{Handler, Identity, Lane, PeerAddress, Transport, TransportConfig};
use dflockd_replica::codec::{self, Frame};
use dflockd_replica::disk::{Disk, RealDisk, is_out_of_descriptors};
use dflockd_replica::log::{LogBatch, LogOptions, LogStore, Recovered, Room, write_snapshot};
use dflockd_replica::machine::Machine;
use dflockd_replica::types::{Bits128, Member, NodeIdentity, Policy, RaftId, Run, Start};
use dflockd_replica::{
    Gone, LogWrite, MadeSnapshot, Outputs, RaftConfig, Replica, ReplicaConfig, SnapshotJob, TICK,
    note, version,
};

/// Bytes of log after which a snapshot is made.
const SNAPSHOT_BYTES: u64 = 64 << 20;
/// Who needs the disk waits for it: to wake another thread for it and be woken again costs about as much as the disk.
/// But if that took so long,
const SLOW_DISK: Span = Span::from_millis(50);
/// then for so long the log's thread does the waiting.
const SLOW_DISK_PAUSE: Span = Span::from_secs(1);
/// How often the log's thread looks whether a full disk has room again.
const ROOM_LOOK: Duration = Duration::from_secs(1);
/// Pauses between attempts to open a file while the process has no descriptor for it: each is twice as long as the one
/// before.
const DESCRIPTOR_PAUSE_MIN: Duration = Duration::from_millis(10);
const DESCRIPTOR_PAUSE_MAX: Duration = Duration::from_millis(500);
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
    let desk = Arc::new(Desk::new(log, disk.clone()));
    front.set_desk(&desk);
    let seats = Seats {
        front: Arc::clone(front),
        gate,
        transport: Arc::clone(&transport),
        desk,
        disk,
        start,
        options,
    };
    spawn("replica", move || seats.run(recovered))?;
    Ok(transport)
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

    fn bad_frame(&self, _peer: u64, _lane: Lane) {
        if let Some(front) = self.front.upgrade() {
            front.gauges().bad_frames.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn stream_lost(&self, _peer: u64, _lane: Lane) {}
}

/// A replica that takes part, and what whoever turns to it needs.
pub(crate) struct Seat {
    seats: Seats,
    replica: Replica,
    outputs: Outputs,
    /// What it takes now; empty in between.
    pub(crate) inputs: Inputs,
}

impl Seat {
    /// Lets the replica take its inputs, and hands out what it wants. Says when it wants to look at the time.
    pub(crate) fn pass(
        &mut self,
        front: &Replicated,
        flushes: &mut PendingFlushes,
    ) -> Result<Timestamp, String> {
        let Self { seats, replica, outputs, inputs } = self;
        let began = front.clock().now();
        replica.handle_time(began);
        front.feed(inputs, replica, outputs);
        replica.poll(outputs);
        front.gauges().turned(replica, began, front.clock().now());
        seats.hand_out(replica, outputs, flushes)?;
        Ok(replica.next_deadline())
    }
}

/// What is around a replica.
struct Seats {
    front: Arc<Replicated>,
    gate: Arc<Gate>,
    transport: Arc<Transport>,
    desk: Arc<Desk>,
    disk: RealDisk,
    start: u32,
    options: ClusterOptions,
}

/// A replica, and the frame that told it who it is, if one had to.
type Begun = (Replica, Option<(RaftId, Bytes)>);

/// What there is to do for the log.
enum LogJob {
    Write(LogWrite),
    SnapshotStored(SnapshotMetadata),
    CutBefore(u64, Option<Gone>),
    Note(Vec<u8>, Vec<u8>),
}

impl LogJob {
    /// Whether it may take long.
    fn is_heavy(&self) -> bool {
        match self {
            Self::Write(write) => write.snapshot.is_some(),
            Self::SnapshotStored(_) | Self::CutBefore(..) => true,
            Self::Note(..) => false,
        }
    }

    /// Whether it counts only when it is durable.
    fn wants_sync(&self) -> bool {
        match self {
            Self::Write(write) => write.sync,
            Self::Note(..) => true,
            Self::SnapshotStored(_) | Self::CutBefore(..) => false,
        }
    }
}

/// Where the log is written, by one at a time: who finds it busy leaves, because the one who is at it looks again.
pub(crate) struct Desk {
    jobs: Mutex<Vec<LogJob>>,
    kept: Mutex<Kept>,
    /// The same directory.
    disk: RealDisk,
    /// For the log's thread.
    came: Condvar,
    /// Until then the disk is slow.
    slow_until: AtomicU64,
    /// The log waits for a descriptor, which is for its own thread: nobody else has to wait with it.
    starved: AtomicBool,
}

struct Kept {
    log: Log,
    /// As it was last told.
    room: Room,
    /// To be dropped when nobody waits for it.
    gone: Option<Gone>,
}

impl Desk {
    fn new(log: Log, disk: RealDisk) -> Self {
        Self {
            jobs: Mutex::default(),
            kept: Mutex::new(Kept { log, room: Room::Plenty, gone: None }),
            disk,
            came: Condvar::new(),
            slow_until: AtomicU64::new(0),
            starved: AtomicBool::new(false),
        }
    }

    /// To be followed by [`write`](Self::write).
    fn put(&self, jobs: impl IntoIterator<Item = LogJob>) {
        self.jobs.lock().extend(jobs);
    }

    /// Does all that is there, unless that is for somebody else. Who did something looks again afterwards.
    pub(crate) fn write(&self, front: &Replicated) -> io::Result<bool> {
        {
            let jobs = self.jobs.lock();
            if jobs.is_empty() {
                return Ok(false);
            }
            if !self.is_light(&jobs, front.clock()) {
                self.came.notify_one();
                return Ok(false);
            }
        }
        match self.kept.try_lock() {
            Some(mut kept) => self.work(&mut kept, front),
            None => Ok(false),
        }
    }

    /// Whether somebody should [`write`](Self::write). What is for the log's thread it is called for.
    pub(crate) fn wants_writer(&self, clock: &Clock) -> bool {
        let jobs = self.jobs.lock();
        if jobs.is_empty() {
            return false;
        }
        if !self.is_light(&jobs, clock) {
            self.came.notify_one();
            return false;
        }
        !self.kept.is_locked()
    }

    /// Whether jobs are for anybody and not for the log's thread.
    fn is_light(&self, jobs: &[LogJob], clock: &Clock) -> bool {
        let is_slow = clock.now().0 < self.slow_until.load(Ordering::Relaxed)
            || self.starved.load(Ordering::Relaxed);
        !is_slow && !jobs.iter().any(LogJob::is_heavy)
    }

    /// Does all that is there. True: the replica was told something.
    ///
    /// What can not be done for want of a descriptor goes back to the head of the queue, with all behind it; what was
    /// done before is told.
    fn work(&self, kept: &mut Kept, front: &Replicated) -> io::Result<bool> {
        let (mut number, mut sync, mut lacking) = (None, false, None);
        let jobs = std::mem::take(&mut *self.jobs.lock());
        let mut jobs = jobs.into_iter();
        while let Some(mut job) = jobs.next() {
            match kept.perform(&mut job) {
                Ok(()) => {
                    sync |= job.wants_sync();
                    if let LogJob::Write(write) = job {
                        number = Some(write.number);
                    }
                }
                Err(error) if is_out_of_descriptors(&error) => {
                    lacking = Some(error);
                    let left = [job].into_iter().chain(jobs);
                    self.jobs.lock().splice(..0, left);
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        if sync {
            let began = front.clock().now();
            kept.log.sync()?;
            let now = front.clock().now();
            front.gauges().synced(now.since(began), kept.log.bytes());
            if now.since(began) >= SLOW_DISK {
                self.slow_until.store((now + SLOW_DISK_PAUSE).0, Ordering::Relaxed);
            }
        }
        self.set_starved(lacking.as_ref());
        // Before somebody else is at it: what is told later must not be older.
        let room = kept.room_change();
        let is_told = number.is_some() || room.is_some();
        if is_told {
            front.written(number, room);
        }
        Ok(is_told)
    }

    /// Whether the log waits for a descriptor. Said once, and once more when it goes on.
    fn set_starved(&self, lacking: Option<&io::Error>) {
        let was_starved = self.starved.swap(lacking.is_some(), Ordering::Relaxed);
        match lacking {
            Some(error) if !was_starved => {
                tracing::error!(%error, "the log waits for a file descriptor");
                self.came.notify_one();
            }
            None if was_starved => tracing::info!("the log has its file descriptor and goes on"),
            Some(_) | None => {}
        }
    }

    /// What the log's thread does.
    fn attend(&self, front: &Replicated) -> io::Result<()> {
        let mut pause = DESCRIPTOR_PAUSE_MIN;
        while !front.is_over() {
            let is_idle = {
                let mut jobs = self.jobs.lock();
                jobs.is_empty() && self.came.wait_for(&mut jobs, ROOM_LOOK).timed_out()
            };
            if self.starved.load(Ordering::Relaxed) {
                std::thread::sleep(pause);
                pause = (pause * 2).min(DESCRIPTOR_PAUSE_MAX);
            } else {
                pause = DESCRIPTOR_PAUSE_MIN;
            }
            let mut kept = self.kept.lock();
            if is_idle && kept.room == Room::Low {
                match kept.log.retry_room() {
                    // There will be another look.
                    Err(error) if is_out_of_descriptors(&error) => {}
                    looked => drop(looked?),
                }
            }
            let is_told = self.work(&mut kept, front)?;
            drop(kept);
            if is_told {
                front.stir();
            }
            self.tidy_up()?;
        }
        self.kept.lock().log.sync()
    }

    /// Removes what is not needed any more, while others go on.
    fn tidy_up(&self) -> io::Result<()> {
        let (litter, gone) = {
            let mut kept = self.kept.lock();
            (kept.log.take_litter(), kept.gone.take())
        };
        drop(gone);
        if litter.is_empty() {
            return Ok(());
        }
        let mut disk = self.disk.clone();
        for name in litter {
            disk.remove(&name)?;
            disk.sync_dir()?;
        }
        self.kept.lock().log.swept();
        Ok(())
    }

    /// Calls the log's thread.
    pub(crate) fn call(&self) {
        // Not between its look at the queue and its sleep.
        drop(self.jobs.lock());
        self.came.notify_one();
    }
}

impl Kept {
    /// May be repeated if it [`is_out_of_descriptors`]. What is done of the job is taken from it.
    fn perform(&mut self, job: &mut LogJob) -> io::Result<()> {
        match job {
            LogJob::Write(write) => self.write(write),
            LogJob::Note(key, value) => {
                let notes = vec![(key.clone(), value.clone())];
                self.log.write(&LogBatch { notes, ..LogBatch::default() })
            }
            LogJob::SnapshotStored(metadata) => self.log.adopt(metadata),
            LogJob::CutBefore(index, gone) => {
                self.log.retire_before(*index)?;
                self.gone = gone.take();
                Ok(())
            }
        }
    }

    fn write(&mut self, write: &mut LogWrite) -> io::Result<()> {
        if let Some(snapshot) = &write.snapshot {
            if snapshot.install {
                self.log.install_snapshot(&snapshot.metadata, &snapshot.data)?;
            } else {
                match self.log.store_snapshot(&snapshot.metadata, &snapshot.data) {
                    // The older one, and the log behind it, will do.
                    Err(error) if is_passing(&error) => {}
                    stored => stored?,
                }
            }
            write.snapshot = None;
        }
        self.log.write(&write.batch)
    }

    fn room_change(&mut self) -> Option<Room> {
        let room = self.log.room();
        (std::mem::replace(&mut self.room, room) != room).then_some(room)
    }
}

pub(crate) fn log_failed(error: &io::Error) -> String {
    format!("the log can not be written: {error}")
}

impl Seats {
    fn run(self, recovered: Recovered) {
        let front = Arc::clone(&self.front);
        let bomb = Bomb::new(&front);
        if let Err(why) = self.take_part(recovered) {
            front.fail(why);
        }
        bomb.defuse();
    }

    fn take_part(self, recovered: Recovered) -> Result<(), String> {
        let (front, desk) = (Arc::clone(&self.front), Arc::clone(&self.desk));
        spawn("log", move || {
            let bomb = Bomb::new(&front);
            if let Err(error) = desk.attend(&front) {
                front.fail(log_failed(&error));
            }
            bomb.defuse();
        })?;
        let Some((mut replica, first)) = self.begin(recovered)? else { return Ok(()) };
        self.meet(&replica);
        if let Some((from, bytes)) = first {
            replica.handle_frame(from, bytes);
        }
        let front = Arc::clone(&self.front);
        let (outputs, inputs) = (Outputs::default(), Inputs::default());
        front.attend(Box::new(Seat { seats: self, replica, outputs, inputs }));
        Ok(())
    }

    /// The replica, once it is known who this node is.
    fn begin(&self, recovered: Recovered) -> Result<Option<Begun>, String> {
        let mut raft_id = self.gate.who.lock().raft_id;
        if raft_id > Run::RAFT_ID_MAX {
            return Err(format!(
                "the data directory belongs to member {raft_id}, which can not be"
            ));
        }
        let mut first = None;
        while raft_id == 0 {
            let Some(mut inputs) = self.front.wait_inputs(Duration::from_secs(1)) else {
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
        self.desk.put([LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&who))]);
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
        self.front.begin_run(replica.run());
        Ok(Some((replica, first)))
    }

    /// Takes the name that the cluster has drawn, and remembers it before anybody is told.
    fn take_name(&self, machine: &Machine) {
        let Some(formed_as) = machine.formed_as() else { return };
        *self.gate.formed_as.lock() = Some(formed_as);
        let mut who = self.gate.who.lock();
        if who.cluster != Some(machine.cluster()) {
            who.cluster = Some(machine.cluster());
            self.desk.put([LogJob::Note(note::IDENTITY.to_vec(), codec::pack(&*who))]);
        }
    }

    /// Tells the transport whom there is to talk to.
    fn meet(&self, replica: &Replica) {
        self.front.set_members(replica);
        self.take_name(replica.machine());
        // Before anybody is dialed: who reads this version seals frames, too.
        if replica.machine().version() >= version::SEALED {
            self.transport.seal();
        }
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
        flushes: &mut PendingFlushes,
    ) -> Result<(), String> {
        self.desk.put(outputs.writes.drain(..).map(LogJob::Write));
        for frame in outputs.frames.drain(..) {
            let lane = if frame.bulk { Lane::Bulk } else { Lane::Main };
            self.transport.send(frame.to, lane, frame.bytes);
        }
        for (id, copy) in outputs.copies.drain(..) {
            self.front.hand_copy(id, copy);
        }
        let events = outputs.events.drain(..);
        let members_changed =
            self.front.route(events, replica, flushes, |members| self.dial(&members));
        if members_changed {
            self.meet(replica);
        }
        self.front.set_status(replica.status());
        if let Some(index) = outputs.cut_before.take() {
            let metadata = replica.snapshot_metadata().clone();
            let gone = outputs.gone.take();
            self.desk.put([LogJob::SnapshotStored(metadata), LogJob::CutBefore(index, gone)]);
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
    // Nobody waits for it. This is for one thread on Linux, and for the whole process elsewhere.
    if cfg!(target_os = "linux") {
        let _ = rustix::process::nice(10);
    }
    match job.run() {
        Err(why) => front.fail(format!("a snapshot can not be made: {why}")),
        Ok(made) => match write_patiently(&mut disk, &made, front) {
            Ok(()) => {
                front.give(Input::Snapshot(Some(made)));
            }
            Err(error) if is_passing(&error) => {
                tracing::warn!(%error, "no room for a snapshot; the next one is tried later");
                front.give(Input::Snapshot(None));
            }
            Err(error) => front.fail(format!("a snapshot can not be written: {error}")),
        },
    }
    bomb.defuse();
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

/// Whether a snapshot could not be written for a reason that passes. The log goes on without it.
fn is_passing(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::StorageFull || is_out_of_descriptors(error)
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

#[cfg(test)]
mod tests {
    use dflockd_core::Limits;
    use dflockd_testkit::Dir;
    use dflockd_testkit::eventually::tasks::eventually;
    use raft::eraftpb::{Message, MessageType};

    use super::*;
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
