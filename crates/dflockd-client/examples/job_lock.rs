//! One of many machines runs the nightly job: waits a little, works, stops if the lock is lost, and tells
//! whether it may try again.
//!
//! ```text
//! dflockd &
//! cargo run -p dflockd-client --example job_lock -- 127.0.0.1:6388
//! ```

#![expect(clippy::print_stdout, reason = "it is a demonstration")]

use std::process::ExitCode;
use std::time::Duration;

use dflockd_client::{Client, Error};

#[tokio::main]
async fn main() -> ExitCode {
    let server = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:6388".to_owned());
    match run(&server).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            if error.may_have_applied() {
                println!("the lock may have been taken; if so its lease ends it");
            }
            if error.may_retry() {
                println!("trying again makes sense");
            }
            ExitCode::FAILURE
        }
    }
}

async fn run(server: &str) -> Result<(), Error> {
    let client = Client::builder().server(server).name("nightly").connect().await?;
    let lock = client.lock("jobs/nightly").lease(Duration::from_secs(15));
    let Some(guard) = lock.acquire_timeout(Duration::from_secs(2)).await? else {
        println!("somebody else does it");
        return Ok(());
    };
    println!("working with fence {}", guard.fence());
    tokio::select! {
        () = nightly_job(guard.fence()) => println!("done"),
        reason = guard.lost() => println!("stopped: {reason}"),
    }
    // An error here says that the lock was lost before the end, or that nobody knows.
    guard.release().await
}

/// Hands the fence on to whatever it writes to.
async fn nightly_job(_fence: u64) {
    tokio::time::sleep(Duration::from_millis(300)).await;
}
