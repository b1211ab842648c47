//! The HTTP API of the built binary: every route and every refusal, sessions, streams, and what hostile clients
//! can do to others.
//!
//! Written from the specification, with an HTTP client of its own (`dflockd_testkit::http`) that can also be slow, rude
//! and wrong. `site.rs` starts servers in each mode. The `tour` of a module goes through what its routes do when all is
//! well; `modes.rs` takes each tour in memory mode, over TLS, on one durable node and through a follower of three.
//! `transcripts.rs` plays the scripts of the line protocol through HTTP.

#![cfg(test)]

mod access;
mod apis;
mod caps;
mod cluster;
mod drain;
mod hostile;
mod http2;
mod inspection;
mod locks;
/// Metrics and traces: after real traffic over all protocols the numbers are right, the text is valid, nothing secret
/// is in it, and spans arrive at a collector.
mod metrics {
    mod calls;
    mod collector;
    mod deploy;
    mod numbers;
    mod text;
    mod traces;
}
mod modes;
mod openapi;
mod origin;
mod play;
mod requests;
mod rights;
mod sessions;
mod site;
mod streams;
mod transcripts;
mod values;
mod vanish;
mod watches;
