//! The gRPC door of the built binary: every method and every refusal, sessions over reconnects and over members, and
//! the same queues as the line protocol's.
//!
//! Clients are those that are made from the `.proto` files. `site.rs` starts servers; the servers and the line-protocol
//! clients are those of the other tests. `transcripts.rs` plays the scripts of the line protocol through gRPC.

#[cfg(test)]
mod access;
#[cfg(test)]
mod audit;
#[cfg(test)]
mod calls;
#[cfg(test)]
mod cluster;
#[cfg(test)]
mod doors;
#[cfg(test)]
mod drain;
#[cfg(test)]
#[path = "../cluster/harness.rs"]
#[expect(dead_code, reason = "shared with the tests of the cluster, which need more of it")]
mod harness;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod operator;
#[cfg(test)]
mod play;
#[cfg(test)]
mod sessions;
#[cfg(test)]
mod site;
#[cfg(test)]
mod streams;
#[cfg(test)]
#[path = "../process/support.rs"]
#[expect(dead_code, reason = "shared with the tests of the process, which need more of it")]
mod support;
#[cfg(test)]
#[path = "../transcript/through.rs"]
mod through;
#[cfg(test)]
#[path = "../transcript/mod.rs"]
#[expect(dead_code, reason = "shared with the transcripts over TCP, which need more of it")]
mod transcript;
#[cfg(test)]
mod transcripts;
#[cfg(test)]
#[path = "../http/wire.rs"]
#[expect(dead_code, reason = "shared with the tests of HTTP, which need more of it")]
mod wire;
