//! The inputs that fuzzing begins with: one of everything, so that the fuzzer need not guess a command's
//! name or the form of a snapshot. `DFLOCKD_SEEDS=1 cargo test -p dflockd --test corpus` writes them.

use dflockd_core::Timestamp;
use dflockd_replica::codec::{Batch, Frame, begin_payload, put_batch};
use dflockd_replica::types::Incarnation;
use dflockd_wire::{ERROR_CODES, OPS};

use crate::apply;
use crate::grpc::KINDS;

// Every byte form of replicated mode, as the tests of the engine keep them.
const ITEMS: &str = include_str!("../../crates/dflockd-replica/tests/golden/items.txt");
const PAYLOADS: &str = include_str!("../../crates/dflockd-replica/tests/golden/payloads.txt");
const FRAMES: &str = include_str!("../../crates/dflockd-replica/tests/golden/frames.txt");

/// The seeds of `target`, with the names of their files.
pub fn of(target: &str) -> Vec<(String, Vec<u8>)> {
    match target {
        "line" => line(),
        "request" => request(),
        "apply" => apply_inputs(),
        "snapshot" => snapshot(),
        "peer" => peer(),
        "entry" => entry(),
        "pattern" => pattern(),
        "http" => http(),
        "grpc" => grpc(),
        _ => panic!("no target {target}"),
    }
}

fn line() -> Vec<(String, Vec<u8>)> {
    let frames = b"l\nk\n0\nr\r\nk\r\nT\r\nkset\nk\na\rb\n".to_vec();
    let numbered = b"7 l\nk\n0\n0 l\nk\n0\n9223372036854775808 l\nk\n0\nx\n\n\n".to_vec();
    let switch = b"hello\nme\nmux\n1 ping\n_\n\n2 stats\n_\n\n".to_vec();
    let long_key = [b"l\n", &[b'x'; 300][..], b"\nping\n_\n\n"].concat();
    let long_value = [b"rpush\nk\n", &[b'x'; 1_000][..], b"\nkcas\nk\n", &[b'y'; 2_030], b"\n"];
    let long_command = [&b"1 "[..], &[b'x'; 280], b"\n"].concat();
    let unfinished = [&b"5 auth\nk\n"[..], &[b't'; 700]].concat();
    [
        ("frames", 0, frames),
        ("numbered", 1, numbered),
        ("switch", 2, switch),
        ("long-key", 4, long_key),
        ("long-value", 12, long_value.concat()),
        ("long-command", 1, long_command),
        ("unfinished", 1, unfinished),
    ]
    .into_iter()
    .map(|(name, flags, stream)| {
        (format!("seed-{name}"), [&[flags, 3, 0, 6, 200], &stream[..]].concat())
    })
    .collect()
}

/// Every command with arguments that fit, and every answer.
fn request() -> Vec<(String, Vec<u8>)> {
    const TOKEN: &str = "00000000000000ff0123456789abcdef";
    let mut seeds = Vec::new();
    for (index, specs) in OPS.chunks(8).enumerate() {
        let mut input = String::new();
        for (number, spec) in (1..).zip(specs) {
            // What the usage names, in the order that no name is part of a later one.
            let arg = spec
                .arg
                .replace("TAB", "\t")
                .replace("<admin token>", "secret")
                .replace("<token>", TOKEN)
                .replace("<timeout>", "10")
                .replace("<lease>", "30")
                .replace("<ttl>", "5")
                .replace("<limit>", "3")
                .replace("<count>", "2")
                .replace("<fence>", "255")
                .replace("lock|sem", "lock")
                .replace("<old>", "x")
                .replace("<new>", "yy")
                .replace("<value>", "12")
                .replace("<delta>", "-12")
                .replace("<start>", "0")
                .replace("<stop>", "-1")
                .replace("<n>", "7")
                .replace(['[', ']', '<', '>'], "");
            let key = if spec.key.contains("session") { "12" } else { "a.b" };
            input += &format!("{}\n{key}\n{arg}\n", spec.name);
            input += &format!("{number} {}\n{key}\n{arg}\n", spec.name);
        }
        seeds.push((format!("seed-ops-{index}"), input.into_bytes()));
    }
    let answers = format!(
        "ok\nok {TOKEN} 30\nok {TOKEN} 30 255\nacquired {TOKEN} 0\nqueued\ntimeout\nnil\n\
         cas_conflict\nok -12\nok some value\r\nerror_not_leader 10.0.0.1:6388\n7 ok 33 255\n"
    );
    seeds.push(("seed-answers".into(), answers.into_bytes()));
    let pushes = "sig a.b pay load\nwatch kset a.b\nleader failover a\nlost a 255 expired\n";
    seeds.push(("seed-pushes".into(), pushes.as_bytes().to_vec()));
    let errors: String = ERROR_CODES.iter().map(|spec| format!("{}\n", spec.code.text())).collect();
    seeds.push(("seed-errors".into(), errors.into_bytes()));
    seeds
}

/// Noise that meets all commands, after quiet settings and after settings that are noise, too.
fn apply_inputs() -> Vec<(String, Vec<u8>)> {
    const SETTINGS: usize = 18;
    let mut seeds = Vec::new();
    for index in 0..12_u64 {
        let mut state = index + 1;
        let mut input: Vec<u8> = (0..300 + 60 * index)
            .map(|_| {
                // Knuth's MMIX generator; its high bits are good enough.
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_041);
                state.to_be_bytes()[0]
            })
            .collect();
        if index % 3 == 0 {
            input[..SETTINGS].fill(0);
        }
        // The clients' results are kept, or not.
        input[SETTINGS - 1] = if index % 2 == 0 { 0b11110 } else { 0b00110 };
        seeds.push((format!("seed-noise-{index}"), input));
    }
    seeds
}

/// The last of the snapshots on the way through each seed of `apply`, and an early one.
fn snapshot() -> Vec<(String, Vec<u8>)> {
    let mut seeds = Vec::new();
    for (name, input) in apply_inputs() {
        let snapshots = apply::snapshots(&input);
        for (when, snapshot) in [("early", snapshots.first()), ("late", snapshots.last())] {
            if let Some(snapshot) = snapshot {
                seeds.push((format!("{name}-{when}"), snapshot.clone()));
            }
        }
    }
    seeds
}

/// Every frame, and every item in one more.
fn peer() -> Vec<(String, Vec<u8>)> {
    let mut seeds = golden(FRAMES);
    let items = golden(ITEMS);
    let count = u16::try_from(items.len()).expect("there are not so many items");
    let bytes = items.into_iter().flat_map(|(_, item)| item).collect::<Vec<_>>().into();
    let batch = Batch { run: Incarnation(1 << 20 | 7), first_seq: 9, count, bytes };
    seeds.push(("seed-items".into(), Frame::Forward(batch).encode().to_vec()));
    seeds
}

/// Every order and change of the membership, and the items in batches.
fn entry() -> Vec<(String, Vec<u8>)> {
    let mut seeds = golden(PAYLOADS);
    for (index, items) in golden(ITEMS).chunks(8).enumerate() {
        let mut payload = Vec::new();
        begin_payload(&mut payload, 1, Timestamp(1_000));
        for batch in items.chunks(5) {
            let count = u16::try_from(batch.len()).expect("five at most");
            let bytes: Vec<u8> = batch.iter().flat_map(|(_, item)| item.clone()).collect();
            put_batch(&mut payload, Incarnation(1 << 20 | 7), 9, count, &bytes);
        }
        seeds.push((format!("seed-items-{index}"), payload));
    }
    seeds
}

/// Patterns of each form, with subjects that they match and that they do not.
fn pattern() -> Vec<(String, Vec<u8>)> {
    // The first character says what becomes of a line: 0 to subscribe, 2 to leave, 3 to publish; higher ones are
    // other sessions.
    let tokens = |count: usize| vec!["*"; count].join(".");
    [
        ("plain", "0a.b\n4a.b\n3a.b\n3a\n2a.b\n3a.b".to_owned()),
        ("star", "0a.*\n4*.b\n8*\n3a.b\n3a.c\n3a\n3a.b.c".to_owned()),
        ("rest", "0a.>\n4>\n3a\n3a.b\n3a.b.c\n2a.>\n3a.b".to_owned()),
        ("both", "0a.*.>\n4*.*.>\n8a.*.c\n3a.b.c\n3a.b.c.d\n3a..c".to_owned()),
        ("empty-tokens", "0.\n4..\n8a..b\n<.*\n3.\n3..\n3a..b".to_owned()),
        ("not-valid", "0a*\n4>.a\n8**\n<a.>b\n3a*\n3>.a".to_owned()),
        ("slashes", "0a/*\n4a/>\n8a/b.*\n3a/b\n3a/b.c\n3a/b/c\n3a.b".to_owned()),
        ("sixteen", format!("0{0}\n40.{0}\n3{0}\n2{0}\n3{0}", tokens(16))),
        ("seventeen", format!("0{0}\n3{0}\n2{0}\n3{0}", tokens(17))),
        ("many", format!("0{}\n4{}.>\n3{}", tokens(127), tokens(126), tokens(127))),
        ("again", "0a.*\n0a.*\n2a.*\n3a.b\n2a.*\n0a.*\n3a.b".to_owned()),
    ]
    .into_iter()
    .map(|(name, lines)| (format!("seed-{name}"), lines.into_bytes()))
    .collect()
}

/// Paths, texts, times and bodies, legal ones and others.
fn http() -> Vec<(String, Vec<u8>)> {
    const TOKEN: &str = "00000000000000ff0123456789abcdef";
    let deep = format!("{{\"token\":{}{}", "[".repeat(200), "]".repeat(200));
    [
        ("keys", "jobs%2Fnightly\na.b\n%00%ff\n%\n%zz\n%20\n%0A\n+".to_owned()),
        ("long-key", format!("{}\n{}", "k".repeat(256), "%6b".repeat(257))),
        ("tokens", format!("{TOKEN}\n{}\n{TOKEN}0\n \n{}", &TOKEN[1..], "z".repeat(256))),
        ("patterns", "a.*\na.>\n>\n>.a\na*\na/*\n*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*.*".to_owned()),
        ("values", "v\nv w\n \nv\tw\nv\rw\n\u{e9}\u{0}".to_owned()),
        (
            "numbers",
            "0\n007\n9223372036\n9223372036000\n18446744073709551615\n+1\n-1\n1e3".to_owned(),
        ),
        ("reasons", format!("because\n b \n\u{1b}[31m\n\u{85}\n{}", "r".repeat(257))),
        (
            "body",
            "{\"token\":\"t\",\"value\":\"v\",\"lease_ttl_ms\":1,\"delta\":-1,\"keep\":true}"
                .to_owned(),
        ),
        (
            "body-wrong",
            "{\"token\":\"a secret of mine\",\"delta\":1.5}\n[\"a secret of mine\"]\n{\"token\":5}"
                .to_owned(),
        ),
        (
            "body-names",
            "{\"tokens\":\"a secret of mine\"}\n{}\n{\"token\":\"t\",\"token\":\"u\"}\nnull"
                .to_owned(),
        ),
        (
            "body-choice",
            "{\"token\":\"t\",\"keep\":\"a secret of mine\"}\n{\"token\":\"t\"} {}".to_owned(),
        ),
        ("body-deep", deep),
    ]
    .into_iter()
    .map(|(name, lines)| (format!("seed-{name}"), lines.into_bytes()))
    .collect()
}

/// A message of each kind: its fields, as protobuf writes them.
fn grpc() -> Vec<(String, Vec<u8>)> {
    let text = |field: u8, bytes: &[u8]| {
        let length = u8::try_from(bytes.len()).expect("seeds are short");
        [&[field << 3 | 2, length][..], bytes].concat()
    };
    let number = |field: u8, value: u8| vec![field << 3, value];
    let token = b"00000000000000ff0123456789abcdef";
    let message = |name: &str| match name {
        "acquire" => {
            [text(4, b"key"), number(5, 2), number(6, 3), number(7, 9), number(8, 30)].concat()
        }
        "release" | "renew" => [number(2, 7), text(4, b"key"), text(6, token)].concat(),
        "list" => [text(1, b"a"), number(3, 10)].concat(),
        "set" => [text(4, b"key"), text(5, b"value"), number(6, 60)].concat(),
        "push" => [text(4, b"key"), number(5, 1), text(6, b"item")].concat(),
        "publish" => [text(4, b"a.b"), text(5, b"payload")].concat(),
        "subscribe" => {
            let subscription = [text(1, b"a.*"), text(2, b" group ")].concat();
            [text(1, &subscription), text(2, &subscription)].concat()
        }
        "watch" => [text(1, b"a.>"), text(1, b"*"), number(2, 1)].concat(),
        "open" => [number(1, 60), text(2, b"billing-7")].concat(),
        "force-release" => [text(1, b"key"), number(3, 9), text(4, b"because")].concat(),
        "end-session" => [number(1, 9), text(2, b"because")].concat(),
        _ => panic!("no seed for {name}"),
    };
    let mut seeds = Vec::new();
    for (kind, (name, _)) in (0_u8..).zip(KINDS) {
        seeds.push((format!("seed-{name}"), [&[kind], &*message(name)].concat()));
    }
    seeds
}

/// The lines of a golden file: `name: hex`.
fn golden(text: &str) -> Vec<(String, Vec<u8>)> {
    let lines = text.lines().filter_map(|line| line.split_once(": "));
    let byte = |pair: &[u8]| {
        let pair = std::str::from_utf8(pair).expect("golden files are text");
        u8::from_str_radix(pair, 16).expect("golden bytes are hexadecimal")
    };
    lines
        .map(|(name, hex)| {
            let bytes = hex.as_bytes().chunks(2).map(byte).collect();
            (format!("seed-{}", name.to_lowercase()), bytes)
        })
        .collect()
}
