//! `cluster`: what an operator asks of a member. Every change needs a reason and leaves an audit line.
//!
//! Any member takes a request; what concerns the cluster is decided by its leader, what concerns a node by that node.
//! The answer is always an object: `done`, and `why` not, or what was asked for.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use dflockd_core::Span;
use dflockd_engine::Replicated;
use dflockd_engine::TIMES_BUCKETS;
use dflockd_engine::replica::admin::AdminRequest;
use dflockd_engine::replica::dates::certificate_ends_at;
use dflockd_engine::replica::offline::write_backup;
use dflockd_engine::replica::types::{AutoRelease, Bits128, Policy};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::report;
use crate::service::Service;

/// The verb that shows no more than `stats`, and so needs no more.
pub(crate) const STATUS: &str = "status";

/// How long a change may take: the leader gives up after ten seconds.
const PATIENCE: Duration = Duration::from_secs(15);
/// How long a snapshot may take.
const SNAPSHOT_PATIENCE: Duration = Duration::from_secs(600);
/// How much of a backup goes into an answer, which has two digits for each byte.
const PIECE_BYTES: usize = 192 << 10;
/// The longest name of a node.
const NODE_BYTES_MAX: usize = 64;
/// The longest address.
const ADDRESS_BYTES_MAX: usize = 262;
/// The longest reason.
const REASON_CHARS_MAX: usize = 256;

/// The backup that a connection fetches; gone with the connection.
#[derive(Default)]
pub(crate) struct Backup(Mutex<Option<Bytes>>);

/// What the verbs need. Which of it, each says.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Wanted {
    node: Option<String>,
    peer_addr: Option<String>,
    client_addr: Option<String>,
    witness: bool,
    undo: bool,
    set: Option<serde_json::Map<String, Value>>,
    offset: Option<usize>,
    reason: Option<String>,
}

type Answer = Result<Value, String>;

/// Answers a request. Blocks.
pub(crate) fn serve(
    service: &Service,
    verb: &str,
    text: &str,
    by: u64,
    peer: &Arc<str>,
    backup: &Backup,
) -> Value {
    let answer = (|| {
        let member = service.engine.replicated();
        let member =
            member.ok_or("this server keeps its state in memory; it is no member of a cluster")?;
        let wanted = if text.is_empty() { Wanted::default() } else { parse(text)? };
        if verb == STATUS {
            return Ok(json!(status(service, member)));
        }
        if member.view().status.is_none() {
            return Err("this node has not joined a cluster yet".into());
        }
        let operator = Operator { member, by, peer, verb };
        operator.serve(&wanted, backup)
    })();
    match answer {
        Ok(mut value) => {
            value["done"] = true.into();
            value
        }
        Err(why) => json!({ "done": false, "why": why }),
    }
}

fn parse(text: &str) -> Result<Wanted, String> {
    serde_json::from_str(text).map_err(|error| {
        // What it says of the text may show a part of it, so only the place is told.
        format!("not the JSON that is expected, column {}", error.column())
    })
}

struct Operator<'a> {
    member: &'a Arc<Replicated>,
    by: u64,
    peer: &'a Arc<str>,
    verb: &'a str,
}

impl Operator<'_> {
    fn serve(&self, wanted: &Wanted, backup: &Backup) -> Answer {
        let node = || check_node(wanted.node.as_deref());
        let request = match self.verb {
            "add" => AdminRequest::Add {
                node: node()?,
                peer_addr: check_address("peer_addr", wanted.peer_addr.as_deref())?,
                client_addr: check_address("client_addr", wanted.client_addr.as_deref())?,
                witness: wanted.witness,
            },
            "promote" => AdminRequest::Promote { node: node()? },
            "remove" => AdminRequest::Remove { node: node()? },
            "transfer" => {
                let to = wanted.node.is_some().then(node).transpose()?;
                AdminRequest::Transfer { to }
            }
            "address" => AdminRequest::Address {
                node: node()?,
                peer_addr: check_address("peer_addr", wanted.peer_addr.as_deref())?,
            },
            "finalize" => AdminRequest::Finalize,
            "drain" => AdminRequest::Drain { on: !wanted.undo },
            "snapshot" => {
                self.audit(wanted.reason.as_deref().unwrap_or(""), None);
                let status = || self.member.view().status;
                let applied = status().map_or(0, |status| status.applied);
                self.admin(AdminRequest::Snapshot, SNAPSHOT_PATIENCE)?;
                let mut index = 0;
                // The answer comes a moment before the status tells of it.
                for _ in 0..100 {
                    index = status().map_or(0, |status| status.snapshot);
                    if index >= applied {
                        break;
                    }
                    std::thread::sleep(Duration::from_millis(10));
                }
                return Ok(json!({ "index": index }));
            }
            "policy" => match &wanted.set {
                None => return Ok(json!({ "policy": shown(&self.policy()?) })),
                Some(settings) => {
                    let mut policy = self.policy()?;
                    for (name, value) in settings {
                        set(&mut policy, name, value)?;
                    }
                    AdminRequest::SetPolicy(Box::new(policy))
                }
            },
            "backup" => return self.backup(wanted, backup),
            _ => return Err(format!("there is no verb {}", self.verb)),
        };
        let reason = check_reason(wanted.reason.as_deref())?;
        let result = self.admin(request, PATIENCE);
        self.audit(reason, Some(result.is_ok()));
        result.map(|()| json!({}))
    }

    fn admin(&self, request: AdminRequest, patience: Duration) -> Result<(), String> {
        let asked = tokio::time::timeout(patience, self.member.admin(request));
        match tokio::runtime::Handle::current().block_on(asked) {
            Ok(result) => result,
            Err(_) => Err("no answer in time; it may still happen".into()),
        }
    }

    fn audit(&self, reason: &str, done: Option<bool>) {
        let (by, peer, verb) = (self.by, self.peer, self.verb);
        tracing::info!(audit = true, by, %peer, verb, done, reason, "cluster changed by an operator");
    }

    fn policy(&self) -> Result<Policy, String> {
        self.member.view().policy.ok_or_else(|| "the cluster has not begun yet".into())
    }

    /// Without an offset a new one begins; with one a piece of it is handed out.
    fn backup(&self, wanted: &Wanted, backup: &Backup) -> Answer {
        let Some(offset) = wanted.offset else {
            let reason = check_reason(wanted.reason.as_deref())?;
            let copying = tokio::time::timeout(SNAPSHOT_PATIENCE, self.member.copy());
            let copied = tokio::runtime::Handle::current().block_on(copying);
            let copied = copied.unwrap_or_else(|_| Err("no snapshot in time".into()));
            tracing::info!(
                audit = true,
                by = self.by,
                peer = %self.peer,
                done = copied.is_ok(),
                reason,
                "backup fetched by an operator"
            );
            let copy = copied?;
            let cluster = self.member.view().cluster;
            let bytes = write_backup(cluster, self.member.node(), &copy);
            let told = json!({
                "bytes": bytes.len(), "index": copy.index, "cluster_id": digits(&cluster),
            });
            *backup.0.lock() = Some(bytes);
            return Ok(told);
        };
        let mut kept = backup.0.lock();
        let bytes = kept.as_ref().ok_or("no backup was begun on this connection")?;
        let rest = bytes.get(offset..).ok_or("it is not that long")?;
        let piece = &rest[..rest.len().min(PIECE_BYTES)];
        let answer = json!({ "data": digits(piece) });
        if piece.len() == rest.len() {
            *kept = None;
        }
        Ok(answer)
    }
}

fn check_node(node: Option<&str>) -> Result<String, String> {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let node = node.ok_or("node is missing")?;
    if (1..=NODE_BYTES_MAX).contains(&node.len()) && node.bytes().all(is_allowed) {
        return Ok(node.to_owned());
    }
    Err("a node id is 1 to 64 of A-Z a-z 0-9 . _ -".into())
}

fn check_address(what: &str, address: Option<&str>) -> Result<String, String> {
    let address = address.ok_or_else(|| format!("{what} is missing"))?;
    let parts = address.rsplit_once(':').filter(|(host, port)| {
        !host.is_empty()
            && host.bytes().all(|byte| byte.is_ascii_graphic())
            && port.parse::<u16>().is_ok_and(|port| port > 0)
    });
    if parts.is_none() || address.len() > ADDRESS_BYTES_MAX {
        return Err(format!("{what} is not host:port"));
    }
    Ok(address.to_owned())
}

fn check_reason(reason: Option<&str>) -> Result<&str, String> {
    reason
        .filter(|reason| (1..=REASON_CHARS_MAX).contains(&reason.chars().count()))
        .filter(|reason| !reason.contains(char::is_control))
        .ok_or_else(|| "a reason of 1 to 256 printable characters is needed".into())
}

fn digits(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let digit = |nibble: u8| char::from(DIGITS[usize::from(nibble)]);
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

/// The name of a cluster as people read it.
pub(crate) fn cluster_id(cluster: &Bits128) -> String {
    digits(cluster)
}

// ---- The policy ----

fn seconds(span: Span) -> u64 {
    span.0 / 1_000_000_000
}

fn release_name(policy: AutoRelease) -> &'static str {
    match policy {
        AutoRelease::Any => "any",
        AutoRelease::Clean => "clean",
        AutoRelease::Lease => "lease",
    }
}

/// The settings by the names of their flags; times in seconds, as there.
fn shown(policy: &Policy) -> Value {
    let limits = &policy.limits;
    json!({
        "max-locks": limits.locks_max,
        "max-keys": limits.keys_max,
        "max-list-length": limits.list_length_max,
        "max-waiters": limits.waiters_max,
        "max-subscriptions": limits.subscriptions_max,
        "max-value-bytes": limits.value_bytes_max,
        "default-lease-ttl": seconds(limits.default_lease),
        "gc-max-idle": seconds(limits.idle_max),
        "gc-interval": seconds(limits.gc_interval),
        "shared-key-namespace": limits.shared_namespace,
        "kv-idle-gc": limits.kv_idle_gc,
        "failover-grace": seconds(limits.failover_grace),
        "auto-release": release_name(policy.auto_release),
        "orphan-ttl": seconds(policy.orphan_ttl),
    })
}

fn set(policy: &mut Policy, name: &str, value: &Value) -> Result<(), String> {
    /// The longest time in seconds.
    const TIME_MAX: u64 = 9_223_372_036;
    let number = |range: std::ops::RangeInclusive<u64>| {
        let number = value.as_u64().filter(|number| range.contains(number));
        let (least, most) = (range.start(), range.end());
        number.ok_or_else(|| format!("{name} is a number from {least} to {most}"))
    };
    let time = |range| number(range).map(Span::from_secs);
    let truth = || value.as_bool().ok_or_else(|| format!("{name} is true or false"));
    let limits = &mut policy.limits;
    match name {
        "max-locks" => limits.locks_max = number(1..=u64::MAX)?,
        "max-keys" => limits.keys_max = number(0..=u64::MAX)?,
        "max-list-length" => limits.list_length_max = number(0..=u64::MAX)?,
        "max-waiters" => limits.waiters_max = number(0..=u64::MAX)?,
        "max-subscriptions" => limits.subscriptions_max = number(0..=u64::MAX)?,
        "max-value-bytes" => limits.value_bytes_max = number(1..=1_048_576)?,
        "default-lease-ttl" => limits.default_lease = time(1..=TIME_MAX)?,
        "gc-max-idle" => limits.idle_max = time(0..=TIME_MAX)?,
        "gc-interval" => limits.gc_interval = time(1..=TIME_MAX)?,
        "kv-idle-gc" => limits.kv_idle_gc = truth()?,
        "failover-grace" => limits.failover_grace = time(0..=60)?,
        "orphan-ttl" => policy.orphan_ttl = time(0..=TIME_MAX)?,
        "auto-release" => {
            let kinds = [AutoRelease::Any, AutoRelease::Clean, AutoRelease::Lease];
            let kind = kinds.into_iter().find(|kind| value == release_name(*kind));
            policy.auto_release = kind.ok_or("auto-release is any, clean or lease")?;
        }
        "shared-key-namespace" => {
            return Err("the name spaces of a cluster stay what they were at its beginning".into());
        }
        _ => return Err(format!("the policy has no setting {name}")),
    }
    Ok(())
}

// ---- Status ----

/// How a node and its cluster are.
#[derive(Serialize)]
struct Status {
    #[serde(flatten)]
    cluster: report::Cluster,
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
        cluster: report::cluster(member),
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
    use dflockd_core::Limits;

    use super::*;

    fn policy() -> Policy {
        let limits = Limits::default();
        Policy { limits, auto_release: AutoRelease::Clean, orphan_ttl: Span::ZERO }
    }

    #[test]
    fn what_is_shown_can_be_set() {
        let Value::Object(settings) = shown(&policy()) else { panic!("an object") };
        for (name, value) in &settings {
            let mut changed = policy();
            let result = set(&mut changed, name, value);
            assert_eq!(result.is_ok(), name != "shared-key-namespace", "{name}: {result:?}");
            assert_eq!(changed, policy(), "{name}");
        }
        let mut changed = policy();
        set(&mut changed, "max-locks", &json!(7)).expect("it is in range");
        assert_eq!(policy().differences(&changed), ["max-locks"]);
    }

    #[test]
    fn wrong_settings_are_refused() {
        for (name, value) in [
            ("max-locks", json!(0)),
            ("max-locks", json!("7")),
            ("max-value-bytes", json!(1_048_577)),
            ("failover-grace", json!(61)),
            ("auto-release", json!("never")),
            ("kv-idle-gc", json!(1)),
            ("max-dreams", json!(1)),
        ] {
            let mut changed = policy();
            assert!(set(&mut changed, name, &value).is_err(), "{name} {value}");
            assert_eq!(changed, policy());
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
