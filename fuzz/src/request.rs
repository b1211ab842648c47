//! The parsers of the line protocol: nothing makes them panic, and what they accept is printed so that it
//! is read back as the same thing, in either unit, with and without numbers.
//!
//! Input: requests as they are sent, and each of its lines once more as an answer or a push.
//!
//! What does not come back as it was:
//!
//! - A token or group that ends with a CR. `trim_cr` takes the end of a line before `trim` takes the
//!   blanks, so `T CR blank` leaves a CR behind, which then stands at the end of the printed line.
//! - A lease of 0 in an answer: printed as 1, because clients take 0 for no lease at all.
//!
//! Durations of requests are rounded up and cut when printed, but these were parsed: whole units already.

use dflockd_wire::{
    Decoded, Decoder, Frame, OPS, Op, Push, Request, Response, Span, Token, Unit, print_number,
    split_number,
};

const UNITS: [Unit; 2] = [Unit::Seconds, Unit::Millis];
const VALUE_BYTES_MAX: usize = 2_000;
/// More lines than any seed has, so that a large input does not become slow.
const LINES_MAX: usize = 24;

/// Reads everything in `data` in every way there is.
pub fn run(data: &[u8]) {
    for numbered in [false, true] {
        for_each_frame(data, numbered, check_frame);
    }
    for line in data.split(|byte| *byte == b'\n').take(LINES_MAX) {
        check_push(line);
        for unit in UNITS {
            for spec in OPS {
                check_response(spec.op, line, unit);
            }
        }
        if let Some((number, rest)) = split_number(line) {
            let mut printed = Vec::new();
            print_number(number, &mut printed);
            printed.extend_from_slice(rest);
            assert_eq!(split_number(&printed), Some((number, rest)), "a number has changed");
        }
        if let Some(token) = Token::parse(line) {
            assert_eq!(token.text().as_bytes(), line, "a token has two forms");
        }
    }
}

fn for_each_frame(data: &[u8], numbered: bool, mut check: impl FnMut(&Frame<'_>)) {
    let mut decoder = Decoder::new(VALUE_BYTES_MAX);
    decoder.set_numbered(numbered);
    let mut rest = data;
    for _ in 0..LINES_MAX {
        match decoder.decode(rest) {
            Decoded::Frame { frame, used } => {
                check(&frame);
                rest = &rest[used..];
            }
            Decoded::TooLong { used, .. } => rest = &rest[used..],
            Decoded::Incomplete => break,
        }
    }
}

fn check_frame(frame: &Frame<'_>) {
    let Some(op) = Op::parse(frame.command) else { return };
    assert_eq!(op.name().as_bytes(), frame.command, "a command has two names");
    for unit in UNITS {
        match Request::parse(op, frame, unit) {
            Ok(request) => {
                assert!(!format!("{request:?}").is_empty(), "nothing to show");
                check_request(&request, unit, frame.number);
            }
            Err(error) => assert!(!error.text.is_empty(), "no reason given"),
        }
    }
}

fn check_request(request: &Request<'_>, unit: Unit, number: Option<u64>) {
    let mut printed = Vec::new();
    if let Some(number) = number {
        print_number(number, &mut printed);
    }
    request.print(unit, &mut printed);
    if printed.ends_with(b"\r\n") {
        return;
    }
    // A value may be too large for its line once its TTL is written out. The store refuses it anyway.
    let mut decoder = Decoder::new(VALUE_BYTES_MAX + 64);
    decoder.set_numbered(number.is_some());
    let Decoded::Frame { frame, used } = decoder.decode(&printed) else {
        panic!("{request:?} is printed as no frame");
    };
    assert_eq!(used, printed.len(), "{request:?} is printed as more than one frame");
    assert_eq!(frame.number, number, "{request:?} is printed with another number");
    let op = Op::parse(frame.command).expect("a printed command is a command");
    assert_eq!(op, request.op(), "{request:?} is printed as another command");
    let again = Request::parse(op, &frame, unit).expect("a printed request is well-formed");
    check_same(request, &again);
}

/// Panics if a request is not what it was before it was printed.
pub fn check_same(request: &Request<'_>, again: &Request<'_>) {
    assert!(request == again, "{request:?} is read back as {again:?}");
}

fn check_response(op: Op, line: &[u8], unit: Unit) {
    let Some(response) = Response::parse(op, line, unit) else { return };
    let mut printed = Vec::new();
    response.print(unit, Some(7), &mut printed);
    let (number, rest) = split_number(&printed).expect("it was printed with a number");
    assert_eq!(number, 7, "the number of an answer has changed");
    let expected = with_lease(response, unit);
    let again = Response::parse(op, rest, unit);
    assert!(again == Some(expected), "{op:?}: {response:?} is read back as {again:?}");
}

/// The response with the lease that is printed for it.
fn with_lease(response: Response<'_>, unit: Unit) -> Response<'_> {
    let shortest = match unit {
        Unit::Seconds => Span::from_secs(1),
        Unit::Millis => Span::from_millis(1),
    };
    match response {
        Response::Granted { token, lease, fence } => {
            Response::Granted { token, lease: lease.max(shortest), fence }
        }
        Response::Acquired { token, lease, fence } => {
            Response::Acquired { token, lease: lease.max(shortest), fence }
        }
        Response::Renewed { remaining, fence } => {
            Response::Renewed { remaining: remaining.max(shortest), fence }
        }
        Response::Ok
        | Response::Queued
        | Response::Timeout
        | Response::Nil
        | Response::CasConflict
        | Response::Number(_)
        | Response::Value(_)
        | Response::Error(_)
        | Response::NotLeader(_) => response,
    }
}

fn check_push(line: &[u8]) {
    let Some(push) = Push::parse(line) else { return };
    let mut printed = Vec::new();
    push.print(&mut printed);
    assert!(Push::parse(&printed) == Some(push), "{push:?} is read back as something else");
}
