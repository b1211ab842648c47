//! How many may connect and wait.

use std::io::{Read, Write};
use std::net::TcpStream;

use dflockd_testkit::{Client, Heard, LIMIT, Server, eventually, granted, millis, together};

/// That the server closes the socket without a byte.
#[track_caller]
fn turned_away(mut socket: TcpStream) {
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    assert!(bytes.is_empty(), "{bytes:?}");
}

fn seats_are_counted(flag: &str) {
    let server = Server::start(&[flag, "5"]);
    let mut clients: Vec<_> = (0..5).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.check("ping", "_", "_", "ok");
    }
    for _ in 0..10 {
        turned_away(server.socket());
    }
    server.wait_for_output("level=WARN msg=\"connection cap reached\"");
    for client in &mut clients {
        client.check("ping", "_", "_", "ok");
    }
    // Whether it ends in an orderly way, with a reset or by an error, its seat is free again.
    clients.pop().unwrap().reset();
    drop(clients.pop());
    let mut bad = clients.pop().unwrap();
    bad.send("x".repeat(300) + "\n");
    bad.expect_last("error");
    drop(bad);
    for _ in 0..3 {
        let client = eventually("a seat", || {
            let mut client = Client::over(TcpStream::connect(server.address).unwrap());
            if client.hear(millis(20)) == Heard::End {
                return None;
            }
            client.check("ping", "_", "_", "ok");
            Some(client)
        });
        clients.push(client);
    }
    turned_away(server.socket());
}

#[test]
fn max_connections() {
    seats_are_counted("--max-connections");
}

#[test]
fn max_connections_per_ip() {
    seats_are_counted("--max-connections-per-ip");
}

#[test]
fn the_cap_is_exact_in_a_storm() {
    const CAP: usize = 50;
    let cap = CAP.to_string();
    let server = Server::start(&["--max-connections", "60", "--max-connections-per-ip", &cap]);
    let mut witness = None;
    for round in 0..3 {
        let admitted = together(8, |_| {
            let sockets: Vec<_> = (0..16).map(|_| server.socket()).collect();
            sockets.into_iter().filter_map(storm_client).collect::<Vec<_>>()
        });
        let admitted: Vec<_> = admitted.into_iter().flatten().collect();
        // All of them are still open, so this is how many there were at once.
        let others = usize::from(witness.is_some());
        assert_eq!(admitted.len(), CAP - others, "round {round}");
        drop(admitted);
        // The one that sees it keeps its seat, so that nobody is about to leave in the next round.
        witness = eventually("all others have left", || {
            let mut client = witness.take().unwrap_or_else(|| server.connect());
            if client.try_send("stats\n_\n_\n").is_err() {
                return None;
            }
            match client.hear(LIMIT) {
                Heard::Line(line) if line.starts_with("ok {\"connections\":1,") => Some(client),
                Heard::Line(_) => {
                    witness = Some(client);
                    None
                }
                Heard::End | Heard::Nothing => None,
            }
        })
        .into();
    }
}

/// One that is answered, and so has a seat.
fn storm_client(mut socket: TcpStream) -> Option<Client> {
    let mut answer = [0; 3];
    let asked = socket.write_all(b"ping\n_\n_\n");
    let answered = asked.and_then(|()| socket.read_exact(&mut answer)).is_ok();
    (answered && answer == *b"ok\n").then(|| Client::over(socket))
}

#[test]
fn max_waiters() {
    let server = Server::start(&["--max-waiters", "10"]);
    let mut holder = server.connect();
    let token = holder.lock("k", "0 600");
    let mut clients: Vec<_> = (0..200).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.begin("e", "k", "600");
    }
    let (mut queued, refused): (Vec<_>, Vec<_>) = clients
        .into_iter()
        .map(|mut client| (client.line(), client))
        .partition(|(answer, _)| answer == "queued");
    assert_eq!((queued.len(), refused.len()), (10, 190));
    for (answer, _) in &refused {
        assert_eq!(answer, "error_max_waiters");
    }
    // Those who would block are refused as well, and other keys are not concerned.
    holder.check("l", "k", "0", "error_max_waiters");
    holder.check("l", "k", "60", "error_max_waiters");
    holder.lock("other", "0");

    // A place becomes free when somebody leaves.
    drop(queued.pop());
    let (_, mut next) = refused.into_iter().next().unwrap();
    eventually("a place", || next.ask("e", "k", "600") == "queued");
    holder.check("l", "k", "0", "error_max_waiters");
    holder.check("r", "k", &token, "ok");
    let mut answers: Vec<_> =
        queued.iter_mut().map(|(_, client)| client.ask("w", "k", "0")).collect();
    answers.retain(|answer| answer != "timeout");
    let [one] = &answers[..] else { panic!("{answers:?}") };
    granted(one);
}

#[test]
fn max_locks_under_a_flood() {
    let server = Server::start(&["--max-locks", "100"]);
    let mut client = server.connect();
    let requests: String = (0..500).map(|number| format!("l\nk{number}\n0 600\n")).collect();
    client.send(requests);
    let answers: Vec<_> = (0..500).map(|_| client.line()).collect();
    let granted = answers.iter().filter(|answer| answer.starts_with("ok ")).count();
    let refused = answers.iter().filter(|answer| *answer == "error_max_locks").count();
    assert_eq!((granted, refused), (100, 400));
}
