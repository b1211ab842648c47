//! Conversations with a server as text, and the playing of them.
//!
//! The scripts are in `crates/dflockd/tests/scripts`; one line is one step:
//!
//! ```text
//! # a comment
//! == title                     a section begins: a new server
//! flags: --max-locks 2         … with these flags
//! only: process                … and only without sockets; or `tcp`; or `log`, in replicated mode
//! a> l|k|0                     connection a, opened when first named, sends three lines
//! a>> l\nk\n0                  it sends these bytes and nothing else
//! a< ok <T1> 33                the next line it gets; EOF if the server closes
//! a<any watch set k || sig c x the next lines in any order (a push may overtake another kind of push)
//! a<json locks.k.waiters=1     JSON in the next line, see below
//! b-                           nothing has arrived
//! +500ms                       time passes (also +2s)
//! a! close                     the client closes and the server has noticed; also `open`, `half-close`,
//!                              `reset` (gone without a word) and `stall` (it stops reading)
//! ? T1 < T2                    the fence of the first is below that of the second
//! ! terminate                  SIGTERM
//! ```
//!
//! Text has the escapes `\n \r \t \\ \xNN`, `${x*256}` for repetitions and `${T1}` for what was received.
//! In an expected line `<T1>` is a token and `<S1>` a session secret (32 hex), `<F1>` a fence and `<N1>` a
//! number (decimal), the same each time; `<F1>` must be the fence in token `<T1>` if there is one. `<*>` is
//! anything up to the end of the line.
//!
//! JSON checks are `path=value`, `path<=value`, `path>=value` or `!path` (absent), separated by blanks. A
//! path goes by member names, list indices, the `key` or `pattern` of a list item, and `#` for a length.

pub mod list;
pub mod player;
pub mod rest;
pub mod steps;
pub mod tcp;
pub mod through;

use std::time::Duration;

use crate::Heard;

/// What is next on a connection.
pub type Received = Heard<Vec<u8>>;

/// A server that a script talks to. Connections are named by the script and there once opened.
pub trait Server {
    /// A connection is made.
    fn open(&mut self, conn: &str);
    /// The client sends bytes.
    fn send(&mut self, conn: &str, bytes: &[u8]);
    /// The client sends nothing more but reads on.
    fn half_close(&mut self, conn: &str);
    /// The client goes, in an orderly way. Returns when the server has cleaned up.
    fn close(&mut self, conn: &str);
    /// The client vanishes.
    fn reset(&mut self, conn: &str);
    /// The client stops reading.
    fn stall(&mut self, conn: &str);
    /// What comes next; waits for it if time passes by itself.
    fn receive(&mut self, conn: &str) -> Received;
    /// What is there, once everything that was asked before has had its effect.
    fn receive_now(&mut self, conn: &str) -> Received;
    /// Time passes.
    fn pass(&mut self, time: Duration);
    /// Whether time has run so far ahead of the script that something may rightly have happened too soon.
    fn is_late(&self) -> bool;
    /// Asks the server to shut down.
    fn terminate(&mut self);
    /// Panics if the server's state is broken.
    fn check(&mut self);
    /// What the server said about itself.
    fn log(&self) -> Vec<String>;
}
