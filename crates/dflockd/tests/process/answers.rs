//! Clients that ask for much and take in nothing: what waits for them is bounded, and others are answered meanwhile.

use std::time::{Duration, Instant};

use dflockd_testkit::{Client, Heard, LIMIT, Server, eventually, millis};

/// How long anybody else waits for an answer meanwhile. A sign of life, not a measurement.
const BYSTANDER_MAX: Duration = Duration::from_secs(2);
/// For how long they are watched.
const WATCHED: Duration = Duration::from_secs(3);

/// Looks at a server while it is attacked: the most memory it has above `before`, in MiB. Panics if somebody else is
/// not answered.
#[track_caller]
fn most_mib_above(server: &Server, before: u64) -> u64 {
    let mut bystander = server.connect();
    let begun = Instant::now();
    let mut most = 0;
    while begun.elapsed() < WATCHED {
        let asked = Instant::now();
        bystander.check("ping", "_", "", "ok");
        let took = asked.elapsed();
        assert!(took < BYSTANDER_MAX, "another client waited {took:?}");
        most = most.max(server.resident_kib().saturating_sub(before) / 1024);
        std::thread::sleep(millis(20));
    }
    most
}

/// Sends requests many at a time and waits for their answers.
#[track_caller]
fn ask_many(client: &mut Client, requests: impl Iterator<Item = (String, String)>) {
    let requests: Vec<_> = requests.collect();
    for some in requests.chunks(100) {
        let text: String = some.iter().map(|(request, _)| request.as_str()).collect();
        client.send(text);
        for (_, answer) in some {
            assert_eq!(client.line(), *answer);
        }
    }
}

fn numbered(server: &Server) -> Client {
    let mut client = Client::over(server.narrow_socket());
    client.check("hello", "me", "mux", "ok mux");
    client
}

/// A list of 300 items of 65,000 bytes, 19.5 MB.
#[track_caller]
fn make_big_list(server: &Server) {
    let item = "x".repeat(65_000);
    let mut client = server.connect();
    for count in 1..=300 {
        client.check("rpush", "big", &item, &format!("ok {count}"));
    }
}

/// GUARANTEES 48: a client that asks for a hundred lists of ten thousand keys and reads none of them costs one at a
/// time.
#[test]
fn lists_of_keys_that_nobody_reads() {
    let server = Server::start(&["--write-timeout", "60"]);
    let mut keys = server.connect();
    let name = "k".repeat(200);
    let set = |n: u32| (format!("kset\n{name}{n:05}\nv\n"), "ok".to_owned());
    ask_many(&mut keys, (0..10_000).map(set));
    let before = server.resident_kib();
    let mut hog = numbered(&server);
    let requests: String = (1..=100).map(|n| format!("{n} ls\n_\n10000\n")).collect();
    hog.send(requests);
    let most = most_mib_above(&server, before);
    assert!(most < 64, "{most} MiB");
    // All are answered when they are taken in.
    for _ in 1..=100 {
        let line = hog.line();
        assert!(line.len() <= (1 << 20) + 100, "{}", line.len());
    }
}

/// GUARANTEES 48: a range of a list that is too long for one answer is refused without being made; one that is not is
/// made when the one before it is taken in.
#[test]
fn ranges_of_a_long_list_that_nobody_reads() {
    let server = Server::start(&["--write-timeout", "60"]);
    make_big_list(&server);
    let before = server.resident_kib();
    let mut hogs: Vec<_> = (0..20).map(|_| Client::over(server.narrow_socket())).collect();
    for hog in &mut hogs {
        hog.begin("lrange", "big", "0 -1");
        // 16 items have 1,040,000 bytes.
        hog.send("lrange\nbig\n0 15\n".repeat(100));
    }
    let most = most_mib_above(&server, before);
    assert!(most < 128, "{most} MiB");
    for hog in &mut hogs {
        assert_eq!(hog.line(), "error_too_large");
        assert!(hog.line().starts_with("ok [\"xxx"));
    }
    drop(hogs);
    let mut client = server.connect();
    client.check("lrange", "big", "0 16", "error_too_large");
    client.check("lrange", "big", "-17 -1", "error_too_large");
    let part = client.ask("lrange", "big", "299 5000");
    assert_eq!(part.len(), 65_000 + "ok [\"\"]".len());
}

/// GUARANTEES 48: in JSON a byte can have six, so a page of keys and a range can be too long although there is little
/// in them.
#[test]
fn texts_are_bounded_as_they_are_written() {
    let server = Server::start::<&str>(&[]);
    let mut client = server.connect();
    let name = "\u{1}".repeat(240);
    let set = |n: u32| (format!("kset\n{name}{n:05}\nv\n"), "ok".to_owned());
    ask_many(&mut client, (0..3000).map(set));
    let mut seen = 0;
    let mut after = String::new();
    loop {
        let page = client.ask("ls", "_", format!("10000 {after}").trim_end());
        assert!(page.len() <= (1 << 20) + 100, "{}", page.len());
        let keys: Vec<serde_json::Value> = serde_json::from_str(&page[3..]).unwrap();
        let Some(last) = keys.last() else { break };
        seen += keys.len();
        after = last["key"].as_str().unwrap().to_owned();
    }
    assert_eq!(seen, 3000);
    let stats = client.ask("stats", "_", "");
    assert!(stats.len() <= (1 << 20) + 100, "{}", stats.len());
    let stats: serde_json::Value = serde_json::from_str(&stats[3..]).unwrap();
    assert_eq!(stats["value_keys"], 3000);

    let item = "\u{1}".repeat(60_000);
    for count in 1..=4 {
        client.check("rpush", "q", &item, &format!("ok {count}"));
    }
    client.check("lrange", "q", "0 3", "error_too_large");
    assert_eq!(client.ask("lrange", "q", "0 1").len(), 2 * (6 * 60_000 + 3) + "ok []".len() - 1);
}

/// GUARANTEES 48: a key that fifty thousand wait for is shown in one answer of limited length.
#[test]
fn a_key_with_a_long_queue() {
    let server = Server::start::<&str>(&[]);
    let mut holder = server.connect();
    holder.lock("k", "0 600");
    let mut crowd = server.connect();
    crowd.check("hello", &"n".repeat(64), "mux", "ok mux");
    let waits: String = (1..=50_000).map(|n| format!("{n} l\nk\n600\n")).collect();
    crowd.send(waits);
    let shown = eventually("all of them wait", || {
        let shown = holder.ask("inspect", "k", "");
        assert!(shown.len() <= (1 << 20) + 100, "{}", shown.len());
        let shown: serde_json::Value = serde_json::from_str(&shown[3..]).unwrap();
        (shown["waiters"] == 50_000).then_some(shown)
    });
    let named = shown["queue"].as_array().unwrap().len() as u64;
    assert_eq!(named + shown["queue_more"].as_u64().unwrap(), 50_000);
    assert!(named > 0);
}

/// GUARANTEES 48 and 26: answers that would go past the bound close the connection, with a reason in the log, and what
/// they gave is given back.
#[test]
fn answers_past_the_bound_are_given_back() {
    let server = Server::start(&["--max-pending-bytes", "131072", "--write-timeout", "60"]);
    let mut hog = numbered(&server);
    let pops: String = (1..=200).map(|n| format!("{n} blpop\nq\n600\n")).collect();
    hog.send(pops);
    let mut pusher = server.connect();
    eventually("all of them wait", || {
        let shown = pusher.ask("inspect", "q", "");
        shown.contains("\"pop_waiters\":200")
    });
    let item = "x".repeat(60_000);
    for _ in 0..200 {
        let length = pusher.ask("rpush", "q", &item);
        assert!(length.starts_with("ok "), "{length}");
    }
    server.wait_for_output("reads its answers and pushes too slowly");
    // What it was told before, it may have.
    let mut told = 0;
    loop {
        match hog.hear(LIMIT) {
            Heard::Line(line) => {
                assert!(line.ends_with("xxx"), "{}", &line[..20]);
                told += 1;
            }
            Heard::End => break,
            Heard::Nothing => panic!("neither an answer nor the end"),
        }
    }
    let left = pusher.ask("llen", "q", "");
    let left: u32 = left.strip_prefix("ok ").unwrap().parse().unwrap();
    // An answer that was in the socket and never arrived as a whole counts as told.
    assert!((199..=200).contains(&(told + left)), "{told} told, {left} left");
    // The sockets have room for some megabytes besides.
    assert!(left > 80, "{left}");
}

/// GUARANTEES 48: whoever takes in nothing at all is closed after the write timeout, with a reason in the log.
#[test]
fn who_takes_in_nothing_is_closed() {
    let server = Server::start(&["--write-timeout", "1"]);
    make_big_list(&server);
    let mut hog = Client::over(server.narrow_socket());
    hog.send("lrange\nbig\n0 15\n".repeat(100));
    server.wait_for_output("it takes in nothing of its answers");
    while matches!(hog.hear(LIMIT), Heard::Line(_)) {}
    server.connect().check("ping", "_", "", "ok");
}

/// One look at a time, and the requests behind it go on: a numbered connection that looks is not held up.
#[test]
fn looks_hold_up_nothing() {
    let server = Server::start::<&str>(&[]);
    let mut client = server.connect();
    client.check("hello", "me", "mux", "ok mux");
    let mut requests: String = (1..=40).map(|n| format!("{n} ls\n_\n10\n")).collect();
    requests += "41 l\nk\n0 600\n";
    client.send(requests);
    let lines: Vec<_> = (0..41).map(|_| client.line()).collect();
    assert!(lines.iter().any(|line| line.starts_with("41 ok")), "{lines:?}");
    assert_eq!(lines.iter().filter(|line| line.contains(" ok [")).count(), 40);
}
