//! The floor: a server that reads the line protocol and answers without deciding anything.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{self, Ipv4Addr, SocketAddr};

use dflockd_bench::lines::Lines;
use dflockd_bench::protocol::{Greeted, Protocol};
use mio::net::{TcpListener, TcpStream};
use mio::{Events, Interest, Poll, Token};

/// A server that says yes to everybody, driven as dflockd is.
#[derive(Debug)]
pub(crate) struct Echo;

impl Protocol for Echo {
    fn name(&self) -> &'static str {
        "echo"
    }

    fn excludes(&self) -> bool {
        false
    }

    fn queues(&self) -> bool {
        false
    }

    fn pipelines(&self) -> bool {
        true
    }

    fn greet(&self, stream: &mut net::TcpStream, lease_s: u64, _mux: bool) -> Greeted {
        Lines.greet(stream, lease_s, false)
    }
}

/// What to serve.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What carries the bytes.
    #[arg(long, value_enum, default_value = "epoll")]
    shell: Shell,
    /// Port on 127.0.0.1; 0 lets the system choose.
    #[arg(long, default_value = "6389")]
    port: u16,
}

#[derive(Debug, Clone, Copy, clap::ValueEnum)]
enum Shell {
    /// One thread and a bare readiness loop.
    Epoll,
    /// A task per connection on tokio's threads.
    Tokio,
}

/// Serves until it is killed; says on stdout where.
pub(crate) fn run(args: &Args) -> io::Result<()> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, args.port));
    match args.shell {
        Shell::Epoll => serve_epoll(address),
        Shell::Tokio => serve_tokio(address),
    }
}

fn announce(address: SocketAddr) -> io::Result<()> {
    writeln!(io::stdout(), "listening on {address}")
}

const GRANT: &[u8] = b"ok 00000000000000010123456789abcdef 33\n";

/// Answers every whole request in `input`; returns how much of it that was.
fn answer(input: &[u8], out: &mut Vec<u8>) -> usize {
    let mut done = 0;
    let mut lines = 0;
    for (place, _) in input.iter().enumerate().filter(|&(_, &byte)| byte == b'\n') {
        lines += 1;
        if lines % 3 == 0 {
            out.extend_from_slice(match input[done] {
                b'l' => GRANT,
                b'n' => b"ok 33\n",
                _ => b"ok\n",
            });
            done = place + 1;
        }
    }
    done
}

struct Peer {
    stream: TcpStream,
    input: Vec<u8>,
    out: Vec<u8>,
}

impl Peer {
    /// Whether it is still there.
    fn serve(&mut self, scratch: &mut [u8]) -> io::Result<bool> {
        loop {
            let length = match self.stream.read(scratch) {
                Ok(0) => return Ok(false),
                Ok(length) => length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) => return Err(error),
            };
            if self.input.is_empty() {
                let done = answer(&scratch[..length], &mut self.out);
                self.input.extend_from_slice(&scratch[done..length]);
            } else {
                self.input.extend_from_slice(&scratch[..length]);
                let done = answer(&self.input, &mut self.out);
                self.input.drain(..done);
            }
            if length < scratch.len() {
                break;
            }
        }
        let mut written = 0;
        while written < self.out.len() {
            match self.stream.write(&self.out[written..]) {
                Ok(length) => written += length,
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.out.drain(..written);
        Ok(true)
    }
}

fn serve_epoll(address: SocketAddr) -> io::Result<()> {
    const LISTENER: Token = Token(usize::MAX);
    let mut poll = Poll::new()?;
    let mut listener = TcpListener::bind(address)?;
    announce(listener.local_addr()?)?;
    poll.registry().register(&mut listener, LISTENER, Interest::READABLE)?;
    let mut events = Events::with_capacity(1024);
    let mut peers: Vec<Option<Peer>> = Vec::new();
    let mut scratch = vec![0; 65_536];
    loop {
        poll.poll(&mut events, None)?;
        for event in &events {
            if event.token() == LISTENER {
                while let Ok((mut stream, _)) = listener.accept() {
                    stream.set_nodelay(true)?;
                    let free = peers.iter().position(Option::is_none).unwrap_or(peers.len());
                    let interest = Interest::READABLE | Interest::WRITABLE;
                    poll.registry().register(&mut stream, Token(free), interest)?;
                    let peer = Some(Peer { stream, input: Vec::new(), out: Vec::new() });
                    if free == peers.len() {
                        peers.push(peer);
                    } else {
                        peers[free] = peer;
                    }
                }
                continue;
            }
            let place = &mut peers[event.token().0];
            if let Some(peer) = place
                && !peer.serve(&mut scratch).unwrap_or(false)
            {
                *place = None;
            }
        }
    }
}

fn serve_tokio(address: SocketAddr) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_io().build()?;
    runtime.block_on(async {
        let listener = tokio::net::TcpListener::bind(address).await?;
        announce(listener.local_addr()?)?;
        loop {
            let (stream, _) = listener.accept().await?;
            stream.set_nodelay(true)?;
            tokio::spawn(serve_peer(stream));
        }
    })
}

async fn serve_peer(mut stream: tokio::net::TcpStream) -> io::Result<()> {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let mut input = vec![0; 8192];
    let mut filled = 0;
    let mut out = Vec::new();
    loop {
        match stream.read(&mut input[filled..]).await? {
            0 => return Ok(()),
            length => filled += length,
        }
        let done = answer(&input[..filled], &mut out);
        input.copy_within(done..filled, 0);
        filled -= done;
        stream.write_all(&out).await?;
        out.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_whole_requests_only() {
        let mut out = Vec::new();
        let input = b"l\nk\n10 10\nr\nk\ntoken\nn\nk\ntoken\nl\nk";
        let done = answer(input, &mut out);
        assert_eq!(&input[done..], b"l\nk");
        assert_eq!(out, [GRANT, b"ok\n", b"ok 33\n"].concat());
    }
}
