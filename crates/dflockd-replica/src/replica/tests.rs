//! What leaves a replica when, and whom it listens to.

use dflockd_core::{End, Limits, Outcome, Refusal, RequestId, SessionId, command};
use raft::eraftpb::HardState;

use super::*;
use crate::codec::Batch;
use crate::log::StoredSnapshot;
use crate::types::{Action, AutoRelease, Item, Policy, Start};
use crate::{LogWrite, RaftConfig};

/// Member 1 of a cluster of three, of which some vote, in its run number `start`.
fn replica(voters: &[RaftId], start: u32) -> Replica {
    let member = |id: RaftId| Member {
        node: format!("n{id}"),
        peer_addr: format!("n{id}:1"),
        client_addr: format!("n{id}:2"),
        witness: false,
        disk: None,
    };
    let members = BTreeMap::from([1, 2, 3].map(|id| (id, member(id))));
    let learners = members.keys().copied().filter(|id| !voters.contains(id)).collect();
    let mut metadata = SnapshotMetadata { index: 1, term: 1, ..Default::default() };
    let conf_state = ConfState { voters: voters.to_vec(), learners, ..Default::default() };
    metadata.set_conf_state(conf_state);
    let data = Machine::new([7; 16], members).snapshot().into();
    let recovered = Recovered {
        hard_state: HardState { term: 1, commit: 1, ..Default::default() },
        notes: BTreeMap::new(),
        snapshot: Some(StoredSnapshot { metadata, data, digest: [0; 32] }),
        entries: Vec::new(),
        cut: false,
    };
    let config = ReplicaConfig {
        raft: RaftConfig { id: 1, election_ticks: 100, heartbeat_ticks: 10, seed: 1 },
        witness: false,
        policy: Policy {
            limits: Limits::default(),
            auto_release: AutoRelease::Clean,
            orphan_ttl: Span::ZERO,
        },
        fence: 1,
        seed: 1,
        cluster: [8; 16],
        run: Run::new(1, start),
        start: Start { disk: 1, client_addr: "n1:2".into(), version: 1, witness: false },
        snapshot_entries: 1000,
        snapshot_bytes: 1 << 20,
    };
    Replica::new(config, recovered, Timestamp(1)).unwrap()
}

/// A replica that is the only voter and leads, with the time it is.
fn leader() -> (Replica, Timestamp) {
    let mut replica = replica(&[1], 1);
    let mut now = Timestamp(1);
    while !replica.is_open() {
        now = now + TICK;
        replica.handle_time(now);
        write_all(&mut replica);
        assert!(now < Timestamp(0) + Span::from_secs(60), "nobody leads");
    }
    (replica, now)
}

/// Does all that is to be written, until nothing is. Gives everything else.
fn write_all(replica: &mut Replica) -> Outputs {
    let mut outputs = Outputs::default();
    loop {
        replica.poll(&mut outputs);
        let Some(last) = outputs.writes.drain(..).next_back() else { return outputs };
        replica.handle_written(last.number);
    }
}

fn poll(replica: &mut Replica) -> Outputs {
    let mut outputs = Outputs::default();
    replica.poll(&mut outputs);
    outputs
}

/// The types of the Raft messages among the frames.
fn message_types(outputs: &Outputs) -> Vec<MessageType> {
    let message_type = |outgoing: &Outgoing| match Frame::decode(outgoing.bytes.clone()) {
        Ok(Frame::Raft { message, .. }) => Some(message.msg_type),
        _ => None,
    };
    outputs.frames.iter().filter_map(message_type).collect()
}

fn hear(replica: &mut Replica, message: Message) {
    let from = message.from;
    let frame = Frame::Raft { time: Timestamp(0), message: Message { to: 1, ..message } };
    replica.handle_frame(from, frame.encode());
}

fn item(request: u64) -> Item<'static> {
    let session = Run::new(1, 1).session(1);
    let action = Action::Command(command::Add { key: b"key", delta: 1, decrement: false }.into());
    Item { session, epoch: 0, request: RequestId(request), keep: false, action }
}

fn replies(outputs: &Outputs) -> Vec<(RequestId, Outcome)> {
    let reply = |event: &NodeEvent| {
        let NodeEvent::Machine(Event::Effect(effect)) = event else { return None };
        let Effect::Reply { request, outcome, .. } = effect else { return None };
        Some((*request, outcome.clone()))
    };
    outputs.events.iter().filter_map(reply).collect()
}

/// A vote that is not durable could be given twice after a crash.
#[test]
fn a_vote_waits_for_its_write() {
    let mut replica = replica(&[1, 2, 3], 1);
    let msg_type = MessageType::MsgRequestVote;
    let vote = Message { msg_type, from: 2, term: 5, log_term: 1, index: 1, ..Default::default() };
    hear(&mut replica, vote);
    let outputs = poll(&mut replica);
    assert_eq!(message_types(&outputs), []);
    let [LogWrite { number, sync: true, batch, snapshot: None }] = &outputs.writes[..] else {
        panic!("one write that must be synced")
    };
    let hard_state = batch.hard_state.as_ref().expect("the vote");
    assert_eq!((hard_state.term, hard_state.vote), (5, 2));
    assert_eq!(message_types(&poll(&mut replica)), [], "it is not written yet");
    replica.handle_written(*number);
    let answer = MessageType::MsgRequestVoteResponse;
    assert_eq!(message_types(&poll(&mut replica)), [answer]);
}

/// An entry that was acknowledged counts for the leader's majority.
#[test]
fn an_acknowledgement_waits_for_its_write() {
    let mut replica = replica(&[1, 2, 3], 1);
    let (from, term, index, log_term) = (2, 5, 1, 1);
    let msg_type = MessageType::MsgAppend;
    let mut append = Message { msg_type, from, term, index, log_term, ..Default::default() };
    append.entries = vec![Entry { index: 2, term, ..Default::default() }].into();
    hear(&mut replica, append);
    let outputs = poll(&mut replica);
    assert_eq!(message_types(&outputs), []);
    let [write] = &outputs.writes[..] else { panic!("one write") };
    assert!(write.sync && write.batch.entries.len() == 1);
    replica.handle_written(write.number);
    assert_eq!(message_types(&poll(&mut replica)), [MessageType::MsgAppendResponse]);
}

/// A leader sends its entries while it writes them itself, and answers when that is durable.
#[test]
fn a_leader_sends_before_it_has_written_and_answers_afterwards() {
    let (mut replica, _) = leader();
    // A learner that has all entries so far, so that the next ones are sent to it.
    let (msg_type, index) = (MessageType::MsgAppendResponse, replica.status().last);
    for from in [2, 3] {
        let term = replica.status().term;
        hear(&mut replica, Message { msg_type, from, term, index, ..Default::default() });
    }
    write_all(&mut replica);
    assert!(replica.submit(&item(1), Some(Span::ZERO)));
    let outputs = poll(&mut replica);
    let append = MessageType::MsgAppend;
    assert_eq!(message_types(&outputs), [append, append], "to both learners");
    let [write] = &outputs.writes[..] else { panic!("one write") };
    assert!(write.sync && write.batch.entries.len() == 1);
    assert_eq!(replies(&outputs), []);
    assert_eq!(replies(&poll(&mut replica)), [], "it is not durable yet");
    replica.handle_written(write.number);
    assert_eq!(replies(&poll(&mut replica)), [(RequestId(1), Outcome::Number(1))]);
}

/// A batch counts only if it comes from the member whose run it belongs to: another one could speak for its sessions.
#[test]
fn a_batch_is_taken_from_its_own_member() {
    let start = |run: Run| {
        let start = Start { disk: 9, client_addr: String::new(), version: 1, witness: false };
        let (session, request) = (SessionId(0), RequestId(0));
        let action = Action::Start(start);
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, &Item { session, epoch: 0, request, keep: false, action });
        Frame::Forward(Batch { run, first_seq: 1, count: 1, bytes: bytes.into() }).encode()
    };
    let (mut replica, _) = leader();
    let run = Run::new(2, 4);
    for (from, run) in [(3, run), (9, Run::new(9, 1))] {
        replica.handle_frame(from, start(run));
        write_all(&mut replica);
        assert_eq!(replica.machine().run_of(run.raft_id()), None, "taken from {from}");
    }
    replica.handle_frame(2, start(run));
    write_all(&mut replica);
    assert_eq!(replica.machine().run_of(2), Some(run));
}

/// What comes of a request after its client was told that nobody knows is given back, if it gave anything and the
/// client can not ask for it again.
#[test]
fn what_comes_too_late_is_given_back() {
    let (key, value) = (b"list".to_vec(), b"item".to_vec());
    let given = Outcome::Popped { key: key.into(), end: End::Left, value: value.into() };
    for (outcome, keep, undone) in [
        (given.clone(), false, true),
        (given.clone(), true, false),
        (Outcome::Done, false, false),
        (Outcome::Refused(Refusal::NotHeld), false, false),
    ] {
        let mut replica = replica(&[1, 2, 3], 1);
        let mut item = item(1);
        item.keep = keep;
        assert!(replica.submit(&item, Some(Span::ZERO)));
        let last = replica.accepting.last_seq();
        let late = Timestamp(1) + Span::from_secs(5);
        replica.handle_time(late);
        let unknown = Outcome::Refused(Refusal::Forgotten);
        assert_eq!(replies(&poll(&mut replica)), [(RequestId(1), unknown)]);
        let (session, request) = (item.session, item.request);
        let reply = Effect::Reply { session, request, outcome: outcome.clone() };
        replica.handle_event(Event::Effect(reply));
        assert_eq!(replies(&poll(&mut replica)), [], "its client was told already");
        let pushed = replica.accepting.last_seq() - last;
        assert_eq!(pushed, u64::from(undone), "{outcome:?}, keep: {keep}");
    }
}

#[test]
fn what_grows_is_refused_while_there_is_little_room() {
    let mut replica = replica(&[1, 2, 3], 1);
    let close = Action::Close { orderly: true, referenced: false };
    let close = Item { action: close, ..item(2) };
    replica.handle_room(true);
    assert!(!replica.submit(&item(1), None));
    assert!(replica.submit(&close, None), "what ends something is taken");
    replica.handle_room(false);
    assert!(replica.submit(&item(1), None));
}

#[test]
fn a_node_without_runs_left_stops() {
    let mut replica = replica(&[1, 2, 3], Run::START_MAX - 1);
    replica.lose_run();
    let outputs = poll(&mut replica);
    assert_eq!(outputs.fatal, None);
    assert_eq!(replica.run(), Run::new(1, Run::START_MAX));
    assert!(outputs.events.contains(&NodeEvent::NewRun(replica.run())));
    let [write] = &outputs.writes[..] else { panic!("one write") };
    let noted = Run::START_MAX.to_le_bytes().to_vec();
    assert_eq!(write.batch.notes, [(note::START.to_vec(), noted)]);
    assert!(write.sync, "before anybody hears of the run");
    replica.lose_run();
    assert_eq!(poll(&mut replica).fatal.as_deref(), Some(crate::TOO_MANY_STARTS));
}

/// A leader of three voters, to whom 2 has answered last and 3 never.
fn elected() -> Replica {
    let mut replica = replica(&[1, 2, 3], 1);
    let mut now = Timestamp(1);
    let mut asked = Vec::new();
    while asked.is_empty() {
        now = now + TICK;
        replica.handle_time(now);
        asked = message_types(&write_all(&mut replica));
        assert!(now < Timestamp(0) + Span::from_secs(60), "it never wants to lead");
    }
    assert_eq!(asked, [MessageType::MsgRequestPreVote; 2]);
    let from = 2;
    // A vote that is asked for in advance is one of the next term.
    for msg_type in [MessageType::MsgRequestPreVoteResponse, MessageType::MsgRequestVoteResponse] {
        hear(&mut replica, Message { msg_type, from, term: 2, ..Default::default() });
        write_all(&mut replica);
    }
    // First the entry that opens the leadership, then the one with its own run.
    acknowledge(&mut replica, from);
    assert!(replica.is_open());
    acknowledge(&mut replica, from);
    replica
}

/// A member says that it has all entries.
fn acknowledge(replica: &mut Replica, from: RaftId) {
    let (term, index) = (replica.status().term, replica.status().last);
    let msg_type = MessageType::MsgAppendResponse;
    hear(replica, Message { msg_type, from, term, index, ..Default::default() });
    write_all(replica);
}

#[test]
fn a_leader_knows_how_far_behind_the_others_are() {
    let mut replica = elected();
    let last = replica.status().last;
    assert_eq!(replica.lags(), [(2, 0), (3, last)]);
    assert!(replica.submit(&item(1), None));
    write_all(&mut replica);
    assert_eq!(replica.status().last, last + 1);
    assert_eq!(replica.lags(), [(2, 1), (3, last + 1)]);
    acknowledge(&mut replica, 3);
    assert_eq!(replica.lags(), [(2, 1), (3, 0)]);
}

#[test]
fn leadership_goes_to_the_voter_that_is_farthest() {
    let mut replica = elected();
    assert_eq!(replica.best_successor(), Some(2), "3 was not heard of");
    assert!(replica.submit(&item(1), None));
    write_all(&mut replica);
    acknowledge(&mut replica, 3);
    assert_eq!(replica.best_successor(), Some(3));
    replica.admin(1, AdminRequest::Drain { on: true });
    replica.handle_time(replica.now + LOOK);
    let outputs = write_all(&mut replica);
    assert!(outputs.events.contains(&NodeEvent::Admin(1, Ok(()))));
    let told = |outgoing: &&Outgoing| match Frame::decode(outgoing.bytes.clone()) {
        Ok(Frame::Raft { message, .. }) => message.msg_type == MessageType::MsgTimeoutNow,
        _ => false,
    };
    let told: Vec<_> = outputs.frames.iter().filter(told).map(|outgoing| outgoing.to).collect();
    assert_eq!(told, [3], "it may lead at once");
}

/// A follower does not wait for its whole timeout if the process of its leader is known to be gone.
#[test]
fn a_leader_whose_process_is_gone_is_replaced_soon() {
    let wants_to_lead = |gone: RaftId, refused: bool| {
        let mut replica = replica(&[1, 2, 3], 1);
        let (from, msg_type) = (2, MessageType::MsgHeartbeat);
        hear(&mut replica, Message { msg_type, from, term: 5, ..Default::default() });
        write_all(&mut replica);
        assert_eq!(replica.status().leader, Some(2));
        replica.handle_unreachable(gone, refused);
        replica.handle_time(Timestamp(1) + TICK);
        message_types(&write_all(&mut replica)).contains(&MessageType::MsgRequestPreVote)
    };
    assert!(wants_to_lead(2, true));
    assert!(!wants_to_lead(2, false), "the connection broke, that is all");
    assert!(!wants_to_lead(3, true), "another one leads");
}

/// A node that an operator has drained leaves leading to others, but does not leave the cluster without a leader.
#[test]
fn a_drained_node_leads_only_if_nobody_else_does() {
    let mut replica = replica(&[1, 2, 3], 1);
    replica.admin(1, AdminRequest::Drain { on: true });
    assert!(replica.status().drained);
    let mut now = Timestamp(1);
    let mut wants_to_lead = |replica: &mut Replica, ticks: u32| {
        let mut wants = false;
        for _ in 0..ticks {
            now = now + TICK;
            replica.handle_time(now);
            wants |= !message_types(&write_all(replica)).is_empty();
        }
        wants
    };
    assert!(!wants_to_lead(&mut replica, 500));
    assert!(wants_to_lead(&mut replica, 500));
}

#[test]
fn a_node_that_was_given_up_begins_another_run() {
    let mut replica = replica(&[1, 2, 3], 1);
    replica.handle_event(Event::RunEnded(Run::new(2, 1)));
    assert_eq!(replica.run(), Run::new(1, 1), "another node was given up");
    replica.handle_event(Event::RunEnded(Run::new(1, 1)));
    assert_eq!(replica.run(), Run::new(1, 2));
}

#[test]
fn what_is_applied_is_not_sent_again() {
    let (mut replica, now) = leader();
    assert!(replica.submit(&item(1), None));
    let unsent = |replica: &mut Replica| replica.accepting.unsent((9, 9), 0, now).len();
    poll(&mut replica);
    assert_eq!(unsent(&mut replica), 1, "another leader would have to be sent it");
    write_all(&mut replica);
    let mut next = leader().0;
    assert!(next.submit(&item(1), None));
    write_all(&mut next);
    assert_eq!(unsent(&mut next), 0);
}

#[test]
fn a_policy_is_answered_when_it_is_in_force() {
    let (mut replica, _) = leader();
    let mut policy = replica.machine().policy().cloned().expect("the cluster has begun");
    policy.orphan_ttl = Span::from_secs(77);
    replica.admin(5, AdminRequest::SetPolicy(Box::new(policy.clone())));
    let answered = NodeEvent::Admin(5, Ok(()));
    let outputs = poll(&mut replica);
    assert!(!outputs.events.contains(&answered), "it is not written yet");
    let [write] = &outputs.writes[..] else { panic!("one write") };
    replica.handle_written(write.number);
    assert!(write_all(&mut replica).events.contains(&answered));
    assert_eq!(replica.machine().policy(), Some(&policy));
}

/// A snapshot of another member may know of a later start than this one: then the data directory is an old copy.
#[test]
fn a_snapshot_with_a_later_start_stops_the_node() {
    // In this state member 1 is in its first run.
    let data = Bytes::from(leader().0.machine().snapshot());
    let install = |start| {
        let mut replica = replica(&[1, 2, 3], start);
        let mut metadata = replica.snapshot_metadata().clone();
        metadata.index = 9;
        replica.install(metadata, data.clone());
        assert_eq!(replica.status().applied, 9);
        let outputs = poll(&mut replica);
        assert!(outputs.events.contains(&NodeEvent::Skipped));
        assert_eq!(replica.run(), Run::new(1, start), "nobody gave it up");
        outputs.fatal
    };
    assert!(install(0).is_some_and(|why| why.contains("later start")));
    assert_eq!((install(1), install(2)), (None, None));
}

/// A frame counts only under the number of the member that sent it, and for the one that it names.
#[test]
fn a_message_is_heard_from_its_sender_only() {
    let term_after = |from: RaftId, says: RaftId, to: RaftId| {
        let mut replica = replica(&[1, 2, 3], 1);
        let msg_type = MessageType::MsgHeartbeat;
        let message = Message { msg_type, from: says, to, term: 5, ..Default::default() };
        replica.handle_frame(from, Frame::Raft { time: Timestamp(0), message }.encode());
        replica.status().term
    };
    assert_eq!(term_after(2, 2, 1), 5);
    assert_eq!(term_after(2, 3, 1), 1, "2 speaks for 3");
    assert_eq!(term_after(2, 2, 3), 1, "it is for 3");
}

/// A snapshot is what a member that applied the whole log would make, and the log behind it goes on.
#[test]
fn a_snapshot_is_made_of_the_one_before_and_the_log_since() {
    let (mut replica, _) = leader();
    for request in 1..4 {
        replica.submit(&item(request), None);
        write_all(&mut replica);
        replica.admin(request, AdminRequest::Copy);
        let mut outputs = write_all(&mut replica);
        let job = outputs.snapshot_job.take().expect("a snapshot is made aside");
        assert!(outputs.copies.is_empty(), "it is not made yet");
        let made = job.run().expect("all is there");
        assert!(made.data == replica.machine().snapshot());
        assert_eq!(made.metadata.index, replica.status().applied);
        replica.handle_snapshot(Some(made), &mut outputs);
        assert_eq!(replica.status().snapshot, replica.status().applied);
        replica.poll(&mut outputs);
        let [(id, copy)] = &outputs.copies[..] else { panic!("one copy") };
        assert_eq!((*id, copy.index), (request, replica.status().snapshot));
        assert!(outputs.events.contains(&NodeEvent::Admin(request, Ok(()))));
        write_all(&mut replica);
    }
}
