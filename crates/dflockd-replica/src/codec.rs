//! The byte forms of replicated mode: items of clients, the payload of a log entry, Raft messages, and the frames
//! between nodes. Nothing here knows a socket, a file or what the bytes are good for.
//!
//! What all of them are made of is here; the rest is in `item.rs`, `payload.rs`, `message.rs` and `frame.rs`.
//!
//! Numbers, flags and byte strings have the form of [`dflockd_core::field`], as the fields of commands do. Only what is
//! rare is written by `postcard`: [`LeaderCommand`](super::types::LeaderCommand),
//! [`MemberChange`](super::types::MemberChange), the start of a node, what operators send.
//!
//! What stands in the log begins with a version, because it is read by later programs. Frames have none: which form two
//! nodes speak is settled when they connect.
//!
//! A decoder accepts all that its encoder can write, never panics, looks at a size before it allocates, and leaves
//! meaning to others: an entry that some node accepted must not be one that another can not read.

use dflockd_core::field::{self, Field};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::version;

pub use self::frame::Frame;
pub use self::item::{put_item, take_item};
pub use self::message::{decode_message, encode_message};
pub use self::payload::{
    Batch, Items, Section, Sections, begin_payload, decode_member_change, encode_member_change,
    put_batch, put_leader_command, sections, stamp_of,
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

impl From<field::Malformed> for Malformed {
    fn from(field::Malformed(form): field::Malformed) -> Self {
        Self::Form(form)
    }
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
            match take::<u8>(input)? {
                $($number => Ok($type::$variant),)+
                _ => Err(Malformed::Form(concat!("an unknown ", stringify!($type)))),
            }
        }
    };
}

use numbered;

fn put_len(out: &mut Vec<u8>, len: usize) {
    u32::try_from(len).expect("nothing has more than a few megabytes").put(out);
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    bytes.put(out);
}

#[inline]
fn take<'a, T: Field<'a>>(input: &mut &'a [u8]) -> Result<T, Malformed> {
    Ok(T::take(input)?)
}

/// A number of things of at least `bytes_min` each: not more than can still follow.
fn take_len(input: &mut &[u8], max: usize, bytes_min: usize) -> Result<usize, Malformed> {
    let len = usize::try_from(take::<u32>(input)?).map_err(|_| SHORT)?;
    if len > max {
        return Err(Malformed::Form("too many of something"));
    }
    if len > input.len() / bytes_min {
        return Err(SHORT);
    }
    Ok(len)
}

fn at_end(input: &[u8]) -> Result<(), Malformed> {
    if input.is_empty() { Ok(()) } else { Err(TRAILING) }
}
