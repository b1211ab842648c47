//! A server with an HTTP API and people around it.

use std::net::SocketAddr;

use dflockd_testkit::{Client, Server, fence};

use super::chromium::Browser;

/// A running server.
pub(super) struct Scene {
    pub(super) server: Server,
    pub(super) http: SocketAddr,
}

impl Scene {
    pub(super) fn start(args: &[&str]) -> Self {
        let (server, http) = Server::start_with_api("--http-port", args);
        Self { server, http }
    }

    /// With somebody who looks at it, if there is a browser.
    pub(super) fn shown(args: &[&str]) -> Option<(Browser, Self)> {
        Browser::start().map(|browser| (browser, Self::start(args)))
    }

    /// With its HTTP API at a given address.
    pub(super) fn start_at(http: SocketAddr, args: &[&str]) -> Result<Self, String> {
        let mut command = dflockd_testkit::command(args);
        command.args(["--http-port", &http.port().to_string()]);
        Server::try_launch(command).map(|server| Self { server, http })
    }

    /// The address of a view.
    pub(super) fn page(&self, hash: &str) -> String {
        format!("http://{}/ui/{hash}", self.http)
    }

    /// Somebody with a name.
    pub(super) fn client(&self, name: &str) -> Client {
        let mut client = self.server.connect();
        client.check("hello", name, "lost", "ok lost");
        client
    }

    /// Somebody who holds a lock, and the fence.
    pub(super) fn holder(&self, name: &str, key: &str, lease: u32) -> (Client, String) {
        let mut client = self.client(name);
        let token = client.lock(key, &format!("0 {lease}"));
        (client, fence(&token).to_string())
    }

    /// Somebody who waits for a lock, as number `place` in the queue.
    pub(super) fn waiter(&self, name: &str, key: &str, place: u64) -> Client {
        let mut client = self.client(name);
        client.begin("l", key, "600 60");
        self.server.connect().wait_for_waiters(key, place);
        client
    }

    /// Some who wait for a lock, in this order.
    pub(super) fn waiters(&self, names: &[&str], key: &str) -> Vec<Client> {
        names.iter().zip(1..).map(|(name, place)| self.waiter(name, key, place)).collect()
    }
}
