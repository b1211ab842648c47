//! Servers with an HTTP API in each mode, and sessions to use it with.

use std::net::{SocketAddr, TcpStream};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use dflockd_testkit::cluster::single;
use dflockd_testkit::http::{Ask, Events, Got, Reply, Wire, escape};
use dflockd_testkit::{Cluster, Dir, Node, Pair, Server, Turn, eventually};
use rustls::ClientConfig;
use serde_json::{Value, json};

/// Where a server is, by both protocols, and how to get in.
#[derive(Clone)]
pub(super) struct Place {
    pub(super) http: SocketAddr,
    pub(super) line: SocketAddr,
    pub(super) tls: Option<Arc<ClientConfig>>,
    pub(super) bearer: Option<String>,
}

impl Place {
    pub(super) fn wire(&self) -> Wire {
        Wire::open(self.http, self.tls.as_ref())
    }

    /// The same request with what is needed to be let in.
    pub(super) fn admitted(&self, ask: Ask) -> Ask {
        match &self.bearer {
            Some(token) => ask.header("Authorization", &format!("Bearer {token}")),
            None => ask,
        }
    }

    /// A request on a connection of its own.
    #[track_caller]
    pub(super) fn ask(&self, ask: Ask) -> Reply {
        self.wire().ask(&self.admitted(ask))
    }

    /// Sends a request; the answer is read from what this gives.
    #[track_caller]
    pub(super) fn begin(&self, ask: Ask) -> Wire {
        let mut wire = self.wire();
        wire.begin(&self.admitted(ask));
        wire
    }

    #[track_caller]
    pub(super) fn get(&self, path: &str) -> Reply {
        self.ask(Ask::get(path))
    }

    #[track_caller]
    pub(super) fn post(&self, path: &str, body: &Value) -> Reply {
        self.ask(Ask::post(path, body))
    }

    #[track_caller]
    pub(super) fn put(&self, path: &str, body: &Value) -> Reply {
        self.ask(Ask::new("PUT", path).body(body.to_string()))
    }

    #[track_caller]
    pub(super) fn delete(&self, path: &str) -> Reply {
        self.ask(Ask::new("DELETE", path))
    }

    /// A stream of events that stands.
    #[track_caller]
    pub(super) fn events(&self, path: &str) -> Events {
        self.begin(Ask::get(path)).into_events()
    }

    #[track_caller]
    pub(super) fn session(&self) -> Session {
        self.session_with(&json!({}))
    }

    #[track_caller]
    pub(super) fn session_with(&self, body: &Value) -> Session {
        let answer = self.post("/v1/sessions", body).ok();
        let id = answer["session_id"].as_str().expect("an id").to_owned();
        assert!(is_id(&id), "{id}");
        Session { place: self.clone(), id }
    }

    /// A client of the line protocol.
    pub(super) fn line(&self) -> dflockd_testkit::Client {
        let socket = TcpStream::connect(self.line).expect("the server listens");
        socket.set_nodelay(true).unwrap();
        match &self.tls {
            None => dflockd_testkit::Client::over(socket),
            Some(config) => {
                dflockd_testkit::Client::over_tls(socket, Arc::clone(config)).unwrap().0
            }
        }
    }

    /// The single view of a key, if the key is anything.
    #[track_caller]
    pub(super) fn look(&self, key: &str) -> Option<Value> {
        let reply = self.get(&format!("/v1/locks/{}", escape(key)));
        if reply.status == 404 {
            reply.refused(404, "not_found");
            return None;
        }
        Some(reply.ok())
    }

    /// How many hold a key and how many wait for it, over all its kinds.
    #[track_caller]
    pub(super) fn crowd(&self, key: &str) -> (u64, u64) {
        let Some(view) = self.look(key) else { return (0, 0) };
        let locks = view["locks"].as_array().expect("a list");
        let sum = |name: &str| locks.iter().map(|lock| lock[name].as_u64().unwrap()).sum();
        (sum("holders_total"), sum("waiters_total"))
    }

    #[track_caller]
    pub(super) fn wait_for_crowd(&self, key: &str, holders: u64, waiters: u64) {
        eventually(&format!("{holders} holders and {waiters} waiters of {key}"), || {
            self.crowd(key) == (holders, waiters)
        });
    }

    /// How many sessions there are.
    #[track_caller]
    pub(super) fn sessions(&self) -> u64 {
        let overview = self.get("/v1/overview").ok();
        overview["http_sessions"].as_u64().unwrap_or_else(|| panic!("{overview}"))
    }

    fn wait_until_ready(&self) {
        eventually("it is ready", || {
            let mut wire = Wire::connect(self.http, self.tls.as_ref()).ok()?;
            wire.try_send(Ask::get("/ready").bytes()).ok()?;
            let reply = wire.try_reply(Duration::from_secs(2)).ok()?;
            (reply.status == 200).then_some(())
        });
    }
}

pub(super) fn is_id(text: &str) -> bool {
    text.len() == 32 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A server of one process.
pub(super) struct Site {
    pub(super) place: Place,
    pub(super) server: Server,
    _dir: Dir,
}

impl Deref for Site {
    type Target = Place;

    fn deref(&self) -> &Place {
        &self.place
    }
}

impl Site {
    /// In memory mode.
    pub(super) fn start(args: &[&str]) -> Self {
        Self::launch(Dir::new(), None, args)
    }

    /// In memory mode with a bearer token.
    pub(super) fn guarded(token: &str, args: &[&str]) -> Self {
        let mut site = Self::start(&[&["--auth-token", token], args].concat());
        site.place.bearer = Some(token.to_owned());
        site
    }

    pub(super) fn with_tls(args: &[&str]) -> Self {
        let (dir, pair) = (Dir::new(), Pair::new());
        let [cert, key] = pair.flags(&dir);
        Self::launch(dir, Some(pair.client()), &[&[&*cert, &key], args].concat())
    }

    /// With a certificate that the caller has named in the flags.
    pub(super) fn start_trusting(pair: &Pair, args: &[&str]) -> Self {
        Self::launch(Dir::new(), Some(pair.client()), args)
    }

    /// One node with a log on disk.
    pub(super) fn durable(args: &[&str]) -> Self {
        let dir = Dir::new();
        let flags = single(&dir);
        let mut all: Vec<&str> = flags.iter().map(String::as_str).collect();
        all.extend_from_slice(args);
        let site = Self::launch(dir, None, &all);
        site.wait_until_ready();
        site
    }

    fn launch(dir: Dir, tls: Option<Arc<ClientConfig>>, args: &[&str]) -> Self {
        let (server, http) = Server::start_with_api("--http-port", args);
        let place = Place { http, line: server.address, tls, bearer: None };
        Self { place, server, _dir: dir }
    }
}

/// A cluster each of whose members has an HTTP API.
pub(super) struct Members {
    pub(super) cluster: Cluster,
    pub(super) places: Vec<Place>,
}

impl Members {
    pub(super) fn start(size: usize, flags: &[&str]) -> Self {
        // The usual election timeout: these tests are not about elections, and the machine may be busy.
        let mut cluster = Cluster::prepare(Turn::shared(), size, flags);
        let addresses = cluster.add_api("--http-port");
        cluster.start_all();
        let place = |(node, http): (&Node, SocketAddr)| Place {
            http,
            line: node.client,
            tls: None,
            bearer: None,
        };
        let places: Vec<_> = cluster.nodes.iter().zip(addresses).map(place).collect();
        for place in &places {
            place.wait_until_ready();
        }
        Self { cluster, places }
    }

    pub(super) fn leader(&self) -> &Place {
        &self.places[self.cluster.leader()]
    }

    pub(super) fn follower(&self) -> &Place {
        &self.places[self.cluster.follower()]
    }
}

/// A grant as it was told.
#[derive(Clone, Debug)]
pub(super) struct Grant {
    pub(super) token: String,
    pub(super) fence: u64,
    pub(super) body: Value,
}

impl Grant {
    /// Checks the form of a grant.
    #[track_caller]
    pub(super) fn of(body: Value) -> Self {
        assert!(body["status"] == "ok" || body["status"] == "acquired", "no grant: {body}");
        let token = body["token"].as_str().expect("a token").to_owned();
        assert!(is_id(&token), "{token}");
        let fence = body["fence"].as_str().expect("a fence is a string").parse().expect("decimal");
        assert_eq!(fence, dflockd_testkit::fence(&token), "R5: the token begins with the fence");
        let lease_ms = body["lease_ttl_ms"].as_u64().expect("milliseconds");
        assert_eq!(body["lease_ttl_s"].as_u64(), Some(lease_ms / 1000), "{body}");
        assert_eq!(body["valid_for_ms"].as_u64(), Some(lease_ms), "{body}");
        Self { token, fence, body }
    }

    /// The body of a release or renewal.
    pub(super) fn proof(&self) -> Value {
        json!({ "token": self.token })
    }
}

/// A session.
pub(super) struct Session {
    pub(super) place: Place,
    pub(super) id: String,
}

impl Session {
    #[track_caller]
    pub(super) fn post(&self, path: &str, body: &Value) -> Reply {
        self.place.ask(Ask::post(path, body).session(&self.id))
    }

    /// Sends a request; the answer is read from what this gives.
    #[track_caller]
    pub(super) fn begin(&self, path: &str, body: &Value) -> Wire {
        self.place.begin(Ask::post(path, body).session(&self.id))
    }

    /// Takes something that is free or becomes free in time.
    #[track_caller]
    pub(super) fn take(&self, path: &str, body: &Value) -> Grant {
        Grant::of(self.post(path, body).ok())
    }

    /// Takes a lock that is free.
    #[track_caller]
    pub(super) fn lock(&self, key: &str) -> Grant {
        self.take(&format!("/v1/locks/{}", escape(key)), &json!({ "lease_ttl_s": 600 }))
    }

    /// Takes a lock that is free, and gives it back.
    #[track_caller]
    pub(super) fn lock_and_unlock(&self, key: &str) {
        self.unlock(key, &self.lock(key));
    }

    #[track_caller]
    pub(super) fn unlock(&self, key: &str, grant: &Grant) {
        self.post(&format!("/v1/locks/{}/release", escape(key)), &grant.proof()).empty();
    }

    /// Waits for a lock that somebody has; comes back once it stands in the queue as number `place`.
    #[track_caller]
    pub(super) fn queue(&self, key: &str, place: u64) -> Wire {
        let body = json!({ "acquire_timeout_s": 600, "lease_ttl_s": 600 });
        let wire = self.begin(&format!("/v1/locks/{}", escape(key)), &body);
        eventually(&format!("{place} waiters of {key}"), || self.place.crowd(key).1 == place);
        wire
    }

    #[track_caller]
    pub(super) fn ping(&self) -> Reply {
        self.place.ask(Ask::new("POST", &format!("/v1/sessions/{}/ping", self.id)))
    }

    #[track_caller]
    pub(super) fn end(&self) -> Reply {
        self.place.delete(&format!("/v1/sessions/{}", self.id))
    }
}

/// The grant that a waiting request gets.
#[track_caller]
pub(super) fn granted(wire: &mut Wire) -> Grant {
    Grant::of(wire.reply().ok())
}

/// That no answer comes for a while.
#[track_caller]
pub(super) fn still_waits(wire: &mut Wire) {
    assert_eq!(wire.hear(dflockd_testkit::A_WHILE), Got::Nothing);
}
