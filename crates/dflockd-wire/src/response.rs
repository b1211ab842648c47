//! What the server writes: one answer per request, and pushes in between.

use core::fmt;

use dflockd_api::{ErrorCode, Span, Token};
use memchr::memchr;

use crate::op::{Answer, Op};
use crate::text::{
    Hidden, Shown, Unit, parse_i64, parse_u64, print_i64, print_u64, split_field, trim_cr,
};

pub use crate::line::split_number;

/// The answer to one request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Response<'a> {
    /// `ok`.
    Ok,
    /// `ok <token> <lease> [<fence>]`: the lock is held.
    Granted {
        /// The credential of the hold.
        token: Token,
        /// How long it lasts without renewal.
        lease: Span,
        /// The fence as a field of its own, for those who asked for it.
        fence: Option<u64>,
    },
    /// `acquired <token> <lease> [<fence>]`: the enqueue was granted at once.
    Acquired {
        /// The credential of the hold.
        token: Token,
        /// How long it lasts without renewal.
        lease: Span,
        /// The fence as a field of its own, for those who asked for it.
        fence: Option<u64>,
    },
    /// `ok <remaining> [<fence>]`: the lease was renewed.
    Renewed {
        /// How long it lasts from now on.
        remaining: Span,
        /// The fence of the hold, unchanged, for those who asked for it.
        fence: Option<u64>,
    },
    /// `queued`.
    Queued,
    /// `timeout`.
    Timeout,
    /// `nil`: no such value.
    Nil,
    /// `cas_conflict`: the value is not the expected one.
    CasConflict,
    /// `ok <integer>`.
    Number(i64),
    /// `ok <the rest of the line>`: a value, JSON, words. Just `ok` if empty.
    Value(&'a [u8]),
    /// One of the `error` statuses.
    Error(ErrorCode),
    /// `error_not_leader [<address>]`, with the leader's client address if it is known.
    NotLeader(Option<&'a str>),
}

impl fmt::Debug for Response<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let grant = |f: &mut fmt::Formatter<'_>, name, token, lease, fence| {
            f.debug_struct(name)
                .field("token", token)
                .field("lease", lease)
                .field("fence", fence)
                .finish()
        };
        match self {
            Self::Ok => f.write_str("Ok"),
            Self::Granted { token, lease, fence } => grant(f, "Granted", token, lease, fence),
            Self::Acquired { token, lease, fence } => grant(f, "Acquired", token, lease, fence),
            Self::Renewed { remaining, fence } => f
                .debug_struct("Renewed")
                .field("remaining", remaining)
                .field("fence", fence)
                .finish(),
            Self::Queued => f.write_str("Queued"),
            Self::Timeout => f.write_str("Timeout"),
            Self::Nil => f.write_str("Nil"),
            Self::CasConflict => f.write_str("CasConflict"),
            Self::Number(number) => f.debug_tuple("Number").field(number).finish(),
            Self::Value(value) => f.debug_tuple("Value").field(&Hidden(value)).finish(),
            Self::Error(code) => f.debug_tuple("Error").field(code).finish(),
            Self::NotLeader(leader) => f.debug_tuple("NotLeader").field(leader).finish(),
        }
    }
}

impl<'a> Response<'a> {
    /// Appends the line of this answer, with its LF and with `number` before it if there is one.
    ///
    /// Leases are rounded down to whole units, so that no holder believes in a lease longer than it
    /// is, but never to 0, which clients take for no lease at all. Makes no allocation of its own.
    pub fn print(&self, unit: Unit, number: Option<u64>, out: &mut Vec<u8>) {
        if let Some(number) = number {
            print_number(number, out);
        }
        match *self {
            Self::Ok => out.extend_from_slice(b"ok"),
            Self::Granted { token, lease, fence } => {
                out.extend_from_slice(b"ok ");
                print_grant(token, lease, fence, unit, out);
            }
            Self::Acquired { token, lease, fence } => {
                out.extend_from_slice(b"acquired ");
                print_grant(token, lease, fence, unit, out);
            }
            Self::Renewed { remaining, fence } => {
                out.extend_from_slice(b"ok ");
                print_lease(remaining, fence, unit, out);
            }
            Self::Queued => out.extend_from_slice(QUEUED),
            Self::Timeout => out.extend_from_slice(TIMEOUT),
            Self::Nil => out.extend_from_slice(NIL),
            Self::CasConflict => out.extend_from_slice(CAS_CONFLICT),
            Self::Number(number) => {
                out.extend_from_slice(b"ok ");
                print_i64(number, out);
            }
            // No space before nothing: a client takes `ok ` for a value that went missing.
            Self::Value(b"") => out.extend_from_slice(b"ok"),
            Self::Value(value) => {
                out.extend_from_slice(b"ok ");
                out.extend_from_slice(value);
            }
            Self::Error(code) => out.extend_from_slice(code.text().as_bytes()),
            Self::NotLeader(leader) => {
                out.extend_from_slice(ErrorCode::NotLeader.text().as_bytes());
                if let Some(leader) = leader {
                    out.push(b' ');
                    out.extend_from_slice(leader.as_bytes());
                }
            }
        }
        out.push(b'\n');
    }

    /// Reads the answer to a request `op`; the end of the line may be missing, the number must be.
    ///
    /// `None` for anything a server of this protocol does not answer to `op`, also for status words
    /// that are not known here: what those say about the outcome nobody can tell.
    #[must_use]
    pub fn parse(op: Op, line: &'a [u8], unit: Unit) -> Option<Self> {
        let line = trim_end(line);
        match line {
            QUEUED => return Some(Self::Queued),
            TIMEOUT => return Some(Self::Timeout),
            NIL => return Some(Self::Nil),
            CAS_CONFLICT => return Some(Self::CasConflict),
            _ => (),
        }
        if line.starts_with(b"error") {
            return parse_error(line);
        }
        let (status, rest) = match memchr(b' ', line) {
            Some(space) => (&line[..space], Some(&line[space + 1..])),
            None => (line, None),
        };
        match (op.spec().answer, status, rest) {
            (Answer::Plain, b"ok", None) => Some(Self::Ok),
            (Answer::Grant, b"ok", Some(rest)) => {
                let (token, lease, fence) = parse_grant(rest, unit)?;
                Some(Self::Granted { token, lease, fence })
            }
            (Answer::Enqueue, b"acquired", Some(rest)) => {
                let (token, lease, fence) = parse_grant(rest, unit)?;
                Some(Self::Acquired { token, lease, fence })
            }
            (Answer::Renew, b"ok", Some(rest)) => {
                let (remaining, fence) = parse_lease(rest, unit)?;
                Some(Self::Renewed { remaining, fence })
            }
            (Answer::Number, b"ok", Some(rest)) => parse_i64(rest).map(Self::Number),
            (Answer::Value, b"ok", rest) => Some(Self::Value(rest.unwrap_or_default())),
            _ => None,
        }
    }
}

const QUEUED: &[u8] = b"queued";
const TIMEOUT: &[u8] = b"timeout";
const NIL: &[u8] = b"nil";
const CAS_CONFLICT: &[u8] = b"cas_conflict";

/// Appends `<n> `, which starts every request and every answer of a numbered connection.
pub fn print_number(number: u64, out: &mut Vec<u8>) {
    print_u64(number, out);
    out.push(b' ');
}

fn print_grant(token: Token, lease: Span, fence: Option<u64>, unit: Unit, out: &mut Vec<u8>) {
    out.extend_from_slice(token.text().as_bytes());
    out.push(b' ');
    print_lease(lease, fence, unit, out);
}

fn print_lease(lease: Span, fence: Option<u64>, unit: Unit, out: &mut Vec<u8>) {
    print_u64(unit.count_down(lease).max(1), out);
    if let Some(fence) = fence {
        out.push(b' ');
        print_u64(fence, out);
    }
}

fn parse_grant(fields: &[u8], unit: Unit) -> Option<(Token, Span, Option<u64>)> {
    let (token, rest) = split_field(fields);
    let (lease, fence) = parse_lease(rest, unit)?;
    Some((Token::parse(token)?, lease, fence))
}

fn parse_lease(fields: &[u8], unit: Unit) -> Option<(Span, Option<u64>)> {
    let (lease, rest) = split_field(fields);
    // No lease is longer; whoever says so is not believed.
    let lease = unit.span(parse_u64(lease)?.min(unit.count_max()));
    let fence = match rest {
        b"" => None,
        fence => Some(parse_u64(fence)?),
    };
    Some((lease, fence))
}

fn parse_error(line: &[u8]) -> Option<Response<'_>> {
    let line = core::str::from_utf8(line).ok()?;
    let (status, leader) = match line.split_once(' ') {
        Some((status, leader)) => (status, Some(leader)),
        None => (line, None),
    };
    match (ErrorCode::parse(status)?, leader) {
        (ErrorCode::NotLeader, Some("")) => None,
        (ErrorCode::NotLeader, leader) => Some(Response::NotLeader(leader)),
        (code, None) => Some(Response::Error(code)),
        (_, Some(_)) => None,
    }
}

/// A line nobody asked for just now, on a connection that subscribed to something.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Push<'a> {
    /// `sig <channel> <payload>`: somebody sent a signal.
    Signal {
        /// The channel it was sent to.
        channel: &'a [u8],
        /// What was sent.
        payload: &'a [u8],
    },
    /// `watch <event> <key>`: a key changed.
    Watch {
        /// What happened.
        event: &'a str,
        /// The key.
        key: &'a [u8],
    },
    /// `leader <event> <key>`: an election changed hands.
    Leader {
        /// `elected`, `resigned` or `failover`.
        event: &'a str,
        /// The election.
        key: &'a [u8],
    },
    /// `lost <key> <fence> <reason>`: a hold of this connection ended without its doing.
    Lost {
        /// The lock.
        key: &'a [u8],
        /// Which hold.
        fence: u64,
        /// `expired`, `forced` or `session`.
        reason: &'a str,
    },
}

impl fmt::Debug for Push<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal { channel, payload } => f
                .debug_struct("Signal")
                .field("channel", &Shown(channel))
                .field("payload", &Hidden(payload))
                .finish(),
            Self::Watch { event, key } => {
                f.debug_struct("Watch").field("event", event).field("key", &Shown(key)).finish()
            }
            Self::Leader { event, key } => {
                f.debug_struct("Leader").field("event", event).field("key", &Shown(key)).finish()
            }
            Self::Lost { key, fence, reason } => f
                .debug_struct("Lost")
                .field("key", &Shown(key))
                .field("fence", fence)
                .field("reason", reason)
                .finish(),
        }
    }
}

impl<'a> Push<'a> {
    /// Appends the line of this push, with its LF. Pushes never carry a number.
    pub fn print(&self, out: &mut Vec<u8>) {
        match *self {
            Self::Signal { channel, payload } => print_words([b"sig", channel, payload], out),
            Self::Watch { event, key } => print_words([b"watch", event.as_bytes(), key], out),
            Self::Leader { event, key } => print_words([b"leader", event.as_bytes(), key], out),
            Self::Lost { key, fence, reason } => {
                out.extend_from_slice(b"lost ");
                out.extend_from_slice(key);
                out.push(b' ');
                print_u64(fence, out);
                out.push(b' ');
                out.extend_from_slice(reason.as_bytes());
            }
        }
        out.push(b'\n');
    }

    /// Reads a push; the end of the line may be missing. `None` if the line is no push.
    #[must_use]
    pub fn parse(line: &'a [u8]) -> Option<Self> {
        let (kind, rest) = split_word(trim_end(line))?;
        let (first, second) = match kind {
            b"sig" | b"watch" | b"leader" | b"lost" => split_word(rest)?,
            _ => return None,
        };
        match kind {
            b"sig" => Some(Self::Signal { channel: first, payload: second }),
            b"watch" => Some(Self::Watch { event: parse_word(first)?, key: second }),
            b"leader" => Some(Self::Leader { event: parse_word(first)?, key: second }),
            _ => {
                let (fence, reason) = split_word(second)?;
                let (fence, reason) = (parse_u64(fence)?, parse_word(reason)?);
                Some(Self::Lost { key: first, fence, reason })
            }
        }
    }
}

fn print_words(words: [&[u8]; 3], out: &mut Vec<u8>) {
    let [kind, first, second] = words;
    out.extend_from_slice(kind);
    out.push(b' ');
    out.extend_from_slice(first);
    out.push(b' ');
    out.extend_from_slice(second);
}

/// Splits at the first space; neither side may be empty.
fn split_word(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let space = memchr(b' ', bytes)?;
    let (word, rest) = (&bytes[..space], &bytes[space + 1..]);
    (!word.is_empty() && !rest.is_empty()).then_some((word, rest))
}

fn parse_word(word: &[u8]) -> Option<&str> {
    core::str::from_utf8(word).ok()
}

fn trim_end(line: &[u8]) -> &[u8] {
    trim_cr(line.strip_suffix(b"\n").unwrap_or(line))
}

#[cfg(test)]
mod tests {
    use dflockd_api::Fence;
    use dflockd_api::check::SECONDS_MAX;
    use proptest::prelude::*;

    use super::*;
    use crate::OPS;

    const SECOND: Span = Span::from_secs(1);
    const TOKEN: Token = Token { fence: Fence(255), salt: 0x0123_4567_89ab_cdef };

    fn print(response: &Response<'_>, unit: Unit, number: Option<u64>) -> String {
        let mut out = Vec::new();
        response.print(unit, number, &mut out);
        String::from_utf8(out).expect("tests print text")
    }

    /// Prints as `line` and reads back as itself.
    fn check(op: Op, response: &Response<'_>, line: &str) {
        assert_eq!(print(response, Unit::Seconds, None), format!("{line}\n"));
        assert_eq!(Response::parse(op, line.as_bytes(), Unit::Seconds).as_ref(), Some(response));
        let crlf = format!("{line}\r\n");
        assert_eq!(Response::parse(op, crlf.as_bytes(), Unit::Seconds).as_ref(), Some(response));
    }

    fn check_refused(op: Op, line: &str) {
        assert_eq!(Response::parse(op, line.as_bytes(), Unit::Seconds), None, "{line}");
    }

    #[test]
    fn answers() {
        check(Op::Ping, &Response::Ok, "ok");
        let (token, lease) = (TOKEN, Span::from_secs(33));
        let granted = Response::Granted { token, lease, fence: None };
        check(Op::L, &granted, "ok 00000000000000ff0123456789abcdef 33");
        let granted = Response::Granted { token, lease, fence: Some(255) };
        check(Op::Rl, &granted, "ok 00000000000000ff0123456789abcdef 33 255");
        let acquired = Response::Acquired { token, lease, fence: None };
        check(Op::E, &acquired, "acquired 00000000000000ff0123456789abcdef 33");
        let acquired = Response::Acquired { token, lease, fence: Some(u64::MAX) };
        check(
            Op::We,
            &acquired,
            "acquired 00000000000000ff0123456789abcdef 33 18446744073709551615",
        );
        check(Op::N, &Response::Renewed { remaining: Span::from_secs(60), fence: None }, "ok 60");
        check(
            Op::Rn,
            &Response::Renewed { remaining: Span::from_secs(60), fence: Some(9) },
            "ok 60 9",
        );
        check(Op::Se, &Response::Queued, "queued");
        check(Op::W, &Response::Timeout, "timeout");
        check(Op::Lpop, &Response::Nil, "nil");
        check(Op::Kcas, &Response::CasConflict, "cas_conflict");
        check(Op::Decr, &Response::Number(-2), "ok -2");
        check(Op::Kget, &Response::Value(b"hello  world "), "ok hello  world ");
        check(Op::Hello, &Response::Value(b""), "ok");
        check(Op::Lrange, &Response::Value(br#"["a","b"]"#), r#"ok ["a","b"]"#);
        check(Op::L, &Response::Error(ErrorCode::LimitMismatch), "error_limit_mismatch");
        check(Op::L, &Response::NotLeader(None), "error_not_leader");
        check(Op::L, &Response::NotLeader(Some("10.0.0.1:6388")), "error_not_leader 10.0.0.1:6388");
    }

    #[test]
    fn lines_no_server_writes() {
        for line in ["", "ok", "ok ", "ok T 33", "acquired", "OK", "okay", "error_new", "error x"] {
            check_refused(Op::L, line);
        }
        check_refused(Op::L, "acquired 00000000000000ff0123456789abcdef 33");
        check_refused(Op::L, "ok 00000000000000ff0123456789abcdef");
        check_refused(Op::L, "ok 00000000000000ff0123456789abcdef 33 1 2");
        check_refused(Op::L, "ok 00000000000000ff0123456789abcdef 33 -1");
        check_refused(Op::Ping, "ok 1");
        check_refused(Op::Incr, "ok 1 2");
        check_refused(Op::N, "ok -1");
        check_refused(Op::L, "error_not_leader ");
    }

    #[test]
    fn leases_are_rounded_down_but_not_to_nothing() {
        let renewed = |lease| Response::Renewed { remaining: lease, fence: None };
        let millis = Span::from_millis;
        assert_eq!(print(&renewed(millis(1_999)), Unit::Seconds, None), "ok 1\n");
        assert_eq!(print(&renewed(millis(10)), Unit::Seconds, None), "ok 1\n");
        assert_eq!(print(&renewed(millis(10)), Unit::Millis, None), "ok 10\n");
        assert_eq!(print(&renewed(Span::ZERO), Unit::Millis, None), "ok 1\n");
    }

    #[test]
    fn numbers() {
        assert_eq!(print(&Response::Ok, Unit::Seconds, Some(7)), "7 ok\n");
        assert_eq!(split_number(b"7 ok"), Some((7, &b"ok"[..])));
        assert_eq!(split_number(b"7 ok  x"), Some((7, &b"ok  x"[..])));
        for line in [&b"ok"[..], b"sig a b", b"7", b" 7 ok", b"0 ok", b""] {
            assert_eq!(split_number(line), None, "{:?}", Shown(line));
        }
    }

    #[test]
    fn debug_output_hides_secrets() {
        let granted = Response::Granted { token: TOKEN, lease: SECOND, fence: None };
        assert!(!format!("{granted:?}").contains("0123456789abcdef"));
        assert!(!format!("{:?}", Response::Value(b"secret")).contains("secret"));
        let push = Push::Signal { channel: b"a", payload: b"secret" };
        assert!(!format!("{push:?}").contains("secret"));
    }

    fn check_push(push: Push<'_>, line: &str) {
        let mut out = Vec::new();
        push.print(&mut out);
        assert_eq!(out, format!("{line}\n").as_bytes());
        assert_eq!(Push::parse(&out), Some(push));
        assert_eq!(Push::parse(line.as_bytes()), Some(push));
    }

    #[test]
    fn pushes() {
        check_push(
            Push::Signal { channel: b"a.b", payload: b" hi  there " },
            "sig a.b  hi  there ",
        );
        check_push(Push::Watch { event: "acquire", key: b"k" }, "watch acquire k");
        check_push(Push::Leader { event: "failover", key: b"k" }, "leader failover k");
        let lost = Push::Lost { key: b"k", fence: u64::MAX, reason: "expired" };
        check_push(lost, "lost k 18446744073709551615 expired");
        for line in [
            "",
            "ok",
            "sig",
            "sig a",
            "sig a ",
            "sig  x",
            "signal a b",
            "lost k 1",
            "lost k x y",
            "watch k",
        ] {
            assert_eq!(Push::parse(line.as_bytes()), None, "{line}");
        }
    }

    fn unit() -> impl Strategy<Value = Unit> {
        prop_oneof![Just(Unit::Seconds), Just(Unit::Millis)]
    }

    proptest! {
        #[test]
        fn answers_round_trip(
            fence: u64,
            with_fence: bool,
            lease in 1..=SECONDS_MAX,
            number: i64,
            request in 1..=i64::MAX.unsigned_abs(),
            value in "[^\r\n]{0,40}",
            unit in unit(),
        ) {
            let token = Token { fence: Fence(fence), salt: lease };
            let lease = unit.span(lease);
            let fence = with_fence.then_some(fence);
            for (op, response) in [
                (Op::L, Response::Granted { token, lease, fence }),
                (Op::Se, Response::Acquired { token, lease, fence }),
                (Op::Wn, Response::Renewed { remaining: lease, fence }),
                (Op::Incr, Response::Number(number)),
                (Op::Kget, Response::Value(value.as_bytes())),
            ] {
                let mut out = Vec::new();
                response.print(unit, Some(request), &mut out);
                let (n, line) = split_number(&out).expect("printed with a number");
                prop_assert_eq!(n, request);
                prop_assert!(Response::parse(op, line, unit) == Some(response), "{:?}", out);
            }
        }

        #[test]
        fn pushes_round_trip(
            key in "[^ \t\r\n]{1,20}", payload in "[^\r\n]{1,40}", event in "[a-z]{1,8}",
            fence: u64,
        ) {
            let key = key.as_bytes();
            for push in [
                Push::Signal { channel: key, payload: payload.as_bytes() },
                Push::Watch { event: &event, key },
                Push::Leader { event: &event, key },
                Push::Lost { key, fence, reason: &event },
            ] {
                let mut out = Vec::new();
                push.print(&mut out);
                prop_assert!(Push::parse(&out) == Some(push), "{:?}", out);
            }
        }

        #[test]
        fn random_lines_never_panic(
            start in "(ok|acquired|error|error_not_leader|sig|lost|watch|)[ ]?",
            line in proptest::collection::vec(any::<u8>(), 0..60),
            op in 0..OPS.len(),
        ) {
            let line = [start.as_bytes(), &line].concat();
            let _ = Response::parse(OPS[op].op, &line, Unit::Seconds);
            let _ = Push::parse(&line);
            let _ = split_number(&line);
        }
    }
}
