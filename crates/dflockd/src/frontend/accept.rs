//! Accepting connections, for every API alike: the loop, the caps, and the listening socket of an API whose connections
//! are tasks.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use arc_swap::ArcSwapOption;
use dflockd_engine::Api;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use crate::frontend::caps::{Caps, Permit, Total};
use crate::frontend::descriptors::Connections;
use crate::service::Service;

/// The pause after an accept that failed; each is twice as long as the one before.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// The connections of one API.
pub(crate) struct ApiConnections {
    service: Arc<Service>,
    api: Api,
    caps: Arc<Caps>,
}

impl ApiConnections {
    /// As many as `connections` leaves to the API, and for each source address `per_address_max`; zero is no limit.
    pub(crate) fn new(
        service: &Arc<Service>,
        connections: &Arc<Connections>,
        api: Api,
        per_address_max: u64,
    ) -> Self {
        let (service, counted) = (Arc::clone(service), Arc::clone(service));
        let gauge = move |count| match api {
            Api::Line => {
                let count = usize::try_from(count).unwrap_or(usize::MAX);
                counted.connections.store(count, Ordering::Relaxed);
            }
            Api::Http | Api::Grpc => counted.metrics.set_connections(api, count),
        };
        let total = Total::Connections(Arc::clone(connections), api);
        let caps = Caps::new(total, per_address_max, gauge);
        Self { service, api, caps }
    }

    /// Accepts connections until `stop` is ready. Each comes with its permit, to be dropped after its socket: the next
    /// one needs the descriptor.
    pub(crate) async fn accept(
        &self,
        socket: TcpListener,
        stop: impl Future,
        mut admit: impl FnMut(TcpStream, SocketAddr, Permit),
    ) {
        let mut stop = pin!(stop);
        let mut pause = PAUSE_MIN;
        loop {
            let accepted = tokio::select! {
                _ = &mut stop => return,
                accepted = socket.accept() => accepted,
            };
            match accepted {
                Ok((stream, address)) => {
                    pause = PAUSE_MIN;
                    if let Some(permit) = self.permit(address) {
                        admit(stream, address, permit);
                    }
                }
                Err(error) => {
                    tracing::warn!(%error, "accept failed");
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(PAUSE_MAX);
                }
            }
        }
    }

    /// A permit for a connection from there. A refusal is counted and logged.
    fn permit(&self, address: SocketAddr) -> Option<Permit> {
        let permit = self.caps.take(address.ip());
        if permit.is_err() {
            self.service.metrics.connection_refused(self.api);
            let kind = match self.api {
                Api::Line => "connection cap reached",
                Api::Http => "HTTP connection cap reached",
                Api::Grpc => "gRPC connection cap reached",
            };
            if let Some(suppressed) = self.service.log_budget.admit(address.ip(), kind) {
                tracing::warn!(peer = %address, suppressed, "{kind}");
            }
        }
        permit.ok()
    }

    /// How many there are.
    pub(crate) fn count(&self) -> u64 {
        self.caps.count()
    }

    /// Waits until the last one has ended.
    pub(crate) async fn gone(&self) {
        self.caps.emptied().await;
    }
}

/// The listening socket of an API whose connections are tasks of the runtime.
pub(crate) struct Listener {
    connections: ApiConnections,
    /// Swapped when the certificate is loaded again.
    tls: ArcSwapOption<ServerConfig>,
    /// What TLS offers to speak (ALPN).
    protocols: &'static [&'static [u8]],
    stage: watch::Sender<Stage>,
}

/// How far a listener is on its way down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Serving,
    /// Nothing is accepted; connections finish what they began.
    Finishing,
    /// Connections end at once.
    Closed,
}

/// A connection that was accepted. Its permit is given back when its task has ended.
pub(crate) struct Accepted {
    pub(crate) stream: TcpStream,
    pub(crate) address: SocketAddr,
    /// The certificate, if the API uses TLS.
    pub(crate) tls: Option<Arc<ServerConfig>>,
    pub(crate) stage: watch::Receiver<Stage>,
}

impl Listener {
    /// Accepts on the socket, and serves each connection in a task. To be called inside a tokio runtime.
    pub(crate) fn start<F: Future<Output = ()> + Send + 'static>(
        socket: TcpListener,
        connections: ApiConnections,
        tls: Option<&Arc<ServerConfig>>,
        protocols: &'static [&'static [u8]],
        serve: impl Fn(Accepted) -> F + Send + Sync + 'static,
    ) -> Arc<Self> {
        let (tls_slot, stage) = (ArcSwapOption::empty(), watch::Sender::new(Stage::Serving));
        let listener = Arc::new(Self { connections, tls: tls_slot, protocols, stage });
        listener.reload(tls);
        let it = Arc::clone(&listener);
        tokio::spawn(async move {
            let mut stage = it.stage.subscribe();
            let stopped = stage.wait_for(|stage| *stage != Stage::Serving);
            let admit = |stream: TcpStream, address, permit| {
                // Answers are small and must not wait for more.
                if stream.set_nodelay(true).is_err() {
                    return;
                }
                let (tls, stage) = (it.tls.load_full(), it.stage.subscribe());
                let served = serve(Accepted { stream, address, tls, stage });
                tokio::spawn(async move {
                    served.await;
                    drop(permit);
                });
            };
            it.connections.accept(socket, stopped, admit).await;
        });
        listener
    }

    /// Connections from now on get this certificate.
    pub(crate) fn reload(&self, tls: Option<&Arc<ServerConfig>>) {
        let offering = |tls: &Arc<ServerConfig>| {
            let mut tls = ServerConfig::clone(tls);
            tls.alpn_protocols = self.protocols.iter().map(|name| name.to_vec()).collect();
            Arc::new(tls)
        };
        self.tls.store(tls.map(offering));
    }

    /// Accepts nothing any more and lets connections finish. Done when all are gone.
    pub(crate) async fn finish(&self) {
        self.enter(Stage::Finishing);
        self.connections.gone().await;
    }

    /// Closes all connections.
    pub(crate) fn close(&self) {
        self.enter(Stage::Closed);
    }

    /// How many connections there are.
    pub(crate) fn count(&self) -> u64 {
        self.connections.count()
    }

    fn enter(&self, stage: Stage) {
        self.stage.send_if_modified(|current| {
            let later = *current != Stage::Closed && *current != stage;
            if later {
                *current = stage;
            }
            later
        });
    }
}
