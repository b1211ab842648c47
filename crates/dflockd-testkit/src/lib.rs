//! What the tests of all crates share: real processes, clusters of them, clients of their APIs, and scripts of
//! conversations with them.
//!
//! Only tests depend on it. It knows the wire and the built programs, never the insides of the server: whoever looks at
//! those does it in the tests of that crate. Everything here panics when something is not as a test needs it, with a
//! message that says what.

#![expect(clippy::unwrap_used, reason = "a helper that fails is a test that fails")]

pub mod brake;
pub mod certificates;
pub mod cluster;
pub mod dir;
pub mod eventually;
pub mod forms;
pub mod http;
pub mod identities;
pub mod line;
pub mod noise;
pub mod peers;
pub mod ports;
pub mod process;
pub mod script;

pub use certificates::Pair;
pub use cluster::{Cluster, Node, Turn};
pub use dir::Dir;
pub use eventually::{A_WHILE, LIMIT, eventually, millis};
pub use line::{Client, Heard, fence, granted};
pub use noise::Noise;
pub use ports::{free_address, free_addresses, host};
pub use process::{Process, Ran, Server, command, run};

/// The same work by so many threads at once; gives what each of them came to.
pub fn together<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let work = &work;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..count).map(|number| scope.spawn(move || work(number))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
