//! Runs the core.
//!
//! An [`Engine`] keeps the state in memory, spread over shards ([`Memory`]), or is a member of a cluster
//! ([`Replicated`]). What sessions are to be told goes to their [`Mailbox`]. Start reading at [`Engine::submit`].
//!
//! # A member of a cluster
//!
//! [`Replica`](dflockd_replica::Replica) is a function with memory. Its inputs are time, frames of peers, finished
//! writes, snapshots, room on the disk, items and reads of clients, and requests of operators; `poll` fills `Outputs`:
//! frames to send, writes for the log, events for clients, a snapshot to make, or why the node can not go on. These
//! threads drive it:
//!
//! | Thread | Does |
//! | --- | --- |
//! | a worker of the server | drives the replica before it sleeps, with what all connections sent; writes answers |
//! | `replica` | drives the replica when time passes (it sleeps 100 ms at most) or something takes long |
//! | `log` | writes and syncs the log, so that nobody else waits for it, then drives the replica; writes few answers |
//! | `snapshot` | exists while a snapshot is made: makes it, and writes it beside the others |
//! | `sweep` | exists while files that are not needed any more are removed |
//! | the runtime's | the peer port, HTTP and gRPC; under a light load they drive the replica for a frame or a request |
//!
//! A snapshot is made from the previous one and the log since then, on a second `Machine`: the replica pays for a list
//! of entries only, at the price of memory for a second state meanwhile. One is made each `--snapshot-entries` entries,
//! after 64 MiB of entries, or when a member needs one. The leader puts the SHA-256 of its own into the log, and a
//! member that has another one for the same index stops. A quarter of `--snapshot-entries` stays in the log before the
//! snapshot, for members that are a little behind.
//!
//! A *witness* votes and keeps the log and the newest snapshot, as bytes that it does not read: its `Machine` has no
//! store. It waits twice as long before it stands for election, proposes nothing while it leads, and hands leadership
//! over to a full voter.
//!
//! # Failures of a member
//!
//! | What | What happens |
//! | --- | --- |
//! | write or sync of the log fails | `Fatal`: log line, connections closed, exit status 1; nothing is tried again |
//! | a thread of the replica panics, an entry can not be read, digests differ | as above |
//! | the node was removed, or its data directory is an old copy | as above, with a message that says so |
//! | disk full | the leader hands over (after 30 s if full before it led); what makes the state grow is refused |
//! | a snapshot finds no room | skipped with a warning, and the log grows |
//! | no descriptor for a file | the thread `log` tries again; a snapshot waits a minute, then is skipped |
//! | the inputs of a busy replica are full | requests are `Unavailable`, repeatable ones `Forgotten`; frames are lost |
//! | the leader's process dies | its port refuses, and the followers stand for election at once, 100 ms apart |
//! | the leader falls silent | the followers stand for election by turns, from `--election-timeout-ms` to twice that |
//! | a frame is lost | sent again: by Raft, after 500 ms by the accepting node, a piece of a snapshot after 1 s |
//!
//! What waits for a descriptor is not acknowledged. While inputs are full, releases and renewals have a quarter more
//! room than other requests, and ends of sessions are always taken.
//!
//! # Bounds
//!
//! Before a replica: 131,072 items or 32 MiB, 65,536 reads, 65,536 frames or 256 MiB (`replicated/inputs.rs`). In it:
//! 64 MiB of items not applied, 262,144 reads, 32 MiB waiting to be proposed, 8 MiB per entry, 4 MiB of a snapshot
//! under way; for its disk, 64 MiB of entries that are not committed while it leads, and 256 messages of 1 MiB of its
//! leader while it follows. Behind it: at 262,144 notices for clients all but the timer thread wait until they are
//! delivered. Between peers: 64 MiB per frame, 8,192 frames and 32 MiB queued per peer, 1,024 frames and 64 MiB in the
//! lane of snapshots; 1 KiB and 5 s until a peer has proven who it is.

mod address;
mod chance;
mod clock;
mod engine;
mod fence_file;
mod fences;
mod gauges;
mod log_budget;
mod memory;
pub mod offline;
mod replicated;
mod router;
mod sync;
pub mod transport;

#[cfg(feature = "sim")]
pub use replicated::stepped;
#[cfg(feature = "sim")]
pub use sync::simulated::with_points;

pub use address::AddressKey;
pub use chance::Chance;
pub use clock::Clock;
pub use engine::{Attaching, Engine, LATEST_MAX, SessionInfo, readable};
pub use fence_file::{FenceFile, FenceFileError};
pub use fences::Fences;
pub use gauges::{Gauges, TIMES_BUCKETS, Times};
pub use log_budget::{LogBudget, Suppressed};
pub use memory::{Memory, Options, Place, Submitted};
pub use replicated::driver::{ClusterOptions, Formation, Host, MemberOptions};
pub use replicated::formation::FirstMember;
pub use replicated::{Leader, Replicated, View};
pub use router::{Api, Attachment, Mailbox, PendingFlushes, Pushed, SessionSecret};
