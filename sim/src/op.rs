//! What clients ask for, as data of their own.

use dflockd_core::{
    Command, End, Expect, Fence, Mode, RequestId, Revision, SessionId, Space, Span, Subscription,
    Token, command,
};
use dflockd_engine::replica::OwnedQuery;
use dflockd_engine::replica::types::{Action, Bits128};

/// A request.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "they stand for the core's commands")]
pub enum Op {
    Acquire {
        key: Vec<u8>,
        mode: Mode,
        wait: Span,
        lease: Span,
        salt: u64,
    },
    Enqueue {
        key: Vec<u8>,
        mode: Mode,
        lease: Span,
        salt: u64,
    },
    Wait {
        key: Vec<u8>,
        mode: Mode,
        wait: Span,
        lease: Span,
    },
    Release {
        key: Vec<u8>,
        space: Space,
        token: Token,
        resign: bool,
    },
    Renew {
        key: Vec<u8>,
        space: Space,
        token: Token,
        lease: Span,
    },
    /// All holds with this lease; the token is that of the one it is done for.
    RenewSession {
        token: Token,
        lease: Span,
    },
    Force {
        key: Vec<u8>,
        space: Space,
        fence: Fence,
    },
    Add {
        key: Vec<u8>,
    },
    CounterSet {
        key: Vec<u8>,
        value: i64,
    },
    KvSet {
        key: Vec<u8>,
        value: Vec<u8>,
        ttl: Option<Span>,
    },
    KvDelete {
        key: Vec<u8>,
    },
    Cas {
        key: Vec<u8>,
        expect: Expected,
        value: Vec<u8>,
    },
    Push {
        key: Vec<u8>,
        end: End,
        value: Vec<u8>,
    },
    Pop {
        key: Vec<u8>,
        end: End,
        wait: Option<Span>,
    },
    BarrierWait {
        key: Vec<u8>,
        count: u32,
        wait: Span,
    },
    Signal {
        channel: Vec<u8>,
        payload: Vec<u8>,
    },
    Listen {
        pattern: Vec<u8>,
        group: Vec<u8>,
    },
    Watch {
        pattern: Vec<u8>,
    },
    Observe {
        key: Vec<u8>,
    },
    Cancel {
        request: RequestId,
    },
    Acknowledge {
        up_to: RequestId,
    },
    Keep {
        secret: Bits128,
    },
    Attach {
        secret: Bits128,
    },
    Kick {
        session: SessionId,
    },
    Sync,
    Read(OwnedQuery),
}

/// What a compare-and-set expects.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "they stand for the core's")]
pub enum Expected {
    Absent,
    Value(Vec<u8>),
    Revision(Revision),
}

impl Op {
    /// For the log. Reads have none.
    #[must_use]
    pub fn action(&self) -> Option<Action<'_>> {
        Some(Action::Command(match self {
            Self::Acquire { key, mode, wait, lease, salt } => Command::Acquire(command::Acquire {
                key,
                mode: *mode,
                wait: *wait,
                lease: Some(*lease),
                salt: *salt,
            }),
            Self::Enqueue { key, mode, lease, salt } => Command::Enqueue(command::Enqueue {
                key,
                mode: *mode,
                lease: Some(*lease),
                salt: *salt,
            }),
            Self::Wait { key, mode, wait, .. } => {
                Command::Wait(command::Wait { key, space: mode.space(), wait: *wait })
            }
            Self::Release { key, space, token, resign } => Command::Release(command::Release {
                key,
                space: *space,
                token: *token,
                resign: *resign,
            }),
            Self::Renew { key, space, token, lease } => Command::Renew(command::Renew {
                key,
                space: *space,
                token: *token,
                lease: Some(*lease),
            }),
            Self::RenewSession { lease, .. } => {
                Command::RenewSession(command::RenewSession { lease: *lease })
            }
            Self::Force { key, space, fence } => {
                Command::ForceRelease(command::ForceRelease { key, space: *space, fence: *fence })
            }
            Self::Add { key } => Command::Add(command::Add { key, delta: 1, decrement: false }),
            Self::CounterSet { key, value } => {
                Command::CounterSet(command::CounterSet { key, value: *value })
            }
            Self::KvSet { key, value, ttl } => {
                Command::KvSet(command::KvSet { key, value, ttl: *ttl })
            }
            Self::KvDelete { key } => Command::KvDelete(command::KvDelete { key }),
            Self::Cas { key, expect, value } => {
                let expect = match expect {
                    Expected::Absent => Expect::Absent,
                    Expected::Value(value) => Expect::Value(value),
                    Expected::Revision(revision) => Expect::Revision(*revision),
                };
                Command::KvCompareAndSet(command::KvCompareAndSet { key, expect, value, ttl: None })
            }
            Self::Push { key, end, value } => {
                Command::Push(command::Push { key, end: *end, value })
            }
            Self::Pop { key, end, wait } => {
                Command::Pop(command::Pop { key, end: *end, wait: *wait })
            }
            Self::BarrierWait { key, count, wait } => {
                Command::BarrierWait(command::BarrierWait { key, count: *count, wait: *wait })
            }
            Self::Signal { channel, payload } => {
                Command::Signal(command::Signal { channel, payload })
            }
            Self::Listen { pattern, group } => Command::Subscribe(command::Subscribe {
                to: Subscription::Signals { pattern, group },
            }),
            Self::Watch { pattern } => Command::Subscribe(command::Subscribe {
                to: Subscription::Changes { pattern, from: None },
            }),
            Self::Observe { key } => {
                Command::Subscribe(command::Subscribe { to: Subscription::Leaders { key } })
            }
            Self::Cancel { request } => Command::Cancel(command::Cancel { request: *request }),
            Self::Acknowledge { up_to } => {
                Command::Acknowledge(command::Acknowledge { up_to: *up_to })
            }
            Self::Keep { secret } => return Some(Action::Keep { secret: *secret }),
            Self::Attach { secret } => return Some(Action::Attach { secret: *secret }),
            Self::Kick { session } => return Some(Action::Kick { session: *session }),
            Self::Sync => return Some(Action::Barrier),
            Self::Read(_) => return None,
        }))
    }

    /// How long it may block.
    #[must_use]
    pub fn wait(&self) -> Span {
        match self {
            Self::Acquire { wait, .. }
            | Self::Wait { wait, .. }
            | Self::BarrierWait { wait, .. } => *wait,
            Self::Pop { wait, .. } => wait.unwrap_or_default(),
            Self::Enqueue { .. }
            | Self::Release { .. }
            | Self::Renew { .. }
            | Self::RenewSession { .. }
            | Self::Force { .. }
            | Self::Add { .. }
            | Self::CounterSet { .. }
            | Self::KvSet { .. }
            | Self::KvDelete { .. }
            | Self::Cas { .. }
            | Self::Push { .. }
            | Self::Signal { .. }
            | Self::Listen { .. }
            | Self::Watch { .. }
            | Self::Observe { .. }
            | Self::Cancel { .. }
            | Self::Acknowledge { .. }
            | Self::Keep { .. }
            | Self::Attach { .. }
            | Self::Kick { .. }
            | Self::Sync
            | Self::Read(_) => Span::ZERO,
        }
    }
}
