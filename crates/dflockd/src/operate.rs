//! What operators do, by whatever API, each action once: [`perform`], [`end_hold`], [`end_session`]. All is audited.
//!
//! And the command `cluster` of the line protocol, which asks for it in JSON. Changes over lines and gRPC need a
//! reason; HTTP adds and removes members without one. Any member takes a request; what concerns the cluster is decided
//! by its leader, what concerns a node by that node. The answer is always an object: `done`, and `why` not, or what was
//! asked for.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use dflockd_core::{Command, Fence, Limits, Outcome, SessionId, Space, Span, check, command};
use dflockd_engine::Replicated;
use dflockd_engine::TIMES_BUCKETS;
use dflockd_engine::offline::write_backup;
use dflockd_engine::transport::certificate_dates::certificate_ends_at;
use dflockd_replica::admin::{AdminRequest, POLICY_CHANGED};
use dflockd_replica::policy::{POLICY_SETTINGS, PolicySetting, PolicyValue};
use dflockd_replica::types::{AutoRelease, Bits128, Policy};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep, timeout};

use crate::audit::{AuditEvent, By, run_detached};
use crate::frontend::auth::Allowed;
use crate::frontend::caller::{Caller, SessionEnded};
use crate::report;
use crate::service::Service;

/// The verb that shows no more than `stats`, and so needs no more.
pub(crate) const STATUS: &str = "status";

/// How long a change may take: the leader gives up after ten seconds.
const CHANGE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a snapshot may take.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(600);
/// How long it is tried to make a change of the policy from the newest one.
const POLICY_RETRY_MAX: Duration = Duration::from_secs(5);
/// How long it may take until another policy is seen here.
const POLICY_POLL_INTERVAL: Duration = Duration::from_millis(20);
/// How long a new member may take to catch up before it is left a learner.
const CATCH_UP: Duration = Duration::from_secs(10);
/// How often it is looked whether it has.
const CATCH_UP_LOOK: Duration = Duration::from_millis(100);
/// How much of a backup goes into an answer, which has two digits for each byte.
const PIECE_BYTES: usize = 192 << 10;
/// The longest name of a node.
const NODE_BYTES_MAX: usize = 64;
/// The longest address.
const ADDRESS_BYTES_MAX: usize = 262;

/// A change of the cluster or of this member, checked.
#[derive(Clone, Debug)]
pub(crate) enum AdminAction {
    Ask(AdminRequest),
    SetPolicy(Settings),
}

/// Settings of the policy and what they are to be.
pub(crate) type Settings = Vec<(&'static PolicySetting, PolicyValue)>;

/// What came of an action.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Done {
    Changed,
    /// There is a snapshot up to this entry.
    Snapshot {
        index: u64,
    },
}

impl AdminAction {
    /// What it is called, and whom it names.
    fn event(&self) -> AuditEvent {
        match self {
            Self::SetPolicy(_) => AuditEvent::Change { verb: "policy", node: None },
            Self::Ask(request) => event_of(request),
        }
    }
}

fn event_of(request: &AdminRequest) -> AuditEvent {
    let (verb, node) = match request {
        AdminRequest::Add { node, .. } => ("add", Some(node)),
        AdminRequest::Promote { node } => ("promote", Some(node)),
        AdminRequest::ForcePromote { node } => ("force-promote", Some(node)),
        AdminRequest::Remove { node } => ("remove", Some(node)),
        AdminRequest::ForceRemove { node } => ("force-remove", Some(node)),
        AdminRequest::Transfer { to } => ("transfer", to.as_ref()),
        AdminRequest::Address { node, .. } => ("address", Some(node)),
        AdminRequest::SetPolicy(_)
        | AdminRequest::ChangePolicy { .. }
        | AdminRequest::ChangeWholePolicy { .. } => ("policy", None),
        AdminRequest::Finalize => ("finalize", None),
        AdminRequest::Snapshot => ("snapshot", None),
        AdminRequest::Copy => ("backup", None),
        AdminRequest::Drain { on: true } => ("drain", None),
        AdminRequest::Drain { on: false } => ("undrain", None),
    };
    AuditEvent::Change { verb, node: node.cloned() }
}

/// Writes down what this member decides as the leader although it was asked of another one. Who asked, and why, the
/// other one has written down.
pub(crate) fn audit_decisions(service: &Arc<Service>) {
    let Some(member) = service.engine.replicated() else { return };
    let service = Arc::downgrade(service);
    member.on_decided(move |node, request, done| {
        if let Some(service) = service.upgrade() {
            service.audit.note(&By::member(node), event_of(&request), "", Some(done));
        }
    });
}

/// Does what an operator asks of the cluster or of this member. An error says why not.
pub(crate) async fn perform(
    service: &Service,
    by: &By,
    action: AdminAction,
    reason: &str,
) -> Result<Done, String> {
    let member = joined(service)?;
    let event = action.event();
    let result = match action {
        AdminAction::SetPolicy(settings) => {
            change_policy(member, &settings).await.map(|()| Done::Changed)
        }
        AdminAction::Ask(AdminRequest::Snapshot) => make_snapshot(member).await,
        AdminAction::Ask(request) => {
            ask(member, request, CHANGE_TIMEOUT).await.map(|()| Done::Changed)
        }
    };
    service.audit.note(by, event, reason, Some(result.is_ok()));
    result
}

/// Adds a member and lets it vote when it has caught up.
pub(crate) async fn add_voter(
    service: &Service,
    by: &By,
    add: AdminRequest,
    promote: AdminRequest,
) -> Result<(), String> {
    let event = event_of(&add);
    let result = async {
        let member = service.engine.replicated().ok_or("there is no cluster")?;
        member.admin(add).await?;
        let deadline = Instant::now() + CATCH_UP;
        loop {
            let result = member.admin(promote.clone()).await;
            if result.is_ok() || Instant::now() >= deadline {
                return result.map_err(|why| format!("{why}; it is a learner until you ask again"));
            }
            sleep(CATCH_UP_LOOK).await;
        }
    }
    .await;
    service.audit.note(by, event, "", Some(result.is_ok()));
    result
}

/// Removes a member for ever.
pub(crate) async fn remove_voter(
    service: &Service,
    by: &By,
    remove: AdminRequest,
) -> Result<(), String> {
    let event = event_of(&remove);
    let member = service.engine.replicated().ok_or("there is no cluster")?;
    let result = member.admin(remove).await;
    service.audit.note(by, event, "", Some(result.is_ok()));
    result
}

/// Ends somebody's hold.
pub(crate) async fn end_hold(
    service: Arc<Service>,
    caller: Arc<Caller>,
    by: By,
    (key, space, fence): (Vec<u8>, Space, u64),
    reason: String,
) -> Result<Outcome, SessionEnded> {
    let ended = run_detached(async move {
        let command =
            Command::ForceRelease(command::ForceRelease { key: &key, space, fence: Fence(fence) });
        let outcome =
            caller.call(Allowed::by_server(command)).await.map(|answer| answer.outcome().clone());
        let done = outcome.as_ref().ok().map(|outcome| *outcome == Outcome::Done);
        service.audit.note(&by, AuditEvent::EndHold { key, fence }, &reason, done);
        outcome
    });
    ended.await.unwrap_or(Err(SessionEnded))
}

/// Ends somebody's session or connection.
pub(crate) async fn end_session(
    service: Arc<Service>,
    caller: Arc<Caller>,
    by: By,
    session: u64,
    reason: String,
) -> Result<Outcome, SessionEnded> {
    let ended = run_detached(async move {
        let outcome = caller.kick(SessionId(session)).await;
        let done = outcome.as_ref().ok().map(|outcome| *outcome == Outcome::Done);
        service.audit.note(&by, AuditEvent::EndSession { session }, &reason, done);
        outcome
    });
    ended.await.unwrap_or(Err(SessionEnded))
}

fn joined(service: &Service) -> Result<&Arc<Replicated>, String> {
    let member = service.engine.replicated();
    let member =
        member.ok_or("this server keeps its state in memory; it is no member of a cluster")?;
    if member.view().status.is_none() {
        return Err("this node has not joined a cluster yet".into());
    }
    Ok(member)
}

async fn ask(member: &Replicated, request: AdminRequest, limit: Duration) -> Result<(), String> {
    let asked = timeout(limit, member.admin(request)).await;
    asked.unwrap_or_else(|_| Err("no answer in time; it may still happen".into()))
}

async fn make_snapshot(member: &Replicated) -> Result<Done, String> {
    let status = || member.view().status;
    let applied = status().map_or(0, |status| status.applied);
    ask(member, AdminRequest::Snapshot, SNAPSHOT_TIMEOUT).await?;
    let mut index = 0;
    // The answer comes a moment before the status tells of it.
    for _ in 0..100 {
        index = status().map_or(0, |status| status.snapshot);
        if index >= applied {
            break;
        }
        sleep(Duration::from_millis(10)).await;
    }
    Ok(Done::Snapshot { index })
}

/// What all decide by, as this member knows it.
pub(crate) fn policy(service: &Service) -> Result<Policy, String> {
    known_policy(joined(service)?)
}

fn known_policy(member: &Replicated) -> Result<Policy, String> {
    member.view().policy.ok_or_else(|| "the cluster has not begun yet".into())
}

/// Changes settings of the policy, and leaves those alone that somebody else changes at the same time.
async fn change_policy(member: &Replicated, settings: &Settings) -> Result<(), String> {
    let give_up_at = Instant::now() + POLICY_RETRY_MAX;
    loop {
        let from = known_policy(member)?;
        let mut to = from.clone();
        apply(settings, &mut to)?;
        check_whole(&to)?;
        if !from.limits.follows(2) && to.limits.v2() != from.limits.v2() {
            return Err(
                "the cluster has version 1, which has no such setting; when all members run \
                        this version, `cluster finalize` brings it"
                    .into(),
            );
        }
        let request = AdminRequest::change_policy(member.view().version, from, to);
        match ask(member, request, CHANGE_TIMEOUT).await {
            // Made from one that is no longer the newest, which will be seen here, too.
            Err(why) if why == POLICY_CHANGED && Instant::now() < give_up_at => {
                sleep(POLICY_POLL_INTERVAL).await;
            }
            result => return result,
        }
    }
}

// ---- The command `cluster` ----

/// The backup that a connection fetches; gone with the connection.
#[derive(Default)]
pub(crate) struct Backup(Mutex<Option<Bytes>>);

/// What the verbs need. Which of it, each says.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct VerbArgs {
    node: Option<String>,
    peer_addr: Option<String>,
    client_addr: Option<String>,
    witness: bool,
    force: bool,
    undo: bool,
    set: Option<Map<String, Value>>,
    offset: Option<usize>,
    reason: Option<String>,
}

type Answer = Result<Value, String>;

/// Answers a request. Blocks.
pub(crate) fn serve(service: &Service, verb: &str, text: &str, by: &By, backup: &Backup) -> Value {
    let answer = (|| {
        if verb == STATUS
            && let Some(member) = service.engine.replicated()
        {
            parse(text)?;
            return Ok(json!(status(service, member)));
        }
        joined(service)?;
        serve_verb(service, verb, &parse(text)?, by, backup)
    })();
    match answer {
        Ok(mut value) => {
            value["done"] = true.into();
            value
        }
        Err(why) => json!({ "done": false, "why": why }),
    }
}

fn parse(text: &str) -> Result<VerbArgs, String> {
    if text.is_empty() {
        return Ok(VerbArgs::default());
    }
    serde_json::from_str(text).map_err(|error| {
        // What it says of the text may show a part of it, so only the place is told.
        format!("not the JSON that is expected, column {}", error.column())
    })
}

fn serve_verb(service: &Service, verb: &str, args: &VerbArgs, by: &By, backup: &Backup) -> Answer {
    let action = match verb {
        "backup" => return serve_backup(service, args, by, backup),
        "policy" if args.set.is_none() => {
            return Ok(json!({ "policy": policy_to_json(&policy(service)?) }));
        }
        _ => args.action(verb)?,
    };
    let reason = match &action {
        AdminAction::Ask(AdminRequest::Snapshot) => args.reason.as_deref().unwrap_or_default(),
        AdminAction::Ask(_) | AdminAction::SetPolicy(_) => check_reason(args.reason.as_deref())?,
    };
    match Handle::current().block_on(perform(service, by, action, reason))? {
        Done::Changed => Ok(json!({})),
        Done::Snapshot { index } => Ok(json!({ "index": index })),
    }
}

impl VerbArgs {
    fn action(&self, verb: &str) -> Result<AdminAction, String> {
        let node = || check_node(self.node.as_deref());
        Ok(AdminAction::Ask(match verb {
            "add" => AdminRequest::Add {
                node: node()?,
                peer_addr: check_address("peer_addr", self.peer_addr.as_deref())?,
                client_addr: check_address("client_addr", self.client_addr.as_deref())?,
                witness: self.witness,
            },
            "promote" => AdminRequest::promote(node()?, self.force),
            "remove" => AdminRequest::remove(node()?, self.force),
            "transfer" => {
                let to = self.node.is_some().then(node).transpose()?;
                AdminRequest::Transfer { to }
            }
            "address" => AdminRequest::Address {
                node: node()?,
                peer_addr: check_address("peer_addr", self.peer_addr.as_deref())?,
            },
            "finalize" => AdminRequest::Finalize,
            "drain" => AdminRequest::Drain { on: !self.undo },
            "snapshot" => AdminRequest::Snapshot,
            "policy" => {
                let settings = settings_of(self.set.as_ref().unwrap_or(&Map::new()))?;
                check_settings(&settings)?;
                return Ok(AdminAction::SetPolicy(settings));
            }
            _ => return Err(format!("there is no verb {verb}")),
        }))
    }
}

/// Without an offset a new one begins; with one a piece of it is handed out.
fn serve_backup(service: &Service, args: &VerbArgs, by: &By, backup: &Backup) -> Answer {
    let member = joined(service)?;
    let Some(offset) = args.offset else {
        let reason = check_reason(args.reason.as_deref())?;
        let copied = Handle::current().block_on(timeout(SNAPSHOT_TIMEOUT, member.copy()));
        let copied = copied.unwrap_or_else(|_| Err("no snapshot in time".into()));
        service.audit.note(by, AuditEvent::Backup, reason, Some(copied.is_ok()));
        let copy = copied?;
        let cluster = member.view().cluster;
        let bytes = write_backup(cluster, member.node(), &copy);
        let told = json!({
            "bytes": bytes.len(), "index": copy.index, "cluster_id": cluster_id(&cluster),
        });
        *backup.0.lock() = Some(bytes);
        return Ok(told);
    };
    let mut kept = backup.0.lock();
    let bytes = kept.as_ref().ok_or("no backup was begun on this connection")?;
    let rest = bytes.get(offset..).ok_or("it is not that long")?;
    let piece = &rest[..rest.len().min(PIECE_BYTES)];
    let answer = json!({ "data": hex::encode(piece) });
    if piece.len() == rest.len() {
        *kept = None;
    }
    Ok(answer)
}

/// Whether this can be the name of a node.
pub(crate) fn is_node(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=NODE_BYTES_MAX).contains(&text.len()) && text.bytes().all(is_allowed)
}

/// Whether this can be an address: host:port.
pub(crate) fn is_address(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    text.len() <= ADDRESS_BYTES_MAX
        && !host.is_empty()
        && host.bytes().all(|byte| byte.is_ascii_graphic())
        && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn check_node(node: Option<&str>) -> Result<String, String> {
    let node = node.ok_or("node is missing")?;
    let known = Some(node).filter(|node| is_node(node)).map(str::to_owned);
    known.ok_or_else(|| "a node id is 1 to 64 of A-Z a-z 0-9 . _ -".into())
}

fn check_address(what: &str, address: Option<&str>) -> Result<String, String> {
    let address = address.ok_or_else(|| format!("{what} is missing"))?;
    let known = Some(address).filter(|address| is_address(address)).map(str::to_owned);
    known.ok_or_else(|| format!("{what} is not host:port"))
}

fn check_reason(reason: Option<&str>) -> Result<&str, String> {
    check::reason(reason.unwrap_or_default()).map_err(|invalid| invalid.text.to_owned())
}

/// The name of a cluster as people read it.
pub(crate) fn cluster_id(cluster: &Bits128) -> String {
    hex::encode(cluster)
}

// ---- The policy ----

/// The settings by the names of their flags; times in seconds, as there.
fn policy_to_json(policy: &Policy) -> Value {
    let settings = POLICY_SETTINGS.iter();
    settings.map(|setting| (setting.name.to_owned(), json_of(setting.get(policy)))).collect()
}

fn json_of(value: PolicyValue) -> Value {
    match value {
        PolicyValue::Number(number) => number.into(),
        PolicyValue::Bool(flag) => flag.into(),
        PolicyValue::Release(release) => release.word().into(),
    }
}

/// Settings in JSON. An error says which of them can not be, and what it can be.
fn settings_of(set: &Map<String, Value>) -> Result<Settings, String> {
    let settings = set.iter().map(|(name, value)| {
        let setting = PolicySetting::named(name);
        let setting = setting.ok_or_else(|| format!("the policy has no setting {name}"))?;
        let known = match value {
            Value::Number(number) => number.as_u64().map(PolicyValue::Number),
            Value::Bool(flag) => Some(PolicyValue::Bool(*flag)),
            Value::String(word) => {
                let release = AutoRelease::ALL.into_iter().find(|release| release.word() == word);
                release.map(PolicyValue::Release)
            }
            Value::Null | Value::Array(_) | Value::Object(_) => None,
        };
        Ok((setting, known.ok_or_else(|| setting.expected())?))
    });
    settings.collect()
}

/// Whether settings can be what they are to be.
pub(crate) fn check_settings(settings: &Settings) -> Result<(), String> {
    apply(settings, &mut Policy::default())
}

fn apply(settings: &Settings, policy: &mut Policy) -> Result<(), String> {
    settings.iter().try_for_each(|(setting, value)| setting.set(policy, *value))
}

/// Whether the settings of a policy go together.
fn check_whole(policy: &Policy) -> Result<(), String> {
    let Limits { default_lease, lease_max, .. } = policy.limits;
    let seconds = |span: Span| span.0 / Span::from_secs(1).0;
    if lease_max > Span::ZERO && default_lease > lease_max {
        return Err(format!(
            "default-lease-ttl ({}) is above max-lease-ttl ({})",
            seconds(default_lease),
            seconds(lease_max)
        ));
    }
    Ok(())
}

// ---- Status ----

/// How a node and its cluster are.
#[derive(Serialize)]
struct Status {
    #[serde(flatten)]
    cluster: Option<report::Cluster>,
    cluster_id: String,
    /// Of the server program.
    server: &'static str,
    /// That all members agreed to use, and the newest that each of them reads.
    cluster_version: u32,
    versions: Vec<Named<u32>>,
    drained: bool,
    /// The node's clock, in milliseconds of Unix time.
    unix_ms: u64,
    /// On the leader, entries that a member has not confirmed.
    lags: Vec<Named<u64>>,
    /// Members that this one can send to.
    connected: Vec<String>,
    disk_free_bytes: Option<u64>,
    disk_bytes: Option<u64>,
    log_bytes: u64,
    snapshot_bytes: u64,
    fsync: Times,
    files_open: Option<u64>,
    files_max: Option<u64>,
    certificates: Vec<Certificate>,
}

#[derive(Serialize)]
struct Named<T> {
    node_id: String,
    value: T,
}

#[derive(Serialize)]
struct Times {
    count: u64,
    mean_ms: f64,
    /// Nearly all took no longer: a bound of the buckets, none if it is beyond all.
    p99_ms: Option<f64>,
}

#[derive(Serialize)]
struct Certificate {
    what: &'static str,
    /// Seconds of Unix time.
    ends_at: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    why: Option<String>,
}

fn status(service: &Service, member: &Replicated) -> Status {
    use std::sync::atomic::Ordering::Relaxed;
    let (view, gauges) = (member.view(), member.gauges());
    let name = |id: &u64| view.members.get(id).map_or_else(|| id.to_string(), |m| m.node.clone());
    let disk = member.disk_space();
    let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let certificates = service.certificates.iter().map(|(what, file)| {
        let ends = certificate_ends_at(file);
        Certificate { what, ends_at: ends.as_ref().ok().copied(), why: ends.err() }
    });
    let versions = view.versions.iter();
    let lags = gauges
        .lags
        .lock()
        .iter()
        .map(|(id, lag)| Named { node_id: name(id), value: *lag })
        .collect();
    let connected = gauges.connected.lock().iter().map(name).collect();
    Status {
        cluster: report::cluster(service),
        cluster_id: cluster_id(&view.cluster),
        server: env!("CARGO_PKG_VERSION"),
        cluster_version: view.version,
        versions: versions
            .map(|(id, version)| Named { node_id: name(id), value: *version })
            .collect(),
        drained: view.status.is_some_and(|status| status.drained),
        unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
        lags,
        connected,
        disk_free_bytes: disk.map(|(free, _)| free),
        disk_bytes: disk.map(|(_, all)| all),
        log_bytes: gauges.log_bytes.load(Relaxed),
        snapshot_bytes: gauges.snapshot_bytes.load(Relaxed),
        fsync: times(&gauges.fsync.counts(), gauges.fsync.nanos()),
        files_open: open_files(),
        files_max: rlimit::getrlimit(rlimit::Resource::NOFILE).ok().map(|(soft, _)| soft),
        certificates: certificates.collect(),
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn times(counts: &[u64], nanos: u64) -> Times {
    let count: u64 = counts.iter().sum();
    let mut seen = 0;
    let reached = counts.iter().position(|bucket| {
        seen += bucket;
        seen.saturating_mul(100) >= count.saturating_mul(99)
    });
    let bound = reached.filter(|_| count > 0).and_then(|bucket| TIMES_BUCKETS.get(bucket));
    Times {
        count,
        mean_ms: if count == 0 { 0.0 } else { nanos as f64 / count as f64 / 1e6 },
        p99_ms: bound.map(|bound| bound * 1000.0),
    }
}

fn open_files() -> Option<u64> {
    let entries = std::fs::read_dir("/proc/self/fd").ok()?;
    u64::try_from(entries.count()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_shown_can_be_set() {
        let Value::Object(mut shown) = policy_to_json(&Policy::default()) else {
            panic!("an object")
        };
        assert_eq!(shown.len(), POLICY_SETTINGS.len());
        let settings = settings_of(&shown).expect("they have names and kinds");
        assert!(check_settings(&settings).is_err(), "the name spaces stay what they are");
        shown.remove("shared-key-namespace");
        let mut policy = Policy::default();
        apply(&settings_of(&shown).expect("as before"), &mut policy).expect("they are in range");
        assert_eq!(policy, Policy::default());
    }

    #[test]
    fn wrong_settings_are_refused() {
        for (name, value) in [
            ("max-locks", json!(0)),
            ("max-locks", json!(1.0)),
            ("max-locks", json!(-1)),
            ("max-locks", json!("7")),
            ("max-locks", json!("any")),
            ("max-locks", json!(null)),
            ("max-value-bytes", json!(1_048_577)),
            ("failover-grace", json!(61)),
            ("auto-release", json!("never")),
            ("auto-release", json!([])),
            ("kv-idle-gc", json!(1)),
        ] {
            let set = Map::from_iter([(name.to_owned(), value)]);
            let refused = settings_of(&set).and_then(|settings| check_settings(&settings));
            let expected = PolicySetting::named(name).expect("it is one").expected();
            assert_eq!(refused, Err(expected), "{set:?}");
        }
        let unknown = settings_of(&Map::from_iter([("max-dreams".to_owned(), json!(1))]));
        assert_eq!(unknown.map(|_| ()), Err("the policy has no setting max-dreams".to_owned()));
    }

    #[test]
    fn names_and_addresses() {
        for node in ["n1", "A.b_c-9", &"n".repeat(64)] {
            assert!(is_node(node), "{node}");
        }
        for node in ["", "n 1", "n/1", "n\u{e9}", &"n".repeat(65)] {
            assert!(!is_node(node), "{node}");
        }
        for address in ["127.0.0.1:7001", "[::1]:1", "host.example:65535"] {
            assert!(is_address(address), "{address}");
        }
        for address in ["", ":1", "host", "host:", "host:0", "host:65536", "ho st:1", "host:x"] {
            assert!(!is_address(address), "{address}");
        }
    }

    #[test]
    fn hundredths_of_times() {
        let mut counts = [0; TIMES_BUCKETS.len() + 1];
        assert_eq!(times(&counts, 0).p99_ms, None);
        counts[2] = 99;
        counts[8] = 1;
        assert_eq!(times(&counts, 0).p99_ms, Some(0.25));
        counts[8] = 2;
        assert_eq!(times(&counts, 0).p99_ms, Some(25.0));
    }
}
