//! Members come and go (GUARANTEES 41). The nodes run in this process, because only there can changes be asked for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dflockd::config::{Config, Parsed};
use dflockd::{Signal, run};
use dflockd_engine::Replicated;
use dflockd_replica::admin::{AdminRequest, AdminResult};
use dflockd_testkit::cluster::CALM_MS;
use dflockd_testkit::line::ANSWER;
use dflockd_testkit::{Client, Dir, LIMIT, Node, Turn, eventually, millis};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::load::Load;

/// Nodes of one cluster, started one by one.
struct Site {
    runtime: Runtime,
    dir: Dir,
    election_ms: &'static str,
    _turn: Turn,
}

struct Member {
    name: String,
    client: SocketAddr,
    peer: SocketAddr,
    flags: Vec<String>,
    life: Option<Life>,
}

struct Life {
    member: Arc<Replicated>,
    signals: mpsc::UnboundedSender<Signal>,
    serving: JoinHandle<Result<(), String>>,
}

impl Site {
    fn new() -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        Self { runtime, dir: Dir::new(), election_ms: "1000", _turn: Turn::shared() }
    }

    /// One where a busy machine is no reason for an election.
    fn calm() -> Self {
        Self { election_ms: CALM_MS, ..Self::new() }
    }

    fn member(&self, name: &str, formation: &[&str]) -> Member {
        let flags = [&["--election-timeout-ms", self.election_ms], formation].concat();
        let node = Node::anywhere(name, self.dir.path(name), &flags);
        let Node { client, peer, flags, .. } = node;
        Member { name: name.to_owned(), client, peer, flags, life: None }
    }

    fn start(&self, member: &mut Member) {
        let begun = Instant::now();
        let running = loop {
            let parsed = Config::from_args(member.flags.iter().cloned(), &|_| None);
            let Ok(Parsed::Run(config)) = parsed else { panic!("the flags start a server") };
            match self.runtime.block_on(run(*config)) {
                Ok(running) => break running,
                // Threads of an earlier life may still be about to end.
                Err(why) => assert!(begun.elapsed() < LIMIT, "it does not start: {why:#}"),
            }
            std::thread::sleep(millis(20));
        };
        let replicated = Arc::clone(running.member().expect("it is replicated"));
        let (signals, receiver) = mpsc::unbounded_channel();
        let serving = self.runtime.spawn(async move {
            running.serve(receiver, || {}).await.map_err(|error| format!("{error:#}"))
        });
        member.life = Some(Life { member: replicated, signals, serving });
    }

    /// A cluster of one.
    fn bootstrap(&self) -> Member {
        let mut first = self.member("node-a", &["--cluster-bootstrap"]);
        self.start(&mut first);
        first.wait_until_ready();
        first
    }

    /// A cluster of three, grown from one.
    fn grow(&self) -> Vec<Member> {
        let mut members = vec![self.bootstrap()];
        for name in ["node-b", "node-c"] {
            let mut new = self.member(name, &[]);
            self.start(&mut new);
            self.admin(&members[0], add(&new)).unwrap();
            self.promote(&members[0], &new);
            members.push(new);
        }
        members
    }

    fn admin(&self, by: &Member, request: AdminRequest) -> AdminResult {
        let member = Arc::clone(&by.life().member);
        self.runtime.block_on(async move {
            tokio::time::timeout(LIMIT, member.admin(request)).await.expect("it is answered")
        })
    }

    /// As soon as it has caught up.
    #[track_caller]
    fn promote(&self, by: &Member, new: &Member) {
        let begun = Instant::now();
        while let Err(why) = self.admin(by, AdminRequest::Promote { node: new.name.clone() }) {
            assert!(begun.elapsed() < LIMIT, "{why}");
            assert!(why.contains("caught up") || why.contains("under way"), "{why}");
            std::thread::sleep(millis(20));
        }
        new.wait_until_ready();
    }

    /// Ends a node as an operator would.
    fn stop(&self, member: &mut Member) {
        let life = member.life.take().expect("it runs");
        life.signals.send(Signal::Terminate).unwrap();
        self.end_of(life).expect("an orderly end");
    }

    /// That a node ends because it is no member any more.
    #[track_caller]
    fn check_removed(&self, member: &mut Member) {
        let life = member.life.take().expect("it runs");
        let why = self.end_of(life).unwrap_err();
        assert!(why.contains("removed"), "{why}");
    }

    /// That a request is refused, and why.
    #[track_caller]
    fn refused(&self, by: &Member, request: AdminRequest, reason: &str) {
        let why = self.admin(by, request).unwrap_err();
        assert!(why.contains(reason), "{why}");
    }

    /// What became of a node that ends.
    fn end_of(&self, life: Life) -> Result<(), String> {
        let end = self.runtime.block_on(async { tokio::time::timeout(LIMIT, life.serving).await });
        end.expect("it ends").expect("no panic")
    }
}

impl Member {
    fn life(&self) -> &Life {
        self.life.as_ref().expect("it runs")
    }

    #[track_caller]
    fn wait_until_ready(&self) {
        eventually(&format!("{} is ready", self.name), || self.life().member.is_ready());
    }

    fn connect(&self) -> Client {
        Client::connect(self.client).unwrap()
    }

    fn leads(&self) -> bool {
        let life = self.life.as_ref();
        life.is_some_and(|life| life.member.is_ready() && life.member.view().is_leader())
    }

    fn term(&self) -> u64 {
        self.life().member.view().status.map_or(0, |status| status.term)
    }

    /// Their names in order.
    fn voters(&self) -> Vec<String> {
        let view = self.life().member.view();
        let name = |id| view.members.get(id).map(|member| member.node.clone());
        let mut names: Vec<_> = view.voters.iter().filter_map(name).collect();
        names.sort();
        names
    }

    fn has_learners(&self) -> bool {
        !self.life().member.view().learners.is_empty()
    }
}

fn add(member: &Member) -> AdminRequest {
    AdminRequest::Add {
        node: member.name.clone(),
        peer_addr: member.peer.to_string(),
        client_addr: member.client.to_string(),
        witness: false,
    }
}

fn remove(name: &str) -> AdminRequest {
    AdminRequest::Remove { node: name.into() }
}

#[track_caller]
fn leader(members: &[Member]) -> usize {
    eventually("a leader", || members.iter().position(Member::leads))
}

#[test]
fn one_node_grows_to_three_under_load() {
    let site = Site::new();
    let first = site.bootstrap();
    let load = Load::start("grow", 2, &[first.client]);
    load.wait_for_more(100);

    let mut second = site.member("node-b", &[]);
    // A node that nobody has added waits, and says so.
    site.start(&mut second);
    assert!(!second.life().member.is_ready());
    let heard = second.connect().try_ask("incr", "early", "1", ANSWER);
    assert!(heard.line().is_some_and(|line| line.starts_with("error")), "{heard:?}");
    let mut third = site.member("node-c", &[]);

    site.admin(&first, add(&second)).unwrap();
    // Twice is once.
    site.admin(&first, add(&second)).unwrap();
    // Not there yet, so it can not have caught up.
    site.admin(&first, add(&third)).unwrap();
    site.refused(&first, AdminRequest::Promote { node: "node-c".into() }, "caught up");
    assert_eq!(first.voters(), ["node-a"]);
    site.promote(&first, &second);
    assert_eq!(second.voters(), ["node-a", "node-b"]);
    site.start(&mut third);
    // Asked of another one, the leader decides all the same.
    site.promote(&second, &third);
    for member in [&first, &second, &third] {
        eventually("all know", || member.voters().len() == 3);
        assert!(!member.has_learners());
    }
    load.wait_for_more(50);
    let ledger = load.stop_unrefused();
    for member in [&first, &second, &third] {
        ledger.check(&mut member.connect());
    }
    // And it bears the loss of one.
    let mut first = first;
    site.stop(&mut first);
    second.connect().check("incr", "count", "1", "ok 1");
    third.connect().check("incr", "count", "1", "ok 2");
}

#[test]
fn changes_do_not_overlap() {
    let site = Site::new();
    let members = site.grow();
    let at = leader(&members);
    let (d, e) = (site.member("node-d", &[]), site.member("node-e", &[]));
    let member = Arc::clone(&members[at].life().member);
    let (first, second) =
        site.runtime.block_on(async { tokio::join!(member.admin(add(&d)), member.admin(add(&e))) });
    // Either the second came too early, or the first was done by then.
    let refused: Vec<_> = [first, second].into_iter().filter_map(Result::err).collect();
    assert!(refused.iter().all(|why| why.contains("under way")), "{refused:?}");
    assert!(refused.len() <= 1, "{refused:?}");
    println!("overlapping changes refused: {refused:?}");
    site.refused(&members[0], AdminRequest::Promote { node: "node-x".into() }, "node-x");
    let mut thief = site.member("node-t", &[]);
    thief.peer = members[1].peer;
    site.refused(&members[0], add(&thief), "address");
    members[at].connect().check("incr", "count", "1", "ok 1");
}

#[test]
fn a_removed_follower_ends_and_never_comes_back() {
    let site = Site::calm();
    let mut members = site.grow();
    let at = leader(&members);
    let gone = (at + 1) % 3;
    let other = (at + 2) % 3;
    let load = Load::start("rm", 2, &[members[at].client, members[other].client]);
    load.wait_for_more(30);
    let name = members[gone].name.clone();
    site.admin(&members[other], remove(&name)).unwrap();
    // Twice is once.
    site.admin(&members[at], remove(&name)).unwrap();
    site.check_removed(&mut members[gone]);
    eventually("all know", || members[other].voters().len() == 2);
    site.refused(&members[at], add(&members[gone]), "never");

    // With its old data it can neither vote nor raise the term.
    let term = members[at].term();
    let returned = site.member(&name, &[]);
    members[gone] = returned;
    site.start(&mut members[gone]);
    let begun = Instant::now();
    // Longer than it waits for a leader.
    while begun.elapsed() < Duration::from_secs(5) {
        load.wait_for_more(5);
        std::thread::sleep(millis(20));
    }
    let heard = Client::connect(members[gone].client)
        .map(|mut client| client.try_ask("incr", "rm-gone", "1", Duration::from_secs(8)));
    if let Ok(heard) = heard {
        assert!(!heard.line().is_some_and(|line| line.starts_with("ok")), "{heard:?}");
    }
    assert_eq!(members[at].term(), term, "a removed node made an election");
    let ledger = load.stop_unrefused();
    ledger.check(&mut members[other].connect());
}

#[test]
fn the_leader_can_be_removed() {
    let site = Site::new();
    let mut members = site.grow();
    let at = leader(&members);
    let others = [(at + 1) % 3, (at + 2) % 3];
    let load = Load::start("lead", 2, &others.map(|other| members[other].client));
    load.wait_for_more(30);
    let name = members[at].name.clone();
    site.admin(&members[others[0]], remove(&name)).unwrap();
    site.check_removed(&mut members[at]);
    load.wait_for_more(50);
    let ledger = load.stop_unrefused();
    println!("the leader was removed: {:?} without an answer", ledger.longest_gap());
    for other in others {
        assert_eq!(members[other].voters().len(), 2);
        ledger.check(&mut members[other].connect());
    }
    // The same, asked of the leader itself.
    let at = leader(&members);
    let last = others.into_iter().find(|&other| other != at).unwrap();
    let name = members[at].name.clone();
    let member = Arc::clone(&members[at].life().member);
    let asked = site.runtime.spawn(async move { member.admin(remove(&name)).await });
    site.check_removed(&mut members[at]);
    assert_eq!(site.runtime.block_on(asked).unwrap(), Ok(()), "it says so before it ends");
    eventually("one is left", || members[last].voters().len() == 1);
    members[last].connect().check("incr", "alone", "1", "ok 1");
    let name = members[last].name.clone();
    site.refused(&members[last], remove(&name), "no other voter could lead");
}

#[test]
fn a_dead_node_is_replaced() {
    let site = Site::new();
    let mut members = site.grow();
    let at = leader(&members);
    let dead = (at + 1) % 3;
    let mut client = members[at].connect();
    let token = client.lock("lock", "0 60");
    // Without a word, so that its lock stays.
    client.reset();
    site.stop(&mut members[dead]);
    let mut new = site.member("node-d", &[]);
    site.start(&mut new);
    site.admin(&members[at], add(&new)).unwrap();
    site.promote(&members[at], &new);
    let name = members[dead].name.clone();
    site.admin(&members[at], remove(&name)).unwrap();
    let mut wanted: Vec<_> =
        members.iter().map(|member| member.name.clone()).filter(|other| *other != name).collect();
    wanted.push("node-d".into());
    wanted.sort();
    for member in [&members[at], &new] {
        eventually("all know", || member.voters() == wanted);
    }
    // The new one counts: with it and one of the old ones the cluster goes on.
    site.stop(&mut members[at]);
    let mut client = new.connect();
    client.check("l", "lock", "0", "timeout");
    client.check("r", "lock", &token, "ok");
}

/// GUARANTEES 41, 43: a voter was away while the others were exchanged. It knows neither that the new one votes nor
/// where it is, and both are a majority when the last one that it knew is lost.
#[test]
fn a_voter_that_was_away_elects_one_that_it_does_not_know() {
    let site = Site::new();
    let mut members = site.grow();
    let at = leader(&members);
    let (away, other) = ((at + 1) % 3, (at + 2) % 3);
    site.stop(&mut members[away]);
    let mut new = site.member("node-d", &[]);
    site.start(&mut new);
    site.admin(&members[at], add(&new)).unwrap();
    site.promote(&members[at], &new);
    let name = members[other].name.clone();
    site.admin(&members[at], remove(&name)).unwrap();
    site.check_removed(&mut members[other]);
    members[at].connect().check("incr", "count", "1", "ok 1");
    site.stop(&mut members[at]);
    site.start(&mut members[away]);
    for member in [&new, &members[away]] {
        member.wait_until_ready();
        assert_eq!(member.voters().len(), 3);
    }
    members[away].connect().check("incr", "count", "1", "ok 2");
}

/// GUARANTEES 50: with one of three voters down, neither of the others may go. By force it goes, and then nothing is
/// decided until the one that is down comes back.
#[test]
fn no_removal_leaves_fewer_reachable_voters_than_a_majority() {
    let site = Site::new();
    let mut members = site.grow();
    let at = leader(&members);
    let (down, other) = ((at + 1) % 3, (at + 2) % 3);
    site.stop(&mut members[down]);
    let stopped = Instant::now();
    let mut client = members[at].connect();
    let mut count = 0;
    // Until an election timeout has passed it counts as reachable.
    while stopped.elapsed() < Duration::from_millis(1500) {
        count += 1;
        client.check("incr", "count", "1", &format!("ok {count}"));
    }
    let why = format!("not reachable: {};", members[down].name);
    let name = members[other].name.clone();
    for asked in [at, other] {
        site.refused(&members[asked], remove(&name), &why);
    }
    let leader_name = members[at].name.clone();
    site.refused(&members[other], remove(&leader_name), &why);
    assert!(members[at].leads(), "a refused removal leaves the leader where it is");
    assert_eq!(members[at].voters().len(), 3);

    site.admin(&members[at], AdminRequest::remove(name, true)).unwrap();
    site.check_removed(&mut members[other]);
    let heard = members[at].connect().try_ask("incr", "count", "1", millis(500));
    assert!(heard.line().is_none(), "one of two voters decides nothing: {heard:?}");
    site.start(&mut members[down]);
    members[down].wait_until_ready();
    assert_eq!(members[down].voters().len(), 2);
}

#[test]
fn leadership_can_be_given_to_somebody() {
    let site = Site::new();
    let members = site.grow();
    let at = leader(&members);
    let to = (at + 1) % 3;
    let load = Load::start("give", 2, &[members[(at + 2) % 3].client]);
    load.wait_for_more(30);
    let request = AdminRequest::Transfer { to: Some(members[to].name.clone()) };
    site.admin(&members[(at + 2) % 3], request).unwrap();
    eventually("it leads", || members[to].leads());
    load.wait_for_more(30);
    let ledger = load.stop();
    println!("a hand-over: {:?} without an answer", ledger.longest_gap());
    assert!(ledger.refused().is_empty(), "{:?}", ledger.refused());
    ledger.check(&mut members[to].connect());
}

/// GUARANTEES 20: what nobody can decide is never told as "not held". Who has no word for it waits for a decision.
#[test]
fn a_node_that_is_no_member_decides_nothing() {
    let _turn = Turn::shared();
    let dir = Dir::new();
    let mut node = Node::anywhere("alone", dir.path("alone"), &[]);
    node.start();
    let token = "0123456789abcdef0123456789abcdef";
    let asked = [("n", token), ("r", token), ("l", "0"), ("l", "6"), ("kget", "")];
    let mut plain: Vec<_> = asked.iter().map(|_| node.connect()).collect();
    let begun = Instant::now();
    for ((command, arg), plain) in asked.iter().zip(&mut plain) {
        plain.begin(command, "k", arg);
    }
    let mut greeted = node.connect();
    greeted.check("hello", "me", "ms", "ok ms");
    for (command, arg) in asked {
        greeted.check(command, "k", arg, "error_unavailable");
    }
    let mut kept = node.connect();
    kept.check("hello", "me", "keep", "error_unavailable");
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    for ((command, arg), plain) in asked.iter().zip(&mut plain) {
        assert_eq!(plain.line(), "error", "{command}");
        let least = if *arg == "6" { 6 } else { 5 };
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_secs(least), "{command} {arg} waited {waited:?}");
        // It goes on with what came behind.
        plain.check("ping", "_", "", "ok");
    }
}
