//! Plays scripts of the line protocol; what a script looks like is told in `transcripts.rs`.

pub(crate) mod in_process;
pub(crate) mod player;
pub(crate) mod rest;
pub(crate) mod script;
pub(crate) mod scripts;
pub(crate) mod tcp;

use std::time::Duration;

/// What is next on a connection.
#[derive(Debug)]
pub(crate) enum Received {
    /// A line without its LF.
    Line(Vec<u8>),
    /// The server closed the connection.
    End,
    Nothing,
}

/// A server that a script talks to. Connections are named by the script and there once opened.
pub(crate) trait Server {
    fn open(&mut self, conn: &str);
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
