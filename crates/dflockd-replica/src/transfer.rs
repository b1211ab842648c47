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
            tracing::warn!(from, "received snapshot is damaged, dropped");
            return None;
        }
        Some(Complete { header, data, keep_only })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(ms: u64) -> Timestamp {
        Timestamp(0) + Span::from_millis(ms)
    }

    fn data(len: usize) -> Bytes {
        (0..=255).cycle().take(len).collect::<Vec<u8>>().into()
    }

    /// What leaves: member, and what of the snapshot is in it.
    fn send(transfers: &mut Transfers) -> Vec<Frame> {
        let mut outputs = Outputs::default();
        transfers.send(&mut outputs);
        let frame = |outgoing: Outgoing| Frame::decode(outgoing.bytes).expect("it was just made");
        outputs.frames.into_iter().map(frame).collect()
    }

    fn offsets(frames: &[Frame]) -> Vec<u64> {
        let offset = |frame: &Frame| {
            let Frame::Chunk { offset, .. } = frame else { return None };
            Some(*offset)
        };
        frames.iter().filter_map(offset).collect()
    }

    /// Brings frames of member 1 to member 2. Gives what it answers, and the snapshot if it is whole.
    fn receive(
        receiver: &mut Transfers,
        frames: Vec<Frame>,
    ) -> (Vec<(u64, u64)>, Option<Complete>) {
        let mut whole = None;
        for frame in frames {
            let Frame::Chunk { transfer, offset, total, digest, keep_only, header, data } = frame
            else {
                panic!("only pieces are sent")
            };
            let complete =
                receiver.receive(1, transfer, offset, total, digest, keep_only, header, &data);
            whole = complete.or(whole);
        }
        let acks = send(receiver).into_iter().map(|frame| {
            let Frame::ChunkAck { transfer, received } = frame else { panic!("no other answer") };
            (transfer, received)
        });
        (acks.collect(), whole)
    }

    #[test]
    fn a_snapshot_arrives_in_pieces_within_a_window() {
        let (mut sender, mut receiver) = (Transfers::default(), Transfers::default());
        let data = data(6 * CHUNK + 5);
        sender.begin(2, Bytes::from_static(b"header"), data.clone(), false, at(0));
        let pieces = send(&mut sender);
        let chunk = CHUNK as u64;
        assert_eq!(offsets(&pieces), [0, chunk, 2 * chunk, 3 * chunk], "the window");
        assert_eq!(offsets(&send(&mut sender)), [0_u64; 0], "it is full");
        let (acks, whole) = receive(&mut receiver, pieces);
        assert_eq!(acks.last(), Some(&(1, 4 * chunk)));
        assert!(whole.is_none());
        for (transfer, received) in acks {
            assert!(!sender.acknowledged(2, transfer, received, at(1)));
        }
        let pieces = send(&mut sender);
        assert_eq!(offsets(&pieces), [4 * chunk, 5 * chunk, 6 * chunk]);
        let (acks, whole) = receive(&mut receiver, pieces);
        let whole = whole.expect("all of it has come");
        assert!(whole.data == data && *whole.header == *b"header" && !whole.keep_only);
        let done: Vec<bool> = acks
            .into_iter()
            .map(|(transfer, received)| sender.acknowledged(2, transfer, received, at(2)))
            .collect();
        assert_eq!(done, [false, false, true], "Raft is told once");
        assert!(send(&mut sender).is_empty());
    }

    #[test]
    fn a_lost_piece_is_sent_again() {
        let (mut sender, mut receiver) = (Transfers::default(), Transfers::default());
        sender.begin(2, Bytes::new(), data(3 * CHUNK), false, at(0));
        let chunk = CHUNK as u64;
        let mut pieces = send(&mut sender);
        pieces.remove(1);
        let (acks, _) = receive(&mut receiver, pieces);
        assert_eq!(acks, [(1, chunk), (1, chunk)], "what lacks its predecessor is not taken");
        for (transfer, received) in acks {
            assert!(!sender.acknowledged(2, transfer, received, at(0)));
        }
        let again = send(&mut sender);
        assert_eq!(offsets(&again), [chunk, 2 * chunk]);
        drop(again);
        // All of them got lost, so nobody answers.
        assert_eq!(sender.look(at(999)), [0_u64; 0]);
        assert_eq!(offsets(&send(&mut sender)), [0_u64; 0]);
        assert_eq!(sender.look(at(1000)), [0_u64; 0]);
        assert_eq!(offsets(&send(&mut sender)), [chunk, 2 * chunk]);
        assert_eq!(sender.look(at(4999)), [0_u64; 0]);
        assert_eq!(sender.look(at(5000)), [2], "Raft must not wait any longer");
        assert!(send(&mut sender).is_empty());
    }

    #[test]
    fn a_damaged_snapshot_is_not_used() {
        let (mut sender, mut receiver) = (Transfers::default(), Transfers::default());
        sender.begin(2, Bytes::new(), data(10), false, at(0));
        let mut pieces = send(&mut sender);
        let Some(Frame::Chunk { data: piece, .. }) = pieces.first_mut() else { panic!("a piece") };
        *piece = Bytes::from_static(b"0123456789");
        assert!(receive(&mut receiver, pieces).1.is_none());
        assert!(!receiver.is_coming(1), "the next one begins anew");
    }

    #[test]
    fn a_copy_for_keeping_does_not_replace_what_is_needed() {
        let mut sender = Transfers::default();
        sender.begin(2, Bytes::new(), data(10), false, at(0));
        sender.begin(2, Bytes::new(), data(20), true, at(0));
        let [Frame::Chunk { total: 10, keep_only: false, .. }] = &send(&mut sender)[..] else {
            panic!("the one that is needed")
        };
        sender.begin(2, Bytes::new(), data(30), false, at(0));
        let [Frame::Chunk { transfer: 2, total: 30, .. }] = &send(&mut sender)[..] else {
            panic!("a newer one is sent in place of the older")
        };
        assert!(!sender.acknowledged(2, 1, 10, at(0)), "an answer to the older one");
        assert!(!sender.acknowledged(2, 2, 31, at(0)), "more than there is");
        assert!(sender.acknowledged(2, 2, 30, at(0)));
    }
}
