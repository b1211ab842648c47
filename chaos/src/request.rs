//! What clients ask, and what they make of an answer.

use std::time::Duration;

use dflockd_testkit::fence;

/// How a lock is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// One holder.
    Mutex,
    /// So many holders.
    Semaphore(usize),
    /// A read-write lock, to read.
    Read,
    /// A read-write lock, to write.
    Write,
    /// One leader.
    Election,
}

impl Kind {
    /// Whether nobody else may hold at the same time.
    pub fn is_exclusive(self) -> bool {
        match self {
            Self::Mutex | Self::Write | Self::Election => true,
            Self::Semaphore(_) | Self::Read => false,
        }
    }
}

/// Times of a connection are seconds, or milliseconds if it agreed on that.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Seconds.
    Seconds,
    /// Milliseconds.
    Millis,
}

impl Unit {
    fn of(self, time: Duration) -> u128 {
        match self {
            Self::Seconds => time.as_millis().div_ceil(1000),
            Self::Millis => time.as_millis(),
        }
    }
}

/// What is asked of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Want {
    /// One more.
    Add,
    /// A new value of the counter.
    Reset(i64),
    /// The value of the counter.
    Count,
    /// A new value.
    Put(String),
    /// A new value in place of an old one, or of none.
    Swap(Option<String>, String),
    /// No value.
    Delete,
    /// The value.
    Fetch,
    /// One more item, at the left end or the right one.
    Push(bool, String),
    /// An item from the left end or the right one, with patience.
    Pop(bool, Duration),
    /// The number of items.
    Length,
    /// A lock, with patience, for the time of a lease.
    Acquire(Kind, Duration, Duration),
    /// A place in the queue of a lock.
    Enqueue(Kind, Duration),
    /// The lock that was queued for, with patience.
    Claim(Kind, Duration),
    /// No longer the lock with this token.
    Release(Kind, String),
    /// The lock with this token for longer.
    Renew(Kind, String, Duration),
}

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Of what.
    pub key: String,
    /// What.
    pub want: Want,
}

impl Request {
    /// Command and argument on their lines.
    pub fn lines(&self, unit: Unit) -> (&'static str, String) {
        let time = |time: &Duration| unit.of(*time).to_string();
        let both = |one: &Duration, other: &Duration| format!("{} {}", time(one), time(other));
        let end = |left: &bool, ends: [&'static str; 2]| ends[usize::from(!*left)];
        match &self.want {
            Want::Add => ("incr", "1".into()),
            Want::Reset(value) => ("cset", value.to_string()),
            Want::Count => ("get", String::new()),
            Want::Put(value) => ("kset", value.clone()),
            Want::Swap(old, new) => {
                ("kcas", format!("{}\t{new}\t0", old.as_deref().unwrap_or_default()))
            }
            Want::Delete => ("kdel", String::new()),
            Want::Fetch => ("kget", String::new()),
            Want::Push(left, item) => (end(left, ["lpush", "rpush"]), item.clone()),
            Want::Pop(left, wait) if wait.is_zero() => (end(left, ["lpop", "rpop"]), String::new()),
            Want::Pop(left, wait) => (end(left, ["blpop", "brpop"]), time(wait)),
            Want::Length => ("llen", String::new()),
            Want::Acquire(kind, wait, lease) => match kind {
                Kind::Mutex => ("l", both(wait, lease)),
                Kind::Semaphore(slots) => ("sl", format!("{} {slots} {}", time(wait), time(lease))),
                Kind::Read => ("rl", both(wait, lease)),
                Kind::Write => ("wl", both(wait, lease)),
                Kind::Election => ("elect", both(wait, lease)),
            },
            Want::Enqueue(kind, lease) => match kind {
                Kind::Semaphore(slots) => ("se", format!("{slots} {}", time(lease))),
                Kind::Read => ("re", time(lease)),
                Kind::Write => ("we", time(lease)),
                Kind::Mutex | Kind::Election => ("e", time(lease)),
            },
            Want::Claim(kind, wait) => match kind {
                Kind::Semaphore(_) => ("sw", time(wait)),
                Kind::Read => ("rw", time(wait)),
                Kind::Write => ("ww", time(wait)),
                Kind::Mutex | Kind::Election => ("w", time(wait)),
            },
            Want::Release(kind, token) => {
                let command = match kind {
                    Kind::Mutex => "r",
                    Kind::Semaphore(_) => "sr",
                    Kind::Read => "rr",
                    Kind::Write => "wr",
                    Kind::Election => "resign",
                };
                (command, token.clone())
            }
            Want::Renew(kind, token, lease) => {
                let command = match kind {
                    Kind::Semaphore(_) => "sn",
                    Kind::Read => "rn",
                    Kind::Write => "wn",
                    Kind::Mutex | Kind::Election => "n",
                };
                (command, format!("{token} {}", time(lease)))
            }
        }
    }

    /// How long it may wait by its own will.
    pub fn wait(&self) -> Duration {
        match &self.want {
            Want::Pop(_, wait) | Want::Acquire(_, wait, _) | Want::Claim(_, wait) => *wait,
            Want::Add
            | Want::Reset(_)
            | Want::Count
            | Want::Put(_)
            | Want::Swap(..)
            | Want::Delete
            | Want::Fetch
            | Want::Push(..)
            | Want::Length
            | Want::Enqueue(..)
            | Want::Release(..)
            | Want::Renew(..) => Duration::ZERO,
        }
    }

    /// Whether it only reads.
    pub fn reads(&self) -> bool {
        matches!(self.want, Want::Count | Want::Fetch | Want::Length)
    }
}

/// The token of a grant, at once or after a place in the queue.
pub fn token_of(answer: &str) -> Option<&str> {
    let mut words = answer.split(' ');
    let granted = matches!(words.next(), Some("ok" | "acquired"));
    words.next().filter(|token| granted && token.len() == 32)
}

/// The fence of a token, for people and models.
pub fn fence_of(token: &str) -> u64 {
    fence(token)
}

/// Whether nothing was done and nothing will be, or what was done is told.
pub fn is_definite(answer: &str) -> bool {
    !answer.starts_with("error_unknown")
}

/// Whether a line belongs to no request.
pub fn is_push(line: &str) -> bool {
    ["leader ", "watch ", "sig ", "lost "].iter().any(|begin| line.starts_with(begin))
}
