//! Bad input, while a witness holds a lock and goes on working.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::thread;
use std::time::Duration;

use dflockd_testkit::{Client, Heard, Noise, Server, eventually, granted, millis};

/// A client that must not notice anything.
struct Witness {
    client: Client,
    token: String,
}

impl Witness {
    fn new(server: &Server) -> Self {
        let mut client = server.connect();
        let token = client.lock("witness", "0 600");
        Self { client, token }
    }

    /// That its lock is its own and others are served.
    #[track_caller]
    fn check(&mut self) {
        self.client.check("n", "witness", &format!("{} 600", self.token), "ok 600");
        let token = self.client.lock("free", "0");
        self.client.check("r", "free", &token, "ok");
    }

    /// That only the witness itself is left in the server.
    #[track_caller]
    fn check_alone(&mut self) {
        self.check();
        eventually("nothing is left", || {
            let stats = self.client.stats();
            let list = |name: &str| stats[name].as_array().unwrap();
            let empty = ["semaphores", "rw_locks", "barriers", "signal_channels", "watch_channels"];
            let [lock] = &list("locks")[..] else { return false };
            stats["connections"] == 1
                && (&lock["key"], &lock["waiters"]) == (&"witness".into(), &0.into())
                && empty.iter().all(|name| list(name).is_empty())
                && list("lists").iter().all(|list| list.get("pop_waiters").is_none())
        });
    }
}

#[test]
fn wrong_requests_get_an_error_and_may_go_on() {
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    for request in [
        "zz\nk\n1\n",
        "\n\n\n",
        "L\nk\n0\n",
        " l\nk\n0\n",
        "l\n\n0\n",
        "l\na b\n0\n",
        "l\na\tb\n0\n",
        "l\nk\n\n",
        "l\nk\n1 2 3\n",
        "l\nk\n-1\n",
        "l\nk\n1 0\n",
        "l\nk\n99999999999999999999\n",
        "l\nk\n9223372037\n",
        "l\nk\n0x1\n",
        "e\nk\n1 2\n",
        "w\nk\n\n",
        "r\nk\n\n",
        "n\nk\n\n",
        "sl\nk\n1\n",
        "sl\nk\n0 0\n",
        "sl\nk\n0 1048577\n",
        "bwait\nb\n0 1\n",
        "bwait\nb\n1048577 1\n",
        "incr\nc\nx\n",
        "incr\nc\n\n",
        "decr\nc\n-9223372036854775808\n",
        "kset\nv\n\n",
        "kset\nv\na\tb\tc\n",
        "kset\nv\na\rb\n",
        "kcas\nv\na\tb\n",
        "lrange\nq\n1\n",
        "rpush\nq\n\n",
        "listen\na.>.b\n\n",
        "signal\na.*\nx\n",
        "signal\na\n\n",
        "signal\na\n  \n",
        "auth\n_\nx\n",
        "hello\n\nms\n",
        "inspect\n\n\n",
    ] {
        let mut client = server.connect();
        client.send(request);
        assert_eq!(client.line(), "error", "{request:?}");
        client.check("ping", "_", "_", "ok");
    }
    // A thousand in a row as well.
    let mut client = server.connect();
    client.send("zz\nk\n1\n".repeat(1000));
    for _ in 0..1000 {
        assert_eq!(client.line(), "error");
    }
    client.check("ping", "_", "_", "ok");
    drop(client);
    witness.check_alone();
}

#[test]
fn lines_that_are_too_long() {
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    let long = |count| "x".repeat(count);
    for request in [
        format!("{}\n", long(257)),
        format!("l\n{}\n", long(257)),
        format!("l\n{}\r\n", long(256)),
        format!("l\nk\n{}\n", long(257)),
        format!("kset\nk\n{}\n", long(65_533 + 22)),
        format!("signal\nc\n{}\n", long(65_537)),
        format!("{}\n", long(10 << 20)),
        format!("l\nk\n{}\n", long(10 << 20)),
        // Nothing behind it is looked at.
        format!("{}\nl\nk\n0 600\nl\nk2\n0 600\n", long(5000)),
    ] {
        let mut client = server.connect();
        client.send(&request);
        assert_eq!(client.line(), "error", "{:?}", &request[..20]);
        client.expect_end();
        witness.check();
    }
    // As long as may be.
    let mut client = server.connect();
    granted(&client.ask("l", &long(256), "0"));
    granted(&client.ask("l", "k", &format!("0{}", " ".repeat(255))));
    client.check("kset", "k", &long(65_533), "ok");
    client.check("kset", "k", &long(65_534), "error");
    client.check("ping", "_", "_", "ok");
    drop(client);
    witness.check_alone();
}

#[test]
fn endless_lines_take_no_memory() {
    let server = Server::start(&["--read-timeout", "2"]);
    let mut witness = Witness::new(&server);
    let before = server.resident_kib();
    let endless: Vec<_> = ["", "l\n", "l\nk\n", "kset\nk\n"]
        .into_iter()
        .map(|start| {
            let mut client = server.connect();
            client.send(start);
            // Every part is quick enough; the line as a whole never ends.
            let bytes = vec![b'x'; 1 << 20];
            for _ in 0..10 {
                client.send(&bytes);
                witness.check();
            }
            client
        })
        .collect();
    server.check_growth(before, 8 * 1024);
    for mut client in endless {
        assert_eq!(client.hear(Duration::from_secs(10)), Heard::Line("error".to_owned()));
        client.expect_end();
    }
    witness.check_alone();
}

#[test]
fn random_bytes() {
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    let mut noise = Noise::new(7);
    for number in 0..1000 {
        let count = noise.below(600);
        let mut bytes = noise.bytes(count);
        match number % 4 {
            0 => {}
            // Something that looks like requests.
            1 => {
                for byte in &mut bytes {
                    if *byte < 64 {
                        *byte = b'\n';
                    }
                }
            }
            2 => bytes = [b"l\n", &bytes[..]].concat(),
            _ => bytes = [b"kset\nk\n", &bytes[..], b"\n"].concat(),
        }
        let mut socket = server.socket();
        // The server may have closed it before everything is written.
        let _ = socket.write_all(&bytes);
        let _ = socket.shutdown(Shutdown::Write);
        let mut answer = Vec::new();
        if socket.read_to_end(&mut answer).is_ok() {
            assert!(answer.is_empty() || answer.ends_with(b"\n"), "round {number} {answer:?}");
        }
        if number % 100 == 0 {
            witness.check();
        }
    }
    witness.check_alone();
}

#[test]
fn keys_of_any_bytes() {
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    let keys: [(&[u8], &str); 4] = [
        (b"a\0b", "a\0b"),
        (b"\xff\xfe", "\u{fffd}\u{fffd}"),
        (b"\x01\x1b[2J\x7f", "\x01\x1b[2J\x7f"),
        (b"quote\"back\\slash", "quote\"back\\slash"),
    ];
    let mut client = server.connect();
    for (key, shown) in keys {
        client.send([b"l\n", key, b"\n0 600\n"].concat());
        let token = granted(&client.line());
        let stats = witness.client.stats();
        let found = dflockd_testkit::line::entry(&stats, "locks", shown);
        assert!(found.is_some(), "{shown:?} {stats}");
        client.send([b"r\n", key, b"\n", token.as_bytes(), b"\n"].concat());
        assert_eq!(client.line(), "ok");
    }
    // They are told apart by their bytes, not by how they are shown.
    client.send(b"l\n\xff\n0 600\n");
    granted(&client.line());
    client.send(b"l\n\xfe\n0 600\n");
    granted(&client.line());
    drop(client);
    witness.check_alone();
}

#[test]
fn half_open_connections() {
    rlimit::increase_nofile_limit(u64::MAX).unwrap();
    let server = Server::start(&["--read-timeout", "3"]);
    let mut witness = Witness::new(&server);
    let mut sockets: Vec<_> = (0..2000)
        .map(|number| {
            let mut socket = server.socket();
            socket.write_all(b"l").unwrap();
            // The queue of the listener must not overflow: that would cost a second.
            if number % 100 == 0 {
                server.connect().check("ping", "_", "_", "ok");
                witness.check();
            }
            socket
        })
        .collect();
    witness.check();
    for socket in &mut sockets {
        let mut answer = Vec::new();
        socket.read_to_end(&mut answer).unwrap();
        assert_eq!(answer, b"error\n");
    }
    witness.check_alone();
}

#[test]
fn a_flood_of_enqueues() {
    const COUNT: usize = 100_000;
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    let mut socket = server.socket();
    let client = socket.try_clone().unwrap();
    let writer = thread::spawn(move || {
        let requests: String =
            (0..COUNT).map(|number| format!("e\nk{}\n600\n", number % 5000)).collect();
        socket.write_all(requests.as_bytes()).unwrap();
    });
    let mut client = Client::over(client);
    let (mut acquired, mut full, mut again) = (0, 0, 0);
    for _ in 0..COUNT {
        match client.line().split(' ').next().unwrap() {
            "acquired" => acquired += 1,
            "error_max_locks" => full += 1,
            "error_already_enqueued" => again += 1,
            other => panic!("{other}"),
        }
    }
    writer.join().unwrap();
    // All but the witness's, and perhaps the one it used for a moment.
    assert_eq!(acquired, 1023);
    assert_eq!(again, 1023 * (COUNT / 5000 - 1));
    assert_eq!(full, COUNT - acquired - again);
    witness.client.check("n", "witness", &witness.token, "ok 33");
    drop(client);
    eventually("the keys are free", || {
        let client = &mut witness.client;
        let free = client.ask("l", "k1", "0");
        free.starts_with("ok ").then(|| client.check("r", "k1", &granted(&free), "ok"))
    });
    // An idle key keeps its place in the count until it is collected: use one that is there.
    eventually("nothing is left", || {
        let stats = witness.client.stats();
        stats["connections"] == 1 && stats["locks"].as_array().unwrap().len() == 1
    });
}

#[test]
fn a_disconnect_at_every_byte() {
    let server = Server::start::<&str>(&[]);
    let mut witness = Witness::new(&server);
    for request in [
        "l\nwitness\n60 600\n",
        "l\nk\n60 600\n",
        "e\nk\n600\n",
        "e\nwitness\n600\nw\nwitness\n60\n",
        "sl\ns\n60 2 600\n",
        "se\ns\n2 600\n",
        "rl\nrw\n60 600\n",
        "wl\nrw\n60 600\n",
        "elect\nk\n60 600\n",
        "observe\nk\n\n",
        "blpop\nq\n60\n",
        "bwait\nb\n3 60\n",
        "listen\na.>\ngroup\n",
        "watch\na.*\n\n",
        "hello\nme\nms mux\n1 l\nk\n60000 600000\n",
        "l\nk\n0 600\nl\nk\n60 600\nl\nk\n60 600\n",
    ] {
        for end in 0..=request.len() {
            for by_reset in [false, true] {
                let mut client = server.connect();
                client.send(&request[..end]);
                if by_reset {
                    client.reset();
                } else {
                    drop(client);
                }
            }
        }
        witness.check_alone();
    }
    // Everything is free.
    let client = &mut witness.client;
    client.lock("k", "0");
    granted(&client.ask("sl", "s", "0 2"));
    granted(&client.ask("wl", "rw", "0"));
    client.check("rpush", "q", "item", "ok 1");
    client.check("signal", "a.b", "x", "ok 0");
    assert_eq!(client.hear(millis(1)), Heard::Nothing);
}
