//! Counters, key-value entries, lists, barriers, and the sending of signals.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that a request does not hope for is refused alike"
)]

use std::borrow::Cow;

use axum::extract::FromRequestParts;
use axum::http::HeaderMap;
use axum::http::request::Parts;
use axum::response::Response;
use dflockd_core::{Bytes, Command, End, Expect, Outcome, Query, Refusal, Span, check, command};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{self, Decimal, StatusBody};
use super::body::{self, Json, Key, reply};
use super::error::ApiError;
use super::openapi_parts::{
    BarrierConflict, CounterConflict, InKey, ListConflict, MayNeedSession, NeedsSession, Refusals,
    SessionGone,
};
use super::sessions::InSession;
use super::{App, Peer, Room, Shared, fields};
use crate::frontend::auth::Asker;
use crate::frontend::caller::{Answer, SessionEnded};
use crate::report;
use crate::service::ANSWER_BYTES_MAX;

/// Items of a list that may be asked for at a time.
const ITEMS_MAX: usize = 10_000;
/// Items of a list that are written down at once on a thread that serves others as well.
const ITEMS_BYTES_AT_ONCE: usize = 16 * 1024;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new()
        .routes(routes!(get_counter, set_counter))
        .routes(routes!(add_counter))
        .routes(routes!(get_entry, put_entry, delete_entry))
        .routes(routes!(push))
        .routes(routes!(pop))
        .routes(routes!(range))
        .routes(routes!(length))
        .routes(routes!(meet))
        .routes(routes!(publish))
}

/// Who asks for something that needs no session.
struct InCommon {
    app: Shared,
    asker: Asker,
}

impl FromRequestParts<Shared> for InCommon {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, app: &Shared) -> Result<Self, ApiError> {
        let asker = Asker::from_request_parts(parts, app).await?;
        Ok(Self { app: Shared::clone(app), asker })
    }
}

impl InCommon {
    /// Executes a command. Nobody can withdraw it.
    async fn call(&self, command: Command<'_>) -> Result<Answer, ApiError> {
        // The session was the server's own, so its end is nothing the client could understand.
        let answer = self.app.common().call(self.asker.command(command)?).await;
        answer.map_err(|SessionEnded| ApiError::refused(Refusal::Forgotten))
    }

    /// Answers a read.
    async fn query(&self, query: Query<'_>) -> Result<Outcome, ApiError> {
        let query = self.asker.query(query)?;
        match self.app.common().query(query).await {
            Ok(outcome) => Ok(outcome),
            Err(SessionEnded) => {
                let again = self.app.common().query(query).await;
                again.map_err(|SessionEnded| ApiError::unavailable())
            }
        }
    }
}

// ---- Counters ----

/// A counter.
#[derive(Serialize, ToSchema)]
struct Counter {
    /// Its value. Programs whose numbers have 53 bits read `value_s`.
    value: i64,
    /// The value as a string.
    #[schema(value_type = String, pattern = "^-?[0-9]+$")]
    value_s: String,
}

impl Counter {
    fn reply(value: i64) -> Response {
        reply(&Self { value, value_s: value.to_string() })
    }
}

/// What is added to a counter.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Add {
    /// May be negative.
    delta: i64,
}

/// What a counter is set to.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct SetCounter {
    /// Its new value.
    value: i64,
}

/// The value of a counter; 0 if nobody has touched it.
#[utoipa::path(
    get,
    path = "/v1/counters/{key}",
    tag = "counters",
    params(InKey),
    responses((status = 200, description = "Its value.", body = Counter), Refusals)
)]
async fn get_counter(common: InCommon, key: Key) -> Result<Response, ApiError> {
    let outcome = common.query(Query::Counter { key: &key }).await?;
    answer::number(&outcome).map(Counter::reply)
}

/// Sets a counter.
#[utoipa::path(
    put,
    path = "/v1/counters/{key}",
    tag = "counters",
    params(InKey),
    request_body = SetCounter,
    responses((status = 200, description = "Its new value.", body = Counter), Refusals)
)]
async fn set_counter(
    common: InCommon,
    key: Key,
    Json(SetCounter { value }): Json<SetCounter>,
) -> Result<Response, ApiError> {
    let answer = common.call(Command::CounterSet(command::CounterSet { key: &key, value })).await?;
    match answer.outcome() {
        Outcome::Done => Ok(Counter::reply(value)),
        other => Err(answer::refused(other)),
    }
}

/// Adds to a counter.
#[utoipa::path(
    post,
    path = "/v1/counters/{key}/add",
    tag = "counters",
    params(InKey),
    request_body = Add,
    responses((status = 200, description = "Its new value.", body = Counter), CounterConflict, Refusals)
)]
async fn add_counter(
    common: InCommon,
    key: Key,
    Json(Add { delta }): Json<Add>,
) -> Result<Response, ApiError> {
    // Who watches is told whether it went up or down.
    let (delta, decrement) = match delta.checked_neg() {
        Some(less) if delta < 0 => (less, true),
        Some(_) | None => (delta, false),
    };
    let answer = common.call(Command::Add(command::Add { key: &key, delta, decrement })).await?;
    answer::number(answer.outcome()).map(Counter::reply)
}

// ---- Key-value entries ----

/// An entry. If there is none, only the status.
#[derive(Serialize, ToSchema)]
struct Entry<'a> {
    /// `ok` or `empty`.
    #[schema(value_type = String, example = "ok")]
    status: &'static str,
    /// Its value; what is no UTF-8 shows as U+FFFD.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    value: Option<Cow<'a, str>>,
    /// The revision of its last change, for `if_revision`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    revision: Option<Decimal>,
}

/// A new value, and on which condition it is set: at most one of `if_revision`, `if_value`, `if_absent`.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct PutEntry {
    /// The value: not empty, no TAB, CR or LF.
    #[schema(min_length = 1, pattern = "^[^\\t\\r\\n]+$")]
    value: String,
    /// Time to live; 0 or nothing: for ever.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    ttl_s: Option<u64>,
    /// Time to live in milliseconds; instead of `ttl_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    ttl_ms: Option<u64>,
    /// Only if the entry was last changed at this revision.
    #[schema(pattern = "^[0-9]{1,20}$")]
    if_revision: Option<String>,
    /// Only if the entry has this value.
    #[schema(min_length = 1, pattern = "^[^\\t\\r\\n]+$")]
    if_value: Option<String>,
    /// Only if there is no entry.
    if_absent: Option<bool>,
}

/// What became of a put.
#[derive(Serialize, ToSchema)]
struct Put {
    /// `ok`, or `cas_conflict` if the entry was not as expected.
    #[schema(value_type = String, example = "ok")]
    status: &'static str,
    /// The entry's revision now.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, pattern = "^[0-9]+$")]
    revision: Option<Decimal>,
}

impl PutEntry {
    fn expected(&self) -> Result<Option<Expect<'_>>, ApiError> {
        let absent = self.if_absent == Some(true);
        match (&self.if_revision, &self.if_value, absent) {
            (None, None, false) => Ok(None),
            (Some(revision), None, false) => {
                fields::revision(revision).map(|revision| Some(Expect::Revision(revision)))
            }
            (None, Some(value), false) => Ok(Some(Expect::Value(check::entry(value.as_bytes())?))),
            (None, None, true) => Ok(Some(Expect::Absent)),
            (Some(_), Some(_), _) | (Some(_), _, true) | (_, Some(_), true) => {
                Err(ApiError::bad_request("at most one condition"))
            }
        }
    }
}

/// An entry.
#[utoipa::path(
    get,
    path = "/v1/kv/{key}",
    tag = "kv",
    params(InKey),
    responses((status = 200, description = "The entry, or that there is none.", body = Entry<'_>), Refusals)
)]
async fn get_entry(common: InCommon, room: Room, key: Key) -> Result<Response, ApiError> {
    let reading = async {
        match common.query(Query::Entry { key: &key }).await? {
            Outcome::Entry { value, revision } => Ok(body::json_line(&Entry {
                status: "ok",
                value: Some(text(&value)),
                revision: Some(Decimal(revision.0)),
            })),
            Outcome::Empty => {
                Ok(body::json_line(&Entry { status: "empty", value: None, revision: None }))
            }
            other => Err(answer::refused(&other)),
        }
    };
    room.read(common.app.service.value_bytes_max, reading).await
}

/// Sets an entry, if it is as expected.
#[utoipa::path(
    put,
    path = "/v1/kv/{key}",
    tag = "kv",
    params(InKey),
    request_body = PutEntry,
    responses((status = 200, description = "Set, or not as expected.", body = Put), Refusals)
)]
async fn put_entry(
    common: InCommon,
    key: Key,
    Json(body): Json<PutEntry>,
) -> Result<Response, ApiError> {
    let (key, value) = (&*key, check::entry(body.value.as_bytes())?);
    let ttl = fields::lasting(body.ttl_s, body.ttl_ms)?;
    let command = match body.expected()? {
        None => Command::KvSet(command::KvSet { key, value, ttl }),
        Some(expect) => {
            Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl })
        }
    };
    let answer = common.call(command).await?;
    match answer.outcome() {
        Outcome::Written(revision) => {
            Ok(reply(&Put { status: "ok", revision: Some(Decimal(revision.0)) }))
        }
        Outcome::Conflict => Ok(reply(&Put { status: "cas_conflict", revision: None })),
        other => Err(answer::refused(other)),
    }
}

/// Deletes an entry, if there is one.
#[utoipa::path(
    delete,
    path = "/v1/kv/{key}",
    tag = "kv",
    params(InKey),
    responses((status = 204, description = "There is none now."), Refusals)
)]
async fn delete_entry(common: InCommon, key: Key) -> Result<Response, ApiError> {
    let answer = common.call(Command::KvDelete(command::KvDelete { key: &key })).await?;
    answer::done(answer.outcome())
}

// ---- Lists ----

/// One end of a list.
#[derive(Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
enum ListEnd {
    Left,
    Right,
}

impl From<ListEnd> for End {
    fn from(end: ListEnd) -> Self {
        match end {
            ListEnd::Left => Self::Left,
            ListEnd::Right => Self::Right,
        }
    }
}

/// An item for a list.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Push {
    /// The item: not empty, no CR, no LF.
    #[schema(min_length = 1, pattern = "^[^\\r\\n]+$")]
    value: String,
    /// Where it goes; right if nothing is said.
    end: Option<ListEnd>,
}

/// What to take from a list.
#[derive(Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Pop {
    /// From where; left if nothing is said.
    end: Option<ListEnd>,
    /// How long to wait for an item; more than 0 needs a session.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    timeout_s: Option<u64>,
    /// How long to wait, in milliseconds; instead of `timeout_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    timeout_ms: Option<u64>,
}

/// The length of a list.
#[derive(Serialize, ToSchema)]
struct Length {
    length: i64,
}

/// An item, or only that there was none.
#[derive(Serialize, ToSchema)]
struct Popped<'a> {
    /// `ok` or `empty`.
    #[schema(value_type = String, example = "ok")]
    status: &'static str,
    /// The item; what is no UTF-8 shows as U+FFFD.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    value: Option<Cow<'a, str>>,
}

/// Items of a list, as many as fit into one answer of 1 MiB.
#[derive(Serialize, ToSchema)]
struct Items<'a> {
    /// In order; what is no UTF-8 shows as U+FFFD.
    #[schema(value_type = Vec<String>)]
    items: Vec<Cow<'a, str>>,
    /// What to ask for as `start` to get the others; absent if there are none.
    #[serde(skip_serializing_if = "Option::is_none")]
    next: Option<i64>,
}

/// Which items: both bounds are included, negative ones count from the end.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct Bounds {
    /// The first; 0 if nothing is said.
    start: Option<i64>,
    /// The last; -1 if nothing is said.
    stop: Option<i64>,
    /// How many at most; as many as fit if nothing is said.
    #[param(minimum = 1, maximum = 10000)]
    limit: Option<u64>,
}

/// Puts an item at one end of a list, or hands it to whoever waits for one.
#[utoipa::path(
    post,
    path = "/v1/lists/{key}/push",
    tag = "lists",
    params(InKey),
    request_body = Push,
    responses(
        (status = 200, description = "The length; 0 if the item was handed over.", body = Length),
        ListConflict,
        Refusals
    )
)]
async fn push(common: InCommon, key: Key, Json(body): Json<Push>) -> Result<Response, ApiError> {
    let (end, value) =
        (body.end.map_or(End::Right, End::from), check::value(body.value.as_bytes())?);
    let answer = common.call(Command::Push(command::Push { key: &key, end, value })).await?;
    Ok(reply(&Length { length: answer::number(answer.outcome())? }))
}

/// Takes an item from one end of a list; with a timeout a long poll.
#[utoipa::path(
    post,
    path = "/v1/lists/{key}/pop",
    tag = "lists",
    params(InKey, MayNeedSession),
    request_body = Option<Pop>,
    responses(
        (status = 200, description = "An item, or that there was none.", body = Popped<'_>),
        SessionGone,
        Refusals
    )
)]
async fn pop(
    common: InCommon,
    key: Key,
    peer: Peer,
    headers: HeaderMap,
    body: Option<Json<Pop>>,
) -> Result<Response, ApiError> {
    let body = body.map_or_else(Pop::default, |Json(body)| body);
    let end = body.end.map_or(End::Left, End::from);
    let wait = fields::wait(body.timeout_s, body.timeout_ms)?;
    let command = |wait| Command::Pop(command::Pop { key: &key, end, wait });
    let answer = if wait > Span::ZERO {
        let session = common.app.session(&headers, peer).await?;
        let claim = session.claim().await?;
        claim.call(command(Some(wait))).await?
    } else {
        common.call(command(None)).await?
    };
    let told = match answer.outcome() {
        // Cheap to share, and the answer is about to move.
        Outcome::Popped { value, .. } => Some(value.clone()),
        Outcome::Empty | Outcome::Timeout => None,
        other => return Err(answer::refused(other)),
    };
    let status = if told.is_some() { "ok" } else { "empty" };
    Ok(answer::giving(answer, &Popped { status, value: told.as_ref().map(text) }))
}

/// Items of a list.
#[utoipa::path(
    get,
    path = "/v1/lists/{key}",
    tag = "lists",
    params(InKey, Bounds),
    responses((status = 200, description = "The items.", body = Items<'_>), Refusals)
)]
async fn range(
    common: InCommon,
    room: Room,
    key: Key,
    body::Query(bounds): body::Query<Bounds>,
) -> Result<Response, ApiError> {
    let (start, stop) = (bounds.start.unwrap_or(0), bounds.stop.unwrap_or(-1));
    let limit = check::page(bounds.limit, ITEMS_MAX, ITEMS_MAX)?;
    let limit = if bounds.limit.is_some() { limit } else { usize::MAX };
    let reading = async {
        let (items, all) = common.items(&key, start, stop).await?;
        let first = (start >= 0).then_some(start);
        if let Some(text) = common.app.page(items, all, first, limit).await? {
            return Ok(text);
        }
        // Where this is from the left end, the only place that can be named for the next page.
        let first = start.saturating_add(common.length(&key).await?).max(0);
        let (items, all) = common.items(&key, first, stop).await?;
        common.app.page(items, all, Some(first), limit).await?.ok_or_else(ApiError::internal)
    };
    room.read(ANSWER_BYTES_MAX, reading).await
}

impl InCommon {
    /// Items of a list, or the first of them; whether these are all.
    async fn items(
        &self,
        key: &[u8],
        start: i64,
        stop: i64,
    ) -> Result<(Vec<Bytes>, bool), ApiError> {
        match self.query(Query::Range { key, start, stop }).await? {
            Outcome::Items(items) => Ok((items, true)),
            Outcome::Part(items) => Ok((items, false)),
            other => Err(answer::refused(&other)),
        }
    }

    async fn length(&self, key: &[u8]) -> Result<i64, ApiError> {
        answer::number(&self.query(Query::Length { key }).await?)
    }
}

impl App {
    /// The JSON of items, made elsewhere if they are many; none if not all of them fit and it is not known where the
    /// first is.
    async fn page(
        &self,
        items: Vec<Bytes>,
        all: bool,
        first: Option<i64>,
        limit: usize,
    ) -> Result<Option<Vec<u8>>, ApiError> {
        let many = items.iter().map(|item| item.len()).sum::<usize>() > ITEMS_BYTES_AT_ONCE;
        let page = move || print_page(&items, all, first, limit);
        if !many {
            return Ok(page());
        }
        self.service.looks.wait(page).await.ok_or_else(ApiError::internal)
    }
}

fn print_page(items: &[Bytes], all: bool, first: Option<i64>, limit: usize) -> Option<Vec<u8>> {
    let count = fitting(items, limit);
    let next = if all && count == items.len() {
        None
    } else {
        Some(first?.saturating_add(i64::try_from(count).unwrap_or(i64::MAX)))
    };
    Some(body::json_line(&Items { items: items[..count].iter().map(text).collect(), next }))
}

/// How many of the first items fit into one answer; at least one. In JSON a byte can have six.
fn fitting(items: &[Bytes], limit: usize) -> usize {
    let mut bytes = 0;
    let fits = |(index, item): &(usize, &Bytes)| {
        bytes += report::json_bytes(&text(item)) + ",".len();
        bytes <= ANSWER_BYTES_MAX || *index == 0
    };
    items.iter().take(limit).enumerate().take_while(fits).count()
}

/// The length of a list.
#[utoipa::path(
    get,
    path = "/v1/lists/{key}/length",
    tag = "lists",
    params(InKey),
    responses((status = 200, description = "0 if there is no such list.", body = Length), Refusals)
)]
async fn length(common: InCommon, key: Key) -> Result<Response, ApiError> {
    Ok(reply(&Length { length: common.length(&key).await? }))
}

// ---- Barriers ----

/// How many must meet, and how long to wait for them.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Meet {
    /// How many must arrive. All name the same number.
    #[schema(required = true, value_type = i64, minimum = 1, maximum = 1048576)]
    count: Option<i64>,
    /// 0 or nothing: only if this is the last one to arrive.
    #[schema(minimum = 0, maximum = 9223372036_i64)]
    timeout_s: Option<u64>,
    /// How long to wait, in milliseconds; instead of `timeout_s`.
    #[schema(minimum = 0, maximum = 9223372036000_i64)]
    timeout_ms: Option<u64>,
}

/// Arrives at a barrier and waits for the others: a long poll.
#[utoipa::path(
    post,
    path = "/v1/barriers/{key}/wait",
    tag = "barriers",
    operation_id = "wait_barrier",
    params(InKey, NeedsSession),
    request_body = Meet,
    responses(
        (status = 200, description = "`ok`: all are there. `timeout`: they did not come.", body = StatusBody),
        BarrierConflict,
        SessionGone,
        Refusals
    )
)]
async fn meet(
    key: Key,
    InSession(session): InSession,
    Json(body): Json<Meet>,
) -> Result<Response, ApiError> {
    let wait = fields::wait(body.timeout_s, body.timeout_ms)?;
    let count = fields::count(body.count)?;
    let claim = session.claim().await?;
    let answer =
        claim.call(Command::BarrierWait(command::BarrierWait { key: &key, count, wait })).await?;
    match answer.outcome() {
        Outcome::Done => Ok(reply(&StatusBody { status: "ok" })),
        Outcome::Timeout => Ok(reply(&StatusBody { status: "timeout" })),
        other => Err(answer::refused(other)),
    }
}

// ---- Signals ----

/// The `{channel}` of the path.
struct Channel(Vec<u8>);

impl FromRequestParts<Shared> for Channel {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        let channel = body::segment(parts, "{channel}")?;
        check::channel(&channel)?;
        Ok(Self(channel))
    }
}

/// What listeners get.
#[derive(Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
struct Publish {
    /// Not blank, no CR, no LF, below 64 KiB.
    #[schema(min_length = 1, max_length = 65530, pattern = "^[^\\r\\n]*\\S[^\\r\\n]*$")]
    payload: String,
}

/// Who got it.
#[derive(Serialize, ToSchema)]
struct Published {
    /// How many listeners, in the whole cluster.
    delivered: i64,
}

/// Sends a signal to the listeners of a channel.
#[utoipa::path(
    post,
    path = "/v1/signals/{channel}",
    tag = "signals",
    params(("channel" = String, Path, description = "No wildcards.", min_length = 1, max_length = 256,
        pattern = r"^[^\s*>]+$")),
    request_body = Publish,
    responses((status = 200, description = "Sent.", body = Published), Refusals)
)]
async fn publish(
    common: InCommon,
    Channel(channel): Channel,
    Json(Publish { payload }): Json<Publish>,
) -> Result<Response, ApiError> {
    let payload = check::payload(&channel, payload.as_bytes())?;
    let answer =
        common.call(Command::Signal(command::Signal { channel: &channel, payload })).await?;
    Ok(reply(&Published { delivered: answer::number(answer.outcome())? }))
}

fn text(bytes: &Bytes) -> Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}
