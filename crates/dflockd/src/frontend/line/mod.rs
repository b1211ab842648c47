//! Who may connect, and all who have.
//!
//! A connection belongs to one of the workers (`worker.rs`), which waits for its input and its deadlines.
//! Its bytes go through `socket.rs`, what is said on it is in `connection.rs`.

pub mod connection;
pub(crate) mod foreign;
pub(crate) mod local;
mod socket;
pub(crate) mod translate;
mod worker;

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use arc_swap::ArcSwapOption;
use dflockd_engine::{AddressKey, Door};
use mio::net::TcpStream;
use parking_lot::Mutex;
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::sync::Notify;

use self::worker::{Order, Worker};
use crate::frontend::accept::accept;
use crate::frontend::descriptors::Connections;
use crate::service::Service;

/// All connections, and who may join them.
pub(crate) struct Peers {
    service: Arc<Service>,
    /// Swapped when the certificate is loaded again.
    pub(crate) tls: ArcSwapOption<ServerConfig>,
    connections: Arc<Connections>,
    per_address_max: u64,
    seats: Mutex<Seats>,
    /// Notified when the last one leaves.
    empty: Notify,
    workers: Vec<Arc<Worker>>,
}

#[derive(Default)]
struct Seats {
    by_address: HashMap<AddressKey, u64>,
    total: u64,
}

impl Peers {
    /// Starts the workers. To be called inside a tokio runtime.
    pub(crate) fn start(
        service: Arc<Service>,
        tls: Option<Arc<ServerConfig>>,
        connections: Arc<Connections>,
        per_address_max: u64,
        workers: usize,
    ) -> io::Result<Arc<Self>> {
        let mut polls = Vec::with_capacity(workers);
        let mut handles = Vec::with_capacity(workers);
        for _ in 0..workers {
            let (worker, poll) = Worker::new(Arc::clone(&service))?;
            handles.push(Arc::new(worker));
            polls.push(poll);
        }
        let peers = Arc::new(Self {
            service,
            tls: ArcSwapOption::new(tls),
            connections,
            per_address_max,
            seats: Mutex::default(),
            empty: Notify::new(),
            workers: handles,
        });
        for (index, (worker, poll)) in peers.workers.iter().zip(polls).enumerate() {
            worker::start(Arc::clone(&peers), Arc::clone(worker), poll, index == 0)?;
        }
        Ok(peers)
    }

    /// Accepts connections until `stop`.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener, stop: Arc<Notify>) {
        accept(listener, stop.notified(), |stream, address| match stream.into_std() {
            Ok(stream) => self.admit(TcpStream::from_std(stream), address),
            Err(error) => tracing::warn!(%error, "accept failed"),
        })
        .await;
    }

    /// Gives a connection to the worker with the fewest, unless all seats are taken.
    fn admit(&self, stream: TcpStream, address: SocketAddr) {
        if !self.take_seat(address) {
            self.service.metrics.connection_refused(Door::Line);
            let kind = "connection cap reached";
            if let Some(suppressed) = self.service.log_budget.admit(address.ip(), kind) {
                tracing::warn!(peer = %address, suppressed, "{kind}");
            }
            return;
        }
        let worker = self.workers.iter().min_by_key(|worker| worker.load());
        worker.expect("there is at least one").order(Order::Join(stream, address));
    }

    fn take_seat(&self, address: SocketAddr) -> bool {
        let address = AddressKey::from(address.ip());
        let mut seats = self.seats.lock();
        let here = seats.by_address.get(&address).copied().unwrap_or(0);
        if self.per_address_max > 0 && here >= self.per_address_max {
            return false;
        }
        if !self.connections.enter(Door::Line) {
            return false;
        }
        let here = seats.by_address.entry(address).or_default();
        *here += 1;
        seats.total += 1;
        self.service.connections.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// A connection is closed.
    fn leave_seat(&self, address: IpAddr) {
        let address = AddressKey::from(address);
        let mut seats = self.seats.lock();
        self.connections.leave(Door::Line);
        seats.total -= 1;
        if let Some(here) = seats.by_address.get_mut(&address) {
            *here -= 1;
            if *here == 0 {
                seats.by_address.remove(&address);
            }
        }
        self.service.connections.fetch_sub(1, Ordering::Relaxed);
        if seats.total == 0 {
            self.empty.notify_waiters();
        }
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

    /// Waits until the last connection has left.
    pub(crate) async fn gone(&self) {
        loop {
            let empty = self.empty.notified();
            if self.count() == 0 {
                return;
            }
            empty.await;
        }
    }

    pub(crate) fn count(&self) -> u64 {
        self.seats.lock().total
    }
}
