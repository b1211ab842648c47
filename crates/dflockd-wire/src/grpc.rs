//! The gRPC services `dflockd.v1`: messages, clients and servers, made from the files in `proto/dflockd/v1`, where they
//! are described, and the commands that messages stand for.

#![expect(
    unused_qualifications,
    clippy::allow_attributes,
    clippy::allow_attributes_without_reason,
    reason = "made by a program"
)]

mod calls;

pub use calls::{CommandCall, CommandMessage, Head, lasting, space, space_number, token};

tonic::include_proto!("dflockd.v1");

/// All files of `dflockd.v1` as a `google.protobuf.FileDescriptorSet`: what reflection tells.
pub const DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/dflockd.binpb"));
