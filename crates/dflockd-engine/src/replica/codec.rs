//! The byte forms of replicated mode: items of clients, the payload of a log entry, Raft messages, and the frames
//! between nodes. Nothing here knows a socket, a file or what the bytes are good for.
//!
//! What all of them are made of is here; the rest is in `item.rs`, `payload.rs`, `message.rs` and `frame.rs`.
//!
//! Numbers are little-endian and of fixed width, byte strings have a length of 32 bits in front, a flag is a byte that
//! is 0 or 1, and every value has exactly one form. Only what is rare is written by `postcard`:
//! [`Order`](super::types::Order), [`MemberChange`](super::types::MemberChange), the start of a node, what operators
//! send.
//!
//! What stands in the log begins with a version, because it is read by later programs. Frames have none: which form two
//! nodes speak is settled when they connect.
//!
//! A decoder accepts all that its encoder can write, never panics, looks at a size before it allocates, and leaves
//! meaning to others: an entry that some node accepted must not be one that another can not read.

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::version;

pub use self::frame::Frame;
pub use self::item::{put_item, take_item};
pub use self::message::{decode_message, encode_message};
pub use self::payload::{
    Batch, Items, Section, Sections, begin_payload, decode_member_change, encode_member_change,
    put_batch, put_order, sections, stamp_of,
};

mod frame;
mod item;
mod message;
mod payload;
#[cfg(test)]
mod tests;

/// The first form of what stands in the log.
pub const VERSION: u8 = 1;

/// Bytes of a frame.
pub const FRAME_BYTES_MAX: usize = 64 << 20;
/// Bytes of an entry's data, and of its context.
pub const ENTRY_BYTES_MAX: usize = 8 << 20;
/// Bytes of the items that are forwarded together: with all that the leader adds they must fit into an entry.
pub const BATCH_BYTES_MAX: usize = ENTRY_BYTES_MAX / 2;
/// Entries of a message.
pub const ENTRIES_MAX: usize = 65_536;
/// Members named by the conf state of a snapshot.
pub const CONF_IDS_MAX: usize = 1_024;

/// Why bytes can not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They may be well-formed, but a later program wrote them.
    #[error("{}", version::too_new(*.0, version::newest()))]
    Version(u8),
    /// They are damaged, or were never one of these.
    #[error("malformed: {0}")]
    Form(&'static str),
}

const SHORT: Malformed = Malformed::Form("ends too early");
const TRAILING: Malformed = Malformed::Form("goes on behind its end");

/// Something rare as bytes.
#[must_use]
pub fn pack<T: Serialize + ?Sized>(value: &T) -> Vec<u8> {
    postcard::to_allocvec(value).expect("plain data has a form, and memory has no end")
}

/// The reverse of [`pack`].
pub fn unpack<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Malformed> {
    let (value, rest) = unpack_first(bytes)?;
    at_end(rest)?;
    Ok(value)
}

/// Like [`unpack`], with something behind it.
fn unpack_first<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), Malformed> {
    postcard::take_from_bytes(bytes).map_err(|_| Malformed::Form("not in the form of postcard"))
}

/// Both directions of a small enum, from one list of its numbers.
macro_rules! numbered {
    (
        $put:ident, $take:ident, $type:ident { $($variant:ident = $number:literal),+ $(,)? }
        $(local { $($local:ident),+ $(,)? })?
    ) => {
        fn $put(out: &mut Vec<u8>, value: $type) {
            out.push(match value {
                $($type::$variant => $number,)+
                $($($type::$local)|+ => unreachable!("{value:?} does not leave its node"),)?
            });
        }

        fn $take(input: &mut &[u8]) -> Result<$type, Malformed> {
            match take_u8(input)? {
                $($number => Ok($type::$variant),)+
                _ => Err(Malformed::Form(concat!("an unknown ", stringify!($type)))),
            }
        }
    };
}

use numbered;

fn put_bool(out: &mut Vec<u8>, value: bool) {
    out.push(value.into());
}

fn put_u16(out: &mut Vec<u8>, value: u16) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_i64(out: &mut Vec<u8>, value: i64) {
    out.extend_from_slice(&value.to_le_bytes());
}

fn put_option(out: &mut Vec<u8>, value: Option<u64>) {
    put_bool(out, value.is_some());
    if let Some(value) = value {
        put_u64(out, value);
    }
}

fn put_len(out: &mut Vec<u8>, len: usize) {
    put_u32(out, u32::try_from(len).expect("nothing has more than a few megabytes"));
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_len(out, bytes.len());
    out.extend_from_slice(bytes);
}

fn take_array<const N: usize>(input: &mut &[u8]) -> Result<[u8; N], Malformed> {
    let (array, rest) = input.split_first_chunk().ok_or(SHORT)?;
    *input = rest;
    Ok(*array)
}

fn take_u8(input: &mut &[u8]) -> Result<u8, Malformed> {
    take_array(input).map(u8::from_le_bytes)
}

fn take_u16(input: &mut &[u8]) -> Result<u16, Malformed> {
    take_array(input).map(u16::from_le_bytes)
}

fn take_u32(input: &mut &[u8]) -> Result<u32, Malformed> {
    take_array(input).map(u32::from_le_bytes)
}

fn take_u64(input: &mut &[u8]) -> Result<u64, Malformed> {
    take_array(input).map(u64::from_le_bytes)
}

fn take_i64(input: &mut &[u8]) -> Result<i64, Malformed> {
    take_array(input).map(i64::from_le_bytes)
}

fn take_bool(input: &mut &[u8]) -> Result<bool, Malformed> {
    match take_u8(input)? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(Malformed::Form("a flag that is neither 0 nor 1")),
    }
}

fn take_option(input: &mut &[u8]) -> Result<Option<u64>, Malformed> {
    Ok(if take_bool(input)? { Some(take_u64(input)?) } else { None })
}

/// A number of things of at least `bytes_min` each: not more than can still follow.
fn take_len(input: &mut &[u8], max: usize, bytes_min: usize) -> Result<usize, Malformed> {
    let len = usize::try_from(take_u32(input)?).map_err(|_| SHORT)?;
    if len > max {
        return Err(Malformed::Form("too many of something"));
    }
    if len > input.len() / bytes_min {
        return Err(SHORT);
    }
    Ok(len)
}

fn take_bytes<'a>(input: &mut &'a [u8]) -> Result<&'a [u8], Malformed> {
    let len = usize::try_from(take_u32(input)?).map_err(|_| SHORT)?;
    let (bytes, rest) = input.split_at_checked(len).ok_or(SHORT)?;
    *input = rest;
    Ok(bytes)
}

fn at_end(input: &[u8]) -> Result<(), Malformed> {
    if input.is_empty() { Ok(()) } else { Err(TRAILING) }
}
