//! HTTP and TLS on the port of the line protocol.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use dflockd_testkit::{Client, LIMIT, Pair, Server, eventually};

use super::both::TlsServer;

const BODY: &str =
    "kset\nevil\nowned\nkset\nevil\nowned\n\nkset\nevil\nowned\n\n\nkset\nevil\nowned\n";

/// Everything that comes until the server closes.
fn answer(mut socket: TcpStream) -> Vec<u8> {
    socket.set_read_timeout(Some(LIMIT)).unwrap();
    let mut answer = Vec::new();
    socket.read_to_end(&mut answer).expect("an orderly end");
    answer
}

#[track_caller]
fn is_hint(answer: &[u8]) {
    let text = std::str::from_utf8(answer).unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{text}"));
    assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
    assert!(head.contains("\r\nConnection: close"), "{head}");
    assert!(head.contains(&format!("\r\nContent-Length: {}\r\n", body.len())), "{head}");
    assert!(body.contains("--http-port"), "{body}");
}

/// GUARANTEES 48: a web page that makes a browser send a request to this port is no client.
#[test]
fn nothing_of_an_http_request_is_executed() {
    let server = Server::start::<&str>(&[]);
    let mut witness = server.connect();
    let long = "x".repeat(100_000);
    let heads = [
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: text/plain\r\n".to_owned(),
        "POST / HTTP/1.1\r\nHost: 127.0.0.1\r\n".to_owned(),
        "POST / HTTP/1.1\r\n".to_owned(),
        "\r\nPOST / HTTP/1.1\r\nHost: 127.0.0.1\r\n".to_owned(),
        "\n\n\n\nPOST / HTTP/1.1\nHost: 127.0.0.1\n".to_owned(),
        format!("POST /{long} HTTP/1.1\r\nHost: 127.0.0.1\r\n"),
        "GET / HTTP/1.0\r\n".to_owned(),
        "OPTIONS * HTTP/1.1\r\n".to_owned(),
        "BREW /pot HTTP/1.1\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n".to_owned(),
    ];
    for head in &heads {
        for pad in ["", "\n", "\n\n"] {
            let mut socket = server.socket();
            // It may be closed before all is sent.
            let _ = socket.write_all(format!("{head}\r\n{pad}{BODY}").as_bytes());
            let _ = socket.shutdown(Shutdown::Write);
            let answer = answer(socket);
            let hint = answer.strip_prefix(b"error\n").unwrap_or(&answer);
            is_hint(hint);
        }
        witness.check("kget", "evil", "", "nil");
    }
    // A client that stays sees the end as well.
    let mut socket = server.socket();
    socket.write_all(heads[0].as_bytes()).unwrap();
    is_hint(&answer(socket));
    witness.check("kget", "evil", "", "nil");
    eventually("they are gone", || witness.stats()["connections"] == 1);
}

#[test]
fn an_http_request_may_come_in_any_pieces() {
    let server = Server::start::<&str>(&[]);
    let request = format!("POST /x HTTP/1.1\r\nHost: x\r\n\r\n{BODY}");
    for split in 1..=6 {
        let mut socket = server.socket();
        socket.set_nodelay(true).unwrap();
        let (first, rest) = request.as_bytes().split_at(split);
        for byte in first {
            socket.write_all(&[*byte]).unwrap();
        }
        // The server answers before the rest at the latest when it has seen the space.
        let _ = socket.write_all(rest);
        is_hint(&answer(socket));
    }
    server.connect().check("kget", "evil", "", "nil");
}

/// GUARANTEES 48: the log of such clients has a budget, however many come.
#[test]
fn they_do_not_fill_the_log() {
    let server = Server::start::<&str>(&[]);
    let mut count = 0;
    for _ in 0..200 {
        let mut socket = server.socket();
        let _ = socket.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n");
        count += usize::from(answer(socket).starts_with(b"HTTP/1.1 400"));
    }
    assert_eq!(count, 200);
    server.wait_for_output("does not speak the line protocol");
    let lines = server.output().matches("does not speak the line protocol").count();
    // Ten at once, then one in ten seconds.
    assert!(lines <= 20, "{lines} lines");
}

#[test]
fn tls_where_plain_text_is_expected_is_told_so() {
    let server = Server::start::<&str>(&[]);
    let error = Client::over_tls(server.socket(), Pair::new().client()).err();
    let error = error.expect("no handshake").to_string();
    assert!(error.contains("ProtocolVersion"), "{error}");
    for hello in [&b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x03"[..], b"\x16\x03\x03\x00\x00\n\n\n"] {
        let mut socket = server.socket();
        socket.write_all(hello).unwrap();
        assert_eq!(answer(socket), [0x15, 3, 3, 0, 2, 2, 70]);
    }
    // Half of it is waited for, as half of any line is.
    let mut socket = server.socket();
    socket.write_all(b"\x16").unwrap();
    server.connect().check("ping", "_", "", "ok");
    socket.write_all(b"\x03").unwrap();
    assert_eq!(answer(socket), [0x15, 3, 3, 0, 2, 2, 70]);
}

/// A browser that trusts the certificate gets through TLS, but no further.
#[test]
fn http_within_tls_is_not_executed_either() {
    let site = TlsServer::start(&[]);
    let mut page = site.connect();
    let _ = page.try_send(format!("POST / HTTP/1.1\r\nHost: localhost\r\n\r\n{BODY}"));
    assert_eq!(page.line(), "HTTP/1.1 400 Bad Request\r");
    while !page.line().contains("--http-port") {}
    page.expect_end();
    site.connect().check("kget", "evil", "", "nil");
}
