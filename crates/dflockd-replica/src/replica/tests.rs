//! What leaves a replica when, and whom it listens to.

use dflockd_core::{End, Limits, Outcome, Refusal, RequestId, SessionId, command};
use raft::eraftpb::HardState;

use super::*;
use crate::codec::Batch;
use crate::log::StoredSnapshot;
use crate::transfer::Complete;
use crate::types::{AutoRelease, Policy, Proposal, ProposalBody, Start};
use crate::{LogWrite, RaftConfig, Role};

/// Member 1 of a cluster of three, of which some vote, in its incarnation number `start`.
fn replica(voters: &[RaftId], start: u32) -> Replica {
    replica_beside(&[], voters, start)
}

/// The same if some of the members are witnesses.
fn replica_beside(witnesses: &[RaftId], voters: &[RaftId], start: u32) -> Replica {
    let member = |id: RaftId| Member {
        node: format!("n{id}"),
        peer_addr: format!("n{id}:1"),
        client_addr: format!("n{id}:2"),
        witness: witnesses.contains(&id),
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
        run: Incarnation::new(1, start),
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

fn item(request: u64) -> Proposal<'static> {
    let session = Incarnation::new(1, 1).session(1);
    let body =
        ProposalBody::Command(command::Add { key: b"key", delta: 1, decrement: false }.into());
    Proposal { session, epoch: 0, request: RequestId(request), keep: false, body }
}

fn replies(outputs: &Outputs) -> Vec<(RequestId, Outcome)> {
    let reply = |event: &NodeEvent| {
        let NodeEvent::Reply { request, outcome, .. } = event else { return None };
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

/// GUARANTEES 43: the candidate may have become a voter while this node was away, so its own state does not decide.
#[test]
fn a_candidate_that_is_no_voter_here_gets_a_vote() {
    for from in [3, 4] {
        let mut replica = replica(&[1, 2], 1);
        let msg_type = MessageType::MsgRequestPreVote;
        let (term, log_term, index) = (5, 4, 9);
        hear(&mut replica, Message { msg_type, from, term, log_term, index, ..Default::default() });
        let outputs = poll(&mut replica);
        assert_eq!(message_types(&outputs), [MessageType::MsgRequestPreVoteResponse]);
        let [Outgoing { to, bytes, .. }] = &outputs.frames[..] else { panic!("one frame") };
        let Ok(Frame::Raft { message, .. }) = Frame::decode(bytes.clone()) else { panic!("Raft") };
        assert_eq!((*to, message.reject), (from, false));
    }
}

/// GUARANTEES 43: whoever asks for votes says where the answers go to, and what this node's own state says counts more.
#[test]
fn a_member_that_is_not_known_introduces_itself() {
    let member = |id: RaftId, peer_addr: &str| Member {
        node: format!("n{id}"),
        peer_addr: peer_addr.to_owned(),
        client_addr: format!("n{id}:2"),
        witness: false,
        disk: None,
    };
    let mut replica = replica(&[1, 2, 3], 1);
    let known = replica.peers();
    let introduce = |replica: &mut Replica, from| {
        let told = [(2, member(2, "elsewhere")), (4, member(4, "n4:1")), (5, member(5, "n5:1"))];
        let members = codec::pack(&BTreeMap::<RaftId, _>::from(told)).into();
        replica.handle_frame(from, Frame::Members { members }.encode());
        let outputs = poll(replica);
        let is_news = |event: &NodeEvent| matches!(event, NodeEvent::Peers);
        outputs.events.iter().filter(|event| is_news(event)).count()
    };
    assert_eq!(introduce(&mut replica, 2), 0);
    assert_eq!(replica.peers(), known);
    assert_eq!(
        (introduce(&mut replica, 4), introduce(&mut replica, 4)),
        (1, 0),
        "that is news once"
    );
    let mut peers = known.clone();
    peers.insert(4, member(4, "n4:1"));
    assert_eq!(replica.peers(), peers);

    // Its own requests for votes are introduced like that.
    let mut now = Timestamp(1);
    let outputs = loop {
        now = now + TICK;
        replica.handle_time(now);
        let outputs = poll(&mut replica);
        if !outputs.frames.is_empty() {
            break outputs;
        }
        assert!(now < Timestamp(0) + Span::from_secs(60), "it stands for election");
    };
    for to in [2, 3] {
        let frames = outputs.frames.iter().filter(|outgoing| outgoing.to == to);
        let frames: Vec<_> =
            frames.map(|outgoing| Frame::decode(outgoing.bytes.clone()).unwrap()).collect();
        let [Frame::Members { members }, Frame::Raft { message, .. }] = &frames[..] else {
            panic!("{frames:?}")
        };
        assert_eq!(codec::unpack(members), Ok(known.clone()));
        assert_eq!(message.msg_type, MessageType::MsgRequestPreVote);
    }
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

/// A batch counts only if it comes from the member whose incarnation it belongs to: another one could speak for its
/// sessions.
#[test]
fn a_batch_is_taken_from_its_own_member() {
    let start = |run: Incarnation| {
        let start = Start { disk: 9, client_addr: String::new(), version: 1, witness: false };
        let (session, request) = (SessionId(0), RequestId(0));
        let body = ProposalBody::Start(start);
        let mut bytes = Vec::new();
        codec::put_item(&mut bytes, &Proposal { session, epoch: 0, request, keep: false, body });
        Frame::Forward(Batch { run, first_seq: 1, count: 1, bytes: bytes.into() }).encode()
    };
    let (mut replica, _) = leader();
    write_all(&mut replica);
    let last = replica.status().last;
    let run = Incarnation::new(2, 4);
    for (from, run) in [(3, run), (9, Incarnation::new(9, 1))] {
        replica.handle_frame(from, start(run));
        write_all(&mut replica);
        assert_eq!(replica.machine().run_of(run.raft_id()), None, "taken from {from}");
        assert_eq!(replica.status().last, last, "there is no entry of it");
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
    let close = ProposalBody::Close { orderly: true, referenced: false };
    let close = Proposal { body: close, ..item(2) };
    replica.handle_room(true);
    assert!(!replica.submit(&item(1), None));
    assert!(replica.submit(&close, None), "what ends something is taken");
    replica.handle_room(false);
    assert!(replica.submit(&item(1), None));
}

#[test]
fn a_node_without_runs_left_stops() {
    let mut replica = replica(&[1, 2, 3], Incarnation::START_MAX - 1);
    replica.lose_incarnation();
    let outputs = poll(&mut replica);
    assert_eq!(outputs.fatal, None);
    assert_eq!(replica.run(), Incarnation::new(1, Incarnation::START_MAX));
    assert!(outputs.events.contains(&NodeEvent::NewIncarnation(replica.run())));
    let [write] = &outputs.writes[..] else { panic!("one write") };
    let noted = Incarnation::START_MAX.to_le_bytes().to_vec();
    assert_eq!(write.batch.notes, [(note::START.to_vec(), noted)]);
    assert!(write.sync, "before anybody hears of the run");
    replica.lose_incarnation();
    assert_eq!(poll(&mut replica).fatal.as_deref(), Some(crate::TOO_MANY_STARTS));
}

/// A leader of three voters, to whom 2 has answered last and 3 never.
fn elected() -> Replica {
    let mut replica = replica(&[1, 2, 3], 1);
    elect(&mut replica);
    // First the entry that opens the leadership, then the one with its own incarnation.
    acknowledge(&mut replica, 2);
    assert!(replica.is_open());
    acknowledge(&mut replica, 2);
    replica
}

/// Lets a voter of three wait until it wants to lead, and gives it the vote of 2.
fn elect(replica: &mut Replica) {
    let mut now = Timestamp(1);
    let mut asked = Vec::new();
    while asked.is_empty() {
        now = now + TICK;
        replica.handle_time(now);
        asked = message_types(&write_all(replica));
        assert!(now < Timestamp(0) + Span::from_secs(60), "it never wants to lead");
    }
    assert_eq!(asked, [MessageType::MsgRequestPreVote; 2]);
    // A vote that is asked for in advance is one of the next term.
    let (from, term) = (2, replica.status().term + 1);
    for msg_type in [MessageType::MsgRequestPreVoteResponse, MessageType::MsgRequestVoteResponse] {
        hear(replica, Message { msg_type, from, term, ..Default::default() });
        write_all(replica);
    }
    assert!(replica.consensus.is_leader());
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

/// A witness does not lead if others can, so it has no place in their order.
#[test]
fn a_place_is_that_among_full_voters() {
    let place = |rank, of| Some(Place { rank, of });
    let mut replica = replica(&[1, 2, 3], 1);
    assert_eq!(replica.place_without(None), place(0, 3));
    assert_eq!(replica.place_without(Some(2)), place(0, 2));
    assert_eq!(replica.place_without(Some(1)), None, "it is this node itself");
    replica.config.raft.id = 3;
    assert_eq!(replica.place_without(None), place(2, 3));
    assert_eq!(replica.place_without(Some(1)), place(1, 2));
    let mut fewer = self::replica(&[1, 3], 1);
    fewer.config.raft.id = 3;
    assert_eq!(fewer.place_without(None), place(1, 2), "2 does not vote");
    fewer.config.raft.id = 2;
    assert_eq!(fewer.place_without(None), None);
    let mut beside = replica_beside(&[1, 2], &[1, 2, 3], 1);
    assert_eq!(beside.place_without(None), None, "it is a witness");
    beside.config.raft.id = 3;
    assert_eq!(beside.place_without(None), place(0, 1));
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
    replica.handle_event(Event::IncarnationEnded(Incarnation::new(2, 1)));
    assert_eq!(replica.run(), Incarnation::new(1, 1), "another node was given up");
    replica.handle_event(Event::IncarnationEnded(Incarnation::new(1, 1)));
    assert_eq!(replica.run(), Incarnation::new(1, 2));
}

#[test]
fn what_is_applied_is_not_sent_again() {
    let (mut replica, now) = leader();
    assert!(replica.submit(&item(1), None));
    let has_unsent = |replica: &mut Replica| {
        replica.accepting.send_to((9, 9), 0, now);
        replica.accepting.next_unsent().is_some()
    };
    poll(&mut replica);
    assert!(has_unsent(&mut replica), "another leader would have to be sent it");
    write_all(&mut replica);
    let mut next = leader().0;
    assert!(next.submit(&item(1), None));
    write_all(&mut next);
    assert!(!has_unsent(&mut next));
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
    // In this state member 1 is in its first incarnation.
    let data = Bytes::from(leader().0.machine().snapshot());
    let install = |start| {
        let mut replica = replica(&[1, 2, 3], start);
        let mut metadata = replica.snapshot_metadata().clone();
        metadata.index = 9;
        replica.install(metadata, data.clone());
        assert_eq!(replica.status().applied, 9);
        let outputs = poll(&mut replica);
        assert!(outputs.events.contains(&NodeEvent::Skipped));
        assert_eq!(replica.run(), Incarnation::new(1, start), "nobody gave it up");
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
        assert_eq!(replica.snapshot_metadata().index, replica.status().snapshot);
        assert_eq!(replica.last_index(), replica.status().last);
        replica.poll(&mut outputs);
        let [(id, copy)] = &outputs.copies[..] else { panic!("one copy") };
        assert_eq!((*id, copy.index), (request, replica.status().snapshot));
        assert!(outputs.events.contains(&NodeEvent::Admin(request, Ok(()))));
        write_all(&mut replica);
    }
}

/// A copy of the state is for the entries that a witness has applied, and newer than the one it has: its log is cut
/// there.
#[test]
fn a_witness_keeps_a_snapshot_of_what_it_has_applied() {
    let (mut replica, _) = leader();
    let applied = replica.status().applied;
    assert!(applied > 2);
    let keeps = |replica: &mut Replica, index| {
        let mut message = Message { msg_type: MessageType::MsgSnapshot, ..Message::default() };
        message.mut_snapshot().mut_metadata().index = index;
        let header = codec::encode_message(&message);
        let complete = Complete { header, data: Bytes::from_static(b"state"), keep_only: true };
        replica.handle_transferred(2, complete);
        replica.snapshots.take_to_keep().map(|kept| kept.metadata.index)
    };
    assert_eq!(keeps(&mut replica, 2), None, "it is no witness");
    replica.config.witness = true;
    assert!(replica.consensus.propose(vec![Bytes::new()]));
    poll(&mut replica);
    assert!(replica.consensus.tail().last() > applied);
    assert_eq!(keeps(&mut replica, 1), None, "it has that one");
    assert_eq!(keeps(&mut replica, applied + 1), None, "it is not applied yet");
    assert_eq!(keeps(&mut replica, applied), Some(applied));
    assert_eq!(keeps(&mut replica, 2), None, "it has a newer one");
}

/// GUARANTEES R3: whoever leads next goes on from the highest time in its log, applied or not.
#[test]
fn time_is_seen_in_entries_that_are_not_applied() {
    let mut replica = replica(&[1, 2, 3], 1);
    let (from, term, index, log_term) = (2, 5, 1, 1);
    let msg_type = MessageType::MsgAppend;
    let mut append = Message { msg_type, from, term, index, log_term, ..Default::default() };
    let mut data = Vec::new();
    codec::begin_payload(&mut data, 1, Timestamp(5000));
    append.entries = vec![Entry { index: 2, term, data: data.into(), ..Default::default() }].into();
    hear(&mut replica, append);
    write_all(&mut replica);
    assert_eq!((replica.status().applied, replica.time_seen()), (1, Timestamp(5000)));
}

/// A leader tells the time, and sends an entry with that stamp if it is to.
fn tell_time(replica: &mut Replica, from: RaftId, term: u64, time: u64, with_entry: bool) {
    let time = Timestamp(time);
    let mut message = Message { from, to: 1, term, ..Default::default() };
    message.msg_type = MessageType::MsgHeartbeat;
    if with_entry {
        (message.msg_type, message.index, message.log_term) = (MessageType::MsgAppend, 1, 1);
        let mut data = Vec::new();
        codec::begin_payload(&mut data, 1, time);
        let entry = Entry { index: 2, term, data: data.into(), ..Default::default() };
        message.entries = vec![entry].into();
    }
    replica.handle_frame(from, Frame::Raft { time, message }.encode());
    write_all(replica);
}

/// GUARANTEES 2, 11: the time that the leader of an older term told is in no log, so a later one may have counted from
/// less. Who leads after that one goes on with its time, or its leases would end early.
#[test]
fn time_goes_on_from_the_last_leader() {
    // Terms, times and whether an entry has the time; then the time at which the next leadership begins.
    let told = [(5, 9000, false)];
    let counted_from_less = [(5, 9000, false), (6, 2000, true)];
    let replaced = [(5, 9000, true), (6, 2000, true)];
    let not_replaced = [(5, 9000, true), (6, 2000, false)];
    let cases: [(&[_], _); 4] =
        [(&told, 9000), (&counted_from_less, 2000), (&replaced, 2000), (&not_replaced, 9000)];
    for (times, begins_at) in cases {
        let mut replica = replica(&[1, 2, 3], 1);
        for &(term, time, with_entry) in times {
            let from = if term == 5 { 2 } else { 3 };
            tell_time(&mut replica, from, term, time, with_entry);
        }
        elect(&mut replica);
        assert_eq!(replica.cluster_time(), Some(Timestamp(begins_at)), "{times:?}");
    }
}

/// A member says that it has started, and which versions it reads.
fn start_of(run: Incarnation, version: u32) -> Bytes {
    let client_addr = String::new();
    let start = Start { disk: run.raft_id(), client_addr, version, witness: false };
    let (session, request, body) = (SessionId(0), RequestId(0), ProposalBody::Start(start));
    let mut bytes = Vec::new();
    codec::put_item(&mut bytes, &Proposal { session, epoch: 0, request, keep: false, body });
    Frame::Forward(Batch { run, first_seq: 1, count: 1, bytes: bytes.into() }).encode()
}

/// GUARANTEES 42: a version that all members read is used when an operator says so, and no sooner.
#[test]
fn a_version_is_raised_by_an_operator() {
    let (mut replica, _) = leader();
    let mut id = 0;
    let mut finalize = |replica: &mut Replica| {
        id += 1;
        replica.admin(id, AdminRequest::Finalize);
        let events = write_all(replica).events;
        let answer = |event: &NodeEvent| {
            let NodeEvent::Admin(of, result) = event else { return None };
            (*of == id).then(|| result.clone())
        };
        events.iter().find_map(answer).expect("it is answered")
    };
    assert!(finalize(&mut replica).unwrap_err().contains("has not said yet"));
    for other in [2, 3] {
        replica.handle_frame(other, start_of(Incarnation::new(other, 1), 2));
    }
    write_all(&mut replica);
    let why = finalize(&mut replica).unwrap_err();
    assert!(why.contains("not all members read version 2: n1 (up to 1);"), "{why}");
    // It is started again as a newer program.
    replica.config.start.version = 2;
    replica.renew_incarnation(replica.run());
    write_all(&mut replica);
    assert_eq!(replica.machine().version(), 1, "nobody has said so");
    assert_eq!(finalize(&mut replica), Ok(()));
    assert_eq!(replica.machine().version(), 2);
    write_all(&mut replica);
    let last = replica.status().last;
    assert_eq!(finalize(&mut replica), Ok(()));
    assert_eq!(replica.status().last, last, "there is nothing to do");
}

/// A member that starts again may have lost what it had acknowledged: the leader finds out how far its log reaches.
#[test]
fn what_a_member_has_is_not_believed_after_its_start() {
    let mut replica = elected();
    let last = replica.status().last;
    assert_eq!(replica.lags(), [(2, 0), (3, last)]);
    replica.handle_frame(2, start_of(Incarnation::new(2, 1), 1));
    assert_eq!(replica.lags(), [(2, last), (3, last)]);
    acknowledge(&mut replica, 2);
    assert!(replica.lags()[0].1 < last, "it has said so itself");
}

/// GUARANTEES 33: a witness has no clients, and leads only until somebody else can.
#[test]
fn a_witness_takes_and_proposes_nothing() {
    let mut replica = replica(&[1], 1);
    replica.config.witness = true;
    assert!(!replica.submit(&item(1), None));
    let close = ProposalBody::Close { orderly: true, referenced: false };
    assert!(!replica.submit(&Proposal { body: close, ..item(2) }, None), "not even an end");
    let mut now = Timestamp(1);
    for _ in 0..300 {
        now = now + TICK;
        replica.handle_time(now);
        write_all(&mut replica);
    }
    let status = replica.status();
    assert_eq!((status.role, replica.is_open()), (Role::Leader, false));
    assert_eq!(status.last, 2, "the empty entry that Raft begins a term with");
}

/// Who has no state yet is told where the others are, until it has some.
#[test]
fn new_members_are_introduced() {
    let (mut replica, mut now) = leader();
    let mut introduced = |replica: &mut Replica| {
        now = now + LOOK;
        replica.handle_time(now);
        let outputs = write_all(replica);
        let to = |outgoing: &Outgoing| match Frame::decode(outgoing.bytes.clone()) {
            Ok(Frame::Members { members }) => {
                let members = codec::unpack::<BTreeMap<RaftId, Member>>(&members);
                assert_eq!(members.expect("it was just made"), *replica.machine().members());
                Some(outgoing.to)
            }
            _ => None,
        };
        outputs.frames.iter().filter_map(to).collect::<Vec<_>>()
    };
    assert_eq!(introduced(&mut replica), [2, 3]);
    acknowledge(&mut replica, 2);
    assert_eq!(introduced(&mut replica), [3]);
    acknowledge(&mut replica, 3);
    assert_eq!(introduced(&mut replica), [] as [RaftId; 0]);
}

/// A node is level with its leader when it has applied what an append said is committed.
#[test]
fn a_leader_says_what_is_committed() {
    let mut replica = replica(&[1, 2, 3], 1);
    let (from, term, index, log_term, commit) = (2, 5, 1, 1, 7);
    let msg_type = MessageType::MsgAppend;
    hear(
        &mut replica,
        Message { msg_type, from, term, index, log_term, commit, ..Default::default() },
    );
    assert!(!replica.candidacy.is_level(6) && replica.candidacy.is_level(7));
}

/// Who is alone waits for nobody. Others give a leader the time to be heard.
#[test]
fn a_single_voter_leads_at_once() {
    let role = |voters: &[RaftId]| {
        let mut replica = replica(voters, 1);
        replica.handle_time(Timestamp(1) + TICK);
        write_all(&mut replica);
        replica.status().role
    };
    assert_eq!((role(&[1]), role(&[1, 2, 3])), (Role::Leader, Role::Follower));
}
