//! What operators did, by whatever API: a line in the log for each action, and the last of them in memory.
//!
//! The log is what lasts. What is kept here begins with the process and belongs to it: each member of a cluster knows
//! what was asked of it, and the leader also what was asked of others and came to it to be decided.

use std::collections::VecDeque;
use std::future::pending;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use dflockd_engine::Api;
use parking_lot::Mutex;
use tokio::sync::watch;

/// Records that are kept.
const RECORDS_MAX: usize = 1000;

/// The records of this server.
pub(crate) struct Audit {
    kept: Mutex<VecDeque<Arc<Record>>>,
    /// The number of the newest.
    last: watch::Sender<u64>,
}

/// Who did something.
#[derive(Clone)]
pub(crate) struct By {
    pub(crate) via: Via,
    /// The session of the line protocol.
    pub(crate) session: Option<u64>,
    /// The address, or the member that passed it on.
    pub(crate) peer: Arc<str>,
    /// Whose token it came with; empty if another member has looked at it.
    pub(crate) identity: Arc<str>,
}

/// How it came here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Via {
    /// From the operator.
    Api(Api),
    /// From another member, of which it was asked: this one leads.
    Member,
}

impl Via {
    /// What it is called.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Api(api) => api.name(),
            Self::Member => "member",
        }
    }
}

/// What an operator can do that is written down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AuditEvent {
    EndHold {
        key: Vec<u8>,
        fence: u64,
    },
    EndSession {
        session: u64,
    },
    /// A change of the cluster or of a member.
    Change {
        verb: &'static str,
        node: Option<String>,
    },
    Backup,
}

/// An action of an operator, written down.
#[derive(Debug)]
pub(crate) struct Record {
    /// 1 is the first of this process.
    pub(crate) number: u64,
    /// For people: nothing is decided by it.
    pub(crate) unix_ms: u64,
    pub(crate) via: Via,
    pub(crate) peer: Arc<str>,
    pub(crate) identity: Arc<str>,
    pub(crate) event: AuditEvent,
    pub(crate) reason: String,
    /// None if that was not known yet.
    pub(crate) done: Option<bool>,
}

impl Audit {
    pub(crate) fn new() -> Self {
        Self { kept: Mutex::default(), last: watch::Sender::new(0) }
    }

    /// Writes an action down.
    pub(crate) fn note(&self, by: &By, event: AuditEvent, reason: &str, done: Option<bool>) {
        log(by, &event, reason, done);
        let unix = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut kept = self.kept.lock();
        let number = *self.last.borrow() + 1;
        if kept.len() >= RECORDS_MAX {
            kept.pop_front();
        }
        kept.push_back(Arc::new(Record {
            number,
            unix_ms: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX),
            via: by.via,
            peer: Arc::clone(&by.peer),
            identity: Arc::clone(&by.identity),
            event,
            reason: reason.to_owned(),
            done,
        }));
        self.last.send_replace(number);
    }

    /// What is kept after a number, the oldest first. A number that was not given out yet is of an earlier process, and
    /// stands for the beginning.
    pub(crate) fn after(&self, number: u64, limit: usize) -> Vec<Arc<Record>> {
        let kept = self.kept.lock();
        let number = if number > *self.last.borrow() { 0 } else { number };
        let begin = kept.partition_point(|record| record.number <= number);
        kept.iter().skip(begin).take(limit).cloned().collect()
    }

    /// The number of the newest; 0 if there is none.
    pub(crate) fn newest(&self) -> u64 {
        *self.last.borrow()
    }

    /// Waits until there is something after a number.
    pub(crate) async fn beyond(&self, number: u64) {
        let mut last = self.last.subscribe();
        if last.wait_for(|last| *last > number).await.is_err() {
            // The sender is here, so this can not be.
            pending::<()>().await;
        }
    }
}

impl AuditEvent {
    /// What it is called.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Self::EndHold { .. } => "force-release",
            Self::EndSession { .. } => "end-session",
            Self::Change { verb, .. } => verb,
            Self::Backup => "backup",
        }
    }
}

impl By {
    /// Somebody at an API that has no sessions of its own.
    pub(crate) fn address(api: Api, peer: impl ToString, identity: &str) -> Self {
        let (peer, identity) = (peer.to_string().into(), identity.into());
        Self { via: Via::Api(api), session: None, peer, identity }
    }

    /// An operator whose request another member has passed on to this one.
    pub(crate) fn member(node: &str) -> Self {
        let peer = format!("member {node}").into();
        Self { via: Via::Member, session: None, peer, identity: "".into() }
    }
}

/// Does what is written down when it is done. It goes on if whoever asked does not wait for it: nothing is to happen
/// that nobody can read about. None if it failed.
pub(crate) async fn run_detached<T: Send + 'static>(
    action: impl Future<Output = T> + Send + 'static,
) -> Option<T> {
    tokio::spawn(action).await.ok()
}

fn log(by: &By, event: &AuditEvent, reason: &str, done: Option<bool>) {
    let By { via, session: by, peer, identity } = by;
    let identity = Some(&**identity).filter(|identity| !identity.is_empty());
    // A session of the line protocol says it all.
    let only_peer = by.is_none().then(|| tracing::field::display(peer));
    match event {
        AuditEvent::EndHold { key, fence } => tracing::info!(
            audit = true,
            identity,
            by,
            peer = only_peer,
            key = %key.escape_ascii(),
            fence,
            known = done,
            reason,
            "hold ended by an operator"
        ),
        AuditEvent::EndSession { session } => tracing::info!(
            audit = true,
            identity,
            by,
            peer = only_peer,
            session,
            known = done,
            reason,
            "session ended by an operator"
        ),
        AuditEvent::Backup => {
            let text = "backup fetched by an operator";
            tracing::info!(audit = true, identity, by, %peer, done, reason, "{text}");
        }
        AuditEvent::Change { verb, node } => match via {
            Via::Member => tracing::info!(
                audit = true,
                %peer,
                verb,
                node,
                done,
                "cluster changed, as another member was asked to"
            ),
            Via::Api(Api::Line) => tracing::info!(
                audit = true,
                identity,
                by,
                %peer,
                verb,
                done,
                reason,
                "cluster changed by an operator"
            ),
            Via::Api(Api::Http) => {
                let text = match *verb {
                    "remove" | "force-remove" => "member removed by an operator",
                    _ => "member added by an operator",
                };
                tracing::info!(audit = true, identity, %peer, node, done, "{text}");
            }
            Via::Api(Api::Grpc) => {
                let how = how(verb);
                tracing::info!(
                    audit = true,
                    identity,
                    %peer,
                    node = node.as_deref().unwrap_or_default(),
                    how,
                    done,
                    reason,
                    "cluster changed by an operator"
                );
            }
        },
    }
}

/// What has become of a member or of the cluster.
fn how(verb: &'static str) -> &'static str {
    match verb {
        "add" => "added",
        "promote" => "promoted",
        "force-promote" => "promoted by force",
        "remove" => "removed",
        "force-remove" => "removed by force",
        "transfer" => "made leader",
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(audit: &Audit, session: u64) {
        let by = By::address(Api::Grpc, "127.0.0.1", "ops");
        audit.note(&by, AuditEvent::EndSession { session }, "because", Some(true));
    }

    fn numbers(audit: &Audit, after: u64, limit: usize) -> Vec<u64> {
        audit.after(after, limit).iter().map(|record| record.number).collect()
    }

    #[test]
    fn the_last_ones_are_kept() {
        let audit = Audit::new();
        assert!(audit.after(0, 9).is_empty());
        for session in 1..=RECORDS_MAX as u64 + 5 {
            note(&audit, session);
        }
        let all = audit.after(0, usize::MAX);
        assert_eq!((all.len(), all[0].number), (RECORDS_MAX, 6));
        for record in &all {
            assert_eq!(record.event, AuditEvent::EndSession { session: record.number });
        }
        assert_eq!(numbers(&audit, 0, 2), [6, 7]);
        assert_eq!(numbers(&audit, 8, 2), [9, 10]);
        assert_eq!(numbers(&audit, 1004, 9), [1005]);
        assert!(audit.after(1005, 9).is_empty());
        assert_eq!(numbers(&audit, 1006, 1), [6], "of an earlier process");
    }

    #[tokio::test]
    async fn who_waits_is_told() {
        let audit = Audit::new();
        note(&audit, 1);
        audit.beyond(0).await;
        let waits = audit.beyond(1);
        tokio::pin!(waits);
        let early = tokio::time::timeout(std::time::Duration::from_millis(10), &mut waits).await;
        assert!(early.is_err(), "there is nothing yet");
        note(&audit, 2);
        waits.await;
    }
}
