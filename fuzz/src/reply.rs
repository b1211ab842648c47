//! What a client believes: a real client talks to a server that answers whatever the input says, pushes and garbage in
//! between. Nothing makes it panic, and what it tells its user is what the answer said: a lock is held only after a
//! well-formed grant, with the fence and the lease of that grant.
//!
//! Input: a byte, and lines. If the byte is odd the first line answers the greeting, else the greeting is accepted.
//! Each following line answers one request; those that begin with `!` are sent as they are, before the answer. After
//! the last one the server hangs up.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Once, PoisonError};
use std::time::Duration;

use dflockd_client::{Client, OnDisconnect};
use dflockd_wire::{Op, Response, Unit, split_number};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// More than any seed has, so that a large input does not become slow.
const LINES_MAX: usize = 40;
/// Answers come at once or never.
const PATIENCE: Duration = Duration::from_millis(40);
const GREETING: &[u8] = b"ok mux ms fence lost lease-status";

thread_local! {
    /// Panics of this thread: those of a task go no further than the runtime.
    static PANICS: Cell<u32> = const { Cell::new(0) };
}

/// What the server has said, by command.
type Said = Arc<Mutex<Vec<(Vec<u8>, Vec<u8>)>>>;

/// Lets a client do one of everything against a server that says what the input wants.
pub fn run(data: &[u8]) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.with(|panics| panics.set(panics.get() + 1));
            before(panic);
        }));
    });
    let panics = PANICS.with(Cell::get);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime can be made").block_on(converse(data));
    assert_eq!(PANICS.with(Cell::get), panics, "a task of the client has panicked");
}

async fn converse(data: &[u8]) {
    let Some((flags, script)) = data.split_first() else { return };
    let mut script: VecDeque<Vec<u8>> =
        script.split(|byte| *byte == b'\n').take(LINES_MAX).map(<[u8]>::to_vec).collect();
    if flags & 1 == 0 {
        script.push_front(GREETING.to_vec());
    }
    let said = Said::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port can be had");
    let address = listener.local_addr().expect("it has an address").to_string();
    let server = tokio::spawn(serve(listener, script, Arc::clone(&said)));
    let client = Client::builder()
        .server(address)
        .on_disconnect(OnDisconnect::Release)
        .connect_timeout(PATIENCE)
        .request_timeout(PATIENCE)
        .connect();
    if let Ok(client) = client.await {
        ask_everything(&client, &said).await;
    }
    server.abort();
}

/// Answers requests with the lines of the script, over one connection after the other.
async fn serve(listener: TcpListener, mut script: VecDeque<Vec<u8>>, said: Said) {
    while !script.is_empty() {
        let Ok((stream, _)) = listener.accept().await else { return };
        // The end of a connection is none of the server's.
        let _ = serve_one(stream, &mut script, &said).await;
    }
}

async fn serve_one(
    stream: TcpStream,
    script: &mut VecDeque<Vec<u8>>,
    said: &Said,
) -> std::io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    loop {
        let mut lines = [Vec::new(), Vec::new(), Vec::new()];
        for line in &mut lines {
            if reader.read_until(b'\n', line).await? == 0 {
                return Ok(());
            }
        }
        let command = lines[0].trim_ascii_end();
        let (number, command) = split_number(command)
            .map_or((None, command), |(number, command)| (Some(number), command));
        let mut output = Vec::new();
        while let Some(raw) = script.front().and_then(|line| line.strip_prefix(b"!")) {
            output.extend_from_slice(raw);
            output.push(b'\n');
            script.pop_front();
        }
        let answer = script.pop_front();
        if let Some(answer) = &answer {
            if let Some(number) = number {
                output.extend_from_slice(format!("{number} ").as_bytes());
            }
            output.extend_from_slice(answer);
            output.push(b'\n');
            let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
            said.push((command.to_vec(), answer.clone()));
        }
        writer.write_all(&output).await?;
        if answer.is_none() {
            return Ok(());
        }
    }
}

/// Asks for one of everything. What comes back is compared with what was said; that nothing comes back is no fault.
async fn ask_everything(client: &Client, said: &Said) {
    if let Ok(value) = client.counter("counter").get().await {
        check(said, Op::Get, |response| *response == Response::Number(value));
    }
    if let Ok(value) = client.kv("entry").get().await {
        check(said, Op::Kget, |response| match &value {
            Some(value) => *response == Response::Value(value),
            None => *response == Response::Nil,
        });
    }
    if let Ok(items) = client.list("list").range(0, -1).await {
        check(said, Op::Lrange, |response| {
            let Response::Value(text) = response else { return false };
            serde_json::from_slice::<Vec<String>>(text).is_ok_and(|told| told == items)
        });
    }
    if let Ok(item) = client.list("list").pop_left().await {
        check(said, Op::Lpop, |response| match &item {
            Some(item) => *response == Response::Value(item),
            None => *response == Response::Nil,
        });
    }
    if let Ok(changed) = client.kv("entry").compare_and_set(None, b"new", None).await {
        let expected = if changed { Response::Ok } else { Response::CasConflict };
        check(said, Op::Kcas, |response| *response == expected);
    }
    if let Ok(held) = client.lock("lock").try_acquire().await {
        check(said, Op::L, |response| match (&held, response) {
            (Some(guard), Response::Granted { token, lease, .. }) => {
                guard.fence() == token.fence.0
                    && guard.token() == &*token.text()
                    && guard.lease() <= Duration::from(*lease)
            }
            (None, Response::Timeout) => true,
            _ => false,
        });
    }
    if client.stats().await.is_ok() {
        check(said, Op::Stats, |response| {
            let Response::Value(text) = response else { return false };
            serde_json::from_slice::<serde_json::Value>(text).is_ok()
        });
    }
}

/// Panics if none of the answers to `op` is what the client's user was told.
fn check(said: &Said, op: Op, fits: impl Fn(&Response<'_>) -> bool) {
    let said = said.lock().unwrap_or_else(PoisonError::into_inner);
    check_told(&said, op, fits);
}

/// Panics if none of the answers to `op` in a list of commands and answers is what the client's user was told.
pub fn check_told(said: &[(Vec<u8>, Vec<u8>)], op: Op, fits: impl Fn(&Response<'_>) -> bool) {
    let mut answers = said.iter().filter(|(command, _)| command == op.name().as_bytes());
    let known = answers.any(|(_, line)| {
        [Unit::Seconds, Unit::Millis]
            .iter()
            .any(|unit| Response::parse(op, line, *unit).is_some_and(|response| fits(&response)))
    });
    assert!(known, "{op:?}: nobody said what the client believes");
}

/// The inputs that fuzzing begins with.
pub fn seeds() -> Vec<(String, Vec<u8>)> {
    const TOKEN: &str = "00000000000000ff0123456789abcdef";
    let good = format!(
        "ok 7\nok value\nok [\"a\",\"b\"]\nok item\nok\nok {TOKEN} 30000 255\nok {{\"connections\":1}}\nok\n"
    );
    let empty = "ok 0\nnil\nok []\nnil\ncas_conflict\ntimeout\nok {}\n";
    let errors = "error\nerror_max_keys\nerror_unknown\nerror_draining\nerror_not_leader 10.0.0.1:1\n\
                  error_max_locks\nerror_new_word\n";
    let pushes = format!(
        "!sig a b\n!watch kset k\n!lost lock 255 expired\nok 7\n!leader elected k\nok v\n!7 ok 9\n\
         ok []\n!0 error\nnil\n!detached\nok\n!lost lock 255 forced\nok {TOKEN} 30000 255\nok {{}}\n"
    );
    let wrong =
        format!("ok -\nok\nok [1,2]\nok \nok ok\nok {} 30000 1\nok {{\n", TOKEN.replace('f', "F"));
    let leases = format!("ok 7\nok v\nok []\nnil\nok\nok {TOKEN} 0 255\nok {{}}\n");
    let long = format!("ok 7\nok v\nok []\nnil\nok\nok {TOKEN} 18446744073709551615 7\nok {{}}\n");
    let garbage = "!\u{0}\u{1}\n!-1 ok\n!99999999999999999999 ok 7\n! \nok 7\n!ok 7\nok v\n";
    let old = format!("error\nok 7\nok v\nok []\nnil\nok\nok {TOKEN} 30\nok {{}}\n");
    let other = "ok mux\nok 7\nok v\n";
    [
        ("good", 0, good),
        ("empty", 0, empty.into()),
        ("errors", 0, errors.into()),
        ("pushes", 0, pushes),
        ("wrong", 0, wrong),
        ("leases", 0, leases),
        ("long-lease", 0, long),
        ("garbage", 0, garbage.into()),
        ("old-server", 1, old),
        ("other-words", 1, other.into()),
        ("hangs-up", 0, String::new()),
    ]
    .into_iter()
    .map(|(name, flags, script)| (format!("seed-{name}"), [&[flags], script.as_bytes()].concat()))
    .collect()
}
