//! Replays the corpus of the fuzz targets, without a fuzzer. `fuzz/README.md` says how it grows.
//!
//! ```text
//! DFLOCKD_SEEDS=1 cargo test -p dflockd --test corpus      writes the seeds anew
//! ```

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

#[path = "../../../fuzz/src/apply.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod apply;
#[path = "../../../fuzz/src/entry.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod entry;
#[path = "../../../fuzz/src/line.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod line;
#[path = "../../../fuzz/src/peer.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod peer;
#[path = "../../../fuzz/src/request.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod request;
#[path = "../../../fuzz/src/seeds.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod seeds;
#[path = "../../../fuzz/src/snapshot.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod snapshot;

const FILES_MAX: usize = 40;
const BYTES_MAX: usize = 200 * 1024 / 4;

#[test]
fn line() {
    replay("line", line::run);
}

#[test]
fn request() {
    replay("request", request::run);
}

#[test]
fn apply() {
    replay("apply", apply::run);
}

#[test]
fn snapshot() {
    replay("snapshot", snapshot::run);
}

#[test]
fn peer() {
    replay("peer", peer::run);
}

#[test]
fn entry() {
    replay("entry", entry::run);
}

/// A replay that could not fail would prove nothing: each comparison is given something wrong.
#[test]
fn canary() {
    let panics = |check: &dyn Fn()| catch_unwind(AssertUnwindSafe(check)).is_err();
    for target in ["line", "request", "apply", "snapshot", "peer", "entry"] {
        assert!(panics(&|| replay(target, |data| assert!(data.len() < 8, "canary"))), "{target}");
    }

    let one = line::decode_plainly(b"l\nk\n0\n");
    let other = line::decode_plainly(b"l\nk\n1\n");
    line::check_same(&one, &one);
    assert!(panics(&|| line::check_same(&one, &other)));

    let ping = dflockd_wire::Request::Ping;
    request::check_same(&ping, &ping);
    assert!(panics(&|| request::check_same(&ping, &dflockd_wire::Request::Stats)));

    let inputs = corpus("apply");
    let plays: Vec<_> = inputs.iter().take(2).map(|(_, data)| apply::play(data)).collect();
    apply::check_same(&plays[0], &apply::play(&inputs[0].1));
    assert!(panics(&|| apply::check_same(&plays[0], &plays[1])));

    let snapshots = apply::snapshots(&inputs[0].1);
    snapshot::check_same(&snapshots[0]);
    assert!(panics(&|| snapshot::check_same(&snapshots[0][1..])));

    let frame = b"\x05\x01\0\0\0\0\0\0\0\x07\0\0\0\0\0\0\0";
    let again = peer::decode(frame).expect("an acknowledgement").encode();
    peer::check_same(frame, &again);
    assert!(panics(&|| peer::check_same(frame, &again[1..])));

    let payloads = [1, 2].map(|stamp| [1, stamp, 0, 0, 0, 0, 0, 0, 0]);
    let [one, other] = payloads.each_ref().map(|payload| entry::read(payload).expect("empty"));
    entry::check_same(&one, &one);
    assert!(panics(&|| entry::check_same(&one, &other)));
}

/// Runs every file of a corpus.
fn replay(target: &str, run: impl Fn(&[u8])) {
    if std::env::var_os("DFLOCKD_SEEDS").is_some() {
        write_seeds(target);
    }
    let inputs = corpus(target);
    let bytes: usize = inputs.iter().map(|(_, data)| data.len()).sum();
    assert!(inputs.len() <= FILES_MAX, "{} files in the corpus of {target}", inputs.len());
    assert!(bytes <= BYTES_MAX, "{bytes} bytes in the corpus of {target}");
    let fails = |data: &[u8]| catch_unwind(AssertUnwindSafe(|| run(data))).is_err();
    let failed: Vec<_> = inputs.iter().filter(|(_, data)| fails(data)).collect();
    let names: Vec<_> = failed.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "these of fuzz/corpus/{target} fail: {names:?}");
}

/// The files of a corpus with their names, in order.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let mut inputs = Vec::new();
    for entry in fs::read_dir(directory(target)).expect("every target has a corpus") {
        let entry = entry.expect("a corpus can be listed");
        let name = entry.file_name().into_string().expect("names are plain");
        inputs.push((name, fs::read(entry.path()).expect("an input can be read")));
    }
    assert!(!inputs.is_empty(), "the corpus of {target} is empty");
    inputs.sort();
    inputs
}

fn write_seeds(target: &str) {
    fs::create_dir_all(directory(target)).expect("a corpus can be made");
    for (name, data) in seeds::of(target) {
        fs::write(directory(target).join(name), data).expect("a seed can be written");
    }
}

fn directory(target: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target)
}
