//! Many command lines, one lock.

use dflockd_testkit::Dir;

use crate::command::Server;

#[test]
fn two_never_overlap() {
    let (server, dir) = (Server::start(&[]), Dir::new());
    let log = dir.name("log");
    let script = format!("echo begin $$ >> {log}; sleep 0.02; echo end $$ >> {log}");
    let runs: Vec<_> = (0..8)
        .map(|_| server.ctl(&["lock", "k", "--wait", "60s", "--", "sh", "-c", &script]).spawn())
        .collect();
    for run in runs {
        run.end().expect(0);
    }
    let log = dir.read("log");
    let lines: Vec<&str> = log.lines().collect();
    assert_eq!(lines.len(), 16);
    for pair in lines.chunks(2) {
        let begun = pair[0].strip_prefix("begin ").expect("nobody begins before the end");
        assert_eq!(pair[1].strip_prefix("end "), Some(begun));
    }
}
