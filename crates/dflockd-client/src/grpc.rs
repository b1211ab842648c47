//! gRPC as a transport: the calls of `dflockd.v1` that stand for requests.
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
    AttachRequest, CancelRequest, CloseRequest, ErrorInfo, Head, KeepAliveRequest, OpenRequest,
    Reason,
};
use dflockd_wire::{ErrorCode, LostReason, REFUSALS, Request};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use prost::Message as _;
use prost::bytes::Bytes;
use tokio::sync::{Notify, Semaphore, mpsc};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::metadata::{Ascii, MetadataValue};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

use self::calls::Call;
use crate::link::OnDisconnect;
use crate::reply::{Incoming, Reply};
use crate::stream::{BoxBytes, Greeting, Session};

/// How long a session lives without a sign of life. An odd number: locks with a lease of the same length would follow
/// the session, and here each has its own guard.
const TTL: Duration = Duration::from_millis(10_007);
/// Calls that may wait at a time. A server takes 1,024 calls of a connection; the others must not wait for these.
const WAITS_MAX: usize = 900;
/// A call may overtake another one, so what is to be withdrawn is asked for again, after this and then less often.
const CANCEL_AGAIN: Duration = Duration::from_millis(20);
const CANCEL_AGAIN_MAX: Duration = Duration::from_secs(1);

/// What the calls of a conversation share.
#[derive(Clone)]
struct Api {
    channel: Channel,
    token: Option<MetadataValue<Ascii>>,
    /// The session, if there is one.
    session: String,
    /// All answers up to this number arrived.
    acknowledged: Arc<AtomicU64>,
    waiting: Waiting,
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

    /// A message for what only an operator may do, with the admin token besides.
    fn admin_request<T>(&self, message: T, token: &[u8]) -> tonic::Request<T> {
        let mut request = self.request(message);
        if let Ok(token) = MetadataValue::try_from(token) {
            request.metadata_mut().insert("x-dflockd-admin", token);
        }
        request
    }

    /// Who makes a call, and its number, which needs a session.
    fn head(&self, number: Option<u64>) -> Head<'_> {
        let session = &*self.session;
        let request_id = number.filter(|_| !session.is_empty()).unwrap_or_default();
        Head { session, request_id, ack_through: self.ack_through() }
    }

    fn ack_through(&self) -> u64 {
        self.acknowledged.load(Ordering::Relaxed)
    }

    fn acknowledge(&self, up_to: u64) {
        self.acknowledged.fetch_max(up_to, Ordering::Relaxed);
    }

    /// Withdraws a call until it is answered. What it brings nevertheless is given back by whoever asked for it.
    async fn withdraw(&self, request_id: u64) {
        let Some(unwanted) = self.waiting.lock().get(&request_id).cloned() else { return };
        unwanted.notify_one();
        let mut pause = CANCEL_AGAIN;
        while !self.session.is_empty() && self.waiting.lock().contains_key(&request_id) {
            let request = CancelRequest { session: self.session.clone(), request_id };
            let _ = SessionsClient::new(self.channel.clone()).cancel(self.request(request)).await;
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(CANCEL_AGAIN_MAX);
        }
    }
}

/// Calls that may wait and are not answered yet, by their numbers, and who says that they are not wanted any more.
type Waiting = Arc<Mutex<HashMap<u64, Arc<Notify>>>>;

/// Why a call brought no answer.
enum Failure {
    /// The server said no.
    Refused(Reason),
    /// Only the leader does it; its address if it is known.
    NotLeader(Option<String>),
    /// The session is not here any more.
    Gone,
    /// Nobody answered.
    Broken,
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        /// `google.rpc.Status`.
        #[derive(Clone, PartialEq, prost::Message)]
        struct RpcStatus {
            #[prost(message, repeated, tag = "3")]
            details: Vec<Any>,
        }
        #[derive(Clone, PartialEq, prost::Message)]
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
            Some(info) if info.reason() == Reason::SessionGone => Self::Gone,
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

/// What a refusal is in the line protocol.
fn code(reason: Reason) -> ErrorCode {
    let name = reason.as_str_name();
    if let Some((_, refusal)) = REFUSALS.iter().find(|(_, refusal)| refusal.grpc_reason == name) {
        return refusal.line;
    }
    if matches!(reason, Reason::Unauthenticated | Reason::NotAdmin | Reason::AdminDisabled) {
        ErrorCode::Auth
    } else if reason == Reason::NotLeader {
        ErrorCode::NotLeader
    } else if reason == Reason::Draining {
        ErrorCode::Draining
    } else if reason == Reason::RateLimited {
        ErrorCode::Unavailable
    } else {
        ErrorCode::Error
    }
}

/// Where the tasks of a conversation put what came of a request.
#[derive(Clone)]
struct Outlet {
    number: Option<u64>,
    told: mpsc::UnboundedSender<io::Result<Incoming>>,
}

impl Outlet {
    fn tell(&self, incoming: Incoming) {
        let _ = self.told.send(Ok(incoming));
    }

    fn resolve(&self, outcome: Result<Reply, Failure>) {
        let reply = match outcome {
            Ok(reply) => reply,
            Err(Failure::Refused(reason)) => Reply::Refused(code(reason)),
            Err(Failure::NotLeader(leader)) => Reply::NotLeader(leader),
            Err(failure @ (Failure::Gone | Failure::Broken)) => return self.end(&failure),
        };
        self.tell(Incoming::Reply(self.number, reply));
    }

    /// Ends the conversation.
    fn end(&self, failure: &Failure) {
        if matches!(failure, Failure::Gone) {
            self.tell(Incoming::Detached);
        }
        let _ = self.told.send(Err(io::ErrorKind::UnexpectedEof.into()));
    }
}

/// A request as this transport sends it.
pub(crate) struct Message {
    call: Call,
    may_wait: bool,
}

impl Message {
    pub(crate) fn new(request: &Request<'_>) -> Self {
        let may_wait = matches!(request, Request::Command(command) if command.may_wait());
        Self { call: Call::new(request), may_wait }
    }
}

/// A connection as calls.
pub(crate) struct Conversation {
    api: Api,
    /// The session ends with the conversation.
    bound: bool,
    /// Calls that are answered at once.
    calls: JoinSet<()>,
    /// Calls that may wait, and signs of life.
    tasks: JoinSet<()>,
    waits: Arc<Semaphore>,
    outlet: Outlet,
    told: mpsc::UnboundedReceiver<io::Result<Incoming>>,
}

impl Conversation {
    pub(crate) async fn new(
        stream: BoxBytes,
        target: &str,
        token: Option<&str>,
    ) -> io::Result<Self> {
        let endpoint =
            Endpoint::from_shared(format!("http://{target}")).map_err(io::Error::other)?;
        // Once: a connection that breaks is not replaced behind the back of the link.
        let mut stream = Some(stream);
        let connector = tower::service_fn(move |_: Uri| {
            let stream = stream.take().map(TokioIo::new);
            async move { stream.ok_or(io::Error::from(io::ErrorKind::NotConnected)) }
        });
        let channel = endpoint.connect_with_connector(connector).await.map_err(io::Error::other)?;
        let token = token.and_then(|token| MetadataValue::try_from(format!("Bearer {token}")).ok());
        let (acknowledged, waiting) = (Arc::default(), Waiting::default());
        let api = Api { channel, token, session: String::new(), acknowledged, waiting };
        let (teller, told) = mpsc::unbounded_channel();
        let waits = Arc::new(Semaphore::new(WAITS_MAX));
        let outlet = Outlet { number: None, told: teller };
        let (calls, tasks) = (JoinSet::new(), JoinSet::new());
        Ok(Self { api, bound: false, calls, tasks, waits, outlet, told })
    }

    /// Makes or takes over a session.
    pub(crate) async fn greet(&mut self, name: &str, wanted: Session<'_>) -> io::Result<Greeting> {
        let client_name = name.to_owned();
        let mut sessions = SessionsClient::new(self.api.channel.clone());
        let opened = match wanted {
            Session::None => return Ok(Greeting::Accepted { session: None, last: None }),
            Session::New(_) => {
                let ttl_ms = u64::try_from(TTL.as_millis()).unwrap_or_default();
                let request = OpenRequest { ttl_ms, client_name, ..OpenRequest::default() };
                let opened = sessions.open(self.api.request(request)).await;
                opened.map(|opened| (opened.into_inner().session, None))
            }
            Session::Attach(session) | Session::TakeOver(session) => {
                let session = session.to_owned();
                let tell_last_request_id = matches!(wanted, Session::TakeOver(_));
                let request =
                    AttachRequest { session: session.clone(), client_name, tell_last_request_id };
                let attached = sessions.attach(self.api.request(request)).await;
                attached.map(|attached| (session, attached.into_inner().last_request_id))
            }
        };
        let (session, last) = match opened.map_err(Failure::from) {
            Ok(opened) => opened,
            Err(Failure::Broken) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Err(Failure::Gone) => return Ok(Greeting::Refused(ErrorCode::Error)),
            Err(Failure::NotLeader(leader)) => return Ok(Greeting::NotLeader(leader)),
            Err(Failure::Refused(reason)) => {
                let code = code(reason);
                if code == ErrorCode::Auth {
                    return Err(io::ErrorKind::PermissionDenied.into());
                }
                let is_known = code == ErrorCode::Unavailable;
                return Ok(Greeting::Refused(if is_known { code } else { ErrorCode::Unknown }));
            }
        };
        self.api.session.clone_from(&session);
        self.bound = matches!(wanted, Session::New(OnDisconnect::Release));
        self.tasks.spawn(keep_alive(self.api.clone(), self.outlet.clone()));
        Ok(Greeting::Accepted { session: Some(session).filter(|_| !self.bound), last })
    }

    /// Makes the call of a request.
    pub(crate) fn queue(&mut self, number: Option<u64>, message: &Message) {
        while self.calls.try_join_next().or_else(|| self.tasks.try_join_next()).is_some() {}
        let (api, call) = (self.api.clone(), message.call.clone());
        let outlet = Outlet { number, ..self.outlet.clone() };
        let Some(number) = number.filter(|_| message.may_wait) else {
            self.calls.spawn(async move { outlet.resolve(call.make(&api, &outlet).await) });
            return;
        };
        let (waits, unwanted) = (Arc::clone(&self.waits), Arc::<Notify>::default());
        api.waiting.lock().insert(number, Arc::clone(&unwanted));
        self.tasks.spawn(async move {
            let outcome = tokio::select! {
                biased;
                _seat = waits.acquire() => call.make(&api, &outlet).await,
                // It was never sent.
                () = unwanted.notified() => Ok(call.given_up()),
            };
            api.waiting.lock().remove(&number);
            outlet.resolve(outcome);
        });
    }

    /// What comes next. Cancel-safe.
    pub(crate) async fn next(&mut self) -> io::Result<Incoming> {
        let told = self.told.recv().await;
        told.unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))
    }

    /// Ends it when nothing is under way any more: what was asked last is done.
    pub(crate) async fn close(mut self) {
        while self.calls.join_next().await.is_some() {}
    }
}

impl Drop for Conversation {
    fn drop(&mut self) {
        if self.bound
            && let Ok(runtime) = tokio::runtime::Handle::try_current()
        {
            let api = self.api.clone();
            runtime.spawn(async move {
                let request = api.request(CloseRequest { session: api.session.clone() });
                let _ = SessionsClient::new(api.channel.clone()).close(request).await;
            });
        }
    }
}

/// Gives signs of life, and passes on what was lost.
async fn keep_alive(api: Api, outlet: Outlet) {
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
            for lost in &heard.lost {
                let reason = lost.reason().known().unwrap_or(LostReason::Expired);
                outlet.tell(Incoming::Lost { fence: lost.fence, reason: reason.into() });
            }
        }
        Ok::<(), Status>(())
    };
    let ended = tokio::select! {
        () = signing => Ok(()),
        ended = hearing => ended,
    };
    outlet.end(&ended.map_or_else(Failure::from, |()| Failure::Broken));
}
