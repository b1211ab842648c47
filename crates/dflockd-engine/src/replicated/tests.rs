//! A member whose replica does not get to its inputs.

use std::collections::BTreeMap;

use dflockd_core::{End, Fence, Limits, Space, Token, command};
use dflockd_testkit::Dir;
use dflockd_testkit::eventually::tasks::eventually;
use raft::eraftpb::{ConfState, HardState, SnapshotMetadata};

use super::combiner::Queue;
use super::inputs::{ITEMS_BYTES_MAX, READS_MAX};
use super::*;
use crate::replicated::driver::Formation;
use crate::router::Api;
use crate::transport::{Limits as TransportLimits, Secret, TransportConfig};
use dflockd_replica::log::{Recovered, StoredSnapshot};
use dflockd_replica::types::{AutoRelease, Member, Policy, Start};
use dflockd_replica::{RaftConfig, ReplicaConfig};

/// Keeps the answers of a client of the line protocol.
#[derive(Default)]
struct Answers(Mutex<Vec<(RequestId, Outcome)>>);

/// Keeps the answers of a client of HTTP.
struct HttpAnswers(Arc<Answers>);

impl Mailbox for HttpAnswers {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        self.0.reply(request, outcome)
    }

    fn push(&self, push: Push) -> Pushed {
        self.0.push(push)
    }

    fn overflow(&self) {}

    fn close(&self) {}

    fn api(&self) -> Api {
        Api::Http
    }

    fn flush(&self) {}
}

impl Mailbox for Answers {
    fn reply(&self, request: RequestId, outcome: Outcome) -> Pushed {
        self.0.lock().push((request, outcome));
        Pushed::Behind
    }

    fn push(&self, _: Push) -> Pushed {
        Pushed::Behind
    }

    fn overflow(&self) {}

    fn close(&self) {}

    fn flush(&self) {}
}

impl Answers {
    /// Waits for the answer to a request.
    async fn of(&self, request: u64) -> Outcome {
        let found = async || self.0.lock().iter().find(|(id, _)| id.0 == request).cloned();
        eventually(&format!("an answer to {request}"), found).await.1
    }
}

fn policy() -> Policy {
    Policy {
        limits: Limits { value_bytes_max: 1 << 20, ..Limits::default() },
        auto_release: AutoRelease::Any,
        orphan_ttl: Span::ZERO,
    }
}

async fn single_node() -> (Arc<Replicated>, Dir) {
    let (member, dir) = start(Formation::Bootstrap).await;
    eventually("it is ready", async || member.is_ready()).await;
    (member, dir)
}

async fn start(formation: Formation) -> (Arc<Replicated>, Dir) {
    let dir = Dir::new();
    let credentials = Credentials { secrets: vec![Secret::new(vec![7; 32]).unwrap()], tls: None };
    let options = ClusterOptions {
        dir: dir.path("data"),
        transport: TransportConfig {
            listen: "127.0.0.1:0".into(),
            credentials,
            version_max: crate::transport::Version::newest(),
            limits: TransportLimits::default(),
        },
        member: MemberOptions {
            node: "a".into(),
            peer_addr: "127.0.0.1:1".into(),
            client_addr: "127.0.0.1:2".into(),
            formation,
            witness: false,
            policy: policy(),
            election_timeout: Duration::from_millis(100),
            heartbeat_interval: Duration::from_millis(30),
            snapshot_entries: 100_000,
            version: version::newest(),
        },
    };
    (Replicated::start(options, Clock::system()).await.unwrap(), dir)
}

fn add(member: &Replicated, client: &Attachment, request: u64) -> Submitted {
    let command = Command::Add(command::Add { key: b"count", delta: 1, decrement: false });
    member.submit(client, RequestId(request), false, command)
}

/// GUARANTEES 49: a client that comes before the member takes part waits for its answer, and stays.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_client_waits_for_the_member() {
    let (member, _dir) = start(Formation::Bootstrap).await;
    let answers = Arc::new(Answers::default());
    let client = member.open(Arc::clone(&answers) as Arc<dyn Mailbox>, "client".into());
    for request in 1..3 {
        assert!(matches!(add(&member, &client, request), Submitted::Later(_)));
        assert_eq!(answers.of(request).await, Outcome::Number(request.cast_signed()));
    }
    member.stop();
}

/// While the load is light, the thread that brings a request of HTTP drives the replica for it: nobody has to be woken.
/// The requests of lines are left to the designated thread, which takes those of all its connections at once.
#[tokio::test(flavor = "multi_thread")]
async fn a_thread_of_http_drives_for_its_request() {
    const REQUESTS: u64 = 20;
    let (member, _dir) = single_node().await;
    let woken = Arc::new(AtomicU32::new(0));
    let wake = Arc::clone(&woken);
    member.designate(move || {
        wake.fetch_add(1, Ordering::SeqCst);
    });
    let answers = Arc::new(Answers::default());
    let lines = Arc::clone(&answers) as Arc<dyn Mailbox>;
    let http = Arc::new(HttpAnswers(Arc::clone(&answers))) as Arc<dyn Mailbox>;
    let wakes_for = async |mailbox, first| {
        let client = member.open(mailbox, "client".into());
        let before = woken.load(Ordering::SeqCst);
        for request in first..first + REQUESTS {
            while !member.before_sleep() {}
            assert!(matches!(add(&member, &client, request), Submitted::Later(_)));
            if woken.load(Ordering::SeqCst) > before {
                member.before_sleep();
            }
            answers.of(request).await;
        }
        woken.load(Ordering::SeqCst) - before
    };
    let for_lines = wakes_for(lines, 1).await;
    let for_http = wakes_for(http, 1 + REQUESTS).await;
    assert!(for_lines > for_http + 10, "{for_lines} wake-ups for lines, {for_http} for HTTP");
    member.stop();
}

/// GUARANTEES 49: a client of a node that waits to be added is told that nobody can decide, and goes on when the node
/// is a member.
#[tokio::test(flavor = "multi_thread")]
async fn a_client_stays_when_its_node_becomes_a_member() {
    let (member, _dir) = start(Formation::Join).await;
    let answers = Arc::new(Answers::default());
    let client = member.open(Arc::clone(&answers) as Arc<dyn Mailbox>, "client".into());
    let unavailable = Submitted::Done(Outcome::Refused(Refusal::Unavailable));
    assert_eq!(add(&member, &client, 1), unavailable);
    let run = Incarnation::new(2, 1);
    member.begin_incarnation(run);
    assert!(matches!(add(&member, &client, 2), Submitted::Later(_)));
    assert_eq!(Incarnation::of(client.id()), run);
    assert!(member.router.get(client.id()).is_some_and(|found| found.id() == client.id()));
    member.stop();
}

/// Ids of sessions are never given out twice (GUARANTEES 18): when an incarnation has no more numbers, a client waits
/// for the next one.
#[tokio::test(flavor = "multi_thread")]
async fn session_numbers_end_and_do_not_wrap() {
    let (member, _dir) = start(Formation::Join).await;
    let run = Incarnation::new(2, 1);
    member.begin_incarnation(run);
    let open = || member.open(Arc::new(Answers::default()), "client".into());
    let first = open();
    member.last_session.store(run.session(u32::MAX - 1).0, Ordering::Release);
    assert_eq!(open().id(), run.session(u32::MAX));
    let late = open();
    assert_eq!(Incarnation::of(late.id()), Incarnation(0), "there is no number left");
    assert!(matches!(add(&member, &late, 1), Submitted::Done(Outcome::Refused(_))));
    assert!(member.router.get(first.id()).is_some_and(|found| Arc::ptr_eq(&found, &first.session)));
    let next = Incarnation::new(2, 2);
    member.begin_incarnation(next);
    assert!(matches!(add(&member, &late, 2), Submitted::Later(_)));
    assert_eq!(late.id(), next.session(1));
    member.stop();
}

/// GUARANTEES 48: while the replica is busy, requests are refused at a bound instead of piling up, those that give
/// something back have room beyond it, the end of a session is never refused, and all goes on afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_a_stalled_replica_has_a_bound() {
    let (member, _dir) = single_node().await;
    let answers = Arc::new(Answers::default());
    let client = member.open(Arc::clone(&answers) as Arc<dyn Mailbox>, "client".into());
    let add = |request| add(&member, &client, request);
    assert!(matches!(add(1), Submitted::Later(_)));
    answers.of(1).await;

    let stall = member.combiner.stall();
    let value = vec![7; 64 << 10];
    let push = |request| {
        let command = Command::Push(command::Push { key: b"list", end: End::Left, value: &value });
        member.submit(&client, RequestId(request), false, command)
    };
    let mut taken = 0;
    let refused = loop {
        match push(10 + taken) {
            Submitted::Later(_) => taken += 1,
            Submitted::Done(outcome) => break outcome,
            Submitted::Gone => panic!("the session is gone"),
        }
        assert!(taken * (64 << 10) <= 2 * ITEMS_BYTES_MAX as u64, "there is no bound");
    };
    assert!(matches!(refused, Outcome::Refused(Refusal::Unavailable)), "{refused:?}");
    assert!(matches!(add(2), Submitted::Done(Outcome::Refused(Refusal::Unavailable))));
    let token = Token { fence: Fence(1), salt: 1 };
    let release =
        Command::Release(command::Release { key: b"k", space: Space::Locks, token, resign: false });
    assert!(matches!(
        member.submit(&client, RequestId(3_000_000), false, release),
        Submitted::Later(_)
    ));
    let mut reads = 0;
    let read = |request| {
        let query = Query::Counter { key: b"count" };
        member.query(&client, RequestId(request), query)
    };
    while matches!(read(4_000_000 + reads), Submitted::Later(_)) {
        reads += 1;
        assert!(reads <= 2 * READS_MAX as u64, "there is no bound");
    }
    assert_eq!(reads, READS_MAX as u64);
    let items = || member.combiner.with_queue(Queue::requests);
    let before = items();
    member.cancel(&client, RequestId(10));
    assert_eq!(items(), before + 1, "what follows is never refused");
    drop(stall);
    member.cancel(&client, RequestId(10));

    assert!(matches!(answers.of(3_000_000).await, Outcome::Refused(_)), "it held nothing");
    assert!(matches!(answers.of(10 + taken - 1).await, Outcome::Number(_)));
    assert!(matches!(add(5_000_000), Submitted::Later(_)));
    assert_eq!(answers.of(5_000_000).await, Outcome::Number(2));
    member.close(&client, true, false);
    member.settle().await;
    member.stop();
}

/// GUARANTEES 18: a node whose incarnation has no more numbers for sessions begins the next one, and goes on.
#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_session_numbers_begins_anew() {
    let (member, _dir) = single_node().await;
    let run = Incarnation(member.run.load(Ordering::Acquire));
    member.last_session.store(run.session(u32::MAX).0, Ordering::Release);
    let answers = Arc::new(Answers::default());
    let client = member.open(Arc::clone(&answers) as Arc<dyn Mailbox>, "client".into());
    assert_eq!(Incarnation::of(client.id()), Incarnation(0), "there is no number left");
    let is_taken = async || matches!(add(&member, &client, 1), Submitted::Later(_));
    eventually("a number of the next run", is_taken).await;
    assert_eq!(answers.of(1).await, Outcome::Number(1));
    assert_eq!(client.id(), Incarnation(run.0 + 1).session(1));
    member.stop();
}

/// GUARANTEES 48: a copy of the state is not kept for somebody who gave up, even when it was handed out already.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_nobody_takes_is_dropped() {
    let (member, _dir) = single_node().await;
    let is_handed_out = || !member.copies.lock().is_empty();
    let asked = async || {
        let mut copy = Box::pin(member.copy());
        for _ in 0..1000 {
            if is_handed_out() {
                return Some(copy);
            }
            if tokio::time::timeout(Duration::from_millis(1), &mut copy).await.is_ok() {
                return None;
            }
            // Not polled for a while, so that the copy can come unseen.
            std::thread::sleep(Duration::from_millis(5));
        }
        None
    };
    let copy = eventually("a copy that was not taken yet", asked).await;
    drop(copy);
    assert!(!is_handed_out(), "it stays for ever");
    member.stop();
}

/// A member that has just been started and has heard of nobody.
fn lone_replica() -> Replica {
    let member = Member {
        node: "a".into(),
        peer_addr: "127.0.0.1:1".into(),
        client_addr: "127.0.0.1:2".into(),
        witness: false,
        disk: None,
    };
    let machine = Machine::new([7; 16], [(1, member)].into());
    let mut metadata = SnapshotMetadata { index: 1, term: 1, ..SnapshotMetadata::default() };
    metadata.set_conf_state(ConfState { voters: vec![1], ..ConfState::default() });
    let data = machine.snapshot().into();
    let recovered = Recovered {
        hard_state: HardState { commit: 1, term: 1, ..HardState::default() },
        notes: BTreeMap::new(),
        snapshot: Some(StoredSnapshot { metadata, data, digest: [0; 32] }),
        entries: Vec::new(),
        cut: false,
    };
    let config = ReplicaConfig {
        raft: RaftConfig { id: 1, election_ticks: 100, heartbeat_ticks: 15, seed: 1 },
        witness: false,
        policy: policy(),
        fence: 1,
        seed: 1,
        cluster: [8; 16],
        run: Incarnation::new(1, 1),
        start: Start { disk: 1, client_addr: String::new(), version: 1, witness: false },
        snapshot_entries: 100_000,
        snapshot_bytes: 64 << 20,
    };
    Replica::new(config, recovered, Timestamp(0)).unwrap()
}

/// GUARANTEES 48: when a member without a leader has accepted as much as it can keep, it refuses what makes more work,
/// but not what gives something back, and never the end of a session: its locks would stay.
#[test]
fn the_end_of_a_session_is_not_lost_behind_a_full_backlog() {
    let mut replica = lone_replica();
    let mut submit = |request, body: ProposalBody<'_>| {
        let (session, request) = (Incarnation::new(1, 1).session(1), RequestId(request));
        let item = Proposal { session, epoch: 0, request, keep: false, body };
        replica.submit(&item, Some(Span::ZERO))
    };
    let value = vec![7; 1 << 20];
    let push = || {
        ProposalBody::Command(Command::Push(command::Push {
            key: b"k",
            end: End::Left,
            value: &value,
        }))
    };
    let mut taken = 0;
    while submit(taken, push()) {
        taken += 1;
        assert!(taken <= 128, "there is no bound");
    }
    assert!(submit(
        1000,
        ProposalBody::Command(Command::RenewSession(command::RenewSession {
            lease: Span::from_secs(9)
        }))
    ));
    assert!(submit(1001, ProposalBody::Close { orderly: true, referenced: false }));
    assert!(!submit(1002, push()));
}
