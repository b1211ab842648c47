//! What operators of a cluster look at (`/metrics` of each member), and that it moves with what happens: syncs, lags of
//! followers, the lag of time, kept results, bytes of log and snapshot, elections.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use dflockd_testkit::cluster::NAMES;
use dflockd_testkit::http::{Ask, Wire};
use dflockd_testkit::{Client, Cluster, Heard, Turn, eventually, millis};
use serde_json::{Value, json};

use super::operate::{ADMIN, operate};

struct Site {
    cluster: Cluster,
    http: Vec<SocketAddr>,
}

impl Site {
    fn start() -> Self {
        let flags = [&ADMIN[..], &["--election-timeout-ms", "500"]].concat();
        let mut cluster = Cluster::prepare(Turn::shared(), 3, &flags);
        let http = cluster.add_api("--http-port");
        cluster.start_all();
        Self { cluster, http }
    }

    /// All samples of a member, by name and labels.
    #[track_caller]
    fn scrape(&self, at: usize) -> BTreeMap<String, f64> {
        let page = Wire::open(self.http[at], None).ask(&Ask::get("/metrics")).text();
        let samples = page.lines().filter(|line| line.starts_with("dflockd_"));
        let samples = samples.filter_map(|line| line.rsplit_once(' '));
        samples.map(|(name, value)| (name.to_owned(), value.parse().unwrap())).collect()
    }

    #[track_caller]
    fn get(&self, at: usize, name: &str) -> f64 {
        let page = self.scrape(at);
        *page.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", page.keys()))
    }

    #[track_caller]
    fn wait_for(&self, at: usize, name: &str, is_so: impl Fn(f64) -> bool) -> f64 {
        eventually(&format!("{name} of {}", NAMES[at]), || {
            Some(self.get(at, name)).filter(|it| is_so(*it))
        })
    }
}

fn lag_of(at: usize) -> String {
    format!("dflockd_raft_follower_lag_entries{{node=\"{}\"}}", NAMES[at])
}

const TIME_LAG: &str = "dflockd_raft_time_lag_seconds";
const ELECTIONS: &str = "dflockd_raft_elections_total";
const LOOKS: &str = "dflockd_raft_looks_total";

#[test]
fn syncs_bytes_results_and_followers_are_measured() {
    let site = Site::start();
    let (leader, others) = site.cluster.leader_and_others();
    let mut client = site.cluster.connect(leader);

    let syncs = "dflockd_raft_fsync_seconds_count";
    let before: Vec<f64> = (0..3).map(|at| site.get(at, syncs)).collect();
    let log_before = site.get(leader, "dflockd_raft_log_bytes");
    for number in 0..20 {
        client.check("kset", &format!("key-{number}"), &"x".repeat(5000), "ok");
    }
    for (at, before) in before.into_iter().enumerate() {
        site.wait_for(at, syncs, |count| count > before);
        let took = site.get(at, "dflockd_raft_fsync_seconds_sum");
        assert!(took > 0.0 && took < 600.0, "{took}");
    }
    // The log grows by a file when there is no room in the last.
    for _ in 0..300 {
        client.check("kset", "large", &"x".repeat(60_000), "ok");
    }
    site.wait_for(leader, "dflockd_raft_log_bytes", |bytes| bytes > log_before);
    // A snapshot of 160 kB of values.
    let index = site.get(others[0], "dflockd_raft_snapshot_index");
    operate(&mut site.cluster.connect(others[0]), "snapshot", json!({}));
    site.wait_for(others[0], "dflockd_raft_snapshot_index", |now| now > index);
    client.check("kset", "after", "it", "ok");
    site.wait_for(others[0], "dflockd_raft_snapshot_bytes", |bytes| (160e3..1e6).contains(&bytes));

    // Kept results, on all members, until they are acknowledged.
    let mut kept = site.cluster.connect(others[1]);
    let greeting = kept.ask("hello", "me", "mux keep");
    assert!(greeting.contains(" mux") && greeting.contains(" keep="), "{greeting}");
    for number in 1..=7 {
        let answer = format!("{number} ok {number}");
        kept.check(&format!("{number} incr"), "count", "1", &answer);
    }
    for at in 0..3 {
        site.wait_for(at, "dflockd_kept_results", |count| count == 7.0);
        assert!(site.get(at, "dflockd_kept_results_bytes") > 7.0);
    }
    kept.check("8 ack", "_", "7", "8 ok");
    for at in 0..3 {
        site.wait_for(at, "dflockd_kept_results", |count| count <= 1.0);
    }

    // A follower that stands still.
    let slow = others[0];
    site.wait_for(leader, &lag_of(slow), |lag| lag == 0.0);
    site.cluster.nodes[slow].process.as_ref().unwrap().signal("STOP");
    for number in 0..30 {
        client.check("incr", "behind", "1", &format!("ok {}", number + 1));
    }
    site.wait_for(leader, &lag_of(slow), |lag| lag >= 30.0);
    site.wait_for(leader, &lag_of(others[1]), |lag| lag < 30.0);
    site.cluster.nodes[slow].process.as_ref().unwrap().signal("CONT");
    // Whoever leads now.
    eventually("it has caught up", || {
        let leader = site.cluster.leader();
        (leader == slow || site.scrape(leader).get(&lag_of(slow)) == Some(&0.0)).then_some(())
    });
}

#[test]
fn elections_and_the_lag_of_time_are_measured() {
    let mut site = Site::start();
    let (leader, others) = site.cluster.leader_and_others();
    assert!(site.get(leader, ELECTIONS) >= 1.0, "whoever leads has stood for it");
    assert_eq!(site.get(leader, TIME_LAG), 0.0);
    for &at in &others {
        // It is told the time every 150 ms.
        site.wait_for(at, TIME_LAG, |lag| lag < 1.0);
    }
    let before: Vec<f64> = (0..3).map(|at| site.get(at, ELECTIONS)).collect();
    site.cluster.nodes[leader].kill();
    let next = site.cluster.leader_among(&others);
    site.wait_for(next, ELECTIONS, |count| count > before[next]);
    assert!(site.get(next, "dflockd_raft_leader_changes_total") >= 2.0);

    // Nobody is left to tell the last one the time.
    let last = others.into_iter().find(|&at| at != next).unwrap();
    site.cluster.nodes[next].kill();
    let lag = site.wait_for(last, TIME_LAG, |lag| lag > 2.0);
    site.wait_for(last, TIME_LAG, |later| later > lag + 1.0);
    site.wait_for(last, "dflockd_raft_has_leader", |has| has == 0.0);
    site.cluster.nodes[next].start();
    let now = site.cluster.leader_among(&[next, last]);
    assert_eq!(site.get(now, TIME_LAG), 0.0);
    let follows = if now == last { next } else { last };
    site.wait_for(follows, TIME_LAG, |lag| lag < 1.0);
}

/// What a member says of its cluster when it is asked for nothing else.
#[track_caller]
fn members(client: &mut Client) -> Value {
    let answer = client.ask("stats", "_", "cluster");
    let told = answer.strip_prefix("ok ").unwrap_or_else(|| panic!("{answer}"));
    let mut told: Value = serde_json::from_str(told).unwrap();
    assert_eq!(told.as_object().unwrap().len(), 1, "nothing else: {told}");
    told["cluster"].take()
}

/// GUARANTEES 48: every client of a cluster asks for the members now and then. That costs the member no look at its
/// state, and it is answered without a majority.
#[test]
fn members_are_told_without_a_look_at_the_state() {
    let mut site = Site::start();
    let (leader, others) = site.cluster.leader_and_others();
    let mut client = site.cluster.connect(leader);
    client.check("incr", "count", "1", "ok 1");

    let before = site.get(leader, LOOKS);
    for _ in 0..50 {
        let told = members(&mut client);
        assert_eq!(told["leader_id"], NAMES[leader]);
        let listed: Vec<_> = told["members"].as_array().unwrap().iter().collect();
        assert_eq!(listed.len(), 3);
        assert!(listed.iter().all(|member| member["client_addr"].is_string()), "{told}");
    }
    assert_eq!(site.get(leader, LOOKS), before + 1.0, "there is only that of /metrics itself");
    for _ in 0..50 {
        assert_eq!(client.stats()["cluster"]["leader_id"], NAMES[leader]);
    }
    assert_eq!(site.get(leader, LOOKS), before + 52.0);

    for at in others {
        site.cluster.nodes[at].kill();
    }
    let alone = eventually("it leads no more", || {
        let told = members(&mut client);
        (told["ready"] == false).then_some(told)
    });
    assert_eq!(alone["members"].as_array().unwrap().len(), 3, "{alone}");
}

/// GUARANTEES 48: members are asked for news only when there are some, however many follow, and once for all of them.
/// GUARANTEES 31: who follows through another member is told all the same.
#[test]
fn event_streams_cost_nothing_while_nothing_changes() {
    let site = Site::start();
    let (leader, others) = site.cluster.leader_and_others();
    let mut client = site.cluster.connect(leader);
    for at in [leader, others[0]] {
        let watch = || {
            let mut wire = Wire::open(site.http[at], None);
            wire.begin(&Ask::get("/v1/watch?pattern=k.*"));
            wire.into_events()
        };
        let mut streams: Vec<_> = (0..20).map(|_| watch()).collect();
        let before = site.get(at, LOOKS);
        std::thread::sleep(millis(1000));
        assert_eq!(site.get(at, LOOKS), before + 1.0, "there is only that of /metrics itself");
        for round in 1..=3 {
            client.check("kset", "k.a", "v", "ok");
            for stream in &mut streams {
                assert_eq!(stream.next().name, "change");
            }
            let looks = site.get(at, LOOKS) - before - 1.0;
            assert_eq!(looks, f64::from(2 * round), "one for each change, and that of /metrics");
        }
    }
}

/// GUARANTEES 48: who reads the metrics does not wait behind those who look at a state that nobody can confirm.
#[test]
fn a_scrape_does_not_wait_behind_looks_without_a_majority() {
    let mut site = Site::start();
    let (leader, others) = site.cluster.leader_and_others();
    let mut clients: Vec<_> = (0..20).map(|_| site.cluster.connect(leader)).collect();
    clients.iter_mut().for_each(|client| client.check("ping", "_", "", "ok"));
    for at in others {
        site.cluster.nodes[at].kill();
    }
    // Each takes five seconds to find out, and few are made at a time.
    clients.iter_mut().for_each(|client| client.begin("inspect", "k", ""));
    std::thread::sleep(millis(500));
    let begun = Instant::now();
    assert_eq!(site.get(leader, "dflockd_raft_voters"), 3.0);
    let took = begun.elapsed();
    let last = clients.last_mut().map(|client| client.hear(Duration::ZERO));
    assert_eq!(last, Some(Heard::Nothing), "it waits for its turn");
    assert!(took < Duration::from_secs(3), "{took:?}");
}
