//! The program against the server that decides nothing.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn bench(words: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dflockd-bench"));
    command.args(words.split(' '));
    command
}

#[test]
fn load_goes_to_both_floors() {
    let [epoll, tokio] = ["epoll", "tokio"].map(|shell| {
        let mut command = bench(&format!("echo --port 0 --shell {shell}"));
        let mut server = Ended(command.stdout(Stdio::piped()).spawn().unwrap());
        let mut line = String::new();
        BufReader::new(server.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
        (server, line.trim().strip_prefix("listening on ").unwrap().to_owned())
    });
    let words = format!(
        "--target echo --servers {} --compare echo={},name=tokio --workload w5 --seconds 0.2 --warmup 0 --json",
        epoll.1, tokio.1
    );
    let ran = bench(&words).output().unwrap();
    assert!(ran.status.success(), "{}", String::from_utf8_lossy(&ran.stderr));
    let races: serde_json::Value = serde_json::from_slice(&ran.stdout).unwrap();
    for side in races[0]["sides"].as_array().unwrap() {
        assert!(side["rounds"][0]["ops"].as_u64().unwrap() > 0, "{side}");
    }
}
