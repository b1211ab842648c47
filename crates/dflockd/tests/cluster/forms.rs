//! The form of answers while nobody decides (GUARANTEES 47). That every answer has a form of its row is checked by the
//! client of the tests; here is what each blocking command may say when its leader does not move.

use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::line::ANSWER;
use dflockd_testkit::{Client, Cluster, Heard, Turn, millis};

/// How long each of them waits, in seconds.
const WAIT: u64 = 2;

/// Every command that blocks, with what it waits for, and how its answer is called if there is nothing to be had.
const BLOCKING: [(&str, &str, &str, &str); 14] = [
    ("l", "mutex", "2 60", "timeout"),
    ("sl", "semaphore", "2 1 60", "timeout"),
    ("rl", "rw", "2 60", "timeout"),
    ("wl", "rw", "2 60", "timeout"),
    ("elect", "election", "2 60", "timeout"),
    ("w", "mutex", "2", "timeout"),
    ("sw", "semaphore", "2", "timeout"),
    ("rw", "rw", "2", "timeout"),
    ("ww", "rw", "2", "timeout"),
    ("blpop", "empty", "2", "nil"),
    ("brpop", "empty", "2", "nil"),
    ("blpop", "other", "2", "nil"),
    ("bwait", "barrier", "9 2", "timeout"),
    ("bwait", "other", "9 2", "timeout"),
];

/// A connection of each command, queued before if it is one that only waits.
fn prepare(cluster: &Cluster, at: usize) -> Vec<Client> {
    let queue = |command: &str, key: &str| {
        let mut client = cluster.connect(at);
        let enqueue = match command {
            "w" => Some(("e", "60")),
            "sw" => Some(("se", "1 60")),
            "rw" => Some(("re", "60")),
            "ww" => Some(("we", "60")),
            _ => None,
        };
        if let Some((enqueue, arg)) = enqueue {
            client.check(enqueue, key, arg, "queued");
        }
        client
    };
    BLOCKING.iter().map(|(command, key, ..)| queue(command, key)).collect()
}

fn begin(clients: &mut [Client]) {
    for (client, (command, key, arg, _)) in clients.iter_mut().zip(BLOCKING) {
        client.begin(command, key, arg);
    }
}

/// That each is answered in time, with what it may say.
#[track_caller]
fn check(clients: &mut [Client], when: &str) {
    for (client, (command, key, _, over)) in clients.iter_mut().zip(BLOCKING) {
        // Its own time, and five seconds in which its node may hope for somebody who decides.
        let heard = client.hear(Duration::from_secs(WAIT) + ANSWER);
        let is_so = heard.line().is_some_and(|line| line == over || line == "error_unknown");
        assert!(is_so, "{command} {key}, begun {when}: {heard:?}");
    }
}

/// The leader stops for longer than the wait. Either another one takes over, or one more stops, and nobody can.
fn stop_the_leader(and_another: bool, stopped: Duration) {
    let flags = ["--election-timeout-ms", "500"];
    let mut cluster = Cluster::start_with(Turn::shared(), 3, &flags);
    let mut holder = cluster.connect(0);
    for (command, key, arg) in [
        ("l", "mutex", "0 600"),
        ("sl", "semaphore", "0 1 600"),
        ("wl", "rw", "0 600"),
        ("elect", "election", "0 600"),
    ] {
        dflockd_testkit::granted(&holder.ask(command, key, arg));
    }
    let (leader, others) = cluster.leader_and_others();
    let mut before = prepare(&cluster, others[0]);
    let mut after = prepare(&cluster, others[usize::from(!and_another)]);
    begin(&mut before);
    cluster.connect(others[0]).wait_for_waiters("election", 1);
    let stopped_at = Instant::now();
    let still = if and_another { vec![leader, others[1]] } else { vec![leader] };
    still.iter().for_each(|&at| cluster.nodes[at].process().signal("STOP"));
    begin(&mut after);
    thread::scope(|scope| {
        scope.spawn(|| check(&mut before, "before the leader stopped"));
        scope.spawn(|| check(&mut after, "while the leader stood still"));
    });
    thread::sleep(stopped.saturating_sub(stopped_at.elapsed()));
    still.iter().for_each(|&at| cluster.nodes[at].process().signal("CONT"));
    cluster.wait_until_ready();
    // What nobody was told of was given back, and what is pushed now is there.
    for client in before.iter_mut().chain(&mut after) {
        assert_eq!(client.hear(millis(1)), Heard::Nothing, "a second answer");
    }
    let mut client = cluster.connect(leader);
    client.check("rpush", "empty", "item", "ok 1");
    client.check("blpop", "empty", "2", "ok item");
}

#[test]
fn what_blocks_is_answered_in_its_form_while_another_leader_takes_over() {
    stop_the_leader(false, Duration::from_secs(WAIT + 1));
}

#[test]
fn what_blocks_is_answered_in_its_form_while_nobody_leads() {
    stop_the_leader(true, Duration::from_secs(WAIT + 1));
}
