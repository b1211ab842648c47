//! Client for the dflockd lock server.
//!
//! One multiplexed connection per server carries everything; it is attached again when it breaks, and requests
//! whose answers were lost are repeated exactly once. Servers of older generations are talked to with one
//! connection per held or waiting lock. In a cluster ([`Client::cluster`]) the session goes to another member when
//! its own fails: locks and places in queues are kept.
//!
//! A held lock is a [`Guard`]: it knows its fence and until when it is valid, renews itself, and tells when it
//! is lost. What a lock can not do is stop a process that was paused between checking and writing: see
//! [`fencing`].
//!
//! ```no_run
//! use std::time::Duration;
//!
//! # async fn example() -> Result<(), dflockd_client::Error> {
//! let client = dflockd_client::Client::connect("127.0.0.1:6388").await?;
//! let lock = client.lock("jobs/nightly").lease(Duration::from_secs(15));
//! let Some(guard) = lock.acquire_timeout(Duration::from_secs(30)).await? else {
//!     return Ok(()); // somebody else does it
//! };
//! tokio::select! {
//!     () = do_the_work(guard.fence()) => {}
//!     reason = guard.lost() => eprintln!("stopped: {reason}"),
//! }
//! guard.release().await?;
//! # Ok(())
//! # }
//! # async fn do_the_work(_fence: u64) {}
//! ```

mod client;
mod clock;
mod cluster;
mod error;
mod events;
pub mod fencing;
#[cfg(feature = "grpc")]
mod grpc;
mod guard;
mod lines;
mod link;
mod locks;
mod reply;
mod stream;
#[cfg(feature = "testing")]
pub mod testing;
mod values;

pub use client::{Client, ClientBuilder, shard};
pub use clock::Instant;
pub use cluster::{Member, Membership};
pub use dflockd_wire::ErrorCode;
pub use error::{Error, Lost};
pub use events::{Change, LeaderEvent, Leaders, Signal, Signals, Watch};
pub use guard::Guard;
pub use link::OnDisconnect;
pub use locks::{Election, Lock, ReadLock, RwLock, Semaphore, Ticket, WriteLock};
pub use stream::Transport;
pub use values::{Barrier, Counter, Kv, List};
