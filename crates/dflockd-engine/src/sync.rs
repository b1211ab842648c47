//! The primitives of the parts whose interleavings are tested: `tests/combiner.rs` compiles those files once more and
//! gives them a scheduler's own instead of these.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};
