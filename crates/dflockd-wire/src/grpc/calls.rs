//! The calls that stand for commands: messages to commands and back, outcomes to messages and back. A server goes one
//! way, a client the other.
//!
//! A message that came is checked here; one that is made of a command is not. A field that is added to a command or to
//! a message does not compile until its row names it, in both directions.

#![expect(
    clippy::wildcard_enum_match_arm,
    reason = "all that an asker does not hope for is a refusal"
)]

use dflockd_api::check::{self, Invalid};
use dflockd_api::command::{
    Acquire, Add, BarrierWait, CounterSet, Enqueue, KvCompareAndSet, KvDelete, KvSet, Pop, Push,
    Release, Renew, Signal, Wait,
};
use dflockd_api::{
    Command, End, Event, Expect, Fence, Grant as Granted, LeaderEvent as LeaderNews,
    LostReason as Loss, Mode, Outcome, Refusal, Revision, Space, Span, Token,
};
use prost::bytes::Bytes;
use tonic::client::GrpcService;
use tonic::codegen::{Body, StdError};
use tonic::metadata::MetadataMap;
use tonic::{Extensions, Request, Status};

use super::barriers_client::BarriersClient;
use super::compare_and_set_request::Expect as Expected;
use super::counters_client::CountersClient;
use super::elections_client::ElectionsClient;
use super::kv_client::KvClient;
use super::lists_client::ListsClient;
use super::locks_client::LocksClient;
use super::signals_client::SignalsClient;
use super::{
    AcquireRequest, AcquireResponse, AddCounterRequest, BarrierWaitRequest, BarrierWaitResponse,
    CampaignRequest, CampaignResponse, ChangeKind, CompareAndSetRequest, CompareAndSetResponse,
    CounterResponse, DeleteRequest, DeleteResponse, EnqueueRequest, EnqueueResponse, Grant,
    LeaderEvent, ListEnd, LockMode, LostReason, PopRequest, PopResponse, PublishRequest,
    PublishResponse, PushRequest, PushResponse, Reason, ReleaseRequest, ReleaseResponse,
    RenewRequest, RenewResponse, ResignRequest, ResignResponse, SetCounterRequest, SetRequest,
    SetResponse, TryAcquireRequest, WaitRequest, WaitResponse,
};

/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 256;

/// What the messages of commands have in common.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Head<'a> {
    /// Who asks; empty for nobody in particular.
    pub session: &'a str,
    /// Makes the request safe to repeat; 0 for none.
    pub request_id: u64,
    /// Answers up to this number arrived.
    pub ack_through: u64,
}

/// A message that asks the store to do something.
pub trait CommandMessage: Sized {
    /// The message that answers it.
    type Response;

    /// Whether only a session can ask for it.
    const NEEDS_SESSION: bool;

    /// Who asks.
    fn head(&self) -> Head<'_>;

    /// The same message, asked by somebody else.
    #[must_use]
    fn with_head(self, head: Head<'_>) -> Self;

    /// What is asked for. No lease is that of the session, and no salt is drawn yet.
    ///
    /// # Errors
    ///
    /// The first field that is wrong.
    fn command(&self) -> Result<Command<'_>, Invalid>;

    /// What the asker is told; none for a refusal.
    fn response(&self, outcome: &Outcome) -> Option<Self::Response>;

    /// What an answer says.
    fn outcome(response: Self::Response) -> Outcome;
}

/// A row is the message, its answer, whether it needs a session; the command that a message asks for; by which method a
/// command is asked for and how, where this message is how it is; what an outcome is told as, and what an answer says.
macro_rules! calls {
    ($(
        $message:ident -> $response:ident, needs a session: $needs:literal
            asks for |$asked:ident { $($read:ident),* }| $command:expr;
            $(sent by $client:ident.$method:ident is made of $command_type:ident |$of:pat_param| {
                $($field:ident: $value:expr),* $(,)?
            })?
            is told |$request:pat_param, $outcome:ident| $told:expr;
            hears |$answer:pat_param| $heard:expr;
    )*) => {
        $(
            impl CommandMessage for $message {
                type Response = $response;

                const NEEDS_SESSION: bool = $needs;

                fn head(&self) -> Head<'_> {
                    let Self { session, request_id, ack_through, .. } = self;
                    Head { session, request_id: *request_id, ack_through: *ack_through }
                }

                fn with_head(self, head: Head<'_>) -> Self {
                    let Head { session, request_id, ack_through } = head;
                    Self { session: session.to_owned(), request_id, ack_through, ..self }
                }

                fn command(&self) -> Result<Command<'_>, Invalid> {
                    // All fields are listed: one that is added does not compile until its row knows it.
                    let Self { session: _, request_id: _, ack_through: _, $($read: _),* } = self;
                    let $asked = self;
                    Ok($command.into())
                }

                fn response(&self, $outcome: &Outcome) -> Option<$response> {
                    let $request = self;
                    $told
                }

                fn outcome($answer: $response) -> Outcome {
                    $heard
                }
            }

            $(impl From<$command_type<'_>> for $message {
                fn from($of: $command_type<'_>) -> Self {
                    let (session, request_id, ack_through) = (String::new(), 0, 0);
                    Self { session, request_id, ack_through, $($field: $value),* }
                }
            })?
        )*

        /// The message of a command, before it is known who sends it where.
        #[derive(Clone, Debug)]
        pub enum CommandCall {
            $($(
                #[doc = concat!("`", stringify!($client), "::", stringify!($method), "`.")]
                $message($message),
            )?)*
        }

        impl CommandCall {
            /// Makes the call.
            ///
            /// # Errors
            ///
            /// If it is refused, or nobody answers.
            pub async fn make<T>(
                self,
                service: T,
                metadata: MetadataMap,
                head: Head<'_>,
            ) -> Result<Outcome, Status>
            where
                T: GrpcService<tonic::body::Body>,
                T::Error: Into<StdError>,
                T::ResponseBody: Body<Data = Bytes> + Send + 'static,
                <T::ResponseBody as Body>::Error: Into<StdError> + Send,
            {
                match self {
                    $($(Self::$message(message) => {
                        let message = message.with_head(head);
                        let request = Request::from_parts(metadata, Extensions::default(), message);
                        let response = $client::new(service).$method(request).await?;
                        Ok($message::outcome(response.into_inner()))
                    })?)*
                }
            }
        }
    };
}

impl CommandCall {
    /// The call that stands for a command.
    ///
    /// # Errors
    ///
    /// If there is none: what a server would say to the command.
    pub fn new(command: &Command<'_>) -> Result<Self, Reason> {
        Ok(match *command {
            Command::Acquire(acquire) if acquire.mode == Mode::Election => {
                Self::CampaignRequest(acquire.into())
            }
            Command::Acquire(acquire) => Self::AcquireRequest(acquire.into()),
            Command::Enqueue(enqueue) => Self::EnqueueRequest(enqueue.into()),
            Command::Wait(wait) => Self::WaitRequest(wait.into()),
            Command::Release(release) if release.resign => Self::ResignRequest(release.into()),
            Command::Release(release) => Self::ReleaseRequest(release.into()),
            // A lease of zero would stand for the server's default.
            Command::Renew(Renew { lease: Some(Span::ZERO), .. }) => {
                return Err(Reason::BadRequest);
            }
            Command::Renew(renew) => Self::RenewRequest(renew.into()),
            // A message subtracts by adding the negative, and the smallest integer has none. As an addition it would do
            // the opposite; a store refuses it, too.
            Command::Add(Add { decrement: true, delta: i64::MIN, .. }) => {
                return Err(Reason::Overflow);
            }
            Command::Add(add) => Self::AddCounterRequest(add.into()),
            Command::CounterSet(set) => Self::SetCounterRequest(set.into()),
            Command::KvSet(set) => Self::SetRequest(set.into()),
            Command::KvDelete(delete) => Self::DeleteRequest(delete.into()),
            Command::KvCompareAndSet(set) => Self::CompareAndSetRequest(set.into()),
            Command::Push(push) => Self::PushRequest(push.into()),
            Command::Pop(pop) => Self::PopRequest(pop.into()),
            Command::BarrierWait(wait) => Self::BarrierWaitRequest(wait.into()),
            Command::Signal(signal) => Self::PublishRequest(signal.into()),
            // Streams and services of their own, or nothing that a client asks for.
            Command::Subscribe(_)
            | Command::Unsubscribe(_)
            | Command::Cancel(_)
            | Command::Acknowledge(_)
            | Command::ForceRelease(_)
            | Command::RenewSession(_)
            | Command::Undo(_)
            | Command::Tick
            | Command::NewTerm
            | Command::Detach { .. }
            | Command::Attach
            | Command::Identify { .. }
            | Command::Orphan { .. }
            | Command::EndSession { .. } => return Err(Reason::BadRequest),
        })
    }
}

calls! {
    AcquireRequest -> AcquireResponse, needs a session: true
        asks for |asked { key, mode, limit, wait_ms, lease_ms }| Acquire {
            key: check::key(&asked.key)?,
            mode: mode(asked.mode, asked.limit)?,
            wait: check::millis(asked.wait_ms)?,
            lease: lasting(asked.lease_ms)?,
            salt: 0,
        };
        sent by LocksClient.acquire is made of Acquire |Acquire { mode, wait, lease, salt: _, key }| {
            key: bytes(key),
            mode: mode_number(mode),
            limit: limit(mode),
            wait_ms: millis_up(wait),
            lease_ms: lasting_millis(lease),
        }
        is told |_, outcome| Some(AcquireResponse { grant: granted(outcome)? });
        hears |answer| grant_or(answer.grant, Outcome::Timeout);

    TryAcquireRequest -> AcquireResponse, needs a session: true
        asks for |asked { key, mode, limit, lease_ms }| Acquire {
            key: check::key(&asked.key)?,
            mode: mode(asked.mode, asked.limit)?,
            wait: Span::ZERO,
            lease: lasting(asked.lease_ms)?,
            salt: 0,
        };
        is told |_, outcome| Some(AcquireResponse { grant: granted(outcome)? });
        hears |answer| grant_or(answer.grant, Outcome::Timeout);

    CampaignRequest -> CampaignResponse, needs a session: true
        asks for |asked { key, wait_ms, lease_ms }| Acquire {
            key: check::key(&asked.key)?,
            mode: Mode::Election,
            wait: check::millis(asked.wait_ms)?,
            lease: lasting(asked.lease_ms)?,
            salt: 0,
        };
        sent by ElectionsClient.campaign is made of Acquire |Acquire { mode: _, wait, lease, salt: _, key }| {
            key: bytes(key),
            wait_ms: millis_up(wait),
            lease_ms: lasting_millis(lease),
        }
        is told |_, outcome| Some(CampaignResponse { grant: granted(outcome)? });
        hears |answer| grant_or(answer.grant, Outcome::Timeout);

    EnqueueRequest -> EnqueueResponse, needs a session: true
        asks for |asked { key, mode, limit, lease_ms }| Enqueue {
            key: check::key(&asked.key)?,
            mode: mode(asked.mode, asked.limit)?,
            lease: lasting(asked.lease_ms)?,
            salt: 0,
        };
        sent by LocksClient.enqueue is made of Enqueue |Enqueue { mode, lease, salt: _, key }| {
            key: bytes(key),
            mode: mode_number(mode),
            limit: limit(mode),
            lease_ms: lasting_millis(lease),
        }
        is told |_, outcome| Some(EnqueueResponse { grant: granted(outcome)? });
        hears |answer| grant_or(answer.grant, Outcome::Queued);

    WaitRequest -> WaitResponse, needs a session: true
        asks for |asked { key, mode, wait_ms }| Wait {
            key: check::key(&asked.key)?,
            space: space(asked.mode)?,
            wait: check::millis(asked.wait_ms)?,
        };
        sent by LocksClient.wait is made of Wait |Wait { space, wait, key }| {
            key: bytes(key),
            mode: space_number(space),
            wait_ms: millis_up(wait),
        }
        is told |_, outcome| Some(WaitResponse { grant: granted(outcome)? });
        hears |answer| grant_or(answer.grant, Outcome::Timeout);

    ReleaseRequest -> ReleaseResponse, needs a session: false
        asks for |asked { key, mode, token }| Release {
            key: check::key(&asked.key)?,
            space: space(asked.mode)?,
            token: token(&asked.token)?,
            resign: false,
        };
        sent by LocksClient.release is made of Release |Release { space, token, resign: _, key }| {
            key: bytes(key),
            mode: space_number(space),
            token: token.text().to_owned(),
        }
        is told |_, outcome| (*outcome == Outcome::Done).then_some(ReleaseResponse {});
        hears |_| Outcome::Done;

    ResignRequest -> ResignResponse, needs a session: false
        asks for |asked { key, token }| Release {
            key: check::key(&asked.key)?,
            space: Space::Locks,
            token: token(&asked.token)?,
            resign: true,
        };
        sent by ElectionsClient.resign is made of Release |Release { space: _, token, resign: _, key }| {
            key: bytes(key),
            token: token.text().to_owned(),
        }
        is told |_, outcome| (*outcome == Outcome::Done).then_some(ResignResponse {});
        hears |_| Outcome::Done;

    RenewRequest -> RenewResponse, needs a session: false
        asks for |asked { key, mode, token, lease_ms }| Renew {
            key: check::key(&asked.key)?,
            space: space(asked.mode)?,
            token: token(&asked.token)?,
            lease: lasting(asked.lease_ms)?,
        };
        sent by LocksClient.renew is made of Renew |Renew { space, token, lease, key }| {
            key: bytes(key),
            mode: space_number(space),
            token: token.text().to_owned(),
            lease_ms: lasting_millis(lease),
        }
        is told |_, outcome| match outcome {
            Outcome::Renewed { fence, lease } => {
                Some(RenewResponse { fence: fence.0, valid_for_ms: millis(*lease) })
            }
            _ => None,
        };
        hears |RenewResponse { fence, valid_for_ms }| {
            Outcome::Renewed { fence: Fence(fence), lease: lease(valid_for_ms) }
        };

    AddCounterRequest -> CounterResponse, needs a session: false
        asks for |asked { key, delta }| {
            let key = check::key(&asked.key)?;
            // Watchers are told of a subtraction as such.
            match asked.delta.checked_neg() {
                Some(delta @ 1..) => Add { key, delta, decrement: true },
                Some(_) | None => Add { key, delta: asked.delta, decrement: false },
            }
        };
        sent by CountersClient.add is made of Add |Add { delta, decrement, key }| {
            key: bytes(key),
            delta: if decrement {
                delta.checked_neg().expect("`CommandCall::new` refuses the smallest integer")
            } else {
                delta
            },
        }
        is told |_, outcome| Some(CounterResponse { value: number(outcome)? });
        hears |answer| Outcome::Number(answer.value);

    SetCounterRequest -> CounterResponse, needs a session: false
        asks for |asked { key, value }| CounterSet { key: check::key(&asked.key)?, value: asked.value };
        sent by CountersClient.set is made of CounterSet |CounterSet { value, key }| { key: bytes(key), value: value }
        is told |asked, outcome| {
            (*outcome == Outcome::Done).then_some(CounterResponse { value: asked.value })
        };
        hears |_| Outcome::Done;

    SetRequest -> SetResponse, needs a session: false
        asks for |asked { key, value, ttl_ms }| KvSet {
            key: check::key(&asked.key)?,
            value: check::entry(&asked.value)?,
            ttl: lasting(asked.ttl_ms)?,
        };
        sent by KvClient.set is made of KvSet |KvSet { ttl, key, value }| {
            key: bytes(key),
            value: bytes(value),
            ttl_ms: lasting_millis(ttl),
        }
        is told |_, outcome| match outcome {
            Outcome::Written(revision) => Some(SetResponse { revision: revision.0 }),
            _ => None,
        };
        hears |answer| Outcome::Written(Revision(answer.revision));

    DeleteRequest -> DeleteResponse, needs a session: false
        asks for |asked { key }| KvDelete { key: check::key(&asked.key)? };
        sent by KvClient.delete is made of KvDelete |KvDelete { key }| { key: bytes(key) }
        is told |_, outcome| (*outcome == Outcome::Done).then_some(DeleteResponse {});
        hears |_| Outcome::Done;

    CompareAndSetRequest -> CompareAndSetResponse, needs a session: false
        asks for |asked { key, expect, new_value, ttl_ms }| KvCompareAndSet {
            key: check::key(&asked.key)?,
            value: check::entry(&asked.new_value)?,
            ttl: lasting(asked.ttl_ms)?,
            expect: expect(asked.expect.as_ref())?,
        };
        sent by KvClient.compare_and_set is made of KvCompareAndSet |KvCompareAndSet { expect, ttl, key, value }| {
            key: bytes(key),
            new_value: bytes(value),
            ttl_ms: lasting_millis(ttl),
            expect: Some(match expect {
                Expect::Absent => Expected::Absent(true),
                Expect::Value(value) => Expected::Value(bytes(value)),
                Expect::Revision(revision) => Expected::Revision(revision.0),
            }),
        }
        is told |_, outcome| match outcome {
            Outcome::Written(revision) => {
                Some(CompareAndSetResponse { written: true, revision: revision.0 })
            }
            Outcome::Conflict => Some(CompareAndSetResponse { written: false, revision: 0 }),
            _ => None,
        };
        hears |CompareAndSetResponse { written, revision }| {
            if written { Outcome::Written(Revision(revision)) } else { Outcome::Conflict }
        };

    PushRequest -> PushResponse, needs a session: false
        asks for |asked { key, end, item }| Push {
            key: check::key(&asked.key)?,
            value: check::value(&asked.item)?,
            end: end(asked.end)?,
        };
        sent by ListsClient.push is made of Push |Push { end, key, value }| {
            key: bytes(key),
            item: bytes(value),
            end: end_number(end),
        }
        is told |_, outcome| Some(PushResponse { length: number(outcome)?.unsigned_abs() });
        hears |answer| count(answer.length);

    PopRequest -> PopResponse, needs a session: false
        asks for |asked { key, end, wait_ms }| Pop {
            key: check::key(&asked.key)?,
            end: end(asked.end)?,
            wait: asked.wait_ms.map(check::millis).transpose()?,
        };
        sent by ListsClient.pop is made of Pop |Pop { end, wait, key }| {
            key: bytes(key),
            end: end_number(end),
            wait_ms: wait.map(millis_up),
        }
        is told |_, outcome| match outcome {
            Outcome::Popped { value, .. } => Some(PopResponse { item: Some(bytes(value)) }),
            Outcome::Empty | Outcome::Timeout => Some(PopResponse { item: None }),
            _ => None,
        };
        hears |answer| answer.item.map_or(Outcome::Empty, |item| Outcome::Value(item[..].into()));

    BarrierWaitRequest -> BarrierWaitResponse, needs a session: true
        asks for |asked { key, count, wait_ms }| BarrierWait {
            key: check::key(&asked.key)?,
            count: check::count(asked.count.into())?,
            wait: check::millis(asked.wait_ms)?,
        };
        sent by BarriersClient.wait is made of BarrierWait |BarrierWait { count, wait, key }| {
            key: bytes(key),
            count: count,
            wait_ms: millis_up(wait),
        }
        is told |_, outcome| match outcome {
            Outcome::Done => Some(BarrierWaitResponse { passed: true }),
            Outcome::Timeout => Some(BarrierWaitResponse { passed: false }),
            _ => None,
        };
        hears |answer| if answer.passed { Outcome::Done } else { Outcome::Timeout };

    PublishRequest -> PublishResponse, needs a session: false
        asks for |asked { channel, payload }| {
            let channel = check::channel(&asked.channel)?;
            Signal { channel, payload: check::payload(channel, &asked.payload)? }
        };
        sent by SignalsClient.publish is made of Signal |Signal { channel, payload }| {
            channel: bytes(channel),
            payload: bytes(payload),
        }
        is told |_, outcome| Some(PublishResponse { receivers: number(outcome)?.unsigned_abs() });
        hears |answer| count(answer.receivers);
}

/// Enums of the services that are those of the state machine, with one value more for what a newer server may say.
macro_rules! enums {
    ($($enum:ident = $of:ident { $($variant:ident)* })*) => {
        $(
            impl From<$of> for $enum {
                fn from(of: $of) -> Self {
                    match of {
                        $($of::$variant => Self::$variant,)*
                    }
                }
            }

            impl $enum {
                /// What it is in the state machine; none if it does not say.
                #[must_use]
                pub const fn known(self) -> Option<$of> {
                    match self {
                        Self::Unspecified => None,
                        $(Self::$variant => Some($of::$variant),)*
                    }
                }
            }
        )*
    };
}

enums! {
    ChangeKind = Event {
        Acquire Release Elect Resign Incr Decr Cset Kset Kdel Kcas Lpush Rpush Lpop Rpop Blpop Brpop
    }
    LeaderEvent = LeaderNews { Elected Resigned Failover }
    LostReason = Loss { Expired Forced Session }
}

type Checked<T> = Result<T, Invalid>;

const fn invalid<T>(text: &'static str) -> Checked<T> {
    Err(Invalid { code: 8, text })
}

/// How a lock is asked for. A limit is looked at for semaphores only.
fn mode(mode: i32, limit: u32) -> Checked<Mode> {
    Ok(match lock_mode(mode)? {
        LockMode::Unspecified | LockMode::Mutex => Mode::Mutex,
        LockMode::Semaphore => Mode::Semaphore { limit: check::count(limit.into())? },
        LockMode::Read => Mode::Read,
        LockMode::Write => Mode::Write,
    })
}

/// Where a lock lives that was asked for in this mode.
///
/// # Errors
///
/// If there is no such mode.
pub fn space(mode: i32) -> Checked<Space> {
    Ok(match lock_mode(mode)? {
        LockMode::Semaphore => Space::Semaphores,
        LockMode::Unspecified | LockMode::Mutex | LockMode::Read | LockMode::Write => Space::Locks,
    })
}

/// The mode that stands for a namespace where nothing else matters.
#[must_use]
pub fn space_number(space: Space) -> i32 {
    match space {
        Space::Locks => LockMode::Mutex.into(),
        Space::Semaphores => LockMode::Semaphore.into(),
    }
}

fn lock_mode(mode: i32) -> Checked<LockMode> {
    LockMode::try_from(mode).or(invalid("an unknown mode of locks"))
}

fn mode_number(mode: Mode) -> i32 {
    match mode {
        Mode::Mutex | Mode::Election => LockMode::Mutex.into(),
        Mode::Semaphore { .. } => LockMode::Semaphore.into(),
        Mode::Read => LockMode::Read.into(),
        Mode::Write => LockMode::Write.into(),
    }
}

fn limit(mode: Mode) -> u32 {
    if let Mode::Semaphore { limit } = mode { limit } else { 0 }
}

fn end(end: i32) -> Checked<End> {
    match ListEnd::try_from(end) {
        Ok(ListEnd::Unspecified | ListEnd::Left) => Ok(End::Left),
        Ok(ListEnd::Right) => Ok(End::Right),
        Err(_) => invalid("an unknown end of a list"),
    }
}

fn end_number(end: End) -> i32 {
    match end {
        End::Left => ListEnd::Left.into(),
        End::Right => ListEnd::Right.into(),
    }
}

fn expect(expected: Option<&Expected>) -> Checked<Expect<'_>> {
    match expected {
        Some(Expected::Absent(true)) => Ok(Expect::Absent),
        Some(Expected::Value(value)) => Ok(Expect::Value(check::entry(value)?)),
        Some(Expected::Revision(revision)) => Ok(Expect::Revision(Revision(*revision))),
        Some(Expected::Absent(false)) | None => invalid("what is expected is required"),
    }
}

/// A token. A text that is none is not held.
///
/// # Errors
///
/// If there is none, or it is endless.
pub fn token(text: &str) -> Checked<Token> {
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX {
        return invalid("a token is required");
    }
    Ok(Token::parse(text.as_bytes()).unwrap_or(Token::NONE))
}

/// A lease or a time to live, of which zero is none.
///
/// # Errors
///
/// If it is longer than any time may be.
pub fn lasting(millis: u64) -> Checked<Option<Span>> {
    Ok(Some(check::millis(millis)?).filter(|span| *span > Span::ZERO))
}

fn lasting_millis(span: Option<Span>) -> u64 {
    span.map_or(0, millis_up)
}

/// Rounded up, as in the line protocol: a wait must not become a try.
fn millis_up(span: Span) -> u64 {
    span.0.div_ceil(1_000_000).min(check::SECONDS_MAX * 1_000)
}

/// Rounded down: no holder believes in a lease that is longer than it is.
fn millis(span: Span) -> u64 {
    span.0 / 1_000_000
}

/// Never nothing: that would be no lease at all.
fn lease(millis: u64) -> Span {
    Span::from_millis(millis.max(1))
}

/// The grant, or none if it was not granted in time or has a place in the queue. Outside, none for a refusal.
#[expect(clippy::option_option, reason = "a refusal is neither")]
fn granted(outcome: &Outcome) -> Option<Option<Grant>> {
    match outcome {
        Outcome::Granted(Granted { token, lease })
        | Outcome::Acquired(Granted { token, lease }) => Some(Some(Grant {
            token: token.text().to_owned(),
            fence: token.fence.0,
            valid_for_ms: millis(*lease),
        })),
        Outcome::Timeout | Outcome::Queued => Some(None),
        _ => None,
    }
}

fn grant_or(grant: Option<Grant>, none: Outcome) -> Outcome {
    let Some(Grant { token, fence, valid_for_ms }) = grant else { return none };
    match Token::parse(token.as_bytes()) {
        Some(token) if token.fence.0 == fence => {
            Outcome::Granted(Granted { token, lease: lease(valid_for_ms) })
        }
        // Something was granted that can not be named.
        Some(_) | None => Outcome::Refused(Refusal::Forgotten),
    }
}

fn number(outcome: &Outcome) -> Option<i64> {
    if let Outcome::Number(number) = outcome { Some(*number) } else { None }
}

fn count(count: u64) -> Outcome {
    Outcome::Number(i64::try_from(count).unwrap_or(i64::MAX))
}

fn bytes(bytes: &[u8]) -> Bytes {
    Bytes::copy_from_slice(bytes)
}

#[cfg(test)]
mod tests {
    use std::fmt::Debug;

    use super::*;

    /// A command is asked for by its message, whoever asks.
    fn check<'a, M>(command: impl Into<Command<'a>> + Copy + Into<M>)
    where
        M: CommandMessage + PartialEq + Debug + Clone,
    {
        let head = Head { session: "s", request_id: 7, ack_through: 5 };
        let message = Into::<M>::into(command).with_head(head);
        assert_eq!(message.head(), head);
        assert_eq!(message.command(), Ok(command.into()), "{message:?}");
    }

    #[test]
    fn commands_come_as_they_went() {
        let (key, value, salt) = (&b"k"[..], &b"v"[..], 0);
        let (wait, lease) = (Span::from_millis(250), Some(Span::from_secs(9)));
        let token = Token { fence: Fence(3), salt: 4 };
        for mode in [Mode::Mutex, Mode::Read, Mode::Write, Mode::Semaphore { limit: 3 }] {
            check::<AcquireRequest>(Acquire { mode, wait, lease, salt, key });
            check::<EnqueueRequest>(Enqueue { mode, lease, salt, key });
        }
        check::<CampaignRequest>(Acquire { mode: Mode::Election, wait, lease: None, salt, key });
        for space in [Space::Locks, Space::Semaphores] {
            check::<WaitRequest>(Wait { space, wait, key });
            check::<ReleaseRequest>(Release { space, token, resign: false, key });
            check::<RenewRequest>(Renew { space, token, lease, key });
        }
        check::<ResignRequest>(Release { space: Space::Locks, token, resign: true, key });
        for delta in [i64::MIN, -1, 0, 1, i64::MAX] {
            // -1 is added as 1 is subtracted, and comes back as that.
            if delta > 0 {
                check::<AddCounterRequest>(Add { delta, decrement: true, key });
            }
            if delta != -1 {
                check::<AddCounterRequest>(Add { delta, decrement: false, key });
            }
            check::<SetCounterRequest>(CounterSet { value: delta, key });
        }
        for ttl in [None, lease] {
            check::<SetRequest>(KvSet { ttl, key, value });
            for expect in [Expect::Absent, Expect::Value(value), Expect::Revision(Revision(8))] {
                check::<CompareAndSetRequest>(KvCompareAndSet { expect, ttl, key, value });
            }
        }
        check::<DeleteRequest>(KvDelete { key });
        for end in [End::Left, End::Right] {
            check::<PushRequest>(Push { end, key, value });
            for wait in [None, Some(Span::ZERO), Some(wait)] {
                check::<PopRequest>(Pop { end, wait, key });
            }
        }
        check::<BarrierWaitRequest>(BarrierWait { count: 2, wait, key });
        check::<PublishRequest>(Signal { channel: key, payload: value });
    }

    /// What a message can not say is refused, and a subtraction never becomes an addition of the same number.
    #[test]
    fn the_smallest_integer_is_not_subtracted() {
        let call = |delta, decrement| CommandCall::new(&Add { delta, decrement, key: b"k" }.into());
        assert_eq!(call(i64::MIN, true).err(), Some(Reason::Overflow));
        for (delta, decrement, added) in [
            (i64::MIN, false, i64::MIN),
            (i64::MIN + 1, true, i64::MAX),
            (i64::MAX, true, -i64::MAX),
            (-5, true, 5),
            (0, true, 0),
        ] {
            let message = call(delta, decrement);
            let Ok(CommandCall::AddCounterRequest(message)) = message else {
                panic!("{message:?}");
            };
            assert_eq!(message.delta, added);
        }
        let renew =
            Renew { space: Space::Locks, token: Token::NONE, lease: Some(Span::ZERO), key: b"k" };
        assert_eq!(CommandCall::new(&renew.into()).err(), Some(Reason::BadRequest));
    }

    #[test]
    fn outcomes_come_as_they_went() {
        fn check<M: CommandMessage + Default>(outcomes: &[Outcome]) {
            for outcome in outcomes {
                let response = M::default().response(outcome).expect("an answer");
                assert_eq!(M::outcome(response), *outcome);
            }
            assert!(M::default().response(&Outcome::Refused(Refusal::NotHeld)).is_none());
        }
        let grant =
            Granted { token: Token { fence: Fence(3), salt: 4 }, lease: Span::from_secs(9) };
        let waited = [Outcome::Granted(grant), Outcome::Timeout];
        check::<AcquireRequest>(&waited);
        check::<TryAcquireRequest>(&waited);
        check::<CampaignRequest>(&waited);
        check::<WaitRequest>(&waited);
        check::<EnqueueRequest>(&[Outcome::Granted(grant), Outcome::Queued]);
        check::<ReleaseRequest>(&[Outcome::Done]);
        check::<ResignRequest>(&[Outcome::Done]);
        check::<RenewRequest>(&[Outcome::Renewed { fence: Fence(3), lease: grant.lease }]);
        check::<AddCounterRequest>(&[Outcome::Number(-5)]);
        check::<SetCounterRequest>(&[Outcome::Done]);
        check::<SetRequest>(&[Outcome::Written(Revision(6))]);
        check::<DeleteRequest>(&[Outcome::Done]);
        check::<CompareAndSetRequest>(&[Outcome::Written(Revision(6)), Outcome::Conflict]);
        check::<PushRequest>(&[Outcome::Number(5)]);
        check::<PopRequest>(&[Outcome::Empty]);
        check::<BarrierWaitRequest>(&[Outcome::Done, Outcome::Timeout]);
        check::<PublishRequest>(&[Outcome::Number(5)]);
        let popped =
            Outcome::Popped { key: b"k"[..].into(), end: End::Left, value: b"v"[..].into() };
        let response = PopRequest::default().response(&popped).expect("an answer");
        assert_eq!(PopRequest::outcome(response), Outcome::Value(b"v"[..].into()));
    }

    #[test]
    fn fields_are_checked() {
        let refused = |message: &AcquireRequest| message.command().is_err();
        let good = AcquireRequest { key: bytes(b"k"), ..AcquireRequest::default() };
        assert!(!refused(&good));
        assert!(refused(&AcquireRequest { key: bytes(b"a b"), ..good.clone() }));
        assert!(refused(&AcquireRequest { mode: 9, ..good.clone() }));
        assert!(refused(&AcquireRequest { mode: LockMode::Semaphore.into(), ..good.clone() }));
        assert!(refused(&AcquireRequest { wait_ms: u64::MAX, ..good }));
        assert_eq!((lasting(0), lasting(1)), (Ok(None), Ok(Some(Span::from_millis(1)))));
        assert!(token("").is_err() && token(&"t".repeat(257)).is_err());
        assert_eq!(token("no token"), Ok(Token::NONE));
        let grant = Grant { token: "no token".to_owned(), fence: 1, valid_for_ms: 0 };
        assert_eq!(grant_or(Some(grant), Outcome::Timeout), Outcome::Refused(Refusal::Forgotten));
        assert_eq!(lease(0), Span::from_millis(1));
        assert_eq!((millis_up(Span(1)), millis(Span(1_999_999))), (1, 1));
    }
}
