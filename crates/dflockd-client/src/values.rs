//! Counters, key-value entries, lists and barriers.

use std::time::Duration;

use dflockd_wire::{End, ErrorCode, Expect, Query, Request, SECONDS_MAX, Span, command};

use crate::client::{Client, check_value};
use crate::error::Error;
use crate::reply::Reply;

/// Items of a list that are asked for at a time, if all of them are too much for one answer.
const PART_ITEMS: i64 = 8192;

/// A counter of 64 bits.
#[derive(Clone)]
pub struct Counter {
    client: Client,
    key: Vec<u8>,
}

impl Counter {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { client: client.clone(), key }
    }

    /// Adds, and returns the new value.
    ///
    /// # Errors
    ///
    /// If it would overflow, or the server can not be asked.
    pub async fn add(&self, delta: i64) -> Result<i64, Error> {
        let request = Request::command(command::Add { key: &self.key, delta, decrement: false });
        self.client.ask(&self.key, &request).await?.number(request.op().name())
    }

    /// The value; 0 if it was never set.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn get(&self) -> Result<i64, Error> {
        let request = Request::Query(Query::Counter { key: &self.key });
        self.client.ask(&self.key, &request).await?.number(request.op().name())
    }

    /// Sets the value.
    ///
    /// # Errors
    ///
    /// If the server refuses or can not be asked.
    pub async fn set(&self, value: i64) -> Result<(), Error> {
        let request = Request::command(command::CounterSet { key: &self.key, value });
        self.client.ask(&self.key, &request).await?.done(request.op().name())
    }
}

/// A key-value entry.
#[derive(Clone)]
pub struct Kv {
    client: Client,
    key: Vec<u8>,
}

impl Kv {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { client: client.clone(), key }
    }

    /// The value, if there is one.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn get(&self) -> Result<Option<Vec<u8>>, Error> {
        let request = Request::Query(Query::Kv { key: &self.key });
        self.client.ask(&self.key, &request).await?.value(request.op().name())
    }

    /// Sets the value, for ever or for a time.
    ///
    /// # Errors
    ///
    /// If the value can not be sent, or the server refuses or can not be asked.
    pub async fn set(&self, value: &[u8], ttl: Option<Duration>) -> Result<(), Error> {
        check_kv(value)?;
        let request =
            Request::command(command::KvSet { key: &self.key, value, ttl: ttl.map(Span::from) });
        self.client.ask(&self.key, &request).await?.done(request.op().name())
    }

    /// Deletes the value.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn delete(&self) -> Result<(), Error> {
        let request = Request::command(command::KvDelete { key: &self.key });
        self.client.ask(&self.key, &request).await?.done(request.op().name())
    }

    /// Sets the value if the present one is `old` (none: if there is none). False if it is not.
    ///
    /// # Errors
    ///
    /// If a value can not be sent, or the server refuses or can not be asked.
    pub async fn compare_and_set(
        &self,
        old: Option<&[u8]>,
        new: &[u8],
        ttl: Option<Duration>,
    ) -> Result<bool, Error> {
        check_kv(new)?;
        old.map(check_kv).transpose()?;
        let (key, ttl) = (&self.key, ttl.map(Span::from));
        let expect = old.map_or(Expect::Absent, Expect::Value);
        let request = Request::command(command::KvCompareAndSet { key, expect, value: new, ttl });
        let reply = self.client.ask(&self.key, &request).await?;
        let is_conflict = matches!(reply, Reply::CasConflict);
        if is_conflict { Ok(false) } else { reply.done(request.op().name()).map(|()| true) }
    }
}

fn check_kv(value: &[u8]) -> Result<(), Error> {
    check_value(value)?;
    if value.contains(&b'\t') {
        return Err(Error::Invalid("a KV value has no TAB".to_owned()));
    }
    Ok(())
}

/// A list, used from both ends.
#[derive(Clone)]
pub struct List {
    client: Client,
    key: Vec<u8>,
}

impl List {
    pub(crate) fn new(client: &Client, key: Vec<u8>) -> Self {
        Self { client: client.clone(), key }
    }

    /// Puts an item at the left end; returns the length, 0 if somebody was waiting for it.
    ///
    /// # Errors
    ///
    /// If the item can not be sent, or the server refuses or can not be asked.
    pub async fn push_left(&self, value: &[u8]) -> Result<u64, Error> {
        self.push(End::Left, value).await
    }

    /// Puts an item at the right end; returns the length, 0 if somebody was waiting for it.
    ///
    /// # Errors
    ///
    /// If the item can not be sent, or the server refuses or can not be asked.
    pub async fn push_right(&self, value: &[u8]) -> Result<u64, Error> {
        self.push(End::Right, value).await
    }

    /// Takes an item from the left end.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn pop_left(&self) -> Result<Option<Vec<u8>>, Error> {
        self.pop(End::Left).await
    }

    /// Takes an item from the right end.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn pop_right(&self) -> Result<Option<Vec<u8>>, Error> {
        self.pop(End::Right).await
    }

    /// Takes an item from the left end, waiting for one if there is none.
    ///
    /// If the future is dropped in the instant an item is handed over, the item is put back.
    ///
    /// # Errors
    ///
    /// If the server refuses or can not be asked.
    pub async fn pop_left_wait(&self, wait: Duration) -> Result<Option<Vec<u8>>, Error> {
        self.pop_wait(End::Left, wait).await
    }

    /// Takes an item from the right end, waiting for one if there is none. See [`List::pop_left_wait`].
    ///
    /// # Errors
    ///
    /// If the server refuses or can not be asked.
    pub async fn pop_right_wait(&self, wait: Duration) -> Result<Option<Vec<u8>>, Error> {
        self.pop_wait(End::Right, wait).await
    }

    /// How many items there are.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    #[expect(clippy::len_without_is_empty, reason = "it is a question to the server")]
    pub async fn len(&self) -> Result<u64, Error> {
        let request = Request::Query(Query::Length { key: &self.key });
        self.client.ask(&self.key, &request).await?.count(request.op().name())
    }

    /// Items from `start` to `stop`, both included, negative ones counted from the right. Bytes that are no UTF-8
    /// come as U+FFFD.
    ///
    /// Servers answer with at most 1 MiB at a time. What has more comes in several answers, between which others may
    /// change the list.
    ///
    /// # Errors
    ///
    /// If the server can not be asked.
    pub async fn range(&self, start: i64, stop: i64) -> Result<Vec<String>, Error> {
        match self.range_at_once(start, stop).await {
            Err(Error::Refused(ErrorCode::TooLarge)) => self.range_in_parts(start, stop).await,
            answer => answer,
        }
    }

    async fn range_in_parts(&self, start: i64, stop: i64) -> Result<Vec<String>, Error> {
        let length = i64::try_from(self.len().await?).unwrap_or(i64::MAX);
        let from_left = |index: i64| if index < 0 { index.saturating_add(length) } else { index };
        let (mut next, stop) = (from_left(start).max(0), from_left(stop).min(length - 1));
        let mut items = Vec::new();
        let mut count = PART_ITEMS;
        while next <= stop {
            let last = next.saturating_add(count - 1).min(stop);
            match self.range_at_once(next, last).await {
                Ok(part) => {
                    let has_ended = part.is_empty();
                    next = next.saturating_add(i64::try_from(part.len()).unwrap_or(i64::MAX));
                    items.extend(part);
                    if has_ended {
                        break;
                    }
                }
                Err(Error::Refused(ErrorCode::TooLarge)) if count > 1 => count /= 2,
                Err(error) => return Err(error),
            }
        }
        Ok(items)
    }

    async fn range_at_once(&self, start: i64, stop: i64) -> Result<Vec<String>, Error> {
        let request = Request::Query(Query::Range { key: &self.key, start, stop });
        self.client.ask(&self.key, &request).await?.json(request.op().name())
    }

    async fn push(&self, end: End, value: &[u8]) -> Result<u64, Error> {
        check_value(value)?;
        let request = Request::command(command::Push { key: &self.key, end, value });
        self.client.ask(&self.key, &request).await?.count(request.op().name())
    }

    async fn pop(&self, end: End) -> Result<Option<Vec<u8>>, Error> {
        let request = Request::command(command::Pop { key: &self.key, end, wait: None });
        self.client.ask(&self.key, &request).await?.value(request.op().name())
    }

    async fn pop_wait(&self, end: End, wait: Duration) -> Result<Option<Vec<u8>>, Error> {
        let wait = wait.min(Duration::from_secs(SECONDS_MAX));
        let request =
            Request::command(command::Pop { key: &self.key, end, wait: Some(wait.into()) });
        self.client.ask(&self.key, &request).await?.value(request.op().name())
    }
}

/// A barrier: all arrive, or none passes.
#[derive(Clone)]
pub struct Barrier {
    client: Client,
    key: Vec<u8>,
    count: u32,
}

impl Barrier {
    pub(crate) fn new(client: &Client, key: Vec<u8>, count: u32) -> Self {
        Self { client: client.clone(), key, count }
    }

    /// Arrives and waits for the others. False if the time is over or another participant left: then nobody passes.
    ///
    /// A session can take part once: two participants need two clients.
    ///
    /// # Errors
    ///
    /// If the server refuses or can not be asked.
    pub async fn wait(&self, wait: Duration) -> Result<bool, Error> {
        let wait = wait.min(Duration::from_secs(SECONDS_MAX));
        let request = Request::command(command::BarrierWait {
            key: &self.key,
            count: self.count,
            wait: wait.into(),
        });
        let reply = self.client.ask(&self.key, &request).await?;
        let is_over = matches!(reply, Reply::Timeout);
        if is_over { Ok(false) } else { reply.done(request.op().name()).map(|()| true) }
    }
}
