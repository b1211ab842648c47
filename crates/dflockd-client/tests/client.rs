//! The library against servers: the one in the process, the built binary, and imitations of old ones.
//!
//! Every test has servers of its own, on the loopback interface only. `client/proxy.rs` breaks connections.

#[cfg(test)]
mod client {
    mod cancel;
    /// Three real processes.
    mod cluster {
        mod ends;
        mod failover;
        mod moves;
        mod nodes;
        mod seeds;
    }
    mod disconnects;
    mod errors;
    mod exclusion;
    mod fallback;
    mod fencing;
    mod grpc;
    mod guards;
    mod primitives;
    mod proxy;
    mod server;
    mod servers;
    mod tree;
}
