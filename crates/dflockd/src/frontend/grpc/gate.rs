//! What every call passes before its service: token, and the state of the server. And what every answer passes: it is
//! counted, what it gives away is given back if nobody takes it, and it ends when the server does.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue, Request, Response as HttpResponse};
use bytes::Bytes;
use dflockd_engine::Api;
use dflockd_identity::Access;
use http_body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;
use prost::Message;
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Code, Response, Status};
use tower::Service;

use super::arriving::Arriving;
use super::error::Refused;
use super::sessions::Executed;
use super::usage::{InUse, Usage};
use super::{App, Peer};
use crate::frontend::admission::NotServed;
use crate::frontend::auth::{Asker, Denied, Origin, Pass, Revocable, WRONG_TOKEN_PAUSE};
use crate::frontend::budget::{Budget, PIECE_BYTES, Reserved};
use crate::frontend::giveback::{Gift, Giving, PolledFrame};
use crate::metrics::{GrpcMethod, Streams};

/// What who guesses tokens is told.
pub(super) const TOO_MANY: &str = "too many wrong tokens from this address";
/// Asked by machines that watch this one; always answered.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Says how the server is, whatever it does.
const CLUSTER: &str = "/dflockd.v1.Cluster/";
/// Describes the services.
const REFLECTION: &str = "/grpc.reflection.";
/// What was asked of this server, whoever leads.
const AUDIT: &str = "/dflockd.v1.Admin/Audit";

/// The services behind the gate.
#[derive(Clone)]
pub(super) struct CallService {
    app: Arc<App>,
    routes: Routes,
}

/// The room that an answer has taken, on its way to the gate.
#[derive(Clone)]
struct Held(Arc<Mutex<Reserved>>);

/// A message, whose room is free again when it was taken in.
pub(super) fn hold<T: Message>(mut room: Reserved, message: T) -> Response<T> {
    room.shrink_to(message.encoded_len());
    let mut response = Response::new(message);
    response.extensions_mut().insert(Held(Arc::new(Mutex::new(room))));
    response
}

/// Tells what a command came to.
pub(super) fn respond<T>(told: Executed, message: T) -> Response<T> {
    let mut response = Response::new(message);
    if let Executed::Answer(answer) = told
        && answer.gives()
    {
        response.extensions_mut().insert(Gift::new(answer));
    }
    response
}

impl CallService {
    /// Puts the gate around the services.
    pub(super) fn new(app: &Arc<App>, routes: Routes) -> Self {
        Self { app: Arc::clone(app), routes }
    }
}

impl Service<Request<Body>> for CallService {
    type Response = HttpResponse<GivingBody>;
    type Error = Infallible;
    type Future = Passing;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request<Body>) -> Passing {
        let begun = Instant::now();
        let method = GrpcMethod::of(request.uri().path());
        let in_use = request.extensions().get::<Usage>().map(Usage::begin);
        let budget = request.extensions().get::<Arc<Budget>>().cloned();
        let mut pass = Pass::OPEN;
        let step = match self.app.admit(&request, begun) {
            Ok(peer) => {
                pass = peer.1;
                request.extensions_mut().insert(peer);
                let deadline = patience(request.headers());
                let deadline = deadline.map(|left| Box::pin(tokio::time::sleep(left)));
                let request = match &budget {
                    Some(budget) => self.arriving(request, method, begun, budget),
                    None => request,
                };
                let request = match method.streams {
                    Streams::No | Streams::Yes | Streams::Health => request,
                    Streams::Reflection => self.until_drained(request),
                };
                Step::Route(self.routes.call(request), deadline)
            }
            Err(Turned::Away(refused)) => Step::Refused(Some(refused)),
            Err(Turned::AwayLater(refused)) => {
                let pause = Box::pin(tokio::time::sleep(WRONG_TOKEN_PAUSE));
                Step::Pause(pause, Some(refused))
            }
        };
        let drained = match method.streams {
            Streams::No | Streams::Health => None,
            Streams::Yes | Streams::Reflection => Some(drained(&self.app)),
        };
        let app = Arc::clone(&self.app);
        let call = Call { app, method, begun, code: Code::Cancelled, _in_use: in_use };
        let pass = Revocable::new(&self.app.service, Api::Grpc, pass);
        Passing { step, call: Some(call), drained, pass: Some(pass), budget }
    }
}

impl CallService {
    /// Lets the services see whole messages only.
    fn arriving(
        &self,
        request: Request<Body>,
        method: &GrpcMethod,
        begun: Instant,
        budget: &Arc<Budget>,
    ) -> Request<Body> {
        let since = (!method.client_streams).then_some(begun);
        let limit = Duration::from_nanos(self.app.service.read_timeout.0);
        let budget = Arc::clone(budget);
        request.map(|body| Body::new(Arriving::new(body, since, limit, budget)))
    }

    /// Lets the library that describes the services see the end of its client's stream when the server shuts down: as
    /// long as it reads, the connection stays.
    fn until_drained(&self, request: Request<Body>) -> Request<Body> {
        request.map(|body| Body::new(UntilDrained { body, drained: drained(&self.app) }))
    }
}

/// Ready when the server shuts down.
type Drained = Pin<Box<dyn Future<Output = ()> + Send>>;

fn drained(app: &Arc<App>) -> Drained {
    let app = Arc::clone(app);
    Box::pin(async move { app.drained().await })
}

/// A call that is counted when it ends.
struct Call {
    app: Arc<App>,
    method: &'static GrpcMethod,
    begun: Instant,
    /// How it ended. If nobody says, its client is gone.
    code: Code,
    /// Keeps the connection.
    _in_use: Option<InUse>,
}

impl Call {
    /// Notes how it ended, if these headers tell.
    fn note_status(&mut self, headers: &HeaderMap) {
        if let Some(code) = code_of(headers) {
            self.code = code;
        }
    }
}

/// How a call ended, if these headers tell.
fn code_of(headers: &HeaderMap) -> Option<Code> {
    headers.get(Status::GRPC_STATUS).map(|status| Code::from_bytes(status.as_bytes()))
}

impl Drop for Call {
    fn drop(&mut self) {
        let took = self.begun.elapsed();
        self.app.service.metrics.grpc_call(self.method, self.code, took);
    }
}

/// How long the client is going to wait, if it said so: at most eight digits and a unit.
fn patience(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get("grpc-timeout")?.to_str().ok()?;
    let (count, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    let is_number = matches!(count.len(), 1..=8) && count.bytes().all(|byte| byte.is_ascii_digit());
    let count: u32 = count.parse().ok().filter(|_| is_number)?;
    let unit = match unit {
        "H" => Duration::from_secs(3600),
        "M" => Duration::from_secs(60),
        "S" => Duration::from_secs(1),
        "m" => Duration::from_millis(1),
        "u" => Duration::from_micros(1),
        "n" => Duration::from_nanos(1),
        _ => return None,
    };
    Some(unit * count)
}

enum Turned {
    Away(Refused),
    /// After a pause.
    AwayLater(Refused),
}

impl App {
    /// Whether a call may go on to its service, and who makes it.
    fn admit(&self, request: &Request<Body>, now: Instant) -> Result<Peer, Turned> {
        let path = request.uri().path();
        let origin = request.extensions().get::<Origin>();
        let origin = origin.ok_or_else(|| Turned::Away(Refused::internal()))?;
        let mut peer = Peer(origin.address, Pass::OPEN);
        if path.starts_with(HEALTH) {
            return Ok(peer);
        }
        if let Some(limit) = &self.rate_limit
            && !limit.take(origin.address.into(), now.into_std())
        {
            let text = "too many calls from this address";
            return Err(Turned::Away(Refused::rate_limited(text)));
        }
        let admitted = self.service.admit_bearer(Api::Grpc, origin, request.headers());
        peer.1 = admitted.map_err(|denied| match denied {
            Denied::TooMany => Turned::Away(Refused::rate_limited(TOO_MANY)),
            Denied::Wrong | Denied::Disabled | Denied::Unaudited => {
                Turned::AwayLater(Refused::unauthenticated())
            }
        })?;
        if let Some(usage) = request.extensions().get::<Usage>() {
            usage.authenticate();
        }
        // A browser sends what a page wants as text or a form to any port, but must ask before it sends this type.
        let kind = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        if !kind.is_some_and(|kind| kind.starts_with(b"application/grpc")) {
            let refused = Refused::bad_request("the content type must be application/grpc");
            return Err(Turned::Away(refused));
        }
        let asker = Asker::new(&self.service, Api::Grpc, peer);
        asker.check(Access::OWN).map_err(|refusal| Turned::Away(refusal.into()))?;
        if path.starts_with(CLUSTER) || path.starts_with(REFLECTION) || path == AUDIT {
            return Ok(peer);
        }
        let served = self.service.check_served(self.service.redirects(false));
        served.map_err(|why| match why {
            NotServed::Draining => Turned::Away(Refused::draining()),
            NotServed::NotLeader(leader) => {
                Turned::Away(Refused::not_leader(leader.line.as_deref(), leader.grpc.as_deref()))
            }
        })?;
        Ok(peer)
    }
}

/// A call on its way to its answer.
pub(super) struct Passing {
    step: Step,
    /// Goes on to the body of the answer.
    call: Option<Call>,
    /// Ends the body of a call that streams when the server drains.
    drained: Option<Drained>,
    /// Ends the answer when the token of the call is dropped; goes on to the body.
    pass: Option<Revocable>,
    /// What the connection may cost; goes on to the body.
    budget: Option<Arc<Budget>>,
}

#[expect(clippy::large_enum_variant, reason = "nearly all calls go on to their service")]
enum Step {
    /// In its service, which the client waits for until then.
    Route(<Routes as Service<Request<Body>>>::Future, Option<Pin<Box<Sleep>>>),
    Pause(Pin<Box<Sleep>>, Option<Refused>),
    Refused(Option<Refused>),
}

impl Future for Passing {
    type Output = Result<HttpResponse<GivingBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let refused = match &mut this.step {
            Step::Route(route, deadline) => {
                if let Poll::Ready(Ok(response)) = Pin::new(route).poll(cx) {
                    // Its session went with the token, or it was granted what another one lost with it: what is not
                    // told is given back.
                    let is_gone = this.pass.as_mut().is_some_and(|pass| pass.is_gone());
                    let response = if is_gone {
                        Status::from(Refused::revoked()).into_http()
                    } else {
                        response
                    };
                    return Poll::Ready(Ok(this.answer(response)));
                }
                let is_late = deadline.as_mut().map(|deadline| deadline.as_mut().poll(cx));
                if this.pass.as_mut().is_some_and(|pass| pass.is_revoked(cx)) {
                    Some(Refused::revoked())
                } else if is_late.is_some_and(|late| late.is_ready()) {
                    Some(Refused::too_late())
                } else if is_over(&mut this.drained, cx) {
                    // Its client has not even said what it wants to hear.
                    Some(Refused::draining())
                } else {
                    return Poll::Pending;
                }
            }
            Step::Pause(pause, refused) => {
                std::task::ready!(pause.as_mut().poll(cx));
                refused.take()
            }
            Step::Refused(refused) => refused.take(),
        };
        let status = Status::from(refused.unwrap_or_else(Refused::internal));
        Poll::Ready(Ok(this.answer(status.into_http())))
    }
}

impl Passing {
    fn answer(&mut self, mut response: HttpResponse<Body>) -> HttpResponse<GivingBody> {
        let gift = response.extensions_mut().remove::<Gift>();
        let answer = gift.and_then(|gift| gift.take());
        let (mut call, drained) = (self.call.take(), self.drained.take());
        // Only a stream lasts longer than it takes to read it.
        let pass = self.pass.take().filter(|_| drained.is_some());
        if let Some(call) = &mut call {
            call.note_status(response.headers());
        }
        let held = response.extensions_mut().remove::<Held>();
        let room = held.map(|held| std::mem::take(&mut *held.0.lock()));
        let (budget, rest) = (self.budget.take(), Bytes::new());
        response.map(|body| GivingBody {
            body: Giving::new(body, answer),
            rest,
            call,
            drained,
            pass,
            budget,
            _room: room,
        })
    }
}

/// Whether a stream has to end.
fn is_over(drained: &mut Option<Drained>, cx: &mut Context<'_>) -> bool {
    drained.as_mut().is_some_and(|drained| drained.as_mut().poll(cx).is_ready())
}

/// The body of an answer. What it gives is given back unless the message is taken.
pub(super) struct GivingBody {
    body: Giving<Body>,
    /// Of a message whose beginning was handed on.
    rest: Bytes,
    call: Option<Call>,
    drained: Option<Drained>,
    pass: Option<Revocable>,
    budget: Option<Arc<Budget>>,
    /// What the answer has taken of it.
    _room: Option<Reserved>,
}

impl GivingBody {
    /// Ready when the connection takes more in. What is handed on before is kept by the protocol, without a limit for
    /// the connection.
    fn poll_room(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.budget.as_ref().map_or(Poll::Ready(()), |budget| budget.unsent.poll_room(cx))
    }

    /// The first piece of what there is to hand on.
    fn piece(&mut self, mut bytes: Bytes) -> Frame<Bytes> {
        let piece = bytes.split_to(bytes.len().min(PIECE_BYTES));
        self.rest = bytes;
        if let Some(budget) = &self.budget {
            budget.unsent.add(piece.len());
        }
        Frame::data(piece)
    }

    /// The last of a stream that ends because the server does, or its token is dropped.
    fn end(&mut self, why: Refused) -> Frame<Bytes> {
        self.rest = Bytes::new();
        self.body = Giving::new(Body::empty(), None);
        self.drained = None;
        self.pass = None;
        let mut trailers = HeaderMap::new();
        let status = Status::from(why);
        // It is refused only if it can not be written, and this can.
        let _ = status.add_header(&mut trailers);
        if let Some(call) = &mut self.call {
            call.code = status.code();
        }
        Frame::trailers(trailers)
    }

    /// Looks at what goes to the client. Whether a stream ends because the server does, and does not say so.
    fn note_end(&mut self, frame: &Frame<Bytes>) -> bool {
        let (Some(call), Some(trailers)) = (&mut self.call, frame.trailers_ref()) else {
            return false;
        };
        call.note_status(trailers);
        let is_mute = match call.method.streams {
            Streams::No | Streams::Yes => false,
            Streams::Health | Streams::Reflection => true,
        };
        is_mute && call.code == Code::Ok && call.app.service.is_draining()
    }
}

impl HttpBody for GivingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<Status> {
        let this = &mut *self;
        // Not even what was to be told before: whoever has the token now may not see it.
        if this.pass.as_mut().is_some_and(|pass| pass.is_revoked(cx)) {
            return Poll::Ready(Some(Ok(this.end(Refused::revoked()))));
        }
        if this.poll_room(cx).is_pending() {
            return Poll::Pending;
        }
        if !this.rest.is_empty() {
            let rest = std::mem::take(&mut this.rest);
            return Poll::Ready(Some(Ok(this.piece(rest))));
        }
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Ready(Some(Ok(frame))) => {
                let is_mute_end = this.note_end(&frame);
                let frame = if is_mute_end { this.end(Refused::draining()) } else { frame };
                let frame = match frame.into_data() {
                    Ok(bytes) => this.piece(bytes),
                    Err(trailers) => trailers,
                };
                Poll::Ready(Some(Ok(frame)))
            }
            // What was to be told before has been.
            Poll::Pending if is_over(&mut this.drained, cx) => {
                Poll::Ready(Some(Ok(this.end(Refused::draining()))))
            }
            other @ (Poll::Ready(_) | Poll::Pending) => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.rest.is_empty() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.rest.is_empty() { self.body.size_hint() } else { SizeHint::default() }
    }
}

/// What a client sends, up to the moment when the server shuts down.
struct UntilDrained {
    body: Body,
    drained: Drained,
}

impl HttpBody for UntilDrained {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> PolledFrame<Status> {
        let this = &mut *self;
        match Pin::new(&mut this.body).poll_frame(cx) {
            Poll::Pending if this.drained.as_mut().poll(cx).is_ready() => Poll::Ready(None),
            other @ (Poll::Ready(_) | Poll::Pending) => other,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_read_as_grpc_writes_it() {
        let read = |text: &'static str| {
            patience(&HeaderMap::from_iter([(
                "grpc-timeout".parse().unwrap(),
                text.parse().unwrap(),
            )]))
        };
        assert_eq!(read("200m"), Some(Duration::from_millis(200)));
        assert_eq!(read("99999999H"), Some(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(read("3M"), Some(Duration::from_secs(180)));
        assert_eq!(read("1S"), Some(Duration::from_secs(1)));
        assert_eq!(read("7u"), Some(Duration::from_micros(7)));
        assert_eq!(read("0n"), Some(Duration::ZERO));
        for wrong in ["", "m", "200", "+20m", "-1S", "123456789S", "1s", "1.5S", "1 S"] {
            assert_eq!(read(wrong), None, "{wrong:?}");
        }
        assert_eq!(patience(&HeaderMap::new()), None);
    }
}
