//! What the service manager sees.

use std::os::unix::net::UnixDatagram;

use dflockd_testkit::process::limited;
use dflockd_testkit::{A_WHILE, Dir, LIMIT, Server, command};

#[test]
fn readiness_and_the_end_are_told() {
    let dir = Dir::new();
    let manager = UnixDatagram::bind(dir.path("notify")).unwrap();
    let mut start = command::<&str>(&[]);
    start.env("NOTIFY_SOCKET", dir.path("notify"));
    let mut server = Server::launch(start);
    let told = |within| {
        let mut bytes = [0; 4096];
        manager.set_read_timeout(Some(within)).unwrap();
        let count = manager.recv(&mut bytes).ok()?;
        Some(String::from_utf8_lossy(&bytes[..count]).trim_end().to_owned())
    };
    assert_eq!(told(LIMIT).as_deref(), Some("READY=1"));
    server.connect().check("ping", "_", "_", "ok");
    let mut idle = server.connect();
    idle.check("ping", "_", "_", "ok");
    assert_eq!(told(A_WHILE), None);
    server.signal("TERM");
    // sd_notify(3): at the beginning of the shutdown, so while somebody is still there.
    let early = told(A_WHILE * 10);
    assert!(server.is_running());
    drop(idle);
    assert_eq!(server.wait_for_end().code(), Some(0));
    let late = told(A_WHILE);
    assert_eq!((early.as_deref(), late), (Some("STOPPING=1"), None));
}

#[test]
fn a_missing_manager_does_no_harm() {
    let dir = Dir::new();
    let mut start = command::<&str>(&[]);
    start.env("NOTIFY_SOCKET", dir.path("nobody"));
    let mut server = Server::launch(start);
    server.connect().check("ping", "_", "_", "ok");
    server.terminate();
}

#[test]
fn the_soft_limit_of_files_is_raised() {
    let server = Server::launch(limited::<&str>("-S -n 256", &[]));
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", server.pid())).unwrap();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files")).unwrap();
    let words: Vec<_> = line.split_whitespace().collect();
    assert_eq!(words[0], words[1], "soft and hard: {line}");
    let mut clients: Vec<_> = (0..300).map(|_| server.connect()).collect();
    for client in &mut clients {
        client.check("ping", "_", "_", "ok");
    }
}
