//! `doctor`: checks of a cluster, and what to do about what is found.

use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::cluster::{listed, word};
use crate::connect::{Common, Settings};
use crate::failure::{Failure, Status};
use crate::operator::{CHECK_SERVERS, Cluster};
use crate::output::{self, Paint, Table, clean};

/// Bytes left on a disk.
const ROOM_LOW: u64 = 1 << 30;
const ROOM_OUT: u64 = 256 << 20;
/// Milliseconds of a sync of the log.
const SYNC_SLOW_MS: f64 = 20.0;
const SYNC_BAD_MS: f64 = 200.0;
/// Milliseconds between clocks.
const SKEW_WARN_MS: i64 = 1000;
const SKEW_BAD_MS: i64 = 60_000;
/// Entries that a member is behind.
const LAG_WARN: u64 = 10_000;
const DAY_S: i64 = 86_400;
const FILES_MIN: u64 = 4096;

#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(flatten)]
    common: Common,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Severity {
    Ok,
    Warning,
    Error,
}

impl Severity {
    fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warning => "warning",
            Self::Error => "error",
        }
    }

    fn paint(self) -> Paint {
        match self {
            Self::Ok => Paint::Green,
            Self::Warning => Paint::Yellow,
            Self::Error => Paint::Red,
        }
    }
}

#[derive(Debug)]
struct Finding {
    severity: Severity,
    check: &'static str,
    node: String,
    what: String,
    advice: String,
}

/// A member, as it answered.
struct MemberStatus {
    node: String,
    role: String,
    status: Result<Value, String>,
    /// How far its clock is ahead of this machine's, and how sure that is, in milliseconds.
    skew: Option<(i64, i64)>,
}

/// `doctor`.
pub(crate) fn run(args: Args, outer: &Settings) -> Result<Status, Failure> {
    let mut cluster = Cluster::new(args.common.settings.or(outer), None)?;
    let seen = cluster.ask("status", json!({}))?;
    let members: Vec<MemberStatus> =
        listed(&seen).into_iter().map(|(node, about)| ask_member(&cluster, node, &about)).collect();
    let now = unix_ms() / 1000;
    let findings = diagnose(&seen, &members, now);
    let worst = findings.iter().map(|finding| finding.severity).max().unwrap_or(Severity::Ok);
    if args.common.output.json {
        let findings = findings.iter().map(|finding| {
            json!({
                "severity": finding.severity.name(), "check": finding.check, "node": finding.node,
                "what": finding.what, "advice": finding.advice,
            })
        });
        output::json(
            &json!({ "severity": worst.name(), "findings": findings.collect::<Vec<_>>() }),
        );
    } else {
        print(&findings);
    }
    Ok(match worst {
        Severity::Ok => Status::Ok,
        Severity::Warning => Status::No,
        Severity::Error => Status::Program(2),
    })
}

fn unix_ms() -> i64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

fn ask_member(cluster: &Cluster, node: String, about: &Value) -> MemberStatus {
    let address = about["client_addr"].as_str().unwrap_or_default();
    let (begun, before) = (Instant::now(), unix_ms());
    let status = cluster.status_at(address).map_err(|failure| failure.to_string());
    let took = i64::try_from(begun.elapsed().as_millis()).unwrap_or(i64::MAX);
    let skew = status.as_ref().ok().and_then(|status| status["unix_ms"].as_i64());
    // It looked at its clock at some instant in between.
    let skew = skew.map(|theirs| (theirs - before - took / 2, took / 2 + 1));
    MemberStatus { node, role: word(&about["role"]), status, skew }
}

fn diagnose(seen: &Value, members: &[MemberStatus], now_s: i64) -> Vec<Finding> {
    let mut report = Report(Vec::new());
    let has_quorum = report.quorum(seen, members);
    report.versions(seen, members);
    for member in members {
        let node = &member.node;
        match &member.status {
            Err(why) => {
                let why = why.strip_suffix(CHECK_SERVERS).unwrap_or(why);
                let advice = if has_quorum {
                    format!(
                        "start it; if it is gone for good: dflockctl cluster remove {node}, then add another"
                    )
                } else {
                    "start it: without a majority it can be neither removed nor replaced".to_owned()
                };
                report.error("reach", node, clean(why), advice);
            }
            Ok(status) => report.member(node, status, now_s),
        }
        report.clock(member);
    }
    report.lags(members);
    report.0
}

struct Report(Vec<Finding>);

impl Report {
    fn add(
        &mut self,
        severity: Severity,
        check: &'static str,
        node: &str,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) {
        let (node, what, advice) = (clean(node), what.into(), advice.into());
        self.0.push(Finding { severity, check, node, what, advice });
    }

    fn ok(&mut self, check: &'static str, node: &str, what: impl Into<String>) {
        self.add(Severity::Ok, check, node, what, "");
    }

    fn warn(
        &mut self,
        check: &'static str,
        node: &str,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Severity::Warning, check, node, what, advice);
    }

    fn error(
        &mut self,
        check: &'static str,
        node: &str,
        what: impl Into<String>,
        advice: impl Into<String>,
    ) {
        self.add(Severity::Error, check, node, what, advice);
    }

    /// Whether there is one.
    fn quorum(&mut self, seen: &Value, members: &[MemberStatus]) -> bool {
        let votes = |member: &&MemberStatus| member.role != "learner";
        let voters = members.iter().filter(votes).count();
        let there = members.iter().filter(votes).filter(|member| member.status.is_ok()).count();
        let majority = voters / 2 + 1;
        let text = format!("{there} of {voters} voters answer, {majority} are needed");
        if there < majority {
            let advice =
                "bring voters back; if they are lost for good, see `dflockctl cluster force-new`";
            self.error("quorum", "", text, advice);
        } else if there == majority && voters > 2 {
            self.warn(
                "quorum",
                "",
                text,
                "one more failure stops the cluster; bring the others back",
            );
        } else if voters < 3 {
            let advice = "no failure is survived; add nodes until there are three voters";
            self.warn("quorum", "", text, advice);
        } else if voters % 2 == 0 {
            let advice =
                "an even number survives no more failures than one less; add or remove one";
            self.warn("quorum", "", text, advice);
        } else {
            self.ok("quorum", "", text);
        }
        let answers = members.iter().filter_map(|member| member.status.as_ref().ok());
        let mut leaders: Vec<String> = answers.map(|status| word(&status["leader_id"])).collect();
        leaders.sort();
        leaders.dedup();
        match leaders.as_slice() {
            [leader] if !leader.is_empty() => {
                self.ok("leader", leader, format!("term {}", seen["term"]))
            }
            [] | [_] => {
                let advice = "wait a few seconds; then look at the network between the peer ports and at the logs";
                self.error("leader", "", "there is none", advice);
            }
            several => {
                let text = format!("members name several: {}", several.join(" "));
                self.warn(
                    "leader",
                    "",
                    text,
                    "an election is under way, or members can not reach each other",
                );
            }
        }
        there >= majority
    }

    fn versions(&mut self, seen: &Value, members: &[MemberStatus]) {
        let answers = members.iter().filter_map(|member| member.status.as_ref().ok());
        let mut servers: Vec<String> = answers.map(|status| word(&status["server"])).collect();
        servers.sort();
        servers.dedup();
        let cluster = seen["cluster_version"].as_u64().unwrap_or_default();
        let versions = seen["versions"].as_array().map(Vec::as_slice).unwrap_or_default();
        let lowest = versions.iter().filter_map(|version| version["value"].as_u64()).min();
        let highest = versions.iter().filter_map(|version| version["value"].as_u64()).max();
        let advice = "finish the upgrade: one node after the other, `dflockctl drain` first";
        if servers.len() > 1 {
            let text = format!("members run {}", servers.join(" and "));
            self.warn("versions", "", text, advice);
        } else if lowest != highest {
            let old = versions.iter().filter(|version| version["value"].as_u64() < highest);
            let old: Vec<_> = old.map(|version| word(&version["node_id"])).collect();
            let newest = highest.unwrap_or_default();
            let text = format!("not all members read version {newest}: {}", old.join(" "));
            self.warn("versions", "", text, advice);
        } else if lowest.is_some_and(|lowest| lowest > cluster) {
            let text = format!("the cluster uses version {cluster}, all members read more");
            let advice = "when you do not want to go back: dflockctl cluster finalize";
            self.warn("versions", "", text, advice);
        } else {
            self.ok("versions", "", format!("server {}, cluster {cluster}", servers.join(" ")));
        }
    }

    fn member(&mut self, node: &str, status: &Value, now_s: i64) {
        if status["ready"] == true {
            self.ok(
                "ready",
                node,
                format!("{}, applied {}", word(&status["role"]), status["applied_index"]),
            );
        } else {
            let advice = "its log says what it waits for: the address, the secret or the certificate of a peer";
            self.error(
                "ready",
                node,
                format!("it is {}, not ready", word(&status["role"])),
                advice,
            );
        }
        if status["drained"] == true {
            let advice = format!("when the work on it is done: dflockctl drain {node} --undo");
            self.warn("drained", node, "it does not lead", advice);
        }
        self.peers(node, status);
        self.disk(node, status);
        self.files(node, status);
        for certificate in status["certificates"].as_array().into_iter().flatten() {
            self.certificate(node, certificate, now_s);
        }
    }

    fn peers(&mut self, node: &str, status: &Value) {
        let connected = status["connected"].as_array().cloned().unwrap_or_default();
        let members = status["members"].as_array().into_iter().flatten();
        let missing: Vec<String> = members
            .map(|member| &member["node_id"])
            .filter(|other| **other != status["node_id"] && !connected.contains(other))
            .map(word)
            .collect();
        if missing.is_empty() {
            self.ok("peers", node, format!("sends to {} others", connected.len()));
        } else {
            let text = format!("can not send to {}", missing.join(", "));
            let advice =
                "check that they run, their peer addresses (`cluster address`), and the firewall";
            self.warn("peers", node, text, advice);
        }
    }

    fn disk(&mut self, node: &str, status: &Value) {
        let free = status["disk_free_bytes"].as_u64();
        let all = status["disk_bytes"].as_u64();
        if let (Some(free), Some(all)) = (free, all) {
            let percent = free.saturating_mul(100) / all.max(1);
            let text = format!("{} MiB free, {percent}%", free >> 20);
            let advice =
                "make room; a full disk makes the node refuse what grows, and hand leadership over";
            if free < ROOM_OUT {
                self.error("disk", node, text, advice);
            } else if free < ROOM_LOW || percent < 5 {
                self.warn("disk", node, text, advice);
            } else {
                self.ok("disk", node, text);
            }
        }
        let sync = &status["fsync"];
        let Some(mean) = sync["mean_ms"].as_f64() else { return };
        let p99 = match sync["p99_ms"].as_f64() {
            Some(bound) => format!("99% within {bound} ms"),
            None => "some beyond 5 s".to_owned(),
        };
        let text = format!("a sync takes {mean:.2} ms on average, {p99}");
        let advice = "use a local disk that keeps its word on sync, and nothing else on it; each change waits for one";
        if mean > SYNC_BAD_MS {
            self.error("sync", node, text, advice);
        } else if mean > SYNC_SLOW_MS {
            self.warn("sync", node, text, advice);
        } else {
            self.ok("sync", node, text);
        }
    }

    fn files(&mut self, node: &str, status: &Value) {
        let (Some(open), Some(max)) = (status["files_open"].as_u64(), status["files_max"].as_u64())
        else {
            return;
        };
        let text = format!("{open} of {max} files open");
        let advice =
            "raise the hard limit (LimitNOFILE, ulimit -Hn) above --max-connections plus 100";
        if open.saturating_mul(10) > max.saturating_mul(9) {
            self.error("files", node, text, advice);
        } else if max < FILES_MIN {
            self.warn("files", node, text, advice);
        } else {
            self.ok("files", node, text);
        }
    }

    fn certificate(&mut self, node: &str, certificate: &Value, now_s: i64) {
        let what = word(&certificate["what"]);
        let Some(ends) = certificate["ends_at"].as_i64() else {
            let text = format!("certificate for {what}: {}", word(&certificate["why"]));
            self.error(
                "certificate",
                node,
                text,
                "put a readable file there and send the node a SIGHUP",
            );
            return;
        };
        let days = (ends - now_s).div_euclid(DAY_S);
        let text = format!("certificate for {what} ends in {days} days");
        let advice = "renew the file and send the node a SIGHUP";
        match days {
            ..0 => {
                self.error("certificate", node, format!("certificate for {what} has ended"), advice)
            }
            0..7 => self.error("certificate", node, text, advice),
            7..30 => self.warn("certificate", node, text, advice),
            _ => self.ok("certificate", node, text),
        }
    }

    fn clock(&mut self, member: &MemberStatus) {
        let Some((skew, unsure)) = member.skew else { return };
        let text = format!("{skew} ms from this machine's clock, give or take {unsure}");
        let advice = "set the clock (NTP): leases do not depend on it, certificates and fences of a new cluster do";
        let beyond = skew.abs() - unsure;
        if beyond > SKEW_BAD_MS {
            self.error("clock", &member.node, text, advice);
        } else if beyond > SKEW_WARN_MS {
            self.warn("clock", &member.node, text, advice);
        } else {
            self.ok("clock", &member.node, text);
        }
    }

    fn lags(&mut self, members: &[MemberStatus]) {
        let answers = members.iter().filter_map(|member| member.status.as_ref().ok());
        let lags =
            answers.flat_map(|status| status["lags"].as_array().cloned().unwrap_or_default());
        for lag in lags {
            let (node, entries) =
                (word(&lag["node_id"]), lag["value"].as_u64().unwrap_or_default());
            let text = format!("{entries} entries behind the leader");
            if entries > LAG_WARN {
                let advice = "if it does not catch up: its disk, its network, or the load is too much for it";
                self.warn("lag", &node, text, advice);
            } else {
                self.ok("lag", &node, text);
            }
        }
    }
}

fn print(findings: &[Finding]) {
    let mut table = Table::new(&["CHECK", "NODE", "RESULT", "FOUND"]);
    for finding in findings {
        let severity = finding.severity;
        table.painted([
            (finding.check.to_owned(), Paint::None),
            (finding.node.clone(), Paint::None),
            (severity.name().to_owned(), severity.paint()),
            (finding.what.clone(), Paint::None),
        ]);
    }
    table.print();
    // The same advice for several nodes is given once.
    let mut advice: Vec<(&str, &str, Vec<&str>)> = Vec::new();
    for finding in findings.iter().filter(|finding| finding.severity > Severity::Ok) {
        let same = |(check, advice, _): &&mut (&str, &str, _)| {
            (*check, *advice) == (finding.check, finding.advice.as_str())
        };
        match advice.iter_mut().find(same) {
            Some((.., nodes)) => nodes.push(&finding.node),
            None => advice.push((finding.check, &finding.advice, vec![&finding.node])),
        }
    }
    for (check, advice, nodes) in advice {
        let nodes = nodes.join(", ");
        let of = if nodes.is_empty() { "" } else { " of " };
        output::line(format!("{check}{of}{nodes}: {advice}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn healthy(node: &str) -> Value {
        json!({
            "node_id": node, "role": "follower", "ready": true, "leader_id": "a", "server": "1",
            "members": [{"node_id": "a"}, {"node_id": "b"}, {"node_id": "c"}],
            "connected": ["a", "b", "c"], "disk_free_bytes": 80_u64 << 30, "disk_bytes": 100_u64 << 30,
            "fsync": {"mean_ms": 1.0, "p99_ms": 5.0}, "files_open": 10, "files_max": 65536,
            "certificates": [{"what": "peers", "ends_at": 100 * DAY_S}], "applied_index": 5,
        })
    }

    fn members(change: impl Fn(&mut MemberStatus)) -> Vec<MemberStatus> {
        ["a", "b", "c"]
            .into_iter()
            .map(|node| {
                let status = Ok(healthy(node));
                let mut member = MemberStatus {
                    node: node.into(),
                    role: "voter".into(),
                    status,
                    skew: Some((0, 1)),
                };
                change(&mut member);
                member
            })
            .collect()
    }

    #[track_caller]
    fn check(change: impl Fn(&mut MemberStatus), expected: &[(&str, Severity)]) {
        let seen =
            json!({ "term": 1, "cluster_version": 1, "versions": [{"node_id": "a", "value": 1}] });
        let findings = diagnose(&seen, &members(change), 0);
        let found: Vec<_> = findings
            .iter()
            .filter(|finding| finding.severity > Severity::Ok)
            .inspect(|finding| assert!(!finding.advice.is_empty(), "{finding:?}"))
            .map(|finding| (finding.check, finding.severity))
            .collect();
        assert_eq!(found, expected);
    }

    fn of_a(member: &mut MemberStatus, field: &str, value: Value) {
        if let ("a", Ok(status)) = (member.node.as_str(), &mut member.status) {
            status[field] = value;
        }
    }

    #[test]
    fn what_is_found() {
        use Severity::{Error, Warning};
        check(|_| {}, &[]);
        check(|it| of_a(it, "ready", false.into()), &[("ready", Error)]);
        check(|it| of_a(it, "drained", true.into()), &[("drained", Warning)]);
        check(|it| of_a(it, "connected", json!(["b"])), &[("peers", Warning)]);
        check(|it| of_a(it, "disk_free_bytes", json!(1 << 20)), &[("disk", Error)]);
        check(|it| of_a(it, "disk_free_bytes", json!(500 << 20)), &[("disk", Warning)]);
        check(|it| of_a(it, "fsync", json!({"mean_ms": 50.0})), &[("sync", Warning)]);
        check(|it| of_a(it, "files_max", json!(11)), &[("files", Error)]);
        check(|it| of_a(it, "files_max", json!(1024)), &[("files", Warning)]);
        check(|it| of_a(it, "server", json!("2")), &[("versions", Warning)]);
        let reads =
            |a: u64, b: u64| json!([{"node_id": "a", "value": a}, {"node_id": "b", "value": b}]);
        for (reads, found) in
            [(reads(1, 1), None), (reads(1, 2), Some("b")), (reads(2, 2), Some(""))]
        {
            let seen = json!({ "term": 1, "cluster_version": 1, "versions": reads });
            let findings = diagnose(&seen, &members(|_| {}), 0);
            let mut sick = findings.iter().filter(|finding| finding.severity > Severity::Ok);
            let checks = sick.next().map(|finding| finding.check);
            assert_eq!(checks, found.map(|_| "versions"), "{findings:?}");
        }
        check(
            |it| of_a(it, "lags", json!([{"node_id": "b", "value": 20_000}])),
            &[("lag", Warning)],
        );
        for (days, severity) in [(-1, Error), (3, Error), (20, Warning)] {
            let ends = json!([{"what": "peers", "ends_at": days * DAY_S}]);
            check(|it| of_a(it, "certificates", ends.clone()), &[("certificate", severity)]);
        }
        check(
            |it| it.skew = Some((if it.node == "a" { -2000 } else { 900 }, 10)),
            &[("clock", Warning)],
        );
        check(
            |it| {
                if it.node == "a" {
                    it.status = Err("gone".into());
                    it.skew = None;
                }
            },
            &[("quorum", Warning), ("reach", Error)],
        );
        check(
            |it| {
                if it.node != "a" {
                    it.status = Err("gone".into());
                    it.skew = None;
                }
            },
            &[("quorum", Error), ("reach", Error), ("reach", Error)],
        );
        check(
            |it| it.status.iter_mut().for_each(|status| status["leader_id"] = "".into()),
            &[("leader", Error)],
        );
    }
}
