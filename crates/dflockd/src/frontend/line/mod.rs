//! The line protocol: all its connections.
//!
//! A connection belongs to one of the workers (`worker.rs`), which waits for its input and its deadlines.
//! Its bytes go through `socket.rs`, what is said on it is in `connection.rs`.

pub mod connection;
pub(crate) mod foreign;
pub(crate) mod local;
mod socket;
pub(crate) mod translate;
mod worker;

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use mio::net::TcpStream;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use self::worker::{Order, Worker};
use crate::frontend::accept::ApiConnections;
use crate::service::Service;

/// All connections, and who may join them.
pub(crate) struct LineConnections {
    /// Swapped when the certificate is loaded again.
    pub(crate) tls: ArcSwapOption<ServerConfig>,
    connections: ApiConnections,
    workers: Vec<Arc<Worker>>,
}

impl LineConnections {
    /// Starts the workers. To be called inside a tokio runtime.
    pub(crate) fn start(
        service: &Arc<Service>,
        tls: Option<Arc<ServerConfig>>,
        connections: ApiConnections,
        workers: usize,
    ) -> io::Result<Arc<Self>> {
        let mut polls = Vec::with_capacity(workers);
        let mut handles = Vec::with_capacity(workers);
        for _ in 0..workers {
            let (worker, poll) = Worker::new(Arc::clone(service))?;
            handles.push(Arc::new(worker));
            polls.push(poll);
        }
        let line = Arc::new(Self { tls: ArcSwapOption::new(tls), connections, workers: handles });
        for (index, (worker, poll)) in line.workers.iter().zip(polls).enumerate() {
            worker::start(Arc::clone(&line), Arc::clone(worker), poll, index == 0)?;
        }
        Ok(line)
    }

    /// Accepts connections until `stop`, and gives each to the worker with the fewest.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener, stop: Arc<Notify>) {
        let admit = |stream: tokio::net::TcpStream, address, permit| match stream.into_std() {
            Ok(stream) => {
                let worker = self.workers.iter().min_by_key(|worker| worker.load());
                let worker = worker.expect("there is at least one");
                worker.order(Order::Join(TcpStream::from_std(stream), address, permit));
            }
            Err(error) => tracing::warn!(%error, "accept failed"),
        };
        self.connections.accept(listener, stop.notified(), admit).await;
    }

    /// Ends the waits of all connections.
    pub(crate) fn drain(&self) {
        for worker in &self.workers {
            worker.order(Order::Drain);
        }
    }

    /// Ends the connections that came with a token that is no longer valid.
    pub(crate) fn revoke(&self) {
        for worker in &self.workers {
            worker.order(Order::Revoke);
        }
    }

    /// Closes all connections.
    pub(crate) fn close(&self) {
        for worker in &self.workers {
            worker.order(Order::Close);
        }
    }

    /// Closes all connections and ends the workers.
    pub(crate) fn stop(&self) {
        for worker in &self.workers {
            worker.order(Order::Stop);
        }
    }

    /// Waits until the last connection has ended.
    pub(crate) async fn gone(&self) {
        self.connections.gone().await;
    }

    pub(crate) fn count(&self) -> u64 {
        self.connections.count()
    }
}
