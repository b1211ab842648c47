//! Runs the core.
//!
//! [`Engine`] keeps the state in memory, spread over shards, each a [`Store`](dflockd_core::Store) under a
//! short mutex; the thread that brings a command applies it. What others are to be told goes to the
//! [`Sink`] of their session. Start reading at [`Engine::submit`].

mod clock;
mod fence_file;
mod fences;
mod memory;
mod router;

pub use clock::Clock;
pub use fence_file::{FenceFile, FenceFileError};
pub use fences::Fences;
pub use memory::{Engine, Options, Place, Submitted};
pub use router::{Attachment, Pokes, Pushed, SessionSecret, Sink};
