//! Every command of the protocol, once: its name, what its lines hold and who reads them, how long they may be, its
//! answers. Parser, printer and the protocol document go by the list below.

use dflockd_api::{End, Mode, Space};

use crate::request::{ACQUIRE, ACQUIRE_SEMAPHORE, Lines, ParseError, Request};

/// How long a line may be, unless its command says otherwise: without the LF, with a CR.
pub const SHORT_BYTES_MAX: usize = 256;

/// How long the lines may be that carry a credential or a payload, and the pushes made of those.
pub const LONG_BYTES_MAX: usize = 65_536;

/// How long the third line of a command may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ArgLimit {
    /// [`SHORT_BYTES_MAX`].
    Short,
    /// [`LONG_BYTES_MAX`]: credentials, payloads, reasons.
    Long,
    /// One value.
    Value,
    /// A value, a TAB and a TTL of at most 20 digits.
    ValueTtl,
    /// Two values, two TABs and a TTL.
    TwoValues,
}

impl ArgLimit {
    /// The limit in bytes, without the LF, where a value may have `value_bytes_max` bytes.
    ///
    /// Never below the 256 bytes of every other line: a server that only stores tiny values should
    /// answer `error` to a larger one, not close the connection.
    #[must_use]
    pub const fn bytes_max(self, value_bytes_max: usize) -> usize {
        const TTL: usize = 20;
        let bytes_max = match self {
            Self::Short => SHORT_BYTES_MAX,
            Self::Long => LONG_BYTES_MAX,
            Self::Value => value_bytes_max,
            Self::ValueTtl => value_bytes_max.saturating_add(1 + TTL),
            Self::TwoValues => value_bytes_max.saturating_mul(2).saturating_add(2 + TTL),
        };
        if bytes_max < SHORT_BYTES_MAX { SHORT_BYTES_MAX } else { bytes_max }
    }
}

/// What a command is answered if it succeeds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// `ok`.
    Plain,
    /// `ok <token> <lease>`.
    Grant,
    /// `acquired <token> <lease>`.
    Enqueue,
    /// `ok <remaining>`.
    Renew,
    /// `ok <integer>`.
    Number,
    /// `ok <the rest of the line>`.
    Value,
}

/// What there is to say about one command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OpSpec {
    /// The command.
    pub op: Op,
    /// Its first line.
    pub name: &'static str,
    /// Its second line; `_` if ignored.
    pub key: &'static str,
    /// Its third line; empty if ignored.
    pub arg: &'static str,
    /// The answers it can get beside `error`, `error_auth`, `error_draining`, `error_not_leader`, `error_unknown` and
    /// `error_forbidden`, separated by `|`.
    pub answers: &'static str,
    /// How long the third line may be.
    pub arg_limit: ArgLimit,
    /// What it is answered if it succeeds.
    pub(crate) answer: Answer,
    /// What it does, in a sentence without a full stop.
    pub summary: &'static str,
}

impl Op {
    /// The command as it is sent.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.spec().name
    }

    /// The entry of this command in [`OPS`].
    #[must_use]
    pub const fn spec(self) -> &'static OpSpec {
        // Enum and list are made from the same lines, so positions are the same.
        &OPS[self as usize]
    }
}

const fn text(name: &'static [u8]) -> &'static str {
    match core::str::from_utf8(name) {
        Ok(name) => name,
        Err(_) => panic!("names of commands are ASCII"),
    }
}

/// Makes [`Op`], [`OPS`], [`Op::parse`] and [`Op::read`]. Names are byte strings because only those compile to a
/// decision tree over length and bytes instead of a comparison per command.
macro_rules! ops {
    ($(
        $op:ident $name:literal $key:literal $arg:tt $limit:ident $answer:ident $parser:ident($($of:expr),*)
            $answers:literal
            $summary:literal
    )*) => {
        /// A command of the protocol.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Op {
            $(
                #[doc = concat!($summary, ".")]
                $op,
            )*
        }

        /// Every command, once.
        pub const OPS: &[OpSpec] = &[
            $(OpSpec {
                op: Op::$op,
                name: text($name),
                key: $key,
                arg: $arg,
                answers: $answers,
                arg_limit: ArgLimit::$limit,
                answer: Answer::$answer,
                summary: $summary,
            },)*
        ];

        impl Op {
            /// The command with this name, spelled exactly.
            #[must_use]
            pub const fn parse(name: &[u8]) -> Option<Self> {
                match name {
                    $($name => Some(Self::$op),)*
                    _ => None,
                }
            }

            /// Reads the other lines of this command.
            pub(crate) fn read<'a>(self, lines: Lines<'a>) -> Result<Request<'a>, ParseError> {
                match self {
                    $(Self::$op => lines.$parser($($of),*),)*
                }
            }
        }
    };
}

ops! {
    Auth b"auth" "_" "<token>" Long Plain auth()
        "ok"
        "Authenticates the connection; the first request where a token is configured"
    Ping b"ping" "_" "" Short Plain bare(Request::Ping)
        "ok"
        "Answers at once"
    Stats b"stats" "_" "[cluster]" Short Value stats()
        "ok <json>"
        "Describes everything the server holds, or only the cluster it is a member of"
    Barrier b"barrier" "_" "" Short Plain bare(Request::Barrier)
        "ok"
        "Answers once everything accepted before it is committed and applied"
    StableRef b"stable-ref" "<reference>" "" Short Plain stable_ref()
        "ok"
        "Labels the connection with a name that survives reconnects"
    Hello b"hello" "<client name>" "<feature words>" Short Value hello()
        "ok <accepted words>"
        "Names the client and asks for features of the connection"

    L b"l" "<key>" ACQUIRE Short Grant acquire(Mode::Mutex)
        "ok <token> <lease>|timeout|error_max_locks|error_max_waiters|error_limit_mismatch|error_type_mismatch|error_lease_expired"
        "Acquires a mutex, waiting up to the timeout"
    R b"r" "<key>" "<token>" Short Plain release(Space::Locks, false)
        "ok"
        "Releases a mutex"
    N b"n" "<key>" "<token> [<lease>]" Short Renew renew(Space::Locks)
        "ok <remaining>|error_lease_expired"
        "Renews the lease of a mutex"
    E b"e" "<key>" "[<lease>]" Short Enqueue enqueue(Mode::Mutex)
        "acquired <token> <lease>|queued|error_already_enqueued|error_max_locks|error_max_waiters|error_limit_mismatch|error_type_mismatch"
        "Queues for a mutex without waiting"
    W b"w" "<key>" "<timeout>" Short Grant wait(Space::Locks)
        "ok <token> <lease>|timeout|error_not_enqueued|error_lease_expired"
        "Waits for the mutex queued for before"

    Sl b"sl" "<key>" ACQUIRE_SEMAPHORE Short Grant semaphore_acquire()
        "ok <token> <lease>|timeout|error_max_locks|error_max_waiters|error_limit_mismatch|error_type_mismatch|error_lease_expired"
        "Acquires a slot of a semaphore, waiting up to the timeout"
    Sr b"sr" "<key>" "<token>" Short Plain release(Space::Semaphores, false)
        "ok"
        "Releases a slot of a semaphore"
    Sn b"sn" "<key>" "<token> [<lease>]" Short Renew renew(Space::Semaphores)
        "ok <remaining>|error_lease_expired"
        "Renews the lease of a slot of a semaphore"
    Se b"se" "<key>" "<limit> [<lease>]" Short Enqueue semaphore_enqueue()
        "acquired <token> <lease>|queued|error_already_enqueued|error_max_locks|error_max_waiters|error_limit_mismatch|error_type_mismatch"
        "Queues for a slot of a semaphore without waiting"
    Sw b"sw" "<key>" "<timeout>" Short Grant wait(Space::Semaphores)
        "ok <token> <lease>|timeout|error_not_enqueued|error_lease_expired"
        "Waits for the slot queued for before"

    Rl b"rl" "<key>" ACQUIRE Short Grant acquire(Mode::Read)
        "ok <token> <lease> <fence>|timeout|error_max_locks|error_max_waiters|error_type_mismatch|error_lease_expired"
        "Acquires a read lock, waiting up to the timeout"
    Wl b"wl" "<key>" ACQUIRE Short Grant acquire(Mode::Write)
        "ok <token> <lease> <fence>|timeout|error_max_locks|error_max_waiters|error_type_mismatch|error_lease_expired"
        "Acquires a write lock, waiting up to the timeout"
    Rr b"rr" "<key>" "<token>" Short Plain release(Space::Locks, false)
        "ok"
        "Releases a read lock"
    Wr b"wr" "<key>" "<token>" Short Plain release(Space::Locks, false)
        "ok"
        "Releases a write lock"
    Rn b"rn" "<key>" "<token> [<lease>]" Short Renew renew(Space::Locks)
        "ok <remaining> <fence>|error_lease_expired"
        "Renews the lease of a read lock"
    Wn b"wn" "<key>" "<token> [<lease>]" Short Renew renew(Space::Locks)
        "ok <remaining> <fence>|error_lease_expired"
        "Renews the lease of a write lock"
    Re b"re" "<key>" "[<lease>]" Short Enqueue enqueue(Mode::Read)
        "acquired <token> <lease> <fence>|queued|error_already_enqueued|error_max_locks|error_max_waiters|error_type_mismatch"
        "Queues for a read lock without waiting"
    We b"we" "<key>" "[<lease>]" Short Enqueue enqueue(Mode::Write)
        "acquired <token> <lease> <fence>|queued|error_already_enqueued|error_max_locks|error_max_waiters|error_type_mismatch"
        "Queues for a write lock without waiting"
    Rw b"rw" "<key>" "<timeout>" Short Grant wait(Space::Locks)
        "ok <token> <lease> <fence>|timeout|error_not_enqueued|error_lease_expired"
        "Waits for the read lock queued for before"
    Ww b"ww" "<key>" "<timeout>" Short Grant wait(Space::Locks)
        "ok <token> <lease> <fence>|timeout|error_not_enqueued|error_lease_expired"
        "Waits for the write lock queued for before"

    Elect b"elect" "<key>" ACQUIRE Short Grant acquire(Mode::Election)
        "ok <token> <lease> <fence>|timeout|error_max_locks|error_max_waiters|error_limit_mismatch|error_type_mismatch|error_lease_expired"
        "Runs for leader, waiting up to the timeout"
    Resign b"resign" "<key>" "<token>" Short Plain release(Space::Locks, true)
        "ok"
        "Gives up leadership and tells the observers"
    Observe b"observe" "<key>" "" Short Plain observe()
        "ok"
        "Subscribes to the leaders of an election"
    Unobserve b"unobserve" "<key>" "" Short Plain unobserve()
        "ok"
        "Ends an `observe`"

    Incr b"incr" "<key>" "<delta>" Short Number add(false)
        "ok <value>|error_max_keys"
        "Adds to a counter"
    Decr b"decr" "<key>" "<delta>" Short Number add(true)
        "ok <value>|error_max_keys"
        "Subtracts from a counter"
    Get b"get" "<key>" "" Short Number get()
        "ok <value>"
        "Reads a counter, 0 if there is none"
    Cset b"cset" "<key>" "<value>" Short Plain counter_set()
        "ok|error_max_keys"
        "Sets a counter"

    Kset b"kset" "<key>" "<value>[TAB<ttl>]" ValueTtl Plain kv_set()
        "ok|error_max_keys"
        "Stores a value under a key"
    Kget b"kget" "<key>" "" Short Value kv_get()
        "ok <value>|nil"
        "Reads the value of a key"
    Kdel b"kdel" "<key>" "" Short Plain kv_delete()
        "ok"
        "Deletes a key, if it exists"
    Kcas b"kcas" "<key>" "<old>TAB<new>TAB<ttl>" TwoValues Plain kv_compare_and_set()
        "ok|cas_conflict|error_max_keys"
        "Replaces the value of a key if it is the old one; an empty old one means no entry"

    Lpush b"lpush" "<key>" "<value>" Value Number push(End::Left)
        "ok <length>|error_list_full|error_max_keys"
        "Adds an item to the left end of a list"
    Rpush b"rpush" "<key>" "<value>" Value Number push(End::Right)
        "ok <length>|error_list_full|error_max_keys"
        "Adds an item to the right end of a list"
    Lpop b"lpop" "<key>" "" Short Value pop(End::Left)
        "ok <value>|nil"
        "Takes the leftmost item of a list"
    Rpop b"rpop" "<key>" "" Short Value pop(End::Right)
        "ok <value>|nil"
        "Takes the rightmost item of a list"
    Llen b"llen" "<key>" "" Short Number length()
        "ok <length>"
        "Counts the items of a list"
    Lrange b"lrange" "<key>" "<start> <stop>" Short Value range()
        "ok <json>|error_too_large"
        "Reads a range of a list; both ends included, negative numbers count from the right"
    Blpop b"blpop" "<key>" "<timeout>" Short Value blocking_pop(End::Left)
        "ok <value>|nil|error_max_keys|error_max_waiters"
        "Takes the leftmost item of a list, waiting up to the timeout for one"
    Brpop b"brpop" "<key>" "<timeout>" Short Value blocking_pop(End::Right)
        "ok <value>|nil|error_max_keys|error_max_waiters"
        "Takes the rightmost item of a list, waiting up to the timeout for one"

    Bwait b"bwait" "<key>" "<count> <timeout>" Short Plain barrier_wait()
        "ok|timeout|error_barrier_count_mismatch|error_max_keys|error_max_waiters"
        "Waits until as many participants have arrived at a barrier"

    Listen b"listen" "<channel or pattern>" "[<group>]" Short Plain listen()
        "ok"
        "Subscribes to signals; a group shares each signal among its members"
    Unlisten b"unlisten" "<channel or pattern>" "[<group>]" Short Plain unlisten()
        "ok"
        "Ends a `listen` with the same pattern and group"
    Signal b"signal" "<channel>" "<payload>" Long Number signal()
        "ok <deliveries>"
        "Sends a payload to everybody who listens"

    Watch b"watch" "<key or pattern>" "" Short Plain watch()
        "ok"
        "Subscribes to changes of keys"
    Unwatch b"unwatch" "<key or pattern>" "" Short Plain unwatch()
        "ok"
        "Ends a `watch` of the same pattern"

    Cancel b"cancel" "_" "<number>" Short Plain cancel()
        "ok"
        "Withdraws a blocked request of this numbered connection"
    Ack b"ack" "_" "<number>" Short Plain acknowledge()
        "ok"
        "Says that all answers up to this number arrived"
    Inspect b"inspect" "<key>" "" Short Value inspect()
        "ok <json>|nil"
        "Describes one key: holders, queue, revision"
    Ls b"ls" "<prefix or _>" "<limit> [<after key>]" Short Value ls()
        "ok <json>"
        "Lists keys in order, with kind, holders and waiters"
    ForceRelease b"force-release" "<key>" "<admin token> <lock|sem> <fence> <reason>" Long Plain force_release()
        "ok"
        "Ends somebody's hold; for administrators"
    EndSession b"end-session" "<session id>" "<admin token> <reason>" Long Plain end_session()
        "ok"
        "Ends somebody's session; for administrators"
    Cluster b"cluster" "<verb>" "<admin token> [<json>]" Long Value cluster()
        "ok <json>"
        "Looks after a cluster: members, policy, snapshots, backups; for administrators"
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_op_once_and_at_its_place() {
        let mut names = BTreeSet::new();
        for (position, spec) in OPS.iter().enumerate() {
            assert_eq!(spec.op as usize, position, "{}", spec.name);
            assert_eq!(Op::parse(spec.name.as_bytes()), Some(spec.op));
            assert_eq!(spec.op.name(), spec.name);
            assert!(names.insert(spec.name), "{} twice", spec.name);
            assert!(!spec.summary.is_empty() && !spec.summary.ends_with('.'), "{}", spec.name);
        }
        assert_eq!(OPS.len(), 59);
    }

    #[test]
    fn names_of_the_specification() {
        let named = "auth ping stats barrier stable-ref l r n e w sl sr sn se sw \
            rl wl rr wr rn wn re we rw ww elect resign observe unobserve incr decr get cset \
            kset kget kdel kcas lpush rpush lpop rpop llen lrange blpop brpop bwait \
            listen unlisten signal watch unwatch hello cancel ack inspect ls";
        for name in named.split_whitespace() {
            assert!(Op::parse(name.as_bytes()).is_some(), "{name}");
        }
    }

    #[test]
    fn no_other_names() {
        for name in [&b""[..], b"L", b"l ", b" l", b"ll", b"zz", b"pin", b"pingg", b"\xff"] {
            assert_eq!(Op::parse(name), None, "{name:?}");
        }
    }

    #[test]
    fn limits_follow_the_value_size() {
        let check = |limit: ArgLimit, value_bytes_max, expected| {
            assert_eq!(limit.bytes_max(value_bytes_max), expected, "{limit:?}");
        };
        check(ArgLimit::Short, 65_533, 256);
        check(ArgLimit::Long, 65_533, 65_536);
        check(ArgLimit::Value, 65_533, 65_533);
        check(ArgLimit::ValueTtl, 65_533, 65_554);
        check(ArgLimit::TwoValues, 65_533, 131_088);
        check(ArgLimit::Value, 1, 256);
        check(ArgLimit::TwoValues, usize::MAX, usize::MAX);
    }
}
