//! One connection of the generator: bytes in, bytes out, never blocking once the load runs.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream as BlockingStream};
use std::time::Duration;

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use crate::protocol::{Dialect, Protocol};

/// How long a connection may take to be made and greeted.
const CONNECT_WITHIN: Duration = Duration::from_secs(5);

/// A connection made and greeted, still blocking.
#[derive(Debug)]
pub(crate) struct Greeted {
    /// The socket.
    pub(crate) stream: BlockingStream,
    /// What requests on it need.
    pub(crate) dialect: Box<dyn Dialect>,
}

impl Greeted {
    /// Connects and says what has to be said first.
    pub(crate) fn connect(
        protocol: &dyn Protocol,
        address: SocketAddr,
        lease_s: u64,
        mux: bool,
    ) -> io::Result<Self> {
        let mut stream = connect(address)?;
        let dialect = protocol.greet(&mut stream, lease_s, mux)?;
        Ok(Self { stream, dialect })
    }
}

/// A connection that nothing was said on yet.
pub(crate) fn connect(address: SocketAddr) -> io::Result<BlockingStream> {
    let stream = BlockingStream::connect_timeout(&address, CONNECT_WITHIN)
        .map_err(|error| io::Error::new(error.kind(), format!("{address}: {error}")))?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(CONNECT_WITHIN))?;
    Ok(stream)
}

/// A connection under load.
#[derive(Debug)]
pub(crate) struct Link {
    stream: TcpStream,
    /// What requests on it need.
    pub(crate) dialect: Box<dyn Dialect>,
    /// The beginning of an answer whose end has not come yet.
    partial: Vec<u8>,
    /// Requests not yet written.
    pub(crate) out: Vec<u8>,
}

impl Link {
    /// Takes over a greeted connection and has it watched under `token`.
    pub(crate) fn new(greeted: Greeted, registry: &Registry, token: usize) -> io::Result<Self> {
        greeted.stream.set_nonblocking(true)?;
        let mut stream = TcpStream::from_std(greeted.stream);
        let interest = Interest::READABLE | Interest::WRITABLE;
        registry.register(&mut stream, Token(token), interest)?;
        Ok(Self { stream, dialect: greeted.dialect, partial: Vec::new(), out: Vec::new() })
    }

    /// Reads what is there behind what was left over; returns how much of `scratch` is filled.
    ///
    /// One read: an answer to a closed loop is short. `scratch` filled to the end means that
    /// there may be more and the caller must come again.
    pub(crate) fn receive(&mut self, scratch: &mut [u8]) -> io::Result<usize> {
        let kept = self.partial.len();
        scratch[..kept].copy_from_slice(&self.partial);
        self.partial.clear();
        loop {
            match self.stream.read(&mut scratch[kept..]) {
                Ok(0) => return Err(io::Error::other("the server closed the connection")),
                Ok(length) => return Ok(kept + length),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(kept),
                Err(error) => return Err(error),
            }
        }
    }

    /// Keeps the beginning of an answer for the next [`Self::receive`].
    pub(crate) fn keep(&mut self, partial: &[u8]) {
        self.partial.extend_from_slice(partial);
    }

    /// Writes what the socket takes; the rest goes when it is writable again.
    pub(crate) fn flush(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.out.len() {
            match self.stream.write(&self.out[written..]) {
                Ok(length) => written += length,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
        }
        self.out.drain(..written);
        Ok(())
    }
}
