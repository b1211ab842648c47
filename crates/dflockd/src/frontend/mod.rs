//! The APIs of the server. What all of them need stands here, each thing once; below are the adapters, one folder for
//! each protocol: bytes in, commands out, outcomes back.
//!
//! What an adapter takes from here, in the order of a connection: `accept` gives it connections within the `caps` of
//! its API, `auth` knows tokens, `admission` whether a request is served here and now. Requests are futures of a
//! `caller`; `sessions` finds it by the id that a request names, and `giveback` takes back what an answer gave that no
//! client took. `budget` and `rate` bound what a client costs, `pool` runs what takes a while, `feed` has the changes
//! of keys. An adapter says refusals in the words of its protocol, and decides none.

pub(crate) mod accept;
pub(crate) mod admission;
pub(crate) mod auth;
pub(crate) mod budget;
pub(crate) mod caller;
pub(crate) mod caps;
pub(crate) mod descriptors;
pub(crate) mod detached;
pub(crate) mod feed;
pub(crate) mod frames;
pub(crate) mod giveback;
pub(crate) mod grpc;
pub(crate) mod http;
pub mod line;
pub(crate) mod pool;
pub(crate) mod rate;
pub(crate) mod sessions;
