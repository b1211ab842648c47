//! TLS on the port.

use std::io::{Read, Write};
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use dflockd_testkit::certificates::trusting;
use dflockd_testkit::{
    Client, Dir, LIMIT, Pair, Server, command, eventually, millis, run, together,
};
use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair};
use rustls::{ProtocolVersion, version};

use super::both::TlsServer;

#[test]
fn both_versions() {
    let TlsServer { server, pair, dir: _dir, .. } = TlsServer::start(&[]);
    for (versions, agreed) in [
        (&[&version::TLS12][..], ProtocolVersion::TLSv1_2),
        (&[&version::TLS13], ProtocolVersion::TLSv1_3),
        (&[&version::TLS12, &version::TLS13], ProtocolVersion::TLSv1_3),
    ] {
        let config = trusting(&pair.cert, versions);
        let (mut client, facts) = Client::over_tls(server.socket(), config).unwrap();
        assert_eq!(facts.version, agreed);
        client.check("ping", "_", "_", "ok");
    }
    assert!(server.output().contains("tls=true"), "{}", server.output());
}

#[test]
fn a_chain_is_sent_whole() {
    let authority = |name: &str| {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        (params, KeyPair::generate().unwrap())
    };
    let (root, root_key) = authority("root");
    let root_pem = root.self_signed(&root_key).unwrap().pem();
    let root = Issuer::new(root, root_key);
    let (middle, middle_key) = authority("middle");
    let middle_pem = middle.signed_by(&middle_key, &root).unwrap().pem();
    let middle = Issuer::new(middle, middle_key);
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap();
    let leaf_pem = leaf.signed_by(&key, &middle).unwrap().pem();

    let pair = Pair { cert: format!("{leaf_pem}{middle_pem}"), key: key.serialize_pem() };
    let dir = Dir::new();
    let server = Server::start(&pair.flags(&dir));
    let config = trusting(&root_pem, &[&version::TLS13]);
    let (mut client, facts) = Client::over_tls(server.socket(), config).unwrap();
    assert_eq!(facts.chain.len(), 2);
    client.check("ping", "_", "_", "ok");
}

#[test]
fn plain_text_is_refused() {
    let TlsServer { server, config, dir: _dir, .. } = TlsServer::start(&[]);
    for text in ["ping\n_\n_\n", "l\nk\n0 600\n", "\n\n\n", "GET / HTTP/1.0\r\n\r\n"] {
        let mut socket = server.socket();
        socket.write_all(text.as_bytes()).unwrap();
        let mut answer = Vec::new();
        // The end or a reset; perhaps a TLS alert before.
        let _ = socket.read_to_end(&mut answer);
        assert!(!answer.windows(2).any(|two| two == b"ok"), "{answer:?}");
        assert!(!answer.contains(&b'\n'), "{answer:?}");
    }
    let (mut client, _) = Client::over_tls(server.socket(), config).unwrap();
    client.check("inspect", "k", "", "nil");
}

#[test]
fn a_stalled_handshake_is_cut() {
    let tls = TlsServer::start(&["--read-timeout", "1", "--max-connections", "5"]);
    let hello = {
        let mut bytes = Vec::new();
        let name = "localhost".try_into().unwrap();
        let mut client = rustls::ClientConnection::new(Arc::clone(&tls.config), name).unwrap();
        client.write_tls(&mut bytes).unwrap();
        bytes
    };
    let lengths = [0, 1, 3, hello.len() / 2, hello.len()];
    together(lengths.len(), |number| {
        let (count, begun) = (lengths[number], Instant::now());
        let mut socket = tls.server.socket();
        socket.write_all(&hello[..count]).unwrap();
        let _ = socket.read_to_end(&mut Vec::new());
        let time = begun.elapsed();
        assert!(time >= millis(1000), "cut after {time:?} with {count} bytes");
        assert!(time < LIMIT, "not cut with {count} bytes");
    });

    // A byte now and then does not help.
    let begun = Instant::now();
    let mut socket = tls.server.socket();
    let mut sent = 0;
    while socket.write_all(&hello[sent..=sent]).is_ok() {
        sent += 1;
        assert!(begun.elapsed() < LIMIT, "not cut after {sent} bytes");
        thread::sleep(millis(50));
    }
    assert!(sent < hello.len());

    // All seats are free again.
    let seat = || Client::over_tls(tls.server.socket(), Arc::clone(&tls.config)).ok();
    let mut clients: Vec<_> = (0..5).map(|_| eventually("a seat", seat).0).collect();
    // And a connection that is through with the handshake is not cut.
    clients[0].expect_silence(millis(1200));
    for client in &mut clients {
        client.check("ping", "_", "_", "ok");
    }
}

/// That the server does not start and says why.
#[track_caller]
fn refused(args: &[String], parts: &[&str]) {
    run(command(args)).expect(1).complains(parts);
}

#[test]
fn unusable_files_are_named() {
    let dir = Dir::new();
    let (pair, other) = (Pair::new(), Pair::new());
    let [cert, key] = pair.flags(&dir);
    let other_key = dir.write("other.pem", &other.key);
    let garbage = dir.write("garbage.pem", "garbage");
    let missing = dir.name("missing.pem");
    refused(std::slice::from_ref(&cert), &["configuration error: ", "--tls-cert", "--tls-key"]);
    refused(std::slice::from_ref(&key), &["configuration error: ", "--tls-cert", "--tls-key"]);
    refused(&[cert.clone(), format!("--tls-key={other_key}")], &[&other_key]);
    for file in [garbage, missing] {
        refused(&[cert.clone(), format!("--tls-key={file}")], &[&file]);
        refused(&[format!("--tls-cert={file}"), key.clone()], &[&file]);
    }
}

#[test]
fn large_values_and_pushes() {
    let tls = TlsServer::start(&[]);
    let (mut writer, mut listener) = (tls.connect(), tls.connect());
    let value = "v".repeat(65_533);
    writer.check("kset", "k", &value, "ok");
    writer.check("kget", "k", "", &format!("ok {value}"));
    listener.check("listen", "ch", "", "ok");
    let payload = "p".repeat(65_536 - 5 - 2);
    for _ in 0..50 {
        writer.check("signal", "ch", &payload, "ok 1");
        assert_eq!(listener.line(), format!("sig ch {payload}"));
    }
    // Many answers at once, of which the client reads none before it has sent everything.
    let requests = "kget\nk\n\n".repeat(100);
    writer.send(requests);
    for number in 0..100 {
        assert_eq!(writer.line().len(), value.len() + 3, "answer {number}");
    }
    // And a request in many small records.
    for byte in "ping\n_\n_\n".bytes() {
        listener.send([byte]);
    }
    assert_eq!(listener.line(), "ok");
}

#[test]
fn many_connections() {
    let tls = TlsServer::start(&["--max-locks", "1000"]);
    let mut clients: Vec<_> = (0..200).map(|_| tls.connect()).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        client.begin("l", &format!("k{number}"), "0 600");
    }
    for client in &mut clients {
        dflockd_testkit::granted(&client.line());
    }
    let mut witness = tls.connect();
    let stats = witness.stats();
    assert_eq!(stats["connections"], 201);
    assert_eq!(stats["locks"].as_array().unwrap().len(), 200);
    drop(clients);
    eventually("all are gone", || {
        let stats = witness.stats();
        stats["connections"] == 1 && stats["locks"].as_array().unwrap().is_empty()
    });
}
