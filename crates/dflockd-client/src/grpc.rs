//! gRPC as a transport: at one end of a pipe the lines that the rest of the library speaks, at the other the calls of
//! `dflockd.v1` that stand for them.
//!
//! A conversation is one HTTP/2 connection. When it breaks the conversation ends, and the link makes another one, as
//! with lines; numbers of requests are request ids, so what is repeated is executed once. `calls.rs` has the
//! call for each request, `streams.rs` the subscriptions.

mod calls;
mod streams;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use dflockd_wire::grpc::sessions_client::SessionsClient;
use dflockd_wire::grpc::{
    AttachRequest, CancelRequest, CloseRequest, ErrorInfo, KeepAliveRequest, LostReason,
    OpenRequest, Reason,
};
use dflockd_wire::{Decoded, Decoder, ErrorCode, Frame, Op, Push, Request, Response, Unit};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prost::Message;
use prost::bytes::Bytes;
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use crate::stream::BoxBytes;

/// Bytes that may be under way in the pipe.
const PIPE_BYTES: usize = 64 * 1024;
const VALUE_BYTES_MAX: usize = 1024 * 1024;
/// How long a session lives without a sign of life. An odd number: locks with a lease of the same length would follow
/// the session, and here each has its own guard.
const TTL: Duration = Duration::from_millis(10_007);
/// Calls that may wait at a time. A server takes 1,024 calls of a connection; the others must not wait for these.
const WAITS_MAX: usize = 900;
/// A call may overtake another one, so what is to be withdrawn is asked for again, after this and then less often.
const CANCEL_AGAIN: Duration = Duration::from_millis(20);
const CANCEL_AGAIN_MAX: Duration = Duration::from_secs(1);
/// The words that this transport can do.
const WORDS: [&str; 5] = ["mux", "ms", "fence", "lost", "lease-status"];

/// Makes a conversation of a connection.
pub(crate) async fn converse(stream: BoxBytes, target: &str) -> io::Result<BoxBytes> {
    let endpoint = Endpoint::from_shared(format!("http://{target}")).map_err(io::Error::other)?;
    // Once: a connection that breaks is not replaced behind the back of the link.
    let mut stream = Some(stream);
    let connector = tower::service_fn(move |_: Uri| {
        let stream = stream.take();
        async move { stream.map(TokioIo::new).ok_or(io::Error::from(io::ErrorKind::NotConnected)) }
    });
    let channel = endpoint.connect_with_connector(connector).await.map_err(io::Error::other)?;
    let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
    tokio::spawn(talk(channel, theirs));
    Ok(Box::new(ours))
}

/// What the calls of a conversation share.
#[derive(Clone)]
pub(super) struct Api {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    /// The session, if there is one.
    session: String,
    /// All answers up to this number arrived.
    acknowledged: Arc<AtomicU64>,
}

impl Api {
    /// A message with what every call carries.
    fn request<T>(&self, message: T) -> tonic::Request<T> {
        let mut request = tonic::Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("authorization", token.clone());
        }
        request
    }

    /// The same for what only an operator may do.
    fn admin_request<T>(&self, message: T, token: &[u8]) -> tonic::Request<T> {
        let mut request = self.request(message);
        if let Ok(token) = MetadataValue::try_from(token) {
            request.metadata_mut().insert("x-dflockd-admin", token);
        }
        request
    }

    fn ack_through(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }
}

fn bytes(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

/// Why a call brought no answer.
pub(super) enum Failure {
    /// The server said no.
    Refused(Reason),
    /// Only the leader does it; its address if it is known.
    NotLeader(Option<String>),
    /// Nobody answered.
    Broken,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        /// `google.rpc.Status`.
        #[derive(Clone, PartialEq, Message)]
        struct RpcStatus {
            #[prost(message, repeated, tag = "3")]
            details: Vec<Any>,
        }
        #[derive(Clone, PartialEq, Message)]
        struct Any {
            #[prost(bytes = "bytes", tag = "2")]
            value: Bytes,
        }
        let details = RpcStatus::decode(status.details()).ok();
        let detail = details.and_then(|status| status.details.into_iter().next());
        match detail.and_then(|detail| ErrorInfo::decode(detail.value).ok()) {
            Some(info) if info.reason() == Reason::NotLeader => {
                Self::NotLeader(Some(info.leader_grpc).filter(|leader| !leader.is_empty()))
            }
            Some(info) => Self::Refused(info.reason()),
            // Said by what lies between: the connection can not go on, or this request is none it takes.
            None => match status.code() {
                Code::Unauthenticated | Code::PermissionDenied => {
                    Self::Refused(Reason::Unauthenticated)
                }
                Code::InvalidArgument
                | Code::OutOfRange
                | Code::ResourceExhausted
                | Code::Unimplemented => Self::Refused(Reason::BadRequest),
                Code::Ok
                | Code::Cancelled
                | Code::Unknown
                | Code::DeadlineExceeded
                | Code::NotFound
                | Code::AlreadyExists
                | Code::FailedPrecondition
                | Code::Aborted
                | Code::Internal
                | Code::Unavailable
                | Code::DataLoss => Self::Broken,
            },
        }
    }
}

/// What a refusal is in the line protocol; none if it ends the conversation.
fn code(reason: Reason) -> Option<ErrorCode> {
    Some(match reason {
        Reason::SessionGone => return None,
        Reason::Unauthenticated | Reason::NotAdmin | Reason::AdminDisabled => ErrorCode::Auth,
        Reason::LeaseExpired => ErrorCode::LeaseExpired,
        Reason::LimitMismatch => ErrorCode::LimitMismatch,
        Reason::TypeMismatch => ErrorCode::TypeMismatch,
        Reason::BarrierCountMismatch => ErrorCode::BarrierCountMismatch,
        Reason::AlreadyEnqueued => ErrorCode::AlreadyEnqueued,
        Reason::NotEnqueued => ErrorCode::NotEnqueued,
        Reason::MaxLocks | Reason::MaxHolds => ErrorCode::MaxLocks,
        Reason::MaxWaiters | Reason::MaxWaits => ErrorCode::MaxWaiters,
        Reason::MaxKeys => ErrorCode::MaxKeys,
        Reason::ListFull => ErrorCode::ListFull,
        Reason::UnknownOutcome => ErrorCode::Unknown,
        Reason::NotLeader => ErrorCode::NotLeader,
        Reason::Draining => ErrorCode::Draining,
        Reason::Unavailable | Reason::NoFence | Reason::RateLimited => ErrorCode::Unavailable,
        Reason::Unspecified
        | Reason::BadRequest
        | Reason::NotHeld
        | Reason::NotFound
        | Reason::AlreadyWaiting
        | Reason::Deposed
        | Reason::Overflow
        | Reason::MaxSubscriptions
        | Reason::MaxSessions
        | Reason::Lagged
        | Reason::Compacted
        | Reason::NoCluster
        | Reason::ClusterRefused
        | Reason::Internal => ErrorCode::Error,
    })
}

/// What a task of the conversation has to say.
pub(super) enum Said {
    Lines(Vec<u8>),
    /// The session is not here any more.
    Gone,
    /// Nothing more will come.
    Broken,
}

struct Conversation {
    api: Api,
    decoder: Decoder,
    numbered: bool,
    unit: Unit,
    /// The session ends with the conversation.
    bound: bool,
    tasks: JoinSet<()>,
    waits: Arc<Semaphore>,
    /// Calls that may wait and are not answered yet, by their numbers, and who says that they are not wanted any more.
    waiting: Waiting,
    said: mpsc::UnboundedSender<Said>,
}

type Waiting = Arc<Mutex<HashMap<u64, Arc<Notify>>>>;

/// Serves one end of the pipe until either side ends.
async fn talk(channel: Channel, mut pipe: DuplexStream) {
    let (said, mut saying) = mpsc::unbounded_channel();
    let acknowledged = Arc::default();
    let api = Api { channel, token: None, session: String::new(), acknowledged };
    let mut conversation = Conversation {
        api,
        decoder: Decoder::new(VALUE_BYTES_MAX),
        numbered: false,
        unit: Unit::Seconds,
        bound: false,
        tasks: JoinSet::new(),
        waits: Arc::new(Semaphore::new(WAITS_MAX)),
        waiting: Waiting::default(),
        said,
    };
    let mut input = Vec::new();
    let mut chunk = vec![0; 16 * 1024];
    loop {
        tokio::select! {
            read = pipe.read(&mut chunk) => match read {
                Ok(count @ 1..) => {
                    input.extend_from_slice(&chunk[..count]);
                    conversation.take_requests(&mut input).await;
                }
                Ok(0) | Err(_) => break,
            },
            said = saying.recv() => match said {
                Some(Said::Lines(lines)) => {
                    if pipe.write_all(&lines).await.is_err() {
                        break;
                    }
                }
                Some(Said::Gone) => {
                    let _ = pipe.write_all(b"detached\n").await;
                    break;
                }
                Some(Said::Broken) | None => break,
            },
        }
        while conversation.tasks.try_join_next().is_some() {}
    }
    if conversation.bound {
        let Api { channel, session, .. } = conversation.api.clone();
        let request = conversation.api.request(CloseRequest { session });
        let _ = SessionsClient::new(channel).close(request).await;
    }
}

impl Conversation {
    async fn take_requests(&mut self, input: &mut Vec<u8>) {
        let mut used = 0;
        loop {
            match self.decoder.decode(&input[used..]) {
                Decoded::Frame { frame, used: bytes } => {
                    used += bytes;
                    let number = frame.number;
                    let (command, key, arg) =
                        (frame.command.to_vec(), frame.key.to_vec(), frame.arg.to_vec());
                    self.take_request(number, &command, key, arg).await;
                }
                Decoded::Incomplete => break,
                Decoded::TooLong { .. } => {
                    let _ = self.said.send(Said::Broken);
                    break;
                }
            }
        }
        input.drain(..used);
    }

    async fn take_request(
        &mut self,
        number: Option<u64>,
        command: &[u8],
        key: Vec<u8>,
        arg: Vec<u8>,
    ) {
        let Some(op) = Op::parse(command) else { return self.answer(number, ErrorCode::Error) };
        let unit = self.unit;
        let frame = Frame { number, command, key: &key, arg: &arg };
        match Request::parse(op, &frame, unit) {
            Err(_) => self.answer(number, ErrorCode::Error),
            Ok(Request::Auth { token }) => {
                let header = [b"Bearer ", token].concat();
                self.api.token = MetadataValue::try_from(header).ok();
                self.say(number, &Response::Ok);
            }
            Ok(Request::Hello { name, words }) => {
                let (name, words) = (name.to_owned(), words.iter().map(ToString::to_string));
                self.greet(number, name, words.collect()).await;
            }
            Ok(Request::Ack { number: up_to }) => {
                self.api.acknowledged.fetch_max(up_to, Ordering::Relaxed);
                self.say(number, &Response::Ok);
            }
            Ok(Request::Cancel { number: withdrawn }) => {
                let found = self.waiting.lock().get(&withdrawn).cloned();
                if let Some(unwanted) = found {
                    unwanted.notify_one();
                    let (api, waiting) = (self.api.clone(), Arc::clone(&self.waiting));
                    self.tasks.spawn(withdraw(api, waiting, withdrawn));
                }
                self.say(number, &Response::Ok);
            }
            Ok(request) => {
                let (api, said) = (self.api.clone(), self.said.clone());
                let waits = Arc::clone(&self.waits);
                let entry = Entry::new(&self.waiting, number.filter(|_| may_wait(&request)));
                self.tasks.spawn(async move {
                    let frame = Frame { number, command: b"", key: &key, arg: &arg };
                    let Ok(request) = Request::parse(op, &frame, unit) else { return };
                    let _seat = if may_wait(&request) {
                        tokio::select! {
                            biased;
                            seat = waits.acquire() => seat.ok(),
                            () = entry.unwanted() => {
                                // It was never sent.
                                return say(&said, number, unit, &given_up(&request));
                            }
                        }
                    } else {
                        None
                    };
                    calls::call(&api, number, unit, &request, &said).await;
                });
            }
        }
    }

    /// Makes or takes over a session.
    async fn greet(&mut self, number: Option<u64>, client_name: String, words: Vec<String>) {
        let mut accepted = Vec::new();
        let mut sessions = SessionsClient::new(self.api.channel.clone());
        let attach = words.iter().find_map(|word| word.strip_prefix("attach="));
        let has = |wanted: &str| words.iter().any(|word| word == wanted);
        let opened = if let Some(session) = attach {
            accepted.push(format!("attach={session}"));
            let session = session.to_owned();
            let request = AttachRequest { session: session.clone(), client_name };
            sessions.attach(self.api.request(request)).await.map(|_| session)
        } else if has("mux") {
            let ttl_ms = u64::try_from(TTL.as_millis()).unwrap_or_default();
            let request = OpenRequest { ttl_ms, client_name, ..OpenRequest::default() };
            let opened = sessions.open(self.api.request(request)).await;
            opened.map(|opened| opened.into_inner().session)
        } else {
            Ok(String::new())
        };
        match opened.map_err(Failure::from) {
            Ok(session) => self.api.session = session,
            Err(Failure::Broken) => {
                let _ = self.said.send(Said::Broken);
                return;
            }
            Err(Failure::NotLeader(leader)) => {
                return self.say(number, &Response::NotLeader(leader.as_deref()));
            }
            Err(Failure::Refused(reason)) => {
                let refused = match code(reason) {
                    None => ErrorCode::Error,
                    Some(refused @ (ErrorCode::Auth | ErrorCode::Unavailable)) => refused,
                    Some(_) => ErrorCode::Unknown,
                };
                return self.answer(number, refused);
            }
        }
        if attach.is_none() && has("keep") {
            accepted.push(format!("keep={}", self.api.session));
        }
        self.bound = attach.is_none() && !has("keep") && !self.api.session.is_empty();
        accepted.extend(words.iter().filter(|word| WORDS.contains(&word.as_str())).cloned());
        self.say(number, &Response::Value(accepted.join(" ").as_bytes()));
        if has("ms") {
            self.unit = Unit::Millis;
        }
        if has("mux") {
            self.numbered = true;
            self.decoder.set_numbered(true);
        }
        if !self.api.session.is_empty() {
            self.tasks.spawn(keep_alive(self.api.clone(), self.said.clone()));
        }
    }

    fn answer(&self, number: Option<u64>, code: ErrorCode) {
        self.say(number, &Response::Error(code));
    }

    fn say(&self, number: Option<u64>, response: &Response<'_>) {
        say(&self.said, number, self.unit, response);
    }
}

fn say(
    said: &mpsc::UnboundedSender<Said>,
    number: Option<u64>,
    unit: Unit,
    response: &Response<'_>,
) {
    let mut line = Vec::new();
    response.print(unit, number, &mut line);
    let _ = said.send(Said::Lines(line));
}

/// A call that may wait, as long as it is not answered.
struct Entry {
    waiting: Waiting,
    number: Option<u64>,
    unwanted: Arc<Notify>,
}

impl Entry {
    fn new(waiting: &Waiting, number: Option<u64>) -> Self {
        let unwanted = Arc::new(Notify::new());
        if let Some(number) = number {
            waiting.lock().insert(number, Arc::clone(&unwanted));
        }
        Self { waiting: Arc::clone(waiting), number, unwanted }
    }

    /// Somebody says that it is not wanted any more.
    async fn unwanted(&self) {
        self.unwanted.notified().await;
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        if let Some(number) = self.number {
            self.waiting.lock().remove(&number);
        }
    }
}

/// Withdraws a call until it is answered. What it brings nevertheless is given back by whoever asked for it.
async fn withdraw(api: Api, waiting: Waiting, request_id: u64) {
    let mut pause = CANCEL_AGAIN;
    while !api.session.is_empty() && waiting.lock().contains_key(&request_id) {
        let request = CancelRequest { session: api.session.clone(), request_id };
        let _ = SessionsClient::new(api.channel.clone()).cancel(api.request(request)).await;
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(CANCEL_AGAIN_MAX);
    }
}

/// What a request is told that was withdrawn.
fn given_up(request: &Request<'_>) -> Response<'static> {
    if matches!(request, Request::BlockingPop { .. }) { Response::Nil } else { Response::Timeout }
}

fn may_wait(request: &Request<'_>) -> bool {
    matches!(
        request,
        Request::Acquire { .. }
            | Request::Wait { .. }
            | Request::BlockingPop { .. }
            | Request::BarrierWait { .. }
    )
}

/// Gives signs of life, and passes on what was lost.
async fn keep_alive(api: Api, said: mpsc::UnboundedSender<Said>) {
    let (signs, stream) = mpsc::channel(1);
    let signing = async {
        loop {
            let (session, ack_through) = (api.session.clone(), api.ack_through());
            if signs.send(KeepAliveRequest { session, ack_through }).await.is_err() {
                return;
            }
            tokio::time::sleep(TTL / 3).await;
        }
    };
    let hearing = async {
        let request = api.request(ReceiverStream::new(stream));
        let mut sessions = SessionsClient::new(api.channel.clone());
        let mut alive = sessions.keep_alive_stream(request).await?.into_inner();
        while let Some(heard) = alive.message().await? {
            let mut lines = Vec::new();
            for lost in &heard.lost {
                let reason = match lost.reason() {
                    LostReason::Forced => "forced",
                    LostReason::Session => "session",
                    LostReason::Expired | LostReason::Unspecified => "expired",
                };
                Push::Lost { key: &lost.key, fence: lost.fence, reason }.print(&mut lines);
            }
            if !lines.is_empty() {
                let _ = said.send(Said::Lines(lines));
            }
        }
        Ok::<(), Status>(())
    };
    let ended = tokio::select! {
        () = signing => Ok(()),
        ended = hearing => ended,
    };
    let gone = matches!(ended.map_err(Failure::from), Err(Failure::Refused(Reason::SessionGone)));
    let _ = said.send(if gone { Said::Gone } else { Said::Broken });
}
