//! Every command on every member, and what one member's client causes at another's.

use std::collections::BTreeMap;
use std::time::Duration;

use dflockd_testkit::cluster::CALM_MS;
use dflockd_testkit::line::{ANSWER, entry};
use dflockd_testkit::{Client, Cluster, Heard, Turn, eventually, fence, granted, millis};

/// Sends a request whose effect others are asked about next.
fn settle(cluster: &Cluster, key: &str, waiters: u64) {
    cluster.connect(0).wait_for_waiters(key, waiters);
}

/// All that one client can do, on one member; `other` is a client of another one.
fn all_commands(cluster: &Cluster, client: &mut Client, other: &mut Client, p: &str) {
    let key = |name: &str| format!("{p}.{name}");
    client.check("ping", "_", "", "ok");
    client.check("barrier", "_", "", "ok");
    assert!(client.stats()["cluster"]["node_id"].is_string());

    // Locks: in one round, with a waiter elsewhere.
    let token = client.lock(&key("l"), "0 30");
    other.begin("l", &key("l"), "20 30");
    settle(cluster, &key("l"), 1);
    client.check("n", &key("l"), &format!("{token} 20"), "ok 20");
    client.check("r", &key("l"), &token, "ok");
    let next = granted(&other.line());
    assert!(fence(&next) > fence(&token));
    other.check("r", &key("l"), &next, "ok");
    client.check("r", &key("l"), &next, "error");
    // In two.
    let token = granted(&client.ask("e", &key("e"), "30"));
    other.check("e", &key("e"), "30", "queued");
    other.check("e", &key("e"), "30", "error_already_enqueued");
    other.check("w", &key("e"), "0", "timeout");
    other.check("w", &key("e"), "0", "error_not_enqueued");
    other.check("e", &key("e"), "30", "queued");
    other.begin("w", &key("e"), "20");
    settle(cluster, &key("e"), 1);
    client.check("r", &key("e"), &token, "ok");
    let next = granted(&other.line());
    other.check("r", &key("e"), &next, "ok");

    // Semaphores.
    let first = granted(&client.ask("sl", &key("s"), "0 2 30"));
    let second = granted(&other.ask("se", &key("s"), "2 30"));
    other.check("sw", &key("s"), "0", &format!("ok {second} 30"));
    other.check("sl", &key("s"), "0 3", "error_limit_mismatch");
    other.begin("sl", &key("s"), "20 2 30");
    settle(cluster, &key("s"), 1);
    client.check("sn", &key("s"), &format!("{first} 9"), "ok 9");
    client.check("sr", &key("s"), &first, "ok");
    let third = granted(&other.line());
    other.check("sr", &key("s"), &second, "ok");
    other.check("sr", &key("s"), &third, "ok");

    // Readers and a writer.
    let reader = granted(&client.ask("rl", &key("rw"), "0 30"));
    let second = granted(&other.ask("re", &key("rw"), "30"));
    assert!(other.ask("rw", &key("rw"), "0").starts_with(&format!("ok {second} 30")));
    other.check("we", &key("rw"), "30", "queued");
    other.begin("ww", &key("rw"), "20");
    settle(cluster, &key("rw"), 1);
    assert!(client.ask("rn", &key("rw"), &format!("{reader} 30")).starts_with("ok 30"));
    client.check("rr", &key("rw"), &reader, "ok");
    client.check("rr", &key("rw"), &second, "ok");
    let writer = granted(&other.line());
    client.check("rl", &key("rw"), "0", "timeout");
    assert!(other.ask("wn", &key("rw"), &format!("{writer} 30")).starts_with("ok 30"));
    other.check("wr", &key("rw"), &writer, "ok");
    let writer = granted(&client.ask("wl", &key("rw"), "0 30"));
    client.check("wr", &key("rw"), &writer, "ok");
    client.check("l", &key("rw"), "0", "error_type_mismatch");

    // Elections, watched from elsewhere.
    other.check("observe", &key("el"), "", "ok");
    let leader = granted(&client.ask("elect", &key("el"), "0 30"));
    other.expect(&format!("leader elected {}", key("el")));
    client.check("resign", &key("el"), &leader, "ok");
    other.expect(&format!("leader resigned {}", key("el")));
    other.check("unobserve", &key("el"), "", "ok");

    // Values.
    other.check("watch", &format!("{p}.v.*"), "", "ok");
    client.check("incr", &key("v.c"), "5", "ok 5");
    client.check("decr", &key("v.c"), "2", "ok 3");
    client.check("get", &key("v.c"), "", "ok 3");
    client.check("cset", &key("v.c"), "9", "ok");
    client.check("kset", &key("v.k"), "one", "ok");
    client.check("kget", &key("v.k"), "", "ok one");
    client.check("kcas", &key("v.k"), "one\ttwo\t0", "ok");
    client.check("kcas", &key("v.k"), "one\ttwo\t0", "cas_conflict");
    client.check("kdel", &key("v.k"), "", "ok");
    client.check("kget", &key("v.k"), "", "nil");
    client.check("rpush", &key("v.l"), "b", "ok 1");
    client.check("lpush", &key("v.l"), "a", "ok 2");
    client.check("llen", &key("v.l"), "", "ok 2");
    client.check("lrange", &key("v.l"), "0 -1", r#"ok ["a","b"]"#);
    client.check("lpop", &key("v.l"), "", "ok a");
    client.check("rpop", &key("v.l"), "", "ok b");
    client.check("lpop", &key("v.l"), "", "nil");
    for event in [
        "incr v.c",
        "decr v.c",
        "cset v.c",
        "kset v.k",
        "kcas v.k",
        "kdel v.k",
        "rpush v.l",
        "lpush v.l",
        "lpop v.l",
        "rpop v.l",
    ] {
        let (event, name) = event.split_once(' ').unwrap();
        other.expect(&format!("watch {event} {}", key(name)));
    }
    other.check("unwatch", &format!("{p}.v.*"), "", "ok");

    // Blocking pops and barriers with somebody elsewhere.
    for (pop, push) in [("blpop", "rpush"), ("brpop", "lpush")] {
        client.check(pop, &key("b"), "0", "nil");
        client.begin(pop, &key("b"), "20");
        eventually("the popper waits", || {
            let stats = other.try_stats(ANSWER)?;
            let lists = entry(&stats, "lists", &key("b"))?;
            (lists["pop_waiters"] == 1).then_some(())
        });
        other.check(push, &key("b"), pop, "ok 0");
        client.expect(&format!("ok {pop}"));
    }
    client.begin("bwait", &key("bar"), "2 20");
    eventually("the first has arrived", || {
        let stats = other.try_stats(ANSWER)?;
        entry(&stats, "barriers", &key("bar")).map(drop)
    });
    other.check("bwait", &key("bar"), "3 0", "error_barrier_count_mismatch");
    other.check("bwait", &key("bar"), "2 20", "ok");
    client.expect("ok");
    client.check("bwait", &key("bar"), "2 1", "timeout");

    // Signals in both directions.
    client.check("listen", &format!("{p}.sig.>"), "", "ok");
    other.check("signal", &key("sig.a"), "hi  there", "ok 1");
    client.expect(&format!("sig {} hi  there", key("sig.a")));
    client.check("unlisten", &format!("{p}.sig.>"), "", "ok");
    other.check("signal", &key("sig.a"), "again", "ok 0");

    // Looking.
    client.check("kset", &key("look"), "x", "ok");
    assert!(other.ask("inspect", &key("look"), "").contains("look"));
    assert!(other.ask("ls", &format!("{p}."), "10").contains("look"));
    client.check("nonsense", "k", "", "error");
}

#[test]
fn every_command_works_on_every_member() {
    let cluster = Cluster::start(3, &["--max-waiters", "100"]);
    let (leader, others) = cluster.leader_and_others();
    for (name, here, there) in
        [("lf", leader, others[0]), ("fl", others[0], leader), ("ff", others[0], others[1])]
    {
        let (mut client, mut other) = (cluster.connect(here), cluster.connect(there));
        all_commands(&cluster, &mut client, &mut other, name);
    }
    cluster.wait_until_equal();
}

#[test]
fn a_queue_group_over_three_nodes_gets_each_signal_once() {
    let cluster = Cluster::start(3, &[]);
    let mut members: Vec<_> = (0..3).map(|at| cluster.connect(at)).collect();
    let mut single = cluster.connect(1);
    for member in &mut members {
        member.check("listen", "work.*", "crew", "ok");
    }
    single.check("listen", "work.a", "", "ok");
    let mut senders: Vec<_> = (0..3).map(|at| cluster.connect(at)).collect();
    for number in 0..30 {
        senders[number % 3].check("signal", "work.a", &number.to_string(), "ok 2");
    }
    let mut seen = BTreeMap::<String, u32>::new();
    for member in &mut members {
        let mut count = 0;
        while let Heard::Line(line) = member.hear(millis(300)) {
            *seen.entry(line).or_default() += 1;
            count += 1;
        }
        assert_eq!(count, 10, "in turns");
    }
    assert_eq!(seen.len(), 30);
    assert!(seen.values().all(|times| *times == 1), "{seen:?}");
    for _ in 0..30 {
        assert!(single.line().starts_with("sig work.a "));
    }
    // One leaves, and the rest goes to those who stay.
    drop(members.remove(0));
    eventually("it has left", || {
        let stats = senders[0].try_stats(ANSWER)?;
        let channels = stats["signal_channels"].as_array()?;
        let crew = channels.iter().find(|channel| channel["group"] == "crew")?;
        (crew["listeners"] == 2).then_some(())
    });
    for number in 0..10 {
        senders[number % 3].check("signal", "work.a", &number.to_string(), "ok 2");
    }
    let mut heard = 0;
    for member in &mut members {
        while let Heard::Line(_) = member.hear(millis(300)) {
            heard += 1;
        }
    }
    assert_eq!(heard, 10);
}

#[test]
fn a_listener_outlives_the_leader() {
    let mut cluster = Cluster::start(3, &[]);
    let (leader, others) = cluster.leader_and_others();
    let (mut listener, mut sender) = (cluster.connect(others[0]), cluster.connect(others[1]));
    listener.check("listen", "news", "", "ok");
    listener.check("watch", "key", "", "ok");
    cluster.nodes[leader].kill();
    sender.check("signal", "news", "one", "ok 1");
    sender.check("kset", "key", "v", "ok");
    listener.expect_all(&["sig news one", "watch kset key"]);
}

#[test]
fn followers_redirect_if_told_to() {
    let cluster = Cluster::start(3, &["--follower-mode", "redirect"]);
    let leader = cluster.leader();
    let at = cluster.nodes[leader].client;
    let refusal = format!("error_not_leader {at}");
    for follower in cluster.others(leader) {
        let mut client = cluster.connect(follower);
        for (command, arg) in [
            ("l", "0"),
            ("r", "0123456789abcdef0123456789abcdef"),
            ("incr", "1"),
            ("get", ""),
            ("kget", ""),
            ("lrange", "0 -1"),
            ("barrier", ""),
            ("listen", ""),
            ("signal", "x"),
            ("ls", "10"),
            ("inspect", ""),
            ("bwait", "2 0"),
            ("observe", ""),
            ("watch", ""),
        ] {
            client.check(command, "k", arg, &refusal);
        }
        client.check("ping", "_", "", "ok");
        client.check("stable-ref", "me", "", "ok");
        client.stats();
        client.check("hello", "late", "", "error");
        let mut client = cluster.connect(follower);
        client.check("hello", "me", "fence", "ok fence");
    }
    let mut client = cluster.connect(leader);
    client.check("incr", "k", "1", "ok 1");
    client.check("barrier", "_", "", "ok");
}

#[test]
fn who_has_a_reference_is_redirected_in_auto_mode() {
    let cluster = Cluster::start(3, &[]);
    let leader = cluster.leader();
    let follower = cluster.others(leader)[0];
    let refusal = format!("error_not_leader {}", cluster.nodes[leader].client);
    let mut client = cluster.connect(follower);
    client.check("incr", "k", "1", "ok 1");
    client.check("stable-ref", "me", "", "ok");
    client.check("incr", "k", "1", &refusal);
    client.check("barrier", "_", "", &refusal);
    client.check("ping", "_", "", "ok");
    let mut client = cluster.connect(follower);
    client.check("hello", "me", "redirect", "ok redirect");
    client.check("l", "k", "0", &refusal);
    let mut client = cluster.connect(leader);
    client.check("stable-ref", "me", "", "ok");
    client.check("incr", "k", "1", "ok 2");
}

#[test]
fn an_operator_can_end_holds_and_sessions_of_other_nodes() {
    let cluster = Cluster::start(3, &["--admin-token", "adm1n"]);
    let mut holder = cluster.connect(0);
    holder.check("hello", "holder", "lost", "ok lost");
    let first = holder.lock("first", "0 60");
    let second = holder.lock("second", "0 60");
    let mut waiter = cluster.connect(1);
    waiter.begin("l", "second", "20 60");
    settle(&cluster, "second", 1);
    let mut operator = cluster.connect(2);
    let id = eventually("the node has it", || {
        let stats = operator.try_stats(ANSWER)?;
        entry(&stats, "locks", "second")?["owner_conn_id"].as_u64()
    });
    let freed = format!("adm1n lock {} stuck", fence(&first));
    operator.check("force-release", "first", &freed, "ok");
    assert!(holder.line().starts_with(&format!("lost first {}", fence(&first))));
    holder.check("n", "first", &first, "error");
    operator.check("end-session", &id.to_string(), "adm1n gone mad", "ok");
    assert!(holder.line().starts_with(&format!("lost second {}", fence(&second))));
    holder.expect_end();
    let next = granted(&waiter.line());
    assert!(fence(&next) > fence(&second));
    operator.check("end-session", &id.to_string(), "adm1n again", "error");
    operator.check("end-session", "999", "adm1n nobody", "error");
    operator.check("force-release", "second", "wr0ng lock 1 r", "error_auth");
    operator.expect_end();
}

#[test]
fn a_kept_session_moves_from_node_to_node() {
    let cluster = Cluster::start(3, &[]);
    let mut first = cluster.connect(0);
    let secret = first.keep("mover");
    let attach = format!("attach={secret}");
    let mut token = first.lock("lock", "0 60");
    let mut last = first;
    for round in 1..=4 {
        let at = round % 3;
        let mut next = cluster.connect(at);
        next.check("hello", "mover", &attach, &format!("ok {attach}"));
        last.expect("detached");
        last.expect_end();
        next.check("n", "lock", &format!("{token} 60"), "ok 60");
        next.check("r", "lock", &token, "ok");
        // What it is given here must not be taken back where it was before.
        token = next.lock("lock", "0 60");
        next.check("rpush", "list", "item", "ok 1");
        next.check("lpop", "list", "", "ok item");
        for other in 0..3 {
            let mut other = cluster.connect(other);
            // Twice: what a node sends on its own account comes behind the first.
            other.check("barrier", "_", "", "ok");
            other.check("barrier", "_", "", "ok");
            other.check("l", "lock", "0", "timeout");
            other.check("llen", "list", "", "ok 0");
        }
        last = next;
    }
    last.check("r", "lock", &token, "ok");
    cluster.connect(0).check("hello", "me", "attach=00000000000000000000000000000000", "error");
}

#[test]
fn requests_can_be_sent_at_once() {
    let cluster = Cluster::start(3, &[]);
    for at in 0..3 {
        let mut client = cluster.connect(at);
        for (command, arg) in [
            ("incr", "1"),
            ("ls", "5"),
            ("incr", "1"),
            ("inspect", ""),
            ("stats", ""),
            ("ping", ""),
        ] {
            client.begin(command, &format!("k{at}"), arg);
        }
        client.expect("ok 1");
        for wanted in ["k", "ok 2", "2", "cluster", "ok"] {
            let line = client.line();
            assert!(line.contains(wanted), "{line}");
        }
    }
}

#[test]
fn a_barrier_sees_what_others_did_before() {
    let cluster = Cluster::start(3, &[]);
    let mut clients: Vec<_> = (0..3).map(|at| cluster.connect(at)).collect();
    for round in 1..=30u64 {
        let (writer, reader) =
            (usize::try_from(round % 3).unwrap(), usize::try_from((round + 1) % 3).unwrap());
        clients[writer].check("incr", "count", "1", &format!("ok {round}"));
        // Linearizable reads see it without one; a barrier, and then what this node has.
        clients[reader].check("get", "count", "", &format!("ok {round}"));
        clients[reader].check("barrier", "_", "", "ok");
        let stats = clients[reader].stats();
        assert_eq!(entry(&stats, "counters", "count").unwrap()["value"], round);
    }
}

#[test]
fn stats_show_the_cluster() {
    let cluster = Cluster::start(3, &[]);
    let leader = cluster.leader();
    cluster.connect(0).check("incr", "k", "1", "ok 1");
    cluster.wait_until_equal();
    for node in &cluster.nodes {
        let status = node.status().unwrap();
        assert_eq!(status["node_id"], node.name.as_str());
        let role = if node.name == cluster.nodes[leader].name { "leader" } else { "follower" };
        assert_eq!(status["role"], role);
        assert_eq!(status["leader_id"], cluster.nodes[leader].name.as_str());
        assert_eq!(status["leader_addr"], cluster.nodes[leader].client.to_string());
        assert_eq!(status["voters"], serde_json::json!(["node-a", "node-b", "node-c"]));
        assert_eq!(status["learners"], serde_json::json!([]));
        assert_eq!(status["witnesses"], serde_json::json!([]));
        assert!(status["term"].as_u64().unwrap() > 0);
        assert!(status["applied_index"].as_u64() <= status["commit_index"].as_u64());
    }
}

#[test]
fn a_witness_votes_and_serves_nobody() {
    let flags = ["--election-timeout-ms", CALM_MS, "--snapshot-entries", "100"];
    let mut cluster = Cluster::prepare(Turn::shared(), 3, &flags);
    cluster.nodes[2].flags.push("--witness".into());
    for node in &mut cluster.nodes {
        node.start();
    }
    for node in &cluster.nodes[..2] {
        node.wait_until_ready();
    }
    let leader = cluster.leader_among(&[0, 1]);
    eventually("the others know the witness", || {
        let status = cluster.nodes[leader].status()?;
        (status["witnesses"] == serde_json::json!(["node-c"])).then_some(())
    });
    let mut client = cluster.connect(leader);
    for number in 1..=250 {
        client.check("incr", "count", "1", &format!("ok {number}"));
    }
    let token = client.lock("lock", "0 60");
    let mut witness = cluster.connect(2);
    witness.check("ping", "_", "", "ok");
    for (command, arg) in [("l", "0"), ("get", ""), ("incr", "1"), ("barrier", ""), ("listen", "")]
    {
        // A disk that was slow for a second is a reason to lead no more.
        eventually("it names the leader", || {
            let leader = &cluster.nodes[cluster.leader_among(&[0, 1])];
            let said = witness.ask(command, "k", arg);
            assert!(said.starts_with("error_not_leader"), "{command}: {said}");
            said == format!("error_not_leader {}", leader.client)
        });
    }
    let stats = witness.stats();
    assert_eq!(stats["counters"], serde_json::json!([]));
    assert_eq!(stats["locks"], serde_json::json!([]));
    assert_eq!(stats["cluster"]["node_id"], "node-c");

    // With it the other full node is a majority.
    let leader = cluster.leader_among(&[0, 1]);
    let other = 1 - leader;
    cluster.nodes[leader].kill();
    let mut client = cluster.connect(other);
    client.check("incr", "count", "1", "ok 251");
    client.check("l", "lock", "0", "timeout");
    assert_eq!(cluster.leader_among(&[other, 2]), other);
    // The other way round: only the witness has what was written now.
    cluster.nodes[leader].start_ready();
    cluster.nodes[leader].kill();
    for number in 252..=300 {
        client.check("incr", "count", "1", &format!("ok {number}"));
    }
    cluster.nodes[other].kill();
    cluster.nodes[leader].start_ready();
    let mut client = cluster.connect(leader);
    client.check("get", "count", "", "ok 300");
    client.check("r", "lock", &token, "ok");
    assert_eq!(client.hear(Duration::from_millis(1)), Heard::Nothing);
    assert_eq!(cluster.leader_among(&[leader, 2]), leader);
}
