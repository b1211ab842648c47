//! The APIs of the server. What all of them need stands here, each thing once: who may use the server, how many may
//! connect, sessions whose requests are futures, and what clients cost. Below are the adapters, one folder for each
//! protocol: bytes in, commands out, outcomes back.

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
