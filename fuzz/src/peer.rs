//! Frames between nodes: `Frame::decode` says yes or no and nothing else, and what it accepts has the form it came in
//! and no other. A batch that is accepted can be read and cut anywhere.
//!
//! Input: one frame.

use dflockd_replica::codec::{Batch, Frame, Malformed, decode_message, encode_message};

/// Decodes `data`.
pub fn run(data: &[u8]) {
    let frame = match decode(data) {
        Ok(frame) => frame,
        Err(error) => {
            assert!(!error.to_string().is_empty(), "no reason given");
            return;
        }
    };
    assert!(!format!("{frame:?}").is_empty(), "nothing to show");
    check_same(data, &frame.encode());
    match frame {
        Frame::Forward(batch) => check_batch(&batch),
        Frame::Chunk { header, .. } => {
            if let Ok(message) = decode_message(&header) {
                check_same(&header, &encode_message(&message));
            }
        }
        Frame::Raft { .. }
        | Frame::Expect { .. }
        | Frame::ChunkAck { .. }
        | Frame::Admin { .. }
        | Frame::AdminReply { .. }
        | Frame::Members { .. } => {}
    }
}

/// Decodes a frame that is not shared with anybody.
pub fn decode(data: &[u8]) -> Result<Frame, Malformed> {
    Frame::decode(data.to_vec().into())
}

/// Panics if what was read is not written as it was.
pub fn check_same(data: &[u8], again: &[u8]) {
    assert!(data == again, "{data:?} is written as {again:?}");
}

fn check_batch(batch: &Batch) {
    let items: Vec<_> = batch.items().collect();
    assert_eq!(items.len(), usize::from(batch.count), "the wrong number of items");
    assert!(items.iter().all(Result::is_ok), "a malformed item is accepted");
    for n in [0, 1, 2, u64::from(batch.count), u64::MAX] {
        let mut rest = batch.clone();
        rest.skip(n).expect("every item is well-formed");
        let skipped = batch.count - rest.count;
        assert_eq!(u64::from(skipped), n.min(batch.count.into()), "the wrong number is skipped");
        assert_eq!(rest.first_seq, batch.first_seq + u64::from(skipped), "wrong numbers");
        assert!(rest.items().eq(items.iter().skip(skipped.into()).cloned()), "wrong items");
    }
}
