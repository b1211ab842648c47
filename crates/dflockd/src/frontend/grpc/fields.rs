//! Fields of requests that many calls have, checked.

use dflockd_core::check::{self, Invalid};
use dflockd_core::{End, Fence, Mode, RequestId, Space, Span, Token};
use dflockd_wire::TokenText;
use dflockd_wire::grpc::{ListEnd, LockMode};

use super::error::Refused;

/// The longest token that is looked at.
const TOKEN_BYTES_MAX: usize = 256;
/// The usual page.
const PAGE: usize = 100;
/// The longest page.
const PAGE_MAX: usize = 1000;

type Checked<T> = Result<T, Refused>;

impl From<Invalid> for Refused {
    fn from(invalid: Invalid) -> Self {
        Self::bad_request(invalid.text)
    }
}

/// The checks of all APIs, refused in the words of gRPC.
macro_rules! checks {
    ($($check:ident($field:ident: $type:ty) -> $checked:ty;)*) => {
        $(pub(crate) fn $check($field: $type) -> Checked<$checked> {
            Ok(check::$check($field)?)
        })*
    };
}

checks! {
    key(key: &[u8]) -> &[u8];
    pattern(pattern: &[u8]) -> &[u8];
    channel(channel: &[u8]) -> &[u8];
    group(group: &[u8]) -> &[u8];
    value(value: &[u8]) -> &[u8];
    entry(value: &[u8]) -> &[u8];
    count(count: i64) -> u32;
    millis(millis: u64) -> Span;
    reason(reason: &str) -> &str;
    client_name(name: &str) -> Option<&str>;
}

/// What a signal carries.
pub(crate) fn payload<'a>(channel: &[u8], payload: &'a [u8]) -> Checked<&'a [u8]> {
    Ok(check::payload(channel, payload)?)
}

/// A time to live, of which zero is none.
pub(crate) fn lasting(millis: u64) -> Checked<Option<Span>> {
    Ok(Some(check::millis(millis)?).filter(|span| *span > Span::ZERO))
}

/// How a lock is asked for. A limit is looked at for semaphores only.
pub(crate) fn mode(mode: i32, limit: u32) -> Checked<Mode> {
    Ok(match lock_mode(mode)? {
        LockMode::Unspecified | LockMode::Mutex => Mode::Mutex,
        LockMode::Semaphore => Mode::Semaphore { limit: check::count(limit.into())? },
        LockMode::Read => Mode::Read,
        LockMode::Write => Mode::Write,
    })
}

/// Where a lock lives.
pub(crate) fn space(mode: i32) -> Checked<Space> {
    Ok(match lock_mode(mode)? {
        LockMode::Semaphore => Space::Semaphores,
        LockMode::Unspecified | LockMode::Mutex | LockMode::Read | LockMode::Write => Space::Locks,
    })
}

fn lock_mode(mode: i32) -> Checked<LockMode> {
    LockMode::try_from(mode).map_err(|_| Refused::bad_request("an unknown mode of locks"))
}

pub(crate) fn end(end: i32) -> Checked<End> {
    match ListEnd::try_from(end) {
        Ok(ListEnd::Unspecified | ListEnd::Left) => Ok(End::Left),
        Ok(ListEnd::Right) => Ok(End::Right),
        Err(_) => Err(Refused::bad_request("an unknown end of a list")),
    }
}

/// A token. One that nobody can hold is not held.
pub(crate) fn token(text: &str) -> Checked<Token> {
    if text.is_empty() || text.len() > TOKEN_BYTES_MAX {
        return Err(Refused::bad_request("a token is required"));
    }
    let (fence, salt) = TokenText::parse(text.as_bytes()).ok_or_else(Refused::not_held)?;
    Ok(Token { fence: Fence(fence), salt })
}

/// The number of a request that can be repeated, if it has one.
pub(crate) fn request(number: u64) -> Checked<Option<RequestId>> {
    let request = RequestId(number);
    if request.is_repeatable() {
        Ok(Some(request).filter(|request| request.0 != 0))
    } else {
        Err(Refused::bad_request("a request id is below 2^63"))
    }
}

/// How many entries a page has, of which zero is the usual number.
pub(crate) fn page(limit: u32) -> Checked<usize> {
    let limit = Some(limit.into()).filter(|limit| *limit > 0);
    Ok(check::page(limit, PAGE, PAGE_MAX)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(lasting(0).ok(), Some(None));
        assert_eq!(request(0).ok(), Some(None));
        assert_eq!(request(7).ok(), Some(Some(RequestId(7))));
        assert!(request(1 << 63).is_err());
        assert_eq!((page(0).ok(), page(1000).ok(), page(1001).ok()), (Some(100), Some(1000), None));
        assert!(mode(2, 0).is_err() && mode(1, 0).is_ok() && mode(9, 1).is_err());
    }

    #[test]
    fn tokens() {
        assert!(token("").is_err() && token("0123456789abcdef0123456789abcdef").is_ok());
    }
}
