//! Replays the corpus of the fuzz target that is about this library. `fuzz/README.md` says how it grows.
//!
//! ```text
//! DFLOCKD_SEEDS=1 cargo test -p dflockd-client --test corpus      writes the seeds anew
//! ```

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use dflockd_wire::{Op, Response};

#[path = "../../../fuzz/src/reply.rs"]
#[expect(unreachable_pub, reason = "public in the fuzz crate")]
mod reply;

const FILES_MAX: usize = 40;
const BYTES_MAX: usize = 50 * 1024;

/// GUARANTEES 48: whatever a server answers, a client neither panics nor believes to hold what nobody granted.
#[test]
fn reply() {
    if std::env::var_os("DFLOCKD_SEEDS").is_some() {
        fs::create_dir_all(directory()).expect("a corpus can be made");
        for (name, data) in reply::seeds() {
            fs::write(directory().join(name), data).expect("a seed can be written");
        }
    }
    let mut inputs = Vec::new();
    for entry in fs::read_dir(directory()).expect("the target has a corpus") {
        let entry = entry.expect("a corpus can be listed");
        inputs.push((entry.file_name(), fs::read(entry.path()).expect("an input can be read")));
    }
    inputs.sort();
    assert!((reply::seeds().len()..=FILES_MAX).contains(&inputs.len()), "{} files", inputs.len());
    assert!(inputs.iter().map(|(_, data)| data.len()).sum::<usize>() <= BYTES_MAX);
    let fails = |data: &[u8]| catch_unwind(AssertUnwindSafe(|| reply::run(data))).is_err();
    let failed: Vec<_> = inputs.iter().filter(|(_, data)| fails(data)).collect();
    let names: Vec<_> = failed.iter().map(|(name, _)| name).collect();
    assert!(names.is_empty(), "these of fuzz/corpus/reply fail: {names:?}");
}

/// A replay that could not fail would prove nothing.
#[test]
fn canary() {
    let said = vec![(b"get".to_vec(), b"ok 7".to_vec())];
    reply::check_told(&said, Op::Get, |response| *response == Response::Number(7));
    let wrong = || reply::check_told(&said, Op::Get, |response| *response == Response::Number(8));
    assert!(catch_unwind(AssertUnwindSafe(wrong)).is_err());
    let other = || reply::check_told(&said, Op::Kget, |_| true);
    assert!(catch_unwind(AssertUnwindSafe(other)).is_err());
}

fn directory() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/reply")
}
