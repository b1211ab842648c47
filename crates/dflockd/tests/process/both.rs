//! Servers that speak plain text or TLS, for tests that should hold over both.

use std::sync::Arc;

use dflockd_testkit::{Client, Dir, Pair, Server};
use rustls::ClientConfig;

/// A TLS server, and how to connect to it.
pub(super) struct TlsServer {
    pub(super) server: Server,
    pub(super) pair: Pair,
    pub(super) dir: Dir,
    pub(super) config: Arc<ClientConfig>,
}

impl TlsServer {
    pub(super) fn start(args: &[&str]) -> Self {
        let (dir, pair) = (Dir::new(), Pair::new());
        let [cert, key] = pair.flags(&dir);
        let server = Server::start(&[&[&*cert, &key], args].concat());
        let config = pair.client();
        Self { server, pair, dir, config }
    }

    pub(super) fn connect(&self) -> Client {
        let (client, _) = Client::over_tls(self.server.socket(), Arc::clone(&self.config)).unwrap();
        client
    }
}

/// A server of either kind.
pub(super) enum Either {
    Plain(Server),
    Tls(Box<TlsServer>),
}

impl Either {
    pub(super) fn both(args: &[&str]) -> [Self; 2] {
        [Self::Plain(Server::start(args)), Self::Tls(Box::new(TlsServer::start(args)))]
    }

    pub(super) fn connect(&self) -> Client {
        match self {
            Self::Plain(server) => server.connect(),
            Self::Tls(server) => server.connect(),
        }
    }
}
