//! The decoder of lines: however a stream is cut into chunks, the same frames come out, and what has
//! to be kept of it is bounded.
//!
//! Input: a byte of settings, a byte with the number of chunk lengths, the lengths, the stream.

use dflockd_wire::{Decoded, Decoder, LONG_BYTES_MAX, NUMBER_BYTES_MAX, Op, SHORT_BYTES_MAX};

/// Sizes of values to choose from: under, near and over the shortest limit of a line.
const VALUE_BYTES_MAX: [usize; 4] = [0, 250, 300, 1_000];

/// What became of a stream.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Found {
    events: Vec<Event>,
    /// Bytes of a line that is too long and has not ended.
    dropped: usize,
    /// Bytes of the frame in progress, and how many lines of it are complete.
    pending: usize,
    lines: usize,
}

#[derive(Debug, PartialEq, Eq)]
enum Event {
    Frame(Option<u64>, [Vec<u8>; 3]),
    TooLong(usize),
}

#[derive(Clone, Copy, Debug)]
struct Settings {
    numbered: bool,
    /// Numbers begin or end after the first frame.
    switch: bool,
    value_bytes_max: usize,
}

/// Decodes the stream as a whole, byte by byte and in the chunks the input asks for.
pub fn run(data: &[u8]) {
    let [flags, count, rest @ ..] = data else { return };
    let settings = Settings {
        numbered: flags & 1 != 0,
        switch: flags & 2 != 0,
        value_bytes_max: VALUE_BYTES_MAX[usize::from(flags >> 2 & 3)],
    };
    let (lengths, stream) = rest.split_at(usize::from(count & 15).min(rest.len()));
    let whole = decode(stream, &[], settings);
    check_same(&whole, &decode(stream, lengths, settings));
    check_same(&whole, &decode(stream, &[0], settings));
    break_the_contract(stream, lengths, settings);
}

/// Panics if two ways to read one stream differ.
pub fn check_same(whole: &Found, chunked: &Found) {
    assert_eq!(whole, chunked, "chunks matter");
}

/// Decodes a stream without numbers in one chunk.
pub fn decode_plainly(stream: &[u8]) -> Found {
    decode(stream, &[], Settings { numbered: false, switch: false, value_bytes_max: 1_000 })
}

/// Decodes `stream` in chunks of one more than `lengths`, again and again; as a whole without any.
fn decode(stream: &[u8], lengths: &[u8], settings: Settings) -> Found {
    let mut decoder = Decoder::new(settings.value_bytes_max);
    let mut numbered = settings.numbered;
    decoder.set_numbered(numbered);
    let mut found = Found::default();
    let mut input = Vec::new();
    for chunk in cut(stream, lengths) {
        input.extend_from_slice(chunk);
        loop {
            match decoder.decode(&input) {
                Decoded::Frame { frame, used } => {
                    assert!(found.dropped == 0, "a frame in the middle of a line");
                    assert!(used <= input.len(), "more used than there was");
                    assert!(numbered || frame.number.is_none(), "a number nobody asked for");
                    let lines = [frame.command, frame.key, frame.arg];
                    assert!(lines.iter().all(|line| !line.contains(&b'\n')), "an LF in a line");
                    let lines = lines.map(<[u8]>::to_vec);
                    found.events.push(Event::Frame(frame.number, lines));
                    input.drain(..used);
                    if settings.switch && numbered == settings.numbered {
                        numbered = !numbered;
                        decoder.set_numbered(numbered);
                    }
                }
                Decoded::TooLong { used, done } => {
                    assert!(0 < used && used <= input.len(), "no progress");
                    assert!(done || used == input.len(), "a line that is too long is kept");
                    found.dropped += used;
                    if done {
                        found.events.push(Event::TooLong(found.dropped));
                        found.dropped = 0;
                    }
                    input.drain(..used);
                }
                Decoded::Incomplete => break,
            }
        }
        let kept_max = kept_max(&input, settings);
        assert!(input.len() <= kept_max, "{} of {kept_max} bytes kept", input.len());
    }
    found.pending = input.len();
    found.lines = decoder.lines_complete();
    found
}

/// The most bytes of a frame in progress that may have to be kept: two short lines with their ends and
/// as much of the third as its command allows.
fn kept_max(input: &[u8], settings: Settings) -> usize {
    let first = input.split(|byte| *byte == b'\n').next().unwrap_or_default();
    // Looser than the decoder, which knows exactly where the number ends.
    let command = first.rsplit(|byte| *byte == b' ').next().unwrap_or_default();
    let command =
        &command[..command.iter().rposition(|byte| *byte != b'\r').map_or(0, |at| at + 1)];
    let arg_max = Op::parse(command)
        .map_or(SHORT_BYTES_MAX, |op| op.spec().arg_limit.bytes_max(settings.value_bytes_max));
    assert!(arg_max <= LONG_BYTES_MAX, "no limit is larger with such small values");
    SHORT_BYTES_MAX + NUMBER_BYTES_MAX + 1 + SHORT_BYTES_MAX + 1 + arg_max
}

fn cut<'a>(stream: &'a [u8], lengths: &[u8]) -> Vec<&'a [u8]> {
    if lengths.is_empty() {
        return vec![stream];
    }
    let mut chunks = Vec::new();
    let mut rest = stream;
    for length in lengths.iter().cycle() {
        if rest.is_empty() {
            break;
        }
        let (chunk, behind) = rest.split_at((usize::from(*length) + 1).min(rest.len()));
        chunks.push(chunk);
        rest = behind;
    }
    chunks
}

/// Chunks that do not build on each other, which no caller sends: anything but a panic is right.
fn break_the_contract(stream: &[u8], lengths: &[u8], settings: Settings) {
    let mut decoder = Decoder::new(settings.value_bytes_max);
    decoder.set_numbered(settings.numbered);
    for chunk in cut(stream, lengths) {
        decoder.decode(chunk);
    }
}
