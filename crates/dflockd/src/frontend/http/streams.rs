//! Server-sent events: signals, changes of keys, leaders of elections.
//!
//! A task per stream collects what there is to tell; the body hands it on when the socket has room. Who reads too
//! slowly is cut off: nothing is left out in silence, and nothing is kept without end.

use std::convert::Infallible;
use std::future::Future;
use std::net::Ipv4Addr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Context;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{FromRequestParts, State};
use axum::http::header::{CACHE_CONTROL, CONTENT_TYPE};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use dflockd_core::{Change, Command, Outcome, Push, Revision, Subscription, check, command};
use dflockd_engine::Api;
use http_body::Frame;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, MissedTickBehavior, interval_at, sleep_until};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::answer::{self, Decimal};
use super::body::{self, Key, Query};
use super::error::ApiError;
use super::openapi_parts::{InKey, Refusals};
use super::sessions::Hidden;
use super::{Peer, Room, Shared, fields};
use crate::frontend::auth::{Asker, Pass, TokenKind};
use crate::frontend::caps::Permit;
use crate::frontend::feed::{Compacted, Follower};
use crate::frontend::giveback::PolledFrame;

/// How long a client may take to read what is written to it.
const WRITE_LIMIT: Duration = Duration::from_secs(30);
/// Text that may wait for a client that reads slowly. What is not written yet waits where it comes from: pushes are
/// counted for all streams of a connection together, changes have their place in the history.
const UNSENT_BYTES_MAX: usize = 64 * 1024;

pub(crate) fn routes() -> OpenApiRouter<Shared> {
    OpenApiRouter::new().routes(routes!(listen)).routes(routes!(watch)).routes(routes!(observe))
}

/// Ends the connection of a client that does not read. Its listener waits for it.
#[derive(Clone, Default)]
pub(crate) struct Cut(Arc<Notify>);

impl Cut {
    /// Waits until the connection is to end.
    pub(crate) async fn made(&self) {
        self.0.notified().await;
    }

    fn make(&self) {
        self.0.notify_one();
    }
}

impl FromRequestParts<Shared> for Cut {
    type Rejection = ApiError;

    async fn from_request_parts(parts: &mut Parts, _: &Shared) -> Result<Self, ApiError> {
        Ok(parts.extensions.get::<Self>().cloned().unwrap_or_default())
    }
}

/// Which signals.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct Listen {
    /// A channel, or a pattern: at most 16 tokens between dots, `*` for one token, `>` for all that
    /// follow.
    #[param(required = true, value_type = String, min_length = 1, max_length = 256, pattern = r"^\S+$")]
    pattern: Option<String>,
    /// Each signal goes to one member of the group. Blanks around its name do not count.
    #[param(max_length = 256, pattern = r"^[^\r\n]*$")]
    group: Option<String>,
}

/// Which changes.
#[derive(Deserialize, utoipa::IntoParams)]
#[into_params(parameter_in = Query)]
struct Watch {
    /// A key, or a pattern: at most 16 tokens between dots, `*` for one token, `>` for all that
    /// follow.
    #[param(required = true, value_type = String, min_length = 1, max_length = 256, pattern = r"^\S+$")]
    pattern: Option<String>,
    /// Also the changes after this revision. `Last-Event-ID` goes before it.
    #[param(pattern = "^[0-9]{1,20}$")]
    after: Option<String>,
}

/// Signals as server-sent events: `event: sig`, `data: {"channel":"...","payload":"..."}`.
#[utoipa::path(
    get,
    path = "/v1/signals",
    tag = "signals",
    params(Listen),
    responses(
        (status = 200, description = "Events until one side ends it.", body = String,
            content_type = "text/event-stream"),
        Refusals
    )
)]
async fn listen(
    State(app): State<Shared>,
    peer: Peer,
    asker: Asker,
    room: Room,
    cut: Cut,
    Query(query): Query<Listen>,
) -> Result<Response, ApiError> {
    let pattern = check::pattern(required(query.pattern.as_deref())?.as_bytes())?;
    let group = query.group.unwrap_or_default();
    let group = check::group(group.as_bytes())?;
    let session = app.hidden(peer, &room, &format!("signals {}", peer.0))?;
    subscribe(&asker, &session, Subscription::Signals { pattern, group }).await?;
    Ok(stream(&app, peer, cut, Pushes(session)))
}

/// News of an election as server-sent events: `event: leader`, `data: {"event":"elected","key":"..."}`.
#[utoipa::path(
    get,
    path = "/v1/elections/{key}/events",
    tag = "elections",
    params(InKey),
    responses(
        (status = 200, description = "`elected`, `resigned` or `failover`, until one side ends it.", body = String,
            content_type = "text/event-stream"),
        Refusals
    )
)]
async fn observe(
    State(app): State<Shared>,
    peer: Peer,
    asker: Asker,
    room: Room,
    cut: Cut,
    key: Key,
) -> Result<Response, ApiError> {
    let session = app.hidden(peer, &room, &format!("observer {}", peer.0))?;
    subscribe(&asker, &session, Subscription::Leaders { key: &key }).await?;
    Ok(stream(&app, peer, cut, Pushes(session)))
}

/// Changes of keys as server-sent events: `id: 7`, `event: change`,
/// `data: {"revision":"7","event":"acquire","key":"..."}`. `event: compacted` says that changes up to its revision are
/// no longer kept.
#[utoipa::path(
    get,
    path = "/v1/watch",
    tag = "watch",
    params(
        Watch,
        ("Last-Event-ID" = Option<String>, Header, description = "The last revision that was seen.",
            pattern = "^[0-9]{1,20}$")
    ),
    responses(
        (status = 200, description = "Events until one side ends it.", body = String,
            content_type = "text/event-stream"),
        Refusals
    )
)]
async fn watch(
    State(app): State<Shared>,
    peer: Peer,
    asker: Asker,
    cut: Cut,
    headers: HeaderMap,
    Query(query): Query<Watch>,
) -> Result<Response, ApiError> {
    let pattern = check::pattern(required(query.pattern.as_deref())?.as_bytes())?;
    let seen = match headers.get("last-event-id") {
        Some(id) => Some(id.to_str().map_err(|_| ApiError::bad_request("a revision is a number"))?),
        None => query.after.as_deref(),
    };
    let mut after = seen.map(fields::revision).transpose()?;
    let pattern = asker.pattern(pattern)?;
    let permit = app.sessions.permit(peer.0)?;
    let lost = app.service.feed.not_reached(after);
    after = lost.or(after);
    let follow = app.service.feed.follow(pattern, 1, after);
    let follower = follow.await.map_err(ApiError::refused)?;
    let changes = Changes { follower, lost, _permit: permit };
    Ok(stream(&app, peer, cut, changes))
}

fn required(pattern: Option<&str>) -> Result<&str, ApiError> {
    pattern.ok_or_else(|| ApiError::bad_request("pattern required"))
}

async fn subscribe(asker: &Asker, session: &Hidden, to: Subscription<'_>) -> Result<(), ApiError> {
    let subscribe = asker.command(Command::Subscribe(command::Subscribe { to }))?;
    let answer = session.call(subscribe).await?;
    let outcome = answer.outcome();
    if *outcome == Outcome::Done { Ok(()) } else { Err(answer::refused(outcome)) }
}

/// Where events come from.
trait Source: Send + 'static {
    /// Waits for the next ones and writes them; false if there will be none. May be dropped and called again.
    fn next(&mut self, text: &mut Vec<u8>) -> impl Future<Output = bool> + Send;

    /// Waits until something had to be left out, because too much waits already.
    fn overrun(&mut self) -> impl Future<Output = ()> + Send;

    /// What a sign of life says.
    fn ping(&self, text: &mut Vec<u8>);
}

/// What a session is told.
struct Pushes(Hidden);

impl Source for Pushes {
    async fn next(&mut self, text: &mut Vec<u8>) -> bool {
        match self.0.pushed().await {
            Some(Push::Signal { channel, payload }) => {
                let (channel, payload) = (lossy(&channel), lossy(&payload));
                event(text, "sig", &Signal { channel: &channel, payload: &payload });
                true
            }
            Some(Push::Leader { event: what, key }) => {
                event(text, "leader", &Leader { event: what.name(), key: &lossy(&key) });
                true
            }
            // Asked for by nobody.
            Some(Push::Change(_) | Push::Lost { .. }) => true,
            None => false,
        }
    }

    fn ping(&self, text: &mut Vec<u8>) {
        text.extend_from_slice(b":ping\n\n");
    }

    async fn overrun(&mut self) {
        self.0.gone().await;
    }
}

/// Changes of keys.
struct Changes {
    follower: Follower,
    /// Changes up to this one can not be told, and the client does not know it yet.
    lost: Option<Revision>,
    _permit: Permit,
}

impl Source for Changes {
    async fn next(&mut self, text: &mut Vec<u8>) -> bool {
        if let Some(gone) = self.lost.take() {
            event(text, "compacted", &CompactedBody { revision: Decimal(gone.0) });
            return true;
        }
        match self.follower.next().await {
            Ok(changes) => {
                for change in changes {
                    text.extend_from_slice(format!("id: {}\n", change.revision.0).as_bytes());
                    event(text, "change", &ChangeBody::from(&change));
                }
            }
            Err(Compacted(gone)) => {
                self.follower.skip_to(gone);
                event(text, "compacted", &CompactedBody { revision: Decimal(gone.0) });
            }
        }
        true
    }

    /// Also says how far it is, so that a client that comes back does not ask for what did not concern it.
    fn ping(&self, text: &mut Vec<u8>) {
        let Revision(seen) = self.follower.revision();
        text.extend_from_slice(format!("id: {seen}\n:ping\n\n").as_bytes());
    }

    /// A follower has a place in the history and needs no queue.
    async fn overrun(&mut self) {
        std::future::pending().await
    }
}

#[derive(Serialize)]
struct Signal<'a> {
    channel: &'a str,
    payload: &'a str,
}

#[derive(Serialize)]
struct Leader<'a> {
    event: &'a str,
    key: &'a str,
}

/// The last event of a stream whose token is no longer valid.
#[derive(Serialize)]
struct Unauthorized {
    error: &'static str,
}

#[derive(Serialize)]
struct CompactedBody {
    revision: Decimal,
}

/// A change of a key.
#[derive(Serialize, utoipa::ToSchema)]
#[schema(as = Change)]
pub(super) struct ChangeBody {
    /// The revision it made.
    #[schema(value_type = String, pattern = "^[0-9]+$")]
    revision: Decimal,
    /// What happened: `acquire`, `release`, `kset` and so on.
    #[schema(value_type = String, example = "acquire")]
    event: &'static str,
    /// To which key.
    key: String,
}

impl From<&Change> for ChangeBody {
    fn from(change: &Change) -> Self {
        Self {
            revision: Decimal(change.revision.0),
            event: change.event.name(),
            key: lossy(&change.key).into_owned(),
        }
    }
}

fn lossy(bytes: &[u8]) -> std::borrow::Cow<'_, str> {
    String::from_utf8_lossy(bytes)
}

/// One event. JSON has no line breaks of its own, so one `data:` is enough.
fn event(text: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    text.extend_from_slice(format!("event: {name}\ndata: ").as_bytes());
    text.extend_from_slice(&body::json_line(data));
    text.push(b'\n');
}

/// A stream of events. It ends with its source, its client or the server.
fn stream(app: &Shared, peer: Peer, cut: Cut, source: impl Source) -> Response {
    // What is not taken stays with the task, which counts it.
    let (sender, events) = mpsc::channel(1);
    tokio::spawn(feed(source, sender, Arc::clone(app), cut, peer.1));
    let mut response = Response::new(Body::new(Events(events)));
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    let unbuffered = HeaderName::from_static("x-accel-buffering");
    headers.insert(unbuffered, HeaderValue::from_static("no"));
    response
}

async fn feed(
    mut source: impl Source,
    sender: mpsc::Sender<Bytes>,
    app: Shared,
    cut: Cut,
    pass: Pass,
) {
    let ping = app.sse_ping;
    let pings = !ping.is_zero();
    let ping = ping.max(Duration::from_secs(1));
    let mut ping = interval_at(Instant::now() + ping, ping);
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let draining = app.service.drained();
    let revoked = app.service.auth.revoked(TokenKind::Client, pass);
    tokio::pin!(draining, revoked);
    let mut unsent = b":ok\n\n".to_vec();
    let mut fresh = Vec::new();
    let mut late_at = Instant::now() + WRITE_LIMIT;
    loop {
        let was_empty = unsent.is_empty();
        let has_room = unsent.len() < UNSENT_BYTES_MAX;
        tokio::select! {
            biased;
            () = sender.closed() => return,
            permit = sender.reserve(), if !was_empty => {
                let Ok(permit) = permit else { return };
                permit.send(std::mem::take(&mut unsent).into());
            }
            () = &mut draining => return,
            () = &mut revoked => {
                app.service.metrics.revoked(Api::Http);
                let mut why = Vec::new();
                event(&mut why, "unauthorized", &Unauthorized { error: "unauthorized" });
                // Who does not read learns it from the end of the stream.
                let _ = sender.try_send(why.into());
                return;
            }
            () = sleep_until(late_at), if !was_empty => break,
            more = next(&mut source, &mut fresh, has_room) => match more {
                Some(true) => unsent.append(&mut fresh),
                Some(false) => return,
                None => break,
            },
            _ = ping.tick(), if pings && was_empty => source.ping(&mut unsent),
        }
        if was_empty && !unsent.is_empty() {
            late_at = Instant::now() + WRITE_LIMIT;
        }
    }
    let kind = "closed: an event stream is read too slowly";
    if let Some(suppressed) = app.service.log_budget.admit(Ipv4Addr::UNSPECIFIED.into(), kind) {
        tracing::warn!(suppressed, "{kind}");
    }
    app.service.metrics.slow_reader(Api::Http);
    cut.make();
}

/// Whether there are more events; without room for them, none when one had to be left out.
async fn next(source: &mut impl Source, text: &mut Vec<u8>, has_room: bool) -> Option<bool> {
    if has_room {
        return Some(source.next(text).await);
    }
    source.overrun().await;
    None
}

/// The body of a stream.
struct Events(mpsc::Receiver<Bytes>);

impl http_body::Body for Events {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<Infallible> {
        self.0.poll_recv(cx).map(|text| text.map(|text| Ok(Frame::data(text))))
    }
}
