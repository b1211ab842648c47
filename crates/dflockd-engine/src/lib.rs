//! Runs the core.
//!
//! An [`Engine`] keeps the state in memory, spread over shards ([`Memory`]), or is a member of a cluster
//! ([`Replicated`]). What sessions are to be told goes to their [`Sink`]. Start reading at [`Engine::submit`].

mod address;
mod clock;
mod engine;
mod fence_file;
mod fences;
mod gauges;
mod log_budget;
mod memory;
pub mod replica;
mod replicated;
mod router;

pub use address::AddressKey;
pub use clock::Clock;
pub use engine::{Attaching, Engine, SessionInfo};
pub use fence_file::{FenceFile, FenceFileError};
pub use fences::Fences;
pub use gauges::{Gauges, TIMES_BUCKETS, Times};
pub use log_budget::{LogBudget, Suppressed};
pub use memory::{Memory, Options, Place, Submitted};
pub use replicated::{Leader, Replicated, View};
pub use router::{Attachment, Door, Pokes, Pushed, SessionSecret, Sink};
