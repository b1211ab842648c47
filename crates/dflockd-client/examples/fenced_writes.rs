//! A holder is paused past its lease and writes late: the storage refuses, because it knows fences.
//!
//! ```text
//! dflockd &
//! cargo run -p dflockd-client --example fenced_writes -- 127.0.0.1:6388
//! ```
//!
//! The storage is an HTTP service in this process that follows the header convention of
//! `dflockd_client::fencing::http`. The first holder is a second process of this program, so that it can be
//! stopped with SIGSTOP in the middle of its work.

#![expect(clippy::print_stdout, reason = "it is a demonstration")]

use std::collections::HashMap;
use std::error::Error;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use dflockd_client::fencing::{FenceGuard, MemoryFences, http};
use dflockd_client::{Client, Guard};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::process::Command;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const KEY: &str = "reports/today";
const LEASE: Duration = Duration::from_secs(1);

#[tokio::main]
async fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        [] => demonstrate("127.0.0.1:6388").await,
        [server] => demonstrate(server).await,
        [server, storage] => first_holder(server, storage).await,
        _ => Err("usage: fenced_writes [SERVER]".into()),
    }
}

/// Takes the lock, writes, is paused without knowing, and writes again.
async fn first_holder(server: &str, storage: &str) -> Outcome<()> {
    let client = Client::connect(server).await?;
    let guard = client.lock(KEY).lease(LEASE).acquire().await?;
    println!("first holder: fence {}", guard.fence());
    let status = write(storage, &guard, "by the first").await?;
    println!("first holder: wrote in time, status {status}");
    // The pause comes here, while it waits for a line.
    tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new())).await??;
    println!("first holder: valid after the pause: {}", guard.is_valid());
    // A program that does not look, or was stopped just after it looked, writes now.
    let status = write(storage, &guard, "late, by the first").await?;
    println!("first holder: wrote all the same, status {status}");
    Ok(())
}

async fn demonstrate(server: &str) -> Outcome<()> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let storage = listener.local_addr()?.to_string();
    let stored = Arc::<Storage>::default();
    tokio::spawn(serve(listener, Arc::clone(&stored)));

    let mut first = Command::new(std::env::current_exe()?)
        .args([server, &storage])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let pid = first.id().ok_or("it has ended")?.to_string();
    let mut lines = BufReader::new(first.stdout.take().ok_or("piped")?).lines();
    for _ in 0..2 {
        println!("{}", lines.next_line().await?.ok_or("the first holder has ended")?);
    }

    signal("-STOP", &pid).await?;
    println!("first holder: stopped");
    let client = Client::connect(server).await?;
    let guard = client.lock(KEY).acquire().await?;
    println!("second holder: fence {}", guard.fence());
    let status = write(&storage, &guard, "by the second").await?;
    println!("second holder: wrote, status {status}");

    first.stdin.take().ok_or("piped")?.write_all(b"go on\n").await?;
    signal("-CONT", &pid).await?;
    while let Some(line) = lines.next_line().await? {
        println!("{line}");
    }
    first.wait().await?;
    let values = stored.values.lock().expect("nobody panics with it");
    println!("stored: {}", values.get(KEY).map_or("nothing", String::as_str));
    Ok(())
}

async fn signal(name: &str, pid: &str) -> Outcome<()> {
    Command::new("kill").args([name, pid]).status().await?;
    Ok(())
}

/// Writes with the lock and its fence in the headers; returns the status.
async fn write(storage: &str, guard: &Guard, value: &str) -> Outcome<u16> {
    let mut stream = TcpStream::connect(storage).await?;
    let (fence, length) = (guard.fence(), value.len());
    let request = format!(
        "PUT /{KEY} HTTP/1.0\r\n{}: {KEY}\r\n{}: {fence}\r\nContent-Length: {length}\r\n\r\n{value}",
        http::KEY,
        http::FENCE,
    );
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    let status = answer.split(' ').nth(1).ok_or("no status")?;
    Ok(status.parse()?)
}

/// Values by key, and the highest fence each was written with.
#[derive(Default)]
struct Storage {
    fences: MemoryFences<String>,
    values: Mutex<HashMap<String, String>>,
}

impl Storage {
    /// Admits and writes in one step: both under the lock of the values.
    fn put(&self, key: &str, fence: u64, value: &str) -> u16 {
        let mut values = self.values.lock().expect("nobody panics with it");
        if self.fences.admit(&key.to_owned(), fence).is_err() {
            return http::STALE;
        }
        values.insert(key.to_owned(), value.to_owned());
        204
    }
}

async fn serve(listener: TcpListener, storage: Arc<Storage>) {
    while let Ok((stream, _)) = listener.accept().await {
        let _ = answer(stream, &storage).await;
    }
}

async fn answer(mut stream: TcpStream, storage: &Storage) -> Outcome<()> {
    let (mut key, mut fence, mut length) = (None, None, 0);
    let mut reader = BufReader::new(&mut stream);
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).await?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            if line.trim_end().is_empty() {
                break;
            }
            continue;
        };
        if name.eq_ignore_ascii_case(http::KEY) {
            key = Some(value.to_owned());
        } else if name.eq_ignore_ascii_case(http::FENCE) {
            fence = value.parse().ok();
        } else if name.eq_ignore_ascii_case("Content-Length") {
            length = value.parse()?;
        }
    }
    let mut value = vec![0; length];
    reader.read_exact(&mut value).await?;
    let status = match (key, fence) {
        (Some(key), Some(fence)) => storage.put(&key, fence, &String::from_utf8(value)?),
        _ => 400,
    };
    stream.write_all(format!("HTTP/1.0 {status} -\r\n\r\n").as_bytes()).await?;
    Ok(())
}
