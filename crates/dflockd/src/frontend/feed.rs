//! Changes of keys for whoever follows them at a pace of its own: event streams over HTTP and gRPC.
//!
//! A [`Follower`] has a place in the history and reads on from there; nobody keeps a queue for it. One that is too far
//! behind is told so, never cut short in silence. While there are followers, one task looks for news and keeps the
//! latest for all of them.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dflockd_core::{Change, Refusal, Revision, Separators, pattern_matches};
use dflockd_engine::Engine;
use parking_lot::Mutex;
use tokio::sync::watch;

use crate::frontend::pool::{Background, Pool};

/// How often news are looked for.
const POLL_EVERY: Duration = Duration::from_millis(5);
/// Changes that are kept for all followers; who is further behind asks the engine.
const LATEST_MAX: usize = 16_384;
/// Changes handed out at a time.
const BATCH_MAX: usize = 128;
/// Parts of the history that are read from the engine at a time.
const READS_MAX: usize = 4;

/// What has changed.
pub(crate) struct Feed {
    engine: Arc<Engine>,
    reads: Arc<Pool>,
    pump: Mutex<Weak<Pump>>,
    /// Patterns that are followed.
    followed: Arc<AtomicU64>,
    /// How many may be; 0 = unlimited.
    followed_max: u64,
}

/// Looks for news, as long as anybody follows.
struct Pump {
    latest: Mutex<Latest>,
    news: watch::Sender<Revision>,
}

struct Latest {
    changes: VecDeque<Change>,
    /// All changes after this revision are here...
    after: Revision,
    /// ... up to this one.
    upto: Revision,
}

/// A place in the history of changes.
pub(crate) struct Follower {
    engine: Arc<Engine>,
    reads: Arc<Pool>,
    pump: Arc<Pump>,
    news: watch::Receiver<Revision>,
    pattern: Arc<[u8]>,
    after: Revision,
    _share: Share,
}

/// What a follower has of the patterns that may be followed; given back when it is dropped.
struct Share {
    followed: Arc<AtomicU64>,
    patterns: u64,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.followed.fetch_sub(self.patterns, Ordering::Relaxed);
    }
}

/// The changes that come next are no longer kept; this is the last revision that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Compacted(pub(crate) Revision);

/// Nobody can say what has changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Unavailable;

impl Feed {
    /// No more than `followed_max` patterns can be followed at a time; 0 = unlimited.
    pub(crate) fn new(engine: Arc<Engine>, background: &Background, followed_max: u64) -> Self {
        let reads = Pool::new(READS_MAX, background);
        Self { engine, reads, pump: Mutex::default(), followed: Arc::default(), followed_max }
    }

    /// Follows the changes of keys that match, after a revision or from now on, for somebody who compares each of them
    /// with so many patterns: every change costs that, so it is what counts.
    pub(crate) async fn follow(
        &self,
        pattern: &[u8],
        patterns: usize,
        after: Option<Revision>,
    ) -> Result<Follower, Refusal> {
        let share = self.share(patterns as u64).ok_or(Refusal::MaxSubscriptions)?;
        let engine = Arc::clone(&self.engine);
        let now = read(&self.reads, move || engine.revision());
        let now = now.await.ok_or(Refusal::Unavailable)?;
        let pump = {
            let mut known = self.pump.lock();
            match known.upgrade() {
                Some(pump) => pump,
                None => {
                    let latest = Latest { changes: VecDeque::new(), after: now, upto: now };
                    let news = watch::Sender::new(now);
                    let pump = Arc::new(Pump { latest: Mutex::new(latest), news });
                    *known = Arc::downgrade(&pump);
                    let (engine, reads) = (Arc::clone(&self.engine), Arc::clone(&self.reads));
                    tokio::spawn(poll_changes(engine, reads, Arc::downgrade(&pump)));
                    pump
                }
            }
        };
        let news = pump.news.subscribe();
        let after = after.unwrap_or(now);
        Ok(Follower {
            engine: Arc::clone(&self.engine),
            reads: Arc::clone(&self.reads),
            pump,
            news,
            pattern: pattern.into(),
            after,
            _share: share,
        })
    }

    fn share(&self, patterns: u64) -> Option<Share> {
        let max = if self.followed_max == 0 { u64::MAX } else { self.followed_max };
        let add = |followed: u64| followed.checked_add(patterns).filter(|sum| *sum <= max);
        self.followed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        Some(Share { followed: Arc::clone(&self.followed), patterns })
    }

    /// Where the history is, if somebody comes with a place that it has not reached: one of an earlier process whose
    /// clock was ahead. In a cluster it is only this member that may be behind.
    pub(crate) fn not_reached(&self, after: Option<Revision>) -> Option<Revision> {
        if self.engine.is_replicated() {
            return None;
        }
        self.engine.revision().filter(|now| after > Some(*now))
    }

    /// How many follow.
    pub(crate) fn followers(&self) -> usize {
        self.pump.lock().upgrade().map_or(0, |pump| pump.news.receiver_count())
    }

    /// The last `max` changes of keys that match that are still known, oldest first.
    pub(crate) async fn recent(
        &self,
        pattern: &[u8],
        max: usize,
    ) -> Result<Vec<Change>, Unavailable> {
        let (engine, pattern) = (Arc::clone(&self.engine), pattern.to_vec());
        let recent = read(&self.reads, move || engine.recent_changes(&pattern, max));
        recent.await.ok_or(Unavailable)
    }
}

impl Follower {
    /// Up to where everything that matches was handed out.
    pub(crate) fn revision(&self) -> Revision {
        self.after
    }

    /// Goes on after a revision.
    pub(crate) fn skip_to(&mut self, after: Revision) {
        self.after = after;
    }

    /// The next changes, at least one. May be dropped and called again.
    pub(crate) async fn next(&mut self) -> Result<Vec<Change>, Compacted> {
        loop {
            let upto = *self.news.borrow_and_update();
            if self.after < upto {
                let changes = self.read().await?;
                if !changes.is_empty() {
                    return Ok(changes);
                }
                continue;
            }
            // The sender is in the pump, which this keeps.
            let _ = self.news.changed().await;
        }
    }

    /// What there is after the follower's place; moves it.
    async fn read(&mut self) -> Result<Vec<Change>, Compacted> {
        {
            let latest = self.pump.latest.lock();
            if self.after >= latest.after {
                let first = latest.changes.partition_point(|change| change.revision <= self.after);
                let news = latest.changes.range(first..);
                let matching = news.filter(|change| {
                    pattern_matches(&self.pattern, &change.key, Separators::NEWEST)
                });
                let changes: Vec<_> = matching.take(BATCH_MAX).cloned().collect();
                self.after = match changes.last() {
                    Some(last) if changes.len() == BATCH_MAX => last.revision,
                    _ => latest.upto,
                };
                return Ok(changes);
            }
        }
        let (engine, pattern) = (Arc::clone(&self.engine), Arc::clone(&self.pattern));
        let after = self.after;
        let read = read(&self.reads, move || engine.changes(&pattern, after, BATCH_MAX));
        match read.await {
            Some(Ok((changes, upto))) => {
                self.after = upto;
                Ok(changes)
            }
            Some(Err(gone)) => Err(Compacted(gone)),
            None => {
                tokio::time::sleep(Duration::from_millis(100)).await;
                Ok(Vec::new())
            }
        }
    }
}

/// Looks for news until nobody follows any more.
async fn poll_changes(engine: Arc<Engine>, reads: Arc<Pool>, pump: Weak<Pump>) {
    let mut seen = 0;
    loop {
        tokio::time::sleep(POLL_EVERY).await;
        let Some(pump) = pump.upgrade() else { return };
        let progress = engine.progress();
        if progress == seen {
            continue;
        }
        seen = progress;
        let upto = pump.latest.lock().upto;
        let asked = Arc::clone(&engine);
        let news = read(&reads, move || asked.changes(b">", upto, LATEST_MAX));
        let Some(news) = news.await else {
            seen = 0;
            continue;
        };
        let mut latest = pump.latest.lock();
        match news {
            Ok((changes, upto)) => {
                seen = if changes.len() == LATEST_MAX { 0 } else { seen };
                latest.changes.extend(changes);
                latest.upto = upto;
                while latest.changes.len() > LATEST_MAX
                    && let Some(oldest) = latest.changes.pop_front()
                {
                    latest.after = oldest.revision;
                }
            }
            // So much has changed that nobody's place is of use: everybody asks the engine.
            Err(gone) => {
                latest.changes.clear();
                latest.after = gone;
                latest.upto = gone;
                seen = 0;
            }
        }
        pump.news.send_replace(latest.upto);
    }
}

/// Reads the history on a thread that may be busy.
async fn read<T: Send + 'static>(
    reads: &Arc<Pool>,
    work: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    reads.wait(work).await.flatten()
}
