//! The gRPC API of the built binary: every method and every refusal, sessions over reconnects and over members, and
//! the same queues as the line protocol's.
//!
//! Clients are those that are made from the `.proto` files. `site.rs` starts servers. `transcripts.rs` plays the
//! scripts of the line protocol through gRPC.

#![cfg(test)]

mod access;
mod apis;
mod audit;
mod calls;
mod cluster;
mod drain;
mod limits;
mod operator;
mod play;
mod rights;
mod sessions;
mod site;
mod streams;
mod transcripts;
