//! Changes of keys for whoever follows them at a pace of its own: event streams over HTTP and gRPC.
//!
//! A [`Follower`] has a place in the history and reads on from there; nobody keeps a queue for it. One that is too far
//! behind is told so, never cut short in silence. While there are followers, one task is woken when the history has
//! grown, looks once and keeps the latest for all of them: nothing is done while nothing changes, and many followers
//! cost one look.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use dflockd_core::{Change, Refusal, Revision, Separators, pattern_matches};
use dflockd_engine::{Engine, LATEST_MAX};
use parking_lot::Mutex;
use tokio::sync::{oneshot, watch};
use tokio::time::Instant;

use crate::frontend::auth::Allowed;
use crate::frontend::pool::{Background, Pool};

/// How long it takes at least from one look to the next: what changes meanwhile is seen in one go.
const LOOKS_APART: Duration = Duration::from_millis(2);
/// How long after it could not be said what has changed it is looked again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// Changes that are kept for all followers; who is further behind asks the engine.
const KEPT_MAX: usize = 16 * LATEST_MAX;
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

/// The news of all followers, as long as there are any.
struct Pump {
    latest: Mutex<Latest>,
    news: watch::Sender<Revision>,
    /// Gone with the pump, and then its task ends.
    _unfollowed: oneshot::Sender<()>,
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
        pattern: Allowed<&[u8]>,
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
                    let (unfollowed, ended) = oneshot::channel();
                    let latest = Mutex::new(latest);
                    let pump = Arc::new(Pump { latest, news, _unfollowed: unfollowed });
                    *known = Arc::downgrade(&pump);
                    let (engine, reads) = (Arc::clone(&self.engine), Arc::clone(&self.reads));
                    tokio::spawn(follow_changes(engine, reads, Arc::downgrade(&pump), ended));
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
            pattern: pattern.get().into(),
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
        pattern: Allowed<&[u8]>,
        max: usize,
    ) -> Result<Vec<Change>, Unavailable> {
        let (engine, pattern) = (Arc::clone(&self.engine), pattern.get().to_vec());
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
                tokio::time::sleep(LOOK_AGAIN).await;
                Ok(Vec::new())
            }
        }
    }
}

/// Brings followers what has changed, until nobody follows any more.
async fn follow_changes(
    engine: Arc<Engine>,
    reads: Arc<Pool>,
    pump: Weak<Pump>,
    mut unfollowed: oneshot::Receiver<()>,
) {
    // Before the first look: what changes after it is told.
    let mut growth = engine.follow();
    loop {
        let look_at = Instant::now() + LOOKS_APART;
        let Some(upto) = pump.upgrade().map(|pump| pump.latest.lock().upto) else { return };
        let asked = Arc::clone(&engine);
        let news = read(&reads, move || asked.latest_changes(upto)).await;
        // Not kept while waiting, or nobody would notice that all have gone.
        let Some(taken) = pump.upgrade().map(|pump| pump.take(news)) else { return };
        match taken {
            None => tokio::time::sleep(LOOK_AGAIN).await,
            Some(Taken { is_all: false, .. }) => {}
            Some(Taken { is_all: true, upto }) => tokio::select! {
                grown = growth.wait_for(|told| *told > upto) => {
                    if grown.is_err() {
                        return;
                    }
                }
                _ = &mut unfollowed => return,
            },
        }
        tokio::time::sleep_until(look_at).await;
    }
}

/// What a look has brought.
struct Taken {
    /// Up to here everything is known now.
    upto: Revision,
    /// Whether there was nothing more.
    is_all: bool,
}

impl Pump {
    /// Takes what a look has brought; none if nobody could say.
    fn take(&self, news: Option<Result<(Vec<Change>, Revision), Revision>>) -> Option<Taken> {
        let mut latest = self.latest.lock();
        let is_all = match news? {
            Ok((changes, upto)) => {
                let is_all = changes.len() < LATEST_MAX;
                latest.changes.extend(changes);
                latest.upto = upto;
                while latest.changes.len() > KEPT_MAX
                    && let Some(oldest) = latest.changes.pop_front()
                {
                    latest.after = oldest.revision;
                }
                is_all
            }
            // So much has changed that nobody's place is of use: everybody asks the engine.
            Err(gone) => {
                latest.changes.clear();
                latest.after = gone;
                latest.upto = gone;
                false
            }
        };
        let upto = latest.upto;
        drop(latest);
        self.news.send_if_modified(|told| std::mem::replace(told, upto) != upto);
        Some(Taken { upto, is_all })
    }
}

/// Reads the history on a thread that may be busy.
async fn read<T: Send + 'static>(
    reads: &Arc<Pool>,
    work: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<T> {
    reads.wait(work).await.flatten()
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use dflockd_core::{Command, command};
    use dflockd_engine::{Api, Clock};

    use super::*;
    use crate::config::{Config, Parsed};
    use crate::frontend::caller::Caller;
    use crate::service::Service;

    const LIMIT: Duration = Duration::from_secs(60);

    /// A server whose looks are counted.
    fn service() -> (Arc<Service>, Arc<AtomicUsize>) {
        let flags = ["--http-port", "1"].map(Into::into);
        let parsed = Config::from_args(flags, &|_| None).unwrap();
        let Parsed::Run(config) = parsed else { unreachable!("it is to run") };
        let looks = Arc::<AtomicUsize>::default();
        let count = Arc::clone(&looks);
        let background = move |job: Box<dyn FnOnce() + Send>| {
            count.fetch_add(1, Ordering::SeqCst);
            std::thread::spawn(job);
        };
        (Arc::new(Service::new(&config, Clock::system(), background).unwrap()), looks)
    }

    async fn set(caller: &Caller, key: &[u8]) {
        let command = command::KvSet { key, value: b"v", ttl: None };
        caller.call(Allowed::by_server(Command::KvSet(command))).await.unwrap().told();
    }

    async fn next(follower: &mut Follower) -> Vec<Change> {
        tokio::time::timeout(LIMIT, follower.next()).await.expect("a change").unwrap()
    }

    /// GUARANTEES 48: nothing is looked for while nothing changes, many followers cost one look, and a change costs
    /// none when nobody follows any more.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn many_followers_cost_one_look() {
        let (service, looks) = service();
        let caller = Caller::open(&service, Api::Http, "writer".into());
        let mut followers = Vec::new();
        for _ in 0..50 {
            followers.push(service.feed.follow(Allowed::by_server(b"k.*"), 1, None).await.unwrap());
        }
        // One of the task, and one of each who came.
        while looks.load(Ordering::SeqCst) < 51 {
            tokio::time::sleep(LOOKS_APART).await;
        }
        tokio::time::sleep(LOOKS_APART * 100).await;
        assert_eq!(looks.load(Ordering::SeqCst), 51, "nothing has changed");
        for number in 1..=3 {
            set(&caller, b"k.a").await;
            for follower in &mut followers {
                let changes = next(follower).await;
                assert_eq!(changes.len(), 1);
                assert_eq!(&*changes[0].key, b"k.a");
            }
            assert_eq!(looks.load(Ordering::SeqCst), 51 + number);
        }
        drop(followers);
        let gone = async {
            while service.feed.followers() > 0 || service.feed.pump.lock().strong_count() > 0 {
                tokio::task::yield_now().await;
            }
            tokio::time::sleep(LOOKS_APART * 10).await;
        };
        tokio::time::timeout(LIMIT, gone).await.expect("nobody follows");
        set(&caller, b"k.a").await;
        tokio::time::sleep(LOOKS_APART * 10).await;
        assert_eq!(looks.load(Ordering::SeqCst), 54, "nobody follows");
    }

    /// GUARANTEES 31: all changes come, once and in order, however they meet the looks for them and whoever begins to
    /// follow meanwhile. A wake-up that is lost would leave the last ones out.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn no_change_is_missed() {
        const WRITERS: usize = 4;
        const EACH: usize = 200;
        for round in 0..20 {
            let (service, _) = service();
            let mut writers = Vec::new();
            let mut follower =
                service.feed.follow(Allowed::by_server(b">"), 1, None).await.unwrap();
            for writer in 0..WRITERS {
                let service = Arc::clone(&service);
                writers.push(tokio::spawn(async move {
                    let caller = Caller::open(&service, Api::Http, "writer".into());
                    for number in 0..EACH {
                        set(&caller, format!("w{writer}.{number}").as_bytes()).await;
                        if number % 50 == 49 {
                            tokio::time::sleep(LOOKS_APART).await;
                        }
                    }
                }));
            }
            let mut seen: Vec<Change> = Vec::new();
            while seen.len() < WRITERS * EACH {
                seen.extend(next(&mut follower).await);
            }
            assert!(seen.is_sorted_by(|a, b| a.revision < b.revision), "round {round}");
            for writer in 0..WRITERS {
                let name = format!("w{writer}.");
                let of = seen.iter().filter(|change| change.key.starts_with(name.as_bytes()));
                let keys: Vec<_> = of.map(|change| change.key.to_vec()).collect();
                let expected = (0..EACH).map(|number| format!("{name}{number}").into_bytes());
                assert_eq!(keys, expected.collect::<Vec<_>>(), "round {round}");
            }
            for writer in writers {
                writer.await.unwrap();
            }
        }
    }

    /// GUARANTEES 31: a change between the first follower's question where the history is and the task's beginning is
    /// seen: whoever follows from now on sees all that follows.
    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn a_change_right_after_the_beginning_is_seen() {
        for _ in 0..200 {
            let (service, _) = service();
            let caller = Caller::open(&service, Api::Http, "writer".into());
            let mut follower =
                service.feed.follow(Allowed::by_server(b">"), 1, None).await.unwrap();
            set(&caller, b"k").await;
            assert_eq!(next(&mut follower).await.len(), 1);
        }
    }
}
