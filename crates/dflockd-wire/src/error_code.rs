//! Every refusal a server can answer with, once.

/// What there is to say about one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorSpec {
    /// The code.
    pub code: ErrorCode,
    /// The status word on the wire.
    pub text: &'static str,
    /// What it means, in a sentence.
    pub meaning: &'static str,
}

/// Makes [`ErrorCode`] and [`ERROR_CODES`].
macro_rules! error_codes {
    ($($code:ident $text:literal $meaning:literal)*) => {
        /// Why a request was refused.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum ErrorCode {
            $(
                #[doc = $meaning]
                $code,
            )*
        }

        /// Every code, once.
        pub const ERROR_CODES: &[ErrorSpec] = &[
            $(ErrorSpec { code: ErrorCode::$code, text: $text, meaning: $meaning },)*
        ];
    };
}

error_codes! {
    Error "error"
        "The request is malformed or was refused for a reason without a status of its own."
    Auth "error_auth"
        "The connection did not present the right token; it is closed."
    MaxLocks "error_max_locks"
        "The server has as many locks and semaphores as it may, or the session holds as many."
    MaxWaiters "error_max_waiters"
        "As many waiters as may are queued for this key, or of this session."
    MaxKeys "error_max_keys"
        "The server holds as many counters, values, lists and barriers as it may."
    LimitMismatch "error_limit_mismatch"
        "The semaphore exists with another limit."
    TypeMismatch "error_type_mismatch"
        "The key is a read-write lock and was used as an ordinary one, or the other way round."
    NotEnqueued "error_not_enqueued"
        "A wait without an enqueue before it."
    AlreadyEnqueued "error_already_enqueued"
        "A second enqueue of the key on this connection."
    LeaseExpired "error_lease_expired"
        "The lease ran out before it was claimed or renewed."
    ListFull "error_list_full"
        "The list has as many items as it may."
    BarrierCountMismatch "error_barrier_count_mismatch"
        "The barrier exists with another count."
    Draining "error_draining"
        "The server is shutting down; the connection is closed."
    NotLeader "error_not_leader"
        "This member is not the leader; its address follows if it is known."
    Unknown "error_unknown"
        "The outcome could not be determined in time: the request may have taken effect."
    Unavailable "error_unavailable"
        "Nobody could decide the request, as without a majority: nothing was done, and it can be asked again."
    TooLarge "error_too_large"
        "The answer would have more than 1 MiB: ask for it in parts, as with `<start>` and `<stop>` of `lrange`."
}

impl ErrorCode {
    /// The status word on the wire.
    #[must_use]
    pub const fn text(self) -> &'static str {
        self.spec().text
    }

    /// The entry of this code in [`ERROR_CODES`].
    #[must_use]
    pub const fn spec(self) -> &'static ErrorSpec {
        // Enum and list are made from the same lines, so positions are the same.
        &ERROR_CODES[self as usize]
    }

    /// The code with this status word, spelled exactly.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        ERROR_CODES.iter().find(|spec| spec.text == text).map(|spec| spec.code)
    }

    /// Whether the request may have taken effect although it failed.
    #[must_use]
    pub const fn may_have_applied(self) -> bool {
        match self {
            Self::Error
            | Self::Auth
            | Self::MaxLocks
            | Self::MaxWaiters
            | Self::MaxKeys
            | Self::LimitMismatch
            | Self::TypeMismatch
            | Self::NotEnqueued
            | Self::AlreadyEnqueued
            | Self::LeaseExpired
            | Self::ListFull
            | Self::BarrierCountMismatch
            | Self::Draining
            | Self::NotLeader
            | Self::Unavailable
            | Self::TooLarge => false,
            Self::Unknown => true,
        }
    }

    /// Whether the same request, sent again later or to another member, can succeed and does no harm.
    ///
    /// Not for [`Self::Unknown`]: a second try might be a second effect. A numbered connection with a
    /// kept session may repeat even that, under the same number.
    #[must_use]
    pub const fn may_retry(self) -> bool {
        match self {
            Self::MaxLocks
            | Self::MaxWaiters
            | Self::MaxKeys
            | Self::ListFull
            | Self::Draining
            | Self::NotLeader
            | Self::Unavailable => true,
            Self::Error
            | Self::Auth
            | Self::LimitMismatch
            | Self::TypeMismatch
            | Self::NotEnqueued
            | Self::AlreadyEnqueued
            | Self::LeaseExpired
            | Self::BarrierCountMismatch
            | Self::Unknown
            | Self::TooLarge => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_once_and_at_its_place() {
        for (position, spec) in ERROR_CODES.iter().enumerate() {
            assert_eq!(spec.code as usize, position, "{}", spec.text);
            assert_eq!(ErrorCode::parse(spec.text), Some(spec.code));
            assert_eq!(spec.code.text(), spec.text);
            assert!(spec.text.starts_with("error") && spec.meaning.ends_with('.'), "{}", spec.text);
        }
        assert_eq!(ERROR_CODES.len(), 17);
        assert_eq!(ErrorCode::parse("error_"), None);
        assert_eq!(ErrorCode::parse(""), None);
    }

    #[test]
    fn only_unknown_may_have_applied() {
        for spec in ERROR_CODES {
            assert_eq!(spec.code.may_have_applied(), spec.code == ErrorCode::Unknown);
            assert!(!(spec.code.may_have_applied() && spec.code.may_retry()), "{}", spec.text);
        }
    }
}
