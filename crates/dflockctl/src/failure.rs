//! How a command ends: the exit statuses, and errors as one line that says what to do.

use std::fmt;
use std::process::ExitCode;

use dflockd_client::{Error, ErrorCode};

/// What `dflockctl` ends with when it is not the status of a program it ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    /// Done.
    Ok,
    /// No such thing, not equal, or refused by the server.
    No,
    /// The command line or a setting is wrong (`EX_USAGE`).
    Usage,
    /// The server can not be reached, or its answer did not arrive (`EX_UNAVAILABLE`).
    Unreachable,
    /// Not acquired: somebody else holds it, or the time to wait is over (`EX_TEMPFAIL`).
    NotAcquired,
    /// The lock was lost while the program ran.
    Lost,
    /// A token is missing or wrong (`EX_NOPERM`).
    Denied,
    /// The program can not be executed.
    NotExecutable,
    /// The program does not exist.
    NotFound,
    /// Ended by this signal.
    Signal(i32),
    /// What the program ended with.
    Program(u8),
}

impl Status {
    pub(crate) fn code(self) -> u8 {
        match self {
            Self::Ok => 0,
            Self::No => 1,
            Self::Usage => 64,
            Self::Unreachable => 69,
            Self::NotAcquired => 75,
            Self::Lost => 76,
            Self::Denied => 77,
            Self::NotExecutable => 126,
            Self::NotFound => 127,
            Self::Signal(number) => u8::try_from(128 + number).unwrap_or(u8::MAX),
            Self::Program(code) => code,
        }
    }
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        Self::from(status.code())
    }
}

/// Why a command failed: a line for the user and the status to end with.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) status: Status,
    message: String,
}

impl Failure {
    pub(crate) fn new(status: Status, message: impl Into<String>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn usage(message: impl Into<String>) -> Self {
        Self::new(Status::Usage, message)
    }

    /// The lock was not to be had.
    pub(crate) fn not_acquired(message: impl Into<String>) -> Self {
        Self::new(Status::NotAcquired, message)
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One line, whatever the operating system or a file put into it.
        for (position, line) in self.message.lines().enumerate() {
            if position > 0 {
                f.write_str(" ")?;
            }
            f.write_str(line.trim())?;
        }
        Ok(())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let status = match &error {
            Error::Unreachable { .. } | Error::Unknown { .. } => Status::Unreachable,
            Error::Auth => Status::Denied,
            Error::Refused(code) => refused(*code),
            Error::Invalid(_) => Status::Usage,
            // New kinds of errors count as refusals.
            Error::Protocol { .. } | Error::Closed | _ => Status::No,
        };
        let advice = match &error {
            Error::Unreachable { .. } => "check --servers (DFLOCKD_SERVERS) and that dflockd runs",
            Error::Unknown { .. } => "it may have been done; look with `dflockctl show KEY`",
            Error::Auth => "give the right token with --auth-token-file or DFLOCKD_AUTH_TOKEN_FILE",
            Error::Refused(code) => advice(*code),
            Error::Protocol { .. } => "is it a dflockd server, and new enough?",
            Error::Invalid(_) | Error::Closed | _ => "",
        };
        let separator = if advice.is_empty() { "" } else { "; " };
        Self::new(status, format!("{error}{separator}{advice}"))
    }
}

fn refused(code: ErrorCode) -> Status {
    match code {
        ErrorCode::Auth | ErrorCode::Forbidden => Status::Denied,
        ErrorCode::Draining
        | ErrorCode::NotLeader
        | ErrorCode::Unknown
        | ErrorCode::Unavailable => Status::Unreachable,
        ErrorCode::MaxLocks | ErrorCode::MaxWaiters => Status::NotAcquired,
        ErrorCode::Error
        | ErrorCode::LimitMismatch
        | ErrorCode::TypeMismatch
        | ErrorCode::NotEnqueued
        | ErrorCode::AlreadyEnqueued
        | ErrorCode::LeaseExpired
        | ErrorCode::BarrierCountMismatch
        | ErrorCode::MaxKeys
        | ErrorCode::ListFull
        | ErrorCode::TooLarge => Status::No,
    }
}

fn advice(code: ErrorCode) -> &'static str {
    match code {
        ErrorCode::Error => "it is not held, not allowed or not possible as asked",
        ErrorCode::Auth => {
            "give the right token with --auth-token-file (--admin-token-file for administration)"
        }
        ErrorCode::Forbidden => "the identity of the token has no right to do that with this key",
        ErrorCode::Draining => "the server shuts down; try again when it is back",
        ErrorCode::NotLeader => "ask another server",
        ErrorCode::Unavailable => "no server could decide; nothing was done, try again",
        ErrorCode::Unknown => "it may have been done; look with `dflockctl show KEY`",
        ErrorCode::MaxLocks => "the server holds as many locks as --max-locks allows",
        ErrorCode::MaxWaiters => "the queue is as long as --max-waiters allows; try again later",
        ErrorCode::MaxKeys => "the server holds as many keys as --max-keys allows",
        ErrorCode::ListFull => "the list is as long as --max-list-length allows",
        ErrorCode::TooLarge => "the answer has more than 1 MiB; ask for less of it at a time",
        ErrorCode::LimitMismatch => "the semaphore is in use with another --limit",
        ErrorCode::TypeMismatch => "the key is in use as another kind of lock",
        ErrorCode::NotEnqueued => "the session has no place in the queue; call `enqueue` first",
        ErrorCode::AlreadyEnqueued => "the session has a place in the queue already; `wait` for it",
        ErrorCode::LeaseExpired => "the lease ran out; acquire it again",
        ErrorCode::BarrierCountMismatch => "others wait there with another --count",
    }
}

/// Says something on stderr.
pub(crate) fn complain(message: impl fmt::Display) {
    use std::io::Write;
    // Nobody is left to tell if stderr is closed.
    let _ = writeln!(std::io::stderr(), "dflockctl: {message}");
}
