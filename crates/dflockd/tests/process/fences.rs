//! Fences and exclusion over restarts.

use std::fs;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use dflockd_engine::FenceFile;
use dflockd_testkit::{
    Client, Dir, Heard, Server, command, eventually, fence, granted, millis, run,
};

/// Takes and gives locks until the server dies; tells every fence it was given.
fn grant_until_death(mut client: Client, key: &str, told: &Mutex<Vec<u64>>, count: &AtomicUsize) {
    loop {
        let request = format!("l\n{key}\n5 600\n");
        if client_died(&mut client, &request) {
            return;
        }
        let Heard::Line(answer) = client.hear(dflockd_testkit::LIMIT) else { return };
        let token = granted(&answer);
        told.lock().unwrap().push(fence(&token));
        count.fetch_add(1, Ordering::Relaxed);
        if client_died(&mut client, &format!("r\n{key}\n{token}\n")) {
            return;
        }
        match client.hear(dflockd_testkit::LIMIT) {
            Heard::Line(answer) => assert_eq!(answer, "ok"),
            Heard::End | Heard::Nothing => return,
        }
    }
}

fn client_died(client: &mut Client, request: &str) -> bool {
    client.try_send(request).is_err()
}

/// GUARANTEES 3: kills the server again and again in the middle of grants.
fn fences_grow_over_kills(file: &str, floor: u64) {
    let mut highest = floor;
    for restart in 0..10 {
        let server = Server::start(&["--fence-state-file", file]);
        let told = Arc::new(Mutex::new(Vec::new()));
        let count = Arc::new(AtomicUsize::new(0));
        let threads: Vec<_> = (0..4)
            .map(|number| {
                let (told, count) = (Arc::clone(&told), Arc::clone(&count));
                let client = server.connect();
                // Two share a key, so that some wait when the server dies.
                let key = format!("k{}", number % 2);
                thread::spawn(move || grant_until_death(client, &key, &told, &count))
            })
            .collect();
        eventually("grants", || count.load(Ordering::Relaxed) > 100 + restart);
        server.kill();
        for thread in threads {
            thread.join().unwrap();
        }
        let mut told = told.lock().unwrap().clone();
        told.sort_unstable();
        let (first, last) = (told[0], told[told.len() - 1]);
        assert!(first > highest, "restart {restart}: {first} after {highest}");
        let given = told.len();
        told.dedup();
        assert_eq!(told.len(), given, "a fence was given out twice");
        highest = last;
    }
}

#[test]
fn fences_grow_over_kills_of_the_server() {
    let dir = Dir::new();
    fences_grow_over_kills(&dir.name("fences"), 0);
}

#[test]
fn fences_grow_when_the_clock_is_no_help() {
    let dir = Dir::new();
    let file = dir.name("fences");
    let floor = 1 << 63;
    FenceFile::open(&file).unwrap().reserve(floor, 0).unwrap();
    fences_grow_over_kills(&file, floor - 1);
}

#[test]
fn the_end_of_all_fences_is_an_error_not_a_new_beginning() {
    let dir = Dir::new();
    let file = dir.name("fences");
    FenceFile::open(&file).unwrap().reserve(u64::MAX - 2, 0).unwrap();
    let mut start = command(&["--fence-state-file", &file, "--port", "0"]);
    start.env("RUST_BACKTRACE", "0");
    // Either it does not start, or it grants nothing that it granted before.
    let server = Server::try_launch(start);
    let Ok(server) = server else { return };
    let mut client = server.connect();
    let mut last = u64::MAX - 3;
    for _ in 0..10 {
        let answer = client.ask("l", "k", "0 600");
        if answer == "error" {
            return client.check("ping", "_", "_", "ok");
        }
        let token = granted(&answer);
        assert!(fence(&token) > last, "{token} after {last:016x}");
        last = fence(&token);
        client.check("r", "k", &token, "ok");
    }
    panic!("ten fences out of two");
}

/// That the server does not start and says why.
#[track_caller]
fn refused(file: &str, reason: &str) {
    let output = run(command(&["--port", "0", "--fence-state-file", file]));
    output.expect(1).complains(&[file, reason]);
}

#[test]
fn one_server_per_file() {
    let dir = Dir::new();
    let file = dir.name("fences");
    let server = Server::start(&["--fence-state-file", &file]);
    let mut client = server.connect();
    refused(&file, "in use by another process");
    let token = client.lock("k", "0 600");
    server.kill();
    let server = Server::start(&["--fence-state-file", &file]);
    assert!(fence(&server.connect().lock("k", "0")) > fence(&token));
}

#[test]
fn a_damaged_file_is_refused() {
    let dir = Dir::new();
    let file = dir.name("fences");
    Server::start(&["--fence-state-file", &file]).kill();
    let good = fs::read(dir.path("fences")).unwrap();
    let damaged = |change: fn(&mut Vec<u8>)| {
        let mut bytes = good.clone();
        change(&mut bytes);
        bytes
    };
    for bytes in [
        Vec::new(),
        b"nonsense and more of it".to_vec(),
        damaged(|bytes| bytes.truncate(bytes.len() / 2)),
        damaged(|bytes| bytes.push(0)),
        damaged(|bytes| bytes.fill(0)),
        damaged(|bytes| {
            for at in [24, 4096 + 24] {
                bytes[at] ^= 1;
            }
        }),
    ] {
        fs::write(&file, &bytes).unwrap();
        refused(&file, "is damaged");
        assert_eq!(fs::read(&file).unwrap(), bytes, "it was changed");
    }
    refused(&dir.name("no/such/directory"), "cannot");
    assert!(!dir.path("no").exists());
    // One slot alone is enough: that is what a torn write leaves.
    fs::write(&file, damaged(|bytes| bytes[24] ^= 1)).unwrap();
    Server::start(&["--fence-state-file", &file]).connect().lock("k", "0");
}

#[test]
fn nothing_is_granted_before_the_startup_delay_is_over() {
    let server = Server::start(&["--startup-grant-delay", "2"]);
    let [mut first, mut second, mut witness] = std::array::from_fn(|_| server.connect());
    first.begin("l", "k", "60 600");
    eventually("one waits", || witness.waiters("k") == 1);
    second.begin("l", "k", "60 600");
    eventually("two wait", || witness.waiters("k") == 2);
    // Time limits apply and everything else works.
    let mut hasty = server.connect();
    hasty.check("l", "other", "0", "timeout");
    hasty.check("kset", "v", "x", "ok");
    hasty.check("kget", "v", "", "ok x");
    assert!(server.begun_at.elapsed() < millis(2000), "too slow to tell");
    let token = granted(&first.line());
    assert!(server.begun_at.elapsed() >= millis(2000), "{:?}", server.begun_at.elapsed());
    second.expect_silence(millis(50));
    first.check("r", "k", &token, "ok");
    granted(&second.line());
    hasty.lock("other", "0");
}

/// GUARANTEES 2: the holder of before the crash may trust its lease.
#[test]
fn the_automatic_delay_waits_for_the_longest_lease() {
    let dir = Dir::new();
    let file = dir.name("fences");
    let start = || Server::start(&["--fence-state-file", &file, "--startup-grant-delay", "auto"]);
    let server = start();
    let mut client = server.connect();
    // A new file knows of no lease.
    let token = client.lock("k", "0 1");
    let renewed_at = Instant::now();
    client.check("n", "k", &format!("{token} 3"), "ok 3");
    server.kill();

    let server = start();
    let mut next = server.connect();
    let new_token = next.lock("k", "60 1");
    assert!(renewed_at.elapsed() >= Duration::from_secs(3), "{:?}", renewed_at.elapsed());
    assert!(server.begun_at.elapsed() >= Duration::from_secs(3), "{:?}", server.begun_at.elapsed());
    assert!(fence(&new_token) > fence(&token));
}
