//! Every status word that the line protocol has for a refusal, once.

/// What there is to say about one code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorSpec {
    /// The code.
    pub code: ErrorCode,
    /// The status word on the wire.
    pub text: &'static str,
    /// What a client may do then.
    pub advice: Advice,
    /// What it means, in a sentence.
    pub meaning: &'static str,
}

/// What a client may do about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Nothing was done, and the same request would be refused again.
    Final,
    /// Nothing was done. The same request, sent again later or to another member, can succeed and does no harm.
    Retry,
    /// The request may have taken effect: a second try might be a second effect. A numbered connection with a kept
    /// session may repeat even that, under the same number.
    Unknown,
}

impl Advice {
    /// Whether the request may have taken effect although it failed.
    #[must_use]
    pub const fn may_have_applied(self) -> bool {
        matches!(self, Self::Unknown)
    }

    /// Whether the same request can succeed later and does no harm.
    #[must_use]
    pub const fn may_retry(self) -> bool {
        matches!(self, Self::Retry)
    }
}

/// Makes [`ErrorCode`] and [`ERROR_CODES`].
macro_rules! error_codes {
    ($($code:ident $text:literal $advice:ident $meaning:literal)*) => {
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
            $(ErrorSpec {
                code: ErrorCode::$code,
                text: $text,
                advice: Advice::$advice,
                meaning: $meaning,
            },)*
        ];
    };
}

error_codes! {
    Error "error" Final
        "The request is malformed or was refused for a reason without a status of its own."
    Auth "error_auth" Final
        "The connection did not present the right token; it is closed."
    MaxLocks "error_max_locks" Retry
        "The limit of locks and semaphores, or of holds per session, is reached."
    MaxWaiters "error_max_waiters" Retry
        "The limit of waiters for this key, or of waits per session, is reached."
    MaxKeys "error_max_keys" Retry
        "The limit of counters, values, lists and barriers is reached."
    LimitMismatch "error_limit_mismatch" Final
        "The semaphore exists with another limit."
    TypeMismatch "error_type_mismatch" Final
        "The key is a read-write lock and was used as an ordinary one, or the other way round."
    NotEnqueued "error_not_enqueued" Final
        "A wait without an enqueue before it."
    AlreadyEnqueued "error_already_enqueued" Final
        "A second enqueue of the key on this connection."
    LeaseExpired "error_lease_expired" Final
        "The lease ran out before it was claimed or renewed."
    ListFull "error_list_full" Retry
        "The list is full."
    BarrierCountMismatch "error_barrier_count_mismatch" Final
        "The barrier exists with another count."
    Draining "error_draining" Retry
        "The server is shutting down; the connection is closed."
    NotLeader "error_not_leader" Retry
        "This member is not the leader; its address follows if it is known."
    Unknown "error_unknown" Unknown
        "The outcome could not be determined in time: the request may have taken effect."
    Unavailable "error_unavailable" Retry
        "The request could not be decided, as without a quorum: nothing was done, and it can be asked again."
    TooLarge "error_too_large" Final
        "The answer would have more than 1 MiB: ask for it in parts, as with `<start>` and `<stop>` of `lrange`."
    Forbidden "error_forbidden" Final
        "The identity of the connection has no right to do that with this key."
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

    /// See [`Advice::may_have_applied`].
    #[must_use]
    pub const fn may_have_applied(self) -> bool {
        self.spec().advice.may_have_applied()
    }

    /// See [`Advice::may_retry`].
    #[must_use]
    pub const fn may_retry(self) -> bool {
        self.spec().advice.may_retry()
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
        assert_eq!(ERROR_CODES.len(), 18);
        assert_eq!(ErrorCode::parse("error_"), None);
        assert_eq!(ErrorCode::parse(""), None);
    }
}
