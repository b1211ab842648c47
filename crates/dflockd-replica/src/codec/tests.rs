//! What is written is read back as the same; what stands in `tests/golden` is read and written for ever; and nothing
//! that comes in makes a decoder panic or allocate.
//!
//! ```text
//! DFLOCKD_GOLDEN=1 cargo test -p dflockd-replica codec      adds the bytes of new samples
//! ```
//!
//! A line that is there already is never written anew: a program that reads logs of older ones must keep it.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;

use bytes::Bytes;
use dflockd_core::{
    Command, End, Expect, Fence, Grant, Limits, LimitsV2, Mode, Outcome, Refusal, RequestId,
    Revision, SessionId, Space, Span, Subscription, Timestamp, Token, command,
};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{Index, select};
use raft::eraftpb::{
    ConfState, Entry, EntryType, Message, MessageType, Snapshot, SnapshotMetadata,
};

use super::super::types::{
    Addresses, AutoRelease, Bits128, Incarnation, LeaderCommand, Member, MemberChange, Policy,
    Proposal, ProposalBody, Start,
};
use super::super::version::NEWEST;
use super::message::{ENTRY_HEAD_BYTES, message_bytes};
use super::payload::put_batch_body;
use super::*;

/// Every kind of action, and of command that has a form, in the order of their numbers.
const KINDS: [&str; 30] = [
    "start",
    "keep",
    "attach",
    "close",
    "kick",
    "barrier",
    "undo",
    "acquire",
    "enqueue",
    "wait",
    "release",
    "renew",
    "force-release",
    "add",
    "counter-set",
    "kv-set",
    "kv-delete",
    "kv-compare-and-set",
    "push",
    "pop",
    "barrier-wait",
    "signal",
    "subscribe",
    "unsubscribe",
    "cancel",
    "acknowledge",
    "renew-session",
    "addresses",
    "end",
    "identify",
];

/// The name in [`KINDS`]. A new variant does not compile until it has one, and then the tests miss its sample.
fn kind_of(body: &ProposalBody<'_>) -> &'static str {
    match body {
        ProposalBody::Start(_) => "start",
        ProposalBody::Keep { .. } => "keep",
        ProposalBody::Attach { .. } => "attach",
        ProposalBody::Close { .. } => "close",
        ProposalBody::Identify { .. } => "identify",
        ProposalBody::Kick { .. } => "kick",
        ProposalBody::End { .. } => "end",
        ProposalBody::Barrier => "barrier",
        ProposalBody::Addresses(_) => "addresses",
        ProposalBody::Undo(_) => "undo",
        ProposalBody::Command(command) => match command {
            Command::Acquire(_) => "acquire",
            Command::Enqueue(_) => "enqueue",
            Command::Wait(_) => "wait",
            Command::Release(_) => "release",
            Command::Renew(_) => "renew",
            Command::ForceRelease(_) => "force-release",
            Command::Add(_) => "add",
            Command::CounterSet(_) => "counter-set",
            Command::KvSet(_) => "kv-set",
            Command::KvDelete(_) => "kv-delete",
            Command::KvCompareAndSet(_) => "kv-compare-and-set",
            Command::Push(_) => "push",
            Command::Pop(_) => "pop",
            Command::BarrierWait(_) => "barrier-wait",
            Command::Signal(_) => "signal",
            Command::Subscribe(_) => "subscribe",
            Command::Unsubscribe(_) => "unsubscribe",
            Command::Cancel(_) => "cancel",
            Command::Acknowledge(_) => "acknowledge",
            Command::RenewSession(_) => "renew-session",
            Command::Undo(_)
            | Command::Tick
            | Command::NewTerm
            | Command::Detach { .. }
            | Command::Attach
            | Command::Identify { .. }
            | Command::Orphan { .. }
            | Command::EndSession { .. } => unreachable!("has no form"),
        },
    }
}

/// What an item is made of.
#[derive(Clone, Debug)]
struct Parts {
    kind: &'static str,
    session: u64,
    epoch: u32,
    request: u64,
    keep: bool,
    key: Vec<u8>,
    value: Vec<u8>,
    other: Vec<u8>,
    a: u64,
    b: u64,
    span: Option<Span>,
    number: u32,
    choice: u8,
    flags: [bool; 2],
}

impl Parts {
    fn item(&self) -> Proposal<'_> {
        let Self { session, epoch, request, keep, .. } = *self;
        Proposal {
            session: SessionId(session),
            epoch,
            request: RequestId(request),
            keep,
            body: self.action(),
        }
    }

    fn action(&self) -> ProposalBody<'_> {
        match self.kind {
            "start" => ProposalBody::Start(Start {
                disk: self.a,
                client_addr: String::from_utf8_lossy(&self.value).into_owned(),
                version: self.number,
                witness: self.flags[0],
            }),
            "keep" => ProposalBody::Keep { secret: self.secret() },
            "attach" => ProposalBody::Attach { secret: self.secret() },
            "close" => ProposalBody::Close { orderly: self.flags[0], referenced: self.flags[1] },
            "identify" => ProposalBody::Identify { name: &self.key, reference: &self.other },
            "kick" => ProposalBody::Kick { session: SessionId(self.a) },
            "end" => ProposalBody::End { session: SessionId(self.a) },
            "barrier" => ProposalBody::Barrier,
            "addresses" => ProposalBody::Addresses(Addresses {
                http: String::from_utf8_lossy(&self.value).into_owned(),
                grpc: String::new(),
            }),
            "undo" => ProposalBody::Undo(self.outcome()),
            _ => ProposalBody::Command(self.command()),
        }
    }

    fn command(&self) -> Command<'_> {
        let (key, value, lease) = (&self.key[..], &self.value[..], self.span);
        let (mode, space, end, token) = (self.mode(), self.space(), self.end(), self.token());
        let (wait, salt) = (Span(self.a), self.b);
        match self.kind {
            "acquire" => Command::Acquire(command::Acquire { key, mode, wait, lease, salt }),
            "enqueue" => Command::Enqueue(command::Enqueue { key, mode, lease, salt }),
            "wait" => Command::Wait(command::Wait { key, space, wait }),
            "release" => {
                Command::Release(command::Release { key, space, token, resign: self.flags[1] })
            }
            "renew" => Command::Renew(command::Renew { key, space, token, lease }),
            "force-release" => {
                Command::ForceRelease(command::ForceRelease { key, space, fence: Fence(self.a) })
            }
            "add" => {
                Command::Add(command::Add { key, delta: self.signed(), decrement: self.flags[0] })
            }
            "counter-set" => Command::CounterSet(command::CounterSet { key, value: self.signed() }),
            "kv-set" => Command::KvSet(command::KvSet { key, value, ttl: lease }),
            "kv-delete" => Command::KvDelete(command::KvDelete { key }),
            "kv-compare-and-set" => {
                let expect = match self.choice % 3 {
                    0 => Expect::Absent,
                    1 => Expect::Value(&self.other),
                    _ => Expect::Revision(Revision(self.a)),
                };
                Command::KvCompareAndSet(command::KvCompareAndSet {
                    key,
                    expect,
                    value,
                    ttl: lease,
                })
            }
            "push" => Command::Push(command::Push { key, end, value }),
            "pop" => Command::Pop(command::Pop { key, end, wait: lease }),
            "barrier-wait" => {
                Command::BarrierWait(command::BarrierWait { key, count: self.number, wait })
            }
            "signal" => Command::Signal(command::Signal { channel: key, payload: value }),
            "subscribe" => Command::Subscribe(command::Subscribe { to: self.subscription() }),
            "unsubscribe" => {
                Command::Unsubscribe(command::Unsubscribe { from: self.subscription() })
            }
            "cancel" => Command::Cancel(command::Cancel { request: RequestId(self.a) }),
            "acknowledge" => {
                Command::Acknowledge(command::Acknowledge { up_to: RequestId(self.a) })
            }
            "renew-session" => Command::RenewSession(command::RenewSession { lease: Span(self.a) }),
            kind => unreachable!("nothing is made for {kind}"),
        }
    }

    /// One that can be undone, or the one that stands for all others.
    fn outcome(&self) -> Outcome {
        let grant = Grant { token: self.token(), lease: Span(self.a) };
        let (key, value) = (self.key[..].into(), self.value[..].into());
        match self.choice % 4 {
            0 => Outcome::Done,
            1 => Outcome::Granted(grant),
            2 => Outcome::Acquired(grant),
            _ => Outcome::Popped { key, end: self.end(), value },
        }
    }

    fn subscription(&self) -> Subscription<'_> {
        match self.choice % 3 {
            0 => Subscription::Signals { pattern: &self.key, group: &self.other },
            1 => Subscription::Changes {
                pattern: &self.key,
                from: self.span.map(|span| Revision(span.0)),
            },
            _ => Subscription::Leaders { key: &self.key },
        }
    }

    fn mode(&self) -> Mode {
        match self.choice % 5 {
            0 => Mode::Mutex,
            1 => Mode::Election,
            2 => Mode::Semaphore { limit: self.number },
            3 => Mode::Read,
            _ => Mode::Write,
        }
    }

    fn space(&self) -> Space {
        if self.flags[0] { Space::Semaphores } else { Space::Locks }
    }

    fn end(&self) -> End {
        if self.flags[0] { End::Right } else { End::Left }
    }

    fn token(&self) -> Token {
        Token { fence: Fence(self.a), salt: self.b }
    }

    fn signed(&self) -> i64 {
        self.a.cast_signed()
    }

    fn secret(&self) -> Bits128 {
        (u128::from(self.a) << 64 | u128::from(self.b)).to_le_bytes()
    }
}

/// Numbers that differ in every byte, so that no two can be mixed up.
fn sample(kind: &'static str) -> Parts {
    Parts {
        kind,
        session: 0x0000_0102_0304_0506,
        epoch: 0x0708_090a,
        request: 0x0b0c_0d0e_0f10_1112,
        keep: true,
        key: b"jobs/nightly".to_vec(),
        value: b"value".to_vec(),
        other: b"other".to_vec(),
        a: 0x2122_2324_2526_2728,
        b: 0x3132_3334_3536_3738,
        span: Some(Span(0x4142_4344_4546_4748)),
        number: 0x5152_5354,
        choice: 0,
        flags: [false, true],
    }
}

/// What an item can be, once: each kind, and each of its forms.
fn samples() -> Vec<(String, Parts)> {
    let mut samples = Vec::new();
    for kind in KINDS {
        samples.push((kind.to_owned(), sample(kind)));
        let choices = match kind {
            "acquire" => 5,
            "undo" => 4,
            "kv-compare-and-set" | "subscribe" | "unsubscribe" => 3,
            _ => 1,
        };
        for choice in 1..choices {
            samples.push((format!("{kind}-{choice}"), Parts { choice, ..sample(kind) }));
        }
        if matches!(kind, "acquire" | "kv-set" | "pop") {
            samples.push((format!("{kind}-none"), Parts { span: None, ..sample(kind) }));
        }
        if matches!(kind, "wait" | "push" | "close") {
            let flags = [true, false];
            samples.push((format!("{kind}-flags"), Parts { flags, keep: false, ..sample(kind) }));
        }
    }
    let from_now = Parts { choice: 1, span: None, ..sample("subscribe") };
    samples.push(("subscribe-from-now".into(), from_now));
    samples
}

fn encode_item(item: &Proposal<'_>) -> Vec<u8> {
    let mut out = Vec::new();
    put_item(&mut out, item);
    out
}

fn decode_item(mut bytes: &[u8]) -> Result<Proposal<'_>, Malformed> {
    let item = take_item(&mut bytes)?;
    at_end(bytes)?;
    Ok(item)
}

fn batch(first_seq: u64, parts: &[Parts]) -> Batch {
    let mut bytes = Vec::new();
    for part in parts {
        put_item(&mut bytes, &part.item());
    }
    let count = u16::try_from(parts.len()).expect("a small batch");
    Batch { run: Incarnation::new(5, 7), first_seq, count, bytes: bytes.into() }
}

/// Not the defaults, which may change.
fn policy() -> Box<Policy> {
    let limits = Limits {
        locks_max: 1,
        keys_max: 2,
        list_length_max: 3,
        waiters_max: 4,
        subscriptions_max: 5,
        value_bytes_max: 6,
        default_lease: Span(7),
        idle_max: Span(8),
        gc_interval: Span(9),
        shared_namespace: true,
        kv_idle_gc: false,
        failover_grace: Span(10),
        events_max: 11,
        results_max: 12,
        results_bytes_max: 13,
        expired_notes_max: 14,
        rules: 2,
        lease_max: Span(15),
        holds_per_session_max: 16,
        waits_per_session_max: 17,
        sessions_max: 18,
        subscription_bytes_max: 19,
        subscriptions_total_max: 20,
        subscription_bytes_total_max: 21,
        pattern_tokens_max: 22,
    };
    Box::new(Policy { limits, auto_release: AutoRelease::Clean, orphan_ttl: Span(300) })
}

/// Of the first version, which knows less.
fn policy_v1() -> Box<Policy> {
    Box::new(policy().with_v2(LimitsV2::default()))
}

/// Every order, once. A new one does not compile until it is here.
fn orders() -> Vec<(&'static str, LeaderCommand)> {
    let run = Incarnation::new(5, 7);
    let orders = vec![
        LeaderCommand::Init { policy: policy_v1(), seed: 1 << 40, fence: 1_000 },
        LeaderCommand::Tick,
        LeaderCommand::NewTerm,
        LeaderCommand::NodeLost { run },
        LeaderCommand::Policy(policy_v1()),
        LeaderCommand::Digest { index: 300, digest: [0xab; 32] },
        LeaderCommand::Address { raft_id: 4, peer_addr: "10.0.0.9:7000".into() },
        LeaderCommand::Version { version: 2 },
        LeaderCommand::ClusterId { id: [0xcd; 16] },
    ];
    let name = |order: &LeaderCommand| match order {
        LeaderCommand::Init { .. } => "init",
        LeaderCommand::Tick => "tick",
        LeaderCommand::NewTerm => "new-term",
        LeaderCommand::NodeLost { .. } => "node-lost",
        LeaderCommand::Policy(_) => "policy",
        LeaderCommand::Digest { .. } => "digest",
        LeaderCommand::Address { .. } => "address",
        LeaderCommand::Version { .. } => "version",
        LeaderCommand::ClusterId { .. } => "cluster-id",
    };
    orders.into_iter().map(|order| (name(&order), order)).collect()
}

/// What a payload is made of.
#[derive(Clone, Debug, PartialEq)]
enum Part {
    Batch(Batch),
    LeaderCommand(LeaderCommand),
}

fn encode_payload(stamp: u64, parts: &[Part]) -> Vec<u8> {
    encode_payload_of(VERSION.into(), stamp, parts)
}

fn encode_payload_of(version: u32, stamp: u64, parts: &[Part]) -> Vec<u8> {
    let mut out = Vec::new();
    begin_payload(&mut out, version, Timestamp(stamp));
    for part in parts {
        match part {
            Part::Batch(batch) => batch.put(&mut out),
            Part::LeaderCommand(order) => put_leader_command(&mut out, version, order),
        }
    }
    out
}

fn decode_payload(bytes: &[u8]) -> Result<(u64, Vec<Part>), Malformed> {
    let stamp = stamp_of(bytes)?.0;
    let parts = sections(bytes).map(|section| {
        Ok(match section? {
            Section::Batch { run, first_seq, count, items } => {
                let mut bytes = Vec::new();
                for item in items {
                    put_item(&mut bytes, &item?);
                }
                Part::Batch(Batch { run, first_seq, count, bytes: bytes.into() })
            }
            Section::LeaderCommand(order) => Part::LeaderCommand(order),
        })
    });
    Ok((stamp, parts.collect::<Result<_, Malformed>>()?))
}

fn payload_samples() -> Vec<(String, u64, Vec<Part>)> {
    let stamp = 0x0102_0304_0506_0708;
    let mut samples = vec![
        ("empty".into(), stamp, vec![]),
        (
            "batches".into(),
            stamp,
            vec![
                Part::Batch(batch(9, &[sample("acquire"), sample("cancel")])),
                Part::LeaderCommand(LeaderCommand::Tick),
                Part::Batch(batch(1, &[sample("start")])),
            ],
        ),
    ];
    for (name, order) in orders() {
        samples.push((name.into(), stamp, vec![Part::LeaderCommand(order)]));
    }
    samples
}

/// Every change of the membership, once. A new one does not compile until it is here.
fn member_changes() -> Vec<(&'static str, MemberChange)> {
    let member = Member {
        node: "a".into(),
        peer_addr: "10.0.0.1:7000".into(),
        client_addr: "10.0.0.1:6388".into(),
        witness: true,
        disk: Some(0x0102_0304),
    };
    let changes = vec![
        MemberChange::Add { raft_id: 4, member },
        MemberChange::Promote { raft_id: 4 },
        MemberChange::Remove { raft_id: 4 },
    ];
    let name = |change: &MemberChange| match change {
        MemberChange::Add { .. } => "add",
        MemberChange::Promote { .. } => "promote",
        MemberChange::Remove { .. } => "remove",
    };
    changes.into_iter().map(|change| (name(&change), change)).collect()
}

const TRAVELLING: [MessageType; 13] = [
    MessageType::MsgAppend,
    MessageType::MsgAppendResponse,
    MessageType::MsgRequestVote,
    MessageType::MsgRequestVoteResponse,
    MessageType::MsgSnapshot,
    MessageType::MsgHeartbeat,
    MessageType::MsgHeartbeatResponse,
    MessageType::MsgTransferLeader,
    MessageType::MsgTimeoutNow,
    MessageType::MsgReadIndex,
    MessageType::MsgReadIndexResp,
    MessageType::MsgRequestPreVote,
    MessageType::MsgRequestPreVoteResponse,
];
const LOCAL: [MessageType; 6] = [
    MessageType::MsgHup,
    MessageType::MsgBeat,
    MessageType::MsgPropose,
    MessageType::MsgUnreachable,
    MessageType::MsgSnapStatus,
    MessageType::MsgCheckQuorum,
];

fn message_sample(msg_type: MessageType) -> Message {
    Message {
        msg_type,
        to: 1,
        from: 0x0203,
        term: 4,
        log_term: 5,
        index: 6,
        commit: 7,
        commit_term: 8,
        request_snapshot: 9,
        reject: true,
        reject_hint: 10,
        context: Bytes::from_static(b"context"),
        priority: -2,
        ..Message::default()
    }
}

fn entry_sample(entry_type: EntryType, index: u64, data: &'static [u8]) -> Entry {
    let (data, context) = (Bytes::from_static(data), Bytes::from_static(b"ctx"));
    Entry { entry_type, term: 0x0b0c, index, data, context, ..Entry::default() }
}

fn metadata_sample() -> SnapshotMetadata {
    let mut metadata = SnapshotMetadata { index: 11, term: 12, ..SnapshotMetadata::default() };
    metadata.set_conf_state(ConfState {
        voters: vec![1, 2, 3],
        learners: vec![4],
        voters_outgoing: vec![1, 2],
        learners_next: vec![5],
        auto_leave: true,
        ..ConfState::default()
    });
    metadata
}

fn with_snapshot(mut message: Message, metadata: SnapshotMetadata, data: &'static [u8]) -> Message {
    let mut snapshot = Snapshot { data: Bytes::from_static(data), ..Snapshot::default() };
    snapshot.set_metadata(metadata);
    message.set_snapshot(snapshot);
    message
}

fn frame_samples() -> Vec<(String, Frame)> {
    let time = Timestamp(0x0102_0304_0506_0708);
    let mut samples = Vec::new();
    for msg_type in TRAVELLING {
        let mut message = message_sample(msg_type);
        let mut entries = Vec::new();
        if msg_type == MessageType::MsgAppend {
            entries.push(entry_sample(EntryType::EntryNormal, 7, b"data"));
            entries.push(entry_sample(EntryType::EntryConfChange, 8, b""));
            entries.push(entry_sample(EntryType::EntryConfChangeV2, 9, b"more data"));
        }
        if msg_type == MessageType::MsgReadIndex {
            entries.push(entry_sample(EntryType::EntryNormal, 0, b"read"));
        }
        message.set_entries(entries.into());
        if msg_type == MessageType::MsgSnapshot {
            message = with_snapshot(message, metadata_sample(), b"");
        }
        samples.push((format!("raft-{msg_type:?}"), Frame::Raft { time, message }));
    }
    let message = message_sample(MessageType::MsgSnapshot);
    let header = encode_message(&with_snapshot(message, metadata_sample(), b""));
    let others = vec![
        Frame::Forward(batch(9, &[sample("acquire"), sample("undo")])),
        Frame::Expect { term: 1, run: Incarnation(0x0203_0405), seq: 6 },
        Frame::Chunk {
            transfer: 1,
            offset: 2,
            total: 7,
            digest: [0xcd; 32],
            keep_only: true,
            header,
            data: Bytes::from_static(b"piece"),
        },
        Frame::ChunkAck { transfer: 1, received: 7 },
        Frame::Admin { id: 1, request: Bytes::from_static(b"request") },
        Frame::AdminReply { id: 1, reply: Bytes::from_static(b"reply") },
        Frame::Members { members: Bytes::from_static(b"members") },
    ];
    for frame in others {
        let name = match frame {
            Frame::Raft { .. } => unreachable!("they are above"),
            Frame::Forward(_) => "forward",
            Frame::Expect { .. } => "expect",
            Frame::Chunk { .. } => "chunk",
            Frame::ChunkAck { .. } => "chunk-ack",
            Frame::Admin { .. } => "admin",
            Frame::AdminReply { .. } => "admin-reply",
            Frame::Members { .. } => "members",
        };
        samples.push((name.into(), frame));
    }
    samples
}

/// Compares the bytes of samples with the lines of a file: `name: hex`.
fn check_golden(file: &str, samples: &[(String, Vec<u8>)]) {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(file);
    let mut text = fs::read_to_string(&path).unwrap_or_default();
    if std::env::var_os("DFLOCKD_GOLDEN").is_some() {
        for (name, bytes) in samples {
            if !text.lines().any(|line| line.starts_with(&format!("{name}: "))) {
                writeln!(text, "{name}: {}", hex(bytes)).expect("memory has no end");
            }
        }
        fs::write(&path, &text).expect("the golden files can be written");
    }
    for (name, bytes) in samples {
        let line = text.lines().find(|line| line.starts_with(&format!("{name}: ")));
        let line = line.unwrap_or_else(|| panic!("{file} has no {name}"));
        assert_eq!(line, format!("{name}: {}", hex(bytes)), "{file} has something else");
    }
    let count = text.lines().filter(|line| !line.starts_with('#')).count();
    assert_eq!(count, samples.len(), "{file} has more than the samples");
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").expect("memory has no end");
        text
    })
}

#[test]
fn golden_items() {
    let samples = samples();
    for kind in KINDS {
        let has_one = samples.iter().any(|(_, parts)| kind_of(&parts.action()) == kind);
        assert!(has_one, "{kind} has no sample");
    }
    let encode = |(name, parts): &(String, Parts)| (name.clone(), encode_item(&parts.item()));
    let encoded: Vec<_> = samples.iter().map(encode).collect();
    check_golden("items.txt", &encoded);
    for ((_, parts), (_, bytes)) in samples.iter().zip(&encoded) {
        assert_eq!(decode_item(bytes), Ok(parts.item()));
    }
}

#[test]
fn golden_payloads() {
    let mut encoded = Vec::new();
    for (name, stamp, parts) in payload_samples() {
        let bytes = encode_payload(stamp, &parts);
        assert_eq!(decode_payload(&bytes), Ok((stamp, parts)));
        encoded.push((name, bytes));
    }
    for (name, change) in member_changes() {
        let bytes = encode_member_change(&change);
        assert_eq!(decode_member_change(&bytes), Ok(change));
        encoded.push((format!("member-{name}"), bytes.to_vec()));
    }
    check_golden("payloads.txt", &encoded);
}

/// GUARANTEES 42: what version 2 added stands behind what version 1 has, and version 1 is written as ever.
#[test]
fn golden_payloads_of_version_2() {
    let mut encoded = Vec::new();
    let orders = [
        ("init", LeaderCommand::Init { policy: policy(), seed: 1 << 40, fence: 1_000 }),
        ("policy", LeaderCommand::Policy(policy())),
        ("tick", LeaderCommand::Tick),
    ];
    for (name, order) in orders {
        let part = Part::LeaderCommand(order);
        let parts = [part.clone(), Part::LeaderCommand(LeaderCommand::NewTerm)];
        let bytes = encode_payload_of(2, 1_000, &parts);
        assert_eq!(decode_payload(&bytes), Ok((1_000, parts.to_vec())));
        encoded.push((name.to_owned(), bytes));
        // The other way round nothing is misread: not as one of the other version, and not if something is missing.
        if name != "tick" {
            for (from, to) in [(1, 2), (2, 1)] {
                let mut bytes = encode_payload_of(from, 1_000, std::slice::from_ref(&part));
                bytes[0] = to;
                assert!(decode_payload(&bytes).is_err(), "{name} of {from} read as {to}");
            }
            let Part::LeaderCommand(order) =
                decode_payload(&encode_payload(1_000, &[part])).unwrap().1.remove(0)
            else {
                unreachable!("it was an order")
            };
            let (LeaderCommand::Init { policy, .. } | LeaderCommand::Policy(policy)) = order else {
                unreachable!("it has a policy")
            };
            assert_eq!(policy, policy_v1(), "version 1 carries no more than it did");
        }
    }
    check_golden("payloads-v2.txt", &encoded);
}

#[test]
fn golden_frames() {
    let mut encoded = Vec::new();
    for (name, frame) in frame_samples() {
        let bytes = frame.encode();
        encoded.push((name, bytes.to_vec()));
        assert!(Frame::decode(bytes) == Ok(frame.clone()), "{frame:?} is read back as another");
    }
    check_golden("frames.txt", &encoded);
}

/// Every outcome that has nothing to give back is undone in the same way: not at all.
#[test]
fn undo_of_nothing() {
    for outcome in [
        Outcome::Queued,
        Outcome::Timeout,
        Outcome::Number(7),
        Outcome::Value(b"value"[..].into()),
        Outcome::Refused(Refusal::NotHeld),
    ] {
        let item = Proposal { body: ProposalBody::Undo(outcome), ..sample("undo").item() };
        assert_eq!(decode_item(&encode_item(&item)), Ok(sample("undo").item()));
    }
}

/// Those that follow from something else in the log are never written.
#[test]
fn commands_without_form() {
    let until = Timestamp(1);
    for command in [
        Command::Tick,
        Command::NewTerm,
        Command::Detach { until },
        Command::Attach,
        Command::Identify { name: b"", reference: b"" },
        Command::Orphan { ttl: Span::ZERO, cut: false },
        Command::EndSession { release: true, forced: false },
    ] {
        let item = Proposal { body: ProposalBody::Command(command), ..sample("barrier").item() };
        assert!(std::panic::catch_unwind(|| encode_item(&item)).is_err(), "{item:?} has a form");
    }
}

#[test]
fn later_versions() {
    let mut payload = encode_payload(1, &[Part::LeaderCommand(LeaderCommand::Tick)]);
    let later = u8::try_from(NEWEST).unwrap() + 1;
    payload[0] = later;
    assert_eq!(stamp_of(&payload), Err(Malformed::Version(later)));
    let sections: Vec<_> = sections(&payload).map(|section| section.err()).collect();
    assert_eq!(sections, [Some(Malformed::Version(later))]);

    let mut context = encode_member_change(&MemberChange::Remove { raft_id: 1 }).to_vec();
    context[0] = 0;
    assert_eq!(decode_member_change(&context), Err(Malformed::Form("of no version")));
    context[0] = 9;
    assert_eq!(decode_member_change(&context), Err(Malformed::Version(9)));
    let text = Malformed::Version(9).to_string();
    assert!(text.contains("form 9") && text.contains("up to 4; start the newer"), "{text}");
}

/// The iterators say once what is wrong, and then nothing.
#[test]
fn ends_after_an_error() {
    assert_eq!(sections(&[]).filter(Result::is_err).count(), 1);
    let order = Part::LeaderCommand(LeaderCommand::Tick);
    let mut payload = encode_payload(1, std::slice::from_ref(&order));
    payload.push(0xff);
    let results: Vec<_> = sections(&payload).map(|section| section.is_ok()).collect();
    assert_eq!(results, [true, false]);

    let whole = batch(1, &[sample("cancel"), sample("kick")]);
    let count = |count, bytes: &[u8]| {
        let bytes = Bytes::copy_from_slice(bytes);
        let batch = Batch { count, bytes, ..whole.clone() };
        batch.items().map(|item| item.is_ok()).collect::<Vec<_>>()
    };
    assert_eq!(count(2, &whole.bytes), [true, true]);
    assert_eq!(count(3, &whole.bytes), [true, true, false]);
    assert_eq!(count(1, &whole.bytes), [true, false]);
    assert_eq!(count(2, &whole.bytes[..40]), [true, false]);
}

/// A batch with something that can not be read never reaches a log.
#[test]
fn forward_is_checked() {
    let whole = batch(1, &[sample("cancel"), sample("kick")]);
    for (count, first_seq, bytes) in [
        (1, 1, whole.bytes.clone()),
        (3, 1, whole.bytes.clone()),
        (2, 1, whole.bytes.slice(..40)),
        (2, u64::MAX - 1, whole.bytes.clone()),
    ] {
        let frame = Frame::Forward(Batch { run: whole.run, first_seq, count, bytes });
        assert!(Frame::decode(frame.encode()).is_err(), "{frame:?} is taken");
    }
    assert!(Frame::decode(Frame::Forward(whole).encode()).is_ok());
}

#[test]
fn local_messages() {
    let frame =
        |msg_type| Frame::Raft { time: Timestamp(0), message: message_sample(msg_type) }.encode();
    let mut bytes = frame(MessageType::MsgHeartbeat).to_vec();
    for number in 0..=u8::MAX {
        bytes[9] = number;
        // A read without its entry is refused, too.
        let taken = Frame::decode(bytes.clone().into()).is_ok();
        assert_eq!(taken, matches!(number, 3..=9 | 13..=14 | 16..=18), "{number}");
    }
    for msg_type in LOCAL {
        assert!(std::panic::catch_unwind(|| frame(msg_type)).is_err(), "{msg_type:?} has a form");
    }
}

#[test]
fn snapshots_travel_without_data() {
    let message = message_sample(MessageType::MsgSnapshot);
    let whole = with_snapshot(message.clone(), metadata_sample(), b"data");
    let header = with_snapshot(message, metadata_sample(), b"");
    assert!(decode_message(&encode_message(&whole)) == Ok(header));
}

/// What the library would panic on.
#[test]
fn entries_with_a_gap() {
    for (index, indexes, taken) in [
        (6, [7, 8], true),
        (6, [8, 9], false),
        (6, [7, 9], false),
        (6, [7, 7], false),
        (u64::MAX - 1, [u64::MAX, 0], false),
    ] {
        let mut message = Message { index, ..message_sample(MessageType::MsgAppend) };
        let entries = indexes.map(|index| entry_sample(EntryType::EntryNormal, index, b""));
        message.set_entries(entries.to_vec().into());
        assert_eq!(decode_message(&encode_message(&message)).is_ok(), taken, "{indexes:?}");
    }
}

#[test]
fn limits() {
    let taken = |bytes: Vec<u8>| decode_message(&bytes.into()).is_ok();
    // By hand, because the encoder refuses to write them while tests run.
    let message = |ids: [usize; 4], entries: usize, data: usize| {
        let mut out = encode_message(&message_sample(MessageType::MsgReadIndexResp)).to_vec();
        out.truncate(out.len() - 5);
        true.put(&mut out);
        out.extend_from_slice(&[0; 17]);
        for ids in ids {
            put_len(&mut out, ids);
            out.resize(out.len() + 8 * ids, 1);
        }
        put_len(&mut out, entries);
        for _ in 0..entries {
            out.extend_from_slice(&[0; ENTRY_HEAD_BYTES - 4]);
            put_len(&mut out, data);
            out.resize(out.len() + data, 2);
        }
        out
    };
    assert!(taken(message([CONF_IDS_MAX, 0, 0, 0], 0, 0)));
    assert!(taken(message([256; 4], 0, 0)));
    assert!(!taken(message([CONF_IDS_MAX + 1, 0, 0, 0], 0, 0)));
    assert!(!taken(message([256, 256, 256, 257], 0, 0)));
    assert!(taken(message([0; 4], ENTRIES_MAX, 0)));
    assert!(!taken(message([0; 4], ENTRIES_MAX + 1, 0)));
    assert!(taken(message([0; 4], 1, ENTRY_BYTES_MAX)));
    assert!(!taken(message([0; 4], 1, ENTRY_BYTES_MAX + 1)));

    let forward = |bytes: usize| {
        let rest = encode_item(&Parts { value: vec![], ..sample("signal") }.item()).len();
        let batch = batch(1, &[Parts { value: vec![3; bytes - rest], ..sample("signal") }]);
        let mut out = vec![frame::kind::FORWARD];
        put_batch_body(&mut out, batch.run, 1, 1, &batch.bytes);
        Frame::decode(out.into()).is_ok()
    };
    assert!(forward(BATCH_BYTES_MAX));
    assert!(!forward(BATCH_BYTES_MAX + 1));

    let chunk = |bytes: usize| {
        const HEAD_BYTES: usize = 1 + 3 * 8 + 32 + 1 + 4;
        let mut out = vec![frame::kind::CHUNK];
        out.resize(HEAD_BYTES, 0);
        put_len(&mut out, bytes - HEAD_BYTES - 4);
        out.resize(bytes, 0);
        Frame::decode(out.into()).is_ok()
    };
    assert!(chunk(FRAME_BYTES_MAX));
    assert!(!chunk(FRAME_BYTES_MAX + 1));
}

/// Who only looks at what goes over the wire sees no secrets.
#[test]
fn debug_hides() {
    let batch = batch(9, &[sample("keep"), sample("kv-set")]);
    assert_eq!(format!("{batch:?}"), "Batch(Incarnation(5242887) from 9, Items(2 in 94 bytes))");
    for (name, frame) in frame_samples() {
        let shown = format!("{frame:?}");
        assert!(shown.len() < 160, "{name} is shown as {shown}");
    }
}

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..max)
}

/// The ends of the range more often than not.
fn number() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(u64::MAX), any::<u64>()]
}

fn parts() -> impl Strategy<Value = Parts> {
    let head = (select(&KINDS[..]), number(), any::<u32>(), number(), any::<bool>());
    let strings = (bytes(40), bytes(300), bytes(20));
    let numbers = (number(), number(), proptest::option::of(number()), any::<u32>());
    (head, strings, numbers, any::<(u8, [bool; 2])>()).prop_map(
        |(head, strings, numbers, (choice, flags))| {
            let (kind, session, epoch, request, keep) = head;
            let (key, value, other) = strings;
            let (a, b, span, number) = numbers;
            let span = span.map(Span);
            Parts {
                kind,
                session,
                epoch,
                request,
                keep,
                key,
                value,
                other,
                a,
                b,
                span,
                number,
                choice,
                flags,
            }
        },
    )
}

fn batches() -> impl Strategy<Value = Batch> {
    (0..u64::MAX / 2, vec(parts(), 0..6)).prop_map(|(first_seq, parts)| batch(first_seq, &parts))
}

fn payload_parts() -> impl Strategy<Value = Vec<Part>> {
    let orders: Vec<_> = orders().into_iter().map(|(_, order)| order).collect();
    vec(
        prop_oneof![batches().prop_map(Part::Batch), select(orders).prop_map(Part::LeaderCommand)],
        0..5,
    )
}

fn metadata() -> impl Strategy<Value = SnapshotMetadata> {
    let ids = || vec(number(), 0..6);
    (number(), number(), [ids(), ids(), ids(), ids()], any::<bool>()).prop_map(
        |(index, term, ids, auto_leave)| {
            let [voters, learners, voters_outgoing, learners_next] = ids;
            let mut metadata = SnapshotMetadata { index, term, ..SnapshotMetadata::default() };
            metadata.set_conf_state(ConfState {
                voters,
                learners,
                voters_outgoing,
                learners_next,
                auto_leave,
                ..ConfState::default()
            });
            metadata
        },
    )
}

fn entries() -> impl Strategy<Value = Vec<Entry>> {
    let types = [EntryType::EntryNormal, EntryType::EntryConfChange, EntryType::EntryConfChangeV2];
    let entry = (select(types.to_vec()), number(), number(), bytes(30), bytes(300)).prop_map(
        |(entry_type, term, index, context, data)| {
            let (context, data) = (context.into(), data.into());
            Entry { entry_type, term, index, context, data, ..Entry::default() }
        },
    );
    vec(entry, 0..5)
}

fn messages() -> impl Strategy<Value = Message> {
    let numbers = proptest::array::uniform9(number());
    let rest = (any::<bool>(), bytes(30), any::<i64>());
    let snapshot = proptest::option::of(metadata());
    (select(&TRAVELLING[..]), numbers, rest, snapshot, entries()).prop_map(
        |(msg_type, numbers, (reject, context, priority), metadata, mut entries)| {
            let [to, from, term, log_term, index, commit, commit_term, request, hint] = numbers;
            // As the library makes them, see `check_entries`.
            let index = index.min(u64::MAX - 100);
            if msg_type == MessageType::MsgAppend {
                (index + 1..).zip(&mut entries).for_each(|(index, entry)| entry.index = index);
            }
            if msg_type == MessageType::MsgReadIndex {
                entries.push(Entry::default());
            }
            let mut message = Message {
                msg_type,
                to,
                from,
                term,
                log_term,
                index,
                commit,
                commit_term,
                request_snapshot: request,
                reject,
                reject_hint: hint,
                context: context.into(),
                priority,
                ..Message::default()
            };
            message.set_entries(entries.into());
            match metadata {
                Some(metadata) => with_snapshot(message, metadata, b""),
                None => message,
            }
        },
    )
}

fn frames() -> impl Strategy<Value = Frame> {
    let chunk = (number(), number(), number(), any::<[u8; 32]>(), any::<bool>());
    prop_oneof![
        4 => (number(), messages())
            .prop_map(|(time, message)| Frame::Raft { time: Timestamp(time), message }),
        2 => batches().prop_map(Frame::Forward),
        1 => (number(), any::<u32>(), number())
            .prop_map(|(term, run, seq)| Frame::Expect { term, run: Incarnation(run), seq }),
        2 => (chunk, bytes(100), bytes(300)).prop_map(|(head, header, data)| {
            let (transfer, offset, total, digest, keep_only) = head;
            let (header, data) = (header.into(), data.into());
            Frame::Chunk { transfer, offset, total, digest, keep_only, header, data }
        }),
        1 => (number(), number())
            .prop_map(|(transfer, received)| Frame::ChunkAck { transfer, received }),
        1 => (number(), bytes(100))
            .prop_map(|(id, request)| Frame::Admin { id, request: request.into() }),
        1 => (number(), bytes(100))
            .prop_map(|(id, reply)| Frame::AdminReply { id, reply: reply.into() }),
        1 => bytes(100).prop_map(|members| Frame::Members { members: members.into() }),
    ]
}

/// A change of some bytes: what stands there instead, of how many.
type Mutation = (Index, u8, Vec<u8>);

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let few = prop_oneof![3 => vec(any::<u8>(), 1..2), 1 => vec(select(vec![0, 1, 255]), 0..9)];
    vec((any::<Index>(), 0..9_u8, few), 1..4)
}

fn mutate(bytes: &mut Vec<u8>, mutations: &[Mutation]) {
    for (at, gone, new) in mutations {
        let at = at.index(bytes.len() + 1);
        let end = bytes.len().min(at + usize::from(*gone));
        bytes.splice(at..end, new.iter().copied());
    }
}

/// Decodes a frame that may be anything. What is accepted has this form and no other, and did not cost memory that it
/// does not fill.
fn check_frame(bytes: &[u8]) {
    let input = Bytes::copy_from_slice(bytes);
    let Ok(frame) = Frame::decode(input.clone()) else { return };
    assert_eq!(frame.encode(), input, "{frame:?} has two forms");
    let (mut owned, mut shared) = (0, Vec::new());
    match frame {
        Frame::Raft { mut message, .. } => {
            let conf = message.get_snapshot().get_metadata().get_conf_state();
            for ids in [&conf.voters, &conf.learners, &conf.voters_outgoing, &conf.learners_next] {
                owned += ids.capacity() * size_of::<u64>();
            }
            let entries = message.take_entries().into_vec();
            owned += entries.capacity() * size_of::<Entry>();
            shared.extend(entries.into_iter().flat_map(|entry| [entry.data, entry.context]));
            shared.push(message.context);
        }
        Frame::Forward(batch) => shared.push(batch.bytes),
        Frame::Chunk { header, data, .. } => shared.extend([header, data]),
        Frame::Admin { request, .. } => shared.push(request),
        Frame::AdminReply { reply, .. } => shared.push(reply),
        Frame::Members { members } => shared.push(members),
        Frame::Expect { .. } | Frame::ChunkAck { .. } => {}
    }
    assert!(owned <= 8 * bytes.len(), "{owned} bytes for {}", bytes.len());
    let range = input.as_ptr_range();
    for part in shared.iter().filter(|part| !part.is_empty()) {
        let part = part.as_ptr_range();
        assert!(range.start <= part.start && part.end <= range.end, "something was copied");
    }
}

/// Decodes a payload that may be anything.
fn check_payload(bytes: &[u8]) {
    let Ok((stamp, parts)) = decode_payload(bytes) else { return };
    let again = encode_payload_of(bytes[0].into(), stamp, &parts);
    assert_eq!(decode_payload(&again), Ok((stamp, parts)), "it has changed");
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn items_come_back(parts in parts()) {
        let bytes = encode_item(&parts.item());
        let item = decode_item(&bytes);
        prop_assert_eq!(kind_of(&parts.action()), parts.kind);
        prop_assert_eq!(&item, &Ok(parts.item()));
        if let Ok(Proposal { body: ProposalBody::Command(command), .. }) = item
            && let Command::Signal(command::Signal { payload, .. }) = command
        {
            prop_assert!(payload.is_empty() || bytes.as_ptr_range().contains(&payload.as_ptr()));
        }
        for short in 0..bytes.len() {
            prop_assert!(decode_item(&bytes[..short]).is_err());
        }
    }

    #[test]
    fn payloads_come_back(stamp in number(), parts in payload_parts()) {
        let bytes = encode_payload(stamp, &parts);
        prop_assert_eq!(decode_payload(&bytes), Ok((stamp, parts)));
    }

    #[test]
    fn frames_come_back(frame in frames()) {
        let bytes = frame.encode();
        check_frame(&bytes);
        for short in 0..bytes.len() {
            prop_assert!(Frame::decode(bytes.slice(..short)).is_err());
        }
        prop_assert!(Frame::decode(bytes) == Ok(frame));
    }

    #[test]
    fn skip(parts in vec(parts(), 0..6), n in 0..8_u64) {
        let mut skipped = batch(100, &parts);
        skipped.skip(n).unwrap();
        let n = parts.len().min(n.try_into().unwrap());
        prop_assert_eq!(skipped, batch(100 + n as u64, &parts[n..]));
    }

    #[test]
    fn noise(bytes in bytes(400), kind in 0..9_u8) {
        check_frame(&bytes);
        check_payload(&bytes);
        let _ = decode_item(&bytes);
        let _ = decode_member_change(&bytes);
        // Something that gets beyond the first byte.
        check_frame(&[&[kind], &bytes[..]].concat());
        check_payload(&[&encode_payload(1, &[])[..], &[kind], &bytes].concat());
    }

    #[test]
    fn mutated_frames(frame in frames(), mutations in mutations()) {
        let mut bytes = frame.encode().to_vec();
        mutate(&mut bytes, &mutations);
        check_frame(&bytes);
    }

    #[test]
    fn mutated_payloads(parts in payload_parts(), mutations in mutations()) {
        let mut bytes = encode_payload(1, &parts);
        mutate(&mut bytes, &mutations);
        check_payload(&bytes);
    }
}

/// Memory for a message is asked for once.
#[test]
fn what_a_message_takes_is_known_before() {
    let long = |bytes| Bytes::from(vec![1; bytes]);
    let entry = Entry { context: long(30), data: long(50), ..Entry::default() };
    for (context, entries) in [(0, 0), (40, 0), (200, 3)] {
        let entries = vec![entry.clone(); entries].into();
        let (msg_type, context) = (MessageType::MsgAppend, long(context));
        let message = Message { msg_type, context, entries, ..Message::default() };
        let (known, bytes) = (message_bytes(&message), encode_message(&message).len());
        assert!((bytes..bytes + 16).contains(&known), "{known} for {bytes}");
    }
}
