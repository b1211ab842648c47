//! Leaders are killed under a client that holds and waits (promises 2, 3, 5, 13, 17, 19, and 47 on lines).
//!
//! `DFLOCKD_SOAK_KILLS=200 cargo test -p dflockd-client --test client leaders_are_killed -- --nocapture` goes on for
//! longer.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use dflockd_client::{Client, ClientBuilder, Guard, Instant};
use dflockd_testkit::eventually::tasks::soon;
use dflockd_testkit::millis;
use parking_lot::Mutex;
use tokio::task::{JoinHandle, JoinSet};

use super::super::server::crowded;
use super::nodes::{Nodes, Stay, check_stays, eventually_more, held, moved_from, node_of};

const LOCKS: usize = 100;
/// How often a leader is killed.
const EVERY: Duration = Duration::from_secs(4);
/// Keys with a queue whose order is known, and how many wait in each.
const LINES: usize = 3;
const LINE_LENGTH: usize = 8;

/// One of so many held locks is tried after each kill.
const TRIED: usize = 10;

/// How many leaders are killed, if nobody wants more.
fn kills(least: usize) -> usize {
    std::env::var("DFLOCKD_SOAK_KILLS").ok().and_then(|it| it.parse().ok()).unwrap_or(least)
}

/// Adds to a counter as fast as answers come, and counts what it was told.
struct Adding {
    over: Arc<AtomicBool>,
    done: Arc<AtomicI64>,
    task: JoinHandle<i64>,
}

impl Adding {
    fn start(client: &Client) -> Self {
        let (over, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(0)));
        let (counter, stop, count) = (client.counter("sum"), Arc::clone(&over), Arc::clone(&done));
        let task = tokio::spawn(async move {
            let mut unknown = 0;
            while !stop.load(Ordering::SeqCst) {
                match counter.add(1).await {
                    Ok(_) => _ = count.fetch_add(1, Ordering::SeqCst),
                    Err(error) if error.may_have_applied() => unknown += 1,
                    Err(_) => {}
                }
                tokio::time::sleep(millis(5)).await;
            }
            unknown
        });
        Self { over, done, task }
    }

    /// Every addition that was answered was done once, and no other.
    async fn finish(self, client: &Client) {
        self.over.store(true, Ordering::SeqCst);
        let unknown = soon("the additions", self.task).await.unwrap();
        let done = self.done.load(Ordering::SeqCst);
        let sum = client.counter("sum").get().await.unwrap();
        println!("{done} additions, {unknown} unknown, sum {sum}");
        assert!((done..=done + unknown).contains(&sum), "{sum}, {done} done, {unknown} unknown");
    }
}

/// Takes and releases one key in turn with others, and notes each stay.
fn dispute(client: &Client, over: &Arc<AtomicBool>) -> JoinHandle<Vec<Stay>> {
    let (lock, over) = (client.lock("disputed"), Arc::clone(over));
    tokio::spawn(async move {
        let mut stays = Vec::new();
        while !over.load(Ordering::SeqCst) {
            let Ok(guard) = lock.acquire().await else { continue };
            let from = Instant::now();
            tokio::time::sleep(millis(10)).await;
            stays.push(Stay::of(&guard, from));
            let _ = guard.release().await;
        }
        stays
    })
}

/// That somebody holds it, as another client sees it.
async fn nobody_gets(client: &Client, key: &str) {
    let taken = soon("a try", client.lock(key).try_acquire()).await.unwrap();
    assert!(taken.is_none(), "{key} was granted twice");
}

/// The session that holds a lock, as the servers name it.
async fn session_of(client: &Client, key: &str) -> u64 {
    let shown = soon("a look", client.inspect(key.as_bytes())).await.unwrap().unwrap();
    shown["holders"][0]["conn"].as_u64().unwrap_or_else(|| panic!("{key}: {shown}"))
}

/// Waits in a queue, holds for a while, and tells its turn.
fn stand_in_line(
    client: &Client,
    key: String,
    number: usize,
    served: Arc<Mutex<Vec<(usize, Stay)>>>,
    line: &mut JoinSet<()>,
) {
    let lock = client.lock(key);
    line.spawn(async move {
        let guard = lock.acquire().await.unwrap();
        let from = Instant::now();
        tokio::time::sleep(millis(300)).await;
        assert!(guard.is_valid());
        served.lock().push((number, Stay::of(&guard, from)));
        guard.release().await.unwrap();
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaders_are_killed_under_a_hundred_locks_and_a_hundred_waits() {
    let nodes = Nodes::start_inspected().await;
    let builder = nodes.builder();
    let nodes = kill_leaders(nodes, builder, kills(5)).await;
    nodes.check_forms();
    assert!(nodes.answers_inspected() > 1000, "{}", nodes.answers_inspected());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaders_are_killed_under_clients_by_grpc() {
    let nodes = Nodes::start(&[]);
    let builder = nodes.grpc_builder();
    kill_leaders(nodes, builder, kills(3)).await;
}

async fn kill_leaders(mut nodes: Nodes, builder: ClientBuilder, kills: usize) -> Nodes {
    let connect = async |name: &str| builder.clone().name(name).connect().await.unwrap();
    let client = connect("holder").await;
    let others = [connect("other-0").await, connect("other-1").await];
    let mut mine: Vec<Guard> = Vec::new();
    for number in 0..LOCKS {
        mine.push(held(&client, &format!("mine-{number}")).await);
    }
    let mut theirs: Vec<Guard> = Vec::new();
    let mut waits = JoinSet::new();
    for number in 0..LOCKS {
        let key = format!("theirs-{number}");
        theirs.push(held(&others[0], &key).await);
        let lock = client.lock(key);
        waits.spawn(async move {
            let guard = lock.acquire().await;
            (number, Instant::now(), guard)
        });
    }
    for number in 0..LOCKS {
        crowded(&others[1], &format!("theirs-{number}"), (1, 1)).await;
    }
    let (mut lines, mut line_tasks) = (Vec::new(), JoinSet::new());
    for line in 0..LINES {
        let (key, served) = (format!("line-{line}"), Arc::<Mutex<Vec<_>>>::default());
        let first = held(&client, &key).await;
        for number in 0..LINE_LENGTH {
            let from = [&others[0], &client, &others[1]][number % 3];
            stand_in_line(from, key.clone(), number, Arc::clone(&served), &mut line_tasks);
            crowded(&client, &key, (1, number + 1)).await;
        }
        lines.push((first, served));
    }
    let valid_until: Vec<_> = mine.iter().map(Guard::valid_until).collect();
    let mine_fences: Vec<u64> = mine.iter().map(Guard::fence).collect();
    let session = session_of(&others[1], "mine-0").await;
    let over = Arc::new(AtomicBool::new(false));
    let disputes = [&others[0], &client, &others[1]].map(|client| dispute(client, &over));
    let adding = Adding::start(&client);
    let fences: Vec<u64> = theirs.iter().map(Guard::fence).collect();
    let mut line_heads = Vec::new();
    let mut lines = lines.into_iter();
    // When the release of each began: nobody else can have it before.
    let mut released: Vec<Instant> = Vec::new();
    let mut hits = 0;
    for kill in 0..kills {
        let leader = nodes.leader();
        let next_at = Instant::now() + EVERY;
        hits += usize::from(node_of(&client).await == leader);
        nodes.kill(leader);
        // In the middle of it: some of the waiters' turns come, and nobody gets what is held.
        for guard in theirs.drain(..(LOCKS / kills).min(theirs.len())) {
            let key = String::from_utf8_lossy(guard.key()).into_owned();
            released.push(Instant::now());
            soon(&format!("release of {key}"), guard.release()).await.unwrap();
        }
        if let Some((first, line)) = lines.next() {
            soon("release of the line", first.release()).await.unwrap();
            line_heads.push(line);
        }
        for number in (kill % TRIED..LOCKS).step_by(TRIED) {
            nobody_gets(&others[1], &format!("mine-{number}")).await;
        }
        eventually_more("additions", &adding.done, 20).await;
        for guard in &mine {
            assert!(guard.is_valid(), "kill {kill}: {:?}", soon("why", guard.lost()).await);
        }
        nodes.restart(leader);
        tokio::time::sleep(next_at.remaining()).await;
    }
    if hits == 0 {
        // The leader was always another one than the member the client talks to, so that it never had to move.
        let home = node_of(&client).await;
        nodes.kill(home);
        moved_from(&client, home).await;
        nodes.restart(home);
    }
    for guard in &mine {
        assert!(guard.is_valid(), "{:?}", soon("why", guard.lost()).await);
    }
    // Whatever member it talks to now, what it takes belongs to the session it began with.
    let again = held(&client, "again").await;
    assert_eq!(session_of(&others[1], "again").await, session, "the client has another session");
    again.release().await.unwrap();
    for guard in theirs.drain(..) {
        released.push(Instant::now());
        soon("the last releases", guard.release()).await.unwrap();
    }
    let mut served = BTreeSet::new();
    while let Some(turn) = soon("a waiter's turn", waits.join_next()).await {
        let (number, granted_at, guard) = turn.unwrap();
        let guard = guard.unwrap();
        assert!(served.insert(number), "theirs-{number} was served twice");
        assert!(guard.fence() > fences[number] && guard.is_valid(), "theirs-{number}");
        assert!(granted_at >= released[number], "theirs-{number}: two valid guards");
        guard.release().await.unwrap();
    }
    assert_eq!(served.len(), LOCKS, "every waiter has its turn");
    for (first, line) in lines {
        soon("release of the line", first.release()).await.unwrap();
        line_heads.push(line);
    }
    while let Some(stood) = soon("the lines", line_tasks.join_next()).await {
        stood.unwrap();
    }
    for line in line_heads {
        let (order, stays): (Vec<usize>, Vec<Stay>) =
            std::mem::take(&mut *line.lock()).into_iter().unzip();
        assert_eq!(order, (0..LINE_LENGTH).collect::<Vec<_>>(), "not served in order");
        check_stays(stays);
    }
    over.store(true, Ordering::SeqCst);
    let mut stays = Vec::new();
    for dispute in disputes {
        stays.extend(soon("the dispute", dispute).await.unwrap());
    }
    println!("{} stays", stays.len());
    check_stays(stays);
    adding.finish(&others[1]).await;
    for number in 0..LOCKS {
        nobody_gets(&others[1], &format!("mine-{number}")).await;
    }
    for (number, guard) in mine.into_iter().enumerate() {
        assert!(guard.is_valid(), "mine-{number}");
        assert_eq!(guard.fence(), mine_fences[number], "mine-{number} was taken anew");
        assert!(guard.valid_until() > valid_until[number], "mine-{number} was never renewed");
        soon("a renewal", guard.renew()).await.unwrap();
        let fence = guard.fence();
        guard.release().await.unwrap();
        if number % 10 == 0 {
            let next = held(&others[0], &format!("mine-{number}")).await;
            assert!(next.fence() > fence);
        }
    }
    nodes
}
