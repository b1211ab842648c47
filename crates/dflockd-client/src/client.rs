//! The client: servers, how to reach them, and the way of a request to one of them.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use dflockd_wire::{ErrorCode, Fence, Request, Space, Token, check, command};
use tokio::sync::Mutex;

use crate::cluster::{Cluster, Membership, Route};
use crate::error::Error;
use crate::events::{Signals, Watch};
use crate::link::{Link, LinkHandle, OnDisconnect, Start, wait_of};
use crate::locks::{Election, Lock, RwLock, Semaphore};
use crate::reply::Reply;
use crate::stream::{Address, Connection, Dialer, Greeting, Session, Transport};
use crate::values::{Barrier, Counter, Kv, List};

/// Keys that a server lists at a time.
const LS_MAX: usize = 10_000;
/// A list of keys that is shorter than this was not cut because of its length; that happens at 1 MiB.
const LS_CUT_BYTES: usize = 512 * 1024;
/// Idle plain connections kept per server.
const POOL_MAX: usize = 8;
/// A silent connection is asked after so long whether it stands.
const HEARTBEAT: Duration = Duration::from_secs(5);
/// A silent connection to a member of a cluster is asked so soon: there are others to turn to.
const HEARTBEAT_IN_CLUSTER: Duration = Duration::from_secs(1);

/// How to connect.
#[derive(Clone)]
#[must_use = "call `connect`"]
pub struct ClientBuilder {
    servers: Vec<String>,
    /// The servers are members of one cluster.
    cluster: bool,
    prefer_leader: bool,
    heartbeat: Option<Duration>,
    transport: Transport,
    name: String,
    auth: Option<Arc<str>>,
    tls: Option<Arc<rustls::ClientConfig>>,
    on_disconnect: OnDisconnect,
    lease: Duration,
    connect_timeout: Duration,
    request_timeout: Duration,
    session: Option<String>,
}

impl Default for ClientBuilder {
    fn default() -> Self {
        Self {
            servers: vec!["127.0.0.1:6388".to_owned()],
            cluster: false,
            prefer_leader: false,
            heartbeat: None,
            transport: Transport::Lines,
            name: format!("rust-{}", std::process::id()),
            auth: None,
            tls: None,
            on_disconnect: OnDisconnect::Keep,
            lease: Duration::from_secs(10),
            connect_timeout: Duration::from_secs(5),
            request_timeout: Duration::from_secs(10),
            session: None,
        }
    }
}

impl ClientBuilder {
    /// One server, `host:port`.
    pub fn server(self, server: impl Into<String>) -> Self {
        self.servers([server.into()])
    }

    /// Several servers that know nothing of each other. A key belongs to the server numbered by its CRC-32 modulo
    /// their number, as in every dflockd client.
    pub fn servers(mut self, servers: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.servers = servers.into_iter().map(Into::into).collect();
        self.cluster = false;
        self
    }

    /// One or more members of one cluster. One is enough: it tells of the others. The client has one session, at
    /// a member chosen at random, and takes it to another one when that member fails.
    pub fn cluster(mut self, members: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.servers = members.into_iter().map(Into::into).collect();
        self.cluster = true;
        self
    }

    /// In a cluster: talk to the leader, wherever it is. Answers come a little sooner, and the leader has more to do.
    pub fn prefer_leader(mut self, prefer: bool) -> Self {
        self.prefer_leader = prefer;
        self
    }

    /// What is spoken; the line protocol if not set.
    pub fn transport(mut self, transport: Transport) -> Self {
        self.transport = transport;
        self
    }

    /// How long a connection may be silent before it is asked whether it stands; 5 s if not set, in a cluster 1 s, or
    /// a tenth of the shortest lease held. In a cluster a member that does not answer a request is asked after a third
    /// of that, and left for another one after the whole of it, if the session is kept.
    pub fn heartbeat(mut self, heartbeat: Duration) -> Self {
        self.heartbeat = Some(heartbeat);
        self
    }

    /// The name people see for this client in `stats` and `inspect`: 1 to 64 printable characters, no space.
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = name.into();
        self
    }

    /// The token of servers that ask for one.
    pub fn auth_token(mut self, token: impl Into<Arc<str>>) -> Self {
        self.auth = Some(token.into());
        self
    }

    /// Talk TLS.
    pub fn tls(mut self, config: Arc<rustls::ClientConfig>) -> Self {
        self.tls = Some(config);
        self
    }

    /// What happens to locks when the connection breaks.
    pub fn on_disconnect(mut self, what: OnDisconnect) -> Self {
        self.on_disconnect = what;
        self
    }

    /// The lease of locks that name none; 10 s if not set.
    pub fn lease(mut self, lease: Duration) -> Self {
        self.lease = lease;
        self
    }

    /// How long connecting may take; 5 s if not set.
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.connect_timeout = timeout;
        self
    }

    /// How long an answer may take, waiting for a lock apart; 10 s if not set.
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.request_timeout = timeout;
        self
    }

    /// Takes over the session of another client, which is cut off: its holds and its places in queues. For one
    /// server or one cluster; the session is what [`Client::session`] told.
    pub fn attach(mut self, session: impl Into<String>) -> Self {
        self.session = Some(session.into());
        self
    }

    /// Connects to all servers.
    ///
    /// # Errors
    ///
    /// If one can not be reached, refuses the token, or a setting is impossible.
    pub async fn connect(self) -> Result<Client, Error> {
        let dialer = Dialer {
            tls: self.tls.clone(),
            auth: self.auth.clone(),
            client_name: self.name.as_str().into(),
            connect_timeout: self.connect_timeout,
            user_timeout: None,
            transport: self.transport,
        };
        if self.cluster {
            return self.connect_within(dialer).await;
        }
        let addresses = self.servers.iter().map(|server| dialer.address(server.clone()));
        let addresses = addresses.collect();
        self.connect_to(addresses).await
    }

    async fn connect_within(self, dialer: Dialer) -> Result<Client, Error> {
        self.check()?;
        if self.servers.is_empty() {
            return Err(Error::Invalid("no member given".to_owned()));
        }
        let cluster = Cluster::new(dialer, self.servers.clone(), self.prefer_leader);
        let session = self.session.as_deref();
        let on_disconnect = session.map_or(self.on_disconnect, |_| OnDisconnect::Keep);
        let joined = cluster.join(on_disconnect, session).await?;
        let heartbeat = self.heartbeat.unwrap_or(HEARTBEAT_IN_CLUSTER);
        let start = Start { on_disconnect, heartbeat, last: joined.last };
        let (route, at) = (Route::Cluster(cluster), joined.address.name);
        let link = Link::start(route.clone(), at, start, joined.connection, joined.session);
        Ok(self.client(vec![Server { route, way: Way::Shared(link) }]))
    }

    fn check(&self) -> Result<(), Error> {
        let printable = self.name.bytes().all(|byte| byte.is_ascii_graphic());
        if self.name.is_empty() || self.name.len() > 64 || !printable {
            return Err(Error::Invalid(format!("not a client name: {:?}", self.name)));
        }
        if self.heartbeat.is_some_and(|heartbeat| heartbeat.is_zero()) {
            return Err(Error::Invalid("a heartbeat is longer than nothing".to_owned()));
        }
        Ok(())
    }

    fn client(&self, servers: Vec<Server>) -> Client {
        let inner = Inner { servers, lease: self.lease, request_timeout: self.request_timeout };
        Client { inner: Arc::new(inner) }
    }

    #[cfg(feature = "testing")]
    pub(crate) fn client_name(&self) -> &str {
        &self.name
    }

    pub(crate) async fn connect_to(self, addresses: Vec<Address>) -> Result<Client, Error> {
        self.check()?;
        if addresses.is_empty() {
            return Err(Error::Invalid("no server given".to_owned()));
        }
        let mut servers = Vec::new();
        let heartbeat = self.heartbeat.unwrap_or(HEARTBEAT.min(self.request_timeout));
        if let Some(session) = &self.session {
            let [address] = <[Address; 1]>::try_from(addresses)
                .map_err(|_| Error::Invalid("a session belongs to one server".to_owned()))?;
            servers.push(Server::attach(address, session, heartbeat).await?);
        } else {
            for address in addresses {
                servers.push(Server::connect(address, self.on_disconnect, heartbeat).await?);
            }
        }
        Ok(self.client(servers))
    }
}

/// A connection to one dflockd server, to several that share the keys, or to a cluster. Cheap to clone.
///
/// ```no_run
/// # async fn example() -> Result<(), dflockd_client::Error> {
/// let client = dflockd_client::Client::connect("127.0.0.1:6388").await?;
/// let guard = client.lock("jobs/nightly").acquire().await?;
/// if guard.is_valid() {
///     println!("mine, with fence {}", guard.fence());
/// }
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Client {
    pub(crate) inner: Arc<Inner>,
}

pub(crate) struct Inner {
    servers: Vec<Server>,
    pub(crate) lease: Duration,
    pub(crate) request_timeout: Duration,
}

/// One server or cluster, and the best way it can be talked to.
pub(crate) struct Server {
    pub(crate) route: Route,
    pub(crate) way: Way,
}

pub(crate) enum Way {
    /// Everything over one connection.
    Shared(Arc<LinkHandle>),
    /// A connection per held or waiting lock, and a few for the rest.
    Plain(Mutex<Vec<Connection>>),
}

impl Server {
    async fn connect(
        address: Address,
        on_disconnect: OnDisconnect,
        heartbeat: Duration,
    ) -> Result<Self, Error> {
        let mut connection = address.connect().await?;
        let (wanted, timeout) = (Session::New(on_disconnect), address.connect_timeout);
        let greeting = connection.greet(&address.client_name, wanted, timeout).await;
        let (name, route) = (address.name.clone(), Route::One(address.clone()));
        let way = match greeting {
            Ok(Greeting::Accepted { session, .. }) => {
                let start = Start { on_disconnect, heartbeat, last: 0 };
                Way::Shared(Link::start(route.clone(), name, start, connection, session))
            }
            // It does not know the greeting. Servers of the first generations close after anything they do not
            // know, some after an answer, so this connection is not used again.
            Ok(Greeting::Unsuited | Greeting::Refused(ErrorCode::Error))
                if address.may_be_old() =>
            {
                Way::Plain(Mutex::new(Vec::new()))
            }
            Ok(Greeting::Unsuited) => return Err(address.unreachable("it keeps no sessions")),
            Ok(Greeting::Refused(code)) => return Err(address.unreachable(code.text())),
            Ok(Greeting::NotLeader(_)) => return Err(Error::Refused(ErrorCode::NotLeader)),
            Err(error)
                if error.kind() == std::io::ErrorKind::UnexpectedEof && address.may_be_old() =>
            {
                Way::Plain(Mutex::new(Vec::new()))
            }
            Err(error) => return Err(address.greeting_failed(&error)),
        };
        Ok(Self { route, way })
    }

    /// Connects to a session that exists.
    async fn attach(address: Address, session: &str, heartbeat: Duration) -> Result<Self, Error> {
        let mut connection = address.connect().await?;
        let (wanted, timeout) = (Session::TakeOver(session), address.connect_timeout);
        let greeted = connection.greet(&address.client_name, wanted, timeout).await;
        match greeted.map_err(|error| address.greeting_failed(&error))? {
            Greeting::Accepted { session, last } => {
                let last = last.unwrap_or_else(above_all_numbers);
                let start = Start { on_disconnect: OnDisconnect::Keep, heartbeat, last };
                let (name, route) = (address.name.clone(), Route::One(address));
                let link = Link::start(route.clone(), name, start, connection, session);
                Ok(Self { route, way: Way::Shared(link) })
            }
            Greeting::Unsuited | Greeting::Refused(_) | Greeting::NotLeader(_) => {
                Err(Error::Invalid("no such session".to_owned()))
            }
        }
    }

    /// Sends a request and waits for its answer, `timeout` longer than the server may.
    async fn ask(&self, request: &Request<'_>, timeout: Duration) -> Result<Reply, Error> {
        let timeout = timeout.saturating_add(wait_of(request));
        match &self.way {
            Way::Shared(link) => Ok(link.call(request)?.wait(timeout).await?.claim()),
            Way::Plain(pool) => {
                let pooled = pool.lock().await.pop();
                let mut connection = match pooled {
                    Some(connection) => connection,
                    None => self.route.connect().await?,
                };
                // If this future is dropped the connection goes with it, and a late answer as well.
                let reply = connection.ask(None, request, timeout).await;
                let reply = reply.map_err(|error| Error::Unknown { reason: error.to_string() })?;
                let mut pool = pool.lock().await;
                if pool.len() < POOL_MAX {
                    pool.push(connection);
                }
                Ok(reply)
            }
        }
    }
}

impl Client {
    /// Connects to one server with everything else as it comes.
    ///
    /// # Errors
    ///
    /// If it can not be reached.
    pub async fn connect(server: impl Into<String>) -> Result<Self, Error> {
        Self::builder().server(server).connect().await
    }

    /// Connects to a cluster of which some members are named; one is enough.
    ///
    /// ```no_run
    /// # async fn example() -> Result<(), dflockd_client::Error> {
    /// let client = dflockd_client::Client::cluster(["10.0.0.1:6388", "10.0.0.2:6388"]).await?;
    /// let guard = client.lock("jobs/nightly").acquire().await?;
    /// // Stays valid when a member is killed, the leader included.
    /// # guard.release().await
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// If no member can be reached, or none of the servers is one.
    pub async fn cluster(
        members: impl IntoIterator<Item = impl Into<String>>,
    ) -> Result<Self, Error> {
        Self::builder().cluster(members).connect().await
    }

    /// The cluster as this client knows it now; none if it was not given as one.
    #[must_use]
    pub fn membership(&self) -> Option<Membership> {
        self.inner.servers.iter().find_map(|it| it.route.cluster()).map(|it| it.membership())
    }

    /// For all that can be chosen.
    pub fn builder() -> ClientBuilder {
        ClientBuilder::default()
    }

    /// A mutex.
    pub fn lock(&self, key: impl Into<Vec<u8>>) -> Lock {
        Lock::new(self, key.into())
    }

    /// A semaphore with so many slots.
    pub fn semaphore(&self, key: impl Into<Vec<u8>>, limit: u32) -> Semaphore {
        Semaphore::new(self, key.into(), limit)
    }

    /// A read-write lock.
    pub fn rw_lock(&self, key: impl Into<Vec<u8>>) -> RwLock {
        RwLock::new(self, key.into())
    }

    /// A leader election.
    pub fn election(&self, key: impl Into<Vec<u8>>) -> Election {
        Election::new(self, key.into())
    }

    /// A barrier for so many participants.
    pub fn barrier(&self, key: impl Into<Vec<u8>>, count: u32) -> Barrier {
        Barrier::new(self, key.into(), count)
    }

    /// A counter.
    pub fn counter(&self, key: impl Into<Vec<u8>>) -> Counter {
        Counter::new(self, key.into())
    }

    /// A key-value entry.
    pub fn kv(&self, key: impl Into<Vec<u8>>) -> Kv {
        Kv::new(self, key.into())
    }

    /// A list.
    pub fn list(&self, key: impl Into<Vec<u8>>) -> List {
        List::new(self, key.into())
    }

    /// Sends a payload to the listeners of a channel and returns to how many.
    ///
    /// # Errors
    ///
    /// If the channel has wildcards or the payload can not be sent.
    pub async fn signal(&self, channel: &str, payload: &[u8]) -> Result<u64, Error> {
        check_key(channel.as_bytes())?;
        check_value(payload)?;
        let request = Request::command(command::Signal { channel: channel.as_bytes(), payload });
        self.ask(channel.as_bytes(), &request).await?.count("signal")
    }

    /// Listens to the signals of a channel or pattern on every server. With a group, each signal goes to one of
    /// its members.
    ///
    /// # Errors
    ///
    /// If a server can not be reached or refuses.
    pub async fn listen(&self, pattern: &str, group: Option<&str>) -> Result<Signals, Error> {
        Signals::new(self, pattern, group.unwrap_or_default()).await
    }

    /// Watches changes of a key or pattern on every server.
    ///
    /// # Errors
    ///
    /// If a server can not be reached or refuses.
    pub async fn watch(&self, pattern: &str) -> Result<Watch, Error> {
        Watch::new(self, pattern).await
    }

    /// Asks each server whether it answers.
    ///
    /// # Errors
    ///
    /// If one does not.
    pub async fn ping(&self) -> Result<(), Error> {
        for server in &self.inner.servers {
            server.ask(&Request::Ping, self.inner.request_timeout).await?.done("ping")?;
        }
        Ok(())
    }

    /// The `stats` of each server as JSON, in the order the servers were given.
    ///
    /// # Errors
    ///
    /// If one can not be asked.
    pub async fn stats(&self) -> Result<Vec<serde_json::Value>, Error> {
        let mut all = Vec::new();
        for server in &self.inner.servers {
            let reply = server.ask(&Request::Stats, self.inner.request_timeout).await?;
            all.push(reply.json("stats")?);
        }
        Ok(all)
    }

    /// What a key is: kind, holders, queue; none if nothing is known of it.
    ///
    /// # Errors
    ///
    /// If the server does not know the command or can not be asked.
    pub async fn inspect(&self, key: &[u8]) -> Result<Option<serde_json::Value>, Error> {
        let reply = self.ask(key, &Request::Inspect { key }).await?;
        if matches!(reply, Reply::Nil) { Ok(None) } else { reply.json("inspect").map(Some) }
    }

    /// Up to `limit` keys of each server that begin with `prefix` and come after `after`, in order. What a server does
    /// not tell in one answer it is asked for in several, between which others may change the keys.
    ///
    /// # Errors
    ///
    /// If a server does not know the command or can not be asked.
    pub async fn keys(
        &self,
        prefix: &[u8],
        limit: usize,
        after: Option<&[u8]>,
    ) -> Result<Vec<serde_json::Value>, Error> {
        let mut all = Vec::new();
        for server in &self.inner.servers {
            let (mut left, mut after) = (limit, after.map(<[u8]>::to_vec));
            while left > 0 {
                let wanted = left.min(LS_MAX);
                let request = Request::Ls { prefix, limit: wanted, after: after.as_deref() };
                let reply = server.ask(&request, self.inner.request_timeout).await?;
                let serde_json::Value::Array(keys) = reply.json("ls")? else { break };
                after = keys.last().and_then(|key| Some(key["key"].as_str()?.as_bytes().to_vec()));
                // A page has fewer keys than asked for if it would be too long, or if there are no more.
                let is_cut = keys.len() == wanted || reply.text_bytes() >= LS_CUT_BYTES;
                let is_last = !is_cut || after.is_none();
                left = left.saturating_sub(keys.len());
                all.extend(keys);
                if is_last {
                    break;
                }
            }
        }
        all.sort_by(|a, b| a["key"].as_str().cmp(&b["key"].as_str()));
        if self.inner.servers.len() > 1 {
            all.truncate(limit);
        }
        Ok(all)
    }

    /// Releases a hold by its token, whoever took it. `semaphore` says in which namespace the key is.
    ///
    /// # Errors
    ///
    /// If it is not held, or the server can not be asked.
    pub async fn release_token(
        &self,
        key: &[u8],
        semaphore: bool,
        token: &str,
    ) -> Result<(), Error> {
        check_token(token)?;
        let (space, token) = (space(semaphore), token_of(token));
        let request = Request::command(command::Release { space, key, token, resign: false });
        self.ask(key, &request).await?.done(request.op().name())
    }

    /// Renews a hold by its token, whoever took it, and returns its lease.
    ///
    /// # Errors
    ///
    /// If it is not held, or the server can not be asked.
    pub async fn renew_token(
        &self,
        key: &[u8],
        semaphore: bool,
        token: &str,
        lease: Duration,
    ) -> Result<Duration, Error> {
        check_token(token)?;
        let (space, token) = (space(semaphore), token_of(token));
        let request =
            Request::command(command::Renew { space, key, token, lease: Some(lease.into()) });
        self.ask(key, &request).await?.renewed("renew")
    }

    /// Ends somebody's hold. The server logs who did it and why.
    ///
    /// # Errors
    ///
    /// If it is not held, the admin token is wrong, or the server can not be asked.
    pub async fn force_release(
        &self,
        key: &[u8],
        semaphore: bool,
        fence: u64,
        admin_token: &str,
        reason: &str,
    ) -> Result<(), Error> {
        check_token(admin_token)?;
        check_value(reason.as_bytes())?;
        let command = command::ForceRelease { space: space(semaphore), fence: Fence(fence), key };
        let request = Request::ForceRelease { command, token: admin_token.as_bytes(), reason };
        self.ask(key, &request).await?.done("force-release")
    }

    /// Ends a session or connection and all it holds, on the first server. The server logs who did it and why.
    ///
    /// # Errors
    ///
    /// If there is none, the admin token is wrong, or the server can not be asked.
    pub async fn end_session(
        &self,
        session: u64,
        admin_token: &str,
        reason: &str,
    ) -> Result<(), Error> {
        check_token(admin_token)?;
        check_value(reason.as_bytes())?;
        let request = Request::EndSession { session, token: admin_token.as_bytes(), reason };
        let server = &self.inner.servers[0];
        server.ask(&request, self.inner.request_timeout).await?.done("end-session")
    }

    /// By what another process can take over the session of this client, see [`ClientBuilder::attach`]. None with
    /// several servers, with [`OnDisconnect::Release`], or if the server does not keep sessions.
    #[must_use]
    pub fn session(&self) -> Option<String> {
        match self.inner.servers.as_slice() {
            [Server { way: Way::Shared(link), .. }] => link.session(),
            _ => None,
        }
    }

    pub(crate) fn servers(&self) -> &[Server] {
        &self.inner.servers
    }

    /// The server a key belongs to.
    pub(crate) fn server(&self, key: &[u8]) -> &Server {
        let count = self.inner.servers.len();
        &self.inner.servers[shard(key, count)]
    }

    /// Asks the server that a key belongs to.
    pub(crate) async fn ask(&self, key: &[u8], request: &Request<'_>) -> Result<Reply, Error> {
        check_key(key)?;
        self.server(key).ask(request, self.inner.request_timeout).await
    }
}

/// A number above all that earlier clients of a session used, or their answers would come back. For servers that do not
/// tell: it is a guess, and wrong if the clock was set back since.
pub(crate) fn above_all_numbers() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or_default()
}

/// The number of the server a key belongs to, the same in every dflockd client.
#[must_use]
pub fn shard(key: &[u8], servers: usize) -> usize {
    crc32fast::hash(key) as usize % servers.max(1)
}

pub(crate) fn check_key(key: &[u8]) -> Result<(), Error> {
    check::key(key)?;
    Ok(())
}

pub(crate) fn check_value(value: &[u8]) -> Result<(), Error> {
    check::value(value)?;
    Ok(())
}

fn check_token(token: &str) -> Result<(), Error> {
    if token.is_empty() || token.contains(|it: char| it.is_ascii_whitespace()) {
        return Err(Error::Invalid("a token is not empty and has no white space".to_owned()));
    }
    Ok(())
}

/// What a text is as a token; one that is malformed is not held.
fn token_of(text: &str) -> Token {
    Token::parse(text.as_bytes()).unwrap_or(Token::NONE)
}

fn space(semaphore: bool) -> Space {
    if semaphore { Space::Semaphores } else { Space::Locks }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_go_where_every_client_sends_them() {
        let check = |key: &str, expected: [usize; 4]| {
            let got = [2, 3, 4, 5].map(|servers| shard(key.as_bytes(), servers));
            assert_eq!(got, expected, "{key}");
        };
        check("my-resource", [0, 0, 2, 3]);
        check("my-key", [1, 2, 1, 2]);
        check("bench", [1, 0, 1, 2]);
        check("deploy-job", [0, 1, 2, 4]);
        check("worker-pool", [0, 2, 0, 3]);
        check("a", [1, 0, 3, 2]);
        check("ключ", [0, 0, 2, 3]);
        check("日本", [0, 2, 0, 1]);
    }
}
