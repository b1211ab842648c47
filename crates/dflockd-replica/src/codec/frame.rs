//! Frames: what one node tells another.
//!
//! A frame is a kind (1 byte) and its fields; the connection puts a length in front and seals it (`transport/seal.rs`).
//!
//! | Kind | Frame | Fields |
//! | --- | --- | --- |
//! | 1 | Raft message | cluster time (0 if the sender does not lead), message |
//! | 2 | forward | a batch |
//! | 3 | expect | term, incarnation, the next number |
//! | 4 | piece of a snapshot | transfer, offset, total, SHA-256, whether it is for a witness, message, bytes |
//! | 5 | receipt of a piece | transfer, bytes received |
//! | 6, 7 | admin request, reply | id, `postcard` |
//! | 8 | members, for a new node that has none yet and has to dial them | `postcard` |

use std::fmt;

use bytes::Bytes;
use dflockd_core::Timestamp;
use dflockd_core::field::Field;
use raft::eraftpb::Message;

use super::message::{message_bytes, put_message, take_message};
use super::payload::{Batch, put_batch_body};
use super::{BATCH_BYTES_MAX, FRAME_BYTES_MAX, Malformed, at_end, put_bytes, take};
use crate::types::Incarnation;

/// Every kind of frame, once.
pub(super) mod kind {
    pub(in super::super) const RAFT: u8 = 1;
    pub(in super::super) const FORWARD: u8 = 2;
    pub(in super::super) const EXPECT: u8 = 3;
    pub(in super::super) const CHUNK: u8 = 4;
    pub(in super::super) const CHUNK_ACK: u8 = 5;
    pub(in super::super) const ADMIN: u8 = 6;
    pub(in super::super) const ADMIN_REPLY: u8 = 7;
    pub(in super::super) const MEMBERS: u8 = 8;
}

/// What one node tells another.
#[derive(Clone, PartialEq)]
pub enum Frame {
    /// A message of the Raft group. If it has a snapshot, then without the data.
    Raft {
        /// The time of the cluster, if the sender leads it; else zero.
        time: Timestamp,
        /// The message.
        message: Message,
    },
    /// Items for the leader. Well-formed, if it was decoded.
    Forward(Batch),
    /// The leader tells a node which of its items it wants next.
    Expect {
        /// The term in which the leader leads.
        term: u64,
        /// The incarnation of the node.
        run: Incarnation,
        /// The number of the item.
        seq: u64,
    },
    /// A piece of a snapshot.
    Chunk {
        /// The number of the transfer, which tells several snapshots apart.
        transfer: u64,
        /// Where the piece begins.
        offset: u64,
        /// Bytes of the whole snapshot.
        total: u64,
        /// SHA-256 of the whole snapshot.
        digest: [u8; 32],
        /// Whether the snapshot is for the disk of a witness: to be stored and not restored.
        keep_only: bool,
        /// The message that brings the snapshot, by [`encode_message`](super::encode_message).
        header: Bytes,
        /// The piece.
        data: Bytes,
    },
    /// A snapshot has come so far.
    ChunkAck {
        /// The number of the transfer.
        transfer: u64,
        /// All bytes below are there.
        received: u64,
    },
    /// An operator asks the leader, through another node.
    Admin {
        /// The number of the request, which the reply names.
        id: u64,
        /// The request, packed by [`pack`](super::pack).
        request: Bytes,
    },
    /// What the leader answers.
    AdminReply {
        /// The number of the request.
        id: u64,
        /// The reply, packed by [`pack`](super::pack).
        reply: Bytes,
    },
    /// The leader tells a member that has no state yet whom there is to talk to.
    Members {
        /// The members as the machine has them, packed by [`pack`](super::pack).
        members: Bytes,
    },
}

impl Frame {
    /// The frame as bytes. How they are told from the next frame is up to the connection.
    ///
    /// # Panics
    ///
    /// If a message is one that a node only sends to itself.
    #[must_use]
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(self.bytes());
        match self {
            Self::Raft { time, message } => {
                out.push(kind::RAFT);
                time.0.put(&mut out);
                put_message(&mut out, message);
            }
            Self::Forward(batch) => {
                debug_assert!(batch.bytes.len() <= BATCH_BYTES_MAX, "a batch that nobody takes");
                out.push(kind::FORWARD);
                put_batch_body(&mut out, batch.run, batch.first_seq, batch.count, &batch.bytes);
            }
            Self::Expect { term, run, seq } => {
                out.push(kind::EXPECT);
                term.put(&mut out);
                run.0.put(&mut out);
                seq.put(&mut out);
            }
            Self::Chunk { transfer, offset, total, digest, keep_only, header, data } => {
                out.push(kind::CHUNK);
                transfer.put(&mut out);
                offset.put(&mut out);
                total.put(&mut out);
                out.extend_from_slice(digest);
                keep_only.put(&mut out);
                put_bytes(&mut out, header);
                put_bytes(&mut out, data);
            }
            Self::ChunkAck { transfer, received } => {
                out.push(kind::CHUNK_ACK);
                transfer.put(&mut out);
                received.put(&mut out);
            }
            Self::Admin { id, request } => {
                out.push(kind::ADMIN);
                id.put(&mut out);
                put_bytes(&mut out, request);
            }
            Self::AdminReply { id, reply } => {
                out.push(kind::ADMIN_REPLY);
                id.put(&mut out);
                put_bytes(&mut out, reply);
            }
            Self::Members { members } => {
                out.push(kind::MEMBERS);
                put_bytes(&mut out, members);
            }
        }
        debug_assert!(out.len() <= FRAME_BYTES_MAX, "a frame that nobody takes");
        out.into()
    }

    /// The reverse of [`Frame::encode`]. The frame shares `bytes`.
    pub fn decode(bytes: Bytes) -> Result<Self, Malformed> {
        if bytes.len() > FRAME_BYTES_MAX {
            return Err(Malformed::Form("a frame that is too large"));
        }
        let mut input = &bytes[..];
        let taken = Self::take(&bytes, &mut input)?;
        at_end(input)?;
        Ok(taken)
    }

    fn take(bytes: &Bytes, input: &mut &[u8]) -> Result<Self, Malformed> {
        Ok(match take(input)? {
            kind::RAFT => {
                Self::Raft { time: Timestamp(take(input)?), message: take_message(bytes, input)? }
            }
            kind::FORWARD => Self::Forward(Batch::take(bytes, input)?),
            kind::EXPECT => Self::Expect {
                term: take(input)?,
                run: Incarnation(take(input)?),
                seq: take(input)?,
            },
            kind::CHUNK => Self::Chunk {
                transfer: take(input)?,
                offset: take(input)?,
                total: take(input)?,
                digest: take(input)?,
                keep_only: take(input)?,
                header: bytes.slice_ref(take(input)?),
                data: bytes.slice_ref(take(input)?),
            },
            kind::CHUNK_ACK => Self::ChunkAck { transfer: take(input)?, received: take(input)? },
            kind::ADMIN => Self::Admin { id: take(input)?, request: bytes.slice_ref(take(input)?) },
            kind::ADMIN_REPLY => {
                Self::AdminReply { id: take(input)?, reply: bytes.slice_ref(take(input)?) }
            }
            kind::MEMBERS => Self::Members { members: bytes.slice_ref(take(input)?) },
            _ => return Err(Malformed::Form("an unknown kind of frame")),
        })
    }

    /// About what it takes.
    fn bytes(&self) -> usize {
        const REST: usize = 96;
        REST + match self {
            Self::Raft { message, .. } => message_bytes(message),
            Self::Forward(batch) => batch.bytes.len(),
            Self::Chunk { header, data, .. } => header.len() + data.len(),
            Self::Admin { request: bytes, .. }
            | Self::AdminReply { reply: bytes, .. }
            | Self::Members { members: bytes } => bytes.len(),
            Self::Expect { .. } | Self::ChunkAck { .. } => 0,
        }
    }
}

impl fmt::Debug for Frame {
    /// What a trace needs. Items, entries and snapshots have secrets and values in them.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Raft { time, message: m } => write!(
                f,
                "{:?}({} to {}, term {}, log_term {}, index {}, commit {}, reject {}, {} entries, time {})",
                m.msg_type,
                m.from,
                m.to,
                m.term,
                m.log_term,
                m.index,
                m.commit,
                m.reject,
                m.entries.len(),
                time.0,
            ),
            Self::Forward(batch) => write!(f, "Forward({batch:?})"),
            Self::Expect { term, run, seq } => write!(f, "Expect(term {term}, {run:?}, {seq})"),
            Self::Chunk { transfer, offset, total, keep_only, data, .. } => write!(
                f,
                "Chunk({transfer}: {} bytes at {offset} of {total}, keep_only {keep_only})",
                data.len(),
            ),
            Self::ChunkAck { transfer, received } => write!(f, "ChunkAck({transfer}: {received})"),
            Self::Admin { id, request } => write!(f, "Admin({id}: {} bytes)", request.len()),
            Self::AdminReply { id, reply } => write!(f, "AdminReply({id}: {} bytes)", reply.len()),
            Self::Members { members } => write!(f, "Members({} bytes)", members.len()),
        }
    }
}
