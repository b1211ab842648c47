//! A data directory without its node: looking into it, a backup made into a new cluster, and the last member made into
//! one.
//!
//! A cluster that begins again is another cluster: it has a new id, so that members of the old one are refused. Nobody
//! knows what was granted after the backup, or by members that are gone. So all sessions and holds end, fences go on
//! beyond anything that can have been given out, and nothing is granted until every lease of before has ended.
//!
//! A backup, or the last member's directory, becomes a cluster with one voter. Fences go on from the higher of state
//! and wall clock plus 2^40, and grants stay closed for the longest lease. `Store::begin_anew` and
//! `Machine::begin_anew` make the state, and a snapshot behind the log makes it durable.

use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use dflockd_core::bugs::{Bug, bug};
use dflockd_core::{SessionId, Span};
use raft::eraftpb::{ConfState, SnapshotMetadata};
use ring::digest::{SHA256, digest};
use serde::{Deserialize, Serialize};

use crate::chance::Chance;
use crate::clock::unix_nanos;
use dflockd_replica::disk::{Disk, RealDisk};
use dflockd_replica::log::inspect::{self, Inspection};
use dflockd_replica::log::{LogBatch, LogOptions, LogStore};
use dflockd_replica::machine::{Event, Machine};
use dflockd_replica::types::{Bits128, Incarnation, Member, NodeIdentity, ProposalBody, RaftId};
use dflockd_replica::{StateCopy, apply_entry, codec, note};

/// So many fences are skipped, beside what the clock says: more than a cluster gives out in a year of 30,000 grants a
/// second.
pub const FENCE_MARGIN: u64 = 1 << 40;

/// Why there is nothing to begin with.
const NO_MEMBER: &str = "it holds no member of a cluster";
/// Why a state is not used. It has no policy, so nobody could tell how long old leases may last.
const NOT_BEGUN: &str =
    "it is of a cluster that has not begun: nothing was done in it that could go on";

/// The first bytes of a backup.
const MAGIC: &[u8; 8] = b"dflkback";
const BACKUP_VERSION: u32 = 1;
const DIGEST_BYTES: usize = 32;
/// Longer is no head of a backup.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// What stands before the state in a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Head {
    cluster: Bits128,
    index: u64,
    term: u64,
    /// Unix time in nanoseconds.
    made_at: u64,
    node: String,
}

/// Writes a copy of the state as the bytes of a backup file.
///
/// | Bytes | Field |
/// | --- | --- |
/// | 8 | magic `dflkback` |
/// | 4 | version, 1 |
/// | 4 | length of the head |
/// | … | head, `postcard`: cluster, index, term, time, node |
/// | … | the state |
/// | 32 | SHA-256 of all before |
#[must_use]
pub fn write_backup(cluster: Bits128, node: &str, copy: &StateCopy) -> Bytes {
    let (index, term) = (copy.index, copy.term);
    let head = Head { cluster, index, term, made_at: unix_nanos(), node: node.to_owned() };
    let head = codec::pack(&head);
    let mut bytes = Vec::with_capacity(copy.data.len() + head.len() + 64);
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&BACKUP_VERSION.to_le_bytes());
    let length = u32::try_from(head.len()).expect("names are short");
    bytes.extend_from_slice(&length.to_le_bytes());
    bytes.extend_from_slice(&head);
    bytes.extend_from_slice(&copy.data);
    let digest = digest(&SHA256, &bytes);
    bytes.extend_from_slice(digest.as_ref());
    bytes.into()
}

fn read_backup(bytes: &[u8]) -> Result<(Head, &[u8]), String> {
    let Some((content, told)) = bytes.split_at_checked(bytes.len().saturating_sub(DIGEST_BYTES))
    else {
        return Err("it is too short".into());
    };
    let Some((magic, rest)) = content.split_at_checked(MAGIC.len()) else {
        return Err("it is too short".into());
    };
    if magic != MAGIC {
        return Err("it is not a backup of dflockd".into());
    }
    let Some((&numbers, rest)) = rest.split_first_chunk::<8>() else {
        return Err("it is too short".into());
    };
    let [version, length] = [&numbers[..4], &numbers[4..]]
        .map(|four| u32::from_le_bytes(four.try_into().expect("four bytes")));
    if version != BACKUP_VERSION {
        return Err(format!("it has version {version}, which this server does not know"));
    }
    if digest(&SHA256, content).as_ref() != told {
        return Err("its digest is wrong: it is damaged or not complete".into());
    }
    let length = usize::try_from(length).ok().filter(|length| *length <= HEAD_BYTES_MAX);
    let Some((head, data)) = length.and_then(|length| rest.split_at_checked(length)) else {
        return Err("its head is too long".into());
    };
    let head = codec::unpack(head).map_err(|error| format!("its head: {error}"))?;
    Ok((head, data))
}

/// Which member the new cluster begins with.
#[derive(Clone, Debug)]
pub struct Beginning {
    /// The name of the member.
    pub node: String,
    /// Where peers will dial the member.
    pub peer_addr: String,
    /// Where clients find the member, until it says so itself.
    pub client_addr: String,
    /// How long nothing is granted.
    pub delay: Delay,
}

/// How long nothing is granted, if not for the longest lease that is known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delay {
    /// Not less than this.
    pub min: Span,
    /// Not more than this, although somebody may then still believe in a lock that is granted again.
    pub max: Option<Span>,
}

/// What was made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Begun {
    /// The new cluster.
    pub cluster: Bits128,
    /// The old one.
    pub was: Bits128,
    /// The last entry of the old one that is in it.
    pub index: u64,
    /// The first fence.
    pub fence: u64,
    /// How long nothing is granted, once the node leads.
    pub delay: Span,
    /// How long it would have to be for every lease of before to have ended.
    pub delay_safe: Span,
    /// Sessions that ended.
    pub sessions: usize,
    /// Members that are no longer.
    pub dropped: Vec<String>,
    /// When the backup was made, in nanoseconds of Unix time; 0 if it was none.
    pub made_at: u64,
}

/// Makes a data directory for the first member of a new cluster, with the state of a backup.
///
/// # Errors
///
/// If the file or the directory can not be used, as a text for people.
pub fn restore(dir: &Path, backup: &[u8], beginning: &Beginning) -> Result<Begun, String> {
    let backup = Backup::read(backup)?;
    if dir.is_dir() && dir.read_dir().map_err(|error| failed(dir, &error))?.next().is_some() {
        return Err(format!(
            "{} is not empty; a restore begins a new node and never writes over one",
            dir.display()
        ));
    }
    let disk = RealDisk::open(dir).map_err(|error| failed(dir, &error))?;
    let log = LogOptions::default();
    let around = Around { log, chance: &Chance::System, unix_nanos: unix_nanos() };
    backup.put(disk, beginning, &around).map_err(|why| format!("{}: {why}", dir.display()))
}

/// What a new cluster needs of the world around it.
pub(crate) struct Around<'a> {
    /// How its log is kept.
    pub(crate) log: LogOptions,
    /// Where its id comes from.
    pub(crate) chance: &'a Chance,
    /// The wall clock.
    pub(crate) unix_nanos: u64,
}

/// A backup that was read.
pub(crate) struct Backup {
    head: Head,
    machine: Machine,
}

impl Backup {
    /// Reads the bytes of a backup file.
    ///
    /// # Errors
    ///
    /// If they are no backup that a cluster can begin with.
    pub(crate) fn read(bytes: &[u8]) -> Result<Self, String> {
        let named = |why| format!("the backup: {why}");
        let (head, data) = read_backup(bytes).map_err(named)?;
        let machine = Machine::restore(data, false).map_err(named)?;
        if machine.store().is_none() {
            return Err(named(NOT_BEGUN.into()));
        }
        if machine.next_raft_id() > Incarnation::RAFT_ID_MAX {
            return Err(named("no member numbers are left".into()));
        }
        Ok(Self { head, machine })
    }

    /// Makes an empty data directory that of the first member of a new cluster.
    ///
    /// # Errors
    ///
    /// If the directory can not be used.
    pub(crate) fn put<D: Disk>(
        self,
        disk: D,
        beginning: &Beginning,
        around: &Around<'_>,
    ) -> Result<Begun, String> {
        let Self { head, mut machine } = self;
        let (mut log, _) =
            LogStore::open(disk, around.log.clone()).map_err(|error| error.to_string())?;
        let who = NodeIdentity {
            cluster: None,
            node: beginning.node.clone(),
            raft_id: machine.next_raft_id(),
            disk: around.chance.draw(),
        };
        let mut begun = begin(&mut machine, &who, beginning, head.index, around);
        begun.made_at = head.made_at;
        let position = (head.index + 1, head.term + 1);
        write(&mut log, &machine, who, begun.cluster, position)
            .map_err(|error| error.to_string())?;
        Ok(begun)
    }
}

/// Makes a cluster of its own of the one member whose directory this is.
///
/// # Errors
///
/// If the directory can not be used, as a text for people: a node runs in it, it is damaged, or it is a witness's.
pub fn force_new(dir: &Path, delay: Delay, dry_run: bool) -> Result<Begun, String> {
    if !dir.is_dir() {
        return Err(format!("{} is no directory", dir.display()));
    }
    // To open it would make a log where there is none.
    let names = ReadOnlyDisk(dir.to_owned()).list().map_err(|error| failed(dir, &error))?;
    if !names.iter().any(|name| name.starts_with("log-") || name.starts_with("snapshot-")) {
        return Err(format!("{}: {NO_MEMBER}", dir.display()));
    }
    let disk = RealDisk::open(dir).map_err(|error| failed(dir, &error))?;
    let log = LogOptions::default();
    let around = Around { log, chance: &Chance::System, unix_nanos: unix_nanos() };
    force_new_on(disk, delay, dry_run, &around).map_err(|why| format!("{}: {why}", dir.display()))
}

/// Makes a cluster of its own of the one member whose directory this is.
///
/// # Errors
///
/// If the directory can not be used.
pub(crate) fn force_new_on<D: Disk>(
    disk: D,
    delay: Delay,
    dry_run: bool,
    around: &Around<'_>,
) -> Result<Begun, String> {
    let (mut log, recovered) =
        LogStore::open(disk, around.log.clone()).map_err(|error| error.to_string())?;
    let who = recovered.notes.get(note::IDENTITY).ok_or(NO_MEMBER)?;
    let who: NodeIdentity =
        codec::unpack(who).map_err(|error| format!("the node's identity: {error}"))?;
    let snapshot = recovered.snapshot.ok_or(NO_MEMBER)?;
    let mut machine = Machine::restore(&snapshot.data, false)?;
    let (mut index, mut term) = (snapshot.metadata.index, snapshot.metadata.term);
    let mut events: Vec<Event> = Vec::new();
    // Also what was not known to be committed: the members that could say so are gone.
    for entry in recovered.entries.iter().filter(|entry| entry.index > snapshot.metadata.index) {
        apply_entry(&mut machine, entry, &mut events)
            .map_err(|why| format!("entry {}: {why}", entry.index))?;
        events.clear();
        (index, term) = (entry.index, entry.term);
    }
    let Some(member) = machine.members().get(&who.raft_id).cloned() else {
        return Err(format!("{} was removed from its cluster", who.node));
    };
    if member.witness {
        return Err(format!(
            "{} is a witness: it has the log, but no state to begin with; use a full member, or a backup",
            who.node
        ));
    }
    if machine.store().is_none() {
        return Err(NOT_BEGUN.into());
    }
    let Member { node, peer_addr, client_addr, .. } = member;
    let beginning = Beginning { node, peer_addr, client_addr, delay };
    let begun = begin(&mut machine, &who, &beginning, index, around);
    if dry_run {
        return Ok(begun);
    }
    let position = (index + 1, term.max(recovered.hard_state.term) + 1);
    write(&mut log, &machine, who, begun.cluster, position).map_err(|error| error.to_string())?;
    Ok(begun)
}

/// Makes the state that of a new cluster.
fn begin(
    machine: &mut Machine,
    who: &NodeIdentity,
    beginning: &Beginning,
    index: u64,
    around: &Around<'_>,
) -> Begun {
    let was = machine.cluster();
    let cluster: Bits128 = if bug(Bug::ClusterIdKept) { was } else { around.chance.draw() };
    let names = machine.members().values().map(|member| member.node.clone());
    let dropped = names.filter(|node| *node != who.node).collect();
    let limits = machine.policy().map(|policy| policy.limits.clone()).unwrap_or_default();
    let longest = machine.store().map_or(Span::ZERO, |store| store.longest_lease());
    let sessions = machine
        .store()
        .map_or(0, |store| store.session_ids(SessionId(0)..=SessionId(u64::MAX)).len());
    // A change of leader may have made it longer.
    let longest = Span(longest.max(limits.default_lease).0.saturating_add(limits.failover_grace.0));
    let delay_safe = longest;
    let Delay { min, max } = beginning.delay;
    let delay = longest.max(min).min(max.unwrap_or(Span(u64::MAX)));
    let fence = machine.fence_next().max(around.unix_nanos).saturating_add(FENCE_MARGIN);
    let member = Member {
        node: who.node.clone(),
        peer_addr: beginning.peer_addr.clone(),
        client_addr: beginning.client_addr.clone(),
        witness: false,
        disk: Some(who.disk),
    };
    machine.begin_anew(cluster, who.raft_id, member, fence, (delay, max));
    Begun { cluster, was, index, fence, delay, delay_safe, sessions, dropped, made_at: 0 }
}

/// Puts the state into the directory. If this is interrupted it can be done again.
fn write<D: Disk>(
    log: &mut LogStore<D>,
    machine: &Machine,
    mut who: NodeIdentity,
    cluster: Bits128,
    (index, term): (u64, u64),
) -> io::Result<()> {
    let mut metadata = SnapshotMetadata { index, term, ..Default::default() };
    metadata.set_conf_state(ConfState { voters: vec![who.raft_id], ..Default::default() });
    who.cluster = Some(cluster);
    log.install_snapshot(&metadata, &machine.snapshot())?;
    // What is cut belonged to another log.
    let notes =
        vec![(note::IDENTITY.to_vec(), codec::pack(&who)), (note::NON_VOTING.to_vec(), Vec::new())];
    log.write(&LogBatch { notes, ..LogBatch::default() })?;
    log.sync()
}

fn failed(dir: &Path, error: &io::Error) -> String {
    format!("{}: {error}", dir.display())
}

// ---- Looking ----

/// Who the node of a data directory is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The name of the node.
    pub node: String,
    /// The number of the node in its cluster, 0 while it has none.
    pub raft_id: RaftId,
    /// The name of the cluster of the node, once it has one.
    pub cluster: Option<Bits128>,
    /// How often the node was started.
    pub starts: u32,
}

/// What is in a data directory.
pub struct Report {
    /// The node, as far as it could be read.
    pub known: Option<Known>,
    /// The state of the newest snapshot, if it can be read.
    pub machine: Option<Result<Machine, String>>,
    /// The files.
    pub files: Inspection,
}

/// Looks into a data directory, and changes nothing.
///
/// # Errors
///
/// If it can not be read, or if a node runs in it.
pub fn look(dir: &Path) -> io::Result<Report> {
    let disk = ReadOnlyDisk(dir.to_owned());
    if let Ok(lock) = std::fs::File::open(dir.join("LOCK"))
        && matches!(lock.try_lock_shared(), Err(std::fs::TryLockError::WouldBlock))
    {
        let message = "a node runs in it; stop the node, or look at a copy";
        return Err(io::Error::new(ErrorKind::WouldBlock, message));
    }
    let files = inspect::inspect(&disk)?;
    let mut known = None;
    let mut machine = None;
    if let Ok(Some(log)) = &files.log {
        let who = log
            .notes
            .get(note::IDENTITY)
            .and_then(|bytes| codec::unpack::<NodeIdentity>(bytes).ok());
        let starts = log.notes.get(note::START).and_then(|bytes| bytes.as_slice().try_into().ok());
        known = who.map(|who| Known {
            node: who.node,
            raft_id: who.raft_id,
            cluster: who.cluster,
            starts: starts.map_or(0, u32::from_le_bytes),
        });
        let snapshot = log.snapshot.as_ref().filter(|snapshot| !snapshot.data.is_empty());
        machine = snapshot.map(|snapshot| Machine::restore(&snapshot.data, false));
    }
    Ok(Report { known, machine, files })
}

/// An entry in words, without keys, values or tokens.
#[must_use]
pub fn describe(entry: &raft::eraftpb::Entry) -> String {
    if let Some(change) = dflockd_replica::change_of(entry) {
        return format!("{change:?}");
    }
    if entry.data.is_empty() {
        return "empty, the first of a term".into();
    }
    let stamp = match codec::stamp_of(&entry.data) {
        Ok(stamp) => stamp,
        Err(error) => return format!("not readable: {error}"),
    };
    let mut parts =
        vec![format!("at {:.3}s", std::time::Duration::from_nanos(stamp.0).as_secs_f64())];
    for section in codec::sections(&entry.data) {
        match section {
            Ok(codec::Section::LeaderCommand(order)) => parts.push(leader_command_name(&order)),
            Ok(codec::Section::Batch { run, first_seq, items, .. }) => {
                let names: Vec<_> = items
                    .map(|item| item.map_or("not readable", |item| action_name(&item.body)))
                    .collect();
                let raft_id = run.raft_id();
                parts.push(format!("of member {raft_id} from {first_seq}: {}", names.join(" ")));
            }
            Err(error) => parts.push(format!("not readable: {error}")),
        }
    }
    parts.join("; ")
}

fn leader_command_name(order: &dflockd_replica::types::LeaderCommand) -> String {
    use dflockd_replica::types::LeaderCommand;
    match order {
        LeaderCommand::Init { fence, .. } => format!("Init (first fence {fence})"),
        LeaderCommand::Tick => "Tick".into(),
        LeaderCommand::NewTerm => "NewTerm".into(),
        LeaderCommand::NodeLost { run } => format!("NodeLost (member {})", run.raft_id()),
        LeaderCommand::Policy(_) => "Policy".into(),
        LeaderCommand::Digest { index, .. } => format!("Digest (of entry {index})"),
        LeaderCommand::Address { raft_id, peer_addr } => {
            format!("Address (member {raft_id}: {peer_addr})")
        }
        LeaderCommand::Version { version } => format!("Version {version}"),
        LeaderCommand::ClusterId { id } => format!("ClusterId {:032x}", u128::from_be_bytes(*id)),
    }
}

fn action_name(body: &ProposalBody<'_>) -> &'static str {
    match body {
        ProposalBody::Start(_) => "start",
        ProposalBody::Command(command) => command.name(),
        ProposalBody::Undo(_) => "undo",
        ProposalBody::Keep { .. } => "keep",
        ProposalBody::Attach { .. } => "attach",
        ProposalBody::Close { .. } => "close",
        ProposalBody::Identify { .. } => "identify",
        ProposalBody::Kick { .. } => "end_session",
        ProposalBody::End { .. } => "end",
        ProposalBody::Barrier => "barrier",
        ProposalBody::Addresses(_) => "addresses",
    }
}

/// A directory that is only read. Without a lock: it may belong to somebody else.
struct ReadOnlyDisk(PathBuf);

impl Disk for ReadOnlyDisk {
    fn list(&self) -> io::Result<Vec<String>> {
        let entries = self.0.read_dir()?;
        let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        Ok(names.collect())
    }

    fn len(&self, name: &str) -> io::Result<u64> {
        Ok(std::fs::metadata(self.0.join(name))?.len())
    }

    fn read(&self, name: &str, offset: u64, buffer: &mut [u8]) -> io::Result<()> {
        use std::os::unix::fs::FileExt;
        std::fs::File::open(self.0.join(name))?.read_exact_at(buffer, offset)
    }

    fn create(&mut self, _: &str, _: u64) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }

    fn write(&mut self, _: &str, _: u64, _: &[u8]) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync(&mut self, _: &str) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }

    fn rename(&mut self, _: &str, _: &str) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }

    fn remove(&mut self, _: &str) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }

    fn sync_dir(&mut self) -> io::Result<()> {
        Err(ErrorKind::ReadOnlyFilesystem.into())
    }
}
