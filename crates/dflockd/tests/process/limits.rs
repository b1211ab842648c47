//! Time limits, slow readers and slow writers.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::thread;
use std::time::{Duration, Instant};

use dflockd_testkit::{A_WHILE, Client, Heard, LIMIT, Server, eventually, granted, millis};

use super::both::Either;

#[test]
fn a_started_request_must_be_finished() {
    for server in Either::both(&["--read-timeout", "1"]) {
        let starts = ["l", "l\n", "l\nk", "l\nk\n", "l\nk\n0 6"].map(|start| {
            let mut client = server.connect();
            client.check("ping", "_", "_", "ok");
            let begun = Instant::now();
            client.send(start);
            (start, begun, client)
        });
        for (start, begun, mut client) in starts {
            assert_eq!(client.line(), "error", "{start:?}");
            client.expect_end();
            assert!(begun.elapsed() >= millis(1000), "{start:?} {:?}", begun.elapsed());
        }
        server.connect().check("inspect", "k", "", "nil");
    }
}

#[test]
fn a_byte_now_and_then_is_not_enough() {
    let server = Server::start(&["--read-timeout", "1"]);
    let mut client = server.connect();
    let begun = Instant::now();
    let heard = loop {
        // The write fails if the server was faster.
        client.send("p");
        match client.hear(millis(100)) {
            Heard::Nothing => assert!(begun.elapsed() < LIMIT, "it is never cut"),
            heard @ (Heard::Line(_) | Heard::End) => break heard,
        }
    };
    assert_eq!(heard, Heard::Line("error".to_owned()));
    client.expect_end();
    assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
}

#[test]
fn each_line_has_its_own_time() {
    let server = Server::start(&["--read-timeout", "2"]);
    let mut client = server.connect();
    // Three seconds in all, but never two for one line.
    for part in ["in", "cr\n", "c\n", "5"] {
        client.send(part);
        client.expect_silence(millis(750));
    }
    client.send("\n");
    assert_eq!(client.line(), "ok 5");
}

#[test]
fn an_endless_line_is_cut_too() {
    let server = Server::start(&["--read-timeout", "1"]);
    // Too long already, but its end never comes.
    let mut client = server.connect();
    client.send("x".repeat(1000));
    let begun = Instant::now();
    assert_eq!(client.hear(Duration::from_secs(10)), Heard::Line("error".to_owned()));
    client.expect_end();
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn an_idle_connection_stays() {
    for server in Either::both(&["--read-timeout", "1", "--write-timeout", "1"]) {
        let mut client = server.connect();
        client.lock("k", "0 600");
        client.expect_silence(millis(1600));
        client.check("ping", "_", "_", "ok");
    }
}

#[test]
fn the_idle_timeout_closes_with_an_error_line() {
    for server in Either::both(&["--idle-timeout", "1"]) {
        // One that never said a word, and one that did.
        let begun = Instant::now();
        let mut silent = server.connect();
        silent.expect_last("error");
        assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
        let mut holder = server.connect();
        holder.lock("k", "0 600");
        holder.expect_silence(millis(600));
        let begun = Instant::now();
        holder.check("ping", "_", "_", "ok");
        holder.expect_last("error");
        assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
        // Its lock is free.
        server.connect().lock("k", "10");
    }
}

#[test]
fn a_blocked_connection_is_not_idle() {
    let server = Server::start(&["--idle-timeout", "1", "--read-timeout", "1"]);
    let (mut holder, mut waiter) = (server.connect(), server.connect());
    let token = holder.lock("k", "0 600");
    waiter.begin("l", "k", "30");
    for _ in 0..8 {
        holder.check("n", "k", &format!("{token} 600"), "ok 600");
        waiter.expect_silence(millis(200));
    }
    holder.check("r", "k", &token, "ok");
    granted(&waiter.line());
}

#[test]
fn a_reader_that_never_reads_is_dropped() {
    let server = Server::start(&["--write-timeout", "1"]);
    let (mut other, mut witness) = (server.connect(), server.connect());
    other.check("kset", "big", &"v".repeat(60_000), "ok");
    let mut deaf = server.narrow_socket();
    deaf.write_all(b"l\nk\n0 600\n").unwrap();
    eventually("it holds the lock", || witness.ask("inspect", "k", "").starts_with("ok"));
    other.begin("l", "k", "60");
    witness.wait_for_waiters("k", 1);
    let begun = Instant::now();
    let requests = 500;
    deaf.write_all("kget\nbig\n\n".repeat(requests).as_bytes()).unwrap();
    granted(&other.line());
    assert!(begun.elapsed() >= millis(1000), "{:?}", begun.elapsed());
    // It finds out when it reads at last.
    deaf.set_read_timeout(Some(LIMIT)).unwrap();
    let mut bytes = Vec::new();
    let _ = deaf.read_to_end(&mut bytes);
    assert!(bytes.len() < requests * 60_000, "{}", bytes.len());
}

#[test]
fn a_reader_that_reads_slowly_is_not_dropped() {
    let server = Server::start(&["--write-timeout", "2"]);
    let mut slow = server.connect();
    slow.check("kset", "big", &"v".repeat(60_000), "ok");
    slow.send("kget\nbig\n\n".repeat(300));
    // Longer than the limit in all, but there is always some progress.
    for number in 0..300 {
        assert_eq!(slow.line().len(), 60_003, "answer {number}");
        thread::sleep(millis(15));
    }
    slow.check("ping", "_", "_", "ok");
}

#[test]
fn a_half_closed_connection_still_gets_its_answers() {
    let servers = Either::both(&[]);
    let (mut complete, mut lost) = (Vec::new(), Vec::new());
    for server in &servers {
        let mut client = server.connect();
        client.check("kset", "big", &"v".repeat(60_000), "ok");
        let mut client = server.connect();
        client.send_last("l\nk\n0 600\n");
        granted(&client.line());
        client.expect_end();
        let mut client = server.connect();
        client.send_last("stats\n_\n\nping\n_\n_\n");
        let (stats, ping) = (client.hear(LIMIT), client.hear(LIMIT));
        complete.push(matches!(stats, Heard::Line(_)) && ping == Heard::Line("ok".to_owned()));
        // More than the buffers of both sides take.
        let mut client = server.connect();
        client.send_last("kget\nbig\n\n".repeat(500));
        thread::sleep(A_WHILE);
        let mut answers = 0;
        let end = loop {
            match client.hear(LIMIT) {
                Heard::Line(line) => assert_eq!(line.len(), 60_003),
                end @ (Heard::End | Heard::Nothing) => break end,
            }
            answers += 1;
        };
        assert_eq!(end, Heard::End, "after {answers} answers");
        lost.push(500 - answers);
    }
    assert_eq!(complete, [true, true], "stats are answered over plain text and TLS");
    assert_eq!(lost, [0, 0], "answers lost over plain text and TLS");
}

#[test]
fn a_slow_listener_is_cut_and_others_get_everything() {
    let server = Server::start(&["--write-timeout", "0"]);
    let mut slow = Client::over(server.narrow_socket());
    let [mut good, mut publisher] = std::array::from_fn(|_| server.connect());
    slow.check("listen", "ch", "", "ok");
    good.check("listen", "ch", "", "ok");
    let payload = "p".repeat(50_000);
    let mut sent = 0;
    loop {
        let answer = publisher.ask("signal", "ch", &format!("{sent} {payload}"));
        assert_eq!(good.line(), format!("sig ch {sent} {payload}"));
        sent += 1;
        match answer.as_str() {
            "ok 2" => assert!(sent < 2000, "the slow one is never cut"),
            "ok 1" => break,
            other => panic!("{other}"),
        }
    }
    assert!(sent > 64, "cut after {sent} lines");
    for number in 0..100 {
        publisher.check("signal", "ch", &format!("after {number}"), "ok 1");
        assert_eq!(good.line(), format!("sig ch after {number}"));
    }
    let mut received = 0;
    while let Heard::Line(line) = slow.hear(LIMIT) {
        assert_eq!(line, format!("sig ch {received} {payload}"), "in order and whole");
        received += 1;
    }
    assert!(received < sent, "{received} of {sent}");
}

#[test]
fn a_listener_that_reads_gets_10_000_pipelined_signals() {
    const COUNT: usize = 10_000;
    for server in Either::both(&[]) {
        let [mut listener, mut publisher] = std::array::from_fn(|_| server.connect());
        listener.check("listen", "ch", "", "ok");
        let reader = thread::spawn(move || {
            for number in 0..COUNT {
                assert_eq!(listener.line(), format!("sig ch {number}"));
            }
            listener.check("ping", "_", "_", "ok");
        });
        publisher.send(signals(COUNT));
        for _ in 0..COUNT {
            assert_eq!(publisher.line(), "ok 1");
        }
        reader.join().unwrap();
    }
}

#[test]
fn a_listener_gets_10_000_signals_of_its_own() {
    const COUNT: usize = 10_000;
    for server in Either::both(&[]) {
        let mut client = server.connect();
        client.check("listen", "ch", "", "ok");
        client.send(signals(COUNT));
        let (mut answers, mut pushes) = (0, 0);
        while answers + pushes < 2 * COUNT {
            let line = client.line();
            if let Some(number) = line.strip_prefix("sig ch ") {
                assert_eq!(number, pushes.to_string());
                pushes += 1;
            } else {
                assert_eq!(line, "ok 1");
                answers += 1;
            }
        }
    }
}

fn signals(count: usize) -> String {
    (0..count).map(|number| format!("signal\nch\n{number}\n")).collect()
}

/// The longest answers: one byte more than the server buffers before it waits for the reader.
#[test]
fn the_connection_works_after_the_longest_answer() {
    for server in Either::both(&[]) {
        let mut client = server.connect();
        let value = "v".repeat(65_533);
        client.check("kset", "big", &value, "ok");
        for _ in 0..3 {
            client.check("kget", "big", "", &format!("ok {value}"));
            client.check("ping", "_", "_", "ok");
        }
    }
}

#[test]
fn input_behind_a_blocking_command_waits_or_is_abuse() {
    let server = Server::start::<&str>(&[]);
    let [mut holder, mut waiter, mut abuser] = std::array::from_fn(|_| server.connect());
    let token = holder.lock("k", "0 600");
    waiter.begin("l", "k", "60");
    waiter.send("ping\n_\n_\nincr\nc\n1\n");
    waiter.expect_silence(A_WHILE);
    abuser.begin("l", "k", "60");
    abuser.send("ping\n_\n_\n".repeat(460));
    abuser.expect_end();
    holder.wait_for_waiters("k", 1);
    holder.check("r", "k", &token, "ok");
    let mut expected = VecDeque::from(["ok", "ok 1"]);
    granted(&waiter.line());
    while let Some(answer) = expected.pop_front() {
        assert_eq!(waiter.line(), answer);
    }
}
