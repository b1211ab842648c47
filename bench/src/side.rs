//! Who runs: a server, or several, and how they are named on the command line.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

use clap::ValueEnum;

use crate::Target;
use crate::protocol::Protocol;

/// One side of a comparison.
#[derive(Debug, Clone)]
pub(crate) struct Side {
    /// In reports.
    pub(crate) name: String,
    /// What is spoken.
    pub(crate) protocol: &'static dyn Protocol,
    /// Where.
    pub(crate) servers: Vec<SocketAddr>,
    /// The processes behind it, if known.
    pub(crate) pids: Vec<u32>,
    /// Mean pause before a taken lock is tried again, if it differs from the others'.
    pub(crate) retry: Option<Duration>,
}

impl Side {
    /// `TARGET=HOST:PORT[+HOST:PORT…][,pid=PID…][,name=NAME][,retry-us=N]`.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let (target, addresses) = first
            .split_once('=')
            .ok_or_else(|| format!("expected TARGET=HOST:PORT in {first:?}"))?;
        let protocol = Target::from_str(target, true)?.protocol();
        let servers = addresses.split('+').map(resolve).collect::<Result<_, _>>()?;
        let name = protocol.name().to_owned();
        let mut side = Self { name, protocol, servers, pids: Vec::new(), retry: None };
        for part in parts {
            match part.split_once('=') {
                Some(("pid", pid)) => {
                    side.pids.push(pid.parse().map_err(|_| format!("not a process id: {pid:?}"))?);
                }
                Some(("name", name)) => name.clone_into(&mut side.name),
                Some(("retry-us", micros)) if !protocol.queues() => {
                    let micros = micros.parse().map_err(|_| format!("not a number: {micros:?}"))?;
                    side.retry = Some(Duration::from_micros(micros));
                }
                _ => {
                    let known = if protocol.queues() { "" } else { " or retry-us=" };
                    return Err(format!("expected pid= or name={known}, not {part:?}"));
                }
            }
        }
        Ok(side)
    }
}

/// The first address of `host:port`.
pub(crate) fn resolve(text: &str) -> Result<SocketAddr, String> {
    text.to_socket_addrs()
        .map_err(|error| format!("{text:?}: {error}"))?
        .next()
        .ok_or_else(|| format!("{text:?} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_side() {
        let side =
            Side::parse("redis=127.0.0.1:1+127.0.0.1:2,pid=7,pid=8,name=two,retry-us=10").unwrap();
        assert_eq!((side.name.as_str(), side.protocol.name()), ("two", "redis"));
        assert_eq!(side.servers, ["127.0.0.1:1", "127.0.0.1:2"].map(|at| at.parse().unwrap()));
        assert_eq!(side.pids, [7, 8]);
        assert_eq!(side.retry, Some(Duration::from_micros(10)));
    }

    #[test]
    fn short_side_is_named_by_its_target() {
        let side = Side::parse("echo=127.0.0.1:1").unwrap();
        assert_eq!((side.name.as_str(), side.pids.len()), ("echo", 0));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "redis",
            "memcached=127.0.0.1:1",
            "redis=x",
            "redis=127.0.0.1:1,pid=x",
            "dflockd=127.0.0.1:1,retry-us=10",
        ] {
            assert!(Side::parse(text).is_err(), "{text}");
        }
    }
}
