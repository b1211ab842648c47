//! Snapshots on their way to other members, in pieces, and those that come.

use std::collections::BTreeMap;

use bytes::Bytes;
use dflockd_core::{Span, Timestamp};

use super::codec::Frame;
use super::types::RaftId;
use super::{Outgoing, Outputs, digest_of};

const CHUNK: usize = 1 << 20;
/// Bytes that may be under way without having been acknowledged.
const WINDOW: u64 = 4 << 20;
/// A transfer without progress is given up after this.
const STALLED: Span = Span::from_secs(5);

/// What a replica has under way besides Raft's own messages: snapshots in pieces, and small frames that are no outputs
/// yet.
#[derive(Default)]
pub(super) struct Transfers {
    last: u64,
    out: BTreeMap<RaftId, Sending>,
    /// One from each member at most.
    coming: BTreeMap<RaftId, Coming>,
    /// Small frames for the next [`Transfers::send`].
    frames: Vec<(RaftId, Bytes)>,
}

struct Sending {
    transfer: u64,
    header: Bytes,
    data: Bytes,
    digest: [u8; 32],
    keep_only: bool,
    sent: u64,
    acknowledged: u64,
    progress_at: Timestamp,
}

struct Coming {
    transfer: u64,
    digest: [u8; 32],
    data: Vec<u8>,
}

/// A snapshot that has come as a whole.
pub(super) struct Complete {
    pub(super) header: Bytes,
    pub(super) data: Bytes,
    pub(super) keep_only: bool,
}

impl Transfers {
    /// Sends a snapshot, in place of an older one.
    pub(super) fn begin(
        &mut self,
        to: RaftId,
        header: Bytes,
        data: Bytes,
        keep_only: bool,
        now: Timestamp,
    ) {
        if keep_only && self.out.get(&to).is_some_and(|sending| !sending.keep_only) {
            // The one it needs to go on is on its way.
            return;
        }
        self.last += 1;
        let sending = Sending {
            transfer: self.last,
            header,
            digest: digest_of(&data),
            data,
            keep_only,
            sent: 0,
            acknowledged: 0,
            progress_at: now,
        };
        self.out.insert(to, sending);
    }

    /// The receiver has everything up to `received`. True if that is all of a snapshot that Raft waits for.
    pub(super) fn acknowledged(
        &mut self,
        from: RaftId,
        transfer: u64,
        received: u64,
        now: Timestamp,
    ) -> bool {
        let Some(sending) = self.out.get_mut(&from) else { return false };
        if sending.transfer != transfer || received > sending.data.len() as u64 {
            return false;
        }
        if received > sending.acknowledged {
            sending.acknowledged = received;
            sending.progress_at = now;
        } else {
            // A piece was lost: from there again.
            sending.sent = received;
        }
        if received < sending.data.len() as u64 {
            return false;
        }
        let is_awaited = !sending.keep_only;
        self.out.remove(&from);
        is_awaited
    }

    /// Gives up what makes no progress; the members whose snapshots Raft waited for.
    pub(super) fn look(&mut self, now: Timestamp) -> Vec<RaftId> {
        let stalled = |sending: &Sending| now.since(sending.progress_at) >= STALLED;
        let lost = self.out.iter().filter(|(_, sending)| stalled(sending) && !sending.keep_only);
        let lost = lost.map(|(&to, _)| to).collect();
        self.out.retain(|_, sending| !stalled(sending));
        for sending in self.out.values_mut() {
            if now.since(sending.progress_at) >= Span(STALLED.0 / 5) {
                sending.sent = sending.acknowledged;
            }
        }
        lost
    }

    /// Sends a small frame with the next outputs.
    pub(super) fn push_frame(&mut self, to: RaftId, bytes: Bytes) {
        self.frames.push((to, bytes));
    }

    /// Sends the small frames, and pieces of snapshots as far as the window allows.
    pub(super) fn send(&mut self, outputs: &mut Outputs) {
        for (to, bytes) in self.frames.drain(..) {
            outputs.frames.push(Outgoing { to, bulk: false, bytes });
        }
        for (&to, sending) in &mut self.out {
            let total = sending.data.len() as u64;
            while sending.sent < total && sending.sent - sending.acknowledged < WINDOW {
                let from = usize::try_from(sending.sent).expect("in memory");
                let data = sending.data.slice(from..sending.data.len().min(from + CHUNK));
                let offset = sending.sent;
                sending.sent += data.len() as u64;
                let bytes = Frame::Chunk {
                    transfer: sending.transfer,
                    offset,
                    total,
                    digest: sending.digest,
                    keep_only: sending.keep_only,
                    header: sending.header.clone(),
                    data,
                }
                .encode();
                outputs.frames.push(Outgoing { to, bulk: true, bytes });
            }
        }
    }

    /// Whether pieces of a snapshot have come from this member.
    #[cfg(test)]
    pub(super) fn is_coming(&self, from: RaftId) -> bool {
        self.coming.contains_key(&from)
    }

    /// A piece has come.
    #[expect(clippy::too_many_arguments, reason = "the fields of one frame")]
    pub(super) fn receive(
        &mut self,
        from: RaftId,
        transfer: u64,
        offset: u64,
        total: u64,
        digest: [u8; 32],
        keep_only: bool,
        header: Bytes,
        data: &[u8],
    ) -> Option<Complete> {
        let coming =
            self.coming.entry(from).or_insert(Coming { transfer, digest, data: Vec::new() });
        if coming.transfer != transfer || coming.digest != digest {
            *coming = Coming { transfer, digest, data: Vec::new() };
        }
        if offset == coming.data.len() as u64 && offset + data.len() as u64 <= total {
            coming.data.extend_from_slice(data);
        }
        let received = coming.data.len() as u64;
        let complete = received == total;
        self.frames.push((from, Frame::ChunkAck { transfer, received }.encode()));
        if !complete {
            return None;
        }
        let data = Bytes::from(self.coming.remove(&from).expect("just filled").data);
        if digest_of(&data) != digest {
            tracing::warn!(from, "a snapshot came damaged and is not used");
            return None;
        }
        Some(Complete { header, data, keep_only })
    }
}
