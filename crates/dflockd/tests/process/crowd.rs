//! Ten thousand clients.

use std::io::{Read, Write};
use std::net::TcpStream;

use dflockd_testkit::{Server, eventually};

/// What an idle connection with a lock may cost here, in an unoptimised build with other tests beside it. The aim for
/// a release build is 2 KiB.
const BYTES_MAX: u64 = 6144;

/// How many connect before their answers are read.
const WAVE: usize = 100;

#[test]
fn ten_thousand_idle_connections_with_a_lock_each() {
    let files = rlimit::increase_nofile_limit(u64::MAX).unwrap();
    // Other tests in this process need some too.
    let count = 10_000.min(usize::try_from(files).unwrap_or(usize::MAX).saturating_sub(4000));
    assert!(count >= 4000, "the hard limit of files is too low: {files}");
    if count < 10_000 {
        println!("only {count} connections: the hard limit of files is {files}");
    }

    let server = Server::start(&["--max-locks", "20000"]);
    let mut witness = server.connect();
    witness.stats();
    let before = server.resident_kib();
    let mut sockets: Vec<TcpStream> = Vec::with_capacity(count);
    for number in 0..count {
        let mut socket = server.socket();
        socket.write_all(format!("l\nlock-{number}\n0 3600\n").as_bytes()).unwrap();
        sockets.push(socket);
        // In waves that the queue of the listener can hold: a refused one would be tried again only
        // after a second.
        if sockets.len().is_multiple_of(WAVE) || sockets.len() == count {
            for socket in &mut sockets[number / WAVE * WAVE..] {
                let mut answer = [0; 41];
                socket.read_exact(&mut answer).unwrap();
                assert!(answer.starts_with(b"ok ") && answer.ends_with(b" 3600\n"), "{answer:?}");
            }
        }
    }
    let bytes = (server.resident_kib() - before) * 1024 / count as u64;
    println!(
        "{count} connections with a lock each: {bytes} bytes of resident memory per connection"
    );
    assert!(bytes <= BYTES_MAX, "{bytes} bytes per connection");

    // Each of them still works, and nobody else gets its lock.
    for (number, socket) in sockets.iter_mut().enumerate().step_by(97) {
        witness.check("l", &format!("lock-{number}"), "0", "timeout");
        let mut answer = [0; 3];
        socket.write_all(b"ping\n_\n_\n").unwrap();
        socket.read_exact(&mut answer).unwrap();
        assert_eq!(answer, *b"ok\n");
    }
    let stats = witness.stats();
    assert_eq!(stats["connections"], count + 1);
    // Not all of them by name: that would be more than an answer may have.
    assert_eq!(stats["lock_keys"], count);

    drop(sockets);
    eventually("all are gone", || {
        let stats = witness.stats();
        stats["connections"] == 1 && stats["locks"].as_array().unwrap().is_empty()
    });
}
