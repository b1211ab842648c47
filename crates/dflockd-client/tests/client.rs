//! The library against servers: the one in the process, the built binary, and imitations of old ones.
//!
//! Every test has servers of its own, on the loopback interface only. `client/support.rs` has the servers and
//! the proxy that breaks connections.

#[cfg(test)]
mod client {
    mod cancel;
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
