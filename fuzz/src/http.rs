//! Members of HTTP requests: nothing makes the checks panic, what they let through keeps the limits of the line
//! protocol and means the same there, and what is refused is explained without showing anything that may be a secret.
//!
//! Input: lines. Each is taken as a part of a path, as every kind of text and as a body.

use dflockd::untrusted::http;
use dflockd_core::Span;
use dflockd_wire::{Command, Frame, Op, Request, SECONDS_MAX, Token, Unit, check, command};

/// More than any seed has, so that a large input does not become slow.
const LINES_MAX: usize = 24;
const KEY_BYTES_MAX: usize = 256;
const REASON_BYTES_MAX: usize = 256;
/// What a refusal may quote of the names in a body, and what it says itself.
const DETAIL_BYTES_MAX: usize = 500;
/// Texts that are shorter may be part of what a refusal says anyway.
const SECRET_BYTES_MIN: usize = 12;

/// Checks each line in every way there is.
pub fn run(data: &[u8]) {
    let mut numbers = Vec::new();
    for line in data.split(|byte| *byte == b'\n').take(LINES_MAX) {
        check_body(line);
        let Ok(text) = std::str::from_utf8(line) else { continue };
        check_key(text);
        check_texts(text);
        numbers.push(http::number(text));
    }
    for pair in numbers.windows(2) {
        check_span(pair[0], pair[1]);
    }
}

fn check_key(segment: &str) {
    let Some(key) = http::key(segment) else { return };
    assert!((1..=KEY_BYTES_MAX).contains(&key.len()), "a key of {} bytes", key.len());
    let read = parse(Op::Get, &key, b"");
    assert!(read.is_some(), "{key:?} is a key of HTTP, but of no line");
    // Encoded in full it is the same one.
    let encoded: String = key.iter().map(|byte| format!("%{byte:02X}")).collect();
    assert_eq!(http::key(&encoded), Some(key), "a key has two meanings");
}

fn check_texts(text: &str) {
    let bytes = text.as_bytes();
    if let Ok(value) = check::value(bytes) {
        assert_eq!(value, bytes, "a value has changed");
        let Some(Command::Push(command::Push { value: again, .. })) =
            parse(Op::Rpush, b"k", bytes).and_then(command_of)
        else {
            panic!("{text:?} is a value of HTTP, but of no line");
        };
        check_same(value, again);
    }
    if let Ok(value) = check::entry(bytes) {
        let Some(Command::KvSet(command::KvSet { value: again, ttl: None, .. })) =
            parse(Op::Kset, b"k", bytes).and_then(command_of)
        else {
            panic!("{text:?} is an entry of HTTP, but of no line");
        };
        check_same(value, again);
    }
    let by_line = bytes.len() <= KEY_BYTES_MAX && parse(Op::Watch, bytes, b"").is_some();
    assert_eq!(check::pattern(bytes).is_ok(), by_line, "{text:?} is a pattern, or is it not");
    let parsed = Token::parse(bytes).filter(|token| *token != Token::NONE);
    assert_eq!(http::token(text), parsed, "{text:?} is a token, or is it not");
    if let Some(number) = http::number(text) {
        let digits = text.trim_start_matches('0');
        let expected = if digits.is_empty() { "0" } else { digits };
        assert_eq!(number.to_string(), expected, "a number has changed");
    }
    if let Ok(reason) = check::reason(text) {
        assert!((1..=REASON_BYTES_MAX).contains(&reason.len()), "of {} bytes", reason.len());
        assert!(!reason.contains(char::is_control), "{reason:?} does not stay on its line");
    }
}

fn check_span(seconds: Option<u64>, millis: Option<u64>) {
    let Some(span) = http::span(seconds, millis) else { return };
    assert!(seconds.is_none() || millis.is_none(), "two times are one");
    assert_eq!(span.is_some(), seconds.is_some() || millis.is_some(), "a time has got lost");
    assert!(span.is_none_or(|span| span <= Span::from_secs(SECONDS_MAX)), "a time is too long");
}

fn check_body(body: &[u8]) {
    match http::members(body) {
        Ok(members) => {
            let printed = serde_json::to_vec(&members).expect("plain data can be written");
            assert_eq!(http::members(&printed), Ok(members), "a body has two meanings");
        }
        Err(detail) => {
            assert!(
                !detail.is_empty() && detail.len() <= DETAIL_BYTES_MAX,
                "{} bytes",
                detail.len()
            );
            if let Ok(value) = serde_json::from_slice(body) {
                check_secrets(&value, &detail, body);
            }
        }
    }
}

/// Panics if a text of a body is shown to whoever sent it, and so to its log. Names of members may be.
pub fn check_secrets(value: &serde_json::Value, detail: &str, body: &[u8]) {
    use serde_json::Value;
    match value {
        Value::String(text) if text.len() >= SECRET_BYTES_MIN => {
            let name = format!("\"{text}\":");
            let is_name = body.windows(name.len()).any(|part| part == name.as_bytes());
            assert!(is_name || !detail.contains(text), "{detail:?} shows what was sent");
        }
        Value::Array(values) => values.iter().for_each(|value| check_secrets(value, detail, body)),
        Value::Object(members) => {
            // A member twice, or a text that is a name as well: then it is the name that is shown.
            for value in members.values() {
                check_secrets(value, detail, body);
            }
        }
        Value::String(_) | Value::Number(_) | Value::Bool(_) | Value::Null => {}
    }
}

/// Panics if a value is not what it was.
pub fn check_same(one: &[u8], other: &[u8]) {
    assert_eq!(one, other, "a value means something else on a line");
}

/// A request of the line protocol with these words; none if they are not one.
fn parse<'a>(op: Op, key: &'a [u8], arg: &'a [u8]) -> Option<Request<'a>> {
    let frame = Frame { number: None, command: op.name().as_bytes(), key, arg };
    Request::parse(op, &frame, Unit::Seconds).ok()
}

fn command_of(request: Request<'_>) -> Option<Command<'_>> {
    if let Request::Command(command) = request { Some(command) } else { None }
}
