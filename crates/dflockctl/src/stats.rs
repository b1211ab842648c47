//! The answer of a server to `stats`, as `status` and `top` show it.

use std::time::{Duration, Instant};

use dflockd_client::{Client, Error};
use serde_json::Value;

use crate::connect::Connection;
use crate::output::clean;

/// The numbers and locks of one server at one instant.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServerStats {
    pub(crate) connections: u64,
    pub(crate) keys: usize,
    pub(crate) held: u64,
    pub(crate) waiting: u64,
    pub(crate) locks: Vec<Lock>,
    /// How long a ping took.
    pub(crate) took: Duration,
}

/// A lock that somebody holds or waits for.
#[derive(Clone, Debug)]
pub(crate) struct Lock {
    pub(crate) key: String,
    pub(crate) kind: &'static str,
    pub(crate) holders: Vec<Holder>,
    pub(crate) holders_total: u64,
    pub(crate) waiters: u64,
    /// How long the first of the queue has waited.
    pub(crate) longest_wait_s: f64,
}

/// A holder of a lock.
#[derive(Clone, Debug)]
pub(crate) struct Holder {
    pub(crate) conn: u64,
    pub(crate) client: String,
    pub(crate) fence: String,
    pub(crate) held_s: f64,
    pub(crate) expires_in_s: f64,
    pub(crate) role: &'static str,
}

impl Holder {
    pub(crate) fn read(value: &Value) -> Self {
        let role = match (value["writer"].as_bool(), value["leader"].as_bool()) {
            (Some(true), _) => "writer",
            (_, Some(true)) => "leader",
            (_, _) => "",
        };
        Self {
            conn: value["conn"].as_u64().unwrap_or_default(),
            client: clean(value["client"].as_str().unwrap_or_default()),
            fence: clean(value["fence"].as_str().unwrap_or_default()),
            held_s: value["held_s"].as_f64().unwrap_or_default(),
            expires_in_s: value["expires_in_s"].as_f64().unwrap_or_default(),
            role,
        }
    }
}

impl ServerStats {
    /// Pings a server and asks for its statistics.
    pub(crate) async fn ask(client: &Client) -> Result<Self, Error> {
        let asked_at = Instant::now();
        client.ping().await?;
        let took = asked_at.elapsed();
        let stats = client.stats().await?;
        Ok(Self { took, ..Self::read(stats.first().unwrap_or(&Value::Null)) })
    }

    fn read(stats: &Value) -> Self {
        let list = |name: &str| stats[name].as_array().map(Vec::as_slice).unwrap_or_default();
        let all = [
            "locks",
            "semaphores",
            "rw_locks",
            "idle_locks",
            "idle_semaphores",
            "counters",
            "kv_entries",
            "lists",
            "barriers",
        ];
        let locks: Vec<Lock> =
            [("locks", "mutex"), ("semaphores", "semaphore"), ("rw_locks", "rwlock")]
                .into_iter()
                .flat_map(|(name, kind)| list(name).iter().map(move |lock| Lock::read(lock, kind)))
                .collect();
        Self {
            connections: stats["connections"].as_u64().unwrap_or_default(),
            keys: all.iter().map(|name| list(name).len()).sum(),
            held: locks.iter().map(|lock| lock.holders_total).sum(),
            waiting: locks.iter().map(|lock| lock.waiters).sum(),
            locks,
            took: Duration::ZERO,
        }
    }

    /// The locks with the longest queues.
    pub(crate) fn longest_queues(&self, count: usize) -> Vec<&Lock> {
        let mut queues: Vec<&Lock> = self.locks.iter().filter(|lock| lock.waiters > 0).collect();
        queues.sort_by(|a, b| b.waiters.cmp(&a.waiters).then_with(|| a.key.cmp(&b.key)));
        queues.truncate(count);
        queues
    }
}

impl Lock {
    fn read(lock: &Value, kind: &'static str) -> Self {
        let holders = lock["held_by"].as_array().or_else(|| lock["holders"].as_array());
        let holders = holders.map(Vec::as_slice).unwrap_or_default();
        let more = lock["held_by_more"].as_u64().or_else(|| lock["holders_more"].as_u64());
        let queue = lock["queue"].as_array().map(Vec::as_slice).unwrap_or_default();
        Self {
            key: clean(lock["key"].as_str().unwrap_or_default()),
            kind,
            holders: holders.iter().map(Holder::read).collect(),
            holders_total: holders.len() as u64 + more.unwrap_or_default(),
            waiters: lock["waiters"].as_u64().unwrap_or_default(),
            longest_wait_s: queue.first().and_then(|it| it["waiting_s"].as_f64()).unwrap_or(0.0),
        }
    }
}

/// The address of a server, and its statistics or why there are none.
pub(crate) type Answer = (String, Result<ServerStats, Error>);

/// A client per server, so that one that is down does not hide the others.
pub(crate) struct ServerClients {
    pub(crate) servers: Vec<(String, Option<Client>)>,
}

impl ServerClients {
    pub(crate) fn new(connection: &Connection) -> Self {
        Self { servers: connection.servers.iter().map(|server| (server.clone(), None)).collect() }
    }

    /// Asks every server for its statistics, one after the other.
    pub(crate) async fn stats(&mut self, connection: &Connection) -> Vec<Answer> {
        let mut answers = Vec::new();
        for position in 0..self.servers.len() {
            let stats = match self.client(position, connection).await {
                Ok(client) => ServerStats::ask(&client).await,
                Err(error) => Err(error),
            };
            answers.push((self.servers[position].0.clone(), stats));
        }
        answers
    }

    /// The client of a server, connected if it was not.
    pub(crate) async fn client(
        &mut self,
        position: usize,
        connection: &Connection,
    ) -> Result<Client, Error> {
        let (server, client) = &mut self.servers[position];
        if let Some(client) = client {
            return Ok(client.clone());
        }
        // A failed attempt to ask must not take as long as a script would wait.
        let builder = connection.builder().request_timeout(Duration::from_secs(5));
        let connected = builder.server(server.as_str()).connect().await?;
        *client = Some(connected.clone());
        Ok(connected)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn stats_are_counted() {
        let holder = json!({"conn": 3, "fence": "7", "expires_in_s": 1.0, "held_s": 2.0,
            "client": "a\u{1b}", "writer": true});
        let stats = json!({
            "connections": 4,
            "locks": [{"key": "k", "waiters": 2, "holders": [holder],
                "queue": [{"conn": 1, "waiting_s": 9.0, "client": "b"}]}],
            "semaphores": [{"key": "s", "limit": 3, "holders": 40, "waiters": 5,
                "held_by": [holder, holder], "held_by_more": 38, "queue": []}],
            "counters": [{"key": "c", "value": 1, "idle_s": 0.0}],
        });
        let stats = ServerStats::read(&stats);
        assert_eq!((stats.connections, stats.keys), (4, 3));
        assert_eq!((stats.held, stats.waiting), (41, 7));
        assert_eq!(stats.locks[0].holders[0].client, "a\u{fffd}");
        assert_eq!(stats.locks[0].holders[0].role, "writer");
        let queues: Vec<&str> =
            stats.longest_queues(5).iter().map(|lock| lock.key.as_str()).collect();
        assert_eq!(queues, ["s", "k"]);
    }
}
