//! Starting and stopping: bind, serve, reload, drain.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use anyhow::Context;
use dflockd_engine::{Api, Clock, Engine, Replicated, Suppressed};
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::{Notify, mpsc};

use crate::cluster;
use crate::config::{Config, Secret};
use crate::frontend::accept::{ApiConnections, Listener};
use crate::frontend::auth::TokenKind;
use crate::frontend::descriptors::{self, Connections, Descriptors};
use crate::frontend::grpc;
use crate::frontend::http::{self, App};
use crate::frontend::line::LineConnections;
use crate::operate;
use crate::service::Service;
use crate::telemetry;
use crate::tls;

const BACKLOG: u32 = 4096;
/// How often memory that is only there for speed is given back.
const TIDY: Duration = Duration::from_secs(10);
/// How often it is looked whether a token has become valid or stopped being so.
const DATES: Duration = Duration::from_secs(1);
/// For connections to close that were told to.
const LAST_MOMENT: Duration = Duration::from_secs(1);
/// For HTTP requests to end, if there is no limit for the shutdown.
const HTTP_SHUTDOWN: Duration = Duration::from_secs(30);

/// What can be asked of a running server from outside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Shut down in an orderly way; the second time at once.
    Terminate,
    /// Load certificate and tokens again.
    Reload,
}

/// A server that is bound and serves.
pub struct Running {
    /// Where it listens.
    pub address: SocketAddr,
    /// Where it listens for HTTP, if it does.
    pub http_address: Option<SocketAddr>,
    /// Where it listens for gRPC, if it does.
    pub grpc_address: Option<SocketAddr>,
    service: Arc<Service>,
    line: Arc<LineConnections>,
    config: Config,
    /// What peers are shown since the last reload.
    peer_secret: Mutex<Option<Secret>>,
    stop_accepting: Arc<Notify>,
    http: Option<Http>,
    grpc: Option<Grpc>,
}

/// The gRPC interface.
struct Grpc {
    app: Arc<grpc::App>,
    listener: Arc<Listener>,
}

/// The HTTP interface.
struct Http {
    app: Arc<App>,
    listener: Arc<Listener>,
}

/// Binds and begins to serve.
///
/// # Errors
///
/// If a file can not be used or the address not bound.
pub async fn run(config: Config) -> anyhow::Result<Running> {
    let tls = load_tls(&config)?;
    let background = |job: Box<dyn FnOnce() + Send>| {
        tokio::task::spawn_blocking(job);
    };
    let listener = listen(&config.host, config.port)
        .await
        .with_context(|| format!("cannot listen on {}:{}", config.host, config.port))?;
    let address = listener.local_addr()?;
    let http_socket = listen_if(config.http_address()).await?;
    let http_address = http_socket.as_ref().map(TcpListener::local_addr).transpose()?;
    let grpc_socket = listen_if(config.grpc_address()).await?;
    let grpc_address = grpc_socket.as_ref().map(TcpListener::local_addr).transpose()?;
    let workers = worker_threads(&config);
    let descriptors = Descriptors::of_process(&config, workers);
    let connections = Arc::new(Connections::new(&config, descriptors));
    let service = Arc::new(match config.replicated() {
        None => Service::new(&config, Clock::system(), background)?,
        Some(cluster) => {
            let member = cluster::start(&config, &cluster, address, descriptors.strangers).await?;
            Service::around(&config, Engine::Replicated(member), background)?
        }
    });
    operate::audit_decisions(&service);
    connections.log(&config, descriptors);
    service.metrics.set_connections_max(|api| connections.max(api));

    if let (Some(cluster), Some(member)) = (config.replicated(), service.engine.replicated()) {
        member.set_addresses(cluster::advertised_addresses(
            &config,
            &cluster,
            http_address,
            grpc_address,
        ));
    }
    service.engine.start()?;
    let caps = |api, per_address| ApiConnections::new(&service, &connections, api, per_address);
    let http = http_socket.map(|socket| {
        let app = Arc::new(App::new(&config, &service));
        tokio::spawn(Arc::clone(&app).sweep());
        let connections = caps(Api::Http, config.http_max_connections_per_ip);
        let listener = http::listen(&app, socket, connections, tls.as_ref());
        Http { app, listener }
    });
    if let Some(address) = http_address {
        tracing::info!(addr = %address, tls = tls.is_some(), "listening for HTTP");
    }
    let grpc = grpc_socket.map(|socket| {
        let app = Arc::new(grpc::App::new(&config, &service));
        tokio::spawn(Arc::clone(&app).sweep());
        let connections = caps(Api::Grpc, config.http_max_connections_per_ip);
        let listener = grpc::listen(&app, socket, connections, tls.as_ref(), &config)?;
        anyhow::Ok(Grpc { app, listener })
    });
    let grpc = grpc.transpose()?;
    if let Some(address) = grpc_address {
        tracing::info!(addr = %address, tls = tls.is_some(), "listening for gRPC");
    }
    let connections = caps(Api::Line, config.max_connections_per_ip);
    let uses_tls = tls.is_some();
    let line = LineConnections::start(&service, tls, connections, workers)
        .context("cannot start the threads for connections")?;
    // Not before all that it needs is there: who reads this line may rely on it.
    tracing::info!(addr = %address, tls = uses_tls, "listening");
    let stop_accepting = Arc::new(Notify::new());
    tokio::spawn(Arc::clone(&line).accept(listener, Arc::clone(&stop_accepting)));
    tokio::spawn(tidy(Arc::clone(&service)));
    let secret = config.replicated().and_then(|cluster| cluster.secret.cloned());
    let peer_secret = Mutex::new(secret);
    Ok(Running {
        address,
        http_address,
        grpc_address,
        service,
        line,
        config,
        peer_secret,
        stop_accepting,
        http,
        grpc,
    })
}

impl Running {
    /// The member of a cluster that this server is, if it is one.
    #[must_use]
    pub fn member(&self) -> Option<&Arc<Replicated>> {
        self.service.engine.replicated()
    }

    /// Serves until told to terminate, which calls `stopping`, and all connections are gone or the time for that is
    /// over.
    ///
    /// # Errors
    ///
    /// If the engine can not go on.
    pub async fn serve(
        self,
        mut signals: mpsc::UnboundedReceiver<Signal>,
        stopping: impl FnOnce(),
    ) -> anyhow::Result<()> {
        let told = async {
            let mut reloads = false;
            let has_dates = self.config.identities_file.is_some();
            loop {
                tokio::select! {
                    signal = signals.recv() => match signal {
                        Some(Signal::Reload) => reloads = true,
                        Some(Signal::Terminate) | None => break,
                    },
                    () = tokio::time::sleep(DATES), if has_dates => {
                        if self.service.auth.look_at_dates(SystemTime::now()) {
                            self.revoke();
                        }
                    }
                    // Files that can not be opened now are not missing.
                    () = descriptors::some_free(), if reloads => {
                        reloads = false;
                        self.reload();
                    }
                }
            }
        };
        tokio::select! {
            () = told => {}
            why = self.service.engine.failed() => {
                self.stop_accepting.notify_one();
                // The others are to see at once that this member is gone.
                self.service.engine.stop();
                let _ = tokio::time::timeout(LAST_MOMENT, self.tell_operators()).await;
                self.line.close();
                anyhow::bail!(why);
            }
        }
        stopping();
        if let Some(http) = &self.http {
            http.app.leaving.store(true, Ordering::SeqCst);
        }
        self.service.engine.hand_over().await;
        self.drain(&mut signals).await;
        self.service.engine.settle().await;
        self.service.engine.stop();
        telemetry::stop(&self.service).await;
        Ok(())
    }

    /// Lets out what operators are told about a member that has failed: its removal may be what they asked for. Nobody
    /// else is answered any more, so nobody is kept waiting for it.
    async fn tell_operators(&self) {
        self.service.operations.idle().await;
        self.line.close();
        let listeners = [
            self.http.as_ref().map(|http| &http.listener),
            self.grpc.as_ref().map(|grpc| &grpc.listener),
        ];
        let [http, grpc] = listeners.map(|listener| async move {
            if let Some(listener) = listener {
                listener.finish().await;
            }
        });
        tokio::join!(http, grpc);
    }

    fn reload(&self) {
        match load_tls(&self.config) {
            Ok(tls) => {
                if let Some(http) = &self.http {
                    http.listener.reload(tls.as_ref());
                }
                if let Some(grpc) = &self.grpc {
                    grpc.listener.reload(tls.as_ref());
                }
                self.line.tls.store(tls);
            }
            Err(error) => tracing::error!(error = format!("{error:#}"), "certificate not reloaded"),
        }
        let auth = &self.service.auth;
        match self.config.reload_auth_token() {
            Ok(tokens) if auth.replace(TokenKind::Client, tokens.as_ref()) => self.revoke(),
            Ok(_) => {}
            Err(error) => tracing::error!(%error, "auth token not reloaded"),
        }
        match self.config.read_identities() {
            Ok(identities) => {
                if auth.replace_identities(identities, SystemTime::now()) {
                    self.revoke();
                }
            }
            Err(error) => tracing::error!(%error, "identities not reloaded"),
        }
        match self.config.reload_admin_token() {
            // Operators show their token with each request; only streams have to be told, and hear of it themselves.
            Ok(tokens) => drop(auth.replace(TokenKind::Admin, tokens.as_ref())),
            Err(error) => tracing::error!(%error, "admin token not reloaded"),
        }
        if let Some(member) = self.service.engine.replicated()
            && let Some(cluster) = self.config.replicated()
        {
            let mut current = self.peer_secret.lock();
            let reloaded = self.config.reload_raft_secret().map_err(anyhow::Error::from);
            let reloaded = reloaded.and_then(|secret| {
                let secrets = [secret.as_ref(), current.as_ref()];
                let credentials = cluster::credentials(&cluster, secrets)?;
                member.reload(credentials).map_err(anyhow::Error::msg)?;
                *current = secret;
                Ok(())
            });
            if let Err(error) = reloaded {
                tracing::error!(error = format!("{error:#}"), "peer credentials not reloaded");
            }
        }
        tracing::info!("reloaded");
    }

    /// Ends what came with a token that is no longer valid.
    fn revoke(&self) {
        tracing::info!("a token is no longer valid: what came with it ends");
        self.line.revoke();
        if let Some(http) = &self.http {
            http.app.sessions.revoke();
        }
        if let Some(grpc) = &self.grpc {
            grpc.app.sessions.revoke();
        }
        tokio::spawn(Arc::clone(&self.service).end_detached());
    }

    async fn drain(&self, signals: &mut mpsc::UnboundedReceiver<Signal>) {
        tracing::info!(connections = self.line.count(), "shutting down");
        self.stop_accepting.notify_one();
        self.service.begin_drain().await;
        self.line.drain();
        let begun = Instant::now();
        let second = async {
            while let Some(signal) = signals.recv().await {
                if signal == Signal::Terminate {
                    return;
                }
            }
            std::future::pending().await
        };
        let mut second = pin!(second);
        let timeout = self.config.shutdown_timeout;
        let mut in_time = tokio::select! {
            () = self.line.gone() => true,
            () = until(begun, timeout) => {
                tracing::warn!(connections = self.line.count(), "forced close");
                false
            }
            () = &mut second => {
                tracing::warn!(connections = self.line.count(), "second signal");
                false
            }
        };
        if !in_time {
            self.line.close();
            // Their workers close them; whoever is left after this goes with the process.
            let _ = tokio::time::timeout(LAST_MOMENT, self.line.gone()).await;
        }
        if let Some(grpc) = &self.grpc {
            let limit = if timeout.is_zero() { HTTP_SHUTDOWN } else { timeout };
            if in_time {
                in_time = tokio::select! {
                    () = grpc.listener.finish() => true,
                    () = until(begun, limit) => false,
                    () = &mut second => false,
                };
            }
            if !in_time {
                tracing::warn!(connections = grpc.listener.count(), "forced close of gRPC");
            }
            grpc.app.sessions.clear();
        }
        let Some(http) = &self.http else { return };
        // Until now it told everybody who asked that the server is going.
        if in_time {
            let timeout = if timeout.is_zero() { HTTP_SHUTDOWN } else { timeout };
            in_time = tokio::select! {
                () = http.listener.finish() => true,
                () = until(begun, timeout) => false,
                () = &mut second => false,
            };
        }
        if !in_time {
            tracing::warn!(connections = http.listener.count(), "forced close of HTTP");
            http.listener.close();
            let _ = tokio::time::timeout(LAST_MOMENT, http.listener.finish()).await;
        }
        http.app.sessions.clear();
    }
}

/// Waits until a time limit that began then is over; zero is none.
async fn until(begun: Instant, limit: Duration) {
    if limit.is_zero() {
        std::future::pending().await
    } else {
        tokio::time::sleep(limit.saturating_sub(begun.elapsed())).await;
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop_accepting.notify_one();
        self.line.stop();
        if let Some(http) = &self.http {
            http.listener.close();
        }
    }
}

/// How many threads serve connections of the line protocol. With one for each core they would only take it from the
/// kernel's network stack, which does five sixths of the work, and wake each other: measured on two cores, one thread
/// serves a third more than two.
fn worker_threads(config: &Config) -> usize {
    chosen_threads(config).unwrap_or((cores() / 2).max(1))
}

/// How many threads the runtime has: timers, signals, accepting, peers, and above all HTTP and gRPC, where half of the
/// work is ours and a thread for each core serves half as much again as for every second.
pub(crate) fn runtime_threads(config: &Config) -> usize {
    let served = config.http_address().is_some() || config.grpc_address().is_some();
    if served { chosen_threads(config).unwrap_or(cores()) } else { 1 }
}

fn chosen_threads(config: &Config) -> Option<usize> {
    let chosen = usize::try_from(config.worker_threads).unwrap_or(usize::MAX);
    (chosen > 0).then_some(chosen)
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// The socket of an interface that may be off.
async fn listen_if(address: Option<(&str, u16)>) -> anyhow::Result<Option<TcpListener>> {
    let Some((host, port)) = address else { return Ok(None) };
    let bound = listen(host, port).await;
    Ok(Some(bound.with_context(|| format!("cannot listen on {host}:{port}"))?))
}

/// Listens with a queue that holds a storm of connects; the usual 128 would make some of them wait a second.
async fn listen(host: &str, port: u16) -> std::io::Result<TcpListener> {
    let mut failed = None;
    for address in tokio::net::lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
        socket.set_reuseaddr(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = Some(error),
        }
    }
    Err(failed.unwrap_or_else(|| std::io::ErrorKind::AddrNotAvailable.into()))
}

fn load_tls(config: &Config) -> anyhow::Result<Option<Arc<ServerConfig>>> {
    match (&config.tls_cert, &config.tls_key) {
        (Some(cert), Some(key)) => tls::load(cert, key, config.tls_client_ca.as_deref()).map(Some),
        _ => Ok(None),
    }
}

async fn tidy(service: Arc<Service>) {
    loop {
        tokio::time::sleep(TIDY).await;
        service.forget_stats();
        for Suppressed { peer, kind, count } in service.log_budget.take_suppressed() {
            let peer = peer.map(tracing::field::display);
            tracing::warn!(peer, kind, count, "log lines left out");
        }
        service.auth.sweep();
        let service = Arc::clone(&service);
        let _ = tokio::task::spawn_blocking(move || service.tidy_detached()).await;
    }
}
