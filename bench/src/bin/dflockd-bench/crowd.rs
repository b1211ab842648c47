//! Slow HTTP clients: connections that say nothing, that never finish a head or a body, and streams nobody
//! reads. What they do to others is measured beside them; this only keeps them going until it is ended.

use std::io::{self, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use dflockd_bench::resolve;

/// How often the slow ones send a byte.
const PAUSE: Duration = Duration::from_millis(500);

/// Where, and how many.
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The HTTP API of a server.
    #[arg(long, value_parser = resolve)]
    server: SocketAddr,
    /// How many connections.
    #[arg(long, default_value = "5000")]
    connections: usize,
}

/// How a client begins, and what it sends from time to time.
const BEGINNINGS: [(&[u8], &[u8]); 4] = [
    (b"", b""),
    (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ", b"x"),
    (
        b"POST /v1/counters/crowd/add HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n",
        b" ",
    ),
    (b"GET /v1/signals?pattern=crowd HTTP/1.1\r\nHost: localhost\r\n\r\n", b""),
];

/// Runs until it is ended.
pub(crate) fn run(args: &Args) -> io::Result<()> {
    let mut clients = Vec::with_capacity(args.connections);
    for number in 0..args.connections {
        clients.push((number, begin(args.server, number)?));
    }
    writeln!(io::stdout(), "{} slow clients", clients.len())?;
    loop {
        for (number, stream) in &mut clients {
            let (_, again) = BEGINNINGS[*number % BEGINNINGS.len()];
            // Who was cut off for being slow comes back.
            if stream.write_all(again).is_err() {
                *stream = begin(args.server, *number)?;
            }
        }
        thread::sleep(PAUSE);
    }
}

fn begin(server: SocketAddr, number: usize) -> io::Result<TcpStream> {
    let mut stream = TcpStream::connect(server)
        .map_err(|error| io::Error::new(error.kind(), format!("{server}: {error}")))?;
    stream.write_all(BEGINNINGS[number % BEGINNINGS.len()].0)?;
    Ok(stream)
}
