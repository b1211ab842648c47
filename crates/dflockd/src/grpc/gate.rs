//! What every call passes before its service: token, and the state of the server. And what every answer passes that
//! gives something away: if nobody takes it, that is given back.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::http::{HeaderMap, Request, Response as HttpResponse};
use bytes::Bytes;
use dflockd_engine::Door;
use http_body::{Body as HttpBody, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::time::{Instant, Sleep};
use tonic::body::Body;
use tonic::service::Routes;
use tonic::{Response, Status};
use tower::{Layer, Service};

use super::error::Refused;
use super::sessions::Told;
use super::{App, Peer};
use crate::caller::Answer;
use crate::config::FollowerMode;

/// Whoever guesses tokens has to wait this long for each answer.
pub(super) const WRONG_TOKEN_PAUSE: Duration = Duration::from_millis(100);
/// Asked by machines that watch this one; always answered.
const HEALTH: &str = "/grpc.health.v1.Health/";
/// Says how the server is, whatever it does.
const CLUSTER: &str = "/dflockd.v1.Cluster/";
/// Describes the services.
const REFLECTION: &str = "/grpc.reflection.";

/// Puts [`Gated`] around the services.
#[derive(Clone)]
pub(super) struct Gate(pub(super) Arc<App>);

/// The services behind the gate.
#[derive(Clone)]
pub(super) struct Gated {
    app: Arc<App>,
    routes: Routes,
}

/// An answer that gives something away, on its way to the gate.
#[derive(Clone)]
struct Gift(Arc<Mutex<Option<Answer>>>);

/// Tells what a command came to.
pub(super) fn tell<T>(told: Told, message: T) -> Response<T> {
    let mut response = Response::new(message);
    if let Told::Answer(answer) = told
        && answer.gives()
    {
        response.extensions_mut().insert(Gift(Arc::new(Mutex::new(Some(answer)))));
    }
    response
}

impl Layer<Routes> for Gate {
    type Service = Gated;

    fn layer(&self, routes: Routes) -> Gated {
        Gated { app: Arc::clone(&self.0), routes }
    }
}

impl Service<Request<Body>> for Gated {
    type Response = HttpResponse<GivingBody>;
    type Error = Infallible;
    type Future = Passing;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Passing {
        match self.app.admit(&request) {
            Ok(()) => {
                let deadline = patience(request.headers()).map(|left| Instant::now() + left);
                Passing::Route(self.routes.call(request), deadline)
            }
            Err(Turned::Away(refused)) => Passing::Refused(Some(refused)),
            Err(Turned::AwayLater(refused)) => {
                let pause = Box::pin(tokio::time::sleep(WRONG_TOKEN_PAUSE));
                Passing::Pause(pause, Some(refused))
            }
        }
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
    /// Whether a call may go on to its service.
    fn admit(&self, request: &Request<Body>) -> Result<(), Turned> {
        let path = request.uri().path();
        if path.starts_with(HEALTH) {
            return Ok(());
        }
        if !self.service.admits(request.headers()) {
            let peer = request.extensions().get::<Peer>().map(|peer| peer.0.to_string());
            tracing::warn!(peer, "authentication failed");
            self.service.metrics.auth_failed(Door::Grpc);
            return Err(Turned::AwayLater(Refused::unauthenticated()));
        }
        if path.starts_with(CLUSTER) || path.starts_with(REFLECTION) {
            return Ok(());
        }
        if self.service.is_draining() {
            return Err(Turned::Away(Refused::draining()));
        }
        let Some(member) = self.service.engine.replicated() else { return Ok(()) };
        let redirects = self.service.follower_mode == FollowerMode::Redirect;
        if !redirects && !member.is_witness() {
            return Ok(());
        }
        let view = member.view();
        if view.is_leader() && !member.is_witness() {
            return Ok(());
        }
        Err(Turned::Away(Refused::not_leader(view.leader_addr(), view.leader_grpc_addr())))
    }
}

/// A call on its way to its answer.
#[expect(clippy::large_enum_variant, reason = "nearly all calls go on to their service")]
pub(super) enum Passing {
    /// In its service, which the client waits for until then.
    Route(<Routes as Service<Request<Body>>>::Future, Option<Instant>),
    Pause(Pin<Box<Sleep>>, Option<Refused>),
    Refused(Option<Refused>),
}

impl Future for Passing {
    type Output = Result<HttpResponse<GivingBody>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let refused = match &mut *self {
            Self::Route(route, deadline) => {
                let answered = Pin::new(route).poll(cx).map_ok(|mut response| {
                    let gift = response.extensions_mut().remove::<Gift>();
                    let answer = gift.and_then(|gift| gift.0.lock().take());
                    response.map(|body| GivingBody { body, answer })
                });
                // The server around this has the same deadline and wakes for it, but would call it CANCELLED.
                if answered.is_ready() || deadline.is_none_or(|deadline| Instant::now() < deadline)
                {
                    return answered;
                }
                Some(Refused::too_late())
            }
            Self::Pause(pause, refused) => {
                std::task::ready!(pause.as_mut().poll(cx));
                refused.take()
            }
            Self::Refused(refused) => refused.take(),
        };
        let status = Status::from(refused.unwrap_or_else(Refused::internal));
        let response = status.into_http::<Body>();
        Poll::Ready(Ok(response.map(|body| GivingBody { body, answer: None })))
    }
}

/// The body of an answer. What it gives is given back unless the message is taken.
pub(super) struct GivingBody {
    body: Body,
    answer: Option<Answer>,
}

impl HttpBody for GivingBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let frame = std::task::ready!(Pin::new(&mut self.body).poll_frame(cx));
        if let Some(Ok(frame)) = &frame
            && frame.is_data()
            && let Some(answer) = self.answer.take()
        {
            answer.told();
        }
        Poll::Ready(frame)
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
