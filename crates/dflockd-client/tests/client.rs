//! The library against servers: the one in the process, the built binary, and imitations of old ones.
//!
//! Every test has servers of its own, on the loopback interface only. `client/support.rs` has the servers and
//! the proxy that breaks connections.

#[cfg(test)]
mod client {
    mod cancel;
    /// Three real processes. `harness.rs` has the members, `proxy.rs` the network between them.
    mod cluster {
        mod ends;
        mod failover;
        mod harness;
        mod moves;
        #[expect(dead_code, reason = "frames are injected in the tests of the server only")]
        #[path = "../../../../dflockd/tests/cluster/proxy.rs"]
        mod proxy;
        mod seeds;
    }
    mod disconnects;
    mod errors;
    mod exclusion;
    mod fallback;
    mod fencing;
    mod guards;
    mod primitives;
    mod servers;
    mod support;
    mod tree;
}
