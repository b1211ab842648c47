//! Messages of gRPC calls: any bytes are a message or none, a message that is written again is the same one, and the
//! checks of its fields let through what the line protocol could carry and nothing else.
//!
//! Input: a byte that says which call, then its message.

use dflockd::untrusted::grpc;
use dflockd_core::{Mode, Span};
use dflockd_wire::grpc as message;
use dflockd_wire::{COUNT_MAX, Frame, Op, Request, SECONDS_MAX, TokenText, Unit};
use prost::Message;

const KEY_BYTES_MAX: usize = 256;
const REASON_BYTES_MAX: usize = 256;
const NAME_CHARS_MAX: usize = 64;
const PAGE_MAX: usize = 1_000;

/// Reads the message and checks what is in it.
pub fn run(data: &[u8]) {
    let Some((kind, bytes)) = data.split_first() else { return };
    read(usize::from(*kind) % KINDS.len(), bytes);
}

/// Reads `bytes` as the message of a call. Whether they are one.
pub fn read(kind: usize, bytes: &[u8]) -> bool {
    KINDS[kind].1(bytes)
}

/// Reads bytes as one kind of message and checks it. Whether they are one.
type Reader = fn(&[u8]) -> bool;

/// The calls whose messages have fields to check, by the name of the message.
pub const KINDS: &[(&str, Reader)] = &[
    ("acquire", |bytes| {
        check::<message::AcquireRequest>(bytes, |it| {
            check_call(it.request_id, &it.key);
            check_mode(it.mode, it.limit);
            check_millis(it.lease_ms);
            check_millis(it.wait_ms);
        })
    }),
    ("release", |bytes| {
        check::<message::ReleaseRequest>(bytes, |it| {
            check_call(it.request_id, &it.key);
            check_token(&it.token);
        })
    }),
    ("renew", |bytes| {
        check::<message::RenewRequest>(bytes, |it| {
            check_call(it.request_id, &it.key);
            check_token(&it.token);
            check_millis(it.lease_ms);
        })
    }),
    ("list", |bytes| {
        check::<message::ListRequest>(bytes, |it| {
            if let Some(page) = grpc::page(it.limit) {
                assert!((1..=PAGE_MAX).contains(&page), "a page of {page}");
            }
        })
    }),
    ("set", |bytes| {
        check::<message::SetRequest>(bytes, |it| {
            check_call(it.request_id, &it.key);
            check_value(&it.value);
            check_millis(it.ttl_ms);
        })
    }),
    ("push", |bytes| {
        check::<message::PushRequest>(bytes, |it| {
            check_call(it.request_id, &it.key);
            check_value(&it.item);
        })
    }),
    ("publish", |bytes| {
        check::<message::PublishRequest>(bytes, |it| {
            check_key(&it.channel);
            check_payload(&it.payload);
        })
    }),
    ("subscribe", |bytes| {
        check::<message::SubscribeRequest>(bytes, |it| {
            for subscription in it.add.iter().chain(&it.remove) {
                check_pattern(&subscription.pattern);
                check_group(&subscription.group);
            }
        })
    }),
    ("watch", |bytes| {
        check::<message::WatchRequest>(bytes, |it| {
            for pattern in &it.patterns {
                check_pattern(pattern);
            }
        })
    }),
    ("open", |bytes| {
        check::<message::OpenRequest>(bytes, |it| {
            if let Some(Some(name)) = grpc::client_name(&it.client_name) {
                assert!((1..=NAME_CHARS_MAX).contains(&name.chars().count()), "{name:?}");
                assert!(!name.contains(char::is_control), "{name:?} does not stay on its line");
            }
            check_millis(it.ttl_ms);
        })
    }),
    ("force-release", |bytes| {
        check::<message::ForceReleaseRequest>(bytes, |it| {
            check_key(&it.key);
            check_reason(&it.reason);
        })
    }),
    ("end-session", |bytes| {
        check::<message::EndSessionRequest>(bytes, |it| check_reason(&it.reason))
    }),
];

/// Reads a message, compares it with itself written and read again, and looks at its fields.
fn check<M: Message + Default + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
    fields: impl Fn(&M),
) -> bool {
    let Ok(decoded) = M::decode(bytes) else { return false };
    let written = decoded.encode_to_vec();
    assert_eq!(written.len(), decoded.encoded_len(), "a message is longer than it says");
    let again = M::decode(&*written).expect("a written message can be read");
    check_same(&decoded, &again);
    fields(&decoded);
    true
}

/// Panics if a message is not what it was before it was written.
pub fn check_same<M: Message + PartialEq + std::fmt::Debug>(one: &M, other: &M) {
    assert!(one == other, "{one:?} is read back as {other:?}");
}

fn check_call(request: u64, key: &[u8]) {
    if let Some(number) = grpc::request(request) {
        assert_eq!(number.map_or(0, |number| number.0), request, "a request has another number");
        assert!(request < 1 << 63, "the number can be no other's");
    }
    check_key(key);
}

fn check_key(key: &[u8]) {
    let by_line = key.len() <= KEY_BYTES_MAX && parse(Op::Get, key, b"").is_some();
    assert_eq!(grpc::key(key).is_some(), by_line, "{key:?} is a key, or is it not");
}

fn check_pattern(pattern: &[u8]) {
    let by_line = pattern.len() <= KEY_BYTES_MAX && parse(Op::Watch, pattern, b"").is_some();
    assert_eq!(grpc::pattern(pattern).is_some(), by_line, "{pattern:?} is one, or is it not");
}

/// A group has members from everywhere: what it is called here, it is called on a line.
fn check_group(group: &[u8]) {
    let Some(name) = grpc::group(group) else { return };
    assert!(name.len() <= KEY_BYTES_MAX, "a group of {} bytes", name.len());
    assert!(!name.iter().any(|byte| matches!(byte, b'\r' | b'\n')), "{name:?}");
}

fn check_value(value: &[u8]) {
    if grpc::value(value).is_none() {
        return;
    }
    let Some(Request::Push { value: again, .. }) = parse(Op::Rpush, b"k", value) else {
        panic!("{value:?} is a value of gRPC, but of no line");
    };
    assert_eq!(value, again, "a value means something else on a line");
}

fn check_payload(payload: &[u8]) {
    let Some(payload) = grpc::payload(payload) else { return };
    assert!(!payload.is_empty() && !payload.iter().any(|byte| matches!(byte, b'\r' | b'\n')));
}

fn check_millis(millis: u64) {
    let within = millis <= SECONDS_MAX * 1_000;
    assert_eq!(
        grpc::span(millis),
        within.then_some(Span::from_millis(millis.min(SECONDS_MAX * 1_000)))
    );
}

fn check_mode(mode: i32, limit: u32) {
    if let Some(Mode::Semaphore { limit }) = grpc::mode(mode, limit) {
        assert!((1..=COUNT_MAX).contains(&limit), "a semaphore for {limit}");
    }
}

fn check_token(text: &str) {
    let token = grpc::token(text).map(|token| (token.fence.0, token.salt));
    assert_eq!(token, TokenText::parse(text.as_bytes()), "{text:?} is a token, or is it not");
}

fn check_reason(text: &str) {
    let Some(reason) = grpc::reason(text) else { return };
    assert!((1..=REASON_BYTES_MAX).contains(&reason.len()), "a reason of {} bytes", reason.len());
    assert!(!reason.contains(char::is_control), "{reason:?} does not stay on its line");
}

/// The same as a request of the line protocol.
fn parse<'a>(op: Op, key: &'a [u8], arg: &'a [u8]) -> Option<Request<'a>> {
    let frame = Frame { number: None, command: op.name().as_bytes(), key, arg };
    Request::parse(op, &frame, Unit::Seconds).ok()
}
