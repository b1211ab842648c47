//! A server that is talked to by gRPC, as scripts of the line protocol see it: each request line becomes the call that
//! stands for it, and what comes of it is printed as the line protocol would.

use std::collections::{BTreeMap, VecDeque};
use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dflockd_testkit::cluster::single;
use dflockd_testkit::script::list::Difference;
use dflockd_testkit::script::through::{
    Api, answer_line, next_line, outcome_line, push_line, read,
};
use dflockd_testkit::{Dir, Server};
use dflockd_wire::command::{Subscribe, Unsubscribe};
use dflockd_wire::grpc::subscribe_response::What;
use dflockd_wire::grpc::{
    self as proto, CloseRequest, CommandCall, GetCounterRequest, GetRequest, Head, LengthRequest,
    ObserveRequest, RangeRequest, Reason, SubscribeRequest, Subscription as Wish, WatchRequest,
};
use dflockd_wire::{
    Command, ErrorCode, Frame, Op, Outcome, Push, Query, Request, Response, Subscription,
};
use parking_lot::Mutex;
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::site::{Link, Session, info};
use super::transcripts;

/// After this, what is not answered waits.
const UNANSWERED: Duration = Duration::from_millis(60);

/// A server, and the connections of a script.
pub(super) struct Played {
    runtime: Runtime,
    server: Server,
    link: Link,
    conns: BTreeMap<String, Conn>,
    /// The lease of who names none, which sessions have as their time to live.
    ttl_ms: u64,
    _dir: Dir,
}

/// What a script calls a connection: a session, and lines that came.
struct Conn {
    requests: mpsc::UnboundedSender<Vec<u8>>,
    lines: Arc<Lines>,
    session: Session,
    worker: AbortHandle,
}

#[derive(Default)]
struct Lines {
    state: Mutex<LinesState>,
}

#[derive(Default)]
struct LinesState {
    arrived: VecDeque<Vec<u8>>,
    /// Requests that are not answered.
    open: usize,
}

impl Lines {
    fn push(&self, line: Vec<u8>) {
        self.state.lock().arrived.push_back(line);
    }

    fn answer(&self, response: &Response<'_>) {
        self.answer_with(answer_line(response));
    }

    fn answer_with(&self, line: Vec<u8>) {
        let mut state = self.state.lock();
        state.open -= 1;
        state.arrived.push_back(line);
    }

    fn tell(&self, push: &Push<'_>) {
        self.push(push_line(push));
    }
}

impl Played {
    fn conn(&mut self, conn: &str) -> &mut Conn {
        self.conns.get_mut(conn).expect("opened before it is used")
    }
}

/// The server answers once it has a leader.
async fn connect(address: SocketAddr) -> Link {
    let link = Link::connect(address).await;
    dflockd_testkit::eventually::tasks::eventually("it can open sessions", async || {
        link.sessions().open(proto::OpenRequest::default()).await.ok().map(|_| ())
    })
    .await;
    link
}

fn default_lease(flags: &[String]) -> u64 {
    let mut flags = flags.iter();
    while let Some(flag) = flags.next() {
        if flag == "--default-lease-ttl" {
            return flags.next().and_then(|value| value.parse().ok()).expect("a number");
        }
        if let Some(value) = flag.strip_prefix("--default-lease-ttl=") {
            return value.parse().expect("a number");
        }
    }
    33
}

impl Api for Played {
    const NOT_THE_SAME: &'static [Difference] = transcripts::NOT_THE_SAME;
    const PLAYED_MIN: usize = transcripts::PLAYED_MIN;

    fn has(op: Op, _: &Frame<'_>) -> bool {
        transcripts::has_call(op)
    }

    fn start(flags: &[String], durable: bool) -> Result<Self, String> {
        let dir = Dir::new();
        let mut all = flags.to_vec();
        if durable {
            all.extend(single(&dir));
            all.extend(
                ["--election-timeout-ms", "400", "--failover-grace", "0"].map(str::to_owned),
            );
        }
        let (server, grpc) = Server::start_with_api("--grpc-port", &all);
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
        let ttl_ms = default_lease(flags) * 1000;
        let link = runtime.block_on(connect(grpc));
        let conns = BTreeMap::new();
        Ok(Self { runtime, server, link, conns, ttl_ms, _dir: dir })
    }

    fn open(&mut self, conn: &str) {
        let session = self.runtime.block_on(self.link.open(self.ttl_ms));
        let (requests, queue) = mpsc::unbounded_channel();
        let lines = Arc::new(Lines::default());
        let talk = Talk::new(session.clone(), Arc::clone(&lines));
        let worker = self.runtime.spawn(talk.run(queue)).abort_handle();
        self.conns.insert(conn.to_owned(), Conn { requests, lines, session, worker });
    }

    fn send(&mut self, conn: &str, requests: Vec<Vec<u8>>) {
        let conn = self.conn(conn);
        for request in requests {
            conn.lines.state.lock().open += 1;
            conn.requests.send(request).expect("its worker runs");
        }
        self.settle();
    }

    fn close(&mut self, conn: &str) {
        let conn = self.conns.remove(conn).expect("opened before it is used");
        conn.worker.abort();
        let close = CloseRequest { session: conn.session.id.clone() };
        self.runtime.block_on(self.link.sessions().close(close)).expect("it is there");
        self.settle();
    }

    fn line(&mut self, conn: &str) -> Option<Vec<u8>> {
        next_line(&mut self.conn(conn).lines.state.lock().arrived)
    }

    fn settle(&mut self) {
        let begun = Instant::now();
        loop {
            let open = self.conns.values().any(|conn| conn.lines.state.lock().open > 0);
            let waited = begun.elapsed();
            if !open && waited > Duration::from_millis(5) || waited > UNANSWERED {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn log(&self) -> Vec<String> {
        self.server.output().lines().map(str::to_owned).collect()
    }
}

/// One conversation.
struct Talk {
    session: Session,
    lines: Arc<Lines>,
    signals: Option<mpsc::Sender<SubscribeRequest>>,
    /// Whether the oldest wish of the stream of signals was applied.
    applied: Arc<tokio::sync::Notify>,
    streams: BTreeMap<(Op, Vec<u8>), AbortHandle>,
    /// What is watched, and up to where it was told.
    patterns: Vec<bytes::Bytes>,
    seen: Arc<AtomicU64>,
}

impl Drop for Talk {
    fn drop(&mut self) {
        for stream in self.streams.values() {
            stream.abort();
        }
    }
}

impl Talk {
    fn new(session: Session, lines: Arc<Lines>) -> Self {
        let applied = Arc::default();
        let (streams, patterns, seen) = (BTreeMap::new(), Vec::new(), Arc::default());
        Self { session, lines, signals: None, applied, streams, patterns, seen }
    }

    /// One request after the other, as a connection of the line protocol does it.
    async fn run(mut self, mut queue: mpsc::UnboundedReceiver<Vec<u8>>) {
        while let Some(bytes) = queue.recv().await {
            match read(&bytes) {
                Err(line) => self.lines.answer_with(line),
                Ok((op, request)) => self.execute(op, request).await,
            }
        }
    }

    #[expect(clippy::wildcard_enum_match_arm, reason = "others are not played")]
    async fn execute(&mut self, op: Op, request: Request<'_>) {
        match request {
            Request::Ping => self.lines.answer(&Response::Ok),
            Request::Query(query) => {
                let told = self.read(query).await;
                self.told(op, told);
            }
            Request::Command(Command::Subscribe(Subscribe { to })) => {
                let told = self.subscribe(to).await;
                self.told(op, told.map(|()| Outcome::Done));
            }
            Request::Command(Command::Unsubscribe(Unsubscribe { from })) => {
                let told = self.unsubscribe(from).await;
                self.told(op, told.map(|()| Outcome::Done));
            }
            Request::Command(command) => {
                let call = match CommandCall::new(&command) {
                    Ok(call) => call,
                    Err(reason) => return self.refused(op, reason),
                };
                let head = Head { session: &self.session.id, ..Head::default() };
                let channel = self.session.link.channel.clone();
                let told = call.make(channel, MetadataMap::default(), head).await;
                self.told(op, told);
            }
            _ => unreachable!("sections with {op:?} are not played"),
        }
    }

    async fn read(&self, query: Query<'_>) -> Result<Outcome, Status> {
        let link = &self.session.link;
        let text = |bytes: &[u8]| bytes::Bytes::copy_from_slice(bytes);
        Ok(match query {
            Query::Counter { key } => {
                let told = link.counters().get(GetCounterRequest { key: text(key) }).await?;
                Outcome::Number(told.into_inner().value)
            }
            Query::Kv { key } | Query::Entry { key } => {
                let told = link.kv().get(GetRequest { key: text(key) }).await?;
                let entry = told.into_inner().entry;
                entry.map_or(Outcome::Empty, |entry| Outcome::Value(entry.value[..].into()))
            }
            Query::Length { key } => {
                let told = link.lists().length(LengthRequest { key: text(key) }).await?;
                Outcome::Number(i64::try_from(told.into_inner().length).unwrap())
            }
            Query::Range { key, start, stop } => {
                let request = RangeRequest { key: text(key), start, stop };
                let items = link.lists().range(request).await?.into_inner().items;
                let items: Vec<_> = items.iter().map(|it| String::from_utf8_lossy(it)).collect();
                Outcome::Value(serde_json::to_vec(&items).unwrap().into())
            }
        })
    }

    async fn subscribe(&mut self, to: Subscription<'_>) -> Result<(), Status> {
        let text = |bytes: &[u8]| bytes::Bytes::copy_from_slice(bytes);
        match to {
            Subscription::Signals { pattern, group } => {
                let wish = Wish { pattern: text(pattern), group: text(group) };
                self.wish(SubscribeRequest { add: vec![wish], remove: vec![] }).await
            }
            Subscription::Changes { pattern, .. } => {
                let mut patterns = self.patterns.clone();
                if !patterns.iter().any(|known| known == pattern) {
                    patterns.push(text(pattern));
                }
                self.watch(patterns).await
            }
            Subscription::Leaders { key } => self.observe(text(key)).await,
        }
    }

    async fn unsubscribe(&mut self, from: Subscription<'_>) -> Result<(), Status> {
        let text = |bytes: &[u8]| bytes::Bytes::copy_from_slice(bytes);
        match from {
            // Without a stream there is nothing to unlisten.
            Subscription::Signals { .. } if self.signals.is_none() => Ok(()),
            Subscription::Signals { pattern, group } => {
                let wish = Wish { pattern: text(pattern), group: text(group) };
                self.wish(SubscribeRequest { add: vec![], remove: vec![wish] }).await
            }
            Subscription::Changes { pattern, .. } => {
                let mut patterns = self.patterns.clone();
                patterns.retain(|known| known != pattern);
                self.watch(patterns).await
            }
            Subscription::Leaders { key } => {
                if let Some(stream) = self.streams.remove(&(Op::Observe, key.to_vec())) {
                    stream.abort();
                }
                Ok(())
            }
        }
    }

    /// Asks for something on the stream of signals, which begins with the first wish.
    async fn wish(&mut self, wish: SubscribeRequest) -> Result<(), Status> {
        if let Some(signals) = &self.signals {
            signals.send(wish).await.expect("the stream goes on");
            self.applied.notified().await;
            return Ok(());
        }
        let (sender, requests) = mpsc::channel(4);
        sender.send(wish).await.expect("it is new");
        let stream = self.session.link.signals().subscribe(ReceiverStream::new(requests)).await?;
        let mut stream = stream.into_inner();
        self.signals = Some(sender);
        let (lines, applied) = (Arc::clone(&self.lines), Arc::clone(&self.applied));
        let told = self.follow((Op::Listen, Vec::new()), async move {
            while let Ok(Some(message)) = stream.message().await {
                match message.what.expect("one of them") {
                    What::Applied(_) => applied.notify_one(),
                    What::Signal(signal) => {
                        let (channel, payload) = (&signal.channel[..], &signal.payload[..]);
                        lines.tell(&Push::Signal { channel, payload });
                    }
                }
            }
        });
        told?;
        self.applied.notified().await;
        Ok(())
    }

    /// All that is watched is one stream, so that a change is told once; it goes on where the one before ended.
    async fn watch(&mut self, patterns: Vec<bytes::Bytes>) -> Result<(), Status> {
        let key = (Op::Watch, Vec::new());
        if let Some(stream) = self.streams.remove(&key) {
            stream.abort();
        }
        self.patterns = patterns.clone();
        if patterns.is_empty() {
            return Ok(());
        }
        let seen = Arc::clone(&self.seen);
        let after_revision = Some(seen.load(Ordering::SeqCst)).filter(|after| *after > 0);
        let request = WatchRequest { patterns, after_revision, kinds: Vec::new() };
        let mut stream = self.session.link.watch().watch(request).await?.into_inner();
        // A bookmark says that it has begun.
        let first = stream.message().await?.expect("it goes on");
        seen.store(first.revision, Ordering::SeqCst);
        let lines = Arc::clone(&self.lines);
        self.follow(key, async move {
            while let Ok(Some(message)) = stream.message().await {
                seen.store(message.revision, Ordering::SeqCst);
                for change in message.changes {
                    let event = change.kind().as_str_name().strip_prefix("CHANGE_KIND_").unwrap();
                    let event = event.to_lowercase();
                    lines.tell(&Push::Watch { event: &event, key: &change.key });
                }
            }
        })
    }

    async fn observe(&mut self, key: bytes::Bytes) -> Result<(), Status> {
        let known = (Op::Observe, key.to_vec());
        if self.streams.contains_key(&known) {
            return Ok(());
        }
        let request = ObserveRequest { key: key.clone() };
        let mut stream = self.session.link.elections().observe(request).await?.into_inner();
        let first = stream.message().await?.expect("how it is");
        let lines = Arc::clone(&self.lines);
        if first.leader.is_some() {
            lines.tell(&Push::Leader { event: "elected", key: &key });
        }
        self.follow(known, async move {
            while let Ok(Some(message)) = stream.message().await {
                let event = match message.event() {
                    proto::LeaderEvent::Unspecified => continue,
                    proto::LeaderEvent::Elected => "elected",
                    proto::LeaderEvent::Resigned => "resigned",
                    proto::LeaderEvent::Failover => "failover",
                };
                lines.tell(&Push::Leader { event, key: &key });
            }
        })
    }

    fn follow(
        &mut self,
        key: (Op, Vec<u8>),
        stream: impl Future<Output = ()> + Send + 'static,
    ) -> Result<(), Status> {
        let handle = tokio::spawn(stream).abort_handle();
        self.streams.insert(key, handle);
        Ok(())
    }

    fn told(&self, op: Op, told: Result<Outcome, Status>) {
        match told {
            Ok(outcome) => self.lines.answer_with(outcome_line(op, &outcome)),
            Err(status) => self.refused(op, info(&status).reason()),
        }
    }

    #[expect(
        clippy::wildcard_enum_match_arm,
        reason = "all that has no word of its own is an error"
    )]
    fn refused(&self, op: Op, reason: Reason) {
        let code = match reason {
            Reason::MaxLocks | Reason::MaxHolds => ErrorCode::MaxLocks,
            Reason::MaxWaiters | Reason::MaxWaits => ErrorCode::MaxWaiters,
            Reason::MaxKeys => ErrorCode::MaxKeys,
            Reason::ListFull => ErrorCode::ListFull,
            Reason::LimitMismatch => ErrorCode::LimitMismatch,
            Reason::TypeMismatch => ErrorCode::TypeMismatch,
            Reason::BarrierCountMismatch => ErrorCode::BarrierCountMismatch,
            Reason::AlreadyEnqueued => ErrorCode::AlreadyEnqueued,
            Reason::NotEnqueued => ErrorCode::NotEnqueued,
            // The oldest commands do not tell it.
            Reason::LeaseExpired if !matches!(op, Op::N | Op::Sn) => ErrorCode::LeaseExpired,
            Reason::UnknownOutcome => ErrorCode::Unknown,
            Reason::Draining => ErrorCode::Draining,
            _ => ErrorCode::Error,
        };
        self.lines.answer(&Response::Error(code));
    }
}
