//! A server in the process of the test: the memory engine itself, no socket, nothing to install.
//!
//! ```
//! # #[tokio::main]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let server = dflockd_client::testing::Server::start()?;
//! let client = server.client().await?;
//! let guard = client.lock("jobs/nightly").try_acquire().await?.expect("nobody else is here");
//! let other = server.client().await?;
//! assert!(other.lock("jobs/nightly").try_acquire().await?.is_none());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

use std::sync::Arc;
use std::time::Duration;

use dflockd::LocalServer;
use dflockd::config::Config;
use tokio::sync::Notify;

use crate::client::{Client, ClientBuilder};
use crate::error::Error;
use crate::stream::{Address, Bytes};

/// Bytes that may be under way in one direction.
const PIPE_BYTES: usize = 64 * 1024;

/// A server in this process. It ends when it and all its clients are gone.
#[derive(Clone)]
pub struct Server {
    local: Arc<LocalServer>,
    cut: Arc<Notify>,
}

impl Server {
    /// An empty server. To be called inside a tokio runtime.
    ///
    /// # Errors
    ///
    /// If its timers can not be started.
    pub fn start() -> Result<Self, Error> {
        let mut config = Config::default();
        config.max_locks = u64::MAX;
        let local = LocalServer::start(&config).map_err(|error| Error::Unreachable {
            server: "local".to_owned(),
            reason: error.to_string(),
        })?;
        Ok(Self { local: Arc::new(local), cut: Arc::default() })
    }

    /// A client of its own session.
    ///
    /// # Errors
    ///
    /// Never in practice.
    pub async fn client(&self) -> Result<Client, Error> {
        self.client_with(Client::builder()).await
    }

    /// A client with settings; which servers it names does not matter.
    ///
    /// # Errors
    ///
    /// If a setting is impossible.
    pub async fn client_with(&self, builder: ClientBuilder) -> Result<Client, Error> {
        let (local, cut) = (Arc::clone(&self.local), Arc::clone(&self.cut));
        let dial = move || -> crate::stream::BoxFuture<std::io::Result<Box<dyn Bytes>>> {
            let (local, cut) = (Arc::clone(&local), Arc::clone(&cut));
            Box::pin(async move {
                let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
                let cut = cut.notified_owned();
                tokio::spawn(async move {
                    tokio::select! {
                        () = local.converse(theirs) => {}
                        () = cut => {}
                    }
                });
                Ok(Box::new(ours) as Box<dyn Bytes>)
            })
        };
        let name: Arc<str> = builder.client_name().into();
        let address = Address::custom("local".to_owned(), dial, None, name, Duration::from_secs(5));
        builder.connect_to(vec![address]).await
    }

    /// Cuts all connections that stand now, as a broken network would.
    pub fn cut_connections(&self) {
        self.cut.notify_waiters();
    }
}
