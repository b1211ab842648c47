//! The primitives of the parts whose interleavings are tested: `tests/combiner.rs` compiles those files once more and
//! gives them a scheduler's own instead of these. The simulator runs them as they are, and lets other threads come in
//! between at each [`point`].

pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering, fence};

pub(crate) use parking_lot::{Condvar, Mutex, MutexGuard};

/// A place where another thread may come in between: for the simulator, which has only one. Nothing in a server.
#[cfg(not(feature = "sim"))]
#[inline(always)]
pub(crate) const fn point() {}

#[cfg(feature = "sim")]
pub(crate) use simulated::point;

/// What happens at a [`point`] of the calling thread.
#[cfg(feature = "sim")]
pub(crate) mod simulated {
    use std::cell::RefCell;
    use std::rc::Rc;

    type Hook = Rc<dyn Fn()>;

    thread_local! {
        static HOOK: RefCell<Option<Hook>> = const { RefCell::new(None) };
    }

    /// Lets `hook` happen at each point that `step` comes to.
    pub fn with_points<R>(hook: Hook, step: impl FnOnce() -> R) -> R {
        let before = HOOK.replace(Some(hook));
        let result = step();
        HOOK.set(before);
        result
    }

    pub(crate) fn point() {
        let hook = HOOK.with_borrow(Clone::clone);
        if let Some(hook) = hook {
            hook();
        }
    }
}
