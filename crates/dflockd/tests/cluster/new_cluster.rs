//! A cluster that begins again, from its last member or from a backup: what the old one gave out counts no more, and
//! nothing is given out while somebody may still believe in it (GUARANTEES 2, 3, 4, 11, 18, R5).

use std::fs;
use std::time::{Duration, Instant};

use dflockd_testkit::line::entry;
use dflockd_testkit::{Client, Cluster, Heard, LIMIT, eventually, fence, granted, millis};

use super::operate::{ADMIN, backup, done, restore};

/// Of the longest lease, which a renewal has made longer than what was asked for at first.
const LEASE: u64 = 8;
const GRACE: u64 = 1;
const DELAY: Duration = Duration::from_secs(LEASE + GRACE);

/// What clients of the old cluster have.
struct Old {
    /// A kept session, its token of `held`, and a token of `orphan` whose connection broke.
    secret: String,
    held: String,
    orphan: String,
    /// The highest fence it gave out, after the backup.
    last: u64,
    /// Until when the holder of `held` may act (R4).
    until: Instant,
}

fn start() -> Cluster {
    let grace = GRACE.to_string();
    let flags = ["--default-lease-ttl", "2", "--failover-grace", &grace];
    Cluster::start(3, &[&ADMIN[..], &flags].concat())
}

/// Locks of several kinds, and what is to be known of them; `copy` is called while they are held.
fn live(cluster: &Cluster, copy: impl FnOnce()) -> Old {
    let mut keeper = cluster.connect(2);
    let secret = keeper.keep("keeper");
    let held = keeper.lock("held", "0 2");
    let mut broken = cluster.connect(1);
    let orphan = broken.lock("orphan", "0 5");
    broken.reset();
    keeper.check("kset", "value", "stays", "ok");
    keeper.check("incr", "count", "7", "ok 7");
    let sent = Instant::now();
    keeper.check("n", "held", &format!("{held} {LEASE}"), &format!("ok {LEASE}"));
    copy();
    let last = fence(&cluster.connect(0).lock("late", "0 2"));
    let until = sent + Duration::from_secs(LEASE).mul_f64(0.99);
    Old { secret, held, orphan, last, until }
}

/// What must be true of a node that was started at `begun` with the state of the old cluster.
#[track_caller]
fn check(cluster: &mut Cluster, at: usize, begun: Instant, old: &Old) {
    cluster.nodes[at].wait_until_ready();
    let mut client = cluster.connect(at);
    client.check("kget", "value", "", "ok stays");
    client.check("get", "count", "", "ok 7");
    let stats = client.stats();
    assert_eq!(stats["locks"].as_array().map(Vec::len), Some(0), "all holds have ended: {stats}");

    // Sessions and tokens of before are nobody's.
    let mut stranger = cluster.connect(at);
    let attached = stranger.ask("hello", "keeper", &format!("attach={}", old.secret));
    assert!(attached.starts_with("error"), "{attached}");
    for (key, token) in [("held", &old.held), ("orphan", &old.orphan)] {
        client.check("n", key, &format!("{token} 5"), "error");
        client.check("r", key, token, "error");
    }

    // Nothing is granted: what was held, what was not, and every other kind of lock.
    for (command, key, arg) in [
        ("l", "held", "0"),
        ("l", "orphan", "0"),
        ("l", "late", "0"),
        ("l", "never-held", "0"),
        ("sl", "semaphore", "0 2"),
        ("rl", "read-write", "0"),
        ("wl", "read-write-too", "0"),
        ("elect", "election", "0"),
    ] {
        match client.ask(command, key, arg).as_str() {
            "timeout" => {}
            // The machine was so slow that it is allowed.
            granted => assert!(begun.elapsed() >= DELAY, "{granted} after {:?}", begun.elapsed()),
        }
    }
    drop(client);

    // Also not by a node that is killed meanwhile: the rest of the delay is still to come.
    cluster.nodes[at].restart();
    let mut waiters: Vec<Client> = (0..3).map(|_| cluster.connect(at)).collect();
    for (place, waiter) in waiters.iter_mut().enumerate() {
        waiter.begin("l", "held", "60 30");
        let mut looker = cluster.connect(at);
        eventually("it is in the queue", || {
            let stats = looker.try_stats(LIMIT)?;
            let waiters = entry(&stats, "locks", "held")?["waiters"].as_u64()?;
            // The first may have got it by now.
            let in_queue = waiters + u64::from(begun.elapsed() >= DELAY);
            (in_queue > place as u64).then_some(())
        });
    }
    let heard = waiters[0].hear(Duration::from_secs(90));
    let granted_at = Instant::now();
    assert!(granted_at - begun >= DELAY, "{heard:?} after {:?}", granted_at - begun);
    assert!(granted_at >= old.until, "somebody of before may still act");
    let first = granted(heard.line().unwrap());
    assert!(fence(&first) > old.last + (1 << 39), "{first}");
    // In the order in which they came, with growing fences.
    let (head, rest) = waiters.split_at_mut(1);
    assert_eq!(rest[0].hear(millis(50)), Heard::Nothing);
    head[0].check("r", "held", &first, "ok");
    let second = granted(&rest[0].line());
    assert!(fence(&second) > fence(&first));
    assert_eq!(rest[1].hear(millis(50)), Heard::Nothing);
}

#[test]
fn a_forced_cluster_grants_nothing_while_an_old_lease_may_last() {
    let mut cluster = start();
    let old = live(&cluster, || {});
    cluster.wait_until_equal();
    cluster.kill_all();
    let dir = cluster.nodes[2].dir.to_str().unwrap().to_owned();
    let said = done(&["force-new", "--raft-dir", &dir, "--yes"]);
    let delay = format!("nothing is granted for {} s", DELAY.as_secs());
    assert!(said.contains(&delay) && said.contains("sessions ended"), "{said}");
    let begun = Instant::now();
    cluster.nodes[2].start();
    check(&mut cluster, 2, begun, &old);
}

/// An operator who knows that nobody of before still works need not wait for a lease that lasts for years.
#[test]
fn the_delay_of_a_new_cluster_can_be_bounded() {
    let mut cluster = Cluster::start(1, &[]);
    // It stays connected: a client that goes releases what it holds.
    let mut holder = cluster.connect(0);
    holder.lock("k", "0 80000");
    cluster.nodes[0].kill();
    let dir = cluster.nodes[0].dir.to_str().unwrap().to_owned();
    let force = ["force-new", "--raft-dir", &dir, "--yes"];
    let said = done(&[&force[..], &["--dry-run"]].concat());
    assert!(said.contains("nothing is granted for 80003 s"), "{said}");
    let args = [&force[..], &["--grant-delay", "5", "--grant-delay-max", "4"]].concat();
    super::operate::refused(&args, "--grant-delay is above --grant-delay-max");
    let output = super::operate::offline(&[&force[..], &["--grant-delay-max", "1"]].concat());
    let said = &output.out;
    let warned = &output.err;
    assert!(said.contains("nothing is granted for 1 s"), "{output:?}");
    assert!(warned.contains("warning: a lease of before may last for 80003 s"), "{output:?}");
    cluster.nodes[0].start_ready();
    granted(&cluster.connect(0).ask("l", "k", "30"));
}

#[test]
fn a_restored_cluster_grants_nothing_while_an_old_lease_may_last() {
    let mut cluster = start();
    let file = cluster.dir.path("backup");
    let old = live(&cluster, || fs::write(&file, backup(&mut cluster.connect(1))).unwrap());
    cluster.kill_all();
    let said = done(&restore(&mut cluster, &file));
    let delay = format!("nothing is granted for {} s", DELAY.as_secs());
    assert!(said.contains(&delay), "{said}");
    let begun = Instant::now();
    cluster.nodes[0].start();
    check(&mut cluster, 0, begun, &old);
}
