//! Replays the corpus of the fuzz targets, without a fuzzer. `fuzz/README.md` says how it grows.
//!
//! ```text
//! DFLOCKD_SEEDS=1 cargo test -p dflockd --test corpus      writes the seeds anew
//! DFLOCKD_FUZZ_S=60 cargo test -p dflockd --test corpus    changes inputs for a minute each
//! ```

#![expect(unreachable_pub, reason = "public in the fuzz crate")]

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[path = "../../../fuzz/src/apply.rs"]
mod apply;
#[path = "../../../fuzz/src/entry.rs"]
mod entry;
#[path = "../../../fuzz/src/grpc.rs"]
mod grpc;
#[path = "../../../fuzz/src/http.rs"]
mod http;
#[path = "../../../fuzz/src/line.rs"]
mod line;
#[path = "../../../fuzz/src/pattern.rs"]
mod pattern;
#[path = "../../../fuzz/src/peer.rs"]
mod peer;
#[path = "../../../fuzz/src/request.rs"]
mod request;
#[path = "../../../fuzz/src/seeds.rs"]
mod seeds;
#[path = "../../../fuzz/src/snapshot.rs"]
mod snapshot;

const FILES_MAX: usize = 40;
const BYTES_MAX: usize = 200 * 1024 / 4;
/// Changed inputs of each corpus that are tried.
const ROUNDS: u64 = 2_000;

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

/// GUARANTEES 48: a subscription is told what its pattern matches, by an index whose form nobody can see.
#[test]
fn pattern() {
    replay("pattern", pattern::run);
    mutate("pattern", pattern::run);
}

/// GUARANTEES 48: members of HTTP requests have the limits of the line protocol.
#[test]
fn http() {
    replay("http", http::run);
    mutate("http", http::run);
}

/// GUARANTEES 48: fields of gRPC messages have the limits of the line protocol.
#[test]
fn grpc() {
    replay("grpc", grpc::run);
    mutate("grpc", grpc::run);
}

/// A replay that could not fail would prove nothing: each comparison is given something wrong.
#[test]
fn canary() {
    let panics = |check: &dyn Fn()| catch_unwind(AssertUnwindSafe(check)).is_err();
    for target in
        ["line", "request", "apply", "snapshot", "peer", "entry", "pattern", "http", "grpc"]
    {
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

    pattern::check_match(b"a.*", b"a.b", true);
    pattern::check_match(b"a/*", b"a/b", true);
    assert!(panics(&|| pattern::check_match(b"a/*", b"a/b/c", true)));
    assert!(panics(&|| pattern::check_match(b"a/*", b"a.b", true)));
    assert!(panics(&|| pattern::check_match(b"a.*", b"a.b", false)));
    assert!(panics(&|| pattern::check_match(b"a.>", b"a", true)));

    http::check_same(b"v", b"v");
    assert!(panics(&|| http::check_same(b"v", b"w")));
    let body = serde_json::json!({ "token": "a secret of mine" });
    let text = body.to_string();
    http::check_secrets(&body, "the body is no JSON", text.as_bytes());
    let detail = "unknown variant `a secret of mine`";
    assert!(panics(&|| http::check_secrets(&body, detail, text.as_bytes())));

    // Seeds that are no messages would check nothing.
    for (name, data) in corpus("grpc").iter().filter(|(name, _)| name.starts_with("seed")) {
        assert!(grpc::read(usize::from(data[0]), &data[1..]), "{name} is no message");
    }
    let [one, other] = ["a", "b"].map(|key| dflockd_wire::grpc::GetRequest { key: key.into() });
    grpc::check_same(&one, &one);
    assert!(panics(&|| grpc::check_same(&one, &other)));
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

/// Runs what becomes of the corpus when bytes of it are changed, doubled, left out and mixed: the same each time, or
/// for as long as `DFLOCKD_FUZZ_S` says, where there is no fuzzer.
fn mutate(target: &str, run: impl Fn(&[u8])) {
    let seconds = std::env::var("DFLOCKD_FUZZ_S").ok().and_then(|text| text.parse().ok());
    let until = seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let inputs = corpus(target);
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let mut rounds = 0_u64;
    while until.map_or(rounds < ROUNDS, |until| Instant::now() < until) {
        let mut data = inputs[random.below(inputs.len())].1.clone();
        for _ in 0..=random.below(4) {
            change(&mut data, &inputs[random.below(inputs.len())].1, &mut random);
        }
        let failed = catch_unwind(AssertUnwindSafe(|| run(&data))).is_err();
        assert!(!failed, "{target} fails in round {rounds}: {:?}", data.escape_ascii().to_string());
        rounds += 1;
    }
    if seconds.is_some() {
        eprintln!("{target}: {rounds} rounds");
    }
}

/// One change of an input, with another one to take from.
fn change(data: &mut Vec<u8>, other: &[u8], random: &mut Random) {
    // Bytes that mean something to one of the targets.
    const WORDS: &[u8] = b"\0\x01\x7f\x80\xff\n\r\t .*>/%{}[]\":,019aF-";
    let place = random.below(data.len() + 1);
    let length = random.below(data.len() - place + 1);
    match random.below(6) {
        0 if !data.is_empty() => {
            let place = place.min(data.len() - 1);
            data[place] ^= 1 << random.below(8);
        }
        1 => data.insert(place, WORDS[random.below(WORDS.len())]),
        2 => drop(data.drain(place..place + length)),
        3 => {
            let part = data[place..place + length].to_vec();
            data.splice(place..place, part);
        }
        4 => {
            let (begin, end) = (random.below(other.len() + 1), random.below(other.len() + 1));
            let part = other[begin.min(end)..begin.max(end)].to_vec();
            data.splice(place..place + length, part);
        }
        _ => data.truncate(place),
    }
    data.truncate(BYTES_MAX);
}

/// Knuth's MMIX generator.
struct Random(u64);

impl Random {
    /// A number below `bound`.
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
        let high = usize::try_from(self.0 >> 33).expect("31 bits fit");
        high % bound.max(1)
    }
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
