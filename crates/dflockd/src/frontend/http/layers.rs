//! What every request passes, in this order: CORS, metrics, rate limit, where it comes from, authentication, the state
//! of the server; then its route.
//!
//! One service instead of one per concern: each would cost every request a box and a clone. axum calls it after the
//! route was found, so that it knows the template, which is what metrics are kept by.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Instant;

use axum::extract::{MatchedPath, Request};
use axum::http::header::{AUTHORIZATION, CACHE_CONTROL, WWW_AUTHENTICATE, X_CONTENT_TYPE_OPTIONS};
use axum::http::{HeaderValue, Method};
use axum::response::{IntoResponse, Response};
use axum::routing::Route;
use axum::routing::future::RouteFuture;
use dflockd_engine::{Api, Leader};
use dflockd_identity::Access;
use tokio::time::Sleep;
use tower::{Layer, Service};

use super::cors::{Allowed, preflight};
use super::error::ApiError;
use super::{App, Peer, Shared, origin};
use crate::frontend::admission::NotServed;
use crate::frontend::auth::{Asker, Denied, Origin, Pass, Revocable, WRONG_TOKEN_PAUSE};
use crate::telemetry::RequestTrace;

/// Puts [`ApiService`] around each route.
#[derive(Clone)]
pub(crate) struct ApiLayer(pub(crate) Shared);

/// A route with what every request passes before it.
#[derive(Clone)]
pub(crate) struct ApiService {
    app: Shared,
    route: Route,
}

/// What operators did here.
const AUDIT: &str = "/v1/admin/audit";

/// What a route is for, which decides who may use it and when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// Asked by machines that watch this one; always answered.
    Probe,
    /// Says how the server is, also while it goes down.
    Service,
    /// Totals for Prometheus, also while the server goes down.
    Metrics,
    /// The document, for everybody.
    Document,
    /// Files of the web page, for everybody.
    Page,
    /// There is no such route.
    Unmatched,
    /// Everything else.
    Api,
}

impl Kind {
    fn of(template: Option<&str>) -> Self {
        match template {
            None => Self::Unmatched,
            Some("/health" | "/ready") => Self::Probe,
            Some("/metrics") => Self::Metrics,
            Some("/v1/stats") => Self::Service,
            Some("/v1/openapi.json") => Self::Document,
            Some(page) if page == "/" || page == "/ui" || page.starts_with("/ui/") => Self::Page,
            Some(_) => Self::Api,
        }
    }
}

impl Layer<Route> for ApiLayer {
    type Service = ApiService;

    fn layer(&self, route: Route) -> ApiService {
        ApiService { app: Shared::clone(&self.0), route }
    }
}

impl Service<Request> for ApiService {
    type Response = Response;
    type Error = Infallible;
    type Future = Passing;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, mut request: Request) -> Passing {
        let begun = Instant::now();
        let app = &self.app;
        let template = request.extensions().get::<MatchedPath>().cloned();
        let (method, headers) = (request.method().clone(), request.headers());
        let kind = Kind::of(template.as_ref().map(MatchedPath::as_str));
        let traced = app.service.telemetry.as_ref().filter(|_| kind != Kind::Probe);
        // A stranger's trace must not decide what is sampled here.
        let trace = traced.map(|telemetry| {
            let parent = Some(headers).filter(|headers| app.service.auth.knows(headers));
            Box::new(telemetry.request(&method, parent))
        });
        let allowed = if app.cors.is_active() { app.cors.allowed(headers) } else { None };
        let mut pass = Pass::OPEN;
        let step = if app.cors.is_preflight(&method, headers) {
            Step::Done(preflight())
        } else {
            match app.admit(&request, kind, begun) {
                Ok(peer) => {
                    pass = peer.1;
                    request.extensions_mut().insert(peer);
                    Step::Route(self.route.call(request))
                }
                Err(Refused::Now(error)) => Step::Done(error.into_response()),
                Err(Refused::Later(error)) => {
                    Step::Pause(Box::pin(tokio::time::sleep(WRONG_TOKEN_PAUSE)), error)
                }
            }
        };
        let pass = Revocable::new(&app.service, Api::Http, pass);
        let app = Shared::clone(app);
        Passing { step, app, method, template, allowed, begun, trace, pass }
    }
}

enum Refused {
    Now(ApiError),
    /// After a pause.
    Later(ApiError),
}

impl App {
    /// Whether a request may go on to its route, and who makes it.
    fn admit(&self, request: &Request, kind: Kind, now: Instant) -> Result<Peer, Refused> {
        origin::check_single_host(request.headers()).map_err(Refused::Now)?;
        let origin = request.extensions().get::<Origin>();
        let origin = origin.ok_or_else(|| Refused::Now(ApiError::internal()))?;
        let mut peer = Peer(origin.address, Pass::OPEN);
        if kind == Kind::Probe {
            return Ok(peer);
        }
        if let Some(limit) = &self.rate_limit
            && !limit.take(origin.address.into(), now)
        {
            return Err(Refused::Now(ApiError::rate_limited()));
        }
        if kind == Kind::Document || kind == Kind::Page {
            return Ok(peer);
        }
        // Scrapers come by any name, and totals tell nobody a key.
        // A browser sends a certificate with what a page of anybody asks for; a token it does not.
        let is_ambient = !request.headers().contains_key(AUTHORIZATION) && origin.has_certificate();
        if kind != Kind::Metrics && (is_ambient || !self.service.auth.is_required()) {
            origin::check(request, &self.hosts, &self.cors).map_err(Refused::Now)?;
        }
        let admitted = self.service.admit_bearer(Api::Http, origin, request.headers());
        peer.1 = admitted.map_err(|denied| match denied {
            Denied::TooMany => Refused::Now(ApiError::auth_throttled()),
            Denied::Wrong | Denied::Disabled | Denied::Unaudited => {
                Refused::Later(challenge(ApiError::unauthorized()))
            }
        })?;
        // Whoever may have no session is here for the metrics only.
        let access = if kind == Kind::Metrics { Access::Metrics } else { Access::OWN };
        let asker = Asker::new(&self.service, Api::Http, peer);
        asker.check(access).map_err(|refusal| Refused::Now(refusal.into()))?;
        // What was asked of this server is told by no other.
        if kind == Kind::Api && request.uri().path() != AUDIT {
            self.is_served_here(request.method()).map_err(Refused::Now)?;
        }
        Ok(peer)
    }

    /// Refuses what this server does not do now, or never does itself.
    fn is_served_here(&self, method: &Method) -> Result<(), ApiError> {
        let changes = *method != Method::GET && *method != Method::HEAD;
        let served = self.service.check_served(changes && self.service.redirects(false));
        served.map_err(|why| match why {
            NotServed::Draining => ApiError::draining(),
            NotServed::NotLeader(leader) => not_leader(&leader),
        })
    }
}

/// Tells where the leader is.
pub(super) fn not_leader(leader: &Leader) -> ApiError {
    ApiError::not_leader(leader.line.as_deref(), leader.http.as_deref())
}

/// Tells how to authenticate.
fn challenge(refusal: ApiError) -> ApiError {
    refusal.with_header(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"))
}

/// A request on its way to its answer.
pub(crate) struct Passing {
    step: Step,
    app: Shared,
    method: Method,
    template: Option<MatchedPath>,
    allowed: Option<Allowed>,
    begun: Instant,
    trace: Option<Box<RequestTrace>>,
    pass: Revocable,
}

enum Step {
    Route(RouteFuture<Infallible>),
    Pause(Pin<Box<Sleep>>, ApiError),
    Done(Response),
    Told,
}

impl Future for Passing {
    type Output = Result<Response, Infallible>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let ready = match &mut this.step {
            Step::Route(route) => match Pin::new(route).poll(cx) {
                // Its session went with the token, or it was granted what another one lost with it: what is not told
                // is given back.
                Poll::Ready(Ok(_)) if this.pass.is_gone() => {
                    Some(challenge(ApiError::revoked()).into_response())
                }
                Poll::Ready(Ok(response)) => Some(response),
                Poll::Pending if this.pass.is_revoked(cx) => {
                    Some(challenge(ApiError::revoked()).into_response())
                }
                Poll::Pending => None,
            },
            Step::Pause(pause, _) => {
                if pause.as_mut().poll(cx).is_pending() {
                    return Poll::Pending;
                }
                None
            }
            Step::Done(_) | Step::Told => None,
        };
        let mut response = match (ready, &this.step) {
            (Some(response), _) => response,
            (None, Step::Route(_)) => return Poll::Pending,
            (None, _) => match std::mem::replace(&mut this.step, Step::Told) {
                Step::Pause(_, error) => error.into_response(),
                Step::Done(response) => response,
                Step::Route(_) | Step::Told => unreachable!("a finished future is not polled"),
            },
        };
        let nosniff = HeaderValue::from_static("nosniff");
        response.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, nosniff);
        // Answers hold tokens and values; what may be kept says so itself.
        let no_store = HeaderValue::from_static("no-store");
        response.headers_mut().entry(CACHE_CONTROL).or_insert(no_store);
        if let Some(allowed) = this.allowed.take() {
            allowed.add_headers(&mut response);
        }
        let template = this.template.as_ref().map(MatchedPath::as_str);
        let (status, took) = (response.status(), this.begun.elapsed());
        this.app.service.metrics.http_request(&this.method, template, status, took);
        if let Some(trace) = this.trace.take() {
            trace.answered(&this.method, template, status);
        }
        Poll::Ready(Ok(response))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_of_routes() {
        for (template, kind) in [
            (None, Kind::Unmatched),
            (Some("/health"), Kind::Probe),
            (Some("/v1/stats"), Kind::Service),
            (Some("/metrics"), Kind::Metrics),
            (Some("/"), Kind::Page),
            (Some("/ui/{file}"), Kind::Page),
            (Some("/uid"), Kind::Api),
            (Some("/v1/locks/{key}"), Kind::Api),
        ] {
            assert_eq!(Kind::of(template), kind, "{template:?}");
        }
    }
}
