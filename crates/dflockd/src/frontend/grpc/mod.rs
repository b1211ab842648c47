//! The gRPC interface `dflockd.v1`, over the same engine as the other APIs: one queue per key for all of them.
//!
//! `listen` has the sockets, `gate` what every call passes, `sessions` who asks, `fields` what comes in, `error` the
//! refusals. The services are in the other files; what they promise stands in the `.proto` files of `dflockd-wire`.

mod admin;
mod arriving;
mod cluster;
mod elections;
mod error;
pub(crate) mod fields;
mod gate;
mod listen;
mod locks;
mod session_calls;
mod sessions;
mod signals;
mod usage;
mod values;
mod views;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use dflockd_core::{Outcome, Span};
use dflockd_engine::Api;
use dflockd_wire::grpc::{
    self as proto, CommandMessage, admin_server::AdminServer, barriers_server::BarriersServer,
    cluster_server::ClusterServer, counters_server::CountersServer,
    elections_server::ElectionsServer, kv_server::KvServer, lists_server::ListsServer,
    locks_server::LocksServer, sessions_server::SessionsServer, signals_server::SignalsServer,
    watch_server::WatchServer,
};
use prost::Message;
use tonic::service::Routes;
use tonic::{Request, Response, Status};
use tonic_health::ServingStatus;
use tonic_health::server::HealthReporter;

use self::error::Refused;
pub(crate) use self::listen::listen;
use self::sessions::{Details, TTL_MAX, TTL_MIN};
use crate::config::Config;
pub(crate) use crate::frontend::auth::{Asker, Peer};
use crate::frontend::budget::Budget;
use crate::frontend::caller::Common;
use crate::frontend::rate::RateLimit;
use crate::frontend::sessions::SessionStore;
use crate::service::{ANSWER_BYTES_MAX, Service, span};

/// The longest message, in both directions.
const MESSAGE_BYTES_MAX: usize = 2 << 20;
/// How often it is looked whether the server can answer.
const HEALTH_LOOK: Duration = Duration::from_millis(100);
/// How long streams of health stay when the server shuts down.
const LAST_WORD: Duration = Duration::from_millis(300);
/// The names that health is told by; the empty one is the server as a whole.
const SERVICES: [&str; 12] = [
    "",
    "dflockd.v1.Admin",
    "dflockd.v1.Barriers",
    "dflockd.v1.Cluster",
    "dflockd.v1.Counters",
    "dflockd.v1.Elections",
    "dflockd.v1.Kv",
    "dflockd.v1.Lists",
    "dflockd.v1.Locks",
    "dflockd.v1.Sessions",
    "dflockd.v1.Signals",
    "dflockd.v1.Watch",
];

/// What all calls share.
pub(crate) struct App {
    pub(crate) service: Arc<Service>,
    pub(crate) sessions: SessionStore<Details>,
    /// The time to live of a session whose client does not name one.
    default_ttl: Span,
    rate_limit: Option<RateLimit>,
    /// For calls that need no session.
    common: Common,
}

/// The services.
#[derive(Clone)]
pub(crate) struct Services(pub(crate) Arc<App>);

impl App {
    pub(crate) fn new(config: &Config, service: &Arc<Service>) -> Self {
        Self {
            sessions: sessions::store(config, service),
            default_ttl: span(config.default_lease_ttl).clamp(TTL_MIN, TTL_MAX),
            rate_limit: RateLimit::new(config.http_rate_limit_per_ip, config.http_rate_limit_burst),
            common: Common::new(service, Api::Grpc, "grpc"),
            service: Arc::clone(service),
        }
    }

    /// Waits until the server shuts down.
    pub(crate) async fn drained(&self) {
        self.service.drained().await;
    }

    /// Whether calls are answered here now.
    pub(crate) fn is_ready(&self) -> bool {
        !self.service.is_draining() && self.service.engine.is_ready()
    }
}

impl Peer {
    fn of<T>(request: &Request<T>) -> Result<Self, Status> {
        let peer = request.extensions().get::<Self>().copied();
        peer.ok_or_else(|| Refused::internal().into())
    }
}

impl Asker {
    fn of<T>(app: &App, request: &Request<T>) -> Result<Self, Status> {
        Ok(Self::new(&app.service, Api::Grpc, Peer::of(request)?))
    }
}

/// A call apart: where it comes from, and what it asks.
fn open<T>(request: Request<T>) -> Result<(Peer, T), Status> {
    let peer = Peer::of(&request)?;
    Ok((peer, request.into_inner()))
}

/// What the connection of a call may cost.
fn budget<T>(request: &Request<T>) -> Result<Arc<Budget>, Refused> {
    let budget = request.extensions().get::<Arc<Budget>>().cloned();
    budget.ok_or_else(Refused::internal)
}

impl Services {
    /// Does what a message asks for.
    async fn execute<M: CommandMessage>(
        &self,
        request: Request<M>,
    ) -> Result<Response<M::Response>, Status> {
        let (peer, message) = open(request)?;
        let mut command = message.command().map_err(Refused::from)?;
        let client = if M::NEEDS_SESSION {
            self.0.member(peer, message.head()).await?
        } else {
            self.0.client(peer, message.head()).await?
        };
        client.set_lease(&mut command)?;
        let told = client.execute(command).await?;
        match message.response(told.outcome()) {
            Some(response) => Ok(gate::respond(told, response)),
            None => Err(Refused::by(told.outcome()).into()),
        }
    }
}

/// The answer to what can only succeed.
fn done(outcome: &Outcome) -> Result<(), Refused> {
    if *outcome == Outcome::Done { Ok(()) } else { Err(Refused::by(outcome)) }
}

impl App {
    /// Looks at the state on a thread that may be busy: few at a time. None: nobody can say.
    async fn inspect<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<T, Refused> {
        let done = self.service.looks.wait(work).await;
        done.ok_or_else(Refused::internal)?.ok_or_else(Refused::unavailable)
    }

    /// Makes an answer from the state: one at a time for each connection, when there is room for it.
    async fn show<T: Message + 'static>(
        &self,
        budget: &Budget,
        work: impl FnOnce() -> Option<T> + Send + 'static,
    ) -> Result<Response<T>, Refused> {
        let (_turn, room) = budget.inspection(ANSWER_BYTES_MAX).await;
        let message = self.inspect(work).await?;
        Ok(gate::hold(room, message))
    }
}

/// How many of the first items fit into one answer, by their lengths; at least one.
fn fitting(lengths: impl IntoIterator<Item = usize>) -> usize {
    let mut bytes = 0;
    let fits = |(index, length): &(usize, usize)| {
        // And what tells the items apart.
        bytes += length + 8;
        bytes <= ANSWER_BYTES_MAX || *index == 0
    };
    lengths.into_iter().enumerate().take_while(fits).count()
}

/// All services.
fn routes(app: &Arc<App>) -> Result<Routes, tonic_reflection::server::Error> {
    let api = Services(Arc::clone(app));
    let (reporter, health) = tonic_health::server::health_reporter();
    tokio::spawn(report_health(Arc::downgrade(app), reporter));
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(proto::DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    macro_rules! all {
        ($routes:expr, $($server:ident)*) => {
            $routes$(.add_service(
                $server::new(api.clone())
                    .max_decoding_message_size(MESSAGE_BYTES_MAX)
                    .max_encoding_message_size(MESSAGE_BYTES_MAX),
            ))*
        };
    }
    let routes = Routes::new(health)
        .add_service(reflection().build_v1()?)
        .add_service(reflection().build_v1alpha()?);
    let routes = all!(
        routes, SessionsServer LocksServer ElectionsServer CountersServer KvServer ListsServer
        BarriersServer SignalsServer WatchServer ClusterServer AdminServer
    );
    Ok(routes.prepare())
}

/// Tells whoever asks for the health of the server how it is.
async fn report_health(app: std::sync::Weak<App>, mut reporter: HealthReporter) {
    let mut told = None;
    while let Some(app) = app.upgrade() {
        let ready = app.is_ready();
        if told != Some(ready) {
            told = Some(ready);
            let status = if ready { ServingStatus::Serving } else { ServingStatus::NotServing };
            for service in SERVICES {
                reporter.set_service_status(service, status).await;
            }
        }
        if app.service.is_draining() {
            // Who watches has time to hear it; then these streams must end, or the server would wait for them.
            tokio::time::sleep(LAST_WORD).await;
            for service in SERVICES {
                reporter.clear_service_status(service).await;
                reporter.set_service_status(service, ServingStatus::NotServing).await;
            }
            return;
        }
        drop(app);
        tokio::time::sleep(HEALTH_LOOK).await;
    }
}
