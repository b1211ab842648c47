//! Leads as long as it can, and stops leading before anybody else can begin.
//!
//! ```text
//! dflockd &
//! cargo run -p dflockd-client --example leader -- 127.0.0.1:6388 &
//! cargo run -p dflockd-client --example leader -- 127.0.0.1:6388
//! ```
//!
//! A second argument is the number of rounds after which it resigns and ends.

#![expect(clippy::print_stdout, reason = "it is a demonstration")]

use std::time::Duration;

use dflockd_client::{Client, Error, Guard, OnDisconnect};

#[tokio::main]
async fn main() -> Result<(), Error> {
    let mut args = std::env::args().skip(1);
    let server = args.next().unwrap_or_else(|| "127.0.0.1:6388".to_owned());
    let rounds = args.next().and_then(|rounds| rounds.parse().ok()).unwrap_or(u64::MAX);
    let client = Client::builder()
        .server(server)
        .name("leader-example")
        // The default, said aloud: a broken connection is mended and costs no leadership.
        .on_disconnect(OnDisconnect::Keep)
        .connect()
        .await?;
    let election = client.election("cleaner").lease(Duration::from_secs(5));
    loop {
        let guard = election.acquire().await?;
        println!("leading with fence {}", guard.fence());
        // The work is dropped at its next await when the leadership is lost.
        let ended = tokio::select! {
            () = work(&guard, rounds) => true,
            reason = guard.lost() => {
                println!("no longer leading: {reason}");
                false
            }
        };
        if ended {
            guard.release().await?;
            println!("resigned");
            return Ok(());
        }
    }
}

async fn work(guard: &Guard, rounds: u64) {
    for round in 1..=rounds {
        // Before each step that others must not do at the same time.
        if !guard.is_valid() {
            return std::future::pending().await;
        }
        println!("round {round}");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
}
