//! Who runs: a server, or several, and how they are named on the command line.

use std::net::{SocketAddr, ToSocketAddrs};
use std::time::Duration;

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
    pub(crate) fn parse<T: Target>(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let first = parts.next().unwrap_or_default();
        let (target, addresses) = first
            .split_once('=')
            .ok_or_else(|| format!("expected TARGET=HOST:PORT in {first:?}"))?;
        let protocol = T::from_str(target, true)?.protocol();
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
pub fn resolve(text: &str) -> Result<SocketAddr, String> {
    text.to_socket_addrs()
        .map_err(|error| format!("{text:?}: {error}"))?
        .next()
        .ok_or_else(|| format!("{text:?} has no address"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Api;

    fn parse(text: &str) -> Result<Side, String> {
        Side::parse::<Api>(text)
    }

    #[test]
    fn whole_side() {
        let side = parse("grpc=127.0.0.1:1+127.0.0.1:2,pid=7,pid=8,name=two").unwrap();
        assert_eq!((side.name.as_str(), side.protocol.name()), ("two", "grpc"));
        assert_eq!(side.servers, ["127.0.0.1:1", "127.0.0.1:2"].map(|at| at.parse().unwrap()));
        assert_eq!(side.pids, [7, 8]);
    }

    #[test]
    fn short_side_is_named_by_its_target() {
        let side = parse("http=127.0.0.1:1").unwrap();
        assert_eq!((side.name.as_str(), side.pids.len()), ("http", 0));
    }

    #[test]
    fn nonsense_is_refused() {
        for text in [
            "dflockd",
            "memcached=127.0.0.1:1",
            "dflockd=x",
            "dflockd=127.0.0.1:1,pid=x",
            "dflockd=127.0.0.1:1,retry-us=10",
        ] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
