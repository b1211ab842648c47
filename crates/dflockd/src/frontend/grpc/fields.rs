//! Fields of requests that many calls have, checked.

use dflockd_core::check::{self, Invalid};
use dflockd_core::{RequestId, Space, Span, Token};
use dflockd_wire::grpc;

use super::error::Refused;

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
    ($($from:ident::$check:ident($($field:ident: $type:ty),*) -> $checked:ty;)*) => {
        $(pub(crate) fn $check($($field: $type),*) -> Checked<$checked> {
            Ok($from::$check($($field),*)?)
        })*
    };
}

checks! {
    check::key(key: &[u8]) -> &[u8];
    check::pattern(pattern: &[u8]) -> &[u8];
    check::group(group: &[u8]) -> &[u8];
    check::value(value: &[u8]) -> &[u8];
    check::reason(reason: &str) -> &str;
    check::client_name(name: &str) -> Option<&str>;
    grpc::space(mode: i32) -> Space;
    grpc::token(text: &str) -> Token;
    grpc::lasting(millis: u64) -> Option<Span>;
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
        assert_eq!(request(0).ok(), Some(None));
        assert_eq!(request(7).ok(), Some(Some(RequestId(7))));
        assert!(request(1 << 63).is_err());
        assert_eq!((page(0).ok(), page(1000).ok(), page(1001).ok()), (Some(100), Some(1000), None));
    }
}
