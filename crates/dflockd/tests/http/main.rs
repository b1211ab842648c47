//! The HTTP door of the built binary: every route and every refusal, sessions, streams, and what hostile clients
//! can do to others.
//!
//! Written from the specification, with an HTTP client of its own (`wire.rs`) that can also be slow, rude and
//! wrong. `site.rs` starts servers in each mode; the servers and the line-protocol clients are those of the other
//! tests. The `tour` of a module goes through what its routes do when all is well; `modes.rs` takes each tour in
//! memory mode, over TLS, on one durable node and through a follower of three. `transcripts.rs` plays the scripts of
//! the line protocol through HTTP.

#[cfg(test)]
mod access;
#[cfg(test)]
mod caps;
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
mod hostile;
#[cfg(test)]
mod http2;
#[cfg(test)]
mod locks;
#[cfg(test)]
mod look;
#[cfg(test)]
mod modes;
#[cfg(test)]
mod openapi;
#[cfg(test)]
mod origin;
#[cfg(test)]
mod play;
#[cfg(test)]
mod requests;
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
mod values;
#[cfg(test)]
mod vanish;
#[cfg(test)]
mod watches;
#[cfg(test)]
mod wire;
