//! Whether a connection is used: one without a call ends after a while, and one that has never authenticated soon.
//!
//! Answering pings is no use. Whoever only does that keeps a descriptor and some memory from others.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// How long connections may be unused.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience {
    /// How long a connection may be without an open call; for ever if there is no limit.
    pub(super) idle: Option<Duration>,
    /// How long a connection may take until its first authenticated call.
    pub(super) stranger: Duration,
}

/// What one connection is used for.
#[derive(Clone)]
pub(super) struct Usage(Arc<Shared>);

struct Shared {
    patience: Patience,
    begun: Instant,
    open: AtomicUsize,
    authenticated: AtomicBool,
    /// When the last call ended, in milliseconds since the beginning.
    idle_since: AtomicU64,
}

/// A call that is open.
pub(super) struct InUse(Usage);

impl Usage {
    pub(super) fn new(patience: Patience) -> Self {
        Self(Arc::new(Shared {
            patience,
            begun: Instant::now(),
            open: AtomicUsize::new(0),
            authenticated: AtomicBool::new(false),
            idle_since: AtomicU64::new(0),
        }))
    }

    /// A call begins.
    pub(super) fn begin(&self) -> InUse {
        self.0.open.fetch_add(1, Ordering::SeqCst);
        InUse(self.clone())
    }

    /// The client has shown that it may be here.
    pub(super) fn authenticate(&self) {
        if !self.0.authenticated.load(Ordering::Relaxed) {
            self.0.authenticated.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the connection may be closed although it is not used up.
    pub(super) fn is_disposable(&self) -> bool {
        self.0.open.load(Ordering::SeqCst) == 0 || !self.0.authenticated.load(Ordering::Relaxed)
    }

    /// Waits until the connection has been unused for too long.
    pub(super) async fn expired(&self) {
        loop {
            let Some(due) = self.due() else { return std::future::pending().await };
            if due <= Instant::now() {
                return;
            }
            tokio::time::sleep_until(due).await;
        }
    }

    /// When it expires, or when to look again at the latest. None: never, whatever happens.
    fn due(&self) -> Option<Instant> {
        let Shared { patience: Patience { idle, stranger }, begun, .. } = *self.0;
        let is_open = self.0.open.load(Ordering::SeqCst) > 0;
        let idle_since = begun + Duration::from_millis(self.0.idle_since.load(Ordering::Relaxed));
        let is_stranger = !self.0.authenticated.load(Ordering::Relaxed);
        match (is_stranger, is_open) {
            (true, false) => Some(idle_since + idle.map_or(stranger, |idle| idle.min(stranger))),
            // All that a stranger can have open is a look at the server's health, which must not keep it here for ever.
            (true, true) => Some(begun + idle.unwrap_or(stranger).max(stranger)),
            (false, true) => idle.map(|idle| Instant::now() + idle),
            (false, false) => idle.map(|idle| idle_since + idle),
        }
    }
}

impl Drop for InUse {
    fn drop(&mut self) {
        let shared = &self.0.0;
        let now = u64::try_from(shared.begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        // First: whoever sees that nothing is open must not take the connection for idle since long ago.
        shared.idle_since.store(now, Ordering::SeqCst);
        shared.open.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const IDLE: Duration = Duration::from_millis(300);
    const STRANGER: Duration = Duration::from_millis(30);
    const PATIENCE: Patience = Patience { idle: Some(IDLE), stranger: STRANGER };

    async fn lasts(usage: &Usage) -> Duration {
        let begun = Instant::now();
        usage.expired().await;
        begun.elapsed()
    }

    async fn stays(usage: &Usage) -> bool {
        tokio::time::timeout(3 * IDLE, usage.expired()).await.is_err()
    }

    /// GUARANTEES 48: a connection that is not used ends.
    #[tokio::test]
    async fn unused_connections_expire() {
        let stranger = lasts(&Usage::new(PATIENCE)).await;
        assert!((STRANGER..IDLE).contains(&stranger), "{stranger:?}");
        let watching = Usage::new(PATIENCE);
        let health = watching.begin();
        let watched = lasts(&watching).await;
        assert!(watched >= IDLE - STRANGER, "{watched:?}");
        assert!(watching.is_disposable(), "an open call of a stranger does not help for ever");
        drop(health);

        let client = Usage::new(PATIENCE);
        let call = client.begin();
        client.authenticate();
        assert!(stays(&client).await && !client.is_disposable(), "a call is open");
        drop(call);
        let idle = lasts(&client).await;
        assert!(idle >= IDLE - STRANGER, "{idle:?}");
        assert!(client.is_disposable());
    }

    #[tokio::test]
    async fn without_a_limit_only_strangers_expire() {
        let endless = Patience { idle: None, ..PATIENCE };
        let stranger = lasts(&Usage::new(endless)).await;
        assert!(stranger >= STRANGER, "{stranger:?}");
        let client = Usage::new(endless);
        client.authenticate();
        assert!(stays(&client).await);
    }
}
