//! File descriptors: whoever uses them up keeps nobody else out, and does not end the server. And log lines: whoever
//! causes many of them neither fills a disk nor hides what operators do.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use dflockd_testkit::http::{Ask, Reply, Wire};
use dflockd_testkit::ports::connect_from;
use dflockd_testkit::process::{Reaper, limited};
use dflockd_testkit::{
    A_WHILE, Client, Dir, Heard, LIMIT, Server, command, eventually, fence, free_address, millis,
};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const SETTINGS: [u8; 9] = [0, 0, 0, 4, 0, 0, 0, 0, 0];

/// A server that may have so many files open.
fn start_with_limit(files: u64, flags: &[&str]) -> Server {
    Server::launch(limited(&format!("-n {files}"), flags))
}

/// The limit of a running server from now on.
fn set_limit(server: &Server, files: u64) {
    let pid = i32::try_from(server.pid()).unwrap();
    let limits = Some((files, rlimit::Resource::NOFILE.get_hard().unwrap()));
    rlimit::prlimit(pid, rlimit::Resource::NOFILE, limits, None).unwrap();
}

fn open_files(server: &Server) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", server.pid())).unwrap().count()
}

fn get(port: u16, path: &str) -> Reply {
    let ask = Ask::get(path).header("Authorization", &format!("Bearer {TOKEN}"));
    Wire::open((Ipv4Addr::LOCALHOST, port).into(), None).ask(&ask)
}

const TOKEN: &str = "the-token-of-the-clients";

/// GUARANTEES 48: strangers at one API use up its share of the descriptors, not those of the others.
#[test]
fn strangers_at_one_api_leave_room_at_the_others() {
    let (http, grpc) = (free_address().port(), free_address().port());
    let (http_flag, grpc_flag) = (http.to_string(), grpc.to_string());
    let flags = ["--http-port", &http_flag, "--grpc-port", &grpc_flag, "--auth-token", TOKEN];
    let mut server = start_with_limit(300, &flags);
    server.wait_for_output("msg=\"most connections\" open_files=300");
    server.wait_for_output("listening for gRPC");
    let mut strangers = Vec::new();
    for number in 0..400_u32 {
        let address = (Ipv4Addr::LOCALHOST, grpc).into();
        let mut socket = connect_from(2 + u8::try_from(number % 8).unwrap(), address);
        // The server may have closed it already.
        let _ = socket.write_all(PREFACE).and_then(|()| socket.write_all(&SETTINGS));
        strangers.push(socket);
    }
    server.wait_for_output("gRPC connection cap reached");
    for _ in 0..20 {
        let mut client = server.login(TOKEN);
        client.lock("k", "5");
    }
    assert_eq!(get(http, "/health").status, 200);
    let page = eventually("refusals are counted", || {
        let page = get(http, "/metrics");
        let refused = page.metric("dflockd_connections_refused_total{api=\"grpc\"}");
        (refused >= 200.0).then_some(page)
    });
    let max = page.metric("dflockd_connections_max{api=\"grpc\"}");
    assert!(page.metric("dflockd_open_connections{api=\"grpc\"}") <= max, "{page:?}");
    assert!(open_files(&server) < 300);
    assert!(!server.output().contains("accept failed"));
    // All places come back.
    drop(strangers);
    eventually("the strangers are gone", || {
        get(http, "/metrics").metric("dflockd_open_connections{api=\"grpc\"}") == 0.0
    });
    assert!(server.is_running());
}

/// GUARANTEES 48: the caps of HTTP and gRPC are exact, and a place is free again however its connection ended.
#[test]
fn http_and_grpc_have_caps() {
    let (http, grpc) = (free_address().port(), free_address().port());
    let (http_flag, grpc_flag) = (http.to_string(), grpc.to_string());
    let flags = ["--http-port", &http_flag, "--grpc-port", &grpc_flag];
    let caps = ["--http-max-connections", "3", "--grpc-max-connections", "3"];
    let server = Server::start(&[&flags[..], &caps].concat());
    server.wait_for_output("listening for gRPC");
    for port in [http, grpc] {
        let connect = || {
            let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
            socket.set_read_timeout(Some(millis(200))).unwrap();
            socket
        };
        let is_closed = |mut socket: &TcpStream| {
            let read = socket.read(&mut [0; 64]);
            matches!(read, Ok(0)) || read.is_err_and(|error| error.raw_os_error() == Some(104))
        };
        for round in 0..3 {
            let seated: Vec<_> = (0..3)
                .map(|_| {
                    eventually("a place", || {
                        let socket = connect();
                        (!is_closed(&socket)).then_some(socket)
                    })
                })
                .collect();
            for _ in 0..3 {
                assert!(is_closed(&connect()), "round {round} at {port}");
            }
            for (number, mut socket) in seated.into_iter().enumerate() {
                match number {
                    0 => drop(socket.write_all(b"no such protocol\r\n\r\n")),
                    1 => socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO)).unwrap(),
                    _ => {}
                }
            }
        }
    }
}

fn start_durable(dir: &str) -> Server {
    let flags = ["--raft-dir", dir, "--node-id", "a", "--raft-addr", "127.0.0.1:0"];
    let more = ["--cluster-bootstrap", "--snapshot-entries", "100", "--max-connections", "100"];
    Server::launch(command(&[&flags[..], &more].concat()))
}

/// A client of a server that leads: those who come earlier may have to come again.
fn ready_client(server: &Server, command: &str, arg: &str, answer: &str) -> Client {
    eventually("it leads", || {
        let mut client = server.connect();
        client.begin(command, "first", arg);
        (client.hear(LIMIT) == Heard::Line(answer.to_owned())).then_some(client)
    })
}

/// GUARANTEES 39, 48: a durable server without descriptors goes on with the files that it has open, waits when it needs
/// another one, goes on when there is one, and has all that it acknowledged.
#[test]
fn a_durable_server_outlives_exhausted_descriptors() {
    let dir = Dir::new();
    let mut server = start_durable(&dir.name("data"));
    let mut client = ready_client(&server, "kset", "1", "ok");
    let value = "v".repeat(60_000);
    let mut stored = 0;
    let set =
        |client: &mut Client, number: u32| client.begin("kset", &format!("k{number}"), &value);

    set_limit(&server, 3);
    let is_waiting = || server.output().contains("the log waits for a file descriptor");
    while !is_waiting() {
        set(&mut client, stored);
        let begun = Instant::now();
        while !is_waiting() {
            match client.hear(millis(20)) {
                Heard::Line(line) => {
                    assert_eq!(line, "ok");
                    stored += 1;
                    break;
                }
                Heard::Nothing => assert!(begun.elapsed() < LIMIT, "{}", server.output()),
                Heard::End => panic!("closed: {}", server.output()),
            }
        }
        assert!(stored < 2000, "the log needs no files");
    }
    server.wait_for_output("a snapshot waits for a file descriptor");
    assert!(stored > 200, "two segments were there, and {stored} values fitted");
    assert!(server.is_running(), "{}", server.output());

    set_limit(&server, 500);
    server.wait_for_output("the log has its file descriptor and goes on");
    let mut client = server.connect();
    for number in stored..stored + 300 {
        eventually("it goes on", || {
            set(&mut client, number);
            client.line() == "ok"
        });
    }
    assert!(server.is_running(), "{}", server.output());
    server.kill();
    let server = start_durable(&dir.name("data"));
    let mut client = ready_client(&server, "kget", "", "ok 1");
    for number in 0..stored + 300 {
        let answer = client.ask("kget", &format!("k{number}"), "");
        assert_eq!(answer, format!("ok {value}"), "k{number}");
    }
}

/// GUARANTEES 48: files are read again when there is a descriptor for them; a reload is not lost for want of one.
#[test]
fn a_reload_waits_for_descriptors() {
    let dir = Dir::new();
    let file = dir.write("token", "the-token-before-the-reload");
    let server = Server::start(&["--auth-token-file", &file]);
    dir.write("token", "the-token-behind-the-reload");
    set_limit(&server, 3);
    server.signal("HUP");
    std::thread::sleep(A_WHILE);
    assert!(!server.output().contains("reloaded"), "{}", server.output());
    set_limit(&server, 500);
    server.wait_for_output("msg=\"reloaded\"");
    assert!(!server.output().contains("not reloaded"), "{}", server.output());
    server.connect().check("auth", "_", "the-token-behind-the-reload", "ok");
}

/// GUARANTEES 48: a megabyte of nonsense is a few lines in the log, and how many were left out is told.
#[test]
fn nonsense_does_not_fill_the_log() {
    let server = Server::start::<&str>(&[]);
    let mut client = server.connect();
    let nonsense = "nonsense\nk\n\n".repeat(1000);
    for _ in 0..84 {
        client.send(&nonsense);
        for _ in 0..1000 {
            assert_eq!(client.line(), "error");
        }
    }
    server.wait_for_output("msg=\"parse error\"");
    server.wait_for_output("msg=\"log lines left out\" peer=127.0.0.1 kind=\"parse error\"");
    let output = server.output();
    assert!(output.len() < 10_000, "{} bytes", output.len());
}

/// GUARANTEES 48: what operators do is in the log whatever clients do to it, also if nobody reads the log for a while,
/// which nobody has to wait for.
#[test]
fn lines_about_operators_survive_a_flood() {
    let child = command(&["--port", "0", "--debug", "--admin-token", "operator"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut child = Reaper(child);
    let mut errors = child.0.stderr.take().unwrap();
    let mut log = Vec::new();
    let address: SocketAddr = loop {
        let mut bytes = [0; 256];
        let count = errors.read(&mut bytes).unwrap();
        log.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&log);
        if let Some((_, rest)) = text.split_once("msg=\"listening\" addr=")
            && let Some((address, _)) = rest.split_once(' ')
        {
            break address.parse().unwrap();
        }
    };
    // From here on nobody reads.
    let mut client = Client::over(TcpStream::connect(address).unwrap());
    let mut operator = Client::over(TcpStream::connect(address).unwrap());
    for number in 0..200 {
        let token = client.lock("k", "5");
        client.send("ping\n_\n_\n".repeat(200));
        for _ in 0..200 {
            assert_eq!(client.line(), "ok");
        }
        let arg = format!("operator lock {} reason-{number}.", fence(&token));
        operator.check("force-release", "k", &arg, "ok");
    }
    drop((client, operator));
    let status = Command::new("/bin/kill").arg(child.0.id().to_string()).status().unwrap();
    assert!(status.success());
    errors.read_to_end(&mut log).unwrap();
    let log = String::from_utf8(log).unwrap();
    assert!(log.contains("log lines were lost"), "the flood was too small");
    for number in 0..200 {
        assert!(log.contains(&format!("reason-{number}.")), "no line about deed {number}");
    }
}
