//! Messages of gRPC calls: any bytes are a message or none, a message that is written again is the same one, and the
//! checks of its fields let through what the line protocol could carry and nothing else.
//!
//! Input: a byte that says which call, then its message.

use dflockd::untrusted::grpc;
use dflockd_wire::grpc::{self as message, CommandMessage};
use dflockd_wire::{
    Command, Decoded, Decoder, Expect, Frame, Op, Request, SECONDS_MAX, Span, Unit, check as checks,
};
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
    ("acquire", |bytes| check_command::<message::AcquireRequest>(bytes)),
    ("release", |bytes| check_command::<message::ReleaseRequest>(bytes)),
    ("renew", |bytes| check_command::<message::RenewRequest>(bytes)),
    ("list", |bytes| {
        check::<message::ListRequest>(bytes, |it| {
            if let Some(page) = grpc::page(it.limit) {
                assert!((1..=PAGE_MAX).contains(&page), "a page of {page}");
            }
        })
    }),
    ("set", |bytes| check_command::<message::SetRequest>(bytes)),
    ("push", |bytes| check_command::<message::PushRequest>(bytes)),
    ("publish", |bytes| check_command::<message::PublishRequest>(bytes)),
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
            if let Ok(Some(name)) = checks::client_name(&it.client_name) {
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
    ("enqueue", |bytes| check_command::<message::EnqueueRequest>(bytes)),
    ("wait", |bytes| check_command::<message::WaitRequest>(bytes)),
    ("campaign", |bytes| check_command::<message::CampaignRequest>(bytes)),
    ("resign", |bytes| check_command::<message::ResignRequest>(bytes)),
    ("add-counter", |bytes| check_command::<message::AddCounterRequest>(bytes)),
    ("set-counter", |bytes| check_command::<message::SetCounterRequest>(bytes)),
    ("delete", |bytes| check_command::<message::DeleteRequest>(bytes)),
    ("compare-and-set", |bytes| check_command::<message::CompareAndSetRequest>(bytes)),
    ("pop", |bytes| check_command::<message::PopRequest>(bytes)),
    ("barrier-wait", |bytes| check_command::<message::BarrierWaitRequest>(bytes)),
];

/// What a message asks for can be asked for on lines, too, and means the same there.
fn check_command<M: CommandMessage + Message + Default + PartialEq + std::fmt::Debug>(
    bytes: &[u8],
) -> bool {
    check::<M>(bytes, |message| {
        let number = message.head().request_id;
        if let Some(request) = grpc::request(number) {
            assert_eq!(request.map_or(0, |request| request.0), number, "another number");
            assert!(number < 1 << 63, "the number can be no other's");
        }
        let Ok(command) = message.command() else { return };
        if let Command::KvCompareAndSet(cas) = command
            && matches!(cas.expect, Expect::Revision(_))
        {
            return;
        }
        let mut lines = Vec::new();
        Request::Command(command).print(Unit::Millis, &mut lines);
        let decoded = Decoder::new(lines.len()).decode(&lines);
        let Decoded::Frame { frame, used } = decoded else {
            panic!("{command:?} is not one request")
        };
        assert_eq!(used, lines.len(), "{command:?} is more than one request");
        let op = Op::parse(frame.command).expect("a command of the line protocol");
        let read = Request::parse(op, &frame, Unit::Millis);
        assert!(read == Ok(Request::Command(command)), "{command:?} is read as {read:?}");
    })
}

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

fn check_key(key: &[u8]) {
    let by_line = key.len() <= KEY_BYTES_MAX && parse(Op::Get, key, b"").is_some();
    assert_eq!(checks::key(key).is_ok(), by_line, "{key:?} is a key, or is it not");
}

fn check_pattern(pattern: &[u8]) {
    let by_line = pattern.len() <= KEY_BYTES_MAX && parse(Op::Watch, pattern, b"").is_some();
    assert_eq!(checks::pattern(pattern).is_ok(), by_line, "{pattern:?} is one, or is it not");
}

/// A group has members from everywhere: what it is called here, it is called on a line.
fn check_group(group: &[u8]) {
    let Ok(name) = checks::group(group) else { return };
    assert!(name.len() <= KEY_BYTES_MAX, "a group of {} bytes", name.len());
    assert!(!name.iter().any(|byte| matches!(byte, b'\r' | b'\n')), "{name:?}");
}

fn check_millis(millis: u64) {
    let within = millis <= SECONDS_MAX * 1_000;
    assert_eq!(
        checks::millis(millis).ok(),
        within.then_some(Span::from_millis(millis.min(SECONDS_MAX * 1_000)))
    );
}

fn check_reason(text: &str) {
    let Ok(reason) = checks::reason(text) else { return };
    assert!((1..=REASON_BYTES_MAX).contains(&reason.len()), "a reason of {} bytes", reason.len());
    assert!(!reason.contains(char::is_control), "{reason:?} does not stay on its line");
}

/// A request of the line protocol with these words; none if they are not one.
fn parse<'a>(op: Op, key: &'a [u8], arg: &'a [u8]) -> Option<Request<'a>> {
    let frame = Frame { number: None, command: op.name().as_bytes(), key, arg };
    Request::parse(op, &frame, Unit::Seconds).ok()
}
